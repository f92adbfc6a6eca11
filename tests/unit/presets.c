/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/presets.h"

#include <criterion/criterion.h>
#include <string.h>

static kvf_layout_t layout;
static kvf_detail_t detail;

static void get(const char *name, uint32_t tokens_per_block) {
    cr_assert_eq(kvf_preset_get(name, tokens_per_block, &layout, &detail), KVF_OK);
    cr_assert_eq(kvf_layout_check(&layout, &detail), KVF_OK, "%s", detail.text);
}

static void check_layers(const kvf_layer_group_t *group, const uint32_t *layers, uint32_t n) {
    cr_assert_eq(group->n_layers, n, "%s has %u", group->name, group->n_layers);
    cr_assert_eq(memcmp(group->layers, layers, n * sizeof(*layers)), 0, "%s", group->name);
}

/* Block sizes by hand: layers x (k,v) x heads x tokens x dim x 2 bytes. */
Test(presets, gemma_3_270m) {
    static const uint32_t full[] = {5, 11, 17};
    static const uint32_t swa[] = {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16};
    get("gemma-3-270m", 32);
    cr_assert_eq(layout.n_groups, 2);
    cr_assert_str_eq(layout.groups[0].name, "full");
    cr_assert_str_eq(layout.groups[1].name, "swa");
    check_layers(&layout.groups[0], full, 3);
    check_layers(&layout.groups[1], swa, 15);
    cr_assert_eq(layout.groups[0].window, 0);
    cr_assert_eq(layout.groups[1].window, 512);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[0]), 98304);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[1]), 491520);
}

Test(presets, gpt_oss_20b) {
    static const uint32_t full[] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23};
    static const uint32_t swa[] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22};
    get("gpt-oss-20b", 64);
    cr_assert_eq(layout.n_groups, 2);
    check_layers(&layout.groups[0], full, 12);
    check_layers(&layout.groups[1], swa, 12);
    cr_assert_eq(layout.groups[0].window, 0);
    cr_assert_eq(layout.groups[1].window, 128);
    cr_assert_eq(layout.groups[1].sinks, 0);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[0]), 1572864);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[1]), 1572864);
}

Test(presets, llama_3_1_8b) {
    get("llama-3.1-8b", 16);
    cr_assert_eq(layout.n_groups, 1);
    cr_assert_str_eq(layout.groups[0].name, "full");
    cr_assert_eq(layout.groups[0].n_layers, 32);
    cr_assert_eq(layout.groups[0].layers[31], 31);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[0]), 2097152);
}

Test(presets, mla_deepseek_v3) {
    get("mla-deepseek-v3", 128);
    cr_assert_eq(layout.n_groups, 1);
    cr_assert_eq(layout.groups[0].n_layers, 61);
    cr_assert_eq(layout.groups[0].kv_factor, 1);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[0]), 8994816);
}

Test(presets, all_names_work_and_all_are_bf16) {
    for (size_t i = 0; kvf_preset_names[i] != NULL; i++) {
        get(kvf_preset_names[i], 32);
        for (uint32_t g = 0; g < layout.n_groups; g++) {
            cr_assert_eq(layout.groups[g].dtype, KVF_DTYPE_BF16);
            cr_assert_eq(layout.groups[g].tokens_per_block, 32);
        }
    }
}

Test(presets, draft_layers_lie_behind_the_targets) {
    static const uint32_t layers[] = {18, 19, 20};
    get("gemma-3-270m", 32);
    kvf_preset_add_draft(&layout, 0);
    cr_assert_eq(layout.n_groups, 2);
    kvf_preset_add_draft(&layout, 3);
    cr_assert_eq(kvf_layout_check(&layout, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(layout.n_groups, 3);
    cr_assert_str_eq(layout.groups[2].name, "draft");
    cr_assert_eq(layout.groups[2].role, KVF_GROUP_DRAFT);
    cr_assert_eq(layout.groups[0].role, KVF_GROUP_TARGET);
    check_layers(&layout.groups[2], layers, 3);
    cr_assert_eq(layout.groups[2].window, 0);
    cr_assert_eq(kvf_group_block_bytes(&layout.groups[2]), 98304);
    for (size_t i = 0; kvf_preset_names[i] != NULL; i++) {
        get(kvf_preset_names[i], 16);
        kvf_preset_add_draft(&layout, KVF_PRESET_MAX_DRAFT_LAYERS);
        cr_assert_eq(kvf_layout_check(&layout, &detail), KVF_OK, "%s", detail.text);
    }
}

Test(presets, an_unknown_name_names_the_known_ones) {
    layout.n_groups = 77;
    cr_assert_eq(kvf_preset_get("llama", 32, &layout, &detail), KVF_ERR_UNKNOWN);
    cr_assert_eq(layout.n_groups, 77);
    for (size_t i = 0; kvf_preset_names[i] != NULL; i++) {
        cr_assert_not_null(strstr(detail.text, kvf_preset_names[i]), "%s", detail.text);
    }
}
