/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* unshare */

#include "tests/support/control_side.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

/* How connections end: refused, reset, not reading, closed, destroyed. */
TestSuite(control_ends, .init = setup, .timeout = 60);

Test(control_ends, closed_port_is_refused_once) {
    side_t a = {0}, none = {0};
    char address[32];
    int fd = bound_socket(address);
    create(&a, "127.0.0.1:0", 4);
    uint64_t first = dial(&a, address);
    RUN_UNTIL(a.closed == 1);
    cr_assert_eq(a.closed_conn, first);
    cr_assert(strstr(a.why, "refused") != NULL, "%s", a.why);
    uint64_t second = dial(&a, address);
    cr_assert_neq(first, second);
    RUN_UNTIL(a.closed == 2);
    run_ms(20);
    cr_assert_eq(a.closed, 2);
    cr_assert_eq(a.closed_conn, second);
    cr_assert_eq(a.opened, 0);
    close(fd);
    finish(&a, &none);
}

/* A network of this process' own, where connect() has but ports 40000 and 40001 to pick from. */
static bool enter_tiny_network(void) {
    struct ifreq up = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
        return false;
    }
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    cr_assert_eq(ioctl(fd, SIOCSIFFLAGS, &up), 0);
    close(fd);
    fd = open("/proc/sys/net/ipv4/ip_local_port_range", O_WRONLY | O_CLOEXEC);
    bool tiny = fd >= 0 && write(fd, "40000 40001", 11) == 11;
    close(fd);
    return tiny;
}

Test(control_ends, never_connects_to_itself) {
    side_t a = {0}, b = {0};
    if (!enter_tiny_network()) {
        cr_skip_test("this system gives us no network of our own");
    }
    create(&a, "127.0.0.1:50000", 4);
    dial(&a, "127.0.0.1:40000");
    dial(&a, "127.0.0.1:40001");
    RUN_UNTIL(a.closed == 2);
    cr_assert_eq(a.opened, 0);
    cr_assert(strstr(a.why, "refused") != NULL, "%s", a.why);
    create(&b, "127.0.0.1:40000", 4); /* the listener can come back */
    finish(&a, &b);
}

Test(control_ends, reset_closes_once) {
    side_t a = {.salt = 1}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    struct linger hard = {1, 0};
    cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard)), 0);
    close(fd);
    RUN_UNTIL(a.closed == 1);
    cr_assert(strstr(a.why, "reset") != NULL, "%s", a.why);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(1, 0, 10), 10), KVF_ERR_UNKNOWN);
    run_ms(20);
    cr_assert_eq(a.closed, 1);
    finish(&a, &none);
}

Test(control_ends, last_words_before_a_reset_are_read) {
    side_t a = {.salt = 1}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    uint8_t *words = piece(1, 0, 1000);
    cr_assert_eq(send(fd, words, 1000, 0), 1000);
    kvf_free(&memory.table, words);
    /* Unread input makes the kernel reset the connection; our next write fails. */
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(9, 0, 100), 100), KVF_OK);
    kvf_control_flush(a.control);
    while (!readable(fd)) {
        usleep(50);
    }
    close(fd);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(9, 0, 100), 100), KVF_OK);
    RUN_UNTIL(a.closed == 1);
    cr_assert_eq(a.bytes, 1000);
    finish(&a, &none);
}

Test(control_ends, peer_that_never_reads) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    uint64_t sent = 0;
    while (a.closed == 0) {
        cr_assert_lt(sent, 100 * MIB, "the backlog has no end");
        kvf_status_t status = send_piece(&a, a.opened_conn, piece(0, 0, 65536), 65536);
        cr_assert_eq(status, KVF_OK);
        sent += 65536;
        turn();
    }
    cr_assert_gt(sent, BACKLOG_BYTES);
    cr_assert(strstr(a.why, "does not read") != NULL, "%s", a.why);
    run_ms(20);
    cr_assert_eq(a.closed, 1);
    close(fd);
    finish(&a, &none);
}

