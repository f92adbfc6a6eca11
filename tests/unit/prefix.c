/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/prefix.h"

#include "tests/support/leaks.h"

#include <criterion/criterion.h>
#include <string.h>

static kvf_pages_t *pages[2];
static kvf_prefix_t *prefix;
static int n_calls; /* of the store */

static kvf_status_t counted_acquire(void *ctx, uint32_t g, int64_t n, int32_t *slots) {
    kvf_store_t store = kvf_store_over_pages(ctx);
    n_calls++;
    return store.acquire(ctx, g, n, slots);
}

static void counted_hold(void *ctx, uint32_t g, int64_t n, const int32_t *slots) {
    kvf_store_t store = kvf_store_over_pages(ctx);
    n_calls++;
    store.hold(ctx, g, n, slots);
}

static void counted_release(void *ctx, uint32_t g, int64_t n, const int32_t *slots) {
    kvf_store_t store = kvf_store_over_pages(ctx);
    n_calls++;
    store.release(ctx, g, n, slots);
}

static kvf_status_t counted_cache(void *ctx, uint32_t g, int64_t n, const int32_t *slots) {
    kvf_store_t store = kvf_store_over_pages(ctx);
    n_calls++;
    return store.cache(ctx, g, n, slots);
}

static kvf_status_t counted_evict(void *ctx, uint32_t g, int64_t n, const int32_t *slots,
                                  int64_t *n_evicted_p) {
    kvf_store_t store = kvf_store_over_pages(ctx);
    n_calls++;
    return store.evict(ctx, g, n, slots, n_evicted_p);
}

static const kvf_store_t counted = {pages,           counted_acquire, counted_hold,
                                    counted_release, counted_cache,   counted_evict};

static void start(int64_t n0, int64_t n1) {
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), n0, &pages[0]), KVF_OK);
    cr_assert_eq(kvf_pages_create(kvf_alloc_default(), n1, &pages[1]), KVF_OK);
    cr_assert_eq(kvf_prefix_create(kvf_alloc_default(), &counted, 2, (int64_t[]){n0, n1}, &prefix),
                 KVF_OK);
}

static void end(void) {
    cr_assert_eq(kvf_prefix_clear(prefix), 0);
    kvf_prefix_destroy(prefix);
    for (int g = 0; g < 2; g++) {
        cr_assert_eq(kvf_pages_audit(pages[g], NULL), KVF_OK);
        cr_assert_eq(kvf_pages_count(pages[g], KVF_PAGE_FREE), kvf_pages_total(pages[g]));
        kvf_pages_destroy(pages[g]);
    }
    check_leaks();
}

static kvf_prefix_key_t key(uint64_t n) {
    return (kvf_prefix_key_t){n, ~n};
}

Test(prefix, every_number_is_in_the_key) {
    kvf_prefix_key_t zero = {0, 0}, a = kvf_prefix_chain(zero, 1), b = kvf_prefix_chain(zero, 2);
    kvf_prefix_key_t keys[] = {
        a,
        b,
        kvf_prefix_chain(a, 2),
        kvf_prefix_chain(b, 1),
        kvf_prefix_chain(a, 1),
        kvf_prefix_chain((kvf_prefix_key_t){a.high, a.low}, 2),
        kvf_prefix_chain(zero, INT64_MIN),
        kvf_prefix_block(a, 0, 16, 3, 16),
        kvf_prefix_block(a, 0, 16, 3, 15),
        kvf_prefix_block(a, 0, 16, 4, 16),
        kvf_prefix_block(a, 0, 8, 3, 16),
        kvf_prefix_block(a, 1, 16, 3, 16),
        kvf_prefix_block(b, 0, 16, 3, 16),
        kvf_prefix_block((kvf_prefix_key_t){a.low, a.high ^ 1}, 0, 16, 3, 16),
        kvf_prefix_block((kvf_prefix_key_t){a.low ^ 1, a.high}, 0, 16, 3, 16),
    };
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        for (size_t j = 0; j < i; j++) {
            cr_assert(keys[i].low != keys[j].low && keys[i].high != keys[j].high, "%zu %zu", i, j);
        }
    }
    kvf_prefix_key_t again = kvf_prefix_block(a, 0, 16, 3, 16);
    cr_assert_eq(memcmp(&again, &keys[7], sizeof(again)), 0);
}

