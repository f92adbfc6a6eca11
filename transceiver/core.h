/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CORE_H
#define KVF_CORE_H

/**
 * @file
 * The core: everything of an agent that decides. Peers, sends and receives are state machines;
 * events come in by the functions below, actions go out through kvf_core_out_t. It reads no clock,
 * opens no socket, posts no copy and touches no page: whoever drives it (the agent's loop, a test,
 * the simulator) does that, and may do it later, slower or not at all.
 *
 * One thread. No function of the out table calls back into the core from inside. User callbacks run
 * in kvf_core_deliver() only.
 */

#include "kvmgr/base/clock.h"
#include "kvmgr/base/log.h"
#include "kvmgr/base/mem.h"
#include "kvmgr/pages.h"
#include "proto/chunk.h"
#include "transceiver/kvferry.h"
#include "transceiver/mover/mover.h"

/** The movers by which a receiver copies from its sender's pools, which it has mapped: with the
 * CPU, or where the pools are a device's with that. To the core they are one: `mapped`. */
#define KVF_MAPPED "mapped"
#define KVF_CUDA "cuda"
/** The same for pools that it has not mapped: through a path of their own (fetch.c) its sender
 * sends what it asks for; or the receiver's network card reads it there. */
#define KVF_NCCL "nccl"
#define KVF_RDMA "rdma"

typedef struct kvf_core kvf_core_t;

/** Ranges of pages for the driver to copy, or to digest, or both. */
#define KVF_VERIFY_ITEMS 256
typedef struct kvf_verify_item {
    uint32_t group_idx;
    int32_t slot;
    int32_t source_slot; /**< the peer's */
    uint64_t offset;     /**< inside both slots */
    uint64_t bytes;
    const uint8_t *landing; /**< where the bytes landed, to be copied to the page; NULL: there */
    const uint64_t *leaves; /**< hashes of the range's leaves as they landed; NULL: not known */
    uint64_t digest; /**< out: kvf_digest() of that range as it lies, or landed, in the page */
} kvf_verify_item_t;

typedef struct kvf_verify {
    kvf_job_t job; /**< the driver's while it has it */
    void *source;  /**< the driver's, too */
    uint64_t recv_id;
    uint64_t peer;       /**< copy from its pools, which are mapped; 0: the bytes are there */
    bool digests;        /**< digests are wanted */
    kvf_status_t status; /**< out: KVF_OK; KVF_ERR_PEER_LOST (there is nothing to copy from any
                            more); KVF_ERR_IO (a device failed) */
    size_t first;        /**< the receive's */
    uint64_t bytes;      /**< that must be read */
    uint32_t n_before;   /**< others of the same receive that the driver has */
    uint32_t n_items;
    kvf_verify_item_t items[KVF_VERIFY_ITEMS];
} kvf_verify_t;

/** What a peer has asked for, to be sent through a path: ranges of our pages, one after the other.
 */
typedef struct kvf_serve_item {
    const uint8_t *source;
    uint64_t bytes;
} kvf_serve_item_t;

typedef struct kvf_serve {
    struct kvf_serve *next; /**< the driver's while it has it */
    uint64_t peer;
    uint64_t path;  /**< the peer's number for it */
    uint64_t owner; /**< the core's */
    uint32_t n_items;
    kvf_serve_item_t items[]; /**< at most KVF_VERIFY_ITEMS */
} kvf_serve_t;

