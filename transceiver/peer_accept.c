/* SPDX-License-Identifier: Apache-2.0 */
/* Hellos: what we say about ourselves, whom we accept, and how a connection goes on where another
 * one of the same two agents broke. */
#include "kvmgr/base/mutant.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

bool kvf_peer_allowed(const kvf_core_t *core, const char *instance, const char *address) {
    for (size_t i = 0; i < core->agent.n_peers; i++) {
        if (strcmp(core->agent.peers[i], instance) == 0 ||
            strcmp(core->agent.peers[i], address) == 0) {
            return true;
        }
    }
    return core->agent.n_peers == 0;
}

kvf_status_t kvf_peer_pack_hello(kvf_peer_t *peer, const kvf_hello_binding_t *bound,
                                 uint8_t **frame_p, size_t *bytes_p) {
    kvf_core_t *core = peer->core;
    Kvf__Wire__Hello hello;
    kvf__wire__hello__init(&hello);
    Kvf__Wire__LayerGroup groups[KVF_MAX_GROUPS], *group_list[KVF_MAX_GROUPS];
    Kvf__Wire__Region regions[KVF_MAX_GROUPS], *region_list[KVF_MAX_GROUPS];
    Kvf__Wire__Mover movers[KVF_CORE_MOVERS + 1], *mover_list[KVF_CORE_MOVERS + 1];
    const uint32_t n_movers = core->config.n_movers;
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
    for (uint32_t i = 0; i <= n_movers; i++) {
        mover_list[i] = &movers[i];
        kvf__wire__mover__init(&movers[i]);
    }
    for (uint32_t i = 0; i < n_movers; i++) {
        movers[i].name = (char *)(uintptr_t)core->config.mover_names[i];
        movers[i].address =
            (ProtobufCBinaryData){core->mover_addresses[i].bytes, core->mover_addresses[i].data};
    }
    movers[n_movers].name = (char *)(uintptr_t)core->config.mapped_name;
    movers[n_movers].address =
        (ProtobufCBinaryData){core->mapped_address_bytes, core->mapped_address};
    hello.instance = (char *)(uintptr_t)core->agent.instance;
    hello.incarnation = (ProtobufCBinaryData){KVF_INCARNATION_BYTES, core->incarnation.bytes};
    hello.control_address = core->control_address;
    hello.layout_digest = core->layout_digest;
    hello.n_groups = layout->n_groups;
    hello.groups = group_list;
    hello.n_regions = layout->n_groups;
    hello.regions = region_list;
    hello.n_movers = core->mapped_address == NULL ? n_movers : n_movers + 1;
    hello.movers = mover_list;
    hello.heartbeat_us = core->agent.heartbeat_us;
    hello.lost_us = core->agent.lost_us;
    hello.frame_bytes = core->agent.frame_bytes;
    hello.tp_size = hello.pp_size = hello.cp_size = 1;
    hello.version = (char *)(uintptr_t)kvf_version();
    hello.wanted = (ProtobufCBinaryData){KVF_INCARNATION_BYTES, peer->incarnation.bytes};
    hello.session = peer->session.id;
    hello.session_over = peer->session.over;
    hello.received = peer->session.n_received;
    return kvf_hello_pack(core->alloc, core->agent.cluster_key, bound, &hello, frame_p, bytes_p);
}

/* The mover that both have and that stands highest in both lists together; if two stand equally,
 * the first by name. So both ends come to the same. @return false: there is none. */
static bool agree_on_mover(const kvf_core_t *core, const Kvf__Wire__Hello *hello, uint32_t *idx_p) {
    size_t best = SIZE_MAX;
    for (uint32_t i = 0; i < core->config.n_movers; i++) {
        const char *name = core->config.mover_names[i];
        size_t theirs = 0;
        while (theirs < hello->n_movers && strcmp(hello->movers[theirs]->name, name) != 0) {
            theirs++;
        }
        if (theirs < hello->n_movers &&
            (theirs + i < best ||
             (theirs + i == best && strcmp(name, core->config.mover_names[*idx_p]) < 0))) {
            best = theirs + i;
            *idx_p = i;
        }
    }
    return best != SIZE_MAX;
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
    uint32_t mover_idx;
    if (!agree_on_mover(core, hello, &mover_idx)) {
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                        "no common mover: one side has %s, the other %s; give both the same "
                        "mover.kind, or auto",
                        core->config.mover_names[0],
                        hello->n_movers == 0 ? "none" : hello->movers[0]->name);
    }
    return KVF_OK;
}

/* Keep the address of one of its movers, the first time. */
static kvf_status_t keep_address(const kvf_core_t *core, const Kvf__Wire__Hello *hello,
                                 const char *name, uint8_t **address, size_t *bytes) {
    for (size_t i = 0; i < hello->n_movers && *address == NULL; i++) {
        const ProtobufCBinaryData *data = &hello->movers[i]->address;
        if (strcmp(hello->movers[i]->name, name) == 0) {
            *address = kvf_alloc(core->alloc, data->len + 1);
            if (*address == NULL) {
                return KVF_ERR_NO_MEMORY;
            }
            memcpy(*address, data->len == 0 ? (const uint8_t *)"" : data->data, data->len);
            *bytes = data->len;
        }
    }
    return KVF_OK;
}

