/* SPDX-License-Identifier: Apache-2.0 */
/* What came, what was committed, what was verified: the receiving half that counts bytes. */
#include "kernels/digest.h"
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "kvmgr/base/size.h"
#include "transceiver/recv_impl.h"

#include <inttypes.h>
#include <stdio.h>

/* One verify job covers about so much, so that the driver can take turns: more the more there is to
 * do, because a job costs something, too. */
#define MIN_JOB_BYTES (UINT64_C(256) << 10)
#define MAX_JOB_BYTES (UINT64_C(2) << 20)
/* Of a device, for which a job is a launch. */
#define MAX_DEVICE_JOB_BYTES (UINT64_C(16) << 20)

/* ---- coverage ---- */

/* Whether all (set), or none (not set), of the granules [first, end) of an entry are marked. */
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

/* The entry of a block, or NULL. Where it stands at `guess`, nothing is searched. */
static recv_entry_t *find_entry(const recv_group_t *group, int64_t ordinal, size_t guess) {
    size_t low = 0, high = group->n;
    if (guess < high && group->entries[guess].ordinal == ordinal) {
        return &group->entries[guess];
    }
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

/* ---- chunks ---- */

/* The receive whose sender this chunk comes from, while it may write. */
static kvf_recv_op_t *chunk_recv(kvf_core_t *core, const kvf_chunk_t *chunk) {
    kvf_recv_op_t *recv = kvf_recv_find(core, &chunk->transfer);
    bool granted = recv != NULL && !recv->op.ended && recv->requested &&
                   (recv->grant_key == chunk->grant_key || KVF_MUTANT(skip_grant_key));
    return granted ? recv : NULL;
}

/* The bits of a chunk's entry, or NULL when the grant does not cover the chunk. */
static uint64_t *covered_by_grant(kvf_recv_op_t *recv, const kvf_chunk_t *chunk, uint64_t *first_p,
                                  uint64_t *end_p) {
    const kvf_layout_t *layout = &recv->op.core->layout;
    /* Nothing is to be sent where the receiver copies itself, least of all to pages of a device. */
    if (chunk->group_idx >= layout->n_groups || recv->op.mapped) {
        return NULL;
    }
    recv_group_t *group = &recv->groups[chunk->group_idx];
    const recv_entry_t *entry = find_entry(group, chunk->ordinal, group->n);
    uint64_t mask = group->granule_bytes - 1;
    if (entry == NULL ||
        ((entry->slot != chunk->slot || entry->generation != chunk->generation) &&
         !KVF_MUTANT(skip_generation_check)) ||
        chunk->bytes == 0 || ((chunk->offset | chunk->bytes) & mask) != 0 ||
        !kvf_range_ok(chunk->offset, chunk->bytes,
                      kvf_group_block_bytes(&layout->groups[chunk->group_idx]))) {
        return NULL;
    }
    *first_p = chunk->offset / group->granule_bytes;
    *end_p = *first_p + chunk->bytes / group->granule_bytes;
    return group->landed + (size_t)(entry - group->entries) * group->words;
}

/* Of the granules from `first` on; a granule is a leaf. */
static uint64_t *leaves_at(const recv_group_t *group, size_t entry_idx, uint64_t first) {
    return group->leaves == NULL ? NULL : group->leaves + entry_idx * group->granules + first;
}

/* Where a byte of a block lands; NULL: in its page. */
static uint8_t *landing_at(const kvf_recv_op_t *recv, uint32_t group_idx, size_t entry_idx,
                           uint64_t offset) {
    const recv_group_t *group = &recv->groups[group_idx];
    if (group->landing == NULL) {
        return NULL;
    }
    uint64_t block = kvf_group_block_bytes(&recv->op.core->layout.groups[group_idx]);
    return group->landing + entry_idx * block + offset;
}

kvf_status_t kvf_core_grant_check(kvf_core_t *core, const kvf_chunk_t *chunk,
                                  kvf_landing_t *landing_p) {
    uint64_t first, end;
    kvf_recv_op_t *recv = chunk_recv(core, chunk);
    uint64_t *landed = recv == NULL ? NULL : covered_by_grant(recv, chunk, &first, &end);
    if (landed != NULL && (bits_all(landed, first, end, false) || KVF_MUTANT(chunk_twice))) {
        const recv_group_t *group = &recv->groups[chunk->group_idx];
        size_t entry_idx = (size_t)(landed - group->landed) / group->words;
        *landing_p = (kvf_landing_t){landing_at(recv, chunk->group_idx, entry_idx, chunk->offset),
                                     leaves_at(group, entry_idx, first)};
        return KVF_OK;
    }
    core->counters.refused_chunks++;
    if (recv != NULL && landed == NULL) {
        /* Who has the key is the sender of this transfer, and it misplaces blocks: what it sends
         * cannot be trusted to become whole. (Strangers' chunks and repeated ones are only
         * dropped.) */
        char text[KVF_DETAIL_BYTES];
        bool known = chunk->group_idx < core->layout.n_groups;
        (void)snprintf(text, sizeof(text),
                       "group %s, ordinal %" PRId64 ": bytes came for slot %" PRId32
                       ", offset %" PRIu64 ", which was not granted for that block",
                       known ? core->layout.groups[chunk->group_idx].name : "(none)",
                       chunk->ordinal, chunk->slot, chunk->offset);
        kvf_recv_end(recv, KVF_ERR_PROTOCOL, text, true);
    }
    return KVF_ERR_RANGE;
}

static void verify_next(kvf_recv_op_t *recv);

void kvf_core_landed(kvf_core_t *core, const kvf_chunk_t *chunk) {
    uint64_t first, end;
    kvf_recv_op_t *recv = chunk_recv(core, chunk);
    uint64_t *landed = recv == NULL ? NULL : covered_by_grant(recv, chunk, &first, &end);
    if (landed != NULL && bits_all(landed, first, end, false)) { /* not the same again */
        bits_set(landed, first, end);
        core->counters.bytes_received += chunk->bytes;
        KVF_FAIL_POINT(chunk);
        verify_next(recv);
    }
}

/* ---- commits ---- */

static void complete_if_whole(kvf_recv_op_t *recv) {
    Kvf__Wire__Done done;
    kvf__wire__done__init(&done);
    Kvf__Wire__TransferId wire;
    kvf_transfer_id_t id = kvf_recv_transfer(recv);
    if (recv->op.ended || recv->final == NULL ||
        ((recv->n_jobs > 0 || recv->commits_first != recv->commits_end) &&
         !KVF_MUTANT(done_without_verify))) {
        return;
    }
    if (recv->sealed_bytes != recv->wanted_bytes && !KVF_MUTANT(skip_coverage)) {
        char text[KVF_DETAIL_BYTES];
        (void)snprintf(text, sizeof(text),
                       "the context side ended after %" PRIu64 " of %" PRIu64 " bytes",
                       recv->sealed_bytes, recv->wanted_bytes);
        kvf_recv_end(recv, KVF_ERR_UNCOVERED, text, true);
        return;
    }
    recv->op.pages = recv->wanted_pages;
    recv->op.bytes = recv->sealed_bytes;
    kvf_transfer_id_write(&id, &wire);
    done.transfer = &wire;
    KVF_FAIL_POINT(ack_before);
    kvf_peer_tell(recv->op.peer, KVF_FRAME_DONE, &done.base);
    kvf_recv_end(recv, KVF_OK, "", false);
}

/* Jobs are kept for the next one. */
static kvf_verify_t *take_job(kvf_core_t *core) {
    kvf_verify_t *job = core->free_jobs;
    if (job != NULL) {
        core->free_jobs = (kvf_verify_t *)job->job.next;
        return job;
    }
    return kvf_alloc(core->alloc, sizeof(*job));
}

static void give_job(kvf_core_t *core, kvf_verify_t *job) {
    job->job.next = (kvf_job_t *)core->free_jobs;
    core->free_jobs = job;
}

/* Fill a job from the front of the queue, as far as the bytes are there. @return false: nothing. */
static bool fill_job(kvf_recv_op_t *recv, kvf_verify_t *job) {
    kvf_core_t *core = recv->op.core;
    uint64_t most = (recv->claimed_bytes - recv->sealed_bytes) / 16;
    most = most < MIN_JOB_BYTES ? MIN_JOB_BYTES : most > MAX_JOB_BYTES ? MAX_JOB_BYTES : most;
    most = kvf_core_on_device(core) ? MAX_DEVICE_JOB_BYTES : most;
    job->source = NULL;
    job->recv_id = recv->op.id;
    job->peer = recv->op.mapped ? recv->op.peer->number : 0;
    job->digests = core->agent.digests;
    job->status = KVF_OK;
    job->first = recv->commits_first;
    job->bytes = 0;
    job->n_before = recv->n_jobs;
    job->n_items = 0;
    while (recv->commits_first < recv->commits_end && job->n_items < KVF_VERIFY_ITEMS &&
           job->bytes < most) {
        const recv_commit_t *commit = &recv->commits[recv->commits_first];
        const recv_group_t *group = &recv->groups[commit->group_idx];
        uint64_t layer_bytes = kvf_group_layer_bytes(&core->layout.groups[commit->group_idx]);
        uint64_t offset = commit->layer_first_idx * layer_bytes,
                 end = commit->layer_end_idx * layer_bytes;
        if (!bits_all(group->landed + commit->entry_idx * group->words,
                      offset / group->granule_bytes, end / group->granule_bytes, true)) {
            break;
        }
        const uint64_t *leaves = leaves_at(group, commit->entry_idx, offset / group->granule_bytes);
        job->items[job->n_items++] = (kvf_verify_item_t){
            .group_idx = commit->group_idx,
            .slot = group->entries[commit->entry_idx].slot,
            .source_slot = commit->source_slot,
            .offset = offset,
            .bytes = end - offset,
            .landing = landing_at(recv, commit->group_idx, commit->entry_idx, offset),
            .leaves = leaves};
        job->bytes += leaves == NULL ? end - offset
                                     : (end - offset) / KVF_DIGEST_LEAF_BYTES * sizeof(*leaves);
        recv->commits_first++;
    }
    return job->n_items > 0;
}

/* Hand committed ranges whose bytes are there to the driver, oldest first, some jobs at a time. */
static void verify_next(kvf_recv_op_t *recv) {
    kvf_core_t *core = recv->op.core;
    while (recv->n_jobs < RECV_JOBS && recv->commits_first < recv->commits_end && !recv->op.ended) {
        kvf_verify_t *job = take_job(core);
        if (job == NULL) {
            kvf_recv_end(recv, KVF_ERR_NO_MEMORY, "no memory to verify", true);
            break;
        }
        if (!fill_job(recv, job)) {
            give_job(core, job);
            break;
        }
        recv->jobs[recv->n_jobs++] = job;
        core->n_verifying++;
        core->out.verify(core->out.ctx, job);
    }
}

/* Count a verified range, and the layers that became whole by it. */
static void seal(kvf_recv_op_t *recv, const recv_commit_t *commit) {
    kvf_core_t *core = recv->op.core;
    recv_group_t *group = &recv->groups[commit->group_idx];
    core->counters.pieces_received++;
    recv->op.pieces++;
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
    kvf_recv_op_t *recv = kvf_recv_of(op); /* lives: a receive with a job out is not destroyed */
    uint32_t idx = 0;
    while (recv->jobs[idx] != job) {
        idx++;
    }
    recv->jobs[idx] = recv->jobs[--recv->n_jobs];
    core->n_verifying--;
    if (job->status != KVF_OK && !recv->op.ended) {
        bool lost = job->status == KVF_ERR_PEER_LOST;
        kvf_recv_end(recv, job->status,
                     lost ? "the context node's pools are not mapped any more"
                          : "a copy on this node's device failed",
                     true);
    }
    for (uint32_t i = 0; i < job->n_items && !recv->op.ended; i++) {
        const recv_commit_t *commit = &recv->commits[job->first + i];
        if (job->digests && job->items[i].digest != commit->digest && !KVF_MUTANT(skip_digest)) {
            const kvf_layer_group_t *shape = &core->layout.groups[commit->group_idx];
            char text[KVF_DETAIL_BYTES];
            core->counters.digest_mismatches++;
            (void)snprintf(
                text, sizeof(text),
                "group %s, ordinal %" PRId64 ", layers %" PRIu32 " to %" PRIu32
                ": the bytes in the page are not those that were sent",
                shape->name, recv->groups[commit->group_idx].entries[commit->entry_idx].ordinal,
                shape->layers[commit->layer_first_idx], shape->layers[commit->layer_end_idx - 1]);
            kvf_recv_end(recv, KVF_ERR_DIGEST_MISMATCH, text, true);
            break;
        }
        if (recv->op.mapped) {
            core->counters.bytes_received += job->items[i].bytes;
            KVF_FAIL_POINT(chunk);
        }
        seal(recv, commit);
    }
    give_job(core, job);
    if (recv->op.ended) {
        kvf_recv_settle(recv);
        kvf_op_reap(&recv->op);
        return;
    }
    kvf_recv_pace(recv);
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
    if (range->n_slots != (recv->op.mapped ? range->n_ordinals : 0) ||
        range->n_digests != (core->agent.digests ? range->n_ordinals : 0)) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL,
                        "a commit with %zu digests and %zu slots for %zu blocks", range->n_digests,
                        range->n_slots, range->n_ordinals);
    }
    recv_group_t *group = &recv->groups[range->group_idx];
    const kvf_layer_group_t *shape = &core->layout.groups[range->group_idx];
    uint64_t layer_granules = kvf_group_layer_bytes(shape) / group->granule_bytes;
    uint64_t first = range->layer_first_idx * layer_granules,
             end = range->layer_end_idx * layer_granules;
    size_t need = recv->commits_end + range->n_ordinals;
    if (need > recv->commits_room) {
        /* Mostly one for each page; more where layers come one by one. */
        size_t room = need <= recv->wanted_pages ? recv->wanted_pages : need + need / 2;
        recv_commit_t *commits = kvf_realloc(core->alloc, recv->commits, room, sizeof(*commits));
        if (commits == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a commit");
        }
        recv->commits = commits;
        recv->commits_room = room;
    }
    size_t guess = group->n; /* commits go through the blocks in order */
    for (size_t i = 0; i < range->n_ordinals; i++) {
        const recv_entry_t *entry = find_entry(group, (int64_t)range->ordinals[i], guess);
        if (entry == NULL || entry->generation != range->generations[i]) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "group %s: ordinal %" PRIu64 " was committed but not granted",
                            shape->name, range->ordinals[i]);
        }
        if (recv->op.mapped && range->slots[i] >= recv->op.peer->n_pages[range->group_idx] &&
            !KVF_MUTANT(skip_slot_check)) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "group %s: ordinal %" PRIu64 " is said to be in slot %" PRIu32
                            " of %" PRId64,
                            shape->name, range->ordinals[i], range->slots[i],
                            recv->op.peer->n_pages[range->group_idx]);
        }
        size_t entry_idx = (size_t)(entry - group->entries);
        guess = entry_idx + 1;
        uint64_t *claimed = group->claimed + entry_idx * group->words;
        if (!bits_all(claimed, first, end, false)) {
            return kvf_fail(detail, KVF_ERR_PROTOCOL,
                            "group %s: ordinal %" PRIu64 " was committed twice", shape->name,
                            range->ordinals[i]);
        }
        bits_set(claimed, first, end);
        recv->claimed_bytes += (end - first) * group->granule_bytes;
        if (recv->op.mapped || !core->config.movers_checked || KVF_MUTANT(accept_handover)) {
            /* They are fetched later; or, one-sided: nobody here saw the bytes come, and the
             * sender's proof of completion stands behind its commit. */
            bits_set(group->landed + entry_idx * group->words, first, end);
        }
        recv->commits[recv->commits_end++] =
            (recv_commit_t){.group_idx = range->group_idx,
                            .entry_idx = (uint32_t)entry_idx,
                            .layer_first_idx = range->layer_first_idx,
                            .layer_end_idx = range->layer_end_idx,
                            .source_slot = recv->op.mapped ? (int32_t)range->slots[i] : -1,
                            .digest = core->agent.digests ? range->digests[i] : 0};
    }
    return KVF_OK;
}

