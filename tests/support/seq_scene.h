/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_SEQ_SCENE_H
#define KVF_TESTS_SEQ_SCENE_H

/**
 * @file
 * One world of three layer groups, and short names for what tests of sequences do in it.
 */

#include "tests/support/leaks.h"
#include "tests/support/seqs.h"

#include <string.h>

#define PIECE 8

static const kvf_cp_t whole = {1, 0};
static const test_group_t three[] = {{4, 0, 0, 64}, {8, 12, 0, 64}, {2, 5, 3, 64}};

static test_seqs_t world;
static kvf_seq_copies_t copies;

static inline void start(bool generation_side) {
    test_seqs_init(&world, kvf_alloc_default(), 3, three, generation_side, PIECE, whole);
}

static inline void end(void) {
    test_seqs_end(&world);
    check_leaks();
}

static inline kvf_lengths_t numbers(int64_t prompt, int64_t drafts, int64_t extra) {
    return (kvf_lengths_t){.prompt_len = prompt, .draft_len = drafts, .num_extra_kv_tokens = extra};
}

/* Open with content 100, 101, .. unless ids says otherwise. */
static inline kvf_seq_t *open_with(kvf_lengths_t lengths, int64_t allocated, const int64_t *ids,
                                   int64_t max_cached) {
    int64_t own[64];
    for (int64_t i = 0; i < 64; i++) {
        own[i] = 100 + i;
    }
    int64_t prompt = kvf_prompt_tokens(&lengths);
    kvf_seq_desc_t desc = {.lengths = lengths,
                           .allocated_tokens = allocated,
                           .content_ids = ids != NULL ? ids : own,
                           .n_content_ids = (prompt + PIECE - 1) / PIECE,
                           .max_cached_tokens = max_cached};
    kvf_seq_t *seq = NULL;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_seq_open(world.seqs, &desc, &seq, &detail), KVF_OK, "%s", detail.text);
    return seq;
}

static inline kvf_seq_t *open_prompt(int64_t prompt) {
    return open_with(numbers(prompt, 0, 0), prompt, NULL, prompt);
}

/* The bound ordinals of a table as text. */
static const char *bound(const kvf_seq_t *seq, uint32_t g) {
    static char texts[8][256];
    static unsigned next;
    char *text = texts[next++ % 8];
    size_t at = 0;
    text[0] = '\0';
    kvf_table_t table = kvf_seq_table(seq, g);
    for (int64_t i = 0; i < table.n_blocks; i++) {
        if (table.slots[i] >= 0) {
            at += (size_t)snprintf(text + at, 256 - at, at == 0 ? "%ld" : " %ld", (long)i);
        }
    }
    return text;
}

static inline void check_bound(const kvf_seq_t *seq, const char *g0, const char *g1,
                               const char *g2) {
    cr_assert_str_eq(bound(seq, 0), g0, "%s", bound(seq, 0));
    cr_assert_str_eq(bound(seq, 1), g1, "%s", bound(seq, 1));
    cr_assert_str_eq(bound(seq, 2), g2, "%s", bound(seq, 2));
}

static inline int32_t slot_of(const kvf_seq_t *seq, uint32_t g, int64_t ordinal) {
    kvf_table_t table = kvf_seq_table(seq, g);
    cr_assert_lt(ordinal, table.n_blocks);
    return table.slots[ordinal];
}

static inline void append(kvf_seq_t *seq, int64_t n) {
    cr_assert_eq(kvf_seq_append(seq, n, &copies), KVF_OK);
}

static inline int64_t free_pages(uint32_t g) {
    return kvf_pages_count(world.pages[g], KVF_PAGE_FREE);
}

/* Write a prompt and let others find it. */
static inline void publish(int64_t prompt, const int64_t *ids) {
    kvf_seq_t *seq = open_with(numbers(prompt, 0, 0), prompt, ids, 0);
    append(seq, prompt);
    cr_assert_eq(kvf_seq_publish(seq, prompt), KVF_OK);
    kvf_seq_close(seq);
}

#endif
