/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/capacity.h"

#include "kvmgr/base/size.h"

#include <inttypes.h>

static kvf_status_t check_number(const char *name, int64_t value, int64_t least,
                                 kvf_detail_t *detail) {
    if (value >= least && value <= KVF_MAX_TOKENS) {
        return KVF_OK;
    }
    return kvf_fail(detail, KVF_ERR_INVALID,
                    "%s is %" PRId64 "; give a number from %" PRId64 " to 2^40", name, value,
                    least);
}

int64_t kvf_prompt_tokens(const kvf_lengths_t *lengths) {
    return lengths->total_input_len_cp != 0 ? lengths->total_input_len_cp : lengths->prompt_len;
}

kvf_status_t kvf_get_kv_capacity_tokens(const kvf_lengths_t *lengths, bool include_drafts,
                                        int64_t *tokens_p, kvf_detail_t *detail) {
    const struct {
        const char *name;
        int64_t value;
        int64_t least;
    } numbers[] = {
        {"prompt_len", lengths->prompt_len, 1},
        {"draft_len", lengths->draft_len, 0},
        {"num_extra_kv_tokens", lengths->num_extra_kv_tokens, 0},
        {"total_input_len_cp", lengths->total_input_len_cp, 0},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        kvf_status_t status =
            check_number(numbers[i].name, numbers[i].value, numbers[i].least, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    int64_t prompt = kvf_prompt_tokens(lengths);
    /* One limit for both sides, so that no request is legal on one of them only. */
    int64_t sum = prompt + lengths->draft_len + lengths->num_extra_kv_tokens;
    if (sum > KVF_MAX_TOKENS) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "prompt, draft_len and num_extra_kv_tokens add up to %" PRId64
                        " tokens; the limit is 2^40",
                        sum);
    }
    *tokens_p = prompt + (include_drafts ? lengths->draft_len : 0) + lengths->num_extra_kv_tokens;
    return KVF_OK;
}

kvf_status_t kvf_get_block_counts(const kvf_lengths_t *lengths, bool include_drafts,
                                  int64_t tokens_per_block, kvf_block_counts_t *counts_p,
                                  kvf_detail_t *detail) {
    int64_t capacity;
    kvf_status_t status = kvf_get_kv_capacity_tokens(lengths, include_drafts, &capacity, detail);
    if (status == KVF_OK) {
        status = check_number("tokens_per_block", tokens_per_block, 1, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    int64_t prompt_blocks = kvf_div_ceil(kvf_prompt_tokens(lengths), tokens_per_block);
    int64_t alloc_blocks = kvf_div_ceil(capacity, tokens_per_block);
    *counts_p = (kvf_block_counts_t){
        .capacity_tokens = capacity,
        .prompt_blocks = prompt_blocks,
        .alloc_blocks = alloc_blocks,
        .scratch_blocks = alloc_blocks - prompt_blocks,
    };
    return KVF_OK;
}

kvf_status_t kvf_check_capacity(const kvf_lengths_t *lengths, bool include_drafts, const char *side,
                                int64_t allocated_tokens, kvf_detail_t *detail) {
    int64_t capacity;
    kvf_status_t status = kvf_get_kv_capacity_tokens(lengths, include_drafts, &capacity, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (allocated_tokens != capacity) {
        return kvf_fail(detail, KVF_ERR_CAPACITY_MISMATCH,
                        "the %s side allocated %" PRId64 " tokens, but the request takes %" PRId64
                        " there; allocate what kvf_get_kv_capacity_tokens gives",
                        side, allocated_tokens, capacity);
    }
    return KVF_OK;
}
