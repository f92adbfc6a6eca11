/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/timers.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static int fired[64], n_fired;

static void note(kvf_timer_t *timer, void *owner) {
    (void)timer;
    fired[n_fired++] = *(int *)owner;
}

Test(timers, fire_in_order_of_time) {
    static const uint64_t at[] = {50, 10, 40, 10, 30, 20, 60, KVF_NEVER};
    static const uint64_t sorted[] = {10, 10, 20, 30, 40, 50};
    kvf_timers_t timers;
    kvf_timer_t timer[8];
    int id[8];
    kvf_timers_init(&timers, kvf_alloc_default());
    for (int i = 0; i < 8; i++) {
        id[i] = i;
        cr_assert_eq(kvf_timer_reserve(&timers, &timer[i], note, &id[i]), KVF_OK);
        kvf_timer_set(&timers, &timer[i], at[i]);
    }
    cr_expect_eq(kvf_timers_next(&timers), 10);
    kvf_timers_run(&timers, 9);
    cr_expect_eq(n_fired, 0);
    kvf_timers_run(&timers, 55);
    cr_assert_eq(n_fired, 6);
    for (int i = 0; i < 6; i++) {
        cr_expect_eq(at[fired[i]], sorted[i]);
    }
    cr_expect_eq(kvf_timers_next(&timers), 60);
    for (int i = 0; i < 8; i++) {
        kvf_timer_release(&timers, &timer[i]);
    }
    cr_expect_eq(kvf_timers_next(&timers), KVF_NEVER);
    kvf_timers_cleanup(&timers);
}

/* Random sets, moves and releases against a plain array. */
Test(timers, like_a_list) {
    enum { N = 40 };
    kvf_timers_t timers;
    kvf_timer_t timer[N];
    uint64_t want[N];
    int id[N];
    srand(7);
    kvf_timers_init(&timers, kvf_alloc_default());
    for (int i = 0; i < N; i++) {
        id[i] = i;
        want[i] = KVF_NEVER;
        cr_assert_eq(kvf_timer_reserve(&timers, &timer[i], note, &id[i]), KVF_OK);
    }
    for (uint64_t now = 1; now < 20000; now++) {
        int i = rand() % N;
        want[i] = rand() % 4 == 0 ? KVF_NEVER : now + (uint64_t)(rand() % 50);
        kvf_timer_set(&timers, &timer[i], want[i]);
        uint64_t next = KVF_NEVER;
        int due = 0;
        for (int k = 0; k < N; k++) {
            next = want[k] < next ? want[k] : next;
            due += want[k] <= now;
        }
        cr_assert_eq(kvf_timers_next(&timers), next);
        n_fired = 0;
        kvf_timers_run(&timers, now);
        cr_assert_eq(n_fired, due);
        for (int k = 0; k < n_fired; k++) {
            cr_assert(want[fired[k]] <= now);
            want[fired[k]] = KVF_NEVER;
        }
    }
    kvf_timers_cleanup(&timers);
}

static void again(kvf_timer_t *timer, void *owner) {
    n_fired++;
    kvf_timer_set(owner, timer, 5);
}

Test(timers, one_that_rearms_itself_does_not_hold_the_loop) {
    kvf_timers_t timers;
    kvf_timer_t timer;
    kvf_timers_init(&timers, kvf_alloc_default());
    cr_assert_eq(kvf_timer_reserve(&timers, &timer, again, &timers), KVF_OK);
    kvf_timer_set(&timers, &timer, 5);
    kvf_timers_run(&timers, 10);
    cr_expect_eq(n_fired, 1);
    cr_expect_eq(kvf_timers_next(&timers), 5);
    kvf_timer_release(&timers, &timer);
    kvf_timers_cleanup(&timers);
}

Test(timers, no_memory_is_said_when_reserving) {
    kvf_alloc_fail_t alloc;
    kvf_timers_t timers;
    kvf_timer_t timer[17];
    kvf_alloc_fail_init(&alloc, 2);
    kvf_timers_init(&timers, &alloc.table);
    for (int i = 0; i < 16; i++) {
        cr_assert_eq(kvf_timer_reserve(&timers, &timer[i], note, NULL), KVF_OK);
    }
    cr_expect_eq(kvf_timer_reserve(&timers, &timer[16], note, NULL), KVF_ERR_NO_MEMORY);
    kvf_timers_cleanup(&timers);
    cr_expect_eq(alloc.live, 0);
}
