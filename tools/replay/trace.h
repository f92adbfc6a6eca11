/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_TRACE_H
#define KVF_TOOLS_REPLAY_TRACE_H

/**
 * @file
 * A trace of requests, one JSON object a line: `timestamp` (ms), `input_length` and `output_length`
 * (tokens), `hash_ids` (one for each 512 prompt tokens, the last piece may be shorter).
 */

#include "kvmgr/base/alloc.h"

#include <stdio.h>

/** Prompt tokens behind one hash id. Source: the format of the Mooncake traces (FAST'25). */
#define KVF_TRACE_PIECE_TOKENS 512

typedef struct kvf_trace_request {
    uint64_t line;         /**< in the file; 1 is the first */
    uint64_t timestamp_us; /**< since the trace's own zero */
    int64_t input_tokens;  /**< 1 .. KVF_MAX_TOKENS */
    int64_t output_tokens; /**< 0 .. KVF_MAX_TOKENS */
    int64_t *hash_ids;     /**< n_hash_ids = ceil(input_tokens / 512) */
    size_t n_hash_ids;
} kvf_trace_request_t;

typedef struct kvf_trace {
    const kvf_alloc_t *alloc;
    kvf_trace_request_t *requests; /**< in the order of the file */
    size_t n_requests;
    size_t room;
    uint64_t n_invalid; /**< lines that could not be read */
    uint64_t n_skipped; /**< requests with a longer prompt than asked for */
} kvf_trace_t;

/** Which requests of a file are wanted, and who hears about lines that cannot be read. */
typedef struct kvf_trace_want {
    uint64_t limit; /**< stop after so many requests and invalid lines; UINT64_MAX = all */
    int64_t max_input_tokens; /**< skip longer prompts; INT64_MAX = none */
    /** A line that cannot be read; `why` is borrowed for the call. */
    void (*invalid)(void *ctx, uint64_t line, const char *why);
    void *ctx;
} kvf_trace_want_t;

/**
 * Read a trace. An invalid line is told, counted and passed over; empty lines are not requests.
 *
 * @param file          Read to its end, or to the limit.
 * @param[out] trace_p  kvf_trace_cleanup() it. May be without requests.
 * @return KVF_OK, KVF_ERR_IO (the text has the system's reason), KVF_ERR_NO_MEMORY.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_trace_read(FILE *file, const kvf_trace_want_t *want,
                                      const kvf_alloc_t *alloc, kvf_trace_t *trace_p,
                                      kvf_detail_t *detail);

/** Free what a trace holds; a zeroed one is allowed. @thread any */
void kvf_trace_cleanup(kvf_trace_t *trace);

#endif
