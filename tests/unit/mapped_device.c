/* SPDX-License-Identifier: Apache-2.0 */
/* Pools on a device, between ends of the mapped mover: handles, with a descriptor beside some of
 * them. Here these are plain memory; the mover does not look at them. */
#define _GNU_SOURCE /* accept4() */
#include "../support/leaks.h"
#include "../support/mapped_ends.h"

#include "transceiver/mover/mapped_socket.h"

#include <fcntl.h>
#include <sys/stat.h>

static end_t lender, borrower;

/* Pools are a device's; those of `with` have descriptors. */
static void open_end(end_t *end, uint8_t name, unsigned with) {
    kvf_detail_t detail;
    end_pools(end, name);
    for (uint32_t g = 0; g < N_POOLS; g++) {
        end->list[g].on_device = true;
        end->list[g].fd = (with >> g & 1) != 0 ? end->list[g].fd : -1;
        memset(end->list[g].handle, (int)(name * 16 + g), sizeof(end->list[g].handle));
    }
    cr_assert_eq(end_start(end, &detail), KVF_OK, "%s", detail.text);
}

static void close_end(end_t *end) {
    end_stop(end);
    for (uint32_t g = 0; g < N_POOLS; g++) {
        kvf_mem_shm()->free(&end->pools[g]);
    }
}

static ino_t inode(int fd) {
    struct stat stat;
    cr_assert_eq(fstat(fd, &stat), 0);
    return stat.st_ino;
}

/* Each pool's handle and descriptor come to its own group, whatever the borrower's pools are. */
Test(mapped_device, handles_and_descriptors, .timeout = 20) {
    for (unsigned with = 0; with < 4; with++) {
        open_end(&lender, 1, with);
        open_end(&borrower, 2, 3 - with);
        int fds = count_fds();
        ends_map(&borrower, &lender);
        cr_assert_eq(count_mappings(getpid(), "r--s"), 0);
        kvf_mapped_source_t *source = kvf_mapped_use(borrower.mapped, LENDER);
        for (uint32_t g = 0; g < N_POOLS; g++) {
            bool has = (with >> g & 1) != 0;
            cr_assert_arr_eq(kvf_mapped_handle(source, g), lender.list[g].handle,
                             KVF_MAPPED_HANDLE_BYTES);
            cr_assert_eq(kvf_mapped_bytes(source, g), POOL_BYTES(g));
            if (g == 0) { /* the other one is closed when nobody has taken it */
                int fd = kvf_mapped_take_fd(source, g);
                cr_assert_eq(fd >= 0, has);
                cr_assert_eq(kvf_mapped_take_fd(source, g), -1, "once");
                if (has) {
                    cr_assert_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
                    cr_assert_eq(inode(fd), inode(lender.list[g].fd));
                    cr_assert_eq(close(fd), 0);
                }
            }
        }
        kvf_mapped_unuse(source);
        kvf_mapped_unmap(borrower.mapped, LENDER);
        cr_assert(ends_run(&lender, &borrower, &lender.returns, 1, 5000000));
        cr_assert_eq(count_fds(), fds, "%u", with);
        close_end(&borrower);
        close_end(&lender);
        check_leaks();
    }
}

/* The kinds do not come together, whoever asks. */
Test(mapped_device, and_other_memory, .timeout = 20) {
    for (int which = 0; which < 2; which++) {
        kvf_detail_t detail;
        which == 0 ? open_end(&lender, 1, 3) : end_open(&lender, 1);
        which == 0 ? end_open(&borrower, 2) : open_end(&borrower, 2, 3);
        int fds = count_fds();
        cr_assert_eq(end_ask(&borrower, &lender, &detail), KVF_OK, "%s", detail.text);
        cr_assert(ends_run(&borrower, &lender, &borrower.answers, 1, 5000000));
        cr_assert_eq(borrower.status, KVF_ERR_INVALID, "%s", borrower.why);
        cr_assert(ends_run(&lender, NULL, &lender.returns, 1, 5000000));
        cr_assert_eq(count_fds(), fds);
        close_end(&borrower);
        close_end(&lender);
    }
}

/* ---- an owner that misbehaves ---- */

typedef struct lie {
    const char *name;
    kvf_status_t status;
    int n_fds; /* that come */
    uint8_t on_device, has_fd[3];
    int size; /* added to that of the second pool */
} lie_t;

