/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that break under transfers whose nodes live on. */
#include "../support/pair.h"

#include "proto/frame.h"
#include "proto/message.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#define PROMPT 40

/* The bytes of the pages that travel for PROMPT tokens: all blocks of "full"; of "swa" those that
 * hold one of the last 23 positions (the window, less the query itself). */
static uint64_t bytes_due(const kvf_layout_t *layout) {
    return 5 * kvf_group_block_bytes(&layout->groups[0]) +
           3 * kvf_group_block_bytes(&layout->groups[1]);
}

static void expect_whole(pair_t *p, uint64_t k) {
    kvf_counters_t sent, got;
    expect_one_end_each(p);
    cr_expect_eq(p->got.status, KVF_OK, "write %d: %s", (int)k, p->got.message);
    cr_expect_eq(p->sent.status, KVF_OK, "write %d: %s", (int)k, p->sent.message);
    cr_expect_eq(node_wrong(p->gen, p->prompt, CONTENT, p->destinations), 0);
    kvf_core_counters(p->ctx->core, &sent);
    kvf_core_counters(p->gen->core, &got);
    cr_expect_eq(sent.bytes_sent, bytes_due(&p->ctx->layout), "each range once");
    cr_expect(got.bytes_received == sent.bytes_sent || got.bytes_received == 0,
              "one-sided: unseen");
    cr_expect_eq(got.refused_chunks, 0);
}

ParameterizedTestParameters(session, cut_at_every_write) {
    static int index[2 * CUTS];
    for (int i = 0; i < 2 * CUTS; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 2 * CUTS);
}

/* Wherever the connection breaks, from the first preamble to the last acknowledgement, the transfer
 * goes on and moves each range once. */
ParameterizedTest(int *i, session, cut_at_every_write) {
    for (uint64_t k = 1;; k++) {
        pair_t p;
        pair_open(&p, &(cluster_options_t){.one_sided = *i % 2 == 1}, PROMPT);
        cluster_cut_at(p.cluster, k, (cut_t)(*i / 2));
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cluster_advance(p.cluster, 1500000);
        bool cut = cluster_was_cut(p.cluster);
        expect_whole(&p, k);
        pair_close(&p);
        if (!cut || k == 20) {
            cr_expect_eq(k, 20, "the conversation is longer than %d writes", (int)k);
            break;
        }
    }
}

/* ---- given up while there is no connection ---- */

typedef enum side { BY_SENDER, BY_RECEIVER, SIDES } side_t;

ParameterizedTestParameters(session, cut_at_every_write_and_cancelled) {
    static int index[2 * CUTS * SIDES];
    for (int i = 0; i < 2 * CUTS * SIDES; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 2 * CUTS * SIDES);
}

/* One side gives up as soon as the connection has broken; it may be that the other has not even
 * been asked. Both hear of it over the next one, and all pages come back. A transfer that was done
 * before is done on both sides, or on that side only which had nothing more to hear. */
ParameterizedTest(int *i, session, cut_at_every_write_and_cancelled) {
    side_t side = (side_t)(*i / (2 * CUTS));
    for (uint64_t k = 1; k <= 12; k++) {
        pair_t p;
        pair_open(&p, &(cluster_options_t){.one_sided = *i % 2 == 1}, PROMPT);
        cluster_hold_chunks(p.cluster, true);
        cluster_cut_at(p.cluster, k, (cut_t)(*i / 2 % CUTS));
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run_to_cut(p.cluster);
        kvf_status_t status = side == BY_SENDER
                                  ? kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED)
                                  : kvf_core_recv_cancel(p.gen->core, p.recv);
        cluster_advance(p.cluster, 100000);
        cluster_hold_chunks(p.cluster, false);
        cluster_advance(p.cluster, 1500000);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.n_poisoned, 0);
        if (status == KVF_OK) {
            const watch_t *own = side == BY_SENDER ? &p.sent : &p.got;
            cr_expect_eq(own->status, KVF_ERR_CANCELLED, "write %d: %s", (int)k, own->message);
            cr_expect(p.got.status == KVF_ERR_CANCELLED, "write %d: %s", (int)k, p.got.message);
            cr_expect(p.sent.status == KVF_ERR_CANCELLED, "write %d: %s", (int)k, p.sent.message);
        } else {
            expect_whole(&p, k);
        }
        pair_close(&p);
    }
}

