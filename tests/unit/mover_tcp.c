/* SPDX-License-Identifier: Apache-2.0 */
/* What is the tcp mover's own: broken frames, and places that become void. (movers.c and
 * movers_ends.c have what it does like others.) */
#include "tests/support/tcp_dial.h"

#include "kernels/digest.h"

#include <pthread.h>

Test(mover_tcp, frames_that_are_none, .timeout = 60) {
    static uint8_t frame[1 << 20], data[4096];
    side_t b;
    side_open(&b, OWN_TCP);
    for (int bad = 0; bad < 7; bad++) {
        kvf_chunk_t chunks[2] = {chunk_at(1, 0, 1000), chunk_at(2, 0, 1000)};
        int fd = dial_proven(&b);
        size_t bytes = make_frame(chunks, 2, data, frame);
        switch (bad) {
        case 0:
            frame[0] ^= 1;
            break;
        case 1:
            frame[4] = 0; /* no chunks */
            break;
        case 2:
            frame[4] = 65;
            break;
        case 3:
            frame[KVF_TCP_HEAD_BYTES + KVF_CHUNK_HEADER_BYTES] ^= 1; /* magic of the second */
            break;
        case 4:
            chunks[1].bytes = 0;
            kvf_chunk_encode(&chunks[1], frame + KVF_TCP_HEAD_BYTES + KVF_CHUNK_HEADER_BYTES);
            break;
        case 5:
            chunks[1].bytes = KVF_TCP_CHUNK_BYTES + 1;
            kvf_chunk_encode(&chunks[1], frame + KVF_TCP_HEAD_BYTES + KVF_CHUNK_HEADER_BYTES);
            break;
        default:
            bytes -= 500; /* and then it ends */
            break;
        }
        send_all(fd, frame, bytes);
        if (bad == 6) {
            shutdown(fd, SHUT_WR);
        }
        turn_a_while(&b);
        cr_expect(is_closed(fd), "%d", bad);
        cr_expect_eq(b.n_landed, bad == 6, "%d", bad); /* its first chunk was whole */
        close(fd);
    }
    cr_expect_eq(kvf_mover_tcp_refused(b.mover), 6);
    expect_to_work(&b);
    side_close(&b);
}

/* Each byte comes alone; between chunks, heads and headers, too. */
Test(mover_tcp, byte_by_byte, .timeout = 60) {
    static uint8_t frames[8192];
    const kvf_chunk_t chunks[3] = {chunk_at(4, 100, 700), chunk_at(1, 5, 1), chunk_at(2, 0, 300)};
    side_t b;
    side_open(&b, OWN_TCP);
    uint8_t *source = make_source(1001 + 300);
    size_t bytes = make_frame(chunks, 2, source, frames);
    bytes += make_frame(&chunks[2], 1, source + 701, frames + bytes);
    int fd = dial_proven(&b);
    for (size_t i = 0; i < bytes; i++) {
        send_all(fd, frames + i, 1);
        while (turn(&b) > 0) {
        }
    }
    turn_a_while(&b);
    cr_expect_eq(b.n_landed, 3);
    cr_expect_eq(b.landed_bytes, 1001);
    for (uint64_t i = 0; i < N_SLOTS * SLOT_BYTES; i++) {
        const uint64_t four = i - (4 * SLOT_BYTES + 100), two = i - 2 * SLOT_BYTES;
        uint8_t want = four < 700            ? byte_at(four)
                       : i == SLOT_BYTES + 5 ? byte_at(700)
                       : two < 300           ? byte_at(701 + two)
                                             : FILL;
        if (b.slots[i] != want) {
            cr_assert_fail("byte %lu", (unsigned long)i);
        }
    }
    close(fd);
    side_close(&b);
    free(source);
}

/* Frames of all kinds that come while they are read: whatever is there when it is looked is cut
 * anywhere. */
typedef struct stream {
    int fd;
    uint8_t *data;
    size_t bytes;
} stream_t;

static void *send_stream(void *arg) {
    const stream_t *stream = arg;
    for (size_t at = 0; at < stream->bytes;) {
        size_t left = stream->bytes - at;
        ssize_t sent =
            send(stream->fd, stream->data + at, left < 100000 ? left : 100000, MSG_NOSIGNAL);
        if (sent < 0) {
            return (void *)1;
        }
        at += (size_t)sent;
    }
    return NULL;
}

