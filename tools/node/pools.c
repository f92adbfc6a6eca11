/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/pools.h"

#include "kvmgr/base/size.h"
#include "kvmgr/window.h"

#include <inttypes.h>
#include <string.h>

#define GIB (UINT64_C(1) << 30)

static kvf_span_t dead_span(const kvf_layer_group_t *group, const kvf_lengths_t *lengths) {
    kvf_span_t span = kvf_stale_span(kvf_prompt_tokens(lengths), group->tokens_per_block,
                                     group->window, group->sinks);
    span.end = span.end < span.first ? span.first : span.end;
    return span;
}

kvf_status_t kvf_pools_need(const kvf_layer_group_t *group, const kvf_lengths_t *lengths,
                            bool include_drafts, int64_t *n_p, kvf_block_counts_t *counts_p,
                            kvf_detail_t *detail) {
    kvf_status_t status =
        kvf_get_block_counts(lengths, include_drafts, group->tokens_per_block, counts_p, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_span_t dead = dead_span(group, lengths);
    *n_p = counts_p->alloc_blocks - (dead.end - dead.first);
    return KVF_OK;
}

/* The most blocks that so many consecutive tokens touch (docs/placement.md "Windows"). */
static int64_t touched(int64_t tokens, int64_t t) {
    return 1 + kvf_div_ceil(tokens - 1, t);
}

static int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* What a prompt that is computed in chunks holds of a group with a window: the sinks, the window in
 * front of a chunk, and the chunk. One of reference length has one chunk at most. */
static int64_t chunked_pages(const kvf_layer_group_t *group, int64_t chunk_tokens) {
    int64_t t = group->tokens_per_block;
    int64_t chunk = min_i64(chunk_tokens, KVF_REFERENCE_PROMPT_TOKENS);
    return min_i64(kvf_div_ceil(group->sinks, t) + touched(group->window - 1 + chunk, t),
                   kvf_div_ceil(KVF_REFERENCE_PROMPT_TOKENS, t));
}

/* The most pages that one request holds of a group with a window: live blocks, sinks, and one block
 * of scratch; or what its chunks take. */
static int64_t window_pages(const kvf_layer_group_t *group, int64_t chunk_tokens) {
    int64_t t = group->tokens_per_block;
    int64_t live = group->window >= 2 ? touched(group->window - 1, t) : 1;
    int64_t whole = live + kvf_div_ceil(group->sinks, t) + 1;
    int64_t chunked = chunk_tokens > 0 ? chunked_pages(group, chunk_tokens) : 0;
    return whole > chunked ? whole : chunked;
}

/* Pages of a request of reference length. */
static kvf_status_t reference_pages(const kvf_layer_group_t *group, int64_t chunk_tokens,
                                    int64_t *n_p, kvf_detail_t *detail) {
    const kvf_lengths_t reference = {.prompt_len = KVF_REFERENCE_PROMPT_TOKENS};
    kvf_block_counts_t counts;
    if (group->window != 0 && chunk_tokens > 0) {
        *n_p = chunked_pages(group, chunk_tokens);
        return KVF_OK;
    }
    return kvf_pools_need(group, &reference, false, n_p, &counts, detail);
}

static int64_t share(uint64_t bytes, int64_t need, unsigned __int128 reference_bytes) {
    unsigned __int128 n = (unsigned __int128)bytes * (uint64_t)need / reference_bytes;
    return n > INT32_MAX ? INT32_MAX : (int64_t)n;
}

kvf_status_t kvf_pools_cut(const kvf_layout_t *layout, uint64_t bytes, int64_t chunk_tokens,
                           int64_t *n_pages, kvf_detail_t *detail) {
    int64_t need[KVF_MAX_GROUPS];
    int64_t result[KVF_MAX_GROUPS];
    unsigned __int128 all = 0, full = 0, least = 0, left = bytes;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        kvf_status_t status = reference_pages(group, chunk_tokens, &need[g], detail);
        if (status != KVF_OK) {
            return status;
        }
        uint64_t page = kvf_group_block_bytes(group);
        need[g] = need[g] < 1 ? 1 : need[g];
        all += (unsigned __int128)page * (uint64_t)need[g];
        full += group->window == 0 ? (unsigned __int128)page * (uint64_t)need[g] : 0;
        int64_t floor = group->window == 0 ? 1 : window_pages(group, chunk_tokens);
        least += (unsigned __int128)page * (uint64_t)floor;
    }
    if (least > bytes) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "pool.bytes: %" PRIu64
                        " is too small for this model; give at least %" PRIu64,
                        bytes, (uint64_t)least);
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        if (group->window != 0) {
            int64_t floor = window_pages(group, chunk_tokens);
            result[g] = share(bytes, need[g], all);
            result[g] = result[g] < floor ? floor : result[g];
            left -= (unsigned __int128)kvf_group_block_bytes(group) * (uint64_t)result[g];
        }
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        if (layout->groups[g].window == 0) {
            result[g] = share((uint64_t)left, need[g], full);
            result[g] = result[g] < 1 ? 1 : result[g];
        }
    }
    memcpy(n_pages, result, layout->n_groups * sizeof(*n_pages));
    return KVF_OK;
}

