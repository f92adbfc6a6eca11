/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/tcp_impl.h"

#include "kvmgr/base/clock.h"

#include <errno.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <unistd.h>

#define BACKLOG 128
#define DEAF_US 100000                 /* without descriptors */
#define TURN_EVENTS 8                  /* connections that are looked at in one progress call */
#define TURN_ACCEPTS 16                /* connections that are accepted at once */
#define TURN_BYTES (UINT64_C(1) << 20) /* sent in one progress call */

static kvf_tcp_t *tcp_of(kvf_mover_t *base) {
    return (kvf_tcp_t *)base;
}

/* ---- descriptors ---- */

bool kvf_tcp_watch(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch, uint32_t events) {
    struct epoll_event event = {.events = events, .data = {.ptr = watch}};
    return epoll_ctl(tcp->epoll, EPOLL_CTL_ADD, watch->fd, &event) == 0;
}

void kvf_tcp_unwatch(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch) {
    if (watch->fd >= 0) {
        /* In words, as a child that was forked may have the descriptor, too. */
        (void)epoll_ctl(tcp->epoll, EPOLL_CTL_DEL, watch->fd, NULL);
        (void)shutdown(watch->fd, SHUT_RDWR);
        (void)close(watch->fd);
        watch->fd = -1;
    }
}

static uint64_t now_us(void) {
    const kvf_clock_t *clock = kvf_clock_default();
    return clock->now_us(clock->ctx);
}

/* Without descriptors the listener would be ready for ever: who is of no use goes first, then it
 * waits a while. (Who dials us has just spoken over the control channel, so there will be turns.)
 */
static void make_room(kvf_tcp_t *tcp, int error) {
    if (kvf_tcp_inbound_drop(tcp)) {
        return;
    }
    if (!tcp->was_deaf) {
        kvf_log(tcp->log, KVF_LOG_WARN, "tcp: connections for data have to wait: %s",
                strerror(error));
    }
    tcp->was_deaf = true;
    if (epoll_ctl(tcp->epoll, EPOLL_CTL_DEL, tcp->listener.fd, NULL) == 0) {
        tcp->deaf_until_us = now_us() + DEAF_US;
    }
}

static void listen_again(kvf_tcp_t *tcp) {
    if (tcp->deaf_until_us > 0 && now_us() >= tcp->deaf_until_us &&
        kvf_tcp_watch(tcp, &tcp->listener, EPOLLIN)) {
        tcp->deaf_until_us = 0;
    }
}

