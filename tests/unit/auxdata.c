/* SPDX-License-Identifier: Apache-2.0 */
#include "../support/auxdata.h"
#include "transceiver/mem/mem.h"

/* One row of a vector: what attention reads at one depth of one set. */
struct vector {
    int32_t indptr[2], indices[4], info[3], rope[1];
    int64_t n_indices;
};

/* L = 55, t = 16, W = 18; and what follows when the sequence has grown by two tokens and by one
 * page, with other slots. */
static const struct vector vectors[2][2] = {
    {{{0, 4}, {10, 11, 12, 13}, {7, 0, 0}, {0}, 4}, {{0, 2}, {12, 13}, {7, 5, 0}, {37}, 2}},
    {{{0, 4}, {20, 21, 22, 23}, {9, 0, 0}, {0}, 4}, {{0, 2}, {22, 23}, {9, 7, 0}, {39}, 2}},
};

static void copy_six(kvf_auxdata_t *aux, const struct vector *sets, uint32_t depth) {
    for (uint32_t s = 0; s < 2; s++) {
        copy(aux, key_of(KVF_AUX_PAGE_INDPTR, s, depth), sets[s].indptr, 2);
        copy(aux, key_of(KVF_AUX_PAGE_INDICES, s, depth), sets[s].indices, sets[s].n_indices);
        copy(aux, key_of(KVF_AUX_LENGTH_INFO, s, depth), sets[s].info, 3);
    }
}

static void check_six(const kvf_auxdata_t *aux, const struct vector *sets, uint32_t depth) {
    for (uint32_t s = 0; s < 2; s++) {
        check(aux, key_of(KVF_AUX_PAGE_INDPTR, s, depth), sets[s].indptr, 2);
        check(aux, key_of(KVF_AUX_PAGE_INDICES, s, depth), sets[s].indices, sets[s].n_indices);
        check(aux, key_of(KVF_AUX_LENGTH_INFO, s, depth), sets[s].info, 3);
    }
}

static void run_vectors(kvf_aux_manager_t manager) {
    kvf_auxdata_t *aux = open_aux(manager, vector_limits);
    for (int step = 0; step < 2; step++) {
        kvf_aux_reset(aux);
        for (uint32_t depth = 0; depth < 2; depth++) {
            copy_six(aux, vectors[step], depth);
            for (uint32_t s = 0; s < 2; s++) {
                copy(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, s, depth), vectors[step][s].rope, 1);
            }
        }
        commit(aux);
        for (uint32_t depth = 0; depth < 2; depth++) {
            check_six(aux, vectors[step], depth);
            for (uint32_t s = 0; s < 2; s++) {
                check(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, s, depth), vectors[step][s].rope, 1);
            }
        }
    }
    cr_assert_eq(device.writes, manager == KVF_AUX_PLAIN ? 2 * 2 * 8 : 2);
    cr_assert_eq(device.last_stream, &device);
    close_aux(aux);
}

Test(auxdata, plain_holds_the_vectors) {
    run_vectors(KVF_AUX_PLAIN);
}

Test(auxdata, cached_holds_the_vectors) {
    run_vectors(KVF_AUX_CACHED);
}

Test(auxdata, cached_packs_and_commits_as_the_vector_says) {
    kvf_auxdata_t *aux = open_aux(KVF_AUX_CACHED, vector_limits);
    static const kvf_aux_array_t three[3] = {KVF_AUX_PAGE_INDPTR, KVF_AUX_PAGE_INDICES,
                                             KVF_AUX_LENGTH_INFO};
    cr_assert_eq(device.allocs, 1);
    for (int step = 0; step < 2; step++) {
        kvf_aux_view_t before[2][3];
        kvf_aux_reset(aux);
        device.writes = 0;
        commit(aux);
        cr_assert_eq(device.writes, 0, "nothing packed, nothing copied");
        copy_six(aux, vectors[step], 0);
        cr_assert_eq(device.writes, 0);
        commit(aux);
        cr_assert_eq(device.writes, 1);
        cr_assert_eq(device.last_bytes, 96);
        check_six(aux, vectors[step], 0);
        for (uint32_t i = 0; i < 6; i++) {
            before[i / 3][i % 3] = view(aux, key_of(three[i % 3], i / 3, 0));
        }
        copy_six(aux, vectors[1 - step], 1);
        check_six(aux, vectors[step], 0);
        commit(aux);
        cr_assert_eq(device.writes, 2);
        cr_assert_eq(device.last_bytes, 192);
        const uintptr_t base = (uintptr_t)device.mems[0].base;
        for (uint32_t i = 0; i < 12; i++) {
            kvf_aux_view_t got = view(aux, key_of(three[i % 3], i / 3 % 2, i / 6));
            cr_assert_eq((uintptr_t)got.device - base, 16 * i);
            cr_assert(i >= 6 || got.device == before[i / 3][i % 3].device);
        }
        check_six(aux, vectors[step], 0);
        check_six(aux, vectors[1 - step], 1);
    }
    close_aux(aux);
}

