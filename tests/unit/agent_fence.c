/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges that are written when a device's event is reached: what leaves when, and when pages come
 * back. Two agents of one process, so that bytes go through the CPU's memory; the device is the
 * stand-in. */
#include "../support/layouts.h"
#include "tests/support/cuda/standin.h"
#include "transceiver/agent_impl.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS 12
#define N_PAGES 20
#define PROMPT (BLOCKS * T)
#define N_LAYERS 3U
#define SWA_FIRST (BLOCKS - 4) /* that lie in the window for certain */

static const kvf_layout_t layout = FULL_AND_SWA(4 * T, 4);

typedef struct side {
    kvf_agent_t *agent;
    kvf_pool_t *pools[2];
    int32_t slots[2][BLOCKS];
    kvf_table_t tables[2];
    int results, releases;
    uint32_t layers; /* of progress */
    size_t n_poisoned;
    kvf_status_t status;
    char message[KVF_DETAIL_BYTES];
} side_t;

static side_t ctx, gen;
static kvf_send_t sender;
static kvf_detail_t detail;
static cudaStream_t streams[N_LAYERS]; /* the kernels of a layer */
static cudaEvent_t written[N_LAYERS];

static void on_event(void *arg, const kvf_event_t *event) {
    side_t *side = arg;
    side->releases += event->kind == KVF_EVENT_RELEASED;
    side->n_poisoned += event->n_poisoned;
    side->layers = event->kind == KVF_EVENT_PROGRESS ? event->layer_end : side->layers;
    if (event->kind == KVF_EVENT_RESULT) {
        side->results++;
        side->status = event->status;
        (void)snprintf(side->message, sizeof(side->message), "%s", event->message);
    }
}

static void side_open(side_t *side, const char *instance) {
    kvf_agent_config_t config;
    kvf_agent_config_init(&config);
    config.instance = instance;
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    config.cluster_key[5] = 1;
    config.quarantine_us = 200000;
    config.log_level = KVF_LOG_ERROR;
    cr_assert_eq(kvf_agent_create(&config, &side->agent, &detail), KVF_OK, "%s", detail.text);
    for (uint32_t g = 0; g < 2; g++) {
        const kvf_pool_desc_t desc = {g, "cuda", N_PAGES, NULL, false};
        cr_assert_eq(kvf_pool_create(side->agent, &desc, &side->pools[g], &detail), KVF_OK);
        cr_assert_eq(kvf_pool_acquire(side->pools[g], BLOCKS, side->slots[g]), KVF_OK);
        side->tables[g] = (kvf_table_t){side->slots[g], BLOCKS};
    }
    cr_assert_eq(kvf_agent_start(side->agent, &detail), KVF_OK, "%s", detail.text);
}

static uint8_t byte_at(uint32_t layer, int block, uint64_t i) {
    return (uint8_t)(layer * 101 + (unsigned)block * 7 + i * 13 + i / 251 + 1);
}

/* Where a layer is: its group, and its bytes in a page. */
static uint32_t group_of(uint32_t layer, uint64_t *at_p, uint64_t *bytes_p) {
    uint32_t g = layer == 1 ? 1 : 0;
    *bytes_p = kvf_group_layer_bytes(&layout.groups[g]);
    *at_p = layer == 2 ? *bytes_p : 0;
    return g;
}

/* Queue a layer's kernels, which take until their stream is let go, and say that it is ready when
 * they have run. */
static void compute(uint32_t layer) {
    static uint8_t page[1 << 16];
    uint64_t at, bytes;
    uint32_t g = group_of(layer, &at, &bytes);
    const kvf_range_t range = {.layer_first = layer, .layer_end = layer + 1, .token_end = PROMPT};
    standin_cuda_hold_stream(streams[layer], true);
    for (int b = 0; b < BLOCKS; b++) {
        for (uint64_t i = 0; i < bytes; i++) {
            page[i] = byte_at(layer, b, i);
        }
        uint8_t *to = (uint8_t *)kvf_pool_page(ctx.pools[g], ctx.slots[g][b]) + at;
        cr_assert_eq(cudaMemcpyAsync(to, page, bytes, cudaMemcpyDefault, streams[layer]),
                     cudaSuccess);
    }
    cr_assert_eq(cudaEventRecord(written[layer], streams[layer]), cudaSuccess);
    cr_assert_eq(kvf_send_ready(ctx.agent, sender, &range, written[layer], &detail), KVF_OK, "%s",
                 detail.text);
}

