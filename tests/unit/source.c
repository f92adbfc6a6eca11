/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/source.h"

#include "kvmgr/legacy_source.h"
#include "tests/support/leaks.h"
#include "tests/support/seqs.h"

#include <string.h>

static const test_group_t three[] = {{4, 0, 0, 64}, {8, 12, 0, 64}, {2, 5, 3, 64}};
static const kvf_lengths_t lengths = {.prompt_len = 22, .num_extra_kv_tokens = 3};

/* A table as text. */
static const char *text_of(const kvf_table_t *table) {
    static char text[256];
    size_t at = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < table->n_blocks; i++) {
        at += (size_t)snprintf(text + at, sizeof(text) - at, i == 0 ? "%d" : " %d",
                               (int)table->slots[i]);
    }
    return text;
}

Test(source, a_sequence_gives_its_ordinals) {
    test_seqs_t world;
    kvf_seq_copies_t copies;
    kvf_seq_t *seq = NULL;
    test_seqs_init(&world, kvf_alloc_default(), 3, three, false, 0, (kvf_cp_t){0, 0});
    kvf_seq_desc_t desc = {.lengths = lengths, .allocated_tokens = 25};
    cr_assert_eq(kvf_seq_open(world.seqs, &desc, &seq, NULL), KVF_OK);
    cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    kvf_source_t source = kvf_source_of_seq(seq);
    cr_assert(source.exposes_block_ordinals);
    static const char *const want[] = {"0 1 2 3 4 5 6", "-1 0 1 2",
                                       "0 1 -1 -1 -1 -1 -1 -1 -1 2 3 4 5"};
    for (uint32_t g = 0; g < 3; g++) {
        kvf_source_table_t table;
        cr_assert_eq(kvf_source_table(&source, g, &world.layout.groups[g], &lengths, false,
                                      kvf_alloc_default(), &table, NULL),
                     KVF_OK);
        cr_assert_null(table.own_slots);
        cr_assert_str_eq(text_of(&table.table), want[g], "%s", text_of(&table.table));
        kvf_source_table_cleanup(kvf_alloc_default(), &table);
    }
    kvf_seq_close(seq);
    test_seqs_end(&world);
    check_leaks();
}

/* One request as managers of every kind would tell it: the same pages at the same ordinals. */
Test(source, lists_become_the_same_table) {
    static const int32_t chain[] = {20, 21, 22, 23, 24, 25, 26}; /* 6 of the prompt, 1 of scratch */
    static const int32_t resident[] = {31, 32, 33};              /* ordinal 0 was removed */
    static const int32_t dangling[] = {9, 9, 9, 9, 9, 9, 9, 9, 9, 49, 50, 51, 52};
    const kvf_legacy_list_t lists[] = {
        {.ids = chain, .n_ids = 7},
        {.ids = resident, .n_ids = 3},
        {.ids = dangling, .n_ids = 13, .front_removed = 9, .has_front_removed = true}};
    static const char *const want[] = {"20 21 22 23 24 25", "-1 31 32",
                                       "-1 -1 -1 -1 -1 -1 -1 -1 -1 49 50"};
    kvf_layout_t layout;
    kvf_source_t source = kvf_source_of_lists(lists);
    test_layout(&layout, 3, three);
    cr_assert_not(source.exposes_block_ordinals);
    for (uint32_t g = 0; g < 3; g++) {
        kvf_source_table_t table;
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_source_table(&source, g, &layout.groups[g], &lengths, false,
                                      kvf_alloc_default(), &table, &detail),
                     KVF_OK, "%s", detail.text);
        cr_assert_str_eq(text_of(&table.table), want[g], "group %u: %s", g, text_of(&table.table));
        kvf_source_table_cleanup(kvf_alloc_default(), &table);
        cr_assert_null(table.table.slots);
    }
    check_leaks();
}

Test(source, lists_that_cannot_be_understood) {
    static const int32_t ids[16] = {1, 2, -3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    static const struct {
        kvf_legacy_list_t list;
        uint32_t group;
        int64_t prompt;
        kvf_status_t want;
    } bad[] = {
        {{.ids = ids, .n_ids = 3}, 0, 22, KVF_ERR_INVALID}, /* a negative id */
        {{.ids = ids + 3, .n_ids = 9}, 0, 22, KVF_ERR_COUNT_MISMATCH},
        {{.ids = ids + 3, .n_ids = 5}, 1, 22, KVF_ERR_COUNT_MISMATCH},
        {{.ids = ids + 3, .n_ids = 3}, 2, 22, KVF_ERR_INVALID}, /* sinks */
        {{.ids = ids + 3, .n_ids = 2, .front_removed = -2, .has_front_removed = true},
         1,
         22,
         KVF_ERR_INVALID},
        {{.ids = ids + 3, .n_ids = 2}, 0, 0, KVF_ERR_INVALID}, /* no prompt */
    };
    kvf_layout_t layout;
    test_layout(&layout, 3, three);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kvf_legacy_list_t lists[3];
        lists[bad[i].group] = bad[i].list;
        kvf_source_t source = kvf_source_of_lists(lists);
        kvf_lengths_t numbers = {.prompt_len = bad[i].prompt, .num_extra_kv_tokens = 3};
        kvf_source_table_t table = {{NULL, 77}, NULL};
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_source_table(&source, bad[i].group, &layout.groups[bad[i].group], &numbers,
                                      false, kvf_alloc_default(), &table, &detail),
                     bad[i].want, "row %zu: %s", i, detail.text);
        cr_assert_gt(strlen(detail.text), 0);
        cr_assert_eq(table.table.n_blocks, 77);
    }
}

Test(source, an_empty_list_and_no_memory) {
    kvf_layout_t layout;
    kvf_legacy_list_t lists[] = {{.n_ids = 0}};
    kvf_source_t source = kvf_source_of_lists(lists);
    kvf_source_table_t table;
    kvf_alloc_fail_t fail;
    test_layout(&layout, 1, three);
    kvf_alloc_fail_init(&fail, 1);
    cr_assert_eq(
        kvf_source_table(&source, 0, &layout.groups[0], &lengths, false, &fail.table, &table, NULL),
        KVF_OK, "nothing to allocate");
    cr_assert_eq(table.table.n_blocks, 0);
    kvf_source_table_cleanup(&fail.table, &table);
    lists[0] = (kvf_legacy_list_t){.ids = (int32_t[]){4}, .n_ids = 1};
    cr_assert_eq(
        kvf_source_table(&source, 0, &layout.groups[0], &lengths, false, &fail.table, &table, NULL),
        KVF_ERR_NO_MEMORY);
    cr_assert_eq(
        kvf_source_table(&source, 0, &layout.groups[0], &lengths, false, &fail.table, &table, NULL),
        KVF_OK);
    kvf_source_table_cleanup(&fail.table, &table);
    cr_assert_eq(fail.live, 0);
}
