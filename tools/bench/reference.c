/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine can do at best with the same blocks: bare copies, a bare socket, a wake-up. */
#define _GNU_SOURCE /* accept4 */
#include "tools/bench/copy.h"
#include "tools/bench/scatter.h"
#include "tools/bench/side.h"
#include "tools/bench/transfer.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_THREADS 64
/* Blocks of one system call. */
#define BATCH 64

typedef struct reference {
    const kvf_bench_options_t *options;
    kvf_bench_copy_t copy;
    uint8_t *pools[2]; /* source, destination */
    int32_t *slots[2];
    pthread_barrier_t barrier; /* begin of a repetition, and its end */
    int ends[2];               /* socket: sender's, receiver's; wake-up: there and back */
    bool failed;               /* socket: the sender could not go on */
} reference_t;

/* A thread of the reference besides the first. */
typedef struct helper {
    reference_t *reference;
    uint64_t index;
    pthread_t thread;
} helper_t;

static void plain_copy(void *to, const void *from, uint64_t bytes) {
    memcpy(to, from, bytes);
}

static void *block(const reference_t *reference, int side, uint64_t i) {
    return reference->pools[side] +
           (uint64_t)reference->slots[side][i] * reference->options->block_bytes;
}

/* ---- copies: each thread its share of the blocks ---- */

static void copy_share(const reference_t *reference, uint64_t index) {
    const kvf_bench_options_t *options = reference->options;
    const uint64_t end = options->blocks * (index + 1) / options->threads;
    for (uint64_t i = options->blocks * index / options->threads; i < end; i++) {
        reference->copy(block(reference, 1, i), block(reference, 0, i), options->block_bytes);
    }
}

static void *copy_main(void *ctx) {
    helper_t *helper = ctx;
    reference_t *reference = helper->reference;
    for (uint64_t rep = 0; rep < reference->options->warmup + reference->options->reps; rep++) {
        (void)pthread_barrier_wait(&reference->barrier);
        copy_share(reference, helper->index);
        (void)pthread_barrier_wait(&reference->barrier);
    }
    return NULL;
}

/* ---- a socket: the receiver asks by one byte ---- */

/* Move all blocks of a side through its end. @return Whether the connection held. */
static bool socket_blocks(const reference_t *reference, int side) {
    const kvf_bench_options_t *options = reference->options;
    struct iovec parts[BATCH];
    for (uint64_t first = 0; first < options->blocks; first += BATCH) {
        uint64_t left = options->blocks - first;
        size_t n = left < BATCH ? (size_t)left : BATCH, at = 0;
        for (size_t i = 0; i < n; i++) {
            parts[i] = (struct iovec){block(reference, side, first + i), options->block_bytes};
        }
        while (at < n) {
            ssize_t moved = side == 0 ? writev(reference->ends[0], parts + at, (int)(n - at))
                                      : readv(reference->ends[1], parts + at, (int)(n - at));
            if (moved <= 0 && !(moved < 0 && errno == EINTR)) {
                return false;
            }
            for (size_t bytes = moved > 0 ? (size_t)moved : 0; bytes > 0;) {
                size_t taken = bytes < parts[at].iov_len ? bytes : parts[at].iov_len;
                parts[at].iov_base = (uint8_t *)parts[at].iov_base + taken;
                parts[at].iov_len -= taken;
                bytes -= taken;
                at += parts[at].iov_len == 0;
            }
        }
    }
    return true;
}

static void *socket_main(void *ctx) {
    reference_t *reference = ((helper_t *)ctx)->reference;
    char asked;
    while (!reference->failed && read(reference->ends[0], &asked, 1) == 1) {
        reference->failed = !socket_blocks(reference, 0);
    }
    (void)shutdown(reference->ends[0], SHUT_RDWR);
    return NULL;
}

