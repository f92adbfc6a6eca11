/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/control_side.h"

#include <netinet/tcp.h>

TestSuite(control, .init = setup, .timeout = 60);

Test(control, ten_mib_both_ways_in_odd_pieces) {
    side_t a = {.salt = 2}, b = {.salt = 1};
    const uint64_t total = 10 * MIB + 17;
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    uint64_t conn = dial(&a, kvf_control_address(b.control));
    RUN_UNTIL(a.opened == 1 && b.opened == 1);
    cr_assert_eq(a.opened_conn, conn);
    cr_assert_eq(a.opened_inbound, 0);
    cr_assert_eq(b.opened_inbound, 1);
    cr_assert_str_eq(a.address, kvf_control_address(b.control));
    uint64_t sent[2] = {0, 0};
    unsigned seed = 7;
    while (a.bytes < total || b.bytes < total) {
        side_t *from = rand_r(&seed) % 2 == 0 ? &a : &b;
        side_t *to = from == &a ? &b : &a;
        uint64_t *at = &sent[from == &b];
        size_t bytes = 1 + (size_t)rand_r(&seed) % (rand_r(&seed) % 8 == 0 ? 300000 : 999);
        bytes = bytes < total - *at ? bytes : total - *at;
        if (*at - to->bytes < 4 * MIB && bytes > 0) {
            uint8_t *data = piece(to->salt, *at, bytes);
            cr_assert_eq(send_piece(from, from->opened_conn, data, bytes), KVF_OK);
            *at += bytes;
        }
        turn();
    }
    cr_assert_eq(a.bytes, total);
    cr_assert_eq(b.bytes, total);
    close_conn(&a, conn);
    RUN_UNTIL(b.closed == 1);
    cr_assert_str_eq(b.why, "the other end closed the connection");
    cr_assert_eq(b.closed_conn, b.opened_conn);
    run_ms(20);
    cr_assert_eq(a.closed, 0);
    cr_assert_eq(b.closed, 1);
    finish(&a, &b);
}

Test(control, echo_comes_back) {
    side_t a = {.salt = 5}, b = {.salt = 5, .on_bytes = DO_ECHO};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    uint64_t conn = dial(&a, kvf_control_address(b.control));
    /* Sent while dialling. */
    cr_assert_eq(send_piece(&a, conn, piece(5, 0, 100001), 100001), KVF_OK);
    cr_assert_eq(send_piece(&a, conn, NULL, 0), KVF_OK);
    RUN_UNTIL(a.bytes == 100001);
    cr_assert_eq(b.bytes, 100001);
    finish(&a, &b);
    cr_assert_eq(a.closed + b.closed, 0);
}

Test(control, ipv6) {
    side_t a = {0}, b = {0};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "[::1]:0", 4);
    cr_assert_eq(strncmp(kvf_control_address(b.control), "[::1]:", 6), 0);
    cr_assert_gt(port_of(kvf_control_address(b.control)), 0);
    dial(&a, kvf_control_address(b.control));
    RUN_UNTIL(a.opened == 1 && b.opened == 1);
    cr_assert_str_eq(a.address, kvf_control_address(b.control));
    cr_assert_eq(strncmp(b.address, "[::1]:", 6), 0);
    finish(&a, &b);
}

Test(control, wrong_addresses) {
    static const struct {
        const char *address;
        kvf_status_t status;
        const char *text;
    } cases[] = {{"127.0.0.1", KVF_ERR_INVALID, "[::1]:9200"},
                 {"localhost:1", KVF_ERR_INVALID, "numbers"},
                 {"0.0.0.0:9200", KVF_ERR_UNSUPPORTED, "TLS"},
                 {"192.0.2.1:9200", KVF_ERR_UNSUPPORTED, "TLS"},
                 {"[::]:9200", KVF_ERR_UNSUPPORTED, "TLS"}};
    side_t a = {0}, b = {0};
    create(&b, "127.0.0.1:0", 4);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kvf_detail_t detail = {""};
        uint64_t conn = 77;
        cr_assert_eq(try_create(&a, cases[i].address, 4, &detail), cases[i].status);
        cr_assert_null(a.control);
        cr_assert(strstr(detail.text, cases[i].text) != NULL, "%s", detail.text);
        detail.text[0] = '\0';
        cr_assert_eq(try_dial(&b, cases[i].address, &conn, &detail), cases[i].status);
        cr_assert_eq(conn, 77);
        cr_assert(strstr(detail.text, cases[i].text) != NULL, "%s", detail.text);
    }
    uint64_t conn = 77;
    cr_assert_eq(try_dial(&b, "127.0.0.1:0", &conn, NULL), KVF_ERR_INVALID);
    cr_assert_eq(conn, 77);
    cr_assert_eq(try_create(&a, "127.0.0.1:0", 0, NULL), KVF_ERR_INVALID);
    finish(&a, &b);
}

