/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/size.h"

#include <criterion/criterion.h>

Test(size, sums_and_products_that_do_not_fit) {
    uint64_t out = 5;
    cr_assert_eq(kvf_add_u64(UINT64_MAX, 1, &out), KVF_ERR_RANGE);
    cr_assert_eq(kvf_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &out), KVF_ERR_RANGE);
    cr_assert_eq(out, 5, "outputs only on success");
    cr_assert_eq(kvf_add_u64(UINT64_MAX - 1, 1, &out), KVF_OK);
    cr_assert_eq(out, UINT64_MAX);
    cr_assert_eq(kvf_mul_u64(UINT64_C(0xffffffff), UINT64_C(0x100000001), &out), KVF_OK);
    cr_assert_eq(out, UINT64_MAX);
    cr_assert_eq(kvf_mul_u64(0, UINT64_MAX, &out), KVF_OK);
    cr_assert_eq(out, 0);
}

Test(size, ranges_inside_a_region) {
    cr_assert(kvf_range_ok(0, 0, 0));
    cr_assert(kvf_range_ok(10, 0, 10));
    cr_assert(kvf_range_ok(3, 7, 10));
    cr_assert_not(kvf_range_ok(3, 8, 10));
    cr_assert_not(kvf_range_ok(11, 0, 10));
    cr_assert_not(kvf_range_ok(UINT64_MAX, 2, 10), "off + len wraps to 1");
    cr_assert_not(kvf_range_ok(2, UINT64_MAX, 10));
}

Test(size, division_rounds_up_and_down) {
    /* Counted out: the smallest q with q * b >= a, and the largest with q * b <= a. */
    for (int64_t b = 1; b <= 5; b++) {
        for (int64_t a = -12; a <= 12; a++) {
            int64_t down = -20, up = 20;
            while ((down + 1) * b <= a) {
                down++;
            }
            while ((up - 1) * b >= a) {
                up--;
            }
            cr_assert_eq(kvf_div_floor(a, b), down, "%ld / %ld", (long)a, (long)b);
            if (a >= 0) {
                cr_assert_eq(kvf_div_ceil(a, b), up, "%ld / %ld", (long)a, (long)b);
            }
        }
    }
    cr_assert_eq(kvf_div_ceil(INT64_MAX, 2), INT64_C(1) << 62);
}
