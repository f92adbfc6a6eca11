/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CORE_IMPL_H
#define KVF_CORE_IMPL_H

/**
 * @file
 * What the core's objects know of each other: core.c (registry, time, events to the caller),
 * peer.c, peer_accept.c and peer_map.c (peers), fetch.c (paths between them), session.c (what is
 * said to them), link.c (their connections), turns.c (who is next), send*.c and recv*.c. Only these
 * include it.
 */

#include "proto/hello.h"
#include "proto/ticket.h"
#include "transceiver/core.h"
#include "transceiver/hash.h"
#include "transceiver/plan.h"
#include "transceiver/timers.h"

typedef struct kvf_peer kvf_peer_t;
typedef struct kvf_link kvf_link_t;

/** Operations that wait for their turn (turns.c). */
typedef struct kvf_turns {
    struct kvf_op *first, *last;
} kvf_turns_t;

/** What a send may post before the next one has its turn: short, so that who comes last waits
 * little; long enough that a commit for each costs nothing (docs/benchmarks/fairness.md). */
#define KVF_TURN_BYTES (UINT64_C(256) << 10)
/** The same where a device digests what it is asked for: a launch for each. */
#define KVF_DEVICE_TURN_BYTES (UINT64_C(1) << 20)
/** What a device digests in one launch, before it is asked for. */
#define KVF_DEVICE_DIGEST_BYTES (UINT64_C(16) << 20)
/** What is only told, because the receiver fetches it and the digests are there, costs a turn so
 * many times less. */
#define KVF_TOLD_SHARE 16
/** How many blocks ahead of the one whose page is changed kvf_pages_prefetch() is told. */
#define KVF_PREFETCH_BLOCKS 8

/* ---- operations: what send and recv have in common ---- */

typedef enum kvf_op_kind { KVF_OP_SEND, KVF_OP_RECV } kvf_op_kind_t;

/** A send or a receive. First member of both; owned by the core from open until its released event
 * has been delivered and nothing of it is outstanding. */
typedef struct kvf_op {
    kvf_core_t *core;
    kvf_op_kind_t kind;
    uint64_t id; /**< of the handle; for a receive the counter of its transfer id, too */
    kvf_event_cb cb;
    void *ctx;
    char request_id[KVF_MAX_ID_BYTES + 1];
    bool mapped;      /**< the receiver copies from the sender's pools, which it has mapped */
    kvf_peer_t *peer; /**< NULL while unknown; lives as long as this is in its list */
    kvf_timer_t timer;
    uint64_t opened_us;
    bool ended;        /**< it has a result; nothing new is started */
    bool result_due;   /**< the result event waits for delivery */
    bool released_due; /**< the released event waits behind it */
    bool progress_due; /**< a progress event waits in front of both */
    bool released;     /**< the released event was delivered: the handle is gone */
    bool queued;       /**< is in the core's list of due events */
    bool doubted;      /**< ended without proof that its pages are quiet: they are in quarantine */
    uint64_t doubted_us;      /**< since when */
    uint64_t quarantine_us;   /**< how long, when it is over */
    kvf_page_ref_t *poisoned; /**< n_poisoned pages: for which no proof came in time */
    size_t n_poisoned;
    kvf_status_t status; /**< result */
    kvf_detail_t detail;
    uint64_t bytes, pages, pieces, transfer_us, exposed_us;
    struct kvf_op *due_next;
    kvf_turns_t *turns; /**< where it waits; NULL: nowhere */
    struct kvf_op *turn_prev, *turn_next;
    int64_t deficit; /**< bytes that its turn has left; below 0: that it had too much */
    struct kvf_op *peer_prev, *peer_next; /**< list of the peer's operations */
    UT_hash_handle hh;                    /**< by id */
    UT_hash_handle hh_live;               /**< by request id, until it has a result */
} kvf_op_t;

/* ---- connections and peers (peer.c) ---- */

typedef enum kvf_link_state {
    KVF_LINK_DIALLING,
    KVF_LINK_PREAMBLE,
    KVF_LINK_HELLO,
    KVF_LINK_CONFIRM, /**< inbound: both hellos are out; up with the first frame that follows */
    KVF_LINK_UP
} kvf_link_state_t;

