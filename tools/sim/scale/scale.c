/* SPDX-License-Identifier: Apache-2.0 */
/* Time and nodes. */
#include "tools/presets.h"
#include "tools/sim/scale/scale_impl.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ITERATIONS 1000 /* of a turn: a core that always has something to do is wrong */

/* ---- the heap of events ---- */

static bool before(const scale_event_t *x, const scale_event_t *y) {
    return x->at_ns != y->at_ns ? x->at_ns < y->at_ns : x->order < y->order;
}

void scale_push(scale_t *scale, scale_event_t event) {
    event.order = ++scale->next_order;
    if (scale->n_events == scale->room) {
        scale->room = scale->room == 0 ? 1024 : 2 * scale->room;
        scale->heap = realloc(scale->heap, scale->room * sizeof(*scale->heap));
        if (scale->heap == NULL) {
            abort();
        }
    }
    size_t i = scale->n_events++;
    for (; i > 0 && before(&event, &scale->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        scale->heap[i] = scale->heap[(i - 1) / 2];
    }
    scale->heap[i] = event;
}

static scale_event_t pop(scale_t *scale) {
    scale_event_t top = scale->heap[0], last = scale->heap[--scale->n_events];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < scale->n_events) {
        child +=
            child + 1 < scale->n_events && before(&scale->heap[child + 1], &scale->heap[child]);
        if (!before(&scale->heap[child], &last)) {
            break;
        }
        scale->heap[i] = scale->heap[child];
        i = child;
    }
    scale->heap[i] = last;
    return top;
}

/* ---- memory, counted ---- */

typedef struct counted {
    size_t bytes;
    _Alignas(max_align_t) unsigned char data[];
} counted_t;

static void *node_resize(void *ctx, void *ptr, size_t bytes) {
    scale_node_t *node = ctx;
    scale_t *scale = node->scale;
    counted_t *old = ptr == NULL
                         ? NULL
                         : (counted_t *)(void *)((unsigned char *)ptr - offsetof(counted_t, data));
    size_t before_bytes = old == NULL ? 0 : old->bytes;
    counted_t *made = NULL;
    if (bytes == 0) {
        free(old);
    } else {
        made = realloc(old, sizeof(*made) + bytes);
        if (made == NULL) {
            return NULL;
        }
        made->bytes = bytes;
    }
    scale->live_bytes += bytes - before_bytes;
    if (scale->live_bytes > scale->result->peak_bytes) {
        scale->result->peak_bytes = scale->live_bytes;
    }
    return made == NULL ? NULL : made->data;
}

/* ---- nodes ---- */

static void node_fill(void *ctx, void *buf, size_t bytes) {
    scale_t *scale = ((scale_node_t *)ctx)->scale;
    for (size_t i = 0; i < bytes; i++) {
        scale->random =
            scale->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        ((uint8_t *)buf)[i] = (uint8_t)(scale->random >> 56);
    }
}

static void node_log(void *ctx, kvf_log_level_t level, const char *text) {
    (void)fprintf(stderr, "kvferry sim: %s: %s: %s\n", ((scale_node_t *)ctx)->name,
                  kvf_log_level_name(level), text);
}

