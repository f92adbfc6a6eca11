/* SPDX-License-Identifier: Apache-2.0 */
/* The context side of a transfer. */
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* A window is posted, completes and is committed as one. */
#define WINDOW_PIECES 64
#define WINDOW_BYTES (UINT64_C(4) << 20)

typedef struct kvf_layer_range {
    uint32_t first;
    uint32_t end;
} kvf_layer_range_t;

typedef struct kvf_send_op {
    kvf_op_t op;
    kvf_lengths_t lengths;
    kvf_table_t tables[KVF_MAX_GROUPS]; /* copies; only what is live for the prompt matters */
    kvf_wanted_t live[KVF_MAX_GROUPS];
    bool reading; /* read_begin was called for every live page */

    uint64_t layers[KVF_MAX_GROUPS][KVF_MAX_GROUP_LAYERS / 64]; /* made ready, by local index */
    uint32_t n_layers;                                          /* made ready */
    kvf_layer_range_t *ranges; /* in the order in which they were made ready */
    size_t n_ranges;
    size_t range_idx; /* the one that is being moved */
    kvf_plan_cursor_t cursor;

    bool finished;
    uint64_t finished_us;
    int32_t *tokens; /* first tokens, then drafts */
    size_t n_first_tokens, n_draft_tokens;
    uint8_t *data;
    size_t data_bytes;

    bool claimed; /* its ticket was used */
    bool planned; /* the request is complete and paired */
    bool final_sent;
    kvf_transfer_id_t transfer;
    uint64_t claimed_us;
    kvf_plan_t plan;
    uint32_t n_posted; /* windows */

    bool moving; /* in the core's list */
    struct kvf_send_op *moving_next, *moving_prev;
} kvf_send_op_t;

/* A posted window, with room for its pieces. Kept for the next one when done. */
typedef struct window_box {
    kvf_window_t window;
    kvf_piece_t pieces[WINDOW_PIECES];
} window_box_t;

static kvf_send_op_t *send_of(kvf_op_t *op) {
    return (kvf_send_op_t *)op;
}

/* ---- turn-taking ---- */

static void leave_moving(kvf_send_op_t *send) {
    kvf_core_t *core = send->op.core;
    if (!send->moving) {
        return;
    }
    *(send->moving_prev != NULL ? &send->moving_prev->moving_next : &core->moving_first) =
        send->moving_next;
    *(send->moving_next != NULL ? &send->moving_next->moving_prev : &core->moving_last) =
        send->moving_prev;
    send->moving_next = send->moving_prev = NULL;
    send->moving = false;
}

static void enter_moving(kvf_send_op_t *send) {
    kvf_core_t *core = send->op.core;
    if (send->moving) {
        return;
    }
    send->moving_prev = core->moving_last;
    send->moving_next = NULL;
    *(core->moving_last != NULL ? &core->moving_last->moving_next : &core->moving_first) = send;
    core->moving_last = send;
    send->moving = true;
}

kvf_send_op_t *kvf_send_next_moving(kvf_send_op_t *send) {
    return send->moving_next;
}

/* ---- the end ---- */

static void end_reads(kvf_send_op_t *send, uint32_t n_groups, int64_t last_group_end) {
    kvf_core_t *core = send->op.core;
    for (uint32_t g = 0; g < n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        int64_t end = g + 1 == n_groups ? last_group_end : live->prompt_blocks;
        for (int64_t o = kvf_wanted_next(live, 0); o < end; o = kvf_wanted_next(live, o + 1)) {
            kvf_pages_read_end(core->config.regions[g].pages, send->tables[g].slots[o]);
        }
    }
}

/* The receiver's pages are out of reach: our last access to them has completed, or there was none.
 */
static void tell_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    Kvf__Wire__Drained drained;
    Kvf__Wire__TransferId id;
    kvf__wire__drained__init(&drained);
    kvf_transfer_id_write(transfer, &id);
    drained.transfer = &id;
    kvf_peer_tell(peer, KVF_FRAME_DRAINED, &drained.base);
}

