/* SPDX-License-Identifier: Apache-2.0 */
/* Paths for reads that end, at either end, at any moment; UCX's tcp is in place of a network card.
 */
#include "../support/rdma/ends.h"

/* Read much, close one end somewhere in between, and see that nothing comes afterwards. */
typedef enum who { THE_READER, THE_LENDER, THE_LENDER_UNNOTICED } who_t;

static void close_in_the_middle(who_t who, int turns) {
    enum { BATCHES = 3 };
    kvf_rdma_batch_t batches[BATCHES] = {{0}}, open_one = {0};
    int owners[BATCHES] = {0}, open_owner = 0;
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    open_one.owner = &open_owner;
    for (int k = 0; k < BATCHES; k++) {
        batches[k].owner = &owners[k];
        for (uint64_t i = 0; i < 4; i++) {
            cr_assert_eq(kvf_rdma_read(path, &batches[k], 0, b.memory[0] + i * MIB, i * MIB, MIB),
                         KVF_OK);
        }
        kvf_rdma_seal(b.rdma, &batches[k]);
    }
    cr_assert_eq(kvf_rdma_read(path, &open_one, 1, b.memory[1], 0, pool_bytes[1]), KVF_OK);
    run_for(&a, &b, turns);
    int done_before = b.done;
    if (who == THE_READER) {
        kvf_rdma_close(path);
        /* The emulation, unlike a card, aborts a lender that still has something to send. */
        kvf_rdma_close(lent);
    } else {
        kvf_rdma_close(lent);
        b.close_when_failed = who == THE_LENDER ? path : NULL;
        run_until(&a, &b, &b.failed, 1);
        cr_expect_null(b.close_when_failed);
    }
    if (who == THE_LENDER_UNNOTICED) {
        run_for(&a, &b, 1000);
        for (int k = 0; k < BATCHES; k++) {
            cr_expect(owners[k] == 0 || batches[k].status == KVF_OK, "its worker is alive");
        }
        kvf_rdma_close(path);
    }
    /* Its own worker is gone: whatever the other end does now, this memory is its owner's. */
    memset(b.memory[0], UNTOUCHED, pool_bytes[0]);
    memset(b.memory[1], UNTOUCHED, pool_bytes[1]);
    run_until(&a, &b, &b.done, BATCHES);
    cr_expect_eq(open_owner, 0);
    cr_expect_null(open_one.path, "the path is gone");
    kvf_rdma_seal(b.rdma, &open_one);
    run_until(&a, &b, &open_owner, 1);
    run_for(&a, &b, 1000);
    for (int k = 0; k < BATCHES; k++) {
        cr_expect_eq(owners[k], 1);
        cr_expect_eq(batches[k].status, k < done_before ? KVF_OK : batches[k].status);
        cr_expect(batches[k].status == KVF_OK || batches[k].status == KVF_ERR_PEER_LOST);
    }
    if (turns == 0) {
        cr_expect_eq(batches[BATCHES - 1].status, KVF_ERR_PEER_LOST);
        cr_expect_eq(open_one.status, KVF_ERR_PEER_LOST);
    }
    cr_expect_eq(b.done, BATCHES + 1);
    cr_expect_eq(b.failed, who == THE_READER ? 0 : 1);
    cr_expect_eq(b.failed_owner, who == THE_READER ? NULL : &path);
    for (uint32_t i = 0; i < N_POOLS; i++) {
        for (uint64_t k = 0; k < pool_bytes[i]; k++) {
            cr_assert_eq(b.memory[i][k], UNTOUCHED, "written to after its path was closed");
        }
    }
    pair_close(&a, &b);
}

Test(ucx_rdma_ends, the_reader_closes, .init = need_reads, .timeout = 100) {
    static const int turns[] = {0, 1, 5, 20, 60};
    for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
        close_in_the_middle(THE_READER, turns[i]);
    }
}

Test(ucx_rdma_ends, the_lender_closes, .init = need_reads, .timeout = 100) {
    static const int turns[] = {0, 1, 5, 20};
    for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
        close_in_the_middle(THE_LENDER, turns[i]);
        close_in_the_middle(THE_LENDER_UNNOTICED, turns[i]);
    }
}

