/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_SYNTHETIC_H
#define KVF_TOOLS_NODE_SYNTHETIC_H

/**
 * @file
 * The synthetic engine: it writes pages whose every element is a pure function of (content of its
 * piece of the prompt, token position, global layer, k or v, head, dim), and checks pages against
 * it. Pages of one content look alike on every request; all of it goes into every aligned 8 bytes,
 * so pages of another content, layer or position differ everywhere. Values are finite numbers of
 * moderate size in every dtype. Pure functions; any thread.
 */

#include "kvmgr/layout.h"

#include <stddef.h>

/** Tokens of a piece of a prompt: what one hash id of a trace stands for. */
#define KVF_PIECE_TOKENS 512

/** What a prompt holds, piece by piece. */
typedef struct kvf_content {
    const int64_t
        *ids; /**< one per piece, borrowed; NULL: pieces are told apart by seed and number */
    int64_t n_ids;
    uint64_t seed;
} kvf_content_t;

/** A wrong element. */
typedef struct kvf_mismatch {
    int64_t ordinal;
    uint32_t layer; /**< global id */
    uint32_t kv;    /**< 0 = k, 1 = v */
    uint32_t head;
    int64_t token; /**< position in the request; >= prompt_tokens: a tail that is not zero */
    uint32_t dim;
} kvf_mismatch_t;

/** @return A seed for a request that says nothing about its content. */
uint64_t kvf_content_seed(const char *request_id);

/**
 * Ids of the pieces of a prompt out of its tokens; each depends on all tokens up to its end.
 *
 * @param[out] ids  Room for ceil(n_tokens / KVF_PIECE_TOKENS). Below 2^53: JSON readers keep them
 * exactly.
 */
void kvf_content_from_tokens(const int32_t *tokens, int64_t n_tokens, int64_t *ids);

/** @return The token that the synthetic model says at a position >= the prompt's length, 0 ..
 * 32767. */
int32_t kvf_synthetic_token(const kvf_content_t *content, int64_t prompt_tokens, int64_t position);

/**
 * Write layers of one page; tokens beyond the prompt become zero.
 *
 * @param group          A checked group.
 * @param prompt_tokens  <= KVF_PIECE_TOKENS * content->n_ids when the content has ids.
 * @param ordinal        The page holds tokens [ordinal * t, (ordinal + 1) * t).
 * @param first_idx, end_idx  Local layers of the group.
 * @param page           kvf_group_block_bytes(), 8-byte aligned.
 */
void kvf_synthetic_fill(const kvf_layer_group_t *group, const kvf_content_t *content,
                        int64_t prompt_tokens, int64_t ordinal, uint32_t first_idx,
                        uint32_t end_idx, void *page);

/**
 * Make one row (head vector) of the contiguous KV, without any page: of the prompt, or of a
 * generated token, whose rows follow from its number (kvf_synthetic_token()) and its position.
 *
 * @param position   >= 0; from prompt_tokens on: generated.
 * @param layer      Global id.
 * @param kv         0 = k, 1 = v.
 * @param[out] row   head_dim elements, any alignment.
 */
void kvf_synthetic_row(const kvf_layer_group_t *group, const kvf_content_t *content,
                       int64_t prompt_tokens, int64_t position, uint32_t layer, uint32_t kv,
                       uint32_t head, void *row);

/**
 * Write the rows of one token, in all layers, into the page of its block.
 *
 * @param position  As kvf_synthetic_row().
 */
void kvf_synthetic_append(const kvf_layer_group_t *group, const kvf_content_t *content,
                          int64_t prompt_tokens, int64_t position, void *page);

/** Make the rows of one token zero, in all layers of its page. */
void kvf_synthetic_erase(const kvf_layer_group_t *group, int64_t position, void *page);

/**
 * Write the tokens [first_token, end_token) of the prompt that lie in a page. What lies in front of
 * them stays; what lies behind becomes zero. Else as kvf_synthetic_fill(), which is the case of
 * [0, prompt_tokens).
 */
void kvf_synthetic_fill_tokens(const kvf_layer_group_t *group, const kvf_content_t *content,
                               int64_t first_token, int64_t end_token, int64_t ordinal,
                               uint32_t first_idx, uint32_t end_idx, void *page);

/**
 * Compare a whole page with what kvf_synthetic_fill() would write.
 *
 * @param[out] first_p  The first wrong element in memory order, untouched when there is none.
 * @return How many bytes differ.
 */
uint64_t kvf_synthetic_check(const kvf_layer_group_t *group, const kvf_content_t *content,
                             int64_t prompt_tokens, int64_t ordinal, const void *page,
                             kvf_mismatch_t *first_p);

#endif
