/* SPDX-License-Identifier: Apache-2.0 */
/* Agents on one machine whose bytes the receiver copies itself: with few and many threads, in short
 * jobs and long ones, with digests and without; and what carries where that is not possible. */
#include "../support/layouts.h"
#include "../support/leaks.h"
#include "transceiver/agent_impl.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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

static void on_event(void *arg, const kvf_event_t *event) {
    side_t *side = arg;
    side->releases += event->kind == KVF_EVENT_RELEASED;
    if (event->kind == KVF_EVENT_RESULT) {
        side->results++;
        side->status = event->status;
        side->bytes = event->bytes;
        (void)snprintf(side->by, sizeof(side->by), "%s", event->mover);
    }
}

static void side_make(side_t *side, const char *instance) {
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

static uint8_t byte_at(uint32_t g, int block, uint64_t i) {
    return (uint8_t)(g * 101 + (unsigned)block * 7 + i * 13 + i / 251 + 1);
}

/* Pages for so many blocks, in an order that is not that of the pool. */
static void side_take(side_t *side, int blocks, int skip, bool fill) {
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

static void side_give(side_t *side, int blocks) {
    for (uint32_t g = 0; g < 2; g++) {
        kvf_pool_info_t info;
        cr_assert_eq(kvf_pool_release(side->pools[g], blocks, side->slots[g]), KVF_OK);
        kvf_pool_get_info(side->pools[g], &info);
        cr_assert_eq(info.free, N_PAGES);
    }
}

/* Start a request between two agents. */
static void request(side_t *ctx, side_t *gen, int64_t prompt) {
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

static void finish(side_t *ctx, side_t *gen) {
    for (int i = 0; i < 100000 && !(ctx->releases > 0 && gen->releases > 0); i++) {
        kvf_agent_progress(ctx->agent);
        kvf_agent_progress(gen->agent);
        (void)usleep(100);
    }
    cr_assert_eq(ctx->results + gen->results, 2);
    cr_assert_eq(ctx->releases + gen->releases, 2);
}

static uint64_t wrong_bytes(const side_t *side, int blocks, int64_t prompt) {
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

static void open_both(side_t *ctx, side_t *gen) {
    kvf_detail_t detail = {""};
    side_make(ctx, "ctx");
    side_make(gen, "gen");
    cr_assert_eq(kvf_agent_start(ctx->agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start(gen->agent, &detail), KVF_OK, "%s", detail.text);
}

static void close_both(side_t *ctx, side_t *gen) {
    cr_assert_eq(kvf_agent_destroy(gen->agent), KVF_OK);
    cr_assert_eq(kvf_agent_destroy(ctx->agent), KVF_OK);
    check_leaks();
}

/* Transfers of one block (a short job), of a few, and of many, by that mover. */
static void run(side_t ctx, side_t gen, const char *by) {
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

Test(agent_copy, one_thread, .timeout = 60) {
    run((side_t){.threads = 1}, (side_t){.threads = 1}, "mapped");
}

Test(agent_copy, many_threads, .timeout = 60) {
    run((side_t){.threads = 64}, (side_t){.threads = 64}, "mapped");
}

Test(agent_copy, without_digests, .timeout = 60) {
    run((side_t){.threads = 3}, (side_t){.threads = 2, .no_digests = true}, "mapped");
}

Test(agent_copy, only_mapped, .timeout = 60) {
    run((side_t){.mover = "mapped"}, (side_t){.mover = "mapped"}, "mapped");
}

Test(agent_copy, not_where_a_side_only_carries, .timeout = 60) {
    static const char *const movers[] = {"ucx", "tcp"};
    for (size_t i = 0; i < 2; i++) {
        run((side_t){.mover = movers[i]}, (side_t){.threads = 0}, movers[i]);
        run((side_t){.threads = 0}, (side_t){.mover = movers[i]}, movers[i]);
    }
}

/* Both have both movers, and each says by its transports which one it would rather have. */
Test(agent_copy, what_both_would_rather_have, .timeout = 60) {
    side_t rather_tcp = {.memory = "host"}, rather_ucx = {.memory = "host", .tls = "tcp,self"};
    run(rather_tcp, rather_tcp, "tcp");
    run(rather_ucx, rather_ucx, "ucx");
    run(rather_tcp, rather_ucx, "tcp");
    run(rather_ucx, rather_tcp, "tcp");
}

Test(agent_copy, not_with_memory_of_its_own, .timeout = 60) {
    run((side_t){.memory = "host"}, (side_t){.threads = 0}, "tcp");
    run((side_t){.threads = 0}, (side_t){.memory = "host"}, "tcp");
}

Test(agent_copy, mapped_needs_shared_memory, .timeout = 60) {
    side_t side = {.mover = "mapped", .memory = "host"};
    kvf_detail_t detail = {""};
    side_make(&side, "ctx");
    cr_assert_eq(kvf_agent_start(side.agent, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "kind shm"), "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(side.agent), KVF_OK);
    check_leaks();
}

/* Break the connections that this process has made to an address, as a network would. */
static void cut(const char *address) {
    const unsigned long port = strtoul(strrchr(address, ':') + 1, NULL, 10);
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in peer = {0};
        socklen_t len = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_family == AF_INET &&
            ntohs(peer.sin_port) == port) {
            cr_assert_eq(shutdown(fd, SHUT_RDWR), 0);
            n++;
        }
    }
    cr_assert_gt(n, 0);
}

/* The functions of an agent that its caller drives write to a connection that is gone: no signal
 * ends the caller's process, and nothing that was said is lost. */
Test(agent_copy, functions_after_the_connection_broke, .timeout = 60) {
    side_t ctx = {.threads = 1}, gen = {.threads = 1};
    char ticket[KVF_TICKET_BYTES];
    kvf_send_t send;
    kvf_recv_t recv;
    (void)signal(SIGPIPE, SIG_DFL);
    open_both(&ctx, &gen);
    side_take(&ctx, 1, 3, true);
    side_take(&gen, 1, 1, false);
    const kvf_send_desc_t offer = {.request_id = "r",
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = ctx.tables,
                                   .n_tables = 2};
    cr_assert_eq(kvf_send_open(ctx.agent, &offer, on_event, &ctx, &send, NULL), KVF_OK);
    cr_assert_eq(kvf_send_ticket(ctx.agent, send, ticket, sizeof(ticket)), KVF_OK);
    const kvf_recv_desc_t fetch = {.request_id = "r",
                                   .direction = KVF_PULL, /* each range is told */
                                   .ticket = ticket,
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = gen.tables,
                                   .n_tables = 2,
                                   .handoff = KVF_HANDOFF_NONE};
    cr_assert_eq(kvf_recv_open(gen.agent, &fetch, on_event, &gen, &recv, NULL), KVF_OK);
    for (int i = 0; i < 2000; i++) { /* until the request has come */
        kvf_agent_progress(gen.agent);
        kvf_agent_progress(ctx.agent);
        (void)usleep(100);
    }
    cut(kvf_loop_address(ctx.agent->loop));
    for (uint32_t layer = 0; layer < 3; layer++) {
        const kvf_range_t range = {.layer_first = layer, .layer_end = layer + 1, .token_end = T};
        cr_assert_eq(kvf_send_ready(ctx.agent, send, &range, NULL, NULL), KVF_OK);
    }
    cr_assert_eq(kvf_send_finish(ctx.agent, send, NULL, NULL), KVF_OK);
    finish(&ctx, &gen);
    cr_assert_eq(gen.status, KVF_OK);
    cr_assert_eq(ctx.status, KVF_OK);
    cr_assert_eq(wrong_bytes(&gen, 1, T), 0);
    side_give(&ctx, 1);
    side_give(&gen, 1);
    close_both(&ctx, &gen);
}

/* The sender's memory changes behind the digest: what was copied is not what was sent, and that is
 * noticed. */
Test(agent_copy, a_source_that_changes, .timeout = 60) {
    enum { BLOCKS = 20, PROMPT = BLOCKS * T };
    side_t ctx = {.threads = 1}, gen = {.threads = 1};
    kvf_counters_t counters = {0};
    open_both(&ctx, &gen);
    side_take(&ctx, BLOCKS, 0, true);
    side_take(&gen, BLOCKS, 0, false);
    request(&ctx, &gen, PROMPT);
    /* Let the receiver ask, and then the sender answer; the receiver has not read it yet. */
    for (int i = 0; i < 100000 && counters.pieces_sent == 0; i++) {
        kvf_agent_progress(ctx.agent);
        kvf_agent_get_counters(ctx.agent, &counters);
        if (counters.pieces_sent == 0) {
            kvf_agent_progress(gen.agent);
        }
        (void)usleep(100);
    }
    uint8_t *page = kvf_pool_page(ctx.pools[0], ctx.slots[0][0]);
    page[0] ^= 0x10;
    finish(&ctx, &gen);
    cr_assert_eq(gen.status, KVF_ERR_DIGEST_MISMATCH);
    cr_assert_eq(ctx.status, KVF_ERR_DIGEST_MISMATCH);
    side_give(&ctx, BLOCKS);
    side_give(&gen, BLOCKS);
    close_both(&ctx, &gen);
}
