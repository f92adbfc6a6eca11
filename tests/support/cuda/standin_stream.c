/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's streams: what is queued happens later, on one thread, in the order of its stream
 * and in any order between streams. */
#define _GNU_SOURCE /* nanosleep with strict C */
#include "tests/support/cuda/standin_impl.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct CUevent_st {
    uint64_t recorded, happened;
    uint32_t n_refs; /* operations, and the application */
};

typedef enum kind { OP_KERNEL, OP_COPY, OP_ZERO, OP_RECORD, OP_WAIT, OP_CALL, OP_STEPS } kind_t;

typedef struct op {
    kind_t kind;
    bool (*run)(void *args);
    void *args;
    uint64_t to, from, bytes;
    uint8_t *kept; /* what a copy from pageable memory read when it was queued */
    cudaEvent_t event;
    uint64_t at; /* of the event */
    cudaHostFn_t call;
    void *arg;
    struct op *next;
} op_t;

struct CUstream_st {
    op_t *first, *last;
    bool held;
    bool blocked; /* its first operation is in the middle of something */
    struct CUstream_st *next;
};

static struct CUstream_st *streams;
static bool started;
static uint64_t dice = 0x9e3779b97f4a7c15;

uint64_t standin_roll(void) { /* xorshift64 */
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return dice;
}

static void unref(cudaEvent_t event) {
    if (event != NULL && --event->n_refs == 0) {
        free(event);
    }
}

/* ---- the device ---- */

/* With the lock held; it is not while a function of the application's runs. @return false: there is
 * more of it to do. */
static bool execute(op_t *op) {
    uint8_t *to = NULL;
    const uint8_t *from = NULL;
    if (op->kind == OP_STEPS && !op->run(op->args)) {
        return false;
    }
    standin.counts.executed++;
    if (standin.dead != cudaSuccess) {
        return true;
    }
    if (standin_hits("execute")) {
        standin.dead = cudaErrorIllegalAddress;
        return true;
    }
    switch (op->kind) {
    case OP_KERNEL:
        if (!op->run(op->args)) {
            standin.dead = cudaErrorIllegalAddress;
        }
        break;
    case OP_COPY: /* memory that is pageable was looked at when it was queued */
        to = standin_is_known(op->to) ? standin_reach_to(op->to, op->bytes) : (uint8_t *)op->to;
        from = op->kept != NULL             ? op->kept
               : standin_is_known(op->from) ? standin_reach(op->from, op->bytes)
                                            : (const uint8_t *)op->from;
        if (to != NULL && from != NULL) {
            memcpy(to, from, op->bytes);
        } else {
            standin.dead = cudaErrorIllegalAddress;
        }
        break;
    case OP_ZERO:
        to = standin_reach_to(op->to, op->bytes);
        if (to != NULL) {
            memset(to, 0, op->bytes);
        } else {
            standin.dead = cudaErrorIllegalAddress;
        }
        break;
    case OP_RECORD:
        op->event->happened = op->at;
        break;
    case OP_STEPS:
    case OP_WAIT:
        break;
    case OP_CALL:
        (void)pthread_mutex_unlock(&standin.lock);
        op->call(op->arg);
        (void)pthread_mutex_lock(&standin.lock);
        break;
    }
    return true;
}

/* Whether a stream's first operation can happen. */
static bool is_ready(const struct CUstream_st *stream) {
    const op_t *op = stream->first;
    return op != NULL && !stream->held && !stream->blocked &&
           (op->kind != OP_WAIT || op->event->happened >= op->at || standin.dead != cudaSuccess);
}

/* Any of those that can go on. */
static struct CUstream_st *next_stream(void) {
    uint64_t n = 0;
    struct CUstream_st *chosen = NULL;
    for (struct CUstream_st *stream = streams; stream != NULL; stream = stream->next) {
        if (is_ready(stream) && standin_roll() % ++n == 0) {
            chosen = stream;
        }
    }
    return chosen;
}

static void pause_some(void) {
    const char *text = getenv("KVF_STANDIN_CUDA_DELAY_US");
    uint64_t most = text == NULL ? 20 : strtoull(text, NULL, 10);
    uint64_t us = most == 0 ? 0 : standin_roll() % (most + 1);
    if (us > 0) {
        const struct timespec time = {0, (long)us * 1000};
        (void)pthread_mutex_unlock(&standin.lock);
        (void)nanosleep(&time, NULL);
        (void)pthread_mutex_lock(&standin.lock);
    }
}

