/* SPDX-License-Identifier: Apache-2.0 */
/* Peers: one incarnation of another agent each. Who is accepted, whether it is alive, what ends
 * with it. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* Peers that are gone are remembered for status, this many at the most. */
#define MAX_GONE_PEERS 64

static bool on_allow_list(const kvf_core_t *core, const char *instance, const char *address) {
    for (size_t i = 0; i < core->agent.n_peers; i++) {
        if (strcmp(core->agent.peers[i], instance) == 0 ||
            strcmp(core->agent.peers[i], address) == 0) {
            return true;
        }
    }
    return core->agent.n_peers == 0;
}

static void peer_destroy(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    const kvf_alloc_t *hash_alloc = core->alloc;
    HASH_DEL(core->peers, peer);
    kvf_timer_release(&core->timers, &peer->timer);
    kvf_free(core->alloc, peer->mover_address);
    kvf_free(core->alloc, peer);
}

bool kvf_peer_is_up(const kvf_peer_t *peer) {
    return peer->state == KVF_PEER_UP || peer->state == KVF_PEER_SUSPECT;
}

static bool is_idle(const kvf_peer_t *peer) {
    return !kvf_peer_is_up(peer) && peer->links == NULL && peer->ops == NULL;
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

static void on_heartbeat_timer(kvf_timer_t *timer, void *owner) {
    kvf_peer_t *peer = owner;
    kvf_core_t *core = peer->core;
    Kvf__Wire__Heartbeat beat;
    kvf__wire__heartbeat__init(&beat);
    char why[KVF_DETAIL_BYTES];
    if (peer->failing != KVF_OK) {
        memcpy(why, peer->reason, sizeof(why));
        kvf_peer_fail(peer, KVF_PEER_LOST, peer->failing, why);
        return;
    }
    if (!kvf_peer_is_up(peer)) {
        return;
    }
    uint64_t silent = core->now_us - peer->heard_us;
    if (silent >= core->agent.lost_us && !KVF_MUTANT(ignore_silence)) {
        (void)snprintf(why, sizeof(why), "%s was silent for %" PRIu64 " ms", peer->instance,
                       silent / 1000);
        kvf_peer_fail(peer, KVF_PEER_LOST, KVF_ERR_PEER_LOST, why);
        return;
    }
    if (silent >= core->agent.suspect_us && peer->state == KVF_PEER_UP) {
        peer->state = KVF_PEER_SUSPECT;
        kvf_log(core->log, KVF_LOG_WARN, "%s is silent for %" PRIu64 " ms: suspect", peer->instance,
                silent / 1000);
    }
    beat.sequence = ++peer->sequence;
    kvf_peer_tell(peer, KVF_FRAME_HEARTBEAT, &beat.base);
    /* Not later than the moment at which silence would become loss. */
    uint64_t period = core->agent.heartbeat_us;
    uint64_t left = core->agent.lost_us - silent;
    if (peer->failing == KVF_OK) {
        kvf_timer_set(&core->timers, timer, core->now_us + (left < period ? left : period));
    }
}

static kvf_peer_t *peer_find(kvf_core_t *core, const kvf_incarnation_t *incarnation) {
    kvf_peer_t *peer;
    HASH_FIND(hh, core->peers, incarnation, sizeof(*incarnation), peer);
    return peer;
}

static kvf_status_t peer_create(kvf_core_t *core, const kvf_incarnation_t *incarnation,
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
    if (kvf_timer_reserve(&core->timers, &peer->timer, on_heartbeat_timer, peer) != KVF_OK) {
        goto err_free;
    }
    HASH_ADD(hh, core->peers, incarnation, sizeof(peer->incarnation), peer);
    if (!kvf_hashed(peer)) {
        goto err_timer;
    }
    *peer_p = peer;
    return KVF_OK;

err_timer:
    kvf_timer_release(&core->timers, &peer->timer);
err_free:
    kvf_free(core->alloc, peer);
    return KVF_ERR_NO_MEMORY;
}

/* ---- hello ---- */

kvf_status_t kvf_core_pack_hello(kvf_core_t *core, const kvf_hello_binding_t *bound,
                                 uint8_t **frame_p, size_t *bytes_p) {
    Kvf__Wire__Hello hello;
    kvf__wire__hello__init(&hello);
    Kvf__Wire__LayerGroup groups[KVF_MAX_GROUPS], *group_list[KVF_MAX_GROUPS];
    Kvf__Wire__Region regions[KVF_MAX_GROUPS], *region_list[KVF_MAX_GROUPS];
    Kvf__Wire__Mover mover;
    kvf__wire__mover__init(&mover);
    Kvf__Wire__Mover *mover_list[1] = {&mover};
    const kvf_layout_t *layout = &core->layout;

    kvf_layout_to_wire(layout, groups);
    for (uint32_t i = 0; i < layout->n_groups; i++) {
        kvf__wire__region__init(&regions[i]);
        regions[i].group_idx = i;
        regions[i].memory = (uint32_t)core->config.regions[i].memory;
        regions[i].page_bytes = kvf_group_block_bytes(&layout->groups[i]);
        regions[i].n_pages = (uint64_t)kvf_pages_total(core->config.regions[i].pages);
        group_list[i] = &groups[i];
        region_list[i] = &regions[i];
    }
    mover.name = (char *)(uintptr_t)core->config.mover_name;
    mover.address = (ProtobufCBinaryData){core->mover_address_bytes, core->mover_address};
    hello.instance = (char *)(uintptr_t)core->agent.instance;
    hello.incarnation = (ProtobufCBinaryData){KVF_INCARNATION_BYTES, core->incarnation.bytes};
    hello.control_address = core->control_address;
    hello.layout_digest = core->layout_digest;
    hello.n_groups = layout->n_groups;
    hello.groups = group_list;
    hello.n_regions = layout->n_groups;
    hello.regions = region_list;
    hello.n_movers = 1;
    hello.movers = mover_list;
    hello.heartbeat_us = core->agent.heartbeat_us;
    hello.lost_us = core->agent.lost_us;
    hello.frame_bytes = core->agent.frame_bytes;
    hello.tp_size = hello.pp_size = hello.cp_size = 1;
    hello.version = (char *)(uintptr_t)kvf_version();
    return kvf_hello_pack(core->alloc, core->agent.cluster_key, bound, &hello, frame_p, bytes_p);
}

/* Is this other agent's memory laid out as ours? */
static kvf_status_t check_compatible(const kvf_core_t *core, const Kvf__Wire__Hello *hello,
                                     kvf_detail_t *detail) {
    const kvf_layout_t *ours = &core->layout;
    if (hello->layout_digest != core->layout_digest) {
        kvf_layout_t *theirs = kvf_alloc(core->alloc, sizeof(*theirs));
        if (theirs == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory to compare layouts");
        }
        kvf_status_t status = kvf_hello_layout(hello, theirs, detail);
        if (status == KVF_OK) {
            status = kvf_layout_compare(ours, theirs, detail);
        }
        kvf_free(core->alloc, theirs);
        if (status == KVF_OK) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                            "the layouts' digests differ although their fields are equal; run "
                            "the same version on both nodes");
        }
        return KVF_ERR_INCOMPATIBLE;
    }
    if (hello->tp_size != 1 || hello->pp_size != 1 || hello->cp_size != 1) {
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                        "tp_size, pp_size or cp_size is not 1: unsupported in this version");
    }
    uint32_t seen = 0;
    for (size_t i = 0; i < hello->n_regions; i++) {
        const Kvf__Wire__Region *region = hello->regions[i];
        if (region->group_idx >= ours->n_groups || (seen & (1U << region->group_idx)) != 0 ||
            region->n_pages == 0 || region->n_pages > INT32_MAX ||
            region->page_bytes != kvf_group_block_bytes(&ours->groups[region->group_idx])) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                            "region of group %" PRIu32 ": %" PRIu64 " pages of %" PRIu64
                            " bytes do not fit the layout",
                            region->group_idx, region->n_pages, region->page_bytes);
        }
        seen |= 1U << region->group_idx;
    }
    if (hello->n_regions != ours->n_groups) {
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE, "%zu regions for %" PRIu32 " layer groups",
                        hello->n_regions, ours->n_groups);
    }
    for (size_t i = 0; i < hello->n_movers; i++) {
        if (strcmp(hello->movers[i]->name, core->config.mover_name) == 0) {
            return KVF_OK;
        }
    }
    return kvf_fail(detail, KVF_ERR_INCOMPATIBLE, "no common mover: %s is needed here",
                    core->config.mover_name);
}

