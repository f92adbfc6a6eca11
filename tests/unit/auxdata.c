/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/auxdata.h"
#include "tests/support/aux_device.h"
#include "tests/support/leaks.h"
#include "transceiver/mem/mem.h"

#include <stdio.h>

#define N_OF(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

/* The managers of the vectors in docs/placement.md. */
static const kvf_aux_limits_t vector_limits = {2, 128, 512, 2, 1, 0};

static kvf_auxdata_t *open_aux(kvf_aux_manager_t manager, kvf_aux_limits_t limits) {
    const kvf_aux_config_t config = {manager, limits, &device_kind, &device};
    kvf_auxdata_t *aux = NULL;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, &detail), KVF_OK, "%s",
                 detail.text);
    return aux;
}

static void close_aux(kvf_auxdata_t *aux) {
    kvf_aux_destroy(aux);
    cr_assert_eq(device.live, 0);
    check_leaks();
}

static kvf_aux_key_t key_of(kvf_aux_array_t array, uint32_t set, uint32_t depth) {
    return (kvf_aux_key_t){array, set, depth};
}

static void copy(kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data, int64_t n) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_copy(aux, key, data, n, &detail), KVF_OK, "%s", detail.text);
}

static void commit(kvf_auxdata_t *aux) {
    cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_OK);
}

static kvf_aux_view_t view(const kvf_auxdata_t *aux, kvf_aux_key_t key) {
    kvf_aux_view_t view;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_view(aux, key, &view, &detail), KVF_OK, "%s", detail.text);
    return view;
}

static void check(const kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *want, int64_t n) {
    kvf_aux_view_t got = view(aux, key);
    cr_assert_eq(got.n, n, "%s set %u depth %u", kvf_aux_array_name(key.array), key.set, key.depth);
    cr_assert_arr_eq(device_read(&got), want, (size_t)n * sizeof(want[0]), "%s set %u depth %u",
                     kvf_aux_array_name(key.array), key.set, key.depth);
}

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

/* Lengths of a step: 2 rows, 5 pages, 13 elements of masks, 4 query tokens. Keys differ in their
 * numbers, also in the next step. */