static void drive(int ms) {
    for (int i = 0; i < 10 * ms; i++) {
        kvf_agent_progress(ctx.agent);
        kvf_agent_progress(gen.agent);
        (void)usleep(100);
    }
}

/* Until something is so, for ten seconds. */
#define DRIVE_UNTIL(condition)                                                                     \
    for (int i_ = 0; !(condition); i_++) {                                                         \
        cr_assert_lt(i_, 10000, "%s", #condition);                                                 \
        drive(1);                                                                                  \
    }

static void start(void) {
    const kvf_send_desc_t offer = {.request_id = "r",
                                   .lengths = {.prompt_len = PROMPT},
                                   .allocated_tokens = PROMPT,
                                   .tables = ctx.tables,
                                   .n_tables = 2};
    side_open(&ctx, "ctx");
    side_open(&gen, "gen");
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        cr_assert_eq(cudaStreamCreateWithFlags(&streams[i], 0), cudaSuccess);
        cr_assert_eq(cudaEventCreateWithFlags(&written[i], 0), cudaSuccess);
    }
    cr_assert_eq(kvf_send_open(ctx.agent, &offer, on_event, &ctx, &sender, &detail), KVF_OK, "%s",
                 detail.text);
}

static void fetch(void) {
    char ticket[KVF_TICKET_BYTES];
    kvf_recv_t recv;
    kvf_recv_desc_t desc = {.request_id = "r",
                            .lengths = {.prompt_len = PROMPT},
                            .allocated_tokens = PROMPT,
                            .tables = gen.tables,
                            .n_tables = 2,
                            .ticket = ticket,
                            .handoff = KVF_HANDOFF_NONE};
    cr_assert_eq(kvf_send_ticket(ctx.agent, sender, ticket, sizeof(ticket)), KVF_OK);
    cr_assert_eq(kvf_recv_open(gen.agent, &desc, on_event, &gen, &recv, &detail), KVF_OK, "%s",
                 detail.text);
}

static void check_bytes(void) {
    static uint8_t got[1 << 16];
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        uint64_t at, bytes;
        uint32_t g = group_of(layer, &at, &bytes);
        for (int b = g == 0 ? 0 : SWA_FIRST; b < BLOCKS; b++) {
            cr_assert_eq(kvf_pool_read(gen.pools[g], gen.slots[g][b], at, got, bytes, &detail),
                         KVF_OK);
            for (uint64_t i = 0; i < bytes; i++) {
                cr_assert_eq(got[i], byte_at(layer, b, i), "layer %u, block %d, byte %lu", layer, b,
                             i);
            }
        }
    }
}

static void stop(void) {
    cr_assert_eq(kvf_agent_destroy(ctx.agent), KVF_OK);
    cr_assert_eq(kvf_agent_destroy(gen.agent), KVF_OK);
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        cr_assert_eq(cudaStreamDestroy(streams[i]), cudaSuccess);
        cr_assert_eq(cudaEventDestroy(written[i]), cudaSuccess);
    }
    standin_cuda_counts_t counts = standin_cuda_counts();
    cr_expect_eq(
        counts.allocations + counts.imports + counts.pinned + counts.streams + counts.events, 0);
}

static void let_go(uint32_t layer) {
    standin_cuda_hold_stream(streams[layer], false);
}

