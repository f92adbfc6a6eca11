/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

#include <inttypes.h>

#define MAX_PEERS_SHOWN 1024

static void set(json_t *object, const char *name, json_t *value) {
    (void)json_object_set_new(object, name, value); /* without memory a field is absent */
}

static void set_number(json_t *object, const char *name, uint64_t value) {
    set(object, name, json_integer((json_int_t)value));
}

static void answer(kvf_http_request_t *http, unsigned status, json_t *root) {
    kvf_http_answer_json(http, status, root);
    json_decref(root);
}

static void get_healthz(void *ctx, kvf_http_request_t *http) {
    (void)ctx;
    kvf_http_answer(http, 200, "text/plain", "ok\n", 3, 0);
}

static bool is_draining(kvf_node_t *node) {
    (void)pthread_mutex_lock(&node->lock);
    bool draining = node->draining;
    (void)pthread_mutex_unlock(&node->lock);
    return draining;
}

static void get_readyz(void *ctx, kvf_http_request_t *http) {
    if (is_draining(ctx)) {
        kvf_http_answer(http, 503, "text/plain", "draining\n", 9, 0);
    } else {
        kvf_http_answer(http, 200, "text/plain", "ready\n", 6, 0);
    }
}

static json_t *show_peers(kvf_node_t *node) {
    json_t *list = json_array();
    kvf_peer_info_t *infos = kvf_realloc(node->alloc, NULL, MAX_PEERS_SHOWN, sizeof(*infos));
    size_t n = infos == NULL ? 0 : kvf_agent_get_peers(node->agent, infos, MAX_PEERS_SHOWN);
    for (size_t i = 0; i < n && i < MAX_PEERS_SHOWN; i++) {
        json_t *peer = json_object();
        set(peer, "instance", json_string(infos[i].instance));
        set(peer, "address", json_string(infos[i].address));
        set(peer, "incarnation", json_string(infos[i].incarnation));
        set(peer, "state", json_string(kvf_peer_state_name(infos[i].state)));
        set(peer, "mover", json_string(infos[i].mover));
        set(peer, "reason", json_string(infos[i].reason));
        (void)json_array_append_new(list, peer);
    }
    kvf_free(node->alloc, infos);
    return list;
}

/* Pages of all pools by label, and the same pool by pool. */
static void show_pages(kvf_node_t *node, json_t *status) {
    static const char *const names[] = {"free",    "held",        "cached",  "reading",
                                        "writing", "quarantined", "poisoned"};
    uint64_t sums[7] = {0}, total = 0;
    json_t *pools = json_array(), *pages = json_object();
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        kvf_pool_info_t info;
        kvf_pool_get_info(node->pools.pools[g], &info);
        const int64_t counts[7] = {info.free,    info.held,        info.cached,  info.reading,
                                   info.writing, info.quarantined, info.poisoned};
        json_t *pool = json_object(), *labels = json_object();
        for (size_t i = 0; i < 7; i++) {
            set_number(labels, names[i], (uint64_t)counts[i]);
            sums[i] += (uint64_t)counts[i];
        }
        total += (uint64_t)info.n_pages;
        set(pool, "group", json_string(info.group));
        set(pool, "memory", json_string(info.memory));
        set_number(pool, "page_bytes", info.page_bytes);
        set_number(pool, "total", (uint64_t)info.n_pages);
        set(pool, "pages", labels);
        (void)json_array_append_new(pools, pool);
    }
    for (size_t i = 0; i < 7; i++) {
        set_number(pages, names[i], sums[i]);
    }
    set(status, "pages", pages);
    set_number(status, "pages_total", total);
    set(status, "pools", pools);
}

/* What the node itself counts: transfers by state, and time. */
static void show_counts(kvf_node_t *node, json_t *status) {
    static const kvf_status_t all[] = {
#define ITEM(code, name, scope, text, help) KVF_##name,
        KVF_STATUS_MAP(ITEM)
#undef ITEM
    };
    json_t *transfers = json_object(), *time = json_object();
    (void)pthread_mutex_lock(&node->lock);
    set_number(transfers, "running", HASH_COUNT(node->by_id));
    set_number(transfers, "done", node->n_ended[kvf_status_idx(KVF_OK)]);
    for (size_t i = 0; i < KVF_N_STATUSES; i++) {
        if (all[i] != KVF_OK && node->n_ended[i] > 0) {
            set_number(transfers, kvf_status_name(all[i]), node->n_ended[i]);
        }
    }
    set_number(time, "wait", node->time.wait_us);
    set_number(time, "fill", node->time.fill_us);
    set_number(time, "transfer", node->time.transfer_us);
    set_number(time, "verify", node->time.verify_us);
    set(status, "draining", json_boolean(node->draining));
    (void)pthread_mutex_unlock(&node->lock);
    set(status, "transfers", transfers);
    set(status, "time_us", time);
}

