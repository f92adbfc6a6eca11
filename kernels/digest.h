/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_DIGEST_H
#define KVF_KERNELS_DIGEST_H

/**
 * @file
 * The digest of a range of a page: XXH3-64 over the XXH3-64 values (little-endian) of its 4 KiB
 * leaves, the last of which may be shorter. Leaves can be hashed in parallel or in a copy's own
 * pass. Detects damage and misplacement, not forgery. Source: docs/protocol.md "Digest".
 */

#include <stddef.h>
#include <stdint.h>

#define KVF_DIGEST_LEAF_BYTES 4096U

/** @return The digest of bytes bytes (0 allowed). @thread any  @cost one pass, no allocation */
uint64_t kvf_digest(const void *data, uint64_t bytes);

#endif
