/* SPDX-License-Identifier: Apache-2.0 */
/* Others' pools, here: asking, mapping, and giving back when the last user is done. */
#include "kvmgr/base/cursor.h"
#include "transceiver/mover/mapped_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define ANSWER_S 1 /* how long an answer is waited for */

struct kvf_mapped_source {
    kvf_mapped_t *mapped;
    uint64_t peer;
    mapped_watch_t socket; /* to the owner, as long as its pools are mapped */
    mapped_watch_t timer;  /* while the answer is waited for */
    bool ready;
    bool gone; /* unmap was called */
    uint32_t n_users;
    uint32_t n_pools; /* mapped here */
    uint64_t expect[KVF_MAX_GROUPS];
    uint8_t handles[KVF_MAX_GROUPS][KVF_MAPPED_HANDLE_BYTES];
    int fds[KVF_MAX_GROUPS]; /* that came with handles, and were not taken; -1: none */
    void *bases[KVF_MAX_GROUPS];
    uint64_t bytes[KVF_MAX_GROUPS];
    kvf_mapped_source_t *next;
};

static void unmap_pools(kvf_mapped_source_t *source) {
    for (uint32_t i = 0; i < source->n_pools; i++) {
        (void)munmap(source->bases[i], (size_t)source->bytes[i]);
    }
    source->n_pools = 0;
    for (uint32_t i = 0; i < KVF_MAX_GROUPS; i++) {
        int fd = kvf_mapped_take_fd(source, i);
        if (fd >= 0) {
            (void)close(fd);
        }
    }
}

static void source_end(kvf_mapped_source_t *source) {
    kvf_mapped_t *mapped = source->mapped;
    kvf_mapped_source_t **link = &mapped->sources;
    while (*link != source) {
        link = &(*link)->next;
    }
    *link = source->next;
    unmap_pools(source);
    /* Last: it tells the owner that we read no more; also if a child of ours has the socket, too.
     */
    (void)shutdown(source->socket.fd, SHUT_RDWR);
    mapped_unwatch(mapped, &source->socket);
    mapped_unwatch(mapped, &source->timer);
    kvf_free(mapped->alloc, source);
}

static kvf_mapped_source_t *find(const kvf_mapped_t *mapped, uint64_t peer) {
    kvf_mapped_source_t *source = mapped->sources;
    while (source != NULL && (source->gone || source->peer != peer)) {
        source = source->next;
    }
    return source;
}

static void source_fail(kvf_mapped_source_t *source, kvf_status_t status, const char *why) {
    kvf_mapped_t *mapped = source->mapped;
    uint64_t peer = source->peer;
    source_end(source);
    mapped->events.mapped(mapped->events.ctx, peer, status, why);
}

static void on_timer(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    (void)mapped;
    source_fail(watch->owner, KVF_ERR_IO, "it does not answer");
}

static kvf_status_t not_promised(const kvf_mapped_source_t *source, uint32_t i,
                                 kvf_detail_t *detail) {
    return kvf_fail(detail, KVF_ERR_INVALID,
                    "its pool %" PRIu32 " is not the %" PRIu64 " bytes that it spoke of", i,
                    source->expect[i]);
}

/* Map what a descriptor stands for, if it is what was promised. */
static kvf_status_t map_pool(kvf_mapped_source_t *source, int fd, uint64_t bytes,
                             kvf_detail_t *detail) {
    uint32_t i = source->n_pools;
    struct stat stat;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &stat) != 0 || stat.st_size < 0 || (uint64_t)stat.st_size != bytes ||
        bytes < source->expect[i] || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return not_promised(source, i, detail);
    }
    void *base = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "mapping %" PRIu64 " bytes: %s", bytes,
                        strerror(errno));
    }
    source->bases[i] = base;
    source->bytes[i] = bytes;
    source->n_pools++;
    /* A child that keeps the mapping would keep reading. */
    if (madvise(base, (size_t)bytes, MADV_DONTFORK) != 0) {
        return kvf_fail(detail, KVF_ERR_IO, "MADV_DONTFORK: %s", strerror(errno));
    }
    (void)madvise(base, (size_t)bytes, MADV_DONTDUMP);
    (void)madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    return KVF_OK;
}

