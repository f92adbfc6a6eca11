/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RECV_IMPL_H
#define KVF_RECV_IMPL_H

/**
 * @file
 * The receive as its parts see it: recv.c (opening, request), recv_pull.c (pacing), recv_seal.c
 * (chunks, commits, digests), recv_end.c.
 */

#include "transceiver/core_impl.h"

/* A granted page. */
typedef struct recv_entry {
    int64_t ordinal;
    uint64_t generation;
    int32_t slot;
} recv_entry_t;

/* The granted pages of one layer group. What came is tracked in granules: the largest power of two
 * that divides a layer's bytes, at most 4 KiB (a leaf of a digest), one bit each. */
typedef struct recv_group {
    recv_entry_t *entries; /* ascending ordinals */
    size_t n;
    uint64_t granule_bytes;
    size_t words;      /* of 64 granules, per entry */
    uint64_t *landed;  /* bytes are in the page */
    uint64_t *claimed; /* a commit named them */
    uint64_t *leaves;  /* hashes of the granules that landed; NULL: pages are read instead */
    uint8_t *landing;  /* whole blocks of the CPU's, where it does not reach the pages; or NULL */
    size_t granules;   /* per entry */
    size_t sealed[KVF_MAX_GROUP_LAYERS]; /* entries whose layer was verified */
} recv_group_t;

/* A committed range that waits for its bytes, and then for its digest. */
typedef struct recv_commit {
    uint32_t group_idx;
    uint32_t entry_idx;
    uint32_t layer_first_idx;
    uint32_t layer_end_idx;
    int32_t source_slot; /* if the bytes are still to be copied */
    uint64_t digest;
} recv_commit_t;

/* Jobs that the driver may have at once, so that its threads have enough to do. */
#define RECV_JOBS 16

typedef struct kvf_recv_op {
    kvf_op_t op;
    kvf_lengths_t lengths;
    int64_t cached_tokens;
    kvf_holes_t holes;
    kvf_handoff_t handoff;
    uint64_t deadline_us;
    uint64_t grant_key; /* random: only the sender of this transfer knows it */
    uint8_t ticket[KVF_TICKET_MAX_BYTES];
    size_t ticket_bytes;
    char node[KVF_TICKET_FIELD_BYTES + 1]; /* the ticket's instance */
    recv_group_t groups[KVF_MAX_GROUPS];
    bool pull;      /* nothing moves that was not asked for */
    bool granted;   /* write_begin was called for every entry */
    bool requested; /* the peer knows of the grants */
    bool farewell;  /* ended before it was requested; the peer is still to be told */
    bool drained;   /* the peer says that its last access has completed */

    recv_commit_t *commits; /* queue: [first, end) is not in a job yet */
    size_t commits_first, commits_end, commits_room;
    kvf_verify_t *jobs[RECV_JOBS]; /* n_jobs of them: that the driver has */
    uint32_t n_jobs;
    uint64_t wanted_bytes; /* granted */
    uint64_t wanted_pages;
    uint64_t claimed_bytes; /* that commits named */
    uint64_t sealed_bytes;
    /* If it pulls: what is ready at the sender, what it was asked for, and what of that is not
     * verified yet. */
    uint64_t ready_bytes, asked_bytes, open_bytes;

    Kvf__Wire__Final *final; /* taken out of the last commit */
    uint64_t final_us;
    kvf_page_ref_t *missing;
    size_t n_missing;
    uint32_t progress_layer; /* how many of the model's layers, in ascending order, are whole */
    uint32_t reported_layer; /* and were reported */
} kvf_recv_op_t;

static inline kvf_recv_op_t *kvf_recv_of(kvf_op_t *op) {
    return (kvf_recv_op_t *)op;
}

static inline kvf_transfer_id_t kvf_recv_transfer(const kvf_recv_op_t *recv) {
    return (kvf_transfer_id_t){recv->op.core->incarnation, recv->op.id};
}

/** @return The receive of a transfer id, ended or not; NULL when it is not one of ours, or gone. */
kvf_recv_op_t *kvf_recv_find(kvf_core_t *core, const kvf_transfer_id_t *transfer);
/** Take its ticket, of a request of that id. @return KVF_OK, KVF_ERR_FORGED, KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_recv_read_ticket(kvf_recv_op_t *recv, const char *text,
                                            kvf_ticket_t *ticket, kvf_detail_t *detail);
/** It is its ticket's node's from now on: connect to that, if nobody has yet. @return KVF_OK,
 * KVF_ERR_NOT_ALLOWED, KVF_ERR_AGAIN, KVF_ERR_INVALID, KVF_ERR_NO_MEMORY, as kvf_peer_reach(). */
KVF_CHECK kvf_status_t kvf_recv_reach(kvf_recv_op_t *recv, const kvf_ticket_t *ticket,
                                      kvf_detail_t *detail);
/** Its deadline, or the end of its quarantine. */
void kvf_recv_on_timer(kvf_timer_t *timer, void *owner);
/** Entry `i` of a group is used now: have the page ready of one that follows soon. */
void kvf_recv_prefetch(const kvf_recv_op_t *recv, uint32_t g, size_t i);
/** Do something to every granted page. */
void kvf_recv_for_pages(kvf_recv_op_t *recv, void (*fn)(kvf_pages_t *pages, int32_t slot));
/** It was asked for more, more was verified, or it has ended: count, and wait for a turn to ask for
 * more if there is something to ask for. */
void kvf_recv_pace(kvf_recv_op_t *recv);
/** @return Whether all that commits have named was asked for. */
bool kvf_recv_asked_for(const kvf_recv_op_t *recv);
/** Give it its result, tell the peer if `tell`, and return the pages as soon as that is safe. */
void kvf_recv_end(kvf_recv_op_t *recv, kvf_status_t status, const char *message, bool tell);
/** After the result: give the pages back, with proof that nothing writes to them any more, or put
 * them in quarantine. Called again whenever a proof may have come. */
void kvf_recv_settle(kvf_recv_op_t *recv);

#endif
