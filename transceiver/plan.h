/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PLAN_H
#define KVF_PLAN_H

/**
 * @file
 * The plan of a transfer at the side that moves: what the receiver granted, paired by ordinal with
 * what the source has, and cut into pieces layer range by layer range. Pure; one thread.
 */

#include "kvmgr/table.h"
#include "proto/message.h"
#include "transceiver/kvferry.h"
#include "transceiver/mover/mover.h"

typedef struct kvf_plan_group {
    kvf_wanted_t wanted;
    int32_t *destination;  /**< by ordinal, prompt_blocks entries, -1 = not granted */
    uint64_t *generations; /**< likewise */
    kvf_pair_t *pairs;
    int64_t n_pairs;
} kvf_plan_group_t;

typedef struct kvf_plan {
    const kvf_alloc_t *alloc;
    const kvf_layout_t *layout; /**< borrowed */
    kvf_plan_group_t groups[KVF_MAX_GROUPS];
    kvf_page_ref_t *missing; /**< wanted, but unbound at the source */
    size_t n_missing;
    uint64_t n_pairs; /**< over all groups */
} kvf_plan_t;

/** Where cutting stands inside one layer range. */
typedef struct kvf_plan_cursor {
    uint32_t group_idx;
    int64_t pair_idx;
} kvf_plan_cursor_t;

/**
 * Begin a plan: nothing is granted yet.
 *
 * @param wanted     One per group of the layout.
 * @param[out] plan  kvf_plan_cleanup() it, also after an error.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_plan_init(kvf_plan_t *plan, const kvf_layout_t *layout,
                                     const kvf_wanted_t *wanted, const kvf_alloc_t *alloc);

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
 * Pair what was granted with the source's tables.
 *
 * @param tables  One per group.
 * @param skip    Leave out what is missing (plan->missing lists what the source lacks) instead of
 * refusing.
 * @return KVF_OK; KVF_ERR_UNCOVERED (ordinals named per group and side); KVF_ERR_INVALID (a slot
 * granted for two ordinals); KVF_ERR_NO_MEMORY.
 * @cost O(blocks), a few allocations per group
 */
KVF_CHECK kvf_status_t kvf_plan_pair(kvf_plan_t *plan, const kvf_table_t *tables, bool skip,
                                     kvf_detail_t *detail);

/**
 * Cut the next piece of a layer range: one block's layers of one group, consecutive in the slot.
 *
 * @param layer_first, layer_end  Global layer ids.
 * @param[in,out] cursor  Zeroed at the start of a range.
 * @param[out] piece_p    All but source and digest.
 * @param[out] source_p   The source slot.
 * @return Whether there was one.
 * @cost O(1), no allocation
 */
bool kvf_plan_next(const kvf_plan_t *plan, uint32_t layer_first, uint32_t layer_end,
                   kvf_plan_cursor_t *cursor, kvf_piece_t *piece_p, int32_t *source_p);

/** Name missing ordinals per group: "group swa: 3, 4, 9 and 2 more". @param side  "source" |
 * "destination". */
void kvf_missing_text(char *text, size_t cap, const kvf_layout_t *layout, const char *side,
                      const kvf_page_ref_t *missing, size_t n_missing);

#endif
