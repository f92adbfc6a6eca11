/* SPDX-License-Identifier: Apache-2.0 */
/* Windows: what is posted, and the commits that follow. */
#include "kvmgr/base/failpoint.h"
#include "kvmgr/base/mutant.h"
#include "transceiver/send_impl.h"

/* A posted window, with room for its pieces. Kept for the next one when done. */
typedef struct window_box {
    kvf_window_t window;
    kvf_piece_t pieces[KVF_WINDOW_PIECES];
} window_box_t;

/* ---- windows and commits ---- */

static void tell_commit(kvf_send_op_t *send, Kvf__Wire__CommitRange **ranges, size_t n_ranges,
                        Kvf__Wire__Final *final) {
    Kvf__Wire__Commit commit;
    kvf__wire__commit__init(&commit);
    Kvf__Wire__TransferId id;
    kvf_transfer_id_write(&send->transfer, &id);
    commit.transfer = &id;
    commit.n_ranges = n_ranges;
    commit.ranges = ranges;
    commit.final = final;
    KVF_FAIL_POINT(commit_before);
    kvf_peer_tell(send->op.peer, KVF_FRAME_COMMIT, &commit.base);
    KVF_FAIL_POINT(commit_after);
}

/* Is that all? Then this commit is the last one. Otherwise it goes out if it has ranges. */
static void send_final_if_complete(kvf_send_op_t *send, Kvf__Wire__CommitRange **ranges,
                                   size_t n_ranges) {
    kvf_core_t *core = send->op.core;
    Kvf__Wire__Final final;
    kvf__wire__final__init(&final);
    if (send->final_sent || !send->finished ||
        (send->n_posted > 0 && !KVF_MUTANT(final_too_early)) || send->part_idx < send->n_promised) {
        if (n_ranges > 0) {
            tell_commit(send, ranges, n_ranges, NULL);
        }
        return;
    }
    final.n_first_tokens = send->n_first_tokens;
    final.first_tokens = send->tokens;
    final.n_draft_tokens = send->n_draft_tokens;
    final.draft_tokens = send->tokens == NULL ? NULL : send->tokens + send->n_first_tokens;
    final.data = (ProtobufCBinaryData){send->data_bytes, send->data};
    final.since_prefill_us = core->now_us - send->finished_us;
    send->final_sent = true;
    tell_commit(send, ranges, n_ranges, &final);
}

/* Say how much of what the receiver wants has become ready. */
static void tell_ready(kvf_send_op_t *send) {
    Kvf__Wire__Ready ready;
    kvf__wire__ready__init(&ready);
    Kvf__Wire__TransferId id;
    uint64_t before = send->ready_bytes;
    for (; send->told_parts < send->n_parts; send->told_parts++) {
        send->ready_bytes += kvf_plan_bytes(&send->plan, &send->parts[send->told_parts]);
    }
    if (send->ready_bytes != before) {
        kvf_transfer_id_write(&send->transfer, &id);
        ready.transfer = &id;
        ready.bytes = send->ready_bytes;
        kvf_peer_tell(send->op.peer, KVF_FRAME_READY, &ready.base);
    }
}

/* Whether the next piece may go, if there is one: it begins behind so many bytes. */
static bool may_post(const kvf_send_op_t *send, uint64_t bytes) {
    return !send->pull || bytes < send->asked_bytes || KVF_MUTANT(push_unasked);
}

/* Whether there is something to post, or to find out that there is no more. */
static bool can_move(const kvf_send_op_t *send) {
    return send->part_idx < send->n_parts &&
           (may_post(send, send->posted_bytes) || send->posted_bytes == send->ready_bytes);
}

void kvf_send_wake(kvf_send_op_t *send) {
    if (send->planned && !send->op.ended) {
        send->part_idx = KVF_MUTANT(post_twice) ? 0 : send->part_idx;
        if (send->pull) {
            tell_ready(send);
        }
        if (can_move(send)) {
            kvf_turns_enter(&send->op.peer->moving, &send->op);
        }
        send_final_if_complete(send, NULL, 0);
    }
}

