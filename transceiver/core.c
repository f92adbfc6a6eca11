/* SPDX-License-Identifier: Apache-2.0 */
/* The core's registry: operations, their events to the caller, time. */
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- operations ---- */

void kvf_op_due(kvf_op_t *op) {
    kvf_core_t *core = op->core;
    if (op->queued) {
        return;
    }
    op->queued = true;
    op->due_next = NULL;
    *(core->due_last != NULL ? &core->due_last->due_next : &core->due_first) = op;
    core->due_last = op;
}

/* Its request id may be used again. */
static void op_unname(kvf_op_t *op) {
    const kvf_alloc_t *hash_alloc = op->core->alloc;
    HASH_DELETE(hh_live, op->core->live[op->kind], op);
}

void kvf_op_end(kvf_op_t *op, kvf_status_t status, const char *message) {
    if (!op->ended) {
        op_unname(op);
    }
    op->ended = true;
    op->result_due = true;
    op->status = status;
    (void)snprintf(op->detail.text, sizeof(op->detail.text), "%s", message);
    kvf_timer_set(&op->core->timers, &op->timer, KVF_NEVER);
    kvf_log(op->core->log, KVF_LOG_DEBUG, "%s %s (%" PRIu64 "): %s%s%s",
            op->kind == KVF_OP_SEND ? "send" : "receive", op->request_id, op->id,
            kvf_status_name(status), message[0] == '\0' ? "" : ": ", message);
    kvf_op_due(op);
}

void kvf_op_release(kvf_op_t *op) {
    KVF_FAIL_POINT(release);
    if (!op->released && !(KVF_MUTANT(lose_released) && op->kind == KVF_OP_SEND &&
                           op->status == KVF_ERR_CANCELLED)) {
        op->released_due = true;
        kvf_op_due(op);
    }
}

void kvf_op_doubt(kvf_op_t *op) {
    kvf_core_t *core = op->core;
    op->doubted = true;
    op->doubted_us = core->now_us;
    kvf_timer_set(&core->timers, &op->timer,
                  kvf_time_after(core->now_us, core->agent.quarantine_us));
}

void kvf_op_settled(kvf_op_t *op, const char *proof) {
    kvf_core_t *core = op->core;
    op->doubted = false;
    kvf_timer_set(&core->timers, &op->timer, KVF_NEVER);
    if (!op->released) { /* if the event is due, it has not listed them yet */
        op->n_poisoned = 0;
        op->quarantine_us = core->now_us - op->doubted_us;
    }
    kvf_log(core->log, KVF_LOG_DEBUG, "pages of %s %s (%" PRIu64 ") are settled: %s",
            op->kind == KVF_OP_SEND ? "send" : "receive", op->request_id, op->id, proof);
}

bool kvf_op_poison(kvf_op_t *op, size_t n) {
    kvf_core_t *core = op->core;
    op->poisoned = kvf_calloc(core->alloc, n, sizeof(*op->poisoned));
    if (op->poisoned == NULL) {
        kvf_timer_set(&core->timers, &op->timer,
                      kvf_time_after(core->now_us, core->agent.quarantine_us));
        return false;
    }
    op->n_poisoned = n;
    op->quarantine_us = core->now_us - op->doubted_us;
    kvf_log(core->log, KVF_LOG_WARN,
            "%zu pages of %s %s (%" PRIu64 ") are poisoned: no proof that nothing touches them", n,
            op->kind == KVF_OP_SEND ? "send" : "receive", op->request_id, op->id);
    return true;
}

