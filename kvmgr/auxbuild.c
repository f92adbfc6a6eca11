/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/auxbuild.h"

#include "kvmgr/base/size.h"

#include <inttypes.h>
#include <string.h>

/* What is needed of a layer group. */
struct group {
    char name[KVF_GROUP_NAME_BYTES];
    int64_t t;
    int64_t window;
    int64_t sinks;
    uint32_t set;
};

/* The page arrays of one set and depth; row r of length_info starts at n_seqs * r. */
struct list {
    int32_t *page_indptr;
    int32_t *page_indices;
    int32_t *length_info;
    int32_t *rope;
};

struct kvf_auxbuild {
    kvf_alloc_t alloc;
    kvf_aux_limits_t limits;
    uint32_t n_groups;
    uint32_t append_group;
    bool has_set[KVF_MAX_GROUPS + 1]; /* set 0 is empty when all groups have windows */
    struct group groups[KVF_MAX_GROUPS];
    int32_t *elements;   /* all arrays */
    struct list *lists;  /* [set][depth] */
    int32_t *append_ptr; /* R + 1; also qo_indptr of every depth */
    int32_t *ragged;     /* R */
    int32_t *q_rope;     /* K */
    int32_t *append_at;  /* K */
    uint32_t n_seqs;
    bool built;
};

uint32_t kvf_auxbuild_set(const kvf_layout_t *layout, uint32_t group_idx) {
    uint32_t global = 0;
    while (global < layout->n_groups && layout->groups[global].window != 0) {
        global++;
    }
    if (group_idx == global) {
        return 0;
    }
    return group_idx < global ? group_idx + 1 : group_idx;
}

uint32_t kvf_auxbuild_n_sliding(const kvf_layout_t *layout) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < layout->n_groups; i++) {
        n += kvf_auxbuild_set(layout, i) != 0;
    }
    return n;
}

/* Cut the arrays out of one allocation. */
static kvf_status_t reserve(kvf_auxbuild_t *build) {
    const kvf_aux_limits_t *limits = &build->limits;
    const uint32_t n_lists = (1 + limits->n_sliding) * limits->max_depth;
    const uint64_t R = limits->max_seqs, N = limits->max_pages, K = limits->max_chunk;
    uint64_t lists, total;

    if (kvf_mul_u64(n_lists, (R + 1) + N + 3 * R + R, &lists) != KVF_OK ||
        kvf_add_u64(lists, (R + 1) + R + 2 * K, &total) != KVF_OK) {
        return KVF_ERR_NO_MEMORY;
    }
    build->lists = kvf_calloc(&build->alloc, n_lists, sizeof(build->lists[0]));
    build->elements = kvf_calloc(&build->alloc, (size_t)total, sizeof(build->elements[0]));
    if (build->lists == NULL || build->elements == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    int32_t *next = build->elements;
    for (uint32_t i = 0; i < n_lists; i++) {
        struct list *list = &build->lists[i];
        list->page_indptr = next;
        list->page_indices = list->page_indptr + R + 1;
        list->length_info = list->page_indices + N;
        list->rope = list->length_info + 3 * R;
        next = list->rope + R;
    }
    build->append_ptr = next;
    build->ragged = build->append_ptr + R + 1;
    build->q_rope = build->ragged + R;
    build->append_at = build->q_rope + K;
    return KVF_OK;
}

kvf_status_t kvf_auxbuild_create(const kvf_layout_t *layout, const kvf_aux_limits_t *limits,
                                 const kvf_alloc_t *alloc, kvf_auxbuild_t **build_p,
                                 kvf_detail_t *detail) {
    kvf_status_t status = kvf_aux_limits_check(limits, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (limits->n_sliding != kvf_auxbuild_n_sliding(layout)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "aux data: n_sliding is %" PRIu32 ", and the layout needs %" PRIu32,
                        limits->n_sliding, kvf_auxbuild_n_sliding(layout));
    }
    kvf_auxbuild_t *build = kvf_calloc(alloc, 1, sizeof(*build));
    if (build == NULL) {
        goto err_memory;
    }
    build->alloc = *alloc;
    build->limits = *limits;
    build->n_groups = layout->n_groups;
    for (uint32_t i = 0; i < layout->n_groups; i++) {
        const kvf_layer_group_t *from = &layout->groups[i];
        struct group *group = &build->groups[i];
        memcpy(group->name, from->name, sizeof(group->name));
        group->t = from->tokens_per_block;
        group->window = from->window;
        group->sinks = from->sinks;
        group->set = kvf_auxbuild_set(layout, i);
        build->has_set[group->set] = true;
        if (group->set == 0) {
            build->append_group = i;
        }
    }
    if (reserve(build) != KVF_OK) {
        kvf_auxbuild_destroy(build);
        goto err_memory;
    }
    *build_p = build;
    return KVF_OK;

err_memory:
    return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for an aux data builder");
}

void kvf_auxbuild_destroy(kvf_auxbuild_t *build) {
    if (build != NULL) {
        kvf_alloc_t alloc = build->alloc;
        kvf_free(&alloc, build->elements);
        kvf_free(&alloc, build->lists);
        kvf_free(&alloc, build);
    }
}

static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
}

