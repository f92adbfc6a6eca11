/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of scattered blocks from one mapped pool to another, and what hashing them costs on top.
 * The candidates take turns, so that other work on the machine disturbs all of them; a thread's
 * own time counts. docs/benchmarks/copy.md has figures. Exit code 1: a candidate copies wrongly.
 */
#define _GNU_SOURCE /* memfd_create */
#include "kernels/copy.h"
#include "kernels/digest.h"

#include <argp.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 2, MAX_ROUNDS = 1000 };

#define POOL_BYTES (UINT64_C(1) << 30)

static const uint64_t sizes[] = {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20};
#define N_SIZES (sizeof(sizes) / sizeof(sizes[0]))

static struct {
    uint64_t mib, rounds;
    bool huge;
} options = {.mib = 64, .rounds = 21};
static const kvf_wide_t *row;
static uint8_t *source, *destination;

static uint64_t run_memcpy(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    memcpy(dst, src, bytes);
    return 0;
}

static uint64_t run_stream(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    row->stream(dst, src, bytes);
    row->fence();
    return 0;
}

static uint64_t run_copy(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    kvf_copy_by(row, dst, src, bytes);
    return 0;
}

static uint64_t run_copy_digest(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    return kvf_copy_digest_by(row, dst, src, bytes);
}

static uint64_t run_copy_then_digest(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    kvf_copy_by(row, dst, src, bytes);
    return kvf_digest_by(row, dst, bytes);
}

static uint64_t run_digest(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    (void)dst;
    return kvf_digest_by(row, src, bytes);
}

static const struct work {
    const char *name;
    uint64_t (*run)(uint8_t *dst, const uint8_t *src, uint64_t bytes);
    bool copies, digests;
} works[] = {
    {"memcpy", run_memcpy, true, false},
    {"nt copy", run_stream, true, false},
    {"kvf_copy", run_copy, true, false},
    {"kvf_copy_digest", run_copy_digest, true, true},
    {"kvf_copy, kvf_digest", run_copy_then_digest, true, true},
    {"kvf_digest", run_digest, false, true},
};
#define N_WORKS (sizeof(works) / sizeof(works[0]))

/* Blocks of one size, in an order of their own on either side. */
static uint64_t n_blocks, block_bytes;
static uint32_t *from, *to;

static void shuffle(uint32_t *order, uint64_t seed) {
    for (uint64_t i = 0; i < n_blocks; i++) {
        order[i] = (uint32_t)i;
    }
    for (uint64_t i = n_blocks - 1; i > 0; i--) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        uint64_t k = (seed >> 33) % (i + 1);
        uint32_t other = order[k];
        order[k] = order[i];
        order[i] = other;
    }
}

static double now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

typedef struct share {
    pthread_barrier_t *barrier;
    uint64_t first, n; /* blocks */
    double took_s[N_WORKS][MAX_ROUNDS];
} share_t;

static void *work_share(void *arg) {
    share_t *share = arg;
    for (uint64_t r = 0; r < options.rounds; r++) {
        for (size_t w = 0; w < N_WORKS; w++) {
            /* Other blocks each time: none is in a cache from the last. */
            uint64_t first = share->first + (r * N_WORKS + w) * 2 * share->n;
            uint64_t sum = 0;
            (void)pthread_barrier_wait(share->barrier);
            double began = now_s();
            for (uint64_t i = first; i < first + share->n; i++) {
                sum += works[w].run(destination + to[i % n_blocks] * block_bytes,
                                    source + from[i % n_blocks] * block_bytes, block_bytes);
            }
            __asm__ volatile("" : : "r"(sum));
            share->took_s[w][r] = now_s() - began;
        }
    }
    return NULL;
}

