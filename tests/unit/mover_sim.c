/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/sim.h"

#include "kernels/digest.h"

#include <criterion/criterion.h>
#include <string.h>

#define SLOT_BYTES 64U
#define N_SLOTS 4U
#define FILL 0xEE

typedef struct agent {
    kvf_mover_t *mover;
    uint8_t slots[N_SLOTS][SLOT_BYTES];
    bool refuse; /* grants are revoked */
    uint32_t n_landed, n_refused, n_moved, n_broken;
    kvf_status_t status;
    kvf_window_t *repost;
} agent_t;

static agent_t agents[3]; /* numbers 1 and 2 */

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    agent_t *agent = ctx;
    if (agent->refuse) {
        agent->n_refused++;
        return KVF_ERR_RANGE;
    }
    cr_assert_leq(chunk->offset + chunk->bytes, SLOT_BYTES);
    *landing_p = (kvf_landing_t){agent->slots[chunk->slot] + chunk->offset, NULL};
    return KVF_OK;
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    (void)chunk;
    ((agent_t *)ctx)->n_landed++;
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    agent_t *agent = ctx;
    agent->n_moved++;
    agent->status = status;
    cr_assert_null(window->priv);
    if (agent->repost != NULL) {
        kvf_window_t *next = agent->repost;
        agent->repost = NULL;
        cr_assert_eq(agent->mover->ops->post(agent->mover, next), KVF_OK);
    }
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    cr_assert_not_null(why);
    cr_assert_eq(peer, 77);
    ((agent_t *)ctx)->n_broken++;
}

static uint8_t *find_slot(void *ctx, uint64_t agent, uint32_t group_idx, int32_t slot) {
    (void)ctx;
    return group_idx == 3 && agent == 2 ? agents[agent].slots[slot] : NULL;
}

static kvf_sim_net_t *open_net(const kvf_alloc_t *alloc, bool checked) {
    const kvf_sim_config_t config = {checked, 16, find_slot, NULL};
    kvf_sim_net_t *net = NULL;
    cr_assert_eq(kvf_sim_net_create(&config, alloc, &net), KVF_OK);
    memset(agents, 0, sizeof(agents));
    for (uint64_t i = 1; i <= 2; i++) {
        const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, &agents[i]};
        memset(agents[i].slots, FILL, sizeof(agents[i].slots));
        cr_assert_eq(kvf_mover_sim_create(net, i, &sink, &agents[i].mover), KVF_OK);
        cr_assert_eq(agents[i].mover->ops->checked, checked);
    }
    uint8_t address[8];
    size_t bytes = 0;
    kvf_mover_t *b = agents[2].mover;
    cr_assert_eq(b->ops->address(b, address, 7, &bytes), KVF_ERR_RANGE);
    cr_assert_eq(b->ops->address(b, address, sizeof(address), &bytes), KVF_OK);
    cr_assert_eq(agents[1].mover->ops->connect(agents[1].mover, 77, address, bytes, NULL), KVF_OK);
    cr_assert_eq(agents[1].mover->ops->connect(agents[1].mover, 77, address, bytes, NULL),
                 KVF_ERR_INVALID);
    return net;
}

static void close_net(kvf_sim_net_t *net) {
    agents[1].mover->ops->destroy(agents[1].mover);
    agents[2].mover->ops->destroy(agents[2].mover);
    kvf_sim_net_destroy(net);
}

static kvf_status_t post(kvf_window_t *window) {
    return agents[1].mover->ops->post(agents[1].mover, window);
}

static unsigned turn(int agent) {
    return agents[agent].mover->ops->progress(agents[agent].mover);
}

/* 40 bytes at offset 5 of slot 1 (chunks of 16, 16, 8), 1 byte at offset 63 of slot 2. */
static uint8_t source[41];
static kvf_piece_t pieces[2];
static kvf_window_t window;

static void make_window(void) {
    for (size_t i = 0; i < sizeof(source); i++) {
        source[i] = (uint8_t)(i + 1);
    }
    pieces[0] = (kvf_piece_t){source, 40, 5, 11, 9, 3, 1, 0, 0};
    pieces[1] = (kvf_piece_t){source + 40, 1, 63, 12, 9, 3, 2, 0, 0};
    window =
        (kvf_window_t){.grant_key = 4711, .peer = 77, .pieces = pieces, .n_pieces = 2, .bytes = 41};
}

