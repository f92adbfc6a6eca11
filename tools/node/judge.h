/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_JUDGE_H
#define KVF_TOOLS_NODE_JUDGE_H

/**
 * @file
 * The judge of a transfer: the first decode step over the pages that came, as an engine would take
 * it, against what the contiguous KV of the synthetic engine gives. The two sides share the request
 * (content, prompt length) and the model's layout, and nothing else: kvf_judge_expect() has no
 * parameter that could tell it about pages, tables or slots.
 *
 * The step is that of L = P + 1 tokens with one query, at position P. The first generated token is
 * the one that kvf_synthetic_token() says, and its KV is part of the step. What counts as the same,
 * and what a wrong token costs: KVF_ATTENTION_TOLERANCE.
 *
 * The layout knows no query heads. The judge gives each KV head 2 (GQA), and a lone one 4 (MQA,
 * MLA). With kv_factor 1, a value is the front of its row up to the largest power of two below
 * head_dim, and the rest turns with the position (512 and 64 of 576, as in DeepSeek-V2, arXiv
 * 2405.04434).
 *
 * A node calls, after a transfer that is OK and with its pages bound up to the block of position P
 * (kvf_seq_append() of one token): kvf_judge_run(), then kvf_judge_rewind(), then it rewinds its
 * sequence to P and may publish.
 */

#include "kvmgr/base/alloc.h"
#include "tools/node/synthetic.h"

#include <jansson.h>
#include <stdbool.h>

/** The pages of one layer group, in memory that the CPU reaches. Borrowed. */
typedef struct kvf_judge_pool {
    void *base;      /**< slot 0, 8-byte aligned; slots of kvf_group_block_bytes() follow */
    int64_t n_slots; /**< as kvf_pool_create() was told */
} kvf_judge_pool_t;

/** A request whose prompt is in its pages. Everything is borrowed. */
typedef struct kvf_judge_step {
    const kvf_layout_t *layout;    /**< checked */
    const kvf_judge_pool_t *pools; /**< one for each group */
    const kvf_table_t *tables;     /**< likewise; the block of position P is bound, and nobody
                                      else's */
    bool cached_aux;               /**< `aux: cached`; else plain */
    const kvf_content_t *content;
    int64_t prompt_tokens; /**< P, > 0 */
} kvf_judge_step_t;

/** What differs, and what was compared. */
typedef struct kvf_judgement {
    bool same;
    uint32_t n_layers; /**< of all groups */
    int64_t n_tokens;  /**< that the query sees in a layer, summed over the layers */
    double distance;   /**< the largest, of all heads; infinite when a number is not finite */
    struct {
        const char *group; /**< of the layout */
        uint32_t layer;    /**< global id */
        uint32_t kv_head;
        double distance;
    } first; /**< in the order of the layout; only when not the same */
} kvf_judgement_t;

/**
 * @param[out] n_p  Floats of a step's result: [group][layer][query head][value element].
 * @return KVF_OK, KVF_ERR_UNSUPPORTED (a group that kernels/attention.h does not take: the text
 *         names it).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_judge_floats(const kvf_layout_t *layout, uint64_t *n_p,
                                        kvf_detail_t *detail);

/**
 * The engine's side: write the KV of the first generated token, make the step's aux data out of the
 * tables, and attend over the pages through its views.
 *
 * @param[out] got  kvf_judge_floats(); undefined on error.
 * @return KVF_OK
 *         KVF_ERR_UNCOVERED    a page that the step reads or writes is unbound
 *         KVF_ERR_RANGE        a slot outside its pool, or a position that int32 does not hold
 *         KVF_ERR_INVALID      prompt_tokens, or a table
 *         KVF_ERR_UNSUPPORTED  a group that kernels/attention.h does not take
 *         KVF_ERR_NO_MEMORY
 *         The text names group and ordinal. The token may be written on error, too.
 * @thread any; nobody else may write the pages  @cost that of kvf_attention_run(), for every layer
 */
KVF_CHECK kvf_status_t kvf_judge_attend(const kvf_judge_step_t *step, const kvf_alloc_t *alloc,
                                        float *got, kvf_detail_t *detail);

/**
 * The other side: attend over rows made one by one for the positions that L, window and sinks leave
 * visible, [max(0, L - W), L) and in front of it [0, s).
 *
 * @param[out] want  kvf_judge_floats(); undefined on error.
 * @return KVF_OK, KVF_ERR_INVALID (prompt_tokens), KVF_ERR_UNSUPPORTED (as above).
 * @thread any  @cost as kvf_judge_attend(), and making the rows; no allocation
 */
KVF_CHECK kvf_status_t kvf_judge_expect(const kvf_layout_t *layout, const kvf_content_t *content,
                                        int64_t prompt_tokens, float *want, kvf_detail_t *detail);

/** Compare two results of one layout. @thread any */
kvf_judgement_t kvf_judge_compare(const kvf_layout_t *layout, int64_t prompt_tokens,
                                  const float *got, const float *want);

/**
 * All three.
 *
 * @param[out] judgement_p  Whether they are the same; a difference is no error.
 * @return KVF_OK, or as kvf_judge_attend().
 * @thread as kvf_judge_attend()
 */
KVF_CHECK kvf_status_t kvf_judge_run(const kvf_judge_step_t *step, const kvf_alloc_t *alloc,
                                     kvf_judgement_t *judgement_p, kvf_detail_t *detail);

/** Make the rows of position P zero again, in every group where its block is bound, so that a page
 * ends with its prompt. @thread as kvf_judge_attend() */
void kvf_judge_rewind(const kvf_judge_step_t *step);

/** @return {layers, tokens, distance} and, when not the same, {first: {group, layer, kv_head,
 * distance}}; a distance that is not finite is null. The caller's reference; NULL without memory.
 * @thread any */
json_t *kvf_judge_json(const kvf_judgement_t *judgement);

#endif
