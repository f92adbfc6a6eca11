/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/table.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT (INT64_C(1) << 40)

static const kvf_cp_t whole = {1, 0};

static kvf_wanted_t wanted(int64_t prompt, int64_t block, int64_t window, int64_t sinks,
                           int64_t cached, kvf_cp_t context, kvf_cp_t generation) {
    kvf_lengths_t lengths = {.prompt_len = prompt};
    kvf_wanted_t out;
    kvf_detail_t detail = {""};
    cr_assert_eq(
        kvf_wanted_init(&lengths, block, window, sinks, cached, context, generation, &out, &detail),
        KVF_OK, "%s", detail.text);
    return out;
}

/* The wanted ordinals as text, by kvf_wanted_next() alone. */
static const char *walk(const kvf_wanted_t *rule) {
    static char text[256];
    size_t at = 0;
    int64_t n = 0;
    for (int64_t i = kvf_wanted_next(rule, INT64_MIN); i < rule->prompt_blocks;
         i = kvf_wanted_next(rule, i + 1)) {
        at += (size_t)snprintf(text + at, sizeof(text) - at, n == 0 ? "%ld" : " %ld", (long)i);
        n++;
    }
    text[at] = '\0';
    cr_assert_eq(kvf_wanted_count(rule), n);
    return text;
}

static const struct {
    int64_t prompt, block, window, sinks, cached;
    kvf_cp_t context, generation;
    const char *want;
} rows[] = {
    {80, 8, 0, 0, 0, {1, 0}, {1, 0}, "0 1 2 3 4 5 6 7 8 9"},
    {80, 8, 0, 0, 0, {0, 0}, {0, 0}, "0 1 2 3 4 5 6 7 8 9"},
    {80, 8, 24, 4, 0, {1, 0}, {1, 0}, "0 7 8 9"},
    {80, 8, 24, 4, 60, {1, 0}, {1, 0}, "7 8 9"},
    {80, 8, 24, 4, 71, {1, 0}, {1, 0}, "8 9"},
    {80, 8, 24, 4, 80, {1, 0}, {1, 0}, ""},
    {79, 8, 0, 0, 79, {1, 0}, {1, 0}, ""},
    {79, 8, 0, 0, 78, {1, 0}, {1, 0}, "9"},
    {32, 8, 1, 0, 0, {1, 0}, {1, 0}, ""},
    {80, 8, 0, 0, 0, {2, 1}, {1, 0}, "1 3 5 7 9"},
    {80, 8, 0, 0, 0, {1, 0}, {3, 2}, "2 5 8"},
    {80, 8, 0, 0, 0, {2, 1}, {3, 2}, "5"},
    {80, 8, 0, 0, 0, {4, 2}, {6, 4}, ""}, /* 2 mod 4 and 4 mod 6: first at 10 */
    {88, 8, 0, 0, 0, {4, 2}, {6, 4}, "10"},
    {80, 8, 0, 0, 0, {2, 0}, {2, 1}, ""}, /* nothing in common */
    {80, 8, 0, 0, 0, {4, 1}, {2, 0}, ""},
    {80, 8, 24, 4, 0, {2, 0}, {2, 0}, "0 8"},
    {80, 8, 24, 4, 0, {2, 1}, {2, 1}, "7 9"},
    {80, 8, 24, 4, 72, {2, 1}, {2, 1}, "9"},
    {80, 8, 0, 0, 0, {64, 63}, {1, 0}, ""}, /* the rank holds nothing of so short a prompt */
    {80, 8, 0, 0, 0, {INT32_MAX, 9}, {INT32_MAX - 1, 9}, "9"},
};

Test(table, wanted_rows) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_wanted_t rule = wanted(rows[i].prompt, rows[i].block, rows[i].window, rows[i].sinks,
                                   rows[i].cached, rows[i].context, rows[i].generation);
        cr_assert_str_eq(walk(&rule), rows[i].want, "row %zu: %s", i, walk(&rule));
    }
}

