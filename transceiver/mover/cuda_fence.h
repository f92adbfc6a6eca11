/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_CUDA_FENCE_H
#define KVF_MOVER_CUDA_FENCE_H

/**
 * @file
 * Events of a caller's, waited for without a thread: a stream of ours waits, and its end wakes the
 * agent.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

struct kvf_cuda_context; /* mem/cuda.h */
typedef struct kvf_fences kvf_fences_t;
typedef struct kvf_fence kvf_fence_t;

/**
 * @param context        The device's; outlives the fences.
 * @param wake           Called on any thread when a fence may have been reached.
 * @param[out] fences_p  kvf_fences_destroy() them.
 * @return KVF_OK, KVF_ERR_NO_MEMORY. @thread any
 */
KVF_CHECK kvf_status_t kvf_fences_create(const kvf_alloc_t *alloc,
                                         const struct kvf_cuda_context *context,
                                         void (*wake)(void *ctx), void *ctx,
                                         kvf_fences_t **fences_p, kvf_detail_t *detail);

/** No fence is with anybody. Waits for the device. NULL is allowed. @thread any */
void kvf_fences_destroy(kvf_fences_t *fences);

/**
 * Begin to wait for an event.
 *
 * @param event          A cudaEvent_t of the device, recorded; the caller's again on return.
 * @param[out] fence_p   kvf_fence_give() it back when it was reached.
 * @return KVF_OK; KVF_ERR_IO (the text says why); KVF_ERR_NO_MEMORY. @thread any  @cost some
 * microseconds, and the first times that of a stream
 */
KVF_CHECK kvf_status_t kvf_fences_take(kvf_fences_t *fences, const void *event,
                                       kvf_fence_t **fence_p, kvf_detail_t *detail);

/** @return Whether it was reached. @thread any  @cost a load */
bool kvf_fence_is_reached(const kvf_fence_t *fence);

/**
 * Ask the device: for fences that nobody is woken for.
 *
 * @return KVF_OK: reached. KVF_ERR_IO: the context has ended, and nothing runs in it any more.
 * KVF_ERR_AGAIN: neither is known; a call that failed proves nothing. @thread any, without waiting
 * @cost about a microsecond
 */
kvf_status_t kvf_fence_look(kvf_fence_t *fence);

/** Give it back, reached or not. @thread any, without waiting */
void kvf_fence_give(kvf_fence_t *fence);

#endif
