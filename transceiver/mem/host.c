/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

static kvf_status_t host_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                               kvf_detail_t *detail) {
    if (bytes == 0 || bytes > PTRDIFF_MAX) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "%" PRIu64 " bytes do not fit an address space",
                        bytes);
    }
    void *base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "the system refuses %" PRIu64
                        " bytes of memory (%s): ask for less, or raise "
                        "the process's limit (ulimit -v)",
                        bytes, strerror(errno));
    }
    /* Advice only: a pool without it works. */
    (void)madvise(base, (size_t)bytes, MADV_DONTDUMP);
    (void)madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    *mem_p = (kvf_mem_t){base, bytes, kind, NULL};
    return KVF_OK;
}

static void host_free(kvf_mem_t *mem) {
    if (mem->base != NULL) {
        (void)munmap(mem->base, (size_t)mem->bytes);
    }
    *mem = (kvf_mem_t){0};
}

kvf_status_t kvf_mem_cpu_write(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                               void *stream, kvf_detail_t *detail) {
    (void)stream;
    (void)detail;
    memcpy(mem->base + off, src, (size_t)bytes);
    return KVF_OK;
}

kvf_status_t kvf_mem_cpu_read(const kvf_mem_t *mem, uint64_t off, void *dst, uint64_t bytes,
                              kvf_detail_t *detail) {
    (void)detail;
    memcpy(dst, mem->base + off, (size_t)bytes);
    return KVF_OK;
}

kvf_status_t kvf_mem_cpu_zero(kvf_mem_t *mem, uint64_t piece_bytes, int64_t n, const int32_t *slots,
                              kvf_detail_t *detail) {
    (void)detail;
    for (int64_t i = 0; i < n; i++) {
        memset(mem->base + (uint64_t)slots[i] * piece_bytes, 0, (size_t)piece_bytes);
    }
    return KVF_OK;
}

const kvf_mem_kind_t *kvf_mem_host(void) {
    static const kvf_mem_kind_t row = {
        "host",           KVF_MEM_HOST,     true, NULL, host_alloc, host_free, kvf_mem_cpu_write,
        kvf_mem_cpu_read, kvf_mem_cpu_zero,
    };
    return &row;
}
