/* SPDX-License-Identifier: Apache-2.0 */
/* Agents with their own threads, over UCX: what only the real driver can get wrong, and faults on
 * the way. */
#include "../support/layouts.h"
#include "transceiver/agent_impl.h"
#include "transceiver/mover/fault.h"

#include <criterion/criterion.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS 40
#define PROMPT (BLOCKS * T - 5)
#define WINDOW 100
#define N_PAGES 100

static const kvf_layout_t layout = FULL_AND_SWA(WINDOW, 4);

typedef struct side {
    kvf_agent_t *agent;
    kvf_pool_t *pools[2];
    int32_t slots[2][BLOCKS];
    kvf_table_t tables[2];
    kvf_mover_fault_t *fault;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool asks; /* the callback calls the library */
    int results, releases;
    kvf_status_t status;
    char message[KVF_DETAIL_BYTES];
    uint64_t bytes, pages;
} side_t;

static void on_event(void *ctx, const kvf_event_t *event) {
    side_t *side = ctx;
    kvf_counters_t counters;
    if (side->asks) {
        kvf_agent_get_counters(side->agent, &counters);
    }
    (void)pthread_mutex_lock(&side->lock);
    if (event->kind == KVF_EVENT_RESULT) {
        side->results++;
        side->status = event->status;
        side->bytes = event->bytes;
        side->pages = event->pages;
        (void)snprintf(side->message, sizeof(side->message), "%s", event->message);
    }
    side->releases += event->kind == KVF_EVENT_RELEASED;
    (void)pthread_cond_broadcast(&side->cond);
    (void)pthread_mutex_unlock(&side->lock);
}

static void wait_released(side_t *side) {
    (void)pthread_mutex_lock(&side->lock);
    while (side->releases == 0) {
        (void)pthread_cond_wait(&side->cond, &side->lock);
    }
    (void)pthread_mutex_unlock(&side->lock);
    cr_expect_eq(side->results, 1);
    cr_expect_eq(side->releases, 1);
}

/* Called by the agent's thread. */
static kvf_status_t make_faulty(void *ctx, kvf_agent_t *agent, const char *name,
                                const kvf_mover_sink_t *sink, kvf_mover_t **mover_p,
                                kvf_detail_t *detail) {
    side_t *side = ctx;
    kvf_mover_t *below;
    kvf_status_t status = kvf_mover_fault_create(sink, kvf_alloc_default(), &side->fault);
    if (status != KVF_OK) {
        return status;
    }
    kvf_mover_sink_t inner = kvf_mover_fault_sink(side->fault);
    status = kvf_agent_make_mover(NULL, agent, name, &inner, &below, detail);
    if (status == KVF_OK) {
        *mover_p = kvf_mover_fault_stack(side->fault, below);
    }
    return status;
}

static const char *mover_kind = "auto";

static void side_make(side_t *side, const char *instance, const char *memory, int64_t n_pages) {
    kvf_agent_config_t config;
    kvf_detail_t detail = {""};
    *side = (side_t){.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    kvf_agent_config_init(&config);
    config.instance = instance;
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    config.mover = mover_kind;
    config.cluster_key[5] = 1;
    config.log_level = KVF_LOG_ERROR;
    cr_assert_eq(kvf_agent_create(&config, &side->agent, &detail), KVF_OK, "%s", detail.text);
    for (uint32_t g = 0; g < 2; g++) {
        const kvf_pool_desc_t desc = {g, memory, n_pages, NULL, false};
        cr_assert_eq(kvf_pool_create(side->agent, &desc, &side->pools[g], &detail), KVF_OK, "%s",
                     detail.text);
    }
}

static void side_open(side_t *side, const char *instance, const char *memory, bool faulty) {
    side_make(side, instance, memory, N_PAGES);
    if (faulty) {
        side->agent->n_movers = 1;
        side->agent->make_mover = make_faulty;
        side->agent->make_mover_ctx = side;
    }
}

static void side_start(side_t *side) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_agent_start_thread(side->agent, &detail), KVF_OK, "%s", detail.text);
}

static uint8_t byte_at(uint32_t g, int block, uint64_t i) {
    return (uint8_t)(g * 101 + (unsigned)block * 7 + i * 13 + i / 251);
}