/* Nothing reads its pages any more. */
static void finish_off(kvf_send_op_t *send) {
    kvf_core_t *core = send->op.core;
    if (send->n_posted > 0 || !send->reading) {
        return;
    }
    send->reading = false;
    end_reads(send, core->layout.n_groups, send->live[core->layout.n_groups - 1].prompt_blocks);
    if (send->claimed && send->op.status != KVF_OK && send->op.peer != NULL) {
        tell_drained(send->op.peer, &send->transfer);
    }
    kvf_op_release(&send->op);
}

static void send_end(kvf_send_op_t *send, kvf_status_t status, const char *message, bool tell) {
    kvf_core_t *core = send->op.core;
    send->op.transfer_us = send->claimed ? core->now_us - send->claimed_us : 0;
    send->op.bytes = send->planned ? send->plan.bytes : 0;
    send->op.pages = send->planned ? send->plan.n_pairs : 0;
    if (!kvf_op_end(&send->op, status, message)) {
        return;
    }
    leave_moving(send);
    core->tombstones[core->n_tombstones++ % KVF_TOMBSTONES] =
        (kvf_tombstone_t){send->op.id, send->claimed ? KVF_ERR_USED : status};
    if (tell && send->claimed && send->op.peer != NULL) {
        kvf_peer_tell_abort(send->op.peer, &send->transfer, status, message);
    }
    finish_off(send);
}

bool kvf_send_quiet(const kvf_op_t *op) {
    return ((const kvf_send_op_t *)op)->n_posted == 0;
}

void kvf_send_destroy(kvf_op_t *op) {
    kvf_send_op_t *send = send_of(op);
    const kvf_alloc_t *alloc = op->core->alloc;
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        kvf_free(alloc, send->tables[g].slots);
    }
    kvf_plan_cleanup(&send->plan);
    kvf_free(alloc, send->ranges);
    kvf_free(alloc, send->tokens);
    kvf_free(alloc, send->data);
    kvf_free(alloc, send);
}

static void on_timer(kvf_timer_t *timer, void *owner) {
    kvf_send_op_t *send = owner;
    (void)timer;
    if (!send->claimed && send->finished) {
        send_end(send, KVF_ERR_EXPIRED, "no receiver came within the lease; prefill again", false);
    } else if (!send->finished) {
        send_end(send, KVF_ERR_DEADLINE, "prefill did not finish in its time", true);
    } else {
        send_end(send, KVF_ERR_DEADLINE, "the receiver did not end the transfer in its time", true);
    }
}

/* ---- calls ---- */

static kvf_status_t copy_tables(kvf_send_op_t *send, const kvf_table_t *tables) {
    kvf_core_t *core = send->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        size_t bytes = (size_t)tables[g].n_blocks * sizeof(int32_t);
        int32_t *copy = kvf_alloc(core->alloc, bytes);
        if (copy == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        memcpy(copy, tables[g].slots, bytes);
        send->tables[g] = (kvf_table_t){copy, tables[g].n_blocks};
    }
    return KVF_OK;
}

/* Every live page must be bound, and gets a reader. */
static kvf_status_t begin_reads(kvf_send_op_t *send, kvf_detail_t *detail) {
    kvf_core_t *core = send->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        const char *name = core->layout.groups[g].name;
        for (int64_t o = kvf_wanted_next(live, 0); o < live->prompt_blocks;
             o = kvf_wanted_next(live, o + 1)) {
            int32_t slot = o < send->tables[g].n_blocks ? send->tables[g].slots[o] : -1;
            kvf_status_t status = slot < 0
                                      ? KVF_ERR_UNCOVERED
                                      : kvf_pages_read_begin(core->config.regions[g].pages, slot);
            if (status != KVF_OK) {
                end_reads(send, g + 1, o);
                return status == KVF_ERR_UNCOVERED
                           ? kvf_fail(detail, status,
                                      "source missing in group %s: %" PRId64
                                      " (a live block is unbound)",
                                      name, o)
                           : kvf_fail(detail, status,
                                      "group %s, ordinal %" PRId64 ": slot %" PRId32 ": %s", name,
                                      o, slot,
                                      status == KVF_ERR_RANGE ? "outside the pool"
                                      : status == KVF_ERR_INVALID
                                          ? "not held; acquire it first"
                                          : "being written for another transfer");
            }
        }
    }
    send->reading = true;
    return KVF_OK;
}

