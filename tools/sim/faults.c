/* SPDX-License-Identifier: Apache-2.0 */
/* What goes wrong, and the end of all that. */
#include "tools/sim/world_impl.h"

#include <string.h>

static node_t *draw_node(kvf_world_t *world, kvf_dice_t *dice) {
    return &world->nodes[kvf_dice_below(dice, world->n_nodes)];
}

/* Two nodes; mostly one of each side. */
static void draw_pair(kvf_world_t *world, kvf_dice_t *dice, uint32_t *a_p, uint32_t *b_p) {
    *a_p = (uint32_t)kvf_dice_below(dice, world->script->n_context);
    *b_p = world->script->n_context + (uint32_t)kvf_dice_below(dice, world->script->n_generation);
    if (world->script->both && kvf_dice_hit(dice, 300)) {
        *a_p = (uint32_t)kvf_dice_below(dice, world->n_nodes);
        *b_p = (*a_p + 1) % world->n_nodes;
    }
}

/* No longer than the script says; mostly short against the time in which a peer is lost. */
static uint64_t draw_end(const kvf_world_t *world, kvf_dice_t *dice) {
    uint64_t end_us = world->now_us + kvf_dice_delay(dice, 600000, 6000000) + 1;
    return end_us < world->end_us ? end_us : world->end_us;
}

static void restart_later(kvf_world_t *world, const node_t *node, kvf_dice_t *dice) {
    world_push(world, (event_t){.at_us = world->now_us + kvf_dice_delay(dice, 2000, 3000000),
                                .kind = EVENT_RESTART,
                                .node = (uint8_t)node->idx,
                                .from = (uint8_t)node->idx});
}

static void crash(kvf_world_t *world, node_t *node, kvf_dice_t *dice) {
    if (node->core != NULL) {
        node->silent = kvf_dice_hit(dice, 300);
        wire_drop(node, dice);
        node_kill(node);
        restart_later(world, node, dice);
    }
}

static void stand_still(kvf_world_t *world, node_t *node, uint64_t end_us) {
    if (node->core != NULL && !node->paused) {
        node_pause(node);
        world_push(world, (event_t){.at_us = end_us,
                                    .kind = EVENT_RESUME,
                                    .node = (uint8_t)node->idx,
                                    .from = (uint8_t)node->idx});
    }
}

static void end_in_order(kvf_world_t *world, node_t *node) {
    if (node->core != NULL && !node->paused && !node->leaving) {
        node->leaving = true;
        kvf_core_set_time(node->core, world->now_us);
        kvf_core_shutdown(node->core);
        node_turn(node);
    }
}

void fault_begin(kvf_world_t *world, kvf_fault_t fault, uint64_t seed) {
    kvf_dice_t dice = {seed};
    uint32_t a, b;
    node_t *node = draw_node(world, &dice);
    uint64_t end_us = draw_end(world, &dice);
    draw_pair(world, &dice, &a, &b);
    switch (fault) {
    case KVF_FAULT_CUT:
    case KVF_FAULT_RECONNECT:
    case KVF_FAULT_PARTITION:
    case KVF_FAULT_BREAK:
        world_note(world, "FAULT %s: %s and %s, until %u.%03u", kvf_fault_name(fault),
                   world->nodes[a].name, world->nodes[b].name, (unsigned)(end_us / 1000000),
                   (unsigned)(end_us / 1000 % 1000));
        break;
    default:
        world_note(world, "FAULT %s: %s, until %u.%03u", kvf_fault_name(fault), node->name,
                   (unsigned)(end_us / 1000000), (unsigned)(end_us / 1000 % 1000));
        break;
    }
    switch (fault) {
    case KVF_FAULT_CUT:
        wire_cut(world, a, b, 0, CUT_NOTICED_US, &dice);
        break;
    case KVF_FAULT_RECONNECT:
        wire_cut(world, a, b, HANDSHAKE_OVER_US, 1000, &dice);
        break;
    case KVF_FAULT_PARTITION:
        world->parted_us[a][b] = world->parted_us[b][a] = end_us;
        break;
    case KVF_FAULT_CRASH:
        crash(world, node, &dice);
        break;
    case KVF_FAULT_PAUSE:
        stand_still(world, node, end_us);
        break;
    case KVF_FAULT_SHUTDOWN:
        end_in_order(world, node);
        break;
    case KVF_FAULT_BREAK:
        carry_break(world, a, b, &dice);
        break;
    case KVF_FAULT_MEMORY:
        node->until_us[fault] = end_us;
        node->rate[fault] =
            (uint32_t)kvf_dice_between(&dice, 1, kvf_dice_hit(&dice, 500) ? 20 : 400);
        break;
    case KVF_FAULT_POST:
    case KVF_FAULT_SLOW:
    case KVF_FAULT_LOSE:
    case KVF_FAULT_REPEAT:
    case KVF_FAULT_FORGE:
    case KVF_FAULT_FLIP_DATA:
    case KVF_FAULT_FLIP_WORDS:
        node->until_us[fault] = end_us;
        node->rate[fault] = (uint32_t)kvf_dice_between(&dice, 20, 500);
        break;
    case KVF_FAULTS:
        break;
    }
}

void faults_end(kvf_world_t *world) {
    world_note(world, "the faults are over");
    world->quiet = true;
    memset(world->parted_us, 0, sizeof(world->parted_us));
    wire_cut_flipped(world);
    /* Until every broken connection has been noticed. */
    world_push(world, (event_t){.at_us = world->now_us + CUT_NOTICED_US + 9 * world->heartbeat_us,
                                .kind = EVENT_PROBE});
    for (uint32_t i = 0; i < world->n_nodes; i++) {
        node_t *node = &world->nodes[i];
        memset(node->until_us, 0, sizeof(node->until_us));
        node_resume(node);
        if (node->core == NULL) {
            node_start(node);
        }
    }
}
