/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/http.h"

#include "tools/node/http_error.h"
#include "tools/node/listen.h"
#include "transceiver/control/address.h"

#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <utlist.h>

#define ID_BYTES 128
#define RETRY_AFTER_S 1
/* A body over the limit is read and dropped up to this many limits, so that the client gets to see
 * the answer. */
#define DROPPED_LIMITS 16
#define HANG_UP_S 2

/* A connection, until libmicrohttpd closes it. */
typedef struct open_conn {
    int fd;
    struct open_conn *prev, *next;
} open_conn_t;

struct kvf_http {
    const kvf_alloc_t *alloc;
    const kvf_http_route_t *routes;
    size_t n_routes;
    uint64_t body_bytes;
    uint32_t max_conns;
    uint32_t conns; /* libmicrohttpd's thread only */
    int listen_fd;
    struct MHD_Daemon *daemon;
    char address[KVF_ADDRESS_TEXT_BYTES];
    pthread_mutex_t lock; /* for what is below, and for each request's answer */
    pthread_cond_t quiet;
    uint64_t live; /* requests that a handler was given and that are not sent yet */
    bool stopping;
    open_conn_t *open;
};

struct kvf_http_request {
    kvf_http_t *http;
    struct MHD_Connection *connection;
    char *body;
    size_t room;
    uint64_t bytes; /* of the body, dropped ones included */
    bool handed;    /* a handler was given it */
    bool routed;    /* all of it is here, and it went to a handler or was refused */
    char id[ID_BYTES + 1];
    /* under http->lock */
    bool answered, suspended;
    unsigned status;
    struct MHD_Response *response; /* NULL after answered: no memory */
};

/* ---- answers ---- */

/* Leave the answer for libmicrohttpd's thread. A NULL response closes the connection. */
static void finish(kvf_http_request_t *request, unsigned status, struct MHD_Response *response) {
    kvf_http_t *http = request->http;
    pthread_mutex_lock(&http->lock);
    request->status = status;
    request->response = response;
    request->answered = true;
    if (request->suspended) {
        MHD_resume_connection(request->connection);
    }
    pthread_mutex_unlock(&http->lock);
}

/* A response with its type and one more header (name NULL: without); NULL without memory. */
static struct MHD_Response *make_response(const char *content_type, const char *body, size_t bytes,
                                          const char *name, const char *value) {
    /* The library copies the body, and does not change it before that. */
    struct MHD_Response *response =
        MHD_create_response_from_buffer(bytes, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY);
    if (response == NULL) {
        return NULL;
    }
    if (MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type) != MHD_YES ||
        (name != NULL && MHD_add_response_header(response, name, value) != MHD_YES)) {
        MHD_destroy_response(response);
        return NULL;
    }
    return response;
}

void kvf_http_answer(kvf_http_request_t *request, unsigned status, const char *content_type,
                     const char *body, size_t bytes, unsigned retry_after_s) {
    char seconds[16];
    (void)snprintf(seconds, sizeof(seconds), "%u", retry_after_s);
    const char *name = retry_after_s > 0 ? MHD_HTTP_HEADER_RETRY_AFTER : NULL;
    finish(request, status, make_response(content_type, body, bytes, name, seconds));
}

void kvf_http_answer_json(kvf_http_request_t *request, unsigned status, const json_t *root) {
    char *body = json_dumps(root, JSON_COMPACT);
    if (body == NULL) {
        kvf_http_answer_error(request, KVF_ERR_NO_MEMORY, NULL);
        return;
    }
    kvf_http_answer(request, status, "application/json", body, strlen(body), 0);
    free(body);
}

/* An error of this file or of a handler. */
static void answer_error(kvf_http_request_t *request, unsigned status, const char *error,
                         const char *message, bool recompute, const char *name, const char *value) {
    char *body = kvf_http_error_body(error, message, recompute);
    struct MHD_Response *response = NULL;
    if (body != NULL) {
        response = make_response("application/json", body, strlen(body), name, value);
    }
    free(body);
    finish(request, status, response);
}

