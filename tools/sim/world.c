/* SPDX-License-Identifier: Apache-2.0 */
/* Time, and what happens next. */
#include "tools/sim/world_impl.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A run that takes more events than this does not come to rest. */
#define MAX_EVENTS 400000
/* After the faults everything ends within this: the longest of a request's time, a lease, the time
 * that a receiver is waited for, and quarantine, with what a resumed process has to catch up. */
#define REST_US UINT64_C(30000000)

/* ---- the heap of events ---- */

static bool before(const event_t *x, const event_t *y) {
    return x->at_us != y->at_us ? x->at_us < y->at_us : x->order < y->order;
}

void world_push(kvf_world_t *world, event_t event) {
    event.order = ++world->next_order;
    if (world->n_events == world->room) {
        size_t room = world->room == 0 ? 1024 : 2 * world->room;
        event_t *heap = realloc(world->heap, room * sizeof(*heap));
        if (heap == NULL) {
            (void)fprintf(stderr, "kvferry sim: no memory\n");
            exit(1);
        }
        world->heap = heap;
        world->room = room;
    }
    size_t i = world->n_events++;
    for (; i > 0 && before(&event, &world->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        world->heap[i] = world->heap[(i - 1) / 2];
    }
    world->heap[i] = event;
}

static event_t pop(kvf_world_t *world) {
    event_t top = world->heap[0], last = world->heap[--world->n_events];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < world->n_events) {
        child +=
            child + 1 < world->n_events && before(&world->heap[child + 1], &world->heap[child]);
        if (!before(&world->heap[child], &last)) {
            break;
        }
        world->heap[i] = world->heap[child];
        i = child;
    }
    world->heap[i] = last;
    return top;
}

/* ---- words ---- */

bool world_failed(const kvf_world_t *world) {
    return world->outcome->violation[0] != '\0';
}

void world_fail(kvf_world_t *world, const char *fmt, ...) {
    va_list args;
    if (world_failed(world)) {
        return;
    }
    va_start(args, fmt);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): clang 14 misses the line above */
    (void)vsnprintf(world->outcome->violation, sizeof(world->outcome->violation), fmt, args);
    va_end(args);
    world_note(world, "VIOLATION: %s", world->outcome->violation);
}

void world_note(kvf_world_t *world, const char *fmt, ...) {
    va_list args;
    if (world->trace == NULL) {
        return;
    }
    (void)fprintf(world->trace, "%4" PRIu64 ".%06" PRIu64 " ", world->now_us / 1000000,
                  world->now_us % 1000000);
    va_start(args, fmt);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): clang 14 misses the line above */
    (void)vfprintf(world->trace, fmt, args);
    va_end(args);
    (void)fputc('\n', world->trace);
}

void world_hash(kvf_world_t *world, uint64_t x) {
    world->outcome->hash = kvf_dice_mix((world->outcome->hash ^ x) + UINT64_C(0x9e3779b97f4a7c15));
}

/* ---- what happens ---- */

void world_do(kvf_world_t *world, const event_t *event) {
    node_t *node = &world->nodes[event->node];
    switch ((event_kind_t)event->kind) {
    case EVENT_WIRE:
        wire_event(node, event);
        break;
    case EVENT_LEAVE:
    case EVENT_LAND:
    case EVENT_MOVED:
    case EVENT_BROKEN:
    case EVENT_VERIFIED:
    case EVENT_STORE:
    case EVENT_FETCH:
        carry_event(world, event);
        break;
    case EVENT_LEND:
    case EVENT_MAPPED:
    case EVENT_MAP_LATE:
    case EVENT_RETURNED:
    case EVENT_COPY:
    case EVENT_DIGESTED:
        lend_event(node, event);
        break;
    case EVENT_PIPE:
        fetch_event(node, event);
        break;
    case EVENT_PIPE_JOB:
        fetch_job_event(node, event);
        break;
    case EVENT_WAKE:
        node->wake_us = KVF_NEVER;
        break;
    case EVENT_ENGINE:
        engine_event(node, event);
        break;
    case EVENT_ARRIVE:
        wire_arrive(world, event);
        break;
    case EVENT_ITEM: {
        const kvf_script_item_t *item = &world->script->items[event->a];
        if (item->fault == KVF_SCRIPT_REQUEST) {
            engine_request(world, item->seed);
        } else {
            world->outcome->faults[item->fault]++;
            fault_begin(world, (kvf_fault_t)item->fault, item->seed);
        }
        break;
    }
    case EVENT_RESUME:
        node_resume(node);
        break;
    case EVENT_RESTART:
        if (node->core == NULL) {
            node_start(node);
        }
        break;
    case EVENT_QUIESCE:
        faults_end(world);
        break;
    case EVENT_PROBE:
        world->settled = true;
        break;
    }
}

