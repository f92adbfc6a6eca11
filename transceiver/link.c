/* SPDX-License-Identifier: Apache-2.0 */
/* Control connections: preamble, frames, and which message may come when. What a message means is
 * peer.c's, send.c's and recv.c's. */
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* For strangers. An attempt to reach a node has less time than the node has in all (peer.c), so
 * that another one can follow. */
#define HANDSHAKE_US UINT64_C(5000000)

static void link_kill(kvf_link_t *link) {
    kvf_core_t *core = link->core;
    const kvf_alloc_t *hash_alloc = core->alloc;
    if (link->dead) {
        return;
    }
    link->dead = true;
    HASH_DEL(core->links, link);
    kvf_timer_release(&core->timers, &link->timer);
    if (link->peer != NULL) {
        kvf_link_t **at = &link->peer->links;
        while (*at != link) {
            at = &(*at)->next;
        }
        *at = link->next;
        link->peer->link = link->peer->link == link ? NULL : link->peer->link;
        link->peer = NULL;
    }
    link->next = core->dead_links;
    core->dead_links = link;
}

void kvf_link_attach(kvf_link_t *link, kvf_peer_t *peer) {
    link->peer = peer;
    link->next = peer->links;
    peer->links = link;
}

void kvf_link_close(kvf_link_t *link) {
    if (!link->dead) {
        link->core->out.close(link->core->out.ctx, link->conn);
        link_kill(link);
    }
}

void kvf_links_reap(kvf_core_t *core) {
    while (core->dead_links != NULL) {
        kvf_link_t *link = core->dead_links;
        core->dead_links = link->next;
        kvf_frame_parser_cleanup(&link->parser);
        kvf_free(core->alloc, link);
    }
}

/* Its other end does not want us, or misbehaved, or is another one: not to be tried again. */
static void link_failed(kvf_link_t *link, kvf_peer_state_t state, kvf_status_t status,
                        const char *why) {
    kvf_peer_t *peer = link->peer;
    if (peer != NULL && (peer->link == NULL || peer->link == link)) {
        kvf_peer_fail(peer, state, status, why); /* closes its links, this one too */
    } else {
        kvf_log(link->core->log, KVF_LOG_INFO, "connection from %s closed: %s", link->address, why);
        kvf_link_close(link);
    }
}

/* It broke, or did not come about; another one may. */
static void link_lost(kvf_link_t *link, const char *why) {
    kvf_peer_t *peer = link->peer;
    kvf_log(link->core->log, KVF_LOG_INFO, "connection to %s closed: %s", link->address, why);
    kvf_link_close(link);
    if (peer != NULL) {
        kvf_peer_disconnected(peer, false, why);
    }
}

void kvf_link_say(kvf_link_t *link, kvf_frame_type_t type, const ProtobufCMessage *message) {
    kvf_core_t *core = link->core;
    uint8_t *frame;
    size_t bytes;
    if (kvf_message_pack(core->alloc, type, message, KVF_HELLO_CAP_BYTES, &frame, &bytes) ==
        KVF_OK) {
        core->out.write(core->out.ctx, link->conn, frame, bytes);
    }
}

void kvf_link_say_refuse(kvf_link_t *link, kvf_status_t status, const char *why) {
    Kvf__Wire__Refuse refuse;
    kvf__wire__refuse__init(&refuse);
    refuse.status = status;
    refuse.message = (char *)(uintptr_t)why;
    kvf_link_say(link, KVF_FRAME_REFUSE, &refuse.base);
}

/* The other end broke protocol: tell it why, count it, close this connection only. */
static void link_refuse(kvf_link_t *link, kvf_status_t status, const char *why) {
    kvf_core_t *core = link->core;
    core->counters.refused_frames++;
    if (link->state != KVF_LINK_PREAMBLE) {
        kvf_link_say_refuse(link, status, why);
    }
    kvf_log(core->log, KVF_LOG_WARN, "refused %s: %s", link->address, why);
    link_failed(link, KVF_PEER_REFUSED, status, why);
}

static void on_handshake_timer(kvf_timer_t *timer, void *owner) {
    (void)timer;
    link_lost(owner, "the handshake took too long");
}