static void show_agent(kvf_node_t *node, json_t *status) {
    kvf_counters_t counters;
    json_t *object = json_object();
    kvf_agent_get_counters(node->agent, &counters);
    set_number(object, "bytes_sent", counters.bytes_sent);
    set_number(object, "bytes_received", counters.bytes_received);
    set_number(object, "pieces_sent", counters.pieces_sent);
    set_number(object, "pieces_received", counters.pieces_received);
    set_number(object, "digest_mismatches", counters.digest_mismatches);
    set_number(object, "unknown_transfers", counters.unknown_transfers);
    set_number(object, "refused_chunks", counters.refused_chunks);
    set_number(object, "refused_frames", counters.refused_frames);
    set_number(object, "mover_fallbacks", counters.mover_fallbacks);
    set_number(object, "capacity_mismatches", counters.capacity_mismatches);
    set_number(object, "sends_live", counters.sends_live);
    set_number(object, "recvs_live", counters.recvs_live);
    set(status, "counters", object);
}

static void get_status(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    char incarnation[33];
    json_t *status = json_object();
    kvf_agent_incarnation(node->agent, incarnation);
    set(status, "role", json_string(kvf_role_name(node->role)));
    set(status, "instance", json_string(node->instance));
    set(status, "incarnation", json_string(incarnation));
    set(status, "version", json_string(kvf_version()));
    set(status, "control", json_string(node->control));
    set(status, "model", json_string(node->config->preset));
    set(status, "peers", show_peers(node));
    show_pages(node, status);
    show_counts(node, status);
    show_agent(node, status);
    answer(http, 200, status);
}

static void get_transfer(void *ctx, kvf_http_request_t *http) {
    char request_id[KVF_MAX_ID_BYTES + 1];
    (void)snprintf(request_id, sizeof(request_id), "%s", kvf_http_id(http));
    kvf_job_show(ctx, request_id, http);
}

static void post_cancel(void *ctx, kvf_http_request_t *http) {
    char request_id[KVF_MAX_ID_BYTES + 1];
    kvf_detail_t detail;
    size_t bytes;
    const char *text = kvf_http_body(http, &bytes);
    kvf_status_t status = kvf_body_read_cancel(text, bytes, request_id, &detail);
    if (status != KVF_OK) {
        kvf_http_answer_error(http, status, detail.text);
        return;
    }
    kvf_job_cancel(ctx, request_id, http);
}

static void post_drain(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    json_t *root = json_object();
    kvf_node_drain(node);
    show_counts(node, root);
    answer(http, 200, root);
}

static void post_prefill(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    kvf_body_t body;
    kvf_detail_t detail;
    size_t bytes;
    const char *text = kvf_http_body(http, &bytes);
    kvf_status_t status = kvf_body_read_prefill(node->alloc, text, bytes, &body, &detail);
    if (status != KVF_OK) {
        kvf_http_answer_error(http, status, detail.text);
        return;
    }
    kvf_job_start(node, &kvf_prefill_ops, &body, http);
}

static void post_decode(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    kvf_body_t body;
    kvf_detail_t detail;
    size_t bytes;
    const char *text = kvf_http_body(http, &bytes);
    kvf_status_t status = kvf_body_read_decode(node->alloc, text, bytes, &body, &detail);
    if (status != KVF_OK) {
        kvf_http_answer_error(http, status, detail.text);
        return;
    }
    kvf_job_start(node, &kvf_decode_ops, &body, http);
}

void kvf_node_fill_routes(kvf_node_t *node) {
    bool prefill = node->role == KVF_ROLE_PREFILL;
    const kvf_http_route_t routes[KVF_NODE_ROUTES] = {
        {"GET", "/healthz", get_healthz, node},
        {"GET", "/readyz", get_readyz, node},
        {"GET", "/metrics", get_healthz, node},
        {"GET", "/v1/status", get_status, node},
        {"GET", "/v1/transfers/{id}", get_transfer, node},
        {"POST", "/v1/cancel", post_cancel, node},
        {"POST", "/v1/drain", post_drain, node},
        {"POST", prefill ? "/v1/prefill" : "/v1/decode", prefill ? post_prefill : post_decode,
         node},
    };
    memcpy(node->routes, routes, sizeof(routes));
}
