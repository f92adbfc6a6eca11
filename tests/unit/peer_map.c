/* SPDX-License-Identifier: Apache-2.0 */
/* Peers on one machine: whose pools are mapped, what carries when they are not, and what commits
 * may say then. peer_map_ends.c has what ends early. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

static const cluster_options_t mapped = {.mapped = true};

/* 40 tokens: 5 blocks of "full", 8192 bytes each, and 3 of "swa" (tokens 17 to 39 are seen), 6912
 * each. */
#define ALL_BYTES (5 * 8192 + 3 * 6912)
#define ALL_PAGES 8

static kvf_counters_t counters_of(const node_t *node) {
    kvf_counters_t counters;
    kvf_core_counters(node->core, &counters);
    return counters;
}

static void expect_carried(pair_t *p, const char *mover) {
    expect_one_end_each(p);
    cr_expect_eq(p->got.status, KVF_OK, "%s", p->got.message);
    cr_expect_eq(p->sent.status, KVF_OK, "%s", p->sent.message);
    cr_expect_str_eq(p->got.mover, mover);
    cr_expect_str_eq(p->sent.mover, mover);
    cr_expect_eq(p->got.bytes, ALL_BYTES);
    cr_expect_eq(p->got.pages, ALL_PAGES);
    cr_expect_eq(node_wrong(p->gen, p->prompt, CONTENT, p->destinations), 0);
}

/* The same two nodes, once more. */
static void again(pair_t *p) {
    node_give(p->ctx, p->sources);
    node_give(p->gen, p->destinations);
    node_take(p->ctx, p->prompt, CONTENT, p->source, p->sources);
    node_take(p->gen, p->prompt, 0, p->destination, p->destinations);
    p->sent = p->got = (watch_t){0};
    pair_offer(p);
    cr_assert_eq(pair_fetch(p), KVF_OK, "%s", p->detail.text);
    cluster_run(p->cluster);
}

/* ---- what carries ---- */

/* Who asks does so before its first word on the control channel has been read. */
Test(peer_map, the_receiver_copies) {
    kvf_peer_info_t info;
    pair_t p;
    pair_open(&p, &mapped, 40);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    expect_carried(&p, "mapped");
    cr_expect_eq(counters_of(p.gen).mover_fallbacks, 0);
    cr_expect_eq(counters_of(p.gen).bytes_received, ALL_BYTES);
    cr_expect_eq(counters_of(p.ctx).bytes_sent, ALL_BYTES);
    cr_assert_eq(kvf_core_peers(p.gen->core, &info, 1), 1);
    cr_expect_str_eq(info.mover, "mapped");
    cr_assert_eq(kvf_core_peers(p.ctx->core, &info, 1), 1);
    cr_expect_str_eq(info.mover, "mapped");
    cr_expect_eq(p.gen->warnings + p.ctx->warnings, 0, "%s", p.gen->warning);
    pair_close(&p);
}

