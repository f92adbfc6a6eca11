/* SPDX-License-Identifier: Apache-2.0 */
/* Paths of NCCL between two devices of one process, with the stand-ins: what arrives, where, with
 * which digests; and that nothing is left behind, however they end. */
#include "kernels/digest.h"
#include "tests/support/cuda/standin.h"
#include "tests/support/random.h"
#include "transceiver/mem/cuda.h"
#include "transceiver/mover/nccl.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BYTES (UINT64_C(40) << 20)
#define PATHS 6

/* What was told of a path. */
typedef struct end {
    kvf_nccl_path_t *path;
    uint8_t invitation[KVF_NCCL_INVITATION_BYTES];
    int invited, ready, failing, ended;
    unsigned done, lost;
    char why[256];
} end_t;

/* An agent with a device. */
typedef struct side {
    kvf_cuda_t *cuda;
    kvf_mem_t mem;
    kvf_nccl_t *nccl;
    atomic_int wakes;
    end_t ends[PATHS];
} side_t;

static kvf_alloc_fail_t memory[2];
static side_t from, to;
static uint8_t *bytes, *want, *back;
static uint64_t digests[KVF_NCCL_STAGES][KVF_NCCL_RANGES];
static kvf_detail_t detail;

static void on_invited(void *ctx, void *owner, const uint8_t *invitation) {
    (void)ctx;
    ((end_t *)owner)->invited++;
    memcpy(((end_t *)owner)->invitation, invitation, KVF_NCCL_INVITATION_BYTES);
}

static void on_ready(void *ctx, void *owner) {
    (void)ctx;
    cr_assert_eq(((end_t *)owner)->ended, 0);
    ((end_t *)owner)->ready++;
}

static void on_done(void *ctx, void *owner, kvf_nccl_job_t *job, kvf_status_t status) {
    end_t *end = owner;
    (void)ctx;
    cr_assert_eq(end->ended, 0, "a job behind the end of its path");
    cr_assert(status == KVF_OK || status == KVF_ERR_PEER_LOST);
    cr_assert_not_null(job->owner);
    *(status == KVF_OK ? &end->done : &end->lost) += 1;
}

static void on_failing(void *ctx, void *owner, const char *why) {
    (void)ctx;
    cr_assert_eq(((end_t *)owner)->ended, 0);
    cr_assert_neq(why[0], 0);
    ((end_t *)owner)->failing++;
}

static void on_ended(void *ctx, void *owner, const char *why) {
    (void)ctx;
    ((end_t *)owner)->ended++;
    ((end_t *)owner)->path = NULL;
    (void)strncpy(((end_t *)owner)->why, why, sizeof(((end_t *)owner)->why) - 1);
}

static void on_wake(void *ctx) {
    ((side_t *)ctx)->wakes++;
}

static kvf_status_t make(side_t *side, size_t i, int device) {
    const kvf_nccl_events_t events = {on_invited, on_ready, on_done, on_failing, on_ended, side};
    kvf_alloc_fail_init(&memory[i], 0);
    cr_assert_eq(kvf_cuda_open(&memory[i].table, device, &side->cuda, &detail), KVF_OK);
    const kvf_mem_kind_t *kind = kvf_cuda_kind(side->cuda);
    cr_assert_eq(kind->alloc(kind, BYTES, &side->mem, &detail), KVF_OK);
    return kvf_nccl_create(&memory[i].table, kvf_cuda_context(side->cuda), &events, on_wake, side,
                           &side->nccl, &detail);
}

static void start_on(int from_device, int to_device) {
    test_random_t random = {1, 1};
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    cr_assert_eq(make(&from, 0, from_device), KVF_OK, "%s", detail.text);
    cr_assert_eq(make(&to, 1, to_device), KVF_OK, "%s", detail.text);
    bytes = malloc(BYTES);
    back = malloc(BYTES);
    want = calloc(1, BYTES);
    for (uint64_t i = 0; i < BYTES; i++) {
        bytes[i] = (uint8_t)test_between(&random, 0, 255);
    }
    cr_assert_eq(from.mem.kind->write(&from.mem, 0, bytes, BYTES, NULL, &detail), KVF_OK);
}

static void unmake(side_t *side) {
    kvf_nccl_destroy(side->nccl);
    side->nccl = NULL;
    if (side->mem.base != NULL) {
        side->mem.kind->free(&side->mem);
    }
    kvf_cuda_close(side->cuda);
    side->cuda = NULL;
}

