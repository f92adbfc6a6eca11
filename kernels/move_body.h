/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_BODY_H
#define KVF_KERNELS_MOVE_BODY_H

/**
 * @file
 * The body of move.h. Its unit of work is a leaf, done by KVF_MOVE_LANES threads in three steps
 * with a barrier between them:
 *
 *     kvf_move_copy   every lane copies its vectors, and leaves its part of the hash in `sums`
 *     kvf_move_fold   the first KVF_XXH3_LANES lanes add up one accumulator each
 *     kvf_move_hash   one lane makes the hash
 *
 * What is hashed is what was stored: the registers of a whole leaf, and dst itself of a shorter
 * one.
 */

#include "kernels/move.h"
#include "kernels/xxh3_body.h"

#define KVF_MOVE_LANES 32U
#define KVF_MOVE_VECTOR_BYTES 16U
#define KVF_MOVE_BLOCKS (KVF_DIGEST_LEAF_BYTES / KVF_XXH3_BLOCK_BYTES)
/** Vectors of a block that one lane has. */
#define KVF_MOVE_STEPS (KVF_XXH3_BLOCK_BYTES / KVF_MOVE_VECTOR_BYTES / KVF_MOVE_LANES)

/** Part of a move. */
typedef struct kvf_move_leaf {
    uint8_t *dst; /**< NULL: nothing is stored */
    const uint8_t *src;
    uint32_t bytes;
    bool aligned; /**< to vectors, both */
} kvf_move_leaf_t;

/** What the lanes of a leaf share. */
typedef struct kvf_move_sums {
    uint64_t part[KVF_MOVE_BLOCKS][2][KVF_MOVE_LANES];
    uint64_t acc[KVF_XXH3_LANES];
} kvf_move_sums_t;

/** A lane's parts of the secret, the same for every leaf. */
typedef struct kvf_move_keys {
    uint64_t step[KVF_MOVE_STEPS][2];
    uint64_t last[2]; /**< instead of that of the last step of a leaf's last block */
} kvf_move_keys_t;

typedef struct kvf_move_vector {
    uint64_t low, high;
} kvf_move_vector_t;

static inline KVF_DEVICE kvf_move_vector_t kvf_move_load(const uint8_t *at, bool aligned) {
    kvf_move_vector_t vector;
#ifdef __CUDA_ARCH__
    if (aligned) {
        ulonglong2 both = *reinterpret_cast<const ulonglong2 *>(at);
        vector.low = both.x;
        vector.high = both.y;
        return vector;
    }
#endif
    (void)aligned;
    memcpy(&vector, at, sizeof(vector));
    return vector;
}

static inline KVF_DEVICE void kvf_move_store(uint8_t *at, kvf_move_vector_t vector, bool aligned) {
#ifdef __CUDA_ARCH__
    if (aligned) {
        *reinterpret_cast<ulonglong2 *>(at) = make_ulonglong2(vector.low, vector.high);
        return;
    }
#endif
    (void)aligned;
    memcpy(at, &vector, sizeof(vector));
}

/** The stripe of a block, and the even accumulator, that a lane's vector of a step belongs to. */
static inline KVF_DEVICE unsigned kvf_move_stripe(unsigned lane, unsigned step) {
    return (step * KVF_MOVE_LANES + lane) * KVF_MOVE_VECTOR_BYTES / KVF_XXH3_STRIPE_BYTES;
}

static inline KVF_DEVICE unsigned kvf_move_pair(unsigned lane) {
    return lane * KVF_MOVE_VECTOR_BYTES % KVF_XXH3_STRIPE_BYTES / 8;
}

static inline KVF_DEVICE kvf_move_keys_t kvf_move_keys_of(unsigned lane) {
    kvf_move_keys_t keys;
    unsigned pair = kvf_move_pair(lane);
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned step = 0; step < KVF_MOVE_STEPS; step++) {
            keys.step[step][i] = kvf_xxh3_key((size_t)8 * (kvf_move_stripe(lane, step) + pair + i));
        }
        bool is_last = kvf_move_stripe(lane, KVF_MOVE_STEPS - 1) == KVF_XXH3_BLOCK_STRIPES - 1;
        keys.last[i] = is_last ? kvf_xxh3_key(KVF_XXH3_LAST_KEY + (size_t)8 * (pair + i))
                               : keys.step[KVF_MOVE_STEPS - 1][i];
    }
    return keys;
}

