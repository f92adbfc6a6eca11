/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_SEND_IMPL_H
#define KVF_SEND_IMPL_H

/**
 * @file
 * The send as its parts see it: send.c (the caller's side and the end), send_ready.c (tables, and
 * what may be read), send_ahead.c (digests before they are asked for), send_request.c (the
 * receiver's messages), send_move.c (windows and commits).
 */

#include "transceiver/core_impl.h"

/* Digests that are made before they are asked for, part by part. */
typedef struct kvf_ahead {
    size_t part_idx;
    uint64_t *digests; /* of that part, which owns them; NULL: not begun */
    kvf_plan_cursor_t cursor;
    uint32_t n_posted; /* windows of them under way */
    bool listed;       /* in the core's list: */
    struct kvf_send_op *prev, *next;
} kvf_ahead_t;

/* A range that a commit named, for a receiver that fetches it. */
typedef struct kvf_told {
    uint32_t group_idx;
    int32_t slot;
    uint64_t offset; /* inside the slot */
    uint64_t bytes;
} kvf_told_t;

typedef struct kvf_send_op {
    kvf_op_t op;
    kvf_lengths_t lengths;
    kvf_wanted_t live[KVF_MAX_GROUPS];
    /* By ordinal, prompt_blocks entries: the page of a live block, with a read open; or -1. */
    int32_t *slots[KVF_MAX_GROUPS];
    bool offered; /* the pages have not been given back */

    int64_t *ready;         /* tokens that are final, for each of the core's layers */
    kvf_plan_part_t *parts; /* in the order in which they were made ready: */
    size_t n_parts;         /* these may be read now, */
    size_t n_promised;      /* and these, when their fences are reached */
    size_t parts_room;
    uint32_t n_fences; /* that are not reached */
    size_t part_idx;   /* the one that is being moved */
    kvf_plan_cursor_t cursor;
    kvf_ahead_t ahead;

    uint64_t own_deadline_us;   /* for the prefill, then for a receiver to come */
    uint64_t peer_deadline_us;  /* for the receiver to end it */
    uint64_t lease_deadline_us; /* for the receiver to say that it still wants it */
    bool finished;
    uint64_t finished_us;
    int32_t *tokens; /* first tokens, then drafts */
    size_t n_first_tokens, n_draft_tokens;
    uint8_t *data;
    size_t data_bytes;

    bool claimed; /* its ticket was used */
    bool planned; /* the request is complete and paired */
    bool final_sent;
    bool unproven; /* a window failed: what had left of it may still arrive */
    bool drained;  /* the receiver says that it reads our pages no more */
    bool digests;  /* the receiver wants them */
    kvf_transfer_id_t transfer;
    UT_hash_handle hh_transfer; /* in the core's transfers, if it was claimed */
    uint64_t grant_key;
    uint64_t claimed_us;
    kvf_plan_t plan;
    uint32_t n_posted; /* windows */

    kvf_told_t *told; /* n_told of them, in the order of the commits; the first n_fetched */
    size_t n_told;    /* were asked for */
    size_t told_room;
    size_t n_fetched;
    uint32_t n_serving; /* jobs that send some of them */

    bool pull;            /* the receiver asks for what it wants */
    size_t told_parts;    /* it was told that these are ready, */
    uint64_t ready_bytes; /* which bring so many bytes */
    uint64_t asked_bytes; /* what begins in front of this byte of them may be posted */
    uint64_t posted_bytes;
} kvf_send_op_t;

static inline kvf_send_op_t *kvf_send_of(kvf_op_t *op) {
    return (kvf_send_op_t *)op;
}

/** Arm its timer for whichever deadline comes first. */
void kvf_send_arm(kvf_send_op_t *send);
/** Its receiver wants it: that holds for another lease. */
void kvf_send_renew(kvf_send_op_t *send);
/**
 * Take the first tables, which have been checked: pages get their reads, all or none.
 *
 * @param partial  Live entries may be unbound.
 * @return KVF_OK; KVF_ERR_UNCOVERED, KVF_ERR_RANGE, KVF_ERR_INVALID, KVF_ERR_BUSY (the text names
 * group and ordinal); KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_send_bind(kvf_send_op_t *send, const kvf_table_t *tables, bool partial,
                                     kvf_detail_t *detail);
/** Do something to every page that has its read open. */
void kvf_send_for_pages(kvf_send_op_t *send, void (*fn)(kvf_pages_t *pages, int32_t slot));
/** Give it its result, tell the peer if `tell`, and return the pages when nothing reads them any
 * more. */
void kvf_send_end(kvf_send_op_t *send, kvf_status_t status, const char *message, bool tell);
/** After the result: give the pages back if nothing is posted, or put them in quarantine. Called
 * again when a window is done. */
void kvf_send_finish_off(kvf_send_op_t *send);
/** More is ready, and nobody has asked for it: make its digests. */
void kvf_send_ahead(kvf_send_op_t *send);
/** It goes: take it off the list of those that want digests. */
void kvf_send_forget_ahead(kvf_send_op_t *send);
/** A window of such digests is done. */
void kvf_send_on_ahead(kvf_send_op_t *send, kvf_window_t *window);
/** @return Whether the digest of a part's piece was made ahead; then it is in the piece. */
bool kvf_send_knows_digest(const kvf_send_op_t *send, const kvf_plan_part_t *part,
                           kvf_piece_t *piece);
/** @return The send that a peer has claimed for a transfer, ended or not; NULL: none. */
kvf_send_op_t *kvf_send_claimed(kvf_peer_t *peer, const kvf_transfer_id_t *transfer);
/** Remember what a commit is about to name, for a receiver that fetches it (fetch.c). @return
 * false: no memory. */
bool kvf_send_note(kvf_send_op_t *send, const kvf_window_t *window);
/** There is new work for the mover, or perhaps the end of it. */
void kvf_send_wake(kvf_send_op_t *send);

#endif
