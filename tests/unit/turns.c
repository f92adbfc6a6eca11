/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which sends post, read off what waits in the simulated mover. */
#include "../support/transfers.h"

#include <criterion/criterion.h>

#define MIB (UINT64_C(1) << 20)
#define TURN (MIB / 4)
#define TOKENS 32 /* of a block */
#define LAYERS 16
#define LAYER_BYTES 2048
#define BLOCK_BYTES ((uint64_t)LAYERS * LAYER_BYTES)

static kvf_layout_t wide_layout(void) {
    kvf_layout_t layout = {.n_groups = 1,
                           .groups = {{.name = "full",
                                       .n_layers = LAYERS,
                                       .tokens_per_block = TOKENS,
                                       .kv_heads = 1,
                                       .head_dim = 16,
                                       .kv_factor = 2,
                                       .dtype = KVF_DTYPE_BF16}}};
    for (uint32_t i = 0; i < LAYERS; i++) {
        layout.groups[0].layers[i] = i;
    }
    cr_assert_eq(kvf_group_layer_bytes(&layout.groups[0]), LAYER_BYTES);
    return layout;
}

/* All that the tests post fits: the mover takes it, and nothing leaves. */
static void wide(kvf_agent_config_t *config) {
    config->window_bytes = 256 * MIB;
    config->window_pieces = 100000;
}

static void narrow(kvf_agent_config_t *config) {
    config->window_bytes = MIB / 2;
}

/* A request, and whether its prompt became ready layer by layer: pieces of a layer each. */
typedef struct job {
    node_t *ctx, *gen;
    int64_t prompt;
    int32_t slots[2][KVF_MAX_GROUPS][64];
    kvf_table_t tables[2][KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
} job_t;

static void job_open(job_t *job, node_t *ctx, node_t *gen, const char *id, int64_t blocks,
                     bool by_layer) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    char ticket[KVF_TICKET_BYTES];
    kvf_detail_t detail;
    memset(job, 0, sizeof(*job));
    job->ctx = ctx;
    job->gen = gen;
    job->prompt = blocks * TOKENS;
    node_take(ctx, job->prompt, 0, job->slots[0], job->tables[0]);
    node_take(gen, job->prompt, 0, job->slots[1], job->tables[1]);
    kvf_send_desc_t desc = {.request_id = id,
                            .lengths = {.prompt_len = job->prompt},
                            .allocated_tokens = job->prompt,
                            .tables = job->tables[0],
                            .n_tables = 1};
    cr_assert_eq(kvf_core_send_open(ctx->core, &desc, watch_event, &job->sent, &job->send, &detail),
                 KVF_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer = by_layer ? layer + 1 : LAYERS) {
        const kvf_range_t part = {layer, by_layer ? layer + 1 : LAYERS, job->prompt, NULL, 0};
        cr_assert_eq(kvf_core_send_ready(ctx->core, job->send, &part, NULL), KVF_OK);
    }
    cr_assert_eq(kvf_core_send_finish(ctx->core, job->send, &aux, NULL), KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(ctx->core, job->send, ticket, sizeof(ticket)), KVF_OK);
    cr_assert_eq(
        node_fetch(gen, id, ticket, job->prompt, job->tables[1], &job->got, &job->recv, &detail),
        KVF_OK);
}

static void job_close(job_t *job) {
    cr_expect_eq(job->got.status, KVF_OK, "%s", job->got.message);
    cr_expect_eq(job->got.results + job->got.releases + job->sent.results + job->sent.releases, 4);
    node_give(job->ctx, job->tables[0]);
    node_give(job->gen, job->tables[1]);
}

/* Whose bytes they are. */
static int owner(const kvf_sim_chunk_t *chunk, const job_t *jobs, int n) {
    for (int i = 0; i < n; i++) {
        if (chunk->chunk.transfer.counter == jobs[i].recv && chunk->to == jobs[i].gen->number) {
            return i;
        }
    }
    cr_assert_fail("bytes of nobody");
    return -1;
}

/* Along the queue of the mover, no two of the jobs are further apart than a turn and what a turn
 * may have too much, as long as both have bytes to come. */
