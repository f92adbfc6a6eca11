/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

#include "kvmgr/base/clock.h"
#include "tools/command.h"
#include "tools/key.h"
#include "tools/node/listen.h"
#include "tools/presets.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAX_WORKERS 4
#define ENDED_RECORDS 4096
#define BODY_BYTES (UINT64_C(1) << 20)
#define HTTP_IDLE_S 30

/* Connections to the HTTP interface besides those that live requests hold open: an orchestrator
 * keeps idle ones, and is told 429 instead of being cut off. */
#define HTTP_SPARE_CONNS 1024

const char *kvf_role_name(kvf_role_t role) {
    return role == KVF_ROLE_PREFILL ? "prefill" : "decode";
}

uint64_t kvf_node_now(void) {
    const kvf_clock_t *clock = kvf_clock_default();
    return clock->now_us(clock->ctx);
}

const kvf_status_t kvf_node_statuses[KVF_N_STATUSES] = {
#define ITEM(code, name, scope, text, help) KVF_##name,
    KVF_STATUS_MAP(ITEM)
#undef ITEM
};

size_t kvf_node_status_idx(kvf_status_t status) {
    size_t i = 0;
    while (i + 1 < KVF_N_STATUSES && kvf_node_statuses[i] != status) {
        i++;
    }
    return i;
}

void kvf_node_refuse(kvf_node_t *node, kvf_http_request_t *http, kvf_status_t status,
                     const char *message) {
    (void)pthread_mutex_lock(&node->lock);
    node->counts.refused[kvf_node_status_idx(status)]++;
    (void)pthread_mutex_unlock(&node->lock);
    kvf_http_answer_error(http, status, message);
}

void kvf_node_drain(kvf_node_t *node) {
    (void)pthread_mutex_lock(&node->lock);
    node->draining = true;
    (void)pthread_mutex_unlock(&node->lock);
}

/* The ready line comes before everything that is not a warning, but for the word that memory is
 * being prepared. An agent that cannot be made is one
 * line, the error, which has the cause in it; so until it is made, its warnings wait. */
static void take_log(void *ctx, int level, const char *text) {
    kvf_node_t *node = ctx;
    if (node->making_agent) {
        if (level <= (int)KVF_LOG_WARN && node->n_held < KVF_NODE_HELD_LINES) {
            node->held[node->n_held].level = level;
            (void)snprintf(node->held[node->n_held].text, sizeof(node->held[0].text), "%s", text);
            node->n_held++;
        }
        return;
    }
    if (level <= (int)KVF_LOG_WARN || atomic_load(&node->ready)) {
        kvf_log(&node->log, (kvf_log_level_t)level, "%s", text);
    }
}

static kvf_log_level_t log_level(const char *name) {
    kvf_log_level_t level = KVF_LOG_ERROR;
    while (level < KVF_LOG_TRACE && strcmp(kvf_log_level_name(level), name) != 0) {
        level++;
    }
    return level;
}

static kvf_status_t read_key(kvf_node_t *node, uint8_t key[KVF_KEY_BYTES], kvf_detail_t *detail) {
    char *path;
    bool loose;
    kvf_status_t status = kvf_config_key_path(node->config, &path);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for a path");
    }
    status = kvf_key_read(path, key, &loose, detail);
    if (status == KVF_OK && loose) {
        kvf_log(&node->log, KVF_LOG_WARN,
                "%s can be read or written by others than its owner; chmod 600 it", path);
    }
    kvf_free(node->alloc, path);
    return status;
}

/* UCX warns of a transport or device that it does not have, and goes on without. When somebody
 * asked for it by name, going on would be the slow way, or none, that nobody asked for. */
