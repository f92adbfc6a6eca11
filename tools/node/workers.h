/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_WORKERS_H
#define KVF_TOOLS_NODE_WORKERS_H

/**
 * @file
 * The engine's worker threads: they run tasks, at once or at a time. A task never runs on two
 * threads at once, so what belongs to it needs no lock. Idle workers sleep.
 */

#include "kvmgr/base/alloc.h"
#include "transceiver/timers.h"

#include <stdbool.h>

typedef struct kvf_workers kvf_workers_t;

/** Something to run. A member of what it belongs to; all fields are the workers'. */
typedef struct kvf_task {
    kvf_timer_t timer;
    struct kvf_task *prev, *next;
    bool ready;       /**< in the queue */
    bool running;     /**< on a thread */
    uint64_t next_us; /**< posted while it ran: when it runs again; KVF_NEVER: not */
    /** Do a bounded piece of work. @return Whether the task lives on; false: its memory may be
     * gone. */
    bool (*run)(struct kvf_task *task);
} kvf_task_t;

/**
 * @param n_threads         > 0.
 * @param[out] workers_p    kvf_workers_destroy() it.
 * @return KVF_OK, KVF_ERR_NO_MEMORY, KVF_ERR_IO (no thread).
 */
KVF_CHECK kvf_status_t kvf_workers_create(const kvf_alloc_t *alloc, unsigned n_threads,
                                          kvf_workers_t **workers_p, kvf_detail_t *detail);

/** Wait for running tasks; those that wait are dropped and not touched again. NULL is allowed. */
void kvf_workers_destroy(kvf_workers_t *workers);

/** @param[out] task  Becomes a task that nobody has posted. @return KVF_OK, KVF_ERR_NO_MEMORY.
 * @thread any */
KVF_CHECK kvf_status_t kvf_workers_add(kvf_workers_t *workers, kvf_task_t *task,
                                       bool (*run)(kvf_task_t *task));

/** Forget a task: it will not run any more. Not while it runs, but for its own run(). @thread any
 */
void kvf_workers_remove(kvf_workers_t *workers, kvf_task_t *task);

/**
 * Run a task at a time of kvf_clock_default(); 0 = at once. If it is posted already, the earlier
 * time counts; if it runs now, it runs again afterwards. @thread any
 */
void kvf_workers_post(kvf_workers_t *workers, kvf_task_t *task, uint64_t at_us);

#endif
