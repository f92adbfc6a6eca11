/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Selection and pairing against a reference that knows no formula: it goes through the prompt token
 * by token and asks who holds it, whether the receiver has it already, and whether the next query
 * sees it.
 */
#include "kvmgr/table.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <string.h>

#define CASES 100000
#define MAX_BLOCKS 14
#define MAX_TABLE (MAX_BLOCKS + 3)
#define GUARD INT64_C(0x5a5a5a5a5a5a5a5a)

struct setup {
    int64_t prompt, block, window, sinks, cached;
    kvf_cp_t cp[2];
    int32_t slots[2][MAX_TABLE];
    int64_t n[2];
};

/* What the reference knows of a block after it has seen its tokens. */
struct fate {
    bool live;   /* the next query sees some position of its extent */
    bool cached; /* the receiver has every prompt token of it */
    bool held[2];
    int32_t slot[2];
};

static struct setup draw(test_random_t *random) {
    struct setup s = {.block = test_between(random, 1, 6)};
    s.prompt = test_between(random, 1, MAX_BLOCKS * s.block);
    s.window = test_between(random, 0, 2) == 0 ? 0 : test_between(random, 1, s.prompt + 4);
    s.sinks = test_between(random, 0, 1) == 0 ? 0 : test_between(random, 0, s.prompt + 4);
    switch (test_between(random, 0, 3)) {
    case 0:
        s.cached = s.prompt;
        break;
    case 1:
        s.cached = test_between(random, 0, s.prompt);
        break;
    default:
        s.cached = 0;
    }
    for (int side = 0; side < 2; side++) {
        s.cp[side].size = test_between(random, 0, 1) == 0 ? 1 : test_between(random, 1, 6);
        s.cp[side].rank = test_between(random, 0, s.cp[side].size - 1);
        s.n[side] = test_between(random, 0, 4) == 0 ? test_between(random, 0, MAX_TABLE)
                                                    : (s.prompt + s.block - 1) / s.block;
        int64_t holes = test_between(random, 0, 3), range = test_between(random, 20, 400);
        for (int64_t i = 0; i < s.n[side]; i++) {
            bool bound = test_between(random, 1, 10) > holes;
            s.slots[side][i] = bound ? (int32_t)test_between(random, 0, range) : -1;
        }
    }
    return s;
}

/* @return Blocks of the prompt. */
static int64_t learn(const struct setup *s, struct fate *fates) {
    int64_t blocks = 0;
    for (int64_t token = 0; token < s->prompt; token++) {
        int64_t i = token / s->block;
        if (token % s->block == 0) {
            blocks++;
            fates[i] = (struct fate){.cached = true};
            for (int side = 0; side < 2; side++) {
                fates[i].held[side] = i % s->cp[side].size == s->cp[side].rank;
                fates[i].slot[side] = i < s->n[side] ? s->slots[side][i] : -1;
            }
        }
        fates[i].cached = fates[i].cached && token < s->cached;
    }
    for (int64_t position = 0; position < blocks * s->block; position++) {
        bool sees = s->window == 0 || position < s->sinks || s->prompt - position < s->window;
        fates[position / s->block].live |= sees;
    }
    return blocks;
}

static bool is_wanted(const struct fate *fate) {
    return fate->live && !fate->cached && fate->held[0] && fate->held[1];
}

