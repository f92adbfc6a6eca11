/* SPDX-License-Identifier: Apache-2.0 */
/* Sends whose prompt becomes ready in chunks, by an engine that binds pages as it needs them, lets
 * windowed ones slide out, and is preempted. */
#include "../support/cluster.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#define CONTENT 7
#define JUNK 0xee
#define T 4

/* "full" (layers 1, 4), "swa" (0, 2; window 6), "sink" (3; window 5 and 3 sink tokens). */
static kvf_layout_t small_layout(void) {
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

/* An engine that prefills one prompt. */
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

/* Does a query at `position` see a token of the block? */
static bool visible(const kvf_layer_group_t *group, int64_t position, int64_t ordinal) {
    bool any = false;
    for (int64_t token = ordinal * T; token < (ordinal + 1) * T; token++) {
        any |= group->window == 0 || token > position - group->window || token < group->sinks;
    }
    return any;
}

static uint8_t *page(node_t *node, uint32_t g, int32_t slot) {
    return node->memory[g] + (uint64_t)slot * kvf_group_block_bytes(&node->layout.groups[g]);
}

static void engine_open(engine_t *e, node_t *node, int64_t prompt) {
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

/* Take pages for the tokens [from, to) where there are none, full of junk. */
static void engine_bind(engine_t *e, int64_t from, int64_t to) {
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        for (int64_t o = from / T; o * T < to; o++) {
            if (e->slots[g][o] == -1) {
                cr_assert_eq(kvf_pages_acquire(e->node->pages[g], 1, &e->slots[g][o]), KVF_OK,
                             "the pool is too small");
                memset(page(e->node, g, e->slots[g][o]), JUNK,
                       kvf_group_block_bytes(&e->node->layout.groups[g]));
            }
            e->tables[g].n_blocks = o + 1 > e->tables[g].n_blocks ? o + 1 : e->tables[g].n_blocks;
        }
    }
}

/* Compute the tokens [from, to): their vectors in every page. (With the prompt's last token the
 * rest of its block.) */
static void engine_write(engine_t *e, uint64_t content, int64_t from, int64_t to) {
    to = to == e->prompt ? (to + T - 1) / T * T : to;
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &e->node->layout.groups[g];
        for (int64_t token = from; token < to; token++) {
            uint8_t *bytes = page(e->node, g, e->slots[g][token / T]);
            for (uint32_t v = 0; v < 2 * group->n_layers; v++) {
                uint64_t at = kvf_group_offset(group, v / 2, v % 2, 0, (uint32_t)(token % T));
                for (uint64_t i = at; i < at + 16; i++) {
                    bytes[i] = pattern(content, g, token / T, i);
                }
            }
        }
    }
}

/* Let go what no query from `position` on sees. */
static void engine_slide(engine_t *e, int64_t position) {
    for (uint32_t g = 0; g < e->node->layout.n_groups; g++) {
        for (int64_t o = 0; o < e->tables[g].n_blocks; o++) {
            if (e->slots[g][o] != -1 && !visible(&e->node->layout.groups[g], position, o)) {
                cr_assert_eq(kvf_pages_release(e->node->pages[g], e->slots[g][o]), KVF_OK);
                e->slots[g][o] = -1;
            }
        }
    }
}

static kvf_status_t engine_ready(engine_t *e, uint32_t first, uint32_t end, int64_t to) {
    const kvf_range_t range = {first, end, to, e->tables, e->node->layout.n_groups};
    return kvf_core_send_ready(e->node->core, e->send, &range, &e->detail);
}

/* One step: pages, bytes, slide, ready in all layers. */
static void engine_chunk(engine_t *e, int64_t from, int64_t to) {
    engine_bind(e, from, to);
    engine_write(e, CONTENT, from, to);
    engine_slide(e, to);
    cr_assert_eq(engine_ready(e, 0, 5, to), KVF_OK, "%s", e->detail.text);
}

static kvf_status_t engine_finish(engine_t *e) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    return kvf_core_send_finish(e->node->core, e->send, &aux, &e->detail);
}

static void engine_give(engine_t *e) {
    node_give(e->node, e->tables);
}

/* The generation side of it. */
typedef struct sink {
    node_t *node;
    int32_t slots[KVF_MAX_GROUPS][64];
    kvf_table_t tables[KVF_MAX_GROUPS];
    uint64_t recv;
    watch_t got;
    kvf_detail_t detail;
} sink_t;

