/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/presets.h"

#include <stdio.h>
#include <string.h>

/* Sources: config.json of the models on huggingface.co; torch_dtype is bfloat16 in all of them. */
static const struct preset {
    uint32_t n_layers;
    uint32_t full_period; /* layers i with i % full_period == full_period - 1 are full */
    int64_t window;       /* of the others */
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t kv_factor;
} presets[] = {
    /* google/gemma-3-270m: num_hidden_layers 18, layer_types: every sixth full, sliding_window 512,
     * num_key_value_heads 1, head_dim 256. */
    {18, 6, 512, 1, 256, 2},

    /* openai/gpt-oss-20b: num_hidden_layers 24, layer_types: sliding and full in turn,
     * sliding_window 128, num_key_value_heads 8, head_dim 64. */
    {24, 2, 128, 8, 64, 2},

    /* meta-llama/Llama-3.1-8B: num_hidden_layers 32, num_key_value_heads 8,
     * hidden_size 4096 / num_attention_heads 32. */
    {32, 1, 0, 8, 128, 2},

    /* deepseek-ai/DeepSeek-V3: num_hidden_layers 61; MLA caches kv_lora_rank 512 and
     * qk_rope_head_dim 64 elements of a token. */
    {61, 1, 0, 1, 576, 1},
};

const char *const kvf_preset_names[] = {"gemma-3-270m", "gpt-oss-20b", "llama-3.1-8b",
                                        "mla-deepseek-v3", NULL};

static void add_group(const struct preset *preset, uint32_t tokens_per_block, bool full,
                      kvf_layout_t *layout) {
    kvf_layer_group_t *group = &layout->groups[layout->n_groups];
    for (uint32_t i = 0; i < preset->n_layers; i++) {
        if ((i % preset->full_period == preset->full_period - 1) == full) {
            group->layers[group->n_layers++] = i;
        }
    }
    if (group->n_layers == 0) {
        return;
    }
    (void)snprintf(group->name, sizeof(group->name), "%s", full ? "full" : "swa");
    group->window = full ? 0 : preset->window;
    group->tokens_per_block = tokens_per_block;
    group->kv_heads = preset->kv_heads;
    group->head_dim = preset->head_dim;
    group->kv_factor = preset->kv_factor;
    group->dtype = KVF_DTYPE_BF16;
    group->order = KVF_ORDER_HND;
    group->kind = KVF_GROUP_PAGED;
    group->role = KVF_GROUP_TARGET;
    layout->n_groups++;
}

kvf_status_t kvf_preset_get(const char *name, uint32_t tokens_per_block, kvf_layout_t *layout_p,
                            kvf_detail_t *detail) {
    char known[128] = "";
    size_t used = 0;
    for (size_t i = 0; kvf_preset_names[i] != NULL; i++) {
        if (strcmp(kvf_preset_names[i], name) == 0) {
            memset(layout_p, 0, sizeof(*layout_p));
            add_group(&presets[i], tokens_per_block, true, layout_p);
            add_group(&presets[i], tokens_per_block, false, layout_p);
            return KVF_OK;
        }
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i == 0 ? "" : ", ",
                                 kvf_preset_names[i]);
    }
    return kvf_fail(detail, KVF_ERR_UNKNOWN, "model.preset: %.64s is unknown; known are %s", name,
                    known);
}

void kvf_preset_add_draft(kvf_layout_t *layout, uint32_t n_layers) {
    kvf_layer_group_t *draft = &layout->groups[layout->n_groups];
    uint32_t first = 0;
    if (n_layers == 0) {
        return;
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        first += layout->groups[g].n_layers;
    }
    *draft = layout->groups[0]; /* "full": every preset has it */
    (void)snprintf(draft->name, sizeof(draft->name), "draft");
    draft->role = KVF_GROUP_DRAFT;
    draft->n_layers = n_layers;
    memset(draft->layers, 0, sizeof(draft->layers));
    for (uint32_t i = 0; i < n_layers; i++) {
        draft->layers[i] = first + i;
    }
    layout->n_groups++;
}
