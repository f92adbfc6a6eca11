/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* pthread_tryjoin_np */

#include "tools/node/http.h"

#include "tests/support/http_client.h"
#include "tests/support/leaks.h"

#include <jansson.h>
#include <pthread.h>

#define BODY_BYTES (1u << 20)
#define MAX_CONNS 300
#define MAX_KEPT 256

/* ---- the server's side ---- */

static kvf_http_t *http;
static kvf_http_request_t *kept[MAX_KEPT];
static size_t n_kept;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void serve_hello(void *ctx, kvf_http_request_t *request) {
    cr_assert_str_eq(kvf_http_id(request), "");
    kvf_http_answer(request, 200, "text/plain", ctx, strlen(ctx), 0);
}

static void serve_echo(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    size_t bytes;
    const char *body = kvf_http_body(request, &bytes);
    kvf_http_answer(request, 201, "application/octet-stream", body, bytes, 0);
}

static void serve_id(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    const char *id = kvf_http_id(request);
    kvf_http_answer(request, 200, "text/plain", id, strlen(id), 0);
}

static void serve_busy(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    kvf_http_answer(request, 503, "text/plain", "busy", 4, 17);
}

static void serve_again(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    kvf_http_answer_error(request, KVF_ERR_AGAIN, NULL);
}

static void serve_json(void *ctx, kvf_http_request_t *request) {
    (void)ctx;
    json_t *root = json_pack("{s:i}", "n", 7);
    kvf_http_answer_json(request, 200, root);
    json_decref(root);
}

