/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_MOVER_SIDE_H
#define KVF_TEST_MOVER_SIDE_H

/**
 * @file
 * For the tests of movers that carry chunks between processes: one agent's end, with what it told,
 * and bytes that say where they come from.
 */

#include "transceiver/mover/tcp.h"
#include "transceiver/mover/ucx.h"

#include "kvmgr/base/clock.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLOT_BYTES (UINT64_C(8) << 20)
#define N_SLOTS 8U
#define FILL 0xEE

#define OWN_TCP "own"
/* Of ucx; and the mover tcp. */
static const char *const transports[] = {"tcp,self", "posix,self", "auto", OWN_TCP};
#define N_TRANSPORTS (sizeof(transports) / sizeof(transports[0]))
#define N_UCX_TRANSPORTS (N_TRANSPORTS - 1)

/* One agent: a mover, and slots that chunks land in. */
typedef struct side {
    kvf_log_t log;
    kvf_ucx_t *ucx; /* NULL: its mover is tcp */
    kvf_mover_t *mover;
    uint8_t *slots;
    uint64_t landed_bytes, n_landed, n_stray;
    uint32_t n_moved, n_lost, n_broken;
    kvf_status_t status;
    kvf_window_t *last;
    uint64_t broken_peer;
    bool leave_at_moved; /* the first moved disconnects */
    uint8_t address[2048];
    size_t address_bytes;
} side_t;

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    side_t *side = ctx;
    if (chunk->slot >= (int32_t)N_SLOTS || chunk->offset > SLOT_BYTES ||
        chunk->bytes > SLOT_BYTES - chunk->offset || chunk->ordinal != 100 + chunk->slot ||
        chunk->generation != 7 || chunk->group_idx != 3 || chunk->transfer.counter != 42 ||
        chunk->grant_key != 4711) {
        side->n_stray++;
        return KVF_ERR_RANGE;
    }
    *landing_p =
        (kvf_landing_t){side->slots + (uint64_t)chunk->slot * SLOT_BYTES + chunk->offset, NULL};
    return KVF_OK;
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    side_t *side = ctx;
    side->landed_bytes += chunk->bytes;
    side->n_landed++;
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    side_t *side = ctx;
    side->n_moved++;
    side->n_lost += status == KVF_ERR_PEER_LOST;
    cr_assert(status == KVF_OK || status == KVF_ERR_PEER_LOST);
    side->last = window;
    side->status = status;
    if (side->leave_at_moved) {
        side->mover->ops->disconnect(side->mover, window->peer);
    }
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    side_t *side = ctx;
    cr_assert(why[0] != '\0');
    side->n_broken++;
    side->broken_peer = peer;
}

static inline struct sockaddr_storage loopback(void) {
    const struct sockaddr_in in = {.sin_family = AF_INET,
                                   .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    struct sockaddr_storage host = {0};
    memcpy(&host, &in, sizeof(in));
    return host;
}

static inline void side_open(side_t *side, const char *tls) {
    const kvf_ucx_config_t config = {.tls = tls, .devices = "auto", .listen_host = "127.0.0.1"};
    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, side};
    kvf_detail_t detail = {""};
    memset(side, 0, sizeof(*side));
    side->slots = malloc(N_SLOTS * SLOT_BYTES);
    cr_assert_not_null(side->slots);
    memset(side->slots, FILL, N_SLOTS * SLOT_BYTES);
    side->log = kvf_log_stderr(KVF_LOG_WARN);
    if (strcmp(tls, OWN_TCP) == 0) {
        const struct sockaddr_storage host = loopback();
        cr_assert_eq(kvf_mover_tcp_create(&host, kvf_alloc_default(), &side->log, &sink,
                                          &side->mover, &detail),
                     KVF_OK, "%s", detail.text);
    } else {
        cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), &side->log, &side->ucx, &detail),
                     KVF_OK, "%s", detail.text);
        cr_assert_eq(kvf_mover_ucx_create(side->ucx, &sink, &side->mover, &detail), KVF_OK, "%s",
                     detail.text);
    }
    cr_assert_eq(side->mover->ops->address(side->mover, side->address, sizeof(side->address),
                                           &side->address_bytes),
                 KVF_OK);
}

static inline void side_close(side_t *side) {
    side->mover->ops->destroy(side->mover);
    kvf_ucx_destroy(side->ucx);
    free(side->slots);
}

static inline void side_connect(side_t *side, uint64_t number, const void *address, size_t bytes) {
    kvf_detail_t detail = {""};
    cr_assert_eq(side->mover->ops->connect(side->mover, number, address, bytes, &detail), KVF_OK,
                 "%s", detail.text);
}

static inline unsigned turn(side_t *side) {
    return side->mover->ops->progress(side->mover);
}

static inline uint64_t now_us(void) {
    return kvf_clock_default()->now_us(NULL);
}

/* Source bytes that say where they come from. */
static inline uint8_t byte_at(uint64_t position) {
    return (uint8_t)(position * 131 + (position >> 12) * 17 + 1);
}

static inline uint8_t *make_source(uint64_t bytes) {
    uint8_t *source = malloc(bytes);
    cr_assert_not_null(source);
    for (uint64_t i = 0; i < bytes; i++) {
        source[i] = byte_at(i);
    }
    return source;
}

static inline kvf_piece_t piece_at(const uint8_t *source, uint64_t from, uint64_t bytes,
                                   int32_t slot, uint64_t offset) {
    return (kvf_piece_t){.source = source + from,
                         .bytes = bytes,
                         .offset = offset,
                         .ordinal = 100 + slot,
                         .generation = 7,
                         .group_idx = 3,
                         .slot = slot};
}

static inline kvf_window_t window_of(kvf_piece_t *pieces, uint32_t n) {
    kvf_window_t window = {
        .peer = 1, .digests = true, .pieces = pieces, .n_pieces = n, .owner = 99};
    window.transfer.counter = 42;
    window.grant_key = 4711;
    for (uint32_t i = 0; i < n; i++) {
        window.bytes += pieces[i].bytes;
    }
    return window;
}

static inline void run_until_landed(side_t *from, side_t *to, uint32_t n_moved, uint64_t bytes) {
    uint64_t end = now_us() + 20000000;
    while ((from->n_moved < n_moved || to->landed_bytes < bytes) && now_us() < end) {
        (void)turn(from);
        (void)turn(to);
    }
    cr_assert_eq(from->n_moved, n_moved);
    cr_assert_eq(to->landed_bytes, bytes);
    cr_assert_eq(from->status, KVF_OK);
}

/* ---- a second process ------------------------------------------------------------------------ */

/* The address of a side in another process, over a pipe. */
typedef struct far_address {
    size_t bytes;
    uint8_t data[sizeof(((side_t *)0)->address)];
} far_address_t;

static inline void send_address(const side_t *side, int to) {
    far_address_t address = {.bytes = side->address_bytes};
    memcpy(address.data, side->address, sizeof(address.data));
    if (write(to, &address, sizeof(address)) != (ssize_t)sizeof(address)) {
        _exit(1);
    }
}

static inline void connect_far(side_t *side, int from) {
    far_address_t address;
    for (size_t n = 0; n < sizeof(address);) {
        ssize_t got = read(from, (uint8_t *)&address + n, sizeof(address) - n);
        cr_assert_gt(got, 0);
        n += (size_t)got;
    }
    side_connect(side, 1, address.data, address.bytes);
}

#endif
