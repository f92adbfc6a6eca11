/* SPDX-License-Identifier: Apache-2.0 */
#include "../support/judged.h"

#include "../support/attention_scene.h"
#include "tools/presets.h"

#include <math.h>

static int64_t tokens_seen(const request_t *r) {
    int64_t n = 0;
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        for (int64_t p = 0; p <= r->prompt; p++) {
            n += sees(&r->layout.groups[g], r->prompt, p) ? r->layout.groups[g].n_layers : 0;
        }
    }
    return n;
}

static void expect_same(const request_t *r, const char *what) {
    uint32_t n_layers = 0;
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        n_layers += r->layout.groups[g].n_layers;
    }
    for (int cached = 0; cached < 2; cached++) {
        kvf_judgement_t judgement = judge(r, cached);
        cr_assert(judgement.same && judgement.distance < 1e-5,
                  "%s, P %d: group %s, layer %u, head %u: %g", what, (int)r->prompt,
                  judgement.first.group, judgement.first.layer, judgement.first.kv_head,
                  judgement.distance);
        cr_assert_eq(judgement.n_layers, n_layers);
        cr_assert_eq(judgement.n_tokens, tokens_seen(r));
    }
}

/* Right pages */

Test(judge, presets) {
    static const struct {
        uint32_t t;
        int64_t prompt;
    } rows[] = {{16, 1}, {16, 15}, {16, 16}, {32, 200}, {64, 530}};
    test_random_t random = test_random("judge");
    for (size_t i = 0; kvf_preset_names[i] != NULL; i++) {
        for (size_t k = 0; k < sizeof(rows) / sizeof(rows[0]); k++) {
            kvf_layout_t layout;
            cr_assert_eq(kvf_preset_get(kvf_preset_names[i], rows[k].t, &layout, NULL), KVF_OK);
            request_t *r = open_request(&layout, rows[k].prompt, false, &random);
            expect_same(r, kvf_preset_names[i]);
            close_request(r);
        }
    }
    check_leaks();
}

Test(judge, groups_of_every_kind) {
    test_random_t random = test_random("judge");
    kvf_layout_t layout = four_groups();
    for (int64_t prompt = 1; prompt <= 60; prompt++) {
        request_t *r = open_request(&layout, prompt, false, &random);
        expect_same(r, "four groups");
        close_request(r);
    }
}

/* Windows that start at, before and behind the edge of a block; sinks that end there, too. One
 * token more or less in the tables' window is another result. */
Test(judge, windows_at_the_edges_of_blocks) {
    static const int64_t sinks[] = {0, 1, 4, 5, 16, 30};
    test_random_t random = test_random("judge");
    unsigned n_seen = 0;
    for (int i = 0; i < 3 * 3 * 6; i++) {
        uint32_t t = i % 3 == 0 ? 4 : i % 3 == 1 ? 7 : 16;
        int64_t rest = i / 3 % 3 == 0 ? 0 : i / 3 % 3 == 1 ? 1 : t - 1;
        int64_t window = i % 4 == 0 ? 1 : test_between(&random, 2, 40),
                blocks = test_between(&random, 3, 8);
        int64_t prompt = blocks * t + rest + window - 1;
        kvf_layout_t layout = {.n_groups = 1};
        layout.groups[0] = group_of("swa", 0, window, sinks[i / 9], t, 1, 12, 2, KVF_DTYPE_BF16);
        cr_assert_eq((prompt + 1 - window) % t, rest);

        request_t *r = open_request(&layout, prompt, false, &random);
        expect_same(r, "edge");
        close_request(r);

        r = open_request(&layout, prompt, true, &random);
        float *want = result(r, NULL);
        for (int64_t off = -1; off <= 1; off++) {
            layout.groups[0].window = window + off;
            float *got = result(r, &layout);
            kvf_judgement_t judgement = kvf_judge_compare(&r->layout, prompt, got, want);
            bool same = true; /* sinks may reach what the window alone would show or hide */
            for (int64_t p = 0; p <= prompt; p++) {
                same = same &&
                       sees(&layout.groups[0], prompt, p) == sees(&r->layout.groups[0], prompt, p);
            }
            cr_assert_eq(judgement.same, same, "t %u, W %d %+d, sinks %d, P %d: %g", t, (int)window,
                         (int)off, (int)sinks[i / 9], (int)prompt, judgement.distance);
            n_seen += !same;
            free(got);
        }
        free(want);
        close_request(r);
    }
    cr_assert_gt(n_seen, 54);
    check_leaks();
}

