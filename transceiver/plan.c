/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

kvf_status_t kvf_plan_init(kvf_plan_t *plan, const kvf_layout_t *layout, const kvf_wanted_t *wanted,
                           const kvf_alloc_t *alloc) {
    *plan = (kvf_plan_t){.alloc = alloc, .layout = layout};
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        kvf_plan_group_t *group = &plan->groups[g];
        size_t n = (size_t)wanted[g].prompt_blocks;
        group->wanted = wanted[g];
        group->destination = kvf_realloc(alloc, NULL, n, sizeof(*group->destination));
        group->generations = kvf_calloc(alloc, n, sizeof(*group->generations));
        if (group->destination == NULL || group->generations == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        memset(group->destination, 0xff, n * sizeof(*group->destination)); /* -1 */
    }
    return KVF_OK;
}

void kvf_plan_cleanup(kvf_plan_t *plan) {
    for (uint32_t g = 0; plan->layout != NULL && g < plan->layout->n_groups; g++) {
        kvf_free(plan->alloc, plan->groups[g].destination);
        kvf_free(plan->alloc, plan->groups[g].generations);
        kvf_free(plan->alloc, plan->groups[g].pairs);
    }
    if (plan->alloc != NULL) {
        kvf_free(plan->alloc, plan->missing);
    }
    *plan = (kvf_plan_t){0};
}

kvf_status_t kvf_plan_grant(kvf_plan_t *plan, const Kvf__Wire__Grant *grant, const int64_t *n_pages,
                            kvf_detail_t *detail) {
    if (grant->group_idx >= plan->layout->n_groups) {
        return kvf_fail(detail, KVF_ERR_INVALID, "a grant for layer group %" PRIu32 " of %" PRIu32,
                        grant->group_idx, plan->layout->n_groups);
    }
    kvf_plan_group_t *group = &plan->groups[grant->group_idx];
    const char *name = plan->layout->groups[grant->group_idx].name;
    for (size_t i = 0; i < grant->n_ordinals; i++) {
        int64_t ordinal = (int64_t)grant->ordinals[i];
        if (ordinal >= group->wanted.prompt_blocks ||
            kvf_wanted_next(&group->wanted, ordinal) != ordinal) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s: ordinal %" PRId64 " is granted but not wanted", name,
                            ordinal);
        }
        if (grant->slots[i] >= n_pages[grant->group_idx]) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s: slot %" PRIu32 " lies outside a region of %" PRId64 " pages",
                            name, grant->slots[i], n_pages[grant->group_idx]);
        }
        if (group->destination[ordinal] != -1) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s: ordinal %" PRId64 " is granted twice", name, ordinal);
        }
        group->destination[ordinal] = (int32_t)grant->slots[i];
        group->generations[ordinal] = grant->generations[i];
    }
    return KVF_OK;
}

void kvf_missing_text(char *text, size_t cap, const kvf_layout_t *layout, const char *side,
                      const kvf_page_ref_t *missing, size_t n_missing) {
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < n_missing && used < cap; i++) {
        bool fresh = i == 0 || missing[i].group_idx != missing[i - 1].group_idx;
        int n;
        if (used + 80 > cap) {
            (void)snprintf(text + used, cap - used, " and %zu more", n_missing - i);
            return;
        }
        n = fresh ? snprintf(text + used, cap - used, "%s%s missing in group %s: %" PRId64,
                             i == 0 ? "" : "; ", side, layout->groups[missing[i].group_idx].name,
                             missing[i].ordinal)
                  : snprintf(text + used, cap - used, ", %" PRId64, missing[i].ordinal);
        used += n > 0 ? (size_t)n : 0;
    }
}