/* Every array there is */

static int64_t fill_indptr(int32_t *data, uint32_t middle, int32_t end) {
    data[0] = 0;
    data[1] = (int32_t)middle;
    data[2] = end;
    return 3;
}

/* Lengths of a step: 2 rows, 24 pages, 13 elements of masks, 8 query tokens. Keys of one length
 * differ in their numbers, also from those of the other step. */
static int64_t fill(kvf_aux_key_t key, uint32_t step, int32_t data[24]) {
    const int32_t mark =
        (int32_t)(1000000 + 100000 * step + 1000 * key.array + 100 * key.set + 30 * key.depth);
    int64_t n;
    switch (key.array) {
    case KVF_AUX_QO_INDPTR:
        return fill_indptr(data, 2 * key.depth + step, 8);
    case KVF_AUX_PAGE_INDPTR:
        return fill_indptr(data, 6 * key.set + 2 * key.depth + step, 24);
    case KVF_AUX_TREE_ATTN_MN_INDPTR:
        return fill_indptr(data, 2 * key.depth + step, 13);
    case KVF_AUX_CUR_APPEND_LENGTH_INDPTR:
        return fill_indptr(data, 6 + step, 8);
    case KVF_AUX_PAGE_INDICES:
        n = 24;
        break;
    case KVF_AUX_LENGTH_INFO:
        n = 6;
        break;
    case KVF_AUX_K_ROPE_POS_OFFSET:
    case KVF_AUX_K_RAGGED_ROPE_POS_OFFSET:
        n = 2;
        break;
    case KVF_AUX_TREE_ATTN_MASK:
        n = 13;
        break;
    case KVF_AUX_Q_ROPE_POSITION_MAP:
    case KVF_AUX_APPEND_POSITION_MAP:
        n = 8;
        break;
    case KVF_AUX_TRANSFER_REMOTE_POSITION:
    case KVF_AUX_TRANSFER_RECEIVER_ID:
        n = 4;
        break;
    default:
        n = 7; /* page to page */
    }
    for (int64_t i = 0; i < n; i++) {
        data[i] = mark + (int32_t)i;
    }
    return n;
}

static const struct {
    const char *name;
    bool per_depth, sliding;
} arrays[KVF_AUX_N_ARRAYS] = {
    [KVF_AUX_QO_INDPTR] = {"qo_indptr", true, false},
    [KVF_AUX_PAGE_INDPTR] = {"page_indptr", true, true},
    [KVF_AUX_PAGE_INDICES] = {"page_indices", true, true},
    [KVF_AUX_LENGTH_INFO] = {"length_info", true, true},
    [KVF_AUX_K_ROPE_POS_OFFSET] = {"k_rope_pos_offset", true, true},
    [KVF_AUX_TREE_ATTN_MASK] = {"tree_attn_mask", true, false},
    [KVF_AUX_TREE_ATTN_MN_INDPTR] = {"tree_attn_mn_indptr", true, false},
    [KVF_AUX_CUR_APPEND_LENGTH_INDPTR] = {"cur_append_length_indptr", false, false},
    [KVF_AUX_K_RAGGED_ROPE_POS_OFFSET] = {"k_ragged_rope_pos_offset", false, false},
    [KVF_AUX_Q_ROPE_POSITION_MAP] = {"q_rope_position_map", false, false},
    [KVF_AUX_APPEND_POSITION_MAP] = {"append_position_map", false, false},
    [KVF_AUX_TRANSFER_REMOTE_POSITION] = {"transfer_remote_position", false, false},
    [KVF_AUX_TRANSFER_RECEIVER_ID] = {"transfer_receiver_id", false, false},
    [KVF_AUX_PAGE_TO_PAGE_LOCAL_POSITION] = {"page_to_page_local_position", false, false},
    [KVF_AUX_PAGE_TO_PAGE_REMOTE_POSITION] = {"page_to_page_remote_position", false, false},
    [KVF_AUX_PAGE_TO_PAGE_RECEIVER_ID] = {"page_to_page_receiver_id", false, false},
};

