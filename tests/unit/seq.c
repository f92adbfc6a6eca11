/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/seq.h"

#include "tests/support/seq_scene.h"

Test(seq, a_second_definition_of_capacity_is_refused_on_both_sides) {
    for (int side = 0; side < 2; side++) {
        start(side == 1);
        kvf_lengths_t lengths = numbers(1020, 3, 2);
        kvf_seq_desc_t desc = {.lengths = lengths};
        kvf_seq_t *seq = NULL;
        kvf_detail_t detail = {""};
        int64_t right = side == 1 ? 1025 : 1022;
        for (int64_t allocated = 1015; allocated < 1030; allocated++) {
            desc.allocated_tokens = allocated;
            kvf_status_t want = allocated == right ? KVF_OK : KVF_ERR_CAPACITY_MISMATCH;
            cr_assert_eq(kvf_seq_open(world.seqs, &desc, &seq, &detail), want);
        }
        cr_assert_not_null(strstr(detail.text, "1029"), "%s", detail.text);
        cr_assert_not_null(strstr(detail.text, side == 1 ? "1025" : "1022"), "%s", detail.text);
        cr_assert_not_null(strstr(detail.text, side == 1 ? "generation" : "context"));
        kvf_seq_close(seq);
        end();
    }
}

Test(seq, open_refuses_what_it_cannot_mean) {
    start(false);
    static const struct {
        int64_t prompt, allocated, n_ids, max_cached;
        const char *word;
    } bad[] = {{0, 0, 0, 0, "prompt_len"},           {20, 20, 3, 21, "max_cached_tokens"},
               {20, 20, 3, -1, "max_cached_tokens"}, {20, 20, 2, 0, "2 content ids"},
               {20, 20, 4, 0, "4 content ids"},      {20, 20, -1, 0, "-1 content ids"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kvf_seq_desc_t desc = {.lengths = numbers(bad[i].prompt, 0, 0),
                               .allocated_tokens = bad[i].allocated,
                               .content_ids = (int64_t[]){1, 2, 3, 4},
                               .n_content_ids = bad[i].n_ids,
                               .max_cached_tokens = bad[i].max_cached};
        kvf_seq_t *seq = NULL;
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_seq_open(world.seqs, &desc, &seq, &detail), KVF_ERR_INVALID, "row %zu", i);
        cr_assert_not_null(strstr(detail.text, bad[i].word), "row %zu: %s", i, detail.text);
        cr_assert_null(seq);
    }
    end();
}

Test(seq, create_refuses_numbers) {
    static const struct {
        kvf_cp_t cp;
        int64_t pages, piece;
        const char *word;
    } bad[] = {{{2, 2}, 5, 8, "rank"},   {{-1, 0}, 5, 8, "size"},
               {{0, 1}, 5, 8, "rank"},   {{1, -1}, 5, 8, "rank"},
               {{1, 0}, 0, 8, "g0"},     {{1, 0}, INT64_C(1) << 31, 8, "g0"},
               {{1, 0}, 5, -1, "piece"}, {{INT64_MAX, 0}, 5, 8, "size"}};
    kvf_layout_t layout;
    kvf_pages_t *pages[3] = {NULL};
    test_layout(&layout, 1, three);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kvf_seqs_config_t config = {.layout = &layout,
                                    .n_pages = &bad[i].pages,
                                    .store = kvf_store_over_pages(pages),
                                    .cp = bad[i].cp,
                                    .piece_tokens = bad[i].piece};
        kvf_seqs_t *seqs = NULL;
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_seqs_create(kvf_alloc_default(), &config, &seqs, &detail),
                     KVF_ERR_INVALID);
        cr_assert_not_null(strstr(detail.text, bad[i].word), "row %zu: %s", i, detail.text);
        cr_assert_null(seqs);
    }
    kvf_seqs_destroy(NULL);
    kvf_seq_close(NULL);
}

