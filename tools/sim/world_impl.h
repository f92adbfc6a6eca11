/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_WORLD_IMPL_H
#define KVF_TOOLS_SIM_WORLD_IMPL_H

/**
 * @file
 * What the parts of the world know of each other: world.c (time, and what happens next), node.c
 * (processes: core, memory, pages), wire.c (control connections), carry.c (copies), lend.c (copies
 * from mapped pools), fetch.c (paths), faults.c, and engine.c (requests, and what they must get).
 * Only these include it.
 */

#include "kvmgr/base/alloc.h"
#include "tools/sim/arena.h"
#include "tools/sim/world.h"
#include "transceiver/core.h"

#define WORLD_NODES 6
#define WORLD_GROUPS 3
#define WORLD_BLOCKS 96 /**< of a prompt */
#define WORLD_PAGES 200 /**< of a pool */
#define WORLD_ANY_LIFE 0
/** A connection that is older than this has had its handshake. */
#define HANDSHAKE_OVER_US 200000
/** The ends of a broken connection notice it within this. */
#define CUT_NOTICED_US 1500000

/** Who does an event, and what it is about. */
typedef enum event_kind {
    /* of a process: wait while it stands still, and die with it */
    EVENT_WIRE,     /**< the next thing comes out of a connection; a: conn */
    EVENT_LEAVE,    /**< ptr: packet_t; its bytes are read */
    EVENT_LAND,     /**< ptr: packet_t */
    EVENT_MOVED,    /**< ptr: job_t */
    EVENT_BROKEN,   /**< a: number of the path */
    EVENT_VERIFIED, /**< ptr: kvf_verify_t */
    EVENT_LEND,     /**< ptr: mapping_t; the owner of the pools is asked for them */
    EVENT_MAPPED,   /**< ptr: mapping_t; who asked has the answer */
    EVENT_MAP_LATE, /**< ptr: mapping_t; or it has waited long enough */
    EVENT_RETURNED, /**< ptr: mapping_t; the owner notices that it is gone */
    EVENT_COPY,     /**< ptr: kvf_verify_t, a: first item << 32 | end */
    EVENT_DIGESTED, /**< ptr: kvf_window_t */
    EVENT_PIPE,     /**< ptr: pipe_t; see fetch.c */
    EVENT_PIPE_JOB, /**< ptr: pipe_job_t */
    EVENT_WAKE,
    EVENT_ENGINE, /**< ptr: request_t, a: engine_act_t, b: which receive */
    EVENT_OF_PROCESS,
    /* of the world */
    EVENT_ARRIVE = EVENT_OF_PROCESS, /**< a connection reaches a machine; a: conn */
    EVENT_STORE, /**< ptr: packet_t; its bytes reach the memory, whatever the process does */
    EVENT_FETCH, /**< ptr: packet_t; the network card reads the bytes */
    EVENT_ITEM,  /**< a: item of the script */
    EVENT_RESUME,
    EVENT_RESTART,
    EVENT_QUIESCE,
    EVENT_PROBE
} event_kind_t;

typedef struct event {
    uint64_t at_us;
    uint64_t order; /**< ties are taken in the order in which they were made */
    uint64_t a;
    void *ptr;
    uint32_t life;               /**< of the node; WORLD_ANY_LIFE: whichever */
    uint8_t kind, node, from, b; /**< from: where it comes from, if it passes the network */
} event_t;

/** What comes out of a connection. */
typedef enum signal_kind { SIGNAL_ACCEPT, SIGNAL_OPENED, SIGNAL_BYTES, SIGNAL_FIN } signal_kind_t;

/** Bytes on their way, or one of the others. */
typedef struct signal_box {
    struct signal_box *next;
    signal_kind_t kind;
    size_t bytes;
    uint8_t data[];
} signal_box_t;