static void stop(void) {
    unmake(&from);
    unmake(&to);
    cr_assert_eq(memory[0].live + memory[1].live, 0);
    standin_cuda_counts_t counts = standin_cuda_counts();
    cr_assert_eq(counts.allocations + counts.imports + counts.pinned + counts.streams +
                     counts.events + counts.communicators,
                 0);
    free(bytes);
    free(back);
    free(want);
}

/* Until it is so, or for 20 s. */
#define UNTIL(condition)                                                                           \
    for (int tries = 0; !(condition); tries++) {                                                   \
        cr_assert_lt(tries, 100000, "it does not come to %s", #condition);                         \
        if ((from.nccl == NULL ? 0 : kvf_nccl_progress(from.nccl)) +                               \
                (to.nccl == NULL ? 0 : kvf_nccl_progress(to.nccl)) ==                              \
            0) {                                                                                   \
            (void)usleep(200);                                                                     \
        }                                                                                          \
    }

static void invite(int i) {
    cr_assert_eq(kvf_nccl_invite(to.nccl, &to.ends[i], &to.ends[i].path), KVF_OK);
    UNTIL(to.ends[i].invited + to.ends[i].ended > 0);
}

static void join(int i) {
    cr_assert_eq(kvf_nccl_join(from.nccl, &from.ends[i], to.ends[i].invitation,
                               KVF_NCCL_INVITATION_BYTES, &from.ends[i].path),
                 KVF_OK);
}

static void pair(int i) {
    invite(i);
    join(i);
    UNTIL(from.ends[i].ready > 0 && to.ends[i].ready > 0);
}

/* Post a job of pieces at both ends: those of the source lie one behind the other from `at` on, but
 * for a gap; the target's, in front of one another. @return Where they end. */
static uint64_t post(int i, uint64_t at, uint32_t n, const uint64_t *lengths, uint64_t *digest_p) {
    kvf_nccl_job_t *out = kvf_nccl_take(from.ends[i].path), *in = kvf_nccl_take(to.ends[i].path);
    cr_assert(out != NULL && in != NULL);
    out->n_ranges = in->n_ranges = n;
    out->owner = in->owner = &memory;
    uint8_t *source = from.mem.base, *target = to.mem.base;
    for (uint32_t k = 0; k < n; k++) {
        uint64_t there = BYTES - at - lengths[k];
        out->ranges[k] = (kvf_nccl_range_t){source + at, lengths[k], NULL};
        in->ranges[k] =
            (kvf_nccl_range_t){target + there, lengths[k], digest_p == NULL ? NULL : &digest_p[k]};
        memcpy(want + there, bytes + at, lengths[k]);
        at += lengths[k] + 3;
    }
    kvf_nccl_post(to.ends[i].path, in);
    kvf_nccl_post(from.ends[i].path, out);
    return at;
}

static void check(void) {
    cr_assert_eq(to.mem.kind->read(&to.mem, 0, back, BYTES, &detail), KVF_OK);
    cr_assert_eq(memcmp(back, want, BYTES), 0, "bytes in another place, or other ones");
}

static void leave_all(int n) {
    for (int i = 0; i < n; i++) {
        kvf_nccl_leave(to.ends[i].path, "enough");
        kvf_nccl_leave(from.ends[i].path, "enough");
    }
    for (int i = 0; i < n; i++) {
        UNTIL(to.ends[i].ended && from.ends[i].ended);
        cr_assert_str_eq(to.ends[i].why, "enough");
    }
}

/* Pieces of any length, some of them longer than a message, one job behind the other. */
Test(mover_nccl, bytes_and_digests) {
    test_random_t random = test_random("mover_nccl");
    uint64_t lengths[KVF_NCCL_RANGES];
    start_on(0, 1);
    pair(0);
    for (int round = 0; round < 6; round++) {
        uint64_t at = 0, before = 0;
        unsigned n_jobs = 0;
        memset(digests, 0, sizeof(digests));
        memset(want, 0, BYTES);
        cr_assert_eq(to.mem.kind->write(&to.mem, 0, want, BYTES, NULL, &detail), KVF_OK);
        to.ends[0].done = from.ends[0].done = 0;
        for (; n_jobs < KVF_NCCL_STAGES_OF_PATH; n_jobs++) {
            uint32_t n = 0;
            uint64_t sum = 0;
            for (; n < KVF_NCCL_RANGES; n++) {
                lengths[n] = round == 0   ? 4096
                             : round == 1 ? 16384
                             : round == 2 ? (uint64_t)test_between(&random, 1, 9000)
                             : round == 3 ? KVF_NCCL_PART_BYTES
                             : round == 4 ? KVF_NCCL_PART_BYTES + 4096 * (n % 3) + n
                                          : (uint64_t)test_between(&random, 1, 4 << 20);
                if (at + sum + lengths[n] + 3 * (n + 1) > BYTES / 2 * (n_jobs + 1)) {
                    break;
                }
                sum += lengths[n];
            }
            cr_assert_gt(n, 0);
            before = at;
            at = post(0, at, n, lengths, round % 2 == 0 ? digests[n_jobs] : NULL);
            if (n_jobs == 0 && round % 2 == 0) {
                UNTIL(to.ends[0].done == 1);
                for (uint32_t k = 0; k < n; k++) {
                    cr_assert_eq(digests[0][k], kvf_digest(bytes + before, lengths[k]), "piece %u",
                                 k);
                    before += lengths[k] + 3;
                }
            }
        }
        UNTIL(to.ends[0].done == n_jobs && from.ends[0].done == n_jobs);
        check();
    }
    cr_assert_gt(to.wakes, 0);
    leave_all(1);
    stop();
}

/* As many paths as peers, more than there are stages: each gets its own bytes. */
Test(mover_nccl, many_paths) {
    const uint64_t lengths[] = {100000, 4096, 77, 4096};
    uint64_t at = 0;
    start_on(1, 0);
    for (int i = 0; i < PATHS; i++) {
        pair(i);
    }
    cr_assert_eq(standin_cuda_counts().communicators, 2 * PATHS);
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < PATHS; i++) {
            UNTIL(to.ends[i].done ==
                  (unsigned)round); /* of the others there are as many under way */
            at = post(i, at, 4, lengths, digests[0]);
            UNTIL(to.ends[i].done == (unsigned)round + 1 &&
                  from.ends[i].done == (unsigned)round + 1);
        }
    }
    check();
    leave_all(PATHS);
    stop();
}