static struct list *list_of(const kvf_auxbuild_t *build, uint32_t set, uint32_t depth) {
    return &build->lists[set * build->limits.max_depth + depth];
}

static kvf_status_t check_seq(const kvf_auxbuild_t *build, uint32_t r, const kvf_aux_seq_t *seq,
                              kvf_detail_t *detail) {
    if (seq->n_tokens > INT32_MAX) {
        return kvf_fail(detail, KVF_ERR_RANGE,
                        "sequence %" PRIu32 ": %" PRId64 " tokens; positions are of 31 bits", r,
                        seq->n_tokens);
    }
    if (seq->n_query_tokens < 1 || seq->n_query_tokens > seq->n_tokens) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "sequence %" PRIu32 ": %" PRId64 " query tokens of %" PRId64 " tokens", r,
                        seq->n_query_tokens, seq->n_tokens);
    }
    int64_t before = 0;
    for (uint32_t i = 0; i < seq->n_prefixes; i++) {
        const int64_t end = seq->prefix_ends[i];
        if (end < before || end > seq->n_tokens - seq->n_query_tokens) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "sequence %" PRIu32 ": shared prefix %" PRIu32 " ends at %" PRId64
                            ", not between %" PRId64 " and %" PRId64,
                            r, i, end, before, seq->n_tokens - seq->n_query_tokens);
        }
        for (uint32_t g = 0; g < build->n_groups; g++) {
            if (end % build->groups[g].t != 0) {
                return kvf_fail(detail, KVF_ERR_INVALID,
                                "sequence %" PRIu32 ", group %s: shared prefix %" PRIu32
                                " of %" PRId64 " tokens ends inside a block of %" PRId64,
                                r, build->groups[g].name, i, end, build->groups[g].t);
            }
        }
        before = end;
    }
    return KVF_OK;
}

/* Append the slots of ordinals [first, end) to a list. */
static kvf_status_t add_slots(const struct group *group, const kvf_table_t *table, int64_t first,
                              int64_t end, uint32_t r, int32_t *slots, kvf_detail_t *detail) {
    for (int64_t i = first; i < end; i++) {
        int32_t slot = i < table->n_blocks ? table->slots[i] : -1;
        if (slot < -1) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "sequence %" PRIu32 ", group %s: ordinal %" PRId64 " has slot %" PRId32,
                            r, group->name, i, slot);
        }
        if (slot == -1) {
            return kvf_fail(detail, KVF_ERR_UNCOVERED,
                            "sequence %" PRIu32 ", group %s: ordinal %" PRId64
                            " has no page, and attention reads it",
                            r, group->name, i);
        }
        slots[i - first] = slot;
    }
    return KVF_OK;
}

/* Row r of one group and depth, which holds the tokens [start, end); start is the edge of a
 * block. */
