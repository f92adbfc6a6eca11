/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention.h"
#include "kernels/attention_body.h"

#include "../support/attention_scene.h"

#include <criterion/criterion.h>

/* What is right stays within a tenth of the tolerance (float32 against double: up to 5e-6 seen),
 * what is wrong must be ten times above it. */
#define RIGHT (KVF_ATTENTION_TOLERANCE / 10)
#define WRONG (KVF_ATTENTION_TOLERANCE * 10)

static void same_value(float got, double want, uint32_t code) {
    if (isnan(want)) {
        cr_assert(isnan(got), "code %x", code);
    } else {
        cr_assert((double)got == want && !signbit(got) == !signbit(want), "code %x: %a, not %a",
                  code, (double)got, want);
    }
}

Test(attention, every_code_of_every_small_float) {
    for (uint32_t code = 0; code < 65536; code++) {
        same_value(kvf_f32_from_f16((uint16_t)code), scene_decode(KVF_DTYPE_F16, code), code);
        same_value(kvf_f32_from_bf16((uint16_t)code), scene_decode(KVF_DTYPE_BF16, code), code);
    }
    for (uint32_t code = 0; code < 256; code++) {
        same_value(kvf_f32_from_f8_e4m3((uint8_t)code), scene_decode(KVF_DTYPE_F8_E4M3, code),
                   code);
    }
    /* Some that the standards name. */
    cr_assert_eq(kvf_f32_from_f16(0x7bff), 65504.0F);
    cr_assert_eq(kvf_f32_from_f16(0x0001), 0x1p-24F);
    cr_assert_eq(kvf_f32_from_f8_e4m3(0x7e), 448.0F);
    cr_assert_eq(kvf_f32_from_f8_e4m3(0x81), -0x1p-9F);
}

Test(attention, offsets_are_those_of_the_layout) {
    test_random_t random = test_random("offsets");
    for (int i = 0; i < 2000; i++) {
        kvf_layer_group_t g = {.n_layers = (uint32_t)test_between(&random, 1, 256),
                               .kv_heads = (uint32_t)test_between(&random, 1, 4096),
                               .head_dim = (uint32_t)test_between(&random, 1, 1024),
                               .tokens_per_block = (uint32_t)test_between(&random, 1, 4096),
                               .kv_factor = 2,
                               .dtype = (kvf_dtype_t)test_between(&random, 0, 3),
                               .order = (kvf_order_t)test_between(&random, 0, 1)};
        kvf_attention_shape_t shape;
        cr_assert_eq(kvf_attention_shape_of(&g, g.kv_heads, g.head_dim, &shape, NULL), KVF_OK);
        uint32_t layer = (uint32_t)test_between(&random, 0, g.n_layers - 1);
        uint32_t head = (uint32_t)test_between(&random, 0, g.kv_heads - 1);
        uint32_t token = (uint32_t)test_between(&random, 0, g.tokens_per_block - 1);
        for (uint32_t kv = 0; kv < 2; kv++) {
            cr_assert_eq(kvf_attention_offset(&shape, layer, kv, head, token),
                         kvf_group_offset(&g, layer, kv, head, token));
        }
        cr_assert_eq(kvf_attention_offset(&shape, g.n_layers, 0, 0, 0), kvf_group_block_bytes(&g));
    }
}

Test(attention, usual_shapes) {
    kvf_layer_group_t g = {.n_layers = 3,
                           .kv_heads = 1,
                           .head_dim = 576,
                           .tokens_per_block = 32,
                           .kv_factor = 1,
                           .dtype = KVF_DTYPE_BF16,
                           .order = KVF_ORDER_NHD};
    kvf_attention_shape_t shape;
    cr_assert_eq(kvf_attention_shape_of(&g, 128, 512, &shape, NULL), KVF_OK);
    cr_assert(shape.n_layers == 3 && shape.kv_factor == 1 && shape.kv_heads == 1);
    cr_assert(shape.head_dim == 576 && shape.tokens_per_block == 32 && shape.q_heads == 128);
    cr_assert(shape.dtype == KVF_DTYPE_BF16 && shape.order == KVF_ORDER_NHD);
    cr_assert(shape.value_dim == 512 && shape.rope_dims == 64 && shape.rope_theta == 10000.0F);
    cr_assert_float_eq(shape.scale, 1.0 / 24, 1e-8);
    g.kv_factor = 2;
    cr_assert_eq(kvf_attention_shape_of(&g, 4, 512, &shape, NULL), KVF_OK);
    cr_assert(shape.rope_dims == 576 && shape.value_dim == 512);
}

