/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_COPY_H
#define KVF_KERNELS_COPY_H

/**
 * @file
 * Copies of blocks between mapped pools, alone or with their digest in the same pass. What is
 * copied will be read by somebody else, later: longer blocks go past the caches, by the widest
 * vectors that this CPU has. docs/benchmarks/copy.md has figures.
 */

#include "kernels/wide.h"

#include <stdint.h>

/**
 * Copy bytes that do not overlap, of any length and alignment.
 *
 * What this thread stores after the call with release semantics publishes the copy, as it does
 * after memcpy().
 *
 * @param src  May change meanwhile; then each byte of dst is one that src had during the call.
 * @thread any  @cost one pass, no allocation
 */
void kvf_copy(void *dst, const void *src, uint64_t bytes);

/**
 * The same, and digest what was stored.
 *
 * src is read once. Each byte of it goes through a register or a private buffer to both dst and
 * the hash, so that the digest is that of the bytes which this call stored, also while another
 * process changes src, and whatever anybody does to dst. (Hashing dst after a plain copy promises
 * less: it is the digest of what dst holds by then. Hashing src promises nothing.)
 *
 * @return kvf_digest() of the stored bytes, which is that of src if src did not change.
 * @thread any  @cost one pass, no allocation, 5 KiB of stack
 */
uint64_t kvf_copy_digest(void *dst, const void *src, uint64_t bytes);

/**
 * The same, for a range that comes in parts: hash its leaves, so that their digest can be made when
 * all parts are there.
 *
 * @param bytes   A multiple of KVF_DIGEST_LEAF_BYTES, unless dst ends the range.
 * @param leaves  Gets the hash of each leaf: for kvf_digest_of_hashes().
 * @thread any  @cost one pass, no allocation, 4 KiB of stack
 */
void kvf_copy_leaves(void *dst, const void *src, uint64_t bytes, uint64_t *leaves);

/** @return What copies and hashes on this CPU, such as "avx2"; static. @thread any */
const char *kvf_copy_name(void);

/** kvf_copy() by one row of the table. */
void kvf_copy_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes);

/** kvf_copy_leaves() by one row of the table. */
void kvf_copy_leaves_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes,
                        uint64_t *leaves);

/** kvf_copy_digest() by one row of the table. */
uint64_t kvf_copy_digest_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes);

#endif
