/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/pages.h"

#include "kvmgr/base/mutant.h"

#include <assert.h>
#include <inttypes.h>

#define NONE (-1)

struct page {
    uint64_t generation;
    uint32_t holds;       /* sequences */
    uint32_t readers;     /* open reads for peers */
    uint32_t read_doubts; /* reads that ended without proof */
    int32_t next_free;    /* the free list runs through the pages themselves */
    bool cached;          /* the prefix index holds it */
    bool writing;         /* an open grant */
    bool write_doubt;     /* a grant that ended without proof; no read starts meanwhile */
    bool poisoned;
    bool free; /* in the free list */
};

struct kvf_pages {
    kvf_alloc_t alloc;
    int64_t n_pages;
    int64_t counts[KVF_PAGE_LABELS];
    int32_t first_free;
    struct page pages[];
};

const char *kvf_page_label_name(kvf_page_label_t label) {
    static const char *const names[KVF_PAGE_LABELS] = {
        "poisoned", "quarantined", "writing", "reading", "held", "cached", "free"};
    return (unsigned)label < KVF_PAGE_LABELS ? names[label] : "free";
}

kvf_status_t kvf_pages_create(const kvf_alloc_t *alloc, int64_t n_pages, kvf_pages_t **pages_p) {
    if (n_pages < 1 || n_pages > INT32_MAX) {
        return KVF_ERR_INVALID;
    }
    kvf_pages_t *pages =
        kvf_alloc(alloc, sizeof(*pages) + (size_t)n_pages * sizeof(pages->pages[0]));
    if (pages == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    *pages = (kvf_pages_t){.alloc = *alloc, .n_pages = n_pages, .first_free = 0};
    pages->counts[KVF_PAGE_FREE] = n_pages;
    for (int64_t i = 0; i < n_pages; i++) {
        int32_t next = i + 1 < n_pages ? (int32_t)(i + 1) : NONE;
        pages->pages[i] = (struct page){.next_free = next, .free = true};
    }
    *pages_p = pages;
    return KVF_OK;
}

void kvf_pages_destroy(kvf_pages_t *pages) {
    if (pages != NULL) {
        kvf_alloc_t alloc = pages->alloc;
        kvf_free(&alloc, pages);
    }
}

static bool has_slot(const kvf_pages_t *pages, int32_t slot) {
    return slot >= 0 && slot < pages->n_pages;
}

static bool in_doubt(const struct page *page) {
    return page->write_doubt || page->read_doubts > 0;
}

static kvf_page_label_t label_of(const struct page *page) {
    if (page->poisoned) {
        return KVF_PAGE_POISONED;
    }
    if (in_doubt(page) && !KVF_MUTANT(free_in_doubt)) {
        return KVF_PAGE_QUARANTINED;
    }
    if (page->writing && !KVF_MUTANT(free_while_written)) {
        return KVF_PAGE_WRITING;
    }
    if (page->readers > 0) {
        return KVF_PAGE_READING;
    }
    if (page->holds > 0) {
        return KVF_PAGE_HELD;
    }
    return page->cached ? KVF_PAGE_CACHED : KVF_PAGE_FREE;
}

static kvf_status_t audit_page(const kvf_pages_t *pages, int64_t slot, kvf_detail_t *detail) {
    const struct page *page = &pages->pages[slot];
    const char *wrong = NULL;
    if (page->free != (label_of(page) == KVF_PAGE_FREE)) {
        wrong = page->free ? "is free and in use" : "is unused and not free";
    } else if (page->poisoned && !in_doubt(page)) {
        wrong = "is poisoned without a doubt";
    } else if ((page->writing || page->write_doubt) &&
               (page->readers > 0 || page->read_doubts > 0)) {
        wrong = "is read and written at once";
    } else if (page->cached && (page->writing || page->write_doubt)) {
        wrong = "is written and in the prefix index at once";
    } else if (page->writing && page->write_doubt) {
        wrong = "has two writers";
    }
    if (wrong != NULL) {
        return kvf_fail(detail, KVF_ERR_INTERNAL, "page %" PRId64 " %s", slot, wrong);
    }
    return KVF_OK;
}

/* After every change: the page makes sense, and the labels add up. kvf_pages_audit() recounts. */
static void check_change(const kvf_pages_t *pages, const struct page *page) {
#ifndef NDEBUG
    kvf_detail_t detail;
    int64_t n = 0;
    for (unsigned label = 0; label < KVF_PAGE_LABELS; label++) {
        n += pages->counts[label];
    }
    assert(audit_page(pages, page - pages->pages, &detail) == KVF_OK && n == pages->n_pages);
#else
    (void)pages;
    (void)page;
#endif
}

/* Open a change of a page: takes it out of the count of its label until end_change() puts it back.
 */
static struct page *begin_change(kvf_pages_t *pages, int32_t slot) {
    assert(has_slot(pages, slot));
    struct page *page = &pages->pages[slot];
    pages->counts[label_of(page)]--;
    return page;
}

/* The one place that frees a page: when its last use has gone and nothing is in doubt. */
static void end_change(kvf_pages_t *pages, struct page *page) {
    kvf_page_label_t label = label_of(page);
    pages->counts[label]++;
    if (label == KVF_PAGE_FREE) {
        page->free = true;
        page->next_free = pages->first_free;
        pages->first_free = (int32_t)(page - pages->pages);
    }
    check_change(pages, page);
}

int64_t kvf_pages_total(const kvf_pages_t *pages) {
    return pages->n_pages;
}

int64_t kvf_pages_count(const kvf_pages_t *pages, kvf_page_label_t label) {
    return pages->counts[label];
}

kvf_page_label_t kvf_pages_label(const kvf_pages_t *pages, int32_t slot) {
    assert(has_slot(pages, slot));
    return label_of(&pages->pages[slot]);
}

void kvf_pages_prefetch(const kvf_pages_t *pages, int32_t slot) {
    if (has_slot(pages, slot)) {
        __builtin_prefetch(&pages->pages[slot], 1);
    }
}

uint64_t kvf_pages_generation(const kvf_pages_t *pages, int32_t slot) {
    assert(has_slot(pages, slot));
    return pages->pages[slot].generation;
}

kvf_status_t kvf_pages_acquire(kvf_pages_t *pages, int64_t n, int32_t *slots) {
    if (n < 0) {
        return KVF_ERR_INVALID;
    }
    if (n > pages->n_pages) {
        return KVF_ERR_TOO_LARGE;
    }
    if (n > pages->counts[KVF_PAGE_FREE]) {
        return KVF_ERR_AGAIN;
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t slot = pages->first_free;
        struct page *page = &pages->pages[slot];
        pages->first_free = page->next_free;
        page->free = false;
        page->holds = 1;
        page->generation++;
        slots[i] = slot;
    }
    pages->counts[KVF_PAGE_FREE] -= n;
    pages->counts[KVF_PAGE_HELD] += n;
    return KVF_OK;
}

kvf_status_t kvf_pages_hold(kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    if (pages->pages[slot].holds == 0 && !pages->pages[slot].cached) {
        return KVF_ERR_INVALID;
    }
    struct page *page = begin_change(pages, slot);
    page->holds++;
    end_change(pages, page);
    return KVF_OK;
}

kvf_status_t kvf_pages_release(kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    if (pages->pages[slot].holds == 0) {
        return KVF_ERR_INVALID;
    }
    struct page *page = begin_change(pages, slot);
    page->holds--;
    end_change(pages, page);
    return KVF_OK;
}

kvf_status_t kvf_pages_can_cache(const kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    const struct page *page = &pages->pages[slot];
    if (page->holds == 0 || page->cached) {
        return KVF_ERR_INVALID;
    }
    return page->writing || in_doubt(page) ? KVF_ERR_BUSY : KVF_OK;
}

kvf_status_t kvf_pages_cache(kvf_pages_t *pages, int32_t slot) {
    kvf_status_t status = kvf_pages_can_cache(pages, slot);
    if (status != KVF_OK) {
        return status;
    }
    struct page *page = begin_change(pages, slot);
    page->cached = true;
    end_change(pages, page);
    return KVF_OK;
}

kvf_status_t kvf_pages_evict(kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    const struct page *now = &pages->pages[slot];
    if (!now->cached) {
        return KVF_ERR_INVALID;
    }
    if (now->readers > 0 || in_doubt(now)) {
        return KVF_ERR_BUSY;
    }
    struct page *page = begin_change(pages, slot);
    page->cached = false;
    end_change(pages, page);
    return KVF_OK;
}

kvf_status_t kvf_pages_read_begin(kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    if (pages->pages[slot].free) {
        return KVF_ERR_INVALID;
    }
    /* A writer in doubt is a writer; a reader in doubt does no harm to a reader. */
    if (pages->pages[slot].writing || pages->pages[slot].write_doubt) {
        return KVF_ERR_BUSY;
    }
    struct page *page = begin_change(pages, slot);
    page->readers++;
    end_change(pages, page);
    return KVF_OK;
}

void kvf_pages_read_end(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(page->readers > 0);
    page->readers--;
    end_change(pages, page);
}

kvf_status_t kvf_pages_write_begin(kvf_pages_t *pages, int32_t slot) {
    if (!has_slot(pages, slot)) {
        return KVF_ERR_RANGE;
    }
    const struct page *now = &pages->pages[slot];
    if (now->holds == 0) {
        return KVF_ERR_INVALID;
    }
    if (now->holds > 1 || now->cached || label_of(now) != KVF_PAGE_HELD) {
        return KVF_ERR_BUSY;
    }
    struct page *page = begin_change(pages, slot);
    page->writing = true;
    page->generation += KVF_MUTANT(keep_generation) ? 0 : 1;
    end_change(pages, page);
    return KVF_OK;
}

void kvf_pages_write_end(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(page->writing);
    page->writing = false;
    end_change(pages, page);
}

void kvf_pages_doubt_read(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(page->readers > 0);
    page->readers--;
    page->read_doubts++;
    end_change(pages, page);
}

void kvf_pages_doubt_write(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(page->writing);
    page->writing = false;
    page->write_doubt = true;
    end_change(pages, page);
}

void kvf_pages_poison(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(in_doubt(page));
    page->poisoned = true;
    end_change(pages, page);
}

void kvf_pages_settle(kvf_pages_t *pages, int32_t slot) {
    struct page *page = begin_change(pages, slot);
    assert(in_doubt(page));
    /* Doubts of both kinds never meet: a grant needs a page without doubt, a read one without a
     * writer. */
    if (page->write_doubt) {
        page->write_doubt = false;
    } else {
        page->read_doubts--;
    }
    page->poisoned = page->poisoned && in_doubt(page);
    end_change(pages, page);
}

kvf_status_t kvf_pages_audit(const kvf_pages_t *pages, kvf_detail_t *detail) {
    int64_t counts[KVF_PAGE_LABELS] = {0};
    for (int64_t i = 0; i < pages->n_pages; i++) {
        kvf_status_t status = audit_page(pages, i, detail);
        if (status != KVF_OK) {
            return status;
        }
        counts[label_of(&pages->pages[i])]++;
    }
    for (unsigned label = 0; label < KVF_PAGE_LABELS; label++) {
        if (counts[label] != pages->counts[label]) {
            return kvf_fail(detail, KVF_ERR_INTERNAL,
                            "%" PRId64 " pages are counted as %s, and %" PRId64 " are",
                            pages->counts[label], kvf_page_label_name((kvf_page_label_t)label),
                            counts[label]);
        }
    }
    /* A list of just that many free pages without repetition holds each of them; a ring is longer.
     */
    int64_t listed = 0;
    for (int32_t slot = pages->first_free; slot != NONE; slot = pages->pages[slot].next_free) {
        if (!has_slot(pages, slot) || !pages->pages[slot].free ||
            ++listed > counts[KVF_PAGE_FREE]) {
            return kvf_fail(detail, KVF_ERR_INTERNAL, "the free list goes wrong at page %" PRId32,
                            slot);
        }
    }
    if (listed != counts[KVF_PAGE_FREE]) {
        return kvf_fail(detail, KVF_ERR_INTERNAL,
                        "the free list has %" PRId64 " pages, and %" PRId64 " are free", listed,
                        counts[KVF_PAGE_FREE]);
    }
    return KVF_OK;
}