void kvf_http_answer_error(kvf_http_request_t *request, kvf_status_t status, const char *message) {
    char seconds[16];
    (void)snprintf(seconds, sizeof(seconds), "%d", RETRY_AFTER_S);
    if (message == NULL || message[0] == '\0') {
        message = kvf_status_text(status);
    }
    unsigned http_status = kvf_http_status_of(status);
    answer_error(request, http_status, kvf_status_name(status), message, kvf_http_recompute(status),
                 http_status == MHD_HTTP_TOO_MANY_REQUESTS ? MHD_HTTP_HEADER_RETRY_AFTER : NULL,
                 seconds);
}

void kvf_http_answer_absent(kvf_http_request_t *request, const char *message) {
    answer_error(request, MHD_HTTP_NOT_FOUND, kvf_status_name(KVF_ERR_UNKNOWN), message, false,
                 NULL, NULL);
}

/* ---- requests ---- */

const char *kvf_http_id(const kvf_http_request_t *request) {
    return request->id;
}

const char *kvf_http_body(const kvf_http_request_t *request, size_t *bytes_p) {
    *bytes_p = (size_t)request->bytes;
    return request->body != NULL ? request->body : "";
}

/* Whether a path is a route's. id_p gets the rest of the path that stands for "{id}". */
static bool path_matches(const char *route, const char *path, const char **id_p) {
    const char *brace = strchr(route, '{');
    if (brace == NULL) {
        return strcmp(route, path) == 0;
    }
    size_t prefix = (size_t)(brace - route);
    if (strncmp(route, path, prefix) != 0 || path[prefix] == '\0' ||
        strchr(path + prefix, '/') != NULL) {
        return false;
    }
    *id_p = path + prefix;
    return true;
}

static bool method_matches(const char *route, const char *method) {
    return strcmp(route, method) == 0 ||
           (strcmp(method, MHD_HTTP_METHOD_HEAD) == 0 && strcmp(route, MHD_HTTP_METHOD_GET) == 0);
}

