/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/nccl_impl.h"

#include "kvmgr/base/clock.h"
#include "transceiver/mem/cuda_scope.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utlist.h>

/* What a peer has to know. */
typedef struct nccl_address {
    char magic[8];
    int32_t version; /* of the library: the ends of a communicator must have the same */
    uint32_t part_bytes;
    uint8_t device[16]; /* its UUID */
} nccl_address_t;

#define NCCL_MAGIC "kvfncc1"
#define N_STAGES (2 * (size_t)KVF_NCCL_STAGES)

/* ---- the thread ---- */

void nccl_tell(kvf_nccl_t *nccl) {
    if (!nccl->woken) {
        nccl->woken = true;
        nccl->wake(nccl->wake_ctx);
    }
}

void nccl_stage_done(kvf_nccl_path_t *path) {
    kvf_nccl_t *nccl = path->nccl;
    (void)pthread_mutex_lock(&nccl->lock);
    stage_t *stage = path->first;
    stage->state = STAGE_DONE;
    LL_DELETE(path->first, stage);
    LL_APPEND(nccl->done, stage);
    nccl_tell(nccl);
    (void)pthread_mutex_unlock(&nccl->lock);
}

/* Step every path; those that have ended are the agent's. @return When the next step is due. */
static uint64_t step_all(kvf_nccl_t *nccl) {
    uint64_t due_us = KVF_NEVER;
    (void)pthread_mutex_lock(&nccl->lock);
    for (kvf_nccl_path_t *path = nccl->paths, *next; path != NULL; path = next) {
        (void)pthread_mutex_unlock(&nccl->lock);
        uint64_t us = nccl_path_step(path);
        due_us = us < due_us ? us : due_us;
        (void)pthread_mutex_lock(&nccl->lock);
        next = path->next;
        if (path->state == PATH_ENDED && path->first == NULL) {
            path->gone = true;
            LL_DELETE(nccl->paths, path);
            LL_APPEND(nccl->ended, path);
            nccl_tell(nccl);
        }
    }
    (void)pthread_mutex_unlock(&nccl->lock);
    return due_us;
}

