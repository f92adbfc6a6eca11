/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_LAYOUTS_H
#define KVF_TESTS_LAYOUTS_H

/**
 * @file
 * Layouts for tests of whole agents.
 */

#include "kvmgr/layout.h"

#define T 16 /**< tokens of a block */

/** "full" (layers 0, 2) and "swa" (layer 1) with a window; blocks of T tokens, 64 bf16 a row. */
#define FULL_AND_SWA(window_tokens, n_heads)                                                       \
    {                                                                                              \
        .n_groups = 2, .groups = {                                                                 \
            {.name = "full",                                                                       \
             .n_layers = 2,                                                                        \
             .layers = {0, 2},                                                                     \
             .tokens_per_block = T,                                                                \
             .kv_heads = (n_heads),                                                                \
             .head_dim = 64,                                                                       \
             .kv_factor = 2,                                                                       \
             .dtype = KVF_DTYPE_BF16},                                                             \
            {.name = "swa",                                                                        \
             .n_layers = 1,                                                                        \
             .layers = {1},                                                                        \
             .window = (window_tokens),                                                            \
             .tokens_per_block = T,                                                                \
             .kv_heads = (n_heads),                                                                \
             .head_dim = 64,                                                                       \
             .kv_factor = 2,                                                                       \
             .dtype = KVF_DTYPE_BF16}                                                              \
        }                                                                                          \
    }

#endif