static kvf_status_t check_ucx(const kvf_node_t *node, kvf_detail_t *detail) {
    const kvf_config_t *config = node->config;
    if (strcmp(config->ucx_tls, "auto") == 0 && strcmp(config->ucx_devices, "auto") == 0) {
        return KVF_OK;
    }
    for (size_t i = 0; i < node->n_held; i++) {
        if (strstr(node->held[i].text, " not available") != NULL) {
            return kvf_fail(detail, KVF_ERR_INVALID, "ucx.tls \"%.64s\", ucx.devices \"%.64s\": %s",
                            config->ucx_tls, config->ucx_devices, node->held[i].text);
        }
    }
    return KVF_OK;
}

/* The library does not know what its settings are called here. */
static void name_ucx_keys(kvf_detail_t *detail) {
    if (strncmp(detail->text, "ucx ", strlen("ucx ")) == 0 &&
        strstr(detail->text, " tls \"") != NULL) {
        kvf_detail_t cause = *detail;
        (void)kvf_fail(detail, KVF_OK, "ucx.tls, ucx.devices: %s", cause.text);
    }
}

static kvf_status_t make_agent(kvf_node_t *node, const kvf_agent_config_t *desc,
                               kvf_detail_t *detail) {
    node->making_agent = true;
    kvf_status_t status = kvf_agent_create(desc, &node->agent, detail);
    node->making_agent = false;
    if (status == KVF_OK) {
        status = check_ucx(node, detail);
    }
    for (size_t i = 0; status == KVF_OK && i < node->n_held; i++) {
        take_log(node, node->held[i].level, node->held[i].text);
    }
    return status;
}

static int64_t chunk_tokens(const kvf_node_t *node) {
    return node->role == KVF_ROLE_PREFILL ? (int64_t)node->config->chunk_tokens : 0;
}

static kvf_status_t start_agent(kvf_node_t *node, kvf_detail_t *detail) {
    const kvf_config_t *config = node->config;
    kvf_agent_config_t desc;
    kvf_agent_config_init(&desc);
    desc.instance = node->instance;
    desc.control_listen = config->control_listen;
    desc.peers = (const char *const *)config->peers.items;
    desc.n_peers = config->peers.n;
    desc.layout = &node->layout;
    desc.mover = config->mover;
    desc.mover_threads = (uint32_t)config->mover_threads;
    desc.busy_poll_us = config->busy_poll_us;
    desc.digests = config->digests;
    desc.ucx_tls = config->ucx_tls;
    desc.ucx_devices = config->ucx_devices;
    desc.max_transfers = (uint32_t)config->max_transfers;
    desc.frame_bytes = config->frame_bytes;
    desc.request_timeout_us = config->request_timeout_ms * 1000;
    desc.lease_us = config->lease_ms * 1000;
    desc.quarantine_us = config->quarantine_ms * 1000;
    desc.heartbeat_us = config->heartbeat_ms * 1000;
    desc.suspect_us = config->suspect_ms * 1000;
    desc.lost_us = config->lost_ms * 1000;
    desc.log = take_log;
    desc.log_ctx = node;
    /* check_ucx() wants to see warnings, whoever else does. */
    desc.log_level = (int)(node->log.level < KVF_LOG_WARN ? KVF_LOG_WARN : node->log.level);
    kvf_status_t status = read_key(node, desc.cluster_key, detail);
    if (status == KVF_OK) {
        status = make_agent(node, &desc, detail);
    }
    explicit_bzero(desc.cluster_key, sizeof(desc.cluster_key));
    if (status == KVF_OK) {
        kvf_log(&node->log, KVF_LOG_DEBUG, "preparing %.2f GiB of %s",
                (double)config->pool_bytes / (double)(UINT64_C(1) << 30), config->memory);
        const kvf_pool_desc_t like = {.memory = config->memory,
                                      /* Refused for other memory, if it says anything. */
                                      .device_alloc =
                                          strcmp(config->device_alloc, "vmm") == 0 ? "vmm" : NULL,
                                      .zero_freed = config->zero_freed};
        status = kvf_pools_create(node->agent, &node->layout, &like, config->pool_bytes,
                                  chunk_tokens(node), &node->pools, detail);
    }
    if (status == KVF_OK) {
        const kvf_blocks_config_t blocks = {.generation_side = node->role == KVF_ROLE_DECODE,
                                            .prefix_cache = config->prefix_cache,
                                            .chunk_tokens = chunk_tokens(node)};
        status = kvf_blocks_create(node->alloc, &node->pools, &blocks, &node->blocks, detail);
    }
    if (status == KVF_OK) {
        status = kvf_agent_start_thread(node->agent, detail);
    }
    if (status != KVF_OK) {
        name_ucx_keys(detail);
        return status;
    }
    return kvf_agent_address(node->agent, node->control, sizeof(node->control));
}

