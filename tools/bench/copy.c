/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/copy.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <immintrin.h>

static void copy_16(void *to, const void *from, uint64_t bytes) {
    __m128i *out = to;
    const __m128i *in = from;
    for (uint64_t i = 0; i < bytes / 16; i += 4) {
        __m128i a = _mm_load_si128(in + i), b = _mm_load_si128(in + i + 1);
        __m128i c = _mm_load_si128(in + i + 2), d = _mm_load_si128(in + i + 3);
        _mm_stream_si128(out + i, a);
        _mm_stream_si128(out + i + 1, b);
        _mm_stream_si128(out + i + 2, c);
        _mm_stream_si128(out + i + 3, d);
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) static void copy_32(void *to, const void *from, uint64_t bytes) {
    __m256i *out = to;
    const __m256i *in = from;
    for (uint64_t i = 0; i < bytes / 32; i += 2) {
        __m256i a = _mm256_load_si256(in + i), b = _mm256_load_si256(in + i + 1);
        _mm256_stream_si256(out + i, a);
        _mm256_stream_si256(out + i + 1, b);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void copy_64(void *to, const void *from, uint64_t bytes) {
    __m512i *out = to;
    const __m512i *in = from;
    for (uint64_t i = 0; i < bytes / 64; i++) {
        _mm512_stream_si512(out + i, _mm512_load_si512(in + i));
    }
    _mm_sfence();
}

kvf_bench_copy_t kvf_bench_nt_copy(void) {
    if (__builtin_cpu_supports("avx512f")) {
        return copy_64;
    }
    return __builtin_cpu_supports("avx2") ? copy_32 : copy_16;
}

#else

kvf_bench_copy_t kvf_bench_nt_copy(void) {
    return NULL;
}

#endif
