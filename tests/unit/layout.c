/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/layout.h"

#include <criterion/criterion.h>
#include <string.h>

/* Two groups: five sliding layers to one global, as many models have. */
static kvf_layout_t sample(void) {
    kvf_layout_t layout = {.n_groups = 2,
                           .groups = {
                               {.name = "full",
                                .n_layers = 2,
                                .layers = {5, 11},
                                .tokens_per_block = 16,
                                .kv_heads = 4,
                                .head_dim = 128,
                                .kv_factor = 2,
                                .dtype = KVF_DTYPE_BF16},
                               {.name = "swa",
                                .n_layers = 4,
                                .layers = {0, 1, 2, 10},
                                .window = 512,
                                .sinks = 4,
                                .tokens_per_block = 32,
                                .kv_heads = 2,
                                .head_dim = 64,
                                .kv_factor = 2,
                                .dtype = KVF_DTYPE_F8_E4M3,
                                .order = KVF_ORDER_NHD,
                                .role = KVF_GROUP_DRAFT},
                           }};
    return layout;
}

Test(layout, dtypes) {
    static const struct {
        kvf_dtype_t dtype;
        uint32_t bytes;
        const char *name;
    } want[] = {{KVF_DTYPE_F32, 4, "f32"},
                {KVF_DTYPE_F16, 2, "f16"},
                {KVF_DTYPE_BF16, 2, "bf16"},
                {KVF_DTYPE_F8_E4M3, 1, "f8_e4m3"}};
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(kvf_dtype_bytes(want[i].dtype), want[i].bytes);
        cr_assert_str_eq(kvf_dtype_name(want[i].dtype), want[i].name);
    }
}

/* Change one thing of the sample's second group (or of the layout); the text must hold the word. */
#define BROKEN(X)                                                                                  \
    X(l->n_groups = 0, "0 groups", INVALID)                                                        \
    X(l->n_groups = KVF_MAX_GROUPS + 1, "17 groups", INVALID)                                      \
    X(g->name[0] = '\0', "name", INVALID)                                                          \
    X(memset(g->name, 'x', sizeof(g->name)), "name", INVALID)                                      \
    X(g->name[1] = '\n', "name", INVALID)                                                          \
    X(g->name[1] = ' ', "name", INVALID)                                                           \
    X(g->name[1] = (char)0xc3, "name", INVALID)                                                    \
    X(strcpy(g->name, "full"), "full", INVALID)                                                    \
    X(g->n_layers = 0, "n_layers", INVALID)                                                        \
    X(g->n_layers = KVF_MAX_GROUP_LAYERS + 1, "n_layers", INVALID)                                 \
    X(g->layers[2] = 1, "ascending", INVALID)                                                      \
    X(g->layers[2] = 0, "ascending", INVALID)                                                      \
    X(g->layers[3] = 11, "layer 11", INVALID)                                                      \
    X(g->layers[2] = 5, "layer 5", INVALID)                                                        \
    X(g->window = -1, "window", INVALID)                                                           \
    X(g->window = (INT64_C(1) << 40) + 1, "window", INVALID)                                       \
    X(g->sinks = -1, "sinks", INVALID)                                                             \
    X(g->sinks = INT64_MAX, "sinks", INVALID)                                                      \
    X(g->tokens_per_block = 0, "tokens_per_block", INVALID)                                        \
    X(g->kv_heads = 0, "kv_heads", INVALID)                                                        \
    X(g->head_dim = 0, "head_dim", INVALID)                                                        \
    X(g->kv_factor = 0, "kv_factor", INVALID)                                                      \
    X(g->kv_factor = 3, "kv_factor", INVALID)                                                      \
    X(g->dtype = (kvf_dtype_t)4, "dtype", INVALID)                                                 \
    X(g->order = (kvf_order_t)2, "order", INVALID)                                                 \
    X(g->kind = (kvf_group_kind_t)2, "kind", INVALID)                                              \
    X(g->role = (kvf_group_role_t)2, "role", INVALID)                                              \
    X(g->tokens_per_block = g->kv_heads = UINT32_MAX, "larger", INVALID)                           \
    X(g->kind = KVF_GROUP_STATE, "state", UNSUPPORTED)

