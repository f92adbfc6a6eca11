/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVFERRY_H
#define KVF_KVFERRY_H

/**
 * @file
 * kvferry: moves the KV cache of a request from the worker that prefilled it (context side) into
 * the pages of the worker that decodes it (generation side). The one public header.
 *
 * A rank process creates an agent, gives it pools (one per layer group), and opens sends and
 * receives on it:
 *
 *     context side                                 generation side
 *     kvf_send_open     tables by ordinal
 *     kvf_send_ready    layers [a,b) of tokens [0,n) may be read
 *     kvf_send_ticket   ----- orchestrator ----->  kvf_recv_open   ticket, tables, deadline
 *     kvf_send_finish   first tokens, drafts       (progress)      layers landed and verified
 *     (result)                                     (result)        every wanted byte, or an error
 *     (released)                                   (released)
 *
 * **Events.** A successful open is followed by exactly one *result* event (OK or an error) and,
 * after it, by exactly one *released* event: the pages are the caller's again, but for those that
 * it lists as poisoned. A failed open gives no event. Callbacks run on the agent's thread, never
 * inside the call that caused them; they may call any function of this header, must not block, and
 * what an event points to is valid during the callback only.
 *
 * **Threads.** All functions may be called from any thread unless said otherwise. With an agent
 * thread they hand the work to it and wait for its answer (microseconds); do not hold a lock that a
 * callback takes while you call. Without one (kvf_agent_start()) all calls must come from the
 * thread that drives the agent.
 *
 * **Details.** `detail` is NULL or receives one sentence when the call fails: the cause and the way
 * out.
 */

#include "kvmgr/base/status.h"
#include "kvmgr/capacity.h"
#include "kvmgr/layout.h"
#include "kvmgr/window.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Bytes of an instance name or a request id, without terminating zero. */
#define KVF_MAX_ID_BYTES 128
/** Room that is enough for any ticket text, with its terminating zero. */
#define KVF_TICKET_BYTES 1024
/** Room that is enough for any "host:port" text, with its terminating zero. */
#define KVF_ADDRESS_BYTES 80
/** Bytes of the cluster key. */
#define KVF_KEY_BYTES 32
/** Most tokens of each kind, and most bytes of data, in kvf_aux_t. */
#define KVF_MAX_AUX_TOKENS 4096
#define KVF_MAX_AUX_BYTES 65536

typedef struct kvf_agent kvf_agent_t;
typedef struct kvf_pool kvf_pool_t;

/** A send or a receive of one agent. Plain numbers: use after its end gives KVF_ERR_UNKNOWN, no
 * harm. */
typedef struct kvf_send {
    uint64_t id;
} kvf_send_t;
typedef struct kvf_recv {
    uint64_t id;
} kvf_recv_t;

/* ---- agent
 * ------------------------------------------------------------------------------------------------------
 */

/** Values of kvf_agent_config_t.log's level: error, warn, info, debug, trace. */
typedef void (*kvf_log_cb)(void *ctx, int level, const char *text);

/**
 * What an agent is told when it is made. Fill with kvf_agent_config_init() first. Borrowed during
 * kvf_agent_create() only.
 */
