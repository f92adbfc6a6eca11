/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_SIZE_H
#define KVF_BASE_SIZE_H

/**
 * @file
 * Sizes that cannot wrap. Products and sums of sizes that come from outside go through these.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Token counts end here (docs/placement.md); all maths on them fits a signed 64-bit number. */
#define KVF_MAX_TOKENS (INT64_C(1) << 40)

/** @return KVF_OK and a + b in *sum_p, or KVF_ERR_RANGE when it does not fit; any thread. */
static inline KVF_CHECK kvf_status_t kvf_add_u64(uint64_t a, uint64_t b, uint64_t *sum_p) {
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return KVF_ERR_RANGE;
    }
    *sum_p = sum;
    return KVF_OK;
}

/** @return KVF_OK and a * b in *product_p, or KVF_ERR_RANGE when it does not fit; any thread. */
static inline KVF_CHECK kvf_status_t kvf_mul_u64(uint64_t a, uint64_t b, uint64_t *product_p) {
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return KVF_ERR_RANGE;
    }
    *product_p = product;
    return KVF_OK;
}

/** @return Whether [off, off + len) lies inside [0, size), without wrapping; any thread. */
static inline bool kvf_range_ok(uint64_t off, uint64_t len, uint64_t size) {
    return off <= size && len <= size - off;
}

/** @return ceil(a / b) for a >= 0, b > 0; any thread. */
static inline int64_t kvf_div_ceil(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/** @return a / b rounded toward minus infinity, b > 0; any thread. */
static inline int64_t kvf_div_floor(int64_t a, int64_t b) {
    return a / b - (a % b < 0);
}

#endif
