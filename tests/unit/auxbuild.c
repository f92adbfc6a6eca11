/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/aux_build.h"
#include "tests/support/leaks.h"

static void run(kvf_auxbuild_t *build, uint32_t n_seqs, const kvf_aux_seq_t *seqs) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_auxbuild_run(build, n_seqs, seqs, &detail), KVF_OK, "%s", detail.text);
}

/* An array as text, "1,2,3". */
static const char *text_of(struct source from, kvf_aux_array_t array, uint32_t set,
                           uint32_t depth) {
    static char text[1024];
    int64_t n;
    size_t at = 0;
    const int32_t *data = read_array(from, array, set, depth, &n);
    text[0] = '\0';
    for (int64_t i = 0; i < n; i++) {
        at += (size_t)snprintf(text + at, sizeof(text) - at, i == 0 ? "%d" : ",%d", data[i]);
        cr_assert_lt(at, sizeof(text));
    }
    return text;
}

static void expect(struct source from, kvf_aux_array_t array, uint32_t set, uint32_t depth,
                   const char *want) {
    const char *got = text_of(from, array, set, depth);
    cr_assert_str_eq(got, want, "%s set %u depth %u: %s, want %s", kvf_aux_array_name(array), set,
                     depth, got, want);
}

/* The four page arrays. */
static void expect_pages(struct source from, uint32_t set, uint32_t depth, const char *indptr,
                         const char *indices, const char *info, const char *rope) {
    expect(from, KVF_AUX_PAGE_INDPTR, set, depth, indptr);
    expect(from, KVF_AUX_PAGE_INDICES, set, depth, indices);
    expect(from, KVF_AUX_LENGTH_INFO, set, depth, info);
    expect(from, KVF_AUX_K_ROPE_POS_OFFSET, set, depth, rope);
}

/* The vectors of docs/placement.md, for one group; unbound ordinals are those that slid out. */
static const struct {
    int64_t group[3]; /* t, W, s */
    int64_t n_tokens, prefix, n_blocks;
    int32_t slots[10];
    const char *pages[2][4]; /* by depth: indptr, indices, info, rope */
} vectors[] = {
    {{16, 0, 0},
     55,
     0,
     4,
     {10, 11, 12, 13},
     {{"0,0", "", "0,0,0", "0"}, {"0,4", "10,11,12,13", "7,0,0", "0"}}},
    {{16, 18, 0},
     55,
     0,
     4,
     {-1, -1, 12, 13},
     {{"0,0", "", "0,0,0", "0"}, {"0,2", "12,13", "7,5,0", "37"}}},
    {{16, 32, 0},
     65,
     0,
     5,
     {-1, -1, 22, 23, 24},
     {{"0,0", "", "0,0,0", "0"}, {"0,3", "22,23,24", "1,1,0", "33"}}},
    {{8, 24, 4},
     80,
     0,
     10,
     {40, -1, -1, -1, -1, -1, -1, 47, 48, 49},
     {{"0,0", "", "0,0,0", "0"}, {"0,4", "40,47,48,49", "8,8,4", "56"}}},
    {{16, 16, 0},
     72,
     32,
     5,
     {1, 2, 3, 4, 5},
     {{"0,0", "", "0,0,0", "32"}, {"0,2", "4,5", "8,8,0", "56"}}},
    {{16, 50, 0},
     72,
     32,
     5,
     {1, 2, 3, 4, 5}, /* a window that starts in the shared prefix */
     {{"0,1", "2", "16,6,0", "22"}, {"0,3", "3,4,5", "8,0,0", "32"}}},
    {{16, 16, 4},
     72,
     32,
     5,
     {1, 2, 3, 4, 5}, /* sinks in the prefix, the window not */
     {{"0,1", "1", "16,16,4", "32"}, {"0,2", "4,5", "8,8,0", "56"}}},
    {{8, 24, 4},
     20,
     0,
     3,
     {1, 2, 3}, /* the window holds the sinks, too */
     {{"0,0", "", "0,0,0", "0"}, {"0,3", "1,2,3", "4,0,0", "0"}}},
    {{8, 18, 4},
     20,
     0,
     3,
     {1, 2, 3}, /* it starts between them: 2 and 3 are counted once */
     {{"0,0", "", "0,0,0", "0"}, {"0,3", "1,2,3", "4,2,2", "2"}}},
    {{8, 10, 4},
     15,
     0,
     2,
     {1, 2}, /* both in one page, with a gap: token 4 is not seen */
     {{"0,0", "", "0,0,0", "0"}, {"0,2", "1,2", "7,5,4", "5"}}},
    {{8, 4, 9},
     15,
     0,
     2,
     {1, 2}, /* the last page ends the sinks and has the window */
     {{"0,0", "", "0,0,0", "0"}, {"0,2", "1,2", "7,11,9", "11"}}},
};

