/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_SCATTER_H
#define KVF_TOOLS_BENCH_SCATTER_H

/**
 * @file
 * Where the blocks of a transfer lie in a pool, and what is in them. Both processes work it out for
 * themselves, from the same seed.
 */

#include <stdint.h>

/**
 * Choose slots in random order of which no two are adjacent.
 *
 * @param seed        The same one gives the same slots.
 * @param side        0 = source, 1 = destination: another order each.
 * @param n_slots     Of the pool.
 * @param[out] slots  n even numbers below n_slots, no two the same; n <= (n_slots + 1) / 2. Room
 *                    for (n_slots + 1) / 2: the rest is scratch.
 * @thread any  @cost O(n_slots)
 */
void kvf_scatter_slots(uint64_t seed, int side, int64_t n_slots, int64_t n, int32_t *slots);

/**
 * Fill a block with words that only this block of this repetition has.
 *
 * @param block  bytes bytes, a multiple of 8, aligned for 64-bit words.
 * @param rep    Of the repetition, so that what an earlier one left is told from what was to come.
 * @param index  Of the block in the transfer: the same at the source and at the destination.
 * @thread any
 */
void kvf_scatter_fill(void *block, uint64_t bytes, uint64_t rep, uint64_t index);

/** @return How many bytes of a block are not what kvf_scatter_fill() with these numbers puts there.
 * @thread any */
uint64_t kvf_scatter_wrong(const void *block, uint64_t bytes, uint64_t rep, uint64_t index);

/** Fill a block with what no kvf_scatter_fill() leaves. @thread any */
void kvf_scatter_poison(void *block, uint64_t bytes);

/** @return How many bytes of a block are not what kvf_scatter_poison() puts there. @thread any */
uint64_t kvf_scatter_touched(const void *block, uint64_t bytes);

#endif
