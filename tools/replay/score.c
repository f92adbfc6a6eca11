/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/score.h"

#include <stdio.h>
#include <string.h>

void kvf_score_init(kvf_score_t *score, const kvf_alloc_t *alloc) {
    *score = (kvf_score_t){0};
    for (size_t i = 0; i < KVF_SCORE_TIMES; i++) {
        score->times[i].alloc = alloc;
    }
}

void kvf_score_cleanup(kvf_score_t *score) {
    for (size_t i = 0; i < KVF_SCORE_TIMES; i++) {
        kvf_samples_cleanup(&score->times[i]);
    }
}

/* The entry of a code, made when there is none yet; NULL when that would take the last place. */
static kvf_score_failures_t *entry_of(kvf_score_t *score, const char *code, size_t places) {
    for (size_t i = 0; i < score->n_codes; i++) {
        if (strcmp(score->failures[i].code, code) == 0) {
            return &score->failures[i];
        }
    }
    if (score->n_codes >= places) {
        return NULL;
    }
    kvf_score_failures_t *fresh = &score->failures[score->n_codes++];
    (void)snprintf(fresh->code, sizeof(fresh->code), "%s", code);
    return fresh;
}

void kvf_score_fail(kvf_score_t *score, const char *code) {
    /* Codes come from the nodes: a broken one must not make the table, or a line of it, endless. */
    char name[KVF_SCORE_CODE_BYTES];
    (void)snprintf(name, sizeof(name), "%s", code);
    kvf_score_failures_t *entry = entry_of(score, name, KVF_SCORE_CODES - 1);
    if (entry == NULL) {
        entry = entry_of(score, "other", KVF_SCORE_CODES);
    }
    entry->n++;
}

uint64_t kvf_score_failed(const kvf_score_t *score) {
    uint64_t n = 0;
    for (size_t i = 0; i < score->n_codes; i++) {
        n += score->failures[i].n;
    }
    return n;
}
