/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx.h"

#include "kernels/digest.h"
#include "kvmgr/base/clock.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
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
    uint32_t n_moved, n_lost, n_broken;
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
    side->n_lost += status == KVF_ERR_PEER_LOST;
    cr_assert(status == KVF_OK || status == KVF_ERR_PEER_LOST);
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

static size_t transport_idx[] = {0, 1, 2};

ParameterizedTestParameters(mover_ucx, sizes) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
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

/* ---- windows
 * --------------------------------------------------------------------------------------------------
 */

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525U + 1013904223U;
    return *state >> 8;
}

ParameterizedTestParameters(mover_ucx, windows) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* Windows of up to 1000 pieces that tile the slots in a shuffled order, sizes odd and even. */
ParameterizedTest(size_t *idx, mover_ucx, windows, .timeout = 60) {
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
            at += 64 * (next_random(&random) % 3);
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

Test(mover_ucx, a_full_queue_says_again, .timeout = 60) {
    enum { N = 200 };
    static kvf_piece_t pieces[N];
    static kvf_window_t windows[N];
    side_t a, b;
    uint32_t posted = 0, refused = 0;
    side_open(&a, "auto");
    side_open(&b, "auto");
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
        pieces[i] = piece_at(source, 0, 4096, 1, i * 4096);
        windows[i] = window_of(&pieces[i], 1);
        kvf_status_t status = a.mover->ops->post(a.mover, &windows[i]);
        posted += status == KVF_OK;
        refused += status == KVF_ERR_AGAIN;
    }
    cr_assert_eq(posted + refused, N);
    cr_assert_gt(posted, 0);
    cr_assert_gt(refused, 0, "the queue has no end");
    run_until_landed(&a, &b, 1 + posted, posted * 4096);
    for (uint32_t i = posted; i < posted + 4; i++) { /* room again */
        cr_assert_eq(a.mover->ops->post(a.mover, &windows[i]), KVF_OK);
    }
    run_until_landed(&a, &b, 5 + posted, (posted + 4) * 4096);
    side_close(&a);
    side_close(&b);
    free(source);
}

/* ---- ends
 * -----------------------------------------------------------------------------------------------------
 */

#define N_BIG 12U

typedef struct load {
    uint8_t *source;
    kvf_piece_t pieces[N_BIG];
    kvf_window_t windows[N_BIG];
} load_t;

/* Far more than buffers between the two ends can hold. */
static void post_load(load_t *load, side_t *side) {
    load->source = make_source(SLOT_BYTES);
    for (uint32_t i = 0; i < N_BIG; i++) {
        load->pieces[i] = piece_at(load->source, 0, SLOT_BYTES, (int32_t)(i % N_SLOTS), 0);
        load->windows[i] = window_of(&load->pieces[i], 1);
        cr_assert_eq(side->mover->ops->post(side->mover, &load->windows[i]), KVF_OK);
    }
}

/* Until every window came back. Returns how long it took. */
static uint64_t wait_for_all(side_t *side, uint64_t patience_us) {
    uint64_t start = now_us();
    while (side->n_moved < N_BIG && now_us() - start < patience_us) {
        (void)turn(side);
    }
    return now_us() - start;
}

ParameterizedTestParameters(mover_ucx, disconnect) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, mover_ucx, disconnect, .timeout = 60) {
    side_t a, b;
    load_t load;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    post_load(&load, &a);
    while (b.n_landed < 3) {
        (void)turn(&a);
        (void)turn(&b);
    }
    const uint32_t before = a.n_moved;
    a.mover->ops->disconnect(a.mover, 1);
    cr_assert_eq(a.n_moved, before, "moved from inside disconnect");
    cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_ERR_PEER_LOST);
    cr_assert_lt(wait_for_all(&a, 5000000), 5000000);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    cr_assert_eq(a.n_broken, 0);
    memset(load.source, 0, SLOT_BYTES); /* nothing of them is read any more */

    /* The same number may be used for a new path at once. */
    side_connect(&a, 1, b.address, b.address_bytes);
    uint64_t end = now_us() + 1000000;
    while (now_us() < end && turn(&b) + turn(&a) > 0) {
    }
    memset(b.slots, FILL, N_SLOTS * SLOT_BYTES);
    a.n_moved = 0;
    b.landed_bytes = 0;
    load.pieces[0] = piece_at(load.source, 0, 5000, 6, 123);
    load.windows[0] = window_of(load.pieces, 1);
    cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_OK);
    run_until_landed(&a, &b, 1, 5000);
    cr_assert_eq(b.slots[6 * SLOT_BYTES + 123 + 4999], 0);
    cr_assert_eq(b.slots[6 * SLOT_BYTES + 123 + 5000], FILL);
    side_close(&a);
    side_close(&b);
    free(load.source);
}

