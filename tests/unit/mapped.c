/* SPDX-License-Identifier: Apache-2.0 */
/* Ends of the mapped mover that mean well, in one process and in several; mapped_hostile.c has the
 * others. */
#define _GNU_SOURCE /* SO_PEERCRED, RTLD_NEXT */
#include "../support/leaks.h"
#include "../support/mapped_ends.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>

/* ---- a system from before pidfds of connections ---- */

#define PEERPIDFD 77

static bool old_system;
static int asked_for_pidfd;

int getsockopt(int fd, int level, int name, void *value, socklen_t *len) {
    asked_for_pidfd += level == SOL_SOCKET && name == PEERPIDFD;
    if (old_system && level == SOL_SOCKET && name == PEERPIDFD) {
        errno = ENOPROTOOPT;
        return -1;
    }
    __typeof__(&getsockopt) real =
        (__typeof__(&getsockopt))(uintptr_t)dlsym(RTLD_NEXT, "getsockopt");
    return real(fd, level, name, value, len);
}

/* ---- one process ---- */

static end_t lender, borrower;

static void open_both(void) {
    end_open(&lender, 1);
    end_open(&borrower, 2);
}

static void close_both(void) {
    end_close(&borrower);
    end_close(&lender);
    cr_assert_eq(count_mappings(getpid(), "r--s"), 0);
    check_leaks();
}

Test(mapped, bytes_are_where_they_should_be, .timeout = 20) {
    int fds = count_fds();
    open_both();
    int fds_open = count_fds();
    cr_assert_null(kvf_mapped_use(borrower.mapped, LENDER));
    ends_map(&borrower, &lender);
    cr_assert_eq(lender.lends, 1);
    cr_assert_eq(count_mappings(getpid(), "r--s"), N_POOLS);
    cr_assert_eq(count_fds(), fds_open + 3, "a socket each and a pidfd; no pool");
    kvf_mapped_source_t *source = kvf_mapped_use(borrower.mapped, LENDER);
    cr_assert_not_null(source);
    cr_assert_null(kvf_mapped_use(borrower.mapped, BORROWER));
    cr_assert_eq(wrong_bytes(source, 1), 0);
    lender.pools[1].base[4097] ^= 0xff; /* it is the memory, not a copy of it */
    cr_assert_eq(wrong_bytes(source, 1), 1);
    cr_assert_eq(kvf_mapped_base(source, 1)[4097], lender.pools[1].base[4097]);
    for (uint32_t g = 0; g < N_POOLS; g++) { /* and nobody but its owner writes to it */
        void *base = (void *)(uintptr_t)kvf_mapped_base(source, g);
        cr_assert_eq(mprotect(base, 4096, PROT_READ | PROT_WRITE), -1);
    }
    kvf_mapped_unuse(source);
    cr_assert_eq(lender.returns, 0);
    kvf_mapped_unmap(borrower.mapped, LENDER);
    cr_assert_eq(count_mappings(getpid(), "r--s"), 0);
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 1, 5000000));
    cr_assert_eq(lender.returned, BORROWER);
    cr_assert_eq(count_fds(), fds_open);
    ends_idle(&lender, &borrower, 50000);
    cr_assert_eq(lender.returns, 1);
    cr_assert_eq(borrower.answers, 1);
    close_both();
    cr_assert_eq(count_fds(), fds);
}

/* Each maps the other; and again, and again. */
Test(mapped, both_ways_and_again, .timeout = 20) {
    open_both();
    int fds = count_fds();
    for (int round = 1; round <= 50; round++) {
        ends_map(&borrower, &lender);
        ends_map(&lender, &borrower);
        kvf_mapped_source_t *source = kvf_mapped_use(borrower.mapped, LENDER);
        kvf_mapped_source_t *other = kvf_mapped_use(lender.mapped, LENDER);
        cr_assert_eq(wrong_bytes(source, 1), 0);
        cr_assert_eq(wrong_bytes(other, 2), 0);
        kvf_mapped_unuse(source);
        kvf_mapped_unuse(other);
        kvf_mapped_unmap(borrower.mapped, LENDER);
        kvf_mapped_unmap(lender.mapped, LENDER);
        cr_assert(ends_run(&lender, &borrower, &lender.returns, round, 5000000));
        cr_assert(ends_run(&lender, &borrower, &borrower.returns, round, 5000000));
        cr_assert_eq(count_fds(), fds);
    }
    close_both();
}

