/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of requests, and what is in them. Every word of every page says whose it is: it follows
 * from the request (each prefill has a tag of its own), the group, the ordinal and the place; what
 * a page holds before it is written follows from nothing that is ever asked for. */
#include "tools/sim/world_impl.h"

#include "kvmgr/capacity.h"

#include <string.h>

#define JUNK (UINT64_C(1) << 63) /* in tags of pages that nobody has written */

static uint64_t word(uint64_t tag, uint32_t group_idx, int64_t ordinal, uint64_t idx) {
    return kvf_dice_mix(tag * UINT64_C(0x9e3779b97f4a7c15) + ((uint64_t)group_idx << 56) +
                        ((uint64_t)ordinal << 32) + idx);
}

static void write_words(uint8_t *page, uint64_t tag, uint32_t group_idx, int64_t ordinal,
                        uint64_t first_byte, uint64_t end_byte) {
    for (uint64_t at = first_byte; at < end_byte; at += sizeof(uint64_t)) {
        uint64_t w = word(tag, group_idx, ordinal, at / sizeof(uint64_t));
        memcpy(page + at, &w, sizeof(w));
    }
}

/* Token by token, as the model sees it: the query after the prompt stands at position prompt. */
bool hold_is_live(const request_t *request, uint32_t group_idx, int64_t ordinal) {
    const kvf_layer_group_t *group = &request->send.world->layout.groups[group_idx];
    int64_t t = group->tokens_per_block, prompt = request->lengths.prompt_len;
    for (int64_t token = ordinal * t; ordinal * t < prompt && token < (ordinal + 1) * t; token++) {
        if (group->window == 0 || token > prompt - group->window || token < group->sinks) {
            return true;
        }
    }
    return false;
}

bool hold_is_wanted(const request_t *request, uint32_t group_idx, int64_t ordinal) {
    int64_t t = request->send.world->layout.groups[group_idx].tokens_per_block;
    return request->cached_tokens < request->lengths.prompt_len &&
           (ordinal + 1) * t > request->cached_tokens && hold_is_live(request, group_idx, ordinal);
}

static node_t *node_of(const op_t *op) {
    return &op->world->nodes[op->node];
}

/* One page for one block. Nobody else may still have to do with it. */
static bool take_one(op_t *op, uint32_t group_idx, int64_t ordinal) {
    node_t *node = node_of(op);
    int32_t slot;
    if (kvf_pages_acquire(node->pages[group_idx], 1, &slot) != KVF_OK) {
        return false;
    }
    owned_page_t *page = &node->owned[group_idx][slot];
    /* What was given back early may be free a moment before the released event is delivered. */
    bool leaving = page->owner != NULL && !page->owner->holds && kvf_core_has_events(node->core);
    if (page->owner != NULL && !page->poisoned && !leaving) {
        world_fail(op->world, "%s, group %s: slot %d is handed out to request %s and belongs to %s",
                   node->name, op->world->layout.groups[group_idx].name, slot, op->request->id,
                   page->owner->request->id);
    }
    *page = (owned_page_t){.owner = op};
    op->slots[group_idx][ordinal] = slot;
    write_words(node_page(node, group_idx, slot), JUNK | ++op->world->n_tags, group_idx, ordinal, 0,
                op->world->page_bytes[group_idx]);
    return true;
}

bool hold_take(op_t *op, int64_t token_end, int64_t capacity_tokens) {
    const kvf_layout_t *layout = &op->world->layout;
    const request_t *request = op->request;
    int64_t prompt = request->lengths.prompt_len;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        int64_t t = layout->groups[g].tokens_per_block;
        int64_t end = (token_end == prompt ? capacity_tokens : token_end) + t - 1;
        for (int64_t o = op->n_blocks[g]; o < end / t; o++) {
            op->n_blocks[g] = o + 1;
            op->slots[g][o] = -1;
            bool scratch = o * t >= prompt;
            if ((scratch || request->bind_stale || hold_is_live(request, g, o)) &&
                !take_one(op, g, o)) {
                op->n_blocks[g] = o; /* as far as it came */
                return false;
            }
        }
    }
    op->holds = true;
    return true;
}

