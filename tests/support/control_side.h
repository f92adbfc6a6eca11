/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_CONTROL_SIDE_H
#define KVF_TEST_CONTROL_SIDE_H

/**
 * @file
 * For the tests of the control channel: one channel on a real loop, with what it told and what the
 * test does then.
 */

#include "transceiver/control/control.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define MIB (UINT64_C(1) << 20)
#define BACKLOG_BYTES (8 * MIB)

static uv_loop_t loop;
static kvf_alloc_fail_t memory;
static bool inside; /* one of the channel's functions is running */
#define MAX_SIDES 2
static kvf_control_t *controls[MAX_SIDES]; /* that live */

/* What a test does in an event. */
typedef enum reaction { DO_WATCH, DO_ECHO, DO_CLOSE, DO_DESTROY } reaction_t;

/* One channel and what it told. */
typedef struct side {
    kvf_control_t *control;
    reaction_t on_opened, on_bytes, on_closed;
    int opened, opened_inbound, closed;
    uint64_t opened_conn, closed_conn, bytes, salt, turn_bytes;
    char address[80], why[128];
} side_t;

/* Byte i of a stream; another for each salt. */
static inline uint8_t byte_at(uint64_t salt, uint64_t i) {
    uint64_t x = (i / 8 + 1) * 0x9e3779b97f4a7c15u + salt * 0xda942042e4dd58b5u;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    return (uint8_t)(x >> (8 * (i % 8)));
}

static inline uint8_t *piece(uint64_t salt, uint64_t from, size_t bytes) {
    uint8_t *data = kvf_alloc(&memory.table, bytes);
    for (size_t i = 0; data != NULL && i < bytes; i++) {
        data[i] = byte_at(salt, from + i);
    }
    return data;
}

static inline uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static inline kvf_status_t send_piece(side_t *side, uint64_t conn, uint8_t *data, size_t bytes) {
    inside = true;
    kvf_status_t status = kvf_control_send(side->control, conn, data, bytes);
    inside = false;
    return status;
}

static inline void close_conn(side_t *side, uint64_t conn) {
    inside = true;
    kvf_control_close(side->control, conn);
    inside = false;
}

static inline void destroy(side_t *side) {
    inside = true;
    kvf_control_destroy(side->control);
    inside = false;
    for (int i = 0; i < MAX_SIDES; i++) {
        controls[i] = controls[i] == side->control ? NULL : controls[i];
    }
    side->control = NULL;
}

static inline void react(side_t *side, reaction_t reaction, uint64_t conn) {
    if (reaction == DO_CLOSE) {
        close_conn(side, conn);
    } else if (reaction == DO_DESTROY) {
        destroy(side);
    }
}

static inline void on_opened(void *ctx, uint64_t conn, bool inbound, const char *address) {
    side_t *side = ctx;
    cr_assert_not(inside);
    cr_assert_neq(conn, 0);
    side->opened++;
    side->opened_inbound += inbound;
    side->opened_conn = conn;
    (void)snprintf(side->address, sizeof(side->address), "%s", address);
    react(side, side->on_opened, conn);
}

static inline void on_bytes(void *ctx, uint64_t conn, const uint8_t *data, size_t bytes) {
    side_t *side = ctx;
    cr_assert_not(inside);
    cr_assert_gt(side->opened, 0);
    cr_assert_gt(bytes, 0);
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != byte_at(side->salt, side->bytes + i)) {
            cr_assert_fail("byte %llu is wrong", (unsigned long long)(side->bytes + i));
        }
    }
    side->bytes += bytes;
    side->turn_bytes += bytes;
    if (side->on_bytes == DO_ECHO) {
        uint8_t *copy = kvf_alloc(&memory.table, bytes);
        memcpy(copy, data, bytes);
        cr_assert_eq(send_piece(side, conn, copy, bytes), KVF_OK);
    }
    react(side, side->on_bytes, conn);
}

static inline void on_closed(void *ctx, uint64_t conn, const char *why) {
    side_t *side = ctx;
    cr_assert_not(inside);
    side->closed++;
    side->closed_conn = conn;
    (void)snprintf(side->why, sizeof(side->why), "%s", why);
    react(side, side->on_closed, conn);
}

