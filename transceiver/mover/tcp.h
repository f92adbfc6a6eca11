/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_TCP_H
#define KVF_MOVER_TCP_H

/**
 * @file
 * The mover that sends chunks over TCP connections of its own, one for each direction between two
 * agents. The receiver reads the headers, asks the sink for the places, and lets the kernel write
 * the bytes there: nothing is copied besides, and nothing is written without a grant.
 *
 * A connection belongs to whoever dialled it and sends; nothing comes back over it but an answer.
 * What a stranger sends is not read further than its first 32 bytes: they must hold the token that
 * this mover's address names; and nobody is sent a chunk who does not answer with another token of
 * the address. Only peers are told both.
 *
 * Death of a peer: the kernel tells, and broken is called within milliseconds. A stopped peer is
 * never noticed here.
 */

#include "transceiver/mover/mover.h"

#include <sys/socket.h>

/** Longest chunk. A multiple of a digest leaf. */
#define KVF_TCP_CHUNK_BYTES (UINT64_C(256) << 10)

/**
 * Make the mover; the calling thread is from now on the agent thread. It listens on a free port.
 *
 * A peer has at most 64 posted windows (then post gives KVF_ERR_AGAIN); peers take turns, and so do
 * their transfers. connect gives KVF_ERR_INVALID for what is no address, or is one of another host.
 *
 * @param host         The address to listen on, of which the port is not looked at.
 * @param sink         Copied.
 * @param log          Borrowed; outlives the mover.
 * @param[out] mover_p  Destroy it by its ops.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_IO (it cannot listen, or has no descriptors).
 */
KVF_CHECK kvf_status_t kvf_mover_tcp_create(const struct sockaddr_storage *host,
                                            const kvf_alloc_t *alloc, const kvf_log_t *log,
                                            const kvf_mover_sink_t *sink, kvf_mover_t **mover_p,
                                            kvf_detail_t *detail);

/** @return Connections that were cut off because of what came over them. */
uint64_t kvf_mover_tcp_refused(const kvf_mover_t *mover);

#endif
