/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sequence manager against a naive model: operations and transfers by chance. Whatever a
 * sequence, the prefix index or a transfer counts on must still be there after every step.
 */
#include "tests/support/seq_model.h"

#include <string.h>

#define WORLD_STEPS 2500

/* ---- operations: what the model expects, what the manager does */

/* A sequence lost blocks: those that nobody has any more were used until now. */
static void unbind(struct sequence *s, uint32_t g, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        int32_t slot = s->slots[g][i];
        s->slots[g][i] = -1;
        if (slot >= 0 && model_holders(g, slot) == 0) {
            m.memory[g][slot].last_use = m.step;
        }
    }
}

static void unbind_all(struct sequence *s) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        unbind(s, g, 0, s->n_blocks[g]);
        s->n_blocks[g] = s->offered[g] = 0;
    }
    s->tokens = s->settled = 0;
    s->granted = false;
}

/* What open and resume found. */
static void take_prefix(struct sequence *s, int64_t most, int64_t want) {
    int64_t c = kvf_seq_cached_tokens(s->seq);
    cr_assert_eq(c, want, "a prefix of %ld of %ld, not %ld", (long)c, (long)s->prompt, (long)want);
    for (uint32_t g = 0; g < GROUPS; g++) {
        s->n_blocks[g] = model_blocks(g, c);
        for (int64_t i = 0; i < s->n_blocks[g]; i++) {
            bool live = model_owns(i) && model_is_live(g, i, m.generation_side ? s->prompt : c);
            s->slots[g][i] = live ? model_find(s, g, i) : -1;
        }
    }
    s->tokens = s->settled = c;
    m.tally.hits += c > 0;
    m.tally.full_hits += c == s->prompt;
    m.tally.inner_hits += c > 0 && c == most && c % m.common != 0 && c < s->prompt;
}

static void op_open(struct sequence *s) {
    kvf_lengths_t lengths = {.draft_len = model_roll(0, 3),
                             .num_extra_kv_tokens = model_roll(0, 8)};
    s->prompt = model_roll(0, 3) == 0 ? model_roll(1, PROMPT)
                                      : 8 * model_roll(1, PROMPT / 8) - model_roll(0, 1);
    *(m.cp.size > 1 ? &lengths.total_input_len_cp : &lengths.prompt_len) = s->prompt;
    lengths.prompt_len = m.cp.size > 1 ? 1 : s->prompt;
    s->capacity =
        s->prompt + lengths.num_extra_kv_tokens + (m.generation_side ? lengths.draft_len : 0);
    s->has_ids = model_roll(0, 7) > 0;
    int64_t n_ids = (s->prompt + PIECE - 1) / PIECE;
    for (int64_t i = 0; i < n_ids; i++) {
        s->ids[i] = model_roll(0, 4) == 0 ? model_roll(1, 3) : 1;
    }
    for (int64_t p = 0; p < s->prompt; p++) {
        /* Without ids nobody else has such tokens. */
        s->tags[p] = s->has_ids ? model_prompt_tag(s->ids, p) : (m.next_tag += 2);
    }
    int64_t kind = model_roll(0, 3),
            most = kind == 0 ? model_roll(0, s->prompt) : s->prompt - (kind == 1);
    int64_t want = model_prefix_of(s, most);
    kvf_seq_desc_t desc = {.lengths = lengths,
                           .allocated_tokens = s->capacity,
                           .content_ids = s->has_ids ? s->ids : NULL,
                           .n_content_ids = n_ids,
                           .max_cached_tokens = most};
    kvf_seq_t *seq = NULL;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_seq_open(m.world.seqs, &desc, &seq, &detail), KVF_OK, "%s", detail.text);
    s->seq = seq;
    s->granted = false;
    take_prefix(s, most, want);
}

/* The pages that a group of a sequence must get for tokens up to an end. */
struct demand {
    int64_t fresh, swapped, alone; /* alone: swapped ones that only the index shares */
};

static struct demand demand_of(const struct sequence *s, uint32_t g, int64_t end, bool reserve) {
    struct demand d = {0, 0, 0};
    int64_t t = m.groups[g].tokens_per_block;
    for (int64_t i = 0; i < model_blocks(g, end); i++) {
        if (i >= s->n_blocks[g]) {
            d.fresh += model_owns(i) && (!reserve || model_is_live(g, i, s->prompt));
        } else if (end > s->tokens && (i + 1) * t > s->tokens && s->slots[g][i] >= 0) {
            int32_t slot = s->slots[g][i];
            bool shared = model_holders(g, slot) > 1 || m.memory[g][slot].indexed;
            d.swapped += shared;
            d.alone += shared && model_holders(g, slot) == 1 && !model_in_transfer(g, slot);
        }
    }
    return d;
}

