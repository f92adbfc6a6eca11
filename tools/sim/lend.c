/* SPDX-License-Identifier: Apache-2.0 */
/* Pools that are mapped by receivers of other nodes, which copy from them: what mover/mapped does
 * on one machine. Pages are read when they are read, whatever has become of their owner: memory
 * that is mapped outlives its process. A mapping that has ended is noticed by the owner after a
 * while. */
#include "tools/sim/world_impl.h"

#include "kernels/digest.h"

#include <string.h>

#define ANSWER_US 1000000 /* how long an answer is waited for */
#define BATCHES 4         /* the items of a job are copied at up to so many moments */

static mapping_t *find(const node_t *node, uint64_t peer) {
    mapping_t *mapping = node->mappings;
    while (mapping != NULL && (mapping->gone || mapping->peer != peer)) {
        mapping = mapping->next;
    }
    return mapping;
}

static void push_mapping(mapping_t *mapping, event_kind_t kind, uint32_t node, uint32_t life,
                         uint64_t delay_us) {
    kvf_world_t *world = mapping->world;
    world_push(world, (event_t){.at_us = world->now_us + delay_us,
                                .kind = (uint8_t)kind,
                                .node = (uint8_t)node,
                                .from = (uint8_t)node,
                                .life = life,
                                .ptr = mapping});
}

static uint64_t noticed_us(kvf_world_t *world) {
    return kvf_dice_delay(&world->dice, 200, 300000);
}

static void tell_returned(mapping_t *mapping) {
    push_mapping(mapping, EVENT_RETURNED, mapping->from, mapping->from_life,
                 noticed_us(mapping->world));
}

/* It is unmapped, or its process has ended. */
static void mapping_end(mapping_t *mapping) {
    mapping_t **at = &mapping->world->nodes[mapping->node].mappings;
    while (*at != mapping) {
        at = &(*at)->next;
    }
    *at = mapping->next;
    mapping->over = true;
    if (mapping->lent != 0) {
        tell_returned(mapping);
    }
}

kvf_status_t lend_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                      const int64_t *n_pages, kvf_detail_t *detail) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    uint64_t parts[2] = {0, 0};
    if (bytes == sizeof(parts)) {
        memcpy(parts, address, sizeof(parts));
    }
    if (bytes != sizeof(parts) || parts[0] >= world->n_nodes || find(node, peer) != NULL) {
        world_fail(world, "%s maps a peer twice, or at no address", node->name);
        return kvf_fail(detail, KVF_ERR_INVALID, "not an address");
    }
    if (node_hit(node, KVF_FAULT_MEMORY)) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory to map pools");
    }
    if (node_hit(node, KVF_FAULT_POST)) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "no mapping for once");
    }
    const node_t *from = &world->nodes[parts[0]];
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        if (n_pages[g] != from->n_pages) {
            world_fail(world, "%s expects %d pages of %s, which has %d", node->name,
                       (int)n_pages[g], from->name, (int)from->n_pages);
        }
    }
    mapping_t *mapping = arena_take(&world->arena, sizeof(*mapping));
    *mapping = (mapping_t){.world = world,
                           .node = node->idx,
                           .life = node->life,
                           .who = *kvf_core_incarnation(node->core),
                           .peer = peer,
                           .from = from->idx,
                           .from_life = (uint32_t)parts[1],
                           .next = node->mappings};
    node->mappings = mapping;
    push_mapping(mapping, EVENT_LEND, mapping->from, mapping->from_life,
                 kvf_dice_delay(&world->dice, 200, 20000));
    push_mapping(mapping, EVENT_MAP_LATE, node->idx, node->life, ANSWER_US);
    world_note(world, "%s asks %s for its pools", node->name, from->name);
    return KVF_OK;
}

void lend_unmap(void *ctx, uint64_t peer) {
    node_t *node = ctx;
    mapping_t *mapping = find(node, peer);
    if (mapping == NULL) {
        world_fail(node->world, "%s unmaps what is not mapped", node->name);
        return;
    }
    mapping->gone = true;
    if (mapping->n_users == 0) {
        mapping_end(mapping);
    }
}

/* The owner reads who asks, which may have ended meanwhile. */
static void lend(node_t *from, mapping_t *mapping) {
    kvf_world_t *world = from->world;
    mapping->lent = kvf_core_lend(from->core, &mapping->who);
    memcpy(mapping->bytes, from->bytes, sizeof(mapping->bytes));
    mapping->failed = mapping->lent == 0 || node_hit(from, KVF_FAULT_POST);
    world_note(world, "%s %s its pools to %s", from->name, mapping->failed ? "refuses" : "lends",
               world->nodes[mapping->node].name);
    if (mapping->over && mapping->lent != 0) {
        tell_returned(mapping);
    } else if (!mapping->over) {
        push_mapping(mapping, EVENT_MAPPED, mapping->node, mapping->life,
                     kvf_dice_delay(&world->dice, 200, 20000));
    }
}

