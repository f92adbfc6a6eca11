/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_OPTIONS_H
#define KVF_TOOLS_BENCH_OPTIONS_H

/**
 * @file
 * What `kvferry bench` measures: the options, and the layout that has blocks of any size.
 */

#include "kvmgr/layout.h"

#include <stdbool.h>
#include <stdint.h>

/** Whose time: from where to where. */
typedef enum kvf_bench_measure {
    KVF_BENCH_REQUEST, /**< from kvf_recv_open() to the verified result */
    KVF_BENCH_PUT,     /**< from kvf_send_ready() for a receiver that waits, to its result */
    KVF_BENCH_EXPOSED  /**< the same for the last layer, the others having left as they were made */
} kvf_bench_measure_t;

/** What is measured instead of kvferry: what the machine can do at best. */
typedef enum kvf_bench_reference {
    KVF_BENCH_NONE,
    KVF_BENCH_MEMCPY, /**< memcpy from block to block in one process */
    KVF_BENCH_NT,     /**< the same with stores that bypass the cache */
    KVF_BENCH_SOCKET, /**< a TCP connection over loopback, from blocks into blocks */
    KVF_BENCH_WAKEUP  /**< a sleeping thread is woken by another; no bytes */
} kvf_bench_reference_t;

typedef struct kvf_bench_options {
    const char *mover;        /**< auto | mapped | ucx; the agent knows which it has */
    const char *tls;          /**< UCX transports, or auto */
    const char *memory;       /**< host | shm | cuda */
    const char *device_alloc; /**< malloc | vmm; NULL: memory is not cuda, or it was not said */
    kvf_bench_measure_t measure;
    kvf_bench_reference_t reference;
    bool digest;
    bool pull;
    bool caller; /**< the receiver's caller drives its agent, and looks on instead of sleeping */
    bool json;
    uint64_t block_bytes;
    uint64_t blocks;
    uint64_t pool_bytes;
    uint64_t layers; /**< of a block; 0: what kvf_bench_layout() chooses */
    uint64_t reps;
    uint64_t warmup;
    uint64_t threads;      /**< 0: the library's choice; of a reference at least 1 */
    uint64_t busy_poll_us; /**< of both ends */
    uint64_t seed;
} kvf_bench_options_t;

/**
 * Read a size: bytes, or a whole number with KiB, MiB or GiB.
 *
 * @param[out] bytes_p  The size.
 * @return KVF_OK, or KVF_ERR_INVALID (no such text; above 2^63 - 1).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_bench_parse_size(const char *text, uint64_t *bytes_p);

/**
 * Make one layer group whose blocks have that many bytes.
 *
 * @param block_bytes    A multiple of 64 (a head vector).
 * @param layers         0: the largest power of two up to 16 that goes; others must divide the
 *                       vectors of a block.
 * @param[out] layout_p  Passes kvf_layout_check(). Untouched on error.
 * @return KVF_OK, or KVF_ERR_INVALID (the text names the number).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_bench_layout(uint64_t block_bytes, uint64_t layers,
                                        kvf_layout_t *layout_p, kvf_detail_t *detail);

/** @return The kind of memory that goes with a list of UCX transports: "shm" when it has a shared
 * one or is auto, else "host". @thread any */
const char *kvf_bench_memory(const char *mover, const char *tls);

/**
 * Check that the numbers go together.
 *
 * @return KVF_OK, or KVF_ERR_INVALID (the text names the option and what it may be).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_bench_check(const kvf_bench_options_t *options, kvf_detail_t *detail);

/** @return "request" | "put" | "exposed". @thread any */
const char *kvf_bench_measure_name(kvf_bench_measure_t measure);

/** @return "none" | "memcpy" | "nt" | "socket" | "wakeup". @thread any */
const char *kvf_bench_reference_name(kvf_bench_reference_t reference);

#endif
