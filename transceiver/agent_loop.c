/* SPDX-License-Identifier: Apache-2.0 */
/* The driver of the core: one libuv loop, one control channel, one or two movers, on one thread. */
#include "kvmgr/base/failpoint.h"
#include "transceiver/agent_driver.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <uv.h>

#define MAX_INBOUND 1024
#define BACKLOG_BYTES (UINT64_C(64) << 20)

/* A function to be run by the agent's thread. Lives on the stack of the waiting caller. */
typedef struct loop_call {
    void (*fn)(void *arg);
    void *arg;
    bool done;
    struct loop_call *next;
} loop_call_t;

struct kvf_loop {
    kvf_driver_t driver;
    uv_loop_t uv;
    int wake_fd; /* others write to it to wake the loop */
    atomic_bool woken;
    uv_poll_t wakes;
    uv_timer_t timer;                 /* ends a sleep */
    uv_poll_t polls[KVF_CORE_MOVERS]; /* the movers' descriptors */
    uv_poll_t copies;                 /* the copier's descriptor */
    bool awake;       /* driven by the caller: there is work that no descriptor tells */
    uint64_t busy_us; /* when something happened for the last time */

    bool threaded;
    pthread_t thread; /* that drives: the agent's own, or the one that started the agent */
    pthread_mutex_t lock;
    pthread_cond_t cond; /* calls done, thread started, thread quiet */
    loop_call_t *calls_first, *calls_last;
    bool started, stop, quiet;
    kvf_status_t status; /* of the start */
    kvf_detail_t detail;
};

/* ---- turns ---- */

static bool run_calls(kvf_loop_t *loop) {
    bool any = false;
    (void)pthread_mutex_lock(&loop->lock);
    while (loop->calls_first != NULL) {
        loop_call_t *call = loop->calls_first;
        loop->calls_first = call->next;
        if (loop->calls_first == NULL) {
            loop->calls_last = NULL;
        }
        (void)pthread_mutex_unlock(&loop->lock);
        kvf_driver_set_time(&loop->driver);
        call->fn(call->arg);
        kvf_control_flush(loop->driver.control);
        any = true;
        (void)pthread_mutex_lock(&loop->lock);
        call->done = true;
        (void)pthread_cond_broadcast(&loop->cond);
    }
    (void)pthread_mutex_unlock(&loop->lock);
    return any;
}

/* Let the core post, by the clock. */
static bool post(kvf_loop_t *loop) {
    const kvf_clock_t *clock = kvf_clock_default();
    uint64_t before_us = clock->now_us(clock->ctx);
    bool any = kvf_core_pump(loop->driver.agent->core);
    if (any) {
        loop->driver.posting_us += clock->now_us(clock->ctx) - before_us;
    }
    return any;
}

static bool turn(kvf_loop_t *loop) {
    kvf_core_t *core = loop->driver.agent->core;
    uint64_t before = loop->driver.events;
    bool any = false;
    (void)uv_run(&loop->uv, UV_RUN_NOWAIT); /* read everything before anybody's silence is judged */
    any |= run_calls(loop);
    kvf_driver_set_time(&loop->driver);
    for (uint32_t i = 0; i < loop->driver.n_movers; i++) {
        kvf_mover_t *mover = loop->driver.movers[i];
        any |= mover->ops->progress(mover) > 0;
    }
    any |= kvf_copier_progress(loop->driver.copier) > 0;
    kvf_driver_set_time(&loop->driver);
    kvf_core_tick(core);
    any |= post(loop);
    any |= kvf_core_deliver(core);
    /* Last: who has waited for a result need not wait for what a peer is told. */
    kvf_control_flush(loop->driver.control);
    return any || loop->driver.events != before;
}

/* libuv writes to sockets whose other end may be gone; that must not raise SIGPIPE in whoever
 * drives us. The agent's own thread blocks it for good, a caller's thread gets its mask back. */
static void block_sigpipe(sigset_t *before) {
    sigset_t set;
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGPIPE);
    (void)pthread_sigmask(SIG_BLOCK, &set, before);
}

static void restore_sigpipe(const sigset_t *before) {
    const struct timespec now = {0, 0};
    sigset_t set;
    if (sigismember(before, SIGPIPE) == 0) {
        (void)sigemptyset(&set);
        (void)sigaddset(&set, SIGPIPE);
        while (sigtimedwait(&set, NULL, &now) > 0) {
        }
        (void)pthread_sigmask(SIG_SETMASK, before, NULL);
    }
}