Test(control_ends, close_silences_an_overflow) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    size_t bytes = 4 * BACKLOG_BYTES;
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, bytes), bytes), KVF_OK);
    /* It is over, but `closed` has not come: sends are taken and lost; then close ends the events.
     */
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 10), 10), KVF_OK);
    close_conn(&a, a.opened_conn);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 10), 10), KVF_ERR_UNKNOWN);
    run_ms(20);
    cr_assert_eq(a.closed, 0);
    close(fd);
    finish(&a, &none);
}

Test(control_ends, close_flushes_although_input_is_unread) {
    side_t a = {.salt = 3}, none = {0};
    const size_t total = 3 * MIB;
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(3, 0, total), total), KVF_OK);
    close_conn(&a, a.opened_conn);
    uint8_t *noise = piece(3, 0, 50000);
    cr_assert_eq(send(fd, noise, 50000, MSG_DONTWAIT), 50000);
    kvf_free(&memory.table, noise);
    static uint8_t got[4 * MIB];
    size_t have = 0;
    uint64_t start_ms = now_ms();
    for (bool end = false; !end;) {
        ssize_t n = recv(fd, got + have, sizeof(got) - have, MSG_DONTWAIT);
        cr_assert(n >= 0 || errno == EAGAIN, "%s after %zu bytes", strerror(errno), have);
        have += n > 0 ? (size_t)n : 0;
        end = n == 0;
        turn();
        cr_assert_lt(now_ms() - start_ms, 5000);
    }
    cr_assert_eq(have, total);
    for (size_t i = 0; i < total; i++) {
        if (got[i] != byte_at(3, i)) {
            cr_assert_fail("byte %zu is wrong", i);
        }
    }
    close(fd);
    run_ms(20);
    cr_assert_eq(a.bytes, 0);
    cr_assert_eq(a.closed, 0);
    cr_assert_eq(memory.live, 1, "the channel alone is left");
    finish(&a, &none);
}

Test(control_ends, close_waits_a_second_at_most) {
    side_t a = {0}, none = {0};
    const size_t total = 7 * MIB;
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, total), total), KVF_OK);
    uint64_t start_ms = now_ms();
    uv_update_time(&loop);
    close_conn(&a, a.opened_conn);
    RUN_UNTIL(memory.live == 1);
    uint64_t took_ms = now_ms() - start_ms;
    cr_assert(took_ms >= 990 && took_ms < 1500, "%llu ms", (unsigned long long)took_ms);
    cr_assert_eq(a.closed, 0);
    close(fd);
    finish(&a, &none);
}

Test(control_ends, close_while_dialling) {
    side_t a = {0}, b = {.salt = 8}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    /* Without bytes it ends at once; with bytes they arrive first. */
    close_conn(&a, dial(&a, kvf_control_address(b.control)));
    RUN_UNTIL(memory.live == 2);
    uint64_t conn = dial(&a, kvf_control_address(b.control));
    cr_assert_eq(send_piece(&a, conn, piece(8, 0, 5000), 5000), KVF_OK);
    close_conn(&a, conn);
    int closed = b.closed;
    RUN_UNTIL(b.bytes == 5000 && b.closed == closed + 1);
    RUN_UNTIL(memory.live == 2);
    cr_assert_eq(a.opened, 0);
    cr_assert_eq(a.closed, 0);
    char address[32];
    int fd = bound_socket(address);
    conn = dial(&a, address);
    cr_assert_eq(send_piece(&a, conn, piece(8, 0, 5000), 5000), KVF_OK);
    close_conn(&a, conn);
    RUN_UNTIL(memory.live == 2);
    cr_assert_eq(a.closed, 0);
    close(fd);
    finish(&a, &b);
    destroy(&none);
}

