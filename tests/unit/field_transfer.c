/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults of other systems, by the reports that describe them: each input here, with the answer that
 * is right, in whole transfers. Tables and pairs alone: field.c. What has its test elsewhere:
 *
 *   source                                  test
 *   TensorRT-LLM 18921 (offsets > 4 GiB)    agent.a_pool_of_many_gigabytes
 *   TensorRT-LLM 18554 (every combination)  model-sweep
 *   vLLM 52516 (part never written)         agent.bytes_that_never_come_are_missed
 *   vLLM 52234 (reference out of range)     plan.grants_that_are_refused, core.misplaced_chunks
 *   vLLM 41269 (rejected before admission)  core_cancel.given_up_before_the_request
 *   vLLM 46283 (abort in each state)        core_cancel.by_phase
 *   vLLM 50754 (k-th post fails)            agent.a_post_that_fails_ends_both_sides
 *   vLLM 43226, 56089 (late completions)    core.chunks_that_come_twice_or_late_or_for_nobody
 *   vLLM 23587 (strangers at the port)      peer.strangers_lose_their_connection_and_nothing_else
 *   smg 2382, SGLang 6263 (restart)         core_cancel.a_killed_receiver_is_lost
 *   SGLang 40125 (an id twice)              core.calls_that_are_refused, e2e nodes_input
 *   Mooncake 4209 (idle, then send)         core_cancel.heartbeats_keep_an_idle_pair_up
 */
#include "../support/pair.h"

#include "proto/ticket.h"

#include <stdio.h>

#define FOREIGN 8 /* what another request's pages hold */

static void open_nodes(pair_t *p, bool one_sided, int64_t prompt) {
    pair_make(p, &(cluster_options_t){.one_sided = one_sided}, 64, prompt);
}

/* Ask for the prompt, of which the first `cached` tokens are there already. */
static kvf_status_t fetch(pair_t *p, int64_t cached, watch_t *watch) {
    const kvf_recv_desc_t desc = {.request_id = "r1",
                                  .direction = cluster_direction(),
                                  .ticket = p->ticket,
                                  .lengths = {.prompt_len = p->prompt},
                                  .allocated_tokens = p->prompt,
                                  .cached_tokens = cached,
                                  .tables = p->destinations,
                                  .n_tables = 2};
    *watch = (watch_t){0};
    p->detail.text[0] = '\0';
    kvf_core_set_time(p->gen->core, cluster_now(p->cluster) + p->gen->ahead_us);
    return kvf_core_recv_open(p->gen->core, &desc, watch_event, watch, &p->recv, &p->detail);
}

/* A whole request whose chunks wait. */
static void fetch_held(pair_t *p, bool one_sided, int64_t prompt) {
    open_nodes(p, one_sided, prompt);
    pair_offer(p);
    cluster_hold_chunks(p->cluster, true);
    cr_assert_eq(fetch(p, 0, &p->got), KVF_OK);
}

static void expect_end(const watch_t *watch, kvf_status_t status) {
    cr_expect(watch_ended(watch));
    cr_expect_eq(watch->status, status, "%s: %s", kvf_status_name(watch->status), watch->message);
}

/* @return Bytes of a page that are not as said; content 0: zero. */
static uint64_t page_wrong(const node_t *node, uint32_t g, int32_t slot, uint64_t content,
                           int64_t ordinal) {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < kvf_group_block_bytes(&node->layout.groups[g]); i++) {
        wrong +=
            node_page(node, g, slot)[i] != (content == 0 ? 0 : pattern(content, g, ordinal, i));
    }
    return wrong;
}

/* @return Pages of the destination that are not zero any more. */
static int touched(const pair_t *p) {
    int n = 0;
    for (uint32_t g = 0; g < p->gen->layout.n_groups; g++) {
        for (int64_t i = 0; i * 8 < p->prompt; i++) {
            n += p->destination[g][i] >= 0 && page_wrong(p->gen, g, p->destination[g][i], 0, i) > 0;
        }
    }
    return n;
}

