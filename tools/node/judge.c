/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/judge.h"

#include "kernels/attention.h"
#include "kvmgr/auxbuild.h"
#include "kvmgr/base/size.h"
#include "transceiver/mem/mem.h"

#include <inttypes.h>
#include <math.h>

/* As engines have them. No prefix is declared as shared, so the first one has no pages. */
#define N_DEPTHS 2
#define MAX_SHARE 4

/* Query heads of one KV head. */
static uint32_t share_of(const kvf_layer_group_t *group) {
    return group->kv_heads > 1 ? 2 : MAX_SHARE;
}

static uint32_t value_dim_of(const kvf_layer_group_t *group) {
    uint32_t dim = 1;
    if (group->kv_factor != 1) {
        return group->head_dim;
    }
    while (dim < group->head_dim - dim) {
        dim *= 2;
    }
    return dim;
}

static uint64_t layer_floats(const kvf_layer_group_t *group) {
    return (uint64_t)group->kv_heads * share_of(group) * value_dim_of(group);
}

static kvf_status_t shape_of(const kvf_layer_group_t *group, kvf_attention_shape_t *shape_p,
                             kvf_detail_t *detail) {
    kvf_detail_t cause;
    if (group->kv_heads > UINT32_MAX / MAX_SHARE) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "group %s: %" PRIu32 " KV heads are too many",
                        group->name, group->kv_heads);
    }
    kvf_status_t status = kvf_attention_shape_of(group, group->kv_heads * share_of(group),
                                                 value_dim_of(group), shape_p, &cause);
    return status == KVF_OK ? KVF_OK
                            : kvf_fail(detail, status, "group %s: %s", group->name, cause.text);
}

kvf_status_t kvf_judge_floats(const kvf_layout_t *layout, uint64_t *n_p, kvf_detail_t *detail) {
    uint64_t n = 0; /* shapes are small enough for any sum of theirs */
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        kvf_attention_shape_t shape;
        kvf_status_t status = shape_of(&layout->groups[g], &shape, detail);
        if (status != KVF_OK) {
            return status;
        }
        n += layout->groups[g].n_layers * layer_floats(&layout->groups[g]);
    }
    *n_p = n;
    return KVF_OK;
}

/* The queries of n heads in one layer, numbers in float32 that no token of the request has: they
 * are made as the keys of the position behind the step. */
static void make_queries(const kvf_layer_group_t *group, const kvf_content_t *content,
                         int64_t prompt_tokens, uint32_t layer, uint32_t first, uint32_t n,
                         float *q) {
    kvf_layer_group_t wide = {.head_dim = group->head_dim, .dtype = KVF_DTYPE_F32};
    for (uint32_t h = 0; h < n; h++, q += group->head_dim) {
        kvf_synthetic_row(&wide, content, prompt_tokens, prompt_tokens + 1, layer, 0, first + h, q);
    }
}

/* The engine's side */

/* The page of position P. */
static kvf_status_t last_page(const kvf_judge_step_t *step, uint32_t g, void **page_p,
                              kvf_detail_t *detail) {
    const kvf_layer_group_t *group = &step->layout->groups[g];
    const kvf_table_t *table = &step->tables[g];
    const kvf_judge_pool_t *pool = &step->pools[g];
    int64_t ordinal = step->prompt_tokens / group->tokens_per_block;
    int32_t slot = ordinal < table->n_blocks ? table->slots[ordinal] : -1;
    if (slot < 0) {
        return kvf_fail(detail, KVF_ERR_UNCOVERED,
                        "group %s: ordinal %" PRId64
                        " has no page, and the first generated token belongs there",
                        group->name, ordinal);
    }
    if (slot >= pool->n_slots) {
        return kvf_fail(detail, KVF_ERR_RANGE,
                        "group %s: ordinal %" PRId64 " has slot %" PRId32 "; the pool has %" PRId64,
                        group->name, ordinal, slot, pool->n_slots);
    }
    *page_p = (uint8_t *)pool->base + (uint64_t)slot * kvf_group_block_bytes(group);
    return KVF_OK;
}

