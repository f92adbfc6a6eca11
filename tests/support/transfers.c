/* SPDX-License-Identifier: Apache-2.0 */
#include "transfers.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

void watch_event(void *ctx, const kvf_event_t *event) {
    watch_t *watch = ctx;
    switch (event->kind) {
    case KVF_EVENT_PROGRESS:
        cr_expect_eq(watch->results, 0, "progress after the result");
        cr_expect_eq(event->layer_first, watch->layers, "progress leaves layers out");
        watch->progress++;
        watch->layers = event->layer_end;
        break;
    case KVF_EVENT_RESULT:
        cr_expect_eq(watch->releases, 0, "released before the result");
        watch->results++;
        watch->status = event->status;
        (void)snprintf(watch->message, sizeof(watch->message), "%s", event->message);
        (void)snprintf(watch->mover, sizeof(watch->mover), "%s", event->mover);
        watch->bytes = event->bytes;
        watch->pages = event->pages;
        watch->pieces = event->pieces;
        watch->n_missing = event->n_missing;
        for (size_t i = 0; i < event->n_missing && i < 64; i++) {
            watch->missing[i] = event->missing[i];
        }
        if (event->aux != NULL) {
            watch->n_first_tokens = event->aux->n_first_tokens;
            watch->n_draft_tokens = event->aux->n_draft_tokens;
            for (size_t i = 0; i < event->aux->n_first_tokens && i < 8; i++) {
                watch->first_tokens[i] = event->aux->first_tokens[i];
            }
        }
        break;
    case KVF_EVENT_RELEASED:
        cr_expect_eq(watch->results, 1, "released without a result");
        watch->releases++;
        watch->n_poisoned = event->n_poisoned;
        watch->quarantine_us = event->quarantine_us;
        break;
    }
}

bool watch_ended(const watch_t *watch) {
    return watch->results == 1 && watch->releases == 1;
}

uint8_t pattern(uint64_t content, uint32_t group_idx, int64_t ordinal, uint64_t offset) {
    uint64_t x = content * 0x9e3779b97f4a7c15U + group_idx * 0xc2b2ae3d27d4eb4fU +
                 (uint64_t)ordinal * 0x165667b19e3779f9U + offset * 0x27d4eb2f165667c5U;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9U;
    return (uint8_t)(x >> 56);
}

/* Independent of the window code: a block is live if the next query, at position prompt, sees one
 * of its positions. */
static bool is_live(const kvf_layer_group_t *group, int64_t prompt, int64_t ordinal) {
    for (int64_t token = ordinal * group->tokens_per_block;
         token < (ordinal + 1) * group->tokens_per_block; token++) {
        if (group->window == 0 || token > prompt - group->window || token < group->sinks) {
            return true;
        }
    }
    return false;
}

void node_take(node_t *node, int64_t prompt, uint64_t content, int32_t slots[KVF_MAX_GROUPS][64],
               kvf_table_t tables[KVF_MAX_GROUPS]) {
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        int64_t n = (prompt + group->tokens_per_block - 1) / group->tokens_per_block;
        cr_assert(n <= 64);
        tables[g] = (kvf_table_t){slots[g], n};
        for (int64_t o = 0; o < n; o++) {
            slots[g][o] = -1;
            if (is_live(group, prompt, o)) {
                cr_assert_eq(kvf_pages_acquire(node->pages[g], 1, &slots[g][o]), KVF_OK);
                uint8_t *page = node_page(node, g, slots[g][o]);
                for (uint64_t i = 0; i < kvf_group_block_bytes(group); i++) {
                    page[i] = content == 0 ? 0 : pattern(content, g, o, i);
                }
            }
        }
    }
}

void node_give(node_t *node, kvf_table_t tables[KVF_MAX_GROUPS]) {
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        for (int64_t o = 0; o < tables[g].n_blocks; o++) {
            if (tables[g].slots[o] != -1) {
                cr_expect_eq(kvf_pages_release(node->pages[g], tables[g].slots[o]), KVF_OK);
            }
        }
    }
}

uint64_t node_wrong(node_t *node, int64_t prompt, uint64_t content,
                    kvf_table_t tables[KVF_MAX_GROUPS]) {
    uint64_t wrong = 0;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        for (int64_t o = 0; o * group->tokens_per_block < prompt; o++) {
            for (uint64_t i = 0; is_live(group, prompt, o) && i < kvf_group_block_bytes(group);
                 i++) {
                wrong += node_page(node, g, tables[g].slots[o])[i] != pattern(content, g, o, i);
            }
        }
    }
    return wrong;
}

uint64_t node_written(const node_t *node, const kvf_table_t *tables) {
    uint64_t n = 0;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        uint64_t bytes = kvf_group_block_bytes(&node->layout.groups[g]);
        for (int64_t o = 0; o < tables[g].n_blocks; o++) {
            int32_t slot = tables[g].slots[o];
            for (uint64_t i = 0; slot >= 0 && i < bytes; i++) {
                n += node->memory[g][(uint64_t)slot * bytes + i] != 0;
            }
        }
    }
    return n;
}

bool node_clean(const node_t *node) {
    kvf_detail_t detail;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        if (kvf_pages_audit(node->pages[g], &detail) != KVF_OK ||
            kvf_pages_count(node->pages[g], KVF_PAGE_FREE) != node->n_pages) {
            return false;
        }
    }
    return true;
}

kvf_status_t node_offer(node_t *node, const char *request_id, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        char ticket[KVF_TICKET_BYTES]) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    const kvf_range_t all = {.layer_end = 5, .token_end = prompt};
    kvf_send_desc_t desc = {.request_id = request_id,
                            .lengths = {.prompt_len = prompt},
                            .allocated_tokens = prompt,
                            .tables = tables,
                            .n_tables = node->layout.n_groups};
    kvf_core_set_time(node->core, cluster_now(node->cluster) + node->ahead_us);
    kvf_status_t status = kvf_core_send_open(node->core, &desc, watch_event, watch, id_p, NULL);
    if (status == KVF_OK) {
        status = kvf_core_send_ready(node->core, *id_p, &all, NULL);
    }
    if (status == KVF_OK) {
        status = kvf_core_send_finish(node->core, *id_p, &aux, NULL);
    }
    return status == KVF_OK ? kvf_core_send_ticket(node->core, *id_p, ticket, KVF_TICKET_BYTES)
                            : status;
}

kvf_direction_t cluster_direction(void) {
    return getenv("KVF_TEST_PULL") != NULL ? KVF_PULL : KVF_PUSH;
}

kvf_status_t node_fetch(node_t *node, const char *request_id, const char *ticket, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        kvf_detail_t *detail) {
    kvf_recv_desc_t desc = {.request_id = request_id,
                            .direction = cluster_direction(),
                            .ticket = ticket,
                            .lengths = {.prompt_len = prompt},
                            .allocated_tokens = prompt,
                            .tables = tables,
                            .n_tables = node->layout.n_groups};
    kvf_core_set_time(node->core, cluster_now(node->cluster) + node->ahead_us);
    return kvf_core_recv_open(node->core, &desc, watch_event, watch, id_p, detail);
}