typedef struct kvf_agent_config {
    const char *instance; /**< name of this node, unique in the cluster, 1..128 printable bytes */
    const char *control_listen; /**< "host:port" of the control channel, loopback only; port 0
                                   picks one */
    uint8_t cluster_key[KVF_KEY_BYTES]; /**< the secret that every node of the cluster proves */
    const char *const
        *peers; /**< allow-list: instances or "host:port"; with n_peers 0, whoever proves the key */
    size_t n_peers;
    const kvf_layout_t *layout; /**< the model; both sides' must be equal */
    const char *mover; /**< mapped (peers on this machine alone, and pools of shm) | cuda (the same,
                          and pools of cuda) | tcp (connections of our own) | ucx | auto: what of
                          these is possible; tcp and ucx last, ucx before tcp if both sides name
                          UCX's transports. The receiver's counts, but a sender whose mover is tcp
                          or ucx lends nothing. nccl (both of them, with pools of cuda on a device
                          each, and digests): through NCCL. rdma (both of them): the receiver's
                          network card reads */
    uint32_t
        mover_threads; /**< that copy and digest, 1..64; 0: as many as the machine has cores,
                          at most 4. What comes by tcp or ucx is written by who drives the agent
                        */
    bool digests;      /**< what this agent receives is compared with digests that the sender makes
                          (default); without them a damaged byte is not noticed */
    const char *ucx_tls;     /**< UCX transports; auto = posix,sysv,tcp,self. Not looked at where
                                mover is tcp: UCX is not used then. rdma takes rc and dc of them;
                                auto = both */
    const char *ucx_devices; /**< UCX devices; auto = what control_listen uses; rdma: all cards */
    uint32_t max_transfers;  /**< live sends + receives; more are refused with KVF_ERR_AGAIN */
    uint64_t frame_bytes;    /**< longest control frame that is accepted */
    uint64_t window_bytes;   /**< bytes in flight to one peer */
    uint32_t window_pieces;  /**< pieces in flight to one peer */
    uint64_t
        request_timeout_us; /**< a receive that names none, and the wait for a peer's connection */
    uint64_t lease_us;      /**< how long a finished prefill waits for its receiver */
    uint64_t quarantine_us; /**< wait for proof before pages are reported as poisoned */
    uint64_t heartbeat_us;  /**< period, both directions */
    uint64_t suspect_us;    /**< silence that makes a peer suspect */
    uint64_t lost_us;       /**< silence that makes a peer lost */
    uint64_t busy_poll_us;  /**< how long the agent's own thread looks on for more, after the last
                               thing that happened while there are transfers, before it sleeps; not
                               while mover threads have work. A core for shorter short transfers,
                               and more over tcp; 0 (default) to 1,000,000 */
    kvf_log_cb log;         /**< NULL: warnings and errors go to stderr */
    void *log_ctx;
    int log_level; /**< 0 error .. 4 trace */
} kvf_agent_config_t;

/** Fill in every default. Names, key and layout stay empty. */
KVF_API void kvf_agent_config_init(kvf_agent_config_t *config);

/**
 * Make an agent. Nothing runs and no port is open yet: create pools next, then start it.
 *
 * @param config        Checked whole before anything is made; copied.
 * @param[out] agent_p  kvf_agent_destroy() it.
 * @return KVF_OK; KVF_ERR_INVALID (the text names the field); KVF_ERR_UNSUPPORTED;
 * KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_API KVF_CHECK kvf_status_t kvf_agent_create(const kvf_agent_config_t *config,
                                                kvf_agent_t **agent_p, kvf_detail_t *detail);

/**
 * Open the control port and run the agent on a thread of its own (the default way: an engine's long
 * kernel must not look like a dead node). Returns when the port is open.
 *
 * @return KVF_OK; KVF_ERR_INVALID (a layer group has no pool, or it was started before); KVF_ERR_IO
 * (address in use ...).
 */
KVF_API KVF_CHECK kvf_status_t kvf_agent_start_thread(kvf_agent_t *agent, kvf_detail_t *detail);

/** The same, but the calling thread drives the agent with kvf_agent_progress(). */
KVF_API KVF_CHECK kvf_status_t kvf_agent_start(kvf_agent_t *agent, kvf_detail_t *detail);

/**
 * Do what can be done now, and call back. Never blocks. Call it when kvf_agent_fd() is readable, or
 * when kvf_agent_timeout_us() have passed. @thread the driving one; not with an agent thread
 */
KVF_API void kvf_agent_progress(kvf_agent_t *agent);

/** @return A descriptor to poll for reading, the agent's own. @thread the driving one */
KVF_API int kvf_agent_fd(kvf_agent_t *agent);

/** @return Microseconds until kvf_agent_progress() must run even if the descriptor stays quiet;
 * UINT64_MAX: no limit.
 *  @thread the driving one */
KVF_API uint64_t kvf_agent_timeout_us(kvf_agent_t *agent);

