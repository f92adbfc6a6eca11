/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/reshape.h"

#include "kernels/reshape_body.h"

#define MOST_UNIT_BYTES 16U

/* The largest power of two up to 16 that divides a number. */
static uint32_t unit_of(uint64_t number) {
    uint64_t lowest = number & (~number + 1);
    return lowest == 0 || lowest > MOST_UNIT_BYTES ? MOST_UNIT_BYTES : (uint32_t)lowest;
}

static bool has(const kvf_block_shape_t *shape, uint32_t n_heads) {
    return shape->head_first <= shape->heads && n_heads <= shape->heads - shape->head_first;
}

bool kvf_reshape_begin(kvf_reshape_t *list, const kvf_layer_group_t *group,
                       const kvf_block_shape_t *dst, const kvf_block_shape_t *src,
                       uint32_t n_heads) {
    if (!has(dst, n_heads) || !has(src, n_heads) || n_heads == 0) {
        return false;
    }
    list->dst = *dst;
    list->src = *src;
    list->outer = group->n_layers * group->kv_factor;
    list->tokens = (uint32_t)group->tokens_per_block;
    list->n_heads = n_heads;
    list->vector_bytes = group->head_dim * kvf_dtype_bytes(group->dtype);
    list->unit_bytes = unit_of(list->vector_bytes);
    list->n_pairs = 0;
    return true;
}

bool kvf_reshape_add(kvf_reshape_t *list, uint64_t dst, uint64_t src) {
    if (list->n_pairs == KVF_RESHAPE_PAIRS) {
        return false;
    }
    uint32_t unit = unit_of(dst | src);
    list->unit_bytes = unit < list->unit_bytes ? unit : list->unit_bytes;
    list->pairs[list->n_pairs++] = (kvf_block_pair_t){dst, src};
    return true;
}

void kvf_reshape_run(const kvf_reshape_t *list) {
    uint64_t n = kvf_reshape_units(list);
    for (uint64_t i = 0; i < n; i++) {
        kvf_reshape_unit(list, i);
    }
}
