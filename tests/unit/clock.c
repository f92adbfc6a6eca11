/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/clock.h"

#include <criterion/criterion.h>
#include <string.h>
#include <time.h>

static uint64_t monotonic(void) {
    struct timespec now;
    cr_assert_eq(clock_gettime(CLOCK_MONOTONIC, &now), 0);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

Test(clock, counts_microseconds_and_never_runs_backward) {
    const kvf_clock_t *clock = kvf_clock_default();
    const struct timespec nap = {.tv_nsec = 3000000};
    uint64_t before = monotonic(), last = clock->now_us(clock->ctx);
    cr_assert_leq(before, last);
    for (int i = 0; i < 1000; i++) {
        uint64_t now = clock->now_us(clock->ctx);
        cr_assert_leq(last, now);
        last = now;
    }
    (void)nanosleep(&nap, NULL);
    uint64_t later = clock->now_us(clock->ctx);
    cr_assert_geq(later, last + 3000);
    cr_assert_leq(later, monotonic());
}

/* Each byte is filled, none behind, and no two answers are the same. */
Test(clock, random_bytes) {
    const kvf_rand_t *random = kvf_rand_default();
    unsigned char a[65], b[65], seen[64] = {0};
    for (int round = 0; round < 20; round++) {
        memset(a, 0, sizeof(a));
        random->fill(random->ctx, a, 64);
        random->fill(random->ctx, b, 64);
        cr_assert_neq(memcmp(a, b, 64), 0);
        cr_assert_eq(a[64], 0);
        for (int i = 0; i < 64; i++) {
            seen[i] |= a[i];
        }
    }
    for (int i = 0; i < 64; i++) {
        cr_expect_neq(seen[i], 0, "byte %d stayed zero 20 times", i);
    }
    memset(a, 0x5a, sizeof(a));
    random->fill(random->ctx, a, 0);
    cr_assert_eq(a[0], 0x5a);
}

Test(clock, times_do_not_wrap) {
    cr_expect_eq(kvf_time_after(5, 7), 12);
    cr_expect_eq(kvf_time_after(5, KVF_NEVER), KVF_NEVER);
    cr_expect_eq(kvf_time_after(0, KVF_NEVER), KVF_NEVER);
    cr_expect_eq(kvf_time_after(KVF_NEVER, 1), KVF_NEVER);
    cr_expect_eq(kvf_time_after(KVF_NEVER - 5, 5), KVF_NEVER);
    cr_expect_eq(kvf_time_after(KVF_NEVER - 5, 4), KVF_NEVER - 1);
}