/**
 * End an agent: cancel what runs, wait for what can be proven quiet (at most quarantine_us), call
 * back for all of it, say goodbye to the peers, free everything, pools too.
 *
 * @param agent  NULL is allowed. No other call may be under way or follow.
 * @return KVF_OK (freed), or KVF_ERR_BUSY: pages are still granted to a peer without proof, or are
 * a device's and still mapped by one; the agent lives, try later.
 */
KVF_API kvf_status_t kvf_agent_destroy(kvf_agent_t *agent);

/** Write the real "host:port" of the control channel of a started agent. @param cap
 * KVF_ADDRESS_BYTES is enough.
 *  @return KVF_OK; KVF_ERR_INVALID (not started); KVF_ERR_RANGE (cap too small). */
KVF_API KVF_CHECK kvf_status_t kvf_agent_address(kvf_agent_t *agent, char *address, size_t cap);

/** Write the agent's incarnation: 32 hexadecimal digits and a zero. */
KVF_API void kvf_agent_incarnation(kvf_agent_t *agent, char hex[33]);

/* ---- pools
 * ------------------------------------------------------------------------------------------------------
 */

typedef struct kvf_pool_desc {
    uint32_t group_idx; /**< index of the layer group in the layout; one pool per group */
    const char *memory; /**< host | shm | cuda (the calling thread's current device) | cuda:N; all
                           pools of an agent are on one device, or none is */
    int64_t n_pages;    /**< slots of one block of the group each; 1 .. 2^31-1 */
    const char *device_alloc; /**< of new memory on a device: malloc (NULL, too), cudaMalloc(); vmm,
                                 the driver's virtual memory, in whole granules of usually 2 MiB,
                                 which a peer on this machine maps for reading alone. NULL for
                                 other memory */
    bool zero_freed;          /**< a page that somebody had before is overwritten with zeros when
                                 kvf_pool_acquire() hands it out again, which takes its time there */
} kvf_pool_desc_t;

/**
 * Make a pool of zeroed memory. Only before the agent is started.
 *
 * @param[out] pool_p  Lives as long as the agent.
 * @return KVF_OK; KVF_ERR_INVALID (group, number, a second pool of a group, kinds that do not go
 * together, device_alloc, agent started); KVF_ERR_UNSUPPORTED (memory; there is no device, or no
 * driver); KVF_ERR_TOO_LARGE; KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_create(kvf_agent_t *agent, const kvf_pool_desc_t *desc,
                                               kvf_pool_t **pool_p, kvf_detail_t *detail);

/**
 * Make a pool of memory that you have: host (peers reach it by tcp or ucx alone), or cuda, of one
 * allocation by cudaMalloc() or a part of it, or of mappings of virtual memory (cuMemMap()). Device
 * memory that cannot be opened by another process costs a warning, and what moves to and from peers
 * on this machine goes through the CPU's memory: memory from a pool of cudaMallocAsync(), say;
 * virtual memory that was made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or of several
 * allocations.
 *
 * @param desc  memory: host | cuda | cuda:N.
 * @param base  n_pages slots; stays yours, and where it is until kvf_agent_destroy() has returned
 * KVF_OK.
 * @return As kvf_pool_create(); KVF_ERR_INVALID also when it is not memory of that device, or too
 * short.
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_attach(kvf_agent_t *agent, const kvf_pool_desc_t *desc,
                                               void *base, kvf_pool_t **pool_p,
                                               kvf_detail_t *detail);

/** @return The memory of a slot: kvf_group_block_bytes() bytes; NULL when the slot is outside.
 * Where the pool is on a device, an address there. @thread any, without waiting */
KVF_API void *kvf_pool_page(const kvf_pool_t *pool, int32_t slot);

