/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/copy.h"

#include "kernels/digest.h"

#include <stdalign.h>
#include <stdbool.h>
#include <string.h>

#define LINE KVF_WIDE_LINE_BYTES

/* Shorter copies lose more by the fence and by lines that are stored in part than they gain, by
 * measurement (docs/benchmarks/copy.md). */
#define STREAM_MIN_BYTES 1024U

/* What lies in front of the first whole line of dst. */
static size_t head_of(const void *dst) {
    return (size_t)(-(uintptr_t)dst % LINE);
}

static bool streams(const kvf_wide_t *wide, uint64_t bytes) {
    return wide->stream != NULL && bytes >= STREAM_MIN_BYTES;
}

void kvf_copy_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes) {
    if (!streams(wide, bytes)) {
        memcpy(dst, src, bytes);
        return;
    }
    uint8_t *to = dst;
    const uint8_t *from = src;
    const size_t head = head_of(dst), tail = (size_t)((bytes - head) % LINE);
    const uint64_t lines = bytes - head - tail;
    memcpy(to, from, head);
    wide->stream(to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, tail);
    wide->fence();
}

typedef struct pass {
    const kvf_wide_t *wide;
    uint8_t *dst;
    const uint8_t *src;
    uint64_t bytes;
} pass_t;

/* Leave in keep what goes to dst. */
static void copy_keep(uint8_t *dst, uint8_t *keep, const uint8_t *src, size_t bytes) {
    memcpy(keep, src, bytes);
    /* Without it, a compiler might copy from src once more instead of from keep. */
    __asm__ volatile("" : : "r"(keep) : "memory");
    memcpy(dst, keep, bytes);
}

static uint64_t copy_leaf(void *ctx, uint64_t from, size_t leaf_bytes) {
    const pass_t *pass = ctx;
    alignas(LINE) uint8_t keep[KVF_DIGEST_LEAF_BYTES];
    uint8_t *dst = pass->dst + from;
    const uint8_t *src = pass->src + from;
    size_t head = leaf_bytes, lines = 0; /* without streaming, all is head */
    if (streams(pass->wide, pass->bytes) && leaf_bytes >= LINE) {
        head = head_of(dst);
        lines = (leaf_bytes - head) / LINE * LINE;
    }
    size_t tail = leaf_bytes - head - lines;
    copy_keep(dst, keep, src, head);
    if (lines > 0) {
        pass->wide->stream_keep(dst + head, keep + head, src + head, lines,
                                pass->bytes - from - leaf_bytes);
    }
    copy_keep(dst + head + lines, keep + head + lines, src + head + lines, tail);
    return pass->wide->hash(keep, leaf_bytes);
}

uint64_t kvf_copy_digest_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes) {
    pass_t pass = {wide, dst, src, bytes};
    uint64_t digest = kvf_digest_of_leaves(bytes, copy_leaf, &pass);
    if (streams(wide, bytes)) {
        wide->fence();
    }
    return digest;
}

void kvf_copy_leaves_by(const kvf_wide_t *wide, void *dst, const void *src, uint64_t bytes,
                        uint64_t *leaves) {
    pass_t pass = {wide, dst, src, bytes};
    for (uint64_t from = 0; from < bytes; from += KVF_DIGEST_LEAF_BYTES) {
        uint64_t left = bytes - from;
        *leaves++ = copy_leaf(&pass, from,
                              left < KVF_DIGEST_LEAF_BYTES ? (size_t)left : KVF_DIGEST_LEAF_BYTES);
    }
    if (streams(wide, bytes)) {
        wide->fence();
    }
}

void kvf_copy(void *dst, const void *src, uint64_t bytes) {
    kvf_copy_by(kvf_wide_at(0), dst, src, bytes);
}

uint64_t kvf_copy_digest(void *dst, const void *src, uint64_t bytes) {
    return kvf_copy_digest_by(kvf_wide_at(0), dst, src, bytes);
}

void kvf_copy_leaves(void *dst, const void *src, uint64_t bytes, uint64_t *leaves) {
    kvf_copy_leaves_by(kvf_wide_at(0), dst, src, bytes, leaves);
}

const char *kvf_copy_name(void) {
    return kvf_wide_at(0)->name;
}