static bool socket_open(reference_t *reference) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof(address);
    const int yes = 1;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    reference->ends[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The kernel lets the buffers grow; a size that is set by hand was slower. */
    bool well = listener >= 0 && reference->ends[1] >= 0 &&
                bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                listen(listener, 1) == 0 &&
                getsockname(listener, (struct sockaddr *)&address, &bytes) == 0 &&
                connect(reference->ends[1], (struct sockaddr *)&address, sizeof(address)) == 0;
    if (well) {
        reference->ends[0] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        well = reference->ends[0] >= 0 &&
               setsockopt(reference->ends[0], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)) == 0;
    }
    if (listener >= 0) {
        (void)close(listener);
    }
    return well;
}

/* ---- a wake-up: there and back, of which half is one ---- */

static void *wakeup_main(void *ctx) {
    reference_t *reference = ((helper_t *)ctx)->reference;
    uint64_t count;
    while (read(reference->ends[0], &count, sizeof(count)) == sizeof(count) && count == 1 &&
           write(reference->ends[1], &count, sizeof(count)) == sizeof(count)) {
    }
    return NULL;
}

static bool wakeup(const reference_t *reference) {
    uint64_t count = 1;
    return write(reference->ends[0], &count, sizeof(count)) == sizeof(count) &&
           read(reference->ends[1], &count, sizeof(count)) == sizeof(count);
}

/* ---- all of them ---- */

static bool repeat(reference_t *reference) {
    switch (reference->options->reference) {
    case KVF_BENCH_SOCKET:
        return write(reference->ends[1], "r", 1) == 1 && socket_blocks(reference, 1);
    case KVF_BENCH_WAKEUP:
        return wakeup(reference);
    default:
        (void)pthread_barrier_wait(&reference->barrier);
        copy_share(reference, 0);
        (void)pthread_barrier_wait(&reference->barrier);
        return true;
    }
}

static kvf_status_t measure(reference_t *reference, kvf_bench_result_t *result) {
    const kvf_bench_options_t *options = reference->options;
    const bool copies = options->reference != KVF_BENCH_WAKEUP;
    for (uint64_t rep = 0; rep < options->warmup + options->reps; rep++) {
        for (uint64_t i = 0; copies && i < options->blocks; i++) {
            kvf_scatter_fill(block(reference, 0, i), options->block_bytes, rep, i);
        }
        for (uint64_t i = 0; copies && i < options->blocks; i++) {
            kvf_scatter_poison(block(reference, 1, i), options->block_bytes);
        }
        uint64_t began_ns = kvf_bench_now_ns();
        if (!repeat(reference)) {
            return KVF_ERR_IO;
        }
        uint64_t took_ns = kvf_bench_now_ns() - began_ns;
        for (uint64_t i = 0; copies && i < options->blocks; i++) {
            result->wrong_bytes +=
                kvf_scatter_wrong(block(reference, 1, i), options->block_bytes, rep, i);
        }
        if (rep >= options->warmup &&
            kvf_samples_add(&result->ns, copies ? took_ns : took_ns / 2) != KVF_OK) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    return KVF_OK;
}

/* The memory that a pool of that kind has: its reference is not to be slower for the lack of huge
 * pages. */
static kvf_status_t map_pools(reference_t *reference, kvf_detail_t *detail) {
    const kvf_bench_options_t *options = reference->options;
    const int64_t n_pages = (int64_t)(options->pool_bytes / options->block_bytes);
    const bool shared = strcmp(options->memory, "shm") == 0;
    for (int side = 0; side < 2; side++) {
        int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_NORESERVE;
        void *pool = mmap(NULL, options->pool_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (pool == MAP_FAILED) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                            "the system refuses a pool (%s); ask for "
                            "less by --pool-bytes",
                            strerror(errno));
        }
        (void)madvise(pool, options->pool_bytes, MADV_HUGEPAGE);
        reference->pools[side] = pool;
        reference->slots[side] = calloc((size_t)(n_pages + 1) / 2, sizeof(int32_t));
        if (reference->slots[side] == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "%s", kvf_status_text(KVF_ERR_NO_MEMORY));
        }
        kvf_scatter_slots(options->seed, side, n_pages, (int64_t)options->blocks,
                          reference->slots[side]);
    }
    return KVF_OK;
}

