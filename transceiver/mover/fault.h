/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_FAULT_H
#define KVF_MOVER_FAULT_H

/**
 * @file
 * A mover that stacks on another and damages what it carries, for tests. Without a plan it changes
 * nothing.
 */

#include "transceiver/mover/mover.h"

typedef struct kvf_mover_fault kvf_mover_fault_t;

/** What to do wrong. Pieces, windows and posts are counted from 1 over the mover's life; 0 = never.
 */
typedef struct kvf_fault_plan {
    uint64_t flip_piece; /**< one bit of this piece's byte flip_offset (its last, if it is shorter)
                            changes on the way: what is carried does not fit its digest; the source
                            stays as it is */
    uint64_t flip_offset;
    uint64_t shift_slot;    /**< this piece goes to the next slot */
    uint64_t shift_ordinal; /**< this piece says that it is the next ordinal */
    uint64_t drop_window;   /**< this window is reported as moved, with digests, and not carried */
    uint64_t fail_post;     /**< this post is refused ... */
    kvf_status_t fail_status; /**< ... with this; an error */
    bool hold; /**< windows that are done are not reported until a plan without hold */
} kvf_fault_plan_t;

/** What it did so far. */
typedef struct kvf_fault_counts {
    uint64_t pieces, windows, posts; /**< seen; windows and pieces of accepted posts only */
    uint64_t held;                   /**< done and not reported now */
} kvf_fault_counts_t;

/**
 * @param sink          Copied: whom the stack serves.
 * @param[out] fault_p  Not usable before kvf_mover_fault_stack().
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_mover_fault_create(const kvf_mover_sink_t *sink,
                                              const kvf_alloc_t *alloc,
                                              kvf_mover_fault_t **fault_p);

/** @return The sink to create the mover below with. */
kvf_mover_sink_t kvf_mover_fault_sink(kvf_mover_fault_t *fault);

/**
 * Put it on top of a mover. NULL below (it could not be created): fault is freed.
 *
 * @param below  Made with kvf_mover_fault_sink(); belongs to the stack from now on.
 * @return The mover to use and to destroy, NULL for NULL. Its name, checked, descriptor and sleeps
 * are those of below.
 */
kvf_mover_t *kvf_mover_fault_stack(kvf_mover_fault_t *fault, kvf_mover_t *below);

/** Change the plan. @param plan  Copied; NULL = no faults. */
void kvf_mover_fault_set(kvf_mover_fault_t *fault, const kvf_fault_plan_t *plan);

kvf_fault_counts_t kvf_mover_fault_counts(const kvf_mover_fault_t *fault);

#endif
