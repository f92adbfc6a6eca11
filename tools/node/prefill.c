/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

#include "kvmgr/base/size.h"
#include "tools/node/record.h"
#include "tools/node/view.h"

#include <inttypes.h>

/* Give the send up because of something that cannot happen with a whole engine; its result follows.
 */
static void fail(kvf_job_t *job, const kvf_detail_t *detail) {
    kvf_log(&job->node->log, KVF_LOG_ERROR, "request %s: prefill failed: %s", job->body.request_id,
            detail->text);
    job->filled = true;
    (void)kvf_send_cancel(job->node->agent, job->send, KVF_ERR_PREFILL_FAILED);
}

static bool in_chunks(const kvf_job_t *job) {
    return job->node->config->chunk_tokens > 0;
}

static kvf_status_t prefill_open(kvf_job_t *job, kvf_detail_t *detail) {
    kvf_node_t *node = job->node;
    kvf_table_t tables[KVF_MAX_GROUPS];
    kvf_send_desc_t desc = {.request_id = job->body.request_id,
                            .lengths = job->body.lengths,
                            .allocated_tokens = job->lease.capacity_tokens,
                            .tables = tables,
                            .n_tables = node->layout.n_groups,
                            .chunked = in_chunks(job),
                            .timeout_us = kvf_job_time_left(job)};
    kvf_blocks_tables(node->blocks, &job->lease, tables);
    job->work_start_us = kvf_node_now();
    return kvf_send_open(node->agent, &desc, kvf_job_event, job, &job->send, detail);
}

/* What a step of the engine computes: some layers of all tokens, or all layers of a chunk. */
typedef struct part {
    uint32_t layer_first, layer_end; /* global ids */
    int64_t token_first, token_end;
} part_t;

/* Write the tokens of a part that are in one page. @return KVF_OK, KVF_ERR_IO. */
static kvf_status_t fill_page(const kvf_job_t *job, const part_t *part, kvf_view_t *view,
                              uint32_t group_idx, int64_t ordinal, int32_t slot,
                              kvf_detail_t *detail) {
    const kvf_layer_group_t *group = &job->node->layout.groups[group_idx];
    uint32_t first_idx, end_idx;
    void *page = NULL;
    kvf_status_t status = kvf_view_page(view, group_idx, slot, &page, detail);
    if (status == KVF_OK) {
        kvf_group_layer_span(group, part->layer_first, part->layer_end, &first_idx, &end_idx);
        kvf_synthetic_fill_tokens(group, &job->body.content, part->token_first, part->token_end,
                                  ordinal, first_idx, end_idx, page);
        status = kvf_view_put(view, group_idx, slot, detail);
    }
    return status;
}

/* Write a part. @return False when nobody wants it any more, or it failed. */
static bool fill(kvf_job_t *job, const part_t *part, kvf_view_t *view) {
    const kvf_node_t *node = job->node;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        const kvf_table_t table = kvf_seq_table(job->lease.seq, g);
        int64_t end = kvf_div_ceil(part->token_end, group->tokens_per_block);
        uint32_t first_idx, end_idx;
        kvf_group_layer_span(group, part->layer_first, part->layer_end, &first_idx, &end_idx);
        for (int64_t i = part->token_first / group->tokens_per_block; first_idx < end_idx; i++) {
            i = kvf_table_next_bound(&table, i, end);
            if (i == end) {
                break;
            }
            if (kvf_job_in_vain(job)) {
                return false;
            }
            kvf_detail_t detail;
            if (fill_page(job, part, view, g, i, table.slots[i], &detail) != KVF_OK) {
                fail(job, &detail);
                return false;
            }
        }
    }
    return true;
}

/* Write a part and tell the receiver. @return Whether that went well; else the job's end comes. */
static bool compute(kvf_job_t *job, const part_t *part) {
    kvf_node_t *node = job->node;
    kvf_table_t tables[KVF_MAX_GROUPS];
    kvf_detail_t detail;
    kvf_view_t view;
    uint64_t start = kvf_node_now();
    if (kvf_view_open(&node->pools, &view) != KVF_OK) {
        (void)kvf_fail(&detail, KVF_ERR_NO_MEMORY, "no memory for a page");
        fail(job, &detail);
        return false;
    }
    bool wanted = fill(job, part, &view);
    kvf_view_close(&view);
    job->work_us += kvf_node_now() - start;
    if (!wanted) { /* the job was posted again when that changed */
        return false;
    }
    kvf_blocks_tables(node->blocks, &job->lease, tables);
    kvf_range_t range = {.layer_first = part->layer_first,
                         .layer_end = part->layer_end,
                         .token_end = part->token_end,
                         .tables = in_chunks(job) ? tables : NULL,
                         .n_tables = node->layout.n_groups};
    kvf_status_t status = kvf_send_ready(node->agent, job->send, &range, NULL, &detail);
    if (status != KVF_OK && status != KVF_ERR_UNKNOWN) { /* unknown: its result is on the way */
        fail(job, &detail);
    }
    return status == KVF_OK;
}

/* The bytes of the first tokens are final. */
static bool settle(kvf_job_t *job, int64_t tokens) {
    kvf_detail_t detail;
    kvf_status_t status = kvf_blocks_settle(job->node->blocks, &job->lease, tokens);
    if (status != KVF_OK) {
        (void)kvf_fail(&detail, status, "pages of the first %" PRId64 " tokens: %s", tokens,
                       kvf_status_name(status));
        fail(job, &detail);
    }
    return status == KVF_OK;
}

