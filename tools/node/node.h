/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_NODE_H
#define KVF_TOOLS_NODE_NODE_H

/**
 * @file
 * A node: an agent with pools, a synthetic engine, and an HTTP interface that drives them.
 *
 * Threads: HTTP calls come on the server's thread and only check, look up and post; events come on
 * the agent's thread and only write down and post; all work of a request is done by its task on the
 * worker threads, one step at a time. `lock` guards what several of them touch and is never held
 * while the agent is called.
 */

#include "kvmgr/base/log.h"
#include "tools/config.h"
#include "tools/node/ended.h"
#include "tools/node/job.h"
#include "tools/node/metrics.h"

#include <pthread.h>

typedef enum kvf_role { KVF_ROLE_PREFILL, KVF_ROLE_DECODE } kvf_role_t;

/** Every status, in the order of KVF_STATUS_MAP. */
enum {
#define KVF_NODE_STATUS(code, name, scope, text, help) KVF_NODE_##name,
    KVF_STATUS_MAP(KVF_NODE_STATUS)
#undef KVF_NODE_STATUS
        KVF_N_STATUSES
};
extern const kvf_status_t kvf_node_statuses[KVF_N_STATUSES];

/** Movers that are told apart. */
#define KVF_NODE_MOVERS 8

/** What a node counts itself. */
typedef struct kvf_node_counts {
    uint64_t ended[KVF_N_STATUSES];   /**< requests that were taken in, by how they ended */
    uint64_t refused[KVF_N_STATUSES]; /**< requests that were not taken in, by why */
    struct {
        char name[16];
        uint64_t bytes;
    } movers[KVF_NODE_MOVERS]; /**< what moved, by what carried it */
    uint64_t pieces;
    uint64_t content_mismatches; /**< decodes that went well and could not be verified */
    kvf_histogram_t transfer;    /**< of transfers that went well */
    kvf_histogram_t exposed;     /**< the same, decode only */
    kvf_histogram_t quarantine;  /**< of transfers whose pages waited for a proof */
    /* Where the time of all requests went, in microseconds. */
    uint64_t wait_us;     /**< waiting for pages */
    uint64_t fill_us;     /**< writing pages; the pauses of a throttled engine do not count */
    uint64_t transfer_us; /**< transfer_us of all results */
    uint64_t verify_us;   /**< reading pages */
    /* Of requests that got pages. */
    uint64_t prompt_tokens;
    uint64_t cached_tokens; /**< of these, found by the prefix cache */
    uint64_t prefix_hits;   /**< requests that found any */
} kvf_node_counts_t;

#define KVF_NODE_ROUTES 9

/** More lines that an agent says while it is made are dropped. */
#define KVF_NODE_HELD_LINES 8

typedef struct kvf_node {
    const kvf_alloc_t *alloc;
    const kvf_config_t *config;
    kvf_role_t role;
    const char *instance;
    kvf_log_t log;
    atomic_bool ready; /**< the ready line was written */
    bool making_agent; /**< what it says meanwhile is held back, in `held` */
    size_t n_held;
    struct {
        int level;
        char text[256];
    } held[KVF_NODE_HELD_LINES];
    kvf_layout_t layout;
    uint32_t n_layers; /**< global layer ids end here */
    kvf_agent_t *agent;
    char control[KVF_ADDRESS_BYTES];
    kvf_pools_t pools;
    kvf_blocks_t *blocks; /**< its calls wait for the agent: never with `lock` */
    kvf_workers_t *workers;
    kvf_http_t *http;
    kvf_http_route_t routes[KVF_NODE_ROUTES];

    pthread_mutex_t lock;
    pthread_cond_t quiet; /**< signalled when the last job is gone */
    kvf_job_t *by_id;     /**< jobs that have not ended, by request id */
    kvf_job_t *waiters;   /**< jobs that wait for pages, oldest first */
    uint32_t n_jobs;      /**< all jobs, ended ones that still hold pages included */
    bool draining;
    kvf_ended_t *ended;
    kvf_node_counts_t counts;
} kvf_node_t;

/** @return "prefill" | "decode". @thread any */
const char *kvf_role_name(kvf_role_t role);

/** Microseconds of kvf_clock_default(). @thread any */
uint64_t kvf_node_now(void);

/** @return Index of a status in kvf_node_statuses; the last one for unknown numbers. @thread any */
size_t kvf_node_status_idx(kvf_status_t status);

/** Refuse a request that was not taken in: count it and answer with the error. @thread any */
void kvf_node_refuse(kvf_node_t *node, kvf_http_request_t *http, kvf_status_t status,
                     const char *message);

/** Stop taking requests in; those that run go on. @thread any */
void kvf_node_drain(kvf_node_t *node);

/** Fill in the routes of the node's HTTP interface. */
void kvf_node_fill_routes(kvf_node_t *node);

/** GET /v1/status, GET /metrics. ctx is the node. @thread HTTP */
void kvf_node_get_status(void *ctx, kvf_http_request_t *http);
void kvf_node_get_metrics(void *ctx, kvf_http_request_t *http);

/** Copy what is known about all peers. @param[out] n_p  How many. @return The caller frees it with
 * the node's allocator; NULL for none, or without memory. @thread any */
kvf_peer_info_t *kvf_node_peers(kvf_node_t *node, size_t *n_p);

/** Run a node until a signal has ended it. @return The process's exit code. */
int kvf_node_run(const kvf_alloc_t *alloc, const kvf_config_t *config, kvf_role_t role);

#endif