ParameterizedTestParameters(mover_ucx, destroy) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, mover_ucx, destroy, .timeout = 60) {
    side_t a, b;
    load_t load;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    post_load(&load, &a);
    while (b.n_landed < 3) {
        (void)turn(&a);
        (void)turn(&b);
    }
    a.mover->ops->destroy(a.mover);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    cr_assert_eq(a.n_broken, 0);
    memset(load.source, 0, SLOT_BYTES);
    kvf_ucx_destroy(a.ucx);
    free(a.slots);
    side_close(&b);
    free(load.source);
}

/* A process that receives until it was told to stop reading; then it waits for its death. */
static pid_t start_victim(const char *tls, uint64_t landings, int *from_p) {
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        side_t b;
        side_open(&b, tls);
        if (write(fds[1], b.address, sizeof(b.address)) != (ssize_t)sizeof(b.address)) {
            _exit(1);
        }
        while (b.n_landed < landings) {
            (void)turn(&b);
        }
        (void)!write(fds[1], "x", 1);
        for (;;) {
            pause();
        }
    }
    close(fds[1]);
    *from_p = fds[0];
    return pid;
}

/* The address that a child sends first. */
static void read_address(int from, uint8_t *address, size_t bytes) {
    for (size_t n = 0; n < bytes;) {
        ssize_t got = read(from, address + n, bytes - n);
        cr_assert_gt(got, 0);
        n += (size_t)got;
    }
}

ParameterizedTestParameters(mover_ucx, killed_peer) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, mover_ucx, killed_peer, .timeout = 60) {
    const bool tells = strstr(transports[*idx], "posix,self") == NULL;
    int from;
    uint8_t address[sizeof(((side_t *)0)->address)];
    char byte;
    pid_t pid = start_victim(transports[*idx], 5, &from);
    side_t a;
    load_t load;
    side_open(&a, transports[*idx]);
    read_address(from, address, sizeof(address));
    side_connect(&a, 1, address, sizeof(address));
    post_load(&load, &a);
    cr_assert_eq(fcntl(from, F_SETFL, O_NONBLOCK), 0);
    while (read(from, &byte, 1) != 1) {
        (void)turn(&a);
    }
    cr_assert_eq(kill(pid, SIGKILL), 0);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    uint64_t took = wait_for_all(&a, tells ? 10000000 : 3000000);
    if (tells) {
        cr_assert_lt(took, 2000000);
        cr_assert_eq(a.n_broken, 1);
        cr_assert_eq(a.broken_peer, 1);
        cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_ERR_PEER_LOST);
    }
    a.mover->ops->disconnect(a.mover, 1);
    cr_assert_lt(wait_for_all(&a, 5000000), 5000000);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    for (int i = 0; i < 1000; i++) {
        (void)turn(&a);
    }
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_eq(a.n_broken, tells ? 1 : a.n_broken);
    close(from);
    side_close(&a);
    free(load.source);
}

/* ---- strangers
 * ------------------------------------------------------------------------------------------------
 */

static void encode(uint8_t header[KVF_CHUNK_HEADER_BYTES], uint64_t bytes) {
    kvf_chunk_t chunk = {
        .group_idx = 3, .slot = 2, .ordinal = 102, .generation = 7, .bytes = bytes};
    chunk.transfer.counter = 42;
    kvf_chunk_encode(&chunk, header);
}

