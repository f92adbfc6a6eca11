/* SPDX-License-Identifier: Apache-2.0 */
/* The generation side of a transfer. */
#include "kvmgr/base/size.h"
#include "transceiver/core_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* One verify job covers about this much, so that the driver can take turns. */
#define VERIFY_BYTES (UINT64_C(4) << 20)
/* Grants in one message, so that its frame stays below KVF_PART_BYTES. */
#define GRANTS_PER_PART 32768

/* A granted page. */
typedef struct recv_entry {
    int64_t ordinal;
    uint64_t generation;
    int32_t slot;
} recv_entry_t;

/* The granted pages of one layer group. What came is tracked in granules: the largest power of two
 * that divides a layer's bytes, at most 4 KiB, one bit each. */
typedef struct recv_group {
    recv_entry_t *entries; /* ascending ordinals */
    size_t n;
    uint64_t granule_bytes;
    size_t words;                        /* of 64 granules, per entry */
    uint64_t *landed;                    /* bytes are in the page */
    uint64_t *claimed;                   /* a commit named them */
    size_t sealed[KVF_MAX_GROUP_LAYERS]; /* entries whose layer was verified */
} recv_group_t;

/* A committed range that waits for its bytes, and then for its digest. */
typedef struct recv_commit {
    uint32_t group_idx;
    uint32_t entry_idx;
    uint32_t layer_first_idx;
    uint32_t layer_end_idx;
    uint64_t digest;
} recv_commit_t;

typedef struct kvf_recv_op {
    kvf_op_t op;
    kvf_lengths_t lengths;
    int64_t cached_tokens;
    kvf_holes_t holes;
    uint64_t deadline_us;
    uint8_t ticket[KVF_TICKET_MAX_BYTES];
    size_t ticket_bytes;
    char node[KVF_TICKET_FIELD_BYTES + 1]; /* the ticket's instance */
    recv_group_t groups[KVF_MAX_GROUPS];
    bool granted;   /* write_begin was called for every entry */
    bool requested; /* the peer knows of the grants */
    bool drained;   /* the peer says that its last access has completed */
    bool doubted;   /* ended without proof: the pages are in quarantine */

    recv_commit_t *commits; /* queue: [first, end) */
    size_t commits_first, commits_end, commits_room;
    kvf_verify_t job;
    bool verifying;        /* the driver has the job */
    uint64_t wanted_bytes; /* granted, and not missing at the source */
    uint64_t wanted_pages;
    uint64_t sealed_bytes;

    Kvf__Wire__Commit *final; /* the message with the final part, ours */
    uint64_t final_us;
    kvf_page_ref_t *missing;
    size_t n_missing;
    kvf_page_ref_t *poisoned;
    size_t n_poisoned;
    uint32_t progress_layer; /* how many of the model's layers, in ascending order, are whole */
    uint32_t reported_layer; /* and were reported */
} kvf_recv_op_t;

static kvf_recv_op_t *recv_of(kvf_op_t *op) {
    return (kvf_recv_op_t *)op;
}

static kvf_transfer_id_t transfer_of(const kvf_recv_op_t *recv) {
    return (kvf_transfer_id_t){recv->op.core->incarnation, recv->op.id};
}

/* ---- coverage ---- */

/* Apply granules [first, end) of an entry's bits. @return Whether all (set) or none (clear) were
 * set before. */
static bool bits_all(const uint64_t *bits, uint64_t first, uint64_t end, bool set) {
    for (uint64_t at = first; at < end;) {
        uint64_t n = 64 - at % 64 < end - at ? 64 - at % 64 : end - at;
        uint64_t mask = (n == 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1) << (at % 64);
        if ((bits[at / 64] & mask) != (set ? mask : 0)) {
            return false;
        }
        at += n;
    }
    return true;
}

static void bits_set(uint64_t *bits, uint64_t first, uint64_t end) {
    for (uint64_t at = first; at < end;) {
        uint64_t n = 64 - at % 64 < end - at ? 64 - at % 64 : end - at;
        bits[at / 64] |= (n == 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1) << (at % 64);
        at += n;
    }
}

static recv_entry_t *find_entry(const recv_group_t *group, int64_t ordinal) {
    size_t low = 0, high = group->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (group->entries[mid].ordinal < ordinal) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low < group->n && group->entries[low].ordinal == ordinal ? &group->entries[low] : NULL;
}

/* ---- the end ---- */

