/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_NCCL_IMPL_H
#define KVF_MOVER_NCCL_IMPL_H

/**
 * @file
 * The NCCL mover's parts: nccl.c (the agent's side, the thread) and nccl_path.c (what the thread
 * does with a path). Fields are the agent's, the thread's, or shared, which means under the lock.
 */

#include "transceiver/mover/cuda.h"
#include "transceiver/mover/nccl.h"
#include "transceiver/mover/nccl_library.h"

#include <pthread.h>

/* ---- stages ---- */

typedef enum stage_state {
    STAGE_FREE,
    STAGE_QUEUED,  /* waits for those in front of it */
    STAGE_ISSUING, /* NCCL has a message of it, and has not said yet that it is queued */
    STAGE_RUNNING, /* all is queued */
    STAGE_DONE
} stage_state_t;

typedef struct stage {
    kvf_nccl_job_t job;    /* first: what the caller knows */
    bool taken;            /* the agent's */
    kvf_nccl_path_t *path; /* while taken */
    struct stage *next;    /* of the path's, or of those that are done; shared */
    /* the thread's */
    stage_state_t state;
    kvf_lane_t *lane;
    uint8_t *part;      /* memory of the device: KVF_NCCL_PART_BYTES */
    uint32_t range_idx; /* the next part begins here */
    uint64_t range_off;
    uint64_t since_us; /* of its last step */
    kvf_status_t status;
} stage_t;

/* ---- paths ---- */

typedef enum path_state {
    PATH_NEW,
    PATH_JOINING, /* NCCL makes the communicator */
    PATH_READY,
    PATH_ENDING, /* aborted; what was queued is waited for */
    PATH_ENDED
} path_state_t;

struct kvf_nccl_path {
    kvf_nccl_t *nccl;
    void *owner;
    bool receives;
    uint32_t n_taken; /* the agent's */
    /* shared */
    bool leave;
    bool gone;     /* the thread knows it no more */
    char why[256]; /* of its end */
    bool invited_due, ready_due, failing_due;
    bool aborted;   /* or there is nothing to abort */
    stage_t *first; /* posted, in this order */
    struct kvf_nccl_path *next;
    /* the thread's; the invitation is written before invited_due */
    path_state_t state;
    ncclUniqueId id;
    ncclComm_t comm;
    pthread_t aborter; /* while has_aborter */
    bool has_aborter;
    uint64_t since_us; /* of its state */
};

/* Take a step. @return How soon the next one is due, in microseconds; KVF_NEVER: when something is
 * posted. @thread the mover's, without the lock */
uint64_t nccl_path_step(kvf_nccl_path_t *path);

struct kvf_nccl {
    const kvf_alloc_t *alloc;
    const struct kvf_cuda_context *context;
    const kvf_nccl_library_t *library;
    int version;
    uint8_t uuid[16]; /* of the device */
    kvf_nccl_events_t events;
    void (*wake)(void *ctx);
    void *wake_ctx;
    kvf_lanes_t *lanes;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t cond; /* something was posted, left or made; or stop */
    bool started, stop, news, woken;
    kvf_nccl_path_t *paths; /* the agent adds, the thread takes out */
    kvf_nccl_path_t *ended;
    stage_t *done;
    stage_t stages[2 * KVF_NCCL_STAGES]; /* those that send, then those that receive */
};

/* Abort the communicator of a path that has begun to end. @thread one of its own: NCCL waits there
 * for the whole device, also for kernels of other paths, which may have to be aborted, too. */
void *nccl_abort_main(void *path);

/* Hand something to the agent: it is to look. With the lock held. */
void nccl_tell(kvf_nccl_t *nccl);
/* A path's first stage is done. @thread the mover's, without the lock */
void nccl_stage_done(kvf_nccl_path_t *path);

#endif
