/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine is told, and whether that can be true. */
#include "tools/sim/world_impl.h"

#include <inttypes.h>
#include <string.h>

static node_t *node_of(const op_t *op) {
    return &op->world->nodes[op->node];
}

static void refuse(op_t *op, const char *what) {
    world_fail(op->world, "%s: the %s of request %s (tag %u): %s", node_of(op)->name,
               op->is_send ? "send" : "receive", op->request->id, (unsigned)op->request->tag, what);
}

bool verdict_unharmed(const kvf_world_t *world) {
    uint64_t faults = 0;
    for (int fault = 0; fault < KVF_FAULTS; fault++) {
        faults += fault == KVF_FAULT_RECONNECT ? 0 : world->outcome->faults[fault];
    }
    return faults == 0;
}

/* Nothing happened that could have kept it from success. */
static bool must_succeed(const op_t *op) {
    const request_t *request = op->request;
    return request->clean && (request->probe || verdict_unharmed(op->world)) &&
           !request->send.given_up && !request->recvs[0].given_up;
}

/* A receive succeeded: it has each byte that it asked for, and the tokens. */
static void check_received(op_t *op, const kvf_event_t *event) {
    kvf_world_t *world = op->world;
    const request_t *request = op->request;
    uint64_t pages = 0, bytes = 0, holes = 0;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        int64_t t = world->layout.groups[g].tokens_per_block;
        for (int64_t o = 0; o * t < request->lengths.prompt_len; o++) {
            bool wanted = hold_is_wanted(request, g, o), bound = op->slots[g][o] >= 0;
            pages += wanted && bound;
            bytes += wanted && bound ? world->page_bytes[g] : 0;
            holes += wanted && !bound;
        }
    }
    hold_check(op, "at its result");
    if (event->pages != pages || event->bytes != bytes || event->n_missing != holes) {
        refuse(op, "it counts other pages, bytes or holes than there are");
    }
    if (op->landed_bytes != bytes) {
        refuse(op, "other bytes were written to its pages than it wanted");
    }
    if (world->words_flipped) {
        return; /* nothing protects words of a control frame */
    }
    if (request->no_tokens || event->aux == NULL || event->aux->n_first_tokens != 1 ||
        event->aux->first_tokens[0] != (int32_t)request->tag ||
        event->aux->n_draft_tokens != (size_t)request->lengths.draft_len ||
        event->aux->data_bytes != sizeof(request->tag) ||
        memcmp(event->aux->data, &request->tag, sizeof(request->tag)) != 0) {
        refuse(op, "it has other tokens than were handed over");
    }
    if (request->recvs[0].opened && request->recvs[1].opened && request->recvs[0].ended &&
        request->recvs[1].ended && request->recvs[0].status == KVF_OK &&
        request->recvs[1].status == KVF_OK) {
        refuse(op, "its ticket was good for two receives");
    }
}

static void on_result(op_t *op, const kvf_event_t *event) {
    kvf_world_t *world = op->world;
    request_t *request = op->request;
    if (op->ended) {
        refuse(op, "it has two results");
        return;
    }
    op->ended = true;
    op->status = event->status;
    world->outcome->results[-event->status % KVF_WORLD_STATUSES]++;
    if (event->status == KVF_ERR_EXPIRED && op->is_send && !request->recvs[0].opened) {
        request->clean = false; /* there was no room for its receive in time */
    }
    if (must_succeed(op) && event->status != KVF_OK) {
        world_fail(world, "%s: the %s of request %s ended with %s, when nothing was wrong: %s",
                   node_of(op)->name, op->is_send ? "send" : "receive", request->id,
                   kvf_status_name(event->status), event->message);
    }
    if (event->status == KVF_ERR_INTERNAL) {
        refuse(op, event->message);
    }
    uint64_t stood = node_of(op)->paused_us - op->paused_us;
    if (op->due_us != 0 && world->now_us > op->due_us + stood) {
        refuse(op, op->is_send ? "its result comes long after a window failed"
                               : "its result comes after its deadline");
    }
    if (!op->is_send) {
        if (event->status == KVF_OK) {
            check_received(op, event);
        }
    } else if (event->status == KVF_OK && !world->words_flipped) {
        bool received = false;
        for (uint32_t i = 0; i < request->n_recvs; i++) {
            const op_t *recv = &request->recvs[i];
            received |= recv->opened && (recv->lost || (recv->ended && recv->status == KVF_OK));
        }
        if (!received) {
            refuse(op, "it succeeded, and no receive did");
        }
    }
    /* Giving pages back before the released event is allowed. */
    if (event->status != KVF_OK && kvf_dice_hit(&request->dice, 300)) {
        hold_give(op);
    }
}

