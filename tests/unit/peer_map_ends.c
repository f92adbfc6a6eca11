/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers whose receiver copies, and that end while it does: whose pages wait for what. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

static const cluster_options_t mapped = {.mapped = true};

/* 100 tokens: 13 blocks of "full" and 4 of "swa". */
#define FULL 13
#define SWA 4

static int n_drained, n_aborts;
static kvf_chunk_t granted; /* what the sender could say of the first page that it was granted */

static void remember(const Kvf__Wire__RecvRequest *request) {
    const Kvf__Wire__Grant *grant = request->grants[0];
    granted = (kvf_chunk_t){.grant_key = request->grant_key,
                            .group_idx = grant->group_idx,
                            .ordinal = (int64_t)grant->ordinals[0],
                            .slot = (int32_t)grant->slots[0],
                            .generation = grant->generations[0],
                            .bytes = 64};
    granted.transfer = kvf_transfer_id_read(request->transfer);
}

static void count(kvf_frame_type_t type, ProtobufCMessage *message) {
    if (type == KVF_FRAME_RECV_REQUEST) {
        remember((const Kvf__Wire__RecvRequest *)message);
    }
    n_drained += type == KVF_FRAME_DRAINED;
    n_aborts += type == KVF_FRAME_ABORT;
}

/* A transfer whose copies are with the threads of the receiver. */
static void open_copying(pair_t *p) {
    pair_open(p, &mapped, 100);
    cluster_on_message(p->cluster, count);
    cluster_hold_chunks(p->cluster, true);
    cr_assert_eq(pair_fetch(p), KVF_OK);
    cluster_run(p->cluster);
    cr_assert_eq(node_jobs(p->gen), 1);
    cr_expect_eq(p->got.results + p->sent.results, 0);
}

/* How many pages of a node have that label. */
static void expect_pages(const node_t *node, kvf_page_label_t label, int64_t full, int64_t swa) {
    cr_expect_eq(kvf_pages_count(node->pages[0], label), full, "%d are %s, not %d",
                 (int)kvf_pages_count(node->pages[0], label), kvf_page_label_name(label),
                 (int)full);
    cr_expect_eq(kvf_pages_count(node->pages[1], label), swa);
}

/* The copies are made: what they wrote is the pages' own. */
static void expect_settled(pair_t *p) {
    expect_one_end_each(p);
    expect_pages(p->ctx, KVF_PAGE_HELD, FULL, SWA);
    expect_pages(p->gen, KVF_PAGE_HELD, FULL, SWA);
    cr_expect_eq(node_wrong(p->gen, 100, CONTENT, p->destinations), 0);
    pair_close(p);
}

/* ---- cancelled, or late ---- */

/* The result comes at once, on both sides. The receiver's own pages are written to until its job is
 * done; then it says Drained, and not before; then the sender's come back. */
static void expect_to_wait_for_the_job(pair_t *p, kvf_status_t status) {
    cluster_run(p->cluster);
    cr_expect_eq(p->got.results + p->sent.results, 2);
    cr_expect_eq(p->got.status, status, "%s", p->got.message);
    cr_expect_eq(p->sent.status, status, "%s", p->sent.message);
    cr_expect_eq(p->got.releases + p->sent.releases, 0);
    expect_pages(p->ctx, KVF_PAGE_QUARANTINED, FULL, SWA);
    expect_pages(p->gen, KVF_PAGE_WRITING, FULL, SWA);
    cr_expect_eq(n_drained, 0);
    cluster_advance(p->cluster, 400000); /* within quarantine_us */
    cr_expect_eq(p->got.releases + p->sent.releases, 0);
    node_run_job(p->gen, 0);
    cr_expect_eq(n_drained, 1);
    expect_pages(p->ctx, KVF_PAGE_QUARANTINED, FULL, SWA);
    cluster_run(p->cluster);
    cr_expect_eq(p->sent.n_poisoned + p->got.n_poisoned, 0);
    cr_expect_eq(p->sent.quarantine_us, 400000);
    cr_expect_eq(p->got.quarantine_us, 0);
    expect_settled(p);
}

