/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_SEQ_H
#define KVF_KVMGR_SEQ_H

/**
 * @file
 * The sequence manager of one side of one rank: which pages each request has. A sequence has one
 * block table for each layer group, indexed by ordinal, and a length; pages are bound for the whole
 * reserve at once (kvf_seq_reserve()) or as tokens come (kvf_seq_append()). Sequences share pages
 * with forks of theirs, and with later sequences of the same prefix; a page that is shared is
 * copied before it is written. Pure state: no bytes are touched here, and the caller locks.
 *
 * A life: open (what the prefix index knows is bound already), reserve or append and slide in turn,
 * publish, append and rewind (speculation), slide, close. Source: docs/placement.md "Sequences".
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/capacity.h"
#include "kvmgr/layout.h"
#include "kvmgr/store.h"
#include "kvmgr/table.h"

typedef struct kvf_seqs kvf_seqs_t;
typedef struct kvf_seq kvf_seq_t;

/** What a manager is told when it is made. Borrowed during the call, but for the store's ctx. */
typedef struct kvf_seqs_config {
    const kvf_layout_t *layout; /**< a checked one */
    const int64_t *n_pages;     /**< of each group's pool, 1 .. INT32_MAX */
    kvf_store_t store;          /**< the pools, which outlive the manager */
    bool generation_side; /**< holds the drafts; a prefix need only hold for what is live for P.
                             The context side computes on from the prefix, so there it needs
                             what is live for C, too */
    kvf_cp_t cp;          /**< binds only its own rank's ordinals; size 0 = all */
    int64_t piece_tokens; /**< what one content id stands for; 0: no prefix reuse */
} kvf_seqs_config_t;

/**
 * @param[out] seqs_p  kvf_seqs_destroy() it.
 * @return KVF_OK, KVF_ERR_INVALID (the text names the number), KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_seqs_create(const kvf_alloc_t *alloc, const kvf_seqs_config_t *config,
                                       kvf_seqs_t **seqs_p, kvf_detail_t *detail);

/** All sequences are closed before. Empties the index; a page under transfer stays cached in its
 * pool. NULL is allowed. */
void kvf_seqs_destroy(kvf_seqs_t *seqs);

/** Forget every prefix that no sequence uses and no transfer reads: for other weights, or to empty
 * the pools. @return How many pages only the index still holds. */
int64_t kvf_seqs_forget(kvf_seqs_t *seqs);

/**
 * The most pages that a request holds at a time, each group, in the use that is described: enough
 * free pages for the sum over all admitted requests means that no append of theirs waits for ever.
 *
 * @param chunk_tokens  0: kvf_seq_reserve(), for the whole prompt or a receiver. Else: at most so
 *                      many tokens an append, with a slide after each.
 * @param[out] pages    Room for the layout's groups.
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_TOO_LARGE (more than a pool has: no number of releases
 * makes room; the text names the group).
 * @cost O(groups)
 * @source docs/placement.md "Sequences": k consecutive tokens touch at most 1 + ceil((k-1)/t)
 * blocks
 */
KVF_CHECK kvf_status_t kvf_seqs_need(const kvf_seqs_t *seqs, const kvf_lengths_t *lengths,
                                     int64_t chunk_tokens, int64_t *pages, kvf_detail_t *detail);

/** A request. */
typedef struct kvf_seq_desc {
    kvf_lengths_t lengths;
    int64_t
        allocated_tokens; /**< what the engine reserves: kvf_get_kv_capacity_tokens() of the side */
    const int64_t *content_ids; /**< copied as what they stand for: ceil(P / piece_tokens) of them,
                                   or NULL: the sequence takes no part in reuse */
    int64_t n_content_ids;
    int64_t max_cached_tokens; /**< bound of C. P for a receiver. P - 1 where the last token must be
                                  computed in any case. With context parallelism what all ranks
                                  found: open, compare, preempt and resume with the least */
} kvf_seq_desc_t;

/** Bytes that the caller copies, before it writes any page and before it calls the manager again:
 * the source page may not be there any more after that. Whole pages, or the tokens that it has. */
typedef struct kvf_seq_copy {
    uint32_t group_idx;
    int32_t from_slot;
    int32_t to_slot;
} kvf_seq_copy_t;

/** At most one copy a group. */
typedef struct kvf_seq_copies {
    uint32_t n;
    kvf_seq_copy_t list[KVF_MAX_GROUPS];
} kvf_seq_copies_t;

/**
 * Start a sequence with the longest prefix that the index knows in every group. Its length is then
 * C, the tokens whose bytes it has: a multiple of every group's tokens_per_block, or
 * max_cached_tokens if all of it is known.
 *
 * @param desc        Copied.
 * @param[out] seq_p  kvf_seq_close() it.
 * @return KVF_OK; KVF_ERR_CAPACITY_MISMATCH (the text names both numbers); KVF_ERR_INVALID;
 * KVF_ERR_NO_MEMORY.
 * @cost O(pieces + blocks of the prefix)
 */