bool kvf_recv_quiet(const kvf_op_t *op) {
    const kvf_recv_op_t *recv = (const kvf_recv_op_t *)op;
    return !recv->verifying && !recv->granted && !recv->doubted;
}

void kvf_recv_destroy(kvf_op_t *op) {
    kvf_recv_op_t *recv = recv_of(op);
    const kvf_alloc_t *alloc = op->core->alloc;
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        kvf_free(alloc, recv->groups[g].entries);
        kvf_free(alloc, recv->groups[g].landed);
        kvf_free(alloc, recv->groups[g].claimed);
    }
    kvf_free(alloc, recv->commits);
    kvf_free(alloc, recv->missing);
    kvf_free(alloc, recv->poisoned);
    kvf_message_free(alloc, recv->final == NULL ? NULL : &recv->final->base);
    kvf_free(alloc, recv);
}

typedef void (*page_fn)(kvf_pages_t *pages, int32_t slot);

/* Do something to every granted page. */
static void for_pages(kvf_recv_op_t *recv, page_fn fn) {
    kvf_core_t *core = recv->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            fn(core->config.regions[g].pages, recv->groups[g].entries[i].slot);
        }
    }
}

/* After the result: give the pages back, with proof that nothing writes to them any more, or put
 * them in quarantine. */
static void settle(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    if (recv->verifying || !recv->op.ended) {
        return;
    }
    /* Proofs: the peer was never told of the grants; it had everything acknowledged; it says that
     * it has drained; or our own handler makes the copies, and refuses them from now on because the
     * receive has ended. */
    bool proof = !recv->requested || recv->op.status == KVF_OK || recv->drained ||
                 core->config.mover_checked;
    if (proof && recv->doubted) {
        recv->doubted = false;
        for_pages(recv, kvf_pages_settle);
        kvf_op_release(&recv->op);
    } else if (proof && recv->granted) {
        recv->granted = false;
        for_pages(recv, kvf_pages_write_end);
        kvf_op_release(&recv->op);
    } else if (!proof && recv->granted) {
        recv->granted = false;
        recv->doubted = true;
        for_pages(recv, kvf_pages_doubt_write);
        kvf_timer_set(&core->timers, &recv->op.timer,
                      kvf_time_after(core->now_us, core->agent.quarantine_us));
    }
}

static void recv_end(kvf_recv_op_t *recv, kvf_status_t status, const char *message, bool tell) {
    kvf_core_t *core = recv->op.core;
    recv->op.transfer_us = core->now_us - recv->op.opened_us;
    if (recv->final != NULL) {
        uint64_t since =
            kvf_time_after(recv->final->final->since_prefill_us, core->now_us - recv->final_us);
        recv->op.exposed_us = since < recv->op.transfer_us ? since : recv->op.transfer_us;
    }
    if (!kvf_op_end(&recv->op, status, message)) {
        return;
    }
    kvf_timer_set(&core->timers, &recv->op.timer, KVF_NEVER);
    if (recv->requested) {
        core->n_landing--;
    }
    if (tell && recv->requested && recv->op.peer != NULL) {
        kvf_transfer_id_t id = transfer_of(recv);
        kvf_peer_tell_abort(recv->op.peer, &id, status, message);
    }
    settle(recv);
}

static void on_timer(kvf_timer_t *timer, void *owner) {
    kvf_recv_op_t *recv = owner;
    kvf_core_t *core = recv->op.core;
    char text[KVF_DETAIL_BYTES];
    (void)timer;
    if (!recv->op.ended) {
        (void)snprintf(text, sizeof(text), "not finished within %" PRIu64 " ms; it waited for %s",
                       (core->now_us - recv->op.opened_us) / 1000,
                       !recv->requested      ? "the connection to the context node"
                       : recv->final == NULL ? "the context node to send"
                                             : "bytes that were announced but did not arrive");
        recv_end(recv, KVF_ERR_DEADLINE, text, true);
        return;
    }
    /* No proof within quarantine_ms: say so. The pages stay out of use until one comes. The list
     * was made when the receive was opened, so that this cannot fail. */
    recv->n_poisoned = 0;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            const recv_entry_t *entry = &recv->groups[g].entries[i];
            recv->poisoned[recv->n_poisoned++] = (kvf_page_ref_t){g, entry->ordinal, entry->slot};
        }
    }
    for_pages(recv, kvf_pages_poison);
    kvf_op_release(&recv->op);
}

