/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_RUN_H
#define KVF_TOOLS_REPLAY_RUN_H

/**
 * @file
 * The orchestrator of a replay: takes each request of a trace to a prefill node and then, with what
 * that one answered, to a decode node.
 */

#include "kvmgr/base/clock.h"
#include "tools/replay/score.h"
#include "tools/replay/trace.h"

#include <signal.h>

/** Base URLs of the nodes of one role, without a slash at the end. Borrowed. */
typedef struct kvf_replay_nodes {
    const char *const *urls;
    size_t n;
} kvf_replay_nodes_t;

typedef struct kvf_replay_config {
    kvf_replay_nodes_t prefill;
    kvf_replay_nodes_t decode;
    uint32_t concurrency; /**< most requests under way at once, > 0 */
    double speed; /**< > 0: a request starts timestamp / speed after the first; 0: when there is a
                     place */
    uint32_t draft_tokens; /**< that each request asks for */
    bool early_ticket;     /**< ask for tickets before prefills have ended */
    uint64_t timeout_us;   /**< for each of the two steps of a request, pauses after 429 included */
    const volatile sig_atomic_t *stop; /**< not 0: start nothing more */
    /** A request failed; texts are borrowed for the call. */
    void (*failed)(void *ctx, const kvf_trace_request_t *request, const char *request_id,
                   const char *code, const char *message);
    /** Called often: how many requests have ended so far. */
    void (*progress)(void *ctx, uint64_t ended);
    void *ctx;
} kvf_replay_config_t;

/**
 * Ask every node whether it is ready.
 *
 * @return KVF_OK; KVF_ERR_IO (the text names the first node that is not, why, and what to do);
 * KVF_ERR_NO_MEMORY.
 * @cost blocks, up to 5 seconds a node
 */
KVF_CHECK kvf_status_t kvf_replay_check_nodes(const kvf_replay_config_t *config,
                                              const kvf_alloc_t *alloc, kvf_detail_t *detail);

/**
 * Replay a trace. Request k goes to prefill node k mod n and decode node (k div n) mod m: each gets
 * its share, and every pair of nodes meets.
 *
 * @param score  Added to, also when the run ends with an error.
 * @return KVF_OK: every request that was started has ended, well or not; KVF_ERR_NO_MEMORY.
 * @cost blocks for the whole run
 */
KVF_CHECK kvf_status_t kvf_replay_run(const kvf_replay_config_t *config, const kvf_trace_t *trace,
                                      const kvf_alloc_t *alloc, kvf_score_t *score);

#endif