/** One control connection. */
struct kvf_link {
    kvf_core_t *core;
    uint64_t conn;
    bool inbound;
    bool dead; /**< closed; freed by kvf_links_reap(), when no function of its is on the stack */
    kvf_link_state_t state;
    kvf_peer_t *peer; /**< the dialled one, or the one whose hello was accepted */
    char address[KVF_ADDRESS_BYTES];
    kvf_timer_t timer;                        /**< for the handshake */
    uint8_t preambles[2][KVF_PREAMBLE_BYTES]; /**< initiator's, responder's */
    size_t preamble_used;                     /**< bytes of the other end's that came */
    kvf_frame_parser_t parser;
    kvf_link_t *next;  /**< list of the peer's links; later of the dead ones */
    UT_hash_handle hh; /**< by conn */
};

/** A message that was said and is not acknowledged: a whole frame. */
typedef struct kvf_kept {
    struct kvf_kept *next;
    size_t bytes;
    uint8_t frame[];
} kvf_kept_t;

/** Two agents' conversation about transfers, over one connection or several (session.c). It ends
 * when either of them gives the other one up. */
typedef struct kvf_session {
    uint64_t id;              /**< random, the responder's choice; 0: there was none */
    bool over;                /**< it has ended here: the id is all that is left of it */
    uint64_t n_received;      /**< messages of the peer that were taken */
    uint64_t taken_bytes;     /**< of those that it was not told of */
    uint64_t n_said;          /**< messages for the peer */
    uint64_t n_acknowledged;  /**< the first so many of them have come */
    kvf_kept_t *first, *last; /**< the others */
    uint64_t kept_bytes;
} kvf_session_t;

/** Whether a peer's pools are mapped here. */
typedef enum kvf_map_state {
    KVF_MAP_NONE,
    KVF_MAP_PENDING,
    KVF_MAP_READY,
    KVF_MAP_FAILED
} kvf_map_state_t;

/** Another agent: one incarnation of one instance. */
struct kvf_peer {
    kvf_core_t *core;
    uint64_t number; /**< names it to the mover */
    kvf_incarnation_t incarnation;
    char instance[KVF_MAX_ID_BYTES + 1];
    char address[KVF_ADDRESS_BYTES]; /**< of its control channel */
    kvf_peer_state_t state;
    char reason[KVF_DETAIL_BYTES];
    kvf_link_t *links; /**< dialled, in the handshake, or up */
    kvf_link_t *link;  /**< the one that is up; NULL: it broke, or there never was one */
    kvf_session_t session;
    kvf_timer_t timer; /**< heartbeat; or the next attempt to connect, or the end of them */
    uint64_t heard_us;
    bool dialled;         /**< by us: the connection that is or was up */
    uint64_t up_us;       /**< since when it was */
    uint64_t redial_us;   /**< time from a broken connection, or attempt, to the next attempt */
    uint64_t sequence;    /**< of heartbeats */
    kvf_status_t failing; /**< not KVF_OK: the timer is about to fail it, for `reason` */
    uint64_t frame_bytes;
    int64_t n_pages[KVF_MAX_GROUPS]; /**< its regions */
    uint32_t mover_idx;              /**< of ours, for this peer */
    uint8_t *mover_address;
    size_t mover_address_bytes;
    bool mover_connected;
    uint8_t *mapped_address; /**< NULL: its pools cannot be mapped */
    size_t mapped_address_bytes;
    kvf_map_state_t map;   /**< its pools, here */
    uint32_t map_failures; /**< in a row */
    kvf_timer_t map_timer; /**< the end of an attempt that nobody says the end of */
    uint64_t map_again_us; /**< if that has failed: from when on it may be tried again */
    uint32_t n_lent;       /**< mappings of our pools that it has */
    bool forgotten;
    kvf_turns_t moving; /**< sends that have something to post to it */
    kvf_turns_t asking; /**< receives that have something to ask it for */
    struct kvf_peer *active_prev, *active_next;
    uint64_t asked_bytes;  /**< what receives have asked it for, and is not verified yet */
    uint64_t window_bytes; /**< posted to it */
    uint32_t window_pieces;
    bool unproven; /**< a window to it failed: of transfers that have gone from here nobody knows */
    bool active;   /**< in the core's list: somebody waits for a turn, or did a moment ago */
    kvf_op_t *ops;
    UT_hash_handle hh; /**< by incarnation */
};

