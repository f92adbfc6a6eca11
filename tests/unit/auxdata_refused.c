/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that are refused, writes and allocations that fail. */
#include "../support/auxdata.h"

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

Test(auxdata_refused, plain_checks_before_it_writes) {
    run_refusals(KVF_AUX_PLAIN);
}

Test(auxdata_refused, cached_checks_before_it_writes) {
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

Test(auxdata_refused, plain_has_no_storage_that_was_not_asked_for) {
    run_without(KVF_AUX_PLAIN);
}

Test(auxdata_refused, cached_has_no_storage_that_was_not_asked_for) {
    run_without(KVF_AUX_CACHED);
}

Test(auxdata_refused, a_packed_array_has_no_view_before_its_commit) {
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

Test(auxdata_refused, plain_survives_a_failed_write) {
    run_failing_writes(KVF_AUX_PLAIN);
}

Test(auxdata_refused, cached_survives_a_failed_write) {
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

Test(auxdata_refused, plain_survives_failed_allocations) {
    cr_assert_eq(run_failing_allocs(KVF_AUX_PLAIN, false), 4);
    cr_assert_eq(run_failing_allocs(KVF_AUX_PLAIN, true), 2 * (7 + 2 * 4) + 9);
}

Test(auxdata_refused, cached_survives_failed_allocations) {
    cr_assert_eq(run_failing_allocs(KVF_AUX_CACHED, false), 5);
    cr_assert_eq(run_failing_allocs(KVF_AUX_CACHED, true), 1);
}
