/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_H
#define KVF_KERNELS_MOVE_H

/**
 * @file
 * Many copies at once, with the hashes of their leaves: what one launch on a device does. A device
 * is at its best with all pieces of a window in one launch; one copy call for each would cost some
 * microseconds a piece, whatever its size.
 *
 * The list travels as the kernel's parameter, so a launch needs no memory of its own and no copy
 * before it. The same body runs on the CPU (kvf_move_run()).
 */

#include "kernels/digest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** One copy of consecutive bytes. Addresses are numbers: device memory, or what the device maps. */
typedef struct kvf_move {
    uint64_t dst; /**< 0: nothing is stored, the bytes are only hashed */
    uint64_t src;
    uint32_t bytes;      /**< > 0 */
    uint32_t first_leaf; /**< of all leaves of the list */
} kvf_move_t;

/** Moves of one launch: a kernel's parameters may have 32,764 bytes (CUDA 12.1, sm_70). */
#define KVF_MOVES 1024U

typedef struct kvf_moves {
    uint64_t *leaves; /**< out: XXH3-64 of each leaf that was stored, or read where nothing is; the
                         device reaches it; NULL: not wanted */
    uint32_t n;
    uint32_t n_leaves; /**< of KVF_DIGEST_LEAF_BYTES each, the last one of a move may be shorter */
    kvf_move_t moves[KVF_MOVES];
} kvf_moves_t;

/** Empty a list. @thread any */
static inline void kvf_moves_begin(kvf_moves_t *list, uint64_t *leaves) {
    list->leaves = leaves;
    list->n = 0;
    list->n_leaves = 0;
}

/**
 * Add a move to a list.
 *
 * @param dst, src  Any alignment; multiples of 16 are fastest. No two destinations of a list
 * overlap, nor does any with a source.
 * @param bytes     1 to 2^31.
 * @return false: the list is full, launch it first.
 * @thread any
 */
static inline bool kvf_moves_add(kvf_moves_t *list, uint64_t dst, uint64_t src, uint64_t bytes) {
    if (list->n == KVF_MOVES) {
        return false;
    }
    kvf_move_t *move = &list->moves[list->n++];
    move->dst = dst;
    move->src = src;
    move->bytes = (uint32_t)bytes;
    move->first_leaf = list->n_leaves;
    list->n_leaves += (uint32_t)((bytes + KVF_DIGEST_LEAF_BYTES - 1) / KVF_DIGEST_LEAF_BYTES);
    return true;
}

/** Do the moves of a list on the calling thread: what a launch does, by the same body; addresses
 * are of this process. @thread any  @cost for checks, not for speed: see kernels/copy.h */
void kvf_moves_run(const kvf_moves_t *list);

/** Load the kernel to the current device. @return A cudaError_t: 0, or why it cannot run there.
 * @thread any, whose current device it is */
int kvf_moves_load(void);

/**
 * Queue the moves of a list on the current device (move.cu; the tests' stand-in runtime has its
 * own). The list may be changed when it returns.
 *
 * @param stream  A cudaStream_t.
 * @return A cudaError_t: 0 (cudaSuccess), or why nothing was queued.
 * @thread any, whose current device is the stream's  @cost one launch; no allocation
 */
int kvf_moves_launch(const kvf_moves_t *list, void *stream);

#ifdef __cplusplus
}
#endif

#endif
