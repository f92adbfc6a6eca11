/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/cuda_fence.h"

#include "transceiver/mem/cuda_status.h"

#include <pthread.h>
#include <stdatomic.h>

/* A stream that waits, and an event of ours behind the caller's. */
struct kvf_fence {
    kvf_fences_t *fences;
    cudaStream_t stream;
    cudaEvent_t event;
    atomic_bool reached;
    kvf_fence_t *next; /* of those that nobody has */
};

struct kvf_fences {
    const kvf_alloc_t *alloc;
    int device;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_mutex_t lock;
    kvf_fence_t *free;
};

kvf_status_t kvf_fences_create(const kvf_alloc_t *alloc, int device, void (*wake)(void *ctx),
                               void *ctx, kvf_fences_t **fences_p, kvf_detail_t *detail) {
    kvf_fences_t *fences = kvf_calloc(alloc, 1, sizeof(*fences));
    if (fences == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for fences");
    }
    fences->alloc = alloc;
    fences->device = device;
    fences->wake = wake;
    fences->ctx = ctx;
    (void)pthread_mutex_init(&fences->lock, NULL);
    *fences_p = fences;
    return KVF_OK;
}

/* Destroying a stream lets what is queued there happen first. */
static void fence_destroy(kvf_fence_t *fence) {
    if (fence->event != NULL) {
        (void)cudaEventDestroy(fence->event);
    }
    if (fence->stream != NULL) {
        (void)cudaStreamSynchronize(fence->stream);
        (void)cudaStreamDestroy(fence->stream);
    }
    kvf_free(fence->fences->alloc, fence);
}

void kvf_fences_destroy(kvf_fences_t *fences) {
    int before = 0;
    if (fences == NULL) {
        return;
    }
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(fences->device);
    while (fences->free != NULL) {
        kvf_fence_t *fence = fences->free;
        fences->free = fence->next;
        fence_destroy(fence);
    }
    (void)cudaSetDevice(before);
    (void)pthread_mutex_destroy(&fences->lock);
    kvf_free(fences->alloc, fences);
}

static void CUDART_CB on_reached(void *arg) {
    kvf_fence_t *fence = arg;
    const kvf_fences_t *fences = fence->fences;
    atomic_store(&fence->reached, true); /* whoever sees it may give the fence to somebody else */
    fences->wake(fences->ctx);
}

/* With the device current. */
static cudaError_t make(kvf_fence_t *fence) {
    cudaError_t error = cudaStreamCreateWithFlags(&fence->stream, cudaStreamNonBlocking);
    return error != cudaSuccess ? error
                                : cudaEventCreateWithFlags(&fence->event, cudaEventDisableTiming);
}

static cudaError_t begin(kvf_fence_t *fence, cudaEvent_t event) {
    atomic_store(&fence->reached, false);
    cudaError_t error = cudaStreamWaitEvent(fence->stream, event, cudaEventWaitDefault);
    if (error == cudaSuccess) {
        error = cudaEventRecord(fence->event, fence->stream);
    }
    return error != cudaSuccess ? error : cudaLaunchHostFunc(fence->stream, on_reached, fence);
}

kvf_status_t kvf_fences_take(kvf_fences_t *fences, const void *event, kvf_fence_t **fence_p,
                             kvf_detail_t *detail) {
    int before = 0;
    (void)pthread_mutex_lock(&fences->lock);
    kvf_fence_t **link = &fences->free;
    while (*link != NULL && !kvf_fence_is_reached(*link)) { /* given back before that */
        link = &(*link)->next;
    }
    kvf_fence_t *fence = *link;
    *link = fence == NULL ? NULL : fence->next;
    (void)pthread_mutex_unlock(&fences->lock);
    cudaError_t error = cudaGetDevice(&before);
    if (error == cudaSuccess) {
        error = cudaSetDevice(fences->device);
    }
    if (fence == NULL) {
        fence = kvf_calloc(fences->alloc, 1, sizeof(*fence));
        if (fence == NULL) {
            (void)cudaSetDevice(before);
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a fence");
        }
        fence->fences = fences;
        error = error == cudaSuccess ? make(fence) : error;
    }
    if (error == cudaSuccess) {
        error = begin(fence, (cudaEvent_t)(uintptr_t)event);
    }
    if (error != cudaSuccess && fence->event == NULL) {
        fence_destroy(fence);
    } else if (error != cudaSuccess) {
        kvf_fence_give(fence); /* its stream may be waiting, which is nothing to wait for here */
    }
    (void)cudaSetDevice(before);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return kvf_cuda_fail(detail, error, "waiting for an event");
    }
    *fence_p = fence;
    return KVF_OK;
}

bool kvf_fence_is_reached(const kvf_fence_t *fence) {
    return atomic_load(&fence->reached);
}

bool kvf_fence_has_failed(const kvf_fence_t *fence) {
    cudaError_t error = cudaEventQuery(fence->event);
    return error != cudaSuccess && error != cudaErrorNotReady;
}

void kvf_fence_give(kvf_fence_t *fence) {
    kvf_fences_t *fences = fence->fences;
    (void)pthread_mutex_lock(&fences->lock);
    fence->next = fences->free;
    fences->free = fence;
    (void)pthread_mutex_unlock(&fences->lock);
}