kvf_status_t kvf_op_init(kvf_core_t *core, kvf_op_t *op, kvf_op_kind_t kind, const char *request_id,
                         kvf_event_cb cb, void *ctx,
                         void (*on_timer)(kvf_timer_t *timer, void *owner), kvf_detail_t *detail) {
    const kvf_alloc_t *hash_alloc = core->alloc;
    if (request_id == NULL || !kvf_text_ok(request_id, 1, KVF_MAX_ID_BYTES)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "request_id must have 1 to %d printable ASCII bytes", KVF_MAX_ID_BYTES);
    }
    if (cb == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "no callback: the result would be lost");
    }
    if (core->shutting_down) {
        return kvf_fail(detail, KVF_ERR_CANCELLED, "this agent shuts down");
    }
    kvf_op_t *other;
    HASH_FIND(hh_live, core->live[kind], request_id, strlen(request_id), other);
    if (other != NULL && !KVF_MUTANT(accept_duplicate_id)) {
        return kvf_fail(detail, KVF_ERR_DUPLICATE,
                        "request %s is alive on this side; cancel it or use another id",
                        request_id);
    }
    if (core->n_ops >= core->agent.max_transfers) {
        return kvf_fail(detail, KVF_ERR_AGAIN,
                        "%" PRIu32 " transfers are alive, the limit; retry when one has ended",
                        core->n_ops);
    }
    op->core = core;
    op->kind = kind;
    op->cb = cb;
    op->ctx = ctx;
    op->opened_us = core->now_us;
    (void)snprintf(op->request_id, sizeof(op->request_id), "%s", request_id);
    if (kvf_timer_reserve(&core->timers, &op->timer, on_timer, op) != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a transfer");
    }
    op->id = ++core->next_id;
    HASH_ADD(hh, core->ops, id, sizeof(op->id), op);
    if (kvf_hashed(op)) {
        HASH_ADD_KEYPTR(hh_live, core->live[kind], op->request_id, strlen(op->request_id), op);
    }
    if (op->hh_live.tbl == NULL) {
        if (kvf_hashed(op)) {
            HASH_DEL(core->ops, op);
        }
        kvf_timer_release(&core->timers, &op->timer);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a transfer");
    }
    core->n_ops++;
    *(kind == KVF_OP_SEND ? &core->counters.sends_live : &core->counters.recvs_live) += 1;
    return KVF_OK;
}

/* The handle is gone, and it counts no more. */
static void op_uncount(kvf_op_t *op) {
    op->core->n_ops--;
    *(op->kind == KVF_OP_SEND ? &op->core->counters.sends_live : &op->core->counters.recvs_live) -=
        1;
}

static void op_unlink(kvf_op_t *op) {
    kvf_core_t *core = op->core;
    const kvf_alloc_t *hash_alloc = core->alloc;
    if (!op->ended) {
        op_unname(op);
    }
    kvf_peer_detach(op);
    kvf_timer_release(&core->timers, &op->timer);
    HASH_DEL(core->ops, op);
}

void kvf_op_cleanup(kvf_op_t *op) {
    op_uncount(op);
    op_unlink(op);
}

static void op_destroy(kvf_op_t *op) {
    op_unlink(op);
    kvf_free(op->core->alloc, op->poisoned);
    if (op->kind == KVF_OP_SEND) {
        kvf_send_destroy(op);
    } else {
        kvf_recv_destroy(op);
    }
}

void kvf_op_reap(kvf_op_t *op) {
    bool quiet = op->kind == KVF_OP_SEND ? kvf_send_quiet(op) : kvf_recv_quiet(op);
    if (op->released && !op->queued && quiet) {
        op_destroy(op);
    }
}

kvf_op_t *kvf_op_find(kvf_core_t *core, uint64_t id, kvf_op_kind_t kind) {
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &id, sizeof(id), op);
    return op != NULL && op->kind == kind && !op->released ? op : NULL;
}

