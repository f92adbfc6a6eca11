/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_PATHS_H
#define KVF_TESTS_PATHS_H

/**
 * @file
 * Paths between a cluster's nodes, by which one fetches from another: what agent_nccl.c does
 * between devices. Bytes go from page to page when a job runs at both ends.
 */

#include "cluster.h"

typedef struct paths paths_t;

/** @param answer  A path is ready when its receiver has heard so (kvf_core_answer()), not by
 * itself.
 */
paths_t *paths_create(bool answer);
/** NULL is allowed. */
void paths_destroy(paths_t *paths);

/** See kvf_core_out_t. */
kvf_status_t paths_map(paths_t *paths, node_t *node, uint64_t peer);
void paths_unmap(paths_t *paths, const node_t *node, uint64_t peer);
kvf_status_t paths_join(paths_t *paths, node_t *node, uint64_t peer, uint64_t number,
                        const void *invitation, size_t bytes);
void paths_joined(paths_t *paths, const node_t *node, uint64_t peer, uint64_t number,
                  const void *answer, size_t bytes);
void paths_leave(paths_t *paths, const node_t *node, uint64_t peer, uint64_t number, bool own);
void paths_serve(paths_t *paths, node_t *node, kvf_serve_t *serve);
void paths_evict(paths_t *paths, const node_t *node, uint64_t peer);

/** A job waits for its bytes; its source is the path. It comes back by paths_run(), or by
 * paths_step(), which takes it out of the node's list. */
void paths_use(paths_t *paths, const node_t *node, kvf_verify_t *job);
/** @return Whether what a job waits for has been asked for, and is being sent. */
bool paths_can_run(const kvf_verify_t *job);
/** Let it come in: both ends are told. */
void paths_run(node_t *node, kvf_verify_t *job);

/** Tell a node what has happened, and ask for what waits. @return Whether there was something. */
bool paths_step(paths_t *paths, node_t *node);

/** A node is about to go: its jobs to send are over. */
void paths_drop(paths_t *paths, const node_t *node);

/** @return How many ends of paths the node has. */
size_t paths_ends(const paths_t *paths, const node_t *node);
/** Let ends of senders keep what they are sending, as a device that is late does. */
void paths_hold_serves(paths_t *paths, bool hold);
/** Let the n-th path fail at the receiver's end, 0 is the first that was made. */
void paths_fail(paths_t *paths, size_t n);

#endif