static void sink_open(sink_t *s, node_t *node, const engine_t *e) {
    memset(s, 0, sizeof(*s));
    s->node = node;
    node_take(node, e->prompt, 0, s->slots, s->tables);
    cr_assert_eq(
        node_fetch(node, "r", e->ticket, e->prompt, s->tables, &s->got, &s->recv, &s->detail),
        KVF_OK, "%s", s->detail.text);
}

static void expect_ok(const engine_t *e, sink_t *s) {
    cr_assert_eq(e->sent.results + e->sent.releases + s->got.results + s->got.releases, 4);
    cr_assert_eq(s->got.status, KVF_OK, "%s", s->got.message);
    cr_assert_eq(e->sent.status, KVF_OK, "%s", e->sent.message);
    cr_assert_eq(node_wrong(s->node, e->prompt, CONTENT, s->tables), 0);
}

/* ---- every place of every boundary ---- */

/* What has left when [0, ready) is: blocks that are live for the prompt and whole. */
static uint64_t bytes_due(const kvf_layout_t *layout, int64_t prompt, int64_t ready) {
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        for (int64_t o = 0; o * T < prompt; o++) {
            bool whole = true;
            for (int64_t token = o * T; token < (o + 1) * T && token < prompt; token++) {
                whole &= token < ready;
            }
            bytes += whole && visible(&layout->groups[g], prompt, o)
                         ? kvf_group_block_bytes(&layout->groups[g])
                         : 0;
        }
    }
    return bytes;
}

static uint64_t bytes_sent(const node_t *ctx, const node_t *gen) {
    kvf_counters_t counters;
    kvf_core_counters(gen->core, &counters);
    cr_assert_eq(counters.refused_chunks, 0, "a byte came twice, or to a wrong place");
    kvf_core_counters(ctx->core, &counters);
    return counters.bytes_sent;
}

/* When the receiver comes. */
typedef enum when { BEFORE, BETWEEN, AFTER, WHENS } when_t;

static void try_boundaries(node_t *ctx, node_t *gen, int64_t prompt, uint32_t mask, when_t when,
                           bool by_layers) {
    cluster_t *cluster = ctx->cluster;
    uint64_t before = bytes_sent(ctx, gen), pieces = 0, pages = 0;
    engine_t e;
    sink_t s = {.node = NULL};
    int64_t from = 0;
    engine_open(&e, ctx, prompt);
    for (int64_t to = 1; to <= prompt; to++) {
        if (to < prompt && (mask >> (to - 1) & 1) == 0) {
            continue;
        }
        if (s.node == NULL && (when == BEFORE || (when == BETWEEN && to > prompt / 2))) {
            sink_open(&s, gen, &e);
        }
        engine_bind(&e, from, to);
        engine_write(&e, CONTENT, from, to);
        engine_slide(&e, to);
        cr_assert_eq(engine_ready(&e, 0, by_layers ? 2 : 5, to), KVF_OK, "%s", e.detail.text);
        if (by_layers) {
            const kvf_range_t rest = {2, 5, to, NULL, 0};
            cr_assert_eq(kvf_core_send_ready(ctx->core, e.send, &rest, &e.detail), KVF_OK);
        }
        cluster_run(cluster);
        if (s.node != NULL) {
            cr_assert_eq(bytes_sent(ctx, gen) - before, bytes_due(&gen->layout, prompt, to),
                         "prompt %d, boundaries %x, at %d", (int)prompt, mask, (int)to);
            cr_assert_eq(s.got.layers, to == prompt ? 5 : s.got.layers);
        }
        from = to;
    }
    cr_assert_eq(engine_finish(&e), KVF_OK, "%s", e.detail.text);
    if (s.node == NULL) {
        sink_open(&s, gen, &e);
    }
    cluster_run(cluster);
    expect_ok(&e, &s);
    /* Layers 0 and 1 are one of each of "full" and "swa", 2 to 4 the rest. */
    for (int64_t o = 0; o * T < prompt; o++) {
        for (uint32_t g = 0; g < 3; g++) {
            bool live = visible(&gen->layout.groups[g], prompt, o);
            pages += live;
            pieces += live ? (by_layers && g < 2 ? 2 : 1) : 0;
        }
    }
    cr_assert_eq(s.got.pages, pages);
    cr_assert_eq(s.got.pieces, pieces, "prompt %d, boundaries %x", (int)prompt, mask);
    engine_give(&e);
    node_give(gen, s.tables);
    cr_assert(node_clean(ctx) && node_clean(gen));
}