/** Actions. None calls back into the core. */
typedef struct kvf_core_out {
    /** Connect; kvf_core_opened() or kvf_core_closed() follows. */
    kvf_status_t (*dial)(void *ctx, const char *address, uint64_t *conn_p, kvf_detail_t *detail);
    /** Send bytes (from the core's allocator, taken over). What cannot be sent ends the connection
     * by kvf_core_closed(). */
    void (*write)(void *ctx, uint64_t conn, uint8_t *data, size_t bytes);
    /** Close after what was written has left; no event follows. */
    void (*close)(void *ctx, uint64_t conn);
    /** See kvf_mover_ops_t. */
    kvf_status_t (*mover_connect)(void *ctx, uint64_t peer, uint32_t mover_idx, const void *address,
                                  size_t bytes, kvf_detail_t *detail);
    void (*mover_disconnect)(void *ctx, uint64_t peer, uint32_t mover_idx);
    kvf_status_t (*post)(void *ctx, kvf_window_t *window);
    /** Map the pools of a peer on this machine, to copy from them.
     * @param n_pages  Of each pool. @return KVF_OK: kvf_core_mapped() follows, unless unmap comes
     * first, which it does after 20 s; or why it cannot be. */
    kvf_status_t (*map)(void *ctx, uint64_t peer, const void *address, size_t bytes,
                        const int64_t *n_pages, kvf_detail_t *detail);
    /** No job for this peer is begun any more; its pools are unmapped when the last one is done. */
    void (*unmap)(void *ctx, uint64_t peer);
    /** Write the digests that are 0 of a window that the receiver fetches itself, or (peer 0) that
     * nobody has asked for yet; kvf_core_moved() follows. */
    void (*digest)(void *ctx, kvf_window_t *window);
    /** @return The memory of a slot of ours; the core only hands it on to the mover. */
    const uint8_t *(*page)(void *ctx, uint32_t group_idx, int32_t slot);
    /** Copy and digest the items, then kvf_core_verified(). */
    void (*verify)(void *ctx, kvf_verify_t *job);

    /* Only of drivers whose peers fetch through paths (fetch.c); else NULL. Such a driver's map
     * makes a path, by kvf_core_invite(). */
    /** A peer has made a path to fetch by: make the end of it that is ours. @return KVF_OK: it
     * counts as a mapping of our pools, and kvf_core_returned() follows when it has ended; or why
     * not. */
    kvf_status_t (*join)(void *ctx, uint64_t peer, uint64_t path, const void *invitation,
                         size_t bytes, kvf_detail_t *detail);
    /** The other end of a path of ours is there (kvf_core_answer()). NULL: nobody says so. */
    void (*joined)(void *ctx, uint64_t peer, uint64_t path, const void *answer, size_t bytes);
    /** A path has ended at its other end, or is to end: end ours. @param own  It is one that we
     * fetch by. */
    void (*leave)(void *ctx, uint64_t peer, uint64_t path, bool own, const char *why);
    /** Send; kvf_core_served() follows. NULL where nobody asks: else a driver's verify asks by
     * kvf_core_fetch(). */
    void (*serve)(void *ctx, kvf_serve_t *serve);
    /** The peer is given up: end every path that it fetches by. */
    void (*evict)(void *ctx, uint64_t peer);
    void *ctx;
} kvf_core_out_t;

/** A pool as the core sees it. */
typedef struct kvf_core_region {
    kvf_pages_t *pages; /**< borrowed */
    kvf_mem_type_t memory;
} kvf_core_region_t;

/** Movers that carry windows, at most. */
#define KVF_CORE_MOVERS 2U

typedef struct kvf_core_config {
    const kvf_agent_config_t *agent; /**< copied, with what it points to */
    const kvf_alloc_t *alloc;        /**< outlives the core */
    kvf_rand_t rand;
    const kvf_log_t *log; /**< outlives the core */
    kvf_core_out_t out;
    kvf_core_region_t regions[KVF_MAX_GROUPS]; /**< one per layer group */
    /** What carries windows, best first; static storage. A pair of agents uses the one that stands
     * highest in both lists together. */
    const char *mover_names[KVF_CORE_MOVERS];
    uint32_t n_movers;       /**< at least 1 */
    bool movers_checked;     /**< all of them, or none */
    const char *mapped_name; /**< KVF_CUDA, KVF_NCCL, KVF_RDMA; NULL: KVF_MAPPED */
    bool hashes_leaves; /**< the driver hashes what lands, where kvf_core_grant_check() says so */
} kvf_core_config_t;

/** @return KVF_OK, KVF_ERR_NO_MEMORY. What the config says has been checked by kvf_agent_create().
 */
KVF_CHECK kvf_status_t kvf_core_create(const kvf_core_config_t *config, kvf_core_t **core_p);

/** Nothing may be alive (kvf_core_busy() false). NULL is allowed. */
void kvf_core_destroy(kvf_core_t *core);