/* ---- opening ---- */

/* Which pages are wanted, and are they there? */
static kvf_status_t take_tables(kvf_recv_op_t *recv, const kvf_recv_desc_t *desc,
                                const kvf_wanted_t *wanted, kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    kvf_pair_t *pairs = NULL;
    int64_t *lack = NULL;
    size_t n_entries = 0;
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
        group->granule_bytes = group->granule_bytes > 4096 ? 4096 : group->granule_bytes;
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
        n_entries += group->n;
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
    recv->poisoned = kvf_realloc(core->alloc, NULL, n_entries + 1, sizeof(*recv->poisoned));
    status = recv->poisoned == NULL ? KVF_ERR_NO_MEMORY : KVF_OK;
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

static kvf_status_t read_ticket(kvf_recv_op_t *recv, const kvf_recv_desc_t *desc,
                                kvf_ticket_t *ticket, kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    kvf_status_t status = desc->ticket == NULL ? KVF_ERR_FORGED
                                               : kvf_ticket_from_text(desc->ticket, recv->ticket,
                                                                      &recv->ticket_bytes);
    if (status == KVF_OK) {
        status =
            kvf_ticket_decode(recv->ticket, recv->ticket_bytes, core->agent.cluster_key, ticket);
    }
    if (status != KVF_OK) {
        return kvf_fail(detail, status,
                        "the ticket was not made under this cluster key, or was damaged");
    }
    if (strcmp(ticket->request_id, recv->op.request_id) != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the ticket belongs to request %s",
                        ticket->request_id);
    }
    if (ticket->prompt_tokens != kvf_prompt_tokens(&desc->lengths)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "the ticket is for a prompt of %" PRId64 " tokens, not %" PRId64,
                        ticket->prompt_tokens, kvf_prompt_tokens(&desc->lengths));
    }
    memcpy(recv->node, ticket->instance, sizeof(recv->node));
    return KVF_OK;
}