Test(peer_map_ends, the_sender_cancels) {
    pair_t p;
    open_copying(&p);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    expect_to_wait_for_the_job(&p, KVF_ERR_CANCELLED);
}

Test(peer_map_ends, the_receiver_cancels) {
    pair_t p;
    open_copying(&p);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    expect_to_wait_for_the_job(&p, KVF_ERR_CANCELLED);
}

/* A driver without the mapping: what was not copied is not taken for copied, digests or none. */
Test(peer_map_ends, nothing_to_copy_from) {
    pair_t p;
    open_copying(&p);
    ((kvf_verify_t *)p.gen->jobs)->status = KVF_ERR_PEER_LOST;
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_not_null(strstr(p.got.message, "not mapped any more"), "%s", p.got.message);
    expect_settled(&p);
}

Test(peer_map_ends, the_receivers_time_is_over) {
    pair_t p;
    open_copying(&p);
    cluster_advance(p.cluster, 30000000);
    expect_to_wait_for_the_job(&p, KVF_ERR_DEADLINE);
}

/* An engine that gives its pages back with the result: nobody else gets them. */
Test(peer_map_ends, pages_given_back_early) {
    pair_t p;
    open_copying(&p);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    node_give(p.gen, p.destinations);
    node_give(p.ctx, p.sources);
    expect_pages(p.gen, KVF_PAGE_FREE, 128 - FULL, 128 - SWA);
    expect_pages(p.ctx, KVF_PAGE_FREE, 128 - FULL, 128 - SWA);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect(node_clean(p.gen) && node_clean(p.ctx));
    cluster_destroy(p.cluster);
}

/* No proof within quarantine_us: the sender's pages are poisoned, and listed; they heal when it
 * comes. The receiver waits for its own threads alone, however long. */
Test(peer_map_ends, poisoned_and_healed) {
    pair_t p;
    open_copying(&p);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_advance(p.cluster, 600000);
    cr_expect_eq(p.sent.releases, 1);
    cr_expect_eq(p.sent.n_poisoned, FULL + SWA);
    cr_expect_eq(p.sent.quarantine_us, 500000);
    expect_pages(p.ctx, KVF_PAGE_POISONED, FULL, SWA);
    cluster_advance(p.cluster, 60000000);
    cr_expect_eq(p.got.releases, 0);
    expect_pages(p.gen, KVF_PAGE_WRITING, FULL, SWA);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    expect_settled(&p);
}

/* Nothing was told to the receiver: nothing is to be waited for. */
Test(peer_map_ends, cancelled_before_a_commit) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    pair_t p;
    pair_make(&p, &mapped, 128, 100);
    kvf_send_desc_t desc = {.request_id = "r1",
                            .lengths = {.prompt_len = 100},
                            .allocated_tokens = 100,
                            .tables = p.sources,
                            .n_tables = 2};
    cr_assert_eq(kvf_core_send_open(p.ctx->core, &desc, watch_event, &p.sent, &p.send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
    cluster_map_fate(p.cluster, MAP_GOES_WELL);
    cluster_on_message(p.cluster, count);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(kvf_core_send_finish(p.ctx->core, p.send, &aux, NULL), KVF_ERR_INVALID);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_PREFILL_FAILED), KVF_OK);
    (void)kvf_core_deliver(p.ctx->core);
    cr_expect_eq(p.sent.releases, 1, "at once");
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_PREFILL_FAILED, "%s", p.got.message);
    pair_close(&p);
}

/* ---- the other node is lost ---- */

/* The sender stands still. The receiver gives it up, and gives the mapping back with its last copy.
 */