/**
 * Copy bytes into a page, or out of it, wherever the pool is; all of it has happened on return. For
 * programs without kernels of their own: with a device, each call waits for a copy of it.
 *
 * @param offset, bytes  Inside the page; bytes > 0.
 * @return KVF_OK; KVF_ERR_RANGE (slot or bytes outside); KVF_ERR_IO (the device).
 * @thread any, without waiting for the agent; nobody else writes these bytes
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_write(kvf_pool_t *pool, int32_t slot, uint64_t offset,
                                              const void *src, uint64_t bytes,
                                              kvf_detail_t *detail);
KVF_API KVF_CHECK kvf_status_t kvf_pool_read(const kvf_pool_t *pool, int32_t slot, uint64_t offset,
                                             void *dst, uint64_t bytes, kvf_detail_t *detail);

/**
 * Take n free pages, all or none. They are yours until kvf_pool_release(). Their old content is
 * still in them, unless the pool has zero_freed: then they are all zeros, written by the calling
 * thread, which waits for the pool's device if it has one; do not call it from a callback then.
 *
 * @param[out] slots  Room for n; what is in it after an error means nothing.
 * @return KVF_OK; KVF_ERR_AGAIN (too few are free now); KVF_ERR_TOO_LARGE (the pool has fewer in
 * all); KVF_ERR_IO (zero_freed: the device; the pages are free again).
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_acquire(kvf_pool_t *pool, int64_t n, int32_t *slots);

/**
 * Give pages back. A page that a peer may still read or write is reused only when that is proven to
 * have ended, even if you release it early. Your own kernels are done with it.
 *
 * @param slots  n slots, each held by you; -1 entries are skipped.
 * @return KVF_OK; KVF_ERR_RANGE or KVF_ERR_INVALID (not a held page; the others are released all
 * the same).
 */
KVF_API kvf_status_t kvf_pool_release(kvf_pool_t *pool, int64_t n, const int32_t *slots);

/**
 * One more of your sequences uses these pages, all or none: each needs one more
 * kvf_pool_release(). Shared pages can be sent, and cannot be granted to a receive.
 *
 * @param slots  n slots, each held by you or by the prefix index; -1 entries are skipped.
 * @return KVF_OK; KVF_ERR_RANGE or KVF_ERR_INVALID (neither holds it).
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_hold(kvf_pool_t *pool, int64_t n, const int32_t *slots);

/**
 * Your prefix index keeps these pages, all or none, whose bytes are final from now on: they stay
 * when your sequences have released them, until kvf_pool_evict().
 *
 * @param slots  n slots, each held by you; -1 entries are skipped.
 * @return KVF_OK; KVF_ERR_RANGE, KVF_ERR_INVALID (not held, or in the index already) or
 * KVF_ERR_BUSY (being written, or in doubt).
 */
KVF_API KVF_CHECK kvf_status_t kvf_pool_cache(kvf_pool_t *pool, int64_t n, const int32_t *slots);

/**
 * The prefix index lets pages go, one after the other, up to the first that it cannot let go. A
 * page is free if that was its last use.
 *
 * @param slots             n slots; -1 entries are skipped.
 * @param[out] n_evicted_p  How many of them went; written in any case.
 * @return KVF_OK (all). Or of slots[*n_evicted_p]: KVF_ERR_RANGE; KVF_ERR_INVALID (the index does
 * not have it); KVF_ERR_BUSY (under transfer: the index still has it; evict others).
 */
KVF_API kvf_status_t kvf_pool_evict(kvf_pool_t *pool, int64_t n, const int32_t *slots,
                                    int64_t *n_evicted_p);

/** Pages of a pool by label; the labels add up to n_pages. */
typedef struct kvf_pool_info {
    const char *group;  /**< the layer group's name, the agent's memory */
    const char *memory; /**< host | shm | cuda */
    uint64_t page_bytes;
    int64_t n_pages;
    int64_t poisoned, quarantined, writing, reading, held, cached, free;
} kvf_pool_info_t;

KVF_API void kvf_pool_get_info(kvf_pool_t *pool, kvf_pool_info_t *info_p);

/* ---- events
 * -----------------------------------------------------------------------------------------------------
 */

typedef enum kvf_event_kind {
    KVF_EVENT_PROGRESS, /**< receive only: layers of the whole prompt landed and were verified */
    KVF_EVENT_RESULT,   /**< how it ended, once */
    KVF_EVENT_RELEASED  /**< the pages are yours again, once, after the result; the handle ends with
                           this callback */
} kvf_event_kind_t;

