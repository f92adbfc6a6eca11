/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: an orchestrator that looks for the node with the least to do, engines that take their
 * time, and pages. */
#include "kvmgr/table.h"
#include "tools/sim/scale/scale_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What happens to a request. */
typedef enum load_step {
    STEP_ARRIVE,  /* the orchestrator chooses a context node */
    STEP_COMPUTE, /* a part of its prompt is ready */
    STEP_ASK,     /* the orchestrator is at a generation node with the ticket */
    STEP_LEAVE,   /* the last token is generated */
    STEP_SERVE    /* of a node: pages came back, for which requests may wait */
} load_step_t;

/* One side of a request. */
typedef struct load_side {
    scale_node_t *node;
    uint64_t id;
    bool held; /* the pages */
    bool over; /* its pages are given back for good */
    kvf_table_t tables[KVF_MAX_GROUPS];
    int32_t *slots[KVF_MAX_GROUPS]; /* by ordinal */
} load_side_t;

struct load_request {
    scale_t *scale;
    const kvf_trace_request_t *from;
    char name[32];
    uint64_t arrived_ns, begins_ns, ends_ns; /* its arrival; its prefill */
    uint64_t asked_ns;                       /* when the receive was opened */
    int64_t computed;                        /* tokens */
    char ticket[KVF_TICKET_BYTES];
    load_side_t context, generation;
    bool failed;          /* on either side, or both */
    load_request_t *next; /* that waits for pages of the same node */
};

static void later(load_request_t *request, load_step_t step, uint64_t at_ns) {
    scale_push(request->scale,
               (scale_event_t){.at_ns = at_ns, .kind = SCALE_LOAD, .conn = step, .ptr = request});
}

static kvf_lengths_t lengths_of(const load_request_t *request) {
    return (kvf_lengths_t){.prompt_len = request->from->input_tokens};
}

static kvf_wanted_t wanted_of(const load_request_t *request, uint32_t g) {
    const kvf_layer_group_t *group = &request->scale->layout.groups[g];
    const kvf_lengths_t lengths = lengths_of(request);
    const kvf_cp_t whole = {1, 0};
    kvf_wanted_t wanted;
    if (kvf_wanted_init(&lengths, group->tokens_per_block, group->window, group->sinks, 0, whole,
                        whole, &wanted, NULL) != KVF_OK) {
        abort(); /* nothing of it comes from outside but the prompt's length, which was checked */
    }
    return wanted;
}

/* ---- pages ---- */

static void give_pages(load_side_t *side) {
    for (uint32_t g = 0; side->held && g < side->node->scale->layout.n_groups; g++) {
        for (int64_t o = 0; o < side->tables[g].n_blocks; o++) {
            if (side->slots[g][o] >= 0 &&
                kvf_pages_release(side->node->pages[g], side->slots[g][o]) != KVF_OK) {
                abort(); /* it is held */
            }
        }
        free(side->slots[g]);
        side->slots[g] = NULL;
    }
    side->held = false;
}

/* All pages that a request needs on a side, or none. */
static bool take_pages(load_request_t *request, load_side_t *side) {
    const kvf_layout_t *layout = &request->scale->layout;
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_wanted_t wanted = wanted_of(request, g);
        if (kvf_wanted_count(&wanted) > kvf_pages_count(side->node->pages[g], KVF_PAGE_FREE)) {
            return false;
        }
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_wanted_t wanted = wanted_of(request, g);
        int32_t *slots = malloc((size_t)wanted.prompt_blocks * sizeof(*slots));
        if (slots == NULL) {
            abort();
        }
        memset(slots, 0xff, (size_t)wanted.prompt_blocks * sizeof(*slots)); /* -1 */
        for (int64_t o = kvf_wanted_next(&wanted, 0); o < wanted.prompt_blocks;
             o = kvf_wanted_next(&wanted, o + 1)) {
            if (kvf_pages_acquire(side->node->pages[g], 1, &slots[o]) != KVF_OK) {
                abort(); /* they were counted */
            }
        }
        side->slots[g] = slots;
        side->tables[g] = (kvf_table_t){slots, wanted.prompt_blocks};
    }
    side->held = true;
    return true;
}

