/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of what is ready before anybody asks for it: a request then waits for its bytes alone. */
#include "transceiver/send_impl.h"

#include <utlist.h>

/* Windows under way at once, of all sends: no thread waits for the next one to be cut, and a send
 * that ends meanwhile does not wait for long. */
#define AHEAD_WINDOWS 8

/* Where the digests of a part's groups begin. A block that is not live has a place, too. */
static size_t place_of(const kvf_send_op_t *send, const kvf_plan_part_t *part, uint32_t group_idx,
                       int64_t ordinal) {
    const kvf_layout_t *layout = &send->op.core->layout;
    int64_t prompt = kvf_prompt_tokens(&send->lengths);
    size_t n = 0;
    for (uint32_t g = 0; g <= group_idx && g < layout->n_groups; g++) {
        int64_t t = layout->groups[g].tokens_per_block;
        int64_t first = kvf_plan_whole_blocks(part->token_first, prompt, t);
        int64_t end = g == group_idx ? ordinal : kvf_plan_whole_blocks(part->token_end, prompt, t);
        n += (size_t)(end - first);
    }
    return n;
}

/* The first part whose digests are not all there, or under way. */
static bool next_part(kvf_send_op_t *send) {
    kvf_ahead_t *ahead = &send->ahead;
    if (ahead->digests != NULL || ahead->part_idx == send->n_parts) {
        return ahead->digests != NULL;
    }
    const kvf_plan_part_t *part = &send->parts[ahead->part_idx];
    size_t n = place_of(send, part, send->op.core->layout.n_groups, 0);
    ahead->digests = kvf_calloc(send->op.core->alloc, n + 1, sizeof(*ahead->digests));
    ahead->cursor = (kvf_plan_cursor_t){0};
    send->parts[ahead->part_idx].digests = ahead->digests;
    return ahead->digests != NULL;
}

/* Cut the next pieces. @return false: there are none. */
static bool fill(kvf_send_op_t *send, kvf_window_t *window) {
    kvf_core_t *core = send->op.core;
    kvf_ahead_t *ahead = &send->ahead;
    /* As if a receiver had granted a page for every block that is live. */
    kvf_plan_t all = {.layout = &core->layout, .prompt_tokens = kvf_prompt_tokens(&send->lengths)};
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        all.groups[g] = (kvf_plan_group_t){.wanted = send->live[g], .destination = send->slots[g]};
    }
    uint64_t most = kvf_core_on_device(core) ? KVF_DEVICE_DIGEST_BYTES : KVF_TURN_BYTES;
    while (window->n_pieces == 0 && next_part(send)) {
        kvf_piece_t piece;
        int32_t source;
        while (window->n_pieces < KVF_WINDOW_PIECES && window->bytes < most &&
               kvf_plan_next(&all, send->slots, &send->parts[ahead->part_idx], &ahead->cursor,
                             &piece, &source)) {
            piece.source = core->out.page(core->out.ctx, piece.group_idx, source) + piece.offset;
            window->pieces[window->n_pieces++] = piece;
            window->bytes += piece.bytes;
        }
        window->part_idx = ahead->part_idx;
        if (window->n_pieces == 0) {
            ahead->digests = NULL;
            ahead->part_idx++;
        }
    }
    return window->n_pieces > 0;
}

void kvf_send_forget_ahead(kvf_send_op_t *send) {
    if (send->ahead.listed) {
        DL_DELETE2(send->op.core->ahead, send, ahead.prev, ahead.next);
        send->ahead.listed = false;
    }
}

/* Who came first is likely to be asked for first: its digests are made first. */
static void post_windows(kvf_core_t *core) {
    while (core->ahead != NULL && core->n_ahead < AHEAD_WINDOWS) {
        kvf_send_op_t *send = core->ahead;
        kvf_window_t *window = kvf_window_take(core);
        if (window == NULL) {
            return; /* they are made when they are asked for */
        }
        *window = (kvf_window_t){
            .pieces = window->pieces, .digests = true, .owner = (uint64_t)(uintptr_t)send};
        if (send->op.ended || send->claimed || !fill(send, window)) {
            kvf_window_give(core, window);
            kvf_send_forget_ahead(send);
            continue;
        }
        send->ahead.n_posted++;
        core->n_ahead++;
        core->n_posted++;
        core->out.digest(core->out.ctx, window);
    }
}

void kvf_send_ahead(kvf_send_op_t *send) {
    kvf_core_t *core = send->op.core;
    /* Who does not want digests talks to others that do not, as a rule. */
    if (!core->agent.digests || send->op.ended || send->claimed) {
        return;
    }
    if (!send->ahead.listed) {
        DL_APPEND2(core->ahead, send, ahead.prev, ahead.next);
        send->ahead.listed = true;
    }
    post_windows(core);
}

void kvf_send_on_ahead(kvf_send_op_t *send, kvf_window_t *window) {
    kvf_core_t *core = send->op.core;
    const kvf_plan_part_t *part = &send->parts[window->part_idx];
    send->ahead.n_posted--;
    core->n_ahead--;
    core->n_posted--;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        const kvf_piece_t *piece = &window->pieces[i];
        part->digests[place_of(send, part, piece->group_idx, piece->ordinal)] = piece->digest;
    }
    kvf_window_give(core, window);
    if (send->op.ended) {
        kvf_send_finish_off(send);
        kvf_op_reap(&send->op);
    }
    post_windows(core);
}

bool kvf_send_knows_digest(const kvf_send_op_t *send, const kvf_plan_part_t *part,
                           kvf_piece_t *piece) {
    if (part->digests == NULL) {
        return false;
    }
    /* A digest of 0 is made anew. */
    piece->digest = part->digests[place_of(send, part, piece->group_idx, piece->ordinal)];
    return piece->digest != 0;
}