/* link.c */
/** Make the record of a connection. @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_link_create(kvf_core_t *core, uint64_t conn, bool inbound,
                                       const char *address, kvf_link_t **link_p);
/** It belongs to this peer. */
void kvf_link_attach(kvf_link_t *link, kvf_peer_t *peer);
/** Close a connection; harmless when it is dead already. */
void kvf_link_close(kvf_link_t *link);
/** Send a message that belongs to no conversation; one that cannot be made is left out. */
void kvf_link_say(kvf_link_t *link, kvf_frame_type_t type, const ProtobufCMessage *message);
/** Say why, before closing. */
void kvf_link_say_refuse(kvf_link_t *link, kvf_status_t status, const char *why);
/** Free links that were closed. */
void kvf_links_reap(kvf_core_t *core);

/* session.c */
/** @return Whether messages of a type belong to the conversation, and are counted. */
bool kvf_session_counts(kvf_frame_type_t type);
/** Tell a peer that is up something about a transfer: it comes once, and in order, as long as
 * neither side gives the other one up. Without memory for it the peer is failed by the next tick.
 */
void kvf_peer_tell(kvf_peer_t *peer, kvf_frame_type_t type, const ProtobufCMessage *message);
/** So many messages have come. @return KVF_OK, or KVF_ERR_PROTOCOL: so many were not sent, or more
 * were acknowledged before. */
KVF_CHECK kvf_status_t kvf_session_acknowledged(kvf_peer_t *peer, uint64_t n, kvf_detail_t *detail);
/** Say again, over a new connection, what is not acknowledged. @return KVF_OK, or
 * KVF_ERR_NO_MEMORY: close the connection. */
KVF_CHECK kvf_status_t kvf_session_resend(kvf_peer_t *peer);
/** A message of `bytes` was taken. */
void kvf_session_took(kvf_peer_t *peer, size_t bytes);
/** @return Whether so much is unacknowledged that nothing new is begun with the peer. */
bool kvf_session_full(const kvf_peer_t *peer);
/** It is over: what is not acknowledged is dropped. */
void kvf_session_end(kvf_peer_t *peer);
/** Send a heartbeat; and the regular one, which names the transfers whose leases it renews. */
void kvf_peer_beat(kvf_peer_t *peer);
void kvf_peer_beat_leases(kvf_peer_t *peer);

/* peer_accept.c */
/** @return Whether the configuration lets us talk to that node. */
bool kvf_peer_allowed(const kvf_core_t *core, const char *instance, const char *address);
/** Make our hello frame for a peer. @return As kvf_hello_pack(). */
KVF_CHECK kvf_status_t kvf_peer_pack_hello(kvf_peer_t *peer, const kvf_hello_binding_t *binding,
                                           uint8_t **frame_p, size_t *bytes_p);
/**
 * Check a proven hello against ourselves. Find or make the peer of an inbound link, which takes the
 * place of all its others. The session goes on, or another one begins: then what ran with the peer
 * has ended.
 *
 * @return KVF_OK; KVF_ERR_INCOMPATIBLE (the text names the field); KVF_ERR_NOT_ALLOWED;
 * KVF_ERR_PEER_LOST (another incarnation than the one that was dialled answers, or is meant);
 * KVF_ERR_AGAIN (our own connection, which crosses this one, is to be used); KVF_ERR_PROTOCOL;
 * KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_peer_accept(kvf_link_t *link, const Kvf__Wire__Hello *hello,
                                       kvf_detail_t *detail);

/* peer.c */
/** @return The peer of an incarnation, or NULL. */
kvf_peer_t *kvf_peer_find(kvf_core_t *core, const kvf_incarnation_t *incarnation);
/** @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_peer_create(kvf_core_t *core, const kvf_incarnation_t *incarnation,
                                       const char *instance, const char *address,
                                       kvf_peer_t **peer_p);
/** A connection of it is up, its only one: go on, and start what waits. */
void kvf_peer_up(kvf_peer_t *peer, kvf_link_t *link);
/** A connection of it broke, or could not be made. If there is no other one: try again for lost_us
 * since it was heard. @param nobody  Nobody listens there: it is lost. */
