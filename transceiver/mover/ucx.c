/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_address.h"
#include "transceiver/mover/ucx_context.h"

#include "kernels/digest.h"
#include "kvmgr/base/clock.h"

#include <stdio.h>
#include <string.h>

#define HASH_FUNCTION HASH_FNV
#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(m->alloc, bytes)
#define uthash_free(ptr, bytes) kvf_free(m->alloc, ptr)
#define uthash_nonfatal_oom(peer) (peer)->unlisted = true
#include <uthash.h>
#include <utlist.h>

#define AM_ID 0
/* Fits one tcp segment with its header, so the receiver need not put it together. A multiple of a
 * digest leaf. */
#define CHUNK_BYTES (UINT64_C(256) << 10)
#define PEER_OPS 32U                   /* chunks of a peer that UCX holds at once */
#define PEER_WINDOWS 64U               /* posted windows of a peer */
#define MAX_PEERS 4096U                /* paths, those that are closing included */
#define TURN_ROUNDS 64U                /* of one progress call */
#define TURN_BYTES (UINT64_C(2) << 20) /* sent, and landed, in one progress call */
#define END_ROUNDS 1000U               /* to let closing paths finish in destroy */

struct peer;

typedef enum job_state { JOB_FREE, JOB_WAITING, JOB_SENT, JOB_DONE } job_state_t;

/* A posted window. */
typedef struct job {
    kvf_window_t *window;
    struct peer *peer;
    struct job *prev, *next; /* of free_jobs, waiting or done; of none while JOB_SENT */
    uint64_t piece_off;      /* the next chunk begins here */
    uint32_t piece_idx;
    uint32_t n_busy; /* chunks that UCX holds */
    job_state_t state;
    kvf_status_t status;
} job_t;

/* A chunk that UCX holds. UCX reads the header until then. */
typedef struct op {
    uint8_t header[KVF_CHUNK_HEADER_BYTES];
    job_t *job;
    struct op *next;
} op_t;

typedef struct mover {
    kvf_mover_t base;
    kvf_ucx_t *ucx;
    const kvf_alloc_t *alloc;
    kvf_mover_sink_t sink;
    ucp_worker_h worker;
    int fd;
    kvf_ucx_release_t release; /* of UCX */
    bool ending;
    struct peer *by_number; /* connected, broken ones included */
    struct peer *troubled;  /* broken or disconnected */
    struct peer *sending;   /* with waiting jobs, in the order of their turns */
    job_t *done;            /* to be told */
    uint32_t n_peers;
    uint64_t turn_bytes; /* landed in this progress call */
    uint64_t n_refused;
} mover_t;

typedef struct peer {
    uint64_t number;
    mover_t *mover;
    ucp_ep_h ep;     /* NULL once closed */
    void *close_req; /* a close that has not finished */
    bool broken;     /* takes no more chunks, and is on troubled */
    bool untold;     /* broken, and the sink does not know */
    bool gone;       /* disconnected */
    bool unlisted;   /* no memory to list it in by_number */
    char why[160];
    job_t *free_jobs, *waiting;
    op_t *free_ops;
    uint32_t n_jobs;                          /* posted and not told */
    struct peer *turn_prev, *turn_next;       /* of sending */
    struct peer *trouble_prev, *trouble_next; /* of troubled */
    UT_hash_handle hh;
    job_t jobs[PEER_WINDOWS];
    op_t ops[PEER_OPS];
} peer_t;

static mover_t *mover_of(kvf_mover_t *base) {
    return (mover_t *)base;
}

/* ---- windows --------------------------------------------------------------------------------- */

static void job_settle(job_t *job) {
    if (job->state == JOB_SENT && job->n_busy == 0) {
        job->state = JOB_DONE;
        DL_APPEND(job->peer->mover->done, job);
    }
}

/* Nothing more of it will be sent. */
static void job_stop(job_t *job) {
    peer_t *peer = job->peer;
    DL_DELETE(peer->waiting, job);
    if (peer->waiting == NULL) {
        DL_DELETE2(peer->mover->sending, peer, turn_prev, turn_next);
    }
    job->state = JOB_SENT;
    job_settle(job);
}