static int64_t fill(kvf_aux_key_t key, uint32_t step, int32_t data[16]) {
    const int32_t mark =
        (int32_t)(1000000 + 100000 * step + 1000 * key.array + 100 * key.set + 20 * key.depth);
    int64_t n;
    switch (key.array) {
    case KVF_AUX_QO_INDPTR:
    case KVF_AUX_PAGE_INDPTR:
    case KVF_AUX_TREE_ATTN_MN_INDPTR:
    case KVF_AUX_CUR_APPEND_LENGTH_INDPTR:
        data[0] = 0;
        data[1] = (int32_t)((key.array + key.set + key.depth + step) % 4);
        data[2] = key.array == KVF_AUX_PAGE_INDPTR           ? 5
                  : key.array == KVF_AUX_TREE_ATTN_MN_INDPTR ? 13
                                                             : 4;
        return 3;
    case KVF_AUX_PAGE_INDICES:
        n = 5;
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
        n = 4;
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
    const kvf_aux_limits_t limits = {3, 6, 8, 3, 3, 4};
    kvf_auxdata_t *aux = open_aux(manager, limits);
    kvf_aux_key_t keys[128];
    const uint32_t n_keys = all_keys(&limits, keys);
    int32_t data[16];
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

/* What is refused */

static const int32_t zeros[600], indptr_1[] = {0, 1, 1};

/* A copy that fails, and writes nothing. */
static void refuse(kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data, int64_t n,
                   kvf_status_t want, const char *word) {
    const uint64_t writes = device.writes;
    kvf_detail_t detail = {""};
    kvf_status_t got = kvf_aux_copy(aux, key, data, n, &detail);
    cr_assert_eq(got, want, "%s set %u depth %u, %ld elements: %s (%s)",
                 kvf_aux_array_name(key.array), key.set, key.depth, (long)n, kvf_status_name(got),
                 detail.text);
    cr_assert_not_null(strstr(detail.text, word), "%s", detail.text);
    cr_assert_eq(device.writes, writes);
}

static void run_refusals(kvf_aux_manager_t manager) {
    const kvf_aux_limits_t limits = {2, 4, 5, 2, 1, 2};
    kvf_auxdata_t *aux = open_aux(manager, limits);
    const kvf_aux_key_t qo = {KVF_AUX_QO_INDPTR, 0, 1}, indptr = {KVF_AUX_PAGE_INDPTR, 1, 1};
    const kvf_aux_key_t indices = {KVF_AUX_PAGE_INDICES, 1, 1};
    static const int32_t no_zero[] = {1, 1, 2}, falls[] = {0, 2, 1}, beyond[] = {0, 2, 5};
    static const int32_t full[] = {0, 2, 4}, slots[] = {INT32_MAX, 0, 7, 3};
    static const int32_t unbound[] = {5, 6, -1, 7}, wrapped[] = {INT32_MIN, 1, 2, 3};
    kvf_aux_view_t got;

    /* keys */
    refuse(aux, (kvf_aux_key_t){KVF_AUX_N_ARRAYS, 0, 0}, zeros, 1, KVF_ERR_INVALID, "no aux array");
    refuse(aux, key_of(KVF_AUX_PAGE_INDPTR, 2, 0), zeros, 1, KVF_ERR_INVALID, "n_sliding");
    refuse(aux, key_of(KVF_AUX_PAGE_INDPTR, 0, 2), zeros, 1, KVF_ERR_INVALID, "depth 2");
    refuse(aux, key_of(KVF_AUX_APPEND_POSITION_MAP, 0, 1), zeros, 1, KVF_ERR_INVALID, "depth 1");
    refuse(aux, key_of(KVF_AUX_QO_INDPTR, 1, 0), zeros, 1, KVF_ERR_INVALID, "sliding sets");
    cr_assert_eq(kvf_aux_view(aux, key_of(KVF_AUX_QO_INDPTR, 1, 0), &got, NULL), KVF_ERR_INVALID);

    /* arrays whose length nothing has determined */
    refuse(aux, indices, zeros, 0, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_LENGTH_INFO, 0, 1), zeros, 3, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, 1, 1), zeros, 1, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_TREE_ATTN_MASK, 0, 1), zeros, 4, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_K_RAGGED_ROPE_POS_OFFSET, 0, 0), zeros, 1, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_Q_ROPE_POSITION_MAP, 0, 0), zeros, 1, KVF_ERR_INVALID, "first");

    /* an indptr by itself */
    refuse(aux, qo, zeros, -1, KVF_ERR_INVALID, "-1 elements");
    refuse(aux, qo, zeros, 4, KVF_ERR_TOO_LARGE, "room for 3");
    refuse(aux, qo, zeros, 0, KVF_ERR_INVALID, "offsets");
    refuse(aux, qo, no_zero, 3, KVF_ERR_INVALID, "offsets");
    refuse(aux, qo, falls, 3, KVF_ERR_INVALID, "offsets");
    copy(aux, qo, indptr_1, 3);
    refuse(aux, qo, indptr_1, 3, KVF_ERR_INVALID, "reset");
    refuse(aux, indptr, zeros, 2, KVF_ERR_INVALID, "wants 3"); /* |page_indptr| = |qo_indptr| */
    refuse(aux, indptr, beyond, 3, KVF_ERR_TOO_LARGE, "room for 4");
    copy(aux, indptr, full, 3);

    /* what follows from it */
    refuse(aux, indices, slots, 3, KVF_ERR_INVALID, "wants 4");
    refuse(aux, indices, slots, 5, KVF_ERR_TOO_LARGE, "room for 4");
    refuse(aux, indices, unbound, 4, KVF_ERR_RANGE, "entry 2 is -1");
    refuse(aux, indices, wrapped, 4, KVF_ERR_RANGE, "entry 0 is -2147483648");
    copy(aux, indices, slots, 4);
    refuse(aux, key_of(KVF_AUX_PAGE_INDICES, 0, 1), slots, 4, KVF_ERR_INVALID, "first");
    refuse(aux, key_of(KVF_AUX_LENGTH_INFO, 1, 1), zeros, 3, KVF_ERR_INVALID, "wants 6");
    refuse(aux, key_of(KVF_AUX_LENGTH_INFO, 1, 1), zeros, 7, KVF_ERR_TOO_LARGE, "room for 6");
    refuse(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, 0, 1), zeros, 1, KVF_ERR_INVALID, "wants 2");
    refuse(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, 0, 1), zeros, 3, KVF_ERR_TOO_LARGE, "room for 2");
    copy(aux, key_of(KVF_AUX_K_ROPE_POS_OFFSET, 0, 1), zeros, 2);

    /* the other depth is free */
    copy(aux, key_of(KVF_AUX_PAGE_INDPTR, 0, 0), zeros, 2);
    refuse(aux, key_of(KVF_AUX_QO_INDPTR, 0, 0), zeros, 3, KVF_ERR_INVALID, "wants 2");
    copy(aux, key_of(KVF_AUX_PAGE_INDICES, 0, 0), NULL, 0);

    /* trees: 2 rows of at most 2 x 2 */
    refuse(aux, key_of(KVF_AUX_TREE_ATTN_MN_INDPTR, 0, 1), (const int32_t[]){0, 4, 9}, 3,
           KVF_ERR_TOO_LARGE, "room for 8");
    copy(aux, key_of(KVF_AUX_TREE_ATTN_MN_INDPTR, 0, 1), (const int32_t[]){0, 4, 8}, 3);
    refuse(aux, key_of(KVF_AUX_TREE_ATTN_MASK, 0, 1), zeros, 7, KVF_ERR_INVALID, "wants 8");
    copy(aux, key_of(KVF_AUX_TREE_ATTN_MASK, 0, 1), zeros, 8);

    /* the step's own tokens */
    refuse(aux, key_of(KVF_AUX_CUR_APPEND_LENGTH_INDPTR, 0, 0), (const int32_t[]){0, 6}, 2,
           KVF_ERR_TOO_LARGE, "room for 5");
    copy(aux, key_of(KVF_AUX_CUR_APPEND_LENGTH_INDPTR, 0, 0), (const int32_t[]){0, 5}, 2);
    refuse(aux, key_of(KVF_AUX_K_RAGGED_ROPE_POS_OFFSET, 0, 0), zeros, 2, KVF_ERR_INVALID,
           "wants 1");
    refuse(aux, key_of(KVF_AUX_Q_ROPE_POSITION_MAP, 0, 0), zeros, 4, KVF_ERR_INVALID, "wants 5");
    refuse(aux, key_of(KVF_AUX_APPEND_POSITION_MAP, 0, 0), zeros, 6, KVF_ERR_TOO_LARGE,
           "room for 5");

    /* transfer maps: those of a family agree */
    copy(aux, key_of(KVF_AUX_TRANSFER_RECEIVER_ID, 0, 0), zeros, 5);
    refuse(aux, key_of(KVF_AUX_TRANSFER_REMOTE_POSITION, 0, 0), zeros, 4, KVF_ERR_INVALID,
           "wants 5");
    copy(aux, key_of(KVF_AUX_PAGE_TO_PAGE_REMOTE_POSITION, 0, 0), zeros, 1);
    refuse(aux, key_of(KVF_AUX_PAGE_TO_PAGE_LOCAL_POSITION, 0, 0), zeros, 5, KVF_ERR_INVALID,
           "wants 1");
    refuse(aux, key_of(KVF_AUX_PAGE_TO_PAGE_RECEIVER_ID, 0, 0), zeros, 0, KVF_ERR_INVALID,
           "wants 1");

    /* what was refused left no trace */
    commit(aux);
    check(aux, indices, slots, 4);
    check(aux, indptr, full, 3);
    check(aux, key_of(KVF_AUX_PAGE_INDICES, 0, 0), zeros, 0);
    cr_assert_eq(kvf_aux_view(aux, key_of(KVF_AUX_LENGTH_INFO, 1, 1), &got, NULL), KVF_ERR_UNKNOWN);
    kvf_aux_reset(aux);
    cr_assert_eq(kvf_aux_view(aux, indices, &got, NULL), KVF_ERR_UNKNOWN);
    copy(aux, indptr, zeros, 2);
    close_aux(aux);
}

