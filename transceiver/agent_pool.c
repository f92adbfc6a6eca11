/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions of pools: memory, and the records of its pages on the agent's thread. */
#include "kvmgr/base/size.h"
#include "kvmgr/store.h"
#include "transceiver/agent_impl.h"
#include "transceiver/mem/mem.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MOST_DEVICES 1000

/* The device of "cuda" or "cuda:N"; all pools of an agent have one. */
static kvf_status_t open_device(kvf_agent_t *agent, const char *memory, kvf_detail_t *detail) {
    int number = -1;
    bool is_right = strcmp(memory, "cuda") == 0;
    if (memory[4] == ':' && isdigit((unsigned char)memory[5])) {
        char *end;
        long n = strtol(memory + 5, &end, 10);
        is_right = *end == '\0' && n <= MOST_DEVICES;
        number = is_right ? (int)n : -1;
    }
    if (!is_right) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory %.32s: write cuda, or cuda:N with the device's number", memory);
    }
    if (agent->cuda == NULL) {
        return kvf_cuda_open(agent->alloc, number, &agent->cuda, detail);
    }
    if (number >= 0 && number != kvf_cuda_number(agent->cuda)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory %.32s: another pool of this agent is on device %d; make an agent "
                        "for each device",
                        memory, kvf_cuda_number(agent->cuda));
    }
    return KVF_OK;
}

/* The row for memory of the device. */
static kvf_status_t find_device_kind(const kvf_agent_t *agent, const char *alloc,
                                     const kvf_mem_kind_t **kind_p, kvf_detail_t *detail) {
    if (alloc == NULL || strcmp(alloc, "malloc") == 0) {
        *kind_p = kvf_cuda_kind(agent->cuda);
    } else if (strcmp(alloc, "vmm") == 0) {
        *kind_p = kvf_cuda_vmm_kind(agent->cuda);
    } else {
        return kvf_fail(detail, KVF_ERR_INVALID, "device_alloc %.32s: write malloc or vmm", alloc);
    }
    return KVF_OK;
}

/* The row for a kind of memory. */
static kvf_status_t find_kind(kvf_agent_t *agent, const kvf_pool_desc_t *desc,
                              const kvf_mem_kind_t **kind_p, kvf_detail_t *detail) {
    const char *memory = desc->memory;
    bool on_device = memory != NULL && strncmp(memory, "cuda", 4) == 0, others = false;
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        const kvf_pool_t *pool = &agent->pools[g];
        others |= pool->agent != NULL && (pool->mem.kind->type == KVF_MEM_CUDA) != on_device;
    }
    if (others) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "pools of an agent are all on a device, or all in the CPU's memory");
    }
    if (on_device) {
        kvf_status_t status = open_device(agent, memory, detail);
        return status != KVF_OK ? status
                                : find_device_kind(agent, desc->device_alloc, kind_p, detail);
    }
    if (desc->device_alloc != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "device_alloc %.32s: that is for memory of a device; leave it out",
                        desc->device_alloc);
    }
    if (memory != NULL && strcmp(memory, "host") == 0) {
        *kind_p = kvf_mem_host();
    } else if (memory != NULL && strcmp(memory, "shm") == 0) {
        *kind_p = kvf_mem_shm();
    } else {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "memory %.32s: this version has host, shm and cuda",
                        memory == NULL ? "(none)" : memory);
    }
    return KVF_OK;
}

/* Check what is to become a pool. */
static kvf_status_t check_desc(const kvf_agent_t *agent, const kvf_pool_desc_t *desc,
                               uint64_t *bytes_p, kvf_detail_t *detail) {
    if (agent->loop != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "pools are made before the agent is started");
    }
    if (desc->group_idx >= agent->layout.n_groups) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "group_idx %" PRIu32 ": the layout has %" PRIu32 " layer groups",
                        desc->group_idx, agent->layout.n_groups);
    }
    const kvf_layer_group_t *group = &agent->layout.groups[desc->group_idx];
    if (agent->pools[desc->group_idx].agent != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "group %s has a pool already", group->name);
    }
    if (desc->n_pages < 1 || desc->n_pages > INT32_MAX) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "group %s: n_pages is %" PRId64 ", must be 1 to 2^31-1", group->name,
                        desc->n_pages);
    }
    if (kvf_mul_u64((uint64_t)desc->n_pages, kvf_group_block_bytes(group), bytes_p) != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "group %s: %" PRId64 " pages do not fit an address space", group->name,
                        desc->n_pages);
    }
    return KVF_OK;
}

/* The memory of a pool: new, or the caller's. */
static kvf_status_t take_memory(const kvf_agent_t *agent, const kvf_mem_kind_t *kind, void *base,
                                uint64_t bytes, kvf_mem_t *mem_p, kvf_detail_t *detail) {
    if (base == NULL) {
        return kind->alloc(kind, bytes, mem_p, detail);
    }
    if (kind->type == KVF_MEM_CUDA) {
        return kvf_cuda_attach(agent->cuda, base, bytes, mem_p, detail);
    }
    if (kind->type != KVF_MEM_HOST) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "memory %s cannot be attached: host and cuda can", kind->name);
    }
    *mem_p = (kvf_mem_t){base, bytes, kind, NULL};
    return KVF_OK;
}

