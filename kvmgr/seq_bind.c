/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/seq_impl.h"

#include "kvmgr/base/size.h"

#include <string.h>

#define UNBOUND (-1)

kvf_span_t kvf_seq_dead(const kvf_seqs_t *seqs, uint32_t group_idx, int64_t tokens) {
    const struct kvf_seq_group *group = &seqs->groups[group_idx];
    return kvf_stale_span(tokens, group->tokens_per_block, group->window, group->sinks);
}

kvf_status_t kvf_seq_grow(const kvf_seqs_t *seqs, struct kvf_seq_table *table, int64_t n_blocks) {
    if (n_blocks <= table->room) {
        return KVF_OK;
    }
    int64_t room = n_blocks > 2 * table->room ? n_blocks : 2 * table->room;
    int32_t *slots = kvf_realloc(&seqs->alloc, table->slots, (size_t)room, sizeof(*slots));
    if (slots == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    table->slots = slots;
    table->room = room;
    return KVF_OK;
}

void kvf_seq_unbind(kvf_seq_t *seq, uint32_t group_idx, int64_t first, int64_t end) {
    if (first < end) {
        int32_t *slots = seq->tables[group_idx].slots + first;
        kvf_prefix_release(seq->seqs->prefix, group_idx, end - first, slots);
        memset(slots, 0xff, (size_t)(end - first) * sizeof(*slots)); /* UNBOUND */
    }
}

/* What one group of a sequence gets. */
struct binding {
    int64_t end;        /* blocks of the table after it */
    int64_t write;      /* blocks from here on must be the sequence's own */
    int64_t n_new;      /* pages for ordinals from n_blocks on */
    int64_t n_swapped;  /* pages in place of shared ones */
    kvf_span_t skipped; /* ordinals that stay unbound */
};

static bool is_wanted(const kvf_seqs_t *seqs, const struct binding *binding, int64_t ordinal) {
    return kvf_seq_owns(seqs, ordinal) && !kvf_span_has(binding->skipped, ordinal);
}

static bool is_swapped(const kvf_seq_t *seq, uint32_t group_idx, int64_t ordinal) {
    int32_t slot = seq->tables[group_idx].slots[ordinal];
    return slot != UNBOUND && kvf_prefix_is_shared(seq->seqs->prefix, group_idx, slot);
}

static struct binding plan(const kvf_seq_t *seq, uint32_t group_idx, int64_t end_tokens,
                           bool skip_dead) {
    const kvf_seqs_t *seqs = seq->seqs;
    const struct kvf_seq_table *table = &seq->tables[group_idx];
    int64_t t = seqs->groups[group_idx].tokens_per_block;
    struct binding binding = {.end = kvf_div_ceil(end_tokens, t), .write = seq->tokens / t};
    if (skip_dead) {
        binding.skipped = kvf_seq_dead(seqs, group_idx, seq->prompt_tokens);
    }
    if (end_tokens <= seq->tokens) {
        binding.write = binding.end; /* nothing will be written */
    }
    for (int64_t i = table->n_blocks; i < binding.end; i++) {
        binding.n_new += is_wanted(seqs, &binding, i);
    }
    for (int64_t i = binding.write; i < binding.end && i < table->n_blocks; i++) {
        binding.n_swapped += is_swapped(seq, group_idx, i);
    }
    return binding;
}

/* A pool that just suffices for its sequences has no page for a copy of one that only the index
 * shares: it leaves the index then, and is written in place. */
static bool take_back(kvf_seq_t *seq, uint32_t group_idx, struct binding *binding) {
    const struct kvf_seq_table *table = &seq->tables[group_idx];
    int64_t before = binding->n_swapped;
    for (int64_t i = binding->write; i < binding->end && i < table->n_blocks; i++) {
        if (is_swapped(seq, group_idx, i)) {
            binding->n_swapped -=
                kvf_prefix_take_back(seq->seqs->prefix, group_idx, table->slots[i]);
        }
    }
    return binding->n_swapped < before;
}

/* Pages that were taken lie behind the table until commit(). */
static int32_t *taken_of(const struct kvf_seq_table *table) {
    return table->slots == NULL ? NULL : table->slots + table->n_blocks;
}

/* Take the pages of a group. */
static kvf_status_t acquire(kvf_seq_t *seq, uint32_t group_idx, struct binding *binding) {
    const kvf_seqs_t *seqs = seq->seqs;
    struct kvf_seq_table *table = &seq->tables[group_idx];
    int64_t end = binding->end > table->n_blocks ? binding->end : table->n_blocks;
    kvf_status_t status = kvf_seq_grow(seqs, table, end + binding->n_swapped);
    if (status != KVF_OK) {
        return status;
    }
    do {
        int64_t n = binding->n_new + binding->n_swapped;
        status = n == 0 ? KVF_OK : kvf_prefix_acquire(seqs->prefix, group_idx, n, taken_of(table));
    } while (status != KVF_OK && take_back(seq, group_idx, binding));
    /* kvf_seq_bind() has seen that the pool can hold the new pages. Together with copies they are
     * too many only while others share what is copied. */
    return status == KVF_ERR_TOO_LARGE ? KVF_ERR_AGAIN : status;
}

/* Put the pages that were taken to their ordinals, and note which bytes go with them. */
static void commit(kvf_seq_t *seq, uint32_t group_idx, const struct binding *binding,
                   kvf_seq_copies_t *copies) {
    const kvf_seqs_t *seqs = seq->seqs;
    struct kvf_seq_table *table = &seq->tables[group_idx];
    int64_t t = seqs->groups[group_idx].tokens_per_block;
    int32_t *taken = taken_of(table);
    for (int64_t i = binding->write, left = binding->n_swapped; left > 0; i++) {
        if (!is_swapped(seq, group_idx, i)) {
            continue;
        }
        int32_t old = table->slots[i];
        table->slots[i] = taken[binding->n_new + --left];
        if (i * t < seq->tokens) {
            copies->list[copies->n++] = (kvf_seq_copy_t){group_idx, old, table->slots[i]};
        }
        kvf_prefix_release(seqs->prefix, group_idx, 1, &old);
    }
    /* From the end: the pages lie at the front of the range that they are spread over. */
    for (int64_t i = binding->end - 1, left = binding->n_new; i >= table->n_blocks; i--) {
        table->slots[i] = is_wanted(seqs, binding, i) ? taken[--left] : UNBOUND;
    }
    if (binding->end > table->n_blocks) {
        table->n_blocks = binding->end;
    }
}

kvf_status_t kvf_seq_bind(kvf_seq_t *seq, int64_t end_tokens, bool skip_dead,
                          kvf_seq_copies_t *copies_p) {
    const kvf_seqs_t *seqs = seq->seqs;
    struct binding bindings[KVF_MAX_GROUPS];
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        bindings[g] = plan(seq, g, end_tokens, skip_dead);
        if (bindings[g].n_new > seqs->groups[g].n_pages) {
            return KVF_ERR_TOO_LARGE;
        }
    }
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        kvf_status_t status = acquire(seq, g, &bindings[g]);
        if (status != KVF_OK) {
            while (g-- > 0) {
                kvf_prefix_release(seqs->prefix, g, bindings[g].n_new + bindings[g].n_swapped,
                                   taken_of(&seq->tables[g]));
            }
            return status;
        }
    }
    kvf_seq_copies_t copies = {.n = 0};
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        commit(seq, g, &bindings[g], &copies);
    }
    *copies_p = copies;
    return KVF_OK;
}