/** What the context side hands over with the KV cache. */
typedef struct kvf_aux {
    const int32_t *first_tokens; /**< n_first_tokens */
    size_t n_first_tokens;
    const int32_t *draft_tokens; /**< n_draft_tokens: 0, or the request's draft_len */
    size_t n_draft_tokens;
    const void *data; /**< data_bytes of the engine's own */
    size_t data_bytes;
} kvf_aux_t;

/** A page: (group, ordinal) and the slot of this side. */
typedef struct kvf_page_ref {
    uint32_t group_idx;
    int64_t ordinal;
    int32_t slot; /**< -1 when nothing is bound */
} kvf_page_ref_t;

typedef struct kvf_event {
    kvf_event_kind_t kind;
    kvf_status_t status;  /**< result: KVF_OK, or why not */
    const char *message;  /**< result: the sentence that goes with an error; "" with KVF_OK */
    const char *peer;     /**< instance of the other side; "" while unknown */
    const char *mover;    /**< what carried the bytes; "" when nothing moved */
    uint64_t bytes;       /**< result: bytes that moved: with KVF_OK whole pages */
    uint64_t pages;       /**< result: (group, ordinal) pairs that moved; 0 with an error */
    uint64_t pieces;      /**< result: copies it took */
    uint64_t transfer_us; /**< result: receive: from open; send: from the receiver's request */
    uint64_t
        exposed_us; /**< result of a receive: the part of transfer_us after the end of prefill */
    uint32_t layer_first; /**< progress: global layers [layer_first, layer_end) */
    uint32_t layer_end;
    const kvf_aux_t
        *aux; /**< result of an OK receive: what kvf_send_finish() was given; else NULL */
    const kvf_page_ref_t *missing; /**< result of a receive: live pages that did not come (skip), or
                                      that made it KVF_ERR_UNCOVERED */
    size_t n_missing;
    const kvf_page_ref_t
        *poisoned; /**< released: pages that could not be proven quiet; do not use them again (they
                      can be released; the pool keeps them back) */
    size_t n_poisoned;
    uint64_t quarantine_us; /**< released: how long the pages waited for a proof that nothing
                               touches them; 0: there was one at the end */
} kvf_event_t;

typedef void (*kvf_event_cb)(void *ctx, const kvf_event_t *event);

/* ---- context side
 * -----------------------------------------------------------------------------------------------
 */

typedef struct kvf_send_desc {
    const char *request_id; /**< the orchestrator's, 1..128 printable ASCII bytes; unique among live
                               sends */
    kvf_lengths_t lengths;
    int64_t allocated_tokens;  /**< what your allocator reserved, or will have reserved at the end
                                  of a chunked prefill; checked against
                                  kvf_get_kv_capacity_tokens(include_drafts = false) */
    const kvf_table_t *tables; /**< one per layer group, in the layout's order; copied */
    uint32_t n_tables;
    bool chunked;        /**< live entries may be unbound, and tables short, until they are ready */
    uint64_t timeout_us; /**< until kvf_send_finish() must have been called; 0 = no limit */
} kvf_send_desc_t;

/**
 * Offer a request's KV cache. Live are the prompt's blocks outside kvf_stale_span() of their group,
 * that is, what the first query after the prompt sees; a windowed group's other blocks never need a
 * page. Live pages must be bound and held by you, all of them now, or with `chunked` each by the
 * time it is made ready. From when its entry is known here a page is kept until the released event,
 * also if you release it earlier. Its bytes may still be unwritten: kvf_send_ready() says when they
 * are there.
 *
 * @param desc         Copied.
 * @param[out] send_p  The handle.
 * @return KVF_OK: cb gets one result and one released event, later. Or, without any event:
 * KVF_ERR_INVALID; KVF_ERR_DUPLICATE (request_id is alive); KVF_ERR_CAPACITY_MISMATCH;
 * KVF_ERR_UNCOVERED (not chunked, and a live block is unbound); KVF_ERR_RANGE; KVF_ERR_BUSY (a page
 * is being written); KVF_ERR_TOO_LARGE (the pool can never hold it); KVF_ERR_AGAIN (max_transfers);
 * KVF_ERR_NO_MEMORY.
 */