Test(prefix, create_refuses_numbers_and_every_allocation_may_fail) {
    static const int64_t bad[] = {0, -1, INT64_C(1) << 31};
    kvf_prefix_t *none = NULL;
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 0);
    for (size_t i = 0; i < 3; i++) {
        cr_assert_eq(kvf_prefix_create(&fail.table, &counted, 2, (int64_t[]){5, bad[i]}, &none),
                     KVF_ERR_INVALID);
    }
    cr_assert_eq(kvf_prefix_create(&fail.table, &counted, 0, bad, &none), KVF_ERR_INVALID);
    cr_assert_eq(kvf_prefix_create(&fail.table, &counted, KVF_MAX_GROUPS + 1, bad, &none),
                 KVF_ERR_INVALID);
    for (uint64_t n = 1; n <= 5; n++) {
        kvf_alloc_fail_init(&fail, n);
        cr_assert_eq(kvf_prefix_create(&fail.table, &counted, 2, (int64_t[]){5, 7}, &none),
                     KVF_ERR_NO_MEMORY);
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_null(none);
    kvf_prefix_destroy(NULL);
}

Test(prefix, the_first_page_of_a_key_wins) {
    int32_t slots[4], more[2];
    kvf_prefix_key_t keys[] = {key(1), key(2), key(3), key(4)};
    start(8, 2);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 4, slots), KVF_OK);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, more), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 1, &keys[1], &more[0]), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 1, &keys[0], &more[0]), KVF_OK, "it has a key");
    int32_t holes[] = {slots[0], slots[1], -1, slots[3]};
    n_calls = 0;
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 4, keys, holes), KVF_OK);
    cr_assert_eq(n_calls, 2, "two runs");
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[0]), slots[0]);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[1]), more[0]);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[2]), -1);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[3]), slots[3]);
    cr_assert_eq(kvf_prefix_find(prefix, 1, keys[0]), -1, "another group");
    cr_assert_eq(kvf_prefix_find(prefix, 0, (kvf_prefix_key_t){keys[0].low, 0}), -1, "half a key");
    cr_assert(kvf_prefix_is_shared(prefix, 0, slots[0]));
    cr_assert_not(kvf_prefix_is_shared(prefix, 0, slots[1]));
    kvf_prefix_release(prefix, 0, 4, slots);
    kvf_prefix_release(prefix, 0, 2, more);
    cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_CACHED), 3);
    end();
}

Test(prefix, keys_of_one_bucket) {
    int32_t slots[3];
    /* All end in the same bits; 4 buckets. */
    kvf_prefix_key_t keys[] = {{4, 1}, {8, 1}, {4, 2}};
    start(4, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 3, slots), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 3, keys, slots), KVF_OK);
    for (int gone = 0; gone < 3; gone++) {
        for (int i = 0; i < 3; i++) {
            cr_assert_eq(kvf_prefix_find(prefix, 0, keys[i]), slots[i]);
        }
        cr_assert(kvf_prefix_take_back(prefix, 0, slots[gone]));
        cr_assert_eq(kvf_prefix_find(prefix, 0, keys[gone]), -1);
        cr_assert_eq(kvf_prefix_publish(prefix, 0, 1, &keys[gone], &slots[gone]), KVF_OK);
    }
    kvf_prefix_release(prefix, 0, 3, slots);
    end();
}