kvf_status_t kvf_link_create(kvf_core_t *core, uint64_t conn, bool inbound, const char *address,
                             kvf_link_t **link_p) {
    const kvf_alloc_t *hash_alloc = core->alloc;
    kvf_link_t *link = kvf_calloc(core->alloc, 1, sizeof(*link));
    if (link == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    link->core = core;
    link->conn = conn;
    link->inbound = inbound;
    link->state = inbound ? KVF_LINK_PREAMBLE : KVF_LINK_DIALLING;
    (void)snprintf(link->address, sizeof(link->address), "%s", address);
    kvf_frame_parser_init(&link->parser, core->alloc, KVF_HELLO_CAP_BYTES);
    if (kvf_timer_reserve(&core->timers, &link->timer, on_handshake_timer, link) != KVF_OK) {
        goto err_free;
    }
    HASH_ADD(hh, core->links, conn, sizeof(link->conn), link);
    if (!kvf_hashed(link)) {
        goto err_timer;
    }
    kvf_timer_set(&core->timers, &link->timer,
                  kvf_time_after(core->now_us, inbound ? HANDSHAKE_US : core->agent.suspect_us));
    *link_p = link;
    return KVF_OK;

err_timer:
    kvf_timer_release(&core->timers, &link->timer);
err_free:
    kvf_free(core->alloc, link);
    return KVF_ERR_NO_MEMORY;
}

/* Our half of the first phase. */
static bool send_preamble(kvf_link_t *link) {
    kvf_core_t *core = link->core;
    kvf_preamble_t ours = {KVF_PROTOCOL_MAJOR, KVF_PROTOCOL_MINOR, !link->inbound, {0}};
    uint8_t *mine = link->preambles[link->inbound ? 1 : 0];
    uint8_t *copy = kvf_alloc(core->alloc, KVF_PREAMBLE_BYTES);
    if (copy == NULL) {
        return false;
    }
    core->config.rand.fill(core->config.rand.ctx, ours.nonce, sizeof(ours.nonce));
    kvf_preamble_encode(&ours, mine);
    memcpy(copy, mine, KVF_PREAMBLE_BYTES);
    core->out.write(core->out.ctx, link->conn, copy, KVF_PREAMBLE_BYTES);
    return true;
}

static kvf_hello_binding_t binding(const kvf_link_t *link, bool from_initiator) {
    return (kvf_hello_binding_t){link->preambles[0], link->preambles[1], from_initiator};
}

/* Our half of the second phase. */
static bool send_hello(kvf_link_t *link) {
    kvf_core_t *core = link->core;
    kvf_hello_binding_t bound = binding(link, !link->inbound);
    uint8_t *frame;
    size_t bytes;
    if (kvf_peer_pack_hello(link->peer, &bound, &frame, &bytes) != KVF_OK) {
        return false;
    }
    core->out.write(core->out.ctx, link->conn, frame, bytes);
    return true;
}

/* Connections that have not proven the key may be this many; then the oldest makes room. */
#define MAX_STRANGERS 64

static void evict_stranger(kvf_core_t *core) {
    kvf_link_t *oldest = NULL; /* the table keeps the order of arrival */
    uint32_t n = 0;
    for (kvf_link_t *link = core->links; link != NULL; link = link->hh.next) {
        if (link->inbound && link->state != KVF_LINK_UP) {
            oldest = oldest == NULL ? link : oldest;
            n++;
        }
    }
    if (n > MAX_STRANGERS) {
        link_lost(oldest, "too many connections that say nothing");
    }
}

void kvf_core_opened(kvf_core_t *core, uint64_t conn, bool inbound, const char *address) {
    kvf_link_t *link = NULL;
    if (inbound) {
        if (core->shutting_down || kvf_link_create(core, conn, true, address, &link) != KVF_OK) {
            core->out.close(core->out.ctx, conn);
        }
        evict_stranger(core);
        kvf_links_reap(core);
        return;
    }
    HASH_FIND(hh, core->links, &conn, sizeof(conn), link);
    if (link == NULL) {
        core->out.close(core->out.ctx, conn);
        return;
    }
    link->state = KVF_LINK_PREAMBLE;
    if (!send_preamble(link)) {
        link_lost(link, "no memory for the handshake");
    }
    kvf_links_reap(core);
}

void kvf_core_closed(kvf_core_t *core, uint64_t conn, const char *why) {
    kvf_link_t *link;
    HASH_FIND(hh, core->links, &conn, sizeof(conn), link);
    if (link == NULL) {
        return;
    }
    char text[KVF_DETAIL_BYTES];
    kvf_peer_t *peer = link->peer;
    bool nobody = link->state == KVF_LINK_DIALLING;
    (void)snprintf(text, sizeof(text), "%s %s: %s",
                   nobody ? "cannot connect to" : "lost the connection to", link->address, why);
    link_kill(link); /* the driver has closed it already */
    if (peer != NULL && !KVF_MUTANT(ignore_closed)) {
        kvf_peer_disconnected(peer, nobody, text);
    }
    kvf_links_reap(core);
}

/* The other end's preamble is complete. */
static void on_preamble(kvf_link_t *link) {
    kvf_detail_t detail;
    kvf_preamble_t theirs;
    const uint8_t *raw = link->preambles[link->inbound ? 0 : 1];
    kvf_status_t status = kvf_preamble_decode(raw, &theirs, &detail);
    if (status == KVF_OK && theirs.initiator != link->inbound) {
        status =
            kvf_fail(&detail, KVF_ERR_PROTOCOL, "both ends of the connection claim the same role");
    }
    if (status != KVF_OK && !(link->inbound && status == KVF_ERR_INCOMPATIBLE)) {
        link_refuse(link, status == KVF_ERR_PROTOCOL ? KVF_ERR_PEER_REFUSED : status, detail.text);
        return;
    }
    if (link->inbound && !send_preamble(link)) {
        link_lost(link, "no memory for the handshake");
        return;
    }
    link->state = KVF_LINK_HELLO;
    if (status != KVF_OK) {
        link_refuse(link, status, detail.text);
    } else if (!link->inbound && !send_hello(link)) {
        link_lost(link, "no memory for the handshake");
    }
}

static void on_hello(kvf_link_t *link, const uint8_t *payload, size_t bytes) {
    kvf_core_t *core = link->core;
    kvf_detail_t detail;
    Kvf__Wire__Hello *hello = NULL;
    kvf_hello_binding_t bound = binding(link, link->inbound);
    KVF_FAIL_POINT(handshake);
    kvf_status_t status = kvf_hello_unpack(core->alloc, core->agent.cluster_key, &bound, payload,
                                           bytes, &hello, &detail);
    if (status == KVF_OK) {
        status = kvf_peer_accept(link, hello, &detail);
        kvf_message_free(core->alloc, &hello->base);
    }
    switch (status) {
    case KVF_OK:
        break;
    case KVF_ERR_AGAIN:
    case KVF_ERR_NO_MEMORY:
        link_lost(link, detail.text);
        return;
    case KVF_ERR_PEER_LOST: /* nobody's fault: the node that we wanted, or it did, is gone */
        if (link->inbound) {
            kvf_link_say_refuse(link, status, detail.text);
        }
        link_failed(link, KVF_PEER_LOST, status, detail.text);
        return;
    default:
        link_refuse(link, status == KVF_ERR_PROTOCOL ? KVF_ERR_PEER_REFUSED : status, detail.text);
        return;
    }
    link->parser.cap_bytes = core->agent.frame_bytes;
    if (!link->inbound) {
        kvf_timer_set(&core->timers, &link->timer, KVF_NEVER);
        link->state = KVF_LINK_UP;
        kvf_peer_up(link->peer, link);
    } else if (send_hello(link)) {
        link->state = KVF_LINK_CONFIRM;
    } else {
        link_lost(link, "no memory for the handshake");
    }
}

/* The other end does not want us, or not any more. Its word is taken for its own requests only. */
static void on_refuse(kvf_link_t *link, const Kvf__Wire__Refuse *refuse) {
    kvf_peer_t *peer = link->peer;
    char text[KVF_DETAIL_BYTES];
    kvf_status_t status = (kvf_status_t)refuse->status;
    if (status == KVF_ERR_PEER_LOST && peer != NULL) {
        (void)snprintf(text, sizeof(text), "%s %s: %.380s", link->address,
                       link->state == KVF_LINK_UP ? "gave this node up and says" : "says",
                       refuse->message);
        kvf_link_close(link); /* no need to answer */
        if (peer->link == NULL) {
            kvf_peer_fail(peer, KVF_PEER_LOST, status, text);
        }
        return;
    }
    if (status != KVF_ERR_INCOMPATIBLE && status != KVF_ERR_NOT_ALLOWED) {
        status = KVF_ERR_PEER_REFUSED;
    }
    (void)snprintf(text, sizeof(text), "%s refused this node and says: %.380s", link->address,
                   refuse->message);
    link_failed(link, KVF_PEER_REFUSED, status, text);
}

static void on_heartbeat(kvf_link_t *link, const Kvf__Wire__Heartbeat *beat) {
    kvf_detail_t detail;
    if (kvf_session_acknowledged(link->peer, beat->received, &detail) != KVF_OK) {
        link_refuse(link, KVF_ERR_PEER_REFUSED, detail.text);
        return;
    }
    kvf_send_on_renewed(link->peer, beat->renewed, beat->n_renewed);
}

static void on_fetch(kvf_link_t *link, const Kvf__Wire__Fetch *fetch) {
    kvf_detail_t detail;
    kvf_status_t status = kvf_send_on_fetch(link->peer, fetch, &detail);
    if (status == KVF_ERR_PROTOCOL) {
        link_refuse(link, KVF_ERR_PEER_REFUSED, detail.text);
    } else if (status != KVF_OK) { /* the receiver waits for what will not come */
        kvf_peer_fail(link->peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, detail.text);
    }
}

static void on_message(kvf_link_t *link, kvf_frame_type_t type, ProtobufCMessage *base,
                       size_t bytes) {
    kvf_core_t *core = link->core;
    kvf_peer_t *peer = link->peer;
    kvf_transfer_id_t id;
    bool known = true;
    if (kvf_session_counts(type)) {
        kvf_session_took(peer, bytes);
    }
    switch (type) {
    case KVF_FRAME_HEARTBEAT:
        on_heartbeat(link, (const Kvf__Wire__Heartbeat *)base);
        break;
    case KVF_FRAME_RECV_REQUEST:
        kvf_send_on_request(peer, (const Kvf__Wire__RecvRequest *)base);
        break;
    case KVF_FRAME_COMMIT:
        kvf_recv_on_commit(peer, (Kvf__Wire__Commit *)base);
        break;
    case KVF_FRAME_DONE:
        id = kvf_transfer_id_read(((const Kvf__Wire__Done *)base)->transfer);
        kvf_send_on_done(peer, &id);
        break;
    case KVF_FRAME_ABORT: {
        const Kvf__Wire__Abort *abort = (const Kvf__Wire__Abort *)base;
        id = kvf_transfer_id_read(abort->transfer);
        known = kvf_incarnation_equal(&id.receiver, &core->incarnation)
                    ? kvf_recv_on_abort(peer, &id, (kvf_status_t)abort->status, abort->message)
                    : kvf_send_on_abort(peer, &id, (kvf_status_t)abort->status, abort->message);
        break;
    }
    case KVF_FRAME_READY:
        id = kvf_transfer_id_read(((const Kvf__Wire__Ready *)base)->transfer);
        known = kvf_recv_on_ready(peer, &id, ((const Kvf__Wire__Ready *)base)->bytes);
        break;
    case KVF_FRAME_PULL:
        id = kvf_transfer_id_read(((const Kvf__Wire__Pull *)base)->transfer);
        known = kvf_send_on_pull(peer, &id, ((const Kvf__Wire__Pull *)base)->bytes);
        break;
    case KVF_FRAME_JOIN:
        kvf_peer_on_join(peer, (const Kvf__Wire__Join *)base);
        break;
    case KVF_FRAME_JOINED:
        kvf_peer_on_joined(peer, (const Kvf__Wire__Joined *)base);
        break;
    case KVF_FRAME_LEAVE:
        kvf_peer_on_leave(peer, (const Kvf__Wire__Leave *)base);
        break;
    case KVF_FRAME_FETCH:
        on_fetch(link, (const Kvf__Wire__Fetch *)base);
        break;
    case KVF_FRAME_DRAINED:
        id = kvf_transfer_id_read(((const Kvf__Wire__Drained *)base)->transfer);
        if (kvf_incarnation_equal(&id.receiver, &core->incarnation)) {
            kvf_recv_on_drained(peer, &id);
        } else {
            kvf_send_on_drained(peer, &id);
        }
        break;
    case KVF_FRAME_BYE:
        kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, "the node shut down in order");
        kvf_peer_forget(peer);
        break;
    default:
        link_refuse(link, KVF_ERR_PEER_REFUSED, "a second hello");
        break;
    }
    if (!known) {
        core->counters.unknown_transfers++;
    }
}

