/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_SOURCE_H
#define KVF_KVMGR_SOURCE_H

/**
 * @file
 * Table sources: what any block manager says about the blocks of one request, and how that becomes
 * a table by ordinal. An engine implements this interface over its own manager; the sequence
 * manager does (kvf_source_of_seq()). Source: docs/placement.md "Table sources".
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/capacity.h"
#include "kvmgr/layout.h"
#include "kvmgr/seq.h"

/** One request of a manager. What the functions give is borrowed until the manager's next change.
 */
typedef struct kvf_source {
    const void *ctx; /**< the manager's own, borrowed */
    /** Whether get_block_ordinals is there. Else the table comes from a list of ids
     * (kvmgr/legacy_source.h), if there is a right way at all. */
    bool exposes_block_ordinals;
    /** @return Entry i is the slot that holds tokens [i*t, (i+1)*t), or -1. */
    kvf_table_t (*get_block_ordinals)(const void *ctx, uint32_t group_idx);
    /** @return The ids of the request's blocks, taken before the first generated token is appended.
     */
    kvf_table_t (*get_block_ids)(const void *ctx, uint32_t group_idx);
    /** @return How many blocks in front of the list were removed, whose ids dangle; -1 when it
     * keeps no such count. */
    int64_t (*front_removed)(const void *ctx, uint32_t group_idx);
} kvf_source_t;

/** @return A sequence as a source, valid as long as the sequence. */
kvf_source_t kvf_source_of_seq(const kvf_seq_t *seq);

/** A table by ordinal. */
typedef struct kvf_source_table {
    kvf_table_t table;
    int32_t *own_slots; /**< NULL: the table is the manager's own memory */
} kvf_source_table_t;

/**
 * The table of one layer group of a request.
 *
 * @param group            The group of that index: a list of ids is understood by its window.
 * @param lengths          The request's, for a list of ids: its length is explained by them.
 * @param include_drafts   The side's.
 * @param[out] table_p     kvf_source_table_cleanup() it; borrows from the manager.
 * @return KVF_OK; without ordinals also KVF_ERR_INVALID, KVF_ERR_COUNT_MISMATCH
 * (kvf_legacy_locate()) and KVF_ERR_NO_MEMORY.
 * @cost O(1) with ordinals, else O(blocks)
 */
KVF_CHECK kvf_status_t kvf_source_table(const kvf_source_t *source, uint32_t group_idx,
                                        const kvf_layer_group_t *group,
                                        const kvf_lengths_t *lengths, bool include_drafts,
                                        const kvf_alloc_t *alloc, kvf_source_table_t *table_p,
                                        kvf_detail_t *detail);

/** Free what the table does not borrow. @param alloc  What it was made with. */
void kvf_source_table_cleanup(const kvf_alloc_t *alloc, kvf_source_table_t *table);

#endif
