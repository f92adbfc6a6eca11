/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/plan.h"

#include "../support/cluster.h"

#include <criterion/criterion.h>
#include <stdlib.h>

/* A plan for a prompt of 40 tokens: "full" wants ordinals 0..4, "swa" (window 24) 2..4. */
static kvf_layout_t layout;
static kvf_plan_t plan;
static const int64_t n_pages[KVF_MAX_GROUPS] = {100, 50};
static kvf_detail_t detail;

static void begin(void) {
    kvf_wanted_t wanted[KVF_MAX_GROUPS];
    const kvf_lengths_t lengths = {.prompt_len = 40};
    layout = cluster_layout();
    for (uint32_t g = 0; g < 2; g++) {
        cr_assert_eq(kvf_wanted_init(&lengths, 8, layout.groups[g].window, 0, 0, (kvf_cp_t){1, 0},
                                     (kvf_cp_t){1, 0}, &wanted[g], NULL),
                     KVF_OK);
    }
    cr_assert_eq(kvf_plan_init(&plan, &layout, wanted, 40, kvf_alloc_default()), KVF_OK);
}

static kvf_status_t grant(uint32_t group_idx, size_t n, uint64_t *ordinals, uint32_t *slots) {
    uint64_t generations[8];
    Kvf__Wire__Grant message;
    kvf__wire__grant__init(&message);
    for (size_t i = 0; i < n; i++) {
        generations[i] = 1000 + ordinals[i];
    }
    message.group_idx = group_idx;
    message.n_ordinals = message.n_slots = message.n_generations = n;
    message.ordinals = ordinals;
    message.slots = slots;
    message.generations = generations;
    return kvf_plan_grant(&plan, &message, n_pages, &detail);
}

static int32_t source[2][5] = {{10, 11, 12, 13, 14}, {-1, -1, 22, 23, 24}};
static int32_t *const sources[] = {source[0], source[1]};

Test(plan, pieces_lie_where_layers_lie) {
    begin();
    cr_assert_eq(grant(1, 3, (uint64_t[]){4, 2, 3}, (uint32_t[]){34, 32, 33}), KVF_OK);
    cr_assert_eq(grant(0, 5, (uint64_t[]){0, 1, 2, 3, 4}, (uint32_t[]){90, 91, 92, 93, 94}),
                 KVF_OK);
    cr_assert_eq(kvf_plan_close(&plan, false, &detail), KVF_OK, "%s", detail.text);
    cr_expect_eq(plan.n_pages, 8);
    /* Layers 1 to 2: the first of "full" (ids 1, 3), the second of "swa" (ids 0, 2, 4). A layer of
     * a block: 8 tokens, k and v, bf16: "full" has 2 heads of 64, "swa" 1 head of 72. */
    const uint64_t full = 8 * 2 * 2 * 2 * 64, swa = 8 * 2 * 2 * 72;
    const kvf_plan_part_t part = {1, 3, 0, 40, NULL};
    kvf_plan_cursor_t cursor = {0};
    kvf_piece_t piece;
    int32_t slot;
    for (int i = 0; i < 8; i++) {
        uint32_t g = i < 5 ? 0 : 1;
        int ordinal = i < 5 ? i : i - 3;
        cr_assert(kvf_plan_next(&plan, sources, &part, &cursor, &piece, &slot));
        cr_expect_eq(piece.group_idx, g);
        cr_expect_eq(piece.ordinal, ordinal);
        cr_expect_eq(slot, source[g][ordinal]);
        cr_expect_eq(piece.slot, (g == 0 ? 90 : 30) + ordinal);
        cr_expect_eq(piece.generation, 1000U + (unsigned)ordinal);
        cr_expect_eq(piece.offset, g == 0 ? 0 : swa);
        cr_expect_eq(piece.bytes, g == 0 ? full : swa);
    }
    cr_expect_not(kvf_plan_next(&plan, sources, &part, &cursor, &piece, &slot));
    kvf_plan_cleanup(&plan);
}

Test(plan, grants_that_are_refused) {
    begin();
    cr_expect_eq(grant(2, 1, (uint64_t[]){0}, (uint32_t[]){0}), KVF_ERR_INVALID);
    cr_expect_eq(grant(0, 1, (uint64_t[]){5}, (uint32_t[]){0}), KVF_ERR_INVALID,
                 "beyond the prompt");
    cr_expect_eq(grant(1, 1, (uint64_t[]){1}, (uint32_t[]){0}), KVF_ERR_INVALID,
                 "behind the window");
    cr_expect_eq(grant(1, 1, (uint64_t[]){2}, (uint32_t[]){50}), KVF_ERR_INVALID,
                 "outside the region");
    cr_expect_eq(grant(0, 2, (uint64_t[]){3, 3}, (uint32_t[]){1, 2}), KVF_ERR_INVALID, "twice");
    kvf_plan_cleanup(&plan);
    begin();
    cr_assert_eq(grant(0, 2, (uint64_t[]){0, 1}, (uint32_t[]){7, 7}), KVF_OK);
    cr_expect_eq(kvf_plan_close(&plan, true, &detail), KVF_ERR_INVALID,
                 "one slot for two ordinals");
    kvf_plan_cleanup(&plan);
}

