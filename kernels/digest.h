/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_DIGEST_H
#define KVF_KERNELS_DIGEST_H

/**
 * @file
 * The digest of a range of a page: XXH3-64 over the XXH3-64 values (little-endian) of its 4 KiB
 * leaves, the last of which may be shorter. Leaves can be hashed in parallel or in a copy's own
 * pass. Detects damage and misplacement, not forgery. Source: docs/protocol.md "Digest".
 */

#include "kernels/wide.h"

#include <stddef.h>
#include <stdint.h>

#define KVF_DIGEST_LEAF_BYTES 4096U

/** @return The digest of bytes bytes (0 allowed). @thread any  @cost one pass, no allocation */
uint64_t kvf_digest(const void *data, uint64_t bytes);

/** kvf_digest() by one row of the table, which gives the same value. */
uint64_t kvf_digest_by(const kvf_wide_t *wide, const void *data, uint64_t bytes);

/**
 * The XXH3-64 of one leaf, and whatever else the caller does with it.
 *
 * @param from        Where in the range the leaf begins.
 * @param leaf_bytes  1 to KVF_DIGEST_LEAF_BYTES.
 */
typedef uint64_t kvf_digest_leaf_fn(void *ctx, uint64_t from, size_t leaf_bytes);

/**
 * @param leaf  Called for each leaf of the range, in order.
 * @return The digest of a range whose leaves have the values that leaf returns.
 * @thread any  @cost no allocation, about 1 KiB of stack
 */
uint64_t kvf_digest_of_leaves(uint64_t bytes, kvf_digest_leaf_fn *leaf, void *ctx);

/** Hash the leaves of a range. @param[out] hashes  One of each, in order. @thread any  @cost one
 * pass, no allocation */
void kvf_digest_hashes(const void *data, uint64_t bytes, uint64_t *hashes);

/** @param hashes  Of the leaves of a range of bytes bytes, in order. @return The range's digest.
 * @thread any  @cost no allocation */
uint64_t kvf_digest_of_hashes(const uint64_t *hashes, uint64_t bytes);

#endif
