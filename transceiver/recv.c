/* SPDX-License-Identifier: Apache-2.0 */
/* The generation side of a transfer. */
#include "kernels/digest.h"
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "transceiver/recv_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* Grants in one message, 20 bytes each. A long request leaves in parts, so that the other side
 * reads the first while the next is being made. */
#define GRANTS_PER_PART 4096

/* ---- opening ---- */

/* Which pages are wanted, and are they there? */
static kvf_status_t take_tables(kvf_recv_op_t *recv, const kvf_recv_desc_t *desc,
                                const kvf_wanted_t *wanted, kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    kvf_pair_t *pairs = NULL;
    int64_t *lack = NULL;
    kvf_status_t status = KVF_ERR_NO_MEMORY;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        recv_group_t *group = &recv->groups[g];
        const kvf_layer_group_t *shape = &core->layout.groups[g];
        size_t cap = (size_t)wanted[g].prompt_blocks;
        pairs = kvf_realloc(core->alloc, NULL, cap, sizeof(*pairs));
        lack = kvf_realloc(core->alloc, NULL, cap, sizeof(*lack));
        if (pairs == NULL || lack == NULL) {
            goto out;
        }
        kvf_pairing_t found =
            kvf_pair_tables(&desc->tables[g], &desc->tables[g], &wanted[g], pairs, NULL, lack);
        uint64_t layer_bytes = kvf_group_layer_bytes(shape);
        group->n = (size_t)found.n_pairs;
        group->granule_bytes = layer_bytes & (~layer_bytes + 1);
        group->granule_bytes = group->granule_bytes > KVF_DIGEST_LEAF_BYTES ? KVF_DIGEST_LEAF_BYTES
                                                                            : group->granule_bytes;
        group->words = (size_t)((kvf_group_block_bytes(shape) / group->granule_bytes + 63) / 64);
        if (group->n > 0) {
            group->entries = kvf_calloc(core->alloc, group->n, sizeof(*group->entries));
            group->landed = kvf_calloc(core->alloc, group->n, group->words * sizeof(uint64_t));
            group->claimed = kvf_calloc(core->alloc, group->n, group->words * sizeof(uint64_t));
            if (group->entries == NULL || group->landed == NULL || group->claimed == NULL) {
                goto out;
            }
        }
        for (size_t i = 0; i < group->n; i++) {
            group->entries[i] =
                (recv_entry_t){.ordinal = pairs[i].ordinal, .slot = pairs[i].destination};
        }
        recv->wanted_bytes += group->n * kvf_group_block_bytes(shape);
        recv->wanted_pages += group->n;
        if (found.n_missing_destination > 0) {
            size_t n = recv->n_missing + (size_t)found.n_missing_destination;
            kvf_page_ref_t *missing = kvf_realloc(core->alloc, recv->missing, n, sizeof(*missing));
            if (missing == NULL) {
                goto out;
            }
            recv->missing = missing;
            for (int64_t i = 0; i < found.n_missing_destination; i++) {
                missing[recv->n_missing++] = (kvf_page_ref_t){g, lack[i], -1};
            }
        }
        kvf_free(core->alloc, pairs);
        kvf_free(core->alloc, lack);
        pairs = NULL;
        lack = NULL;
    }
    status = KVF_OK;
out:
    kvf_free(core->alloc, pairs);
    kvf_free(core->alloc, lack);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory for the tables");
    }
    if (recv->n_missing > 0 && desc->holes == KVF_HOLES_STRICT) {
        char text[KVF_DETAIL_BYTES];
        kvf_missing_text(text, sizeof(text), &core->layout, "destination", recv->missing,
                         recv->n_missing);
        return kvf_fail(detail, KVF_ERR_UNCOVERED, "%s", text);
    }
    return KVF_OK;
}

