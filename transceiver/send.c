/* SPDX-License-Identifier: Apache-2.0 */
/* The context side of a transfer. */
#include "kvmgr/base/mutant.h"
#include "transceiver/send_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- the end ---- */

/* Whether nothing reads the pages any more: this agent does not, and a receiver that copies from
 * them itself was not told where they are, or has made its last copy, or has lost its mapping. And
 * whether nothing writes to them that a fence stands for. */
static bool is_drained(const kvf_send_op_t *send) {
    bool told = send->op.mapped && send->op.bytes > 0;
    bool moving = send->n_posted > 0 || (send->n_serving > 0 && !KVF_MUTANT(free_while_sending)) ||
                  (send->ahead.n_posted > 0 && !KVF_MUTANT(free_while_hashing)) ||
                  send->n_fences > 0;
    return (!moving || KVF_MUTANT(free_under_read)) &&
           (!told || send->op.status == KVF_OK || send->drained || KVF_MUTANT(free_under_copy));
}

void kvf_send_finish_off(kvf_send_op_t *send) {
    if (!send->offered) {
        return;
    }
    if (!is_drained(send)) {
        if (!send->op.doubted) {
            kvf_send_for_pages(send, kvf_pages_doubt_read);
            kvf_op_doubt(&send->op);
        }
        return;
    }
    send->offered = false;
    if (send->op.doubted) {
        kvf_send_for_pages(send, kvf_pages_settle);
        kvf_op_settled(&send->op, "the last window has completed, or the last copy been made");
    } else {
        kvf_send_for_pages(send, kvf_pages_read_end);
    }
    if (send->claimed && !send->op.mapped && send->op.status != KVF_OK && send->op.peer != NULL &&
        !send->unproven) {
        kvf_peer_tell_drained(send->op.peer, &send->transfer);
    }
    kvf_op_release(&send->op);
}

void kvf_send_end(kvf_send_op_t *send, kvf_status_t status, const char *message, bool tell) {
    kvf_core_t *core = send->op.core;
    if (send->op.ended) {
        return;
    }
    send->op.transfer_us = send->claimed ? core->now_us - send->claimed_us : 0;
    send->op.pages = status == KVF_OK ? send->plan.n_pages : 0;
    kvf_op_end(&send->op, status, message);
    kvf_turns_leave(&send->op);
    core->tombstones[core->n_tombstones++ % KVF_TOMBSTONES] =
        (kvf_tombstone_t){send->op.id, send->claimed ? KVF_ERR_USED : status};
    if (tell && send->claimed && send->op.peer != NULL) {
        kvf_peer_tell_abort(send->op.peer, &send->transfer, status, message);
    }
    if (KVF_MUTANT(drain_too_early) && send->claimed && send->op.peer != NULL) {
        kvf_peer_tell_drained(send->op.peer, &send->transfer);
    }
    kvf_send_finish_off(send);
}

bool kvf_send_quiet(const kvf_op_t *op) {
    const kvf_send_op_t *send = (const kvf_send_op_t *)op;
    return send->n_posted == 0 && send->n_serving == 0 && send->ahead.n_posted == 0 &&
           send->n_fences == 0 && !op->doubted;
}

void kvf_send_destroy(kvf_op_t *op) {
    kvf_send_op_t *send = kvf_send_of(op);
    const kvf_alloc_t *alloc = op->core->alloc, *hash_alloc = alloc;
    if (send->hh_transfer.tbl != NULL) {
        HASH_DELETE(hh_transfer, op->core->transfers, send);
    }
    kvf_send_forget_ahead(send);
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        kvf_free(alloc, send->slots[g]);
    }
    kvf_plan_cleanup(&send->plan);
    for (size_t i = 0; i < send->n_parts; i++) {
        kvf_free(alloc, send->parts[i].digests);
    }
    kvf_free(alloc, send->ready);
    kvf_free(alloc, send->told);
    kvf_free(alloc, send->parts);
    kvf_free(alloc, send->tokens);
    kvf_free(alloc, send->data);
    kvf_free(alloc, send);
}

void kvf_send_arm(kvf_send_op_t *send) {
    uint64_t at_us = send->own_deadline_us;
    at_us = at_us < send->peer_deadline_us ? at_us : send->peer_deadline_us;
    at_us = at_us < send->lease_deadline_us ? at_us : send->lease_deadline_us;
    kvf_timer_set(&send->op.core->timers, &send->op.timer, at_us);
}

void kvf_send_renew(kvf_send_op_t *send) {
    const kvf_core_t *core = send->op.core;
    /* Its node may be silent for lost_us without being lost. */
    uint64_t lease =
        core->agent.lease_us > core->agent.lost_us ? core->agent.lease_us : core->agent.lost_us;
    send->lease_deadline_us =
        KVF_MUTANT(no_lease) ? KVF_NEVER : kvf_time_after(core->now_us, lease);
    kvf_send_arm(send);
}