/* Only marks: UCX may be calling us, so the endpoint is closed later, by tend. */
static void break_path(peer_t *peer, const char *why) {
    if (peer->broken) {
        return;
    }
    peer->broken = true;
    peer->untold = !peer->gone;
    (void)snprintf(peer->why, sizeof(peer->why), "%s", why);
    DL_APPEND2(peer->mover->troubled, peer, trouble_prev, trouble_next);
    while (peer->waiting != NULL) {
        peer->waiting->status = KVF_ERR_PEER_LOST;
        job_stop(peer->waiting);
    }
}

static void op_done(op_t *op, ucs_status_t status) {
    job_t *job = op->job;
    LL_PREPEND(job->peer->free_ops, op);
    job->n_busy--;
    if (status != UCS_OK) {
        if (job->status == KVF_OK) {
            bool path = kvf_ucx_status(status) == KVF_ERR_PEER_LOST;
            job->status = path ? KVF_ERR_PEER_LOST : KVF_ERR_IO;
        }
        break_path(job->peer, ucs_status_string(status));
    }
    job_settle(job);
}

static void on_sent(void *request, ucs_status_t status, void *op) {
    ucp_request_free(request);
    op_done(op, status);
}

/* Send the next chunk of the peer's first waiting window. */
static uint64_t send_chunk(peer_t *peer) {
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = peer->free_ops,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    job_t *job = peer->waiting;
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
        .bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES,
    };
    op_t *op = peer->free_ops;

    if (off == 0) {
        piece->digest = kvf_digest(piece->source, piece->bytes);
    }
    LL_DELETE(peer->free_ops, op);
    op->job = job;
    kvf_chunk_encode(&chunk, op->header);
    job->n_busy++;
    job->piece_off += chunk.bytes;
    if (job->piece_off == piece->bytes) {
        job->piece_off = 0;
        job->piece_idx++;
    }
    void *request = ucp_am_send_nbx(peer->ep, AM_ID, op->header, sizeof(op->header),
                                    piece->source + off, (size_t)chunk.bytes, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        op_done(op, UCS_PTR_STATUS(request));
    }
    if (job->state == JOB_WAITING && job->piece_idx == window->n_pieces) {
        job_stop(job);
    }
    return chunk.bytes;
}

/* The next peer that can send; its turn is over when it has sent a chunk's worth. */
static peer_t *next_turn(const mover_t *m) {
    peer_t *peer;
    DL_FOREACH2(m->sending, peer, turn_next) {
        if (peer->free_ops != NULL) {
            return peer;
        }
    }
    return NULL;
}

static unsigned send_some(mover_t *m) {
    unsigned n = 0;
    uint64_t sent = 0;
    peer_t *peer;
    while (sent < TURN_BYTES && (peer = next_turn(m)) != NULL) {
        uint64_t turn = 0;
        DL_DELETE2(m->sending, peer, turn_prev, turn_next);
        DL_APPEND2(m->sending, peer, turn_prev, turn_next);
        while (turn < CHUNK_BYTES && peer->waiting != NULL && peer->free_ops != NULL) {
            turn += send_chunk(peer);
            n++;
        }
        sent += turn;
    }
    return n;
}

static kvf_status_t ucx_post(kvf_mover_t *base, kvf_window_t *window) {
    mover_t *m = mover_of(base);
    peer_t *peer;
    HASH_FIND(hh, m->by_number, &window->peer, sizeof(window->peer), peer);
    if (peer == NULL || peer->broken) {
        return KVF_ERR_PEER_LOST;
    }
    job_t *job = peer->free_jobs;
    if (job == NULL) {
        return KVF_ERR_AGAIN;
    }
    DL_DELETE(peer->free_jobs, job);
    *job = (job_t){.window = window, .peer = peer, .state = JOB_WAITING};
    window->priv = job;
    peer->n_jobs++;
    if (window->n_pieces == 0) {
        job->state = JOB_SENT;
        job_settle(job);
        return KVF_OK;
    }
    if (peer->waiting == NULL) {
        DL_APPEND2(m->sending, peer, turn_prev, turn_next);
    }
    DL_APPEND(peer->waiting, job);
    return KVF_OK;
}