/* Grant every wanted page to the peer, or none. */
static kvf_status_t grant_pages(kvf_recv_op_t *recv, kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        kvf_pages_t *pages = core->config.regions[g].pages;
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            recv_entry_t *entry = &recv->groups[g].entries[i];
            kvf_recv_prefetch(recv, g, i);
            kvf_status_t status = kvf_pages_write_begin(pages, entry->slot);
            if (status == KVF_OK) {
                entry->generation = kvf_pages_generation(pages, entry->slot);
                continue;
            }
            for (uint32_t h = 0; h <= g; h++) {
                for (size_t k = 0; k < (h < g ? recv->groups[h].n : i); k++) {
                    kvf_pages_write_end(core->config.regions[h].pages,
                                        recv->groups[h].entries[k].slot);
                }
            }
            return kvf_fail(detail, status, "group %s, ordinal %" PRId64 ": slot %" PRId32 ": %s",
                            core->layout.groups[g].name, entry->ordinal, entry->slot,
                            status == KVF_ERR_RANGE ? "outside the pool"
                            : status == KVF_ERR_INVALID
                                ? "not held; acquire it first"
                                : "shared or in use; copy a shared page before it is granted");
        }
    }
    recv->granted = true;
    return KVF_OK;
}

kvf_status_t kvf_recv_read_ticket(kvf_recv_op_t *recv, const char *text, kvf_ticket_t *ticket,
                                  kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    kvf_status_t status = text == NULL
                              ? KVF_ERR_FORGED
                              : kvf_ticket_from_text(text, recv->ticket, &recv->ticket_bytes);
    if (status == KVF_OK) {
        status =
            kvf_ticket_decode(recv->ticket, recv->ticket_bytes, core->agent.cluster_key, ticket);
    }
    if (status != KVF_OK) {
        return kvf_fail(
            detail, status,
            "the ticket was not made under this cluster key, or was damaged; compare the "
            "key files of both nodes");
    }
    if (strcmp(ticket->request_id, recv->op.request_id) != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the ticket belongs to request %s, not %s",
                        ticket->request_id, recv->op.request_id);
    }
    memcpy(recv->node, ticket->instance, sizeof(recv->node));
    return KVF_OK;
}

kvf_status_t kvf_recv_reach(kvf_recv_op_t *recv, const kvf_ticket_t *ticket, kvf_detail_t *detail) {
    kvf_peer_t *peer;
    kvf_status_t status = kvf_peer_reach(recv->op.core, ticket, &peer, detail);
    if (status == KVF_OK && kvf_session_full(peer)) {
        status =
            kvf_fail(detail, KVF_ERR_AGAIN,
                     "%s does not keep up with what it is told; retry in a moment", peer->instance);
    }
    if (status == KVF_OK) {
        kvf_peer_attach(peer, &recv->op);
    }
    return status;
}

