/* SPDX-License-Identifier: Apache-2.0 */
/* A connection that we dialled and over which we send. */
#include "transceiver/mover/tcp_impl.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

/* A frame ends with the chunk that makes it as long. The kernel holds about two of them. */
#define FRAME_BYTES (UINT64_C(512) << 10)

typedef struct path {
    kvf_route_t route;
    kvf_tcp_watch_t watch;
    kvf_tcp_t *tcp;
    bool blocked;  /* until the socket takes more; at first until it is connected */
    bool accepted; /* the answer has come: frames may leave */
    uint8_t wanted[KVF_TCP_TOKEN_BYTES], answer[KVF_TCP_TOKEN_BYTES]; /* and what there is of it */
    size_t n_answer;
    /* What is being sent: parts[at..n_parts), the preamble or a frame; and whom to settle when all
     * of it is with the kernel. */
    uint32_t at, n_parts, n_jobs;
    struct iovec parts[1 + KVF_TCP_MAX_CHUNKS];
    kvf_queue_job_t *jobs[KVF_TCP_MAX_CHUNKS];
    uint8_t preamble[KVF_TCP_PREAMBLE_BYTES];
    uint8_t headers[KVF_TCP_HEAD_BYTES + KVF_TCP_MAX_CHUNKS * KVF_CHUNK_HEADER_BYTES];
} path_t;

static void break_path(path_t *path, const char *what, int error) {
    char text[sizeof(path->route.why)];
    (void)snprintf(text, sizeof(text), "%s%s%s", what, error == 0 ? "" : ": ",
                   error == 0 ? "" : strerror(error));
    kvf_route_break(&path->route, text);
}

/* Nothing is to come but the answer; or the end. */
static void read_answer(path_t *path) {
    uint8_t text[KVF_TCP_TOKEN_BYTES + 1];
    size_t want = KVF_TCP_TOKEN_BYTES - path->n_answer;
    ssize_t got;
    do { /* it is told of once */
        got = read(path->watch.fd, text, want + 1);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN) {
        return;
    }
    if (got <= 0) {
        break_path(path, "the peer closed its connection for data", 0);
        return;
    }
    if ((size_t)got <= want) {
        memcpy(path->answer + path->n_answer, text, (size_t)got);
        path->n_answer += (size_t)got;
    }
    if ((size_t)got > want ||
        (path->n_answer == KVF_TCP_TOKEN_BYTES && !kvf_tcp_answer_ok(path->wanted, path->answer))) {
        break_path(path, "who listens at the peer's address for data is not the peer", 0);
        return;
    }
    path->accepted = path->n_answer == KVF_TCP_TOKEN_BYTES;
}

static void on_ready(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch, uint32_t events) {
    path_t *path = (path_t *)(void *)((uint8_t *)watch - offsetof(path_t, watch));
    (void)tcp;
    path->blocked &= (events & EPOLLOUT) == 0;
    if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
        int error = 0;
        socklen_t bytes = sizeof(error);
        (void)getsockopt(watch->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
        break_path(path, "the connection for data broke", error);
    } else if ((events & EPOLLRDHUP) != 0) {
        break_path(path, "the peer closed its connection for data", 0);
    } else if ((events & EPOLLIN) != 0) {
        read_answer(path);
    }
}

