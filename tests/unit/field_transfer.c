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
 *   vLLM 41269 (rejected before admission)  core.given_up_before_the_request
 *   vLLM 46283 (abort in each state)        core.cancel
 *   vLLM 50754 (k-th post fails)            agent.a_post_that_fails_ends_both_sides
 *   vLLM 43226, 56089 (late completions)    core.chunks_that_come_twice_or_late_or_for_nobody
 *   vLLM 23587 (strangers at the port)      peer.strangers_lose_their_connection_and_nothing_else
 *   smg 2382, SGLang 6263 (restart)         core.a_killed_receiver_is_lost
 *   SGLang 40125 (an id twice)              core.calls_that_are_refused, e2e nodes_input
 *   Mooncake 4209 (idle, then send)         core.heartbeats_keep_an_idle_pair_up
 */
#include "../support/cluster.h"

#include "proto/ticket.h"

#include <criterion/criterion.h>
#include <stdio.h>

enum { CONTENT = 7, FOREIGN = 8 };

typedef struct duo {
    cluster_t *cluster;
    node_t *ctx, *gen;
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    int64_t prompt;
    kvf_detail_t detail;
} duo_t;

static void short_quarantine(kvf_agent_config_t *config) {
    config->quarantine_us = 500000;
}

static void duo_open(duo_t *d, const cluster_options_t *options, int64_t prompt) {
    kvf_layout_t layout = cluster_layout();
    memset(d, 0, sizeof(*d));
    d->prompt = prompt;
    d->cluster = cluster_create(options);
    d->ctx = cluster_node(d->cluster, &layout, 64, short_quarantine);
    d->gen = cluster_node(d->cluster, &layout, 64, short_quarantine);
    node_take(d->ctx, prompt, CONTENT, d->source, d->sources);
    node_take(d->gen, prompt, 0, d->destination, d->destinations);
}

static void duo_offer(duo_t *d) {
    cr_assert_eq(node_offer(d->ctx, "r", d->prompt, d->sources, &d->sent, &d->send, d->ticket),
                 KVF_OK);
}

/* Ask for the prompt, of which the first `cached` tokens are there already. */
static kvf_status_t duo_fetch(duo_t *d, int64_t cached, watch_t *watch) {
    const kvf_recv_desc_t desc = {.request_id = "r",
                                  .direction = cluster_direction(),
                                  .ticket = d->ticket,
                                  .lengths = {.prompt_len = d->prompt},
                                  .allocated_tokens = d->prompt,
                                  .cached_tokens = cached,
                                  .tables = d->destinations,
                                  .n_tables = 2};
    *watch = (watch_t){0};
    d->detail.text[0] = '\0';
    kvf_core_set_time(d->gen->core, cluster_now(d->cluster) + d->gen->ahead_us);
    return kvf_core_recv_open(d->gen->core, &desc, watch_event, watch, &d->recv, &d->detail);
}

static void expect_end(const watch_t *watch, kvf_status_t status) {
    cr_expect_eq(watch->results, 1);
    cr_expect_eq(watch->releases, 1);
    cr_expect_eq(watch->status, status, "%s: %s", kvf_status_name(watch->status), watch->message);
}

static void duo_close(duo_t *d) {
    node_give(d->ctx, d->sources);
    node_give(d->gen, d->destinations);
    cr_expect(node_clean(d->ctx));
    cr_expect(node_clean(d->gen));
    cluster_destroy(d->cluster);
}

static uint8_t *page_of(const node_t *node, uint32_t g, int32_t slot) {
    return node->memory[g] + (uint64_t)slot * kvf_group_block_bytes(&node->layout.groups[g]);
}

/* @return Bytes of a page that are not as said; content 0: zero. */
static uint64_t page_wrong(const node_t *node, uint32_t g, int32_t slot, uint64_t content,
                           int64_t ordinal) {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < kvf_group_block_bytes(&node->layout.groups[g]); i++) {
        wrong += page_of(node, g, slot)[i] != (content == 0 ? 0 : pattern(content, g, ordinal, i));
    }
    return wrong;
}

/* @return Pages of the destination that are not zero any more. */
static int touched(const duo_t *d) {
    int n = 0;
    for (uint32_t g = 0; g < 2; g++) {
        for (int64_t i = 0; i * 8 < d->prompt; i++) {
            n += d->destination[g][i] >= 0 && page_wrong(d->gen, g, d->destination[g][i], 0, i) > 0;
        }
    }
    return n;
}

