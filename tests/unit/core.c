/* SPDX-License-Identifier: Apache-2.0 */
/* The core under a driver that owns time, messages and copies: whole transfers. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

static const int64_t prompts[] = {1, 7, 8, 9, 23, 24, 25, 31, 32, 33, 200, 511};

ParameterizedTestParameters(core, every_byte_at_its_place) {
    static size_t index[2 * sizeof(prompts) / sizeof(prompts[0])];
    for (size_t i = 0; i < sizeof(index) / sizeof(index[0]); i++) {
        index[i] = i;
    }
    return cr_make_param_array(size_t, index, sizeof(index) / sizeof(index[0]));
}

ParameterizedTest(size_t *i, core, every_byte_at_its_place) {
    cluster_options_t options = {.one_sided = *i % 2 == 1};
    pair_t p;
    pair_open(&p, &options, prompts[*i / 2]);
    cr_assert_eq(pair_fetch(&p), KVF_OK, "%s", p.detail.text);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_OK, "%s", p.sent.message);
    cr_expect_eq(node_wrong(p.gen, p.prompt, CONTENT, p.destinations), 0);
    cr_expect_eq(p.got.layers, 5);
    cr_assert_eq(p.got.n_first_tokens, 1);
    cr_expect_eq(p.got.first_tokens[0], 42);
    pair_close(&p);
}

Test(core, layers_as_they_become_ready) {
    const kvf_range_t parts[] = {{2, 3, 100, NULL, 0}, {0, 2, 100, NULL, 0}, {3, 5, 100, NULL, 0}};
    const kvf_range_t beyond = {3, 6, 100, NULL, 0};
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = 100};
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 64, NULL);
    p.gen = cluster_node(p.cluster, &layout, 64, NULL);
    node_take(p.ctx, 100, CONTENT, p.source, p.sources);
    node_take(p.gen, 100, 0, p.destination, p.destinations);
    kvf_send_desc_t desc = {
        .request_id = "r1",
        .lengths = {.prompt_len = 100, .num_extra_kv_tokens = 3, .draft_len = 2},
        .allocated_tokens = 103,
        .tables = p.sources,
        .n_tables = 2};
    cr_assert_eq(kvf_core_send_open(p.ctx->core, &desc, watch_event, &p.sent, &p.send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(kvf_core_send_finish(p.ctx->core, p.send, NULL, NULL), KVF_ERR_INVALID);
    cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &parts[0], NULL), KVF_OK);
    cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &parts[0], NULL), KVF_OK, "harmless");
    cluster_run(p.cluster);
    cr_expect_eq(p.got.layers, 0, "layer 2 came, 0 and 1 did not");
    cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &parts[1], NULL), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.layers, 3);
    cr_expect_eq(kvf_core_send_ready(p.ctx->core, p.send, &beyond, NULL), KVF_ERR_INVALID);
    cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &parts[2], NULL), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.results, 0);
    cr_assert_eq(kvf_core_send_finish(p.ctx->core, p.send, &aux, NULL), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(node_wrong(p.gen, 100, CONTENT, p.destinations), 0);
    pair_close(&p);
}

Test(core, a_ticket_is_good_once) {
    pair_t p;
    watch_t again = {0};
    uint64_t id;
    pair_open(&p, &(cluster_options_t){0}, 40);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_assert_eq(p.got.status, KVF_OK);
    cr_assert_eq(node_fetch(p.gen, "r1", p.ticket, 40, p.destinations, &again, &id, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(again.results, 1);
    cr_expect_eq(again.releases, 1);
    cr_expect_eq(again.status, KVF_ERR_USED, "%s", again.message);
    p.ticket[20] ^= 1;
    cr_expect_eq(pair_fetch(&p), KVF_ERR_FORGED);
    pair_close(&p);
}

Test(core, an_unclaimed_ticket_expires) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    cluster_advance(p.cluster, 31000000);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.releases, 1);
    cr_expect_eq(p.sent.status, KVF_ERR_EXPIRED);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_ERR_EXPIRED, "%s", p.got.message);
    pair_close(&p);
}

/* Who has nothing to do sleeps until its next timer: that is no standing still, after which
 * everybody would get a fresh start, again and again. */
