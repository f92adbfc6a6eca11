/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions of agents, sends and receives: checks, and the way to the agent's thread. */
#include "transceiver/agent_impl.h"
#include "transceiver/control/address.h"
#include "transceiver/mem/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The movers that carry windows. */
#define TCP "tcp"
#define UCX "ucx"

bool kvf_agent_rdma_over_software = false;

/* ---- configuration ---- */

void kvf_agent_config_init(kvf_agent_config_t *config) {
    *config = (kvf_agent_config_t){
        .mover = "auto",
        .digests = true,
        .ucx_tls = "auto",
        .ucx_devices = "auto",
        .max_transfers = 256,
        .frame_bytes = UINT64_C(16) << 20,
        .window_bytes = UINT64_C(16) << 20,
        .window_pieces = 4096,
        .request_timeout_us = 30000000,
        .lease_us = 30000000,
        .quarantine_us = 10000000,
        .heartbeat_us = 250000,
        .suspect_us = 1000000,
        .lost_us = 2000000,
        .log_level = KVF_LOG_WARN,
    };
}

static bool name_ok(const char *name) {
    return name != NULL && kvf_text_ok(name, 1, KVF_MAX_ID_BYTES) && strchr(name, ' ') == NULL;
}

static kvf_status_t check_config(const kvf_agent_config_t *config, kvf_detail_t *detail) {
    uint8_t any = 0;
    for (size_t i = 0; i < KVF_KEY_BYTES; i++) {
        any |= config->cluster_key[i];
    }
    if (!name_ok(config->instance)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "instance must have 1 to %d printable bytes without blanks",
                        KVF_MAX_ID_BYTES);
    }
    if (config->control_listen == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "control_listen is missing; give host:port");
    }
    if (config->mover == NULL || config->ucx_tls == NULL || config->ucx_devices == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "mover, ucx_tls and ucx_devices must be set; start from "
                        "kvf_agent_config_init()");
    }
    if (any == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "cluster_key is empty; make one with `kvferry keygen FILE`");
    }
    for (size_t i = 0; i < config->n_peers; i++) {
        if (!name_ok(config->peers[i])) {
            return kvf_fail(detail, KVF_ERR_INVALID, "peers[%zu] must be an instance or host:port",
                            i);
        }
    }
    if (config->layout == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "layout is missing");
    }
    if (strcmp(config->mover, "auto") != 0 && strcmp(config->mover, TCP) != 0 &&
        strcmp(config->mover, UCX) != 0 && strcmp(config->mover, KVF_MAPPED) != 0 &&
        strcmp(config->mover, KVF_CUDA) != 0 && strcmp(config->mover, KVF_NCCL) != 0 &&
        strcmp(config->mover, KVF_RDMA) != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "mover %.32s: there are auto, mapped, tcp, ucx, cuda, nccl and rdma",
                        config->mover);
    }
    if (config->mover_threads > 64) {
        return kvf_fail(detail, KVF_ERR_INVALID, "mover_threads is %" PRIu32 ", must be 0 to 64",
                        config->mover_threads);
    }
    if (config->busy_poll_us > 1000000) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "busy_poll_us is %" PRIu64 ", must be 0 to 1000000", config->busy_poll_us);
    }
    if (config->max_transfers == 0 || config->window_bytes == 0 || config->window_pieces < 64 ||
        config->request_timeout_us == 0 || config->lease_us == 0) {
        return kvf_fail(
            detail, KVF_ERR_INVALID,
            "max_transfers, window_bytes, request_timeout_us and lease_us must be above "
            "0, window_pieces at least 64");
    }
    if (config->frame_bytes < (UINT64_C(2) << 20) || config->frame_bytes > (UINT64_C(1) << 30)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "frame_bytes is %" PRIu64 ", must be 2 MiB to 1 GiB", config->frame_bytes);
    }
    if (config->heartbeat_us == 0 || config->suspect_us < config->heartbeat_us ||
        config->lost_us < config->suspect_us) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "heartbeat: 0 < period <= suspect <= lost must hold");
    }
    return kvf_layout_check(config->layout, detail);
}

