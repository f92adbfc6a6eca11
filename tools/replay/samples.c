/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/samples.h"

#include <stdlib.h>

kvf_status_t kvf_samples_add(kvf_samples_t *samples, uint64_t value) {
    if (samples->n == samples->room) {
        size_t room = samples->room == 0 ? 64 : 2 * samples->room;
        uint64_t *grown = kvf_realloc(samples->alloc, samples->values, room, sizeof(*grown));
        if (grown == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        samples->values = grown;
        samples->room = room;
    }
    samples->values[samples->n++] = value;
    samples->sorted = false;
    return KVF_OK;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

uint64_t kvf_samples_percentile(kvf_samples_t *samples, unsigned percent) {
    if (samples->n == 0) {
        return 0;
    }
    if (!samples->sorted) {
        qsort(samples->values, samples->n, sizeof(samples->values[0]), compare);
        samples->sorted = true;
    }
    /* Whole numbers only: 0.9 * 10 in doubles may come out as one rank more. */
    size_t rank = (samples->n * percent + 99) / 100;
    return samples->values[rank - 1];
}

uint64_t kvf_samples_sum(const kvf_samples_t *samples) {
    uint64_t sum = 0;
    for (size_t i = 0; i < samples->n; i++) {
        sum += samples->values[i];
    }
    return sum;
}

void kvf_samples_cleanup(kvf_samples_t *samples) {
    kvf_free(samples->alloc, samples->values);
    *samples = (kvf_samples_t){.alloc = samples->alloc};
}