Test(seq, reserve_binds_what_is_live_and_the_scratch) {
    start(true);
    /* P = 20: the next query sees 9.. in g1 and 16.. in g2, besides its sinks 0..2. */
    kvf_seq_t *seq = open_with(numbers(20, 3, 2), 25, NULL, 20);
    check_bound(seq, "", "", "");
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    cr_assert_eq(copies.n, 0);
    check_bound(seq, "0 1 2 3 4 5 6", "1 2 3", "0 1 8 9 10 11 12");
    cr_assert_eq(free_pages(0), 64 - 7);
    cr_assert_eq(free_pages(1), 64 - 3);
    cr_assert_eq(free_pages(2), 64 - 7);
    cr_assert_eq(kvf_seq_tokens(seq), 0);
    int32_t fifth = slot_of(seq, 0, 5);
    append(seq, 25);
    check_bound(seq, "0 1 2 3 4 5 6", "1 2 3", "0 1 8 9 10 11 12");
    cr_assert_eq(kvf_seq_rewind(seq, 20), KVF_OK);
    cr_assert_eq(slot_of(seq, 0, 5), fifth, "the reserve stays");
    append(seq, 9); /* 29: beyond the reserve */
    check_bound(seq, "0 1 2 3 4 5 6 7", "1 2 3", "0 1 8 9 10 11 12 13 14");
    cr_assert_eq(kvf_seq_rewind(seq, 21), KVF_OK);
    check_bound(seq, "0 1 2 3 4 5 6", "1 2 3", "0 1 8 9 10 11 12");
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK, "again: nothing to do");
    cr_assert_eq(free_pages(2), 64 - 7);
    kvf_seq_close(seq);
    end();
}

Test(seq, chunks_bind_as_they_come_and_slide_out) {
    start(false);
    kvf_seq_t *seq = open_prompt(22);
    append(seq, 9);
    check_bound(seq, "0 1 2", "0 1", "0 1 2 3 4");
    cr_assert_eq(kvf_seq_slide(seq, 9), KVF_OK); /* g2 sees 5.. and 0..2 */
    check_bound(seq, "0 1 2", "0 1", "0 1 2 3 4");
    append(seq, 6);
    check_bound(seq, "0 1 2 3", "0 1", "0 1 2 3 4 5 6 7");
    cr_assert_eq(kvf_seq_slide(seq, 15), KVF_OK); /* g1 sees 4.., g2 11.. */
    check_bound(seq, "0 1 2 3", "0 1", "0 1 5 6 7");
    append(seq, 7);
    cr_assert_eq(kvf_seq_slide(seq, 21), KVF_OK, "one less than there are: 10.. and 17..");
    check_bound(seq, "0 1 2 3 4 5", "1 2", "0 1 8 9 10");
    cr_assert_eq(kvf_seq_rewind(seq, 20), KVF_ERR_INVALID, "what it sees has slid out");
    cr_assert_eq(kvf_seq_rewind(seq, 23), KVF_ERR_INVALID, "longer");
    cr_assert_eq(kvf_seq_slide(seq, 23), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_slide(seq, -1), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_append(seq, -1, &copies), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_append(seq, (INT64_C(1) << 40) - 21, &copies), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_tokens(seq), 22);
    kvf_seq_close(seq);
    end();
}

Test(seq, speculation_to_any_accepted_length) {
    for (int64_t extra = 0; extra <= 8; extra++) {
        for (int64_t accepted = 0; accepted <= extra; accepted++) {
            start(true);
            kvf_seq_t *seq = open_with(numbers(13, 2, extra), 15 + extra, NULL, 13);
            cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
            append(seq, 13);
            for (int64_t step = 0, tokens = 13; step < 4; step++) {
                append(seq, extra);
                tokens += accepted;
                cr_assert_eq(kvf_seq_rewind(seq, tokens), KVF_OK);
                cr_assert_eq(kvf_seq_slide(seq, tokens), KVF_OK);
                int64_t reach = tokens > 15 + extra ? tokens : 15 + extra;
                cr_assert_eq(kvf_seq_table(seq, 0).n_blocks, (reach + 3) / 4);
                cr_assert_eq(kvf_seq_table(seq, 2).n_blocks, (reach + 1) / 2);
                for (int64_t p = tokens - 4; p < tokens; p++) {
                    cr_assert_geq(slot_of(seq, 2, p / 2), 0, "E %ld: token %ld of %ld", (long)extra,
                                  (long)p, (long)tokens);
                }
                cr_assert_eq(kvf_seq_rewind(seq, tokens - 1), KVF_ERR_INVALID);
            }
            kvf_seq_close(seq);
            end();
        }
    }
}

