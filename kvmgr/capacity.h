/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_CAPACITY_H
#define KVF_KVMGR_CAPACITY_H

/**
 * @file
 * The one definition of how many tokens of KV a request occupies, and the block counts that follow.
 * Allocators, the sequence manager and the transceiver call it; nothing else computes that sum.
 * Source: docs/placement.md "Capacity"; TensorRT-LLM issues 18554 and 18668 show what two
 * definitions cost.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The numbers of a request, in tokens. Every one is at most 2^40, and so is their sum. */
typedef struct kvf_lengths {
    int64_t prompt_len;          /**< > 0; this rank's share for a context-parallel request */
    int64_t draft_len;           /**< >= 0; speculative tokens */
    int64_t num_extra_kv_tokens; /**< >= 0; reserve for speculation */
    int64_t total_input_len_cp;  /**< Helix: the whole input, takes prompt_len's place everywhere; 0
                                    = not  context parallel */
} kvf_lengths_t;

/** What one side allocates for a request. */
typedef struct kvf_block_counts {
    int64_t capacity_tokens;
    int64_t prompt_blocks;  /**< ceil(P / t): what can travel */
    int64_t alloc_blocks;   /**< ceil(capacity / t) */
    int64_t scratch_blocks; /**< alloc - prompt: never travels */
} kvf_block_counts_t;

/** @return P, the prompt tokens that every formula uses: total_input_len_cp when set. @thread any
 */
KVF_API int64_t kvf_prompt_tokens(const kvf_lengths_t *lengths);

/**
 * Tokens of KV that a request occupies on one side.
 *
 * @param lengths         Checked here.
 * @param include_drafts  A property of the side: true on the generation side, which holds the
 * drafts; false on the context side.
 * @param[out] tokens_p   P + (include_drafts ? draft_len : 0) + num_extra_kv_tokens.
 * @param[out] detail     NULL, or why it failed.
 * @return KVF_OK, or KVF_ERR_INVALID (a number is out of range).
 * @thread any
 * @source docs/placement.md "Capacity: one definition"
 */
KVF_API KVF_CHECK kvf_status_t kvf_get_kv_capacity_tokens(const kvf_lengths_t *lengths,
                                                          bool include_drafts, int64_t *tokens_p,
                                                          kvf_detail_t *detail);

/**
 * Block counts of one side.
 *
 * @param tokens_per_block  > 0.
 * @return KVF_OK, or KVF_ERR_INVALID.
 * @thread any
 */
KVF_API KVF_CHECK kvf_status_t kvf_get_block_counts(const kvf_lengths_t *lengths,
                                                    bool include_drafts, int64_t tokens_per_block,
                                                    kvf_block_counts_t *counts_p,
                                                    kvf_detail_t *detail);

/**
 * Refuse a table that was allocated for another number of tokens than the one definition gives.
 *
 * @param side              "context" or "generation", for the text.
 * @param allocated_tokens  What the side's allocator reserved.
 * @return KVF_OK, KVF_ERR_INVALID, or KVF_ERR_CAPACITY_MISMATCH (the text names both numbers).
 * @thread any
 */
KVF_API KVF_CHECK kvf_status_t kvf_check_capacity(const kvf_lengths_t *lengths, bool include_drafts,
                                                  const char *side, int64_t allocated_tokens,
                                                  kvf_detail_t *detail);

#ifdef __cplusplus
}
#endif

#endif