KVF_API KVF_CHECK kvf_status_t kvf_send_open(kvf_agent_t *agent, const kvf_send_desc_t *desc,
                                             kvf_event_cb cb, void *ctx, kvf_send_t *send_p,
                                             kvf_detail_t *detail);

/**
 * Write the ticket of a send: printable text (base64url), authenticated, single-use; the
 * orchestrator carries it to the generation side.
 *
 * @param[out] ticket  Zero-terminated. KVF_TICKET_BYTES is enough for cap.
 * @return KVF_OK, KVF_ERR_UNKNOWN (ended), KVF_ERR_RANGE (cap too small).
 */
KVF_API KVF_CHECK kvf_status_t kvf_send_ticket(kvf_agent_t *agent, kvf_send_t send, char *ticket,
                                               size_t cap);

/** A part of a request whose bytes are final. */
typedef struct kvf_range {
    uint32_t layer_first; /**< global layer ids [layer_first, layer_end) */
    uint32_t layer_end;
    int64_t token_end; /**< tokens [0, token_end), at most the prompt; boundaries lie anywhere */
    const kvf_table_t *tables; /**< one per layer group as they are now, copied; NULL: as before */
    uint32_t n_tables;
} kvf_range_t;

/**
 * Say that a range may be read. In the end every layer must be ready up to the prompt's end, in
 * whatever steps: all at once, layer by layer, chunk by chunk, or both. Blocks leave when they are
 * whole: a chunk that completes none sends nothing, the prompt's last block needs no more than the
 * prompt's end. A windowed group does not wait for the last chunk: its blocks that are live for the
 * whole prompt leave as they become whole, and the others can slide out at any time.
 *
 * A block that a layer has made ready keeps its page, and no byte of that layer may change until
 * the released event; entries of the tables for blocks that are ready in all layers of their group
 * are ignored. Other live entries become what the tables say: bound, another page, or -1. The tail
 * of the last block beyond the prompt must be zero.
 *
 * Preemption: the send stays open. Give pages of blocks that were not ready back by a call whose
 * tables do not bind them (token_end may be what was ready, even 0), or leave them to the next one.
 * When the engine computes again from an earlier point, what is ready already changes nothing: the
 * bytes stay those that were ready first.
 *
 * @param fence  NULL: the bytes are there now, for everybody. Or, with pools on a device, a
 * cudaEvent_t of that device which was recorded behind the kernels that write the range: it may be
 * read when the event is reached. The event may be recorded again, or destroyed, as soon as the
 * call returns. What is made ready later waits for it, too, and so does the released event: pages
 * do not come back while those kernels may still write to them. If the device fails before, the
 * send ends with KVF_ERR_PREFILL_FAILED.
 * @return KVF_OK, also when nothing new is ready. Otherwise nothing has changed, and the send goes
 * on: KVF_ERR_UNKNOWN (ended); KVF_ERR_INVALID (no layer, outside the model or the prompt, tables
 * that are wrong, another page for a block that is ready in a part of its group's layers,
 * finished); KVF_ERR_UNCOVERED (a live block of the range is unbound; the text names groups and
 * ordinals); KVF_ERR_RANGE; KVF_ERR_BUSY (a page is being written); KVF_ERR_IO (the fence cannot be
 * waited for); KVF_ERR_NO_MEMORY.
 * @cost O(layers), and O(blocks) with tables; then, where nobody has asked for it yet, up to eight
 * windows of pieces are handed to the threads that digest
 */
KVF_API KVF_CHECK kvf_status_t kvf_send_ready(kvf_agent_t *agent, kvf_send_t send,
                                              const kvf_range_t *range, const void *fence,
                                              kvf_detail_t *detail);

