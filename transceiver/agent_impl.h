/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_AGENT_IMPL_H
#define KVF_AGENT_IMPL_H

/**
 * @file
 * The agent from inside: agent.c and agent_pool.c (the public functions), agent_loop.c (the thread
 * that drives the core), agent_copy.c, agent_device.c, agent_nccl.c, agent_rdma.c (what that thread
 * and its helpers do with bytes). Tests may include it to put a decorator around the mover.
 */

#include "kvmgr/base/mem.h"
#include "transceiver/core.h"
#include "transceiver/mem/cuda.h"
#include "transceiver/mover/cuda_fence.h"
#include "transceiver/mover/mapped.h"
#include "transceiver/mover/tcp.h"
#include "transceiver/mover/ucx.h"

typedef struct kvf_loop kvf_loop_t;
typedef struct kvf_copier kvf_copier_t;

struct kvf_pool {
    kvf_agent_t *agent;
    uint32_t group_idx;
    kvf_mem_t mem;
    bool attached;   /**< the memory is the caller's */
    bool zero_freed; /**< pages that were used are zeroed when they are handed out again */
    kvf_pages_t *pages;
    uint64_t page_bytes;
    int64_t n_pages;
};

struct kvf_agent {
    const kvf_alloc_t *alloc;
    kvf_log_t log;
    kvf_log_cb log_cb;
    void *log_ctx;
    kvf_agent_config_t config; /**< with copies of what it points to, but for peers */
    kvf_layout_t layout;
    char *strings[5]; /**< those copies */
    const char **peers;
    kvf_ucx_t *ucx;                   /**< NULL: no mover needs it */
    kvf_cuda_t *cuda;                 /**< the device of all pools; NULL: they are the CPU's */
    kvf_fences_t *fences;             /**< of that device, from the start on */
    kvf_pool_t pools[KVF_MAX_GROUPS]; /**< by layer group; agent NULL: not made */
    kvf_core_t *core;
    kvf_loop_t *loop;                         /**< NULL until started */
    const char *mover_names[KVF_CORE_MOVERS]; /**< what carries windows, best first */
    uint32_t n_movers;
    struct sockaddr_storage host; /**< of control_listen */
    /** Makes a mover; tests put a decorator around it. */
    kvf_status_t (*make_mover)(void *ctx, kvf_agent_t *agent, const char *name,
                               const kvf_mover_sink_t *sink, kvf_mover_t **mover_p,
                               kvf_detail_t *detail);
    void *make_mover_ctx;
};

/** False; tests of the mover rdma set it before they start an agent. See kvf_ucx_config_t. */
extern bool kvf_agent_rdma_over_software;

/** What make_mover is without a decorator; ctx is not used. */
KVF_CHECK kvf_status_t kvf_agent_make_mover(void *ctx, kvf_agent_t *agent, const char *name,
                                            const kvf_mover_sink_t *sink, kvf_mover_t **mover_p,
                                            kvf_detail_t *detail);

/** @return Whether its configuration says that windows are all, so that nobody maps its pools. */
bool kvf_agent_only_carries(const kvf_agent_t *agent);

/** @return The mover by which receivers get bytes themselves, if they can: KVF_MAPPED, KVF_CUDA,
 * KVF_NCCL or KVF_RDMA; by its pools and its configuration. */
const char *kvf_agent_mapped_name(const kvf_agent_t *agent);

/** Make the core and the loop of an agent; with a thread if `threaded`. @return as
 * kvf_agent_start_thread(). */
KVF_CHECK kvf_status_t kvf_loop_create(kvf_agent_t *agent, bool threaded, kvf_loop_t **loop_p,
                                       kvf_detail_t *detail);

/** Stop, close everything and free. Nothing may be busy. @thread any but the loop's own */
void kvf_loop_destroy(kvf_loop_t *loop);

/** Run fn(arg) on the agent's thread and wait for it; at once when that is the calling thread. */
void kvf_loop_call(kvf_loop_t *loop, void (*fn)(void *arg), void *arg);

/** One turn, never blocking. @return Whether anything happened. @thread the driving one */
bool kvf_loop_turn(kvf_loop_t *loop);

/** Turn until nothing happens, and make the descriptor ready for sleep. @thread the driving one,
 * not with a thread */
void kvf_loop_progress(kvf_loop_t *loop);

/** @return See kvf_agent_fd(), kvf_agent_timeout_us(). */
int kvf_loop_fd(kvf_loop_t *loop);
uint64_t kvf_loop_timeout_us(kvf_loop_t *loop);

/** See kvf_copier_promise(). @thread the loop's */
KVF_CHECK kvf_status_t kvf_loop_promise(kvf_loop_t *loop, kvf_fence_t *fence, uint64_t send_id,
                                        const kvf_range_t *range, kvf_detail_t *detail);

