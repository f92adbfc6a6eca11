/* SPDX-License-Identifier: Apache-2.0 */
/* The object itself, not its header alone: what the audit finds can only be broken from inside. */
#include "kvmgr/pages.c"

#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>

static kvf_pages_t *make(int64_t n) {
    kvf_pages_t *pages = NULL;
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), n, &pages), KVF_OK);
    return pages;
}

static void close_pages(kvf_pages_t *pages) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_pages_audit(pages, &detail), KVF_OK, "%s", detail.text);
    kvf_pages_destroy(pages);
}

static kvf_pages_t *make_held(int64_t n) {
    kvf_pages_t *pages = make(n);
    int32_t slots[16];
    cr_assert_eq(kvf_pages_acquire(pages, n, slots), KVF_OK);
    return pages;
}

Test(pages, create_refuses_sizes) {
    kvf_pages_t *pages = NULL;
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), 0, &pages), KVF_ERR_INVALID);
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), -1, &pages), KVF_ERR_INVALID);
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), INT64_C(1) << 31, &pages), KVF_ERR_INVALID);
    cr_assert_null(pages);
    kvf_pages_destroy(NULL);
}

Test(pages, create_without_memory_and_no_allocation_later) {
    kvf_pages_t *pages = NULL;
    int32_t slots[100];
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 1);
    cr_assert_eq(kvf_pages_create(&fail.table, 100, &pages), KVF_ERR_NO_MEMORY);
    cr_assert_null(pages);
    kvf_alloc_fail_init(&fail, 2);
    cr_assert_eq(kvf_pages_create(&fail.table, 100, &pages), KVF_OK);
    cr_assert_eq(kvf_pages_acquire(pages, 100, slots), KVF_OK);
    cr_assert_eq(kvf_pages_release(pages, 50), KVF_OK);
    cr_assert_eq(fail.calls, 1);
    kvf_pages_destroy(pages);
    cr_assert_eq(fail.live, 0);
}

Test(pages, acquire_all_or_none) {
    kvf_pages_t *pages = make(4);
    int32_t slots[5] = {-7, -7, -7, -7, -7};
    cr_assert_eq(kvf_pages_acquire(pages, -1, slots), KVF_ERR_INVALID);
    cr_assert_eq(kvf_pages_acquire(pages, 5, slots), KVF_ERR_TOO_LARGE);
    cr_assert_eq(kvf_pages_acquire(pages, 0, slots), KVF_OK);
    cr_assert_eq(slots[0], -7);
    cr_assert_eq(kvf_pages_acquire(pages, 3, slots), KVF_OK);
    for (int32_t i = 0; i < 3; i++) {
        cr_assert_eq(slots[i], i);
        cr_assert_eq(kvf_pages_label(pages, i), KVF_PAGE_HELD);
        cr_assert_eq(kvf_pages_generation(pages, i), 1);
    }
    cr_assert_eq(kvf_pages_acquire(pages, 2, slots + 3), KVF_ERR_AGAIN);
    cr_assert_eq(slots[3], -7);
    cr_assert_eq(kvf_pages_count(pages, KVF_PAGE_FREE), 1);
    cr_assert_eq(kvf_pages_count(pages, KVF_PAGE_HELD), 3);
    cr_assert_eq(kvf_pages_total(pages), 4);
    cr_assert_eq(kvf_pages_release(pages, 1), KVF_OK);
    cr_assert_eq(kvf_pages_acquire(pages, 1, slots), KVF_OK);
    cr_assert_eq(slots[0], 1);
    cr_assert_eq(kvf_pages_generation(pages, 1), 2);
    close_pages(pages);
}

Test(pages, sharing_and_double_release) {
    kvf_pages_t *pages = make_held(2);
    cr_assert_eq(kvf_pages_hold(pages, 1), KVF_OK);
    cr_assert_eq(kvf_pages_release(pages, 1), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 1), KVF_PAGE_HELD);
    cr_assert_eq(kvf_pages_release(pages, 1), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 1), KVF_PAGE_FREE);
    cr_assert_eq(kvf_pages_release(pages, 1), KVF_ERR_INVALID);
    cr_assert_eq(kvf_pages_hold(pages, 1), KVF_ERR_INVALID);
    close_pages(pages);
}