/* Ten blocks; the receiver holds the first six. */
Test(field, vllm_48633_48758_receiver_holds_six_blocks) {
    pair_t p;
    open_nodes(&p, false, 80);
    pair_offer(&p);
    cr_assert_eq(fetch(&p, 48, &p.got), KVF_OK, "%s", p.detail.text);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_OK);
    for (int64_t i = 0; i < 10; i++) {
        uint64_t want = i < 6 ? 0 : CONTENT;
        cr_expect_eq(page_wrong(p.gen, 0, p.destination[0][i], want, i), 0, "ordinal %d", (int)i);
    }
    /* The window of 24 sees 57..80: blocks 7, 8, 9. */
    for (int64_t i = 7; i < 10; i++) {
        cr_expect_eq(page_wrong(p.gen, 1, p.destination[1][i], CONTENT, i), 0);
    }
    cr_expect_eq(p.got.pages, 4 + 3);
    pair_close(&p);
}

Test(field, vllm_18590_18429_a_prompt_shorter_than_a_block_travels) {
    for (int64_t prompt = 1; prompt < 8; prompt++) {
        pair_t p;
        open_nodes(&p, false, prompt);
        pair_offer(&p);
        cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
        cluster_run(p.cluster);
        expect_end(&p.got, KVF_OK);
        cr_expect_eq(p.got.pages, 2);
        cr_expect_eq(node_wrong(p.gen, prompt, CONTENT, p.destinations), 0);
        pair_close(&p);
    }
}

Test(field, vllm_18632_25267_a_receiver_that_holds_everything) {
    pair_t p;
    open_nodes(&p, false, 45);
    pair_offer(&p);
    cr_assert_eq(fetch(&p, 45, &p.got), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_OK);
    expect_end(&p.sent, KVF_OK); /* at once, not by its lease */
    cr_expect_eq(p.got.pages + p.got.bytes, 0);
    cr_expect_eq(p.got.first_tokens[0], 42);
    cr_expect_eq(touched(&p), 0);
    pair_close(&p);
}

/* The reference again, before and after the source gave its pages to somebody else. */
Test(field, vllm_52234_a_consumed_reference) {
    pair_t p;
    watch_t again;
    open_nodes(&p, false, 45);
    pair_offer(&p);
    cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_OK);
    for (int round = 0; round < 2; round++) {
        cr_assert_eq(fetch(&p, 0, &again), KVF_OK);
        cluster_run(p.cluster);
        expect_end(&again, KVF_ERR_USED);
        cr_expect_eq(node_wrong(p.gen, 45, CONTENT, p.destinations), 0);
        node_give(p.ctx, p.sources);
        node_take(p.ctx, 45, FOREIGN, p.source, p.sources);
    }
    pair_close(&p);
}

Test(field, vllm_52234_a_lapsed_lease) {
    pair_t p;
    open_nodes(&p, false, 45);
    pair_offer(&p);
    cluster_advance(p.cluster, p.ctx->config.lease_us + 100000);
    expect_end(&p.sent, KVF_ERR_EXPIRED);
    node_give(p.ctx, p.sources);
    node_take(p.ctx, 45, FOREIGN, p.source, p.sources);
    cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_ERR_EXPIRED);
    cr_expect_eq(touched(&p), 0);
    pair_close(&p);
}

/* References to a send that never was, under the right key, and pages that no pool has. */
Test(field, vllm_52234_unknown_ids_and_pages_out_of_range) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    size_t n;
    kvf_ticket_t ticket;
    uint64_t id;
    pair_t p;
    open_nodes(&p, false, 45);
    pair_offer(&p);
    const uint8_t *key = p.ctx->config.cluster_key;
    cr_assert_eq(kvf_ticket_from_text(p.ticket, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_decode(bytes, n, key, &ticket), KVF_OK);
    ticket.send_id += 1000;
    cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_to_text(bytes, n, p.ticket, sizeof(p.ticket)), KVF_OK);
    cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_ERR_UNKNOWN);
    cr_expect_eq(touched(&p), 0);

    int32_t kept = p.destination[0][3];
    p.destination[0][3] = 64;
    cr_expect_eq(fetch(&p, 0, &p.got), KVF_ERR_RANGE);
    p.destination[0][3] = kept;
    cr_expect_eq(p.got.results, 0);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.sent, KVF_ERR_CANCELLED);
    p.sent = (watch_t){0};
    kept = p.source[1][5];
    p.source[1][5] = 64;
    cr_expect_eq(node_offer(p.ctx, "r1", 45, p.sources, &p.sent, &id, p.ticket), KVF_ERR_RANGE);
    p.source[1][5] = kept;
    pair_close(&p);
}

/* The receiver aborts while one-sided copies are under way, and gives its pages back at once. Who
 * takes pages now gets none that those copies may hit; when they have come, all are free again. */
