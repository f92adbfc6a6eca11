/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_NODE_LISTEN_H
#define KVF_NODE_LISTEN_H

/**
 * @file
 * Listening sockets of a node.
 */

#include "kvmgr/base/status.h"

#include <sys/socket.h>

/**
 * Listen on an address.
 *
 * @param text         "host:port", "[v6]:port", numeric; port 0 picks one.
 * @param key          The configuration key it came from, for the error's text.
 * @param[out] addr_p  The real address.
 * @param[out] fd_p    A socket that does not block; close() it.
 * @return KVF_OK; KVF_ERR_INVALID (no address); KVF_ERR_IO (in use ...: the text says what to do).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_listen_open(const char *text, const char *key,
                                       struct sockaddr_storage *addr_p, int *fd_p,
                                       kvf_detail_t *detail);

/**
 * See whether a node can have both its addresses, and let go of them again: what is in use is told
 * before memory is prepared, which takes long. No promise: somebody may take them meanwhile.
 *
 * @param http, control  Values of http.listen and control.listen.
 * @return As kvf_listen_open(); KVF_ERR_IO also when both are the same.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_listen_check(const char *http, const char *control,
                                        kvf_detail_t *detail);

#endif