void hold_fill(op_t *op, uint32_t group_idx, int64_t ordinal, uint32_t layer_first,
               uint32_t layer_end) {
    const kvf_layer_group_t *group = &op->world->layout.groups[group_idx];
    int32_t slot = op->slots[group_idx][ordinal];
    uint64_t layer_bytes = kvf_group_layer_bytes(group);
    for (uint32_t i = 0; i < group->n_layers && slot >= 0; i++) {
        if (group->layers[i] >= layer_first && group->layers[i] < layer_end) {
            write_words(node_page(node_of(op), group_idx, slot), op->request->tag, group_idx,
                        ordinal, i * layer_bytes, (i + 1) * layer_bytes);
        }
    }
}

void hold_check(op_t *op, const char *when) {
    kvf_world_t *world = op->world;
    const request_t *request = op->request;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        for (int64_t o = 0; o < op->n_blocks[g]; o++) {
            int32_t slot = op->slots[g][o];
            if (slot < 0 ||
                !(op->is_send ? hold_is_live(request, g, o) : hold_is_wanted(request, g, o))) {
                continue;
            }
            const uint8_t *page = node_page(node_of(op), g, slot);
            for (uint64_t at = 0; at < world->page_bytes[g]; at += sizeof(uint64_t)) {
                uint64_t w = word(request->tag, g, o, at / sizeof(uint64_t));
                if (memcmp(page + at, &w, sizeof(w)) != 0) {
                    world_fail(world,
                               "%s, request %s, %s: group %s, ordinal %d (slot %d), byte %d is not "
                               "what was prefilled",
                               node_of(op)->name, request->id, when, world->layout.groups[g].name,
                               (int)o, slot, (int)at);
                    return;
                }
            }
            world->outcome->bytes_checked += world->page_bytes[g];
        }
    }
}

/* Does the core keep this page until the released event, whatever the engine does? */
static bool is_kept(const op_t *op, uint32_t group_idx, int64_t ordinal) {
    return op->opened && !op->released && ordinal < op->n_known[group_idx] &&
           (op->is_send ? hold_is_live(op->request, group_idx, ordinal)
                        : hold_is_wanted(op->request, group_idx, ordinal));
}

void hold_known(op_t *op) {
    memcpy(op->n_known, op->n_blocks, sizeof(op->n_known));
}

void hold_disown(op_t *op) {
    for (uint32_t g = 0; g < op->world->layout.n_groups && !op->holds; g++) {
        for (int64_t o = 0; o < op->n_blocks[g]; o++) {
            int32_t slot = op->slots[g][o];
            owned_page_t *page = slot < 0 ? NULL : &node_of(op)->owned[g][slot];
            if (page != NULL && page->owner == op && !page->poisoned && !is_kept(op, g, o)) {
                page->owner = NULL;
            }
        }
    }
}

void hold_give(op_t *op) {
    for (uint32_t g = 0; g < op->world->layout.n_groups && op->holds; g++) {
        for (int64_t o = 0; o < op->n_blocks[g]; o++) {
            int32_t slot = op->slots[g][o];
            kvf_status_t status =
                slot < 0 ? KVF_OK : kvf_pages_release(node_of(op)->pages[g], slot);
            if (status != KVF_OK) {
                world_fail(op->world, "%s, request %s: slot %d cannot be released: %s",
                           node_of(op)->name, op->request->id, slot, kvf_status_name(status));
            }
        }
    }
    op->holds = false;
    hold_disown(op);
}

static void check_source(const node_t *node, uint32_t group_idx, uint64_t slot) {
    const owned_page_t *page = &node->owned[group_idx][slot];
    const op_t *op = page->owner;
    if (op == NULL || !op->is_send || (op->released && !page->poisoned)) {
        world_fail(node->world, "%s reads group %s from slot %d, which was given back", node->name,
                   node->world->layout.groups[group_idx].name, (int)slot);
    }
}