Test(field, sglang_32564_35049_abort_in_mid_write) {
    int32_t slots[KVF_MAX_GROUPS][64], left[64];
    pair_t p;
    cluster_needs_chunks();
    fetch_held(&p, true, 100);
    cluster_run(p.cluster);
    size_t n_chunks = kvf_sim_net_pending(cluster_net(p.cluster));
    cr_assert_gt(n_chunks, 2);
    (void)kvf_sim_net_step(cluster_net(p.cluster), 0); /* one is under way, the others wait */
    cr_assert_eq(kvf_core_recv_cancel(p.gen->core, p.recv), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_ERR_CANCELLED);
    node_give(p.gen, p.destinations);

    /* Another request takes all that the pools give, and writes to it. */
    int64_t n[2];
    for (uint32_t g = 0; g < 2; g++) {
        n[g] = kvf_pages_count(p.gen->pages[g], KVF_PAGE_FREE);
        cr_assert_eq(kvf_pages_acquire(p.gen->pages[g], n[g], slots[g]), KVF_OK);
        cr_expect_eq(kvf_pages_acquire(p.gen->pages[g], 1, left), KVF_ERR_AGAIN);
        for (int64_t i = 0; i < n[g]; i++) {
            for (uint64_t k = 0; k < kvf_group_block_bytes(&p.gen->layout.groups[g]); k++) {
                node_page(p.gen, g, slots[g][i])[k] = pattern(FOREIGN, g, i, k);
            }
        }
    }
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    for (uint32_t g = 0; g < 2; g++) {
        for (int64_t i = 0; i < n[g]; i++) {
            cr_expect_eq(page_wrong(p.gen, g, slots[g][i], FOREIGN, i), 0, "overwritten");
            cr_assert_eq(kvf_pages_release(p.gen->pages[g], slots[g][i]), KVF_OK);
        }
    }
    /* Kept back were all pages of the request, and for a reason: what was posted did come. */
    cr_expect_eq(n[0] + 13, 64);
    cr_expect_eq(n[1] + 4, 64, "77..100 are seen: blocks 9 to 12");
    cr_expect_gt(touched(&p), 0);
    expect_end(&p.got, KVF_ERR_CANCELLED);
    expect_end(&p.sent, KVF_ERR_CANCELLED);
    p.destinations[0].n_blocks = p.destinations[1].n_blocks = 0;
    pair_close(&p);
}

/* The source's clock is a quarter of an hour ahead, or behind: what counts is how long it took. */
Test(field, vllm_50326_clocks_that_differ_by_1000_seconds) {
    for (int n = 0; n < 4; n++) {
        bool lapses = n % 2 == 1;
        pair_t p;
        open_nodes(&p, false, 45);
        (n / 2 == 0 ? p.ctx : p.gen)->ahead_us = 1000000000;
        pair_offer(&p);
        cluster_advance(p.cluster, p.ctx->config.lease_us + (lapses ? 100000 : 0) - 50000);
        cr_expect_eq(p.sent.results, lapses);
        cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
        cluster_run(p.cluster);
        expect_end(&p.got, lapses ? KVF_ERR_EXPIRED : KVF_OK);
        expect_end(&p.sent, lapses ? KVF_ERR_EXPIRED : KVF_OK);
        pair_close(&p);
    }
}

/* Bytes that are asked for too late, and bytes that come too late: the receiver says so each time,
 * and the pages that it then gives to others stay theirs. */
Test(field, aws_do_eks_84_a_read_past_its_time_is_noticed) {
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        pair_t p;
        fetch_held(&p, one_sided == 1, 45);
        cluster_advance(p.cluster, p.gen->config.request_timeout_us + 2000000);
        cr_expect_eq(p.got.results, 1);
        cr_expect_eq(p.got.status, KVF_ERR_DEADLINE);
        cluster_hold_chunks(p.cluster, false);
        cluster_run(p.cluster);
        expect_end(&p.got, KVF_ERR_DEADLINE);
        if (one_sided == 0 && !cluster_is_mapped(p.cluster)) {
            cr_expect_eq(touched(&p), 0); /* every late chunk was checked, and dropped */
        }
        pair_close(&p);
    }
}

static kvf_layout_t layers_of(uint32_t n) {
    kvf_layout_t layout = cluster_layout();
    layout.n_groups = 1;
    layout.groups[0].n_layers = n;
    for (uint32_t i = 0; i < n; i++) {
        layout.groups[0].layers[i] = i;
    }
    return layout;
}