static void run_vector(size_t i, bool cached) {
    const kvf_aux_limits_t limits = {2, 128, 512, 2, vectors[i].group[1] != 0, 0};
    const kvf_layout_t layout = layout_of(1, &vectors[i].group);
    const uint32_t set = kvf_auxbuild_set(&layout, 0);
    const kvf_aux_config_t config = {cached ? KVF_AUX_CACHED : KVF_AUX_PLAIN, limits, &device_kind,
                                     NULL};
    kvf_auxbuild_t *build = open_build(&layout, limits);
    kvf_auxdata_t *aux;
    const kvf_table_t table = {vectors[i].slots, vectors[i].n_blocks};
    const kvf_aux_seq_t seq = {&table, vectors[i].n_tokens, 1, &vectors[i].prefix,
                               vectors[i].prefix != 0};
    cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, NULL), KVF_OK);
    cr_assert_eq(set, vectors[i].group[1] != 0);
    run(build, 1, &seq);
    cr_assert_eq(kvf_auxbuild_copy(build, aux, NULL), KVF_OK);
    cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_OK);
    for (uint32_t depth = 0; depth < 2; depth++) {
        const char *const *want = vectors[i].pages[depth];
        expect_pages((struct source){build, aux}, set, depth, want[0], want[1], want[2], want[3]);
    }
    kvf_aux_destroy(aux);
    kvf_auxbuild_destroy(build);
}

Test(auxbuild, makes_the_vectors) {
    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
        run_vector(i, false);
        run_vector(i, true);
    }
    check_leaks();
}

/* Groups and batches */

/* A full group behind the first of three with windows; every table has slots of its own. */
static const int64_t three_windows[4][3] = {{4, 3, 0}, {4, 0, 0}, {4, 6, 2}, {2, 9, 0}};
static const int32_t slots_a[4][7] = {{-1, -1, 102, 103},
                                      {110, 111, 112, 113},
                                      {120, 121, 122, 123},
                                      {-1, -1, 132, 133, 134, 135, 136}};
static const int32_t slots_b[4][8] = {{200, 201, 202, 203},
                                      {210, 211, 212, 213},
                                      {220, 221, 222, 223},
                                      {230, 231, 232, 233, 234, 235, 236, 237}};