/* Counted once for a peer, not for each request; tried again when the conversation begins anew. */
Test(peer_map, who_cannot_map_falls_back) {
    static const struct {
        map_fate_t fate;
        const char *why;
    } cases[] = {{MAP_IS_REFUSED, "another machine"}, {MAP_FAILS, "refused"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        pair_t p;
        pair_open(&p, &mapped, 40);
        cluster_map_fate(p.cluster, cases[i].fate);
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        expect_carried(&p, "sim");
        cr_expect_not_null(strstr(p.gen->warning, cases[i].why), "%s", p.gen->warning);
        again(&p);
        expect_carried(&p, "sim");
        cr_expect_eq(counters_of(p.gen).mover_fallbacks, 1);
        cr_expect_eq(p.gen->warnings, 1);
        cluster_map_fate(p.cluster, MAP_GOES_WELL);
        cluster_advance(p.cluster, 5100000); /* another machine stays one */
        again(&p);
        expect_carried(&p, cases[i].fate == MAP_FAILS ? "mapped" : "sim");
        p.gen->stopped = true;
        cluster_advance(p.cluster, 3000000);
        p.gen->stopped = false;
        cluster_advance(p.cluster, 3000000);
        again(&p);
        expect_carried(&p, "mapped");
        cr_expect_eq(counters_of(p.gen).mover_fallbacks, 1);
        pair_close(&p);
    }
}

/* Nothing is asked for before it is known what carries. */
Test(peer_map, a_request_waits_for_the_mapping) {
    pair_t p;
    pair_open(&p, &mapped, 40);
    cluster_map_fate(p.cluster, MAP_SILENT);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_advance(p.cluster, 900000);
    cr_expect_eq(p.got.results, 0);
    cr_expect(!kvf_core_in_flight(p.gen->core), "it is not requested");
    cluster_map_fate(p.cluster, MAP_GOES_WELL);
    cluster_run(p.cluster);
    expect_carried(&p, "mapped");
    pair_close(&p);
}

/* Nobody says how it ended: requests do not wait for ever, not even the next ones. */
Test(peer_map, a_mapping_that_never_comes) {
    pair_t p;
    pair_open(&p, &mapped, 40);
    cluster_map_fate(p.cluster, MAP_SILENT);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_advance(p.cluster, 19900000);
    cr_expect_eq(p.got.results, 0);
    cluster_advance(p.cluster, 200000);
    expect_carried(&p, "sim");
    cr_expect_not_null(strstr(p.gen->warning, "nothing was heard"), "%s", p.gen->warning);
    cluster_map_fate(p.cluster, MAP_GOES_WELL);
    again(&p); /* the attempt is over: its answer would come now */
    expect_carried(&p, "sim");
    cr_expect_eq(counters_of(p.gen).mover_fallbacks, 1);
    cluster_advance(p.cluster, 5100000);
    again(&p);
    expect_carried(&p, "mapped");
    pair_close(&p);
}

/* Given up meanwhile: the context side hears of it when there is an answer. */
Test(peer_map, given_up_while_the_mapping_is_waited_for) {
    pair_t p;
    pair_open(&p, &mapped, 40);
    cluster_map_fate(p.cluster, MAP_SILENT);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_expect(watch_ended(&p.got), "nobody knows of its pages");
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_HELD), 5);
    cluster_map_fate(p.cluster, MAP_GOES_WELL);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.sent.status, KVF_ERR_CANCELLED, "%s", p.sent.message);
    again(&p);
    expect_carried(&p, "mapped");
    pair_close(&p);
}

static void only_mapped(kvf_agent_config_t *config) {
    config->mover = "mapped";
}

/* Mover mapped and nothing else: where it cannot be, a request ends at once, on both sides, and
 * says what to look at. Also one that finds the attempt made. */
static void expect_mapped_or_nothing(map_fate_t fate, kvf_status_t status, const char *why) {
    const kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = 40};
    p.cluster = cluster_create(&mapped);
    p.ctx = cluster_node(p.cluster, &layout, 64, NULL);
    p.gen = cluster_node(p.cluster, &layout, 64, only_mapped);
    cluster_map_fate(p.cluster, fate);
    node_take(p.ctx, 40, CONTENT, p.source, p.sources);
    node_take(p.gen, 40, 0, p.destination, p.destinations);
    for (int i = 0; i < 2; i++) {
        again(&p);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.status, status, "%s", p.got.message);
        cr_expect_not_null(strstr(p.got.message, why), "%s", p.got.message);
        cr_expect_eq(p.sent.status, status, "%s", p.sent.message);
    }
    pair_close(&p);
}

Test(peer_map, mapped_or_nothing) {
    expect_mapped_or_nothing(MAP_IS_REFUSED, KVF_ERR_INCOMPATIBLE,
                             "both on this machine, with pools of shared memory");
}

/* Not so for good: another node may be asked, or this one later. */
Test(peer_map, mapped_or_nothing_of_a_node_that_ends) {
    expect_mapped_or_nothing(MAP_FAILS, KVF_ERR_PEER_LOST, "has just ended");
}

/* ---- what messages may say ---- */

static kvf_frame_type_t spoil_type;
static void (*spoil)(void *message);
static int n_spoilt;

static void on_message(kvf_frame_type_t type, ProtobufCMessage *message) {
    if (type == spoil_type) {
        spoil(message);
        n_spoilt++;
    }
}

