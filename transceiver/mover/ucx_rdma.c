/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_rdma.h"
#include "transceiver/mover/ucx_context.h"

#include "kvmgr/base/cursor.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include <utlist.h>

#define RDMA_MAGIC "kvfrdm1"
#define TURN_ROUNDS 64U /* of one progress call */
#define PROBE_BYTES 8U

typedef struct own_pool {
    kvf_rdma_pool_t pool;
    ucp_mem_h memh;
    void *key;
    size_t key_bytes;
} own_pool_t;

struct kvf_rdma_path {
    kvf_rdma_t *rdma;
    void *owner;
    ucp_worker_h worker;
    /* of one that reads */
    ucp_ep_h ep;
    struct {
        uint64_t base;
        ucp_rkey_h rkey;
    } peer_pools[KVF_MAX_GROUPS];
    uint32_t n_reads;
    kvf_rdma_batch_t *batches; /* that are not done */
    uint8_t probe[PROBE_BYTES];
    bool ready_due;
    bool failed, failed_due;
    bool closing;
    char why[160];
    struct kvf_rdma_path *prev, *next;
};

struct kvf_rdma {
    kvf_ucx_t *ucx;
    kvf_rdma_events_t events;
    own_pool_t pools[KVF_MAX_GROUPS];
    uint32_t n_pools;
    kvf_ucx_release_t release;
    int fd; /* readable when a worker's is */
    kvf_rdma_path_t *paths;
    kvf_rdma_batch_t *done;
};

/* ---- reads ----------------------------------------------------------------------------------- */

/* Of a path that has failed no batch is done before its worker is destroyed: that proves that
 * nothing writes there any more, an error does not. */

static void fail_path(kvf_rdma_path_t *path, const char *why) {
    if (!path->failed) {
        path->failed = path->failed_due = true;
        (void)snprintf(path->why, sizeof(path->why), "%s", why);
    }
}

static void finish(kvf_rdma_t *rdma, kvf_rdma_batch_t *batch) {
    if (batch->path != NULL) {
        LL_DELETE(batch->path->batches, batch);
        batch->path = NULL;
    }
    LL_APPEND(rdma->done, batch);
}

static void read_done(kvf_rdma_batch_t *batch, ucs_status_t status) {
    kvf_rdma_path_t *path = batch->path;
    path->n_reads--;
    batch->n_reads--;
    if (status != UCS_OK) {
        batch->status = KVF_ERR_PEER_LOST;
        fail_path(path, ucs_status_string(status));
    }
    if (batch->sealed && batch->n_reads == 0 && !path->failed) {
        finish(path->rdma, batch);
    }
}

static void on_read(void *request, ucs_status_t status, void *arg) {
    kvf_rdma_batch_t *batch = arg;
    ucp_request_free(request);
    if (!batch->path->closing) { /* else all of its are settled together */
        read_done(batch, status);
    }
}

kvf_status_t kvf_rdma_read(kvf_rdma_path_t *path, kvf_rdma_batch_t *batch, uint32_t pool_idx,
                           uint8_t *at, uint64_t off, uint64_t bytes) {
    const own_pool_t *pool = &path->rdma->pools[pool_idx];
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = on_read,
        .user_data = batch,
        .memory_type = pool->pool.on_device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
        .memh = pool->memh,
    };
    if (path->failed) {
        return KVF_ERR_PEER_LOST;
    }
    if (path->n_reads == KVF_RDMA_READS) {
        return KVF_ERR_AGAIN;
    }
    if (batch->path == NULL) {
        batch->path = path;
        LL_PREPEND(path->batches, batch);
    }
    path->n_reads++;
    batch->n_reads++;
    kvf_ucx_scope_t scope;
    kvf_ucx_scope_enter(&scope, &path->rdma->ucx->log);
    void *request = ucp_get_nbx(path->ep, at, (size_t)bytes, path->peer_pools[pool_idx].base + off,
                                path->peer_pools[pool_idx].rkey, &param);
    kvf_ucx_scope_leave(&scope);
    if (!UCS_PTR_IS_PTR(request)) {
        read_done(batch, UCS_PTR_STATUS(request));
    }
    return KVF_OK;
}

