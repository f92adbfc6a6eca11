/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_AUX_BUILD_H
#define KVF_TESTS_AUX_BUILD_H

/**
 * @file
 * Builders of aux data for tests, and one way to read what they and managers have.
 */

#include "kvmgr/auxbuild.h"
#include "tests/support/aux_device.h"

#include <stdio.h>

/* Groups as {tokens per block, window, sinks}, named g0, g1, ... */
static inline kvf_layout_t layout_of(uint32_t n, const int64_t (*groups)[3]) {
    kvf_layout_t layout = {.n_groups = n};
    for (uint32_t i = 0; i < n; i++) {
        kvf_layer_group_t *group = &layout.groups[i];
        (void)snprintf(group->name, sizeof(group->name), "g%u", i);
        group->tokens_per_block = (uint32_t)groups[i][0];
        group->window = groups[i][1];
        group->sinks = groups[i][2];
    }
    return layout;
}

static inline kvf_auxbuild_t *open_build(const kvf_layout_t *layout, kvf_aux_limits_t limits) {
    kvf_auxbuild_t *build = NULL;
    kvf_detail_t detail = {""};
    limits.n_sliding = kvf_auxbuild_n_sliding(layout);
    cr_assert_eq(kvf_auxbuild_create(layout, &limits, kvf_alloc_default(), &build, &detail), KVF_OK,
                 "%s", detail.text);
    return build;
}

/* Where a test reads an array of the step: the builder's host memory, or a manager's device. */
struct source {
    const kvf_auxbuild_t *build;
    const kvf_auxdata_t *aux;
};

static inline const int32_t *read_array(struct source from, kvf_aux_array_t array, uint32_t set,
                                        uint32_t depth, int64_t *n_p) {
    const kvf_aux_key_t key = {array, set, depth};
    const int32_t *data;
    if (from.aux != NULL) {
        kvf_aux_view_t view;
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_aux_view(from.aux, key, &view, &detail), KVF_OK, "%s", detail.text);
        *n_p = view.n;
        return device_read(&view);
    }
    cr_assert_eq(kvf_auxbuild_array(from.build, key, &data, n_p), KVF_OK, "%s",
                 kvf_aux_array_name(array));
    return data;
}

#endif
