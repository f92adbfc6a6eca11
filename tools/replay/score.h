/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_SCORE_H
#define KVF_TOOLS_REPLAY_SCORE_H

/**
 * @file
 * What a replay counts. One thread.
 */

#include "tools/replay/samples.h"

#define KVF_SCORE_CODES 32
#define KVF_SCORE_CODE_BYTES 32

/** Failed requests of one error code. */
typedef struct kvf_score_failures {
    char code[KVF_SCORE_CODE_BYTES];
    uint64_t n;
} kvf_score_failures_t;

/** Times of a request that went well. Those of the nodes are what they say in their answers. */
typedef enum kvf_score_time {
    KVF_SCORE_REQUEST,  /**< from its start to the end of decode, by our clock */
    KVF_SCORE_PREFILL,  /**< the prefill node's engine at work */
    KVF_SCORE_TRANSFER, /**< from the decode node's first move to the last verified byte */
    KVF_SCORE_EXPOSED,  /**< the part of it after the end of prefill */
    KVF_SCORE_VERIFY,   /**< the decode node's comparison with what the prompt must give */
    KVF_SCORE_PAUSE,    /**< our pauses after 429 */
    KVF_SCORE_LATE,     /**< how much later it started than the trace asks for; only with a speed */
    KVF_SCORE_TIMES
} kvf_score_time_t;

/** The score. A request is counted once: in ok or in one of the failures. */
typedef struct kvf_score {
    uint64_t ok; /**< the decode node answered 200 and found no wrong byte */
    kvf_score_failures_t
        failures[KVF_SCORE_CODES]; /**< the last one also takes what finds no place */
    size_t n_codes;
    uint64_t
        verified; /**< every byte was checked and right; less than ok where nodes do not verify */
    uint64_t mismatched_bytes;
    uint64_t bytes;
    uint64_t pages;
    uint64_t prompt_tokens;         /**< of the decode nodes' answers of 200 */
    uint64_t prefill_cached_tokens; /**< of these, what prefix caches of the prefill nodes had */
    uint64_t decode_cached_tokens;
    uint64_t draft_tokens; /**< that came along with what went well */
    uint64_t retries;      /**< tries again after 429 */
    uint64_t duration_us;
    kvf_samples_t times[KVF_SCORE_TIMES];
} kvf_score_t;

/** @param[out] score  Becomes empty; kvf_score_cleanup() it. */
void kvf_score_init(kvf_score_t *score, const kvf_alloc_t *alloc);
void kvf_score_cleanup(kvf_score_t *score);

/** Count one failed request. @param code  An error name; cut when it is overlong. */
void kvf_score_fail(kvf_score_t *score, const char *code);

/** @return How many requests failed, over all codes. */
uint64_t kvf_score_failed(const kvf_score_t *score);

#endif