static int64_t available(uint32_t g) {
    int64_t n = kvf_pages_count(m.world.pages[g], KVF_PAGE_FREE);
    for (int32_t slot = 0; slot < m.world.n_pages[g]; slot++) {
        n +=
            m.memory[g][slot].indexed && model_holders(g, slot) == 0 && !model_in_transfer(g, slot);
    }
    return n;
}

static void do_copies(const kvf_seq_copies_t *copies) {
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_seq_copy_t *copy = &copies->list[i];
        cr_assert(i == 0 || copies->list[i - 1].group_idx < copy->group_idx);
        memcpy(m.memory[copy->group_idx][copy->to_slot].rows,
               m.memory[copy->group_idx][copy->from_slot].rows, sizeof(m.memory[0][0].rows));
    }
    m.tally.copies += copies->n;
}

/* Take over the tables after pages were bound: only what the model expects may have changed. */
static void take_tables(struct sequence *s, int64_t end, bool reserve) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        kvf_table_t table = kvf_seq_table(s->seq, g);
        int64_t t = m.groups[g].tokens_per_block, was = s->n_blocks[g];
        for (int64_t i = was; i < model_blocks(g, end); i++) {
            s->slots[g][i] = -1;
            s->n_blocks[g] = i + 1;
        }
        cr_assert_eq(table.n_blocks, s->n_blocks[g]);
        for (int64_t i = 0; i < table.n_blocks; i++) {
            int32_t old = s->slots[g][i], now = table.slots[i];
            bool fresh = i >= was && model_owns(i) && (!reserve || model_is_live(g, i, s->prompt));
            bool swap = i < was && old >= 0 && end > s->tokens && (i + 1) * t > s->tokens &&
                        i < model_blocks(g, end) &&
                        (model_holders(g, old) > 1 || m.memory[g][old].indexed);
            if (fresh || swap) {
                cr_assert(now >= 0 && now != old && model_holders(g, now) == 0 &&
                              !m.memory[g][now].indexed && !model_in_transfer(g, now),
                          "group %u ordinal %ld: slot %d is no new page", g, (long)i, now);
                unbind(s, g, i, i + 1);
                s->slots[g][i] = now;
                m.tally.swaps += swap;
            }
        }
    }
}

static bool bind(struct sequence *s, int64_t n, bool reserve) {
    kvf_seq_copies_t copies;
    int64_t end = reserve ? (s->capacity > s->tokens ? s->capacity : s->tokens) : s->tokens + n;
    kvf_status_t want = KVF_OK;
    for (uint32_t g = 0; g < GROUPS; g++) {
        struct demand d = demand_of(s, g, end, reserve);
        int64_t room = available(g);
        if (d.fresh + d.swapped - d.alone > room && want == KVF_OK) {
            want = KVF_ERR_AGAIN;
        }
        want = d.fresh > m.world.n_pages[g] ? KVF_ERR_TOO_LARGE : want;
    }
    m.binding = s;
    kvf_status_t got =
        reserve ? kvf_seq_reserve(s->seq, &copies) : kvf_seq_append(s->seq, n, &copies);
    m.binding = NULL;
    cr_assert_eq(got, want, "%s, not %s", kvf_status_name(got), kvf_status_name(want));
    if (got != KVF_OK) {
        m.tally.again++;
        return false;
    }
    do_copies(&copies);
    take_tables(s, end, reserve);
    return true;
}

static void write_tokens(struct sequence *s, int64_t first, int64_t end) {
    for (int64_t p = first; p < end; p++) {
        for (uint32_t g = 0; g < GROUPS; g++) {
            int64_t t = m.groups[g].tokens_per_block;
            int32_t slot = s->slots[g][p / t];
            if (slot >= 0) {
                cr_assert(model_holders(g, slot) == 1 && !m.memory[g][slot].indexed,
                          "group %u: token %ld is written into a shared page", g, (long)p);
                m.memory[g][slot].rows[p % t] = s->tags[p];
            }
        }
    }
}

static void op_append(struct sequence *s) {
    int64_t n = model_roll(0, 3) == 0 ? model_roll(0, 20) : model_roll(1, 4);
    n = s->tokens + n > LENGTH ? LENGTH - s->tokens : n;
    if (s->granted) {
        /* Not released yet: what came may be counted, and nothing else written. */
        n = n < s->prompt - s->tokens ? n : s->prompt - s->tokens;
        n = n > 0 ? n : 0;
    }
    if (bind(s, n, false)) {
        for (int64_t p = s->tokens; p < s->tokens + n; p++) {
            s->tags[p] = p < s->prompt ? s->tags[p] : (m.next_tag += 2);
        }
        write_tokens(s, s->tokens, s->tokens + n);
        s->tokens += n;
    }
}

