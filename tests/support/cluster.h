/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CLUSTER_H
#define KVF_TESTS_CLUSTER_H

/**
 * @file
 * Several cores in one process: virtual time, in-process connections, sim movers, pages in ordinary
 * memory. The third driver of the core beside the agent's loop: nothing happens unless the test
 * asks for it.
 */

#include "kvmgr/base/alloc.h"
#include "transceiver/core.h"
#include "transceiver/mover/sim.h"

#define CLUSTER_NODES 4

typedef struct cluster cluster_t;

/** What a test saw of one send or receive. */
typedef struct watch {
    int progress, results, releases; /**< events */
    kvf_status_t status;
    char message[KVF_DETAIL_BYTES];
    uint64_t bytes, pages, pieces, quarantine_us;
    uint32_t layers; /**< progress reached this global layer */
    size_t n_missing, n_poisoned;
    kvf_page_ref_t missing[64];
    int32_t first_tokens[8];
    size_t n_first_tokens, n_draft_tokens;
} watch_t;

typedef struct node {
    cluster_t *cluster;
    uint64_t number; /**< 1, 2, ... also of its mover; its address is "127.0.0.1:<number>" */
    kvf_alloc_fail_t alloc;
    kvf_layout_t layout;
    kvf_agent_config_t config;
    kvf_core_t *core;
    kvf_mover_t *mover;
    kvf_pages_t *pages[KVF_MAX_GROUPS];
    uint8_t *memory[KVF_MAX_GROUPS];
    int64_t n_pages;
    uint64_t ahead_us; /**< its clock is ahead of the cluster's; set it while nothing runs */
    char address[KVF_ADDRESS_BYTES];
    bool dead;    /**< killed: nothing is delivered to it, its connections are closed */
    bool stopped; /**< frozen: nothing is delivered to it, its connections stay */
    kvf_verify_t *jobs;
    kvf_log_t log;
    int warnings;       /**< and errors, lines of the log */
    char warning[1024]; /**< the last one */
} node_t;

typedef struct cluster_options {
    bool one_sided;       /**< the mover is not checked */
    uint64_t chunk_bytes; /**< 0 = 4096 */
} cluster_options_t;

cluster_t *cluster_create(const cluster_options_t *options);
/** Fails the test when memory of a core was leaked. */
void cluster_destroy(cluster_t *cluster);

/** A layout of two groups: "full" (layers 1, 3) and "swa" (layers 0, 2, 4; window 24, blocks of 8
 * tokens). */
kvf_layout_t cluster_layout(void);

/** Make and start a node. @param config  NULL, or changes something before the core is made. */
node_t *cluster_node(cluster_t *cluster, const kvf_layout_t *layout, int64_t n_pages,
                     void (*config)(kvf_agent_config_t *config));
/** The same node again, after cluster_kill(): new incarnation, same address. */
void cluster_restart(node_t *node);
/** As kill -9: its connections break, chunks under way stay under way. Its core and pages are gone.
 */
void cluster_kill(node_t *node);

/** Deliver everything that is under way until nothing is left but time; chunks too unless
 * hold_chunks. */
void cluster_run(cluster_t *cluster);
/** Let time pass, in steps, delivering all along. */
void cluster_advance(cluster_t *cluster, uint64_t us);
/** What the next random numbers follow from: two nodes made after the same seed have one
 * incarnation. */
void cluster_seed(cluster_t *cluster, uint8_t seed);
void cluster_hold_chunks(cluster_t *cluster, bool hold);
kvf_sim_net_t *cluster_net(cluster_t *cluster);
uint64_t cluster_now(const cluster_t *cluster);
/** What becomes of a connection that breaks. */
typedef enum cut {
    CUT_LOST, /**< what is under way is lost, both ends notice */
    CUT_READ, /**< what is under way is read before they notice */
    /** The end that was dialled does not notice, and reads what was under way to it 60 ms later. */
    CUT_UNSEEN,
    CUT_UNSEEN_BY_DIALLER, /**< the dialling end, likewise */
    CUTS,
    CUT_NOT /**< nothing: only a place to stop at */
} cut_t;

/** Break every connection (CUT_LOST), and go on. */
void cluster_cut(cluster_t *cluster);
/** Break every connection with the n-th write from now on. */
void cluster_cut_at(cluster_t *cluster, uint64_t write, cut_t how);
/** As cluster_run(), but stop as soon as that has happened. */
void cluster_run_to_cut(cluster_t *cluster);
/** @return Whether it has. */
bool cluster_was_cut(const cluster_t *cluster);
/** Change control bytes on their way: called for every write. */
void cluster_on_write(cluster_t *cluster, void (*fn)(uint8_t *data, size_t bytes));
/** Connect as a stranger and send bytes. @return The connection's number. */
uint64_t cluster_stranger(node_t *node, const void *data, size_t bytes);
/** @return Whether the node has closed it. */
bool cluster_stranger_closed(cluster_t *cluster, uint64_t conn);

/** The callback whose ctx is a watch_t. */
void watch_event(void *ctx, const kvf_event_t *event);

/** The byte at a place of a page: a function of content, group, ordinal and offset. */
uint8_t pattern(uint64_t content, uint32_t group_idx, int64_t ordinal, uint64_t offset);
/** Take pages for the blocks of a prompt that are live, -1 elsewhere, and fill them. content 0:
 * leave them zero. */
void node_take(node_t *node, int64_t prompt, uint64_t content, int32_t slots[KVF_MAX_GROUPS][64],
               kvf_table_t tables[KVF_MAX_GROUPS]);
/** Give them back. */
void node_give(node_t *node, kvf_table_t tables[KVF_MAX_GROUPS]);
/** @return Bytes of live blocks that do not hold that content. */
uint64_t node_wrong(node_t *node, int64_t prompt, uint64_t content,
                    kvf_table_t tables[KVF_MAX_GROUPS]);
/** @return Whether every page of the node is free and the audit passes. */
bool node_clean(const node_t *node);

/** Open a send whose layers are all ready and that is finished. */
kvf_status_t node_offer(node_t *node, const char *request_id, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        char ticket[KVF_TICKET_BYTES]);
/** @return Who moves in this run of the tests: the receiver where KVF_TEST_PULL is set. */
kvf_direction_t cluster_direction(void);
/** Open a receive with a ticket. */
kvf_status_t node_fetch(node_t *node, const char *request_id, const char *ticket, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        kvf_detail_t *detail);

#endif
