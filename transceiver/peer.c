/* SPDX-License-Identifier: Apache-2.0 */
/* Peers: one incarnation of another agent each. Whether it is alive, how it is reached, what ends
 * with it. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* Peers that are gone are remembered for status, this many at the most. */
#define MAX_GONE_PEERS 64

static void peer_destroy(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    const kvf_alloc_t *hash_alloc = core->alloc;
    HASH_DEL(core->peers, peer);
    kvf_turns_forget(peer);
    kvf_timer_release(&core->timers, &peer->timer);
    kvf_timer_release(&core->timers, &peer->map_timer);
    kvf_session_end(peer);
    kvf_free(core->alloc, peer->mover_address);
    kvf_free(core->alloc, peer->mapped_address);
    kvf_free(core->alloc, peer);
}

bool kvf_peer_is_up(const kvf_peer_t *peer) {
    return peer->state == KVF_PEER_UP || peer->state == KVF_PEER_SUSPECT;
}

static bool is_idle(const kvf_peer_t *peer) {
    return !kvf_peer_is_up(peer) && peer->links == NULL && peer->ops == NULL && peer->n_lent == 0;
}

void kvf_peer_forget(kvf_peer_t *peer) {
    peer->forgotten = true;
    peer->core->peers_forgotten = true;
}

/* Free idle peers: those to be forgotten, and the longest gone ones beyond MAX_GONE_PEERS. */
void kvf_peers_reap(kvf_core_t *core) {
    uint32_t gone = 0;
    kvf_peer_t *peer, *next;
    bool later = false;
    for (peer = core->peers; peer != NULL; peer = peer->hh.next) {
        gone += is_idle(peer);
    }
    for (peer = core->peers; peer != NULL; peer = next) {
        next = peer->hh.next;
        if (is_idle(peer) && (peer->forgotten || gone > MAX_GONE_PEERS)) {
            peer_destroy(peer);
            gone--;
        } else {
            later |= peer->forgotten;
        }
    }
    core->peers_forgotten = later;
}

/* ---- time ---- */

/* Connect to where it listens. */
static kvf_status_t dial(kvf_peer_t *peer, kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    kvf_link_t *link;
    uint64_t conn;
    kvf_status_t status = core->out.dial(core->out.ctx, peer->address, &conn, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_link_create(core, conn, false, peer->address, &link);
    if (status != KVF_OK) {
        core->out.close(core->out.ctx, conn);
        return kvf_fail(detail, status, "no memory for a connection");
    }
    kvf_link_attach(link, peer);
    return KVF_OK;
}

/* Set the timer for an attempt to connect, the later the more were in vain; or for the end. */
static void try_later(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    uint64_t period = core->agent.heartbeat_us;
    uint64_t at_us = kvf_time_after(core->now_us, peer->redial_us);
    uint64_t end_us = kvf_time_after(peer->heard_us, core->agent.lost_us);
    peer->redial_us = 2 * peer->redial_us + period / 16;
    peer->redial_us = peer->redial_us < period ? peer->redial_us : period;
    kvf_timer_set(&core->timers, &peer->timer, at_us < end_us ? at_us : end_us);
}

/* It has no connection: dial, unless that is under way. Also when nothing runs with it here: it may
 * be the other side that waits. */
static void connect_again(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    if (peer->links == NULL && dial(peer, &detail) != KVF_OK) {
        try_later(peer);
    } else {
        kvf_timer_set(&core->timers, &peer->timer,
                      kvf_time_after(peer->heard_us, core->agent.lost_us));
    }
}

/* Nothing was heard for lost_us. */
static void give_up(kvf_peer_t *peer, uint64_t silent_us) {
    char why[KVF_DETAIL_BYTES];
    if (peer->link != NULL) {
        (void)snprintf(why, sizeof(why), "%s was silent for %" PRIu64 " ms", peer->instance,
                       silent_us / 1000);
    } else if (kvf_peer_is_up(peer)) {
        (void)snprintf(why, sizeof(why), "no new connection to %s within %" PRIu64 " ms; %.300s",
                       peer->instance, silent_us / 1000, peer->reason);
    } else {
        (void)snprintf(why, sizeof(why),
                       "%s did not answer the handshake; is a kvferry node alive there?",
                       peer->address);
    }
    kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, why);
}