Test(pages, slots_outside_the_pool) {
    kvf_pages_t *pages = make_held(2);
    static const int32_t outside[] = {-1, 2, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        cr_assert_eq(kvf_pages_hold(pages, outside[i]), KVF_ERR_RANGE);
        cr_assert_eq(kvf_pages_release(pages, outside[i]), KVF_ERR_RANGE);
        cr_assert_eq(kvf_pages_cache(pages, outside[i]), KVF_ERR_RANGE);
        cr_assert_eq(kvf_pages_evict(pages, outside[i]), KVF_ERR_RANGE);
        cr_assert_eq(kvf_pages_read_begin(pages, outside[i]), KVF_ERR_RANGE);
        cr_assert_eq(kvf_pages_write_begin(pages, outside[i]), KVF_ERR_RANGE);
    }
    close_pages(pages);
}

Test(pages, a_page_under_read_outlives_its_sequence) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_READING);
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    kvf_pages_read_end(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_READING);
    cr_assert_eq(kvf_pages_acquire(pages, 1, &(int32_t){0}), KVF_ERR_AGAIN);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_INVALID, "nobody holds it");
    kvf_pages_read_end(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_FREE);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_ERR_INVALID);
    close_pages(pages);
}

Test(pages, a_grant_is_for_a_page_of_its_own) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_hold(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY, "shared");
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY, "read");
    kvf_pages_read_end(pages, 0);
    cr_assert_eq(kvf_pages_generation(pages, 0), 1);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_generation(pages, 0), 2);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_WRITING);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY, "written");
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_ERR_BUSY);
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_WRITING, "the grant outlives the sequence");
    kvf_pages_write_end(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_FREE);
    close_pages(pages);
}

Test(pages, a_writer_in_doubt_keeps_the_page) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_OK);
    kvf_pages_doubt_write(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_QUARANTINED);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_ERR_BUSY, "it may still be rewritten");
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_acquire(pages, 1, &(int32_t){0}), KVF_ERR_AGAIN);
    kvf_pages_poison(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_POISONED);
    cr_assert_eq(kvf_pages_count(pages, KVF_PAGE_POISONED), 1);
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_FREE);
    close_pages(pages);
}

Test(pages, a_reader_in_doubt_forbids_writing_only) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    kvf_pages_doubt_read(pages, 0);
    kvf_pages_doubt_read(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_QUARANTINED);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    kvf_pages_read_end(pages, 0);
    kvf_pages_poison(pages, 0);
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_POISONED, "one of two doubts is left");
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_HELD);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_OK);
    kvf_pages_write_end(pages, 0);
    close_pages(pages);
}

Test(pages, the_index_holds_a_page_that_no_sequence_does) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_ERR_INVALID, "not in the index");
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_ERR_INVALID, "once is enough");
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_HELD);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_BUSY, "others count on its bytes");
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_CACHED);
    cr_assert_eq(kvf_pages_count(pages, KVF_PAGE_CACHED), 1);
    cr_assert_eq(kvf_pages_acquire(pages, 1, &(int32_t){0}), KVF_ERR_AGAIN);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_ERR_INVALID, "nobody holds it");
    cr_assert_eq(kvf_pages_hold(pages, 0), KVF_OK, "a hit");
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_HELD);
    cr_assert_eq(kvf_pages_generation(pages, 0), 1, "the same bytes");
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_HELD);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_OK, "its own again");
    kvf_pages_write_end(pages, 0);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_FREE);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_ERR_INVALID, "free");
    cr_assert_eq(kvf_pages_hold(pages, 0), KVF_ERR_INVALID);
    close_pages(pages);
}

Test(pages, a_page_under_transfer_is_not_evicted) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_ERR_BUSY);
    cr_assert_eq(kvf_pages_release(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_ERR_BUSY);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_READING);
    kvf_pages_doubt_read(pages, 0);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_ERR_BUSY);
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_label(pages, 0), KVF_PAGE_CACHED);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK, "a hit of the sender");
    kvf_pages_read_end(pages, 0);
    cr_assert_eq(kvf_pages_evict(pages, 0), KVF_OK);
    close_pages(pages);
}

