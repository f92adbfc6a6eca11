/* SPDX-License-Identifier: Apache-2.0 */
/* Paths: a receiver that cannot map its sender's pools has a connection to it. With the mover nccl,
 * a communicator of the two, it asks for what was committed, and the sender sends that; with rdma
 * it reads there by itself. Both ends are told of each other's here, over the control channel; what
 * goes through a path is the driver's.
 *
 * To the rest of the core it is a mapping: nothing goes into a receiver's page that it has not
 * asked for itself, so its own last job is the proof that its pages are quiet. A sender's pages are
 * read by its own jobs, and held by those. */
#include "kvmgr/base/mutant.h"
#include "transceiver/send_impl.h"

#include <inttypes.h>

void kvf_core_invite(kvf_core_t *core, uint64_t number, uint64_t path, const void *invitation,
                     size_t bytes) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    Kvf__Wire__Join join;
    kvf__wire__join__init(&join);
    join.path = path;
    join.invitation = (ProtobufCBinaryData){bytes, (uint8_t *)(uintptr_t)invitation};
    if (peer != NULL) {
        kvf_peer_tell(peer, KVF_FRAME_JOIN, &join.base);
    }
}

void kvf_core_answer(kvf_core_t *core, uint64_t number, uint64_t path, const void *answer,
                     size_t bytes) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    Kvf__Wire__Joined joined;
    kvf__wire__joined__init(&joined);
    joined.path = path;
    joined.answer = (ProtobufCBinaryData){bytes, (uint8_t *)(uintptr_t)answer};
    if (peer != NULL) {
        kvf_peer_tell(peer, KVF_FRAME_JOINED, &joined.base);
    }
}

static void tell_leave(kvf_peer_t *peer, uint64_t path, bool own, const char *why) {
    Kvf__Wire__Leave leave;
    kvf__wire__leave__init(&leave);
    leave.path = path;
    leave.own = own;
    leave.message = (char *)(uintptr_t)why;
    kvf_peer_tell(peer, KVF_FRAME_LEAVE, &leave.base);
}

void kvf_core_left(kvf_core_t *core, uint64_t number, uint64_t path, bool own, const char *why) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    if (peer != NULL) {
        tell_leave(peer, path, own, why);
    }
}

void kvf_peer_on_join(kvf_peer_t *peer, const Kvf__Wire__Join *join) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail = {"this node has no such paths, or the receiver has too many of them"};
    kvf_status_t status = KVF_ERR_UNSUPPORTED;
    if (core->out.join != NULL && kvf_peer_lend(peer)) {
        status = core->out.join(core->out.ctx, peer->number, join->path, join->invitation.data,
                                join->invitation.len, &detail);
        if (status != KVF_OK) {
            kvf_core_returned(core, peer->number);
        }
    }
    if (status != KVF_OK) {
        tell_leave(peer, join->path, false, detail.text);
    }
}

void kvf_peer_on_joined(kvf_peer_t *peer, const Kvf__Wire__Joined *joined) {
    kvf_core_t *core = peer->core;
    if (core->out.joined != NULL) {
        core->out.joined(core->out.ctx, peer->number, joined->path, joined->answer.data,
                         joined->answer.len);
    }
}

void kvf_peer_on_leave(kvf_peer_t *peer, const Kvf__Wire__Leave *leave) {
    kvf_core_t *core = peer->core;
    if (core->out.leave != NULL) {
        core->out.leave(core->out.ctx, peer->number, leave->path, !leave->own, leave->message);
    }
}

/* ---- the receiver ---- */

