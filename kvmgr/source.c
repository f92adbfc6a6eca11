/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/source.h"

#include "kvmgr/legacy_source.h"

static kvf_table_t ordinals_of_seq(const void *ctx, uint32_t group_idx) {
    return kvf_seq_table(ctx, group_idx);
}

kvf_source_t kvf_source_of_seq(const kvf_seq_t *seq) {
    return (kvf_source_t){
        .ctx = seq, .exposes_block_ordinals = true, .get_block_ordinals = ordinals_of_seq};
}

kvf_status_t kvf_source_table(const kvf_source_t *source, uint32_t group_idx,
                              const kvf_layer_group_t *group, const kvf_lengths_t *lengths,
                              bool include_drafts, const kvf_alloc_t *alloc,
                              kvf_source_table_t *table_p, kvf_detail_t *detail) {
    if (source->exposes_block_ordinals) {
        *table_p = (kvf_source_table_t){source->get_block_ordinals(source->ctx, group_idx), NULL};
        return KVF_OK;
    }
    return kvf_legacy_source_table(source, group_idx, group, lengths, include_drafts, alloc,
                                   table_p, detail);
}

void kvf_source_table_cleanup(const kvf_alloc_t *alloc, kvf_source_table_t *table) {
    kvf_free(alloc, table->own_slots);
    *table = (kvf_source_table_t){{NULL, 0}, NULL};
}