Test(control, address_in_use) {
    side_t a = {0}, b = {0};
    kvf_detail_t detail = {""};
    create(&a, "127.0.0.1:0", 4);
    const char *address = kvf_control_address(a.control);
    cr_assert_eq(try_create(&b, address, 4, &detail), KVF_ERR_IO);
    cr_assert_null(b.control);
    cr_assert(strstr(detail.text, address) != NULL, "%s", detail.text);
    cr_assert(strstr(detail.text, "already in use") != NULL, "%s", detail.text);
    cr_assert(strstr(detail.text, "control.listen") != NULL, "%s", detail.text);
    finish(&a, &b);
}

Test(control, same_port_again_after_a_connection) {
    side_t a = {0}, b = {0};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    char address[80];
    (void)snprintf(address, sizeof(address), "%s", kvf_control_address(b.control));
    dial(&a, address);
    RUN_UNTIL(a.opened == 1 && b.opened == 1);
    destroy(&b);
    RUN_UNTIL(a.closed == 1);
    create(&b, address, 4);
    dial(&a, address);
    RUN_UNTIL(a.opened == 2 && b.opened == 2);
    finish(&a, &b);
}

Test(control, strangers_have_a_limit) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 2);
    int first = stranger(&a), second = stranger(&a);
    RUN_UNTIL(a.opened == 2);
    int more[40];
    for (size_t i = 0; i < 40; i++) {
        more[i] = stranger(&a);
    }
    for (size_t i = 0; i < 40; i++) {
        char byte;
        RUN_UNTIL(readable(more[i]));
        cr_assert_leq(recv(more[i], &byte, 1, 0), 0);
        close(more[i]);
    }
    cr_assert_eq(a.opened, 2);
    cr_assert_eq(a.closed, 0);
    cr_assert_not(readable(first));
    close(first);
    RUN_UNTIL(a.closed == 1);
    int third = stranger(&a);
    RUN_UNTIL(a.opened == 3);
    run_ms(20);
    cr_assert_not(readable(second));
    cr_assert_not(readable(third));
    close(second);
    close(third);
    finish(&a, &none);
}

Test(control, dialled_connections_do_not_count_as_strangers) {
    side_t a = {0}, b = {0};
    create(&a, "127.0.0.1:0", 1);
    create(&b, "127.0.0.1:0", 8);
    for (int i = 0; i < 4; i++) {
        dial(&a, kvf_control_address(b.control));
    }
    dial(&b, kvf_control_address(a.control));
    RUN_UNTIL(a.opened == 5 && b.opened == 5);
    cr_assert_eq(a.opened_inbound, 1);
    finish(&a, &b);
}

Test(control, unknown_connections) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    close_conn(&a, 0);
    close_conn(&a, 12345);
    cr_assert_eq(send_piece(&a, 0, piece(0, 0, 10), 10), KVF_ERR_UNKNOWN);
    cr_assert_eq(send_piece(&a, 12345, piece(0, 0, 10), 10), KVF_ERR_UNKNOWN);
    cr_assert_eq(memory.live, 1);
    finish(&a, &none);
}