static void on_frame(kvf_link_t *link, kvf_frame_type_t type, const uint8_t *payload,
                     size_t bytes) {
    kvf_core_t *core = link->core;
    kvf_detail_t detail;
    ProtobufCMessage *message;
    if (type == KVF_FRAME_HELLO && link->state == KVF_LINK_HELLO) {
        on_hello(link, payload, bytes);
        return;
    }
    if (type == KVF_FRAME_HELLO || (type != KVF_FRAME_REFUSE && link->state < KVF_LINK_CONFIRM)) {
        (void)kvf_fail(&detail, KVF_ERR_PROTOCOL, "a %s frame before or after its time",
                       kvf_frame_type_name(type));
        link_refuse(link, KVF_ERR_PEER_REFUSED, detail.text);
        return;
    }
    kvf_status_t status = kvf_message_unpack(core->alloc, type, payload, bytes, &message, &detail);
    if (status == KVF_ERR_NO_MEMORY) {
        link_lost(link, "no memory for a message"); /* which will be said again */
        return;
    }
    if (status != KVF_OK) {
        link_refuse(link, KVF_ERR_PEER_REFUSED, detail.text);
        return;
    }
    kvf_log(core->log, KVF_LOG_TRACE, "%s from %s, %zu bytes", kvf_frame_type_name(type),
            link->address, bytes);
    if (link->state == KVF_LINK_CONFIRM && type != KVF_FRAME_REFUSE) {
        link->state = KVF_LINK_UP;
        kvf_timer_set(&core->timers, &link->timer, KVF_NEVER);
        kvf_peer_up(link->peer, link);
    }
    if (type == KVF_FRAME_REFUSE) {
        on_refuse(link, (const Kvf__Wire__Refuse *)message);
    } else if (!link->dead) {
        on_message(link, type, message, bytes);
    }
    kvf_message_free(core->alloc, message);
}