static int64_t capacity(const load_request_t *request, bool drafts) {
    const kvf_lengths_t lengths = lengths_of(request);
    int64_t tokens;
    return kvf_get_kv_capacity_tokens(&lengths, drafts, &tokens, NULL) == KVF_OK ? tokens : 0;
}

/* ---- ends ---- */

static void end_side(load_request_t *request, load_side_t *side) {
    scale_t *scale = request->scale;
    give_pages(side);
    side->node->n_requests--;
    side->over = true;
    scale->n_done += request->context.over && request->generation.over;
    scale_push(scale, (scale_event_t){.at_ns = scale->now_ns,
                                      .kind = SCALE_LOAD,
                                      .node = side->node->idx,
                                      .conn = STEP_SERVE});
}

static void fail(load_request_t *request, const char *what, const char *why) {
    kvf_scale_result_t *result = request->scale->result;
    if (request->failed) {
        return;
    }
    request->failed = true;
    if (result->n_failed++ == 0) {
        (void)snprintf(result->why, sizeof(result->why), "%s, %s: %s", request->name, what, why);
    }
}

static void add(kvf_samples_t *samples, uint64_t ns) {
    if (kvf_samples_add(samples, ns / 1000) != KVF_OK) {
        abort();
    }
}

static void on_received(void *ctx, const kvf_event_t *event) {
    load_request_t *request = ctx;
    scale_t *scale = request->scale;
    kvf_scale_result_t *result = scale->result;
    if (event->kind == KVF_EVENT_RESULT && event->status == KVF_OK) {
        add(&result->added_us, scale->now_ns - request->ends_ns);
        add(&result->transfer_us, scale->now_ns - request->asked_ns);
        add(&result->ideal_us, net_bytes_ns(scale, event->bytes));
        result->n_ok++;
        result->bytes += event->bytes;
        result->pages += event->pages;
        result->pieces += event->pieces;
    } else if (event->kind == KVF_EVENT_RESULT) {
        fail(request, "receive", event->message);
    } else if (event->kind == KVF_EVENT_RELEASED) {
        scale->n_in_flight--;
        later(request, STEP_LEAVE,
              scale->now_ns +
                  (uint64_t)request->from->output_tokens * scale->options->token_us * 1000);
    }
}

static void on_sent(void *ctx, const kvf_event_t *event) {
    load_request_t *request = ctx;
    if (event->kind == KVF_EVENT_RESULT && event->status != KVF_OK) {
        fail(request, "send", event->message);
    } else if (event->kind == KVF_EVENT_RELEASED) {
        end_side(request, &request->context);
    }
}

/* ---- steps ---- */

static uint64_t compute_ns(const scale_t *scale, int64_t tokens) {
    return (uint64_t)((double)tokens * 1e9 / (double)scale->options->prefill_tokens_s);
}

static void compute_next(load_request_t *request) {
    int64_t tokens = request->computed + request->scale->options->chunk_tokens;
    tokens = tokens < request->from->input_tokens ? tokens : request->from->input_tokens;
    request->computed = tokens;
    later(request, STEP_COMPUTE, request->begins_ns + compute_ns(request->scale, tokens));
}

/* The orchestrator has the answer of one node and asks the other. */
static void ask_later(load_request_t *request) {
    const scale_t *scale = request->scale;
    later(request, STEP_ASK, scale->now_ns + 2 * scale->options->latency_us * 1000);
}

/* Its pages are there: prefill takes its place in the node's queue. */
static kvf_status_t open_send(load_request_t *request, kvf_detail_t *detail) {
    scale_t *scale = request->scale;
    scale_node_t *node = request->context.node;
    const kvf_send_desc_t desc = {.request_id = request->name,
                                  .lengths = lengths_of(request),
                                  .allocated_tokens = capacity(request, false),
                                  .tables = request->context.tables,
                                  .n_tables = scale->layout.n_groups};
    kvf_status_t status =
        kvf_core_send_open(node->core, &desc, on_sent, request, &request->context.id, detail);
    if (status != KVF_OK) {
        return status;
    }
    request->begins_ns =
        node->computes_until_ns > scale->now_ns ? node->computes_until_ns : scale->now_ns;
    request->ends_ns = request->begins_ns + compute_ns(scale, request->from->input_tokens);
    node->computes_until_ns = request->ends_ns;
    compute_next(request);
    return kvf_core_send_ticket(node->core, request->context.id, request->ticket,
                                sizeof(request->ticket));
}