#define OR_FAIL(truth)                                                                             \
    cr_assert(truth, "KVF_SEED=%llu case %d: " #truth, (unsigned long long)random.seed, n)

static bool check_pairing(const struct setup *s, const kvf_wanted_t *wanted,
                          const struct fate *fates, int64_t blocks) {
    const kvf_table_t source = {s->slots[0], s->n[0]}, destination = {s->slots[1], s->n[1]};
    kvf_pair_t pairs[MAX_BLOCKS + 1];
    int64_t missing[2][MAX_BLOCKS + 1], n_pairs = 0, n_missing[2] = {0, 0};
    memset(pairs, 0x5a, sizeof(pairs));
    memset(missing, 0x5a, sizeof(missing));
    kvf_pairing_t found =
        kvf_pair_tables(&source, &destination, wanted, pairs, missing[0], missing[1]);
    for (int64_t i = 0; i < blocks; i++) {
        const struct fate *fate = &fates[i];
        bool wants = is_wanted(fate);
        if (wants && fate->slot[0] >= 0 && fate->slot[1] >= 0) {
            const kvf_pair_t *pair = &pairs[n_pairs++];
            if (pair->ordinal != i || pair->source != fate->slot[0] ||
                pair->destination != fate->slot[1]) {
                return false;
            }
        }
        if (wants && fate->slot[0] < 0 && missing[0][n_missing[0]++] != i) {
            return false;
        }
        bool should_be_there = wants || (fate->live && fate->cached && fate->held[1]);
        if (should_be_there && fate->slot[1] < 0 && missing[1][n_missing[1]++] != i) {
            return false;
        }
    }
    return found.n_pairs == n_pairs && found.n_missing_source == n_missing[0] &&
           found.n_missing_destination == n_missing[1] && pairs[n_pairs].ordinal == GUARD &&
           missing[0][n_missing[0]] == GUARD && missing[1][n_missing[1]] == GUARD;
}

static bool check_select(const struct setup *s, const kvf_wanted_t *wanted,
                         const struct fate *fates, int64_t blocks, int side) {
    const kvf_table_t table = {s->slots[side], s->n[side]};
    kvf_wanted_t live = kvf_wanted_live(wanted, side == 0);
    kvf_pair_t pairs[MAX_BLOCKS + 1];
    int64_t n = 0;
    memset(pairs, 0x5a, sizeof(pairs));
    int64_t got = kvf_select(&table, &live, side == 0, pairs);
    for (int64_t i = 0; i < blocks; i++) {
        if (fates[i].live && fates[i].held[side] && fates[i].slot[side] >= 0) {
            const kvf_pair_t *pair = &pairs[n++];
            int32_t ours = side == 0 ? pair->source : pair->destination;
            int32_t other = side == 0 ? pair->destination : pair->source;
            if (pair->ordinal != i || ours != fates[i].slot[side] || other != -1) {
                return false;
            }
        }
    }
    return got == n && pairs[n].ordinal == GUARD;
}

/* Whether two live blocks of a side share a page. */
static bool has_twice(const struct fate *fates, int64_t blocks, int side) {
    for (int64_t i = 0; i < blocks; i++) {
        for (int64_t k = 0; k < i; k++) {
            if (fates[i].live && fates[i].held[side] && fates[i].slot[side] >= 0 && fates[k].live &&
                fates[k].held[side] && fates[k].slot[side] == fates[i].slot[side]) {
                return true;
            }
        }
    }
    return false;
}

static bool check_next(const kvf_wanted_t *wanted, const struct fate *fates, int64_t blocks) {
    int64_t next = blocks, count = 0;
    for (int64_t i = blocks - 1; i >= 0; i--) {
        if (is_wanted(&fates[i])) {
            next = i;
            count++;
        }
        if (kvf_wanted_next(wanted, i) != next) {
            return false;
        }
    }
    if (wanted->shared.size > 0 &&
        (wanted->shared.rank < 0 || wanted->shared.rank >= wanted->shared.size)) {
        return false;
    }
    return wanted->prompt_blocks == blocks && kvf_wanted_count(wanted) == count &&
           kvf_wanted_next(wanted, blocks) == blocks;
}

Test(pairing, against_tokens, .timeout = 300) {
    test_random_t random = test_random("pairing");
    int64_t moved = 0, lost = 0, twice = 0;
    for (int n = 0; n < CASES; n++) {
        struct setup s = draw(&random);
        struct fate fates[MAX_BLOCKS];
        int64_t blocks = learn(&s, fates);
        kvf_lengths_t lengths = {.prompt_len = s.prompt};
        kvf_wanted_t wanted;
        OR_FAIL(kvf_wanted_init(&lengths, s.block, s.window, s.sinks, s.cached, s.cp[0], s.cp[1],
                                &wanted, NULL) == KVF_OK);
        OR_FAIL(check_next(&wanted, fates, blocks));
        OR_FAIL(check_pairing(&s, &wanted, fates, blocks));
        for (int side = 0; side < 2; side++) {
            const kvf_table_t table = {s.slots[side], s.n[side]};
            kvf_wanted_t live = kvf_wanted_live(&wanted, side == 0);
            bool bad = has_twice(fates, blocks, side);
            OR_FAIL(check_select(&s, &wanted, fates, blocks, side));
            OR_FAIL((kvf_table_check(&table, &live, "context", "g", kvf_alloc_default(), NULL) ==
                     KVF_ERR_INVALID) == bad);
            twice += bad;
        }
        const kvf_table_t source = {s.slots[0], s.n[0]}, destination = {s.slots[1], s.n[1]};
        kvf_pairing_t found = kvf_pair_tables(&source, &destination, &wanted, NULL, NULL, NULL);
        moved += found.n_pairs;
        lost += found.n_missing_source + found.n_missing_destination;
    }
    /* The draw reaches every outcome often. */
    cr_assert_gt(moved, CASES / 2);
    cr_assert_gt(lost, CASES / 2);
    cr_assert_gt(twice, CASES / 20);
    cr_assert_lt(twice, CASES);
}
