/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/pools.h"
#include "tools/presets.h"

#include <criterion/criterion.h>
#include <string.h>

static kvf_layout_t layout;
static kvf_detail_t detail;
static int64_t n_pages[KVF_MAX_GROUPS];

static void use(const char *preset, uint32_t tokens_per_block) {
    cr_assert_eq(kvf_preset_get(preset, tokens_per_block, &layout, &detail), KVF_OK);
}

/* Pages of a group that a request holds, counted token by token. */
static int64_t count_pages(const kvf_layer_group_t *group, int64_t prompt, int64_t tokens) {
    int64_t n = 0, last = -1;
    for (int64_t token = 0; token < tokens; token++) {
        /* A whole block counts when any position of its full extent is seen by the query at
         * `prompt`. */
        int64_t block = token / group->tokens_per_block;
        int64_t block_end = (block + 1) * group->tokens_per_block;
        bool seen = group->window == 0 || token >= prompt || block_end > prompt - group->window + 1;
        if (seen && block != last) {
            n++;
            last = block;
        }
    }
    return n;
}

Test(pools, the_cut_follows_the_reference_prompt) {
    static const uint32_t blocks[] = {16, 32, 64, 128};
    for (size_t p = 0; kvf_preset_names[p] != NULL; p++) {
        for (size_t b = 0; b < 4; b++) {
            use(kvf_preset_names[p], blocks[b]);
            const uint64_t bytes = UINT64_C(64) << 30;
            cr_assert_eq(kvf_pools_cut(&layout, bytes, n_pages, &detail), KVF_OK);
            uint64_t used = 0;
            for (uint32_t g = 0; g < layout.n_groups; g++) {
                used += (uint64_t)n_pages[g] * kvf_group_block_bytes(&layout.groups[g]);
                double requests =
                    (double)n_pages[g] / (double)count_pages(&layout.groups[g], 8192, 8192);
                double first =
                    (double)n_pages[0] / (double)count_pages(&layout.groups[0], 8192, 8192);
                cr_assert(requests > 0.99 * first && requests < 1.01 * first,
                          "%s group %u: %g and %g requests", kvf_preset_names[p], g, requests,
                          first);
            }
            cr_assert_leq(used, bytes);
            cr_assert_gt(used, bytes / 100 * 99, "nearly all of it is used");
        }
    }
}

Test(pools, a_small_pool_still_holds_a_whole_window) {
    use("gemma-3-270m", 32);
    /* Windowed group: 17 live blocks and one of scratch, 491520 bytes each; full group: 98304
     * bytes. */
    const uint64_t least = 18 * 491520 + 98304;
    cr_assert_eq(kvf_pools_cut(&layout, least - 1, n_pages, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "pool.bytes"));
    cr_assert_not_null(strstr(detail.text, "8945664"), "%s", detail.text);
    cr_assert_eq(kvf_pools_cut(&layout, least, n_pages, &detail), KVF_OK);
    cr_assert_eq(n_pages[0], 1);
    cr_assert_eq(n_pages[1], 18);
    cr_assert_eq(kvf_pools_cut(&layout, least + 98304 * 10, n_pages, &detail), KVF_OK);
    cr_assert_eq(n_pages[0], 11);
    cr_assert_eq(n_pages[1], 18);
}

Test(pools, every_prompt_fits_the_windowed_group_of_the_smallest_pool) {
    use("gpt-oss-20b", 16);
    const kvf_layer_group_t *swa = &layout.groups[1];
    int64_t most = 0;
    for (int64_t prompt = 1; prompt < 1000; prompt++) {
        kvf_lengths_t lengths = {.prompt_len = prompt, .draft_len = 5};
        kvf_block_counts_t counts;
        int64_t n;
        cr_assert_eq(kvf_pools_need(swa, &lengths, true, &n, &counts, &detail), KVF_OK);
        cr_assert_eq(n, count_pages(swa, prompt, prompt + 5), "prompt %d", (int)prompt);
        most = n > most ? n : most;
    }
    int64_t floors[KVF_MAX_GROUPS];
    uint64_t bytes = 1;
    while (kvf_pools_cut(&layout, bytes, floors, &detail) != KVF_OK) {
        bytes += 65536;
    }
    cr_assert_geq(floors[1], most);
}

static kvf_agent_t *agent;
static kvf_pools_t pools;

