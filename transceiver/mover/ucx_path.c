/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_path.h"

#include "kernels/digest.h"

#include <stdio.h>
#include <string.h>
#include <utlist.h>

/* What UCX holds is overtaken by nothing, so it is given little at once. */
#define PATH_OPS 32U                     /* chunks */
#define PATH_BYTES (UINT64_C(512) << 10) /* and their bytes */

#define PATH_WINDOWS 64U /* posted windows */

typedef enum job_state { JOB_FREE, JOB_WAITING, JOB_SENT, JOB_DONE } job_state_t;

/* A posted window. */
typedef struct job {
    kvf_window_t *window;
    struct kvf_ucx_path *path;
    struct job *prev, *next; /* of free_jobs, waiting or done; of none while JOB_SENT */
    uint64_t piece_off;      /* the next chunk begins here */
    uint32_t piece_idx;
    uint32_t n_busy; /* chunks that UCX holds */
    uint64_t round;  /* of the transfers' turns */
    job_state_t state;
    kvf_status_t status;
} job_t;

/* A chunk that UCX holds. UCX reads the header until then. */
typedef struct op {
    uint8_t header[KVF_CHUNK_HEADER_BYTES];
    job_t *job;
    uint64_t bytes;
    struct op *next;
} op_t;

struct kvf_ucx_path {
    kvf_ucx_t *ucx;
    ucp_worker_h worker;
    ucp_ep_h ep;
    bool broken; /* takes no more chunks */
    char why[160];
    job_t *free_jobs, *waiting, *done;
    op_t *free_ops;
    uint32_t n_jobs;     /* posted and not taken */
    uint64_t busy_bytes; /* that UCX holds */
    job_t jobs[PATH_WINDOWS];
    op_t ops[PATH_OPS];
};

static void job_settle(job_t *job) {
    if (job->state == JOB_SENT && job->n_busy == 0) {
        job->state = JOB_DONE;
        DL_APPEND(job->path->done, job);
    }
}

/* Nothing more of it will be sent. */
static void job_stop(job_t *job) {
    DL_DELETE(job->path->waiting, job);
    job->state = JOB_SENT;
    job_settle(job);
}

/* Only marks: UCX may be calling us. */
static void break_path(kvf_ucx_path_t *path, const char *why) {
    if (path->broken) {
        return;
    }
    path->broken = true;
    (void)snprintf(path->why, sizeof(path->why), "%s", why);
    while (path->waiting != NULL) {
        path->waiting->status = KVF_ERR_PEER_LOST;
        job_stop(path->waiting);
    }
}

static void op_done(op_t *op, ucs_status_t status) {
    job_t *job = op->job;
    LL_PREPEND(job->path->free_ops, op);
    job->path->busy_bytes -= op->bytes;
    job->n_busy--;
    if (status != UCS_OK) {
        if (job->status == KVF_OK) {
            bool lost = kvf_ucx_status(status) == KVF_ERR_PEER_LOST;
            job->status = lost ? KVF_ERR_PEER_LOST : KVF_ERR_IO;
        }
        break_path(job->path, ucs_status_string(status));
    }
    job_settle(job);
}

static void on_sent(void *request, ucs_status_t status, void *op) {
    ucp_request_free(request);
    op_done(op, status);
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    break_path(arg, ucs_status_string(status));
}

