/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/cursor.h"

#include <criterion/criterion.h>

static const uint8_t wire[] = {0x2a, 0x02, 0x01, 0x06, 0x05, 0x04, 0x03, 0x0e, 0x0d,
                               0x0c, 0x0b, 0x0a, 0x09, 0x08, 0x87, 'k',  'v'};

Test(cursor, writes_little_endian) {
    uint8_t raw[sizeof(wire) + 1] = {0};
    raw[sizeof(wire)] = 0x55;
    kvf_writer_t w = kvf_writer(raw, sizeof(wire));
    kvf_write_u8(&w, 42);
    kvf_write_u16(&w, 0x0102);
    kvf_write_u32(&w, 0x03040506);
    kvf_write_u64(&w, UINT64_C(0x8708090a0b0c0d0e));
    kvf_write_bytes(&w, "kv", 2);
    cr_assert_eq(w.left, 0);
    cr_assert_not(w.bad);
    cr_assert_arr_eq(raw, wire, sizeof(wire));
    kvf_write_u8(&w, 1);
    cr_assert(w.bad);
    cr_assert_eq(raw[sizeof(wire)], 0x55, "nothing is written past the end");
}

Test(cursor, reads_what_was_written) {
    kvf_reader_t r = kvf_reader(wire, sizeof(wire));
    cr_assert_eq(kvf_read_u8(&r), 42);
    cr_assert_eq(kvf_read_u16(&r), 0x0102);
    cr_assert_eq(kvf_read_u32(&r), 0x03040506);
    cr_assert_eq(kvf_read_u64(&r), UINT64_C(0x8708090a0b0c0d0e));
    cr_assert_not(kvf_reader_done(&r), "two bytes are left");
    cr_assert_eq(kvf_read_bytes(&r, 2), wire + sizeof(wire) - 2);
    cr_assert(kvf_reader_done(&r));
}

Test(cursor, past_the_end_is_bad_for_good) {
    kvf_reader_t r = kvf_reader(wire, 3);
    cr_assert_eq(kvf_read_u32(&r), 0);
    cr_assert_eq(r.left, 3, "a failed access moves nothing");
    cr_assert_eq(kvf_read_u8(&r), 0, "and what would fit is refused from then on");
    cr_assert_null(kvf_read_bytes(&r, 0));
    cr_assert_not(kvf_reader_done(&r));

    uint8_t raw[3] = {9, 9, 9};
    kvf_writer_t w = kvf_writer(raw, sizeof(raw));
    kvf_write_u32(&w, 0);
    kvf_write_u8(&w, 1);
    cr_assert(w.bad);
    cr_assert_eq(raw[0], 9);
}

Test(cursor, nothing_at_all_is_done) {
    kvf_reader_t r = kvf_reader(NULL, 0);
    kvf_writer_t w = kvf_writer(NULL, 0);
    kvf_write_bytes(&w, NULL, 0);
    cr_assert(kvf_reader_done(&r));
    cr_assert_not(w.bad);
}
