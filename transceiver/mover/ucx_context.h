/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_CONTEXT_H
#define KVF_MOVER_UCX_CONTEXT_H

/**
 * @file
 * What the UCX files share: the context, the translation of UCX's status codes, and where its
 * messages go.
 */

#include "transceiver/mover/ucx.h"

#include <ucp/api/ucp.h>

struct kvf_ucx {
    const kvf_alloc_t *alloc;
    kvf_log_t log;
    ucp_context_h context;
    char tls[128]; /**< as asked for, for texts */
};

/**
 * While a scope is open on a thread, what UCX says on it goes to that log instead of stderr, and
 * the first thing it said stays there for the text of an error.
 */
typedef struct kvf_ucx_scope {
    const kvf_log_t *log;
    struct kvf_ucx_scope *outer;
    char said[256]; /**< "" when it said nothing */
} kvf_ucx_scope_t;

/** Open a scope. @param scope  Caller's memory, until left on the same thread. @param log Borrowed;
 * may be NULL. */
void kvf_ucx_scope_enter(kvf_ucx_scope_t *scope, const kvf_log_t *log);

/** Close the innermost scope. @thread the one that opened it */
void kvf_ucx_scope_leave(kvf_ucx_scope_t *scope);

/** @return UCX's code as ours: no memory, path to a peer, not supported, argument; else KVF_ERR_IO.
 * @thread any */
kvf_status_t kvf_ucx_status(ucs_status_t status);

#endif
