/* SPDX-License-Identifier: Apache-2.0 */
/* Not with Criterion, which cannot run under the thread sanitizer: a job is a race, or is not. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "transceiver/mover/crew.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* ---- threads that cannot be started ---- */

static int creates, create_fails_at, joins;

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg) {
    __typeof__(&pthread_create) real =
        (__typeof__(&pthread_create))(uintptr_t)dlsym(RTLD_NEXT, "pthread_create");
    return ++creates == create_fails_at ? EAGAIN : real(thread, attr, fn, arg);
}

int pthread_join(pthread_t thread, void **result) {
    __typeof__(&pthread_join) real =
        (__typeof__(&pthread_join))(uintptr_t)dlsym(RTLD_NEXT, "pthread_join");
    joins++;
    return real(thread, result);
}

/* ---- a crew, and who waits for it ---- */

typedef struct owner {
    kvf_crew_t *crew;
    sem_t woken;
    atomic_int wakes;
} owner_t;

static void wake(void *ctx) {
    owner_t *owner = ctx;
    (void)atomic_fetch_add(&owner->wakes, 1);
    CHECK(sem_post(&owner->woken) == 0);
}

static void open_crew(owner_t *owner, uint32_t n) {
    *owner = (owner_t){.crew = NULL};
    CHECK(sem_init(&owner->woken, 0, 0) == 0);
    CHECK(kvf_crew_create(kvf_alloc_default(), n, wake, owner, &owner->crew) == KVF_OK);
}

static void close_crew(owner_t *owner) {
    CHECK(kvf_crew_take(owner->crew) == NULL);
    kvf_crew_destroy(owner->crew);
    CHECK(sem_destroy(&owner->woken) == 0);
}

/* Take when woken, and only then: a wake that is forgotten hangs here. @return As many as came. */
static int take(owner_t *owner, int n, kvf_job_t **taken) {
    int i = 0;
    while (i < n) {
        CHECK(sem_wait(&owner->woken) == 0);
        for (kvf_job_t *job = kvf_crew_take(owner->crew), *next; job != NULL; job = next) {
            next = job->next; /* it is ours again, whatever we do to it */
            job->next = (kvf_job_t *)(uintptr_t)1;
            CHECK(i < n);
            taken[i++] = job;
        }
    }
    return i;
}

/* A job that says when it has begun, and may wait until it is let go. Plain numbers: what the
 * thread writes must be there for who takes the job, without more ado. */
typedef struct task {
    kvf_job_t job;
    sem_t *go;
    sem_t *begun;
    atomic_int *order;
    int began_as;
    int runs;
    pthread_t thread;
    sigset_t blocked;
} task_t;

static void run(kvf_job_t *job) {
    task_t *task = (task_t *)job;
    CHECK(job->ctx == task);
    task->began_as = task->order == NULL ? 0 : atomic_fetch_add(task->order, 1);
    if (task->begun != NULL) {
        CHECK(sem_post(task->begun) == 0);
    }
    if (task->go != NULL) {
        CHECK(sem_wait(task->go) == 0);
    }
    task->thread = pthread_self();
    (void)pthread_sigmask(SIG_BLOCK, NULL, &task->blocked);
    task->runs++;
}

static void post(owner_t *owner, task_t *task) {
    task->job.run = run;
    task->job.ctx = task;
    kvf_crew_post(owner->crew, &task->job);
}

/* ---- tests ---- */

/* One thread does jobs in the order in which they were posted; signals are not its business. */
static void one_thread_keeps_the_order(void) {
    enum { N = 500 };
    static task_t tasks[N];
    kvf_job_t *taken[N];
    atomic_int order = 0;
    owner_t owner;
    open_crew(&owner, 1);
    for (int i = 0; i < N; i++) {
        tasks[i].order = &order;
        post(&owner, &tasks[i]);
    }
    CHECK(take(&owner, N, taken) == N);
    for (int i = 0; i < N; i++) {
        CHECK(taken[i] == &tasks[i].job && tasks[i].began_as == i && tasks[i].runs == 1);
        CHECK(!pthread_equal(tasks[i].thread, pthread_self()));
        CHECK(sigismember(&tasks[i].blocked, SIGTERM) == 1);
        CHECK(sigismember(&tasks[i].blocked, SIGALRM) == 1);
    }
    close_crew(&owner);
    sigset_t mine;
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mine) == 0);
    CHECK(sigismember(&mine, SIGTERM) == 0); /* those of who made the crew are as they were */
}

