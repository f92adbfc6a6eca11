/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_MEM_H
#define KVF_BASE_MEM_H

/**
 * @file
 * The memory kind table: host, shm, cuda and fake memory are rows of it. Rows live in
 * transceiver/mem/.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum kvf_mem_type {
    KVF_MEM_HOST, /**< anonymous pages of this process */
    KVF_MEM_SHM,  /**< shared memory (a memfd), which a peer on this machine may map */
    KVF_MEM_CUDA, /**< device memory */
    KVF_MEM_FAKE  /**< tests: an address range without memory behind most of it */
} kvf_mem_type_t;

struct kvf_mem_kind;

/** One range of memory of some kind. */
typedef struct kvf_mem {
    uint8_t *base; /**< readable by the CPU only when kind->host_access */
    uint64_t bytes;
    const struct kvf_mem_kind *kind;
    void *priv; /**< the row's own */
} kvf_mem_t;

/** A row. All functions: any thread, nobody else using the same bytes. */
typedef struct kvf_mem_kind {
    const char *name; /**< as in the configuration: host | shm | cuda | fake */
    kvf_mem_type_t type;
    bool host_access; /**< the CPU may read and write base */
    void *ctx;        /**< the row's own, borrowed */
    /**
     * @param bytes       > 0.
     * @param[out] mem_p  Zeroed memory aligned to at least 4096 bytes; the caller gives it back
     * with free.
     * @return KVF_OK, KVF_ERR_NO_MEMORY (the text names bytes and what to raise),
     * KVF_ERR_UNSUPPORTED.
     */
    kvf_status_t (*alloc)(const struct kvf_mem_kind *kind, uint64_t bytes, kvf_mem_t *mem_p,
                          kvf_detail_t *detail);
    /** Give memory back; nothing may use it any more. An empty kvf_mem_t is allowed. */
    void (*free)(kvf_mem_t *mem);
    /**
     * Copy bytes of this process into memory of the kind.
     *
     * @param off, bytes  A range of mem, checked by the caller; bytes > 0.
     * @param src         May be changed as soon as the call returns.
     * @param stream      The row's queue of work (a cudaStream_t): what is queued behind the call
     * sees the bytes. NULL = the row's default; host and shm copy at once.
     * @return KVF_OK, KVF_ERR_IO.
     */
    kvf_status_t (*write)(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                          void *stream, kvf_detail_t *detail);
    /**
     * Copy bytes of the kind into memory of this process; all that was written before counts.
     *
     * @param off, bytes  As for write.
     * @return KVF_OK, KVF_ERR_IO.
     */
    kvf_status_t (*read)(const kvf_mem_t *mem, uint64_t off, void *dst, uint64_t bytes,
                         kvf_detail_t *detail);
    /**
     * Overwrite pieces with zeros; all of it has happened on return.
     *
     * @param slots        n numbers of pieces, each of piece_bytes; inside mem, checked by the
     * caller.
     * @return KVF_OK, KVF_ERR_IO. @cost one wait for a device, whatever n is
     */
    kvf_status_t (*zero)(kvf_mem_t *mem, uint64_t piece_bytes, int64_t n, const int32_t *slots,
                         kvf_detail_t *detail);
} kvf_mem_kind_t;

#endif
