/* SPDX-License-Identifier: Apache-2.0 */
/* What a receiver says to the context side. */
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "transceiver/send_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* However long a receiver says that it may take, its peer does not hold pages for longer: a day. */
#define MAX_TIMEOUT_US UINT64_C(86400000000)

kvf_send_op_t *kvf_send_claimed(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_send_op_t *send;
    HASH_FIND(hh_transfer, peer->core->transfers, transfer, sizeof(*transfer), send);
    return send != NULL && send->op.peer == peer ? send : NULL;
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
    if (!kvf_incarnation_equal(&ticket.issuer, &core->incarnation) &&
        !KVF_MUTANT(accept_old_incarnation)) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN,
                        "the ticket was made by another incarnation of this node; prefill again");
    }
    kvf_send_op_t *send = kvf_send_of(kvf_op_find(core, ticket.send_id, KVF_OP_SEND));
    if (send == NULL || send->op.ended) {
        status = send != NULL && send->claimed ? KVF_ERR_USED : epitaph(core, ticket.send_id);
        return kvf_fail(detail, status, "%s", kvf_status_text(status));
    }
    if (send->claimed && !KVF_MUTANT(reuse_ticket)) {
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
    const kvf_alloc_t *hash_alloc = core->alloc;
    kvf_wanted_t wanted[KVF_MAX_GROUPS];
    send->claimed = true;
    send->claimed_us = core->now_us;
    send->transfer = *transfer;
    HASH_ADD(hh_transfer, core->transfers, transfer, sizeof(send->transfer), send);
    send->grant_key = request->grant_key;
    send->pull = request->pull;
    send->digests = !request->no_digests;
    send->op.mapped = strcmp(request->mover, peer->core->config.mapped_name) == 0;
    kvf_peer_attach(peer, &send->op);
    uint64_t timeout_us =
        request->timeout_us < MAX_TIMEOUT_US ? request->timeout_us : MAX_TIMEOUT_US;
    /* The receiver ends it at its deadline and says so; this is for a receiver that does not. */
    send->peer_deadline_us =
        kvf_time_after(kvf_time_after(core->now_us, timeout_us), core->agent.lost_us);
    if (KVF_MUTANT(no_peer_deadline)) {
        send->peer_deadline_us = KVF_NEVER;
    }
    kvf_send_renew(send);
    if (send->finished) {
        send->own_deadline_us = KVF_NEVER; /* the lease */
    }
    kvf_send_arm(send);
    if (send->hh_transfer.tbl == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a transfer");
    }
    if (send->op.mapped && peer->n_lent == 0) {
        send->op.mapped = false;
        /* Its process may have ended, which is noticed before its last words are read. */
        return kvf_fail(detail, KVF_ERR_PEER_LOST, "the receiver does not have these pools mapped");
    }
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        const kvf_layer_group_t *group = &core->layout.groups[g];
        kvf_status_t status = kvf_wanted_init(
            &send->lengths, group->tokens_per_block, group->window, group->sinks,
            request->cached_tokens, (kvf_cp_t){1, 0}, (kvf_cp_t){1, 0}, &wanted[g], detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    kvf_status_t status = kvf_plan_init(&send->plan, &core->layout, wanted,
                                        kvf_prompt_tokens(&send->lengths), core->alloc);
    return status == KVF_OK ? status : kvf_fail(detail, status, "no memory for a plan");
}

void kvf_send_on_request(kvf_peer_t *peer, const Kvf__Wire__RecvRequest *request) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    kvf_transfer_id_t transfer = kvf_transfer_id_read(request->transfer);
    kvf_send_op_t *send = kvf_send_claimed(peer, &transfer);
    kvf_status_t status;
    if (send != NULL && (send->planned || send->op.ended)) {
        return; /* resent: idempotent */
    }
    if (send == NULL) {
        status = core->shutting_down
                     ? kvf_fail(&detail, KVF_ERR_CANCELLED, "the context node shuts down")
                     : claim(peer, request, &transfer, &send, &detail);
        if (status != KVF_OK) {
            kvf_log(core->log, KVF_LOG_INFO, "refused request %s of %s: %s", request->request_id,
                    peer->instance, detail.text);
            kvf_peer_tell_abort(peer, &transfer, status, detail.text);
            kvf_peer_tell_drained(peer, &transfer);
            return;
        }
        status = start_plan(send, peer, request, &transfer, &detail);
        if (status != KVF_OK) {
            kvf_send_end(send, status, detail.text, true);
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
        status = kvf_plan_close(&send->plan, request->skip_holes, &detail);
    }
    if (status == KVF_OK && send->plan.n_pages > 0 && !send->op.mapped) {
        status = kvf_peer_connect_mover(peer, &detail);
    }
    if (status != KVF_OK) {
        kvf_send_end(send, status, detail.text, true);
        return;
    }
    KVF_FAIL_POINT(granted);
    send->planned = true;
    kvf_send_wake(send);
}

/* Descending numbers: is one of them n? */
static bool is_named(const uint64_t *counters, size_t n_counters, uint64_t n) {
    size_t low = 0, high = n_counters;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (counters[mid] > n) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low < n_counters && counters[low] == n;
}

void kvf_send_on_renewed(kvf_peer_t *peer, const uint64_t *counters, size_t n) {
    for (kvf_op_t *op = n == 0 ? NULL : peer->ops; op != NULL; op = op->peer_next) {
        if (op->kind == KVF_OP_SEND && !op->ended &&
            is_named(counters, n, kvf_send_of(op)->transfer.counter)) {
            kvf_send_renew(kvf_send_of(op));
        }
    }
}

bool kvf_send_on_pull(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, uint64_t bytes) {
    kvf_send_op_t *send = kvf_send_claimed(peer, transfer);
    char text[KVF_DETAIL_BYTES];
    if (send == NULL || send->op.ended) {
        return send != NULL;
    }
    if (!send->pull || bytes < send->asked_bytes || bytes > send->ready_bytes) {
        (void)snprintf(text, sizeof(text),
                       "the receiver asks for %" PRIu64 " bytes, after %" PRIu64 ", when %" PRIu64
                       " are ready",
                       bytes, send->asked_bytes, send->ready_bytes);
        kvf_send_end(send, KVF_ERR_PROTOCOL, text, true);
        return true;
    }
    send->asked_bytes = bytes;
    kvf_send_wake(send);
    return true;
}

void kvf_send_on_done(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_send_op_t *send = kvf_send_claimed(peer, transfer);
    KVF_FAIL_POINT(ack_before);
    if (send == NULL || send->op.ended) {
        peer->core->counters.unknown_transfers += send == NULL;
    } else if (!send->final_sent) {
        kvf_send_end(send, KVF_ERR_PROTOCOL, "the receiver says done before everything was sent",
                     true);
    } else {
        kvf_send_end(send, KVF_OK, "", false);
    }
}

bool kvf_send_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message) {
    kvf_send_op_t *send = kvf_send_claimed(peer, transfer);
    char text[KVF_DETAIL_BYTES];
    if (send == NULL || (send->op.ended && !send->offered)) {
        /* Said before, perhaps to nobody. What was not asked for before it was given up never will
         * be: messages come in order. */
        if (!(send != NULL ? send->unproven : peer->unproven)) {
            kvf_peer_tell_drained(peer, transfer);
        }
        return send != NULL;
    }
    (void)snprintf(text, sizeof(text), "generation node %.80s: %.400s", peer->instance, message);
    status = kvf_peer_status(status);
    kvf_send_end(send, status, text, false);
    return true;
}

void kvf_send_on_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_send_op_t *send = kvf_send_claimed(peer, transfer);
    if (send != NULL) {
        send->drained = !KVF_MUTANT(ignore_drained);
        if (send->op.ended) {
            kvf_send_finish_off(send);
            kvf_op_reap(&send->op);
        }
    }
}

void kvf_send_on_returned(kvf_op_t *op) {
    kvf_send_of(op)->drained |= op->mapped;
    if (op->ended) {
        kvf_send_finish_off(kvf_send_of(op));
        kvf_op_reap(op);
    }
}

void kvf_send_on_peer_up(kvf_op_t *op) {
    if (op->mapped && op->doubted && !KVF_MUTANT(no_second_abort)) {
        kvf_peer_tell_abort(op->peer, &kvf_send_of(op)->transfer, op->status, op->detail.text);
    }
}

void kvf_send_on_peer(kvf_op_t *op, kvf_status_t status, const char *why) {
    kvf_send_end(kvf_send_of(op), status, why, false);
}
