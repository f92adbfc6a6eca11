/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_PRESETS_H
#define KVF_TOOLS_PRESETS_H

/**
 * @file
 * KV cache layouts of known models. Group names are "full", "swa" (sliding window) and "draft".
 */

#include "kvmgr/layout.h"

/** Names of all presets, NULL at the end. */
extern const char *const kvf_preset_names[];

/**
 * @param name              One of kvf_preset_names.
 * @param tokens_per_block  > 0.
 * @param[out] layout_p     A layout that passes kvf_layout_check().
 * @return KVF_OK, KVF_ERR_UNKNOWN (the text names the known ones).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_preset_get(const char *name, uint32_t tokens_per_block,
                                      kvf_layout_t *layout_p, kvf_detail_t *detail);

/** The most layers of a draft model. */
#define KVF_PRESET_MAX_DRAFT_LAYERS 64

/**
 * Add the layers of a draft model: a group "draft" of that role, behind the target's layers, with
 * blocks like those of "full".
 *
 * @param layout    Of kvf_preset_get().
 * @param n_layers  0 (adds nothing) .. KVF_PRESET_MAX_DRAFT_LAYERS.
 * @thread any
 */
void kvf_preset_add_draft(kvf_layout_t *layout, uint32_t n_layers);

#endif