static kvf_status_t peer_fill(kvf_peer_t *peer, const Kvf__Wire__Hello *hello) {
    kvf_core_t *core = peer->core;
    for (size_t i = 0; i < hello->n_movers; i++) {
        if (strcmp(hello->movers[i]->name, core->config.mover_name) == 0 &&
            peer->mover_address == NULL) {
            size_t bytes = hello->movers[i]->address.len;
            uint8_t *copy = kvf_alloc(core->alloc, bytes + 1);
            if (copy == NULL) {
                return KVF_ERR_NO_MEMORY;
            }
            if (bytes > 0) {
                memcpy(copy, hello->movers[i]->address.data, bytes);
            }
            peer->mover_address = copy;
            peer->mover_address_bytes = bytes;
        }
    }
    for (size_t i = 0; i < hello->n_regions; i++) {
        peer->n_pages[hello->regions[i]->group_idx] = (int64_t)hello->regions[i]->n_pages;
    }
    (void)snprintf(peer->instance, sizeof(peer->instance), "%s", hello->instance);
    (void)snprintf(peer->address, sizeof(peer->address), "%s", hello->control_address);
    peer->frame_bytes = hello->frame_bytes;
    return KVF_OK;
}

/* At one address there is one process: another incarnation there means that the old one is gone. */
static void end_predecessors(kvf_core_t *core, const kvf_peer_t *peer) {
    kvf_peer_t *other, *next;
    for (other = core->peers; other != NULL; other = next) {
        next = other->hh.next;
        if (other == peer || strcmp(other->address, peer->address) != 0) {
            continue;
        }
        if (kvf_peer_is_up(other) && core->now_us - other->heard_us < core->agent.suspect_us) {
            continue; /* it lives; whoever claims its address has to show that it does not */
        }
        if (other->state != KVF_PEER_LOST) {
            kvf_peer_fail(other, KVF_PEER_LOST, KVF_ERR_PEER_LOST,
                          "the node restarted: another incarnation is at its address");
        }
        kvf_peer_forget(other);
    }
}

