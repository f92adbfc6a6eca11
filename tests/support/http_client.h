/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_HTTP_CLIENT_H
#define KVF_TEST_HTTP_CLIENT_H

/**
 * @file
 * An HTTP client of plain sockets, for tests that look at every byte.
 */

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static inline unsigned port_of(const char *address) {
    return (unsigned)strtoul(strrchr(address, ':') + 1, NULL, 10);
}

/* A connection to a loopback port, or -1. */
static inline int try_dial(unsigned port) {
    struct sockaddr_in addr = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval patience = {10, 0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(fd, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static inline void say(int fd, const char *text, size_t bytes) {
    while (bytes > 0) {
        ssize_t n = send(fd, text, bytes, MSG_NOSIGNAL);
        cr_assert_gt(n, 0, "%s", strerror(errno));
        text += n;
        bytes -= (size_t)n;
    }
}

/* The same to somebody who may have left. */
static inline bool try_say(int fd, const char *text) {
    return send(fd, text, strlen(text), MSG_NOSIGNAL) == (ssize_t)strlen(text);
}

static inline void say_text(int fd, const char *text) {
    say(fd, text, strlen(text));
}

typedef struct reply {
    int status;
    char head[4096];
    char *body; /* zero-terminated; the test frees it */
    size_t bytes;
} reply_t;

/* Read one answer; status 0 when the connection ended before it was whole. */
static inline reply_t hear(int fd, bool head_only) {
    reply_t reply = {0};
    size_t n = 0;
    while (n < sizeof(reply.head) - 1 && strstr(reply.head, "\r\n\r\n") == NULL) {
        if (recv(fd, reply.head + n, 1, 0) != 1) {
            return reply;
        }
        n++;
    }
    const char *length = strstr(reply.head, "Content-Length: ");
    cr_assert_not_null(length, "%s", reply.head);
    size_t total = head_only ? 0 : strtoul(length + 16, NULL, 10);
    reply.body = calloc(1, total + 1);
    while (reply.bytes < total) {
        ssize_t got = recv(fd, reply.body + reply.bytes, total - reply.bytes, 0);
        if (got <= 0) {
            return reply;
        }
        reply.bytes += (size_t)got;
    }
    cr_assert_eq(strncmp(reply.head, "HTTP/1.1 ", 9), 0, "%s", reply.head);
    reply.status = (int)strtol(reply.head + 9, NULL, 10);
    return reply;
}

static inline reply_t ask(int fd, const char *method, const char *path, const char *body,
                          size_t bytes) {
    char head[1024];
    int n = snprintf(head, sizeof(head), "%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n",
                     method, path, bytes);
    say(fd, head, (size_t)n);
    say(fd, body, bytes);
    return hear(fd, strcmp(method, "HEAD") == 0);
}

static inline uint64_t now_us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

#endif
