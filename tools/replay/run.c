/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/run.h"

#include "tools/replay/client.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A node ends a request by its own timer; only when it does not do even that, ours ends the call.
 */
#define GRACE_US 5000000
#define READY_TIMEOUT_US 5000000
#define CANCEL_TIMEOUT_US 2000000
/* A 429 that names no time. */
#define PAUSE_US 100000
/* Longest sleep, so that progress is shown and a signal is seen. */
#define TURN_US 200000

typedef enum step { STEP_PREFILL, STEP_DECODE, STEP_CANCEL } step_t;

static const char *const step_paths[] = {"/v1/prefill", "/v1/decode", "/v1/cancel"};

typedef struct run run_t;

/** A place for one request. */
typedef struct job {
    run_t *run;
    const kvf_trace_request_t *request; /* NULL: the place is free */
    const char *prefill_url;
    const char *decode_url;
    char request_id[48];
    step_t step;
    char *body;             /* what the step sends; jansson's memory */
    uint64_t start_us;      /* of the request */
    uint64_t step_start_us; /* of the first try */
    uint64_t retry_us;      /* when to try again; KVF_NEVER while a call is under way */
    uint64_t pause_us;      /* sum of the pauses */
    uint64_t prefill_us;    /* what the prefill node said */
    uint64_t cached_tokens; /* likewise */
    uint64_t late_us;
} job_t;

struct run {
    const kvf_replay_config_t *config;
    const kvf_trace_t *trace;
    const kvf_clock_t *clock;
    kvf_client_t *client;
    kvf_score_t *score;
    job_t *jobs; /* config->concurrency places */
    uint32_t n_busy;
    uint32_t n_paused;
    size_t next; /* request of the trace that starts next */
    uint64_t ended;
    uint64_t start_us;
    uint64_t run_id; /* makes the request ids of this run its own */
    kvf_status_t status;
};

static uint64_t now_us(const run_t *run) {
    return run->clock->now_us(run->clock->ctx);
}

static void on_answer(void *ctx, const kvf_answer_t *answer);

static void job_end(job_t *job) {
    free(job->body);
    *job = (job_t){.run = job->run};
    job->run->n_busy--;
}

/* Send what the step sends, for the first time or again. */
static void job_call(job_t *job) {
    run_t *run = job->run;
    const char *base = job->step == STEP_DECODE ? job->decode_url : job->prefill_url;
    char url[2048];
    (void)snprintf(url, sizeof(url), "%s%s", base, step_paths[job->step]);
    job->retry_us = KVF_NEVER;
    uint64_t timeout_us =
        job->step == STEP_CANCEL ? CANCEL_TIMEOUT_US : run->config->timeout_us + GRACE_US;
    kvf_status_t status = kvf_client_call(run->client, url, job->body, timeout_us, on_answer, job);
    if (status != KVF_OK) {
        run->status = status;
    }
}

/* Begin a step. @param body  Taken over; NULL when there was no memory for it. */
static void job_step(job_t *job, step_t step, json_t *body) {
    free(job->body);
    job->body = body == NULL ? NULL : json_dumps(body, JSON_COMPACT);
    json_decref(body);
    if (job->body == NULL) {
        job->run->status = KVF_ERR_NO_MEMORY;
        return;
    }
    job->step = step;
    job->step_start_us = now_us(job->run);
    job_call(job);
}

static void job_ended(job_t *job) {
    run_t *run = job->run;
    run->ended++;
    run->score->duration_us = now_us(run) - run->start_us;
}

static void job_fail(job_t *job, const char *code, const char *message, bool holds_pages) {
    run_t *run = job->run;
    kvf_score_fail(run->score, code);
    run->config->failed(run->config->ctx, job->request, job->request_id, code, message);
    job_ended(job);
    if (holds_pages) {
        /* Nobody will come for this ticket: without a word its pages would wait for the lease to
         * end. */
        job_step(job, STEP_CANCEL, json_pack("{s:s}", "request_id", job->request_id));
    } else {
        job_end(job);
    }
}

static json_t *common_body(const job_t *job) {
    const kvf_trace_request_t *request = job->request;
    json_t *body = json_pack("{s:s, s:I, s:[]}", "request_id", job->request_id, "timeout_ms",
                             (json_int_t)(job->run->config->timeout_us / 1000), "hash_ids");
    json_t *ids = json_object_get(body, "hash_ids");
    for (size_t i = 0; i < request->n_hash_ids; i++) {
        if (json_array_append_new(ids, json_integer(request->hash_ids[i])) != 0) {
            json_decref(body);
            return NULL;
        }
    }
    return body;
}