void kvf_peer_disconnected(kvf_peer_t *peer, bool nobody, const char *why);
/** The other side knows nothing of what ran between us: it ends here, too. */
void kvf_peer_restart(kvf_peer_t *peer);
/** Something came from it. */
void kvf_peer_heard(kvf_peer_t *peer);
/** Find or make the peer of a ticket, and see to it that a connection to it is under way.
 *  @return KVF_OK, or why it cannot be reached. */
KVF_CHECK kvf_status_t kvf_peer_reach(kvf_core_t *core, const kvf_ticket_t *ticket,
                                      kvf_peer_t **peer_p, kvf_detail_t *detail);
/** @return What a status that a peer gave as the reason of an end means here: its own state (out of
 * memory, a defect) is not ours. */
kvf_status_t kvf_peer_status(kvf_status_t theirs);
/** @return Whether it can be told something: a conversation is under way, even while it has no
 * connection. */
bool kvf_peer_is_up(const kvf_peer_t *peer);
/** Tie an operation to a peer, and undo it. */
void kvf_peer_attach(kvf_peer_t *peer, kvf_op_t *op);
void kvf_peer_detach(kvf_op_t *op);
/** Tell a peer that a transfer is over, and why. */
void kvf_peer_tell_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                         const char *message);
/** Tell a peer that its pages are out of our reach: our last access has completed, or there was
 * none. */
void kvf_peer_tell_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
/** @return The name of the mover that carries windows between this peer and us. */
const char *kvf_peer_mover_name(const kvf_peer_t *peer);

/** Connect the mover to a peer if it is not yet. */
KVF_CHECK kvf_status_t kvf_peer_connect_mover(kvf_peer_t *peer, kvf_detail_t *detail);
/** Begin to map its pools, if that is possible and was not tried yet; `map` says how it is. */
void kvf_peer_map(kvf_peer_t *peer);
/** Fires when an attempt to map them has lasted too long. */
void kvf_peer_on_map_timer(kvf_timer_t *timer, void *owner);
/** Give its pools back. */
void kvf_peer_unmap(kvf_peer_t *peer);
/** @return The peer of a number; NULL: it is gone. */
kvf_peer_t *kvf_peer_numbered(kvf_core_t *core, uint64_t number);
/** One more mapping of our pools, or path to them, is a peer's. @return false: it has enough of
 * them, or no conversation with it is under way. */
bool kvf_peer_lend(kvf_peer_t *peer);
/* fetch.c */
void kvf_peer_on_join(kvf_peer_t *peer, const Kvf__Wire__Join *join);
void kvf_peer_on_joined(kvf_peer_t *peer, const Kvf__Wire__Joined *joined);
void kvf_peer_on_leave(kvf_peer_t *peer, const Kvf__Wire__Leave *leave);
/** @return KVF_OK, also when there is nothing to be sent any more, which ends the path;
 * KVF_ERR_PROTOCOL (what was not
 * committed, or not in order); KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_send_on_fetch(kvf_peer_t *peer, const Kvf__Wire__Fetch *fetch,
                                         kvf_detail_t *detail);
/** Everything that runs with this peer ends with `status`; its connections close. */
void kvf_peer_fail(kvf_peer_t *peer, kvf_peer_state_t state, kvf_status_t status, const char *why);
/** It left in order, or another has taken its place: no need to remember it once nothing refers to
 * it. */
void kvf_peer_forget(kvf_peer_t *peer);
/** Free peers that are to be forgotten. When no function of theirs is on the stack. */
void kvf_peers_reap(kvf_core_t *core);
/** Say goodbye to all and close every connection. */
void kvf_peers_all_bye(kvf_core_t *core);
/** Free all peers and connections. */
void kvf_peers_cleanup(kvf_core_t *core);
/** This process stood still: nobody is judged by what it did not read meanwhile. */
void kvf_peers_rearm(kvf_core_t *core);

/* ---- the core ---- */

#define KVF_TOMBSTONES 4096

/** Why a ticket is no longer good. */
typedef struct kvf_tombstone {
    uint64_t send_id;
    kvf_status_t status;
} kvf_tombstone_t;

/** Where a layer of the model is. */
typedef struct kvf_core_layer {
    uint32_t layer; /**< global id */
    uint32_t group_idx;
    uint32_t layer_idx; /**< in the group's list */
} kvf_core_layer_t;

