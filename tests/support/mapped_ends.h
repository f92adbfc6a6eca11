/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_MAPPED_ENDS_H
#define KVF_TEST_MAPPED_ENDS_H

/**
 * @file
 * For the tests of the mapped mover: ends of it with two pools each, and what they were told; and
 * what this process has open and mapped.
 */

#include "transceiver/mem/mem.h"
#include "transceiver/mover/mapped.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define N_POOLS 2
#define POOL_BYTES(g) (UINT64_C(4096) * (3 + 2 * (g)))

/* Both ends know each other by these numbers. */
#define LENDER 7
#define BORROWER 8

typedef struct end {
    kvf_alloc_fail_t memory;
    kvf_mapped_t *mapped;
    kvf_mem_t pools[N_POOLS];
    kvf_mapped_pool_t list[N_POOLS];
    uint8_t incarnation[KVF_MAPPED_NAME_BYTES];
    uint64_t lend_as; /* what lend answers, if it is for that incarnation: */
    uint8_t friend[KVF_MAPPED_NAME_BYTES];
    int lends, returns, answers; /* events */
    uint64_t returned, answered; /* the peer of the last one */
    kvf_status_t status;
    char why[KVF_DETAIL_BYTES];
} end_t;

static inline uint64_t end_lend(void *ctx, const uint8_t *incarnation) {
    end_t *end = ctx;
    end->lends++;
    return memcmp(incarnation, end->friend, sizeof(end->friend)) == 0 ? end->lend_as : 0;
}

static inline void end_returned(void *ctx, uint64_t peer) {
    end_t *end = ctx;
    end->returns++;
    end->returned = peer;
}

static inline void end_mapped(void *ctx, uint64_t peer, kvf_status_t status, const char *why) {
    end_t *end = ctx;
    end->answers++;
    end->answered = peer;
    end->status = status;
    (void)snprintf(end->why, sizeof(end->why), "%s", why);
}

/* What byte i of a pool of an end is. */
static inline uint8_t pool_byte(uint8_t name, uint32_t g, uint64_t i) {
    return (uint8_t)(name * 31 + g * 101 + i + (i >> 8) * 7);
}

/* Make the pools of an end, whose incarnation is `name` again and again. */
static inline void end_pools(end_t *end, uint8_t name) {
    *end = (end_t){.lend_as = BORROWER};
    kvf_alloc_fail_init(&end->memory, 0);
    memset(end->incarnation, name, sizeof(end->incarnation));
    memset(end->friend, name ^ 3, sizeof(end->friend)); /* 1 and 2 are each other's */
    for (uint32_t g = 0; g < N_POOLS; g++) {
        kvf_mem_t *mem = &end->pools[g];
        cr_assert_eq(kvf_mem_shm()->alloc(kvf_mem_shm(), POOL_BYTES(g), mem, NULL), KVF_OK);
        for (uint64_t i = 0; i < mem->bytes; i++) {
            mem->base[i] = pool_byte(name, g, i);
        }
        end->list[g] = (kvf_mapped_pool_t){.fd = kvf_mem_shm_fd(mem), .bytes = mem->bytes};
    }
}

static inline kvf_status_t end_start(end_t *end, kvf_detail_t *detail) {
    const kvf_mapped_events_t events = {end_lend, end_returned, end_mapped, end};
    return kvf_mapped_create(&end->memory.table, end->list, N_POOLS, end->incarnation, &events,
                             &end->mapped, detail);
}

static inline void end_open(end_t *end, uint8_t name) {
    kvf_detail_t detail;
    end_pools(end, name);
    cr_assert_eq(end_start(end, &detail), KVF_OK, "%s", detail.text);
}

static inline void end_stop(end_t *end) {
    kvf_mapped_destroy(end->mapped);
    end->mapped = NULL;
    cr_assert_eq(end->memory.live, 0);
}

static inline void end_close(end_t *end) {
    end_stop(end);
    for (uint32_t g = 0; g < N_POOLS; g++) {
        kvf_mem_shm()->free(&end->pools[g]);
    }
}

static inline uint64_t now_us(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Whether one of the ends' descriptors says that there is work. */
static inline bool ends_wake(end_t *a, end_t *b, int ms) {
    struct pollfd fds[2] = {{.fd = -1}, {.fd = -1}};
    for (int i = 0; i < 2; i++) {
        end_t *end = i == 0 ? a : b;
        if (end != NULL && end->mapped != NULL) {
            fds[i] = (struct pollfd){.fd = kvf_mapped_fd(end->mapped), .events = POLLIN};
        }
    }
    return poll(fds, 2, ms) > 0;
}

/* Let the ends, either of which may be NULL, work until a counter has a value; only when their
 * descriptors call for it. */
static inline bool ends_run(end_t *a, end_t *b, const int *counter, int value, uint64_t most_us) {
    for (uint64_t end_us = now_us() + most_us; *counter < value && now_us() < end_us;) {
        if (ends_wake(a, b, 20)) {
            (void)(a != NULL && a->mapped != NULL && kvf_mapped_progress(a->mapped));
            (void)(b != NULL && b->mapped != NULL && kvf_mapped_progress(b->mapped));
        }
    }
    return *counter == value;
}

/* The same for a time, whatever happens. */
static inline void ends_idle(end_t *a, end_t *b, uint64_t us) {
    const int never = 0;
    (void)ends_run(a, b, &never, 1, us);
}

static inline kvf_status_t end_ask(end_t *from, end_t *of, kvf_detail_t *detail) {
    static const uint64_t expect[N_POOLS] = {POOL_BYTES(0), POOL_BYTES(1)};
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES];
    size_t bytes = kvf_mapped_address(of->mapped, address);
    return kvf_mapped_map(from->mapped, LENDER, address, bytes, expect, detail);
}

/* Map the pools of one end at the other. */
static inline void ends_map(end_t *borrower, end_t *lender) {
    kvf_detail_t detail;
    int before = borrower->answers;
    cr_assert_eq(end_ask(borrower, lender, &detail), KVF_OK, "%s", detail.text);
    cr_assert(ends_run(borrower, lender, &borrower->answers, before + 1, 5000000));
    cr_assert_eq(borrower->status, KVF_OK, "%s", borrower->why);
    cr_assert_eq(borrower->answered, LENDER);
}

/* Bytes of a mapping that are not those of an end of that name. */
static inline uint64_t wrong_bytes(const kvf_mapped_source_t *source, uint8_t name) {
    uint64_t wrong = 0;
    for (uint32_t g = 0; g < N_POOLS; g++) {
        const uint8_t *base = kvf_mapped_base(source, g);
        for (uint64_t i = 0; i < POOL_BYTES(g); i++) {
            wrong += base[i] != pool_byte(name, g, i);
        }
    }
    return wrong;
}

/* Descriptors of this process. */
static inline int count_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    cr_assert_not_null(folder);
    while (readdir(folder) != NULL) {
        n++;
    }
    (void)closedir(folder);
    return n - 3; /* ".", "..", and this folder's */
}

/* Mappings of pools in a process that can only be read ("r--s"), or can be written, too ("rw-s").
 */
static inline int count_mappings(pid_t pid, const char *rights) {
    char line[512];
    (void)snprintf(line, sizeof(line), "/proc/%d/maps", (int)pid);
    FILE *file = fopen(line, "r");
    int n = 0;
    cr_assert_not_null(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        n += strstr(line, "memfd:") != NULL && strstr(line, rights) != NULL;
    }
    (void)fclose(file);
    return n;
}

#endif