static void check_three_windows(struct source from) {
    /* L = 13, of which 8 are shared; L = 15, of which 4 are shared and 3 are the step's */
    expect_pages(from, 0, 0, "0,2,3", "110,111,210", "4,4,0,0,0,0", "0,0");
    expect_pages(from, 0, 1, "0,2,5", "112,113,211,212,213", "1,3,0,0,0,0", "8,4");
    expect_pages(from, 1, 0, "0,0,0", "", "0,0,0,0,0,0", "8,4");
    expect_pages(from, 1, 1, "0,2,3", "102,103,203", "1,3,2,0,0,0", "10,12");
    expect_pages(from, 2, 0, "0,2,3", "120,121,220", "4,4,7,4,2,2", "7,4");
    expect_pages(from, 2, 1, "0,2,4", "122,123,222,223", "1,3,0,1,0,0", "8,9");
    expect_pages(from, 3, 0, "0,2,2", "132,133", "2,0,0,0,0,0", "4,4");
    expect_pages(from, 3, 1, "0,3,8", "134,135,136,233,234,235,236,237", "1,1,0,0,0,0", "8,6");
    for (uint32_t depth = 0; depth < 2; depth++) {
        expect(from, KVF_AUX_QO_INDPTR, 0, depth, "0,1,4");
    }
    expect(from, KVF_AUX_CUR_APPEND_LENGTH_INDPTR, 0, 0, "0,1,4");
    expect(from, KVF_AUX_K_RAGGED_ROPE_POS_OFFSET, 0, 0, "12,12");
    expect(from, KVF_AUX_Q_ROPE_POSITION_MAP, 0, 0, "12,12,13,14");
    expect(from, KVF_AUX_APPEND_POSITION_MAP, 0, 0, "452,852,853,854"); /* in the full group */
}

static void run_three_windows(kvf_aux_manager_t manager) {
    const kvf_layout_t layout = layout_of(4, three_windows);
    const kvf_aux_config_t config = {manager, {2, 16, 8, 2, 3, 0}, &device_kind, NULL};
    kvf_auxbuild_t *build = open_build(&layout, config.limits);
    kvf_auxdata_t *aux;
    kvf_table_t a[4], b[4];
    const int64_t shared[2] = {8, 4};
    for (uint32_t g = 0; g < 4; g++) {
        a[g] = (kvf_table_t){slots_a[g], g == 3 ? 7 : 4};
        b[g] = (kvf_table_t){slots_b[g], g == 3 ? 8 : 4};
    }
    const kvf_aux_seq_t seqs[2] = {{a, 13, 1, &shared[0], 1}, {b, 15, 3, &shared[1], 1}};
    cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, NULL), KVF_OK);
    cr_assert_eq(kvf_auxbuild_copy(build, aux, NULL), KVF_ERR_UNKNOWN, "nothing was built");
    for (int step = 0; step < 2; step++) {
        kvf_aux_reset(aux);
        device.writes = 0;
        run(build, 2, seqs);
        check_three_windows((struct source){build, NULL});
        cr_assert_eq(kvf_auxbuild_copy(build, aux, NULL), KVF_OK);
        cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_OK);
        run(build, 1, seqs + 1); /* what was copied does not depend on the builder */
        check_three_windows((struct source){build, aux});
        /* 4 page arrays of 4 sets and 2 depths less 1 list without pages, qo_indptr of 2 depths,
         * 4 arrays that exist once */
        cr_assert_eq(device.writes, manager == KVF_AUX_PLAIN ? 4 * 4 * 2 - 1 + 2 + 4 : 1);
    }
    cr_assert_eq(kvf_auxbuild_copy(build, aux, NULL), KVF_ERR_INVALID, "a step has each key once");
    kvf_aux_destroy(aux);
    kvf_auxbuild_destroy(build);
    kvf_auxbuild_destroy(NULL);
    check_leaks();
}

Test(auxbuild, plain_three_windows_and_a_batch) {
    run_three_windows(KVF_AUX_PLAIN);
}

Test(auxbuild, cached_three_windows_and_a_batch) {
    run_three_windows(KVF_AUX_CACHED);
}

Test(auxbuild, sets_of_groups) {
    static const int64_t windows[2][3] = {{4, 3, 0}, {4, 5, 0}};
    static const int64_t two_full[3][3] = {{4, 0, 0}, {4, 3, 0}, {4, 0, 0}};
    const kvf_layout_t no_full = layout_of(2, windows), more = layout_of(3, two_full);
    const kvf_layout_t mixed = layout_of(4, three_windows);
    static const uint32_t want[4] = {1, 0, 2, 3};
    for (uint32_t g = 0; g < 4; g++) {
        cr_assert_eq(kvf_auxbuild_set(&mixed, g), want[g]);
    }
    cr_assert_eq(kvf_auxbuild_n_sliding(&mixed), 3);
    cr_assert_eq(kvf_auxbuild_set(&no_full, 0), 1);
    cr_assert_eq(kvf_auxbuild_set(&no_full, 1), 2);
    cr_assert_eq(kvf_auxbuild_n_sliding(&no_full), 2);
    cr_assert_eq(kvf_auxbuild_set(&more, 0), 0);
    cr_assert_eq(kvf_auxbuild_set(&more, 1), 1);
    cr_assert_eq(kvf_auxbuild_set(&more, 2), 2, "its slots are not those of the first one");
    cr_assert_eq(kvf_auxbuild_n_sliding(&more), 2);
}