static void serve_later(void *ctx, kvf_http_request_t *request) {
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

static kvf_status_t try_create(const char *listen_on, uint32_t max_conns, uint32_t idle_s,
                               const kvf_alloc_t *alloc, kvf_detail_t *detail) {
    kvf_http_config_t config = {.listen = listen_on,
                                .routes = routes,
                                .n_routes = sizeof(routes) / sizeof(routes[0]),
                                .body_bytes = BODY_BYTES,
                                .max_conns = max_conns,
                                .idle_s = idle_s};
    return kvf_http_create(&config, alloc, &http, detail);
}

static void start(void) {
    cr_assert_eq(try_create("127.0.0.1:0", MAX_CONNS, 30, kvf_alloc_default(), NULL), KVF_OK);
}

static void stop(void) {
    kvf_http_destroy(http);
    check_leaks();
}

static size_t count_kept(void) {
    pthread_mutex_lock(&lock);
    size_t n = n_kept;
    pthread_mutex_unlock(&lock);
    return n;
}

static void wait_kept(size_t n) {
    for (int i = 0; count_kept() < n; i++) {
        cr_assert_lt(i, 20000, "a request did not reach its handler");
        usleep(500);
    }
}

static int dial(void) {
    int fd = try_dial(port_of(kvf_http_address(http)));
    cr_assert_geq(fd, 0);
    return fd;
}

/* One request on a connection of its own; the answer's body must be body, or an error of that name.
 */
static void check(const char *method, const char *path, int status, const char *body) {
    int fd = dial();
    reply_t reply = ask(fd, method, path, "", 0);
    cr_assert_eq(reply.status, status, "%s %s: %s%s", method, path, reply.head, reply.body);
    cr_assert_str_eq(reply.body, body, "%s %s", method, path);
    free(reply.body);
    close(fd);
}

/* The error of an answer, checked for its form. */
static void check_error(const reply_t *reply, int status, const char *error, bool recompute) {
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

static void expect_error(const char *method, const char *path, int status, const char *error) {
    int fd = dial();
    reply_t reply = ask(fd, method, path, "", 0);
    check_error(&reply, status, error, false);
    free(reply.body);
    close(fd);
}

TestSuite(http, .init = start, .fini = stop, .timeout = 60);

/* ---- routes ---- */

Test(http, routes) {
    check("GET", "/hello", 200, "hello, world");
    check("GET", "/hello?a=b", 200, "hello, world");
    check("GET", "/echo", 200, "say something");
    check("POST", "/echo", 201, "");
    check("GET", "/json", 200, "{\"n\":7}");
    expect_error("GET", "/", 404, "unknown");
    expect_error("GET", "/hell", 404, "unknown");
    expect_error("GET", "/hello/", 404, "unknown");
    expect_error("GET", "/%68ello", 404, "unknown");
    expect_error("GET", "/\xff\xfe\"\\", 404, "unknown");
    expect_error("POST", "/hello", 405, "invalid");
    expect_error("BREW", "/echo", 405, "invalid");
}

Test(http, wrong_method_names_the_right_ones) {
    int fd = dial();
    reply_t reply = ask(fd, "PUT", "/echo", "", 0);
    check_error(&reply, 405, "invalid", false);
    cr_assert_not_null(strstr(reply.head, "\r\nAllow: POST, GET\r\n"), "%s", reply.head);
    free(reply.body);
    close(fd);
}

Test(http, head_is_get_without_a_body) {
    int fd = dial();
    reply_t reply = ask(fd, "HEAD", "/hello", "", 0);
    cr_assert_eq(reply.status, 200);
    cr_assert_not_null(strstr(reply.head, "Content-Length: 12\r\n"), "%s", reply.head);
    free(reply.body);
    /* Had a body been sent, it would be the head of this answer. */
    reply = ask(fd, "GET", "/hello", "", 0);
    cr_assert_str_eq(reply.body, "hello, world");
    free(reply.body);
    reply = ask(fd, "HEAD", "/later", "", 0);
    cr_assert_eq(reply.status, 405);
    free(reply.body);
    close(fd);
}

Test(http, headers_of_answers) {
    int fd = dial();
    reply_t reply = ask(fd, "GET", "/busy", "", 0);
    cr_assert_eq(reply.status, 503);
    cr_assert_not_null(strstr(reply.head, "\r\nRetry-After: 17\r\n"), "%s", reply.head);
    cr_assert_not_null(strstr(reply.head, "\r\nContent-Type: text/plain\r\n"), "%s", reply.head);
    free(reply.body);
    reply = ask(fd, "GET", "/again", "", 0);
    check_error(&reply, 429, "again", false);
    cr_assert_not_null(strstr(reply.head, "\r\nRetry-After: 1\r\n"), "%s", reply.head);
    free(reply.body);
    reply = ask(fd, "GET", "/hello", "", 0);
    cr_assert_null(strstr(reply.head, "Retry-After"));
    free(reply.body);
    close(fd);
}

Test(http, ids_are_decoded) {
    char path[600] = "/things/", id[129] = "";
    check("GET", "/things/a", 200, "a");
    check("GET", "/things/a%2Fb%20c%c3%BC+d%25", 200, "a/b c\xc3\xbc+d%");
    for (size_t i = 0; i < 128; i++) {
        strcat(path, "%41");
        strcat(id, "A");
    }
    check("GET", path, 200, id);
    strcat(path, "B");
    expect_error("GET", path, 400, "invalid");
    expect_error("GET", "/things/%", 400, "invalid");
    expect_error("GET", "/things/%4", 400, "invalid");
    expect_error("GET", "/things/%4g", 400, "invalid");
    expect_error("GET", "/things/%g4", 400, "invalid");
    expect_error("GET", "/things/a%00b", 400, "invalid");
    expect_error("GET", "/things/", 404, "unknown");
    expect_error("GET", "/things/a/b", 404, "unknown");
}

/* ---- bodies ---- */

static char *make_body(size_t bytes) {
    char *body = malloc(bytes);
    unsigned seed = 3;
    for (size_t i = 0; i < bytes; i++) {
        body[i] = (char)rand_r(&seed);
    }
    return body;
}

Test(http, bodies_up_to_the_limit) {
    static const size_t sizes[] = {1,     2,      4095,           4096,      4097,
                                   65536, 100001, BODY_BYTES - 1, BODY_BYTES};
    char *body = make_body(BODY_BYTES);
    int fd = dial();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        reply_t reply = ask(fd, "POST", "/echo", body, sizes[i]);
        cr_assert_eq(reply.status, 201);
        cr_assert_eq(reply.bytes, sizes[i]);
        cr_assert_arr_eq(reply.body, body, sizes[i]);
        free(reply.body);
    }
    close(fd);
    free(body);
}

Test(http, bodies_over_the_limit) {
    static const size_t sizes[] = {BODY_BYTES + 1, 3 * BODY_BYTES, 16 * BODY_BYTES};
    char *body = make_body(16 * BODY_BYTES);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int fd = dial();
        reply_t reply = ask(fd, "POST", "/echo", body, sizes[i]);
        check_error(&reply, 413, "too_large", false);
        free(reply.body);
        close(fd);
    }
    free(body);
    check("GET", "/hello", 200, "hello, world");
}