kvf_status_t kvf_core_send_open(kvf_core_t *core, const kvf_send_desc_t *desc, kvf_event_cb cb,
                                void *ctx, uint64_t *id_p, kvf_detail_t *detail) {
    kvf_send_op_t *send = kvf_calloc(core->alloc, 1, sizeof(*send));
    if (send == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a send");
    }
    kvf_status_t status =
        kvf_op_init(core, &send->op, KVF_OP_SEND, desc->request_id, cb, ctx, on_timer, detail);
    if (status != KVF_OK) {
        kvf_free(core->alloc, send);
        return status;
    }
    status = kvf_core_check_request(core, &desc->lengths, false, desc->allocated_tokens, 0,
                                    desc->tables, desc->n_tables, send->live, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    send->lengths = desc->lengths;
    status = copy_tables(send, desc->tables);
    if (status != KVF_OK) {
        (void)kvf_fail(detail, status, "no memory for the tables");
        goto err_op;
    }
    status = begin_reads(send, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    if (desc->timeout_us != 0) {
        kvf_timer_set(&core->timers, &send->op.timer,
                      kvf_time_after(core->now_us, desc->timeout_us));
    }
    *id_p = send->op.id;
    return KVF_OK;

err_op:
    kvf_op_cleanup(&send->op);
    kvf_send_destroy(&send->op);
    return status;
}

static kvf_status_t make_ticket(const kvf_send_op_t *send, uint8_t *bytes, size_t *n_bytes_p) {
    const kvf_core_t *core = send->op.core;
    kvf_ticket_t ticket = {.send_id = send->op.id,
                           .issuer = core->incarnation,
                           .prompt_tokens = kvf_prompt_tokens(&send->lengths)};
    (void)snprintf(ticket.instance, sizeof(ticket.instance), "%s", core->agent.instance);
    (void)snprintf(ticket.address, sizeof(ticket.address), "%s", core->control_address);
    (void)snprintf(ticket.request_id, sizeof(ticket.request_id), "%s", send->op.request_id);
    return kvf_ticket_encode(&ticket, core->agent.cluster_key, bytes, n_bytes_p);
}

kvf_status_t kvf_core_send_ticket(kvf_core_t *core, uint64_t id, char *ticket, size_t cap) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    size_t n_bytes;
    if (op == NULL || op->ended) {
        return KVF_ERR_UNKNOWN;
    }
    kvf_status_t status = make_ticket(send_of(op), bytes, &n_bytes);
    return status == KVF_OK ? kvf_ticket_to_text(bytes, n_bytes, ticket, cap) : status;
}

static void send_final_if_complete(kvf_send_op_t *send, Kvf__Wire__CommitRange **ranges,
                                   size_t n_ranges);

/* New work for the mover, or perhaps the end of it. */
static void wake(kvf_send_op_t *send) {
    if (send->planned && !send->op.ended) {
        if (send->range_idx < send->n_ranges) {
            enter_moving(send);
        }
        send_final_if_complete(send, NULL, 0);
    }
}

kvf_status_t kvf_core_send_ready(kvf_core_t *core, uint64_t id, const kvf_range_t *range,
                                 kvf_detail_t *detail) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    kvf_send_op_t *send = send_of(op);
    uint32_t n = 0;
    if (op == NULL || op->ended) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN, "this send has ended");
    }
    if (range->token_end != kvf_prompt_tokens(&send->lengths)) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "a part of the prompt (token_end %" PRId64 " of %" PRId64
                        "): this version sends whole prompts",
                        range->token_end, kvf_prompt_tokens(&send->lengths));
    }
    for (int marking = 0; marking < 2; marking++) { /* check all, then mark all */
        for (uint32_t g = 0; g < core->layout.n_groups; g++) {
            uint32_t first, end;
            kvf_group_layer_span(&core->layout.groups[g], range->layer_first, range->layer_end,
                                 &first, &end);
            for (uint32_t i = first; i < end; i++) {
                uint64_t bit = UINT64_C(1) << (i % 64);
                if (marking) {
                    send->layers[g][i / 64] |= bit;
                } else if ((send->layers[g][i / 64] & bit) != 0) {
                    return kvf_fail(detail, KVF_ERR_INVALID,
                                    "layer %" PRIu32 " was made ready before",
                                    core->layout.groups[g].layers[i]);
                }
                n += !marking;
            }
        }
        if (n == 0) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "no layer of the model lies in [%" PRIu32 ", %" PRIu32 ")",
                            range->layer_first, range->layer_end);
        }
        if (!marking) {
            kvf_layer_range_t *ranges =
                kvf_realloc(core->alloc, send->ranges, send->n_ranges + 1, sizeof(*ranges));
            if (ranges == NULL) {
                return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a range");
            }
            send->ranges = ranges;
        }
    }
    send->ranges[send->n_ranges++] = (kvf_layer_range_t){range->layer_first, range->layer_end};
    send->n_layers += n;
    wake(send);
    return KVF_OK;
}

