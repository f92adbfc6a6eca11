/* SPDX-License-Identifier: Apache-2.0 */
/* Processes: a core, its memory and its pages. */
#include "tools/sim/world_impl.h"

#include "kvmgr/base/log.h"

#include <stdlib.h>
#include <string.h>

#define ITERATIONS 64 /* of a turn; then others have theirs */

/* ---- memory that can fail, and that a killed process leaves behind ---- */

struct world_memory {
    struct world_memory *prev, *next;
    _Alignas(max_align_t) unsigned char data[];
};

static void unlink_memory(node_t *node, struct world_memory *m) {
    *(m->prev != NULL ? &m->prev->next : &node->memory_list) = m->next;
    if (m->next != NULL) {
        m->next->prev = m->prev;
    }
}

static void link_memory(node_t *node, struct world_memory *m) {
    m->prev = NULL;
    m->next = node->memory_list;
    if (m->next != NULL) {
        m->next->prev = m;
    }
    node->memory_list = m;
}

static struct world_memory *memory_of(void *ptr) {
    return (struct world_memory *)(void *)((unsigned char *)ptr -
                                           offsetof(struct world_memory, data));
}

static void *node_resize(void *ctx, void *ptr, size_t bytes) {
    node_t *node = ctx;
    struct world_memory *old = ptr == NULL ? NULL : memory_of(ptr), *made;
    if (bytes == 0) {
        if (old != NULL) {
            unlink_memory(node, old);
            free(old);
        }
        return NULL;
    }
    if (node_hit(node, KVF_FAULT_MEMORY)) {
        return NULL;
    }
    if (old != NULL) {
        unlink_memory(node, old);
    }
    made = realloc(old, sizeof(*made) + bytes);
    if (made == NULL) {
        abort();
    }
    link_memory(node, made);
    return made->data;
}

static void wipe_memory(node_t *node) {
    struct world_memory *m = node->memory_list;
    node->memory_list = NULL;
    while (m != NULL) {
        struct world_memory *next = m->next;
        free(m);
        m = next;
    }
}

/* ---- what the core asks for ---- */

static const uint8_t *do_page(void *ctx, uint32_t group_idx, int32_t slot) {
    return node_page(ctx, group_idx, slot);
}

uint64_t node_work_us(node_t *node) {
    kvf_dice_t *dice = &node->world->dice;
    return node_hit(node, KVF_FAULT_SLOW) ? kvf_dice_below(dice, 2000000)
                                          : kvf_dice_delay(dice, 100, 20000);
}

static void do_verify(void *ctx, kvf_verify_t *job) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    uint64_t delay = node_work_us(node);
    job->source = NULL;
    if (job->peer != 0 && world->fetches) {
        if (fetch_use(node, job)) {
            return;
        }
        job->status = KVF_ERR_PEER_LOST;
    } else if (job->peer != 0 && !lend_use(node, job, delay)) {
        return;
    }
    world_push(world, (event_t){.at_us = world->now_us + delay,
                                .kind = EVENT_VERIFIED,
                                .node = (uint8_t)node->idx,
                                .from = (uint8_t)node->idx,
                                .life = node->life,
                                .ptr = job});
}

static void do_fill(void *ctx, void *buf, size_t bytes) {
    node_t *node = ctx;
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)kvf_dice_next(&node->world->dice);
    }
}

static void do_log(void *ctx, kvf_log_level_t level, const char *text) {
    node_t *node = ctx;
    world_note(node->world, "%s: %s: %s", node->name, kvf_log_level_name(level), text);
}

uint8_t *node_page(const node_t *node, uint32_t group_idx, int32_t slot) {
    return node->bytes[group_idx] + (uint64_t)slot * node->world->page_bytes[group_idx];
}

bool node_hit(node_t *node, kvf_fault_t fault) {
    return node->until_us[fault] > node->world->now_us &&
           kvf_dice_hit(&node->world->dice, node->rate[fault]);
}

/* ---- life ---- */

/* A small model: blocks of two or four tokens, layers of some 16 to 64 bytes, windows with sinks.
 */