/* Until that is due, or there is news. With the lock held. */
static void wait_for_news(kvf_nccl_t *nccl, uint64_t due_us) {
    struct timespec until;
    if (due_us == KVF_NEVER) {
        (void)pthread_cond_wait(&nccl->cond, &nccl->lock);
        return;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(due_us * 1000);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    (void)pthread_cond_timedwait(&nccl->cond, &nccl->lock, &until);
}

static void *thread_main(void *arg) {
    kvf_nccl_t *nccl = arg;
    uint64_t due_us = KVF_NEVER;
    for (size_t i = 0; i < N_STAGES; i++) {
        nccl->stages[i].lane = kvf_lanes_take(nccl->lanes); /* also enters the device's context */
    }
    for (;;) {
        (void)pthread_mutex_lock(&nccl->lock);
        if (!nccl->news && !(nccl->stop && nccl->paths == NULL)) {
            wait_for_news(nccl, due_us);
        }
        nccl->news = false;
        bool over = nccl->stop && nccl->paths == NULL;
        (void)pthread_mutex_unlock(&nccl->lock);
        if (over) {
            break;
        }
        due_us = step_all(nccl);
    }
    for (size_t i = 0; i < N_STAGES; i++) {
        kvf_lanes_give(nccl->stages[i].lane);
    }
    return NULL;
}

/* With the lock held. */
static void wake_thread(kvf_nccl_t *nccl) {
    nccl->news = true;
    (void)pthread_cond_signal(&nccl->cond);
}

/* ---- paths ---- */

static kvf_status_t add_path(kvf_nccl_t *nccl, void *owner, const void *invitation,
                             kvf_nccl_path_t **path_p) {
    kvf_nccl_path_t *path = kvf_calloc(nccl->alloc, 1, sizeof(*path));
    if (path == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    path->nccl = nccl;
    path->owner = owner;
    path->receives = invitation == NULL;
    if (invitation != NULL) {
        memcpy(&path->id, invitation, sizeof(path->id));
    }
    *path_p = path; /* before anything happens to it */
    (void)pthread_mutex_lock(&nccl->lock);
    LL_PREPEND(nccl->paths, path);
    wake_thread(nccl);
    (void)pthread_mutex_unlock(&nccl->lock);
    return KVF_OK;
}

kvf_status_t kvf_nccl_invite(kvf_nccl_t *nccl, void *owner, kvf_nccl_path_t **path_p) {
    return add_path(nccl, owner, NULL, path_p);
}

kvf_status_t kvf_nccl_join(kvf_nccl_t *nccl, void *owner, const void *invitation, size_t bytes,
                           kvf_nccl_path_t **path_p) {
    _Static_assert(sizeof(ncclUniqueId) == KVF_NCCL_INVITATION_BYTES, "ids");
    return bytes == sizeof(ncclUniqueId) ? add_path(nccl, owner, invitation, path_p)
                                         : KVF_ERR_INVALID;
}

void kvf_nccl_leave(kvf_nccl_path_t *path, const char *why) {
    kvf_nccl_t *nccl = path->nccl;
    (void)pthread_mutex_lock(&nccl->lock);
    path->leave = true;
    if (path->why[0] == '\0') {
        (void)snprintf(path->why, sizeof(path->why), "%s", why);
    }
    wake_thread(nccl);
    (void)pthread_mutex_unlock(&nccl->lock);
}

/* ---- jobs ---- */

kvf_nccl_job_t *kvf_nccl_take(kvf_nccl_path_t *path) {
    stage_t *stages = &path->nccl->stages[path->receives ? KVF_NCCL_STAGES : 0];
    for (uint32_t i = 0; i < KVF_NCCL_STAGES && path->n_taken < KVF_NCCL_STAGES_OF_PATH; i++) {
        if (!stages[i].taken) {
            stages[i].taken = true;
            stages[i].path = path;
            path->n_taken++;
            return &stages[i].job;
        }
    }
    return NULL;
}

void kvf_nccl_give(kvf_nccl_path_t *path, kvf_nccl_job_t *job) {
    ((stage_t *)job)->taken = false;
    path->n_taken--;
}

void kvf_nccl_post(kvf_nccl_path_t *path, kvf_nccl_job_t *job) {
    kvf_nccl_t *nccl = path->nccl;
    stage_t *stage = (stage_t *)job;
    (void)pthread_mutex_lock(&nccl->lock);
    if (path->gone) { /* and its end is not told yet */
        stage->status = KVF_ERR_PEER_LOST;
        LL_APPEND(nccl->done, stage);
        nccl_tell(nccl);
    } else {
        stage->state = STAGE_QUEUED;
        LL_APPEND(path->first, stage);
        wake_thread(nccl);
    }
    (void)pthread_mutex_unlock(&nccl->lock);
}

/* ---- what has happened ---- */

typedef struct news {
    kvf_nccl_path_t *invited, *ready, *failing, *ended;
    stage_t *done;
    char why[256];
} news_t;

/* The next thing: jobs before the ends of their paths. @return false: none. */
static bool next_news(kvf_nccl_t *nccl, news_t *news) {
    kvf_nccl_path_t *path;
    *news = (news_t){0};
    LL_FOREACH(nccl->paths, path) {
        kvf_nccl_path_t **which = path->invited_due   ? &news->invited
                                  : path->ready_due   ? &news->ready
                                  : path->failing_due ? &news->failing
                                                      : NULL;
        if (which != NULL) {
            *which = path;
            *(path->invited_due ? &path->invited_due
              : path->ready_due ? &path->ready_due
                                : &path->failing_due) = false;
            (void)snprintf(news->why, sizeof(news->why), "%s", path->why);
            return true;
        }
    }
    if (nccl->done != NULL) {
        news->done = nccl->done;
        LL_DELETE(nccl->done, news->done);
        return true;
    }
    path = nccl->ended;
    if (path != NULL && path->failing_due) { /* its end was faster than this thread */
        path->failing_due = false;
        news->failing = path;
        (void)snprintf(news->why, sizeof(news->why), "%s", path->why);
    } else if (path != NULL) {
        news->ended = path;
        LL_DELETE(nccl->ended, path);
    }
    return path != NULL;
}

static void tell(const kvf_nccl_t *nccl, const news_t *news) {
    const kvf_nccl_events_t *events = &nccl->events;
    if (news->invited != NULL) {
        events->invited(events->ctx, news->invited->owner,
                        (const uint8_t *)news->invited->id.internal);
    } else if (news->ready != NULL) {
        events->ready(events->ctx, news->ready->owner);
    } else if (news->failing != NULL) {
        events->failing(events->ctx, news->failing->owner, news->why);
    } else if (news->done != NULL) {
        news->done->taken = false;
        news->done->path->n_taken--;
        events->done(events->ctx, news->done->path->owner, &news->done->job, news->done->status);
    } else {
        events->ended(events->ctx, news->ended->owner, news->ended->why);
        kvf_free(nccl->alloc, news->ended);
    }
}

unsigned kvf_nccl_progress(kvf_nccl_t *nccl) {
    for (unsigned n = 0;; n++) {
        news_t news;
        (void)pthread_mutex_lock(&nccl->lock);
        nccl->woken = false;
        bool any = next_news(nccl, &news);
        (void)pthread_mutex_unlock(&nccl->lock);
        if (!any) {
            return n;
        }
        tell(nccl, &news);
    }
}

/* ---- addresses ---- */

void kvf_nccl_address(const kvf_nccl_t *nccl, uint8_t address[KVF_NCCL_ADDRESS_BYTES]) {
    _Static_assert(sizeof(nccl_address_t) == KVF_NCCL_ADDRESS_BYTES, "address");
    nccl_address_t ours = {.version = nccl->version, .part_bytes = KVF_NCCL_PART_BYTES};
    memcpy(ours.magic, NCCL_MAGIC, sizeof(NCCL_MAGIC));
    memcpy(ours.device, nccl->uuid, sizeof(ours.device));
    memcpy(address, &ours, sizeof(ours));
}

kvf_status_t kvf_nccl_check_address(const kvf_nccl_t *nccl, const void *address, size_t bytes,
                                    kvf_detail_t *detail) {
    nccl_address_t theirs;
    if (bytes != sizeof(theirs)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "an address of %zu bytes is none of NCCL", bytes);
    }
    memcpy(&theirs, address, sizeof(theirs));
    if (memcmp(theirs.magic, NCCL_MAGIC, sizeof(theirs.magic)) != 0 ||
        theirs.part_bytes != KVF_NCCL_PART_BYTES) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the address is none of this version's mover");
    }
    if (theirs.version != nccl->version) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "it has version %d of NCCL and this node %d; install the same on both",
                        theirs.version, nccl->version);
    }
    if (memcmp(theirs.device, nccl->uuid, sizeof(theirs.device)) == 0) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "both nodes have their pools on one device, which NCCL does not serve; "
                        "take mover auto, or give each a device of its own (CUDA_VISIBLE_DEVICES)");
    }
    return KVF_OK;
}