/* ---- more than once ---- */

static int cut_every;
static cluster_t *cut_cluster;

static void cut_again(uint8_t *data, size_t bytes) {
    (void)data;
    (void)bytes;
    if (cluster_was_cut(cut_cluster)) { /* this write is the first of the next connection */
        cluster_cut_at(cut_cluster, (uint64_t)cut_every + 1, CUT_LOST);
    }
}

/* Connections that live for eight writes or a few more, of which six make the connection: a message
 * or so gets through each time, and in the end all have. */
Test(session, a_connection_that_always_breaks) {
    for (cut_every = 8; cut_every < 14; cut_every++) {
        pair_t p;
        pair_open(&p, &(cluster_options_t){0}, PROMPT);
        cut_cluster = p.cluster;
        cluster_cut_at(p.cluster, (uint64_t)cut_every, CUT_LOST);
        cluster_on_write(p.cluster, cut_again);
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_advance(p.cluster, 10000000);
        expect_whole(&p, (uint64_t)cut_every);
        pair_close(&p);
    }
}

/* Every allocation of one side fails once while the connection is made anew and the transfer goes
 * on: it does, or it ends on both sides; nothing leaks. */
Test(session, every_allocation_fails_once, .timeout = 60) {
    for (int side = 0; side < 2; side++) {
        for (uint64_t n = 1;; n++) {
            pair_t p;
            pair_open(&p, &(cluster_options_t){0}, PROMPT);
            node_t *node = side == 0 ? p.ctx : p.gen;
            cluster_hold_chunks(p.cluster, true);
            cr_assert_eq(pair_fetch(&p), KVF_OK);
            cluster_run(p.cluster);
            node->alloc.fail_at = node->alloc.calls + n;
            cluster_cut(p.cluster);
            cluster_advance(p.cluster, 100000);
            cluster_hold_chunks(p.cluster, false);
            cluster_advance(p.cluster, 40000000);
            bool failed = node->alloc.calls >= node->alloc.fail_at;
            node->alloc.fail_at = 0;
            expect_one_end_each(&p);
            cr_expect(p.got.status != KVF_OK ||
                      node_wrong(p.gen, PROMPT, CONTENT, p.destinations) == 0);
            cr_expect(failed || p.got.status + p.sent.status == KVF_OK, "%s", p.got.message);
            pair_close(&p);
            if (!failed || n == 60) { /* heartbeats go on for ever */
                cr_expect(n > 20, "allocations were counted");
                break;
            }
        }
    }
}

Test(session, what_is_counted) {
    kvf_counters_t counters;
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, PROMPT);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    kvf_core_counters(p.gen->core, &counters);
    cr_expect_eq(counters.reconnects, 0);
    for (int i = 0; i < 2; i++) {
        cluster_cut(p.cluster);
        cluster_advance(p.cluster, 500000);
    }
    kvf_core_audit(p.gen->core);
    kvf_core_counters(p.gen->core, &counters);
    cr_expect_eq(counters.reconnects, 2);
    cr_expect_eq(counters.audit_failures, 0);
    kvf_core_counters(p.ctx->core, &counters);
    cr_expect_eq(counters.reconnects, 2);
    pair_close(&p);
}

/* ---- given up by the other side ---- */

/* The sender is frozen and its connection breaks without its noticing. The receiver has waited its
 * two seconds and asks for something new. The sender learns at once that the old is over; the new
 * transfer is not disturbed. */