Test(mover_tcp, a_stream, .timeout = 60) {
    enum { N_FRAMES = 400 };
    static kvf_chunk_t chunks[KVF_TCP_MAX_CHUNKS];
    const uint64_t most = N_SLOTS * SLOT_BYTES;
    uint32_t random = 4242;
    side_t b;
    pthread_t thread;
    void *failed;
    side_open(&b, OWN_TCP);
    uint8_t *source = make_source(most);
    stream_t stream = {.fd = dial_proven(&b), .data = malloc(most + 4 * SLOT_BYTES)};
    uint64_t filled = 0; /* chunks lie one behind the other, and hold what lies there in source */
    uint32_t n_chunks = 0;
    cr_assert_not_null(stream.data);
    for (uint32_t f = 0; f < N_FRAMES && filled < most; f++) {
        uint32_t n = 0, wanted = 1 + (random = random * 1664525U + 1013904223U) / 67108864U;
        const uint64_t begin = filled;
        for (; n < wanted && filled < most; n++) {
            random = random * 1664525U + 1013904223U;
            uint64_t bytes = 1 + (random >> 8) % (f % 3 == 0 ? 262144 : 9000);
            const uint64_t in_slot = filled % SLOT_BYTES;
            bytes = bytes > SLOT_BYTES - in_slot ? SLOT_BYTES - in_slot : bytes;
            chunks[n] = chunk_at((int32_t)(filled / SLOT_BYTES), in_slot, bytes);
            filled += bytes;
        }
        stream.bytes += make_frame(chunks, n, source + begin, stream.data + stream.bytes);
        n_chunks += n;
    }
    cr_assert_eq(pthread_create(&thread, NULL, send_stream, &stream), 0);
    uint64_t end = now_us() + 30000000;
    while (b.landed_bytes < filled && kvf_mover_tcp_refused(b.mover) == 0 && now_us() < end) {
        (void)turn(&b);
    }
    cr_expect_eq(b.landed_bytes, filled);
    cr_expect_eq(b.n_landed, n_chunks);
    cr_expect_eq(b.n_stray, 0);
    cr_expect_eq(memcmp(b.slots, source, filled), 0, "bytes are elsewhere");
    close(stream.fd);
    side_close(&b);
    cr_expect_eq(pthread_join(thread, &failed), 0);
    free(stream.data);
    free(source);
}

/* The socket is full most of the time, and takes parts of parts. */
Test(mover_tcp, a_slow_reader, .timeout = 60) {
    kvf_piece_t pieces[N_SLOTS];
    kvf_window_t windows[N_SLOTS];
    side_t a, b;
    side_open(&a, OWN_TCP);
    side_open(&b, OWN_TCP);
    side_connect(&a, 1, b.address, b.address_bytes);
    uint8_t *source = make_source(SLOT_BYTES);
    for (int32_t i = 0; i < (int32_t)N_SLOTS; i++) {
        pieces[i] = piece_at(source, 0, SLOT_BYTES, i, 0);
        windows[i] = window_of(&pieces[i], 1);
        cr_assert_eq(a.mover->ops->post(a.mover, &windows[i]), KVF_OK);
    }
    uint64_t end = now_us() + 30000000;
    while ((a.n_moved < N_SLOTS || b.landed_bytes < N_SLOTS * SLOT_BYTES) && now_us() < end) {
        for (int i = 0; i < 20; i++) {
            (void)turn(&a);
        }
        (void)turn(&b);
    }
    cr_expect_eq(a.n_moved, N_SLOTS);
    cr_expect_eq(b.landed_bytes, N_SLOTS * SLOT_BYTES);
    for (uint64_t i = 0; i < N_SLOTS; i++) {
        cr_expect_eq(memcmp(b.slots + i * SLOT_BYTES, source, SLOT_BYTES), 0, "slot %lu",
                     (unsigned long)i);
    }
    side_close(&a);
    side_close(&b);
    free(source);
}

/* ---- a sink that refuses ---- */

typedef struct judge {
    uint8_t *slots, *later; /* what it names at first; and after its first refusal */
    int32_t refused_slot;   /* -1: all are welcome */
    uint64_t leaves[4][16]; /* of each slot's chunk */
    uint32_t n_placed, n_refused, n_landed;
} judge_t;