static void write_log(void *ctx, kvf_log_level_t level, const char *text) {
    kvf_agent_t *agent = ctx;
    agent->log_cb(agent->log_ctx, (int)level, text);
}

/* ---- life ---- */

static void agent_free(kvf_agent_t *agent) {
    const kvf_alloc_t *alloc = agent->alloc;
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        if (agent->pools[g].agent != NULL) {
            kvf_pages_destroy(agent->pools[g].pages);
            if (!agent->pools[g].attached) {
                agent->pools[g].mem.kind->free(&agent->pools[g].mem);
            }
        }
    }
    kvf_cuda_close(agent->cuda);
    kvf_ucx_destroy(agent->ucx);
    for (size_t i = 0; agent->peers != NULL && i < agent->config.n_peers; i++) {
        kvf_free(alloc, agent->peers[i]);
    }
    kvf_free(alloc, agent->peers);
    for (size_t i = 0; i < sizeof(agent->strings) / sizeof(agent->strings[0]); i++) {
        kvf_free(alloc, agent->strings[i]);
    }
    kvf_free(alloc, agent);
}

static kvf_status_t copy_config(kvf_agent_t *agent, const kvf_agent_config_t *config) {
    const char **fields[] = {&agent->config.instance, &agent->config.control_listen,
                             &agent->config.mover, &agent->config.ucx_tls,
                             &agent->config.ucx_devices};
    agent->config = *config;
    agent->layout = *config->layout;
    agent->config.layout = &agent->layout;
    agent->config.n_peers = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        agent->strings[i] = kvf_strdup(agent->alloc, *fields[i]);
        if (agent->strings[i] == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        *fields[i] = agent->strings[i];
    }
    agent->peers = kvf_calloc(agent->alloc, config->n_peers + 1, sizeof(*agent->peers));
    agent->config.peers = agent->peers;
    for (size_t i = 0; agent->peers != NULL && i < config->n_peers; i++) {
        agent->peers[i] = kvf_strdup(agent->alloc, config->peers[i]);
        if (agent->peers[i] == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        agent->config.n_peers++;
    }
    return agent->peers == NULL ? KVF_ERR_NO_MEMORY : KVF_OK;
}

kvf_status_t kvf_agent_make_mover(void *ctx, kvf_agent_t *agent, const char *name,
                                  const kvf_mover_sink_t *sink, kvf_mover_t **mover_p,
                                  kvf_detail_t *detail) {
    (void)ctx;
    return strcmp(name, TCP) == 0 ? kvf_mover_tcp_create(&agent->host, agent->alloc, &agent->log,
                                                         sink, mover_p, detail)
                                  : kvf_mover_ucx_create(agent->ucx, sink, mover_p, detail);
}

bool kvf_agent_only_carries(const kvf_agent_t *agent) {
    return strcmp(agent->config.mover, TCP) == 0 || strcmp(agent->config.mover, UCX) == 0;
}

/* What carries windows. Of the two, tcp is the faster one over the transports that UCX has without
 * being told of others; who names UCX's transports wants those. */
static void choose_movers(kvf_agent_t *agent) {
    const bool told = strcmp(agent->config.ucx_tls, "auto") != 0 || getenv("UCX_TLS") != NULL;
    if (kvf_agent_only_carries(agent)) {
        agent->mover_names[0] = agent->config.mover;
        agent->n_movers = 1;
        return;
    }
    agent->mover_names[0] = told ? UCX : TCP;
    agent->mover_names[1] = told ? TCP : UCX;
    agent->n_movers = 2;
}

static kvf_status_t open_ucx(kvf_agent_t *agent, kvf_detail_t *detail) {
    char host[KVF_ADDRESS_TEXT_BYTES];
    kvf_address_host(&agent->host, host);
    const kvf_ucx_config_t ucx = {
        .tls = agent->config.ucx_tls, .devices = agent->config.ucx_devices, .listen_host = host};
    return kvf_ucx_create(&ucx, agent->alloc, &agent->log, &agent->ucx, detail);
}

kvf_status_t kvf_agent_create(const kvf_agent_config_t *config, kvf_agent_t **agent_p,
                              kvf_detail_t *detail) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    kvf_status_t status = check_config(config, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_agent_t *agent = kvf_calloc(alloc, 1, sizeof(*agent));
    if (agent == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for an agent");
    }
    agent->alloc = alloc;
    agent->log_cb = config->log;
    agent->log_ctx = config->log_ctx;
    agent->log = config->log != NULL
                     ? (kvf_log_t){write_log, agent, (kvf_log_level_t)config->log_level}
                     : kvf_log_stderr((kvf_log_level_t)config->log_level);
    status = copy_config(agent, config);
    if (status != KVF_OK) {
        (void)kvf_fail(detail, status, "no memory for an agent");
        goto err_free;
    }
    status = kvf_address_parse(config->control_listen, &agent->host, detail);
    if (status != KVF_OK) {
        goto err_free;
    }
    choose_movers(agent);
    if (strcmp(agent->config.mover, TCP) != 0) {
        status = open_ucx(agent, detail);
        if (status != KVF_OK) {
            goto err_free;
        }
    }
    agent->make_mover = kvf_agent_make_mover;
    *agent_p = agent;
    return KVF_OK;

err_free:
    agent_free(agent);
    return status;
}

const char *kvf_agent_mapped_name(const kvf_agent_t *agent) {
    return strcmp(agent->config.mover, KVF_RDMA) == 0   ? KVF_RDMA
           : agent->cuda == NULL                        ? KVF_MAPPED
           : strcmp(agent->config.mover, KVF_NCCL) == 0 ? KVF_NCCL
                                                        : KVF_CUDA;
}

static kvf_status_t start(kvf_agent_t *agent, bool threaded, kvf_detail_t *detail) {
    if (agent->loop != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "this agent was started before");
    }
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        if (agent->pools[g].agent == NULL) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "layer group %s has no pool; call kvf_pool_create() first",
                            agent->layout.groups[g].name);
        }
    }
    const char *mover = agent->config.mover;
    bool of_device = strcmp(mover, KVF_CUDA) == 0 || strcmp(mover, KVF_NCCL) == 0;
    if (agent->cuda == NULL ? of_device : strcmp(mover, KVF_MAPPED) == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "mover %s is for pools of kind %s, and these are of kind %s: take mover "
                        "auto",
                        mover, agent->cuda == NULL ? "cuda" : "shm",
                        agent->pools[0].mem.kind->name);
    }
    if (strcmp(mover, KVF_NCCL) == 0 && !agent->config.digests) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "mover nccl needs digests: NCCL may say that a message has come when its "
                        "sender has aborted it");
    }
    return kvf_loop_create(agent, threaded, &agent->loop, detail);
}