/* A copy is under way: it goes on, in the old mapping, and the owner waits for it. A new one can be
 * made meanwhile. */
Test(mapped, unmapped_by_its_last_user, .timeout = 20) {
    open_both();
    ends_map(&borrower, &lender);
    kvf_mapped_source_t *first = kvf_mapped_use(borrower.mapped, LENDER);
    kvf_mapped_source_t *second = kvf_mapped_use(borrower.mapped, LENDER);
    cr_assert_eq(first, second);
    kvf_mapped_unmap(borrower.mapped, LENDER);
    cr_assert_null(kvf_mapped_use(borrower.mapped, LENDER), "nothing new is begun");
    kvf_mapped_unmap(borrower.mapped, LENDER); /* nothing more to give back */
    ends_idle(&lender, &borrower, 50000);
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(wrong_bytes(first, 1), 0);
    ends_map(&borrower, &lender);
    kvf_mapped_source_t *third = kvf_mapped_use(borrower.mapped, LENDER);
    cr_assert_neq(third, first);
    cr_assert_eq(count_mappings(getpid(), "r--s"), 2 * N_POOLS);
    kvf_mapped_unuse(first);
    ends_idle(&lender, &borrower, 50000);
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(wrong_bytes(second, 1), 0);
    kvf_mapped_unuse(second);
    cr_assert_eq(count_mappings(getpid(), "r--s"), N_POOLS);
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 1, 5000000));
    cr_assert_eq(wrong_bytes(third, 1), 0);
    kvf_mapped_unuse(third);
    ends_idle(&lender, &borrower, 50000);
    cr_assert_eq(lender.returns, 1, "it is mapped, though nobody uses it now");
    kvf_mapped_unmap(borrower.mapped, LENDER);
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 2, 5000000));
    close_both();
}

/* Who does not want it any more when the answer is on its way hears nothing of it. */
Test(mapped, unmapped_before_the_answer, .timeout = 20) {
    open_both();
    int fds = count_fds();
    for (int lender_steps = 0; lender_steps < 4; lender_steps++) {
        kvf_detail_t detail;
        lender.lends = lender.returns = 0;
        cr_assert_eq(end_ask(&borrower, &lender, &detail), KVF_OK);
        for (int i = 0; i < lender_steps; i++) {
            (void)kvf_mapped_progress(lender.mapped);
        }
        cr_assert_null(kvf_mapped_use(borrower.mapped, LENDER));
        kvf_mapped_unmap(borrower.mapped, LENDER);
        ends_idle(&lender, &borrower, 50000);
        cr_assert_eq(borrower.answers, 0);
        cr_assert_eq(lender.returns, lender.lends, "what was lent is back");
        cr_assert_eq(count_fds(), fds);
    }
    ends_map(&borrower, &lender);
    kvf_mapped_unmap(borrower.mapped, LENDER);
    close_both();
}

/* Either end goes in any state, and the other one copes. */
Test(mapped, destroyed_in_every_state, .timeout = 20) {
    kvf_detail_t detail;
    int fds = count_fds();
    for (int state = 0; state < 4; state++) {
        for (int who = 0; who < 2; who++) {
            open_both();
            end_t *gone = who == 0 ? &lender : &borrower, *left = who == 0 ? &borrower : &lender;
            if (state == 1 || state == 2) {
                cr_assert_eq(end_ask(&borrower, &lender, &detail), KVF_OK);
                (void)(state == 2 && kvf_mapped_progress(lender.mapped)); /* the answer is out */
            } else if (state == 3) {
                ends_map(&borrower, &lender);
            }
            end_stop(gone);
            ends_idle(&lender, &borrower, 50000);
            cr_assert_eq(gone->returns, 0);
            if (left == &lender) {
                cr_assert_eq(lender.returns, lender.lends);
                cr_assert_eq(lender.lends, state > 0, "also to who asked and went");
            } else if (state == 1) {
                cr_assert_eq(borrower.answers, 1);
                cr_assert_eq(borrower.status, KVF_ERR_IO, "%s", borrower.why);
            } else {
                /* The memory is there as long as it is mapped. */
                kvf_mapped_source_t *source = kvf_mapped_use(borrower.mapped, LENDER);
                cr_assert_eq(source != NULL, state >= 2);
                cr_assert(source == NULL || wrong_bytes(source, 1) == 0);
                if (source != NULL) {
                    kvf_mapped_unuse(source);
                }
            }
            close_both();
        }
    }
    kvf_mapped_destroy(NULL);
    cr_assert_eq(count_fds(), fds);
}

