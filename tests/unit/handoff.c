/* SPDX-License-Identifier: Apache-2.0 */
/* What the sides of a request must agree about besides pages: capacity, tokens, draft groups; and
 * what the generation side has already. */
#include "../support/pair.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdio.h>

/* ---- tokens ---- */

typedef struct handoff {
    kvf_handoff_t mode;
    size_t n_first, n_drafts; /* handed over */
    int64_t draft_len;        /* the generation side's */
    const char *refusal;      /* NULL: taken */
} handoff_t;

static const handoff_t handoffs[] = {
    {KVF_HANDOFF_ALL, 1, 0, 0, NULL},
    {KVF_HANDOFF_ALL, 1, 3, 3, NULL},
    {KVF_HANDOFF_ALL, 4, 3, 3, NULL},
    {KVF_HANDOFF_ALL, 0, 3, 3, "no first token"},
    {KVF_HANDOFF_ALL, 0, 0, 0, "no first token"},
    {KVF_HANDOFF_ALL, 1, 0, 3, "0 draft tokens, when this request has 3"},
    {KVF_HANDOFF_ALL, 1, 2, 3, "2 draft tokens, when this request has 3"},
    {KVF_HANDOFF_ALL, 1, 3, 2, "3 draft tokens, when this request has 2"},
    {KVF_HANDOFF_ALL, 1, 3, 0, "3 draft tokens, when this request has 0"},
    {KVF_HANDOFF_FIRST, 1, 0, 3, NULL},
    {KVF_HANDOFF_FIRST, 1, 3, 3, NULL},
    {KVF_HANDOFF_FIRST, 1, 2, 3, "2 draft tokens, when this request has 3"},
    {KVF_HANDOFF_FIRST, 0, 0, 3, "no first token"},
    {KVF_HANDOFF_NONE, 0, 0, 3, NULL},
    {KVF_HANDOFF_NONE, 0, 2, 3, NULL},
};

ParameterizedTestParameters(handoff, tokens_are_counted) {
    static size_t index[sizeof(handoffs) / sizeof(handoffs[0])];
    for (size_t i = 0; i < sizeof(index) / sizeof(index[0]); i++) {
        index[i] = i;
    }
    return cr_make_param_array(size_t, index, sizeof(index) / sizeof(index[0]));
}