bool kvf_core_fetch(kvf_core_t *core, const kvf_verify_t *job, uint64_t path) {
    Kvf__Wire__Fetch fetch;
    Kvf__Wire__TransferId id;
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &job->recv_id, sizeof(job->recv_id), op);
    if (op == NULL || op->ended || op->peer == NULL) {
        return false;
    }
    kvf__wire__fetch__init(&fetch);
    const kvf_transfer_id_t transfer = {core->incarnation, op->id};
    kvf_transfer_id_write(&transfer, &id);
    fetch.transfer = &id;
    fetch.path = path;
    fetch.first = job->first;
    fetch.n = job->n_items;
    kvf_peer_tell(op->peer, KVF_FRAME_FETCH, &fetch.base);
    return true;
}

/* ---- the sender ---- */

bool kvf_send_note(kvf_send_op_t *send, const kvf_window_t *window) {
    kvf_core_t *core = send->op.core;
    size_t need = send->n_told + window->n_pieces;
    if (core->out.serve == NULL || !send->op.mapped) {
        return true;
    }
    if (need > send->told_room) {
        size_t room = need <= send->plan.n_pages ? send->plan.n_pages : need + need / 2;
        kvf_told_t *told = kvf_realloc(core->alloc, send->told, room, sizeof(*told));
        if (told == NULL) {
            return false;
        }
        send->told = told;
        send->told_room = room;
    }
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        const kvf_piece_t *piece = &window->pieces[i];
        send->told[send->n_told++] = (kvf_told_t){.group_idx = piece->group_idx,
                                                  .slot = piece->source_slot,
                                                  .offset = piece->offset,
                                                  .bytes = piece->bytes};
    }
    return true;
}

kvf_status_t kvf_send_on_fetch(kvf_peer_t *peer, const Kvf__Wire__Fetch *fetch,
                               kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    kvf_transfer_id_t id = kvf_transfer_id_read(fetch->transfer);
    kvf_send_op_t *send = kvf_send_claimed(peer, &id);
    if (core->out.serve == NULL) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "this node sends nothing that is asked for");
    }
    if (send == NULL || !send->offered) {
        /* It crossed the end of what it was for. The receiver has a message come in that will not:
         * what is sent next would be taken for it. */
        core->counters.unknown_transfers += send == NULL;
        if (core->out.leave != NULL) {
            core->out.leave(core->out.ctx, peer->number, fetch->path, false,
                            "what was fetched is not there any more");
        }
        tell_leave(peer, fetch->path, false, "what was fetched is not there any more");
        return KVF_OK;
    }
    if ((fetch->first != send->n_fetched && !KVF_MUTANT(fetch_again)) ||
        fetch->n > send->n_told - send->n_fetched) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL,
                        "ranges %" PRIu64 " to %" PRIu64 " of a transfer are fetched, when %zu "
                        "were committed and %zu fetched before",
                        fetch->first, fetch->first + fetch->n - 1, send->n_told, send->n_fetched);
    }
    kvf_serve_t *serve =
        kvf_alloc(core->alloc, sizeof(*serve) + (size_t)fetch->n * sizeof(serve->items[0]));
    if (serve == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory to send what is fetched");
    }
    *serve = (kvf_serve_t){.peer = peer->number,
                           .path = fetch->path,
                           .owner = (uint64_t)(uintptr_t)send,
                           .n_items = (uint32_t)fetch->n};
    for (uint32_t i = 0; i < serve->n_items; i++) {
        const kvf_told_t *told = &send->told[send->n_fetched++];
        serve->items[i] = (kvf_serve_item_t){
            core->out.page(core->out.ctx, told->group_idx, told->slot) + told->offset, told->bytes};
    }
    send->n_serving++;
    core->n_posted++;
    core->out.serve(core->out.ctx, serve);
    return KVF_OK;
}

void kvf_core_served(kvf_core_t *core, kvf_serve_t *serve) {
    kvf_send_op_t *send = (kvf_send_op_t *)(uintptr_t)serve->owner;
    kvf_free(core->alloc, serve);
    send->n_serving--;
    core->n_posted--;
    if (send->op.ended) {
        kvf_send_finish_off(send);
        kvf_op_reap(&send->op);
    }
}
