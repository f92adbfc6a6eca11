/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page pool against a naive model: every page has a list of those who use it, and everything
 * else is found by reading the lists.
 */
#include "kvmgr/pages.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>

#define STEPS 100000
#define PAGES 24
#define MAX_USES 64

enum use { HOLD, CACHE, READ, WRITE, READ_DOUBT, WRITE_DOUBT, POISON };

struct model {
    enum use uses[PAGES][MAX_USES];
    int n_uses[PAGES];
    uint64_t generation[PAGES];
};

static int count(const struct model *m, int32_t slot, enum use use) {
    int n = 0;
    for (int i = 0; i < m->n_uses[slot]; i++) {
        n += m->uses[slot][i] == use;
    }
    return n;
}

static void add(struct model *m, int32_t slot, enum use use) {
    m->uses[slot][m->n_uses[slot]++] = use;
}

static void drop(struct model *m, int32_t slot, enum use use) {
    int i = 0;
    while (m->uses[slot][i] != use) {
        i++;
    }
    m->uses[slot][i] = m->uses[slot][--m->n_uses[slot]];
}

static kvf_page_label_t label_of(const struct model *m, int32_t slot) {
    static const struct {
        enum use use;
        kvf_page_label_t label;
    } order[] = {{POISON, KVF_PAGE_POISONED},
                 {WRITE_DOUBT, KVF_PAGE_QUARANTINED},
                 {READ_DOUBT, KVF_PAGE_QUARANTINED},
                 {WRITE, KVF_PAGE_WRITING},
                 {READ, KVF_PAGE_READING},
                 {HOLD, KVF_PAGE_HELD},
                 {CACHE, KVF_PAGE_CACHED}};
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        if (count(m, slot, order[i].use) > 0) {
            return order[i].label;
        }
    }
    return KVF_PAGE_FREE;
}

static int64_t count_label(const struct model *m, kvf_page_label_t label) {
    int64_t n = 0;
    for (int32_t slot = 0; slot < PAGES; slot++) {
        n += label_of(m, slot) == label;
    }
    return n;
}

static bool same(const struct model *m, const kvf_pages_t *pages) {
    for (int32_t slot = 0; slot < PAGES; slot++) {
        if (kvf_pages_label(pages, slot) != label_of(m, slot) ||
            kvf_pages_generation(pages, slot) != m->generation[slot]) {
            return false;
        }
    }
    for (int label = 0; label < KVF_PAGE_LABELS; label++) {
        if (kvf_pages_count(pages, (kvf_page_label_t)label) !=
            count_label(m, (kvf_page_label_t)label)) {
            return false;
        }
    }
    return kvf_pages_audit(pages, NULL) == KVF_OK;
}

static bool step_acquire(struct model *m, kvf_pages_t *pages, int64_t n) {
    int32_t slots[PAGES + 2];
    int64_t room = count_label(m, KVF_PAGE_FREE);
    kvf_status_t want = n > PAGES ? KVF_ERR_TOO_LARGE : n > room ? KVF_ERR_AGAIN : KVF_OK;
    if (kvf_pages_acquire(pages, n, slots) != want) {
        return false;
    }
    for (int64_t i = 0; want == KVF_OK && i < n; i++) {
        /* Also finds a page that was given out twice: the first time makes it held. */
        if (slots[i] < 0 || slots[i] >= PAGES || label_of(m, slots[i]) != KVF_PAGE_FREE) {
            return false;
        }
        add(m, slots[i], HOLD);
        m->generation[slots[i]]++;
    }
    return true;
}

static bool step_begin(struct model *m, kvf_pages_t *pages, int32_t slot, bool write) {
    int uses = m->n_uses[slot], holds = count(m, slot, HOLD);
    kvf_status_t want = KVF_OK;
    if (write) {
        want = holds == 0 ? KVF_ERR_INVALID : uses > 1 ? KVF_ERR_BUSY : KVF_OK;
        if (kvf_pages_write_begin(pages, slot) != want) {
            return false;
        }
        m->generation[slot] += want == KVF_OK;
    } else {
        int writers = count(m, slot, WRITE) + count(m, slot, WRITE_DOUBT);
        want = uses == 0 ? KVF_ERR_INVALID : writers > 0 ? KVF_ERR_BUSY : KVF_OK;
        if (kvf_pages_read_begin(pages, slot) != want) {
            return false;
        }
    }
    if (want == KVF_OK) {
        add(m, slot, write ? WRITE : READ);
    }
    return true;
}