ParameterizedTestParameters(chunked, every_boundary) {
    static int index[2 * WHENS];
    for (int i = 0; i < 2 * WHENS; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 2 * WHENS);
}

/* Every set of boundaries of every prompt up to three blocks. */
ParameterizedTest(int *i, chunked, every_boundary) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){.one_sided = *i % 2 == 1});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    node_t *gen = cluster_node(cluster, &layout, 16, NULL);
    for (int64_t prompt = 1; prompt <= 3 * T; prompt++) {
        for (uint32_t mask = 0; mask < 1U << (prompt - 1); mask++) {
            try_boundaries(ctx, gen, prompt, mask, (when_t)(*i % WHENS), *i >= WHENS);
        }
    }
    cluster_destroy(cluster);
}

/* ---- pages that come and go ---- */

/* A windowed group of 12 blocks through a pool of 5 pages, of which another sequence takes one that
 * slid out, and writes to it, before the transfer has read a byte of what follows. */
Test(chunked, slid_out_pages_are_used_again) {
    kvf_layout_t layout = small_layout();
    layout.groups[0] = layout.groups[1]; /* only "swa" */
    layout.n_groups = 1;
    cluster_t *cluster = cluster_create(&(cluster_options_t){.one_sided = true});
    node_t *ctx = cluster_node(cluster, &layout, 5, NULL);
    node_t *gen = cluster_node(cluster, &layout, 12, NULL);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 48);
    sink_open(&s, gen, &e);
    cluster_run(cluster);
    cluster_hold_chunks(cluster, true);
    int32_t first = -1, other = -1;
    for (int64_t from = 0; from < 48; from += 6) {
        engine_bind(&e, from, from + 6);
        first = from == 0 ? e.slots[0][0] : first;
        engine_write(&e, CONTENT, from, from + 6);
        engine_slide(&e, from + 6);
        const kvf_range_t range = {0, 3, from + 6, e.tables, 1};
        cr_assert_eq(kvf_core_send_ready(ctx->core, e.send, &range, &e.detail), KVF_OK, "%s",
                     e.detail.text);
        if (other == -1 && e.slots[0][0] == -1) {
            cr_assert_eq(kvf_pages_acquire(ctx->pages[0], 1, &other), KVF_OK);
            cr_expect_eq(other, first, "the page of ordinal 0");
        }
        if (other != -1) {
            memset(page(ctx, 0, other), JUNK + 1, kvf_group_block_bytes(&layout.groups[0]));
        }
        cluster_run(cluster);
    }
    /* Live for the prompt: tokens 43 to 47, blocks 10 and 11; each left when it was whole. */
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 2);
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 2);
    cr_expect_eq(kvf_sim_net_pending(cluster_net(cluster)), 2);
    cr_assert_eq(engine_finish(&e), KVF_OK);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    expect_ok(&e, &s);
    cr_expect_eq(s.got.pages, 2);
    engine_give(&e);
    node_give(gen, s.tables);
    cr_expect_eq(kvf_pages_release(ctx->pages[0], other), KVF_OK);
    cr_expect(node_clean(ctx) && node_clean(gen));
    cluster_destroy(cluster);
}

/* Preempted in the third block: the engine loses its pages, computes again from the start into
 * others, and its second result differs a little. What was ready stays as it was. */
Test(chunked, preemption_and_resume) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    node_t *gen = cluster_node(cluster, &layout, 16, NULL);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 22);
    engine_chunk(&e, 0, 10);
    engine_give(&e);
    memset(e.slots, 0xff, sizeof(e.slots));
    /* Live for 22: "full" all, "swa" tokens 17.. and "sink" 18.. and block 0. Ready were the blocks
     * 0 and 1; block 2 of "full" is bound and not ready. */
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 3);
    cr_expect_eq(kvf_pages_count(ctx->pages[1], KVF_PAGE_READING), 0);
    cr_expect_eq(kvf_pages_count(ctx->pages[2], KVF_PAGE_READING), 1);
    cr_assert_eq(engine_ready(&e, 0, 5, 0), KVF_OK, "gives block 2 back");
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 2);
    sink_open(&s, gen, &e);
    cluster_run(cluster);
    cr_expect_eq(s.got.pieces, 0);
    engine_bind(&e, 0, 7);
    engine_write(&e, CONTENT + 1, 0, 7);
    cr_assert_eq(engine_ready(&e, 0, 5, 7), KVF_OK, "below the marks");
    engine_bind(&e, 7, 22);
    engine_write(&e, CONTENT, 7, 17);
    cr_assert_eq(engine_ready(&e, 0, 5, 17), KVF_OK);
    cluster_run(cluster);
    engine_write(&e, CONTENT, 17, 22);
    cr_assert_eq(engine_ready(&e, 0, 5, 22), KVF_OK, "%s", e.detail.text);
    cr_assert_eq(engine_finish(&e), KVF_OK);
    cluster_run(cluster);
    expect_ok(&e, &s);
    engine_give(&e);
    node_give(gen, s.tables);
    cr_expect(node_clean(ctx) && node_clean(gen));
    cluster_destroy(cluster);
}