/* Hold an event back for a process that stands still, lose it with one that has gone, or do it. */
static void dispatch(kvf_world_t *world, const event_t *event) {
    node_t *node = &world->nodes[event->node];
    bool of_process = event->kind < EVENT_OF_PROCESS;
    bool travels = event->from != event->node;
    if (travels && world->parted_us[event->from][event->node] > world->now_us) {
        event_t later = *event;
        later.at_us = world->parted_us[event->from][event->node];
        world_push(world, later);
        return;
    }
    if (of_process &&
        (node->core == NULL || (event->life != WORLD_ANY_LIFE && event->life != node->life))) {
        world->n_acts -= event->kind == EVENT_ENGINE;
        return;
    }
    if (of_process && node->paused) {
        if (node->n_held == node->held_room) {
            size_t room = 2 * node->held_room + 64;
            event_t *held = arena_take(&world->arena, room * sizeof(*held));
            if (node->n_held > 0) {
                memcpy(held, node->held, node->n_held * sizeof(*held));
            }
            node->held = held;
            node->held_room = room;
        }
        node->held[node->n_held++] = *event;
        return;
    }
    world_hash(world, world->now_us << 16 | (uint64_t)event->kind << 8 | event->node);
    world->outcome->events++;
    world_do(world, event);
    if (of_process && node->core != NULL && !node->paused) {
        node_turn(node);
    }
}

static void run_until_rest(kvf_world_t *world) {
    uint64_t end_us = world->end_us + REST_US;
    while (!world_failed(world)) {
        if (world->settled && engine_done(world)) {
            if (world->probed) {
                break;
            }
            engine_probe(world);
        }
        if (world->n_events == 0 || world->heap[0].at_us > end_us ||
            world->outcome->events > MAX_EVENTS) {
            engine_check_end(world); /* names who waits */
            world_fail(world, "the run does not come to rest");
            break;
        }
        event_t event = pop(world);
        world->now_us = event.at_us;
        dispatch(world, &event);
    }
    /* Every node ends in order, and says what it forgot. */
    for (uint32_t i = 0; i < world->n_nodes && !world_failed(world); i++) {
        node_end(&world->nodes[i]);
    }
    if (!world_failed(world)) {
        engine_check_end(world);
    }
}

void kvf_world_run(kvf_world_t *world, const kvf_script_t *script, FILE *trace,
                   kvf_outcome_t *outcome_p) {
    arena_t arena = world->arena;
    event_t *heap = world->heap;
    size_t room = world->room;
    arena_reset(&arena);
    memset(world, 0, sizeof(*world));
    world->arena = arena;
    world->heap = heap;
    world->room = room;
    world->script = script;
    world->outcome = outcome_p;
    world->trace = trace;
    world->dice.state = script->seed;
    memset(outcome_p, 0, sizeof(*outcome_p));
    nodes_start(world);
    world->end_us = world->now_us + script->end_us;
    for (size_t i = 0; i < script->n_items; i++) {
        if (!script->items[i].left_out) {
            world_push(world, (event_t){.at_us = world->now_us + script->items[i].at_us,
                                        .kind = EVENT_ITEM,
                                        .a = i});
        }
    }
    world_push(world, (event_t){.at_us = world->end_us, .kind = EVENT_QUIESCE});
    run_until_rest(world);
    outcome_p->virtual_us = world->now_us;
    nodes_wipe(world);
}

kvf_world_t *kvf_world_create(void) {
    return calloc(1, sizeof(kvf_world_t));
}

void kvf_world_destroy(kvf_world_t *world) {
    if (world != NULL) {
        arena_cleanup(&world->arena);
        free(world->heap);
        free(world);
    }
}

void kvf_outcome_add(kvf_outcome_t *sum, const kvf_outcome_t *run) {
    sum->hash = kvf_dice_mix(sum->hash ^ run->hash) + 1;
    sum->events += run->events;
    sum->virtual_us += run->virtual_us;
    sum->sends += run->sends;
    sum->receives += run->receives;
    sum->bytes_checked += run->bytes_checked;
    sum->copied_bytes += run->copied_bytes;
    sum->fetched_bytes += run->fetched_bytes;
    sum->audits += run->audits;
    sum->poisoned += run->poisoned;
    for (size_t i = 0; i < KVF_WORLD_STATUSES; i++) {
        sum->results[i] += run->results[i];
    }
    for (size_t i = 0; i < KVF_FAULTS; i++) {
        sum->faults[i] += run->faults[i];
    }
}