Test(core, a_frozen_node_that_is_dialled_is_lost_in_time) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    uint64_t start = cluster_now(p.cluster), now = start;
    p.ctx->stopped = true;
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    while (p.got.results == 0 && now < start + 40000000) {
        now = kvf_core_next_us(p.gen->core) + 1000; /* a real loop wakes up a little late */
        kvf_core_set_time(p.gen->core, now);
        kvf_core_tick(p.gen->core);
        (void)kvf_core_deliver(p.gen->core);
    }
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_leq(now - start, 2100000);
    p.ctx->stopped = false;
    cluster_advance(p.cluster, 40000000);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core, a_flipped_byte_is_named) {
    pair_t p;
    cluster_needs_chunks();
    pair_open(&p, &(cluster_options_t){.one_sided = true}, 40);
    cluster_hold_chunks(p.cluster, true);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    /* All chunks land, then a stranger's store hits ordinal 2 of "full" before the digest is
     * checked. */
    while (kvf_sim_net_pending(cluster_net(p.cluster)) > 0) {
        (void)kvf_sim_net_step(cluster_net(p.cluster), 0);
    }
    p.gen->memory[0]
                 [(uint64_t)p.destination[0][2] * kvf_group_block_bytes(&p.gen->layout.groups[0]) +
                  4097] ^= 4;
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_eq(p.sent.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_not_null(strstr(p.got.message, "group full, ordinal 2"), "%s", p.got.message);
    pair_close(&p);
}

/* A transfer whose chunks wait, and the first of them. */
static kvf_chunk_t first_chunk(pair_t *p) {
    kvf_sim_chunk_t sim;
    pair_open(p, &(cluster_options_t){0}, 40);
    cluster_hold_chunks(p->cluster, true);
    cr_assert_eq(pair_fetch(p), KVF_OK);
    cluster_run(p->cluster);
    cr_assert(kvf_sim_net_peek(cluster_net(p->cluster), 0, &sim));
    return sim.chunk;
}

static void misplace(kvf_chunk_t *chunk, int how) {
    switch (how) {
    case 0:
        chunk->group_idx = 2;
        break;
    case 1:
        chunk->group_idx = UINT32_MAX;
        break;
    case 2:
        chunk->ordinal += 1;
        break;
    case 3:
        chunk->slot += 1;
        break;
    case 4:
        chunk->generation += 1;
        break;
    case 5:
        chunk->offset = UINT64_MAX - 4095;
        break;
    case 6:
        chunk->bytes = UINT64_MAX;
        break;
    case 7:
        chunk->bytes = 0;
        break;
    case 8:
        chunk->offset += 1;
        break;
    default:
        chunk->ordinal = INT64_MAX;
        break;
    }
}

/* The grant is checked before the copy. Misplaced by its sender, a transfer ends and says where; a
 * stranger who does not know the key changes nothing. */
ParameterizedTestParameters(core, misplaced_chunks) {
    static int index[20];
    for (int i = 0; i < 20; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 20);
}

ParameterizedTest(int *i, core, misplaced_chunks) {
    bool stranger = *i % 2 == 1;
    kvf_counters_t counters;
    pair_t p;
    kvf_landing_t landing;
    cluster_needs_chunks();
    kvf_chunk_t chunk = first_chunk(&p);
    misplace(&chunk, *i / 2);
    chunk.grant_key ^= stranger ? 1 : 0;
    cr_expect_neq(kvf_core_grant_check(p.gen->core, &chunk, &landing), KVF_OK);
    kvf_core_counters(p.gen->core, &counters);
    cr_expect_eq(counters.refused_chunks, 1);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, stranger ? KVF_OK : KVF_ERR_PROTOCOL, "%s", p.got.message);
    cr_expect_eq(p.sent.status, p.got.status);
    if (*i == 4) {
        cr_expect_not_null(strstr(p.got.message, "group full, ordinal 1"), "%s", p.got.message);
    }
    pair_close(&p);
}

/* What has become ready is digested before anybody asks for it: a page that is written to later is
 * noticed, whoever moves its bytes. */
Test(core, a_page_that_changes_after_it_was_ready) {
    for (int when = 0; when < 2; when++) {
        pair_t p;
        pair_make(&p, &(cluster_options_t){0}, 128, 40);
        if (when == 0) {
            node_page(p.ctx, 0, p.source[0][1])[7] ^= 1;
        }
        pair_offer(&p);
        cluster_run(p.cluster);
        if (when == 1) {
            node_page(p.ctx, 0, p.source[0][1])[7] ^= 1;
        }
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cr_expect_eq(p.got.status, when == 0 ? KVF_OK : KVF_ERR_DIGEST_MISMATCH);
        cr_expect(when == 0 || strstr(p.got.message, "group full, ordinal 1") != NULL, "%s",
                  p.got.message);
        pair_close(&p);
    }
}