static kvf_status_t prepare(reference_t *reference, kvf_bench_result_t *result,
                            kvf_detail_t *detail) {
    bool well = true;
    switch (reference->options->reference) {
    case KVF_BENCH_MEMCPY:
        reference->copy = plain_copy;
        break;
    case KVF_BENCH_NT:
        reference->copy = kvf_bench_nt_copy();
        if (reference->copy == NULL) {
            return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                            "--reference nt: this kind of machine has no such stores; use memcpy");
        }
        break;
    case KVF_BENCH_SOCKET:
        result->transport = "tcp";
        well = socket_open(reference);
        break;
    default:
        result->transport = "eventfd";
        result->bytes = result->pieces = 0;
        reference->ends[0] = eventfd(0, EFD_CLOEXEC);
        reference->ends[1] = eventfd(0, EFD_CLOEXEC);
        well = reference->ends[0] >= 0 && reference->ends[1] >= 0;
        break;
    }
    return well
               ? map_pools(reference, detail)
               : kvf_fail(detail, KVF_ERR_IO, "--reference %s: %s",
                          kvf_bench_reference_name(reference->options->reference), strerror(errno));
}

/* Start the helpers, measure, and have them end. */
static kvf_status_t run(reference_t *reference, kvf_bench_result_t *result, kvf_detail_t *detail) {
    const kvf_bench_reference_t kind = reference->options->reference;
    const bool copies = kind == KVF_BENCH_MEMCPY || kind == KVF_BENCH_NT;
    const uint64_t n = copies ? reference->options->threads - 1 : 1;
    void *(*const main)(void *) = copies                     ? copy_main
                                  : kind == KVF_BENCH_SOCKET ? socket_main
                                                             : wakeup_main;
    helper_t helpers[MAX_THREADS];
    uint64_t started = 0;
    if (pthread_barrier_init(&reference->barrier, NULL, (unsigned)n + 1) != 0) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "%s", kvf_status_text(KVF_ERR_NO_MEMORY));
    }
    for (; started < n; started++) {
        helpers[started] = (helper_t){.reference = reference, .index = started + 1};
        if (pthread_create(&helpers[started].thread, NULL, main, &helpers[started]) != 0) {
            /* Those that wait for the others end with the process. */
            return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                            "the system refuses thread %u; give fewer "
                            "--threads",
                            (unsigned)started + 2);
        }
    }
    kvf_status_t status = measure(reference, result);
    if (kind == KVF_BENCH_SOCKET) {
        (void)shutdown(reference->ends[1], SHUT_RDWR);
    } else if (kind == KVF_BENCH_WAKEUP) {
        const uint64_t end = 2;
        (void)!write(reference->ends[0], &end, sizeof(end));
    }
    for (uint64_t i = 0; i < started; i++) {
        (void)pthread_join(helpers[i].thread, NULL);
    }
    (void)pthread_barrier_destroy(&reference->barrier);
    return status == KVF_OK ? KVF_OK
                            : kvf_fail(detail, status, "--reference %s: %s",
                                       kvf_bench_reference_name(kind), kvf_status_text(status));
}

kvf_status_t kvf_bench_refer(const kvf_bench_options_t *options, kvf_bench_result_t *result,
                             kvf_detail_t *detail) {
    reference_t reference = {.options = options, .ends = {-1, -1}};
    static const char *const names[] = {[KVF_BENCH_MEMCPY] = "memcpy",
                                        [KVF_BENCH_NT] = "nt-copy",
                                        [KVF_BENCH_SOCKET] = "socket",
                                        [KVF_BENCH_WAKEUP] = "wakeup"};
    (void)snprintf(result->mover, sizeof(result->mover), "%s", names[options->reference]);
    result->transport = "memory";
    result->bytes = options->blocks * options->block_bytes;
    result->pieces = options->blocks;
    kvf_status_t status = prepare(&reference, result, detail);
    if (status == KVF_OK) {
        status = run(&reference, result, detail);
    }
    for (int side = 0; side < 2; side++) {
        if (reference.pools[side] != NULL) {
            (void)munmap(reference.pools[side], options->pool_bytes);
        }
        free(reference.slots[side]);
        if (reference.ends[side] >= 0) {
            (void)close(reference.ends[side]);
        }
    }
    return status;
}