static void op_rewind(struct sequence *s) {
    int64_t to = model_roll(0, 3) == 0 ? model_roll(0, s->tokens) : s->tokens - model_roll(0, 8);
    if (to < s->settled) {
        cr_assert_eq(kvf_seq_rewind(s->seq, to), KVF_ERR_INVALID);
        m.tally.refused++;
        return;
    }
    cr_assert_eq(kvf_seq_rewind(s->seq, to), KVF_OK);
    s->tokens = to;
    for (uint32_t g = 0; g < GROUPS; g++) {
        int64_t keep = model_blocks(g, to > s->capacity ? to : s->capacity);
        unbind(s, g, keep, s->n_blocks[g]);
        s->n_blocks[g] = s->n_blocks[g] < keep ? s->n_blocks[g] : keep;
        int64_t whole = to / m.groups[g].tokens_per_block;
        s->offered[g] = s->offered[g] < whole ? s->offered[g] : whole;
    }
}

static void op_slide(struct sequence *s) {
    int64_t to = s->tokens - model_roll(0, 1) * model_roll(0, s->tokens);
    cr_assert_eq(kvf_seq_slide(s->seq, to), KVF_OK);
    for (uint32_t g = 0; g < GROUPS; g++) {
        for (int64_t i = 0; i < model_blocks(g, to); i++) {
            if (!model_is_live(g, i, to)) {
                unbind(s, g, i, i + 1);
            }
        }
    }
    s->settled = to > s->settled ? to : s->settled;
}

static void op_drop(struct sequence *s) {
    uint32_t g = (uint32_t)model_roll(0, GROUPS - 1);
    int64_t whole = s->tokens / m.groups[g].tokens_per_block;
    int64_t end = model_roll(0, whole), first = model_roll(0, end);
    cr_assert_eq(kvf_seq_drop(s->seq, g, (kvf_span_t){first, end}), KVF_OK);
    unbind(s, g, first, end);
    end *= m.groups[g].tokens_per_block;
    s->settled = end > s->settled ? end : s->settled;
    m.tally.drops++;
}

static void op_fork(struct sequence *s) {
    struct sequence *child = NULL;
    for (int i = 0; i < SEQS; i++) {
        child = m.seqs[i].seq == NULL ? &m.seqs[i] : child;
    }
    if (child == NULL || s->granted) {
        return;
    }
    kvf_seq_t *seq = NULL;
    cr_assert_eq(kvf_seq_fork(s->seq, &seq), KVF_OK);
    *child = *s;
    child->seq = seq;
    for (uint32_t g = 0; g < GROUPS; g++) {
        child->n_blocks[g] = model_blocks(g, s->tokens);
    }
    model_check_tables(child);
    m.tally.forks++;
}

/* Whether a block that is offered to the index cannot be taken: a peer may write it. */
static bool is_unsure(const struct sequence *s, uint32_t g, int64_t ordinal) {
    int32_t slot = s->slots[g][ordinal];
    return slot >= 0 && !m.memory[g][slot].indexed && model_find(s, g, ordinal) < 0 &&
           (model_in_doubt(g, slot) || model_under(g, slot, WRITING, WRITING));
}

/* What is in the index now is there as this sequence's block. */
static void note_published(struct sequence *s, uint32_t g, int64_t ordinal, int64_t tokens) {
    int64_t t = m.groups[g].tokens_per_block, left = s->prompt - ordinal * t;
    int32_t slot = s->slots[g][ordinal];
    if (slot < 0 || !m.memory[g][slot].indexed || m.memory[g][slot].filled > 0) {
        return;
    }
    cr_assert(model_find(s, g, ordinal) < 0, "a second page of one key");
    struct page *page = &m.memory[g][slot];
    page->ordinal = ordinal;
    page->filled = left < t ? left : t;
    cr_assert_leq(ordinal * t + page->filled, tokens, "published before it was there");
    memcpy(page->published, &s->tags[ordinal * t], (size_t)page->filled * sizeof(tag_t));
}