Test(layout, check_names_group_and_field) {
    kvf_layout_t good = sample();
    cr_assert_eq(kvf_layout_check(&good, NULL), KVF_OK);
#define CHECK(change, word, code)                                                                  \
    {                                                                                              \
        kvf_layout_t layout = sample(), *l = &layout;                                              \
        kvf_layer_group_t *g = &l->groups[1];                                                      \
        kvf_detail_t detail = {""};                                                                \
        (void)g;                                                                                   \
        (void)(change);                                                                            \
        cr_assert_eq(kvf_layout_check(l, &detail), KVF_ERR_##code, "%s", #change);                 \
        cr_assert_not_null(strstr(detail.text, word), "%s: %s", #change, detail.text);             \
    }
    BROKEN(CHECK)
#undef CHECK
}

/* Walk a block in the order that the layout's page promises, and count bytes. */
static void walk_block(const kvf_layer_group_t *g) {
    uint64_t at = 0;
    bool hnd = g->order == KVF_ORDER_HND;
    uint32_t outer = hnd ? g->kv_heads : g->tokens_per_block;
    uint32_t inner = hnd ? g->tokens_per_block : g->kv_heads;
    for (uint32_t layer = 0; layer < g->n_layers; layer++) {
        cr_assert_eq(at, layer * kvf_group_layer_bytes(g));
        for (uint32_t kv = 0; kv < g->kv_factor; kv++) {
            for (uint32_t a = 0; a < outer; a++) {
                for (uint32_t b = 0; b < inner; b++) {
                    cr_assert_eq(kvf_group_offset(g, layer, kv, hnd ? a : b, hnd ? b : a), at);
                    at += g->head_dim * kvf_dtype_bytes(g->dtype);
                }
            }
        }
    }
    cr_assert_eq(kvf_group_block_bytes(g), at);
}

Test(layout, offsets_walk_a_block_without_gap) {
    kvf_layout_t layout = sample();
    walk_block(&layout.groups[0]);
    walk_block(&layout.groups[1]);
    layout.groups[0].kv_factor = 1; /* MLA */
    layout.groups[0].kv_heads = 1;
    walk_block(&layout.groups[0]);
    cr_assert_eq(kvf_group_layer_bytes(&layout.groups[1]), 2 * 2 * 32 * 64);
}

Test(layout, offsets_beyond_32_bits) {
    kvf_layer_group_t g = {.name = "big",
                           .n_layers = 256,
                           .tokens_per_block = 65536,
                           .kv_heads = 128,
                           .head_dim = 256,
                           .kv_factor = 2,
                           .dtype = KVF_DTYPE_F32};
    /* 4 * 256 bytes a vector = 2^10; 2^16 tokens and 2^7 heads: 2^33 a kv half, 2^34 a layer, 2^42
     * a block. */
    cr_assert_eq(kvf_group_layer_bytes(&g), UINT64_C(1) << 34);
    cr_assert_eq(kvf_group_block_bytes(&g), UINT64_C(1) << 42);
    cr_assert_eq(kvf_group_offset(&g, 255, 1, 127, 65535), (UINT64_C(1) << 42) - 1024);
    cr_assert_eq(kvf_group_offset(&g, 0, 0, 64, 1), (UINT64_C(1) << 32) + 1024);
    g.order = KVF_ORDER_NHD;
    cr_assert_eq(kvf_group_offset(&g, 255, 1, 127, 65535), (UINT64_C(1) << 42) - 1024);
    cr_assert_eq(kvf_group_offset(&g, 1, 0, 1, 32768),
                 (UINT64_C(1) << 34) + (UINT64_C(1) << 32) + 1024);
    /* More than 2^32 head vectors in one layer. */
    g = (kvf_layer_group_t){.name = "many",
                            .n_layers = 1,
                            .tokens_per_block = 1 << 17,
                            .kv_heads = 1 << 17,
                            .head_dim = 1,
                            .kv_factor = 2,
                            .dtype = KVF_DTYPE_F8_E4M3};
    cr_assert_eq(kvf_group_offset(&g, 0, 1, 1 << 16, 5), (UINT64_C(3) << 33) + 5);
    g.order = KVF_ORDER_NHD;
    cr_assert_eq(kvf_group_offset(&g, 0, 1, 5, 1 << 16), (UINT64_C(3) << 33) + 5);
}

Test(layout, largest_block_that_fits) {
    kvf_layout_t layout = sample();
    kvf_layer_group_t *g = &layout.groups[1];
    g->n_layers = 1, g->kv_factor = 1, g->kv_heads = 1, g->dtype = KVF_DTYPE_F8_E4M3;
    g->tokens_per_block = UINT32_MAX, g->head_dim = UINT32_MAX;
    cr_assert_eq(kvf_layout_check(&layout, NULL), KVF_OK);
    cr_assert_eq(kvf_group_block_bytes(g), UINT64_C(0xfffffffe00000001));
    g->dtype = KVF_DTYPE_F16;
    cr_assert_eq(kvf_layout_check(&layout, NULL), KVF_ERR_INVALID);
}

Test(layout, layer_span) {
    kvf_layout_t layout = sample();
    const kvf_layer_group_t *g = &layout.groups[1]; /* 0 1 2 10 */
    for (uint32_t first = 0; first < 13; first++) {
        for (uint32_t end = 0; end < 13; end++) {
            uint32_t got_first, got_end, n = 0;
            kvf_group_layer_span(g, first, end, &got_first, &got_end);
            cr_assert_leq(got_first, got_end);
            cr_assert_leq(got_end, g->n_layers);
            for (uint32_t i = 0; i < g->n_layers; i++) {
                bool inside = g->layers[i] >= first && g->layers[i] < end;
                cr_assert_eq(i >= got_first && i < got_end, inside, "[%u, %u): %u", first, end, i);
                n += inside;
            }
            cr_assert_eq(got_end - got_first, n);
        }
    }
}

/* Every field, a change of it, and what the comparison must say. */
#define CHANGES(X)                                                                                 \
    X(l->n_groups = 1, "2 layer groups here, 1 there: group swa (role draft) is only here")        \
    X(strcpy(g->name, "local"), "group number 1 is swa here, local there")                         \
    X(g->n_layers = 3, "group swa: n_layers 4 here, 3 there")                                      \
    X(g->layers[3] = 9, "group swa: layers[3] 10 here, 9 there")                                   \
    X(g->window = 513, "group swa: window 512 here, 513 there")                                    \
    X(g->window = 512 + (INT64_C(1) << 32), "group swa: window 512 here, 4294967808 there")        \
    X(g->sinks = 0, "group swa: sinks 4 here, 0 there")                                            \
    X(g->tokens_per_block = 64, "group swa: tokens_per_block 32 here, 64 there")                   \
    X(g->kv_heads = 1, "group swa: kv_heads 2 here, 1 there")                                      \
    X(g->head_dim = 256, "group swa: head_dim 64 here, 256 there")                                 \
    X(g->kv_factor = 1, "group swa: kv_factor 2 here, 1 there")                                    \
    X(g->dtype = KVF_DTYPE_F16, "group swa: dtype f8_e4m3 here, f16 there")                        \
    X(g->order = KVF_ORDER_HND, "group swa: order NHD here, HND there")                            \
    X(g->kind = KVF_GROUP_STATE, "group swa: kind paged here, state there")                        \
    X(g->role = KVF_GROUP_TARGET, "group swa: role draft here, target there")

Test(layout, compare_and_digest_see_every_field) {
    kvf_layout_t ours = sample();
    kvf_detail_t detail = {""};
#define COMPARE(change, text_want)                                                                 \
    {                                                                                              \
        kvf_layout_t layout = sample(), *l = &layout;                                              \
        kvf_layer_group_t *g = &l->groups[1];                                                      \
        (void)g;                                                                                   \
        (void)(change);                                                                            \
        cr_assert_eq(kvf_layout_compare(&ours, l, &detail), KVF_ERR_INCOMPATIBLE, "%s", #change);  \
        cr_assert_str_eq(detail.text, text_want);                                                  \
        cr_assert_neq(kvf_layout_digest(&ours), kvf_layout_digest(l), "%s", #change);              \
    }
    CHANGES(COMPARE)
#undef COMPARE
}

/* Whichever side has it, and wherever in its list. */
Test(layout, a_group_of_one_side_is_named) {
    kvf_layout_t ours = sample(), theirs = sample();
    kvf_detail_t detail = {""};
    theirs.groups[0] = theirs.groups[1];
    theirs.n_groups = 1;
    cr_assert_eq(kvf_layout_compare(&theirs, &ours, &detail), KVF_ERR_INCOMPATIBLE);
    cr_assert_str_eq(detail.text,
                     "1 layer groups here, 2 there: group full (role target) is only there");
    cr_assert_eq(kvf_layout_compare(&ours, &theirs, &detail), KVF_ERR_INCOMPATIBLE);
    cr_assert_str_eq(detail.text,
                     "2 layer groups here, 1 there: group full (role target) is only here");
}

Test(layout, unused_bytes_do_not_count) {
    kvf_layout_t ours = sample(), theirs;
    memset(&theirs, 0xee, sizeof(theirs));
    theirs.n_groups = ours.n_groups;
    for (uint32_t i = 0; i < ours.n_groups; i++) {
        kvf_layer_group_t *g = &theirs.groups[i];
        memcpy(g, &ours.groups[i], sizeof(*g));
        memset(g->layers + g->n_layers, 0xee,
               sizeof(g->layers) - g->n_layers * sizeof(g->layers[0]));
        memset(g->name + strlen(g->name) + 1, 0xee, sizeof(g->name) - strlen(g->name) - 1);
    }
    cr_assert_eq(kvf_layout_check(&theirs, NULL), KVF_OK);
    cr_assert_eq(kvf_layout_compare(&ours, &theirs, NULL), KVF_OK);
    cr_assert_eq(kvf_layout_digest(&ours), kvf_layout_digest(&theirs));
}
