/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/move.h"

#include "kernels/move_body.h"

#include <cuda_runtime.h>

#define WARPS 8
#define MOST_BLOCKS 2048 /* more leaves than these have at once: each takes several */

static_assert(sizeof(kvf_moves_t) <= 32764, "a kernel's parameters");

__global__ void __launch_bounds__(WARPS *KVF_MOVE_LANES)
    moves_kernel(const __grid_constant__ kvf_moves_t list) {
    __shared__ kvf_move_sums_t shared[WARPS];
    const unsigned warp = threadIdx.x / KVF_MOVE_LANES, lane = threadIdx.x % KVF_MOVE_LANES;
    kvf_move_sums_t *sums = list.leaves == NULL ? NULL : &shared[warp];
    const kvf_move_keys_t keys = kvf_move_keys_of(lane);
    for (uint32_t idx = blockIdx.x * WARPS + warp; idx < list.n_leaves; idx += gridDim.x * WARPS) {
        const kvf_move_leaf_t leaf = kvf_move_leaf_of(&list, idx);
        kvf_move_copy(&leaf, lane, &keys, sums);
        if (sums != NULL) {
            __syncwarp();
            kvf_move_fold(&leaf, lane, sums);
            __syncwarp();
            if (lane == 0) {
                list.leaves[idx] = kvf_move_hash(&leaf, sums);
            }
            __syncwarp(); /* the next leaf uses the same sums */
        }
    }
}

int kvf_moves_load(void) {
    struct cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, moves_kernel);
}

int kvf_moves_launch(const kvf_moves_t *list, void *stream) {
    unsigned blocks = (list->n_leaves + WARPS - 1) / WARPS;
    if (blocks == 0) {
        return cudaSuccess;
    }
    blocks = blocks > MOST_BLOCKS ? MOST_BLOCKS : blocks;
    moves_kernel<<<blocks, WARPS * KVF_MOVE_LANES, 0, (cudaStream_t)stream>>>(*list);
    return cudaGetLastError();
}