void kvf_rdma_seal(kvf_rdma_t *rdma, kvf_rdma_batch_t *batch) {
    batch->sealed = true;
    if (batch->n_reads == 0 && (batch->path == NULL || !batch->path->failed)) {
        finish(rdma, batch);
    }
}

/* ---- paths ----------------------------------------------------------------------------------- */

static bool watch(const kvf_rdma_t *rdma, ucp_worker_h worker) {
    struct epoll_event event = {.events = EPOLLIN};
    int fd;
    return ucp_worker_get_efd(worker, &fd) == UCS_OK &&
           epoll_ctl(rdma->fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* By hand: a process that was forked keeps what UCX only closes. */
static void unwatch(const kvf_rdma_t *rdma, ucp_worker_h worker) {
    int fd;
    if (worker != NULL && ucp_worker_get_efd(worker, &fd) == UCS_OK) {
        (void)epoll_ctl(rdma->fd, EPOLL_CTL_DEL, fd, NULL);
    }
}

void kvf_rdma_close(kvf_rdma_path_t *path) {
    kvf_rdma_t *rdma = path->rdma;
    kvf_rdma_batch_t *batch, *next;
    kvf_ucx_scope_t scope;
    path->closing = true;
    kvf_ucx_scope_enter(&scope, &rdma->ucx->log);
    unwatch(rdma, path->worker);
    /* With reads under way, which UCX asks not to do: in 1.22 none of the ways to abort one looks
     * at its key, and behind the worker the key's memory is gone. */
    for (uint32_t i = 0; i < rdma->n_pools; i++) {
        if (path->peer_pools[i].rkey != NULL) {
            ucp_rkey_destroy(path->peer_pools[i].rkey);
        }
    }
    if (path->worker != NULL) {
        ucp_worker_destroy(path->worker);
    }
    kvf_ucx_scope_leave(&scope);
    LL_FOREACH_SAFE(path->batches, batch, next) {
        batch->status = batch->n_reads > 0 ? KVF_ERR_PEER_LOST : batch->status;
        batch->n_reads = 0;
        if (batch->sealed) {
            finish(rdma, batch);
        } else {
            batch->path = NULL;
        }
    }
    DL_DELETE(rdma->paths, path);
    kvf_free(rdma->ucx->alloc, path);
}

/* A path with a worker. */
static kvf_status_t make_path(kvf_rdma_t *rdma, void *owner, kvf_rdma_path_t **path_p,
                              kvf_detail_t *detail) {
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SINGLE};
    kvf_rdma_path_t *path = kvf_calloc(rdma->ucx->alloc, 1, sizeof(*path));
    if (path == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    path->rdma = rdma;
    path->owner = owner;
    DL_APPEND(rdma->paths, path);
    ucs_status_t status = ucp_worker_create(rdma->ucx->context, &params, &path->worker);
    if (status != UCS_OK || !watch(rdma, path->worker)) {
        kvf_status_t failed =
            kvf_fail(detail, status == UCS_OK ? KVF_ERR_IO : kvf_ucx_status(status),
                     "ucx makes no worker for a path to a peer: %s",
                     status == UCS_OK ? strerror(errno) : ucs_status_string(status));
        path->worker = status == UCS_OK ? path->worker : NULL;
        kvf_rdma_close(path);
        return failed;
    }
    *path_p = path;
    return KVF_OK;
}

kvf_status_t kvf_rdma_lend(kvf_rdma_t *rdma, void *owner, kvf_rdma_path_t **path_p,
                           uint8_t *answer_buf, size_t *answer_bytes_p, kvf_detail_t *detail) {
    kvf_ucx_answer_t answer = {.n_pools = rdma->n_pools};
    kvf_rdma_path_t *path;
    ucp_address_t *address;
    kvf_ucx_scope_t scope;
    kvf_ucx_scope_enter(&scope, &rdma->ucx->log);
    kvf_status_t status = make_path(rdma, owner, &path, detail);
    if (status == KVF_OK) {
        ucs_status_t told = ucp_worker_get_address(path->worker, &address, &answer.address_bytes);
        if (told == UCS_OK) {
            for (uint32_t i = 0; i < rdma->n_pools; i++) {
                const own_pool_t *own = &rdma->pools[i];
                answer.pools[i] = (kvf_ucx_lent_t){(uint64_t)(uintptr_t)own->pool.base,
                                                   own->pool.bytes, own->key, own->key_bytes};
            }
            answer.address = address;
            status = kvf_ucx_answer_write(rdma->release, &answer, answer_buf, answer_bytes_p);
            ucp_worker_release_address(path->worker, address);
        }
        if (told != UCS_OK || status != KVF_OK) {
            status = told != UCS_OK ? kvf_ucx_status(told) : KVF_ERR_IO;
            (void)kvf_fail(detail, status,
                           "ucx's address for a peer is not to be had, or too long");
            kvf_rdma_close(path);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (status == KVF_OK) {
        *path_p = path;
    }
    return status;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    fail_path(arg, ucs_status_string(status));
}

static void probed(kvf_rdma_path_t *path, ucs_status_t status) {
    if (status == UCS_OK) {
        path->ready_due = true;
    } else {
        fail_path(path, ucs_status_string(status));
    }
}

static void on_probed(void *request, ucs_status_t status, void *arg) {
    kvf_rdma_path_t *path = arg;
    ucp_request_free(request);
    if (!path->closing) {
        probed(path, status);
    }
}

/* What UCX reads of an answer lies aligned, with zeros behind it: it is not told how long that is.
 */
typedef union aligned {
    max_align_t align;
    uint8_t address[KVF_UCX_ADDRESS_BYTES + 256];
    uint8_t key[KVF_UCX_KEY_BYTES + 256];
} aligned_t;

/* Connect, and read a few bytes: that the other end is there, and how long it takes to connect,
 * shows only so. */
static ucs_status_t connect_path(kvf_rdma_path_t *path, const kvf_ucx_answer_t *answer) {
    aligned_t copy = {.address = {0}};
    const ucp_ep_params_t ep_params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)copy.address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_error, path},
    };
    const ucp_request_param_t probe_params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_probed,
        .user_data = path,
    };
    memcpy(copy.address, answer->address, answer->address_bytes);
    ucs_status_t status = ucp_ep_create(path->worker, &ep_params, &path->ep);
    for (uint32_t i = 0; i < answer->n_pools && status == UCS_OK; i++) {
        memset(&copy, 0, sizeof(copy));
        memcpy(copy.key, answer->pools[i].key, answer->pools[i].key_bytes);
        path->peer_pools[i].base = answer->pools[i].base;
        status = ucp_ep_rkey_unpack(path->ep, copy.key, &path->peer_pools[i].rkey);
    }
    if (status != UCS_OK) {
        return status;
    }
    const uint64_t least = answer->pools[0].bytes;
    void *request = ucp_get_nbx(path->ep, path->probe, least < PROBE_BYTES ? least : PROBE_BYTES,
                                path->peer_pools[0].base, path->peer_pools[0].rkey, &probe_params);
    if (!UCS_PTR_IS_PTR(request)) {
        probed(path, UCS_PTR_STATUS(request));
    }
    return UCS_OK;
}

