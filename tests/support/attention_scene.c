/* SPDX-License-Identifier: Apache-2.0 */
#include "attention_scene.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    uint32_t kv_heads, q_heads, head_dim, value_dim, kv_factor;
} shapes[N_SHAPES] = {
    {"gqa", 2, 6, 64, 64, 2},
    {"mqa", 1, 5, 36, 36, 2}, /* rows that no vector divides */
    {"mla", 1, 2, 576, 512, 1},
};

const char *scene_shape_name(size_t shape_idx) {
    return shapes[shape_idx].name;
}

static uint64_t hash(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* The stored code of an element: a random sign and mantissa, an exponent that keeps it below 2. */
uint32_t scene_element(kvf_dtype_t dtype, int64_t content, int64_t position, uint32_t layer,
                       uint32_t kv, uint32_t head, uint32_t dim) {
    uint64_t at = hash((uint64_t)content * 1000003 + (uint64_t)position);
    uint32_t x = (uint32_t)hash(at + (((uint64_t)layer * 2 + kv) * 64 + head) * 4096 + dim);
    switch (dtype) {
    case KVF_DTYPE_F32:
        return (x & 0x83ffffffU) | 0x3c000000U;
    case KVF_DTYPE_F16:
        return (x & 0x8fffU) | 0x3000U;
    case KVF_DTYPE_BF16:
        return (x & 0x83ffU) | 0x3c00U;
    default:
        return (x & 0x9fU) | 0x20U;
    }
}

/* Value of a code with mantissa bits m and exponent bits e, by its definition. */
static double decode_parts(uint32_t code, int m, int e, bool infinities) {
    int bias = (1 << (e - 1)) - 1, exponent = (int)(code >> m) & ((1 << e) - 1);
    int mantissa = (int)(code & ((1U << m) - 1)), top = (1 << e) - 1;
    double sign = code >> (m + e) & 1 ? -1 : 1;
    if (exponent == top && infinities) {
        return mantissa == 0 ? sign * INFINITY : NAN;
    }
    if (exponent == top && mantissa == (1 << m) - 1) {
        return NAN;
    }
    return sign * (exponent == 0 ? ldexp(mantissa, 1 - bias - m)
                                 : ldexp((1 << m) + mantissa, exponent - bias - m));
}

double scene_decode(kvf_dtype_t dtype, uint32_t code) {
    switch (dtype) {
    case KVF_DTYPE_F32:
        return decode_parts(code, 23, 8, true);
    case KVF_DTYPE_F16:
        return decode_parts(code, 10, 5, true);
    case KVF_DTYPE_BF16:
        return decode_parts(code, 7, 8, true);
    default:
        return decode_parts(code, 3, 4, false);
    }
}
bool scene_visible(const seq_t *seq, int64_t position) {
    return seq->window == 0 || position >= seq->length - seq->window || position < seq->sinks;
}

int64_t scene_content(const scene_t *scene, uint32_t s, int64_t position) {
    return position < scene->seqs[s].prefix ? 0 : 1 + (int64_t)s;
}

/* Write one block by walking it in the order of its memory; tokens from length on are zero. */
void scene_write(scene_t *scene, int32_t slot, int64_t content, int64_t first, int64_t length) {
    const kvf_layer_group_t *g = &scene->group;
    uint32_t bytes = kvf_dtype_bytes(g->dtype);
    uint8_t *at = scene->pool + (uint64_t)slot * kvf_group_block_bytes(g);
    bool hnd = g->order == KVF_ORDER_HND;
    for (uint32_t layer = 0; layer < g->n_layers; layer++) {
        for (uint32_t kv = 0; kv < g->kv_factor; kv++) {
            for (uint32_t i = 0; i < (hnd ? g->kv_heads : g->tokens_per_block); i++) {
                for (uint32_t j = 0; j < (hnd ? g->tokens_per_block : g->kv_heads); j++) {
                    uint32_t head = hnd ? i : j, token = hnd ? j : i;
                    for (uint32_t dim = 0; dim < g->head_dim; dim++, at += bytes) {
                        uint32_t code =
                            scene_element(g->dtype, content, first + token, layer, kv, head, dim);
                        code = first + token < length ? code : 0;
                        memcpy(at, &code, bytes);
                    }
                }
            }
        }
    }
}

/* One element as a double, keys turned to their position. */
static double key(const scene_t *scene, uint32_t s, int64_t position, uint32_t head, uint32_t dim) {
    const kvf_attention_shape_t *shape = &scene->shape;
    uint32_t still = shape->head_dim - shape->rope_dims, half = shape->rope_dims / 2;
    int64_t content = scene_content(scene, s, position);
    double here = scene_decode(shape->dtype, scene_element(shape->dtype, content, position,
                                                           scene->layer_idx, 0, head, dim));
    if (dim < still) {
        return here;
    }
    bool front = dim < still + half;
    uint32_t pair = front ? dim - still : dim - still - half;
    double there =
        scene_decode(shape->dtype, scene_element(shape->dtype, content, position, scene->layer_idx,
                                                 0, head, front ? dim + half : dim - half));
    double angle =
        (double)position * exp(log((double)shape->rope_theta) * -2 * pair / shape->rope_dims);
    return here * cos(angle) + (front ? -there : there) * sin(angle);
}

static void expect_head(const scene_t *scene, uint32_t s, uint32_t h, float *want) {
    const kvf_attention_shape_t *shape = &scene->shape;
    const seq_t *seq = &scene->seqs[s];
    const float *q = scene->q + (s * shape->q_heads + h) * shape->head_dim;
    uint32_t kv_head = h * shape->kv_heads / shape->q_heads;
    double *out = calloc(shape->value_dim, sizeof(*out)), sum = 0;
    int64_t hidden = seq->window == 0 ? 0 : seq->length - seq->window; /* from sinks to here */
    for (int64_t p = 0; p < seq->length; p++) {
        if (!scene_visible(seq, p)) {
            p = hidden - 1;
            continue;
        }
        double score = 0;
        for (uint32_t dim = 0; dim < shape->head_dim; dim++) {
            score += (double)q[dim] * key(scene, s, p, kv_head, dim);
        }
        double weight = exp((double)shape->scale * score); /* a double holds it without a maximum */
        sum += weight;
        for (uint32_t dim = 0; dim < shape->value_dim; dim++) {
            uint32_t code = scene_element(shape->dtype, scene_content(scene, s, p), p,
                                          scene->layer_idx, shape->kv_factor - 1, kv_head, dim);
            out[dim] += weight * scene_decode(shape->dtype, code);
        }
    }
    for (uint32_t dim = 0; dim < shape->value_dim; dim++) {
        want[dim] = (float)(out[dim] / sum);
    }
    free(out);
}

/* The arrays of one sequence at one depth, which holds the positions [from, to), from a multiple of
 * t: pages with a visible token, in order. What is all visible may be window or sinks alike. */
static void list_pages(scene_t *scene, uint32_t s, uint32_t d, int64_t from, int64_t to) {
    const seq_t *seq = &scene->seqs[s];
    depth_t *depth = &scene->depths[d];
    int64_t t = scene->group.tokens_per_block, listed = 0, start = 0, last = 0;
    bool all = seq->window == 0 || seq->window >= seq->length ||
               (seq->otherwise ? to : seq->length - seq->window) <= seq->sinks;
    int64_t window = all ? from : seq->length - seq->window;
    bool started = false;
    int32_t n = depth->indptr[s];
    for (int64_t first = from; first < to; first += t) {
        int64_t end = first + t < to ? first + t : to, seen = 0;
        for (int64_t p = first; p < end && seen == 0; p++) {
            seen += scene_visible(seq, p);
        }
        if (seen == 0) {
            continue;
        }
        if (!started && window < end) {
            start = listed + (window > first ? window - first : 0);
            depth->offset[s] = (int32_t)(window > first ? window : first);
            started = true;
        }
        listed += t;
        last = end - first;
        int32_t fresh = scene->slots[scene->n_used],
                *slot = d == 0 ? &scene->prefix_slots[first / t] : &fresh;
        if (d > 0 || *slot < 0) {
            *slot = fresh;
            scene->n_used++;
            scene_write(scene, fresh, scene_content(scene, s, first), first, to);
        }
        depth->indices[n] = *slot;
        n++;
    }
    depth->indptr[s + 1] = n;
    depth->info[s] = (int32_t)last;
    depth->info[N_SEQS + s] = (int32_t)(started ? start : listed - t + last);
    int64_t sinks = seq->sinks > to ? to : seq->sinks;
    depth->info[2 * N_SEQS + s] = (int32_t)(all || sinks < from ? 0 : sinks - from);
}

scene_t *scene_make(size_t shape_idx, kvf_dtype_t dtype, kvf_order_t order, uint32_t t,
                    const seq_t *seqs, test_random_t *random) {
    scene_t *scene = calloc(1, sizeof(*scene));
    scene->group = (kvf_layer_group_t){.name = "group",
                                       .n_layers = LAYERS,
                                       .layers = {3, 9},
                                       .tokens_per_block = t,
                                       .kv_heads = shapes[shape_idx].kv_heads,
                                       .head_dim = shapes[shape_idx].head_dim,
                                       .kv_factor = shapes[shape_idx].kv_factor,
                                       .dtype = dtype,
                                       .order = order};
    const kvf_attention_shape_t *shape = &scene->shape;
    cr_assert_eq(kvf_attention_shape_of(&scene->group, shapes[shape_idx].q_heads,
                                        shapes[shape_idx].value_dim, &scene->shape, NULL),
                 KVF_OK);
    scene->layer_idx = (uint32_t)test_between(random, 0, LAYERS - 1);
    memcpy(scene->seqs, seqs, sizeof(scene->seqs));
    memset(scene->prefix_slots, -1, sizeof(scene->prefix_slots));
    int64_t pages = 1;
    for (uint32_t s = 0; s < N_SEQS; s++) {
        int64_t seen = seqs[s].window == 0 ? seqs[s].length : seqs[s].window + seqs[s].sinks;
        pages += (seen < seqs[s].length ? seen : seqs[s].length) / t + 4;
    }
    cr_assert_leq(pages, MAX_SLOTS);
    scene->n_slots = (int32_t)pages;
    for (int32_t i = 0; i < scene->n_slots; i++) {
        int64_t j = test_between(random, 0, i);
        scene->slots[i] = scene->slots[j];
        scene->slots[j] = i;
    }
    /* Slots that nobody wrote hold large numbers, or none. */
    uint64_t block_bytes = kvf_group_block_bytes(&scene->group);
    scene->pool = malloc((size_t)pages * block_bytes);
    memset(scene->pool, 0x7f, (size_t)pages * block_bytes);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        list_pages(scene, s, 0, 0, seqs[s].prefix);
        list_pages(scene, s, 1, seqs[s].prefix, seqs[s].length);
    }
    cr_assert_lt(scene->n_used, scene->n_slots);
    uint32_t heads = N_SEQS * shape->q_heads;
    scene->q = malloc((size_t)heads * shape->head_dim * sizeof(float));
    scene->want = malloc((size_t)heads * shape->value_dim * sizeof(float));
    scene->out = malloc((size_t)heads * shape->value_dim * sizeof(float));
    for (uint32_t i = 0; i < heads * shape->head_dim; i++) {
        scene->q[i] = (float)test_between(random, -1000, 1000) / 500;
    }
    for (uint32_t h = 0; h < heads; h++) {
        expect_head(scene, h / shape->q_heads, h % shape->q_heads,
                    scene->want + h * shape->value_dim);
    }
    return scene;
}