kvf_status_t kvf_plan_pair(kvf_plan_t *plan, const kvf_table_t *tables, bool skip,
                           kvf_detail_t *detail) {
    const kvf_layout_t *layout = plan->layout;
    kvf_status_t status = KVF_OK;
    int64_t *lack_source = NULL, *lack_destination = NULL;
    int64_t max_blocks = 0, n_lack_destination = 0;
    kvf_page_ref_t first_lack = {0};

    for (uint32_t g = 0; g < layout->n_groups; g++) {
        max_blocks = plan->groups[g].wanted.prompt_blocks > max_blocks
                         ? plan->groups[g].wanted.prompt_blocks
                         : max_blocks;
    }
    lack_source = kvf_realloc(plan->alloc, NULL, (size_t)max_blocks, sizeof(*lack_source));
    lack_destination =
        kvf_realloc(plan->alloc, NULL, (size_t)max_blocks, sizeof(*lack_destination));
    if (lack_source == NULL || lack_destination == NULL) {
        status = kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a plan of %" PRId64 " blocks",
                          max_blocks);
        goto out;
    }
    for (uint32_t g = 0; g < layout->n_groups && status == KVF_OK; g++) {
        kvf_plan_group_t *group = &plan->groups[g];
        kvf_table_t destination = {group->destination, group->wanted.prompt_blocks};
        int64_t n_wanted = kvf_wanted_count(&group->wanted);
        status = kvf_table_check(&destination, &group->wanted, "destination",
                                 layout->groups[g].name, plan->alloc, detail);
        if (status != KVF_OK || n_wanted == 0) {
            continue;
        }
        /* Cached blocks are not on the wire; the receiver has checked that it holds them. */
        int64_t cached =
            group->wanted.from < destination.n_blocks ? group->wanted.from : destination.n_blocks;
        memset(group->destination, 0, (size_t)cached * sizeof(*group->destination));
        group->pairs = kvf_realloc(plan->alloc, NULL, (size_t)n_wanted, sizeof(*group->pairs));
        if (group->pairs == NULL) {
            status =
                kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for %" PRId64 " pairs", n_wanted);
            continue;
        }
        kvf_pairing_t found = kvf_pair_tables(&tables[g], &destination, &group->wanted,
                                              group->pairs, lack_source, lack_destination);
        group->n_pairs = found.n_pairs;
        plan->n_pairs += (uint64_t)found.n_pairs;
        if (found.n_missing_destination > 0) {
            first_lack =
                n_lack_destination == 0 ? (kvf_page_ref_t){g, lack_destination[0], -1} : first_lack;
            n_lack_destination += found.n_missing_destination;
        }
        if (found.n_missing_source > 0) {
            size_t n = plan->n_missing + (size_t)found.n_missing_source;
            kvf_page_ref_t *grown = kvf_realloc(plan->alloc, plan->missing, n, sizeof(*grown));
            if (grown == NULL) {
                status = kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for %zu missing blocks", n);
                continue;
            }
            plan->missing = grown;
            for (int64_t i = 0; i < found.n_missing_source; i++) {
                plan->missing[plan->n_missing++] = (kvf_page_ref_t){g, lack_source[i], -1};
            }
        }
    }
    if (status == KVF_OK && !skip && plan->n_missing > 0) {
        char text[KVF_DETAIL_BYTES];
        kvf_missing_text(text, sizeof(text), layout, "source", plan->missing, plan->n_missing);
        status = kvf_fail(detail, KVF_ERR_UNCOVERED, "%s", text);
    } else if (status == KVF_OK && !skip && n_lack_destination > 0) {
        status = kvf_fail(detail, KVF_ERR_UNCOVERED,
                          "destination missing in group %s: %" PRId64 " (%" PRId64
                          " blocks in all were not granted)",
                          layout->groups[first_lack.group_idx].name, first_lack.ordinal,
                          n_lack_destination);
    }
out:
    kvf_free(plan->alloc, lack_source);
    kvf_free(plan->alloc, lack_destination);
    return status;
}

bool kvf_plan_next(const kvf_plan_t *plan, uint32_t layer_first, uint32_t layer_end,
                   kvf_plan_cursor_t *cursor, kvf_piece_t *piece_p, int32_t *source_p) {
    for (; cursor->group_idx < plan->layout->n_groups; cursor->group_idx++, cursor->pair_idx = 0) {
        const kvf_layer_group_t *shape = &plan->layout->groups[cursor->group_idx];
        const kvf_plan_group_t *group = &plan->groups[cursor->group_idx];
        uint32_t first, end;
        kvf_group_layer_span(shape, layer_first, layer_end, &first, &end);
        if (first == end || cursor->pair_idx >= group->n_pairs) {
            continue;
        }
        const kvf_pair_t *pair = &group->pairs[cursor->pair_idx++];
        uint64_t layer_bytes = kvf_group_layer_bytes(shape);
        *piece_p = (kvf_piece_t){
            .offset = first * layer_bytes,
            .bytes = (end - first) * layer_bytes,
            .ordinal = pair->ordinal,
            .generation = group->generations[pair->ordinal],
            .group_idx = cursor->group_idx,
            .slot = pair->destination,
        };
        *source_p = pair->source;
        return true;
    }
    return false;
}
