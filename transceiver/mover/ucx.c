/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_address.h"
#include "transceiver/mover/ucx_path.h"

#include "kvmgr/base/clock.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <utlist.h>

#define TURN_ROUNDS 64U                  /* of one progress call */
#define TURN_BYTES (UINT64_C(256) << 10) /* sent, and landed, in one progress call */

/* One worker receives from all peers; each path has another one to send. */
typedef struct mover {
    kvf_mover_t base;
    kvf_ucx_t *ucx;
    ucp_worker_h worker;
    int fd;                    /* readable when a worker's is */
    kvf_ucx_release_t release; /* of UCX */
    kvf_routes_t routes;
    uint64_t turn_bytes; /* landed in this progress call */
    uint64_t n_refused;
} mover_t;

static const kvf_route_ops_t path_ops = {
    .can_send = kvf_ucx_path_can_send,
    .send = kvf_ucx_path_send,
    .close = kvf_ucx_path_close,
    .destroy = kvf_ucx_path_destroy,
};

static mover_t *mover_of(kvf_mover_t *base) {
    return (mover_t *)base;
}

static kvf_status_t ucx_post(kvf_mover_t *base, kvf_window_t *window) {
    return kvf_routes_post(&mover_of(base)->routes, window);
}

/* ---- paths ----------------------------------------------------------------------------------- */

static bool watch(const mover_t *m, ucp_worker_h worker) {
    struct epoll_event event = {.events = EPOLLIN};
    int fd;
    return ucp_worker_get_efd(worker, &fd) == UCS_OK &&
           epoll_ctl(m->fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static kvf_status_t ucx_connect(kvf_mover_t *base, uint64_t number, const void *address,
                                size_t bytes, kvf_detail_t *detail) {
    mover_t *m = mover_of(base);
    _Alignas(max_align_t) uint8_t aligned[KVF_UCX_ADDRESS_BYTES] = {0};
    const void *inside;
    size_t inside_bytes;

    kvf_route_t *route;
    kvf_status_t status = kvf_routes_check(&m->routes, number, detail);
    if (status == KVF_OK) {
        status = kvf_ucx_address_unwrap(m->release, address, bytes, &inside, &inside_bytes, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    memcpy(aligned, inside, inside_bytes);
    status = kvf_ucx_path_create(m->ucx, (const ucp_address_t *)aligned, &route, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (!watch(m, kvf_ucx_path_worker(route))) {
        status =
            kvf_fail(detail, KVF_ERR_IO, "a path to a peer cannot be polled: %s", strerror(errno));
    } else {
        status = kvf_routes_add(&m->routes, route, number, detail);
    }
    if (status != KVF_OK) {
        kvf_ucx_path_close(route); /* its descriptor leaves m->fd when it is closed */
        kvf_ucx_path_destroy(route);
    }
    return status;
}

static void ucx_disconnect(kvf_mover_t *base, uint64_t number) {
    kvf_routes_leave(&mover_of(base)->routes, number);
}

/* ---- receiving ------------------------------------------------------------------------------- */

static ucs_status_t on_chunk(void *arg, const void *header, size_t header_bytes, void *data,
                             size_t bytes, const ucp_am_recv_param_t *param) {
    mover_t *m = arg;
    kvf_chunk_t chunk;
    if (m->routes.ending) {
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
    kvf_mover_land(&m->routes.sink, &chunk, data);
    return UCS_OK;
}

/* Advance every worker. */
static unsigned advance(mover_t *m) {
    unsigned n = ucp_worker_progress(m->worker);
    const kvf_route_t *route;
    DL_FOREACH(m->routes.all, route) {
        ucp_worker_h worker = kvf_ucx_path_worker(route);
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
    n += kvf_routes_send(&m->routes, &path_ops, KVF_UCX_CHUNK_BYTES, TURN_BYTES);
    for (uint32_t i = 0; i < TURN_ROUNDS && m->turn_bytes < TURN_BYTES; i++) {
        unsigned did = advance(m);
        if (did == 0) {
            break;
        }
        n += did;
    }
    n += kvf_routes_tend(&m->routes, &path_ops);
    kvf_ucx_scope_leave(&scope);
    return n;
}

static int ucx_fd(kvf_mover_t *base) {
    return mover_of(base)->fd;
}

static bool ucx_arm(kvf_mover_t *base) {
    const mover_t *m = mover_of(base);
    const kvf_route_t *route;
    if (kvf_routes_busy(&m->routes, &path_ops)) {
        return false;
    }
    DL_FOREACH(m->routes.all, route) {
        ucp_worker_h worker = kvf_ucx_path_worker(route);
        if (worker != NULL && ucp_worker_arm(worker) != UCS_OK) {
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
    if (m == NULL) {
        return;
    }
    kvf_ucx_scope_enter(&scope, &m->ucx->log);
    kvf_routes_end(&m->routes, &path_ops);
    ucp_worker_destroy(m->worker);
    (void)close(m->fd);
    kvf_ucx_scope_leave(&scope);
    kvf_free(m->ucx->alloc, m);
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
    m->routes.alloc = ucx->alloc;
    m->routes.sink = *sink;
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