Test(control_ends, destroy_in_the_middle_of_everything) {
    side_t a = {0}, b = {0};
    char address[32];
    int closed_port = bound_socket(address);
    create(&a, "127.0.0.1:0", 1);
    create(&b, "127.0.0.1:0", 4);
    int reader = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    /* Writing, flushing, dialling, being refused, refusing a stranger, overflowing: all at once. */
    uint64_t writing = dial(&a, kvf_control_address(b.control));
    RUN_UNTIL(a.opened == 2 && b.opened == 1);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 7 * MIB), 7 * MIB), KVF_OK);
    cr_assert_eq(send_piece(&a, writing, piece(0, 0, 7 * MIB), 7 * MIB), KVF_OK);
    close_conn(&a, writing);
    dial(&a, address);
    uint64_t dialling = dial(&a, kvf_control_address(b.control));
    cr_assert_eq(send_piece(&a, dialling, piece(0, 0, 1000), 1000), KVF_OK);
    cr_assert_eq(send_piece(&a, dialling, piece(0, 0, 9 * MIB), 9 * MIB), KVF_OK);
    int unwanted = stranger(&a);
    int opened = a.opened;
    destroy(&a);
    run_ms(20);
    cr_assert_eq(a.opened, opened);
    cr_assert_eq(a.closed, 0);
    cr_assert(readable(reader));
    close(reader);
    close(unwanted);
    close(closed_port);
    finish(&a, &b);
}

/* Who has said its last word may still listen: what was sent before that is known goes out. */
Test(control_ends, an_answer_to_somebody_who_says_no_more) {
    side_t a = {.on_bytes = DO_ECHO}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    uint8_t *words = piece(0, 0, 1000), got[1001];
    cr_assert_eq(send(fd, words, 1000, 0), 1000);
    kvf_free(&memory.table, words);
    cr_assert_eq(shutdown(fd, SHUT_WR), 0);
    while (a.closed == 0) {
        (void)uv_run(&loop, UV_RUN_NOWAIT); /* nobody flushes */
    }
    cr_assert_eq(a.bytes, 1000);
    cr_assert_eq(recv(fd, got, sizeof(got), MSG_WAITALL), 1000);
    close(fd);
    finish(&a, &none);
}

Test(control_ends, destroy_writes_what_was_sent) {
    side_t a = {0}, none = {0};
    create(&a, "127.0.0.1:0", 4);
    int fd = stranger(&a);
    RUN_UNTIL(a.opened == 1);
    cr_assert_eq(send_piece(&a, a.opened_conn, piece(0, 0, 1000), 1000), KVF_OK);
    cr_assert_not(readable(fd));
    destroy(&a);
    uint8_t got[1001];
    cr_assert_eq(recv(fd, got, sizeof(got), 0), 1000);
    close(fd);
    finish(&a, &none);
}

/* Destroy and close inside each event. */
static void end_inside(reaction_t reaction, int which) {
    side_t a = {.on_opened = which == 0 ? reaction : DO_WATCH,
                .on_bytes = which == 1 ? reaction : DO_WATCH,
                .on_closed = which == 2 ? reaction : DO_WATCH};
    side_t b = {0};
    create(&a, "127.0.0.1:0", 4);
    create(&b, "127.0.0.1:0", 4);
    uint64_t conn = dial(&b, kvf_control_address(a.control));
    RUN_UNTIL(a.opened == 1 && b.opened == 1);
    cr_assert_eq(send_piece(&b, conn, piece(0, 0, 2 * MIB), 2 * MIB), KVF_OK);
    RUN_UNTIL(which == 0 || a.bytes > 0);
    if (which == 2) {
        RUN_UNTIL(a.bytes == 2 * MIB);
        close_conn(&b, conn);
        RUN_UNTIL(a.closed == 1);
    }
    run_ms(20);
    cr_assert_eq(a.opened, 1);
    cr_assert_eq(a.closed, which == 2);
    cr_assert_leq(a.bytes, which == 0 ? 0 : which == 1 ? 32768 : 2 * MIB);
    finish(&a, &b);
}

Test(control_ends, destroy_inside_opened) {
    end_inside(DO_DESTROY, 0);
}

Test(control_ends, destroy_inside_bytes) {
    end_inside(DO_DESTROY, 1);
}

Test(control_ends, destroy_inside_closed) {
    end_inside(DO_DESTROY, 2);
}

Test(control_ends, close_inside_opened) {
    end_inside(DO_CLOSE, 0);
}

Test(control_ends, close_inside_bytes) {
    end_inside(DO_CLOSE, 1);
}

Test(control_ends, close_inside_closed) {
    end_inside(DO_CLOSE, 2);
}
