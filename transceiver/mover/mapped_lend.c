/* SPDX-License-Identifier: Apache-2.0 */
/* Our pools, to others: who asks, who may, and when a mapping is gone. */
#include "transceiver/mover/mapped_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* asm-generic/socket.h, since 6.5 */
#endif

/* Connections that have not said yet who they are. Whoever may have our pools says it at once. */
#define MAX_ASKING 64

struct mapped_loan {
    mapped_watch_t socket;
    mapped_watch_t process; /* the pidfd: readable when it has ended */
    uint64_t peer;          /* 0: it has not said yet who it is */
    mapped_loan_t *prev, *next;
};

static void loan_end(kvf_mapped_t *mapped, mapped_loan_t *loan) {
    uint64_t peer = loan->peer;
    mapped->n_asking -= peer == 0;
    mapped_unwatch(mapped, &loan->socket);
    mapped_unwatch(mapped, &loan->process);
    *(loan->prev != NULL ? &loan->prev->next : &mapped->loans) = loan->next;
    if (loan->next != NULL) {
        loan->next->prev = loan->prev;
    }
    kvf_free(mapped->alloc, loan);
    if (peer != 0) {
        mapped->events.returned(mapped->events.ctx, peer);
    }
}

/* The process at the other end. Where the system has no pidfd of a connection, one is made from the
 * process's number, and is of that process if the connection is still there afterwards. */
static int process_of(int fd) {
    struct ucred cred;
    socklen_t bytes = sizeof(int);
    int pidfd = -1;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) == 0) {
        return pidfd;
    }
    if (errno != ENOPROTOOPT) {
        return -1; /* it has ended */
    }
    bytes = sizeof(cred);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) != 0 || cred.pid <= 0) {
        return -1;
    }
    pidfd = (int)syscall(SYS_pidfd_open, cred.pid, 0);
    struct pollfd still = {.fd = fd, .events = POLLRDHUP};
    if (pidfd >= 0 && (poll(&still, 1, 0) != 0)) {
        (void)close(pidfd);
        return -1;
    }
    return pidfd;
}

static bool same_user(int fd) {
    struct ucred cred;
    socklen_t bytes = sizeof(cred);
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) == 0 && cred.uid == geteuid();
}

static bool send_pools(const kvf_mapped_t *mapped, int fd) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * KVF_MAX_GROUPS)];
    } control;
    mapped_answer_t answer = {
        .magic = MAPPED_MAGIC, .n_pools = mapped->n_pools, .on_device = mapped_on_device(mapped)};
    struct iovec iov = {&answer, sizeof(answer)};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    int fds[KVF_MAX_GROUPS];
    uint32_t n_fds = 0;
    memset(&control, 0, sizeof(control));
    for (uint32_t i = 0; i < mapped->n_pools; i++) {
        answer.bytes[i] = mapped->pools[i].bytes;
        memcpy(answer.handles[i], mapped->pools[i].handle, sizeof(answer.handles[i]));
        answer.has_fd[i] = mapped->pools[i].fd >= 0;
        if (mapped->pools[i].fd >= 0) {
            fds[n_fds++] = mapped->pools[i].fd;
        }
    }
    if (n_fds > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * n_fds);
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(answer);
}

/* It has ended. */
static void on_process(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    loan_end(mapped, watch->owner);
}

/* Its first words; later its last ones: it has unmapped our pools and closed the connection. */
static void on_socket(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    mapped_loan_t *loan = watch->owner;
    mapped_ask_t ask;
    ssize_t n = recv(watch->fd, &ask, sizeof(ask), MSG_TRUNC);
    if ((n < 0 && (errno == EAGAIN || errno == EINTR)) || (n > 0 && loan->peer != 0)) {
        return; /* words prove nothing about a mapping */
    }
    if (loan->peer != 0 || n != (ssize_t)sizeof(ask) ||
        memcmp(ask.magic, MAPPED_MAGIC, sizeof(ask.magic)) != 0 ||
        memcmp(ask.secret, mapped->secret, sizeof(ask.secret)) != 0) {
        loan_end(mapped, loan);
        return;
    }
    int pidfd = process_of(watch->fd);
    loan->process = (mapped_watch_t){-1, on_process, loan};
    if (pidfd >= 0 && mapped_watch(mapped, &loan->process, pidfd)) {
        loan->peer = mapped->events.lend(mapped->events.ctx, ask.incarnation);
        mapped->n_asking -= loan->peer != 0;
    }
    if (loan->peer == 0 || !send_pools(mapped, watch->fd)) {
        loan_end(mapped, loan);
    }
}

/* The longest silent one makes room. */
static void make_room(kvf_mapped_t *mapped) {
    mapped_loan_t *oldest = NULL;
    for (mapped_loan_t *loan = mapped->loans; loan != NULL; loan = loan->next) {
        oldest = loan->peer == 0 ? loan : oldest;
    }
    loan_end(mapped, oldest);
}

/* Without descriptors a connection that waits would wake us for ever: with the one that is kept for
 * this it is taken, and closed. */
static void turn_away(kvf_mapped_t *mapped, int listener) {
    (void)close(mapped->spare);
    (void)close(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
    mapped->spare = fcntl(mapped->epoll, F_DUPFD_CLOEXEC, 0);
}

void mapped_accept(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    int fd = accept4(watch->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE) {
            turn_away(mapped, watch->fd);
        }
        return;
    }
    mapped_loan_t *loan = same_user(fd) ? kvf_calloc(mapped->alloc, 1, sizeof(*loan)) : NULL;
    if (loan == NULL) {
        (void)close(fd);
        return;
    }
    if (mapped->n_asking == MAX_ASKING) {
        make_room(mapped);
    }
    loan->socket = (mapped_watch_t){-1, on_socket, loan};
    loan->process = (mapped_watch_t){-1, on_process, loan};
    loan->next = mapped->loans;
    if (loan->next != NULL) {
        loan->next->prev = loan;
    }
    mapped->loans = loan;
    mapped->n_asking++;
    if (!mapped_watch(mapped, &loan->socket, fd)) {
        loan_end(mapped, loan);
    }
}

void mapped_forget_loans(kvf_mapped_t *mapped) {
    while (mapped->loans != NULL) {
        mapped->loans->peer = 0; /* no event */
        loan_end(mapped, mapped->loans);
    }
}
