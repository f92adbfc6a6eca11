/* SPDX-License-Identifier: Apache-2.0 */
/* Paths by which one agent reads another one's pools, with UCX's tcp in place of a network card. */
#include "../support/rdma/ends.h"

#include <poll.h>

/* ---- bytes ---- */

/* Ranges of all lengths and alignments, of both pools, in several batches: each is where it
 * belongs, and nothing else has changed, on either side. */
Test(ucx_rdma, bytes_come_where_they_belong, .init = need_reads, .timeout = 60) {
    static const uint64_t lengths[] = {1, 7, 64, 4096, 4097, 65536, 262144, MIB + 3};
    enum { N = sizeof(lengths) / sizeof(lengths[0]) };
    kvf_rdma_batch_t batches[N_POOLS * 3] = {{0}};
    int owners[N_POOLS * 3] = {0};
    uint8_t *want[N_POOLS];
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    for (uint32_t i = 0; i < N_POOLS; i++) {
        want[i] = malloc(pool_bytes[i]);
        cr_assert_not_null(want[i]);
        memset(want[i], UNTOUCHED, pool_bytes[i]);
    }
    for (size_t k = 0; k < N_POOLS * 3; k++) {
        const uint32_t pool = (uint32_t)(k % N_POOLS);
        uint64_t at = 13 * k;
        batches[k].owner = &owners[k];
        for (size_t n = k / N_POOLS; n < N; n += 3) {
            uint64_t off = pool_bytes[pool] - lengths[n] - 5 * n;
            at += 3;
            if (at + lengths[n] > pool_bytes[pool]) {
                break;
            }
            memcpy(want[pool] + at, a.memory[pool] + off, lengths[n]);
            read_all(&a, &b, path, &batches[k], pool, at, off, lengths[n]);
            at += lengths[n];
        }
        /* The next batch of this pool comes over it: as in the copies above, in order. */
        kvf_rdma_seal(b.rdma, &batches[k]);
        run_until(&a, &b, &owners[k], 1);
    }
    for (size_t k = 0; k < N_POOLS * 3; k++) {
        cr_expect_eq(owners[k], 1);
        cr_expect_eq(batches[k].status, KVF_OK);
    }
    for (uint32_t i = 0; i < N_POOLS; i++) {
        cr_assert_eq(memcmp(b.memory[i], want[i], pool_bytes[i]), 0, "pool %u", i);
        for (uint64_t k = 0; k < pool_bytes[i]; k++) {
            cr_assert_eq(a.memory[i][k], (uint8_t)(k * 7 + k / 256 * 3 + i));
        }
        free(want[i]);
    }
    cr_expect_eq(b.failed + a.failed + a.ready + a.done, 0);
    pair_close(&a, &b);
}

/* Many pieces: no more than so many at once, and all of them in the end; each batch is done when
 * the last of its reads is, and only when it was sealed. */
Test(ucx_rdma, so_many_at_once, .init = need_reads, .timeout = 60) {
    enum { BATCHES = 4, PIECES = 300, PIECE = 1024 };
    kvf_rdma_batch_t batches[BATCHES] = {{0}}, empty = {0};
    int owners[BATCHES] = {0}, empties = 0;
    kvf_rdma_path_t *lent, *path;
    uint32_t n_begun = 0;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    kvf_status_t status = KVF_OK;
    while (status == KVF_OK && n_begun < BATCHES * PIECES) {
        batches[0].owner = &owners[0];
        status = kvf_rdma_read(path, &batches[0], 0, b.memory[0], 0, MIB);
        n_begun += status == KVF_OK;
    }
    cr_assert_eq(status, KVF_ERR_AGAIN);
    cr_assert_eq(n_begun, KVF_RDMA_READS);
    empty.owner = &empties;
    kvf_rdma_seal(b.rdma, &empty);
    run_until(&a, &b, &empties, 1);
    cr_expect_eq(empty.status, KVF_OK);
    for (uint32_t k = 1; k < BATCHES; k++) {
        batches[k].owner = &owners[k];
        for (uint32_t i = 0; i < PIECES; i++) {
            uint64_t slot = (k * PIECES + i * 7) % 2048;
            read_all(&a, &b, path, &batches[k], 0, MIB + slot * PIECE, MIB + slot * PIECE, PIECE);
        }
        kvf_rdma_seal(b.rdma, &batches[k]);
    }
    run_until(&a, &b, &b.done, BATCHES); /* the empty one, and all but the first */
    cr_expect_eq(owners[0], 0, "it was not sealed");
    kvf_rdma_seal(b.rdma, &batches[0]);
    run_until(&a, &b, &owners[0], 1);
    run_for(&a, &b, 100);
    for (uint32_t k = 0; k < BATCHES; k++) {
        cr_expect_eq(owners[k], 1);
        cr_expect_eq(batches[k].status, KVF_OK);
        for (uint32_t i = 0; k > 0 && i < PIECES; i++) {
            uint64_t at = MIB + (k * PIECES + i * 7) % 2048 * PIECE;
            cr_expect_eq(memcmp(b.memory[0] + at, a.memory[0] + at, PIECE), 0);
        }
    }
    pair_close(&a, &b);
}

