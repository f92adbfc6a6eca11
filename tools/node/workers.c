/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/workers.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <utlist.h>

struct kvf_workers {
    const kvf_alloc_t *alloc;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* on CLOCK_MONOTONIC */
    kvf_timers_t timers;
    kvf_task_t *ready;
    bool stopping;
    unsigned n_threads;
    pthread_t threads[];
};

static uint64_t now_us(void) {
    const kvf_clock_t *clock = kvf_clock_default();
    return clock->now_us(clock->ctx);
}

static void make_ready(kvf_timer_t *timer, void *owner) {
    kvf_workers_t *workers = owner;
    kvf_task_t *task = (kvf_task_t *)(void *)timer; /* its first member */
    task->ready = true;
    DL_APPEND(workers->ready, task);
}

/* With the lock. */
static void schedule(kvf_workers_t *workers, kvf_task_t *task, uint64_t at_us) {
    if (task->ready || at_us >= task->timer.at_us) {
        return;
    }
    if (at_us > now_us()) {
        kvf_timer_set(&workers->timers, &task->timer, at_us);
    } else {
        kvf_timer_set(&workers->timers, &task->timer, KVF_NEVER);
        make_ready(&task->timer, workers);
    }
    (void)pthread_cond_signal(&workers->wake);
}

static void sleep_until(kvf_workers_t *workers, uint64_t at_us) {
    if (at_us == KVF_NEVER) {
        (void)pthread_cond_wait(&workers->wake, &workers->lock);
    } else {
        struct timespec at = {(time_t)(at_us / 1000000), (long)(at_us % 1000000) * 1000};
        (void)pthread_cond_timedwait(&workers->wake, &workers->lock, &at);
    }
}

static void run_next(kvf_workers_t *workers) {
    kvf_task_t *task = workers->ready;
    DL_DELETE(workers->ready, task);
    task->ready = false;
    task->running = true;
    task->next_us = KVF_NEVER;
    if (workers->ready != NULL) {
        (void)pthread_cond_signal(&workers->wake);
    }
    (void)pthread_mutex_unlock(&workers->lock);
    bool lives = task->run(task);
    (void)pthread_mutex_lock(&workers->lock);
    if (lives) {
        task->running = false;
        schedule(workers, task, task->next_us);
    }
}

static void *work(void *ctx) {
    kvf_workers_t *workers = ctx;
    (void)pthread_mutex_lock(&workers->lock);
    while (!workers->stopping) {
        kvf_timers_run(&workers->timers, now_us());
        if (workers->ready != NULL) {
            run_next(workers);
        } else {
            sleep_until(workers, kvf_timers_next(&workers->timers));
        }
    }
    (void)pthread_mutex_unlock(&workers->lock);
    return NULL;
}

kvf_status_t kvf_workers_create(const kvf_alloc_t *alloc, unsigned n_threads,
                                kvf_workers_t **workers_p, kvf_detail_t *detail) {
    pthread_condattr_t attr;
    kvf_workers_t *workers =
        kvf_calloc(alloc, 1, sizeof(*workers) + n_threads * sizeof(workers->threads[0]));
    if (workers == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the worker threads");
    }
    workers->alloc = alloc;
    kvf_timers_init(&workers->timers, alloc);
    (void)pthread_mutex_init(&workers->lock, NULL);
    (void)pthread_condattr_init(&attr);
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&workers->wake, &attr);
    (void)pthread_condattr_destroy(&attr);
    for (; workers->n_threads < n_threads; workers->n_threads++) {
        int rc = pthread_create(&workers->threads[workers->n_threads], NULL, work, workers);
        if (rc != 0) {
            kvf_workers_destroy(workers);
            return kvf_fail(detail, KVF_ERR_IO, "cannot start a worker thread: %s", strerror(rc));
        }
    }
    *workers_p = workers;
    return KVF_OK;
}

void kvf_workers_destroy(kvf_workers_t *workers) {
    if (workers == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&workers->lock);
    workers->stopping = true;
    (void)pthread_cond_broadcast(&workers->wake);
    (void)pthread_mutex_unlock(&workers->lock);
    for (unsigned i = 0; i < workers->n_threads; i++) {
        (void)pthread_join(workers->threads[i], NULL);
    }
    (void)pthread_cond_destroy(&workers->wake);
    (void)pthread_mutex_destroy(&workers->lock);
    kvf_timers_cleanup(&workers->timers);
    kvf_free(workers->alloc, workers);
}

kvf_status_t kvf_workers_add(kvf_workers_t *workers, kvf_task_t *task,
                             bool (*run)(kvf_task_t *task)) {
    *task = (kvf_task_t){.next_us = KVF_NEVER, .run = run};
    (void)pthread_mutex_lock(&workers->lock);
    kvf_status_t status = kvf_timer_reserve(&workers->timers, &task->timer, make_ready, workers);
    (void)pthread_mutex_unlock(&workers->lock);
    return status;
}

void kvf_workers_remove(kvf_workers_t *workers, kvf_task_t *task) {
    (void)pthread_mutex_lock(&workers->lock);
    if (task->ready) {
        DL_DELETE(workers->ready, task);
    }
    kvf_timer_release(&workers->timers, &task->timer);
    (void)pthread_mutex_unlock(&workers->lock);
}

void kvf_workers_post(kvf_workers_t *workers, kvf_task_t *task, uint64_t at_us) {
    (void)pthread_mutex_lock(&workers->lock);
    if (task->running) {
        task->next_us = at_us < task->next_us ? at_us : task->next_us;
    } else {
        schedule(workers, task, at_us);
    }
    (void)pthread_mutex_unlock(&workers->lock);
}