Test(table, wanted_of_a_huge_prompt_needs_no_walk) {
    kvf_wanted_t rule = wanted(LIMIT, 1, 0, 0, 5, whole, whole);
    cr_assert_eq(kvf_wanted_count(&rule), LIMIT - 5);
    cr_assert_eq(kvf_wanted_next(&rule, LIMIT - 1), LIMIT - 1);
    cr_assert_eq(kvf_wanted_next(&rule, LIMIT), LIMIT);
    cr_assert_eq(kvf_wanted_next(&rule, INT64_MAX), LIMIT);
    rule = wanted(LIMIT, 1, 10, 3, 0, whole, whole);
    cr_assert_eq(kvf_wanted_count(&rule), 12, "3 sinks, and the window's 10 with the next token");
    cr_assert_eq(kvf_wanted_next(&rule, 3), LIMIT - 9);
    rule = wanted(LIMIT, 1, 0, 0, 0, (kvf_cp_t){INT32_MAX, 5}, (kvf_cp_t){INT32_MAX, 5});
    cr_assert_eq(kvf_wanted_next(&rule, 6), INT64_C(5) + INT32_MAX);
    cr_assert_eq(kvf_wanted_count(&rule), LIMIT / INT32_MAX + 1);
}

Test(table, wanted_refuses_numbers_out_of_range) {
    const kvf_lengths_t lengths = {.prompt_len = 80};
    static const struct {
        int64_t block, window, sinks, cached;
        kvf_cp_t context, generation;
        const char *word;
    } bad[] = {
        {0, 0, 0, 0, {1, 0}, {1, 0}, "tokens_per_block"},
        {8, -1, 0, 0, {1, 0}, {1, 0}, "window"},
        {8, LIMIT + 1, 0, 0, {1, 0}, {1, 0}, "window"},
        {8, 0, -1, 0, {1, 0}, {1, 0}, "sinks"},
        {8, 0, LIMIT + 1, 0, {1, 0}, {1, 0}, "sinks"},
        {8, 0, 0, -1, {1, 0}, {1, 0}, "cached"},
        {8, 0, 0, 81, {1, 0}, {1, 0}, "cached"},
        {8, 0, 0, 0, {2, 2}, {1, 0}, "context"},
        {8, 0, 0, 0, {2, -1}, {1, 0}, "context"},
        {8, 0, 0, 0, {1, 0}, {-1, 0}, "generation"},
        {8, 0, 0, 0, {1, 0}, {INT64_MAX, 0}, "generation"},
        {8, 0, 0, 0, {1, 0}, {0, 1}, "generation"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kvf_wanted_t out = {.prompt_blocks = 77};
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_wanted_init(&lengths, bad[i].block, bad[i].window, bad[i].sinks,
                                     bad[i].cached, bad[i].context, bad[i].generation, &out,
                                     &detail),
                     KVF_ERR_INVALID, "row %zu", i);
        cr_assert_not_null(strstr(detail.text, bad[i].word), "row %zu: %s", i, detail.text);
        cr_assert_eq(out.prompt_blocks, 77);
    }
}

static kvf_status_t check(const int32_t *slots, int64_t n, const kvf_wanted_t *live,
                          kvf_detail_t *detail) {
    kvf_table_t table = {slots, n};
    return kvf_table_check(&table, live, "context", "swa", kvf_alloc_default(), detail);
}

