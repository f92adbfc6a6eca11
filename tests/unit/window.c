/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/window.h"

#include <criterion/criterion.h>

/* Block by block and token by token: a block is dead when its full extent is out of the next
 * query's sight. */
static bool is_dead(int64_t ordinal, int64_t prompt, int64_t block, int64_t window, int64_t sinks) {
    for (int64_t p = ordinal * block; p < (ordinal + 1) * block; p++) {
        if (p < sinks || p > prompt - window) {
            return false;
        }
    }
    return true;
}

Test(window, against_tokens) {
    int dead = 0;
    for (int64_t block = 1; block <= 5; block++) {
        for (int64_t prompt = 1; prompt <= 23; prompt++) {
            for (int64_t window = 1; window <= prompt + 3; window++) {
                for (int64_t sinks = 0; sinks <= prompt + 2; sinks++) {
                    kvf_span_t span = kvf_stale_span(prompt, block, window, sinks);
                    cr_assert(span.first >= 0 && span.first <= span.end);
                    for (int64_t i = 0; i * block < prompt; i++) {
                        bool want = is_dead(i, prompt, block, window, sinks);
                        cr_assert_eq(kvf_span_has(span, i), want, "P %ld t %ld W %ld s %ld: %ld",
                                     (long)prompt, (long)block, (long)window, (long)sinks, (long)i);
                        dead += want;
                    }
                }
            }
        }
    }
    cr_assert_gt(dead, 1000);
}

/* From docs/placement.md and its worked cases. */
static const struct {
    int64_t prompt, block, window, sinks;
    kvf_span_t want;
} rows[] = {
    {1020, 128, 200, 0, {0, 6}}, {1150, 128, 133, 0, {0, 7}}, {32, 8, 1, 0, {0, 4}},
    {33, 8, 1, 0, {0, 4}},       {80, 8, 24, 4, {1, 7}},      {80, 8, 24, 9, {2, 7}},
    {64, 16, 32, 0, {0, 2}},     {31, 8, 32, 0, {0, 0}},
};

Test(window, worked_rows) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_span_t got =
            kvf_stale_span(rows[i].prompt, rows[i].block, rows[i].window, rows[i].sinks);
        cr_assert_eq(got.first, rows[i].want.first, "row %zu", i);
        cr_assert_eq(got.end, rows[i].want.end, "row %zu", i);
    }
}

Test(window, none_kills_nothing) {
    for (int64_t sinks = 0; sinks < 100; sinks += 9) {
        kvf_span_t span = kvf_stale_span(1000, 8, 0, sinks);
        cr_assert_geq(span.first, span.end);
    }
}

Test(window, ends_of_the_number_range) {
    const int64_t limit = INT64_C(1) << 40;
    kvf_span_t span = kvf_stale_span(limit, 1, 1, 0);
    cr_assert_eq(span.end, limit);
    span = kvf_stale_span(limit, 64, 128, limit);
    cr_assert_geq(span.first, span.end, "sinks cover everything");
    span = kvf_stale_span(1, limit, limit, 0);
    cr_assert_geq(span.first, span.end);
}

Test(window, has) {
    cr_assert_not(kvf_span_has((kvf_span_t){2, 5}, 1));
    cr_assert(kvf_span_has((kvf_span_t){2, 5}, 2));
    cr_assert(kvf_span_has((kvf_span_t){2, 5}, 4));
    cr_assert_not(kvf_span_has((kvf_span_t){2, 5}, 5));
    cr_assert_not(kvf_span_has((kvf_span_t){5, 2}, 3));
}
