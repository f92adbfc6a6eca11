/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults of other systems, by the reports that describe them: what has to be right in tables and
 * pairs alone. Whole transfers: field_transfer.c, which also names the tests of other files.
 */
#include "kvmgr/legacy.h"
#include "kvmgr/table.h"

#include <criterion/criterion.h>

#define MAX_BLOCKS 40

static const kvf_cp_t whole = {1, 0};

static kvf_wanted_t wants(const kvf_lengths_t *lengths, int64_t block, int64_t window,
                          int64_t cached) {
    kvf_wanted_t wanted;
    cr_assert_eq(kvf_wanted_init(lengths, block, window, 0, cached, whole, whole, &wanted, NULL),
                 KVF_OK);
    return wanted;
}

/* n slots from `first` on. */
static const int32_t *count_up(int32_t *slots, int32_t first, int n) {
    for (int i = 0; i < n; i++) {
        slots[i] = first + i;
    }
    return slots;
}

static void expect_pair(const kvf_pair_t *pair, int64_t ordinal, int32_t source,
                        int32_t destination) {
    cr_expect(pair->ordinal == ordinal && pair->source == source &&
                  pair->destination == destination,
              "ordinal %ld: %d to %d, not %ld: %d to %d", (long)pair->ordinal, pair->source,
              pair->destination, (long)ordinal, source, destination);
}

/* Three drafts cross a block's edge, on the generation side only. Its nine resident blocks are the
 * prompt's eight and one of scratch; keeping the last eight would lose the prompt's first one and
 * move all others. */
Test(field, tensorrt_llm_18554_18668_the_first_prompt_block_is_not_lost) {
    const kvf_lengths_t lengths = {.prompt_len = 1020, .draft_len = 3, .num_extra_kv_tokens = 2};
    int32_t ids[2][MAX_BLOCKS], slots[2][MAX_BLOCKS];
    kvf_table_t tables[2];
    kvf_pair_t pairs[MAX_BLOCKS];
    for (int side = 0; side < 2; side++) {
        int64_t tokens;
        kvf_block_counts_t counts;
        kvf_legacy_run_t run;
        cr_assert_eq(kvf_get_kv_capacity_tokens(&lengths, side == 1, &tokens, NULL), KVF_OK);
        cr_assert_eq(kvf_get_block_counts(&lengths, side == 1, 128, &counts, NULL), KVF_OK);
        int n = 0;
        for (int64_t at = 0; at < tokens; at += 128) {
            ids[side][n] = 100 * side + n;
            n++;
        }
        cr_assert_eq(n, side == 0 ? 8 : 9);
        const kvf_legacy_list_t list = {.ids = ids[side], .n_ids = n};
        cr_assert_eq(kvf_legacy_locate(&list, &counts, 4096, 0, (kvf_span_t){0, 0}, &run, NULL),
                     KVF_OK);
        kvf_legacy_fill(&list, &run, slots[side]);
        tables[side] = (kvf_table_t){slots[side], kvf_legacy_table_blocks(&run)};
    }
    kvf_wanted_t wanted = wants(&lengths, 128, 4096, 0);
    kvf_pairing_t found = kvf_pair_tables(&tables[0], &tables[1], &wanted, pairs, NULL, NULL);
    cr_assert_eq(found.n_pairs, 8);
    for (int32_t i = 0; i < 8; i++) {
        expect_pair(&pairs[i], i, i, 100 + i);
    }
}

/* A receiver that has grown by the block of the first generated token, and holds all but the last
 * block of the prompt. */
Test(field, vllm_50558_grown_receiver_gets_ordinal_31_only) {
    int32_t from[MAX_BLOCKS], to[MAX_BLOCKS];
    kvf_pair_t pairs[MAX_BLOCKS];
    const kvf_table_t source = {count_up(from, 10, 32), 32};
    const kvf_table_t destination = {count_up(to, 200, 33), 33};
    kvf_wanted_t wanted = wants(&(kvf_lengths_t){.prompt_len = 2048}, 64, 0, 31 * 64);
    kvf_pairing_t found = kvf_pair_tables(&source, &destination, &wanted, pairs, NULL, NULL);
    cr_assert_eq(found.n_pairs, 1);
    expect_pair(&pairs[0], 31, 41, 231);
    cr_expect_eq(found.n_missing_source + found.n_missing_destination, 0);
}

/* A spare block behind the prompt, in a table and in a list. */
Test(field, vllm_ascend_8908_the_spare_block_never_travels) {
    int32_t from[MAX_BLOCKS], to[MAX_BLOCKS], slots[MAX_BLOCKS];
    kvf_pair_t pairs[MAX_BLOCKS];
    const kvf_lengths_t lengths = {.prompt_len = 32};
    const kvf_legacy_list_t list = {.ids = count_up(from, 10, 5), .n_ids = 5};
    kvf_block_counts_t counts;
    kvf_legacy_run_t run;
    cr_assert_eq(kvf_get_block_counts(&lengths, false, 8, &counts, NULL), KVF_OK);
    cr_assert_eq(kvf_legacy_locate(&list, &counts, 0, 0, (kvf_span_t){0, 0}, &run, NULL), KVF_OK);
    kvf_legacy_fill(&list, &run, slots);
    const kvf_table_t sources[] = {{from, 5}, {slots, kvf_legacy_table_blocks(&run)}};
    const kvf_table_t destination = {count_up(to, 60, 5), 5};
    kvf_wanted_t wanted = wants(&lengths, 8, 0, 0);
    for (int form = 0; form < 2; form++) {
        kvf_pairing_t found =
            kvf_pair_tables(&sources[form], &destination, &wanted, pairs, NULL, NULL);
        cr_assert_eq(found.n_pairs, 4);
        for (int32_t i = 0; i < 4; i++) {
            expect_pair(&pairs[i], i, 10 + i, 60 + i);
        }
    }
}

/* A long prompt and a short window, at every place of the prompt's end within a block. */
Test(field, tensorrt_llm_18939_64_or_65_blocks_travel_of_2048) {
    enum { BLOCKS = 2048 };
    static int32_t from[BLOCKS], to[BLOCKS];
    static kvf_pair_t pairs[BLOCKS];
    const kvf_table_t source = {count_up(from, 0, BLOCKS), BLOCKS};
    const kvf_table_t destination = {count_up(to, 5000, BLOCKS), BLOCKS};
    bool saw[2] = {false, false};
    for (int64_t prompt = 131072 - 63; prompt <= 131072; prompt++) {
        kvf_wanted_t wanted = wants(&(kvf_lengths_t){.prompt_len = prompt}, 64, 4096, 0);
        int64_t n = kvf_pair_tables(&source, &destination, &wanted, pairs, NULL, NULL).n_pairs;
        cr_assert(n == 64 || n == 65, "%ld blocks", (long)n);
        saw[n - 64] = true;
        for (int32_t i = 0; i < n; i++) {
            int32_t ordinal = (int32_t)(BLOCKS - n) + i;
            expect_pair(&pairs[i], ordinal, ordinal, 5000 + ordinal);
        }
        /* The first one holds the oldest position that the query at `prompt` sees. */
        cr_expect_eq(pairs[0].ordinal, (prompt - 4095) / 64);
    }
    cr_expect(saw[0] && saw[1]);
}
