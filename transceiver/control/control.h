/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CONTROL_H
#define KVF_CONTROL_H

/**
 * @file
 * The control channel: byte streams between agents, on a libuv loop. It carries bytes and knows no
 * message; whoever uses it cannot tell whether TLS lies below. TCP on loopback in this version.
 * Agent thread only. libuv writes with write(2), so the thread that runs the loop must ignore or
 * block SIGPIPE.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/log.h"

#include <stdbool.h>
#include <stdint.h>

struct uv_loop_s;

typedef struct kvf_control kvf_control_t;

/** What a channel tells. Never from inside one of its functions. */
typedef struct kvf_control_events {
    /** A connection is ready: a dialled one, or a stranger's.
     *  @param address  The other end's "host:port". */
    void (*opened)(void *ctx, uint64_t conn, bool inbound, const char *address);
    /** Bytes arrived; borrowed for the call. */
    void (*bytes)(void *ctx, uint64_t conn, const uint8_t *data, size_t bytes);
    /** A connection is over, or could not be made: once for each dialled or opened one, unless
     *  closed by us.
     *  @param why  The cause, lower case. */
    void (*closed)(void *ctx, uint64_t conn, const char *why);
    void *ctx;
} kvf_control_events_t;

/** Limits of a channel; all are required. */
typedef struct kvf_control_config {
    const char *listen; /**< "host:port", "[v6]:port"; loopback addresses only; port 0 picks one */
    uint64_t backlog_bytes; /**< unsent bytes of one connection that close it as not reading */
    uint32_t max_conns;     /**< inbound connections at once; more are closed at once */
} kvf_control_config_t;

/**
 * Listen.
 *
 * @param loop  Borrowed.
 * @return KVF_OK; KVF_ERR_INVALID (address); KVF_ERR_UNSUPPORTED (not a loopback address: needs
 *         TLS); KVF_ERR_IO (in use ...: the text says by what name and what to do);
 *         KVF_ERR_NO_MEMORY. After an error, too, the loop must run once more before it can be
 *         closed.
 */
KVF_CHECK kvf_status_t kvf_control_create(const kvf_control_config_t *config,
                                          struct uv_loop_s *loop, const kvf_alloc_t *alloc,
                                          const kvf_control_events_t *events,
                                          kvf_control_t **control_p, kvf_detail_t *detail);

/**
 * Close everything at once, without events; allowed inside an event. The loop must run until its
 * handles are closed (once, or twice after an event) before it and the allocator can go. NULL is
 * allowed.
 */
void kvf_control_destroy(kvf_control_t *control);

/** @return The real "host:port" that is listened on. Owned by control. */
const char *kvf_control_address(const kvf_control_t *control);

/**
 * Connect. `opened` or `closed` follows.
 *
 * @param address      "host:port", numeric; loopback only.
 * @param[out] conn_p  Never 0, never used again.
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_UNSUPPORTED (not loopback); KVF_ERR_NO_MEMORY;
 *         KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_control_dial(kvf_control_t *control, const char *address,
                                        uint64_t *conn_p, kvf_detail_t *detail);

/**
 * Send bytes in order. Also allowed while dialling: they leave when the connection is there. What
 * is sent between two calls of kvf_control_flush() costs one system call for each 32 messages or
 * 16 KiB, and wakes the other end as often.
 *
 * @param data  From the control's allocator; taken over, also on error.
 * @return KVF_OK (also for a connection that broke and whose `closed` has not come yet: the bytes
 *         are lost); KVF_ERR_UNKNOWN (no such connection, or closed by us); KVF_ERR_NO_MEMORY
 *         (nothing of data was sent, and the connection is closed with an event). So is one whose
 *         backlog overflows.
 */
kvf_status_t kvf_control_send(kvf_control_t *control, uint64_t conn, uint8_t *data, size_t bytes);

/** Write what was sent. Whoever runs the loop does it before the loop may sleep; a connection that
 * is closed, and kvf_control_destroy(), do it by themselves. */
void kvf_control_flush(kvf_control_t *control);

/**
 * Close after what was sent has left and the other end has ended too (at most a second). No event
 * follows. Unknown connections are ignored.
 */
void kvf_control_close(kvf_control_t *control, uint64_t conn);

#ifdef KVF_FAIL_POINTS
/** Break every connection of a kvf_control_t, as a network would: both ends hear of it. */
void kvf_control_cut(void *control);
#endif

#endif