kvf_status_t kvf_core_recv_open(kvf_core_t *core, const kvf_recv_desc_t *desc, kvf_event_cb cb,
                                void *ctx, uint64_t *id_p, kvf_detail_t *detail) {
    kvf_ticket_t ticket;
    kvf_wanted_t wanted[KVF_MAX_GROUPS];
    kvf_peer_t *peer;
    kvf_recv_op_t *recv = kvf_calloc(core->alloc, 1, sizeof(*recv));
    if (recv == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a receive");
    }
    kvf_status_t status =
        kvf_op_init(core, &recv->op, KVF_OP_RECV, desc->request_id, cb, ctx, on_timer, detail);
    if (status != KVF_OK) {
        kvf_free(core->alloc, recv);
        return status;
    }
    if (desc->direction != KVF_PUSH) {
        status = kvf_fail(detail, KVF_ERR_UNSUPPORTED, "direction pull: this version pushes only");
        goto err_op;
    }
    status = read_ticket(recv, desc, &ticket, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    status =
        kvf_core_check_request(core, &desc->lengths, true, desc->allocated_tokens,
                               desc->cached_tokens, desc->tables, desc->n_tables, wanted, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    recv->lengths = desc->lengths;
    recv->cached_tokens = desc->cached_tokens;
    recv->holes = desc->holes;
    status = take_tables(recv, desc, wanted, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    status = grant_pages(recv, detail);
    if (status != KVF_OK) {
        goto err_op;
    }
    status = kvf_peer_reach(core, &ticket, &peer, detail);
    if (status != KVF_OK) {
        goto err_grant;
    }
    kvf_peer_attach(peer, &recv->op);
    recv->deadline_us = kvf_time_after(
        core->now_us, desc->timeout_us != 0 ? desc->timeout_us : core->agent.request_timeout_us);
    kvf_timer_set(&core->timers, &recv->op.timer, recv->deadline_us);
    *id_p = recv->op.id;
    if (kvf_peer_is_up(peer)) {
        kvf_recv_on_peer_up(&recv->op);
    }
    return KVF_OK;

err_grant:
    for_pages(recv, kvf_pages_write_end);
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

static void tell_part(kvf_recv_op_t *recv, grant_part_t *part, bool more) {
    kvf_core_t *core = recv->op.core;
    Kvf__Wire__RecvRequest request;
    kvf__wire__recv_request__init(&request);
    Kvf__Wire__TransferId id;
    kvf_transfer_id_t transfer = transfer_of(recv);
    kvf_transfer_id_write(&transfer, &id);
    request.transfer = &id;
    request.ticket = (ProtobufCBinaryData){recv->ticket_bytes, recv->ticket};
    request.request_id = recv->op.request_id;
    request.prompt_len = recv->lengths.prompt_len;
    request.total_input_len_cp = recv->lengths.total_input_len_cp;
    request.draft_len = recv->lengths.draft_len;
    request.cached_tokens = recv->cached_tokens;
    request.timeout_us =
        recv->deadline_us == KVF_NEVER ? KVF_NEVER : recv->deadline_us - core->now_us;
    request.skip_holes = recv->holes == KVF_HOLES_SKIP;
    request.mover = (char *)(uintptr_t)core->config.mover_name;
    request.n_grants = part->n_grants;
    request.grants = part->list;
    request.more = more;
    kvf_peer_tell(recv->op.peer, KVF_FRAME_RECV_REQUEST, &request.base);
    part->n_grants = part->n = 0;
}

static void add_grant(kvf_recv_op_t *recv, grant_part_t *part, uint32_t group_idx,
                      const recv_entry_t *entry) {
    Kvf__Wire__Grant *grant = part->n_grants == 0 ? NULL : &part->grants[part->n_grants - 1];
    if (part->n == GRANTS_PER_PART) {
        tell_part(recv, part, true);
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

void kvf_recv_on_peer_up(kvf_op_t *op) {
    kvf_recv_op_t *recv = recv_of(op);
    kvf_core_t *core = op->core;
    if (op->ended || recv->requested) {
        return;
    }
    grant_part_t *part = kvf_alloc(core->alloc, sizeof(*part));
    if (part == NULL) {
        recv_end(recv, KVF_ERR_NO_MEMORY, "no memory for the request", false);
        return;
    }
    part->n_grants = part->n = 0;
    recv->requested = true;
    core->n_landing++;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            add_grant(recv, part, g, &recv->groups[g].entries[i]);
        }
    }
    tell_part(recv, part, false);
    kvf_free(core->alloc, part);
}

/* ---- chunks ---- */

static kvf_recv_op_t *find_transfer(kvf_core_t *core, const kvf_transfer_id_t *transfer) {
    if (!kvf_incarnation_equal(&transfer->receiver, &core->incarnation)) {
        return NULL;
    }
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &transfer->counter, sizeof(transfer->counter), op);
    return op != NULL && op->kind == KVF_OP_RECV ? recv_of(op) : NULL;
}

/* The bits of a chunk's entry, or NULL when the grant does not cover the chunk. */
static uint64_t *covered_by_grant(kvf_core_t *core, const kvf_chunk_t *chunk, uint64_t *first_p,
                                  uint64_t *end_p) {
    kvf_recv_op_t *recv = find_transfer(core, &chunk->transfer);
    if (recv == NULL || recv->op.ended || !recv->requested ||
        chunk->group_idx >= core->layout.n_groups) {
        return NULL;
    }
    recv_group_t *group = &recv->groups[chunk->group_idx];
    const recv_entry_t *entry = find_entry(group, chunk->ordinal);
    uint64_t mask = group->granule_bytes - 1;
    if (entry == NULL || entry->slot != chunk->slot || entry->generation != chunk->generation ||
        chunk->bytes == 0 || ((chunk->offset | chunk->bytes) & mask) != 0 ||
        !kvf_range_ok(chunk->offset, chunk->bytes,
                      kvf_group_block_bytes(&core->layout.groups[chunk->group_idx]))) {
        return NULL;
    }
    *first_p = chunk->offset / group->granule_bytes;
    *end_p = *first_p + chunk->bytes / group->granule_bytes;
    return group->landed + (size_t)(entry - group->entries) * group->words;
}

kvf_status_t kvf_core_grant_check(kvf_core_t *core, const kvf_chunk_t *chunk) {
    uint64_t first, end;
    uint64_t *landed = covered_by_grant(core, chunk, &first, &end);
    if (landed == NULL || !bits_all(landed, first, end, false)) {
        core->counters.refused_chunks++;
        return KVF_ERR_RANGE;
    }
    return KVF_OK;
}

static void verify_next(kvf_recv_op_t *recv);

void kvf_core_landed(kvf_core_t *core, const kvf_chunk_t *chunk) {
    uint64_t first, end;
    uint64_t *landed = covered_by_grant(core, chunk, &first, &end);
    if (landed != NULL) {
        bits_set(landed, first, end);
        core->counters.bytes_received += chunk->bytes;
        core->counters.pieces_received++;
        verify_next(find_transfer(core, &chunk->transfer));
    }
}

/* ---- commits ---- */

static void complete_if_whole(kvf_recv_op_t *recv) {
    Kvf__Wire__Done done;
    kvf__wire__done__init(&done);
    Kvf__Wire__TransferId wire;
    kvf_transfer_id_t id = transfer_of(recv);
    if (recv->op.ended || recv->final == NULL || recv->verifying ||
        recv->commits_first != recv->commits_end) {
        return;
    }
    if (recv->sealed_bytes != recv->wanted_bytes) {
        char text[KVF_DETAIL_BYTES];
        (void)snprintf(text, sizeof(text),
                       "the context side ended after %" PRIu64 " of %" PRIu64 " bytes",
                       recv->sealed_bytes, recv->wanted_bytes);
        recv_end(recv, KVF_ERR_UNCOVERED, text, true);
        return;
    }
    recv->op.pages = recv->wanted_pages;
    recv->op.bytes = recv->sealed_bytes;
    recv->op.pieces = recv->final->final->pieces;
    kvf_transfer_id_write(&id, &wire);
    done.transfer = &wire;
    kvf_peer_tell(recv->op.peer, KVF_FRAME_DONE, &done.base);
    recv_end(recv, KVF_OK, "", false);
}

/* Hand committed ranges whose bytes are there to the driver, oldest first, one job at a time. */
static void verify_next(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    kvf_verify_t *job = &recv->job;
    uint64_t bytes = 0;
    if (recv->verifying || recv->op.ended) {
        return;
    }
    *job = (kvf_verify_t){.recv_id = recv->op.id};
    for (size_t i = recv->commits_first;
         i < recv->commits_end && job->n_items < KVF_VERIFY_ITEMS && bytes < VERIFY_BYTES; i++) {
        const recv_commit_t *commit = &recv->commits[i];
        const recv_group_t *group = &recv->groups[commit->group_idx];
        uint64_t layer_bytes = kvf_group_layer_bytes(&core->layout.groups[commit->group_idx]);
        uint64_t offset = commit->layer_first_idx * layer_bytes,
                 end = commit->layer_end_idx * layer_bytes;
        if (!bits_all(group->landed + commit->entry_idx * group->words,
                      offset / group->granule_bytes, end / group->granule_bytes, true)) {
            break;
        }
        job->items[job->n_items++] =
            (kvf_verify_item_t){.group_idx = commit->group_idx,
                                .slot = group->entries[commit->entry_idx].slot,
                                .offset = offset,
                                .bytes = end - offset};
        bytes += end - offset;
    }
    if (job->n_items > 0) {
        recv->verifying = true;
        core->n_verifying++;
        core->out.verify(core->out.ctx, job);
    }
}

/* Count a verified range, and the layers that became whole by it. */
static void seal(kvf_recv_op_t *recv, const recv_commit_t *commit) {
    kvf_core_t *core = recv->op.core;
    recv_group_t *group = &recv->groups[commit->group_idx];
    recv->sealed_bytes += (uint64_t)(commit->layer_end_idx - commit->layer_first_idx) *
                          kvf_group_layer_bytes(&core->layout.groups[commit->group_idx]);
    for (uint32_t i = commit->layer_first_idx; i < commit->layer_end_idx; i++) {
        group->sealed[i]++;
    }
}

/* Move the mark behind which, in the order of global layers, everything is whole. */
static void advance_progress(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    uint32_t before = recv->progress_layer;
    for (; recv->progress_layer < core->n_layers; recv->progress_layer++) {
        const kvf_core_layer_t *layer = &core->layers[recv->progress_layer];
        const recv_group_t *group = &recv->groups[layer->group_idx];
        if (group->sealed[layer->layer_idx] != group->n) {
            break;
        }
    }
    if (recv->progress_layer != before) {
        recv->op.progress_due = true;
        kvf_op_due(&recv->op);
    }
}

void kvf_core_verified(kvf_core_t *core, kvf_verify_t *job) {
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &job->recv_id, sizeof(job->recv_id), op);
    kvf_recv_op_t *recv = recv_of(op); /* lives: a receive with a job out is not destroyed */
    core->n_verifying--;
    recv->verifying = false;
    for (uint32_t i = 0; i < job->n_items && !recv->op.ended; i++) {
        const recv_commit_t *commit = &recv->commits[recv->commits_first++];
        if (job->items[i].digest != commit->digest) {
            const kvf_layer_group_t *shape = &core->layout.groups[commit->group_idx];
            char text[KVF_DETAIL_BYTES];
            core->counters.digest_mismatches++;
            (void)snprintf(
                text, sizeof(text),
                "group %s, ordinal %" PRId64 ", layers %" PRIu32 " to %" PRIu32
                ": the bytes in the page are not those that were sent",
                shape->name, recv->groups[commit->group_idx].entries[commit->entry_idx].ordinal,
                shape->layers[commit->layer_first_idx], shape->layers[commit->layer_end_idx - 1]);
            recv_end(recv, KVF_ERR_DIGEST_MISMATCH, text, true);
            break;
        }
        seal(recv, commit);
    }
    if (recv->op.ended) {
        settle(recv);
        kvf_op_reap(&recv->op);
        return;
    }
    advance_progress(recv);
    verify_next(recv);
    complete_if_whole(recv);
}

/* Queue one range of a commit: each of its blocks must be granted, and no byte committed before. */
static kvf_status_t queue_range(kvf_recv_op_t *recv, const Kvf__Wire__CommitRange *range,
                                kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    if (range->group_idx >= core->layout.n_groups ||
        range->layer_first_idx >= range->layer_end_idx ||
        range->layer_end_idx > core->layout.groups[range->group_idx].n_layers) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL,
                        "a commit of layers that the model does not have");
    }
    recv_group_t *group = &recv->groups[range->group_idx];
    const kvf_layer_group_t *shape = &core->layout.groups[range->group_idx];
    uint64_t layer_granules = kvf_group_layer_bytes(shape) / group->granule_bytes;
    uint64_t first = range->layer_first_idx * layer_granules,
             end = range->layer_end_idx * layer_granules;
    size_t need = recv->commits_end + range->n_ordinals;
    if (need > recv->commits_room) {
        size_t room = need + need / 2;
        recv_commit_t *commits = kvf_realloc(core->alloc, recv->commits, room, sizeof(*commits));
        if (commits == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a commit");
        }
        recv->commits = commits;
        recv->commits_room = room;
    }
    for (size_t i = 0; i < range->n_ordinals; i++) {
        const recv_entry_t *entry = find_entry(group, (int64_t)range->ordinals[i]);
        if (entry == NULL || entry->generation != range->generations[i]) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "group %s: ordinal %" PRIu64 " was committed but not granted",
                            shape->name, range->ordinals[i]);
        }
        size_t entry_idx = (size_t)(entry - group->entries);
        uint64_t *claimed = group->claimed + entry_idx * group->words;
        if (!bits_all(claimed, first, end, false)) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "group %s: ordinal %" PRIu64 " was committed twice", shape->name,
                            range->ordinals[i]);
        }
        bits_set(claimed, first, end);
        if (!core->config.mover_checked) {
            /* One-sided: nobody here saw the bytes come; the sender's proof of completion stands
             * behind its commit. */
            bits_set(group->landed + entry_idx * group->words, first, end);
        }
        recv->commits[recv->commits_end++] =
            (recv_commit_t){range->group_idx, (uint32_t)entry_idx, range->layer_first_idx,
                            range->layer_end_idx, range->digests[i]};
    }
    return KVF_OK;
}

