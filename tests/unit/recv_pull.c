/* SPDX-License-Identifier: Apache-2.0 */
/* The receiver paces: what moves was asked for, and what was asked for is bounded. */
#include "../support/pair.h"

#include "proto/message.h"

#include <criterion/criterion.h>

/* Bytes that may be open between a receiver of these tests and a peer; a transfer has half, and the
 * one byte that makes it whole. */
#define WINDOW 20000
#define SHARE (WINDOW / 2 + 1)
#define FULL_PAGE 8192 /* of cluster_layout(): 2 layers, k and v, 2 heads, 8 tokens, 64 bf16 */
#define SWA_PAGE 6912  /* 3 layers, k and v, 1 head, 8 tokens, 72 bf16 */

static void narrow(kvf_agent_config_t *config) {
    config->window_bytes = WINDOW;
}

/* A pair whose receiver has a narrow window; chunks wait. */
static void open_narrow(pair_t *p, int64_t prompt, bool one_sided) {
    const kvf_layout_t layout = cluster_layout();
    memset(p, 0, sizeof(*p));
    p->prompt = prompt;
    p->cluster = cluster_create(&(cluster_options_t){.one_sided = one_sided});
    p->ctx = cluster_node(p->cluster, &layout, 128, NULL);
    p->gen = cluster_node(p->cluster, &layout, 128, narrow);
    node_take(p->ctx, prompt, CONTENT, p->source, p->sources);
    node_take(p->gen, prompt, 0, p->destination, p->destinations);
    cr_assert_eq(node_offer(p->ctx, "r1", prompt, p->sources, &p->sent, &p->send, p->ticket),
                 KVF_OK);
    cluster_hold_chunks(p->cluster, true);
}

static kvf_status_t fetch(pair_t *p, const char *id, const char *ticket, const kvf_table_t *tables,
                          watch_t *watch, uint64_t *recv) {
    const kvf_recv_desc_t desc = {.request_id = id,
                                  .ticket = ticket,
                                  .lengths = {.prompt_len = p->prompt},
                                  .allocated_tokens = p->prompt,
                                  .tables = tables,
                                  .n_tables = 2,
                                  .direction = KVF_PULL};
    return kvf_core_recv_open(p->gen->core, &desc, watch_event, watch, recv, &p->detail);
}

static uint64_t bytes_pending(const pair_t *p) {
    uint64_t bytes = 0;
    kvf_sim_chunk_t chunk;
    for (size_t i = 0; kvf_sim_net_peek(cluster_net(p->cluster), i, &chunk); i++) {
        bytes += chunk.chunk.bytes;
    }
    return bytes;
}

/* ---- what crosses the wire ---- */

typedef struct seen {
    kvf_frame_type_t type;
    uint64_t counter, bytes;
} seen_t;

static seen_t seen[256];
static size_t n_seen;

/* Every Ready and Pull, in order. */
static void look(uint8_t *data, size_t bytes) {
    ProtobufCMessage *message;
    kvf_frame_type_t type = bytes > KVF_FRAME_HEADER_BYTES && data[0] == 'K' && data[3] == 'R'
                                ? (kvf_frame_type_t)data[4]
                                : KVF_FRAME_BYE;
    if (type != KVF_FRAME_READY && type != KVF_FRAME_PULL) {
        return;
    }
    cr_assert_eq(kvf_message_unpack(kvf_alloc_default(), type, data + KVF_FRAME_HEADER_BYTES,
                                    bytes - KVF_FRAME_HEADER_BYTES, &message, NULL),
                 KVF_OK);
    cr_assert_lt(n_seen, 256);
    seen[n_seen++] = type == KVF_FRAME_READY
                         ? (seen_t){type, ((Kvf__Wire__Ready *)message)->transfer->counter,
                                    ((Kvf__Wire__Ready *)message)->bytes}
                         : (seen_t){type, ((Kvf__Wire__Pull *)message)->transfer->counter,
                                    ((Kvf__Wire__Pull *)message)->bytes};
    kvf_message_free(kvf_alloc_default(), message);
}

/* ---- tests ---- */

/* The pages of 40 tokens: 5 of "full", then the 3 of "swa" in which one of the last 23 positions
 * lies. */
static const uint64_t pieces[] = {FULL_PAGE, FULL_PAGE, FULL_PAGE, FULL_PAGE,
                                  FULL_PAGE, SWA_PAGE,  SWA_PAGE,  SWA_PAGE};
#define N_PIECES 8

/* Chunk after chunk lands. At each moment just those pieces have been posted that begin in front of
 * the last Pull, and what was asked for and is not verified is at most a share. */
