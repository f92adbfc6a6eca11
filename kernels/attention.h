/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTENTION_H
#define KVF_KERNELS_ATTENTION_H

/**
 * @file
 * Reference paged attention of one decode step: the judge of a placement. It reads pages through
 * the arrays that a decode kernel reads, and nothing else tells it where a token is.
 *
 *     out[h] = sum_i softmax_i(scale * q[h] . rope(k_i, position_i)) * v_i
 *
 * over the visible tokens, in float32, with a running maximum and sum (M. Milakov, N. Gimelshein,
 * "Online normalizer calculation for softmax", arXiv 1805.02867). Attention alone does not notice
 * the order of what it attends to: stored keys are therefore rotated here, by the position that the
 * arrays give them, as kernels with inline rotary embedding do (J. Su et al., arXiv 2104.09864;
 * element i of the first half turns with element i of the second). A page in another's place then
 * changes the result. Queries come as they are used, turned already.
 *
 * Shapes: GQA, MQA (kv_heads 1), MLA (kv_factor 1: a value is the front of its key's row, which
 * does not turn; the rest of the row does). A judge needs no more query heads than there are KV
 * heads: each reads all tokens of its KV head, and time is in proportion to their number.
 */

#include "kvmgr/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Elements of a row, and query heads of one KV head, that fit the working memory of a head. */
#define KVF_ATTENTION_MAX_DIM 1024
#define KVF_ATTENTION_MAX_SHARE 256

/**
 * Up to here two results are the same, as kvf_attention_distance() counts. Measured with bf16 and a
 * head of 64, of n tokens: float32 is 4e-6 off at n = 16384, 1e-5 at 131072, 3e-5 at a million; one
 * token, wrong or missing, is about n^-0.5 off, by its weight: 1e-2, 2e-3, 4e-4.
 */
#define KVF_ATTENTION_TOLERANCE 1e-4

/** The numbers of a layer group and of its queries. */
typedef struct kvf_attention_shape {
    kvf_dtype_t dtype;
    kvf_order_t order;
    uint32_t n_layers;
    uint32_t kv_factor;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t tokens_per_block;
    uint32_t q_heads;   /**< a multiple of kv_heads; head h uses KV head h / (q_heads / kv_heads) */
    uint32_t value_dim; /**< elements of a value that are used: the first of its row */
    uint32_t rope_dims; /**< elements at the end of a key that turn, even; 0: none */
    float rope_theta;
    float scale;
} kvf_attention_shape_t;

/** The arrays of one depth (docs/placement.md "Attention aux data"); borrowed, host memory. */
typedef struct kvf_attention_depth {
    const int32_t *page_indptr;       /**< n_seqs + 1, from 0 to n_pages, never falling */
    const int32_t *page_indices;      /**< n_pages slots */
    const int32_t *length_info;       /**< 3 rows of n_seqs: tokens in the last page; offset of the
                                         window's first token in the page list; sink tokens. Not read
                                         where a sequence has no pages at this depth. */
    const int32_t *k_rope_pos_offset; /**< n_seqs: position of the window's first token */
    int64_t n_pages;
} kvf_attention_depth_t;

/**
 * One decode step of a batch in one layer. Of a sequence's page list at a depth, the tokens
 * [0, sinks) and [window offset, end) are visible, each once; depths follow one another. A depth
 * has sinks only where all tokens before it are visible, too, so that they tell where those stand.
 */
typedef struct kvf_attention {
    kvf_attention_shape_t shape;
    uint32_t layer_idx;  /**< in the group */
    const uint8_t *pool; /**< n_slots blocks of the group, one after another */
    int64_t n_slots;
    uint32_t n_seqs;
    uint32_t n_depths;
    const kvf_attention_depth_t *depths;
} kvf_attention_t;

/** One KV head of one sequence in progress. Plain memory, nothing to clean up. */
typedef struct kvf_attention_head {
    const kvf_attention_shape_t *shape;
    const float *q;
    float *out;
    int64_t position; /**< of cosine and sine; -1 before the first */
    float max[KVF_ATTENTION_MAX_SHARE];
    float sum[KVF_ATTENTION_MAX_SHARE];
    double frequency[KVF_ATTENTION_MAX_DIM / 2];
    float cosine[KVF_ATTENTION_MAX_DIM / 2];
    float sine[KVF_ATTENTION_MAX_DIM / 2];
    float step_cosine[KVF_ATTENTION_MAX_DIM / 2];
    float step_sine[KVF_ATTENTION_MAX_DIM / 2];
    float k[KVF_ATTENTION_MAX_DIM]; /**< rows of the token that is being added */
    float v[KVF_ATTENTION_MAX_DIM];
} kvf_attention_head_t;

