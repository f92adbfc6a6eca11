/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/listen.h"
#include "transceiver/control/address.h"

#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

static kvf_detail_t detail;

/* Listen on a free port of a host. @param[out] text  Its address. */
static int take(const char *any, char text[KVF_ADDRESS_TEXT_BYTES]) {
    struct sockaddr_storage addr;
    int fd = -1;
    cr_assert_eq(kvf_listen_open(any, "http.listen", &addr, &fd, &detail), KVF_OK);
    kvf_address_text(&addr, text);
    return fd;
}

Test(listen, a_free_port_is_picked_and_can_be_dialled) {
    static const char *const hosts[] = {"127.0.0.1:0", "[::1]:0"};
    for (int i = 0; i < 2; i++) {
        char text[KVF_ADDRESS_TEXT_BYTES];
        struct sockaddr_storage addr;
        int fd = take(hosts[i], text);
        cr_assert_eq(kvf_address_parse(text, &addr, NULL), KVF_OK);
        cr_assert_gt(kvf_address_port(&addr), 0);
        int dialled = socket(addr.ss_family, SOCK_STREAM, 0);
        cr_assert_eq(connect(dialled, (struct sockaddr *)&addr, sizeof(addr)), 0);
        (void)close(dialled);
        (void)close(fd);
    }
}

Test(listen, what_is_wrong_with_an_address_is_told) {
    char text[KVF_ADDRESS_TEXT_BYTES];
    struct sockaddr_storage addr;
    int fd = -7, taken = take("127.0.0.1:0", text);
    cr_assert_eq(kvf_listen_open(text, "some.key", &addr, &fd, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, text));
    cr_assert_not_null(strstr(detail.text, "some.key"));
    cr_assert_not_null(strstr(detail.text, "in use"));
    cr_assert_eq(kvf_listen_open("nowhere", "some.key", &addr, &fd, &detail), KVF_ERR_INVALID);
    cr_assert_eq(fd, -7, "written on success only");
    (void)close(taken);
}

Test(listen, a_check_finds_either_address_in_use) {
    char text[KVF_ADDRESS_TEXT_BYTES];
    int taken = take("127.0.0.1:0", text);
    cr_assert_eq(kvf_listen_check(text, "127.0.0.1:0", &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "(http.listen)"));
    cr_assert_eq(kvf_listen_check("127.0.0.1:0", text, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "(control.listen)"));
    (void)close(taken);
}

Test(listen, a_check_lets_go_of_what_it_tried) {
    char first[KVF_ADDRESS_TEXT_BYTES], second[KVF_ADDRESS_TEXT_BYTES];
    int a = take("127.0.0.1:0", first), b = take("127.0.0.1:0", second);
    (void)close(a);
    (void)close(b);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(kvf_listen_check(first, second, &detail), KVF_OK, "%s", detail.text);
    }
    cr_assert_eq(dup(0), a, "no descriptor is left behind");
}

Test(listen, one_address_for_both_is_refused) {
    char text[KVF_ADDRESS_TEXT_BYTES];
    (void)close(take("127.0.0.1:0", text));
    cr_assert_eq(kvf_listen_check(text, text, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "(control.listen)"));
    cr_assert_eq(kvf_listen_check("127.0.0.1:0", "127.0.0.1:0", &detail), KVF_OK);
}