static Kvf__Wire__CommitRange *last_range(void *message) {
    Kvf__Wire__Commit *commit = message;
    return commit->n_ranges == 0 ? NULL : commit->ranges[commit->n_ranges - 1];
}

static void slot_behind_the_pool(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->slots[range->n_slots - 1] = 128; /* they are 0 to 127 */
    }
}

static void greatest_slot(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->slots[0] = INT32_MAX;
    }
}

static void no_slots(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->n_slots = 0;
    }
}

static void no_digests(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->n_digests = 0;
    }
}

static void with_slots(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->slots = kvf_calloc(kvf_alloc_default(), range->n_ordinals, sizeof(*range->slots));
        range->n_slots = range->n_ordinals;
    }
}

static void with_digests(void *message) {
    Kvf__Wire__CommitRange *range = last_range(message);
    if (range != NULL) {
        range->digests =
            kvf_calloc(kvf_alloc_default(), range->n_ordinals, sizeof(*range->digests));
        range->n_digests = range->n_ordinals;
    }
}

static void without(kvf_agent_config_t *config) {
    config->digests = false;
}

static const struct {
    const char *what;
    void (*spoil)(void *message);
    bool mapped, digests;
} wrong[] = {
    {"said to be in slot 128 of 128", slot_behind_the_pool, true, true},
    {"said to be in slot 2147483647 of 128", greatest_slot, true, true},
    {"said to be in slot 2147483647 of 128", greatest_slot, true, false},
    {"digests and 0 slots", no_slots, true, true},
    {"a commit with 0 digests", no_digests, true, true},
    {"a commit with 0 digests", no_digests, false, true},
    {"slots for", with_slots, false, true},
    {"digests and", with_digests, true, false},
    {"digests and", with_digests, false, false},
};

ParameterizedTestParameters(peer_map, commits_that_are_wrong) {
    static size_t index[sizeof(wrong) / sizeof(wrong[0])];
    for (size_t i = 0; i < sizeof(index) / sizeof(index[0]); i++) {
        index[i] = i;
    }
    return cr_make_param_array(size_t, index, sizeof(index) / sizeof(index[0]));
}

/* A protocol error on both sides, and nothing of it is read. */
ParameterizedTest(size_t *i, peer_map, commits_that_are_wrong) {
    const kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = 40};
    p.cluster = cluster_create(&mapped);
    p.ctx = cluster_node(p.cluster, &layout, 128, NULL);
    p.gen = cluster_node(p.cluster, &layout, 128, wrong[*i].digests ? NULL : without);
    node_take(p.ctx, 40, CONTENT, p.source, p.sources);
    node_take(p.gen, 40, 0, p.destination, p.destinations);
    cluster_map_fate(p.cluster, wrong[*i].mapped ? MAP_GOES_WELL : MAP_FAILS);
    cluster_hold_chunks(p.cluster, !wrong[*i].mapped);
    spoil_type = KVF_FRAME_COMMIT;
    spoil = wrong[*i].spoil;
    cluster_on_message(p.cluster, on_message);
    pair_offer(&p);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    cr_expect_geq(n_spoilt, 1);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_PROTOCOL, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_ERR_PROTOCOL, "%s", p.sent.message);
    cr_expect_not_null(strstr(p.got.message, wrong[*i].what), "%s", p.got.message);
    cr_expect(!wrong[*i].mapped || node_written(p.gen, p.destinations) == 0);
    cr_expect_eq(p.sent.n_poisoned + p.got.n_poisoned, 0);
    cluster_on_message(p.cluster, NULL);
    again(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    pair_close(&p);
}

static void says_mapped(void *message) {
    Kvf__Wire__RecvRequest *request = message;
    kvf_free(kvf_alloc_default(), request->mover);
    request->mover = kvf_strdup(kvf_alloc_default(), "mapped");
}

