/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_address.h"
#include "transceiver/mover/ucx_path.h"

#include "kvmgr/base/clock.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define HASH_FUNCTION HASH_FNV
#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(m->alloc, bytes)
#define uthash_free(ptr, bytes) kvf_free(m->alloc, ptr)
#define uthash_nonfatal_oom(peer) (peer)->unlisted = true
#include <uthash.h>
#include <utlist.h>

#define MAX_PEERS 4096U                  /* paths, those that are ending included */
#define TURN_ROUNDS 64U                  /* of one progress call */
#define TURN_BYTES (UINT64_C(256) << 10) /* sent, and landed, in one progress call */

struct peer;

/* One worker receives from all peers; each path has another one to send. */
typedef struct mover {
    kvf_mover_t base;
    kvf_ucx_t *ucx;
    const kvf_alloc_t *alloc;
    kvf_mover_sink_t sink;
    ucp_worker_h worker;
    int fd;                    /* readable when a worker's is */
    kvf_ucx_release_t release; /* of UCX */
    bool ending;
    struct peer *by_number; /* connected, broken ones included */
    struct peer *peers;     /* all, in the order of their turns */
    uint32_t n_peers;
    uint64_t turn_bytes; /* landed in this progress call */
    uint64_t n_refused;
} mover_t;

typedef struct peer {
    uint64_t number;
    kvf_ucx_path_t *path;
    bool told;     /* the sink knows that the path is broken, or need not */
    bool gone;     /* disconnected */
    bool unlisted; /* no memory to list it in by_number */
    struct peer *prev, *next;
    UT_hash_handle hh;
} peer_t;

static mover_t *mover_of(kvf_mover_t *base) {
    return (mover_t *)base;
}

static peer_t *find_peer(mover_t *m, uint64_t number) {
    peer_t *peer;
    HASH_FIND(hh, m->by_number, &number, sizeof(number), peer);
    return peer;
}

/* ---- sending --------------------------------------------------------------------------------- */

static kvf_status_t ucx_post(kvf_mover_t *base, kvf_window_t *window) {
    peer_t *peer = find_peer(mover_of(base), window->peer);
    return peer == NULL ? KVF_ERR_PEER_LOST : kvf_ucx_path_post(peer->path, window);
}

