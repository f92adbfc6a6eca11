/* SPDX-License-Identifier: Apache-2.0 */
/* Servers that begin, end, and meet strangers. */
#define _GNU_SOURCE /* pthread_tryjoin_np */
#include "../support/http_server.h"

/* ---- strangers ---- */

TestSuite(http_strangers, .init = start, .fini = stop, .timeout = 60);

Test(http_strangers, noise_is_harmless) {
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

Test(http_strangers, idle_takes_no_processor_time) {
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

Test(http_strangers, thousands_of_connections) {
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
