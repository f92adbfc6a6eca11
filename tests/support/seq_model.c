/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/seq_model.h"

#include <string.h>

struct seq_model m;

int64_t model_roll(int64_t least, int64_t most) {
    return test_between(&m.dice, least, most);
}

int64_t model_blocks(uint32_t g, int64_t tokens) {
    int64_t t = m.groups[g].tokens_per_block;
    return (tokens + t - 1) / t;
}

bool model_owns(int64_t ordinal) {
    return ordinal % m.cp.size == m.cp.rank;
}

bool model_is_live(uint32_t g, int64_t ordinal, int64_t history) {
    int64_t t = m.groups[g].tokens_per_block, w = m.groups[g].window;
    return w == 0 || (ordinal + 1) * t - 1 >= history - w + 1 || ordinal * t < m.groups[g].sinks;
}

int model_holders(uint32_t g, int32_t slot) {
    int n = 0;
    for (int s = 0; s < SEQS; s++) {
        for (int64_t i = 0; m.seqs[s].seq != NULL && i < m.seqs[s].n_blocks[g]; i++) {
            n += m.seqs[s].slots[g][i] == slot;
        }
    }
    return n;
}

bool model_under(uint32_t g, int32_t slot, enum transfer_state a, enum transfer_state b) {
    for (int i = 0; i < TRANSFERS; i++) {
        const struct transfer *x = &m.transfers[i];
        if (x->state != NONE && x->g == g && x->slot == slot && (x->state == a || x->state == b)) {
            return true;
        }
    }
    return false;
}

bool model_in_doubt(uint32_t g, int32_t slot) {
    return model_under(g, slot, READ_DOUBT, WRITE_DOUBT);
}

bool model_in_transfer(uint32_t g, int32_t slot) {
    return model_in_doubt(g, slot) || model_under(g, slot, READING, WRITING);
}

/* ---- the pools, with somebody who looks on */

static kvf_status_t see_cache(void *ctx, uint32_t g, int64_t n, const int32_t *slots) {
    kvf_status_t status = kvf_store_over_pages(ctx).cache(ctx, g, n, slots);
    for (int64_t i = 0; status == KVF_OK && i < n; i++) {
        m.memory[g][slots[i]].indexed = true;
        m.memory[g][slots[i]].filled = 0; /* op_publish() says as what */
    }
    return status;
}

static kvf_status_t see_evict_one(void *ctx, uint32_t g, int32_t slot) {
    struct page *page = &m.memory[g][slot];
    int64_t n;
    kvf_status_t status = kvf_store_over_pages(ctx).evict(ctx, g, 1, &slot, &n);
    cr_assert_eq(n, status == KVF_OK);
    cr_assert(page->indexed && status == (model_in_transfer(g, slot) ? KVF_ERR_BUSY : KVF_OK));
    if (model_holders(g, slot) > 0) {
        cr_assert(m.binding != NULL && model_holders(g, slot) == 1, "a page in use was evicted");
        m.tally.taken_back += status == KVF_OK;
    } else {
        for (int32_t other = 0; other < m.world.n_pages[g]; other++) {
            cr_assert(!m.memory[g][other].indexed || model_holders(g, other) > 0 ||
                          m.memory[g][other].last_use >= page->last_use,
                      "page %d was used later than %d", slot, other);
        }
        page->last_use = m.step;
        m.tally.evictions += status == KVF_OK;
        m.tally.spared += status != KVF_OK;
    }
    page->indexed = page->indexed && status != KVF_OK;
    return status;
}

static kvf_status_t see_evict(void *ctx, uint32_t g, int64_t n, const int32_t *slots,
                              int64_t *n_evicted_p) {
    kvf_status_t status = KVF_OK;
    int64_t i = 0;
    while (i < n && status == KVF_OK) {
        status = see_evict_one(ctx, g, slots[i]);
        i += status == KVF_OK;
    }
    *n_evicted_p = i;
    return status;
}

void model_start(void) {
    memset(m.memory, 0, sizeof(m.memory));
    int64_t max_t = 1;
    for (uint32_t g = 0; g < GROUPS; g++) {
        static const int64_t sizes[] = {1, 2, 3, 4, 8};
        m.groups[g] = (test_group_t){.tokens_per_block = sizes[model_roll(0, 4)]};
        m.groups[g].window = g == 0 && model_roll(0, 3) > 0 ? 0 : model_roll(1, 20);
        m.groups[g].sinks = m.groups[g].window > 0 ? model_roll(0, 1) * model_roll(0, 9) : 0;
        m.groups[g].n_pages = model_roll(6, PAGES);
        max_t = m.groups[g].tokens_per_block > max_t ? m.groups[g].tokens_per_block : max_t;
    }
    for (m.common = max_t; m.common % m.groups[0].tokens_per_block != 0 ||
                           m.common % m.groups[1].tokens_per_block != 0 ||
                           m.common % m.groups[2].tokens_per_block != 0;
         m.common++) {
    }
    m.generation_side = model_roll(0, 1) == 1;
    m.cp = (kvf_cp_t){model_roll(0, 3) > 0 ? 1 : model_roll(2, 3), 0};
    m.cp.rank = model_roll(0, m.cp.size - 1);
    test_layout(&m.world.layout, GROUPS, m.groups);
    for (uint32_t g = 0; g < GROUPS; g++) {
        m.world.n_pages[g] = m.groups[g].n_pages;
        cr_assert_eq(kvf_pages_create(kvf_alloc_default(), m.world.n_pages[g], &m.world.pages[g]),
                     KVF_OK);
    }
    kvf_seqs_config_t config = {.layout = &m.world.layout,
                                .n_pages = m.world.n_pages,
                                .store = kvf_store_over_pages(m.world.pages),
                                .generation_side = m.generation_side,
                                .cp = m.cp,
                                .piece_tokens = PIECE};
    config.store.cache = see_cache;
    config.store.evict = see_evict;
    cr_assert_eq(kvf_seqs_create(kvf_alloc_default(), &config, &m.world.seqs, NULL), KVF_OK);
}

