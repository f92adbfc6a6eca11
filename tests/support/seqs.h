/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_SEQS_H
#define KVF_TESTS_SEQS_H

/**
 * @file
 * A sequence manager over pools of its own, for tests.
 */

#include "kvmgr/seq.h"

#include <criterion/criterion.h>
#include <stdio.h>

/** What a test says of a layer group. */
typedef struct test_group {
    int64_t tokens_per_block, window, sinks, n_pages;
} test_group_t;

typedef struct test_seqs {
    kvf_layout_t layout;
    int64_t n_pages[KVF_MAX_GROUPS];
    kvf_pages_t *pages[KVF_MAX_GROUPS];
    kvf_seqs_t *seqs;
} test_seqs_t;

/** Write a layout of groups "g0" .. */
static inline void test_layout(kvf_layout_t *layout, uint32_t n_groups,
                               const test_group_t *groups) {
    *layout = (kvf_layout_t){.n_groups = n_groups};
    for (uint32_t g = 0; g < n_groups; g++) {
        kvf_layer_group_t *group = &layout->groups[g];
        *group = (kvf_layer_group_t){.n_layers = 1,
                                     .layers = {g},
                                     .window = groups[g].window,
                                     .sinks = groups[g].sinks,
                                     .tokens_per_block = (uint32_t)groups[g].tokens_per_block,
                                     .kv_heads = 1,
                                     .head_dim = 8,
                                     .kv_factor = 2,
                                     .dtype = KVF_DTYPE_F16};
        (void)snprintf(group->name, sizeof(group->name), "g%u", (unsigned)g);
    }
    cr_assert_eq(kvf_layout_check(layout, NULL), KVF_OK);
}

/** Make a manager. world lives longer than it. */
static inline void test_seqs_init(test_seqs_t *world, const kvf_alloc_t *alloc, uint32_t n_groups,
                                  const test_group_t *groups, bool generation_side,
                                  int64_t piece_tokens, kvf_cp_t cp) {
    test_layout(&world->layout, n_groups, groups);
    for (uint32_t g = 0; g < n_groups; g++) {
        world->n_pages[g] = groups[g].n_pages;
        cr_assert_eq(kvf_pages_create(kvf_alloc_default(), groups[g].n_pages, &world->pages[g]),
                     KVF_OK);
    }
    kvf_seqs_config_t config = {.layout = &world->layout,
                                .n_pages = world->n_pages,
                                .store = kvf_store_over_pages(world->pages),
                                .generation_side = generation_side,
                                .cp = cp,
                                .piece_tokens = piece_tokens};
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_seqs_create(alloc, &config, &world->seqs, &detail), KVF_OK, "%s", detail.text);
}

/** End a manager; every page must be free afterwards. */
static inline void test_seqs_end(test_seqs_t *world) {
    kvf_seqs_destroy(world->seqs);
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_pages_audit(world->pages[g], &detail), KVF_OK, "%s", detail.text);
        cr_assert_eq(kvf_pages_count(world->pages[g], KVF_PAGE_FREE), world->n_pages[g],
                     "group %u: %ld free", g,
                     (long)kvf_pages_count(world->pages[g], KVF_PAGE_FREE));
        kvf_pages_destroy(world->pages[g]);
    }
}

#endif