/** Say where this agent can be reached, before the first connection. Copied. */
KVF_CHECK kvf_status_t kvf_core_set_control_address(kvf_core_t *core, const char *address);

/** Say what the address of one of its movers is; of all of them, before the first connection.
 * Copied. */
KVF_CHECK kvf_status_t kvf_core_set_mover_address(kvf_core_t *core, uint32_t mover_idx,
                                                  const void *address, size_t bytes);

/** Say where peers on this machine get this agent's pools, to map them (the mover `mapped`).
 * Without it nobody does. Before the first connection. Copied. @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_core_set_mapped_address(kvf_core_t *core, const void *address,
                                                   size_t bytes);

/**
 * Set the time; every event is taken to happen then. Does not fire anything.
 *
 * @param now_us  Never less than before.
 */
void kvf_core_set_time(kvf_core_t *core, uint64_t now_us);

/** Fire the timers that are due. Call it once per turn, after everything readable has been read. */
void kvf_core_tick(kvf_core_t *core);

/** @return When kvf_core_tick() is needed next, or KVF_NEVER. */
uint64_t kvf_core_next_us(const kvf_core_t *core);

/** Post what may be posted now; call it after events, once per turn. @return Whether something was
 * posted. */
bool kvf_core_pump(kvf_core_t *core);

/** Run the callbacks that are due. @return Whether any ran. */
bool kvf_core_deliver(kvf_core_t *core);

/** @return Whether kvf_core_deliver() has something to do. */
bool kvf_core_has_events(const kvf_core_t *core);

/** @return Whether sends, receives, posted windows or verify jobs are alive. */
bool kvf_core_busy(const kvf_core_t *core);

/** @return Whether windows are posted or chunks expected: the time to poll instead of to sleep. */
bool kvf_core_in_flight(const kvf_core_t *core);

/** @return How many mappings of this agent's pools peers have. */
uint32_t kvf_core_lent(const kvf_core_t *core);

/** Begin the end: cancel all sends and receives, refuse new ones. */
void kvf_core_shutdown(kvf_core_t *core);
/** Say goodbye to the peers and close every connection; when nothing is busy any more. */
void kvf_core_goodbye(kvf_core_t *core);

/* ---- events: connections ---- */
void kvf_core_opened(kvf_core_t *core, uint64_t conn, bool inbound, const char *address);
void kvf_core_bytes(kvf_core_t *core, uint64_t conn, const uint8_t *data, size_t bytes);
void kvf_core_closed(kvf_core_t *core, uint64_t conn, const char *why);

/* ---- events: movers ---- */
/**
 * May this chunk be written? Checks transfer, grant, page, generation and range, and that none of
 * its bytes came before.
 *
 * @param[out] landing_p  Where; at is NULL: in its page. Else the page is memory that the CPU does
 * not reach, and the bytes are copied there when they are verified.
 * @return KVF_OK: write it, then kvf_core_landed(). Otherwise it was counted and must be dropped.
 */
KVF_CHECK kvf_status_t kvf_core_grant_check(kvf_core_t *core, const kvf_chunk_t *chunk,
                                            kvf_landing_t *landing_p);
/** The chunk that was just checked is where it goes, and the hashes of its leaves, if they were
 * wanted, are where they were to go. */
void kvf_core_landed(kvf_core_t *core, const kvf_chunk_t *chunk);
void kvf_core_moved(kvf_core_t *core, kvf_window_t *window, kvf_status_t status);
void kvf_core_broken(kvf_core_t *core, uint64_t peer, const char *why);
void kvf_core_verified(kvf_core_t *core, kvf_verify_t *job);

/* ---- events: pools of one agent that are mapped by another ---- */
/** A peer's pools are mapped here, or cannot be: `why` says it. */
void kvf_core_mapped(kvf_core_t *core, uint64_t peer, kvf_status_t status, const char *why);
/** Somebody wants to map our pools. @return The peer's number: it gets them, and
 * kvf_core_returned() follows; 0: no such peer. */
uint64_t kvf_core_lend(kvf_core_t *core, const kvf_incarnation_t *incarnation);
/** One mapping of our pools by that peer is gone: it has unmapped them, or its process has ended.
 */
