/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's kernels: the bodies that nvcc compiles, on the CPU, with every address looked up.
 */
#include "kernels/attention.h"
#include "kernels/attention_body.h"
#include "kernels/move.h"
#include "kernels/reshape.h"
#include "tests/support/cuda/standin_impl.h"

/* ---- moves ---- */

static bool reach_moves(kvf_moves_t *list) {
    for (uint32_t i = 0; i < list->n; i++) {
        kvf_move_t *move = &list->moves[i];
        uint64_t to = move->dst;
        if (to != 0) {
            move->dst = (uintptr_t)standin_reach_to(to, move->bytes);
        }
        move->src = (uintptr_t)standin_reach(move->src, move->bytes);
        if (move->src == 0 || (to != 0 && move->dst == 0)) {
            return false;
        }
    }
    if (list->leaves != NULL) {
        uint8_t *at = standin_reach_to((uintptr_t)list->leaves, list->n_leaves * sizeof(uint64_t));
        list->leaves = (uint64_t *)(void *)at;
        return at != NULL;
    }
    return true;
}

static bool run_moves(void *args) {
    kvf_moves_t *list = args;
    if (!reach_moves(list)) {
        return false;
    }
    kvf_moves_run(list);
    return true;
}

int kvf_moves_load(void) {
    return standin_enter("kvf_moves_load", cudaErrorNoKernelImageForDevice);
}

int kvf_moves_launch(const kvf_moves_t *list, void *stream) {
    return list->n == 0
               ? cudaSuccess
               : standin_launch("kvf_moves_launch", stream, run_moves, list, sizeof(*list));
}

/* ---- blocks between layouts ---- */

static bool run_reshape(void *args) {
    kvf_reshape_t *list = args;
    uint64_t vectors = (uint64_t)list->outer * list->tokens * list->vector_bytes;
    for (uint32_t i = 0; i < list->n_pairs; i++) {
        kvf_block_pair_t *pair = &list->pairs[i];
        pair->dst = (uintptr_t)standin_reach_to(pair->dst, vectors * list->dst.heads);
        pair->src = (uintptr_t)standin_reach(pair->src, vectors * list->src.heads);
        if (pair->dst == 0 || pair->src == 0) {
            return false;
        }
    }
    kvf_reshape_run(list);
    return true;
}

int kvf_reshape_launch(const kvf_reshape_t *list, void *stream) {
    return list->n_pairs == 0
               ? cudaSuccess
               : standin_launch("kvf_reshape_launch", stream, run_reshape, list, sizeof(*list));
}

/* ---- attention ---- */

typedef struct attention_args {
    kvf_attention_t attention;
    const float *q;
    float *out;
    kvf_attention_head_t *work;
} attention_args_t;

static const void *reach(const void *address, uint64_t bytes) {
    return standin_reach((uintptr_t)address, bytes);
}

static bool run_attention(void *args) {
    attention_args_t *a = args;
    kvf_attention_t *attention = &a->attention;
    const kvf_attention_shape_t *shape = &attention->shape;
    kvf_attention_depth_t depths[8];
    uint64_t n = attention->n_seqs, rows = n * shape->q_heads;
    const kvf_attention_depth_t *theirs =
        reach(attention->depths, attention->n_depths * sizeof(depths[0]));
    if (theirs == NULL || attention->n_depths > 8) {
        return false;
    }
    for (uint32_t d = 0; d < attention->n_depths; d++) {
        depths[d] = theirs[d];
        depths[d].page_indptr = reach(theirs[d].page_indptr, (n + 1) * sizeof(int32_t));
        depths[d].page_indices =
            reach(theirs[d].page_indices, (uint64_t)theirs[d].n_pages * sizeof(int32_t));
        depths[d].length_info = reach(theirs[d].length_info, 3 * n * sizeof(int32_t));
        depths[d].k_rope_pos_offset = reach(theirs[d].k_rope_pos_offset, n * sizeof(int32_t));
        if (depths[d].page_indptr == NULL || depths[d].page_indices == NULL ||
            depths[d].length_info == NULL || depths[d].k_rope_pos_offset == NULL) {
            return false;
        }
    }
    attention->depths = depths;
    attention->pool =
        reach(attention->pool,
              (uint64_t)attention->n_slots * kvf_attention_offset(shape, shape->n_layers, 0, 0, 0));
    const float *q = reach(a->q, rows * shape->head_dim * sizeof(float));
    float *out = (float *)(void *)standin_reach_to((uintptr_t)a->out,
                                                   rows * shape->value_dim * sizeof(float));
    uint8_t *work =
        standin_reach_to((uintptr_t)a->work, n * shape->kv_heads * sizeof(kvf_attention_head_t));
    for (uint64_t i = 0; i < n * shape->kv_heads && attention->pool != NULL && work != NULL; i++) {
        kvf_attention_sequence_head(attention, (uint32_t)(i / shape->kv_heads),
                                    (uint32_t)(i % shape->kv_heads), q, out,
                                    (kvf_attention_head_t *)(void *)work + i);
    }
    return attention->pool != NULL && work != NULL;
}

int kvf_attention_launch(const kvf_attention_t *attention, const float *q, float *out,
                         kvf_attention_head_t *work, void *stream) {
    const attention_args_t args = {*attention, q, out, work};
    return standin_launch("kvf_attention_launch", stream, run_attention, &args, sizeof(args));
}
