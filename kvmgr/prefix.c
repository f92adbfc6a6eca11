/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/prefix.h"

#include <assert.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define NONE (-1)
#define EVICT_BATCH 256

/* What is known of a page. Lists run through the pages themselves, so nothing allocates later. */
struct page {
    kvf_prefix_key_t key; /* while indexed */
    uint32_t sequences;
    bool indexed;
    int32_t next_in_bucket;
    int32_t older, newer; /* in the list of pages that only the index holds */
};

struct group {
    struct page *pages;
    int32_t *buckets;
    uint64_t mask; /* of a key, to its bucket */
    int64_t n_pages;
    int64_t n_used;   /* pages of sequences or in the index */
    int64_t n_unused; /* pages that only the index holds */
    int32_t oldest, newest;
};

struct kvf_prefix {
    kvf_alloc_t alloc;
    kvf_store_t store;
    uint32_t n_groups;
    struct group groups[KVF_MAX_GROUPS];
};

static kvf_prefix_key_t hash(const int64_t *words, size_t bytes) {
    XXH128_hash_t h = XXH3_128bits(words, bytes);
    return (kvf_prefix_key_t){h.low64, h.high64};
}

kvf_prefix_key_t kvf_prefix_chain(kvf_prefix_key_t before, int64_t id) {
    const int64_t words[] = {(int64_t)before.low, (int64_t)before.high, id};
    return hash(words, sizeof(words));
}

kvf_prefix_key_t kvf_prefix_block(kvf_prefix_key_t chain, uint32_t group_idx,
                                  int64_t tokens_per_block, int64_t ordinal,
                                  int64_t filled_tokens) {
    const int64_t words[] = {
        (int64_t)chain.low, (int64_t)chain.high, group_idx, tokens_per_block, ordinal,
        filled_tokens};
    return hash(words, sizeof(words));
}

static kvf_status_t create_group(const kvf_alloc_t *alloc, int64_t n_pages, struct group *group) {
    if (n_pages < 1 || n_pages > INT32_MAX) {
        return KVF_ERR_INVALID;
    }
    size_t n_buckets = 1;
    while (n_buckets < (size_t)n_pages) {
        n_buckets *= 2;
    }
    group->pages = kvf_calloc(alloc, (size_t)n_pages, sizeof(*group->pages));
    group->buckets = kvf_realloc(alloc, NULL, n_buckets, sizeof(*group->buckets));
    if (group->pages == NULL || group->buckets == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < n_buckets; i++) {
        group->buckets[i] = NONE;
    }
    group->mask = n_buckets - 1;
    group->n_pages = n_pages;
    group->oldest = group->newest = NONE;
    return KVF_OK;
}

kvf_status_t kvf_prefix_create(const kvf_alloc_t *alloc, const kvf_store_t *store,
                               uint32_t n_groups, const int64_t *n_pages, kvf_prefix_t **prefix_p) {
    if (n_groups < 1 || n_groups > KVF_MAX_GROUPS) {
        return KVF_ERR_INVALID;
    }
    kvf_prefix_t *prefix = kvf_calloc(alloc, 1, sizeof(*prefix));
    if (prefix == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    prefix->alloc = *alloc;
    prefix->store = *store;
    prefix->n_groups = n_groups;
    for (uint32_t g = 0; g < n_groups; g++) {
        kvf_status_t status = create_group(alloc, n_pages[g], &prefix->groups[g]);
        if (status != KVF_OK) {
            kvf_prefix_destroy(prefix);
            return status;
        }
    }
    *prefix_p = prefix;
    return KVF_OK;
}

void kvf_prefix_destroy(kvf_prefix_t *prefix) {
    if (prefix == NULL) {
        return;
    }
    kvf_alloc_t alloc = prefix->alloc;
    for (uint32_t g = 0; g < prefix->n_groups; g++) {
        kvf_free(&alloc, prefix->groups[g].pages);
        kvf_free(&alloc, prefix->groups[g].buckets);
    }
    kvf_free(&alloc, prefix);
}

static void append_unused(struct group *group, int32_t slot) {
    struct page *page = &group->pages[slot];
    page->older = group->newest;
    page->newer = NONE;
    *(group->newest == NONE ? &group->oldest : &group->pages[group->newest].newer) = slot;
    group->newest = slot;
    group->n_unused++;
}

static void remove_unused(struct group *group, int32_t slot) {
    const struct page *page = &group->pages[slot];
    *(page->older == NONE ? &group->oldest : &group->pages[page->older].newer) = page->newer;
    *(page->newer == NONE ? &group->newest : &group->pages[page->newer].older) = page->older;
    group->n_unused--;
}

static int32_t *bucket_of(const struct group *group, kvf_prefix_key_t key) {
    return &group->buckets[key.low & group->mask];
}

static void index_add(struct group *group, kvf_prefix_key_t key, int32_t slot) {
    struct page *page = &group->pages[slot];
    int32_t *bucket = bucket_of(group, key);
    page->key = key;
    page->indexed = true;
    page->next_in_bucket = *bucket;
    *bucket = slot;
}

static void index_remove(struct group *group, int32_t slot) {
    struct page *page = &group->pages[slot];
    int32_t *link = bucket_of(group, page->key);
    while (*link != slot) {
        link = &group->pages[*link].next_in_bucket;
    }
    *link = page->next_in_bucket;
    page->indexed = false;
}

/* Evict up to n pages, the least recently used first, many with a call of the store. */
static int64_t evict(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n) {
    struct group *group = &prefix->groups[group_idx];
    int64_t evicted = 0;
    for (int64_t left = group->n_unused; left > 0 && evicted < n;) {
        int32_t slots[EVICT_BATCH];
        int64_t wanted = n - evicted < left ? n - evicted : left, n_slots = 0, gone;
        wanted = wanted < EVICT_BATCH ? wanted : EVICT_BATCH;
        for (int32_t slot = group->oldest; n_slots < wanted; slot = group->pages[slot].newer) {
            slots[n_slots++] = slot;
        }
        kvf_status_t status =
            prefix->store.evict(prefix->store.ctx, group_idx, n_slots, slots, &gone);
        for (int64_t i = 0; i < gone; i++) {
            remove_unused(group, slots[i]);
            index_remove(group, slots[i]);
        }
        group->n_used -= gone;
        evicted += gone;
        left -= gone;
        if (status != KVF_OK) {
            remove_unused(group, slots[gone]);
            append_unused(group, slots[gone]); /* a transfer is a use */
            left--;
        }
    }
    return evicted;
}

kvf_status_t kvf_prefix_acquire(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n,
                                int32_t *slots) {
    struct group *group = &prefix->groups[group_idx];
    const kvf_store_t *store = &prefix->store;
    int64_t spare = group->n_pages - group->n_used; /* at most so many are free */
    if (n > spare + group->n_unused) {
        return n > group->n_pages ? KVF_ERR_TOO_LARGE : KVF_ERR_AGAIN;
    }
    if (n > spare) {
        (void)evict(prefix, group_idx, n - spare);
    }
    kvf_status_t status = store->acquire(store->ctx, group_idx, n, slots);
    /* A released page may be kept back by a transfer: then it was no spare one. */
    if (status == KVF_ERR_AGAIN && evict(prefix, group_idx, n) > 0) {
        status = store->acquire(store->ctx, group_idx, n, slots);
    }
    if (status != KVF_OK) {
        return status;
    }
    for (int64_t i = 0; i < n; i++) {
        assert(group->pages[slots[i]].sequences == 0 && !group->pages[slots[i]].indexed);
        group->pages[slots[i]].sequences = 1;
    }
    group->n_used += n;
    return KVF_OK;
}

void kvf_prefix_hold(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n, const int32_t *slots) {
    struct group *group = &prefix->groups[group_idx];
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] != NONE && group->pages[slots[i]].sequences++ == 0) {
            remove_unused(group, slots[i]);
        }
    }
    if (n > 0) {
        prefix->store.hold(prefix->store.ctx, group_idx, n, slots);
    }
}

