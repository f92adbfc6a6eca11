/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes of a device, with the stand-in for the CUDA runtime: bytes and digests, order, limits and
 * failures. */
#include "kernels/digest.h"
#include "tests/support/cuda/standin.h"
#include "tests/support/random.h"
#include "transceiver/mem/cuda.h"
#include "transceiver/mover/cuda.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES (UINT64_C(24) << 20)

static kvf_alloc_fail_t memory;
static kvf_cuda_t *cuda;
static kvf_mem_t source, target;
static kvf_lanes_t *lanes;
static uint8_t *bytes, *want, *back;
static kvf_detail_t detail;

static void start(uint32_t n) {
    test_random_t random = {1, 1};
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_OK);
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    cr_assert_eq(kind->alloc(kind, BYTES, &source, &detail), KVF_OK);
    cr_assert_eq(kind->alloc(kind, BYTES, &target, &detail), KVF_OK);
    cr_assert_eq(kvf_lanes_create(&memory.table, kvf_cuda_context(cuda), n, &lanes, &detail),
                 KVF_OK);
    bytes = malloc(BYTES);
    back = malloc(BYTES);
    want = calloc(1, BYTES);
    for (uint64_t i = 0; i < BYTES; i++) {
        bytes[i] = (uint8_t)test_between(&random, 0, 255);
    }
    cr_assert_eq(kind->write(&source, 0, bytes, BYTES, NULL, &detail), KVF_OK);
}

static void stop(void) {
    kvf_lanes_destroy(lanes);
    source.kind->free(&source);
    target.kind->free(&target);
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
    standin_cuda_counts_t counts = standin_cuda_counts();
    cr_assert_eq(
        counts.allocations + counts.imports + counts.pinned + counts.streams + counts.events, 0);
    free(bytes);
    free(back);
    free(want);
}

static void check(void) {
    cr_assert_eq(target.kind->read(&target, 0, back, BYTES, &detail), KVF_OK);
    cr_assert_eq(memcmp(back, want, BYTES), 0);
}

/* More pieces than one launch takes, more leaves than have room, from the device and from the CPU,
 * with digests and without. */
Test(mover_cuda, many_pieces) {
    test_random_t random = test_random("mover_cuda");
    static uint64_t digests[8192];
    static struct { uint64_t at, bytes; } pieces[8192];
    start(1);
    for (int round = 0; round < 4; round++) {
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        uint64_t at = 0;
        size_t n = 0;
        memset(digests, 0, sizeof(digests));
        for (; n < 8192; n++) {
            uint64_t length = round == 0   ? 4096
                              : round == 1 ? (uint64_t)test_between(&random, 1, 5000)
                                           : (uint64_t)test_between(&random, 1, 1 << 20);
            if (at + length > BYTES) {
                break;
            }
            uint64_t *digest_p = test_between(&random, 0, 3) == 0 ? NULL : &digests[n];
            if (test_between(&random, 0, 1) == 0) {
                kvf_lane_copy(lane, target.base + at, source.base + at, length, digest_p);
            } else {
                kvf_lane_copy_from_host(lane, target.base + at, bytes + at, length, digest_p);
            }
            memcpy(want + at, bytes + at, length);
            pieces[n].at = at;
            pieces[n].bytes = digest_p == NULL ? 0 : length;
            at += length;
        }
        cr_assert_eq(kvf_lane_finish(lane, &detail), KVF_OK, "%s", detail.text);
        kvf_lanes_give(lane);
        check();
        for (size_t i = 0; i < n; i++) {
            cr_assert_eq(digests[i],
                         pieces[i].bytes == 0 ? 0
                                              : kvf_digest(bytes + pieces[i].at, pieces[i].bytes),
                         "round %d, piece %zu", round, i);
        }
    }
    stop();
}

