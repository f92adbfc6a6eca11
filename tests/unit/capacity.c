/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/capacity.h"

#include <criterion/criterion.h>
#include <string.h>

#define LIMIT (INT64_C(1) << 40)

/* Worked by hand. */
static const struct {
    kvf_lengths_t lengths;
    bool drafts;
    int64_t block;
    kvf_block_counts_t want;
} rows[] = {
    /* docs/placement.md: the drafts cross a block edge, and only the generation side holds them. */
    {{1020, 3, 2, 0}, true, 128, {1025, 8, 9, 1}},
    {{1020, 3, 2, 0}, false, 128, {1022, 8, 8, 0}},
    {{1024, 0, 0, 0}, true, 128, {1024, 8, 8, 0}},
    {{1024, 1, 0, 0}, true, 128, {1025, 8, 9, 1}},
    {{1, 0, 0, 0}, true, 128, {1, 1, 1, 0}},
    {{1, 300, 0, 0}, true, 128, {301, 1, 3, 2}},
    {{10, 3, 0, 40}, true, 8, {43, 5, 6, 1}},
    {{10, 0, 0, 40}, false, 8, {40, 5, 5, 0}},
    {{LIMIT, 0, 0, 0}, true, 1, {LIMIT, LIMIT, LIMIT, 0}},
    {{1, 0, 0, LIMIT}, true, LIMIT, {LIMIT, 1, 1, 0}},
    {{LIMIT - 2, 1, 1, 0}, true, 64, {LIMIT, LIMIT / 64, LIMIT / 64, 0}},
};

Test(capacity, worked_rows) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_block_counts_t got;
        int64_t tokens;
        cr_assert_eq(
            kvf_get_block_counts(&rows[i].lengths, rows[i].drafts, rows[i].block, &got, NULL),
            KVF_OK);
        cr_assert_eq(got.capacity_tokens, rows[i].want.capacity_tokens, "row %zu", i);
        cr_assert_eq(got.prompt_blocks, rows[i].want.prompt_blocks, "row %zu", i);
        cr_assert_eq(got.alloc_blocks, rows[i].want.alloc_blocks, "row %zu", i);
        cr_assert_eq(got.scratch_blocks, rows[i].want.scratch_blocks, "row %zu", i);
        cr_assert_eq(kvf_get_kv_capacity_tokens(&rows[i].lengths, rows[i].drafts, &tokens, NULL),
                     KVF_OK);
        cr_assert_eq(tokens, rows[i].want.capacity_tokens, "row %zu", i);
    }
}

/* A number out of range, and the word that the text must hold. */
static const struct {
    kvf_lengths_t lengths;
    int64_t block;
    const char *word;
} bad[] = {
    {{0, 0, 0, 0}, 8, "prompt_len"},
    {{-1, 0, 0, 0}, 8, "prompt_len"},
    {{0, 0, 0, 16}, 8, "prompt_len"},
    {{LIMIT + 1, 0, 0, 0}, 8, "prompt_len"},
    {{INT64_MAX, 0, 0, 0}, 8, "prompt_len"},
    {{1, -1, 0, 0}, 8, "draft_len"},
    {{1, INT64_MIN, 0, 0}, 8, "draft_len"},
    {{1, 0, -1, 0}, 8, "num_extra_kv_tokens"},
    {{1, 0, LIMIT + 1, 0}, 8, "num_extra_kv_tokens"},
    {{1, 0, 0, -1}, 8, "total_input_len_cp"},
    {{1, 0, 0, LIMIT + 1}, 8, "total_input_len_cp"},
    {{LIMIT, 1, 0, 0}, 8, "add up"},
    {{LIMIT, 0, 1, 0}, 8, "add up"},
    {{1, LIMIT, 0, LIMIT}, 8, "add up"},
    {{1, 0, 0, 0}, 0, "tokens_per_block"},
    {{1, 0, 0, 0}, -8, "tokens_per_block"},
    {{1, 0, 0, 0}, LIMIT + 1, "tokens_per_block"},
};

Test(capacity, numbers_out_of_range) {
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kvf_block_counts_t counts = {.capacity_tokens = 77};
        int64_t tokens = 77;
        kvf_detail_t detail = {""};
        /* Without the drafts, too: no request is legal on one side only. */
        cr_assert_eq(kvf_get_block_counts(&bad[i].lengths, false, bad[i].block, &counts, &detail),
                     KVF_ERR_INVALID, "row %zu", i);
        cr_assert_not_null(strstr(detail.text, bad[i].word), "row %zu: %s", i, detail.text);
        cr_assert_eq(counts.capacity_tokens, 77);
        if (strcmp(bad[i].word, "tokens_per_block") != 0) {
            cr_assert_eq(kvf_get_kv_capacity_tokens(&bad[i].lengths, true, &tokens, NULL),
                         KVF_ERR_INVALID);
            cr_assert_eq(kvf_check_capacity(&bad[i].lengths, true, "context", 1, NULL),
                         KVF_ERR_INVALID);
            cr_assert_eq(tokens, 77);
        }
    }
}

Test(capacity, mismatch_names_both_numbers_and_the_side) {
    const kvf_lengths_t lengths = {1020, 3, 2, 0};
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_check_capacity(&lengths, true, "generation", 1025, &detail), KVF_OK);
    cr_assert_eq(kvf_check_capacity(&lengths, false, "context", 1022, &detail), KVF_OK);
    cr_assert_str_eq(detail.text, "", "written only on failure");
    cr_assert_eq(kvf_check_capacity(&lengths, true, "generation", 1022, &detail),
                 KVF_ERR_CAPACITY_MISMATCH);
    cr_assert_not_null(strstr(detail.text, "generation"));
    cr_assert_not_null(strstr(detail.text, "1022"));
    cr_assert_not_null(strstr(detail.text, "1025"));
}

Test(capacity, prompt_tokens) {
    cr_assert_eq(kvf_prompt_tokens(&(kvf_lengths_t){.prompt_len = 10}), 10);
    cr_assert_eq(kvf_prompt_tokens(&(kvf_lengths_t){.prompt_len = 10, .total_input_len_cp = 40}),
                 40);
}