/* End an open use: with proof, or as a doubt. */
static void step_end(struct model *m, kvf_pages_t *pages, int32_t slot, bool doubt) {
    enum use use = count(m, slot, WRITE) > 0 ? WRITE : READ;
    if (count(m, slot, use) == 0) {
        return;
    }
    drop(m, slot, use);
    if (doubt) {
        add(m, slot, use == WRITE ? WRITE_DOUBT : READ_DOUBT);
        (use == WRITE ? kvf_pages_doubt_write : kvf_pages_doubt_read)(pages, slot);
    } else {
        (use == WRITE ? kvf_pages_write_end : kvf_pages_read_end)(pages, slot);
    }
}

static void step_doubt(struct model *m, kvf_pages_t *pages, int32_t slot, bool poison) {
    int reads = count(m, slot, READ_DOUBT), doubts = reads + count(m, slot, WRITE_DOUBT);
    if (doubts == 0) {
        return;
    }
    if (poison) {
        kvf_pages_poison(pages, slot);
        if (count(m, slot, POISON) == 0) {
            add(m, slot, POISON);
        }
        return;
    }
    kvf_pages_settle(pages, slot);
    drop(m, slot, reads > 0 ? READ_DOUBT : WRITE_DOUBT);
    if (doubts == 1 && count(m, slot, POISON) > 0) {
        drop(m, slot, POISON);
    }
}

static bool step_hold(struct model *m, kvf_pages_t *pages, int32_t slot, bool release) {
    bool held = count(m, slot, HOLD) > 0, cached = count(m, slot, CACHE) > 0;
    kvf_status_t want = held || (cached && !release) ? KVF_OK : KVF_ERR_INVALID;
    if (want == KVF_OK && release) {
        drop(m, slot, HOLD);
    } else if (want == KVF_OK) {
        add(m, slot, HOLD);
    }
    return (release ? kvf_pages_release : kvf_pages_hold)(pages, slot) == want;
}

static bool step_cache(struct model *m, kvf_pages_t *pages, int32_t slot, bool evict) {
    int cached = count(m, slot, CACHE), holds = count(m, slot, HOLD);
    int doubts = count(m, slot, READ_DOUBT) + count(m, slot, WRITE_DOUBT);
    bool unsure = doubts + count(m, slot, WRITE) > 0;
    kvf_status_t want = KVF_OK;
    if (evict) {
        want = cached == 0                        ? KVF_ERR_INVALID
               : m->n_uses[slot] > cached + holds ? KVF_ERR_BUSY
                                                  : KVF_OK;
    } else {
        want = cached > 0 || holds == 0 ? KVF_ERR_INVALID : unsure ? KVF_ERR_BUSY : KVF_OK;
    }
    if (want == KVF_OK && evict) {
        drop(m, slot, CACHE);
    } else if (want == KVF_OK) {
        add(m, slot, CACHE);
    }
    return (evict ? kvf_pages_evict : kvf_pages_cache)(pages, slot) == want;
}

Test(pages, against_lists_of_users, .timeout = 300) {
    test_random_t random = test_random("pages");
    static struct model m;
    kvf_pages_t *pages = NULL;
    int64_t seen[KVF_PAGE_LABELS] = {0};
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), PAGES, &pages), KVF_OK);
    for (int step = 0; step < STEPS; step++) {
        int32_t slot = (int32_t)test_between(&random, 0, PAGES - 1);
        int op = (int)test_between(&random, 0, 13);
        bool full = m.n_uses[slot] >= MAX_USES - 2, ok = true;
        if (op == 0) {
            ok = step_acquire(&m, pages,
                              test_between(&random, 0, test_between(&random, 1, PAGES + 2)));
        } else if (op == 1 && !full) {
            ok = step_hold(&m, pages, slot, false);
        } else if (op == 2 || op == 3) {
            ok = step_hold(&m, pages, slot, true);
        } else if ((op == 4 || op == 5) && !full) {
            ok = step_begin(&m, pages, slot, op == 5);
        } else if (op == 6 || op == 7) {
            step_end(&m, pages, slot, op == 7);
        } else if (op == 8 || op == 9 || op == 10) {
            step_doubt(&m, pages, slot, op == 8);
        } else if ((op == 11 || op == 12) && !full) {
            ok = step_cache(&m, pages, slot, op == 12);
        }
        cr_assert(ok && same(&m, pages), "KVF_SEED=%llu step %d: operation %d of page %d",
                  (unsigned long long)random.seed, step, op, slot);
        seen[label_of(&m, slot)]++;
    }
    kvf_pages_destroy(pages);
    for (int label = 0; label < KVF_PAGE_LABELS; label++) {
        cr_assert_gt(seen[label], STEPS / 1000, "label %s: %ld steps",
                     kvf_page_label_name((kvf_page_label_t)label), (long)seen[label]);
    }
}
