/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_RESHAPE_BODY_H
#define KVF_KERNELS_RESHAPE_BODY_H

/**
 * @file
 * The body of reshape.h. Its unit of work is a unit of bytes of a vector, in the order of the
 * destination, so that neighbours store side by side.
 */

#include "kernels/device.h"
#include "kernels/reshape.h"

#include <string.h>

/** @return Units of the whole list. */
static inline KVF_DEVICE uint64_t kvf_reshape_units(const kvf_reshape_t *list) {
    return (uint64_t)list->n_pairs * list->outer * list->tokens * list->n_heads *
           (list->vector_bytes / list->unit_bytes);
}

/** @return Where a vector begins in a block. */
static inline KVF_DEVICE uint64_t kvf_reshape_offset(const kvf_reshape_t *list,
                                                     const kvf_block_shape_t *shape, uint32_t outer,
                                                     uint32_t head, uint32_t token) {
    uint64_t tokens = list->tokens, heads = shape->heads, at = head + (uint64_t)shape->head_first;
    uint64_t inner = shape->order == KVF_ORDER_HND ? at * tokens + token : token * heads + at;
    return (outer * heads * tokens + inner) * list->vector_bytes;
}

static inline KVF_DEVICE void kvf_reshape_unit(const kvf_reshape_t *list, uint64_t idx) {
    uint32_t units = list->vector_bytes / list->unit_bytes;
    uint64_t in_vector = idx % units * list->unit_bytes;
    uint64_t rest = idx / units;
    uint32_t head, token;
    if (list->dst.order == KVF_ORDER_HND) {
        token = (uint32_t)(rest % list->tokens);
        rest /= list->tokens;
        head = (uint32_t)(rest % list->n_heads);
        rest /= list->n_heads;
    } else {
        head = (uint32_t)(rest % list->n_heads);
        rest /= list->n_heads;
        token = (uint32_t)(rest % list->tokens);
        rest /= list->tokens;
    }
    uint32_t outer = (uint32_t)(rest % list->outer);
    const kvf_block_pair_t *pair = &list->pairs[rest / list->outer];
    uint8_t *to = (uint8_t *)(uintptr_t)(pair->dst + in_vector +
                                         kvf_reshape_offset(list, &list->dst, outer, head, token));
    const uint8_t *from =
        (const uint8_t *)(uintptr_t)(pair->src + in_vector +
                                     kvf_reshape_offset(list, &list->src, outer, head, token));
#ifdef __CUDA_ARCH__
    switch (list->unit_bytes) { /* both are aligned to it */
    case 16:
        *reinterpret_cast<ulonglong2 *>(to) = *reinterpret_cast<const ulonglong2 *>(from);
        return;
    case 8:
        *reinterpret_cast<uint64_t *>(to) = *reinterpret_cast<const uint64_t *>(from);
        return;
    case 4:
        *reinterpret_cast<uint32_t *>(to) = *reinterpret_cast<const uint32_t *>(from);
        return;
    case 2:
        *reinterpret_cast<uint16_t *>(to) = *reinterpret_cast<const uint16_t *>(from);
        return;
    default:
        *to = *from;
        return;
    }
#else
    memcpy(to, from, list->unit_bytes);
#endif
}

#endif
