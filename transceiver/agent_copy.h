/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_AGENT_COPY_H
#define KVF_AGENT_COPY_H

/**
 * @file
 * The copier as its parts see it: agent_copy.c (the crew, pages that the CPU reaches, peers'
 * pools), agent_device.c (pages on a device), agent_nccl.c and agent_rdma.c (paths to fetch by) and
 * agent_fence.c (when pages are written). Only these include it.
 */

#include "transceiver/agent_impl.h"

typedef struct kvf_device_copier kvf_device_copier_t;
typedef struct kvf_wait kvf_wait_t;
typedef struct kvf_paths kvf_paths_t;
typedef struct kvf_routing kvf_routing_t;

struct kvf_copier {
    kvf_agent_t *agent;
    kvf_mover_t *const *movers; /**< the driver's */
    kvf_crew_t *crew;
    kvf_mapped_t *mapped;        /* NULL: nobody maps our pools, and we nobody's */
    bool mapped_ready;           /* its descriptor was readable */
    kvf_device_copier_t *device; /* NULL: the CPU reaches the pages */
    kvf_paths_t *paths;          /* NULL: the mover is not nccl */
    kvf_routing_t *routing;      /* NULL: the mover is not rdma */
    kvf_job_t *short_first, *short_last;
    uint64_t n_posted;              /* jobs that the crew has */
    kvf_wait_t *waits, *waits_last; /* for fences */
    uint64_t look_us;               /* when to look for those that failed */
};

/* A job of that many bytes is always one for the crew: it waits for a device, or can wait. */
#define COPIER_WAITS UINT64_MAX

/** Have a job done. @param bytes  Of work: short jobs are done by the agent's thread. */
void kvf_copier_have_done(kvf_copier_t *copier, kvf_job_t *job, void (*run)(kvf_job_t *job),
                          void (*done)(kvf_job_t *job), uint64_t bytes);

/** @return The memory of a page of ours from an offset on: an address of the device's, if it is
 * there. @thread any */
uint8_t *kvf_copier_page(const kvf_copier_t *copier, uint32_t group_idx, int32_t slot,
                         uint64_t off);

/** Post a window on its mover. @return As kvf_mover_ops_t.post. */
KVF_CHECK kvf_status_t kvf_copier_carry(const kvf_copier_t *copier, kvf_window_t *window);

/* ---- agent_device.c ---- */

/** @param n  Threads of the crew. @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_device_create(kvf_copier_t *copier, uint32_t n, kvf_detail_t *detail);
/** The crew has nothing any more; peers' pools are closed and given back. */
void kvf_device_destroy(kvf_copier_t *copier);
/** The handles of our pools, for peers. @return As kvf_cuda_export(). */
KVF_CHECK kvf_status_t kvf_device_export(const kvf_copier_t *copier, kvf_mapped_pool_t *pools,
                                         kvf_detail_t *detail);
/** See kvf_copier_post(), kvf_copier_moved(), kvf_copier_verify(), kvf_copier_digest(). */
KVF_CHECK kvf_status_t kvf_device_post(kvf_copier_t *copier, kvf_window_t *window);
void kvf_device_moved(kvf_copier_t *copier, const kvf_window_t *window);
void kvf_device_verify(kvf_copier_t *copier, kvf_verify_t *verify);
void kvf_device_digest(kvf_copier_t *copier, kvf_window_t *window);
/** A peer's handles have come: open them; kvf_core_mapped() follows. */
void kvf_device_mapped(kvf_copier_t *copier, uint64_t peer);
/** No job for this peer is begun any more; its pools are closed, then given back, when the last one
 * is done. */
void kvf_device_unmap(kvf_copier_t *copier, uint64_t peer);
/** Post what the mover had no room for. @return How many. */
unsigned kvf_device_progress(kvf_copier_t *copier);

/* ---- agent_nccl.c ---- */

/** Offer paths to peers. @return KVF_OK; KVF_ERR_UNSUPPORTED, KVF_ERR_NO_MEMORY, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_paths_create(kvf_copier_t *copier, void (*wake)(void *ctx), void *ctx,
                                        kvf_detail_t *detail);
/** Nothing of the core's is with them. */
void kvf_paths_destroy(kvf_copier_t *copier);
/** Take a job whose bytes are a peer's. @return false: there is no path to it. */
bool kvf_paths_verify(kvf_paths_t *paths, kvf_verify_t *verify);
/** The core's actions map and unmap. */
KVF_CHECK kvf_status_t kvf_paths_map(kvf_paths_t *paths, uint64_t peer, const void *address,
                                     size_t bytes, kvf_detail_t *detail);
void kvf_paths_unmap(kvf_paths_t *paths, uint64_t peer);
/** And join, leave, serve and evict. */
KVF_CHECK kvf_status_t kvf_paths_join(kvf_paths_t *paths, uint64_t peer, uint64_t number,
                                      const void *invitation, size_t bytes, kvf_detail_t *detail);
void kvf_paths_leave(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own, const char *why);
void kvf_paths_serve(kvf_paths_t *paths, kvf_serve_t *serve);
void kvf_paths_evict(kvf_paths_t *paths, uint64_t peer);
/** Tell the core what has happened, and begin what can be. @return How many things. */
unsigned kvf_paths_progress(kvf_paths_t *paths);
/** @return Whether it has work that no wake tells of. */
bool kvf_paths_is_busy(const kvf_paths_t *paths);

/* ---- agent_rdma.c ---- */

/** Offer paths to peers. @return KVF_OK; KVF_ERR_UNSUPPORTED and KVF_ERR_INVALID (no network card
 * that reads; a UCX that does not know devices), KVF_ERR_NO_MEMORY, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_routing_create(kvf_copier_t *copier, kvf_detail_t *detail);
/** Nothing of the core's is with it. */
void kvf_routing_destroy(kvf_copier_t *copier);
/** Take a job whose bytes are a peer's. @return false: there is no path to it. */
bool kvf_routing_verify(kvf_routing_t *routing, kvf_verify_t *verify);
/** The core's actions map (least: how long the peer's pools are), unmap, join, joined, leave and
 * evict. */
KVF_CHECK kvf_status_t kvf_routing_map(kvf_routing_t *routing, uint64_t peer, const void *address,
                                       size_t bytes, const uint64_t *least, kvf_detail_t *detail);
void kvf_routing_unmap(kvf_routing_t *routing, uint64_t peer);
KVF_CHECK kvf_status_t kvf_routing_join(kvf_routing_t *routing, uint64_t peer, uint64_t number,
                                        const void *invitation, size_t bytes, kvf_detail_t *detail);
void kvf_routing_joined(kvf_routing_t *routing, uint64_t peer, uint64_t number, const void *answer,
                        size_t bytes);
void kvf_routing_leave(kvf_routing_t *routing, uint64_t peer, uint64_t number, bool own,
                       const char *why);
void kvf_routing_evict(kvf_routing_t *routing, uint64_t peer);
/** Tell the core what has happened, and begin what can be. @return How many things. */
unsigned kvf_routing_progress(kvf_routing_t *routing);
/** As kvf_rdma_fd(), kvf_rdma_arm(). */
int kvf_routing_fd(const kvf_routing_t *routing);
bool kvf_routing_arm(const kvf_routing_t *routing);

/* ---- agent_fence.c ---- */

/** Tell the core of fences that were reached. @return How many. */
unsigned kvf_fences_progress(kvf_copier_t *copier);

#endif