/* Ten blocks; the receiver holds the first six. */
Test(field, vllm_48633_48758_receiver_holds_six_blocks) {
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 80);
    duo_offer(&d);
    cr_assert_eq(duo_fetch(&d, 48, &d.got), KVF_OK, "%s", d.detail.text);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_OK);
    for (int64_t i = 0; i < 10; i++) {
        uint64_t want = i < 6 ? 0 : CONTENT;
        cr_expect_eq(page_wrong(d.gen, 0, d.destination[0][i], want, i), 0, "ordinal %d", (int)i);
    }
    /* The window of 24 sees 57..80: blocks 7, 8, 9. */
    for (int64_t i = 7; i < 10; i++) {
        cr_expect_eq(page_wrong(d.gen, 1, d.destination[1][i], CONTENT, i), 0);
    }
    cr_expect_eq(d.got.pages, 4 + 3);
    duo_close(&d);
}

Test(field, vllm_18590_18429_a_prompt_shorter_than_a_block_travels) {
    for (int64_t prompt = 1; prompt < 8; prompt++) {
        duo_t d;
        duo_open(&d, &(cluster_options_t){0}, prompt);
        duo_offer(&d);
        cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
        cluster_run(d.cluster);
        expect_end(&d.got, KVF_OK);
        cr_expect_eq(d.got.pages, 2);
        cr_expect_eq(node_wrong(d.gen, prompt, CONTENT, d.destinations), 0);
        duo_close(&d);
    }
}

Test(field, vllm_18632_25267_a_receiver_that_holds_everything) {
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 45);
    duo_offer(&d);
    cr_assert_eq(duo_fetch(&d, 45, &d.got), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_OK);
    expect_end(&d.sent, KVF_OK); /* at once, not by its lease */
    cr_expect_eq(d.got.pages + d.got.bytes, 0);
    cr_expect_eq(d.got.first_tokens[0], 42);
    cr_expect_eq(touched(&d), 0);
    duo_close(&d);
}

/* The reference again, before and after the source gave its pages to somebody else. */
Test(field, vllm_52234_a_consumed_reference) {
    duo_t d;
    watch_t again;
    duo_open(&d, &(cluster_options_t){0}, 45);
    duo_offer(&d);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_OK);
    for (int round = 0; round < 2; round++) {
        cr_assert_eq(duo_fetch(&d, 0, &again), KVF_OK);
        cluster_run(d.cluster);
        expect_end(&again, KVF_ERR_USED);
        cr_expect_eq(node_wrong(d.gen, 45, CONTENT, d.destinations), 0);
        node_give(d.ctx, d.sources);
        node_take(d.ctx, 45, FOREIGN, d.source, d.sources);
    }
    duo_close(&d);
}

Test(field, vllm_52234_a_lapsed_lease) {
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 45);
    duo_offer(&d);
    cluster_advance(d.cluster, d.ctx->config.lease_us + 100000);
    expect_end(&d.sent, KVF_ERR_EXPIRED);
    node_give(d.ctx, d.sources);
    node_take(d.ctx, 45, FOREIGN, d.source, d.sources);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_ERR_EXPIRED);
    cr_expect_eq(touched(&d), 0);
    duo_close(&d);
}

/* References to a send that never was, under the right key, and pages that no pool has. */
Test(field, vllm_52234_unknown_ids_and_pages_out_of_range) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    size_t n;
    kvf_ticket_t ticket;
    uint64_t id;
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 45);
    duo_offer(&d);
    const uint8_t *key = d.ctx->config.cluster_key;
    cr_assert_eq(kvf_ticket_from_text(d.ticket, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_decode(bytes, n, key, &ticket), KVF_OK);
    ticket.send_id += 1000;
    cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_OK);
    cr_assert_eq(kvf_ticket_to_text(bytes, n, d.ticket, sizeof(d.ticket)), KVF_OK);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_ERR_UNKNOWN);
    cr_expect_eq(touched(&d), 0);

    int32_t kept = d.destination[0][3];
    d.destination[0][3] = 64;
    cr_expect_eq(duo_fetch(&d, 0, &d.got), KVF_ERR_RANGE);
    d.destination[0][3] = kept;
    cr_expect_eq(d.got.results, 0);
    cr_assert_eq(kvf_core_send_cancel(d.ctx->core, d.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.sent, KVF_ERR_CANCELLED);
    d.sent = (watch_t){0};
    kept = d.source[1][5];
    d.source[1][5] = 64;
    cr_expect_eq(node_offer(d.ctx, "r", 45, d.sources, &d.sent, &id, d.ticket), KVF_ERR_RANGE);
    d.source[1][5] = kept;
    duo_close(&d);
}

