/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_CUDA_H
#define KVF_MOVER_CUDA_H

/**
 * @file
 * Copies to, from and between pages on a CUDA device, with their digests: many in one launch, on
 * streams of our own. A *lane* is a stream with what belongs to it, for one thread at a time;
 * threads of the crew take one for each job, and wait for it there. The agent's thread never does.
 *
 * Peers' memory is read through mappings of it (mem/cuda.h): over NVLink, or on one device.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

struct kvf_cuda_context; /* mem/cuda.h */
typedef struct kvf_lanes kvf_lanes_t;
typedef struct kvf_lane kvf_lane_t;

/**
 * Also loads the kernels, so that a device which has none of them is found now.
 *
 * @param context       The device's; outlives the lanes.
 * @param n             Lanes: as many as threads use them at once.
 * @param[out] lanes_p  kvf_lanes_destroy() them.
 * @return KVF_OK, KVF_ERR_NO_MEMORY, KVF_ERR_IO, KVF_ERR_UNSUPPORTED. @thread any
 */
KVF_CHECK kvf_status_t kvf_lanes_create(const kvf_alloc_t *alloc,
                                        const struct kvf_cuda_context *context, uint32_t n,
                                        kvf_lanes_t **lanes_p, kvf_detail_t *detail);

/** No lane is taken. Waits for the device. NULL is allowed. @thread any */
void kvf_lanes_destroy(kvf_lanes_t *lanes);

/** Take a lane; its device is the thread's current one until it is given back. @return NULL: all
 * are taken. @thread any */
kvf_lane_t *kvf_lanes_take(kvf_lanes_t *lanes);
/** Give it back; nothing is under way. @thread who took it */
void kvf_lanes_give(kvf_lane_t *lane);

/**
 * Queue one copy. Failures are told by kvf_lane_finish().
 *
 * @param dst       Memory that the device reaches: its own, or kvf_lanes_pinned(). NULL: the source
 * is only digested.
 * @param src       The same, or a mapping of a peer's.
 * @param bytes     1 to 2^31.
 * @param digest_p  Gets kvf_digest() of what was stored at dst, or read, by the end of
 * kvf_lane_finish(); NULL: not wanted.
 * @thread the lane's  @cost one launch for many calls; waits for the device now and then
 */
void kvf_lane_copy(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                   uint64_t *digest_p);

/** The same from memory that only the CPU reaches. @param src  Has been read when it returns. */
void kvf_lane_copy_from_host(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                             uint64_t *digest_p);

/**
 * The same, of a range whose bytes come piece by piece: begin it, then copy its parts in order,
 * each but the last of whole leaves (KVF_DIGEST_LEAF_BYTES). @param digest_p  NULL: not wanted, and
 * neither by the parts. @return false: told by kvf_lane_finish().
 */
bool kvf_lane_begin(kvf_lane_t *lane, uint64_t bytes, uint64_t *digest_p);
void kvf_lane_part(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes, bool digested);

/**
 * Nothing is queued: see to it that kvf_lane_begin() does not have to wait for the device, for up
 * to n ranges of n_leaves leaves in all. @return false: no memory; the lane is as before.
 */
bool kvf_lane_reserve(kvf_lane_t *lane, uint32_t n, uint64_t n_leaves);
/** Hand what was queued to the device. @return false: told by kvf_lane_finish(). */
bool kvf_lane_launch(kvf_lane_t *lane);
/** @return The lane's stream, a cudaStream_t; for what is to happen between launches. */
void *kvf_lane_stream(const kvf_lane_t *lane);
/** All is queued: kvf_lane_poll() says when it has happened. */
void kvf_lane_end(kvf_lane_t *lane);
/** kvf_lane_finish() without waiting. @return KVF_ERR_AGAIN: not yet. */
KVF_CHECK kvf_status_t kvf_lane_poll(kvf_lane_t *lane, kvf_detail_t *detail);

/**
 * Wait for what was queued: all bytes are where they belong, and seen by whatever is launched from
 * now on; digests are written.
 *
 * @return KVF_OK; KVF_ERR_IO: some of it did not happen, and nothing of it will. Not before that is
 * so: while the device says neither, the call waits. @thread the lane's
 */
KVF_CHECK kvf_status_t kvf_lane_finish(kvf_lane_t *lane, kvf_detail_t *detail);

/** @return Memory of the CPU's that the device reaches, too; NULL: there is none. @thread any
 * @cost that of pinning pages; may wait for the device */
void *kvf_lanes_pinned(const kvf_lanes_t *lanes, uint64_t bytes);
/** Give it back. NULL is allowed. */
void kvf_lanes_unpin(const kvf_lanes_t *lanes, void *pinned);

#endif
