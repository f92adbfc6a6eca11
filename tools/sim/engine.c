/* SPDX-License-Identifier: Apache-2.0 */
/* The engines: what they ask of their nodes, and when. */
#include "tools/sim/world_impl.h"

#include "kvmgr/capacity.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TRIES 20
/* Requests take their ids from few, so that two of one id meet now and then. */
#define N_IDS 12

void engine_later(request_t *request, engine_act_t act, uint32_t which, uint32_t node,
                  uint32_t life, uint64_t delay_us) {
    kvf_world_t *world = request->send.world;
    world->n_acts++;
    world_push(world, (event_t){.at_us = world->now_us + delay_us,
                                .kind = EVENT_ENGINE,
                                .node = (uint8_t)node,
                                .from = (uint8_t)node,
                                .life = life,
                                .a = act,
                                .b = (uint8_t)which,
                                .ptr = request});
}

/* ---- drawing a request ---- */

/* All at once, layer by layer, chunk by chunk, or both. */
static void draw_steps(request_t *request, uint32_t n_layers) {
    kvf_dice_t *dice = &request->dice;
    bool by_layer = kvf_dice_hit(dice, 400), by_chunk = kvf_dice_hit(dice, 500);
    int64_t prompt = request->lengths.prompt_len, at = 0;
    request->chunked = by_chunk;
    while (at < prompt) {
        uint32_t room = 16 - request->n_steps;
        bool last = !by_chunk || room <= 2 * n_layers;
        int64_t end = at + (int64_t)kvf_dice_between(dice, 1, (uint64_t)prompt / 2 + 1);
        at = last || end > prompt ? prompt : end;
        for (uint32_t layer = 0; layer < n_layers;) {
            uint32_t next = layer + (uint32_t)kvf_dice_between(dice, 1, n_layers - layer);
            next = by_layer && room > n_layers ? next : n_layers;
            request->steps[request->n_steps++] = (step_t){at, layer, next};
            layer = next;
        }
    }
}

/* What keeps it from success, on purpose. */
static void draw_ends(request_t *request) {
    kvf_dice_t *dice = &request->dice;
    kvf_world_t *world = request->send.world;
    request->fails_at =
        kvf_dice_hit(dice, 60) ? (uint32_t)kvf_dice_below(dice, request->n_steps) : UINT32_MAX;
    request->no_tokens = kvf_dice_hit(dice, 30);
    if (kvf_dice_hit(dice, 80)) {
        request->n_recvs = 0;
    } else if (kvf_dice_hit(dice, 150)) {
        request->n_recvs = 2;
        request->generation[1] = request->generation[0];
        if (kvf_dice_hit(dice, 500)) {
            request->generation[1] = world->script->n_context +
                                     (uint32_t)kvf_dice_below(dice, world->script->n_generation);
        }
        if (request->generation[1] == request->context) {
            request->generation[1] = request->generation[0];
        }
    }
    request->clean =
        request->fails_at == UINT32_MAX && !request->no_tokens && request->n_recvs == 1;
}

static request_t *draw_request(kvf_world_t *world, uint64_t seed, bool probe) {
    request_t *request = arena_take(&world->arena, sizeof(*request));
    kvf_dice_t *dice = &request->dice;
    const kvf_script_t *script = world->script;
    uint64_t longest = kvf_dice_hit(dice, 50) ? 80 : 32;
    dice->state = seed;
    request->tag = ++world->n_tags;
    request->probe = probe;
    request->send = (op_t){.world = world, .request = request, .is_send = true};
    (void)snprintf(request->id, sizeof(request->id), "r%u",
                   (unsigned)(probe ? N_IDS + request->tag : kvf_dice_below(dice, N_IDS)));
    request->lengths = (kvf_lengths_t){
        .prompt_len = (int64_t)kvf_dice_between(dice, 1, longest),
        .draft_len = (int64_t)kvf_dice_below(dice, 4),
        .num_extra_kv_tokens = (int64_t)kvf_dice_below(dice, 4),
    };
    int64_t prompt = request->lengths.prompt_len;
    request->cached_tokens =
        kvf_dice_hit(dice, 300) ? (int64_t)kvf_dice_between(dice, 0, (uint64_t)prompt) : 0;
    request->context = (uint32_t)kvf_dice_below(dice, script->n_context);
    request->generation[0] =
        script->n_context + (uint32_t)kvf_dice_below(dice, script->n_generation);
    if (script->both && kvf_dice_hit(dice, 400)) { /* the other way round */
        uint32_t node = request->context;
        request->context = request->generation[0];
        request->generation[0] = node;
    }
    request->n_recvs = 1;
    request->fails_at = UINT32_MAX;
    request->clean = true;
    request->bind_stale = kvf_dice_hit(dice, 200);
    request->skip_holes = kvf_dice_hit(dice, 100);
    request->early_ticket = kvf_dice_hit(dice, 400);
    request->pull = kvf_dice_hit(dice, 500);
    draw_steps(request, world->n_layers);
    if (script->scenario->ends && !probe) {
        draw_ends(request);
    }
    for (uint32_t i = 0; i < 2; i++) {
        request->recvs[i] = (op_t){.world = world, .request = request, .which = (uint8_t)i};
    }
    return request;
}

