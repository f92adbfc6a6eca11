/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/seq_impl.h"

#include "kvmgr/base/size.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

/* The least common multiple of two numbers, or more than any token count when it is more than that.
 */
static int64_t common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y != 0) {
        int64_t rest = x % y;
        x = y, y = rest;
    }
    int64_t product;
    if (__builtin_mul_overflow(a / x, b, &product) || product > KVF_MAX_TOKENS) {
        return KVF_MAX_TOKENS + 1;
    }
    return product;
}

kvf_status_t kvf_seqs_create(const kvf_alloc_t *alloc, const kvf_seqs_config_t *config,
                             kvf_seqs_t **seqs_p, kvf_detail_t *detail) {
    const kvf_layout_t *layout = config->layout;
    kvf_cp_t cp = config->cp.size == 0 ? (kvf_cp_t){1, config->cp.rank} : config->cp;
    if (cp.size < 1 || cp.size > INT32_MAX || cp.rank < 0 || cp.rank >= cp.size) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "context parallelism has size %" PRId64 " and rank %" PRId64
                        "; give 0 <= rank < size, size up to 2^31-1",
                        cp.size, cp.rank);
    }
    if (config->piece_tokens < 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "piece_tokens is %" PRId64 "; give 0 for no prefix reuse, or more",
                        config->piece_tokens);
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        if (config->n_pages[g] < 1 || config->n_pages[g] > INT32_MAX) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s has a pool of %" PRId64 " pages; give 1 to 2^31-1",
                            layout->groups[g].name, config->n_pages[g]);
        }
    }
    kvf_seqs_t *seqs =
        kvf_calloc(alloc, 1, sizeof(*seqs) + layout->n_groups * sizeof(seqs->groups[0]));
    if (seqs == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a sequence manager");
    }
    *seqs = (kvf_seqs_t){.alloc = *alloc,
                         .generation_side = config->generation_side,
                         .cp = cp,
                         .piece_tokens = config->piece_tokens,
                         .common_tokens = 1,
                         .n_groups = layout->n_groups};
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *from = &layout->groups[g];
        struct kvf_seq_group *group = &seqs->groups[g];
        *group = (struct kvf_seq_group){.tokens_per_block = from->tokens_per_block,
                                        .window = from->window,
                                        .sinks = from->sinks,
                                        .n_pages = config->n_pages[g]};
        memcpy(group->name, from->name, sizeof(group->name));
        seqs->common_tokens = common_multiple(seqs->common_tokens, group->tokens_per_block);
    }
    kvf_status_t status =
        kvf_prefix_create(alloc, &config->store, layout->n_groups, config->n_pages, &seqs->prefix);
    if (status != KVF_OK) {
        kvf_free(alloc, seqs);
        return kvf_fail(detail, status, "no memory for an index of all pages");
    }
    *seqs_p = seqs;
    return KVF_OK;
}

void kvf_seqs_destroy(kvf_seqs_t *seqs) {
    if (seqs == NULL) {
        return;
    }
    assert(seqs->n_seqs == 0);
    kvf_alloc_t alloc = seqs->alloc;
    (void)kvf_prefix_clear(seqs->prefix);
    kvf_prefix_destroy(seqs->prefix);
    kvf_free(&alloc, seqs);
}

int64_t kvf_seqs_forget(kvf_seqs_t *seqs) {
    return kvf_prefix_clear(seqs->prefix);
}

static int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Ordinals below an end that this rank holds. */
static int64_t owned_below(const kvf_seqs_t *seqs, int64_t end) {
    return end > seqs->cp.rank ? (end - 1 - seqs->cp.rank) / seqs->cp.size + 1 : 0;
}

/* The most blocks of this rank that so many consecutive tokens touch. */
static int64_t touched_by(const kvf_seqs_t *seqs, const struct kvf_seq_group *group,
                          int64_t tokens) {
    int64_t blocks = tokens == 0 ? 0 : 1 + kvf_div_ceil(tokens - 1, group->tokens_per_block);
    return kvf_div_ceil(blocks, seqs->cp.size);
}