/* Pools on a device. Whoever opens them looks at the handles and descriptors. */
static kvf_status_t take_handles(kvf_mapped_source_t *source, const mapped_answer_t *answer,
                                 kvf_detail_t *detail) {
    for (uint32_t i = 0; i < answer->n_pools; i++) {
        if (answer->bytes[i] < source->expect[i]) {
            return not_promised(source, i, detail);
        }
        memcpy(source->handles[i], answer->handles[i], sizeof(source->handles[i]));
    }
    return KVF_OK;
}

/* Whether an answer is that of an agent like ours; how many descriptors it speaks of. */
static bool check_answer(const kvf_mapped_t *mapped, const mapped_answer_t *answer,
                         uint32_t *n_fds_p) {
    bool on_device = mapped_on_device(mapped);
    uint32_t n = 0;
    for (uint32_t i = 0; i < mapped->n_pools; i++) {
        n += answer->has_fd[i] != 0;
    }
    *n_fds_p = n;
    return memcmp(answer->magic, MAPPED_MAGIC, sizeof(answer->magic)) == 0 &&
           answer->n_pools == mapped->n_pools && answer->on_device == on_device &&
           (on_device || n == mapped->n_pools);
}

/* The descriptors of a message, in order; what is not wanted any more is closed. @return How many
 * there were. */
static uint32_t take_fds(struct msghdr *message, int *fds, uint32_t cap) {
    uint32_t n = 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(message); h != NULL; h = CMSG_NXTHDR(message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        for (size_t at = 0; at < h->cmsg_len - CMSG_LEN(0); at += sizeof(int), n++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + at, sizeof(fd));
            if (n < cap) {
                fds[n] = fd;
            } else {
                (void)close(fd);
            }
        }
    }
    return n;
}

/* What an answer brings; its descriptors are closed, or the source's. */
static kvf_status_t take_pools(kvf_mapped_source_t *source, struct msghdr *message,
                               const mapped_answer_t *answer, bool valid, kvf_detail_t *detail) {
    const kvf_mapped_t *mapped = source->mapped;
    int fds[KVF_MAX_GROUPS];
    uint32_t wanted = 0, next = 0;
    valid = valid && check_answer(mapped, answer, &wanted);
    uint32_t n = take_fds(message, fds, wanted);
    kvf_status_t status = KVF_OK;
    if (!valid || n != wanted) {
        status = kvf_fail(detail, KVF_ERR_INVALID,
                          "its answer is not that of a kvferry of this version");
    } else if (mapped_on_device(mapped)) {
        status = take_handles(source, answer, detail);
    }
    for (uint32_t i = 0; i < mapped->n_pools && next < n && next < wanted; i++) {
        if (answer->has_fd[i] == 0) {
            continue;
        }
        int fd = fds[next++];
        if (status == KVF_OK && mapped_on_device(mapped)) {
            source->fds[i] = fd;
            continue;
        }
        if (status == KVF_OK) {
            status = map_pool(source, fd, answer->bytes[i], detail);
        }
        (void)close(fd);
    }
    return status;
}

