/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_AGENT_SIDES_H
#define KVF_TESTS_AGENT_SIDES_H

/**
 * @file
 * Two agents of one process, driven by turns, and transfers between them of which every byte is
 * looked at.
 */

#include "layouts.h"
#include "leaks.h"
#include "transceiver/agent_impl.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_BLOCKS 60
#define N_PAGES (MAX_BLOCKS + 3)
#define WINDOW 100

/* One block's bytes: 32 KiB and 16 KiB. */
static const kvf_layout_t layout = FULL_AND_SWA(WINDOW, 4);

typedef struct side {
    const char *mover, *memory, *tls;
    uint32_t threads;
    bool no_digests;
    kvf_agent_t *agent;
    kvf_pool_t *pools[2];
    int32_t slots[2][MAX_BLOCKS];
    kvf_table_t tables[2];
    int results, releases;
    kvf_status_t status;
    char by[16];
    uint64_t bytes;
} side_t;

static inline void on_event(void *arg, const kvf_event_t *event) {
    side_t *side = arg;
    side->releases += event->kind == KVF_EVENT_RELEASED;
    if (event->kind == KVF_EVENT_RESULT) {
        side->results++;
        side->status = event->status;
        side->bytes = event->bytes;
        (void)snprintf(side->by, sizeof(side->by), "%s", event->mover);
    }
}

static inline void side_make(side_t *side, const char *instance) {
    kvf_agent_config_t config;
    kvf_detail_t detail = {""};
    kvf_agent_config_init(&config);
    config.instance = instance;
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    config.cluster_key[5] = 1;
    config.mover = side->mover == NULL ? "auto" : side->mover;
    config.ucx_tls = side->tls == NULL ? "auto" : side->tls;
    config.mover_threads = side->threads;
    config.digests = !side->no_digests;
    config.log_level = KVF_LOG_ERROR;
    cr_assert_eq(kvf_agent_create(&config, &side->agent, &detail), KVF_OK, "%s", detail.text);
    for (uint32_t g = 0; g < 2; g++) {
        const kvf_pool_desc_t desc = {g, side->memory == NULL ? "shm" : side->memory, N_PAGES, NULL,
                                      false};
        cr_assert_eq(kvf_pool_create(side->agent, &desc, &side->pools[g], &detail), KVF_OK);
    }
}

static inline uint8_t byte_at(uint32_t g, int block, uint64_t i) {
    return (uint8_t)(g * 101 + (unsigned)block * 7 + i * 13 + i / 251 + 1);
}

/* Pages for so many blocks, in an order that is not that of the pool. */
static inline void side_take(side_t *side, int blocks, int skip, bool fill) {
    for (uint32_t g = 0; g < 2; g++) {
        int32_t taken[N_PAGES];
        cr_assert_eq(kvf_pool_acquire(side->pools[g], blocks + skip, taken), KVF_OK);
        cr_assert_eq(kvf_pool_release(side->pools[g], skip, taken), KVF_OK);
        side->tables[g] = (kvf_table_t){side->slots[g], blocks};
        for (int b = 0; b < blocks; b++) {
            side->slots[g][b] = taken[skip + blocks - 1 - b];
            uint8_t *page = kvf_pool_page(side->pools[g], side->slots[g][b]);
            for (uint64_t i = 0; i < kvf_group_block_bytes(&layout.groups[g]); i++) {
                page[i] = fill ? byte_at(g, b, i) : 0;
            }
        }
    }
}

static inline void side_give(side_t *side, int blocks) {
    for (uint32_t g = 0; g < 2; g++) {
        kvf_pool_info_t info;
        cr_assert_eq(kvf_pool_release(side->pools[g], blocks, side->slots[g]), KVF_OK);
        kvf_pool_get_info(side->pools[g], &info);
        cr_assert_eq(info.free, N_PAGES);
    }
}