static void assert_right(const scene_t *scene, const char *what) {
    kvf_detail_t detail = {""};
    cr_assert_eq(scene_run(scene, scene->depths, &detail), KVF_OK, "%s", detail.text);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        const seq_t *seq = &scene->seqs[s];
        cr_assert_leq(scene_distance(scene, s), RIGHT,
                      "%s, %s, order %d, t %u: L %lld, W %lld, sinks %lld, prefix %lld: %g", what,
                      kvf_dtype_name(scene->shape.dtype), (int)scene->shape.order,
                      scene->group.tokens_per_block, (long long)seq->length, (long long)seq->window,
                      (long long)seq->sinks, (long long)seq->prefix, scene_distance(scene, s));
    }
}

/* Calls body with shape_idx, dtype and order of each of the 24 combinations. */
#define FOR_EACH_KIND                                                                              \
    for (size_t shape_idx = 0; shape_idx < N_SHAPES; shape_idx++)                                  \
        for (kvf_dtype_t dtype = KVF_DTYPE_F32; dtype <= KVF_DTYPE_F8_E4M3; dtype++)               \
            for (kvf_order_t order = KVF_ORDER_HND; order <= KVF_ORDER_NHD; order++)

Test(attention, random_batches, .timeout = 300) {
    test_random_t random = test_random("random_batches");
    FOR_EACH_KIND {
        for (int i = 0; i < (shape_idx == 2 ? 6 : 20); i++) {
            int64_t t = test_between(&random, 1, 17), prefix = test_between(&random, 0, 3) * t;
            seq_t seqs[N_SEQS];
            for (uint32_t s = 0; s < N_SEQS; s++) {
                seq_t *seq = &seqs[s];
                seq->prefix = test_between(&random, 0, 2) > 0 ? prefix : 0;
                seq->length = seq->prefix + test_between(&random, 1, 80);
                seq->window = test_between(&random, 0, 1) * test_between(&random, 1, seq->length);
                seq->sinks = seq->window > 0 ? test_between(&random, 0, 1) *
                                                   test_between(&random, 0, seq->prefix + 2 * t)
                                             : 0;
                seq->otherwise = test_between(&random, 0, 1) == 1;
            }
            scene_t *scene = scene_make(shape_idx, dtype, order, (uint32_t)t, seqs, &random);
            assert_right(scene, scene_shape_name(shape_idx));
            scene_free(scene);
        }
    }
}

Test(attention, long_ones, .timeout = 300) {
    test_random_t random = test_random("long_ones");
    const seq_t seqs[N_SEQS] = {{.length = 9000, .prefix = 4096},
                                {.length = 1000003, .window = 700, .sinks = 5},
                                {.length = 65537, .window = 1}};
    scene_t *scene = scene_make(0, KVF_DTYPE_BF16, KVF_ORDER_HND, 16, seqs, &random);
    assert_right(scene, "long");
    scene_free(scene);
}

/*
 * Mutants: the same judge, fed with arrays that are wrong in one way. All sequences have several
 * pages; the second has a window, the third a window and sinks, and the first two share a prefix.
 */
static const seq_t mutated[N_SEQS] = {{.length = 75, .prefix = 16},
                                      {.length = 91, .prefix = 16, .window = 45},
                                      {.length = 83, .window = 29, .sinks = 11}};

typedef struct mutant {
    const char *name;
    /* Change the pages and the three numbers of sequence s at depth 1; false: not for this one. */
    bool (*apply)(const scene_t *scene, depth_t *depth, uint32_t s);
} mutant_t;

