/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_H
#define KVF_MOVER_UCX_H

/**
 * @file
 * UCX: the context that memory and movers share, and the mover that carries chunks as eager active
 * messages. Put and get are not used on software transports (docs/protocol.md says why), and the
 * context of messages does not even have them: nobody who connects to it can write into this
 * process by himself. Reads by network cards (ucx_rdma.h) have a context of their own. UCX types
 * stay in mover/ucx* and mem/shm*.
 *
 * Death of a peer, by transport: with tcp (or RDMA) among tls the kernel or the card tells, and
 * broken is called within milliseconds. With shared memory alone it is found at a keepalive, once a
 * second, and not at all while the dead one's queue is full: then only a heartbeat elsewhere and
 * disconnect() end it. A stopped peer is never noticed here.
 */

#include "transceiver/mover/mover.h"

typedef struct kvf_ucx kvf_ucx_t;

/** What a context is for. */
typedef enum kvf_ucx_use {
    KVF_UCX_MESSAGES,    /**< the mover below, and shared memory */
    KVF_UCX_READS,       /**< paths of ucx_rdma.h, from and to memory of the CPU's */
    KVF_UCX_DEVICE_READS /**< and from and to a device's */
} kvf_ucx_use_t;

typedef struct kvf_ucx_config {
    const char *tls;         /**< "auto" = posix,sysv,tcp,self; else as UCX_TLS. For reads only what
                                  of it is a network card's; "auto" = rc,dc */
    const char *devices;     /**< "auto" = follow listen_host; else as UCX_NET_DEVICES */
    const char *listen_host; /**< numeric address of the control channel; loopback there means
                                  loopback here, an address that no device has means all */
    kvf_ucx_use_t use;
    bool over_software; /**< tests: reads may go over transports that only emulate them */
} kvf_ucx_config_t;

/**
 * Load UCX and make a context. Settings that the user's environment (UCX_*) names are not
 * overridden. What UCX says goes to log while it is called here, else to stderr, never to stdout.
 *
 * @param log  Copied; may be NULL.
 * @return KVF_OK; KVF_ERR_INVALID (no such transport or device, with the ones there are; a wrong
 *         name among right ones is only logged); KVF_ERR_UNSUPPORTED (UCX older than 1.13);
 *         KVF_ERR_NO_MEMORY; KVF_ERR_IO.
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
 * A peer has at most 64 posted windows (then post gives KVF_ERR_AGAIN), of which 32 chunks of at
 * most 256 KiB are in UCX at once; peers take turns. connect gives KVF_ERR_INCOMPATIBLE when the
 * peer's UCX is another minor version, KVF_ERR_INVALID for a damaged address, KVF_ERR_PEER_LOST
 * when tls has no way to it.
 *
 * @param sink        Copied.
 * @param[out] mover_p  Destroy it by its ops before the context.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_UNSUPPORTED; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_mover_ucx_create(kvf_ucx_t *ucx, const kvf_mover_sink_t *sink,
                                            kvf_mover_t **mover_p, kvf_detail_t *detail);

/** @return Active messages that were no chunk (bad header, wrong length, rendezvous) and were
 * dropped. */
uint64_t kvf_mover_ucx_refused(const kvf_mover_t *mover);

#endif