/* The expectation itself, in double precision over a prompt that lies in one block. */

static double element(const kvf_layer_group_t *group, const uint8_t *page, uint32_t layer_idx,
                      uint32_t kv, uint32_t head, int64_t token, uint32_t dim) {
    uint32_t code = 0, bytes = kvf_dtype_bytes(group->dtype);
    memcpy(&code,
           page + kvf_group_offset(group, layer_idx, kv, head, (uint32_t)token) + dim * bytes,
           bytes);
    return scene_decode(group->dtype, code);
}

static void expect_by_definition(const kvf_layer_group_t *group, const uint8_t *page,
                                 int64_t prompt, uint32_t l, uint32_t kv_head, const float *q,
                                 uint32_t value_dim, double *out) {
    uint32_t still = group->kv_factor == 1 ? value_dim : 0, half = (group->head_dim - still) / 2;
    double sum = 0;
    memset(out, 0, value_dim * sizeof(*out));
    for (int64_t p = 0; p <= prompt; p++) {
        double score = 0;
        for (uint32_t i = 0; i < group->head_dim && sees(group, prompt, p); i++) {
            double x = element(group, page, l, 0, kv_head, p, i);
            if (i >= still) {
                uint32_t pair = (i - still) % half;
                bool front = i - still < half;
                double other = element(group, page, l, 0, kv_head, p, front ? i + half : i - half);
                double angle = (double)p * pow(10000, -(double)pair / half);
                x = x * cos(angle) + (front ? -other : other) * sin(angle);
            }
            score += x * (double)q[i];
        }
        double weight = sees(group, prompt, p) ? exp(score / sqrt(group->head_dim)) : 0;
        sum += weight;
        for (uint32_t i = 0; i < value_dim; i++) {
            out[i] += weight * element(group, page, l, group->kv_factor - 1, kv_head, p, i);
        }
    }
    for (uint32_t i = 0; i < value_dim; i++) {
        out[i] /= sum;
    }
}

Test(judge, expects_what_attention_is) {
    static const uint32_t share[] = {2, 4, 4, 2}, value_dim[] = {16, 12, 32, 8};
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    request_t *r = open_request(&layout, 45, false, &random);
    float *want = result(r, NULL), *at = want;
    for (uint32_t g = 0; g < layout.n_groups; g++) {
        kvf_layer_group_t flat = layout.groups[g];
        flat.tokens_per_block = 64;
        uint8_t *page = calloc(1, kvf_group_block_bytes(&flat));
        kvf_synthetic_fill(&flat, &r->content, r->prompt, 0, 0, flat.n_layers, page);
        kvf_synthetic_append(&flat, &r->content, r->prompt, r->prompt, page);
        for (uint32_t i = 0; i < 2 * flat.kv_heads * share[g]; i++) {
            uint32_t l = i / (flat.kv_heads * share[g]), h = i % (flat.kv_heads * share[g]);
            kvf_layer_group_t wide = {.head_dim = flat.head_dim, .dtype = KVF_DTYPE_F32};
            float q[64];
            double out[64];
            kvf_synthetic_row(&wide, &r->content, r->prompt, 46, flat.layers[l], 0, h, q);
            expect_by_definition(&flat, page, r->prompt, l, h / share[g], q, value_dim[g], out);
            for (uint32_t d = 0; d < value_dim[g]; d++, at++) {
                cr_assert_float_eq((double)*at, out[d], 1e-5, "group %s layer %u head %u dim %u",
                                   flat.name, l, h, d);
            }
        }
        free(page);
    }
    uint64_t n;
    cr_assert_eq(kvf_judge_floats(&layout, &n, NULL), KVF_OK);
    cr_assert_eq((uint64_t)(at - want), n);
    free(want);
    close_request(r);
}

