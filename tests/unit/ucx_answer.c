/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_answer.h"

#include <criterion/criterion.h>
#include <string.h>

static const kvf_ucx_release_t ours = {1, 22};
static const uint64_t none[KVF_MAX_GROUPS];
static uint8_t bytes_of[KVF_UCX_ADDRESS_BYTES + 1];

static kvf_ucx_answer_t make(uint32_t n_pools, size_t key_bytes, size_t address_bytes) {
    kvf_ucx_answer_t answer = {.n_pools = n_pools};
    for (size_t i = 0; i < sizeof(bytes_of); i++) {
        bytes_of[i] = (uint8_t)(i * 11 + 3);
    }
    for (uint32_t i = 0; i < n_pools; i++) {
        answer.pools[i] = (kvf_ucx_lent_t){UINT64_C(0x7f0000000000) + i, 4096 * (i + UINT64_C(1)),
                                           bytes_of + i, key_bytes};
    }
    answer.address = bytes_of + 7;
    answer.address_bytes = address_bytes;
    return answer;
}

Test(ucx_answer, comes_back_as_it_went) {
    static const size_t keys[] = {1, 31, KVF_UCX_KEY_BYTES}, addresses[] = {1, 600, 2048 - 7};
    for (uint32_t n = 1; n <= KVF_MAX_GROUPS; n++) {
        for (size_t k = 0; k < 9; k++) {
            const kvf_ucx_answer_t went = make(n, keys[k / 3], addresses[k % 3]);
            kvf_ucx_answer_t came = {.n_pools = 99};
            uint8_t buf[KVF_UCX_ANSWER_BYTES];
            size_t bytes = 0;
            cr_assert_eq(kvf_ucx_answer_write(ours, &went, buf, &bytes), KVF_OK);
            cr_assert_eq(bytes, 12 + 4 + n * (20 + keys[k / 3]) + addresses[k % 3]);
            cr_assert_eq(kvf_ucx_answer_read(ours, buf, bytes, n, none, &came, NULL), KVF_OK);
            cr_assert_eq(came.n_pools, n);
            cr_assert_eq(came.address_bytes, went.address_bytes);
            cr_assert_arr_eq((const uint8_t *)came.address, (const uint8_t *)went.address,
                             went.address_bytes);
            for (uint32_t i = 0; i < n; i++) {
                cr_assert_eq(came.pools[i].base, went.pools[i].base);
                cr_assert_eq(came.pools[i].bytes, went.pools[i].bytes);
                cr_assert_eq(came.pools[i].key_bytes, went.pools[i].key_bytes);
                cr_assert_arr_eq((const uint8_t *)came.pools[i].key,
                                 (const uint8_t *)went.pools[i].key, went.pools[i].key_bytes);
            }
        }
    }
}

/* Behind the envelope: how many, then of each its beginning, length, and key; then the address. */
Test(ucx_answer, has_these_bytes) {
    const kvf_ucx_answer_t answer = {.pools = {{0x0102030405060708, 0x1000, "ke", 2}},
                                     .n_pools = 1,
                                     .address = "addr",
                                     .address_bytes = 4};
    static const uint8_t wire[] = {1, 0, 0, 0, 8, 7, 6, 5, 4, 3,   2,   1,   0,   0x10, 0,
                                   0, 0, 0, 0, 0, 2, 0, 0, 0, 'k', 'e', 'a', 'd', 'd',  'r'};
    uint8_t buf[KVF_UCX_ANSWER_BYTES];
    size_t bytes = 0;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_OK);
    cr_assert_eq(bytes, KVF_UCX_ENVELOPE_BYTES + sizeof(wire));
    cr_assert_arr_eq(buf + KVF_UCX_ENVELOPE_BYTES, wire, sizeof(wire));
}

