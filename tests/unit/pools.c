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
            cr_assert_eq(kvf_pools_cut(&layout, bytes, 0, n_pages, &detail), KVF_OK);
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
    cr_assert_eq(kvf_pools_cut(&layout, least - 1, 0, n_pages, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "pool.bytes"));
    cr_assert_not_null(strstr(detail.text, "8945664"), "%s", detail.text);
    cr_assert_eq(kvf_pools_cut(&layout, least, 0, n_pages, &detail), KVF_OK);
    cr_assert_eq(n_pages[0], 1);
    cr_assert_eq(n_pages[1], 18);
    cr_assert_eq(kvf_pools_cut(&layout, least + 98304 * 10, 0, n_pages, &detail), KVF_OK);
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
    while (kvf_pools_cut(&layout, bytes, 0, floors, &detail) != KVF_OK) {
        bytes += 65536;
    }
    cr_assert_geq(floors[1], most);
}

/* Chunk by chunk, position by position: the most blocks of a window that a prompt holds between
 * the append of a chunk and the slide after it. */
static int64_t most_in_chunks(const kvf_layer_group_t *group, int64_t prompt, int64_t chunk) {
    int64_t most = 0, t = group->tokens_per_block;
    for (int64_t done = 0; done < prompt; done += chunk) {
        int64_t end = done + chunk < prompt ? done + chunk : prompt, n = 0;
        for (int64_t block = 0; block * t < end; block++) {
            /* The first token of the chunk sees window - 1 positions in front of it. */
            n += (block + 1) * t > done + 1 - group->window;
        }
        most = n > most ? n : most;
    }
    return most;
}

Test(pools, the_smallest_pool_for_chunks_holds_every_prompt) {
    static const int64_t chunks[] = {1, 31, 32, 33, 100, 512};
    use("gpt-oss-20b", 16);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        int64_t most = 0;
        for (int64_t prompt = 1; prompt < 1500; prompt += 7) {
            int64_t n = most_in_chunks(&layout.groups[1], prompt, chunks[i]);
            most = n > most ? n : most;
        }
        uint64_t bytes = kvf_group_block_bytes(&layout.groups[0]);
        while (kvf_pools_cut(&layout, bytes, chunks[i], n_pages, &detail) != KVF_OK) {
            bytes += kvf_group_block_bytes(&layout.groups[1]);
        }
        cr_assert_geq(n_pages[1], most, "chunk %d", (int)chunks[i]);
        cr_assert_leq(n_pages[1], most + 2, "chunk %d: %d for %d", (int)chunks[i], (int)n_pages[1],
                      (int)most);
    }
    /* No chunk is longer than the prompt that the cut is made for. */
    uint64_t whole = 8192 / 16 * kvf_group_block_bytes(&layout.groups[1]);
    cr_assert_eq(kvf_pools_cut(&layout, 2 * whole, INT64_C(1) << 40, n_pages, &detail), KVF_OK);
    cr_assert_eq(n_pages[0], 512);
    cr_assert_eq(n_pages[1], 512);
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
