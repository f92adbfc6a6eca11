/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster_impl.h"

#include "kernels/copy.h"
#include "kernels/digest.h"
#include "mappings.h"
#include "paths.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

static kvf_status_t do_connect(void *ctx, uint64_t peer, uint32_t mover_idx, const void *address,
                               size_t bytes, kvf_detail_t *detail) {
    (void)mover_idx;
    kvf_mover_t *mover = ((node_t *)ctx)->mover;
    return mover->ops->connect(mover, peer, address, bytes, detail);
}

static void do_disconnect(void *ctx, uint64_t peer, uint32_t mover_idx) {
    (void)mover_idx;
    kvf_mover_t *mover = ((node_t *)ctx)->mover;
    mover->ops->disconnect(mover, peer);
}

static kvf_status_t do_post(void *ctx, kvf_window_t *window) {
    kvf_mover_t *mover = ((node_t *)ctx)->mover;
    return mover->ops->post(mover, window);
}

uint8_t *node_page(const node_t *node, uint32_t group_idx, int32_t slot) {
    cr_assert(slot >= 0 && slot < node->n_pages);
    return node->memory[group_idx] +
           (uint64_t)slot * kvf_group_block_bytes(&node->layout.groups[group_idx]);
}

static const uint8_t *do_page(void *ctx, uint32_t group_idx, int32_t slot) {
    return node_page(ctx, group_idx, slot);
}

static void do_verify(void *ctx, kvf_verify_t *job) {
    node_t *node = ctx;
    job->job.next = node->jobs;
    job->source = NULL;
    node->jobs = &job->job;
    if (job->peer != 0 && node->cluster->options.fetch) {
        paths_use(node->cluster->paths, node, job);
    } else if (job->peer != 0) {
        mappings_use(node->cluster->mappings, node, job);
    }
}

static kvf_status_t do_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                           const int64_t *n_pages, kvf_detail_t *detail) {
    node_t *node = ctx;
    return node->cluster->options.fetch
               ? paths_map(node->cluster->paths, node, peer)
               : mappings_map(node->cluster->mappings, node, peer, address, bytes, n_pages, detail);
}

static void do_unmap(void *ctx, uint64_t peer) {
    node_t *node = ctx;
    if (node->cluster->options.fetch) {
        paths_unmap(node->cluster->paths, node, peer);
    } else {
        mappings_unmap(node->cluster->mappings, node, peer);
    }
}

static kvf_status_t do_join(void *ctx, uint64_t peer, uint64_t path, const void *invitation,
                            size_t bytes, kvf_detail_t *detail) {
    node_t *node = ctx;
    kvf_status_t status = paths_join(node->cluster->paths, node, peer, path, invitation, bytes);
    return status == KVF_OK ? status : kvf_fail(detail, status, "that is no invitation");
}

static void do_joined(void *ctx, uint64_t peer, uint64_t path, const void *answer, size_t bytes) {
    const node_t *node = ctx;
    paths_joined(node->cluster->paths, node, peer, path, answer, bytes);
}

static void do_leave(void *ctx, uint64_t peer, uint64_t path, bool own, const char *why) {
    const node_t *node = ctx;
    (void)why;
    paths_leave(node->cluster->paths, node, peer, path, own);
}

static void do_serve(void *ctx, kvf_serve_t *serve) {
    node_t *node = ctx;
    paths_serve(node->cluster->paths, node, serve);
}

static void do_evict(void *ctx, uint64_t peer) {
    const node_t *node = ctx;
    paths_evict(node->cluster->paths, node, peer);
}

static void do_digest(void *ctx, kvf_window_t *window) {
    node_t *node = ctx;
    window->job.next = node->digests;
    node->digests = &window->job;
}

static void do_log(void *ctx, kvf_log_level_t level, const char *text) {
    node_t *node = ctx;
    (void)level;
    node->warnings++;
    (void)snprintf(node->warning, sizeof(node->warning), "%s", text);
}

/* ---- events ---- */

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    node_t *node = ctx;
    kvf_status_t status = kvf_core_grant_check(node->core, chunk, landing_p);
    if (status == KVF_OK) {
        uint8_t *page = node_page(node, chunk->group_idx, chunk->slot) + chunk->offset;
        cr_assert_eq(landing_p->at != NULL, node->cluster->options.device);
        landing_p->at = landing_p->at == NULL ? page : landing_p->at;
    }
    return status;
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    kvf_core_landed(((node_t *)ctx)->core, chunk);
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    kvf_core_moved(((node_t *)ctx)->core, window, status);
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    kvf_core_broken(((node_t *)ctx)->core, peer, why);
}