Test(table, check_live_stale_and_scratch) {
    kvf_wanted_t live = wanted(48, 8, 16, 0, 0, whole, whole); /* 4 and 5 */
    kvf_detail_t detail = {""};
    cr_assert_eq(check((int32_t[]){14, 14, -1, -1, 14, 15}, 6, &live, &detail), KVF_OK);
    cr_assert_eq(check((int32_t[]){-1, -1, -1, -1, 14, 15, 14, 15}, 8, &live, &detail), KVF_OK);
    cr_assert_eq(check((int32_t[]){-1, -1, -1, -1, -1, -1}, 6, &live, &detail), KVF_OK);
    cr_assert_eq(check(NULL, 0, &live, &detail), KVF_OK);
    cr_assert_eq(check((int32_t[]){0, 0, 0, 0, INT32_MAX, 0}, 6, &live, &detail), KVF_OK);
    cr_assert_str_eq(detail.text, "");
    cr_assert_eq(check((int32_t[]){1, 2, 3, 4, 15, 15}, 6, &live, &detail), KVF_ERR_INVALID);
    cr_assert_str_eq(detail.text, "group swa, context side: slot 15 is bound to two live ordinals, "
                                  "4 and 5; one page holds one block");
    cr_assert_eq(check((int32_t[]){1, 2, -2, 4, 5, 6}, 6, &live, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "ordinal 2 has slot -2"), "%s", detail.text);
    cr_assert_eq(check((int32_t[]){1, 2, 3, 4, 5, 6, INT32_MIN}, 7, &live, &detail),
                 KVF_ERR_INVALID, "scratch, too, is a slot or -1");
    cr_assert_not_null(strstr(detail.text, "ordinal 6"), "%s", detail.text);
}

Test(table, check_looks_at_the_own_rank_only) {
    kvf_wanted_t rule = wanted(48, 8, 0, 0, 0, (kvf_cp_t){2, 0}, (kvf_cp_t){3, 1});
    kvf_wanted_t source = kvf_wanted_live(&rule, true), target = kvf_wanted_live(&rule, false);
    cr_assert_str_eq(walk(&source), "0 2 4");
    cr_assert_str_eq(walk(&target), "1 4");
    const int32_t slots[] = {7, 3, 8, 7, 9, 7};
    cr_assert_eq(check(slots, 6, &source, NULL), KVF_OK);
    cr_assert_eq(check(slots, 6, &target, NULL), KVF_OK);
    const int32_t twice[] = {7, 3, 3, 3, 7, 3};
    cr_assert_eq(check(twice, 6, &source, NULL), KVF_ERR_INVALID);
    cr_assert_eq(check(twice, 6, &target, NULL), KVF_OK);
}

/* Every stride of slot numbers that a hash by bits could be bad at; and one planted pair each time.
 */
Test(table, check_is_linear_whatever_the_slots) {
    enum { N = 200000 };
    int32_t *slots = malloc(N * sizeof(*slots));
    kvf_wanted_t live = wanted(N, 1, 0, 0, 0, whole, whole);
    for (int shift = 0; shift < 13; shift++) {
        for (int32_t i = 0; i < N; i++) {
            /* Odd multiples and bit-reversed-like spreads stay distinct below 2^31. */
            slots[i] = (int32_t)(((uint32_t)i << shift | (uint32_t)i >> (31 - shift)) & INT32_MAX);
        }
        cr_assert_eq(check(slots, N, &live, NULL), KVF_OK, "shift %d", shift);
        int32_t kept = slots[N - 1 - shift];
        slots[N - 1 - shift] = slots[shift * 17];
        cr_assert_eq(check(slots, N, &live, NULL), KVF_ERR_INVALID, "shift %d", shift);
        slots[N - 1 - shift] = kept;
    }
    free(slots);
}

static size_t most_bytes;

static void *measure(void *ctx, void *ptr, size_t size) {
    (void)ctx;
    most_bytes = size > most_bytes ? size : most_bytes;
    return kvf_alloc_default()->resize(kvf_alloc_default()->ctx, ptr, size);
}

/* By what is live and there, not by the pool, the prompt or what dangles. */
Test(table, check_takes_memory_by_live_blocks) {
    static int32_t slots[20000];
    const kvf_alloc_t alloc = {measure, NULL};
    static const struct {
        int64_t prompt, window;
        int32_t stride;
        int64_t n, live;
    } sizes[] = {{20000, 0, 1, 20000, 20000}, {20000, 0, 100000, 20000, 20000},
                 {20000, 64, 1, 20000, 63},   {20000, 64, 100000, 20000, 63},
                 {LIMIT, 0, 1, 100, 100},     {LIMIT, 0, 20000000, 100, 100}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        kvf_wanted_t live = wanted(sizes[i].prompt, 1, sizes[i].window, 0, 0, whole, whole);
        const kvf_table_t table = {slots, sizes[i].n};
        for (int32_t k = 0; k < sizes[i].n; k++) {
            slots[k] = k * sizes[i].stride;
        }
        most_bytes = 0;
        cr_assert_eq(kvf_table_check(&table, &live, "context", "g", &alloc, NULL), KVF_OK);
        cr_expect_leq(most_bytes, (size_t)sizes[i].live * 16, "row %zu: %zu", i, most_bytes);
        slots[sizes[i].n - 2] = slots[sizes[i].n - 1];
        cr_assert_eq(kvf_table_check(&table, &live, "context", "g", &alloc, NULL), KVF_ERR_INVALID);
    }
}

