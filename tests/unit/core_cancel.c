/* SPDX-License-Identifier: Apache-2.0 */
/* The ends of transfers other than the good one: cancelled, late, lost, in quarantine. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdio.h>

/* Where a transfer is when something happens to it. */
typedef enum phase { BEFORE_CONNECT, CHUNKS_WAIT, CHUNKS_UNDER_WAY, AFTER_END, PHASES } phase_t;

static void run_to(pair_t *p, phase_t phase) {
    cluster_hold_chunks(p->cluster, phase != AFTER_END);
    cr_assert_eq(pair_fetch(p), KVF_OK, "%s", p->detail.text);
    if (phase == BEFORE_CONNECT) {
        return;
    }
    cluster_run(p->cluster);
    if (phase == CHUNKS_UNDER_WAY && !cluster_is_mapped(p->cluster)) {
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
ParameterizedTestParameters(core_cancel, by_phase) {
    static int index[PHASES * 4];
    for (int i = 0; i < PHASES * 4; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, PHASES * 4);
}

ParameterizedTest(int *i, core_cancel, by_phase) {
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

/* ---- every state, either side, every way to end it ---- */

typedef enum act {
    TWICE,
    BOTH_SIDES,
    OTHER_SIDE_LATER,
    SHUTDOWN,
    DEADLINE,
    FAILED_PREFILL,
    ACTS
} act_t;

#define WRITES 10

ParameterizedTestParameters(core_cancel, at_every_message) {
    static int index[4 * ACTS];
    for (int i = 0; i < 4 * ACTS; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 4 * ACTS);
}

static void give_up(pair_t *p, bool by_sender, kvf_status_t reason) {
    kvf_status_t status = by_sender ? kvf_core_send_cancel(p->ctx->core, p->send, reason)
                                    : kvf_core_recv_cancel(p->gen->core, p->recv);
    cr_expect(status == KVF_OK || status == KVF_ERR_UNKNOWN);
}

static void act(pair_t *p, act_t what, bool by_sender) {
    switch (what) {
    case TWICE:
        give_up(p, by_sender, KVF_ERR_CANCELLED);
        give_up(p, by_sender, KVF_ERR_CANCELLED);
        break;
    case BOTH_SIDES: /* neither knows of the other */
        give_up(p, by_sender, KVF_ERR_CANCELLED);
        give_up(p, !by_sender, KVF_ERR_CANCELLED);
        break;
    case OTHER_SIDE_LATER:
        give_up(p, by_sender, KVF_ERR_CANCELLED);
        cluster_run(p->cluster);
        give_up(p, !by_sender, KVF_ERR_CANCELLED);
        break;
    case SHUTDOWN:
        kvf_core_shutdown(by_sender ? p->ctx->core : p->gen->core);
        break;
    case DEADLINE: /* the receiver's, or the sender's for a receiver that does not end it */
        p->gen->stopped = by_sender;
        cluster_advance(p->cluster, 33000000);
        p->gen->stopped = false;
        break;
    default:
        give_up(p, by_sender, KVF_ERR_PREFILL_FAILED);
        break;
    }
}

/* The same two nodes again: it goes well. */
static void next_request(pair_t *p) {
    int32_t slots[2][KVF_MAX_GROUPS][64];
    kvf_table_t tables[2][KVF_MAX_GROUPS];
    watch_t sent = {0}, got = {0};
    uint64_t id;
    char ticket[KVF_TICKET_BYTES];
    node_take(p->ctx, 20, CONTENT + 1, slots[0], tables[0]);
    node_take(p->gen, 20, 0, slots[1], tables[1]);
    cr_assert_eq(node_offer(p->ctx, "next", 20, tables[0], &sent, &id, ticket), KVF_OK);
    cr_assert_eq(node_fetch(p->gen, "next", ticket, 20, tables[1], &got, &id, &p->detail), KVF_OK);
    cluster_advance(p->cluster, 100000);
    cr_expect_eq(sent.releases + got.releases, 2);
    cr_expect_eq(sent.status + got.status, KVF_OK, "%s", got.message);
    cr_expect_eq(node_wrong(p->gen, 20, CONTENT + 1, tables[1]), 0);
    node_give(p->ctx, tables[0]);
    node_give(p->gen, tables[1]);
}

/* Stop before each message of a transfer is read, in turn, let copies wait, and end it: one result
 * and one released event on both sides; whoever succeeds has all bytes; the next request works, and
 * all pages have come back then. (The last proof may come with it: who was frozen for so long that
 * the other side gave it up asks again when they meet.) */
ParameterizedTest(int *i, core_cancel, at_every_message) {
    bool by_sender = *i / 2 % 2 == 1;
    act_t what = (act_t)(*i / 4);
    bool one_sided = *i % 2 == 1;
    /* One-sided copies that are cut off while they wait to leave prove nothing, ever. */
    uint64_t n = one_sided && by_sender && what == DEADLINE ? WRITES : 2 * WRITES;
    for (uint64_t k = 1; k <= n; k++) {
        pair_t p;
        pair_open(&p, &(cluster_options_t){.one_sided = one_sided}, 100);
        cluster_hold_chunks(p.cluster, k > WRITES); /* at the end: copies that have not left */
        cluster_cut_at(p.cluster, (k - 1) % WRITES + 1, CUT_NOT);
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run_to_cut(p.cluster);
        act(&p, what, by_sender);
        cluster_run(p.cluster);
        cluster_hold_chunks(p.cluster, false);
        cluster_advance(p.cluster, 3000000);
        expect_one_end_each(&p);
        if (p.got.status == KVF_OK) {
            cr_expect_eq(node_wrong(p.gen, 100, CONTENT, p.destinations), 0);
        }
        cr_expect(p.sent.status != KVF_OK || p.got.status == KVF_OK, "write %d", (int)k);
        if (what != SHUTDOWN) {
            next_request(&p);
        }
        pair_close(&p);
    }
}

Test(core_cancel, one_sided_pages_stay_in_quarantine_until_drained) {
    pair_t p;
    cluster_needs_chunks();
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

/* The proof is read in the same turn in which the time for it runs out: it counts. */
Test(core_cancel, a_proof_that_comes_with_the_end_of_quarantine) {
    pair_t p;
    cluster_needs_chunks();
    pair_open(&p, &(cluster_options_t){.one_sided = true}, 100);
    run_to(&p, CHUNKS_WAIT);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_QUARANTINED), 13);
    p.gen->stopped = true;
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster); /* drained waits to be read */
    p.gen->ahead_us = 500000;
    p.gen->stopped = false;
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.n_poisoned, 0);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_HELD), 13);
    cluster_advance(p.cluster, 1000000);
    pair_close(&p);
}

