/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/synthetic.h"

#include <stdbool.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Tokens of a block whose keys are kept while its layers and heads are walked. */
#define TOKENS_AT_ONCE 128

/* The SplitMix64 generator: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
 * generators", OOPSLA 2014; variant 13 of the finalizer by D. Stafford. */
#define GAMMA UINT64_C(0x9e3779b97f4a7c15)

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* One wide multiplication a word, for words that start from a mixed key: the step of wyrand (Wang
 * Yi, wyhash); the constant is from the digits of pi. */
static inline uint64_t fold(uint64_t x) {
    unsigned __int128 product = (unsigned __int128)x * (x ^ UINT64_C(0x243f6a8885a308d3));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Which random bits a word of elements keeps, and which are set: all exponents become moderate. */
typedef struct shape {
    uint64_t keep;
    uint64_t set;
} shape_t;

static shape_t dtype_shape(kvf_dtype_t dtype) {
    switch (dtype) {
    case KVF_DTYPE_F32: /* sign, exponents 120..127, mantissa: 2^-7 <= |x| < 2 */
        return (shape_t){UINT64_C(0x83ffffff83ffffff), UINT64_C(0x3c0000003c000000)};
    case KVF_DTYPE_F16: /* exponents 12..15: 2^-3 <= |x| < 2 */
        return (shape_t){UINT64_C(0x8fff8fff8fff8fff), UINT64_C(0x3000300030003000)};
    case KVF_DTYPE_BF16: /* as f32 */
        return (shape_t){UINT64_C(0x83ff83ff83ff83ff), UINT64_C(0x3c003c003c003c00)};
    default: /* f8_e4m3, exponents 4..7: 2^-3 <= |x| < 2 */
        return (shape_t){UINT64_C(0x9f9f9f9f9f9f9f9f), UINT64_C(0x2020202020202020)};
    }
}

static uint64_t content_key(const kvf_content_t *content, int64_t piece) {
    if (content->ids != NULL) {
        return mix((uint64_t)content->ids[piece] + GAMMA);
    }
    return mix(mix(content->seed + GAMMA) + (uint64_t)piece);
}

static uint64_t token_key(const kvf_content_t *content, int64_t token) {
    return mix(content_key(content, token / KVF_PIECE_TOKENS) + (uint64_t)token * GAMMA);
}

/* A generated token is its number, wherever it comes from. The numbers of prompts' pieces are
 * rarely negative, so that theirs are other keys. */
static uint64_t generated_key(const kvf_content_t *content, int64_t prompt_tokens, int64_t token) {
    uint64_t number = (uint64_t)kvf_synthetic_token(content, prompt_tokens, token);
    return mix(mix(~number) + (uint64_t)token * GAMMA);
}

static uint64_t row_key(uint64_t token_key, uint32_t layer, uint32_t kv, uint32_t head) {
    return mix(token_key ^ ((uint64_t)layer << 33 | (uint64_t)kv << 32 | head));
}

uint64_t kvf_content_seed(const char *request_id) {
    return XXH3_64bits(request_id, strlen(request_id));
}

void kvf_content_from_tokens(const int32_t *tokens, int64_t n_tokens, int64_t *ids) {
    uint64_t chain = 0;
    for (int64_t at = 0; at < n_tokens; at += KVF_PIECE_TOKENS) {
        int64_t n = n_tokens - at < KVF_PIECE_TOKENS ? n_tokens - at : KVF_PIECE_TOKENS;
        chain = XXH3_64bits_withSeed(tokens + at, (size_t)n * sizeof(*tokens), chain);
        ids[at / KVF_PIECE_TOKENS] = (int64_t)(chain >> 11);
    }
}

int32_t kvf_synthetic_token(const kvf_content_t *content, int64_t prompt_tokens, int64_t position) {
    int64_t last_piece = (prompt_tokens - 1) / KVF_PIECE_TOKENS;
    return (int32_t)(mix(content_key(content, last_piece) ^ (uint64_t)position) >> 49);
}

static void fill_row(uint64_t key, shape_t shape, uint8_t *row, uint64_t bytes) {
    uint64_t i = 0;
    for (; i + 8 <= bytes; i += 8, key += GAMMA) {
        uint64_t word = (fold(key) & shape.keep) | shape.set;
        memcpy(row + i, &word, 8);
    }
    if (i < bytes) {
        uint64_t word = (fold(key) & shape.keep) | shape.set;
        memcpy(row + i, &word, bytes - i);
    }
}

/* Whether a row is as fill_row() makes it. No early exit: pages are right nearly always. */
static bool row_matches(uint64_t key, shape_t shape, const uint8_t *row, uint64_t bytes) {
    uint64_t wrong = 0, i = 0;
    for (; i + 8 <= bytes; i += 8, key += GAMMA) {
        uint64_t word;
        memcpy(&word, row + i, 8);
        wrong |= word ^ ((fold(key) & shape.keep) | shape.set);
    }
    if (i < bytes) {
        uint64_t word = (fold(key) & shape.keep) | shape.set;
        wrong |= memcmp(row + i, &word, bytes - i) != 0;
    }
    return wrong == 0;
}

static bool row_is_zero(const uint8_t *row, uint64_t bytes) {
    return bytes == 0 || (row[0] == 0 && memcmp(row, row + 1, bytes - 1) == 0);
}

/* One row that is wrong: count its bytes, and name its first element if it is the first of all. */
static uint64_t count_row(const uint8_t *row, const uint64_t *key, shape_t shape, uint64_t bytes,
                          uint32_t *first_byte_p) {
    uint64_t n = 0, word = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        if (i % 8 == 0 && key != NULL) {
            word = (fold(*key + i / 8 * GAMMA) & shape.keep) | shape.set;
        }
        if (row[i] != (uint8_t)(word >> (8 * (i % 8)))) {
            *first_byte_p = n++ == 0 ? (uint32_t)i : *first_byte_p;
        }
    }
    return n;
}