Test(peer_map_ends, the_sender_stands_still) {
    pair_t p;
    open_copying(&p);
    p.ctx->stopped = true;
    cluster_advance(p.cluster, 2200000);
    cr_expect_eq(p.got.results, 1);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_eq(p.got.releases, 0);
    expect_pages(p.gen, KVF_PAGE_WRITING, FULL, SWA);
    p.ctx->stopped = false;
    cluster_advance(p.cluster, 300000);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    expect_pages(p.ctx, KVF_PAGE_QUARANTINED, FULL, SWA);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    cr_expect_eq(n_drained, 0, "there is nobody to say it to");
    expect_settled(&p);
}

/* The sender's process is gone: its memory stays until the copies are made. */
Test(peer_map_ends, the_sender_is_killed) {
    pair_t p;
    open_copying(&p);
    cluster_kill(p.ctx);
    cluster_advance(p.cluster, 300000);
    cr_expect_eq(p.got.results, 1);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    expect_pages(p.gen, KVF_PAGE_WRITING, FULL, SWA);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    cr_expect(watch_ended(&p.got));
    cr_expect_eq(node_wrong(p.gen, 100, CONTENT, p.destinations), 0);
    node_give(p.gen, p.destinations);
    cr_expect(node_clean(p.gen));
    cluster_destroy(p.cluster);
}

/* The receiver's process is gone: not its silence is the proof, but its end. */
Test(peer_map_ends, the_receiver_is_killed) {
    pair_t p;
    open_copying(&p);
    cluster_hold_returned(p.cluster, true);
    cluster_kill(p.gen);
    cluster_advance(p.cluster, 300000);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    expect_pages(p.ctx, KVF_PAGE_QUARANTINED, FULL, SWA);
    cluster_advance(p.cluster, 600000);
    cr_expect_eq(p.sent.n_poisoned, FULL + SWA);
    expect_pages(p.ctx, KVF_PAGE_POISONED, FULL, SWA);
    cluster_hold_returned(p.cluster, false);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.releases, 1);
    expect_pages(p.ctx, KVF_PAGE_HELD, FULL, SWA);
    node_give(p.ctx, p.sources);
    cr_expect(node_clean(p.ctx));
    cluster_destroy(p.cluster);
}

/* ---- another conversation ---- */

/* A second request between the two, whose copies wait as well. */
typedef struct second {
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
} second_t;

/* The receiver stands still until the sender gives it up, whose pages are poisoned then; it comes
 * back, and asks for something else. */
static void lose_and_meet_again(pair_t *p, second_t *s) {
    char ticket[KVF_TICKET_BYTES];
    memset(s, 0, sizeof(*s));
    p->gen->stopped = true;
    cluster_advance(p->cluster, 3000000);
    cr_expect_eq(p->sent.status, KVF_ERR_PEER_LOST, "%s", p->sent.message);
    expect_pages(p->ctx, KVF_PAGE_POISONED, FULL, SWA);
    p->gen->stopped = false;
    cluster_advance(p->cluster, 3000000);
    cr_expect_eq(p->got.status, KVF_ERR_PEER_LOST, "%s", p->got.message);
    node_take(p->ctx, 100, CONTENT + 1, s->source, s->sources);
    node_take(p->gen, 100, 0, s->destination, s->destinations);
    cr_assert_eq(node_offer(p->ctx, "r2", 100, s->sources, &s->sent, &s->send, ticket), KVF_OK);
    n_aborts = n_drained = 0;
    cr_assert_eq(
        node_fetch(p->gen, "r2", ticket, 100, s->destinations, &s->got, &s->recv, &p->detail),
        KVF_OK);
    cluster_run(p->cluster);
}

static void close_second(pair_t *p, second_t *s, kvf_status_t status) {
    cr_expect(watch_ended(&s->sent) && watch_ended(&s->got));
    cr_expect_eq(s->sent.status, status, "%s", s->sent.message);
    cr_expect_eq(s->got.status, status, "%s", s->got.message);
    cr_expect_eq(node_wrong(p->gen, 100, CONTENT + 1, s->destinations), 0);
    node_give(p->ctx, s->sources);
    node_give(p->gen, s->destinations);
}

