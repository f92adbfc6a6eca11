/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_ATTENTION_SCENE_H
#define KVF_TESTS_ATTENTION_SCENE_H

/**
 * @file
 * A batch for the judge, every element of which is known: a function of (content, position, layer,
 * k or v, head, dim). The expected result is computed in double precision from those elements and
 * the positions that L, W and sinks make visible; it sees no page, slot or array. Pages and arrays
 * are made here, too, apart from what the product has for that.
 */

#include "../support/random.h"
#include "kernels/attention.h"

#include <stdbool.h>

#define N_SEQS 3
#define N_DEPTHS 2
#define MAX_PAGES 640 /* listed pages of a sequence at a depth */
#define MAX_SLOTS (N_SEQS * N_DEPTHS * MAX_PAGES)
#define N_SHAPES 3 /* gqa, mqa, mla */
#define LAYERS 2
#define STRANGER 77 /* content that no sequence has */

/** What a sequence is; its first prefix tokens are those of all sequences with a prefix. */
typedef struct seq {
    int64_t length, window, sinks, prefix;
    bool otherwise; /**< the arrays say it in the other way that means the same */
} seq_t;

/** The arrays of a depth. */
typedef struct depth {
    int32_t indptr[N_SEQS + 1];
    int32_t indices[N_SEQS * MAX_PAGES];
    int32_t info[3 * N_SEQS];
    int32_t offset[N_SEQS];
} depth_t;

typedef struct scene {
    kvf_layer_group_t group;
    kvf_attention_shape_t shape;
    uint32_t layer_idx;
    seq_t seqs[N_SEQS];
    depth_t depths[N_DEPTHS];
    uint8_t *pool;
    int32_t slots[MAX_SLOTS]; /* in random order; the first n_used are taken */
    int32_t n_slots, n_used;
    int32_t prefix_slots[MAX_PAGES]; /* by ordinal; -1: not written yet */
    float *q, *want, *out;
} scene_t;

/** @return Name of a shape. */
const char *scene_shape_name(size_t shape_idx);

/** @return The stored code of an element. */
uint32_t scene_element(kvf_dtype_t dtype, int64_t content, int64_t position, uint32_t layer,
                       uint32_t kv, uint32_t head, uint32_t dim);

/** @return The value of a code, by the definition of its format. */
double scene_decode(kvf_dtype_t dtype, uint32_t code);

/** @return Whether the step sees a position. */
bool scene_visible(const seq_t *seq, int64_t position);

/** @return The content that a sequence has at a position. */
int64_t scene_content(const scene_t *scene, uint32_t s, int64_t position);

/** Write one block that starts at position first; tokens from length on are zero. */
void scene_write(scene_t *scene, int32_t slot, int64_t content, int64_t first, int64_t length);

/** @return A scene with pages in random slots, and what is expected of it. */
scene_t *scene_make(size_t shape_idx, kvf_dtype_t dtype, kvf_order_t order, uint32_t t,
                    const seq_t *seqs, test_random_t *random);

void scene_free(scene_t *scene);

/** Run the judge on the scene's pages with these arrays; the result is in scene->out. */
KVF_CHECK kvf_status_t scene_run(const scene_t *scene, const depth_t *depths, kvf_detail_t *detail);

/** @return The distance of what a sequence got from what it should, over its heads. */
double scene_distance(const scene_t *scene, uint32_t s);

#endif