/* ---- paths ----------------------------------------------------------------------------------- */

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    break_path(arg, ucs_status_string(status));
}

/* Close what is broken. Never from inside a call of UCX. */
static void tend(mover_t *m) {
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    peer_t *peer;
    DL_FOREACH2(m->troubled, peer, trouble_next) {
        if (peer->ep != NULL) {
            void *request = ucp_ep_close_nbx(peer->ep, &force);
            peer->ep = NULL;
            peer->close_req = UCS_PTR_IS_PTR(request) ? request : NULL;
        }
        if (peer->close_req != NULL &&
            ucp_request_check_status(peer->close_req) != UCS_INPROGRESS) {
            ucp_request_free(peer->close_req);
            peer->close_req = NULL;
        }
    }
}

/* Tell the sink what ended. It may post, connect and disconnect. */
static unsigned tell(mover_t *m) {
    unsigned n = 0;
    job_t *job;
    peer_t *peer;
    while ((job = m->done) != NULL) {
        kvf_window_t *window = job->window;
        peer = job->peer;
        DL_DELETE(m->done, job);
        job->state = JOB_FREE;
        DL_APPEND(peer->free_jobs, job);
        peer->n_jobs--;
        window->priv = NULL;
        m->sink.moved(m->sink.ctx, window, job->status);
        n++;
    }
    do {
        DL_FOREACH2(m->troubled, peer, trouble_next) {
            if (peer->untold) {
                peer->untold = false;
                m->sink.broken(m->sink.ctx, peer->number, peer->why);
                n++;
                break;
            }
        }
    } while (peer != NULL);
    return n;
}

static void reap(mover_t *m) {
    peer_t *peer, *next;
    DL_FOREACH_SAFE2(m->troubled, peer, next, trouble_next) {
        if (peer->gone && peer->ep == NULL && peer->close_req == NULL && peer->n_jobs == 0) {
            DL_DELETE2(m->troubled, peer, trouble_prev, trouble_next);
            m->n_peers--;
            kvf_free(m->alloc, peer);
        }
    }
}

static kvf_status_t ucx_connect(kvf_mover_t *base, uint64_t number, const void *address,
                                size_t bytes, kvf_detail_t *detail) {
    mover_t *m = mover_of(base);
    _Alignas(max_align_t) uint8_t aligned[KVF_UCX_ADDRESS_BYTES] = {0};
    const void *inside;
    size_t inside_bytes;
    kvf_ucx_scope_t scope;
    peer_t *peer;

    HASH_FIND(hh, m->by_number, &number, sizeof(number), peer);
    if (number == 0 || peer != NULL || m->ending) {
        return kvf_fail(detail, KVF_ERR_INVALID, "peer number %llu is in use",
                        (unsigned long long)number);
    }
    kvf_status_t result =
        kvf_ucx_address_unwrap(m->release, address, bytes, &inside, &inside_bytes, detail);
    if (result != KVF_OK) {
        return result;
    }
    memcpy(aligned, inside, inside_bytes);
    if (m->n_peers == MAX_PEERS) {
        return kvf_fail(detail, KVF_ERR_AGAIN, "%u paths are open or closing", MAX_PEERS);
    }
    peer = kvf_calloc(m->alloc, 1, sizeof(*peer));
    if (peer == NULL) {
        goto err_no_memory;
    }
    peer->number = number;
    peer->mover = m;
    for (uint32_t i = 0; i < PEER_WINDOWS; i++) {
        DL_APPEND(peer->free_jobs, &peer->jobs[i]);
    }
    for (uint32_t i = 0; i < PEER_OPS; i++) {
        LL_PREPEND(peer->free_ops, &peer->ops[i]);
    }
    HASH_ADD(hh, m->by_number, number, sizeof(peer->number), peer);
    if (peer->unlisted) {
        goto err_free;
    }

    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)aligned,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_error, peer},
    };
    kvf_ucx_scope_enter(&scope, &m->ucx->log);
    ucs_status_t status = ucp_ep_create(m->worker, &params, &peer->ep);
    kvf_ucx_scope_leave(&scope);
    if (status != UCS_OK) {
        HASH_DELETE(hh, m->by_number, peer);
        kvf_free(m->alloc, peer);
        bool apart =
            status == UCS_ERR_UNREACHABLE; /* nothing was dialled: no transport in common */
        return kvf_fail(detail, apart ? KVF_ERR_INCOMPATIBLE : kvf_ucx_status(status),
                        "ucx cannot reach the peer over tls \"%s\": %s%s%s%s", m->ucx->tls,
                        apart ? "give both nodes a transport in common (ucx.tls, ucx.devices); "
                              : "",
                        ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
    }
    m->n_peers++;
    return KVF_OK;

err_free:
    kvf_free(m->alloc, peer);
err_no_memory:
    return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
}

