/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_path.h"

#include <utlist.h>

/* What UCX holds is overtaken by nothing, so it is given little at once. */
#define PATH_OPS 32U                     /* chunks */
#define PATH_BYTES (UINT64_C(512) << 10) /* and their bytes */

typedef struct kvf_ucx_path kvf_ucx_path_t;

/* A chunk that UCX holds. UCX reads the header until then. */
typedef struct op {
    uint8_t header[KVF_CHUNK_HEADER_BYTES];
    kvf_ucx_path_t *path;
    kvf_queue_job_t *job;
    uint64_t bytes;
    struct op *next;
} op_t;

struct kvf_ucx_path {
    kvf_route_t route;
    kvf_ucx_t *ucx;
    ucp_worker_h worker;
    ucp_ep_h ep;
    op_t *free_ops;
    uint64_t busy_bytes; /* that UCX holds */
    op_t ops[PATH_OPS];
};

static void op_done(op_t *op, ucs_status_t status) {
    kvf_ucx_path_t *path = op->path;
    kvf_status_t result = kvf_ucx_status(status);
    LL_PREPEND(path->free_ops, op);
    path->busy_bytes -= op->bytes;
    result = result == KVF_OK || result == KVF_ERR_PEER_LOST ? result : KVF_ERR_IO;
    kvf_queue_settle(&path->route.queue, op->job, result);
    if (result != KVF_OK) {
        kvf_route_break(&path->route, ucs_status_string(status));
    }
}

static void on_sent(void *request, ucs_status_t status, void *op) {
    ucp_request_free(request);
    op_done(op, status);
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    kvf_route_break(&((kvf_ucx_path_t *)arg)->route, ucs_status_string(status));
}

kvf_status_t kvf_ucx_path_create(kvf_ucx_t *ucx, const ucp_address_t *address,
                                 kvf_route_t **route_p, kvf_detail_t *detail) {
    const ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                               .thread_mode = UCS_THREAD_MODE_SINGLE};
    kvf_ucx_scope_t scope;
    kvf_ucx_path_t *path = kvf_calloc(ucx->alloc, 1, sizeof(*path));
    if (path == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    path->ucx = ucx;
    for (uint32_t i = 0; i < PATH_OPS; i++) {
        path->ops[i].path = path;
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
        *route_p = &path->route;
        return KVF_OK;
    }
    kvf_free(ucx->alloc, path);
    bool apart = status == UCS_ERR_UNREACHABLE; /* nothing was dialled: no transport in common */
    return kvf_fail(detail, apart ? KVF_ERR_INCOMPATIBLE : kvf_ucx_status(status),
                    "ucx cannot reach the peer over tls \"%s\": %s%s%s%s", ucx->tls,
                    apart ? "give both nodes a transport in common (ucx.tls, ucx.devices); " : "",
                    ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
}

static const kvf_ucx_path_t *path_of(const kvf_route_t *route) {
    return (const kvf_ucx_path_t *)route;
}

void kvf_ucx_path_close(kvf_route_t *route) {
    kvf_ucx_path_t *path = (kvf_ucx_path_t *)route;
    /* No progress between here and the end of the worker: see the head of the header. */
    ucp_worker_destroy(path->worker);
    path->worker = NULL;
}

void kvf_ucx_path_destroy(kvf_route_t *route) {
    kvf_free(path_of(route)->ucx->alloc, route);
}

ucp_worker_h kvf_ucx_path_worker(const kvf_route_t *route) {
    return path_of(route)->worker;
}

bool kvf_ucx_path_can_send(const kvf_route_t *route) {
    const kvf_ucx_path_t *path = path_of(route);
    return kvf_queue_waits(&route->queue) && path->free_ops != NULL &&
           path->busy_bytes < PATH_BYTES;
}

uint64_t kvf_ucx_path_send(kvf_route_t *route) {
    kvf_ucx_path_t *path = (kvf_ucx_path_t *)route;
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = path->free_ops,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    op_t *op = path->free_ops;
    const uint8_t *source;
    kvf_chunk_t chunk;

    LL_DELETE(path->free_ops, op);
    op->job = kvf_queue_cut(&route->queue, KVF_UCX_CHUNK_BYTES, &chunk, &source);
    op->bytes = chunk.bytes;
    path->busy_bytes += chunk.bytes;
    kvf_chunk_encode(&chunk, op->header);
    void *request = ucp_am_send_nbx(path->ep, KVF_UCX_AM_ID, op->header, sizeof(op->header), source,
                                    (size_t)chunk.bytes, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        op_done(op, UCS_PTR_STATUS(request));
    }
    return chunk.bytes;
}