bool kvf_loop_turn(kvf_loop_t *loop) {
    sigset_t before;
    bool any;
    if (loop->threaded) {
        return turn(loop);
    }
    block_sigpipe(&before);
    any = turn(loop);
    restore_sigpipe(&before);
    return any;
}

/* Wake the loop. Not by uv_async_send(): a loop that preempts its waker there spins until the waker
 * runs again. @thread any */
static void wake_up(void *ctx) {
    kvf_loop_t *loop = ctx;
    const uint64_t one = 1;
    if (!atomic_exchange(&loop->woken, true)) {
        (void)!write(loop->wake_fd, &one, sizeof(one)); /* cannot fail: it counts to one */
    }
}

static void on_wakes(uv_poll_t *handle, int status, int events) {
    kvf_loop_t *loop = handle->data;
    uint64_t count;
    (void)status;
    (void)events;
    loop->driver.events++;
    (void)!read(loop->wake_fd, &count, sizeof(count));
    (void)atomic_exchange(&loop->woken, false); /* what it was woken for is looked for next */
}

static void on_timer(uv_timer_t *handle) {
    (void)handle;
}

static void on_poll(uv_poll_t *handle, int status, int events) {
    (void)handle; /* it ends a sleep; the mover makes progress in every turn */
    (void)status;
    (void)events;
}

uint64_t kvf_loop_timeout_us(kvf_loop_t *loop) {
    kvf_core_t *core = loop->driver.agent->core;
    const kvf_clock_t *clock = kvf_clock_default();
    uint64_t now = clock->now_us(clock->ctx), next = kvf_core_next_us(core);
    uint64_t timeout = next == KVF_NEVER ? KVF_NEVER : next > now ? next - now : 0;
    if (kvf_core_in_flight(core)) {
        for (uint32_t i = 0; i < loop->driver.n_movers; i++) {
            kvf_mover_t *mover = loop->driver.movers[i];
            uint64_t most = mover->ops->max_sleep_us(mover);
            timeout = most < timeout ? most : timeout;
        }
    }
    uint64_t look = kvf_copier_max_sleep_us(loop->driver.copier);
    timeout = look < timeout ? look : timeout;
    bool now_already =
        loop->awake || kvf_core_has_events(core) || kvf_copier_is_busy(loop->driver.copier);
    return now_already ? 0 : timeout;
}

/* Make everything that can happen wake the loop. @return false when something happened already. */
static bool prepare_sleep(kvf_loop_t *loop) {
    for (uint32_t i = 0; i < loop->driver.n_movers; i++) {
        kvf_mover_t *mover = loop->driver.movers[i];
        if (!mover->ops->arm(mover)) {
            return false;
        }
    }
    return kvf_copier_arm(loop->driver.copier);
}

static void sleep_once(kvf_loop_t *loop) {
    uint64_t timeout = prepare_sleep(loop) ? kvf_loop_timeout_us(loop) : 0;
    if (timeout == 0) {
        return;
    }
    if (timeout != KVF_NEVER) {
        uv_update_time(&loop->uv);
        (void)uv_timer_start(&loop->timer, on_timer, (timeout + 999) / 1000, 0);
    }
    (void)uv_run(&loop->uv, UV_RUN_ONCE);
    (void)uv_timer_stop(&loop->timer);
}

void kvf_loop_progress(kvf_loop_t *loop) {
    /* Bounded: a caller's own work must not starve. What is left then makes the timeout zero. */
    loop->awake = true;
    for (int turns = 0; turns < 64 && loop->awake; turns++) {
        loop->awake = kvf_loop_turn(loop) || !prepare_sleep(loop);
    }
    /* Hands changed watches to the kernel; what it hears besides is left for the next call. */
    sigset_t before;
    const uint64_t events = loop->driver.events;
    block_sigpipe(&before);
    (void)uv_run(&loop->uv, UV_RUN_NOWAIT);
    restore_sigpipe(&before);
    loop->awake |= loop->driver.events != events;
}

int kvf_loop_fd(kvf_loop_t *loop) {
    return uv_backend_fd(&loop->uv);
}

