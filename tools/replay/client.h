/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_CLIENT_H
#define KVF_TOOLS_REPLAY_CLIENT_H

/**
 * @file
 * Many HTTP calls at once, on one thread: libcurl's multi interface behind four functions.
 */

#include "kvmgr/base/alloc.h"

/** Answers are small; a longer one is cut off and counts as no answer. */
#define KVF_CLIENT_MAX_ANSWER_BYTES (16U << 20)

typedef struct kvf_client kvf_client_t;

/** How a call ended. */
typedef struct kvf_answer {
    long http_status;     /**< 0: no answer came, `why` says the reason */
    kvf_status_t failure; /**< with http_status 0: KVF_ERR_DEADLINE or KVF_ERR_IO */
    const char *why;      /**< with http_status 0: the cause, lower case */
    const char *body;     /**< not zero-terminated */
    size_t bytes;
    uint64_t retry_after_us; /**< what a Retry-After header asks for; 0 without one */
} kvf_answer_t;

/** Takes an answer, which is borrowed for the call; may make calls, must not destroy the client. */
typedef void (*kvf_answer_cb)(void *ctx, const kvf_answer_t *answer);

/**
 * @param max_calls      How many calls will be under way at once: so many connections are kept
 * open.
 * @param[out] client_p  kvf_client_destroy() it.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_client_create(const kvf_alloc_t *alloc, uint32_t max_calls,
                                         kvf_client_t **client_p);

/** Ends what is under way without callbacks. NULL is allowed. */
void kvf_client_destroy(kvf_client_t *client);

/**
 * Start a call. Proxies of the environment are not used: nodes are dialled directly.
 *
 * @param url         http://host:port/path; copied.
 * @param body        NULL: GET. Else POST of this JSON text; copied.
 * @param timeout_us  > 0; for the whole call.
 * @return KVF_OK: cb runs once, from kvf_client_progress(); KVF_ERR_NO_MEMORY. A bad url is no
 * answer.
 */
KVF_CHECK kvf_status_t kvf_client_call(kvf_client_t *client, const char *url, const char *body,
                                       uint64_t timeout_us, kvf_answer_cb cb, void *ctx);

/** Advance, call back, then sleep until something may be done, a signal comes, or wait_us have
 * passed. */
void kvf_client_progress(kvf_client_t *client, uint64_t wait_us);

#endif
