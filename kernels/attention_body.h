/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTENTION_BODY_H
#define KVF_KERNELS_ATTENTION_BODY_H

/**
 * @file
 * The body of attention.h: one text for C, C++ and CUDA. Its unit of work is one KV head of one
 * sequence, which needs nothing from any other, so that a device may run them all at once. Pure
 * functions without allocation; any thread. Rows are read at any alignment.
 */

#include "kernels/attention.h"
#include "kernels/device.h"

#include <math.h>
#include <string.h>

/** Sums that run side by side: one alone would wait for each of its additions, and a compiler must
 * not reorder them by itself. */
#define KVF_ATTENTION_LANES 8

/** Cosine and sine are turned from token to token, and computed anew after so many: rounding adds
 * up to about 1e-6 in between. */
#define KVF_ATTENTION_ROPE_RUN 256

/** @return The float with these bits. */
static inline KVF_DEVICE float kvf_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/** @return The value of a bfloat16: the upper half of a float. */
static inline KVF_DEVICE float kvf_f32_from_bf16(uint16_t code) {
    return kvf_f32_from_bits((uint32_t)code << 16);
}

/**
 * Widen a small float with a mantissa of mantissa_bits.
 *
 * @param sign  Already in its place.
 * @param rest  Exponent and mantissa.
 * @param bias  Of the exponent.
 * @param special  Codes from here on are infinite or no numbers.
 * @return The value. Without a branch: rows are converted by vector instructions.
 */
static inline KVF_DEVICE float kvf_f32_from_parts(uint32_t sign, uint32_t rest,
                                                  uint32_t mantissa_bits, uint32_t bias,
                                                  uint32_t special) {
    uint32_t is_tiny = 0U - (uint32_t)(rest < 1U << mantissa_bits);
    uint32_t is_special = 0U - (uint32_t)(rest >= special);
    uint32_t normal = (rest << (23 - mantissa_bits)) + ((127U - bias) << 23);
    float unit = kvf_f32_from_bits((127U + 1U - bias - mantissa_bits) << 23);
    float tiny = (float)(int32_t)rest * unit;
    uint32_t bits;
    memcpy(&bits, &tiny, sizeof(bits));
    return kvf_f32_from_bits(sign | (is_tiny & bits) | (~is_tiny & normal) |
                             (is_special & 0xffU << 23));
}

/** @return The value of an IEEE 754 binary16: 5 bits of exponent with bias 15, 10 of mantissa. */
static inline KVF_DEVICE float kvf_f32_from_f16(uint16_t code) {
    return kvf_f32_from_parts((uint32_t)(code & 0x8000U) << 16, code & 0x7fffU, 10, 15, 0x7c00);
}

/** @return The value of an FP8 E4M3 (OCP 8-bit floating point specification 1.0: bias 7, no
 * infinities, all ones is not a number). */
static inline KVF_DEVICE float kvf_f32_from_f8_e4m3(uint8_t code) {
    return kvf_f32_from_parts((uint32_t)(code & 0x80U) << 24, code & 0x7fU, 3, 7, 0x7f);
}

/** Convert the first n elements of a stored row. */
static inline KVF_DEVICE void kvf_attention_convert(kvf_dtype_t dtype,
                                                    const uint8_t *__restrict row, size_t n,
                                                    float *__restrict values) {
    uint16_t code;
    switch (dtype) {
    case KVF_DTYPE_F32:
        memcpy(values, row, n * sizeof(*values));
        break;
    case KVF_DTYPE_F16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&code, row + 2 * i, sizeof(code));
            values[i] = kvf_f32_from_f16(code);
        }
        break;
    case KVF_DTYPE_BF16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&code, row + 2 * i, sizeof(code));
            values[i] = kvf_f32_from_bf16(code);
        }
        break;
    case KVF_DTYPE_F8_E4M3:
        for (size_t i = 0; i < n; i++) {
            values[i] = kvf_f32_from_f8_e4m3(row[i]);
        }
        break;
    }
}

/** @return Bytes of one element of a known dtype. */
static inline KVF_DEVICE uint32_t kvf_attention_element_bytes(kvf_dtype_t dtype) {
    return dtype == KVF_DTYPE_F32 ? 4U : dtype == KVF_DTYPE_F8_E4M3 ? 1U : 2U;
}

/** @return What kvf_group_offset() says: offset of a head vector in its slot. With layer_idx ==
 * n_layers and zeros, the bytes of a slot. */