Test(control, one_turn_reads_a_bounded_part_of_each) {
    side_t a = {.salt = 0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int flood = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    uint8_t *data = piece(0, 0, 8 * MIB);
    uint64_t sent = 0;
    for (ssize_t n; (n = send(flood, data + sent, 8 * MIB - sent, MSG_DONTWAIT)) > 0;) {
        sent += (uint64_t)n;
    }
    kvf_free(&memory.table, data);
    cr_assert_gt(sent, 2 * MIB, "the kernel takes too little to show anything");
    while (a.bytes < sent) {
        a.turn_bytes = 0;
        turn();
        cr_assert_leq(a.turn_bytes, MIB);
    }
    close(flood);
    finish(&a, &none);
}

/* How many of this process' TCP sockets at port `port` (either end) are connected and do not delay.
 */
static int count_nodelay(unsigned port) {
    int count = 0;
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_in own, peer;
        socklen_t len = sizeof(own);
        if (getsockname(fd, (struct sockaddr *)&own, &len) != 0 || own.sin_family != AF_INET) {
            continue;
        }
        len = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &len) != 0 ||
            (ntohs(own.sin_port) != port && ntohs(peer.sin_port) != port)) {
            continue;
        }
        int on = 0;
        len = sizeof(on);
        cr_assert_eq(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, &len), 0);
        count += on != 0;
    }
    return count;
}

Test(control, small_messages_are_not_delayed) {
    side_t a = {0}, b = {0};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    dial(&a, kvf_control_address(b.control));
    RUN_UNTIL(a.opened == 1 && b.opened == 1);
    cr_assert_eq(count_nodelay(port_of(kvf_control_address(b.control))), 2);
    finish(&a, &b);
}

/* What is sent waits for a flush, in order, until it is much, or many. */
Test(control, messages_leave_together) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    static uint8_t got[65536];
    for (uint64_t i = 0; i < 5; i++) {
        cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 100 * i, 100), 100), KVF_OK);
    }
    cr_assert_not(readable(fd));
    kvf_control_flush(a.control);
    cr_assert_eq(recv(fd, got, sizeof(got), 0), 500);
    for (uint64_t i = 0; i < 500; i++) {
        cr_assert_eq(got[i], byte_at(0, i));
    }
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 20000), 20000), KVF_OK);
    cr_assert_eq(recv(fd, got, 20000, MSG_WAITALL), 20000);
    for (int i = 0; i < 32; i++) {
        cr_assert_not(readable(fd));
        cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 1), 1), KVF_OK);
    }
    cr_assert_eq(recv(fd, got, 32, MSG_WAITALL), 32);
    close(fd);
    finish(&a, &none);
}

/* A conversation whose n-th allocation fails; returns whether all of it could be had. */
static bool converse(uint64_t fail_at) {
    side_t a = {.salt = 1}, b = {.salt = 1};
    uint64_t conn = 77;
    bool whole = false;
    cr_assert_eq(uv_loop_init(&loop), 0);
    kvf_alloc_fail_init(&memory, fail_at);
    kvf_status_t status = try_create(&a, "127.0.0.1:0", 4, NULL);
    status = status == KVF_OK ? try_create(&b, "127.0.0.1:0", 4, NULL) : status;
    if (status == KVF_OK) {
        status = try_dial(&a, kvf_control_address(b.control), &conn, NULL);
    }
    if (status == KVF_OK) {
        /* Without memory at the other end, the stranger is refused: a typed end, not a hang. */
        RUN_UNTIL(a.closed == 1 || (a.opened == 1 && b.opened == 1));
        uint8_t *data = a.closed == 0 ? piece(1, 0, 100) : NULL;
        status = data == NULL ? KVF_ERR_NO_MEMORY : send_piece(&a, conn, data, 100);
        if (status == KVF_OK) {
            RUN_UNTIL(b.bytes == 100);
            whole = true;
        } else if (data != NULL) { /* it does not go on without those bytes */
            RUN_UNTIL(a.closed == 1 && b.closed == 1);
            cr_assert_eq(a.closed_conn, conn);
            cr_assert_str_eq(a.why, "no memory to send");
        }
    } else {
        cr_assert_eq(conn, 77);
    }
    cr_assert_eq(status, whole ? KVF_OK : KVF_ERR_NO_MEMORY);
    finish(&a, &b);
    return whole;
}

Test(control, every_allocation_may_fail) {
    cr_assert_eq(uv_loop_close(&loop), 0);
    uint64_t n = 1;
    while (!converse(n)) {
        n++;
    }
    /* Two channels, two ends, the bytes and their write. */
    cr_assert_eq(n, 7);
}
