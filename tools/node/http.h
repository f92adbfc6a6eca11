/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_NODE_HTTP_H
#define KVF_NODE_HTTP_H

/**
 * @file
 * The HTTP side of a node: a table of routes on libmicrohttpd, one thread, answers now or later
 * from any thread.
 *
 * Unknown paths get 404, known ones with another method 405; HEAD is served by the GET route. A
 * body over the limit gets 413. Every error is JSON: {error, message, recompute}.
 */

#include "kvmgr/base/alloc.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvf_http kvf_http_t;

/** One request, from the call of its handler to its answer. */
typedef struct kvf_http_request kvf_http_request_t;

/**
 * Serve a request. Runs on the server's one thread and must not block; the request is the handler's
 * until it, or somebody later on any thread, answers it: exactly once, in every case.
 */
typedef void (*kvf_http_handler_cb)(void *ctx, kvf_http_request_t *request);

typedef struct kvf_http_route {
    const char *method; /**< "GET", "POST" ... */
    const char *path;   /**< "/v1/status"; a last part "{id}" takes any one part, percent-decoded */
    kvf_http_handler_cb handler;
    void *ctx;
} kvf_http_route_t;

/** All fields are required. Borrowed during kvf_http_create(); the routes until the end. */
typedef struct kvf_http_config {
    const char *listen; /**< "host:port", "[v6]:port", numeric, any address; port 0 picks one */
    const kvf_http_route_t *routes;
    size_t n_routes;
    uint64_t body_bytes; /**< longest request body */
    uint32_t max_conns;  /**< connections at once; more are closed at once */
    uint32_t idle_s;     /**< seconds of silence that close a connection, unless a handler has it */
} kvf_http_config_t;

/**
 * Listen and serve.
 *
 * @param alloc        Must be safe from any thread.
 * @param[out] http_p  kvf_http_destroy() it.
 * @return KVF_OK; KVF_ERR_INVALID (address, a zero limit); KVF_ERR_IO (address in use ...: the text
 *         says what to do); KVF_ERR_NO_MEMORY.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_http_create(const kvf_http_config_t *config, const kvf_alloc_t *alloc,
                                       kvf_http_t **http_p, kvf_detail_t *detail);

/** @return The real "host:port" that is listened on. Owned by http. @thread any */
const char *kvf_http_address(const kvf_http_t *http);

/**
 * Refuse new requests, wait until those that a handler has are answered and sent (one to a client
 * that does not read: at most idle_s), then free everything. NULL is allowed.
 *
 * @thread any but a handler's; not one that requests wait for
 */
void kvf_http_destroy(kvf_http_t *http);

/** @return What stood for "{id}" in the path: 1..128 bytes, decoded, without a zero; "" without
 * one. Until the answer. */
const char *kvf_http_id(const kvf_http_request_t *request);

/** @param[out] bytes_p  Length of the body. @return The body; never NULL. Until the answer. */
const char *kvf_http_body(const kvf_http_request_t *request, size_t *bytes_p);

/**
 * Answer, exactly once; the request is gone afterwards. A client that has left makes no difference.
 *
 * @param status         HTTP status.
 * @param body           Copied.
 * @param retry_after_s  Seconds for a Retry-After header; 0 = none.
 * @thread any
 */
void kvf_http_answer(kvf_http_request_t *request, unsigned status, const char *content_type,
                     const char *body, size_t bytes, unsigned retry_after_s);

/** Answer with JSON. @param root  Borrowed; NULL (no memory) becomes an error. @thread any */
void kvf_http_answer_json(kvf_http_request_t *request, unsigned status, const json_t *root);

/**
 * Answer with an error, by the table in http_error.h.
 *
 * @param message  The exact cause, then what to do; NULL or "" gives the status' own text.
 * @thread any
 */
void kvf_http_answer_error(kvf_http_request_t *request, kvf_status_t status, const char *message);

/** Answer `unknown` about something that is only looked up: there is nothing to prefill again.
 * @thread any */
void kvf_http_answer_absent(kvf_http_request_t *request, const char *message);

#endif
