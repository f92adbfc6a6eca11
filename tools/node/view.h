/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_VIEW_H
#define KVF_TOOLS_NODE_VIEW_H

/**
 * @file
 * Pages as the CPU reaches them, for an engine and a judge that compute there: the pages
 * themselves, or, of pools on a device, copies of them.
 */

#include "tools/node/pools.h"

/** One page at a time. Plain memory. */
typedef struct kvf_view {
    const kvf_pools_t *pools;
    void *copy; /**< room for the largest page; NULL: the CPU reaches the pages */
} kvf_view_t;

/** @param[out] view_p  kvf_view_close() it. @return KVF_OK, KVF_ERR_NO_MEMORY. @thread any */
KVF_CHECK kvf_status_t kvf_view_open(const kvf_pools_t *pools, kvf_view_t *view_p);
void kvf_view_close(kvf_view_t *view);

/**
 * Look at a page.
 *
 * @param slot         Of the group's pool; nobody else writes it.
 * @param[out] page_p  kvf_group_block_bytes() of it, until the next look; may be written.
 * @return KVF_OK; KVF_ERR_IO (the device). @thread one at a time
 */
KVF_CHECK kvf_status_t kvf_view_page(kvf_view_t *view, uint32_t group_idx, int32_t slot,
                                     void **page_p, kvf_detail_t *detail);

/** Let what was written at the last look be in its page. @return KVF_OK; KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_view_put(kvf_view_t *view, uint32_t group_idx, int32_t slot,
                                    kvf_detail_t *detail);

/** All pages of a request at once, each where its slot is in a pool. Plain memory. */
typedef struct kvf_view_all {
    const kvf_pools_t *pools;
    void *bases[KVF_MAX_GROUPS]; /**< slot 0 of each pool; of slots that are in no table nothing is
                                    there */
} kvf_view_all_t;

/**
 * @param tables      One for each group; nobody writes their pages. What the caller writes stays in
 * copies where the pools are on a device.
 * @param[out] all_p  kvf_view_all_close() it.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_IO. @thread any
 */
KVF_CHECK kvf_status_t kvf_view_all_open(const kvf_pools_t *pools, const kvf_table_t *tables,
                                         kvf_view_all_t *all_p, kvf_detail_t *detail);
void kvf_view_all_close(kvf_view_all_t *all);

#endif
