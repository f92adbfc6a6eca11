/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_address.h"

#include <criterion/criterion.h>
#include <string.h>

static const kvf_ucx_release_t ours = {1, 22};

Test(ucx_address, comes_back_whole) {
    for (size_t bytes = 1; bytes <= KVF_UCX_ADDRESS_BYTES; bytes = bytes * 3 + 1) {
        uint8_t address[KVF_UCX_ADDRESS_BYTES], buf[KVF_UCX_ADDRESS_BYTES + 100];
        const void *inside = NULL;
        size_t n = 0, inside_bytes = 0;
        kvf_detail_t detail = {""};
        for (size_t i = 0; i < bytes; i++) {
            address[i] = (uint8_t)(i * 7 + bytes);
        }
        cr_assert_eq(kvf_ucx_address_wrap(ours, address, bytes, buf, sizeof(buf), &n), KVF_OK);
        cr_assert_eq(n, bytes + KVF_UCX_ENVELOPE_BYTES);
        cr_assert_eq(buf[0] + 256 * buf[1], 1);
        cr_assert_eq(buf[2] + 256 * buf[3], 22);
        cr_assert_arr_eq(buf + KVF_UCX_ENVELOPE_BYTES, address, bytes);
        cr_assert_eq(kvf_ucx_address_unwrap(ours, buf, n, &inside, &inside_bytes, &detail), KVF_OK);
        cr_assert_eq(inside, buf + KVF_UCX_ENVELOPE_BYTES);
        cr_assert_eq(inside_bytes, bytes);
        cr_assert_eq(detail.text[0], '\0');
    }
}

Test(ucx_address, needs_room) {
    uint8_t address[KVF_UCX_ADDRESS_BYTES + 1] = {0}, buf[KVF_UCX_ADDRESS_BYTES + 100];
    size_t n = 77;
    cr_assert_eq(kvf_ucx_address_wrap(ours, address, 100, buf, 111, &n), KVF_ERR_RANGE);
    cr_assert_eq(kvf_ucx_address_wrap(ours, address, 100, buf, 0, &n), KVF_ERR_RANGE);
    cr_assert_eq(kvf_ucx_address_wrap(ours, address, sizeof(address), buf, sizeof(buf), &n),
                 KVF_ERR_RANGE);
    cr_assert_eq(n, 77);
    cr_assert_eq(kvf_ucx_address_wrap(ours, address, 100, buf, 112, &n), KVF_OK);
    cr_assert_eq(n, 112);
}

Test(ucx_address, every_cut_and_every_flip_is_found) {
    uint8_t address[100], buf[112];
    const void *inside = NULL;
    size_t n = 0, inside_bytes = 0;
    memset(address, 0x5a, sizeof(address));
    cr_assert_eq(kvf_ucx_address_wrap(ours, address, sizeof(address), buf, sizeof(buf), &n),
                 KVF_OK);
    for (size_t cut = 0; cut < n; cut++) {
        cr_assert_eq(kvf_ucx_address_unwrap(ours, buf, cut, &inside, &inside_bytes, NULL),
                     KVF_ERR_INVALID);
    }
    for (size_t bit = 0; bit < 8 * n; bit++) {
        buf[bit / 8] ^= (uint8_t)(1U << bit % 8);
        kvf_status_t status = kvf_ucx_address_unwrap(ours, buf, n, &inside, &inside_bytes, NULL);
        cr_assert_eq(status, bit < 32 ? KVF_ERR_INCOMPATIBLE : KVF_ERR_INVALID, "bit %zu", bit);
        buf[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    cr_assert_null(inside);
    cr_assert_eq(inside_bytes, 0);
}

Test(ucx_address, another_release_is_named) {
    const kvf_ucx_release_t other = {1, 13};
    uint8_t buf[64];
    const void *inside;
    size_t n = 0, inside_bytes;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_ucx_address_wrap(other, "abc", 3, buf, sizeof(buf), &n), KVF_OK);
    cr_assert_eq(kvf_ucx_address_unwrap(ours, buf, n, &inside, &inside_bytes, &detail),
                 KVF_ERR_INCOMPATIBLE);
    cr_assert_not_null(strstr(detail.text, "1.13"), "%s", detail.text);
    cr_assert_not_null(strstr(detail.text, "1.22"), "%s", detail.text);
}