static kvf_status_t copy_aux(kvf_send_op_t *send, const kvf_aux_t *aux, kvf_detail_t *detail) {
    kvf_core_t *core = send->op.core;
    size_t n = aux->n_first_tokens + aux->n_draft_tokens;
    if (aux->n_first_tokens > KVF_MAX_AUX_TOKENS || aux->n_draft_tokens > KVF_MAX_AUX_TOKENS ||
        aux->data_bytes > KVF_MAX_AUX_BYTES) {
        return kvf_fail(
            detail, KVF_ERR_TOO_LARGE,
            "at most %d tokens of each kind and %d bytes of data go with a final message",
            KVF_MAX_AUX_TOKENS, KVF_MAX_AUX_BYTES);
    }
    if (aux->n_draft_tokens != 0 && (int64_t)aux->n_draft_tokens != send->lengths.draft_len) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%zu draft tokens for a draft_len of %" PRId64,
                        aux->n_draft_tokens, send->lengths.draft_len);
    }
    int32_t *tokens = kvf_realloc(core->alloc, NULL, n + 1, sizeof(*tokens));
    uint8_t *data = kvf_alloc(core->alloc, aux->data_bytes + 1);
    if (tokens == NULL || data == NULL) {
        kvf_free(core->alloc, tokens);
        kvf_free(core->alloc, data);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the aux data");
    }
    for (size_t i = 0; i < n; i++) {
        tokens[i] = i < aux->n_first_tokens ? aux->first_tokens[i]
                                            : aux->draft_tokens[i - aux->n_first_tokens];
    }
    if (aux->data_bytes > 0) {
        memcpy(data, aux->data, aux->data_bytes);
    }
    send->tokens = tokens;
    send->n_first_tokens = aux->n_first_tokens;
    send->n_draft_tokens = aux->n_draft_tokens;
    send->data = data;
    send->data_bytes = aux->data_bytes;
    return KVF_OK;
}

kvf_status_t kvf_core_send_finish(kvf_core_t *core, uint64_t id, const kvf_aux_t *aux,
                                  kvf_detail_t *detail) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    kvf_send_op_t *send = send_of(op);
    if (op == NULL || op->ended) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN, "this send has ended");
    }
    if (send->finished) {
        return kvf_fail(detail, KVF_ERR_INVALID, "it was finished before");
    }
    if (send->n_layers != core->n_layers) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "only %" PRIu32 " of %" PRIu32 " layers were made ready", send->n_layers,
                        core->n_layers);
    }
    if (aux != NULL) {
        kvf_status_t status = copy_aux(send, aux, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    send->finished = true;
    send->finished_us = core->now_us;
    if (!send->claimed) {
        kvf_timer_set(&core->timers, &op->timer,
                      kvf_time_after(core->now_us, core->agent.lease_us));
    }
    wake(send);
    return KVF_OK;
}

kvf_status_t kvf_send_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message) {
    send_end(send_of(op), reason, message, true);
    return KVF_OK;
}

