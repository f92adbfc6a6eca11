/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/http_error.h"
#include "tools/node/node.h"

#include <inttypes.h>
#include <stdlib.h>
#include <utlist.h>

static kvf_job_t *job_of(kvf_task_t *task) {
    return (kvf_job_t *)(void *)task; /* its first member */
}

/* With the lock: let the oldest job that waits try again. */
static void wake_waiter(kvf_node_t *node) {
    if (node->waiters != NULL) {
        kvf_workers_post(node->workers, &node->waiters->task, 0);
    }
}

static kvf_status_t take_pages(kvf_job_t *job, kvf_detail_t *detail) {
    kvf_node_t *node = job->node;
    if (atomic_load(&job->cancelled)) {
        return kvf_fail(detail, KVF_ERR_CANCELLED, "cancelled while it waited for pages");
    }
    (void)pthread_mutex_lock(&node->lock);
    bool first = node->waiters == job;
    (void)pthread_mutex_unlock(&node->lock);
    kvf_status_t status = KVF_ERR_AGAIN;
    if (first) {
        status = kvf_blocks_open(node->blocks, &job->body.lengths, &job->body.content, &job->lease,
                                 detail);
    }
    uint64_t now = kvf_node_now();
    if (status != KVF_ERR_AGAIN || now < job->deadline_us) {
        if (status == KVF_ERR_AGAIN) {
            uint64_t poll = first ? now + KVF_JOB_POLL_US : job->deadline_us;
            kvf_workers_post(node->workers, &job->task,
                             poll < job->deadline_us ? poll : job->deadline_us);
            return KVF_ERR_BUSY;
        }
        return status;
    }
    return kvf_fail(detail, status,
                    "no pages came free for this request within %" PRIu64
                    " ms; ask again, or raise pool.bytes",
                    (job->deadline_us - job->start_us) / 1000);
}

/* With the lock. */
static void count_prefix(const kvf_job_t *job) {
    kvf_node_counts_t *counts = &job->node->counts;
    int64_t cached = kvf_seq_cached_tokens(job->lease.seq);
    counts->prompt_tokens += (uint64_t)job->body.lengths.prompt_len;
    counts->cached_tokens += (uint64_t)cached;
    counts->prefix_hits += cached > 0;
}

/* @return Whether the job has left the phase. */
static bool step_waiting(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    kvf_detail_t detail;
    kvf_status_t status = take_pages(job, &detail);
    if (status == KVF_ERR_BUSY) {
        return false;
    }
    (void)pthread_mutex_lock(&node->lock);
    DL_DELETE(node->waiters, job);
    job->waiting = false;
    wake_waiter(node);
    if (status == KVF_OK) {
        count_prefix(job);
    }
    (void)pthread_mutex_unlock(&node->lock);
    job->wait_us = kvf_node_now() - job->start_us;
    if (status == KVF_OK) {
        status = job->ops->open(job, &detail);
    } else if (status == KVF_ERR_CANCELLED && job->ops->decline != NULL) {
        job->ops->decline(job);
    }
    job->phase = KVF_JOB_OPEN;
    if (status != KVF_OK) {
        job->released = true; /* nothing was opened, so no event comes */
        job->phase = KVF_JOB_ENDED;
        kvf_job_end(job, status, detail.text, NULL);
    }
    return true;
}

static bool step_open(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    (void)pthread_mutex_lock(&node->lock);
    bool has_result = job->has_result;
    bool waits =
        has_result && !job->released && job->ops->waits_for_pages && job->outcome.status == KVF_OK;
    (void)pthread_mutex_unlock(&node->lock);
    if (waits) {
        return false;
    }
    if (has_result) {
        job->ops->end(job);
        job->phase = KVF_JOB_ENDED;
        return true;
    }
    if (!atomic_load(&job->cancelled)) {
        job->ops->work(job);
    } else if (!job->cancel_sent) {
        job->cancel_sent = true;
        job->ops->cancel(job);
    }
    return false;
}

static void destroy(kvf_job_t *job) {
    kvf_node_t *node = job->node;
    kvf_blocks_close(node->blocks, &job->lease);
    kvf_body_cleanup(node->alloc, &job->body);
    kvf_free(node->alloc, job->outcome.tokens);
    kvf_free(node->alloc, job->outcome.missing);
    kvf_workers_remove(node->workers, &job->task);
    (void)pthread_mutex_lock(&node->lock);
    wake_waiter(node);
    kvf_free(node->alloc, job);
    if (--node->n_jobs == 0) {
        (void)pthread_cond_broadcast(&node->quiet);
    }
    (void)pthread_mutex_unlock(&node->lock);
}

