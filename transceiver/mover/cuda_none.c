/* SPDX-License-Identifier: Apache-2.0 */
/* Instead of cuda.c in a build without CUDA: no device is ever opened (mem/cuda_none.c), so nothing
 * here is called. */
#include "transceiver/mover/cuda.h"
#include "transceiver/mover/cuda_fence.h"

#include <stdlib.h>

kvf_status_t kvf_lanes_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                              uint32_t n, kvf_lanes_t **lanes_p, kvf_detail_t *detail) {
    (void)alloc;
    (void)context;
    (void)n;
    (void)lanes_p;
    (void)detail;
    abort();
}

void kvf_lanes_destroy(kvf_lanes_t *lanes) {
    (void)lanes;
    abort();
}

kvf_lane_t *kvf_lanes_take(kvf_lanes_t *lanes) {
    (void)lanes;
    abort();
}

void kvf_lanes_give(kvf_lane_t *lane) {
    (void)lane;
    abort();
}

void kvf_lane_copy(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                   uint64_t *digest_p) {
    (void)lane;
    (void)dst;
    (void)src;
    (void)bytes;
    (void)digest_p;
    abort();
}

void kvf_lane_copy_from_host(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                             uint64_t *digest_p) {
    (void)lane;
    (void)dst;
    (void)src;
    (void)bytes;
    (void)digest_p;
    abort();
}

kvf_status_t kvf_lane_finish(kvf_lane_t *lane, kvf_detail_t *detail) {
    (void)lane;
    (void)detail;
    abort();
}

void *kvf_lanes_pinned(const kvf_lanes_t *lanes, uint64_t bytes) {
    (void)lanes;
    (void)bytes;
    abort();
}

void kvf_lanes_unpin(const kvf_lanes_t *lanes, void *pinned) {
    (void)lanes;
    (void)pinned;
    abort();
}

kvf_status_t kvf_fences_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                               void (*wake)(void *ctx), void *ctx, kvf_fences_t **fences_p,
                               kvf_detail_t *detail) {
    (void)alloc;
    (void)context;
    (void)wake;
    (void)ctx;
    (void)fences_p;
    (void)detail;
    abort();
}

void kvf_fences_destroy(kvf_fences_t *fences) {
    (void)fences; /* none was made */
}

kvf_status_t kvf_fences_take(kvf_fences_t *fences, const void *event, kvf_fence_t **fence_p,
                             kvf_detail_t *detail) {
    (void)fences;
    (void)event;
    (void)fence_p;
    (void)detail;
    abort();
}

bool kvf_fence_is_reached(const kvf_fence_t *fence) {
    (void)fence;
    abort();
}

kvf_status_t kvf_fence_look(kvf_fence_t *fence) {
    (void)fence;
    abort();
}

void kvf_fence_give(kvf_fence_t *fence) {
    (void)fence;
    abort();
}