kvf_status_t kvf_tcp_path_create(kvf_tcp_t *tcp, const kvf_tcp_address_t *to, kvf_route_t **route_p,
                                 kvf_detail_t *detail) {
    const int yes = 1;
    path_t *path = kvf_calloc(tcp->routes.alloc, 1, sizeof(*path));
    if (path == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    path->tcp = tcp;
    path->watch.ready = on_ready;
    path->blocked = true;
    path->watch.fd = socket(to->at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (path->watch.fd < 0 ||
        setsockopt(path->watch.fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)) != 0 ||
        (connect(path->watch.fd, (const struct sockaddr *)&to->at,
                 kvf_tcp_address_length(&to->at)) != 0 &&
         errno != EINPROGRESS) ||
        /* Edges: it tells once that there is room, and not as long as there is. */
        !kvf_tcp_watch(tcp, &path->watch, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)) {
        (void)kvf_fail(detail, KVF_ERR_IO, "no connection for data to a peer: %s", strerror(errno));
        kvf_tcp_unwatch(tcp, &path->watch);
        kvf_free(tcp->routes.alloc, path);
        return KVF_ERR_IO;
    }
    memcpy(path->wanted, to->answer, sizeof(path->wanted));
    kvf_tcp_preamble_write(to->token, path->preamble);
    path->parts[0] = (struct iovec){path->preamble, sizeof(path->preamble)};
    path->n_parts = 1;
    *route_p = &path->route;
    return KVF_OK;
}

/* Cut the next frame. */
static void compose(path_t *path) {
    uint32_t n_chunks = 0;
    uint64_t bytes = 0;
    while (kvf_queue_waits(&path->route.queue) && n_chunks < KVF_TCP_MAX_CHUNKS &&
           bytes < FRAME_BYTES) {
        kvf_chunk_t chunk;
        const uint8_t *source;
        path->jobs[n_chunks] =
            kvf_queue_cut(&path->route.queue, KVF_TCP_CHUNK_BYTES, &chunk, &source);
        kvf_chunk_encode(&chunk, path->headers + KVF_TCP_HEAD_BYTES +
                                     (size_t)n_chunks * KVF_CHUNK_HEADER_BYTES);
        path->parts[++n_chunks] = (struct iovec){(void *)(uintptr_t)source, (size_t)chunk.bytes};
        bytes += chunk.bytes;
    }
    kvf_tcp_head_write(n_chunks, path->headers);
    path->parts[0] = (struct iovec){path->headers,
                                    KVF_TCP_HEAD_BYTES + (size_t)n_chunks * KVF_CHUNK_HEADER_BYTES};
    path->n_parts = 1 + n_chunks;
    path->n_jobs = n_chunks;
}

static bool path_can_send(const kvf_route_t *route) {
    const path_t *path = (const path_t *)route;
    return !path->blocked && !route->broken &&
           (path->n_parts > 0 || (path->accepted && kvf_queue_waits(&route->queue)));
}

/* Skip what the kernel took. */
static void advance(path_t *path, size_t bytes) {
    while (bytes > 0) {
        struct iovec *part = &path->parts[path->at];
        size_t taken = bytes < part->iov_len ? bytes : part->iov_len;
        part->iov_base = (uint8_t *)part->iov_base + taken;
        part->iov_len -= taken;
        bytes -= taken;
        path->at += part->iov_len == 0;
    }
}

static uint64_t path_send(kvf_route_t *route) {
    path_t *path = (path_t *)route;
    if (path->n_parts == 0) {
        compose(path);
    }
    const struct msghdr message = {.msg_iov = path->parts + path->at,
                                   .msg_iovlen = path->n_parts - path->at};
    ssize_t sent = sendmsg(path->watch.fd, &message, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno == EAGAIN) {
            path->blocked = true;
        } else if (errno != EINTR) {
            break_path(path, "the connection for data broke", errno);
        }
        return 0;
    }
    advance(path, (size_t)sent);
    if (path->at == path->n_parts) { /* the kernel has a copy of all of it */
        for (uint32_t i = 0; i < path->n_jobs; i++) {
            kvf_queue_settle(&route->queue, path->jobs[i], KVF_OK);
        }
        path->at = path->n_parts = path->n_jobs = 0;
    }
    return (uint64_t)sent;
}

static void path_close(kvf_route_t *route) {
    path_t *path = (path_t *)route;
    kvf_tcp_unwatch(path->tcp, &path->watch);
}

static void path_destroy(kvf_route_t *route) {
    kvf_free(((path_t *)route)->tcp->routes.alloc, route);
}

const kvf_route_ops_t kvf_tcp_path_ops = {path_can_send, path_send, path_close, path_destroy};
