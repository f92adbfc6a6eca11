/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/queue.h"

#include "kernels/digest.h"

#include <utlist.h>

void kvf_queue_init(kvf_queue_t *queue) {
    memset(queue, 0, sizeof(*queue));
    for (uint32_t i = 0; i < KVF_QUEUE_WINDOWS; i++) {
        DL_APPEND(queue->free, &queue->jobs[i]);
    }
}

static void finish_if_settled(kvf_queue_t *queue, kvf_queue_job_t *job) {
    if (job->state == KVF_JOB_SENT && job->n_busy == 0) {
        job->state = KVF_JOB_DONE;
        DL_APPEND(queue->done, job);
    }
}

/* Nothing more of it will be cut. */
static void leave_line(kvf_queue_t *queue, kvf_queue_job_t *job) {
    DL_DELETE(queue->waiting, job);
    job->state = KVF_JOB_SENT;
    finish_if_settled(queue, job);
}

static bool same_transfer(const kvf_queue_job_t *a, const kvf_queue_job_t *b) {
    return a->window->transfer.counter == b->window->transfer.counter &&
           kvf_incarnation_equal(&a->window->transfer.receiver, &b->window->transfer.receiver);
}

/* Transfers take turns, a window in each round: behind the windows of others that are of the same
 * round, before those of later ones. Who is new has not missed a round. */
static void line_up(kvf_queue_t *queue, kvf_queue_job_t *job) {
    kvf_queue_job_t *other;
    job->round = queue->waiting == NULL ? 0 : queue->waiting->round;
    DL_FOREACH(queue->waiting, other) {
        if (same_transfer(other, job)) {
            job->round = other->round + 1;
        }
    }
    DL_FOREACH(queue->waiting, other) {
        if (other->round > job->round) {
            break;
        }
    }
    DL_PREPEND_ELEM(queue->waiting, other, job); /* at the end if there is none */
}

kvf_status_t kvf_queue_post(kvf_queue_t *queue, kvf_window_t *window) {
    kvf_queue_job_t *job = queue->free;
    if (job == NULL) {
        return KVF_ERR_AGAIN;
    }
    DL_DELETE(queue->free, job);
    *job = (kvf_queue_job_t){.window = window, .state = KVF_JOB_WAITING};
    queue->n_jobs++;
    line_up(queue, job);
    if (window->n_pieces == 0) {
        leave_line(queue, job);
    }
    return KVF_OK;
}

static void make_digest(kvf_queue_t *queue, kvf_piece_t *piece, uint64_t off, uint64_t bytes) {
    if (piece->bytes > (uint64_t)KVF_QUEUE_LEAVES * KVF_DIGEST_LEAF_BYTES) {
        piece->digest = kvf_digest(piece->source, piece->bytes);
        return;
    }
    kvf_digest_hashes(piece->source + off, bytes, queue->leaves + off / KVF_DIGEST_LEAF_BYTES);
    if (off + bytes == piece->bytes) {
        piece->digest = kvf_digest_of_hashes(queue->leaves, piece->bytes);
    }
}

kvf_queue_job_t *kvf_queue_cut(kvf_queue_t *queue, uint64_t most, kvf_chunk_t *chunk_p,
                               const uint8_t **source_p) {
    kvf_queue_job_t *job = queue->waiting;
    const kvf_window_t *window = job->window;
    kvf_piece_t *piece = &window->pieces[job->piece_idx];
    const uint64_t off = job->piece_off, left = piece->bytes - off;
    *chunk_p = (kvf_chunk_t){
        .transfer = window->transfer,
        .group_idx = piece->group_idx,
        .slot = piece->slot,
        .ordinal = piece->ordinal,
        .generation = piece->generation,
        .grant_key = window->grant_key,
        .offset = piece->offset + off,
        .bytes = left < most ? left : most,
    };
    *source_p = piece->source + off;
    if (window->digests && piece->digest == 0) {
        make_digest(queue, piece, off, chunk_p->bytes);
    }
    job->n_busy++;
    job->piece_off += chunk_p->bytes;
    if (job->piece_off == piece->bytes) {
        job->piece_off = 0;
        job->piece_idx++;
    }
    if (job->piece_idx == window->n_pieces) {
        leave_line(queue, job);
    }
    return job;
}

void kvf_queue_settle(kvf_queue_t *queue, kvf_queue_job_t *job, kvf_status_t status) {
    job->n_busy--;
    job->status = job->status == KVF_OK ? status : job->status;
    finish_if_settled(queue, job);
}

void kvf_queue_stop(kvf_queue_t *queue) {
    while (queue->waiting != NULL) {
        queue->waiting->status = KVF_ERR_PEER_LOST;
        leave_line(queue, queue->waiting);
    }
}

void kvf_queue_drop(kvf_queue_t *queue) {
    for (uint32_t i = 0; i < KVF_QUEUE_WINDOWS; i++) {
        kvf_queue_job_t *job = &queue->jobs[i];
        if (job->state == KVF_JOB_SENT) {
            job->status = KVF_ERR_PEER_LOST;
            job->n_busy = 0;
            finish_if_settled(queue, job);
        }
    }
}

kvf_window_t *kvf_queue_take(kvf_queue_t *queue, kvf_status_t *status_p) {
    kvf_queue_job_t *job = queue->done;
    if (job == NULL) {
        return NULL;
    }
    DL_DELETE(queue->done, job);
    job->state = KVF_JOB_FREE;
    DL_APPEND(queue->free, job);
    queue->n_jobs--;
    *status_p = job->status;
    return job->window;
}
