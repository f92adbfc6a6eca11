/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_JOB_H
#define KVF_TOOLS_NODE_JOB_H

/**
 * @file
 * One request on a node, from its HTTP call to the release of its pages:
 * waiting (for pages) -> open (a send or a receive lives) -> ended (answered; its pages come back).
 *
 * All work is done by the job's task, a step at a time; HTTP calls and events only write down and
 * post it. A job ends for the outside world (its id may be used again) before its pages are back.
 */

#include "tools/node/blocks.h"
#include "tools/node/body.h"
#include "tools/node/http.h"
#include "tools/node/workers.h"
#include "transceiver/hash.h"

#include <stdatomic.h>

/** Releases of pages wake who waits. Only pages that transfers keep back come unannounced; they are
 * asked for this often. */
#define KVF_JOB_POLL_US 20000

struct kvf_node;
typedef struct kvf_job kvf_job_t;

/** What prefill and decode do differently. Called by the job's steps, so one at a time. */
typedef struct kvf_job_ops {
    /** An OK result is acted upon when the pages are nobody else's any more. */
    bool waits_for_pages;
    /** Pages are there: open the send or the receive. */
    kvf_status_t (*open)(kvf_job_t *job, kvf_detail_t *detail);
    /** Work on while there is no result. */
    void (*work)(kvf_job_t *job);
    /** Give up the send or the receive; its result follows. */
    void (*cancel)(kvf_job_t *job);
    /** It was cancelled before it was opened. NULL: nobody has to know. */
    void (*decline)(kvf_job_t *job);
    /** There is a result: answer what is still to be answered, then kvf_job_end(). */
    void (*end)(kvf_job_t *job);
} kvf_job_ops_t;

/** What the result and released events said. */
typedef struct kvf_outcome {
    kvf_status_t status;
    char message[KVF_DETAIL_BYTES];
    char peer[KVF_MAX_ID_BYTES + 1];
    char mover[16];
    uint64_t bytes, pages, pieces;
    uint64_t transfer_us, exposed_us;
    int32_t *tokens; /**< first tokens, then drafts; the node's allocator */
    size_t n_first_tokens, n_draft_tokens;
    kvf_page_ref_t *missing; /**< the node's allocator */
    size_t n_missing;
} kvf_outcome_t;

typedef enum kvf_job_phase { KVF_JOB_WAITING, KVF_JOB_OPEN, KVF_JOB_ENDED } kvf_job_phase_t;

struct kvf_job {
    kvf_task_t task; /**< first member */
    struct kvf_node *node;
    const kvf_job_ops_t *ops;
    kvf_body_t body;
    uint64_t start_us;
    uint64_t deadline_us;
    atomic_bool cancelled; /**< somebody wants it to end */

    /* The steps' own. */
    kvf_job_phase_t phase;
    kvf_http_request_t *http; /**< NULL once answered */
    kvf_lease_t lease;
    uint64_t wait_us, work_us;
    bool cancel_sent;
    kvf_send_t send;
    kvf_recv_t recv;
    uint64_t work_start_us;
    uint32_t next_layer; /**< prefill in one step: layers below it are filled */
    bool filled;

    /* Under the node's lock. */
    bool has_result;
    bool released;
    kvf_outcome_t outcome;           /**< the steps' own once has_result is set */
    kvf_http_request_t *cancel_http; /**< who waits for the end of a cancel */
    bool waiting;
    struct kvf_job *prev, *next; /**< among those that wait */
    UT_hash_handle hh;
};

/**
 * Take a request in, or answer it with why not: node draining, id alive, too many, too large.
 *
 * @param body  Taken over.
 * @thread HTTP
 */
void kvf_job_start(struct kvf_node *node, const kvf_job_ops_t *ops, kvf_body_t *body,
                   kvf_http_request_t *http);

/** The callback of its send or receive; ctx is the job. @thread agent */
void kvf_job_event(void *ctx, const kvf_event_t *event);

/** @return Whether a result came or a cancel was asked for: work is in vain. @thread any */
bool kvf_job_in_vain(kvf_job_t *job);

/** @return Microseconds that are left of its time, at least 1. */
uint64_t kvf_job_time_left(const kvf_job_t *job);

/**
 * End the job for the outside world: keep its record, answer who waits (with the error, unless it
 * was answered), count it.
 *
 * @param status   KVF_OK or why not.
 * @param message  Goes with an error.
 * @param record   What GET /v1/transfers/{id} shows besides state and message; taken over; NULL is
 * allowed.
 */
void kvf_job_end(kvf_job_t *job, kvf_status_t status, const char *message, json_t *record);

/** Answer a GET of one transfer. @thread HTTP */
void kvf_job_show(struct kvf_node *node, const char *request_id, kvf_http_request_t *http);

/** Cancel by request id, and answer when it has ended. @thread HTTP */
void kvf_job_cancel(struct kvf_node *node, const char *request_id, kvf_http_request_t *http);

extern const kvf_job_ops_t kvf_prefill_ops;
extern const kvf_job_ops_t kvf_decode_ops;

#endif
