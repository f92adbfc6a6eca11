/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_RECORD_H
#define KVF_TOOLS_NODE_RECORD_H

/**
 * @file
 * What the nodes say about a request, as JSON. Fields that there is no memory for are absent.
 */

#include "tools/node/job.h"
#include "tools/node/judge.h"

/** What a check of the pages found. */
typedef struct kvf_verdict {
    bool verified; /**< every element was checked and is right, and what attention makes of them */
    bool tokens_match;
    uint64_t mismatched_bytes;
    const char *group;    /**< of the first wrong element */
    kvf_mismatch_t first; /**< when mismatched_bytes > 0 */
    bool judged;          /**< attention ran */
    kvf_judgement_t judgement;
} kvf_verdict_t;

/** @return Blocks of the prompt in a group. */
int64_t kvf_record_prompt_blocks(const kvf_lengths_t *lengths, const kvf_layer_group_t *group);

/** The answer of POST /v1/prefill. @return The caller's reference. */
json_t *kvf_record_prefill(const kvf_job_t *job, const char *ticket);

/** What the result event of a job said. @return The caller's reference. */
json_t *kvf_record_transfer(const kvf_job_t *job);

/** The answer of POST /v1/decode. @return The caller's reference. */
json_t *kvf_record_decode(const kvf_job_t *job, const kvf_verdict_t *verdict);

#endif