/* The pages are whole in all of them; other numbers of tokens end both sides with one error. */
ParameterizedTest(size_t *i, handoff, tokens_are_counted) {
    const handoff_t *h = &handoffs[*i];
    const int32_t tokens[] = {11, 12, 13, 14};
    const kvf_aux_t aux = {tokens, h->n_first, tokens, h->n_drafts, NULL, 0};
    const kvf_range_t all = {0, 5, 40, NULL, 0};
    kvf_layout_t layout = cluster_layout();
    pair_t p = {.prompt = 40};
    p.cluster = cluster_create(&(cluster_options_t){0});
    p.ctx = cluster_node(p.cluster, &layout, 64, NULL);
    p.gen = cluster_node(p.cluster, &layout, 64, NULL);
    node_take(p.ctx, 40, CONTENT, p.source, p.sources);
    node_take(p.gen, 40, 0, p.destination, p.destinations);
    kvf_send_desc_t offer = {.request_id = "r1",
                             .lengths = {.prompt_len = 40, .draft_len = (int64_t)h->n_drafts},
                             .allocated_tokens = 40,
                             .tables = p.sources,
                             .n_tables = 2};
    cr_assert_eq(kvf_core_send_open(p.ctx->core, &offer, watch_event, &p.sent, &p.send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ready(p.ctx->core, p.send, &all, NULL), KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(p.ctx->core, p.send, p.ticket, sizeof(p.ticket)), KVF_OK);
    kvf_recv_desc_t fetch = {.request_id = "r1",
                             .direction = cluster_direction(),
                             .ticket = p.ticket,
                             .lengths = {.prompt_len = 40, .draft_len = h->draft_len},
                             .allocated_tokens = 40 + h->draft_len,
                             .tables = p.destinations,
                             .n_tables = 2,
                             .handoff = h->mode};
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, NULL),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_assert_eq(kvf_core_send_finish(p.ctx->core, p.send, &aux, NULL), KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    kvf_status_t want = h->refusal == NULL ? KVF_OK : KVF_ERR_COUNT_MISMATCH;
    cr_expect_eq(p.got.status, want, "%s", p.got.message);
    cr_expect_eq(p.sent.status, want, "%s", p.sent.message);
    if (h->refusal == NULL) {
        cr_expect_eq(p.got.n_first_tokens, h->n_first);
        cr_expect_eq(p.got.n_draft_tokens, h->n_drafts);
        cr_expect_eq(node_wrong(p.gen, 40, CONTENT, p.destinations), 0);
    } else {
        cr_expect_not_null(strstr(p.got.message, h->refusal), "%s", p.got.message);
        cr_expect_not_null(strstr(p.sent.message, h->refusal), "%s", p.sent.message);
    }
    pair_close(&p);
}

/* ---- capacity ---- */

/* A second definition: an allocator of the generation side that leaves the drafts out. One block
 * less, and every block of a list would lie one position off; it is refused at once, aloud. */
Test(handoff, a_second_definition_of_capacity_is_refused) {
    const kvf_lengths_t lengths = {.prompt_len = 40, .draft_len = 3, .num_extra_kv_tokens = 2};
    int64_t planted = lengths.prompt_len + lengths.num_extra_kv_tokens, good;
    kvf_counters_t counters;
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    kvf_recv_desc_t fetch = {.request_id = "r1",
                             .direction = cluster_direction(),
                             .ticket = p.ticket,
                             .lengths = lengths,
                             .allocated_tokens = planted,
                             .tables = p.destinations,
                             .n_tables = 2,
                             .handoff = KVF_HANDOFF_FIRST};
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_ERR_CAPACITY_MISMATCH);
    static const char *const parts[] = {"generation", "42", "45"};
    for (size_t i = 0; i < 3; i++) {
        cr_expect_not_null(strstr(p.detail.text, parts[i]), "%s", p.detail.text);
        cr_expect_not_null(strstr(p.gen->warning, parts[i]), "%s", p.gen->warning);
    }
    cr_expect_not_null(strstr(p.gen->warning, "r1"), "%s", p.gen->warning);
    cr_expect_eq(p.gen->warnings, 1);
    kvf_core_counters(p.gen->core, &counters);
    cr_expect_eq(counters.capacity_mismatches, 1);

    /* The same on the context side, with the drafts that are not its own. */
    kvf_send_desc_t offer = {.request_id = "r2",
                             .lengths = lengths,
                             .allocated_tokens = 45,
                             .tables = p.sources,
                             .n_tables = 2};
    watch_t none = {0};
    uint64_t id;
    cr_expect_eq(kvf_core_send_open(p.ctx->core, &offer, watch_event, &none, &id, &p.detail),
                 KVF_ERR_CAPACITY_MISMATCH);
    cr_expect_not_null(strstr(p.ctx->warning, "the context side allocated 45"), "%s",
                       p.ctx->warning);
    cr_expect_eq(kvf_core_send_open(p.ctx->core, &offer, watch_event, &none, &id, NULL),
                 KVF_ERR_CAPACITY_MISMATCH, "also without a place for the text");
    kvf_core_counters(p.ctx->core, &counters);
    cr_expect_eq(counters.capacity_mismatches, 2);

    cr_assert_eq(kvf_get_kv_capacity_tokens(&lengths, true, &good, NULL), KVF_OK);
    fetch.allocated_tokens = good;
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.gen->warnings, 1);
    pair_close(&p);
}

/* ---- draft layer groups ---- */

/* The layout of the cluster and a draft model's layer 5 behind it. */
static kvf_layout_t with_drafts(kvf_group_role_t role) {
    kvf_layout_t layout = cluster_layout();
    kvf_layer_group_t *group = &layout.groups[layout.n_groups++];
    *group = layout.groups[0];
    (void)snprintf(group->name, sizeof(group->name), "eagle");
    group->n_layers = 1;
    group->layers[0] = 5;
    group->role = role;
    return layout;
}

