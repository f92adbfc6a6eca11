/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Context parallelism: every rank of one side against every rank of the other, for all sizes from 1
 * to 4. The reference deals the input out token by token, a block to each rank in turn. Every pair
 * of ranks is paired and copied; then each generation rank's pages are asked for the tokens that it
 * holds, and how often each block came.
 */
#include "kvmgr/table.h"

#include <criterion/criterion.h>
#include <string.h>

enum { SIZES = 4, MAX_BLOCKS = 64, PAGES = 200 };

static const int64_t prompts[] = {1, 7, 8, 9, 31, 32, 33, 48}, blocks[] = {1, 4, 8},
                     windows[] = {0, 1, 8, 9, 20}, sinks[] = {0, 5}, caches[] = {0, 9, 47, 48};

#define N(list) (int)(sizeof(list) / sizeof((list)[0]))

struct setup {
    int64_t prompt, block, window, sinks, cached;
    int64_t size[2]; /* context, generation */
};

/* What the reference knows of a block. */
struct fate {
    int64_t holder[2];
    bool live, cached;
};

/* One rank: its table by the ordinals of the whole input, and which block is in which page. */
struct rank {
    int32_t slots[MAX_BLOCKS];
    int64_t pages[PAGES];
};

static struct rank ranks[2][SIZES];

static int64_t deal(const struct setup *s, struct fate *fates) {
    int64_t n = 0, turn[2] = {-1, -1};
    for (int64_t token = 0; token < s->prompt; token++) {
        if (token % s->block == 0) {
            fates[n] = (struct fate){.cached = true};
            for (int side = 0; side < 2; side++) {
                turn[side] = turn[side] + 1 == s->size[side] ? 0 : turn[side] + 1;
                fates[n].holder[side] = turn[side];
            }
            n++;
        }
        fates[n - 1].cached &= token < s->cached;
    }
    /* A block counts by its full extent; the next query stands behind the prompt. */
    for (int64_t p = 0; p < n * s->block; p++) {
        fates[p / s->block].live |= s->window == 0 || p < s->sinks || s->prompt - p < s->window;
    }
    return n;
}

/* Ranks bind what they hold, context ranks with the blocks in, generation ranks with those that are
 * cached. */
static void bind(const struct setup *s, const struct fate *fates, int64_t n) {
    for (int side = 0; side < 2; side++) {
        for (int64_t r = 0; r < s->size[side]; r++) {
            struct rank *rank = &ranks[side][r];
            memset(rank, 0xff, sizeof(*rank));
            for (int64_t i = 0; i < n; i++) {
                if (fates[i].holder[side] == r) {
                    rank->slots[i] = (int32_t)(side == 0 ? 3 + 2 * i : PAGES - 1 - 3 * i);
                    rank->pages[rank->slots[i]] = side == 0 || fates[i].cached ? i : -1;
                }
            }
        }
    }
}

/* @return Blocks that a pair of ranks moved, each of which it had to. */
static int64_t move(const struct setup *s, const struct fate *fates, int64_t n, int64_t context,
                    int64_t generation, int *came) {
    /* The prompt of one rank says nothing: total_input_len_cp takes its place. */
    const kvf_lengths_t lengths = {.prompt_len = 1, .total_input_len_cp = s->prompt};
    const kvf_table_t source = {ranks[0][context].slots, n},
                      destination = {ranks[1][generation].slots, n};
    kvf_wanted_t wanted;
    kvf_pair_t pairs[MAX_BLOCKS];
    cr_assert_eq(kvf_wanted_init(&lengths, s->block, s->window, s->sinks, s->cached,
                                 (kvf_cp_t){s->size[0], context},
                                 (kvf_cp_t){s->size[1], generation}, &wanted, NULL),
                 KVF_OK);
    kvf_pairing_t found = kvf_pair_tables(&source, &destination, &wanted, pairs, NULL, NULL);
    cr_assert_eq(found.n_missing_source + found.n_missing_destination, 0);
    for (int64_t i = 0, k = 0; i < n; i++) {
        if (fates[i].live && !fates[i].cached && fates[i].holder[0] == context &&
            fates[i].holder[1] == generation) {
            cr_assert(k < found.n_pairs && pairs[k].ordinal == i);
            ranks[1][generation].pages[pairs[k].destination] =
                ranks[0][context].pages[pairs[k].source];
            came[i]++;
            k++;
        }
    }
    return found.n_pairs;
}