/* Stages are few: for one path, and for all. Those that receive are not taken from those that send.
 */
Test(mover_nccl, stages_are_limited) {
    kvf_nccl_job_t *jobs[KVF_NCCL_STAGES];
    start_on(0, 1);
    for (int i = 0; i < 3; i++) {
        pair(i);
    }
    for (uint32_t i = 0; i < KVF_NCCL_STAGES; i++) {
        jobs[i] = kvf_nccl_take(to.ends[i / KVF_NCCL_STAGES_OF_PATH].path);
        cr_assert_not_null(jobs[i]);
    }
    cr_assert_null(kvf_nccl_take(to.ends[0].path));
    cr_assert_null(kvf_nccl_take(to.ends[2].path));
    kvf_nccl_job_t *other = kvf_nccl_take(from.ends[2].path);
    cr_assert_not_null(other);
    kvf_nccl_give(from.ends[2].path, other);
    kvf_nccl_give(to.ends[0].path, jobs[0]);
    cr_assert_not_null(kvf_nccl_take(to.ends[2].path));
    kvf_nccl_give(to.ends[2].path, jobs[0]);
    for (uint32_t i = 1; i < KVF_NCCL_STAGES; i++) {
        kvf_nccl_give(to.ends[i / KVF_NCCL_STAGES_OF_PATH].path, jobs[i]);
    }
    leave_all(3);
    stop();
}

/* The other end never sends: the job ends when the path does, and not before the device is done
 * with what was queued. */
Test(mover_nccl, left_in_the_middle) {
    start_on(0, 1);
    pair(0);
    kvf_nccl_job_t *in = kvf_nccl_take(to.ends[0].path);
    in->n_ranges = 1;
    in->owner = in;
    in->ranges[0] = (kvf_nccl_range_t){to.mem.base, 1 << 20, &digests[0][0]};
    kvf_nccl_post(to.ends[0].path, in);
    for (int i = 0; i < 50; i++) {
        (void)kvf_nccl_progress(to.nccl);
        (void)usleep(1000);
    }
    cr_assert_eq(to.ends[0].done + to.ends[0].lost, 0);
    standin_cuda_hold(true);
    kvf_nccl_leave(to.ends[0].path, "the request was given up");
    for (int i = 0; i < 50; i++) {
        (void)kvf_nccl_progress(to.nccl);
        (void)usleep(1000);
    }
    cr_assert_eq(to.ends[0].lost, 0, "the device still has the message");
    standin_cuda_hold(false);
    UNTIL(to.ends[0].ended);
    cr_assert_eq(to.ends[0].lost, 1);
    cr_assert_str_eq(to.ends[0].why, "the request was given up");
    kvf_nccl_job_t *out = kvf_nccl_take(from.ends[0].path);
    out->n_ranges = 1;
    out->owner = out;
    out->ranges[0] = (kvf_nccl_range_t){from.mem.base, 1 << 20, NULL};
    kvf_nccl_post(from.ends[0].path, out); /* with which it notices, by itself */
    UNTIL(from.ends[0].ended);
    cr_assert_eq(from.ends[0].lost, 1);
    cr_assert_neq(strstr(from.ends[0].why, "remote process exited"), NULL, "%s", from.ends[0].why);
    check();
    stop();
}