static bool step(kvf_task_t *task) {
    kvf_job_t *job = job_of(task);
    if (job->phase == KVF_JOB_WAITING && !step_waiting(job)) {
        return true;
    }
    if (job->phase == KVF_JOB_OPEN && !step_open(job)) {
        return true;
    }
    (void)pthread_mutex_lock(&job->node->lock);
    bool released = job->released;
    (void)pthread_mutex_unlock(&job->node->lock);
    if (released) {
        destroy(job);
    }
    return !released;
}

/* With the lock. */
static kvf_status_t admit(kvf_node_t *node, kvf_job_t *job, kvf_detail_t *detail) {
    const kvf_alloc_t *hash_alloc = node->alloc;
    kvf_job_t *same;
    if (node->draining) {
        return kvf_fail(detail, KVF_ERR_AGAIN, "the node is draining; ask another one");
    }
    HASH_FIND_STR(node->by_id, job->body.request_id, same);
    if (same != NULL) {
        return kvf_fail(detail, KVF_ERR_DUPLICATE,
                        "a live request has the id %s; use another id, or cancel that one",
                        job->body.request_id);
    }
    if (node->n_jobs >= node->config->max_transfers) {
        return kvf_fail(detail, KVF_ERR_AGAIN,
                        "%" PRIu32 " requests are alive, the most that limits.transfers allows",
                        node->n_jobs);
    }
    HASH_ADD_STR(node->by_id, body.request_id, job);
    if (!kvf_hashed(job)) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the request");
    }
    node->n_jobs++;
    DL_APPEND(node->waiters, job);
    job->waiting = true;
    kvf_workers_post(node->workers, &job->task, 0);
    return KVF_OK;
}

void kvf_job_start(kvf_node_t *node, const kvf_job_ops_t *ops, kvf_body_t *body,
                   kvf_http_request_t *http) {
    kvf_detail_t detail;
    kvf_job_t *job = NULL;
    kvf_status_t status = kvf_blocks_fit(node->blocks, &body->lengths, &detail);
    if (status != KVF_OK) {
        goto err_answer;
    }
    job = kvf_calloc(node->alloc, 1, sizeof(*job));
    if (job == NULL || kvf_workers_add(node->workers, &job->task, step) != KVF_OK) {
        status = kvf_fail(&detail, KVF_ERR_NO_MEMORY, "no memory for the request");
        goto err_answer;
    }
    job->node = node;
    job->ops = ops;
    job->body = *body;
    job->http = http;
    job->start_us = kvf_node_now();
    job->deadline_us =
        job->start_us +
        (body->timeout_us != 0 ? body->timeout_us : node->config->request_timeout_ms * 1000);
    (void)pthread_mutex_lock(&node->lock);
    status = admit(node, job, &detail);
    (void)pthread_mutex_unlock(&node->lock);
    if (status == KVF_OK) {
        return;
    }
    kvf_workers_remove(node->workers, &job->task);

err_answer:
    kvf_free(node->alloc, job);
    kvf_body_cleanup(node->alloc, body);
    kvf_node_refuse(node, http, status, detail.text);
}

/* What an event points to lives during the callback only. @return Whether there was memory. */
static bool copy_lists(const kvf_alloc_t *alloc, const kvf_event_t *event, kvf_outcome_t *outcome) {
    const kvf_aux_t *aux = event->aux;
    if (event->n_missing > 0) {
        outcome->missing = kvf_realloc(alloc, NULL, event->n_missing, sizeof(*outcome->missing));
        if (outcome->missing == NULL) {
            return false;
        }
        memcpy(outcome->missing, event->missing, event->n_missing * sizeof(*outcome->missing));
        outcome->n_missing = event->n_missing;
    }
    if (aux != NULL && aux->n_first_tokens + aux->n_draft_tokens > 0) {
        size_t n = aux->n_first_tokens;
        outcome->tokens =
            kvf_realloc(alloc, NULL, n + aux->n_draft_tokens, sizeof(*outcome->tokens));
        if (outcome->tokens == NULL) {
            return false;
        }
        if (n > 0) {
            memcpy(outcome->tokens, aux->first_tokens, n * sizeof(*outcome->tokens));
        }
        if (aux->n_draft_tokens > 0) {
            memcpy(outcome->tokens + n, aux->draft_tokens,
                   aux->n_draft_tokens * sizeof(*outcome->tokens));
        }
        outcome->n_first_tokens = n;
        outcome->n_draft_tokens = aux->n_draft_tokens;
    }
    return true;
}