static void start_prefill(job_t *job) {
    json_t *body = common_body(job);
    int failed = json_object_set_new(body, "prompt_len", json_integer(job->request->input_tokens));
    failed |= json_object_set_new(body, "draft_len", json_integer(job->run->config->draft_tokens));
    failed |=
        json_object_set_new(body, "early_ticket", json_boolean(job->run->config->early_ticket));
    if (failed != 0) {
        json_decref(body);
        body = NULL;
    }
    job_step(job, STEP_PREFILL, body);
}

/* The ticket and whatever else the prefill node gave goes on as it is; what the pages must hold
 * comes from the trace. */
static void start_decode(job_t *job, json_t *kv_transfer_params) {
    json_t *body = common_body(job);
    int failed = json_object_set(body, "kv_transfer_params", kv_transfer_params);
    if (job->request->output_tokens > 0) {
        failed |=
            json_object_set_new(body, "max_tokens", json_integer(job->request->output_tokens));
    }
    if (failed != 0) {
        json_decref(body);
        body = NULL;
    }
    job_step(job, STEP_DECODE, body);
}

/* Read a count of an answer. @return false when it is there but no count. */
static bool read_count(const json_t *answer, const char *key, bool required, uint64_t *count_p) {
    const json_t *value = json_object_get(answer, key);
    if (value == NULL && !required) {
        *count_p = 0;
        return true;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *count_p = (uint64_t)json_integer_value(value);
    return true;
}

static void prefill_done(job_t *job, const json_t *answer) {
    json_t *params = json_object_get(answer, "kv_transfer_params");
    if (!json_is_object(params) || !read_count(answer, "prefill_us", false, &job->prefill_us) ||
        !read_count(answer, "cached_tokens", false, &job->cached_tokens)) {
        job_fail(job, "protocol", "the prefill node's answer has no kv_transfer_params", true);
        return;
    }
    start_decode(job, params);
}

static void add_time(run_t *run, kvf_score_time_t time, uint64_t us) {
    if (kvf_samples_add(&run->score->times[time], us) != KVF_OK) {
        run->status = KVF_ERR_NO_MEMORY;
    }
}

/* What a node says about the bytes is for it to know; how many drafts there must be is ours.
 * @return Whether the request went well; else it has failed. */
static bool accept_answer(job_t *job, const json_t *answer, uint64_t bytes, uint64_t mismatched) {
    uint32_t drafts = job->run->config->draft_tokens;
    size_t n_drafts = json_array_size(json_object_get(answer, "draft_tokens"));
    const char *verify = json_string_value(json_object_get(answer, "verify"));
    /* Only a node that says so may leave a request unverified. */
    bool checks = verify == NULL || strcmp(verify, "off") != 0;
    char text[96];
    if (mismatched > 0 || (checks && !json_is_true(json_object_get(answer, "verified")))) {
        (void)snprintf(text, sizeof(text),
                       "not verified: %" PRIu64 " of %" PRIu64 " bytes are wrong", mismatched,
                       bytes);
        job_fail(job, "mismatch", text, false);
        return false;
    }
    if (n_drafts != drafts) {
        (void)snprintf(text, sizeof(text), "%zu draft tokens came, %" PRIu32 " were asked for",
                       n_drafts, drafts);
        job_fail(job, "count_mismatch", text, false);
        return false;
    }
    return true;
}

static void decode_done(job_t *job, const json_t *answer) {
    run_t *run = job->run;
    kvf_score_t *score = run->score;
    const json_t *verified = json_object_get(answer, "verified");
    uint64_t bytes;
    uint64_t pages;
    uint64_t transfer_us;
    uint64_t exposed_us;
    uint64_t verify_us;
    uint64_t mismatched;
    uint64_t cached_tokens;
    if (!json_is_boolean(verified) || !read_count(answer, "bytes", true, &bytes) ||
        !read_count(answer, "pages", true, &pages) ||
        !read_count(answer, "transfer_us", true, &transfer_us) ||
        !read_count(answer, "exposed_us", true, &exposed_us) ||
        !read_count(answer, "verify_us", false, &verify_us) ||
        !read_count(answer, "mismatched_bytes", false, &mismatched) ||
        !read_count(answer, "cached_tokens", false, &cached_tokens)) {
        job_fail(job, "protocol",
                 "the decode node's answer lacks a field or has one of another type", true);
        return;
    }
    score->bytes += bytes;
    score->pages += pages;
    score->mismatched_bytes += mismatched;
    score->prompt_tokens += (uint64_t)job->request->input_tokens;
    score->prefill_cached_tokens += job->cached_tokens;
    score->decode_cached_tokens += cached_tokens;
    if (!accept_answer(job, answer, bytes, mismatched)) {
        return;
    }
    score->ok++;
    score->draft_tokens += run->config->draft_tokens;
    score->verified += json_is_true(verified);
    add_time(run, KVF_SCORE_REQUEST, now_us(run) - job->start_us);
    add_time(run, KVF_SCORE_PREFILL, job->prefill_us);
    add_time(run, KVF_SCORE_TRANSFER, transfer_us);
    add_time(run, KVF_SCORE_EXPOSED, exposed_us);
    add_time(run, KVF_SCORE_VERIFY, verify_us);
    add_time(run, KVF_SCORE_PAUSE, job->pause_us);
    if (run->config->speed > 0) {
        add_time(run, KVF_SCORE_LATE, job->late_us);
    }
    job_ended(job);
    job_end(job);
}

/* A node had no room. @return false when there is no time left for another try. */
static bool job_pause(job_t *job, uint64_t retry_after_us) {
    run_t *run = job->run;
    uint64_t pause_us = retry_after_us > PAUSE_US ? retry_after_us : PAUSE_US;
    uint64_t now = now_us(run);
    uint64_t end_us = kvf_time_after(job->step_start_us, run->config->timeout_us);
    if (kvf_time_after(now, pause_us) > end_us) {
        return false;
    }
    job->retry_us = now + pause_us;
    job->pause_us += pause_us;
    run->n_paused++;
    run->score->retries++;
    return true;
}

static void refused(job_t *job, const kvf_answer_t *answer, const json_t *body) {
    const char *code = json_string_value(json_object_get(body, "error"));
    const char *message = json_string_value(json_object_get(body, "message"));
    char text[KVF_DETAIL_BYTES];
    (void)snprintf(text, sizeof(text), "%s node: HTTP %ld: %s",
                   job->step == STEP_DECODE ? "decode" : "prefill", answer->http_status,
                   message != NULL ? message : "no message");
    job_fail(job, code != NULL ? code : "protocol", text, job->step == STEP_DECODE);
}

static void on_answer(void *ctx, const kvf_answer_t *answer) {
    job_t *job = ctx;
    if (job->step == STEP_CANCEL) {
        job_end(job); /* 200 or 404: either way nothing is held any more */
        return;
    }
    if (answer->http_status == 0) {
        char text[KVF_DETAIL_BYTES];
        bool decode = job->step == STEP_DECODE;
        (void)snprintf(text, sizeof(text), "%s node %s: %s", decode ? "decode" : "prefill",
                       decode ? job->decode_url : job->prefill_url, answer->why);
        job_fail(job, answer->failure == KVF_ERR_DEADLINE ? "deadline" : "unreachable", text, true);
        return;
    }
    if (answer->http_status == 429 && job_pause(job, answer->retry_after_us)) {
        return;
    }
    json_t *body = json_loadb(answer->bytes == 0 ? "" : answer->body, answer->bytes, 0, NULL);
    if (answer->http_status != 200) {
        refused(job, answer, body);
    } else if (job->step == STEP_PREFILL) {
        prefill_done(job, body);
    } else {
        decode_done(job, body);
    }
    json_decref(body);
}

/* When the next request of the trace may start; KVF_NEVER after the last one. */
static uint64_t next_start_us(const run_t *run) {
    const kvf_trace_t *trace = run->trace;
    if (run->next == trace->n_requests || *run->config->stop != 0) {
        return KVF_NEVER;
    }
    uint64_t first = trace->requests[0].timestamp_us;
    uint64_t then = trace->requests[run->next].timestamp_us;
    if (run->config->speed == 0 || then < first) {
        return run->start_us;
    }
    double delay_us = (double)(then - first) / run->config->speed;
    return delay_us < 1e18 ? run->start_us + (uint64_t)delay_us : KVF_NEVER - 1;
}

static job_t *free_job(run_t *run) {
    for (uint32_t i = 0; run->n_busy < run->config->concurrency; i++) {
        if (run->jobs[i].request == NULL) {
            return &run->jobs[i];
        }
    }
    return NULL;
}

static void start_next(run_t *run, job_t *job, uint64_t due_us) {
    const kvf_replay_config_t *config = run->config;
    size_t k = run->next++;
    uint64_t now = now_us(run);
    job->request = &run->trace->requests[k];
    job->prefill_url = config->prefill.urls[k % config->prefill.n];
    job->decode_url = config->decode.urls[k / config->prefill.n % config->decode.n];
    job->start_us = now;
    job->late_us = now - due_us;
    (void)snprintf(job->request_id, sizeof(job->request_id), "replay-%016" PRIx64 "-%" PRIu64,
                   run->run_id, job->request->line);
    run->n_busy++;
    start_prefill(job);
}

/* Try those again whose pause is over. @return When the next pause ends. */
static uint64_t resume_paused(run_t *run, uint64_t now) {
    uint64_t wake_us = KVF_NEVER;
    for (uint32_t i = 0; run->n_paused > 0 && i < run->config->concurrency; i++) {
        job_t *job = &run->jobs[i];
        if (job->request == NULL || job->retry_us == KVF_NEVER) {
            continue;
        }
        if (job->retry_us <= now) {
            run->n_paused--;
            job_call(job);
        } else if (job->retry_us < wake_us) {
            wake_us = job->retry_us;
        }
    }
    return wake_us;
}

static void turn(run_t *run) {
    uint64_t now = now_us(run);
    uint64_t wake_us = kvf_time_after(now, TURN_US);
    uint64_t pause_ends_us = resume_paused(run, now);
    uint64_t due_us;
    job_t *job;
    while ((due_us = next_start_us(run)) <= now && (job = free_job(run)) != NULL) {
        start_next(run, job, due_us);
    }
    if (pause_ends_us < wake_us) {
        wake_us = pause_ends_us;
    }
    /* A start that waits for a place, not for its time, is woken by the answer that makes the
     * place. */
    if (due_us > now && due_us < wake_us) {
        wake_us = due_us;
    }
    kvf_client_progress(run->client, wake_us - now);
    run->config->progress(run->config->ctx, run->ended);
}

kvf_status_t kvf_replay_run(const kvf_replay_config_t *config, const kvf_trace_t *trace,
                            const kvf_alloc_t *alloc, kvf_score_t *score) {
    const kvf_rand_t *rand = kvf_rand_default();
    run_t run = {.config = config, .trace = trace, .clock = kvf_clock_default(), .score = score};
    rand->fill(rand->ctx, &run.run_id, sizeof(run.run_id));
    run.jobs = kvf_calloc(alloc, config->concurrency, sizeof(*run.jobs));
    if (run.jobs == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < config->concurrency; i++) {
        run.jobs[i].run = &run;
    }
    run.status = kvf_client_create(alloc, 2 * config->concurrency, &run.client);
    run.start_us = now_us(&run);
    while (run.status == KVF_OK && (run.n_busy > 0 || next_start_us(&run) != KVF_NEVER)) {
        turn(&run);
    }
    kvf_client_destroy(run.client);
    for (uint32_t i = 0; i < config->concurrency; i++) {
        free(run.jobs[i].body);
    }
    kvf_free(alloc, run.jobs);
    return run.status;
}

/** What a node answered to /readyz. */
typedef struct ready {
    bool answered;
    bool ok;
    char text[KVF_DETAIL_BYTES];
} ready_t;

static void on_ready(void *ctx, const kvf_answer_t *answer) {
    ready_t *ready = ctx;
    ready->answered = true;
    ready->ok = answer->http_status == 200;
    if (answer->http_status == 0) {
        (void)snprintf(ready->text, sizeof(ready->text), "%s; is the node running there?",
                       answer->why);
    } else {
        (void)snprintf(ready->text, sizeof(ready->text),
                       "HTTP %ld; wait until it is ready, or correct the URL", answer->http_status);
    }
}

static kvf_status_t check_nodes(kvf_client_t *client, const char *role,
                                const kvf_replay_nodes_t *nodes, kvf_detail_t *detail) {
    for (size_t i = 0; i < nodes->n; i++) {
        char url[2048];
        ready_t ready = {0};
        (void)snprintf(url, sizeof(url), "%s/readyz", nodes->urls[i]);
        kvf_status_t status =
            kvf_client_call(client, url, NULL, READY_TIMEOUT_US, on_ready, &ready);
        if (status != KVF_OK) {
            return kvf_fail(detail, status, "no memory for an HTTP call");
        }
        while (!ready.answered) {
            kvf_client_progress(client, TURN_US);
        }
        if (!ready.ok) {
            return kvf_fail(detail, KVF_ERR_IO, "%s node %s: %s", role, nodes->urls[i], ready.text);
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_replay_check_nodes(const kvf_replay_config_t *config, const kvf_alloc_t *alloc,
                                    kvf_detail_t *detail) {
    kvf_client_t *client;
    kvf_status_t status = kvf_client_create(alloc, 1, &client);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for an HTTP client");
    }
    status = check_nodes(client, "prefill", &config->prefill, detail);
    if (status == KVF_OK) {
        status = check_nodes(client, "decode", &config->decode, detail);
    }
    kvf_client_destroy(client);
    return status;
}
