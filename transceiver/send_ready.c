/* SPDX-License-Identifier: Apache-2.0 */
/* The source's tables as they become known, and how far each layer is ready. */
#include "transceiver/send_impl.h"

#include <inttypes.h>

/* As many unbound blocks are named; the others are counted. */
#define MAX_NAMED 16

/* ---- tables ---- */

static int32_t slot_of(int32_t *const *slots, uint32_t group_idx, int64_t ordinal) {
    return slots == NULL || slots[group_idx] == NULL ? -1 : slots[group_idx][ordinal];
}

/* Behind the block `o` comes another, whose page is needed soon. */
static void prefetch(const kvf_send_op_t *send, int32_t *const *slots, uint32_t g, int64_t o) {
    if (o + KVF_PREFETCH_BLOCKS < send->live[g].prompt_blocks) {
        kvf_pages_prefetch(send->op.core->config.regions[g].pages,
                           slot_of(slots, g, o + KVF_PREFETCH_BLOCKS));
    }
}

void kvf_send_for_pages(kvf_send_op_t *send, void (*fn)(kvf_pages_t *pages, int32_t slot)) {
    kvf_core_t *core = send->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        for (int64_t o = kvf_wanted_next(live, 0); o < live->prompt_blocks;
             o = kvf_wanted_next(live, o + 1)) {
            prefetch(send, send->slots, g, o);
            if (slot_of(send->slots, g, o) >= 0) {
                fn(core->config.regions[g].pages, send->slots[g][o]);
            }
        }
    }
}

/* End the reads of the pages in `slots` that `kept` does not have at the same place, in front of
 * the live ordinal `end` of the last of n_groups. */
static void end_reads(kvf_send_op_t *send, int32_t *const *slots, int32_t *const *kept,
                      uint32_t n_groups, int64_t end) {
    kvf_core_t *core = send->op.core;
    for (uint32_t g = 0; g < n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        int64_t stop = g + 1 == n_groups ? end : live->prompt_blocks;
        for (int64_t o = kvf_wanted_next(live, 0); o < stop; o = kvf_wanted_next(live, o + 1)) {
            int32_t slot = slot_of(slots, g, o);
            if (slot >= 0 && slot != slot_of(kept, g, o)) {
                kvf_pages_read_end(core->config.regions[g].pages, slot);
            }
        }
    }
}

static void free_tables(kvf_send_op_t *send, int32_t *slots[KVF_MAX_GROUPS]) {
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        kvf_free(send->op.core->alloc, slots[g]);
    }
}

/* What the send's tables become: blocks that are ready keep their pages, others follow `tables`. */
static kvf_status_t merge(kvf_send_op_t *send, const kvf_table_t *tables,
                          int32_t *next[KVF_MAX_GROUPS], kvf_detail_t *detail) {
    kvf_core_t *core = send->op.core;
    int64_t prompt = kvf_prompt_tokens(&send->lengths);
    int64_t least[KVF_MAX_GROUPS], most[KVF_MAX_GROUPS] = {0}; /* blocks, over the layers */
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        least[g] = send->live[g].prompt_blocks;
    }
    for (uint32_t i = 0; i < core->n_layers; i++) {
        uint32_t g = core->layers[i].group_idx;
        int64_t n =
            kvf_plan_whole_blocks(send->ready[i], prompt, core->layout.groups[g].tokens_per_block);
        least[g] = n < least[g] ? n : least[g];
        most[g] = n > most[g] ? n : most[g];
    }
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        size_t n = (size_t)live->prompt_blocks;
        next[g] = kvf_realloc(core->alloc, NULL, n, sizeof(*next[g]));
        if (next[g] == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the tables");
        }
        memset(next[g], 0xff, n * sizeof(*next[g])); /* -1 */
        for (int64_t o = kvf_wanted_next(live, 0); o < live->prompt_blocks;
             o = kvf_wanted_next(live, o + 1)) {
            int32_t now = slot_of(send->slots, g, o);
            int32_t slot = o < tables[g].n_blocks ? tables[g].slots[o] : -1;
            if (o >= least[g] && o < most[g] && slot != now) {
                /* The other layers' bytes would be looked for in the wrong page. */
                return kvf_fail(detail, KVF_ERR_INVALID,
                                "group %s, ordinal %" PRId64 ": slot %" PRId32
                                " instead of %" PRId32
                                ", when it is ready in a part of its layers; cancel the send",
                                core->layout.groups[g].name, o, slot, now);
            }
            next[g][o] = o < most[g] ? now : slot;
        }
    }
    return KVF_OK;
}

/* Make merged tables the send's own: pages that are new in them get their reads, or none does; the
 * reads of those that are gone end. */