static void on_released(op_t *op, const kvf_event_t *event) {
    kvf_world_t *world = op->world;
    node_t *node = node_of(op);
    kvf_dice_t *dice = &op->request->dice;
    if (!op->ended || op->released) {
        refuse(op, op->released ? "it is released twice" : "it is released without a result");
        return;
    }
    op->released = true;
    if (event->n_poisoned > 0 && !op->is_send && !world->script->scenario->one_sided) {
        refuse(op, "it lists poisoned pages, when its handler makes the copies");
    }
    if (event->n_poisoned > 0 && verdict_unharmed(world)) {
        refuse(op, "it lists poisoned pages, when nothing kept the proof from coming");
    }
    for (size_t i = 0; i < event->n_poisoned; i++) {
        const kvf_page_ref_t *ref = &event->poisoned[i];
        if (op->slots[ref->group_idx][ref->ordinal] != ref->slot) {
            refuse(op, "it lists a page as poisoned that it did not have");
            return;
        }
        node->owned[ref->group_idx][ref->slot].poisoned = true;
    }
    world->outcome->poisoned += event->n_poisoned;
    if (op->is_send && op->status == KVF_OK) {
        hold_check(op, "when its source was released");
    }
    if (!op->holds) {
        hold_disown(op);
        return;
    }
    /* At once, when whoever comes next finds them; or after a while. */
    uint64_t delay_us = kvf_dice_delay(dice, 20000, 400000);
    if (op->status != KVF_OK && kvf_dice_hit(dice, 500)) {
        hold_give(op);
    } else {
        engine_later(op->request, op->is_send ? ACT_GIVE_SEND : ACT_GIVE_RECV, op->which, op->node,
                     op->life, delay_us);
    }
}

void verdict_event(void *ctx, const kvf_event_t *event) {
    op_t *op = ctx;
    kvf_world_t *world = op->world;
    node_t *node = node_of(op);
    world_hash(world, op->request->tag << 16 | (uint64_t)event->kind << 8 |
                          (uint64_t)(-event->status & 0xff));
    world_note(world, "%s: %s %u of request %s (tag %u): %s%s %s", node->name,
               op->is_send ? "send" : "receive", (unsigned)op->id, op->request->id,
               (unsigned)op->request->tag,
               event->kind == KVF_EVENT_RESULT     ? "RESULT "
               : event->kind == KVF_EVENT_RELEASED ? "RELEASED"
                                                   : "progress",
               event->kind == KVF_EVENT_RESULT ? kvf_status_name(event->status) : "",
               event->kind == KVF_EVENT_RESULT ? event->message : "");
    if (op->life != node->life || !op->opened) {
        refuse(op, "an event of an operation that this process does not have");
        return;
    }
    switch (event->kind) {
    case KVF_EVENT_PROGRESS:
        if (op->ended || op->is_send || event->layer_first != op->layers ||
            event->layer_end <= op->layers) {
            refuse(op, "progress goes backward, leaves layers out, or comes after the result");
        }
        op->layers = event->layer_end;
        break;
    case KVF_EVENT_RESULT:
        on_result(op, event);
        break;
    case KVF_EVENT_RELEASED:
        on_released(op, event);
        break;
    }
}
