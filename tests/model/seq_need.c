/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools of just the pages that kvf_seqs_need() asks for: a request alone never waits there,
 * whatever it finds of itself in the prefix index.
 */
#include "tests/support/random.h"
#include "tests/support/seqs.h"

#define REQUESTS 20000
#define GROUPS 3
#define PIECE 5
#define PROMPT 60

static test_random_t dice;
static int64_t n_tight; /* requests that held every page of a pool */

static int64_t roll(int64_t least, int64_t most) {
    return test_between(&dice, least, most);
}

struct request {
    kvf_seq_desc_t desc;
    int64_t ids[PROMPT];
    int64_t chunk;
};

/* Live, and look how many pages of each group are held at a time. */
static void live(const test_seqs_t *world, const struct request *request, int64_t *peak) {
    kvf_seq_t *seq = NULL;
    kvf_seq_copies_t copies;
    const kvf_lengths_t *lengths = &request->desc.lengths;
    int64_t prompt = kvf_prompt_tokens(lengths);
    cr_assert_eq(kvf_seq_open(world->seqs, &request->desc, &seq, NULL), KVF_OK);
    if (request->chunk == 0) {
        cr_assert_eq(kvf_seq_reserve(seq, &copies), KVF_OK);
    }
    for (bool more = true; more;) {
        int64_t at = kvf_seq_tokens(seq), left = prompt - at;
        more = at < prompt;
        int64_t most = request->chunk > 0 && request->chunk < left ? request->chunk : left;
        int64_t n = more ? roll(1, most) : request->desc.allocated_tokens - at;
        cr_assert_eq(kvf_seq_append(seq, n, &copies), KVF_OK, "%ld tokens after %ld of %ld",
                     (long)n, (long)at, (long)prompt);
        for (uint32_t g = 0; g < GROUPS; g++) {
            int64_t held = kvf_pages_count(world->pages[g], KVF_PAGE_HELD);
            peak[g] = held > peak[g] ? held : peak[g];
        }
        if (!more) {
            cr_assert_eq(kvf_seq_rewind(seq, roll(prompt, at + n)), KVF_OK);
        }
        int64_t tokens = kvf_seq_tokens(seq);
        cr_assert_eq(kvf_seq_publish(seq, tokens < prompt ? tokens : prompt), KVF_OK);
        cr_assert_eq(kvf_seq_slide(seq, tokens), KVF_OK);
    }
    kvf_seq_close(seq);
}

static void one_request(void) {
    test_group_t groups[GROUPS];
    struct request request = {
        .desc = {.lengths = {.draft_len = roll(0, 3), .num_extra_kv_tokens = roll(0, 8)}}};
    kvf_cp_t cp = {roll(1, 4) / 2, 0};
    cp.rank = cp.size > 1 ? roll(0, cp.size - 1) : 0;
    bool generation_side = roll(0, 1) == 1;
    int64_t prompt = roll(1, PROMPT);
    request.desc.lengths.prompt_len = prompt;
    request.desc.allocated_tokens = prompt + request.desc.lengths.num_extra_kv_tokens +
                                    (generation_side ? request.desc.lengths.draft_len : 0);
    request.desc.max_cached_tokens = roll(0, 1) == 0 ? prompt : roll(0, prompt);
    request.desc.content_ids = request.ids;
    request.desc.n_content_ids = (prompt + PIECE - 1) / PIECE;
    request.chunk = roll(0, 2) == 0 ? 0 : roll(1, 20);
    for (uint32_t g = 0; g < GROUPS; g++) {
        groups[g] = (test_group_t){.tokens_per_block = roll(1, 8),
                                   .window = roll(0, 2) == 0 ? 0 : roll(1, 30),
                                   .sinks = roll(0, 2) == 0 ? roll(0, 9) : 0,
                                   .n_pages = 1000};
    }
    test_seqs_t world;
    int64_t need[GROUPS], peak[GROUPS] = {0};
    test_seqs_init(&world, kvf_alloc_default(), GROUPS, groups, generation_side, PIECE, cp);
    cr_assert_eq(kvf_seqs_need(world.seqs, &request.desc.lengths, request.chunk, need, NULL),
                 KVF_OK);
    test_seqs_end(&world);
    for (uint32_t g = 0; g < GROUPS; g++) {
        groups[g].n_pages = need[g] > 0 ? need[g] : 1;
    }
    test_seqs_init(&world, kvf_alloc_default(), GROUPS, groups, generation_side, PIECE, cp);
    for (int life = 0; life < 4; life++) {
        live(&world, &request, peak);
    }
    for (uint32_t g = 0; g < GROUPS; g++) {
        cr_assert_leq(peak[g], need[g]);
        n_tight += peak[g] == need[g];
    }
    test_seqs_end(&world);
}

Test(seq_need, a_request_alone_never_waits, .timeout = 300) {
    dice = test_random("seq_need");
    for (int i = 0; i < REQUESTS; i++) {
        one_request();
    }
    cr_assert_gt(n_tight, REQUESTS * GROUPS / 2, "%ld of %d pools were filled", (long)n_tight,
                 REQUESTS * GROUPS);
}