/* The other agent is gone, in the middle of a job: no byte that it did not send is anywhere. */
Test(mover_nccl, a_peer_that_is_gone) {
    start_on(0, 1);
    pair(0);
    kvf_nccl_job_t *in = kvf_nccl_take(to.ends[0].path);
    in->n_ranges = 1;
    in->owner = in;
    in->ranges[0] = (kvf_nccl_range_t){to.mem.base, 4096, NULL};
    kvf_nccl_post(to.ends[0].path, in);
    kvf_nccl_destroy(from.nccl);
    from.nccl = NULL;
    UNTIL(to.ends[0].ended);
    cr_assert_eq(to.ends[0].lost, 1);
    cr_assert_eq(to.ends[0].failing, 1, "the other end could have been told");
    check();
    stop();
}

/* Two agents that fetch from each other, and one of them is gone: an abort waits for the whole
 * device, on which there is a message of the other path. */
Test(mover_nccl, aborts_that_wait_for_each_other) {
    start_on(0, 1);
    pair(0);
    pair(1);
    for (int i = 0; i < 2; i++) {
        kvf_nccl_job_t *in = kvf_nccl_take(to.ends[i].path);
        in->n_ranges = 1;
        in->owner = in;
        in->ranges[0] = (kvf_nccl_range_t){to.mem.base, 4096, NULL};
        kvf_nccl_post(to.ends[i].path, in);
    }
    for (int i = 0; i < 50; i++) {
        (void)kvf_nccl_progress(to.nccl);
        (void)usleep(1000);
    }
    kvf_nccl_leave(to.ends[0].path, "the first");
    for (int i = 0; i < 100; i++) {
        (void)kvf_nccl_progress(to.nccl);
        (void)usleep(1000);
    }
    cr_assert_eq(to.ends[0].lost, 1, "its message was stopped");
    cr_assert_eq(to.ends[0].ended, 0, "its abort waits");
    kvf_nccl_leave(to.ends[1].path, "the second");
    UNTIL(to.ends[0].ended && to.ends[1].ended);
    cr_assert_eq(to.ends[1].lost, 1);
    check();
    kvf_nccl_leave(from.ends[0].path, "over");
    kvf_nccl_leave(from.ends[1].path, "over");
    UNTIL(from.ends[0].ended && from.ends[1].ended);
    stop();
}

/* Who takes a job for a path that has ended, and does not know that yet, hears of the job first. */
Test(mover_nccl, posted_behind_the_end) {
    start_on(0, 1);
    pair(0);
    kvf_nccl_destroy(from.nccl);
    from.nccl = NULL;
    standin_cuda_fail("nccl", 1);
    (void)usleep(500000); /* its thread knows */
    for (int i = 0; i < 2; i++) {
        kvf_nccl_job_t *in = kvf_nccl_take(to.ends[0].path);
        in->n_ranges = 1;
        in->owner = in;
        in->ranges[0] = (kvf_nccl_range_t){to.mem.base, 4096, NULL};
        kvf_nccl_post(to.ends[0].path, in);
    }
    UNTIL(to.ends[0].ended);
    cr_assert_eq(to.ends[0].lost, 2);
    stop();
}

