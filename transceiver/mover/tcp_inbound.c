/* SPDX-License-Identifier: Apache-2.0 */
/* A connection that a peer dialled and over which it sends. */
#include "transceiver/mover/tcp_impl.h"

#include "kernels/digest.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utlist.h>

#define MAX_PEERS 1024U                  /* connections of theirs */
#define MAX_STRANGERS 64U                /* that have not shown the token yet */
#define READ_BYTES (UINT64_C(256) << 10) /* at once: so much is hashed while it is in the cache */
#define TURN_BYTES (UINT64_C(1) << 20)   /* read before others have their turn */

typedef struct kvf_tcp_inbound {
    kvf_tcp_watch_t watch;
    bool proven; /* it has shown the token */
    bool useful; /* something came that had a place */
    struct kvf_tcp_inbound *prev, *next;
    /* What is next, and as far as it has come: the preamble, then a frame's head, its headers; the
     * bytes of its chunks go to their places. */
    uint8_t text[KVF_TCP_MAX_CHUNKS * KVF_CHUNK_HEADER_BYTES];
    enum { PREAMBLE, HEAD, HEADERS, DATA } state;
    size_t have;
    uint32_t n, at; /* chunks of the frame, and the next of them */
    uint64_t off;   /* of its bytes were read */
    kvf_chunk_t chunks[KVF_TCP_MAX_CHUNKS];
    bool dropped[KVF_TCP_MAX_CHUNKS]; /* they have no place */
} inbound_t;

static void inbound_close(kvf_tcp_t *tcp, inbound_t *in) {
    if (in->watch.fd >= 0) {
        if (in->proven) {
            DL_DELETE(tcp->peers, in);
            tcp->n_peers--;
        } else {
            DL_DELETE(tcp->strangers, in);
            tcp->n_strangers--;
        }
        DL_APPEND(tcp->ended, in);
        kvf_tcp_unwatch(tcp, &in->watch);
    }
}

static void refuse(kvf_tcp_t *tcp, inbound_t *in, const char *what) {
    if (tcp->n_refused++ == 0) {
        kvf_log(tcp->log, KVF_LOG_WARN,
                "tcp: closed a connection for data: %s; more are only counted", what);
    }
    inbound_close(tcp, in);
}

/* Whoever knows the token may have taken all there is, and may have forgotten it. */
static bool drop_useless(kvf_tcp_t *tcp) {
    inbound_t *in;
    DL_FOREACH(tcp->peers, in) {
        if (!in->useful) {
            refuse(tcp, in, "it brought nothing, and there are many of these");
            return true;
        }
    }
    return false;
}

/* ---- headers ---- */

static size_t text_bytes(const inbound_t *in) {
    return in->state == PREAMBLE ? KVF_TCP_PREAMBLE_BYTES
           : in->state == HEAD   ? KVF_TCP_HEAD_BYTES
                                 : (size_t)in->n * KVF_CHUNK_HEADER_BYTES;
}

/* A text is there. @return Why the connection must end, or NULL. */
static const char *text_done(kvf_tcp_t *tcp, inbound_t *in) {
    in->have = 0;
    switch (in->state) {
    case PREAMBLE:
        if (!kvf_tcp_preamble_ok(tcp->address.token, in->text)) {
            return "a stranger's";
        }
        if (send(in->watch.fd, tcp->address.answer, KVF_TCP_TOKEN_BYTES, MSG_NOSIGNAL) !=
            KVF_TCP_TOKEN_BYTES) {
            return "it has gone";
        }
        if (tcp->n_peers == MAX_PEERS && !drop_useless(tcp)) {
            return "there are too many";
        }
        in->proven = true;
        DL_DELETE(tcp->strangers, in);
        tcp->n_strangers--;
        DL_APPEND(tcp->peers, in);
        tcp->n_peers++;
        in->state = HEAD;
        return NULL;
    case HEAD:
        in->n = kvf_tcp_head_read(in->text);
        in->state = HEADERS;
        return in->n > 0 ? NULL : "its frame has no head";
    default:
        if (!kvf_tcp_headers_read(in->text, in->n, in->chunks)) {
            return "its frame has a header that is none";
        }
        memset(in->dropped, 0, sizeof(in->dropped));
        in->state = DATA;
        in->at = 0;
        in->off = 0;
        return NULL;
    }
}

static void end_text(kvf_tcp_t *tcp, inbound_t *in) {
    const char *why = text_done(tcp, in);
    if (why != NULL) {
        refuse(tcp, in, why);
    }
}

/* ---- bytes ---- */

/* Where to read up to `most` bytes: a part for each of the frame's chunks, and then one for the
 * next frame's head. A refusal makes the places that were named before it void, so all are asked
 * for again. @return How many parts. */
static uint32_t find_places(kvf_tcp_t *tcp, inbound_t *in, uint64_t most, kvf_landing_t *places,
                            struct iovec *parts) {
    const kvf_mover_sink_t *sink = &tcp->routes.sink;
    uint32_t n;
    uint64_t left;
    bool again;
    do {
        uint64_t off = in->off;
        left = most;
        again = false;
        for (n = 0; !again && in->at + n < in->n && left > 0; n++, off = 0) {
            const kvf_chunk_t *chunk = &in->chunks[in->at + n];
            bool *dropped = &in->dropped[in->at + n];
            uint64_t bytes = chunk->bytes - off < left ? chunk->bytes - off : left;
            if (!*dropped && sink->place(sink->ctx, chunk, &places[n]) != KVF_OK) {
                *dropped = again = true;
            }
            parts[n] = (struct iovec){*dropped ? tcp->scrap : places[n].at + off, (size_t)bytes};
            left -= bytes;
        }
    } while (again);
    if (left > 0) { /* all chunks are whole */
        parts[n++] = (struct iovec){in->text, KVF_TCP_HEAD_BYTES};
    }
    return n;
}