void engine_request(kvf_world_t *world, uint64_t seed) {
    request_t *request = draw_request(world, seed, false);
    world_note(world,
               "REQUEST %s (tag %u): %d tokens, %s -> %s, %u steps, %u receives, %d cached%s",
               request->id, (unsigned)request->tag, (int)request->lengths.prompt_len,
               world->nodes[request->context].name, world->nodes[request->generation[0]].name,
               request->n_steps, request->n_recvs, (int)request->cached_tokens,
               request->pull ? ", pulled" : "");
    engine_later(request, ACT_SEND_OPEN, 0, request->context, WORLD_ANY_LIFE, 0);
}

void engine_probe(kvf_world_t *world) {
    const kvf_script_t *script = world->script;
    world->probed = true;
    world_note(world, "probes");
    for (uint32_t i = 0; i < script->n_context || i < script->n_generation; i++) {
        request_t *request = draw_request(world, script->seed + i, true);
        request->context = i % script->n_context;
        request->generation[0] = script->n_context + i % script->n_generation;
        engine_later(request, ACT_SEND_OPEN, 0, request->context, WORLD_ANY_LIFE, 0);
    }
}

/* ---- what both sides do ---- */

static void opened(op_t *op, node_t *node) {
    kvf_world_t *world = op->world;
    for (const op_t *other = world->ops; other != NULL; other = other->next) {
        if (other->is_send == op->is_send && !other->ended && !other->lost &&
            other->node == op->node && strcmp(other->request->id, op->request->id) == 0 &&
            !kvf_core_has_events(node->core)) {
            world_fail(world, "%s has two live %s of request %s", node->name,
                       op->is_send ? "sends" : "receives", op->request->id);
        }
    }
    op->opened = true;
    hold_known(op);
    op->paused_us = node->paused_us;
    op->next = world->ops;
    world->ops = op;
    *(op->is_send ? &world->outcome->sends : &world->outcome->receives) += 1;
}

/* What an engine does right may be refused for these reasons only. */
static void check_refusal(op_t *op, kvf_status_t status, const kvf_detail_t *detail,
                          const char *what) {
    const request_t *request = op->request;
    if (request->probe ||
        !(status == KVF_ERR_DUPLICATE || status == KVF_ERR_AGAIN || status == KVF_ERR_NO_MEMORY ||
          status == KVF_ERR_CANCELLED || status == KVF_ERR_UNKNOWN)) {
        world_fail(op->world, "request %s: %s was refused with %s: %s", request->id, what,
                   kvf_status_name(status), detail->text);
    }
    world_note(op->world, "request %s: %s: %s", request->id, what, kvf_status_name(status));
}

/* The pool has no room for it now. */
static void try_again(op_t *op, engine_act_t act, uint32_t node) {
    request_t *request = op->request;
    kvf_world_t *world = op->world;
    bool poisoned = false;
    op->holds = true;
    hold_give(op);
    memset(op->n_blocks, 0, sizeof(op->n_blocks));
    if (request->tries++ < MAX_TRIES) {
        engine_later(request, act, op->which, node, WORLD_ANY_LIFE, 100000);
        return;
    }
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        poisoned |= kvf_pages_count(world->nodes[node].pages[g], KVF_PAGE_POISONED) > 0;
    }
    if (request->probe && !poisoned) {
        world_fail(world, "%s has no pages for a probe", world->nodes[node].name);
    }
}

static void make_tables(const op_t *op, kvf_table_t tables[WORLD_GROUPS]) {
    for (uint32_t g = 0; g < WORLD_GROUPS; g++) {
        tables[g] = (kvf_table_t){op->slots[g], op->n_blocks[g]};
    }
}