static inline kvf_status_t try_create(side_t *side, const char *listen, uint32_t max_conns,
                                      kvf_detail_t *detail) {
    kvf_control_events_t events = {on_opened, on_bytes, on_closed, side};
    kvf_control_config_t config = {listen, BACKLOG_BYTES, max_conns};
    inside = true;
    kvf_status_t status =
        kvf_control_create(&config, &loop, &memory.table, &events, &side->control, detail);
    inside = false;
    for (int i = 0; i < MAX_SIDES && status == KVF_OK; i++) {
        if (controls[i] == NULL) {
            controls[i] = side->control;
            break;
        }
    }
    return status;
}

static inline void create(side_t *side, const char *listen, uint32_t max_conns) {
    cr_assert_eq(try_create(side, listen, max_conns, NULL), KVF_OK);
}

static inline kvf_status_t try_dial(side_t *side, const char *address, uint64_t *conn_p,
                                    kvf_detail_t *detail) {
    inside = true;
    kvf_status_t status = kvf_control_dial(side->control, address, conn_p, detail);
    inside = false;
    return status;
}

static inline uint64_t dial(side_t *side, const char *address) {
    uint64_t conn = 0;
    cr_assert_eq(try_dial(side, address, &conn, NULL), KVF_OK);
    cr_assert_neq(conn, 0);
    return conn;
}

/* Does what an agent's loop does; but it flushes first, because a test sends between turns. */
static inline void turn(void) {
    for (int i = 0; i < MAX_SIDES; i++) {
        if (controls[i] != NULL) {
            kvf_control_flush(controls[i]);
        }
    }
    if (uv_run(&loop, UV_RUN_NOWAIT) != 0) {
        usleep(50);
    }
}

/* Run the loop until a condition holds; fails after 20 s. */
#define RUN_UNTIL(condition)                                                                       \
    do {                                                                                           \
        for (uint64_t end_ms = now_ms() + 20000; !(condition);) {                                  \
            cr_assert_lt(now_ms(), end_ms, "never: %s", #condition);                               \
            turn();                                                                                \
        }                                                                                          \
    } while (0)

/* Long enough for a second event, or one too many, to come. */
static inline void run_ms(uint64_t ms) {
    for (uint64_t end_ms = now_ms() + ms; now_ms() < end_ms;) {
        turn();
    }
}

static inline void setup(void) {
    signal(SIGPIPE, SIG_IGN);
    cr_assert_eq(uv_loop_init(&loop), 0);
    kvf_alloc_fail_init(&memory, 0);
}

/* Everything ends by itself: the loop has no handle and the allocator no memory left. */
static inline void finish(side_t *a, side_t *b) {
    destroy(a);
    destroy(b);
    RUN_UNTIL(!uv_loop_alive(&loop));
    cr_assert_eq(uv_loop_close(&loop), 0);
    cr_assert_eq(memory.live, 0);
}

static inline unsigned port_of(const char *address) {
    return (unsigned)strtoul(strrchr(address, ':') + 1, NULL, 10);
}

static inline struct sockaddr_in loopback(unsigned port) {
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* A plain client socket, connected to a channel. */
static inline int stranger(const side_t *side) {
    struct sockaddr_in addr = loopback(port_of(kvf_control_address(side->control)));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_geq(fd, 0);
    cr_assert_eq(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    return fd;
}

/* A plain socket bound to a port of its own; nothing listens there yet. */
static inline int bound_socket(char address[32]) {
    struct sockaddr_in addr = loopback(0);
    socklen_t len = sizeof(addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_geq(fd, 0);
    cr_assert_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
    (void)snprintf(address, 32, "127.0.0.1:%u", ntohs(addr.sin_port));
    return fd;
}

/* Whether the other end of fd has ended, or sent something. */
static inline bool readable(int fd) {
    struct pollfd one = {fd, POLLIN, 0};
    return poll(&one, 1, 0) == 1;
}

#endif