/**
 * Prefill is done: every layer was made ready before, up to the prompt's end. The lease of an
 * unclaimed ticket starts here.
 *
 * @param aux  NULL or what goes to the receiver with the final message; copied. The receiver
 *             compares the numbers of tokens with what it expects (kvf_handoff_t).
 * @return KVF_OK; KVF_ERR_UNKNOWN (ended); KVF_ERR_INVALID (layers or tokens missing, called twice,
 * n_draft_tokens neither 0 nor draft_len); KVF_ERR_TOO_LARGE; KVF_ERR_NO_MEMORY.
 */
KVF_API KVF_CHECK kvf_status_t kvf_send_finish(kvf_agent_t *agent, kvf_send_t send,
                                               const kvf_aux_t *aux, kvf_detail_t *detail);

/**
 * Give a send up. Its result is `reason`; its pages come back with the released event.
 *
 * @param reason  KVF_ERR_CANCELLED or KVF_ERR_PREFILL_FAILED; the receiver gets the same.
 * @return KVF_OK, or KVF_ERR_UNKNOWN (ended: no harm).
 */
KVF_API kvf_status_t kvf_send_cancel(kvf_agent_t *agent, kvf_send_t send, kvf_status_t reason);

/* ---- generation side
 * -------------------------------------------------------------------------------------------- */

/** What to do when a live block has no page on one of the sides. */
typedef enum kvf_holes {
    KVF_HOLES_STRICT, /**< refuse before a byte moves */
    KVF_HOLES_SKIP    /**< move the rest; the result lists what is missing */
} kvf_holes_t;

/** Which tokens the context side must hand over with the KV cache. */
typedef enum kvf_handoff {
    KVF_HANDOFF_ALL,   /**< a first token at least, and draft_len draft tokens */
    KVF_HANDOFF_FIRST, /**< a first token at least; drafts are this side's own (none, or all) */
    KVF_HANDOFF_NONE   /**< whatever comes: this side makes its own */
} kvf_handoff_t;

typedef enum kvf_direction {
    KVF_PUSH, /**< the context side sends what is ready */
    KVF_PULL  /**< the context side sends what is ready and was asked for: the generation side paces
               */
} kvf_direction_t;

typedef struct kvf_recv_desc {
    const char *request_id; /**< 1..128 printable ASCII bytes; unique among live receives; must be
                               the ticket's */
    const char *ticket;
    kvf_lengths_t lengths; /**< this side's own view; must have the ticket's prompt length */
    int64_t
        allocated_tokens;  /**< checked against kvf_get_kv_capacity_tokens(include_drafts = true) */
    int64_t cached_tokens; /**< C: tokens [0, C) are held already, in every group */
    const kvf_table_t *tables; /**< one per layer group, in the layout's order; copied */
    uint32_t n_tables;
    uint64_t timeout_us; /**< from now to the result; 0 = the agent's request_timeout_us */
    kvf_holes_t holes;
    kvf_handoff_t handoff; /**< other numbers of tokens end the receive: KVF_ERR_COUNT_MISMATCH */
    kvf_direction_t direction; /**< this side's setting counts */
} kvf_recv_desc_t;

/**
 * Fetch a request's KV cache. Wanted are the live blocks from floor(cached_tokens / block) on, and
 * none when the whole prompt is cached; all live blocks before them must be bound. Wanted pages are
 * granted to the peer until the released event: each must be held by you, once; a shared one must
 * be copied before.
 *
 * @param desc         Copied.
 * @param[out] recv_p  The handle.
 * @return KVF_OK: cb gets progress events, one result and one released event, later. Or, without
 * any event: KVF_ERR_INVALID; KVF_ERR_FORGED (ticket); KVF_ERR_DUPLICATE;
 * KVF_ERR_CAPACITY_MISMATCH; KVF_ERR_UNCOVERED (strict: a live block is unbound here);
 * KVF_ERR_RANGE; KVF_ERR_BUSY (a page is shared or in use); KVF_ERR_NOT_ALLOWED (the ticket's node
 * is not in peers); KVF_ERR_AGAIN; KVF_ERR_UNSUPPORTED; KVF_ERR_NO_MEMORY.
 */
