/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx.h"

#include "kernels/digest.h"
#include "kvmgr/base/clock.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOT_BYTES (UINT64_C(8) << 20)
#define N_SLOTS 8U
#define FILL 0xEE

static const char *const transports[] = {"tcp,self", "posix,self", "auto"};
#define N_TRANSPORTS (sizeof(transports) / sizeof(transports[0]))

/* One agent: a mover, and slots that chunks land in. */
typedef struct side {
    kvf_ucx_t *ucx;
    kvf_mover_t *mover;
    uint8_t *slots;
    uint64_t landed_bytes, n_landed, n_stray;
    uint32_t n_moved, n_broken;
    kvf_status_t status;
    kvf_window_t *last;
    uint64_t broken_peer;
    uint8_t address[2048];
    size_t address_bytes;
} side_t;

static void on_land(void *ctx, const kvf_chunk_t *chunk, const uint8_t *data) {
    side_t *side = ctx;
    if (chunk->slot >= (int32_t)N_SLOTS || chunk->offset > SLOT_BYTES ||
        chunk->bytes > SLOT_BYTES - chunk->offset || chunk->ordinal != 100 + chunk->slot ||
        chunk->generation != 7 || chunk->group_idx != 3 || chunk->transfer.counter != 42) {
        side->n_stray++;
        return;
    }
    memcpy(side->slots + (uint64_t)chunk->slot * SLOT_BYTES + chunk->offset, data, chunk->bytes);
    side->landed_bytes += chunk->bytes;
    side->n_landed++;
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    side_t *side = ctx;
    side->n_moved++;
    side->last = window;
    side->status = status;
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    side_t *side = ctx;
    cr_assert(why[0] != '\0');
    side->n_broken++;
    side->broken_peer = peer;
}

static void side_open(side_t *side, const char *tls) {
    const kvf_ucx_config_t config = {tls, "auto", "127.0.0.1"};
    const kvf_mover_sink_t sink = {on_land, on_moved, on_broken, side};
    kvf_log_t log = kvf_log_stderr(KVF_LOG_WARN);
    kvf_detail_t detail = {""};
    memset(side, 0, sizeof(*side));
    side->slots = malloc(N_SLOTS * SLOT_BYTES);
    cr_assert_not_null(side->slots);
    memset(side->slots, FILL, N_SLOTS * SLOT_BYTES);
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), &log, &side->ucx, &detail), KVF_OK,
                 "%s", detail.text);
    cr_assert_eq(kvf_mover_ucx_create(side->ucx, &sink, &side->mover, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(side->mover->ops->address(side->mover, side->address, sizeof(side->address),
                                           &side->address_bytes),
                 KVF_OK);
}

static void side_close(side_t *side) {
    side->mover->ops->destroy(side->mover);
    kvf_ucx_destroy(side->ucx);
    free(side->slots);
}

static void side_connect(side_t *side, uint64_t number, const void *address, size_t bytes) {
    kvf_detail_t detail = {""};
    cr_assert_eq(side->mover->ops->connect(side->mover, number, address, bytes, &detail), KVF_OK,
                 "%s", detail.text);
}

static unsigned turn(side_t *side) {
    return side->mover->ops->progress(side->mover);
}

static uint64_t now_us(void) {
    return kvf_clock_default()->now_us(NULL);
}

/* Source bytes that say where they come from. */
static uint8_t byte_at(uint64_t position) {
    return (uint8_t)(position * 131 + (position >> 12) * 17 + 1);
}

static uint8_t *make_source(uint64_t bytes) {
    uint8_t *source = malloc(bytes);
    cr_assert_not_null(source);
    for (uint64_t i = 0; i < bytes; i++) {
        source[i] = byte_at(i);
    }
    return source;
}

static kvf_piece_t piece_at(const uint8_t *source, uint64_t from, uint64_t bytes, int32_t slot,
                            uint64_t offset) {
    return (kvf_piece_t){.source = source + from,
                         .bytes = bytes,
                         .offset = offset,
                         .ordinal = 100 + slot,
                         .generation = 7,
                         .group_idx = 3,
                         .slot = slot};
}

static kvf_window_t window_of(kvf_piece_t *pieces, uint32_t n) {
    kvf_window_t window = {.peer = 1, .pieces = pieces, .n_pieces = n, .owner = 99};
    window.transfer.counter = 42;
    for (uint32_t i = 0; i < n; i++) {
        window.bytes += pieces[i].bytes;
    }
    return window;
}

static void run_until_landed(side_t *from, side_t *to, uint32_t n_moved, uint64_t bytes) {
    uint64_t end = now_us() + 20000000;
    while ((from->n_moved < n_moved || to->landed_bytes < bytes) && now_us() < end) {
        (void)turn(from);
        (void)turn(to);
    }
    cr_assert_eq(from->n_moved, n_moved);
    cr_assert_eq(to->landed_bytes, bytes);
    cr_assert_eq(from->status, KVF_OK);
}

ParameterizedTestParameters(mover_ucx, sizes) {
    static size_t idx[] = {0, 1, 2};
    return cr_make_param_array(size_t, idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, mover_ucx, sizes, .timeout = 60) {
    static const uint64_t sizes[] = {1, 4095, 4096, 4097, (256 << 10) + 1, 4 << 20};
    side_t a, b;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    uint8_t *source = make_source(SLOT_BYTES);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const uint64_t from = 1000 + i, offset = 12345;
        kvf_piece_t piece = piece_at(source, from, sizes[i], 5, offset);
        kvf_window_t window = window_of(&piece, 1);
        memset(b.slots, FILL, N_SLOTS * SLOT_BYTES);
        b.landed_bytes = 0;
        cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
        cr_assert_eq(a.n_moved, i, "moved from inside post");
        run_until_landed(&a, &b, (uint32_t)i + 1, sizes[i]);
        cr_assert_eq(a.last, &window);
        cr_assert_eq(window.owner, 99);
        cr_assert_eq(piece.digest, kvf_digest(source + from, sizes[i]));
        for (uint64_t at = 0; at < N_SLOTS * SLOT_BYTES; at++) {
            uint64_t in = at - (5 * SLOT_BYTES + offset);
            uint8_t want = in < sizes[i] ? byte_at(from + in) : FILL;
            if (b.slots[at] != want) {
                cr_assert_fail("size %lu: byte %lu", (unsigned long)sizes[i], (unsigned long)at);
            }
        }
    }
    cr_assert_eq(b.n_stray, 0);
    side_close(&a);
    side_close(&b);
    free(source);
}