Test(table, check_without_memory) {
    kvf_wanted_t live = wanted(48, 8, 0, 0, 0, whole, whole);
    const int32_t slots[] = {1, 2, 3, 4, 5, 6};
    const kvf_table_t table = {slots, 6};
    kvf_status_t status = KVF_ERR_NO_MEMORY;
    for (uint64_t at = 1; status == KVF_ERR_NO_MEMORY; at++) {
        kvf_alloc_fail_t fail;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&fail, at);
        status = kvf_table_check(&table, &live, "context", "full", &fail.table, &detail);
        cr_assert_eq(fail.live, 0);
        cr_assert_eq(status == KVF_ERR_NO_MEMORY, fail.calls == at, "failure %lu", (long)at);
        cr_assert_eq(status == KVF_OK, detail.text[0] == '\0');
    }
    cr_assert_eq(status, KVF_OK);
}

Test(table, select_keeps_the_index) {
    kvf_wanted_t rule = wanted(48, 8, 24, 0, 30, whole, whole); /* live: 3, 4, 5 */
    kvf_wanted_t live = kvf_wanted_live(&rule, true);
    const int32_t slots[] = {10, 11, -1, 13, -1, 15, 16};
    kvf_table_t table = {slots, 7};
    kvf_pair_t pairs[3];
    cr_assert_eq(kvf_select(&table, &live, true, pairs), 2);
    cr_assert_eq(pairs[0].ordinal, 3);
    cr_assert_eq(pairs[0].source, 13);
    cr_assert_eq(pairs[0].destination, -1);
    cr_assert_eq(pairs[1].ordinal, 5);
    cr_assert_eq(pairs[1].source, 15);
    table.n_blocks = 4;
    cr_assert_eq(kvf_select(&table, &live, false, pairs), 1);
    cr_assert_eq(pairs[0].ordinal, 3);
    cr_assert_eq(pairs[0].source, -1);
    cr_assert_eq(pairs[0].destination, 13);
}

Test(table, pairing_names_ordinals_and_sides) {
    kvf_wanted_t rule = wanted(64, 8, 48, 0, 24, whole, whole); /* live: 2..7, wanted: 3..7 */
    const int32_t from[] = {0, 1, 2, 3, -1, 5, 6, 7}, to[] = {-1, -1, -1, 13, 14, -1, 16};
    const kvf_table_t source = {from, 8}, destination = {to, 7};
    kvf_pair_t pairs[5];
    int64_t no_source[5], no_destination[6];
    kvf_pairing_t found =
        kvf_pair_tables(&source, &destination, &rule, pairs, no_source, no_destination);
    cr_assert_eq(found.n_pairs, 2);
    cr_assert(pairs[0].ordinal == 3 && pairs[0].source == 3 && pairs[0].destination == 13);
    cr_assert(pairs[1].ordinal == 6 && pairs[1].source == 6 && pairs[1].destination == 16);
    cr_assert_eq(found.n_missing_source, 1);
    cr_assert_eq(no_source[0], 4);
    cr_assert_eq(found.n_missing_destination, 3);
    cr_assert_eq(no_destination[0], 2,
                 "a live block that is said to be held, and is bound nowhere");
    cr_assert_eq(no_destination[1], 5);
    cr_assert_eq(no_destination[2], 7, "beyond the end of the table");
    kvf_pairing_t counted = kvf_pair_tables(&source, &destination, &rule, NULL, NULL, NULL);
    cr_assert_eq(memcmp(&counted, &found, sizeof(found)), 0);
}