Test(prefix, the_least_recently_used_goes_first_and_ends_before_fronts) {
    int32_t a[3], b[2], got[8];
    kvf_prefix_key_t keys[] = {key(1), key(2), key(3), key(4), key(5)};
    start(6, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 3, a), KVF_OK);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, b), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 3, keys, a), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 2, keys + 3, b), KVF_OK);
    kvf_prefix_release(prefix, 0, 3, a);
    kvf_prefix_release(prefix, 0, 2, b);
    /* Use the front of a once more. */
    kvf_prefix_hold(prefix, 0, 1, a);
    kvf_prefix_release(prefix, 0, 1, a);
    /* Oldest first: a2 a1 b1 b0 a0; and one page is free. */
    const int32_t order[] = {a[2], a[1], b[1], b[0], a[0]};
    int32_t first;
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 1, &first), KVF_OK);
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_CACHED), 5 - i);
        cr_assert_eq(kvf_prefix_acquire(prefix, 0, 1, &got[i]), KVF_OK);
        cr_assert_eq(got[i], order[i], "eviction %d", i);
    }
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 1, got + 5), KVF_ERR_AGAIN);
    for (uint64_t i = 1; i <= 5; i++) {
        cr_assert_eq(kvf_prefix_find(prefix, 0, key(i)), -1);
    }
    kvf_prefix_release(prefix, 0, 5, got);
    kvf_prefix_release(prefix, 0, 1, &first);
    end();
}

Test(prefix, nothing_is_evicted_in_vain) {
    int32_t a[3], b[2], got[6];
    kvf_prefix_key_t keys[] = {key(1), key(2), key(3)};
    start(6, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 3, a), KVF_OK);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, b), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 3, keys, a), KVF_OK);
    kvf_prefix_release(prefix, 0, 3, a);
    n_calls = 0;
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 5, got), KVF_ERR_AGAIN, "1 free, 3 cached");
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 7, got), KVF_ERR_TOO_LARGE);
    cr_assert_eq(n_calls, 0);
    cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_CACHED), 3);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, got), KVF_OK);
    cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_CACHED), 2, "one was enough");
    cr_assert_eq(n_calls, 2);
    kvf_prefix_release(prefix, 0, 2, got);
    kvf_prefix_release(prefix, 0, 2, b);
    end();
}

/* Many pages go with few calls, and those under transfer cost one each and stay. */
Test(prefix, many_are_evicted_at_once) {
    enum { N = 1000 };
    static int32_t slots[N], got[N];
    static kvf_prefix_key_t keys[N];
    start(N, 1);
    for (int i = 0; i < N; i++) {
        keys[i] = key(i);
    }
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, N, slots), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, N, keys, slots), KVF_OK);
    kvf_prefix_release(prefix, 0, N, slots);
    /* The end of a list is the oldest: places 999 down to 301 go but for three of them. */
    static const int read[] = {999, 700, 302};
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(kvf_pages_read_begin(pages[0], slots[read[i]]), KVF_OK);
    }
    n_calls = 0;
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 696, got), KVF_OK);
    cr_assert_leq(n_calls, 1 + 3 + 3);
    for (int i = 0; i < N; i++) {
        bool stays = i <= 300 || i == 999 || i == 700 || i == 302;
        cr_assert_eq(kvf_prefix_find(prefix, 0, keys[i]), stays ? slots[i] : -1, "place %d", i);
    }
    for (int i = 0; i < 3; i++) {
        kvf_pages_read_end(pages[0], slots[read[i]]);
    }
    kvf_prefix_release(prefix, 0, 696, got);
    end();
}