static kvf_status_t open_receive(load_request_t *request, kvf_detail_t *detail) {
    scale_t *scale = request->scale;
    const kvf_recv_desc_t desc = {.request_id = request->name,
                                  .ticket = request->ticket,
                                  .lengths = lengths_of(request),
                                  .allocated_tokens = capacity(request, true),
                                  .tables = request->generation.tables,
                                  .n_tables = scale->layout.n_groups,
                                  .handoff = KVF_HANDOFF_NONE};
    request->asked_ns = scale->now_ns;
    scale->n_in_flight++;
    if (scale->n_in_flight > scale->result->most_in_flight) {
        scale->result->most_in_flight = scale->n_in_flight;
    }
    return kvf_core_recv_open(request->generation.node->core, &desc, on_received, request,
                              &request->generation.id, detail);
}

static load_side_t *side_at(load_request_t *request, const scale_node_t *node) {
    return request->context.node == node ? &request->context : &request->generation;
}

/* Requests that wait for pages of a node get them in their order. */
static void serve(scale_node_t *node) {
    kvf_detail_t detail;
    scale_enter(node);
    while (node->first != NULL && take_pages(node->first, side_at(node->first, node))) {
        load_request_t *request = node->first;
        bool sends = request->context.node == node;
        node->first = request->next;
        node->last = node->first == NULL ? NULL : node->last;
        kvf_status_t status = sends ? open_send(request, &detail) : open_receive(request, &detail);
        if (status != KVF_OK) {
            (void)fprintf(stderr, "kvferry sim: %s, %s: %s\n", node->name, request->name,
                          detail.text);
            abort(); /* nothing that is right here is refused */
        }
        if (sends && node->scale->options->early) {
            ask_later(request);
        }
    }
    scale_turn(node);
    scale_leave(node);
}

/* Choose the node of a role that has the least to do, and wait there. */
static void go_to(load_request_t *request, load_side_t *side, uint32_t first, uint32_t n) {
    scale_node_t *best = &request->scale->nodes[first];
    for (uint32_t i = 1; i < n; i++) {
        scale_node_t *node = &request->scale->nodes[first + i];
        if (node->computes_until_ns != best->computes_until_ns
                ? node->computes_until_ns < best->computes_until_ns
                : node->n_requests < best->n_requests) {
            best = node;
        }
    }
    side->node = best;
    best->n_requests++;
    request->next = NULL;
    *(best->last != NULL ? &best->last->next : &best->first) = request;
    best->last = request;
    serve(best);
}

/* A part is ready: say so, and after the last that this was all. */
static void compute(load_request_t *request) {
    scale_node_t *node = request->context.node;
    kvf_detail_t detail;
    const bool all = request->computed == request->from->input_tokens;
    const kvf_range_t range = {
        .layer_first = 0, .layer_end = request->scale->n_layers, .token_end = request->computed};
    scale_enter(node);
    kvf_status_t status = kvf_core_send_ready(node->core, request->context.id, &range, &detail);
    if (status == KVF_OK && all) {
        status = kvf_core_send_finish(node->core, request->context.id, NULL, &detail);
    }
    if (status != KVF_OK) {
        (void)fprintf(stderr, "kvferry sim: %s, %s: %s\n", node->name, request->name, detail.text);
        abort(); /* nothing that is right here is refused */
    }
    scale_turn(node);
    scale_leave(node);
    if (!all) {
        compute_next(request);
        return;
    }
    add(&request->scale->result->prefill_us, request->ends_ns - request->arrived_ns);
    if (!request->scale->options->early) {
        ask_later(request);
    }
}

static void arrive_later(scale_t *scale) {
    if (scale->next_arrival < scale->n_requests) {
        load_request_t *request = &scale->requests[scale->next_arrival++];
        later(request, STEP_ARRIVE, request->arrived_ns);
    }
}

