/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/score.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static uint64_t count_of(const kvf_score_t *score, const char *code) {
    uint64_t n = 0;
    for (size_t i = 0; i < score->n_codes; i++) {
        n += strcmp(score->failures[i].code, code) == 0 ? score->failures[i].n : 0;
    }
    return n;
}

Test(score, failures_by_code) {
    kvf_score_t score;
    kvf_score_init(&score, kvf_alloc_default());
    cr_assert_eq(kvf_score_failed(&score), 0);
    static const char *const codes[] = {"peer_lost", "again", "peer_lost", "peer", "peer_lost"};
    for (size_t i = 0; i < 5; i++) {
        kvf_score_fail(&score, codes[i]);
    }
    cr_assert_eq(score.n_codes, 3);
    cr_assert_eq(count_of(&score, "peer_lost"), 3);
    cr_assert_eq(count_of(&score, "again"), 1);
    cr_assert_eq(count_of(&score, "peer"), 1);
    cr_assert_eq(kvf_score_failed(&score), 5);
    kvf_score_cleanup(&score);
}

/* Codes are what a node sends: a thousand different and overlong ones stay in the table. */
Test(score, invented_codes_stay_bounded) {
    kvf_score_t score;
    kvf_score_init(&score, kvf_alloc_default());
    for (int i = 0; i < 1000; i++) {
        char code[100];
        (void)snprintf(code, sizeof(code), "code-%03d-%060d", i, 0);
        kvf_score_fail(&score, code);
        kvf_score_fail(&score, code);
    }
    cr_assert_eq(score.n_codes, KVF_SCORE_CODES);
    cr_assert_eq(kvf_score_failed(&score), 2000);
    cr_assert_eq(count_of(&score, "other"), 2000 - 2 * (KVF_SCORE_CODES - 1));
    for (size_t i = 0; i < KVF_SCORE_CODES; i++) {
        cr_assert_lt(strlen(score.failures[i].code), (size_t)KVF_SCORE_CODE_BYTES);
    }
    kvf_score_fail(&score, score.failures[0].code);
    cr_assert_eq(score.failures[0].n, 3);
    kvf_score_cleanup(&score);
}
