/* SPDX-License-Identifier: Apache-2.0 */
/* Sends whose prompt becomes ready in chunks, by an engine that binds pages as it needs them, lets
 * windowed ones slide out, and is preempted. */
#include "../support/engine.h"

#include <criterion/parameterized.h>

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
            cr_assert_eq(s.got.layers, to == prompt ? 5 : 0, "the last block is in every layer");
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
    give_all(&e, &s);
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
    node_t *ctx, *gen;
    cluster_t *cluster = small_cluster(*i % 2 == 1, 16, &ctx, &gen);
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
            memset(node_page(ctx, 0, other), JUNK + 1, kvf_group_block_bytes(&layout.groups[0]));
        }
        cluster_run(cluster);
    }
    /* Live for the prompt: tokens 43 to 47, blocks 10 and 11; each left when it was whole. */
    cr_expect_eq(kvf_pages_label(ctx->pages[0], e.slots[0][10]), KVF_PAGE_READING);
    cr_expect_eq(kvf_pages_label(ctx->pages[0], e.slots[0][11]), KVF_PAGE_READING);
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 2);
    /* Two chunks; or one job of two items. */
    cr_expect_eq(cluster_is_mapped(cluster) ? 2 * node_jobs(gen)
                                            : kvf_sim_net_pending(cluster_net(cluster)),
                 2);
    cr_assert_eq(engine_finish(&e), KVF_OK);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    expect_ok(&e, &s);
    cr_expect_eq(s.got.pages, 2);
    node_give(ctx, e.tables);
    node_give(gen, s.tables);
    cr_expect_eq(kvf_pages_release(ctx->pages[0], other), KVF_OK);
    cr_expect(node_clean(ctx) && node_clean(gen));
    cluster_destroy(cluster);
}

/* Preempted in the third block: the engine loses its pages, computes again from the start into
 * others, and its second result differs a little. What was ready stays as it was. */
Test(chunked, preemption_and_resume) {
    node_t *ctx, *gen;
    cluster_t *cluster = small_cluster(false, 16, &ctx, &gen);
    engine_t e;
    sink_t s;
    engine_open(&e, ctx, 22);
    engine_chunk(&e, 0, 10);
    int32_t first[KVF_MAX_GROUPS][64];
    memcpy(first, e.slots, sizeof(first));
    node_give(ctx, e.tables);
    memset(e.slots, 0xff, sizeof(e.slots));
    /* Live for 22: "full" all, "swa" tokens 17.. and "sink" 18.. and block 0. Ready were the blocks
     * 0 and 1; block 2 of "full" is bound and not ready. */
    for (int64_t o = 0; o < 3; o++) {
        cr_expect_eq(kvf_pages_label(ctx->pages[0], first[0][o]), KVF_PAGE_READING);
    }
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 13);
    cr_expect_eq(kvf_pages_count(ctx->pages[1], KVF_PAGE_FREE), 16);
    cr_expect_eq(kvf_pages_label(ctx->pages[2], first[2][0]), KVF_PAGE_READING);
    cr_expect_eq(kvf_pages_count(ctx->pages[2], KVF_PAGE_FREE), 15);
    cr_assert_eq(engine_ready(&e, 0, 5, 0), KVF_OK, "gives block 2 back");
    cr_expect_eq(kvf_pages_label(ctx->pages[0], first[0][2]), KVF_PAGE_FREE);
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 14);
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
    close_all(&e, &s);
}

/* A prefix that the sender had: its pages are shared with another sequence and with the index. It
 * leaves with the first chunk, and the index cannot let it go meanwhile. */
Test(chunked, a_reused_prefix_leaves_with_the_first_chunk) {
    node_t *ctx, *gen;
    cluster_t *cluster = small_cluster(false, 16, &ctx, &gen);
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
    cr_expect_eq(bytes_sent(ctx, gen), bytes_due(&gen->layout, 18, 8));
    cr_expect_eq(kvf_pages_evict(ctx->pages[0], cached), KVF_ERR_BUSY);
    engine_chunk(&e, 9, 18);
    cr_assert_eq(engine_finish(&e), KVF_OK);
    cluster_run(cluster);
    expect_ok(&e, &s);
    cr_expect_eq(kvf_pages_release(ctx->pages[0], cached), KVF_OK);
    cr_expect_eq(kvf_pages_evict(ctx->pages[0], cached), KVF_OK);
    close_all(&e, &s);
}