static uint8_t *find_page(void *ctx, uint64_t agent, uint32_t group_idx, int32_t slot) {
    cluster_t *cluster = ctx;
    node_t *node = &cluster->nodes[agent - 1];
    return node->memory[group_idx] == NULL ? NULL : node_page(node, group_idx, slot);
}

static void fill_random(void *ctx, void *buf, size_t bytes) {
    cluster_t *cluster = ctx;
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)(++cluster->seed * 37 + i);
    }
}

void node_run_digest(node_t *node) {
    kvf_job_t **at = &node->digests;
    while (*at != NULL && (*at)->next != NULL) {
        at = &(*at)->next;
    }
    cr_assert_not_null(*at);
    kvf_window_t *window = (kvf_window_t *)*at;
    *at = NULL;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        kvf_piece_t *piece = &window->pieces[i];
        if (window->digests && piece->digest == 0) {
            piece->digest = kvf_digest(piece->source, piece->bytes);
        }
    }
    kvf_core_moved(node->core, window, KVF_OK);
}

static bool run_digests(node_t *node) {
    bool any = node->digests != NULL;
    while (node->digests != NULL) {
        node_run_digest(node);
    }
    return any;
}

/* Where the idx-th job that may run hangs, or NULL: digests always, copies unless they are held. */
static kvf_job_t **job_at(node_t *node, size_t idx, bool copies, bool digests) {
    kvf_job_t **at = &node->jobs;
    for (; *at != NULL; at = &(*at)->next) {
        const kvf_verify_t *job = (kvf_verify_t *)*at;
        bool copy = job->source != NULL;
        bool ready = !copy || !node->cluster->options.fetch || paths_can_run(job);
        if (ready && (copy ? copies : digests) && idx-- == 0) {
            return at;
        }
    }
    return NULL;
}

static void run_job(node_t *node, kvf_job_t **at) {
    kvf_verify_t *job = (kvf_verify_t *)*at;
    *at = job->job.next;
    if (job->peer != 0 && node->cluster->options.fetch) {
        paths_run(node, job);
    } else {
        mappings_run(node, job);
    }
}

static bool run_jobs(node_t *node) {
    bool any = false;
    kvf_job_t **at;
    while ((at = job_at(node, 0, !node->cluster->hold, true)) != NULL) {
        run_job(node, at);
        any = true;
    }
    return any;
}

size_t node_jobs(const node_t *node) {
    size_t n = 0;
    for (kvf_job_t *job = node->jobs; job != NULL; job = job->next) {
        n += ((kvf_verify_t *)job)->source != NULL;
    }
    return n;
}

void node_run_job(node_t *node, size_t idx) {
    kvf_job_t **at = job_at(node, idx, true, false);
    cr_assert_not_null(at);
    kvf_core_set_time(node->core, node_now(node));
    run_job(node, at);
}

static bool step_node(node_t *node) {
    bool any = false;
    if (node->core == NULL || !node_runs(node)) {
        return false;
    }
    kvf_core_set_time(node->core, node_now(node));
    any |= node->mover->ops->progress(node->mover) > 0;
    any |= mappings_step(node->cluster->mappings, node);
    any |= paths_step(node->cluster->paths, node);
    any |= !node->cluster->hold_digests && run_digests(node);
    any |= run_jobs(node);
    kvf_core_tick(node->core);
    any |= kvf_core_pump(node->core);
    any |= kvf_core_deliver(node->core);
    return any;
}

static bool stops(const cluster_t *cluster) {
    return cluster->stop_at_cut && cluster_was_cut(cluster);
}

void cluster_run(cluster_t *cluster) {
    for (bool any = true; any && !stops(cluster);) {
        any = false;
        for (uint64_t conn = 1; conn <= cluster->n_ends && !stops(cluster); conn++) {
            if (cluster->ends[conn].node != NULL && cluster->ends[conn].node->core != NULL) {
                kvf_core_set_time(cluster->ends[conn].node->core,
                                  node_now(cluster->ends[conn].node));
            }
            any |= wires_step(cluster, conn);
        }
        for (size_t i = 0; i < cluster->n_nodes && !stops(cluster); i++) {
            any |= step_node(&cluster->nodes[i]);
        }
        if (!cluster->hold) {
            any |= kvf_sim_net_step(cluster->net, 0);
        }
    }
}

