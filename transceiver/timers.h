/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TIMERS_H
#define KVF_TIMERS_H

/**
 * @file
 * A heap of deadlines. Timers are members of what they belong to; room for each is reserved before
 * it is needed, so that arming cannot fail. One thread, no clock: the caller says what time it is.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/clock.h"

typedef struct kvf_timer {
    uint64_t at_us; /**< when it fires; only the heap writes it */
    size_t place;   /**< 1 + its index in the heap, 0 when it is not armed */
    void (*fire)(struct kvf_timer *timer, void *owner);
    void *owner;
} kvf_timer_t;

typedef struct kvf_timers {
    const kvf_alloc_t *alloc;
    kvf_timer_t **heap;
    size_t n;        /**< armed */
    size_t room;     /**< entries of heap */
    size_t reserved; /**< timers that may be armed at once */
} kvf_timers_t;

void kvf_timers_init(kvf_timers_t *timers, const kvf_alloc_t *alloc);

/** All timers must be unarmed or forgotten. */
void kvf_timers_cleanup(kvf_timers_t *timers);

/**
 * Make room for one more timer and fill it in, unarmed.
 *
 * @param[out] timer  Becomes {fire, owner}; give the room back with kvf_timer_release().
 * @return KVF_OK, or KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_timer_reserve(kvf_timers_t *timers, kvf_timer_t *timer,
                                         void (*fire)(kvf_timer_t *timer, void *owner),
                                         void *owner);

/** Disarm a reserved timer and give its room back. A zeroed timer is allowed. */
void kvf_timer_release(kvf_timers_t *timers, kvf_timer_t *timer);

/** Set a reserved timer, armed or not, to fire at at_us; KVF_NEVER disarms it. @cost O(log n), no
 * allocation */
void kvf_timer_set(kvf_timers_t *timers, kvf_timer_t *timer, uint64_t at_us);

/** @return Whether it is armed. */
static inline bool kvf_timer_is_set(const kvf_timer_t *timer) {
    return timer->place != 0;
}

/** @return When the next timer fires, or KVF_NEVER. */
uint64_t kvf_timers_next(const kvf_timers_t *timers);

/** Fire what is due at now_us, each timer disarmed before its call; at most as many as were armed
 * at the start, so that one that keeps re-arming itself cannot hold the loop. */
void kvf_timers_run(kvf_timers_t *timers, uint64_t now_us);

#endif
