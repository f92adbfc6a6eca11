/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_ENGINE_H
#define KVF_TESTS_ENGINE_H

/**
 * @file
 * An engine that prefills one prompt in chunks, and the generation side of it, for tests of the
 * core.
 */

#include "transfers.h"

#include <criterion/criterion.h>

#define CONTENT 7
#define JUNK 0xee
#define T 4

/** "full" (layers 1, 4), "swa" (0, 2; window 6), "sink" (3; window 5 and 3 sink tokens). */
static inline kvf_layout_t small_layout(void) {
    kvf_layout_t layout = {
        .n_groups = 3,
        .groups = {{.name = "full", .n_layers = 2, .layers = {1, 4}},
                   {.name = "swa", .n_layers = 2, .layers = {0, 2}, .window = 6},
                   {.name = "sink", .n_layers = 1, .layers = {3}, .window = 5, .sinks = 3}}};
    for (uint32_t g = 0; g < layout.n_groups; g++) {
        layout.groups[g].tokens_per_block = T;
        layout.groups[g].kv_heads = 1;
        layout.groups[g].head_dim = 8;
        layout.groups[g].kv_factor = 2;
        layout.groups[g].dtype = KVF_DTYPE_BF16;
    }
    return layout;
}

/** An engine that prefills one prompt. */
typedef struct engine {
    node_t *node;
    int64_t prompt;
    int32_t slots[KVF_MAX_GROUPS][64]; /* -1: no page now */
    kvf_table_t tables[KVF_MAX_GROUPS];
    uint64_t send;
    watch_t sent;
    char ticket[KVF_TICKET_BYTES];
    kvf_detail_t detail;
} engine_t;

/** Does a query at `position` see a token of the block? */
static inline bool visible(const kvf_layer_group_t *group, int64_t position, int64_t ordinal) {
    bool any = false;
    for (int64_t token = ordinal * T; token < (ordinal + 1) * T; token++) {
        any |= group->window == 0 || token > position - group->window || token < group->sinks;
    }
    return any;
}

/** Open a chunked send of a prompt of which no page is there yet. */
static inline void engine_open(engine_t *e, node_t *node, int64_t prompt) {
    const kvf_layout_t *layout = &node->layout;
    memset(e, 0, sizeof(*e));
    e->node = node;
    e->prompt = prompt;
    memset(e->slots, 0xff, sizeof(e->slots));
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        e->tables[g] = (kvf_table_t){e->slots[g], 0};
    }
    kvf_send_desc_t desc = {.request_id = "r",
                            .lengths = {.prompt_len = prompt},
                            .allocated_tokens = prompt,
                            .tables = e->tables,
                            .n_tables = layout->n_groups,
                            .chunked = true,
                            .timeout_us = 20000000};
    cr_assert_eq(kvf_core_send_open(node->core, &desc, watch_event, &e->sent, &e->send, &e->detail),
                 KVF_OK, "%s", e->detail.text);
    cr_assert_eq(kvf_core_send_ticket(node->core, e->send, e->ticket, KVF_TICKET_BYTES), KVF_OK);
}

/** Take pages for the tokens [from, to) where there are none, full of junk. */
static inline void engine_bind(engine_t *e, int64_t from, int64_t to) {
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        for (int64_t o = from / T; o * T < to; o++) {
            if (e->slots[g][o] == -1) {
                cr_assert_eq(kvf_pages_acquire(e->node->pages[g], 1, &e->slots[g][o]), KVF_OK,
                             "the pool is too small");
                memset(node_page(e->node, g, e->slots[g][o]), JUNK,
                       kvf_group_block_bytes(&e->node->layout.groups[g]));
            }
            e->tables[g].n_blocks = o + 1 > e->tables[g].n_blocks ? o + 1 : e->tables[g].n_blocks;
        }
    }
}

/** Compute the tokens [from, to): their vectors in every page. (With the prompt's last token the
 * rest of its block.) */