/* The last copy was made while there was no conversation, so that Drained was never said. The
 * sender asks in the next one, and is answered. */
Test(peer_map_ends, asked_again) {
    pair_t p;
    second_t s;
    open_copying(&p);
    cluster_hold_returned(p.cluster, true);
    p.gen->stopped = true;
    cluster_advance(p.cluster, 3000000);
    p.gen->stopped = false;
    cluster_advance(p.cluster, 3000000);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    cr_expect_eq(n_drained, 0);
    cr_expect_eq(p.got.releases, 1);
    expect_pages(p.ctx, KVF_PAGE_POISONED, FULL, SWA);
    lose_and_meet_again(&p, &s);
    cr_expect_eq(n_aborts, 1);
    cr_expect_eq(n_drained, 1);
    expect_pages(p.ctx, KVF_PAGE_POISONED, 0, 0);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    close_second(&p, &s, KVF_OK);
    expect_settled(&p);
}

/* It is asked while the copy is still under way: the answer waits for that. It copies from the
 * first mapping; the second request has one of its own. */
Test(peer_map_ends, asked_again_while_it_copies) {
    pair_t p;
    second_t s;
    open_copying(&p);
    cluster_hold_returned(p.cluster, true);
    lose_and_meet_again(&p, &s);
    cr_assert_eq(node_jobs(p.gen), 2);
    cr_expect_eq(n_aborts, 2, "each asks the other");
    cr_expect_eq(n_drained, 0);
    cluster_advance(p.cluster, 200000);
    expect_pages(p.ctx, KVF_PAGE_POISONED, FULL, SWA);
    expect_pages(p.gen, KVF_PAGE_WRITING, 2 * FULL, 2 * SWA);
    node_run_job(p.gen, 1); /* the first one */
    cluster_run(p.cluster);
    cr_expect_geq(n_drained, 1);
    expect_pages(p.ctx, KVF_PAGE_POISONED, 0, 0);
    expect_pages(p.ctx, KVF_PAGE_READING, FULL, SWA);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    close_second(&p, &s, KVF_OK);
    expect_settled(&p);
}

/* The first mapping is given back while there is a second one, whose copies are under way: it is a
 * proof for none of the second's. */
Test(peer_map_ends, one_of_two_mappings) {
    pair_t p;
    second_t s;
    open_copying(&p);
    lose_and_meet_again(&p, &s);
    cr_assert_eq(node_jobs(p.gen), 2);
    node_run_job(p.gen, 1);
    cluster_run(p.cluster); /* and with it the first mapping is gone */
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, s.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(s.sent.results, 1);
    cr_expect_eq(s.sent.releases, 0);
    expect_pages(p.ctx, KVF_PAGE_QUARANTINED, FULL, SWA);
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    close_second(&p, &s, KVF_ERR_CANCELLED);
    expect_settled(&p);
}

/* ---- jobs ---- */

#define LONG_PROMPT 511 /* 64 blocks of 8192 bytes and 3 of 6912 */

static const size_t orders[][4] = {{0, 0, 0, 0}, {3, 2, 1, 0}, {1, 1, 1, 0}, {2, 0, 1, 0}};

ParameterizedTestParameters(peer_map_ends, jobs_in_any_order) {
    static size_t index[sizeof(orders) / sizeof(orders[0])];
    for (size_t i = 0; i < sizeof(index) / sizeof(index[0]); i++) {
        index[i] = i;
    }
    return cr_make_param_array(size_t, index, sizeof(index) / sizeof(index[0]));
}

