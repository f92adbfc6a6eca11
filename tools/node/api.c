/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

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
    (void)json_object_set_new(root, "draining", json_true());
    (void)pthread_mutex_lock(&node->lock);
    (void)json_object_set_new(root, "running", json_integer(HASH_COUNT(node->by_id)));
    (void)pthread_mutex_unlock(&node->lock);
    kvf_http_answer_json(http, 200, root);
    json_decref(root);
}

static void post_prefill(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    kvf_body_t body;
    kvf_detail_t detail;
    size_t bytes;
    const char *text = kvf_http_body(http, &bytes);
    kvf_status_t status = kvf_body_read_prefill(node->alloc, text, bytes, &body, &detail);
    if (status != KVF_OK) {
        kvf_node_refuse(node, http, status, detail.text);
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
    bool verify = strcmp(node->config->verify, "off") != 0;
    kvf_status_t status = kvf_body_read_decode(node->alloc, text, bytes, verify, &body, &detail);
    if (status != KVF_OK) {
        kvf_node_refuse(node, http, status, detail.text);
        return;
    }
    body.lengths.num_extra_kv_tokens = (int64_t)node->config->extra_tokens;
    kvf_job_start(node, &kvf_decode_ops, &body, http);
}

/* What the other kind of node has, for who mixed the two up. */
static void post_elsewhere(void *ctx, kvf_http_request_t *http) {
    const kvf_node_t *node = ctx;
    kvf_http_answer_absent(http, node->role == KVF_ROLE_PREFILL
                                     ? "this is a prefill node; ask a decode node for /v1/decode"
                                     : "this is a decode node; ask a prefill node for /v1/prefill");
}

void kvf_node_fill_routes(kvf_node_t *node) {
    bool prefill = node->role == KVF_ROLE_PREFILL;
    const kvf_http_route_t routes[KVF_NODE_ROUTES] = {
        {"GET", "/healthz", get_healthz, node},
        {"GET", "/readyz", get_readyz, node},
        {"GET", "/metrics", kvf_node_get_metrics, node},
        {"GET", "/v1/status", kvf_node_get_status, node},
        {"GET", "/v1/transfers/{id}", get_transfer, node},
        {"POST", "/v1/cancel", post_cancel, node},
        {"POST", "/v1/drain", post_drain, node},
        {"POST", prefill ? "/v1/prefill" : "/v1/decode", prefill ? post_prefill : post_decode,
         node},
        {"POST", prefill ? "/v1/decode" : "/v1/prefill", post_elsewhere, node},
    };
    memcpy(node->routes, routes, sizeof(routes));
}