static void op_publish(struct sequence *s) {
    int64_t most = s->tokens < s->prompt ? s->tokens : s->prompt;
    int64_t n = model_roll(0, 2) == 0 ? model_roll(0, most) : most, end[GROUPS];
    bool busy = false, unsure[GROUPS] = {false};
    for (uint32_t g = 0; g < GROUPS; g++) {
        end[g] = n == s->prompt ? model_blocks(g, n) : n / m.groups[g].tokens_per_block;
        for (int64_t i = s->offered[g]; s->has_ids && i < end[g]; i++) {
            unsure[g] = unsure[g] || is_unsure(s, g, i);
        }
        busy = busy || unsure[g];
    }
    cr_assert_eq(kvf_seq_publish(s->seq, n), busy ? KVF_ERR_BUSY : KVF_OK);
    m.tally.busy_publish += busy;
    for (uint32_t g = 0; s->has_ids && g < GROUPS; g++) {
        for (int64_t i = 0; i < s->n_blocks[g]; i++) {
            note_published(s, g, i, n);
        }
    }
    for (uint32_t g = 0; s->has_ids && g < GROUPS && !unsure[g]; g++) {
        for (int64_t i = s->offered[g]; i < end[g]; i++) {
            cr_assert(s->slots[g][i] < 0 || model_find(s, g, i) >= 0, "not published");
        }
        int64_t whole = n / m.groups[g].tokens_per_block;
        s->offered[g] = whole > s->offered[g] ? whole : s->offered[g];
    }
}

static void op_preempt(struct sequence *s) {
    kvf_seq_preempt(s->seq);
    unbind_all(s);
    if (model_roll(0, 3) > 0) {
        int64_t want = model_prefix_of(s, s->prompt);
        cr_assert_eq(kvf_seq_resume(s->seq, s->prompt), KVF_OK);
        take_prefix(s, s->prompt, want);
    }
    m.tally.preempted++;
}

static void op_close(struct sequence *s) {
    kvf_seq_close(s->seq);
    unbind_all(s);
    s->seq = NULL;
}

/* ---- transfers */

static struct transfer *idle_transfer(void) {
    for (int i = 0; i < TRANSFERS; i++) {
        if (m.transfers[i].state == NONE) {
            return &m.transfers[i];
        }
    }
    return NULL;
}

/* A send reads a page with tokens of the prompt. */
static void op_read(struct sequence *s) {
    struct transfer *x = idle_transfer();
    uint32_t g = (uint32_t)model_roll(0, GROUPS - 1);
    int64_t t = m.groups[g].tokens_per_block, most = s->tokens < s->prompt ? s->tokens : s->prompt;
    if (x == NULL || most == 0) {
        return;
    }
    int64_t i = model_roll(0, model_blocks(g, most) - 1);
    int32_t slot = s->slots[g][i];
    if (slot < 0 || kvf_pages_read_begin(m.world.pages[g], slot) != KVF_OK) {
        return;
    }
    *x = (struct transfer){READING, g, slot, most - i * t < t ? most - i * t : t, {0}};
    memcpy(x->rows, &s->tags[i * t], (size_t)x->n_rows * sizeof(tag_t));
    m.tally.reads++;
}

/* A receive is granted what is live for P behind the prefix: all of it must be its own. */
static void op_grant(struct sequence *s) {
    if (s->granted || s->tokens != s->settled || s->tokens >= s->prompt || !bind(s, 0, true)) {
        return;
    }
    for (uint32_t g = 0; g < GROUPS; g++) {
        int64_t t = m.groups[g].tokens_per_block;
        for (int64_t i = s->tokens / t; i < model_blocks(g, s->prompt); i++) {
            struct transfer *x = idle_transfer();
            int32_t slot = s->slots[g][i];
            if (x == NULL || slot < 0 || model_in_transfer(g, slot)) {
                continue;
            }
            cr_assert_eq(kvf_pages_write_begin(m.world.pages[g], slot), KVF_OK,
                         "group %u ordinal %ld is not its own", g, (long)i);
            *x = (struct transfer){WRITING, g, slot, t, {0}};
            for (int64_t r = 0; r < t && i * t + r < s->prompt; r++) {
                x->rows[r] = s->tags[i * t + r];
            }
            s->granted = true;
            m.tally.grants++;
        }
    }
}

/* The bytes of a grant, which may come long after its sequence has gone. */
static void arrive(const struct transfer *x) {
    memcpy(m.memory[x->g][x->slot].rows, x->rows, (size_t)x->n_rows * sizeof(tag_t));
    m.tally.late_writes += model_holders(x->g, x->slot) == 0;
}

