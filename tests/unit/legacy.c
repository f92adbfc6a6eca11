/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/legacy.h"

#include <criterion/criterion.h>
#include <string.h>

#define NO_COUNTER (-1000)
#define MAX 12

/* Tables worked by hand from the rules of docs/placement.md "Legacy lists"; 99 ends a list. */
static const struct {
    const char *what;
    int64_t prompt, block, scratch_tokens, window, front_removed;
    int32_t ids[MAX];
    int32_t want[MAX];
} rows[] = {
    {"chain, whole", 32, 8, 0, 16, 0, {10, 11, 12, 13, 99}, {10, 11, 12, 13, 99}},
    {"chain, removed ids dangle", 32, 8, 0, 16, 2, {10, 11, 12, 13, 99}, {-1, -1, 12, 13, 99}},
    {"chain, scratch", 32, 8, 2, 16, 2, {10, 11, 12, 13, 14, 99}, {-1, -1, 12, 13, 99}},
    {"chain, first token", 32, 8, 0, 16, 2, {10, 11, 12, 13, 14, 99}, {-1, -1, 12, 13, 99}},
    {"chain, both", 32, 8, 2, 16, 2, {0, 1, 2, 3, 4, 5, 99}, {-1, -1, 2, 3, 99}},
    {"chain, short", 32, 8, 0, 16, 1, {10, 11, 99}, {-1, 11, 99}},
    {"chain, all removed", 32, 8, 0, 16, 4, {10, 11, 12, 13, 99}, {-1, -1, -1, -1, 99}},
    {"chain, more removed than listed", 32, 8, 0, 16, 9, {10, 11, 99}, {-1, -1, 99}},
    {"chain, empty", 32, 8, 0, 16, 0, {99}, {99}},
    {"no window, no counter", 32, 8, 0, 0, NO_COUNTER, {1, 2, 3, 4, 5, 99}, {1, 2, 3, 4, 99}},
    {"no window, short", 32, 8, 9, 0, NO_COUNTER, {1, 2, 99}, {1, 2, 99}},
    {"resident, exact", 32, 8, 0, 16, NO_COUNTER, {8, 9, 99}, {-1, -1, 8, 9, 99}},
    {"resident, scratch", 32, 8, 2, 16, NO_COUNTER, {8, 9, 10, 99}, {-1, -1, 8, 9, 99}},
    {"resident, short is not emptied", 32, 8, 2, 16, NO_COUNTER, {8, 9, 99}, {-1, -1, 8, 9, 99}},
    {"resident, shorter", 32, 8, 2, 16, NO_COUNTER, {9, 99}, {-1, -1, -1, 9, 99}},
    {"resident, surplus in front", 32, 8, 0, 16, NO_COUNTER, {7, 8, 9, 99}, {-1, -1, 8, 9, 99}},
    {"resident, both surpluses",
     32,
     8,
     2,
     16,
     NO_COUNTER,
     {6, 7, 8, 9, 10, 99},
     {-1, -1, 8, 9, 99}},
    {"resident, two scratch, one there",
     32,
     8,
     9,
     16,
     NO_COUNTER,
     {8, 9, 10, 99},
     {-1, -1, 8, 9, 99}},
    {"resident, empty", 32, 8, 2, 16, NO_COUNTER, {99}, {-1, -1, -1, -1, 99}},
    {"resident, nothing live", 32, 8, 0, 1, NO_COUNTER, {7, 8, 9, 99}, {-1, -1, -1, -1, 99}},
    {"resident, window over all", 32, 8, 0, 99, NO_COUNTER, {1, 2, 3, 4, 99}, {1, 2, 3, 4, 99}},
    {"seed", 1020, 128, 5, 200, NO_COUNTER, {46, 47, 48, 99}, {-1, -1, -1, -1, -1, -1, 46, 47, 99}},
};

static int64_t length_of(const int32_t *list) {
    int64_t n = 0;
    while (list[n] != 99) {
        n++;
    }
    return n;
}

static kvf_block_counts_t counts_of(int64_t prompt, int64_t block, int64_t scratch_tokens) {
    kvf_lengths_t lengths = {.prompt_len = prompt, .num_extra_kv_tokens = scratch_tokens};
    kvf_block_counts_t counts;
    cr_assert_eq(kvf_get_block_counts(&lengths, false, block, &counts, NULL), KVF_OK);
    return counts;
}

