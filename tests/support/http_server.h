/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_HTTP_SERVER_H
#define KVF_TESTS_HTTP_SERVER_H

/**
 * @file
 * A server for tests of the HTTP object: routes whose answers are known, one that keeps its
 * requests until the test answers them, and clients of it.
 */

#include "tools/node/http.h"

#include "http_client.h"
#include "leaks.h"

#include <jansson.h>
#include <pthread.h>

#define BODY_BYTES (1u << 20)
#define MAX_CONNS 300
#define MAX_KEPT 256

static kvf_http_t *http;
static kvf_http_request_t *kept[MAX_KEPT];
static size_t n_kept;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/** Answers with ctx. */
static inline void serve_hello(void *ctx, kvf_http_request_t *request) {
    cr_assert_str_eq(kvf_http_id(request), "");
    kvf_http_answer(request, 200, "text/plain", ctx, strlen(ctx), 0);
}

/** Answers with the body. */
static inline void serve_echo(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    size_t bytes;
    const char *body = kvf_http_body(request, &bytes);
    kvf_http_answer(request, 201, "application/octet-stream", body, bytes, 0);
}

/** Answers with the id in the path. */
static inline void serve_id(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    const char *id = kvf_http_id(request);
    kvf_http_answer(request, 200, "text/plain", id, strlen(id), 0);
}

/** Answers 503, and when to come again. */
static inline void serve_busy(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    kvf_http_answer(request, 503, "text/plain", "busy", 4, 17);
}

/** Answers with an error. */
static inline void serve_again(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    kvf_http_answer_error(request, KVF_ERR_AGAIN, NULL);
}

/** Answers with an object. */
static inline void serve_json(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    json_t *root = json_pack("{s:i}", "n", 7);
    kvf_http_answer_json(request, 200, root);
    json_decref(root);
}

/** Keeps the request for the test. */
static inline void serve_later(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    pthread_mutex_lock(&lock);
    cr_assert_lt(n_kept, MAX_KEPT);
    kept[n_kept++] = request;
    pthread_mutex_unlock(&lock);
}

static const kvf_http_route_t routes[] = {
    {"GET", "/hello", serve_hello, (void *)(uintptr_t) "hello, world"},
    {"GET", "/things/{id}", serve_id, NULL},
    {"POST", "/echo", serve_echo, NULL},
    {"GET", "/echo", serve_hello, (void *)(uintptr_t) "say something"},
    {"GET", "/busy", serve_busy, NULL},
    {"GET", "/again", serve_again, NULL},
    {"GET", "/json", serve_json, NULL},
    {"POST", "/later", serve_later, NULL},
};

/** Make the server. */
static inline kvf_status_t try_create(const char *listen_on, uint32_t max_conns, uint32_t idle_s,
                                      const kvf_alloc_t *alloc, kvf_detail_t *detail) {
    kvf_http_config_t config = {.listen = listen_on,
                                .routes = routes,
                                .n_routes = sizeof(routes) / sizeof(routes[0]),
                                .body_bytes = BODY_BYTES,
                                .max_conns = max_conns,
                                .idle_s = idle_s};
    return kvf_http_create(&config, alloc, &http, detail);
}

/** Make it as most tests need it. */
static inline void start(void) {
    cr_assert_eq(try_create("127.0.0.1:0", MAX_CONNS, 30, kvf_alloc_default(), NULL), KVF_OK);
}

/** End it; nothing may have leaked. */
static inline void stop(void) {
    kvf_http_destroy(http);
    check_leaks();
}

/** @return Requests that wait for the test. */
static inline size_t count_kept(void) {
    pthread_mutex_lock(&lock);
    size_t n = n_kept;
    pthread_mutex_unlock(&lock);
    return n;
}

/** Wait until there are n of them. */
static inline void wait_kept(size_t n) {
    for (int i = 0; count_kept() < n; i++) {
        cr_assert_lt(i, 20000, "a request did not reach its handler");
        usleep(500);
    }
}

/** @return A connection to the server. */
static inline int dial(void) {
    int fd = try_dial(port_of(kvf_http_address(http)));
    cr_assert_geq(fd, 0);
    return fd;
}

/** One request on a connection of its own, and its answer. */
static inline void check(const char *method, const char *path, int status, const char *body) {
    int fd = dial();
    reply_t reply = ask(fd, method, path, "", 0);
    cr_assert_eq(reply.status, status, "%s %s: %s%s", method, path, reply.head, reply.body);
    cr_assert_str_eq(reply.body, body, "%s %s", method, path);
    free(reply.body);
    close(fd);
}

/** The error of an answer, checked for its form. */
static inline void check_error(const reply_t *reply, int status, const char *error,
                               bool recompute) {
    cr_assert_eq(reply->status, status, "%s", reply->head);
    cr_assert_not_null(strstr(reply->head, "Content-Type: application/json\r\n"));
    json_t *root = json_loads(reply->body, JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(root, "%s", reply->body);
    cr_assert_eq(json_object_size(root), 3);
    cr_assert_str_eq(json_string_value(json_object_get(root, "error")), error);
    cr_assert_gt(json_string_length(json_object_get(root, "message")), 10);
    cr_assert_eq(json_object_get(root, "recompute"), json_boolean(recompute));
    json_decref(root);
}

/** One request on a connection of its own, and the error that answers it. */
static inline void expect_error(const char *method, const char *path, int status,
                                const char *error) {
    int fd = dial();
    reply_t reply = ask(fd, method, path, "", 0);
    check_error(&reply, status, error, false);
    free(reply.body);
    close(fd);
}

/** @return Bytes without a pattern; the caller frees them. */
static inline char *make_body(size_t bytes) {
    char *body = malloc(bytes);
    unsigned seed = 3;
    for (size_t i = 0; i < bytes; i++) {
        body[i] = (char)rand_r(&seed);
    }
    return body;
}

/** Answers each second kept request from `arg` on, with the number at which it was kept. */
static inline void *answer_half(void *arg) {
    for (size_t i = (size_t)(uintptr_t)arg; i < n_kept; i += 2) {
        char text[16];
        int n = snprintf(text, sizeof(text), "%zu", i);
        kvf_http_answer(kept[i], 202, "text/plain", text, (size_t)n, 0);
    }
    return NULL;
}

/** Answer all kept requests, from two threads. */
static inline void answer_all(void) {
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++) {
        cr_assert_eq(pthread_create(&threads[i], NULL, answer_half, (void *)(uintptr_t)i), 0);
    }
    for (size_t i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    n_kept = 0;
}

#endif
