/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_TCP_IMPL_H
#define KVF_MOVER_TCP_IMPL_H

/**
 * @file
 * The tcp mover from inside: tcp.c (the row, and who listens), tcp_path.c (connections that send),
 * tcp_inbound.c (connections that receive). All functions: agent thread only.
 */

#include "transceiver/mover/routes.h"
#include "transceiver/mover/tcp_wire.h"

typedef struct kvf_tcp kvf_tcp_t;

/** A descriptor in the mover's epoll set. */
typedef struct kvf_tcp_watch {
    int fd; /**< -1: closed */
    /** @param events  Of epoll. */
    void (*ready)(kvf_tcp_t *tcp, struct kvf_tcp_watch *watch, uint32_t events);
} kvf_tcp_watch_t;

struct kvf_tcp {
    kvf_mover_t base;
    const kvf_log_t *log;
    int epoll;
    kvf_routes_t routes; /**< with what all of the mover has: allocator and sink */
    kvf_tcp_watch_t listener;
    uint64_t deaf_until_us; /**< > 0: the listener is not watched, there were no descriptors left */
    bool was_deaf;          /**< and nobody was accepted since */
    kvf_tcp_address_t address;
    /** Connections that have not shown the token, and those that have; the newest last. */
    struct kvf_tcp_inbound *strangers, *peers, *ended; /**< and those that are to be freed */
    uint32_t n_strangers, n_peers;
    uint64_t n_refused;
    uint8_t *scrap; /**< KVF_TCP_CHUNK_BYTES, for what has no place */
};

/** @param events  Of epoll. @return false: errno says why. */
bool kvf_tcp_watch(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch, uint32_t events);
/** End its connection, and close it. A closed one is left alone. */
void kvf_tcp_unwatch(kvf_tcp_t *tcp, kvf_tcp_watch_t *watch);

/* ---- tcp_path.c ---- */

/** Dial. @param[out] route_p  To be listed. Close it, then destroy it. @return KVF_OK;
 * KVF_ERR_NO_MEMORY; KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_tcp_path_create(kvf_tcp_t *tcp, const kvf_tcp_address_t *to,
                                           kvf_route_t **route_p, kvf_detail_t *detail);
extern const kvf_route_ops_t kvf_tcp_path_ops;

/* ---- tcp_inbound.c ---- */

/** Take over a connection that was accepted, and read what is there; without memory it is closed.
 */
void kvf_tcp_inbound_add(kvf_tcp_t *tcp, int fd);
/** Close the oldest connection that has not shown the token, else the oldest one by which nothing
 * has come that was granted. @return Whether there is one. */
bool kvf_tcp_inbound_drop(kvf_tcp_t *tcp);
/** Free what was closed. */
void kvf_tcp_inbound_reap(kvf_tcp_t *tcp);
/** Close and free all. */
void kvf_tcp_inbound_end(kvf_tcp_t *tcp);

#endif