static void check_all_there(void) {
    for (uint32_t slot = 0; slot < N_SLOTS; slot++) {
        for (uint32_t at = 0; at < SLOT_BYTES; at++) {
            uint8_t want = FILL;
            if (slot == 1 && at >= 5 && at < 45) {
                want = (uint8_t)(at - 5 + 1);
            } else if (slot == 2 && at == 63) {
                want = 41;
            }
            cr_assert_eq(agents[2].slots[slot][at], want, "slot %u byte %u", slot, at);
        }
    }
}

Test(mover_sim, a_window_is_done_before_it_arrives) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), true);
    kvf_sim_chunk_t chunk;
    make_window();
    cr_assert_eq(post(&window), KVF_OK);
    cr_assert_eq(kvf_sim_net_pending(net), 4);
    cr_assert(agents[1].mover->ops->arm(agents[1].mover));
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(turn(1), 0, "moved before everything left");
        cr_assert(kvf_sim_net_step(net, 3 - i));
    }
    cr_assert_not(agents[1].mover->ops->arm(agents[1].mover));
    cr_assert_eq(turn(1), 1);
    cr_assert_eq(agents[1].n_moved, 1);
    cr_assert_eq(agents[1].status, KVF_OK);
    cr_assert_eq(pieces[0].digest, kvf_digest(source, 40));
    cr_assert_eq(pieces[1].digest, kvf_digest(source + 40, 1));
    cr_assert_eq(turn(2), 0);

    memset(source, 0, sizeof(source)); /* the sender may reuse its page now */
    cr_assert(kvf_sim_net_peek(net, 1, &chunk));
    cr_assert(chunk.under_way);
    cr_assert_eq(chunk.from, 1);
    cr_assert_eq(chunk.to, 2);
    cr_assert_eq(chunk.chunk.offset, 5 + 16);
    cr_assert_eq(chunk.chunk.bytes, 16);
    cr_assert_eq(chunk.chunk.ordinal, 11);
    cr_assert_eq(chunk.chunk.slot, 1);
    cr_assert_eq(chunk.chunk.generation, 9);
    cr_assert_eq(chunk.chunk.grant_key, 4711);
    cr_assert(kvf_sim_net_step(net, 2)); /* out of order */
    cr_assert_eq(turn(2), 1);
    cr_assert_eq(agents[2].slots[1][44], 40);
    cr_assert_eq(agents[2].slots[1][5], FILL);
    kvf_sim_net_run(net);
    cr_assert_not(kvf_sim_net_step(net, 0));
    cr_assert_not(kvf_sim_net_peek(net, 0, &chunk));
    cr_assert_not(agents[2].mover->ops->arm(agents[2].mover));
    cr_assert_eq(turn(2), 3);
    check_all_there();
    close_net(net);
}

Test(mover_sim, one_sided_writes_without_asking) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), false);
    make_window();
    cr_assert_eq(post(&window), KVF_OK);
    kvf_sim_net_run(net);
    check_all_there(); /* without a progress of agent 2 */
    cr_assert_eq(turn(2), 0);
    cr_assert_eq(agents[2].n_landed, 0);
    pieces[0].group_idx = 2; /* no memory there */
    cr_assert_eq(turn(1), 1);
    cr_assert_eq(post(&window), KVF_OK);
    kvf_sim_net_run(net);
    close_net(net);
}

Test(mover_sim, disconnect_fails_what_waits_and_leaves_late_writes) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), false);
    make_window();
    cr_assert_eq(post(&window), KVF_OK);
    cr_assert(kvf_sim_net_step(net, 1)); /* bytes [21, 37) of slot 1 are under way */
    agents[1].mover->ops->disconnect(agents[1].mover, 77);
    agents[1].mover->ops->disconnect(agents[1].mover, 77);
    cr_assert_eq(kvf_sim_net_pending(net), 1);
    cr_assert_eq(agents[1].n_moved, 0);
    cr_assert_eq(turn(1), 1);
    cr_assert_eq(agents[1].n_moved, 1);
    cr_assert_eq(agents[1].status, KVF_ERR_PEER_LOST);
    cr_assert_eq(post(&window), KVF_ERR_PEER_LOST);
    memset(source, 0, sizeof(source));
    cr_assert_eq(agents[2].slots[1][21], FILL);
    kvf_sim_net_run(net);
    for (uint32_t at = 0; at < SLOT_BYTES; at++) {
        cr_assert_eq(agents[2].slots[1][at], at >= 21 && at < 37 ? at - 5 + 1 : FILL);
    }
    cr_assert_eq(agents[1].n_broken, 0);
    close_net(net);
}