/* Say which blocks a window brought. Pieces of one group and layer range are neighbours; each such
 * run is a range. */
static void commit_window(kvf_send_op_t *send, const kvf_window_t *window) {
    Kvf__Wire__CommitRange ranges[KVF_WINDOW_PIECES], *list[KVF_WINDOW_PIECES];
    uint64_t ordinals[KVF_WINDOW_PIECES], generations[KVF_WINDOW_PIECES],
        digests[KVF_WINDOW_PIECES];
    uint32_t slots[KVF_WINDOW_PIECES];
    size_t n_ranges = 0;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        const kvf_piece_t *piece = &window->pieces[i], *before = i > 0 ? piece - 1 : NULL;
        ordinals[i] = (uint64_t)piece->ordinal;
        generations[i] = piece->generation;
        digests[i] = piece->digest;
        slots[i] = (uint32_t)piece->source_slot;
        if (before == NULL || before->group_idx != piece->group_idx ||
            before->offset != piece->offset || before->bytes != piece->bytes) {
            uint64_t layer_bytes =
                kvf_group_layer_bytes(&send->op.core->layout.groups[piece->group_idx]);
            Kvf__Wire__CommitRange *range = &ranges[n_ranges];
            kvf__wire__commit_range__init(range);
            range->group_idx = piece->group_idx;
            range->layer_first_idx = (uint32_t)(piece->offset / layer_bytes);
            range->layer_end_idx = (uint32_t)((piece->offset + piece->bytes) / layer_bytes);
            range->ordinals = &ordinals[i];
            range->generations = &generations[i];
            range->digests = &digests[i];
            range->slots = &slots[i];
            list[n_ranges++] = range;
        }
        ranges[n_ranges - 1].n_ordinals++;
        ranges[n_ranges - 1].n_generations++;
        ranges[n_ranges - 1].n_digests += send->digests;
        ranges[n_ranges - 1].n_slots += send->op.mapped;
    }
    send_final_if_complete(send, list, n_ranges);
}

void kvf_send_on_moved(kvf_window_t *window, kvf_status_t status) {
    kvf_send_op_t *send = (kvf_send_op_t *)(uintptr_t)window->owner;
    kvf_core_t *core = send->op.core;
    kvf_peer_t *peer = send->op.peer;
    if (window->peer == 0) {
        kvf_send_on_ahead(send, window);
        return;
    }
    send->n_posted--;
    core->n_posted--;
    peer->window_bytes -= window->bytes;
    peer->window_pieces -= window->n_pieces;
    status = KVF_MUTANT(ignore_failed_window) ? KVF_OK : status;
    send->unproven |= status != KVF_OK && !KVF_MUTANT(failure_is_proof);
    peer->unproven |= send->unproven;
    if (!send->op.ended && status == KVF_OK) {
        core->counters.bytes_sent += window->bytes;
        core->counters.pieces_sent += window->n_pieces;
        send->op.bytes += window->bytes;
        send->op.pieces += window->n_pieces;
        if (kvf_send_note(send, window)) {
            commit_window(send, window);
        } else {
            kvf_send_end(send, KVF_ERR_NO_MEMORY, "no memory for a commit", true);
        }
    }
    kvf_window_give(core, window);
    if (!send->op.ended && status != KVF_OK) {
        kvf_send_end(send, KVF_ERR_PEER_LOST, "the data path to the receiver broke", true);
    } else if (send->op.ended) {
        kvf_send_finish_off(send);
        kvf_op_reap(&send->op);
    }
}

kvf_window_t *kvf_window_take(kvf_core_t *core) {
    kvf_window_t *window = core->free_windows;
    if (window != NULL) {
        core->free_windows = window->priv;
        return window;
    }
    window_box_t *box = kvf_alloc(core->alloc, sizeof(*box));
    if (box == NULL) {
        return NULL;
    }
    box->window.pieces = box->pieces;
    return &box->window;
}

void kvf_window_give(kvf_core_t *core, kvf_window_t *window) {
    window->priv = core->free_windows;
    core->free_windows = window;
}

/* Have it carried; or, if the receiver fetches it itself, have its digests made, as far as they are
 * `wanted`. */
