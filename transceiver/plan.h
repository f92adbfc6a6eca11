/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PLAN_H
#define KVF_PLAN_H

/**
 * @file
 * The plan of a transfer at the side that moves: which pages the receiver granted, by ordinal, and
 * the pieces that a part of the prompt brings to them, layer range by layer range. The source's
 * pages may become known while the transfer runs: each part is paired by ordinal when it is cut.
 * Pure; one thread.
 */

#include "kvmgr/table.h"
#include "proto/message.h"
#include "transceiver/kvferry.h"
#include "transceiver/mover/mover.h"

typedef struct kvf_plan_group {
    kvf_wanted_t wanted;
    int32_t *destination;  /**< by ordinal, prompt_blocks entries, -1 = not granted */
    uint64_t *generations; /**< likewise; NULL: of no interest */
} kvf_plan_group_t;

typedef struct kvf_plan {
    const kvf_alloc_t *alloc;
    const kvf_layout_t *layout; /**< borrowed */
    int64_t prompt_tokens;
    kvf_plan_group_t groups[KVF_MAX_GROUPS];
    uint64_t n_pages; /**< granted, over all groups: just these are written */
} kvf_plan_t;

/** What became final at once: of the layers [layer_first, layer_end) the blocks that are whole with
 * the tokens [0, token_end) and were not with [0, token_first). */
typedef struct kvf_plan_part {
    uint32_t layer_first; /**< global ids */
    uint32_t layer_end;
    int64_t token_first;
    int64_t token_end;
    uint64_t *digests; /**< the caller's */
} kvf_plan_part_t;

/** Where cutting stands inside one part. */
typedef struct kvf_plan_cursor {
    uint32_t group_idx;
    bool begun; /**< what follows is about this group */
    int64_t ordinal, ordinal_end;
    uint64_t offset, bytes; /**< of the part's layers in a slot */
} kvf_plan_cursor_t;

/** @return How many blocks hold nothing but tokens of [0, tokens). The prompt's last block needs no
 * more than the prompt's end. @cost O(1) */
int64_t kvf_plan_whole_blocks(int64_t tokens, int64_t prompt_tokens, int64_t tokens_per_block);

/**
 * Begin a plan: nothing is granted yet.
 *
 * @param wanted         One per group of the layout.
 * @param prompt_tokens  The length that `wanted` was made for.
 * @param[out] plan      kvf_plan_cleanup() it, also after an error.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_plan_init(kvf_plan_t *plan, const kvf_layout_t *layout,
                                     const kvf_wanted_t *wanted, int64_t prompt_tokens,
                                     const kvf_alloc_t *alloc);

/** Free what it holds; a zeroed plan is allowed. */
void kvf_plan_cleanup(kvf_plan_t *plan);

/**
 * Take some of the receiver's grants.
 *
 * @param grant    A checked message.
 * @param n_pages  Pages of the receiver's regions, by group.
 * @return KVF_OK, or KVF_ERR_INVALID: an ordinal that is not wanted, a slot outside the region, an
 * ordinal twice.
 */
KVF_CHECK kvf_status_t kvf_plan_grant(kvf_plan_t *plan, const Kvf__Wire__Grant *grant,
                                      const int64_t *n_pages, kvf_detail_t *detail);

/**
 * The grants are complete: check and count them.
 *
 * @param skip  What was not granted is left out, instead of refused.
 * @return KVF_OK; KVF_ERR_UNCOVERED (the text names group and ordinal); KVF_ERR_INVALID (a slot
 * granted for two ordinals); KVF_ERR_NO_MEMORY.
 * @cost O(blocks), an allocation per group
 */
KVF_CHECK kvf_status_t kvf_plan_close(kvf_plan_t *plan, bool skip, kvf_detail_t *detail);

/**
 * Cut the next piece of a part: one block's layers of one group, consecutive in the slot.
 *
 * @param sources  By group the source's slots by ordinal; what the part covers and the plan wants
 *                 is bound.
 * @param[in,out] cursor  Zeroed at the start of a part.
 * @param[out] piece_p    All but source and digest.
 * @param[out] source_p   The source slot.
 * @return Whether there was one.
 * @cost O(1), no allocation; blocks that were not granted add up
 */
bool kvf_plan_next(const kvf_plan_t *plan, int32_t *const *sources, const kvf_plan_part_t *part,
                   kvf_plan_cursor_t *cursor, kvf_piece_t *piece_p, int32_t *source_p);

/** @return The bytes of all pieces of a part. @cost O(blocks), no allocation */
uint64_t kvf_plan_bytes(const kvf_plan_t *plan, const kvf_plan_part_t *part);

/** Name missing ordinals per group: "group swa: 3, 4, 9 and 2 more". @param side  "source" |
 * "destination". */
void kvf_missing_text(char *text, size_t cap, const kvf_layout_t *layout, const char *side,
                      const kvf_page_ref_t *missing, size_t n_missing);

#endif
