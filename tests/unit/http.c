/* SPDX-License-Identifier: Apache-2.0 */
#include "../support/http_server.h"

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