/* A one-sided window that fails says nothing about what had left of it: the receiver is not told
 * that all is quiet, and its pages do not come back. */
Test(core_cancel, a_failed_one_sided_window_is_no_proof) {
    pair_t p;
    cluster_needs_chunks();
    pair_open(&p, &(cluster_options_t){.one_sided = true}, 100);
    run_to(&p, CHUNKS_WAIT);
    size_t n = kvf_sim_net_pending(cluster_net(p.cluster));
    for (size_t i = 0; i < n / 2; i++) {
        (void)kvf_sim_net_step(cluster_net(p.cluster), i); /* leaves */
    }
    kvf_sim_net_break(cluster_net(p.cluster), p.ctx->number, p.gen->number);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.results, 1);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_eq(p.got.releases, 0, "chunks are on their way to its pages");
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_QUARANTINED), 13);
    cluster_advance(p.cluster, 600000);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.n_poisoned, 13 + 4);
    node_give(p.gen, p.destinations);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_POISONED), 13);
    node_give(p.ctx, p.sources);
    cr_expect(node_clean(p.ctx));
    cluster_destroy(p.cluster);
}

/* Given up before the connection was there: the context side hears of it, and its pages do not wait
 * for the lease. */
Test(core_cancel, given_up_before_the_request) {
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

static kvf_counters_t counters_of(const node_t *node) {
    kvf_counters_t counters;
    kvf_core_counters(node->core, &counters);
    return counters;
}

/* A ticket that nobody comes for, because the request was cancelled before it had pages: as above,
 * to a peer that is not connected yet, and to one that is. */
Test(core_cancel, declined) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    for (int i = 0; i < 2; i++) {
        kvf_core_t *core = p.gen->core;
        cr_expect_eq(kvf_core_recv_decline(core, "r1", p.ticket, &p.detail), KVF_OK, "%s",
                     p.detail.text);
        cluster_run(p.cluster);
        cr_expect(watch_ended(&p.sent));
        cr_expect_eq(p.sent.status, KVF_ERR_CANCELLED, "%s", p.sent.message);
        cr_expect_eq(counters_of(p.gen).recvs_live, 0);
        cr_expect(!kvf_core_busy(core));
        /* It is used up. Again, and afterwards a receive of it: nobody minds. */
        cr_expect_eq(kvf_core_recv_decline(core, "r1", p.ticket, &p.detail), KVF_OK);
        cluster_run(p.cluster);
        cr_expect_eq(p.sent.results, 1);
        node_give(p.ctx, p.sources);
        node_take(p.ctx, p.prompt, CONTENT, p.source, p.sources);
        p.sent = (watch_t){0};
        pair_offer(&p);
    }
    cr_expect_eq(pair_fetch(&p), KVF_OK);
    cr_expect_eq(kvf_core_recv_decline(p.gen->core, "r1", p.ticket, &p.detail), KVF_ERR_DUPLICATE);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    pair_close(&p);
}