static bool alias(const scene_t *scene, depth_t *depth, uint32_t s) {
    (void)scene;
    int32_t *pages = depth->indices + depth->indptr[s];
    pages[2] = pages[1];
    return true;
}

static bool swap(const scene_t *scene, depth_t *depth, uint32_t s) {
    (void)scene;
    int32_t *pages = depth->indices + depth->indptr[s], page = pages[1];
    pages[1] = pages[2];
    pages[2] = page;
    return true;
}

static bool lose_first(const scene_t *scene, depth_t *depth, uint32_t s) {
    int32_t *pages = depth->indices + depth->indptr[s];
    int32_t n = depth->indptr[s + 1] - depth->indptr[s];
    memmove(pages, pages + 1, (size_t)(n - 1) * sizeof(*pages));
    pages[n - 1] = scene->slots[scene->n_used]; /* a scratch block follows in a list like that */
    return true;
}

static bool move_window(const scene_t *scene, depth_t *depth, uint32_t s, int32_t by,
                        int32_t offset) {
    depth->info[N_SEQS + s] += by;
    depth->offset[s] += offset;
    return scene->seqs[s].window > 0;
}

static bool window_late(const scene_t *scene, depth_t *depth, uint32_t s) {
    return move_window(scene, depth, s, 1, 1);
}

static bool window_early(const scene_t *scene, depth_t *depth, uint32_t s) {
    return move_window(scene, depth, s, -1, -1);
}

static bool window_late_alone(const scene_t *scene, depth_t *depth, uint32_t s) {
    return move_window(scene, depth, s, 1, 0);
}

static bool window_early_alone(const scene_t *scene, depth_t *depth, uint32_t s) {
    return move_window(scene, depth, s, -1, 0);
}

static bool offset_alone(const scene_t *scene, depth_t *depth, uint32_t s) {
    (void)move_window(scene, depth, s, 0, 1);
    return true;
}

static bool sink_less(const scene_t *scene, depth_t *depth, uint32_t s) {
    depth->info[2 * N_SEQS + s]--;
    return scene->seqs[s].sinks > 0;
}

static bool sink_more(const scene_t *scene, depth_t *depth, uint32_t s) {
    depth->info[2 * N_SEQS + s]++;
    return scene->seqs[s].sinks > 0;
}

static bool last_shorter(const scene_t *scene, depth_t *depth, uint32_t s) {
    (void)scene;
    depth->info[s]--;
    return true;
}

static bool last_longer(const scene_t *scene, depth_t *depth, uint32_t s) {
    (void)scene;
    depth->info[s]++;
    return true;
}

static const mutant_t mutants[] = {
    {"two ordinals of one slot", alias},
    {"two pages swapped", swap},
    {"first prompt block lost", lose_first},
    {"window starts a token late", window_late},
    {"window starts a token early", window_early},
    {"window starts a token late, positions kept", window_late_alone},
    {"window starts a token early, positions kept", window_early_alone},
    {"positions off by one", offset_alone},
    {"a sink less", sink_less},
    {"a sink more", sink_more},
    {"last page a token shorter", last_shorter},
    {"last page a token longer", last_longer},
};

Test(attention, mutants_change_the_result, .timeout = 300) {
    test_random_t random = test_random("mutants");
    FOR_EACH_KIND {
        scene_t *scene = scene_make(shape_idx, dtype, order, 8, mutated, &random);
        scene_write(scene, scene->slots[scene->n_used], STRANGER, 0, INT64_MAX);
        assert_right(scene, scene_shape_name(shape_idx));
        depth_t depths[N_DEPTHS];
        for (size_t m = 0; m < sizeof(mutants) / sizeof(mutants[0]); m++) {
            for (uint32_t s = 0; s < N_SEQS; s++) {
                memcpy(depths, scene->depths, sizeof(depths));
                if (!mutants[m].apply(scene, &depths[1], s)) {
                    continue;
                }
                kvf_detail_t detail = {""};
                cr_assert_eq(scene_run(scene, depths, &detail), KVF_OK, "%s: %s", mutants[m].name,
                             detail.text);
                for (uint32_t other = 0; other < N_SEQS; other++) {
                    double d = scene_distance(scene, other);
                    cr_assert(other == s ? d >= WRONG : d <= RIGHT,
                              "%s, %s, order %d, sequence %u, %s: sequence %u is %g off",
                              scene_shape_name(shape_idx), kvf_dtype_name(dtype), (int)order, s,
                              mutants[m].name, other, d);
                }
            }
        }
        scene_free(scene);
    }
}

