/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/blocks.h"

#include "tools/node/view.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>

struct kvf_blocks {
    kvf_alloc_t alloc;
    const kvf_pools_t *pools;
    kvf_blocks_config_t config;
    pthread_mutex_t lock;
    kvf_seqs_t *seqs;
    int64_t set_aside[KVF_MAX_GROUPS]; /* for all leases */
};

/* ---- the pools as the sequence manager sees them ---- */

static kvf_status_t store_acquire(void *ctx, uint32_t group_idx, int64_t n, int32_t *slots) {
    const kvf_pools_t *pools = ctx;
    return kvf_pool_acquire(pools->pools[group_idx], n, slots);
}

static void store_hold(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    const kvf_pools_t *pools = ctx;
    kvf_status_t status = kvf_pool_hold(pools->pools[group_idx], n, slots);
    assert(status == KVF_OK); /* the manager counts as the pools do */
    (void)status;
}

static void store_release(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    const kvf_pools_t *pools = ctx;
    kvf_status_t status = kvf_pool_release(pools->pools[group_idx], n, slots);
    assert(status == KVF_OK);
    (void)status;
}

static kvf_status_t store_cache(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    const kvf_pools_t *pools = ctx;
    return kvf_pool_cache(pools->pools[group_idx], n, slots);
}

static kvf_status_t store_evict(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots,
                                int64_t *n_evicted_p) {
    const kvf_pools_t *pools = ctx;
    return kvf_pool_evict(pools->pools[group_idx], n, slots, n_evicted_p);
}

/* ---- the manager ---- */

kvf_status_t kvf_blocks_create(const kvf_alloc_t *alloc, const kvf_pools_t *pools,
                               const kvf_blocks_config_t *config, kvf_blocks_t **blocks_p,
                               kvf_detail_t *detail) {
    kvf_blocks_t *blocks = kvf_calloc(alloc, 1, sizeof(*blocks));
    if (blocks == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the block manager");
    }
    kvf_pools_t *ctx = (kvf_pools_t *)(uintptr_t)pools; /* the rows above only read it */
    const kvf_seqs_config_t seqs = {
        .layout = pools->layout,
        .n_pages = pools->n_pages,
        .store = {ctx, store_acquire, store_hold, store_release, store_cache, store_evict},
        .generation_side = config->generation_side,
        .piece_tokens = config->prefix_cache ? KVF_PIECE_TOKENS : 0};
    kvf_status_t status = kvf_seqs_create(alloc, &seqs, &blocks->seqs, detail);
    if (status != KVF_OK) {
        kvf_free(alloc, blocks);
        return status;
    }
    blocks->alloc = *alloc;
    blocks->pools = pools;
    blocks->config = *config;
    (void)pthread_mutex_init(&blocks->lock, NULL);
    *blocks_p = blocks;
    return KVF_OK;
}

void kvf_blocks_destroy(kvf_blocks_t *blocks) {
    if (blocks == NULL) {
        return;
    }
    kvf_alloc_t alloc = blocks->alloc;
    kvf_seqs_destroy(blocks->seqs);
    (void)pthread_mutex_destroy(&blocks->lock);
    kvf_free(&alloc, blocks);
}

kvf_status_t kvf_blocks_fit(const kvf_blocks_t *blocks, const kvf_lengths_t *lengths,
                            kvf_detail_t *detail) {
    int64_t need[KVF_MAX_GROUPS];
    return blocks->config.chunk_tokens > 0
               ? kvf_seqs_need(blocks->seqs, lengths, blocks->config.chunk_tokens, need, detail)
               : kvf_pools_fit(blocks->pools, lengths, blocks->config.generation_side, detail);
}

/* Bytes that go with a page that was shared. With the lock: their source may be evicted next. */
static kvf_status_t copy_pages(const kvf_blocks_t *blocks, const kvf_seq_copies_t *copies) {
    kvf_view_t view;
    kvf_status_t status = copies->n == 0 ? KVF_OK : kvf_view_open(blocks->pools, &view);
    if (status != KVF_OK || copies->n == 0) {
        return status;
    }
    for (uint32_t i = 0; i < copies->n && status == KVF_OK; i++) {
        const kvf_seq_copy_t *copy = &copies->list[i];
        kvf_pool_t *pool = blocks->pools->pools[copy->group_idx];
        void *from = NULL;
        status = kvf_view_page(&view, copy->group_idx, copy->from_slot, &from, NULL);
        if (status == KVF_OK) {
            status = kvf_pool_write(
                pool, copy->to_slot, 0, from,
                kvf_group_block_bytes(&blocks->pools->layout->groups[copy->group_idx]), NULL);
        }
    }
    kvf_view_close(&view);
    return status;
}

/* With the lock. */
static kvf_status_t append(const kvf_blocks_t *blocks, kvf_seq_t *seq, int64_t n_tokens) {
    kvf_seq_copies_t copies;
    kvf_status_t status = kvf_seq_append(seq, n_tokens, &copies);
    return status == KVF_OK ? copy_pages(blocks, &copies) : status;
}

/* With the lock: bind everything. */
static kvf_status_t reserve(const kvf_blocks_t *blocks, kvf_seq_t *seq, int64_t prompt) {
    kvf_seq_copies_t copies;
    kvf_status_t status = kvf_seq_reserve(seq, &copies);
    if (status == KVF_OK) {
        status = copy_pages(blocks, &copies);
    }
    return status != KVF_OK ? status : append(blocks, seq, prompt - kvf_seq_tokens(seq));
}

