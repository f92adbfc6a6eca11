/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nearest.h"

#include <criterion/criterion.h>
#include <string.h>

#define MAX_LENGTH 5

/* The definition, word for word: the first bytes are the same, or one of three edits is made. */
static size_t by_definition(const char *a, const char *b) {
    if (*a == '\0' || *b == '\0') {
        return strlen(a) + strlen(b);
    }
    if (*a == *b) {
        return by_definition(a + 1, b + 1);
    }
    size_t removed = by_definition(a + 1, b), inserted = by_definition(a, b + 1);
    size_t replaced = by_definition(a + 1, b + 1);
    size_t least = removed < inserted ? removed : inserted;
    return 1 + (least < replaced ? least : replaced);
}

/* The k-th text over {a, b}, shorter ones first: the binary digits of k + 1 without the leading 1.
 */
static void text_of(unsigned k, char text[MAX_LENGTH + 1]) {
    unsigned bits = k + 1, length = 0;
    while (bits >> length > 1) {
        length++;
    }
    for (unsigned i = 0; i < length; i++) {
        text[i] = bits >> i & 1 ? 'b' : 'a';
    }
    text[length] = '\0';
}

Test(nearest, all_pairs_of_short_texts) {
    char a[MAX_LENGTH + 1], b[MAX_LENGTH + 1];
    for (unsigned i = 0; i < (2U << MAX_LENGTH) - 1; i++) {
        for (unsigned j = 0; j < (2U << MAX_LENGTH) - 1; j++) {
            text_of(i, a);
            text_of(j, b);
            cr_assert_eq(kvf_nearest_distance(a, b), by_definition(a, b), "%s %s", a, b);
        }
    }
}

Test(nearest, names) {
    cr_assert_eq(kvf_nearest_distance("plan", "plan"), 0);
    cr_assert_eq(kvf_nearest_distance("paln", "plan"), 2);
    cr_assert_eq(kvf_nearest_distance("pool.byte", "pool.bytes"), 1);
    cr_assert_eq(kvf_nearest_distance("kitten", "sitting"), 3);
    cr_assert_eq(kvf_nearest_distance("", "sim"), 3);
}

/* What lies behind the limit counts on neither side. */
Test(nearest, long_texts_count_up_to_the_limit) {
    char a[1000], b[KVF_NEAREST_BYTES + 2];
    memset(a, 'a', sizeof(a));
    a[sizeof(a) - 1] = '\0';
    memset(b, 'a', sizeof(b));
    b[sizeof(b) - 1] = '\0';
    cr_assert_eq(kvf_nearest_distance(a, b), 0);
    cr_assert_eq(kvf_nearest_distance(b, a), 0);
    b[KVF_NEAREST_BYTES - 1] = 'b';
    cr_assert_eq(kvf_nearest_distance(a, b), 1, "the last byte that counts");
    cr_assert_eq(kvf_nearest_distance(a, ""), KVF_NEAREST_BYTES);
    cr_assert_eq(kvf_nearest_distance("", a), KVF_NEAREST_BYTES);
}
