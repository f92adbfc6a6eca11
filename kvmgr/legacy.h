/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_LEGACY_H
#define KVF_KVMGR_LEGACY_H

/**
 * @file
 * Lists of block ids from managers that cannot give ordinals, turned into tables by ordinal. The
 * only place where a position comes from a length; nothing else may depend on it, so that it can be
 * deleted one day. Source: docs/placement.md "Legacy lists".
 */

#include "kvmgr/capacity.h"
#include "kvmgr/window.h"

/** A list of block ids, taken before the first generated token was appended. Borrowed memory. */
typedef struct kvf_legacy_list {
    const int32_t *ids; /**< >= 0 */
    int64_t n_ids;
    int64_t front_removed; /**< blocks removed in front, whose ids dangle; meaningful when
                              has_front_removed */
    bool has_front_removed;
} kvf_legacy_list_t;

/** Which part of a list is which part of the table: `count` entries from `entry` on are the
 * ordinals from `ordinal` on. */
typedef struct kvf_legacy_run {
    int64_t entry;
    int64_t ordinal;
    int64_t count;
} kvf_legacy_run_t;

/**
 * Find the ordinals of a list: as a chain when it has a front counter or its group no window, else
 * as a list of the resident blocks. A resident list that is short in front and also carries scratch
 * cannot be told from a whole one.
 *
 * @param counts         The side's.
 * @param window, sinks  The group's; window 0 = none.
 * @param stale          The group's dead ordinals.
 * @param[out] run_p     Untouched on error.
 * @return KVF_OK, KVF_ERR_INVALID (a negative id or count; a resident list of a group with sinks),
 * or KVF_ERR_COUNT_MISMATCH (more blocks than the request can explain; the text names the numbers).
 * @thread any  @cost O(ids), no allocation
 */
KVF_CHECK kvf_status_t kvf_legacy_locate(const kvf_legacy_list_t *list,
                                         const kvf_block_counts_t *counts, int64_t window,
                                         int64_t sinks, kvf_span_t stale, kvf_legacy_run_t *run_p,
                                         kvf_detail_t *detail);

/** @return Entries of the table that a run fills: what is behind them is unbound. @thread any */
static inline int64_t kvf_legacy_table_blocks(const kvf_legacy_run_t *run) {
    return run->ordinal + run->count;
}

/**
 * Write the table by ordinal.
 *
 * @param[out] slots  Room for kvf_legacy_table_blocks(run).
 * @thread any  @cost O(table blocks), no allocation
 */
void kvf_legacy_fill(const kvf_legacy_list_t *list, const kvf_legacy_run_t *run, int32_t *slots);

#endif
