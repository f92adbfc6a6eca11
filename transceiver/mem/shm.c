/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"
#include "transceiver/mover/ucx_context.h"

#include <inttypes.h>
#include <sys/mman.h>

static kvf_status_t shm_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                              kvf_detail_t *detail) {
    kvf_ucx_t *ucx = kind->ctx;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = bytes,
        .flags = UCP_MEM_MAP_ALLOCATE | UCP_MEM_MAP_NONBLOCK,
    };
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    ucp_mem_h memh;
    ucs_status_t status = ucp_mem_map(ucx->context, &params, &memh);
    if (status == UCS_OK) {
        status = ucp_mem_query(memh, &attr);
    }
    if (status != UCS_OK) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no shared memory of %" PRIu64 " bytes: %s", bytes,
                        ucs_status_string(status));
    }
    (void)madvise(attr.address, bytes, MADV_DONTDUMP);
    (void)madvise(attr.address, bytes, MADV_DONTFORK);
    *mem_p = (kvf_mem_t){attr.address, bytes, kind, memh};
    return KVF_OK;
}

static void shm_free(kvf_mem_t *mem) {
    if (mem->base != NULL) {
        (void)ucp_mem_unmap(((kvf_ucx_t *)mem->kind->ctx)->context, mem->priv);
    }
    *mem = (kvf_mem_t){0};
}

void kvf_mem_shm_init(kvf_mem_kind_t *kind, struct kvf_ucx *ucx) {
    *kind = (kvf_mem_kind_t){"shm", KVF_MEM_SHM, true, ucx, shm_alloc, shm_free};
}
