/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_ALLOC_H
#define KVF_BASE_ALLOC_H

/**
 * @file
 * The allocator table. Everything in kvferry allocates through one that it was given, so that a
 * test can make the N-th allocation fail, for all N.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** An allocator: one function, like realloc, where size 0 frees. */
typedef struct kvf_alloc {
    /**
     * @param ctx   The table's ctx.
     * @param ptr   NULL, or memory of this allocator.
     * @param size  New size in bytes; 0 frees ptr and returns NULL.
     * @return Memory aligned for any type, or NULL when there is none (ptr stays as it was).
     */
    void *(*resize)(void *ctx, void *ptr, size_t size);
    void *ctx; /**< borrowed; lives as long as everything allocated from it */
} kvf_alloc_t;

/** The C library's allocator. Static storage; any thread. */
const kvf_alloc_t *kvf_alloc_default(void);

/** @return size bytes, not cleared; NULL without memory or for size 0. @thread the table's */
void *kvf_alloc(const kvf_alloc_t *alloc, size_t size);

/** @return n * size zeroed bytes; NULL without memory, on overflow or for no bytes. @thread the
 * table's */
void *kvf_calloc(const kvf_alloc_t *alloc, size_t n, size_t size);

/**
 * Change the length of an array.
 *
 * @return The array with room for n elements of size bytes (new ones not cleared), or NULL without
 * memory, on overflow or for no bytes; then ptr stays valid.
 * @thread the table's
 */
void *kvf_realloc(const kvf_alloc_t *alloc, void *ptr, size_t n, size_t size);

/** Free memory of this table; NULL is allowed. @thread the table's */
void kvf_free(const kvf_alloc_t *alloc, const void *ptr);

/** @return A copy of a string of the table's memory, or NULL without memory. @thread the table's */
char *kvf_strdup(const kvf_alloc_t *alloc, const char *text);

/** An allocator that fails on purpose, and counts. Caller's memory; one thread. */
typedef struct kvf_alloc_fail {
    kvf_alloc_t table; /**< hand &table out */
    uint64_t calls;    /**< allocations asked for so far (frees do not count) */
    uint64_t fail_at;  /**< the allocation (1 is the first) that returns NULL; 0 = none */
    bool fail_from;    /**< also fail all later ones */
    uint64_t live;     /**< allocations not yet freed */
} kvf_alloc_fail_t;

/**
 * @param[out] fail  Becomes an allocator over the C library whose fail_at-th allocation fails.
 * @param fail_at    1 is the first; 0 never fails (to count with).
 * @thread any
 */
void kvf_alloc_fail_init(kvf_alloc_fail_t *fail, uint64_t fail_at);

#endif