/* Tell of chunks whose last bytes have come. First all are hashed: telling of one may end the
 * transfer that the next one's place is of. @return How many bytes are none of these chunks'. */
static uint64_t advance(kvf_tcp_t *tcp, inbound_t *in, uint64_t bytes,
                        const kvf_landing_t *places) {
    const kvf_mover_sink_t *sink = &tcp->routes.sink;
    const uint32_t first = in->at;
    while (in->at < in->n && bytes > 0) {
        const kvf_chunk_t *chunk = &in->chunks[in->at];
        const uint64_t left = chunk->bytes - in->off;
        if (bytes < left) {
            in->off += bytes;
            bytes = 0;
            break;
        }
        const kvf_landing_t *place = &places[in->at - first];
        if (!in->dropped[in->at] && place->leaves != NULL) {
            kvf_digest_hashes(place->at, chunk->bytes, place->leaves);
        }
        bytes -= left;
        in->off = 0;
        in->at++;
    }
    for (uint32_t i = first; i < in->at; i++) {
        if (!in->dropped[i]) {
            in->useful = true;
            sink->landed(sink->ctx, &in->chunks[i]);
        }
    }
    if (in->at == in->n) {
        in->state = HEAD;
    }
    return bytes;
}

/* Read what is next, at most `most` bytes of chunks. @return As read(2). */
static ssize_t read_some(kvf_tcp_t *tcp, inbound_t *in, uint64_t most) {
    kvf_landing_t places[KVF_TCP_MAX_CHUNKS];
    struct iovec parts[KVF_TCP_MAX_CHUNKS + 1];
    ssize_t got;
    if (in->state != DATA) {
        size_t want = text_bytes(in);
        got = read(in->watch.fd, in->text + in->have, want - in->have);
        in->have += got > 0 ? (size_t)got : 0;
        if (in->have == want) {
            end_text(tcp, in);
        }
        return got;
    }
    /* No more places than there are bytes, as they are asked for again each time. */
    int there = 0;
    (void)ioctl(in->watch.fd, FIONREAD, &there);
    most = most < READ_BYTES ? most : READ_BYTES;
    most = there <= 0 ? 1 : (uint64_t)there < most ? (uint64_t)there : most;
    uint32_t n = find_places(tcp, in, most, places, parts);
    got = readv(in->watch.fd, parts, (int)n);
    if (got > 0) {
        in->have = advance(tcp, in, (uint64_t)got, places);
        if (in->have == KVF_TCP_HEAD_BYTES) {
            end_text(tcp, in);
        }
    }
    return got;
}

static void on_ready(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch, uint32_t events) {
    inbound_t *in = (inbound_t *)(void *)watch;
    (void)events; /* errors come with a read */
    for (uint64_t bytes = 0; bytes < TURN_BYTES && watch->fd >= 0;) {
        ssize_t got = read_some(tcp, in, TURN_BYTES - bytes);
        if (got > 0) {
            bytes += (uint64_t)got;
        } else if (got < 0 && errno == EAGAIN) {
            break;
        } else if (got == 0 || errno != EINTR) {
            inbound_close(tcp, in);
        }
    }
}

/* ---- life ---- */

void kvf_tcp_inbound_add(kvf_tcp_t *tcp, int fd) {
    const int yes = 1, idle_s = 30, period_s = 10, times = 3;
    inbound_t *in = kvf_calloc(tcp->routes.alloc, 1, sizeof(*in));
    if (in == NULL) {
        (void)close(fd);
        return;
    }
    if (tcp->n_strangers == MAX_STRANGERS) {
        (void)kvf_tcp_inbound_drop(tcp);
    }
    in->watch = (kvf_tcp_watch_t){fd, on_ready};
    DL_APPEND(tcp->strangers, in);
    tcp->n_strangers++;
    /* A machine that went away without a word. */
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &period_s, sizeof(period_s));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof(times));
    if (!kvf_tcp_watch(tcp, &in->watch, EPOLLIN)) {
        inbound_close(tcp, in);
        return;
    }
    on_ready(tcp, &in->watch, EPOLLIN); /* who has shown the token is none of those that may go */
}

bool kvf_tcp_inbound_drop(kvf_tcp_t *tcp) {
    if (tcp->strangers == NULL) {
        return drop_useless(tcp);
    }
    refuse(tcp, tcp->strangers, "it says nothing, and there are many of these");
    return true;
}

void kvf_tcp_inbound_reap(kvf_tcp_t *tcp) {
    inbound_t *in, *next;
    DL_FOREACH_SAFE(tcp->ended, in, next) {
        kvf_free(tcp->routes.alloc, in);
    }
    tcp->ended = NULL;
}

void kvf_tcp_inbound_end(kvf_tcp_t *tcp) {
    while (tcp->strangers != NULL) {
        inbound_close(tcp, tcp->strangers);
    }
    while (tcp->peers != NULL) {
        inbound_close(tcp, tcp->peers);
    }
    kvf_tcp_inbound_reap(tcp);
}