kvf_status_t kvf_core_recv_open(kvf_core_t *core, const kvf_recv_desc_t *desc, kvf_event_cb cb,
                                void *ctx, uint64_t *id_p, kvf_detail_t *detail) {
    kvf_ticket_t ticket;
    kvf_wanted_t wanted[KVF_MAX_GROUPS];
    kvf_recv_op_t *recv = kvf_calloc(core->alloc, 1, sizeof(*recv));
    if (recv == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a receive");
    }
    kvf_status_t status = kvf_op_init(core, &recv->op, KVF_OP_RECV, desc->request_id, cb, ctx,
                                      kvf_recv_on_timer, detail);
    if (status != KVF_OK) {
        kvf_free(core->alloc, recv);
        return status;
    }
    if (desc->direction != KVF_PUSH && desc->direction != KVF_PULL) {
        status = kvf_fail(detail, KVF_ERR_INVALID, "direction is neither push nor pull");
        goto err_op;
    }
    status = kvf_recv_read_ticket(recv, desc->ticket, &ticket, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    if (ticket.prompt_tokens != kvf_prompt_tokens(&desc->lengths)) {
        status = kvf_fail(detail, KVF_ERR_INVALID,
                          "the ticket is for a prompt of %" PRId64 " tokens, not %" PRId64,
                          ticket.prompt_tokens, kvf_prompt_tokens(&desc->lengths));
        goto err_op;
    }
    status =
        kvf_core_check_request(core, desc->request_id, &desc->lengths, true, desc->allocated_tokens,
                               desc->cached_tokens, desc->tables, desc->n_tables, wanted, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    recv->lengths = desc->lengths;
    recv->cached_tokens = desc->cached_tokens;
    recv->holes = desc->holes;
    recv->handoff = desc->handoff;
    recv->pull = desc->direction == KVF_PULL;
    core->config.rand.fill(core->config.rand.ctx, &recv->grant_key, sizeof(recv->grant_key));
    status = take_tables(recv, desc, wanted, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    status = grant_pages(recv, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    status = kvf_recv_reach(recv, &ticket, detail);
    if (status != KVF_OK) {
        goto err_grant;
    }
    recv->deadline_us = kvf_time_after(
        core->now_us, desc->timeout_us != 0 ? desc->timeout_us : core->agent.request_timeout_us);
    kvf_timer_set(&core->timers, &recv->op.timer,
                  KVF_MUTANT(no_deadline) ? KVF_NEVER : recv->deadline_us);
    *id_p = recv->op.id;
    if (kvf_peer_is_up(recv->op.peer)) {
        kvf_recv_on_peer_up(&recv->op);
    }
    return KVF_OK;

err_grant:
    kvf_recv_for_pages(recv, kvf_pages_write_end);
err_op:
    kvf_op_cleanup(&recv->op);
    kvf_recv_destroy(&recv->op);
    return status;
}

/* ---- the request ---- */

/* One message's share of the grants: whole arrays of up to GRANTS_PER_PART entries in all. */
typedef struct grant_part {
    Kvf__Wire__Grant grants[KVF_MAX_GROUPS], *list[KVF_MAX_GROUPS];
    size_t n_grants;
    size_t n;
    uint64_t ordinals[GRANTS_PER_PART];
    uint64_t generations[GRANTS_PER_PART];
    uint32_t slots[GRANTS_PER_PART];
} grant_part_t;

static void tell_request(kvf_recv_op_t *recv, Kvf__Wire__Grant **grants, size_t n_grants,
                         bool more) {
    kvf_core_t *core = recv->op.core;
    Kvf__Wire__RecvRequest request;
    kvf__wire__recv_request__init(&request);
    Kvf__Wire__TransferId id;
    kvf_transfer_id_t transfer = kvf_recv_transfer(recv);
    kvf_transfer_id_write(&transfer, &id);
    request.transfer = &id;
    request.ticket = (ProtobufCBinaryData){recv->ticket_bytes, recv->ticket};
    request.request_id = recv->op.request_id;
    request.prompt_len = recv->lengths.prompt_len;
    request.total_input_len_cp = recv->lengths.total_input_len_cp;
    request.draft_len = recv->lengths.draft_len;
    request.cached_tokens = recv->cached_tokens;
    request.timeout_us = recv->deadline_us == KVF_NEVER     ? KVF_NEVER
                         : recv->deadline_us > core->now_us ? recv->deadline_us - core->now_us
                                                            : 0;
    request.grant_key = recv->grant_key;
    request.skip_holes = recv->holes == KVF_HOLES_SKIP;
    request.mover = (char *)(uintptr_t)(recv->op.mapped ? core->config.mapped_name
                                                        : kvf_peer_mover_name(recv->op.peer));
    request.n_grants = n_grants;
    request.grants = grants;
    request.more = more;
    request.pull = recv->pull;
    request.no_digests = !core->agent.digests;
    kvf_peer_tell(recv->op.peer, KVF_FRAME_RECV_REQUEST, &request.base);
}

/* It ended before its request was sent. Its ticket is claimed and given up at once, so that the
 * context side need not hold the pages until the lease ends. */
static void say_farewell(kvf_recv_op_t *recv) {
    kvf_transfer_id_t id = kvf_recv_transfer(recv);
    tell_request(recv, NULL, 0, true);
    kvf_peer_tell_abort(recv->op.peer, &id, recv->op.status, recv->op.detail.text);
}

static void drop_farewell(kvf_recv_op_t *recv) {
    if (recv->farewell) {
        recv->farewell = false;
        recv->op.core->n_farewells--;
        kvf_op_reap(&recv->op);
    }
}

static void add_grant(kvf_recv_op_t *recv, grant_part_t *part, uint32_t group_idx,
                      const recv_entry_t *entry) {
    Kvf__Wire__Grant *grant = part->n_grants == 0 ? NULL : &part->grants[part->n_grants - 1];
    if (part->n == GRANTS_PER_PART) {
        tell_request(recv, part->list, part->n_grants, true);
        part->n_grants = part->n = 0;
        grant = NULL;
    }
    if (grant == NULL || grant->group_idx != group_idx) {
        grant = &part->grants[part->n_grants];
        part->list[part->n_grants++] = grant;
        kvf__wire__grant__init(grant);
        grant->group_idx = group_idx;
        grant->ordinals = &part->ordinals[part->n];
        grant->generations = &part->generations[part->n];
        grant->slots = &part->slots[part->n];
    }
    part->ordinals[part->n] = (uint64_t)entry->ordinal;
    part->generations[part->n] = entry->generation;
    part->slots[part->n++] = (uint32_t)entry->slot;
    grant->n_ordinals = ++grant->n_slots;
    grant->n_generations = grant->n_slots;
}

/* @return Whether it is settled what moves the bytes. */
static bool choose_mover(kvf_recv_op_t *recv) {
    kvf_peer_t *peer = recv->op.peer;
    if (recv->wanted_pages > 0) {
        kvf_peer_map(peer);
    }
    if (peer->map == KVF_MAP_PENDING && recv->wanted_pages > 0) {
        return false; /* kvf_core_mapped() goes on */
    }
    recv->op.mapped = peer->map == KVF_MAP_READY && recv->wanted_pages > 0;
    if (!recv->op.mapped && recv->wanted_pages > 0 &&
        strcmp(recv->op.core->agent.mover, recv->op.core->config.mapped_name) == 0) {
        if (peer->map == KVF_MAP_FAILED && peer->map_again_us != KVF_NEVER) {
            kvf_recv_end(recv, KVF_ERR_PEER_LOST,
                         "the context node did not let its pools be mapped: it answered too late, "
                         "has just ended, or runs as another user; and mover is not auto",
                         true);
        } else {
            kvf_recv_end(recv, KVF_ERR_INCOMPATIBLE,
                         "the context node's pools cannot be mapped, and mover is not auto; are "
                         "both on this machine, with pools of shared memory (mapped), or of "
                         "devices that reach each other (cuda)? or have both mover nccl, and a "
                         "device each, or both mover rdma, and cards that reach each other?",
                         true);
        }
        return false;
    }
    return true;
}

/* Bytes that our own handler copies into pages are hashed on the way, where a granule is a leaf of
 * a digest. Without memory for the hashes the pages are read once more. */
static void want_leaves(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    if (!core->config.hashes_leaves || !core->config.movers_checked || !core->agent.digests ||
        recv->op.mapped) {
        return;
    }
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        recv_group_t *group = &recv->groups[g];
        if (group->granule_bytes == KVF_DIGEST_LEAF_BYTES && group->n > 0) {
            group->granules =
                kvf_group_block_bytes(&core->layout.groups[g]) / KVF_DIGEST_LEAF_BYTES;
            group->leaves =
                kvf_realloc(core->alloc, NULL, group->n, group->granules * sizeof(*group->leaves));
        }
    }
}

/* Where the CPU does not reach the pages, what comes through the mover waits for its copy in blocks
 * of its own. @return false: no memory. */
static bool want_landing(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    bool lands = core->config.movers_checked && !recv->op.mapped;
    for (uint32_t g = 0; g < core->layout.n_groups && lands; g++) {
        recv_group_t *group = &recv->groups[g];
        if (core->config.regions[g].memory == KVF_MEM_CUDA && group->n > 0) {
            group->landing = kvf_realloc(core->alloc, NULL, group->n,
                                         kvf_group_block_bytes(&core->layout.groups[g]));
            if (group->landing == NULL) {
                return false;
            }
        }
    }
    return true;
}

void kvf_recv_on_peer_up(kvf_op_t *op) {
    kvf_recv_op_t *recv = kvf_recv_of(op);
    kvf_core_t *core = op->core;
    if (recv->farewell) {
        say_farewell(recv);
        drop_farewell(recv);
        return;
    }
    if (recv->requested && (recv->granted || op->doubted)) {
        /* Ended, with the conversation in which it was asked for, or in one before: whether its
         * pages are out of reach is asked again. */
        kvf_transfer_id_t id = kvf_recv_transfer(recv);
        kvf_peer_tell_abort(op->peer, &id, op->status, op->detail.text);
    }
    if (op->ended || recv->requested) {
        return;
    }
    if (!choose_mover(recv)) {
        if (recv->farewell) {
            say_farewell(recv);
            drop_farewell(recv);
        }
        return;
    }
    grant_part_t *part = kvf_alloc(core->alloc, sizeof(*part));
    if (part == NULL || !want_landing(recv)) {
        kvf_free(core->alloc, part);
        kvf_recv_end(recv, KVF_ERR_NO_MEMORY, "no memory for the request", false);
        return;
    }
    want_leaves(recv);
    part->n_grants = part->n = 0;
    recv->requested = true;
    core->n_landing++;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            add_grant(recv, part, g, &recv->groups[g].entries[i]);
        }
    }
    tell_request(recv, part->list, part->n_grants, false);
    KVF_FAIL_POINT(granted);
    kvf_free(core->alloc, part);
}

bool kvf_recv_is_told(const kvf_op_t *op) {
    return ((const kvf_recv_op_t *)op)->requested;
}

bool kvf_recv_is_wanted(const kvf_op_t *op) {
    return kvf_recv_is_told(op) && !op->ended;
}

/* ---- other messages and calls ---- */

kvf_recv_op_t *kvf_recv_find(kvf_core_t *core, const kvf_transfer_id_t *transfer) {
    if (!kvf_incarnation_equal(&transfer->receiver, &core->incarnation)) {
        return NULL;
    }
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &transfer->counter, sizeof(transfer->counter), op);
    return op != NULL && op->kind == KVF_OP_RECV ? kvf_recv_of(op) : NULL;
}