static kvf_status_t judge_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    judge_t *judge = ctx;
    if (chunk->slot == judge->refused_slot) {
        judge->n_refused++;
        judge->slots = judge->later; /* as if the transfer had ended: its pages are others' */
        return KVF_ERR_RANGE;
    }
    judge->n_placed++;
    *landing_p = (kvf_landing_t){judge->slots + (uint64_t)chunk->slot * 65536 + chunk->offset,
                                 judge->leaves[chunk->slot]};
    return KVF_OK;
}

static void judge_landed(void *ctx, const kvf_chunk_t *chunk) {
    (void)chunk;
    ((judge_t *)ctx)->n_landed++;
}

static void open_judged(side_t *side, judge_t *judge) {
    const struct sockaddr_storage host = loopback();
    const kvf_mover_sink_t sink = {judge_place, judge_landed, on_moved, on_broken, judge};
    memset(side, 0, sizeof(*side));
    side->log = kvf_log_stderr(KVF_LOG_WARN);
    *judge = (judge_t){.slots = calloc(4, 65536), .later = calloc(4, 65536), .refused_slot = -1};
    cr_assert_eq(
        kvf_mover_tcp_create(&host, kvf_alloc_default(), &side->log, &sink, &side->mover, NULL),
        KVF_OK);
    cr_assert_eq(side->mover->ops->address(side->mover, side->address, sizeof(side->address),
                                           &side->address_bytes),
                 KVF_OK);
}

static void close_judged(side_t *side, judge_t *judge, uint8_t *before, int fd) {
    close(fd);
    side->mover->ops->destroy(side->mover);
    free(before);
    free(judge->later);
}

static void expect_bytes(const uint8_t *slots, int slot, uint64_t from, uint64_t end,
                         const uint8_t *want) {
    for (uint64_t i = from; i < end; i++) {
        cr_assert_eq(slots[(uint64_t)slot * 65536 + i], want == NULL ? 0 : want[i - from],
                     "slot %d, byte %lu", slot, (unsigned long)i);
    }
}

/* A refusal in the middle of a frame: that chunk's bytes are written nowhere, it is asked for once,
 * and the places that were named before it, for bytes of the same read, are asked for again. */
Test(mover_tcp, a_refusal_makes_places_void, .timeout = 60) {
    static uint8_t frame[300000];
    const kvf_chunk_t chunks[4] = {chunk_at(0, 0, 60000), chunk_at(1, 0, 60000),
                                   chunk_at(2, 0, 60000), chunk_at(3, 0, 60000)};
    side_t b;
    judge_t judge;
    open_judged(&b, &judge);
    uint8_t *before = judge.slots;
    uint8_t *source = make_source(240000);
    size_t bytes = make_frame(chunks, 4, source, frame);
    judge.refused_slot = 2;
    int fd = dial_proven(&b);
    send_all(fd, frame, bytes);
    turn_a_while(&b);
    cr_expect_eq(judge.n_refused, 1);
    cr_expect_eq(judge.n_landed, 3);
    for (int slot = 0; slot < 4; slot++) {
        /* What was read before the refusal was known is in the old place, and a prefix. */
        for (uint64_t i = 0; i < 60000; i++) {
            uint8_t at_first = before[(uint64_t)slot * 65536 + i];
            uint8_t then = judge.later[(uint64_t)slot * 65536 + i];
            uint8_t want = source[(uint64_t)slot * 60000 + i];
            if (slot == 2) {
                cr_assert_eq(at_first | then, 0, "a refused chunk is written");
            } else {
                cr_assert(then == want || (slot < 2 && at_first == want && then == 0),
                          "slot %d, byte %lu", slot, (unsigned long)i);
            }
        }
    }
    expect_bytes(before, 3, 0, 65536, NULL);
    close_judged(&b, &judge, before, fd);
    free(source);
}