Test(core, chunks_that_come_twice_or_late_or_for_nobody) {
    kvf_counters_t counters;
    pair_t p;
    kvf_landing_t landing;
    cluster_needs_chunks();
    kvf_chunk_t good = first_chunk(&p), bad = good;
    kvf_core_t *core = p.gen->core;
    cr_assert_eq(kvf_core_grant_check(core, &good, &landing), KVF_OK);
    kvf_core_landed(core, &good);
    kvf_core_landed(core, &good); /* both may have had their place before one had landed */
    kvf_core_counters(core, &counters);
    cr_expect_eq(counters.bytes_received, good.bytes);
    cr_expect_neq(kvf_core_grant_check(core, &good, &landing), KVF_OK, "the same bytes twice");
    bad.transfer.receiver.bytes[3] ^= 1;
    cr_expect_neq(kvf_core_grant_check(core, &bad, &landing), KVF_OK);
    bad = good;
    bad.transfer.counter = UINT64_MAX;
    cr_expect_neq(kvf_core_grant_check(core, &bad, &landing), KVF_OK);
    cr_expect_eq(p.got.results, 0, "none of these ended it");
    cr_assert_eq(kvf_core_recv_cancel(core, p.recv), KVF_OK);
    bad = good;
    bad.offset += bad.bytes;
    cr_expect_neq(kvf_core_grant_check(core, &bad, &landing), KVF_OK, "a revoked grant");
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core, holes) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    int32_t kept = p.destination[0][1];
    p.destination[0][1] = -1;
    cr_expect_eq(pair_fetch(&p), KVF_ERR_UNCOVERED);
    cr_expect_not_null(strstr(p.detail.text, "group full: 1"), "%s", p.detail.text);
    kvf_recv_desc_t desc = {.request_id = "r1",
                            .direction = cluster_direction(),
                            .ticket = p.ticket,
                            .lengths = {.prompt_len = 40},
                            .allocated_tokens = 40,
                            .tables = p.destinations,
                            .n_tables = 2,
                            .holes = KVF_HOLES_SKIP};
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_assert_eq(p.got.n_missing, 1);
    cr_expect_eq(p.got.missing[0].group_idx, 0);
    cr_expect_eq(p.got.missing[0].ordinal, 1);
    p.destination[0][1] = kept;
    cr_expect(node_wrong(p.gen, 40, CONTENT, p.destinations) <=
              kvf_group_block_bytes(&p.gen->layout.groups[0]));
    pair_close(&p);
}

/* Window 1 and a full last block: nothing is live, so empty tables are whole ones, and the transfer
 * completes. */
Test(core, nothing_to_move) {
    const kvf_table_t empty = {NULL, 0};
    kvf_layout_t layout = cluster_layout();
    watch_t sent = {0}, got = {0};
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    kvf_detail_t detail = {""};
    layout.n_groups = 1;
    layout.groups[0].window = 1;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 8, NULL);
    node_t *gen = cluster_node(cluster, &layout, 8, NULL);
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    const kvf_range_t all = {1, 4, 32, NULL, 0};
    kvf_send_desc_t desc = {.request_id = "r",
                            .lengths = {.prompt_len = 32},
                            .allocated_tokens = 32,
                            .tables = &empty,
                            .n_tables = 1};
    cr_assert_eq(kvf_core_send_open(ctx->core, &desc, watch_event, &sent, &send, &detail), KVF_OK,
                 "%s", detail.text);
    cr_assert_eq(kvf_core_send_ready(ctx->core, send, &all, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_core_send_finish(ctx->core, send, &aux, &detail), KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(ctx->core, send, ticket, sizeof(ticket)), KVF_OK);
    cr_assert_eq(node_fetch(gen, "r", ticket, 32, &empty, &got, &recv, &detail), KVF_OK, "%s",
                 detail.text);
    cluster_run(cluster);
    cr_expect_eq(got.status, KVF_OK, "%s", got.message);
    cr_expect_eq(got.results + got.releases + sent.results + sent.releases, 4);
    cr_expect_eq(got.pages, 0);
    cluster_destroy(cluster);
}