void load_event(scale_t *scale, const scale_event_t *event) {
    load_request_t *request = event->ptr;
    switch ((load_step_t)event->conn) {
    case STEP_ARRIVE:
        arrive_later(scale);
        go_to(request, &request->context, 0, scale->options->n_context);
        break;
    case STEP_COMPUTE:
        compute(request);
        break;
    case STEP_ASK:
        go_to(request, &request->generation, scale->options->n_context,
              scale->options->n_generation);
        break;
    case STEP_LEAVE:
        end_side(request, &request->generation);
        break;
    case STEP_SERVE:
        serve(&scale->nodes[event->node]);
        break;
    }
}

/* ---- begin and end ---- */

/* No sum of times may pass the clock's end: some 290 years. */
#define MOST_NS 9e18

static kvf_status_t check_times(const scale_t *scale, const kvf_trace_t *trace,
                                kvf_detail_t *detail) {
    const kvf_scale_options_t *options = scale->options;
    double sum_ns = (double)scale->now_ns;
    double last_ns = 0;
    for (size_t i = 0; i < trace->n_requests; i++) {
        const kvf_trace_request_t *request = &trace->requests[i];
        double at_ns = (double)request->timestamp_us * 1000 / options->speed;
        last_ns = at_ns > last_ns ? at_ns : last_ns;
        sum_ns += (double)request->input_tokens * 1e9 / (double)options->prefill_tokens_s +
                  (double)request->output_tokens * (double)options->token_us * 1000;
    }
    return sum_ns + last_ns < MOST_NS
               ? KVF_OK
               : kvf_fail(detail, KVF_ERR_RANGE,
                          "the run would take more than 290 years; is the trace's clock in "
                          "milliseconds? --speed, --prefill-tokens-per-s and --token-us make it "
                          "shorter");
}

kvf_status_t load_begin(scale_t *scale, const kvf_trace_t *trace, kvf_detail_t *detail) {
    const kvf_scale_options_t *options = scale->options;
    kvf_status_t status = check_times(scale, trace, detail);
    if (status != KVF_OK) {
        return status;
    }
    scale->requests = calloc(trace->n_requests, sizeof(*scale->requests));
    if (scale->requests == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for %zu requests", trace->n_requests);
    }
    for (uint32_t g = 0; g < scale->layout.n_groups; g++) {
        scale->n_layers += scale->layout.groups[g].n_layers;
    }
    const uint64_t zero_us = trace->requests[0].timestamp_us;
    uint64_t last_us = zero_us; /* a trace that jumps back does not take the clock along */
    for (size_t i = 0; i < trace->n_requests; i++) {
        load_request_t *request = &scale->requests[i];
        last_us =
            trace->requests[i].timestamp_us > last_us ? trace->requests[i].timestamp_us : last_us;
        *request = (load_request_t){.scale = scale, .from = &trace->requests[i]};
        request->arrived_ns =
            scale->now_ns + (uint64_t)((double)(last_us - zero_us) * 1000 / options->speed);
        (void)snprintf(request->name, sizeof(request->name), "line-%" PRIu64,
                       trace->requests[i].line);
        for (uint32_t g = 0; g < scale->layout.n_groups; g++) {
            const kvf_wanted_t wanted = wanted_of(request, g);
            if (kvf_wanted_count(&wanted) > options->pool_pages) {
                return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                                "the prompt of line %" PRIu64 " has %" PRId64
                                " blocks of group %s, and a pool %" PRId64
                                " pages; give more by --pool-pages",
                                request->from->line, kvf_wanted_count(&wanted),
                                scale->layout.groups[g].name, options->pool_pages);
            }
        }
    }
    scale->n_requests = trace->n_requests;
    arrive_later(scale);
    return KVF_OK;
}

void load_end(scale_t *scale) {
    for (size_t i = 0; i < scale->n_requests; i++) {
        for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
            free(scale->requests[i].context.slots[g]);
            free(scale->requests[i].generation.slots[g]);
        }
    }
    free(scale->requests);
}