static struct pollfd fd_of(const end_t *end) {
    return (struct pollfd){.fd = kvf_rdma_fd(end->rdma), .events = POLLIN};
}

/* Progress one end alone until it may sleep. @return How many things happened. */
static unsigned fall_asleep(const end_t *end) {
    uint64_t end_us = now_us() + 20000000;
    unsigned n = 0;
    do {
        n += kvf_rdma_progress(end->rdma);
        cr_assert_lt(now_us(), end_us, "it stays awake");
    } while (!kvf_rdma_arm(end->rdma));
    return n;
}

static void expect_awake(const end_t *end, bool awake) {
    struct pollfd fd = fd_of(end);
    cr_assert_eq(poll(&fd, 1, awake ? 10000 : 0), awake ? 1 : 0);
}

/* Both, when all has come that was on its way: what one does is news to the other. */
static void both_asleep(const end_t *a, const end_t *b) {
    uint64_t end_us = now_us() + 20000000;
    struct pollfd fds[] = {fd_of(a), fd_of(b)};
    do {
        (void)fall_asleep(a);
        (void)fall_asleep(b);
        cr_assert_lt(now_us(), end_us, "they wake each other");
    } while (poll(fds, 2, 0) != 0);
}

/* Who has armed its descriptor wakes: a lender at a read, which it is not told of, and the reader
 * when the bytes come. One end rests while the other one is looked at. */
Test(ucx_rdma, wakes_who_sleeps, .init = need_reads, .timeout = 60) {
    kvf_rdma_batch_t batch = {0}, empty = {0};
    int owner = 0;
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    batch.owner = empty.owner = &owner;
    both_asleep(&a, &b);
    cr_assert_eq(kvf_rdma_read(path, &batch, 0, b.memory[0] + 5, 9, 64), KVF_OK);
    kvf_rdma_seal(b.rdma, &batch);
    (void)fall_asleep(&b);
    expect_awake(&b, false);
    expect_awake(&a, true);
    cr_expect_gt(fall_asleep(&a), 0);
    expect_awake(&b, true);
    cr_expect_gt(fall_asleep(&b), 0);
    cr_assert_eq(owner, 1);
    cr_expect_eq(memcmp(b.memory[0] + 5, a.memory[0] + 9, 64), 0);
    both_asleep(&a, &b);
    cr_expect_eq(kvf_rdma_progress(b.rdma), 0, "there is nothing to do");
    kvf_rdma_seal(b.rdma, &empty);
    cr_expect_not(kvf_rdma_arm(b.rdma), "a batch is done, and nobody was told");
    cr_expect_eq(kvf_rdma_progress(b.rdma), 1);
    cr_expect_eq(owner, 2);
    pair_close(&a, &b);
}

/* The same of much: while bytes are to come, one of both wakes. */
Test(ucx_rdma, not_both_sleep, .init = need_reads, .timeout = 60) {
    kvf_rdma_batch_t batch = {0};
    int owner = 0;
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    batch.owner = &owner;
    for (uint64_t i = 0; i < 4; i++) {
        cr_assert_eq(kvf_rdma_read(path, &batch, 0, b.memory[0] + i * MIB, i * MIB, MIB), KVF_OK);
    }
    kvf_rdma_seal(b.rdma, &batch);
    for (uint64_t end_us = now_us() + 20000000; owner == 0 && now_us() < end_us;) {
        (void)fall_asleep(&a);
        (void)fall_asleep(&b);
        struct pollfd fds[] = {fd_of(&a), fd_of(&b)};
        cr_assert(owner == 1 || poll(fds, 2, 10000) > 0, "nobody wakes");
    }
    cr_assert_eq(owner, 1);
    cr_expect_eq(memcmp(b.memory[0], a.memory[0], pool_bytes[0]), 0);
    pair_close(&a, &b);
}