static void side_take(side_t *side, bool fill) {
    for (uint32_t g = 0; g < 2; g++) {
        cr_assert_eq(kvf_pool_acquire(side->pools[g], BLOCKS, side->slots[g]), KVF_OK);
        side->tables[g] = (kvf_table_t){side->slots[g], BLOCKS};
        for (int b = 0; b < BLOCKS && fill; b++) {
            uint8_t *page = kvf_pool_page(side->pools[g], side->slots[g][b]);
            for (uint64_t i = 0; i < kvf_group_block_bytes(&layout.groups[g]); i++) {
                page[i] = byte_at(g, b, i);
            }
        }
    }
}

static void side_give(side_t *side) {
    for (uint32_t g = 0; g < 2; g++) {
        kvf_pool_info_t info;
        cr_expect_eq(kvf_pool_release(side->pools[g], BLOCKS, side->slots[g]), KVF_OK);
        kvf_pool_get_info(side->pools[g], &info);
        cr_expect_eq(info.free, N_PAGES, "all pages are back");
    }
}

static void offer(side_t *side, char *ticket) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    const kvf_range_t all = {.layer_end = 3, .token_end = PROMPT};
    kvf_send_desc_t desc = {.request_id = "r",
                            .lengths = {.prompt_len = PROMPT},
                            .allocated_tokens = PROMPT,
                            .tables = side->tables,
                            .n_tables = 2};
    kvf_send_t send;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_send_open(side->agent, &desc, on_event, side, &send, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_send_ready(side->agent, send, &all, NULL, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_send_finish(side->agent, send, &aux, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_send_ticket(side->agent, send, ticket, KVF_TICKET_BYTES), KVF_OK);
}

static kvf_recv_t fetch(side_t *side, const char *ticket, uint64_t timeout_us) {
    kvf_recv_desc_t desc = {.request_id = "r",
                            .ticket = ticket,
                            .lengths = {.prompt_len = PROMPT},
                            .allocated_tokens = PROMPT,
                            .tables = side->tables,
                            .n_tables = 2,
                            .timeout_us = timeout_us};
    kvf_recv_t recv;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_recv_open(side->agent, &desc, on_event, side, &recv, &detail), KVF_OK, "%s",
                 detail.text);
    return recv;
}

static uint64_t wrong_bytes(const side_t *side) {
    uint64_t wrong = 0;
    for (uint32_t g = 0; g < 2; g++) {
        for (int b = 0; b < BLOCKS; b++) {
            const uint8_t *page = kvf_pool_page(side->pools[g], side->slots[g][b]);
            /* The query at PROMPT sees [PROMPT - WINDOW + 1, PROMPT]: blocks that end before that
             * did not travel. */
            bool came = g == 0 || (b + 1) * T > PROMPT - WINDOW + 1;
            for (uint64_t i = 0; i < kvf_group_block_bytes(&layout.groups[g]); i++) {
                wrong += page[i] != (came ? byte_at(g, b, i) : 0);
            }
        }
    }
    return wrong;
}

/* Start both, and ask for what the one offers. */
static void begin(side_t *ctx, side_t *gen, uint64_t timeout_us) {
    char ticket[KVF_TICKET_BYTES];
    side_start(ctx);
    side_start(gen);
    side_take(ctx, true);
    side_take(gen, false);
    offer(ctx, ticket);
    (void)fetch(gen, ticket, timeout_us);
}

static void run_with(const kvf_fault_plan_t *plan, side_t *ctx, side_t *gen) {
    char ticket[KVF_TICKET_BYTES];
    side_open(ctx, "ctx", "host", true);
    side_open(gen, "gen", "host", false);
    side_start(ctx);
    side_start(gen);
    kvf_mover_fault_set(ctx->fault, plan); /* its agent is idle: nothing is posted yet */
    side_take(ctx, true);
    side_take(gen, false);
    offer(ctx, ticket);
    (void)fetch(gen, ticket, 2000000);
    wait_released(gen);
    wait_released(ctx);
}

static void end_with(side_t *ctx, side_t *gen) {
    side_give(ctx);
    side_give(gen);
    cr_expect_eq(kvf_agent_destroy(ctx->agent), KVF_OK);
    cr_expect_eq(kvf_agent_destroy(gen->agent), KVF_OK);
}