static void on_timer(kvf_timer_t *timer, void *owner) {
    kvf_peer_t *peer = owner;
    kvf_core_t *core = peer->core;
    char why[KVF_DETAIL_BYTES];
    if (peer->failing != KVF_OK) {
        memcpy(why, peer->reason, sizeof(why));
        kvf_peer_fail(peer, KVF_PEER_LOST, peer->failing, why);
        return;
    }
    uint64_t silent = core->now_us - peer->heard_us;
    if (silent >= core->agent.lost_us && !(KVF_MUTANT(ignore_silence) && peer->link != NULL)) {
        give_up(peer, silent);
        return;
    }
    if (peer->link == NULL) {
        connect_again(peer);
        return;
    }
    if (silent >= core->agent.suspect_us && peer->state == KVF_PEER_UP) {
        peer->state = KVF_PEER_SUSPECT;
        kvf_log(core->log, KVF_LOG_WARN, "%s is silent for %" PRIu64 " ms: suspect", peer->instance,
                silent / 1000);
    }
    kvf_peer_beat_leases(peer);
    /* Not later than the moment at which silence would become loss. */
    uint64_t period = core->agent.heartbeat_us;
    uint64_t left = core->agent.lost_us - silent;
    if (peer->failing == KVF_OK) {
        kvf_timer_set(&core->timers, timer, core->now_us + (left < period ? left : period));
    }
}

/* ---- the table of peers ---- */

kvf_peer_t *kvf_peer_find(kvf_core_t *core, const kvf_incarnation_t *incarnation) {
    kvf_peer_t *peer;
    HASH_FIND(hh, core->peers, incarnation, sizeof(*incarnation), peer);
    return peer;
}

kvf_status_t kvf_peer_create(kvf_core_t *core, const kvf_incarnation_t *incarnation,
                             const char *instance, const char *address, kvf_peer_t **peer_p) {
    const kvf_alloc_t *hash_alloc = core->alloc;
    kvf_peers_reap(core);
    kvf_peer_t *peer = kvf_calloc(core->alloc, 1, sizeof(*peer));
    if (peer == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    peer->core = core;
    peer->number = ++core->next_peer;
    peer->incarnation = *incarnation;
    peer->state = KVF_PEER_CONNECTING;
    (void)snprintf(peer->instance, sizeof(peer->instance), "%s", instance);
    (void)snprintf(peer->address, sizeof(peer->address), "%s", address);
    if (kvf_timer_reserve(&core->timers, &peer->timer, on_timer, peer) != KVF_OK ||
        kvf_timer_reserve(&core->timers, &peer->map_timer, kvf_peer_on_map_timer, peer) != KVF_OK) {
        goto err_timer;
    }
    HASH_ADD(hh, core->peers, incarnation, sizeof(peer->incarnation), peer);
    if (!kvf_hashed(peer)) {
        goto err_timer;
    }
    *peer_p = peer;
    return KVF_OK;

err_timer:
    kvf_timer_release(&core->timers, &peer->map_timer);
    kvf_timer_release(&core->timers, &peer->timer);
    kvf_free(core->alloc, peer);
    return KVF_ERR_NO_MEMORY;
}

kvf_status_t kvf_peer_status(kvf_status_t theirs) {
    kvf_scope_t scope = kvf_status_scope(theirs);
    return scope == KVF_SCOPE_RETRY || scope == KVF_SCOPE_AGENT ? KVF_ERR_PEER_REFUSED : theirs;
}

void kvf_peer_up(kvf_peer_t *peer, kvf_link_t *link) {
    kvf_core_t *core = peer->core;
    bool news = !kvf_peer_is_up(peer);
    core->counters.reconnects += !news;
    peer->link = link;
    peer->heard_us = core->now_us;
    peer->state = KVF_PEER_UP;
    peer->forgotten = false;
    peer->reason[0] = '\0';
    peer->up_us = core->now_us;
    peer->dialled = !link->inbound;
    kvf_timer_set(&core->timers, &peer->timer, core->now_us + core->agent.heartbeat_us);
    kvf_log(core->log, KVF_LOG_INFO, "%s at %s is %s, mover %s", peer->instance, peer->address,
            news ? "up" : "connected again", kvf_peer_mover_name(peer));
    if (!link->inbound && peer->session.first == NULL) {
        kvf_peer_beat(peer); /* the responder waits for a word */
    }
    if (kvf_session_resend(peer) != KVF_OK) {
        kvf_link_close(link);
        kvf_peer_disconnected(peer, false, "no memory to go on with the connection");
        return;
    }
    for (kvf_op_t *op = news ? peer->ops : NULL, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_RECV) {
            kvf_recv_on_peer_up(op);
        } else {
            kvf_send_on_peer_up(op);
        }
    }
}