Test(seq, forks_share_and_copy_what_they_write) {
    start(false);
    kvf_seq_t *seq = open_prompt(32), *child = NULL, *third = NULL;
    append(seq, 14);
    cr_assert_eq(kvf_seq_fork(seq, &child), KVF_OK);
    cr_assert_eq(kvf_seq_fork(child, &third), KVF_OK);
    for (uint32_t g = 0; g < 3; g++) {
        for (int64_t i = 0; i < kvf_seq_table(seq, g).n_blocks; i++) {
            cr_assert_eq(slot_of(child, g, i), slot_of(seq, g, i));
            cr_assert_eq(slot_of(third, g, i), slot_of(seq, g, i));
        }
    }
    cr_assert_eq(free_pages(0), 60);
    /* Token 14 lies in a shared block of g0 and g1, and in a new one of g2. */
    int32_t was[2] = {slot_of(child, 0, 3), slot_of(child, 1, 1)};
    append(child, 1);
    cr_assert_eq(copies.n, 2);
    for (uint32_t g = 0; g < 2; g++) {
        cr_assert_eq(copies.list[g].group_idx, g);
        cr_assert_eq(copies.list[g].from_slot, was[g]);
        cr_assert_eq(copies.list[g].to_slot, slot_of(child, g, g == 0 ? 3 : 1));
        cr_assert_neq(copies.list[g].to_slot, was[g]);
        cr_assert_eq(slot_of(seq, g, g == 0 ? 3 : 1), was[g]);
    }
    append(third, 3);
    cr_assert_eq(copies.n, 2);
    append(seq, 1);
    cr_assert_eq(copies.n, 0, "the last one writes in place");
    cr_assert_eq(slot_of(seq, 0, 3), was[0]);
    cr_assert_eq(slot_of(seq, 0, 2), slot_of(child, 0, 2), "whole blocks stay shared");
    /* Back into a shared whole block: token 8 begins it in g0, so there is nothing to copy there.
     */
    cr_assert_eq(kvf_seq_rewind(child, 8), KVF_OK);
    append(child, 1);
    cr_assert_eq(copies.n, 0);
    cr_assert_neq(slot_of(child, 0, 2), slot_of(seq, 0, 2));
    cr_assert_eq(slot_of(child, 0, 1), slot_of(seq, 0, 1));
    kvf_seq_close(seq);
    kvf_seq_close(third);
    kvf_seq_close(child);
    end();
}

Test(seq, a_fork_has_no_part_in_the_reserve) {
    start(true);
    kvf_seq_t *seq = open_with(numbers(13, 0, 20), 33, NULL, 0), *child = NULL;
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    append(seq, 13);
    cr_assert_eq(kvf_seq_fork(seq, &child), KVF_OK);
    cr_assert_eq(kvf_seq_table(child, 0).n_blocks, 4);
    append(child, 4);
    cr_assert_eq(copies.n, 3);
    cr_assert_neq(slot_of(child, 0, 4), slot_of(seq, 0, 4));
    kvf_seq_close(child);
    kvf_seq_close(seq);
    end();
}

/* Pools that just hold one prompt of 16 and little more. */
static const test_group_t tight[] = {{4, 0, 0, 6}, {8, 12, 0, 3}};

static void start_tight(void) {
    test_seqs_init(&world, kvf_alloc_default(), 2, tight, false, PIECE, whole);
}

