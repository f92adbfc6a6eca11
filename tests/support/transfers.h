/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_TRANSFERS_H
#define KVF_TESTS_TRANSFERS_H

/**
 * @file
 * What tests do with the nodes of a cluster: pages that hold a known pattern, sends and receives,
 * and what was seen of them.
 */

#include "cluster.h"

/** What a test saw of one send or receive. */
typedef struct watch {
    int progress, results, releases; /**< events */
    kvf_status_t status;
    char message[KVF_DETAIL_BYTES];
    char mover[16];
    uint64_t bytes, pages, pieces, quarantine_us;
    uint32_t layers; /**< progress reached this global layer */
    size_t n_missing, n_poisoned;
    kvf_page_ref_t missing[64];
    int32_t first_tokens[8];
    size_t n_first_tokens, n_draft_tokens;
} watch_t;

/** The callback whose ctx is a watch_t. */
void watch_event(void *ctx, const kvf_event_t *event);
/** @return Whether it has ended, as it should: one result, one released event. */
bool watch_ended(const watch_t *watch);

/** The byte at a place of a page: a function of content, group, ordinal and offset. */
uint8_t pattern(uint64_t content, uint32_t group_idx, int64_t ordinal, uint64_t offset);
/** Take pages for the blocks of a prompt that are live, -1 elsewhere, and fill them. content 0:
 * leave them zero. */
void node_take(node_t *node, int64_t prompt, uint64_t content, int32_t slots[KVF_MAX_GROUPS][64],
               kvf_table_t tables[KVF_MAX_GROUPS]);
/** Give them back. */
void node_give(node_t *node, kvf_table_t tables[KVF_MAX_GROUPS]);
/** @return Bytes of live blocks that do not hold that content. */
uint64_t node_wrong(node_t *node, int64_t prompt, uint64_t content,
                    kvf_table_t tables[KVF_MAX_GROUPS]);
/** @return Bytes of the tables' pages that are not zero, as they were made. */
uint64_t node_written(const node_t *node, const kvf_table_t *tables);
/** @return Whether every page of the node is free and the audit passes. */
bool node_clean(const node_t *node);

/** Open a send whose layers are all ready and that is finished. */
kvf_status_t node_offer(node_t *node, const char *request_id, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        char ticket[KVF_TICKET_BYTES]);
/** @return Who moves in this run of the tests: the receiver where KVF_TEST_PULL is set. */
kvf_direction_t cluster_direction(void);
/** Open a receive with a ticket. */
kvf_status_t node_fetch(node_t *node, const char *request_id, const char *ticket, int64_t prompt,
                        const kvf_table_t *tables, watch_t *watch, uint64_t *id_p,
                        kvf_detail_t *detail);

#endif