void kvf_core_returned(kvf_core_t *core, uint64_t peer);

/** Pools of a peer that were mapped here are so no more: `why` says it. Receives that used them
 * end. */
void kvf_core_unmapped(kvf_core_t *core, uint64_t peer, const char *why);

/* ---- events: paths by which one agent fetches from another ---- */
/** Ask a peer to make its end of a path of ours. @param path  Not 0, and never used again. */
void kvf_core_invite(kvf_core_t *core, uint64_t peer, uint64_t path, const void *invitation,
                     size_t bytes);
/** Our end of a path of a peer's is there: tell it, and how to use it. */
void kvf_core_answer(kvf_core_t *core, uint64_t peer, uint64_t path, const void *answer,
                     size_t bytes);
/** A path has ended here: tell the peer. @param own  It is one that we fetch by. */
void kvf_core_left(kvf_core_t *core, uint64_t peer, uint64_t path, bool own, const char *why);
/** Ask for what a job waits for, which is ready to come in; jobs of a peer in the order in which
 * they were given. @return false: its receive has ended, and nothing will come. */
bool kvf_core_fetch(kvf_core_t *core, const kvf_verify_t *job, uint64_t path);
/** What was to be sent is sent, or will not be: nothing of ours reads those pages for it any more.
 */
void kvf_core_served(kvf_core_t *core, kvf_serve_t *serve);

/* ---- requests: the functions of kvferry.h ---- */
KVF_CHECK kvf_status_t kvf_core_send_open(kvf_core_t *core, const kvf_send_desc_t *desc,
                                          kvf_event_cb cb, void *ctx, uint64_t *id_p,
                                          kvf_detail_t *detail);
KVF_CHECK kvf_status_t kvf_core_send_ticket(kvf_core_t *core, uint64_t id, char *ticket,
                                            size_t cap);
KVF_CHECK kvf_status_t kvf_core_send_ready(kvf_core_t *core, uint64_t id, const kvf_range_t *range,
                                           kvf_detail_t *detail);
/**
 * The same, of what is written when a fence is reached. What is made ready behind it waits for it,
 * too, and so do the pages of a send that has ended.
 *
 * @param[out] mark_p  For kvf_core_send_reached(), which follows, also when the send has ended;
 * with several promises of a send in their order.
 */
KVF_CHECK kvf_status_t kvf_core_send_promise(kvf_core_t *core, uint64_t id,
                                             const kvf_range_t *range, size_t *mark_p,
                                             kvf_detail_t *detail);
/** A fence of a send was reached. @param well  false: what it stands for was not written. */
void kvf_core_send_reached(kvf_core_t *core, uint64_t id, size_t mark, bool well);
KVF_CHECK kvf_status_t kvf_core_send_finish(kvf_core_t *core, uint64_t id, const kvf_aux_t *aux,
                                            kvf_detail_t *detail);
KVF_CHECK kvf_status_t kvf_core_send_cancel(kvf_core_t *core, uint64_t id, kvf_status_t reason);
KVF_CHECK kvf_status_t kvf_core_recv_open(kvf_core_t *core, const kvf_recv_desc_t *desc,
                                          kvf_event_cb cb, void *ctx, uint64_t *id_p,
                                          kvf_detail_t *detail);
KVF_CHECK kvf_status_t kvf_core_recv_cancel(kvf_core_t *core, uint64_t id);
KVF_CHECK kvf_status_t kvf_core_recv_decline(kvf_core_t *core, const char *request_id,
                                             const char *ticket, kvf_detail_t *detail);
size_t kvf_core_peers(const kvf_core_t *core, kvf_peer_info_t *infos, size_t cap);
/** Recount the pages of all pools; what does not add up is counted and logged. @cost O(pages) */
void kvf_core_audit(kvf_core_t *core);
void kvf_core_counters(const kvf_core_t *core, kvf_counters_t *counters_p);
const kvf_incarnation_t *kvf_core_incarnation(const kvf_core_t *core);
/** Write 32 hexadecimal digits and a zero. @thread any */
void kvf_incarnation_text(const kvf_incarnation_t *incarnation, char hex[33]);

#endif