static kvf_status_t add_row(kvf_auxbuild_t *build, const struct group *group,
                            const kvf_table_t *table, uint32_t r, const kvf_aux_seq_t *seq,
                            uint32_t depth, int64_t start, int64_t end, kvf_detail_t *detail) {
    struct list *list = list_of(build, group->set, depth);
    const int64_t t = group->t;
    int64_t window_first = start, sinks_end = start;
    if (group->window > 0) {
        const int64_t unseen = clamp(seq->n_tokens - group->window, 0, seq->n_tokens);
        window_first = clamp(unseen, start, end);
        sinks_end = clamp(group->sinks < unseen ? group->sinks : unseen, start, end);
    }
    /* A page that ends the sinks and starts the window is listed once. A window that starts behind
     * a depth leaves no block: all depths but the last end at the edge of one. */
    const int64_t first_block = start / t, sink_block_end = kvf_div_ceil(sinks_end, t);
    const int64_t window_block =
        window_first / t > sink_block_end ? window_first / t : sink_block_end;
    const int64_t block_end = kvf_div_ceil(end, t);
    const int64_t n_sink_blocks = sink_block_end - first_block;
    const int64_t n_blocks = n_sink_blocks + block_end - window_block;

    const int32_t used = list->page_indptr[r];
    if (n_blocks > (int64_t)build->limits.max_pages - used) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "sequence %" PRIu32 ", group %s: %" PRId64 " pages at depth %" PRIu32
                        " after %" PRId32 ", and room for %" PRIu32,
                        r, group->name, n_blocks, depth, used, build->limits.max_pages);
    }
    int32_t *slots = list->page_indices + used;
    kvf_status_t status = add_slots(group, table, first_block, sink_block_end, r, slots, detail);
    if (status == KVF_OK) {
        status = add_slots(group, table, window_block, block_end, r, slots + n_sink_blocks, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    /* No number here exceeds L: the list leaves blocks out, it adds none. */
    const int64_t last_tokens = window_first < end ? end - (block_end - 1) * t : t;
    int32_t *info = list->length_info + r;
    info[0] = n_blocks == 0 ? 0 : (int32_t)last_tokens;
    info[build->n_seqs] = (int32_t)(n_sink_blocks * t + window_first - window_block * t);
    info[2 * (size_t)build->n_seqs] = (int32_t)(sinks_end - start);
    list->rope[r] = (int32_t)window_first;
    list->page_indptr[r + 1] = used + (int32_t)n_blocks;
    return KVF_OK;
}

/* Where the step's own tokens are, and where they go. */
static kvf_status_t add_queries(kvf_auxbuild_t *build, uint32_t r, const kvf_aux_seq_t *seq,
                                kvf_detail_t *detail) {
    const struct group *group = &build->groups[build->append_group];
    const kvf_table_t *table = &seq->tables[build->append_group];
    const int64_t first = seq->n_tokens - seq->n_query_tokens;
    const int32_t used = build->append_ptr[r];
    if (seq->n_query_tokens > (int64_t)build->limits.max_chunk - used) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "sequence %" PRIu32 ": %" PRId64 " query tokens after %" PRId32
                        ", and room for %" PRIu32,
                        r, seq->n_query_tokens, used, build->limits.max_chunk);
    }
    for (int64_t position = first; position < seq->n_tokens; position++) {
        const int64_t ordinal = position / group->t;
        const int64_t slot = ordinal < table->n_blocks ? table->slots[ordinal] : -1;
        const int64_t at = slot < 0 ? -1 : slot * group->t + position % group->t;
        if (at > INT32_MAX) {
            return kvf_fail(detail, KVF_ERR_RANGE,
                            "sequence %" PRIu32 ", group %s: slot %" PRId64
                            " is too high a number: tokens in it have no place of 31 bits",
                            r, group->name, slot);
        }
        build->q_rope[used + position - first] = (int32_t)position;
        build->append_at[used + position - first] = (int32_t)at;
    }
    build->ragged[r] = (int32_t)first;
    build->append_ptr[r + 1] = used + (int32_t)seq->n_query_tokens;
    return KVF_OK;
}

