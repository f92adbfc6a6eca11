/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Aux data against a model that knows no formula: it goes through the sequences token by token,
 * asks whether the step sees it, and finds it again in the arrays, with its position, slot and row.
 */
#include "tests/support/aux_build.h"
#include "tests/support/leaks.h"
#include "tests/support/random.h"

#define CASES 50000
#define MAX_SEQS 4
#define MAX_TOKENS 60
#define MAX_DEPTH 4
#define MAX_TEST_GROUPS 4

struct setup {
    uint32_t n_groups, n_seqs, max_depth;
    int64_t groups[MAX_TEST_GROUPS][3];
    kvf_aux_limits_t limits;
    kvf_aux_seq_t seqs[MAX_SEQS];
    kvf_table_t tables[MAX_SEQS][MAX_TEST_GROUPS];
    int32_t slots[MAX_SEQS][MAX_TEST_GROUPS][MAX_TOKENS];
    int64_t prefix_ends[MAX_SEQS][MAX_DEPTH + 1];
};

static bool sees(const struct setup *s, uint32_t r, uint32_t g, int64_t position) {
    const int64_t window = s->groups[g][1];
    return window == 0 || position < s->groups[g][2] || position >= s->seqs[r].n_tokens - window;
}

/* The depth of a token: how many prefixes end in front of it, unless it is in none of them. */
static uint32_t depth_of(const struct setup *s, uint32_t r, int64_t position) {
    for (uint32_t i = 0; i < s->seqs[r].n_prefixes && i + 1 < s->max_depth; i++) {
        if (position < s->prefix_ends[r][i]) {
            return i;
        }
    }
    return s->max_depth - 1;
}

static struct setup draw(test_random_t *random) {
    static const int64_t block_sizes[] = {1, 2, 4, 8, 3};
    struct setup s = {.n_groups = (uint32_t)test_between(random, 1, MAX_TEST_GROUPS),
                      .n_seqs = (uint32_t)test_between(random, 0, MAX_SEQS),
                      .max_depth = (uint32_t)test_between(random, 1, MAX_DEPTH)};
    int64_t common = 1; /* a block of every group */
    for (uint32_t g = 0; g < s.n_groups; g++) {
        const int64_t t = block_sizes[test_between(random, 0, 4)];
        s.groups[g][0] = t;
        s.groups[g][1] = test_between(random, 0, 2) == 0 ? 0 : test_between(random, 1, 40);
        s.groups[g][2] = test_between(random, 0, 1) == 0 ? 0 : test_between(random, 0, 30);
        int64_t multiple = common;
        while (multiple % t != 0) {
            multiple += common;
        }
        common = multiple;
    }
    s.limits =
        (kvf_aux_limits_t){MAX_SEQS,
                           (uint32_t)test_between(random, 0, 4) == 0 ? 40 : MAX_SEQS * MAX_TOKENS,
                           (uint32_t)test_between(random, 0, 9) == 0 ? 60 : MAX_SEQS * MAX_TOKENS,
                           s.max_depth,
                           0,
                           0};
    const bool holes = test_between(random, 0, 4) == 0;
    for (uint32_t r = 0; r < s.n_seqs; r++) {
        kvf_aux_seq_t *seq = &s.seqs[r];
        seq->n_tokens = test_between(random, 1, MAX_TOKENS);
        seq->n_query_tokens =
            test_between(random, 0, 2) == 0 ? test_between(random, 1, seq->n_tokens) : 1;
        seq->n_prefixes = (uint32_t)test_between(random, 0, MAX_DEPTH + 1);
        int64_t end = 0;
        for (uint32_t i = 0; i < seq->n_prefixes; i++) {
            end += common * test_between(random, 0, 2);
            if (end > seq->n_tokens - seq->n_query_tokens) {
                seq->n_prefixes = i;
            } else {
                s.prefix_ends[r][i] = end;
            }
        }
        for (uint32_t g = 0; g < s.n_groups; g++) {
            const int64_t t = s.groups[g][0];
            /* A table may be longer than its tokens, or end in front of them. */
            int64_t n = (seq->n_tokens + t - 1) / t + test_between(random, 0, 1);
            n -= holes && test_between(random, 0, 9) == 0;
            s.tables[r][g].n_blocks = n < MAX_TOKENS ? n : MAX_TOKENS;
            for (int64_t i = 0; i < s.tables[r][g].n_blocks; i++) {
                s.slots[r][g][i] = (int32_t)test_between(random, 0, 100000);
            }
            /* Slid out: everything that is not seen, or some of it; a hole: something seen. */
            for (int64_t i = 0; i < s.tables[r][g].n_blocks; i++) {
                bool seen = false;
                for (int64_t p = i * t; p < (i + 1) * t && p < seq->n_tokens; p++) {
                    seen = seen || sees(&s, r, g, p);
                }
                if (seen ? holes && test_between(random, 0, 30) == 0
                         : test_between(random, 0, 2) != 0) {
                    s.slots[r][g][i] = -1;
                }
            }
        }
    }
    return s;
}

