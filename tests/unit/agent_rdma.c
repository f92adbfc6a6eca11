/* SPDX-License-Identifier: Apache-2.0 */
/* Agents whose receiver reads its sender's pools itself, through UCX: with both kinds of memory, in
 * jobs of all lengths; and what becomes of a path that its peer speaks nonsense about, or gives up.
 * In place of a network card UCX's tcp reads. */
#include "../support/agent_sides.h"
#include "../support/rdma/reads.h"

#include <stdlib.h>

static void over_tcp(void) {
    need_reads();
    kvf_agent_rdma_over_software = true;
}

static side_t rdma(void) {
    return (side_t){.mover = "rdma", .memory = "host", .threads = 2};
}

Test(agent_rdma, both_memories, .init = over_tcp, .timeout = 60) {
    side_t host = rdma(), shm = rdma();
    shm.memory = "shm";
    run(host, host, "rdma");
    run(shm, host, "rdma");
    run(host, shm, "rdma");
}

Test(agent_rdma, without_digests, .init = over_tcp, .timeout = 60) {
    side_t without = rdma();
    without.no_digests = true;
    run(rdma(), without, "rdma");
    run(without, rdma(), "rdma");
}

/* A node whose mover is rdma can be read, and is not made to read. */
Test(agent_rdma, others_are_carried_for, .init = over_tcp, .timeout = 60) {
    run(rdma(), (side_t){.memory = "shm"}, "tcp");
    run(rdma(), (side_t){.mover = "tcp"}, "tcp");
}

/* Without a card there is no such mover, and nothing takes its place unasked. */
Test(agent_rdma, needs_a_card, .timeout = 60) {
    static const char *const lists[] = {"auto", "tcp,self", "posix"};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        side_t side = rdma();
        kvf_detail_t detail = {""};
        side.tls = lists[i];
        side_make(&side, "ctx");
        kvf_status_t status = kvf_agent_start(side.agent, &detail);
        if (i > 0 || status != KVF_OK) { /* this machine may have one */
            cr_assert_eq(status, KVF_ERR_UNSUPPORTED, "%s", detail.text);
            cr_assert_not_null(strstr(detail.text, ucx_reads() ? "rc" : "1.22"), "%s", detail.text);
            cr_assert_null(strstr(detail.text, "posix"), "no card: %s", detail.text);
        }
        cr_assert_eq(kvf_agent_destroy(side.agent), KVF_OK);
    }
    check_leaks();
}

/* ---- peers that speak nonsense ---- */

static void turns(side_t *ctx, side_t *gen, int n) {
    for (int i = 0; i < n; i++) {
        kvf_agent_progress(ctx->agent);
        kvf_agent_progress(gen->agent);
    }
}

/* One transfer of many blocks, to its end; how it went at the receiver. */
static kvf_status_t transfer(side_t *ctx, side_t *gen) {
    enum { PROMPT = MAX_BLOCKS * T - 5 };
    ctx->results = ctx->releases = gen->results = gen->releases = 0;
    side_take(ctx, MAX_BLOCKS, 2, true);
    side_take(gen, MAX_BLOCKS, 1, false);
    request(ctx, gen, PROMPT);
    finish(ctx, gen);
    if (gen->status == KVF_OK) {
        cr_assert_str_eq(gen->by, "rdma");
        cr_assert_eq(wrong_bytes(gen, MAX_BLOCKS, PROMPT), 0);
    }
    side_give(ctx, MAX_BLOCKS);
    side_give(gen, MAX_BLOCKS);
    return gen->status;
}

/* Invitations and answers that are none, of paths that there are and that there are not: none of
 * them harms a path that is well. */
