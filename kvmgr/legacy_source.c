/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/legacy_source.h"

static kvf_table_t ids_of(const void *ctx, uint32_t group_idx) {
    const kvf_legacy_list_t *lists = ctx;
    return (kvf_table_t){lists[group_idx].ids, lists[group_idx].n_ids};
}

static int64_t removed_of(const void *ctx, uint32_t group_idx) {
    const kvf_legacy_list_t *lists = ctx;
    return lists[group_idx].has_front_removed ? lists[group_idx].front_removed : -1;
}

kvf_source_t kvf_source_of_lists(const kvf_legacy_list_t *lists) {
    return (kvf_source_t){.ctx = lists, .get_block_ids = ids_of, .front_removed = removed_of};
}

kvf_status_t kvf_legacy_source_table(const kvf_source_t *source, uint32_t group_idx,
                                     const kvf_layer_group_t *group, const kvf_lengths_t *lengths,
                                     bool include_drafts, const kvf_alloc_t *alloc,
                                     kvf_source_table_t *table_p, kvf_detail_t *detail) {
    kvf_block_counts_t counts;
    kvf_status_t status =
        kvf_get_block_counts(lengths, include_drafts, group->tokens_per_block, &counts, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_table_t ids = source->get_block_ids(source->ctx, group_idx);
    int64_t removed = source->front_removed(source->ctx, group_idx);
    kvf_legacy_list_t list = {.ids = ids.slots,
                              .n_ids = ids.n_blocks,
                              .front_removed = removed,
                              .has_front_removed = removed != -1};
    kvf_span_t stale = kvf_stale_span(kvf_prompt_tokens(lengths), group->tokens_per_block,
                                      group->window, group->sinks);
    kvf_legacy_run_t run;
    status = kvf_legacy_locate(&list, &counts, group->window, group->sinks, stale, &run, detail);
    if (status != KVF_OK) {
        return status;
    }
    int64_t n_blocks = kvf_legacy_table_blocks(&run);
    int32_t *slots = NULL;
    if (n_blocks > 0) {
        slots = kvf_realloc(alloc, NULL, (size_t)n_blocks, sizeof(*slots));
        if (slots == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the table of group %s",
                            group->name);
        }
        kvf_legacy_fill(&list, &run, slots);
    }
    *table_p = (kvf_source_table_t){{slots, n_blocks}, slots};
    return KVF_OK;
}
