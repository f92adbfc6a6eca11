/* SPDX-License-Identifier: Apache-2.0 */
/* The process that `kvferry bench` starts beside itself: it offers what the other one asks for. */
#include "tools/bench/scatter.h"
#include "tools/bench/side.h"
#include "tools/command.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef struct sender {
    kvf_bench_side_t side;
    kvf_send_t send;
    bool offered; /* one was; its released event may be still to come */
} sender_t;

/* Layers [first, end) of the whole prompt. */
static kvf_status_t ready(const sender_t *sender, uint32_t first, uint32_t end,
                          kvf_detail_t *detail) {
    const kvf_range_t range = {
        .layer_first = first, .layer_end = end, .token_end = sender->side.n_blocks};
    return kvf_send_ready(sender->side.agent, sender->send, &range, NULL, detail);
}

static kvf_status_t offer(sender_t *sender, kvf_bench_message_t *message, kvf_detail_t *detail) {
    kvf_bench_side_t *side = &sender->side;
    const kvf_table_t table = kvf_bench_table(side);
    char id[32];
    (void)snprintf(id, sizeof(id), "rep-%" PRIu64, message->rep);
    const kvf_send_desc_t desc = {.request_id = id,
                                  .lengths = {.prompt_len = side->n_blocks},
                                  .allocated_tokens = side->n_blocks,
                                  .tables = &table,
                                  .n_tables = 1};
    kvf_status_t status = sender->offered ? kvf_bench_wait(side, detail) : KVF_OK;
    if (status != KVF_OK) {
        return status;
    }
    for (int64_t i = 0; i < side->n_blocks; i++) {
        kvf_scatter_fill(kvf_bench_look(side, side->slots[i]),
                         kvf_group_block_bytes(&side->layout.groups[0]), message->rep, (uint64_t)i);
        kvf_bench_put(side, side->slots[i]);
    }
    kvf_bench_expect(side);
    status = kvf_send_open(side->agent, &desc, kvf_bench_on_event, &side->outcome, &sender->send,
                           detail);
    if (status != KVF_OK) {
        return status;
    }
    sender->offered = true;
    if (!message->late) {
        status = ready(sender, 0, side->layout.groups[0].n_layers, detail);
        if (status == KVF_OK) {
            status = kvf_send_finish(side->agent, sender->send, NULL, detail);
        }
    }
    return status == KVF_OK
               ? kvf_send_ticket(side->agent, sender->send, message->text, sizeof(message->text))
               : status;
}

static void sleep_until(uint64_t ns) {
    const struct timespec time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) != 0) {
    }
}

static kvf_status_t go(sender_t *sender, kvf_bench_message_t *message, kvf_detail_t *detail) {
    const uint32_t n_layers = sender->side.layout.groups[0].n_layers;
    const uint32_t step = message->ns == 0 ? n_layers : 1;
    const uint64_t layer_ns = message->ns;
    const uint64_t began_ns = kvf_bench_now_ns();
    for (uint32_t layer = 0; layer < n_layers; layer += step) {
        sleep_until(began_ns + (layer + 1) * layer_ns);
        message->ns = kvf_bench_now_ns();
        kvf_status_t status = ready(sender, layer, layer + step, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    return kvf_send_finish(sender->side.agent, sender->send, NULL, detail);
}

static kvf_status_t count(const sender_t *sender, kvf_bench_message_t *message) {
    kvf_counters_t counters;
    kvf_agent_get_counters(sender->side.agent, &counters);
    message->pieces = counters.pieces_sent;
    message->ns = counters.posting_us * 1000;
    return KVF_OK;
}

int kvf_bench_sender(const kvf_bench_options_t *options, int fd) {
    sender_t sender = {.side = {.agent = NULL}};
    kvf_bench_message_t message;
    while (kvf_bench_hear(fd, &message)) {
        kvf_detail_t detail = {""};
        kvf_status_t status = KVF_ERR_INTERNAL;
        switch (message.kind) {
        case KVF_BENCH_HELLO:
            status = kvf_bench_side_open(options, 0, message.key, &sender.side, &detail);
            break;
        case KVF_BENCH_OFFER:
            status = offer(&sender, &message, &detail);
            break;
        case KVF_BENCH_GO:
            status = go(&sender, &message, &detail);
            break;
        case KVF_BENCH_COUNT:
            status = count(&sender, &message);
            break;
        case KVF_BENCH_FAILED:
            break;
        }
        if (status != KVF_OK) {
            message.kind = KVF_BENCH_FAILED;
            (void)snprintf(message.text, sizeof(message.text), "%s: %s", kvf_status_name(status),
                           detail.text[0] != '\0' ? detail.text : kvf_status_text(status));
        }
        if (!kvf_bench_say(fd, &message)) {
            break;
        }
    }
    kvf_bench_side_close(&sender.side);
    return KVF_EXIT_DONE;
}