Test(agent_rdma, nonsense_about_paths, .init = over_tcp, .timeout = 60) {
    static const uint8_t zeros[8192];
    side_t ctx = rdma(), gen = rdma();
    open_both(&ctx, &gen);
    cr_assert_eq(transfer(&ctx, &gen), KVF_OK);
    for (size_t bytes = 0; bytes <= 256; bytes += 16) { /* 16: as long as a right one */
        kvf_core_invite(gen.agent->core, 1, 1000 + bytes, zeros, bytes);
    }
    for (size_t bytes = 0; bytes <= sizeof(zeros); bytes += 1024) {
        kvf_core_answer(ctx.agent->core, 1, 1, zeros, bytes);
        kvf_core_answer(ctx.agent->core, 1, 77, zeros, bytes);
    }
    kvf_core_left(ctx.agent->core, 1, 77, true, "there is no such path");
    kvf_core_left(gen.agent->core, 1, 77, true, "there is no such path");
    turns(&ctx, &gen, 200);
    cr_assert_eq(kvf_core_lent(ctx.agent->core), 1, "those that were refused are not counted");
    cr_assert_eq(transfer(&ctx, &gen), KVF_OK);
    close_both(&ctx, &gen);
}

/* What is asked for by a path of another mover's ends the conversation: no page is sent. */
Test(agent_rdma, nothing_is_fetched, .init = over_tcp, .timeout = 60) {
    side_t ctx = rdma(), gen = rdma();
    kvf_counters_t counters = {0};
    kvf_verify_t *job = calloc(1, sizeof(*job));
    char ticket[KVF_TICKET_BYTES];
    kvf_send_t send;
    kvf_recv_t recv;
    cr_assert_not_null(job);
    open_both(&ctx, &gen);
    side_take(&ctx, 1, 2, true);
    side_take(&gen, 1, 1, false);
    const kvf_send_desc_t offer = {.request_id = "r",
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = ctx.tables,
                                   .n_tables = 2};
    cr_assert_eq(kvf_send_open(ctx.agent, &offer, on_event, &ctx, &send, NULL), KVF_OK);
    cr_assert_eq(kvf_send_ticket(ctx.agent, send, ticket, sizeof(ticket)), KVF_OK);
    const kvf_recv_desc_t fetch = {.request_id = "r",
                                   .ticket = ticket,
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = gen.tables,
                                   .n_tables = 2,
                                   .handoff = KVF_HANDOFF_NONE};
    cr_assert_eq(kvf_recv_open(gen.agent, &fetch, on_event, &gen, &recv, NULL), KVF_OK);
    /* Until the receiver has a path: then it says its request, in front of the fetch. */
    kvf_peer_info_t peer = {.mover = ""};
    for (int i = 0; i < 100000 && strcmp(peer.mover, "rdma") != 0; i++) {
        turns(&ctx, &gen, 1);
        (void)kvf_agent_get_peers(gen.agent, &peer, 1);
        (void)usleep(10);
    }
    cr_assert_str_eq(peer.mover, "rdma");
    job->recv_id = recv.id;
    job->n_items = 1;
    cr_assert(kvf_core_fetch(gen.agent->core, job, 1));
    finish(&ctx, &gen);
    cr_assert_neq(gen.status, KVF_OK);
    cr_assert_eq(ctx.status, KVF_ERR_PEER_REFUSED);
    kvf_agent_get_counters(ctx.agent, &counters);
    cr_assert_eq(counters.refused_frames, 1);
    side_give(&ctx, 1);
    side_give(&gen, 1);
    free(job);
    close_both(&ctx, &gen);
}

/* ---- paths that end ---- */

/* The sender closes its end with a transfer under way, because of what it was told: both requests
 * end, once, all pages come back, and after a while there is a new path. */
Test(agent_rdma, a_path_that_the_sender_closes, .init = over_tcp, .timeout = 100) {
    side_t ctx = rdma(), gen = rdma();
    kvf_status_t status = KVF_ERR_PEER_LOST;
    open_both(&ctx, &gen);
    cr_assert_eq(transfer(&ctx, &gen), KVF_OK);
    ctx.results = ctx.releases = gen.results = gen.releases = 0;
    side_take(&ctx, MAX_BLOCKS, 2, true);
    side_take(&gen, MAX_BLOCKS, 1, false);
    request(&ctx, &gen, MAX_BLOCKS * T);
    kvf_core_left(gen.agent->core, 1, 1, true, "on a whim"); /* and the receiver goes on */
    finish(&ctx, &gen);
    cr_assert_eq(gen.status, KVF_ERR_PEER_LOST);
    cr_assert_neq(ctx.status, KVF_OK);
    cr_assert_eq(kvf_core_lent(ctx.agent->core), 0);
    side_give(&ctx, MAX_BLOCKS);
    side_give(&gen, MAX_BLOCKS);
    /* The receiver tries again after five seconds; until then nothing else carries. */
    for (int i = 0; i < 100 && status == KVF_ERR_PEER_LOST; i++) {
        status = transfer(&ctx, &gen);
        (void)usleep(100000);
    }
    cr_assert_eq(status, KVF_OK);
    close_both(&ctx, &gen);
}