Test(mover_sim, break_reports_once_and_a_dropped_chunk_never_lands) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), true);
    make_window();
    cr_assert_eq(post(&window), KVF_OK);
    cr_assert(kvf_sim_net_drop(net, 3)); /* the single byte */
    cr_assert(kvf_sim_net_step(net, 0));
    kvf_sim_net_break(net, 2, 1);
    kvf_sim_net_break(net, 1, 2);
    cr_assert_eq(turn(1), 2);
    cr_assert_eq(agents[1].n_broken, 1);
    cr_assert_eq(agents[1].n_moved, 1);
    cr_assert_eq(agents[1].status, KVF_ERR_PEER_LOST);
    cr_assert_eq(post(&window), KVF_ERR_PEER_LOST);
    cr_assert_eq(turn(1), 0);
    agents[2].refuse = true; /* the grant is gone: late chunks change nothing */
    kvf_sim_net_run(net);
    cr_assert_eq(turn(2), 1);
    cr_assert_eq(agents[2].n_refused, 1);
    for (uint32_t at = 0; at < N_SLOTS * SLOT_BYTES; at++) {
        cr_assert_eq(agents[2].slots[at / SLOT_BYTES][at % SLOT_BYTES], FILL);
    }
    close_net(net);
}

Test(mover_sim, a_dead_sender_still_writes_and_reports_everything) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), false);
    kvf_window_t second;
    make_window();
    second = window;
    cr_assert_eq(post(&window), KVF_OK);
    cr_assert_eq(post(&second), KVF_OK);
    for (size_t i = 0; i < 4; i++) {
        cr_assert(kvf_sim_net_step(net, i));
    }
    agents[1].mover->ops->destroy(agents[1].mover);
    cr_assert_eq(agents[1].n_moved, 2);
    cr_assert_eq(agents[1].status, KVF_ERR_PEER_LOST); /* the second; the first had left */
    memset(source, 0, sizeof(source));
    kvf_sim_net_run(net);
    check_all_there();
    agents[2].mover->ops->destroy(agents[2].mover);
    kvf_sim_net_destroy(net);
}

Test(mover_sim, moved_may_post_again) {
    kvf_sim_net_t *net = open_net(kvf_alloc_default(), true);
    kvf_window_t empty;
    make_window();
    empty = window;
    empty.n_pieces = 0;
    agents[1].repost = &window;
    cr_assert_eq(post(&empty), KVF_OK);
    cr_assert_eq(turn(1), 1);
    cr_assert_eq(kvf_sim_net_pending(net), 4);
    kvf_sim_net_run(net);
    cr_assert_eq(turn(1) + turn(2), 5);
    check_all_there();
    close_net(net);
}

Test(mover_sim, post_without_memory_starts_nothing) {
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 0);
    kvf_sim_net_t *net = open_net(&fail.table, true);
    make_window();
    uint64_t live = fail.live;
    for (uint64_t n = 1; n <= 5; n++) { /* the window and four chunks */
        fail.fail_at = fail.calls + n;
        cr_assert_eq(post(&window), KVF_ERR_AGAIN);
        cr_assert_eq(kvf_sim_net_pending(net), 0);
        cr_assert_eq(fail.live, live);
    }
    fail.fail_at = 0;
    cr_assert_eq(post(&window), KVF_OK);
    kvf_sim_net_run(net);
    cr_assert_eq(turn(1) + turn(2), 5);
    check_all_there();
    close_net(net);
    cr_assert_eq(fail.live, 0);
    for (uint64_t n = 1; n <= 2; n++) {
        const kvf_sim_config_t config = {true, 16, NULL, NULL};
        const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, &agents[1]};
        kvf_mover_t *mover = NULL;
        net = NULL;
        kvf_alloc_fail_init(&fail, n);
        cr_assert_eq(kvf_sim_net_create(&config, &fail.table, &net),
                     n == 1 ? KVF_ERR_NO_MEMORY : KVF_OK);
        if (net != NULL) {
            cr_assert_eq(kvf_mover_sim_create(net, 1, &sink, &mover), KVF_ERR_NO_MEMORY);
            cr_assert_null(mover);
        }
        kvf_sim_net_destroy(net);
        cr_assert_eq(fail.live, 0);
    }
}