kvf_status_t kvf_pools_check_memory(uint64_t bytes, uint64_t machine_bytes, kvf_detail_t *detail) {
    if (bytes <= machine_bytes) {
        return KVF_OK;
    }
    return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                    "pool.bytes: %" PRIu64 " (%.1f GiB) is more than the memory of this machine, "
                    "%" PRIu64 " (%.1f GiB); give less",
                    bytes, (double)bytes / GIB, machine_bytes, (double)machine_bytes / GIB);
}

kvf_status_t kvf_pools_create(kvf_agent_t *agent, const kvf_layout_t *layout,
                              const kvf_pool_desc_t *like, uint64_t bytes, int64_t chunk_tokens,
                              kvf_pools_t *pools_p, kvf_detail_t *detail) {
    kvf_pools_t pools = {.layout = layout, .on_device = strncmp(like->memory, "cuda", 4) == 0};
    kvf_status_t status = kvf_pools_cut(layout, bytes, chunk_tokens, pools.n_pages, detail);
    for (uint32_t g = 0; status == KVF_OK && g < layout->n_groups; g++) {
        kvf_pool_desc_t desc = *like;
        desc.group_idx = g;
        desc.n_pages = pools.n_pages[g];
        kvf_detail_t cause;
        status = kvf_pool_create(agent, &desc, &pools.pools[g], &cause);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "%s: %s",
                           status == KVF_ERR_UNSUPPORTED || status == KVF_ERR_INVALID
                               ? "pool.memory"
                               : "pool.bytes",
                           cause.text);
        }
    }
    if (status == KVF_OK) {
        *pools_p = pools;
    }
    return status;
}

kvf_status_t kvf_pools_fit(const kvf_pools_t *pools, const kvf_lengths_t *lengths,
                           bool include_drafts, kvf_detail_t *detail) {
    for (uint32_t g = 0; g < pools->layout->n_groups; g++) {
        const kvf_layer_group_t *group = &pools->layout->groups[g];
        kvf_block_counts_t counts;
        int64_t n;
        kvf_status_t status = kvf_pools_need(group, lengths, include_drafts, &n, &counts, detail);
        if (status != KVF_OK) {
            return status;
        }
        if (n > pools->n_pages[g]) {
            return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                            "the request needs %" PRId64 " pages of group %s, the pool has %" PRId64
                            "; send a shorter prompt or raise pool.bytes",
                            n, group->name, pools->n_pages[g]);
        }
    }
    return KVF_OK;
}

int64_t kvf_table_next_bound(const kvf_table_t *table, int64_t ordinal, int64_t end) {
    while (ordinal < end && table->slots[ordinal] < 0) {
        ordinal++;
    }
    return ordinal < end ? ordinal : end;
}