/* Whatever call fails, at whatever time: both ends end, with a text, and nothing is left. */
Test(mover_nccl, failures) {
    static const char *const calls[] = {
        "ncclGetUniqueId",  "ncclCommInitRankConfig", "ncclSend", "ncclRecv", "nccl",
        "kvf_moves_launch", "cudaEventRecord",        "execute"};
    const uint64_t lengths[] = {100000, 4096, 9 << 20};
    unsigned hit = 0;
    for (size_t c = 0; c < sizeof(calls) / sizeof(calls[0]); c++) {
        for (uint64_t nth = 1; nth <= 4; nth++) {
            memset(&from, 0, sizeof(from));
            memset(&to, 0, sizeof(to));
            start_on(0, 1);
            standin_cuda_fail(calls[c], nth);
            invite(0);
            if (to.ends[0].invited) {
                join(0);
                UNTIL((from.ends[0].ready && to.ends[0].ready) || from.ends[0].ended ||
                      to.ends[0].ended);
            }
            if (from.ends[0].ready && to.ends[0].ready && !from.ends[0].ended &&
                !to.ends[0].ended) {
                (void)post(0, 0, 3, lengths, digests[0]);
                UNTIL((to.ends[0].done + to.ends[0].lost == 1 &&
                       from.ends[0].done + from.ends[0].lost == 1));
            }
            if (to.ends[0].done == 1) {
                check();
            }
            hit += to.ends[0].ended || to.ends[0].lost || from.ends[0].ended || from.ends[0].lost;
            standin_cuda_fail("none", 0);
            if (from.ends[0].path != NULL) {
                kvf_nccl_leave(from.ends[0].path, "the test is over");
                UNTIL(from.ends[0].ended);
            }
            if (to.ends[0].path != NULL) {
                kvf_nccl_leave(to.ends[0].path, "the test is over");
                UNTIL(to.ends[0].ended);
            }
            cr_assert(from.ends[0].ended == 0 || from.ends[0].why[0] != '\0');
            cr_assert(to.ends[0].ended == 0 || to.ends[0].why[0] != '\0');
            standin_cuda_reset();
            stop();
        }
    }
    cr_assert_gt(hit, 20, "%u", hit);
}

Test(mover_nccl, one_device_is_not_served) {
    uint8_t ours[KVF_NCCL_ADDRESS_BYTES], theirs[KVF_NCCL_ADDRESS_BYTES];
    start_on(0, 1);
    kvf_nccl_address(from.nccl, ours);
    kvf_nccl_address(to.nccl, theirs);
    cr_assert_eq(kvf_nccl_check_address(from.nccl, theirs, sizeof(theirs), &detail), KVF_OK);
    cr_assert_eq(kvf_nccl_check_address(from.nccl, ours, sizeof(ours), &detail),
                 KVF_ERR_UNSUPPORTED);
    cr_assert_neq(strstr(detail.text, "one device"), NULL, "%s", detail.text);
    cr_assert_eq(kvf_nccl_check_address(from.nccl, theirs, sizeof(theirs) - 1, &detail),
                 KVF_ERR_INVALID);
    theirs[0] ^= 1;
    cr_assert_eq(kvf_nccl_check_address(from.nccl, theirs, sizeof(theirs), &detail),
                 KVF_ERR_INVALID);
    theirs[0] ^= 1;
    theirs[8] ^= 1; /* of the version */
    cr_assert_eq(kvf_nccl_check_address(from.nccl, theirs, sizeof(theirs), &detail),
                 KVF_ERR_UNSUPPORTED);
    cr_assert_neq(strstr(detail.text, "version"), NULL, "%s", detail.text);
    stop();
}

Test(mover_nccl, an_invitation_that_is_none) {
    kvf_nccl_path_t *path;
    start_on(0, 1);
    cr_assert_eq(kvf_nccl_join(from.nccl, &from.ends[0], bytes, 127, &path), KVF_ERR_INVALID);
    memset(to.ends[0].invitation, 0x5a, sizeof(to.ends[0].invitation));
    join(0);
    UNTIL(from.ends[0].ended);
    cr_assert_eq(from.ends[0].ready, 0);
    stop();
}

Test(mover_nccl, no_room_on_the_device) {
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "1", 1);
    for (uint64_t nth = 2; nth <= 9; nth++) { /* the first is the pool's */
        standin_cuda_fail("cudaMalloc", nth);
        cr_assert_eq(make(&from, 0, 0), KVF_ERR_NO_MEMORY, "%d", (int)nth);
        unmake(&from);
        memset(&from, 0, sizeof(from));
    }
    stop();
}

Test(mover_nccl, no_library) {
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "1", 1);
    (void)setenv("KVF_STANDIN_NCCL_NONE", "1", 1);
    cr_assert_eq(make(&from, 0, 0), KVF_ERR_UNSUPPORTED);
    cr_assert_neq(strstr(detail.text, "no NCCL"), NULL, "%s", detail.text);
    stop();
}