void cluster_run_to_cut(cluster_t *cluster) {
    cluster->stop_at_cut = true;
    cluster_run(cluster);
    cluster->stop_at_cut = false;
}

void cluster_advance(cluster_t *cluster, uint64_t us) {
    uint64_t end = cluster->now_us + us;
    while (cluster->now_us < end) {
        cluster->now_us += end - cluster->now_us < 50000 ? end - cluster->now_us : 50000;
        cluster_run(cluster);
    }
}

void cluster_seed(cluster_t *cluster, uint8_t seed) {
    cluster->seed = seed;
}

void cluster_hold_chunks(cluster_t *cluster, bool hold) {
    cluster->hold = hold;
}

void cluster_hold_digests(cluster_t *cluster, bool hold) {
    cluster->hold_digests = hold;
}

void cluster_needs_chunks(void) {
    if (getenv("KVF_TEST_MAPPED") != NULL || getenv("KVF_TEST_FETCH") != NULL) {
        cr_skip_test("no chunks where receivers copy themselves");
    }
}

bool cluster_is_mapped(const cluster_t *cluster) {
    return cluster->options.mapped || cluster->options.fetch;
}

kvf_sim_net_t *cluster_net(cluster_t *cluster) {
    return cluster->net;
}

mappings_t *cluster_mappings(cluster_t *cluster) {
    return cluster->mappings;
}

paths_t *cluster_paths(cluster_t *cluster) {
    return cluster->paths;
}

node_t *cluster_find(cluster_t *cluster, uint64_t number) {
    cr_assert(number >= 1 && number <= cluster->n_nodes);
    return &cluster->nodes[number - 1];
}

uint64_t cluster_now(const cluster_t *cluster) {
    return cluster->now_us;
}

/* ---- nodes ---- */

kvf_layout_t cluster_layout(void) {
    return (kvf_layout_t){
        .n_groups = 2,
        .groups = {{.name = "full",
                    .n_layers = 2,
                    .layers = {1, 3},
                    .tokens_per_block = 8,
                    .kv_heads = 2,
                    .head_dim = 64,
                    .kv_factor = 2,
                    .dtype = KVF_DTYPE_BF16},
                   {.name = "swa",
                    .n_layers = 3,
                    .layers = {0, 2, 4},
                    .window = 24,
                    .tokens_per_block = 8,
                    .kv_heads = 1,
                    .head_dim = 72,
                    .kv_factor = 2,
                    .dtype = KVF_DTYPE_BF16}},
    };
}

static void node_start(node_t *node) {
    cluster_t *cluster = node->cluster;
    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, node};
    uint8_t address[64];
    size_t address_bytes;
    node->life = ++cluster->n_lives;
    kvf_alloc_fail_init(&node->alloc, 0);
    node->log = (kvf_log_t){do_log, node, KVF_LOG_WARN};
    cr_assert_eq(kvf_mover_sim_create(cluster->net, node->number, &sink, &node->mover), KVF_OK);
    cr_assert_eq(node->mover->ops->address(node->mover, address, sizeof(address), &address_bytes),
                 KVF_OK);
    kvf_core_config_t config = {
        .agent = &node->config,
        .alloc = &node->alloc.table,
        .rand = {fill_random, cluster},
        .log = &node->log,
        .out = {.dial = wires_dial,
                .write = wires_write,
                .close = wires_close,
                .mover_connect = do_connect,
                .mover_disconnect = do_disconnect,
                .post = do_post,
                .page = do_page,
                .verify = do_verify,
                .map = do_map,
                .unmap = do_unmap,
                .digest = do_digest,
                .ctx = node},
        .mover_names = {"sim"},
        .n_movers = 1,
        .movers_checked = !cluster->options.one_sided,
        .mapped_name = cluster->options.fetch ? KVF_NCCL : KVF_MAPPED,
        .hashes_leaves = true,
    };
    if (cluster->options.fetch) {
        config.out.join = do_join;
        config.out.joined = cluster->options.answer ? do_joined : NULL;
        config.out.leave = do_leave;
        config.out.serve = do_serve;
        config.out.evict = do_evict;
    }
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        uint64_t bytes = kvf_group_block_bytes(&node->layout.groups[g]);
        cr_assert_eq(kvf_pages_create(kvf_alloc_default(), node->n_pages, &node->pages[g]), KVF_OK);
        node->memory[g] = calloc((size_t)node->n_pages, bytes);
        config.regions[g] = (kvf_core_region_t){
            node->pages[g], cluster->options.device ? KVF_MEM_CUDA : KVF_MEM_FAKE};
    }
    cr_assert_eq(kvf_core_create(&config, &node->core), KVF_OK);
    kvf_core_set_time(node->core, node_now(node));
    cr_assert_eq(kvf_core_set_control_address(node->core, node->address), KVF_OK);
    cr_assert_eq(kvf_core_set_mover_address(node->core, 0, address, address_bytes), KVF_OK);
    if (cluster_is_mapped(cluster)) {
        const mappings_address_t mapped = {node->number, node->life};
        cr_assert_eq(kvf_core_set_mapped_address(node->core, &mapped, sizeof(mapped)), KVF_OK);
    }
    node->dead = false;
}

