/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs to plan one long group, in nanoseconds per ordinal on one core, beside a plain copy
 * of an array of as many (source, destination) pairs of int32. The best of several rounds counts:
 * the others measure the machine's other work. Exit code 1: planning takes longer than it may.
 */
#include "transceiver/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ORDINALS = 1000000, BLOCK = 16, ROUNDS = 40 };

#define PROMPT ((int64_t)ORDINALS * BLOCK)

static int32_t source_slots[ORDINALS], destination_slots[ORDINALS];
static kvf_pair_t pairs[ORDINALS];
static struct { int32_t source, destination; } plain[2][ORDINALS];

static const kvf_table_t source = {source_slots, ORDINALS};
static const kvf_table_t destination = {destination_slots, ORDINALS};
static kvf_wanted_t wanted, live[2];

/* The receiver's grants as one message, and what the sender makes of it. */
static kvf_layout_t layout = {
    .n_groups = 1,
    .groups = {{.name = "g",
                .n_layers = 1,
                .layers = {0},
                .tokens_per_block = BLOCK,
                .kv_heads = 1,
                .head_dim = 64,
                .kv_factor = 2,
                .dtype = KVF_DTYPE_BF16}},
};
static uint64_t ordinals[ORDINALS], generations[ORDINALS];
static uint32_t granted[ORDINALS];
static Kvf__Wire__Grant grant = KVF__WIRE__GRANT__INIT;
static kvf_plan_t plan;

static double now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* How slots lie: as a fresh pool gives them, as one does that was in use for a while, and as one
 * that is far larger than any prompt. */
static const struct deal {
    const char *name;
    bool shuffled;
    int32_t stride;
    double limit_ns; /* per ordinal, for each sum; 0: none */
} deals[] = {
    {"in order", false, 1, 20},
    {"shuffled", true, 1, 20},
    {"spread over a huge pool", true, 2000, 0},
};

static void deal(int32_t *slots, const struct deal *how, uint64_t seed) {
    for (int32_t i = 0; i < ORDINALS; i++) {
        slots[i] = i * how->stride;
    }
    for (int32_t i = ORDINALS - 1; how->shuffled && i > 0; i--) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        int32_t k = (int32_t)((seed >> 33) % (uint64_t)(i + 1)), slot = slots[i];
        slots[i] = slots[k];
        slots[k] = slot;
    }
}

/* ---- what is measured; each says whether its answer is right ---- */

static bool run_copy(void) {
    memcpy(plain[1], plain[0], sizeof(plain[0]));
    return plain[1][ORDINALS - 1].source == ORDINALS - 1;
}

static bool run_check_source(void) {
    return kvf_table_check(&source, &live[0], "context", "g", kvf_alloc_default(), NULL) == KVF_OK;
}

static bool run_check_destination(void) {
    return kvf_table_check(&destination, &live[1], "generation", "g", kvf_alloc_default(), NULL) ==
           KVF_OK;
}

static bool run_select(void) {
    return kvf_select(&source, &live[0], true, pairs) == ORDINALS;
}

static bool run_pair(void) {
    return kvf_pair_tables(&source, &destination, &wanted, pairs, NULL, NULL).n_pairs == ORDINALS;
}

static bool run_plan(void) {
    const int64_t n_pages = INT32_MAX;
    kvf_plan_cleanup(&plan);
    return kvf_plan_init(&plan, &layout, &wanted, PROMPT, kvf_alloc_default()) == KVF_OK &&
           kvf_plan_grant(&plan, &grant, &n_pages, NULL) == KVF_OK &&
           kvf_plan_close(&plan, false, NULL) == KVF_OK && plan.n_pages == ORDINALS;
}

static bool run_cut(void) {
    int32_t *const sources[] = {source_slots};
    const kvf_plan_part_t all = {.layer_end = 1, .token_end = PROMPT};
    kvf_plan_cursor_t cursor = {0};
    kvf_piece_t piece;
    int32_t slot;
    int64_t n = 0, sum = 0;
    while (kvf_plan_next(&plan, sources, &all, &cursor, &piece, &slot)) {
        sum += piece.slot - slot;
        n++;
    }
    return n == ORDINALS && sum == 0;
}

static const struct {
    const char *name;
    bool (*run)(void);
    bool tables, sender; /* a part of that sum */
} works[] = {
    {"plain copy of int32 pairs", run_copy, false, false},
    {"kvf_table_check, source", run_check_source, true, true},
    {"kvf_table_check, destination", run_check_destination, true, false},
    {"kvf_select", run_select, false, false},
    {"kvf_pair_tables", run_pair, true, false},
    {"kvf_plan_grant, kvf_plan_close", run_plan, false, true},
    {"kvf_plan_next", run_cut, false, true},
};

static bool measure(const struct deal *how) {
    double copy = 0, tables = 0, sender = 0;
    deal(source_slots, how, 1);
    deal(destination_slots, how, 2);
    for (int32_t i = 0; i < ORDINALS; i++) {
        granted[i] = (uint32_t)destination_slots[i];
    }
    printf("%d ordinals, slots %s\n", ORDINALS, how->name);
    for (size_t i = 0; i < sizeof(works) / sizeof(works[0]); i++) {
        double best = 0;
        for (int round = 0; round < ROUNDS; round++) {
            double begin = now_ns();
            if (!works[i].run()) {
                (void)fprintf(stderr, "select: %s gave a wrong answer\n", works[i].name);
                exit(2);
            }
            double ns = (now_ns() - begin) / ORDINALS;
            best = round == 0 || ns < best ? ns : best;
        }
        copy = i == 0 ? best : copy;
        tables += works[i].tables ? best : 0;
        sender += works[i].sender ? best : 0;
        printf("  %-32s %6.2f ns  %6.1f copies\n", works[i].name, best, best / copy);
    }
    printf("  %-32s %6.2f ns  %6.1f copies\n", "tables checked and paired", tables, tables / copy);
    printf("  %-32s %6.2f ns  %6.1f copies\n", "all that a sender plans", sender, sender / copy);
    return how->limit_ns == 0 || (tables < how->limit_ns && sender < how->limit_ns);
}

int main(void) {
    const kvf_lengths_t lengths = {.prompt_len = PROMPT};
    const kvf_cp_t whole = {1, 0};
    if (kvf_wanted_init(&lengths, BLOCK, 0, 0, 0, whole, whole, &wanted, NULL) != KVF_OK) {
        return 2;
    }
    for (int32_t i = 0; i < ORDINALS; i++) {
        plain[0][i].source = plain[0][i].destination = i;
        ordinals[i] = (uint64_t)i;
    }
    grant.n_ordinals = grant.n_slots = grant.n_generations = ORDINALS;
    grant.ordinals = ordinals;
    grant.slots = granted;
    grant.generations = generations;
    live[0] = kvf_wanted_live(&wanted, true);
    live[1] = kvf_wanted_live(&wanted, false);
    bool within = true;
    for (size_t i = 0; i < sizeof(deals) / sizeof(deals[0]); i++) {
        within &= measure(&deals[i]);
    }
    kvf_plan_cleanup(&plan);
    return within ? 0 : 1;
}
