/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/digest.h"

#include <stdbool.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Leaf values are folded in runs, so that no page needs an array of its own length. */
#define RUN 64U

uint64_t kvf_digest_of_leaves(uint64_t bytes, kvf_digest_leaf_fn *leaf, void *ctx) {
    XXH3_state_t
        top; /* needed for more than one run only: its reset takes as long as a short leaf */
    bool is_long = bytes > (uint64_t)RUN * KVF_DIGEST_LEAF_BYTES;
    if (is_long) {
        XXH3_INITSTATE(&top);
        (void)XXH3_64bits_reset(&top);
    }
    uint8_t values[RUN * 8];
    size_t used = 0;
    for (uint64_t from = 0; from < bytes; from += KVF_DIGEST_LEAF_BYTES) {
        uint64_t left = bytes - from;
        uint64_t value =
            leaf(ctx, from, left < KVF_DIGEST_LEAF_BYTES ? (size_t)left : KVF_DIGEST_LEAF_BYTES);
        if (used == sizeof(values)) {
            (void)XXH3_64bits_update(&top, values, used);
            used = 0;
        }
        for (size_t i = 0; i < 8; i++) {
            values[used++] = (uint8_t)(value >> (8 * i));
        }
    }
    if (!is_long) {
        return XXH3_64bits(values, used);
    }
    (void)XXH3_64bits_update(&top, values, used);
    return XXH3_64bits_digest(&top);
}

typedef struct range {
    const kvf_wide_t *wide;
    const uint8_t *data;
} range_t;

static uint64_t hash_leaf(void *ctx, uint64_t from, size_t leaf_bytes) {
    const range_t *range = ctx;
    return range->wide->hash(range->data + from, leaf_bytes);
}

uint64_t kvf_digest_by(const kvf_wide_t *wide, const void *data, uint64_t bytes) {
    range_t range = {wide, data};
    return kvf_digest_of_leaves(bytes, hash_leaf, &range);
}

uint64_t kvf_digest(const void *data, uint64_t bytes) {
    return kvf_digest_by(kvf_wide_at(0), data, bytes);
}

void kvf_digest_hashes(const void *data, uint64_t bytes, uint64_t *hashes) {
    range_t range = {kvf_wide_at(0), data};
    for (uint64_t from = 0; from < bytes; from += KVF_DIGEST_LEAF_BYTES) {
        uint64_t left = bytes - from;
        *hashes++ = hash_leaf(&range, from,
                              left < KVF_DIGEST_LEAF_BYTES ? (size_t)left : KVF_DIGEST_LEAF_BYTES);
    }
}

static uint64_t hash_at(void *ctx, uint64_t from, size_t leaf_bytes) {
    const uint64_t *hashes = ctx;
    (void)leaf_bytes;
    return hashes[from / KVF_DIGEST_LEAF_BYTES];
}

uint64_t kvf_digest_of_hashes(const uint64_t *hashes, uint64_t bytes) {
    return kvf_digest_of_leaves(bytes, hash_at, (void *)(uintptr_t)hashes);
}