static void draw_layout(kvf_world_t *world, kvf_dice_t *dice) {
    static const char *const names[WORLD_GROUPS] = {"full", "near", "nearest"};
    kvf_layout_t *layout = &world->layout;
    layout->n_groups = (uint32_t)kvf_dice_between(dice, 1, WORLD_GROUPS);
    world->n_layers = layout->n_groups + (uint32_t)kvf_dice_below(dice, 4);
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        kvf_layer_group_t *group = &layout->groups[g];
        memcpy(group->name, names[g], strlen(names[g]) + 1);
        group->tokens_per_block = kvf_dice_hit(dice, 500) ? 2 : 4;
        group->head_dim = 2 * (uint32_t)kvf_dice_between(dice, 2, 4);
        group->kv_heads = 1;
        group->kv_factor = 2;
        group->dtype = KVF_DTYPE_F8_E4M3;
        if (g > 0) {
            group->window = (int64_t)kvf_dice_between(dice, 1, 12);
            group->sinks = (int64_t)kvf_dice_below(dice, 4);
        }
        for (uint32_t layer = g; layer < world->n_layers; layer += layout->n_groups) {
            group->layers[group->n_layers++] = layer;
        }
        uint64_t layer_bytes = kvf_group_layer_bytes(group);
        world->granule_bytes[g] = layer_bytes & (~layer_bytes + 1);
        world->page_bytes[g] = kvf_group_block_bytes(group);
    }
}

void nodes_start(kvf_world_t *world) {
    kvf_dice_t dice = {kvf_dice_mix(world->script->seed + 2)};
    kvf_dice_t lends = {kvf_dice_mix(world->script->seed + 3)};
    kvf_dice_t devices = {kvf_dice_mix(world->script->seed + 4)};
    world->now_us = 10000000;
    kvf_dice_t fetches = {kvf_dice_mix(world->script->seed + 5)};
    world->fetches = world->script->mapped && kvf_dice_hit(&fetches, 300);
    world->n_nodes = world->script->n_context + world->script->n_generation;
    world->heartbeat_us = kvf_dice_between(&dice, 40000, 250000);
    draw_layout(world, &dice);
    for (uint32_t i = 0; i < world->n_nodes; i++) {
        node_t *node = &world->nodes[i];
        node->world = world;
        node->idx = i;
        node->alloc = (kvf_alloc_t){node_resize, node};
        node->n_pages =
            (int64_t)kvf_dice_between(&dice, 24, kvf_dice_hit(&dice, 100) ? WORLD_PAGES : 60);
        (void)snprintf(node->address, sizeof(node->address), "127.0.0.1:%u", i + 1);
        (void)snprintf(node->name, sizeof(node->name), "%s-%u",
                       i < world->script->n_context ? "prefill" : "decode",
                       i < world->script->n_context ? i : i - world->script->n_context);
        kvf_agent_config_init(&node->config);
        node->config.instance = node->name;
        memset(node->config.cluster_key, 0x5a, sizeof(node->config.cluster_key));
        node->config.layout = &world->layout;
        node->config.request_timeout_us = kvf_dice_between(&dice, 2500000, 4000000);
        node->config.lease_us = kvf_dice_between(&dice, 700000, 3000000);
        node->config.quarantine_us = kvf_dice_between(&dice, 300000, 1500000);
        node->config.window_bytes = kvf_dice_between(&dice, 64, 8192);
        node->config.window_pieces = (uint32_t)kvf_dice_between(&dice, 64, 256);
        node->config.heartbeat_us = world->heartbeat_us;
        node->config.suspect_us = 4 * world->heartbeat_us;
        node->config.lost_us = 8 * world->heartbeat_us;
        /* Some nodes do not, so that receivers have peers of both kinds. */
        node->lends = world->script->mapped && kvf_dice_hit(&lends, 900);
        /* Without them nothing but the copy itself keeps bytes right. */
        node->config.digests =
            !(world->script->scenario->mapped == 1000 && kvf_dice_hit(&lends, 150));
        node->device = kvf_dice_hit(&devices, 250);
        node->config.max_transfers = (uint32_t)kvf_dice_between(&dice, 4, 64);
        node_start(node);
    }
}

