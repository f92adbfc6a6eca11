/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_RESHAPE_H
#define KVF_KERNELS_RESHAPE_H

/**
 * @file
 * Blocks from one layout into another: from heads of tokens (HND) to tokens of heads (NHD) and
 * back, and slices of heads between blocks that hold different ones, as two workers with different
 * tensor parallelism have them. Many blocks in one launch.
 *
 * A block is [layer][kv][heads and tokens, in its order][dim].
 */

#include "kvmgr/layout.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The blocks of one side. */
typedef struct kvf_block_shape {
    kvf_order_t order;
    uint32_t heads;      /**< of the block */
    uint32_t head_first; /**< the first of those that are copied */
} kvf_block_shape_t;

/** Two blocks. Addresses are numbers: of a device, or what it maps. */
typedef struct kvf_block_pair {
    uint64_t dst, src;
} kvf_block_pair_t;

/** Pairs of one launch. */
#define KVF_RESHAPE_PAIRS 1024U

typedef struct kvf_reshape {
    kvf_block_shape_t dst, src;
    uint32_t outer;        /**< layers times k and v */
    uint32_t tokens;       /**< of a block */
    uint32_t n_heads;      /**< that are copied */
    uint32_t vector_bytes; /**< of a head of a token */
    uint32_t unit_bytes;   /**< set by kvf_reshape_begin(): what one thread copies */
    uint32_t n_pairs;
    kvf_block_pair_t pairs[KVF_RESHAPE_PAIRS];
} kvf_reshape_t;

/**
 * Begin a list.
 *
 * @param group    Gives layers, k and v, tokens, and the vector; its order and heads do not count.
 * @param n_heads  Heads that are copied, each to its place.
 * @return false: the heads are not in both blocks. @thread any
 */
bool kvf_reshape_begin(kvf_reshape_t *list, const kvf_layer_group_t *group,
                       const kvf_block_shape_t *dst, const kvf_block_shape_t *src,
                       uint32_t n_heads);

/** Add a pair of blocks, any alignment (multiples of 16 are fastest), none of which overlaps
 * another. @return false: the list is full. @thread any */
bool kvf_reshape_add(kvf_reshape_t *list, uint64_t dst, uint64_t src);

/** Do it on the calling thread, with addresses of this process. @thread any */
void kvf_reshape_run(const kvf_reshape_t *list);

/** Queue it on the current device (reshape.cu). @return A cudaError_t. As kvf_moves_launch(). */
int kvf_reshape_launch(const kvf_reshape_t *list, void *stream);

#ifdef __cplusplus
}
#endif

#endif
