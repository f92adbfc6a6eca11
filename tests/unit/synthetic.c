/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/synthetic.h"
#include "tools/presets.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Small groups of every dtype and order, and one whose head vectors are no multiple of 8 bytes. */
static const kvf_layer_group_t groups[] = {
    {.name = "a",
     .n_layers = 3,
     .layers = {1, 4, 6},
     .tokens_per_block = 16,
     .kv_heads = 2,
     .head_dim = 12,
     .kv_factor = 2,
     .dtype = KVF_DTYPE_BF16,
     .order = KVF_ORDER_HND},
    {.name = "b",
     .n_layers = 3,
     .layers = {1, 4, 6},
     .tokens_per_block = 16,
     .kv_heads = 2,
     .head_dim = 12,
     .kv_factor = 2,
     .dtype = KVF_DTYPE_BF16,
     .order = KVF_ORDER_NHD},
    {.name = "c",
     .n_layers = 2,
     .layers = {0, 9},
     .tokens_per_block = 256,
     .kv_heads = 1,
     .head_dim = 6,
     .kv_factor = 1,
     .dtype = KVF_DTYPE_F32,
     .order = KVF_ORDER_HND},
    {.name = "d",
     .n_layers = 1,
     .layers = {3},
     .tokens_per_block = 32,
     .kv_heads = 3,
     .head_dim = 8,
     .kv_factor = 2,
     .dtype = KVF_DTYPE_F16,
     .order = KVF_ORDER_NHD},
    {.name = "e",
     .n_layers = 1,
     .layers = {2},
     .tokens_per_block = 32,
     .kv_heads = 3,
     .head_dim = 13,
     .kv_factor = 2,
     .dtype = KVF_DTYPE_F8_E4M3,
     .order = KVF_ORDER_HND},
};
#define N_GROUPS (sizeof(groups) / sizeof(groups[0]))

static const int64_t ids[] = {17, -5, 0, 4, INT64_MAX};
static const kvf_content_t content = {ids, 5, 0};
static kvf_mismatch_t first;

static uint64_t page_bytes(const kvf_layer_group_t *g) {
    return (uint64_t)g->n_layers * g->kv_factor * g->kv_heads * g->tokens_per_block * g->head_dim *
           kvf_dtype_bytes(g->dtype);
}

static uint8_t *new_page(const kvf_layer_group_t *g) {
    uint8_t *page = malloc(page_bytes(g));
    cr_assert_not_null(page);
    memset(page, 0xa5, page_bytes(g));
    return page;
}

static uint8_t *filled(const kvf_layer_group_t *g, const kvf_content_t *c, int64_t prompt,
                       int64_t ordinal) {
    uint8_t *page = new_page(g);
    kvf_synthetic_fill(g, c, prompt, ordinal, 0, g->n_layers, page);
    return page;
}