Test(http, endless_body_is_cut) {
    static char piece[65536 + 10];
    int fd = dial();
    int n = snprintf(piece, sizeof(piece),
                     "POST /echo HTTP/1.1\r\nHost: x\r\n"
                     "Transfer-Encoding: chunked\r\n\r\n");
    say(fd, piece, (size_t)n);
    memset(piece, 'x', sizeof(piece));
    memcpy(piece, "10000\r\n", 7);
    memcpy(piece + 7 + 65536, "\r\n", 2);
    uint64_t sent = 0;
    while (send(fd, piece, 65536 + 9, MSG_NOSIGNAL) == 65536 + 9) {
        sent += 65536;
        cr_assert_lt(sent, 200u * BODY_BYTES, "nobody stops it");
    }
    cr_assert_gt(sent, 15u * BODY_BYTES);
    close(fd);
    check("GET", "/hello", 200, "hello, world");
}

Test(http, chunked_body) {
    static const char text[] =
        "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n";
    int fd = dial();
    for (const char *at = text; *at != '\0'; at++) {
        say(fd, at, 1);
        usleep(100);
    }
    reply_t reply = hear(fd, false);
    cr_assert_eq(reply.status, 201);
    cr_assert_str_eq(reply.body, "abcdefg");
    free(reply.body);
    close(fd);
}

Test(http, pipelined_requests_are_answered_in_order) {
    static const char text[] = "GET /things/1 HTTP/1.1\r\nHost: x\r\n\r\n"
                               "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\ntwo"
                               "GET /things/3 HTTP/1.1\r\nHost: x\r\n\r\n";
    static const char *const bodies[] = {"1", "two", "3"};
    int fd = dial();
    say(fd, text, sizeof(text) - 1);
    for (size_t i = 0; i < 3; i++) {
        reply_t reply = hear(fd, false);
        cr_assert_str_eq(reply.body, bodies[i]);
        free(reply.body);
    }
    close(fd);
}

/* No part of an answer waits for an acknowledgement, which is delayed by 40 ms.
 */
Test(http, no_request_waits_for_a_delayed_ack) {
    int fd = dial();
    uint64_t start_us = now_us(CLOCK_MONOTONIC);
    for (int i = 0; i < 50; i++) {
        reply_t reply = ask(fd, "POST", "/echo", "some words", 10);
        cr_assert_str_eq(reply.body, "some words");
        free(reply.body);
    }
    cr_assert_lt(now_us(CLOCK_MONOTONIC) - start_us, 50 * 20000);
    close(fd);
}

/* ---- answers from elsewhere ---- */

/* Answers each second kept request from `arg` on, with the number at which it was kept. */
static void *answer_half(void *arg) {
    for (size_t i = (size_t)(uintptr_t)arg; i < n_kept; i += 2) {
        char text[16];
        int n = snprintf(text, sizeof(text), "%zu", i);
        kvf_http_answer(kept[i], 202, "text/plain", text, (size_t)n, 0);
    }
    return NULL;
}

static void answer_all(void) {
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++) {
        cr_assert_eq(pthread_create(&threads[i], NULL, answer_half, (void *)(uintptr_t)i), 0);
    }
    for (size_t i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    n_kept = 0;
}

Test(http, answers_from_other_threads) {
    static const char text[] = "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi";
    int fds[200];
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 200; i++) {
            fds[i] = round == 0 ? dial() : fds[i];
            say(fds[i], text, sizeof(text) - 1);
            wait_kept(i + 1);
        }
        /* Others are served meanwhile. */
        check("GET", "/hello", 200, "hello, world");
        answer_all();
        for (size_t i = 0; i < 200; i++) {
            reply_t reply = hear(fds[i], false);
            cr_assert_eq(reply.status, 202);
            cr_assert_eq(strtoul(reply.body, NULL, 10), i);
            free(reply.body);
        }
    }
    for (size_t i = 0; i < 200; i++) {
        close(fds[i]);
    }
}

/* Takes a request as soon as it is kept: before the server's thread has put it to sleep, or after.
 */
static void *answer_quickly(void *arg) {
    for (int done = 0; done < 300; done++) {
        while (count_kept() == 0) {
        }
        pthread_mutex_lock(&lock);
        kvf_http_request_t *request = kept[--n_kept];
        pthread_mutex_unlock(&lock);
        if (done % 3 == 0) {
            usleep(30);
        }
        kvf_http_answer(request, 200, "text/plain", "quick", 5, 0);
    }
    return arg;
}

Test(http, answers_that_race_with_the_handler) {
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, answer_quickly, NULL), 0);
    int fd = dial();
    for (int i = 0; i < 300; i++) {
        reply_t reply = ask(fd, "POST", "/later", "", 0);
        cr_assert_str_eq(reply.body, "quick");
        free(reply.body);
    }
    pthread_join(thread, NULL);
    close(fd);
}