void node_start(node_t *node) {
    kvf_world_t *world = node->world;
    kvf_log_t *log = arena_take(&world->arena, sizeof(*log));
    uint64_t address[2];
    kvf_core_config_t config = {
        .agent = &node->config,
        .alloc = &node->alloc,
        .rand = {do_fill, node},
        .log = log,
        .out = {.dial = wire_dial,
                .write = wire_write,
                .close = wire_close,
                .mover_connect = carry_connect,
                .mover_disconnect = carry_disconnect,
                .post = carry_post,
                .map = lend_map,
                .unmap = lend_unmap,
                .digest = lend_digest,
                .page = do_page,
                .verify = do_verify,
                .ctx = node},
        .mover_names = {"sim"},
        .n_movers = 1,
        .movers_checked = !world->script->scenario->one_sided,
        .mapped_name = world->fetches ? KVF_NCCL : KVF_MAPPED,
        .hashes_leaves = true,
    };
    if (world->fetches) {
        config.out.map = fetch_map;
        config.out.unmap = fetch_unmap;
        config.out.join = fetch_join;
        config.out.leave = fetch_leave;
        config.out.serve = fetch_serve;
        config.out.evict = fetch_evict;
    }
    *log = (kvf_log_t){do_log, node, world->trace == NULL ? KVF_LOG_ERROR : KVF_LOG_DEBUG};
    node->life = ++world->n_lives;
    node->silent = node->leaving = node->paused = false;
    node->wake_us = KVF_NEVER;
    node->paused_us = 0;
    node->paths = NULL;
    node->jobs = NULL;
    node->mappings = NULL;
    node->until_us[KVF_FAULT_MEMORY] = 0;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        size_t n = (size_t)node->n_pages;
        node->bytes[g] = arena_take(&world->arena, n * world->page_bytes[g]);
        node->owned[g] = arena_take(&world->arena, n * sizeof(*node->owned[g]));
        if (kvf_pages_create(&node->alloc, node->n_pages, &node->pages[g]) != KVF_OK) {
            abort();
        }
        config.regions[g] =
            (kvf_core_region_t){node->pages[g], node->device ? KVF_MEM_CUDA : KVF_MEM_FAKE};
    }
    address[0] = node->idx;
    address[1] = node->life;
    if (kvf_core_create(&config, &node->core) != KVF_OK) {
        abort();
    }
    kvf_core_set_time(node->core, world->now_us);
    if (kvf_core_set_control_address(node->core, node->address) != KVF_OK ||
        kvf_core_set_mover_address(node->core, 0, address, sizeof(address)) != KVF_OK) {
        abort();
    }
    if (node->lends &&
        kvf_core_set_mapped_address(node->core, address, sizeof(address)) != KVF_OK) {
        abort();
    }
    world_note(world, "%s starts", node->name);
}

void nodes_wipe(kvf_world_t *world) {
    for (uint32_t i = 0; i < world->n_nodes; i++) {
        wipe_memory(&world->nodes[i]);
    }
}

void node_kill(node_t *node) {
    engine_drop(node);
    carry_drop(node);
    lend_drop(node);
    fetch_drop(node);
    node->core = NULL;
    node->paused = false;
    for (size_t i = 0; i < node->n_held; i++) {
        node->world->n_acts -= node->held[i].kind == EVENT_ENGINE;
    }
    node->n_held = 0;
    wipe_memory(node);
}