static void on_socket(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    kvf_mapped_source_t *source = watch->owner;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * KVF_MAX_GROUPS)];
    } control;
    mapped_answer_t answer = {.n_pools = 0};
    kvf_detail_t detail;
    struct iovec iov = {&answer, sizeof(answer)};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    ssize_t n = recvmsg(watch->fd, &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    bool valid = !source->ready && n == (ssize_t)sizeof(answer) &&
                 (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
    kvf_status_t status =
        n < 0 ? KVF_ERR_IO : take_pools(source, &message, &answer, valid, &detail);
    if (source->ready) {
        /* Its owner has ended. What is mapped stays readable; the control channel tells the rest.
         */
        mapped_unwatch(mapped, watch);
        return;
    }
    if (n <= 0) {
        source_fail(source, KVF_ERR_IO, "it refused; is it another user's, or has it just ended?");
        return;
    }
    if (status != KVF_OK) {
        source_fail(source, status, detail.text);
        return;
    }
    source->ready = true;
    mapped_unwatch(mapped, &source->timer);
    mapped->events.mapped(mapped->events.ctx, source->peer, KVF_OK, "");
}

/* Say who we are to the agent of that address. */
static kvf_status_t ask(kvf_mapped_source_t *source, const void *address, size_t bytes,
                        kvf_detail_t *detail) {
    kvf_mapped_t *mapped = source->mapped;
    kvf_reader_t reader = kvf_reader(address, bytes);
    const uint8_t *name = kvf_read_bytes(&reader, KVF_MAPPED_NAME_BYTES);
    const uint8_t *secret = kvf_read_bytes(&reader, SECRET_BYTES);
    mapped_ask_t ask = {.magic = MAPPED_MAGIC};
    struct sockaddr_un to;
    if (reader.bad) {
        return kvf_fail(detail, KVF_ERR_INVALID, "an address of %zu bytes is cut", bytes);
    }
    if (reader.left != strlen(mapped->boot_id) ||
        memcmp(reader.at, mapped->boot_id, reader.left) != 0) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "it is on another machine");
    }
    memcpy(ask.secret, secret, sizeof(ask.secret));
    memcpy(ask.incarnation, mapped->incarnation, sizeof(ask.incarnation));
    socklen_t to_bytes = mapped_socket_address(name, &to);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || !mapped_watch(mapped, &source->socket, fd) ||
        connect(fd, (const struct sockaddr *)&to, to_bytes) != 0 ||
        send(fd, &ask, sizeof(ask), MSG_NOSIGNAL) != (ssize_t)sizeof(ask)) {
        return kvf_fail(detail, KVF_ERR_IO,
                        "no connection to its socket (%s); does it run in another network "
                        "namespace?",
                        strerror(errno));
    }
    return KVF_OK;
}

kvf_status_t kvf_mapped_map(kvf_mapped_t *mapped, uint64_t peer, const void *address, size_t bytes,
                            const uint64_t *expect, kvf_detail_t *detail) {
    const struct itimerspec at = {.it_value.tv_sec = ANSWER_S};
    kvf_mapped_source_t *source = kvf_calloc(mapped->alloc, 1, sizeof(*source));
    if (source == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory to map pools");
    }
    source->mapped = mapped;
    source->peer = peer;
    source->socket = (mapped_watch_t){-1, on_socket, source};
    source->timer = (mapped_watch_t){-1, on_timer, source};
    memset(source->fds, -1, sizeof(source->fds));
    memcpy(source->expect, expect, mapped->n_pools * sizeof(*expect));
    source->next = mapped->sources;
    mapped->sources = source;
    kvf_status_t status = ask(source, address, bytes, detail);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (status == KVF_OK && (timer < 0 || timerfd_settime(timer, 0, &at, NULL) != 0 ||
                             !mapped_watch(mapped, &source->timer, timer))) {
        status = kvf_fail(detail, KVF_ERR_IO, "no timer: %s", strerror(errno));
    }
    if (status != KVF_OK) {
        if (timer >= 0 && source->timer.fd < 0) {
            (void)close(timer);
        }
        source_end(source);
    }
    return status;
}

void kvf_mapped_unmap(kvf_mapped_t *mapped, uint64_t peer) {
    kvf_mapped_source_t *source = find(mapped, peer);
    if (source != NULL) {
        source->gone = true;
        if (source->n_users == 0) {
            source_end(source);
        }
    }
}

kvf_mapped_source_t *kvf_mapped_use(kvf_mapped_t *mapped, uint64_t peer) {
    kvf_mapped_source_t *source = find(mapped, peer);
    if (source == NULL || !source->ready) {
        return NULL;
    }
    source->n_users++;
    return source;
}

void kvf_mapped_unuse(kvf_mapped_source_t *source) {
    if (--source->n_users == 0 && source->gone) {
        source_end(source);
    }
}

const uint8_t *kvf_mapped_base(const kvf_mapped_source_t *source, uint32_t group_idx) {
    return source->bases[group_idx];
}

uint64_t kvf_mapped_bytes(const kvf_mapped_source_t *source, uint32_t group_idx) {
    return source->expect[group_idx];
}

const uint8_t *kvf_mapped_handle(const kvf_mapped_source_t *source, uint32_t group_idx) {
    return source->handles[group_idx];
}

int kvf_mapped_take_fd(kvf_mapped_source_t *source, uint32_t group_idx) {
    int fd = source->fds[group_idx];
    source->fds[group_idx] = -1;
    return fd;
}

void mapped_forget_sources(kvf_mapped_t *mapped) {
    while (mapped->sources != NULL) {
        source_end(mapped->sources);
    }
}
