/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/control/control.h"

#include "transceiver/control/address.h"

#include <stdio.h>
#include <string.h>
#include <uv.h>

/* libuv reads at most 32 times from one stream in one turn of the loop, so one peer gets at most 1
 * MiB of a turn. */
#define CHUNK_BYTES (32u << 10)
#define N_BUCKETS 256u
#define LINGER_MS 1000u
#define LISTEN_BACKLOG 128
#define WHY_BYTES 128
/* Of so many messages or bytes a batch is not held back: the other end can begin. */
#define BATCH_MESSAGES 32
#define BATCH_BYTES (16u << 10)

typedef enum conn_state { CONN_DIALLING, CONN_OPEN, CONN_CLOSING } conn_state_t;

typedef struct batch batch_t;

typedef struct conn {
    uv_tcp_t tcp;
    uv_timer_t linger_timer;
    uv_connect_t connect;
    uv_shutdown_t shutdown;
    struct conn *next; /* of its bucket */
    kvf_control_t *control;
    uint64_t id;
    conn_state_t state;
    bool inbound;
    bool silent;      /* no event any more: closed by us, or never told */
    unsigned handles; /* libuv still has: tcp, linger_timer */
    batch_t *batch;   /* what is not written yet, or NULL */
    struct conn *batch_next;
    char why[WHY_BYTES];
} conn_t;

/* Messages of a connection that one system call writes. */
struct batch {
    uv_write_t req;
    conn_t *conn;
    size_t bytes;
    unsigned n;
    uv_buf_t messages[BATCH_MESSAGES];
};

struct kvf_control {
    const kvf_alloc_t *alloc;
    uv_loop_t *loop;
    kvf_control_events_t events;
    uint64_t backlog_bytes;
    uint32_t max_conns;
    uint32_t inbound; /* connections with memory, closing ones included */
    uint64_t last_id;
    uint64_t handles; /* memory that libuv still has: listener, refuser, connections */
    bool dead;        /* destroyed; freed with its last handle */
    bool refusing;    /* refuser is in use */
    bool stranger_waits;
    uv_tcp_t listener;
    uv_tcp_t refuser; /* takes a connection that is not wanted, to close it */
    conn_t *batches;  /* connections that have one */
    conn_t *buckets[N_BUCKETS];
    char address[KVF_ADDRESS_TEXT_BYTES];
    char chunk[CHUNK_BYTES]; /* what is being read; one for all, because bytes are handed on at once
                              */
};

static conn_t **bucket_of(kvf_control_t *control, uint64_t id) {
    return &control->buckets[id % N_BUCKETS];
}

/* The connection that the user knows by this id, or NULL. */
static conn_t *find(kvf_control_t *control, uint64_t id) {
    conn_t *conn = *bucket_of(control, id);
    while (conn != NULL && conn->id != id) {
        conn = conn->next;
    }
    return conn != NULL && !conn->silent ? conn : NULL;
}

/* One handle of control is gone for good. */
static void drop_handle(kvf_control_t *control) {
    control->handles--;
    if (control->dead && control->handles == 0) {
        kvf_free(control->alloc, control);
    }
}

static void on_listener_closed(uv_handle_t *handle) {
    drop_handle(handle->data);
}

/* ---- batches ---- */

static void free_batch(batch_t *batch) {
    const kvf_alloc_t *alloc = batch->conn->control->alloc;
    for (unsigned i = 0; i < batch->n; i++) {
        kvf_free(alloc, batch->messages[i].base);
    }
    kvf_free(alloc, batch);
}

/* @return What was not written yet, of which the caller disposes; NULL: nothing. */
static batch_t *take_batch(conn_t *conn) {
    batch_t *batch = conn->batch;
    if (batch != NULL) {
        conn_t **link = &conn->control->batches;
        while (*link != conn) {
            link = &(*link)->batch_next;
        }
        *link = conn->batch_next;
        conn->batch = NULL;
    }
    return batch;
}