/* Layers that are still being written: each leaves when its kernels have run, and not before. */
Test(agent_fence, layer_by_layer) {
    start();
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        compute(layer);
    }
    cr_assert_eq(kvf_send_finish(ctx.agent, sender, NULL, &detail), KVF_OK, "%s", detail.text);
    fetch();
    drive(100);
    cr_assert_eq(gen.layers, 0);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        cr_assert_eq(gen.results, 0);
        let_go(layer);
        DRIVE_UNTIL(gen.layers == layer + 1);
        drive(20);
        cr_assert_eq(gen.layers, layer + 1, "the next one waits for its own kernels");
    }
    DRIVE_UNTIL(gen.releases == 1 && ctx.releases == 1);
    cr_assert_eq(gen.status, KVF_OK, "%s", gen.message);
    check_bytes();
    stop();
}

/* Kernels that end in another order: what was promised later waits for what was promised first. */
Test(agent_fence, in_the_order_of_the_promises) {
    start();
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        compute(layer);
    }
    cr_assert_eq(kvf_send_finish(ctx.agent, sender, NULL, &detail), KVF_OK);
    fetch();
    let_go(2);
    let_go(1);
    drive(100);
    cr_assert_eq(gen.layers, 0);
    let_go(0);
    DRIVE_UNTIL(gen.releases == 1 && ctx.releases == 1);
    cr_assert_eq(gen.status, KVF_OK, "%s", gen.message);
    check_bytes();
    stop();
}

/* An event may be recorded again at once; what is ready without a fence waits for those before. */
Test(agent_fence, an_event_for_all) {
    const kvf_range_t last = {.layer_first = 2, .layer_end = 3, .token_end = PROMPT};
    start();
    cudaEvent_t other = written[1];
    written[1] = written[0];
    compute(0);
    compute(1);
    written[1] = other;
    standin_cuda_hold_stream(streams[2], false);
    uint64_t at, bytes;
    static uint8_t page[1 << 16];
    uint32_t g = group_of(2, &at, &bytes);
    for (int b = 0; b < BLOCKS; b++) {
        for (uint64_t i = 0; i < bytes; i++) {
            page[i] = byte_at(2, b, i);
        }
        cr_assert_eq(kvf_pool_write(ctx.pools[g], ctx.slots[g][b], at, page, bytes, &detail),
                     KVF_OK);
    }
    cr_assert_eq(kvf_send_ready(ctx.agent, sender, &last, NULL, &detail), KVF_OK);
    cr_assert_eq(kvf_send_finish(ctx.agent, sender, NULL, &detail), KVF_OK);
    fetch();
    drive(100);
    cr_assert_eq(gen.layers, 0);
    let_go(0);
    DRIVE_UNTIL(gen.layers == 1);
    drive(20);
    cr_assert_eq(gen.layers, 1);
    let_go(1);
    DRIVE_UNTIL(gen.releases == 1 && ctx.releases == 1);
    cr_assert_eq(gen.status, KVF_OK, "%s", gen.message);
    check_bytes();
    stop();
}

/* A send that is cancelled keeps its pages until its kernels have run: in doubt, then poisoned, and
 * free again when they have. */
Test(agent_fence, cancelled_before_the_kernels_have_run) {
    kvf_pool_info_t info;
    start();
    compute(0);
    cr_assert_eq(kvf_send_cancel(ctx.agent, sender, KVF_ERR_CANCELLED), KVF_OK);
    cr_assert_eq(kvf_pool_release(ctx.pools[0], BLOCKS, ctx.slots[0]), KVF_OK);
    cr_assert_eq(kvf_pool_release(ctx.pools[1], BLOCKS, ctx.slots[1]), KVF_OK);
    DRIVE_UNTIL(ctx.results == 1);
    kvf_pool_get_info(ctx.pools[0], &info);
    cr_assert_eq(info.quarantined, BLOCKS);
    DRIVE_UNTIL(ctx.releases == 1);
    kvf_pool_get_info(ctx.pools[0], &info);
    cr_assert_eq(info.poisoned, BLOCKS);
    cr_assert_gt(ctx.n_poisoned, 0);
    cr_assert_eq(kvf_agent_destroy(ctx.agent), KVF_ERR_BUSY);
    let_go(0);
    DRIVE_UNTIL((kvf_pool_get_info(ctx.pools[0], &info), info.free == N_PAGES));
    stop();
}

