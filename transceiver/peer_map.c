/* SPDX-License-Identifier: Apache-2.0 */
/* Peers on this machine: a receiver maps its sender's pools, for reading alone, and copies from
 * them itself. What is written to a page is then written by its owner; what a sender has to know
 * before it reuses a page is that nobody reads it any more. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>

/* Mappings of our pools by one peer. It needs one; those before it are given back when their last
 * copy has been made. */
#define MAX_LENT 8

/* After an attempt that failed; twice as long after each further one: what it was for may be lost
 * to others, such as threads of NCCL. */
#define MAP_AGAIN_US UINT64_C(5000000)
#define MAX_DOUBLINGS 6

/* An attempt of whose end nobody has said anything by then has failed. NCCL's own limit comes
 * before it. */
#define MAP_US UINT64_C(20000000)

/* An attempt that nobody says the end of has failed after this. NCCL's own limit is less. */
#define MAP_US UINT64_C(20000000)

kvf_peer_t *kvf_peer_numbered(kvf_core_t *core, uint64_t number) {
    kvf_peer_t *peer = core->peers;
    while (peer != NULL && peer->number != number) {
        peer = peer->hh.next;
    }
    return peer;
}

kvf_status_t kvf_core_set_mapped_address(kvf_core_t *core, const void *address, size_t bytes) {
    uint8_t *copy = kvf_alloc(core->alloc, bytes + 1);
    if (copy == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    memcpy(copy, address, bytes);
    kvf_free(core->alloc, core->mapped_address);
    core->mapped_address = copy;
    core->mapped_address_bytes = bytes;
    return KVF_OK;
}

/* What is not so for good, such as a peer that stood still, is tried again for a later request. */
static void fall_back(kvf_peer_t *peer, kvf_status_t status, const char *why) {
    kvf_core_t *core = peer->core;
    bool for_good = status == KVF_ERR_UNSUPPORTED || status == KVF_ERR_INVALID;
    peer->map = KVF_MAP_FAILED;
    peer->map_again_us =
        for_good ? KVF_NEVER : kvf_time_after(core->now_us, MAP_AGAIN_US << peer->map_failures);
    peer->map_failures += peer->map_failures < MAX_DOUBLINGS;
    core->counters.mover_fallbacks++;
    bool none = strcmp(core->agent.mover, core->config.mapped_name) == 0; /* else may carry */
    kvf_log(core->log, KVF_LOG_WARN, "the pools of %s are not mapped, so %s carries: %s",
            peer->instance, none ? "nothing" : kvf_peer_mover_name(peer), why);
}

void kvf_peer_map(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    if (peer->map == KVF_MAP_FAILED && core->now_us >= peer->map_again_us) {
        peer->map = KVF_MAP_NONE;
    }
    if (peer->map == KVF_MAP_NONE && core->mapped_address != NULL && peer->mapped_address != NULL) {
        peer->map = KVF_MAP_PENDING;
        kvf_status_t status = core->out.map(core->out.ctx, peer->number, peer->mapped_address,
                                            peer->mapped_address_bytes, peer->n_pages, &detail);
        if (status != KVF_OK) {
            fall_back(peer, status, detail.text);
        } else if (peer->map == KVF_MAP_PENDING) {
            kvf_timer_set(&core->timers, &peer->map_timer, kvf_time_after(core->now_us, MAP_US));
        }
    }
}

void kvf_peer_on_map_timer(kvf_timer_t *timer, void *owner) {
    kvf_peer_t *peer = owner;
    kvf_core_t *core = peer->core;
    (void)timer;
    core->out.unmap(core->out.ctx, peer->number);
    kvf_core_mapped(core, peer->number, KVF_ERR_PEER_LOST, "nothing was heard of the attempt");
}

void kvf_peer_unmap(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    if (KVF_MUTANT(keep_mapped)) {
        return;
    }
    if (peer->map == KVF_MAP_PENDING || peer->map == KVF_MAP_READY) {
        core->out.unmap(core->out.ctx, peer->number);
    }
    kvf_timer_set(&core->timers, &peer->map_timer, KVF_NEVER);
    peer->map = KVF_MAP_NONE;
}

void kvf_core_mapped(kvf_core_t *core, uint64_t number, kvf_status_t status, const char *why) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    if (peer == NULL || peer->map != KVF_MAP_PENDING) {
        return;
    }
    kvf_timer_set(&core->timers, &peer->map_timer, KVF_NEVER);
    if (status == KVF_OK) {
        peer->map = KVF_MAP_READY;
        peer->map_failures = 0;
        kvf_log(core->log, KVF_LOG_INFO, "the pools of %s are mapped", peer->instance);
    } else {
        fall_back(peer, status, why);
    }
    for (kvf_op_t *op = kvf_peer_is_up(peer) ? peer->ops : NULL, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_RECV && !kvf_recv_is_told(op)) {
            kvf_recv_on_peer_up(op);
        }
    }
}

void kvf_core_unmapped(kvf_core_t *core, uint64_t number, const char *why) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    if (peer == NULL || peer->map != KVF_MAP_READY) {
        return;
    }
    fall_back(peer, KVF_ERR_PEER_LOST, why);
    /* Not one of them goes on by another: the sender holds pages no longer for those that it knows
     * to have used this one. */
    for (kvf_op_t *op = peer->ops, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_RECV && op->mapped && !op->ended) {
            kvf_recv_cancel_op(op, KVF_ERR_PEER_LOST, why);
        }
    }
}

bool kvf_peer_lend(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    /* With its hello a conversation has begun. It may have no connection at the moment, or none
     * yet: who asks for a mapping overtakes what it says there. */
    if (core->mapped_address == NULL || peer->n_lent == MAX_LENT || peer->session.id == 0 ||
        peer->session.over) {
        return false;
    }
    peer->n_lent++;
    core->n_lent++;
    return true;
}

uint64_t kvf_core_lend(kvf_core_t *core, const kvf_incarnation_t *incarnation) {
    kvf_peer_t *peer = kvf_peer_find(core, incarnation);
    return peer != NULL && kvf_peer_lend(peer) ? peer->number : 0;
}

void kvf_core_returned(kvf_core_t *core, uint64_t number) {
    kvf_peer_t *peer = kvf_peer_numbered(core, number);
    if (peer == NULL || peer->n_lent == 0) {
        return;
    }
    core->n_lent--;
    if (--peer->n_lent > 0 && !KVF_MUTANT(returned_of_one)) {
        return; /* copies from another one may be under way */
    }
    for (kvf_op_t *op = peer->ops, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_SEND) {
            kvf_send_on_returned(op);
        }
    }
    core->peers_forgotten = true; /* it may have been kept for this */
}