static void take_result(const kvf_alloc_t *alloc, const kvf_event_t *event,
                        kvf_outcome_t *outcome) {
    *outcome = (kvf_outcome_t){.status = event->status,
                               .bytes = event->bytes,
                               .pages = event->pages,
                               .pieces = event->pieces,
                               .transfer_us = event->transfer_us,
                               .exposed_us = event->exposed_us};
    (void)snprintf(outcome->message, sizeof(outcome->message), "%s", event->message);
    (void)snprintf(outcome->peer, sizeof(outcome->peer), "%s", event->peer);
    (void)snprintf(outcome->mover, sizeof(outcome->mover), "%s", event->mover);
    if (!copy_lists(alloc, event, outcome)) {
        outcome->status = KVF_ERR_NO_MEMORY;
        (void)snprintf(outcome->message, sizeof(outcome->message), "no memory for the result");
    }
}

void kvf_job_event(void *ctx, const kvf_event_t *event) {
    kvf_job_t *job = ctx;
    kvf_node_t *node = job->node;
    if (event->kind == KVF_EVENT_PROGRESS) {
        return;
    }
    if (event->kind == KVF_EVENT_RESULT) {
        take_result(node->alloc, event, &job->outcome);
    } else if (event->n_poisoned > 0) {
        kvf_log(&node->log, KVF_LOG_WARN,
                "request %s: %zu pages could not be proven quiet; the pool keeps them back",
                job->body.request_id, event->n_poisoned);
    }
    (void)pthread_mutex_lock(&node->lock);
    job->has_result = job->has_result || event->kind == KVF_EVENT_RESULT;
    job->released = job->released || event->kind == KVF_EVENT_RELEASED;
    if (event->kind == KVF_EVENT_RELEASED && event->quarantine_us > 0) {
        kvf_histogram_observe(&node->counts.quarantine, event->quarantine_us);
    }
    kvf_workers_post(node->workers, &job->task, 0);
    (void)pthread_mutex_unlock(&node->lock);
}

bool kvf_job_in_vain(kvf_job_t *job) {
    if (atomic_load(&job->cancelled)) {
        return true;
    }
    (void)pthread_mutex_lock(&job->node->lock);
    bool has_result = job->has_result;
    (void)pthread_mutex_unlock(&job->node->lock);
    return has_result;
}

uint64_t kvf_job_time_left(const kvf_job_t *job) {
    uint64_t now = kvf_node_now();
    return now < job->deadline_us ? job->deadline_us - now : 1;
}

static void set(json_t *object, const char *name, json_t *value) {
    (void)json_object_set_new(object, name, value); /* without memory a field is absent */
}

static json_t *state_of(const char *request_id, kvf_role_t role, const char *state) {
    json_t *object = json_object();
    set(object, "request_id", json_string(request_id));
    set(object, "role", json_string(kvf_role_name(role)));
    set(object, "state", json_string(state));
    return object;
}

/* With the lock. */
static void count(const kvf_job_t *job, kvf_status_t status) {
    kvf_node_counts_t *counts = &job->node->counts;
    const kvf_outcome_t *outcome = &job->outcome;
    bool decode = job->node->role == KVF_ROLE_DECODE;
    counts->ended[kvf_node_status_idx(status)]++;
    counts->pieces += outcome->pieces;
    counts->wait_us += job->wait_us;
    counts->transfer_us += outcome->transfer_us;
    *(decode ? &counts->verify_us : &counts->fill_us) += job->work_us;
    if (status == KVF_OK) {
        kvf_histogram_observe(&counts->transfer, outcome->transfer_us);
        if (decode) {
            kvf_histogram_observe(&counts->exposed, outcome->exposed_us);
        }
    }
    for (size_t i = 0; i < KVF_NODE_MOVERS && outcome->mover[0] != '\0'; i++) {
        if (counts->movers[i].name[0] == '\0') {
            memcpy(counts->movers[i].name, outcome->mover, sizeof(counts->movers[i].name));
        }
        if (strcmp(counts->movers[i].name, outcome->mover) == 0) {
            counts->movers[i].bytes += outcome->bytes;
            break;
        }
    }
}

