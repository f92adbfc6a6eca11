/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled once for each width of vectors, KVF_WIDE_BYTES. */
#include "kernels/wide.h"

#include <immintrin.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#if KVF_WIDE_BYTES == 64
#define ROW kvf_wide_avx512
#define NAME "avx512"
typedef __m512i vector_t;
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, vector) _mm512_storeu_si512(to, vector)
#define STREAM(to, vector) _mm512_stream_si512((void *)(to), vector)
#elif KVF_WIDE_BYTES == 32
#define ROW kvf_wide_avx2
#define NAME "avx2"
typedef __m256i vector_t;
#define LOAD(from) _mm256_loadu_si256((const void *)(from))
#define STORE(to, vector) _mm256_storeu_si256((void *)(to), vector)
#define STREAM(to, vector) _mm256_stream_si256((void *)(to), vector)
#else
#define ROW kvf_wide_sse2
#define NAME "sse2"
typedef __m128i vector_t;
#define LOAD(from) _mm_loadu_si128((const void *)(from))
#define STORE(to, vector) _mm_storeu_si128((void *)(to), vector)
#define STREAM(to, vector) _mm_stream_si128((void *)(to), vector)
#endif

/* How far to fetch ahead of a copy that hashes, by measurement (docs/benchmarks/copy.md): in the
 * loop, and before a leaf is hashed, while memory would have nothing to do. */
#define LOOP_AHEAD_BYTES 1024U
#define HASH_AHEAD_BYTES 2048U

extern const kvf_wide_t ROW;

static uint64_t hash(const void *data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

static void stream(uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += KVF_WIDE_LINE_BYTES) {
        for (size_t i = 0; i < KVF_WIDE_LINE_BYTES; i += sizeof(vector_t)) {
            STREAM(dst + at + i, LOAD(src + at + i));
        }
    }
}

static void stream_keep(uint8_t *dst, uint8_t *keep, const uint8_t *src, size_t bytes,
                        uint64_t ahead_bytes) {
    for (size_t at = 0; at < bytes; at += KVF_WIDE_LINE_BYTES) {
        if (ahead_bytes > 0) {
            _mm_prefetch((const char *)src + at + LOOP_AHEAD_BYTES, _MM_HINT_T0);
        }
        for (size_t i = 0; i < KVF_WIDE_LINE_BYTES; i += sizeof(vector_t)) {
            vector_t vector = LOAD(src + at + i);
            __asm__("" : "+v"(vector)); /* this value, and not a second look at src */
            STREAM(dst + at + i, vector);
            STORE(keep + at + i, vector);
        }
    }
    uint64_t fetch = ahead_bytes < HASH_AHEAD_BYTES ? ahead_bytes : HASH_AHEAD_BYTES;
    for (uint64_t at = 0; at < fetch; at += KVF_WIDE_LINE_BYTES) {
        _mm_prefetch((const char *)src + bytes + at, _MM_HINT_T0);
    }
}

static void fence(void) {
    _mm_sfence();
}

const kvf_wide_t ROW = {NAME, hash, stream, stream_keep, fence};