/* One that it made: a second one is not from it. (It and we may dial each other at the same
 * moment.) */
static bool has_inbound(const kvf_peer_t *peer) {
    const kvf_link_t *link = peer->links;
    while (link != NULL && !link->inbound) {
        link = link->next;
    }
    return link != NULL;
}

kvf_status_t kvf_peer_accept(kvf_core_t *core, const Kvf__Wire__Hello *hello, kvf_peer_t **peer_p,
                             kvf_detail_t *detail) {
    kvf_incarnation_t incarnation;
    kvf_peer_t *peer = *peer_p;
    memcpy(incarnation.bytes, hello->incarnation.data, sizeof(incarnation.bytes));
    if (kvf_incarnation_equal(&incarnation, &core->incarnation)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED, "this node has connected to itself");
    }
    if (!on_allow_list(core, hello->instance, hello->control_address)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED,
                        "%s is not on the allow-list of %s; add it to peers", hello->instance,
                        core->agent.instance);
    }
    kvf_status_t status = check_compatible(core, hello, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (peer != NULL && !kvf_incarnation_equal(&incarnation, &peer->incarnation) &&
        !KVF_MUTANT(accept_old_incarnation)) {
        return kvf_fail(detail, KVF_ERR_PEER_LOST,
                        "the node at %s restarted since the ticket was made; prefill again",
                        peer->address);
    }
    if (peer == NULL && (peer = peer_find(core, &incarnation)) != NULL && has_inbound(peer)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED, "this incarnation of %s is connected already",
                        peer->instance);
    }
    if (peer == NULL) {
        status = peer_create(core, &incarnation, hello->instance, hello->control_address, &peer);
    }
    if (status == KVF_OK) {
        status = peer_fill(peer, hello);
    }
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for a peer");
    }
    end_predecessors(core, peer);
    *peer_p = peer;
    return KVF_OK;
}

kvf_status_t kvf_peer_status(kvf_status_t theirs) {
    kvf_scope_t scope = kvf_status_scope(theirs);
    return scope == KVF_SCOPE_RETRY || scope == KVF_SCOPE_AGENT ? KVF_ERR_PEER_REFUSED : theirs;
}

