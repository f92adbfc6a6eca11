/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/store.h"

#include <assert.h>

static kvf_status_t acquire(void *ctx, uint32_t group_idx, int64_t n, int32_t *slots) {
    kvf_pages_t **pages = ctx;
    return kvf_pages_acquire(pages[group_idx], n, slots);
}

static void hold(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    kvf_pages_t **pages = ctx;
    for (int64_t i = 0; i < n; i++) {
        kvf_status_t status = slots[i] == -1 ? KVF_OK : kvf_pages_hold(pages[group_idx], slots[i]);
        assert(status == KVF_OK);
        (void)status;
    }
}

static void release(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    kvf_pages_t **pages = ctx;
    for (int64_t i = 0; i < n; i++) {
        kvf_status_t status =
            slots[i] == -1 ? KVF_OK : kvf_pages_release(pages[group_idx], slots[i]);
        assert(status == KVF_OK);
        (void)status;
    }
}

static kvf_status_t evict(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots,
                          int64_t *n_evicted_p) {
    kvf_pages_t **pages = ctx;
    kvf_status_t status = KVF_OK;
    int64_t i = 0;
    while (i < n && status == KVF_OK) {
        status = slots[i] == -1 ? KVF_OK : kvf_pages_evict(pages[group_idx], slots[i]);
        i += status == KVF_OK;
    }
    *n_evicted_p = i;
    return status;
}

static kvf_status_t cache(void *ctx, uint32_t group_idx, int64_t n, const int32_t *slots) {
    kvf_pages_t **pages = ctx;
    kvf_status_t status = KVF_OK;
    /* A page that is being read could not be taken back, so no page before all are known to do. */
    for (int64_t i = 0; i < n && status == KVF_OK; i++) {
        status = slots[i] == -1 ? KVF_OK : kvf_pages_can_cache(pages[group_idx], slots[i]);
    }
    for (int64_t i = 0; i < n && status == KVF_OK; i++) {
        bool kept = slots[i] != -1 && kvf_pages_cache(pages[group_idx], slots[i]) == KVF_OK;
        (void)kept; /* not again, if the slot is named twice */
    }
    return status;
}

kvf_store_t kvf_store_over_pages(kvf_pages_t **pages) {
    return (kvf_store_t){pages, acquire, hold, release, cache, evict};
}
