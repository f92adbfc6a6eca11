/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_CREW_H
#define KVF_MOVER_CREW_H

/**
 * @file
 * Threads that copy and digest, so that the agent's thread is free to talk. They know nothing of
 * what they are given: a job is a function to be called once, on any of them.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

/** Part of whatever is to be done; its owner's, who leaves it alone while the crew has it. */
typedef struct kvf_job {
    void (*run)(struct kvf_job *job);  /**< @thread one of the crew's, or who helps it */
    void (*done)(struct kvf_job *job); /**< the poster's: for when it has taken the job back */
    void *ctx;                         /**< the poster's */
    uint64_t bytes;                    /**< how much there is to do */
    bool later;                        /**< of much: shorter work that came after it may go first */
    struct kvf_job *next;              /**< the crew's */
} kvf_job_t;

typedef struct kvf_crew kvf_crew_t;

/**
 * Start threads.
 *
 * @param n     1..64.
 * @param wake  Called on some thread of the crew when jobs are to be taken back: when eight of them
 * are, or the crew soon has nothing to do. Not again before kvf_crew_take().
 * @return KVF_OK, KVF_ERR_NO_MEMORY (threads count).
 */
KVF_CHECK kvf_status_t kvf_crew_create(const kvf_alloc_t *alloc, uint32_t n,
                                       void (*wake)(void *ctx), void *ctx, kvf_crew_t **crew_p);

/** End them; nothing is with them, or waits to be taken back. NULL is allowed. */
void kvf_crew_destroy(kvf_crew_t *crew);

/** Hand over a job; jobs begin in this order, but most later ones behind the others. @thread the
 * owner's  @cost no allocation */
void kvf_crew_post(kvf_crew_t *crew, kvf_job_t *job);

/**
 * Take a job that would begin soon, to do it oneself: sooner than a thread that sleeps would.
 *
 * @param most_bytes  A job with more to do is left to the crew.
 * @return NULL: none. @thread the owner's, without waiting
 */
kvf_job_t *kvf_crew_help(kvf_crew_t *crew, uint64_t most_bytes);

/** @return All jobs that are done and were not taken back, in the order of their ends; NULL: none.
 * @thread the owner's, without waiting */
kvf_job_t *kvf_crew_take(kvf_crew_t *crew);

#endif
