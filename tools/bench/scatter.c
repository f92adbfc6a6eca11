/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/scatter.h"

#include <string.h>

#define GOLDEN UINT64_C(0x9e3779b97f4a7c15)
#define POISON 0xe1

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void kvf_scatter_slots(uint64_t seed, int side, int64_t n_slots, int64_t n, int32_t *slots) {
    const int64_t choices = (n_slots + 1) / 2;
    uint64_t state = mix(seed + GOLDEN) ^ (uint64_t)side;
    for (int64_t i = 0; i < choices; i++) {
        slots[i] = (int32_t)(2 * i);
    }
    for (int64_t i = 0; i < n; i++) { /* Fisher and Yates, as far as it is needed */
        state += GOLDEN;
        int64_t k = i + (int64_t)(mix(state) % (uint64_t)(choices - i));
        int32_t taken = slots[k];
        slots[k] = slots[i];
        slots[i] = taken;
    }
}

static uint64_t first_word(uint64_t rep, uint64_t index) {
    return mix(mix(rep + GOLDEN) + index);
}

void kvf_scatter_fill(void *block, uint64_t bytes, uint64_t rep, uint64_t index) {
    uint64_t *words = block;
    const uint64_t first = first_word(rep, index);
    for (uint64_t i = 0; i < bytes / 8; i++) {
        words[i] = first + i * GOLDEN;
    }
}

static uint64_t differing_bytes(uint64_t a, uint64_t b) {
    uint64_t n = 0;
    for (uint64_t rest = a ^ b; rest != 0; rest >>= 8) {
        n += (rest & 0xff) != 0;
    }
    return n;
}

uint64_t kvf_scatter_wrong(const void *block, uint64_t bytes, uint64_t rep, uint64_t index) {
    const uint64_t *words = block;
    const uint64_t first = first_word(rep, index);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < bytes / 8; i++) {
        if (words[i] != first + i * GOLDEN) {
            wrong += differing_bytes(words[i], first + i * GOLDEN);
        }
    }
    return wrong;
}

void kvf_scatter_poison(void *block, uint64_t bytes) {
    memset(block, POISON, bytes);
}

uint64_t kvf_scatter_touched(const void *block, uint64_t bytes) {
    const uint8_t *at = block;
    uint64_t touched = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        touched += at[i] != POISON;
    }
    return touched;
}