/* Nobody is told of what is none, and nothing is left of it. */
Test(core_cancel, declined_in_vain) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    char ticket[KVF_TICKET_BYTES];
    (void)snprintf(ticket, sizeof(ticket), "%s", p.ticket);
    ticket[strlen(ticket) / 2] ^= 1;
    kvf_core_t *core = p.gen->core;
    cr_expect_eq(kvf_core_recv_decline(core, "r1", ticket, &p.detail), KVF_ERR_FORGED);
    cr_expect_eq(kvf_core_recv_decline(core, "r1", NULL, &p.detail), KVF_ERR_FORGED);
    cr_expect_eq(kvf_core_recv_decline(core, "r2", p.ticket, &p.detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_core_recv_decline(core, "", p.ticket, &p.detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_core_recv_decline(core, NULL, p.ticket, &p.detail), KVF_ERR_INVALID);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.results, 0);
    cr_expect_eq(counters_of(p.gen).recvs_live, 0);
    cr_expect_eq(kvf_core_peers(core, NULL, 0), 0, "nobody was dialled");
    /* A node that is gone: it is forgotten that it was to be told. */
    cluster_kill(p.ctx);
    cr_expect_eq(kvf_core_recv_decline(core, "r1", p.ticket, &p.detail), KVF_OK);
    cluster_advance(p.cluster, 5000000);
    cr_expect_eq(counters_of(p.gen).recvs_live, 0);
    cr_expect(!kvf_core_busy(core));
    kvf_core_shutdown(core);
    cr_expect_eq(kvf_core_recv_decline(core, "r1", p.ticket, &p.detail), KVF_ERR_CANCELLED);
    node_give(p.gen, p.destinations);
    cr_expect(node_clean(p.gen));
    cluster_destroy(p.cluster);
}

/* Windows that do not complete: the sender's pages may still be read by its own mover. Others may
 * read them, nobody may write them; after quarantine_us the caller is told, and they heal when the
 * mover is done. */
