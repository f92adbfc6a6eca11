/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/seq.h"

#include "tests/support/seq_scene.h"

Test(seq_reuse, a_full_hit_with_a_partial_last_block) {
    start(true);
    publish(21, NULL);
    cr_assert_eq(free_pages(0), 64 - 6);
    cr_assert_eq(kvf_pages_count(world.pages[0], KVF_PAGE_CACHED), 6);
    kvf_seq_t *seq = open_with(numbers(21, 3, 0), 24, NULL, 21);
    cr_assert_eq(kvf_seq_cached_tokens(seq), 21);
    cr_assert_eq(kvf_seq_tokens(seq), 21);
    check_bound(seq, "0 1 2 3 4 5", "1 2", "0 1 8 9 10"); /* live for P only: 10.., 17.. */
    int32_t last = slot_of(seq, 0, 5);
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    cr_assert_eq(copies.n, 3, "all three last blocks are shared with the index");
    cr_assert_eq(copies.list[0].from_slot, last);
    cr_assert_eq(copies.list[0].to_slot, slot_of(seq, 0, 5));
    cr_assert_eq(kvf_pages_write_begin(world.pages[0], copies.list[0].to_slot), KVF_OK, "its own");
    kvf_pages_write_end(world.pages[0], copies.list[0].to_slot);
    append(seq, 3);
    cr_assert_eq(copies.n, 0);
    kvf_seq_t *again = open_with(numbers(21, 0, 0), 21, NULL, 21);
    cr_assert_eq(kvf_seq_cached_tokens(again), 21, "the index still has them");
    cr_assert_eq(slot_of(again, 0, 5), last);
    cr_assert_eq(kvf_seq_reserve(again, &copies), KVF_OK);
    cr_assert_eq(copies.n, 0, "nothing will be written");
    kvf_seq_close(again);
    kvf_seq_close(seq);
    cr_assert_eq(kvf_seqs_forget(world.seqs), 0);
    cr_assert_eq(free_pages(0), 64);
    end();
}

Test(seq_reuse, the_context_side_needs_what_is_live_for_what_it_computes_next) {
    for (int side = 0; side < 2; side++) {
        start(side == 1);
        kvf_seq_t *seq = open_prompt(24);
        append(seq, 24);
        cr_assert_eq(kvf_seq_slide(seq, 24), KVF_OK); /* 13.. in g1, 20.. and the sinks in g2 */
        cr_assert_eq(kvf_seq_publish(seq, 24), KVF_OK);
        kvf_seq_close(seq);
        /* A longer prompt with the same 24 tokens, and a shorter one. */
        kvf_seq_t *longer = open_prompt(31), *shorter = open_prompt(16);
        cr_assert_eq(kvf_seq_cached_tokens(longer), 24);
        cr_assert_eq(kvf_seq_cached_tokens(shorter), 0, "5.. of g1 and 12.. of g2 have slid out");
        if (side == 1) {
            /* The next query at 31 sees 20.. in g1 and 27.. in g2. */
            check_bound(longer, "0 1 2 3 4 5", "2", "0 1");
        } else {
            check_bound(longer, "0 1 2 3 4 5", "1 2", "0 1 10 11");
        }
        kvf_seq_close(longer);
        kvf_seq_close(shorter);
        end();
    }
}

Test(seq_reuse, a_bound_on_what_is_cached_may_lie_inside_a_block) {
    start(false);
    publish(21, NULL);
    kvf_seq_t *seq = open_with(numbers(21, 0, 0), 21, NULL, 20);
    cr_assert_eq(kvf_seq_cached_tokens(seq), 20);
    kvf_seq_close(seq);
    seq = open_with(numbers(21, 0, 0), 21, NULL, 18);
    cr_assert_eq(kvf_seq_cached_tokens(seq), 18);
    check_bound(seq, "0 1 2 3 4", "0 1 2", "0 1 7 8");
    int32_t was = slot_of(seq, 0, 4);
    append(seq, 3);
    cr_assert_eq(copies.n, 2, "18 begins a block of g2");
    cr_assert_eq(copies.list[0].from_slot, was);
    kvf_seq_close(seq);
    end();
}

Test(seq_reuse, contents_differ_by_every_piece_in_front) {
    start(true);
    publish(24, (int64_t[]){7, 8, 9});
    static const struct {
        int64_t prompt, ids[4], cached;
    } rows[] = {
        {24, {7, 8, 9}, 24},     {24, {7, 8, 5}, 16}, {24, {7, 5, 9}, 8},
        {24, {5, 8, 9}, 0},      {24, {8, 7, 9}, 0},  {16, {7, 8}, 16},
        {32, {7, 8, 9, 10}, 24}, {23, {7, 8, 9}, 16}, {17, {7, 8, 9}, 16},
        {15, {7, 8}, 8},         {7, {7}, 0},         {9, {7, 8}, 8},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_seq_t *seq =
            open_with(numbers(rows[i].prompt, 0, 0), rows[i].prompt, rows[i].ids, rows[i].prompt);
        cr_assert_eq(kvf_seq_cached_tokens(seq), rows[i].cached, "row %zu: %ld", i,
                     (long)kvf_seq_cached_tokens(seq));
        kvf_seq_close(seq);
    }
    kvf_seq_desc_t silent = {
        .lengths = numbers(24, 0, 0), .allocated_tokens = 24, .max_cached_tokens = 24};
    kvf_seq_t *seq = NULL;
    cr_assert_eq(kvf_seq_open(world.seqs, &silent, &seq, NULL), KVF_OK);
    append(seq, 24);
    cr_assert_eq(kvf_seq_cached_tokens(seq), 0, "no ids, no reuse");
    cr_assert_eq(kvf_seq_publish(seq, 24), KVF_OK);
    kvf_seq_close(seq);
    end();
}