kvf_status_t kvf_loop_promise(kvf_loop_t *loop, kvf_fence_t *fence, uint64_t send_id,
                              const kvf_range_t *range, kvf_detail_t *detail) {
    return kvf_copier_promise(loop->driver.copier, fence, send_id, range, detail);
}

uint64_t kvf_loop_posting_us(const kvf_loop_t *loop) {
    return loop->driver.posting_us;
}

const char *kvf_loop_address(const kvf_loop_t *loop) {
    return kvf_control_address(loop->driver.control);
}

/* ---- start and stop ---- */

static void close_handle(uv_handle_t *handle, void *arg) {
    (void)arg;
    if (!uv_is_closing(handle)) {
        uv_close(handle, NULL);
    }
}

static void loop_close(kvf_loop_t *loop) {
    while (loop->driver.n_movers > 0) {
        kvf_mover_t *mover = loop->driver.movers[--loop->driver.n_movers];
        mover->ops->destroy(mover);
    }
    kvf_copier_destroy(loop->driver.copier);
    loop->driver.copier = NULL;
    kvf_fences_destroy(loop->driver.agent->fences);
    loop->driver.agent->fences = NULL;
    kvf_control_destroy(loop->driver.control);
    loop->driver.control = NULL;
    kvf_core_destroy(loop->driver.agent->core);
    loop->driver.agent->core = NULL;
    uv_walk(&loop->uv, close_handle, NULL);
    while (uv_run(&loop->uv, UV_RUN_DEFAULT) != 0) {
    }
    (void)uv_loop_close(&loop->uv);
}

static void on_copies(uv_poll_t *handle, int status, int events) {
    (void)status;
    (void)events;
    kvf_copier_readable(((kvf_loop_t *)handle->data)->driver.copier);
}

static kvf_status_t make_movers(kvf_loop_t *loop, const kvf_mover_sink_t *sink,
                                kvf_detail_t *detail) {
    kvf_agent_t *agent = loop->driver.agent;
    for (uint32_t i = 0; i < agent->n_movers; i++) {
        kvf_mover_t *mover;
        kvf_status_t status = agent->make_mover(agent->make_mover_ctx, agent, agent->mover_names[i],
                                                sink, &mover, detail);
        if (status != KVF_OK) {
            return status;
        }
        loop->driver.movers[loop->driver.n_movers++] = mover;
        int fd = mover->ops->fd(mover);
        if (fd >= 0 && (uv_poll_init(&loop->uv, &loop->polls[i], fd) != 0 ||
                        uv_poll_start(&loop->polls[i], UV_READABLE, on_poll) != 0)) {
            return kvf_fail(detail, KVF_ERR_IO, "the descriptor of mover %s cannot be polled",
                            agent->mover_names[i]);
        }
    }
    return KVF_OK;
}

#ifdef KVF_FAIL_POINTS
static void flush_control(void *control) {
    kvf_control_flush(control);
}
#endif

/* Everything that belongs to the driving thread. */
static kvf_status_t loop_open(kvf_loop_t *loop, kvf_detail_t *detail) {
    kvf_agent_t *agent = loop->driver.agent;
    const kvf_mover_sink_t sink = kvf_driver_sink(&loop->driver);
    const kvf_control_config_t control = {agent->config.control_listen, BACKLOG_BYTES, MAX_INBOUND};
    const kvf_control_events_t events = kvf_driver_control_events(&loop->driver);
    if (uv_loop_init(&loop->uv) != 0) {
        return kvf_fail(detail, KVF_ERR_IO, "no event loop: out of memory or descriptors");
    }
    kvf_status_t status = KVF_ERR_IO;
    loop->wakes.data = loop;
    if (uv_poll_init(&loop->uv, &loop->wakes, loop->wake_fd) != 0 ||
        uv_poll_start(&loop->wakes, UV_READABLE, on_wakes) != 0 ||
        uv_timer_init(&loop->uv, &loop->timer) != 0) {
        (void)kvf_fail(detail, status, "no event loop: out of memory or descriptors");
        goto err_close;
    }
    status = kvf_control_create(&control, &loop->uv, agent->alloc, &events, &loop->driver.control,
                                detail);
    if (status != KVF_OK) {
        goto err_close;
    }
    status = make_movers(loop, &sink, detail);
    if (status != KVF_OK) {
        goto err_close;
    }
    status = kvf_driver_make_core(&loop->driver, detail);
    if (status != KVF_OK) {
        goto err_close;
    }
    status =
        kvf_copier_create(agent, loop->driver.movers, wake_up, loop, &loop->driver.copier, detail);
    if (status == KVF_OK && agent->cuda != NULL) {
        status = kvf_fences_create(agent->alloc, kvf_cuda_context(agent->cuda), wake_up, loop,
                                   &agent->fences, detail);
    }
    if (status != KVF_OK) {
        goto err_close;
    }
    int fd = kvf_copier_fd(loop->driver.copier);
    loop->copies.data = loop;
    if (fd >= 0 && (uv_poll_init(&loop->uv, &loop->copies, fd) != 0 ||
                    uv_poll_start(&loop->copies, UV_READABLE, on_copies) != 0)) {
        status =
            kvf_fail(detail, KVF_ERR_IO, "the socket for peers on this machine cannot be polled");
        goto err_close;
    }
#ifdef KVF_FAIL_POINTS
    kvf_fail_control = loop->driver.control;
    kvf_fail_flush = flush_control;
    kvf_fail_cut = kvf_control_cut;
#endif
    return KVF_OK;

err_close:
    loop_close(loop);
    return status;
}