void scene_free(scene_t *scene) {
    free(scene->pool);
    free(scene->q);
    free(scene->want);
    free(scene->out);
    free(scene);
}

kvf_status_t scene_run(const scene_t *scene, const depth_t *depths, kvf_detail_t *detail) {
    kvf_attention_depth_t views[N_DEPTHS];
    for (uint32_t d = 0; d < N_DEPTHS; d++) {
        views[d] = (kvf_attention_depth_t){depths[d].indptr, depths[d].indices, depths[d].info,
                                           depths[d].offset, depths[d].indptr[N_SEQS]};
    }
    kvf_attention_t attention = {.shape = scene->shape,
                                 .layer_idx = scene->layer_idx,
                                 .pool = scene->pool,
                                 .n_slots = scene->n_slots,
                                 .n_seqs = N_SEQS,
                                 .n_depths = N_DEPTHS,
                                 .depths = views};
    return kvf_attention_run(&attention, scene->q, scene->out, detail);
}

/* The distance of what a sequence gets from what it should, over the heads. */
double scene_distance(const scene_t *scene, uint32_t s) {
    const kvf_attention_shape_t *shape = &scene->shape;
    uint64_t row = (uint64_t)s * shape->q_heads * shape->value_dim;
    return kvf_attention_distance(scene->out + row, scene->want + row, shape->q_heads,
                                  shape->value_dim);
}