static int64_t capacity(const request_t *request, bool include_drafts) {
    int64_t tokens = 0;
    if (kvf_get_kv_capacity_tokens(&request->lengths, include_drafts, &tokens, NULL) != KVF_OK) {
        abort(); /* small numbers */
    }
    return tokens;
}

/* Give an operation up; twice, or after its end, does no harm. */
static void cancel(op_t *op, node_t *node, kvf_status_t reason) {
    kvf_status_t status = op->is_send ? kvf_core_send_cancel(node->core, op->id, reason)
                                      : kvf_core_recv_cancel(node->core, op->id);
    bool told = op->ended || (status != KVF_OK && kvf_core_has_events(node->core));
    if (status != (told ? KVF_ERR_UNKNOWN : KVF_OK)) {
        world_fail(op->world, "cancelling %s of request %s says %s",
                   op->ended ? "what has ended" : "what is alive", op->request->id,
                   kvf_status_name(status));
    }
    op->given_up = true;
}

/* ---- the context side ---- */

static void ticket_out(request_t *request, node_t *node) {
    if (request->has_ticket || kvf_core_send_ticket(node->core, request->send.id, request->ticket,
                                                    sizeof(request->ticket)) != KVF_OK) {
        return;
    }
    request->has_ticket = true;
    for (uint32_t i = 0; i < request->n_recvs; i++) {
        engine_later(request, ACT_RECV_OPEN, i, request->generation[i], WORLD_ANY_LIFE,
                     kvf_dice_delay(&request->dice, 5000, i == 0 ? 300000 : 2000000));
    }
}

static void send_open(request_t *request, node_t *node) {
    op_t *op = &request->send;
    kvf_world_t *world = op->world;
    kvf_dice_t *dice = &request->dice;
    kvf_table_t tables[WORLD_GROUPS];
    kvf_detail_t detail;
    int64_t tokens = capacity(request, false);
    op->node = node->idx;
    op->life = node->life;
    if (!hold_take(op, request->chunked ? 0 : request->lengths.prompt_len, tokens)) {
        try_again(op, ACT_SEND_OPEN, node->idx);
        return;
    }
    make_tables(op, tables);
    bool ends = world->script->scenario->ends && !request->probe;
    kvf_send_desc_t desc = {
        .request_id = request->id,
        .lengths = request->lengths,
        .allocated_tokens = tokens,
        .tables = tables,
        .n_tables = world->layout.n_groups,
        .chunked = request->chunked,
        .timeout_us = ends && kvf_dice_hit(dice, 300) ? kvf_dice_between(dice, 5000, 1000000) : 0,
    };
    kvf_status_t status =
        kvf_core_send_open(node->core, &desc, verdict_event, op, &op->id, &detail);
    if (status != KVF_OK) {
        check_refusal(op, status, &detail, "the send");
        hold_give(op);
        return;
    }
    opened(op, node);
    op->given_up = desc.timeout_us != 0;
    world_note(world, "%s: send %u of request %s (tag %u)", node->name, (unsigned)op->id,
               request->id, (unsigned)request->tag);
    for (int i = 0; i < 2 && ends && kvf_dice_hit(dice, 120); i++) {
        engine_later(request, ACT_CANCEL_SEND, 0, node->idx, node->life,
                     kvf_dice_delay(dice, 40000, 600000));
    }
    if (request->early_ticket) {
        ticket_out(request, node);
    }
    engine_later(request, ACT_STEP, 0, node->idx, node->life, kvf_dice_delay(dice, 500, 50000));
}

/* Compute a part of the prompt and say that it may be read; after the last, finish. */
static kvf_status_t compute(request_t *request, node_t *node, const step_t *step,
                            kvf_detail_t *detail) {
    op_t *op = &request->send;
    const kvf_layout_t *layout = &op->world->layout;
    kvf_table_t tables[WORLD_GROUPS];
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        int64_t t = layout->groups[g].tokens_per_block;
        for (int64_t o = 0; o * t < step->token_end; o++) {
            /* What was ready before is computed from the same tokens: the same bytes. */
            hold_fill(op, g, o, step->layer_first, step->layer_end);
        }
    }
    make_tables(op, tables);
    const kvf_range_t range = {.layer_first = step->layer_first,
                               .layer_end = step->layer_end,
                               .token_end = step->token_end,
                               .tables = request->chunked ? tables : NULL,
                               .n_tables = layout->n_groups};
    kvf_status_t status = kvf_core_send_ready(node->core, op->id, &range, detail);
    if (status == KVF_OK) {
        hold_known(op);
    }
    return status;
}

