/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_WINDOW_H
#define KVF_KVMGR_WINDOW_H

/**
 * @file
 * Which blocks of a prompt the next query can still see. Source: docs/placement.md "Windows".
 * Installed beside the public header.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A half-open range of ordinals; empty when first >= end. */
typedef struct kvf_span {
    int64_t first;
    int64_t end;
} kvf_span_t;

/**
 * Dead ordinals of a prompt: `[start, max(start, floor((P + 1 - W) / t)))` with
 * start = min(ceil(P / t), ceil(s / t)).
 *
 * @param prompt_tokens     P, > 0, <= 2^40.
 * @param tokens_per_block  t, > 0.
 * @param window            W in tokens, 0 = none (then nothing is dead).
 * @param sinks             s in tokens, >= 0.
 * @thread any
 */
KVF_API kvf_span_t kvf_stale_span(int64_t prompt_tokens, int64_t tokens_per_block, int64_t window,
                                  int64_t sinks);

static inline bool kvf_span_has(kvf_span_t span, int64_t ordinal) {
    return ordinal >= span.first && ordinal < span.end;
}

#ifdef __cplusplus
}
#endif

#endif
