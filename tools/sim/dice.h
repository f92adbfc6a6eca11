/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_DICE_H
#define KVF_TOOLS_SIM_DICE_H

/**
 * @file
 * Random numbers that follow from a seed alone.
 * Source: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct kvf_dice {
    uint64_t state;
} kvf_dice_t;

/** @return x, well mixed: a function of x alone. @thread any */
static inline uint64_t kvf_dice_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/** @return The next 64 bits. */
static inline uint64_t kvf_dice_next(kvf_dice_t *dice) {
    return kvf_dice_mix(dice->state += UINT64_C(0x9e3779b97f4a7c15));
}

/** @return A number in [0, n). @param n  > 0. */
static inline uint64_t kvf_dice_below(kvf_dice_t *dice, uint64_t n) {
    return kvf_dice_next(dice) % n;
}

/** @return A number in [least, most]. */
static inline uint64_t kvf_dice_between(kvf_dice_t *dice, uint64_t least, uint64_t most) {
    return least + kvf_dice_below(dice, most - least + 1);
}

/** @return true per_mille times of a thousand. */
static inline bool kvf_dice_hit(kvf_dice_t *dice, uint32_t per_mille) {
    return per_mille != 0 && kvf_dice_below(dice, 1000) < per_mille;
}

/** @return Mostly short, sometimes long: [0, short_us), and one time of ten [0, long_us). */
static inline uint64_t kvf_dice_delay(kvf_dice_t *dice, uint64_t short_us, uint64_t long_us) {
    return kvf_dice_below(dice, kvf_dice_hit(dice, 100) ? long_us : short_us);
}

#endif
