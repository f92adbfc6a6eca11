/* SPDX-License-Identifier: Apache-2.0 */
/* What every mover that carries chunks between processes does: ucx over its transports, and tcp. */
#include "tests/support/mover_side.h"

#include "kernels/digest.h"

static size_t transport_idx[] = {0, 1, 2, 3};

/* Sizes around powers of two too, after Mooncake 1267 and 609. (No piece has 0 bytes.) */
ParameterizedTestParameters(movers, sizes) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers, sizes, .timeout = 60) {
    static const uint64_t sizes[] = {1,
                                     511,
                                     512,
                                     513,
                                     4095,
                                     4096,
                                     4097,
                                     8191,
                                     8192,
                                     8193,
                                     (256 << 10) - 1,
                                     256 << 10,
                                     (256 << 10) + 1,
                                     (1 << 20) + 5,
                                     2 << 20,
                                     4 << 20};
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

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525U + 1013904223U;
    return *state >> 8;
}

ParameterizedTestParameters(movers, windows) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* Windows of up to 1000 pieces that tile the slots in a shuffled order, sizes odd and even. */
ParameterizedTest(size_t *idx, movers, windows, .timeout = 60) {
    enum { N_WINDOWS = 4, MAX_PIECES = 1000 };
    static const uint32_t counts[N_WINDOWS] = {1, 3, 100, MAX_PIECES};
    static kvf_piece_t pieces[N_WINDOWS][MAX_PIECES];
    static uint64_t
        source_of[N_SLOTS * SLOT_BYTES / 64]; /* of every 64 bytes: 1 + source position, 0 = none */
    kvf_window_t windows[N_WINDOWS];
    side_t a, b;
    uint32_t random = 12345 + (uint32_t)*idx;
    uint64_t at = 0, bytes = 0;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    uint8_t *source = make_source(SLOT_BYTES);
    for (uint32_t w = 0; w < N_WINDOWS; w++) {
        for (uint32_t i = 0; i < counts[w]; i++) {
            const uint64_t units = 1 + next_random(&random) % (w < 2 ? 16000 : 600);
            const uint64_t from = 64 * (next_random(&random) % (SLOT_BYTES / 64 - units));
            at += UINT64_C(64) * (next_random(&random) % 3);
            if (at % SLOT_BYTES + units * 64 > SLOT_BYTES) {
                at += SLOT_BYTES - at % SLOT_BYTES;
            }
            cr_assert_leq(at + units * 64, N_SLOTS * SLOT_BYTES);
            pieces[w][i] =
                piece_at(source, from, units * 64, (int32_t)(at / SLOT_BYTES), at % SLOT_BYTES);
            for (uint64_t u = 0; u < units; u++) {
                source_of[at / 64 + u] = 1 + from + u * 64;
            }
            at += units * 64;
        }
        for (uint32_t i = counts[w] - 1; i > 0; i--) {
            uint32_t j = next_random(&random) % (i + 1);
            kvf_piece_t piece = pieces[w][i];
            pieces[w][i] = pieces[w][j];
            pieces[w][j] = piece;
        }
        windows[w] = window_of(pieces[w], counts[w]);
        bytes += windows[w].bytes;
        cr_assert_eq(a.mover->ops->post(a.mover, &windows[w]), KVF_OK);
    }
    run_until_landed(&a, &b, N_WINDOWS, bytes);
    cr_assert_eq(b.n_stray, 0);
    for (uint64_t i = 0; i < N_SLOTS * SLOT_BYTES; i++) {
        const uint64_t from = source_of[i / 64];
        if (b.slots[i] != (from == 0 ? FILL : byte_at(from - 1 + i % 64))) {
            cr_assert_fail("byte %lu", (unsigned long)i);
        }
    }
    for (uint32_t w = 0; w < N_WINDOWS; w++) {
        for (uint32_t i = 0; i < counts[w]; i++) {
            const kvf_piece_t *piece = &pieces[w][i];
            cr_assert_eq(piece->digest, kvf_digest(piece->source, piece->bytes));
        }
    }
    side_close(&a);
    side_close(&b);
    free(source);
}

ParameterizedTestParameters(movers, a_full_queue_says_again) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers, a_full_queue_says_again, .timeout = 60) {
    enum { N = 200 };
    static kvf_piece_t pieces[N];
    static kvf_window_t windows[N];
    side_t a, b;
    uint32_t posted = 0, refused = 0;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    uint8_t *source = make_source(4096);
    windows[0] = window_of(pieces, 0);
    cr_assert_eq(a.mover->ops->post(a.mover, &windows[0]), KVF_ERR_PEER_LOST);
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_assert_eq(a.mover->ops->post(a.mover, &windows[0]),
                 KVF_OK); /* no pieces: done all the same */
    cr_assert_eq(a.n_moved, 0);
    cr_assert_not(a.mover->ops->arm(a.mover));
    run_until_landed(&a, &b, 1, 0);
    for (uint32_t i = 0; i < N; i++) {
        pieces[i] = piece_at(source, 0, 4096, 1, UINT64_C(4096) * i);
        windows[i] = window_of(&pieces[i], 1);
        kvf_status_t status = a.mover->ops->post(a.mover, &windows[i]);
        posted += status == KVF_OK;
        refused += status == KVF_ERR_AGAIN;
    }
    cr_assert_eq(posted + refused, N);
    cr_assert_gt(posted, 0);
    cr_assert_gt(refused, 0, "the queue has no end");
    run_until_landed(&a, &b, 1 + posted, UINT64_C(4096) * posted);
    for (uint32_t i = posted; i < posted + 4; i++) { /* room again */
        cr_assert_eq(a.mover->ops->post(a.mover, &windows[i]), KVF_OK);
    }
    run_until_landed(&a, &b, 5 + posted, UINT64_C(4096) * (posted + 4));
    side_close(&a);
    side_close(&b);
    free(source);
}

ParameterizedTestParameters(movers, transfers_take_turns) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* Eight windows of one transfer wait when one of another is posted: it is behind the first of them,
 * and is not behind the others. */
ParameterizedTest(size_t *idx, movers, transfers_take_turns, .timeout = 60) {
    const uint64_t bytes = 1 << 20;
    side_t a, b;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    uint8_t *source = make_source(bytes);
    kvf_piece_t pieces[9];
    kvf_window_t windows[9];
    for (uint32_t i = 0; i < 9; i++) {
        pieces[i] = piece_at(source, 0, bytes, (int32_t)(i / 2), i % 2 * bytes);
        windows[i] = window_of(&pieces[i], 1);
        windows[i].transfer.receiver.bytes[0] = i == 8;
        cr_assert_eq(a.mover->ops->post(a.mover, &windows[i]), KVF_OK);
    }
    uint64_t end = now_us() + 20000000;
    while (a.last != &windows[8] && now_us() < end) {
        (void)turn(&a);
        (void)turn(&b);
    }
    cr_expect_eq(a.n_moved, 2, "%u windows were done with it", a.n_moved);
    run_until_landed(&a, &b, 9, 9 * bytes);
    side_close(&a);
    side_close(&b);
    free(source);
}
