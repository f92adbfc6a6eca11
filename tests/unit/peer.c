/* SPDX-License-Identifier: Apache-2.0 */
/* Who is let in: handshakes, strangers, restarts. */
#include "../support/transfers.h"

#include "proto/hello.h"

#include <criterion/criterion.h>
#include <stdlib.h>

typedef struct request {
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    kvf_detail_t detail;
} request_t;

/* From one node to another, up to an accepted receive. */
static kvf_status_t request_start(request_t *r, node_t *from, node_t *to, const char *request_id) {
    memset(r, 0, sizeof(*r));
    node_take(from, 40, 3, r->source, r->sources);
    node_take(to, 40, 0, r->destination, r->destinations);
    cr_assert_eq(node_offer(from, request_id, 40, r->sources, &r->sent, &r->send, r->ticket),
                 KVF_OK);
    return node_fetch(to, request_id, r->ticket, 40, r->destinations, &r->got, &r->recv,
                      &r->detail);
}

static void expect_result(request_t *r, node_t *to, kvf_status_t status) {
    cr_expect_eq(r->got.results, 1);
    cr_expect_eq(r->got.releases, 1);
    cr_expect_eq(r->got.status, status, "%s: %s", kvf_status_name(r->got.status), r->got.message);
    if (status == KVF_OK) {
        cr_expect_eq(node_wrong(to, 40, 3, r->destinations), 0);
    }
}

static void other_key(kvf_agent_config_t *config) {
    config->cluster_key[0] ^= 1;
}

static void only_node_9(kvf_agent_config_t *config) {
    static const char *const peers[] = {"node-9", "127.0.0.1:9"};
    config->peers = peers;
    config->n_peers = 2;
}

static void only_by_name(kvf_agent_config_t *config) {
    static const char *const peers[] = {"node-1"};
    config->peers = peers;
    config->n_peers = 1;
}

static void only_by_address(kvf_agent_config_t *config) {
    static const char *const peers[] = {"127.0.0.1:2"};
    config->peers = peers;
    config->n_peers = 1;
}

Test(peer, another_key_is_refused) {
    kvf_layout_t layout = cluster_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL),
           *gen = cluster_node(cluster, &layout, 64, other_key);
    request_t r;
    cr_expect_eq(request_start(&r, ctx, gen, "r"), KVF_ERR_FORGED, "its ticket is");
    cluster_destroy(cluster);
}

Test(peer, allow_lists_of_both_sides) {
    kvf_layout_t layout = cluster_layout();
    kvf_peer_info_t info;
    request_t r;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, only_by_address);
    node_t *gen = cluster_node(cluster, &layout, 64, only_by_name);
    node_t *stern = cluster_node(cluster, &layout, 64, only_node_9);
    cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK, "%s", r.detail.text);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_OK);
    cr_expect_eq(request_start(&r, ctx, stern, "s"), KVF_ERR_NOT_ALLOWED,
                 "the ticket's node is not on its list");
    cr_assert_eq(request_start(&r, stern, gen, "t"), KVF_ERR_NOT_ALLOWED);
    node_t *open = cluster_node(cluster, &layout, 64, NULL);
    cr_assert_eq(request_start(&r, stern, open, "u"), KVF_OK);
    cluster_run(cluster);
    expect_result(&r, open, KVF_ERR_NOT_ALLOWED);
    cr_expect_not_null(strstr(r.got.message, "allow-list of node-3"), "%s", r.got.message);
    cr_assert_eq(kvf_core_peers(open->core, &info, 1), 1);
    cr_expect_eq(info.state, KVF_PEER_REFUSED);
    cluster_destroy(cluster);
}

Test(peer, another_layout_fails_its_own_requests_only) {
    kvf_layout_t layout = cluster_layout(), other = layout;
    request_t bad, good;
    other.groups[1].head_dim = 144;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL),
           *gen = cluster_node(cluster, &layout, 64, NULL);
    node_t *odd = cluster_node(cluster, &other, 64, NULL);
    cr_assert_eq(request_start(&bad, ctx, odd, "bad"), KVF_OK);
    cr_assert_eq(request_start(&good, ctx, gen, "good"), KVF_OK);
    cluster_run(cluster);
    expect_result(&good, gen, KVF_OK);
    expect_result(&bad, odd, KVF_ERR_INCOMPATIBLE);
    cr_expect_not_null(strstr(bad.got.message, "head_dim"), "%s", bad.got.message);
    cr_expect_not_null(strstr(bad.got.message, "swa"), "%s", bad.got.message);
    cluster_destroy(cluster);
}

