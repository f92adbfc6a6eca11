/* SPDX-License-Identifier: Apache-2.0 */
/* The core under a driver that owns time, messages and copies: whole transfers. */
#include "../support/cluster.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

typedef struct pair {
    cluster_t *cluster;
    node_t *ctx, *gen;
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    int64_t prompt;
    kvf_detail_t detail;
} pair_t;

#define CONTENT 7

static void short_quarantine(kvf_agent_config_t *config) {
    config->quarantine_us = 500000;
}

/* Two nodes, pages taken and filled, a ticket made. */
static void pair_open(pair_t *p, const cluster_options_t *options, int64_t prompt) {
    kvf_layout_t layout = cluster_layout();
    memset(p, 0, sizeof(*p));
    p->prompt = prompt;
    p->cluster = cluster_create(options);
    p->ctx = cluster_node(p->cluster, &layout, 128, short_quarantine);
    p->gen = cluster_node(p->cluster, &layout, 128, short_quarantine);
    node_take(p->ctx, prompt, CONTENT, p->source, p->sources);
    node_take(p->gen, prompt, 0, p->destination, p->destinations);
    cr_assert_eq(node_offer(p->ctx, "r1", prompt, p->sources, &p->sent, &p->send, p->ticket),
                 KVF_OK);
}

static kvf_status_t pair_fetch(pair_t *p) {
    return node_fetch(p->gen, "r1", p->ticket, p->prompt, p->destinations, &p->got, &p->recv,
                      &p->detail);
}

static void pair_close(pair_t *p) {
    node_give(p->ctx, p->sources);
    node_give(p->gen, p->destinations);
    cr_expect(node_clean(p->ctx));
    cr_expect(node_clean(p->gen));
    cluster_destroy(p->cluster);
}

static void expect_one_end_each(const pair_t *p) {
    cr_expect_eq(p->sent.results, 1);
    cr_expect_eq(p->sent.releases, 1);
    cr_expect_eq(p->got.results, 1);
    cr_expect_eq(p->got.releases, 1);
}

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

Test(core, a_flipped_byte_is_named) {
    pair_t p;
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
    kvf_chunk_t chunk = first_chunk(&p);
    misplace(&chunk, *i / 2);
    chunk.grant_key ^= stranger ? 1 : 0;
    cr_expect_neq(kvf_core_grant_check(p.gen->core, &chunk), KVF_OK);
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

Test(core, chunks_that_come_twice_or_late_or_for_nobody) {
    pair_t p;
    kvf_chunk_t good = first_chunk(&p), bad = good;
    kvf_core_t *core = p.gen->core;
    cr_assert_eq(kvf_core_grant_check(core, &good), KVF_OK);
    kvf_core_landed(core, &good);
    cr_expect_neq(kvf_core_grant_check(core, &good), KVF_OK, "the same bytes twice");
    bad.transfer.receiver.bytes[3] ^= 1;
    cr_expect_neq(kvf_core_grant_check(core, &bad), KVF_OK);
    bad = good;
    bad.transfer.counter = UINT64_MAX;
    cr_expect_neq(kvf_core_grant_check(core, &bad), KVF_OK);
    cr_expect_eq(p.got.results, 0, "none of these ended it");
    cr_assert_eq(kvf_core_recv_cancel(core, p.recv), KVF_OK);
    bad = good;
    bad.offset += bad.bytes;
    cr_expect_neq(kvf_core_grant_check(core, &bad), KVF_OK, "a revoked grant");
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    pair_close(&p);
}

/* Where a transfer is when something happens to it. */
typedef enum phase { BEFORE_CONNECT, CHUNKS_WAIT, CHUNKS_UNDER_WAY, AFTER_END, PHASES } phase_t;

static void run_to(pair_t *p, phase_t phase) {
    cluster_hold_chunks(p->cluster, phase != AFTER_END);
    cr_assert_eq(pair_fetch(p), KVF_OK, "%s", p->detail.text);
    if (phase == BEFORE_CONNECT) {
        return;
    }
    cluster_run(p->cluster);
    if (phase == CHUNKS_UNDER_WAY) {
        size_t n = kvf_sim_net_pending(cluster_net(p->cluster));
        cr_assert(n > 0);
        for (size_t i = 0; i < n; i++) {
            (void)kvf_sim_net_step(cluster_net(p->cluster), i);
        }
    }
}

/* Cancel from either side, twice, at every phase, with movers of both kinds: one result and one
 * released event each; a page that a one-sided copy may still hit is not free before that copy has
 * landed. */
ParameterizedTestParameters(core, cancel) {
    static int index[PHASES * 4];
    for (int i = 0; i < PHASES * 4; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, PHASES * 4);
}

ParameterizedTest(int *i, core, cancel) {
    cluster_options_t options = {.one_sided = *i % 2 == 1};
    bool by_sender = *i / 2 % 2 == 1;
    phase_t phase = (phase_t)(*i / 4);
    pair_t p;
    pair_open(&p, &options, 100);
    run_to(&p, phase);
    kvf_core_t *core = by_sender ? p.ctx->core : p.gen->core;
    kvf_status_t want = phase == AFTER_END ? KVF_ERR_UNKNOWN : KVF_OK;
    cr_expect_eq(by_sender ? kvf_core_send_cancel(core, p.send, KVF_ERR_CANCELLED)
                           : kvf_core_recv_cancel(core, p.recv),
                 want);
    cr_expect_eq(by_sender ? kvf_core_send_cancel(core, p.send, KVF_ERR_CANCELLED)
                           : kvf_core_recv_cancel(core, p.recv),
                 KVF_ERR_UNKNOWN);
    cluster_run(p.cluster);
    if (options.one_sided && (phase == CHUNKS_WAIT || phase == CHUNKS_UNDER_WAY)) {
        /* Pages that copies are on their way to are nobody's, even if the engine lets them go at
         * once. */
        cr_expect_eq(p.got.results, 1);
        cr_expect_eq(p.got.status, KVF_ERR_CANCELLED);
    }
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, phase == AFTER_END ? KVF_OK : KVF_ERR_CANCELLED, "%s",
                 p.got.message);
    cr_expect_eq(p.sent.status, phase == AFTER_END ? KVF_OK : KVF_ERR_CANCELLED, "%s",
                 p.sent.message);
    pair_close(&p);
}

