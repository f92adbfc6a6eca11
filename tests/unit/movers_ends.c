/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/mover_side.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static size_t transport_idx[] = {0, 1, 2, 3};

#define N_BIG 12U

typedef struct load {
    uint8_t *source;
    kvf_piece_t pieces[N_BIG];
    kvf_window_t windows[N_BIG];
} load_t;

/* Far more than buffers between the two ends can hold. */
static void post_load(load_t *load, side_t *side) {
    load->source = make_source(SLOT_BYTES);
    for (uint32_t i = 0; i < N_BIG; i++) {
        load->pieces[i] = piece_at(load->source, 0, SLOT_BYTES, (int32_t)(i % N_SLOTS), 0);
        load->windows[i] = window_of(&load->pieces[i], 1);
        cr_assert_eq(side->mover->ops->post(side->mover, &load->windows[i]), KVF_OK);
    }
}

static uint64_t cpu_us(void) {
    struct rusage usage;
    (void)getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Sleep as a loop does. Returns whether something happened. */
static bool sleep_once(side_t *side, int timeout_ms) {
    struct pollfd readable = {side->mover->ops->fd(side->mover), POLLIN, 0};
    if (turn(side) > 0) {
        return true;
    }
    if (!side->mover->ops->arm(side->mover)) {
        return true;
    }
    return poll(&readable, 1, timeout_ms) > 0;
}

/* How long a loop may sleep while something is in flight. */
static int sleep_ms(const side_t *side) {
    const uint64_t sleep_us = side->mover->ops->max_sleep_us(side->mover);
    cr_assert(sleep_us == KVF_NEVER || sleep_us == 10000);
    return sleep_us == KVF_NEVER ? 4000 : (int)(sleep_us / 1000);
}

/* Until every window came back, sleeping as a loop does. Returns how long it took. */
static uint64_t wait_for_all(side_t *side, uint64_t patience_us) {
    uint64_t start = now_us();
    while (side->n_moved < N_BIG && now_us() - start < patience_us) {
        (void)sleep_once(side, sleep_ms(side));
    }
    return now_us() - start;
}

ParameterizedTestParameters(movers_ends, disconnect) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers_ends, disconnect, .timeout = 60) {
    side_t a, b;
    load_t load;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    post_load(&load, &a);
    while (b.n_landed < 3) {
        (void)turn(&a);
        (void)turn(&b);
    }
    const uint32_t before = a.n_moved;
    a.mover->ops->disconnect(a.mover, 1);
    cr_assert_eq(a.n_moved, before, "moved from inside disconnect");
    cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_ERR_PEER_LOST);
    cr_assert_lt(wait_for_all(&a, 5000000), 5000000);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    cr_assert_eq(a.n_broken, 0);
    memset(load.source, 0, SLOT_BYTES); /* nothing of them is read any more */

    /* The same number may be used for a new path at once. */
    side_connect(&a, 1, b.address, b.address_bytes);
    uint64_t end = now_us() + 1000000;
    while (now_us() < end && turn(&b) + turn(&a) > 0) {
    }
    memset(b.slots, FILL, N_SLOTS * SLOT_BYTES);
    a.n_moved = 0;
    b.landed_bytes = 0;
    load.pieces[0] = piece_at(load.source, 0, 5000, 6, 123);
    load.windows[0] = window_of(load.pieces, 1);
    cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_OK);
    run_until_landed(&a, &b, 1, 5000);
    cr_assert_eq(b.slots[6 * SLOT_BYTES + 123 + 4999], 0);
    cr_assert_eq(b.slots[6 * SLOT_BYTES + 123 + 5000], FILL);
    side_close(&a);
    side_close(&b);
    free(load.source);
}

ParameterizedTestParameters(movers_ends, not_handed_over) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* UCX has all of a window, buffers have some of it, and the peer reads nothing: it must not pass
 * for moved. */
ParameterizedTest(size_t *idx, movers_ends, not_handed_over, .timeout = 60) {
    side_t a, b;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    a.mover->ops->disconnect(a.mover, 1);
    cr_assert_not(a.mover->ops->arm(a.mover), "asleep with a path to close");
    (void)turn(&a);
    side_connect(&a, 1, b.address, b.address_bytes);
    uint8_t *source = make_source(SLOT_BYTES);
    kvf_piece_t first = piece_at(source, 0, 10, 0, 0),
                piece = piece_at(source, 0, SLOT_BYTES, 0, 0);
    kvf_window_t hello = window_of(&first, 1), window = window_of(&piece, 1);
    cr_assert_eq(a.mover->ops->post(a.mover, &hello), KVF_OK);
    run_until_landed(&a, &b, 1, 10);
    cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
    for (int i = 0; i < 2000; i++) {
        (void)turn(&a);
    }
    cr_assert_eq(a.n_moved, 1, "%lu bytes fit the buffers", (unsigned long)SLOT_BYTES);
    a.mover->ops->disconnect(a.mover, 1);
    for (uint64_t start = now_us(); a.n_moved < 2 && now_us() - start < 5000000;) {
        (void)sleep_once(&a, sleep_ms(&a));
    }
    cr_assert_eq(a.last, &window);
    cr_assert_eq(a.status, KVF_ERR_PEER_LOST);
    side_close(&a);
    side_close(&b);
    free(source);
}