static const lie_t lies[] = {{"the truth", KVF_OK, 1, 1, {0, 1, 0}, 0},
                             {"longer", KVF_OK, 2, 1, {1, 1, 0}, 4096},
                             {"a descriptor of nobody's", KVF_ERR_INVALID, 1, 1, {0, 0, 0}, 0},
                             {"or of a pool that is none", KVF_ERR_INVALID, 1, 1, {0, 0, 1}, 0},
                             {"one too few", KVF_ERR_INVALID, 1, 1, {1, 1, 0}, 0},
                             {"none", KVF_ERR_INVALID, 0, 1, {0, 1, 0}, 0},
                             {"one too many", KVF_ERR_INVALID, 2, 1, {1, 0, 0}, 0},
                             {"far too many", KVF_ERR_INVALID, 17, 1, {1, 1, 0}, 0},
                             {"not a device's", KVF_ERR_INVALID, 2, 0, {1, 1, 0}, 0},
                             {"neither", KVF_ERR_INVALID, 2, 2, {1, 1, 0}, 0},
                             {"shorter", KVF_ERR_INVALID, 2, 1, {1, 1, 0}, -1}};

static void say(int fd, const lie_t *lie) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 20)];
    } control;
    mapped_answer_t answer = {
        .magic = MAPPED_MAGIC, .n_pools = N_POOLS, .on_device = lie->on_device};
    int fds[20];
    size_t n = (size_t)lie->n_fds;
    for (uint32_t g = 0; g < N_POOLS; g++) {
        answer.bytes[g] = POOL_BYTES(g) + (uint64_t)(int64_t)(g == 1 ? lie->size : 0);
    }
    memcpy(answer.has_fd, lie->has_fd, sizeof(lie->has_fd));
    for (size_t i = 0; i < n; i++) {
        fds[i] = kvf_mem_shm_fd(&borrower.pools[0]);
    }
    struct iovec iov = {&answer, sizeof(answer)};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n > 0) {
        memset(&control, 0, sizeof(control));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * n);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * n);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * n);
    }
    cr_assert_eq(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)sizeof(answer));
}

/* One event, and no descriptor stays. */
Test(mapped_device, answers, .timeout = 60) {
    static const uint64_t expect[N_POOLS] = {POOL_BYTES(0), POOL_BYTES(1)};
    open_end(&borrower, 2, 0);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        const lie_t *lie = &lies[i];
        uint8_t at[KVF_MAPPED_ADDRESS_BYTES];
        struct sockaddr_un address;
        mapped_ask_t ask;
        kvf_detail_t detail;
        const uint8_t name[KVF_MAPPED_NAME_BYTES] = {(uint8_t)getpid(), (uint8_t)(getpid() >> 8),
                                                     19};
        socklen_t bytes = mapped_socket_address(name, &address);
        int fds = count_fds(), answers = borrower.answers;
        int liar = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        cr_assert_eq(bind(liar, (const struct sockaddr *)&address, bytes), 0);
        cr_assert_eq(listen(liar, 4), 0);
        size_t at_bytes = kvf_mapped_address(borrower.mapped, at);
        memcpy(at, name, sizeof(name));
        cr_assert_eq(kvf_mapped_map(borrower.mapped, LENDER, at, at_bytes, expect, &detail),
                     KVF_OK);
        int connection = accept4(liar, NULL, NULL, SOCK_CLOEXEC);
        cr_assert_eq(recv(connection, &ask, sizeof(ask), 0), sizeof(ask));
        say(connection, lie);
        cr_assert(ends_run(&borrower, NULL, &borrower.answers, answers + 1, 5000000));
        cr_assert_eq(borrower.status, lie->status, "%s: %s", lie->name, borrower.why);
        bool ok = lie->status == KVF_OK;
        cr_assert_eq(count_fds(), fds + 2 + (ok ? 1 + lie->n_fds : 0), "%s", lie->name);
        kvf_mapped_unmap(borrower.mapped, LENDER);
        cr_assert_eq(close(connection), 0);
        cr_assert_eq(close(liar), 0);
        cr_assert_eq(count_fds(), fds, "%s", lie->name);
    }
    close_end(&borrower);
    check_leaks();
}