/** One end of a control connection. */
typedef struct wire_end {
    uint32_t node, life; /**< life 0: nobody has accepted it yet */
    bool open;
    bool deaf;                  /**< bytes that are under way to it are lost */
    uint64_t last_us;           /**< nothing arrives before what was written before */
    signal_box_t *first, *last; /**< under way, in order */
} wire_end_t;

typedef struct wire {
    wire_end_t ends[2];
    uint64_t made_us;
    bool cut;     /**< nothing written from now on arrives */
    bool flipped; /**< a frame on it was changed, perhaps its length */
} wire_t;

/** A connected data path. */
typedef struct path {
    uint64_t number;
    uint32_t node, life; /**< the other end's */
    bool broken;
    struct path *next;
} path_t;

/** A posted window. */
typedef struct job {
    kvf_window_t *window;
    uint32_t node, life;
    uint32_t n_waiting, n_flying;
    kvf_status_t status;
    bool reported;
    bool forced; /**< if it fails, that is told before all that has left has arrived */
    struct job *next;
} job_t;

/** The pools of a node, mapped by another. */
typedef struct mapping {
    kvf_world_t *world;
    uint32_t node, life; /**< who maps */
    kvf_incarnation_t who;
    uint64_t peer; /**< its number for the owner */
    uint32_t from, from_life;
    uint8_t *bytes[WORLD_GROUPS];
    uint64_t lent; /**< the owner's number for who maps; 0: it has not lent them */
    bool failed;
    bool ready;
    bool gone; /**< unmap was called */
    bool over;
    uint32_t n_users;
    struct mapping *next;
} mapping_t;

/** A path to fetch by: one end of it. */
typedef struct pipe_end {
    bool made;
    uint32_t node, life;
    uint64_t peer; /**< the node's number for the other end's */
    bool left;     /**< no job is begun any more */
    bool unmapped; /**< the core gave it up, if it is the receiver's */
    bool heard;    /**< the other end said so */
} pipe_end_t;

typedef struct sim_pipe {
    kvf_world_t *world;
    uint64_t number; /**< also what its invitation says */
    pipe_end_t to, from;
    bool ready;
    struct pipe_job *jobs; /**< all that there ever were, in order */
    struct sim_pipe *next;
} pipe_t;

/** Ranges that come in through it. */
typedef struct pipe_job {
    pipe_t *pipe;
    kvf_verify_t *verify; /**< NULL: it is over for the receiver */
    kvf_serve_t *serve;   /**< NULL: not yet, or no more */
    bool asked;
    bool read; /**< it is over for the sender */
    uint8_t *data;
    uint64_t bytes;
    struct pipe_job *next;
} pipe_job_t;

/** A chunk of a piece. */
typedef struct packet {
    kvf_chunk_t chunk;
    uint32_t from, to, to_life;
    job_t *job;
    kvf_piece_t *piece;
    bool forged; /**< it must not be written */
    uint8_t data[];
} packet_t;

typedef struct world_request request_t;

/** A send or a receive of the engine. */
typedef struct world_op {
    kvf_world_t *world;
    request_t *request;
    bool is_send;
    uint8_t which; /**< receive of its request */
    uint32_t node, life;
    uint64_t id;
    bool opened, ended, released;
    bool given_up; /**< cancelled by its own side, or it has less time than it needs */
    bool holds;    /**< the engine has not given the pages back */
    bool lost;     /**< died with its process */
    kvf_status_t status;
    uint64_t due_us;    /**< its result, at the latest */
    uint64_t paused_us; /**< how long its node had stood still when it was opened */
    uint64_t landed_bytes;
    uint32_t layers; /**< progress was told up to here */
    int64_t n_blocks[WORLD_GROUPS];
    int64_t n_known[WORLD_GROUPS]; /**< of them, that the core was told of */
    int32_t slots[WORLD_GROUPS][WORLD_BLOCKS];
    struct world_op *next; /**< of all that were opened */
} op_t;