KVF_CHECK kvf_status_t kvf_seq_open(kvf_seqs_t *seqs, const kvf_seq_desc_t *desc, kvf_seq_t **seq_p,
                                    kvf_detail_t *detail);

/** Let all pages go and end the sequence. NULL is allowed. @cost O(blocks) */
void kvf_seq_close(kvf_seq_t *seq);

/** Let all pages go; the length is 0. What was published can be found again. @cost O(blocks) */
void kvf_seq_preempt(kvf_seq_t *seq);

/**
 * Start again after kvf_seq_preempt(), or look again before anything was bound, as kvf_seq_open()
 * does.
 *
 * @param max_cached_tokens  As in kvf_seq_desc_t.
 * @return KVF_OK; KVF_ERR_INVALID (it has pages, or the number is out of range); KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_seq_resume(kvf_seq_t *seq, int64_t max_cached_tokens);

/** @return The tokens that it has, or will have when what was appended is written. */
int64_t kvf_seq_tokens(const kvf_seq_t *seq);

/** @return C of the last open or resume. */
int64_t kvf_seq_cached_tokens(const kvf_seq_t *seq);

/** @return Its table, which is valid until the next call that changes the sequence: for
 * kvf_send_open(), kvf_recv_open(), kvf_select(). Blocks beyond its end are unbound. */
kvf_table_t kvf_seq_table(const kvf_seq_t *seq, uint32_t group_idx);

/**
 * Bind everything at once: every block of the capacity that is not dead for P, and what lies behind
 * the length is the sequence's own. For receivers, and for prompts computed in one step. Appends
 * within the capacity cannot fail after it, unless pages came to be shared.
 *
 * @param[out] copies_p  To do now; written on success.
 * @return KVF_OK; KVF_ERR_AGAIN (too few pages now; nothing changed); KVF_ERR_TOO_LARGE;
 * KVF_ERR_NO_MEMORY.
 * @cost O(blocks), up to three calls of the store a group
 */
KVF_CHECK kvf_status_t kvf_seq_reserve(kvf_seq_t *seq, kvf_seq_copies_t *copies_p);

/**
 * Make the sequence longer: binds the blocks that are new, whatever the windows say (the tokens of
 * a chunk attend to one another), and the pages of these tokens are its own.
 *
 * @param n_tokens       >= 0; may lead beyond the capacity.
 * @param[out] copies_p  To do now; written on success.
 * @return As kvf_seq_reserve(), and KVF_ERR_INVALID.
 * @cost O(1 + new blocks)
 */
KVF_CHECK kvf_status_t kvf_seq_append(kvf_seq_t *seq, int64_t n_tokens, kvf_seq_copies_t *copies_p);

/**
 * Make it shorter: drop speculative tokens, or compute again from an earlier token. Blocks beyond
 * the new end are let go, but for those of the reserve.
 *
 * @param tokens  The new length; not below what was slid, dropped or found in the index.
 * @return KVF_OK, KVF_ERR_INVALID.
 * @cost O(1 + blocks let go)
 */
KVF_CHECK kvf_status_t kvf_seq_rewind(kvf_seq_t *seq, int64_t tokens);

/**
 * Let go what the windows have left behind; sinks stay. Never called is behind the logical rule,
 * and does no harm but to room. What is live for P is not stale at any shorter length, so a send
 * loses nothing.
 *
 * @param tokens  The history that is final: no rewind goes below it.
 * @return KVF_OK, KVF_ERR_INVALID (more than the length).
 * @cost O(groups + blocks let go)
 */
KVF_CHECK kvf_status_t kvf_seq_slide(kvf_seq_t *seq, int64_t tokens);

/**
 * Let go blocks ahead of the logical rule, or of any other rule. What is live is missing then: for
 * kvf_select() and pairing it is unbound, at no other ordinal.
 *
 * @param span  Ordinals of whole blocks below the length.
 * @return KVF_OK, KVF_ERR_INVALID.
 * @cost O(span)
 */
KVF_CHECK kvf_status_t kvf_seq_drop(kvf_seq_t *seq, uint32_t group_idx, kvf_span_t span);

/**
 * A second sequence with the same tokens, on the same pages. Reserved blocks behind the length stay
 * with the parent.
 *
 * @param[out] child_p  kvf_seq_close() it.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 * @cost O(blocks)
 */
KVF_CHECK kvf_status_t kvf_seq_fork(kvf_seq_t *seq, kvf_seq_t **child_p);

/**
 * Let later sequences find the first tokens: complete blocks, and the partial last one when tokens
 * = P. Their bytes are written, and final. No effect without content ids.
 *
 * @param tokens  0 .. min(P, length).
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_BUSY (a peer still writes one of the pages: publish
 * again after the released event).
 * @cost O(1 + blocks that were not published before)
 */
KVF_CHECK kvf_status_t kvf_seq_publish(kvf_seq_t *seq, int64_t tokens);

#endif