void kvf_core_bytes(kvf_core_t *core, uint64_t conn, const uint8_t *data, size_t bytes) {
    kvf_link_t *link;
    HASH_FIND(hh, core->links, &conn, sizeof(conn), link);
    if (link == NULL) {
        return;
    }
    if (link->state >= KVF_LINK_CONFIRM) {
        kvf_peer_heard(link->peer);
    }
    if (link->state == KVF_LINK_PREAMBLE) {
        size_t n = KVF_PREAMBLE_BYTES - link->preamble_used;
        n = n < bytes ? n : bytes;
        memcpy(link->preambles[link->inbound ? 0 : 1] + link->preamble_used, data, n);
        link->preamble_used += n;
        data += n;
        bytes -= n;
        if (link->preamble_used < KVF_PREAMBLE_BYTES) {
            return;
        }
        on_preamble(link);
    }
    while (!link->dead && bytes > 0) {
        kvf_detail_t detail;
        kvf_frame_type_t type;
        const uint8_t *payload;
        size_t payload_bytes;
        bool have = false;
        kvf_status_t status = kvf_frame_parse(&link->parser, &data, &bytes, &have, &type, &payload,
                                              &payload_bytes, &detail);
        if (status != KVF_OK) {
            link_refuse(link, KVF_ERR_PEER_REFUSED, detail.text);
        } else if (have) {
            on_frame(link, type, payload, payload_bytes);
        }
    }
    kvf_links_reap(core);
}
