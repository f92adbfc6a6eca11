/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two agents in one process; one moves the KV cache of a request into the other's pages. Everything
 * an engine needs is in one header. Against an installed kvferry:
 *
 *     cc two_agents.c -pthread $(pkg-config --cflags --libs kvferry) -o two_agents
 *     LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvferry) ./two_agents
 */
#if __has_include("transceiver/kvferry.h") /* in the source tree */
#include "transceiver/kvferry.h"
#else
#include <kvferry/kvferry.h>
#endif

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT 1000 /* tokens */
#define BLOCKS 32   /* of 32 tokens: ceil(1000 / 32) */

/* Four layers, one table: 2 KV heads of 64 bf16 elements. Sliding windows make a second group. */
static const kvf_layout_t layout = {
    .n_groups = 1,
    .groups = {{.name = "full",
                .n_layers = 4,
                .layers = {0, 1, 2, 3},
                .tokens_per_block = 32,
                .kv_heads = 2,
                .head_dim = 64,
                .kv_factor = 2,
                .dtype = KVF_DTYPE_BF16}},
};

/* What one request's callback leaves for the main thread. */
typedef struct outcome {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    kvf_status_t status;
    uint64_t bytes, transfer_us;
    bool released;
} outcome_t;

static void must(kvf_status_t status, const kvf_detail_t *detail, const char *what) {
    if (status != KVF_OK) {
        fprintf(stderr, "two_agents: %s: %s: %s\n", what, kvf_status_name(status), detail->text);
        exit(1);
    }
}

/* Runs on the agent's thread: note what happened, and wake whoever waits. */
static void on_event(void *ctx, const kvf_event_t *event) {
    outcome_t *outcome = ctx;
    pthread_mutex_lock(&outcome->lock);
    if (event->kind == KVF_EVENT_RESULT) {
        outcome->status = event->status;
        outcome->bytes = event->bytes;
        outcome->transfer_us = event->transfer_us;
        if (event->status != KVF_OK) {
            fprintf(stderr, "two_agents: %s: %s\n", kvf_status_name(event->status), event->message);
        }
    }
    outcome->released |= event->kind == KVF_EVENT_RELEASED;
    pthread_cond_broadcast(&outcome->cond);
    pthread_mutex_unlock(&outcome->lock);
}

static void wait_released(outcome_t *outcome) {
    pthread_mutex_lock(&outcome->lock);
    while (!outcome->released) {
        pthread_cond_wait(&outcome->cond, &outcome->lock);
    }
    pthread_mutex_unlock(&outcome->lock);
}

/* An agent with a pool of 256 pages, and a table of pages for the request. */
static kvf_agent_t *start(const char *instance, kvf_pool_t **pool, int32_t slots[BLOCKS]) {
    kvf_agent_config_t config;
    kvf_agent_t *agent;
    kvf_detail_t detail = {""};
    const kvf_pool_desc_t desc = {.memory = "host", .n_pages = 256};
    kvf_agent_config_init(&config);
    config.instance = instance;
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    memset(config.cluster_key, 7, sizeof(config.cluster_key)); /* real nodes: `kvferry keygen` */
    must(kvf_agent_create(&config, &agent, &detail), &detail, "create");
    must(kvf_pool_create(agent, &desc, pool, &detail), &detail, "pool");
    must(kvf_agent_start_thread(agent, &detail), &detail, "start");
    must(kvf_pool_acquire(*pool, BLOCKS, slots), &detail, "acquire");
    return agent;
}

int main(void) {
    kvf_detail_t detail = {""};
    kvf_pool_t *source, *destination;
    int32_t from[BLOCKS], to[BLOCKS];
    outcome_t sent = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, KVF_OK, 0, 0, false};
    outcome_t got = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, KVF_OK, 0, 0, false};
    char ticket[KVF_TICKET_BYTES];
    kvf_send_t send;
    kvf_recv_t recv;
    kvf_agent_t *prefill = start("prefill-0", &source, from);
    kvf_agent_t *decode = start("decode-0", &destination, to);
    const uint64_t page_bytes = kvf_group_block_bytes(&layout.groups[0]);

    /* Context side: "prefill" writes the pages, tail of the last block zero, then offers them. */
    const kvf_table_t source_table = {from, BLOCKS}, destination_table = {to, BLOCKS};
    const kvf_send_desc_t offer = {.request_id = "request-1",
                                   .lengths = {.prompt_len = PROMPT},
                                   .allocated_tokens = PROMPT, /* as kvf_get_kv_capacity_tokens() */
                                   .tables = &source_table,
                                   .n_tables = 1};
    const kvf_aux_t aux = {.first_tokens = &(int32_t){42}, .n_first_tokens = 1}; /* it samples it */
    const kvf_range_t all_layers = {.layer_first = 0, .layer_end = 4, .token_end = PROMPT};
    for (int i = 0; i < BLOCKS; i++) {
        memset(kvf_pool_page(source, from[i]), i + 1, page_bytes);
    }
    must(kvf_send_open(prefill, &offer, on_event, &sent, &send, &detail), &detail, "send_open");
    must(kvf_send_ready(prefill, send, &all_layers, NULL, &detail), &detail, "send_ready");
    must(kvf_send_finish(prefill, send, &aux, &detail), &detail, "send_finish");
    must(kvf_send_ticket(prefill, send, ticket, sizeof(ticket)), &detail, "send_ticket");

    /* Generation side: the ticket came through the orchestrator. */
    const kvf_recv_desc_t fetch = {.request_id = "request-1",
                                   .ticket = ticket,
                                   .lengths = {.prompt_len = PROMPT},
                                   .allocated_tokens = PROMPT,
                                   .tables = &destination_table,
                                   .n_tables = 1};
    must(kvf_recv_open(decode, &fetch, on_event, &got, &recv, &detail), &detail, "recv_open");
    wait_released(&got);
    wait_released(&sent);
    must(got.status != KVF_OK ? got.status : sent.status, &detail, "transfer");
    uint64_t wrong = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const uint8_t *page = kvf_pool_page(destination, to[i]);
        for (uint64_t b = 0; b < page_bytes; b++) {
            wrong += page[b] != (uint8_t)(i + 1);
        }
    }
    printf("%" PRIu64 " bytes in %" PRIu64 " us, %" PRIu64 " wrong\n", got.bytes, got.transfer_us,
           wrong);
    must(kvf_agent_destroy(decode), &detail, "destroy");
    must(kvf_agent_destroy(prefill), &detail, "destroy");
    return wrong == 0 ? 0 : 1;
}