static inline KVF_DEVICE uint64_t kvf_attention_offset(const kvf_attention_shape_t *shape,
                                                       uint32_t layer_idx, uint32_t kv,
                                                       uint32_t head, uint32_t token) {
    uint64_t heads = shape->kv_heads, tokens = shape->tokens_per_block;
    uint64_t inner = shape->order == KVF_ORDER_HND ? head * tokens + token : token * heads + head;
    uint64_t vectors = ((uint64_t)layer_idx * shape->kv_factor + kv) * heads * tokens + inner;
    return vectors * shape->head_dim * kvf_attention_element_bytes(shape->dtype);
}

/** @return The scalar product of two vectors. */
static inline KVF_DEVICE float kvf_attention_dot(const float *__restrict a,
                                                 const float *__restrict b, size_t n) {
    float lanes[KVF_ATTENTION_LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + KVF_ATTENTION_LANES <= n; i += KVF_ATTENTION_LANES) {
        for (size_t l = 0; l < KVF_ATTENTION_LANES; l++) {
            lanes[l] += a[i + l] * b[i + l];
        }
    }
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    for (size_t l = 0; l < KVF_ATTENTION_LANES; l++) {
        sum += lanes[l];
    }
    return sum;
}

/** Bring cosine and sine to a position. */
static inline KVF_DEVICE void kvf_attention_turn(kvf_attention_head_t *head, int64_t position) {
    float *__restrict cosine = head->cosine, *__restrict sine = head->sine;
    const float *__restrict step_cosine = head->step_cosine, *__restrict step_sine =
                                                                 head->step_sine;
    size_t n = head->shape->rope_dims / 2;
    if (position == head->position + 1 && position % KVF_ATTENTION_ROPE_RUN != 0) {
        for (size_t i = 0; i < n; i++) {
            float turned = cosine[i] * step_cosine[i] - sine[i] * step_sine[i];
            sine[i] = sine[i] * step_cosine[i] + cosine[i] * step_sine[i];
            cosine[i] = turned;
        }
    } else if (position != head->position) {
        for (size_t i = 0; i < n; i++) { /* a float cannot hold the angle of a late position */
            double angle = (double)position * head->frequency[i];
            cosine[i] = (float)cos(angle);
            sine[i] = (float)sin(angle);
        }
    }
    head->position = position;
}

/** kvf_attention_begin(). */
static inline KVF_DEVICE void kvf_attention_head_begin(kvf_attention_head_t *head,
                                                       const kvf_attention_shape_t *shape,
                                                       const float *q, float *out) {
    uint32_t share = shape->q_heads / shape->kv_heads;
    head->shape = shape;
    head->q = q;
    head->out = out;
    head->position = -1;
    for (uint32_t h = 0; h < share; h++) {
        head->max[h] = -INFINITY;
        head->sum[h] = 0;
    }
    memset(out, 0, (size_t)share * shape->value_dim * sizeof(*out));
    for (uint32_t i = 0; i < shape->rope_dims / 2; i++) {
        head->frequency[i] = pow((double)shape->rope_theta, -2.0 * i / shape->rope_dims);
        head->step_cosine[i] = (float)cos(head->frequency[i]);
        head->step_sine[i] = (float)sin(head->frequency[i]);
    }
}

/** Add one token to one query head: score against its key, value weighted. */
static inline KVF_DEVICE void kvf_attention_weigh(kvf_attention_head_t *head, uint32_t h,
                                                  const float *__restrict k,
                                                  const float *__restrict v) {
    const kvf_attention_shape_t *shape = head->shape;
    size_t n = shape->value_dim;
    float *__restrict out = head->out + (size_t)h * n;
    float score =
        shape->scale * kvf_attention_dot(head->q + (size_t)h * shape->head_dim, k, shape->head_dim);
    if (score > head->max[h]) { /* what was weighed before weighs less now */
        float less = expf(head->max[h] - score);
        head->max[h] = score;
        head->sum[h] *= less;
        for (size_t i = 0; i < n; i++) {
            out[i] *= less;
        }
    }
    float weight = expf(score - head->max[h]);
    head->sum[h] += weight;
    for (size_t i = 0; i < n; i++) {
        out[i] += weight * v[i];
    }
}

/** kvf_attention_add(). */
static inline KVF_DEVICE void kvf_attention_head_add(kvf_attention_head_t *head, int64_t position,
                                                     const uint8_t *k_row, const uint8_t *v_row) {
    const kvf_attention_shape_t *shape = head->shape;
    float *__restrict k = head->k, *__restrict v = head->v;
    kvf_attention_convert(shape->dtype, k_row, shape->head_dim, k);
    kvf_attention_convert(shape->dtype, v_row, shape->value_dim, v);
    if (shape->rope_dims > 0) {
        size_t half = shape->rope_dims / 2;
        float *__restrict x = k + (shape->head_dim - shape->rope_dims), *__restrict y = x + half;
        const float *__restrict cosine = head->cosine, *__restrict sine = head->sine;
        kvf_attention_turn(head, position);
        for (size_t i = 0; i < half; i++) {
            float turned = x[i] * cosine[i] - y[i] * sine[i];
            y[i] = y[i] * cosine[i] + x[i] * sine[i];
            x[i] = turned;
        }
    }
    for (uint32_t h = 0; h < shape->q_heads / shape->kv_heads; h++) {
        kvf_attention_weigh(head, h, k, v);
    }
}