/* Whether it never ran: nothing was opened, or the ticket was not taken. */
static bool turned_away(const kvf_job_t *job, kvf_status_t status) {
    if (job->phase != KVF_JOB_OPEN) {
        return true;
    }
    return job->node->role == KVF_ROLE_DECODE &&
           (kvf_status_scope(status) == KVF_SCOPE_CALL || status == KVF_ERR_FORGED ||
            status == KVF_ERR_USED || status == KVF_ERR_EXPIRED);
}

/* Forget the id, keep the record, count. @return Who waits for the end of a cancel, or NULL. */
static kvf_http_request_t *retire(kvf_job_t *job, kvf_status_t status, const char *text) {
    kvf_node_t *node = job->node;
    const kvf_alloc_t *hash_alloc = node->alloc;
    (void)pthread_mutex_lock(&node->lock);
    HASH_DEL(node->by_id, job);
    if (text != NULL) {
        kvf_ended_put(node->ended, job->body.request_id, text, turned_away(job, status));
    }
    count(job, status);
    kvf_http_request_t *cancel_http = job->cancel_http;
    job->cancel_http = NULL;
    (void)pthread_mutex_unlock(&node->lock);
    return cancel_http;
}

void kvf_job_end(kvf_job_t *job, kvf_status_t status, const char *message, json_t *record) {
    kvf_node_t *node = job->node;
    char advised[KVF_DETAIL_BYTES];
    message = kvf_http_advise(status, message, advised);
    json_t *whole = state_of(job->body.request_id, node->role,
                             status == KVF_OK ? "done" : kvf_status_name(status));
    if (status != KVF_OK) {
        set(whole, "message", json_string(message));
    }
    if (record != NULL) {
        (void)json_object_update(whole, record);
        json_decref(record);
    }
    char *text = json_dumps(whole, JSON_COMPACT);
    kvf_http_request_t *cancel_http = retire(job, status, text);
    free(text);
    kvf_log(&node->log, KVF_LOG_DEBUG, "request %s: %s %s", job->body.request_id,
            kvf_status_name(status), status == KVF_OK ? "" : message);
    if (job->http != NULL && status == KVF_OK) {
        kvf_http_answer_json(job->http, 200, whole);
    } else if (job->http != NULL) {
        kvf_http_answer_error(job->http, status, message);
    }
    job->http = NULL;
    if (cancel_http != NULL && status == KVF_ERR_CANCELLED) {
        kvf_http_answer_json(cancel_http, 200, whole);
    } else if (cancel_http != NULL) {
        kvf_http_answer_absent(cancel_http, "the request had just ended by itself");
    }
    json_decref(whole);
}

void kvf_job_show(kvf_node_t *node, const char *request_id, kvf_http_request_t *http) {
    kvf_job_t *job;
    json_t *shown = NULL;
    (void)pthread_mutex_lock(&node->lock);
    HASH_FIND_STR(node->by_id, request_id, job);
    const char *text = kvf_ended_get(node->ended, request_id);
    if (job != NULL) {
        shown = state_of(request_id, node->role, "running");
        set(shown, "waits_for_pages", json_boolean(job->waiting));
    } else if (text != NULL) {
        shown = json_loads(text, 0, NULL);
    }
    bool known = job != NULL || text != NULL;
    (void)pthread_mutex_unlock(&node->lock);
    if (known) {
        kvf_http_answer_json(http, 200, shown);
        json_decref(shown);
    } else {
        kvf_http_answer_absent(http, "no request of this id is known here");
    }
}

void kvf_job_cancel(kvf_node_t *node, const char *request_id, kvf_http_request_t *http) {
    kvf_job_t *job;
    (void)pthread_mutex_lock(&node->lock);
    HASH_FIND_STR(node->by_id, request_id, job);
    bool second = job != NULL && job->cancel_http != NULL;
    if (job != NULL && !second) {
        job->cancel_http = http;
        atomic_store(&job->cancelled, true);
        kvf_workers_post(node->workers, &job->task, 0);
    }
    (void)pthread_mutex_unlock(&node->lock);
    if (job == NULL) {
        kvf_http_answer_absent(http, "no live request of this id is known here");
    } else if (second) {
        json_t *answer = state_of(request_id, node->role, "cancelled");
        kvf_http_answer_json(http, 200, answer);
        json_decref(answer);
    }
}
