/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_LOG_H
#define KVF_BASE_LOG_H

/**
 * @file
 * The log table. kvmgr, proto and kernels do not log; the first detector of a foreign error does,
 * and the transceiver once with peer and transfer id. Never KV bytes, keys or tickets.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>

/** By volume: once per fault, per odd event, per peer, per transfer, per message. */
typedef enum kvf_log_level {
    KVF_LOG_ERROR,
    KVF_LOG_WARN,
    KVF_LOG_INFO,
    KVF_LOG_DEBUG,
    KVF_LOG_TRACE
} kvf_log_level_t;

typedef struct kvf_log {
    /** Take one line, without newline, lower case; text is borrowed for the call. */
    void (*write)(void *ctx, kvf_log_level_t level, const char *text);
    void *ctx;
    kvf_log_level_t level; /**< lines above it are not made */
} kvf_log_t;

/** Lines go to stderr as `kvferry LEVEL text`. @return A table of that level. @thread any */
kvf_log_t kvf_log_stderr(kvf_log_level_t level);

/** @return "error".."trace". Static storage; any thread. */
const char *kvf_log_level_name(kvf_log_level_t level);

/** Make and write one line when the table wants its level; log may be NULL. @thread the table's */
void kvf_log(const kvf_log_t *log, kvf_log_level_t level, const char *fmt, ...) KVF_PRINTF(3, 4);

#endif
