/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_POOLS_H
#define KVF_TOOLS_NODE_POOLS_H

/**
 * @file
 * The pools of a node, one per layer group: how large each is, and what fits into it.
 */

#include "transceiver/kvferry.h"

/** The prompt whose needs decide how pool.bytes is cut. */
#define KVF_REFERENCE_PROMPT_TOKENS 8192

typedef struct kvf_pools {
    const kvf_layout_t *layout;        /**< borrowed */
    kvf_pool_t *pools[KVF_MAX_GROUPS]; /**< the agent's */
    int64_t n_pages[KVF_MAX_GROUPS];
    bool on_device; /**< the CPU does not reach the pages */
} kvf_pools_t;

/**
 * Cut a number of bytes into pages of each layer group.
 *
 * The groups get the same shares as in a request of KVF_REFERENCE_PROMPT_TOKENS tokens. A group
 * with a window gets at least what one request of any length holds of it (with chunks longer than
 * the reference prompt, one of that length); groups without one share what is left.
 *
 * @param layout         Checked.
 * @param chunk_tokens   Of a prefill in chunks, 0 .. 2^40; 0: none.
 * @param[out] n_pages   layout->n_groups numbers, each >= 1; their bytes are at most `bytes`.
 * @return KVF_OK; KVF_ERR_INVALID (too few bytes: the text names the least that works).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_pools_cut(const kvf_layout_t *layout, uint64_t bytes,
                                     int64_t chunk_tokens, int64_t *n_pages, kvf_detail_t *detail);

/**
 * Check pool.bytes against the machine's memory. Memory is reserved lazily, so without this more
 * than there is would be found out by the process being killed when it is used.
 *
 * @param machine_bytes  Physical memory.
 * @return KVF_OK; KVF_ERR_NO_MEMORY (the text names both numbers).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_pools_check_memory(uint64_t bytes, uint64_t machine_bytes,
                                              kvf_detail_t *detail);

/**
 * Cut and make the pools of an agent that is not started yet.
 *
 * @param like           Memory and what else they have in common; its group and number are not
 *                       read.
 * @param chunk_tokens   As in kvf_pools_cut().
 * @param[out] pools_p   Lives as long as agent and layout.
 * @return KVF_OK, or as kvf_pools_cut() and kvf_pool_create(); the text begins with the
 *         configuration key that it is about.
 */
KVF_CHECK kvf_status_t kvf_pools_create(kvf_agent_t *agent, const kvf_layout_t *layout,
                                        const kvf_pool_desc_t *like, uint64_t bytes,
                                        int64_t chunk_tokens, kvf_pools_t *pools_p,
                                        kvf_detail_t *detail);

/**
 * Pages that a request needs of one group on one side: the live blocks of its prompt and its
 * scratch blocks.
 *
 * @param lengths         Checked here.
 * @param include_drafts  True on the generation side.
 * @param[out] n_p        How many pages.
 * @param[out] counts_p   The request's blocks.
 * @return KVF_OK, KVF_ERR_INVALID.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_pools_need(const kvf_layer_group_t *group, const kvf_lengths_t *lengths,
                                      bool include_drafts, int64_t *n_p,
                                      kvf_block_counts_t *counts_p, kvf_detail_t *detail);

/** @return KVF_OK; KVF_ERR_TOO_LARGE (no number of releases makes room for it: the text names group
 * and numbers); KVF_ERR_INVALID. @thread any, without waiting */
KVF_CHECK kvf_status_t kvf_pools_fit(const kvf_pools_t *pools, const kvf_lengths_t *lengths,
                                     bool include_drafts, kvf_detail_t *detail);

/** @return The smallest bound ordinal >= ordinal below end, or end. @thread any */
int64_t kvf_table_next_bound(const kvf_table_t *table, int64_t ordinal, int64_t end);

#endif