/** kvf_attention_end(). */
static inline KVF_DEVICE void kvf_attention_head_end(kvf_attention_head_t *head) {
    const kvf_attention_shape_t *shape = head->shape;
    for (uint32_t h = 0; h < shape->q_heads / shape->kv_heads; h++) {
        float *out = head->out + (size_t)h * shape->value_dim;
        for (uint32_t i = 0; head->sum[h] != 0 && i < shape->value_dim; i++) {
            out[i] /= head->sum[h];
        }
    }
}

/** A sequence's part of a depth. */
typedef struct kvf_attention_list {
    const int32_t *slots;
    int64_t n_pages;
    int64_t n_tokens;
    int64_t window; /**< offset of the window's first token, <= n_tokens */
    int64_t sinks;
} kvf_attention_list_t;

/** @return What the arrays say; all zero where the sequence has no pages. The page_indptr of the
 * depth must be right. */
static inline KVF_DEVICE kvf_attention_list_t
kvf_attention_list_of(const kvf_attention_t *attention, uint32_t depth_idx, uint32_t seq_idx) {
    const kvf_attention_depth_t *depth = &attention->depths[depth_idx];
    int32_t first = depth->page_indptr[seq_idx], end = depth->page_indptr[seq_idx + 1];
    kvf_attention_list_t list = {NULL, 0, 0, 0, 0};
    if (first < end) {
        const int32_t *info = depth->length_info + seq_idx;
        list.slots = depth->page_indices + first;
        list.n_pages = end - first;
        list.n_tokens = (list.n_pages - 1) * attention->shape.tokens_per_block + info[0];
        list.window = info[attention->n_seqs];
        list.sinks = info[(size_t)2 * attention->n_seqs];
    }
    return list;
}

/** Add the tokens [first, end) of a page list, the first of which stands at a position. */
static inline KVF_DEVICE void kvf_attention_head_walk(kvf_attention_head_t *head,
                                                      const kvf_attention_t *attention,
                                                      uint32_t kv_head, const int32_t *slots,
                                                      int64_t first, int64_t end,
                                                      int64_t position) {
    const kvf_attention_shape_t *shape = &attention->shape;
    uint64_t block_bytes = kvf_attention_offset(shape, shape->n_layers, 0, 0, 0);
    uint32_t v = shape->kv_factor - 1;
    for (int64_t i = first; i < end; i++) {
        const uint8_t *block =
            attention->pool + (uint64_t)slots[i / shape->tokens_per_block] * block_bytes;
        uint32_t token = (uint32_t)(i % shape->tokens_per_block);
        kvf_attention_head_add(
            head, position + i - first,
            block + kvf_attention_offset(shape, attention->layer_idx, 0, kv_head, token),
            block + kvf_attention_offset(shape, attention->layer_idx, v, kv_head, token));
    }
}

/** The result of one KV head of one sequence; all arrays and slots must be right. q and out are
 * those of the batch; head is working memory. */
static inline KVF_DEVICE void kvf_attention_sequence_head(const kvf_attention_t *attention,
                                                          uint32_t seq_idx, uint32_t kv_head,
                                                          const float *q, float *out,
                                                          kvf_attention_head_t *head) {
    const kvf_attention_shape_t *shape = &attention->shape;
    uint64_t row =
        (uint64_t)seq_idx * shape->q_heads + (uint64_t)kv_head * (shape->q_heads / shape->kv_heads);
    kvf_attention_head_begin(head, shape, q + row * shape->head_dim, out + row * shape->value_dim);
    int64_t before = 0;
    for (uint32_t d = 0; d < attention->n_depths; d++) {
        kvf_attention_list_t list = kvf_attention_list_of(attention, d, seq_idx);
        if (list.n_pages == 0) {
            continue;
        }
        /* A sink that the window has reached is seen there. */
        int64_t sinks = list.sinks < list.window ? list.sinks : list.window;
        const int32_t *offset = attention->depths[d].k_rope_pos_offset;
        kvf_attention_head_walk(head, attention, kv_head, list.slots, 0, sinks, before);
        kvf_attention_head_walk(head, attention, kv_head, list.slots, list.window, list.n_tokens,
                                offset != NULL ? offset[seq_idx] : 0);
        before += list.n_tokens; /* if sinks follow, these were all of a prefix */
    }
    kvf_attention_head_end(head);
}

#endif
