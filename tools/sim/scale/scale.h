/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SCALE_H
#define KVF_TOOLS_SCALE_H

/**
 * @file
 * A trace through a cluster of hundreds of nodes: the real cores, with made-up time, links and
 * engines. Nothing goes wrong here and no page has bytes; what comes out is how long the transfer
 * keeps a request waiting, and what the cores cost.
 */

#include "kvmgr/layout.h"
#include "tools/replay/samples.h"
#include "tools/replay/trace.h"
#include "transceiver/core.h"

typedef struct kvf_scale_options {
    uint32_t n_context;
    uint32_t n_generation;
    const char *model; /**< a preset */
    uint32_t tokens_per_block;
    int64_t pool_pages;  /**< of each layer group of each node */
    uint64_t gbit;       /**< of a node's link, each way, in 10^9 bits a second */
    uint64_t latency_us; /**< of a message, a copy's completion, and the orchestrator's step */
    uint64_t prefill_tokens_s; /**< of a context node, which computes one prompt at a time */
    int64_t chunk_tokens;      /**< after so many a part of the prompt is ready */
    uint64_t token_us;         /**< a generated token; as long a request keeps its pages */
    uint64_t heartbeat_ms;
    double speed; /**< of the trace's clock */
    bool early;   /**< the ticket goes out when prefill begins */
} kvf_scale_options_t;

typedef struct kvf_scale_result {
    uint64_t n_ok, n_failed;
    char why[KVF_DETAIL_BYTES]; /**< of the first failure */
    kvf_samples_t added_us;     /**< from the end of prefill to the last verified byte */
    kvf_samples_t transfer_us;  /**< from the receive's opening to the last verified byte */
    kvf_samples_t ideal_us;     /**< the bytes alone on an empty link */
    kvf_samples_t prefill_us;   /**< from arrival to the end of prefill, its queue included */
    uint64_t bytes, pages, pieces;
    uint64_t messages, message_bytes; /**< on control connections */
    uint64_t events;
    uint64_t virtual_us;
    uint64_t core_ns;        /**< of processor time inside the cores */
    uint64_t most_in_flight; /**< receives at once, all nodes together */
    uint64_t peak_bytes;     /**< of the cores' memory, all nodes together, pages' records apart */
    uint64_t idle_bytes;     /**< of it at the end, when no transfer is left */
    uint64_t page_bytes;     /**< the pages' records */
    uint64_t n_peers;        /**< conversations at the end, both ends counted */
} kvf_scale_result_t;

/**
 * Run a trace to its end.
 *
 * @param trace         With one request or more. One that is earlier than those before it comes
 * right behind them.
 * @param[out] result_p  kvf_scale_cleanup() it, whatever is returned.
 * @return KVF_OK, also when requests failed; KVF_ERR_TOO_LARGE (a pool cannot hold one of the
 * prompts, or this machine the pages' records); KVF_ERR_RANGE (times beyond the clock's end);
 * KVF_ERR_UNKNOWN (model); KVF_ERR_NO_MEMORY; KVF_ERR_INTERNAL (the cluster does not come
 * to rest).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_scale_run(const kvf_scale_options_t *options, const kvf_trace_t *trace,
                                     kvf_scale_result_t *result_p, kvf_detail_t *detail);
void kvf_scale_cleanup(kvf_scale_result_t *result);

/** `kvferry sim --scale`. @return The exit code. */
int kvf_scale_main(int argc, char **argv);

#endif
