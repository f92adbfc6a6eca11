/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/seq_impl.h"

#include "kvmgr/base/size.h"

#define UNBOUND (-1)
#define BATCH 512

/* The key of a block of the prompt, complete or the last. */
static kvf_prefix_key_t key_of(const kvf_seq_t *seq, uint32_t group_idx, int64_t ordinal) {
    int64_t t = seq->seqs->groups[group_idx].tokens_per_block;
    int64_t first = ordinal * t, left = seq->prompt_tokens - first;
    int64_t filled = left < t ? left : t;
    return kvf_prefix_block(seq->chain[(first + filled - 1) / seq->seqs->piece_tokens], group_idx,
                            t, ordinal, filled);
}

/* How far the look-up of a group has come. */
struct run {
    int64_t n_blocks; /* looked up */
    int64_t known;    /* the last so many of them were found */
};

/* Look up a group's blocks below an end. Sets *hopeless_p when a block that every longer prefix
 * needs is not known. */
static kvf_status_t look_up(kvf_seq_t *seq, uint32_t group_idx, int64_t end, struct run *run,
                            bool *hopeless_p) {
    const kvf_seqs_t *seqs = seq->seqs;
    const struct kvf_seq_group *group = &seqs->groups[group_idx];
    struct kvf_seq_table *table = &seq->tables[group_idx];
    kvf_status_t status = kvf_seq_grow(seqs, table, end);
    if (status != KVF_OK) {
        return status;
    }
    int64_t front = kvf_div_ceil(group->sinks, group->tokens_per_block);
    for (; run->n_blocks < end; run->n_blocks++) {
        int64_t i = run->n_blocks;
        bool own = kvf_seq_owns(seqs, i);
        table->slots[i] =
            own ? kvf_prefix_find(seqs->prefix, group_idx, key_of(seq, group_idx, i)) : UNBOUND;
        bool known = !own || table->slots[i] != UNBOUND;
        run->known = known ? run->known + 1 : 0;
        *hopeless_p = *hopeless_p || (!known && (group->window == 0 || i < front));
    }
    return KVF_OK;
}

/* The blocks that a prefix needs in a group: those below its end that are not dead. */
static kvf_span_t dead_for(const kvf_seq_t *seq, uint32_t group_idx, int64_t prefix_tokens) {
    return kvf_seq_dead(seq->seqs, group_idx,
                        seq->seqs->generation_side ? seq->prompt_tokens : prefix_tokens);
}

/* Look a prefix up in all groups. *holds_p: whether all of it is there. */
static kvf_status_t try_prefix(kvf_seq_t *seq, int64_t tokens, struct run *runs, bool *holds_p,
                               bool *hopeless_p) {
    bool holds = true;
    for (uint32_t g = 0; g < seq->seqs->n_groups; g++) {
        int64_t end = kvf_div_ceil(tokens, seq->seqs->groups[g].tokens_per_block);
        kvf_status_t status = look_up(seq, g, end, &runs[g], hopeless_p);
        if (status != KVF_OK) {
            return status;
        }
        if (*hopeless_p) {
            holds = false;
            break;
        }
        /* What lies in front of the dead ones is known, or it were hopeless. */
        kvf_span_t dead = dead_for(seq, g, tokens);
        holds = holds && runs[g].known >= end - (dead.first < dead.end ? dead.end : 0);
    }
    *holds_p = holds;
    return KVF_OK;
}

static kvf_status_t longest_prefix(kvf_seq_t *seq, int64_t max_tokens, int64_t *tokens_p) {
    struct run runs[KVF_MAX_GROUPS] = {{0, 0}};
    int64_t best = 0, step = seq->seqs->common_tokens;
    bool hopeless = false;
    for (int64_t tokens = 0; tokens < max_tokens && !hopeless;) {
        bool holds;
        tokens = max_tokens - tokens > step ? tokens + step : max_tokens;
        kvf_status_t status = try_prefix(seq, tokens, runs, &holds, &hopeless);
        if (status != KVF_OK) {
            return status;
        }
        best = holds ? tokens : best;
    }
    *tokens_p = best;
    return KVF_OK;
}

kvf_status_t kvf_seq_match(kvf_seq_t *seq, int64_t max_tokens) {
    const kvf_seqs_t *seqs = seq->seqs;
    int64_t tokens = 0, n_found = 0;
    kvf_status_t status = seq->chain == NULL ? KVF_OK : longest_prefix(seq, max_tokens, &tokens);
    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        struct kvf_seq_table *table = &seq->tables[g];
        kvf_span_t dead = dead_for(seq, g, tokens);
        table->n_blocks = kvf_div_ceil(tokens, seqs->groups[g].tokens_per_block);
        for (int64_t i = dead.first; i < dead.end && i < table->n_blocks; i++) {
            table->slots[i] = UNBOUND;
        }
        for (int64_t i = 0; i < table->n_blocks; i++) {
            n_found += table->slots[i] != UNBOUND;
        }
        kvf_prefix_hold(seqs->prefix, g, table->n_blocks, table->slots);
    }
    /* When windows need nothing of a prefix, any length would hold: no page is no hit. */
    for (uint32_t g = 0; n_found == 0 && g < seqs->n_groups; g++) {
        seq->tables[g].n_blocks = 0;
    }
    seq->tokens = seq->settled_tokens = seq->cached_tokens = n_found == 0 ? 0 : tokens;
    return KVF_OK;
}

static kvf_status_t publish_group(kvf_seq_t *seq, uint32_t group_idx, int64_t tokens) {
    const kvf_seqs_t *seqs = seq->seqs;
    struct kvf_seq_table *table = &seq->tables[group_idx];
    int64_t t = seqs->groups[group_idx].tokens_per_block;
    int64_t complete = tokens / t;
    int64_t end = tokens == seq->prompt_tokens ? kvf_div_ceil(tokens, t) : complete;
    for (int64_t first = table->published; first < end; first += BATCH) {
        kvf_prefix_key_t keys[BATCH];
        int64_t n = end - first < BATCH ? end - first : BATCH;
        for (int64_t i = 0; i < n; i++) {
            keys[i] = key_of(seq, group_idx, first + i);
        }
        kvf_status_t status =
            kvf_prefix_publish(seqs->prefix, group_idx, n, keys, table->slots + first);
        if (status != KVF_OK) {
            return status;
        }
    }
    if (table->published < complete) {
        table->published = complete;
    }
    return KVF_OK;
}

kvf_status_t kvf_seq_publish(kvf_seq_t *seq, int64_t tokens) {
    if (tokens < 0 || tokens > seq->tokens || tokens > seq->prompt_tokens) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t g = 0; seq->chain != NULL && g < seq->seqs->n_groups; g++) {
        kvf_status_t status = publish_group(seq, g, tokens);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}