/* ---- ends of connections ---- */

static void on_conn_handle_closed(uv_handle_t *handle) {
    conn_t *conn = handle->data;
    kvf_control_t *control = conn->control;
    if (--conn->handles > 0) {
        return;
    }
    conn_t **link = bucket_of(control, conn->id);
    while (*link != conn) {
        link = &(*link)->next;
    }
    *link = conn->next;
    control->inbound -= conn->inbound;
    if (!conn->silent) {
        control->events.closed(control->events.ctx, conn->id, conn->why);
    }
    kvf_free(control->alloc, conn);
    drop_handle(control);
}

/* Close now. The event comes from libuv's closing callback, so that this is allowed inside any
 * function. */
static void close_hard(conn_t *conn, const char *why) {
    if (conn->state == CONN_CLOSING) {
        return;
    }
    conn->state = CONN_CLOSING;
    (void)snprintf(conn->why, sizeof(conn->why), "%s", why);
    batch_t *batch = take_batch(conn);
    if (batch != NULL) {
        free_batch(batch);
    }
    uv_close((uv_handle_t *)&conn->tcp, on_conn_handle_closed);
    uv_close((uv_handle_t *)&conn->linger_timer, on_conn_handle_closed);
}

static void close_on_error(conn_t *conn, int err) {
    char why[WHY_BYTES];
    if (err == UV_EOF) {
        (void)snprintf(why, sizeof(why), "the other end closed the connection");
    } else if (err == UV_ECONNREFUSED) {
        (void)snprintf(why, sizeof(why), "connection refused; nothing listens there");
    } else {
        (void)uv_strerror_r(err, why, sizeof(why));
    }
    close_hard(conn, why);
}

static void on_linger_timeout(uv_timer_t *timer) {
    close_hard(timer->data, "");
}

static void on_shutdown(uv_shutdown_t *req, int status) {
    if (status < 0) {
        close_hard(req->data, "");
    }
}

/*
 * Everything sent leaves, then our direction ends; the other end's end (on_read) or the timer does
 * the rest. Closing with unread input would make the kernel send a reset, which can overtake our
 * last bytes.
 */
static void start_shutdown(conn_t *conn) {
    conn->shutdown.data = conn;
    if (uv_shutdown(&conn->shutdown, (uv_stream_t *)&conn->tcp, on_shutdown) < 0) {
        close_hard(conn, "");
    }
}

/* ---- bytes ---- */

static void on_written(uv_write_t *req, int status) {
    batch_t *batch = req->data;
    conn_t *conn = batch->conn;
    free_batch(batch);
    /* A broken connection is left to on_read: the other end's last words may still wait there. */
    if (status < 0 && status != UV_EPIPE && status != UV_ECONNRESET) {
        close_on_error(conn, status);
    }
}

static void flush(conn_t *conn) {
    batch_t *batch = take_batch(conn);
    if (batch == NULL) {
        return;
    }
    uv_stream_t *stream = (uv_stream_t *)&conn->tcp;
    int err = uv_write(&batch->req, stream, batch->messages, batch->n, on_written);
    if (err < 0) {
        free_batch(batch);
        close_on_error(conn, err);
        return;
    }
    size_t unsent = uv_stream_get_write_queue_size(stream);
    if (unsent > conn->control->backlog_bytes) {
        char why[WHY_BYTES];
        (void)snprintf(why, sizeof(why), "the other end does not read; %zu bytes are unsent",
                       unsent);
        close_hard(conn, why);
    }
}

static void on_alloc(uv_handle_t *handle, size_t wish, uv_buf_t *buf) {
    (void)wish;
    kvf_control_t *control = ((conn_t *)handle->data)->control;
    *buf = uv_buf_init(control->chunk, sizeof(control->chunk));
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
    conn_t *conn = stream->data;
    if (n < 0) {
        if (n == UV_EOF) {
            flush(conn); /* it may still read */
        }
        close_on_error(conn, (int)n);
    } else if (n > 0 && !conn->silent) {
        kvf_control_events_t *events = &conn->control->events;
        events->bytes(events->ctx, conn->id, (const uint8_t *)buf->base, (size_t)n);
    }
}