void hold_check_reading(node_t *node, const kvf_piece_t *piece) {
    uint64_t at = (uint64_t)(piece->source - node->bytes[piece->group_idx]);
    check_source(node, piece->group_idx, at / node->world->page_bytes[piece->group_idx]);
}

void hold_check_source(node_t *node, const uint8_t *source, uint64_t bytes) {
    const kvf_world_t *world = node->world;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        uint64_t at = (uint64_t)(source - node->bytes[g]), page = world->page_bytes[g];
        if (source >= node->bytes[g] && at < (uint64_t)node->n_pages * page) {
            check_source(node, g, at / page);
            if (at % page + bytes > page) {
                world_fail(node->world, "%s sends more than a page holds", node->name);
            }
            return;
        }
    }
    world_fail(node->world, "%s sends from outside its pools", node->name);
}

/* The receive that a job is of. */
static op_t *op_of(node_t *node, const kvf_verify_t *job) {
    op_t *op = node->world->ops;
    while (op != NULL && (op->is_send || op->node != node->idx || op->life != node->life ||
                          op->id != job->recv_id)) {
        op = op->next;
    }
    return op;
}

/* Which of its blocks is in that page, or -1. */
static int64_t ordinal_of(const op_t *op, uint32_t group_idx, int32_t slot) {
    int64_t o = 0;
    while (o < op->n_blocks[group_idx] && op->slots[group_idx][o] != slot) {
        o++;
    }
    return o < op->n_blocks[group_idx] && hold_is_wanted(op->request, group_idx, o) ? o : -1;
}

/* While its owner lives, a page that is copied from is the transfer's: read for it, or in doubt. */
static bool is_lent(const node_t *from, const op_t *send, const kvf_verify_item_t *item,
                    int64_t ordinal) {
    const owned_page_t *page = &from->owned[item->group_idx][item->source_slot];
    kvf_page_label_t label = kvf_pages_label(from->pages[item->group_idx], item->source_slot);
    return page->owner == send && send->slots[item->group_idx][ordinal] == item->source_slot &&
           (!send->released || page->poisoned) &&
           (label == KVF_PAGE_READING || label == KVF_PAGE_QUARANTINED ||
            label == KVF_PAGE_POISONED);
}

static bool holds_words(const uint8_t *page, uint64_t tag, uint32_t group_idx, int64_t ordinal,
                        uint64_t first_byte, uint64_t end_byte) {
    for (uint64_t at = first_byte; at < end_byte; at += sizeof(uint64_t)) {
        uint64_t w = word(tag, group_idx, ordinal, at / sizeof(uint64_t));
        if (memcmp(page + at, &w, sizeof(w)) != 0) {
            return false;
        }
    }
    return true;
}

/* Whether a page that a job writes to is its receive's. */
static bool is_granted(node_t *node, const op_t *op, const kvf_verify_item_t *item) {
    uint32_t g = item->group_idx;
    return op != NULL && ordinal_of(op, g, item->slot) >= 0 &&
           node->owned[g][item->slot].owner == op && !op->released &&
           kvf_pages_label(node->pages[g], item->slot) == KVF_PAGE_WRITING;
}

bool hold_check_store(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item) {
    if (!is_granted(node, op_of(node, job), item)) {
        world_fail(
            node->world,
            "%s, transfer %u, group %s: slot %d is copied to from where bytes landed, and is "
            "not the receive's",
            node->name, (unsigned)job->recv_id, node->world->layout.groups[item->group_idx].name,
            item->slot);
        return false;
    }
    return true;
}