/* With the lock: so many pages of each group, or none, are the lease's from now on, whenever it
 * comes for them. */
static kvf_status_t set_aside(kvf_blocks_t *blocks, const int64_t *need, kvf_lease_t *lease) {
    const kvf_pools_t *pools = blocks->pools;
    for (uint32_t g = 0; g < pools->layout->n_groups; g++) {
        if (need[g] > pools->n_pages[g] - blocks->set_aside[g]) {
            return KVF_ERR_AGAIN;
        }
    }
    for (uint32_t g = 0; g < pools->layout->n_groups; g++) {
        blocks->set_aside[g] += need[g];
        lease->set_aside[g] = need[g];
    }
    return KVF_OK;
}

/* With the lock. */
static void close_lease(kvf_blocks_t *blocks, kvf_lease_t *lease) {
    kvf_seq_close(lease->seq);
    for (uint32_t g = 0; g < blocks->pools->layout->n_groups; g++) {
        blocks->set_aside[g] -= lease->set_aside[g];
    }
    *lease = (kvf_lease_t){.seq = NULL};
}

/* How much of a prompt may be found: the context side computes the last token in any case. In
 * chunks it goes on at the edge of a block: the page of a block that was found in part cannot be
 * written, for others and the request's own send read it, and a copy is one page more than was set
 * aside. */
static int64_t most_cached(const kvf_blocks_t *blocks, int64_t prompt) {
    const kvf_blocks_config_t *config = &blocks->config;
    int64_t t = blocks->pools->layout->groups[0].tokens_per_block; /* that of every group */
    if (config->generation_side) {
        return prompt;
    }
    return config->chunk_tokens == 0 ? prompt - 1 : (prompt - 1) / t * t;
}

kvf_status_t kvf_blocks_open(kvf_blocks_t *blocks, const kvf_lengths_t *lengths,
                             const kvf_content_t *content, kvf_lease_t *lease_p,
                             kvf_detail_t *detail) {
    const kvf_blocks_config_t *config = &blocks->config;
    int64_t prompt = kvf_prompt_tokens(lengths), need[KVF_MAX_GROUPS];
    kvf_lease_t lease = {.seq = NULL};
    kvf_status_t status = kvf_blocks_fit(blocks, lengths, detail);
    if (status == KVF_OK) {
        status = kvf_get_kv_capacity_tokens(lengths, config->generation_side,
                                            &lease.capacity_tokens, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    /* It fits, so what may be too much is the prefix. */
    bool reuse = kvf_seqs_need(blocks->seqs, lengths, config->chunk_tokens, need, NULL) == KVF_OK;
    const kvf_seq_desc_t desc = {.lengths = *lengths,
                                 .allocated_tokens = lease.capacity_tokens,
                                 .content_ids = reuse ? content->ids : NULL,
                                 .n_content_ids = content->n_ids,
                                 .max_cached_tokens = most_cached(blocks, prompt)};
    (void)pthread_mutex_lock(&blocks->lock);
    if (config->chunk_tokens > 0) {
        status = set_aside(blocks, need, &lease);
    }
    if (status == KVF_OK) {
        status = kvf_seq_open(blocks->seqs, &desc, &lease.seq, detail);
    }
    if (status == KVF_OK && config->chunk_tokens == 0) {
        status = reserve(blocks, lease.seq, prompt);
    }
    if (status != KVF_OK) {
        close_lease(blocks, &lease);
    }
    (void)pthread_mutex_unlock(&blocks->lock);
    if (status == KVF_OK) {
        *lease_p = lease;
    } else if (status == KVF_ERR_AGAIN) {
        (void)kvf_fail(detail, status, "the pools have too few free pages now");
    } else if (status == KVF_ERR_NO_MEMORY) {
        (void)kvf_fail(detail, status, "no memory for the request's tables");
    }
    return status;
}

void kvf_blocks_close(kvf_blocks_t *blocks, kvf_lease_t *lease) {
    if (lease->seq != NULL) {
        (void)pthread_mutex_lock(&blocks->lock);
        close_lease(blocks, lease);
        (void)pthread_mutex_unlock(&blocks->lock);
    }
}

kvf_status_t kvf_blocks_append(kvf_blocks_t *blocks, kvf_lease_t *lease, int64_t n_tokens) {
    (void)pthread_mutex_lock(&blocks->lock);
    kvf_status_t status = append(blocks, lease->seq, n_tokens);
    (void)pthread_mutex_unlock(&blocks->lock);
    return status;
}

kvf_status_t kvf_blocks_rewind(kvf_blocks_t *blocks, kvf_lease_t *lease, int64_t tokens) {
    (void)pthread_mutex_lock(&blocks->lock);
    kvf_status_t status = kvf_seq_rewind(lease->seq, tokens);
    (void)pthread_mutex_unlock(&blocks->lock);
    return status;
}

kvf_status_t kvf_blocks_settle(kvf_blocks_t *blocks, kvf_lease_t *lease, int64_t tokens) {
    (void)pthread_mutex_lock(&blocks->lock);
    kvf_status_t status = kvf_seq_publish(lease->seq, tokens);
    if (status == KVF_OK) {
        status = kvf_seq_slide(lease->seq, tokens);
    }
    (void)pthread_mutex_unlock(&blocks->lock);
    return status;
}

void kvf_blocks_tables(const kvf_blocks_t *blocks, const kvf_lease_t *lease, kvf_table_t *tables) {
    for (uint32_t g = 0; g < blocks->pools->layout->n_groups; g++) {
        tables[g] = kvf_seq_table(lease->seq, g);
    }
}