static int64_t need_of(const kvf_seqs_t *seqs, uint32_t group_idx, const kvf_lengths_t *lengths,
                       int64_t capacity_tokens, int64_t chunk_tokens) {
    const struct kvf_seq_group *group = &seqs->groups[group_idx];
    int64_t prompt = kvf_prompt_tokens(lengths);
    int64_t all = owned_below(seqs, kvf_div_ceil(capacity_tokens, group->tokens_per_block));
    if (group->window == 0) {
        return all;
    }
    if (chunk_tokens > 0) {
        int64_t step = min_i64(max_i64(chunk_tokens, capacity_tokens - prompt), capacity_tokens);
        int64_t sinks = owned_below(seqs, kvf_div_ceil(group->sinks, group->tokens_per_block));
        return min_i64(all, sinks + touched_by(seqs, group, group->window - 1 + step));
    }
    kvf_span_t dead = kvf_seq_dead(seqs, group_idx, prompt);
    int64_t n_dead =
        dead.first < dead.end ? owned_below(seqs, dead.end) - owned_below(seqs, dead.first) : 0;
    /* A prefix that was found brings what is live for it, dead for P or not. */
    bool reuse = seqs->piece_tokens > 0 && !seqs->generation_side;
    int64_t found = reuse ? touched_by(seqs, group, group->window - 1) : 0;
    return all - n_dead + min_i64(n_dead, found);
}

kvf_status_t kvf_seqs_need(const kvf_seqs_t *seqs, const kvf_lengths_t *lengths,
                           int64_t chunk_tokens, int64_t *pages, kvf_detail_t *detail) {
    int64_t capacity, need[KVF_MAX_GROUPS];
    kvf_status_t status =
        kvf_get_kv_capacity_tokens(lengths, seqs->generation_side, &capacity, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (chunk_tokens < 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "chunk_tokens is %" PRId64 "; give 0 for no chunks, or more", chunk_tokens);
    }
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        need[g] = need_of(seqs, g, lengths, capacity, chunk_tokens);
        if (need[g] > seqs->groups[g].n_pages) {
            return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                            "the request needs %" PRId64 " pages of group %s, the pool has %" PRId64
                            "; send a shorter prompt or enlarge the pool",
                            need[g], seqs->groups[g].name, seqs->groups[g].n_pages);
        }
    }
    memcpy(pages, need, seqs->n_groups * sizeof(*pages));
    return KVF_OK;
}

static kvf_status_t check_desc(const kvf_seqs_t *seqs, const kvf_seq_desc_t *desc,
                               kvf_detail_t *detail) {
    bool generation = seqs->generation_side;
    kvf_status_t status =
        kvf_check_capacity(&desc->lengths, generation, generation ? "generation" : "context",
                           desc->allocated_tokens, detail);
    if (status != KVF_OK) {
        return status;
    }
    int64_t prompt = kvf_prompt_tokens(&desc->lengths);
    if (desc->max_cached_tokens < 0 || desc->max_cached_tokens > prompt) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "max_cached_tokens is %" PRId64 "; the prompt has %" PRId64 " tokens",
                        desc->max_cached_tokens, prompt);
    }
    if (desc->content_ids != NULL && seqs->piece_tokens > 0 &&
        desc->n_content_ids != kvf_div_ceil(prompt, seqs->piece_tokens)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%" PRId64 " content ids for a prompt of %" PRId64
                        " tokens; give one for each %" PRId64,
                        desc->n_content_ids, prompt, seqs->piece_tokens);
    }
    return KVF_OK;
}