static void op_transfer_step(struct transfer *x) {
    kvf_pages_t *pages = x->state == NONE ? NULL : m.world.pages[x->g];
    bool doubt = model_roll(0, 3) == 0;
    if (x->state == READING) {
        (doubt ? kvf_pages_doubt_read : kvf_pages_read_end)(pages, x->slot);
        x->state = doubt ? READ_DOUBT : NONE;
    } else if (x->state == WRITING) {
        arrive(x);
        (doubt ? kvf_pages_doubt_write : kvf_pages_write_end)(pages, x->slot);
        x->state = doubt ? WRITE_DOUBT : NONE;
    } else if (x->state != NONE) {
        kvf_pages_settle(pages, x->slot);
        x->state = NONE;
    }
    for (int s = 0; s < SEQS; s++) {
        bool open = false;
        for (uint32_t g = 0; g < GROUPS; g++) {
            for (int64_t i = 0; m.seqs[s].seq != NULL && i < m.seqs[s].n_blocks[g]; i++) {
                open = open || (m.seqs[s].slots[g][i] >= 0 &&
                                model_under(g, m.seqs[s].slots[g][i], WRITING, WRITE_DOUBT));
            }
        }
        m.seqs[s].granted = m.seqs[s].granted && open;
    }
}

static void end_world(void) {
    for (int s = 0; s < SEQS; s++) {
        if (m.seqs[s].seq != NULL) {
            op_close(&m.seqs[s]);
        }
    }
    model_check_pages();
    (void)kvf_seqs_forget(m.world.seqs);
    for (int i = 0; i < TRANSFERS; i++) {
        while (m.transfers[i].state != NONE) {
            op_transfer_step(&m.transfers[i]);
        }
    }
    model_check_pages();
    cr_assert_eq(kvf_seqs_forget(m.world.seqs), 0);
    test_seqs_end(&m.world);
}

static int one_step(void) {
    static void (*const ops[])(struct sequence *) = {
        op_append, op_append, op_append, op_append,  op_append,  op_rewind,
        op_rewind, op_slide,  op_fork,   op_publish, op_publish, op_preempt,
        op_close,  op_close,  op_read,   op_grant,   op_grant};
    struct sequence *s = &m.seqs[model_roll(0, SEQS - 1)];
    int op = (int)model_roll(0, (int)(sizeof(ops) / sizeof(ops[0])) + 3);
    if (op >= (int)(sizeof(ops) / sizeof(ops[0]))) {
        op_transfer_step(&m.transfers[model_roll(0, TRANSFERS - 1)]);
    } else if (s->seq == NULL) {
        op_open(s);
    } else if (op == 7 && model_roll(0, 9) == 0) {
        op_drop(s);
    } else {
        ops[op](s);
    }
    for (int i = 0; i < SEQS; i++) {
        if (m.seqs[i].seq != NULL && (s == &m.seqs[i] || m.step % 16 == 0)) {
            model_check_tables(&m.seqs[i]);
        }
    }
    if (m.step % 8 == 0) {
        model_check_pages();
    }
    return op;
}

Test(seq, against_tokens_and_their_places, .timeout = 600) {
    const char *given = getenv("KVF_LONG");
    bool is_long = given != NULL && given[0] != '\0' && given[0] != '0';
    int64_t steps = is_long ? 10000000 : 1000000;
    m.dice = test_random("seq");
    for (m.step = 0; m.step < steps; m.step++) {
        if (m.step % WORLD_STEPS == 0) {
            model_start();
        }
        (void)one_step();
        if (m.step % WORLD_STEPS == WORLD_STEPS - 1) {
            end_world();
        }
    }
    const struct {
        const char *what;
        int64_t n;
    } seen[] = {{"prefixes", m.tally.hits},
                {"whole prompts", m.tally.full_hits},
                {"prefixes that end in a block", m.tally.inner_hits},
                {"copies", m.tally.copies},
                {"swapped pages", m.tally.swaps},
                {"pages taken back", m.tally.taken_back},
                {"pools without room", m.tally.again},
                {"evictions", m.tally.evictions},
                {"pages under transfer, spared", m.tally.spared},
                {"publications that wait", m.tally.busy_publish},
                {"forks", m.tally.forks},
                {"preemptions", m.tally.preempted},
                {"grants", m.tally.grants},
                {"writes after their sequence", m.tally.late_writes},
                {"reads", m.tally.reads},
                {"drops", m.tally.drops},
                {"refused rewinds", m.tally.refused}};
    for (size_t i = 0; i < sizeof(seen) / sizeof(seen[0]); i++) {
        cr_expect_gt(seen[i].n, steps / 10000, "%s: %ld", seen[i].what, (long)seen[i].n);
        if (is_long) {
            (void)fprintf(stderr, "seq: %s: %ld\n", seen[i].what, (long)seen[i].n);
        }
    }
}
