/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/move.h"

#include "kernels/move_body.h"

void kvf_moves_run(const kvf_moves_t *list) {
    kvf_move_sums_t sums, *wanted = list->leaves == NULL ? NULL : &sums;
    for (uint32_t idx = 0; idx < list->n_leaves; idx++) {
        const kvf_move_leaf_t leaf = kvf_move_leaf_of(list, idx);
        for (unsigned lane = 0; lane < KVF_MOVE_LANES; lane++) {
            const kvf_move_keys_t keys = kvf_move_keys_of(lane);
            kvf_move_copy(&leaf, lane, &keys, wanted);
        }
        if (wanted != NULL) {
            for (unsigned lane = 0; lane < KVF_MOVE_LANES; lane++) {
                kvf_move_fold(&leaf, lane, wanted);
            }
            list->leaves[idx] = kvf_move_hash(&leaf, wanted);
        }
    }
}
