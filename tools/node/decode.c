/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"
#include "tools/node/record.h"
#include "tools/node/view.h"

#include <inttypes.h>
#include <string.h>

static kvf_status_t decode_open(kvf_job_t *job, kvf_detail_t *detail) {
    kvf_node_t *node = job->node;
    kvf_table_t tables[KVF_MAX_GROUPS];
    kvf_recv_desc_t desc = {.request_id = job->body.request_id,
                            .ticket = job->body.ticket,
                            .lengths = job->body.lengths,
                            .allocated_tokens = job->lease.capacity_tokens,
                            .cached_tokens = kvf_seq_cached_tokens(job->lease.seq),
                            .tables = tables,
                            .n_tables = node->layout.n_groups,
                            .timeout_us = kvf_job_time_left(job),
                            .holes = KVF_HOLES_STRICT,
                            .direction =
                                strcmp(node->config->direction, "pull") == 0 ? KVF_PULL : KVF_PUSH};
    kvf_blocks_tables(node->blocks, &job->lease, tables);
    return kvf_recv_open(node->agent, &desc, kvf_job_event, job, &job->recv, detail);
}

static void decode_work(kvf_job_t *job) {
    (void)job; /* the agent does it */
}

static void decode_cancel(kvf_job_t *job) {
    (void)kvf_recv_cancel(job->node->agent, job->recv); /* ended: no harm */
}

/* Cancelled while it waited for pages: the prefill node need not wait for its lease. */
static void decode_decline(kvf_job_t *job) {
    kvf_detail_t detail;
    if (kvf_recv_decline(job->node->agent, job->body.request_id, job->body.ticket, &detail) !=
        KVF_OK) {
        kvf_log(&job->node->log, KVF_LOG_DEBUG, "request %s: its prefill node is not told: %s",
                job->body.request_id, detail.text);
    }
}

/* Compare every element of a page. @return How many bytes are wrong: all, if they cannot be read.
 */
static uint64_t check_page(const kvf_job_t *job, kvf_view_t *view, uint32_t group_idx,
                           int64_t ordinal, int32_t slot, kvf_mismatch_t *first_p) {
    const kvf_layer_group_t *group = &job->node->layout.groups[group_idx];
    void *page = NULL;
    kvf_detail_t detail;
    if (kvf_view_page(view, group_idx, slot, &page, &detail) != KVF_OK) {
        kvf_log(&job->node->log, KVF_LOG_ERROR, "request %s: a page cannot be read: %s",
                job->body.request_id, detail.text);
        *first_p = (kvf_mismatch_t){.ordinal = ordinal, .layer = group->layers[0]};
        return kvf_group_block_bytes(group);
    }
    return kvf_synthetic_check(group, &job->body.content, job->body.lengths.prompt_len, ordinal,
                               page, first_p);
}

/* Compare every element of the request's pages with what the request says that they hold. */
static void verify_pages(const kvf_job_t *job, kvf_view_t *view, kvf_verdict_t *verdict) {
    const kvf_node_t *node = job->node;
    const kvf_body_t *body = &job->body;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        const kvf_table_t table = kvf_seq_table(job->lease.seq, g);
        int64_t n = kvf_record_prompt_blocks(&body->lengths, group);
        for (int64_t i = kvf_table_next_bound(&table, 0, n); i < n;
             i = kvf_table_next_bound(&table, i + 1, n)) {
            kvf_mismatch_t first;
            uint64_t wrong = check_page(job, view, g, i, table.slots[i], &first);
            if (wrong > 0 && verdict->mismatched_bytes == 0) {
                verdict->group = group->name;
                verdict->first = first;
            }
            verdict->mismatched_bytes += wrong;
        }
    }
}

/* The first token and the drafts came beside the pages. */
static bool tokens_match(const kvf_job_t *job) {
    const kvf_outcome_t *outcome = &job->outcome;
    int64_t prompt = job->body.lengths.prompt_len, drafts = job->body.lengths.draft_len;
    if (outcome->n_first_tokens != 1 || (int64_t)outcome->n_draft_tokens != drafts) {
        return false;
    }
    for (int64_t i = 0; i <= drafts; i++) {
        if (outcome->tokens[i] != kvf_synthetic_token(&job->body.content, prompt, prompt + i)) {
            return false;
        }
    }
    return true;
}

/* Take the first decode step over the pages, and take it back. The token's place is reserved:
 * kvf_config_check() sees to that. */
