/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_SAMPLES_H
#define KVF_TOOLS_REPLAY_SAMPLES_H

/**
 * @file
 * Durations of requests, all kept, so that percentiles are exact.
 */

#include "kvmgr/base/alloc.h"

#include <stdbool.h>

/** A growing list of microseconds. Zeroed but for alloc it is empty. */
typedef struct kvf_samples {
    const kvf_alloc_t *alloc;
    uint64_t *values;
    size_t n;
    size_t room;
    bool sorted;
} kvf_samples_t;

/** @return KVF_OK, or KVF_ERR_NO_MEMORY (the list is as it was). @thread any */
KVF_CHECK kvf_status_t kvf_samples_add(kvf_samples_t *samples, uint64_t value);

/**
 * The nearest-rank percentile: the smallest value that at least `percent` % of all values do not
 * exceed.
 *
 * @param percent  1..100; 100 is the largest value.
 * @return One of the values; 0 when there is none.
 * @thread any  @cost O(n log n) for the first call after an add, O(1) afterwards
 */
uint64_t kvf_samples_percentile(kvf_samples_t *samples, unsigned percent);

/** @return The sum of all values. @thread any */
uint64_t kvf_samples_sum(const kvf_samples_t *samples);

/** Free the list; an empty one is allowed. @thread any */
void kvf_samples_cleanup(kvf_samples_t *samples);

#endif