void kvf_peer_up(kvf_peer_t *peer) {
    kvf_core_t *core = peer->core;
    bool news = !kvf_peer_is_up(peer);
    peer->heard_us = core->now_us;
    if (!news) {
        return;
    }
    peer->state = KVF_PEER_UP;
    peer->forgotten = false;
    peer->reason[0] = '\0';
    kvf_timer_set(&core->timers, &peer->timer, core->now_us + core->agent.heartbeat_us);
    kvf_log(core->log, KVF_LOG_INFO, "%s at %s is up, mover %s", peer->instance, peer->address,
            core->config.mover_name);
    for (kvf_op_t *op = peer->ops, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_RECV) {
            kvf_recv_on_peer_up(op);
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

kvf_status_t kvf_peer_reach(kvf_core_t *core, const kvf_ticket_t *ticket, kvf_peer_t **peer_p,
                            kvf_detail_t *detail) {
    kvf_peer_t *peer = peer_find(core, &ticket->issuer);
    kvf_link_t *link;
    uint64_t conn;
    kvf_status_t status;
    if (!on_allow_list(core, ticket->instance, ticket->address)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED,
                        "the ticket's node %s (%s) is not on the allow-list; add it to peers",
                        ticket->instance, ticket->address);
    }
    if (kvf_incarnation_equal(&ticket->issuer, &core->incarnation)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the ticket was made by this very agent");
    }
    if (peer == NULL) {
        status = peer_create(core, &ticket->issuer, ticket->instance, ticket->address, &peer);
        if (status != KVF_OK) {
            return kvf_fail(detail, status, "no memory for a peer");
        }
    }
    if (peer->links != NULL) { /* up, or being dialled: concurrent connects to one peer are one */
        *peer_p = peer;
        return KVF_OK;
    }
    status = core->out.dial(core->out.ctx, ticket->address, &conn, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_link_create(core, conn, false, ticket->address, &link);
    if (status != KVF_OK) {
        core->out.close(core->out.ctx, conn);
        return kvf_fail(detail, status, "no memory for a connection");
    }
    link->peer = peer;
    peer->links = link;
    peer->state = KVF_PEER_CONNECTING;
    peer->failing = KVF_OK;
    peer->forgotten = false;
    (void)snprintf(peer->address, sizeof(peer->address), "%.79s", ticket->address);
    *peer_p = peer;
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

void kvf_peer_tell(kvf_peer_t *peer, kvf_frame_type_t type, const ProtobufCMessage *message) {
    kvf_core_t *core = peer->core;
    kvf_link_t *link = peer->links;
    uint8_t *frame;
    size_t bytes;
    while (link != NULL && link->state != KVF_LINK_UP) {
        link = link->next;
    }
    if (link == NULL || peer->failing != KVF_OK) {
        return;
    }
    kvf_status_t status =
        kvf_message_pack(core->alloc, type, message, peer->frame_bytes, &frame, &bytes);
    if (status != KVF_OK) {
        /* A message that cannot be said leaves the other side waiting: end the connection, which it
         * does notice. Not from here, where an operation is in the middle of something. */
        peer->failing = KVF_ERR_PEER_LOST;
        (void)snprintf(peer->reason, sizeof(peer->reason), "a %s message could not be made: %s",
                       kvf_frame_type_name(type), kvf_status_text(status));
        kvf_timer_set(&core->timers, &peer->timer, core->now_us);
        return;
    }
    kvf_log(core->log, KVF_LOG_TRACE, "%s to %s, %zu bytes", kvf_frame_type_name(type),
            peer->instance, bytes);
    core->out.write(core->out.ctx, link->conn, frame, bytes);
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

kvf_status_t kvf_peer_connect_mover(kvf_peer_t *peer, kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    if (peer->mover_connected) {
        return KVF_OK;
    }
    kvf_status_t status = core->out.mover_connect(core->out.ctx, peer->number, peer->mover_address,
                                                  peer->mover_address_bytes, detail);
    peer->mover_connected = status == KVF_OK;
    return status;
}

void kvf_peer_fail(kvf_peer_t *peer, kvf_peer_state_t state, kvf_status_t status, const char *why) {
    kvf_core_t *core = peer->core;
    bool news = peer->state != state || peer->ops != NULL;
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
    if (peer->mover_connected) {
        peer->mover_connected = false;
        core->out.mover_disconnect(core->out.ctx, peer->number);
    }
    for (kvf_op_t *op = peer->ops, *next; op != NULL; op = next) {
        next = op->peer_next;
        if (op->kind == KVF_OP_SEND) {
            kvf_send_on_peer(op, status, peer->reason);
        } else {
            kvf_recv_on_peer(op, status, peer->reason);
        }
    }
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
    }
}

void kvf_peers_all_bye(kvf_core_t *core) {
    Kvf__Wire__Bye bye;
    kvf__wire__bye__init(&bye);
    bye.message = (char *)(uintptr_t) "shutting down";
    for (kvf_peer_t *peer = core->peers; peer != NULL; peer = peer->hh.next) {
        kvf_peer_tell(peer, KVF_FRAME_BYE, &bye.base);
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
            (void)snprintf(info->mover, sizeof(info->mover), "%s", core->config.mover_name);
            kvf_incarnation_text(&peer->incarnation, info->incarnation);
        }
    }
    return n;
}
