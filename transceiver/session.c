/* SPDX-License-Identifier: Apache-2.0 */
/* What two agents say to each other about transfers: every message once and in order, over however
 * many connections that takes. A message is kept until the other side says that it came; a new
 * connection goes on behind the last one that did. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* So much may come before it is acknowledged out of turn: it bounds what the other side keeps. */
#define ACK_BYTES (UINT64_C(1) << 20)
/* Beyond this nothing new is begun: no windows are posted, whose commits would only have to be
 * kept, nothing is pulled, no receive is opened. What ends what runs still has room: four of the
 * longest frames. Who acknowledges nothing until that is full, too, is given up. */
#define KEPT_BYTES (UINT64_C(8) << 20)
#define KEPT_FRAMES 4

bool kvf_session_counts(kvf_frame_type_t type) {
    return type >= KVF_FRAME_RECV_REQUEST && type != KVF_FRAME_BYE;
}

/* End the peer, which it does notice. Not from here, where an operation is in the middle of
 * something. */
static void fail_soon(kvf_peer_t *peer, const char *why) {
    kvf_core_t *core = peer->core;
    peer->failing = KVF_ERR_PEER_LOST;
    (void)snprintf(peer->reason, sizeof(peer->reason), "%s", why);
    kvf_timer_set(&core->timers, &peer->timer, core->now_us);
}

/* A message that cannot be said leaves the other side waiting. */
static void cannot_say(kvf_peer_t *peer, kvf_frame_type_t type, kvf_status_t status) {
    char why[KVF_DETAIL_BYTES];
    (void)snprintf(why, sizeof(why), "a %s message could not be made: %s",
                   kvf_frame_type_name(type), kvf_status_text(status));
    fail_soon(peer, why);
}

static bool pack(kvf_peer_t *peer, kvf_frame_type_t type, const ProtobufCMessage *message,
                 uint8_t **frame_p, size_t *bytes_p) {
    kvf_core_t *core = peer->core;
    kvf_status_t status =
        kvf_message_pack(core->alloc, type, message, peer->frame_bytes, frame_p, bytes_p);
    if (status != KVF_OK) {
        cannot_say(peer, type, status);
        return false;
    }
    kvf_log(core->log, KVF_LOG_TRACE, "%s to %s, %zu bytes", kvf_frame_type_name(type),
            peer->instance, *bytes_p);
    return true;
}

void kvf_peer_tell(kvf_peer_t *peer, kvf_frame_type_t type, const ProtobufCMessage *message) {
    kvf_core_t *core = peer->core;
    kvf_session_t *session = &peer->session;
    uint8_t *frame;
    size_t bytes;
    if (!kvf_peer_is_up(peer) || peer->failing != KVF_OK ||
        !pack(peer, type, message, &frame, &bytes)) {
        return;
    }
    if (session->kept_bytes > KEPT_BYTES + KEPT_FRAMES * core->agent.frame_bytes) {
        kvf_free(core->alloc, frame);
        fail_soon(peer, "it does not acknowledge what it is told");
        return;
    }
    kvf_kept_t *kept = kvf_alloc(core->alloc, sizeof(*kept) + bytes);
    if (kept == NULL) {
        kvf_free(core->alloc, frame);
        cannot_say(peer, type, KVF_ERR_NO_MEMORY);
        return;
    }
    kept->next = NULL;
    kept->bytes = bytes;
    memcpy(kept->frame, frame, bytes);
    *(session->last != NULL ? &session->last->next : &session->first) = kept;
    session->last = kept;
    session->n_said++;
    session->kept_bytes += bytes;
    if (peer->link != NULL) {
        core->out.write(core->out.ctx, peer->link->conn, frame, bytes);
    } else {
        kvf_free(core->alloc, frame);
    }
}

static void drop_first(kvf_peer_t *peer) {
    kvf_session_t *session = &peer->session;
    kvf_kept_t *kept = session->first;
    session->first = kept->next;
    session->last = kept->next == NULL ? NULL : session->last;
    session->kept_bytes -= kept->bytes;
    kvf_free(peer->core->alloc, kept);
}

void kvf_session_end(kvf_peer_t *peer) {
    while (peer->session.first != NULL) {
        drop_first(peer);
    }
    peer->session = (kvf_session_t){.id = peer->session.id, .over = true};
}

bool kvf_session_full(const kvf_peer_t *peer) {
    return peer->session.kept_bytes > KEPT_BYTES;
}

kvf_status_t kvf_session_acknowledged(kvf_peer_t *peer, uint64_t n, kvf_detail_t *detail) {
    kvf_session_t *session = &peer->session;
    if (n < session->n_acknowledged || n > session->n_said) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL,
                        "%" PRIu64 " messages are acknowledged, when %" PRIu64
                        " were before and %" PRIu64 " were sent",
                        n, session->n_acknowledged, session->n_said);
    }
    for (; session->n_acknowledged < n; session->n_acknowledged++) {
        drop_first(peer);
    }
    return KVF_OK;
}

kvf_status_t kvf_session_resend(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    for (const kvf_kept_t *kept = peer->session.first; kept != NULL && !KVF_MUTANT(resend_nothing);
         kept = kept->next) {
        uint8_t *frame = kvf_alloc(core->alloc, kept->bytes);
        if (frame == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        memcpy(frame, kept->frame, kept->bytes);
        core->out.write(core->out.ctx, peer->link->conn, frame, kept->bytes);
    }
    return KVF_OK;
}

void kvf_session_took(kvf_peer_t *peer, size_t bytes) {
    kvf_session_t *session = &peer->session;
    session->n_received++;
    session->taken_bytes += bytes;
    if (session->taken_bytes >= ACK_BYTES) {
        kvf_peer_beat(peer);
    }
}

/* ---- heartbeats ---- */

/* One of them; it says, too, how many messages came. */
static void beat(kvf_peer_t *peer, uint64_t *renewed, size_t n_renewed) {
    kvf_core_t *core = peer->core;
    Kvf__Wire__Heartbeat message;
    kvf__wire__heartbeat__init(&message);
    uint8_t *frame;
    size_t bytes;
    message.sequence = ++peer->sequence;
    message.received = peer->session.n_received;
    message.n_renewed = n_renewed;
    message.renewed = renewed;
    if (peer->link == NULL || peer->failing != KVF_OK ||
        !pack(peer, KVF_FRAME_HEARTBEAT, &message.base, &frame, &bytes)) {
        return;
    }
    peer->session.taken_bytes = 0;
    core->out.write(core->out.ctx, peer->link->conn, frame, bytes);
}

void kvf_peer_beat(kvf_peer_t *peer) {
    beat(peer, NULL, 0);
}

void kvf_peer_beat_leases(kvf_peer_t *peer) {
    uint64_t renewed[KVF_RENEWED_PER_BEAT];
    size_t n = 0;
    for (kvf_op_t *op = peer->ops; op != NULL && !KVF_MUTANT(no_renewal); op = op->peer_next) {
        if (op->kind != KVF_OP_RECV || !kvf_recv_is_wanted(op)) {
            continue;
        }
        if (n == KVF_RENEWED_PER_BEAT) {
            beat(peer, renewed, n);
            n = 0;
        }
        renewed[n++] = op->id;
    }
    beat(peer, renewed, n);
}