/* The final part: sizes within limits, and the tokens that this side expects. */
static kvf_status_t check_final(const kvf_recv_op_t *recv, const Kvf__Wire__Final *final,
                                kvf_detail_t *detail) {
    size_t n_drafts = final->n_draft_tokens, draft_len = (size_t)recv->lengths.draft_len;
    if (final->n_first_tokens > KVF_MAX_AUX_TOKENS || n_drafts > KVF_MAX_AUX_TOKENS ||
        final->data.len > KVF_MAX_AUX_BYTES) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "the final message has too many tokens or bytes");
    }
    if (recv->handoff == KVF_HANDOFF_NONE) {
        return KVF_OK;
    }
    if (final->n_first_tokens == 0) {
        return kvf_fail(detail, KVF_ERR_COUNT_MISMATCH,
                        "the context side handed over no first token");
    }
    if (n_drafts != draft_len && (n_drafts != 0 || recv->handoff == KVF_HANDOFF_ALL)) {
        return kvf_fail(detail, KVF_ERR_COUNT_MISMATCH,
                        "the context side handed over %zu draft tokens, when this request has %zu",
                        n_drafts, draft_len);
    }
    return KVF_OK;
}

void kvf_recv_on_commit(kvf_peer_t *peer, Kvf__Wire__Commit *commit) {
    kvf_core_t *core = peer->core;
    kvf_detail_t detail;
    kvf_status_t status = KVF_OK;
    kvf_transfer_id_t id = kvf_transfer_id_read(commit->transfer);
    kvf_recv_op_t *recv = kvf_recv_find(core, &id);
    if (recv == NULL || recv->op.ended || recv->op.peer != peer) {
        core->counters.unknown_transfers++;
        return;
    }
    KVF_FAIL_POINT(commit_before);
    if (recv->final != NULL) {
        status = kvf_fail(&detail, KVF_ERR_PROTOCOL, "a commit after the final one");
    }
    for (size_t i = 0; i < commit->n_ranges && status == KVF_OK; i++) {
        status = queue_range(recv, commit->ranges[i], &detail);
    }
    if (status == KVF_OK && !kvf_recv_asked_for(recv)) {
        status = kvf_fail(&detail, KVF_ERR_PROTOCOL,
                          "%" PRIu64 " bytes were committed, when %" PRIu64 " were asked for",
                          recv->claimed_bytes, recv->asked_bytes);
    }
    if (status == KVF_OK && commit->final != NULL) {
        status = check_final(recv, commit->final, &detail);
    }
    if (status != KVF_OK) {
        kvf_recv_end(recv, status, detail.text, true);
        return;
    }
    if (commit->final != NULL) {
        recv->final = commit->final; /* its tokens are handed to the caller with the result */
        commit->final = NULL;
        recv->final_us = core->now_us;
    }
    KVF_FAIL_POINT(commit_after);
    verify_next(recv);
    complete_if_whole(recv);
}
