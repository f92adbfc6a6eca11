/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_SEQ_MODEL_H
#define KVF_TESTS_SEQ_MODEL_H

/**
 * @file
 * A naive model of the sequence manager. It keeps every block of every sequence in plain arrays,
 * finds who shares a page by looking at all of them, and notes in every (slot, row) of its pools
 * which token of which content lies there.
 */

#include "tests/support/random.h"
#include "tests/support/seqs.h"

#define GROUPS 3
#define PAGES 40
#define MAX_T 8
#define SEQS 7
#define PIECE 6
#define PROMPT 40
#define LENGTH 72
#define TRANSFERS 12

/* What lies in a row: content and position in one number; 0 is nothing. */
typedef uint64_t tag_t;

struct page {
    tag_t rows[MAX_T];
    bool indexed;
    int64_t ordinal, filled; /* while indexed */
    tag_t published[MAX_T];
    int64_t last_use; /* the step in which the last sequence left it, or its eviction failed */
};

struct sequence {
    kvf_seq_t *seq;
    int64_t prompt, capacity, tokens, settled;
    bool has_ids, granted;
    int64_t ids[PROMPT / PIECE + 1];
    tag_t tags[LENGTH];
    int64_t n_blocks[GROUPS];
    int64_t offered[GROUPS]; /* whole blocks below were published, or another page had been */
    int32_t slots[GROUPS][LENGTH];
};

enum transfer_state { NONE, READING, WRITING, READ_DOUBT, WRITE_DOUBT };

struct transfer {
    enum transfer_state state;
    uint32_t g;
    int32_t slot;
    int64_t n_rows; /* that it counts on, or will write */
    tag_t rows[MAX_T];
};

struct tally {
    int64_t full_hits, inner_hits, hits, copies, swaps, taken_back, again, evictions, spared,
        busy_publish, forks, preempted, grants, late_writes, reads, drops, refused;
};

/** The model of one manager at a time. */
struct seq_model {
    test_random_t dice;
    test_seqs_t world;
    test_group_t groups[GROUPS];
    bool generation_side;
    kvf_cp_t cp;
    int64_t common; /* the least common multiple of the groups' tokens_per_block */
    struct page memory[GROUPS][PAGES];
    struct sequence seqs[SEQS];
    struct transfer transfers[TRANSFERS];
    const struct sequence *binding; /* the sequence whose pages are being bound */
    tag_t next_tag;
    int64_t step;
    struct tally tally;
};

extern struct seq_model m;

/** @return A number in [least, most]. */
int64_t model_roll(int64_t least, int64_t most);

/** @return Blocks of a group that so many tokens take. */
int64_t model_blocks(uint32_t g, int64_t tokens);

/** @return Whether this rank holds an ordinal. */
bool model_owns(int64_t ordinal);

/** @return Whether a query at a history of so many tokens can see any token that a block may hold.
 */
bool model_is_live(uint32_t g, int64_t ordinal, int64_t history);

/** @return How many entries of all tables a page is in. */
int model_holders(uint32_t g, int32_t slot);

/** @return Whether a page is under a transfer in one of two states. */
bool model_under(uint32_t g, int32_t slot, enum transfer_state a, enum transfer_state b);

/** @return Whether a transfer of the page ended without proof. */
bool model_in_doubt(uint32_t g, int32_t slot);

/** @return Whether a transfer has the page, in whatever state. */
bool model_in_transfer(uint32_t g, int32_t slot);

/** @return The tag of a token of a prompt: all ids up to its piece, and the position. */
tag_t model_prompt_tag(const int64_t *ids, int64_t position);

/** @return The page of the index that a block of the prompt is in, or -1. */
int32_t model_find(const struct sequence *s, uint32_t g, int64_t ordinal);

/** @return The longest prefix that holds, by trying all of them. */
int64_t model_prefix_of(const struct sequence *s, int64_t most);

/** A sequence has the pages that the model thinks, and its own tokens in every row of them. */
void model_check_tables(const struct sequence *s);

/** Every page has the label that follows from what the model knows, and the bytes that the index
 * and transfers count on. */
void model_check_pages(void);

/** Groups, pools and a manager by chance. */
void model_start(void);

#endif