Test(seq, too_few_pages_change_nothing) {
    start_tight();
    kvf_seq_t *seq = open_prompt(16),
              *other = open_with(numbers(16, 0, 0), 16, (int64_t[]){1, 2}, 16);
    append(seq, 15);
    append(other, 3);
    cr_assert_eq(kvf_seq_append(other, 2, &copies), KVF_OK);
    cr_assert_eq(free_pages(0), 0);
    cr_assert_eq(free_pages(1), 0);
    cr_assert_eq(kvf_seq_append(seq, 2, &copies), KVF_ERR_AGAIN);
    cr_assert_eq(kvf_seq_tokens(seq), 15);
    cr_assert_str_eq(bound(seq, 0), "0 1 2 3");
    cr_assert_eq(kvf_seq_append(seq, 1, &copies), KVF_OK, "there is room in its last block");
    cr_assert_eq(kvf_seq_append(seq, 100, &copies), KVF_ERR_TOO_LARGE);
    kvf_seq_preempt(other);
    append(seq, 1);
    kvf_seq_close(other);
    kvf_seq_close(seq);
    end();
}

Test(seq, a_group_that_fails_gives_back_what_the_others_took) {
    static const test_group_t uneven[] = {{4, 0, 0, 60}, {8, 12, 0, 1}};
    test_seqs_init(&world, kvf_alloc_default(), 2, uneven, false, PIECE, whole);
    kvf_seq_t *seq = open_prompt(16), *other = open_prompt(16);
    append(other, 1);
    cr_assert_eq(kvf_seq_append(seq, 8, &copies), KVF_ERR_AGAIN);
    cr_assert_eq(free_pages(0), 59);
    check_leaks();
    kvf_seq_close(seq);
    kvf_seq_close(other);
    end();
}

/* What selection gives for a prompt. */
static const char *selected(const kvf_seq_t *seq, uint32_t g, int64_t prompt) {
    static char text[256];
    kvf_lengths_t lengths = numbers(prompt, 0, 0);
    kvf_wanted_t wanted, live;
    kvf_pair_t pairs[64];
    cr_assert_eq(kvf_wanted_init(&lengths, three[g].tokens_per_block, three[g].window,
                                 three[g].sinks, 0, whole, whole, &wanted, NULL),
                 KVF_OK);
    live = kvf_wanted_live(&wanted, true);
    kvf_table_t table = kvf_seq_table(seq, g);
    int64_t n = kvf_select(&table, &live, true, pairs);
    size_t at = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < n; i++) {
        cr_assert_eq(pairs[i].source, table.slots[pairs[i].ordinal]);
        at += (size_t)snprintf(text + at, sizeof(text) - at, at == 0 ? "%ld" : " %ld",
                               (long)pairs[i].ordinal);
    }
    return text;
}

Test(seq, eviction_ahead_of_and_behind_the_rule) {
    start(false);
    kvf_seq_t *seq = open_prompt(24);
    append(seq, 24);
    cr_assert_str_eq(selected(seq, 1, 24), "1 2", "behind: 0 is bound, and stale");
    cr_assert_str_eq(selected(seq, 2, 24), "0 1 10 11");
    cr_assert_eq(kvf_seq_drop(seq, 2, (kvf_span_t){1, 11}), KVF_OK); /* ahead: 1 and 10 are live */
    cr_assert_str_eq(selected(seq, 2, 24), "0 11");
    cr_assert_eq(kvf_seq_rewind(seq, 21), KVF_ERR_INVALID, "block 10 would be written again");
    cr_assert_eq(kvf_seq_slide(seq, 24), KVF_OK);
    cr_assert_str_eq(selected(seq, 1, 24), "1 2");
    check_bound(seq, "0 1 2 3 4 5", "1 2", "0 11");
    cr_assert_eq(kvf_seq_drop(seq, 3, (kvf_span_t){0, 0}), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_drop(seq, 1, (kvf_span_t){-1, 1}), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_drop(seq, 1, (kvf_span_t){2, 1}), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_drop(seq, 1, (kvf_span_t){2, 4}), KVF_ERR_INVALID, "not whole yet");
    kvf_seq_close(seq);
    end();
}