/* As many at once as there are threads; they come back in the order in which they ended. */
static void jobs_end_in_any_order(void) {
    enum { N = 4 };
    static const int ends[N] = {2, 0, 3, 1};
    task_t tasks[N] = {{.runs = 0}};
    sem_t go[N], begun;
    kvf_job_t *taken[1];
    owner_t owner;
    open_crew(&owner, N);
    CHECK(sem_init(&begun, 0, 0) == 0);
    for (int i = 0; i < N; i++) {
        CHECK(sem_init(&go[i], 0, 0) == 0);
        tasks[i].go = &go[i];
        tasks[i].begun = &begun;
        post(&owner, &tasks[i]);
    }
    for (int i = 0; i < N; i++) {
        CHECK(sem_wait(&begun) == 0); /* all of them have begun, none has ended */
    }
    CHECK(kvf_crew_take(owner.crew) == NULL && atomic_load(&owner.wakes) == 0);
    for (int i = 0; i < N; i++) {
        CHECK(sem_post(&go[ends[i]]) == 0);
        CHECK(take(&owner, 1, taken) == 1 && taken[0] == &tasks[ends[i]].job);
        CHECK(atomic_load(&owner.wakes) == i + 1);
    }
    for (int i = 0; i < N; i++) {
        CHECK(sem_destroy(&go[i]) == 0);
    }
    CHECK(sem_destroy(&begun) == 0);
    close_crew(&owner);
}

/* Who does not take is not woken again, and loses nothing: all are taken at once, in their order.
 */
static void one_wake_for_all_that_wait(void) {
    enum { N = 6 };
    task_t tasks[N] = {{.runs = 0}};
    sem_t begun;
    kvf_job_t *taken[N];
    owner_t owner;
    open_crew(&owner, 1);
    CHECK(sem_init(&begun, 0, 0) == 0);
    for (int i = 0; i < N; i++) {
        tasks[i].begun = &begun;
        post(&owner, &tasks[i]);
    }
    for (int i = 0; i < N; i++) {
        CHECK(sem_wait(&begun) == 0);
    }
    CHECK(take(&owner, N, taken) == N);
    CHECK(atomic_load(&owner.wakes) <= 2); /* the last one may have been in its thread yet */
    for (int i = 0; i < N; i++) {
        CHECK(taken[i] == &tasks[i].job);
    }
    close_crew(&owner);
    CHECK(sem_destroy(&begun) == 0);
}

/* Posted again as soon as they come back, by several threads' work, as a transfer does it. */
static void many_jobs(uint32_t n_threads) {
    enum { N = 64, ROUNDS = 300 };
    static task_t tasks[N];
    owner_t owner;
    memset(tasks, 0, sizeof(tasks));
    open_crew(&owner, n_threads);
    for (int i = 0; i < N; i++) {
        post(&owner, &tasks[i]);
    }
    int left = N * ROUNDS;
    while (left > 0) {
        CHECK(sem_wait(&owner.woken) == 0);
        for (kvf_job_t *job = kvf_crew_take(owner.crew), *next; job != NULL; job = next) {
            next = job->next;
            left--;
            if (((task_t *)job)->runs < ROUNDS) {
                post(&owner, (task_t *)job);
            }
        }
    }
    for (int i = 0; i < N; i++) {
        CHECK(tasks[i].runs == ROUNDS);
    }
    close_crew(&owner);
}

/* The owner gets what would begin soon, once, and nothing that is larger than it asks for. */
static void an_owner_that_helps(void) {
    enum { N = 5 };
    task_t tasks[N] = {{.runs = 0}};
    sem_t go, begun;
    kvf_job_t *taken[N];
    owner_t owner;
    open_crew(&owner, 1);
    CHECK(sem_init(&go, 0, 0) == 0 && sem_init(&begun, 0, 0) == 0);
    CHECK(kvf_crew_help(owner.crew, UINT64_MAX) == NULL);
    tasks[0].go = &go;
    tasks[0].begun = &begun;
    for (int i = 0; i < N; i++) {
        tasks[i].job.bytes = i == 2 ? 1001 : 1000;
        post(&owner, &tasks[i]);
    }
    CHECK(sem_wait(&begun) == 0); /* the only thread has the first one, and keeps it */
    CHECK(kvf_crew_help(owner.crew, 999) == NULL);
    CHECK(kvf_crew_help(owner.crew, 1000) == &tasks[1].job);
    CHECK(kvf_crew_help(owner.crew, 1000) == NULL); /* those behind it do not overtake it */
    CHECK(kvf_crew_help(owner.crew, 1001) == &tasks[2].job);
    CHECK(sem_post(&go) == 0);
    CHECK(take(&owner, N - 2, taken) == N - 2);
    CHECK(taken[0] == &tasks[0].job && taken[1] == &tasks[3].job && taken[2] == &tasks[4].job);
    CHECK(tasks[1].runs == 0 && tasks[2].runs == 0 && tasks[4].runs == 1);
    CHECK(sem_destroy(&go) == 0 && sem_destroy(&begun) == 0);
    close_crew(&owner);
}

