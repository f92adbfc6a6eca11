/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/cuda_fence.h"

#include "transceiver/mem/cuda_scope.h"

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
    const struct kvf_cuda_context *context;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_mutex_t lock;
    kvf_fence_t *free;
};

kvf_status_t kvf_fences_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                               void (*wake)(void *ctx), void *ctx, kvf_fences_t **fences_p,
                               kvf_detail_t *detail) {
    kvf_fences_t *fences = kvf_calloc(alloc, 1, sizeof(*fences));
    if (fences == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for fences");
    }
    fences->alloc = alloc;
    fences->context = context;
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
    kvf_cuda_scope_t scope;
    if (fences == NULL) {
        return;
    }
    bool entered = kvf_cuda_enter(fences->context, &scope) == cudaSuccess;
    while (fences->free != NULL) {
        kvf_fence_t *fence = fences->free;
        fences->free = fence->next;
        fence_destroy(fence);
    }
    if (entered) {
        kvf_cuda_leave(&scope);
    }
    (void)pthread_mutex_destroy(&fences->lock);
    kvf_free(fences->alloc, fences);
}

static void CUDART_CB on_reached(void *arg) {
    kvf_fence_t *fence = arg;
    const kvf_fences_t *fences = fence->fences;
    atomic_store(&fence->reached, true); /* whoever sees it may give the fence to somebody else */
    fences->wake(fences->ctx);
}

/* With the context entered. */
static cudaError_t make(kvf_fence_t *fence) {
    cudaError_t error = cudaStreamCreateWithFlags(&fence->stream, cudaStreamNonBlocking);
    return error != cudaSuccess ? error
                                : cudaEventCreateWithFlags(&fence->event, cudaEventDisableTiming);
}

/* A fence whose stream waits for nothing; made, if there is none. */
static kvf_status_t find_free(kvf_fences_t *fences, kvf_fence_t **fence_p, kvf_detail_t *detail) {
    (void)pthread_mutex_lock(&fences->lock);
    kvf_fence_t **link = &fences->free;
    while (*link != NULL && !kvf_fence_is_reached(*link)) { /* given back before that */
        link = &(*link)->next;
    }
    kvf_fence_t *fence = *link;
    *link = fence == NULL ? NULL : fence->next;
    (void)pthread_mutex_unlock(&fences->lock);
    if (fence == NULL) {
        fence = kvf_calloc(fences->alloc, 1, sizeof(*fence));
        if (fence == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a fence");
        }
        fence->fences = fences;
        cudaError_t error = make(fence);
        if (error != cudaSuccess) {
            fence_destroy(fence);
            return kvf_cuda_fail(detail, error, "waiting for an event");
        }
        atomic_store(&fence->reached, true);
    }
    *fence_p = fence;
    return KVF_OK;
}

/* Once the stream waits, the fence is not to be used again before that has ended. */
static cudaError_t begin(kvf_fence_t *fence, cudaEvent_t event) {
    cudaError_t error = cudaStreamWaitEvent(fence->stream, event, cudaEventWaitDefault);
    if (error != cudaSuccess) {
        return error;
    }
    atomic_store(&fence->reached, false);
    error = cudaEventRecord(fence->event, fence->stream);
    return error != cudaSuccess ? error : cudaLaunchHostFunc(fence->stream, on_reached, fence);
}

kvf_status_t kvf_fences_take(kvf_fences_t *fences, const void *event, kvf_fence_t **fence_p,
                             kvf_detail_t *detail) {
    kvf_fence_t *fence = NULL;
    kvf_cuda_scope_t scope;
    cudaError_t error = kvf_cuda_enter(fences->context, &scope);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "waiting for an event");
    }
    kvf_status_t status = find_free(fences, &fence, detail);
    if (status == KVF_OK) {
        error = begin(fence, (cudaEvent_t)(uintptr_t)event);
        if (error != cudaSuccess) {
            status = kvf_cuda_fail(detail, error, "waiting for an event");
            kvf_fence_give(
                fence); /* its stream may be waiting, which is nothing to wait for here */
        }
    }
    kvf_cuda_leave(&scope);
    if (status == KVF_OK) {
        *fence_p = fence;
    }
    return status;
}

bool kvf_fence_is_reached(const kvf_fence_t *fence) {
    return atomic_load(&fence->reached);
}

kvf_status_t kvf_fence_look(kvf_fence_t *fence) {
    kvf_cuda_scope_t scope;
    cudaError_t error = kvf_cuda_enter(fence->fences->context, &scope);
    if (error == cudaSuccess) {
        error = cudaEventQuery(fence->event);
        kvf_cuda_leave(&scope);
    }
    return error == cudaSuccess ? KVF_OK : kvf_cuda_is_fatal(error) ? KVF_ERR_IO : KVF_ERR_AGAIN;
}

void kvf_fence_give(kvf_fence_t *fence) {
    kvf_fences_t *fences = fence->fences;
    (void)pthread_mutex_lock(&fences->lock);
    fence->next = fences->free;
    fences->free = fence;
    (void)pthread_mutex_unlock(&fences->lock);
}