Test(seq, a_rank_binds_its_own_ordinals) {
    for (int64_t rank = 0; rank < 3; rank++) {
        test_seqs_init(&world, kvf_alloc_default(), 3, three, true, PIECE, (kvf_cp_t){3, rank});
        kvf_lengths_t lengths = {.prompt_len = 8, .draft_len = 2, .total_input_len_cp = 24};
        kvf_seq_desc_t desc = {.lengths = lengths, .allocated_tokens = 26};
        kvf_seq_t *seq = NULL;
        cr_assert_eq(kvf_seq_open(world.seqs, &desc, &seq, NULL), KVF_OK);
        cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
        static const char *const want[3][3] = {
            {"0 3 6", "3", "0 12"}, {"1 4", "1", "1 10"}, {"2 5", "2", "11"}};
        check_bound(seq, want[rank][0], want[rank][1], want[rank][2]);
        append(seq, 24);
        append(seq, 7); /* 31 */
        static const char *const after[3] = {"0 12 15", "1 10 13", "11 14"};
        cr_assert_str_eq(bound(seq, 2), after[rank], "%s", bound(seq, 2));
        cr_assert_eq(kvf_seq_slide(seq, 31), KVF_OK); /* 27.. */
        static const char *const slid[3] = {"0 15", "1 13", "14"};
        cr_assert_str_eq(bound(seq, 2), slid[rank], "%s", bound(seq, 2));
        kvf_seq_close(seq);
        end();
    }
}

Test(seq, sliding_makes_prompts_fit_that_would_not) {
    static const test_group_t small[] = {{2, 6, 2, 6}};
    test_seqs_init(&world, kvf_alloc_default(), 1, small, false, PIECE, whole);
    kvf_lengths_t lengths = numbers(64, 0, 0);
    int64_t need;
    cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, 4, &need, NULL), KVF_OK);
    cr_assert_eq(need, 6); /* a sink block; 9 tokens that touch 5 */
    cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, 6, &need, NULL), KVF_ERR_TOO_LARGE);
    for (int slides = 0; slides < 2; slides++) {
        kvf_seq_t *seq = open_prompt(64);
        kvf_status_t status = KVF_OK;
        while (status == KVF_OK && kvf_seq_tokens(seq) < 64) {
            status = kvf_seq_append(seq, 4, &copies);
            if (status == KVF_OK && slides == 1) {
                cr_assert_eq(kvf_seq_slide(seq, kvf_seq_tokens(seq)), KVF_OK);
            }
        }
        cr_assert_eq(status, slides == 1 ? KVF_OK : KVF_ERR_AGAIN);
        if (slides == 1) {
            cr_assert_str_eq(bound(seq, 0), "0 29 30 31", "live for P: 59..");
        }
        kvf_seq_close(seq);
    }
    end();
}

Test(seq, need_by_hand) {
    static const struct {
        int64_t prompt, drafts, extra, chunk, want[3];
    } rows[] = {
        {20, 0, 0, 0, {5, 3, 4 + 3}},
        /* and what a prefix brings that is dead for P */ {20, 3, 2, 0, {7, 3, 7}},
        {20, 0, 0, 1, {5, 3, 2 + 3}},
        {20, 0, 0, 5, {5, 3, 2 + 5}},
        {3, 0, 0, 100, {1, 1, 2}},
        {1000, 0, 0, 10, {250, 4, 2 + 8}},
        {1000, 0, 9, 1, {253, 4, 2 + 7}},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        static const test_group_t large[] = {{4, 0, 0, 1000}, {8, 12, 0, 1000}, {2, 5, 3, 1000}};
        test_seqs_init(&world, kvf_alloc_default(), 3, large, rows[i].chunk == 0 && i == 1, PIECE,
                       whole);
        kvf_lengths_t lengths = numbers(rows[i].prompt, rows[i].drafts, rows[i].extra);
        int64_t pages[3];
        cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, rows[i].chunk, pages, NULL), KVF_OK);
        for (int g = 0; g < 3; g++) {
            cr_expect_eq(pages[g], rows[i].want[g], "row %zu group %d: %ld", i, g, (long)pages[g]);
        }
        end();
    }
}