void kvf_control_flush(kvf_control_t *control) {
    while (control->batches != NULL) {
        flush(control->batches);
    }
}

kvf_status_t kvf_control_send(kvf_control_t *control, uint64_t id, uint8_t *data, size_t bytes) {
    conn_t *conn = find(control, id);
    if (conn == NULL || bytes == 0 || conn->state == CONN_CLOSING) {
        kvf_free(control->alloc, data); /* nobody to send to: `closed` is on its way; or nothing */
        return conn == NULL ? KVF_ERR_UNKNOWN : KVF_OK;
    }
    batch_t *batch = conn->batch;
    if (batch == NULL) {
        batch = kvf_alloc(control->alloc, sizeof(*batch));
        if (batch == NULL) {
            kvf_free(control->alloc, data);
            close_hard(conn, "no memory to send"); /* what follows must not come without this */
            return KVF_ERR_NO_MEMORY;
        }
        batch->req.data = batch;
        batch->conn = conn;
        batch->bytes = 0;
        batch->n = 0;
        conn->batch = batch;
        conn->batch_next = control->batches;
        control->batches = conn;
    }
    batch->messages[batch->n++] = uv_buf_init((char *)data, (unsigned)bytes);
    batch->bytes += bytes;
    if (batch->n == BATCH_MESSAGES || batch->bytes >= BATCH_BYTES) {
        flush(conn);
    }
    return KVF_OK;
}

/* ---- beginnings of connections ---- */

/* A connection without event; NULL without memory. */
static conn_t *make_conn(kvf_control_t *control, bool inbound) {
    conn_t *conn = kvf_calloc(control->alloc, 1, sizeof(*conn));
    if (conn == NULL) {
        return NULL;
    }
    /* Neither can fail: no socket is made yet. */
    (void)uv_tcp_init(control->loop, &conn->tcp);
    (void)uv_timer_init(control->loop, &conn->linger_timer);
    conn->tcp.data = conn;
    conn->linger_timer.data = conn;
    conn->control = control;
    conn->id = ++control->last_id;
    conn->inbound = inbound;
    conn->silent = true;
    conn->handles = 2;
    conn_t **bucket = bucket_of(control, conn->id);
    conn->next = *bucket;
    *bucket = conn;
    control->inbound += inbound;
    control->handles++;
    /* Messages are small and somebody waits for each: no waiting for more bytes (Mooncake #3931).
     */
    (void)uv_tcp_nodelay(&conn->tcp, 1);
    return conn;
}

static int peer_of(conn_t *conn, struct sockaddr_storage *peer) {
    int len = sizeof(*peer);
    return uv_tcp_getpeername(&conn->tcp, (struct sockaddr *)peer, &len);
}

/*
 * Whether a socket is connected to itself: the kernel does that when it picks the port of a dead
 * listener as the dialling end's own. It then ends by a reset: any other end would keep the port
 * from the listener for a minute more.
 */
