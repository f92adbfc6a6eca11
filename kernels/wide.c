/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/wide.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static uint64_t hash(const void *data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

static const kvf_wide_t portable = {.name = "portable", .hash = hash};

#ifdef KVF_WIDE_X86
extern const kvf_wide_t kvf_wide_sse2, kvf_wide_avx2, kvf_wide_avx512;
#endif

const kvf_wide_t *kvf_wide_at(size_t idx) {
#ifdef KVF_WIDE_X86
    if (__builtin_cpu_supports("avx512f") && idx-- == 0) {
        return &kvf_wide_avx512;
    }
    if (__builtin_cpu_supports("avx2") && idx-- == 0) {
        return &kvf_wide_avx2;
    }
    if (idx-- == 0) { /* every x86-64 has it */
        return &kvf_wide_sse2;
    }
#endif
    return idx == 0 ? &portable : NULL;
}