Test(field, sglang_17212_32_layers_against_33) {
    for (int more = 0; more < 2; more++) {
        kvf_layout_t few = layers_of(32), many = layers_of(33);
        const kvf_range_t all = {.layer_end = more == 0 ? 32 : 33, .token_end = 40};
        pair_t p = {.prompt = 40};
        p.cluster = cluster_create(&(cluster_options_t){0});
        p.ctx = cluster_node(p.cluster, more == 0 ? &few : &many, 16, NULL);
        p.gen = cluster_node(p.cluster, more == 0 ? &many : &few, 16, NULL);
        node_take(p.ctx, 40, CONTENT, p.source, p.sources);
        node_take(p.gen, 40, 0, p.destination, p.destinations);
        const kvf_send_desc_t send = {.request_id = "r1",
                                      .lengths = {.prompt_len = 40},
                                      .allocated_tokens = 40,
                                      .tables = p.sources,
                                      .n_tables = 1};
        cr_assert_eq(kvf_core_send_open(p.ctx->core, &send, watch_event, &p.sent, &p.send, NULL),
                     KVF_OK);
        cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &all, NULL), KVF_OK);
        cr_assert_eq(kvf_core_send_finish(p.ctx->core, p.send, NULL, NULL), KVF_OK);
        cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
        cr_assert_eq(node_fetch(p.gen, "r1", p.ticket, 40, p.destinations, &p.got, &p.recv, NULL),
                     KVF_OK);
        cluster_run(p.cluster);
        expect_end(&p.got, KVF_ERR_INCOMPATIBLE);
        cr_expect_not_null(strstr(p.got.message, "32"), "%s", p.got.message);
        cr_expect_not_null(strstr(p.got.message, "33"), "%s", p.got.message);
        cr_expect_eq(touched(&p), 0);
        cluster_advance(p.cluster, 40000000);
        cr_expect_eq(p.sent.releases, 1);
        pair_close(&p);
    }
}

/* Everything is agreed on before a byte of the prompt is computed: nothing leaves until it is said
 * to be there. */
Test(field, sglang_33970_nothing_is_read_before_it_is_ready) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    pair_t p;
    open_nodes(&p, false, 45);
    const kvf_send_desc_t desc = {.request_id = "r1",
                                  .lengths = {.prompt_len = 45},
                                  .allocated_tokens = 45,
                                  .tables = p.sources,
                                  .n_tables = 2};
    for (uint32_t g = 0; g < 2; g++) {
        for (int64_t i = 0; i < p.sources[g].n_blocks; i++) {
            if (p.source[g][i] >= 0) {
                memset(node_page(p.ctx, g, p.source[g][i]), 0x3c,
                       kvf_group_block_bytes(&p.ctx->layout.groups[g]));
            }
        }
    }
    cr_assert_eq(kvf_core_send_open(p.ctx->core, &desc, watch_event, &p.sent, &p.send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
    cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
    cluster_advance(p.cluster, 1000000);
    cr_expect_eq(touched(&p), 0);
    for (uint32_t layer = 0; layer < 5; layer++) {
        /* Layer by layer: group 1 has 0, 2, 4, group 0 has 1, 3. */
        uint32_t g = layer % 2 == 0 ? 1 : 0;
        uint64_t bytes = kvf_group_layer_bytes(&p.ctx->layout.groups[g]), at = layer / 2 * bytes;
        for (int64_t i = 0; i < p.sources[g].n_blocks; i++) {
            for (uint64_t k = at; p.source[g][i] >= 0 && k < at + bytes; k++) {
                node_page(p.ctx, g, p.source[g][i])[k] = pattern(CONTENT, g, i, k);
            }
        }
        cr_assert_eq(
            kvf_core_send_ready(
                p.ctx->core, p.send,
                &(kvf_range_t){.layer_first = layer, .layer_end = layer + 1, .token_end = 45},
                NULL),
            KVF_OK);
        cluster_run(p.cluster);
        cr_expect_eq(p.got.layers, layer + 1);
    }
    cr_assert_eq(kvf_core_send_finish(p.ctx->core, p.send, &aux, NULL), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_OK);
    cr_expect_eq(node_wrong(p.gen, 45, CONTENT, p.destinations), 0);
    pair_close(&p);
}

/* The mover says done and the final message comes, but the bytes are not there yet. A checked mover
 * waits for them; with a one-sided one the digests tell. Neither is ready. */
Test(field, vllm_44238_bytes_later_than_their_completion) {
    cluster_needs_chunks();
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        pair_t p;
        fetch_held(&p, one_sided == 1, 45);
        cluster_run(p.cluster);
        /* Each chunk leaves, none arrives: done, as far as the sender can know. */
        size_t n = kvf_sim_net_pending(cluster_net(p.cluster));
        cr_assert_gt(n, 0);
        for (size_t i = 0; i < n; i++) {
            (void)kvf_sim_net_step(cluster_net(p.cluster), i);
        }
        cluster_run(p.cluster);
        cr_expect_eq(p.got.progress, 0);
        cr_expect_eq(p.got.results, one_sided);
        cluster_hold_chunks(p.cluster, false);
        cluster_run(p.cluster);
        expect_end(&p.got, one_sided == 1 ? KVF_ERR_DIGEST_MISMATCH : KVF_OK);
        cr_expect(p.got.status != KVF_OK || node_wrong(p.gen, 45, CONTENT, p.destinations) == 0);
        pair_close(&p);
    }
}

