/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "kvmgr/base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

static uint64_t monotonic_us(void *ctx) {
    struct timespec ts;
    (void)ctx;
    if (clock_gettime(CLOCK_MONOTONIC, &ts) != 0) {
        abort(); /* cannot fail with this clock id */
    }
    return (uint64_t)ts.tv_sec * 1000000U + (uint64_t)ts.tv_nsec / 1000U;
}

const kvf_clock_t *kvf_clock_default(void) {
    static const kvf_clock_t table = {monotonic_us, NULL};
    return &table;
}

static void system_fill(void *ctx, void *buf, size_t bytes) {
    unsigned char *at = buf;
    (void)ctx;
    while (bytes > 0) {
        ssize_t got = getrandom(at, bytes, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            abort(); /* identities made from guessable numbers would be worse than no service */
        }
        at += got;
        bytes -= (size_t)got;
    }
}

const kvf_rand_t *kvf_rand_default(void) {
    static const kvf_rand_t table = {system_fill, NULL};
    return &table;
}