/* Every candidate once over a few blocks, and what it made of them. */
static void check(void) {
    for (size_t w = 0; w < N_WORKS; w++) {
        for (uint64_t i = 0; i < 8; i++) {
            uint8_t *dst = destination + to[i] * block_bytes;
            const uint8_t *src = source + from[i] * block_bytes;
            memset(dst, 0, block_bytes);
            uint64_t digest = works[w].run(dst, src, block_bytes);
            if ((works[w].copies && memcmp(dst, src, block_bytes) != 0) ||
                (works[w].digests && digest != kvf_digest(src, block_bytes))) {
                (void)fprintf(stderr, "%s of %" PRIu64 " bytes is wrong\n", works[w].name,
                              block_bytes);
                exit(1);
            }
        }
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* GB/s of all threads together, median of the rounds, for each candidate. */
static void measure(uint64_t n_threads, double rates[N_WORKS]) {
    static share_t shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    pthread_barrier_t barrier;
    (void)pthread_barrier_init(&barrier, NULL, (unsigned)n_threads);
    uint64_t n = (options.mib << 20) / block_bytes;
    for (uint64_t t = 0; t < n_threads; t++) {
        shares[t].barrier = &barrier;
        shares[t].first = t * n;
        shares[t].n = n;
        if (pthread_create(&threads[t], NULL, work_share, &shares[t]) != 0) {
            exit(1);
        }
    }
    for (uint64_t t = 0; t < n_threads; t++) {
        (void)pthread_join(threads[t], NULL);
    }
    (void)pthread_barrier_destroy(&barrier);
    for (size_t w = 0; w < N_WORKS; w++) {
        double sums[MAX_ROUNDS] = {0};
        for (uint64_t r = 0; r < options.rounds; r++) {
            for (uint64_t t = 0; t < n_threads; t++) {
                sums[r] += (double)(n * block_bytes) / shares[t].took_s[w][r] / 1e9;
            }
        }
        qsort(sums, options.rounds, sizeof(sums[0]), compare);
        rates[w] = sums[options.rounds / 2];
    }
}

static void print(const char *title, double rates[N_SIZES][N_WORKS], size_t base) {
    printf("%s\n%-22s", title, "");
    for (size_t s = 0; s < N_SIZES; s++) {
        printf("%6" PRIu64 "K", sizes[s] >> 10);
    }
    for (size_t w = 0; w < N_WORKS; w++) {
        printf("\n%-22s", works[w].name);
        for (size_t s = 0; s < N_SIZES; s++) {
            printf("%7.2f", rates[s][w] / (base < N_WORKS ? rates[s][base] : 1));
        }
    }
    printf("\n\n");
}

static uint8_t *pool(const char *name) {
    int fd = memfd_create(name, 0);
    if (fd < 0 || ftruncate(fd, (off_t)POOL_BYTES) != 0) {
        perror("memfd");
        exit(1);
    }
    uint8_t *memory = mmap(NULL, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (memory == MAP_FAILED || (options.huge && madvise(memory, POOL_BYTES, MADV_HUGEPAGE) != 0)) {
        perror("mmap");
        exit(1);
    }
    for (uint64_t i = 0, value = 1; i < POOL_BYTES; i += sizeof(value)) {
        memcpy(memory + i, &value, sizeof(value));
        value = value * UINT64_C(6364136223846793005) + 1442695040888963407;
    }
    return memory;
}

static uint64_t number(struct argp_state *state, const char *arg, uint64_t most) {
    char *end;
    uint64_t value = strtoull(arg, &end, 10);
    if (*end != '\0' || value < 1 || value > most) {
        argp_error(state, "a number from 1 to %" PRIu64 ", not %s", most, arg);
    }
    return value;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    switch (key) {
    case 'm':
        options.mib = number(state, arg, 512);
        return 0;
    case 'r':
        options.rounds = number(state, arg, MAX_ROUNDS);
        return 0;
    case 'h':
        options.huge = true;
        return 0;
    case 'k':
        for (size_t i = 0; (row = kvf_wide_at(i)) != NULL && strcmp(row->name, arg) != 0; i++) {
        }
        if (row == NULL || row->stream == NULL) {
            argp_error(state, "no kernel of this CPU streams by that name: %s", arg);
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv) {
    static const struct argp_option known[] = {
        {"mib", 'm', "N", 0, "copied by each thread in a round (64, up to 512)", 0},
        {"rounds", 'r', "N", 0, "of which the median counts (21)", 0},
        {"huge", 'h', NULL, 0, "ask for huge pages", 0},
        {"kernel", 'k', "NAME", 0, "sse2, avx2 or avx512 (the widest)", 0},
        {0},
    };
    static const struct argp parser = {.options = known, .parser = parse};
    row = kvf_wide_at(0);
    argp_err_exit_status = 2;
    (void)argp_parse(&parser, argc, argv, 0, NULL, NULL);
    if (row->stream == NULL) {
        (void)fprintf(stderr, "this CPU has no kernel that streams\n");
        return 1;
    }
    source = pool("source");
    destination = pool("destination");
    if (mprotect(source, POOL_BYTES, PROT_READ) != 0) {
        perror("mprotect");
        return 1;
    }
    from = calloc(POOL_BYTES / sizes[0], sizeof(*from));
    to = calloc(POOL_BYTES / sizes[0], sizeof(*to));
    if (from == NULL || to == NULL) {
        return 1;
    }
    for (uint64_t n_threads = 1; n_threads <= MAX_THREADS; n_threads++) {
        double rates[N_SIZES][N_WORKS];
        char title[80];
        for (size_t s = 0; s < N_SIZES; s++) {
            block_bytes = sizes[s];
            n_blocks = POOL_BYTES / block_bytes;
            shuffle(from, 1);
            shuffle(to, 2);
            check();
            measure(n_threads, rates[s]);
        }
        (void)snprintf(title, sizeof(title), "%s, %" PRIu64 " thread(s): times memcpy", row->name,
                       n_threads);
        print(title, rates, 0);
        print("times nt copy", rates, 1);
        print("GB/s", rates, N_WORKS);
    }
    free(from);
    free(to);
    return munmap(source, POOL_BYTES) != 0 || munmap(destination, POOL_BYTES) != 0;
}