/* Start a request between two agents. */
static inline void request(side_t *ctx, side_t *gen, int64_t prompt) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    const kvf_range_t all = {.layer_end = 3, .token_end = prompt};
    const kvf_send_desc_t offer = {.request_id = "r",
                                   .lengths = {.prompt_len = prompt},
                                   .allocated_tokens = prompt,
                                   .tables = ctx->tables,
                                   .n_tables = 2};
    kvf_recv_desc_t fetch = {.request_id = "r",
                             .lengths = {.prompt_len = prompt},
                             .allocated_tokens = prompt,
                             .tables = gen->tables,
                             .n_tables = 2};
    char ticket[KVF_TICKET_BYTES];
    kvf_send_t send;
    kvf_recv_t recv;
    cr_assert_eq(kvf_send_open(ctx->agent, &offer, on_event, ctx, &send, NULL), KVF_OK);
    cr_assert_eq(kvf_send_ready(ctx->agent, send, &all, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_send_finish(ctx->agent, send, &aux, NULL), KVF_OK);
    cr_assert_eq(kvf_send_ticket(ctx->agent, send, ticket, sizeof(ticket)), KVF_OK);
    fetch.ticket = ticket;
    cr_assert_eq(kvf_recv_open(gen->agent, &fetch, on_event, gen, &recv, NULL), KVF_OK);
}

static inline void finish(side_t *ctx, side_t *gen) {
    for (int i = 0; i < 100000 && !(ctx->releases > 0 && gen->releases > 0); i++) {
        kvf_agent_progress(ctx->agent);
        kvf_agent_progress(gen->agent);
        (void)usleep(100);
    }
    cr_assert_eq(ctx->results + gen->results, 2);
    cr_assert_eq(ctx->releases + gen->releases, 2);
}

static inline uint64_t wrong_bytes(const side_t *side, int blocks, int64_t prompt) {
    uint64_t wrong = 0;
    for (uint32_t g = 0; g < 2; g++) {
        for (int b = 0; b < blocks; b++) {
            const uint8_t *page = kvf_pool_page(side->pools[g], side->slots[g][b]);
            bool came = g == 0 || (b + 1) * T > prompt - WINDOW + 1;
            for (uint64_t i = 0; i < kvf_group_block_bytes(&layout.groups[g]); i++) {
                wrong += page[i] != (came ? byte_at(g, b, i) : 0);
            }
        }
    }
    return wrong;
}

static inline void open_both(side_t *ctx, side_t *gen) {
    kvf_detail_t detail = {""};
    side_make(ctx, "ctx");
    side_make(gen, "gen");
    cr_assert_eq(kvf_agent_start(ctx->agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start(gen->agent, &detail), KVF_OK, "%s", detail.text);
}

static inline void close_both(side_t *ctx, side_t *gen) {
    cr_assert_eq(kvf_agent_destroy(gen->agent), KVF_OK);
    cr_assert_eq(kvf_agent_destroy(ctx->agent), KVF_OK);
    check_leaks();
}

/* Transfers of one block (a short job), of a few, and of many, by that mover. */
static inline void run(side_t ctx, side_t gen, const char *by) {
    static const int64_t prompts[] = {5, T, 3 * T - 2, MAX_BLOCKS * T - 5};
    open_both(&ctx, &gen);
    for (size_t i = 0; i < sizeof(prompts) / sizeof(prompts[0]); i++) {
        int blocks = (int)((prompts[i] + T - 1) / T);
        ctx.results = ctx.releases = gen.results = gen.releases = 0;
        side_take(&ctx, blocks, 3, true);
        side_take(&gen, blocks, 1, false);
        request(&ctx, &gen, prompts[i]);
        finish(&ctx, &gen);
        cr_assert_eq(gen.status, KVF_OK);
        cr_assert_eq(ctx.status, KVF_OK);
        cr_assert_str_eq(gen.by, by);
        cr_assert_str_eq(ctx.by, by);
        cr_assert_eq(gen.bytes, ctx.bytes);
        cr_assert_eq(wrong_bytes(&gen, blocks, prompts[i]), 0);
        side_give(&ctx, blocks);
        side_give(&gen, blocks);
    }
    close_both(&ctx, &gen);
}

#endif
