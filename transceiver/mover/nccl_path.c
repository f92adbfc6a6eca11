/* SPDX-License-Identifier: Apache-2.0 */
/* A path and its jobs, as the mover's thread moves them on. NCCL works in the background (blocking
 * = 0): each call begins something, and until CommGetAsyncError() says that it is over nothing else
 * is asked of that communicator. */
#include "transceiver/mover/nccl_impl.h"

#include "kernels/digest.h"
#include "kvmgr/base/clock.h"
#include "transceiver/mem/cuda_scope.h"

#include <stdio.h>

/* For a peer to come, and for a message to be taken: long, because a device may be busy with
 * something else; what is beyond is given up, or nobody would ever know. */
#define JOIN_US UINT64_C(15000000)
#define STUCK_US UINT64_C(20000000)
/* Steps while something is under way; and between looks for an error while nothing is. */
#define SOON_US UINT64_C(20)
#define LATER_US UINT64_C(100000)
/* Of the device's multiprocessors, for one communicator: all stages that are in use at once must
 * fit on it, also beside an engine's kernels. */
#define MAX_CTAS 8

static uint64_t now_us(void) {
    const kvf_clock_t *clock = kvf_clock_default();
    return clock->now_us(clock->ctx);
}

/* Say why it ends; the first word counts. */
static void explain(kvf_nccl_path_t *path, const char *what, const char *more) {
    (void)pthread_mutex_lock(&path->nccl->lock);
    if (path->why[0] == '\0') {
        (void)snprintf(path->why, sizeof(path->why), "%s%s%s", what, more[0] == '\0' ? "" : ": ",
                       more);
    }
    (void)pthread_mutex_unlock(&path->nccl->lock);
}

static void explain_nccl(kvf_nccl_path_t *path, ncclResult_t result) {
    const kvf_nccl_library_t *library = path->nccl->library;
    const char *last = library->GetLastError(path->comm);
    char more[160];
    (void)snprintf(more, sizeof(more), "%s%s%.120s", library->GetErrorString(result),
                   last == NULL || last[0] == '\0' ? "" : "; ", last == NULL ? "" : last);
    explain(path, "NCCL", more);
}

static stage_t *first_stage(kvf_nccl_path_t *path) {
    (void)pthread_mutex_lock(&path->nccl->lock);
    stage_t *stage = path->first;
    (void)pthread_mutex_unlock(&path->nccl->lock);
    return stage;
}

static stage_t *next_stage(stage_t *stage) {
    (void)pthread_mutex_lock(&stage->path->nccl->lock);
    stage_t *next = stage->next;
    (void)pthread_mutex_unlock(&stage->path->nccl->lock);
    return next;
}

/* ---- the end ---- */

void *nccl_abort_main(void *arg) {
    kvf_nccl_path_t *path = arg;
    kvf_nccl_t *nccl = path->nccl;
    kvf_cuda_scope_t scope;
    bool entered = kvf_cuda_enter(nccl->context, &scope) == cudaSuccess;
    (void)nccl->library->CommAbort(path->comm);
    if (entered) {
        kvf_cuda_leave(&scope);
    }
    (void)pthread_mutex_lock(&nccl->lock);
    path->aborted = true;
    nccl->news = true;
    (void)pthread_cond_signal(&nccl->cond);
    (void)pthread_mutex_unlock(&nccl->lock);
    return NULL;
}

/* No message of it begins any more, and those that wait for the peer are stopped. */
static void begin_end(kvf_nccl_path_t *path) {
    kvf_nccl_t *nccl = path->nccl;
    path->state = PATH_ENDING;
    (void)pthread_mutex_lock(&nccl->lock);
    path->aborted = path->comm == NULL;
    path->failing_due = !path->leave; /* else the agent knows */
    nccl_tell(nccl);
    (void)pthread_mutex_unlock(&nccl->lock);
    if (path->comm != NULL) {
        path->has_aborter = pthread_create(&path->aborter, NULL, nccl_abort_main, path) == 0;
        if (!path->has_aborter) {
            (void)nccl_abort_main(path);
        }
    }
    for (stage_t *stage = first_stage(path); stage != NULL; stage = next_stage(stage)) {
        stage->status = KVF_ERR_PEER_LOST;
        stage->state = stage->state == STAGE_QUEUED ? STAGE_DONE : stage->state;
    }
}

/* Wait for the device. What NCCL may still be about to queue is waited for by waiting for the
 * abort. A job that came after the end is told like the others. */
