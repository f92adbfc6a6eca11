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

#include <pthread.h>

typedef enum kvf_role { KVF_ROLE_PREFILL, KVF_ROLE_DECODE } kvf_role_t;

/** Where the time of all requests went, in microseconds. */
typedef struct kvf_node_time {
    uint64_t wait_us;     /**< waiting for pages */
    uint64_t fill_us;     /**< writing pages; the pauses of a throttled engine do not count */
    uint64_t transfer_us; /**< transfer_us of all results */
    uint64_t verify_us;   /**< reading pages */
} kvf_node_time_t;

/** Ended jobs by status, KVF_OK included; in the order of KVF_STATUS_MAP. */
#define KVF_NODE_COUNT_STATUS(code, name, scope, text, help) +1
enum { KVF_N_STATUSES = KVF_STATUS_MAP(KVF_NODE_COUNT_STATUS) };

#define KVF_NODE_ROUTES 8

typedef struct kvf_node {
    const kvf_alloc_t *alloc;
    const kvf_config_t *config;
    kvf_role_t role;
    const char *instance;
    kvf_log_t log;
    kvf_layout_t layout;
    uint32_t n_layers; /**< global layer ids end here */
    kvf_agent_t *agent;
    char control[KVF_ADDRESS_BYTES];
    kvf_pools_t pools;
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
    uint64_t n_ended[KVF_N_STATUSES];
    kvf_node_time_t time;
} kvf_node_t;

/** @return "prefill" | "decode". @thread any */
const char *kvf_role_name(kvf_role_t role);

/** Microseconds of kvf_clock_default(). @thread any */
uint64_t kvf_node_now(void);

/** @return Index of a status in n_ended. @thread any */
size_t kvf_status_idx(kvf_status_t status);

/** Stop taking requests in; those that run go on. @thread any */
void kvf_node_drain(kvf_node_t *node);

/** Fill in the routes of the node's HTTP interface (tools/node/api.c). */
void kvf_node_fill_routes(kvf_node_t *node);

/** Run a node until a signal has ended it. @return The process's exit code. */
int kvf_node_run(const kvf_alloc_t *alloc, const kvf_config_t *config, kvf_role_t role);

#endif