/* A prefix that the sender had: its pages are shared with another sequence and with the index. It
 * leaves with the first chunk, and the index cannot let it go meanwhile. */
Test(chunked, a_reused_prefix_leaves_with_the_first_chunk) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    node_t *gen = cluster_node(cluster, &layout, 16, NULL);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 18);
    engine_bind(&e, 0, 9);
    engine_write(&e, CONTENT, 0, 8);
    int32_t cached = e.slots[0][1];
    cr_assert_eq(kvf_pages_hold(ctx->pages[0], cached), KVF_OK);
    cr_assert_eq(kvf_pages_cache(ctx->pages[0], cached), KVF_OK);
    sink_open(&s, gen, &e);
    cluster_run(cluster);
    cr_expect_eq(bytes_sent(ctx, gen), 0);
    engine_write(&e, CONTENT, 8, 9);
    cr_assert_eq(engine_ready(&e, 0, 5, 9), KVF_OK, "%s", e.detail.text);
    cluster_run(cluster);
    cr_expect_eq(bytes_sent(ctx, gen), bytes_due(&layout, 18, 8));
    cr_expect_eq(kvf_pages_evict(ctx->pages[0], cached), KVF_ERR_BUSY);
    engine_chunk(&e, 9, 18);
    cr_assert_eq(engine_finish(&e), KVF_OK);
    cluster_run(cluster);
    expect_ok(&e, &s);
    cr_expect_eq(kvf_pages_release(ctx->pages[0], cached), KVF_OK);
    cr_expect_eq(kvf_pages_evict(ctx->pages[0], cached), KVF_OK);
    engine_give(&e);
    node_give(gen, s.tables);
    cr_expect(node_clean(ctx) && node_clean(gen));
    cluster_destroy(cluster);
}

/* ---- calls that are refused, and change nothing ---- */

Test(chunked, what_is_made_ready_must_be_bound) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL);
    node_t *gen = cluster_node(cluster, &layout, 64, NULL);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 100); /* 25 blocks */
    sink_open(&s, gen, &e);
    engine_bind(&e, 0, 100);
    engine_write(&e, CONTENT, 0, 100);
    engine_slide(&e, 100);
    int32_t kept[2] = {e.slots[0][3], e.slots[2][0]};
    e.slots[0][3] = e.slots[2][0] = -1;
    cr_expect_eq(engine_ready(&e, 0, 5, 17), KVF_ERR_UNCOVERED);
    cr_expect_str_eq(e.detail.text, "source missing in group full: 3; source missing in group "
                                    "sink: 0 (2 live blocks in all are unbound)");
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 0, "no entry was taken over");
    cr_expect_eq(engine_ready(&e, 1, 2, 15), KVF_OK, "only layer 1, and block 3 is not whole");
    cr_expect_eq(engine_ready(&e, 1, 2, 16), KVF_ERR_UNCOVERED);
    e.tables[0].n_blocks = 3; /* the table ends: 22 blocks */
    cr_expect_eq(engine_ready(&e, 1, 2, 100), KVF_ERR_UNCOVERED);
    cr_expect_not_null(strstr(e.detail.text, "(22 live blocks"), "%s", e.detail.text);
    cr_expect_eq(engine_finish(&e), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(e.detail.text, "layer 0 was made ready for 0 of 100 tokens"), "%s",
                       e.detail.text);
    e.tables[0].n_blocks = 25;
    e.slots[0][3] = kept[0];
    e.slots[2][0] = kept[1];
    cr_expect_eq(engine_ready(&e, 0, 5, 100), KVF_OK, "%s", e.detail.text);
    cr_expect_eq(engine_finish(&e), KVF_OK);
    cluster_run(cluster);
    expect_ok(&e, &s);
    engine_give(&e);
    node_give(gen, s.tables);
    cr_expect(node_clean(ctx) && node_clean(gen));
    cluster_destroy(cluster);
}

