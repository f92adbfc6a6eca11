/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/ended.h"

#include <criterion/criterion.h>
#include <stdio.h>

static kvf_ended_t *make(size_t capacity) {
    kvf_ended_t *ended;
    cr_assert_eq(kvf_ended_create(kvf_alloc_default(), capacity, &ended), KVF_OK);
    return ended;
}

Test(ended, the_oldest_makes_room) {
    kvf_ended_t *ended = make(3);
    for (int i = 0; i < 10; i++) {
        char id[24], text[24];
        (void)snprintf(id, sizeof(id), "id%d", i);
        (void)snprintf(text, sizeof(text), "text%d", i);
        kvf_ended_put(ended, id, text, false);
        for (int k = 0; k <= i; k++) {
            (void)snprintf(id, sizeof(id), "id%d", k);
            (void)snprintf(text, sizeof(text), "text%d", k);
            const char *got = kvf_ended_get(ended, id);
            if (k > i - 3) {
                cr_assert_not_null(got);
                cr_assert_str_eq(got, text);
            } else {
                cr_assert_null(got);
            }
        }
    }
    kvf_ended_destroy(ended);
}

Test(ended, a_second_record_replaces_the_first) {
    kvf_ended_t *ended = make(3);
    kvf_ended_put(ended, "a", "1", false);
    kvf_ended_put(ended, "b", "2", false);
    kvf_ended_put(ended, "a", "3", false);
    cr_assert_str_eq(kvf_ended_get(ended, "a"), "3");
    cr_assert_str_eq(kvf_ended_get(ended, "b"), "2");
    kvf_ended_put(ended, "c", "4", false);
    kvf_ended_put(ended, "d", "5", false);
    kvf_ended_put(ended, "e", "6", false);
    cr_assert_null(kvf_ended_get(ended, "a"));
    cr_assert_null(kvf_ended_get(ended, "b"));
    cr_assert_str_eq(kvf_ended_get(ended, "c"), "4");
    cr_assert_str_eq(kvf_ended_get(ended, "e"), "6");
    cr_assert_null(kvf_ended_get(ended, ""));
    kvf_ended_destroy(ended);
}

Test(ended, the_newest_record_of_an_id_is_found_among_many) {
    kvf_ended_t *ended = make(1000);
    for (int i = 0; i < 900; i++) {
        char id[24], text[24];
        (void)snprintf(id, sizeof(id), "id%d", i);
        kvf_ended_put(ended, id, "other", false);
        (void)snprintf(text, sizeof(text), "%d", i / 10);
        if (i % 10 == 0) {
            kvf_ended_put(ended, "a", text, false);
        }
        cr_assert_str_eq(kvf_ended_get(ended, "a"), text);
    }
    kvf_ended_destroy(ended);
}

Test(ended, a_refusal_does_not_replace_what_ran) {
    kvf_ended_t *ended = make(3);
    kvf_ended_put(ended, "a", "refused", true);
    kvf_ended_put(ended, "a", "refused again", true);
    cr_assert_str_eq(kvf_ended_get(ended, "a"), "refused again");
    kvf_ended_put(ended, "a", "done", false);
    cr_assert_str_eq(kvf_ended_get(ended, "a"), "done");
    kvf_ended_put(ended, "a", "refused", true);
    cr_assert_str_eq(kvf_ended_get(ended, "a"), "done");
    kvf_ended_put(ended, "b", "refused", true);
    cr_assert_str_eq(kvf_ended_get(ended, "b"), "refused");
    kvf_ended_put(ended, "a", "lost", false);
    cr_assert_str_eq(kvf_ended_get(ended, "a"), "lost");
    kvf_ended_destroy(ended);
}

/* Without memory a record may be absent, but never wrong, and nothing leaks. */
Test(ended, every_allocation_may_fail) {
    uint64_t total = 0;
    for (uint64_t n = 0; n <= total; n++) {
        kvf_alloc_fail_t fail;
        kvf_ended_t *ended = NULL;
        kvf_alloc_fail_init(&fail, n);
        if (kvf_ended_create(&fail.table, 2, &ended) == KVF_OK) {
            static const char *const ids[] = {"a", "b", "a", "c", "d"};
            for (int i = 0; i < 5; i++) {
                kvf_ended_put(ended, ids[i], ids[i], false);
                const char *got = kvf_ended_get(ended, ids[i]);
                cr_assert(got != NULL || n != 0);
                cr_assert(got == NULL || got[0] == ids[i][0]);
            }
        } else {
            cr_assert_eq(n, 1);
        }
        total = n == 0 ? fail.calls : total;
        kvf_ended_destroy(ended);
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_geq(total, 6);
}
