/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/status.h"

#include <criterion/criterion.h>
#include <string.h>

/* The names that docs/contracts.md promises for errors, and what is dead after each. */
static const struct {
    const char *name;
    kvf_status_t status;
    kvf_scope_t scope;
} rows[] = {
    {"ok", KVF_OK, KVF_SCOPE_NONE},
    {"invalid", KVF_ERR_INVALID, KVF_SCOPE_CALL},
    {"capacity_mismatch", KVF_ERR_CAPACITY_MISMATCH, KVF_SCOPE_CALL},
    {"count_mismatch", KVF_ERR_COUNT_MISMATCH, KVF_SCOPE_CALL},
    {"again", KVF_ERR_AGAIN, KVF_SCOPE_RETRY},
    {"no_memory", KVF_ERR_NO_MEMORY, KVF_SCOPE_RETRY},
    {"uncovered", KVF_ERR_UNCOVERED, KVF_SCOPE_TRANSFER},
    {"digest_mismatch", KVF_ERR_DIGEST_MISMATCH, KVF_SCOPE_TRANSFER},
    {"peer_lost", KVF_ERR_PEER_LOST, KVF_SCOPE_PEER},
    {"protocol", KVF_ERR_PROTOCOL, KVF_SCOPE_PEER},
    {"io", KVF_ERR_IO, KVF_SCOPE_AGENT},
    {"internal", KVF_ERR_INTERNAL, KVF_SCOPE_AGENT},
};

Test(status, names_and_scopes) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        kvf_status_t status = KVF_ERR_USED;
        cr_assert_str_eq(kvf_status_name(rows[i].status), rows[i].name);
        cr_assert_eq(kvf_status_scope(rows[i].status), rows[i].scope, "%s", rows[i].name);
        cr_assert_eq(kvf_status_from_name(rows[i].name, &status), KVF_OK);
        cr_assert_eq(status, rows[i].status, "%s", rows[i].name);
        cr_assert_gt(strlen(kvf_status_text(rows[i].status)), 3);
    }
}

Test(status, every_number_has_a_name_of_its_own) {
    const char *seen[128];
    size_t n = 0;
    for (int code = 0; code > -128; code--) {
        kvf_status_t back = KVF_OK;
        const char *name = kvf_status_name((kvf_status_t)code);
        cr_assert_eq(kvf_status_from_name(name, &back), KVF_OK);
        if ((int)back != code) {
            cr_assert_eq(back, KVF_ERR_INTERNAL, "%d is unknown, so it is internal", code);
            cr_assert_eq(kvf_status_scope((kvf_status_t)code), KVF_SCOPE_AGENT);
            continue;
        }
        for (size_t i = 0; i < n; i++) {
            cr_assert_str_neq(seen[i], name);
        }
        seen[n++] = name;
    }
    cr_assert_geq(n, sizeof(rows) / sizeof(rows[0]));
}

Test(status, unknown_name_leaves_the_output) {
    kvf_status_t status = KVF_ERR_USED;
    cr_assert_eq(kvf_status_from_name("peer_los", &status), KVF_ERR_UNKNOWN);
    cr_assert_eq(kvf_status_from_name("", &status), KVF_ERR_UNKNOWN);
    cr_assert_eq(status, KVF_ERR_USED);
}

Test(status, fail_writes_the_reason_and_cuts_it) {
    kvf_detail_t detail = {"before"};
    char longer[KVF_DETAIL_BYTES * 2];
    memset(longer, 'x', sizeof(longer));
    longer[sizeof(longer) - 1] = '\0';
    cr_assert_eq(kvf_fail(&detail, KVF_ERR_RANGE, "%d of %s", 7, "nine"), KVF_ERR_RANGE);
    cr_assert_str_eq(detail.text, "7 of nine");
    cr_assert_eq(kvf_fail(&detail, KVF_ERR_BUSY, "%s", longer), KVF_ERR_BUSY);
    cr_assert_eq(strlen(detail.text), KVF_DETAIL_BYTES - 1);
    cr_assert_eq(kvf_fail(NULL, KVF_ERR_IO, "nobody asked"), KVF_ERR_IO);
}
