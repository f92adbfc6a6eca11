/* SPDX-License-Identifier: Apache-2.0 */
/* Chunked sends: calls that are refused, and what ends them between chunks. */
#include "../support/engine.h"

#include <criterion/parameterized.h>

/* ---- calls that are refused, and change nothing ---- */

Test(chunked_ends, what_is_made_ready_must_be_bound) {
    node_t *ctx, *gen;
    cluster_t *cluster = small_cluster(false, 64, &ctx, &gen);
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
    close_all(&e, &s);
}

Test(chunked_ends, tables_that_are_wrong) {
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
    node_give(ctx, e.tables);
    cr_expect(node_clean(ctx));
    cluster_destroy(cluster);
}

/* Whoever has the whole prompt hears of a hole at once. */
Test(chunked_ends, holes_are_found_at_open_without_it) {
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

ParameterizedTestParameters(chunked_ends, ends_between_chunks) {
    static int index[FATES * 4];
    for (int i = 0; i < FATES * 4; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, FATES * 4);
}

/* Whatever ends it, with copies under way or not, no page stays behind. */
ParameterizedTest(int *i, chunked_ends, ends_between_chunks) {
    bool under_way = *i / 2 % 2 == 1;
    fate_t fate = (fate_t)(*i / 4);
    node_t *ctx, *gen;
    cluster_t *cluster = small_cluster(*i % 2 == 1, 16, &ctx, &gen);
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
    cr_expect(watch_ended(&e.sent));
    cr_expect_eq(e.sent.status, want[fate], "%s", e.sent.message);
    cr_expect(fate != PREFILL_LATE || strstr(e.sent.message, "prefill did not finish") != NULL,
              "%s", e.sent.message);
    cr_expect_eq(engine_ready(&e, 0, 5, 24), KVF_ERR_UNKNOWN);
    node_give(ctx, e.tables);
    cr_expect(node_clean(ctx));
    if (fate != RECV_KILL) {
        cr_expect(watch_ended(&s.got));
        cr_expect_eq(s.got.status, want[fate], "%s", s.got.message);
        node_give(gen, s.tables);
        cr_expect(node_clean(gen));
    }
    cluster_destroy(cluster);
}

/* Every allocation fails once. A call that says so has changed nothing: the same call goes well. */
Test(chunked_ends, every_allocation_fails_once) {
    for (uint64_t n = 1;; n++) {
        node_t *ctx, *gen;
        cluster_t *cluster = small_cluster(false, 16, &ctx, &gen);
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
        cr_expect(status == KVF_OK || e.sent.results == 1, "%s", e.detail.text);
        cluster_advance(cluster, 40000000);
        bool failed = ctx->alloc.calls >= ctx->alloc.fail_at;
        ctx->alloc.fail_at = 0;
        cr_expect(watch_ended(&e.sent) && watch_ended(&s.got));
        cr_expect(s.got.status != KVF_OK || node_wrong(gen, 24, CONTENT, s.tables) == 0);
        cr_expect(failed || s.got.status == KVF_OK, "%s", s.got.message);
        close_all(&e, &s);
        if (!failed) {
            cr_expect(n > 20, "allocations were counted");
            break;
        }
    }
}