/* ---- what the model thinks of a sequence */

tag_t model_prompt_tag(const int64_t *ids, int64_t position) {
    tag_t tag = 1;
    for (int64_t i = 0; i <= position / PIECE; i++) {
        tag = tag * 4 + (tag_t)ids[i];
    }
    return (tag << 8 | (tag_t)position) << 1 | 1;
}

static bool is_block(const struct page *page, const struct sequence *s, uint32_t g,
                     int64_t ordinal) {
    int64_t t = m.groups[g].tokens_per_block, left = s->prompt - ordinal * t;
    int64_t filled = left < t ? left : t;
    return page->indexed && page->ordinal == ordinal && page->filled == filled &&
           page->published[filled - 1] == s->tags[ordinal * t + filled - 1];
}

int32_t model_find(const struct sequence *s, uint32_t g, int64_t ordinal) {
    for (int32_t slot = 0; slot < m.world.n_pages[g]; slot++) {
        if (is_block(&m.memory[g][slot], s, g, ordinal)) {
            return slot;
        }
    }
    return -1;
}

int64_t model_prefix_of(const struct sequence *s, int64_t most) {
    int32_t found[GROUPS][PROMPT];
    for (uint32_t g = 0; g < GROUPS; g++) {
        for (int64_t i = 0; i < model_blocks(g, most); i++) {
            found[g][i] = s->has_ids && model_owns(i) ? model_find(s, g, i) : -1;
        }
    }
    for (int64_t c = s->has_ids ? most : 0; c > 0; c--) {
        bool holds = c == most || c % m.common == 0;
        int n = 0;
        for (uint32_t g = 0; g < GROUPS; g++) {
            for (int64_t i = 0; holds && i < model_blocks(g, c); i++) {
                if (model_owns(i) && model_is_live(g, i, m.generation_side ? s->prompt : c)) {
                    holds = found[g][i] >= 0;
                    n++;
                }
            }
        }
        if (holds) {
            return n > 0 ? c : 0;
        }
    }
    return 0;
}

void model_check_tables(const struct sequence *s) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        kvf_table_t table = kvf_seq_table(s->seq, g);
        cr_assert_eq(table.n_blocks, s->n_blocks[g], "group %u: %ld blocks, not %ld", g,
                     (long)table.n_blocks, (long)s->n_blocks[g]);
        for (int64_t i = 0; i < table.n_blocks; i++) {
            cr_assert_eq(table.slots[i], s->slots[g][i], "group %u ordinal %ld", g, (long)i);
            for (int64_t p = i * m.groups[g].tokens_per_block;
                 table.slots[i] >= 0 && p < (i + 1) * m.groups[g].tokens_per_block && p < s->tokens;
                 p++) {
                cr_assert_eq(m.memory[g][table.slots[i]].rows[p - i * m.groups[g].tokens_per_block],
                             s->tags[p], "group %u: token %ld of %ld is not its own", g, (long)p,
                             (long)s->tokens);
            }
        }
    }
    cr_assert_eq(kvf_seq_tokens(s->seq), s->tokens);
}

void model_check_pages(void) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        int64_t sum = 0;
        for (int32_t slot = 0; slot < m.world.n_pages[g]; slot++) {
            const struct page *page = &m.memory[g][slot];
            kvf_page_label_t want = model_in_doubt(g, slot)                  ? KVF_PAGE_QUARANTINED
                                    : model_under(g, slot, WRITING, WRITING) ? KVF_PAGE_WRITING
                                    : model_under(g, slot, READING, READING) ? KVF_PAGE_READING
                                    : model_holders(g, slot) > 0             ? KVF_PAGE_HELD
                                    : page->indexed                          ? KVF_PAGE_CACHED
                                                                             : KVF_PAGE_FREE;
            cr_assert_eq(kvf_pages_label(m.world.pages[g], slot), want,
                         "group %u slot %d: %s, not %s", g, slot,
                         kvf_page_label_name(kvf_pages_label(m.world.pages[g], slot)),
                         kvf_page_label_name(want));
            if (page->indexed) {
                cr_assert_eq(
                    memcmp(page->rows, page->published, (size_t)page->filled * sizeof(tag_t)), 0,
                    "group %u slot %d: not what was published", g, slot);
            }
        }
        for (int label = 0; label < KVF_PAGE_LABELS; label++) {
            sum += kvf_pages_count(m.world.pages[g], (kvf_page_label_t)label);
        }
        cr_assert_eq(sum, m.world.n_pages[g]);
    }
    for (int i = 0; i < TRANSFERS; i++) {
        const struct transfer *x = &m.transfers[i];
        if (x->state == READING || x->state == READ_DOUBT) {
            cr_assert_eq(
                memcmp(m.memory[x->g][x->slot].rows, x->rows, (size_t)x->n_rows * sizeof(tag_t)), 0,
                "group %u slot %d changes while it is read", x->g, x->slot);
        }
    }
}
