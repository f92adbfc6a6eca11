/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NEAREST_H
#define KVF_TOOLS_NEAREST_H

/**
 * @file
 * How near a name that somebody typed is to one that exists.
 */

#include <stddef.h>

/** Longer texts count up to that many bytes. */
#define KVF_NEAREST_BYTES 63

/**
 * Levenshtein's distance: bytes to insert, delete or replace to make one text of the other.
 *
 * @return 0 .. KVF_NEAREST_BYTES.
 * @thread any      @cost O(length of a times length of b), no allocation
 */
size_t kvf_nearest_distance(const char *a, const char *b);

#endif