/** A part of a prefill. */
typedef struct world_step {
    int64_t token_end;
    uint32_t layer_first, layer_end;
} step_t;

/** A prefill, and what is fetched of it. */
struct world_request {
    uint64_t tag; /**< its bytes follow from it */
    kvf_dice_t dice;
    char id[16];
    bool probe;
    bool clean; /**< nothing of its own keeps it from success */
    uint32_t context, n_recvs, generation[2];
    kvf_lengths_t lengths;
    int64_t cached_tokens;
    bool chunked, bind_stale, early_ticket, no_tokens, skip_holes, pull;
    step_t steps[16];
    uint32_t n_steps, step;
    uint32_t fails_at; /**< the prefill is lost at this step */
    uint32_t tries;
    bool has_ticket;
    char ticket[KVF_TICKET_BYTES];
    op_t send, recvs[2];
};

/** A page, as its engine sees it. */
typedef struct owned_page {
    op_t *owner;   /**< may use it, or may still have it touched */
    bool poisoned; /**< the released event listed it */
} owned_page_t;

typedef struct world_memory world_memory_t;

/** A machine, and the process on it. */
typedef struct world_node {
    kvf_world_t *world;
    uint32_t idx;
    uint32_t life; /**< of the process; a new one has another */
    char address[24];
    char name[16];
    kvf_agent_config_t config;
    kvf_alloc_t alloc;
    struct world_memory *memory_list;
    kvf_core_t *core; /**< NULL while it is down */
    kvf_pages_t *pages[WORLD_GROUPS];
    uint8_t *bytes[WORLD_GROUPS];
    owned_page_t *owned[WORLD_GROUPS];
    int64_t n_pages;
    bool lends;  /**< others may map its pools, and it theirs */
    bool device; /**< what lands is copied to its pages when it is verified */
    bool silent; /**< it is down, and its machine too: nobody says so to others */
    bool paused;
    bool leaving; /**< it ends in order */
    uint64_t paused_us, paused_since_us;
    uint64_t wake_us; /**< the earliest EVENT_WAKE that is under way */
    event_t *held;    /**< while it stands still */
    size_t n_held, held_room;
    path_t *paths;
    job_t *jobs;
    mapping_t *mappings;
    uint64_t until_us[KVF_FAULTS]; /**< faults of a node that last */
    uint32_t rate[KVF_FAULTS];     /**< per mille */
} node_t;

struct kvf_world {
    arena_t arena;
    const kvf_script_t *script;
    kvf_outcome_t *outcome;
    FILE *trace;
    kvf_dice_t dice;
    uint64_t now_us;
    uint64_t next_order;
    event_t *heap;
    size_t n_events, room;
    kvf_layout_t layout;
    uint64_t page_bytes[WORLD_GROUPS];
    uint64_t granule_bytes[WORLD_GROUPS];
    uint32_t n_layers;
    node_t nodes[WORLD_NODES];
    uint32_t n_nodes;
    uint64_t parted_us[WORLD_NODES][WORLD_NODES]; /**< until then nothing passes */
    wire_t **wires;
    size_t n_wires, wires_room;
    op_t *ops;
    bool fetches; /**< nodes do not map pools, but fetch from them */
    pipe_t *pipes;
    uint64_t n_pipes;
    uint32_t n_lives; /**< so far, of all nodes */
    uint64_t n_tags;
    uint32_t n_acts; /**< of engines, that are still to come */
    uint64_t heartbeat_us;
    uint64_t end_us; /**< of the faults */
    bool quiet;      /**< no faults any more */
    bool settled;    /**< and enough time has passed for all to have noticed */
    bool probed;
    bool words_flipped;
};

