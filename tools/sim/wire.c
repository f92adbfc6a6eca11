/* SPDX-License-Identifier: Apache-2.0 */
/* Control connections: bytes in order, each way; everything else can go wrong. */
#include "tools/sim/world_impl.h"

#include "proto/frame.h"

#include <string.h>
#include <xxhash.h>

static wire_t *wire_of(kvf_world_t *world, uint64_t conn, wire_end_t **end_p, wire_end_t **far_p) {
    wire_t *wire = world->wires[(conn - 1) / 2];
    *end_p = &wire->ends[(conn - 1) % 2];
    *far_p = &wire->ends[conn % 2];
    return wire;
}

static uint64_t far_conn(uint64_t conn) {
    return conn % 2 == 1 ? conn + 1 : conn - 1;
}

static uint64_t net_delay(kvf_world_t *world) {
    return kvf_dice_delay(&world->dice, 200, 20000);
}

/* Something goes to an end, behind what went before. */
static void push_to(kvf_world_t *world, signal_kind_t kind, uint64_t conn, uint64_t delay_us,
                    const uint8_t *data, size_t bytes) {
    wire_end_t *end, *far;
    (void)wire_of(world, conn, &end, &far);
    signal_box_t *box = arena_take(&world->arena, sizeof(*box) + bytes);
    uint64_t at_us = world->now_us + delay_us;
    box->kind = kind;
    box->bytes = bytes;
    if (bytes > 0) {
        memcpy(box->data, data, bytes);
    }
    *(end->last != NULL ? &end->last->next : &end->first) = box;
    end->last = box;
    end->last_us = at_us > end->last_us ? at_us : end->last_us;
    world_push(world, (event_t){.at_us = end->last_us,
                                .kind = EVENT_WIRE,
                                .node = (uint8_t)end->node,
                                .from = (uint8_t)far->node,
                                .life = end->life,
                                .a = conn});
}

kvf_status_t wire_dial(void *ctx, const char *address, uint64_t *conn_p, kvf_detail_t *detail) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    uint32_t to = 0;
    while (to < world->n_nodes && strcmp(world->nodes[to].address, address) != 0) {
        to++;
    }
    if (to == world->n_nodes) { /* a ticket whose bytes were changed would not get this far */
        world_fail(world, "%s dials %s, which nobody has", node->name, address);
        return kvf_fail(detail, KVF_ERR_INVALID, "nobody has this address");
    }
    if (node_hit(node, KVF_FAULT_MEMORY)) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a socket");
    }
    if (world->n_wires == world->wires_room) {
        size_t room = 2 * world->wires_room + 32;
        wire_t **wires = arena_take(&world->arena, room * sizeof(*wires));
        if (world->n_wires > 0) {
            memcpy(wires, world->wires, world->n_wires * sizeof(*wires));
        }
        world->wires = wires;
        world->wires_room = room;
    }
    wire_t *wire = arena_take(&world->arena, sizeof(*wire));
    wire->ends[0] = (wire_end_t){.node = node->idx, .life = node->life, .open = true};
    wire->made_us = world->now_us;
    wire->ends[1] = (wire_end_t){.node = to, .life = WORLD_ANY_LIFE, .open = false};
    world->wires[world->n_wires++] = wire;
    *conn_p = 2 * world->n_wires - 1;
    world_push(world, (event_t){.at_us = world->now_us + net_delay(world),
                                .kind = EVENT_ARRIVE,
                                .node = (uint8_t)to,
                                .from = (uint8_t)node->idx,
                                .a = *conn_p + 1});
    world_note(world, "%s dials %s", node->name, world->nodes[to].name);
    return KVF_OK;
}

void wire_arrive(kvf_world_t *world, const event_t *event) {
    wire_end_t *end, *far;
    wire_t *wire = wire_of(world, event->a, &end, &far);
    node_t *node = &world->nodes[end->node];
    if (wire->cut || (node->core == NULL && node->silent)) {
        return; /* nobody answers */
    }
    if (node->core == NULL) {
        push_to(world, SIGNAL_FIN, far_conn(event->a), net_delay(world), NULL, 0);
        return;
    }
    /* The machine answers for a process that stands still. */
    end->life = node->life;
    end->open = true;
    push_to(world, SIGNAL_ACCEPT, event->a, 0, NULL, 0);
    push_to(world, SIGNAL_OPENED, far_conn(event->a), net_delay(world), NULL, 0);
}

/* The name of what was written: a frame has its type behind the magic. */
static void note_write(const node_t *node, const wire_end_t *far, const uint8_t *data,
                       size_t bytes) {
    kvf_world_t *world = node->world;
    const char *name = "preamble";
    if (world->trace == NULL) {
        return;
    }
    if (bytes >= KVF_FRAME_HEADER_BYTES && memcmp(data, "KVFR", 4) == 0) {
        name = kvf_frame_type_name((kvf_frame_type_t)(data[4] | data[5] << 8));
    }
    if (strcmp(name, kvf_frame_type_name(KVF_FRAME_HEARTBEAT)) != 0) {
        world_note(world, "%s -> %s: %s, %zu bytes", node->name, world->nodes[far->node].name, name,
                   bytes);
    }
}