/* A whole frame is there when it is read: nothing at all goes to the old places. */
Test(mover_tcp, void_places_get_nothing, .timeout = 60) {
    static uint8_t frame[300000];
    const kvf_chunk_t chunks[3] = {chunk_at(0, 0, 1000), chunk_at(1, 0, 1000),
                                   chunk_at(2, 0, 1000)};
    side_t b;
    judge_t judge;
    open_judged(&b, &judge);
    uint8_t *before = judge.slots;
    uint8_t *source = make_source(3000);
    size_t bytes = make_frame(chunks, 3, source, frame);
    judge.refused_slot = 2;
    int fd = dial_proven(&b);
    send_all(fd, frame, bytes);
    usleep(50000);
    turn_a_while(&b);
    cr_expect_eq(judge.n_landed, 2);
    for (int slot = 0; slot < 3; slot++) {
        expect_bytes(before, slot, 0, 65536, NULL);
        expect_bytes(judge.later, slot, 0, 1000, slot < 2 ? source + 1000 * (size_t)slot : NULL);
    }
    /* One leaf: its hash is that of which the digest is the hash. */
    cr_expect_eq(kvf_digest_of_hashes(judge.leaves[1], 1000), kvf_digest(source + 1000, 1000));
    close_judged(&b, &judge, before, fd);
    free(source);
}

/* A grant that is revoked when half of a chunk is there: the other half is written nowhere, and the
 * next chunk is in step. */
Test(mover_tcp, revoked_in_the_middle, .timeout = 60) {
    static uint8_t frame[300000];
    const kvf_chunk_t chunks[2] = {chunk_at(0, 0, 50000), chunk_at(1, 7, 50000)};
    side_t b;
    judge_t judge;
    open_judged(&b, &judge);
    uint8_t *before = judge.slots;
    uint8_t *source = make_source(100000);
    size_t bytes = make_frame(chunks, 2, source, frame);
    const size_t half = KVF_TCP_HEAD_BYTES + 2 * KVF_CHUNK_HEADER_BYTES + 20000;
    int fd = dial_proven(&b);
    send_all(fd, frame, half);
    turn_a_while(&b);
    cr_expect_eq(judge.n_landed, 0);
    expect_bytes(before, 0, 0, 20000, source);
    judge.refused_slot = 0;
    send_all(fd, frame + half, bytes - half);
    turn_a_while(&b);
    cr_expect_eq(judge.n_refused, 1);
    cr_expect_eq(judge.n_landed, 1);
    expect_bytes(before, 0, 20000, 65536, NULL);
    expect_bytes(judge.later, 0, 0, 65536, NULL);
    expect_bytes(judge.later, 1, 7, 50007, source + 50000);
    cr_expect_eq(kvf_digest_of_hashes(judge.leaves[1], 50000), kvf_digest(source + 50000, 50000));
    close_judged(&b, &judge, before, fd);
    free(source);
}

/* ---- the sending side ---- */

/* Nobody listens there any more, or somebody else does. */
Test(mover_tcp, wrong_addresses, .timeout = 60) {
    for (int i = 0; i < 2; i++) {
        side_t a, b;
        side_open(&a, OWN_TCP);
        side_open(&b, OWN_TCP);
        uint8_t *source = make_source(SLOT_BYTES);
        kvf_piece_t piece = piece_at(source, 0, SLOT_BYTES, 0, 0);
        kvf_window_t window = window_of(&piece, 1);
        b.address[20] ^= i == 0; /* the token of another incarnation */
        if (i == 1) {
            b.mover->ops->destroy(b.mover);
        }
        side_connect(&a, 1, b.address, b.address_bytes);
        cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
        uint64_t end = now_us() + 10000000;
        while (a.n_broken == 0 && now_us() < end) {
            (void)turn(&a);
            if (i == 0) {
                (void)turn(&b);
            }
        }
        cr_expect_eq(a.n_broken, 1);
        cr_expect_eq(a.n_lost, 1);
        cr_expect_eq(a.mover->ops->post(a.mover, &window), KVF_ERR_PEER_LOST);
        a.mover->ops->disconnect(a.mover, 1);
        if (i == 0) {
            cr_expect_eq(kvf_mover_tcp_refused(b.mover), 1);
            b.address[20] ^= 1;
            expect_to_work(&b);
            side_close(&b);
        } else {
            free(b.slots);
        }
        side_close(&a);
        free(source);
    }
}

/* Somebody else listens at a peer's address, or the peer says too much: no byte of a page leaves
 * before the answer, and none after a wrong one. */