/* ---- what does not go together ---- */

Test(ucx_rdma, answers_that_are_none, .init = need_reads, .timeout = 60) {
    uint8_t answer[KVF_UCX_ANSWER_BYTES], other[KVF_UCX_ANSWER_BYTES];
    const uint64_t longer[N_POOLS] = {pool_bytes[0], pool_bytes[1] + 1};
    size_t bytes, other_bytes;
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, NULL};
    kvf_rdma_path_t *lent[2], *path = NULL;
    kvf_rdma_t *small = NULL;
    kvf_detail_t detail = {""};
    end_t a, b;
    end_open(&a);
    end_open(&b);
    cr_assert_eq(kvf_rdma_lend(a.rdma, NULL, &lent[0], answer, &bytes, &detail), KVF_OK);
    cr_assert_eq(kvf_rdma_lend(a.rdma, NULL, &lent[1], other, &other_bytes, &detail), KVF_OK);
    cr_expect(bytes != other_bytes || memcmp(answer, other, bytes) != 0, "one worker for both");
    cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, bytes, longer, &path, &detail),
                 KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "pool 1"), "%s", detail.text);
    cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, bytes - 1, pool_bytes, &path, &detail),
                 KVF_ERR_INVALID);
    cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, 0, pool_bytes, &path, &detail),
                 KVF_ERR_INVALID);
    answer[40] ^= 1;
    cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, bytes, pool_bytes, &path, &detail),
                 KVF_ERR_INVALID);
    answer[40] ^= 1;
    answer[2] ^= 1;
    cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, bytes, pool_bytes, &path, &detail),
                 KVF_ERR_INCOMPATIBLE);
    answer[2] ^= 1;
    cr_expect_null(path);
    const kvf_rdma_pool_t one = {b.memory[0], pool_bytes[0], false};
    cr_assert_eq(kvf_rdma_create(b.ucx, &one, 1, &events, &small, &detail), KVF_OK);
    cr_expect_eq(kvf_rdma_open(small, NULL, answer, bytes, pool_bytes, &path, &detail),
                 KVF_ERR_INVALID);
    kvf_rdma_destroy(small);
    cr_expect_null(path);
    cr_expect_eq(b.ready + b.failed, 0);
    pair_close(&a, &b);
}

/* A worker that is gone, or that is at no transport of ours: nothing is left of what was begun. */
Test(ucx_rdma, answers_that_lead_nowhere, .init = need_reads, .timeout = 60) {
    uint8_t answer[KVF_UCX_ANSWER_BYTES];
    size_t bytes;
    kvf_rdma_path_t *lent, *path = NULL;
    kvf_detail_t detail = {""};
    end_t a, b, apart;
    end_open(&a);
    end_open(&b);
    end_open_over(&apart, "self");
    for (int i = 0; i < 2; i++) {
        end_t *lender = i == 0 ? &a : &apart;
        cr_assert_eq(kvf_rdma_lend(lender->rdma, NULL, &lent, answer, &bytes, &detail), KVF_OK);
        if (i == 0) {
            kvf_rdma_close(lent);
        }
        const int n = n_descriptors();
        detail.text[0] = '\0';
        cr_expect_eq(kvf_rdma_open(b.rdma, NULL, answer, bytes, pool_bytes, &path, &detail),
                     KVF_ERR_INCOMPATIBLE);
        cr_expect_not_null(strstr(detail.text, "tls \"tcp,self\""), "%s", detail.text);
        cr_expect_null(path);
        cr_expect_eq(n_descriptors(), n);
    }
    run_for(&a, &b, 100);
    cr_expect_eq(b.ready + b.failed, 0);
    end_close(&apart);
    pair_close(&a, &b);
}