kvf_status_t kvf_core_send_cancel(kvf_core_t *core, uint64_t id, kvf_status_t reason) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    if (op == NULL || op->ended) {
        return KVF_ERR_UNKNOWN;
    }
    return kvf_send_cancel_op(op, reason == KVF_ERR_PREFILL_FAILED ? reason : KVF_ERR_CANCELLED,
                              reason == KVF_ERR_PREFILL_FAILED
                                  ? "the context side lost this prefill"
                                  : "cancelled on the context side");
}

/* ---- messages ---- */

static kvf_send_op_t *find_transfer(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    for (kvf_op_t *op = peer->ops; op != NULL; op = op->peer_next) {
        if (op->kind == KVF_OP_SEND && send_of(op)->claimed &&
            send_of(op)->transfer.counter == transfer->counter &&
            kvf_incarnation_equal(&send_of(op)->transfer.receiver, &transfer->receiver)) {
            return send_of(op);
        }
    }
    return NULL;
}

/* Why there is no live send of that id. */
static kvf_status_t epitaph(const kvf_core_t *core, uint64_t send_id) {
    uint64_t n = core->n_tombstones < KVF_TOMBSTONES ? core->n_tombstones : KVF_TOMBSTONES;
    for (uint64_t i = 0; i < n; i++) {
        if (core->tombstones[i].send_id == send_id) {
            return core->tombstones[i].status;
        }
    }
    return KVF_ERR_UNKNOWN;
}

/* Which send does this request's ticket name, and may this peer have it? */
static kvf_status_t claim(kvf_peer_t *peer, const Kvf__Wire__RecvRequest *request,
                          const kvf_transfer_id_t *transfer, kvf_send_op_t **send_p,
                          kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    kvf_ticket_t ticket;
    kvf_status_t status = kvf_ticket_decode(request->ticket.data, request->ticket.len,
                                            core->agent.cluster_key, &ticket);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "the ticket's MAC is wrong");
    }
    if (!kvf_incarnation_equal(&ticket.issuer, &core->incarnation)) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN,
                        "the ticket was made by another incarnation of this node; prefill again");
    }
    kvf_send_op_t *send = send_of(kvf_op_find(core, ticket.send_id, KVF_OP_SEND));
    if (send == NULL || send->op.ended) {
        status = send != NULL && send->claimed ? KVF_ERR_USED : epitaph(core, ticket.send_id);
        return kvf_fail(detail, status, "%s", kvf_status_text(status));
    }
    if (send->claimed) {
        return kvf_fail(detail, KVF_ERR_USED, "the ticket is in use by another transfer");
    }
    if (!kvf_incarnation_equal(&transfer->receiver, &peer->incarnation)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the transfer id does not belong to this peer");
    }
    if (strcmp(request->request_id, send->op.request_id) != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the ticket belongs to another request id");
    }
    kvf_lengths_t lengths = {request->prompt_len, 0, 0, request->total_input_len_cp};
    if (kvf_prompt_tokens(&lengths) != kvf_prompt_tokens(&send->lengths)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "a prompt of %" PRId64 " tokens is asked for, %" PRId64 " were prefilled",
                        kvf_prompt_tokens(&lengths), kvf_prompt_tokens(&send->lengths));
    }
    *send_p = send;
    return KVF_OK;
}