static kvf_status_t append(const kvf_judge_step_t *step, kvf_detail_t *detail) {
    for (uint32_t g = 0; g < step->layout->n_groups; g++) {
        void *page;
        kvf_status_t status = last_page(step, g, &page, detail);
        if (status != KVF_OK) {
            return status;
        }
        kvf_synthetic_append(&step->layout->groups[g], step->content, step->prompt_tokens,
                             step->prompt_tokens, page);
    }
    return KVF_OK;
}

void kvf_judge_rewind(const kvf_judge_step_t *step) {
    for (uint32_t g = 0; g < step->layout->n_groups; g++) {
        void *page;
        if (last_page(step, g, &page, NULL) == KVF_OK) {
            kvf_synthetic_erase(&step->layout->groups[g], step->prompt_tokens, page);
        }
    }
}

/* Fill a manager with the step's arrays. */
static kvf_status_t make_aux(const kvf_judge_step_t *step, const kvf_aux_limits_t *limits,
                             const kvf_alloc_t *alloc, kvf_auxdata_t *aux, kvf_detail_t *detail) {
    const kvf_aux_seq_t seq = {
        .tables = step->tables, .n_tokens = step->prompt_tokens + 1, .n_query_tokens = 1};
    kvf_auxbuild_t *build;
    kvf_status_t status = kvf_auxbuild_create(step->layout, limits, alloc, &build, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_auxbuild_run(build, 1, &seq, detail);
    if (status == KVF_OK) {
        status = kvf_auxbuild_copy(build, aux, detail);
    }
    if (status == KVF_OK) {
        status = kvf_aux_commit(aux, detail);
    }
    kvf_auxbuild_destroy(build);
    return status;
}

/* The arrays of one group. */
static kvf_status_t view_depths(const kvf_auxdata_t *aux, uint32_t set,
                                kvf_attention_depth_t *depths, kvf_detail_t *detail) {
    static const kvf_aux_array_t arrays[] = {KVF_AUX_PAGE_INDPTR, KVF_AUX_PAGE_INDICES,
                                             KVF_AUX_LENGTH_INFO, KVF_AUX_K_ROPE_POS_OFFSET};
    enum { N_ARRAYS = sizeof(arrays) / sizeof(arrays[0]) };
    for (uint32_t d = 0; d < N_DEPTHS; d++) {
        kvf_aux_view_t views[N_ARRAYS];
        for (size_t i = 0; i < N_ARRAYS; i++) {
            kvf_aux_key_t key = {arrays[i], set, d};
            kvf_status_t status = kvf_aux_view(aux, key, &views[i], detail);
            if (status != KVF_OK) {
                return status;
            }
        }
        depths[d] = (kvf_attention_depth_t){views[0].device, views[1].device, views[2].device,
                                            views[3].device, views[1].n};
    }
    return KVF_OK;
}

static kvf_status_t attend_group(const kvf_judge_step_t *step, uint32_t g, const kvf_auxdata_t *aux,
                                 float *q, float *got, kvf_detail_t *detail) {
    const kvf_layer_group_t *group = &step->layout->groups[g];
    kvf_attention_depth_t depths[N_DEPTHS];
    kvf_attention_t attention = {.pool = step->pools[g].base,
                                 .n_slots = step->pools[g].n_slots,
                                 .n_seqs = 1,
                                 .n_depths = N_DEPTHS,
                                 .depths = depths};
    kvf_status_t status = shape_of(group, &attention.shape, detail);
    if (status == KVF_OK) {
        status = view_depths(aux, kvf_auxbuild_set(step->layout, g), depths, detail);
    }
    for (uint32_t l = 0; status == KVF_OK && l < group->n_layers; l++) {
        kvf_detail_t cause;
        attention.layer_idx = l;
        make_queries(group, step->content, step->prompt_tokens, group->layers[l], 0,
                     attention.shape.q_heads, q);
        status = kvf_attention_run(&attention, q, got + l * layer_floats(group), &cause);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "group %s: %s", group->name, cause.text);
        }
    }
    return status;
}

static kvf_status_t check_prompt(int64_t prompt_tokens, kvf_detail_t *detail) {
    return prompt_tokens > 0
               ? KVF_OK
               : kvf_fail(detail, KVF_ERR_INVALID,
                          "a prompt of %" PRId64 " tokens has no first decode step", prompt_tokens);
}

