/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_BLOCKS_H
#define KVF_TOOLS_NODE_BLOCKS_H

/**
 * @file
 * The block manager of a node: kvmgr's sequence manager over the agent's pools, and the pages of
 * one request, its *lease*. A lease is opened when there is room for it, grows (chunks) or has all
 * of its pages at once, and is settled when its bytes are final, so that later requests find them.
 *
 * All functions may be called from any thread but the agent's: they take a lock of their own and
 * call the pools with it, which wait for the agent's thread. So a callback of the agent's never
 * calls them, and nobody calls them with a lock that such a callback takes.
 */

#include "kvmgr/seq.h"
#include "tools/node/pools.h"
#include "tools/node/synthetic.h"

typedef struct kvf_blocks kvf_blocks_t;

/** What a node is. */
typedef struct kvf_blocks_config {
    bool generation_side;
    bool prefix_cache;
    int64_t chunk_tokens; /**< context side: 0 computes a whole prompt in one step */
} kvf_blocks_config_t;

/** Pages of one request. A zeroed one has none. Its functions may be called by one thread at a
 * time; what only reads it needs no lock. */
typedef struct kvf_lease {
    kvf_seq_t *seq;
    int64_t set_aside[KVF_MAX_GROUPS]; /**< chunks: the most pages that it will hold */
    int64_t capacity_tokens;           /**< what was allocated */
} kvf_lease_t;

/**
 * @param pools           Outlive the manager.
 * @param[out] blocks_p   kvf_blocks_destroy() it.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_blocks_create(const kvf_alloc_t *alloc, const kvf_pools_t *pools,
                                         const kvf_blocks_config_t *config, kvf_blocks_t **blocks_p,
                                         kvf_detail_t *detail);

/** Every lease is closed before. The index lets all pages go. NULL is allowed. */
void kvf_blocks_destroy(kvf_blocks_t *blocks);

/** @return KVF_OK; KVF_ERR_TOO_LARGE (no number of releases makes room for it: the text names group
 * and numbers); KVF_ERR_INVALID. @thread any, without waiting */
KVF_CHECK kvf_status_t kvf_blocks_fit(const kvf_blocks_t *blocks, const kvf_lengths_t *lengths,
                                      kvf_detail_t *detail);

/**
 * Start a request. What the index knows of its prompt is its own or shared from now on
 * (kvf_seq_cached_tokens()). In one step: all of its pages are there, and its length is that of the
 * prompt. In chunks: its length is what was found, whole blocks, and the pages that it will need
 * are set aside, so that it does not wait for other requests any more.
 *
 * @param content       Borrowed. Without ids the request takes no part in reuse. Nor does it where
 *                      the pool has no room for the windows in front of a prefix besides its own.
 * @param[out] lease_p  kvf_blocks_close() it.
 * @return KVF_OK; KVF_ERR_AGAIN (too few pages now); KVF_ERR_TOO_LARGE; KVF_ERR_INVALID;
 * KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_blocks_open(kvf_blocks_t *blocks, const kvf_lengths_t *lengths,
                                       const kvf_content_t *content, kvf_lease_t *lease_p,
                                       kvf_detail_t *detail);

/** Let the request's pages go (the pools keep those that are not proven quiet, the index those that
 * were settled). A zeroed lease is allowed. */
void kvf_blocks_close(kvf_blocks_t *blocks, kvf_lease_t *lease);

/** Make the request longer by so many tokens, whose pages are its own then.
 *  @return KVF_OK; KVF_ERR_AGAIN (pages are kept back by ended transfers); KVF_ERR_NO_MEMORY;
 *  KVF_ERR_TOO_LARGE; KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_blocks_append(kvf_blocks_t *blocks, kvf_lease_t *lease,
                                         int64_t n_tokens);

/** Drop the tokens from a length on. @return KVF_OK, KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_blocks_rewind(kvf_blocks_t *blocks, kvf_lease_t *lease, int64_t tokens);

/**
 * The bytes of the first tokens are final, and no peer writes them: later requests may find them,
 * and pages that the windows leave behind are let go.
 *
 * @param tokens  At most the lease's length.
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_BUSY (a peer writes one of them).
 */
KVF_CHECK kvf_status_t kvf_blocks_settle(kvf_blocks_t *blocks, kvf_lease_t *lease, int64_t tokens);

/** @param[out] tables  One for each group, valid until the lease changes. */
void kvf_blocks_tables(const kvf_blocks_t *blocks, const kvf_lease_t *lease, kvf_table_t *tables);

#endif