static inline void engine_write(engine_t *e, uint64_t content, int64_t from, int64_t to) {
    to = to == e->prompt ? (to + T - 1) / T * T : to;
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &e->node->layout.groups[g];
        for (int64_t token = from; token < to; token++) {
            uint8_t *bytes = node_page(e->node, g, e->slots[g][token / T]);
            for (uint32_t v = 0; v < 2 * group->n_layers; v++) {
                uint64_t at = kvf_group_offset(group, v / 2, v % 2, 0, (uint32_t)(token % T));
                for (uint64_t i = at; i < at + 16; i++) {
                    bytes[i] = pattern(content, g, token / T, i);
                }
            }
        }
    }
}

/** Let go what no query from `position` on sees. */
static inline void engine_slide(engine_t *e, int64_t position) {
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        for (int64_t o = 0; o < e->tables[g].n_blocks; o++) {
            if (e->slots[g][o] != -1 && !visible(&e->node->layout.groups[g], position, o)) {
                cr_assert_eq(kvf_pages_release(e->node->pages[g], e->slots[g][o]), KVF_OK);
                e->slots[g][o] = -1;
            }
        }
    }
}

/** Say that the layers [first, end) of the tokens [0, to) may be read. */
static inline kvf_status_t engine_ready(engine_t *e, uint32_t first, uint32_t end, int64_t to) {
    const kvf_range_t range = {first, end, to, e->tables, e->node->layout.n_groups};
    return kvf_core_send_ready(e->node->core, e->send, &range, &e->detail);
}

/** One step: pages, bytes, slide, ready in all layers. */
static inline void engine_chunk(engine_t *e, int64_t from, int64_t to) {
    engine_bind(e, from, to);
    engine_write(e, CONTENT, from, to);
    engine_slide(e, to);
    cr_assert_eq(engine_ready(e, 0, 5, to), KVF_OK, "%s", e->detail.text);
}

/** End the prefill, with a first token. */
static inline kvf_status_t engine_finish(engine_t *e) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    return kvf_core_send_finish(e->node->core, e->send, &aux, &e->detail);
}

/** The generation side of it. */
typedef struct sink {
    node_t *node;
    int32_t slots[KVF_MAX_GROUPS][64];
    kvf_table_t tables[KVF_MAX_GROUPS];
    uint64_t recv;
    watch_t got;
    kvf_detail_t detail;
} sink_t;

/** Take pages for the prompt, and ask for it with its ticket. */
static inline void sink_open(sink_t *s, node_t *node, const engine_t *e) {
    memset(s, 0, sizeof(*s));
    s->node = node;
    node_take(node, e->prompt, 0, s->slots, s->tables);
    cr_assert_eq(
        node_fetch(node, "r", e->ticket, e->prompt, s->tables, &s->got, &s->recv, &s->detail),
        KVF_OK, "%s", s->detail.text);
}

/** Both ended well, and the bytes are there. */
static inline void expect_ok(const engine_t *e, sink_t *s) {
    cr_assert(watch_ended(&e->sent) && watch_ended(&s->got));
    cr_assert_eq(s->got.status, KVF_OK, "%s", s->got.message);
    cr_assert_eq(e->sent.status, KVF_OK, "%s", e->sent.message);
    cr_assert_eq(node_wrong(s->node, e->prompt, CONTENT, s->tables), 0);
}

/** Two nodes with a small layout. */
static inline cluster_t *small_cluster(bool one_sided, int64_t n_pages, node_t **ctx_p,
                                       node_t **gen_p) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){.one_sided = one_sided});
    *ctx_p = cluster_node(cluster, &layout, n_pages, NULL);
    *gen_p = cluster_node(cluster, &layout, n_pages, NULL);
    return cluster;
}

/** Give the pages of both sides back; all must be free then. */
static inline void give_all(engine_t *e, sink_t *s) {
    node_give(e->node, e->tables);
    node_give(s->node, s->tables);
    cr_assert(node_clean(e->node) && node_clean(s->node));
}

/** The same at the end of a test. */
static inline void close_all(engine_t *e, sink_t *s) {
    give_all(e, s);
    cluster_destroy(e->node->cluster);
}

#endif
