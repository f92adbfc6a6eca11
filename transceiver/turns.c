/* SPDX-License-Identifier: Apache-2.0 */
/* Whose turn it is. Sends that have something to post share what may be in flight to their peer, a
 * quantum of bytes each round, however long their pieces are: deficit round-robin (M. Shreedhar,
 * G. Varghese, "Efficient fair queuing using deficit round robin", SIGCOMM 1995), in the form in
 * which a piece that is longer than what is left of a turn is taken from the turns that follow.
 * Receives that pull share what they ask a peer for in the same way. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <utlist.h>

static void activate(kvf_peer_t *peer) {
    if (!peer->active) {
        peer->active = true;
        DL_APPEND2(peer->core->active, peer, active_prev, active_next);
    }
}

void kvf_turns_forget(kvf_peer_t *peer) {
    if (peer->active) {
        peer->active = false;
        DL_DELETE2(peer->core->active, peer, active_prev, active_next);
    }
}

void kvf_turns_enter(kvf_turns_t *turns, kvf_op_t *op) {
    if (op->turns == NULL) {
        op->turn_prev = turns->last;
        op->turn_next = NULL;
        *(turns->last != NULL ? &turns->last->turn_next : &turns->first) = op;
        turns->last = op;
        op->turns = turns;
        activate(op->peer);
    }
}

void kvf_turns_leave(kvf_op_t *op) {
    kvf_turns_t *turns = op->turns;
    if (turns != NULL) {
        *(op->turn_prev != NULL ? &op->turn_prev->turn_next : &turns->first) = op->turn_next;
        *(op->turn_next != NULL ? &op->turn_next->turn_prev : &turns->last) = op->turn_prev;
        op->turns = NULL;
    }
}

/* Its turn is over. */
static void go_behind(kvf_op_t *op) {
    kvf_turns_t *turns = op->turns;
    if (turns != NULL && !KVF_MUTANT(keep_the_turn)) {
        kvf_turns_leave(op);
        kvf_turns_enter(turns, op);
    }
}

/* The send whose turn it is posts windows. What is full in the middle of a turn is where the turn
 * goes on. @return Whether anything changed. */
static bool post_turn(kvf_peer_t *peer) {
    kvf_op_t *op = peer->moving.first;
    bool any = false;
    if (op == NULL) {
        return false;
    }
    if (op->deficit <= 0) {
        op->deficit +=
            op->mapped && kvf_core_on_device(peer->core) ? KVF_DEVICE_TURN_BYTES : KVF_TURN_BYTES;
        any = true;
    }
    while (op->deficit > 0 && op->turns != NULL) {
        if (kvf_send_pump(op) != KVF_OK) {
            return any;
        }
        any = true;
    }
    if (op->deficit > 0) { /* it has nothing to post any more: that is not saved for later */
        op->deficit = 0;
    }
    go_behind(op);
    return any;
}

/* The receive whose turn it is asks for more. */
static bool ask_turn(kvf_peer_t *peer) {
    kvf_op_t *op = peer->asking.first;
    if (op == NULL ||
        (peer->asked_bytes >= peer->core->agent.window_bytes && !KVF_MUTANT(ask_for_all)) ||
        kvf_session_full(peer)) {
        return false;
    }
    kvf_recv_ask(op);
    go_behind(op);
    return true;
}

bool kvf_core_pump(kvf_core_t *core) {
    bool any = false;
    for (bool more = true; more; any |= more) {
        more = false;
        for (kvf_peer_t *peer = core->active, *next; peer != NULL; peer = next) {
            next = peer->active_next;
            more |= post_turn(peer);
            more |= ask_turn(peer);
            if (peer->moving.first == NULL && peer->asking.first == NULL) {
                kvf_turns_forget(peer);
            }
        }
    }
    return any;
}