static void leave_peer(mover_t *m, peer_t *peer) {
    HASH_DELETE(hh, m->by_number, peer);
    peer->gone = true;
    peer->untold = false;
    break_path(peer, "disconnected");
}

static void ucx_disconnect(kvf_mover_t *base, uint64_t number) {
    mover_t *m = mover_of(base);
    peer_t *peer;
    HASH_FIND(hh, m->by_number, &number, sizeof(number), peer);
    if (peer != NULL) {
        leave_peer(m, peer);
    }
}

/* ---- the worker ------------------------------------------------------------------------------ */

static ucs_status_t on_chunk(void *arg, const void *header, size_t header_bytes, void *data,
                             size_t bytes, const ucp_am_recv_param_t *param) {
    mover_t *m = arg;
    kvf_chunk_t chunk;
    if (m->ending) {
        return UCS_OK;
    }
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ||
        kvf_chunk_decode(header, header_bytes, &chunk) != KVF_OK || bytes == 0 ||
        chunk.bytes != bytes) {
        if (m->n_refused++ == 0) {
            kvf_log(&m->ucx->log, KVF_LOG_WARN,
                    "ucx: refused an active message that is no chunk, more are only counted");
        }
        return UCS_OK;
    }
    m->turn_bytes += bytes;
    m->sink.land(m->sink.ctx, &chunk, data);
    return UCS_OK;
}

static unsigned ucx_progress(kvf_mover_t *base) {
    mover_t *m = mover_of(base);
    kvf_ucx_scope_t scope;
    unsigned n = 0;
    kvf_ucx_scope_enter(&scope, &m->ucx->log);
    m->turn_bytes = 0;
    n += send_some(m);
    for (uint32_t i = 0; i < TURN_ROUNDS && m->turn_bytes < TURN_BYTES; i++) {
        unsigned did = ucp_worker_progress(m->worker);
        if (did == 0) {
            break;
        }
        n += did;
    }
    tend(m);
    n += tell(m);
    reap(m);
    kvf_ucx_scope_leave(&scope);
    return n;
}

static int ucx_fd(kvf_mover_t *base) {
    return mover_of(base)->fd;
}

static bool ucx_arm(kvf_mover_t *base) {
    const mover_t *m = mover_of(base);
    const peer_t *peer;
    if (m->done != NULL || next_turn(m) != NULL) {
        return false;
    }
    DL_FOREACH2(m->troubled, peer, trouble_next) {
        if (peer->ep != NULL || peer->untold) {
            return false;
        }
    }
    return ucp_worker_arm(m->worker) == UCS_OK;
}

static uint64_t ucx_max_sleep_us(kvf_mover_t *base) {
    /* 1.22 loses none, 1.13 does over shared memory; nobody looked at those between. */
    return mover_of(base)->release.minor < 22 ? 10000 : KVF_NEVER;
}

static kvf_status_t ucx_address(kvf_mover_t *base, void *buf, size_t cap, size_t *bytes_p) {
    const mover_t *m = mover_of(base);
    ucp_address_t *address;
    size_t bytes;
    ucs_status_t status = ucp_worker_get_address(m->worker, &address, &bytes);
    if (status != UCS_OK) {
        return kvf_ucx_status(status);
    }
    kvf_status_t result = kvf_ucx_address_wrap(m->release, address, bytes, buf, cap, bytes_p);
    ucp_worker_release_address(m->worker, address);
    return result;
}