/* What an ended path still had to send is not sent, and nothing of it is used any more, even when
 * the peer takes data again and closes its end in one and the same moment. */
Test(movers_ends, thaw_after_disconnect, .timeout = 60) {
    (void)mallopt(M_PERTURB, 0x5a); /* what UCX freed does not look alive */
    for (int i = 0; i < 20; i++) {
        side_t a, b;
        load_t load;
        side_open(&a, "tcp");
        side_open(&b, "tcp");
        side_connect(&a, 1, b.address, b.address_bytes);
        side_connect(&b, 1, a.address, a.address_bytes);
        post_load(&load, &a);
        while (b.n_landed < 1) {
            (void)turn(&a);
            (void)turn(&b);
        }
        for (int k = 0; k < 2000; k++) {
            (void)turn(&a);
        }
        a.mover->ops->disconnect(a.mover, 1);
        for (int k = 0; k < 10; k++) {
            (void)turn(&a);
        }
        b.mover->ops->disconnect(b.mover, 1);
        for (int k = 0; k < 10 * i; k++) {
            (void)turn(&b);
        }
        for (int k = 0; k < 100; k++) {
            (void)turn(&a);
            (void)turn(&b);
        }
        cr_assert_eq(a.n_moved, N_BIG);
        side_close(&b);
        for (int k = 0; k < 100; k++) {
            (void)turn(&a);
        }
        side_close(&a);
        free(load.source);
    }
}

ParameterizedTestParameters(movers_ends, disconnect_before_broken) {
    return cr_make_param_array(size_t, transport_idx + 2, 2);
}

/* Whoever hears of a failed window and disconnects is not told that the path broke. */
ParameterizedTest(size_t *idx, movers_ends, disconnect_before_broken, .timeout = 60) {
    for (int leave = 0; leave <= 1; leave++) {
        side_t a, b;
        load_t load;
        side_open(&a, transports[*idx]);
        side_open(&b, transports[*idx]);
        side_connect(&a, 1, b.address, b.address_bytes);
        post_load(&load, &a);
        while (b.n_landed < 1) {
            (void)turn(&a);
            (void)turn(&b);
        }
        cr_assert_eq(a.n_moved, 0);
        a.leave_at_moved = leave == 1;
        side_close(&b);
        cr_assert_lt(wait_for_all(&a, 5000000), 5000000);
        cr_assert_eq(a.n_broken, 1 - (uint32_t)leave);
        side_close(&a);
        cr_assert_eq(a.n_moved, N_BIG);
        free(load.source);
    }
}

ParameterizedTestParameters(movers_ends, destroy) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers_ends, destroy, .timeout = 60) {
    side_t a, b;
    load_t load;
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    side_connect(&a, 1, b.address, b.address_bytes);
    post_load(&load, &a);
    while (b.n_landed < 3) {
        (void)turn(&a);
        (void)turn(&b);
    }
    a.mover->ops->destroy(a.mover);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    cr_assert_eq(a.n_broken, 0);
    memset(load.source, 0, SLOT_BYTES);
    kvf_ucx_destroy(a.ucx);
    free(a.slots);
    side_close(&b);
    free(load.source);
}

/* A process that receives until it was told to stop reading; then it waits for its death. */
static pid_t start_victim(const char *tls, uint64_t landings, int *from_p) {
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        side_t b;
        side_open(&b, tls);
        send_address(&b, fds[1]);
        while (b.n_landed < landings) {
            (void)turn(&b);
        }
        (void)!write(fds[1], "x", 1);
        for (;;) {
            pause();
        }
    }
    close(fds[1]);
    *from_p = fds[0];
    return pid;
}

ParameterizedTestParameters(movers_ends, killed_peer) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers_ends, killed_peer, .timeout = 60) {
    const bool tells = strstr(transports[*idx], "posix,self") == NULL;
    int from;
    char byte;
    pid_t pid = start_victim(transports[*idx], 5, &from);
    side_t a;
    load_t load;
    side_open(&a, transports[*idx]);
    connect_far(&a, from);
    post_load(&load, &a);
    cr_assert_eq(fcntl(from, F_SETFL, O_NONBLOCK), 0);
    while (read(from, &byte, 1) != 1) {
        (void)turn(&a);
    }
    cr_assert_eq(kill(pid, SIGKILL), 0);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    uint64_t took = wait_for_all(&a, tells ? 10000000 : 3000000);
    if (tells) {
        cr_assert_lt(took, 2000000);
        cr_assert_eq(a.n_broken, 1);
        cr_assert_eq(a.broken_peer, 1);
        cr_assert_eq(a.mover->ops->post(a.mover, &load.windows[0]), KVF_ERR_PEER_LOST);
    }
    a.mover->ops->disconnect(a.mover, 1);
    cr_assert_lt(wait_for_all(&a, 5000000), 5000000);
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_gt(a.n_lost, N_BIG / 2);
    for (int i = 0; i < 1000; i++) {
        (void)turn(&a);
    }
    cr_assert_eq(a.n_moved, N_BIG);
    cr_assert_eq(a.n_broken, tells ? 1 : a.n_broken);
    close(from);
    side_close(&a);
    free(load.source);
}

