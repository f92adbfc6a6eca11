/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_STORE_H
#define KVF_KVMGR_STORE_H

/**
 * @file
 * Where a sequence manager gets its pages: one pool of pages for each layer group, behind a table
 * of functions. The pool counts who holds a page (kvmgr/pages.h); a row of this table only reaches
 * it. Every call may be a trip to another thread, so calls take many pages.
 */

#include "kvmgr/pages.h"

/** A row. Entries of -1 in a list of slots are skipped; a call does all of its pages or none,
 * unless it says something else. */
typedef struct kvf_store {
    void *ctx; /**< borrowed */
    /** Take n free pages for a sequence. @param[out] slots  Room for n; untouched on error.
     *  @return KVF_OK, KVF_ERR_AGAIN (too few are free now), KVF_ERR_TOO_LARGE (too few in all). */
    kvf_status_t (*acquire)(void *ctx, uint32_t group_idx, int64_t n, int32_t *slots);
    /** One more sequence holds pages, each of which a sequence or the prefix index holds. */
    void (*hold)(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots);
    /** A sequence lets pages go, each of which it holds. The store frees them when nothing uses
     * them any more. */
    void (*release)(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots);
    /** The prefix index holds pages that a sequence holds, and that it did not hold before.
     *  @return KVF_OK; KVF_ERR_BUSY (one is written or in doubt). */
    kvf_status_t (*cache)(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots);
    /** The prefix index lets pages go, one after the other, up to the first under transfer.
     *  @param[out] n_evicted_p  How many went; written in any case.
     *  @return KVF_OK (all); KVF_ERR_BUSY (it still holds that one, and those behind it). */
    kvf_status_t (*evict)(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots,
                          int64_t *n_evicted_p);
} kvf_store_t;

/**
 * The row over pools of this thread.
 *
 * @param pages  One for each layer group; borrowed as long as the store is used.
 * @thread the pools'
 */
kvf_store_t kvf_store_over_pages(kvf_pages_t **pages);

#endif