/* The source's window takes three blocks, the destination has two: never cut to fit. */
Test(field, sglang_swa_three_blocks_against_two) {
    pair_t p;
    open_nodes(&p, false, 47);
    pair_offer(&p);
    int32_t kept = p.destination[1][5];
    cr_expect(p.destination[1][2] < 0 && p.destination[1][3] >= 0);
    p.destination[1][5] = -1;
    cr_expect_eq(fetch(&p, 0, &p.got), KVF_ERR_UNCOVERED);
    cr_expect_not_null(strstr(p.detail.text, "group swa: 5"), "%s", p.detail.text);
    p.destination[1][5] = kept;
    p.destinations[1].n_blocks = 5; /* the same by a shorter table */
    cr_expect_eq(fetch(&p, 0, &p.got), KVF_ERR_UNCOVERED);
    p.destinations[1].n_blocks = 6;
    cr_expect_eq(p.got.results, 0);
    cr_expect_eq(touched(&p), 0);
    cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK);
    cluster_run(p.cluster);
    expect_end(&p.got, KVF_OK);
    cr_expect_eq(node_wrong(p.gen, 47, CONTENT, p.destinations), 0);
    pair_close(&p);
}

/* Pools of different sizes: each side's slots are checked against its own. */
Test(field, vllm_19338_1000_slots_against_998) {
    for (int more = 0; more < 2; more++) {
        kvf_layout_t layout = cluster_layout();
        pair_t p = {.prompt = 45};
        int32_t all[2][1000];
        p.cluster = cluster_create(&(cluster_options_t){0});
        p.ctx = cluster_node(p.cluster, &layout, more == 0 ? 1000 : 998, NULL);
        p.gen = cluster_node(p.cluster, &layout, more == 0 ? 998 : 1000, NULL);
        /* The last slots of each pool. */
        for (int side = 0; side < 2; side++) {
            node_t *node = side == 0 ? p.ctx : p.gen;
            int64_t spare = node->n_pages - 6;
            for (uint32_t g = 0; g < 2; g++) {
                int32_t *slots = side == 0 ? p.source[g] : p.destination[g];
                cr_assert_eq(kvf_pages_acquire(node->pages[g], node->n_pages, all[side]), KVF_OK);
                (side == 0 ? p.sources : p.destinations)[g] = (kvf_table_t){slots, 6};
                for (int32_t i = 0; i < 6; i++) {
                    slots[i] = (int32_t)spare + i;
                    for (uint64_t k = 0; k < kvf_group_block_bytes(&layout.groups[g]); k++) {
                        node_page(node, g, slots[i])[k] = side == 0 ? pattern(CONTENT, g, i, k) : 0;
                    }
                }
                for (int32_t slot = 0; slot < spare; slot++) {
                    cr_assert_eq(kvf_pages_release(node->pages[g], slot), KVF_OK);
                }
            }
        }
        pair_offer(&p);
        cr_assert_eq(fetch(&p, 0, &p.got), KVF_OK, "%s", p.detail.text);
        cluster_run(p.cluster);
        expect_end(&p.got, KVF_OK);
        cr_expect_eq(node_wrong(p.gen, 45, CONTENT, p.destinations), 0);
        pair_close(&p);
    }
}
