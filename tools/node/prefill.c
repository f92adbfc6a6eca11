/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

#include "tools/node/record.h"

#include <inttypes.h>

/* Give the send up because of something that cannot happen with a whole engine; its result follows.
 */
static void fail(kvf_job_t *job, const kvf_detail_t *detail) {
    kvf_log(&job->node->log, KVF_LOG_ERROR, "request %s: prefill failed: %s", job->body.request_id,
            detail->text);
    job->filled = true;
    (void)kvf_send_cancel(job->node->agent, job->send, KVF_ERR_PREFILL_FAILED);
}

static kvf_status_t prefill_open(kvf_job_t *job, kvf_detail_t *detail) {
    kvf_node_t *node = job->node;
    kvf_send_desc_t desc = {.request_id = job->body.request_id,
                            .lengths = job->body.lengths,
                            .allocated_tokens = job->lease.capacity_tokens,
                            .tables = job->lease.tables,
                            .n_tables = node->layout.n_groups,
                            .timeout_us = kvf_job_time_left(job)};
    job->work_start_us = kvf_node_now();
    return kvf_send_open(node->agent, &desc, kvf_job_event, job, &job->send, detail);
}

/* Write the pages of the global layers [first, end). @return False when nobody wants them any more.
 */
static bool fill_layers(kvf_job_t *job, uint32_t first, uint32_t end) {
    const kvf_node_t *node = job->node;
    const kvf_lengths_t *lengths = &job->body.lengths;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        const kvf_table_t *table = &job->lease.tables[g];
        int64_t n = kvf_record_prompt_blocks(lengths, group);
        uint32_t first_idx, end_idx;
        kvf_group_layer_span(group, first, end, &first_idx, &end_idx);
        for (int64_t i = 0; first_idx < end_idx; i++) {
            i = kvf_table_next_bound(table, i, n);
            if (i == n) {
                break;
            }
            if (kvf_job_in_vain(job)) {
                return false;
            }
            kvf_synthetic_fill(group, &job->body.content, lengths->prompt_len, i, first_idx,
                               end_idx, kvf_pool_page(node->pools.pools[g], table->slots[i]));
        }
    }
    return true;
}

/* When a throttled engine has finished the layers [0, end): all layers take the same time. */
static uint64_t layers_done_us(const kvf_job_t *job, uint32_t end) {
    uint64_t rate = job->node->config->prefill_tokens_per_s;
    double share = (double)end / job->node->n_layers;
    return job->work_start_us +
           (uint64_t)((double)job->body.lengths.prompt_len / (double)rate * share * 1e6);
}

/* How far the engine has come by now; it is throttled by layers. */
static uint32_t layers_due(const kvf_job_t *job) {
    uint64_t now = kvf_node_now();
    uint32_t end = job->next_layer;
    if (job->node->config->prefill_tokens_per_s == 0) {
        return job->node->n_layers;
    }
    while (end < job->node->n_layers && layers_done_us(job, end + 1) <= now) {
        end++;
    }
    return end;
}

/* The prefill is over: hand its tokens and its ticket out. */
static void finish(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    const kvf_lengths_t *lengths = &job->body.lengths;
    char ticket[KVF_TICKET_BYTES];
    int32_t tokens[1 + KVF_MAX_AUX_TOKENS];
    kvf_detail_t detail = {.text = "the ticket cannot be made"};
    for (int64_t i = 0; i <= lengths->draft_len; i++) {
        tokens[i] =
            kvf_synthetic_token(&job->body.content, lengths->prompt_len, lengths->prompt_len + i);
    }
    kvf_aux_t aux = {.first_tokens = tokens,
                     .n_first_tokens = 1,
                     .draft_tokens = tokens + 1,
                     .n_draft_tokens = (size_t)lengths->draft_len};
    job->filled = true;
    kvf_status_t status = kvf_send_ticket(node->agent, job->send, ticket, sizeof(ticket));
    if (status == KVF_OK) {
        status = kvf_send_finish(node->agent, job->send, &aux, &detail);
    }
    if (status == KVF_OK) {
        json_t *answer = kvf_record_prefill(job, ticket);
        kvf_http_answer_json(job->http, 200, answer);
        json_decref(answer);
        job->http = NULL;
    } else if (status != KVF_ERR_UNKNOWN) { /* unknown: its result is on the way */
        fail(job, &detail);
    }
}

static void prefill_work(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    kvf_detail_t detail;
    if (job->filled) {
        return;
    }
    uint32_t end = layers_due(job);
    if (end > job->next_layer) {
        uint64_t start = kvf_node_now();
        bool wanted = fill_layers(job, job->next_layer, end);
        job->work_us += kvf_node_now() - start;
        if (!wanted) { /* the job was posted again when that changed */
            return;
        }
        kvf_range_t range = {.layer_first = job->next_layer,
                             .layer_end = end,
                             .token_end = job->body.lengths.prompt_len};
        kvf_status_t status = kvf_send_ready(node->agent, job->send, &range, NULL, &detail);
        if (status != KVF_OK && status != KVF_ERR_UNKNOWN) {
            fail(job, &detail);
        }
        if (status != KVF_OK) {
            return;
        }
        job->next_layer = end;
    }
    if (end < node->n_layers) {
        kvf_workers_post(node->workers, &job->task, layers_done_us(job, end + 1));
        return;
    }
    finish(job);
}

static void prefill_cancel(kvf_job_t *job) {
    (void)kvf_send_cancel(job->node->agent, job->send, KVF_ERR_CANCELLED); /* ended: no harm */
}

static void prefill_end(kvf_job_t *job) {
    kvf_job_end(job, job->outcome.status, job->outcome.message, kvf_record_transfer(job));
}

const kvf_job_ops_t kvf_prefill_ops = {.include_drafts = false,
                                       .open = prefill_open,
                                       .work = prefill_work,
                                       .cancel = prefill_cancel,
                                       .end = prefill_end};
