/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_TCP_DIAL_H
#define KVF_TEST_TCP_DIAL_H

/**
 * @file
 * For the tests of the mover tcp: connections to it without a mover of their own.
 */

#include "tests/support/mover_side.h"
#include "transceiver/mover/tcp_wire.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

static inline kvf_tcp_address_t address_of(const side_t *side) {
    kvf_tcp_address_t address;
    cr_assert_eq(kvf_tcp_address_read(side->address, side->address_bytes, &address, NULL), KVF_OK);
    return address;
}

/* A connection without a mover. */
static inline int dial(const side_t *side) {
    const kvf_tcp_address_t address = address_of(side);
    const int yes = 1;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_geq(fd, 0);
    cr_assert_eq(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)), 0);
    cr_assert_eq(
        connect(fd, (const struct sockaddr *)&address.at, kvf_tcp_address_length(&address.at)), 0);
    return fd;
}

static inline void send_all(int fd, const void *data, size_t bytes) {
    cr_assert_eq(send(fd, data, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
}

static inline int dial_proven(const side_t *side) {
    const kvf_tcp_address_t address = address_of(side);
    uint8_t preamble[KVF_TCP_PREAMBLE_BYTES];
    int fd = dial(side);
    kvf_tcp_preamble_write(address.token, preamble);
    send_all(fd, preamble, sizeof(preamble));
    return fd;
}

static inline void turn_a_while(side_t *side) {
    struct pollfd readable = {side->mover->ops->fd(side->mover), POLLIN, 0};
    while (turn(side) > 0 || poll(&readable, 1, 20) > 0) {
    }
}

/* Whether the other end has closed. */
static inline bool is_closed(int fd) {
    char bytes[KVF_TCP_TOKEN_BYTES];
    ssize_t got;
    do { /* first comes the answer to who knew the token */
        got = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
    } while (got > 0);
    return got == 0 || (got < 0 && errno != EAGAIN);
}

static inline kvf_chunk_t chunk_at(int32_t slot, uint64_t offset, uint64_t bytes) {
    kvf_chunk_t chunk = {.group_idx = 3,
                         .slot = slot,
                         .ordinal = 100 + slot,
                         .generation = 7,
                         .grant_key = 4711,
                         .offset = offset,
                         .bytes = bytes};
    chunk.transfer.counter = 42;
    return chunk;
}

/* A frame with its bytes. @return Its length. */
static inline size_t make_frame(const kvf_chunk_t *chunks, uint32_t n, const uint8_t *source,
                                uint8_t *out) {
    size_t at = KVF_TCP_HEAD_BYTES;
    kvf_tcp_head_write(n, out);
    for (uint32_t i = 0; i < n; i++, at += KVF_CHUNK_HEADER_BYTES) {
        kvf_chunk_encode(&chunks[i], out + at);
    }
    for (uint32_t i = 0; i < n; i++) {
        memcpy(out + at, source, chunks[i].bytes);
        source += chunks[i].bytes;
        at += chunks[i].bytes;
    }
    return at;
}

/* A peer that does as it should, after all that. */
static inline void expect_to_work(side_t *b) {
    side_t a;
    side_open(&a, OWN_TCP);
    side_connect(&a, 1, b->address, b->address_bytes);
    uint8_t *source = make_source(300000);
    kvf_piece_t piece = piece_at(source, 0, 300000, 7, 11);
    kvf_window_t window = window_of(&piece, 1);
    b->landed_bytes = 0;
    cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
    run_until_landed(&a, b, 1, 300000);
    cr_assert_arr_eq(b->slots + 7 * SLOT_BYTES + 11, source, 300000);
    side_close(&a);
    free(source);
}

#endif