Test(agent, moves_what_is_live, .timeout = 60) {
    side_t ctx, gen;
    run_with(NULL, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_OK, "%s", gen.message);
    cr_expect_eq(ctx.status, KVF_OK, "%s", ctx.message);
    cr_expect_eq(wrong_bytes(&gen), 0);
    cr_expect_eq(gen.pages, 40 + 7);
    cr_expect_eq(gen.bytes, 40 * 32768 + 7 * 16384);
    end_with(&ctx, &gen);
}

Test(agent, a_byte_flipped_in_flight_is_caught_and_named, .timeout = 60) {
    const kvf_fault_plan_t plan = {.flip_piece = 8, .flip_offset = 5000};
    side_t ctx, gen;
    run_with(&plan, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_eq(ctx.status, KVF_ERR_DIGEST_MISMATCH);
    cr_expect_not_null(strstr(gen.message, "group full, ordinal 7"), "%s", gen.message);
    end_with(&ctx, &gen);
}

Test(agent, a_page_shifted_by_one_ordinal_is_caught_and_named, .timeout = 60) {
    const kvf_fault_plan_t plan = {.shift_ordinal = 12};
    side_t ctx, gen;
    run_with(&plan, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_ERR_PROTOCOL);
    cr_expect_eq(ctx.status, KVF_ERR_PROTOCOL);
    cr_expect_not_null(strstr(gen.message, "group full, ordinal 12"), "%s", gen.message);
    end_with(&ctx, &gen);
}

Test(agent, a_page_in_the_next_slot_is_caught_and_named, .timeout = 60) {
    const kvf_fault_plan_t plan = {.shift_slot = 12};
    side_t ctx, gen;
    run_with(&plan, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_ERR_PROTOCOL);
    cr_expect_not_null(strstr(gen.message, "group full, ordinal 11"), "%s", gen.message);
    end_with(&ctx, &gen);
}

Test(agent, bytes_that_never_come_are_missed, .timeout = 60) {
    const kvf_fault_plan_t plan = {.drop_window = 1};
    side_t ctx, gen;
    run_with(&plan, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_ERR_DEADLINE);
    cr_expect_eq(ctx.status, KVF_ERR_DEADLINE);
    end_with(&ctx, &gen);
}

Test(agent, a_post_that_fails_ends_both_sides, .timeout = 60) {
    const kvf_fault_plan_t plan = {.fail_post = 1, .fail_status = KVF_ERR_IO};
    side_t ctx, gen;
    run_with(&plan, &ctx, &gen);
    cr_expect_eq(gen.status, KVF_ERR_PEER_LOST, "%s", gen.message);
    cr_expect_eq(ctx.status, KVF_ERR_PEER_LOST);
    end_with(&ctx, &gen);
}

/* The caller's own thread drives both agents, and sleeps on their descriptors. */
Test(agent, driven_by_the_caller, .timeout = 60) {
    side_t ctx, gen;
    kvf_detail_t detail = {""};
    char ticket[KVF_TICKET_BYTES];
    side_open(&ctx, "ctx", "shm", false);
    side_open(&gen, "gen", "shm", false);
    cr_assert_eq(kvf_agent_start(ctx.agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start(gen.agent, &detail), KVF_OK, "%s", detail.text);
    side_take(&ctx, true);
    side_take(&gen, false);
    offer(&ctx, ticket);
    (void)fetch(&gen, ticket, 10000000);
    while (ctx.releases == 0 || gen.releases == 0) {
        struct pollfd fds[] = {{kvf_agent_fd(ctx.agent), POLLIN, 0},
                               {kvf_agent_fd(gen.agent), POLLIN, 0}};
        kvf_agent_progress(ctx.agent);
        kvf_agent_progress(gen.agent);
        uint64_t a = kvf_agent_timeout_us(ctx.agent), b = kvf_agent_timeout_us(gen.agent);
        uint64_t wait = (a < b ? a : b) / 1000;
        (void)poll(fds, 2, wait > 100 ? 100 : (int)wait);
    }
    cr_expect_eq(gen.status, KVF_OK, "%s", gen.message);
    cr_expect_eq(wrong_bytes(&gen), 0);
    end_with(&ctx, &gen);
}

static uint64_t processor_time_ns(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* A busy machine makes what is measured smaller, never larger. */
Test(agent, sleeps_after_a_callback_that_called, .timeout = 60) {
    side_t ctx, gen;
    side_open(&ctx, "ctx", "host", false);
    side_open(&gen, "gen", "host", false);
    gen.asks = true;
    begin(&ctx, &gen, 10000000);
    wait_released(&gen);
    wait_released(&ctx);
    uint64_t before = processor_time_ns();
    (void)usleep(500000);
    cr_expect_lt(processor_time_ns() - before, 250000000);
    end_with(&ctx, &gen);
}

Test(agent, destroyed_in_the_middle, .timeout = 60) {
    side_t ctx, gen;
    side_open(&ctx, "ctx", "host", false);
    side_open(&gen, "gen", "host", false);
    begin(&ctx, &gen, 10000000);
    cr_expect_eq(kvf_agent_destroy(ctx.agent), KVF_OK);
    wait_released(&ctx);
    wait_released(&gen);
    cr_expect(gen.status == KVF_OK || gen.status == KVF_ERR_CANCELLED ||
                  gen.status == KVF_ERR_PEER_LOST,
              "%s", gen.message);
    cr_expect(gen.status != KVF_OK || wrong_bytes(&gen) == 0);
    side_give(&gen);
    cr_expect_eq(kvf_agent_destroy(gen.agent), KVF_OK);
    cr_expect_eq(kvf_agent_destroy(NULL), KVF_OK);
}

/* Whether one of this process's sockets has that inode. */
static bool is_ours(unsigned long inode) {
    char path[64], link[64], want[64];
    (void)snprintf(want, sizeof(want), "socket:[%lu]", inode);
    for (int fd = 0; fd < 1024; fd++) {
        (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, link, sizeof(link) - 1);
        if (n > 0) {
            link[n] = '\0';
            if (strcmp(link, want) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* How many sockets of this process listen; all of them on loopback. */
static int count_listeners(void) {
    char line[512];
    int listening = 0;
    FILE *table = fopen("/proc/self/net/tcp", "r");
    cr_assert_not_null(table);
    while (fgets(line, sizeof(line), table) != NULL) {
        char address[16], state[8];
        unsigned long inode;
        if (sscanf(line, "%*d: %8[0-9A-F]:%*x %*s %7s %*s %*s %*s %*s %*s %lu", address, state,
                   &inode) == 3 &&
            strcmp(state, "0A") == 0 && is_ours(inode)) {
            cr_expect_str_eq(address, "0100007F", "listens on %s", address);
            listening++;
        }
    }
    (void)fclose(table);
    return listening;
}

/* Movers listen for data; like the control channel, on loopback only. */
Test(agent, listens_where_control_does, .timeout = 60) {
    static const struct {
        const char *mover;
        int listeners;
    } cases[] = {{"auto", 3}, {"ucx", 2}, {"tcp", 2}}; /* with the control channel's */
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        side_t side;
        mover_kind = cases[i].mover;
        side_open(&side, "ctx", "host", false);
        side_start(&side);
        cr_expect_eq(count_listeners(), cases[i].listeners, "%s", cases[i].mover);
        cr_expect_eq(side.agent->ucx != NULL, strcmp(cases[i].mover, "tcp") != 0);
        cr_expect_eq(kvf_agent_destroy(side.agent), KVF_OK);
    }
}

Test(agent, refusals_say_what_to_do) {
    kvf_agent_config_t config;
    kvf_agent_t *agent, *other;
    kvf_pool_t *pool;
    kvf_detail_t detail;
    char address[KVF_ADDRESS_BYTES];
    kvf_agent_config_init(&config);
    cr_expect_eq(kvf_agent_create(&config, &agent, &detail), KVF_ERR_INVALID);
    config.instance = "a";
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    cr_expect_eq(kvf_agent_create(&config, &agent, &detail), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "keygen"), "%s", detail.text);
    config.cluster_key[0] = 1;
    config.mover = "ucks";
    cr_expect_eq(kvf_agent_create(&config, &agent, &detail), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "nccl"), "%s", detail.text);
    config.mover = "auto";
    config.suspect_us = 5000000;
    cr_expect_eq(kvf_agent_create(&config, &agent, &detail), KVF_ERR_INVALID);
    config.suspect_us = 1000000;
    config.busy_poll_us = 1000001;
    cr_expect_eq(kvf_agent_create(&config, &agent, &detail), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "busy_poll_us"), "%s", detail.text);
    config.busy_poll_us = 1000;
    config.log_level = KVF_LOG_ERROR;
    cr_assert_eq(kvf_agent_create(&config, &agent, &detail), KVF_OK, "%s", detail.text);
    cr_expect_eq(kvf_agent_start_thread(agent, &detail), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "full"), "%s", detail.text);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){0, "disk", 4, NULL, false}, &pool, &detail),
        KVF_ERR_UNSUPPORTED);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){0, "cuda:x", 4, NULL, false}, &pool, &detail),
        KVF_ERR_INVALID);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){0, "host", 0, NULL, false}, &pool, &detail),
        KVF_ERR_INVALID);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){2, "host", 4, NULL, false}, &pool, &detail),
        KVF_ERR_INVALID);
    cr_assert_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){0, "host", 4, NULL, false}, &pool, &detail),
        KVF_OK);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){0, "host", 4, NULL, false}, &pool, &detail),
        KVF_ERR_INVALID);
    cr_expect_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){1, "cuda", 4, NULL, false}, &pool, &detail),
        KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "all on a device"), "%s", detail.text);
    cr_assert_eq(
        kvf_pool_create(agent, &(kvf_pool_desc_t){1, "host", 4, NULL, false}, &pool, &detail),
        KVF_OK);
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_address(agent, address, sizeof(address)), KVF_OK);
    config.control_listen = address;
    cr_assert_eq(kvf_agent_create(&config, &other, &detail), KVF_OK);
    cr_assert_eq(
        kvf_pool_create(other, &(kvf_pool_desc_t){0, "host", 4, NULL, false}, &pool, &detail),
        KVF_OK);
    cr_assert_eq(
        kvf_pool_create(other, &(kvf_pool_desc_t){1, "host", 4, NULL, false}, &pool, &detail),
        KVF_OK);
    cr_expect_eq(kvf_agent_start_thread(other, &detail), KVF_ERR_IO);
    cr_expect_not_null(strstr(detail.text, address), "%s", detail.text);
    cr_expect_eq(kvf_agent_destroy(other), KVF_OK);
    cr_expect_eq(kvf_agent_destroy(agent), KVF_OK);
}