/* A sequence without pages. */
static kvf_seq_t *make(kvf_seqs_t *seqs, bool with_content, int64_t prompt_tokens) {
    kvf_seq_t *seq =
        kvf_calloc(&seqs->alloc, 1, sizeof(*seq) + seqs->n_groups * sizeof(seq->tables[0]));
    if (seq == NULL) {
        return NULL;
    }
    seq->seqs = seqs;
    seq->prompt_tokens = prompt_tokens;
    if (with_content) {
        size_t n_pieces = (size_t)kvf_div_ceil(prompt_tokens, seqs->piece_tokens);
        seq->chain = kvf_realloc(&seqs->alloc, NULL, n_pieces, sizeof(*seq->chain));
        if (seq->chain == NULL) {
            kvf_free(&seqs->alloc, seq);
            return NULL;
        }
    }
    seqs->n_seqs++;
    return seq;
}

kvf_status_t kvf_seq_open(kvf_seqs_t *seqs, const kvf_seq_desc_t *desc, kvf_seq_t **seq_p,
                          kvf_detail_t *detail) {
    kvf_status_t status = check_desc(seqs, desc, detail);
    if (status != KVF_OK) {
        return status;
    }
    bool with_content = desc->content_ids != NULL && seqs->piece_tokens > 0;
    kvf_seq_t *seq = make(seqs, with_content, kvf_prompt_tokens(&desc->lengths));
    if (seq == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a sequence");
    }
    seq->capacity_tokens = desc->allocated_tokens;
    kvf_prefix_key_t key = {0, 0};
    for (int64_t i = 0; with_content && i < desc->n_content_ids; i++) {
        seq->chain[i] = key = kvf_prefix_chain(key, desc->content_ids[i]);
    }
    status = kvf_seq_match(seq, desc->max_cached_tokens);
    if (status != KVF_OK) {
        kvf_seq_close(seq);
        return kvf_fail(detail, status, "no memory for the tables of a sequence");
    }
    *seq_p = seq;
    return KVF_OK;
}

void kvf_seq_preempt(kvf_seq_t *seq) {
    for (uint32_t g = 0; g < seq->seqs->n_groups; g++) {
        struct kvf_seq_table *table = &seq->tables[g];
        kvf_seq_unbind(seq, g, 0, table->n_blocks);
        table->n_blocks = table->slid = table->published = 0;
    }
    seq->tokens = seq->settled_tokens = seq->cached_tokens = 0;
}

void kvf_seq_close(kvf_seq_t *seq) {
    if (seq == NULL) {
        return;
    }
    kvf_seqs_t *seqs = seq->seqs;
    kvf_seq_preempt(seq);
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        kvf_free(&seqs->alloc, seq->tables[g].slots);
    }
    kvf_free(&seqs->alloc, seq->chain);
    kvf_free(&seqs->alloc, seq);
    seqs->n_seqs--;
}

kvf_status_t kvf_seq_resume(kvf_seq_t *seq, int64_t max_cached_tokens) {
    if (max_cached_tokens < 0 || max_cached_tokens > seq->prompt_tokens) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t g = 0; g < seq->seqs->n_groups; g++) {
        if (seq->tables[g].n_blocks > 0) {
            return KVF_ERR_INVALID;
        }
    }
    return kvf_seq_match(seq, max_cached_tokens);
}

int64_t kvf_seq_tokens(const kvf_seq_t *seq) {
    return seq->tokens;
}

int64_t kvf_seq_cached_tokens(const kvf_seq_t *seq) {
    return seq->cached_tokens;
}

kvf_table_t kvf_seq_table(const kvf_seq_t *seq, uint32_t group_idx) {
    return (kvf_table_t){seq->tables[group_idx].slots, seq->tables[group_idx].n_blocks};
}

kvf_status_t kvf_seq_reserve(kvf_seq_t *seq, kvf_seq_copies_t *copies_p) {
    int64_t end = max_i64(seq->capacity_tokens, seq->tokens);
    return kvf_seq_bind(seq, end, true, copies_p);
}