static kvf_status_t take(kvf_send_op_t *send, int32_t *next[KVF_MAX_GROUPS], kvf_detail_t *detail) {
    kvf_core_t *core = send->op.core;
    uint32_t n_groups = core->layout.n_groups;
    for (uint32_t g = 0; g < n_groups; g++) {
        const kvf_wanted_t *live = &send->live[g];
        for (int64_t o = kvf_wanted_next(live, 0); o < live->prompt_blocks;
             o = kvf_wanted_next(live, o + 1)) {
            int32_t slot = next[g][o];
            prefetch(send, next, g, o);
            kvf_status_t status = slot < 0 || slot == slot_of(send->slots, g, o)
                                      ? KVF_OK
                                      : kvf_pages_read_begin(core->config.regions[g].pages, slot);
            if (status != KVF_OK) {
                end_reads(send, next, send->slots, g + 1, o);
                return kvf_fail(detail, status,
                                "group %s, ordinal %" PRId64 ": slot %" PRId32 ": %s",
                                core->layout.groups[g].name, o, slot,
                                status == KVF_ERR_RANGE     ? "outside the pool"
                                : status == KVF_ERR_INVALID ? "not held; acquire it first"
                                                            : "being written for another transfer");
            }
        }
    }
    end_reads(send, send->slots, next, n_groups, send->live[n_groups - 1].prompt_blocks);
    for (uint32_t g = 0; g < n_groups; g++) {
        int32_t *old = send->slots[g];
        send->slots[g] = next[g];
        next[g] = old;
    }
    return KVF_OK;
}

/* Live blocks without a page. */
typedef struct lack {
    kvf_page_ref_t pages[MAX_NAMED];
    size_t n;
} lack_t;

static void find_unbound(const kvf_send_op_t *send, int32_t *const *slots, uint32_t group_idx,
                         int64_t first, int64_t end, lack_t *lack) {
    const kvf_wanted_t *live = &send->live[group_idx];
    for (int64_t o = kvf_wanted_next(live, first); o < end; o = kvf_wanted_next(live, o + 1)) {
        if (slots[group_idx][o] < 0) {
            if (lack->n < MAX_NAMED) {
                lack->pages[lack->n] = (kvf_page_ref_t){group_idx, o, -1};
            }
            lack->n++;
        }
    }
}

static kvf_status_t refuse_unbound(const kvf_send_op_t *send, const lack_t *lack,
                                   kvf_detail_t *detail) {
    char text[KVF_DETAIL_BYTES];
    if (lack->n == 0) {
        return KVF_OK;
    }
    size_t named = lack->n < MAX_NAMED ? lack->n : MAX_NAMED;
    kvf_missing_text(text, sizeof(text), &send->op.core->layout, "source", lack->pages, named);
    return kvf_fail(detail, KVF_ERR_UNCOVERED, "%s (%zu live blocks in all are unbound)", text,
                    lack->n);
}

kvf_status_t kvf_send_bind(kvf_send_op_t *send, const kvf_table_t *tables, bool partial,
                           kvf_detail_t *detail) {
    const kvf_layout_t *layout = &send->op.core->layout;
    int32_t *next[KVF_MAX_GROUPS] = {NULL};
    lack_t lack = {.n = 0};
    kvf_status_t status = merge(send, tables, next, detail);
    for (uint32_t g = 0; g < layout->n_groups && status == KVF_OK && !partial; g++) {
        find_unbound(send, next, g, 0, send->live[g].prompt_blocks, &lack);
    }
    if (status == KVF_OK) {
        status = refuse_unbound(send, &lack, detail);
    }
    if (status == KVF_OK) {
        status = take(send, next, detail);
    }
    free_tables(send, next);
    return status;
}

/* ---- ranges ---- */

/* The core's layers [first, end) of a range. */
static kvf_status_t find_layers(const kvf_send_op_t *send, const kvf_range_t *range,
                                uint32_t *first_p, uint32_t *end_p, kvf_detail_t *detail) {
    const kvf_core_t *core = send->op.core;
    int64_t prompt = kvf_prompt_tokens(&send->lengths);
    uint32_t first = 0, end, last = core->layers[core->n_layers - 1].layer;
    if (range->token_end < 0 || range->token_end > prompt) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "token_end %" PRId64 ": the prompt has %" PRId64 " tokens",
                        range->token_end, prompt);
    }
    if (range->layer_end > last + 1) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "layer_end %" PRIu32 ": the model's last layer is %" PRIu32,
                        range->layer_end, last);
    }
    while (first < core->n_layers && core->layers[first].layer < range->layer_first) {
        first++;
    }
    for (end = first; end < core->n_layers && core->layers[end].layer < range->layer_end;) {
        end++;
    }
    if (first == end) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "no layer of the model lies in [%" PRIu32 ", %" PRIu32 ")",
                        range->layer_first, range->layer_end);
    }
    *first_p = first;
    *end_p = end;
    return KVF_OK;
}