/* Whether to look once more instead of sleeping: to be woken takes longer than short transfers. */
static bool looks_on(kvf_loop_t *loop, bool busy) {
    const uint64_t most = loop->driver.agent->config.busy_poll_us;
    if (most == 0 || !kvf_core_busy(loop->driver.agent->core) ||
        kvf_copier_waits(loop->driver.copier)) {
        return false; /* a crew at work needs the core, and wakes us */
    }
    const kvf_clock_t *clock = kvf_clock_default();
    uint64_t now = clock->now_us(clock->ctx);
    if (busy) {
        loop->busy_us = now;
    } else {
        (void)sched_yield(); /* what is waited for may need this core */
    }
    return now - loop->busy_us < most;
}

static void *thread_main(void *arg) {
    kvf_loop_t *loop = arg;
    sigset_t before;
    (void)prctl(PR_SET_NAME, "kvf-agent");
    block_sigpipe(&before);
    kvf_status_t status = loop_open(loop, &loop->detail);
    (void)pthread_mutex_lock(&loop->lock);
    loop->status = status;
    loop->started = true;
    (void)pthread_cond_broadcast(&loop->cond);
    (void)pthread_mutex_unlock(&loop->lock);
    if (status != KVF_OK) {
        return NULL;
    }
    for (;;) {
        bool busy = kvf_loop_turn(loop);
        (void)pthread_mutex_lock(&loop->lock);
        bool stop = loop->stop;
        bool quiet = !kvf_core_busy(loop->driver.agent->core);
        if (quiet != loop->quiet) {
            loop->quiet = quiet;
            (void)pthread_cond_broadcast(&loop->cond);
        }
        (void)pthread_mutex_unlock(&loop->lock);
        if (stop) {
            break;
        }
        if (!looks_on(loop, busy) && !busy) {
            sleep_once(loop);
        }
    }
    loop_close(loop);
    return NULL;
}

kvf_status_t kvf_loop_create(kvf_agent_t *agent, bool threaded, kvf_loop_t **loop_p,
                             kvf_detail_t *detail) {
    kvf_status_t status;
    pthread_condattr_t attr;
    kvf_loop_t *loop = kvf_calloc(agent->alloc, 1, sizeof(*loop));
    if (loop == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent's loop");
    }
    loop->driver.agent = agent;
    loop->threaded = threaded;
    loop->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->wake_fd < 0) {
        kvf_free(agent->alloc, loop);
        return kvf_fail(detail, KVF_ERR_IO, "no event loop: out of descriptors");
    }
    (void)pthread_mutex_init(&loop->lock, NULL);
    (void)pthread_condattr_init(&attr);
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&loop->cond, &attr);
    (void)pthread_condattr_destroy(&attr);
    if (!threaded) {
        loop->thread = pthread_self();
        status = loop_open(loop, detail);
    } else if (pthread_create(&loop->thread, NULL, thread_main, loop) != 0) {
        status = kvf_fail(detail, KVF_ERR_IO, "no thread for the agent");
    } else {
        (void)pthread_mutex_lock(&loop->lock);
        while (!loop->started) {
            (void)pthread_cond_wait(&loop->cond, &loop->lock);
        }
        status = loop->status;
        (void)pthread_mutex_unlock(&loop->lock);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "%s", loop->detail.text);
            (void)pthread_join(loop->thread, NULL);
        }
    }
    if (status != KVF_OK) {
        (void)pthread_cond_destroy(&loop->cond);
        (void)pthread_mutex_destroy(&loop->lock);
        (void)close(loop->wake_fd);
        kvf_free(agent->alloc, loop);
        return status;
    }
    *loop_p = loop;
    return KVF_OK;
}

