/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention.h"

#include "kernels/attention_body.h"
#include "kvmgr/base/size.h"

#include <inttypes.h>

kvf_status_t kvf_attention_shape_of(const kvf_layer_group_t *group, uint32_t q_heads,
                                    uint32_t value_dim, kvf_attention_shape_t *shape_p,
                                    kvf_detail_t *detail) {
    uint32_t turning = group->head_dim;
    if (group->kv_factor == 1) {
        turning = value_dim < group->head_dim ? group->head_dim - value_dim : 0;
    }
    kvf_attention_shape_t shape = {
        .dtype = group->dtype,
        .order = group->order,
        .n_layers = group->n_layers,
        .kv_factor = group->kv_factor,
        .kv_heads = group->kv_heads,
        .head_dim = group->head_dim,
        .tokens_per_block = group->tokens_per_block,
        .q_heads = q_heads,
        .value_dim = value_dim,
        .rope_dims = turning & ~1U,
        .rope_theta = 10000.0F,
        .scale = 1.0F / sqrtf((float)group->head_dim),
    };
    kvf_status_t status = kvf_attention_check_shape(&shape, detail);
    if (status == KVF_OK) {
        *shape_p = shape;
    }
    return status;
}

/* The bytes of a slot must be countable. */
static kvf_status_t check_block(const kvf_attention_shape_t *shape, kvf_detail_t *detail) {
    const uint64_t factors[] = {shape->n_layers, shape->kv_factor, shape->kv_heads,
                                shape->tokens_per_block, shape->head_dim};
    uint64_t bytes = kvf_attention_element_bytes(shape->dtype);
    for (size_t i = 0; i < sizeof(factors) / sizeof(factors[0]); i++) {
        if (kvf_mul_u64(bytes, factors[i], &bytes) != KVF_OK) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "attention: a block is larger than 2^64 bytes; check n_layers, "
                            "kv_heads, tokens_per_block and head_dim");
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_attention_check_shape(const kvf_attention_shape_t *shape, kvf_detail_t *detail) {
    const struct {
        const char *name;
        uint32_t value;
        uint32_t least;
        uint32_t most;
    } fields[] = {
        {"dtype", (uint32_t)shape->dtype, KVF_DTYPE_F32, KVF_DTYPE_F8_E4M3},
        {"order", (uint32_t)shape->order, KVF_ORDER_HND, KVF_ORDER_NHD},
        {"n_layers", shape->n_layers, 1, KVF_MAX_GROUP_LAYERS},
        {"kv_factor", shape->kv_factor, 1, 2},
        {"kv_heads", shape->kv_heads, 1, UINT32_MAX},
        {"head_dim", shape->head_dim, 1, UINT32_MAX},
        {"tokens_per_block", shape->tokens_per_block, 1, INT32_MAX},
        {"value_dim", shape->value_dim, 1, shape->head_dim},
        {"rope_dims", shape->rope_dims, 0,
         shape->kv_factor == 1 ? shape->head_dim - shape->value_dim : shape->head_dim},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "attention: %s is %" PRIu32 "; give a number from %" PRIu32
                            " to %" PRIu32,
                            fields[i].name, fields[i].value, fields[i].least, fields[i].most);
        }
    }
    if (shape->q_heads == 0 || shape->q_heads % shape->kv_heads != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: q_heads is %" PRIu32 "; give a multiple of kv_heads, %" PRIu32,
                        shape->q_heads, shape->kv_heads);
    }
    if (shape->rope_dims % 2 != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: rope_dims is %" PRIu32 "; elements turn in pairs",
                        shape->rope_dims);
    }
    if (!isfinite(shape->scale) || !isfinite(shape->rope_theta) || shape->rope_theta <= 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: scale is %g and rope_theta %g; give finite numbers, and a "
                        "rope_theta above 0",
                        (double)shape->scale, (double)shape->rope_theta);
    }
    if (shape->head_dim > KVF_ATTENTION_MAX_DIM) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "attention: head_dim is %" PRIu32 "; this version takes up to %d",
                        shape->head_dim, KVF_ATTENTION_MAX_DIM);
    }
    if (shape->q_heads / shape->kv_heads > KVF_ATTENTION_MAX_SHARE) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "attention: %" PRIu32 " query heads share a KV head; this version takes "
                        "up to %d",
                        shape->q_heads / shape->kv_heads, KVF_ATTENTION_MAX_SHARE);
    }
    return check_block(shape, detail);
}