Test(chunked, tables_that_are_wrong) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    engine_t e;
    engine_open(&e, ctx, 24);
    engine_bind(&e, 0, 24);
    engine_slide(&e, 24);
    const kvf_range_t few = {0, 5, 4, e.tables, 2}, before = {0, 5, -1, NULL, 0},
                      behind = {0, 5, 25, NULL, 0}, nowhere = {5, 5, 4, NULL, 0};
    cr_expect_eq(kvf_core_send_ready(ctx->core, e.send, &few, &e.detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_core_send_ready(ctx->core, e.send, &before, &e.detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_core_send_ready(ctx->core, e.send, &behind, &e.detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_core_send_ready(ctx->core, e.send, &nowhere, &e.detail), KVF_ERR_INVALID);
    int32_t kept = e.slots[0][5];
    const struct {
        int32_t slot;
        kvf_status_t status;
        const char *text;
    } wrong[] = {
        {e.slots[0][0], KVF_ERR_INVALID, "two live ordinals, 0 and 5"},
        {-2, KVF_ERR_INVALID, "ordinal 5 has slot -2"},
        {16, KVF_ERR_RANGE, "ordinal 5: slot 16: outside the pool"},
        {15, KVF_ERR_INVALID, "ordinal 5: slot 15: not held"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        e.slots[0][5] = wrong[i].slot;
        cr_expect_eq(engine_ready(&e, 0, 5, 4), wrong[i].status, "%zu", i);
        cr_expect_not_null(strstr(e.detail.text, wrong[i].text), "%s", e.detail.text);
        cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 0, "all or none");
    }
    e.slots[0][5] = kept;
    /* Ready in layer 1 and not in 4: a page of its other bytes cannot be another one. */
    cr_assert_eq(engine_ready(&e, 0, 2, 9), KVF_OK, "%s", e.detail.text);
    int32_t first = e.slots[0][0];
    e.slots[0][0] = -1;
    cr_expect_eq(engine_ready(&e, 0, 2, 10), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(e.detail.text, "group full, ordinal 0"), "%s", e.detail.text);
    e.slots[0][0] = first;
    int32_t third = e.slots[0][2];
    e.slots[0][2] = e.slots[0][3]; /* not ready yet: may change, even places */
    e.slots[0][3] = third;
    cr_expect_eq(engine_ready(&e, 0, 2, 9), KVF_OK, "%s", e.detail.text);
    cr_expect_eq(engine_ready(&e, 2, 5, 9), KVF_OK);
    e.slots[0][0] = -1; /* ready in all: ignored */
    cr_expect_eq(engine_ready(&e, 0, 5, 24), KVF_OK, "%s", e.detail.text);
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 6);
    e.slots[0][0] = first;
    cr_assert_eq(kvf_core_send_cancel(ctx->core, e.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(cluster);
    cr_expect_eq(engine_ready(&e, 0, 5, 24), KVF_ERR_UNKNOWN);
    engine_give(&e);
    cr_expect(node_clean(ctx));
    cluster_destroy(cluster);
}

/* Whoever has the whole prompt hears of a hole at once. */
Test(chunked, holes_are_found_at_open_without_it) {
    const kvf_layout_t layout = small_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    int32_t slots[KVF_MAX_GROUPS][64];
    kvf_table_t tables[KVF_MAX_GROUPS];
    watch_t sent = {0};
    uint64_t id;
    char ticket[KVF_TICKET_BYTES];
    node_take(ctx, 24, CONTENT, slots, tables);
    tables[0].n_blocks = 5;
    cr_expect_eq(node_offer(ctx, "r", 24, tables, &sent, &id, ticket), KVF_ERR_UNCOVERED);
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), 0);
    tables[0].n_blocks = 6;
    node_give(ctx, tables);
    cr_expect(node_clean(ctx));
    cluster_destroy(cluster);
}

/* ---- ends between chunks ---- */

typedef enum fate { SEND_CANCEL, RECV_CANCEL, RECV_KILL, PREFILL_LATE, FATES } fate_t;

ParameterizedTestParameters(chunked, ends_between_chunks) {
    static int index[FATES * 4];
    for (int i = 0; i < FATES * 4; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, FATES * 4);
}

/* Whatever ends it, with copies under way or not, no page stays behind. */
ParameterizedTest(int *i, chunked, ends_between_chunks) {
    const kvf_layout_t layout = small_layout();
    bool under_way = *i / 2 % 2 == 1;
    fate_t fate = (fate_t)(*i / 4);
    cluster_t *cluster = cluster_create(&(cluster_options_t){.one_sided = *i % 2 == 1});
    node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
    node_t *gen = cluster_node(cluster, &layout, 16, NULL);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 24);
    engine_chunk(&e, 0, 5);
    sink_open(&s, gen, &e);
    cluster_run(cluster);
    cluster_hold_chunks(cluster, under_way);
    engine_chunk(&e, 5, 14);
    cluster_run(cluster);
    switch (fate) {
    case SEND_CANCEL:
        cr_assert_eq(kvf_core_send_cancel(ctx->core, e.send, KVF_ERR_PREFILL_FAILED), KVF_OK);
        break;
    case RECV_CANCEL:
        cr_assert_eq(kvf_core_recv_cancel(gen->core, s.recv), KVF_OK);
        break;
    case RECV_KILL:
        cluster_kill(gen);
        cluster_advance(cluster, 300000);
        break;
    default:
        cluster_advance(cluster, 21000000); /* the send's own time, although a receiver came */
        break;
    }
    cluster_run(cluster);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    static const kvf_status_t want[FATES] = {KVF_ERR_PREFILL_FAILED, KVF_ERR_CANCELLED,
                                             KVF_ERR_PEER_LOST, KVF_ERR_DEADLINE};
    cr_expect_eq(e.sent.results + e.sent.releases, 2);
    cr_expect_eq(e.sent.status, want[fate], "%s", e.sent.message);
    cr_expect(fate != PREFILL_LATE || strstr(e.sent.message, "prefill did not finish") != NULL,
              "%s", e.sent.message);
    cr_expect_eq(engine_ready(&e, 0, 5, 24), KVF_ERR_UNKNOWN);
    engine_give(&e);
    cr_expect(node_clean(ctx));
    if (fate != RECV_KILL) {
        cr_expect_eq(s.got.results + s.got.releases, 2);
        cr_expect_eq(s.got.status, want[fate], "%s", s.got.message);
        node_give(gen, s.tables);
        cr_expect(node_clean(gen));
    }
    cluster_destroy(cluster);
}

