/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_XXH3_BODY_H
#define KVF_KERNELS_XXH3_BODY_H

/**
 * @file
 * XXH3-64 with seed 0 and the default secret, as a body for the device: the CPU uses libxxhash,
 * whose value this is. Long inputs in such steps that several threads can share one: the sums of a
 * block do not depend on those before it. Pure functions; any alignment; little-endian machines.
 *
 * @source the XXH3 part of the xxHash specification (xxhash_spec.md); names are those there.
 */

#include "kernels/device.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVF_XXH3_STRIPE_BYTES 64U
#define KVF_XXH3_BLOCK_STRIPES 16U /**< stripes that a secret of 192 bytes is enough for */
#define KVF_XXH3_BLOCK_BYTES (KVF_XXH3_BLOCK_STRIPES * KVF_XXH3_STRIPE_BYTES)
#define KVF_XXH3_LANES 8U /**< accumulators */

#define KVF_PRIME32_1 UINT64_C(0x9E3779B1)
#define KVF_PRIME32_2 UINT64_C(0x85EBCA77)
#define KVF_PRIME32_3 UINT64_C(0xC2B2AE3D)
#define KVF_PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define KVF_PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define KVF_PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define KVF_PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define KVF_PRIME64_5 UINT64_C(0x27D4EB2F165667C5)

/* The default secret, little-endian. */
#define KVF_XXH3_SECRET                                                                            \
    {                                                                                              \
        UINT64_C(0xbe4ba423396cfeb8), UINT64_C(0x1cad21f72c81017c), UINT64_C(0xdb979083e96dd4de),  \
            UINT64_C(0x1f67b3b7a4a44072), UINT64_C(0x78e5c0cc4ee679cb),                            \
            UINT64_C(0x2172ffcc7dd05a82), UINT64_C(0x8e2443f7744608b8),                            \
            UINT64_C(0x4c263a81e69035e0), UINT64_C(0xcb00c391bb52283c),                            \
            UINT64_C(0xa32e531b8b65d088), UINT64_C(0x4ef90da297486471),                            \
            UINT64_C(0xd8acdea946ef1938), UINT64_C(0x3f349ce33f76faa8),                            \
            UINT64_C(0x1d4f0bc7c7bbdcf9), UINT64_C(0x3159b4cd4be0518a),                            \
            UINT64_C(0x647378d9c97e9fc8), UINT64_C(0xc3ebd33483acc5ea),                            \
            UINT64_C(0xeb6313faffa081c5), UINT64_C(0x49daf0b751dd0d17),                            \
            UINT64_C(0x9e68d429265516d3), UINT64_C(0xfca1477d58be162b),                            \
            UINT64_C(0xce31d07ad1b8f88f), UINT64_C(0x280416958f3acb45),                            \
            UINT64_C(0x7e404bbbcafbd7af),                                                          \
    }
static const uint64_t kvf_xxh3_secret[24] = KVF_XXH3_SECRET;
#ifdef __CUDACC__
static __constant__ uint64_t kvf_xxh3_device_secret[24] = KVF_XXH3_SECRET;
#endif

/** @return The 8 bytes of the secret from a byte offset on. */
static inline KVF_DEVICE uint64_t kvf_xxh3_key(size_t offset) {
#ifdef __CUDA_ARCH__
    const uint64_t *secret = kvf_xxh3_device_secret;
#else
    const uint64_t *secret = kvf_xxh3_secret;
#endif
    size_t word = offset / 8, shift = offset % 8 * 8;
    return shift == 0 ? secret[word] : secret[word] >> shift | secret[word + 1] << (64 - shift);
}