/* A process that sleeps until something arrives; says 'x' for each 300000 bytes, then 'i' if it
 * used little cpu. */
static pid_t start_sleeper(const char *tls, int *from_p) {
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        side_t b;
        side_open(&b, tls);
        send_address(&b, fds[1]);
        const uint64_t cpu = cpu_us();
        for (uint64_t round = 1; round <= 3; round++) {
            while (b.landed_bytes < round * 300000) {
                (void)sleep_once(&b, sleep_ms(&b));
            }
            (void)!write(fds[1], "x", 1);
        }
        (void)!write(fds[1], cpu_us() - cpu < 450000 ? "i" : "b", 1);
        _exit(0);
    }
    close(fds[1]);
    *from_p = fds[0];
    return pid;
}

ParameterizedTestParameters(movers_ends, sleeps_and_wakes) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

ParameterizedTest(size_t *idx, movers_ends, sleeps_and_wakes, .timeout = 60) {
    int from;
    char byte;
    pid_t pid = start_sleeper(transports[*idx], &from);
    side_t a;
    side_open(&a, transports[*idx]);
    connect_far(&a, from);
    uint8_t *source = make_source(300000);
    for (uint32_t round = 1; round <= 3; round++) {
        kvf_piece_t piece = piece_at(source, 0, 300000, 1, 0);
        kvf_window_t window = window_of(&piece, 1);
        const uint64_t start = now_us(), cpu = cpu_us();
        while (now_us() - start < 300000) {
            (void)sleep_once(&a, 20);
        }
        cr_assert_lt(cpu_us() - cpu, 100000, "an idle mover uses %lu us of cpu in 300 ms",
                     (unsigned long)(cpu_us() - cpu));
        cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
        const uint64_t posted = now_us();
        while (a.n_moved < round && now_us() - posted < 5000000) {
            (void)sleep_once(&a, 10);
        }
        cr_assert_eq(a.n_moved, round);
        cr_assert_eq(read(from, &byte, 1), 1); /* the sleeper saw it all */
        cr_assert_eq(byte, 'x');
        cr_assert_lt(now_us() - posted, 3000000);
    }
    cr_assert_eq(read(from, &byte, 1), 1);
    cr_assert_eq(byte, 'i', "the receiver uses the cpu while nothing arrives");
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    close(from);
    side_close(&a);
    free(source);
}

ParameterizedTestParameters(movers_ends, a_stuck_peer) {
    return cr_make_param_array(size_t, transport_idx, N_TRANSPORTS);
}

/* ---- two peers ---------------------------------------------------------------------------------
 */

/* One that does not read holds up nobody else. */
ParameterizedTest(size_t *idx, movers_ends, a_stuck_peer, .timeout = 60) {
    side_t a, stuck, c;
    load_t load;
    side_open(&a, transports[*idx]);
    side_open(&stuck, transports[*idx]);
    side_open(&c, transports[*idx]);
    side_connect(&a, 1, stuck.address, stuck.address_bytes);
    side_connect(&a, 2, c.address, c.address_bytes);
    post_load(&load, &a);
    for (int i = 0; i < 10000; i++) {
        (void)turn(&a);
    }
    cr_assert_eq(stuck.n_landed, 0);
    cr_assert_lt(a.n_moved, N_BIG / 2);
    kvf_piece_t piece = piece_at(load.source, 0, SLOT_BYTES, 3, 0);
    kvf_window_t window = window_of(&piece, 1);
    window.peer = 2;
    cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
    a.last = NULL;
    const uint64_t start = now_us();
    while ((a.last != &window || c.landed_bytes < SLOT_BYTES) && now_us() - start < 10000000) {
        (void)turn(&a);
        (void)turn(&c);
    }
    cr_assert_eq(a.last, &window);
    cr_assert_eq(a.status, KVF_OK);
    cr_assert_eq(c.landed_bytes, SLOT_BYTES);
    cr_assert_arr_eq(c.slots + 3 * SLOT_BYTES, load.source, SLOT_BYTES);
    side_close(&a);
    cr_assert_eq(a.n_moved, N_BIG + 1);
    side_close(&stuck);
    side_close(&c);
    free(load.source);
}
