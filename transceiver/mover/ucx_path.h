/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_PATH_H
#define KVF_MOVER_UCX_PATH_H

/**
 * @file
 * The way to one peer: a UCX worker with one endpoint, and the windows that are posted on it.
 *
 * Each path has a worker of its own. A worker can be destroyed at once, whatever its endpoint still
 * holds, and that is the proof that UCX reads no page of a window any more. An endpoint alone
 * cannot: when it is closed with unsent data, UCX 1.22 keeps its socket, and follows a freed
 * pointer if the peer closes its end in the same moment in which the socket takes data again
 * (uct_tcp_iface_handle_events(): the read handler frees, the write handler uses).
 *
 * All functions: agent thread only, and never from inside a call of UCX.
 */

#include "transceiver/mover/mover.h"
#include "transceiver/mover/ucx_context.h"

/** The active message that carries a chunk. */
#define KVF_UCX_AM_ID 0U
/** Fits one tcp segment with its header, so the receiver need not put it together. A multiple of a
 * digest leaf. */
#define KVF_UCX_CHUNK_BYTES (UINT64_C(256) << 10)

typedef struct kvf_ucx_path kvf_ucx_path_t;

/**
 * @param ucx      Outlives the path.
 * @param address  A worker's, as UCX wrote it, with its alignment.
 * @param[out] path_p  kvf_ucx_path_destroy() it.
 * @return KVF_OK; KVF_ERR_INCOMPATIBLE (no transport in common); KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_ucx_path_create(kvf_ucx_t *ucx, const ucp_address_t *address,
                                           kvf_ucx_path_t **path_p, kvf_detail_t *detail);

/** End the worker. Windows that are not done fail with KVF_ERR_PEER_LOST and can be taken.
 *  Harmless when it was closed before. */
void kvf_ucx_path_close(kvf_ucx_path_t *path);

/** A closed path whose windows were all taken. NULL is allowed. */
void kvf_ucx_path_destroy(kvf_ucx_path_t *path);

/** @return Why it takes nothing more, or NULL: UCX reported an error. Close it. */
const char *kvf_ucx_path_broken(const kvf_ucx_path_t *path);

/** @return The worker, NULL once closed. */
ucp_worker_h kvf_ucx_path_worker(const kvf_ucx_path_t *path);

/** @return KVF_OK (accepted: it can be taken, later, once); KVF_ERR_AGAIN; KVF_ERR_PEER_LOST. */
KVF_CHECK kvf_status_t kvf_ucx_path_post(kvf_ucx_path_t *path, kvf_window_t *window);

/** @return Whether kvf_ucx_path_send() has something to do. */
bool kvf_ucx_path_can_send(const kvf_ucx_path_t *path);

/** Hand the next chunk to UCX; only when it can. @return Its bytes. */
uint64_t kvf_ucx_path_send(kvf_ucx_path_t *path);

/** @return Whether a window is done and waits to be taken. */
bool kvf_ucx_path_has_done(const kvf_ucx_path_t *path);

/** @return A window that is done, or NULL. @param[out] status_p  How it ended. */
kvf_window_t *kvf_ucx_path_take(kvf_ucx_path_t *path, kvf_status_t *status_p);

/** @return Whether all its windows were taken. */
bool kvf_ucx_path_idle(const kvf_ucx_path_t *path);

#endif
