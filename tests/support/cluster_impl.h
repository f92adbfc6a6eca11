/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CLUSTER_IMPL_H
#define KVF_TESTS_CLUSTER_IMPL_H

/**
 * @file
 * The cluster's parts: cluster.c (nodes, time, what runs), cluster_wires.c (connections).
 */

#include "cluster.h"

#define MAX_ENDS 512

/* One end of a connection; ends are numbered from 1, the other end of 2k+1 is 2k+2. */
typedef struct end {
    node_t *node; /* NULL: a stranger */
    bool open;
    bool told; /* its node knows of it */
    uint8_t *data;
    size_t bytes; /* waiting to be read by this end */
    bool closing; /* the other end closed: tell after the bytes */
    bool cut;     /* nothing more comes */
    uint64_t deaf_until_us;
} end_t;

struct cluster {
    cluster_options_t options;
    kvf_sim_net_t *net;
    mappings_t *mappings;
    paths_t *paths;
    uint64_t n_lives;
    node_t nodes[CLUSTER_NODES];
    size_t n_nodes;
    end_t ends[MAX_ENDS + 1];
    uint64_t n_ends;
    uint64_t now_us;
    bool hold, hold_digests;
    void (*on_write)(uint8_t *data, size_t bytes);
    void (*on_message)(kvf_frame_type_t type, ProtobufCMessage *message);
    uint64_t writes_to_cut; /* 0: none is to be cut */
    cut_t cut_how;
    bool stop_at_cut;
    uint8_t seed;
};

/** The other end of a connection. */
static inline uint64_t wires_other(uint64_t conn) {
    return conn % 2 == 1 ? conn + 1 : conn - 1;
}

static inline uint64_t node_now(const node_t *node) {
    return node->cluster->now_us + node->ahead_us;
}

/** @return Whether it runs, and is not stopped. */
static inline bool node_runs(const node_t *node) {
    return node != NULL && !node->dead && !node->stopped;
}

/** Actions of a core: see kvf_core_out_t. */
kvf_status_t wires_dial(void *ctx, const char *address, uint64_t *conn_p, kvf_detail_t *detail);
void wires_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes);
void wires_close(void *ctx, uint64_t conn);
/** Tell an end's node what is next. @return Whether there was something. */
bool wires_step(cluster_t *cluster, uint64_t conn);

#endif
