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
    answer.address = bytes_of + 1;
    answer.address_bytes = address_bytes;
    return answer;
}

/* What went comes back, and takes so many bytes. */
static void expect_back(const kvf_ucx_answer_t *went) {
    kvf_ucx_answer_t came = {.n_pools = 99};
    uint8_t buf[KVF_UCX_ANSWER_BYTES];
    size_t bytes = 0, want = KVF_UCX_ENVELOPE_BYTES + 4 + went->address_bytes;
    cr_assert_eq(kvf_ucx_answer_write(ours, went, buf, &bytes), KVF_OK);
    cr_assert_eq(kvf_ucx_answer_read(ours, buf, bytes, went->n_pools, none, &came, NULL), KVF_OK);
    cr_assert_eq(came.n_pools, went->n_pools);
    cr_assert_eq(came.address_bytes, went->address_bytes);
    cr_assert_arr_eq((const uint8_t *)came.address, (const uint8_t *)went->address,
                     went->address_bytes);
    for (uint32_t i = 0; i < went->n_pools; i++) {
        cr_assert_eq(came.pools[i].base, went->pools[i].base);
        cr_assert_eq(came.pools[i].bytes, went->pools[i].bytes);
        cr_assert_eq(came.pools[i].key_bytes, went->pools[i].key_bytes);
        cr_assert_arr_eq((const uint8_t *)came.pools[i].key, (const uint8_t *)went->pools[i].key,
                         went->pools[i].key_bytes);
        want += 20 + went->pools[i].key_bytes;
    }
    cr_assert_eq(bytes, want);
}

Test(ucx_answer, comes_back_as_it_went) {
    static const size_t keys[] = {1, 31, KVF_UCX_KEY_BYTES},
                        addresses[] = {1, 600, KVF_UCX_ADDRESS_BYTES};
    for (uint32_t n = 1; n <= KVF_MAX_GROUPS; n++) {
        for (size_t k = 0; k < 9; k++) {
            const kvf_ucx_answer_t went = make(n, keys[k / 3], addresses[k % 3]);
            expect_back(&went);
        }
    }
    for (size_t k = 1; k <= KVF_UCX_KEY_BYTES; k++) { /* keys of all lengths, and each another */
        kvf_ucx_answer_t went = make(KVF_MAX_GROUPS, k, 100);
        for (size_t i = 1; i < KVF_MAX_GROUPS; i++) {
            went.pools[i].key_bytes = (k + 37 * i) % KVF_UCX_KEY_BYTES + 1;
        }
        expect_back(&went);
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
    memset(buf, 0x5a, sizeof(buf));
    answer.pools[0].key_bytes = KVF_UCX_KEY_BYTES + 1;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_ERR_RANGE);
    answer = make(1, 1, 100);
    answer.address = bytes_of;
    answer.address_bytes = KVF_UCX_ADDRESS_BYTES + 1;
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_ERR_RANGE);
    answer = make(2, 1, 100);
    answer.pools[1].key_bytes = SIZE_MAX; /* not 4 GiB less */
    cr_assert_eq(kvf_ucx_answer_write(ours, &answer, buf, &bytes), KVF_ERR_RANGE);
    cr_assert_eq(bytes, 77);
    for (size_t i = 0; i < sizeof(buf); i++) {
        cr_assert_eq(buf[i], 0x5a);
    }
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

/* Whole envelopes, of what nobody writes too. */
static kvf_status_t read_back(const uint8_t *inside, size_t inside_bytes, uint32_t n_pools,
                              const uint64_t *least, kvf_detail_t *detail) {
    kvf_ucx_answer_t came;
    uint8_t buf[KVF_UCX_ANSWER_BYTES], untouched[sizeof(came)];
    size_t bytes = 0;
    memset(&came, 0x5a, sizeof(came));
    memset(untouched, 0x5a, sizeof(untouched));
    cr_assert_eq(kvf_ucx_envelope_wrap(ours, inside, inside_bytes, buf, sizeof(buf), &bytes),
                 KVF_OK);
    kvf_status_t status = kvf_ucx_answer_read(ours, buf, bytes, n_pools, least, &came, detail);
    cr_assert_eq(memcmp(&came, untouched, sizeof(came)) != 0, status == KVF_OK);
    return status;
}

