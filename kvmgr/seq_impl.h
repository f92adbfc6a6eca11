/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_SEQ_IMPL_H
#define KVF_KVMGR_SEQ_IMPL_H

/**
 * @file
 * The inside of kvmgr/seq.h, for its own files: seq.c (lives and lengths), seq_bind.c (which
 * pages), seq_reuse.c (what the prefix index knows).
 */

#include "kvmgr/prefix.h"
#include "kvmgr/seq.h"

/** What a manager needs to know of a layer group. */
struct kvf_seq_group {
    char name[KVF_GROUP_NAME_BYTES];
    int64_t tokens_per_block;
    int64_t window;
    int64_t sinks;
    int64_t n_pages;
};

struct kvf_seqs {
    kvf_alloc_t alloc;
    kvf_prefix_t *prefix;
    bool generation_side;
    kvf_cp_t cp; /* size >= 1 */
    int64_t piece_tokens;
    int64_t
        common_tokens; /* the least multiple of all tokens_per_block; more than 2^40: no other */
    int64_t n_seqs;
    uint32_t n_groups;
    struct kvf_seq_group groups[];
};

/** One layer group's blocks of a sequence. */
struct kvf_seq_table {
    int32_t *slots;
    int64_t room;
    int64_t n_blocks;  /* ordinals from here on were never bound, or let go again */
    int64_t slid;      /* stale ordinals below were let go */
    int64_t published; /* complete blocks below were offered to the index */
};

struct kvf_seq {
    kvf_seqs_t *seqs;
    int64_t prompt_tokens;
    int64_t capacity_tokens;
    int64_t tokens;
    int64_t settled_tokens; /* no rewind goes below */
    int64_t cached_tokens;
    kvf_prefix_key_t *chain; /* one for each piece of the prompt; NULL: no reuse */
    struct kvf_seq_table tables[];
};

/** @return Whether this rank holds an ordinal. */
static inline bool kvf_seq_owns(const kvf_seqs_t *seqs, int64_t ordinal) {
    return seqs->cp.size == 1 || ordinal % seqs->cp.size == seqs->cp.rank;
}

/** @return What is dead of a group at a history of tokens >= 0. */
kvf_span_t kvf_seq_dead(const kvf_seqs_t *seqs, uint32_t group_idx, int64_t tokens);

/** Make room for n_blocks entries of a table. @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_seq_grow(const kvf_seqs_t *seqs, struct kvf_seq_table *table,
                                    int64_t n_blocks);

/** Let the pages of ordinals [first, end) go; the entries become unbound. Empty when end <= first.
 */
void kvf_seq_unbind(kvf_seq_t *seq, uint32_t group_idx, int64_t first, int64_t end);

/**
 * Bind what the tokens [0, end_tokens) lack, and make the pages behind the length the sequence's
 * own: all groups, or nothing.
 *
 * @param skip_dead  Of the prompt: leave them unbound.
 * @return As kvf_seq_reserve().
 */
KVF_CHECK kvf_status_t kvf_seq_bind(kvf_seq_t *seq, int64_t end_tokens, bool skip_dead,
                                    kvf_seq_copies_t *copies_p);

/** Give an empty sequence what the index knows of its first max_tokens tokens, and that length.
 *  @return KVF_OK, KVF_ERR_NO_MEMORY (it stays empty). */
KVF_CHECK kvf_status_t kvf_seq_match(kvf_seq_t *seq, int64_t max_tokens);

#endif
