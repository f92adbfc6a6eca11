/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/control/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

/* One to five digits that make a port, and nothing else. */
static bool parse_port(const char *text, in_port_t *port_p) {
    unsigned port = 0;
    size_t n = 0;
    for (; n < 5 && text[n] >= '0' && text[n] <= '9'; n++) {
        port = port * 10 + (unsigned)(text[n] - '0');
    }
    if (n == 0 || text[n] != '\0' || port > 65535) {
        return false;
    }
    *port_p = htons((uint16_t)port);
    return true;
}

kvf_status_t kvf_address_parse(const char *text, struct sockaddr_storage *addr_p,
                               kvf_detail_t *detail) {
    struct sockaddr_storage addr = {0};
    char host[INET6_ADDRSTRLEN];
    bool v6 = text[0] == '[';
    const char *start = text + v6;
    const char *end = v6 ? strchr(start, ']') : strchr(start, ':');
    in_port_t port;
    bool ok = end != NULL && (size_t)(end - start) < sizeof(host) && (!v6 || end[1] == ':') &&
              parse_port(end + v6 + 1, &port);
    if (ok) {
        memcpy(host, start, (size_t)(end - start));
        host[end - start] = '\0';
        if (v6) {
            struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&addr;
            in6->sin6_family = AF_INET6;
            in6->sin6_port = port;
            ok = inet_pton(AF_INET6, host, &in6->sin6_addr) == 1;
        } else {
            struct sockaddr_in *in = (struct sockaddr_in *)&addr;
            in->sin_family = AF_INET;
            in->sin_port = port;
            ok = inet_pton(AF_INET, host, &in->sin_addr) == 1;
        }
    }
    if (!ok) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "\"%.64s\" is not an address; write it in numbers, as 127.0.0.1:9200 or "
                        "[::1]:9200",
                        text);
    }
    *addr_p = addr;
    return KVF_OK;
}

void kvf_address_host(const struct sockaddr_storage *addr, char host[KVF_ADDRESS_TEXT_BYTES]) {
    const struct sockaddr_in *in = (const struct sockaddr_in *)addr;
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)addr;
    const void *bytes = addr->ss_family == AF_INET    ? (const void *)&in->sin_addr
                        : addr->ss_family == AF_INET6 ? (const void *)&in6->sin6_addr
                                                      : NULL;
    if (bytes == NULL || inet_ntop(addr->ss_family, bytes, host, KVF_ADDRESS_TEXT_BYTES) == NULL) {
        (void)snprintf(host, KVF_ADDRESS_TEXT_BYTES, "?");
    }
}

void kvf_address_text(const struct sockaddr_storage *addr, char text[KVF_ADDRESS_TEXT_BYTES]) {
    char host[KVF_ADDRESS_TEXT_BYTES];
    kvf_address_host(addr, host);
    if (host[0] == '?') {
        (void)snprintf(text, KVF_ADDRESS_TEXT_BYTES, "?");
    } else {
        (void)snprintf(text, KVF_ADDRESS_TEXT_BYTES,
                       addr->ss_family == AF_INET ? "%.45s:%u" : "[%.45s]:%u", host,
                       kvf_address_port(addr));
    }
}

bool kvf_address_is_loopback(const struct sockaddr_storage *addr) {
    if (addr->ss_family == AF_INET6) {
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)addr)->sin6_addr);
    }
    return addr->ss_family == AF_INET &&
           ntohl(((const struct sockaddr_in *)addr)->sin_addr.s_addr) >> 24 == 127;
}

unsigned kvf_address_port(const struct sockaddr_storage *addr) {
    return ntohs(addr->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)addr)->sin6_port
                                             : ((const struct sockaddr_in *)addr)->sin_port);
}

kvf_status_t kvf_address_listen_error(const char *text, const char *key, int err,
                                      kvf_detail_t *detail) {
    const char *advice = "set another address";
    if (err == EADDRINUSE) {
        advice = "end the process that has this port (ss -ltnp shows it) or choose another; "
                 "port 0 picks a free one";
    } else if (err == EADDRNOTAVAIL) {
        advice = "no interface of this machine has this address; ip addr shows those it has";
    } else if (err == EACCES) {
        advice = "choose a port from 1024 on";
    }
    return kvf_fail(detail, KVF_ERR_IO, "cannot listen on %s (%s): %s; %s", text, key,
                    strerror(err), advice);
}
