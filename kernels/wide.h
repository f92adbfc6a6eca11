/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_WIDE_H
#define KVF_KERNELS_WIDE_H

/**
 * @file
 * The loops of digest.h and copy.h, once per width of a CPU's vectors. What runs is chosen when it
 * is called, by what this CPU has. All give the same bytes and the same digests.
 */

#include <stddef.h>
#include <stdint.h>

/** What dst is aligned to, and lengths are multiples of, in the loops that stream. */
#define KVF_WIDE_LINE_BYTES 64U

/** One row of the table. Its functions may be called by any thread and allocate nothing. */
typedef struct kvf_wide {
    const char *name;

    /** The XXH3-64 of bytes bytes. */
    uint64_t (*hash)(const void *data, size_t bytes);

    /**
     * Copy whole lines past the caches. Nobody else may see them before fence(). NULL: this row
     * has nothing that is better than memcpy().
     *
     * @param dst    Aligned to a line; src need not be.
     * @param bytes  A multiple of a line.
     */
    void (*stream)(uint8_t *dst, const uint8_t *src, uint64_t bytes);

    /**
     * The same, and leave in keep what went to dst: each byte of src is read once, into a register
     * that is stored twice.
     *
     * @param keep    Any alignment; short enough for the first cache.
     * @param ahead_bytes  Of src behind bytes that will be copied next, and are fetched already.
     */
    void (*stream_keep)(uint8_t *dst, uint8_t *keep, const uint8_t *src, size_t bytes,
                        uint64_t ahead_bytes);

    /** Let streamed bytes be seen before whatever this thread stores from here on. */
    void (*fence)(void);
} kvf_wide_t;

/**
 * @return The idx-th row that this CPU can run, widest first; NULL behind the last one, which runs
 *         everywhere. Static.
 * @thread any  @cost a few loads
 */
const kvf_wide_t *kvf_wide_at(size_t idx);

#endif
