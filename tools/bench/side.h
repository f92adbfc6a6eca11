/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_SIDE_H
#define KVF_TOOLS_BENCH_SIDE_H

/**
 * @file
 * What the two processes of a measurement have in common: an agent with a pool, the blocks in it,
 * the wait for a request's end, and the messages by which the receiving process leads the other.
 */

#include "tools/bench/options.h"
#include "transceiver/kvferry.h"

#include <pthread.h>

/** Descriptor of the leading process's end in the process that it started. */
#define KVF_BENCH_FD 3

/** How the request under way went. Written by who drives the agent. */
typedef struct kvf_bench_outcome {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool released;
    kvf_status_t status;
    kvf_detail_t detail;
    char mover[16];
    uint64_t bytes;
    uint64_t pieces;
    uint64_t result_ns; /**< when the result came: kvf_bench_now_ns() */
} kvf_bench_outcome_t;

/** One process's half. */
typedef struct kvf_bench_side {
    kvf_layout_t layout;
    kvf_agent_t *agent;
    kvf_pool_t *pool;
    int64_t n_pages;
    int32_t *slots; /**< of the blocks, in the order of the tokens */
    int64_t n_blocks;
    void *copy; /**< of a block, where the CPU does not reach the pool; or NULL */
    kvf_bench_outcome_t outcome;
    bool caller; /**< no thread of its own drives the agent */
} kvf_bench_side_t;

typedef enum kvf_bench_kind {
    KVF_BENCH_HELLO,  /**< -> key: make your half. <- it is there */
    KVF_BENCH_OFFER,  /**< -> rep, late: write the blocks and offer them. <- text: the ticket */
    KVF_BENCH_GO,     /**< -> ns: the late ones are ready, layer by layer, so far apart; 0: all at
                         once. <- ns: when the last was */
    KVF_BENCH_COUNT,  /**< <- pieces that were sent, and ns of cutting and posting them */
    KVF_BENCH_FAILED, /**< <- text: why */
} kvf_bench_kind_t;

/** What is said, and answered with the same kind. An end of file ends the process. */
typedef struct kvf_bench_message {
    kvf_bench_kind_t kind;
    bool late;
    uint64_t rep;
    uint64_t ns;
    uint64_t pieces;
    uint8_t key[KVF_KEY_BYTES];
    char text[KVF_TICKET_BYTES];
} kvf_bench_message_t;

/** @return CLOCK_MONOTONIC, the same in both processes. @thread any */
uint64_t kvf_bench_now_ns(void);

/**
 * Start an agent whose pool has the blocks of the options.
 *
 * @param number       0 = source, 1 = destination.
 * @param key          KVF_KEY_BYTES that both sides know.
 * @param[out] side_p  kvf_bench_side_close() it, also after an error.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; or what the library says, with its text.
 */
KVF_CHECK kvf_status_t kvf_bench_side_open(const kvf_bench_options_t *options, int number,
                                           const uint8_t *key, kvf_bench_side_t *side_p,
                                           kvf_detail_t *detail);

/** End the agent. Half-open sides are allowed. */
void kvf_bench_side_close(kvf_bench_side_t *side);

/**
 * Look at a slot.
 *
 * @return Its memory; of a pool on a device a copy, until the next look: all zero if the device
 * fails, which then counts as wrong bytes. NULL: there is no such slot.
 */
void *kvf_bench_look(const kvf_bench_side_t *side, int32_t slot);
/** Let what was written at the last look be in its slot. */
void kvf_bench_put(const kvf_bench_side_t *side, int32_t slot);

/** @return The table of all blocks, as long as the side is open. */
kvf_table_t kvf_bench_table(const kvf_bench_side_t *side);

/** Expect the events of one more request. */
void kvf_bench_expect(kvf_bench_side_t *side);

/** A kvf_event_cb: notes how the request ends. @param ctx  The side's outcome. */
void kvf_bench_on_event(void *ctx, const kvf_event_t *event);

/** Let the agent do what can be done now, when nobody else does; else nothing. Never sleeps. */
void kvf_bench_drive(kvf_bench_side_t *side);

/**
 * Wait for the released event.
 *
 * @return The request's result.
 */
KVF_CHECK kvf_status_t kvf_bench_wait(kvf_bench_side_t *side, kvf_detail_t *detail);

/** Send a message. @return Whether the other process is there. */
bool kvf_bench_say(int fd, const kvf_bench_message_t *message);

/** Wait for a message. @return Whether one came. */
bool kvf_bench_hear(int fd, kvf_bench_message_t *message_p);

/**
 * The process that is led: the context side. Returns when the leading one is gone or has enough.
 *
 * @param fd  KVF_BENCH_FD.
 * @return Its exit code, a kvf_exit_t.
 */
int kvf_bench_sender(const kvf_bench_options_t *options, int fd);

#endif
