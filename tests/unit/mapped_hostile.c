/* SPDX-License-Identifier: Apache-2.0 */
/* The mapped mover against processes that are not what they say: of the same user, with or without
 * the secret, on either end. The other end of each test is a plain socket. */
#define _GNU_SOURCE /* memfd_create(), accept4() */
#include "../support/leaks.h"
#include "../support/mapped_ends.h"

#include "transceiver/mover/mapped_socket.h"

#include <criterion/parameterized.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>

static end_t lender, borrower;

/* ---- an owner of pools that misbehaves ---- */

static int liar; /* its socket */
static uint8_t liar_address[KVF_MAPPED_ADDRESS_BYTES];
static size_t liar_bytes;

/* Listen in the name of somebody on this machine. */
static void liar_open(void) {
    struct sockaddr_un address;
    const uint8_t name[KVF_MAPPED_NAME_BYTES] = {(uint8_t)getpid(), (uint8_t)(getpid() >> 8), 9};
    socklen_t bytes = mapped_socket_address(name, &address);
    liar = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(liar, (const struct sockaddr *)&address, bytes), 0);
    cr_assert_eq(listen(liar, 4), 0);
    liar_bytes = kvf_mapped_address(borrower.mapped, liar_address);
    memcpy(liar_address, name, sizeof(name));
}

static kvf_status_t ask_liar(kvf_detail_t *detail) {
    static const uint64_t expect[N_POOLS] = {POOL_BYTES(0), POOL_BYTES(1)};
    return kvf_mapped_map(borrower.mapped, LENDER, liar_address, liar_bytes, expect, detail);
}

/* What the borrower said when it connected. @return The connection. */
static int liar_accept(void) {
    mapped_ask_t ask;
    int fd = accept4(liar, NULL, NULL, SOCK_CLOEXEC);
    cr_assert_eq(recv(fd, &ask, sizeof(ask), 0), sizeof(ask));
    cr_assert_arr_eq(ask.secret, liar_address + 16, sizeof(ask.secret));
    cr_assert_arr_eq(ask.incarnation, borrower.incarnation, sizeof(ask.incarnation));
    return fd;
}

#define ALL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int memory(uint64_t bytes, int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    cr_assert(seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static int good(uint32_t g) {
    return memory(POOL_BYTES(g), ALL_SEALS);
}

static int reopened(int flags) {
    char path[64];
    int fd = good(1);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int other = open(path, flags | O_CLOEXEC);
    (void)close(fd);
    return other;
}

static int pipe_end(void) {
    int fds[2];
    cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
    (void)close(fds[1]);
    return fds[0];
}

#define MAX_FDS 64

/* What the liar answers; made of a good answer. */
typedef struct lie {
    const char *name;
    kvf_status_t status;
    int (*second)(void); /* makes the second descriptor */
    int fewer, more;     /* descriptors */
    size_t cut, longer;  /* bytes */
    int magic;           /* changed byte of the magic, from 1; */
    int n_pools, size;   /* what is added to a number */
    int n_fds;           /* that it speaks of, likewise */
    int on_device;       /* it says so */
} lie_t;

