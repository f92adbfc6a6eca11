/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_AGENT_COPY_H
#define KVF_AGENT_COPY_H

/**
 * @file
 * The copier as its parts see it: agent_copy.c (the crew, pages that the CPU reaches, peers'
 * pools), agent_device.c (pages on a device), agent_path.c (paths to fetch by; of which movers,
 * agent_nccl.c and agent_rdma.c) and agent_fence.c (when pages are written). Only these include it.
 */

#include "transceiver/agent_impl.h"

typedef struct kvf_device_copier kvf_device_copier_t;
typedef struct kvf_wait kvf_wait_t;
typedef struct kvf_paths kvf_paths_t;

struct kvf_copier {
    kvf_agent_t *agent;
    kvf_mover_t *const *movers; /**< the driver's */
    kvf_crew_t *crew;
    kvf_mapped_t *mapped;        /* NULL: nobody maps our pools, and we nobody's */
    bool mapped_ready;           /* its descriptor was readable */
    kvf_device_copier_t *device; /* NULL: the CPU reaches the pages */
    kvf_paths_t *paths;          /* NULL: the mover is neither nccl nor rdma */
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

/* ---- agent_path.c ---- */

/** Our end of a path to a peer: the first member of its mover's own record of it. */
typedef struct kvf_path {
    kvf_paths_t *paths;
    uint64_t peer;
    uint64_t number;     /**< the receiver's */
    bool own;            /**< we fetch by it; else the peer does */
    bool ready;          /**< jobs may be begun */
    bool over;           /**< none is begun any more */
    bool unmapped;       /**< own: the core has given it up */
    bool heard;          /**< the other end knows of its end */
    kvf_job_t *verifies; /**< own: jobs that wait, in their order */
    struct kvf_path *next;
} kvf_path_t;

/** What a mover by which peers fetch does: agent_nccl.c, agent_rdma.c. */
typedef struct kvf_paths_ops {
    size_t path_bytes; /**< of its record of a path */
    /** May we fetch from a peer of that address? */
    kvf_status_t (*check_address)(kvf_paths_t *paths, const void *address, size_t bytes,
                                  kvf_detail_t *detail);
    /** Begin a path of ours. @param least  How long the peer's pools are. @return KVF_OK:
     * kvf_path_ready() or kvf_path_ended() follows. */
    kvf_status_t (*invite)(kvf_path_t *path, const uint64_t *least, kvf_detail_t *detail);
    /** Make our end of a path of the peer's. @return KVF_OK: kvf_path_ended() follows some day. */
    kvf_status_t (*join)(kvf_path_t *path, const void *invitation, size_t bytes,
                         kvf_detail_t *detail);
    /** The other end of a path of ours is there. NULL: nobody says so. */
    void (*joined)(kvf_path_t *path, const void *answer, size_t bytes);
    /** kvf_path_ended() follows, in a later turn. Again is harmless. */
    void (*end)(kvf_path_t *path, const char *why);
    /** The core's action; NULL: nobody asks. */
    void (*serve)(kvf_paths_t *paths, kvf_serve_t *serve);
    /** Tell the core what has happened, and begin what can be. @return How many things. */
    unsigned (*progress)(kvf_paths_t *paths);
    /** As kvf_copier_fd(), kvf_copier_arm(); NULL: it wakes the loop itself. */
    int (*fd)(const kvf_paths_t *paths);
    bool (*arm)(const kvf_paths_t *paths);
    /** Nothing of the core's is with it. */
    void (*destroy)(kvf_paths_t *paths);
} kvf_paths_ops_t;

/** The first member of its mover's own record. */
struct kvf_paths {
    const kvf_paths_ops_t *ops;
    kvf_copier_t *copier;
    kvf_path_t *first; /**< in the order of their turns */
    uint64_t n_made;
    bool dirty; /**< something waits that was not looked at */
};

/** The core's actions. */
KVF_CHECK kvf_status_t kvf_paths_map(kvf_paths_t *paths, uint64_t peer, const void *address,
                                     size_t bytes, const uint64_t *least, kvf_detail_t *detail);
void kvf_paths_unmap(kvf_paths_t *paths, uint64_t peer);
KVF_CHECK kvf_status_t kvf_paths_join(kvf_paths_t *paths, uint64_t peer, uint64_t number,
                                      const void *invitation, size_t bytes, kvf_detail_t *detail);
void kvf_paths_joined(kvf_paths_t *paths, uint64_t peer, uint64_t number, const void *answer,
                      size_t bytes);
void kvf_paths_leave(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own, const char *why);
void kvf_paths_evict(kvf_paths_t *paths, uint64_t peer);
/** Take a job whose bytes are a peer's. @return false: there is no path to it. */
bool kvf_paths_verify(kvf_paths_t *paths, kvf_verify_t *verify);

/* For movers of paths. */
/** @param number  NULL: any. @return NULL: there is none that is not over. */
kvf_path_t *kvf_paths_find(const kvf_paths_t *paths, uint64_t peer, bool own,
                           const uint64_t *number);
/** @return The first job that waits, which is no longer the path's; or NULL. */
kvf_verify_t *kvf_path_take_job(kvf_path_t *path);
/** A job is done. */
void kvf_paths_verified(const kvf_paths_t *paths, kvf_verify_t *verify, kvf_status_t status);
/** Jobs that wait will not be begun. */
void kvf_path_lose_jobs(kvf_path_t *path);
/** Jobs may be begun. */
void kvf_path_ready(kvf_path_t *path);
/** Tell the other end, if it does not know, that ours ends. */
void kvf_path_say_left(kvf_path_t *path, const char *why);
/** It is over, and nothing is under way by it: tell who has to hear of that, and free it. */
void kvf_path_ended(kvf_path_t *path, const char *why);
/** Free them all; nobody hears of it. */
void kvf_paths_drop(kvf_paths_t *paths);

/* ---- agent_nccl.c, agent_rdma.c ---- */

/** Offer paths of NCCL to peers. @return KVF_OK; KVF_ERR_UNSUPPORTED, KVF_ERR_NO_MEMORY,
 * KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_paths_nccl(kvf_copier_t *copier, void (*wake)(void *ctx), void *ctx,
                                      kvf_detail_t *detail);
/** Offer paths of network cards. @return KVF_OK; KVF_ERR_UNSUPPORTED and KVF_ERR_INVALID (no card
 * that reads; a UCX that does not know devices), KVF_ERR_NO_MEMORY, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_paths_rdma(kvf_copier_t *copier, kvf_detail_t *detail);

/* ---- agent_fence.c ---- */

/** Tell the core of fences that were reached. @return How many. */
unsigned kvf_fences_progress(kvf_copier_t *copier);

#endif
