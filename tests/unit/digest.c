/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/digest.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/*
 * Digests of the first bytes of the splitmix64 sequence that starts at state 0 (little-endian), as
 * Python computes them with hashes of Debian's libxxhash 0.8.1.
 */
static const struct {
    uint64_t bytes, digest;
} known[] = {
    {0, UINT64_C(0x2d06800538d394c2)},       {1, UINT64_C(0x026730384ff8348c)},
    {3, UINT64_C(0x98d938a0d3d3a8bc)},       {4, UINT64_C(0x34ed9a57e603d240)},
    {8, UINT64_C(0x5a21535921a1a53f)},       {9, UINT64_C(0x78c27a515cd1731e)},
    {16, UINT64_C(0x2deb29650be7f6fd)},      {17, UINT64_C(0x43be0c7a0d0d0e44)},
    {128, UINT64_C(0x60eb2ec46baac4bc)},     {129, UINT64_C(0x784dc8d817ed62fe)},
    {240, UINT64_C(0xc3f97859e1c0c6c0)},     {241, UINT64_C(0x7ef82f444ab1d98f)},
    {1024, UINT64_C(0xf5e4cd4efebe96d3)},    {1025, UINT64_C(0x71adeaf8070d8031)},
    {4095, UINT64_C(0x872c5ed81b419e9b)},    {4096, UINT64_C(0x8e630335fb7478de)},
    {4097, UINT64_C(0x3093c34a9bc08319)},    {8192, UINT64_C(0x3b44cd73eea982ef)},
    {12345, UINT64_C(0x1406236c5280bcda)},   {262143, UINT64_C(0xc965b4e719cf3b92)},
    {262144, UINT64_C(0x11069044c248e07c)},  {262145, UINT64_C(0x4aef012364711822)},
    {524288, UINT64_C(0xce654e6ccec33453)},  {1048576, UINT64_C(0x26207436e6d1cde8)},
    {1053575, UINT64_C(0x3b27fc1ceba1ff70)},
};
#define N_KNOWN (sizeof(known) / sizeof(known[0]))
#define MAX_BYTES (known[N_KNOWN - 1].bytes)

static uint8_t *data_new(void) {
    uint8_t *data = malloc(MAX_BYTES + 8);
    cr_assert_not_null(data);
    uint64_t state = 0;
    for (uint64_t at = 0; at < MAX_BYTES; at += 8) {
        uint64_t z = (state += UINT64_C(0x9e3779b97f4a7c15));
        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        for (unsigned i = 0; i < 8; i++) {
            data[at + i] = (uint8_t)(z >> (8 * i));
        }
    }
    return data;
}

Test(digest, known_values_by_every_kernel) {
    uint8_t *data = data_new();
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        for (size_t i = 0; i < N_KNOWN; i++) {
            cr_assert_eq(kvf_digest_by(wide, data, known[i].bytes), known[i].digest,
                         "%s, %zu bytes", wide->name, (size_t)known[i].bytes);
        }
    }
    for (size_t i = 0; i < N_KNOWN; i++) {
        cr_assert_eq(kvf_digest(data, known[i].bytes), known[i].digest);
    }
    free(data);
}

/* By the library's hash, over an array of all leaves. */
static uint64_t expected(const uint8_t *data, size_t bytes) {
    uint8_t values[8 * 8];
    size_t n = 0;
    for (size_t at = 0; at < bytes; at += 4096, n += 8) {
        cr_assert_lt(n, sizeof(values));
        uint64_t leaf = XXH3_64bits(data + at, bytes - at < 4096 ? bytes - at : 4096);
        for (size_t i = 0; i < 8; i++) {
            values[n + i] = (uint8_t)(leaf >> (8 * i));
        }
    }
    return XXH3_64bits(values, n);
}

Test(digest, every_length_at_every_alignment) {
    uint8_t *data = data_new();
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        for (size_t bytes = 0; bytes < 2 * 4096 + 300; bytes += bytes < 600 ? 1 : 61) {
            for (size_t at = 0; at < 64; at++) {
                cr_assert_eq(kvf_digest_by(wide, data + at, bytes), expected(data + at, bytes),
                             "%s, %zu bytes at %zu", wide->name, bytes, at);
            }
        }
    }
    free(data);
}

typedef struct asked {
    uint64_t next, total;
} asked_t;

static uint64_t leaf_value(void *ctx, uint64_t from, size_t leaf_bytes) {
    asked_t *asked = ctx;
    cr_assert_eq(from, asked->next);
    cr_assert_eq(leaf_bytes, asked->total - from < 4096 ? asked->total - from : 4096);
    asked->next += leaf_bytes;
    return from * 3 + leaf_bytes;
}

/* One run of leaves, more than one, and a last one of any length. */
Test(digest, leaves_are_asked_for_once_and_in_order) {
    static const uint64_t totals[] = {
        0, 1, 4096, 4097, 64 * 4096, 64 * 4096 + 1, 65 * 4096, 128 * 4096, 129 * 4096 - 1};
    for (size_t t = 0; t < sizeof(totals) / sizeof(totals[0]); t++) {
        uint8_t values[129 * 8];
        size_t n = 0;
        for (uint64_t from = 0; from < totals[t]; from += 4096) {
            uint64_t left = totals[t] - from, value = from * 3 + (left < 4096 ? left : 4096);
            for (size_t i = 0; i < 8; i++) {
                values[n++] = (uint8_t)(value >> (8 * i));
            }
        }
        asked_t asked = {0, totals[t]};
        cr_assert_eq(kvf_digest_of_leaves(totals[t], leaf_value, &asked), XXH3_64bits(values, n));
        cr_assert_eq(asked.next, totals[t]);
    }
}
