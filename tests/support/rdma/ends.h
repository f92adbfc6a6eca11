/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RDMA_ENDS_H
#define KVF_TESTS_RDMA_ENDS_H

/**
 * @file
 * Both ends of paths for reads, in one process, driven by turns; UCX's tcp reads.
 */

#include "kvmgr/base/clock.h"
#include "tests/support/leaks.h"
#include "tests/support/rdma/reads.h"
#include "transceiver/mover/ucx_rdma.h"

#include <dirent.h>
#include <string.h>

#define N_POOLS 2
#define MIB (UINT64_C(1) << 20)
#define UNTOUCHED 0xee

static const uint64_t pool_bytes[N_POOLS] = {4 * MIB, MIB + 12345};

typedef struct end {
    kvf_ucx_t *ucx;
    kvf_rdma_t *rdma;
    uint8_t *memory[N_POOLS];
    int ready, failed, done;
    void *ready_owner, *failed_owner;
    kvf_rdma_path_t *close_when_failed, *close_when_done;
} end_t;

static inline void on_ready(void *ctx, void *owner) {
    end_t *end = ctx;
    end->ready++;
    end->ready_owner = owner;
    cr_assert(end->failed == 0 || end->failed_owner != owner, "it has failed before");
}

static inline void on_failed(void *ctx, void *owner, const char *why) {
    end_t *end = ctx;
    kvf_rdma_batch_t batch = {0};
    cr_assert_neq(why[0], '\0');
    end->failed++;
    end->failed_owner = owner;
    if (end->close_when_failed != NULL) {
        cr_expect_eq(kvf_rdma_read(end->close_when_failed, &batch, 0, end->memory[0], 0, 1),
                     KVF_ERR_PEER_LOST);
        cr_expect_null(batch.path, "nothing was started");
        kvf_rdma_close(end->close_when_failed);
        end->close_when_failed = NULL;
    }
}

/* Each batch is done once: its owner counts. */
static inline void on_done(void *ctx, kvf_rdma_batch_t *batch) {
    end_t *end = ctx;
    end->done++;
    ++*(int *)batch->owner;
    if (end->close_when_done != NULL) {
        kvf_rdma_close(end->close_when_done);
        end->close_when_done = NULL;
    }
}

static inline kvf_ucx_config_t config_over(const char *tls) {
    return (kvf_ucx_config_t){.tls = tls,
                              .devices = "auto",
                              .listen_host = "127.0.0.1",
                              .use = KVF_UCX_READS,
                              .over_software = true};
}

static inline void end_open_over(end_t *end, const char *tls) {
    const kvf_ucx_config_t config = config_over(tls);
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, end};
    const kvf_log_t log = kvf_log_stderr(KVF_LOG_ERROR);
    kvf_rdma_pool_t pools[N_POOLS];
    kvf_detail_t detail = {""};
    memset(end, 0, sizeof(*end));
    for (uint32_t i = 0; i < N_POOLS; i++) {
        end->memory[i] = aligned_alloc(4096, (pool_bytes[i] + 4095) / 4096 * 4096);
        cr_assert_not_null(end->memory[i]);
        memset(end->memory[i], UNTOUCHED, pool_bytes[i]);
        pools[i] = (kvf_rdma_pool_t){end->memory[i], pool_bytes[i], false};
    }
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), &log, &end->ucx, &detail), KVF_OK,
                 "%s", detail.text);
    cr_assert_eq(kvf_rdma_create(end->ucx, pools, N_POOLS, &events, &end->rdma, &detail), KVF_OK,
                 "%s", detail.text);
}

static inline void end_open(end_t *end) {
    end_open_over(end, "tcp,self");
}

static inline void end_close(end_t *end) {
    const int done = end->done;
    kvf_rdma_destroy(end->rdma);
    kvf_ucx_destroy(end->ucx);
    cr_expect_eq(end->done, done, "destroy tells of nothing");
    for (uint32_t i = 0; i < N_POOLS; i++) {
        free(end->memory[i]);
    }
}

/* What the lender has there. */
static inline void fill(end_t *end) {
    for (uint32_t i = 0; i < N_POOLS; i++) {
        for (uint64_t k = 0; k < pool_bytes[i]; k++) {
            end->memory[i][k] = (uint8_t)(k * 7 + k / 256 * 3 + i);
        }
    }
}

static inline uint64_t now_us(void) {
    return kvf_clock_default()->now_us(NULL);
}

static inline void turn(end_t *a, end_t *b) {
    (void)kvf_rdma_progress(a->rdma);
    (void)kvf_rdma_progress(b->rdma);
}

/* Both in turns until a count is so high. */
static inline void run_until(end_t *a, end_t *b, const int *count, int n) {
    uint64_t end_us = now_us() + 20000000;
    while (*count < n && now_us() < end_us) {
        turn(a, b);
    }
    cr_assert_geq(*count, n);
}

static inline void run_for(end_t *a, end_t *b, int turns) {
    for (int i = 0; i < turns; i++) {
        turn(a, b);
    }
}

/* A path from one to the other; the lender's end, and the reader's. */
static inline void connect_ends(end_t *lender, end_t *reader, kvf_rdma_path_t **lent_p,
                                kvf_rdma_path_t **read_p) {
    uint8_t answer[KVF_UCX_ANSWER_BYTES];
    size_t bytes;
    kvf_detail_t detail = {""};
    int ready = reader->ready;
    cr_assert_eq(kvf_rdma_lend(lender->rdma, lender, lent_p, answer, &bytes, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_rdma_open(reader->rdma, read_p, answer, bytes, pool_bytes, read_p, &detail),
                 KVF_OK, "%s", detail.text);
    run_until(lender, reader, &reader->ready, ready + 1);
    run_for(lender, reader, 10);
    cr_assert_eq(reader->ready, ready + 1, "once");
    cr_assert_eq(reader->ready_owner, read_p);
}

/* Two ends, and a path by which b reads what a has. */
static inline void pair_open(end_t *a, end_t *b, kvf_rdma_path_t **lent_p,
                             kvf_rdma_path_t **path_p) {
    end_open(a);
    end_open(b);
    fill(a);
    connect_ends(a, b, lent_p, path_p);
}

static inline void pair_close(end_t *a, end_t *b) {
    end_close(b);
    end_close(a);
    check_leaks();
}

static inline void read_all(end_t *lender, end_t *reader, kvf_rdma_path_t *path,
                            kvf_rdma_batch_t *batch, uint32_t pool_idx, uint64_t at, uint64_t off,
                            uint64_t bytes) {
    kvf_status_t status;
    while ((status = kvf_rdma_read(path, batch, pool_idx, reader->memory[pool_idx] + at, off,
                                   bytes)) == KVF_ERR_AGAIN) {
        turn(lender, reader);
    }
    cr_assert_eq(status, KVF_OK);
}

static inline int n_descriptors(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    cr_assert_not_null(dir);
    while (readdir(dir) != NULL) {
        n++;
    }
    (void)closedir(dir);
    return n;
}

#endif