/* Until something is queued, or for a moment if something is in the middle. */
static void wait_for_work(void) {
    bool blocked = false;
    for (struct CUstream_st *stream = streams; stream != NULL; stream = stream->next) {
        blocked |= stream->blocked;
        stream->blocked = false;
    }
    if (!blocked) {
        (void)pthread_cond_wait(&standin.cond, &standin.lock);
        return;
    }
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    (void)pthread_cond_timedwait(&standin.cond, &standin.lock, &until);
}

static void *device_main(void *arg) {
    (void)pthread_mutex_lock(&standin.lock);
    for (;;) {
        struct CUstream_st *stream = standin.held ? NULL : next_stream();
        if (stream == NULL) {
            wait_for_work();
            continue;
        }
        pause_some();
        op_t *op = stream->first;
        stream->blocked = !execute(op);
        if (stream->blocked) {
            continue;
        }
        stream->first = op->next;
        stream->last = stream->first == NULL ? NULL : stream->last;
        unref(op->event);
        free(op->args);
        free(op->kept);
        free(op);
        (void)pthread_cond_broadcast(&standin.cond);
    }
    return arg;
}

void standin_cuda_hold(bool hold) {
    (void)pthread_mutex_lock(&standin.lock);
    standin.held = hold;
    (void)pthread_cond_broadcast(&standin.cond);
    (void)pthread_mutex_unlock(&standin.lock);
}

void standin_cuda_hold_stream(void *stream, bool hold) {
    (void)pthread_mutex_lock(&standin.lock);
    ((struct CUstream_st *)stream)->held = hold;
    (void)pthread_cond_broadcast(&standin.cond);
    (void)pthread_mutex_unlock(&standin.lock);
}

/* ---- streams ---- */

/* A thread's own, for cudaStreamPerThread. */
static struct CUstream_st *resolve(cudaStream_t stream) {
    static _Thread_local struct CUstream_st *own;
    if (stream != NULL && stream != cudaStreamPerThread && stream != cudaStreamLegacy) {
        return stream;
    }
    if (own == NULL) {
        own = calloc(1, sizeof(*own));
        if (own == NULL) {
            abort();
        }
        own->next = streams; /* with the lock held; the process keeps it */
        streams = own;
    }
    return own;
}

/* With the lock held. */
static void queue(cudaStream_t to, op_t op) {
    struct CUstream_st *stream = resolve(to);
    op_t *copy = malloc(sizeof(*copy));
    pthread_t thread;
    if (copy == NULL) {
        abort();
    }
    *copy = op;
    if (stream->last != NULL) {
        stream->last->next = copy;
    } else {
        stream->first = copy;
    }
    stream->last = copy;
    if (!started) {
        started = true;
        if (pthread_create(&thread, NULL, device_main, NULL) != 0) {
            abort();
        }
        (void)pthread_detach(thread);
    }
    (void)pthread_cond_broadcast(&standin.cond);
}

void standin_queue(cudaStream_t stream, bool (*step)(void *args), void *args) {
    queue(stream, (op_t){.kind = OP_STEPS, .run = step, .args = args});
}

static void wait_for(const struct CUstream_st *stream) {
    while (stream->first != NULL) {
        (void)pthread_cond_wait(&standin.cond, &standin.lock);
    }
}