static inline KVF_DEVICE uint64_t kvf_xxh3_read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_swap64(uint64_t x) {
    x = (x & UINT64_C(0x00ff00ff00ff00ff)) << 8 | (x >> 8 & UINT64_C(0x00ff00ff00ff00ff));
    x = (x & UINT64_C(0x0000ffff0000ffff)) << 16 | (x >> 16 & UINT64_C(0x0000ffff0000ffff));
    return x << 32 | x >> 32;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_rotl(uint64_t x, unsigned bits) {
    return x << bits | x >> (64 - bits);
}

/** @return Both halves of a product of 128 bits, folded. */
static inline KVF_DEVICE uint64_t kvf_xxh3_fold(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
    return a * b ^ __umul64hi(a, b);
#else
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#endif
}

static inline KVF_DEVICE uint64_t kvf_xxh3_avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= UINT64_C(0x165667919E3779F9);
    return h ^ h >> 32;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_mix16(const uint8_t *at, size_t key) {
    return kvf_xxh3_fold(kvf_xxh3_read64(at) ^ kvf_xxh3_key(key),
                         kvf_xxh3_read64(at + 8) ^ kvf_xxh3_key(key + 8));
}

/* ---- long inputs: more than 240 bytes ---- */

/** @return The initial value of an accumulator. */
static inline KVF_DEVICE uint64_t kvf_xxh3_start(unsigned lane) {
    switch (lane) {
    case 0:
        return KVF_PRIME32_3;
    case 1:
        return KVF_PRIME64_1;
    case 2:
        return KVF_PRIME64_2;
    case 3:
        return KVF_PRIME64_3;
    case 4:
        return KVF_PRIME64_4;
    case 5:
        return KVF_PRIME32_2;
    case 6:
        return KVF_PRIME64_5;
    default:
        return KVF_PRIME32_1;
    }
}

/** Add 16 bytes of a stripe to two neighbouring accumulators, the first of which is an even one.
 * @param keys  The 16 bytes of the secret at the stripe's offset, plus theirs in the stripe. */
static inline KVF_DEVICE void kvf_xxh3_add(uint64_t sums[2], uint64_t low, uint64_t high,
                                           const uint64_t keys[2]) {
    uint64_t a = low ^ keys[0], b = high ^ keys[1];
    sums[0] += high + (a & 0xffffffffU) * (a >> 32);
    sums[1] += low + (b & 0xffffffffU) * (b >> 32);
}

/** The end of a block: scramble an accumulator. */
static inline KVF_DEVICE uint64_t kvf_xxh3_scramble(uint64_t acc, unsigned lane) {
    return (acc ^ acc >> 47 ^ kvf_xxh3_key(128 + (size_t)8 * lane)) * KVF_PRIME32_1;
}

/** @return The hash of an input of so many bytes from its accumulators. */
static inline KVF_DEVICE uint64_t kvf_xxh3_merge(const uint64_t acc[KVF_XXH3_LANES],
                                                 uint64_t bytes) {
    uint64_t h = bytes * KVF_PRIME64_1;
    for (size_t i = 0; i < 4; i++) {
        h += kvf_xxh3_fold(acc[2 * i] ^ kvf_xxh3_key(11 + 16 * i),
                           acc[2 * i + 1] ^ kvf_xxh3_key(19 + 16 * i));
    }
    return kvf_xxh3_avalanche(h);
}

/** Offset of the secret of the last 64 bytes of a long input. */
#define KVF_XXH3_LAST_KEY 121U

static inline KVF_DEVICE void kvf_xxh3_stripe(uint64_t acc[KVF_XXH3_LANES], const uint8_t *at,
                                              size_t key) {
    for (size_t lane = 0; lane < KVF_XXH3_LANES; lane += 2) {
        const uint64_t keys[2] = {kvf_xxh3_key(key + 8 * lane), kvf_xxh3_key(key + 8 * lane + 8)};
        kvf_xxh3_add(acc + lane, kvf_xxh3_read64(at + 8 * lane), kvf_xxh3_read64(at + 8 * lane + 8),
                     keys);
    }
}

static inline KVF_DEVICE uint64_t kvf_xxh3_long(const uint8_t *data, size_t bytes) {
    uint64_t acc[KVF_XXH3_LANES];
    for (unsigned lane = 0; lane < KVF_XXH3_LANES; lane++) {
        acc[lane] = kvf_xxh3_start(lane);
    }
    size_t n = (bytes - 1) / KVF_XXH3_STRIPE_BYTES;
    for (size_t i = 0; i < n; i++) {
        kvf_xxh3_stripe(acc, data + i * KVF_XXH3_STRIPE_BYTES, 8 * (i % KVF_XXH3_BLOCK_STRIPES));
        if ((i + 1) % KVF_XXH3_BLOCK_STRIPES == 0) {
            for (unsigned lane = 0; lane < KVF_XXH3_LANES; lane++) {
                acc[lane] = kvf_xxh3_scramble(acc[lane], lane);
            }
        }
    }
    kvf_xxh3_stripe(acc, data + bytes - KVF_XXH3_STRIPE_BYTES, KVF_XXH3_LAST_KEY);
    return kvf_xxh3_merge(acc, bytes);
}

/* ---- short ones ---- */

static inline KVF_DEVICE uint64_t kvf_xxh3_up_to_3(const uint8_t *data, size_t bytes) {
    uint64_t h = (uint64_t)data[0] << 16 | (uint64_t)data[bytes / 2] << 24 | data[bytes - 1] |
                 (uint64_t)bytes << 8;
    h ^= (kvf_xxh3_key(0) ^ kvf_xxh3_key(4)) & 0xffffffffU;
    h = (h ^ h >> 33) * KVF_PRIME64_2;
    h = (h ^ h >> 29) * KVF_PRIME64_3;
    return h ^ h >> 32;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_up_to_8(const uint8_t *data, size_t bytes) {
    const uint64_t prime = UINT64_C(0x9FB21C651E98DF25);
    uint64_t h = kvf_xxh3_read32(data + bytes - 4) + (kvf_xxh3_read32(data) << 32);
    h ^= kvf_xxh3_key(8) ^ kvf_xxh3_key(16);
    h ^= kvf_xxh3_rotl(h, 49) ^ kvf_xxh3_rotl(h, 24);
    h *= prime;
    h ^= (h >> 35) + bytes;
    h *= prime;
    return h ^ h >> 28;
}

static inline KVF_DEVICE uint64_t kvf_xxh3_up_to_16(const uint8_t *data, size_t bytes) {
    uint64_t low = kvf_xxh3_read64(data) ^ kvf_xxh3_key(24) ^ kvf_xxh3_key(32);
    uint64_t high = kvf_xxh3_read64(data + bytes - 8) ^ kvf_xxh3_key(40) ^ kvf_xxh3_key(48);
    return kvf_xxh3_avalanche(bytes + kvf_xxh3_swap64(low) + high + kvf_xxh3_fold(low, high));
}

static inline KVF_DEVICE uint64_t kvf_xxh3_up_to_128(const uint8_t *data, size_t bytes) {
    uint64_t h = bytes * KVF_PRIME64_1;
    for (size_t i = (bytes - 1) / 32 + 1; i-- > 0;) {
        h += kvf_xxh3_mix16(data + 16 * i, 32 * i);
        h += kvf_xxh3_mix16(data + bytes - 16 * (i + 1), 32 * i + 16);
    }
    return kvf_xxh3_avalanche(h);
}

static inline KVF_DEVICE uint64_t kvf_xxh3_up_to_240(const uint8_t *data, size_t bytes) {
    uint64_t h = bytes * KVF_PRIME64_1;
    for (size_t i = 0; i < 8; i++) {
        h += kvf_xxh3_mix16(data + 16 * i, 16 * i);
    }
    h = kvf_xxh3_avalanche(h);
    for (size_t i = 8; i < bytes / 16; i++) {
        h += kvf_xxh3_mix16(data + 16 * i, 16 * (i - 8) + 3);
    }
    return kvf_xxh3_avalanche(h + kvf_xxh3_mix16(data + bytes - 16, 119));
}

/** @param bytes  >= 1. @return The XXH3-64 of an input, by one thread. */
static inline KVF_DEVICE uint64_t kvf_xxh3(const uint8_t *data, size_t bytes) {
    return bytes > 240   ? kvf_xxh3_long(data, bytes)
           : bytes > 128 ? kvf_xxh3_up_to_240(data, bytes)
           : bytes > 16  ? kvf_xxh3_up_to_128(data, bytes)
           : bytes > 8   ? kvf_xxh3_up_to_16(data, bytes)
           : bytes > 3   ? kvf_xxh3_up_to_8(data, bytes)
                         : kvf_xxh3_up_to_3(data, bytes);
}

#endif