/* Pool offsets beyond 4 GiB: a page high up in a sparse pool gets its own bytes, and the page 4 GiB
 * below stays zero. */
Test(agent, a_pool_of_many_gigabytes, .timeout = 120) {
    enum { PAGES = 300000 }; /* of 32 KiB: 9.2 GiB of addresses, of which little is touched */
    side_t ctx, gen;
    char ticket[KVF_TICKET_BYTES];
    static int32_t all[PAGES];
    side_open(&ctx, "ctx", "host", false);
    side_start(&ctx);
    side_make(&gen, "gen", "host", PAGES);
    side_start(&gen);
    side_take(&ctx, true);
    for (uint32_t g = 0; g < 2; g++) {
        cr_assert_eq(kvf_pool_acquire(gen.pools[g], PAGES, all), KVF_OK);
        gen.tables[g] = (kvf_table_t){gen.slots[g], BLOCKS};
        for (int b = 0; b < BLOCKS; b++) {
            gen.slots[g][b] = PAGES - 1 - 3 * b; /* the top of the pool */
        }
    }
    offer(&ctx, ticket);
    (void)fetch(&gen, ticket, 30000000);
    wait_released(&gen);
    wait_released(&ctx);
    cr_expect_eq(gen.status, KVF_OK, "%s", gen.message);
    cr_expect_eq(wrong_bytes(&gen), 0);
    for (int b = 0; b < BLOCKS; b++) {
        const uint8_t *page = kvf_pool_page(
            gen.pools[0], gen.slots[0][b] - (int32_t)(UINT64_C(4) * 1024 * 1024 * 1024 / 32768));
        for (uint64_t i = 0; i < 32768; i++) {
            cr_assert_eq(page[i], 0);
        }
    }
    cr_expect_eq(kvf_agent_destroy(ctx.agent), KVF_OK);
    cr_expect_eq(kvf_agent_destroy(gen.agent), KVF_OK);
}