Test(session, who_was_given_up_begins_anew) {
    pair_t p;
    watch_t sent = {0}, got = {0};
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    pair_open(&p, &(cluster_options_t){0}, PROMPT);
    node_take(p.ctx, PROMPT, CONTENT + 1, source, sources);
    node_take(p.gen, PROMPT, 0, destination, destinations);
    cr_assert_eq(node_offer(p.ctx, "r2", PROMPT, sources, &sent, &send, ticket), KVF_OK);
    cluster_hold_chunks(p.cluster, true);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    p.ctx->stopped = true;
    cluster_cut_at(p.cluster, 1, CUT_UNSEEN);
    cluster_advance(p.cluster, 2500000);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_assert_eq(node_fetch(p.gen, "r2", ticket, PROMPT, destinations, &got, &recv, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    p.ctx->stopped = false;
    cluster_hold_chunks(p.cluster, false);
    cluster_advance(p.cluster, 500000);
    expect_one_end_each(&p);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    cr_expect_eq(sent.status + got.status, KVF_OK, "%s", got.message);
    cr_expect_eq(got.releases + sent.releases, 2);
    cr_expect_eq(node_wrong(p.gen, PROMPT, CONTENT + 1, destinations), 0);
    cr_expect(cluster_is_mapped(p.cluster) || node_written(p.gen, p.destinations) == 0,
              "late chunks are refused");
    node_give(p.ctx, sources);
    node_give(p.gen, destinations);
    pair_close(&p);
}

/* ---- chunks ---- */

/* A prefill in chunks whose connection breaks at every write, in turn; the engine does not know. */
Test(session, cut_between_chunks) {
    static const int64_t steps[] = {13, 16, 31, PROMPT};
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    for (uint64_t k = 1; k <= 24; k++) {
        const kvf_layout_t layout = cluster_layout();
        pair_t p = {.prompt = PROMPT};
        p.cluster = cluster_create(&(cluster_options_t){0});
        p.ctx = cluster_node(p.cluster, &layout, 64, NULL);
        p.gen = cluster_node(p.cluster, &layout, 64, NULL);
        node_take(p.ctx, PROMPT, CONTENT, p.source, p.sources);
        node_take(p.gen, PROMPT, 0, p.destination, p.destinations);
        kvf_send_desc_t desc = {.request_id = "r1",
                                .lengths = {.prompt_len = PROMPT},
                                .allocated_tokens = PROMPT,
                                .tables = p.sources,
                                .n_tables = 2};
        cr_assert_eq(kvf_core_send_open(p.ctx->core, &desc, watch_event, &p.sent, &p.send, NULL),
                     KVF_OK);
        cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
        cluster_cut_at(p.cluster, k, (cut_t)(k % CUTS));
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
            const kvf_range_t part = {0, 5, steps[i], NULL, 0};
            cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &part, NULL), KVF_OK);
            cluster_advance(p.cluster, 60000);
        }
        cr_assert_eq(kvf_core_send_finish(p.ctx->core, p.send, &aux, NULL), KVF_OK);
        cluster_advance(p.cluster, 1500000);
        cr_expect(cluster_was_cut(p.cluster));
        expect_whole(&p, k);
        pair_close(&p);
    }
}

/* ---- bounds ---- */

static uint64_t most_acknowledged, acknowledged_instead;

/* On its way, a heartbeat that acknowledges more than that comes to acknowledge less. */
static void acknowledge_less(uint8_t *data, size_t bytes) {
    ProtobufCMessage *message;
    if (bytes <= KVF_FRAME_HEADER_BYTES || data[0] != 'K' || data[3] != 'R' ||
        data[4] != KVF_FRAME_HEARTBEAT) {
        return;
    }
    cr_assert_eq(kvf_message_unpack(kvf_alloc_default(), KVF_FRAME_HEARTBEAT,
                                    data + KVF_FRAME_HEADER_BYTES, bytes - KVF_FRAME_HEADER_BYTES,
                                    &message, NULL),
                 KVF_OK);
    Kvf__Wire__Heartbeat *beat = (Kvf__Wire__Heartbeat *)message;
    uint64_t sequence = beat->sequence, received = beat->received, instead = acknowledged_instead;
    kvf_message_free(kvf_alloc_default(), message);
    if (received > most_acknowledged) {
        /* 0x08 sequence 0x10 received: a number in as many bytes as the one that was there. */
        size_t at = KVF_FRAME_HEADER_BYTES + 3;
        for (; sequence >= 128; sequence >>= 7) {
            at++;
        }
        for (; received >= 128; received >>= 7, instead >>= 7) {
            data[at++] = (uint8_t)(0x80 | instead);
        }
        data[at] = (uint8_t)(instead & 0x7f);
    }
}

static void short_frames(kvf_agent_config_t *config) {
    config->frame_bytes = 64 << 10;
    config->suspect_us = 40000000;
    config->lost_us = 40000000;
}

