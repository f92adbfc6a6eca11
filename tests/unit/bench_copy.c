/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/copy.h"

#include <criterion/criterion.h>
#include <stdalign.h>

#define BYTES 1024

Test(bench_copy, every_length_and_nothing_beside_it) {
    static alignas(64) uint8_t from[BYTES], to[BYTES];
    kvf_bench_copy_t copy = kvf_bench_nt_copy();
    if (copy == NULL) {
        cr_skip_test("no stores that bypass the cache on this machine");
    }
    for (int i = 0; i < BYTES; i++) {
        from[i] = (uint8_t)(i * 7 + i / 256);
    }
    for (int begin = 0; begin < BYTES; begin += 64) {
        for (int end = begin; end <= BYTES; end += 64) {
            for (int i = 0; i < BYTES; i++) {
                to[i] = 0xaa;
            }
            copy(to + begin, from + begin, (uint64_t)(end - begin));
            for (int i = 0; i < BYTES; i++) {
                uint8_t expected = i >= begin && i < end ? from[i] : 0xaa;
                cr_assert_eq(to[i], expected, "[%d, %d): byte %d", begin, end, i);
            }
        }
    }
}
