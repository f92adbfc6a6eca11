/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/cuda.h"

#include "kernels/move.h"
#include "transceiver/mem/cuda_scope.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>

/* Leaves whose hashes have room before the device is waited for: those of 64 MiB. */
#define LEAVES UINT64_C(16384)
/* Bytes from the CPU that are under way at once. */
#define BOUNCE_BYTES (UINT64_C(4) << 20)
/* How often it is looked whether the device is done, before the thread sleeps: a launch takes about
 * as long as a sleep and its end. */
#define LOOKS 200

/* A digest that is made when the hashes of its leaves are there. */
typedef struct want {
    uint64_t *digest_p;
    uint64_t bytes;
    uint64_t first_leaf;
} want_t;

struct kvf_lane {
    kvf_lanes_t *lanes;
    bool taken;
    kvf_cuda_scope_t scope; /* while it is taken */
    cudaError_t entry;      /* cudaSuccess: the context was entered */
    cudaStream_t stream;
    cudaEvent_t event;
    cudaError_t error; /* of the first thing that failed since the last finish */
    uint64_t *leaves;  /* pinned, n_room of them */
    uint64_t n_room;
    uint64_t n_leaves; /* of moves that were added */
    uint8_t *bounce;   /* pinned; NULL until it is needed */
    uint64_t n_bounced;
    kvf_moves_t moves; /* not launched yet */
    bool hashed;       /* they give hashes */
    uint32_t n_wants;
    want_t wants[KVF_MOVES];
};

struct kvf_lanes {
    const kvf_alloc_t *alloc;
    const struct kvf_cuda_context *context;
    pthread_mutex_t lock; /* of who has which lane */
    uint32_t n;
    kvf_lane_t *lanes[64];
};

static void keep_error(kvf_lane_t *lane, cudaError_t error) {
    if (lane->error == cudaSuccess) {
        lane->error = error;
    }
}

/* Hand the moves to the device. */
static void launch(kvf_lane_t *lane) {
    if (lane->moves.n > 0 && lane->error == cudaSuccess) {
        keep_error(lane, (cudaError_t)kvf_moves_launch(&lane->moves, lane->stream));
    }
    kvf_moves_begin(&lane->moves, NULL);
}

/* All that was launched has happened, or will not: make the digests. */
static void collect(kvf_lane_t *lane) {
    for (uint32_t i = 0; i < lane->n_wants && lane->error == cudaSuccess; i++) {
        const want_t *want = &lane->wants[i];
        *want->digest_p = kvf_digest_of_hashes(lane->leaves + want->first_leaf, want->bytes);
    }
    lane->n_wants = 0;
    lane->n_leaves = 0;
    lane->n_bounced = 0;
}

/* Wait until the device has done all that was launched, or will do nothing any more. Whatever else
 * a call says proves neither, and the pages are written to until one of them is so. */
static cudaError_t settle(const kvf_lane_t *lane, cudaError_t error) {
    while (error != cudaSuccess && !kvf_cuda_is_fatal(error)) {
        const struct timespec pause = {0, 1000000};
        (void)nanosleep(&pause, NULL);
        error = cudaStreamSynchronize(lane->stream);
    }
    return error;
}

/* Wait for all that was launched, and make the digests. */
static void drain(kvf_lane_t *lane) {
    launch(lane);
    if (lane->entry != cudaSuccess) { /* nothing was launched */
        keep_error(lane, lane->entry);
        collect(lane);
        return;
    }
    cudaError_t error = cudaEventRecord(lane->event, lane->stream);
    for (int looks = 0; error == cudaSuccess; looks++) {
        error = cudaEventQuery(lane->event);
        if (error != cudaErrorNotReady) {
            break;
        }
        error = cudaSuccess;
        if (looks == LOOKS) {
            error = cudaEventSynchronize(lane->event);
            break;
        }
        (void)sched_yield();
    }
    keep_error(lane, error);
    keep_error(lane, settle(lane, error));
    collect(lane);
}

/* Make room for the hashes of so many leaves, one after the other. @return false: there is none. */
static bool make_room(kvf_lane_t *lane, uint64_t n) {
    if (lane->n_wants == KVF_MOVES || lane->n_leaves + n > lane->n_room) {
        drain(lane);
    }
    if (n > lane->n_room) {
        (void)cudaFreeHost(lane->leaves);
        lane->leaves = NULL;
        lane->n_room = 0;
        keep_error(lane, cudaHostAlloc((void **)&lane->leaves, n * sizeof(*lane->leaves),
                                       cudaHostAllocPortable));
        lane->n_room = lane->leaves == NULL ? 0 : n;
    }
    return n <= lane->n_room;
}