void kvf_loop_destroy(kvf_loop_t *loop) {
    if (loop->threaded) {
        (void)pthread_mutex_lock(&loop->lock);
        loop->stop = true;
        (void)pthread_mutex_unlock(&loop->lock);
        wake_up(loop);
        (void)pthread_join(loop->thread, NULL);
    } else {
        sigset_t before;
        block_sigpipe(&before);
        loop_close(loop);
        restore_sigpipe(&before);
    }
    (void)pthread_cond_destroy(&loop->cond);
    (void)pthread_mutex_destroy(&loop->lock);
    (void)close(loop->wake_fd);
    kvf_free(loop->driver.agent->alloc, loop);
}

void kvf_loop_call(kvf_loop_t *loop, void (*fn)(void *arg), void *arg) {
    loop_call_t call = {fn, arg, false, NULL};
    if (!loop->threaded) {
        sigset_t before;
        block_sigpipe(&before);
        kvf_driver_set_time(&loop->driver);
        fn(arg);
        kvf_control_flush(loop->driver.control);
        restore_sigpipe(&before);
        loop->awake = true; /* there may be something to post or to deliver */
        return;
    }
    if (pthread_equal(pthread_self(), loop->thread)) { /* in an event */
        kvf_driver_set_time(&loop->driver);
        fn(arg);
        return;
    }
    (void)pthread_mutex_lock(&loop->lock);
    *(loop->calls_last != NULL ? &loop->calls_last->next : &loop->calls_first) = &call;
    loop->calls_last = &call;
    (void)pthread_mutex_unlock(&loop->lock);
    wake_up(loop);
    (void)pthread_mutex_lock(&loop->lock);
    while (!call.done) {
        (void)pthread_cond_wait(&loop->cond, &loop->lock);
    }
    (void)pthread_mutex_unlock(&loop->lock);
}

bool kvf_loop_wait_quiet(kvf_loop_t *loop, uint64_t timeout_us) {
    const kvf_clock_t *clock = kvf_clock_default();
    uint64_t end = kvf_time_after(clock->now_us(clock->ctx), timeout_us);
    bool quiet;
    if (!loop->threaded) {
        while (kvf_core_busy(loop->driver.agent->core) && clock->now_us(clock->ctx) < end) {
            if (!kvf_loop_turn(loop)) {
                (void)usleep(200);
            }
        }
        return !kvf_core_busy(loop->driver.agent->core);
    }
    struct timespec until = {.tv_sec = (time_t)(end / 1000000),
                             .tv_nsec = (long)(end % 1000000) * 1000};
    (void)pthread_mutex_lock(&loop->lock);
    while (!loop->quiet && pthread_cond_timedwait(&loop->cond, &loop->lock, &until) == 0) {
    }
    quiet = loop->quiet;
    (void)pthread_mutex_unlock(&loop->lock);
    return quiet;
}

typedef struct lent_call {
    const kvf_agent_t *agent;
    uint32_t n;
} lent_call_t;

static void call_lent(void *arg) {
    lent_call_t *call = arg;
    call->n = kvf_core_lent(call->agent->core);
}

bool kvf_loop_wait_returned(kvf_loop_t *loop, uint64_t timeout_us) {
    const kvf_clock_t *clock = kvf_clock_default();
    const uint64_t end = kvf_time_after(clock->now_us(clock->ctx), timeout_us);
    lent_call_t call = {loop->driver.agent, 1};
    for (;;) {
        kvf_loop_call(loop, call_lent, &call);
        if (call.n == 0 || clock->now_us(clock->ctx) >= end) {
            return call.n == 0;
        }
        if (loop->threaded || !kvf_loop_turn(loop)) {
            (void)usleep(500);
        }
    }
}