static void on_listener(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch, uint32_t events) {
    (void)events;
    for (unsigned i = 0; i < TURN_ACCEPTS; i++) {
        int fd = accept4(watch->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            tcp->was_deaf = false;
            kvf_tcp_inbound_add(tcp, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            make_room(tcp, errno);
            return;
        } else if (errno == EAGAIN) {
            return;
        } /* else that connection has ended already */
    }
}

/* ---- the row ---- */

static kvf_status_t tcp_address(kvf_mover_t *base, void *buf, size_t cap, size_t *bytes_p) {
    if (cap < KVF_TCP_ADDRESS_BYTES) {
        return KVF_ERR_RANGE;
    }
    kvf_tcp_address_write(&tcp_of(base)->address, buf);
    *bytes_p = KVF_TCP_ADDRESS_BYTES;
    return KVF_OK;
}

static kvf_status_t tcp_connect(kvf_mover_t *base, uint64_t peer, const void *address, size_t bytes,
                                kvf_detail_t *detail) {
    kvf_tcp_t *tcp = tcp_of(base);
    kvf_tcp_address_t to;
    kvf_route_t *route;
    kvf_status_t status = kvf_routes_check(&tcp->routes, peer, detail);
    if (status == KVF_OK) {
        status = kvf_tcp_address_read(address, bytes, &to, detail);
    }
    if (status == KVF_OK) {
        status = kvf_tcp_path_create(tcp, &to, &route, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_routes_add(&tcp->routes, route, peer, detail);
    if (status != KVF_OK) {
        kvf_tcp_path_ops.close(route);
        kvf_tcp_path_ops.destroy(route);
    }
    return status;
}

static void tcp_disconnect(kvf_mover_t *base, uint64_t peer) {
    kvf_routes_leave(&tcp_of(base)->routes, peer);
}

static kvf_status_t tcp_post(kvf_mover_t *base, kvf_window_t *window) {
    return kvf_routes_post(&tcp_of(base)->routes, window);
}

static unsigned tcp_progress(kvf_mover_t *base) {
    kvf_tcp_t *tcp = tcp_of(base);
    struct epoll_event events[TURN_EVENTS];
    listen_again(tcp);
    int n = epoll_wait(tcp->epoll, events, TURN_EVENTS, 0);
    for (int i = 0; i < n; i++) {
        kvf_tcp_watch_t *watch = events[i].data.ptr;
        if (watch->fd >= 0) { /* it may have been closed for one before it */
            watch->ready(tcp, watch, events[i].events);
        }
    }
    unsigned did = n > 0 ? (unsigned)n : 0;
    did += kvf_routes_send(&tcp->routes, &kvf_tcp_path_ops, KVF_TCP_CHUNK_BYTES, TURN_BYTES);
    did += kvf_routes_tend(&tcp->routes, &kvf_tcp_path_ops);
    kvf_tcp_inbound_reap(tcp);
    return did;
}

static int tcp_fd(kvf_mover_t *base) {
    return tcp_of(base)->epoll;
}

static bool tcp_arm(kvf_mover_t *base) {
    return !kvf_routes_busy(&tcp_of(base)->routes, &kvf_tcp_path_ops);
}

static uint64_t tcp_max_sleep_us(kvf_mover_t *base) {
    (void)base;
    return KVF_NEVER;
}

static void tcp_destroy(kvf_mover_t *base) {
    kvf_tcp_t *tcp = tcp_of(base);
    if (tcp == NULL) {
        return;
    }
    kvf_routes_end(&tcp->routes, &kvf_tcp_path_ops);
    kvf_tcp_inbound_end(tcp);
    kvf_tcp_unwatch(tcp, &tcp->listener);
    if (tcp->epoll >= 0) {
        (void)close(tcp->epoll);
    }
    kvf_free(tcp->routes.alloc, tcp->scrap);
    kvf_free(tcp->routes.alloc, tcp);
}

uint64_t kvf_mover_tcp_refused(const kvf_mover_t *mover) {
    return ((const kvf_tcp_t *)mover)->n_refused;
}

static const kvf_mover_ops_t tcp_ops = {
    .name = "tcp",
    .checked = true,
    .destroy = tcp_destroy,
    .address = tcp_address,
    .connect = tcp_connect,
    .disconnect = tcp_disconnect,
    .post = tcp_post,
    .progress = tcp_progress,
    .fd = tcp_fd,
    .arm = tcp_arm,
    .max_sleep_us = tcp_max_sleep_us,
};

/* On a free port of that host. */
static bool start_listening(kvf_tcp_t *tcp, const struct sockaddr_storage *host) {
    struct sockaddr_storage *at = &tcp->address.at;
    socklen_t bytes = sizeof(*at);
    *at = *host;
    if (at->ss_family == AF_INET6) {
        ((struct sockaddr_in6 *)(void *)at)->sin6_port = 0;
    } else {
        ((struct sockaddr_in *)(void *)at)->sin_port = 0;
    }
    tcp->epoll = epoll_create1(EPOLL_CLOEXEC);
    tcp->listener.fd = socket(at->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    tcp->listener.ready = on_listener;
    return tcp->epoll >= 0 && tcp->listener.fd >= 0 &&
           bind(tcp->listener.fd, (const struct sockaddr *)at, kvf_tcp_address_length(at)) == 0 &&
           listen(tcp->listener.fd, BACKLOG) == 0 &&
           getsockname(tcp->listener.fd, (struct sockaddr *)at, &bytes) == 0 &&
           kvf_tcp_watch(tcp, &tcp->listener, EPOLLIN);
}

kvf_status_t kvf_mover_tcp_create(const struct sockaddr_storage *host, const kvf_alloc_t *alloc,
                                  const kvf_log_t *log, const kvf_mover_sink_t *sink,
                                  kvf_mover_t **mover_p, kvf_detail_t *detail) {
    const kvf_rand_t *rand = kvf_rand_default();
    kvf_tcp_t *tcp = kvf_calloc(alloc, 1, sizeof(*tcp));
    uint8_t *scrap = kvf_alloc(alloc, KVF_TCP_CHUNK_BYTES);
    if (tcp == NULL || scrap == NULL) {
        kvf_free(alloc, scrap);
        kvf_free(alloc, tcp);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the tcp mover");
    }
    tcp->base.ops = &tcp_ops;
    tcp->log = log;
    tcp->scrap = scrap;
    tcp->epoll = tcp->listener.fd = -1;
    tcp->routes.alloc = alloc;
    tcp->routes.sink = *sink;
    rand->fill(rand->ctx, tcp->address.token, sizeof(tcp->address.token));
    rand->fill(rand->ctx, tcp->address.answer, sizeof(tcp->address.answer));
    if (!start_listening(tcp, host)) {
        (void)kvf_fail(detail, KVF_ERR_IO, "no port for connections of data: %s", strerror(errno));
        tcp_destroy(&tcp->base);
        return KVF_ERR_IO;
    }
    *mover_p = &tcp->base;
    return KVF_OK;
}
