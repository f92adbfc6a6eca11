/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/fault.h"
#include "transceiver/mover/sim.h"

#include "kernels/digest.h"

#include <criterion/criterion.h>
#include <string.h>

#define SLOT_BYTES 64U
#define N_SLOTS 5U
#define N_PIECES 3U
#define FILL 0xEE
#define PEER 77U

static kvf_sim_net_t *net;
static kvf_alloc_fail_t fail;
static kvf_mover_fault_t *fault;
static kvf_mover_t *a, *b; /* a is the stack */
static uint8_t slots[N_SLOTS][SLOT_BYTES];
static int64_t landed_ordinal[N_SLOTS];
static uint32_t n_moved, n_broken;
static kvf_status_t last_status;
static uint8_t source[N_PIECES][SLOT_BYTES];
static kvf_piece_t pieces[N_PIECES];
static kvf_window_t window;

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    (void)ctx;
    *landing_p = (kvf_landing_t){slots[chunk->slot] + chunk->offset, NULL};
    return KVF_OK;
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    (void)ctx;
    landed_ordinal[chunk->slot] = chunk->ordinal;
}

static void on_moved(void *ctx, kvf_window_t *moved, kvf_status_t status) {
    (void)ctx;
    cr_assert_eq(moved, &window);
    cr_assert_null(moved->priv);
    n_moved++;
    last_status = status;
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    (void)ctx;
    cr_assert_not_null(why);
    cr_assert_eq(peer, PEER);
    n_broken++;
}

static void open_stack(void) {
    const kvf_sim_config_t config = {true, 48, NULL, NULL};
    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, NULL};
    kvf_mover_sink_t below_sink;
    kvf_mover_t *below;
    uint8_t address[8];
    size_t bytes;
    kvf_alloc_fail_init(&fail, 0);
    memset(slots, FILL, sizeof(slots));
    memset(landed_ordinal, 0xff, sizeof(landed_ordinal));
    for (uint32_t i = 0; i < N_PIECES; i++) {
        memset(source[i], (int)(0x20 * (i + 1)), SLOT_BYTES);
        pieces[i] = (kvf_piece_t){source[i], SLOT_BYTES, 0, 10 + i, 1, 0, (int32_t)i, 0, 0};
    }
    window = (kvf_window_t){.peer = PEER, .pieces = pieces, .n_pieces = N_PIECES, .owner = 5};
    cr_assert_eq(kvf_sim_net_create(&config, kvf_alloc_default(), &net), KVF_OK);
    cr_assert_eq(kvf_mover_fault_create(&sink, &fail.table, &fault), KVF_OK);
    below_sink = kvf_mover_fault_sink(fault);
    cr_assert_eq(kvf_mover_sim_create(net, 1, &below_sink, &below), KVF_OK);
    a = kvf_mover_fault_stack(fault, below);
    cr_assert_str_eq(a->ops->name, "sim");
    cr_assert(a->ops->checked);
    cr_assert_eq(kvf_mover_sim_create(net, 2, &sink, &b), KVF_OK);
    cr_assert_eq(b->ops->address(b, address, sizeof(address), &bytes), KVF_OK);
    cr_assert_eq(a->ops->connect(a, PEER, address, bytes, NULL), KVF_OK);
}

static void close_stack(void) {
    a->ops->destroy(a);
    b->ops->destroy(b);
    kvf_sim_net_destroy(net);
    cr_assert_eq(fail.live, 0);
}

/* Post the window and let everything arrive. The poster's view must be as if nothing were wrong. */
static void carry(void) {
    cr_assert_eq(a->ops->post(a, &window), KVF_OK);
    kvf_sim_net_run(net);
    cr_assert_eq(n_moved, 0);
    (void)a->ops->progress(a);
    (void)b->ops->progress(b);
    cr_assert_eq(n_moved, 1);
    cr_assert_eq(last_status, KVF_OK);
    cr_assert_eq(window.owner, 5);
    for (uint32_t i = 0; i < N_PIECES; i++) {
        uint8_t want[SLOT_BYTES];
        memset(want, (int)(0x20 * (i + 1)), SLOT_BYTES);
        cr_assert_eq(pieces[i].source, source[i]);
        cr_assert_arr_eq(source[i], want, SLOT_BYTES);
        cr_assert_eq(pieces[i].slot, (int32_t)i);
        cr_assert_eq(pieces[i].ordinal, 10 + i);
        cr_assert_eq(pieces[i].digest, kvf_digest(want, SLOT_BYTES));
    }
}

static void check_slot(uint32_t slot, int fill) {
    for (uint32_t at = 0; at < SLOT_BYTES; at++) {
        cr_assert_eq(slots[slot][at], fill, "slot %u byte %u", slot, at);
    }
}

Test(mover_fault, without_a_plan_nothing_changes) {
    open_stack();
    carry();
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        check_slot(i, i < N_PIECES ? (int)(0x20 * (i + 1)) : FILL);
    }
    kvf_fault_counts_t counts = kvf_mover_fault_counts(fault);
    cr_assert_eq(counts.pieces, 3);
    cr_assert_eq(counts.windows, 1);
    cr_assert_eq(counts.posts, 1);
    cr_assert_eq(counts.held, 0);
    close_stack();
}