Test(peer, strangers_lose_their_connection_and_nothing_else) {
    static const char http[] =
        "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n";
    kvf_layout_t layout = cluster_layout();
    request_t r;
    kvf_counters_t counters;
    uint8_t noise[200], preamble[KVF_PREAMBLE_BYTES + 200];
    const kvf_preamble_t good = {KVF_PROTOCOL_MAJOR, KVF_PROTOCOL_MINOR, true, {1, 2, 3}};
    uint64_t conns[4];
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL),
           *gen = cluster_node(cluster, &layout, 64, NULL);
    srand(11);
    for (size_t i = 0; i < sizeof(noise); i++) {
        noise[i] = (uint8_t)rand();
    }
    memset(preamble, 0xee, sizeof(preamble));
    kvf_preamble_encode(&good, preamble);
    conns[0] = cluster_stranger(ctx, http, sizeof(http) - 1);
    conns[1] = cluster_stranger(ctx, noise, sizeof(noise));
    conns[2] = cluster_stranger(ctx, preamble, sizeof(preamble)); /* a good preamble, then noise */
    conns[3] = cluster_stranger(ctx, preamble, 20); /* half a preamble, then silence */
    cluster_run(cluster);
    for (size_t i = 0; i < 3; i++) {
        cr_expect(cluster_stranger_closed(cluster, conns[i]), "%zu", i);
    }
    cr_expect_not(cluster_stranger_closed(cluster, conns[3]));
    cluster_advance(cluster, 6000000);
    cr_expect(cluster_stranger_closed(cluster, conns[3]), "it does not wait for ever");
    kvf_core_counters(ctx->core, &counters);
    cr_expect_eq(counters.refused_frames, 3);
    cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_OK);
    cluster_destroy(cluster);
}

static int flip_countdown;

static void flip_one_bit(uint8_t *data, size_t bytes) {
    if (flip_countdown > 0 && (size_t)flip_countdown <= bytes) {
        data[flip_countdown - 1] ^= 0x10;
        flip_countdown = -1;
    } else if (flip_countdown > 0) {
        flip_countdown -= (int)bytes;
    }
}

/* Any one damaged byte of a whole conversation: both sides end, with the right bytes or an error.
 */
Test(peer, every_byte_of_a_conversation_damaged, .timeout = 120) {
    kvf_layout_t layout = cluster_layout();
    for (int at = 1;; at += 3) {
        request_t r;
        cluster_t *cluster = cluster_create(&(cluster_options_t){0});
        node_t *ctx = cluster_node(cluster, &layout, 32, NULL),
               *gen = cluster_node(cluster, &layout, 32, NULL);
        flip_countdown = at;
        cluster_on_write(cluster, flip_one_bit);
        cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK);
        cluster_run(cluster);
        bool hit = flip_countdown == -1;
        flip_countdown = 0;
        cluster_advance(cluster, 70000000);
        cr_expect_eq(r.got.results, 1, "byte %d", at);
        cr_expect_eq(r.got.releases, 1, "byte %d", at);
        cr_expect_eq(r.sent.results, 1, "byte %d", at);
        cr_expect_eq(r.sent.releases, 1, "byte %d", at);
        cr_expect(r.got.status != KVF_OK || node_wrong(gen, 40, 3, r.destinations) == 0, "byte %d",
                  at);
        node_give(ctx, r.sources);
        node_give(gen, r.destinations);
        cr_expect(node_clean(ctx) && node_clean(gen), "byte %d", at);
        cluster_destroy(cluster);
        if (!hit) {
            cr_expect(at > 500, "the conversation is longer than %d bytes", at);
            break;
        }
    }
}

Test(peer, a_restarted_context_node_is_another_one) {
    kvf_layout_t layout = cluster_layout();
    request_t r, s;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL),
           *gen = cluster_node(cluster, &layout, 64, NULL);
    node_take(ctx, 40, 3, r.source, r.sources);
    memset(&r.sent, 0, sizeof(r.sent));
    memset(&r.got, 0, sizeof(r.got));
    cr_assert_eq(node_offer(ctx, "r", 40, r.sources, &r.sent, &r.send, r.ticket), KVF_OK);
    cluster_kill(ctx);
    cluster_restart(ctx);
    node_take(gen, 40, 0, r.destination, r.destinations);
    cr_assert_eq(node_fetch(gen, "r", r.ticket, 40, r.destinations, &r.got, &r.recv, &r.detail),
                 KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_ERR_PEER_LOST);
    cr_expect_not_null(strstr(r.got.message, "restarted"), "%s", r.got.message);
    cr_assert_eq(request_start(&s, ctx, gen, "s"), KVF_OK);
    cluster_run(cluster);
    expect_result(&s, gen, KVF_OK);
    /* The old ticket once more, while its successor is connected: nobody else is disturbed. */
    cluster_hold_chunks(cluster, true);
    cr_assert_eq(request_start(&s, ctx, gen, "t"), KVF_OK);
    cluster_run(cluster);
    memset(&r.got, 0, sizeof(r.got));
    cr_assert_eq(node_fetch(gen, "r", r.ticket, 40, r.destinations, &r.got, &r.recv, &r.detail),
                 KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_ERR_PEER_LOST);
    cr_expect_not_null(strstr(r.got.message, "restarted"), "%s", r.got.message);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    expect_result(&s, gen, KVF_OK);
    cluster_destroy(cluster);
}

