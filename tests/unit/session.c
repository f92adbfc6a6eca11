/* SPDX-License-Identifier: Apache-2.0 */
/* Connections that break under transfers whose nodes live on. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

#define PROMPT 40

/* The bytes of the pages that travel for PROMPT tokens: all blocks of "full"; of "swa" those that
 * hold one of the last 23 positions (the window, less the query itself). */
static uint64_t bytes_due(const kvf_layout_t *layout) {
    return 5 * kvf_group_block_bytes(&layout->groups[0]) +
           3 * kvf_group_block_bytes(&layout->groups[1]);
}

static void expect_whole(pair_t *p, uint64_t k) {
    kvf_counters_t sent, got;
    expect_one_end_each(p);
    cr_expect_eq(p->got.status, KVF_OK, "write %d: %s", (int)k, p->got.message);
    cr_expect_eq(p->sent.status, KVF_OK, "write %d: %s", (int)k, p->sent.message);
    cr_expect_eq(node_wrong(p->gen, p->prompt, CONTENT, p->destinations), 0);
    kvf_core_counters(p->ctx->core, &sent);
    kvf_core_counters(p->gen->core, &got);
    cr_expect_eq(sent.bytes_sent, bytes_due(&p->ctx->layout), "each range once");
    cr_expect(got.bytes_received == sent.bytes_sent || got.bytes_received == 0,
              "one-sided: unseen");
    cr_expect_eq(got.refused_chunks, 0);
}

ParameterizedTestParameters(session, cut_at_every_write) {
    static int index[2 * CUTS];
    for (int i = 0; i < 2 * CUTS; i++) {
        index[i] = i;
    }
    return cr_make_param_array(int, index, 2 * CUTS);
}

/* Wherever the connection breaks, from the first preamble to the last acknowledgement, the transfer
 * goes on and moves each range once. */
ParameterizedTest(int *i, session, cut_at_every_write) {
    for (uint64_t k = 1;; k++) {
        pair_t p;
        pair_open(&p, &(cluster_options_t){.one_sided = *i % 2 == 1}, PROMPT);
        cluster_cut_at(p.cluster, k, (cut_t)(*i / 2));
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cluster_advance(p.cluster, 1500000);
        bool cut = cluster_was_cut(p.cluster);
        expect_whole(&p, k);
        pair_close(&p);
        if (!cut || k == 20) {
            cr_expect_eq(k, 20, "the conversation is longer than %d writes", (int)k);
            break;
        }
    }
}