/* What the largest group needs: pages of a list, and floats of a layer's queries. */
static kvf_status_t needs(const kvf_judge_step_t *step, kvf_aux_limits_t *limits_p,
                          size_t *q_floats_p, kvf_detail_t *detail) {
    uint64_t q_floats = 0;
    int64_t n_pages = 0;
    kvf_status_t status = check_prompt(step->prompt_tokens, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (step->prompt_tokens >= INT32_MAX) {
        return kvf_fail(detail, KVF_ERR_RANGE,
                        "a step of %" PRId64 " tokens; positions are of 31 bits",
                        step->prompt_tokens);
    }
    for (uint32_t g = 0; g < step->layout->n_groups; g++) {
        const kvf_layer_group_t *group = &step->layout->groups[g];
        int64_t n = kvf_div_ceil(step->prompt_tokens + 1, group->tokens_per_block);
        uint64_t q = (uint64_t)group->kv_heads * share_of(group) * group->head_dim;
        n_pages = n > n_pages ? n : n_pages;
        q_floats = q > q_floats ? q : q_floats;
    }
    *limits_p = (kvf_aux_limits_t){.max_seqs = 1,
                                   .max_pages = (uint32_t)n_pages,
                                   .max_chunk = 1,
                                   .max_depth = N_DEPTHS,
                                   .n_sliding = kvf_auxbuild_n_sliding(step->layout)};
    *q_floats_p = q_floats;
    return KVF_OK;
}

kvf_status_t kvf_judge_attend(const kvf_judge_step_t *step, const kvf_alloc_t *alloc, float *got,
                              kvf_detail_t *detail) {
    kvf_aux_config_t config = {.manager = step->cached_aux ? KVF_AUX_CACHED : KVF_AUX_PLAIN,
                               .memory = kvf_mem_host()};
    size_t q_floats = 0;
    kvf_auxdata_t *aux;
    kvf_status_t status = needs(step, &config.limits, &q_floats, detail);
    if (status == KVF_OK) {
        status = append(step, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    float *q = kvf_realloc(alloc, NULL, q_floats, sizeof(*q));
    if (q == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the queries of a step");
    }
    status = kvf_aux_create(&config, alloc, &aux, detail);
    if (status != KVF_OK) {
        goto err_queries;
    }
    status = make_aux(step, &config.limits, alloc, aux, detail);
    for (uint32_t g = 0; status == KVF_OK && g < step->layout->n_groups; g++) {
        status = attend_group(step, g, aux, q, got, detail);
        got += step->layout->groups[g].n_layers * layer_floats(&step->layout->groups[g]);
    }
    kvf_aux_destroy(aux);
err_queries:
    kvf_free(alloc, q);
    return status;
}

/* The other side */

/* What the query sees of a group: [first, L), and in front of it [0, sinks). */
static void see(const kvf_layer_group_t *group, int64_t prompt_tokens, int64_t *sinks_p,
                int64_t *first_p) {
    int64_t n_tokens = prompt_tokens + 1;
    *first_p = group->window == 0 || group->window >= n_tokens ? 0 : n_tokens - group->window;
    *sinks_p = group->sinks < *first_p ? group->sinks : *first_p;
}

/* A KV head in one layer of a request. */
typedef struct place {
    const kvf_layer_group_t *group;
    const kvf_content_t *content;
    int64_t prompt_tokens;
    uint32_t layer;
    uint32_t kv_head;
} place_t;

static void add_rows(kvf_attention_head_t *head, const place_t *at, int64_t first, int64_t end) {
    uint8_t k[KVF_ATTENTION_MAX_DIM * sizeof(float)], v[sizeof(k)];
    bool has_v = at->group->kv_factor > 1;
    for (int64_t p = first; p < end; p++) {
        kvf_synthetic_row(at->group, at->content, at->prompt_tokens, p, at->layer, 0, at->kv_head,
                          k);
        if (has_v) {
            kvf_synthetic_row(at->group, at->content, at->prompt_tokens, p, at->layer, 1,
                              at->kv_head, v);
        }
        kvf_attention_add(head, p, k, has_v ? v : k);
    }
}

static void expect_head(const place_t *at, const kvf_attention_shape_t *shape, float *want) {
    float q[MAX_SHARE * KVF_ATTENTION_MAX_DIM];
    uint32_t share = share_of(at->group);
    kvf_attention_head_t head;
    int64_t sinks, first;
    see(at->group, at->prompt_tokens, &sinks, &first);
    make_queries(at->group, at->content, at->prompt_tokens, at->layer, at->kv_head * share, share,
                 q);
    kvf_attention_begin(&head, shape, q, want);
    add_rows(&head, at, 0, sinks);
    add_rows(&head, at, first, at->prompt_tokens + 1);
    kvf_attention_end(&head);
}

kvf_status_t kvf_judge_expect(const kvf_layout_t *layout, const kvf_content_t *content,
                              int64_t prompt_tokens, float *want, kvf_detail_t *detail) {
    kvf_status_t status = check_prompt(prompt_tokens, detail);
    for (uint32_t g = 0; status == KVF_OK && g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        kvf_attention_shape_t shape;
        status = shape_of(group, &shape, detail);
        for (uint32_t l = 0; status == KVF_OK && l < group->n_layers; l++) {
            for (uint32_t h = 0; h < group->kv_heads; h++) {
                const place_t at = {group, content, prompt_tokens, group->layers[l], h};
                expect_head(&at, &shape, want);
                want += (size_t)(shape.q_heads / shape.kv_heads) * shape.value_dim;
            }
        }
    }
    return status;
}

/* The judgement */

static void compare_head(const kvf_layer_group_t *group, uint32_t layer, uint32_t kv_head,
                         const float *got, const float *want, kvf_judgement_t *judgement) {
    double distance = kvf_attention_distance(got, want, share_of(group), value_dim_of(group));
    judgement->distance = distance > judgement->distance ? distance : judgement->distance;
    if (judgement->same && distance > KVF_ATTENTION_TOLERANCE) {
        judgement->same = false;
        judgement->first.group = group->name;
        judgement->first.layer = layer;
        judgement->first.kv_head = kv_head;
        judgement->first.distance = distance;
    }
}

kvf_judgement_t kvf_judge_compare(const kvf_layout_t *layout, int64_t prompt_tokens,
                                  const float *got, const float *want) {
    kvf_judgement_t judgement = {.same = true};
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        uint64_t n = (uint64_t)share_of(group) * value_dim_of(group);
        int64_t sinks, first;
        see(group, prompt_tokens, &sinks, &first);
        judgement.n_layers += group->n_layers;
        judgement.n_tokens += group->n_layers * (sinks + prompt_tokens + 1 - first);
        for (uint32_t l = 0; l < group->n_layers; l++) {
            for (uint32_t h = 0; h < group->kv_heads; h++, got += n, want += n) {
                compare_head(group, group->layers[l], h, got, want, &judgement);
            }
        }
    }
    return judgement;
}

kvf_status_t kvf_judge_run(const kvf_judge_step_t *step, const kvf_alloc_t *alloc,
                           kvf_judgement_t *judgement_p, kvf_detail_t *detail) {
    uint64_t n;
    kvf_status_t status = kvf_judge_floats(step->layout, &n, detail);
    if (status != KVF_OK) {
        return status;
    }
    float *got = kvf_realloc(alloc, NULL, n, 2 * sizeof(*got));
    if (got == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the results of a step");
    }
    float *want = got + n;
    status = kvf_judge_attend(step, alloc, got, detail);
    if (status == KVF_OK) {
        status = kvf_judge_expect(step->layout, step->content, step->prompt_tokens, want, detail);
    }
    if (status == KVF_OK) {
        *judgement_p = kvf_judge_compare(step->layout, step->prompt_tokens, got, want);
    }
    kvf_free(alloc, got);
    return status;
}

static json_t *distance_json(double distance) {
    return isfinite(distance) ? json_real(distance) : json_null();
}

json_t *kvf_judge_json(const kvf_judgement_t *judgement) {
    json_t *object =
        json_pack("{s:I, s:I, s:o}", "layers", (json_int_t)judgement->n_layers, "tokens",
                  (json_int_t)judgement->n_tokens, "distance", distance_json(judgement->distance));
    if (!judgement->same) {
        json_t *first = json_pack("{s:s, s:I, s:I, s:o}", "group", judgement->first.group, "layer",
                                  (json_int_t)judgement->first.layer, "kv_head",
                                  (json_int_t)judgement->first.kv_head, "distance",
                                  distance_json(judgement->first.distance));
        (void)json_object_set_new(object, "first", first);
    }
    return object;
}