static kvf_status_t start_http(kvf_node_t *node, kvf_detail_t *detail) {
    kvf_node_fill_routes(node);
    kvf_http_config_t config = {.listen = node->config->http_listen,
                                .routes = node->routes,
                                .n_routes = KVF_NODE_ROUTES,
                                .body_bytes = BODY_BYTES,
                                .max_conns =
                                    (uint32_t)node->config->max_transfers + HTTP_SPARE_CONNS,
                                .idle_s = HTTP_IDLE_S};
    return kvf_http_create(&config, node->alloc, &node->http, detail);
}

static void say_ready(kvf_node_t *node) {
    json_t *line = json_object();
    (void)json_object_set_new(line, "ready", json_true());
    (void)json_object_set_new(line, "role", json_string(kvf_role_name(node->role)));
    (void)json_object_set_new(line, "instance", json_string(node->instance));
    (void)json_object_set_new(line, "http", json_string(kvf_http_address(node->http)));
    (void)json_object_set_new(line, "control", json_string(node->control));
    (void)json_object_set_new(line, "pid", json_integer(getpid()));
    char *text = json_dumps(line, JSON_COMPACT);
    (void)fprintf(stderr, "%s\n", text == NULL ? "{\"ready\":true}" : text);
    free(text);
    json_decref(line);
    atomic_store(&node->ready, true);
    kvf_log(&node->log, KVF_LOG_INFO, "%s", kvf_version());
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        kvf_log(&node->log, KVF_LOG_INFO,
                "pool of group %s: %" PRId64 " pages of %" PRIu64 " bytes",
                node->layout.groups[g].name, node->pools.n_pages[g],
                kvf_group_block_bytes(&node->layout.groups[g]));
    }
}

static void stop_at_once(int signal) {
    (void)signal;
    static const char text[] = "kvferry: stopped at once, requests were not waited for\n";
    ssize_t ignored = write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)ignored;
    _exit(KVF_EXIT_FAILED);
}

/* Wait for the first signal, then drain. From then on a signal ends the process. */
static void serve(kvf_node_t *node, const sigset_t *signals) {
    int signal;
    while (sigwait(signals, &signal) != 0) {
    }
    struct sigaction action = {.sa_handler = stop_at_once};
    (void)sigaction(SIGTERM, &action, NULL);
    (void)sigaction(SIGINT, &action, NULL);
    (void)pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    kvf_node_drain(node);
    (void)pthread_mutex_lock(&node->lock);
    if (node->n_jobs > 0) {
        kvf_log(&node->log, KVF_LOG_INFO, "draining: %" PRIu32 " requests are alive", node->n_jobs);
    }
    while (node->n_jobs > 0) {
        (void)pthread_cond_wait(&node->quiet, &node->lock);
    }
    (void)pthread_mutex_unlock(&node->lock);
}

static void prepare(kvf_node_t *node, char *instance, size_t cap) {
    const char *name = node->config->instance;
    (void)snprintf(instance, cap, "%s%s", name[0] == '\0' ? kvf_role_name(node->role) : name,
                   name[0] == '\0' ? "-0" : "");
    node->instance = instance;
    node->log = kvf_log_stderr(log_level(node->config->log_level));
    /* So that the metric has a sample from the start. */
    (void)snprintf(node->counts.movers[0].name, sizeof(node->counts.movers[0].name), "%s",
                   strcmp(node->config->mover, "ucx") == 0 ? "ucx" : "tcp");
    (void)pthread_mutex_init(&node->lock, NULL);
    (void)pthread_cond_init(&node->quiet, NULL);
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        uint32_t end = group->layers[group->n_layers - 1] + 1;
        node->n_layers = end > node->n_layers ? end : node->n_layers;
    }
}