/* Without a full group appended tokens are those of the first one, which may have lost pages that
 * the step's first tokens would go to. */
Test(auxbuild, only_windows) {
    static const int64_t group[1][3] = {{2, 3, 0}};
    const kvf_layout_t layout = layout_of(1, group);
    kvf_auxbuild_t *build = open_build(&layout, (kvf_aux_limits_t){1, 4, 8, 1, 1, 0});
    static const int32_t slots[] = {-1, -1, 7, 6, 5};
    const kvf_table_t table = {slots, 5};
    const kvf_aux_seq_t seq = {&table, 9, 7, NULL, 0};
    const struct source from = {build, NULL};
    const int32_t *data;
    int64_t n;
    run(build, 1, &seq);
    expect_pages(from, 1, 0, "0,2", "6,5", "1,0,0", "6");
    expect(from, KVF_AUX_APPEND_POSITION_MAP, 0, 0, "-1,-1,14,15,12,13,10");
    cr_assert_eq(kvf_auxbuild_array(build, (kvf_aux_key_t){KVF_AUX_PAGE_INDPTR, 0, 0}, &data, &n),
                 KVF_ERR_UNKNOWN, "no group has set 0");
    kvf_auxbuild_destroy(build);
}

Test(auxbuild, an_empty_batch_and_what_is_not_made) {
    const kvf_layout_t layout = layout_of(4, three_windows);
    kvf_auxbuild_t *build = open_build(&layout, (kvf_aux_limits_t){2, 16, 8, 2, 3, 0});
    static const kvf_aux_key_t none[] = {
        {KVF_AUX_TREE_ATTN_MASK, 0, 0},
        {KVF_AUX_TREE_ATTN_MN_INDPTR, 0, 0},
        {KVF_AUX_TRANSFER_RECEIVER_ID, 0, 0},
        {KVF_AUX_PAGE_TO_PAGE_RECEIVER_ID, 0, 0},
        {KVF_AUX_PAGE_INDPTR, 4, 0},
        {KVF_AUX_PAGE_INDPTR, 0, 2},
        {KVF_AUX_QO_INDPTR, 1, 0},
        {KVF_AUX_Q_ROPE_POSITION_MAP, 0, 1},
        {KVF_AUX_N_ARRAYS, 0, 0},
    };
    const kvf_aux_key_t indptr = {KVF_AUX_PAGE_INDPTR, 3, 1};
    const int32_t *data = NULL;
    int64_t n = -7;
    cr_assert_eq(kvf_auxbuild_array(build, indptr, &data, &n), KVF_ERR_UNKNOWN);
    run(build, 0, NULL);
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        cr_assert_eq(kvf_auxbuild_array(build, none[i], &data, &n), KVF_ERR_UNKNOWN, "%zu", i);
    }
    cr_assert(data == NULL && n == -7);
    expect_pages((struct source){build, NULL}, 3, 1, "0", "", "", "");
    expect((struct source){build, NULL}, KVF_AUX_QO_INDPTR, 0, 1, "0");
    kvf_auxbuild_destroy(build);
}

/* What is refused */