/* A device that fails before: the send ends with an error, on both sides; nobody is woken for it.
 */
Test(agent_fence, the_device_fails) {
    start();
    compute(0);
    fetch();
    drive(20);
    standin_cuda_fail("execute", 2);
    let_go(0);
    DRIVE_UNTIL(ctx.releases == 1 && gen.releases == 1);
    cr_assert_eq(ctx.status, KVF_ERR_PREFILL_FAILED, "%s", ctx.message);
    cr_assert_eq(gen.status, KVF_ERR_PREFILL_FAILED, "%s", gen.message);
    cr_assert_not_null(strstr(ctx.message, "the device failed"), "%s", ctx.message);
    standin_cuda_reset();
    stop();
}

/* A call that fails proves nothing about the kernels: pages wait for them, as before. */
Test(agent_fence, a_failed_query_is_no_proof) {
    kvf_pool_info_t info;
    start();
    compute(0);
    for (int i = 0; i < 4; i++) {
        standin_cuda_fail(i % 2 == 0 ? "cudaEventQuery" : "cuCtxPushCurrent", 1);
        drive(80);
        kvf_pool_get_info(ctx.pools[0], &info);
        cr_assert_eq(info.reading, BLOCKS);
        cr_assert_eq(ctx.results, 0, "%s", ctx.message);
    }
    let_go(0);
    cr_assert_eq(kvf_send_cancel(ctx.agent, sender, KVF_ERR_CANCELLED), KVF_OK);
    DRIVE_UNTIL(ctx.releases == 1);
    cr_assert_eq(ctx.n_poisoned, 0);
    stop();
}

/* What is refused changes nothing, and leaves nothing. */
Test(agent_fence, refused) {
    static const char *const calls[] = {"cudaStreamWaitEvent", "cudaEventRecord",
                                        "cudaLaunchHostFunc", "cudaStreamCreateWithFlags",
                                        "cudaEventCreateWithFlags"};
    const kvf_range_t beyond = {.layer_end = 9, .token_end = PROMPT};
    const kvf_range_t first = {.layer_end = 1, .token_end = PROMPT};
    start();
    cr_assert_eq(cudaEventRecord(written[0], streams[0]), cudaSuccess);
    cr_assert_eq(kvf_send_ready(ctx.agent, sender, &beyond, written[0], &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "last layer is 2"), "%s", detail.text);
    (void)usleep(20000);
    standin_cuda_hold_stream(streams[1], true);
    cr_assert_eq(cudaEventRecord(written[1], streams[1]), cudaSuccess);
    cr_assert_eq(kvf_send_ready(ctx.agent, sender, &beyond, written[1], &detail), KVF_ERR_INVALID,
                 "given back before it is reached");
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        standin_cuda_fail(calls[i], 1);
        kvf_status_t status = kvf_send_ready(ctx.agent, sender, &first, written[1], &detail);
        cr_expect_eq(status, KVF_ERR_IO, "%s", calls[i]);
        cr_expect_not_null(strstr(detail.text, "waiting for an event"), "%s", detail.text);
    }
    /* Events that are none leave no streams behind. */
    uint64_t n_streams = standin_cuda_counts().streams;
    for (int i = 0; i < 50; i++) {
        standin_cuda_fail("cudaStreamWaitEvent", 1);
        cr_expect_eq(kvf_send_ready(ctx.agent, sender, &first, written[1], &detail), KVF_ERR_IO);
    }
    cr_expect_leq(standin_cuda_counts().streams, n_streams + 1);
    standin_cuda_hold_stream(streams[1], false);
    kvf_send_t nobody = {12345};
    cr_assert_eq(kvf_send_ready(ctx.agent, nobody, &first, written[1], &detail), KVF_ERR_UNKNOWN);
    cr_assert_eq(kvf_send_cancel(ctx.agent, sender, KVF_ERR_CANCELLED), KVF_OK);
    DRIVE_UNTIL(ctx.releases == 1);
    cr_assert_eq(ctx.n_poisoned, 0);
    stop();
}