static kvf_status_t post(const kvf_send_op_t *send, kvf_window_t *window, bool wanted) {
    const kvf_core_t *core = send->op.core;
    if (!send->op.mapped) {
        return core->out.post(core->out.ctx, window);
    }
    if (wanted) {
        core->out.digest(core->out.ctx, window);
    }
    return KVF_OK;
}

/* What a window takes of its send's turn. */
static int64_t turn_cost(const kvf_send_op_t *send, const kvf_window_t *window, bool wanted) {
    uint64_t bytes = send->op.mapped && !wanted ? window->bytes / KVF_TOLD_SHARE : window->bytes;
    return (int64_t)bytes;
}

kvf_status_t kvf_send_pump(kvf_op_t *op) {
    kvf_send_op_t *send = kvf_send_of(op);
    kvf_core_t *core = op->core;
    kvf_peer_t *peer = op->peer;
    kvf_plan_cursor_t cursor = send->cursor, next;
    size_t part_idx = send->part_idx;
    kvf_piece_t piece;
    int32_t source;
    bool wanted = false; /* a digest that nobody has made */
    uint32_t most = op->mapped ? KVF_WINDOW_PIECES : KVF_CARRIED_PIECES;
    most = most < core->agent.window_pieces ? most : core->agent.window_pieces;
    if (peer->window_bytes >= core->agent.window_bytes ||
        peer->window_pieces + most > core->agent.window_pieces || kvf_session_full(peer)) {
        return KVF_ERR_AGAIN;
    }
    kvf_window_t *window = kvf_window_take(core);
    if (window == NULL) {
        kvf_send_end(send, KVF_ERR_NO_MEMORY, "no memory for a window", true);
        return KVF_OK;
    }
    *window = (kvf_window_t){.transfer = send->transfer,
                             .grant_key = send->grant_key,
                             .peer = peer->number,
                             .mover_idx = peer->mover_idx,
                             .pieces = window->pieces,
                             .digests = send->digests,
                             .owner = (uint64_t)(uintptr_t)send};
    while (part_idx < send->n_parts && window->n_pieces < most &&
           turn_cost(send, window, wanted) < op->deficit) {
        next = cursor;
        if (!kvf_plan_next(&send->plan, send->slots, &send->parts[part_idx], &next, &piece,
                           &source)) {
            part_idx++;
            cursor = (kvf_plan_cursor_t){0};
            continue;
        }
        if (!may_post(send, send->posted_bytes + window->bytes)) {
            break;
        }
        cursor = next;
        wanted |= send->digests && !kvf_send_knows_digest(send, &send->parts[part_idx], &piece);
        piece.source_slot = source;
        piece.source = core->out.page(core->out.ctx, piece.group_idx, source) + piece.offset;
        window->pieces[window->n_pieces++] = piece;
        window->bytes += piece.bytes;
    }
    kvf_status_t status = window->n_pieces == 0 ? KVF_OK : post(send, window, wanted);
    if (status != KVF_OK || window->n_pieces == 0) {
        kvf_window_give(core, window);
    }
    if (status == KVF_ERR_AGAIN) {
        return status;
    }
    if (status != KVF_OK) {
        kvf_send_end(send, KVF_ERR_PEER_LOST, "the data path to the receiver is broken", true);
        return KVF_OK;
    }
    if (window->n_pieces > 0) {
        send->n_posted++;
        core->n_posted++;
        peer->window_bytes += window->bytes;
        peer->window_pieces += window->n_pieces;
        KVF_FAIL_POINT(chunk);
    }
    send->cursor = cursor;
    send->part_idx = part_idx;
    send->posted_bytes += window->bytes;
    op->deficit -= turn_cost(send, window, wanted);
    if (!can_move(send)) {
        kvf_turns_leave(op);
    }
    if (send->op.mapped && !wanted && window->n_pieces > 0) {
        kvf_send_on_moved(window, KVF_OK); /* the receiver can be told at once */
    }
    if (part_idx == send->n_parts && !op->ended) {
        send_final_if_complete(send, NULL, 0);
    }
    return KVF_OK;
}