/* A peer that lives and acknowledges nothing. Requests that it refuses pile up on our side, until
 * new ones are refused with `again`; those that were open still come to their end. */
Test(session, who_acknowledges_nothing) {
    const kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = PROMPT};
    kvf_status_t status = KVF_OK;
    int n = 0;
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 64, short_frames);
    p.gen = cluster_node(p.cluster, &layout, 64, short_frames);
    node_take(p.ctx, PROMPT, CONTENT, p.source, p.sources);
    node_take(p.gen, PROMPT, 0, p.destination, p.destinations);
    cr_assert_eq(node_offer(p.ctx, "r1", PROMPT, p.sources, &p.sent, &p.send, p.ticket), KVF_OK);
    most_acknowledged = acknowledged_instead = 0;
    cluster_on_write(p.cluster, acknowledge_less);
    for (; status == KVF_OK && n < 200000; n++) {
        memset(&p.got, 0, sizeof(p.got));
        status = pair_fetch(&p);
        if (status == KVF_OK) {
            cluster_run(p.cluster);
            cr_assert_eq(p.got.results + p.got.releases, 2);
        }
    }
    cr_expect_eq(status, KVF_ERR_AGAIN, "%s", p.detail.text);
    /* A request of 8 pages with its ticket takes some 250 bytes: 8 MiB of them. */
    cr_expect(n > 20000 && n < 60000, "after %d", n);
    cluster_advance(p.cluster, 1000000);
    cr_expect_eq(pair_fetch(&p), KVF_ERR_AGAIN);
    cluster_on_write(p.cluster, NULL);
    cluster_advance(p.cluster, 1000000); /* a heartbeat acknowledges all */
    memset(&p.got, 0, sizeof(p.got));
    cr_expect_eq(pair_fetch(&p), KVF_OK, "%s", p.detail.text);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_ERR_USED, "%s", p.got.message);
    pair_close(&p);
}

/* A receiver that asks again and again for what it cannot have, and acknowledges none of the
 * answers: it is given up when they take more room than may be. */
Test(session, who_acknowledges_no_refusal) {
    cluster_needs_chunks(); /* a receiver that copies says more than is counted on here */
    const kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = PROMPT};
    kvf_peer_info_t info = {.state = KVF_PEER_UP};
    uint64_t n = 1;
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 64, short_frames);
    p.gen = cluster_node(p.cluster, &layout, 64, short_frames);
    node_take(p.ctx, PROMPT, CONTENT, p.source, p.sources);
    node_take(p.gen, PROMPT, 0, p.destination, p.destinations);
    cr_assert_eq(node_offer(p.ctx, "r1", PROMPT, p.sources, &p.sent, &p.send, p.ticket), KVF_OK);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    /* Two answers to each request: what acknowledges more messages than there were requests are
     * the receiver's. (No time passes, so these come when so many bytes have.) */
    cluster_on_write(p.cluster, acknowledge_less);
    for (; info.state == KVF_PEER_UP && n < 200000; n++) {
        most_acknowledged = n + 8; /* the first request had more to say */
        memset(&p.got, 0, sizeof(p.got));
        cr_assert_eq(pair_fetch(&p), KVF_OK, "request %d: %s", (int)n, p.detail.text);
        cluster_run(p.cluster);
        cr_assert_eq(kvf_core_peers(p.ctx->core, &info, 1), 1);
    }
    cr_expect_eq(info.state, KVF_PEER_LOST);
    cr_expect_not_null(strstr(info.reason, "does not acknowledge"), "%s", info.reason);
    /* Two answers take some 200 bytes: 8 MiB and 256 KiB of them. */
    cr_expect(n > 25000 && n < 80000, "after %d", (int)n);
    cluster_on_write(p.cluster, NULL);
    cluster_advance(p.cluster, 1000000);
    pair_close(&p);
}

/* ---- leases ---- */

/* On its way, a heartbeat that renews transfers 2 and 1 comes to renew 66 and 1. */
static void spoil(uint8_t *data, size_t bytes) {
    static const uint8_t renewed[] = {3 << 3 | 2, 2, 2, 1}; /* field 3, 2 bytes: 2, 1 */
    if (bytes > KVF_FRAME_HEADER_BYTES && data[4] == KVF_FRAME_HEARTBEAT &&
        memcmp(data + bytes - 4, renewed, 4) == 0) {
        data[bytes - 2] = 66;
    }
}