kvf_status_t kvf_agent_start_thread(kvf_agent_t *agent, kvf_detail_t *detail) {
    return start(agent, true, detail);
}

kvf_status_t kvf_agent_start(kvf_agent_t *agent, kvf_detail_t *detail) {
    return start(agent, false, detail);
}

void kvf_agent_progress(kvf_agent_t *agent) {
    kvf_loop_progress(agent->loop);
}

int kvf_agent_fd(kvf_agent_t *agent) {
    return kvf_loop_fd(agent->loop);
}

uint64_t kvf_agent_timeout_us(kvf_agent_t *agent) {
    return kvf_loop_timeout_us(agent->loop);
}

static void call_shutdown(void *arg) {
    kvf_core_shutdown(((kvf_agent_t *)arg)->core);
}

/* Also answers whether a page is still in doubt. */
typedef struct goodbye_call {
    kvf_agent_t *agent;
    bool in_doubt;
} goodbye_call_t;

static void call_goodbye(void *arg) {
    goodbye_call_t *call = arg;
    for (uint32_t g = 0; g < call->agent->layout.n_groups; g++) {
        const kvf_pages_t *pages = call->agent->pools[g].pages;
        call->in_doubt |= kvf_pages_count(pages, KVF_PAGE_QUARANTINED) > 0 ||
                          kvf_pages_count(pages, KVF_PAGE_POISONED) > 0 ||
                          kvf_pages_count(pages, KVF_PAGE_WRITING) > 0;
    }
    if (!call->in_doubt) {
        kvf_core_goodbye(call->agent->core);
    }
}