Test(mover_tcp, who_listens, .timeout = 60) {
    static const struct {
        const char *says;
        size_t bytes;
        bool broken, sent;
    } cases[] = {{"", 0, false, false},
                 {"0123456789abcde", 15, false, false},
                 {"0123456789abcdeF", 16, true, false},
                 {"0123456789abcdef", 16, false, true},
                 {"0123456789abcdefg", 17, true, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sockaddr_storage at = loopback();
        socklen_t bytes = sizeof(at);
        uint8_t address[KVF_TCP_ADDRESS_BYTES], came[256];
        kvf_tcp_address_t to = {.answer = "0123456789abcde"};
        side_t a;
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        to.answer[15] = 'f';
        cr_assert_eq(bind(listener, (struct sockaddr *)&at, kvf_tcp_address_length(&at)), 0);
        cr_assert_eq(listen(listener, 1), 0);
        cr_assert_eq(getsockname(listener, (struct sockaddr *)&to.at, &bytes), 0);
        kvf_tcp_address_write(&to, address);
        side_open(&a, OWN_TCP);
        side_connect(&a, 1, address, sizeof(address));
        uint8_t *source = make_source(1000);
        kvf_piece_t piece = piece_at(source, 0, 1000, 0, 0);
        kvf_window_t window = window_of(&piece, 1);
        cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
        int fd = accept(listener, NULL, NULL);
        turn_a_while(&a);
        cr_expect_eq(recv(fd, came, sizeof(came), 0), KVF_TCP_PREAMBLE_BYTES);
        if (cases[i].bytes > 0) {
            send_all(fd, cases[i].says, cases[i].bytes);
        }
        turn_a_while(&a);
        cr_expect_eq(a.n_broken, cases[i].broken, "%zu", i);
        cr_expect_eq(a.n_moved, cases[i].broken || cases[i].sent, "%zu", i);
        cr_expect_eq(a.n_lost, cases[i].broken, "%zu", i);
        cr_expect_eq(recv(fd, came, sizeof(came), MSG_DONTWAIT) > 0, cases[i].sent, "%zu", i);
        if (cases[i].sent) { /* and then nothing else is to come */
            send_all(fd, "x", 1);
            turn_a_while(&a);
            cr_expect_eq(a.n_broken, 1);
        }
        close(fd);
        close(listener);
        side_close(&a);
        free(source);
    }
}

Test(mover_tcp, without_memory, .timeout = 60) {
    const struct sockaddr_storage host = loopback();
    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, NULL};
    side_t b;
    uint64_t n = 0;
    bool done = false;
    side_open(&b, OWN_TCP);
    while (!done) {
        kvf_alloc_fail_t fail;
        kvf_mover_t *mover = NULL;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&fail, ++n);
        kvf_status_t status =
            kvf_mover_tcp_create(&host, &fail.table, &b.log, &sink, &mover, &detail);
        if (status == KVF_OK) {
            status = mover->ops->connect(mover, 1, b.address, b.address_bytes, &detail);
        }
        done = fail.calls < n;
        cr_assert_eq(status, done ? KVF_OK : KVF_ERR_NO_MEMORY, "allocation %lu", (unsigned long)n);
        cr_assert_eq(detail.text[0] != '\0', !done);
        if (mover != NULL) {
            mover->ops->destroy(mover);
        }
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_gt(n, 3); /* mover, scrap, path, hash table ... */
    side_close(&b);
}

Test(mover_tcp, useless_calls, .timeout = 60) {
    side_t a, b;
    uint8_t small[KVF_TCP_ADDRESS_BYTES - 1];
    size_t bytes = 0;
    side_open(&a, OWN_TCP);
    side_open(&b, OWN_TCP);
    const kvf_mover_ops_t *ops = a.mover->ops;
    cr_expect_eq(ops->address(a.mover, small, sizeof(small), &bytes), KVF_ERR_RANGE);
    cr_expect_eq(bytes, 0);
    cr_expect_eq(ops->connect(a.mover, 0, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    cr_expect_eq(ops->connect(a.mover, 1, b.address, b.address_bytes - 1, NULL), KVF_ERR_INVALID);
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_expect_eq(ops->connect(a.mover, 1, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    ops->disconnect(a.mover, 2); /* unknown: ignored */
    side_close(&a);
    side_close(&b);
}