static int second_good(void) {
    return good(1);
}
static int second_unsealed(void) {
    return memory(POOL_BYTES(1), 0);
}
static int second_may_shrink(void) {
    return memory(POOL_BYTES(1), F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
}
static int second_short(void) {
    return memory(POOL_BYTES(1) - 4096, ALL_SEALS);
}
static int second_empty(void) {
    return memory(0, ALL_SEALS);
}
static int second_long(void) {
    return memory(POOL_BYTES(1) + 4096, ALL_SEALS);
}
static int second_write_only(void) {
    return reopened(O_WRONLY);
}
static int second_path(void) {
    return reopened(O_PATH);
}
static int second_zero(void) {
    return open("/dev/zero", O_RDWR | O_CLOEXEC);
}
static int second_file(void) {
    return open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
}
static int second_folder(void) {
    return open("/", O_RDONLY | O_CLOEXEC);
}
static int second_socket(void) {
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

/* clang-format off */
static const lie_t lies[] = {
    {"the truth", KVF_OK, second_good, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"not sealed", KVF_ERR_INVALID, second_unsealed, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"sealed otherwise", KVF_ERR_INVALID, second_may_shrink, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"shorter than said", KVF_ERR_INVALID, second_short, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"shorter than needed", KVF_ERR_INVALID, second_short, 0, 0, 0, 0, 0, 0, -4096, 0, 0},
    {"empty", KVF_ERR_INVALID, second_empty, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"empty, as said", KVF_ERR_INVALID, second_empty, 0, 0, 0, 0, 0, 0, -(int)POOL_BYTES(1), 0, 0},
    {"longer than said", KVF_ERR_INVALID, second_long, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"longer, as said", KVF_OK, second_long, 0, 0, 0, 0, 0, 0, 4096, 0, 0},
    {"said to be longer", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 0, 0, 4096, 0, 0},
    {"write only", KVF_ERR_NO_MEMORY, second_write_only, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"a path", KVF_ERR_INVALID, second_path, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"a pipe", KVF_ERR_INVALID, pipe_end, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"/dev/zero", KVF_ERR_INVALID, second_zero, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"a file", KVF_ERR_INVALID, second_file, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"a folder", KVF_ERR_INVALID, second_folder, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"a socket", KVF_ERR_INVALID, second_socket, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"one too few", KVF_ERR_INVALID, second_good, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {"none", KVF_ERR_INVALID, second_good, 2, 0, 0, 0, 0, 0, 0, 0, 0},
    {"one too many", KVF_ERR_INVALID, second_good, 0, 1, 0, 0, 0, 0, 0, 0, 0},
    {"as many as there is room for", KVF_ERR_INVALID, second_good, 0, 14, 0, 0, 0, 0, 0, 0, 0},
    {"more than there is room for", KVF_ERR_INVALID, second_good, 0, 15, 0, 0, 0, 0, 0, 0, 0},
    {"far more", KVF_ERR_INVALID, second_good, 0, 60, 0, 0, 0, 0, 0, 0, 0},
    {"one byte short", KVF_ERR_INVALID, second_good, 0, 0, 1, 0, 0, 0, 0, 0, 0},
    {"one byte", KVF_ERR_INVALID, second_good, 0, 0, sizeof(mapped_answer_t) - 1, 0, 0, 0, 0, 0, 0},
    {"nothing", KVF_ERR_IO, second_good, 2, 0, sizeof(mapped_answer_t), 0, 0, 0, 0, 0, 0},
    {"descriptors alone", KVF_ERR_IO, second_good, 0, 0, sizeof(mapped_answer_t), 0, 0, 0, 0, 0, 0},
    {"longer", KVF_ERR_INVALID, second_good, 0, 0, 0, 1, 0, 0, 0, 0, 0},
    {"another magic", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 1, 0, 0, 0, 0},
    {"another version", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 7, 0, 0, 0, 0},
    {"fewer pools", KVF_ERR_INVALID, second_good, 1, 0, 0, 0, 0, -1, 0, 0, 0},
    {"no pools", KVF_ERR_INVALID, second_good, 2, 0, 0, 0, 0, -2, 0, 0, 0},
    {"more pools", KVF_ERR_INVALID, second_good, 0, 1, 0, 0, 0, 1, 0, 0, 0},
    {"2^32 - 1 pools", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 0, -3, 0, 0, 0},
    {"handles, as a device's", KVF_ERR_INVALID, second_good, 2, 0, 0, 0, 0, 0, 0, -2, 1},
    {"no descriptors, it says", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 0, 0, 0, -2, 0},
    {"no descriptors", KVF_ERR_INVALID, second_good, 2, 0, 0, 0, 0, 0, 0, -2, 0},
    {"descriptors of a device's", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 0, 0, 0, 0, 1},
    {"one descriptor less", KVF_ERR_INVALID, second_good, 1, 0, 0, 0, 0, 0, 0, -1, 0},
    {"one descriptor less, it says", KVF_ERR_INVALID, second_good, 0, 0, 0, 0, 0, 0, 0, -1, 0},
    {"one descriptor more, it says", KVF_ERR_INVALID, second_good, 0, 1, 0, 0, 0, 0, 0, 1, 0},
};
/* clang-format on */

static void say(int fd, const lie_t *lie) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } control;
    struct {
        mapped_answer_t answer;
        char more[8];
    } text = {.answer = {.magic = MAPPED_MAGIC}};
    int fds[MAX_FDS], n = N_POOLS - lie->fewer + lie->more;
    text.answer.n_pools = (uint32_t)(N_POOLS + lie->n_pools);
    text.answer.on_device = (uint8_t)lie->on_device;
    for (int g = 0; g < N_POOLS + lie->n_fds; g++) {
        text.answer.has_fd[g] = 1;
    }
    for (uint32_t g = 0; g < N_POOLS; g++) {
        text.answer.bytes[g] = POOL_BYTES(g);
    }
    text.answer.bytes[1] += (uint64_t)(int64_t)lie->size;
    if (lie->magic > 0) {
        text.answer.magic[lie->magic - 1] ^= 1;
    }
    for (int i = 0; i < n; i++) {
        fds[i] = i == 1 ? lie->second() : good(0);
        cr_assert_geq(fds[i], 0);
    }
    struct iovec iov = {&text, sizeof(text.answer) - lie->cut + lie->longer};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n > 0) {
        memset(&control, 0, sizeof(control));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)n);
    }
    cr_assert_eq(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)iov.iov_len, "%s", strerror(errno));
    for (int i = 0; i < n; i++) {
        (void)close(fds[i]);
    }
}