kvf_status_t kvf_seq_append(kvf_seq_t *seq, int64_t n_tokens, kvf_seq_copies_t *copies_p) {
    if (n_tokens < 0 || n_tokens > KVF_MAX_TOKENS - seq->tokens) {
        return KVF_ERR_INVALID;
    }
    kvf_status_t status = kvf_seq_bind(seq, seq->tokens + n_tokens, false, copies_p);
    if (status == KVF_OK) {
        seq->tokens += n_tokens;
    }
    return status;
}

kvf_status_t kvf_seq_rewind(kvf_seq_t *seq, int64_t tokens) {
    if (tokens < seq->settled_tokens || tokens > seq->tokens) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t g = 0; g < seq->seqs->n_groups; g++) {
        struct kvf_seq_table *table = &seq->tables[g];
        int64_t t = seq->seqs->groups[g].tokens_per_block;
        int64_t keep = kvf_div_ceil(max_i64(tokens, seq->capacity_tokens), t);
        kvf_seq_unbind(seq, g, keep, table->n_blocks);
        table->n_blocks = min_i64(table->n_blocks, keep);
        table->published = min_i64(table->published, tokens / t);
    }
    seq->tokens = tokens;
    return KVF_OK;
}

kvf_status_t kvf_seq_slide(kvf_seq_t *seq, int64_t tokens) {
    if (tokens < 0 || tokens > seq->tokens) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t g = 0; g < seq->seqs->n_groups; g++) {
        struct kvf_seq_table *table = &seq->tables[g];
        kvf_span_t dead = kvf_seq_dead(seq->seqs, g, tokens);
        kvf_seq_unbind(seq, g, max_i64(dead.first, table->slid), dead.end);
        table->slid = max_i64(table->slid, dead.end);
    }
    seq->settled_tokens = max_i64(seq->settled_tokens, tokens);
    return KVF_OK;
}

kvf_status_t kvf_seq_drop(kvf_seq_t *seq, uint32_t group_idx, kvf_span_t span) {
    if (group_idx >= seq->seqs->n_groups || span.first < 0 || span.first > span.end) {
        return KVF_ERR_INVALID;
    }
    int64_t t = seq->seqs->groups[group_idx].tokens_per_block;
    if (span.end > seq->tokens / t) {
        return KVF_ERR_INVALID;
    }
    kvf_seq_unbind(seq, group_idx, span.first, span.end);
    seq->settled_tokens = max_i64(seq->settled_tokens, span.end * t);
    return KVF_OK;
}

kvf_status_t kvf_seq_fork(kvf_seq_t *seq, kvf_seq_t **child_p) {
    kvf_seqs_t *seqs = seq->seqs;
    kvf_seq_t *child = make(seqs, seq->chain != NULL, seq->prompt_tokens);
    if (child == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        int64_t n = kvf_div_ceil(seq->tokens, seqs->groups[g].tokens_per_block);
        if (kvf_seq_grow(seqs, &child->tables[g], n) != KVF_OK) {
            kvf_seq_close(child);
            return KVF_ERR_NO_MEMORY;
        }
    }
    child->capacity_tokens = seq->capacity_tokens;
    child->tokens = seq->tokens;
    child->settled_tokens = seq->settled_tokens;
    child->cached_tokens = seq->cached_tokens;
    if (seq->chain != NULL) {
        int64_t n_pieces = kvf_div_ceil(seq->prompt_tokens, seqs->piece_tokens);
        memcpy(child->chain, seq->chain, (size_t)n_pieces * sizeof(*seq->chain));
    }
    for (uint32_t g = 0; g < seqs->n_groups; g++) {
        const struct kvf_seq_table *from = &seq->tables[g];
        struct kvf_seq_table *to = &child->tables[g];
        to->n_blocks = kvf_div_ceil(seq->tokens, seqs->groups[g].tokens_per_block);
        to->slid = from->slid;
        to->published = from->published;
        if (to->n_blocks > 0) {
            memcpy(to->slots, from->slots, (size_t)to->n_blocks * sizeof(*to->slots));
        }
        kvf_prefix_hold(seqs->prefix, g, to->n_blocks, to->slots);
    }
    *child_p = child;
    return KVF_OK;
}
