/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CONTROL_ADDRESS_H
#define KVF_CONTROL_ADDRESS_H

/**
 * @file
 * Socket addresses as text: "127.0.0.1:9200", "[::1]:9200". Numeric only, so that nothing waits for
 * a name server.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <sys/socket.h>

/** Bytes of the longest text, with its terminating zero. */
#define KVF_ADDRESS_TEXT_BYTES 64

/**
 * Read an address.
 *
 * @param text        Zero-terminated; any content.
 * @param[out] addr_p An AF_INET or AF_INET6 address.
 * @return KVF_OK, or KVF_ERR_INVALID (the text says how an address is written).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_address_parse(const char *text, struct sockaddr_storage *addr_p,
                                         kvf_detail_t *detail);

/**
 * Write an address; "?" for one that is neither IPv4 nor IPv6.
 *
 * @param[out] text  What kvf_address_parse() reads back as the same address.
 * @thread any
 */
void kvf_address_text(const struct sockaddr_storage *addr, char text[KVF_ADDRESS_TEXT_BYTES]);

/** Write the host of an address, without port and brackets; "?" as above. @thread any */
void kvf_address_host(const struct sockaddr_storage *addr, char host[KVF_ADDRESS_TEXT_BYTES]);

/** @return Whether the address is in 127.0.0.0/8 or is ::1. @thread any */
bool kvf_address_is_loopback(const struct sockaddr_storage *addr);

/** @return The port of an IPv4 or IPv6 address. @thread any */
unsigned kvf_address_port(const struct sockaddr_storage *addr);

/**
 * Say why a socket could not listen, and what to do.
 *
 * @param text  The address that was asked for.
 * @param key   The configuration key it came from, as in "control.listen".
 * @param err   A positive errno value.
 * @return KVF_ERR_IO, always.
 * @thread any
 */
kvf_status_t kvf_address_listen_error(const char *text, const char *key, int err,
                                      kvf_detail_t *detail);

#endif
