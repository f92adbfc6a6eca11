/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/workers.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define N_TASKS 8

/* A task that counts its runs, notices company, and asks for more. */
typedef struct probe {
    kvf_task_t task;
    kvf_workers_t *workers;
    atomic_int inside;
    atomic_int runs;
    int more;          /* times it posts itself from inside */
    uint64_t again_us; /* delay of that */
    useconds_t work_us;
    uint64_t ran_at_us;
    bool ends;
} probe_t;

static uint64_t now_us(void) {
    return kvf_clock_default()->now_us(NULL);
}

static bool run(kvf_task_t *task) {
    probe_t *probe = (probe_t *)(void *)task;
    cr_assert_eq(atomic_fetch_add(&probe->inside, 1), 0, "on two threads at once");
    probe->ran_at_us = now_us();
    (void)usleep(probe->work_us);
    if (probe->more > 0) {
        probe->more--;
        kvf_workers_post(probe->workers, task,
                         probe->again_us == 0 ? 0 : now_us() + probe->again_us);
    }
    (void)atomic_fetch_sub(&probe->inside, 1);
    if (probe->ends) {
        kvf_workers_remove(probe->workers, task);
    }
    (void)atomic_fetch_add(&probe->runs, 1);
    return !probe->ends;
}

static kvf_workers_t *make(unsigned n) {
    kvf_workers_t *workers;
    kvf_detail_t detail;
    cr_assert_eq(kvf_workers_create(kvf_alloc_default(), n, &workers, &detail), KVF_OK);
    return workers;
}

static void add(kvf_workers_t *workers, probe_t *probe) {
    probe->workers = workers;
    cr_assert_eq(kvf_workers_add(workers, &probe->task, run), KVF_OK);
}

static void wait_for(probe_t *probe, int runs) {
    for (int i = 0; i < 5000 && atomic_load(&probe->runs) < runs; i++) {
        (void)usleep(1000);
    }
    cr_assert_geq(atomic_load(&probe->runs), runs);
}

Test(workers, a_task_runs_again_when_it_was_posted_while_it_ran) {
    kvf_workers_t *workers = make(3);
    probe_t probe = {.more = 3, .work_us = 1000};
    add(workers, &probe);
    kvf_workers_post(workers, &probe.task, 0);
    wait_for(&probe, 4);
    (void)usleep(20000);
    cr_assert_eq(atomic_load(&probe.runs), 4);
    kvf_workers_destroy(workers);
}

Test(workers, a_posted_task_runs_once_at_the_earlier_time) {
    kvf_workers_t *workers = make(2);
    probe_t probe = {.work_us = 0};
    add(workers, &probe);
    uint64_t start = now_us();
    kvf_workers_post(workers, &probe.task, start + 60000000);
    kvf_workers_post(workers, &probe.task, start + 50000);
    kvf_workers_post(workers, &probe.task, start + 60000000);
    wait_for(&probe, 1);
    cr_assert_geq(probe.ran_at_us, start + 50000);
    (void)usleep(100000);
    cr_assert_eq(atomic_load(&probe.runs), 1);
    kvf_workers_post(workers, &probe.task, now_us() + 60000000);
    kvf_workers_post(workers, &probe.task, 0);
    wait_for(&probe, 2);
    kvf_workers_destroy(workers);
}

Test(workers, many_tasks_share_the_threads_and_none_runs_twice_at_once) {
    kvf_workers_t *workers = make(4);
    probe_t probes[N_TASKS] = {{.more = 0}};
    for (int i = 0; i < N_TASKS; i++) {
        probes[i].more = 20;
        probes[i].work_us = 200;
        probes[i].again_us = i % 2 == 0 ? 0 : 300;
        add(workers, &probes[i]);
        kvf_workers_post(workers, &probes[i].task, 0);
    }
    for (int k = 0; k < 200; k++) {
        kvf_workers_post(workers, &probes[k % N_TASKS].task, 0);
    }
    for (int i = 0; i < N_TASKS; i++) {
        wait_for(&probes[i], 21);
    }
    kvf_workers_destroy(workers);
}

Test(workers, a_removed_task_does_not_run) {
    kvf_workers_t *workers = make(1);
    probe_t busy = {.work_us = 30000}, queued = {.work_us = 0}, timed = {.work_us = 0};
    add(workers, &busy);
    add(workers, &queued);
    add(workers, &timed);
    kvf_workers_post(workers, &busy.task, 0);
    (void)usleep(5000);
    kvf_workers_post(workers, &queued.task, 0);
    kvf_workers_post(workers, &timed.task, now_us() + 10000);
    kvf_workers_remove(workers, &queued.task);
    kvf_workers_remove(workers, &timed.task);
    wait_for(&busy, 1);
    (void)usleep(50000);
    cr_assert_eq(atomic_load(&queued.runs), 0);
    cr_assert_eq(atomic_load(&timed.runs), 0);
    kvf_workers_destroy(workers);
}

Test(workers, a_task_may_end_itself) {
    kvf_workers_t *workers = make(2);
    probe_t probe = {.ends = true};
    add(workers, &probe);
    kvf_workers_post(workers, &probe.task, 0);
    wait_for(&probe, 1);
    kvf_workers_destroy(workers);
    cr_assert_eq(atomic_load(&probe.runs), 1);
}

Test(workers, destroy_drops_what_waits) {
    kvf_workers_t *workers = make(2);
    probe_t probe = {.work_us = 0};
    add(workers, &probe);
    kvf_workers_post(workers, &probe.task, now_us() + 60000000);
    kvf_workers_destroy(workers);
    cr_assert_eq(atomic_load(&probe.runs), 0);
}

Test(workers, idle_threads_use_no_cpu) {
    struct timespec before, after;
    kvf_workers_t *workers = make(4);
    probe_t probe = {.work_us = 0};
    add(workers, &probe);
    kvf_workers_post(workers, &probe.task, now_us() + 60000000);
    (void)usleep(20000);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    (void)usleep(300000);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    cr_assert_lt((after.tv_sec - before.tv_sec) * 1000000000L + after.tv_nsec - before.tv_nsec,
                 20000000L);
    kvf_workers_destroy(workers);
}

Test(workers, allocations_may_fail) {
    for (uint64_t n = 1; n <= 2; n++) {
        kvf_alloc_fail_t fail;
        kvf_workers_t *workers = NULL;
        probe_t probe = {.work_us = 0};
        kvf_detail_t detail;
        kvf_alloc_fail_init(&fail, n);
        kvf_status_t status = kvf_workers_create(&fail.table, 1, &workers, &detail);
        if (status == KVF_OK) {
            status = kvf_workers_add(workers, &probe.task, run);
        }
        cr_assert_eq(status, KVF_ERR_NO_MEMORY);
        kvf_workers_destroy(workers);
        cr_assert_eq(fail.live, 0);
    }
}