struct kvf_core {
    kvf_core_config_t config;
    kvf_agent_config_t agent; /**< config.agent, with copied strings */
    const kvf_alloc_t *alloc;
    const kvf_log_t *log;
    kvf_core_out_t out;
    kvf_layout_t layout;
    uint64_t layout_digest;
    uint32_t n_layers;        /**< of all groups */
    kvf_core_layer_t *layers; /**< n_layers, by ascending global id */
    kvf_incarnation_t incarnation;
    char *control_address;
    struct {
        uint8_t *data;
        size_t bytes;
    } mover_addresses[KVF_CORE_MOVERS];
    uint8_t *mapped_address; /**< NULL: our pools are not for mapping */
    size_t mapped_address_bytes;

    uint64_t now_us;
    uint64_t ticked_us;
    kvf_timers_t timers;
    uint64_t next_id;   /**< of operations; never used again */
    uint64_t next_peer; /**< of peers */
    bool shutting_down;

    kvf_op_t *ops;                 /**< by id */
    kvf_op_t *live[2];             /**< by request id: sends, receives */
    struct kvf_send_op *transfers; /**< by transfer id: sends that were claimed */
    uint32_t n_ops;                /**< not yet released */
    kvf_op_t *due_first, *due_last;
    kvf_peer_t *peers;  /**< by incarnation */
    kvf_peer_t *active; /**< those that turns.c has to look at: of hundreds, a few */
    kvf_link_t *links;  /**< by conn */
    kvf_link_t *dead_links;
    bool peers_forgotten; /**< some wait for kvf_peers_reap() */
    kvf_counters_t counters;

    uint32_t n_lent; /**< mappings of our pools, all peers */
    kvf_window_t *free_windows;
    struct kvf_send_op
        *ahead;       /* have ranges to be digested before they are asked for (send_ahead.c) */
    uint32_t n_ahead; /* windows of them under way */
    kvf_verify_t *free_jobs;
    uint32_t n_posted;
    uint32_t n_verifying;
    uint32_t n_farewells; /**< receives that wait to be taken back */
    uint32_t n_landing;   /**< receives that expect chunks */

    kvf_tombstone_t tombstones[KVF_TOMBSTONES]; /**< ring of ended sends */
    uint64_t n_tombstones;
};

/** @return Whether the pages are a device's: its jobs are longer, as each waits for a launch. */
static inline bool kvf_core_on_device(const kvf_core_t *core) {
    return core->config.regions[0].memory == KVF_MEM_CUDA;
}
/** Put an operation into the list of due events (once). */
void kvf_op_due(kvf_op_t *op);
/** Give it its one result; it must not have one. Disarms its timer. */
void kvf_op_end(kvf_op_t *op, kvf_status_t status, const char *message);
/** Its pages are the caller's again. */
void kvf_op_release(kvf_op_t *op);
/** Its pages are in quarantine from now on; its timer fires when the time for a proof is over. */
void kvf_op_doubt(kvf_op_t *op);
/** A proof came: no more doubt. */
void kvf_op_settled(kvf_op_t *op, const char *proof);
/** No proof came in time: make room in op->poisoned for n pages, not 0. @return false: no memory,
 * the timer fires again. */
bool kvf_op_poison(kvf_op_t *op, size_t n);
/** Register a new operation, with a timer. @return KVF_OK, KVF_ERR_INVALID, _DUPLICATE, _AGAIN,
 * _NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_op_init(kvf_core_t *core, kvf_op_t *op, kvf_op_kind_t kind,
                                   const char *request_id, kvf_event_cb cb, void *ctx,
                                   void (*on_timer)(kvf_timer_t *timer, void *owner),
                                   kvf_detail_t *detail);
/** Undo kvf_op_init(); the memory stays. */
void kvf_op_cleanup(kvf_op_t *op);
/** Destroy it if its released event was delivered and nothing of it is outstanding. */
void kvf_op_reap(kvf_op_t *op);
/** @return The live operation of that id and kind, or NULL. */
kvf_op_t *kvf_op_find(kvf_core_t *core, uint64_t id, kvf_op_kind_t kind);
/** There must be a table for each layer group. @return KVF_OK, KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_core_check_tables(const kvf_core_t *core, const kvf_table_t *tables,
                                             uint32_t n_tables, kvf_detail_t *detail);
/** Tables of a request: number, capacity and every table's entries. */
KVF_CHECK kvf_status_t kvf_core_check_request(kvf_core_t *core, const char *request_id,
                                              const kvf_lengths_t *lengths, bool include_drafts,
                                              int64_t allocated_tokens, int64_t cached_tokens,
                                              const kvf_table_t *tables, uint32_t n_tables,
                                              kvf_wanted_t *wanted, kvf_detail_t *detail);
