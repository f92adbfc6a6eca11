/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/table.h"

#include "kvmgr/base/size.h"

#include <inttypes.h>

/* Two sizes up to this have a common multiple that leaves room to add an ordinal to it. */
#define MAX_CP_SIZE INT32_MAX

static kvf_status_t check_cp(const char *side, kvf_cp_t *cp, kvf_detail_t *detail) {
    if (cp->size == 0) {
        cp->size = 1;
    }
    if (cp->size < 1 || cp->size > MAX_CP_SIZE || cp->rank < 0 || cp->rank >= cp->size) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s context parallelism has size %" PRId64 " and rank %" PRId64
                        "; give 0 <= rank < size, size up to 2^31-1",
                        side, cp->size, cp->rank);
    }
    return KVF_OK;
}

/* The inverse of a modulo m by Euclid's algorithm; a and m have no common factor. */
static int64_t inverse(int64_t a, int64_t m) {
    int64_t r0 = m, r1 = a % m, x0 = 0, x1 = 1;
    while (r1 != 0) {
        int64_t q = r0 / r1, r2 = r0 - q * r1, x2 = x0 - q * x1;
        r0 = r1, r1 = r2, x0 = x1, x1 = x2;
    }
    return x0 < 0 ? x0 + m : x0;
}

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* The ordinals that two ranks share are again one residue class (Chinese remainder theorem), or
 * none. */
static kvf_cp_t shared_by(kvf_cp_t a, kvf_cp_t b) {
    int64_t g = common_divisor(a.size, b.size);
    if ((b.rank - a.rank) % g != 0) {
        return (kvf_cp_t){0, 0};
    }
    int64_t m = b.size / g;
    int64_t steps = (b.rank - a.rank) / g % m * inverse(a.size / g, m) % m;
    return (kvf_cp_t){a.size * m, a.rank + a.size * (steps < 0 ? steps + m : steps)};
}

kvf_status_t kvf_wanted_init(const kvf_lengths_t *lengths, int64_t tokens_per_block, int64_t window,
                             int64_t sinks, int64_t cached_tokens, kvf_cp_t context,
                             kvf_cp_t generation, kvf_wanted_t *wanted_p, kvf_detail_t *detail) {
    kvf_block_counts_t counts;
    kvf_status_t status = kvf_get_block_counts(lengths, false, tokens_per_block, &counts, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (window < 0 || window > KVF_MAX_TOKENS || sinks < 0 || sinks > KVF_MAX_TOKENS) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "window is %" PRId64 " and sinks is %" PRId64 "; give numbers up to 2^40",
                        window, sinks);
    }
    int64_t prompt_tokens = kvf_prompt_tokens(lengths);
    if (cached_tokens < 0 || cached_tokens > prompt_tokens) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "cached_tokens is %" PRId64 "; the prompt has %" PRId64 " tokens",
                        cached_tokens, prompt_tokens);
    }
    if ((status = check_cp("context", &context, detail)) != KVF_OK ||
        (status = check_cp("generation", &generation, detail)) != KVF_OK) {
        return status;
    }
    *wanted_p = (kvf_wanted_t){
        .prompt_blocks = counts.prompt_blocks,
        .stale = kvf_stale_span(prompt_tokens, tokens_per_block, window, sinks),
        .from = cached_tokens == prompt_tokens ? counts.prompt_blocks
                                               : cached_tokens / tokens_per_block,
        .context = context,
        .generation = generation,
        .shared = shared_by(context, generation),
    };
    return KVF_OK;
}

kvf_wanted_t kvf_wanted_live(const kvf_wanted_t *wanted, bool is_source) {
    kvf_cp_t share = is_source ? wanted->context : wanted->generation;
    kvf_wanted_t live = *wanted;
    live.from = 0;
    live.shared = share;
    return live;
}

/* kvf_wanted_next(wanted, ordinal + 1) for a wanted ordinal, without a division; may pass the
 * prompt's end. */
static inline int64_t step(const kvf_wanted_t *wanted, int64_t ordinal) {
    int64_t next = ordinal + wanted->shared.size;
    return kvf_span_has(wanted->stale, next) ? kvf_wanted_next(wanted, wanted->stale.end) : next;
}

/* Shared ordinals in [first, end). */
static int64_t count_shared(const kvf_wanted_t *wanted, int64_t first, int64_t end) {
    if (first >= end || wanted->shared.size == 0) {
        return 0;
    }
    first = kvf_wanted_align(wanted, first);
    return first < end ? (end - 1 - first) / wanted->shared.size + 1 : 0;
}

int64_t kvf_wanted_count(const kvf_wanted_t *wanted) {
    kvf_span_t stale = wanted->stale;
    if (stale.first >= stale.end) {
        return count_shared(wanted, wanted->from, wanted->prompt_blocks);
    }
    int64_t rest = wanted->from > stale.end ? wanted->from : stale.end;
    return count_shared(wanted, wanted->from, stale.first) +
           count_shared(wanted, rest, wanted->prompt_blocks);
}

static inline int32_t slot_at(const kvf_table_t *table, int64_t ordinal) {
    return ordinal < table->n_blocks ? table->slots[ordinal] : -1;
}

/* Where the ordinals end that are both in the table and in the prompt. */
static int64_t table_end(const kvf_table_t *table, const kvf_wanted_t *wanted) {
    return table->n_blocks < wanted->prompt_blocks ? table->n_blocks : wanted->prompt_blocks;
}