/* Value dims of MLA-like rows: DeepSeek's is 512 of 576. */
Test(judge, values_are_the_front_of_a_single_row) {
    static const uint32_t dims[][2] = {{576, 512}, {512, 256}, {513, 512}, {64, 32},
                                       {3, 2},     {2, 1},     {1, 1}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        kvf_layout_t layout = {.n_groups = 1};
        uint64_t n;
        layout.groups[0] = group_of("mla", 0, 0, 0, 4, 1, dims[i][0], 1, KVF_DTYPE_BF16);
        cr_assert_eq(kvf_judge_floats(&layout, &n, NULL), KVF_OK);
        cr_assert_eq(n, 2 * 4 * dims[i][1], "head_dim %u", dims[i][0]);
    }
}

/* Bytes */

Test(judge, writes_one_token_and_takes_it_back) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    for (int64_t prompt = 38; prompt <= 41; prompt++) { /* 40: a page of its own */
        request_t *r = open_request(&layout, prompt, false, &random);
        kvf_judge_step_t step = step_of(r, true);
        uint8_t *before[4];
        for (uint32_t g = 0; g < 4; g++) {
            uint64_t bytes =
                (uint64_t)r->pools[g].n_slots * kvf_group_block_bytes(&layout.groups[g]);
            before[g] = malloc(bytes);
            memcpy(before[g], r->pools[g].base, bytes);
        }
        cr_assert(judge(r, true).same);
        for (uint32_t g = 0; g < 4; g++) {
            const kvf_layer_group_t *group = &layout.groups[g];
            int64_t last = prompt / group->tokens_per_block;
            uint64_t bytes = (uint64_t)r->pools[g].n_slots * kvf_group_block_bytes(group);
            uint8_t *want = malloc(bytes),
                    *page = want + (page_of(r, g, last) - (uint8_t *)r->pools[g].base);
            memcpy(want, before[g], bytes);
            for (uint32_t i = 0; i < 2 * group->kv_factor * group->kv_heads; i++) {
                uint32_t head = i % group->kv_heads, kv = i / group->kv_heads % group->kv_factor;
                uint32_t l = i / group->kv_heads / group->kv_factor;
                kvf_synthetic_row(group, &r->content, prompt, prompt, group->layers[l], kv, head,
                                  page +
                                      kvf_group_offset(group, l, kv, head,
                                                       (uint32_t)prompt % group->tokens_per_block));
            }
            cr_assert_arr_eq(r->pools[g].base, want, bytes, "group %s, and nowhere else",
                             group->name);
            cr_assert_arr_neq(want, before[g], bytes);
            free(want);
        }
        kvf_judge_rewind(&step);
        for (uint32_t g = 0; g < 4; g++) {
            cr_assert_arr_eq(r->pools[g].base, before[g],
                             (size_t)r->pools[g].n_slots *
                                 kvf_group_block_bytes(&layout.groups[g]));
            free(before[g]);
        }
        close_request(r);
    }
}

/* What is refused */

static void expect_error(const kvf_judge_step_t *step, kvf_status_t want, const char *text) {
    kvf_judgement_t judgement = {.n_layers = 4711};
    kvf_detail_t detail = {""};
    kvf_status_t got = kvf_judge_run(step, kvf_alloc_default(), &judgement, &detail);
    cr_assert_eq(got, want, "%s: %s", kvf_status_name(got), detail.text);
    cr_assert_not_null(strstr(detail.text, text), "%s", detail.text);
    cr_assert_eq(judgement.n_layers, 4711);
    if (want != KVF_ERR_UNSUPPORTED) { /* the layout is not that of the pages */
        kvf_judge_rewind(step);        /* writes to no page that is not there */
    }
}