kvf_status_t kvf_rdma_open(kvf_rdma_t *rdma, void *owner, const void *answer_buf,
                           size_t answer_bytes, const uint64_t *least, kvf_rdma_path_t **path_p,
                           kvf_detail_t *detail) {
    kvf_ucx_answer_t answer;
    kvf_rdma_path_t *path;
    kvf_ucx_scope_t scope;
    kvf_status_t status = kvf_ucx_answer_read(rdma->release, answer_buf, answer_bytes,
                                              rdma->n_pools, least, &answer, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_ucx_scope_enter(&scope, &rdma->ucx->log);
    status = make_path(rdma, owner, &path, detail);
    if (status == KVF_OK) {
        ucs_status_t connected = connect_path(path, &answer);
        if (connected != UCS_OK) {
            bool apart = connected == UCS_ERR_UNREACHABLE;
            status =
                kvf_fail(detail, apart ? KVF_ERR_INCOMPATIBLE : kvf_ucx_status(connected),
                         "ucx cannot read the peer's pools over tls \"%s\": %s%s%s", rdma->ucx->tls,
                         ucs_status_string(connected), scope.said[0] ? "; " : "", scope.said);
            kvf_rdma_close(path);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (status == KVF_OK) {
        *path_p = path;
    }
    return status;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* Advance every worker. */
static unsigned advance(kvf_rdma_t *rdma) {
    unsigned n = 0;
    kvf_rdma_path_t *path;
    DL_FOREACH(rdma->paths, path) {
        n += ucp_worker_progress(path->worker);
    }
    return n;
}

/* A path about which something is to be told. */
static kvf_rdma_path_t *next_news(const kvf_rdma_t *rdma) {
    kvf_rdma_path_t *path;
    DL_FOREACH(rdma->paths, path) {
        if (path->ready_due || path->failed_due) {
            return path;
        }
    }
    return NULL;
}

/* Batches before the failure of the path that read them. */
static unsigned tell(kvf_rdma_t *rdma) {
    const kvf_rdma_events_t *events = &rdma->events;
    unsigned n = 0;
    for (kvf_rdma_path_t *path;; n++) {
        kvf_rdma_batch_t *batch = rdma->done;
        if (batch != NULL) {
            LL_DELETE(rdma->done, batch);
            events->done(events->ctx, batch);
        } else if ((path = next_news(rdma)) == NULL) {
            return n;
        } else if (path->failed_due) {
            path->failed_due = path->ready_due = false;
            events->failed(events->ctx, path->owner, path->why);
        } else {
            path->ready_due = false;
            events->ready(events->ctx, path->owner);
        }
    }
}

unsigned kvf_rdma_progress(kvf_rdma_t *rdma) {
    kvf_ucx_scope_t scope;
    unsigned n = 0;
    kvf_ucx_scope_enter(&scope, &rdma->ucx->log);
    for (uint32_t i = 0; i < TURN_ROUNDS; i++) {
        unsigned did = advance(rdma);
        if (did == 0) {
            break;
        }
        n += did;
    }
    kvf_ucx_scope_leave(&scope);
    return n + tell(rdma);
}

int kvf_rdma_fd(const kvf_rdma_t *rdma) {
    return rdma->fd;
}

bool kvf_rdma_arm(const kvf_rdma_t *rdma) {
    const kvf_rdma_path_t *path;
    if (rdma->done != NULL || next_news(rdma) != NULL) {
        return false;
    }
    DL_FOREACH(rdma->paths, path) {
        if (ucp_worker_arm(path->worker) != UCS_OK) {
            return false;
        }
    }
    return true;
}

/* ---- life ------------------------------------------------------------------------------------ */

void kvf_rdma_address(const kvf_rdma_t *rdma, uint8_t address[KVF_RDMA_ADDRESS_BYTES]) {
    kvf_writer_t writer = kvf_writer(address, KVF_RDMA_ADDRESS_BYTES);
    kvf_write_bytes(&writer, RDMA_MAGIC, sizeof(RDMA_MAGIC));
    kvf_write_u32(&writer, rdma->release.major);
    kvf_write_u32(&writer, rdma->release.minor);
}

kvf_status_t kvf_rdma_check_address(const kvf_rdma_t *rdma, const void *address, size_t bytes,
                                    kvf_detail_t *detail) {
    kvf_reader_t reader = kvf_reader(address, bytes);
    const uint8_t *magic = kvf_read_bytes(&reader, sizeof(RDMA_MAGIC));
    const unsigned major = kvf_read_u32(&reader), minor = kvf_read_u32(&reader);
    if (!kvf_reader_done(&reader) || memcmp(magic, RDMA_MAGIC, sizeof(RDMA_MAGIC)) != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the address is none of this version's mover");
    }
    return major == rdma->release.major && minor == rdma->release.minor
               ? KVF_OK
               : kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                          "it has ucx %u.%u, this node %u.%u; install the same on both", major,
                          minor, rdma->release.major, rdma->release.minor);
}

/* Let the cards read a pool, and write what they read for us to it. That peers only read is what we
 * ask for; UCX 1.22 gives them a key that writes, too. */
static ucs_status_t register_pool(kvf_ucx_t *ucx, own_pool_t *own) {
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = own->pool.base,
        .length = (size_t)own->pool.bytes,
        .prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE |
                UCP_MEM_MAP_PROT_REMOTE_READ,
        .memory_type = own->pool.on_device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    ucs_status_t status = ucp_mem_map(ucx->context, &params, &own->memh);
    if (status != UCS_OK) {
        own->memh = NULL;
        return status;
    }
    return ucp_rkey_pack(ucx->context, own->memh, &own->key, &own->key_bytes);
}

static bool knows_devices(const kvf_ucx_t *ucx) {
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    return ucp_context_query(ucx->context, &attr) == UCS_OK &&
           (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

kvf_status_t kvf_rdma_create(kvf_ucx_t *ucx, const kvf_rdma_pool_t *pools, uint32_t n_pools,
                             const kvf_rdma_events_t *events, kvf_rdma_t **rdma_p,
                             kvf_detail_t *detail) {
    kvf_ucx_scope_t scope;
    unsigned release;
    if (pools[0].on_device && !knows_devices(ucx)) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "this ucx does not know memory of CUDA devices: it was built without CUDA, "
                        "or found no driver");
    }
    kvf_rdma_t *rdma = kvf_calloc(ucx->alloc, 1, sizeof(*rdma));
    if (rdma == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the rdma mover");
    }
    rdma->ucx = ucx;
    rdma->events = *events;
    rdma->n_pools = n_pools;
    ucp_get_version(&rdma->release.major, &rdma->release.minor, &release);
    rdma->fd = epoll_create1(EPOLL_CLOEXEC);
    kvf_status_t status = rdma->fd >= 0 ? KVF_OK
                                        : kvf_fail(detail, KVF_ERR_IO,
                                                   "no descriptor for paths: %s", strerror(errno));
    kvf_ucx_scope_enter(&scope, &ucx->log);
    for (uint32_t i = 0; i < n_pools && status == KVF_OK; i++) {
        rdma->pools[i].pool = pools[i];
        ucs_status_t registered = register_pool(ucx, &rdma->pools[i]);
        if (registered != UCS_OK) {
            status = kvf_fail(detail, kvf_ucx_status(registered),
                              "the network card does not take a pool of %llu bytes: %s%s%s; is the "
                              "limit of locked memory (ulimit -l) high enough?",
                              (unsigned long long)pools[i].bytes, ucs_status_string(registered),
                              scope.said[0] ? "; " : "", scope.said);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (status != KVF_OK) {
        kvf_rdma_destroy(rdma);
        return status;
    }
    *rdma_p = rdma;
    return KVF_OK;
}

void kvf_rdma_destroy(kvf_rdma_t *rdma) {
    kvf_ucx_scope_t scope;
    if (rdma == NULL) {
        return;
    }
    while (rdma->paths != NULL) {
        kvf_rdma_close(rdma->paths);
    }
    kvf_ucx_scope_enter(&scope, &rdma->ucx->log);
    for (uint32_t i = 0; i < rdma->n_pools; i++) {
        if (rdma->pools[i].key != NULL) {
            ucp_rkey_buffer_release(rdma->pools[i].key);
        }
        if (rdma->pools[i].memh != NULL) {
            (void)ucp_mem_unmap(rdma->ucx->context, rdma->pools[i].memh);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (rdma->fd >= 0) {
        (void)close(rdma->fd);
    }
    kvf_free(rdma->ucx->alloc, rdma);
}
