/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_PATH_H
#define KVF_MOVER_UCX_PATH_H

/**
 * @file
 * The way to one peer: a UCX worker with one endpoint.
 *
 * Each path has a worker of its own. A worker can be destroyed at once, whatever its endpoint still
 * holds, and that is the proof that UCX reads no page of a window any more. An endpoint alone
 * cannot: when it is closed with unsent data, UCX 1.22 keeps its socket, and follows a freed
 * pointer if the peer closes its end in the same moment in which the socket takes data again
 * (uct_tcp_iface_handle_events(): the read handler frees, the write handler uses).
 *
 * All functions: agent thread only, and never from inside a call of UCX.
 */

#include "transceiver/mover/routes.h"
#include "transceiver/mover/ucx_context.h"

/** The active message that carries a chunk. */
#define KVF_UCX_AM_ID 0U
/** Fits one tcp segment with its header, so the receiver need not put it together. A multiple of a
 * digest leaf. */
#define KVF_UCX_CHUNK_BYTES (UINT64_C(256) << 10)

/**
 * @param ucx      Outlives the path.
 * @param address  A worker's, as UCX wrote it, with its alignment.
 * @param[out] route_p  To be listed. kvf_ucx_path_close() it, then kvf_ucx_path_destroy() it.
 * @return KVF_OK; KVF_ERR_INCOMPATIBLE (no transport in common); KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_ucx_path_create(kvf_ucx_t *ucx, const ucp_address_t *address,
                                           kvf_route_t **route_p, kvf_detail_t *detail);

/** @return The worker, NULL once closed. */
ucp_worker_h kvf_ucx_path_worker(const kvf_route_t *route);

/** As kvf_route_ops_t. send hands a chunk to UCX, close ends the worker. */
bool kvf_ucx_path_can_send(const kvf_route_t *route);
uint64_t kvf_ucx_path_send(kvf_route_t *route);
void kvf_ucx_path_close(kvf_route_t *route);
void kvf_ucx_path_destroy(kvf_route_t *route);

#endif
