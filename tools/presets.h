/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_PRESETS_H
#define KVF_TOOLS_PRESETS_H

/**
 * @file
 * KV cache layouts of known models. Group names are "full" and "swa" (sliding window).
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

#endif