/* A peer that the agent does not want to lend to, and one that has other pools. */
Test(mapped, refused, .timeout = 20) {
    static const uint64_t more[N_POOLS] = {POOL_BYTES(0), POOL_BYTES(1) + 1};
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES];
    kvf_detail_t detail;
    open_both();
    int fds = count_fds();
    lender.lend_as = 0;
    cr_assert_eq(end_ask(&borrower, &lender, &detail), KVF_OK);
    cr_assert(ends_run(&lender, &borrower, &borrower.answers, 1, 5000000));
    cr_assert_eq(borrower.status, KVF_ERR_IO);
    cr_assert_eq(borrower.why, strstr(borrower.why, "it refused"), "%s", borrower.why);
    lender.lend_as = BORROWER;
    size_t bytes = kvf_mapped_address(lender.mapped, address);
    cr_assert_eq(kvf_mapped_map(borrower.mapped, LENDER, address, bytes, more, &detail), KVF_OK);
    cr_assert(ends_run(&lender, &borrower, &borrower.answers, 2, 5000000));
    cr_assert_eq(borrower.status, KVF_ERR_INVALID);
    cr_assert_not_null(strstr(borrower.why, "its pool 1 is not the 20481 bytes"), "%s",
                       borrower.why);
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 1, 5000000));
    cr_assert_eq(count_fds(), fds);
    cr_assert_eq(count_mappings(getpid(), "r--s"), 0);
    close_both();
}

Test(mapped, addresses, .timeout = 20) {
    static const uint64_t expect[N_POOLS] = {POOL_BYTES(0), POOL_BYTES(1)};
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES + 1], other[KVF_MAPPED_ADDRESS_BYTES];
    char boot_id[64] = "";
    kvf_detail_t detail;
    open_both();
    int fds = count_fds();
    size_t bytes = kvf_mapped_address(lender.mapped, address);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    cr_assert_eq(fscanf(file, "%63s", boot_id), 1);
    (void)fclose(file);
    cr_assert_eq(bytes, 32 + strlen(boot_id));
    cr_assert_arr_eq(address + 32, boot_id, strlen(boot_id));
    cr_assert_eq(kvf_mapped_address(borrower.mapped, other), bytes);
    cr_assert_neq(memcmp(address, other, 16), 0);
    cr_assert_neq(memcmp(address + 16, other + 16, 16), 0);
    for (size_t n = 0; n <= bytes + 1; n++) { /* cut anywhere, or longer */
        kvf_status_t status = kvf_mapped_map(borrower.mapped, LENDER, address, n, expect, &detail);
        if (n == bytes) {
            cr_assert_eq(status, KVF_OK);
            kvf_mapped_unmap(borrower.mapped, LENDER);
        } else {
            cr_assert_eq(status, n < 32 ? KVF_ERR_INVALID : KVF_ERR_UNSUPPORTED, "%zu", n);
        }
    }
    for (size_t i = 32; i < bytes; i++) {
        address[i] ^= 1;
        cr_assert_eq(kvf_mapped_map(borrower.mapped, LENDER, address, bytes, expect, &detail),
                     KVF_ERR_UNSUPPORTED);
        address[i] ^= 1;
    }
    cr_assert_str_eq(detail.text, "it is on another machine");
    address[3] ^= 1; /* nobody has that name */
    cr_assert_eq(kvf_mapped_map(borrower.mapped, LENDER, address, bytes, expect, &detail),
                 KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "Connection refused"), "%s", detail.text);
    cr_assert_not_null(strstr(detail.text, "namespace"), "%s", detail.text);
    ends_idle(&lender, &borrower, 50000);
    cr_assert_eq(borrower.answers, 0);
    cr_assert_eq(lender.lends, 1, "to the one that took it back");
    cr_assert_eq(lender.returns, 1);
    cr_assert_eq(count_fds(), fds);
    close_both();
}

/* ---- memory that is not there ---- */

