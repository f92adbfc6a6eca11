/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_PAGES_H
#define KVF_KVMGR_PAGES_H

/**
 * @file
 * The pages (slots) of one pool: who holds each, its generation, and when it is free.
 *
 * A page has counts of holders by kind. It is free when every count is zero and nothing is in
 * doubt; one function frees, and it checks just that. A user of a page that ended without proof
 * leaves it *in doubt*: the page is quarantined until kvf_pages_settle(). Source: docs/protocol.md
 * "Pages". One thread; no clock, no I/O.
 */

#include "kvmgr/base/alloc.h"

#include <stdbool.h>
#include <stdint.h>

/** The label of a page: the first that applies. */
typedef enum kvf_page_label {
    KVF_PAGE_POISONED,    /**< in doubt for longer than quarantine_ms */
    KVF_PAGE_QUARANTINED, /**< an ended transfer may still touch it */
    KVF_PAGE_WRITING,     /**< granted to a peer */
    KVF_PAGE_READING,     /**< being read for a peer */
    KVF_PAGE_HELD,        /**< a sequence holds it */
    KVF_PAGE_CACHED,      /**< only the prefix index holds it */
    KVF_PAGE_FREE,
    KVF_PAGE_LABELS
} kvf_page_label_t;

typedef struct kvf_pages kvf_pages_t;

/** @return "poisoned" .. "free". Static storage; any thread. */
const char *kvf_page_label_name(kvf_page_label_t label);

/**
 * @param n_pages       1 .. INT32_MAX; all free, generation 0.
 * @param[out] pages_p  The caller destroys it.
 * @return KVF_OK, KVF_ERR_INVALID, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_pages_create(const kvf_alloc_t *alloc, int64_t n_pages,
                                        kvf_pages_t **pages_p);

/** NULL is allowed. */
void kvf_pages_destroy(kvf_pages_t *pages);

/** @return All pages of the pool. */
int64_t kvf_pages_total(const kvf_pages_t *pages);

/** @return Pages with this label. @cost O(1) */
int64_t kvf_pages_count(const kvf_pages_t *pages, kvf_page_label_t label);

/** @return The page's label. @param slot  Inside the pool. @cost O(1) */
kvf_page_label_t kvf_pages_label(const kvf_pages_t *pages, int32_t slot);

/** A hint: the page is used soon. Its record is cold where pools are large, and a transfer names
 * thousands of pages. @param slot  Any; outside the pool nothing happens. @cost O(1) */
void kvf_pages_prefetch(const kvf_pages_t *pages, int32_t slot);

/** @return The page's generation. @param slot  Inside the pool. @cost O(1) */
uint64_t kvf_pages_generation(const kvf_pages_t *pages, int32_t slot);

/**
 * Take n free pages for a sequence (each gets one hold and a new generation), all or none.
 *
 * @param[out] slots  Room for n.
 * @return KVF_OK; KVF_ERR_TOO_LARGE when the pool has fewer pages than n in all; KVF_ERR_AGAIN when
 * too few are free now; KVF_ERR_INVALID for n < 0.
 * @cost O(n)
 */
KVF_CHECK kvf_status_t kvf_pages_acquire(kvf_pages_t *pages, int64_t n, int32_t *slots);

/** One more sequence holds the page. @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (neither a
 * sequence nor the prefix index holds it). */
KVF_CHECK kvf_status_t kvf_pages_hold(kvf_pages_t *pages, int32_t slot);

/** A sequence lets the page go; it is freed if that was the last use and nothing is in doubt.
 *  @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (no sequence holds it: a double release). */
KVF_CHECK kvf_status_t kvf_pages_release(kvf_pages_t *pages, int32_t slot);

/**
 * The prefix index holds the page too, whose bytes are final from now on.
 *
 * @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (no sequence holds it, or the index does already),
 * KVF_ERR_BUSY (written or in doubt: just what its label says).
 */
KVF_CHECK kvf_status_t kvf_pages_cache(kvf_pages_t *pages, int32_t slot);

/** @return What kvf_pages_cache() would: to find out about many pages before any is changed. */
KVF_CHECK kvf_status_t kvf_pages_can_cache(const kvf_pages_t *pages, int32_t slot);

/**
 * The prefix index lets the page go; it is freed if that was the last use. A page under transfer is
 * never evicted: whoever comes for it next would find other bytes.
 *
 * @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (the index does not hold it), KVF_ERR_BUSY (read,
 * or in doubt; the index still holds it).
 */
KVF_CHECK kvf_status_t kvf_pages_evict(kvf_pages_t *pages, int32_t slot);

/** A transfer starts to read the page. @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (free),
 * KVF_ERR_BUSY (a writer has it). */
KVF_CHECK kvf_status_t kvf_pages_read_begin(kvf_pages_t *pages, int32_t slot);

/** That transfer is proven to be done with the page. A read_begin must be open. */
void kvf_pages_read_end(kvf_pages_t *pages, int32_t slot);

/**
 * Grant the page to a peer: it must be held by exactly one sequence and used by nobody else (the
 * prefix index neither). Bumps the generation; a grant names the number after the call.
 *
 * @return KVF_OK, KVF_ERR_RANGE, KVF_ERR_INVALID (not held), KVF_ERR_BUSY (shared, cached, read,
 * written or in doubt).
 */
KVF_CHECK kvf_status_t kvf_pages_write_begin(kvf_pages_t *pages, int32_t slot);

/** The grant is over, and it is proven that nothing writes any more. A write_begin must be open. */
void kvf_pages_write_end(kvf_pages_t *pages, int32_t slot);

/** The page's open read (or write) ended without proof: it becomes a doubt. Its read_end
 * (write_end) is not called any more; kvf_pages_settle() takes its place. */
void kvf_pages_doubt_read(kvf_pages_t *pages, int32_t slot);
void kvf_pages_doubt_write(kvf_pages_t *pages, int32_t slot);

/** A page in doubt for too long: reported, counted, not used again unless settled. */
void kvf_pages_poison(kvf_pages_t *pages, int32_t slot);

/** One doubt of the page is proven unfounded; heals a poisoned page when it was the last. */
void kvf_pages_settle(kvf_pages_t *pages, int32_t slot);

/**
 * Recount everything.
 *
 * @return KVF_OK, or KVF_ERR_INTERNAL (the text names the first page or count that does not fit).
 * @cost O(pages)
 */
KVF_CHECK kvf_status_t kvf_pages_audit(const kvf_pages_t *pages, kvf_detail_t *detail);

#endif
