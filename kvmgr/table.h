/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_TABLE_H
#define KVF_KVMGR_TABLE_H

/**
 * @file
 * Block tables by ordinal, which of their entries travel, and how two sides' entries meet.
 * An entry keeps its index: a result is pairs, never a shortened list. Source: docs/placement.md
 * "Ordinals", "Selection", "Pairing".
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/capacity.h"
#include "kvmgr/layout.h"
#include "kvmgr/window.h"

/** One block that travels. */
typedef struct kvf_pair {
    int64_t ordinal;
    int32_t source;      /**< slot, or -1 in a one-sided selection of the other side */
    int32_t destination; /**< slot, or -1 likewise */
} kvf_pair_t;

/** A side's share of a context-parallel request: it holds ordinals i with i mod size = rank. */
typedef struct kvf_cp {
    int64_t size; /**< 0 and 1 both mean: not split */
    int64_t rank;
} kvf_cp_t;

/** Which ordinals of one layer group a transfer wants. */
typedef struct kvf_wanted {
    int64_t prompt_blocks;
    kvf_span_t stale;
    int64_t from;     /**< floor(C / t); prompt_blocks when C = P */
    kvf_cp_t context; /**< checked, size >= 1 */
    kvf_cp_t generation;
    kvf_cp_t shared; /**< what both ranks hold, as one rank's share; size 0: nothing */
} kvf_wanted_t;

/**
 * @param lengths           The request's numbers.
 * @param tokens_per_block  > 0.
 * @param window, sinks     The group's; window 0 = none.
 * @param cached_tokens     C: what the receiver holds, 0 <= C <= P.
 * @param context, generation  Sizes and ranks, 0 <= rank < size.
 * @param[out] wanted_p     The rule for kvf_wanted_next() and the rest.
 * @return KVF_OK, or KVF_ERR_INVALID (the text names the number).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_wanted_init(const kvf_lengths_t *lengths, int64_t tokens_per_block,
                                       int64_t window, int64_t sinks, int64_t cached_tokens,
                                       kvf_cp_t context, kvf_cp_t generation,
                                       kvf_wanted_t *wanted_p, kvf_detail_t *detail);

/** @return What is live on one side, cached or not: for kvf_table_check() and kvf_select().
 *  @thread any  @cost O(1) */
kvf_wanted_t kvf_wanted_live(const kvf_wanted_t *wanted, bool is_source);

/** @return The smallest ordinal >= ordinal that both ranks hold; some do. @thread any  @cost O(1)
 */
static inline int64_t kvf_wanted_align(const kvf_wanted_t *wanted, int64_t ordinal) {
    if (wanted->shared.size == 1) {
        return ordinal;
    }
    int64_t past = (ordinal - wanted->shared.rank) % wanted->shared.size;
    return past > 0 ? ordinal - past + wanted->shared.size : ordinal - past;
}

/** @return The smallest wanted ordinal >= ordinal, or prompt_blocks when there is none.
 *  @thread any  @cost O(1) */
static inline int64_t kvf_wanted_next(const kvf_wanted_t *wanted, int64_t ordinal) {
    int64_t next = ordinal > wanted->from ? ordinal : wanted->from;
    if (next >= wanted->prompt_blocks || wanted->shared.size == 0) {
        return wanted->prompt_blocks;
    }
    next = kvf_wanted_align(wanted, next);
    if (kvf_span_has(wanted->stale, next)) {
        next = kvf_wanted_align(wanted, wanted->stale.end);
    }
    return next < wanted->prompt_blocks ? next : wanted->prompt_blocks;
}

/** @return How many ordinals are wanted. @thread any  @cost O(1) */
int64_t kvf_wanted_count(const kvf_wanted_t *wanted);

/**
 * Check a table against its request: slots >= -1, no slot bound to two live ordinals.
 *
 * @param live   kvf_wanted_live() of that side (stale entries, and other ranks', may dangle).
 * @param side, group  For the text.
 * @return KVF_OK, KVF_ERR_INVALID, KVF_ERR_NO_MEMORY (one scratch array).
 * @thread any  @cost O(blocks)
 */
KVF_CHECK kvf_status_t kvf_table_check(const kvf_table_t *table, const kvf_wanted_t *live,
                                       const char *side, const char *group,
                                       const kvf_alloc_t *alloc, kvf_detail_t *detail);

/**
 * One side's selection: live ordinals that are bound, ascending. (Cached tokens do not matter
 * here.)
 *
 * @param live         kvf_wanted_live() of that side.
 * @param is_source    Which field of the pairs gets the slot; the other one becomes -1.
 * @param[out] pairs   Room for kvf_wanted_count(live) pairs.
 * @return How many were written.
 * @thread any  @cost O(live blocks), no allocation
 */
int64_t kvf_select(const kvf_table_t *table, const kvf_wanted_t *live, bool is_source,
                   kvf_pair_t *pairs);

/** What pairing found. */
typedef struct kvf_pairing {
    int64_t n_pairs;
    int64_t n_missing_source;
    int64_t n_missing_destination;
} kvf_pairing_t;

/**
 * Pair two sides by ordinal. A live ordinal below `from` (cached) that is unbound at the receiver
 * is missing there too. Nothing is refused here: the caller decides by what is missing (strict or
 * skip).
 *
 * @param[out] pairs                NULL to count only, or room for kvf_wanted_count() pairs.
 * @param[out] missing_source       NULL, or room for kvf_wanted_count() ordinals.
 * @param[out] missing_destination  NULL, or room for all live ordinals.
 * @thread any  @cost O(live blocks), no allocation
 */
kvf_pairing_t kvf_pair_tables(const kvf_table_t *source, const kvf_table_t *destination,
                              const kvf_wanted_t *wanted, kvf_pair_t *pairs,
                              int64_t *missing_source, int64_t *missing_destination);

#endif