/* One piece that is longer than what is under way from the CPU at once; and digests of it alone. */
Test(mover_cuda, one_long_piece) {
    uint64_t stored = 0, read = 0;
    start(1);
    kvf_lane_t *lane = kvf_lanes_take(lanes);
    kvf_lane_copy_from_host(lane, target.base + 3, bytes + 1, BYTES - 3, &stored);
    kvf_lane_copy(lane, NULL, source.base + 1, BYTES - 1, &read);
    cr_assert_eq(kvf_lane_finish(lane, &detail), KVF_OK);
    kvf_lanes_give(lane);
    memcpy(want + 3, bytes + 1, BYTES - 3);
    check();
    cr_assert_eq(stored, kvf_digest(bytes + 1, BYTES - 3));
    cr_assert_eq(read, kvf_digest(bytes + 1, BYTES - 1));
    stop();
}

/* All pieces of a window cost one launch. */
Test(mover_cuda, one_launch) {
    start(1);
    kvf_lane_t *lane = kvf_lanes_take(lanes);
    uint64_t before = standin_cuda_counts().launches;
    for (uint64_t i = 0; i < 1000; i++) {
        kvf_lane_copy(lane, target.base + i * 8192, source.base + i * 16384, 4096, NULL);
        memcpy(want + i * 8192, bytes + i * 16384, 4096);
    }
    cr_assert_eq(kvf_lane_finish(lane, &detail), KVF_OK);
    cr_assert_eq(standin_cuda_counts().launches - before, 1);
    kvf_lanes_give(lane);
    check();
    stop();
}

Test(mover_cuda, lanes_are_as_many_as_they_are) {
    start(2);
    kvf_lane_t *one = kvf_lanes_take(lanes), *two = kvf_lanes_take(lanes);
    cr_assert(one != NULL && two != NULL && one != two);
    cr_assert_null(kvf_lanes_take(lanes));
    kvf_lanes_give(one);
    cr_assert_eq(kvf_lanes_take(lanes), one);
    cr_assert_eq(kvf_lane_finish(one, NULL), KVF_OK, "nothing to do");
    stop();
}

static void *copy_some(void *arg) {
    uint64_t from = (uint64_t)(uintptr_t)arg << 20;
    for (uint64_t round = 0; round < 20; round++) {
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        uint64_t digest = 0;
        kvf_lane_copy(lane, target.base + from, source.base + from + round, 1 << 19, &digest);
        if (kvf_lane_finish(lane, NULL) != KVF_OK ||
            digest != kvf_digest(bytes + from + round, 1 << 19)) {
            abort();
        }
        kvf_lanes_give(lane);
    }
    return NULL;
}