/* Keys in an order that respects who comes first. */
static uint32_t all_keys(const kvf_aux_limits_t *limits, kvf_aux_key_t *keys) {
    uint32_t n = 0;
    for (uint32_t array = 0; array < KVF_AUX_N_ARRAYS; array++) {
        for (uint32_t set = 0; set <= (arrays[array].sliding ? limits->n_sliding : 0); set++) {
            for (uint32_t depth = 0; depth < (arrays[array].per_depth ? limits->max_depth : 1);
                 depth++) {
                keys[n++] = key_of((kvf_aux_array_t)array, set, depth);
            }
        }
    }
    return n;
}

/* Two steps of everything, read when all is copied; commits in between must not matter. */
static void run_every_array(kvf_aux_manager_t manager, uint32_t commit_every) {
    const kvf_aux_limits_t limits = {3, 24, 8, 3, 3, 4};
    kvf_auxdata_t *aux = open_aux(manager, limits);
    kvf_aux_key_t keys[128];
    const uint32_t n_keys = all_keys(&limits, keys);
    int32_t data[24];
    cr_assert_eq(n_keys, 3 * 3 + 3 * 4 * 4 + 9);
    for (uint32_t step = 0; step < 2; step++) {
        kvf_aux_reset(aux);
        device.writes = 0;
        for (uint32_t i = 0; i < n_keys; i++) {
            kvf_aux_view_t none = {NULL, -7};
            cr_assert_eq(kvf_aux_view(aux, keys[i], &none, NULL), KVF_ERR_UNKNOWN);
            cr_assert_eq(none.n, -7);
            copy(aux, keys[i], data, fill(keys[i], step, data));
            cr_assert_eq(kvf_aux_view(aux, keys[i], &none, NULL),
                         manager == KVF_AUX_PLAIN ? KVF_OK : KVF_ERR_UNKNOWN);
            if (i % commit_every == 0) {
                commit(aux);
            }
        }
        commit(aux);
        for (uint32_t i = 0; i < n_keys; i++) {
            int64_t n = fill(keys[i], step, data);
            check(aux, keys[i], data, n);
        }
        cr_assert_eq(device.writes,
                     manager == KVF_AUX_PLAIN ? n_keys : (n_keys - 1) / commit_every + 2);
    }
    cr_assert_eq(device.allocs, manager == KVF_AUX_PLAIN ? n_keys : 1);
    cr_assert_eq(device.live_bytes, kvf_aux_reserved_bytes(aux));
    close_aux(aux);
}

Test(auxdata, plain_keeps_every_array_apart) {
    run_every_array(KVF_AUX_PLAIN, 1000);
}

Test(auxdata, cached_keeps_every_array_apart) {
    run_every_array(KVF_AUX_CACHED, 1000);
}

Test(auxdata, cached_keeps_every_array_apart_over_commits) {
    run_every_array(KVF_AUX_CACHED, 5);
}

Test(auxdata, the_list_says_which_arrays_are_many) {
    for (unsigned a = 0; a < KVF_AUX_N_ARRAYS; a++) {
        cr_assert_str_eq(kvf_aux_array_name((kvf_aux_array_t)a), arrays[a].name);
        cr_assert_eq(kvf_aux_array_per_depth((kvf_aux_array_t)a), arrays[a].per_depth, "%u", a);
        cr_assert_eq(kvf_aux_array_sliding((kvf_aux_array_t)a), arrays[a].sliding, "%u", a);
    }
}

/* What is reserved */

