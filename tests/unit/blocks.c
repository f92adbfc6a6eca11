/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/blocks.h"
#include "tools/presets.h"

#include "../support/leaks.h"

#include <criterion/criterion.h>
#include <string.h>

static kvf_layout_t layout;
static kvf_detail_t detail;
static kvf_agent_t *agent;
static kvf_pools_t pools;
static kvf_blocks_t *blocks;

/* gemma-3-270m, 32 tokens a block: group 0 "full" with 98304 bytes a page, group 1 "swa" with a
 * window of 512 and 491520 bytes a page. */
static void make(uint64_t bytes, bool generation_side, int64_t chunk_tokens) {
    kvf_agent_config_t config;
    const kvf_blocks_config_t desc = {generation_side, true, chunk_tokens};
    if (layout.n_groups == 0) {
        cr_assert_eq(kvf_preset_get("gemma-3-270m", 32, &layout, &detail), KVF_OK);
    }
    kvf_agent_config_init(&config);
    config.instance = "test";
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    memset(config.cluster_key, 7, sizeof(config.cluster_key));
    cr_assert_eq(kvf_agent_create(&config, &agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pools_create(agent, &layout, &(kvf_pool_desc_t){.memory = "host"}, bytes,
                                  chunk_tokens, &pools, &detail),
                 KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_blocks_create(kvf_alloc_default(), &pools, &desc, &blocks, &detail), KVF_OK);
}

static void expect_pages(uint32_t g, int64_t held, int64_t cached) {
    kvf_pool_info_t info;
    kvf_pool_get_info(pools.pools[g], &info);
    cr_expect_eq(info.held, held, "group %u: %d held", g, (int)info.held);
    cr_expect_eq(info.cached, cached, "group %u: %d cached", g, (int)info.cached);
    cr_expect_eq(info.free, info.n_pages - held - cached);
}

/* Nothing is left when all is closed. */
static void end(void) {
    kvf_blocks_destroy(blocks);
    for (uint32_t g = 0; g < layout.n_groups; g++) {
        expect_pages(g, 0, 0);
    }
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    check_leaks();
}

static kvf_status_t open_one(int64_t prompt, int64_t drafts, int64_t extra, const int64_t *ids,
                             kvf_lease_t *lease) {
    const kvf_lengths_t lengths = {
        .prompt_len = prompt, .draft_len = drafts, .num_extra_kv_tokens = extra};
    const kvf_content_t content = {ids, (prompt + 511) / 512, 0};
    return kvf_blocks_open(blocks, &lengths, &content, lease, &detail);
}

static void *page_of(const kvf_lease_t *lease, uint32_t g, int64_t ordinal) {
    kvf_table_t tables[KVF_MAX_GROUPS];
    kvf_blocks_tables(blocks, lease, tables);
    return kvf_pool_page(pools.pools[g], tables[g].slots[ordinal]);
}

Test(blocks, a_lease_in_one_step_binds_what_is_attended_to_and_nothing_else) {
    for (int side = 0; side < 2; side++) {
        make(UINT64_C(48) << 20, side == 1, 0);
        kvf_lease_t lease;
        kvf_table_t tables[KVF_MAX_GROUPS];
        cr_assert_eq(open_one(1000, 100, 0, NULL, &lease), KVF_OK);
        cr_assert_eq(lease.capacity_tokens, side ? 1100 : 1000);
        cr_assert_eq(kvf_seq_tokens(lease.seq), 1000);
        kvf_blocks_tables(blocks, &lease, tables);
        for (uint32_t g = 0; g < 2; g++) {
            int64_t bound = 0;
            cr_assert_eq(tables[g].n_blocks, side ? 35 : 32);
            for (int64_t i = 0; i < tables[g].n_blocks; i++) {
                /* Window 512: the query at 1000 sees [489, 1000], so block 15 is the first. */
                bool live = g == 0 || i >= 15;
                cr_assert_eq(tables[g].slots[i] >= 0, live, "group %u ordinal %d", g, (int)i);
                bound += live;
            }
            expect_pages(g, bound, 0);
        }
        kvf_blocks_close(blocks, &lease);
        kvf_blocks_close(blocks, &lease);
        end();
    }
}

Test(blocks, sinks_are_bound_in_front_of_the_window) {
    cr_assert_eq(kvf_preset_get("gemma-3-270m", 32, &layout, &detail), KVF_OK);
    layout.groups[1].sinks = 40;
    make(UINT64_C(48) << 20, false, 0);
    kvf_lease_t lease;
    cr_assert_eq(open_one(1000, 0, 0, NULL, &lease), KVF_OK);
    for (int64_t i = 0; i < 32; i++) {
        cr_assert_eq(kvf_seq_table(lease.seq, 1).slots[i] >= 0, i < 2 || i >= 15, "%d", (int)i);
    }
    kvf_blocks_close(blocks, &lease);
    end();
}

Test(blocks, a_lease_takes_all_pages_or_none) {
    make(UINT64_C(16) << 20, false, 0);
    kvf_lease_t first, second = {.seq = NULL};
    cr_assert_eq(open_one(512, 0, 0, NULL, &first), KVF_OK);
    cr_assert_lt(pools.n_pages[1], 32, "no second one fits");
    cr_assert_eq(open_one(512, 0, 0, NULL, &second), KVF_ERR_AGAIN);
    cr_assert_null(second.seq);
    expect_pages(0, 16, 0);
    expect_pages(1, 16, 0);
    cr_assert_eq(open_one((pools.n_pages[0] + 1) * 32, 0, 0, NULL, &second), KVF_ERR_TOO_LARGE);
    cr_assert_not_null(strstr(detail.text, "group full"), "%s", detail.text);
    cr_assert_eq(open_one(INT64_C(1) << 40, 0, 0, NULL, &second), KVF_ERR_TOO_LARGE);
    cr_assert_eq(open_one(0, 0, 0, NULL, &second), KVF_ERR_INVALID);
    kvf_blocks_close(blocks, &first);
    end();
}

/* The prefill side of a prompt that was seen before computes its last token again, in a page of its
 * own that has the bytes of the others. */
Test(blocks, a_shared_last_page_is_copied_before_it_is_written) {
    static const int64_t ids[] = {5, 6};
    make(UINT64_C(64) << 20, false, 0);
    kvf_lease_t first, second;
    cr_assert_eq(open_one(600, 0, 0, ids, &first), KVF_OK);
    cr_assert_eq(kvf_seq_cached_tokens(first.seq), 0);
    memset(page_of(&first, 0, 18), 0x5a, 98304); /* tokens 576 .. 599 */
    memset(page_of(&first, 1, 18), 0xa5, 491520);
    cr_assert_eq(kvf_blocks_settle(blocks, &first, 600), KVF_OK);
    cr_assert_eq(open_one(600, 0, 0, ids, &second), KVF_OK);
    cr_assert_eq(kvf_seq_cached_tokens(second.seq), 599);
    cr_assert_eq(kvf_seq_tokens(second.seq), 600);
    for (int64_t i = 0; i < 19; i++) {
        int32_t ours = kvf_seq_table(first.seq, 0).slots[i];
        int32_t theirs = kvf_seq_table(second.seq, 0).slots[i];
        cr_assert_eq(ours == theirs, i < 18, "ordinal %d", (int)i);
    }
    const uint8_t *full = page_of(&second, 0, 18), *swa = page_of(&second, 1, 18);
    cr_assert(full[0] == 0x5a && memcmp(full, full + 1, 98303) == 0);
    cr_assert(swa[0] == 0xa5 && memcmp(swa, swa + 1, 491519) == 0);
    kvf_blocks_close(blocks, &second);
    /* 600 tokens of full; the query at 600 sees [89, 600], so blocks 2 .. 18 of swa. */
    expect_pages(0, 19, 0);
    kvf_blocks_close(blocks, &first);
    expect_pages(0, 0, 19);
    expect_pages(1, 0, 17);
    end();
}

Test(blocks, a_receiver_finds_a_whole_prompt_and_none_without_ids) {
    static const int64_t ids[] = {5, 6}, other[] = {7, 6};
    kvf_lease_t lease;
    make(UINT64_C(64) << 20, true, 0);
    cr_assert_eq(open_one(600, 3, 1, ids, &lease), KVF_OK);
    cr_assert_eq(kvf_blocks_settle(blocks, &lease, 600), KVF_OK);
    kvf_blocks_close(blocks, &lease);
    cr_assert_eq(open_one(600, 3, 1, ids, &lease), KVF_OK);
    cr_assert_eq(kvf_seq_cached_tokens(lease.seq), 600);
    /* Speculation beyond the prompt, and back. */
    cr_assert_eq(kvf_blocks_append(blocks, &lease, 4), KVF_OK);
    cr_assert_eq(kvf_blocks_rewind(blocks, &lease, 600), KVF_OK);
    cr_assert_eq(kvf_blocks_rewind(blocks, &lease, 599), KVF_ERR_INVALID, "that was found");
    kvf_blocks_close(blocks, &lease);
    cr_assert_eq(open_one(600, 3, 1, NULL, &lease), KVF_OK);
    cr_assert_eq(kvf_seq_cached_tokens(lease.seq), 0);
    kvf_blocks_close(blocks, &lease);
    cr_assert_eq(open_one(600, 3, 1, other, &lease), KVF_OK);
    cr_assert_eq(kvf_seq_cached_tokens(lease.seq), 0, "an equal second piece is no prefix");
    kvf_blocks_close(blocks, &lease);
    end();
}

/* A window's pages in front of a prefix are dead for the prompt, and needed to go on from it. */
Test(blocks, no_reuse_where_the_pool_has_no_room_for_both_windows) {
    static const int64_t ids[] = {5, 6, 7, 8};
    for (int large = 0; large < 2; large++) {
        make(large ? UINT64_C(80) << 20 : UINT64_C(40) << 20, false, 0);
        cr_assert_eq(pools.n_pages[1] >= 34, large);
        kvf_lease_t lease;
        cr_assert_eq(open_one(600, 0, 0, ids, &lease), KVF_OK);
        cr_assert_eq(kvf_blocks_settle(blocks, &lease, 600), KVF_OK);
        kvf_blocks_close(blocks, &lease);
        cr_assert_eq(open_one(1800, 0, 0, ids, &lease), KVF_OK);
        cr_assert_eq(kvf_seq_cached_tokens(lease.seq), large ? 576 : 0);
        kvf_blocks_close(blocks, &lease);
        end();
    }
}

/* Chunks: a lease holds what a window and a chunk need, never the whole prompt, and what it will
 * need is nobody else's before it comes for it. */
Test(blocks, chunks_hold_a_window_and_a_chunk) {
    make(UINT64_C(48) << 20, false, 100);
    kvf_lease_t first, second;
    int64_t n = pools.n_pages[1];
    /* 611 tokens touch at most 21 blocks. */
    cr_assert_gt(n, 21);
    cr_assert_lt(n, 42);
    cr_assert_eq(open_one(1600, 0, 0, NULL, &first), KVF_OK);
    cr_assert_eq(kvf_seq_tokens(first.seq), 0);
    expect_pages(1, 0, 0);
    cr_assert_eq(open_one(1600, 0, 0, NULL, &second), KVF_ERR_AGAIN, "its pages are set aside");
    cr_assert_eq(open_one((n - 21) * 32, 0, 0, NULL, &second), KVF_OK);
    int64_t most = 0;
    for (int64_t done = 0; done < 1600; done += 100) {
        kvf_pool_info_t info;
        cr_assert_eq(kvf_blocks_append(blocks, &first, 100), KVF_OK, "at %d", (int)done);
        kvf_pool_get_info(pools.pools[1], &info);
        most = info.held > most ? info.held : most;
        cr_assert_eq(kvf_blocks_settle(blocks, &first, done + 100), KVF_OK);
    }
    cr_assert_leq(most, 21);
    cr_assert_gt(most, 18);
    /* What the query at 1600 sees: [1089, 1600], blocks 34 .. 49. */
    expect_pages(1, 16, 0);
    expect_pages(0, 50, 0);
    kvf_blocks_close(blocks, &second);
    kvf_blocks_close(blocks, &first);
    cr_assert_eq(open_one(1600, 0, 0, NULL, &first), KVF_OK);
    kvf_blocks_close(blocks, &first);
    end();
}

/* A block that is found in part is computed again, in a page of the lease's own. */
Test(blocks, chunks_go_on_at_the_edge_of_a_block) {
    static const struct {
        int64_t prompt, cached;
    } rows[] = {{1, 0}, {31, 0}, {32, 0}, {33, 32}, {600, 576}, {608, 576}, {609, 608}};
    make(UINT64_C(80) << 20, false, 100);
    for (size_t k = 0; k < sizeof(rows) / sizeof(rows[0]); k++) {
        const int64_t ids[] = {10 * (int64_t)k, 10 * (int64_t)k + 1};
        int64_t prompt = rows[k].prompt, n_blocks = (prompt + 31) / 32;
        kvf_lease_t first, second;
        cr_assert_eq(open_one(prompt, 0, 0, ids, &first), KVF_OK);
        cr_assert_eq(kvf_blocks_append(blocks, &first, prompt), KVF_OK);
        cr_assert_eq(kvf_blocks_settle(blocks, &first, prompt), KVF_OK);
        cr_assert_eq(open_one(prompt, 0, 0, ids, &second), KVF_OK);
        cr_assert_eq(kvf_seq_cached_tokens(second.seq), rows[k].cached, "prompt of %d",
                     (int)prompt);
        cr_assert_eq(kvf_seq_table(second.seq, 0).n_blocks, rows[k].cached / 32);
        cr_assert_eq(kvf_blocks_append(blocks, &second, prompt - rows[k].cached), KVF_OK);
        for (int64_t i = 0; i < n_blocks; i++) {
            bool shared =
                kvf_seq_table(first.seq, 0).slots[i] == kvf_seq_table(second.seq, 0).slots[i];
            cr_assert_eq(shared, i < rows[k].cached / 32, "ordinal %d", (int)i);
        }
        kvf_blocks_close(blocks, &second);
        kvf_blocks_close(blocks, &first);
    }
    end();
}

/* Requests one after the other fill the pool several times: the oldest pages make room. */
Test(blocks, what_is_cached_makes_room) {
    make(UINT64_C(24) << 20, true, 0);
    for (int64_t k = 0; k < 30; k++) {
        const int64_t ids[] = {100 + k, 200 + k};
        kvf_lease_t lease;
        cr_assert_eq(open_one(600, 0, 0, ids, &lease), KVF_OK, "%d", (int)k);
        cr_assert_eq(kvf_seq_cached_tokens(lease.seq), 0);
        cr_assert_eq(kvf_blocks_settle(blocks, &lease, 600), KVF_OK);
        kvf_blocks_close(blocks, &lease);
        cr_assert_eq(open_one(600, 0, 0, ids, &lease), KVF_OK, "%d", (int)k);
        cr_assert_eq(kvf_seq_cached_tokens(lease.seq), 600);
        kvf_blocks_close(blocks, &lease);
    }
    end();
}

static kvf_status_t live_a_life(const kvf_alloc_t *alloc) {
    static const int64_t ids[] = {5, 6};
    const kvf_blocks_config_t desc = {true, true, 0};
    const kvf_lengths_t lengths = {.prompt_len = 600, .num_extra_kv_tokens = 1};
    const kvf_content_t content = {ids, 2, 0};
    kvf_blocks_t *mine;
    kvf_status_t status = kvf_blocks_create(alloc, &pools, &desc, &mine, &detail);
    if (status != KVF_OK) {
        return status;
    }
    for (int i = 0; status == KVF_OK && i < 2; i++) {
        kvf_lease_t lease;
        status = kvf_blocks_open(mine, &lengths, &content, &lease, &detail);
        if (status == KVF_OK) {
            status = kvf_blocks_append(mine, &lease, 100);
            if (status == KVF_OK) {
                cr_assert_eq(kvf_blocks_rewind(mine, &lease, 600), KVF_OK);
                cr_assert_eq(kvf_blocks_settle(mine, &lease, 600), KVF_OK);
            }
            kvf_blocks_close(mine, &lease);
        }
    }
    kvf_blocks_destroy(mine);
    return status;
}

Test(blocks, every_allocation_may_fail) {
    make(UINT64_C(48) << 20, true, 0);
    uint64_t n = 1;
    for (bool done = false; !done; n++) {
        kvf_alloc_fail_t fail;
        kvf_alloc_fail_init(&fail, n);
        kvf_status_t status = live_a_life(&fail.table);
        done = status == KVF_OK;
        cr_assert(done || status == KVF_ERR_NO_MEMORY);
        cr_assert_eq(fail.live, 0, "failure %lu leaks", (unsigned long)n);
        cr_assert_eq(done, fail.calls < n);
        expect_pages(0, 0, 0);
        expect_pages(1, 0, 0);
    }
    cr_assert_gt(n, 8);
    end();
}