/* What the model expects of a whole step. */
static kvf_status_t expected_status(const struct setup *s, bool *several_p) {
    bool uncovered = false, too_large = false;
    int64_t n_queries = 0;
    for (uint32_t g = 0; g < s->n_groups; g++) {
        int64_t pages[MAX_DEPTH] = {0};
        for (uint32_t r = 0; r < s->n_seqs; r++) {
            int64_t last[MAX_DEPTH] = {-1, -1, -1, -1};
            for (int64_t p = 0; p < s->seqs[r].n_tokens; p++) {
                const int64_t ordinal = p / s->groups[g][0];
                const uint32_t depth = depth_of(s, r, p);
                if (sees(s, r, g, p) && last[depth] != ordinal) {
                    last[depth] = ordinal;
                    pages[depth]++;
                    uncovered = uncovered || ordinal >= s->tables[r][g].n_blocks ||
                                s->slots[r][g][ordinal] < 0;
                }
            }
        }
        for (uint32_t d = 0; d < MAX_DEPTH; d++) {
            too_large = too_large || pages[d] > (int64_t)s->limits.max_pages;
        }
    }
    for (uint32_t r = 0; r < s->n_seqs; r++) {
        n_queries += s->seqs[r].n_query_tokens;
    }
    too_large = too_large || n_queries > (int64_t)s->limits.max_chunk;
    *several_p = uncovered && too_large;
    return uncovered ? KVF_ERR_UNCOVERED : too_large ? KVF_ERR_TOO_LARGE : KVF_OK;
}

/* Expand one row into the tokens that a kernel reads, and compare them with those that the model
 * sees, one after the other: position, slot and row. */
static void check_row(const struct setup *s, struct source from, uint32_t set, uint32_t r,
                      uint32_t g, uint32_t depth) {
    int64_t n, n_indices, n_info;
    const int32_t *indptr = read_array(from, KVF_AUX_PAGE_INDPTR, set, depth, &n);
    const int32_t *indices = read_array(from, KVF_AUX_PAGE_INDICES, set, depth, &n_indices);
    const int32_t *info = read_array(from, KVF_AUX_LENGTH_INFO, set, depth, &n_info);
    const int32_t *rope = read_array(from, KVF_AUX_K_ROPE_POS_OFFSET, set, depth, &n);
    cr_assert_eq(n, s->n_seqs);
    cr_assert_eq(n_info, 3 * n);
    const int64_t t = s->groups[g][0], pages = indptr[r + 1] - indptr[r];
    const int64_t row0 = info[r], row1 = info[n + r], row2 = info[2 * n + r];
    const int64_t end = pages == 0 ? 0 : (pages - 1) * t + row0;
    int64_t depth_start = 0, k = 0, last_page = -1, n_read = 0;
    while (depth_start < s->seqs[r].n_tokens && depth_of(s, r, depth_start) < depth) {
        depth_start++;
    }
    for (int64_t p = 0; p < s->seqs[r].n_tokens; p++) {
        if (depth_of(s, r, p) != depth || !sees(s, r, g, p)) {
            continue;
        }
        if (k == row2) {
            k = row1 > k ? row1 : k; /* behind the sinks comes the window */
        }
        cr_assert_lt(k, end);
        cr_assert_eq(p, k < row2 ? depth_start + k : rope[r] + k - row1);
        cr_assert_lt(indptr[r] + k / t, n_indices);
        cr_assert_eq(indices[indptr[r] + k / t], s->slots[r][g][p / t]);
        cr_assert_eq(k % t, p % t);
        cr_assert(k / t == last_page || k / t == last_page + 1, "a page that nothing is read of");
        last_page = k / t;
        k++;
        n_read++;
    }
    cr_assert_eq(last_page, pages - 1);
    cr_assert(n_read == 0 || k == end || (row1 == end && k == row2), "not all is read");
    cr_assert_eq(n_read, pages == 0 ? 0 : (pages - 1) * t + row0 - row1 + row2);
    cr_assert(pages > 0 || (row0 == 0 && row1 == 0 && row2 == 0));
}