Test(recv_pull, just_what_was_asked_for_moves) {
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        pair_t p;
        uint64_t all = 5 * FULL_PAGE + 3 * SWA_PAGE, landed = 0, turns = 0;
        n_seen = 0;
        open_narrow(&p, 40, one_sided != 0);
        cluster_on_write(p.cluster, look);
        cr_assert_eq(fetch(&p, "r1", p.ticket, p.destinations, &p.got, &p.recv), KVF_OK);
        cluster_run(p.cluster);
        cr_assert_eq(n_seen, 2);
        cr_expect(seen[0].type == KVF_FRAME_READY && seen[0].bytes == all);
        cr_expect(seen[1].type == KVF_FRAME_PULL && seen[1].bytes == SHARE);
        while (bytes_pending(&p) > 0) {
            uint64_t asked = seen[n_seen - 1].bytes, posted = 0, whole = 0, at = 0;
            for (int i = 0; i < N_PIECES; at += pieces[i++]) {
                posted += at < asked ? pieces[i] : 0;
                whole += at + pieces[i] <= landed ? pieces[i] : 0;
            }
            cr_expect_eq(landed + bytes_pending(&p), posted, "after %d bytes", (int)landed);
            cr_expect(asked <= whole + SHARE + SHARE, "asked for %d after %d", (int)asked,
                      (int)whole);
            kvf_sim_chunk_t chunk;
            cr_assert(kvf_sim_net_peek(cluster_net(p.cluster), 0, &chunk));
            landed += chunk.chunk.bytes;
            (void)kvf_sim_net_step(cluster_net(p.cluster), 0);
            (void)kvf_sim_net_step(cluster_net(p.cluster), 0);
            cluster_run(p.cluster);
            turns++;
        }
        cr_expect_eq(landed, all);
        cr_expect_gt(turns, 12);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
        cr_expect_eq(node_wrong(p.gen, 40, CONTENT, p.destinations), 0);
        pair_close(&p);
    }
}

/* Three receives of one peer: two have what the window gives, the third waits; when something was
 * verified it comes before those that had a turn. */
Test(recv_pull, receives_share_a_peers_window) {
    static const char *const ids[] = {"r1", "r2", "r3"};
    pair_t p;
    int32_t slots[3][2][KVF_MAX_GROUPS][64];
    kvf_table_t tables[3][2][KVF_MAX_GROUPS];
    watch_t sent[3] = {{0}}, got[3] = {{0}};
    uint64_t send[3], recv[3];
    char tickets[3][KVF_TICKET_BYTES];
    n_seen = 0;
    open_narrow(&p, 40, false);
    cluster_on_write(p.cluster, look);
    for (int i = 0; i < 3; i++) {
        node_take(p.gen, 40, 0, slots[i][1], tables[i][1]);
        if (i > 0) { /* the first is the pair's */
            node_take(p.ctx, 40, CONTENT, slots[i][0], tables[i][0]);
            cr_assert_eq(
                node_offer(p.ctx, ids[i], 40, tables[i][0], &sent[i], &send[i], tickets[i]),
                KVF_OK);
        }
        cr_assert_eq(
            fetch(&p, ids[i], i == 0 ? p.ticket : tickets[i], tables[i][1], &got[i], &recv[i]),
            KVF_OK);
    }
    cluster_run(p.cluster);
    size_t n_pulls = 0;
    seen_t pulls[256];
    for (size_t i = 0; i < n_seen; i++) {
        if (seen[i].type == KVF_FRAME_PULL) {
            pulls[n_pulls++] = seen[i];
        }
    }
    cr_assert_eq(n_pulls, 2);
    cr_expect_neq(pulls[0].counter, pulls[1].counter);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    uint64_t third = recv[0] + recv[1] + recv[2] - pulls[0].counter - pulls[1].counter;
    size_t at = 0;
    for (size_t i = 0, k = 0; i < n_seen; i++) {
        if (seen[i].type == KVF_FRAME_PULL && ++k == 3) {
            at = i;
        }
    }
    cr_expect_eq(seen[at].counter, third, "the next Pull is the third's");
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(got[i].status, KVF_OK, "%s", got[i].message);
        cr_expect_eq(got[i].results, 1);
        cr_expect_eq(node_wrong(p.gen, 40, CONTENT, tables[i][1]), 0);
        node_give(p.gen, tables[i][1]);
        if (i > 0) {
            node_give(p.ctx, tables[i][0]);
        }
    }
    pair_close(&p);
}