/* ---- world.c ---- */
/** Make something happen. */
void world_push(kvf_world_t *world, event_t event);
/** A check failed. The first one counts. */
void world_fail(kvf_world_t *world, const char *fmt, ...) KVF_PRINTF(2, 3);
bool world_failed(const kvf_world_t *world);
/** A line of the trace. */
void world_note(kvf_world_t *world, const char *fmt, ...) KVF_PRINTF(2, 3);
/** Make a number part of the run's hash. */
void world_hash(kvf_world_t *world, uint64_t x);
/** Do an event, without the turn that follows it. */
void world_do(kvf_world_t *world, const event_t *event);

/* ---- node.c ---- */
/** Draw the nodes' configurations and start all. */
void nodes_start(kvf_world_t *world);
/** Free everything of all of them, without a word to the cores. */
void nodes_wipe(kvf_world_t *world);
/** Start a process on a machine that has none. */
void node_start(node_t *node);
/** As kill -9. */
void node_kill(node_t *node);
/** End in order what has nothing to do any more, and look for memory that it forgot. */
void node_end(node_t *node);
/** What the agent's loop does when something has happened. */
void node_turn(node_t *node);
void node_pause(node_t *node);
void node_resume(node_t *node);
/** Is this fault on now? Throws the dice. */
bool node_hit(node_t *node, kvf_fault_t fault);
/** @return How long a job of its own takes now. */
uint64_t node_work_us(node_t *node);
/** @return The first byte of a page. */
uint8_t *node_page(const node_t *node, uint32_t group_idx, int32_t slot);

/* ---- wire.c ---- */
kvf_status_t wire_dial(void *ctx, const char *address, uint64_t *conn_p, kvf_detail_t *detail);
void wire_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes);
void wire_close(void *ctx, uint64_t conn);
void wire_event(node_t *node, const event_t *event);
/** A connection reaches a machine. */
void wire_arrive(kvf_world_t *world, const event_t *event);
/** Break the connections of two nodes that are older than a time; their ends notice it within
 * another. */
void wire_cut(kvf_world_t *world, uint32_t a, uint32_t b, uint64_t older_us, uint64_t noticed_us,
              kvf_dice_t *dice);
/** End connections whose frames may have no right beginning any more. */
void wire_cut_flipped(kvf_world_t *world);
/** The process has gone: its kernel closes its connections, or nobody does. */
void wire_drop(node_t *node, kvf_dice_t *dice);

/* ---- carry.c ---- */
kvf_status_t carry_connect(void *ctx, uint64_t peer, uint32_t mover_idx, const void *address,
                           size_t bytes, kvf_detail_t *detail);
void carry_disconnect(void *ctx, uint64_t peer, uint32_t mover_idx);
kvf_status_t carry_post(void *ctx, kvf_window_t *window);
void carry_event(kvf_world_t *world, const event_t *event);
/** Break the data paths of two nodes. */
void carry_break(kvf_world_t *world, uint32_t a, uint32_t b, kvf_dice_t *dice);
/** The process has gone. */
void carry_drop(node_t *node);

/* ---- lend.c ---- */
kvf_status_t lend_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                      const int64_t *n_pages, kvf_detail_t *detail);
void lend_unmap(void *ctx, uint64_t peer);
void lend_digest(void *ctx, kvf_window_t *window);
/** A job begins, which copies within this time. @return false: a violation. */
bool lend_use(node_t *node, kvf_verify_t *job, uint64_t delay_us);
/** It is done. */
void lend_unuse(const kvf_verify_t *job);
void lend_event(node_t *node, const event_t *event);
/** The process has gone. */
void lend_drop(node_t *node);

/* ---- fetch.c ---- */
kvf_status_t fetch_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                       const int64_t *n_pages, kvf_detail_t *detail);
void fetch_unmap(void *ctx, uint64_t peer);
kvf_status_t fetch_join(void *ctx, uint64_t peer, uint64_t number, const void *invitation,
                        size_t bytes, kvf_detail_t *detail);