static kvf_status_t finish(request_t *request, node_t *node, kvf_detail_t *detail) {
    const int32_t tokens[5] = {(int32_t)request->tag, (int32_t)request->tag + 1,
                               (int32_t)request->tag + 2, (int32_t)request->tag + 3};
    const kvf_aux_t aux = {.first_tokens = tokens,
                           .n_first_tokens = request->no_tokens ? 0 : 1,
                           .draft_tokens = tokens + 1,
                           .n_draft_tokens = (size_t)request->lengths.draft_len,
                           .data = &request->tag,
                           .data_bytes = sizeof(request->tag)};
    return kvf_core_send_finish(node->core, request->send.id, &aux, detail);
}

static void step(request_t *request, node_t *node) {
    op_t *op = &request->send;
    kvf_dice_t *dice = &request->dice;
    kvf_detail_t detail;
    kvf_status_t status = KVF_OK;
    uint64_t delay_us = kvf_dice_delay(dice, 2000, 100000);
    if (op->ended) {
        return;
    }
    if (request->step == request->fails_at) {
        cancel(op, node, KVF_ERR_PREFILL_FAILED);
        return;
    }
    if (request->step < request->n_steps) {
        const step_t *now = &request->steps[request->step];
        if (request->chunked && !hold_take(op, now->token_end, capacity(request, false))) {
            if (request->tries++ >= MAX_TRIES) { /* preempted for good */
                cancel(op, node, KVF_ERR_PREFILL_FAILED);
                return;
            }
            status = KVF_ERR_AGAIN;
        } else {
            status = compute(request, node, now, &detail);
        }
    } else {
        status = finish(request, node, &detail);
    }
    if (status == KVF_OK && request->step++ == request->n_steps) {
        ticket_out(request, node);
        return;
    }
    if (status != KVF_OK && status != KVF_ERR_AGAIN) {
        check_refusal(op, status, &detail, "a step");
    }
    if (status != KVF_ERR_UNKNOWN) {
        engine_later(request, ACT_STEP, 0, node->idx, node->life, delay_us);
    }
}

/* ---- the generation side ---- */

/* Blocks that are here already hold what they should; one of the others may have no page. */
static void prepare(op_t *op) {
    request_t *request = op->request;
    const kvf_layout_t *layout = &op->world->layout;
    bool hole = request->skip_holes;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        for (int64_t o = 0; o < op->n_blocks[g]; o++) {
            if (!hold_is_wanted(request, g, o)) {
                hold_fill(op, g, o, 0, UINT32_MAX);
            } else if (hole && kvf_dice_hit(&request->dice, 200)) {
                node_t *node = &op->world->nodes[op->node];
                int32_t slot = op->slots[g][o];
                op->slots[g][o] = -1;
                node->owned[g][slot].owner = NULL;
                if (kvf_pages_release(node->pages[g], slot) != KVF_OK) {
                    world_fail(op->world, "a page that was just taken cannot be released");
                }
                hole = false;
            }
        }
    }
}

static void recv_open(request_t *request, node_t *node, uint32_t which) {
    op_t *op = &request->recvs[which];
    kvf_world_t *world = op->world;
    kvf_dice_t *dice = &request->dice;
    kvf_table_t tables[WORLD_GROUPS];
    kvf_detail_t detail;
    int64_t tokens = capacity(request, true);
    op->node = node->idx;
    op->life = node->life;
    if (!hold_take(op, request->lengths.prompt_len, tokens)) {
        try_again(op, ACT_RECV_OPEN, node->idx);
        return;
    }
    prepare(op);
    make_tables(op, tables);
    bool ends = world->script->scenario->ends && !request->probe;
    kvf_recv_desc_t desc = {
        .request_id = request->id,
        .ticket = request->ticket,
        .lengths = request->lengths,
        .allocated_tokens = tokens,
        .cached_tokens = request->cached_tokens,
        .tables = tables,
        .n_tables = world->layout.n_groups,
        .timeout_us = ends && kvf_dice_hit(dice, 200) ? kvf_dice_between(dice, 1000, 600000) : 0,
        .holes = request->skip_holes ? KVF_HOLES_SKIP : KVF_HOLES_STRICT,
        .direction = request->pull ? KVF_PULL : KVF_PUSH,
    };
    kvf_status_t status =
        kvf_core_recv_open(node->core, &desc, verdict_event, op, &op->id, &detail);
    if (status != KVF_OK) {
        check_refusal(op, status, &detail, "the receive");
        hold_give(op);
        return;
    }
    opened(op, node);
    op->given_up = desc.timeout_us != 0;
    op->due_us =
        world->now_us + (desc.timeout_us != 0 ? desc.timeout_us : node->config.request_timeout_us);
    world_note(world, "%s: receive %u of request %s (tag %u)", node->name, (unsigned)op->id,
               request->id, (unsigned)request->tag);
    for (int i = 0; i < 2 && ends && kvf_dice_hit(dice, 150); i++) {
        engine_later(request, ACT_CANCEL_RECV, which, node->idx, node->life,
                     kvf_dice_delay(dice, 20000, 600000));
    }
}