/* The value of a hexadecimal digit, or -1. */
static int digit_of(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decode %XX; false when it is no id. */
static bool decode_id(const char *text, char id[ID_BYTES + 1]) {
    size_t n = 0;
    while (*text != '\0') {
        int byte = (unsigned char)*text++;
        if (byte == '%') {
            int high = digit_of(text[0]);
            int low = high < 0 ? -1 : digit_of(text[1]);
            byte = low < 0 ? 0 : high * 16 + low;
            text += 2;
        }
        if (byte == 0 || n == ID_BYTES) {
            return false;
        }
        id[n++] = (char)byte;
    }
    id[n] = '\0';
    return true;
}

/* Count a request as a handler's; false when the server is stopping. */
static bool begin(kvf_http_request_t *request) {
    kvf_http_t *http = request->http;
    pthread_mutex_lock(&http->lock);
    request->handed = !http->stopping;
    http->live += request->handed;
    pthread_mutex_unlock(&http->lock);
    return request->handed;
}

/* All of a request is here: give it to its handler, or refuse it. */
static void route_request(kvf_http_request_t *request, const char *method, const char *path) {
    const kvf_http_t *http = request->http;
    const kvf_http_route_t *route = NULL;
    const char *id = NULL;
    char allow[64] = "", message[KVF_DETAIL_BYTES];
    for (size_t i = 0; i < http->n_routes && route == NULL; i++) {
        if (!path_matches(http->routes[i].path, path, &id)) {
            continue;
        }
        if (method_matches(http->routes[i].method, method)) {
            route = &http->routes[i];
        } else {
            size_t n = strlen(allow);
            (void)snprintf(allow + n, sizeof(allow) - n, "%s%s", n > 0 ? ", " : "",
                           http->routes[i].method);
        }
    }
    if (route == NULL && allow[0] == '\0') {
        (void)snprintf(message, sizeof(message), "there is no %.200s here; check the path", path);
        kvf_http_answer_absent(request, message);
    } else if (route == NULL) {
        (void)snprintf(message, sizeof(message), "%.200s takes %s", path, allow);
        answer_error(request, MHD_HTTP_METHOD_NOT_ALLOWED, "invalid", message, false,
                     MHD_HTTP_HEADER_ALLOW, allow);
    } else if (request->bytes > http->body_bytes) {
        (void)snprintf(message, sizeof(message), "the body is longer than %llu bytes",
                       (unsigned long long)http->body_bytes);
        kvf_http_answer_error(request, KVF_ERR_TOO_LARGE, message);
    } else if (id != NULL && !decode_id(id, request->id)) {
        kvf_http_answer_error(request, KVF_ERR_INVALID,
                              "the id must have 1 to 128 bytes, percent-encoded where needed");
    } else if (!begin(request)) {
        kvf_http_answer_error(request, KVF_ERR_AGAIN, "this node is stopping; ask another one");
    } else {
        route->handler(route->ctx, request);
    }
}

/* Keep a piece of the body; false ends the connection. */
static bool collect(kvf_http_request_t *request, const char *data, size_t bytes) {
    kvf_http_t *http = request->http;
    uint64_t have = request->bytes;
    request->bytes += bytes;
    if (request->bytes > http->body_bytes) {
        return request->bytes / DROPPED_LIMITS <= http->body_bytes;
    }
    if (request->bytes > request->room) {
        size_t room = 2 * (size_t)request->bytes;
        char *body = kvf_realloc(http->alloc, request->body, room, 1);
        if (body == NULL) {
            return false;
        }
        request->body = body;
        request->room = room;
    }
    memcpy(request->body + have, data, bytes);
    return true;
}

/* ---- libmicrohttpd's callbacks, on its thread ---- */

/* Called when the head of a request is here, for each piece of its body, at its end, and after each
 * resume. */
static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *data_bytes, void **request_p) {
    (void)version;
    kvf_http_t *http = cls;
    kvf_http_request_t *request = *request_p;
    if (request == NULL) {
        request = kvf_calloc(http->alloc, 1, sizeof(*request));
        *request_p = request;
        if (request == NULL) {
            return MHD_NO;
        }
        request->http = http;
        request->connection = connection;
        return MHD_YES;
    }
    if (*data_bytes > 0) {
        size_t bytes = *data_bytes;
        *data_bytes = 0;
        return collect(request, data, bytes) ? MHD_YES : MHD_NO;
    }
    if (!request->routed) {
        request->routed = true;
        route_request(request, method, url);
    }
    pthread_mutex_lock(&http->lock);
    bool answered = request->answered;
    if (!answered) {
        request->suspended = true;
        MHD_suspend_connection(connection);
    }
    pthread_mutex_unlock(&http->lock);
    if (!answered) {
        return MHD_YES;
    }
    return request->response == NULL
               ? MHD_NO
               : MHD_queue_response(connection, request->status, request->response);
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **request_p,
                         enum MHD_RequestTerminationCode code) {
    (void)connection;
    (void)code;
    kvf_http_t *http = cls;
    kvf_http_request_t *request = *request_p;
    if (request == NULL) {
        return;
    }
    *request_p = NULL;
    pthread_mutex_lock(&http->lock);
    http->live -= request->handed;
    pthread_cond_broadcast(&http->quiet);
    pthread_mutex_unlock(&http->lock);
    if (request->response != NULL) {
        MHD_destroy_response(request->response);
    }
    kvf_free(http->alloc, request->body);
    kvf_free(http->alloc, request);
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    kvf_http_t *http = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        open_conn_t *conn = kvf_calloc(http->alloc, 1, sizeof(*conn));
        http->conns++;
        *context = conn; /* without memory it is only not hung up on at the end */
        if (conn != NULL) {
            conn->fd = info->connect_fd;
            pthread_mutex_lock(&http->lock);
            DL_APPEND(http->open, conn);
            pthread_mutex_unlock(&http->lock);
        }
    } else {
        open_conn_t *conn = *context;
        http->conns--;
        if (conn != NULL) {
            pthread_mutex_lock(&http->lock);
            DL_DELETE(http->open, conn);
            pthread_cond_broadcast(&http->quiet);
            pthread_mutex_unlock(&http->lock);
            kvf_free(http->alloc, conn);
        }
    }
}