ParameterizedTestParameters(mapped_hostile, answers) {
    static int numbers[sizeof(lies) / sizeof(lies[0])];
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        numbers[i] = (int)i;
    }
    return cr_make_param_array(int, numbers, sizeof(lies) / sizeof(lies[0]));
}

/* Whatever the answer is, one event comes, no descriptor stays, and nothing is mapped but what was
 * asked for. */
ParameterizedTest(int *number, mapped_hostile, answers, .timeout = 20) {
    const lie_t *lie = &lies[*number];
    kvf_detail_t detail;
    end_open(&borrower, 2);
    liar_open();
    int fds = count_fds();
    cr_assert_eq(ask_liar(&detail), KVF_OK, "%s", detail.text);
    int connection = liar_accept();
    say(connection, lie);
    cr_assert(ends_run(&borrower, NULL, &borrower.answers, 1, 5000000));
    cr_assert_eq(borrower.answered, LENDER);
    cr_assert_eq(borrower.status, lie->status, "%s: %s: %s", lie->name,
                 kvf_status_name(borrower.status), borrower.why);
    bool ok = lie->status == KVF_OK;
    cr_assert_eq(count_mappings(getpid(), "r--s"), ok ? N_POOLS : 0);
    cr_assert_eq(count_fds(), fds + 1 + ok, "%s", lie->name);
    char byte;
    if (!ok) {
        cr_assert_eq(recv(connection, &byte, 1, 0), 0, "the liar is told that nobody reads");
    } else {
        cr_assert_eq(recv(connection, &byte, 1, MSG_DONTWAIT), -1);
        /* It answers once more: nobody listens, and what comes along is closed. */
        say(connection, lie);
        ends_idle(&borrower, NULL, 50000);
        cr_assert_eq(count_fds(), fds + 1);
        cr_assert_eq(count_mappings(getpid(), "r--s"), N_POOLS);
        kvf_mapped_source_t *source = kvf_mapped_use(borrower.mapped, LENDER);
        cr_assert_eq(kvf_mapped_base(source, 1)[POOL_BYTES(1) - 1], 0);
        kvf_mapped_unuse(source);
        kvf_mapped_unmap(borrower.mapped, LENDER);
    }
    (void)close(connection);
    ends_idle(&borrower, NULL, 20000);
    cr_assert_eq(borrower.answers, 1);
    cr_assert_eq(count_fds(), fds);
    end_open(&lender, 1); /* and with one that is honest it goes well */
    ends_map(&borrower, &lender);
    kvf_mapped_unmap(borrower.mapped, LENDER);
    end_close(&lender);
    end_close(&borrower);
    (void)close(liar);
    check_leaks();
}

