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

/* The most pages that one request holds of a group with a window: live blocks (docs/placement.md
 * "Windows"), sinks, and one block of scratch. */
static int64_t window_pages(const kvf_layer_group_t *group) {
    int64_t t = group->tokens_per_block;
    int64_t live = group->window >= 2 ? 1 + kvf_div_ceil(group->window - 2, t) : 1;
    return live + kvf_div_ceil(group->sinks, t) + 1;
}

static int64_t share(uint64_t bytes, int64_t need, unsigned __int128 reference_bytes) {
    unsigned __int128 n = (unsigned __int128)bytes * (uint64_t)need / reference_bytes;
    return n > INT32_MAX ? INT32_MAX : (int64_t)n;
}

kvf_status_t kvf_pools_cut(const kvf_layout_t *layout, uint64_t bytes, int64_t *n_pages,
                           kvf_detail_t *detail) {
    const kvf_lengths_t reference = {.prompt_len = KVF_REFERENCE_PROMPT_TOKENS};
    int64_t need[KVF_MAX_GROUPS];
    int64_t result[KVF_MAX_GROUPS];
    unsigned __int128 all = 0, full = 0, least = 0, left = bytes;
    kvf_block_counts_t counts;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        kvf_status_t status = kvf_pools_need(group, &reference, false, &need[g], &counts, detail);
        if (status != KVF_OK) {
            return status;
        }
        uint64_t page = kvf_group_block_bytes(group);
        need[g] = need[g] < 1 ? 1 : need[g];
        all += (unsigned __int128)page * (uint64_t)need[g];
        full += group->window == 0 ? (unsigned __int128)page * (uint64_t)need[g] : 0;
        least += (unsigned __int128)page * (uint64_t)(group->window == 0 ? 1 : window_pages(group));
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
            int64_t floor = window_pages(group);
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

kvf_status_t kvf_pools_create(kvf_agent_t *agent, const kvf_layout_t *layout, const char *memory,
                              uint64_t bytes, kvf_pools_t *pools_p, kvf_detail_t *detail) {
    kvf_pools_t pools = {.layout = layout};
    kvf_status_t status = kvf_pools_cut(layout, bytes, pools.n_pages, detail);
    for (uint32_t g = 0; status == KVF_OK && g < layout->n_groups; g++) {
        kvf_pool_desc_t desc = {g, memory, pools.n_pages[g]};
        kvf_detail_t cause;
        status = kvf_pool_create(agent, &desc, &pools.pools[g], &cause);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "%s: %s",
                           status == KVF_ERR_UNSUPPORTED ? "pool.memory" : "pool.bytes",
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

/* Bind the pages of one group: n entries of the table, all but the dead ones. */
static kvf_status_t acquire_group(kvf_pool_t *pool, const kvf_layer_group_t *group,
                                  const kvf_lengths_t *lengths, kvf_table_t table, int32_t *slots) {
    kvf_span_t dead = dead_span(group, lengths);
    int64_t n_dead = dead.end - dead.first, n = table.n_blocks - n_dead;
    /* The pages go to the end of the table; those of ordinals before the dead ones then move to its
     * front. */
    kvf_status_t status = n == 0 ? KVF_OK : kvf_pool_acquire(pool, n, slots + n_dead);
    if (status == KVF_OK && n_dead > 0) {
        memmove(slots, slots + n_dead, (size_t)dead.first * sizeof(*slots));
        memset(slots + dead.first, 0xff, (size_t)n_dead * sizeof(*slots)); /* -1 */
    }
    return status;
}

static void release_groups(const kvf_pools_t *pools, const kvf_lease_t *lease, uint32_t n_groups) {
    for (uint32_t g = 0; g < n_groups; g++) {
        /* Every slot was acquired here, so there is nothing to report. */
        (void)kvf_pool_release(pools->pools[g], lease->tables[g].n_blocks, lease->tables[g].slots);
    }
}

kvf_status_t kvf_lease_acquire(const kvf_alloc_t *alloc, const kvf_pools_t *pools,
                               const kvf_lengths_t *lengths, bool include_drafts,
                               kvf_lease_t *lease_p, kvf_detail_t *detail) {
    const kvf_layout_t *layout = pools->layout;
    kvf_lease_t lease = {.slots = NULL};
    size_t n_slots = 0;
    kvf_status_t status = kvf_pools_fit(pools, lengths, include_drafts, detail);
    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        kvf_block_counts_t counts;
        status = kvf_get_block_counts(lengths, include_drafts, layout->groups[g].tokens_per_block,
                                      &counts, detail);
        if (status != KVF_OK) {
            return status;
        }
        lease.tables[g].n_blocks = counts.alloc_blocks;
        lease.capacity_tokens = counts.capacity_tokens;
        n_slots += (size_t)counts.alloc_blocks;
    }
    lease.slots = kvf_realloc(alloc, NULL, n_slots, sizeof(*lease.slots));
    if (lease.slots == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the request's tables");
    }
    int32_t *at = lease.slots;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        lease.tables[g].slots = at;
        status = acquire_group(pools->pools[g], &layout->groups[g], lengths, lease.tables[g], at);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "the pool of group %s has too few free pages now",
                           layout->groups[g].name);
            release_groups(pools, &lease, g);
            kvf_free(alloc, lease.slots);
            return status;
        }
        at += lease.tables[g].n_blocks;
    }
    *lease_p = lease;
    return KVF_OK;
}

void kvf_lease_release(const kvf_alloc_t *alloc, const kvf_pools_t *pools, kvf_lease_t *lease) {
    if (lease->slots == NULL) {
        return;
    }
    release_groups(pools, lease, pools->layout->n_groups);
    kvf_free(alloc, lease->slots);
    *lease = (kvf_lease_t){.slots = NULL};
}

int64_t kvf_table_next_bound(const kvf_table_t *table, int64_t ordinal, int64_t end) {
    while (ordinal < end && table->slots[ordinal] < 0) {
        ordinal++;
    }
    return ordinal < end ? ordinal : end;
}
