/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/listen.h"

#include "transceiver/control/address.h"

#include <errno.h>
#include <netinet/in.h>
#include <unistd.h>

#define LISTEN_BACKLOG 512

/* A listening socket, or -1 with errno. */
static int listen_on(struct sockaddr_storage *addr) {
    socklen_t bytes =
        addr->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    int on = 1;
    int fd = socket(addr->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        (addr->ss_family == AF_INET6 &&
         setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)) != 0) ||
        bind(fd, (const struct sockaddr *)addr, bytes) != 0 || listen(fd, LISTEN_BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)addr, &bytes) != 0) {
        int err = errno;
        (void)close(fd);
        errno = err;
        return -1;
    }
    return fd;
}

kvf_status_t kvf_listen_open(const char *text, const char *key, struct sockaddr_storage *addr_p,
                             int *fd_p, kvf_detail_t *detail) {
    struct sockaddr_storage addr;
    kvf_status_t status = kvf_address_parse(text, &addr, detail);
    if (status != KVF_OK) {
        return status;
    }
    int fd = listen_on(&addr);
    if (fd < 0) {
        return kvf_address_listen_error(text, key, errno, detail);
    }
    *addr_p = addr;
    *fd_p = fd;
    return KVF_OK;
}

kvf_status_t kvf_listen_check(const char *http, const char *control, kvf_detail_t *detail) {
    struct sockaddr_storage addr;
    int http_fd, control_fd;
    kvf_status_t status = kvf_listen_open(http, "http.listen", &addr, &http_fd, detail);
    if (status != KVF_OK) {
        return status;
    }
    /* The first one stays open, so that the same address twice is found. */
    status = kvf_listen_open(control, "control.listen", &addr, &control_fd, detail);
    if (status == KVF_OK) {
        (void)close(control_fd);
    }
    (void)close(http_fd);
    return status;
}