/* One that never accepts, one that says nothing, and one that hangs up. */
Test(mapped_hostile, no_answer, .timeout = 20) {
    kvf_detail_t detail;
    end_open(&borrower, 2);
    liar_open();
    int fds = count_fds();
    for (int how = 0; how < 3; how++) {
        uint64_t start_us = now_us();
        cr_assert_eq(ask_liar(&detail), KVF_OK);
        if (how > 0) {
            (void)close(liar_accept()); /* the one before, or this one */
        }
        if (how == 2) {
            (void)close(liar_accept());
        }
        cr_assert(ends_run(&borrower, NULL, &borrower.answers, how + 1, 5000000));
        cr_assert_eq(borrower.status, KVF_ERR_IO);
        cr_assert_not_null(strstr(borrower.why, how < 2 ? "not answer" : "refused"), "%s",
                           borrower.why);
        cr_assert(how == 2 || (now_us() - start_us > 900000 && now_us() - start_us < 3000000));
        cr_assert_eq(count_fds(), fds);
    }
    /* A queue that is full does not block. */
    for (int n = 0; n < 20; n++) {
        kvf_status_t status = ask_liar(&detail);
        cr_assert(status == KVF_OK || status == KVF_ERR_IO);
        cr_assert(status == KVF_ERR_IO || n < 10);
        kvf_mapped_unmap(borrower.mapped, LENDER);
    }
    cr_assert_eq(count_fds(), fds);
    end_close(&borrower);
    (void)close(liar);
    check_leaks();
}

/* ---- somebody who wants pools ---- */

static int stranger(void) {
    struct sockaddr_un to;
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES];
    (void)kvf_mapped_address(lender.mapped, address);
    socklen_t bytes = mapped_socket_address(address, &to);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    cr_assert_geq(fd, 0);
    cr_assert_eq(connect(fd, (const struct sockaddr *)&to, bytes), 0, "%s", strerror(errno));
    return fd;
}

/* What the borrower would say. */
static mapped_ask_t right_words(void) {
    mapped_ask_t ask = {.magic = MAPPED_MAGIC};
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES];
    (void)kvf_mapped_address(lender.mapped, address);
    memcpy(ask.secret, address + 16, sizeof(ask.secret));
    memcpy(ask.incarnation, lender.friend, sizeof(ask.incarnation));
    return ask;
}

/* Whether the other end has closed the connection, perhaps without reading what was said. */
static bool hung_up(int fd) {
    char bytes[1024];
    ssize_t n = recv(fd, bytes, sizeof(bytes), 0);
    return n == 0 || (n < 0 && errno == ECONNRESET);
}

/* Descriptors that came with the answer; they are closed. */
static int descriptors(int fd) {
    char bytes[1024], control[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct iovec iov = {bytes, sizeof(bytes)};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    int n = 0;
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) <= 0) {
        return -1;
    }
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h != NULL; h = CMSG_NXTHDR(&message, h)) {
        for (size_t at = 0; at < h->cmsg_len - CMSG_LEN(0); at += sizeof(int), n++) {
            int one;
            memcpy(&one, CMSG_DATA(h) + at, sizeof(one));
            (void)close(one);
        }
    }
    return n;
}

