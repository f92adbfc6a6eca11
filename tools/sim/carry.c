/* SPDX-License-Identifier: Apache-2.0 */
/* Copies. A chunk waits at its sender, is read, is under way, arrives. With a checked mover the
 * receiving process takes it in and may refuse it; with a one-sided one the network cards of both
 * machines do all that, whatever the processes do meanwhile. What is under way outlives its sender,
 * its path and its transfer. */
#include "tools/sim/world_impl.h"

#include "kernels/copy.h"
#include "kernels/digest.h"

#include <string.h>

static bool one_sided(const kvf_world_t *world) {
    return world->script->scenario->one_sided;
}

static path_t *find_path(const node_t *node, uint64_t number) {
    path_t *path = node->paths;
    while (path != NULL && path->number != number) {
        path = path->next;
    }
    return path;
}

kvf_status_t carry_connect(void *ctx, uint64_t peer, uint32_t mover_idx, const void *address,
                           size_t bytes, kvf_detail_t *detail) {
    (void)mover_idx;
    node_t *node = ctx;
    uint64_t parts[2];
    if (bytes != sizeof(parts) || find_path(node, peer) != NULL) {
        if (!node->world->words_flipped) {
            world_fail(node->world, "%s connects its mover to a peer twice, or to no address",
                       node->name);
        }
        return kvf_fail(detail, KVF_ERR_INVALID, "not an address");
    }
    if (node_hit(node, KVF_FAULT_POST)) {
        return kvf_fail(detail, KVF_ERR_IO, "no path for once");
    }
    memcpy(parts, address, sizeof(parts));
    path_t *path = arena_take(&node->world->arena, sizeof(*path));
    *path = (path_t){.number = peer,
                     .node = (uint32_t)(parts[0] % node->world->n_nodes),
                     .life = (uint32_t)parts[1],
                     .next = node->paths};
    node->paths = path;
    return KVF_OK;
}

/* A window is done when all of it was read; with a one-sided mover, which has nobody at the other
 * end to refuse, when all of it has arrived or never will. But one that fails may be done at once:
 * so does UCX when an endpoint is closed by force, which says nothing about what had left. */
static void report_if_done(kvf_world_t *world, job_t *job) {
    bool arrived = !one_sided(world) || job->n_flying == 0;
    bool forced = job->forced && job->status != KVF_OK;
    if (!job->reported && job->n_waiting == 0 && (arrived || forced)) {
        job->reported = true;
        world_push(world, (event_t){.at_us = world->now_us + kvf_dice_below(&world->dice, 50),
                                    .kind = EVENT_MOVED,
                                    .node = (uint8_t)job->node,
                                    .from = (uint8_t)job->node,
                                    .life = job->life,
                                    .ptr = job});
    }
}

/* What has not left yet does not leave any more. */
static void fail_jobs(node_t *node, uint64_t number) {
    for (job_t *job = node->jobs; job != NULL; job = job->next) {
        if (!job->reported && job->window->peer == number) {
            job->status = KVF_ERR_PEER_LOST;
        }
    }
}

void carry_disconnect(void *ctx, uint64_t peer, uint32_t mover_idx) {
    (void)mover_idx;
    node_t *node = ctx;
    path_t **at = &node->paths;
    fail_jobs(node, peer);
    while (*at != NULL && (*at)->number != peer) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = (*at)->next;
    }
}

static void push_packet(kvf_world_t *world, packet_t *packet, event_kind_t kind, uint32_t node,
                        uint32_t life, uint64_t delay_us) {
    world_push(world, (event_t){.at_us = world->now_us + delay_us,
                                .kind = (uint8_t)kind,
                                .node = (uint8_t)node,
                                .from = (uint8_t)packet->from,
                                .life = life,
                                .ptr = packet});
}

static void cut_piece(node_t *node, const path_t *path, job_t *job, kvf_piece_t *piece) {
    kvf_world_t *world = node->world;
    uint64_t step = world->granule_bytes[piece->group_idx] * kvf_dice_between(&world->dice, 1, 8);
    bool slow = node_hit(node, KVF_FAULT_SLOW);
    for (uint64_t off = 0; off < piece->bytes; off += step) {
        uint64_t bytes = piece->bytes - off < step ? piece->bytes - off : step;
        packet_t *packet = arena_take(&world->arena, sizeof(*packet) + bytes);
        *packet = (packet_t){
            .chunk = {job->window->transfer, piece->group_idx, piece->slot, piece->ordinal,
                      piece->generation, piece->offset + off, bytes, job->window->grant_key},
            .from = node->idx,
            .to = path->node,
            .to_life = path->life,
            .job = job,
            .piece = piece,
        };
        job->n_waiting++;
        push_packet(
            world, packet, one_sided(world) ? EVENT_FETCH : EVENT_LEAVE, node->idx, node->life,
            slow ? kvf_dice_below(&world->dice, 2000000) : kvf_dice_delay(&world->dice, 50, 5000));
    }
}