kvf_status_t kvf_agent_destroy(kvf_agent_t *agent) {
    if (agent == NULL) {
        return KVF_OK;
    }
    if (agent->loop != NULL) {
        goodbye_call_t goodbye = {agent, false};
        kvf_loop_call(agent->loop, call_shutdown, agent);
        if (!kvf_loop_wait_quiet(agent->loop,
                                 kvf_time_after(agent->config.quarantine_us, 1000000))) {
            return KVF_ERR_BUSY;
        }
        kvf_loop_call(agent->loop, call_goodbye, &goodbye);
        if (goodbye.in_doubt) {
            return KVF_ERR_BUSY;
        }
        /* A device's memory must not be freed while somebody has it open. */
        if (agent->cuda != NULL &&
            !kvf_loop_wait_returned(agent->loop,
                                    kvf_time_after(agent->config.quarantine_us, 1000000))) {
            return KVF_ERR_BUSY;
        }
        kvf_loop_destroy(agent->loop);
    }
    agent_free(agent);
    return KVF_OK;
}

kvf_status_t kvf_agent_address(kvf_agent_t *agent, char *address, size_t cap) {
    if (agent->loop == NULL) {
        return KVF_ERR_INVALID;
    }
    const char *text = kvf_loop_address(agent->loop);
    if (strlen(text) >= cap) {
        return KVF_ERR_RANGE;
    }
    memcpy(address, text, strlen(text) + 1);
    return KVF_OK;
}

void kvf_agent_incarnation(kvf_agent_t *agent, char hex[33]) {
    static const kvf_incarnation_t none;
    kvf_incarnation_text(agent->loop == NULL ? &none : kvf_core_incarnation(agent->core), hex);
}

/* ---- sends and receives: each hands its arguments to the agent's thread ---- */

typedef struct request_call {
    kvf_agent_t *agent;
    uint64_t id;
    const void *desc; /* of the function's own type */
    const char *request_id;
    kvf_event_cb cb;
    void *ctx;
    char *ticket;
    size_t cap;
    kvf_status_t reason;
    kvf_fence_t *fence;
    kvf_detail_t *detail;
    kvf_status_t status;
} request_call_t;

static kvf_status_t request(kvf_agent_t *agent, void (*fn)(void *arg), request_call_t *c) {
    if (agent->loop == NULL) {
        return kvf_fail(c->detail, KVF_ERR_INVALID, "the agent has not been started");
    }
    c->agent = agent;
    kvf_loop_call(agent->loop, fn, c);
    return c->status;
}

static void call_send_open(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_send_open(c->agent->core, c->desc, c->cb, c->ctx, &c->id, c->detail);
}

kvf_status_t kvf_send_open(kvf_agent_t *agent, const kvf_send_desc_t *desc, kvf_event_cb cb,
                           void *ctx, kvf_send_t *send_p, kvf_detail_t *detail) {
    request_call_t c = {.desc = desc, .cb = cb, .ctx = ctx, .detail = detail};
    kvf_status_t status = request(agent, call_send_open, &c);
    if (status == KVF_OK) {
        send_p->id = c.id;
    }
    return status;
}

static void call_send_ticket(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_send_ticket(c->agent->core, c->id, c->ticket, c->cap);
}

kvf_status_t kvf_send_ticket(kvf_agent_t *agent, kvf_send_t send, char *ticket, size_t cap) {
    request_call_t c = {.id = send.id, .ticket = ticket, .cap = cap};
    return request(agent, call_send_ticket, &c);
}

static void call_send_ready(void *arg) {
    request_call_t *c = arg;
    c->status = c->fence == NULL
                    ? kvf_core_send_ready(c->agent->core, c->id, c->desc, c->detail)
                    : kvf_loop_promise(c->agent->loop, c->fence, c->id, c->desc, c->detail);
}