/* Requests end in the middle, from either side, and the path goes on. */
Test(agent_rdma, cancelled_in_the_middle, .init = over_tcp, .timeout = 100) {
    side_t ctx = rdma(), gen = rdma();
    open_both(&ctx, &gen);
    for (int n_turns = 0; n_turns < 40; n_turns++) {
        char ticket[KVF_TICKET_BYTES];
        kvf_send_t send;
        kvf_recv_t recv;
        const kvf_range_t all = {.layer_end = 3, .token_end = MAX_BLOCKS * T};
        ctx.results = ctx.releases = gen.results = gen.releases = 0;
        side_take(&ctx, MAX_BLOCKS, 2, true);
        side_take(&gen, MAX_BLOCKS, 1, false);
        const kvf_send_desc_t offer = {.request_id = "r",
                                       .lengths = {.prompt_len = MAX_BLOCKS * T},
                                       .allocated_tokens = MAX_BLOCKS * T,
                                       .tables = ctx.tables,
                                       .n_tables = 2};
        cr_assert_eq(kvf_send_open(ctx.agent, &offer, on_event, &ctx, &send, NULL), KVF_OK);
        cr_assert_eq(kvf_send_ready(ctx.agent, send, &all, NULL, NULL), KVF_OK);
        cr_assert_eq(kvf_send_ticket(ctx.agent, send, ticket, sizeof(ticket)), KVF_OK);
        const kvf_recv_desc_t fetch = {.request_id = "r",
                                       .ticket = ticket,
                                       .lengths = {.prompt_len = MAX_BLOCKS * T},
                                       .allocated_tokens = MAX_BLOCKS * T,
                                       .tables = gen.tables,
                                       .n_tables = 2,
                                       .handoff = KVF_HANDOFF_NONE};
        cr_assert_eq(kvf_recv_open(gen.agent, &fetch, on_event, &gen, &recv, NULL), KVF_OK);
        turns(&ctx, &gen, n_turns);
        if (n_turns % 2 == 0) {
            cr_assert_eq(kvf_recv_cancel(gen.agent, recv), KVF_OK);
        } else {
            cr_assert_eq(kvf_send_cancel(ctx.agent, send, KVF_ERR_CANCELLED), KVF_OK);
        }
        if (n_turns % 2 == 0 && ctx.results == 0) { /* it may not have heard of the request */
            turns(&ctx, &gen, 50);
            (void)kvf_send_cancel(ctx.agent, send, KVF_ERR_CANCELLED);
        }
        finish(&ctx, &gen);
        side_give(&ctx, MAX_BLOCKS);
        /* No byte comes to a page that was given back. */
        side_give(&gen, MAX_BLOCKS);
        side_take(&gen, MAX_BLOCKS, 1, false);
        turns(&ctx, &gen, 50);
        for (uint32_t g = 0; g < 2; g++) {
            for (int b = 0; b < MAX_BLOCKS; b++) {
                const uint8_t *page = kvf_pool_page(gen.pools[g], gen.slots[g][b]);
                for (uint64_t i = 0; i < kvf_group_block_bytes(&layout.groups[g]); i++) {
                    cr_assert_eq(page[i], 0);
                }
            }
        }
        side_give(&gen, MAX_BLOCKS);
    }
    cr_assert_eq(transfer(&ctx, &gen), KVF_OK);
    close_both(&ctx, &gen);
}