kvf_status_t carry_post(void *ctx, kvf_window_t *window) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    const path_t *path = find_path(node, window->peer);
    if (path == NULL || path->broken) {
        return KVF_ERR_PEER_LOST;
    }
    if (node_hit(node, KVF_FAULT_POST)) {
        return kvf_dice_hit(&world->dice, 700) ? KVF_ERR_AGAIN : KVF_ERR_PEER_LOST;
    }
    job_t *job = arena_take(&world->arena, sizeof(*job));
    *job = (job_t){.window = window,
                   .node = node->idx,
                   .life = node->life,
                   .status = node_hit(node, KVF_FAULT_POST) ? KVF_ERR_IO : KVF_OK,
                   .forced = kvf_dice_hit(&world->dice, 500),
                   .next = node->jobs};
    node->jobs = job;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        cut_piece(node, path, job, &window->pieces[i]);
    }
    world_note(world, "%s posts %u pieces of transfer %u to %s", node->name, window->n_pieces,
               (unsigned)window->transfer.counter, world->nodes[path->node].name);
    return KVF_OK;
}

/* ---- events ---- */

/* A chunk that looks like another one, of somebody who does not know the key, or of a sender that
 * takes another page, or one of earlier. */
static void forge(kvf_world_t *world, const packet_t *packet) {
    packet_t *forged = arena_take(&world->arena, sizeof(*forged) + packet->chunk.bytes);
    kvf_chunk_t *chunk = &forged->chunk;
    *forged = *packet;
    forged->forged = true;
    switch (kvf_dice_below(&world->dice, 10)) { /* most keep the transfer alive */
    case 0:
        chunk->generation -= kvf_dice_between(&world->dice, 1, 2);
        break;
    case 1:
        chunk->slot += chunk->slot > 0 ? -1 : 1;
        break;
    default:
        chunk->grant_key ^= kvf_dice_next(&world->dice) | 1;
        break;
    }
    push_packet(world, forged, EVENT_LAND, packet->to, packet->to_life,
                kvf_dice_delay(&world->dice, 200, 50000));
}

/* The bytes are read now, and are on their way. A piece is hashed when its first byte leaves, as a
 * real mover does. */
static void leave(kvf_world_t *world, const event_t *event) {
    packet_t *packet = event->ptr;
    job_t *job = packet->job;
    node_t *node = &world->nodes[packet->from];
    if (node->core == NULL || node->life != event->life) {
        return; /* died before */
    }
    uint64_t off = packet->chunk.offset - packet->piece->offset;
    job->n_waiting--;
    if (job->status == KVF_OK) {
        if (off == 0 && packet->piece->digest == 0) {
            packet->piece->digest = kvf_digest(packet->piece->source, packet->piece->bytes);
        }
        hold_check_reading(node, packet->piece);
        memcpy(packet->data, packet->piece->source + off, packet->chunk.bytes);
        if (node_hit(node, KVF_FAULT_FLIP_DATA)) {
            uint64_t bit = kvf_dice_below(&world->dice, packet->chunk.bytes * 8);
            packet->data[bit / 8] = (uint8_t)(packet->data[bit / 8] ^ (1U << (bit % 8)));
        }
        uint32_t copies = node_hit(node, KVF_FAULT_LOSE)     ? 0
                          : node_hit(node, KVF_FAULT_REPEAT) ? 2
                                                             : 1;
        bool slow = node_hit(node, KVF_FAULT_SLOW);
        for (uint32_t i = 0; i < copies; i++) {
            job->n_flying++;
            push_packet(world, packet, one_sided(world) ? EVENT_STORE : EVENT_LAND, packet->to,
                        packet->to_life,
                        slow ? kvf_dice_below(&world->dice, 4000000)
                             : kvf_dice_delay(&world->dice, 200, 50000));
        }
    }
    if (!one_sided(world) && node_hit(node, KVF_FAULT_FORGE)) {
        forge(world, packet);
    }
    report_if_done(world, job);
}