Test(prefix, used_and_read_pages_stay) {
    int32_t a[4], got[4];
    kvf_prefix_key_t keys[] = {key(1), key(2), key(3), key(4)};
    start(4, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 4, a), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 4, keys, a), KVF_OK);
    kvf_prefix_hold(prefix, 0, 1, a); /* a second sequence */
    kvf_prefix_release(prefix, 0, 4, a);
    cr_assert_eq(kvf_pages_read_begin(pages[0], a[3]), KVF_OK); /* the oldest */
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, got), KVF_OK);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[0]), a[0]);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[1]), -1);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[2]), -1);
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[3]), a[3]);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 1, got + 2), KVF_ERR_AGAIN);
    cr_assert_eq(kvf_prefix_clear(prefix), 1);
    kvf_pages_doubt_read(pages[0], a[3]);
    cr_assert_eq(kvf_prefix_clear(prefix), 1);
    kvf_pages_settle(pages[0], a[3]);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 1, got + 2), KVF_OK);
    cr_assert_eq(got[2], a[3]);
    kvf_prefix_release(prefix, 0, 1, a);
    kvf_prefix_release(prefix, 0, 3, got);
    end();
}

Test(prefix, taking_a_page_back) {
    int32_t a[2];
    kvf_prefix_key_t keys[] = {key(1), key(2)};
    start(4, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 2, a), KVF_OK);
    cr_assert(kvf_prefix_take_back(prefix, 0, a[0]), "it is its own already");
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 2, keys, a), KVF_OK);
    kvf_prefix_hold(prefix, 0, 1, a);
    cr_assert_not(kvf_prefix_take_back(prefix, 0, a[0]), "two sequences");
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[0]), a[0]);
    kvf_prefix_release(prefix, 0, 1, a);
    cr_assert_eq(kvf_pages_read_begin(pages[0], a[0]), KVF_OK);
    cr_assert_not(kvf_prefix_take_back(prefix, 0, a[0]), "a transfer");
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[0]), a[0]);
    kvf_pages_read_end(pages[0], a[0]);
    cr_assert(kvf_prefix_take_back(prefix, 0, a[0]));
    cr_assert_eq(kvf_prefix_find(prefix, 0, keys[0]), -1);
    cr_assert_not(kvf_prefix_is_shared(prefix, 0, a[0]));
    kvf_prefix_release(prefix, 0, 2, a);
    cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_FREE), 3);
    end();
}

Test(prefix, a_page_that_is_written_is_not_published_nor_its_run) {
    int32_t a[4];
    kvf_prefix_key_t keys[] = {key(1), key(2), key(3), key(4)};
    start(4, 1);
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 4, a), KVF_OK);
    cr_assert_eq(kvf_pages_read_begin(pages[0], a[0]), KVF_OK);
    cr_assert_eq(kvf_pages_write_begin(pages[0], a[3]), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 4, keys, a), KVF_ERR_BUSY);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(kvf_prefix_find(prefix, 0, keys[i]), -1);
        cr_assert_eq(kvf_pages_evict(pages[0], a[i]), KVF_ERR_INVALID, "not cached");
    }
    kvf_pages_write_end(pages[0], a[3]);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 4, keys, a), KVF_OK);
    kvf_pages_read_end(pages[0], a[0]);
    kvf_prefix_release(prefix, 0, 4, a);
    cr_assert_eq(kvf_pages_count(pages[0], KVF_PAGE_CACHED), 4);
    end();
}

Test(prefix, calls_take_many_pages) {
    int32_t a[40];
    kvf_prefix_key_t keys[40];
    start(40, 1);
    for (uint64_t i = 0; i < 40; i++) {
        keys[i] = key(i);
    }
    n_calls = 0;
    cr_assert_eq(kvf_prefix_acquire(prefix, 0, 40, a), KVF_OK);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 40, keys, a), KVF_OK);
    kvf_prefix_hold(prefix, 0, 40, a);
    kvf_prefix_release(prefix, 0, 40, a);
    kvf_prefix_release(prefix, 0, 40, a);
    cr_assert_eq(n_calls, 5);
    kvf_prefix_hold(prefix, 0, 0, a);
    kvf_prefix_release(prefix, 0, 0, a);
    cr_assert_eq(kvf_prefix_publish(prefix, 0, 0, keys, a), KVF_OK);
    cr_assert_eq(n_calls, 5);
    end();
}
