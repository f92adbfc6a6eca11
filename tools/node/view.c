/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/view.h"

#include "kvmgr/base/size.h"

#include <stdlib.h>
#include <sys/mman.h>

static uint64_t page_bytes(const kvf_pools_t *pools, uint32_t group_idx) {
    return kvf_group_block_bytes(&pools->layout->groups[group_idx]);
}

kvf_status_t kvf_view_open(const kvf_pools_t *pools, kvf_view_t *view_p) {
    uint64_t most = 1;
    *view_p = (kvf_view_t){pools, NULL};
    for (uint32_t g = 0; g < pools->layout->n_groups; g++) {
        most = page_bytes(pools, g) > most ? page_bytes(pools, g) : most;
    }
    if (pools->on_device) {
        view_p->copy = malloc(most);
        if (view_p->copy == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    return KVF_OK;
}

void kvf_view_close(kvf_view_t *view) {
    free(view->copy);
    view->copy = NULL;
}

kvf_status_t kvf_view_page(kvf_view_t *view, uint32_t group_idx, int32_t slot, void **page_p,
                           kvf_detail_t *detail) {
    const kvf_pool_t *pool = view->pools->pools[group_idx];
    kvf_status_t status = KVF_OK;
    if (view->copy != NULL) {
        status =
            kvf_pool_read(pool, slot, 0, view->copy, page_bytes(view->pools, group_idx), detail);
    }
    if (status == KVF_OK) {
        *page_p = view->copy != NULL ? view->copy : kvf_pool_page(pool, slot);
    }
    return status;
}

kvf_status_t kvf_view_put(kvf_view_t *view, uint32_t group_idx, int32_t slot,
                          kvf_detail_t *detail) {
    return view->copy == NULL ? KVF_OK
                              : kvf_pool_write(view->pools->pools[group_idx], slot, 0, view->copy,
                                               page_bytes(view->pools, group_idx), detail);
}

/* ---- all at once ---- */

/* Address space like a pool's, of which what is touched becomes real. */
static kvf_status_t open_group(kvf_view_all_t *all, uint32_t g, const kvf_table_t *table,
                               kvf_detail_t *detail) {
    const kvf_pools_t *pools = all->pools;
    uint64_t bytes = page_bytes(pools, g);
    void *base = mmap(NULL, (size_t)((uint64_t)pools->n_pages[g] * bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for copies of pages");
    }
    all->bases[g] = base;
    kvf_status_t status = KVF_OK;
    for (int64_t i = kvf_table_next_bound(table, 0, table->n_blocks);
         i < table->n_blocks && status == KVF_OK;
         i = kvf_table_next_bound(table, i + 1, table->n_blocks)) {
        status = kvf_pool_read(pools->pools[g], table->slots[i], 0,
                               (uint8_t *)base + (uint64_t)table->slots[i] * bytes, bytes, detail);
    }
    return status;
}

kvf_status_t kvf_view_all_open(const kvf_pools_t *pools, const kvf_table_t *tables,
                               kvf_view_all_t *all_p, kvf_detail_t *detail) {
    kvf_view_all_t all = {.pools = pools};
    kvf_status_t status = KVF_OK;
    for (uint32_t g = 0; g < pools->layout->n_groups && status == KVF_OK; g++) {
        if (pools->on_device) {
            status = open_group(&all, g, &tables[g], detail);
        } else {
            all.bases[g] = kvf_pool_page(pools->pools[g], 0);
        }
    }
    if (status != KVF_OK) {
        kvf_view_all_close(&all);
        return status;
    }
    *all_p = all;
    return KVF_OK;
}

void kvf_view_all_close(kvf_view_all_t *all) {
    const kvf_pools_t *pools = all->pools;
    for (uint32_t g = 0; g < pools->layout->n_groups && pools->on_device; g++) {
        if (all->bases[g] != NULL) {
            (void)munmap(all->bases[g],
                         (size_t)((uint64_t)pools->n_pages[g] * page_bytes(pools, g)));
        }
    }
}
