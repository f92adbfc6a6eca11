/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TRANSCEIVER_MEM_H
#define KVF_TRANSCEIVER_MEM_H

/**
 * @file
 * The rows of the memory kind table (kvmgr/base/mem.h).
 */

#include "kvmgr/base/mem.h"

/** Anonymous pages (mmap, MADV_DONTDUMP, reserved lazily: memory is used only when touched). Static
 * storage. */
const kvf_mem_kind_t *kvf_mem_host(void);

/** A memfd that is sealed (its length stays, and nobody else can map it for writing), reserved
 * lazily, MADV_DONTDUMP and MADV_DONTFORK: a peer on the machine that is given the descriptor can
 * map it. Static storage. */
const kvf_mem_kind_t *kvf_mem_shm(void);

/** @return The descriptor of memory of that kind, which keeps it; -1 for other memory. @thread any
 */
int kvf_mem_shm_fd(const kvf_mem_t *mem);

/** The write of rows that the CPU can access; see kvf_mem_kind_t. @return KVF_OK. @thread any */
kvf_status_t kvf_mem_cpu_write(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                               void *stream, kvf_detail_t *detail);
/** The read of such rows. @return KVF_OK. @thread any */
kvf_status_t kvf_mem_cpu_read(const kvf_mem_t *mem, uint64_t off, void *dst, uint64_t bytes,
                              kvf_detail_t *detail);
/** The zero of such rows. @return KVF_OK. @thread any */
kvf_status_t kvf_mem_cpu_zero(kvf_mem_t *mem, uint64_t piece_bytes, int64_t n, const int32_t *slots,
                              kvf_detail_t *detail);

#endif
