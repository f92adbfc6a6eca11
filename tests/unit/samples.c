/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/samples.h"

#include <criterion/criterion.h>

/* By definition, slowly: the smallest value that at least percent % of the values do not exceed. */
static uint64_t slow_percentile(const uint64_t *values, size_t n, unsigned percent) {
    uint64_t best = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        size_t covered = 0;
        for (size_t k = 0; k < n; k++) {
            covered += values[k] <= values[i];
        }
        if (covered * 100 >= (size_t)percent * n && values[i] < best) {
            best = values[i];
        }
    }
    return best;
}

Test(samples, percentiles_by_definition) {
    uint64_t state = 1;
    for (size_t n = 1; n <= 130; n++) {
        kvf_samples_t samples = {.alloc = kvf_alloc_default()};
        uint64_t values[130];
        uint64_t sum = 0;
        for (size_t i = 0; i < n; i++) {
            state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
            values[i] = (state >> 33) %
                        (n % 2 == 0 ? 20 : UINT64_C(1) << 30); /* with and without repeats */
            sum += values[i];
            cr_assert_eq(kvf_samples_add(&samples, values[i]), KVF_OK);
        }
        for (unsigned percent = 1; percent <= 100; percent++) {
            uint64_t expected = slow_percentile(values, n, percent);
            uint64_t found = kvf_samples_percentile(&samples, percent);
            cr_assert_eq(found, expected, "n %zu, %u %%: %llu, not %llu", n, percent,
                         (unsigned long long)found, (unsigned long long)expected);
        }
        cr_assert_eq(kvf_samples_sum(&samples), sum);
        kvf_samples_cleanup(&samples);
    }
}

Test(samples, a_value_added_after_a_question_counts) {
    kvf_samples_t samples = {.alloc = kvf_alloc_default()};
    cr_assert_eq(kvf_samples_percentile(&samples, 50), 0);
    cr_assert_eq(kvf_samples_add(&samples, 5), KVF_OK);
    cr_assert_eq(kvf_samples_add(&samples, 9), KVF_OK);
    cr_assert_eq(kvf_samples_percentile(&samples, 100), 9);
    cr_assert_eq(kvf_samples_add(&samples, 2), KVF_OK);
    cr_assert_eq(kvf_samples_percentile(&samples, 1), 2);
    cr_assert_eq(kvf_samples_percentile(&samples, 50), 5);
    kvf_samples_cleanup(&samples);
    cr_assert_eq(samples.n, 0);
}

Test(samples, a_failed_add_changes_nothing) {
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 2);
    kvf_samples_t samples = {.alloc = &fail.table};
    uint64_t added = 0;
    while (kvf_samples_add(&samples, added) == KVF_OK) {
        added++;
    }
    cr_assert_gt(added, 0);
    cr_assert_eq(samples.n, added);
    cr_assert_eq(kvf_samples_percentile(&samples, 100), added - 1);
    cr_assert_eq(kvf_samples_percentile(&samples, 1), (added + 99) / 100 - 1);
    kvf_samples_cleanup(&samples);
    cr_assert_eq(fail.live, 0);
}
