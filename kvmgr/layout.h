/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_LAYOUT_H
#define KVF_KVMGR_LAYOUT_H

/**
 * @file
 * What a model's KV cache looks like: layer groups, and where a layer, head and token lie inside a
 * block.
 *
 * A slot (page) holds one block of one layer group, all layers of that group, block-major:
 * HND: [layer][k,v][head][token][dim]; NHD: [layer][k,v][token][head][dim]. Installed; plain
 * structs.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_MAX_GROUPS 16
#define KVF_MAX_GROUP_LAYERS 256
#define KVF_GROUP_NAME_BYTES 32

typedef enum kvf_dtype {
    KVF_DTYPE_F32,
    KVF_DTYPE_F16,
    KVF_DTYPE_BF16,
    KVF_DTYPE_F8_E4M3
} kvf_dtype_t;
typedef enum kvf_order { KVF_ORDER_HND, KVF_ORDER_NHD } kvf_order_t;
typedef enum kvf_group_kind { KVF_GROUP_PAGED, KVF_GROUP_STATE } kvf_group_kind_t;
typedef enum kvf_group_role { KVF_GROUP_TARGET, KVF_GROUP_DRAFT } kvf_group_role_t;

/** Layers that share a block table: same window, same block shape. */
typedef struct kvf_layer_group {
    char name[KVF_GROUP_NAME_BYTES]; /**< unique in the layout, printable, zero-terminated */
    uint32_t n_layers;
    uint32_t layers[KVF_MAX_GROUP_LAYERS]; /**< global layer ids, strictly ascending */
    int64_t window; /**< tokens, the model's true window; 0 = full attention */
    int64_t sinks;  /**< tokens that stay visible in front of the window */
    uint32_t tokens_per_block;
    uint32_t kv_heads;  /**< of the whole model, unsharded */
    uint32_t head_dim;  /**< elements */
    uint32_t kv_factor; /**< 2; 1 for MLA */
    kvf_dtype_t dtype;
    kvf_order_t order;
    kvf_group_kind_t kind;
    kvf_group_role_t role;
} kvf_layer_group_t;

typedef struct kvf_layout {
    uint32_t n_groups;
    kvf_layer_group_t groups[KVF_MAX_GROUPS];
} kvf_layout_t;

/** A block table of one group: entry i is the slot that holds tokens [i*t, (i+1)*t), or -1.
 * Borrowed memory. */
typedef struct kvf_table {
    const int32_t *slots;
    int64_t n_blocks;
} kvf_table_t;

/** @return Bytes of one element. @thread any */
KVF_API uint32_t kvf_dtype_bytes(kvf_dtype_t dtype);

/** @return "f32" | "f16" | "bf16" | "f8_e4m3". @thread any */
KVF_API const char *kvf_dtype_name(kvf_dtype_t dtype);

/**
 * Check a layout: names, ascending layers that no other group has, sizes > 0 that do not overflow,
 * window and sinks >= 0 and <= 2^40, kinds that this version can carry.
 *
 * @return KVF_OK, KVF_ERR_INVALID (the text names group and field), KVF_ERR_UNSUPPORTED (state
 * groups).
 * @thread any
 */
KVF_API KVF_CHECK kvf_status_t kvf_layout_check(const kvf_layout_t *layout, kvf_detail_t *detail);

/** @return Bytes of one layer of one block, of a checked group. @thread any */
KVF_API uint64_t kvf_group_layer_bytes(const kvf_layer_group_t *group);

/** @return Bytes of one slot: all layers of one block, of a checked group. @thread any */
KVF_API uint64_t kvf_group_block_bytes(const kvf_layer_group_t *group);

/**
 * @param layer_idx  Index in group->layers, < n_layers.
 * @param kv         0 = k, 1 = v; < kv_factor.
 * @param head       < kv_heads.
 * @param token      Inside the block, < tokens_per_block.
 * @return Byte offset of that head vector (HND and NHD alike) inside the slot.
 * @thread any
 */
KVF_API uint64_t kvf_group_offset(const kvf_layer_group_t *group, uint32_t layer_idx, uint32_t kv,
                                  uint32_t head, uint32_t token);

/**
 * Local indices of the group's layers whose global ids lie in [first, end): they are consecutive.
 *
 * @param[out] first_idx_p  First local index.
 * @param[out] end_idx_p    One past the last; equal to first when the group has none.
 * @thread any
 */
KVF_API void kvf_group_layer_span(const kvf_layer_group_t *group, uint32_t first, uint32_t end,
                                  uint32_t *first_idx_p, uint32_t *end_idx_p);

/** @return Digest of every field of a checked layout, the fast path of equality. Not cryptographic.
 *  @thread any */
KVF_API uint64_t kvf_layout_digest(const kvf_layout_t *layout);

/**
 * Compare two checked layouts field by field.
 *
 * @param ours, theirs  Named so in the text.
 * @return KVF_OK when equal, or KVF_ERR_INCOMPATIBLE (the text names the first field that differs,
 * with both values: "group full: head_dim 256 here, 64 there").
 * @thread any
 */
KVF_API KVF_CHECK kvf_status_t kvf_layout_compare(const kvf_layout_t *ours,
                                                  const kvf_layout_t *theirs, kvf_detail_t *detail);

#ifdef __cplusplus
}
#endif

#endif