Test(pages, the_index_takes_no_page_that_a_peer_may_write) {
    kvf_pages_t *pages = make_held(1);
    cr_assert_eq(kvf_pages_write_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_ERR_BUSY);
    kvf_pages_doubt_write(pages, 0);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_ERR_BUSY);
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    kvf_pages_doubt_read(pages, 0);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_ERR_BUSY);
    kvf_pages_settle(pages, 0);
    cr_assert_eq(kvf_pages_read_begin(pages, 0), KVF_OK);
    cr_assert_eq(kvf_pages_cache(pages, 0), KVF_OK, "a reader does no harm");
    kvf_pages_read_end(pages, 0);
    close_pages(pages);
}

Test(pages, an_end_without_a_begin_is_a_defect, .signal = SIGABRT) {
    kvf_pages_read_end(make_held(1), 0);
}

Test(pages, settling_what_is_not_in_doubt_is_a_defect, .signal = SIGABRT) {
    kvf_pages_settle(make_held(1), 0);
}

Test(pages, label_names) {
    static const char *const names[] = {"poisoned", "quarantined", "writing", "reading",
                                        "held",     "cached",      "free"};
    for (int label = 0; label < KVF_PAGE_LABELS; label++) {
        cr_assert_str_eq(kvf_page_label_name((kvf_page_label_t)label), names[label]);
    }
}

static void break_counts(kvf_pages_t *pages) {
    pages->counts[KVF_PAGE_HELD]--;
    pages->counts[KVF_PAGE_FREE]++;
}

static void break_leak(kvf_pages_t *pages) {
    pages->pages[0].holds = 0;
    pages->counts[KVF_PAGE_HELD]--;
    pages->counts[KVF_PAGE_FREE]++;
}

static void break_early_free(kvf_pages_t *pages) {
    pages->pages[0].free = true;
}

static void break_ring(kvf_pages_t *pages) {
    pages->pages[3].next_free = 2;
}

static void break_short_list(kvf_pages_t *pages) {
    pages->first_free = NONE;
}

static void break_wild_list(kvf_pages_t *pages) {
    pages->pages[3].next_free = 4;
}

static void break_list_of_held(kvf_pages_t *pages) {
    pages->pages[2].next_free = 1;
}

static void break_poison(kvf_pages_t *pages) {
    pages->pages[1].poisoned = true;
}

static void break_writer(kvf_pages_t *pages) {
    pages->pages[1].writing = true;
    pages->pages[1].readers = 1;
}

static void break_two_writers(kvf_pages_t *pages) {
    pages->pages[1].writing = true;
    pages->pages[1].write_doubt = true;
}

static void break_cached_writer(kvf_pages_t *pages) {
    pages->pages[1].cached = true;
    pages->pages[1].write_doubt = true;
}

static void break_cached_free(kvf_pages_t *pages) {
    pages->pages[2].cached = true;
}

static const struct {
    void (*damage)(kvf_pages_t *pages);
    const char *word;
} damages[] = {
    {break_counts, "counted as held"},
    {break_leak, "page 0 is unused and not free"},
    {break_early_free, "page 0 is free and in use"},
    {break_ring, "free list"},
    {break_short_list, "free list has 0 pages, and 2"},
    {break_wild_list, "page 4"},
    {break_list_of_held, "goes wrong at page 1"},
    {break_poison, "page 1 is poisoned"},
    {break_writer, "page 1 is read and written"},
    {break_two_writers, "page 1 has two writers"},
    {break_cached_writer, "page 1 is written and in the prefix index"},
    {break_cached_free, "page 2 is free and in use"},
};

Test(pages, audit_finds_every_damage) {
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        kvf_pages_t *pages = make(4); /* 0 and 1 held, 2 and 3 free */
        int32_t slots[2];
        kvf_detail_t detail = {""};
        cr_assert_eq(kvf_pages_acquire(pages, 2, slots), KVF_OK);
        cr_assert_eq(kvf_pages_audit(pages, &detail), KVF_OK);
        damages[i].damage(pages);
        cr_assert_eq(kvf_pages_audit(pages, &detail), KVF_ERR_INTERNAL, "damage %zu", i);
        cr_assert_not_null(strstr(detail.text, damages[i].word), "damage %zu: %s", i, detail.text);
        kvf_pages_destroy(pages);
    }
}