Test(mapped, nth_allocation, .timeout = 60) {
    int fds = count_fds();
    int failed_to_map = 0, failed_to_lend = 0;
    end_pools(&lender, 1);
    for (uint64_t n = 1;; n++) {
        kvf_alloc_fail_init(&lender.memory, n);
        lender.mapped = NULL;
        kvf_status_t status = end_start(&lender, NULL);
        if (status == KVF_OK) {
            cr_assert_eq(n, 2);
            break;
        }
        cr_assert_eq(status, KVF_ERR_NO_MEMORY);
        cr_assert_null(lender.mapped);
        cr_assert_eq(lender.memory.live, 0);
    }
    end_open(&borrower, 2);
    for (int who = 0; who < 2; who++) {
        end_t *poor = who == 0 ? &lender : &borrower;
        for (uint64_t n = 1, calls = 1; calls >= n; n++) {
            kvf_detail_t detail;
            int before = borrower.answers;
            poor->memory.calls = 0;
            poor->memory.fail_at = n;
            kvf_status_t status = end_ask(&borrower, &lender, &detail);
            failed_to_map += status == KVF_ERR_NO_MEMORY;
            if (status == KVF_OK) {
                cr_assert(ends_run(&lender, &borrower, &borrower.answers, before + 1, 5000000));
                failed_to_lend += borrower.status == KVF_ERR_IO;
            }
            calls = poor->memory.calls;
            poor->memory.fail_at = 0;
            kvf_mapped_unmap(borrower.mapped, LENDER);
            ends_idle(&lender, &borrower, 50000);
            cr_assert_eq(lender.returns, lender.lends);
        }
    }
    cr_assert_eq(failed_to_map, 1);
    cr_assert_eq(failed_to_lend, 1);
    ends_map(&borrower, &lender);
    close_both();
    cr_assert_eq(count_fds(), fds);
}

/* ---- several processes ---- */

/* A borrower of its own: it maps, checks, says so, and does what it is told to. */
typedef struct other {
    pid_t pid, child; /* its own child, when it has one */
    int to, from;
} other_t;

static void other_say(int fd, int value) {
    cr_assert_eq(write(fd, &value, sizeof(value)), sizeof(value));
}

static int other_hears(int fd) {
    int value = -1;
    return read(fd, &value, sizeof(value)) == sizeof(value) ? value : -1;
}

static void other_main(int in, int out) {
    end_t me;
    kvf_detail_t detail;
    end_open(&me, 2);
    if (end_ask(&me, &lender, &detail) != KVF_OK ||
        !ends_run(&me, NULL, &me.answers, 1, 10000000) || me.status != KVF_OK) {
        _exit(1);
    }
    kvf_mapped_source_t *source = kvf_mapped_use(me.mapped, LENDER);
    other_say(out, (int)wrong_bytes(source, 1));
    kvf_mapped_unuse(source);
    for (;;) {
        switch (other_hears(in)) {
        case 'u':
            kvf_mapped_unmap(me.mapped, LENDER);
            other_say(out, count_mappings(getpid(), "r--s"));
            break;
        case 'f': { /* a child that stays, with all that children get */
            pid_t child = fork();
            if (child == 0) {
                (void)pause();
            }
            other_say(out, (int)child);
            break;
        }
        case 'e':
            _exit(0);
        default:
            _exit(2);
        }
    }
}

static other_t other_start(void) {
    int to[2], from[2];
    cr_assert_eq(pipe(to), 0);
    cr_assert_eq(pipe(from), 0);
    other_t other = {.pid = fork(), .to = to[1], .from = from[0]};
    if (other.pid == 0) {
        (void)close(to[1]);
        (void)close(from[0]);
        other_main(to[0], from[1]);
    }
    (void)close(to[0]);
    (void)close(from[1]);
    int before = lender.lends;
    cr_assert(ends_run(&lender, NULL, &lender.lends, before + 1, 10000000));
    cr_assert_eq(other_hears(other.from), 0, "wrong bytes");
    cr_assert_eq(count_mappings(other.pid, "r--s"), N_POOLS);
    return other;
}

static int other_does(other_t *other, int what) {
    other_say(other->to, what);
    return other_hears(other->from);
}

static void other_end(other_t *other) {
    (void)kill(other->pid, SIGKILL);
    (void)waitpid(other->pid, NULL, 0);
    if (other->child > 0) {
        (void)kill(other->child, SIGKILL);
    }
    (void)close(other->to);
    (void)close(other->from);
}