static bool is_own_echo(conn_t *conn, const struct sockaddr_storage *peer) {
    struct sockaddr_storage own = {0};
    int len = sizeof(own);
    uv_os_fd_t fd;
    if (uv_tcp_getsockname(&conn->tcp, (struct sockaddr *)&own, &len) < 0 ||
        memcmp(&own, peer, sizeof(own)) != 0) {
        return false;
    }
    if (uv_fileno((uv_handle_t *)&conn->tcp, &fd) == 0) {
        struct linger reset = {.l_onoff = 1, .l_linger = 0};
        (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    }
    return true;
}

/* The last step of a beginning; the user may do anything in the event. */
static void start_reading(conn_t *conn, const struct sockaddr_storage *peer) {
    int err = uv_read_start((uv_stream_t *)&conn->tcp, on_alloc, on_read);
    if (err < 0) {
        close_on_error(conn, err);
        return;
    }
    conn->state = CONN_OPEN;
    if (conn->silent) { /* closed while it dialled, with bytes to flush */
        start_shutdown(conn);
    } else {
        char address[KVF_ADDRESS_TEXT_BYTES];
        kvf_address_text(peer, address);
        conn->control->events.opened(conn->control->events.ctx, conn->id, conn->inbound, address);
    }
}

static void on_connect(uv_connect_t *req, int err) {
    conn_t *conn = req->data;
    struct sockaddr_storage peer = {0};
    if (err == 0) {
        err = peer_of(conn, &peer);
    }
    if (err == 0 && is_own_echo(conn, &peer)) {
        err = UV_ECONNREFUSED;
    }
    if (err < 0) {
        close_on_error(conn, err);
        return;
    }
    start_reading(conn, &peer);
}

static kvf_status_t parse_loopback(const char *text, struct sockaddr_storage *addr_p,
                                   kvf_detail_t *detail) {
    kvf_status_t status = kvf_address_parse(text, addr_p, detail);
    if (status == KVF_OK && !kvf_address_is_loopback(addr_p)) {
        status = kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                          "%s is not a loopback address, and this version has no TLS; use "
                          "127.0.0.1 or [::1]",
                          text);
    }
    return status;
}

kvf_status_t kvf_control_dial(kvf_control_t *control, const char *address, uint64_t *conn_p,
                              kvf_detail_t *detail) {
    struct sockaddr_storage addr;
    kvf_status_t status = parse_loopback(address, &addr, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (kvf_address_port(&addr) == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "cannot dial %s: port 0 is nobody's", address);
    }
    conn_t *conn = make_conn(control, false);
    if (conn == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a connection to %s", address);
    }
    conn->connect.data = conn;
    int err =
        uv_tcp_connect(&conn->connect, &conn->tcp, (const struct sockaddr *)&addr, on_connect);
    if (err < 0) {
        close_hard(conn, "");
        return kvf_fail(detail, KVF_ERR_IO, "cannot dial %s: %s", address, uv_strerror(err));
    }
    conn->silent = false;
    *conn_p = conn->id;
    return KVF_OK;
}

static void on_refuser_closed(uv_handle_t *handle);

/* Close a stranger's connection at once, one a turn: a flood of them waits in the kernel's queue.
 */
static void refuse_stranger(kvf_control_t *control) {
    if (control->refusing) {
        control->stranger_waits = true;
        return;
    }
    (void)uv_tcp_init(control->loop, &control->refuser); /* cannot fail: no socket is made yet */
    control->refuser.data = control;
    control->refusing = true;
    control->handles++;
    (void)uv_accept((uv_stream_t *)&control->listener, (uv_stream_t *)&control->refuser);
    uv_close((uv_handle_t *)&control->refuser, on_refuser_closed);
}

static void accept_stranger(kvf_control_t *control) {
    conn_t *conn = control->inbound < control->max_conns ? make_conn(control, true) : NULL;
    if (conn == NULL) {
        refuse_stranger(control);
        return;
    }
    struct sockaddr_storage peer = {0};
    if (uv_accept((uv_stream_t *)&control->listener, (uv_stream_t *)&conn->tcp) < 0 ||
        peer_of(conn, &peer) < 0) {
        close_hard(conn, ""); /* gone already */
        return;
    }
    conn->silent = false;
    start_reading(conn, &peer);
}

static void on_refuser_closed(uv_handle_t *handle) {
    kvf_control_t *control = handle->data;
    bool waits = control->stranger_waits;
    control->refusing = false;
    control->stranger_waits = false;
    if (waits && !control->dead) {
        accept_stranger(control);
    }
    drop_handle(control);
}