static kvf_status_t fail_twice(const kvf_table_t *table, const kvf_wanted_t *live, int64_t second,
                               const char *side, const char *group, kvf_detail_t *detail) {
    int64_t first = kvf_wanted_next(live, 0);
    while (table->slots[first] != table->slots[second]) {
        first = step(live, first);
    }
    return kvf_fail(detail, KVF_ERR_INVALID,
                    "group %s, %s side: slot %" PRId32 " is bound to two live ordinals, %" PRId64
                    " and %" PRId64 "; one page holds one block",
                    group, side, table->slots[second], first, second);
}

/* A set of slots, in zeroed memory: a bit for each slot where that takes no more than hashing does,
 * as when the pool is not much larger than the prompt; one bit per page stays in the cache. */
typedef struct slot_set {
    bool dense;
    unsigned hash_bits; /* hashed: log2 of the entries, of which at most half become full */
    uint64_t *bits;
    uint32_t *entries; /* slot + 1; 0 is empty */
} slot_set_t;

/* @return Whether the slot was there before. */
static inline bool put(const slot_set_t *set, int32_t slot) {
    uint32_t key = (uint32_t)slot + 1;
    if (set->dense) {
        uint64_t *word = &set->bits[slot / 64], bit = UINT64_C(1) << (slot % 64);
        bool had = (*word & bit) != 0;
        *word |= bit;
        return had;
    }
    /* The high bits of the product spread runs of neighbours evenly. */
    size_t mask = ((size_t)1 << set->hash_bits) - 1;
    size_t at = (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - set->hash_bits));
    while (set->entries[at] != 0 && set->entries[at] != key) {
        at = (at + 1) & mask;
    }
    bool had = set->entries[at] == key;
    set->entries[at] = key;
    return had;
}

kvf_status_t kvf_table_check(const kvf_table_t *table, const kvf_wanted_t *live, const char *side,
                             const char *group, const kvf_alloc_t *alloc, kvf_detail_t *detail) {
    int32_t max = 0;
    for (int64_t i = 0; i < table->n_blocks; i++) {
        if (table->slots[i] < -1) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s, %s side: ordinal %" PRId64 " has slot %" PRId32
                            "; give a slot, or -1 where none is bound",
                            group, side, i, table->slots[i]);
        }
        max = table->slots[i] > max ? table->slots[i] : max;
    }
    int64_t end = table_end(table, live), n = kvf_wanted_count(live);
    n = n < end ? n : end;
    if (n == 0) {
        return KVF_OK;
    }

    slot_set_t set = {.dense = max / 64 < n, .hash_bits = 1};
    while ((INT64_C(1) << set.hash_bits) < 2 * n) {
        set.hash_bits++;
    }
    void *memory = set.dense ? kvf_calloc(alloc, (size_t)max / 64 + 1, sizeof(*set.bits))
                             : kvf_calloc(alloc, (size_t)1 << set.hash_bits, sizeof(*set.entries));
    if (memory == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "group %s, %s side: no memory to check a table of %" PRId64 " blocks",
                        group, side, table->n_blocks);
    }
    set.bits = memory;
    set.entries = memory;
    kvf_status_t status = KVF_OK;
    for (int64_t i = kvf_wanted_next(live, 0); i < end; i = step(live, i)) {
        int32_t slot = table->slots[i];
        if (slot >= 0 && put(&set, slot)) {
            status = fail_twice(table, live, i, side, group, detail);
            break;
        }
    }
    kvf_free(alloc, memory);
    return status;
}

int64_t kvf_select(const kvf_table_t *table, const kvf_wanted_t *live, bool is_source,
                   kvf_pair_t *pairs) {
    int64_t n = 0;
    int64_t end = table_end(table, live);
    for (int64_t i = kvf_wanted_next(live, 0); i < end; i = step(live, i)) {
        int32_t slot = table->slots[i];
        if (slot >= 0) {
            pairs[n++] = is_source ? (kvf_pair_t){i, slot, -1} : (kvf_pair_t){i, -1, slot};
        }
    }
    return n;
}

/* Put an ordinal into a list that may be absent, and count it. */
static inline void note(int64_t *list, int64_t *n, int64_t ordinal) {
    if (list != NULL) {
        list[*n] = ordinal;
    }
    (*n)++;
}

kvf_pairing_t kvf_pair_tables(const kvf_table_t *source, const kvf_table_t *destination,
                              const kvf_wanted_t *wanted, kvf_pair_t *pairs,
                              int64_t *missing_source, int64_t *missing_destination) {
    kvf_pairing_t found = {0, 0, 0};
    kvf_wanted_t live = kvf_wanted_live(wanted, false);
    for (int64_t i = kvf_wanted_next(&live, 0); i < wanted->from; i = step(&live, i)) {
        if (slot_at(destination, i) < 0) {
            note(missing_destination, &found.n_missing_destination, i);
        }
    }
    for (int64_t i = kvf_wanted_next(wanted, 0); i < wanted->prompt_blocks; i = step(wanted, i)) {
        int32_t from = slot_at(source, i);
        int32_t to = slot_at(destination, i);
        if (from >= 0 && to >= 0) {
            if (pairs != NULL) {
                pairs[found.n_pairs] = (kvf_pair_t){i, from, to};
            }
            found.n_pairs++;
            continue;
        }
        if (from < 0) {
            note(missing_source, &found.n_missing_source, i);
        }
        if (to < 0) {
            note(missing_destination, &found.n_missing_destination, i);
        }
    }
    return found;
}