/* The receiver aborts while one-sided copies are under way, and gives its pages back at once. Who
 * takes pages now gets none that those copies may hit; when they have come, all are free again. */
Test(field, sglang_32564_35049_abort_in_mid_write) {
    int32_t slots[KVF_MAX_GROUPS][64], left[64];
    duo_t d;
    duo_open(&d, &(cluster_options_t){.one_sided = true}, 100);
    duo_offer(&d);
    cluster_hold_chunks(d.cluster, true);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_run(d.cluster);
    size_t n_chunks = kvf_sim_net_pending(cluster_net(d.cluster));
    cr_assert_gt(n_chunks, 2);
    (void)kvf_sim_net_step(cluster_net(d.cluster), 0); /* one is under way, the others wait */
    cr_assert_eq(kvf_core_recv_cancel(d.gen->core, d.recv), KVF_OK);
    cluster_run(d.cluster);
    cr_expect_eq(d.got.status, KVF_ERR_CANCELLED);
    node_give(d.gen, d.destinations);

    /* Another request takes all that the pools give, and writes to it. */
    int64_t n[2];
    for (uint32_t g = 0; g < 2; g++) {
        n[g] = kvf_pages_count(d.gen->pages[g], KVF_PAGE_FREE);
        cr_assert_eq(kvf_pages_acquire(d.gen->pages[g], n[g], slots[g]), KVF_OK);
        cr_expect_eq(kvf_pages_acquire(d.gen->pages[g], 1, left), KVF_ERR_AGAIN);
        for (int64_t i = 0; i < n[g]; i++) {
            for (uint64_t k = 0; k < kvf_group_block_bytes(&d.gen->layout.groups[g]); k++) {
                page_of(d.gen, g, slots[g][i])[k] = pattern(FOREIGN, g, i, k);
            }
        }
    }
    cluster_hold_chunks(d.cluster, false);
    cluster_run(d.cluster);
    for (uint32_t g = 0; g < 2; g++) {
        for (int64_t i = 0; i < n[g]; i++) {
            cr_expect_eq(page_wrong(d.gen, g, slots[g][i], FOREIGN, i), 0, "overwritten");
            cr_assert_eq(kvf_pages_release(d.gen->pages[g], slots[g][i]), KVF_OK);
        }
    }
    /* What was posted did come: the pages were kept back for a reason. */
    cr_expect_eq(n[0] + 13, 64);
    cr_expect_gt(touched(&d), 0);
    expect_end(&d.got, KVF_ERR_CANCELLED);
    expect_end(&d.sent, KVF_ERR_CANCELLED);
    d.destinations[0].n_blocks = d.destinations[1].n_blocks = 0;
    duo_close(&d);
}

/* The source's clock is a quarter of an hour ahead, or behind: what counts is how long it took. */
Test(field, vllm_50326_clocks_that_differ_by_1000_seconds) {
    for (int n = 0; n < 4; n++) {
        bool lapses = n % 2 == 1;
        duo_t d;
        duo_open(&d, &(cluster_options_t){0}, 45);
        (n / 2 == 0 ? d.ctx : d.gen)->ahead_us = 1000000000;
        duo_offer(&d);
        cluster_advance(d.cluster, d.ctx->config.lease_us + (lapses ? 100000 : 0) - 50000);
        cr_expect_eq(d.sent.results, lapses);
        cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
        cluster_run(d.cluster);
        expect_end(&d.got, lapses ? KVF_ERR_EXPIRED : KVF_OK);
        expect_end(&d.sent, lapses ? KVF_ERR_EXPIRED : KVF_OK);
        duo_close(&d);
    }
}

/* Bytes that are asked for too late, and bytes that come too late: the receiver says so each time,
 * and the pages that it then gives to others stay theirs. */