void kvf_prefix_release(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n, const int32_t *slots) {
    struct group *group = &prefix->groups[group_idx];
    /* Backwards: a block is of no use without those in front of it, so it goes before them. */
    for (int64_t i = n - 1; i >= 0; i--) {
        if (slots[i] == NONE) {
            continue;
        }
        struct page *page = &group->pages[slots[i]];
        assert(page->sequences > 0);
        if (--page->sequences > 0) {
            continue;
        }
        if (page->indexed) {
            append_unused(group, slots[i]);
        } else {
            group->n_used--;
        }
    }
    if (n > 0) {
        prefix->store.release(prefix->store.ctx, group_idx, n, slots);
    }
}

bool kvf_prefix_is_shared(const kvf_prefix_t *prefix, uint32_t group_idx, int32_t slot) {
    const struct page *page = &prefix->groups[group_idx].pages[slot];
    return page->sequences > 1 || page->indexed;
}

int32_t kvf_prefix_find(const kvf_prefix_t *prefix, uint32_t group_idx, kvf_prefix_key_t key) {
    const struct group *group = &prefix->groups[group_idx];
    int32_t slot = *bucket_of(group, key);
    while (slot != NONE &&
           (group->pages[slot].key.low != key.low || group->pages[slot].key.high != key.high)) {
        slot = group->pages[slot].next_in_bucket;
    }
    return slot;
}

static bool is_new(const kvf_prefix_t *prefix, uint32_t group_idx, kvf_prefix_key_t key,
                   int32_t slot) {
    return slot != NONE && !prefix->groups[group_idx].pages[slot].indexed &&
           kvf_prefix_find(prefix, group_idx, key) == NONE;
}

kvf_status_t kvf_prefix_publish(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n,
                                const kvf_prefix_key_t *keys, const int32_t *slots) {
    const kvf_store_t *store = &prefix->store;
    for (int64_t first = 0, end; first < n; first = end) {
        for (end = first; end < n && is_new(prefix, group_idx, keys[end], slots[end]); end++) {
        }
        if (end == first) {
            end++;
            continue;
        }
        kvf_status_t status = store->cache(store->ctx, group_idx, end - first, slots + first);
        if (status != KVF_OK) {
            return status;
        }
        for (int64_t i = first; i < end; i++) {
            index_add(&prefix->groups[group_idx], keys[i], slots[i]);
        }
    }
    return KVF_OK;
}

bool kvf_prefix_take_back(kvf_prefix_t *prefix, uint32_t group_idx, int32_t slot) {
    struct group *group = &prefix->groups[group_idx];
    const struct page *page = &group->pages[slot];
    if (page->sequences > 1) {
        return false;
    }
    if (page->indexed) {
        int64_t n;
        if (prefix->store.evict(prefix->store.ctx, group_idx, 1, &slot, &n) != KVF_OK) {
            return false;
        }
        index_remove(group, slot);
    }
    return true;
}

int64_t kvf_prefix_clear(kvf_prefix_t *prefix) {
    int64_t left = 0;
    for (uint32_t g = 0; g < prefix->n_groups; g++) {
        (void)evict(prefix, g, INT64_MAX);
        left += prefix->groups[g].n_unused;
    }
    return left;
}