/* The next peer that can send; its turn is over when it has sent a chunk's worth. */
static peer_t *next_turn(const mover_t *m) {
    peer_t *peer;
    DL_FOREACH(m->peers, peer) {
        if (kvf_ucx_path_can_send(peer->path)) {
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
        DL_DELETE(m->peers, peer);
        DL_APPEND(m->peers, peer);
        while (turn < KVF_UCX_CHUNK_BYTES && kvf_ucx_path_can_send(peer->path)) {
            turn += kvf_ucx_path_send(peer->path);
            n++;
        }
        sent += turn;
    }
    return n;
}

/* ---- paths ----------------------------------------------------------------------------------- */

static bool watch(const mover_t *m, ucp_worker_h worker) {
    struct epoll_event event = {.events = EPOLLIN};
    int fd;
    return ucp_worker_get_efd(worker, &fd) == UCS_OK &&
           epoll_ctl(m->fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* End what is broken or given up. A descriptor leaves m->fd when it is closed. */
static void tend(mover_t *m) {
    peer_t *peer;
    DL_FOREACH(m->peers, peer) {
        if (peer->gone || kvf_ucx_path_broken(peer->path) != NULL) {
            kvf_ucx_path_close(peer->path);
        }
    }
}

/* A peer about which the sink must be told something. */
static peer_t *next_news(const mover_t *m) {
    peer_t *peer;
    DL_FOREACH(m->peers, peer) {
        if (kvf_ucx_path_has_done(peer->path) ||
            (!peer->told && kvf_ucx_path_broken(peer->path) != NULL)) {
            return peer;
        }
    }
    return NULL;
}

/* Tell the sink what ended: windows before the path that carried them. It may post, connect and
 * disconnect. */
static unsigned tell(mover_t *m) {
    unsigned n = 0;
    for (peer_t *peer; (peer = next_news(m)) != NULL; n++) {
        kvf_status_t status;
        kvf_window_t *window = kvf_ucx_path_take(peer->path, &status);
        if (window != NULL) {
            m->sink.moved(m->sink.ctx, window, status);
        } else {
            peer->told = true;
            m->sink.broken(m->sink.ctx, peer->number, kvf_ucx_path_broken(peer->path));
        }
    }
    return n;
}

static void reap(mover_t *m) {
    peer_t *peer, *next;
    DL_FOREACH_SAFE(m->peers, peer, next) {
        if (peer->gone && kvf_ucx_path_worker(peer->path) == NULL &&
            kvf_ucx_path_idle(peer->path)) {
            DL_DELETE(m->peers, peer);
            m->n_peers--;
            kvf_ucx_path_destroy(peer->path);
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

    if (number == 0 || find_peer(m, number) != NULL || m->ending) {
        return kvf_fail(detail, KVF_ERR_INVALID, "peer number %llu is in use",
                        (unsigned long long)number);
    }
    kvf_status_t status =
        kvf_ucx_address_unwrap(m->release, address, bytes, &inside, &inside_bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    memcpy(aligned, inside, inside_bytes);
    if (m->n_peers == MAX_PEERS) {
        return kvf_fail(detail, KVF_ERR_AGAIN, "%u paths are open or closing", MAX_PEERS);
    }
    peer_t *peer = kvf_calloc(m->alloc, 1, sizeof(*peer));
    if (peer == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    peer->number = number;
    status = kvf_ucx_path_create(m->ucx, (const ucp_address_t *)aligned, &peer->path, detail);
    if (status != KVF_OK) {
        goto err_free;
    }
    if (!watch(m, kvf_ucx_path_worker(peer->path))) {
        status =
            kvf_fail(detail, KVF_ERR_IO, "a path to a peer cannot be polled: %s", strerror(errno));
        goto err_path;
    }
    HASH_ADD(hh, m->by_number, number, sizeof(peer->number), peer);
    if (peer->unlisted) {
        status = kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
        goto err_path;
    }
    DL_APPEND(m->peers, peer);
    m->n_peers++;
    return KVF_OK;

err_path:
    kvf_ucx_path_close(peer->path);
    kvf_ucx_path_destroy(peer->path);
err_free:
    kvf_free(m->alloc, peer);
    return status;
}

static void leave_peer(mover_t *m, peer_t *peer) {
    HASH_DELETE(hh, m->by_number, peer);
    peer->gone = true;
    peer->told = true;
}

static void ucx_disconnect(kvf_mover_t *base, uint64_t number) {
    mover_t *m = mover_of(base);
    peer_t *peer = find_peer(m, number);
    if (peer != NULL) {
        leave_peer(m, peer);
    }
}

/* ---- receiving ------------------------------------------------------------------------------- */

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

/* Advance every worker. */
static unsigned advance(mover_t *m) {
    unsigned n = ucp_worker_progress(m->worker);
    peer_t *peer;
    DL_FOREACH(m->peers, peer) {
        ucp_worker_h worker = kvf_ucx_path_worker(peer->path);
        n += worker == NULL ? 0 : ucp_worker_progress(worker);
    }
    return n;
}

static unsigned ucx_progress(kvf_mover_t *base) {
    mover_t *m = mover_of(base);
    kvf_ucx_scope_t scope;
    unsigned n = 0;
    kvf_ucx_scope_enter(&scope, &m->ucx->log);
    m->turn_bytes = 0;
    n += send_some(m);
    for (uint32_t i = 0; i < TURN_ROUNDS && m->turn_bytes < TURN_BYTES; i++) {
        unsigned did = advance(m);
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
    if (next_turn(m) != NULL || next_news(m) != NULL) {
        return false;
    }
    DL_FOREACH(m->peers, peer) {
        ucp_worker_h worker = kvf_ucx_path_worker(peer->path);
        if (worker != NULL && (peer->gone || ucp_worker_arm(worker) != UCS_OK)) {
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
    (void)tell(m);
    reap(m);
    ucp_worker_destroy(m->worker);
    (void)close(m->fd);
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
        .id = KVF_UCX_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_chunk,
        .arg = m,
    };
    kvf_ucx_scope_enter(&scope, &ucx->log);
    status = ucp_worker_create(ucx->context, &params, &m->worker);
    if (status != UCS_OK) {
        goto err_free;
    }
    m->fd = epoll_create1(EPOLL_CLOEXEC);
    status = ucp_worker_query(m->worker, &attr);
    if (status == UCS_OK && attr.max_am_header < KVF_CHUNK_HEADER_BYTES) {
        status = UCS_ERR_UNSUPPORTED;
    }
    if (status == UCS_OK) {
        status = ucp_worker_set_am_recv_handler(m->worker, &handler);
    }
    if (status == UCS_OK && (m->fd < 0 || !watch(m, m->worker))) {
        status = UCS_ERR_IO_ERROR;
    }
    if (status != UCS_OK) {
        goto err_worker;
    }
    kvf_ucx_scope_leave(&scope);
    *mover_p = &m->base;
    return KVF_OK;

err_worker:
    if (m->fd >= 0) {
        (void)close(m->fd);
    }
    ucp_worker_destroy(m->worker);
err_free:
    kvf_ucx_scope_leave(&scope);
    kvf_free(ucx->alloc, m);
    return kvf_fail(detail, kvf_ucx_status(status), "ucx makes no worker over tls \"%s\": %s%s%s",
                    ucx->tls, ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
}