/* Add a move whose hashes, if they are wanted, have room. */
static void add(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes, bool hashed) {
    if (lane->moves.n == KVF_MOVES || lane->hashed != hashed) {
        launch(lane);
    }
    if (lane->moves.n == 0) {
        kvf_moves_begin(&lane->moves, hashed ? lane->leaves + lane->n_leaves : NULL);
        lane->hashed = hashed;
    }
    uint32_t before = lane->moves.n_leaves;
    (void)kvf_moves_add(&lane->moves, (uint64_t)(uintptr_t)dst, (uint64_t)(uintptr_t)src, bytes);
    lane->n_leaves += hashed ? lane->moves.n_leaves - before : 0;
}

bool kvf_lane_begin(kvf_lane_t *lane, uint64_t bytes, uint64_t *digest_p) {
    if (digest_p == NULL) {
        return true;
    }
    if (!make_room(lane, (bytes + KVF_DIGEST_LEAF_BYTES - 1) / KVF_DIGEST_LEAF_BYTES)) {
        return false;
    }
    lane->wants[lane->n_wants++] = (want_t){digest_p, bytes, lane->n_leaves};
    return true;
}

void kvf_lane_part(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes, bool digested) {
    add(lane, dst, src, bytes, digested);
}

void kvf_lane_copy(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                   uint64_t *digest_p) {
    if (kvf_lane_begin(lane, bytes, digest_p)) {
        add(lane, dst, src, bytes, digest_p != NULL);
    }
}

void kvf_lane_copy_from_host(kvf_lane_t *lane, void *dst, const void *src, uint64_t bytes,
                             uint64_t *digest_p) {
    if (lane->bounce == NULL) {
        keep_error(lane,
                   cudaHostAlloc((void **)&lane->bounce, BOUNCE_BYTES, cudaHostAllocPortable));
    }
    if (lane->bounce == NULL || !kvf_lane_begin(lane, bytes, digest_p)) {
        return;
    }
    for (uint64_t at = 0; at < bytes;) {
        uint64_t room = BOUNCE_BYTES - lane->n_bounced;
        uint64_t part = bytes - at;
        if (part > room) { /* then whole leaves of it */
            part = room / KVF_DIGEST_LEAF_BYTES * KVF_DIGEST_LEAF_BYTES;
        }
        if (part == 0) {
            /* Not drain(): digests of the bytes so far are not whole. */
            launch(lane);
            cudaError_t error = cudaStreamSynchronize(lane->stream);
            keep_error(lane, error);
            keep_error(lane, settle(lane, error));
            lane->n_bounced = 0;
            continue;
        }
        memcpy(lane->bounce + lane->n_bounced, (const uint8_t *)src + at, (size_t)part);
        add(lane, (uint8_t *)dst + at, lane->bounce + lane->n_bounced, part, digest_p != NULL);
        lane->n_bounced += (part + 15) & ~UINT64_C(15);
        at += part;
    }
}

/* Make the digests, and begin anew. */
static kvf_status_t report(kvf_lane_t *lane, kvf_detail_t *detail) {
    collect(lane);
    cudaError_t error = lane->error;
    lane->error = cudaSuccess;
    if (error == cudaSuccess) {
        return KVF_OK;
    }
    (void)kvf_cuda_fail(detail, error, "a copy on a CUDA device");
    return KVF_ERR_IO;
}

bool kvf_lane_reserve(kvf_lane_t *lane, uint32_t n, uint64_t n_leaves) {
    bool there = n <= KVF_MOVES && make_room(lane, n_leaves);
    lane->error = there ? lane->error : lane->entry; /* who asked knows */
    return there;
}

bool kvf_lane_launch(kvf_lane_t *lane) {
    launch(lane);
    return lane->error == cudaSuccess;
}

void *kvf_lane_stream(const kvf_lane_t *lane) {
    return lane->stream;
}

void kvf_lane_end(kvf_lane_t *lane) {
    launch(lane);
    if (lane->entry == cudaSuccess) {
        keep_error(lane, cudaEventRecord(lane->event, lane->stream));
    }
}

/* What was queued, whatever became of it, has happened when the stream is empty. */
kvf_status_t kvf_lane_poll(kvf_lane_t *lane, kvf_detail_t *detail) {
    cudaError_t error = lane->entry != cudaSuccess   ? lane->entry
                        : lane->error == cudaSuccess ? cudaEventQuery(lane->event)
                                                     : cudaStreamQuery(lane->stream);
    if (error == cudaErrorNotReady) {
        return KVF_ERR_AGAIN;
    }
    keep_error(lane, error);
    if (error != cudaSuccess && lane->entry == cudaSuccess && !kvf_cuda_is_fatal(error)) {
        return KVF_ERR_AGAIN; /* it says neither */
    }
    return report(lane, detail);
}

kvf_status_t kvf_lane_finish(kvf_lane_t *lane, kvf_detail_t *detail) {
    drain(lane);
    return report(lane, detail);
}

/* ---- lanes ---- */