Test(seq, need_says_at_once_what_no_pool_can_hold) {
    start(true);
    kvf_lengths_t lengths = numbers(4 * 64, 0, 1);
    int64_t pages[3] = {-7, -7, -7};
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, 0, pages, &detail), KVF_ERR_TOO_LARGE);
    cr_assert_not_null(strstr(detail.text, "65 pages of group g0"), "%s", detail.text);
    cr_assert_eq(pages[0], -7);
    cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, -1, pages, &detail), KVF_ERR_INVALID);
    lengths.prompt_len = 0;
    cr_assert_eq(kvf_seqs_need(world.seqs, &lengths, 0, pages, &detail), KVF_ERR_INVALID);
    kvf_seq_t *seq = open_with(numbers(4 * 64, 0, 1), 4 * 64 + 1, NULL, 0);
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_ERR_TOO_LARGE);
    check_bound(seq, "", "", "");
    kvf_seq_close(seq);
    end();
}

/* Everything that allocates, in a row. @return Whether nothing failed. */
static bool live_a_life(const kvf_alloc_t *alloc) {
    kvf_pages_t *pages[3];
    kvf_layout_t layout;
    int64_t n_pages[3] = {64, 64, 64}, ids[] = {1, 2, 3, 4};
    kvf_seqs_t *seqs = NULL;
    kvf_seq_t *seq = NULL, *child = NULL;
    kvf_detail_t detail;
    test_layout(&layout, 3, three);
    for (int g = 0; g < 3; g++) {
        cr_assert_eq(kvf_pages_create(kvf_alloc_default(), 64, &pages[g]), KVF_OK);
    }
    kvf_seqs_config_t config = {.layout = &layout,
                                .n_pages = n_pages,
                                .store = kvf_store_over_pages(pages),
                                .piece_tokens = PIECE};
    kvf_seq_desc_t desc = {.lengths = numbers(30, 0, 0),
                           .allocated_tokens = 30,
                           .content_ids = ids,
                           .n_content_ids = 4,
                           .max_cached_tokens = 30};
    kvf_status_t status = kvf_seqs_create(alloc, &config, &seqs, &detail);
    for (int round = 0; status == KVF_OK && round < 2; round++) {
        status = kvf_seq_open(seqs, &desc, &seq, &detail);
        if (status == KVF_OK) {
            status = kvf_seq_append(seq, 5, &copies);
        }
        if (status == KVF_OK && (status = kvf_seq_fork(seq, &child)) == KVF_OK) {
            int64_t held = 64 - kvf_pages_count(pages[0], KVF_PAGE_FREE);
            status = kvf_seq_append(child, 40, &copies);
            cr_assert(status == KVF_OK || held == 64 - kvf_pages_count(pages[0], KVF_PAGE_FREE));
            kvf_seq_close(child);
        }
        if (status == KVF_OK) {
            status = kvf_seq_reserve(seq, &copies);
        }
        if (status == KVF_OK) {
            cr_assert_eq(kvf_seq_append(seq, 30 - kvf_seq_tokens(seq), &copies), KVF_OK);
            cr_assert_eq(kvf_seq_publish(seq, 30), KVF_OK);
        }
        kvf_seq_close(seq);
        seq = NULL;
        desc.max_cached_tokens = 17;
    }
    kvf_seqs_destroy(seqs);
    for (int g = 0; g < 3; g++) {
        cr_assert_eq(kvf_pages_audit(pages[g], NULL), KVF_OK);
        cr_assert_eq(kvf_pages_count(pages[g], KVF_PAGE_FREE), 64);
        kvf_pages_destroy(pages[g]);
    }
    cr_assert(status == KVF_OK || status == KVF_ERR_NO_MEMORY);
    return status == KVF_OK;
}

Test(seq, every_allocation_may_fail) {
    uint64_t n = 1;
    for (bool done = false; !done; n++) {
        kvf_alloc_fail_t fail;
        kvf_alloc_fail_init(&fail, n);
        done = live_a_life(&fail.table);
        cr_assert_eq(fail.live, 0, "failure %lu leaks", (unsigned long)n);
        cr_assert_eq(done, fail.calls < n);
    }
    cr_assert_gt(n, 20);
    check_leaks();
}