Test(seq_reuse, blocks_without_a_common_boundary_have_whole_prompts_in_common) {
    static const test_group_t primes[] = {{2000003, 0, 0, 4}, {2000029, 0, 0, 4}};
    test_seqs_init(&world, kvf_alloc_default(), 2, primes, true, PIECE, whole);
    publish(12, NULL);
    kvf_seq_t *same = open_prompt(12), *longer = open_prompt(13);
    cr_assert_eq(kvf_seq_cached_tokens(same), 12);
    cr_assert_eq(kvf_seq_cached_tokens(longer), 0);
    kvf_seq_close(same);
    kvf_seq_close(longer);
    end();
}

Test(seq_reuse, windows_alone_need_nothing_and_that_is_no_hit) {
    static const test_group_t one[] = {{4, 1, 0, 8}};
    test_seqs_init(&world, kvf_alloc_default(), 1, one, true, PIECE, whole);
    kvf_seq_t *seq = open_prompt(16); /* position 16 sees itself only */
    cr_assert_eq(kvf_seq_cached_tokens(seq), 0);
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    cr_assert_str_eq(bound(seq, 0), "");
    kvf_seq_close(seq);
    end();
}

Test(seq_reuse, publishing_in_parts_and_twice) {
    start(false);
    kvf_seq_t *seq = open_prompt(22), *twin = open_prompt(22);
    append(seq, 17);
    append(twin, 22);
    cr_assert_eq(kvf_seq_publish(seq, 18), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_publish(seq, -1), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_publish(seq, 17), KVF_OK);
    append(seq, 6);
    cr_assert_eq(kvf_seq_publish(seq, 23), KVF_ERR_INVALID, "what was generated has no ids");
    cr_assert_eq(kvf_seq_publish(twin, 22), KVF_OK, "4 and 5 of g0 are new");
    cr_assert_eq(kvf_seq_publish(seq, 22), KVF_OK);
    kvf_seq_t *hit = open_prompt(22);
    cr_assert_eq(kvf_seq_cached_tokens(hit), 22);
    for (int64_t i = 0; i < 6; i++) {
        cr_assert_eq(slot_of(hit, 0, i), slot_of(i < 4 ? seq : twin, 0, i), "ordinal %ld", (long)i);
    }
    kvf_seq_close(hit);
    kvf_seq_close(seq);
    kvf_seq_close(twin);
    cr_assert_eq(free_pages(0), 64 - 6, "duplicates are gone");
    end();
}

Test(seq_reuse, what_a_peer_writes_is_published_later) {
    start(true);
    kvf_seq_t *seq = open_prompt(20);
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    append(seq, 20);
    cr_assert_eq(kvf_pages_write_begin(world.pages[1], slot_of(seq, 1, 2)), KVF_OK);
    cr_assert_eq(kvf_seq_publish(seq, 20), KVF_ERR_BUSY);
    kvf_pages_write_end(world.pages[1], slot_of(seq, 1, 2));
    cr_assert_eq(kvf_seq_publish(seq, 20), KVF_OK);
    kvf_seq_close(seq);
    seq = open_prompt(20);
    cr_assert_eq(kvf_seq_cached_tokens(seq), 20);
    kvf_seq_close(seq);
    end();
}

/* Pools that just hold one prompt of 16 and little more. */
static const test_group_t tight[] = {{4, 0, 0, 6}, {8, 12, 0, 3}};

static void start_tight(void) {
    test_seqs_init(&world, kvf_alloc_default(), 2, tight, false, PIECE, whole);
}