Test(field, aws_do_eks_84_a_read_past_its_time_is_noticed) {
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        duo_t d;
        duo_open(&d, &(cluster_options_t){.one_sided = one_sided == 1}, 45);
        duo_offer(&d);
        cluster_hold_chunks(d.cluster, true);
        cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
        cluster_advance(d.cluster, d.gen->config.request_timeout_us + 2000000);
        cr_expect_eq(d.got.results, 1);
        cr_expect_eq(d.got.status, KVF_ERR_DEADLINE);
        cluster_hold_chunks(d.cluster, false);
        cluster_run(d.cluster);
        expect_end(&d.got, KVF_ERR_DEADLINE);
        if (one_sided == 0) {
            cr_expect_eq(touched(&d), 0); /* every late chunk was checked, and dropped */
        }
        duo_close(&d);
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
        duo_t d = {.prompt = 40};
        d.cluster = cluster_create(&(cluster_options_t){0});
        d.ctx = cluster_node(d.cluster, more == 0 ? &few : &many, 16, NULL);
        d.gen = cluster_node(d.cluster, more == 0 ? &many : &few, 16, NULL);
        node_take(d.ctx, 40, CONTENT, d.source, d.sources);
        node_take(d.gen, 40, 0, d.destination, d.destinations);
        const kvf_send_desc_t send = {.request_id = "r",
                                      .lengths = {.prompt_len = 40},
                                      .allocated_tokens = 40,
                                      .tables = d.sources,
                                      .n_tables = 1};
        cr_assert_eq(kvf_core_send_open(d.ctx->core, &send, watch_event, &d.sent, &d.send, NULL),
                     KVF_OK);
        cr_assert_eq(kvf_core_send_ready(d.ctx->core, d.send, &all, NULL), KVF_OK);
        cr_assert_eq(kvf_core_send_finish(d.ctx->core, d.send, NULL, NULL), KVF_OK);
        cr_assert_eq(kvf_core_send_ticket(d.ctx->core, d.send, d.ticket, sizeof(d.ticket)), KVF_OK);
        cr_assert_eq(node_fetch(d.gen, "r", d.ticket, 40, d.destinations, &d.got, &d.recv, NULL),
                     KVF_OK);
        cluster_run(d.cluster);
        expect_end(&d.got, KVF_ERR_INCOMPATIBLE);
        cr_expect_not_null(strstr(d.got.message, "32"), "%s", d.got.message);
        cr_expect_not_null(strstr(d.got.message, "33"), "%s", d.got.message);
        cr_expect_eq(page_wrong(d.gen, 0, d.destination[0][0], 0, 0), 0);
        cluster_advance(d.cluster, 40000000);
        cr_expect_eq(d.sent.releases, 1);
        duo_close(&d);
    }
}

/* Everything is agreed on before a byte of the prompt is computed: nothing leaves until it is said
 * to be there. */
Test(field, sglang_33970_nothing_is_read_before_it_is_ready) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 45);
    const kvf_send_desc_t desc = {.request_id = "r",
                                  .lengths = {.prompt_len = 45},
                                  .allocated_tokens = 45,
                                  .tables = d.sources,
                                  .n_tables = 2};
    for (uint32_t g = 0; g < 2; g++) {
        for (int64_t i = 0; i < d.sources[g].n_blocks; i++) {
            if (d.source[g][i] >= 0) {
                memset(page_of(d.ctx, g, d.source[g][i]), 0x3c,
                       kvf_group_block_bytes(&d.ctx->layout.groups[g]));
            }
        }
    }
    cr_assert_eq(kvf_core_send_open(d.ctx->core, &desc, watch_event, &d.sent, &d.send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(d.ctx->core, d.send, d.ticket, sizeof(d.ticket)), KVF_OK);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_advance(d.cluster, 1000000);
    cr_expect_eq(touched(&d), 0);
    for (uint32_t layer = 0; layer < 5; layer++) {
        /* Layer by layer: group 1 has 0, 2, 4, group 0 has 1, 3. */
        uint32_t g = layer % 2 == 0 ? 1 : 0;
        uint64_t bytes = kvf_group_layer_bytes(&d.ctx->layout.groups[g]), at = layer / 2 * bytes;
        for (int64_t i = 0; i < d.sources[g].n_blocks; i++) {
            for (uint64_t k = at; d.source[g][i] >= 0 && k < at + bytes; k++) {
                page_of(d.ctx, g, d.source[g][i])[k] = pattern(CONTENT, g, i, k);
            }
        }
        cr_assert_eq(
            kvf_core_send_ready(
                d.ctx->core, d.send,
                &(kvf_range_t){.layer_first = layer, .layer_end = layer + 1, .token_end = 45},
                NULL),
            KVF_OK);
        cluster_run(d.cluster);
        cr_expect_eq(d.got.layers, layer + 1);
    }
    cr_assert_eq(kvf_core_send_finish(d.ctx->core, d.send, &aux, NULL), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_OK);
    cr_expect_eq(node_wrong(d.gen, 45, CONTENT, d.destinations), 0);
    duo_close(&d);
}