static void expect_refusal(const void *words, size_t bytes, const char *what) {
    int fd = stranger();
    cr_assert_eq(send(fd, words, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
    ends_idle(&lender, NULL, 3000);
    cr_assert(hung_up(fd), "%s, %zu bytes", what, bytes);
    (void)close(fd);
}

Test(mapped_hostile, wrong_words, .timeout = 60) {
    end_open(&lender, 1);
    int fds = count_fds();
    const mapped_ask_t right = right_words();
    struct {
        mapped_ask_t ask;
        char more[200];
    } words = {.ask = right};
    for (size_t n = 0; n <= sizeof(words); n += n < sizeof(right) ? 1 : 37) {
        if (n != sizeof(right)) {
            expect_refusal(&words, n, "another length");
        }
    }
    for (size_t i = 0; i < offsetof(mapped_ask_t, incarnation); i++) {
        words.ask = right;
        ((uint8_t *)&words.ask)[i] ^= 1;
        expect_refusal(&words.ask, sizeof(right), "another magic or secret");
    }
    memset(&words, 0, sizeof(words));
    expect_refusal(&words, sizeof(right), "zeros");
    cr_assert_eq(lender.lends, 0, "who does not know the secret is not asked for");
    for (size_t i = 0; i < sizeof(right.incarnation); i++) {
        words.ask = right;
        words.ask.incarnation[i] ^= 0x80;
        expect_refusal(&words.ask, sizeof(right), "an unknown incarnation");
    }
    cr_assert_eq(lender.lends, sizeof(right.incarnation));
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(count_fds(), fds);
    int fd = stranger(); /* the right ones do it, also after all that */
    cr_assert_eq(send(fd, &right, sizeof(right), 0), sizeof(right));
    ends_idle(&lender, NULL, 20000);
    cr_assert_eq(descriptors(fd), N_POOLS);
    (void)close(fd);
    cr_assert(ends_run(&lender, NULL, &lender.returns, 1, 5000000));
    end_close(&lender);
    check_leaks();
}

/* Descriptors that nobody asked for are not taken. */
Test(mapped_hostile, words_with_descriptors, .timeout = 20) {
    end_open(&lender, 1);
    int fds = count_fds();
    mapped_ask_t ask = right_words();
    char control[CMSG_SPACE(sizeof(int) * 2)] = {0};
    struct iovec iov = {&ask, sizeof(ask)};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    const int two[2] = {0, 1};
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(two));
    memcpy(CMSG_DATA(header), two, sizeof(two));
    int fd = stranger();
    cr_assert_eq(sendmsg(fd, &message, 0), sizeof(ask));
    ends_idle(&lender, NULL, 50000);
    cr_assert_eq(count_fds(), fds + 3); /* this socket, its other end, the pidfd */
    cr_assert_eq(descriptors(fd), N_POOLS);
    (void)close(fd);
    cr_assert(ends_run(&lender, NULL, &lender.returns, 1, 5000000));
    cr_assert_eq(count_fds(), fds);
    end_close(&lender);
}

/* However many connect and say nothing, who has something to say is heard. */
Test(mapped_hostile, silent_connections, .timeout = 60) {
    enum { N = 200, MOST = 64 };
    int silent[N];
    end_open(&lender, 1);
    end_open(&borrower, 2);
    ends_map(&borrower, &lender);
    int fds = count_fds();
    for (int i = 0; i < N; i++) {
        silent[i] = stranger();
        (void)kvf_mapped_progress(lender.mapped);
    }
    ends_idle(&lender, &borrower, 20000);
    cr_assert_eq(count_fds(), fds + N + MOST, "no more than so many are kept");
    for (int i = 0; i < N; i++) {
        cr_assert_eq(hung_up(silent[i]), i < N - MOST, "the oldest go");
    }
    cr_assert_eq(lender.returns, 0, "who has the pools is none of them");
    kvf_mapped_unmap(borrower.mapped, LENDER);
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 1, 5000000));
    ends_map(&borrower, &lender);
    /* One of those that were silent speaks after all. */
    mapped_ask_t ask = right_words();
    cr_assert_eq(send(silent[N - 1], &ask, sizeof(ask), 0), sizeof(ask));
    ends_idle(&lender, &borrower, 20000);
    cr_assert_eq(descriptors(silent[N - 1]), N_POOLS);
    for (int i = 0; i < N; i++) {
        (void)close(silent[i]);
    }
    cr_assert(ends_run(&lender, &borrower, &lender.returns, 2, 5000000));
    cr_assert_eq(count_fds(), fds);
    end_close(&borrower);
    end_close(&lender);
    check_leaks();
}

/* A flood between an honest one's connect and its turn. */
Test(mapped_hostile, a_flood_while_somebody_asks, .timeout = 60) {
    kvf_detail_t detail;
    int flood[63];
    end_open(&lender, 1);
    end_open(&borrower, 2);
    for (int round = 0; round < 5; round++) {
        cr_assert_eq(end_ask(&borrower, &lender, &detail), KVF_OK);
        for (int i = 0; i < 63; i++) {
            flood[i] = stranger();
        }
        cr_assert(ends_run(&lender, &borrower, &borrower.answers, round + 1, 5000000));
        cr_assert_eq(borrower.status, KVF_OK, "%s", borrower.why);
        kvf_mapped_unmap(borrower.mapped, LENDER);
        for (int i = 0; i < 63; i++) {
            (void)close(flood[i]);
        }
        ends_idle(&lender, &borrower, 20000);
    }
    end_close(&borrower);
    end_close(&lender);
}

