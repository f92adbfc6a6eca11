/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/scatter.h"

#include <criterion/criterion.h>
#include <string.h>

#define SLOTS 101
#define CHOICES 51

/* Every pair of slots is looked at: the same, or side by side? */
static void check_apart(const int32_t *slots, int n, int n_slots) {
    for (int i = 0; i < n; i++) {
        cr_assert(slots[i] >= 0 && slots[i] < n_slots, "slot %d of %d", slots[i], n_slots);
        for (int k = 0; k < i; k++) {
            int apart = slots[i] - slots[k];
            cr_assert(apart < -1 || apart > 1, "%d and %d", slots[i], slots[k]);
        }
    }
}

Test(bench_scatter, slots_are_apart_and_inside) {
    for (int n_slots = 1; n_slots <= SLOTS; n_slots++) {
        for (int n = 1; n <= (n_slots + 1) / 2; n++) {
            int32_t slots[CHOICES];
            kvf_scatter_slots((uint64_t)n, n % 2, n_slots, n, slots);
            check_apart(slots, n, n_slots);
        }
    }
}

Test(bench_scatter, seed_and_side_choose_the_order) {
    int32_t a[CHOICES], b[CHOICES], other_side[CHOICES], other_seed[CHOICES];
    kvf_scatter_slots(7, 0, SLOTS, CHOICES, a);
    kvf_scatter_slots(7, 0, SLOTS, CHOICES, b);
    kvf_scatter_slots(7, 1, SLOTS, CHOICES, other_side);
    kvf_scatter_slots(8, 0, SLOTS, CHOICES, other_seed);
    cr_assert_arr_eq(a, b, sizeof(a));
    int rising = 0, same_side = 0, same_seed = 0;
    for (int i = 0; i < CHOICES; i++) {
        rising += i > 0 && a[i] > a[i - 1];
        same_side += a[i] == other_side[i];
        same_seed += a[i] == other_seed[i];
    }
    /* Of a random order about half rises, and one stays. */
    cr_assert(rising > 10 && rising < 40, "%d rise", rising);
    cr_assert(same_side < 10 && same_seed < 10, "%d, %d stay", same_side, same_seed);
}

Test(bench_scatter, each_wrong_byte_counts) {
    union {
        uint64_t words[16];
        uint8_t bytes[128];
    } block, other;
    kvf_scatter_fill(&block, sizeof(block), 3, 9);
    cr_assert_eq(kvf_scatter_wrong(&block, sizeof(block), 3, 9), 0);
    for (size_t i = 0; i < sizeof(block); i++) {
        block.bytes[i] ^= 0x40;
        cr_assert_eq(kvf_scatter_wrong(&block, sizeof(block), 3, 9), 1, "byte %zu", i);
        block.bytes[i] ^= 0x40;
    }
    /* Stale, and of another block: nearly every byte differs. */
    kvf_scatter_fill(&other, sizeof(other), 2, 9);
    cr_assert_gt(kvf_scatter_wrong(&other, sizeof(other), 3, 9), 100);
    kvf_scatter_fill(&other, sizeof(other), 3, 8);
    cr_assert_gt(kvf_scatter_wrong(&other, sizeof(other), 3, 9), 100);
    /* And in the same block all words are different. */
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < i; k++) {
            cr_assert_neq(block.words[i], block.words[k]);
        }
    }
}

Test(bench_scatter, poison_is_not_a_pattern) {
    uint64_t words[16];
    uint8_t *bytes = (uint8_t *)words;
    kvf_scatter_poison(words, sizeof(words));
    cr_assert_eq(kvf_scatter_touched(words, sizeof(words)), 0);
    cr_assert_gt(kvf_scatter_wrong(words, sizeof(words), 0, 0), 100);
    bytes[0] ^= 1;
    bytes[127] ^= 1;
    cr_assert_eq(kvf_scatter_touched(words, sizeof(words)), 2);
}
