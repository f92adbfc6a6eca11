/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_ROUTES_H
#define KVF_MOVER_ROUTES_H

/**
 * @file
 * The ways of a mover to its peers: found by number, taking turns, with their windows, and with
 * what the sink has to be told of them.
 *
 * For movers that send chunks; a route is the first member of what they keep for a peer. All
 * functions: agent thread only.
 */

#include "transceiver/mover/queue.h"

#include <uthash.h>

/** A way to one peer. Its fields are the routes'. */
typedef struct kvf_route {
    uint64_t peer;
    kvf_queue_t queue;
    bool broken; /**< takes no more windows; why says the reason */
    char why[160];
    bool told;     /**< the sink knows that it is broken, or need not */
    bool gone;     /**< disconnected */
    bool closed;   /**< nothing of its windows is read any more */
    bool unlisted; /**< no memory to list it in by_peer */
    struct kvf_route *prev, *next;
    UT_hash_handle hh;
} kvf_route_t;

typedef struct kvf_routes {
    const kvf_alloc_t *alloc;
    kvf_mover_sink_t sink;
    kvf_route_t *by_peer; /**< connected, broken ones included */
    kvf_route_t *all;     /**< in the order of their turns; those that are ending, too */
    uint32_t n;
    bool ending;
} kvf_routes_t;

/** What a mover does for a route. */
typedef struct kvf_route_ops {
    /** @return Whether send has something to do. */
    bool (*can_send)(const kvf_route_t *route);
    /** Send some; only when it can. @return Bytes. */
    uint64_t (*send)(kvf_route_t *route);
    /** Make sure that nothing of its windows is read any more. */
    void (*close)(kvf_route_t *route);
    /** Free it. It was closed, and its windows were taken. */
    void (*destroy)(kvf_route_t *route);
} kvf_route_ops_t;

/** @return KVF_OK: a route to that peer may be made; KVF_ERR_INVALID (0, or there is one);
 * KVF_ERR_AGAIN (there are too many). */
KVF_CHECK kvf_status_t kvf_routes_check(kvf_routes_t *routes, uint64_t peer, kvf_detail_t *detail);

/** List a new route, of which all is zero; after kvf_routes_check(). @return KVF_OK,
 * KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_routes_add(kvf_routes_t *routes, kvf_route_t *route, uint64_t peer,
                                      kvf_detail_t *detail);

/** Give a route up; kvf_routes_tend() closes it. Unknown peers are ignored. */
void kvf_routes_leave(kvf_routes_t *routes, uint64_t peer);

/** @return As kvf_mover_ops_t.post. */
KVF_CHECK kvf_status_t kvf_routes_post(kvf_routes_t *routes, kvf_window_t *window);

/** It takes nothing more; kvf_routes_tend() closes it. Only marks it, and only once. */
void kvf_route_break(kvf_route_t *route, const char *why);

/** Send in turns, `turn` bytes each, until `most` bytes were sent. @return How often. */
unsigned kvf_routes_send(kvf_routes_t *routes, const kvf_route_ops_t *ops, uint64_t turn,
                         uint64_t most);

/** Close what is broken or given up, tell the sink what ended (it may post, connect and
 * disconnect), free what nobody waits for. @return How much was told. */
unsigned kvf_routes_tend(kvf_routes_t *routes, const kvf_route_ops_t *ops);

/** @return Whether kvf_routes_send() or kvf_routes_tend() has something to do. */
bool kvf_routes_busy(const kvf_routes_t *routes, const kvf_route_ops_t *ops);

/** Give all up and tell of all windows. */
void kvf_routes_end(kvf_routes_t *routes, const kvf_route_ops_t *ops);

#endif
