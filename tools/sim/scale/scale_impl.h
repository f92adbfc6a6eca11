/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SCALE_IMPL_H
#define KVF_TOOLS_SCALE_IMPL_H

/**
 * @file
 * The parts of a run: scale.c (time, nodes), net.c (connections, links), load.c (requests, and the
 * orchestrator and engines that take them along).
 */

#include "tools/sim/scale/scale.h"

typedef struct scale scale_t;
typedef struct scale_node scale_node_t;
typedef struct load_request load_request_t;

typedef enum scale_kind {
    SCALE_TICK,    /* node: its core has a timer */
    SCALE_MESSAGE, /* wire end: something arrives */
    SCALE_MOVED,   /* node: a window is done */
    SCALE_LOAD     /* request: the next thing that happens to it */
} scale_kind_t;

typedef struct scale_event {
    uint64_t at_ns;
    uint64_t order;
    scale_kind_t kind;
    uint32_t node;
    uint64_t conn; /* message: the end that it comes to; load: the step */
    void *ptr;     /* window, message, request */
} scale_event_t;

/* What is under way to an end of a connection. */
typedef struct scale_message {
    enum { MESSAGE_OPEN, MESSAGE_BYTES, MESSAGE_CLOSE } what;
    uint32_t from; /* the node whose memory the bytes are */
    uint8_t *data;
    size_t bytes;
} scale_message_t;

/* Ends are numbered from 1; the other end of 2k+1 is 2k+2. */
typedef struct scale_end {
    uint32_t node;
    bool open;
    uint64_t last_ns; /* nothing overtakes */
} scale_end_t;

struct scale_node {
    scale_t *scale;
    uint32_t idx;
    char address[32];
    char name[32];
    kvf_alloc_t alloc;
    kvf_agent_config_t config;
    kvf_log_t log;
    kvf_pages_t *pages[KVF_MAX_GROUPS];
    kvf_core_t *core;
    uint64_t tick_ns;       /* of the event that is pushed; KVF_NEVER */
    uint64_t out_ns, in_ns; /* the link is busy until then */
    uint32_t *peers;        /* nodes by the core's number of the peer */
    size_t peers_room;
    kvf_job_t *jobs; /* to be verified */
    /* load.c */
    load_request_t *first, *last; /* that wait for pages */
    uint64_t computes_until_ns;
    uint64_t n_requests;
};

struct scale {
    const kvf_scale_options_t *options;
    kvf_scale_result_t *result;
    kvf_layout_t layout;
    uint32_t n_layers;
    uint64_t now_ns;
    scale_event_t *heap;
    size_t n_events, room;
    uint64_t next_order;
    scale_node_t *nodes;
    uint32_t n_nodes;
    scale_end_t *ends; /* from 1 */
    size_t n_ends, ends_room;
    uint64_t live_bytes;
    uint64_t random;
    load_request_t *requests;
    size_t n_requests, n_done, next_arrival;
    uint64_t n_in_flight;
};

/* scale.c */
void scale_push(scale_t *scale, scale_event_t event);
/** A core has heard of something, or was asked for something: let it act. */
void scale_turn(scale_node_t *node);
void scale_enter(scale_node_t *node); /**< before a call of its core: time, and whose it is */
void scale_leave(scale_node_t *node);

/* net.c */
extern const kvf_core_out_t scale_out; /**< but for ctx: a scale_node_t */
void net_message(scale_t *scale, const scale_event_t *event);
void net_moved(scale_t *scale, const scale_event_t *event);
uint64_t net_bytes_ns(const scale_t *scale, uint64_t bytes); /**< on a link that is free */

/* load.c */
kvf_status_t load_begin(scale_t *scale, const kvf_trace_t *trace, kvf_detail_t *detail);
void load_event(scale_t *scale, const scale_event_t *event);
void load_end(scale_t *scale);

#endif
