/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_RDMA_H
#define KVF_MOVER_UCX_RDMA_H

/**
 * @file
 * Paths by which one agent reads from the pools of another one, by UCX's get: over network cards
 * that read a peer's memory without its CPU, into memory of the reader's, a device's too where UCX
 * and the card can.
 *
 * One end lends: it makes a worker for this path alone, and says how to reach it. The other end
 * reads: it has a worker of its own for each path, too. When a worker is destroyed, its connections
 * go with it: a reader's own reads write to no page of it any more, and a lender's pages are read
 * no more by a peer whose path it has closed. That is the proof on both sides, and needs nobody's
 * answer. Nobody writes to a peer's page: our code never puts. But the keys that UCX 1.22 makes
 * would let a peer do so, and so would its own handlers of messages.
 *
 * A card does all that. Over tcp or shared memory UCX has messages do it, which their receiver does
 * not check: such transports are refused (ucx.h), but for tests of what is here.
 *
 * All functions: agent thread only. None blocks, but kvf_rdma_create().
 */

#include "kvmgr/base/mem.h"
#include "transceiver/mover/ucx.h"
#include "transceiver/mover/ucx_answer.h"

#define KVF_RDMA_ADDRESS_BYTES 16
/** Reads that a path has under way, at most. */
#define KVF_RDMA_READS 256U

typedef struct kvf_rdma kvf_rdma_t;
typedef struct kvf_rdma_path kvf_rdma_path_t;

/** A pool of ours: lent to peers, and what is read goes there. */
typedef struct kvf_rdma_pool {
    uint8_t *base;
    uint64_t bytes;
    bool on_device;
} kvf_rdma_pool_t;

/** Reads that belong together. The caller's memory, all zero but for owner; the path's from the
 * first read until it is done. */
typedef struct kvf_rdma_batch {
    void *owner;         /**< the caller's */
    kvf_status_t status; /**< when it is done: KVF_OK, all bytes are there; KVF_ERR_PEER_LOST, the
                            path has failed or was closed. Nothing writes there any more */
    /* the mover's, from here on */
    kvf_rdma_path_t *path; /**< NULL: nothing is under way, or the path was closed */
    uint32_t n_reads;      /**< under way */
    bool sealed;
    struct kvf_rdma_batch *next;
} kvf_rdma_batch_t;

/** What is called, from kvf_rdma_progress() only. They may call all functions but that one and
 * destroy. */
typedef struct kvf_rdma_events {
    /** A path can be read by. */
    void (*ready)(void *ctx, void *owner);
    /** A path has failed: it is to be closed, and no batch of it is done before. @param why  The
     * path's: gone with it. */
    void (*failed)(void *ctx, void *owner, const char *why);
    /** A batch is done. */
    void (*done)(void *ctx, kvf_rdma_batch_t *batch);
    void *ctx;
} kvf_rdma_events_t;

/**
 * Register the pools.
 *
 * @param ucx    For reads; outlives it.
 * @param pools  n_pools of them, up to KVF_MAX_GROUPS; copied. All or none are on a device.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (this UCX does not know a device's memory); KVF_ERR_NO_MEMORY
 * (the limit of locked memory, perhaps); KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_rdma_create(kvf_ucx_t *ucx, const kvf_rdma_pool_t *pools,
                                       uint32_t n_pools, const kvf_rdma_events_t *events,
                                       kvf_rdma_t **rdma_p, kvf_detail_t *detail);

/** Close all paths, without events, and take the pools back. NULL is allowed. */
void kvf_rdma_destroy(kvf_rdma_t *rdma);

/** Write what peers have to know before they make a path. */
void kvf_rdma_address(const kvf_rdma_t *rdma, uint8_t address[KVF_RDMA_ADDRESS_BYTES]);

/** @return KVF_OK; KVF_ERR_INVALID (not an address); KVF_ERR_UNSUPPORTED (another UCX). */
KVF_CHECK kvf_status_t kvf_rdma_check_address(const kvf_rdma_t *rdma, const void *address,
                                              size_t bytes, kvf_detail_t *detail);

/**
 * Make the end of a path by which a peer reads.
 *
 * @param[out] answer   Room for KVF_UCX_ANSWER_BYTES: what the peer needs.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_rdma_lend(kvf_rdma_t *rdma, void *owner, kvf_rdma_path_t **path_p,
                                     uint8_t *answer, size_t *answer_bytes_p, kvf_detail_t *detail);

/**
 * Make the end that reads, of the peer's answer. events.ready follows, or failed.
 *
 * @param least  How long each of its pools must be, at least.
 * @return KVF_OK; KVF_ERR_INVALID (not an answer, or other pools); KVF_ERR_INCOMPATIBLE (another
 * UCX, no transport in common, or nobody there); KVF_ERR_PEER_LOST; KVF_ERR_UNSUPPORTED;
 * KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_rdma_open(kvf_rdma_t *rdma, void *owner, const void *answer,
                                     size_t answer_bytes, const uint64_t *least,
                                     kvf_rdma_path_t **path_p, kvf_detail_t *detail);

/** Destroy its worker: what is read by it is read no more. Batches that are not done are so, with
 * KVF_ERR_PEER_LOST, in the next progress; those that are not sealed must be all the same. The path
 * is freed. */
void kvf_rdma_close(kvf_rdma_path_t *path);

/**
 * Read a range of a pool of the peer's into the same pool of ours.
 *
 * @param pool_idx  Of the pool, on both sides.
 * @param at        In ours; the range lies in it.
 * @param off       In the peer's; the range lies in what was asked for at open.
 * @return KVF_OK: it is part of the batch; KVF_ERR_AGAIN: nothing started, there are as many as
 * there may be; KVF_ERR_PEER_LOST: the path has failed, nothing started.
 * @cost no allocation, no system call of ours
 */
KVF_CHECK kvf_status_t kvf_rdma_read(kvf_rdma_path_t *path, kvf_rdma_batch_t *batch,
                                     uint32_t pool_idx, uint8_t *at, uint64_t off, uint64_t bytes);

/** Nothing is added to a batch any more; events.done follows. */
void kvf_rdma_seal(kvf_rdma_t *rdma, kvf_rdma_batch_t *batch);

/** Advance. Bounded. @return How many things happened. */
unsigned kvf_rdma_progress(kvf_rdma_t *rdma);

/** @return A descriptor that becomes readable when progress has work after kvf_rdma_arm(). */
int kvf_rdma_fd(const kvf_rdma_t *rdma);
/** @return true: sleeping on the descriptor is safe; false: call progress first. */
bool kvf_rdma_arm(const kvf_rdma_t *rdma);

#endif