Test(seq_reuse, cached_pages_make_room_the_oldest_first_and_none_under_transfer) {
    start_tight();
    publish(16, (int64_t[]){1, 2}); /* 4 and 2 pages */
    kvf_seq_t *old = open_with(numbers(16, 0, 0), 16, (int64_t[]){1, 2}, 16);
    int32_t first = slot_of(old, 0, 0), third = slot_of(old, 0, 2), last = slot_of(old, 0, 3);
    kvf_seq_close(old);
    cr_assert_eq(kvf_pages_read_begin(world.pages[0], last), KVF_OK);
    kvf_seq_t *seq = open_with(numbers(16, 0, 0), 16, (int64_t[]){3, 4}, 16);
    append(seq, 12); /* 3 of 2 free and 4 cached pages */
    cr_assert_eq(kvf_pages_label(world.pages[0], last), KVF_PAGE_READING);
    cr_assert_eq(kvf_pages_label(world.pages[0], third), KVF_PAGE_HELD, "evicted, and taken");
    cr_assert_eq(kvf_pages_label(world.pages[0], first), KVF_PAGE_CACHED);
    old = open_with(numbers(16, 0, 0), 16, (int64_t[]){1, 2}, 16);
    cr_assert_eq(kvf_seq_cached_tokens(old), 8, "the front of the prefix is still there");
    cr_assert_eq(kvf_seq_append(seq, 4, &copies), KVF_ERR_AGAIN, "used, held and read");
    kvf_seq_close(old);
    kvf_seq_close(seq);
    cr_assert_eq(kvf_seqs_forget(world.seqs), 1, "the one that is read");
    kvf_pages_read_end(world.pages[0], last);
    cr_assert_eq(kvf_seqs_forget(world.seqs), 0);
    end();
}

Test(seq_reuse, a_released_page_that_is_still_read_is_no_free_page) {
    start_tight();
    kvf_seq_t *seq = open_with(numbers(8, 0, 0), 8, (int64_t[]){9}, 8);
    append(seq, 8);
    int32_t read = slot_of(seq, 0, 0);
    cr_assert_eq(kvf_pages_read_begin(world.pages[0], read), KVF_OK);
    kvf_seq_close(seq);
    publish(16, (int64_t[]){1, 2});
    seq = open_with(numbers(16, 0, 0), 16, (int64_t[]){3, 4}, 16);
    append(seq, 8); /* one page is free in g0, though two are used by nobody */
    cr_assert_eq(kvf_pages_count(world.pages[0], KVF_PAGE_CACHED), 2);
    cr_assert_eq(kvf_pages_label(world.pages[0], read), KVF_PAGE_READING);
    kvf_pages_read_end(world.pages[0], read);
    kvf_seq_close(seq);
    end();
}

Test(seq_reuse, a_pool_without_room_for_a_copy_takes_the_page_back) {
    static const test_group_t least[] = {{4, 0, 0, 2}};
    test_seqs_init(&world, kvf_alloc_default(), 1, least, false, PIECE, whole);
    kvf_seq_t *seq = open_prompt(6);
    append(seq, 6);
    cr_assert_eq(kvf_seq_publish(seq, 6), KVF_OK);
    int32_t last = slot_of(seq, 0, 1);
    cr_assert_eq(kvf_pages_read_begin(world.pages[0], last), KVF_OK);
    cr_assert_eq(kvf_seq_append(seq, 1, &copies), KVF_ERR_AGAIN, "a transfer reads it");
    kvf_pages_read_end(world.pages[0], last);
    append(seq, 1);
    cr_assert_eq(copies.n, 0);
    cr_assert_eq(slot_of(seq, 0, 1), last);
    cr_assert_eq(kvf_pages_write_begin(world.pages[0], last), KVF_OK, "the index let it go");
    kvf_pages_write_end(world.pages[0], last);
    kvf_seq_t *child = NULL;
    cr_assert_eq(kvf_seq_fork(seq, &child), KVF_OK);
    cr_assert_eq(kvf_seq_append(seq, 1, &copies), KVF_ERR_AGAIN, "another sequence needs it");
    kvf_seq_close(child);
    append(seq, 1);
    kvf_seq_close(seq);
    end();
}

Test(seq_reuse, ranks_find_their_own_part_of_a_prefix) {
    for (int64_t rank = 0; rank < 2; rank++) {
        test_seqs_init(&world, kvf_alloc_default(), 3, three, true, PIECE, (kvf_cp_t){2, rank});
        publish(24, NULL);
        kvf_seq_t *seq = open_prompt(24);
        cr_assert_eq(kvf_seq_cached_tokens(seq), 24);
        if (rank == 0) {
            check_bound(seq, "0 2 4", "2", "0 10");
        } else {
            check_bound(seq, "1 3 5", "1", "1 11");
        }
        kvf_seq_close(seq);
        end();
    }
}

Test(seq_reuse, preempt_and_resume) {
    start(false);
    kvf_seq_t *seq = open_prompt(24);
    append(seq, 18);
    cr_assert_eq(kvf_seq_publish(seq, 18), KVF_OK);
    cr_assert_eq(kvf_seq_resume(seq, 24), KVF_ERR_INVALID, "it runs");
    kvf_seq_preempt(seq);
    check_bound(seq, "", "", "");
    for (uint32_t g = 0; g < 3; g++) {
        cr_assert_eq(kvf_pages_count(world.pages[g], KVF_PAGE_HELD), 0);
    }
    cr_assert_eq(kvf_seq_resume(seq, 25), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_resume(seq, -1), KVF_ERR_INVALID);
    cr_assert_eq(kvf_seq_resume(seq, 23), KVF_OK);
    cr_assert_eq(kvf_seq_tokens(seq), 16);
    append(seq, 8);
    cr_assert_eq(kvf_seq_publish(seq, 24), KVF_OK);
    kvf_seq_close(seq);
    end();
}
