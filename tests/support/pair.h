/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_PAIR_H
#define KVF_TESTS_PAIR_H

/**
 * @file
 * Two nodes of a cluster and one request between them, for tests of the core.
 */

#include "transfers.h"

#include <criterion/criterion.h>

/** What the source's pages hold. */
#define CONTENT 7

typedef struct pair {
    cluster_t *cluster;
    node_t *ctx, *gen;
    int32_t source[KVF_MAX_GROUPS][64], destination[KVF_MAX_GROUPS][64];
    kvf_table_t sources[KVF_MAX_GROUPS], destinations[KVF_MAX_GROUPS];
    watch_t sent, got;
    uint64_t send, recv;
    char ticket[KVF_TICKET_BYTES];
    int64_t prompt;
    kvf_detail_t detail;
} pair_t;

/** Half a second, so that tests see its end. */
static inline void short_quarantine(kvf_agent_config_t *config) {
    config->quarantine_us = 500000;
}

/** Make two nodes with pools of so many pages, take and fill pages. */
static inline void pair_make(pair_t *p, const cluster_options_t *options, int64_t n_pages,
                             int64_t prompt) {
    kvf_layout_t layout = cluster_layout();
    memset(p, 0, sizeof(*p));
    p->prompt = prompt;
    p->cluster = cluster_create(options);
    p->ctx = cluster_node(p->cluster, &layout, n_pages, short_quarantine);
    p->gen = cluster_node(p->cluster, &layout, n_pages, short_quarantine);
    node_take(p->ctx, prompt, CONTENT, p->source, p->sources);
    node_take(p->gen, prompt, 0, p->destination, p->destinations);
}

/** Make a ticket. */
static inline void pair_offer(pair_t *p) {
    cr_assert_eq(node_offer(p->ctx, "r1", p->prompt, p->sources, &p->sent, &p->send, p->ticket),
                 KVF_OK);
}

/** All of that, with room to spare. */
static inline void pair_open(pair_t *p, const cluster_options_t *options, int64_t prompt) {
    pair_make(p, options, 128, prompt);
    pair_offer(p);
}

/** Open the receive. */
static inline kvf_status_t pair_fetch(pair_t *p) {
    return node_fetch(p->gen, "r1", p->ticket, p->prompt, p->destinations, &p->got, &p->recv,
                      &p->detail);
}

/** Give the pages back; all must be free then. */
static inline void pair_close(pair_t *p) {
    node_give(p->ctx, p->sources);
    node_give(p->gen, p->destinations);
    cr_expect(node_clean(p->ctx));
    cr_expect(node_clean(p->gen));
    cluster_destroy(p->cluster);
}

/** Both sides have ended, as they should. */
static inline void expect_one_end_each(const pair_t *p) {
    cr_expect(watch_ended(&p->sent));
    cr_expect(watch_ended(&p->got));
}

#endif
