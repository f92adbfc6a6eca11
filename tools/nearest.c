/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nearest.h"

#include <string.h>

size_t kvf_nearest_distance(const char *a, const char *b) {
    /* row[j]: from what was read of a to the first j bytes of b. */
    size_t row[KVF_NEAREST_BYTES + 1];
    size_t n_a = strnlen(a, KVF_NEAREST_BYTES), n_b = strnlen(b, KVF_NEAREST_BYTES);
    for (size_t j = 0; j <= n_b; j++) {
        row[j] = j;
    }
    for (size_t i = 0; i < n_a; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < n_b; j++) {
            size_t best = diagonal + (a[i] != b[j]);
            diagonal = row[j + 1];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j + 1] = diagonal + 1 < best ? diagonal + 1 : best;
        }
    }
    return row[n_b];
}