KVF_API KVF_CHECK kvf_status_t kvf_recv_open(kvf_agent_t *agent, const kvf_recv_desc_t *desc,
                                             kvf_event_cb cb, void *ctx, kvf_recv_t *recv_p,
                                             kvf_detail_t *detail);

/** Give a receive up. Its result is KVF_ERR_CANCELLED. @return KVF_OK, or KVF_ERR_UNKNOWN (ended:
 * no harm). */
KVF_API kvf_status_t kvf_recv_cancel(kvf_agent_t *agent, kvf_recv_t recv);

/**
 * Give a ticket up for which there was no receive: a request that was cancelled in the engine's own
 * queue. The send ends with KVF_ERR_CANCELLED as soon as its node is reached, and its pages come
 * back; else they do when its lease ends, or its prefill and then its lease.
 *
 * @param request_id  The ticket's.
 * @return KVF_OK, and no event follows; or nobody is told: KVF_ERR_INVALID (another request's
 * ticket); KVF_ERR_FORGED; KVF_ERR_DUPLICATE (a receive of that id is alive: cancel it);
 * KVF_ERR_NOT_ALLOWED; KVF_ERR_AGAIN; KVF_ERR_CANCELLED (the agent ends); KVF_ERR_NO_MEMORY.
 */
KVF_API KVF_CHECK kvf_status_t kvf_recv_decline(kvf_agent_t *agent, const char *request_id,
                                                const char *ticket, kvf_detail_t *detail);

/* ---- looking in
 * -------------------------------------------------------------------------------------------------
 */

typedef enum kvf_peer_state {
    KVF_PEER_CONNECTING,
    KVF_PEER_UP,
    KVF_PEER_SUSPECT,
    KVF_PEER_LOST,
    KVF_PEER_REFUSED
} kvf_peer_state_t;

/** @return "connecting" | "up" | "suspect" | "lost" | "refused". @thread any, without waiting */
KVF_API const char *kvf_peer_state_name(kvf_peer_state_t state);

typedef struct kvf_peer_info {
    char instance[KVF_MAX_ID_BYTES + 1]; /**< "" until it said hello */
    char address[KVF_ADDRESS_BYTES];
    char incarnation[33];
    char mover[16];
    kvf_peer_state_t state;
    char reason[KVF_DETAIL_BYTES]; /**< why it is lost or refused */
} kvf_peer_info_t;

/**
 * Copy what is known about peers.
 *
 * @param[out] infos  Room for cap.
 * @return How many there are (more than cap: only cap were written).
 */
KVF_API size_t kvf_agent_get_peers(kvf_agent_t *agent, kvf_peer_info_t *infos, size_t cap);

/** Counters since the agent started, and what is alive now. */
typedef struct kvf_counters {
    uint64_t bytes_sent, bytes_received;
    uint64_t pieces_sent, pieces_received; /**< received: verified ones */
    uint64_t posting_us; /**< the agent's thread chose pieces, posted them, and told peers of those
                            that they copy themselves and whose digests were there; copies are not
                            in it, waits for a core are */
    uint64_t digest_mismatches;
    uint64_t unknown_transfers; /**< late or invented messages: harmless */
    uint64_t refused_chunks;    /**< chunks that a grant did not cover */
    uint64_t refused_frames;    /**< connections closed for a bad frame, preamble or hello */
    uint64_t mover_fallbacks;
    uint64_t capacity_mismatches;
    uint64_t reconnects;     /**< connections that took the place of a broken one */
    uint64_t audit_failures; /**< recounts of a pool's pages that did not add up: a defect */
    uint32_t sends_live;     /**< opened and not yet released */
    uint32_t recvs_live;
} kvf_counters_t;

/** Recounts the pages of all pools first. @cost O(pages) */
KVF_API void kvf_agent_get_counters(kvf_agent_t *agent, kvf_counters_t *counters_p);

/** @return "kvferry 0.1.0 (ucx 1.22.0)": of this library and the UCX in use. Static storage; any
 * thread, without waiting. */
KVF_API const char *kvf_version(void);

#ifdef __cplusplus
}
#endif

#endif