Test(mover_cuda, threads) {
    pthread_t threads[4];
    start(4);
    for (uintptr_t i = 0; i < 4; i++) {
        cr_assert_eq(pthread_create(&threads[i], NULL, copy_some, (void *)i), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    for (uint64_t i = 0; i < 4; i++) {
        memcpy(want + (i << 20), bytes + (i << 20) + 19, 1 << 19);
    }
    check();
    stop();
}

/* A failure of any call or operation is told by finish, once; nothing is written as a digest; and
 * the lane works again if the device does. */
Test(mover_cuda, failures) {
    static const char *const calls[] = {"kvf_moves_launch", "cudaEventRecord", "cudaEventQuery",
                                        "cuCtxPushCurrent"};
    start(1);
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        uint64_t digest = 0;
        standin_cuda_fail(calls[i], 1);
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        kvf_lane_copy(lane, target.base, source.base, 100000, &digest);
        cr_expect_eq(kvf_lane_finish(lane, &detail), KVF_ERR_IO, "%s", calls[i]);
        cr_expect_not_null(strstr(detail.text, "a copy on a CUDA device"), "%s", detail.text);
        cr_expect_eq(digest, 0, "%s", calls[i]);
        if (i == 3) { /* a context that was not entered is not, until it is */
            kvf_lane_copy(lane, target.base, source.base, 100000, &digest);
            cr_expect_eq(kvf_lane_finish(lane, &detail), KVF_ERR_IO);
            kvf_lanes_give(lane);
            lane = kvf_lanes_take(lanes);
        }
        kvf_lane_copy(lane, target.base, source.base, 100000, &digest);
        cr_expect_eq(kvf_lane_finish(lane, &detail), KVF_OK, "%s", detail.text);
        cr_expect_eq(digest, kvf_digest(bytes, 100000));
        kvf_lanes_give(lane);
    }
    uint64_t digest = 0;
    kvf_lane_t *lane = kvf_lanes_take(lanes);
    standin_cuda_fail("execute", 1);
    kvf_lane_copy(lane, target.base, source.base, 100000, &digest);
    cr_expect_eq(kvf_lane_finish(lane, &detail), KVF_ERR_IO);
    cr_expect_eq(digest, 0);
    kvf_lane_copy(lane, target.base, source.base, 100000, &digest);
    cr_expect_eq(kvf_lane_finish(lane, &detail), KVF_ERR_IO, "the context is dead");
    kvf_lanes_give(lane);
    standin_cuda_reset();
    stop();
}

Test(mover_cuda, nothing_is_left_when_it_cannot_be_made) {
    static const char *const calls[] = {"cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
                                        "cudaHostAlloc", "kvf_moves_load", "cuCtxPushCurrent"};
    const kvf_alloc_t *other = kvf_alloc_default();
    cr_assert_eq(kvf_cuda_open(other, 0, &cuda, &detail), KVF_OK);
    kvf_alloc_fail_init(&memory, 0);
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        for (uint64_t n = 1; n <= 3; n++) {
            standin_cuda_fail(calls[i], n);
            kvf_status_t status =
                kvf_lanes_create(&memory.table, kvf_cuda_context(cuda), 3, &lanes, &detail);
            if (status == KVF_OK) {
                kvf_lanes_destroy(lanes);
            }
            cr_expect(status != KVF_OK || (i >= 3 && n > 1), "%s", calls[i]);
            cr_expect_eq(memory.live, 0);
            standin_cuda_counts_t counts = standin_cuda_counts();
            cr_expect_eq(counts.streams + counts.events + counts.pinned, 0, "%s", calls[i]);
        }
    }
    standin_cuda_fail("", 0);
    for (uint64_t n = 1; n <= 4; n++) {
        kvf_alloc_fail_init(&memory, n);
        cr_expect_eq(kvf_lanes_create(&memory.table, kvf_cuda_context(cuda), 3, &lanes, &detail),
                     KVF_ERR_NO_MEMORY);
        cr_expect_eq(memory.live, 0);
        cr_expect_eq(standin_cuda_counts().streams, 0);
    }
}

/* A call that fails proves nothing about what was launched: finish waits for that, however long. */
static void *let_go_later(void *arg) {
    const struct timespec pause = {0, 50000000};
    (void)nanosleep(&pause, NULL);
    standin_cuda_hold(false);
    return arg;
}

Test(mover_cuda, a_failed_wait_is_no_proof) {
    static const char *const calls[] = {"cudaEventQuery", "cudaEventRecord",
                                        "cudaEventSynchronize"};
    pthread_t thread;
    start(1);
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        uint64_t before = standin_cuda_counts().executed;
        standin_cuda_hold(true);
        kvf_lane_copy(lane, target.base, source.base, 100000, NULL);
        standin_cuda_fail(calls[i], 1);
        cr_assert_eq(pthread_create(&thread, NULL, let_go_later, NULL), 0);
        cr_assert_eq(kvf_lane_finish(lane, &detail), KVF_ERR_IO, "%s", calls[i]);
        cr_assert_gt(standin_cuda_counts().executed, before, "%s: it was still to come", calls[i]);
        (void)pthread_join(thread, NULL);
        kvf_lanes_give(lane);
    }
    memcpy(want, bytes, 100000);
    check();
    stop();
}

/* Memory that both reach; and none. */
Test(mover_cuda, pinned) {
    start(1);
    uint8_t *pinned = kvf_lanes_pinned(lanes, 8192);
    cr_assert_not_null(pinned);
    kvf_lane_t *lane = kvf_lanes_take(lanes);
    kvf_lane_copy(lane, pinned, source.base + 77, 8192, NULL);
    cr_assert_eq(kvf_lane_finish(lane, &detail), KVF_OK);
    kvf_lanes_give(lane);
    cr_assert_eq(memcmp(pinned, bytes + 77, 8192), 0);
    kvf_lanes_unpin(lanes, pinned);
    kvf_lanes_unpin(lanes, NULL);
    standin_cuda_fail("cudaHostAlloc", 1);
    cr_assert_null(kvf_lanes_pinned(lanes, 8192));
    stop();
}