Test(legacy, worked_rows) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_block_counts_t counts =
            counts_of(rows[i].prompt, rows[i].block, rows[i].scratch_tokens);
        kvf_legacy_list_t list = {rows[i].ids, length_of(rows[i].ids), rows[i].front_removed,
                                  rows[i].front_removed != NO_COUNTER};
        kvf_legacy_run_t run;
        int32_t slots[MAX + 1];
        kvf_detail_t detail = {""};
        memset(slots, 0x55, sizeof(slots));
        cr_assert_eq(
            kvf_legacy_locate(&list, &counts, rows[i].window, 0,
                              kvf_stale_span(rows[i].prompt, rows[i].block, rows[i].window, 0),
                              &run, &detail),
            KVF_OK, "%s: %s", rows[i].what, detail.text);
        int64_t n = kvf_legacy_table_blocks(&run);
        cr_assert_eq(n, length_of(rows[i].want), "%s: %ld blocks", rows[i].what, (long)n);
        kvf_legacy_fill(&list, &run, slots);
        for (int64_t k = 0; k < n; k++) {
            cr_assert_eq(slots[k], rows[i].want[k], "%s: ordinal %ld has %d", rows[i].what, (long)k,
                         slots[k]);
        }
        cr_assert_eq(slots[n], 0x55555555, "%s: nothing behind the table", rows[i].what);
    }
}

static const struct {
    const char *what;
    int64_t scratch_tokens, window, sinks, front_removed;
    int32_t ids[MAX];
    kvf_status_t want;
} refused[] = {
    {"chain too long", 0, 16, 0, 0, {1, 2, 3, 4, 5, 6, 99}, KVF_ERR_COUNT_MISMATCH},
    {"chain too long with scratch", 2, 16, 0, 0, {1, 2, 3, 4, 5, 6, 7, 99}, KVF_ERR_COUNT_MISMATCH},
    {"no window, too long", 0, 0, 0, NO_COUNTER, {1, 2, 3, 4, 5, 6, 99}, KVF_ERR_COUNT_MISMATCH},
    {"resident, more in front than stale",
     0,
     16,
     0,
     NO_COUNTER,
     {1, 2, 3, 4, 5, 99},
     KVF_ERR_COUNT_MISMATCH},
    {"resident, the same with scratch",
     2,
     16,
     0,
     NO_COUNTER,
     {1, 2, 3, 4, 5, 6, 99},
     KVF_ERR_COUNT_MISMATCH},
    {"negative id", 0, 16, 0, NO_COUNTER, {-1, 12, 13, 99}, KVF_ERR_INVALID},
    {"negative id among the removed", 0, 16, 0, 2, {-1, 11, 12, 13, 99}, KVF_ERR_INVALID},
    {"negative id behind the prompt", 2, 16, 0, 0, {1, 2, 3, 4, -5, 99}, KVF_ERR_INVALID},
    {"negative counter", 0, 16, 0, -1, {1, 99}, KVF_ERR_INVALID},
    {"sinks", 0, 16, 4, NO_COUNTER, {1, 2, 3, 99}, KVF_ERR_INVALID},
};

Test(legacy, refused_rows) {
    kvf_legacy_run_t run = {7, 7, 7};
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        kvf_block_counts_t counts = counts_of(32, 8, refused[i].scratch_tokens);
        kvf_legacy_list_t list = {refused[i].ids, length_of(refused[i].ids),
                                  refused[i].front_removed, refused[i].front_removed != NO_COUNTER};
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_legacy_locate(&list, &counts, refused[i].window, refused[i].sinks,
                                       kvf_stale_span(32, 8, refused[i].window, refused[i].sinks),
                                       &run, &detail),
                     refused[i].want, "%s", refused[i].what);
        cr_assert_neq(detail.text[0], '\0');
        cr_assert_eq(run.entry, 7);
    }
}

Test(legacy, sinks_with_a_counter_are_a_chain) {
    kvf_block_counts_t counts = counts_of(80, 8, 0);
    const int32_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const kvf_legacy_list_t list = {ids, 10, 0, true};
    kvf_legacy_run_t run;
    cr_assert_eq(kvf_legacy_locate(&list, &counts, 24, 4, kvf_stale_span(80, 8, 24, 4), &run, NULL),
                 KVF_OK);
    cr_assert(run.entry == 0 && run.ordinal == 0 && run.count == 10);
}

/* Numbers at the end of their range need no table to be located. */
Test(legacy, positions_beyond_32_bits) {
    const int64_t prompt = INT64_C(1) << 40;
    kvf_block_counts_t counts = counts_of(prompt, 16, 0);
    const int32_t ids[] = {5, 6, 7};
    kvf_legacy_list_t list = {ids, 3, 0, false};
    kvf_legacy_run_t run;
    cr_assert_eq(
        kvf_legacy_locate(&list, &counts, 32, 0, kvf_stale_span(prompt, 16, 32, 0), &run, NULL),
        KVF_OK);
    cr_assert_eq(run.ordinal, (INT64_C(1) << 36) - 2);
    cr_assert(run.entry == 1 && run.count == 2);
}
