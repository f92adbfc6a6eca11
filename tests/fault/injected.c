/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* accept4(), RTLD_NEXT */
#include "injected.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

injector_t sockets, movers;

static bool fails(injector_t *injector) {
    return injector->armed && ++injector->calls == injector->fail_at;
}

bool maps(void) {
    return getenv("KVF_TEST_MAPPED") != NULL;
}

/* Those of the control channel, and of pools that are mapped. */
static bool is_ours(int domain) {
    return domain == AF_INET || (domain == AF_UNIX && maps());
}

#define REAL(name) ((__typeof__(&(name)))(uintptr_t)dlsym(RTLD_NEXT, #name))

static bool is_our_socket(int fd) {
    int domain = 0;
    socklen_t len = sizeof(domain);
    return REAL(getsockopt)(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) == 0 && is_ours(domain);
}

static bool socket_fails(int fd, int error) {
    if (sockets.armed && is_our_socket(fd) && fails(&sockets)) {
        errno = error;
        return true;
    }
    return false;
}

int socket(int domain, int type, int protocol) {
    if (is_ours(domain) && fails(&sockets)) {
        errno = EMFILE;
        return -1;
    }
    return REAL(socket)(domain, type, protocol);
}

int bind(int fd, __CONST_SOCKADDR_ARG addr, socklen_t len) {
    return socket_fails(fd, EACCES) ? -1 : REAL(bind)(fd, addr, len);
}

int listen(int fd, int backlog) {
    return socket_fails(fd, EADDRINUSE) ? -1 : REAL(listen)(fd, backlog);
}

int accept4(int fd, __SOCKADDR_ARG addr, socklen_t *len, int flags) {
    return socket_fails(fd, ECONNABORTED) ? -1 : REAL(accept4)(fd, addr, len, flags);
}

int connect(int fd, __CONST_SOCKADDR_ARG addr, socklen_t len) {
    return socket_fails(fd, ENETUNREACH) ? -1 : REAL(connect)(fd, addr, len);
}

int getsockname(int fd, __SOCKADDR_ARG addr, socklen_t *len) {
    return socket_fails(fd, ENOBUFS) ? -1 : REAL(getsockname)(fd, addr, len);
}

int getpeername(int fd, __SOCKADDR_ARG addr, socklen_t *len) {
    return socket_fails(fd, ENOTCONN) ? -1 : REAL(getpeername)(fd, addr, len);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *len) {
    return socket_fails(fd, ENOBUFS) ? -1 : REAL(getsockopt)(fd, level, name, value, len);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    return socket_fails(fd, ENOBUFS) ? -1 : REAL(setsockopt)(fd, level, name, value, len);
}

int shutdown(int fd, int how) {
    return socket_fails(fd, ENOTCONN) ? -1 : REAL(shutdown)(fd, how);
}

ssize_t read(int fd, void *buf, size_t n) {
    return socket_fails(fd, ECONNRESET) ? -1 : REAL(read)(fd, buf, n);
}

ssize_t write(int fd, const void *buf, size_t n) {
    if (socket_fails(fd, EPIPE)) {
        (void)REAL(shutdown)(fd, SHUT_RDWR); /* that is what it means */
        return -1;
    }
    return REAL(write)(fd, buf, n);
}

ssize_t writev(int fd, const struct iovec *iov, int n) {
    return socket_fails(fd, ENOBUFS) ? -1 : REAL(writev)(fd, iov, n);
}

ssize_t send(int fd, const void *buf, size_t n, int flags) {
    return socket_fails(fd, EPIPE) ? -1 : REAL(send)(fd, buf, n, flags);
}

ssize_t recv(int fd, void *buf, size_t n, int flags) {
    return socket_fails(fd, ECONNRESET) ? -1 : REAL(recv)(fd, buf, n, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return socket_fails(fd, EPIPE) ? -1 : REAL(sendmsg)(fd, message, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    return socket_fails(fd, ECONNRESET) ? -1 : REAL(recvmsg)(fd, message, flags);
}

typedef struct faulty_mover {
    kvf_mover_t base;
    kvf_mover_ops_t ops;
    kvf_mover_t *below;
    kvf_mover_sink_t sink;
} faulty_mover_t;

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    const faulty_mover_t *faulty = ctx;
    return faulty->sink.place(faulty->sink.ctx, chunk, landing_p);
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    const faulty_mover_t *faulty = ctx;
    faulty->sink.landed(faulty->sink.ctx, chunk);
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    const faulty_mover_t *faulty = ctx;
    faulty->sink.moved(faulty->sink.ctx, window, fails(&movers) ? KVF_ERR_IO : status);
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    const faulty_mover_t *faulty = ctx;
    faulty->sink.broken(faulty->sink.ctx, peer, why);
}

static void faulty_destroy(kvf_mover_t *base) {
    faulty_mover_t *faulty = (faulty_mover_t *)base;
    faulty->below->ops->destroy(faulty->below);
    free(faulty);
}

static kvf_status_t faulty_address(kvf_mover_t *base, void *buf, size_t cap, size_t *bytes_p) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return fails(&movers) ? KVF_ERR_RANGE : below->ops->address(below, buf, cap, bytes_p);
}

static kvf_status_t faulty_connect(kvf_mover_t *base, uint64_t peer, const void *address,
                                   size_t bytes, kvf_detail_t *detail) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return fails(&movers) ? kvf_fail(detail, KVF_ERR_IO, "on purpose")
                          : below->ops->connect(below, peer, address, bytes, detail);
}

static void faulty_disconnect(kvf_mover_t *base, uint64_t peer) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    below->ops->disconnect(below, peer);
}

static kvf_status_t faulty_post(kvf_mover_t *base, kvf_window_t *window) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return fails(&movers) ? KVF_ERR_PEER_LOST : below->ops->post(below, window);
}

static unsigned faulty_progress(kvf_mover_t *base) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return below->ops->progress(below);
}

static int faulty_fd(kvf_mover_t *base) {
    (void)base;
    return -1;
}

static bool faulty_arm(kvf_mover_t *base) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return below->ops->arm(below);
}

static uint64_t faulty_max_sleep_us(kvf_mover_t *base) {
    kvf_mover_t *below = ((faulty_mover_t *)base)->below;
    return below->ops->max_sleep_us(below);
}

kvf_status_t make_faulty_mover(kvf_sim_net_t *net, uint64_t number, const kvf_mover_sink_t *sink,
                               kvf_mover_t **mover_p, kvf_detail_t *detail) {
    faulty_mover_t *faulty = calloc(1, sizeof(*faulty));
    const kvf_mover_sink_t inner = {on_place, on_landed, on_moved, on_broken, faulty};
    faulty->sink = *sink;
    if (fails(&movers)) {
        free(faulty);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "on purpose");
    }
    cr_assert_eq(kvf_mover_sim_create(net, number, &inner, &faulty->below), KVF_OK);
    faulty->ops = (kvf_mover_ops_t){
        faulty->below->ops->name, true,        faulty_destroy,  faulty_address, faulty_connect,
        faulty_disconnect,        faulty_post, faulty_progress, faulty_fd,      faulty_arm,
        faulty_max_sleep_us};
    faulty->base.ops = &faulty->ops;
    *mover_p = &faulty->base;
    return KVF_OK;
}