static const int64_t two_groups[2][3] = {{4, 0, 0}, {2, 5, 3}};
static const int32_t full[] = {1, 2, 3, 4}, sliding[] = {9, 8, -1, -1, 10, 11, 12, 13};
static const int32_t big[] = {1, 2, 3, INT32_MAX}, low[] = {9, 8, -1, 10, 10, -2};
static const int32_t hole[] = {9, 8, -1, -1, 10, 11, -1, 13}, sink[] = {9, -1, 7, 7, 7, 11, 12};
static const int64_t inside[] = {2}, falls[] = {8, 4}, late[] = {12}, negative[] = {-4};

static const struct {
    const int32_t *full, *sliding;
    int64_t n_full, n_sliding, n_tokens, n_query;
    const int64_t *prefixes;
    uint32_t n_prefixes;
    kvf_status_t status;
    const char *text;
} refusals[] = {
    {full, sliding, 4, 8, 13, 1, NULL, 0, KVF_OK, ""},
    {full, sliding, 4, 8, 13, 0, NULL, 0, KVF_ERR_INVALID, "sequence 1: 0 query tokens"},
    {full, sliding, 4, 8, 13, 14, NULL, 0, KVF_ERR_INVALID, "14 query tokens of 13"},
    {full, sliding, 4, 8, -1, 1, NULL, 0, KVF_ERR_INVALID, "1 query tokens of -1"},
    {full, sliding, 4, 8, INT64_C(1) << 31, 1, NULL, 0, KVF_ERR_RANGE, "sequence 1: 2147483648"},
    {full, sliding, 4, 8, 13, 1, inside, 1, KVF_ERR_INVALID, "group g0: shared prefix 0 of 2"},
    {full, sliding, 4, 8, 13, 1, falls, 2, KVF_ERR_INVALID, "prefix 1 ends at 4, not between 8"},
    {full, sliding, 4, 8, 13, 2, late, 1, KVF_ERR_INVALID, "not between 0 and 11"},
    {full, sliding, 4, 8, 13, 1, negative, 1, KVF_ERR_INVALID, "shared prefix 0 ends at -4"},
    {full, hole, 4, 8, 14, 1, NULL, 0, KVF_ERR_UNCOVERED, "sequence 1, group g1: ordinal 6 "},
    {full, sink, 4, 7, 14, 1, NULL, 0, KVF_ERR_UNCOVERED, "sequence 1, group g1: ordinal 1 "},
    {full, sliding, 3, 8, 13, 1, NULL, 0, KVF_ERR_UNCOVERED, "sequence 1, group g0: ordinal 3 "},
    {full, low, 4, 6, 12, 1, NULL, 0, KVF_ERR_INVALID, "group g1: ordinal 5 has slot -2"},
    {full, sliding, 4, 8, 21, 1, NULL, 0, KVF_ERR_TOO_LARGE,
     "group g0: 6 pages at depth 1 after 1"},
    {full, sliding, 4, 8, 13, 3, NULL, 0, KVF_ERR_TOO_LARGE, "3 query tokens after 1"},
    {big, sliding, 4, 8, 13, 1, NULL, 0, KVF_ERR_RANGE, "group g0: slot 2147483647"},
};

Test(auxbuild, refuses_by_name) {
    const kvf_layout_t layout = layout_of(2, two_groups);
    kvf_auxbuild_t *build = open_build(&layout, (kvf_aux_limits_t){2, 6, 3, 2, 1, 0});
    const kvf_table_t good[2] = {{full, 1}, {sliding, 1}};
    const int32_t *data;
    int64_t n;
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const kvf_table_t tables[2] = {{refusals[i].full, refusals[i].n_full},
                                       {refusals[i].sliding, refusals[i].n_sliding}};
        const kvf_aux_seq_t seqs[3] = {{good, 1, 1, NULL, 0},
                                       {tables, refusals[i].n_tokens, refusals[i].n_query,
                                        refusals[i].prefixes, refusals[i].n_prefixes},
                                       {good, 1, 1, NULL, 0}};
        kvf_detail_t detail = {""};
        kvf_status_t got = kvf_auxbuild_run(build, 2, seqs, &detail);
        cr_assert_eq(got, refusals[i].status, "row %zu: %s (%s)", i, kvf_status_name(got),
                     detail.text);
        cr_assert_not_null(strstr(detail.text, refusals[i].text), "row %zu: %s", i, detail.text);
        cr_assert_eq(kvf_auxbuild_array(build, (kvf_aux_key_t){KVF_AUX_QO_INDPTR, 0, 0}, &data, &n),
                     got == KVF_OK ? KVF_OK : KVF_ERR_UNKNOWN);
        cr_assert_eq(kvf_auxbuild_run(build, 3, seqs, &detail), KVF_ERR_TOO_LARGE);
        cr_assert_not_null(strstr(detail.text, "3 sequences"), "%s", detail.text);
    }
    kvf_auxbuild_destroy(build);
}

