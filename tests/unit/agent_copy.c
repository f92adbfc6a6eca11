/* SPDX-License-Identifier: Apache-2.0 */
/* Agents on one machine whose bytes the receiver copies itself: with few and many threads, in short
 * jobs and long ones, with digests and without; and what carries where that is not possible. */
#include "../support/agent_sides.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>

Test(agent_copy, one_thread, .timeout = 60) {
    run((side_t){.threads = 1}, (side_t){.threads = 1}, "mapped");
}

Test(agent_copy, many_threads, .timeout = 60) {
    run((side_t){.threads = 64}, (side_t){.threads = 64}, "mapped");
}

Test(agent_copy, without_digests, .timeout = 60) {
    run((side_t){.threads = 3}, (side_t){.threads = 2, .no_digests = true}, "mapped");
}

Test(agent_copy, only_mapped, .timeout = 60) {
    run((side_t){.mover = "mapped"}, (side_t){.mover = "mapped"}, "mapped");
}

Test(agent_copy, not_where_a_side_only_carries, .timeout = 60) {
    static const char *const movers[] = {"ucx", "tcp"};
    for (size_t i = 0; i < 2; i++) {
        run((side_t){.mover = movers[i]}, (side_t){.threads = 0}, movers[i]);
        run((side_t){.threads = 0}, (side_t){.mover = movers[i]}, movers[i]);
    }
}

/* Both have both movers, and each says by its transports which one it would rather have. */
Test(agent_copy, what_both_would_rather_have, .timeout = 60) {
    side_t rather_tcp = {.memory = "host"}, rather_ucx = {.memory = "host", .tls = "tcp,self"};
    run(rather_tcp, rather_tcp, "tcp");
    run(rather_ucx, rather_ucx, "ucx");
    run(rather_tcp, rather_ucx, "tcp");
    run(rather_ucx, rather_tcp, "tcp");
}

Test(agent_copy, not_with_memory_of_its_own, .timeout = 60) {
    run((side_t){.memory = "host"}, (side_t){.threads = 0}, "tcp");
    run((side_t){.threads = 0}, (side_t){.memory = "host"}, "tcp");
}

Test(agent_copy, mapped_needs_shared_memory, .timeout = 60) {
    side_t side = {.mover = "mapped", .memory = "host"};
    kvf_detail_t detail = {""};
    side_make(&side, "ctx");
    cr_assert_eq(kvf_agent_start(side.agent, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "kind shm"), "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(side.agent), KVF_OK);
    check_leaks();
}

/* Break the connections that this process has made to an address, as a network would. */
static void cut(const char *address) {
    const unsigned long port = strtoul(strrchr(address, ':') + 1, NULL, 10);
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in peer = {0};
        socklen_t len = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_family == AF_INET &&
            ntohs(peer.sin_port) == port) {
            cr_assert_eq(shutdown(fd, SHUT_RDWR), 0);
            n++;
        }
    }
    cr_assert_gt(n, 0);
}

/* The functions of an agent that its caller drives write to a connection that is gone: no signal
 * ends the caller's process, and nothing that was said is lost. */
Test(agent_copy, functions_after_the_connection_broke, .timeout = 60) {
    side_t ctx = {.threads = 1}, gen = {.threads = 1};
    char ticket[KVF_TICKET_BYTES];
    kvf_send_t send;
    kvf_recv_t recv;
    (void)signal(SIGPIPE, SIG_DFL);
    open_both(&ctx, &gen);
    side_take(&ctx, 1, 3, true);
    side_take(&gen, 1, 1, false);
    const kvf_send_desc_t offer = {.request_id = "r",
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = ctx.tables,
                                   .n_tables = 2};
    cr_assert_eq(kvf_send_open(ctx.agent, &offer, on_event, &ctx, &send, NULL), KVF_OK);
    cr_assert_eq(kvf_send_ticket(ctx.agent, send, ticket, sizeof(ticket)), KVF_OK);
    const kvf_recv_desc_t fetch = {.request_id = "r",
                                   .direction = KVF_PULL, /* each range is told */
                                   .ticket = ticket,
                                   .lengths = {.prompt_len = T},
                                   .allocated_tokens = T,
                                   .tables = gen.tables,
                                   .n_tables = 2,
                                   .handoff = KVF_HANDOFF_NONE};
    cr_assert_eq(kvf_recv_open(gen.agent, &fetch, on_event, &gen, &recv, NULL), KVF_OK);
    /* Until the pools are mapped: then the request comes, a few turns later. */
    kvf_peer_info_t peer = {.mover = ""};
    for (int i = 0, more = 0; i < 100000 && more < 200; i++) {
        kvf_agent_progress(gen.agent);
        kvf_agent_progress(ctx.agent);
        (void)kvf_agent_get_peers(ctx.agent, &peer, 1);
        more += strcmp(peer.mover, "mapped") == 0;
        (void)usleep(more > 0 ? 0 : 100);
    }
    cr_assert_str_eq(peer.mover, "mapped");
    cut(kvf_loop_address(ctx.agent->loop));
    for (uint32_t layer = 0; layer < 3; layer++) {
        const kvf_range_t range = {.layer_first = layer, .layer_end = layer + 1, .token_end = T};
        cr_assert_eq(kvf_send_ready(ctx.agent, send, &range, NULL, NULL), KVF_OK);
    }
    cr_assert_eq(kvf_send_finish(ctx.agent, send, NULL, NULL), KVF_OK);
    finish(&ctx, &gen);
    cr_assert_eq(gen.status, KVF_OK);
    cr_assert_eq(ctx.status, KVF_OK);
    cr_assert_eq(wrong_bytes(&gen, 1, T), 0);
    side_give(&ctx, 1);
    side_give(&gen, 1);
    close_both(&ctx, &gen);
}

/* The sender's memory changes behind the digest: what was copied is not what was sent, and that is
 * noticed. */
Test(agent_copy, a_source_that_changes, .timeout = 60) {
    enum { BLOCKS = 20, PROMPT = BLOCKS * T };
    side_t ctx = {.threads = 1}, gen = {.threads = 1};
    kvf_counters_t counters = {0};
    open_both(&ctx, &gen);
    side_take(&ctx, BLOCKS, 0, true);
    side_take(&gen, BLOCKS, 0, false);
    request(&ctx, &gen, PROMPT);
    /* Let the receiver ask, and then the sender answer; the receiver has not read it yet. */
    for (int i = 0; i < 100000 && counters.pieces_sent == 0; i++) {
        kvf_agent_progress(ctx.agent);
        kvf_agent_get_counters(ctx.agent, &counters);
        if (counters.pieces_sent == 0) {
            kvf_agent_progress(gen.agent);
        }
        (void)usleep(100);
    }
    uint8_t *page = kvf_pool_page(ctx.pools[0], ctx.slots[0][0]);
    page[0] ^= 0x10;
    finish(&ctx, &gen);
    cr_assert_eq(gen.status, KVF_ERR_DIGEST_MISMATCH);
    cr_assert_eq(ctx.status, KVF_ERR_DIGEST_MISMATCH);
    side_give(&ctx, BLOCKS);
    side_give(&gen, BLOCKS);
    close_both(&ctx, &gen);
}