Test(auxdata, storage_in_proportion) {
    static const struct {
        kvf_aux_limits_t limits;
        uint64_t bytes, n_plain; /* counted by hand from the table of docs/placement.md */
    } rows[] = {
        /* per depth: qo 16, indptr 16, indices 512, info 32, rope 16; once: 16, 16, 7 x 2048 */
        {{2, 128, 512, 2, 0, 0}, 2 * 592 + 32 + 7 * 2048, 2 * 5 + 9},
        {{2, 128, 512, 2, 1, 0}, 2 * (592 + 576) + 32 + 7 * 2048, 2 * 9 + 9},
        {{2, 128, 512, 1, 3, 0}, 592 + 3 * 576 + 32 + 7 * 2048, 5 + 3 * 4 + 9},
        /* a tree per depth: mn_indptr 16, and the mask */
        {{2, 128, 512, 2, 0, 256}, 2 * (608 + 2 * 256 * 256 * 4) + 32 + 7 * 2048, 2 * 7 + 9},
        {{2, 128, 512, 2, 0, 4}, 2 * (608 + 2 * 4 * 4 * 4) + 32 + 7 * 2048, 2 * 7 + 9},
    };
    for (int i = 0; i < N_OF(rows); i++) {
        for (int manager = KVF_AUX_PLAIN; manager <= KVF_AUX_CACHED; manager++) {
            device.allocs = 0;
            kvf_auxdata_t *aux = open_aux((kvf_aux_manager_t)manager, rows[i].limits);
            cr_assert_eq(kvf_aux_reserved_bytes(aux), rows[i].bytes, "row %d: %llu", i,
                         (unsigned long long)kvf_aux_reserved_bytes(aux));
            cr_assert_eq(device.live_bytes, rows[i].bytes);
            cr_assert_eq(device.allocs, manager == KVF_AUX_PLAIN ? rows[i].n_plain : 1);
            close_aux(aux);
        }
    }
}

Test(auxdata, limits_are_checked) {
    static const struct {
        kvf_aux_limits_t limits;
        const char *word;
    } rows[] = {
        {{0, 1, 1, 1, 0, 0}, "max_seqs"},
        {{INT32_MAX, 1, 1, 1, 0, 0}, "max_seqs"},
        {{1, 0, 1, 1, 0, 0}, "max_pages"},
        {{1, UINT32_C(1) << 31, 1, 1, 0, 0}, "max_pages"},
        {{1, 1, 0, 1, 0, 0}, "max_chunk"},
        {{1, 1, UINT32_MAX, 1, 0, 0}, "max_chunk"},
        {{1, 1, 1, 0, 0, 0}, "max_depth"},
        {{1, 1, 1, KVF_AUX_MAX_DEPTH + 1, 0, 0}, "max_depth"},
        {{1, 1, 1, 1, KVF_MAX_GROUPS + 1, 0}, "n_sliding"},
        {{1, 1, 1, 1, 0, KVF_AUX_MAX_TREE_TOKENS + 1}, "tree_tokens"},
    };
    for (int i = 0; i < N_OF(rows); i++) {
        const kvf_aux_config_t config = {KVF_AUX_CACHED, rows[i].limits, &device_kind, NULL};
        kvf_auxdata_t *aux = (kvf_auxdata_t *)&device;
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, &detail), KVF_ERR_INVALID,
                     "row %d", i);
        cr_assert_not_null(strstr(detail.text, rows[i].word), "row %d: %s", i, detail.text);
        cr_assert_eq((void *)aux, (void *)&device);
    }
    kvf_aux_limits_t least = {1, 1, 1, 1, 0, 0};
    cr_assert_eq(kvf_aux_limits_check(&least, NULL), KVF_OK);
    cr_assert_eq(device.allocs, 0);
}

/* The host row */

static void run_on_host(kvf_aux_manager_t manager) {
    const kvf_aux_config_t config = {manager, vector_limits, kvf_mem_host(), NULL};
    kvf_auxdata_t *aux;
    cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, NULL), KVF_OK);
    copy_six(aux, vectors[0], 1);
    commit(aux);
    kvf_aux_view_t got = view(aux, key_of(KVF_AUX_PAGE_INDICES, 1, 1));
    cr_assert_eq(got.n, 2);
    cr_assert_eq(got.device[0], 12);
    cr_assert_eq(got.device[1], 13);
    kvf_aux_destroy(aux);
    kvf_aux_destroy(NULL);
    check_leaks();
}

Test(auxdata, plain_on_host_memory) {
    run_on_host(KVF_AUX_PLAIN);
}

Test(auxdata, cached_on_host_memory) {
    run_on_host(KVF_AUX_CACHED);
}