/* The first part of a request: tie the send to its transfer. */
static kvf_status_t start_plan(kvf_send_op_t *send, kvf_peer_t *peer,
                               const Kvf__Wire__RecvRequest *request,
                               const kvf_transfer_id_t *transfer, kvf_detail_t *detail) {
    kvf_core_t *core = send->op.core;
    kvf_wanted_t wanted[KVF_MAX_GROUPS];
    send->claimed = true;
    send->claimed_us = core->now_us;
    send->transfer = *transfer;
    kvf_peer_attach(peer, &send->op);
    /* The receiver ends it at its deadline and says so; this is for a receiver that does not. */
    kvf_timer_set(
        &core->timers, &send->op.timer,
        kvf_time_after(kvf_time_after(core->now_us, request->timeout_us), core->agent.lost_us));
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &core->layout.groups[g];
        kvf_status_t status = kvf_wanted_init(
            &send->lengths, group->tokens_per_block, group->window, group->sinks,
            request->cached_tokens, (kvf_cp_t){1, 0}, (kvf_cp_t){1, 0}, &wanted[g], detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    kvf_status_t status = kvf_plan_init(&send->plan, &core->layout, wanted, core->alloc);
    return status == KVF_OK ? status : kvf_fail(detail, status, "no memory for a plan");
}

void kvf_send_on_request(kvf_peer_t *peer, const Kvf__Wire__RecvRequest *request) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    kvf_transfer_id_t transfer = kvf_transfer_id_read(request->transfer);
    kvf_send_op_t *send = find_transfer(peer, &transfer);
    kvf_status_t status;
    if (send != NULL && (send->planned || send->op.ended)) {
        return; /* resent: idempotent */
    }
    if (send == NULL) {
        status = core->shutting_down
                     ? kvf_fail(&detail, KVF_ERR_CANCELLED, "the context node shuts down")
                     : claim(peer, request, &transfer, &send, &detail);
        if (status != KVF_OK) {
            kvf_log(core->log, KVF_LOG_INFO, "refused a request of %s: %s", peer->instance,
                    detail.text);
            kvf_peer_tell_abort(peer, &transfer, status, detail.text);
            tell_drained(peer, &transfer);
            return;
        }
        status = start_plan(send, peer, request, &transfer, &detail);
        if (status != KVF_OK) {
            send_end(send, status, detail.text, true);
            return;
        }
    }
    status = KVF_OK;
    for (size_t i = 0; i < request->n_grants && status == KVF_OK; i++) {
        status = kvf_plan_grant(&send->plan, request->grants[i], peer->n_pages, &detail);
    }
    if (status == KVF_OK && request->more) {
        return;
    }
    if (status == KVF_OK) {
        status = kvf_plan_pair(&send->plan, send->tables, request->skip_holes, &detail);
    }
    if (status == KVF_OK && send->plan.n_pairs > 0) {
        status = kvf_peer_connect_mover(peer, &detail);
    }
    if (status != KVF_OK) {
        send_end(send, status, detail.text, true);
        return;
    }
    send->planned = true;
    wake(send);
}

void kvf_send_on_done(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_send_op_t *send = find_transfer(peer, transfer);
    if (send == NULL || send->op.ended) {
        peer->core->counters.unknown_transfers += send == NULL;
    } else if (!send->final_sent) {
        send_end(send, KVF_ERR_PROTOCOL, "the receiver says done before everything was sent", true);
    } else {
        send_end(send, KVF_OK, "", false);
    }
}

bool kvf_send_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message) {
    kvf_send_op_t *send = find_transfer(peer, transfer);
    char text[KVF_DETAIL_BYTES];
    if (send == NULL) {
        return false;
    }
    (void)snprintf(text, sizeof(text), "generation node %.80s: %.400s", peer->instance, message);
    send_end(send, status, text, false);
    return true;
}

void kvf_send_on_peer(kvf_op_t *op, kvf_status_t status, const char *why) {
    send_end(send_of(op), status, why, false);
}

/* ---- moving ---- */

static void tell_commit(kvf_send_op_t *send, Kvf__Wire__CommitRange **ranges, size_t n_ranges,
                        Kvf__Wire__Final *final) {
    Kvf__Wire__Commit commit;
    kvf__wire__commit__init(&commit);
    Kvf__Wire__TransferId id;
    kvf_transfer_id_write(&send->transfer, &id);
    commit.transfer = &id;
    commit.n_ranges = n_ranges;
    commit.ranges = ranges;
    commit.final = final;
    kvf_peer_tell(send->op.peer, KVF_FRAME_COMMIT, &commit.base);
}