/* What somebody has much of does not hold up others, and is not held up for ever either. */
static void later_jobs_let_others_pass(void) {
    enum { N = 10 };
    static const int began[N] = {0, 3, 7, 8, 9, 1, 2, 4, 5, 6}; /* as which job i begins */
    task_t tasks[N] = {{.runs = 0}};
    atomic_int order = 0;
    sem_t go, begun;
    kvf_job_t *taken[N];
    owner_t owner;
    open_crew(&owner, 1);
    CHECK(sem_init(&go, 0, 0) == 0 && sem_init(&begun, 0, 0) == 0);
    tasks[0].go = &go;
    for (int i = 0; i < N; i++) {
        tasks[i].order = &order;
        tasks[i].begun = i == 0 ? &begun : NULL;
        tasks[i].job.later = i >= 1 && i <= 4;
        post(&owner, &tasks[i]);
        if (i == 0) {
            CHECK(sem_wait(&begun) == 0); /* the only thread is busy; the others line up */
        }
    }
    CHECK(sem_post(&go) == 0);
    CHECK(take(&owner, N, taken) == N);
    for (int i = 0; i < N; i++) {
        CHECK(tasks[i].runs == 1 && tasks[i].began_as == began[i]);
    }
    CHECK(sem_destroy(&go) == 0 && sem_destroy(&begun) == 0);
    close_crew(&owner);
}

/* Crews that had no time to begin, with and without something to do. */
static void short_lives(void) {
    for (uint32_t n = 1; n <= 64; n += 9) {
        task_t task = {.runs = 0};
        kvf_job_t *taken[1];
        owner_t owner;
        open_crew(&owner, n);
        close_crew(&owner);
        open_crew(&owner, n);
        post(&owner, &task);
        CHECK(take(&owner, 1, taken) == 1 && task.runs == 1);
        close_crew(&owner);
    }
    kvf_crew_destroy(NULL);
}

/* Whichever thread cannot be started, those before it are gone, and so is the memory. */
static void what_cannot_be_made(void) {
    kvf_alloc_fail_t memory;
    owner_t owner = {.crew = NULL};
    kvf_alloc_fail_init(&memory, 1);
    CHECK(kvf_crew_create(&memory.table, 3, wake, &owner, &owner.crew) == KVF_ERR_NO_MEMORY);
    CHECK(owner.crew == NULL && memory.live == 0);
    kvf_alloc_fail_init(&memory, 0);
    for (int n = 1; n <= 5; n++) {
        creates = joins = 0;
        create_fails_at = n;
        CHECK(kvf_crew_create(&memory.table, 5, wake, &owner, &owner.crew) == KVF_ERR_NO_MEMORY);
        CHECK(owner.crew == NULL && memory.live == 0 && joins == n - 1);
    }
    create_fails_at = 0;
    CHECK(kvf_crew_create(&memory.table, 65, wake, &owner, &owner.crew) == KVF_ERR_NO_MEMORY);
    CHECK(memory.live == 0);
    CHECK(kvf_crew_create(&memory.table, 64, wake, &owner, &owner.crew) == KVF_OK);
    joins = 0;
    kvf_crew_destroy(owner.crew);
    CHECK(joins == 64 && memory.live == 0);
}

int main(void) {
    one_thread_keeps_the_order();
    jobs_end_in_any_order();
    one_wake_for_all_that_wait();
    many_jobs(1);
    many_jobs(3);
    many_jobs(8);
    an_owner_that_helps();
    later_jobs_let_others_pass();
    short_lives();
    what_cannot_be_made();
    return 0;
}