void standin_drain(void) {
    (void)pthread_mutex_lock(&standin.lock);
    for (struct CUstream_st *stream = streams; stream != NULL; stream = stream->next) {
        wait_for(stream);
    }
    (void)pthread_mutex_unlock(&standin.lock);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream_p, unsigned flags) {
    (void)flags;
    cudaError_t error = standin_enter("cudaStreamCreateWithFlags", cudaErrorUnknown);
    if (error == cudaSuccess) {
        struct CUstream_st *stream = calloc(1, sizeof(*stream));
        (void)pthread_mutex_lock(&standin.lock);
        stream->next = streams;
        streams = stream;
        standin.counts.streams++;
        (void)pthread_mutex_unlock(&standin.lock);
        *stream_p = stream;
    }
    return error;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaStreamDestroy", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    wait_for(stream);
    struct CUstream_st **link = &streams;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    standin.counts.streams--;
    (void)pthread_mutex_unlock(&standin.lock);
    free(stream);
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaStreamSynchronize", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    wait_for(resolve(stream));
    error = standin.dead != cudaSuccess ? standin.dead : error;
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaStreamQuery", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    if (error == cudaSuccess && resolve(stream)->first != NULL) {
        error = cudaErrorNotReady;
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    cudaError_t error = standin_enter("cudaStreamWaitEvent", cudaErrorUnknown);
    if (error == cudaSuccess) {
        (void)pthread_mutex_lock(&standin.lock);
        event->n_refs++;
        queue(stream, (op_t){.kind = OP_WAIT, .event = event, .at = event->recorded});
        (void)pthread_mutex_unlock(&standin.lock);
    }
    return error;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg) {
    cudaError_t error = standin_enter("cudaLaunchHostFunc", cudaErrorUnknown);
    if (error == cudaSuccess) {
        (void)pthread_mutex_lock(&standin.lock);
        queue(stream, (op_t){.kind = OP_CALL, .call = fn, .arg = arg});
        (void)pthread_mutex_unlock(&standin.lock);
    }
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaMemcpyAsync", cudaErrorUnknown);
    if (kind != cudaMemcpyDefault) {
        abort();
    }
    if (error != cudaSuccess) {
        return error;
    }
    (void)pthread_mutex_lock(&standin.lock);
    op_t op = {.kind = OP_COPY, .to = (uintptr_t)to, .from = (uintptr_t)from, .bytes = bytes};
    if (!standin_is_known(op.from)) {
        op.kept = malloc(bytes);
        if (op.kept == NULL) {
            abort();
        }
        memcpy(op.kept, from, bytes);
    }
    queue(stream, op);
    if (!standin_is_known(op.to)) {
        wait_for(resolve(stream));
        error = standin.dead;
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                 size_t n, struct cudaMemcpyAttributes *attributes, size_t *first,
                                 size_t n_attributes, cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaMemcpyBatchAsync", cudaErrorUnknown);
    if (n == 0 || n_attributes != 1 || first[0] != 0 ||
        attributes[0].srcAccessOrder != cudaMemcpySrcAccessOrderStream || stream == NULL) {
        abort();
    }
    (void)pthread_mutex_lock(&standin.lock);
    for (size_t i = 0; i < n && error == cudaSuccess; i++) {
        queue(stream, (op_t){.kind = OP_COPY,
                             .to = (uintptr_t)to[i],
                             .from = (uintptr_t)from[i],
                             .bytes = bytes[i]});
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaMemsetAsync", cudaErrorUnknown);
    if (value != 0) {
        abort();
    }
    if (error == cudaSuccess) {
        (void)pthread_mutex_lock(&standin.lock);
        queue(stream, (op_t){.kind = OP_ZERO, .to = (uintptr_t)to, .bytes = bytes});
        (void)pthread_mutex_unlock(&standin.lock);
    }
    return error;
}

cudaError_t standin_launch(const char *function, cudaStream_t stream, bool (*run)(void *args),
                           const void *args, size_t bytes) {
    cudaError_t error = standin_enter(function, cudaErrorLaunchFailure);
    if (error != cudaSuccess) {
        return error;
    }
    op_t op = {.kind = OP_KERNEL, .run = run, .args = malloc(bytes)};
    if (op.args == NULL) {
        abort();
    }
    memcpy(op.args, args, bytes); /* parameters are read at the launch */
    (void)pthread_mutex_lock(&standin.lock);
    standin.counts.launches++;
    queue(stream, op);
    (void)pthread_mutex_unlock(&standin.lock);
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event_p, unsigned flags) {
    (void)flags;
    cudaError_t error = standin_enter("cudaEventCreateWithFlags", cudaErrorUnknown);
    if (error == cudaSuccess) {
        cudaEvent_t event = calloc(1, sizeof(*event));
        if (event == NULL) {
            abort();
        }
        event->n_refs = 1;
        (void)pthread_mutex_lock(&standin.lock);
        standin.counts.events++;
        (void)pthread_mutex_unlock(&standin.lock);
        *event_p = event;
    }
    return error;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t error = standin_enter("cudaEventDestroy", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    standin.counts.events--;
    unref(event);
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cudaError_t error = standin_enter("cudaEventRecord", cudaErrorUnknown);
    if (error == cudaSuccess) {
        (void)pthread_mutex_lock(&standin.lock);
        event->n_refs++;
        queue(stream, (op_t){.kind = OP_RECORD, .event = event, .at = ++event->recorded});
        (void)pthread_mutex_unlock(&standin.lock);
    }
    return error;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    cudaError_t error = standin_enter("cudaEventQuery", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    if (error == cudaSuccess && event->happened != event->recorded) {
        error = cudaErrorNotReady;
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t error = standin_enter("cudaEventSynchronize", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    while (event->happened != event->recorded && standin.dead == cudaSuccess) {
        (void)pthread_cond_wait(&standin.cond, &standin.lock);
    }
    error = standin.dead != cudaSuccess ? standin.dead : error;
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}