static uint64_t step_end(kvf_nccl_path_t *path) {
    (void)pthread_mutex_lock(&path->nccl->lock);
    bool aborted = path->aborted;
    (void)pthread_mutex_unlock(&path->nccl->lock);
    for (stage_t *stage; (stage = first_stage(path)) != NULL;) {
        if (stage->state == STAGE_ISSUING && aborted) {
            kvf_lane_end(stage->lane);
            stage->state = STAGE_RUNNING;
        }
        if (stage->state == STAGE_ISSUING ||
            (stage->state == STAGE_RUNNING && kvf_lane_poll(stage->lane, NULL) == KVF_ERR_AGAIN)) {
            return SOON_US * 10;
        }
        stage->status = KVF_ERR_PEER_LOST;
        nccl_stage_done(path);
    }
    if (!aborted) {
        return KVF_NEVER; /* its thread says so */
    }
    if (path->has_aborter) {
        (void)pthread_join(path->aborter, NULL);
        path->has_aborter = false;
    }
    path->state = PATH_ENDED;
    return KVF_NEVER;
}

static uint64_t fail(kvf_nccl_path_t *path, const char *what) {
    explain(path, what, "");
    begin_end(path);
    return SOON_US;
}

/* ---- the beginning ---- */

static uint64_t start(kvf_nccl_path_t *path) {
    const kvf_nccl_library_t *library = path->nccl->library;
    if (!kvf_lane_launch(path->nccl->stages[0].lane)) { /* NCCL would take another device */
        return fail(path, "the context of the device cannot be entered");
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t result = path->receives ? library->GetUniqueId(&path->id) : ncclSuccess;
    config.blocking = 0;
    config.maxCTAs = MAX_CTAS;
    if (result == ncclSuccess) {
        result =
            library->CommInitRankConfig(&path->comm, 2, path->id, path->receives ? 0 : 1, &config);
    }
    if (result != ncclSuccess && result != ncclInProgress) {
        explain_nccl(path, result);
        begin_end(path);
        return SOON_US;
    }
    path->state = PATH_JOINING;
    path->since_us = now_us();
    if (path->receives) {
        (void)pthread_mutex_lock(&path->nccl->lock);
        path->invited_due = true;
        nccl_tell(path->nccl);
        (void)pthread_mutex_unlock(&path->nccl->lock);
    }
    return SOON_US;
}

/* ---- jobs ---- */

typedef enum walk { WALK_COUNT, WALK_GATHER, WALK_SCATTER } walk_t;

/* The bytes of the next message: ranges one after the other, the last one cut behind a leaf. Both
 * ends come to the same, as their ranges are as long. @return How many there are. */
static uint64_t walk_part(stage_t *stage, walk_t walk) {
    const kvf_nccl_job_t *job = &stage->job;
    uint32_t idx = stage->range_idx;
    uint64_t off = stage->range_off, used = 0;
    while (idx < job->n_ranges) {
        const kvf_nccl_range_t *range = &job->ranges[idx];
        uint64_t left = range->bytes - off, room = KVF_NCCL_PART_BYTES - used;
        uint64_t n = left <= room ? left : room / KVF_DIGEST_LEAF_BYTES * KVF_DIGEST_LEAF_BYTES;
        if (n == 0) {
            break;
        }
        if (walk == WALK_GATHER) {
            kvf_lane_copy(stage->lane, stage->part + used, range->at + off, n, NULL);
        } else if (walk == WALK_SCATTER &&
                   (off > 0 || kvf_lane_begin(stage->lane, range->bytes, range->digest_p))) {
            kvf_lane_part(stage->lane, range->at + off, stage->part + used, n,
                          range->digest_p != NULL);
        }
        used += n;
        off += n;
        if (n < left) {
            break;
        }
        off = 0;
        idx++;
    }
    if (walk != WALK_COUNT) {
        stage->range_idx = idx;
        stage->range_off = off;
    }
    return used;
}

/* Give NCCL the next message. @return false: the path has failed. */
static bool issue(kvf_nccl_path_t *path, stage_t *stage) {
    const kvf_nccl_library_t *library = path->nccl->library;
    cudaStream_t stream = kvf_lane_stream(stage->lane);
    ncclResult_t result;
    stage->state = STAGE_ISSUING;
    stage->since_us = now_us();
    if (path->receives) {
        uint64_t bytes = walk_part(stage, WALK_COUNT);
        result = library->Recv(stage->part, bytes, ncclUint8, 1, path->comm, stream);
    } else {
        uint64_t bytes = walk_part(stage, WALK_GATHER);
        if (!kvf_lane_launch(stage->lane)) { /* what is in the stage is not to be sent */
            explain(path, "a copy on the device failed", "");
            return false;
        }
        result = library->Send(stage->part, bytes, ncclUint8, 0, path->comm, stream);
    }
    if (result != ncclSuccess && result != ncclInProgress) {
        explain_nccl(path, result);
        return false;
    }
    return true;
}

static bool begin(kvf_nccl_path_t *path, stage_t *stage) {
    uint64_t n_leaves = 0;
    for (uint32_t i = 0; i < stage->job.n_ranges; i++) {
        const kvf_nccl_range_t *range = &stage->job.ranges[i];
        n_leaves += range->digest_p == NULL
                        ? 0
                        : (range->bytes + KVF_DIGEST_LEAF_BYTES - 1) / KVF_DIGEST_LEAF_BYTES;
    }
    if (!kvf_lane_reserve(stage->lane, stage->job.n_ranges, n_leaves)) {
        explain(path, "no memory for the digests of a message", "");
        stage->state = STAGE_DONE; /* nothing of it was begun */
        return false;
    }
    stage->range_idx = 0;
    stage->range_off = 0;
    return issue(path, stage);
}

/* NCCL has queued its message: go on behind it. */
static bool issued(kvf_nccl_path_t *path, stage_t *stage) {
    if (path->receives) {
        (void)walk_part(stage, WALK_SCATTER);
        if (!kvf_lane_launch(stage->lane)) {
            explain(path, "a copy on the device failed", "");
            return false;
        }
    }
    if (stage->range_idx < stage->job.n_ranges) {
        return issue(path, stage);
    }
    kvf_lane_end(stage->lane);
    stage->state = STAGE_RUNNING;
    stage->since_us = now_us();
    return true;
}

/* Tell of those that are done, in their order: that is the order in which the device does them.
 * @return false: the path has failed. */
static bool take_done(kvf_nccl_path_t *path) {
    for (stage_t *stage; (stage = first_stage(path)) != NULL && stage->state == STAGE_RUNNING;) {
        kvf_status_t status = kvf_lane_poll(stage->lane, NULL);
        if (status == KVF_ERR_AGAIN) {
            break;
        }
        stage->status = status;
        if (status != KVF_OK) {
            explain(path, "a copy on the device failed", "");
            stage->state = STAGE_DONE;
            return false;
        }
        nccl_stage_done(path);
        stage = first_stage(path);
        if (stage != NULL) {
            stage->since_us = now_us(); /* it was behind the other one until now */
        }
    }
    return true;
}

/* Let those that wait begin, one after the other: NCCL pairs messages by their order. */
static bool go_on(kvf_nccl_path_t *path, ncclResult_t result) {
    for (stage_t *stage = first_stage(path); stage != NULL; stage = next_stage(stage)) {
        if (stage->state == STAGE_RUNNING) {
            continue;
        }
        if (result == ncclInProgress) {
            return true; /* of one that is issued */
        }
        if (!(stage->state == STAGE_QUEUED ? begin(path, stage) : issued(path, stage))) {
            return false;
        }
        if (stage->state == STAGE_ISSUING) {
            return true; /* the next step asks NCCL */
        }
    }
    return true;
}

static bool is_stuck(kvf_nccl_path_t *path) {
    const stage_t *stage = first_stage(path);
    return stage != NULL && stage->state != STAGE_QUEUED && now_us() - stage->since_us > STUCK_US;
}

uint64_t nccl_path_step(kvf_nccl_path_t *path) {
    ncclResult_t result = ncclSuccess, call = ncclSuccess;
    (void)pthread_mutex_lock(&path->nccl->lock);
    bool leave = path->leave;
    (void)pthread_mutex_unlock(&path->nccl->lock);
    if (path->state == PATH_ENDING || path->state == PATH_ENDED) {
        return step_end(path);
    }
    if (leave) {
        begin_end(path);
        return SOON_US;
    }
    if (path->state == PATH_NEW) {
        return start(path);
    }
    call = path->nccl->library->CommGetAsyncError(path->comm, &result);
    result = call == ncclSuccess ? result : call;
    if (result != ncclSuccess && result != ncclInProgress) {
        explain_nccl(path, result);
        begin_end(path);
        return SOON_US;
    }
    if (path->state == PATH_JOINING) {
        if (result == ncclInProgress) {
            return now_us() - path->since_us < JOIN_US
                       ? SOON_US * 10
                       : fail(path, "the other end did not come; do both nodes reach each other by "
                                    "NCCL (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)?");
        }
        path->state = PATH_READY;
        (void)pthread_mutex_lock(&path->nccl->lock);
        path->ready_due = true;
        nccl_tell(path->nccl);
        (void)pthread_mutex_unlock(&path->nccl->lock);
        return SOON_US;
    }
    if (!take_done(path) || !go_on(path, result)) {
        begin_end(path);
        return SOON_US;
    }
    if (is_stuck(path)) {
        return fail(path, "a message was not taken for 20 s");
    }
    return first_stage(path) == NULL ? LATER_US : SOON_US;
}