/** @return A leaf of a list. @param idx  Below list->n_leaves. */
static inline KVF_DEVICE kvf_move_leaf_t kvf_move_leaf_of(const kvf_moves_t *list, uint32_t idx) {
    uint32_t low = 0, high = list->n - 1; /* the last move that begins at or before it */
    while (low < high) {
        uint32_t mid = low + (high - low + 1) / 2;
        if (list->moves[mid].first_leaf <= idx) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    const kvf_move_t *move = &list->moves[low];
    uint64_t from = (uint64_t)(idx - move->first_leaf) * KVF_DIGEST_LEAF_BYTES;
    uint64_t left = move->bytes - from;
    kvf_move_leaf_t leaf;
    leaf.dst = move->dst == 0 ? NULL : (uint8_t *)(uintptr_t)(move->dst + from);
    leaf.src = (const uint8_t *)(uintptr_t)(move->src + from);
    leaf.bytes = (uint32_t)(left < KVF_DIGEST_LEAF_BYTES ? left : KVF_DIGEST_LEAF_BYTES);
    leaf.aligned = ((move->dst | move->src) & (KVF_MOVE_VECTOR_BYTES - 1)) == 0;
    return leaf;
}

static inline KVF_DEVICE void kvf_move_copy_whole(const kvf_move_leaf_t *leaf, unsigned lane,
                                                  const kvf_move_keys_t *keys,
                                                  kvf_move_sums_t *sums) {
    kvf_move_vector_t vectors[KVF_MOVE_BLOCKS * KVF_MOVE_STEPS];
    for (unsigned i = 0; i < KVF_MOVE_BLOCKS * KVF_MOVE_STEPS; i++) {
        vectors[i] = kvf_move_load(
            leaf->src + (size_t)(i * KVF_MOVE_LANES + lane) * KVF_MOVE_VECTOR_BYTES, leaf->aligned);
    }
    for (unsigned i = 0; leaf->dst != NULL && i < KVF_MOVE_BLOCKS * KVF_MOVE_STEPS; i++) {
        kvf_move_store(leaf->dst + (size_t)(i * KVF_MOVE_LANES + lane) * KVF_MOVE_VECTOR_BYTES,
                       vectors[i], leaf->aligned);
    }
    for (unsigned block = 0; sums != NULL && block < KVF_MOVE_BLOCKS; block++) {
        uint64_t part[2] = {0, 0};
        for (unsigned step = 0; step < KVF_MOVE_STEPS; step++) {
            unsigned i = block * KVF_MOVE_STEPS + step;
            bool last = i == KVF_MOVE_BLOCKS * KVF_MOVE_STEPS - 1;
            kvf_xxh3_add(part, vectors[i].low, vectors[i].high,
                         last ? keys->last : keys->step[step]);
        }
        sums->part[block][0][lane] = part[0];
        sums->part[block][1][lane] = part[1];
    }
}

/** Step 1, by every lane. @param sums  NULL: no hash. */
static inline KVF_DEVICE void kvf_move_copy(const kvf_move_leaf_t *leaf, unsigned lane,
                                            const kvf_move_keys_t *keys, kvf_move_sums_t *sums) {
    if (leaf->bytes == KVF_DIGEST_LEAF_BYTES) {
        kvf_move_copy_whole(leaf, lane, keys, sums);
        return;
    }
    uint32_t vectors = leaf->bytes / KVF_MOVE_VECTOR_BYTES * KVF_MOVE_VECTOR_BYTES;
    if (leaf->dst == NULL) {
        return;
    }
    for (uint32_t at = lane * KVF_MOVE_VECTOR_BYTES; at < vectors;
         at += KVF_MOVE_LANES * KVF_MOVE_VECTOR_BYTES) {
        kvf_move_store(leaf->dst + at, kvf_move_load(leaf->src + at, leaf->aligned), leaf->aligned);
    }
    for (uint32_t at = vectors + lane; at < leaf->bytes; at += KVF_MOVE_LANES) {
        leaf->dst[at] = leaf->src[at];
    }
}

/** Step 2, by every lane, when all have done the first. */
static inline KVF_DEVICE void kvf_move_fold(const kvf_move_leaf_t *leaf, unsigned lane,
                                            kvf_move_sums_t *sums) {
    if (lane >= KVF_XXH3_LANES || leaf->bytes != KVF_DIGEST_LEAF_BYTES) {
        return;
    }
    uint64_t acc = kvf_xxh3_start(lane);
    for (unsigned block = 0; block < KVF_MOVE_BLOCKS; block++) {
        /* lanes whose vectors belong to this accumulator: every fourth */
        for (unsigned from = lane / 2; from < KVF_MOVE_LANES; from += KVF_XXH3_LANES / 2) {
            acc += sums->part[block][lane % 2][from];
        }
        if (block + 1 < KVF_MOVE_BLOCKS) { /* the last one ends with the input, not scrambled */
            acc = kvf_xxh3_scramble(acc, lane);
        }
    }
    sums->acc[lane] = acc;
}

/** Step 3, by one lane, when all have done the second. @return The leaf's XXH3-64. */
static inline KVF_DEVICE uint64_t kvf_move_hash(const kvf_move_leaf_t *leaf,
                                                const kvf_move_sums_t *sums) {
    return leaf->bytes == KVF_DIGEST_LEAF_BYTES
               ? kvf_xxh3_merge(sums->acc, leaf->bytes)
               : kvf_xxh3(leaf->dst != NULL ? leaf->dst : leaf->src, leaf->bytes);
}

#endif