/* Is that all? Then this commit is the last one. Otherwise it goes out if it has ranges. */
static void send_final_if_complete(kvf_send_op_t *send, Kvf__Wire__CommitRange **ranges,
                                   size_t n_ranges) {
    kvf_core_t *core = send->op.core;
    Kvf__Wire__Final final;
    kvf__wire__final__init(&final);
    Kvf__Wire__Missing missing[KVF_MAX_GROUPS], *missing_list[KVF_MAX_GROUPS];
    uint64_t *ordinals = NULL;
    if (send->final_sent || !send->finished || send->n_posted > 0 ||
        send->range_idx < send->n_ranges) {
        if (n_ranges > 0) {
            tell_commit(send, ranges, n_ranges, NULL);
        }
        return;
    }
    if (send->plan.n_missing > 0) {
        ordinals = kvf_realloc(core->alloc, NULL, send->plan.n_missing, sizeof(*ordinals));
        if (ordinals == NULL) {
            send_end(send, KVF_ERR_NO_MEMORY, "no memory for the final message", true);
            return;
        }
    }
    for (size_t i = 0; i < send->plan.n_missing; i++) {
        const kvf_page_ref_t *page = &send->plan.missing[i];
        ordinals[i] = (uint64_t)page->ordinal;
        if (i == 0 || page->group_idx != send->plan.missing[i - 1].group_idx) {
            kvf__wire__missing__init(&missing[final.n_missing]);
            missing[final.n_missing].group_idx = page->group_idx;
            missing[final.n_missing].ordinals = &ordinals[i];
            missing_list[final.n_missing] = &missing[final.n_missing];
            final.n_missing++;
        }
        missing[final.n_missing - 1].n_ordinals++;
    }
    final.missing = missing_list;
    final.n_first_tokens = send->n_first_tokens;
    final.first_tokens = send->tokens;
    final.n_draft_tokens = send->n_draft_tokens;
    final.draft_tokens = send->tokens == NULL ? NULL : send->tokens + send->n_first_tokens;
    final.data = (ProtobufCBinaryData){send->data_bytes, send->data};
    final.since_prefill_us = core->now_us - send->finished_us;
    final.pages = send->plan.n_pairs;
    final.pieces = send->op.pieces;
    send->final_sent = true;
    tell_commit(send, ranges, n_ranges, &final);
    kvf_free(core->alloc, ordinals);
}

/* Say which blocks a window brought. Pieces of one group and layer range are neighbours; each such
 * run is a range. */
static void commit_window(kvf_send_op_t *send, const kvf_window_t *window) {
    Kvf__Wire__CommitRange ranges[WINDOW_PIECES], *list[WINDOW_PIECES];
    uint64_t ordinals[WINDOW_PIECES], generations[WINDOW_PIECES], digests[WINDOW_PIECES];
    size_t n_ranges = 0;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        const kvf_piece_t *piece = &window->pieces[i], *before = i > 0 ? piece - 1 : NULL;
        ordinals[i] = (uint64_t)piece->ordinal;
        generations[i] = piece->generation;
        digests[i] = piece->digest;
        if (before == NULL || before->group_idx != piece->group_idx ||
            before->offset != piece->offset || before->bytes != piece->bytes) {
            uint64_t layer_bytes =
                kvf_group_layer_bytes(&send->op.core->layout.groups[piece->group_idx]);
            Kvf__Wire__CommitRange *range = &ranges[n_ranges];
            kvf__wire__commit_range__init(range);
            range->group_idx = piece->group_idx;
            range->layer_first_idx = (uint32_t)(piece->offset / layer_bytes);
            range->layer_end_idx = (uint32_t)((piece->offset + piece->bytes) / layer_bytes);
            range->ordinals = &ordinals[i];
            range->generations = &generations[i];
            range->digests = &digests[i];
            list[n_ranges++] = range;
        }
        ranges[n_ranges - 1].n_ordinals++;
        ranges[n_ranges - 1].n_generations++;
        ranges[n_ranges - 1].n_digests++;
    }
    send_final_if_complete(send, list, n_ranges);
}