static void judge(kvf_job_t *job, kvf_verdict_t *verdict) {
    const kvf_node_t *node = job->node;
    int64_t prompt = job->body.lengths.prompt_len;
    kvf_judge_pool_t pools[KVF_MAX_GROUPS];
    kvf_table_t tables[KVF_MAX_GROUPS];
    kvf_view_all_t view;
    const kvf_judge_step_t step = {.layout = &node->layout,
                                   .pools = pools,
                                   .tables = tables,
                                   .cached_aux = strcmp(node->config->aux, "cached") == 0,
                                   .content = &job->body.content,
                                   .prompt_tokens = prompt};
    kvf_detail_t detail = {.text = "no page for the first token"};
    kvf_status_t status = kvf_blocks_append(node->blocks, &job->lease, 1);
    if (status == KVF_OK) {
        kvf_blocks_tables(node->blocks, &job->lease, tables);
        status = kvf_view_all_open(&node->pools, tables, &view, &detail);
        for (uint32_t g = 0; status == KVF_OK && g < node->layout.n_groups; g++) {
            pools[g] = (kvf_judge_pool_t){view.bases[g], node->pools.n_pages[g]};
        }
        if (status == KVF_OK) {
            status = kvf_judge_run(&step, node->alloc, &verdict->judgement, &detail);
            kvf_judge_rewind(&step);
            kvf_view_all_close(&view);
        }
        kvf_status_t rewound = kvf_blocks_rewind(node->blocks, &job->lease, prompt);
        status = status == KVF_OK ? rewound : status;
    }
    verdict->judged = status == KVF_OK;
    if (status != KVF_OK) {
        kvf_log(&node->log, KVF_LOG_ERROR, "request %s: attention over its pages: %s: %s",
                job->body.request_id, kvf_status_name(status), detail.text);
    }
}

static void warn_mismatch(const kvf_job_t *job, const kvf_verdict_t *verdict) {
    const kvf_log_t *log = &job->node->log;
    const char *id = job->body.request_id;
    if (verdict->mismatched_bytes > 0) {
        kvf_log(log, KVF_LOG_WARN, "request %s: %" PRIu64 " bytes are not what it asks for", id,
                verdict->mismatched_bytes);
    }
    if (verdict->judged && !verdict->judgement.same) {
        kvf_log(log, KVF_LOG_WARN,
                "request %s: attention over its pages gives something else, first in group %s, "
                "layer %" PRIu32,
                id, verdict->judgement.first.group, verdict->judgement.first.layer);
    }
    if (!verdict->tokens_match) {
        kvf_log(log, KVF_LOG_WARN,
                "request %s: %zu first and %zu draft tokens came, which are not the 1 and %" PRId64
                " that it asks for",
                id, job->outcome.n_first_tokens, job->outcome.n_draft_tokens,
                job->body.lengths.draft_len);
    }
}

/* Check what came. With `verify: off` the digests are all there is. @return Whether the pages may
 * be taken for what the request says. */
static bool check(kvf_job_t *job, kvf_verdict_t *verdict) {
    kvf_node_t *node = job->node;
    bool attention = strcmp(node->config->verify, "attention") == 0;
    if (strcmp(node->config->verify, "off") == 0) {
        return true;
    }
    uint64_t start = kvf_node_now();
    kvf_view_t view;
    if (kvf_view_open(&node->pools, &view) != KVF_OK) {
        verdict->mismatched_bytes = 1; /* nothing was looked at, so nothing is right */
        kvf_log(&node->log, KVF_LOG_ERROR, "request %s: no memory to look at its pages",
                job->body.request_id);
        return false;
    }
    verify_pages(job, &view, verdict);
    kvf_view_close(&view);
    verdict->tokens_match = tokens_match(job);
    verdict->verified = verdict->mismatched_bytes == 0 && verdict->tokens_match;
    if (attention) {
        judge(job, verdict);
        verdict->verified = verdict->verified && verdict->judged && verdict->judgement.same;
    }
    job->work_us = kvf_node_now() - start;
    if (!verdict->verified) {
        (void)pthread_mutex_lock(&node->lock);
        node->counts.content_mismatches++;
        (void)pthread_mutex_unlock(&node->lock);
        warn_mismatch(job, verdict);
    }
    return verdict->verified;
}

/* The pages are this side's alone by now. */
static void decode_end(kvf_job_t *job) {
    kvf_verdict_t verdict = {.mismatched_bytes = 0};
    if (job->outcome.status != KVF_OK) {
        kvf_job_end(job, job->outcome.status, job->outcome.message, kvf_record_transfer(job));
        return;
    }
    if (check(job, &verdict)) {
        kvf_status_t status =
            kvf_blocks_settle(job->node->blocks, &job->lease, job->body.lengths.prompt_len);
        if (status != KVF_OK) { /* the request has all it needs; later ones find less */
            kvf_log(&job->node->log, KVF_LOG_ERROR, "request %s: its pages are not cached: %s",
                    job->body.request_id, kvf_status_name(status));
        }
    }
    kvf_job_end(job, KVF_OK, "", kvf_record_decode(job, &verdict));
}

const kvf_job_ops_t kvf_decode_ops = {.waits_for_pages = true,
                                      .open = decode_open,
                                      .work = decode_work,
                                      .cancel = decode_cancel,
                                      .decline = decode_decline,
                                      .end = decode_end};