Test(core, cached_tokens_do_not_travel) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    kvf_recv_desc_t desc = {.request_id = "r1",
                            .direction = cluster_direction(),
                            .ticket = p.ticket,
                            .lengths = {.prompt_len = 40},
                            .allocated_tokens = 40,
                            .cached_tokens = 27,
                            .tables = p.destinations,
                            .n_tables = 2};
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    /* Tokens 0..26 are held: blocks 3 and 4 of both groups travel (full has 0..4 live, swa 2..4).
     */
    cr_expect_eq(p.got.pages, 4);
    for (uint32_t g = 0; g < 2; g++) {
        uint64_t bytes = kvf_group_block_bytes(&p.gen->layout.groups[g]);
        const uint8_t *held = p.gen->memory[g] + (uint64_t)p.destination[g][2] * bytes;
        const uint8_t *came = p.gen->memory[g] + (uint64_t)p.destination[g][3] * bytes;
        cr_expect_eq(held[17], 0);
        cr_expect_eq(came[17], pattern(CONTENT, g, 3, 17));
    }
    pair_close(&p);
}

Test(core, calls_that_are_refused) {
    pair_t p;
    watch_t none = {0};
    uint64_t id;
    char ticket[KVF_TICKET_BYTES];
    pair_open(&p, &(cluster_options_t){0}, 40);
    cr_expect_eq(node_offer(p.ctx, "r1", 40, p.sources, &none, &id, ticket), KVF_ERR_DUPLICATE);
    cr_expect_eq(node_offer(p.ctx, "", 40, p.sources, &none, &id, ticket), KVF_ERR_INVALID);
    cr_expect_eq(node_fetch(p.gen, "r2", p.ticket, 40, p.destinations, &none, &id, &p.detail),
                 KVF_ERR_INVALID);
    cr_expect_eq(node_fetch(p.gen, "r1", p.ticket, 39, p.destinations, &none, &id, &p.detail),
                 KVF_ERR_INVALID);
    cr_expect_eq(node_fetch(p.gen, "r1", "AAAA", 40, p.destinations, &none, &id, &p.detail),
                 KVF_ERR_FORGED);
    kvf_recv_desc_t desc = {.request_id = "r1",
                            .direction = cluster_direction(),
                            .ticket = p.ticket,
                            .lengths = {.prompt_len = 40, .draft_len = 3, .num_extra_kv_tokens = 2},
                            .allocated_tokens = 42,
                            .tables = p.destinations,
                            .n_tables = 2};
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &none, &id, &p.detail),
                 KVF_ERR_CAPACITY_MISMATCH);
    cr_expect_not_null(strstr(p.detail.text, "42"), "%s", p.detail.text);
    cr_expect_not_null(strstr(p.detail.text, "45"), "%s", p.detail.text);
    desc.allocated_tokens = 45;
    desc.handoff = KVF_HANDOFF_FIRST; /* the context side has no drafts */
    desc.direction = (kvf_direction_t)2;
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &none, &id, &p.detail),
                 KVF_ERR_INVALID);
    desc.direction = cluster_direction();
    /* A page that two sequences share cannot be granted. */
    cr_assert_eq(kvf_pages_hold(p.gen->pages[1], p.destination[1][3]), KVF_OK);
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &none, &id, &p.detail),
                 KVF_ERR_BUSY);
    cr_expect_not_null(strstr(p.detail.text, "ordinal 3"), "%s", p.detail.text);
    cr_assert_eq(kvf_pages_release(p.gen->pages[1], p.destination[1][3]), KVF_OK);
    cr_expect_eq(none.results + none.releases, 0);
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK);
    pair_close(&p);
}

/* Every allocation of both cores fails once: the call says so or both sides end with an error, and
 * nothing leaks. */
Test(core, every_allocation_fails_once) {
    for (uint64_t side = 0; side < 2; side++) {
        for (uint64_t n = 1;; n++) {
            pair_t p;
            pair_open(&p, &(cluster_options_t){0}, 40);
            node_t *node = side == 0 ? p.ctx : p.gen;
            node->alloc.fail_at = node->alloc.calls + n;
            kvf_status_t status = pair_fetch(&p);
            cluster_run(p.cluster);
            cluster_advance(p.cluster, 40000000);
            bool failed = node->alloc.calls >= node->alloc.fail_at;
            node->alloc.fail_at = 0;
            if (status != KVF_OK) {
                cr_expect_eq(p.got.results, 0, "a failed open gives no event (%d)", (int)n);
                cr_expect_eq(p.sent.results, 1);
            } else {
                expect_one_end_each(&p);
                cr_expect(p.got.status != KVF_OK ||
                          node_wrong(p.gen, 40, CONTENT, p.destinations) == 0);
                cr_expect(failed || p.got.status == KVF_OK, "%s", p.got.message);
            }
            pair_close(&p);
            if (!failed) {
                cr_expect(n > 5, "allocations were counted");
                break;
            }
        }
    }
}
