/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/record.h"

#include "kvmgr/base/size.h"
#include "kvmgr/window.h"
#include "tools/node/node.h"

static void set(json_t *object, const char *name, json_t *value) {
    (void)json_object_set_new(object, name, value);
}

static void set_number(json_t *object, const char *name, uint64_t value) {
    set(object, name, json_integer((json_int_t)value));
}

int64_t kvf_record_prompt_blocks(const kvf_lengths_t *lengths, const kvf_layer_group_t *group) {
    return kvf_div_ceil(kvf_prompt_tokens(lengths), group->tokens_per_block);
}

/* Whatever the other side has to know; not the content itself, which it must have from elsewhere.
 */
static json_t *transfer_params(const kvf_job_t *job, const char *ticket) {
    const kvf_body_t *body = &job->body;
    json_t *params = json_object();
    set(params, "ticket", json_string(ticket));
    set_number(params, "prompt_len", (uint64_t)body->lengths.prompt_len);
    set_number(params, "draft_len", (uint64_t)body->lengths.draft_len);
    set(params, "instance", json_string(job->node->instance));
    set(params, "content", json_string(body->content_from));
    return params;
}

json_t *kvf_record_prefill(const kvf_job_t *job, const char *ticket) {
    const kvf_node_t *node = job->node;
    json_t *record = json_object();
    uint64_t pages = 0, bytes = 0;
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &node->layout.groups[g];
        kvf_span_t stale = kvf_stale_span(kvf_prompt_tokens(&job->body.lengths),
                                          group->tokens_per_block, group->window, group->sinks);
        int64_t n = kvf_record_prompt_blocks(&job->body.lengths, group);
        n -= stale.first < stale.end ? stale.end - stale.first : 0;
        pages += (uint64_t)n;
        bytes += (uint64_t)n * kvf_group_block_bytes(group);
    }
    set(record, "request_id", json_string(job->body.request_id));
    set(record, "kv_transfer_params", transfer_params(job, ticket));
    set_number(record, "pages", pages);
    set_number(record, "bytes", bytes);
    set_number(record, "cached_tokens", (uint64_t)kvf_seq_cached_tokens(job->lease.seq));
    set_number(record, "wait_us", job->wait_us);
    set_number(record, "fill_us", job->work_us);
    set_number(record, "prefill_us", kvf_node_now() - job->work_start_us);
    return record;
}

static json_t *missing_pages(const kvf_job_t *job) {
    const kvf_outcome_t *outcome = &job->outcome;
    json_t *list = json_array();
    for (size_t i = 0; i < outcome->n_missing; i++) {
        json_t *page = json_object();
        set(page, "group",
            json_string(job->node->layout.groups[outcome->missing[i].group_idx].name));
        set_number(page, "ordinal", (uint64_t)outcome->missing[i].ordinal);
        (void)json_array_append_new(list, page);
    }
    return list;
}

json_t *kvf_record_transfer(const kvf_job_t *job) {
    const kvf_outcome_t *outcome = &job->outcome;
    json_t *record = json_object();
    set(record, "peer", json_string(outcome->peer));
    set(record, "mover", json_string(outcome->mover));
    set_number(record, "bytes", outcome->bytes);
    set_number(record, "pages", outcome->pages);
    set_number(record, "pieces", outcome->pieces);
    set(record, "missing", missing_pages(job));
    set_number(record, "transfer_us", outcome->transfer_us);
    set_number(record, "exposed_us", outcome->exposed_us);
    set_number(record, "cached_tokens", (uint64_t)kvf_seq_cached_tokens(job->lease.seq));
    set_number(record, "wait_us", job->wait_us);
    return record;
}

static json_t *token_list(const int32_t *tokens, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        (void)json_array_append_new(list, json_integer(tokens[i]));
    }
    return list;
}

static json_t *first_mismatch(const kvf_verdict_t *verdict) {
    json_t *where = json_object();
    set(where, "group", json_string(verdict->group));
    set_number(where, "ordinal", (uint64_t)verdict->first.ordinal);
    set_number(where, "layer", verdict->first.layer);
    set(where, "kv", json_string(verdict->first.kv == 0 ? "k" : "v"));
    set_number(where, "head", verdict->first.head);
    set_number(where, "token", (uint64_t)verdict->first.token);
    set_number(where, "dim", verdict->first.dim);
    return where;
}

json_t *kvf_record_decode(const kvf_job_t *job, const kvf_verdict_t *verdict) {
    const kvf_outcome_t *outcome = &job->outcome;
    json_t *record = kvf_record_transfer(job);
    set(record, "verified", json_boolean(verdict->verified));
    set(record, "verify", json_string(job->node->config->verify));
    set(record, "content", json_string(job->body.content_from));
    set_number(record, "mismatched_bytes", verdict->mismatched_bytes);
    if (verdict->mismatched_bytes > 0) {
        set(record, "first_mismatch", first_mismatch(verdict));
    }
    if (verdict->judged) {
        json_t *attention = kvf_judge_json(&verdict->judgement);
        set(attention, "same", json_boolean(verdict->judgement.same));
        set(record, "attention", attention);
    }
    set(record, "tokens_match", json_boolean(verdict->tokens_match));
    set_number(record, "verify_us", job->work_us);
    set(record, "first_tokens", token_list(outcome->tokens, outcome->n_first_tokens));
    set(record, "draft_tokens",
        token_list(outcome->n_draft_tokens == 0 ? NULL : outcome->tokens + outcome->n_first_tokens,
                   outcome->n_draft_tokens));
    return record;
}
