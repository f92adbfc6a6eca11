/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/control/address.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>

Test(address, reads_ipv4_byte_by_byte) {
    struct sockaddr_storage addr;
    cr_assert_eq(kvf_address_parse("127.1.2.3:9200", &addr, NULL), KVF_OK);
    const struct sockaddr_in *in = (const struct sockaddr_in *)&addr;
    const uint8_t host[4] = {127, 1, 2, 3};
    const uint8_t port[2] = {9200 >> 8, 9200 & 0xff};
    cr_assert_eq(in->sin_family, AF_INET);
    cr_assert_arr_eq((const uint8_t *)&in->sin_addr, host, 4);
    cr_assert_arr_eq((const uint8_t *)&in->sin_port, port, 2);
    cr_assert_eq(kvf_address_port(&addr), 9200);
    cr_assert(kvf_address_is_loopback(&addr));
}

Test(address, reads_ipv6_byte_by_byte) {
    struct sockaddr_storage addr;
    cr_assert_eq(kvf_address_parse("[2001:db8::1:2]:65535", &addr, NULL), KVF_OK);
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&addr;
    const uint8_t host[16] = {0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2};
    cr_assert_eq(in6->sin6_family, AF_INET6);
    cr_assert_arr_eq(in6->sin6_addr.s6_addr, host, 16);
    cr_assert_eq(kvf_address_port(&addr), 65535);
    cr_assert_not(kvf_address_is_loopback(&addr));
}

Test(address, text_reads_back) {
    static const struct {
        const char *in, *out;
        bool loopback;
    } cases[] = {
        {"127.0.0.1:0", "127.0.0.1:0", true},
        {"127.255.255.255:00080", "127.255.255.255:80", true},
        {"128.0.0.1:1", "128.0.0.1:1", false},
        {"0.0.0.0:8200", "0.0.0.0:8200", false},
        {"[::1]:9", "[::1]:9", true},
        {"[0:0:0:0:0:0:0:1]:9", "[::1]:9", true},
        {"[::]:1", "[::]:1", false},
        {"[::2]:1", "[::2]:1", false},
        {"[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe]:65535",
         "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe]:65535", false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sockaddr_storage addr;
        char text[KVF_ADDRESS_TEXT_BYTES];
        cr_assert_eq(kvf_address_parse(cases[i].in, &addr, NULL), KVF_OK, "%s", cases[i].in);
        kvf_address_text(&addr, text);
        cr_assert_str_eq(text, cases[i].out);
        cr_assert_eq(kvf_address_is_loopback(&addr), cases[i].loopback, "%s", cases[i].in);
    }
}

Test(address, refuses_everything_else) {
    static const char *const bad[] = {
        "",
        ":",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:-1",
        ":9200",
        "9200",
        "127.0.0.1: 1",
        "127.0.0.1:1 ",
        "127.0.0.1:65536",
        "::1:9200",
        "[::1]",
        "[::1]:",
        "[::1]9200",
        "[::1:9200",
        "[]:1",
        "localhost:1",
        "127.0.0:1",
        "[127.0.0.1]:1",
        "127.0.0.1:0x10",
        "127.0.0.1:123456",
        "[::1%lo]:1",
        "[12345::]:1",
        "256.0.0.1:1",
        "[::1]:+5",
        "[aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]:1",
        "1111111111111111111111111111111111111111111111111111111111111:1",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct sockaddr_storage addr;
        kvf_detail_t detail = {""};
        memset(&addr, 0x5a, sizeof(addr));
        cr_assert_eq(kvf_address_parse(bad[i], &addr, &detail), KVF_ERR_INVALID, "%s", bad[i]);
        cr_assert(strstr(detail.text, "[::1]:9200") != NULL, "%s", detail.text);
        for (size_t j = 0; j < sizeof(addr); j++) {
            cr_assert_eq(((uint8_t *)&addr)[j], 0x5a, "%s wrote its output", bad[i]);
        }
    }
}

Test(address, strange_family_has_a_text) {
    struct sockaddr_storage addr = {.ss_family = AF_UNIX};
    char text[KVF_ADDRESS_TEXT_BYTES];
    kvf_address_text(&addr, text);
    cr_assert_str_eq(text, "?");
    cr_assert_not(kvf_address_is_loopback(&addr));
}

Test(address, listen_errors_say_what_to_do) {
    static const struct {
        int err;
        const char *advice;
    } cases[] = {{EADDRINUSE, "port 0"},
                 {EADDRNOTAVAIL, "no interface"},
                 {EACCES, "from 1024 on"},
                 {ENOBUFS, "set another address"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kvf_detail_t detail = {""};
        cr_assert_eq(
            kvf_address_listen_error("127.0.0.1:9200", "control.listen", cases[i].err, &detail),
            KVF_ERR_IO);
        cr_assert(strstr(detail.text, "127.0.0.1:9200") != NULL);
        cr_assert(strstr(detail.text, "control.listen") != NULL);
        cr_assert(strstr(detail.text, strerror(cases[i].err)) != NULL, "%s", detail.text);
        cr_assert(strstr(detail.text, cases[i].advice) != NULL, "%s", detail.text);
    }
}