/* Blocks that the source does not have: only if we said that we can live with that. */
static kvf_status_t take_missing(kvf_recv_op_t *recv, const Kvf__Wire__Final *final,
                                 kvf_detail_t *detail) {
    kvf_core_t *core = recv->op.core;
    for (size_t m = 0; m < final->n_missing; m++) {
        const Kvf__Wire__Missing *missing = final->missing[m];
        if (recv->holes != KVF_HOLES_SKIP || missing->group_idx >= core->layout.n_groups) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "the context side left blocks out without being asked to");
        }
        recv_group_t *group = &recv->groups[missing->group_idx];
        const kvf_layer_group_t *shape = &core->layout.groups[missing->group_idx];
        kvf_page_ref_t *list = kvf_realloc(
            core->alloc, recv->missing, recv->n_missing + missing->n_ordinals + 1, sizeof(*list));
        if (list == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the missing blocks");
        }
        recv->missing = list;
        for (size_t i = 0; i < missing->n_ordinals; i++) {
            const recv_entry_t *entry = find_entry(group, (int64_t)missing->ordinals[i]);
            if (entry == NULL) {
                continue; /* missing on both sides: listed already */
            }
            uint64_t *claimed = group->claimed + (size_t)(entry - group->entries) * group->words;
            uint64_t granules = kvf_group_block_bytes(shape) / group->granule_bytes;
            if (!bits_all(claimed, 0, granules, false)) {
                return kvf_fail(detail, KVF_ERR_PROTOCOL,
                                "group %s: ordinal %" PRIu64 " is both committed and missing",
                                shape->name, missing->ordinals[i]);
            }
            bits_set(claimed, 0, granules); /* named once */
            recv->missing[recv->n_missing++] =
                (kvf_page_ref_t){missing->group_idx, entry->ordinal, entry->slot};
            recv->wanted_bytes -= kvf_group_block_bytes(shape);
            recv->wanted_pages--;
        }
    }
    return KVF_OK;
}