/* ---- events ---- */

void engine_event(node_t *node, const event_t *event) {
    request_t *request = event->ptr;
    kvf_core_set_time(node->core, node->world->now_us);
    node->world->n_acts--;
    switch ((engine_act_t)event->a) {
    case ACT_SEND_OPEN:
        send_open(request, node);
        break;
    case ACT_STEP:
        step(request, node);
        break;
    case ACT_RECV_OPEN:
        recv_open(request, node, event->b);
        break;
    case ACT_CANCEL_SEND:
        cancel(&request->send, node, KVF_ERR_CANCELLED);
        break;
    case ACT_CANCEL_RECV:
        cancel(&request->recvs[event->b], node, KVF_ERR_CANCELLED);
        break;
    case ACT_GIVE_SEND:
        hold_give(&request->send);
        break;
    case ACT_GIVE_RECV:
        if (request->recvs[event->b].status == KVF_OK) {
            hold_check(&request->recvs[event->b], "at the end of decoding");
        }
        hold_give(&request->recvs[event->b]);
        break;
    }
}

void engine_moved_badly(node_t *node, const kvf_transfer_id_t *transfer) {
    for (op_t *op = node->world->ops; op != NULL; op = op->next) {
        const node_t *to = &node->world->nodes[op->node];
        op_t *send = &op->request->send;
        if (!op->is_send && op->id == transfer->counter && !op->lost && to->core != NULL &&
            kvf_incarnation_equal(kvf_core_incarnation(to->core), &transfer->receiver) &&
            send->node == node->idx && send->life == node->life && !send->ended) {
            send->due_us = node->world->now_us;
            send->paused_us = node->paused_us;
        }
    }
}

void engine_drop(node_t *node) {
    for (op_t *op = node->world->ops; op != NULL; op = op->next) {
        op->lost |= op->node == node->idx && op->life == node->life;
    }
}

void engine_give_all(node_t *node) {
    for (op_t *op = node->world->ops; op != NULL; op = op->next) {
        if (op->node == node->idx && op->life == node->life && op->holds) {
            hold_give(op);
        }
    }
}

static bool op_done(const op_t *op) {
    return op->lost || op->released;
}

/* Whether it has poisoned pages for which a proof must come. */
static bool waits(const node_t *node) {
    const kvf_world_t *world = node->world;
    int64_t n = 0;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        n += kvf_pages_count(node->pages[g], KVF_PAGE_POISONED);
    }
    return n > 0 && !world->script->scenario->one_sided && !world->words_flipped;
}

bool engine_done(const kvf_world_t *world) {
    for (const op_t *op = world->ops; op != NULL; op = op->next) {
        if (!op_done(op)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < world->n_nodes; i++) {
        const node_t *node = &world->nodes[i];
        /* Its mover may need longer than a send, whose pages are poisoned then. */
        if (node->core == NULL || node->leaving || kvf_core_busy(node->core) || waits(node)) {
            return false;
        }
    }
    return world->n_acts == 0;
}

void engine_check_end(kvf_world_t *world) {
    for (const op_t *op = world->ops; op != NULL; op = op->next) {
        if (!op_done(op)) {
            world_fail(world, "%s: the %s of request %s (tag %u) waits for ever for its %s",
                       world->nodes[op->node].name, op->is_send ? "send" : "receive",
                       op->request->id, (unsigned)op->request->tag,
                       op->ended ? "released event" : "result");
            return;
        }
    }
}
