/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/timers.h"
#include "kvmgr/base/mutant.h"

void kvf_timers_init(kvf_timers_t *timers, const kvf_alloc_t *alloc) {
    *timers = (kvf_timers_t){.alloc = alloc};
}

void kvf_timers_cleanup(kvf_timers_t *timers) {
    kvf_free(timers->alloc, timers->heap);
    *timers = (kvf_timers_t){.alloc = timers->alloc};
}

kvf_status_t kvf_timer_reserve(kvf_timers_t *timers, kvf_timer_t *timer,
                               void (*fire)(kvf_timer_t *timer, void *owner), void *owner) {
    if (timers->reserved == timers->room) {
        size_t room = timers->room == 0 ? 16 : 2 * timers->room;
        kvf_timer_t **heap = kvf_realloc(timers->alloc, timers->heap, room, sizeof(*heap));
        if (heap == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        timers->heap = heap;
        timers->room = room;
    }
    timers->reserved++;
    *timer = (kvf_timer_t){.at_us = KVF_NEVER, .fire = fire, .owner = owner};
    return KVF_OK;
}

static void put(kvf_timers_t *timers, size_t index, kvf_timer_t *timer) {
    timers->heap[index] = timer;
    timer->place = index + 1;
}

static void sift_up(kvf_timers_t *timers, size_t index) {
    kvf_timer_t *timer = timers->heap[index];
    while (index > 0 && timers->heap[(index - 1) / 2]->at_us > timer->at_us) {
        put(timers, index, timers->heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    put(timers, index, timer);
}

static void sift_down(kvf_timers_t *timers, size_t index) {
    kvf_timer_t *timer = timers->heap[index];
    for (;;) {
        size_t child = 2 * index + 1;
        if (child + 1 < timers->n && timers->heap[child + 1]->at_us < timers->heap[child]->at_us) {
            child++;
        }
        if (child >= timers->n || timers->heap[child]->at_us >= timer->at_us) {
            break;
        }
        put(timers, index, timers->heap[child]);
        index = child;
    }
    put(timers, index, timer);
}

static void take_out(kvf_timers_t *timers, kvf_timer_t *timer) {
    size_t index = timer->place - 1;
    kvf_timer_t *last = timers->heap[--timers->n];
    timer->place = 0;
    if (last != timer) {
        put(timers, index, last);
        sift_up(timers, index);
        if (!KVF_MUTANT(lazy_heap)) {
            sift_down(timers, last->place - 1);
        }
    }
}

void kvf_timer_release(kvf_timers_t *timers, kvf_timer_t *timer) {
    if (timer->fire == NULL) {
        return;
    }
    if (timer->place != 0) {
        take_out(timers, timer);
    }
    timers->reserved--;
    *timer = (kvf_timer_t){0};
}

void kvf_timer_set(kvf_timers_t *timers, kvf_timer_t *timer, uint64_t at_us) {
    if (timer->place != 0) {
        take_out(timers, timer);
    }
    timer->at_us = at_us;
    if (at_us != KVF_NEVER) {
        put(timers, timers->n++, timer);
        sift_up(timers, timers->n - 1);
    }
}

uint64_t kvf_timers_next(const kvf_timers_t *timers) {
    return timers->n == 0 ? KVF_NEVER : timers->heap[0]->at_us;
}

void kvf_timers_run(kvf_timers_t *timers, uint64_t now_us) {
    /* What is armed during the run fires at the next one: a timer that keeps re-arming itself
     * cannot hold the loop. */
    size_t due = timers->n;
    while (due-- > 0 && timers->n > 0 && timers->heap[0]->at_us <= now_us) {
        kvf_timer_t *timer = timers->heap[0];
        take_out(timers, timer);
        timer->at_us = KVF_NEVER;
        timer->fire(timer, timer->owner);
    }
}