static void refused(const uint8_t *inside, size_t inside_bytes, uint32_t n_pools,
                    const uint64_t *least, const char *text) {
    kvf_detail_t detail = {""};
    cr_expect_eq(read_back(inside, inside_bytes, n_pools, least, &detail), KVF_ERR_INVALID,
                 "%zu bytes of %u pools", inside_bytes, n_pools);
    cr_expect_not_null(strstr(detail.text, text), "%s", detail.text);
}

#define NOT_WELL "not said well"

/* Two pools, of 4096 and of 8192 bytes, whose keys have four bytes; an address of one. */
#define TWO_POOLS                                                                                  \
    {                                                                                              \
        2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 'k', 'e', 'y',  \
            '0', 0, 0, 0, 0, 2, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 'k', 'e', 'y',     \
            '1', 'a'                                                                               \
    }
enum { BASE = 4, LENGTH = 12, KEY_LENGTH = 20, SECOND = 28, ADDRESS = 52 };

Test(ucx_answer, of_other_pools) {
    uint8_t inside[] = TWO_POOLS;
    const uint64_t exactly[] = {4096, 8192}, first[] = {4097, 0}, second[] = {0, 8193};
    cr_assert_eq(sizeof(inside), ADDRESS + 1);
    cr_expect_eq(read_back(inside, sizeof(inside), 2, exactly, NULL), KVF_OK);
    refused(inside, sizeof(inside), 2, first, "pool 0 ");
    refused(inside, sizeof(inside), 2, second, "pool 1 ");
    refused(inside, sizeof(inside), 1, none, NOT_WELL); /* what is left could be an address */
    refused(inside, sizeof(inside), 3, none, NOT_WELL);
    for (uint8_t n = 0; n < 4; n++) { /* though two of them are there */
        inside[0] = n;
        if (n != 2) {
            refused(inside, sizeof(inside), 2, none, NOT_WELL);
        }
    }
    inside[0] = 2;
    for (size_t at = 1; at < 4; at++) {
        inside[at] = 1;
        refused(inside, sizeof(inside), 2, none, NOT_WELL);
        inside[at] = 0;
    }
    for (size_t cut = 1; cut <= ADDRESS; cut++) { /* inside of keys too, where something is left */
        refused(inside, cut, 2, none, NOT_WELL);
    }
}

/* Pools up to the last address that there is, not behind it. */
Test(ucx_answer, of_pools_that_overflow) {
    for (size_t at = 0; at <= SECOND - BASE; at += SECOND - BASE) {
        uint8_t inside[] = TWO_POOLS;
        const uint64_t base = UINT64_MAX - (at == 0 ? 4096 : 8192);
        for (size_t i = 0; i < 8; i++) {
            inside[at + BASE + i] = (uint8_t)(base >> 8 * i);
        }
        cr_expect_eq(read_back(inside, sizeof(inside), 2, none, NULL), KVF_OK);
        inside[at + LENGTH]++;
        refused(inside, sizeof(inside), 2, none, at == 0 ? "pool 0 " : "pool 1 ");
        memset(inside + at + LENGTH, 0xff, 8);
        refused(inside, sizeof(inside), 2, none, at == 0 ? "pool 0 " : "pool 1 ");
    }
}

Test(ucx_answer, of_keys_and_addresses_of_no_length) {
    uint8_t inside[8000] = TWO_POOLS;
    refused(inside, ADDRESS, 2, none, NOT_WELL);
    cr_expect_eq(read_back(inside, ADDRESS + KVF_UCX_ADDRESS_BYTES, 2, none, NULL), KVF_OK);
    refused(inside, ADDRESS + KVF_UCX_ADDRESS_BYTES + 1, 2, none, NOT_WELL);
    /* The length of the second key, of which and of an address there would be enough. */
    uint8_t *length = inside + SECOND - BASE + KEY_LENGTH;
    length[0] = 0;
    refused(inside, ADDRESS + 600, 2, none, NOT_WELL);
    length[1] = 1;
    cr_expect_eq(read_back(inside, ADDRESS + 600, 2, none, NULL), KVF_OK);
    length[0] = 1;
    refused(inside, ADDRESS + 600, 2, none, NOT_WELL);
    memset(length, 0xff, 4);
    refused(inside, ADDRESS + 600, 2, none, NOT_WELL);
}