/* What becomes ready must be bound. */
static kvf_status_t check_covered(const kvf_send_op_t *send, int32_t *const *slots, uint32_t first,
                                  uint32_t end, int64_t token_end, kvf_detail_t *detail) {
    const kvf_core_t *core = send->op.core;
    int64_t prompt = kvf_prompt_tokens(&send->lengths);
    lack_t lack = {.n = 0};
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        int64_t t = core->layout.groups[g].tokens_per_block, from = token_end;
        for (uint32_t i = first; i < end; i++) {
            if (core->layers[i].group_idx == g && send->ready[i] < from) {
                from = send->ready[i];
            }
        }
        find_unbound(send, slots, g, kvf_plan_whole_blocks(from, prompt, t),
                     kvf_plan_whole_blocks(token_end, prompt, t), &lack);
    }
    return refuse_unbound(send, &lack, detail);
}

/* Room for as many parts as a range can have. */
static kvf_status_t reserve_parts(kvf_send_op_t *send, uint32_t n, kvf_detail_t *detail) {
    if (send->n_promised + n > send->parts_room) {
        size_t room = 2 * send->n_promised + n;
        kvf_plan_part_t *parts =
            kvf_realloc(send->op.core->alloc, send->parts, room, sizeof(*parts));
        if (parts == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a range");
        }
        send->parts = parts;
        send->parts_room = room;
    }
    return KVF_OK;
}

/* Raise the layers' marks. Neighbours that stood at the same mark make one part. */
static void mark_ready(kvf_send_op_t *send, uint32_t first, uint32_t end, int64_t token_end) {
    const kvf_core_layer_t *layers = send->op.core->layers;
    for (uint32_t i = first, next; i < end; i = next) {
        int64_t mark = send->ready[i];
        for (next = i; next < end && send->ready[next] == mark; next++) {
        }
        if (mark < token_end) {
            send->parts[send->n_promised++] = (kvf_plan_part_t){
                layers[i].layer, layers[next - 1].layer + 1, mark, token_end, NULL};
            while (i < next) {
                send->ready[i++] = token_end;
            }
        }
    }
}

/* What may be read now: up to a number of parts. */
static void reach(kvf_send_op_t *send, size_t n_parts) {
    send->n_parts = n_parts;
    kvf_send_wake(send);
    kvf_send_ahead(send);
}

static kvf_status_t make_ready(kvf_core_t *core, uint64_t id, const kvf_range_t *range,
                               kvf_send_op_t **send_p, kvf_detail_t *detail) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_SEND);
    kvf_send_op_t *send = kvf_send_of(op);
    int32_t *next[KVF_MAX_GROUPS] = {NULL};
    uint32_t first = 0, end = 0;
    if (op == NULL || op->ended) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN, "this send has ended");
    }
    kvf_status_t status = find_layers(send, range, &first, &end, detail);
    if (status == KVF_OK && range->tables != NULL) {
        status = kvf_core_check_tables(core, range->tables, range->n_tables, detail);
        if (status == KVF_OK) {
            status = merge(send, range->tables, next, detail);
        }
        for (uint32_t g = 0; g < core->layout.n_groups && status == KVF_OK; g++) {
            const kvf_table_t table = {next[g], send->live[g].prompt_blocks};
            status = kvf_table_check(&table, &send->live[g], "context", core->layout.groups[g].name,
                                     core->alloc, detail);
        }
    }
    if (status == KVF_OK) {
        status = check_covered(send, range->tables != NULL ? next : send->slots, first, end,
                               range->token_end, detail);
    }
    if (status == KVF_OK) {
        status = reserve_parts(send, end - first, detail);
    }
    if (status == KVF_OK && range->tables != NULL) {
        status = take(send, next, detail);
    }
    free_tables(send, next);
    if (status == KVF_OK) {
        mark_ready(send, first, end, range->token_end);
        *send_p = send;
    }
    return status;
}

kvf_status_t kvf_core_send_ready(kvf_core_t *core, uint64_t id, const kvf_range_t *range,
                                 kvf_detail_t *detail) {
    kvf_send_op_t *send = NULL;
    kvf_status_t status = make_ready(core, id, range, &send, detail);
    if (status == KVF_OK && send->n_fences == 0) { /* else behind the fences before it */
        reach(send, send->n_promised);
    }
    return status;
}

kvf_status_t kvf_core_send_promise(kvf_core_t *core, uint64_t id, const kvf_range_t *range,
                                   size_t *mark_p, kvf_detail_t *detail) {
    kvf_send_op_t *send = NULL;
    kvf_status_t status = make_ready(core, id, range, &send, detail);
    if (status == KVF_OK) {
        send->n_fences++;
        *mark_p = send->n_promised;
    }
    return status;
}

void kvf_core_send_reached(kvf_core_t *core, uint64_t id, size_t mark, bool well) {
    kvf_op_t *op;
    HASH_FIND(hh, core->ops, &id, sizeof(id), op);
    kvf_send_op_t *send = kvf_send_of(op); /* lives: a send with a fence is not destroyed */
    send->n_fences--;
    if (!well && !op->ended) {
        kvf_send_end(send, KVF_ERR_PREFILL_FAILED,
                     "the device failed before what was promised was written", true);
    } else if (!op->ended) {
        reach(send, send->n_fences == 0 ? send->n_promised : mark);
    }
    if (op->ended) {
        kvf_send_finish_off(send);
        kvf_op_reap(op);
    }
}