/* When a throttled engine has computed a share of the prompt; what is cached costs it nothing. */
static uint64_t done_us(const kvf_job_t *job, double share) {
    uint64_t rate = job->node->config->prefill_tokens_per_s;
    int64_t tokens = job->body.lengths.prompt_len - kvf_seq_cached_tokens(job->lease.seq);
    return rate == 0 ? 0
                     : job->work_start_us + (uint64_t)((double)tokens / (double)rate * share * 1e6);
}

/* When the layers [0, end) are done: all layers take the same time. */
static uint64_t layers_done_us(const kvf_job_t *job, uint32_t end) {
    return done_us(job, (double)end / job->node->n_layers);
}

/* Answer with the ticket, once. */
static void hand_out_ticket(kvf_job_t *job) {
    char ticket[KVF_TICKET_BYTES];
    if (job->http != NULL &&
        kvf_send_ticket(job->node->agent, job->send, ticket, sizeof(ticket)) == KVF_OK) {
        json_t *answer = kvf_record_prefill(job, ticket);
        kvf_http_answer_json(job->http, 200, answer);
        json_decref(answer);
        job->http = NULL;
    } /* else the send has ended, and its result is on the way */
}

/* The prefill is over: hand its tokens and its ticket out. */
static void finish(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    const kvf_lengths_t *lengths = &job->body.lengths;
    int32_t tokens[1 + KVF_MAX_AUX_TOKENS];
    kvf_detail_t detail;
    for (int64_t i = 0; i <= lengths->draft_len; i++) {
        tokens[i] =
            kvf_synthetic_token(&job->body.content, lengths->prompt_len, lengths->prompt_len + i);
    }
    kvf_aux_t aux = {.first_tokens = tokens,
                     .n_first_tokens = 1,
                     .draft_tokens = tokens + 1,
                     .n_draft_tokens = (size_t)lengths->draft_len};
    if (!settle(job, lengths->prompt_len)) {
        return;
    }
    job->filled = true;
    kvf_status_t status = kvf_send_finish(node->agent, job->send, &aux, &detail);
    if (status == KVF_OK) {
        hand_out_ticket(job);
    } else if (status != KVF_ERR_UNKNOWN) { /* unknown: its result is on the way */
        fail(job, &detail);
    }
}

/* One step: all tokens, layer by layer, as many layers as are due. */
static void work_layers(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    uint64_t now = kvf_node_now();
    uint32_t end = job->next_layer;
    while (end < node->n_layers && layers_done_us(job, end + 1) <= now) {
        end++;
    }
    if (end > job->next_layer) {
        const part_t part = {job->next_layer, end, kvf_seq_cached_tokens(job->lease.seq),
                             job->body.lengths.prompt_len};
        if (!compute(job, &part)) {
            return;
        }
        job->next_layer = end;
    }
    if (end < node->n_layers) {
        kvf_workers_post(node->workers, &job->task, layers_done_us(job, end + 1));
    } else {
        finish(job);
    }
}

/* One step: the next chunk, when it is due. */
static void work_chunk(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    int64_t prompt = job->body.lengths.prompt_len;
    int64_t cached = kvf_seq_cached_tokens(job->lease.seq);
    int64_t first = kvf_seq_tokens(job->lease.seq), chunk = (int64_t)node->config->chunk_tokens;
    const part_t part = {0, node->n_layers, first, prompt - first < chunk ? prompt : first + chunk};
    uint64_t now = kvf_node_now();
    uint64_t due_us = done_us(job, (double)(part.token_end - cached) / (double)(prompt - cached));
    if (now < due_us) {
        kvf_workers_post(node->workers, &job->task, due_us);
        return;
    }
    kvf_status_t status =
        kvf_blocks_append(node->blocks, &job->lease, part.token_end - part.token_first);
    if (status == KVF_ERR_AGAIN) { /* its pages are set aside: nothing but proofs is missing */
        kvf_workers_post(node->workers, &job->task, now + KVF_JOB_POLL_US);
        return;
    }
    if (status != KVF_OK) {
        kvf_detail_t detail;
        (void)kvf_fail(&detail, status, "pages for a chunk: %s", kvf_status_name(status));
        fail(job, &detail);
        return;
    }
    if (!compute(job, &part)) {
        return;
    }
    if (part.token_end == prompt) {
        finish(job);
    } else if (settle(job, part.token_end)) {
        kvf_workers_post(node->workers, &job->task, 0); /* others have their turn in between */
    }
}

static void prefill_work(kvf_job_t *job) {
    if (job->filled) {
        return;
    }
    if (job->body.early_ticket) {
        hand_out_ticket(job);
    }
    if (in_chunks(job)) {
        work_chunk(job);
    } else {
        work_layers(job);
    }
}

static void prefill_cancel(kvf_job_t *job) {
    (void)kvf_send_cancel(job->node->agent, job->send, KVF_ERR_CANCELLED); /* ended: no harm */
}

static void prefill_end(kvf_job_t *job) {
    kvf_job_end(job, job->outcome.status, job->outcome.message, kvf_record_transfer(job));
}

const kvf_job_ops_t kvf_prefill_ops = {.waits_for_pages = false,
                                       .open = prefill_open,
                                       .work = prefill_work,
                                       .cancel = prefill_cancel,
                                       .end = prefill_end};