/* A receiver that says it copies, and has mapped nothing, is told nothing. */
Test(peer_map, a_request_without_a_mapping) {
    pair_t p;
    pair_open(&p, &mapped, 40);
    cluster_map_fate(p.cluster, MAP_FAILS);
    spoil_type = KVF_FRAME_RECV_REQUEST;
    spoil = says_mapped;
    cluster_on_message(p.cluster, on_message);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(n_spoilt, 1);
    expect_one_end_each(&p);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    cr_expect_not_null(strstr(p.sent.message, "mapped"), "%s", p.sent.message);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_eq(node_written(p.gen, p.destinations), 0);
    pair_close(&p);
}

/* ---- digests off ---- */

static int n_requests, n_without, n_ranges, n_digests;

static void count(kvf_frame_type_t type, ProtobufCMessage *message) {
    if (type == KVF_FRAME_RECV_REQUEST) {
        n_requests++;
        n_without += ((Kvf__Wire__RecvRequest *)message)->no_digests;
    }
    const Kvf__Wire__Commit *commit = (Kvf__Wire__Commit *)message;
    for (size_t i = 0; type == KVF_FRAME_COMMIT && i < commit->n_ranges; i++) {
        n_ranges++;
        n_digests += (int)commit->ranges[i]->n_digests;
    }
}

/* The receiver's setting counts, whatever carries. */
Test(peer_map, digests_off) {
    const kvf_layout_t layout = cluster_layout();
    for (int i = 0; i < 4; i++) {
        bool maps = i % 2 == 1, by_receiver = i / 2 == 1;
        pair_t p = {.prompt = 40};
        n_requests = n_without = n_ranges = n_digests = 0;
        p.cluster = cluster_create(&mapped);
        p.ctx = cluster_node(p.cluster, &layout, 64, by_receiver ? NULL : without);
        p.gen = cluster_node(p.cluster, &layout, 64, by_receiver ? without : NULL);
        cluster_map_fate(p.cluster, maps ? MAP_GOES_WELL : MAP_FAILS);
        cluster_on_message(p.cluster, count);
        node_take(p.ctx, 40, CONTENT, p.source, p.sources);
        node_take(p.gen, 40, 0, p.destination, p.destinations);
        pair_offer(&p);
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        expect_carried(&p, maps ? "mapped" : "sim");
        cr_expect_eq(n_requests, 1);
        cr_expect_eq(n_without, by_receiver);
        cr_expect_geq(n_ranges, 1);
        cr_expect_eq(n_digests, by_receiver ? 0 : ALL_PAGES);
        pair_close(&p);
    }
}

/* ---- memory ---- */

Test(peer_map, no_memory_for_an_address) {
    pair_t p;
    pair_open(&p, &mapped, 40);
    p.ctx->alloc.fail_at = p.ctx->alloc.calls + 1;
    cr_expect_eq(kvf_core_set_mapped_address(p.ctx->core, "x", 1), KVF_ERR_NO_MEMORY);
    cr_assert_eq(pair_fetch(&p), KVF_OK); /* what was set before is there */
    cluster_run(p.cluster);
    expect_carried(&p, "mapped");
    pair_close(&p);
}

/* Every allocation of one side fails once: all goes well, another mover carries, or both sides hear
 * of it. */
Test(peer_map, every_allocation_fails_once, .timeout = 60) {
    for (int side = 0; side < 2; side++) {
        for (uint64_t n = 1;; n++) {
            pair_t p;
            pair_open(&p, &mapped, 40);
            node_t *node = side == 0 ? p.ctx : p.gen;
            node->alloc.fail_at = node->alloc.calls + n;
            kvf_status_t status = pair_fetch(&p);
            cluster_advance(p.cluster, 40000000);
            bool failed = node->alloc.calls >= node->alloc.fail_at;
            node->alloc.fail_at = 0;
            cr_expect_eq(p.sent.results + p.sent.releases, 2);
            cr_expect_eq(p.got.results + p.got.releases, status == KVF_OK ? 2 : 0);
            cr_expect(p.got.status != KVF_OK || status != KVF_OK ||
                      node_wrong(p.gen, 40, CONTENT, p.destinations) == 0);
            cr_expect(failed || p.got.status == KVF_OK, "%s", p.got.message);
            pair_close(&p);
            if (!failed) {
                cr_expect_gt(n, 20);
                break;
            }
        }
    }
}
