/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_QUEUE_H
#define KVF_MOVER_QUEUE_H

/**
 * @file
 * The windows that are posted on one path, cut into chunks. Transfers take turns, a window each;
 * a window is done when all of its chunks were cut and settled.
 *
 * For movers that send chunks. All functions: agent thread only.
 */

#include "transceiver/mover/mover.h"

#define KVF_QUEUE_WINDOWS 64U /**< posted and not taken */
#define KVF_QUEUE_LEAVES                                                                           \
    512U /**< of a piece that is hashed chunk by chunk; longer ones are at once */

/** A posted window. Its fields are the queue's. */
typedef struct kvf_queue_job {
    kvf_window_t *window;
    struct kvf_queue_job *prev, *next; /**< of free, waiting or done; of none while SENT */
    uint64_t piece_off;                /**< the next chunk begins here */
    uint32_t piece_idx;
    uint32_t n_busy; /**< chunks that were cut and not settled */
    uint64_t round;  /**< of the transfers' turns */
    enum { KVF_JOB_FREE, KVF_JOB_WAITING, KVF_JOB_SENT, KVF_JOB_DONE } state;
    kvf_status_t status;
} kvf_queue_job_t;

typedef struct kvf_queue {
    kvf_queue_job_t *free, *waiting, *done;
    uint32_t n_jobs; /**< posted and not taken */
    /** Hashes of the piece that is being cut: another one is cut when it has left. */
    uint64_t leaves[KVF_QUEUE_LEAVES];
    kvf_queue_job_t jobs[KVF_QUEUE_WINDOWS];
} kvf_queue_t;

/** An empty one. It stays where it is. */
void kvf_queue_init(kvf_queue_t *queue);

/** @return KVF_OK (accepted: it can be taken, later, once); KVF_ERR_AGAIN. */
KVF_CHECK kvf_status_t kvf_queue_post(kvf_queue_t *queue, kvf_window_t *window);

/** @return Whether kvf_queue_cut() has something to cut. */
static inline bool kvf_queue_waits(const kvf_queue_t *queue) {
    return queue->waiting != NULL;
}

/**
 * Cut the next chunk; only when there is one. It is hashed, if its piece's digest is to be made:
 * then it is in the cache when it is sent.
 *
 * @param most           Longest chunk, in bytes; whole leaves of a digest.
 * @param[out] chunk_p   Its header.
 * @param[out] source_p  Its bytes; unchanged until it is settled.
 * @return What to settle.
 */
kvf_queue_job_t *kvf_queue_cut(kvf_queue_t *queue, uint64_t most, kvf_chunk_t *chunk_p,
                               const uint8_t **source_p);

/** A chunk that was cut is not read any more. @param status  KVF_OK: it was handed over. The first
 * other one is that of its window. */
void kvf_queue_settle(kvf_queue_t *queue, kvf_queue_job_t *job, kvf_status_t status);

/** Cut nothing more: windows that wait fail with KVF_ERR_PEER_LOST. */
void kvf_queue_stop(kvf_queue_t *queue);

/** Nothing that was cut is read any more, whatever was settled: what is not done is, with
 * KVF_ERR_PEER_LOST. After kvf_queue_stop(). */
void kvf_queue_drop(kvf_queue_t *queue);

/** @return A window that is done, or NULL. @param[out] status_p  How it ended. */
kvf_window_t *kvf_queue_take(kvf_queue_t *queue, kvf_status_t *status_p);

#endif