Test(ucx_answer, has_limits) {
    uint8_t buf[KVF_UCX_ANSWER_BYTES];
    size_t bytes = 77;
    kvf_ucx_answer_t answer = make(1, 1, 100);
    answer.pools[0].key_bytes = KVF_UCX_KEY_BYTES + 1;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_ERR_RANGE);
    answer = make(1, 1, 100);
    answer.address = bytes_of;
    answer.address_bytes = KVF_UCX_ADDRESS_BYTES + 1;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_ERR_RANGE);
    cr_assert_eq(bytes, 77);
}

Test(ucx_answer, every_cut_and_every_flip_is_found) {
    const kvf_ucx_answer_t answer = make(2, 9, 50);
    kvf_ucx_answer_t came = {.n_pools = 99};
    uint8_t buf[KVF_UCX_ANSWER_BYTES];
    size_t bytes = 0;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_OK);
    for (size_t cut = 0; cut < bytes; cut++) {
        cr_assert_eq(kvf_ucx_answer_read(ours, buf, cut, 2, none, &came, NULL), KVF_ERR_INVALID);
    }
    for (size_t bit = 0; bit < 8 * bytes; bit++) {
        buf[bit / 8] ^= (uint8_t)(1U << bit % 8);
        cr_assert_eq(kvf_ucx_answer_read(ours, buf, bytes, 2, none, &came, NULL),
                     bit < 32 ? KVF_ERR_INCOMPATIBLE : KVF_ERR_INVALID, "bit %zu", bit);
        buf[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    cr_assert_eq(came.n_pools, 99);
}

/* Whole envelopes of what nobody writes. */
static void refused(const uint8_t *inside, size_t inside_bytes, uint32_t n_pools, uint64_t least) {
    const uint64_t all[KVF_MAX_GROUPS] = {least, least};
    kvf_ucx_answer_t came = {.n_pools = 99};
    kvf_detail_t detail = {""};
    uint8_t buf[KVF_UCX_ANSWER_BYTES];
    size_t bytes = 0;
    cr_assert_eq(kvf_ucx_envelope_wrap(ours, inside, inside_bytes, buf, sizeof(buf), &bytes),
                 KVF_OK);
    cr_assert_eq(kvf_ucx_answer_read(ours, buf, bytes, n_pools, all, &came, &detail),
                 KVF_ERR_INVALID);
    cr_assert_neq(detail.text[0], '\0');
    cr_assert_eq(came.n_pools, 99);
}

Test(ucx_answer, of_other_pools_or_none) {
    /* One pool of 4096 bytes, a key of one byte, an address of one. */
    uint8_t good[26] = {1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0};
    uint8_t bad[8000] = {0};
    kvf_ucx_answer_t came;
    const uint64_t least[] = {4096};
    uint8_t buf[64];
    size_t bytes = 0;
    cr_assert_eq(kvf_ucx_envelope_wrap(ours, good, sizeof(good), buf, sizeof(buf), &bytes), KVF_OK);
    cr_assert_eq(kvf_ucx_answer_read(ours, buf, bytes, 1, least, &came, NULL), KVF_OK);
    refused(good, sizeof(good), 2, 0);     /* not so many */
    refused(good, sizeof(good), 1, 4097);  /* too short */
    refused(good, sizeof(good) - 1, 1, 0); /* no address */
    refused(good, sizeof(good) - 2, 1, 0); /* no key */
    for (size_t n = 0; n < sizeof(good); n++) {
        refused(good, n == 0 ? 1 : n, 2, 0);
    }
    memcpy(bad, good, sizeof(good));
    refused(bad, 25 + KVF_UCX_ADDRESS_BYTES + 1, 1, 0); /* too long an address */
    bad[20] = 0;
    refused(bad, sizeof(good), 1, 0); /* no key */
    bad[20] = 1;
    bad[21] = 1;
    refused(bad, 25 + 600, 1, 0); /* one of 257 bytes */
    bad[21] = 0;
    memset(bad + 4, 0xff, 8);
    refused(bad, sizeof(good), 1, 0); /* it ends behind the last address */
    memset(bad + 12, 0xff, 8);
    bad[4] = 0;
    refused(bad, sizeof(good), 1, 0);
}