static kvf_status_t peer_fill(kvf_peer_t *peer, const Kvf__Wire__Hello *hello) {
    kvf_core_t *core = peer->core;
    if (peer->mover_address == NULL) { /* its paths are by that one from now on */
        (void)agree_on_mover(core, hello, &peer->mover_idx);
    }
    if (keep_address(core, hello, kvf_peer_mover_name(peer), &peer->mover_address,
                     &peer->mover_address_bytes) != KVF_OK ||
        keep_address(core, hello, core->config.mapped_name, &peer->mapped_address,
                     &peer->mapped_address_bytes) != KVF_OK) {
        return KVF_ERR_NO_MEMORY;
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

/* The connection that we dial and that has got as far as our hello. */
static bool has_said_hello(const kvf_peer_t *peer) {
    const kvf_link_t *link = peer->links;
    while (link != NULL && (link->inbound || link->state != KVF_LINK_HELLO)) {
        link = link->next;
    }
    return link != NULL;
}

/* Is it the peer's to take the place of the connection that is there? */
static kvf_status_t check_inbound(const kvf_peer_t *peer, const Kvf__Wire__Hello *hello,
                                  kvf_detail_t *detail) {
    const kvf_core_t *core = peer->core;
    /* Who is heard over another connection does not make one; but it may have given that one up.
     * The session's number shows that it is the same. */
    if (peer->link != NULL && hello->session != peer->session.id &&
        core->now_us - peer->heard_us < core->agent.suspect_us) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED, "this incarnation of %s is connected already",
                        peer->instance);
    }
    /* A hello of an attempt that the peer has given up, read late: it knows less than we do. */
    if (hello->session == peer->session.id && !peer->session.over && !hello->session_over &&
        hello->received < peer->session.n_acknowledged) {
        return kvf_fail(detail, KVF_ERR_AGAIN, "a hello of %s that another one has overtaken",
                        peer->instance);
    }
    /* It and we dial each other: one of the two connections goes on, the same for both. */
    if (has_said_hello(peer) && memcmp(core->incarnation.bytes, peer->incarnation.bytes,
                                       sizeof(core->incarnation.bytes)) < 0) {
        return kvf_fail(detail, KVF_ERR_AGAIN, "our own connection to %s comes first",
                        peer->instance);
    }
    return KVF_OK;
}

/* Go on with the session, or begin another one: the responder says which. */
static kvf_status_t join_session(kvf_peer_t *peer, const Kvf__Wire__Hello *hello, bool inbound,
                                 kvf_detail_t *detail) {
    kvf_core_t *core = peer->core;
    uint64_t id = hello->session;
    if (id != 0 && id == peer->session.id && !peer->session.over && !hello->session_over) {
        return kvf_session_acknowledged(peer, hello->received, detail);
    }
    if (inbound) {
        core->config.rand.fill(core->config.rand.ctx, &id, sizeof(id));
        id |= 1; /* 0 says that there is none */
    }
    kvf_peer_restart(peer);
    peer->session = (kvf_session_t){.id = id};
    return KVF_OK;
}

kvf_status_t kvf_peer_accept(kvf_link_t *link, const Kvf__Wire__Hello *hello,
                             kvf_detail_t *detail) {
    kvf_core_t *core = link->core;
    kvf_incarnation_t incarnation;
    kvf_peer_t *peer = link->peer;
    memcpy(incarnation.bytes, hello->incarnation.data, sizeof(incarnation.bytes));
    if (kvf_incarnation_equal(&incarnation, &core->incarnation)) {
        return kvf_fail(detail, KVF_ERR_NOT_ALLOWED, "this node has connected to itself");
    }
    if (!kvf_peer_allowed(core, hello->instance, hello->control_address)) {
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
        return kvf_fail(detail, KVF_ERR_PEER_LOST, "the node at %s restarted; prefill again",
                        peer->address);
    }
    if (memcmp(hello->wanted.data, core->incarnation.bytes, KVF_INCARNATION_BYTES) != 0 &&
        !KVF_MUTANT(accept_old_incarnation)) {
        return kvf_fail(detail, KVF_ERR_PEER_LOST, "%s restarted; prefill again",
                        core->agent.instance);
    }
    if (link->inbound) {
        peer = kvf_peer_find(core, &incarnation);
        status = peer == NULL ? kvf_peer_create(core, &incarnation, hello->instance,
                                                hello->control_address, &peer)
                              : check_inbound(peer, hello, detail);
        if (status == KVF_ERR_NO_MEMORY) {
            return kvf_fail(detail, status, "no memory for a peer");
        }
        if (status != KVF_OK) {
            return status;
        }
        kvf_link_attach(link, peer);
    }
    if (peer_fill(peer, hello) != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a peer");
    }
    /* From here on nothing is read from the peer's other connections: what it is told to have come
     * is all that will ever have come over them. */
    for (kvf_link_t *other = peer->links, *next; other != NULL; other = next) {
        next = other->next;
        if (other != link && !KVF_MUTANT(keep_old_input)) {
            kvf_link_close(other);
        }
    }
    peer->heard_us = core->now_us;
    end_predecessors(core, peer);
    return join_session(peer, hello, link->inbound, detail);
}