/* As many as a receive may have at once; it is done with the last of them, whichever that is. */
ParameterizedTest(size_t *i, peer_map_ends, jobs_in_any_order) {
    pair_t p;
    size_t n = 0;
    pair_make(&p, &mapped, 128, LONG_PROMPT);
    pair_offer(&p);
    cluster_hold_chunks(p.cluster, true);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    size_t n_jobs = node_jobs(p.gen);
    cr_assert_gt(n_jobs, 2);
    cr_assert_leq(n_jobs, 8);
    for (; node_jobs(p.gen) > 0; n++) {
        cr_expect_eq(p.got.results, 0);
        size_t idx = orders[*i][n % 4], left = node_jobs(p.gen);
        node_run_job(p.gen, idx < left ? idx : left - 1);
        cluster_run(p.cluster);
    }
    cr_expect_geq(n, n_jobs);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.got.layers, 5);
    cr_expect_eq(node_wrong(p.gen, LONG_PROMPT, CONTENT, p.destinations), 0);
    pair_close(&p);
}

/* Cancelled with several jobs out: only the last one of them is the proof. */
Test(peer_map_ends, the_last_job_counts) {
    pair_t p;
    pair_make(&p, &mapped, 128, LONG_PROMPT);
    pair_offer(&p);
    n_drained = 0;
    cluster_on_message(p.cluster, count);
    cluster_hold_chunks(p.cluster, true);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_assert_gt(node_jobs(p.gen), 2);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(p.cluster);
    while (node_jobs(p.gen) > 0) {
        cr_expect_eq(p.got.releases + p.sent.releases, 0);
        cr_expect_eq(n_drained, 0);
        node_run_job(p.gen, node_jobs(p.gen) - 1);
        cluster_run(p.cluster);
    }
    cr_expect_eq(n_drained, 1);
    expect_one_end_each(&p);
    pair_close(&p);
}

/* A page that changes while it is copied, as none should: the digest was made before. */
Test(peer_map_ends, a_page_that_changes_under_the_copy) {
    kvf_counters_t counters;
    pair_t p;
    open_copying(&p);
    node_page(p.ctx, 0, p.source[0][5])[4097] ^= 4;
    node_run_job(p.gen, 0);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_eq(p.sent.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_not_null(strstr(p.got.message, "group full, ordinal 5"), "%s", p.got.message);
    kvf_core_counters(p.gen->core, &counters);
    cr_expect_eq(counters.digest_mismatches, 1);
    cr_expect_eq(node_wrong(p.gen, 100, CONTENT, p.destinations), 1, "just that byte");
    pair_close(&p);
}

/* ---- memory ---- */

/* Every allocation of one side fails once while a transfer is cancelled that is being copied, and
 * while the two meet again: all pages come back in the end. */
Test(peer_map_ends, every_allocation_fails_once, .timeout = 60) {
    for (int side = 0; side < 2; side++) {
        for (uint64_t n = 1;; n++) {
            pair_t p;
            open_copying(&p);
            node_t *node = side == 0 ? p.ctx : p.gen;
            node->alloc.fail_at = node->alloc.calls + n;
            cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
            cluster_advance(p.cluster, 100000);
            cluster_cut(p.cluster);
            cluster_advance(p.cluster, 700000);
            cluster_hold_chunks(p.cluster, false);
            cluster_advance(p.cluster, 5000000);
            bool failed = node->alloc.calls >= node->alloc.fail_at;
            node->alloc.fail_at = 0;
            expect_settled(&p);
            if (!failed || n == 60) { /* heartbeats go on for ever */
                cr_expect_gt(n, 10);
                break;
            }
        }
    }
}

/* Chunks for a receive that copies itself: whoever has its key knows better, so it ends. Pages may
 * be where the CPU does not reach. */
Test(peer_map_ends, chunks_for_who_copies_itself) {
    pair_t p;
    kvf_landing_t landing;
    open_copying(&p);
    cr_expect_eq(kvf_core_grant_check(p.gen->core, &granted, &landing), KVF_ERR_RANGE);
    expect_to_wait_for_the_job(&p, KVF_ERR_PROTOCOL);
}