Test(auxdata, plain_checks_before_it_writes) {
    run_refusals(KVF_AUX_PLAIN);
}

Test(auxdata, cached_checks_before_it_writes) {
    run_refusals(KVF_AUX_CACHED);
}

static void run_without(kvf_aux_manager_t manager) {
    kvf_auxdata_t *aux = open_aux(manager, (kvf_aux_limits_t){2, 128, 512, 2, 0, 0});
    static const kvf_aux_array_t sliding[] = {KVF_AUX_PAGE_INDPTR, KVF_AUX_PAGE_INDICES,
                                              KVF_AUX_LENGTH_INFO, KVF_AUX_K_ROPE_POS_OFFSET};
    copy(aux, key_of(KVF_AUX_PAGE_INDPTR, 0, 0), indptr_1, 3);
    for (int i = 0; i < N_OF(sliding); i++) {
        refuse(aux, key_of(sliding[i], 1, 0), zeros, 1, KVF_ERR_INVALID,
               "sliding set 1, and storage was reserved for 0 (n_sliding)");
    }
    refuse(aux, key_of(KVF_AUX_TREE_ATTN_MN_INDPTR, 0, 0), zeros, 3, KVF_ERR_INVALID,
           "tree_tokens");
    refuse(aux, key_of(KVF_AUX_TREE_ATTN_MASK, 0, 0), zeros, 0, KVF_ERR_INVALID, "tree_tokens");
    close_aux(aux);
}

