/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Leaf values are folded in runs, so that no page needs an array of its own length. */
#define RUN 64U

uint64_t kvf_digest(const void *data, uint64_t bytes) {
    const uint8_t *at = data;
    XXH3_state_t top;
    XXH3_INITSTATE(&top);
    (void)XXH3_64bits_reset(&top);
    while (bytes > 0) {
        uint8_t leaves[RUN * 8];
        size_t used = 0;
        while (bytes > 0 && used < sizeof(leaves)) {
            size_t n = bytes < KVF_DIGEST_LEAF_BYTES ? (size_t)bytes : KVF_DIGEST_LEAF_BYTES;
            uint64_t leaf = XXH3_64bits(at, n);
            for (size_t i = 0; i < 8; i++) {
                leaves[used++] = (uint8_t)(leaf >> (8 * i));
            }
            at += n;
            bytes -= n;
        }
        (void)XXH3_64bits_update(&top, leaves, used);
    }
    return XXH3_64bits_digest(&top);
}