ParameterizedTestParameters(mover_ucx, hostile_messages) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* A stranger that speaks UCX, and no protocol. */
ParameterizedTest(size_t *idx, mover_ucx, hostile_messages, .timeout = 60) {
    static uint8_t data[1 << 20], header[1024];
    const struct {
        unsigned id;
        size_t header_bytes, bytes, claimed;
        unsigned flags;
        bool bad_magic;
    } messages[] = {
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4095, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4097, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 300000, UINT64_MAX, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 0, 0, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 0, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES - 1, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES + 1, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, 0, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, 0, 0, 0, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, true},
        {0, KVF_CHUNK_HEADER_BYTES, 65536, 65536, UCP_AM_SEND_FLAG_RNDV, false},
        {0, KVF_CHUNK_HEADER_BYTES, sizeof(data), sizeof(data), UCP_AM_SEND_FLAG_RNDV, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY,
         true},
        {7, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
    };
    const size_t n = sizeof(messages) / sizeof(messages[0]);
    side_t a, b;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
    ucp_config_t *config;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM};
    const ucp_worker_params_t worker_params = {0};
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    cr_assert_eq(setenv("UCX_TLS", "posix,tcp,self", 1), 0);
    cr_assert_eq(setenv("UCX_NET_DEVICES", "lo", 1), 0);
    cr_assert_eq(ucp_config_read(NULL, NULL, &config), UCS_OK);
    cr_assert_eq(ucp_init(&params, config, &context), UCS_OK);
    ucp_config_release(config);
    cr_assert_eq(ucp_worker_create(context, &worker_params, &worker), UCS_OK);
    const ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                                       .address = (const ucp_address_t *)b.address};
    cr_assert_eq(ucp_ep_create(worker, &ep_params, &ep), UCS_OK);
    for (size_t i = 0; i < n; i++) {
        const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                           .flags = messages[i].flags};
        memset(header, 0, sizeof(header));
        encode(header, messages[i].claimed);
        header[0] ^= messages[i].bad_magic ? 0x40 : 0;
        void *request = ucp_am_send_nbx(ep, messages[i].id, header, messages[i].header_bytes, data,
                                        messages[i].bytes, &param);
        cr_assert_not(UCS_PTR_IS_ERR(request), "message %zu: %s", i,
                      ucs_status_string(UCS_PTR_STATUS(request)));
        uint64_t end = now_us() + 5000000;
        while (UCS_PTR_IS_PTR(request) && now_us() < end &&
               ucp_request_check_status(request) == UCS_INPROGRESS) {
            (void)ucp_worker_progress(worker);
            (void)turn(&b);
        }
        if (UCS_PTR_IS_PTR(request)) {
            cr_assert_neq(ucp_request_check_status(request), UCS_INPROGRESS, "message %zu", i);
            ucp_request_free(request);
        }
    }
    uint64_t end = now_us() + 5000000;
    while (kvf_mover_ucx_refused(b.mover) < n - 1 && now_us() < end) {
        (void)ucp_worker_progress(worker);
        (void)turn(&b);
    }
    cr_assert_eq(kvf_mover_ucx_refused(b.mover), n - 1); /* UCX itself drops the unknown id */
    cr_assert_eq(b.n_landed + b.n_stray, 0);

    /* A well-formed chunk is the sink's to judge, and everybody else is unharmed. */
    uint8_t *source = make_source(4096);
    kvf_piece_t piece = piece_at(source, 0, 4096, 2, 0);
    kvf_window_t window = window_of(&piece, 1);
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
    run_until_landed(&a, &b, 1, 4096);
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    side_close(&a);
    side_close(&b);
    free(source);
}