void kvf_peer_heard(kvf_peer_t *peer) {
    peer->heard_us = peer->core->now_us;
    if (peer->state == KVF_PEER_SUSPECT) {
        peer->state = KVF_PEER_UP;
        kvf_log(peer->core->log, KVF_LOG_INFO, "%s is heard again", peer->instance);
    }
}

void kvf_peer_disconnected(kvf_peer_t *peer, bool nobody, const char *why) {
    kvf_core_t *core = peer->core;
    if (peer->links != NULL || peer->state == KVF_PEER_LOST || peer->state == KVF_PEER_REFUSED) {
        return;
    }
    if (nobody) {
        kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, why);
        return;
    }
    if (peer->state == KVF_PEER_UP && core->now_us - peer->up_us >= core->agent.heartbeat_us) {
        /* Who dialled does so again, at once; the other side gives it a moment. (What breaks again
         * and again is not worth that haste.) */
        peer->redial_us = peer->dialled ? 0 : core->agent.heartbeat_us / 2;
    }
    if (kvf_peer_is_up(peer)) {
        kvf_log(core->log, KVF_LOG_WARN, "%s: %s; connecting again", peer->instance, why);
        peer->state = KVF_PEER_SUSPECT;
    }
    if (peer->failing == KVF_OK) {
        (void)snprintf(peer->reason, sizeof(peer->reason), "%s", why);
        try_later(peer);
    }
}

kvf_status_t kvf_peer_reach(kvf_core_t *core, const kvf_ticket_t *ticket, kvf_peer_t **peer_p,
                            kvf_detail_t *detail) {
    kvf_peer_t *peer = kvf_peer_find(core, &ticket->issuer);
    kvf_status_t status;
    if (!kvf_peer_allowed(core, ticket->instance, ticket->address)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED,
                        "the ticket's node %s (%s) is not on the allow-list; add it to peers",
                        ticket->instance, ticket->address);
    }
    if (kvf_incarnation_equal(&ticket->issuer, &core->incarnation)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the ticket was made by this very agent");
    }
    if (peer == NULL) {
        status = kvf_peer_create(core, &ticket->issuer, ticket->instance, ticket->address, &peer);
        if (status != KVF_OK) {
            return kvf_fail(detail, status, "no memory for a peer");
        }
    }
    *peer_p = peer;
    if (peer->links != NULL || kvf_timer_is_set(&peer->timer)) {
        return KVF_OK; /* concurrent connects to one peer are one */
    }
    (void)snprintf(peer->address, sizeof(peer->address), "%.79s", ticket->address);
    status = dial(peer, detail);
    if (status != KVF_OK) {
        return status;
    }
    peer->state = KVF_PEER_CONNECTING;
    peer->failing = KVF_OK;
    peer->forgotten = false;
    peer->heard_us = core->now_us; /* from here on it is waited for */
    peer->redial_us = 0;
    kvf_timer_set(&core->timers, &peer->timer, kvf_time_after(core->now_us, core->agent.lost_us));
    return KVF_OK;
}

