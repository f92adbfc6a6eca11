/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MAPPINGS_H
#define KVF_TESTS_MAPPINGS_H

/**
 * @file
 * The pools of a cluster's nodes, mapped by each other: what mover/mapped does between processes.
 * The memory of a node outlives it as long as somebody may read it.
 */

#include "cluster.h"

/** Where a node's pools are to be had: what its hello says. */
typedef struct mappings_address {
    uint64_t number; /**< the node's */
    uint64_t life;
} mappings_address_t;

/** NULL is allowed. */
void mappings_destroy(mappings_t *m);
mappings_t *mappings_create(void);

/** See kvf_core_out_t. The owner is asked at once, if it runs. */
kvf_status_t mappings_map(mappings_t *m, node_t *node, uint64_t peer, const void *address,
                          size_t bytes, const int64_t *n_pages, kvf_detail_t *detail);
void mappings_unmap(mappings_t *m, const node_t *node, uint64_t peer);

/** Tell a node what has happened to its own mappings and those of its pools. @return Whether there
 * was something. */
bool mappings_step(mappings_t *m, const node_t *node);

/** A copy job begins to use a mapping, which must be there. It comes back by mappings_run(). */
void mappings_use(mappings_t *m, const node_t *node, kvf_verify_t *job);
/** Do a job, and report it. */
void mappings_run(node_t *node, kvf_verify_t *job);

/** A node is gone: its mappings are, too. */
void mappings_drop(mappings_t *m, const node_t *node);
/** Free a node's memory when nobody can read it any more: with the cluster. */
void mappings_keep(mappings_t *m, uint8_t *memory);

#endif