/* ---- life ---- */

static kvf_status_t open_library(kvf_nccl_t *nccl, kvf_detail_t *detail) {
    if (getenv("NCCL_COMM_ID") != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "NCCL_COMM_ID is set, which makes all communicators one; unset it");
    }
    kvf_status_t status = kvf_nccl_load(&nccl->library, detail);
    if (status == KVF_OK && (nccl->library->GetVersion(&nccl->version) != ncclSuccess ||
                             nccl->version < NCCL_VERSION_CODE)) {
        status = kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                          "version %d of NCCL is older than %d, which this program was built with",
                          nccl->version, NCCL_VERSION_CODE);
    }
    return status;
}

/* Now, and not when a message is to leave: it may wait for the device. */
static kvf_status_t make_parts(kvf_nccl_t *nccl, kvf_detail_t *detail) {
    kvf_cuda_scope_t scope;
    cudaError_t error = kvf_cuda_enter(nccl->context, &scope);
    if (error == cudaSuccess) {
        for (size_t i = 0; i < N_STAGES && error == cudaSuccess; i++) {
            error = cudaMalloc((void **)&nccl->stages[i].part, KVF_NCCL_PART_BYTES);
        }
        kvf_cuda_leave(&scope);
    }
    return error == cudaSuccess
               ? KVF_OK
               : kvf_cuda_fail(detail, error, "memory to gather messages of NCCL in");
}