Test(attention, layers_and_orders_are_told_apart) {
    test_random_t random = test_random("told_apart");
    scene_t *scene = scene_make(0, KVF_DTYPE_BF16, KVF_ORDER_HND, 8, mutated, &random);
    scene->layer_idx ^= 1;
    cr_assert_eq(scene_run(scene, scene->depths, NULL), KVF_OK);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        cr_assert_geq(scene_distance(scene, s), WRONG);
    }
    scene->layer_idx ^= 1;
    scene->shape.order = KVF_ORDER_NHD;
    cr_assert_eq(scene_run(scene, scene->depths, NULL), KVF_OK);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        cr_assert_geq(scene_distance(scene, s), WRONG);
    }
    scene->shape.order = KVF_ORDER_HND;
    depth_t swapped[N_DEPTHS] = {scene->depths[1], scene->depths[0]};
    cr_assert_eq(scene_run(scene, swapped, NULL), KVF_OK);
    cr_assert_leq(scene_distance(scene, 0), RIGHT,
                  "the order of tokens with positions does not matter");
    scene_free(scene);
}

Test(attention, rows_give_the_bits_of_pages) {
    test_random_t random = test_random("rows");
    FOR_EACH_KIND {
        scene_t *scene = scene_make(shape_idx, dtype, order, 8, mutated, &random);
        const kvf_attention_shape_t *shape = &scene->shape;
        assert_right(scene, scene_shape_name(shape_idx));
        uint32_t share = shape->q_heads / shape->kv_heads, bytes = kvf_dtype_bytes(dtype);
        for (uint32_t i = 0; i < N_SEQS * shape->kv_heads; i++) {
            uint32_t s = i / shape->kv_heads, h = i % shape->kv_heads;
            const seq_t *seq = &scene->seqs[s];
            float out[8 * 512];
            kvf_attention_head_t head;
            kvf_attention_begin(&head, shape, scene->q + (size_t)i * share * shape->head_dim, out);
            for (int64_t p = 0; p < seq->length; p++) {
                uint8_t rows[2][1 + 4 * 576]; /* as if from a file: at an odd address */
                for (uint32_t e = 0; scene_visible(seq, p) && e < 2 * shape->head_dim; e++) {
                    uint32_t kv = e / shape->head_dim, dim = e % shape->head_dim;
                    uint32_t code = scene_element(dtype, scene_content(scene, s, p), p,
                                                  scene->layer_idx, kv, h, dim);
                    memcpy(rows[kv] + 1 + (size_t)dim * bytes, &code, bytes);
                }
                if (scene_visible(seq, p)) {
                    kvf_attention_add(&head, p, rows[0] + 1, rows[shape->kv_factor - 1] + 1);
                }
            }
            kvf_attention_end(&head);
            cr_assert_arr_eq(out, scene->out + (size_t)i * share * shape->value_dim,
                             (size_t)share * shape->value_dim * sizeof(float));
        }
        scene_free(scene);
    }
}