void kvf_synthetic_row(const kvf_layer_group_t *group, const kvf_content_t *content,
                       int64_t prompt_tokens, int64_t position, uint32_t layer, uint32_t kv,
                       uint32_t head, void *row) {
    uint64_t token = position < prompt_tokens ? token_key(content, position)
                                              : generated_key(content, prompt_tokens, position);
    fill_row(row_key(token, layer, kv, head), dtype_shape(group->dtype), row,
             (uint64_t)group->head_dim * kvf_dtype_bytes(group->dtype));
}

/* Walk the rows (head vectors) of a page: write them, or count what is wrong in them. */
typedef struct walk {
    const kvf_layer_group_t *group;
    const kvf_content_t *content;
    int64_t prompt_tokens;
    int64_t ordinal;
    uint64_t row_bytes;
    shape_t shape;
} walk_t;

static walk_t walk_start(const kvf_layer_group_t *group, const kvf_content_t *content,
                         int64_t prompt_tokens, int64_t ordinal) {
    return (walk_t){group,
                    content,
                    prompt_tokens,
                    ordinal,
                    (uint64_t)group->head_dim * kvf_dtype_bytes(group->dtype),
                    dtype_shape(group->dtype)};
}

/* Keys of the tokens [first, end) of the block. @return How many of them belong to the prompt. */
static uint32_t walk_keys(const walk_t *walk, uint32_t first, uint32_t end, uint64_t *keys) {
    int64_t base = walk->ordinal * walk->group->tokens_per_block;
    uint32_t n = 0;
    for (uint32_t t = first; t < end && base + t < walk->prompt_tokens; t++) {
        keys[n++] = token_key(walk->content, base + t);
    }
    return n;
}

static uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

void kvf_synthetic_fill_tokens(const kvf_layer_group_t *group, const kvf_content_t *content,
                               int64_t first_token, int64_t end_token, int64_t ordinal,
                               uint32_t first_idx, uint32_t end_idx, void *page) {
    walk_t walk = walk_start(group, content, end_token, ordinal);
    int64_t in_front = first_token - ordinal * group->tokens_per_block;
    uint32_t first = in_front < 0                         ? 0
                     : in_front < group->tokens_per_block ? (uint32_t)in_front
                                                          : group->tokens_per_block;
    uint64_t keys[TOKENS_AT_ONCE];
    for (uint32_t t0 = first; t0 < group->tokens_per_block; t0 += TOKENS_AT_ONCE) {
        uint32_t t1 = min_u32(t0 + TOKENS_AT_ONCE, group->tokens_per_block);
        uint32_t n = walk_keys(&walk, t0, t1, keys);
        for (uint32_t l = first_idx; l < end_idx; l++) {
            for (uint32_t at = 0; at < group->kv_factor * group->kv_heads; at++) {
                uint32_t kv = at / group->kv_heads, head = at % group->kv_heads;
                for (uint32_t t = t0; t < t1; t++) {
                    uint8_t *row = (uint8_t *)page + kvf_group_offset(group, l, kv, head, t);
                    if (t - t0 < n) {
                        fill_row(row_key(keys[t - t0], group->layers[l], kv, head), walk.shape, row,
                                 walk.row_bytes);
                    } else {
                        memset(row, 0, walk.row_bytes);
                    }
                }
            }
        }
    }
}