/* Blocks of 8: 0..4 of "full", 2..4 of "swa". A part brings those that its tokens complete. */
Test(plan, a_part_brings_the_blocks_that_it_completes) {
    static const struct {
        int64_t first, end;
        const char *full, *swa;
    } parts[] = {{0, 7, "", ""},      {0, 8, "0", ""},         {7, 8, "0", ""},    {8, 15, "", ""},
                 {7, 25, "012", "2"}, {8, 24, "12", "2"},      {31, 32, "3", "3"}, {32, 39, "", ""},
                 {39, 40, "4", "4"},  {0, 40, "01234", "234"}, {40, 40, "", ""}};
    begin();
    cr_assert_eq(grant(0, 5, (uint64_t[]){0, 1, 2, 3, 4}, (uint32_t[]){0, 1, 2, 3, 4}), KVF_OK);
    cr_assert_eq(grant(1, 3, (uint64_t[]){2, 3, 4}, (uint32_t[]){2, 3, 4}), KVF_OK);
    cr_assert_eq(kvf_plan_close(&plan, false, &detail), KVF_OK);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        const kvf_plan_part_t part = {0, 5, parts[i].first, parts[i].end, NULL};
        char came[2][8] = {"", ""};
        kvf_plan_cursor_t cursor = {0};
        kvf_piece_t piece;
        int32_t slot;
        while (kvf_plan_next(&plan, sources, &part, &cursor, &piece, &slot)) {
            size_t n = strlen(came[piece.group_idx]);
            cr_assert(n < 7);
            came[piece.group_idx][n] = (char)('0' + piece.ordinal);
        }
        cr_expect_str_eq(came[0], parts[i].full, "part %zu", i);
        cr_expect_str_eq(came[1], parts[i].swa, "part %zu", i);
    }
    kvf_plan_cleanup(&plan);
}

Test(plan, a_prompt_that_ends_inside_a_block) {
    cr_expect_eq(kvf_plan_whole_blocks(36, 37, 8), 4);
    cr_expect_eq(kvf_plan_whole_blocks(37, 37, 8), 5);
    cr_expect_eq(kvf_plan_whole_blocks(3, 3, 8), 1);
    cr_expect_eq(kvf_plan_whole_blocks(0, 3, 8), 0);
    cr_expect_eq(kvf_plan_whole_blocks(32, 32, 8), 4);
}

Test(plan, what_is_missing_is_named) {
    begin();
    cr_assert_eq(grant(0, 4, (uint64_t[]){0, 1, 2, 4}, (uint32_t[]){0, 1, 2, 4}), KVF_OK);
    cr_assert_eq(grant(1, 3, (uint64_t[]){2, 3, 4}, (uint32_t[]){2, 3, 4}), KVF_OK);
    cr_expect_eq(kvf_plan_close(&plan, false, &detail), KVF_ERR_UNCOVERED);
    cr_expect_not_null(strstr(detail.text, "destination missing in group full: 3"), "%s",
                       detail.text);
    kvf_plan_cleanup(&plan);

    const kvf_plan_part_t part = {1, 2, 0, 40, NULL};
    kvf_plan_cursor_t cursor = {0};
    kvf_piece_t piece;
    int32_t slot;
    begin();
    cr_assert_eq(grant(0, 3, (uint64_t[]){0, 1, 4}, (uint32_t[]){0, 1, 4}), KVF_OK);
    cr_assert_eq(grant(1, 1, (uint64_t[]){2}, (uint32_t[]){2}), KVF_OK);
    cr_expect_eq(kvf_plan_close(&plan, true, &detail), KVF_OK);
    cr_expect_eq(plan.n_pages, 4);
    for (int i = 0; i < 3; i++) {
        cr_assert(kvf_plan_next(&plan, sources, &part, &cursor, &piece, &slot));
        cr_expect_eq(piece.ordinal, i < 2 ? i : 4);
    }
    cr_expect_not(kvf_plan_next(&plan, sources, &part, &cursor, &piece, &slot));
    kvf_plan_cleanup(&plan);
}

Test(plan, long_lists_are_cut) {
    kvf_page_ref_t missing[1000];
    char text[KVF_DETAIL_BYTES];
    layout = cluster_layout();
    for (int i = 0; i < 1000; i++) {
        missing[i] = (kvf_page_ref_t){0, 1000000 + i, -1};
    }
    kvf_missing_text(text, sizeof(text), &layout, "source", missing, 1000);
    cr_expect_not_null(strstr(text, "1000000, 1000001"));
    const char *tail = strstr(text, " and ");
    cr_assert_not_null(tail);
    int left = atoi(tail + 5), commas = 0;
    for (const char *c = text; c < tail; c++) {
        commas += *c == ',';
    }
    cr_expect_eq(left + commas + 1, 1000);
}