/* The mover says done and the final message comes, but the bytes are not there yet. A checked mover
 * waits for them; with a one-sided one the digests tell. Neither is ready. */
Test(field, vllm_44238_bytes_later_than_their_completion) {
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        duo_t d;
        duo_open(&d, &(cluster_options_t){.one_sided = one_sided == 1}, 45);
        duo_offer(&d);
        cluster_hold_chunks(d.cluster, true);
        cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
        cluster_run(d.cluster);
        /* Each chunk leaves, none arrives: done, as far as the sender can know. */
        size_t n = kvf_sim_net_pending(cluster_net(d.cluster));
        cr_assert_gt(n, 0);
        for (size_t i = 0; i < n; i++) {
            (void)kvf_sim_net_step(cluster_net(d.cluster), i);
        }
        cluster_run(d.cluster);
        cr_expect_eq(d.got.progress, 0);
        cr_expect_eq(d.got.results, one_sided);
        cluster_hold_chunks(d.cluster, false);
        cluster_run(d.cluster);
        expect_end(&d.got, one_sided == 1 ? KVF_ERR_DIGEST_MISMATCH : KVF_OK);
        cr_expect(d.got.status != KVF_OK || node_wrong(d.gen, 45, CONTENT, d.destinations) == 0);
        duo_close(&d);
    }
}

/* The source's window takes three blocks, the destination has two: never cut to fit. */
Test(field, sglang_swa_three_blocks_against_two) {
    duo_t d;
    duo_open(&d, &(cluster_options_t){0}, 47);
    duo_offer(&d);
    int32_t kept = d.destination[1][5];
    cr_expect(d.destination[1][2] < 0 && d.destination[1][3] >= 0);
    d.destination[1][5] = -1;
    cr_expect_eq(duo_fetch(&d, 0, &d.got), KVF_ERR_UNCOVERED);
    cr_expect_not_null(strstr(d.detail.text, "group swa: 5"), "%s", d.detail.text);
    d.destination[1][5] = kept;
    d.destinations[1].n_blocks = 5; /* the same by a shorter table */
    cr_expect_eq(duo_fetch(&d, 0, &d.got), KVF_ERR_UNCOVERED);
    d.destinations[1].n_blocks = 6;
    cr_expect_eq(d.got.results, 0);
    cr_expect_eq(touched(&d), 0);
    cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK);
    cluster_run(d.cluster);
    expect_end(&d.got, KVF_OK);
    cr_expect_eq(node_wrong(d.gen, 47, CONTENT, d.destinations), 0);
    duo_close(&d);
}

/* Pools of different sizes: each side's slots are checked against its own. */
Test(field, vllm_19338_1000_slots_against_998) {
    for (int more = 0; more < 2; more++) {
        kvf_layout_t layout = cluster_layout();
        duo_t d = {.prompt = 45};
        int32_t all[2][1000];
        d.cluster = cluster_create(&(cluster_options_t){0});
        d.ctx = cluster_node(d.cluster, &layout, more == 0 ? 1000 : 998, NULL);
        d.gen = cluster_node(d.cluster, &layout, more == 0 ? 998 : 1000, NULL);
        /* The last slots of each pool. */
        for (int side = 0; side < 2; side++) {
            node_t *node = side == 0 ? d.ctx : d.gen;
            int64_t spare = node->n_pages - 6;
            for (uint32_t g = 0; g < 2; g++) {
                int32_t *slots = side == 0 ? d.source[g] : d.destination[g];
                cr_assert_eq(kvf_pages_acquire(node->pages[g], node->n_pages, all[side]), KVF_OK);
                (side == 0 ? d.sources : d.destinations)[g] = (kvf_table_t){slots, 6};
                for (int32_t i = 0; i < 6; i++) {
                    slots[i] = (int32_t)spare + i;
                    for (uint64_t k = 0; k < kvf_group_block_bytes(&layout.groups[g]); k++) {
                        page_of(node, g, slots[i])[k] = side == 0 ? pattern(CONTENT, g, i, k) : 0;
                    }
                }
                for (int32_t slot = 0; slot < spare; slot++) {
                    cr_assert_eq(kvf_pages_release(node->pages[g], slot), KVF_OK);
                }
            }
        }
        duo_offer(&d);
        cr_assert_eq(duo_fetch(&d, 0, &d.got), KVF_OK, "%s", d.detail.text);
        cluster_run(d.cluster);
        expect_end(&d.got, KVF_OK);
        cr_expect_eq(node_wrong(d.gen, 45, CONTENT, d.destinations), 0);
        duo_close(&d);
    }
}
