/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_PREFIX_H
#define KVF_KVMGR_PREFIX_H

/**
 * @file
 * The pages of all sequences: how many sequences share each, and the index of those whose content
 * is known, so that a later sequence with the same prefix finds them. What no sequence uses any
 * more stays in the index until its page is needed: the least recently used goes first, and none
 * under transfer. Source: docs/placement.md "Prefix reuse".
 *
 * A key stands for all tokens of a prompt up to the end of a block. Two prompts with one key would
 * share pages with wrong bytes, and nothing would notice. By chance that takes in the order of 2^64
 * blocks at once (birthday bound of 128 bits). XXH3 is no cryptographic hash, though: who chooses
 * content ids freely can make keys collide, so ids must come from where tokens are trusted to.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/layout.h"
#include "kvmgr/store.h"

/** 128 bits that stand for a prefix. */
typedef struct kvf_prefix_key {
    uint64_t low;
    uint64_t high;
} kvf_prefix_key_t;

typedef struct kvf_prefix kvf_prefix_t;

/**
 * @param before  What stands for the pieces in front; zeros for the first one.
 * @param id      The next piece's content: equal ids are equal tokens at every position that two
 *                prompts have in common.
 * @return What stands for the prompt up to and with that piece. @thread any
 */
kvf_prefix_key_t kvf_prefix_chain(kvf_prefix_key_t before, int64_t id);

/**
 * @param chain            Of the piece that holds the block's last token.
 * @param filled_tokens    Of the block, 1 .. tokens_per_block: a partial last block is another one.
 * @return The block's key. @thread any
 */
kvf_prefix_key_t kvf_prefix_block(kvf_prefix_key_t chain, uint32_t group_idx,
                                  int64_t tokens_per_block, int64_t ordinal, int64_t filled_tokens);

/**
 * @param store            Where the pages are; its ctx lives as long as the index.
 * @param n_groups         1 .. KVF_MAX_GROUPS.
 * @param n_pages          Each group's pool, 1 .. INT32_MAX.
 * @param[out] prefix_p    kvf_prefix_destroy() it. All memory is taken here.
 * @return KVF_OK, KVF_ERR_INVALID, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_prefix_create(const kvf_alloc_t *alloc, const kvf_store_t *store,
                                         uint32_t n_groups, const int64_t *n_pages,
                                         kvf_prefix_t **prefix_p);

/** NULL is allowed. No sequence has pages any more; the store keeps what is still in the index. */
void kvf_prefix_destroy(kvf_prefix_t *prefix);

/**
 * Pages for one sequence, all or none, at the cost of pages that only the index holds.
 *
 * @param[out] slots  Room for n; untouched on error.
 * @return KVF_OK; KVF_ERR_AGAIN (too few now); KVF_ERR_TOO_LARGE (too few in all).
 * @cost O(n) amortised, and what is under transfer in the index is looked at; up to three calls of
 * the store, one for each 256 evicted pages, and one for each page of those that is under transfer
 */
KVF_CHECK kvf_status_t kvf_prefix_acquire(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n,
                                          int32_t *slots);

/** One more sequence uses pages that were acquired or found. -1 is skipped. @cost O(n), one call */
void kvf_prefix_hold(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n, const int32_t *slots);

/** A sequence lets pages go. Of those that stay in the index alone, the last of the list will be
 * evicted first. -1 is skipped. @cost O(n), one call */
void kvf_prefix_release(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n, const int32_t *slots);

/** @return Whether anybody else counts on the bytes of a page: another sequence, or the index. */
bool kvf_prefix_is_shared(const kvf_prefix_t *prefix, uint32_t group_idx, int32_t slot);

/** @return The slot of a block, or -1. @cost O(1) */
int32_t kvf_prefix_find(const kvf_prefix_t *prefix, uint32_t group_idx, kvf_prefix_key_t key);

/**
 * Put pages whose bytes are final into the index. The first page of a key wins; one that comes
 * later, that is -1, or that is in the index already, is left as it is.
 *
 * @param keys, slots  Of n blocks; each slot is used by a sequence.
 * @return KVF_OK, or KVF_ERR_BUSY: a peer still writes a page; some of the others are in the index.
 * @cost O(n), one call for each run of consecutive new pages
 */
KVF_CHECK kvf_status_t kvf_prefix_publish(kvf_prefix_t *prefix, uint32_t group_idx, int64_t n,
                                          const kvf_prefix_key_t *keys, const int32_t *slots);

/** Take a page of one sequence out of the index, so that it is the sequence's own.
 *  @return Whether it is its own now: not when another sequence uses it, or a transfer. */
bool kvf_prefix_take_back(kvf_prefix_t *prefix, uint32_t group_idx, int32_t slot);

/** Evict all that no sequence uses and no transfer reads.
 *  @return How many pages only the index still holds. @cost O(entries) */
int64_t kvf_prefix_clear(kvf_prefix_t *prefix);

#endif