/* Peers that left in order, or whose place another incarnation took, are not kept as lost for ever.
 */
Test(peer, who_is_remembered) {
    kvf_layout_t layout = cluster_layout();
    kvf_peer_info_t info;
    request_t r;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL);
    node_t *gen = cluster_node(cluster, &layout, 64, NULL);
    cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK);
    cluster_run(cluster);
    cluster_kill(gen);
    cluster_advance(cluster, 300000);
    cr_assert_eq(kvf_core_peers(ctx->core, &info, 1), 1);
    cr_expect_eq(info.state, KVF_PEER_LOST, "a killed one");
    cluster_restart(gen);
    cr_assert_eq(request_start(&r, ctx, gen, "s"), KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_OK);
    cr_assert_eq(kvf_core_peers(ctx->core, &info, 1), 1, "only its successor");
    cr_expect_eq(info.state, KVF_PEER_UP);
    kvf_core_goodbye(gen->core);
    cluster_run(cluster);
    cr_expect_eq(kvf_core_peers(ctx->core, &info, 1), 0);
    cluster_destroy(cluster);
}

/* A member of the cluster that claims to be another one: refused, and the other one's transfer goes
 * on. */
Test(peer, an_impostor) {
    kvf_layout_t layout = cluster_layout();
    request_t r, s;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL);
    cluster_seed(cluster, 100);
    node_t *gen = cluster_node(cluster, &layout, 64, NULL);
    cluster_seed(cluster, 100);
    node_t *impostor = cluster_node(cluster, &layout, 64, NULL);
    cr_assert(kvf_incarnation_equal(kvf_core_incarnation(gen->core),
                                    kvf_core_incarnation(impostor->core)));
    cluster_hold_chunks(cluster, true);
    cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK);
    cluster_run(cluster);
    cr_assert_eq(request_start(&s, ctx, impostor, "s"), KVF_OK);
    cluster_run(cluster);
    expect_result(&s, impostor, KVF_ERR_NOT_ALLOWED);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_OK);
    cluster_destroy(cluster);
}

/* Connections that say nothing are bounded, and do not keep a new node out. */
Test(peer, a_crowd_of_strangers) {
    kvf_layout_t layout = cluster_layout();
    request_t r;
    uint64_t first;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL);
    node_t *gen = cluster_node(cluster, &layout, 64, NULL);
    first = cluster_stranger(ctx, "", 0);
    for (int i = 0; i < 99; i++) {
        (void)cluster_stranger(ctx, "", 0);
    }
    cluster_run(cluster);
    cr_expect(cluster_stranger_closed(cluster, first), "the oldest made room");
    cr_expect_not(cluster_stranger_closed(cluster, first + 2 * 99));
    cr_assert_eq(request_start(&r, ctx, gen, "r"), KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_OK);
    cluster_destroy(cluster);
}

Test(peer, nobody_listens) {
    kvf_layout_t layout = cluster_layout();
    request_t r;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 64, NULL),
           *gen = cluster_node(cluster, &layout, 64, NULL);
    memset(&r.sent, 0, sizeof(r.sent));
    memset(&r.got, 0, sizeof(r.got));
    node_take(ctx, 40, 3, r.source, r.sources);
    node_take(gen, 40, 0, r.destination, r.destinations);
    cr_assert_eq(node_offer(ctx, "r", 40, r.sources, &r.sent, &r.send, r.ticket), KVF_OK);
    cluster_kill(ctx);
    cr_assert_eq(node_fetch(gen, "r", r.ticket, 40, r.destinations, &r.got, &r.recv, &r.detail),
                 KVF_OK);
    cluster_run(cluster);
    expect_result(&r, gen, KVF_ERR_PEER_LOST);
    cr_expect_not_null(strstr(r.got.message, "cannot connect to 127.0.0.1:1"), "%s", r.got.message);
    cluster_destroy(cluster);
}

/* Both dial at the same moment: two connections, one peer, both requests work. */
Test(peer, crossing_connections) {
    kvf_layout_t layout = cluster_layout();
    request_t there, back;
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *a = cluster_node(cluster, &layout, 64, NULL),
           *b = cluster_node(cluster, &layout, 64, NULL);
    cr_assert_eq(request_start(&there, a, b, "there"), KVF_OK);
    cr_assert_eq(request_start(&back, b, a, "back"), KVF_OK);
    cluster_run(cluster);
    expect_result(&there, b, KVF_OK);
    expect_result(&back, a, KVF_OK);
    cr_expect_eq(kvf_core_peers(a->core, NULL, 0), 1);
    cr_expect_eq(kvf_core_peers(b->core, NULL, 0), 1);
    cluster_destroy(cluster);
}