/* ---- operations and messages ---- */

void kvf_peer_attach(kvf_peer_t *peer, kvf_op_t *op) {
    op->peer = peer;
    op->peer_prev = NULL;
    op->peer_next = peer->ops;
    if (peer->ops != NULL) {
        peer->ops->peer_prev = op;
    }
    peer->ops = op;
}

void kvf_peer_detach(kvf_op_t *op) {
    if (op->peer == NULL) {
        return;
    }
    if (op->peer_prev != NULL) {
        op->peer_prev->peer_next = op->peer_next;
    } else {
        op->peer->ops = op->peer_next;
    }
    if (op->peer_next != NULL) {
        op->peer_next->peer_prev = op->peer_prev;
    }
    op->peer = NULL;
}

void kvf_peer_tell_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                         const char *message) {
    Kvf__Wire__Abort abort;
    kvf__wire__abort__init(&abort);
    Kvf__Wire__TransferId id;
    char text[KVF_DETAIL_BYTES];
    kvf_transfer_id_write(transfer, &id);
    (void)snprintf(text, sizeof(text), "%.400s", message);
    abort.transfer = &id;
    abort.status = status;
    abort.message = text;
    kvf_peer_tell(peer, KVF_FRAME_ABORT, &abort.base);
}

void kvf_peer_tell_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    Kvf__Wire__Drained drained;
    Kvf__Wire__TransferId id;
    kvf__wire__drained__init(&drained);
    kvf_transfer_id_write(transfer, &id);
    drained.transfer = &id;
    kvf_peer_tell(peer, KVF_FRAME_DRAINED, &drained.base);
}

const char *kvf_peer_mover_name(const kvf_peer_t *peer) {
    return peer->core->config.mover_names[peer->mover_idx];
}

kvf_status_t kvf_peer_connect_mover(kvf_peer_t *peer, kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    if (peer->mover_connected) {
        return KVF_OK;
    }
    kvf_status_t status =
        core->out.mover_connect(core->out.ctx, peer->number, peer->mover_idx, peer->mover_address,
                                peer->mover_address_bytes, detail);
    peer->mover_connected = status == KVF_OK;
    return status;
}

/* What runs with it ends; `told`: only what it was told of. So does the path of the bytes: what
 * comes next makes one of its own. */
static void end_ops(kvf_peer_t *peer, bool told, kvf_status_t status, const char *why) {
    kvf_core_t *core = peer->core;
    if (peer->mover_connected) {
        peer->mover_connected = false;
        core->out.mover_disconnect(core->out.ctx, peer->number, peer->mover_idx);
    }
    kvf_peer_unmap(peer);
    if (peer->n_lent > 0 && core->out.evict != NULL && !KVF_MUTANT(keep_path)) {
        core->out.evict(core->out.ctx, peer->number);
    }
    for (kvf_op_t *op = peer->ops, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_SEND) {
            kvf_send_on_peer(op, status, why);
        } else if (!told || kvf_recv_is_told(op)) {
            kvf_recv_on_peer(op, status, why);
        }
    }
}

void kvf_peer_fail(kvf_peer_t *peer, kvf_peer_state_t state, kvf_status_t status, const char *why) {
    kvf_core_t *core = peer->core;
    bool news = peer->state != state || peer->ops != NULL;
    if (peer->link != NULL && status == KVF_ERR_PEER_LOST) {
        kvf_link_say_refuse(peer->link, status, why); /* or it would try to go on */
    }
    peer->state = state;
    peer->failing = KVF_OK;
    core->peers_forgotten = true; /* perhaps too many gone ones are remembered now */
    kvf_timer_set(&core->timers, &peer->timer, KVF_NEVER);
    if (why != peer->reason) {
        (void)snprintf(peer->reason, sizeof(peer->reason), "%s", why);
    }
    if (news) {
        kvf_log(core->log, peer->ops == NULL ? KVF_LOG_INFO : KVF_LOG_WARN, "peer %s is %s: %s",
                peer->instance, kvf_peer_state_name(state), peer->reason);
    }
    while (peer->links != NULL) {
        kvf_link_close(peer->links);
    }
    kvf_session_end(peer);
    end_ops(peer, false, status, peer->reason);
}