/* A one-sided write: nobody is asked. */
static void store(kvf_world_t *world, const event_t *event) {
    const packet_t *packet = event->ptr;
    node_t *node = &world->nodes[packet->to];
    packet->job->n_flying--;
    if (node->core != NULL && node->life == event->life) {
        hold_check_landing(node, packet);
        memcpy(node_page(node, packet->chunk.group_idx, packet->chunk.slot) + packet->chunk.offset,
               packet->data, packet->chunk.bytes);
    }
    report_if_done(world, packet->job);
}

static void land(node_t *node, const packet_t *packet) {
    kvf_world_t *world = node->world;
    packet->job->n_flying -= !packet->forged;
    kvf_landing_t landing;
    if (kvf_core_grant_check(node->core, &packet->chunk, &landing) == KVF_OK) {
        uint8_t *page =
            node_page(node, packet->chunk.group_idx, packet->chunk.slot) + packet->chunk.offset;
        uint8_t *to = landing.at == NULL ? page : landing.at;
        hold_check_landing(node, packet);
        if (landing.leaves != NULL) {
            kvf_copy_leaves(to, packet->data, packet->chunk.bytes, landing.leaves);
        } else {
            memcpy(to, packet->data, packet->chunk.bytes);
        }
        kvf_core_landed(node->core, &packet->chunk);
    } else {
        world_note(world, "%s refuses a chunk of transfer %u: group %u, ordinal %d, slot %d",
                   node->name, (unsigned)packet->chunk.transfer.counter, packet->chunk.group_idx,
                   (int)packet->chunk.ordinal, packet->chunk.slot);
    }
}

static void moved(node_t *node, job_t *job) {
    kvf_window_t *window = job->window;
    job_t **at = &node->jobs;
    while (*at != job) {
        at = &(*at)->next;
    }
    *at = job->next;
    if (job->status == KVF_ERR_IO) {
        engine_moved_badly(node, &window->transfer);
    }
    world_note(node->world, "%s: a window of transfer %u is %s", node->name,
               (unsigned)window->transfer.counter, kvf_status_name(job->status));
    kvf_core_moved(node->core, window, job->status);
}

static void verified(node_t *node, kvf_verify_t *job) {
    if (job->source != NULL) {
        lend_unuse(job);
    }
    for (uint32_t i = 0; i < job->n_items && job->source == NULL && job->status == KVF_OK; i++) {
        kvf_verify_item_t *item = &job->items[i];
        uint8_t *at = node_page(node, item->group_idx, item->slot) + item->offset;
        if (item->landing != NULL && hold_check_store(node, job, item)) {
            memcpy(at, item->landing, item->bytes);
        }
        item->digest = item->leaves != NULL ? kvf_digest_of_hashes(item->leaves, item->bytes)
                                            : kvf_digest(at, item->bytes);
    }
    kvf_core_verified(node->core, job);
}

void carry_event(kvf_world_t *world, const event_t *event) {
    node_t *node = &world->nodes[event->node];
    if (node->core != NULL) {
        kvf_core_set_time(node->core, world->now_us);
    }
    switch ((event_kind_t)event->kind) {
    case EVENT_FETCH:
    case EVENT_LEAVE:
        leave(world, event);
        break;
    case EVENT_STORE:
        store(world, event);
        break;
    case EVENT_LAND:
        land(node, event->ptr);
        break;
    case EVENT_MOVED:
        moved(node, event->ptr);
        break;
    case EVENT_VERIFIED:
        verified(node, event->ptr);
        break;
    default:
        kvf_core_broken(node->core, event->a, "the simulated path broke");
        break;
    }
}

/* ---- faults ---- */

static void break_one(kvf_world_t *world, node_t *node, uint32_t to, kvf_dice_t *dice) {
    for (path_t *path = node->paths; path != NULL; path = path->next) {
        if (path->node == to && !path->broken && node->core != NULL) {
            path->broken = true;
            fail_jobs(node, path->number);
            world_push(world, (event_t){.at_us = world->now_us + kvf_dice_delay(dice, 500, 100000),
                                        .kind = EVENT_BROKEN,
                                        .node = (uint8_t)node->idx,
                                        .from = (uint8_t)node->idx,
                                        .life = node->life,
                                        .a = path->number});
        }
    }
}

void carry_break(kvf_world_t *world, uint32_t a, uint32_t b, kvf_dice_t *dice) {
    break_one(world, &world->nodes[a], b, dice);
    break_one(world, &world->nodes[b], a, dice);
}

void carry_drop(node_t *node) {
    node->jobs = NULL;
    node->paths = NULL;
}
