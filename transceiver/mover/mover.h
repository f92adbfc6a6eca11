/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_H
#define KVF_MOVER_H

/**
 * @file
 * What carries bytes from pages of this agent into pages of a peer. One table; tcp, ucx and sim are
 * rows of it.
 *
 * The core cuts a transfer into windows of pieces; a mover carries a window and says when it is
 * done. It knows nothing about requests, grants or ordinals beyond the numbers that it takes along
 * for the other end's check.
 */

#include "kernels/copy.h"
#include "kvmgr/base/alloc.h"
#include "kvmgr/base/log.h"
#include "proto/chunk.h"
#include "transceiver/mover/crew.h"

#include <string.h>

/** One copy: consecutive bytes of one page. */
typedef struct kvf_piece {
    const uint8_t *source; /**< memory of this agent; unchanged until the window is done. Its driver
                              may put a copy that the CPU reaches in its place */
    uint64_t bytes;        /**< > 0 */
    uint64_t offset;       /**< inside the slot, same on both sides */
    int64_t ordinal;
    uint64_t generation; /**< of the destination page */
    uint32_t group_idx;
    int32_t slot;        /**< the destination's */
    int32_t source_slot; /**< where source lies in the pool of this agent */
    uint64_t digest;     /**< out: kvf_digest() of the bytes, written before the window is done;
                            not 0: it was made before */
} kvf_piece_t;

/** What is posted at once. The poster owns it, and it stays where it is until done. */
typedef struct kvf_window {
    kvf_job_t job; /**< the driver's while posted */
    kvf_transfer_id_t transfer;
    uint64_t grant_key; /**< the receiver's; goes with every chunk */
    uint64_t peer;
    uint32_t mover_idx; /**< which of the agent's movers carries it */
    kvf_piece_t *pieces;
    uint32_t n_pieces;
    uint64_t bytes; /**< sum over the pieces */
    bool digests;   /**< digests are wanted */
    void *priv;     /**< the mover's while posted */
    uint64_t owner; /**< the poster's, untouched, as is: */
    size_t part_idx;
} kvf_window_t;

/** Where the bytes of a chunk may be written. */
typedef struct kvf_landing {
    uint8_t *at;      /**< its first byte */
    uint64_t *leaves; /**< gets the hashes of the chunk's leaves, as kvf_copy_leaves() makes them;
                         NULL: nobody wants them */
} kvf_landing_t;

/** What a mover calls. Never from inside post; always on the thread that calls progress. */
typedef struct kvf_mover_sink {
    /**
     * A chunk of a peer's piece comes (checked movers only): check its grant, and say where it may
     * be written. That holds until the mover returns, or calls the sink for something else than
     * the places of further chunks; then it asks again. A part of it may be written, and no more
     * follow.
     *
     * @param chunk  Where it wants to go. Not to be trusted.
     * @return KVF_OK; otherwise it was counted and must be dropped.
     */
    kvf_status_t (*place)(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p);
    /** All bytes of that chunk are where place said, and so are the hashes of its leaves. */
    void (*landed)(void *ctx, const kvf_chunk_t *chunk);
    /**
     * A posted window is done: no operation of it is outstanding at this end. Exactly once per
     * accepted post.
     *
     * @param status  KVF_OK: digests are written and every byte was handed over; or
     * KVF_ERR_PEER_LOST, KVF_ERR_IO.
     */
    void (*moved)(void *ctx, kvf_window_t *window, kvf_status_t status);
    /** The path to a peer broke; its windows are (or will be) reported by moved. At most once per
     * connect. */
    void (*broken)(void *ctx, uint64_t peer, const char *why);
    void *ctx;
} kvf_mover_sink_t;

/** Take a chunk whose bytes are all there. @param data  chunk->bytes bytes; borrowed. */
static inline void kvf_mover_land(const kvf_mover_sink_t *sink, const kvf_chunk_t *chunk,
                                  const uint8_t *data) {
    kvf_landing_t landing;
    if (sink->place(sink->ctx, chunk, &landing) != KVF_OK) {
        return;
    }
    if (landing.leaves != NULL) {
        kvf_copy_leaves(landing.at, data, chunk->bytes, landing.leaves);
    } else {
        memcpy(landing.at, data, chunk->bytes);
    }
    sink->landed(sink->ctx, chunk);
}

typedef struct kvf_mover kvf_mover_t;

/** A row. All functions: agent thread only. None blocks. */
typedef struct kvf_mover_ops {
    const char *name;
    /** The other end's handler checks the grant before it copies: revoking a grant is proof that
     * nothing will write any more, and landed bytes are seen by the receiver itself. */
    bool checked;
    /** Everything outstanding is reported by moved during the call. NULL is allowed. */
    void (*destroy)(kvf_mover_t *mover);
    /** Write the address that goes into the hello. @return KVF_OK, or KVF_ERR_RANGE (cap too
     * small). */
    kvf_status_t (*address)(kvf_mover_t *mover, void *buf, size_t cap, size_t *bytes_p);
    /** Make a path to a peer.
     * @param peer  The caller's number, not 0, not connected now.
     * @return KVF_OK (a path that turns out not to work is told by broken); KVF_ERR_INCOMPATIBLE
     * (versions or transports do not fit); KVF_ERR_INVALID (not an address); KVF_ERR_NO_MEMORY;
     * KVF_ERR_IO. */
    kvf_status_t (*connect)(kvf_mover_t *mover, uint64_t peer, const void *address, size_t bytes,
                            kvf_detail_t *detail);
    /** Give the path up. Windows that are outstanding come back by moved, now or later. Unknown
     * peers are ignored. */
    void (*disconnect)(kvf_mover_t *mover, uint64_t peer);
    /**
     * Start a window.
     *
     * @return KVF_OK: moved follows, once; its OK says handed over, not landed, for checked movers.
     * KVF_ERR_AGAIN: nothing started, post again after a progress. KVF_ERR_PEER_LOST: the path is
     * broken or there is none, nothing started.
     * @cost no allocation, no system call of ours per piece
     */
    kvf_status_t (*post)(kvf_mover_t *mover, kvf_window_t *window);
    /** Advance. Bounded. @return How many things happened. */
    unsigned (*progress)(kvf_mover_t *mover);
    /** @return A descriptor that becomes readable when progress has work after arm, or -1: poll by
     * time. */
    int (*fd)(kvf_mover_t *mover);
    /** @return true: sleeping on the descriptor is safe; false: call progress first. */
    bool (*arm)(kvf_mover_t *mover);
    /** @return Longest sleep in microseconds while something is in flight, KVF_NEVER when wake-ups
     * can be relied on. */
    uint64_t (*max_sleep_us)(kvf_mover_t *mover);
} kvf_mover_ops_t;

/** First member of every mover. */
struct kvf_mover {
    const kvf_mover_ops_t *ops;
};

#endif
