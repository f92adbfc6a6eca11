/* SPDX-License-Identifier: Apache-2.0 */
/* The body that devices run, on the CPU: its bytes against memcpy(), its hashes against libxxhash.
 */
#include "kernels/move.h"
#include "kernels/xxh3_body.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define BYTES (UINT64_C(1) << 20)
#define LEAF KVF_DIGEST_LEAF_BYTES

static uint8_t from[BYTES], to[BYTES], want[BYTES];
static uint64_t leaves[2 * BYTES / LEAF + KVF_MOVES];
static kvf_moves_t list;

/* The ranges of the list, for the check. */
static struct range { uint64_t at, bytes; } sources[KVF_MOVES];

static void fill(uint64_t seed) {
    test_random_t random = {seed, seed};
    for (size_t i = 0; i < BYTES; i++) {
        from[i] = (uint8_t)test_between(&random, 0, 255);
        to[i] = want[i] = (uint8_t)~from[i];
    }
}

static void add(uint64_t dst, uint64_t src, uint64_t bytes, bool stores) {
    sources[list.n] = (struct range){src, bytes};
    cr_assert(
        kvf_moves_add(&list, stores ? (uintptr_t)(to + dst) : 0, (uintptr_t)(from + src), bytes));
    if (stores) {
        memcpy(want + dst, from + src, bytes);
    }
}

/* Run the list; every byte of the destination, inside and outside of the moves, and every digest.
 */
static void check(void) {
    uint64_t leaf = 0;
    kvf_moves_run(&list);
    cr_assert_eq(memcmp(to, want, BYTES), 0);
    for (uint32_t i = 0; i < list.n && list.leaves != NULL; i++) {
        const struct range *source = &sources[i];
        for (uint64_t at = 0; at < source->bytes; at += LEAF, leaf++) {
            uint64_t left = source->bytes - at;
            cr_assert_eq(leaves[leaf],
                         XXH3_64bits(from + source->at + at, left < LEAF ? left : LEAF),
                         "move %u, byte %lu", i, at);
        }
        cr_assert_eq(
            kvf_digest_of_hashes(leaves + leaf - (source->bytes + LEAF - 1) / LEAF, source->bytes),
            kvf_digest(from + source->at, source->bytes));
    }
    cr_assert(list.leaves == NULL || leaf == list.n_leaves);
}

Test(move, hash_of_every_length) {
    fill(1);
    for (size_t bytes = 1; bytes <= 3 * LEAF; bytes++) {
        const uint8_t *at = from + bytes % 13;
        cr_assert_eq(kvf_xxh3(at, bytes), XXH3_64bits(at, bytes), "%zu bytes", bytes);
    }
}

Test(move, every_length_and_alignment_of_one_leaf) {
    fill(2);
    for (uint64_t bytes = 1; bytes <= LEAF + 20; bytes += bytes < 300 ? 1 : 61) {
        for (uint64_t shift = 0; shift < 256; shift += 17) {
            kvf_moves_begin(&list, leaves);
            add(100 + shift % 16, 300 + shift / 16, bytes, true);
            check();
        }
    }
}

/* Lists of many moves, some of which only hash, at random places. */
Test(move, random_lists) {
    test_random_t random = test_random("move");
    for (int round = 0; round < 60; round++) {
        uint64_t dst = 0, src = 0;
        bool aligned = test_between(&random, 0, 1) == 0;
        fill((uint64_t)test_between(&random, 0, INT32_MAX));
        kvf_moves_begin(&list, round % 4 == 3 ? NULL : leaves);
        while (list.n < KVF_MOVES) {
            uint64_t bytes = test_between(&random, 0, 2) == 0
                                 ? LEAF * (uint64_t)test_between(&random, 1, 5)
                                 : (uint64_t)test_between(&random, 1, 9000);
            dst += aligned ? (16 - dst % 16) % 16 : (uint64_t)test_between(&random, 0, 39);
            src += aligned ? (16 - src % 16) % 16 : (uint64_t)test_between(&random, 0, 39);
            if (dst + bytes > BYTES || src + bytes > BYTES) {
                break;
            }
            add(dst, src, bytes, test_between(&random, 0, 7) > 0);
            dst += bytes;
            src += bytes;
        }
        cr_assert_gt(list.n, 20);
        check();
    }
}

Test(move, a_full_list_says_so) {
    kvf_moves_begin(&list, NULL);
    for (uint32_t i = 0; i < KVF_MOVES; i++) {
        cr_assert(kvf_moves_add(&list, (uintptr_t)to, (uintptr_t)from, 1));
    }
    cr_assert_not(kvf_moves_add(&list, (uintptr_t)to, (uintptr_t)from, 1));
    cr_assert_eq(list.n, KVF_MOVES);
}