Test(core_cancel, source_pages_wait_for_our_own_mover) {
    pair_t p;
    cluster_needs_chunks();
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.releases, 0);
    cr_expect_eq(kvf_pages_count(p.ctx->pages[0], KVF_PAGE_QUARANTINED), 13);
    cr_expect_eq(kvf_pages_write_begin(p.ctx->pages[0], p.source[0][3]), KVF_ERR_BUSY);
    cr_expect_eq(kvf_pages_read_begin(p.ctx->pages[0], p.source[0][3]), KVF_OK);
    kvf_pages_read_end(p.ctx->pages[0], p.source[0][3]);
    cluster_advance(p.cluster, 600000);
    expect_one_end_each(&p);
    cr_expect_eq(p.sent.n_poisoned, 13 + 4);
    cr_expect_eq(p.sent.quarantine_us, 500000);
    node_give(p.ctx, p.sources);
    cr_expect_eq(kvf_pages_count(p.ctx->pages[0], KVF_PAGE_POISONED), 13);
    cr_expect_eq(kvf_pages_count(p.ctx->pages[1], KVF_PAGE_POISONED), 4);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.releases, 1);
    cr_expect(node_clean(p.ctx));
    for (uint32_t g = 0; g < 2; g++) {
        p.sources[g].n_blocks = 0;
    }
    pair_close(&p);
}

/* Everything was cached: there is no page to be in doubt about. */
Test(core_cancel, nothing_granted_needs_no_proof) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){.one_sided = true}, 100);
    kvf_recv_desc_t desc = {.request_id = "r1",
                            .ticket = p.ticket,
                            .lengths = {.prompt_len = 100},
                            .allocated_tokens = 100,
                            .cached_tokens = 100,
                            .tables = p.destinations,
                            .n_tables = 2};
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &desc, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK);
    p.ctx->stopped = true;
    cluster_advance(p.cluster, 2500000);
    cr_expect_eq(p.got.results + p.got.releases, 2);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST);
    p.ctx->stopped = false;
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_advance(p.cluster, 500000);
    expect_one_end_each(&p);
    pair_close(&p);
}

Test(core_cancel, deadline_ends_both_sides) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    cluster_advance(p.cluster, 30200000);
    cr_expect_eq(p.got.status, KVF_ERR_DEADLINE, "%s", p.got.message);
    /* Our own handler makes the copies: no need to wait. But if a thread of ours has them, there
     * is. */
    cr_expect_eq(p.got.releases, cluster_is_mapped(p.cluster) ? 0 : 1);
    cr_expect_eq(p.got.quarantine_us, 0);
    cr_expect_eq(p.sent.status, KVF_ERR_DEADLINE, "%s", p.sent.message);
    cr_expect_eq(p.sent.releases, 0, "its copies have not left");
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.sent.quarantine_us, 200000);
    cr_expect_eq(p.sent.n_poisoned, 0);
    pair_close(&p);
}

/* The lease is for a receiver to come. One that came after 10 of its 30 seconds has 30 of its own.
 */
/* A receiver that lives and never ends a transfer: its time runs out at the sender, too. */
Test(core_cancel, a_receiver_that_does_not_end_a_transfer) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    p.ctx->ahead_us = 31900000; /* 30 s, and 2 s for the receiver to say so */
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.results, 0);
    p.ctx->ahead_us += 200000;
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.status, KVF_ERR_DEADLINE, "%s", p.sent.message);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_DEADLINE, "%s", p.got.message);
    pair_close(&p);
}

Test(core_cancel, the_lease_ends_when_a_receiver_comes) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    cluster_advance(p.cluster, 10000000);
    run_to(&p, CHUNKS_WAIT);
    cluster_advance(p.cluster, 25000000);
    cr_expect_eq(p.sent.results, 0, "%s", p.sent.message);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_OK, "%s", p.sent.message);
    pair_close(&p);
}

Test(core_cancel, a_killed_receiver_is_lost) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 100);
    run_to(&p, CHUNKS_WAIT);
    cluster_kill(p.gen);
    cluster_hold_chunks(p.cluster, false);
    cluster_advance(p.cluster, 300000); /* nobody listens there any more */
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

Test(core_cancel, a_frozen_sender_is_lost_after_two_seconds) {
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

Test(core_cancel, own_stall_declares_nobody_lost) {
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

Test(core_cancel, heartbeats_keep_an_idle_pair_up) {
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