static void on_stranger(uv_stream_t *listener, int err) {
    if (err == 0) { /* else the kernel had none after all, or no descriptor; libuv closed it */
        accept_stranger(listener->data);
    }
}

/* ---- the channel ---- */

static int start_listening(kvf_control_t *control, struct sockaddr_storage *addr) {
    unsigned flags = addr->ss_family == AF_INET6 ? UV_TCP_IPV6ONLY : 0;
    int len = sizeof(*addr);
    int err = uv_tcp_bind(&control->listener, (const struct sockaddr *)addr, flags);
    if (err == 0) {
        err = uv_listen((uv_stream_t *)&control->listener, LISTEN_BACKLOG, on_stranger);
    }
    if (err == 0) {
        err = uv_tcp_getsockname(&control->listener, (struct sockaddr *)addr, &len);
    }
    return err;
}

kvf_status_t kvf_control_create(const kvf_control_config_t *config, struct uv_loop_s *loop,
                                const kvf_alloc_t *alloc, const kvf_control_events_t *events,
                                kvf_control_t **control_p, kvf_detail_t *detail) {
    struct sockaddr_storage addr;
    if (config->backlog_bytes == 0 || config->max_conns == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "backlog_bytes and max_conns must not be 0");
    }
    kvf_status_t status = parse_loopback(config->listen, &addr, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_control_t *control = kvf_calloc(alloc, 1, sizeof(*control));
    if (control == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the control channel");
    }
    control->alloc = alloc;
    control->loop = loop;
    control->events = *events;
    control->backlog_bytes = config->backlog_bytes;
    control->max_conns = config->max_conns;
    (void)uv_tcp_init(loop, &control->listener); /* cannot fail: no socket is made yet */
    control->listener.data = control;
    control->handles = 1;
    int err = start_listening(control, &addr);
    if (err < 0) {
        kvf_control_destroy(control);
        return kvf_address_listen_error(config->listen, "control.listen", -err, detail);
    }
    kvf_address_text(&addr, control->address);
    *control_p = control;
    return KVF_OK;
}

void kvf_control_destroy(kvf_control_t *control) {
    if (control == NULL) {
        return;
    }
    kvf_control_flush(control);
    control->dead = true;
    for (size_t i = 0; i < N_BUCKETS; i++) {
        for (conn_t *conn = control->buckets[i]; conn != NULL; conn = conn->next) {
            conn->silent = true;
            close_hard(conn, "");
        }
    }
    uv_close((uv_handle_t *)&control->listener, on_listener_closed);
}

const char *kvf_control_address(const kvf_control_t *control) {
    return control->address;
}

void kvf_control_close(kvf_control_t *control, uint64_t id) {
    conn_t *conn = find(control, id);
    if (conn == NULL) {
        return;
    }
    flush(conn); /* it may break here */
    conn->silent = true;
    bool unsent = uv_stream_get_write_queue_size((uv_stream_t *)&conn->tcp) > 0;
    if (conn->state == CONN_DIALLING && !unsent) {
        close_hard(conn, "");
    } else if (conn->state != CONN_CLOSING) {
        (void)uv_timer_start(&conn->linger_timer, on_linger_timeout, LINGER_MS, 0);
        if (conn->state == CONN_OPEN) {
            start_shutdown(conn);
        }
    }
}

#ifdef KVF_FAIL_POINTS
void kvf_control_cut(void *arg) {
    kvf_control_t *control = arg;
    uv_os_fd_t fd;
    for (size_t i = 0; i < N_BUCKETS; i++) {
        for (conn_t *conn = control->buckets[i]; conn != NULL; conn = conn->next) {
            if (uv_fileno((uv_handle_t *)&conn->tcp, &fd) == 0) {
                (void)shutdown(fd, SHUT_RDWR);
            }
        }
    }
}
#endif