void kvf_recv_on_commit(kvf_peer_t *peer, Kvf__Wire__Commit *commit, bool *kept_p) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    kvf_status_t status = KVF_OK;
    kvf_transfer_id_t id = kvf_transfer_id_read(commit->transfer);
    kvf_recv_op_t *recv = find_transfer(core, &id);
    if (recv == NULL || recv->op.ended || recv->op.peer != peer) {
        core->counters.unknown_transfers++;
        return;
    }
    if (recv->final != NULL) {
        status = kvf_fail(&detail, KVF_ERR_PROTOCOL, "a commit after the final one");
    }
    for (size_t i = 0; i < commit->n_ranges && status == KVF_OK; i++) {
        status = queue_range(recv, commit->ranges[i], &detail);
    }
    if (status == KVF_OK && commit->final != NULL) {
        status = take_missing(recv, commit->final, &detail);
    }
    if (status != KVF_OK) {
        recv_end(recv, status, detail.text, true);
        return;
    }
    if (commit->final != NULL) {
        recv->final = commit; /* its tokens are handed to the caller with the result */
        recv->final_us = core->now_us;
        *kept_p = true;
    }
    verify_next(recv);
    complete_if_whole(recv);
}

/* ---- other messages and calls ---- */

bool kvf_recv_on_abort(kvf_peer_t *peer, const kvf_transfer_id_t *transfer, kvf_status_t status,
                       const char *message) {
    kvf_recv_op_t *recv = find_transfer(peer->core, transfer);
    char text[KVF_DETAIL_BYTES];
    if (recv == NULL || recv->op.peer != peer) {
        return false;
    }
    (void)snprintf(text, sizeof(text), "context node %.80s: %.400s", peer->instance, message);
    recv_end(recv, status, text, false);
    return true;
}