static uint64_t splitmix_finish(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Schoolbook multiplication in halves, to have the upper half without a 128-bit type. */
static uint64_t fold_reference(uint64_t a) {
    uint64_t b = a ^ 0x243f6a8885a308d3u;
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    uint64_t low = al * bl, m1 = ah * bl + (low >> 32), m2 = al * bh + (m1 & 0xffffffffu);
    return (a * b) ^ (ah * bh + (m1 >> 32) + (m2 >> 32));
}

/* One byte of one element by definition: no rows, no walking, no shared keys. */
static uint8_t expected_byte(const kvf_layer_group_t *g, const kvf_content_t *c, int64_t prompt,
                             int64_t token, uint32_t layer, uint32_t kv, uint32_t head,
                             uint64_t byte) {
    static const uint8_t keep[4][4] = {
        {0xff, 0xff, 0xff, 0x83}, {0xff, 0x8f}, {0xff, 0x83}, {0x9f}};
    static const uint8_t set[4][4] = {{0, 0, 0, 0x3c}, {0, 0x30}, {0, 0x3c}, {0x20}};
    if (token >= prompt) {
        return 0;
    }
    const uint64_t gamma = 0x9e3779b97f4a7c15u;
    uint64_t piece = (uint64_t)token / 512;
    uint64_t key = c->ids != NULL ? splitmix_finish((uint64_t)c->ids[piece] + gamma)
                                  : splitmix_finish(splitmix_finish(c->seed + gamma) + piece);
    key = splitmix_finish(key + (uint64_t)token * gamma);
    key = splitmix_finish(key ^ (((uint64_t)layer * 2 + kv) * 4294967296u + head));
    uint64_t word = fold_reference(key + byte / 8 * gamma);
    uint64_t in_element = byte % kvf_dtype_bytes(g->dtype);
    return (uint8_t)(((word >> (byte % 8 * 8)) & keep[g->dtype][in_element]) |
                     set[g->dtype][in_element]);
}

Test(synthetic, every_byte_is_the_one_of_the_definition) {
    static const kvf_content_t seeded = {NULL, 0, 99};
    for (size_t i = 0; i < 2 * N_GROUPS; i++) {
        const kvf_layer_group_t *g = &groups[i / 2];
        const kvf_content_t *c = i % 2 == 0 ? &content : &seeded;
        int64_t t = g->tokens_per_block, prompt = 2 * 512 + 5;
        for (int64_t ordinal = 1020 / t; ordinal <= prompt / t; ordinal++) {
            uint8_t *page = filled(g, c, prompt, ordinal), *at = page;
            uint64_t row = (uint64_t)g->head_dim * kvf_dtype_bytes(g->dtype);
            bool hnd = g->order == KVF_ORDER_HND;
            uint32_t outer = hnd ? g->kv_heads : (uint32_t)t,
                     inner = hnd ? (uint32_t)t : g->kv_heads;
            for (uint32_t l = 0; l < g->n_layers; l++) {
                for (uint32_t kv = 0; kv < g->kv_factor; kv++) {
                    for (uint32_t a = 0; a < outer; a++) {
                        for (uint32_t b = 0; b < inner; b++) {
                            int64_t token = ordinal * t + (hnd ? b : a);
                            for (uint64_t k = 0; k < row; k++) {
                                cr_assert_eq(*at++,
                                             expected_byte(g, c, prompt, token, g->layers[l], kv,
                                                           hnd ? a : b, k),
                                             "group %s token %d", g->name, (int)token);
                            }
                        }
                    }
                }
            }
            cr_assert_eq((uint64_t)(at - page), page_bytes(g));
            cr_assert_eq(kvf_synthetic_check(g, c, prompt, ordinal, page, &first), 0);
            free(page);
        }
    }
}

/* A generated token is its number and its position: no piece of the prompt. */
static void expected_generated(const kvf_layer_group_t *g, int32_t number, int64_t position,
                               uint32_t layer, uint32_t kv, uint32_t head, uint8_t *row) {
    /* The id of a piece whose key is that of the number. */
    const int64_t id = (int64_t)(~(uint64_t)number - 0x9e3779b97f4a7c15u);
    const int64_t same[] = {id, id, id, id, id};
    const kvf_content_t as_prompt = {same, 5, 0};
    for (uint64_t i = 0; i < (uint64_t)g->head_dim * kvf_dtype_bytes(g->dtype); i++) {
        row[i] = expected_byte(g, &as_prompt, position + 1, position, layer, kv, head, i);
    }
}

Test(synthetic, rows_are_those_of_pages) {
    for (size_t i = 0; i < N_GROUPS; i++) {
        const kvf_layer_group_t *g = &groups[i];
        int64_t t = g->tokens_per_block, prompt = 2 * 512 + 5;
        uint64_t bytes = (uint64_t)g->head_dim * kvf_dtype_bytes(g->dtype);
        uint8_t row[64];
        for (int64_t at = 1020; at < prompt; at++) {
            uint8_t *page = filled(g, &content, prompt, at / t);
            for (uint32_t k = 0; k < g->n_layers * g->kv_factor * g->kv_heads; k++) {
                uint32_t head = k % g->kv_heads, kv = k / g->kv_heads % g->kv_factor,
                         l = k / g->kv_heads / g->kv_factor;
                kvf_synthetic_row(g, &content, prompt, at, g->layers[l], kv, head, row);
                cr_assert_arr_eq(row, page + kvf_group_offset(g, l, kv, head, (uint32_t)(at % t)),
                                 bytes, "group %s token %d", g->name, (int)at);
            }
            free(page);
        }
    }
}

Test(synthetic, a_generated_token_comes_and_goes_alone) {
    for (size_t i = 0; i < N_GROUPS; i++) {
        const kvf_layer_group_t *g = &groups[i];
        int64_t t = g->tokens_per_block, prompt = 3 * t - 3, at = prompt + (int64_t)(i % 2);
        uint8_t *page = filled(g, &content, prompt, 2), *want = filled(g, &content, prompt, 2);
        int32_t number = kvf_synthetic_token(&content, prompt, at);
        kvf_synthetic_append(g, &content, prompt, at, page);
        for (uint32_t k = 0; k < g->n_layers * g->kv_factor * g->kv_heads; k++) {
            uint32_t head = k % g->kv_heads, kv = k / g->kv_heads % g->kv_factor,
                     l = k / g->kv_heads / g->kv_factor;
            expected_generated(g, number, at, g->layers[l], kv, head,
                               want + kvf_group_offset(g, l, kv, head, (uint32_t)(at % t)));
        }
        cr_assert_arr_eq(page, want, page_bytes(g), "group %s", g->name);
        cr_assert_gt(kvf_synthetic_check(g, &content, prompt, 2, page, &first), 0);
        cr_assert_eq(first.token, at);
        kvf_synthetic_erase(g, at, page);
        cr_assert_eq(kvf_synthetic_check(g, &content, prompt, 2, page, &first), 0);
        free(page);
        free(want);
    }
}

Test(synthetic, layer_ranges_add_up_to_the_page_and_touch_nothing_else) {
    const kvf_layer_group_t *g = &groups[1];
    uint8_t *whole = filled(g, &content, 20, 1), *parts = new_page(g);
    uint64_t layer = page_bytes(g) / g->n_layers;
    kvf_synthetic_fill(g, &content, 20, 1, 1, 2, parts);
    for (uint64_t i = 0; i < page_bytes(g); i++) {
        bool inside = i >= layer && i < 2 * layer;
        cr_assert_eq(parts[i], inside ? whole[i] : 0xa5);
    }
    kvf_synthetic_fill(g, &content, 20, 1, 0, 1, parts);
    kvf_synthetic_fill(g, &content, 20, 1, 2, 3, parts);
    cr_assert_eq(memcmp(whole, parts, page_bytes(g)), 0);
    free(whole);
    free(parts);
}

/* Every way of writing 40 tokens in two steps: a step leaves what is in front of it, and ends its
 * pages with zeros. */
Test(synthetic, tokens_can_be_written_in_steps) {
    for (size_t i = 0; i < N_GROUPS; i++) {
        const kvf_layer_group_t *g = &groups[i];
        int64_t t = g->tokens_per_block;
        for (int64_t middle = 0; middle <= 40; middle++) {
            for (int64_t ordinal = 0; ordinal * t < 40; ordinal++) {
                uint8_t *page = new_page(g);
                uint8_t *after_one = filled(g, &content, middle, ordinal);
                uint8_t *after_two = filled(g, &content, 40, ordinal);
                kvf_synthetic_fill_tokens(g, &content, 0, middle, ordinal, 0, g->n_layers, page);
                cr_assert_eq(memcmp(page, after_one, page_bytes(g)), 0);
                /* What is in front of a step is not written again. */
                uint64_t at = kvf_group_offset(g, 0, 0, 0, 0);
                bool in_front = middle > ordinal * t;
                page[at] ^= in_front ? 1 : 0;
                kvf_synthetic_fill_tokens(g, &content, middle, 40, ordinal, 0, g->n_layers, page);
                page[at] ^= in_front ? 1 : 0;
                cr_assert_eq(memcmp(page, after_two, page_bytes(g)), 0, "group %s, %d, block %d",
                             g->name, (int)middle, (int)ordinal);
                free(page);
                free(after_one);
                free(after_two);
            }
        }
    }
}

Test(synthetic, any_changed_byte_is_found_and_named) {
    for (size_t i = 0; i < N_GROUPS; i++) {
        const kvf_layer_group_t *g = &groups[i];
        int64_t t = g->tokens_per_block, prompt = 3 * t - 3;
        uint8_t *page = filled(g, &content, prompt, 2);
        uint64_t row = (uint64_t)g->head_dim * kvf_dtype_bytes(g->dtype);
        for (uint64_t byte = 0; byte < page_bytes(g); byte++) {
            page[byte] ^= 0x40;
            cr_assert_eq(kvf_synthetic_check(g, &content, prompt, 2, page, &first), 1);
            page[byte] ^= 0x40;
            /* Take the offset apart again, last dimension first. */
            uint64_t at = byte / row, d0, d1;
            bool hnd = g->order == KVF_ORDER_HND;
            d0 = hnd ? (uint64_t)t : g->kv_heads;
            d1 = hnd ? g->kv_heads : (uint64_t)t;
            uint64_t inner = at % d0, outer = at / d0 % d1, kv = at / d0 / d1 % g->kv_factor;
            cr_assert_eq(first.ordinal, 2);
            cr_assert_eq(first.dim, byte % row / kvf_dtype_bytes(g->dtype));
            cr_assert_eq(first.token, 2 * t + (int64_t)(hnd ? inner : outer));
            cr_assert_eq(first.head, hnd ? outer : inner);
            cr_assert_eq(first.kv, kv);
            cr_assert_eq(first.layer, g->layers[at / d0 / d1 / g->kv_factor]);
        }
        cr_assert_eq(kvf_synthetic_check(g, &content, prompt, 2, page, &first), 0);
        free(page);
    }
}

Test(synthetic, the_first_of_many_is_named_and_all_are_counted) {
    const kvf_layer_group_t *g = &groups[2]; /* 256 tokens: more than are walked at once */
    uint8_t *page = filled(g, &content, 600, 1);
    uint64_t row = 24, layer = page_bytes(g) / 2;
    page[layer + 3 * row] ^= 1;  /* second layer, token 256 + 3 */
    page[200 * row + 5] ^= 0x10; /* first layer, token 256 + 200 */
    page[200 * row + 23] ^= 1;
    page[layer + 250 * row] ^= 1;
    cr_assert_eq(kvf_synthetic_check(g, &content, 600, 1, page, &first), 4);
    cr_assert_eq(first.layer, 0);
    cr_assert_eq(first.token, 456);
    cr_assert_eq(first.dim, 1);
    free(page);
}

Test(synthetic, a_tail_of_equal_bytes_is_not_zero) {
    const kvf_layer_group_t *g = &groups[0];
    uint8_t *page = filled(g, &content, 20, 1);
    memset(page + 15 * 24, 0xff, 24); /* the last token of the first head */
    cr_assert_eq(kvf_synthetic_check(g, &content, 20, 1, page, &first), 24);
    cr_assert_eq(first.token, 31);
    cr_assert_eq(first.dim, 0);
    free(page);
}

/* How many aligned 8-byte words of two pages are equal. */
static uint64_t equal_words(const kvf_layer_group_t *g, const uint8_t *a, const uint8_t *b) {
    uint64_t n = 0;
    for (uint64_t i = 0; i + 8 <= page_bytes(g); i += 8) {
        n += memcmp(a + i, b + i, 8) == 0;
    }
    return n;
}

Test(synthetic, other_contents_positions_and_layers_differ_in_every_8_bytes) {
    kvf_layout_t layout;
    cr_assert_eq(kvf_preset_get("gemma-3-270m", 32, &layout, NULL), KVF_OK);
    for (uint32_t i = 0; i < layout.n_groups; i++) {
        const kvf_layer_group_t *g = &layout.groups[i];
        static const int64_t other_ids[] = {17, -5, 1, 4, 0};
        kvf_content_t other = {other_ids, 5, 0};
        uint8_t *page = filled(g, &content, 2560, 2 * 16);
        uint8_t *of_other = filled(g, &other, 2560, 2 * 16);
        uint8_t *shifted = filled(g, &content, 2560, 2 * 16 + 1);
        uint8_t *same = filled(g, &other, 2560, 16);
        uint8_t *same_again = filled(g, &content, 1024, 16);
        cr_assert_eq(equal_words(g, page, of_other), 0);
        cr_assert_eq(equal_words(g, page, shifted), 0);
        cr_assert_eq(memcmp(same, same_again, page_bytes(g)), 0, "one content, two requests");
        cr_assert_gt(kvf_synthetic_check(g, &content, 2560, 33, page, &first), page_bytes(g) / 2);
        /* Layers, k and v, tokens: no two rows of a page share their words. */
        uint64_t row = (uint64_t)g->head_dim * 2;
        for (uint64_t a = row; a + row <= page_bytes(g); a += row) {
            for (uint64_t w = 0; w < row; w += 8) {
                cr_assert_neq(memcmp(page + a + w, page + a - row + w, 8), 0);
            }
        }
        free(page);
        free(of_other);
        free(shifted);
        free(same);
        free(same_again);
    }
}

Test(synthetic, bf16_values_are_finite_and_moderate) {
    const kvf_layer_group_t *g = &groups[0];
    uint8_t *page = filled(g, &content, 512, 3);
    unsigned negative = 0, n = (unsigned)(page_bytes(g) / 2);
    for (unsigned i = 0; i < n; i++) {
        uint16_t half;
        float value;
        memcpy(&half, page + 2 * i, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
        cr_assert(fabsf(value) >= 1.0F / 128 && fabsf(value) < 2.0F, "%g", (double)value);
        negative += value < 0;
    }
    cr_assert(negative > n / 3 && negative < n - n / 3);
    free(page);
}

Test(synthetic, ids_from_tokens_are_chained_by_prefix) {
    int32_t tokens[1300], other[1300];
    int64_t a[3], b[3], c[3];
    for (int i = 0; i < 1300; i++) {
        tokens[i] = other[i] = i * 7;
    }
    other[600]++;
    kvf_content_from_tokens(tokens, 1300, a);
    kvf_content_from_tokens(other, 1300, b);
    cr_assert_eq(a[0], b[0]);
    cr_assert_neq(a[1], b[1]);
    cr_assert_neq(a[2], b[2], "the third piece holds the same tokens after another prefix");
    kvf_content_from_tokens(tokens, 1024, c);
    cr_assert_eq(a[0], c[0]);
    cr_assert_eq(a[1], c[1]);
    for (int i = 0; i < 3; i++) {
        cr_assert(a[i] >= 0 && a[i] < (INT64_C(1) << 53));
    }
}

Test(synthetic, tokens_and_seeds_follow_the_content) {
    kvf_content_t a = {NULL, 0, kvf_content_seed("req-1")},
                  b = {NULL, 0, kvf_content_seed("req-2")};
    cr_assert_neq(a.seed, b.seed);
    unsigned same = 0;
    for (int64_t p = 1000; p < 1100; p++) {
        int32_t token = kvf_synthetic_token(&a, 1000, p);
        cr_assert(token >= 0 && token < 32768);
        cr_assert_eq(token, kvf_synthetic_token(&a, 1000, p));
        same += token == kvf_synthetic_token(&b, 1000, p);
    }
    cr_assert_lt(same, 5);
}
