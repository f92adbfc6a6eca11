/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TRANSCEIVER_MEM_H
#define KVF_TRANSCEIVER_MEM_H

/**
 * @file
 * The rows of the memory kind table (kvmgr/base/mem.h).
 */

#include "kvmgr/base/mem.h"

struct kvf_ucx;

/** Anonymous pages (mmap, MADV_DONTDUMP, reserved lazily: memory is used only when touched). Static
 * storage. */
const kvf_mem_kind_t *kvf_mem_host(void);

/** Shared memory allocated through UCX (MADV_DONTDUMP, MADV_DONTFORK), so that a peer on the
 * machine can map it later.
 *  @param ucx          Outlives the row and its memory.
 *  @param[out] kind    Caller's memory. */
void kvf_mem_shm_init(kvf_mem_kind_t *kind, struct kvf_ucx *ucx);

/** The write of rows that the CPU can access; see kvf_mem_kind_t. @return KVF_OK. @thread any */
kvf_status_t kvf_mem_cpu_write(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                               void *stream, kvf_detail_t *detail);

#endif