kvf_status_t kvf_send_ready(kvf_agent_t *agent, kvf_send_t send, const kvf_range_t *range,
                            const void *fence, kvf_detail_t *detail) {
    request_call_t c = {.id = send.id, .desc = range, .detail = detail};
    if (fence != NULL && agent->fences == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "a fence is an event of a CUDA device, where this agent has no pools");
    }
    if (fence != NULL) {
        kvf_status_t status = kvf_fences_take(agent->fences, fence, &c.fence, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    kvf_status_t status = request(agent, call_send_ready, &c);
    if (status != KVF_OK && c.fence != NULL) {
        kvf_fence_give(c.fence);
    }
    return status;
}

static void call_send_finish(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_send_finish(c->agent->core, c->id, c->desc, c->detail);
}

kvf_status_t kvf_send_finish(kvf_agent_t *agent, kvf_send_t send, const kvf_aux_t *aux,
                             kvf_detail_t *detail) {
    request_call_t c = {.id = send.id, .desc = aux, .detail = detail};
    return request(agent, call_send_finish, &c);
}

static void call_send_cancel(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_send_cancel(c->agent->core, c->id, c->reason);
}

kvf_status_t kvf_send_cancel(kvf_agent_t *agent, kvf_send_t send, kvf_status_t reason) {
    request_call_t c = {.id = send.id, .reason = reason};
    return request(agent, call_send_cancel, &c);
}

static void call_recv_open(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_recv_open(c->agent->core, c->desc, c->cb, c->ctx, &c->id, c->detail);
}

kvf_status_t kvf_recv_open(kvf_agent_t *agent, const kvf_recv_desc_t *desc, kvf_event_cb cb,
                           void *ctx, kvf_recv_t *recv_p, kvf_detail_t *detail) {
    request_call_t c = {.desc = desc, .cb = cb, .ctx = ctx, .detail = detail};
    kvf_status_t status = request(agent, call_recv_open, &c);
    if (status == KVF_OK) {
        recv_p->id = c.id;
    }
    return status;
}

static void call_recv_cancel(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_recv_cancel(c->agent->core, c->id);
}

kvf_status_t kvf_recv_cancel(kvf_agent_t *agent, kvf_recv_t recv) {
    request_call_t c = {.id = recv.id};
    return request(agent, call_recv_cancel, &c);
}

static void call_recv_decline(void *arg) {
    request_call_t *c = arg;
    c->status = kvf_core_recv_decline(c->agent->core, c->request_id, c->desc, c->detail);
}

kvf_status_t kvf_recv_decline(kvf_agent_t *agent, const char *request_id, const char *ticket,
                              kvf_detail_t *detail) {
    request_call_t c = {.request_id = request_id, .desc = ticket, .detail = detail};
    return request(agent, call_recv_decline, &c);
}

/* ---- looking in ---- */

typedef struct look_call {
    kvf_agent_t *agent;
    kvf_peer_info_t *infos;
    size_t cap, n;
    kvf_counters_t *counters;
} look_call_t;

static void call_peers(void *arg) {
    look_call_t *c = arg;
    c->n = kvf_core_peers(c->agent->core, c->infos, c->cap);
}

size_t kvf_agent_get_peers(kvf_agent_t *agent, kvf_peer_info_t *infos, size_t cap) {
    look_call_t c = {.agent = agent, .infos = infos, .cap = cap};
    if (agent->loop != NULL) {
        kvf_loop_call(agent->loop, call_peers, &c);
    }
    return c.n;
}

static void call_counters(void *arg) {
    look_call_t *c = arg;
    kvf_core_audit(c->agent->core);
    kvf_core_counters(c->agent->core, c->counters);
    c->counters->posting_us = kvf_loop_posting_us(c->agent->loop);
}

void kvf_agent_get_counters(kvf_agent_t *agent, kvf_counters_t *counters_p) {
    look_call_t c = {.agent = agent, .counters = counters_p};
    *counters_p = (kvf_counters_t){0};
    if (agent->loop != NULL) {
        kvf_loop_call(agent->loop, call_counters, &c);
    }
}