void node_end(node_t *node) {
    kvf_world_t *world = node->world;
    kvf_counters_t counters;
    if (node->core == NULL) {
        return;
    }
    kvf_core_set_time(node->core, world->now_us);
    if (kvf_core_busy(node->core)) {
        world_fail(world, "%s is busy when nothing is left to do", node->name);
        return;
    }
    kvf_core_counters(node->core, &counters);
    if (counters.sends_live != 0 || counters.recvs_live != 0) {
        world_fail(world, "%s counts %u sends and %u receives as alive, when there are none",
                   node->name, counters.sends_live, counters.recvs_live);
        return;
    }
    if (counters.mover_fallbacks != 0 && verdict_unharmed(world)) {
        world_fail(world, "%s could not map pools, when nothing was wrong", node->name);
        return;
    }
    kvf_core_goodbye(node->core);
    kvf_core_destroy(node->core);
    node->core = NULL;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        int64_t poisoned = 0;
        for (int64_t i = 0; i < node->n_pages; i++) {
            poisoned += node->owned[g][i].poisoned;
        }
        /* Destroying the core ends its last doubts about nothing: what it poisoned stays so. */
        int64_t out = node->n_pages - kvf_pages_count(node->pages[g], KVF_PAGE_FREE);
        if (out > poisoned || out != kvf_pages_count(node->pages[g], KVF_PAGE_POISONED)) {
            world_fail(world,
                       "%s, group %s: %d pages did not come back (%d are poisoned, of %d that "
                       "released events listed)",
                       node->name, world->layout.groups[g].name, (int)out,
                       (int)kvf_pages_count(node->pages[g], KVF_PAGE_POISONED), (int)poisoned);
        }
        kvf_pages_destroy(node->pages[g]);
        node->pages[g] = NULL;
    }
    if (node->memory_list != NULL && !world_failed(world)) {
        world_fail(world, "%s forgot memory at its end", node->name);
    }
}

/* ---- turns ---- */

static void audit(node_t *node) {
    kvf_world_t *world = node->world;
    kvf_detail_t detail;
    for (uint32_t g = 0; g < world->layout.n_groups; g++) {
        if (kvf_pages_audit(node->pages[g], &detail) != KVF_OK) {
            world_fail(world, "%s, group %s: %s", node->name, world->layout.groups[g].name,
                       detail.text);
        }
    }
    world->outcome->audits++;
}

static void wake_at(node_t *node, uint64_t at_us) {
    if (at_us < node->wake_us) {
        node->wake_us = at_us;
        world_push(node->world, (event_t){.at_us = at_us,
                                          .kind = EVENT_WAKE,
                                          .node = (uint8_t)node->idx,
                                          .from = (uint8_t)node->idx,
                                          .life = node->life});
    }
}

/* The end of a shutdown: nothing is busy any more. */
static void leave(node_t *node) {
    kvf_core_goodbye(node->core);
    while (kvf_core_deliver(node->core)) {
    }
    engine_give_all(node);
    node_end(node);
    world_note(node->world, "%s has ended in order", node->name);
    engine_drop(node);
    carry_drop(node);
    lend_drop(node);
    fetch_drop(node);
    world_push(node->world,
               (event_t){.at_us = node->world->now_us + kvf_dice_below(&node->world->dice, 500000),
                         .kind = EVENT_RESTART,
                         .node = (uint8_t)node->idx,
                         .from = (uint8_t)node->idx});
}

void node_turn(node_t *node) {
    kvf_world_t *world = node->world;
    bool any = true;
    kvf_core_set_time(node->core, world->now_us);
    kvf_core_tick(node->core);
    for (int i = 0; i < ITERATIONS && any; i++) {
        any = kvf_core_pump(node->core);
        any |= kvf_core_deliver(node->core);
    }
    audit(node);
    if (node->leaving && !kvf_core_busy(node->core) && !kvf_core_has_events(node->core)) {
        leave(node);
        return;
    }
    uint64_t next = kvf_core_next_us(node->core);
    wake_at(node, any ? world->now_us + 1 : next > world->now_us ? next : world->now_us + 1);
}

void node_pause(node_t *node) {
    node->paused = true;
    node->paused_since_us = node->world->now_us;
}

void node_resume(node_t *node) {
    kvf_world_t *world = node->world;
    if (!node->paused || node->core == NULL) {
        return;
    }
    world_note(world, "%s runs again", node->name);
    node->paused = false;
    node->paused_us += world->now_us - node->paused_since_us;
    /* It reads all that has come meanwhile, and judges then. */
    kvf_core_set_time(node->core, world->now_us);
    for (size_t i = 0; i < node->n_held && node->core != NULL && !world_failed(world); i++) {
        world_do(world, &node->held[i]);
    }
    node->n_held = 0;
    if (node->core != NULL) {
        node_turn(node);
    }
}