Test(attention, nothing_visible_gives_zeros) {
    kvf_attention_shape_t shape = {.n_layers = 1,
                                   .kv_factor = 2,
                                   .kv_heads = 1,
                                   .head_dim = 2,
                                   .tokens_per_block = 4,
                                   .q_heads = 1,
                                   .value_dim = 2,
                                   .rope_theta = 1,
                                   .scale = 1};
    int32_t none[2] = {0, 0}, one[2] = {0, 1}, slot = 0, info[3] = {4, 4, 0};
    float pool[16] = {0}, q[2] = {1, 1}, out[2] = {7, 7};
    kvf_attention_depth_t depths[2] = {{none, NULL, NULL, NULL, 0}, {one, &slot, info, NULL, 1}};
    kvf_attention_t attention = {shape, 0, (const uint8_t *)pool, 1, 1, 2, depths};
    cr_assert_eq(kvf_attention_run(&attention, q, out, NULL), KVF_OK);
    cr_assert(out[0] == 0 && out[1] == 0);
    /* Scores far beyond what expf() holds, the largest of them twice: the mean of its values. */
    const float keys[8] = {-3000, 0, 900, 100, 1000, 0, 500, 0};
    const float values[8] = {50, 60, 1, 2, 3, 4, 70, 80};
    memcpy(pool, keys, sizeof(keys));
    memcpy(pool + 8, values, sizeof(values));
    info[1] = 0;
    cr_assert_eq(kvf_attention_run(&attention, q, out, NULL), KVF_OK);
    cr_assert(out[0] == 2 && out[1] == 3, "%g %g", (double)out[0], (double)out[1]);
}

Test(attention, distance_is_of_the_worst_row) {
    const float want[6] = {3, 4, 30, 40, 0, 0}, near[6] = {3, 5, 30, 41, 0, 0};
    cr_assert_float_eq(kvf_attention_distance(near, want, 3, 2), 0.2, 1e-12);
    cr_assert_float_eq(kvf_attention_distance(near + 2, want + 2, 2, 2), 0.02, 1e-12);
    cr_assert_eq(kvf_attention_distance(want, want, 3, 2), 0);
    cr_assert(isinf(kvf_attention_distance(want, want + 4, 1, 2)), "zero was expected");
    const float none[2] = {NAN, 4}, endless[2] = {INFINITY, 4};
    cr_assert(isinf(kvf_attention_distance(none, want, 1, 2)));
    cr_assert(isinf(kvf_attention_distance(want, none, 1, 2)));
    cr_assert(isinf(kvf_attention_distance(endless, want, 1, 2)));
    cr_assert(isinf(kvf_attention_distance(endless, endless, 1, 2)));
}

/* Change one thing of a good call (a its attention, s its shape, d depth 1, x the arrays of d); the
 * text must hold the word. */
#define BROKEN(X)                                                                                  \
    X(s->dtype = (kvf_dtype_t)4, "dtype", INVALID)                                                 \
    X(s->order = (kvf_order_t)2, "order", INVALID)                                                 \
    X(s->n_layers = 0, "n_layers", INVALID)                                                        \
    X(s->kv_factor = 3, "kv_factor", INVALID)                                                      \
    X(s->kv_factor = 0, "kv_factor", INVALID)                                                      \
    X(s->kv_heads = 0, "kv_heads", INVALID)                                                        \
    X(s->head_dim = 0, "head_dim", INVALID)                                                        \
    X(s->tokens_per_block = 0, "tokens_per_block", INVALID)                                        \
    X(s->q_heads = 0, "q_heads", INVALID)                                                          \
    X(s->q_heads = 7, "q_heads", INVALID)                                                          \
    X(s->value_dim = 0, "value_dim", INVALID)                                                      \
    X(s->value_dim = 65, "value_dim", INVALID)                                                     \
    X(s->rope_dims = 66, "rope_dims", INVALID)                                                     \
    X(s->rope_dims = 63, "rope_dims", INVALID)                                                     \
    X((s->kv_factor = 1, s->value_dim = 32, s->rope_dims = 34), "rope_dims", INVALID)              \
    X(s->rope_theta = 0, "rope_theta", INVALID)                                                    \
    X(s->scale = NAN, "scale", INVALID)                                                            \
    X(s->head_dim = 1025, "head_dim", UNSUPPORTED)                                                 \
    X(s->q_heads = 2 * 257, "257 query heads", UNSUPPORTED)                                        \
    X((s->kv_heads = s->q_heads = UINT32_MAX, s->tokens_per_block = INT32_MAX), "2^64", INVALID)   \
    X(a->layer_idx = LAYERS, "layer_idx", INVALID)                                                 \
    X(d->n_pages++, "number of page indices", INVALID)                                             \
    X(d->k_rope_pos_offset = NULL, "k_rope_pos_offset", INVALID)                                   \
    X(x->indptr[0] = 1, "goes from 1", INVALID)                                                    \
    X(x->indptr[2] = 0, "falls", INVALID)                                                          \
    X(x->info[2] = 0, "sequence 2: tokens in the last page is 0", INVALID)                         \
    X(x->info[0] = 9, "sequence 0: tokens in the last page is 9", INVALID)                         \
    X(x->info[N_SEQS] = -1, "window offset", INVALID)                                              \
    X(x->info[N_SEQS] = 60, "window offset is 60", INVALID)                                        \
    X(x->info[2 * N_SEQS] = -1, "sink tokens", INVALID)                                            \
    X(x->info[2 * N_SEQS] = 60, "sink tokens is 60", INVALID)                                      \
    X(x->offset[1] = -1, "sequence 1: k_rope_pos_offset", INVALID)                                 \
    X(x->indices[x->indptr[1] + 2] = -1, "sequence 1: page 2 is slot -1", RANGE)                   \
    X(x->indices[0] = (int32_t)a->n_slots, "sequence 0: page 0", RANGE)                            \
    X(x->indices[0] = INT32_MIN, "slot -2147483648", RANGE)