Test(auxbuild, the_last_place_of_31_bits) {
    const kvf_layout_t layout = layout_of(1, two_groups);
    kvf_auxbuild_t *build = open_build(&layout, (kvf_aux_limits_t){1, 1, 1, 1, 0, 0});
    int32_t slot = INT32_MAX / 4;
    const kvf_table_t table = {&slot, 1};
    const kvf_aux_seq_t seq = {&table, 4, 1, NULL, 0};
    run(build, 1, &seq);
    expect((struct source){build, NULL}, KVF_AUX_APPEND_POSITION_MAP, 0, 0, "2147483647");
    slot++;
    cr_assert_eq(kvf_auxbuild_run(build, 1, &seq, NULL), KVF_ERR_RANGE);
    kvf_auxbuild_destroy(build);
}

Test(auxbuild, long_sequences) {
    /* 2^31 - 1 tokens in blocks of 2^26: the last positions that there are. */
    static const int64_t group[1][3] = {{1 << 26, (1 << 26) + 5, 7}};
    const kvf_layout_t layout = layout_of(1, group);
    kvf_auxbuild_t *build = open_build(&layout, (kvf_aux_limits_t){1, 4, 1, 2, 1, 0});
    int32_t slots[32];
    const kvf_table_t table = {slots, 32};
    const kvf_aux_seq_t seq = {&table, INT32_MAX, 1, NULL, 0};
    for (int32_t i = 0; i < 32; i++) {
        slots[i] = 31 - i;
    }
    run(build, 1, &seq);
    expect_pages((struct source){build, NULL}, 1, 1, "0,3", "31,1,0", "67108863,134217722,7",
                 "2080374778");
    kvf_auxbuild_destroy(build);
}

Test(auxbuild, limits_are_those_of_the_layout) {
    const kvf_layout_t layout = layout_of(4, three_windows);
    kvf_auxbuild_t *build = (kvf_auxbuild_t *)&device;
    kvf_aux_limits_t limits = {2, 16, 8, 2, 2, 0};
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_auxbuild_create(&layout, &limits, kvf_alloc_default(), &build, &detail),
                 KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "n_sliding is 2, and the layout needs 3"));
    limits = (kvf_aux_limits_t){2, 16, 0, 2, 3, 0};
    cr_assert_eq(kvf_auxbuild_create(&layout, &limits, kvf_alloc_default(), &build, &detail),
                 KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "max_chunk"));
    cr_assert_eq((void *)build, (void *)&device);
}

Test(auxbuild, survives_failed_allocations) {
    const kvf_layout_t layout = layout_of(4, three_windows);
    const kvf_aux_limits_t limits = {2, 16, 8, 2, 3, 0};
    kvf_status_t status = KVF_ERR_NO_MEMORY;
    uint64_t n = 0;
    while (status != KVF_OK) {
        kvf_alloc_fail_t alloc;
        kvf_auxbuild_t *build = NULL;
        kvf_alloc_fail_init(&alloc, ++n);
        status = kvf_auxbuild_create(&layout, &limits, &alloc.table, &build, NULL);
        cr_assert(status == KVF_OK || (status == KVF_ERR_NO_MEMORY && build == NULL));
        kvf_auxbuild_destroy(build);
        cr_assert_eq(alloc.live, 0);
    }
    cr_assert_eq(n, 4);
}