static void mapped(node_t *node, mapping_t *mapping, bool well, const char *why) {
    if (mapping->over || mapping->ready) {
        return;
    }
    mapping->ready = well;
    if (!well) {
        mapping_end(mapping);
    }
    kvf_core_mapped(node->core, mapping->peer, well ? KVF_OK : KVF_ERR_IO, why);
}

/* ---- jobs ---- */

static void copy(node_t *node, kvf_verify_t *job, uint32_t first, uint32_t end) {
    kvf_world_t *world = node->world;
    const mapping_t *mapping = job->source;
    for (uint32_t i = first; i < end; i++) {
        kvf_verify_item_t *item = &job->items[i];
        uint8_t *to = node_page(node, item->group_idx, item->slot) + item->offset;
        if (!hold_check_copy(node, job, item)) {
            return;
        }
        memcpy(to,
               mapping->bytes[item->group_idx] +
                   (uint64_t)item->source_slot * world->page_bytes[item->group_idx] + item->offset,
               item->bytes);
        if (node_hit(node, KVF_FAULT_FLIP_DATA)) {
            to[0] ^= 1;
        }
        item->digest = job->digests ? kvf_digest(to, item->bytes) : 0;
        world->outcome->copied_bytes += item->bytes;
    }
    world_note(world, "%s copies items %u to %u of transfer %u from %s", node->name, first, end,
               (unsigned)job->recv_id, world->nodes[mapping->from].name);
}

bool lend_use(node_t *node, kvf_verify_t *job, uint64_t delay_us) {
    kvf_world_t *world = node->world;
    mapping_t *mapping = find(node, job->peer);
    if (mapping == NULL || !mapping->ready) {
        world_fail(world, "%s copies from pools that it has not mapped", node->name);
        return false;
    }
    mapping->n_users++;
    job->source = mapping;
    uint32_t step = job->n_items / (uint32_t)kvf_dice_between(&world->dice, 1, BATCHES) + 1;
    for (uint32_t first = 0; first < job->n_items; first += step) {
        uint32_t end = job->n_items - first < step ? job->n_items : first + step;
        world_push(world,
                   (event_t){.at_us = world->now_us + kvf_dice_below(&world->dice, delay_us + 1),
                             .kind = EVENT_COPY,
                             .node = (uint8_t)node->idx,
                             .from = (uint8_t)node->idx,
                             .life = node->life,
                             .a = (uint64_t)first << 32 | end,
                             .ptr = job});
    }
    return true;
}

void lend_unuse(const kvf_verify_t *job) {
    mapping_t *mapping = job->source;
    if (--mapping->n_users == 0 && mapping->gone) {
        mapping_end(mapping);
    }
}

void lend_digest(void *ctx, kvf_window_t *window) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    world_push(world, (event_t){.at_us = world->now_us + node_work_us(node),
                                .kind = EVENT_DIGESTED,
                                .node = (uint8_t)node->idx,
                                .from = (uint8_t)node->idx,
                                .life = node->life,
                                .ptr = window});
}

static void digested(node_t *node, kvf_window_t *window) {
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        kvf_piece_t *piece = &window->pieces[i];
        hold_check_reading(node, piece);
        if (window->digests && piece->digest == 0) {
            piece->digest = kvf_digest(piece->source, piece->bytes);
        }
    }
    kvf_core_moved(node->core, window, KVF_OK);
}

void lend_event(node_t *node, const event_t *event) {
    mapping_t *mapping = event->ptr;
    kvf_core_set_time(node->core, node->world->now_us);
    switch ((event_kind_t)event->kind) {
    case EVENT_LEND:
        lend(node, mapping);
        break;
    case EVENT_MAPPED:
        mapped(node, mapping, !mapping->failed, "it refused");
        break;
    case EVENT_MAP_LATE:
        mapped(node, mapping, false, "it does not answer");
        break;
    case EVENT_RETURNED:
        kvf_core_returned(node->core, mapping->lent);
        break;
    case EVENT_COPY:
        copy(node, event->ptr, (uint32_t)(event->a >> 32), (uint32_t)event->a);
        break;
    default:
        digested(node, event->ptr);
        break;
    }
}

void lend_drop(node_t *node) {
    while (node->mappings != NULL) {
        mapping_end(node->mappings);
    }
}