kvf_status_t kvf_ucx_path_create(kvf_ucx_t *ucx, const ucp_address_t *address,
                                 kvf_ucx_path_t **path_p, kvf_detail_t *detail) {
    const ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                               .thread_mode = UCS_THREAD_MODE_SINGLE};
    kvf_ucx_scope_t scope;
    kvf_ucx_path_t *path = kvf_calloc(ucx->alloc, 1, sizeof(*path));
    if (path == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    path->ucx = ucx;
    for (uint32_t i = 0; i < PATH_WINDOWS; i++) {
        DL_APPEND(path->free_jobs, &path->jobs[i]);
    }
    for (uint32_t i = 0; i < PATH_OPS; i++) {
        LL_PREPEND(path->free_ops, &path->ops[i]);
    }
    const ucp_ep_params_t ep_params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_error, path},
    };
    kvf_ucx_scope_enter(&scope, &ucx->log);
    ucs_status_t status = ucp_worker_create(ucx->context, &worker_params, &path->worker);
    if (status == UCS_OK) {
        status = ucp_ep_create(path->worker, &ep_params, &path->ep);
        if (status != UCS_OK) {
            ucp_worker_destroy(path->worker);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (status == UCS_OK) {
        *path_p = path;
        return KVF_OK;
    }
    kvf_free(ucx->alloc, path);
    bool apart = status == UCS_ERR_UNREACHABLE; /* nothing was dialled: no transport in common */
    return kvf_fail(detail, apart ? KVF_ERR_INCOMPATIBLE : kvf_ucx_status(status),
                    "ucx cannot reach the peer over tls \"%s\": %s%s%s%s", ucx->tls,
                    apart ? "give both nodes a transport in common (ucx.tls, ucx.devices); " : "",
                    ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
}

void kvf_ucx_path_close(kvf_ucx_path_t *path) {
    if (path->worker == NULL) {
        return;
    }
    break_path(path, "disconnected");
    /* No progress between here and the end of the worker: see the head of the header. */
    ucp_worker_destroy(path->worker);
    path->worker = NULL;
    for (uint32_t i = 0; i < PATH_WINDOWS; i++) {
        job_t *job = &path->jobs[i];
        if (job->state == JOB_SENT) { /* what UCX did not report ended with the worker */
            job->status = KVF_ERR_PEER_LOST;
            job->n_busy = 0;
            job_settle(job);
        }
    }
}

void kvf_ucx_path_destroy(kvf_ucx_path_t *path) {
    if (path != NULL) {
        kvf_free(path->ucx->alloc, path);
    }
}

const char *kvf_ucx_path_broken(const kvf_ucx_path_t *path) {
    return path->broken ? path->why : NULL;
}

ucp_worker_h kvf_ucx_path_worker(const kvf_ucx_path_t *path) {
    return path->worker;
}

static bool same_transfer(const job_t *a, const job_t *b) {
    return a->window->transfer.counter == b->window->transfer.counter &&
           kvf_incarnation_equal(&a->window->transfer.receiver, &b->window->transfer.receiver);
}

/* Transfers take turns, a window in each round: behind the windows of others that are of the same
 * round, before those of later ones. Who is new has not missed a round. */
static void line_up(kvf_ucx_path_t *path, job_t *job) {
    job_t *other;
    job->round = path->waiting == NULL ? 0 : path->waiting->round;
    DL_FOREACH(path->waiting, other) {
        if (same_transfer(other, job)) {
            job->round = other->round + 1;
        }
    }
    DL_FOREACH(path->waiting, other) {
        if (other->round > job->round) {
            break;
        }
    }
    DL_PREPEND_ELEM(path->waiting, other, job); /* at the end if there is none */
}

kvf_status_t kvf_ucx_path_post(kvf_ucx_path_t *path, kvf_window_t *window) {
    job_t *job = path->free_jobs;
    if (path->broken) {
        return KVF_ERR_PEER_LOST;
    }
    if (job == NULL) {
        return KVF_ERR_AGAIN;
    }
    DL_DELETE(path->free_jobs, job);
    *job = (job_t){.window = window, .path = path, .state = JOB_WAITING};
    path->n_jobs++;
    line_up(path, job);
    if (window->n_pieces == 0) {
        job_stop(job);
    }
    return KVF_OK;
}

bool kvf_ucx_path_can_send(const kvf_ucx_path_t *path) {
    return path->waiting != NULL && path->free_ops != NULL && path->busy_bytes < PATH_BYTES;
}

uint64_t kvf_ucx_path_send(kvf_ucx_path_t *path) {
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = path->free_ops,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    job_t *job = path->waiting;
    const kvf_window_t *window = job->window;
    kvf_piece_t *piece = &window->pieces[job->piece_idx];
    uint64_t off = job->piece_off;
    uint64_t left = piece->bytes - off;
    const kvf_chunk_t chunk = {
        .transfer = window->transfer,
        .group_idx = piece->group_idx,
        .slot = piece->slot,
        .ordinal = piece->ordinal,
        .generation = piece->generation,
        .grant_key = window->grant_key,
        .offset = piece->offset + off,
        .bytes = left < KVF_UCX_CHUNK_BYTES ? left : KVF_UCX_CHUNK_BYTES,
    };
    op_t *op = path->free_ops;

    if (off == 0 && window->digests && piece->digest == 0) {
        piece->digest = kvf_digest(piece->source, piece->bytes);
    }
    LL_DELETE(path->free_ops, op);
    op->job = job;
    op->bytes = chunk.bytes;
    path->busy_bytes += chunk.bytes;
    kvf_chunk_encode(&chunk, op->header);
    job->n_busy++;
    job->piece_off += chunk.bytes;
    if (job->piece_off == piece->bytes) {
        job->piece_off = 0;
        job->piece_idx++;
    }
    void *request = ucp_am_send_nbx(path->ep, KVF_UCX_AM_ID, op->header, sizeof(op->header),
                                    piece->source + off, (size_t)chunk.bytes, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        op_done(op, UCS_PTR_STATUS(request));
    }
    if (job->state == JOB_WAITING && job->piece_idx == window->n_pieces) {
        job_stop(job);
    }
    return chunk.bytes;
}

bool kvf_ucx_path_has_done(const kvf_ucx_path_t *path) {
    return path->done != NULL;
}

kvf_window_t *kvf_ucx_path_take(kvf_ucx_path_t *path, kvf_status_t *status_p) {
    job_t *job = path->done;
    if (job == NULL) {
        return NULL;
    }
    DL_DELETE(path->done, job);
    job->state = JOB_FREE;
    DL_APPEND(path->free_jobs, job);
    path->n_jobs--;
    *status_p = job->status;
    return job->window;
}

bool kvf_ucx_path_idle(const kvf_ucx_path_t *path) {
    return path->n_jobs == 0;
}