/* What had come before its path was closed is there, sealed or not. */
Test(ucx_rdma_ends, closes_behind_what_has_come, .init = need_reads, .timeout = 60) {
    kvf_rdma_batch_t sealed = {0}, open_one = {0};
    int owners[2] = {0};
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    sealed.owner = &owners[0];
    open_one.owner = &owners[1];
    cr_assert_eq(kvf_rdma_read(path, &sealed, 0, b.memory[0], 0, MIB), KVF_OK);
    cr_assert_eq(kvf_rdma_read(path, &open_one, 1, b.memory[1], 0, MIB), KVF_OK);
    for (uint64_t end_us = now_us() + 20000000;
         sealed.n_reads + open_one.n_reads > 0 && now_us() < end_us;) {
        turn(&a, &b);
    }
    kvf_rdma_seal(b.rdma, &sealed);
    kvf_rdma_close(path);
    kvf_rdma_close(lent);
    cr_expect_eq(b.done, 0, "close calls nobody");
    run_until(&a, &b, &owners[0], 1);
    kvf_rdma_seal(b.rdma, &open_one);
    run_until(&a, &b, &owners[1], 1);
    cr_expect_eq(sealed.status, KVF_OK);
    cr_expect_eq(open_one.status, KVF_OK);
    cr_expect_eq(memcmp(b.memory[0], a.memory[0], MIB), 0);
    cr_expect_eq(memcmp(b.memory[1], a.memory[1], MIB), 0);
    cr_expect_eq(b.done, 2);
    pair_close(&a, &b);
}

/* From inside of done, with the others of the path still under way. */
Test(ucx_rdma_ends, closes_when_it_is_told, .init = need_reads, .timeout = 60) {
    enum { BATCHES = 8 };
    kvf_rdma_batch_t batches[BATCHES] = {{0}};
    int owners[BATCHES] = {0}, n_lost = 0;
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    pair_open(&a, &b, &lent, &path);
    for (int k = 0; k < BATCHES; k++) {
        batches[k].owner = &owners[k];
        cr_assert_eq(
            kvf_rdma_read(path, &batches[k], 0, b.memory[0], 0, k == 0 ? 1 : pool_bytes[0]),
            KVF_OK);
        kvf_rdma_seal(b.rdma, &batches[k]);
    }
    b.close_when_done = path;
    for (uint64_t end_us = now_us() + 20000000; b.close_when_done != NULL && now_us() < end_us;) {
        turn(&a, &b);
    }
    kvf_rdma_close(lent);
    cr_expect_eq(b.done, BATCHES, "in the same progress");
    run_for(&a, &b, 100);
    for (int k = 0; k < BATCHES; k++) {
        cr_expect_eq(owners[k], 1);
        n_lost += batches[k].status == KVF_ERR_PEER_LOST;
    }
    cr_expect_eq(batches[0].status, KVF_OK);
    cr_expect_gt(n_lost, 0, "of 28 MiB some were under way");
    cr_expect_eq(b.failed, 0);
    pair_close(&a, &b);
}

/* While a path is made either end may go, behind any step of it: the reader is told once, of a
 * failure after which it is never ready, or of nothing when it was the one. A step is a turn of one
 * end in which something happened. False: it was ready before so many of them. */
static bool leave_while_connecting(bool the_reader, int steps) {
    uint8_t answer[KVF_UCX_ANSWER_BYTES];
    size_t bytes;
    kvf_rdma_path_t *lent, *path = NULL;
    kvf_detail_t detail = {""};
    end_t a, b;
    end_open(&a);
    end_open(&b);
    cr_assert_eq(kvf_rdma_lend(a.rdma, &a, &lent, answer, &bytes, &detail), KVF_OK);
    cr_assert_eq(kvf_rdma_open(b.rdma, &b, answer, bytes, pool_bytes, &path, &detail), KVF_OK, "%s",
                 detail.text);
    uint64_t end_us = now_us() + 20000000;
    for (int n = 0, i = 0; n < steps && b.ready == 0 && now_us() < end_us; i++) {
        n += kvf_rdma_progress(i % 2 == 0 ? a.rdma : b.rdma) > 0;
    }
    const int ready = b.ready;
    if (the_reader) {
        kvf_rdma_close(path);
        kvf_rdma_close(lent);
        run_for(&a, &b, 100);
        cr_expect_eq(b.ready, ready);
        cr_expect_eq(b.failed, 0);
    } else {
        kvf_rdma_close(lent);
        run_until(&a, &b, &b.failed, 1);
        run_for(&a, &b, 100);
        cr_expect_eq(b.failed, 1);
        cr_expect_eq(b.failed_owner, &b);
    }
    pair_close(&a, &b);
    return ready == 0;
}

Test(ucx_rdma_ends, leaves_while_connecting, .init = need_reads, .timeout = 100) {
    for (int k = 0; k < 2; k++) {
        int steps = 0;
        while (leave_while_connecting(k == 0, steps)) {
            steps++;
        }
        cr_expect_gt(steps, 3, "to connect, to ask, and to answer");
    }
}

