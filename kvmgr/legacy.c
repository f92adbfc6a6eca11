/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/legacy.h"

#include <inttypes.h>
#include <string.h>

static int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Entry i is ordinal i. */
static kvf_status_t locate_chain(const kvf_legacy_list_t *list, const kvf_block_counts_t *counts,
                                 kvf_legacy_run_t *run_p, kvf_detail_t *detail) {
    /* One more than allocated: the block of the first generated token may be listed already. */
    if (list->n_ids > counts->alloc_blocks + 1) {
        return kvf_fail(detail, KVF_ERR_COUNT_MISMATCH,
                        "a chain of %" PRId64 " blocks, but the request allocates %" PRId64
                        " (and one for the first token); its list belongs to another request",
                        list->n_ids, counts->alloc_blocks);
    }
    int64_t end = min_i64(list->n_ids, counts->prompt_blocks);
    int64_t removed = list->has_front_removed ? min_i64(list->front_removed, end) : 0;
    *run_p = (kvf_legacy_run_t){.entry = removed, .ordinal = removed, .count = end - removed};
    return KVF_OK;
}

/* The last entry that is not scratch is the prompt's last block. */
static kvf_status_t locate_resident(const kvf_legacy_list_t *list, const kvf_block_counts_t *counts,
                                    int64_t sinks, kvf_span_t stale, kvf_legacy_run_t *run_p,
                                    kvf_detail_t *detail) {
    if (sinks > 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "a list of resident blocks cannot describe a window with sinks; give "
                        "ordinals");
    }
    int64_t expected = counts->prompt_blocks - stale.end;
    int64_t surplus = max_i64(0, list->n_ids - expected);
    int64_t scratch = min_i64(counts->scratch_blocks, surplus);
    int64_t front = surplus - scratch;
    if (front > stale.end) {
        return kvf_fail(detail, KVF_ERR_COUNT_MISMATCH,
                        "a list of %" PRId64
                        " resident blocks, but the request explains at most %" PRId64
                        " live, %" PRId64 " scratch and %" PRId64 " behind the window",
                        list->n_ids, expected, counts->scratch_blocks, stale.end);
    }
    int64_t count = list->n_ids - scratch - front;
    *run_p = (kvf_legacy_run_t){
        .entry = front, .ordinal = counts->prompt_blocks - count, .count = count};
    return KVF_OK;
}

kvf_status_t kvf_legacy_locate(const kvf_legacy_list_t *list, const kvf_block_counts_t *counts,
                               int64_t window, int64_t sinks, kvf_span_t stale,
                               kvf_legacy_run_t *run_p, kvf_detail_t *detail) {
    if (list->has_front_removed && list->front_removed < 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "front_removed is %" PRId64 "; give the count of blocks removed in front",
                        list->front_removed);
    }
    for (int64_t i = 0; i < list->n_ids; i++) {
        if (list->ids[i] < 0) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "entry %" PRId64 " of a list of block ids is %" PRId32
                            "; such a list has no placeholders, give ordinals",
                            i, list->ids[i]);
        }
    }
    if (list->has_front_removed || window == 0) {
        return locate_chain(list, counts, run_p, detail);
    }
    return locate_resident(list, counts, sinks, stale, run_p, detail);
}

void kvf_legacy_fill(const kvf_legacy_list_t *list, const kvf_legacy_run_t *run, int32_t *slots) {
    for (int64_t i = 0; i < run->ordinal; i++) {
        slots[i] = -1;
    }
    if (run->count > 0) {
        memcpy(slots + run->ordinal, list->ids + run->entry, (size_t)run->count * sizeof(*slots));
    }
}