static kvf_status_t node_start(scale_t *scale, uint32_t idx) {
    const kvf_scale_options_t *options = scale->options;
    scale_node_t *node = &scale->nodes[idx];
    const bool context = idx < options->n_context;
    *node = (scale_node_t){
        .scale = scale, .idx = idx, .alloc = {node_resize, node}, .tick_ns = KVF_NEVER};
    (void)snprintf(node->address, sizeof(node->address), "127.0.0.1:%u", idx + 1);
    (void)snprintf(node->name, sizeof(node->name), "%s-%u", context ? "prefill" : "decode",
                   context ? idx : idx - options->n_context);
    node->log = (kvf_log_t){node_log, node, KVF_LOG_WARN};
    kvf_agent_config_init(&node->config);
    node->config.instance = node->name;
    memset(node->config.cluster_key, 0x5a, sizeof(node->config.cluster_key));
    node->config.layout = &scale->layout;
    node->config.digests = false; /* there are no bytes */
    node->config.max_transfers = UINT32_MAX;
    node->config.heartbeat_us = options->heartbeat_ms * 1000;
    node->config.suspect_us = 4 * node->config.heartbeat_us;
    node->config.lost_us = 8 * node->config.heartbeat_us;
    /* A request that waits for its turn on a loaded cluster is slow, not wrong. */
    node->config.request_timeout_us = node->config.lease_us = UINT64_C(3600000000);
    kvf_core_config_t config = {.agent = &node->config,
                                .alloc = &node->alloc,
                                .rand = {node_fill, node},
                                .log = &node->log,
                                .out = scale_out,
                                .mover_names = {"model"},
                                .n_movers = 1,
                                .movers_checked = false};
    config.out.ctx = node;
    const uint64_t live_bytes = scale->live_bytes;
    kvf_status_t status = KVF_OK;
    for (uint32_t g = 0; g < scale->layout.n_groups && status == KVF_OK; g++) {
        status = kvf_pages_create(&node->alloc, options->pool_pages, &node->pages[g]);
        config.regions[g] = (kvf_core_region_t){node->pages[g], KVF_MEM_FAKE};
    }
    scale->result->page_bytes += scale->live_bytes - live_bytes;
    if (status == KVF_OK) {
        status = kvf_core_create(&config, &node->core);
    }
    if (status == KVF_OK) {
        kvf_core_set_time(node->core, scale->now_ns / 1000);
        status = kvf_core_set_control_address(node->core, node->address);
    }
    if (status == KVF_OK) {
        status = kvf_core_set_mover_address(node->core, 0, &node->idx, sizeof(node->idx));
    }
    return status;
}

static void node_end(scale_t *scale, scale_node_t *node) {
    if (node->core != NULL) {
        scale->result->n_peers += kvf_core_peers(node->core, NULL, 0);
        kvf_core_goodbye(node->core);
        kvf_core_destroy(node->core);
    }
    for (uint32_t g = 0; g < scale->layout.n_groups; g++) {
        kvf_pages_destroy(node->pages[g]);
    }
    free(node->peers);
}

/* ---- turns ---- */

static uint64_t cpu_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void scale_enter(scale_node_t *node) {
    node->scale->result->core_ns -= cpu_ns();
    kvf_core_set_time(node->core, node->scale->now_ns / 1000);
}

void scale_leave(scale_node_t *node) {
    node->scale->result->core_ns += cpu_ns();
}

void scale_turn(scale_node_t *node) {
    bool any = true;
    for (int i = 0; any && i < ITERATIONS; i++) {
        kvf_core_tick(node->core);
        any = kvf_core_pump(node->core);
        while (node->jobs != NULL) {
            kvf_verify_t *job = (kvf_verify_t *)node->jobs;
            node->jobs = job->job.next;
            kvf_core_verified(node->core, job);
            any = true;
        }
        any |= kvf_core_deliver(node->core);
    }
    uint64_t next_us = kvf_core_next_us(node->core);
    if (next_us == KVF_NEVER) {
        return;
    }
    uint64_t at_ns =
        next_us * 1000 > node->scale->now_ns ? next_us * 1000 : node->scale->now_ns + 1000;
    if (at_ns < node->tick_ns) {
        node->tick_ns = at_ns;
        scale_push(node->scale,
                   (scale_event_t){.at_ns = at_ns, .kind = SCALE_TICK, .node = node->idx});
    }
}

static void on_tick(scale_t *scale, const scale_event_t *event) {
    scale_node_t *node = &scale->nodes[event->node];
    if (event->at_ns == node->tick_ns) { /* else an earlier one has come first */
        node->tick_ns = KVF_NEVER;
        scale_enter(node);
        scale_turn(node);
        scale_leave(node);
    }
}