Test(core, one_sided_pages_stay_in_quarantine_until_drained) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){.one_sided = true}, 100);
    run_to(&p, CHUNKS_WAIT);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.results, 1);
    cr_expect_eq(p.got.releases, 0, "copies have not left yet");
    node_give(p.gen, p.destinations); /* an engine that does not wait for released */
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_QUARANTINED), 13);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_FREE), 128 - 13);
    cluster_advance(p.cluster, 600000); /* past quarantine_us */
    cr_expect_eq(p.got.releases, 1);
    cr_expect_eq(p.got.n_poisoned, 13 + 4);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_POISONED), 13);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster); /* the late proof heals */
    cr_expect_eq(p.got.releases, 1);
    cr_expect(node_clean(p.gen));
    for (uint32_t g = 0; g < 2; g++) {
        p.destinations[g].n_blocks = 0;
    }
    pair_close(&p);
}

/* Given up before the connection was there: the context side hears of it, and its pages do not wait
 * for the lease. */
Test(core, given_up_before_the_request) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_CANCELLED);
    cr_expect_eq(p.sent.status, KVF_ERR_CANCELLED, "%s", p.sent.message);
    pair_close(&p);
}

Test(core, deadline_ends_both_sides) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    cluster_advance(p.cluster, 31000000);
    cr_expect_eq(p.got.status, KVF_ERR_DEADLINE, "%s", p.got.message);
    cr_expect_eq(p.got.releases, 1, "our own handler makes the copies: no need to wait");
    cr_expect_eq(p.sent.status, KVF_ERR_DEADLINE, "%s", p.sent.message);
    cr_expect_eq(p.sent.releases, 0, "its copies have not left");
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core, a_killed_receiver_is_lost) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    cluster_kill(p.gen);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.releases, 1);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    node_give(p.ctx, p.sources);
    cr_expect(node_clean(p.ctx));
    /* It comes back, and the next request works. */
    cluster_restart(p.gen);
    node_take(p.ctx, 100, CONTENT, p.source, p.sources);
    node_take(p.gen, 100, 0, p.destination, p.destinations);
    p.sent = p.got = (watch_t){0};
    cr_assert_eq(node_offer(p.ctx, "r1", 100, p.sources, &p.sent, &p.send, p.ticket), KVF_OK);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(node_wrong(p.gen, 100, CONTENT, p.destinations), 0);
    pair_close(&p);
}

Test(core, a_frozen_sender_is_lost_after_two_seconds) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    p.ctx->stopped = true;
    cluster_advance(p.cluster, 1900000);
    cr_expect_eq(p.got.results, 0);
    cluster_advance(p.cluster, 200000);
    cr_expect_eq(p.got.results, 1);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST);
    cr_expect_not_null(strstr(p.got.message, "silent"), "%s", p.got.message);
    p.ctx->stopped = false;
    cluster_hold_chunks(p.cluster, false);
    cluster_advance(p.cluster, 100000);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core, own_stall_declares_nobody_lost) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    /* Both stand still for five seconds, as after a suspended machine. */
    kvf_core_set_time(p.gen->core, cluster_now(p.cluster) + 5000000);
    kvf_core_tick(p.gen->core);
    cr_expect_eq(p.got.results, 0);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core, heartbeats_keep_an_idle_pair_up) {
    pair_t p;
    kvf_peer_info_t info;
    pair_open(&p, &(cluster_options_t){0}, 40);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_advance(p.cluster, 60000000);
    cr_assert_eq(kvf_core_peers(p.gen->core, &info, 1), 1);
    cr_expect_eq(info.state, KVF_PEER_UP);
    cr_assert_eq(kvf_core_peers(p.ctx->core, &info, 1), 1);
    cr_expect_eq(info.state, KVF_PEER_UP);
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
    desc.direction = KVF_PULL;
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &none, &id, &p.detail),
                 KVF_ERR_UNSUPPORTED);
    desc.direction = KVF_PUSH;
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