static void make_agent(uint64_t bytes) {
    kvf_agent_config_t config;
    kvf_agent_config_init(&config);
    config.instance = "test";
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    memset(config.cluster_key, 7, sizeof(config.cluster_key));
    cr_assert_eq(kvf_agent_create(&config, &agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pools_create(agent, &layout, "host", bytes, &pools, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_agent_start(agent, &detail), KVF_OK, "%s", detail.text);
}

static int64_t free_pages(uint32_t g) {
    kvf_pool_info_t info;
    kvf_pool_get_info(pools.pools[g], &info);
    cr_assert_eq(info.n_pages, pools.n_pages[g]);
    cr_assert_eq(info.free + info.held, info.n_pages);
    return info.free;
}

Test(pools, a_lease_binds_what_is_attended_to_and_nothing_else) {
    use("gemma-3-270m", 32);
    make_agent(UINT64_C(48) << 20);
    kvf_lengths_t lengths = {.prompt_len = 1000, .draft_len = 100};
    for (int drafts = 0; drafts < 2; drafts++) {
        kvf_lease_t lease;
        int64_t tokens = drafts ? 1100 : 1000;
        cr_assert_eq(
            kvf_lease_acquire(kvf_alloc_default(), &pools, &lengths, drafts, &lease, &detail),
            KVF_OK);
        cr_assert_eq(lease.capacity_tokens, tokens);
        for (uint32_t g = 0; g < 2; g++) {
            const kvf_table_t *table = &lease.tables[g];
            int64_t bound = 0;
            cr_assert_eq(table->n_blocks, drafts ? 35 : 32);
            for (int64_t i = 0; i < table->n_blocks; i++) {
                /* Window 512: the query at 1000 sees [489, 1000], so block 15 is the first. */
                bool live = g == 0 || i >= 15;
                cr_assert_eq(table->slots[i] >= 0, live, "group %u ordinal %d", g, (int)i);
                bound += live;
                for (int64_t k = 0; live && k < i; k++) {
                    cr_assert_neq(table->slots[i], table->slots[k]);
                }
            }
            cr_assert_eq(free_pages(g), pools.n_pages[g] - bound);
        }
        kvf_lease_release(kvf_alloc_default(), &pools, &lease);
        kvf_lease_release(kvf_alloc_default(), &pools, &lease);
        cr_assert_eq(free_pages(0), pools.n_pages[0]);
        cr_assert_eq(free_pages(1), pools.n_pages[1]);
    }
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

Test(pools, sinks_are_bound_in_front_of_the_window) {
    use("gemma-3-270m", 32);
    layout.groups[1].sinks = 40;
    make_agent(UINT64_C(48) << 20);
    kvf_lengths_t lengths = {.prompt_len = 1000};
    kvf_lease_t lease;
    cr_assert_eq(kvf_lease_acquire(kvf_alloc_default(), &pools, &lengths, false, &lease, &detail),
                 KVF_OK);
    for (int64_t i = 0; i < 32; i++) {
        cr_assert_eq(lease.tables[1].slots[i] >= 0, i < 2 || i >= 15, "ordinal %d", (int)i);
    }
    kvf_lease_release(kvf_alloc_default(), &pools, &lease);
    cr_assert_eq(free_pages(1), pools.n_pages[1]);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

Test(pools, a_lease_takes_all_pages_or_none) {
    use("gemma-3-270m", 32);
    make_agent(UINT64_C(16) << 20);
    kvf_lengths_t lengths = {.prompt_len = 512};
    kvf_lease_t first, second;
    cr_assert_eq(kvf_lease_acquire(kvf_alloc_default(), &pools, &lengths, false, &first, &detail),
                 KVF_OK);
    int64_t left[2] = {free_pages(0), free_pages(1)};
    cr_assert_lt(left[1], 16);
    cr_assert_eq(kvf_lease_acquire(kvf_alloc_default(), &pools, &lengths, false, &second, &detail),
                 KVF_ERR_AGAIN);
    cr_assert_eq(free_pages(0), left[0]);
    cr_assert_eq(free_pages(1), left[1]);
    lengths.prompt_len = (pools.n_pages[0] + 1) * 32;
    cr_assert_eq(kvf_lease_acquire(kvf_alloc_default(), &pools, &lengths, false, &second, &detail),
                 KVF_ERR_TOO_LARGE);
    cr_assert_not_null(strstr(detail.text, "group full"), "%s", detail.text);
    lengths.prompt_len = INT64_C(1) << 40;
    cr_assert_eq(kvf_pools_fit(&pools, &lengths, false, &detail), KVF_ERR_TOO_LARGE);
    lengths.prompt_len = 0;
    cr_assert_eq(kvf_pools_fit(&pools, &lengths, false, &detail), KVF_ERR_INVALID);
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 1);
    lengths.prompt_len = 1;
    cr_assert_eq(kvf_lease_acquire(&fail.table, &pools, &lengths, false, &second, &detail),
                 KVF_ERR_NO_MEMORY);
    kvf_lease_release(kvf_alloc_default(), &pools, &first);
    cr_assert_eq(free_pages(1), pools.n_pages[1]);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

Test(pools, more_than_the_machine_has_is_refused) {
    const uint64_t machine = UINT64_C(3) << 30;
    cr_assert_eq(kvf_pools_check_memory(machine, machine, &detail), KVF_OK);
    cr_assert_eq(kvf_pools_check_memory(machine + 1, machine, &detail), KVF_ERR_NO_MEMORY);
    cr_assert_not_null(strstr(detail.text, "pool.bytes: 3221225473 "));
    cr_assert_not_null(strstr(detail.text, " 3221225472 (3.0 GiB)"));
    cr_assert_eq(kvf_pools_check_memory(UINT64_C(1) << 50, machine, &detail), KVF_ERR_NO_MEMORY);
    cr_assert_not_null(strstr(detail.text, "(1048576.0 GiB)"));
}
