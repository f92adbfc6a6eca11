/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_CLOCK_H
#define KVF_BASE_CLOCK_H

/**
 * @file
 * Time and randomness as tables. State machines get `now_us` as an argument; only drivers own a
 * clock.
 */

#include <stddef.h>
#include <stdint.h>

/** No deadline. */
#define KVF_NEVER UINT64_MAX

typedef struct kvf_clock {
    /** @return Microseconds of a clock that never runs backward; its zero means nothing. */
    uint64_t (*now_us)(void *ctx);
    void *ctx;
} kvf_clock_t;

typedef struct kvf_rand {
    /** Fill buf with bytes that a stranger cannot guess (or, in a test, that a seed gives). */
    void (*fill)(void *ctx, void *buf, size_t bytes);
    void *ctx;
} kvf_rand_t;

/** CLOCK_MONOTONIC. Static storage; any thread. */
const kvf_clock_t *kvf_clock_default(void);

/** getrandom(2); ends the process when the system has none. Static storage; any thread. */
const kvf_rand_t *kvf_rand_default(void);

/** @return now_us + delay_us, KVF_NEVER on overflow or when delay_us is KVF_NEVER. @thread any */
static inline uint64_t kvf_time_after(uint64_t now_us, uint64_t delay_us) {
    return delay_us > KVF_NEVER - now_us ? KVF_NEVER : now_us + delay_us;
}

#endif
