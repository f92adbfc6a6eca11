/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges that are written when an event of the caller's is reached. */
#include "kvmgr/base/clock.h"
#include "transceiver/agent_copy.h"

/* An event that will never be reached wakes nobody: it is looked after so often. */
#define LOOK_US 50000

/* In the order of the calls, which is that of each send. */
struct kvf_wait {
    kvf_fence_t *fence;
    uint64_t send_id;
    size_t mark;
    struct kvf_wait *next;
};

kvf_status_t kvf_copier_promise(kvf_copier_t *copier, kvf_fence_t *fence, uint64_t send_id,
                                const kvf_range_t *range, kvf_detail_t *detail) {
    kvf_wait_t *wait = kvf_calloc(copier->agent->alloc, 1, sizeof(*wait));
    if (wait == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a fence");
    }
    kvf_status_t status =
        kvf_core_send_promise(copier->agent->core, send_id, range, &wait->mark, detail);
    if (status != KVF_OK) {
        kvf_free(copier->agent->alloc, wait);
        return status;
    }
    wait->fence = fence;
    wait->send_id = send_id;
    *(copier->waits_last != NULL ? &copier->waits_last->next : &copier->waits) = wait;
    copier->waits_last = wait;
    return KVF_OK;
}

/* Whether an earlier fence of the same send is still to come. */
static bool is_behind(const kvf_copier_t *copier, const kvf_wait_t *wait) {
    const kvf_wait_t *before = copier->waits;
    while (before != wait && before->send_id != wait->send_id) {
        before = before->next;
    }
    return before != wait;
}

/* Whether it is time to look for fences that nobody is woken for. */
static bool must_look(kvf_copier_t *copier) {
    const kvf_clock_t *clock = kvf_clock_default();
    uint64_t now_us = clock->now_us(clock->ctx);
    bool is_time = now_us >= copier->look_us;
    copier->look_us = is_time ? kvf_time_after(now_us, LOOK_US) : copier->look_us;
    return is_time;
}

unsigned kvf_fences_progress(kvf_copier_t *copier) {
    unsigned n = 0;
    bool look = must_look(copier);
    kvf_wait_t **link = &copier->waits, *last = NULL;
    while (*link != NULL) {
        kvf_wait_t *wait = *link;
        kvf_status_t state = kvf_fence_is_reached(wait->fence) ? KVF_OK
                             : look                            ? kvf_fence_look(wait->fence)
                                                               : KVF_ERR_AGAIN;
        if (state == KVF_ERR_AGAIN || is_behind(copier, wait)) {
            last = wait;
            link = &wait->next;
            continue;
        }
        *link = wait->next;
        kvf_fence_give(wait->fence);
        kvf_core_send_reached(copier->agent->core, wait->send_id, wait->mark, state == KVF_OK);
        kvf_free(copier->agent->alloc, wait);
        n++;
    }
    copier->waits_last = last;
    return n;
}

uint64_t kvf_copier_max_sleep_us(const kvf_copier_t *copier) {
    return copier->waits == NULL ? KVF_NEVER : LOOK_US;
}
