/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_NODE_HTTP_ERROR_H
#define KVF_NODE_HTTP_ERROR_H

/**
 * @file
 * How a kvf_status_t looks to an HTTP client. The one table of docs/contracts.md "Errors".
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>

/** @return The HTTP status of an error; 500 for unknown numbers, 200 for KVF_OK. @thread any */
unsigned kvf_http_status_of(kvf_status_t status);

/**
 * Whether the engine should prefill the request again: the transfer is lost, and the same request
 * with a new ticket can succeed without anybody changing a request or a configuration.
 *
 * True for deadline, uncovered, digest_mismatch, prefill_failed, used, expired, peer_lost, protocol
 * (the peer's connection is made anew) and unknown (what the request relies on is gone). False for
 * errors of the call, for those that the same call survives a little later (again, busy,
 * no_memory), for cancelled (somebody wanted it so), for forged, peer_refused, incompatible,
 * not_allowed (they would come again), and for a broken agent.
 *
 * @thread any
 */
bool kvf_http_recompute(kvf_status_t status);

/**
 * Add to a message of the library which keys of the configuration it is about.
 *
 * @param[out] text  The message with advice.
 * @return text, or message where there is nothing to add.
 * @thread any
 */
const char *kvf_http_advise(kvf_status_t status, const char *message, char text[KVF_DETAIL_BYTES]);

/**
 * Make the body of an error.
 *
 * @param error    Its name; ASCII.
 * @param message  Any bytes; what is not UTF-8 is replaced.
 * @return {"error", "message", "recompute"} as a JSON line; free() it. NULL without memory.
 * @thread any
 */
char *kvf_http_error_body(const char *error, const char *message, bool recompute);

#endif