void kvf_recv_on_drained(kvf_peer_t *peer, const kvf_transfer_id_t *transfer) {
    kvf_recv_op_t *recv = find_transfer(peer->core, transfer);
    if (recv == NULL || recv->op.peer != peer) {
        return; /* checked movers do not wait for it */
    }
    recv->drained = true;
    settle(recv);
    kvf_op_reap(&recv->op);
}

void kvf_recv_on_peer(kvf_op_t *op, kvf_status_t status, const char *why) {
    recv_end(recv_of(op), status, why, false);
}

kvf_status_t kvf_recv_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message) {
    recv_end(recv_of(op), reason, message, true);
    return KVF_OK;
}

kvf_status_t kvf_core_recv_cancel(kvf_core_t *core, uint64_t id) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_RECV);
    if (op == NULL || op->ended) {
        return KVF_ERR_UNKNOWN;
    }
    return kvf_recv_cancel_op(op, KVF_ERR_CANCELLED, "cancelled on the generation side");
}

bool kvf_recv_progress_event(kvf_op_t *op, kvf_event_t *event) {
    kvf_recv_op_t *recv = recv_of(op);
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
    kvf_recv_op_t *recv = recv_of(op);
    event->missing = recv->missing;
    event->n_missing = recv->n_missing;
    event->poisoned = recv->poisoned;
    event->n_poisoned = recv->n_poisoned;
    if (op->status == KVF_OK) {
        const Kvf__Wire__Final *final = recv->final->final;
        *aux = (kvf_aux_t){final->first_tokens,   final->n_first_tokens, final->draft_tokens,
                           final->n_draft_tokens, final->data.data,      final->data.len};
        event->aux = aux;
    }
}