Test(attention, wrong_calls_touch_nothing) {
    test_random_t random = test_random("wrong_calls");
    scene_t *scene = scene_make(0, KVF_DTYPE_F16, KVF_ORDER_HND, 8, mutated, &random);
    const uint64_t n_out = (uint64_t)N_SEQS * scene->shape.q_heads * scene->shape.value_dim;
#define CALL(change, word, code)                                                                   \
    {                                                                                              \
        depth_t arrays[N_DEPTHS], *x = &arrays[1];                                                 \
        memcpy(arrays, scene->depths, sizeof(arrays));                                             \
        kvf_attention_depth_t views[N_DEPTHS], *d = &views[1];                                     \
        for (uint32_t i = 0; i < N_DEPTHS; i++) {                                                  \
            views[i] =                                                                             \
                (kvf_attention_depth_t){arrays[i].indptr, arrays[i].indices, arrays[i].info,       \
                                        arrays[i].offset, arrays[i].indptr[N_SEQS]};               \
        }                                                                                          \
        kvf_attention_t attention = {scene->shape, 0,        scene->pool, scene->n_slots,          \
                                     N_SEQS,       N_DEPTHS, views};                               \
        kvf_attention_t *a = &attention;                                                           \
        kvf_attention_shape_t *s = &attention.shape;                                               \
        (void)a, (void)s, (void)d, (void)x, (void)(change);                                        \
        kvf_detail_t detail = {""};                                                                \
        memset(scene->out, 0x5a, n_out * sizeof(float));                                           \
        cr_assert_eq(kvf_attention_run(a, scene->q, scene->out, &detail), KVF_ERR_##code, "%s",    \
                     #change);                                                                     \
        cr_assert_not_null(strstr(detail.text, word), "%s: %s", #change, detail.text);             \
        for (uint64_t i = 0; i < n_out * sizeof(float); i++) {                                     \
            cr_assert_eq(((const uint8_t *)scene->out)[i], 0x5a, "%s", #change);                   \
        }                                                                                          \
    }
    BROKEN(CALL)
    kvf_attention_shape_t shape = {.q_heads = 99};
    cr_assert_eq(kvf_attention_shape_of(&scene->group, 7, 64, &shape, NULL), KVF_ERR_INVALID);
    cr_assert_eq(kvf_attention_shape_of(&scene->group, 6, 65, &shape, NULL), KVF_ERR_INVALID);
    cr_assert_eq(shape.q_heads, 99U, "untouched");
    scene_free(scene);
}
