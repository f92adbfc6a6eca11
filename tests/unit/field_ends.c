/* SPDX-License-Identifier: Apache-2.0 */
/* Faults of other systems that end in hangs and leaks, by the reports that describe them, as far as
 * no other test has them: docs/safety.md, "Field cases", has the whole list. */
#include "../support/pair.h"

#include "proto/ticket.h"
#include "transceiver/core_impl.h"

#include <criterion/criterion.h>
#include <stdio.h>

static void patient(kvf_agent_config_t *config) {
    config->request_timeout_us = 300000000;
}

/* Two sends of one node: the receiver of the first renews its lease while it waits, nobody comes
 * for the second. The heartbeats of the one keep nothing alive for the other. */
Test(field_ends, vllm_58222_first_lease_renewed_second_silent) {
    int32_t slots[KVF_MAX_GROUPS][64];
    kvf_table_t tables[KVF_MAX_GROUPS];
    watch_t silent = {0};
    char ticket[KVF_TICKET_BYTES];
    uint64_t id;
    kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = 100};
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 128, patient);
    p.gen = cluster_node(p.cluster, &layout, 128, patient);
    node_take(p.ctx, 100, CONTENT, p.source, p.sources);
    node_take(p.gen, 100, 0, p.destination, p.destinations);
    cr_assert_eq(node_offer(p.ctx, "r1", 100, p.sources, &p.sent, &p.send, p.ticket), KVF_OK);
    node_take(p.ctx, 40, CONTENT, slots, tables);
    cr_assert_eq(node_offer(p.ctx, "r2", 40, tables, &silent, &id, ticket), KVF_OK);
    cluster_hold_chunks(p.cluster, true);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_advance(p.cluster, p.ctx->config.lease_us - 1000000);
    cr_expect_eq(silent.results, 0);
    cluster_advance(p.cluster, 1100000);
    cr_expect_eq(silent.results + silent.releases, 2);
    cr_expect_eq(silent.status, KVF_ERR_EXPIRED, "%s", silent.message);
    cluster_advance(p.cluster, 3 * p.ctx->config.lease_us);
    cr_expect_eq(p.sent.results + p.got.results, 0, "%s %s", p.sent.message, p.got.message);
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    node_give(p.ctx, tables);
    pair_close(&p);
}

/* A pool full of sends that nobody fetches, and no call and no message ever after: time alone gives
 * every page back. */
Test(field_ends, tensorrt_llm_12313_expired_sends_are_swept_without_new_work) {
    enum { SENDS = 12 };
    static watch_t watches[SENDS];
    kvf_layout_t layout = cluster_layout();
    cluster_t *cluster = cluster_create(&(cluster_options_t){0});
    node_t *ctx = cluster_node(cluster, &layout, 5 * SENDS, NULL);
    for (int i = 0; i < SENDS; i++) {
        int32_t slots[KVF_MAX_GROUPS][64];
        kvf_table_t tables[KVF_MAX_GROUPS];
        char name[8], ticket[KVF_TICKET_BYTES];
        uint64_t id;
        (void)snprintf(name, sizeof(name), "r%d", i);
        node_take(ctx, 40, CONTENT, slots, tables);
        cr_assert_eq(node_offer(ctx, name, 40, tables, &watches[i], &id, ticket), KVF_OK);
        node_give(ctx, tables); /* the engine is done with them, the sends are not */
        cluster_advance(cluster, 10000);
    }
    cr_expect_eq(kvf_pages_count(ctx->pages[0], KVF_PAGE_FREE), 0);
    cluster_advance(cluster, ctx->config.lease_us + 100000);
    for (int i = 0; i < SENDS; i++) {
        cr_expect_eq(watches[i].results + watches[i].releases, 2, "send %d", i);
        cr_expect_eq(watches[i].status, KVF_ERR_EXPIRED);
    }
    cr_expect(node_clean(ctx));
    cluster_destroy(cluster);
}

/* What the context side finds wrong with a request reaches the other side as a sentence, at once;
 * the send is still there for a right one. */
Test(field_ends, tensorrt_llm_14237_what_the_listener_refuses_is_told) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    char right[KVF_TICKET_BYTES];
    kvf_ticket_t ticket;
    size_t n;
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    memcpy(right, p.ticket, sizeof(right));
    const uint8_t *key = p.ctx->config.cluster_key;
    cr_assert_eq(kvf_ticket_from_text(p.ticket, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_decode(bytes, n, key, &ticket), KVF_OK);
    ticket.prompt_tokens = 39; /* the same blocks */
    cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_to_text(bytes, n, p.ticket, sizeof(p.ticket)), KVF_OK);
    p.prompt = 39;
    cr_assert_eq(pair_fetch(&p), KVF_OK, "%s", p.detail.text);
    cluster_run(p.cluster); /* no time passes */
    cr_expect_eq(p.got.results + p.got.releases, 2);
    cr_expect_eq(p.got.status, KVF_ERR_INVALID);
    cr_expect_not_null(strstr(p.got.message, "39 tokens is asked for, 40 were prefilled"), "%s",
                       p.got.message);
    cr_expect_eq(p.sent.results, 0);
    memcpy(p.ticket, right, sizeof(right));
    p.prompt = 40;
    p.got = (watch_t){0};
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    pair_close(&p);
}

/* A peer names thousands of transfers, and tickets of thousands of sends, that never were. Neither
 * side remembers any of them. */
Test(field_ends, sglang_39428_a_flood_of_invented_ids) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    char right[KVF_TICKET_BYTES];
    kvf_ticket_t ticket;
    kvf_counters_t counters;
    size_t n;
    uint64_t ctx_live = 0, gen_live = 0;
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    memcpy(right, p.ticket, sizeof(right));
    const uint8_t *key = p.ctx->config.cluster_key;
    cr_assert_eq(kvf_ticket_from_text(p.ticket, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_decode(bytes, n, key, &ticket), KVF_OK);
    for (uint64_t i = 0; i < 300; i++) {
        ticket.send_id = 1000000 + i;
        cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_OK);
        cr_assert_eq(kvf_ticket_to_text(bytes, n, p.ticket, sizeof(p.ticket)), KVF_OK);
        p.got = (watch_t){0};
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cr_expect_eq(p.got.status, KVF_ERR_UNKNOWN);
        cr_expect_eq(p.got.releases, 1);
        kvf_peer_t *peer = p.gen->core->peers;
        for (uint64_t k = 0; k < 50; k++) {
            kvf_transfer_id_t id = {.receiver = *kvf_core_incarnation(p.gen->core),
                                    .counter = UINT64_MAX - 50 * i - k};
            kvf_peer_tell_abort(peer, &id, KVF_ERR_CANCELLED, "never was");
            id.receiver = *kvf_core_incarnation(p.ctx->core); /* a receive of theirs */
            kvf_peer_tell_abort(peer, &id, KVF_ERR_CANCELLED, "never was");
        }
        cluster_advance(p.cluster, 600000); /* two heartbeats: all is acknowledged */
        if (i == 0) {
            ctx_live = p.ctx->alloc.live;
            gen_live = p.gen->alloc.live;
        }
    }
    cr_expect_leq(p.ctx->alloc.live, ctx_live);
    cr_expect_leq(p.gen->alloc.live, gen_live);
    kvf_core_counters(p.ctx->core, &counters);
    cr_expect_eq(counters.unknown_transfers, 300 * 100);
    cr_expect_eq(p.sent.results, 1, "its lease ended meanwhile");
    pair_close(&p);
}