Test(auxdata, plain_has_no_storage_that_was_not_asked_for) {
    run_without(KVF_AUX_PLAIN);
}

Test(auxdata, cached_has_no_storage_that_was_not_asked_for) {
    run_without(KVF_AUX_CACHED);
}

Test(auxdata, a_packed_array_has_no_view_before_its_commit) {
    kvf_auxdata_t *aux = open_aux(KVF_AUX_CACHED, vector_limits);
    const kvf_aux_key_t first = {KVF_AUX_PAGE_INDPTR, 0, 0}, empty = {KVF_AUX_PAGE_INDICES, 0, 0};
    kvf_aux_view_t got;
    kvf_detail_t detail;
    copy(aux, first, zeros, 3);
    cr_assert_eq(kvf_aux_view(aux, first, &got, &detail), KVF_ERR_UNKNOWN);
    cr_assert_not_null(strstr(detail.text, "committed"), "%s", detail.text);
    commit(aux);
    copy(aux, empty, NULL, 0);
    check(aux, first, zeros, 3);
    commit(aux);
    check(aux, empty, zeros, 0);
    close_aux(aux);
}

/* Failures */

static void run_failing_writes(kvf_aux_manager_t manager) {
    kvf_auxdata_t *aux = open_aux(manager, vector_limits);
    const kvf_aux_key_t indptr = {KVF_AUX_PAGE_INDPTR, 0, 0}, qo = {KVF_AUX_QO_INDPTR, 0, 0};
    kvf_aux_view_t got;
    device.fail_write = 1;
    if (manager == KVF_AUX_PLAIN) {
        cr_assert_eq(kvf_aux_copy(aux, indptr, indptr_1, 3, NULL), KVF_ERR_IO);
        cr_assert_eq(kvf_aux_view(aux, indptr, &got, NULL), KVF_ERR_UNKNOWN);
        copy(aux, qo, zeros, 2); /* the failed one has determined nothing */
        copy(aux, indptr, zeros, 2);
    } else {
        copy(aux, indptr, zeros, 2);
        cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_ERR_IO);
        cr_assert_eq(kvf_aux_view(aux, indptr, &got, NULL), KVF_ERR_UNKNOWN);
        commit(aux);
        copy(aux, qo, zeros, 2);
        device.fail_write = 3;
        cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_ERR_IO);
        cr_assert_eq(kvf_aux_view(aux, qo, &got, NULL), KVF_ERR_UNKNOWN);
        check(aux, indptr, zeros, 2);
        commit(aux);
    }
    check(aux, indptr, zeros, 2);
    check(aux, qo, zeros, 2);
    close_aux(aux);
}

Test(auxdata, plain_survives_a_failed_write) {
    run_failing_writes(KVF_AUX_PLAIN);
}

Test(auxdata, cached_survives_a_failed_write) {
    run_failing_writes(KVF_AUX_CACHED);
}

/* Fail the N-th allocation, host or device, for all N. */
static uint64_t run_failing_allocs(kvf_aux_manager_t manager, bool on_device) {
    const kvf_aux_config_t config = {manager, {2, 8, 8, 2, 2, 2}, &device_kind, NULL};
    for (uint64_t n = 1;; n++) {
        kvf_alloc_fail_t alloc;
        kvf_auxdata_t *aux = NULL;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&alloc, on_device ? 0 : n);
        device.allocs = 0;
        device.fail_alloc = on_device ? n : 0;
        kvf_status_t status = kvf_aux_create(&config, &alloc.table, &aux, &detail);
        if (status == KVF_OK) {
            cr_assert_eq(device.live, manager == KVF_AUX_PLAIN ? device.allocs : 1);
            kvf_aux_destroy(aux);
        } else {
            cr_assert_eq(status, KVF_ERR_NO_MEMORY);
            cr_assert_null(aux);
            cr_assert_neq(detail.text[0], '\0');
        }
        cr_assert_eq(device.live, 0);
        cr_assert_eq(alloc.live, 0);
        if (status == KVF_OK) {
            check_leaks();
            return n - 1;
        }
    }
}

Test(auxdata, plain_survives_failed_allocations) {
    cr_assert_eq(run_failing_allocs(KVF_AUX_PLAIN, false), 4);
    cr_assert_eq(run_failing_allocs(KVF_AUX_PLAIN, true), 2 * (7 + 2 * 4) + 9);
}

Test(auxdata, cached_survives_failed_allocations) {
    cr_assert_eq(run_failing_allocs(KVF_AUX_CACHED, false), 5);
    cr_assert_eq(run_failing_allocs(KVF_AUX_CACHED, true), 1);
}
