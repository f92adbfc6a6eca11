/* SPDX-License-Identifier: Apache-2.0 */
#define HASH_FUNCTION HASH_FNV
#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(routes->alloc, bytes)
#define uthash_free(ptr, bytes) kvf_free(routes->alloc, ptr)
#define uthash_nonfatal_oom(route) (route)->unlisted = true
#include "transceiver/mover/routes.h"

#include <stdio.h>
#include <utlist.h>

#define MAX_ROUTES 4096U /* those that are ending included */

static kvf_route_t *find(const kvf_routes_t *routes, uint64_t peer) {
    kvf_route_t *route;
    HASH_FIND(hh, routes->by_peer, &peer, sizeof(peer), route);
    return route;
}

kvf_status_t kvf_routes_check(kvf_routes_t *routes, uint64_t peer, kvf_detail_t *detail) {
    if (peer == 0 || find(routes, peer) != NULL || routes->ending) {
        return kvf_fail(detail, KVF_ERR_INVALID, "peer number %llu is in use",
                        (unsigned long long)peer);
    }
    return routes->n < MAX_ROUTES
               ? KVF_OK
               : kvf_fail(detail, KVF_ERR_AGAIN, "%u paths are open or closing", MAX_ROUTES);
}

kvf_status_t kvf_routes_add(kvf_routes_t *routes, kvf_route_t *route, uint64_t peer,
                            kvf_detail_t *detail) {
    route->peer = peer;
    HASH_ADD(hh, routes->by_peer, peer, sizeof(route->peer), route);
    if (route->unlisted) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    kvf_queue_init(&route->queue);
    DL_APPEND(routes->all, route);
    routes->n++;
    return KVF_OK;
}

static void leave(kvf_routes_t *routes, kvf_route_t *route) {
    HASH_DELETE(hh, routes->by_peer, route);
    route->gone = true;
    route->told = true;
}

void kvf_routes_leave(kvf_routes_t *routes, uint64_t peer) {
    kvf_route_t *route = find(routes, peer);
    if (route != NULL) {
        leave(routes, route);
    }
}

kvf_status_t kvf_routes_post(kvf_routes_t *routes, kvf_window_t *window) {
    kvf_route_t *route = find(routes, window->peer);
    return route == NULL || route->broken ? KVF_ERR_PEER_LOST
                                          : kvf_queue_post(&route->queue, window);
}

void kvf_route_break(kvf_route_t *route, const char *why) {
    if (!route->broken) {
        route->broken = true;
        (void)snprintf(route->why, sizeof(route->why), "%s", why);
        kvf_queue_stop(&route->queue);
    }
}

/* The next route that can send; its turn is over when it has sent enough. */
static kvf_route_t *next_turn(const kvf_routes_t *routes, const kvf_route_ops_t *ops) {
    kvf_route_t *route;
    DL_FOREACH(routes->all, route) {
        if (!route->closed && !route->gone && ops->can_send(route)) {
            return route;
        }
    }
    return NULL;
}

unsigned kvf_routes_send(kvf_routes_t *routes, const kvf_route_ops_t *ops, uint64_t turn,
                         uint64_t most) {
    unsigned n = 0;
    uint64_t sent = 0;
    kvf_route_t *route;
    while (sent < most && (route = next_turn(routes, ops)) != NULL) {
        DL_DELETE(routes->all, route);
        DL_APPEND(routes->all, route);
        for (uint64_t bytes = 0; bytes < turn && ops->can_send(route); n++) {
            uint64_t some = ops->send(route);
            bytes += some;
            sent += some;
        }
    }
    return n;
}

/* A route about which the sink must be told something. */
static kvf_route_t *next_news(const kvf_routes_t *routes) {
    kvf_route_t *route;
    DL_FOREACH(routes->all, route) {
        if (route->queue.done != NULL || (!route->told && route->broken)) {
            return route;
        }
    }
    return NULL;
}

/* Windows before the path that carried them. */
static unsigned tell(kvf_routes_t *routes) {
    unsigned n = 0;
    for (kvf_route_t *route; (route = next_news(routes)) != NULL; n++) {
        kvf_status_t status;
        kvf_window_t *window = kvf_queue_take(&route->queue, &status);
        if (window != NULL) {
            routes->sink.moved(routes->sink.ctx, window, status);
        } else {
            route->told = true;
            routes->sink.broken(routes->sink.ctx, route->peer, route->why);
        }
    }
    return n;
}

unsigned kvf_routes_tend(kvf_routes_t *routes, const kvf_route_ops_t *ops) {
    kvf_route_t *route, *next;
    DL_FOREACH(routes->all, route) {
        if ((route->gone || route->broken) && !route->closed) {
            kvf_route_break(route, "disconnected");
            ops->close(route);
            route->closed = true;
            kvf_queue_drop(&route->queue);
        }
    }
    unsigned n = tell(routes);
    DL_FOREACH_SAFE(routes->all, route, next) {
        if (route->gone && route->closed && route->queue.n_jobs == 0) {
            DL_DELETE(routes->all, route);
            routes->n--;
            ops->destroy(route);
        }
    }
    return n;
}

bool kvf_routes_busy(const kvf_routes_t *routes, const kvf_route_ops_t *ops) {
    const kvf_route_t *route;
    DL_FOREACH(routes->all, route) {
        if (route->gone || (route->broken && !route->closed)) {
            return true;
        }
    }
    return next_turn(routes, ops) != NULL || next_news(routes) != NULL;
}

void kvf_routes_end(kvf_routes_t *routes, const kvf_route_ops_t *ops) {
    kvf_route_t *route, *next;
    routes->ending = true;
    HASH_ITER(hh, routes->by_peer, route, next) {
        leave(routes, route);
    }
    (void)kvf_routes_tend(routes, ops);
}