bool kvf_recv_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message) {
    kvf_recv_op_t *recv = kvf_recv_find(peer->core, transfer);
    char text[KVF_DETAIL_BYTES];
    if (recv == NULL || (recv->op.ended && recv->n_jobs == 0 && recv->op.peer == peer)) {
        kvf_peer_tell_drained(peer, transfer); /* said before, perhaps to nobody */
    }
    if (recv == NULL || recv->op.peer != peer) {
        return false;
    }
    (void)snprintf(text, sizeof(text), "context node %.80s: %.400s", peer->instance, message);
    status = kvf_peer_status(status);
    kvf_recv_end(recv, status, text, false);
    return true;
}

void kvf_recv_on_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_recv_op_t *recv = kvf_recv_find(peer->core, transfer);
    if (recv == NULL || recv->op.peer != peer) {
        return; /* checked movers do not wait for it */
    }
    recv->drained = !KVF_MUTANT(ignore_drained);
    kvf_recv_settle(recv);
    kvf_op_reap(&recv->op);
}

void kvf_recv_on_peer(kvf_op_t *op, kvf_status_t status, const char *why) {
    kvf_recv_of(op)->drained |= KVF_MUTANT(settle_without_proof);
    kvf_recv_end(kvf_recv_of(op), status, why, false);
    drop_farewell(kvf_recv_of(op));
}

bool kvf_recv_progress_event(kvf_op_t *op, kvf_event_t *event) {
    kvf_recv_op_t *recv = kvf_recv_of(op);
    const kvf_core_layer_t *layers = op->core->layers;
    if (recv->reported_layer == recv->progress_layer) {
        return false;
    }
    event->layer_first = layers[recv->reported_layer].layer;
    event->layer_end = layers[recv->progress_layer - 1].layer + 1;
    recv->reported_layer = recv->progress_layer;
    return true;
}

void kvf_recv_event(kvf_op_t *op, kvf_event_t *event, kvf_aux_t *aux) {
    kvf_recv_op_t *recv = kvf_recv_of(op);
    event->missing = recv->missing;
    event->n_missing = recv->n_missing;
    if (op->status == KVF_OK) {
        const Kvf__Wire__Final *final = recv->final;
        *aux = (kvf_aux_t){final->first_tokens,   final->n_first_tokens, final->draft_tokens,
                           final->n_draft_tokens, final->data.data,      final->data.len};
        event->aux = aux;
    }
}
