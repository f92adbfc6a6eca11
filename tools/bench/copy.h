/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_COPY_H
#define KVF_TOOLS_BENCH_COPY_H

/**
 * @file
 * Copies with stores that bypass the cache, as plain as can be: what the kernels of the library are
 * compared with, so they share nothing.
 */

#include <stdint.h>

/** Copies bytes, a multiple of 64, between places that are aligned to 64 and do not overlap. */
typedef void (*kvf_bench_copy_t)(void *to, const void *from, uint64_t bytes);

/**
 * @return The copy with the widest such stores that this machine has, or NULL when it has none. All
 * that it wrote is visible to others when it returns.
 * @thread any
 */
kvf_bench_copy_t kvf_bench_nt_copy(void);

#endif