node_t *cluster_node(cluster_t *cluster, const kvf_layout_t *layout, int64_t n_pages,
                     void (*config)(kvf_agent_config_t *config)) {
    static const char *const names[] = {"node-1", "node-2", "node-3", "node-4"};
    cr_assert(cluster->n_nodes < CLUSTER_NODES);
    node_t *node = &cluster->nodes[cluster->n_nodes];
    node->cluster = cluster;
    node->number = ++cluster->n_nodes;
    node->layout = *layout;
    node->n_pages = n_pages;
    (void)snprintf(node->address, sizeof(node->address), "127.0.0.1:%d", (int)node->number);
    kvf_agent_config_init(&node->config);
    node->config.instance = names[node->number - 1];
    memset(node->config.cluster_key, 0x5a, sizeof(node->config.cluster_key));
    node->config.layout = &node->layout;
    if (config != NULL) {
        config(&node->config);
    }
    node_start(node);
    return node;
}

static void node_stop(node_t *node) {
    node->mover->ops->destroy(node->mover);
    (void)run_digests(node); /* or their windows are not freed */
    mappings_drop(node->cluster->mappings, node);
    paths_drop(node->cluster->paths, node);
    kvf_core_destroy(node->core);
    node->core = NULL;
    node->mover = NULL;
    node->jobs = NULL;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        kvf_pages_destroy(node->pages[g]);
        mappings_keep(node->cluster->mappings, node->memory[g]);
        node->pages[g] = NULL;
        node->memory[g] = NULL;
    }
    cr_expect_eq(node->alloc.live, 0, "node %d leaked %d allocations", (int)node->number,
                 (int)node->alloc.live);
}

void cluster_kill(node_t *node) {
    cluster_t *cluster = node->cluster;
    node->dead = true;
    node->stopped = false;
    for (uint64_t conn = 1; conn <= cluster->n_ends; conn++) {
        if (cluster->ends[conn].node == node) {
            cluster->ends[conn].open = false;
            cluster->ends[wires_other(conn)].closing = true;
        }
    }
    node_stop(node);
}

void cluster_restart(node_t *node) {
    node_start(node);
}

cluster_t *cluster_create(const cluster_options_t *options) {
    cluster_t *cluster = calloc(1, sizeof(*cluster));
    cluster->options = *options;
    cluster->options.mapped |= getenv("KVF_TEST_MAPPED") != NULL;
    cluster->options.device |= getenv("KVF_TEST_DEVICE") != NULL;
    cluster->options.fetch |= getenv("KVF_TEST_FETCH") != NULL;
    cluster->mappings = mappings_create();
    cluster->paths = paths_create(cluster->options.answer);
    cluster->now_us = 1000000;
    kvf_sim_config_t sim = {.checked = !options->one_sided,
                            .chunk_bytes = options->chunk_bytes == 0 ? 4096 : options->chunk_bytes,
                            .find = find_page,
                            .ctx = cluster};
    cr_assert_eq(kvf_sim_net_create(&sim, kvf_alloc_default(), &cluster->net), KVF_OK);
    return cluster;
}

void cluster_destroy(cluster_t *cluster) {
    for (size_t i = 0; i < cluster->n_nodes; i++) {
        if (cluster->nodes[i].core != NULL) {
            node_stop(&cluster->nodes[i]);
        }
    }
    kvf_sim_net_destroy(cluster->net);
    mappings_destroy(cluster->mappings);
    paths_destroy(cluster->paths);
    for (uint64_t conn = 1; conn <= cluster->n_ends; conn++) {
        free(cluster->ends[conn].data);
    }
    free(cluster);
}