static kvf_status_t add_seq(kvf_auxbuild_t *build, uint32_t r, const kvf_aux_seq_t *seq,
                            kvf_detail_t *detail) {
    kvf_status_t status = check_seq(build, r, seq, detail);
    int64_t start = 0;
    for (uint32_t depth = 0; status == KVF_OK && depth < build->limits.max_depth; depth++) {
        int64_t end = depth < seq->n_prefixes ? seq->prefix_ends[depth] : start;
        if (depth + 1 == build->limits.max_depth) {
            end = seq->n_tokens;
        }
        for (uint32_t g = 0; status == KVF_OK && g < build->n_groups; g++) {
            status = add_row(build, &build->groups[g], &seq->tables[g], r, seq, depth, start, end,
                             detail);
        }
        start = end;
    }
    return status == KVF_OK ? add_queries(build, r, seq, detail) : status;
}

kvf_status_t kvf_auxbuild_run(kvf_auxbuild_t *build, uint32_t n_seqs, const kvf_aux_seq_t *seqs,
                              kvf_detail_t *detail) {
    build->built = false;
    if (n_seqs > build->limits.max_seqs) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "%" PRIu32 " sequences in a step, and room for %" PRIu32, n_seqs,
                        build->limits.max_seqs);
    }
    build->n_seqs = n_seqs;
    for (uint32_t r = 0; r < n_seqs; r++) {
        kvf_status_t status = add_seq(build, r, &seqs[r], detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    build->built = true;
    return KVF_OK;
}

kvf_status_t kvf_auxbuild_array(const kvf_auxbuild_t *build, kvf_aux_key_t key,
                                const int32_t **data_p, int64_t *n_p) {
    const int64_t n_seqs = build->n_seqs, n_queries = build->append_ptr[build->n_seqs];
    if (!build->built || (unsigned)key.array >= KVF_AUX_N_ARRAYS ||
        key.depth >= (kvf_aux_array_per_depth(key.array) ? build->limits.max_depth : 1) ||
        key.set > (kvf_aux_array_sliding(key.array) ? build->limits.n_sliding : 0) ||
        (kvf_aux_array_sliding(key.array) && !build->has_set[key.set])) {
        return KVF_ERR_UNKNOWN;
    }
    const struct list *list = list_of(build, key.set, key.depth);
    const int32_t *data;
    int64_t n;
    switch (key.array) {
    case KVF_AUX_QO_INDPTR:
    case KVF_AUX_CUR_APPEND_LENGTH_INDPTR:
        data = build->append_ptr;
        n = n_seqs + 1;
        break;
    case KVF_AUX_PAGE_INDPTR:
        data = list->page_indptr;
        n = n_seqs + 1;
        break;
    case KVF_AUX_PAGE_INDICES:
        data = list->page_indices;
        n = list->page_indptr[n_seqs];
        break;
    case KVF_AUX_LENGTH_INFO:
        data = list->length_info;
        n = 3 * n_seqs;
        break;
    case KVF_AUX_K_ROPE_POS_OFFSET:
        data = list->rope;
        n = n_seqs;
        break;
    case KVF_AUX_K_RAGGED_ROPE_POS_OFFSET:
        data = build->ragged;
        n = n_seqs;
        break;
    case KVF_AUX_Q_ROPE_POSITION_MAP:
        data = build->q_rope;
        n = n_queries;
        break;
    case KVF_AUX_APPEND_POSITION_MAP:
        data = build->append_at;
        n = n_queries;
        break;
    default:
        return KVF_ERR_UNKNOWN;
    }
    *data_p = data;
    *n_p = n;
    return KVF_OK;
}

kvf_status_t kvf_auxbuild_copy(const kvf_auxbuild_t *build, kvf_auxdata_t *aux,
                               kvf_detail_t *detail) {
    if (!build->built) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN, "no step was built");
    }
    kvf_aux_key_t key;
    for (key.depth = 0; key.depth < build->limits.max_depth; key.depth++) {
        for (key.set = 0; key.set <= build->limits.n_sliding; key.set++) {
            for (unsigned array = 0; array < KVF_AUX_N_ARRAYS; array++) {
                const int32_t *data;
                int64_t n;
                key.array = (kvf_aux_array_t)array;
                if (kvf_auxbuild_array(build, key, &data, &n) != KVF_OK) {
                    continue;
                }
                kvf_status_t status = kvf_aux_copy(aux, key, data, n, detail);
                if (status != KVF_OK) {
                    return status;
                }
            }
        }
    }
    return KVF_OK;
}