void kvf_send_on_moved(kvf_window_t *window, kvf_status_t status) {
    kvf_send_op_t *send = (kvf_send_op_t *)(uintptr_t)window->owner;
    kvf_core_t *core = send->op.core;
    kvf_peer_t *peer = send->op.peer;
    send->n_posted--;
    core->n_posted--;
    peer->window_bytes -= window->bytes;
    peer->window_pieces -= window->n_pieces;
    if (!send->op.ended && status == KVF_OK) {
        core->counters.bytes_sent += window->bytes;
        core->counters.pieces_sent += window->n_pieces;
        send->op.pieces += window->n_pieces;
        commit_window(send, window);
    }
    window->priv = core->free_windows;
    core->free_windows = window;
    if (!send->op.ended && status != KVF_OK) {
        send_end(send, KVF_ERR_PEER_LOST, "the data path to the receiver broke", true);
    } else if (send->op.ended) {
        finish_off(send);
    }
}

/* Windows are kept, so that posting does not allocate once a peer's window has been full. */
static kvf_window_t *take_window(kvf_core_t *core) {
    kvf_window_t *window = core->free_windows;
    if (window != NULL) {
        core->free_windows = window->priv;
        return window;
    }
    window_box_t *box = kvf_alloc(core->alloc, sizeof(*box));
    if (box == NULL) {
        return NULL;
    }
    box->window.pieces = box->pieces;
    return &box->window;
}

kvf_status_t kvf_send_pump(kvf_send_op_t *send) {
    kvf_core_t *core = send->op.core;
    kvf_peer_t *peer = send->op.peer;
    kvf_plan_cursor_t cursor = send->cursor;
    size_t range_idx = send->range_idx;
    kvf_piece_t piece;
    int32_t source;
    if (peer->window_bytes >= core->agent.window_bytes ||
        peer->window_pieces + WINDOW_PIECES > core->agent.window_pieces) {
        return KVF_ERR_AGAIN;
    }
    kvf_window_t *window = take_window(core);
    if (window == NULL) {
        send_end(send, KVF_ERR_NO_MEMORY, "no memory for a window", true);
        return KVF_OK;
    }
    *window = (kvf_window_t){.transfer = send->transfer,
                             .peer = peer->number,
                             .pieces = window->pieces,
                             .owner = (uint64_t)(uintptr_t)send};
    while (range_idx < send->n_ranges && window->n_pieces < WINDOW_PIECES &&
           window->bytes < WINDOW_BYTES) {
        const kvf_layer_range_t *range = &send->ranges[range_idx];
        if (!kvf_plan_next(&send->plan, range->first, range->end, &cursor, &piece, &source)) {
            range_idx++;
            cursor = (kvf_plan_cursor_t){0};
            continue;
        }
        piece.source = core->out.page(core->out.ctx, piece.group_idx, source) + piece.offset;
        window->pieces[window->n_pieces++] = piece;
        window->bytes += piece.bytes;
    }
    kvf_status_t status = window->n_pieces == 0 ? KVF_OK : core->out.post(core->out.ctx, window);
    if (status != KVF_OK || window->n_pieces == 0) {
        window->priv = core->free_windows;
        core->free_windows = window;
    }
    if (status == KVF_ERR_AGAIN) {
        return status;
    }
    if (status != KVF_OK) {
        send_end(send, KVF_ERR_PEER_LOST, "the data path to the receiver is broken", true);
        return KVF_OK;
    }
    if (window->n_pieces > 0) {
        send->n_posted++;
        core->n_posted++;
        peer->window_bytes += window->bytes;
        peer->window_pieces += window->n_pieces;
    }
    send->cursor = cursor;
    send->range_idx = range_idx;
    leave_moving(send);
    if (range_idx < send->n_ranges) {
        enter_moving(send); /* behind the others: turns */
    } else {
        send_final_if_complete(send, NULL, 0);
    }
    return KVF_OK;
}
