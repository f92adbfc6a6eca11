/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_AUXDATA_H
#define KVF_TESTS_AUXDATA_H

/**
 * @file
 * Managers of aux data on the device of aux_device.h: calls that must go well, and what a kernel
 * would read then.
 */

#include "aux_device.h"
#include "leaks.h"

#define N_OF(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

/** The managers of the vectors in docs/placement.md. */
static const kvf_aux_limits_t vector_limits = {2, 128, 512, 2, 1, 0};

/** Make a manager. */
static inline kvf_auxdata_t *open_aux(kvf_aux_manager_t manager, kvf_aux_limits_t limits) {
    const kvf_aux_config_t config = {manager, limits, &device_kind, &device};
    kvf_auxdata_t *aux = NULL;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, &detail), KVF_OK, "%s",
                 detail.text);
    return aux;
}

/** End it; nothing may be left on the device, nothing may have leaked. */
static inline void close_aux(kvf_auxdata_t *aux) {
    kvf_aux_destroy(aux);
    cr_assert_eq(device.live, 0);
    check_leaks();
}

/** @return The key of an array. */
static inline kvf_aux_key_t key_of(kvf_aux_array_t array, uint32_t set, uint32_t depth) {
    return (kvf_aux_key_t){array, set, depth};
}

/** Copy an array, which must go well. */
static inline void copy(kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data, int64_t n) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_copy(aux, key, data, n, &detail), KVF_OK, "%s", detail.text);
}

/** Commit, which must go well. */
static inline void commit(kvf_auxdata_t *aux) {
    cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_OK);
}

/** @return The view of an array that must be there. */
static inline kvf_aux_view_t view(const kvf_auxdata_t *aux, kvf_aux_key_t key) {
    kvf_aux_view_t view;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_aux_view(aux, key, &view, &detail), KVF_OK, "%s", detail.text);
    return view;
}

/** What a kernel would read of an array must be this. */
static inline void check(const kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *want,
                         int64_t n) {
    kvf_aux_view_t got = view(aux, key);
    cr_assert_eq(got.n, n, "%s set %u depth %u", kvf_aux_array_name(key.array), key.set, key.depth);
    cr_assert_arr_eq(device_read(&got), want, (size_t)n * sizeof(want[0]), "%s set %u depth %u",
                     kvf_aux_array_name(key.array), key.set, key.depth);
}

#endif