/** @return The control channel's address. Owned by the loop. */
const char *kvf_loop_address(const kvf_loop_t *loop);
/** @return kvf_counters_t.posting_us. @thread as kvf_loop_turn() */
uint64_t kvf_loop_posting_us(const kvf_loop_t *loop);

/** Wait until the core is not busy, at most timeout_us; drives the loop itself without a thread.
 *  @return Whether it is quiet. @thread any but the loop's own */
bool kvf_loop_wait_quiet(kvf_loop_t *loop, uint64_t timeout_us);

/** Wait until no peer has a mapping of our pools any more, at most timeout_us.
 *  @return Whether that is so. @thread any but the loop's own */
bool kvf_loop_wait_returned(kvf_loop_t *loop, uint64_t timeout_us);

/* ---- agent_copy.c: the agent's thread only ---- */

/**
 * Start the threads that copy and digest; and, unless the agent only carries, offer the pools to
 * peers on this machine. The core is there.
 *
 * @param movers  What carries the windows of kvf_copier_post(). Borrowed.
 * @param wake   Called on any thread when kvf_copier_progress() has work.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; if the mover is mapped or cuda KVF_ERR_UNSUPPORTED or
 * KVF_ERR_IO, too.
 */
KVF_CHECK kvf_status_t kvf_copier_create(kvf_agent_t *agent, kvf_mover_t *const *movers,
                                         void (*wake)(void *ctx), void *ctx,
                                         kvf_copier_t **copier_p, kvf_detail_t *detail);
/** Nothing is with it. Before the core. NULL is allowed. */
void kvf_copier_destroy(kvf_copier_t *copier);
/** The core's action post, and what the mover says in the end: windows of pages that the CPU does
 * not reach are gathered before they are carried. */
KVF_CHECK kvf_status_t kvf_copier_post(kvf_copier_t *copier, kvf_window_t *window);
void kvf_copier_moved(kvf_copier_t *copier, kvf_window_t *window, kvf_status_t status);
/**
 * kvf_core_send_promise(), and kvf_core_send_reached() when the fence is.
 *
 * @param fence  Of the agent's; taken over with KVF_OK.
 */
KVF_CHECK kvf_status_t kvf_copier_promise(kvf_copier_t *copier, kvf_fence_t *fence,
                                          uint64_t send_id, const kvf_range_t *range,
                                          kvf_detail_t *detail);
/** @return Longest sleep in microseconds. */
uint64_t kvf_copier_max_sleep_us(const kvf_copier_t *copier);
/** The core's actions verify, digest, map and unmap. */
void kvf_copier_verify(kvf_copier_t *copier, kvf_verify_t *verify);
void kvf_copier_digest(kvf_copier_t *copier, kvf_window_t *window);
KVF_CHECK kvf_status_t kvf_copier_map(kvf_copier_t *copier, uint64_t peer, const void *address,
                                      size_t bytes, const int64_t *n_pages, kvf_detail_t *detail);
void kvf_copier_unmap(kvf_copier_t *copier, uint64_t peer);
/** The core's actions join, joined, leave, serve and evict, if the mover is nccl or rdma. */
KVF_CHECK kvf_status_t kvf_copier_join(kvf_copier_t *copier, uint64_t peer, uint64_t number,
                                       const void *invitation, size_t bytes, kvf_detail_t *detail);
void kvf_copier_joined(kvf_copier_t *copier, uint64_t peer, uint64_t number, const void *answer,
                       size_t bytes);
void kvf_copier_leave(kvf_copier_t *copier, uint64_t peer, uint64_t number, bool own,
                      const char *why);
void kvf_copier_serve(kvf_copier_t *copier, kvf_serve_t *serve);
void kvf_copier_evict(kvf_copier_t *copier, uint64_t peer);
/** Do short jobs, and tell the core what has happened. @return How many things. */
unsigned kvf_copier_progress(kvf_copier_t *copier);
/** @return Whether the crew has work, and will wake the loop. */
bool kvf_copier_waits(const kvf_copier_t *copier);
/** @return Whether kvf_copier_progress() has work that no wake or descriptor tells of. */
bool kvf_copier_is_busy(const kvf_copier_t *copier);
/** @return A descriptor to watch for input, of which kvf_copier_readable() tells; or -1. */
int kvf_copier_fd(const kvf_copier_t *copier);
/** @return true: what happens from now on makes it readable; false: there is something. */
bool kvf_copier_arm(const kvf_copier_t *copier);
/** The next kvf_copier_progress() looks there. */
void kvf_copier_readable(kvf_copier_t *copier);

#endif