static void check(const struct setup *s) {
    struct fate fates[MAX_BLOCKS];
    int came[MAX_BLOCKS] = {0};
    int64_t n = deal(s, fates), moved = 0, wanted = 0;
    bind(s, fates, n);
    for (int64_t c = 0; c < s->size[0]; c++) {
        for (int64_t g = 0; g < s->size[1]; g++) {
            int64_t by_pair = move(s, fates, n, c, g, came);
            cr_assert(s->size[0] != s->size[1] || c == g || by_pair == 0,
                      "ranks %ld and %ld hold nothing in common", (long)c, (long)g);
            moved += by_pair;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const struct rank *holder = &ranks[1][fates[i].holder[1]];
        bool want = fates[i].live && !fates[i].cached;
        wanted += want;
        cr_assert_eq(came[i], want, "ordinal %ld came %d times", (long)i, came[i]);
        cr_assert(!fates[i].live || holder->pages[holder->slots[i]] == i,
                  "ordinal %ld is not in its page", (long)i);
    }
    cr_assert_eq(moved, wanted);
}

Test(cp, every_block_once_over_all_pairs_of_ranks) {
    int64_t checked = 0;
    for (int n = 0; n < N(prompts) * N(blocks) * N(windows) * N(sinks) * N(caches); n++) {
        int rest = n;
        struct setup s = {.prompt = prompts[rest % N(prompts)]};
        s.block = blocks[(rest /= N(prompts)) % N(blocks)];
        s.window = windows[(rest /= N(blocks)) % N(windows)];
        s.sinks = sinks[(rest /= N(windows)) % N(sinks)];
        s.cached = caches[rest / N(sinks)];
        s.cached = s.cached < s.prompt ? s.cached : s.prompt;
        for (s.size[0] = 1; s.size[0] <= SIZES; s.size[0]++) {
            for (s.size[1] = 1; s.size[1] <= SIZES; s.size[1]++) {
                check(&s);
                checked++;
            }
        }
    }
    cr_assert_eq(checked, 8 * 3 * 5 * 2 * 4 * 16);
}

/* A request that each rank sees a part of reserves for the whole input, on either side. */
Test(cp, capacity_is_of_the_whole_input) {
    for (int64_t size = 1; size <= SIZES; size++) {
        for (int64_t total = 1; total < 70; total++) {
            kvf_block_counts_t counts;
            kvf_lengths_t lengths = {
                .draft_len = 3, .num_extra_kv_tokens = 2, .total_input_len_cp = total};
            int64_t of_rank[SIZES] = {0}, tokens;
            for (int64_t token = 0; token < total; token++) {
                of_rank[token / 8 % size]++;
            }
            for (int64_t r = 0; r < size; r++) {
                lengths.prompt_len = of_rank[r] > 0 ? of_rank[r] : 1;
                cr_assert_eq(kvf_get_kv_capacity_tokens(&lengths, false, &tokens, NULL), KVF_OK);
                cr_assert_eq(tokens, total + 2);
                cr_assert_eq(kvf_get_kv_capacity_tokens(&lengths, true, &tokens, NULL), KVF_OK);
                cr_assert_eq(tokens, total + 5);
                cr_assert_eq(kvf_get_block_counts(&lengths, true, 8, &counts, NULL), KVF_OK);
                cr_assert_eq(counts.prompt_blocks - 1, (total - 1) / 8);
                cr_assert_eq(counts.alloc_blocks - 1, (total + 4) / 8);
            }
        }
    }
}