/* Open both sides; the send is whole. */
static void draft_pair(pair_t *p, const kvf_layout_t *ctx, const kvf_layout_t *gen) {
    const int32_t first = 42;
    const kvf_aux_t aux = {.first_tokens = &first, .n_first_tokens = 1};
    const kvf_range_t all = {0, ctx->n_groups == 3 ? 6 : 5, 40, NULL, 0};
    memset(p, 0, sizeof(*p));
    p->prompt = 40;
    p->cluster = cluster_create(&(cluster_options_t){0});
    p->ctx = cluster_node(p->cluster, ctx, 64, NULL);
    p->gen = cluster_node(p->cluster, gen, 64, NULL);
    node_take(p->ctx, 40, CONTENT, p->source, p->sources);
    node_take(p->gen, 40, 0, p->destination, p->destinations);
    kvf_send_desc_t offer = {.request_id = "r1",
                             .lengths = {.prompt_len = 40},
                             .allocated_tokens = 40,
                             .tables = p->sources,
                             .n_tables = ctx->n_groups};
    cr_assert_eq(kvf_core_send_open(p->ctx->core, &offer, watch_event, &p->sent, &p->send, NULL),
                 KVF_OK);
    cr_assert_eq(kvf_core_send_ready(p->ctx->core, p->send, &all, NULL), KVF_OK);
    cr_assert_eq(kvf_core_send_finish(p->ctx->core, p->send, &aux, NULL), KVF_OK);
    cr_assert_eq(kvf_core_send_ticket(p->ctx->core, p->send, p->ticket, sizeof(p->ticket)), KVF_OK);
    cr_assert_eq(pair_fetch(p), KVF_OK, "%s", p->detail.text);
    cluster_run(p->cluster);
}

Test(handoff, draft_groups_of_both_sides_travel) {
    const kvf_layout_t layout = with_drafts(KVF_GROUP_DRAFT);
    pair_t p;
    draft_pair(&p, &layout, &layout);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.got.pages, 5 + 3 + 5, "full, swa, eagle");
    cr_expect_eq(p.got.layers, 6);
    cr_expect_eq(node_wrong(p.gen, 40, CONTENT, p.destinations), 0);
    pair_close(&p);
}

/* Only one side has it, or it means another thing there: no transfer, and the text says which. */
ParameterizedTestParameters(handoff, draft_groups_that_differ) {
    static int index[] = {0, 1, 2};
    return cr_make_param_array(int, index, 3);
}

ParameterizedTest(int *i, handoff, draft_groups_that_differ) {
    const kvf_layout_t with = with_drafts(KVF_GROUP_DRAFT), without = cluster_layout(),
                       target = with_drafts(KVF_GROUP_TARGET);
    static const char *const texts[] = {"group eagle (role draft) is only",
                                        "group eagle (role draft) is only", "group eagle: role "};
    pair_t p;
    draft_pair(&p, *i == 1 ? &without : &with, *i == 0 ? &without : *i == 1 ? &with : &target);
    cr_expect_eq(p.got.results + p.got.releases, 2);
    cr_expect_eq(p.got.status, KVF_ERR_INCOMPATIBLE, "%s", p.got.message);
    cr_expect_not_null(strstr(p.got.message, texts[*i]), "%s", p.got.message);
    cluster_advance(p.cluster, 31000000); /* the lease of the ticket that nobody claims */
    cr_expect_eq(p.sent.status, KVF_ERR_EXPIRED);
    pair_close(&p);
}

/* ---- what the generation side has ---- */

static kvf_recv_desc_t cached_fetch(pair_t *p, int64_t cached_tokens) {
    return (kvf_recv_desc_t){.request_id = "r1",
                             .direction = cluster_direction(),
                             .ticket = p->ticket,
                             .lengths = {.prompt_len = 40},
                             .allocated_tokens = 40,
                             .cached_tokens = cached_tokens,
                             .tables = p->destinations,
                             .n_tables = 2};
}

