/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_MAPPED_SOCKET_H
#define KVF_MOVER_MAPPED_SOCKET_H

/**
 * @file
 * The AF_UNIX sockets of the mapped mover: abstract, so that nothing is left in a file system; in
 * one network namespace.
 */

#include "transceiver/mover/mapped_impl.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

/** @return The length of the address of an agent's socket. */
static inline socklen_t mapped_socket_address(const uint8_t name[KVF_MAPPED_NAME_BYTES],
                                              struct sockaddr_un *address) {
    size_t used = 1 + strlen("kvferry-"); /* behind the zero byte */
    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, "kvferry-", used - 1);
    for (size_t i = 0; i < KVF_MAPPED_NAME_BYTES; i++) {
        (void)snprintf(address->sun_path + used, 3, "%02x", name[i]);
        used += 2;
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + used);
}

#endif
