/* SPDX-License-Identifier: Apache-2.0 */
/* Pages that are not right: each is found, in the group where it is. */
#include "../support/judged.h"

#include "kernels/attention.h"

typedef enum mutant { ALIASED, SWAPPED, SHIFTED, FOREIGN, STALE_TAIL, N_MUTANTS } mutant_t;

static void mutate(request_t *r, uint32_t g, mutant_t mutant) {
    const kvf_layer_group_t *group = &r->layout.groups[g];
    int32_t *slots = r->slots[g];
    int64_t last = r->prompt / group->tokens_per_block, a = last - 2, b = last - 1;
    int32_t kept = slots[a];
    switch (mutant) {
    case ALIASED:
        slots[a] = slots[b];
        break;
    case SWAPPED:
        slots[a] = slots[b];
        slots[b] = kept;
        break;
    case SHIFTED: /* as a list without its first block; the last page is another one */
        memmove(slots, slots + 1, (size_t)last * sizeof(*slots));
        slots[last] = r->spare[g][0];
        memset(page_at(r, g, slots[last]), 0, kvf_group_block_bytes(group));
        break;
    case FOREIGN:
        kvf_synthetic_fill(group, &stranger, r->prompt, a, 0, group->n_layers, page_of(r, g, a));
        break;
    default: /* the page was written before its last token was there */
        kvf_synthetic_fill(group, &r->content, last * group->tokens_per_block - 1, b, 0,
                           group->n_layers, page_of(r, g, b));
        break;
    }
}

Test(judge_mutants, names_the_group_of_a_mutant) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    for (int i = 0; i < 4 * N_MUTANTS; i++) {
        uint32_t g = (uint32_t)i % 4;
        request_t *r = open_request(&layout, 47, true, &random);
        mutate(r, g, (mutant_t)(i / 4));
        for (int cached = 0; cached < 2; cached++) {
            kvf_judgement_t judgement = judge(r, cached);
            cr_assert(!judgement.same, "mutant %d of group %u is not seen", i / 4, g);
            cr_assert_str_eq(judgement.first.group, layout.groups[g].name, "mutant %d", i / 4);
            cr_assert_eq(judgement.first.layer, layout.groups[g].layers[0]);
            cr_assert_eq(judgement.first.kv_head, 0);
            cr_assert_gt(judgement.first.distance, KVF_ATTENTION_TOLERANCE);
            cr_assert_geq(judgement.distance, judgement.first.distance);
        }
        close_request(r);
    }
}

Test(judge_mutants, names_layer_and_head_of_a_byte) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    for (int i = 0; i < 200; i++) {
        uint32_t g = (uint32_t)i % 4;
        const kvf_layer_group_t *group = &layout.groups[g];
        request_t *r = open_request(&layout, 47, true, &random);
        int64_t position = test_between(&random, 0, 46);
        uint32_t l = (uint32_t)test_between(&random, 0, 1),
                 kv = (uint32_t)test_between(&random, 0, group->kv_factor - 1),
                 head = (uint32_t)test_between(&random, 0, group->kv_heads - 1),
                 dim = (uint32_t)test_between(&random, 0, group->head_dim - 1),
                 bytes = kvf_dtype_bytes(group->dtype);
        /* Sign and top of the exponent become others. */
        page_of(r, g, position / group->tokens_per_block)
            [kvf_group_offset(group, l, kv, head, (uint32_t)position % group->tokens_per_block) +
             (dim + 1) * bytes - 1] ^= 0xc0;
        kvf_judgement_t judgement = judge(r, i % 8 < 4);
        cr_assert_eq(judgement.same, !sees(group, 47, position), "group %s, position %d: %g",
                     group->name, (int)position, judgement.distance);
        if (!judgement.same) {
            cr_assert_str_eq(judgement.first.group, group->name);
            cr_assert_eq(judgement.first.layer, group->layers[l]);
            cr_assert_eq(judgement.first.kv_head, head);
        }
        close_request(r);
    }
}

Test(judge_mutants, names_the_group_of_a_wrong_window_or_sink) {
    kvf_layout_t layout = four_groups();
    test_random_t random = test_random("judge");
    request_t *r = open_request(&layout, 47, true, &random);
    float *want = result(r, NULL);
    for (int i = 0; i < 6; i++) {
        kvf_layout_t wrong = layout;
        kvf_layer_group_t *group = &wrong.groups[i < 4 ? 1 + i / 2 : 1];
        group->window += i >= 4 ? 0 : i % 2 == 0 ? 1 : -1;
        group->sinks += i < 4 ? 0 : i % 2 == 0 ? 1 : -1;
        float *got = result(r, &wrong);
        kvf_judgement_t judgement = kvf_judge_compare(&layout, r->prompt, got, want);
        cr_assert(!judgement.same);
        cr_assert_str_eq(judgement.first.group, group->name, "row %d", i);
        free(got);
    }
    free(want);
    close_request(r);
}

/* One token of a long prompt. */
Test(judge_mutants, sees_one_row_of_many) {
    kvf_layout_t layout = {.n_groups = 1};
    test_random_t random = test_random("judge");
    layout.groups[0] = group_of("full", 0, 0, 0, 16, 1, 32, 2, KVF_DTYPE_BF16);
    request_t *r = open_request(&layout, 2000, true, &random);
    cr_assert(judge(r, true).same);
    kvf_synthetic_erase(&layout.groups[0], 777, page_of(r, 0, 777 / 16));
    kvf_judgement_t judgement = judge(r, true);
    cr_assert(!judgement.same);
    cr_assert_gt(judgement.distance, 10 * KVF_ATTENTION_TOLERANCE);
    close_request(r);
}