Test(judge, refuses_what_it_cannot_judge) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    request_t *r = open_request(&layout, 47, false, &random);
    kvf_judge_step_t step = step_of(r, false);
    int32_t *slots = r->slots[1];
    int32_t kept = slots[11];

    slots[11] = -1;
    expect_error(&step, KVF_ERR_UNCOVERED, "group sinks: ordinal 11 has no page");
    slots[11] = (int32_t)r->pools[1].n_slots;
    expect_error(&step, KVF_ERR_RANGE, "group sinks: ordinal 11 has slot 15; the pool has 15");
    slots[11] = kept;
    r->tables[1].n_blocks = 11;
    expect_error(&step, KVF_ERR_UNCOVERED, "group sinks: ordinal 11 has no page");
    r->tables[1].n_blocks = 12;

    kept = slots[1];
    slots[1] = -1;
    expect_error(&step, KVF_ERR_UNCOVERED, "group sinks: ordinal 1 has no page");
    slots[1] = 15;
    expect_error(&step, KVF_ERR_RANGE, "group sinks: attention: depth 1, sequence 0");
    slots[1] = -2;
    expect_error(&step, KVF_ERR_INVALID, "ordinal 1 has slot -2");
    slots[1] = kept;

    step.prompt_tokens = 0;
    expect_error(&step, KVF_ERR_INVALID, "a prompt of 0 tokens");
    step.prompt_tokens = INT32_MAX;
    expect_error(&step, KVF_ERR_RANGE, "a step of 2147483647 tokens");
    step.prompt_tokens = 47;
    r->layout.groups[2].head_dim = 1025;
    expect_error(&step, KVF_ERR_UNSUPPORTED, "group mla: attention: head_dim is 1025");
    r->layout.groups[2].head_dim = 36;
    r->layout.groups[3].kv_heads = 1U << 30;
    expect_error(&step, KVF_ERR_UNSUPPORTED, "group draft: 1073741824 KV heads");
    close_request(r);
}

Test(judge, survives_failed_allocations) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    request_t *r = open_request(&layout, 47, false, &random);
    uint64_t calls[2];
    for (int cached = 0; cached < 2; cached++) {
        kvf_judge_step_t step = step_of(r, cached);
        kvf_status_t status = KVF_ERR_NO_MEMORY;
        uint64_t n = 0;
        while (status != KVF_OK) {
            kvf_judgement_t judgement = {.n_layers = 4711};
            kvf_alloc_fail_t alloc;
            kvf_alloc_fail_init(&alloc, ++n);
            status = kvf_judge_run(&step, &alloc.table, &judgement, NULL);
            cr_assert(status == KVF_OK || status == KVF_ERR_NO_MEMORY);
            cr_assert_eq(judgement.n_layers, status == KVF_OK ? 8 : 4711);
            cr_assert_eq(alloc.live, 0);
        }
        calls[cached] = n;
    }
    cr_assert_gt(calls[0], 6);
    cr_assert_eq(calls[1], calls[0] + 1, "the cached manager has a buffer to pack into");
    close_request(r);
    check_leaks();
}

static void expect_json(const kvf_judgement_t *judgement, const char *want) {
    json_t *object = kvf_judge_json(judgement);
    char *text = json_dumps(object, JSON_COMPACT);
    cr_assert_str_eq(text, want);
    free(text);
    json_decref(object);
}

Test(judge, says_what_it_found) {
    kvf_judgement_t judgement = {.same = true, .n_layers = 3, .n_tokens = 99, .distance = 0.5};
    expect_json(&judgement, "{\"layers\":3,\"tokens\":99,\"distance\":0.5}");
    judgement.same = false;
    judgement.distance = INFINITY;
    judgement.first.group = "swa";
    judgement.first.layer = 7;
    judgement.first.kv_head = 2;
    judgement.first.distance = 0.25;
    expect_json(&judgement, "{\"layers\":3,\"tokens\":99,\"distance\":null,\"first\":{\"group\":"
                            "\"swa\",\"layer\":7,\"kv_head\":2,\"distance\":0.25}}");
}
