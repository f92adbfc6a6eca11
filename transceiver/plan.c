/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/plan.h"

#include "kvmgr/base/mutant.h"
#include "kvmgr/base/size.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

int64_t kvf_plan_whole_blocks(int64_t tokens, int64_t prompt_tokens, int64_t tokens_per_block) {
    return tokens == prompt_tokens ? kvf_div_ceil(tokens, tokens_per_block)
                                   : tokens / tokens_per_block + KVF_MUTANT(ready_too_much);
}

kvf_status_t kvf_plan_init(kvf_plan_t *plan, const kvf_layout_t *layout, const kvf_wanted_t *wanted,
                           int64_t prompt_tokens, const kvf_alloc_t *alloc) {
    *plan = (kvf_plan_t){.alloc = alloc, .layout = layout, .prompt_tokens = prompt_tokens};
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

kvf_status_t kvf_plan_close(kvf_plan_t *plan, bool skip, kvf_detail_t *detail) {
    const kvf_layout_t *layout = plan->layout;
    kvf_page_ref_t first_lack = {0};
    int64_t n_lack = 0;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_plan_group_t *group = &plan->groups[g];
        const kvf_wanted_t *wanted = &group->wanted;
        const kvf_table_t destination = {group->destination, wanted->prompt_blocks};
        kvf_status_t status = kvf_table_check(&destination, wanted, "destination",
                                              layout->groups[g].name, plan->alloc, detail);
        if (status != KVF_OK) {
            return status;
        }
        for (int64_t o = kvf_wanted_next(wanted, 0); o < wanted->prompt_blocks;
             o = kvf_wanted_next(wanted, o + 1)) {
            if (group->destination[o] >= 0) {
                plan->n_pages++;
            } else if (n_lack++ == 0) {
                first_lack = (kvf_page_ref_t){g, o, -1};
            }
        }
    }
    if (n_lack > 0 && !skip) {
        return kvf_fail(detail, KVF_ERR_UNCOVERED,
                        "destination missing in group %s: %" PRId64 " (%" PRId64
                        " blocks in all were not granted)",
                        layout->groups[first_lack.group_idx].name, first_lack.ordinal, n_lack);
    }
    return KVF_OK;
}

/* What the part takes of the cursor's group: once for all its blocks. */
static void begin_group(const kvf_plan_t *plan, const kvf_plan_part_t *part,
                        kvf_plan_cursor_t *cursor) {
    const kvf_layer_group_t *shape = &plan->layout->groups[cursor->group_idx];
    int64_t t = shape->tokens_per_block;
    uint64_t layer_bytes = kvf_group_layer_bytes(shape);
    uint32_t first_idx, end_idx;
    kvf_group_layer_span(shape, part->layer_first, part->layer_end, &first_idx, &end_idx);
    cursor->begun = true;
    cursor->ordinal = kvf_plan_whole_blocks(part->token_first, plan->prompt_tokens, t);
    cursor->ordinal_end =
        first_idx == end_idx ? 0 : kvf_plan_whole_blocks(part->token_end, plan->prompt_tokens, t);
    cursor->offset = first_idx * layer_bytes;
    cursor->bytes = (end_idx - first_idx) * layer_bytes;
}

uint64_t kvf_plan_bytes(const kvf_plan_t *plan, const kvf_plan_part_t *part) {
    kvf_plan_cursor_t cursor = {0};
    uint64_t bytes = 0;
    for (; cursor.group_idx < plan->layout->n_groups; cursor.group_idx++) {
        const kvf_plan_group_t *group = &plan->groups[cursor.group_idx];
        begin_group(plan, part, &cursor);
        for (int64_t o = kvf_wanted_next(&group->wanted, cursor.ordinal); o < cursor.ordinal_end;
             o = kvf_wanted_next(&group->wanted, o + 1)) {
            bytes += group->destination[o] < 0 ? 0 : cursor.bytes;
        }
    }
    return bytes;
}

bool kvf_plan_next(const kvf_plan_t *plan, int32_t *const *sources, const kvf_plan_part_t *part,
                   kvf_plan_cursor_t *cursor, kvf_piece_t *piece_p, int32_t *source_p) {
    for (; cursor->group_idx < plan->layout->n_groups; cursor->group_idx++, cursor->begun = false) {
        const kvf_plan_group_t *group = &plan->groups[cursor->group_idx];
        if (!cursor->begun) {
            begin_group(plan, part, cursor);
        }
        int64_t end = cursor->ordinal_end, o = kvf_wanted_next(&group->wanted, cursor->ordinal);
        while (o < end && group->destination[o] < 0) { /* skipped */
            o = kvf_wanted_next(&group->wanted, o + 1);
        }
        if (o >= end) {
            continue;
        }
        *piece_p = (kvf_piece_t){
            .offset = cursor->offset,
            .bytes = cursor->bytes,
            .ordinal = o,
            .generation = group->generations == NULL ? 0 : group->generations[o],
            .group_idx = cursor->group_idx,
            .slot = group->destination[o],
        };
        *source_p = sources[cursor->group_idx][o - (KVF_MUTANT(wrong_source) && o > 0)];
        assert(*source_p >= 0);
        cursor->ordinal = o + 1;
        return true;
    }
    return false;
}
