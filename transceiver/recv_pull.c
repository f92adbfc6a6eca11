/* SPDX-License-Identifier: Apache-2.0 */
/* The receiver that paces its sender: nothing moves that it has not asked for. It asks for what is
 * ready, in the sender's order, and for more as bytes are verified, so that what was asked for and
 * is not there yet stays within bounds, for a transfer and for a peer. */
#include "kvmgr/base/mutant.h"
#include "transceiver/recv_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* So much is asked for at a time, and with it a turn ends: more messages would bring nothing. */
#define ASK_BYTES (UINT64_C(1) << 20)

/* One transfer may have half of what a peer may have, so that two can go on at once. */
static uint64_t most_bytes(const kvf_core_t *core) {
    return core->agent.window_bytes / 2 + 1;
}

void kvf_recv_pace(kvf_recv_op_t *recv) {
    kvf_op_t *op = &recv->op;
    uint64_t before = recv->open_bytes;
    if (recv->asked_bytes < recv->sealed_bytes) {
        recv->asked_bytes = recv->sealed_bytes; /* the rest of the last piece was asked for, too */
    }
    recv->open_bytes = op->ended ? 0 : recv->asked_bytes - recv->sealed_bytes;
    if (op->peer == NULL) {
        return; /* nothing was ever asked for */
    }
    op->peer->asked_bytes += recv->open_bytes - before;
    if (!op->ended && recv->asked_bytes < recv->ready_bytes &&
        (recv->open_bytes < most_bytes(op->core) || KVF_MUTANT(ask_for_all))) {
        kvf_turns_enter(&op->peer->asking, op);
    } else {
        kvf_turns_leave(op);
    }
}

void kvf_recv_ask(kvf_op_t *op) {
    kvf_recv_op_t *recv = kvf_recv_of(op);
    uint64_t most = most_bytes(op->core), left = recv->ready_bytes - recv->asked_bytes;
    most = most < ASK_BYTES ? most : ASK_BYTES;
    recv->asked_bytes += left < most ? left : most;
    kvf_recv_pace(recv);
    Kvf__Wire__Pull pull;
    kvf__wire__pull__init(&pull);
    Kvf__Wire__TransferId id;
    kvf_transfer_id_t transfer = kvf_recv_transfer(recv);
    kvf_transfer_id_write(&transfer, &id);
    pull.transfer = &id;
    pull.bytes = recv->asked_bytes;
    if (!(KVF_MUTANT(forget_pull) && op->peer->link == NULL)) {
        kvf_peer_tell(op->peer, KVF_FRAME_PULL, &pull.base);
    }
}

bool kvf_recv_asked_for(const kvf_recv_op_t *recv) {
    const kvf_layout_t *layout = &recv->op.core->layout;
    uint64_t longest = 0; /* the piece in which the last byte lies that was asked for */
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        uint64_t bytes = kvf_group_block_bytes(&layout->groups[g]);
        longest = bytes > longest ? bytes : longest;
    }
    return !recv->pull || recv->claimed_bytes < recv->asked_bytes + longest;
}

bool kvf_recv_on_ready(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, uint64_t bytes) {
    kvf_recv_op_t *recv = kvf_recv_find(peer->core, transfer);
    char text[KVF_DETAIL_BYTES];
    if (recv == NULL || recv->op.ended || recv->op.peer != peer) {
        return false;
    }
    if (!recv->pull || bytes < recv->ready_bytes || bytes > recv->wanted_bytes) {
        (void)snprintf(text, sizeof(text),
                       "the context side says that %" PRIu64 " bytes are ready, after %" PRIu64
                       " of %" PRIu64,
                       bytes, recv->ready_bytes, recv->pull ? recv->wanted_bytes : 0);
        kvf_recv_end(recv, KVF_ERR_PROTOCOL, text, true);
        return true;
    }
    recv->ready_bytes = bytes;
    kvf_recv_pace(recv);
    return true;
}
