/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_ENDED_H
#define KVF_TOOLS_NODE_ENDED_H

/**
 * @file
 * What became of the last requests: a bounded table of texts by request id. The oldest record makes
 * room for a new one. One thread at a time.
 */

#include "kvmgr/base/alloc.h"

#include <stdbool.h>

typedef struct kvf_ended kvf_ended_t;

/** @param capacity  Records that are kept, > 0. @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_ended_create(const kvf_alloc_t *alloc, size_t capacity,
                                        kvf_ended_t **ended_p);

/** NULL is allowed. */
void kvf_ended_destroy(kvf_ended_t *ended);

/**
 * Keep a text; it replaces an older one of the same id. Without memory there is no record: not
 * worth an error.
 *
 * @param refused  It is about a run that was turned away: it replaces only another such text.
 */
void kvf_ended_put(kvf_ended_t *ended, const char *request_id, const char *text, bool refused);

/** @return The text, until the next call; NULL when there is none. */
const char *kvf_ended_get(const kvf_ended_t *ended, const char *request_id);

#endif