static void free_parts(kvf_nccl_t *nccl) {
    kvf_cuda_scope_t scope;
    if (kvf_cuda_enter(nccl->context, &scope) == cudaSuccess) {
        for (size_t i = 0; i < N_STAGES; i++) {
            (void)cudaFree(nccl->stages[i].part);
        }
        kvf_cuda_leave(&scope);
    }
}

static kvf_status_t read_uuid(kvf_nccl_t *nccl, kvf_detail_t *detail) {
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, nccl->context->device);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "the device's UUID");
    }
    memcpy(nccl->uuid, prop.uuid.bytes, sizeof(nccl->uuid));
    return KVF_OK;
}

kvf_status_t kvf_nccl_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                             const kvf_nccl_events_t *events, void (*wake)(void *ctx),
                             void *wake_ctx, kvf_nccl_t **nccl_p, kvf_detail_t *detail) {
    pthread_condattr_t attr;
    kvf_nccl_t *nccl = kvf_calloc(alloc, 1, sizeof(*nccl));
    if (nccl == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the NCCL mover");
    }
    nccl->alloc = alloc;
    nccl->context = context;
    nccl->events = *events;
    nccl->wake = wake;
    nccl->wake_ctx = wake_ctx;
    kvf_status_t status = open_library(nccl, detail);
    status = status == KVF_OK ? read_uuid(nccl, detail) : status;
    if (status == KVF_OK) {
        status = kvf_lanes_create(alloc, context, 2 * KVF_NCCL_STAGES, &nccl->lanes, detail);
    }
    status = status == KVF_OK ? make_parts(nccl, detail) : status;
    if (status != KVF_OK) {
        free_parts(nccl);
        kvf_lanes_destroy(nccl->lanes);
        kvf_free(alloc, nccl);
        return status;
    }
    (void)pthread_mutex_init(&nccl->lock, NULL);
    (void)pthread_condattr_init(&attr);
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&nccl->cond, &attr);
    (void)pthread_condattr_destroy(&attr);
    nccl->started = pthread_create(&nccl->thread, NULL, thread_main, nccl) == 0;
    if (!nccl->started) {
        kvf_nccl_destroy(nccl);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a thread");
    }
    *nccl_p = nccl;
    return KVF_OK;
}

void kvf_nccl_destroy(kvf_nccl_t *nccl) {
    kvf_nccl_path_t *path;
    if (nccl == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&nccl->lock);
    nccl->stop = true;
    LL_FOREACH(nccl->paths, path) {
        path->leave = true;
    }
    wake_thread(nccl);
    (void)pthread_mutex_unlock(&nccl->lock);
    if (nccl->started) {
        (void)pthread_join(nccl->thread, NULL);
    }
    while (nccl->ended != NULL) {
        path = nccl->ended;
        LL_DELETE(nccl->ended, path);
        kvf_free(nccl->alloc, path);
    }
    free_parts(nccl);
    kvf_lanes_destroy(nccl->lanes);
    (void)pthread_cond_destroy(&nccl->cond);
    (void)pthread_mutex_destroy(&nccl->lock);
    kvf_free(nccl->alloc, nccl);
}