/**
 * The usual shape of a layer group: scale head_dim^-0.5, theta 10000; whole keys turn, or with
 * kv_factor 1 what lies behind the value.
 *
 * @param group         A checked group.
 * @param q_heads       Of the whole model, a multiple of group->kv_heads.
 * @param value_dim     head_dim; less for MLA (512 of 576).
 * @param[out] shape_p  May be changed before use.
 * @return KVF_OK, or as kvf_attention_check_shape().
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_attention_shape_of(const kvf_layer_group_t *group, uint32_t q_heads,
                                              uint32_t value_dim, kvf_attention_shape_t *shape_p,
                                              kvf_detail_t *detail);

/**
 * @return KVF_OK
 *         KVF_ERR_INVALID      a number is zero, unknown or does not suit another; named in the
 *                              text
 *         KVF_ERR_UNSUPPORTED  above KVF_ATTENTION_MAX_DIM or KVF_ATTENTION_MAX_SHARE
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_attention_check_shape(const kvf_attention_shape_t *shape,
                                                 kvf_detail_t *detail);

/**
 * Compute one step of a batch.
 *
 * @param attention  Everything is checked before anything is read from the pool.
 * @param q          [n_seqs][q_heads][head_dim].
 * @param[out] out   [n_seqs][q_heads][value_dim]; zeros for a sequence without visible tokens.
 *                   Untouched on error.
 * @return KVF_OK
 *         KVF_ERR_INVALID      shape, layer, or an array contradicts itself; named in the text
 *         KVF_ERR_UNSUPPORTED  as kvf_attention_check_shape()
 *         KVF_ERR_RANGE        a slot outside the pool, -1 included
 * @thread any  @cost O(tokens * q_heads * head_dim); no allocation, 24 KiB of stack
 */
KVF_CHECK kvf_status_t kvf_attention_run(const kvf_attention_t *attention, const float *q,
                                         float *out, kvf_detail_t *detail);

/**
 * Queue one step on the current device (attention.cu), a thread for each KV head of each sequence:
 * for checks, not for speed.
 *
 * @param attention  Checked by nobody: call kvf_attention_run() on copies for that. What it points
 *                   to, the depths and their arrays included, is memory that the device reaches.
 * @param q, out     As kvf_attention_run(), and the device reaches them.
 * @param work       n_seqs * kv_heads of them, which the device reaches; undefined afterwards.
 * @param stream     A cudaStream_t.
 * @return A cudaError_t: 0, or why nothing was queued.
 * @thread any, whose current device is the stream's
 */
int kvf_attention_launch(const kvf_attention_t *attention, const float *q, float *out,
                         kvf_attention_head_t *work, void *stream);

/**
 * Start a KV head over rows that the caller has or makes, without any pages: begin, add each
 * visible token, end. Tokens in the order of kvf_attention_run() give the same bits.
 *
 * @param[out] head   Caller's memory.
 * @param shape       A checked shape, borrowed until the end.
 * @param q           [q_heads / kv_heads][head_dim], those of this KV head; borrowed until the end.
 * @param[out] out    [q_heads / kv_heads][value_dim]; holds sums until the end.
 * @thread any
 */
void kvf_attention_begin(kvf_attention_head_t *head, const kvf_attention_shape_t *shape,
                         const float *q, float *out);

/**
 * Add one token.
 *
 * @param position  Of the token in its sequence; consecutive ones are cheapest.
 * @param k         head_dim elements of the shape's dtype, any alignment.
 * @param v         The same, value_dim of them are read; for kv_factor 1 it is k.
 * @thread any  @cost O(q_heads / kv_heads * head_dim)
 */
void kvf_attention_add(kvf_attention_head_t *head, int64_t position, const void *k, const void *v);

/** Finish: out holds the result, zeros when no token was added. @thread any */
void kvf_attention_end(kvf_attention_head_t *head);

/**
 * @param got, want  [n_rows][dim].
 * @return The largest |got - want| / |want| of a row, by Euclidean norm. Infinite when a number is
 *         not finite, or a row of want is zero and that of got is not.
 * @thread any
 */
double kvf_attention_distance(const float *got, const float *want, uint64_t n_rows, uint32_t dim);

#ifdef __cplusplus
}
#endif

#endif