void fetch_leave(void *ctx, uint64_t peer, uint64_t number, bool own, const char *why);
void fetch_serve(void *ctx, kvf_serve_t *serve);
void fetch_evict(void *ctx, uint64_t peer);
/** A job begins to wait for its bytes. @return false: there is no path. */
bool fetch_use(node_t *node, kvf_verify_t *verify);
void fetch_event(node_t *node, const event_t *event);
void fetch_job_event(node_t *node, const event_t *event);
/** The process has gone. */
void fetch_drop(node_t *node);

/* ---- faults.c ---- */
void fault_begin(kvf_world_t *world, kvf_fault_t fault, uint64_t seed);
/** No more faults: everything is whole again. */
void faults_end(kvf_world_t *world);

/* ---- engine.c ---- */
/** A new request of the script. */
void engine_request(kvf_world_t *world, uint64_t seed);
/** Requests that must succeed. */
void engine_probe(kvf_world_t *world);
void engine_event(node_t *node, const event_t *event);
/** What an engine does later. */
typedef enum engine_act {
    ACT_SEND_OPEN,
    ACT_STEP,
    ACT_RECV_OPEN,
    ACT_CANCEL_SEND,
    ACT_CANCEL_RECV,
    ACT_GIVE_SEND,
    ACT_GIVE_RECV
} engine_act_t;
void engine_later(request_t *request, engine_act_t act, uint32_t which, uint32_t node,
                  uint32_t life, uint64_t delay_us);
/** A window of this transfer failed: its send ends at once. */
void engine_moved_badly(node_t *node, const kvf_transfer_id_t *transfer);
/** The process died: what it had is gone. */
void engine_drop(node_t *node);
/** The process is about to end in order: its engine gives everything back. */
void engine_give_all(node_t *node);
/** @return Whether every request has come to its end. */
bool engine_done(const kvf_world_t *world);
/** Names an operation that waits, if there is one. */
void engine_check_end(kvf_world_t *world);

/* ---- hold.c: pages of requests, and what is in them ---- */
/** @return Whether the next query sees a token of that block. */
bool hold_is_live(const request_t *request, uint32_t group_idx, int64_t ordinal);
/** Whether a receive wants that block moved. */
bool hold_is_wanted(const request_t *request, uint32_t group_idx, int64_t ordinal);
/** Take pages for an operation: the live blocks in front of token_end, and with `scratch` those
 * behind the prompt. @return Whether there were enough; otherwise nothing was taken. */
bool hold_take(op_t *op, int64_t token_end, int64_t capacity_tokens);
/** Write the bytes of the request into pages. */
void hold_fill(op_t *op, uint32_t group_idx, int64_t ordinal, uint32_t layer_first,
               uint32_t layer_end);
/** Compare what lies in the pages of a receive with what its request says. */
void hold_check(op_t *op, const char *when);
/** The engine lets the pages go. They are its own until the released event, too. */
void hold_give(op_t *op);
/** They may be anybody's from now on, if both have happened. */
void hold_disown(op_t *op);
/** The core knows the tables as they are now. */
void hold_known(op_t *op);
/** May this piece be read now? */
void hold_check_reading(node_t *node, const kvf_piece_t *piece);
/** May these bytes of a node's pages be read now, to be sent? */
void hold_check_source(node_t *node, const uint8_t *source, uint64_t bytes);
/** May this item of a job be written now, with these bytes? */
bool hold_check_fetched(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item,
                        const uint8_t *data);
/** May this item of a job be copied now? @return Whether it can be: its pages are there. */
bool hold_check_copy(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item);
/** May what landed for this item go to its page now? */
bool hold_check_store(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item);
/** May this chunk be written there now? */
void hold_check_landing(node_t *node, const packet_t *packet);

/* ---- verdict.c ---- */
/** The callback of all operations; ctx is the op_t. */
void verdict_event(void *ctx, const kvf_event_t *event);
/** @return Whether no fault has been so far. */
bool verdict_unharmed(const kvf_world_t *world);

#endif