/* The arrays of the step's own tokens; group g has set 0. */
static void check_queries(const struct setup *s, struct source from, uint32_t g) {
    int64_t n, n_positions, n_places;
    const int32_t *append = read_array(from, KVF_AUX_CUR_APPEND_LENGTH_INDPTR, 0, 0, &n);
    const int32_t *ragged = read_array(from, KVF_AUX_K_RAGGED_ROPE_POS_OFFSET, 0, 0, &n);
    const int32_t *positions = read_array(from, KVF_AUX_Q_ROPE_POSITION_MAP, 0, 0, &n_positions);
    const int32_t *places = read_array(from, KVF_AUX_APPEND_POSITION_MAP, 0, 0, &n_places);
    int64_t k = 0;
    cr_assert_eq(n, s->n_seqs);
    for (uint32_t r = 0; r < s->n_seqs; r++) {
        const int64_t n_tokens = s->seqs[r].n_tokens, t = s->groups[g][0];
        cr_assert_eq(append[r], k);
        cr_assert_eq(ragged[r], n_tokens - s->seqs[r].n_query_tokens);
        for (int64_t p = ragged[r]; p < n_tokens; p++, k++) {
            const int32_t slot = s->slots[r][g][p / t];
            cr_assert_eq(positions[k], p);
            cr_assert_eq(places[k], slot < 0 ? -1 : slot * t + p % t);
        }
    }
    cr_assert_eq(append[s->n_seqs], k);
    cr_assert_eq(n_positions, k);
    cr_assert_eq(n_places, k);
    for (uint32_t depth = 0; depth < s->max_depth; depth++) {
        const int32_t *qo = read_array(from, KVF_AUX_QO_INDPTR, 0, depth, &n);
        cr_assert_eq(n, s->n_seqs + 1);
        cr_assert_arr_eq(qo, append, (size_t)n * sizeof(qo[0]));
    }
}

static kvf_status_t check_case(struct setup *s, bool cached, bool in_device) {
    const kvf_layout_t layout = layout_of(s->n_groups, s->groups);
    kvf_auxbuild_t *build = open_build(&layout, s->limits);
    struct source from = {build, NULL};
    kvf_auxdata_t *aux = NULL;
    bool several;
    for (uint32_t r = 0; r < s->n_seqs; r++) {
        for (uint32_t g = 0; g < s->n_groups; g++) {
            s->tables[r][g].slots = s->slots[r][g];
        }
        s->seqs[r].tables = s->tables[r];
        s->seqs[r].prefix_ends = s->prefix_ends[r];
    }
    const kvf_status_t want = expected_status(s, &several);
    kvf_detail_t detail = {""};
    const kvf_status_t got = kvf_auxbuild_run(build, s->n_seqs, s->seqs, &detail);
    cr_assert(got == want || (several && got == KVF_ERR_TOO_LARGE), "%s, want %s: %s",
              kvf_status_name(got), kvf_status_name(want), detail.text);
    if (got == KVF_OK && in_device) {
        kvf_aux_config_t config = {cached ? KVF_AUX_CACHED : KVF_AUX_PLAIN, s->limits, &device_kind,
                                   NULL};
        config.limits.n_sliding = kvf_auxbuild_n_sliding(&layout);
        cr_assert_eq(kvf_aux_create(&config, kvf_alloc_default(), &aux, NULL), KVF_OK);
        cr_assert_eq(kvf_auxbuild_copy(build, aux, &detail), KVF_OK, "%s", detail.text);
        cr_assert_eq(kvf_aux_commit(aux, NULL), KVF_OK);
        from.aux = aux;
    }
    uint32_t global = 0;
    for (uint32_t g = s->n_groups; got == KVF_OK && g-- > 0;) {
        const uint32_t set = kvf_auxbuild_set(&layout, g);
        global = s->groups[g][1] == 0 ? g : global;
        for (uint32_t r = 0; r < s->n_seqs; r++) {
            for (uint32_t depth = 0; depth < s->max_depth; depth++) {
                check_row(s, from, set, r, g, depth);
            }
        }
    }
    if (got == KVF_OK) {
        check_queries(s, from, global);
    }
    kvf_aux_destroy(aux);
    kvf_auxbuild_destroy(build);
    return got;
}

Test(auxbuild, random_batches_against_a_model) {
    test_random_t random = test_random("auxbuild");
    int64_t n_ok = 0, n_uncovered = 0, n_too_large = 0;
    for (int i = 0; i < CASES; i++) {
        struct setup s = draw(&random);
        kvf_status_t status = check_case(&s, i % 2 == 0, i % 16 < 2);
        n_ok += status == KVF_OK;
        n_uncovered += status == KVF_ERR_UNCOVERED;
        n_too_large += status == KVF_ERR_TOO_LARGE;
    }
    cr_assert_gt(n_ok, CASES / 2);
    cr_assert_gt(n_uncovered, CASES / 100);
    cr_assert_gt(n_too_large, CASES / 100);
    check_leaks();
}