static kvf_status_t run(scale_t *scale, kvf_detail_t *detail) {
    while (scale->n_done < scale->n_requests && scale->n_events > 0) {
        scale_event_t event = pop(scale);
        scale->now_ns = event.at_ns;
        scale->result->events++;
        switch (event.kind) {
        case SCALE_TICK:
            on_tick(scale, &event);
            break;
        case SCALE_MESSAGE:
            net_message(scale, &event);
            break;
        case SCALE_MOVED:
            net_moved(scale, &event);
            break;
        case SCALE_LOAD:
            load_event(scale, &event);
            break;
        }
    }
    if (scale->n_done < scale->n_requests) {
        return kvf_fail(detail, KVF_ERR_INTERNAL, "%zu requests never end",
                        scale->n_requests - scale->n_done);
    }
    return KVF_OK;
}

/* What is still under way belongs to cores that end. */
static void drop_events(scale_t *scale) {
    for (size_t i = 0; i < scale->n_events; i++) {
        const scale_event_t *event = &scale->heap[i];
        if (event->kind == SCALE_MESSAGE) {
            scale_message_t *message = event->ptr;
            kvf_free(&scale->nodes[message->from].alloc, message->data);
            free(message);
        }
    }
    scale->n_events = 0;
}

/* The records of pages are touched at once; to be killed for them would be no answer. */
static kvf_status_t check_memory(const scale_t *scale, kvf_detail_t *detail) {
    enum { RECORD_BYTES = 32 };
    double need = (double)scale->n_nodes * scale->layout.n_groups * RECORD_BYTES *
                  (double)scale->options->pool_pages;
    double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return need <= have * 0.9
               ? KVF_OK
               : kvf_fail(detail, KVF_ERR_TOO_LARGE,
                          "the records of all pages need %.1f GB, and this machine has %.1f GB; "
                          "give fewer --pool-pages, or nodes",
                          need / 1e9, have / 1e9);
}

kvf_status_t kvf_scale_run(const kvf_scale_options_t *options, const kvf_trace_t *trace,
                           kvf_scale_result_t *result_p, kvf_detail_t *detail) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    *result_p = (kvf_scale_result_t){.added_us = {.alloc = alloc},
                                     .transfer_us = {.alloc = alloc},
                                     .ideal_us = {.alloc = alloc},
                                     .prefill_us = {.alloc = alloc}};
    scale_t scale = {.options = options,
                     .result = result_p,
                     .now_ns = UINT64_C(1000000000),
                     .n_nodes = options->n_context + options->n_generation,
                     .random = 1};
    kvf_status_t status =
        kvf_preset_get(options->model, options->tokens_per_block, &scale.layout, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = check_memory(&scale, detail);
    if (status != KVF_OK) {
        return status;
    }
    scale.nodes = calloc(scale.n_nodes, sizeof(*scale.nodes));
    for (uint32_t i = 0; i < scale.n_nodes && status == KVF_OK; i++) {
        status = scale.nodes == NULL ? KVF_ERR_NO_MEMORY : node_start(&scale, i);
    }
    if (status != KVF_OK) {
        (void)kvf_fail(detail, status, "no memory for %u nodes", scale.n_nodes);
    } else {
        status = load_begin(&scale, trace, detail);
    }
    const uint64_t began_ns = scale.now_ns;
    if (status == KVF_OK) {
        status = run(&scale, detail);
    }
    result_p->virtual_us = (scale.now_ns - began_ns) / 1000;
    drop_events(&scale);
    result_p->idle_bytes = scale.live_bytes - result_p->page_bytes;
    for (uint32_t i = 0; i < scale.n_nodes && scale.nodes != NULL; i++) {
        node_end(&scale, &scale.nodes[i]);
    }
    drop_events(&scale); /* their goodbyes */
    result_p->peak_bytes -= result_p->page_bytes;
    load_end(&scale);
    free(scale.nodes);
    free(scale.heap);
    free(scale.ends);
    return status;
}

void kvf_scale_cleanup(kvf_scale_result_t *result) {
    kvf_samples_cleanup(&result->added_us);
    kvf_samples_cleanup(&result->transfer_us);
    kvf_samples_cleanup(&result->ideal_us);
    kvf_samples_cleanup(&result->prefill_us);
}
