/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/tcp_wire.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>

static kvf_tcp_address_t address_of(const char *host, uint16_t port) {
    kvf_tcp_address_t address = {.at = {.ss_family = AF_INET}};
    struct sockaddr_in in4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    if (inet_pton(AF_INET, host, &in4.sin_addr) == 1) {
        memcpy(&address.at, &in4, sizeof(in4));
    } else {
        cr_assert_eq(inet_pton(AF_INET6, host, &in6.sin6_addr), 1);
        memcpy(&address.at, &in6, sizeof(in6));
    }
    for (size_t i = 0; i < sizeof(address.token); i++) {
        address.token[i] = (uint8_t)(0xA0 + i);
        address.answer[i] = (uint8_t)(0x50 + i);
    }
    return address;
}

/* The bytes are those of the format, not what the writer makes of them. */
Test(tcp_wire, address) {
    static const uint8_t want4[KVF_TCP_ADDRESS_BYTES] = {
        1,    4,    0x39, 0x30, 127,  0,    0,    2,    0,    0,    0,    0,    0,
        0,    0,    0,    0,    0,    0,    0,    0xA0, 0xA1, 0xA2, 0xA3, 0xA4, 0xA5,
        0xA6, 0xA7, 0xA8, 0xA9, 0xAA, 0xAB, 0xAC, 0xAD, 0xAE, 0xAF, 0x50, 0x51, 0x52,
        0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5A, 0x5B, 0x5C, 0x5D, 0x5E, 0x5F};
    static const char *const hosts[] = {"127.0.0.2", "::1"};
    uint8_t bytes[KVF_TCP_ADDRESS_BYTES];
    for (size_t i = 0; i < 2; i++) {
        const kvf_tcp_address_t address = address_of(hosts[i], 12345);
        kvf_tcp_address_t back;
        kvf_tcp_address_write(&address, bytes);
        cr_assert_eq(kvf_tcp_address_read(bytes, sizeof(bytes), &back, NULL), KVF_OK);
        cr_expect_eq(kvf_tcp_address_length(&back.at),
                     i == 0 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        cr_expect_eq(memcmp(&back.at, &address.at, kvf_tcp_address_length(&back.at)), 0);
        cr_expect_arr_eq(back.token, address.token, sizeof(back.token));
        cr_expect_arr_eq(back.answer, address.answer, sizeof(back.answer));
        if (i == 0) {
            cr_expect_arr_eq(bytes, want4, sizeof(bytes));
        }
    }
}

Test(tcp_wire, addresses_that_are_none) {
    static const char *const elsewhere[] = {"10.0.0.1", "0.0.0.0", "128.0.0.1",
                                            "::",       "::2",     "::ffff:10.0.0.1"};
    uint8_t bytes[KVF_TCP_ADDRESS_BYTES + 1] = {0};
    kvf_detail_t detail;
    kvf_tcp_address_t address = address_of("127.0.0.1", 12345), back;
    kvf_tcp_address_write(&address, bytes);
    for (size_t n = 0; n <= sizeof(bytes); n++) {
        cr_expect_eq(kvf_tcp_address_read(bytes, n, &back, &detail),
                     n == KVF_TCP_ADDRESS_BYTES ? KVF_OK : KVF_ERR_INVALID, "%zu bytes", n);
    }
    bytes[0]++; /* version */
    cr_expect_eq(kvf_tcp_address_read(bytes, KVF_TCP_ADDRESS_BYTES, &back, &detail),
                 KVF_ERR_INVALID);
    bytes[0]--;
    bytes[1] = 5; /* neither IPv4 nor IPv6 */
    cr_expect_eq(kvf_tcp_address_read(bytes, KVF_TCP_ADDRESS_BYTES, &back, &detail),
                 KVF_ERR_INVALID);
    address = address_of("127.0.0.1", 0);
    kvf_tcp_address_write(&address, bytes);
    cr_expect_eq(kvf_tcp_address_read(bytes, KVF_TCP_ADDRESS_BYTES, &back, &detail),
                 KVF_ERR_INVALID);
    for (size_t i = 0; i < sizeof(elsewhere) / sizeof(elsewhere[0]); i++) {
        address = address_of(elsewhere[i], 12345);
        kvf_tcp_address_write(&address, bytes);
        cr_expect_eq(kvf_tcp_address_read(bytes, KVF_TCP_ADDRESS_BYTES, &back, &detail),
                     KVF_ERR_INVALID, "%s", elsewhere[i]);
        cr_expect_not_null(strstr(detail.text, "loopback"), "%s", detail.text);
    }
}

Test(tcp_wire, preamble_and_answer) {
    const kvf_tcp_address_t address = address_of("127.0.0.1", 1);
    uint8_t bytes[KVF_TCP_PREAMBLE_BYTES];
    kvf_tcp_preamble_write(address.token, bytes);
    cr_expect_arr_eq(bytes,
                     "KVFDATA\0\1\0\0\0\0\0\0\0\xA0\xA1\xA2\xA3\xA4\xA5\xA6\xA7"
                     "\xA8\xA9\xAA\xAB\xAC\xAD\xAE\xAF",
                     sizeof(bytes));
    cr_expect(kvf_tcp_preamble_ok(address.token, bytes));
    for (size_t bit = 0; bit < 8 * sizeof(bytes); bit++) {
        bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
        cr_expect_not(kvf_tcp_preamble_ok(address.token, bytes), "bit %zu", bit);
        bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    cr_expect(kvf_tcp_answer_ok(address.answer, address.answer));
    cr_expect_not(kvf_tcp_answer_ok(address.answer, address.token));
}

Test(tcp_wire, heads_and_headers) {
    static uint8_t headers[KVF_TCP_MAX_CHUNKS * KVF_CHUNK_HEADER_BYTES];
    kvf_chunk_t chunks[KVF_TCP_MAX_CHUNKS], chunk = {.bytes = 1};
    uint8_t head[KVF_TCP_HEAD_BYTES];
    kvf_tcp_head_write(KVF_TCP_MAX_CHUNKS, head);
    cr_expect_arr_eq(head, "KVFR\x40\0\0\0", sizeof(head));
    cr_expect_eq(kvf_tcp_head_read(head), KVF_TCP_MAX_CHUNKS);
    for (size_t bit = 0; bit < 8 * sizeof(head); bit++) {
        head[bit / 8] ^= (uint8_t)(1U << bit % 8);
        cr_expect_eq(kvf_tcp_head_read(head), 0, "bit %zu", bit); /* too many, or none */
        head[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    for (uint32_t i = 0; i < KVF_TCP_MAX_CHUNKS; i++) {
        chunk.bytes = i == 0 ? 1 : KVF_TCP_CHUNK_BYTES;
        chunk.slot = (int32_t)i;
        kvf_chunk_encode(&chunk, headers + (size_t)i * KVF_CHUNK_HEADER_BYTES);
    }
    cr_expect(kvf_tcp_headers_read(headers, KVF_TCP_MAX_CHUNKS, chunks));
    cr_expect_eq(chunks[63].slot, 63);
    cr_expect_eq(chunks[0].bytes, 1);
    for (int bad = 0; bad < 3; bad++) {
        chunk.bytes = bad == 0 ? 0 : KVF_TCP_CHUNK_BYTES + (bad == 1);
        kvf_chunk_encode(&chunk, headers + (size_t)63 * KVF_CHUNK_HEADER_BYTES);
        headers[(size_t)63 * KVF_CHUNK_HEADER_BYTES] ^= bad == 2; /* magic */
        cr_expect_not(kvf_tcp_headers_read(headers, KVF_TCP_MAX_CHUNKS, chunks), "%d", bad);
    }
}
