/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks between layouts, on the CPU, against kvf_group_offset(): every element is looked for where
 * the layouts say that it is. */
#include "kernels/reshape.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static kvf_reshape_t list;

static kvf_layer_group_t group_of(kvf_order_t order, uint32_t heads, uint32_t dim,
                                  kvf_dtype_t dtype) {
    return (kvf_layer_group_t){.name = "g",
                               .n_layers = 3,
                               .layers = {0, 1, 2},
                               .tokens_per_block = 5,
                               .kv_heads = heads,
                               .head_dim = dim,
                               .kv_factor = 2,
                               .dtype = dtype,
                               .order = order};
}

/* An element says which one it is. */
static uint8_t byte_of(uint32_t layer, uint32_t kv, uint32_t head, uint32_t token, uint32_t i) {
    return (uint8_t)(1 + layer * 83 + kv * 41 + head * 29 + token * 13 + i * 7);
}

/* Copy heads [from, from + n) of a source to [to, to + n) of a destination; every byte of the
 * destination is checked, those of other heads too. */
static void check(const kvf_layer_group_t *src, uint32_t from, const kvf_layer_group_t *dst,
                  uint32_t to, uint32_t n, size_t shift) {
    const kvf_block_shape_t s = {src->order, src->kv_heads, from},
                            d = {dst->order, dst->kv_heads, to};
    uint32_t vector = src->head_dim * kvf_dtype_bytes(src->dtype);
    uint64_t src_bytes = kvf_group_block_bytes(src), dst_bytes = kvf_group_block_bytes(dst);
    uint8_t *sources = aligned_alloc(64, 65536), *targets = aligned_alloc(64, 65536);
    cr_assert(3 * (src_bytes + 32) < 65536 && 3 * (dst_bytes + 32) < 65536);
    memset(targets, 0, 65536);
    cr_assert(kvf_reshape_begin(&list, src, &d, &s, n));
    for (uint32_t b = 0; b < 3; b++) {
        uint8_t *block = sources + b * (src_bytes + 16) + shift;
        for (uint32_t l = 0; l < 3; l++) {
            for (uint32_t kv = 0; kv < 2; kv++) {
                for (uint32_t h = 0; h < src->kv_heads; h++) {
                    for (uint32_t t = 0; t < 5; t++) {
                        for (uint32_t i = 0; i < vector; i++) {
                            block[kvf_group_offset(src, l, kv, h, t) + i] =
                                (uint8_t)(byte_of(l, kv, h - from, t, i) + b);
                        }
                    }
                }
            }
        }
        cr_assert(
            kvf_reshape_add(&list, (uintptr_t)(targets + b * (dst_bytes + 16)), (uintptr_t)block));
    }
    kvf_reshape_run(&list);
    for (uint32_t b = 0; b < 3; b++) {
        const uint8_t *block = targets + b * (dst_bytes + 16);
        for (uint32_t l = 0; l < 3; l++) {
            for (uint32_t kv = 0; kv < 2; kv++) {
                for (uint32_t h = 0; h < dst->kv_heads; h++) {
                    for (uint32_t t = 0; t < 5; t++) {
                        for (uint32_t i = 0; i < vector; i++) {
                            uint8_t want = h >= to && h < to + n
                                               ? (uint8_t)(byte_of(l, kv, h - to, t, i) + b)
                                               : 0;
                            cr_assert_eq(block[kvf_group_offset(dst, l, kv, h, t) + i], want,
                                         "block %u, layer %u, kv %u, head %u, token %u, byte %u", b,
                                         l, kv, h, t, i);
                        }
                    }
                }
            }
        }
        for (size_t i = dst_bytes; i < dst_bytes + 16; i++) {
            cr_assert_eq(block[i], 0, "behind block %u", b);
        }
    }
    free(sources);
    free(targets);
}

Test(reshape, between_orders_and_slices) {
    static const kvf_order_t orders[] = {KVF_ORDER_HND, KVF_ORDER_NHD};
    static const struct {
        uint32_t src_heads, from, dst_heads, to, n;
    } slices[] = {{4, 0, 4, 0, 4}, {4, 1, 2, 0, 2}, {1, 0, 4, 3, 1}, {2, 0, 4, 2, 2}};
    static const struct {
        uint32_t dim;
        kvf_dtype_t dtype;
    } vectors[] = {
        {64, KVF_DTYPE_BF16}, {12, KVF_DTYPE_BF16}, {5, KVF_DTYPE_F8_E4M3}, {9, KVF_DTYPE_F32}};
    for (size_t o = 0; o < 4; o++) {
        for (size_t s = 0; s < sizeof(slices) / sizeof(slices[0]); s++) {
            for (size_t v = 0; v < sizeof(vectors) / sizeof(vectors[0]); v++) {
                kvf_layer_group_t src =
                    group_of(orders[o / 2], slices[s].src_heads, vectors[v].dim, vectors[v].dtype);
                kvf_layer_group_t dst =
                    group_of(orders[o % 2], slices[s].dst_heads, vectors[v].dim, vectors[v].dtype);
                check(&src, slices[s].from, &dst, slices[s].to, slices[s].n, 0);
                check(&src, slices[s].from, &dst, slices[s].to, slices[s].n, 4);
                check(&src, slices[s].from, &dst, slices[s].to, slices[s].n, 1);
            }
        }
    }
}

Test(reshape, refused) {
    kvf_layer_group_t group = group_of(KVF_ORDER_HND, 4, 64, KVF_DTYPE_BF16);
    const kvf_block_shape_t four = {KVF_ORDER_HND, 4, 0}, last = {KVF_ORDER_NHD, 4, 3},
                            behind = {KVF_ORDER_HND, 4, UINT32_MAX};
    cr_assert_not(kvf_reshape_begin(&list, &group, &four, &four, 5));
    cr_assert_not(kvf_reshape_begin(&list, &group, &four, &four, 0));
    cr_assert_not(kvf_reshape_begin(&list, &group, &four, &last, 2));
    cr_assert_not(kvf_reshape_begin(&list, &group, &last, &four, 2));
    cr_assert_not(kvf_reshape_begin(&list, &group, &behind, &four, 1));
    cr_assert(kvf_reshape_begin(&list, &group, &four, &last, 1));
    for (uint32_t i = 0; i < KVF_RESHAPE_PAIRS; i++) {
        cr_assert(kvf_reshape_add(&list, 64 * (i + 1), 64 * (i + 1)));
    }
    cr_assert_not(kvf_reshape_add(&list, 64, 64));
    cr_assert_eq(list.unit_bytes, 16);
}