/* The soft limit of descriptors is often 1024, for the sake of select(2), which nobody uses here.
 */
static void raise_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* What can be known to fail before anything is made. */
static kvf_status_t check_early(const kvf_node_t *node, kvf_detail_t *detail) {
    const kvf_config_t *config = node->config;
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    int64_t n_pages[KVF_MAX_GROUPS];
    kvf_status_t status =
        kvf_pools_cut(&node->layout, config->pool_bytes, chunk_tokens(node), n_pages, detail);
    if (status == KVF_OK && strncmp(config->memory, "cuda", 4) != 0) {
        status = kvf_pools_check_memory(config->pool_bytes, machine, detail);
    }
    return status == KVF_OK ? kvf_listen_check(config->http_listen, config->control_listen, detail)
                            : status;
}

static kvf_status_t start(kvf_node_t *node, kvf_detail_t *detail) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    raise_descriptors();
    unsigned n_workers = cores < 1 ? 1 : cores > MAX_WORKERS ? MAX_WORKERS : (unsigned)cores;
    kvf_status_t status = kvf_ended_create(node->alloc, ENDED_RECORDS, &node->ended);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for the records of requests");
    }
    status = check_early(node, detail);
    if (status == KVF_OK) {
        status = start_agent(node, detail);
    }
    if (status == KVF_OK) {
        status = kvf_workers_create(node->alloc, n_workers, &node->workers, detail);
    }
    return status == KVF_OK ? start_http(node, detail) : status;
}

/* Pages that a peer may still write to keep the agent alive; the end of the process is the end of
 * that danger. */
static void end_agent(kvf_node_t *node) {
    if (kvf_agent_destroy(node->agent) != KVF_OK) {
        kvf_log(&node->log, KVF_LOG_WARN,
                "some pages could not be proven quiet; they end with the process");
    }
}

int kvf_node_run(const kvf_alloc_t *alloc, const kvf_config_t *config, kvf_role_t role) {
    kvf_node_t node = {.alloc = alloc, .config = config, .role = role};
    char instance[KVF_MAX_ID_BYTES + 1];
    kvf_detail_t detail;
    sigset_t signals;
    (void)sigemptyset(&signals);
    (void)sigaddset(&signals, SIGTERM);
    (void)sigaddset(&signals, SIGINT);
    (void)pthread_sigmask(SIG_BLOCK, &signals, NULL); /* before any thread is made */
    (void)signal(SIGPIPE, SIG_IGN);
    kvf_status_t status =
        kvf_preset_get(config->preset, (uint32_t)config->tokens_per_block, &node.layout, &detail);
    if (status == KVF_OK) {
        kvf_preset_add_draft(&node.layout, (uint32_t)config->draft_layers);
    }
    prepare(&node, instance, sizeof(instance));
    if (status == KVF_OK) {
        status = start(&node, &detail);
    }
    if (status == KVF_OK) {
        say_ready(&node);
        serve(&node, &signals);
    } else {
        (void)fprintf(stderr, "kvferry %s: %s: %s\n", kvf_role_name(role), kvf_status_name(status),
                      detail.text);
    }
    kvf_http_destroy(node.http);
    kvf_blocks_destroy(node.blocks);
    end_agent(&node);
    kvf_workers_destroy(node.workers);
    kvf_ended_destroy(node.ended);
    (void)pthread_cond_destroy(&node.quiet);
    (void)pthread_mutex_destroy(&node.lock);
    if (status == KVF_OK) {
        return KVF_EXIT_DONE;
    }
    return kvf_status_scope(status) == KVF_SCOPE_CALL ? KVF_EXIT_USAGE : KVF_EXIT_FAILED;
}