static bool all_quiet(const mover_t *m) {
    const peer_t *peer;
    DL_FOREACH2(m->troubled, peer, trouble_next) {
        if (peer->close_req != NULL) {
            return false;
        }
        for (uint32_t i = 0; i < PEER_WINDOWS; i++) {
            if (peer->jobs[i].n_busy > 0) {
                return false;
            }
        }
    }
    return true;
}

static void ucx_destroy(kvf_mover_t *base) {
    mover_t *m = mover_of(base);
    kvf_ucx_scope_t scope;
    peer_t *peer, *next;
    if (m == NULL) {
        return;
    }
    kvf_ucx_scope_enter(&scope, &m->ucx->log);
    m->ending = true;
    HASH_ITER(hh, m->by_number, peer, next) {
        leave_peer(m, peer);
    }
    tend(m);
    for (uint32_t i = 0; i < END_ROUNDS && !all_quiet(m); i++) {
        (void)ucp_worker_progress(m->worker);
        tend(m);
    }
    ucp_worker_destroy(m->worker);
    /* Whatever UCX did not report ended with the worker. */
    DL_FOREACH2(m->troubled, peer, trouble_next) {
        for (uint32_t i = 0; i < PEER_WINDOWS; i++) {
            job_t *job = &peer->jobs[i];
            if (job->state == JOB_SENT) {
                job->status = KVF_ERR_PEER_LOST;
                job->n_busy = 0;
                job_settle(job);
            }
        }
        peer->close_req = NULL;
    }
    (void)tell(m);
    reap(m);
    kvf_ucx_scope_leave(&scope);
    kvf_free(m->alloc, m);
}

uint64_t kvf_mover_ucx_refused(const kvf_mover_t *mover) {
    return ((const mover_t *)mover)->n_refused;
}

static const kvf_mover_ops_t ucx_ops = {
    .name = "ucx",
    .checked = true,
    .destroy = ucx_destroy,
    .address = ucx_address,
    .connect = ucx_connect,
    .disconnect = ucx_disconnect,
    .post = ucx_post,
    .progress = ucx_progress,
    .fd = ucx_fd,
    .arm = ucx_arm,
    .max_sleep_us = ucx_max_sleep_us,
};

kvf_status_t kvf_mover_ucx_create(kvf_ucx_t *ucx, const kvf_mover_sink_t *sink,
                                  kvf_mover_t **mover_p, kvf_detail_t *detail) {
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
    kvf_ucx_scope_t scope;
    unsigned release;
    ucs_status_t status;

    mover_t *m = kvf_calloc(ucx->alloc, 1, sizeof(*m));
    if (m == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the ucx mover");
    }
    m->base.ops = &ucx_ops;
    m->ucx = ucx;
    m->alloc = ucx->alloc;
    m->sink = *sink;
    ucp_get_version(&m->release.major, &m->release.minor, &release);

    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_chunk,
        .arg = m,
    };
    kvf_ucx_scope_enter(&scope, &ucx->log);
    status = ucp_worker_create(ucx->context, &params, &m->worker);
    if (status != UCS_OK) {
        goto err_free;
    }
    status = ucp_worker_query(m->worker, &attr);
    if (status == UCS_OK && attr.max_am_header < KVF_CHUNK_HEADER_BYTES) {
        status = UCS_ERR_UNSUPPORTED;
    }
    if (status == UCS_OK) {
        status = ucp_worker_get_efd(m->worker, &m->fd);
    }
    if (status == UCS_OK) {
        status = ucp_worker_set_am_recv_handler(m->worker, &handler);
    }
    if (status != UCS_OK) {
        goto err_worker;
    }
    kvf_ucx_scope_leave(&scope);
    *mover_p = &m->base;
    return KVF_OK;

err_worker:
    ucp_worker_destroy(m->worker);
err_free:
    kvf_ucx_scope_leave(&scope);
    kvf_free(ucx->alloc, m);
    return kvf_fail(detail, kvf_ucx_status(status), "ucx makes no worker over tls \"%s\": %s%s%s",
                    ucx->tls, ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
}