static kvf_status_t make(kvf_agent_t *agent, const kvf_pool_desc_t *desc, void *base,
                         uint64_t bytes, kvf_pool_t **pool_p, kvf_detail_t *detail) {
    const kvf_mem_kind_t *kind = NULL;
    kvf_status_t status = find_kind(agent, desc, &kind, detail);
    if (status != KVF_OK) {
        return status;
    }
    const kvf_layer_group_t *group = &agent->layout.groups[desc->group_idx];
    uint64_t page_bytes = kvf_group_block_bytes(group);
    if (kind->type == KVF_MEM_CUDA && page_bytes > UINT64_C(1) << 31) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "group %s: a page of %" PRIu64 " bytes; on a device it has at most 2 GiB",
                        group->name, page_bytes);
    }
    kvf_pool_t *pool = &agent->pools[desc->group_idx];
    status = kvf_pages_create(agent->alloc, desc->n_pages, &pool->pages);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for the records of %" PRId64 " pages",
                        desc->n_pages);
    }
    status = take_memory(agent, kind, base, bytes, &pool->mem, detail);
    if (status != KVF_OK) {
        kvf_pages_destroy(pool->pages);
        return status;
    }
    pool->agent = agent;
    pool->group_idx = desc->group_idx;
    pool->attached = base != NULL;
    pool->zero_freed = desc->zero_freed;
    pool->page_bytes = page_bytes;
    pool->n_pages = desc->n_pages;
    *pool_p = pool;
    return KVF_OK;
}

static kvf_status_t make_pool(kvf_agent_t *agent, const kvf_pool_desc_t *desc, void *base,
                              kvf_pool_t **pool_p, kvf_detail_t *detail) {
    uint64_t bytes = 0;
    bool any = false;
    kvf_status_t status = check_desc(agent, desc, &bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = make(agent, desc, base, bytes, pool_p, detail);
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        any |= agent->pools[g].agent != NULL;
    }
    if (status != KVF_OK && !any) { /* a device without a pool is not the agent's */
        kvf_cuda_close(agent->cuda);
        agent->cuda = NULL;
    }
    return status;
}

kvf_status_t kvf_pool_create(kvf_agent_t *agent, const kvf_pool_desc_t *desc, kvf_pool_t **pool_p,
                             kvf_detail_t *detail) {
    return make_pool(agent, desc, NULL, pool_p, detail);
}

kvf_status_t kvf_pool_attach(kvf_agent_t *agent, const kvf_pool_desc_t *desc, void *base,
                             kvf_pool_t **pool_p, kvf_detail_t *detail) {
    if (base == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "no memory to attach; see kvf_pool_create()");
    }
    return make_pool(agent, desc, base, pool_p, detail);
}

/* Where bytes of a page are in the pool's memory. */
static kvf_status_t find_bytes(const kvf_pool_t *pool, int32_t slot, uint64_t offset,
                               uint64_t bytes, uint64_t *off_p, kvf_detail_t *detail) {
    if (slot < 0 || slot >= pool->n_pages || bytes == 0 ||
        !kvf_range_ok(offset, bytes, pool->page_bytes)) {
        return kvf_fail(detail, KVF_ERR_RANGE,
                        "slot %" PRId32 ", bytes %" PRIu64 " to %" PRIu64 ": the pool has %" PRId64
                        " pages of %" PRIu64 " bytes",
                        slot, offset, offset + bytes, pool->n_pages, pool->page_bytes);
    }
    *off_p = (uint64_t)slot * pool->page_bytes + offset;
    return KVF_OK;
}

kvf_status_t kvf_pool_write(kvf_pool_t *pool, int32_t slot, uint64_t offset, const void *src,
                            uint64_t bytes, kvf_detail_t *detail) {
    uint64_t off = 0;
    kvf_status_t status = find_bytes(pool, slot, offset, bytes, &off, detail);
    return status != KVF_OK ? status
                            : pool->mem.kind->write(&pool->mem, off, src, bytes, NULL, detail);
}

kvf_status_t kvf_pool_read(const kvf_pool_t *pool, int32_t slot, uint64_t offset, void *dst,
                           uint64_t bytes, kvf_detail_t *detail) {
    uint64_t off = 0;
    kvf_status_t status = find_bytes(pool, slot, offset, bytes, &off, detail);
    return status != KVF_OK ? status : pool->mem.kind->read(&pool->mem, off, dst, bytes, detail);
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
    int64_t n_used; /* of those acquired, up to the last that is not new memory */
    const int32_t *slots;
    kvf_status_t (*each)(kvf_pages_t *pages, int32_t slot);
    kvf_pool_info_t *info;
    kvf_status_t status;
} pool_call_t;

/* Whether somebody may have written to a page before it was acquired now: new memory is zero, and
 * its generation is the number of its uses. */
static bool was_used(const kvf_pool_t *pool, int32_t slot) {
    return pool->attached || kvf_pages_generation(pool->pages, slot) > 1;
}

static void call_acquire(void *arg) {
    pool_call_t *c = arg;
    c->status = kvf_pages_acquire(c->pool->pages, c->n, c->acquired);
    for (int64_t i = 0; c->pool->zero_freed && c->status == KVF_OK && i < c->n; i++) {
        c->n_used = was_used(c->pool, c->acquired[i]) ? i + 1 : c->n_used;
    }
}

/* Pages are zeroed when they are handed out, by who gets them: until then nobody holds them, while
 * freed pages that only will be free soon would make others look for more to evict. */
kvf_status_t kvf_pool_acquire(kvf_pool_t *pool, int64_t n, int32_t *slots) {
    pool_call_t c = {.pool = pool, .n = n, .acquired = slots};
    call(pool->agent, call_acquire, &c);
    if (c.status != KVF_OK || c.n_used == 0) {
        return c.status;
    }
    kvf_status_t status = pool->mem.kind->zero(&pool->mem, pool->page_bytes, c.n_used, slots, NULL);
    if (status != KVF_OK) {
        (void)kvf_pool_release(pool, n, slots);
    }
    return status;
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