kvf_status_t kvf_core_check_tables(const kvf_core_t *core, const kvf_table_t *tables,
                                   uint32_t n_tables, kvf_detail_t *detail) {
    if (tables == NULL || n_tables != core->layout.n_groups) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%" PRIu32 " tables for %" PRIu32 " layer groups",
                        n_tables, core->layout.n_groups);
    }
    for (uint32_t g = 0; g < n_tables; g++) {
        if (tables[g].n_blocks < 0 || (tables[g].n_blocks > 0 && tables[g].slots == NULL)) {
            return kvf_fail(detail, KVF_ERR_INVALID, "group %s: a table of %" PRId64 " blocks",
                            core->layout.groups[g].name, tables[g].n_blocks);
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_core_check_request(kvf_core_t *core, const char *request_id,
                                    const kvf_lengths_t *lengths, bool include_drafts,
                                    int64_t allocated_tokens, int64_t cached_tokens,
                                    const kvf_table_t *tables, uint32_t n_tables,
                                    kvf_wanted_t *wanted, kvf_detail_t *detail) {
    const char *side = include_drafts ? "generation" : "context";
    const kvf_cp_t whole = {1, 0};
    kvf_detail_t text;
    kvf_status_t status = kvf_core_check_tables(core, tables, n_tables, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_check_capacity(lengths, include_drafts, side, allocated_tokens, &text);
    if (status == KVF_ERR_CAPACITY_MISMATCH) {
        core->counters.capacity_mismatches++;
        kvf_log(core->log, KVF_LOG_WARN, "request %s is refused: %s", request_id, text.text);
    }
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "%s", text.text);
    }
    for (uint32_t g = 0; g < n_tables; g++) {
        const kvf_layer_group_t *group = &core->layout.groups[g];
        int64_t n_pages = kvf_pages_total(core->config.regions[g].pages);
        status = kvf_wanted_init(lengths, group->tokens_per_block, group->window, group->sinks,
                                 cached_tokens, whole, whole, &wanted[g], detail);
        if (status != KVF_OK) {
            return status;
        }
        kvf_wanted_t live = kvf_wanted_live(&wanted[g], !include_drafts);
        status = kvf_table_check(&tables[g], &live, side, group->name, core->alloc, detail);
        /* What follows works with arrays of the prompt's length: only if the pool or the table can
         * cover what is live of it. */
        if (status == KVF_OK && kvf_wanted_count(&live) > n_pages &&
            wanted[g].prompt_blocks > tables[g].n_blocks &&
            wanted[g].prompt_blocks - tables[g].n_blocks > n_pages) {
            status = kvf_fail(detail, KVF_ERR_TOO_LARGE,
                              "group %s: a prompt of %" PRId64 " blocks, a pool of %" PRId64,
                              group->name, wanted[g].prompt_blocks, n_pages);
        }
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

/* ---- events to the caller ---- */

static const char *mover_of(const kvf_op_t *op) {
    return op->mapped         ? op->core->config.mapped_name
           : op->peer == NULL ? ""
                              : kvf_peer_mover_name(op->peer);
}

static void deliver(kvf_op_t *op) {
    kvf_aux_t aux;
    kvf_event_t base = {.message = "",
                        .peer = op->peer == NULL ? "" : op->peer->instance,
                        .mover = op->bytes > 0 ? mover_of(op) : "",
                        .bytes = op->bytes,
                        .pages = op->pages,
                        .pieces = op->pieces,
                        .transfer_us = op->transfer_us,
                        .exposed_us = op->exposed_us};
    if (op->progress_due) {
        kvf_event_t event = {
            .kind = KVF_EVENT_PROGRESS, .message = "", .peer = base.peer, .mover = mover_of(op)};
        op->progress_due = false;
        if (kvf_recv_progress_event(op, &event)) {
            op->cb(op->ctx, &event);
        }
    }
    if (!op->result_due && !op->released_due) {
        return;
    }
    base.status = op->status;
    base.message = op->detail.text;
    if (op->kind == KVF_OP_RECV) {
        kvf_recv_event(op, &base, &aux);
    }
    if (op->result_due) {
        kvf_event_t event = base;
        event.kind = KVF_EVENT_RESULT;
        op->result_due = false;
        op->cb(op->ctx, &event);
    }
    if (op->released_due) {
        base.kind = KVF_EVENT_RELEASED;
        base.poisoned = op->poisoned;
        base.n_poisoned = op->n_poisoned;
        base.quarantine_us = op->quarantine_us;
        op->released_due = false;
        op->released = true;
        op_uncount(op);
        op->cb(op->ctx, &base);
    }
}

bool kvf_core_deliver(kvf_core_t *core) {
    kvf_op_t *last = core->due_last;
    if (core->due_first == NULL) {
        return false;
    }
    /* Callbacks may cause more events; those wait for the next call. */
    for (bool more = true; more;) {
        kvf_op_t *op = core->due_first;
        more = op != last;
        core->due_first = op->due_next;
        if (core->due_first == NULL) {
            core->due_last = NULL;
        }
        op->queued = false;
        deliver(op);
        kvf_op_reap(op);
    }
    return true;
}

bool kvf_core_has_events(const kvf_core_t *core) {
    return core->due_first != NULL;
}

/* ---- time ---- */

void kvf_core_set_time(kvf_core_t *core, uint64_t now_us) {
    core->now_us = now_us > core->now_us ? now_us : core->now_us;
}

void kvf_core_tick(kvf_core_t *core) {
    /* If we stood still (a debugger, a suspended machine) others' words wait unread: nobody is lost
     * for that. A turn that nothing needed earlier is not late, however long ago the last one was.
     */
    uint64_t next_us = kvf_timers_next(&core->timers);
    uint64_t due_us = next_us > core->ticked_us ? next_us : core->ticked_us;
    if (core->now_us > kvf_time_after(due_us, core->agent.suspect_us) &&
        !KVF_MUTANT(judge_after_stall)) {
        kvf_peers_rearm(core);
    }
    core->ticked_us = core->now_us;
    kvf_timers_run(&core->timers, core->now_us);
    kvf_links_reap(core);
    if (core->peers_forgotten) {
        kvf_peers_reap(core);
    }
}

uint64_t kvf_core_next_us(const kvf_core_t *core) {
    return kvf_timers_next(&core->timers);
}

bool kvf_core_busy(const kvf_core_t *core) {
    return core->n_ops > 0 || core->n_posted > 0 || core->n_verifying > 0;
}

bool kvf_core_in_flight(const kvf_core_t *core) {
    return core->n_posted > 0 || core->n_landing > 0;
}

uint32_t kvf_core_lent(const kvf_core_t *core) {
    return core->n_lent;
}

/* ---- life ---- */

static int by_layer(const void *a, const void *b) {
    uint32_t left = ((const kvf_core_layer_t *)a)->layer,
             right = ((const kvf_core_layer_t *)b)->layer;
    return (left > right) - (left < right);
}

static kvf_status_t copy_strings(kvf_core_t *core, const kvf_agent_config_t *from) {
    char *instance = kvf_strdup(core->alloc, from->instance);
    const char **peers = kvf_calloc(core->alloc, from->n_peers + 1, sizeof(*peers));
    core->agent.instance = instance;
    core->agent.peers = peers;
    core->agent.n_peers = 0;
    if (instance == NULL || peers == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < from->n_peers; i++) {
        peers[i] = kvf_strdup(core->alloc, from->peers[i]);
        if (peers[i] == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        core->agent.n_peers++;
    }
    return KVF_OK;
}

kvf_status_t kvf_core_create(const kvf_core_config_t *config, kvf_core_t **core_p) {
    kvf_core_t *core = kvf_calloc(config->alloc, 1, sizeof(*core));
    if (core == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    core->config = *config;
    core->config.mapped_name = config->mapped_name == NULL ? KVF_MAPPED : config->mapped_name;
    core->agent = *config->agent;
    core->alloc = config->alloc;
    core->log = config->log;
    core->out = config->out;
    core->layout = *config->agent->layout;
    core->agent.layout = &core->layout;
    core->config.agent = &core->agent;
    core->layout_digest = kvf_layout_digest(&core->layout);
    config->rand.fill(config->rand.ctx, core->incarnation.bytes, sizeof(core->incarnation.bytes));
    kvf_timers_init(&core->timers, core->alloc);
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        core->n_layers += core->layout.groups[g].n_layers;
    }
    /* Before anything can fail: what the copied configuration points to is not ours. */
    kvf_status_t status = copy_strings(core, config->agent);
    core->layers = kvf_calloc(core->alloc, core->n_layers, sizeof(*core->layers));
    if (status != KVF_OK || core->layers == NULL) {
        kvf_core_destroy(core);
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t g = 0, n = 0; g < core->layout.n_groups; g++) {
        for (uint32_t i = 0; i < core->layout.groups[g].n_layers; i++) {
            core->layers[n++] = (kvf_core_layer_t){core->layout.groups[g].layers[i], g, i};
        }
    }
    qsort(core->layers, core->n_layers, sizeof(*core->layers), by_layer);
    *core_p = core;
    return KVF_OK;
}

void kvf_core_destroy(kvf_core_t *core) {
    if (core == NULL) {
        return;
    }
    /* What is left are receives whose pages were poisoned and never healed. */
    while (core->ops != NULL) {
        op_destroy(core->ops);
    }
    kvf_peers_cleanup(core);
    while (core->free_jobs != NULL) {
        kvf_verify_t *job = core->free_jobs;
        core->free_jobs = (kvf_verify_t *)job->job.next;
        kvf_free(core->alloc, job);
    }
    while (core->free_windows != NULL) {
        kvf_window_t *window = core->free_windows;
        core->free_windows = window->priv;
        kvf_free(core->alloc, window);
    }
    for (size_t i = 0; core->agent.peers != NULL && i < core->agent.n_peers; i++) {
        kvf_free(core->alloc, core->agent.peers[i]);
    }
    kvf_free(core->alloc, core->agent.peers);
    kvf_free(core->alloc, core->agent.instance);
    kvf_free(core->alloc, core->layers);
    kvf_free(core->alloc, core->control_address);
    for (uint32_t i = 0; i < KVF_CORE_MOVERS; i++) {
        kvf_free(core->alloc, core->mover_addresses[i].data);
    }
    kvf_free(core->alloc, core->mapped_address);
    kvf_timers_cleanup(&core->timers);
    kvf_free(core->alloc, core);
}

kvf_status_t kvf_core_set_control_address(kvf_core_t *core, const char *address) {
    char *copy = kvf_strdup(core->alloc, address);
    if (copy == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_free(core->alloc, core->control_address);
    core->control_address = copy;
    return KVF_OK;
}

kvf_status_t kvf_core_set_mover_address(kvf_core_t *core, uint32_t mover_idx, const void *address,
                                        size_t bytes) {
    uint8_t *copy = kvf_alloc(core->alloc, bytes + 1);
    if (copy == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    if (bytes > 0) {
        memcpy(copy, address, bytes);
    }
    kvf_free(core->alloc, core->mover_addresses[mover_idx].data);
    core->mover_addresses[mover_idx].data = copy;
    core->mover_addresses[mover_idx].bytes = bytes;
    return KVF_OK;
}

void kvf_core_shutdown(kvf_core_t *core) {
    core->shutting_down = true;
    for (kvf_op_t *op = core->ops, *next; op != NULL; op = next) {
        next = op->hh.next;
        if (op->kind == KVF_OP_SEND) {
            kvf_send_cancel_op(op, KVF_ERR_CANCELLED, "the context node shuts down");
        } else {
            kvf_recv_cancel_op(op, KVF_ERR_CANCELLED, "the generation node shuts down");
        }
    }
}

void kvf_core_goodbye(kvf_core_t *core) {
    kvf_peers_all_bye(core);
}

void kvf_core_audit(kvf_core_t *core) {
    kvf_detail_t detail;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        if (kvf_pages_audit(core->config.regions[g].pages, &detail) != KVF_OK) {
            core->counters.audit_failures++;
            kvf_log(core->log, KVF_LOG_ERROR, "the pages of group %s do not add up: %s",
                    core->layout.groups[g].name, detail.text);
        }
    }
}

void kvf_core_counters(const kvf_core_t *core, kvf_counters_t *counters_p) {
    *counters_p = core->counters;
}

const kvf_incarnation_t *kvf_core_incarnation(const kvf_core_t *core) {
    return &core->incarnation;
}

void kvf_incarnation_text(const kvf_incarnation_t *incarnation, char hex[33]) {
    for (size_t i = 0; i < sizeof(incarnation->bytes); i++) {
        (void)snprintf(hex + 2 * i, 3, "%02x", incarnation->bytes[i]);
    }
}

void kvf_core_moved(kvf_core_t *core, kvf_window_t *window, kvf_status_t status) {
    (void)core;
    kvf_send_on_moved(window, status);
}