Test(mover_fault, flips_one_byte_on_the_way) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.flip_piece = 2, .flip_offset = 50});
    carry();
    check_slot(0, 0x20);
    check_slot(2, 0x60);
    cr_assert_eq(slots[1][50], 0x50);
    slots[1][50] = 0x40;
    check_slot(1, 0x40);
    cr_assert_neq(kvf_digest(slots[1], 50), pieces[1].digest);
    close_stack();
}

Test(mover_fault, flips_the_last_byte_of_a_shorter_piece) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.flip_piece = 3, .flip_offset = 1000});
    carry();
    cr_assert_eq(slots[2][63], 0x70);
    cr_assert_eq(slots[2][62], 0x60);
    close_stack();
}

Test(mover_fault, shifts_a_slot) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.shift_slot = 3});
    carry();
    check_slot(2, FILL);
    check_slot(3, 0x60);
    cr_assert_eq(landed_ordinal[3], 12);
    close_stack();
}

Test(mover_fault, shifts_an_ordinal) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.shift_ordinal = 1});
    carry();
    check_slot(0, 0x20);
    cr_assert_eq(landed_ordinal[0], 11);
    cr_assert_eq(landed_ordinal[1], 11);
    close_stack();
}

Test(mover_fault, drops_a_window_silently) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.drop_window = 1});
    carry();
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        check_slot(i, FILL);
    }
    n_moved = 0;
    carry(); /* the second is carried */
    check_slot(2, 0x60);
    close_stack();
}

Test(mover_fault, counts_pieces_over_windows) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.flip_piece = N_PIECES + 1});
    carry();
    check_slot(0, 0x20);
    n_moved = 0;
    carry();
    cr_assert_eq(slots[0][0], 0x30);
    close_stack();
}

Test(mover_fault, fails_a_post) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.fail_post = 2, .fail_status = KVF_ERR_IO});
    carry();
    cr_assert_eq(a->ops->post(a, &window), KVF_ERR_IO);
    cr_assert_eq(kvf_sim_net_pending(net), 0);
    cr_assert_eq(a->ops->progress(a), 0);
    n_moved = 0;
    carry();
    close_stack();
}

Test(mover_fault, holds_completions) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.hold = true});
    cr_assert_eq(a->ops->post(a, &window), KVF_OK);
    kvf_sim_net_run(net);
    (void)a->ops->progress(a);
    (void)a->ops->progress(a);
    cr_assert_eq(n_moved, 0);
    cr_assert_eq(kvf_mover_fault_counts(fault).held, 1);
    cr_assert(a->ops->arm(a));
    kvf_mover_fault_set(fault, NULL);
    cr_assert_eq(n_moved, 0, "moved from inside set");
    cr_assert_not(a->ops->arm(a));
    cr_assert_eq(a->ops->progress(a), 1);
    cr_assert_eq(n_moved, 1);
    close_stack();
}

Test(mover_fault, destroy_reports_what_is_held_and_what_is_on_the_way) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.hold = true});
    cr_assert_eq(a->ops->post(a, &window), KVF_OK);
    kvf_sim_net_run(net);
    (void)a->ops->progress(a);
    cr_assert_eq(a->ops->post(a, &window), KVF_OK);
    close_stack();
    cr_assert_eq(n_moved, 2);
    cr_assert_eq(last_status, KVF_ERR_PEER_LOST);
}

Test(mover_fault, passes_on_what_breaks) {
    open_stack();
    cr_assert_eq(a->ops->post(a, &window), KVF_OK);
    kvf_sim_net_break(net, 1, 2);
    (void)a->ops->progress(a);
    cr_assert_eq(n_broken, 1);
    cr_assert_eq(n_moved, 1);
    cr_assert_eq(last_status, KVF_ERR_PEER_LOST);
    cr_assert_eq(a->ops->post(a, &window), KVF_ERR_PEER_LOST);
    close_stack();
}

Test(mover_fault, without_memory_a_post_starts_nothing) {
    open_stack();
    kvf_mover_fault_set(fault, &(kvf_fault_plan_t){.flip_piece = 1});
    uint64_t live = fail.live;
    for (uint64_t n = 1; n <= 3; n++) {
        fail.fail_at = fail.calls + n;
        cr_assert_eq(a->ops->post(a, &window), KVF_ERR_AGAIN);
        cr_assert_eq(fail.live, live);
        cr_assert_eq(kvf_sim_net_pending(net), 0);
    }
    fail.fail_at = 0;
    carry();
    cr_assert_eq(slots[0][0], 0x30);
    close_stack();

    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, NULL};
    kvf_mover_fault_t *none = NULL;
    kvf_alloc_fail_init(&fail, 1);
    cr_assert_eq(kvf_mover_fault_create(&sink, &fail.table, &none), KVF_ERR_NO_MEMORY);
    cr_assert_null(none);
    cr_assert_eq(kvf_mover_fault_create(&sink, &fail.table, &none), KVF_OK);
    cr_assert_null(kvf_mover_fault_stack(none, NULL));
    cr_assert_eq(fail.live, 0);
}