/* However it ends, the owner hears it, once, and soon. */
static void processes_that_end(void) {
    end_open(&lender, 1);
    int fds = count_fds();
    for (int how = 0; how < 3; how++) {
        other_t other = other_start();
        ends_idle(&lender, NULL, 100000);
        cr_assert_eq(lender.returns, how);
        uint64_t start_us = now_us();
        if (how == 0) {
            cr_assert_eq(kill(other.pid, SIGKILL), 0); /* it stays a zombie */
        } else if (how == 1) {
            other_say(other.to, 'e');
        } else {
            cr_assert_eq(other_does(&other, 'u'), 0, "no mapping is left");
        }
        cr_assert(ends_run(&lender, NULL, &lender.returns, how + 1, 5000000));
        cr_assert_lt(now_us() - start_us, 1000000);
        cr_assert_eq(lender.returned, BORROWER);
        other_end(&other);
        ends_idle(&lender, NULL, 100000);
        cr_assert_eq(lender.returns, how + 1);
        cr_assert_eq(count_fds(), fds);
    }
    end_close(&lender);
}

/* Who stands still has the pools mapped. */
static void a_process_that_stands_still(void) {
    end_open(&lender, 1);
    other_t other = other_start();
    cr_assert_eq(kill(other.pid, SIGSTOP), 0);
    cr_assert_eq(waitpid(other.pid, NULL, WUNTRACED), other.pid);
    ends_idle(&lender, NULL, 300000);
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(kill(other.pid, SIGCONT), 0);
    ends_idle(&lender, NULL, 100000);
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(kill(other.pid, SIGSTOP), 0);
    cr_assert_eq(kill(other.pid, SIGKILL), 0);
    cr_assert(ends_run(&lender, NULL, &lender.returns, 1, 5000000));
    other_end(&other);
    end_close(&lender);
}

/* A child of the borrower has its sockets, but not the mapping; and nobody waits for it. */
static void children_of_a_borrower(void) {
    end_open(&lender, 1);
    int fds = count_fds();
    for (int how = 0; how < 2; how++) {
        other_t other = other_start();
        other.child = other_does(&other, 'f');
        cr_assert_gt(other.child, 0);
        cr_assert_eq(count_mappings(other.child, "memfd"), 0);
        ends_idle(&lender, NULL, 100000);
        cr_assert_eq(lender.returns, how);
        if (how == 0) {
            cr_assert_eq(kill(other.pid, SIGKILL), 0);
        } else {
            cr_assert_eq(other_does(&other, 'u'), 0);
        }
        cr_assert(ends_run(&lender, NULL, &lender.returns, how + 1, 2000000));
        cr_assert_eq(kill(other.child, 0), 0, "it lives");
        ends_idle(&lender, NULL, 100000);
        cr_assert_eq(lender.returns, how + 1);
        other_end(&other);
        cr_assert_eq(count_fds(), fds);
    }
    end_close(&lender);
}

Test(mapped, processes_that_end, .timeout = 60) {
    processes_that_end();
    cr_assert_gt(asked_for_pidfd, 0);
}

Test(mapped, processes_that_end_on_an_old_system, .timeout = 60) {
    old_system = true;
    processes_that_end();
}

Test(mapped, a_process_that_stands_still, .timeout = 60) {
    a_process_that_stands_still();
}

Test(mapped, children_of_a_borrower, .timeout = 60) {
    children_of_a_borrower();
}

Test(mapped, children_of_a_borrower_on_an_old_system, .timeout = 60) {
    old_system = true;
    children_of_a_borrower();
}

/* Several at once; each is told apart from the others by its end. */
Test(mapped, many_processes, .timeout = 60) {
    enum { N = 5 };
    other_t others[N];
    end_open(&lender, 1);
    for (int i = 0; i < N; i++) {
        lender.lend_as = 100 + (uint64_t)i;
        others[i] = other_start();
    }
    static const int order[N] = {3, 0, 4, 2, 1};
    for (int i = 0; i < N; i++) {
        cr_assert_eq(kill(others[order[i]].pid, SIGKILL), 0);
        cr_assert(ends_run(&lender, NULL, &lender.returns, i + 1, 5000000));
        cr_assert_eq(lender.returned, 100 + (uint64_t)order[i]);
    }
    for (int i = 0; i < N; i++) {
        other_end(&others[i]);
    }
    end_close(&lender);
}