Test(http, client_that_leaves_early) {
    struct linger hard = {1, 0};
    for (size_t i = 0; i < 20; i++) {
        int fd = dial();
        say_text(fd, "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi");
        wait_kept(i + 1);
        if (i % 2 == 0) {
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
        }
        close(fd);
    }
    /* And some that leave in the middle of a request. */
    for (int i = 0; i < 20; i++) {
        int fd = dial();
        say(fd, "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhi",
            10 + (size_t)i * 2);
        close(fd);
    }
    usleep(20000);
    cr_assert_eq(count_kept(), 20);
    answer_all();
    check("GET", "/hello", 200, "hello, world");
}

/* ---- strangers ---- */

Test(http, noise_is_harmless) {
    static const char tls[] = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    unsigned seed = 11;
    int patient = dial();
    for (int i = 0; i < 100; i++) {
        char noise[3000];
        size_t bytes = (size_t)rand_r(&seed) % sizeof(noise);
        for (size_t j = 0; j < bytes; j++) {
            noise[j] = (char)rand_r(&seed);
        }
        if (i % 4 == 0) {
            memcpy(noise, tls, sizeof(tls));
            bytes = bytes < sizeof(tls) ? sizeof(tls) : bytes;
        } else if (i % 4 == 1) {
            memset(noise, 'A', sizeof(noise)); /* a first line without end */
        }
        int fd = dial();
        (void)!send(fd, noise, bytes, MSG_NOSIGNAL);
        close(fd);
    }
    reply_t reply = ask(patient, "GET", "/hello", "", 0);
    cr_assert_str_eq(reply.body, "hello, world");
    free(reply.body);
    close(patient);
}