static void short_lease(kvf_agent_config_t *config) {
    config->lease_us = 3000000;
}

typedef struct two {
    cluster_t *cluster;
    node_t *ctx, *gen;
    int32_t source[2][KVF_MAX_GROUPS][64], destination[2][KVF_MAX_GROUPS][64];
    kvf_table_t sources[2][KVF_MAX_GROUPS], destinations[2][KVF_MAX_GROUPS];
    watch_t sent[2], got[2];
    uint64_t send[2], recv[2];
    char ticket[2][KVF_TICKET_BYTES];
} two_t;

static void two_open(two_t *t) {
    static const char *const names[] = {"r0", "r1"};
    const kvf_layout_t layout = cluster_layout();
    kvf_detail_t detail;
    memset(t, 0, sizeof(*t));
    t->cluster = cluster_create(&(cluster_options_t){0});
    t->ctx = cluster_node(t->cluster, &layout, 64, short_lease);
    t->gen = cluster_node(t->cluster, &layout, 64, NULL);
    cluster_hold_chunks(t->cluster, true);
    for (int i = 0; i < 2; i++) {
        node_take(t->ctx, PROMPT, CONTENT, t->source[i], t->sources[i]);
        node_take(t->gen, PROMPT, 0, t->destination[i], t->destinations[i]);
        cr_assert_eq(node_offer(t->ctx, names[i], PROMPT, t->sources[i], &t->sent[i], &t->send[i],
                                t->ticket[i]),
                     KVF_OK);
        cr_assert_eq(node_fetch(t->gen, names[i], t->ticket[i], PROMPT, t->destinations[i],
                                &t->got[i], &t->recv[i], &detail),
                     KVF_OK);
    }
    cluster_run(t->cluster);
}

static void two_close(two_t *t) {
    for (int i = 0; i < 2; i++) {
        node_give(t->ctx, t->sources[i]);
        node_give(t->gen, t->destinations[i]);
    }
    cr_expect(node_clean(t->ctx) && node_clean(t->gen));
    cluster_destroy(t->cluster);
}

static void fast_beats(kvf_agent_config_t *config) {
    config->heartbeat_us = 10000;
}

/* A hello of an attempt to connect that its node has given up is read when the next connection has
 * been up for a while, and more has been said and acknowledged: it disturbs nobody. */
Test(session, a_hello_that_was_overtaken) {
    const kvf_layout_t layout = cluster_layout();
    kvf_peer_info_t info;
    kvf_counters_t counters;
    pair_t p = {.prompt = PROMPT};
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 64, fast_beats);
    p.gen = cluster_node(p.cluster, &layout, 64, fast_beats);
    for (int round = 0; round < 2; round++) {
        memset(&p.sent, 0, sizeof(p.sent));
        memset(&p.got, 0, sizeof(p.got));
        node_take(p.ctx, PROMPT, CONTENT, p.source, p.sources);
        node_take(p.gen, PROMPT, 0, p.destination, p.destinations);
        cr_assert_eq(node_offer(p.ctx, "r1", PROMPT, p.sources, &p.sent, &p.send, p.ticket),
                     KVF_OK);
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_advance(p.cluster, 20000);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.status + p.sent.status, KVF_OK, "%s", p.sent.message);
        node_give(p.ctx, p.sources);
        node_give(p.gen, p.destinations);
        if (round == 0) {
            cluster_advance(p.cluster, 20000);
            cluster_cut_at(p.cluster, 3, CUT_UNSEEN); /* preamble, preamble, hello */
            cluster_cut(p.cluster);
            cluster_advance(p.cluster, 2000);
            cluster_advance(p.cluster, 2000);
            cr_assert(cluster_was_cut(p.cluster));
        }
    }
    cluster_advance(p.cluster, 15000);
    cluster_advance(p.cluster, 2000); /* acknowledged */
    cluster_advance(p.cluster, 100000);
    kvf_core_counters(p.ctx->core, &counters);
    cr_expect_eq(counters.reconnects, 1);
    cr_assert_eq(kvf_core_peers(p.ctx->core, &info, 1), 1);
    cr_expect_eq(info.state, KVF_PEER_UP, "%s", info.reason);
    cr_expect_eq(counters.refused_frames, 0);
    cr_expect(node_clean(p.ctx) && node_clean(p.gen));
    cluster_destroy(p.cluster);
}