/* Every allocation fails once. A call that says so has changed nothing: the same call goes well. */
Test(chunked, every_allocation_fails_once) {
    const kvf_layout_t layout = small_layout();
    for (uint64_t n = 1;; n++) {
        cluster_t *cluster = cluster_create(&(cluster_options_t){0});
        node_t *ctx = cluster_node(cluster, &layout, 16, NULL);
        node_t *gen = cluster_node(cluster, &layout, 16, NULL);
        engine_t e;
        sink_t s;
        engine_open(&e, ctx, 24);
        sink_open(&s, gen, &e);
        cluster_run(cluster);
        ctx->alloc.fail_at = ctx->alloc.calls + n;
        for (int64_t from = 0; from < 24; from += 8) {
            engine_bind(&e, from, from + 8);
            engine_write(&e, CONTENT, from, from + 8);
            int64_t reading = kvf_pages_count(ctx->pages[0], KVF_PAGE_READING);
            kvf_status_t status = engine_ready(&e, 0, 5, from + 8);
            if (status == KVF_ERR_NO_MEMORY) {
                cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_READING), reading);
                status = engine_ready(&e, 0, 5, from + 8);
            }
            cr_expect(status == KVF_OK || e.sent.results == 1, "%s", e.detail.text);
            cluster_run(cluster);
        }
        kvf_status_t status = engine_finish(&e);
        status = status == KVF_ERR_NO_MEMORY ? engine_finish(&e) : status;
        cluster_advance(cluster, 40000000);
        bool failed = ctx->alloc.calls >= ctx->alloc.fail_at;
        ctx->alloc.fail_at = 0;
        cr_expect_eq(e.sent.results + e.sent.releases + s.got.results + s.got.releases, 4);
        cr_expect(s.got.status != KVF_OK || node_wrong(gen, 24, CONTENT, s.tables) == 0);
        cr_expect(failed || s.got.status == KVF_OK, "%s", s.got.message);
        engine_give(&e);
        node_give(gen, s.tables);
        cr_expect(node_clean(ctx) && node_clean(gen));
        cluster_destroy(cluster);
        if (!failed) {
            cr_expect(n > 20, "allocations were counted");
            break;
        }
    }
}