/* libmicrohttpd's own limit would leave strangers waiting in the kernel's queue; this one tells
 * them at once. */
static enum MHD_Result on_stranger(void *cls, const struct sockaddr *addr, socklen_t bytes) {
    (void)addr;
    (void)bytes;
    const kvf_http_t *http = cls;
    return http->conns < http->max_conns ? MHD_YES : MHD_NO;
}

/* Paths stay as they came: "%2F" is no "/". */
static size_t keep_escapes(void *cls, struct MHD_Connection *connection, char *text) {
    (void)cls;
    (void)connection;
    return strlen(text);
}

/* ---- the server ---- */

kvf_status_t kvf_http_create(const kvf_http_config_t *config, const kvf_alloc_t *alloc,
                             kvf_http_t **http_p, kvf_detail_t *detail) {
    struct sockaddr_storage addr;
    if (config->body_bytes == 0 || config->max_conns == 0 || config->idle_s == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "no limit of the HTTP server may be 0");
    }
    kvf_http_t *http = kvf_calloc(alloc, 1, sizeof(*http));
    if (http == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the HTTP server");
    }
    http->alloc = alloc;
    http->routes = config->routes;
    http->n_routes = config->n_routes;
    http->body_bytes = config->body_bytes;
    http->max_conns = config->max_conns;
    pthread_mutex_init(&http->lock, NULL);
    pthread_cond_init(&http->quiet, NULL);
    kvf_status_t status =
        kvf_listen_open(config->listen, "http.listen", &addr, &http->listen_fd, detail);
    if (status != KVF_OK) {
        goto err_free;
    }
    kvf_address_text(&addr, http->address);
    http->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, on_stranger, http, on_request,
        http, MHD_OPTION_LISTEN_SOCKET, http->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)config->max_conns + 1, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)config->idle_s,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, http, MHD_OPTION_NOTIFY_CONNECTION,
        on_connection, http, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL, MHD_OPTION_END);
    if (http->daemon == NULL) {
        status = kvf_fail(detail, KVF_ERR_IO,
                          "cannot start the HTTP server's thread; raise ulimit -n or -u");
        goto err_close;
    }
    *http_p = http;
    return KVF_OK;

err_close:
    (void)close(http->listen_fd);
err_free:
    pthread_cond_destroy(&http->quiet);
    pthread_mutex_destroy(&http->lock);
    kvf_free(alloc, http);
    return status;
}

const char *kvf_http_address(const kvf_http_t *http) {
    return http->address;
}

/* With the lock: end every connection, and give libmicrohttpd's thread a while to notice. A request
 * that it finds malformed after MHD_stop_daemon() has begun makes it (0.9.75) follow a NULL
 * pointer, so nothing may be left to read by then. */
static void hang_up(kvf_http_t *http) {
    open_conn_t *conn;
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += HANG_UP_S;
    DL_FOREACH(http->open, conn) {
        (void)shutdown(conn->fd, SHUT_RDWR);
    }
    while (http->open != NULL && pthread_cond_timedwait(&http->quiet, &http->lock, &until) == 0) {
    }
}

void kvf_http_destroy(kvf_http_t *http) {
    if (http == NULL) {
        return;
    }
    (void)MHD_quiesce_daemon(http->daemon);
    /* The thread may still be in accept() on it, so it closes later; but clients are refused from
     * now on. */
    (void)shutdown(http->listen_fd, SHUT_RDWR);
    pthread_mutex_lock(&http->lock);
    http->stopping = true;
    while (http->live > 0) {
        pthread_cond_wait(&http->quiet, &http->lock);
    }
    hang_up(http);
    pthread_mutex_unlock(&http->lock);
    MHD_stop_daemon(http->daemon);
    (void)close(http->listen_fd);
    pthread_cond_destroy(&http->quiet);
    pthread_mutex_destroy(&http->lock);
    kvf_free(http->alloc, http);
}