/* Of two readers one goes in the middle: the other has all its bytes. */
Test(ucx_rdma_ends, other_readers_go_on, .init = need_reads, .timeout = 60) {
    kvf_rdma_batch_t gone = {0}, stays = {0};
    int owners[2] = {0};
    kvf_rdma_path_t *lent[2], *path[2];
    end_t a, b, c;
    end_open(&c);
    pair_open(&a, &b, &lent[0], &path[0]);
    connect_ends(&a, &c, &lent[1], &path[1]);
    gone.owner = &owners[0];
    stays.owner = &owners[1];
    cr_assert_eq(kvf_rdma_read(path[0], &gone, 0, b.memory[0], 0, pool_bytes[0]), KVF_OK);
    cr_assert_eq(kvf_rdma_read(path[1], &stays, 0, c.memory[0], 0, pool_bytes[0] / 2), KVF_OK);
    kvf_rdma_seal(b.rdma, &gone);
    turn(&b, &c);
    turn(&a, &c);
    kvf_rdma_close(path[0]);
    kvf_rdma_close(lent[0]); /* at once: see above */
    cr_assert_eq(kvf_rdma_read(path[1], &stays, 0, c.memory[0] + pool_bytes[0] / 2,
                               pool_bytes[0] / 2, pool_bytes[0] / 2),
                 KVF_OK);
    kvf_rdma_seal(c.rdma, &stays);
    run_until(&a, &c, &owners[1], 1);
    run_until(&a, &b, &owners[0], 1);
    cr_expect_eq(gone.status, KVF_ERR_PEER_LOST);
    cr_expect_eq(stays.status, KVF_OK);
    cr_expect_eq(memcmp(c.memory[0], a.memory[0], pool_bytes[0]), 0);
    cr_expect_eq(c.failed, 0);
    end_close(&c);
    pair_close(&a, &b);
}

/* Each path is one by itself. */
Test(ucx_rdma_ends, other_paths_go_on, .init = need_reads, .timeout = 60) {
    kvf_rdma_batch_t batches[2] = {{0}};
    int owners[2] = {0};
    kvf_rdma_path_t *lent[3], *path[3];
    end_t a, b;
    pair_open(&a, &b, &lent[0], &path[0]);
    connect_ends(&a, &b, &lent[1], &path[1]);
    for (int k = 0; k < 2; k++) {
        batches[k].owner = &owners[k];
        cr_assert_eq(kvf_rdma_read(path[k], &batches[k], 0, b.memory[0] + (uint64_t)k * 2 * MIB,
                                   (uint64_t)k * 2 * MIB, 2 * MIB),
                     KVF_OK);
        kvf_rdma_seal(b.rdma, &batches[k]);
    }
    kvf_rdma_close(lent[0]);
    run_until(&a, &b, &owners[1], 1);
    cr_expect_eq(batches[1].status, KVF_OK);
    cr_expect_eq(memcmp(b.memory[0] + 2 * MIB, a.memory[0] + 2 * MIB, 2 * MIB), 0);
    kvf_rdma_close(path[0]);
    run_until(&a, &b, &owners[0], 1);
    connect_ends(&a, &b, &lent[2], &path[2]); /* and there may be new ones */
    end_close(&a);                            /* with paths, which it closes */
    end_close(&b);
    check_leaks();
}

/* A path's worker goes with it, at both ends: that is all that keeps a card from going on. */
Test(ucx_rdma_ends, nothing_is_left_of_a_path, .init = need_reads, .timeout = 60) {
    kvf_rdma_path_t *lent, *path;
    end_t a, b;
    end_open(&a); /* the first one opens what stays */
    end_close(&a);
    const int before = n_descriptors();
    pair_open(&a, &b, &lent, &path);
    const int n = n_descriptors();
    kvf_rdma_close(path);
    kvf_rdma_close(lent);
    const int without = n_descriptors();
    cr_expect_lt(without, n);
    for (int i = 0; i < 5; i++) {
        connect_ends(&a, &b, &lent, &path);
        cr_expect_eq(n_descriptors(), n);
        kvf_rdma_close(path);
        const int half = n_descriptors();
        kvf_rdma_close(lent);
        cr_expect_lt(half, n);
        cr_expect_lt(n_descriptors(), half);
        cr_expect_eq(n_descriptors(), without);
    }
    end_close(&b);
    end_close(&a);
    cr_expect_eq(n_descriptors(), before);
    check_leaks();
}

Test(ucx_rdma_ends, ends_with_reads_under_way, .init = need_reads, .timeout = 60) {
    for (int which = 0; which < 4; which++) {
        kvf_rdma_batch_t batch = {0};
        int owner = 0;
        kvf_rdma_path_t *lent, *path;
        end_t a, b;
        end_open(&a);
        end_open(&b);
        connect_ends(&a, &b, &lent, &path);
        for (uint64_t i = 0; i < 8; i++) {
            cr_assert_eq(
                kvf_rdma_read(path, &batch, 0, b.memory[0] + i % 4 * MIB, i % 4 * MIB, MIB),
                KVF_OK);
        }
        batch.owner = &owner;
        if (which / 2 == 1) {
            kvf_rdma_seal(b.rdma, &batch);
        }
        end_close(which % 2 == 0 ? &a : &b);
        end_close(which % 2 == 0 ? &b : &a);
        cr_expect_eq(owner, 0);
        check_leaks();
    }
}