void kvf_send_rearm_op(kvf_op_t *op) {
    if (kvf_send_of(op)->claimed && !op->ended) {
        kvf_send_renew(kvf_send_of(op));
    }
}

/* Its windows do not complete, or its receiver does not say that it reads no more. The pages stay
 * out of use until then. */
static void poison(kvf_send_op_t *send) {
    const kvf_core_t *core = send->op.core;
    size_t n = 0;
    for (int list = 0; list < 2; list++) { /* count, then name */
        if (list == 1 && !kvf_op_poison(&send->op, n)) {
            return;
        }
        n = 0;
        for (uint32_t g = 0; g < core->layout.n_groups; g++) {
            for (int64_t o = 0; o < send->live[g].prompt_blocks; o++) {
                if (send->slots[g][o] < 0) {
                    continue;
                }
                if (list == 1) {
                    send->op.poisoned[n] = (kvf_page_ref_t){g, o, send->slots[g][o]};
                }
                n++;
            }
        }
    }
    kvf_send_for_pages(send, kvf_pages_poison);
    kvf_op_release(&send->op);
}

static void on_timer(kvf_timer_t *timer, void *owner) {
    kvf_send_op_t *send = owner;
    uint64_t now_us = send->op.core->now_us;
    (void)timer;
    if (send->op.ended) {
        poison(send);
    } else if (now_us >= send->own_deadline_us && send->finished) {
        kvf_send_end(send, KVF_ERR_EXPIRED, "no receiver came within the lease; prefill again",
                     false);
    } else if (now_us >= send->own_deadline_us) {
        kvf_send_end(send, KVF_ERR_DEADLINE, "prefill did not finish in its time", true);
    } else if (now_us >= send->peer_deadline_us) {
        kvf_send_end(send, KVF_ERR_DEADLINE, "the receiver did not end the transfer in its time",
                     true);
    } else {
        kvf_send_end(send, KVF_ERR_EXPIRED, "the receiver did not renew the lease", true);
    }
}

/* ---- calls ---- */

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
    status = kvf_core_check_request(core, desc->request_id, &desc->lengths, false,
                                    desc->allocated_tokens, 0, desc->tables, desc->n_tables,
                                    send->live, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    send->lengths = desc->lengths;
    send->ready = kvf_calloc(core->alloc, core->n_layers, sizeof(*send->ready));
    if (send->ready == NULL) {
        status = kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a send");
        goto err_op;
    }
    status = kvf_send_bind(send, desc->tables, desc->chunked, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    send->offered = true;
    send->peer_deadline_us = send->lease_deadline_us = KVF_NEVER;
    send->own_deadline_us =
        desc->timeout_us == 0 ? KVF_NEVER : kvf_time_after(core->now_us, desc->timeout_us);
    kvf_send_arm(send);
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
    kvf_status_t status = make_ticket(kvf_send_of(op), bytes, &n_bytes);
    return status == KVF_OK ? kvf_ticket_to_text(bytes, n_bytes, ticket, cap) : status;
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
    kvf_send_op_t *send = kvf_send_of(op);
    if (op == NULL || op->ended) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN, "this send has ended");
    }
    if (send->finished) {
        return kvf_fail(detail, KVF_ERR_INVALID, "it was finished before");
    }
    for (uint32_t i = 0; i < core->n_layers; i++) {
        if (send->ready[i] != kvf_prompt_tokens(&send->lengths)) {
            return kvf_fail(
                detail, KVF_ERR_INVALID,
                "layer %" PRIu32 " was made ready for %" PRId64 " of %" PRId64 " tokens",
                core->layers[i].layer, send->ready[i], kvf_prompt_tokens(&send->lengths));
        }
    }
    if (aux != NULL) {
        kvf_status_t status = copy_aux(send, aux, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    send->finished = true;
    send->finished_us = core->now_us;
    send->own_deadline_us = send->claimed || KVF_MUTANT(no_lease)
                                ? KVF_NEVER
                                : kvf_time_after(core->now_us, core->agent.lease_us);
    kvf_send_arm(send);
    kvf_send_wake(send);
    return KVF_OK;
}

void kvf_send_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message) {
    kvf_send_end(kvf_send_of(op), reason, message, true);
}

kvf_status_t kvf_core_send_cancel(kvf_core_t *core, uint64_t id, kvf_status_t reason) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    if (op == NULL || op->ended) {
        return KVF_ERR_UNKNOWN;
    }
    kvf_send_cancel_op(op, reason == KVF_ERR_PREFILL_FAILED ? reason : KVF_ERR_CANCELLED,
                       reason == KVF_ERR_PREFILL_FAILED ? "the context side lost this prefill"
                                                        : "cancelled on the context side");
    return KVF_OK;
}
