/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/side.h"

#include "tools/bench/scatter.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

uint64_t kvf_bench_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* All pages are ours, whichever of them the blocks lie in. */
static kvf_status_t take_pages(const kvf_bench_options_t *options, int number,
                               kvf_bench_side_t *side, kvf_detail_t *detail) {
    int32_t *pages = calloc((size_t)side->n_pages, sizeof(*pages));
    side->slots = calloc((size_t)(side->n_pages + 1) / 2, sizeof(*side->slots));
    kvf_status_t status = KVF_ERR_NO_MEMORY;
    if (pages != NULL && side->slots != NULL) {
        status = kvf_pool_acquire(side->pool, side->n_pages, pages);
    }
    free(pages);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "pages: %s", kvf_status_text(status));
    }
    kvf_scatter_slots(options->seed, number, side->n_pages, side->n_blocks, side->slots);
    return KVF_OK;
}

kvf_status_t kvf_bench_side_open(const kvf_bench_options_t *options, int number, const uint8_t *key,
                                 kvf_bench_side_t *side_p, kvf_detail_t *detail) {
    static const char *const names[] = {"bench-source", "bench-destination"};
    *side_p = (kvf_bench_side_t){
        .n_pages = (int64_t)(options->pool_bytes / options->block_bytes),
        .n_blocks = (int64_t)options->blocks,
        .caller = options->caller && number == 1,
        .outcome = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER},
    };
    /* NCCL wants a device for each end. */
    const char *memory =
        strcmp(options->mover, "nccl") == 0 && number == 1 ? "cuda:1" : options->memory;
    const kvf_pool_desc_t pool = {
        .memory = memory, .n_pages = side_p->n_pages, .device_alloc = options->device_alloc};
    kvf_agent_config_t config;
    kvf_agent_config_init(&config);
    config.instance = names[number];
    config.control_listen = "127.0.0.1:0";
    config.layout = &side_p->layout;
    config.mover = options->mover;
    config.mover_threads = (uint32_t)options->threads;
    config.busy_poll_us = options->busy_poll_us;
    config.digests = options->digest;
    config.ucx_tls = options->tls;
    memcpy(config.cluster_key, key, KVF_KEY_BYTES);
    kvf_status_t status =
        kvf_bench_layout(options->block_bytes, options->layers, &side_p->layout, detail);
    if (status == KVF_OK) {
        status = kvf_agent_create(&config, &side_p->agent, detail);
    }
    if (status == KVF_OK) {
        status = kvf_pool_create(side_p->agent, &pool, &side_p->pool, detail);
    }
    if (status == KVF_OK && strcmp(options->memory, "cuda") == 0) {
        side_p->copy = malloc(options->block_bytes);
        if (side_p->copy == NULL) {
            status = kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a block");
        }
    }
    if (status == KVF_OK) {
        status = side_p->caller ? kvf_agent_start(side_p->agent, detail)
                                : kvf_agent_start_thread(side_p->agent, detail);
    }
    return status == KVF_OK ? take_pages(options, number, side_p, detail) : status;
}

void kvf_bench_side_close(kvf_bench_side_t *side) {
    /* Busy: the end of the process is as good. */
    (void)kvf_agent_destroy(side->agent);
    free(side->slots);
    free(side->copy);
    side->agent = NULL;
    side->copy = NULL;
    side->slots = NULL;
}

void *kvf_bench_look(const kvf_bench_side_t *side, int32_t slot) {
    const uint64_t bytes = kvf_group_block_bytes(&side->layout.groups[0]);
    kvf_detail_t detail;
    if (slot < 0 || slot >= side->n_pages || side->copy == NULL) {
        return kvf_pool_page(side->pool, slot);
    }
    if (kvf_pool_read(side->pool, slot, 0, side->copy, bytes, &detail) != KVF_OK) {
        (void)fprintf(stderr, "kvferry bench: %s\n", detail.text);
        memset(side->copy, 0, bytes);
    }
    return side->copy;
}

void kvf_bench_put(const kvf_bench_side_t *side, int32_t slot) {
    const uint64_t bytes = kvf_group_block_bytes(&side->layout.groups[0]);
    kvf_detail_t detail;
    if (side->copy != NULL &&
        kvf_pool_write(side->pool, slot, 0, side->copy, bytes, &detail) != KVF_OK) {
        (void)fprintf(stderr, "kvferry bench: %s\n", detail.text);
    }
}

kvf_table_t kvf_bench_table(const kvf_bench_side_t *side) {
    return (kvf_table_t){side->slots, side->n_blocks};
}

void kvf_bench_expect(kvf_bench_side_t *side) {
    (void)pthread_mutex_lock(&side->outcome.lock);
    side->outcome.released = false;
    side->outcome.status = KVF_OK;
    (void)pthread_mutex_unlock(&side->outcome.lock);
}

void kvf_bench_on_event(void *ctx, const kvf_event_t *event) {
    kvf_bench_outcome_t *outcome = ctx;
    uint64_t now_ns = kvf_bench_now_ns();
    (void)pthread_mutex_lock(&outcome->lock);
    if (event->kind == KVF_EVENT_RESULT) {
        outcome->result_ns = now_ns;
        outcome->status = event->status;
        outcome->bytes = event->bytes;
        outcome->pieces = event->pieces;
        (void)snprintf(outcome->mover, sizeof(outcome->mover), "%s", event->mover);
        (void)snprintf(outcome->detail.text, sizeof(outcome->detail.text), "%s", event->message);
    }
    if (event->kind == KVF_EVENT_RELEASED) {
        outcome->released = true;
        (void)pthread_cond_signal(&outcome->cond);
    }
    (void)pthread_mutex_unlock(&outcome->lock);
}

void kvf_bench_drive(kvf_bench_side_t *side) {
    if (side->caller) {
        kvf_agent_progress(side->agent);
        (void)sched_yield(); /* the other end may need this core */
    }
}

kvf_status_t kvf_bench_wait(kvf_bench_side_t *side, kvf_detail_t *detail) {
    kvf_bench_outcome_t *outcome = &side->outcome;
    while (side->caller && !outcome->released) {
        kvf_bench_drive(side);
    }
    (void)pthread_mutex_lock(&outcome->lock);
    while (!outcome->released) {
        (void)pthread_cond_wait(&outcome->cond, &outcome->lock);
    }
    kvf_status_t status = outcome->status;
    if (status != KVF_OK) {
        *detail = outcome->detail;
    }
    (void)pthread_mutex_unlock(&outcome->lock);
    return status;
}

bool kvf_bench_say(int fd, const kvf_bench_message_t *message) {
    return send(fd, message, sizeof(*message), MSG_NOSIGNAL) == (ssize_t)sizeof(*message);
}

bool kvf_bench_hear(int fd, kvf_bench_message_t *message_p) {
    ssize_t n;
    do {
        n = recv(fd, message_p, sizeof(*message_p), 0);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*message_p);
}
