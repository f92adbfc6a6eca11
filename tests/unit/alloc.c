/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/alloc.h"

#include <criterion/criterion.h>
#include <string.h>

Test(alloc, no_bytes_and_overflow_give_null) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    cr_assert_null(kvf_alloc(alloc, 0));
    cr_assert_null(kvf_calloc(alloc, 0, 8));
    cr_assert_null(kvf_calloc(alloc, SIZE_MAX / 2 + 1, 2));
    cr_assert_null(kvf_realloc(alloc, NULL, 8, 0));
    kvf_free(alloc, NULL);
}

Test(alloc, calloc_clears_and_realloc_keeps) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    unsigned char *bytes = kvf_calloc(alloc, 25, 4);
    cr_assert_not_null(bytes);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(bytes[i], 0);
        bytes[i] = (unsigned char)i;
    }
    cr_assert_null(kvf_realloc(alloc, bytes, SIZE_MAX, 2));
    bytes = kvf_realloc(alloc, bytes, 5000, 2);
    cr_assert_not_null(bytes);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(bytes[i], i);
    }
    kvf_free(alloc, bytes);
}

Test(alloc, strdup_copies) {
    char text[] = "page";
    char *copy = kvf_strdup(kvf_alloc_default(), text);
    text[0] = 'c';
    cr_assert_str_eq(copy, "page");
    kvf_free(kvf_alloc_default(), copy);
}

Test(alloc, the_nth_fails_and_only_it) {
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 2);
    void *first = kvf_alloc(&fail.table, 10);
    cr_assert_not_null(first);
    cr_assert_null(kvf_realloc(&fail.table, first, 20, 1));
    cr_assert_eq(fail.live, 1, "a failed resize keeps the old memory");
    memset(first, 1, 10);
    void *third = kvf_strdup(&fail.table, "x");
    cr_assert_not_null(third);
    cr_assert_eq(fail.calls, 3);
    cr_assert_eq(fail.live, 2);
    kvf_free(&fail.table, first);
    kvf_free(&fail.table, third);
    cr_assert_eq(fail.live, 0);
    cr_assert_eq(fail.calls, 3, "frees are not counted");
}

Test(alloc, fail_from_stays) {
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 1);
    fail.fail_from = true;
    cr_assert_null(kvf_alloc(&fail.table, 1));
    cr_assert_null(kvf_calloc(&fail.table, 1, 1));
    cr_assert_null(kvf_strdup(&fail.table, ""));
    cr_assert_eq(fail.live, 0);
}