void kvf_synthetic_fill(const kvf_layer_group_t *group, const kvf_content_t *content,
                        int64_t prompt_tokens, int64_t ordinal, uint32_t first_idx,
                        uint32_t end_idx, void *page) {
    kvf_synthetic_fill_tokens(group, content, 0, prompt_tokens, ordinal, first_idx, end_idx, page);
}

/* Where the rows of one token are in its page. */
static void *token_row(const kvf_layer_group_t *group, uint32_t layer_idx, uint32_t at,
                       int64_t position, void *page) {
    uint32_t token = (uint32_t)(position % group->tokens_per_block);
    return (uint8_t *)page +
           kvf_group_offset(group, layer_idx, at / group->kv_heads, at % group->kv_heads, token);
}

void kvf_synthetic_append(const kvf_layer_group_t *group, const kvf_content_t *content,
                          int64_t prompt_tokens, int64_t position, void *page) {
    for (uint32_t l = 0; l < group->n_layers; l++) {
        for (uint32_t at = 0; at < group->kv_factor * group->kv_heads; at++) {
            kvf_synthetic_row(group, content, prompt_tokens, position, group->layers[l],
                              at / group->kv_heads, at % group->kv_heads,
                              token_row(group, l, at, position, page));
        }
    }
}

void kvf_synthetic_erase(const kvf_layer_group_t *group, int64_t position, void *page) {
    size_t row_bytes = (size_t)group->head_dim * kvf_dtype_bytes(group->dtype);
    for (uint32_t l = 0; l < group->n_layers; l++) {
        for (uint32_t at = 0; at < group->kv_factor * group->kv_heads; at++) {
            memset(token_row(group, l, at, position, page), 0, row_bytes);
        }
    }
}

uint64_t kvf_synthetic_check(const kvf_layer_group_t *group, const kvf_content_t *content,
                             int64_t prompt_tokens, int64_t ordinal, const void *page,
                             kvf_mismatch_t *first_p) {
    walk_t walk = walk_start(group, content, prompt_tokens, ordinal);
    uint64_t keys[TOKENS_AT_ONCE], n_wrong = 0, first_offset = UINT64_MAX;
    for (uint32_t t0 = 0; t0 < group->tokens_per_block; t0 += TOKENS_AT_ONCE) {
        uint32_t t1 = min_u32(t0 + TOKENS_AT_ONCE, group->tokens_per_block);
        uint32_t n = walk_keys(&walk, t0, t1, keys);
        for (uint32_t l = 0; l < group->n_layers; l++) {
            for (uint32_t at = 0; at < group->kv_factor * group->kv_heads; at++) {
                uint32_t kv = at / group->kv_heads, head = at % group->kv_heads;
                for (uint32_t t = t0; t < t1; t++) {
                    uint64_t offset = kvf_group_offset(group, l, kv, head, t);
                    const uint8_t *row = (const uint8_t *)page + offset;
                    bool live = t - t0 < n;
                    uint64_t key = live ? row_key(keys[t - t0], group->layers[l], kv, head) : 0;
                    if (live ? row_matches(key, walk.shape, row, walk.row_bytes)
                             : row_is_zero(row, walk.row_bytes)) {
                        continue;
                    }
                    uint32_t byte = 0;
                    n_wrong +=
                        count_row(row, live ? &key : NULL, walk.shape, walk.row_bytes, &byte);
                    if (offset < first_offset) {
                        first_offset = offset;
                        *first_p = (kvf_mismatch_t){ordinal,
                                                    group->layers[l],
                                                    kv,
                                                    head,
                                                    ordinal * group->tokens_per_block + t,
                                                    byte / kvf_dtype_bytes(group->dtype)};
                    }
                }
            }
        }
    }
    return n_wrong;
}