Test(ucx_rdma, addresses, .init = need_reads, .timeout = 60) {
    uint8_t address[KVF_RDMA_ADDRESS_BYTES], longer[KVF_RDMA_ADDRESS_BYTES + 1] = {0};
    kvf_detail_t detail = {""};
    end_t a;
    end_open(&a);
    kvf_rdma_address(a.rdma, address);
    cr_expect_eq(kvf_rdma_check_address(a.rdma, address, sizeof(address), &detail), KVF_OK);
    cr_expect_eq(detail.text[0], '\0');
    memcpy(longer, address, sizeof(address));
    cr_expect_eq(kvf_rdma_check_address(a.rdma, longer, sizeof(longer), &detail), KVF_ERR_INVALID);
    for (size_t n = 0; n < sizeof(address); n++) {
        cr_expect_eq(kvf_rdma_check_address(a.rdma, address, n, &detail), KVF_ERR_INVALID);
    }
    for (size_t n = 0; n < sizeof(address); n++) {
        address[n] ^= 1;
        cr_expect_eq(kvf_rdma_check_address(a.rdma, address, sizeof(address), &detail),
                     n < 8 ? KVF_ERR_INVALID : KVF_ERR_UNSUPPORTED, "%zu", n);
        address[n] ^= 1;
    }
    cr_expect_not_null(strstr(detail.text, "install the same"), "%s", detail.text);
    end_close(&a);
    check_leaks();
}

/* A device's address is given to no UCX that takes it for the CPU's. */
Test(ucx_rdma, devices_that_ucx_does_not_know, .init = need_reads, .timeout = 60) {
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, NULL};
    const kvf_rdma_pool_t pool = {(uint8_t *)4096, 4096, true};
    kvf_rdma_t *rdma = NULL;
    kvf_detail_t detail = {""};
    end_t a;
    end_open(&a); /* not told of devices */
    cr_expect_eq(kvf_rdma_create(a.ucx, &pool, 1, &events, &rdma, &detail), KVF_ERR_UNSUPPORTED);
    cr_expect_not_null(strstr(detail.text, "does not know memory of CUDA"), "%s", detail.text);
    cr_expect_null(rdma);
    end_close(&a);
    check_leaks();
}

Test(ucx_rdma, without_memory, .init = need_reads, .timeout = 60) {
    const kvf_ucx_config_t config = config_over("tcp,self");
    static uint8_t memory[N_POOLS][4096];
    const uint64_t least[N_POOLS] = {4096, 4096};
    const kvf_rdma_pool_t pools[N_POOLS] = {{memory[0], 4096, false}, {memory[1], 4096, false}};
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, NULL};
    uint8_t answer[KVF_UCX_ANSWER_BYTES], own[KVF_UCX_ANSWER_BYTES];
    size_t bytes, own_bytes;
    uint64_t n = 0;
    bool done = false;
    end_t a;
    end_open(&a);
    while (!done) {
        kvf_alloc_fail_t fail;
        kvf_ucx_t *ucx = NULL;
        kvf_rdma_t *rdma = NULL;
        kvf_rdma_path_t *far, *lent = NULL, *path = NULL;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&fail, ++n);
        cr_assert_eq(kvf_rdma_lend(a.rdma, NULL, &far, answer, &bytes, NULL), KVF_OK);
        kvf_status_t status = kvf_ucx_create(&config, &fail.table, NULL, &ucx, &detail);
        if (status == KVF_OK) {
            status = kvf_rdma_create(ucx, pools, N_POOLS, &events, &rdma, &detail);
        }
        if (status == KVF_OK) {
            status = kvf_rdma_lend(rdma, NULL, &lent, own, &own_bytes, &detail);
        }
        if (status == KVF_OK) {
            status = kvf_rdma_open(rdma, NULL, answer, bytes, least, &path, &detail);
        }
        done = fail.calls < n;
        cr_assert_eq(status, done ? KVF_OK : KVF_ERR_NO_MEMORY, "allocation %lu", (unsigned long)n);
        cr_assert_eq(detail.text[0] != '\0', !done);
        cr_assert_eq(path != NULL, done);
        kvf_rdma_destroy(rdma);
        kvf_ucx_destroy(ucx);
        cr_assert_eq(fail.live, 0);
        kvf_rdma_close(far);
    }
    cr_assert_eq(n, 5); /* context, mover, two paths; then none has failed */
    kvf_rdma_destroy(NULL);
    end_close(&a);
    check_leaks();
}