/* ---- peers that count wrongly ---- */

static kvf_frame_type_t spoil_type;
static int spoil_nth;

/* On its way, the nth message of a type comes to say 16383 bytes (or 1), in as many bytes: all
 * numbers of these tests take two or three. */
static void spoil(uint8_t *data, size_t bytes) {
    if (bytes <= KVF_FRAME_HEADER_BYTES || data[0] != 'K' || data[3] != 'R' ||
        data[4] != (uint8_t)spoil_type || --spoil_nth != 0) {
        return;
    }
    data[bytes - 2] = 0xff;
    data[bytes - 1] = 0x7f;
}

static void spoil_small(uint8_t *data, size_t bytes) {
    if (bytes <= KVF_FRAME_HEADER_BYTES || data[0] != 'K' || data[3] != 'R' ||
        data[4] != (uint8_t)spoil_type || --spoil_nth != 0) {
        return;
    }
    data[bytes - 2] = 0x81;
    data[bytes - 1] = 0;
}

static void expect_protocol(int64_t prompt, kvf_frame_type_t type, int nth,
                            void (*how)(uint8_t *data, size_t bytes)) {
    pair_t p;
    spoil_type = type;
    spoil_nth = nth;
    open_narrow(&p, prompt, false);
    cluster_hold_chunks(p.cluster, false);
    cluster_on_write(p.cluster, how);
    cr_assert_eq(fetch(&p, "r1", p.ticket, p.destinations, &p.got, &p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_leq(spoil_nth, 0);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_PROTOCOL, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_ERR_PROTOCOL, "%s", p.sent.message);
    pair_close(&p);
}

/* 8 tokens are a page of each group: 15,104 bytes, which is less than 16,383. */
Test(recv_pull, more_is_asked_for_than_is_ready) {
    expect_protocol(8, KVF_FRAME_PULL, 1, spoil);
}

Test(recv_pull, more_is_ready_than_was_granted) {
    expect_protocol(8, KVF_FRAME_READY, 1, spoil);
}

Test(recv_pull, less_is_asked_for_than_before) {
    expect_protocol(40, KVF_FRAME_PULL, 2, spoil_small);
}

/* On its way, a request to push comes to be one to pull, or the other way round. */
static void turn_round(uint8_t *data, size_t bytes) {
    if (bytes > KVF_FRAME_HEADER_BYTES && data[0] == 'K' && data[3] == 'R' &&
        data[4] == KVF_FRAME_RECV_REQUEST) {
        cr_assert_eq(data[bytes - 2], 14 << 3);
        data[bytes - 1] ^= 1;
    }
}

/* The sender pushes what should be pulled: the receiver refuses what it did not ask for. */
Test(recv_pull, what_was_not_asked_for_is_refused) {
    pair_t p;
    open_narrow(&p, 40, false);
    cluster_hold_chunks(p.cluster, false);
    cluster_on_write(p.cluster, turn_round);
    cr_assert_eq(fetch(&p, "r1", p.ticket, p.destinations, &p.got, &p.recv), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_PROTOCOL, "%s", p.got.message);
    cr_expect_not_null(strstr(p.got.message, "asked for"), "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_ERR_PROTOCOL);
    pair_close(&p);
}

/* The connection breaks, and another one does not come about before bytes are verified and more is
 * asked for: that is said when there is one. */
Test(recv_pull, asked_for_without_a_connection) {
    pair_t p;
    open_narrow(&p, 40, false);
    cr_assert_eq(fetch(&p, "r1", p.ticket, p.destinations, &p.got, &p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_assert_eq(bytes_pending(&p), 2 * FULL_PAGE);
    for (size_t i = 0; i < kvf_sim_net_pending(cluster_net(p.cluster)); i++) {
        (void)kvf_sim_net_step(cluster_net(p.cluster), i); /* it leaves */
    }
    cluster_run(p.cluster); /* the commit has come */
    p.ctx->stopped = true;
    cluster_cut_at(p.cluster, 1, CUT_LOST);
    cluster_advance(p.cluster, 300000); /* the next heartbeat breaks it */
    cr_assert(cluster_was_cut(p.cluster));
    kvf_sim_net_run(cluster_net(p.cluster));
    cluster_run(p.cluster);
    cr_expect_eq(bytes_pending(&p), 0);
    cr_expect_eq(p.got.results, 0);
    p.ctx->stopped = false;
    cluster_hold_chunks(p.cluster, false);
    cluster_advance(p.cluster, 1500000);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_OK, "%s", p.sent.message);
    pair_close(&p);
}