Test(http, idle_takes_no_processor_time) {
    int fds[50];
    for (size_t i = 0; i < 50; i++) {
        fds[i] = dial();
        if (i % 2 == 0) {
            say_text(fds[i], "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
        }
    }
    wait_kept(25);
    for (size_t i = 0; i < 10; i++) { /* some leave while they are served */
        close(fds[i]);
    }
    uint64_t start_us = now_us(CLOCK_PROCESS_CPUTIME_ID);
    usleep(1000000);
    cr_assert_lt(now_us(CLOCK_PROCESS_CPUTIME_ID) - start_us, 5000);
    answer_all();
    for (size_t i = 10; i < 50; i++) {
        close(fds[i]);
    }
}

Test(http, thousands_of_connections) {
    static int fds[2000];
    size_t served = 0, refused = 0;
    for (size_t i = 0; i < 2000; i++) {
        fds[i] = dial();
    }
    for (size_t i = 0; i < 2000; i++) {
        char byte;
        (void)try_say(fds[i], "GET /things/x HTTP/1.1\r\nHost: x\r\n\r\n");
        ssize_t n = recv(fds[i], &byte, 1, 0);
        cr_assert(n >= 0 || errno == ECONNRESET, "%s", strerror(errno));
        served += n == 1;
        refused += n != 1;
    }
    cr_assert_eq(served, MAX_CONNS);
    cr_assert_eq(refused, 2000 - MAX_CONNS);
    for (size_t i = 0; i < 2000; i++) {
        close(fds[i]);
    }
    for (int i = 0;; i++) { /* the server notices soon that there is room again */
        int fd = dial();
        reply_t reply = {0};
        if (try_say(fd, "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")) {
            reply = hear(fd, false);
        }
        free(reply.body);
        close(fd);
        if (reply.status == 200) {
            break;
        }
        cr_assert_lt(i, 1000);
        usleep(1000);
    }
}

/* ---- without a server to begin with ---- */

TestSuite(http_create, .timeout = 60);

static void *destroy(void *arg) {
    kvf_http_destroy(http);
    return arg;
}

Test(http_create, destroy_waits_for_answers) {
    pthread_t thread;
    start();
    int live = dial(), idle = dial();
    reply_t reply = ask(idle, "GET", "/hello", "", 0);
    free(reply.body);
    say_text(live, "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    wait_kept(1);
    cr_assert_eq(pthread_create(&thread, NULL, destroy, NULL), 0);
    usleep(100000);
    /* New ones are refused: on a connection that is there, and as a new connection. */
    reply = ask(idle, "GET", "/hello", "", 0);
    check_error(&reply, 429, "again", false);
    free(reply.body);
    cr_assert_lt(try_dial(port_of(kvf_http_address(http))), 0);
    cr_assert_eq(pthread_tryjoin_np(thread, NULL), EBUSY);
    answer_all();
    reply = hear(live, false);
    cr_assert_eq(reply.status, 202);
    cr_assert_str_eq(reply.body, "0");
    free(reply.body);
    pthread_join(thread, NULL);
    close(live);
    close(idle);
}

Test(http_create, addresses) {
    kvf_detail_t detail = {""};
    const kvf_alloc_t *alloc = kvf_alloc_default();
    cr_assert_eq(try_create("localhost:1", 4, 1, alloc, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "localhost:1"));
    cr_assert_eq(try_create("127.0.0.1:0", 0, 1, alloc, NULL), KVF_ERR_INVALID);
    cr_assert_eq(try_create("127.0.0.1:0", 4, 0, alloc, NULL), KVF_ERR_INVALID);
    cr_assert_null(http);
    cr_assert_eq(try_create("[::1]:0", 4, 1, alloc, NULL), KVF_OK);
    cr_assert_eq(strncmp(kvf_http_address(http), "[::1]:", 6), 0);
    cr_assert_gt(port_of(kvf_http_address(http)), 0);
    stop();
    cr_assert_eq(try_create("0.0.0.0:0", 4, 1, alloc, NULL), KVF_OK);
    cr_assert_eq(strncmp(kvf_http_address(http), "0.0.0.0:", 8), 0);
    check("GET", "/hello", 200, "hello, world");
    stop();
}

Test(http_create, address_in_use_and_free_again) {
    kvf_detail_t detail = {""};
    char address[80];
    start();
    kvf_http_t *first = http;
    (void)snprintf(address, sizeof(address), "%s", kvf_http_address(http));
    cr_assert_eq(try_create(address, 4, 1, kvf_alloc_default(), &detail), KVF_ERR_IO);
    cr_assert_eq(http, first);
    cr_assert_not_null(strstr(detail.text, address));
    cr_assert_not_null(strstr(detail.text, "already in use"), "%s", detail.text);
    cr_assert_not_null(strstr(detail.text, "http.listen"), "%s", detail.text);
    check("GET", "/hello", 200, "hello, world");
    stop();
    cr_assert_eq(try_create(address, 4, 1, kvf_alloc_default(), &detail), KVF_OK);
    check("GET", "/hello", 200, "hello, world");
    stop();
    kvf_http_destroy(NULL);
}

Test(http_create, silent_connections_end) {
    char byte;
    cr_assert_eq(try_create("127.0.0.1:0", 4, 1, kvf_alloc_default(), NULL), KVF_OK);
    int silent = dial(), halfway = dial(), kept_one = dial();
    say_text(halfway, "POST /later HTT");
    say_text(kept_one, "POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    wait_kept(1);
    uint64_t start_us = now_us(CLOCK_MONOTONIC);
    cr_assert_leq(recv(silent, &byte, 1, 0), 0);
    while (recv(halfway, &byte, 1, 0) > 0) { /* 408 is an answer, too */
    }
    uint64_t took_us = now_us(CLOCK_MONOTONIC) - start_us;
    cr_assert(took_us > 500000 && took_us < 5000000, "%llu us", (unsigned long long)took_us);
    /* A handler may take as long as it wants. */
    answer_all();
    reply_t reply = hear(kept_one, false);
    cr_assert_eq(reply.status, 202);
    free(reply.body);
    close(silent);
    close(halfway);
    close(kept_one);
    stop();
}

Test(http_create, every_allocation_may_fail) {
    char *body = make_body(300000);
    bool whole = false;
    uint64_t n = 0;
    while (!whole) {
        kvf_alloc_fail_t memory;
        kvf_alloc_fail_init(&memory, ++n);
        if (try_create("127.0.0.1:0", 4, 5, &memory.table, NULL) == KVF_OK) {
            int fd = dial();
            reply_t reply = {0};
            (void)try_say(fd, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n");
            for (size_t sent = 0; sent < 300000;) {
                ssize_t some = send(fd, body + sent, 300000 - sent, MSG_NOSIGNAL);
                sent = some < 0 ? 300000 : sent + (size_t)some;
            }
            reply = hear(fd, false);
            bool served = reply.status == 201;
            cr_assert(served || reply.status == 0);
            if (served) {
                cr_assert_eq(reply.bytes, 300000);
                cr_assert_arr_eq(reply.body, body, 300000);
            }
            free(reply.body);
            close(fd);
            stop();
            whole = memory.calls < n; /* none failed */
            cr_assert(served || !whole);
        }
        cr_assert_eq(memory.live, 0);
    }
    cr_assert_gt(n, 3);
    free(body);
}