static kvf_status_t check_indptr(const kvf_attention_t *attention, uint32_t depth_idx,
                                 kvf_detail_t *detail) {
    const kvf_attention_depth_t *depth = &attention->depths[depth_idx];
    const int32_t *indptr = depth->page_indptr;
    for (uint32_t s = 0; s < attention->n_seqs; s++) {
        if (indptr[s + 1] < indptr[s]) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "attention: depth %" PRIu32 ": page_indptr falls from %" PRId32
                            " to %" PRId32 " behind sequence %" PRIu32,
                            depth_idx, indptr[s], indptr[s + 1], s);
        }
    }
    if (indptr[0] != 0 || indptr[attention->n_seqs] != depth->n_pages) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: depth %" PRIu32 ": page_indptr goes from %" PRId32
                        " to %" PRId32 "; give 0 to the number of page indices, %" PRId64,
                        depth_idx, indptr[0], indptr[attention->n_seqs], depth->n_pages);
    }
    if (depth->k_rope_pos_offset == NULL && attention->shape.rope_dims > 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: depth %" PRIu32 " has no k_rope_pos_offset; give it, or "
                        "rope_dims 0",
                        depth_idx);
    }
    return KVF_OK;
}

static kvf_status_t check_list(const kvf_attention_t *attention, uint32_t depth_idx,
                               uint32_t seq_idx, kvf_detail_t *detail) {
    kvf_attention_list_t list = kvf_attention_list_of(attention, depth_idx, seq_idx);
    if (list.n_pages == 0) {
        return KVF_OK;
    }
    int64_t t = attention->shape.tokens_per_block;
    int64_t last = list.n_tokens - (list.n_pages - 1) * t;
    const int32_t *offsets = attention->depths[depth_idx].k_rope_pos_offset;
    const struct {
        const char *name;
        int64_t value;
        int64_t least;
        int64_t most;
    } fields[] = {
        {"tokens in the last page", last, 1, t},
        {"window offset", list.window, 0, list.n_tokens},
        {"sink tokens", list.sinks, 0, list.n_tokens},
        {"k_rope_pos_offset", offsets != NULL ? offsets[seq_idx] : 0, 0, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "attention: depth %" PRIu32 ", sequence %" PRIu32 ": %s is %" PRId64
                            "; it must be %" PRId64 " to %" PRId64,
                            depth_idx, seq_idx, fields[i].name, fields[i].value, fields[i].least,
                            fields[i].most);
        }
    }
    for (int64_t i = 0; i < list.n_pages; i++) {
        if (list.slots[i] < 0 || list.slots[i] >= attention->n_slots) {
            return kvf_fail(detail, KVF_ERR_RANGE,
                            "attention: depth %" PRIu32 ", sequence %" PRIu32 ": page %" PRId64
                            " is slot %" PRId32 "; the pool has %" PRId64,
                            depth_idx, seq_idx, i, list.slots[i], attention->n_slots);
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_attention_run(const kvf_attention_t *attention, const float *q, float *out,
                               kvf_detail_t *detail) {
    const kvf_attention_shape_t *shape = &attention->shape;
    kvf_status_t status = kvf_attention_check_shape(shape, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (attention->layer_idx >= shape->n_layers) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "attention: layer_idx is %" PRIu32 "; the group has %" PRIu32 " layers",
                        attention->layer_idx, shape->n_layers);
    }
    for (uint32_t d = 0; d < attention->n_depths; d++) {
        status = check_indptr(attention, d, detail);
        for (uint32_t s = 0; status == KVF_OK && s < attention->n_seqs; s++) {
            status = check_list(attention, d, s, detail);
        }
        if (status != KVF_OK) {
            return status;
        }
    }
    for (uint32_t s = 0; s < attention->n_seqs; s++) {
        for (uint32_t h = 0; h < shape->kv_heads; h++) {
            kvf_attention_head_t head;
            kvf_attention_sequence_head(attention, s, h, q, out, &head);
        }
    }
    return KVF_OK;
}

void kvf_attention_begin(kvf_attention_head_t *head, const kvf_attention_shape_t *shape,
                         const float *q, float *out) {
    kvf_attention_head_begin(head, shape, q, out);
}

void kvf_attention_add(kvf_attention_head_t *head, int64_t position, const void *k, const void *v) {
    kvf_attention_head_add(head, position, (const uint8_t *)k, (const uint8_t *)v);
}

void kvf_attention_end(kvf_attention_head_t *head) {
    kvf_attention_head_end(head);
}

double kvf_attention_distance(const float *got, const float *want, uint64_t n_rows, uint32_t dim) {
    double largest = 0;
    for (uint64_t r = 0; r < n_rows; r++, got += dim, want += dim) {
        double wrong = 0, all = 0;
        for (uint32_t i = 0; i < dim; i++) {
            double difference = (double)got[i] - (double)want[i];
            wrong += difference * difference;
            all += (double)want[i] * (double)want[i];
        }
        if (!isfinite(wrong)) {
            return INFINITY;
        }
        double distance = wrong > 0 ? sqrt(wrong / all) : 0;
        largest = distance > largest ? distance : largest;
    }
    return largest;
}