/* Who has the pools may say what it likes: only the end of the connection means something. */
Test(mapped_hostile, words_are_no_proof, .timeout = 20) {
    const mapped_ask_t ask = {.magic = "goodbye"};
    end_open(&lender, 1);
    int fds = count_fds(), fd = stranger();
    mapped_ask_t right = right_words();
    cr_assert_eq(send(fd, &right, sizeof(right), 0), sizeof(right));
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(send(fd, i % 2 == 0 ? &ask : &right, sizeof(ask) - (size_t)i % 7, 0),
                     sizeof(ask) - (size_t)i % 7);
        ends_idle(&lender, NULL, 2000);
    }
    cr_assert_eq(lender.lends, 1, "its words count once");
    cr_assert_eq(lender.returns, 0);
    cr_assert_eq(descriptors(fd), N_POOLS);
    cr_assert_not(ends_wake(&lender, NULL, 20), "they have been read");
    (void)close(fd);
    cr_assert(ends_run(&lender, NULL, &lender.returns, 1, 5000000));
    cr_assert_eq(count_fds(), fds);
    end_close(&lender);
}

/* Connections that come when there are no descriptors are turned away, and do not keep us awake. */
Test(mapped_hostile, no_descriptors, .timeout = 20) {
    struct rlimit before, none;
    end_open(&lender, 1);
    end_open(&borrower, 2);
    int fd = stranger(), second = stranger();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = (rlim_t)count_fds(); /* they are dense */
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    cr_assert_eq(dup(0), -1);
    ends_idle(&lender, NULL, 50000);
    cr_assert_not(ends_wake(&lender, NULL, 50), "it sleeps");
    cr_assert(hung_up(fd));
    cr_assert(hung_up(second));
    cr_assert_eq(dup(0), -1, "the spare one is back");
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    (void)close(fd);
    (void)close(second);
    ends_map(&borrower, &lender);
    /* Room for the connection, and none for its pidfd; then none for a pool at the borrower. */
    kvf_mapped_unmap(borrower.mapped, LENDER);
    ends_idle(&lender, &borrower, 20000);
    for (rlim_t room = 0; room < 5; room++) {
        kvf_detail_t detail;
        int answers = borrower.answers;
        none.rlim_cur = (rlim_t)count_fds() + room;
        cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
        kvf_status_t status = end_ask(&borrower, &lender, &detail);
        if (status == KVF_OK) {
            cr_assert(ends_run(&lender, &borrower, &borrower.answers, answers + 1, 5000000));
            cr_assert_neq(borrower.status, KVF_OK);
        }
        cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
        ends_idle(&lender, &borrower, 20000);
        cr_assert_eq(lender.returns, lender.lends);
        cr_assert_eq(count_mappings(getpid(), "r--s"), 0);
        cr_assert_eq(count_fds(), (int)none.rlim_cur - (int)room);
    }
    ends_map(&borrower, &lender);
    end_close(&borrower);
    end_close(&lender);
}

/* Another user of this machine, even one that knows the secret. */
Test(mapped_hostile, another_user, .timeout = 20) {
    if (geteuid() != 0) {
        cr_skip_test("only root can become another user");
    }
    end_open(&lender, 1);
    mapped_ask_t ask = right_words();
    pid_t pid = fork();
    if (pid == 0) {
        if (setresuid(65534, 65534, 65534) != 0) {
            _exit(2);
        }
        int fd = stranger();
        (void)send(fd, &ask, sizeof(ask), MSG_NOSIGNAL);
        struct pollfd end = {.fd = fd, .events = POLLIN};
        (void)poll(&end, 1, 5000);
        _exit(hung_up(fd) ? 0 : 1);
    }
    int status = -1;
    for (uint64_t end_us = now_us() + 10000000;
         waitpid(pid, &status, WNOHANG) == 0 && now_us() < end_us;) {
        ends_idle(&lender, NULL, 10000);
    }
    cr_assert_eq(status, 0);
    cr_assert_eq(lender.lends, 0);
    end_close(&lender);
}