bool hold_check_fetched(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item,
                        const uint8_t *data) {
    kvf_world_t *world = node->world;
    uint32_t g = item->group_idx;
    op_t *op = op_of(node, job);
    int64_t ordinal = op == NULL ? -1 : ordinal_of(op, g, item->slot);
    const char *wrong = NULL;
    if (!is_granted(node, op, item)) {
        wrong = "is written to, and is not the receive's";
    } else if (!world->words_flipped &&
               !holds_words(data - item->offset, op->request->tag, g, ordinal, item->offset,
                            item->offset + item->bytes)) {
        wrong = "gets other bytes";
    }
    if (wrong != NULL) {
        world_fail(world, "%s, transfer %u, group %s: slot %d %s, through a path", node->name,
                   (unsigned)job->recv_id, world->layout.groups[g].name, item->slot, wrong);
        return false;
    }
    op->landed_bytes += item->bytes;
    return true;
}

bool hold_check_copy(node_t *node, const kvf_verify_t *job, const kvf_verify_item_t *item) {
    kvf_world_t *world = node->world;
    const mapping_t *mapping = job->source;
    const node_t *from = &world->nodes[mapping->from];
    uint32_t g = item->group_idx;
    op_t *op = op_of(node, job);
    int64_t ordinal = op == NULL ? -1 : ordinal_of(op, g, item->slot);
    uint64_t end = item->offset + item->bytes;
    const char *wrong = NULL;
    if (!is_granted(node, op, item)) {
        wrong = "is written to, and is not the receive's";
    } else if (item->source_slot < 0 || item->source_slot >= from->n_pages ||
               end > world->page_bytes[g]) {
        wrong = "is copied from outside the pool";
    } else if (world->words_flipped) {
        wrong = NULL; /* a commit may name other pages; the digest tells */
    } else if (from->core != NULL && from->life == mapping->from_life &&
               !is_lent(from, &op->request->send, item, ordinal)) {
        wrong = "is copied from a page that was given back";
    } else if (!holds_words(mapping->bytes[g] + (uint64_t)item->source_slot * world->page_bytes[g],
                            op->request->tag, g, ordinal, item->offset, end)) {
        wrong = "is copied from a page that holds something else";
    }
    if (wrong != NULL) {
        world_fail(world, "%s, transfer %u, group %s: slot %d %s: slot %d of %s", node->name,
                   (unsigned)job->recv_id, world->layout.groups[g].name, item->slot, wrong,
                   item->source_slot, from->name);
        return false;
    }
    op->landed_bytes += item->bytes;
    return true;
}

void hold_check_landing(node_t *node, const packet_t *packet) {
    const kvf_chunk_t *chunk = &packet->chunk;
    kvf_world_t *world = node->world;
    uint64_t at = chunk->offset + chunk->bytes;
    if (chunk->group_idx >= world->layout.n_groups || chunk->slot < 0 ||
        chunk->slot >= node->n_pages || at > world->page_bytes[chunk->group_idx]) {
        world_fail(world, "%s: a chunk of transfer %u lies outside the pool", node->name,
                   (unsigned)chunk->transfer.counter);
        return;
    }
    const owned_page_t *page = &node->owned[chunk->group_idx][chunk->slot];
    op_t *op = page->owner;
    if (packet->forged) {
        world_fail(world, "%s takes a forged chunk of transfer %u in", node->name,
                   (unsigned)chunk->transfer.counter);
    }
    if (op == NULL || op->is_send || op->id != chunk->transfer.counter ||
        chunk->ordinal >= op->n_blocks[chunk->group_idx] ||
        op->slots[chunk->group_idx][chunk->ordinal] != chunk->slot ||
        !hold_is_wanted(op->request, chunk->group_idx, chunk->ordinal) ||
        (op->released && !page->poisoned)) {
        world_fail(
            world,
            "%s: bytes of transfer %u, group %s, ordinal %d are written to slot %d, which %s",
            node->name, (unsigned)chunk->transfer.counter,
            world->layout.groups[chunk->group_idx].name, (int)chunk->ordinal, chunk->slot,
            op == NULL ? "is nobody's" : "is another's, or was released");
        return;
    }
    op->landed_bytes += chunk->bytes;
}