/* Everything is cached: no page moves or is granted, shared ones do as well; the tokens come, and
 * the context side's pages are free. */
Test(handoff, a_full_hit_moves_nothing) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    kvf_recv_desc_t fetch = cached_fetch(&p, 40);
    for (int64_t o = 0; o < 5; o++) {
        cr_assert_eq(kvf_pages_cache(p.gen->pages[0], p.destination[0][o]), KVF_OK);
    }
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK, "%s", p.detail.text);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_WRITING), 0);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_OK, "%s", p.sent.message);
    cr_expect_eq(p.got.pages + p.got.bytes + p.got.pieces + p.sent.bytes, 0);
    cr_expect_eq(p.got.first_tokens[0], 42);
    cr_expect_eq(p.gen->memory[0][0], 0);
    for (int64_t o = 0; o < 5; o++) {
        cr_expect_eq(kvf_pages_evict(p.gen->pages[0], p.destination[0][o]), KVF_OK);
    }
    pair_close(&p);
}

/* A hit must hold for every group: a cached block without a page is a hole. */
Test(handoff, a_hit_with_a_hole_is_refused) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    int32_t kept = p.destination[1][2];
    for (int64_t cached = 24; cached <= 40; cached += 16) { /* a part, and all */
        kvf_recv_desc_t fetch = cached_fetch(&p, cached);
        p.destination[1][2] = -1;
        cr_expect_eq(
            kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
            KVF_ERR_UNCOVERED);
        cr_expect_not_null(strstr(p.detail.text, "group swa: 2"), "%s", p.detail.text);
        p.destination[1][2] = kept;
    }
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK);
    pair_close(&p);
}

/* Cached up to the middle of block 2: it is wanted whole, and a page of it that the index or
 * another sequence has as well must be copied first. */
Test(handoff, a_partly_cached_block_is_written_only_if_it_is_ours) {
    pair_t p;
    pair_open(&p, &(cluster_options_t){0}, 40);
    kvf_recv_desc_t fetch = cached_fetch(&p, 20);
    int32_t partly = p.destination[0][2];
    cr_assert_eq(kvf_pages_cache(p.gen->pages[0], partly), KVF_OK);
    cr_assert_eq(kvf_pages_cache(p.gen->pages[0], p.destination[0][1]), KVF_OK, "whole: no harm");
    cr_expect_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_ERR_BUSY);
    cr_expect_not_null(strstr(p.detail.text, "group full, ordinal 2"), "%s", p.detail.text);
    cr_expect_eq(kvf_pages_count(p.gen->pages[0], KVF_PAGE_WRITING), 0, "all or none");
    int32_t copy;
    cr_assert_eq(kvf_pages_acquire(p.gen->pages[0], 1, &copy), KVF_OK);
    p.destination[0][2] = copy;
    cr_assert_eq(kvf_core_recv_open(p.gen->core, &fetch, watch_event, &p.got, &p.recv, &p.detail),
                 KVF_OK, "%s", p.detail.text);
    cluster_run(p.cluster);
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_eq(p.got.pages, 3 + 3, "blocks 2 to 4 of both");
    uint64_t bytes = kvf_group_block_bytes(&p.gen->layout.groups[0]), wrong = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        wrong += p.gen->memory[0][(uint64_t)copy * bytes + i] != pattern(CONTENT, 0, 2, i);
        wrong += p.gen->memory[0][(uint64_t)partly * bytes + i] != 0;
    }
    cr_expect_eq(wrong, 0);
    cr_expect_eq(kvf_pages_release(p.gen->pages[0], partly), KVF_OK);
    cr_expect_eq(kvf_pages_evict(p.gen->pages[0], partly), KVF_OK);
    cr_expect_eq(kvf_pages_evict(p.gen->pages[0], p.destination[0][1]), KVF_OK);
    pair_close(&p);
}