void kvf_peer_restart(kvf_peer_t *peer) {
    char why[KVF_DETAIL_BYTES];
    if (kvf_peer_is_up(peer)) {
        (void)snprintf(why, sizeof(why), "%s had given this node up, and begins anew",
                       peer->instance);
        kvf_log(peer->core->log, peer->ops == NULL ? KVF_LOG_INFO : KVF_LOG_WARN, "%s", why);
        peer->state = KVF_PEER_CONNECTING;
        end_ops(peer, true, KVF_ERR_PEER_LOST, why);
    }
    kvf_session_end(peer);
}

void kvf_core_broken(kvf_core_t *core, uint64_t number, const char *why) {
    char text[KVF_DETAIL_BYTES];
    for (kvf_peer_t *peer = core->peers; peer != NULL; peer = peer->hh.next) {
        if (peer->number == number && peer->mover_connected && !KVF_MUTANT(ignore_broken_path)) {
            (void)snprintf(text, sizeof(text), "the data path to %s broke: %s", peer->instance,
                           why);
            kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, text);
            break;
        }
    }
    kvf_links_reap(core);
}

void kvf_peers_rearm(kvf_core_t *core) {
    for (kvf_peer_t *peer = core->peers; peer != NULL; peer = peer->hh.next) {
        peer->heard_us = core->now_us;
        for (kvf_op_t *op = peer->ops; op != NULL; op = op->peer_next) {
            if (op->kind == KVF_OP_SEND) {
                kvf_send_rearm_op(op);
            }
        }
    }
}

void kvf_peers_all_bye(kvf_core_t *core) {
    Kvf__Wire__Bye bye;
    kvf__wire__bye__init(&bye);
    bye.message = (char *)(uintptr_t) "shutting down";
    for (kvf_peer_t *peer = core->peers; peer != NULL; peer = peer->hh.next) {
        if (peer->link != NULL) {
            kvf_link_say(peer->link, KVF_FRAME_BYE, &bye.base);
        }
        kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_CANCELLED, "this node shuts down");
    }
    while (core->links != NULL) {
        kvf_link_close(core->links);
    }
    kvf_links_reap(core);
}

void kvf_peers_cleanup(kvf_core_t *core) {
    while (core->links != NULL) {
        kvf_link_close(core->links);
    }
    kvf_links_reap(core);
    while (core->peers != NULL) {
        peer_destroy(core->peers);
    }
}

const char *kvf_peer_state_name(kvf_peer_state_t state) {
    static const char *const names[] = {"connecting", "up", "suspect", "lost", "refused"};
    return (unsigned)state < sizeof(names) / sizeof(names[0]) ? names[state] : "lost";
}

size_t kvf_core_peers(const kvf_core_t *core, kvf_peer_info_t *infos, size_t cap) {
    size_t n = 0;
    for (const kvf_peer_t *peer = core->peers; peer != NULL; peer = peer->hh.next, n++) {
        if (n < cap) {
            kvf_peer_info_t *info = &infos[n];
            *info = (kvf_peer_info_t){.state = peer->state};
            memcpy(info->instance, peer->instance, sizeof(info->instance));
            memcpy(info->address, peer->address, sizeof(info->address));
            memcpy(info->reason, peer->reason, sizeof(info->reason));
            (void)snprintf(info->mover, sizeof(info->mover), "%s",
                           peer->map == KVF_MAP_READY || peer->n_lent > 0
                               ? core->config.mapped_name
                               : kvf_peer_mover_name(peer));
            kvf_incarnation_text(&peer->incarnation, info->incarnation);
        }
    }
    return n;
}
