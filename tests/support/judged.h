/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_JUDGED_H
#define KVF_TESTS_JUDGED_H

/**
 * @file
 * Requests in their pages, for the judge of a node.
 */

#include "tools/node/judge.h"

#include "leaks.h"
#include "random.h"

#include <criterion/criterion.h>
#include <string.h>

#define MAX_BLOCKS 160
#define N_SPARE 3 /* slots of a pool that no ordinal has */

/** A request in its pages: prompt blocks in random slots; what nobody wrote are large numbers, or
 * none. */
typedef struct request {
    kvf_layout_t layout;
    kvf_content_t content;
    int64_t prompt;
    int64_t ids[4];
    kvf_judge_pool_t pools[KVF_MAX_GROUPS];
    kvf_table_t tables[KVF_MAX_GROUPS];
    int32_t slots[KVF_MAX_GROUPS][MAX_BLOCKS];
    int32_t spare[KVF_MAX_GROUPS][N_SPARE];
} request_t;

static const kvf_content_t stranger = {NULL, 0, 4711};

/** @return Whether the query behind the prompt sees a position. */
static inline bool sees(const kvf_layer_group_t *group, int64_t prompt, int64_t position) {
    bool in_window = group->window == 0 || prompt - position < group->window;
    return position <= prompt && (in_window || position < group->sinks);
}

/** @return Whether it sees a token of a block. */
static inline bool block_seen(const kvf_layer_group_t *group, int64_t prompt, int64_t ordinal) {
    bool seen = false;
    for (uint32_t i = 0; i < group->tokens_per_block; i++) {
        seen = seen || sees(group, prompt, ordinal * group->tokens_per_block + i);
    }
    return seen;
}

/** @return The bytes of a slot. */
static inline uint8_t *page_at(const request_t *r, uint32_t g, int32_t slot) {
    return (uint8_t *)r->pools[g].base +
           (uint64_t)slot * kvf_group_block_bytes(&r->layout.groups[g]);
}

/** @return The bytes of a block of the request. */
static inline uint8_t *page_of(const request_t *r, uint32_t g, int64_t ordinal) {
    return page_at(r, g, r->slots[g][ordinal]);
}

/** @param all  Bind and fill the blocks, too, that nothing sees. */
static inline request_t *open_request(const kvf_layout_t *layout, int64_t prompt, bool all,
                                      test_random_t *random) {
    request_t *r = calloc(1, sizeof(*r));
    r->layout = *layout;
    r->prompt = prompt;
    for (int i = 0; i < 4; i++) {
        r->ids[i] = test_between(random, 0, INT64_C(1) << 52);
    }
    r->content = (kvf_content_t){r->ids, 4, 0};
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        int32_t order[MAX_BLOCKS + N_SPARE];
        int64_t n = prompt / group->tokens_per_block + 1, n_slots = n + N_SPARE;
        cr_assert_leq(n, MAX_BLOCKS);
        for (int32_t i = 0; i < n_slots; i++) {
            int64_t j = test_between(random, 0, i);
            order[i] = order[j];
            order[j] = i;
        }
        uint64_t bytes = (uint64_t)n_slots * kvf_group_block_bytes(group);
        r->pools[g] = (kvf_judge_pool_t){malloc(bytes), n_slots};
        memset(r->pools[g].base, 0x7f, bytes);
        memcpy(r->spare[g], order + n, sizeof(r->spare[g]));
        for (int64_t i = 0; i < n; i++) {
            r->slots[g][i] = all || block_seen(group, prompt, i) ? order[i] : -1;
            if (r->slots[g][i] >= 0) {
                kvf_synthetic_fill(group, &r->content, prompt, i, 0, group->n_layers,
                                   page_of(r, g, i));
            }
        }
        r->tables[g] = (kvf_table_t){r->slots[g], n};
    }
    return r;
}

/** Free it and its pools. */
static inline void close_request(request_t *r) {
    for (uint32_t g = 0; g < r->layout.n_groups; g++) {
        free(r->pools[g].base);
    }
    free(r);
}

/** @return The step that decodes the first token. */
static inline kvf_judge_step_t step_of(const request_t *r, bool cached) {
    return (kvf_judge_step_t){&r->layout, r->pools, r->tables, cached, &r->content, r->prompt};
}

/** @return What the judge says of the pages; it must be able to. */
static inline kvf_judgement_t judge(const request_t *r, bool cached) {
    kvf_judge_step_t step = step_of(r, cached);
    kvf_judgement_t judgement;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_judge_run(&step, kvf_alloc_default(), &judgement, &detail), KVF_OK, "%s",
                 detail.text);
    return judgement;
}

/** The result of one side, in memory that the caller frees. */
static inline float *result(const request_t *r, const kvf_layout_t *tables_layout) {
    kvf_judge_step_t step = step_of(r, true);
    kvf_detail_t detail = {""};
    uint64_t n;
    cr_assert_eq(kvf_judge_floats(&r->layout, &n, NULL), KVF_OK);
    float *out = malloc(n * sizeof(*out));
    step.layout = tables_layout;
    kvf_status_t status = tables_layout != NULL
                              ? kvf_judge_attend(&step, kvf_alloc_default(), out, &detail)
                              : kvf_judge_expect(&r->layout, &r->content, r->prompt, out, &detail);
    cr_assert_eq(status, KVF_OK, "%s", detail.text);
    return out;
}

/** @return A group of two layers. */
static inline kvf_layer_group_t group_of(const char *name, uint32_t first_layer, int64_t window,
                                         int64_t sinks, uint32_t t, uint32_t heads, uint32_t dim,
                                         uint32_t kv_factor, kvf_dtype_t dtype) {
    kvf_layer_group_t group = {.n_layers = 2,
                               .layers = {first_layer, first_layer + 3},
                               .window = window,
                               .sinks = sinks,
                               .tokens_per_block = t,
                               .kv_heads = heads,
                               .head_dim = dim,
                               .kv_factor = kv_factor,
                               .dtype = dtype,
                               .order = first_layer % 2 == 0 ? KVF_ORDER_HND : KVF_ORDER_NHD};
    (void)strcpy(group.name, name);
    return group;
}

/** GQA without a window, MQA with one and sinks, MLA with another, and a draft model's layers. */
static inline kvf_layout_t four_groups(void) {
    kvf_layout_t layout = {.n_groups = 4};
    layout.groups[0] = group_of("full", 0, 0, 0, 4, 3, 16, 2, KVF_DTYPE_BF16);
    layout.groups[1] = group_of("sinks", 1, 14, 6, 4, 1, 12, 2, KVF_DTYPE_F32);
    layout.groups[2] = group_of("mla", 7, 19, 0, 2, 1, 36, 1, KVF_DTYPE_F16);
    layout.groups[3] = group_of("draft", 20, 0, 0, 8, 2, 8, 2, KVF_DTYPE_F8_E4M3);
    layout.groups[3].role = KVF_GROUP_DRAFT;
    cr_assert_eq(kvf_layout_check(&layout, NULL), KVF_OK);
    return layout;
}

#endif