static void expect_abreast(cluster_t *cluster, const job_t *jobs, int n, uint64_t piece) {
    uint64_t bytes[4] = {0}, all[4];
    kvf_sim_chunk_t chunk;
    for (int i = 0; i < n; i++) {
        all[i] = (uint64_t)(jobs[i].prompt / TOKENS) * BLOCK_BYTES;
    }
    for (size_t at = 0; kvf_sim_net_peek(cluster_net(cluster), at, &chunk); at++) {
        bytes[owner(&chunk, jobs, n)] += chunk.chunk.bytes;
        for (int i = 0; i < n; i++) {
            for (int k = 0; k < n; k++) {
                cr_assert(bytes[i] <= bytes[k] + TURN + piece || bytes[k] == all[k],
                          "chunk %d: job %d has %d bytes, job %d has %d", (int)at, i, (int)bytes[i],
                          k, (int)bytes[k]);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        cr_expect_eq(bytes[i], all[i]);
    }
}

/* Pieces of 32 KiB and of 2 KiB: a window of the latter is half a turn, and the turns of both bring
 * the same bytes. The third has less, and is done early. */
Test(turns, long_and_short_pieces_get_equal_bytes) {
    const kvf_layout_t layout = wide_layout();
    job_t jobs[3];
    cluster_t *cluster = cluster_create(&(cluster_options_t){.chunk_bytes = 65536});
    node_t *ctx = cluster_node(cluster, &layout, 160, wide);
    node_t *gen = cluster_node(cluster, &layout, 160, wide);
    cluster_hold_chunks(cluster, true);
    job_open(&jobs[0], ctx, gen, "long", 60, false);
    job_open(&jobs[1], ctx, gen, "short", 60, true);
    job_open(&jobs[2], ctx, gen, "small", 12, false);
    cluster_run(cluster);
    expect_abreast(cluster, jobs, 3, BLOCK_BYTES);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    for (int i = 0; i < 3; i++) {
        job_close(&jobs[i]);
    }
    cluster_destroy(cluster);
}

/* Two receivers on two nodes. */
Test(turns, peers_get_equal_bytes) {
    const kvf_layout_t layout = wide_layout();
    job_t jobs[3];
    cluster_t *cluster = cluster_create(&(cluster_options_t){.chunk_bytes = 65536});
    node_t *ctx = cluster_node(cluster, &layout, 160, wide);
    node_t *gens[2] = {cluster_node(cluster, &layout, 160, wide),
                       cluster_node(cluster, &layout, 160, wide)};
    /* Connect both first, so that the requests come at one time. */
    for (int i = 0; i < 2; i++) {
        job_open(&jobs[2], ctx, gens[i], "first", 1, false);
        cluster_run(cluster);
        job_close(&jobs[2]);
    }
    cluster_hold_chunks(cluster, true);
    job_open(&jobs[0], ctx, gens[0], "a", 60, false);
    job_open(&jobs[1], ctx, gens[1], "b", 60, true);
    cluster_run(cluster);
    expect_abreast(cluster, jobs, 2, BLOCK_BYTES);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    job_close(&jobs[0]);
    job_close(&jobs[1]);
    cluster_destroy(cluster);
}

/* A short transfer that comes while two long ones are under way: it is served within one round,
 * when the window, which they fill, has room again. */
Test(turns, a_new_short_transfer_is_served_within_a_round) {
    const kvf_layout_t layout = wide_layout();
    job_t jobs[3];
    kvf_sim_chunk_t chunk;
    uint64_t others = 0, before, taken = 0;
    bool served = false;
    cluster_t *cluster = cluster_create(&(cluster_options_t){.chunk_bytes = 65536});
    node_t *ctx = cluster_node(cluster, &layout, 160, narrow);
    node_t *gen = cluster_node(cluster, &layout, 160, wide);
    cluster_hold_chunks(cluster, true);
    job_open(&jobs[0], ctx, gen, "a", 60, false);
    job_open(&jobs[1], ctx, gen, "b", 60, false);
    cluster_run(cluster);
    job_open(&jobs[2], ctx, gen, "new", 1, false);
    cluster_run(cluster);
    before = kvf_sim_net_pending(cluster_net(cluster)); /* in the window when it came */
    cr_assert_geq(before * BLOCK_BYTES, MIB / 2);
    while (!served) {
        cr_assert(kvf_sim_net_peek(cluster_net(cluster), 0, &chunk));
        served = owner(&chunk, jobs, 3) == 2;
        others += !served && taken >= before ? chunk.chunk.bytes : 0;
        taken++;
        (void)kvf_sim_net_step(cluster_net(cluster), 0);
        (void)kvf_sim_net_step(cluster_net(cluster), 0);
        cluster_run(cluster);
    }
    cr_expect_leq(others, 2 * (TURN + BLOCK_BYTES), "%d bytes of others came first", (int)others);
    cluster_hold_chunks(cluster, false);
    cluster_run(cluster);
    for (int i = 0; i < 3; i++) {
        job_close(&jobs[i]);
    }
    cluster_destroy(cluster);
}
