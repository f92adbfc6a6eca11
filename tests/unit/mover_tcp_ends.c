/* SPDX-License-Identifier: Apache-2.0 */
/* Who connects to the mover tcp, and how connections end. */
#include "tests/support/tcp_dial.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

Test(mover_tcp_ends, strangers, .timeout = 60) {
    side_t b;
    side_open(&b, OWN_TCP);
    const kvf_tcp_address_t address = address_of(&b);
    uint8_t preamble[KVF_TCP_PREAMBLE_BYTES];
    int fds[4];
    for (int i = 0; i < 4; i++) {
        fds[i] = dial(&b);
    }
    kvf_tcp_preamble_write(address.token, preamble);
    preamble[31] ^= 1; /* the token's last bit */
    send_all(fds[0], preamble, sizeof(preamble));
    send_all(fds[1], "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 35);
    send_all(fds[2], preamble, 31); /* and waits */
    shutdown(fds[3], SHUT_WR);
    turn_a_while(&b);
    cr_expect(is_closed(fds[0]));
    cr_expect(is_closed(fds[1]));
    cr_expect_not(is_closed(fds[2]));
    cr_expect(is_closed(fds[3]));
    cr_expect_eq(kvf_mover_tcp_refused(b.mover), 2);
    expect_to_work(&b);
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
    cr_expect_eq(b.n_stray, 0);
    side_close(&b);
}

/* More than there may be at once: the oldest go, peers come. */
Test(mover_tcp_ends, many_strangers, .timeout = 60) {
    enum { N = 100 };
    int fds[N];
    side_t b;
    side_open(&b, OWN_TCP);
    for (int i = 0; i < N; i++) {
        fds[i] = dial(&b);
        turn_a_while(&b);
    }
    for (int i = 0; i < N; i++) {
        cr_expect_eq(is_closed(fds[i]), i < N - 64, "%d", i);
    }
    expect_to_work(&b);
    for (int i = 0; i < N; i++) {
        close(fds[i]);
    }
    side_close(&b);
}

/* They come all at once, behind a peer whose token lies there unread. */
Test(mover_tcp_ends, a_peer_before_strangers, .timeout = 60) {
    enum { N = 100 };
    int fds[N];
    side_t b;
    side_open(&b, OWN_TCP);
    int peer = dial_proven(&b);
    for (int i = 0; i < N; i++) {
        fds[i] = dial(&b);
    }
    turn_a_while(&b);
    cr_expect_not(is_closed(peer));
    cr_expect(is_closed(fds[0]));
    for (int i = 0; i < N; i++) {
        close(fds[i]);
    }
    close(peer);
    side_close(&b);
}

/* Peers that are connected and have nothing to send yet are no strangers, however many there are
 * of both. */
Test(mover_tcp_ends, idle_peers_stay, .timeout = 60) {
    enum { N = 70 };
    static side_t peers[N];
    int fds[N];
    side_t b;
    uint32_t broken = 0;
    side_open(&b, OWN_TCP);
    for (int i = 0; i < N; i++) {
        side_open(&peers[i], OWN_TCP);
        side_connect(&peers[i], 1, b.address, b.address_bytes);
        turn_a_while(&peers[i]);
        turn_a_while(&b);
    }
    for (int i = 0; i < N; i++) {
        fds[i] = dial(&b);
        turn_a_while(&b);
        cr_expect_eq(is_closed(fds[0]), i >= 64, "%d", i); /* the oldest of 65 goes */
    }
    for (int i = 0; i < N; i++) {
        turn_a_while(&peers[i]);
        broken += peers[i].n_broken;
        side_close(&peers[i]);
        close(fds[i]);
    }
    cr_expect_eq(broken, 0);
    side_close(&b);
}

/* One peer that takes all connections there may be keeps nobody out. */
Test(mover_tcp_ends, one_peer_takes_all, .timeout = 60) {
    const struct rlimit limit = {4000, 4000};
    side_t b;
    side_open(&b, OWN_TCP);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int i = 0; i < 1024; i++) {
        (void)dial_proven(&b);
        if (i % 16 == 15) {
            turn_a_while(&b);
        }
    }
    cr_expect_eq(kvf_mover_tcp_refused(b.mover), 0);
    expect_to_work(&b);
    cr_expect_eq(kvf_mover_tcp_refused(b.mover), 1);
    side_close(&b);
}

/* A child of the process has its descriptors: what is closed is closed all the same. */
Test(mover_tcp_ends, forked, .timeout = 60) {
    static const uint8_t junk[64];
    side_t b;
    side_open(&b, OWN_TCP);
    int fd = dial_proven(&b);
    turn_a_while(&b);
    pid_t child = fork();
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also if the test fails */
        (void)pause();
        _exit(0);
    }
    send_all(fd, junk, sizeof(junk)); /* no frame */
    turn_a_while(&b);
    cr_expect(is_closed(fd), "the other end is not told");
    (void)send(fd, junk, sizeof(junk), MSG_NOSIGNAL);
    (void)usleep(10000);
    turn_a_while(&b); /* what comes is nobody's */
    expect_to_work(&b);
    cr_expect_eq(kill(child, SIGKILL), 0);
    (void)waitpid(child, NULL, 0);
    close(fd);
    side_close(&b);
}

/* Without descriptors nobody is accepted, nothing spins; and all goes on when there are some. */
Test(mover_tcp_ends, no_descriptors_left, .timeout = 60) {
    side_t b;
    struct rlimit limit, none;
    side_open(&b, OWN_TCP);
    int late = dial(&b);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = (rlim_t)late + 1;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    while (dup(late) >= 0) { /* fill the holes below */
    }
    turn_a_while(&b); /* ends only when nothing happens any more */
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_expect(b.mover->ops->arm(b.mover));
    cr_expect_not(is_closed(late));
    expect_to_work(&b);
    side_close(&b);
}