void wire_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    wire_end_t *end, *far;
    wire_t *wire = wire_of(world, conn, &end, &far);
    world_hash(world, XXH3_64bits(data, bytes));
    if (end->open && !wire->cut && far->open) {
        if (bytes > KVF_FRAME_HEADER_BYTES && node_hit(node, KVF_FAULT_FLIP_WORDS)) {
            uint64_t bit = kvf_dice_below(&world->dice, bytes * 8);
            data[bit / 8] = (uint8_t)(data[bit / 8] ^ (1U << (bit % 8)));
            world->words_flipped = wire->flipped = true;
            world_note(world, "the next frame has bit %u flipped", (unsigned)bit);
        }
        note_write(node, far, data, bytes);
        size_t first = kvf_dice_hit(&world->dice, 200) ? kvf_dice_below(&world->dice, bytes) : 0;
        if (first > 0) {
            push_to(world, SIGNAL_BYTES, far_conn(conn), net_delay(world), data, first);
        }
        push_to(world, SIGNAL_BYTES, far_conn(conn), net_delay(world), data + first, bytes - first);
    }
    kvf_free(&node->alloc, data);
}

void wire_close(void *ctx, uint64_t conn) {
    node_t *node = ctx;
    wire_end_t *end, *far;
    wire_t *wire = wire_of(node->world, conn, &end, &far);
    end->open = false;
    if (!wire->cut && far->open) {
        push_to(node->world, SIGNAL_FIN, far_conn(conn), net_delay(node->world), NULL, 0);
    }
}

void wire_event(node_t *node, const event_t *event) {
    kvf_world_t *world = node->world;
    wire_end_t *end, *far;
    (void)wire_of(world, event->a, &end, &far);
    const signal_box_t *box = end->first;
    if (!end->open || box == NULL) {
        return; /* closed on this side meanwhile */
    }
    end->first = box->next;
    end->last = box->next == NULL ? NULL : end->last;
    kvf_core_set_time(node->core, world->now_us);
    switch (box->kind) {
    case SIGNAL_ACCEPT:
    case SIGNAL_OPENED:
        kvf_core_opened(node->core, event->a, box->kind == SIGNAL_ACCEPT,
                        world->nodes[far->node].address);
        break;
    case SIGNAL_BYTES:
        if (!end->deaf) {
            kvf_core_bytes(node->core, event->a, box->data, box->bytes);
        }
        break;
    case SIGNAL_FIN:
        end->open = false;
        kvf_core_closed(node->core, event->a, "connection reset");
        break;
    }
}

/* An end learns of a broken connection: at once or much later, with what had been written before or
 * without it. */
static void tell_later(kvf_world_t *world, uint64_t conn, bool deaf, uint64_t delay_us) {
    wire_end_t *end, *far;
    (void)wire_of(world, conn, &end, &far);
    if (end->open) {
        end->deaf = deaf;
        push_to(world, SIGNAL_FIN, conn, delay_us, NULL, 0);
    }
}

static void cut(kvf_world_t *world, size_t idx, uint64_t noticed_us, kvf_dice_t *dice) {
    world->wires[idx]->cut = true;
    for (uint64_t conn = 2 * idx + 1; conn <= 2 * idx + 2; conn++) {
        bool deaf = kvf_dice_hit(dice, 500);
        tell_later(world, conn, deaf, kvf_dice_delay(dice, 1000, noticed_us));
    }
}

void wire_cut(kvf_world_t *world, uint32_t a, uint32_t b, uint64_t older_us, uint64_t noticed_us,
              kvf_dice_t *dice) {
    for (size_t i = 0; i < world->n_wires; i++) {
        const wire_t *wire = world->wires[i];
        uint32_t from = wire->ends[0].node, to = wire->ends[1].node;
        if (!wire->cut && world->now_us >= wire->made_us + older_us &&
            ((from == a && to == b) || (from == b && to == a))) {
            cut(world, i, noticed_us, dice);
        }
    }
}

void wire_cut_flipped(kvf_world_t *world) {
    for (size_t i = 0; i < world->n_wires; i++) {
        if (world->wires[i]->flipped && !world->wires[i]->cut) {
            cut(world, i, CUT_NOTICED_US, &world->dice);
        }
    }
}

void wire_drop(node_t *node, kvf_dice_t *dice) {
    kvf_world_t *world = node->world;
    for (size_t i = 0; i < world->n_wires; i++) {
        for (uint64_t conn = 2 * i + 1; conn <= 2 * i + 2; conn++) {
            wire_end_t *end, *far;
            (void)wire_of(world, conn, &end, &far);
            if (end->node == node->idx && end->life == node->life && end->open) {
                end->open = false;
                bool deaf = kvf_dice_hit(dice, 500);
                if (!node->silent) {
                    tell_later(world, far_conn(conn), deaf, kvf_dice_delay(dice, 500, 5000));
                }
            }
        }
    }
}