static void lane_destroy(kvf_lane_t *lane) {
    if (lane != NULL) {
        if (lane->event != NULL) {
            (void)cudaEventDestroy(lane->event);
        }
        if (lane->stream != NULL) {
            (void)cudaStreamDestroy(lane->stream);
        }
        (void)cudaFreeHost(lane->leaves);
        (void)cudaFreeHost(lane->bounce);
        kvf_free(lane->lanes->alloc, lane);
    }
}

/* On the current device. */
static cudaError_t lane_create(kvf_lanes_t *lanes, kvf_lane_t **lane_p) {
    kvf_lane_t *lane = kvf_calloc(lanes->alloc, 1, sizeof(*lane));
    if (lane == NULL) {
        return cudaErrorMemoryAllocation;
    }
    lane->lanes = lanes;
    cudaError_t error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
        error =
            cudaEventCreateWithFlags(&lane->event, cudaEventDisableTiming | cudaEventBlockingSync);
    }
    if (error == cudaSuccess) {
        error = cudaHostAlloc((void **)&lane->leaves, LEAVES * sizeof(*lane->leaves),
                              cudaHostAllocPortable);
    }
    if (error != cudaSuccess) {
        lane_destroy(lane);
        return error;
    }
    lane->n_room = LEAVES;
    *lane_p = lane;
    return cudaSuccess;
}

kvf_status_t kvf_lanes_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                              uint32_t n, kvf_lanes_t **lanes_p, kvf_detail_t *detail) {
    kvf_cuda_scope_t scope;
    kvf_lanes_t *lanes = kvf_calloc(alloc, 1, sizeof(*lanes));
    if (lanes == NULL || n > sizeof(lanes->lanes) / sizeof(lanes->lanes[0])) {
        kvf_free(alloc, lanes);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for %u streams", n);
    }
    lanes->alloc = alloc;
    lanes->context = context;
    (void)pthread_mutex_init(&lanes->lock, NULL);
    cudaError_t error = kvf_cuda_enter(context, &scope);
    if (error == cudaSuccess) {
        error = (cudaError_t)kvf_moves_load();
        while (error == cudaSuccess && lanes->n < n) {
            error = lane_create(lanes, &lanes->lanes[lanes->n]);
            lanes->n += error == cudaSuccess;
        }
        kvf_cuda_leave(&scope);
    }
    if (error != cudaSuccess) {
        kvf_lanes_destroy(lanes);
        return kvf_cuda_fail(detail, error, "streams and kernels of a CUDA device");
    }
    *lanes_p = lanes;
    return KVF_OK;
}

void kvf_lanes_destroy(kvf_lanes_t *lanes) {
    kvf_cuda_scope_t scope;
    if (lanes == NULL) {
        return;
    }
    bool entered = kvf_cuda_enter(lanes->context, &scope) == cudaSuccess;
    for (uint32_t i = 0; i < lanes->n; i++) {
        lane_destroy(lanes->lanes[i]);
    }
    if (entered) {
        kvf_cuda_leave(&scope);
    }
    (void)pthread_mutex_destroy(&lanes->lock);
    kvf_free(lanes->alloc, lanes);
}

kvf_lane_t *kvf_lanes_take(kvf_lanes_t *lanes) {
    kvf_lane_t *lane = NULL;
    (void)pthread_mutex_lock(&lanes->lock);
    for (uint32_t i = 0; i < lanes->n && lane == NULL; i++) {
        lane = lanes->lanes[i]->taken ? NULL : lanes->lanes[i];
    }
    if (lane != NULL) {
        lane->taken = true;
    }
    (void)pthread_mutex_unlock(&lanes->lock);
    if (lane != NULL) {
        lane->entry = kvf_cuda_enter(lanes->context, &lane->scope);
        keep_error(lane, lane->entry);
    }
    return lane;
}

void kvf_lanes_give(kvf_lane_t *lane) {
    if (lane->entry == cudaSuccess) {
        kvf_cuda_leave(&lane->scope);
    }
    (void)pthread_mutex_lock(&lane->lanes->lock);
    lane->taken = false;
    (void)pthread_mutex_unlock(&lane->lanes->lock);
}

void *kvf_lanes_pinned(const kvf_lanes_t *lanes, uint64_t bytes) {
    void *pinned = NULL;
    kvf_cuda_scope_t scope;
    if (kvf_cuda_enter(lanes->context, &scope) == cudaSuccess) {
        if (cudaHostAlloc(&pinned, (size_t)bytes, cudaHostAllocPortable) != cudaSuccess) {
            (void)cudaGetLastError();
            pinned = NULL;
        }
        kvf_cuda_leave(&scope);
    }
    return pinned;
}

void kvf_lanes_unpin(const kvf_lanes_t *lanes, void *pinned) {
    kvf_cuda_scope_t scope;
    if (pinned != NULL && kvf_cuda_enter(lanes->context, &scope) == cudaSuccess) {
        (void)cudaFreeHost(pinned);
        kvf_cuda_leave(&scope);
    }
}