Test(mover_ucx, useless_addresses, .timeout = 60) {
    side_t a, b;
    uint8_t address[2049] = {0};
    side_open(&a, "auto");
    side_open(&b, "auto");
    const kvf_mover_ops_t *ops = a.mover->ops;
    size_t bytes = 0;
    cr_assert_eq(ops->address(a.mover, address, 3, &bytes), KVF_ERR_RANGE);
    cr_assert_eq(bytes, 0);
    cr_assert_eq(ops->connect(a.mover, 1, address, 0, NULL), KVF_ERR_INVALID);
    cr_assert_eq(ops->connect(a.mover, 1, address, sizeof(address), NULL), KVF_ERR_INVALID);
    cr_assert_eq(ops->connect(a.mover, 0, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_assert_eq(ops->connect(a.mover, 1, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    ops->disconnect(a.mover, 2); /* unknown: ignored */
    side_close(&a);
    side_close(&b);
}

/* ---- settings
 * -------------------------------------------------------------------------------------------------
 */

static char log_text[4096];

static void on_log(void *ctx, kvf_log_level_t level, const char *text) {
    (void)ctx;
    (void)level;
    size_t used = strlen(log_text);
    (void)snprintf(log_text + used, sizeof(log_text) - used, "%s\n", text);
}

/* UCX prints its messages on stdout by default; a command's output lies there. */
Test(mover_ucx, a_wrong_transport_is_explained_and_stdout_stays_clean) {
    const kvf_ucx_config_t config = {"nosuch", "auto", "127.0.0.1"};
    const kvf_ucx_config_t no_device = {"tcp", "nosuch9", "127.0.0.1"};
    const kvf_log_t log = {on_log, NULL, KVF_LOG_TRACE};
    kvf_ucx_t *ucx = NULL;
    kvf_detail_t detail = {""};
    char path[] = "/tmp/kvferry-stdout-XXXXXX", byte;
    int fd = mkstemp(path), saved = dup(STDOUT_FILENO);
    cr_assert_geq(fd, 0);
    (void)unlink(path);
    (void)fflush(stdout);
    (void)dup2(fd, STDOUT_FILENO);
    kvf_status_t tls = kvf_ucx_create(&config, kvf_alloc_default(), &log, &ucx, &detail);
    kvf_detail_t device_detail = {""};
    kvf_status_t device =
        kvf_ucx_create(&no_device, kvf_alloc_default(), &log, &ucx, &device_detail);
    (void)fflush(stdout);
    (void)dup2(saved, STDOUT_FILENO);
    cr_assert_eq(lseek(fd, 0, SEEK_SET), 0);
    cr_assert_eq(read(fd, &byte, 1), 0, "UCX wrote on stdout");
    cr_assert_eq(tls, KVF_ERR_INVALID);
    cr_assert_eq(device, KVF_ERR_INVALID);
    cr_assert_null(ucx);
    cr_assert_not_null(strstr(detail.text, "nosuch"), "%s", detail.text);
    cr_assert_not_null(strstr(detail.text, "tcp"), "names what there is: %s", detail.text);
    cr_assert_not_null(strstr(device_detail.text, "nosuch9"), "%s", device_detail.text);
    cr_assert_not_null(strstr(device_detail.text, "lo"), "names what there is: %s",
                       device_detail.text);
    cr_assert_not_null(strstr(log_text, "ucx: "), "%s", log_text);
    (void)close(fd);
    (void)close(saved);
}

Test(mover_ucx, the_environment_wins) {
    const kvf_ucx_config_t config = {"nosuch", "nosuch9", "127.0.0.1"};
    kvf_ucx_t *ucx = NULL;
    cr_assert_eq(setenv("UCX_TLS", "tcp", 1), 0);
    cr_assert_eq(setenv("UCX_NET_DEVICES", "lo", 1), 0);
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), NULL, &ucx, NULL), KVF_OK);
    kvf_ucx_destroy(ucx);
    kvf_ucx_destroy(NULL);
    cr_assert_eq(strncmp(kvf_ucx_version(), "1.", 2), 0);
}

Test(mover_ucx, without_memory, .timeout = 60) {
    const kvf_ucx_config_t config = {"tcp,self", "auto", "127.0.0.1"};
    const kvf_mover_sink_t sink = {on_land, on_moved, on_broken, NULL};
    side_t b;
    uint64_t n = 0;
    bool done = false;
    side_open(&b, "tcp,self");
    while (!done) {
        kvf_alloc_fail_t fail;
        kvf_ucx_t *ucx = NULL;
        kvf_mover_t *mover = NULL;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&fail, ++n);
        kvf_status_t status = kvf_ucx_create(&config, &fail.table, NULL, &ucx, &detail);
        if (status == KVF_OK) {
            status = kvf_mover_ucx_create(ucx, &sink, &mover, &detail);
        }
        if (status == KVF_OK) {
            status = mover->ops->connect(mover, 1, b.address, b.address_bytes, &detail);
        }
        done = fail.calls < n;
        cr_assert_eq(status, done ? KVF_OK : KVF_ERR_NO_MEMORY, "allocation %lu", (unsigned long)n);
        cr_assert_eq(detail.text[0] != '\0', !done);
        if (mover != NULL) {
            mover->ops->destroy(mover);
        }
        kvf_ucx_destroy(ucx);
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_gt(n, 4); /* context, mover, peer, hash table ... */
    side_close(&b);
}

/* ---- sleeping
 * -------------------------------------------------------------------------------------------------
 */

static uint64_t cpu_us(void) {
    struct rusage usage;
    (void)getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Sleep as a loop does. Returns whether something happened. */
static bool sleep_once(side_t *side, int timeout_ms) {
    struct pollfd readable = {side->mover->ops->fd(side->mover), POLLIN, 0};
    if (turn(side) > 0) {
        return true;
    }
    if (!side->mover->ops->arm(side->mover)) {
        return true;
    }
    return poll(&readable, 1, timeout_ms) > 0;
}

/* A process that sleeps until something arrives; says 'x' for each 300000 bytes, then 'i' if it
 * used little cpu. */
static pid_t start_sleeper(const char *tls, int *from_p) {
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        side_t b;
        side_open(&b, tls);
        const uint64_t sleep_us = b.mover->ops->max_sleep_us(b.mover);
        const int timeout_ms = sleep_us == KVF_NEVER ? 5000 : (int)(sleep_us / 1000);
        if (write(fds[1], b.address, sizeof(b.address)) != (ssize_t)sizeof(b.address)) {
            _exit(1);
        }
        const uint64_t cpu = cpu_us();
        for (uint64_t round = 1; round <= 3; round++) {
            while (b.landed_bytes < round * 300000) {
                (void)sleep_once(&b, timeout_ms);
            }
            (void)!write(fds[1], "x", 1);
        }
        (void)!write(fds[1], cpu_us() - cpu < 450000 ? "i" : "b", 1);
        _exit(0);
    }
    close(fds[1]);
    *from_p = fds[0];
    return pid;
}

ParameterizedTestParameters(mover_ucx, sleeps_and_wakes) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, mover_ucx, sleeps_and_wakes, .timeout = 60) {
    int from;
    char byte;
    uint8_t address[sizeof(((side_t *)0)->address)];
    pid_t pid = start_sleeper(transports[*idx], &from);
    side_t a;
    side_open(&a, transports[*idx]);
    read_address(from, address, sizeof(address));
    side_connect(&a, 1, address, sizeof(address));
    uint8_t *source = make_source(300000);
    for (uint32_t round = 1; round <= 3; round++) {
        kvf_piece_t piece = piece_at(source, 0, 300000, 1, 0);
        kvf_window_t window = window_of(&piece, 1);
        const uint64_t start = now_us(), cpu = cpu_us();
        while (now_us() - start < 300000) {
            (void)sleep_once(&a, 20);
        }
        cr_assert_lt(cpu_us() - cpu, 100000, "an idle mover uses %lu us of cpu in 300 ms",
                     (unsigned long)(cpu_us() - cpu));
        cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
        const uint64_t posted = now_us();
        while (a.n_moved < round && now_us() - posted < 5000000) {
            (void)sleep_once(&a, 10);
        }
        cr_assert_eq(a.n_moved, round);
        cr_assert_eq(read(from, &byte, 1), 1); /* the sleeper saw it all */
        cr_assert_eq(byte, 'x');
        cr_assert_lt(now_us() - posted, 3000000);
    }
    cr_assert_eq(read(from, &byte, 1), 1);
    cr_assert_eq(byte, 'i', "the receiver uses the cpu while nothing arrives");
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    const uint64_t sleep_us = a.mover->ops->max_sleep_us(a.mover);
    cr_assert(sleep_us == KVF_NEVER || sleep_us == 10000);
    close(from);
    side_close(&a);
    free(source);
}
