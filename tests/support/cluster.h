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
#include "proto/message.h"
#include "transceiver/core.h"
#include "transceiver/mover/sim.h"

#define CLUSTER_NODES 4

typedef struct cluster cluster_t;
typedef struct mapping mapping_t;
typedef struct mappings mappings_t;
typedef struct paths paths_t;

typedef struct node {
    cluster_t *cluster;
    uint64_t number; /**< 1, 2, ... also of its mover; its address is "127.0.0.1:<number>" */
    uint64_t life;   /**< another one after each start */
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
    bool dead;          /**< killed: nothing is delivered to it, its connections are closed */
    bool stopped;       /**< frozen: nothing is delivered to it, its connections stay */
    kvf_job_t *jobs;    /**< of kvf_verify_t, the last one first */
    kvf_job_t *digests; /**< of kvf_window_t, likewise */
    kvf_log_t log;
    int warnings;       /**< and errors, lines of the log */
    char warning[1024]; /**< the last one */
} node_t;

typedef struct cluster_options {
    bool one_sided;       /**< the mover is not checked */
    uint64_t chunk_bytes; /**< 0 = 4096 */
    bool mapped;          /**< nodes map each other's pools; so they do under KVF_TEST_MAPPED */
    bool fetch;  /**< nodes fetch from each other through paths; so they do under KVF_TEST_FETCH */
    bool answer; /**< and say so when the other end of a path is there */
    bool device; /**< pages are a device's: what lands is copied to them when it is verified; so it
                    is under KVF_TEST_DEVICE */
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
/** Keep chunks, and jobs that copy from mapped pools, from getting on. */
void cluster_hold_chunks(cluster_t *cluster, bool hold);
/** Keep digests of windows from being made. */
void cluster_hold_digests(cluster_t *cluster, bool hold);
/** Make those of the window that was handed over first. */
void node_run_digest(node_t *node);
/** This test is about chunks of the ordinary mover: leave it out where nodes map each other. */
void cluster_needs_chunks(void);
/** @return Whether nodes map each other's pools, or fetch from them: no chunks come. */
bool cluster_is_mapped(const cluster_t *cluster);
/** What becomes of attempts to map pools, from now on. */
typedef enum map_fate { MAP_GOES_WELL, MAP_IS_REFUSED, MAP_FAILS, MAP_SILENT } map_fate_t;
void cluster_map_fate(cluster_t *cluster, map_fate_t fate);
/** Let owners of pools not notice that mappings are gone. */
void cluster_hold_returned(cluster_t *cluster, bool hold);
/** @return How many copy jobs the node has; do the idx-th, counted from the latest, and report it.
 */
size_t node_jobs(const node_t *node);
void node_run_job(node_t *node, size_t idx);
kvf_sim_net_t *cluster_net(cluster_t *cluster);
mappings_t *cluster_mappings(cluster_t *cluster);
paths_t *cluster_paths(cluster_t *cluster);
/** @return The node of that number. */
node_t *cluster_find(cluster_t *cluster, uint64_t number);
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
/** Change whole messages about transfers on their way, also their length. */
void cluster_on_message(cluster_t *cluster,
                        void (*fn)(kvf_frame_type_t type, ProtobufCMessage *message));
/** Connect as a stranger and send bytes. @return The connection's number. */
uint64_t cluster_stranger(node_t *node, const void *data, size_t bytes);
/** @return Whether the node has closed it. */
bool cluster_stranger_closed(cluster_t *cluster, uint64_t conn);

/** @return The bytes of one of the node's pages; a slot outside its pool fails the test. */
uint8_t *node_page(const node_t *node, uint32_t group_idx, int32_t slot);

#endif
