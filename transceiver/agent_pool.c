/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions of pools: memory, and the records of its pages on the agent's thread. */
#include "kvmgr/base/size.h"
#include "kvmgr/store.h"
#include "transceiver/agent_impl.h"
#include "transceiver/mem/mem.h"

#include <inttypes.h>
#include <string.h>

kvf_status_t kvf_pool_create(kvf_agent_t *agent, const kvf_pool_desc_t *desc, kvf_pool_t **pool_p,
                             kvf_detail_t *detail) {
    const kvf_mem_kind_t *kind = NULL;
    uint64_t bytes;
    if (agent->loop != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "pools are made before the agent is started");
    }
    if (desc->group_idx >= agent->layout.n_groups) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "group_idx %" PRIu32 ": the layout has %" PRIu32 " layer groups",
                        desc->group_idx, agent->layout.n_groups);
    }
    if (agent->pools[desc->group_idx].agent != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "group %s has a pool already",
                        agent->layout.groups[desc->group_idx].name);
    }
    const kvf_layer_group_t *group = &agent->layout.groups[desc->group_idx];
    if (desc->n_pages < 1 || desc->n_pages > INT32_MAX) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "group %s: n_pages is %" PRId64 ", must be 1 to 2^31-1", group->name,
                        desc->n_pages);
    }
    if (desc->memory != NULL && strcmp(desc->memory, "host") == 0) {
        kind = kvf_mem_host();
    } else if (desc->memory != NULL && strcmp(desc->memory, "shm") == 0) {
        kind = kvf_mem_shm();
    } else {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "memory %.32s: this version has host and shm",
                        desc->memory == NULL ? "(none)" : desc->memory);
    }
    kvf_status_t status =
        kvf_mul_u64((uint64_t)desc->n_pages, kvf_group_block_bytes(group), &bytes);
    if (status != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "group %s: %" PRId64 " pages do not fit an address space", group->name,
                        desc->n_pages);
    }
    kvf_pool_t *pool = &agent->pools[desc->group_idx];
    status = kvf_pages_create(agent->alloc, desc->n_pages, &pool->pages);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for the records of %" PRId64 " pages",
                        desc->n_pages);
    }
    status = kind->alloc(kind, bytes, &pool->mem, detail);
    if (status != KVF_OK) {
        kvf_pages_destroy(pool->pages);
        return status;
    }
    pool->agent = agent;
    pool->group_idx = desc->group_idx;
    pool->page_bytes = kvf_group_block_bytes(group);
    pool->n_pages = desc->n_pages;
    *pool_p = pool;
    return KVF_OK;
}

void *kvf_pool_page(const kvf_pool_t *pool, int32_t slot) {
    return slot < 0 || slot >= pool->n_pages ? NULL
                                             : pool->mem.base + (uint64_t)slot * pool->page_bytes;
}

/* Run a function where the agent's state may be touched. */
static void call(kvf_agent_t *agent, void (*fn)(void *arg), void *arg) {
    if (agent->loop == NULL) {
        fn(arg);
    } else {
        kvf_loop_call(agent->loop, fn, arg);
    }
}

typedef struct pool_call {
    kvf_pool_t *pool;
    int64_t n;
    int32_t *acquired;
    const int32_t *slots;
    kvf_status_t (*each)(kvf_pages_t *pages, int32_t slot);
    kvf_pool_info_t *info;
    kvf_status_t status;
} pool_call_t;

static void call_acquire(void *arg) {
    pool_call_t *c = arg;
    c->status = kvf_pages_acquire(c->pool->pages, c->n, c->acquired);
}

kvf_status_t kvf_pool_acquire(kvf_pool_t *pool, int64_t n, int32_t *slots) {
    pool_call_t c = {.pool = pool, .n = n, .acquired = slots};
    call(pool->agent, call_acquire, &c);
    return c.status;
}

/* Do something to each page; the first error is what the caller hears of. */
static void call_each(void *arg) {
    pool_call_t *c = arg;
    for (int64_t i = 0; i < c->n; i++) {
        kvf_status_t status = c->slots[i] == -1 ? KVF_OK : c->each(c->pool->pages, c->slots[i]);
        c->status = c->status == KVF_OK ? status : c->status;
    }
}

kvf_status_t kvf_pool_release(kvf_pool_t *pool, int64_t n, const int32_t *slots) {
    pool_call_t c = {.pool = pool, .n = n, .slots = slots, .each = kvf_pages_release};
    call(pool->agent, call_each, &c);
    return c.status;
}

/* All or none. */
static void call_hold(void *arg) {
    pool_call_t *c = arg;
    int64_t i = 0;
    while (i < c->n && c->status == KVF_OK) {
        c->status = c->slots[i] == -1 ? KVF_OK : kvf_pages_hold(c->pool->pages, c->slots[i]);
        i += c->status == KVF_OK;
    }
    if (c->status != KVF_OK) {
        c->n = i;
        c->each = kvf_pages_release;
        call_each(c); /* keeps the status */
    }
}

kvf_status_t kvf_pool_hold(kvf_pool_t *pool, int64_t n, const int32_t *slots) {
    pool_call_t c = {.pool = pool, .n = n, .slots = slots};
    call(pool->agent, call_hold, &c);
    return c.status;
}

static void call_cache(void *arg) {
    pool_call_t *c = arg;
    kvf_store_t store = kvf_store_over_pages(&c->pool->pages);
    c->status = store.cache(store.ctx, 0, c->n, c->slots);
}

kvf_status_t kvf_pool_cache(kvf_pool_t *pool, int64_t n, const int32_t *slots) {
    pool_call_t c = {.pool = pool, .n = n, .slots = slots};
    call(pool->agent, call_cache, &c);
    return c.status;
}

/* Up to the first that does not go. */
static void call_evict(void *arg) {
    pool_call_t *c = arg;
    kvf_store_t store = kvf_store_over_pages(&c->pool->pages);
    c->status = store.evict(store.ctx, 0, c->n, c->slots, &c->n);
}

kvf_status_t kvf_pool_evict(kvf_pool_t *pool, int64_t n, const int32_t *slots,
                            int64_t *n_evicted_p) {
    pool_call_t c = {.pool = pool, .n = n, .slots = slots};
    call(pool->agent, call_evict, &c);
    *n_evicted_p = c.n;
    return c.status;
}

static void call_info(void *arg) {
    pool_call_t *c = arg;
    const kvf_pages_t *pages = c->pool->pages;
    *c->info = (kvf_pool_info_t){
        .group = c->pool->agent->layout.groups[c->pool->group_idx].name,
        .memory = c->pool->mem.kind->name,
        .page_bytes = c->pool->page_bytes,
        .n_pages = c->pool->n_pages,
        .poisoned = kvf_pages_count(pages, KVF_PAGE_POISONED),
        .quarantined = kvf_pages_count(pages, KVF_PAGE_QUARANTINED),
        .writing = kvf_pages_count(pages, KVF_PAGE_WRITING),
        .reading = kvf_pages_count(pages, KVF_PAGE_READING),
        .held = kvf_pages_count(pages, KVF_PAGE_HELD),
        .cached = kvf_pages_count(pages, KVF_PAGE_CACHED),
        .free = kvf_pages_count(pages, KVF_PAGE_FREE),
    };
}

void kvf_pool_get_info(kvf_pool_t *pool, kvf_pool_info_t *info_p) {
    pool_call_t c = {.pool = pool, .info = info_p};
    call(pool->agent, call_info, &c);
}
