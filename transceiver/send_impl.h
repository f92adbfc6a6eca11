/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_SEND_IMPL_H
#define KVF_SEND_IMPL_H

/**
 * @file
 * The send as its parts see it: send.c (the caller's side and the end), send_request.c (the
 * receiver's messages), send_move.c (windows and commits).
 */

#include "transceiver/core_impl.h"

typedef struct kvf_layer_range {
    uint32_t first;
    uint32_t end;
} kvf_layer_range_t;

typedef struct kvf_send_op {
    kvf_op_t op;
    kvf_lengths_t lengths;
    kvf_table_t tables[KVF_MAX_GROUPS]; /* copies; only what is live for the prompt matters */
    kvf_wanted_t live[KVF_MAX_GROUPS];
    bool reading; /* read_begin was called for every live page */

    uint64_t layers[KVF_MAX_GROUPS][KVF_MAX_GROUP_LAYERS / 64]; /* made ready, by local index */
    uint32_t n_layers;                                          /* made ready */
    kvf_layer_range_t *ranges; /* in the order in which they were made ready */
    size_t n_ranges;
    size_t range_idx; /* the one that is being moved */
    kvf_plan_cursor_t cursor;

    bool finished;
    uint64_t finished_us;
    int32_t *tokens; /* first tokens, then drafts */
    size_t n_first_tokens, n_draft_tokens;
    uint8_t *data;
    size_t data_bytes;

    bool claimed; /* its ticket was used */
    bool planned; /* the request is complete and paired */
    bool final_sent;
    kvf_transfer_id_t transfer;
    uint64_t grant_key;
    uint64_t claimed_us;
    kvf_plan_t plan;
    uint32_t n_posted; /* windows */

    bool moving; /* in the core's list */
    struct kvf_send_op *moving_next, *moving_prev;
} kvf_send_op_t;

static inline kvf_send_op_t *kvf_send_of(kvf_op_t *op) {
    return (kvf_send_op_t *)op;
}

/** Give it its result, tell the peer if `tell`, and return the pages when nothing reads them any
 * more. */
void kvf_send_end(kvf_send_op_t *send, kvf_status_t status, const char *message, bool tell);
/** After the result: give the pages back if nothing is posted. Called again when a window is done.
 */
void kvf_send_finish_off(kvf_send_op_t *send);
/** Tell the receiver that its pages are out of our reach: our last access has completed, or there
 * was none. */
void kvf_send_tell_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
/** There is new work for the mover, or perhaps the end of it. */
void kvf_send_wake(kvf_send_op_t *send);
/** It has nothing to post, or has ended. */
void kvf_send_leave_moving(kvf_send_op_t *send);

#endif
