/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_H
#define KVF_MOVER_UCX_H

/**
 * @file
 * UCX: the context that memory and movers share, and the mover that carries chunks as eager active
 * messages. Put and get are not used on software transports (docs/protocol.md says why). UCX types
 * stay in mover/ucx* and mem/shm*.
 */

#include "transceiver/mover/mover.h"

typedef struct kvf_ucx kvf_ucx_t;

typedef struct kvf_ucx_config {
    const char *tls;     /**< "auto" = posix,tcp,self; else as UCX_TLS */
    const char *devices; /**< "auto" = follow listen_host; else as UCX_NET_DEVICES */
    const char
        *listen_host; /**< numeric address of the control channel; loopback means loopback here */
} kvf_ucx_config_t;

/**
 * Load UCX and make a context. Settings that the user's environment (UCX_*) names are not
 * overridden.
 *
 * @return KVF_OK; KVF_ERR_INVALID (no such transport or device, with the ones there are);
 * KVF_ERR_UNSUPPORTED (UCX older than 1.13); KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_ucx_create(const kvf_ucx_config_t *config, const kvf_alloc_t *alloc,
                                      const kvf_log_t *log, kvf_ucx_t **ucx_p,
                                      kvf_detail_t *detail);

/** Movers and memory of it are gone. NULL is allowed. */
void kvf_ucx_destroy(kvf_ucx_t *ucx);

/** @return "1.22.0": the library in use. Static storage; any thread. */
const char *kvf_ucx_version(void);

/**
 * Make the mover: one worker, on the calling thread, which is from now on the agent thread.
 *
 * @param sink        Copied.
 * @param[out] mover_p  Destroy it by its ops before the context.
 */
KVF_CHECK kvf_status_t kvf_mover_ucx_create(kvf_ucx_t *ucx, const kvf_mover_sink_t *sink,
                                            kvf_mover_t **mover_p, kvf_detail_t *detail);

/** @return Active messages that were no chunk (bad header, wrong length, rendezvous) and were dropped. */
uint64_t kvf_mover_ucx_refused(const kvf_mover_t *mover);

#endif
