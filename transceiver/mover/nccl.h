/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_NCCL_H
#define KVF_MOVER_NCCL_H

/**
 * @file
 * Paths between devices of two agents: a NCCL communicator of two ranks each, by which one of them
 * (rank 0, who made the path) receives ranges of bytes and the other one sends them. Ranges are
 * gathered into memory of a stage, sent in a few long messages, and scattered from a stage of the
 * receiver's, with their digests: what is sent costs one launch and one message for 8 MiB, however
 * short its pieces.
 *
 * Both ends must post the same jobs in the same order; that they do is for the caller to see to,
 * over another channel. Calls of CUDA and NCCL are made by one thread here, which never waits for a
 * peer: NCCL is asked whether it is done. But for aborts: each is made by a thread of its own, as
 * it waits for the whole device. A path that failed, or is given up, is aborted, and
 * only when the device has done with what was queued do its jobs end: that is the proof that no
 * memory of theirs is touched any more.
 *
 * NCCL is loaded when it is needed. Its own connections are neither authenticated nor encrypted,
 * but for the 64 random bits of an invitation (docs/gpu.md).
 *
 * All functions: agent's thread. None blocks, but kvf_nccl_create() and kvf_nccl_destroy().
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Ranges of a job, at most. */
#define KVF_NCCL_RANGES 256
/** What one message holds. Both ends must cut alike. */
#define KVF_NCCL_PART_BYTES (UINT64_C(8) << 20)
#define KVF_NCCL_INVITATION_BYTES 128
#define KVF_NCCL_ADDRESS_BYTES 32
/** Jobs that paths may have at once, all together: so many of those that receive, and so many of
 * those that send. That the former are never started before there is a stage for them, and the
 * latter only for such that are, keeps agents from waiting for each other in a ring. */
#define KVF_NCCL_STAGES 4
/** And those of one path: the next is gathered while one is sent. */
#define KVF_NCCL_STAGES_OF_PATH 2

struct kvf_cuda_context; /* mem/cuda.h */

typedef struct kvf_nccl kvf_nccl_t;
typedef struct kvf_nccl_path kvf_nccl_path_t;

/** One range: where it goes to, or comes from. */
typedef struct kvf_nccl_range {
    uint8_t *at; /**< memory of the device */
    uint64_t bytes;
    uint64_t *digest_p; /**< receivers: gets kvf_digest() of what was stored; NULL: not wanted */
} kvf_nccl_range_t;

/** A job: a stage, with what it is used for. The ranges are the caller's to fill in. */
typedef struct kvf_nccl_job {
    uint32_t n_ranges;
    kvf_nccl_range_t ranges[KVF_NCCL_RANGES];
    void *owner; /**< the caller's */
} kvf_nccl_job_t;

/** What is called, from kvf_nccl_progress() only. They may call all functions but that one and
 * destroy. */
typedef struct kvf_nccl_events {
    /** The invitation of a path that was made here: to be given to the other end. */
    void (*invited)(void *ctx, void *owner, const uint8_t invitation[KVF_NCCL_INVITATION_BYTES]);
    /** Both ends are there. */
    void (*ready)(void *ctx, void *owner);
    /** A job is done. @param status  KVF_OK: bytes are where they belong, and digests written;
     * KVF_ERR_PEER_LOST: the path failed. Nothing touches its memory any more. */
    void (*done)(void *ctx, void *owner, kvf_nccl_job_t *job, kvf_status_t status);
    /** A path has failed, and is about to end: no job is to be taken for it any more. The other end
     * should hear of it now: the abort may wait for that. */
    void (*failing)(void *ctx, void *owner, const char *why);
    /** A path has ended, after the last of its jobs: it failed, or was left. It is freed. */
    void (*ended)(void *ctx, void *owner, const char *why);
    void *ctx;
} kvf_nccl_events_t;

/**
 * Load NCCL and start the thread.
 *
 * @param context  The device's; outlives it.
 * @param wake  Called on any thread when kvf_nccl_progress() has work.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (not in the build, no library, an older one);
 * KVF_ERR_INVALID (NCCL_COMM_ID is set); KVF_ERR_NO_MEMORY (the device's, too); KVF_ERR_IO.
 * @cost KVF_NCCL_PART_BYTES of the device for each of twice KVF_NCCL_STAGES jobs
 */
KVF_CHECK kvf_status_t kvf_nccl_create(const kvf_alloc_t *alloc,
                                       const struct kvf_cuda_context *context,
                                       const kvf_nccl_events_t *events, void (*wake)(void *ctx),
                                       void *wake_ctx, kvf_nccl_t **nccl_p, kvf_detail_t *detail);

/** End all paths, without events, and the thread. NULL is allowed. */
void kvf_nccl_destroy(kvf_nccl_t *nccl);

/** Write what peers have to know: which device, which NCCL. */
void kvf_nccl_address(const kvf_nccl_t *nccl, uint8_t address[KVF_NCCL_ADDRESS_BYTES]);

/** @return KVF_OK; KVF_ERR_INVALID (not an address); KVF_ERR_UNSUPPORTED (the same device, another
 * version of NCCL; the text names them). */
KVF_CHECK kvf_status_t kvf_nccl_check_address(const kvf_nccl_t *nccl, const void *address,
                                              size_t bytes, kvf_detail_t *detail);

/** Make a path, to receive. events.invited follows, or ended. @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_nccl_invite(kvf_nccl_t *nccl, void *owner, kvf_nccl_path_t **path_p);

/** Make the other end, to send. events.ready follows, or ended. @return KVF_OK; KVF_ERR_INVALID
 * (not an invitation); KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_nccl_join(kvf_nccl_t *nccl, void *owner, const void *invitation,
                                     size_t bytes, kvf_nccl_path_t **path_p);

/** End a path; events.ended follows. Again is harmless. @param why  For that event. */
void kvf_nccl_leave(kvf_nccl_path_t *path, const char *why);

/** @return A job to be filled in for a path that is ready and not left, then posted at once; NULL:
 * as many as there may be are under way. */
kvf_nccl_job_t *kvf_nccl_take(kvf_nccl_path_t *path);

/** Give a job back that is not to be posted. */
void kvf_nccl_give(kvf_nccl_path_t *path, kvf_nccl_job_t *job);

/** Start it; its ranges have more than no bytes. events.done follows. */
void kvf_nccl_post(kvf_nccl_path_t *path, kvf_nccl_job_t *job);

/** Tell what has happened. @return How many things. */
unsigned kvf_nccl_progress(kvf_nccl_t *nccl);

#endif
