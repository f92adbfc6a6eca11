/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/crew.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#define MAX_THREADS 64
#define MAX_UNTOLD 8
/* Of so many jobs in a row at least one is a later one, if there is any. */
#define ROW 4
/* How often a thread gives way before it sleeps: to be woken takes longer than a job may. */
#define LOOKS 30

typedef struct job_list {
    kvf_job_t *first, *last;
} job_list_t;

struct kvf_crew {
    const kvf_alloc_t *alloc;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t cond; /* there is a job, or the end */
    job_list_t soon, later, done;
    uint32_t n_waiting, n_done;
    uint32_t row; /* jobs that were taken since the last later one */
    bool woken;   /* the owner, since it took jobs back */
    uint32_t n_idle;
    bool stop;
    uint32_t n_threads;
    pthread_t threads[MAX_THREADS];
};

static void add(job_list_t *list, kvf_job_t *job) {
    job->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = job;
    list->last = job;
}

static kvf_job_t *take(job_list_t *list) {
    kvf_job_t *job = list->first;
    if (job != NULL) {
        list->first = job->next;
        list->last = list->first == NULL ? NULL : list->last;
    }
    return job;
}

/* The job that begins next. */
static kvf_job_t *take_next(kvf_crew_t *crew) {
    bool turn = crew->soon.first == NULL || crew->row + 1 >= ROW;
    kvf_job_t *job = take(turn && crew->later.first != NULL ? &crew->later : &crew->soon);
    if (job != NULL) {
        crew->row = job->later ? 0 : crew->row + 1;
        crew->n_waiting--;
    }
    return job;
}

/* Waking costs about as much as a short job takes: the owner has to know when it could hand over
 * more, and otherwise of several jobs at once. */
static void wake_owner(kvf_crew_t *crew) {
    if (!crew->woken && (crew->n_waiting < crew->n_threads || crew->n_done >= MAX_UNTOLD)) {
        crew->woken = true;
        crew->wake(crew->ctx);
    }
}

static void *thread_main(void *arg) {
    kvf_crew_t *crew = arg;
    (void)prctl(PR_SET_NAME, "kvf-crew");
    (void)pthread_mutex_lock(&crew->lock);
    for (int looks = 0;;) {
        kvf_job_t *job = take_next(crew);
        if (job == NULL && crew->stop) {
            break;
        }
        if (job == NULL && looks++ < LOOKS) {
            (void)pthread_mutex_unlock(&crew->lock);
            (void)sched_yield();
            (void)pthread_mutex_lock(&crew->lock);
            continue;
        }
        looks = 0;
        if (job == NULL) {
            crew->n_idle++;
            (void)pthread_cond_wait(&crew->cond, &crew->lock);
            crew->n_idle--;
            continue;
        }
        (void)pthread_mutex_unlock(&crew->lock);
        job->run(job);
        (void)pthread_mutex_lock(&crew->lock);
        add(&crew->done, job);
        crew->n_done++;
        wake_owner(crew);
    }
    (void)pthread_mutex_unlock(&crew->lock);
    return NULL;
}

kvf_status_t kvf_crew_create(const kvf_alloc_t *alloc, uint32_t n, void (*wake)(void *ctx),
                             void *ctx, kvf_crew_t **crew_p) {
    sigset_t all, before;
    kvf_crew_t *crew = kvf_calloc(alloc, 1, sizeof(*crew));
    if (crew == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    crew->alloc = alloc;
    crew->wake = wake;
    crew->ctx = ctx;
    pthread_mutexattr_t attr;
    (void)pthread_mutexattr_init(&attr);
    (void)pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP); /* held for moments */
    (void)pthread_mutex_init(&crew->lock, &attr);
    (void)pthread_mutexattr_destroy(&attr);
    (void)pthread_cond_init(&crew->cond, NULL);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are the application's */
    while (crew->n_threads < n && crew->n_threads < MAX_THREADS &&
           pthread_create(&crew->threads[crew->n_threads], NULL, thread_main, crew) == 0) {
        crew->n_threads++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (crew->n_threads < n) {
        kvf_crew_destroy(crew);
        return KVF_ERR_NO_MEMORY;
    }
    *crew_p = crew;
    return KVF_OK;
}

void kvf_crew_destroy(kvf_crew_t *crew) {
    if (crew == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&crew->lock);
    crew->stop = true;
    (void)pthread_cond_broadcast(&crew->cond);
    (void)pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->n_threads; i++) {
        (void)pthread_join(crew->threads[i], NULL);
    }
    (void)pthread_cond_destroy(&crew->cond);
    (void)pthread_mutex_destroy(&crew->lock);
    kvf_free(crew->alloc, crew);
}

void kvf_crew_post(kvf_crew_t *crew, kvf_job_t *job) {
    (void)pthread_mutex_lock(&crew->lock);
    add(job->later ? &crew->later : &crew->soon, job);
    crew->n_waiting++;
    bool idle = crew->n_idle > 0;
    (void)pthread_mutex_unlock(&crew->lock);
    if (idle) {
        (void)pthread_cond_signal(&crew->cond);
    }
}

kvf_job_t *kvf_crew_help(kvf_crew_t *crew, uint64_t most_bytes) {
    kvf_job_t *job = NULL;
    (void)pthread_mutex_lock(&crew->lock);
    job_list_t *list = crew->soon.first != NULL ? &crew->soon : &crew->later;
    if (list->first != NULL && list->first->bytes <= most_bytes) {
        job = take(list);
        crew->n_waiting--;
    }
    (void)pthread_mutex_unlock(&crew->lock);
    return job;
}

kvf_job_t *kvf_crew_take(kvf_crew_t *crew) {
    (void)pthread_mutex_lock(&crew->lock);
    kvf_job_t *job = crew->done.first;
    crew->done = (job_list_t){NULL, NULL};
    crew->n_done = 0;
    crew->woken = false;
    (void)pthread_mutex_unlock(&crew->lock);
    return job;
}
