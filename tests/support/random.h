/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RANDOM_H
#define KVF_TESTS_RANDOM_H

/**
 * @file
 * Random numbers of a test that can be repeated: KVF_SEED=N runs it again as it was.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct test_random {
    uint64_t seed;
    uint64_t state;
} test_random_t;

/** Take the seed from KVF_SEED, else from the clock, and print it. */
static inline test_random_t test_random(const char *what) {
    const char *given = getenv("KVF_SEED");
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10)
                                  : (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    (void)fprintf(stderr, "%s: KVF_SEED=%llu\n", what, (unsigned long long)seed);
    return (test_random_t){seed, seed};
}

/** @return A number in [least, most]. @source splitmix64 (Steele, Lea, Flood 2014) */
static inline int64_t test_between(test_random_t *random, int64_t least, int64_t most) {
    uint64_t z = (random->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return least + (int64_t)((z ^ (z >> 31)) % (uint64_t)(most - least + 1));
}

#endif