/* Two transfers that take longer than a lease. Heartbeats name both, and both go on. */
Test(session, heartbeats_renew_leases) {
    two_t t;
    two_open(&t);
    cluster_advance(t.cluster, 12000000);
    cr_expect_eq(t.sent[0].results + t.sent[1].results, 0, "%s", t.sent[0].message);
    cluster_hold_chunks(t.cluster, false);
    cluster_run(t.cluster);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(t.got[i].results + t.sent[i].results, 2);
        cr_expect_eq(t.got[i].status, KVF_OK, "%s", t.got[i].message);
    }
    two_close(&t);
}

/* The first is renewed, the second is not, although its receiver's heartbeats keep coming: the
 * second expires, without any new work; the first goes on. (A reaper that ends its walk at the
 * first live lease, or that walks only when there is work, fails here.) */
Test(session, a_lease_that_is_not_renewed_expires_alone) {
    two_t t;
    two_open(&t);
    cluster_advance(t.cluster, 2000000);
    cluster_on_write(t.cluster, spoil);
    cluster_advance(t.cluster, 2500000);
    cr_expect_eq(t.sent[1].results, 0, "renewed before");
    cluster_advance(t.cluster, 1000000);
    cr_expect_eq(t.sent[0].results, 0);
    cr_expect_eq(t.sent[1].results, 1);
    cr_expect_eq(t.sent[1].status, KVF_ERR_EXPIRED, "%s", t.sent[1].message);
    cr_expect_eq(t.got[1].status, KVF_ERR_EXPIRED, "%s", t.got[1].message);
    cluster_hold_chunks(t.cluster, false);
    cluster_run(t.cluster);
    cr_expect_eq(t.sent[0].status + t.got[0].status, KVF_OK, "%s", t.got[0].message);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(t.got[i].results + t.sent[i].results, 2);
        cr_expect_eq(t.got[i].releases + t.sent[i].releases, 2);
    }
    two_close(&t);
}

/* A pool full of sends that nobody comes for, and no work: they expire by the timer alone. */
Test(session, leases_end_without_new_work) {
    static const char *const names[] = {"r0", "r1", "r2", "r3"};
    const kvf_layout_t layout = cluster_layout();
    int32_t slots[4][KVF_MAX_GROUPS][64];
    kvf_table_t tables[4][KVF_MAX_GROUPS];
    watch_t sent[4] = {{0}};
    uint64_t id;
    char ticket[KVF_TICKET_BYTES];
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 20, short_lease);
    for (int i = 0; i < 4; i++) {
        node_take(ctx, PROMPT, CONTENT, slots[i], tables[i]);
        cr_assert_eq(node_offer(ctx, names[i], PROMPT, tables[i], &sent[i], &id, ticket), KVF_OK);
        node_give(ctx, tables[i]); /* the sends keep them */
    }
    cr_assert_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 0);
    cluster_run(cluster); /* their digests are made */
    while (kvf_core_next_us(ctx->core) != KVF_NEVER) {
        kvf_core_set_time(ctx->core, kvf_core_next_us(ctx->core));
        kvf_core_tick(ctx->core);
        (void)kvf_core_deliver(ctx->core);
    }
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(sent[i].results + sent[i].releases, 2);
        cr_expect_eq(sent[i].status, KVF_ERR_EXPIRED);
    }
    cr_expect(node_clean(ctx));
    cluster_destroy(cluster);
}

/* Who stood still for longer than a lease does not take it for the receivers' silence. */
Test(session, own_stall_expires_nothing) {
    two_t t;
    two_open(&t);
    kvf_core_set_time(t.ctx->core, cluster_now(t.cluster) + 10000000);
    kvf_core_tick(t.ctx->core);
    cr_expect(!kvf_core_has_events(t.ctx->core));
    cluster_hold_chunks(t.cluster, false);
    cluster_run(t.cluster);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(t.got[i].results + t.sent[i].results, 2);
        cr_expect_eq(t.got[i].status + t.sent[i].status, KVF_OK, "%s", t.sent[i].message);
    }
    two_close(&t);
}