/* send_move.c */
/** Pieces of a window at the most: it is posted, completes and is committed as one. Those of a
 * mover that carries are shorter, as others wait behind them. */
#define KVF_WINDOW_PIECES 256
#define KVF_CARRIED_PIECES 64
/** @return A window with room for its pieces; NULL without memory. Windows are kept, so that
 * posting does not allocate once a peer's window has been full. */
kvf_window_t *kvf_window_take(kvf_core_t *core);
void kvf_window_give(kvf_core_t *core, kvf_window_t *window);

/* turns.c */
/** Wait for a turn, behind the others; who waits already keeps its place. */
void kvf_turns_enter(kvf_turns_t *turns, kvf_op_t *op);
/** Wait no more. */
void kvf_turns_leave(kvf_op_t *op);
/** The peer goes: nobody waits for a turn with it. */
void kvf_turns_forget(kvf_peer_t *peer);

/* ---- what peers and the core tell operations ---- */
void kvf_send_on_request(kvf_peer_t *peer, const Kvf__Wire__RecvRequest *request);
/** A heartbeat names a transfer: the receiver still wants it. */
void kvf_send_on_renewed(kvf_peer_t *peer, const uint64_t *counters, size_t n);
void kvf_send_on_done(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
/** Whoever aborts hears that the send is out of its pages: now, or when it is. */
bool kvf_send_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message);
void kvf_send_on_peer(kvf_op_t *op, kvf_status_t status, const char *why);
void kvf_send_on_moved(kvf_window_t *window, kvf_status_t status);
/** The receiver copies from this side's pools, and its last copy has been made. */
void kvf_send_on_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
/** Its receiver has no mapping of our pools any more. */
void kvf_send_on_returned(kvf_op_t *op);
/** The peer is up again: what is in doubt is asked for. */
void kvf_send_on_peer_up(kvf_op_t *op);
/** Post one window of a send, out of what its turn has left. @return KVF_OK: posted, or it has
 * nothing to post (then it waits no more); KVF_ERR_AGAIN: no room. */
kvf_status_t kvf_send_pump(kvf_op_t *op);
/** A receiver that pulls wants what begins in front of that byte. @return Whether it is known. */
bool kvf_send_on_pull(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, uint64_t bytes);
/** We stood still: its receiver is not judged by what was not read meanwhile. */
void kvf_send_rearm_op(kvf_op_t *op);
/** End a live one, and tell its peer. */
void kvf_send_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message);
void kvf_send_destroy(kvf_op_t *op);
bool kvf_send_quiet(const kvf_op_t *op);

void kvf_recv_on_peer_up(kvf_op_t *op);
/** Takes the final part out of the message. */
void kvf_recv_on_commit(kvf_peer_t *peer, Kvf__Wire__Commit *commit);
bool kvf_recv_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message);
/** So many bytes are ready at its sender. @return Whether it is known. */
bool kvf_recv_on_ready(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, uint64_t bytes);
/** Ask for one turn's bytes more. It waits for that: there is something to ask for. */
void kvf_recv_ask(kvf_op_t *op);
void kvf_recv_on_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
void kvf_recv_on_peer(kvf_op_t *op, kvf_status_t status, const char *why);
/** @return Whether the peer was told of it. */
bool kvf_recv_is_told(const kvf_op_t *op);
/** @return Whether it goes on, and its peer is to hold its pages for it. */
bool kvf_recv_is_wanted(const kvf_op_t *op);
/** End a live one, and tell its peer. */
void kvf_recv_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message);
void kvf_recv_destroy(kvf_op_t *op);
bool kvf_recv_quiet(const kvf_op_t *op);
/** Fill in a progress event. @return Whether there is progress that was not reported. */
bool kvf_recv_progress_event(kvf_op_t *op, kvf_event_t *event);
/** Fill the parts of a result or released event that only a receive has. */
void kvf_recv_event(kvf_op_t *op, kvf_event_t *event, kvf_aux_t *aux);

#endif
