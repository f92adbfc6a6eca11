/* SPDX-License-Identifier: Apache-2.0 */
/* What the agent does with paths of NCCL: one for each peer that it fetches from, one for each that
 * fetches from it. A job to verify what a peer has committed waits here until there is a stage for
 * it; then it is asked for, and comes in. What a peer asks for waits likewise, and is sent. */
#include "transceiver/agent_copy.h"
#include "transceiver/mover/nccl.h"

#include <utlist.h>

typedef struct route {
    kvf_path_t path;
    kvf_nccl_path_t *nccl;
    uint32_t n_busy;     /* jobs that have a stage */
    kvf_serve_t *serves; /* that wait; the path is not own */
} route_t;

typedef struct routes {
    kvf_paths_t paths;
    kvf_nccl_t *nccl;
    kvf_serve_t *refused; /* by paths that have ended */
} routes_t;

static kvf_core_t *core_of(const routes_t *routes) {
    return routes->paths.copier->agent->core;
}

static routes_t *routes_of(const route_t *route) {
    return (routes_t *)route->path.paths;
}

/* ---- jobs ---- */

/* Jobs that will not be begun. */
static void flush(route_t *route) {
    kvf_path_lose_jobs(&route->path);
    while (route->serves != NULL) {
        kvf_serve_t *serve = route->serves;
        LL_DELETE(route->serves, serve);
        kvf_core_served(core_of(routes_of(route)), serve);
    }
}

/* Have the first job come in, and ask for it. @return false: it has to wait. */
static bool fetch(route_t *route) {
    const kvf_paths_t *paths = route->path.paths;
    kvf_nccl_job_t *job = kvf_nccl_take(route->nccl);
    if (job == NULL) {
        return false;
    }
    kvf_verify_t *verify = kvf_path_take_job(&route->path);
    if (!kvf_core_fetch(paths->copier->agent->core, verify, route->path.number)) {
        kvf_nccl_give(route->nccl, job);
        kvf_paths_verified(paths, verify, KVF_ERR_PEER_LOST);
        return true;
    }
    job->n_ranges = verify->n_items;
    job->owner = verify;
    for (uint32_t i = 0; i < verify->n_items; i++) {
        kvf_verify_item_t *item = &verify->items[i];
        item->digest = 0;
        job->ranges[i] = (kvf_nccl_range_t){
            kvf_copier_page(paths->copier, item->group_idx, item->slot, item->offset), item->bytes,
            verify->digests ? &item->digest : NULL};
    }
    route->n_busy++;
    kvf_nccl_post(route->nccl, job);
    return true;
}

/* Send what was asked for first. @return false: it has to wait. */
static bool serve(route_t *route) {
    kvf_serve_t *serve = route->serves;
    kvf_nccl_job_t *job = kvf_nccl_take(route->nccl);
    if (job == NULL) {
        return false;
    }
    LL_DELETE(route->serves, serve);
    job->n_ranges = serve->n_items;
    job->owner = serve;
    for (uint32_t i = 0; i < serve->n_items; i++) {
        job->ranges[i] = (kvf_nccl_range_t){(uint8_t *)(uintptr_t)serve->items[i].source,
                                            serve->items[i].bytes, NULL};
    }
    route->n_busy++;
    kvf_nccl_post(route->nccl, job);
    return true;
}

/* Whether a peer has its share of the stages, over however many paths. */
static bool has_its_share(const route_t *route) {
    const kvf_path_t *other;
    uint32_t n = 0;
    LL_FOREACH(route->path.paths->first, other) {
        bool alike = other->peer == route->path.peer && other->own == route->path.own;
        n += alike ? ((const route_t *)other)->n_busy : 0;
    }
    return n >= KVF_NCCL_STAGES_OF_PATH;
}

/* What a path can do in its turn: one job. @return false: none. */
static bool take_turn(route_t *route) {
    if (route->path.over) {
        flush(route);
        return false;
    }
    if (!route->path.ready || has_its_share(route)) {
        return false;
    }
    return route->path.verifies != NULL ? fetch(route) : route->serves != NULL && serve(route);
}

/* Begin what may be begun. Who has had its turn is the last one of the next round. */
static unsigned begin_jobs(kvf_paths_t *paths) {
    unsigned n = 0;
    for (bool any = true; any; n += any) {
        kvf_path_t *last = paths->first, *path = NULL;
        any = false;
        while (last != NULL && last->next != NULL) {
            last = last->next;
        }
        while (path != last) {
            path = paths->first;
            LL_DELETE(paths->first, path);
            LL_APPEND(paths->first, path);
            any |= take_turn((route_t *)path);
        }
    }
    return n;
}

static void do_serve(kvf_paths_t *paths, kvf_serve_t *serve) {
    route_t *route = (route_t *)kvf_paths_find(paths, serve->peer, false, &serve->path);
    paths->dirty = true;
    if (route != NULL) {
        LL_APPEND(route->serves, serve);
    } else { /* its end crosses the request */
        LL_APPEND(((routes_t *)paths)->refused, serve);
    }
}

static void on_done(void *ctx, void *owner, kvf_nccl_job_t *job, kvf_status_t status) {
    routes_t *routes = ctx;
    route_t *route = owner;
    route->n_busy--;
    routes->paths.dirty = true; /* there is a stage */
    if (route->path.own) {
        kvf_paths_verified(&routes->paths, job->owner, status);
    } else {
        kvf_core_served(core_of(routes), job->owner);
    }
}

/* ---- paths ---- */

static void on_invited(void *ctx, void *owner,
                       const uint8_t invitation[KVF_NCCL_INVITATION_BYTES]) {
    const kvf_path_t *path = owner;
    if (!path->over) {
        kvf_core_invite(core_of(ctx), path->peer, path->number, invitation,
                        KVF_NCCL_INVITATION_BYTES);
    }
}

static void on_ready(void *ctx, void *owner) {
    kvf_path_t *path = owner;
    (void)ctx;
    if (!path->over) { /* else to the core it never was */
        kvf_path_ready(path);
    }
}

static void on_failing(void *ctx, void *owner, const char *why) {
    kvf_path_t *path = owner;
    (void)ctx;
    path->over = true;
    path->paths->dirty = true;
    kvf_path_say_left(path, why);
}

static void on_ended(void *ctx, void *owner, const char *why) {
    route_t *route = owner;
    (void)ctx;
    route->path.over = true;
    flush(route);
    kvf_path_ended(&route->path, why);
}

static kvf_status_t check_address(kvf_paths_t *paths, const void *address, size_t bytes,
                                  kvf_detail_t *detail) {
    return kvf_nccl_check_address(((routes_t *)paths)->nccl, address, bytes, detail);
}

static kvf_status_t invite(kvf_path_t *path, const uint64_t *least, kvf_detail_t *detail) {
    route_t *route = (route_t *)path;
    (void)least; /* what is fetched is in the sender's own bounds */
    kvf_status_t status = kvf_nccl_invite(routes_of(route)->nccl, route, &route->nccl);
    return status == KVF_OK ? status : kvf_fail(detail, status, "no memory for a path to a peer");
}

static kvf_status_t join(kvf_path_t *path, const void *invitation, size_t bytes,
                         kvf_detail_t *detail) {
    route_t *route = (route_t *)path;
    kvf_status_t status =
        kvf_nccl_join(routes_of(route)->nccl, route, invitation, bytes, &route->nccl);
    return status == KVF_OK
               ? status
               : kvf_fail(detail, status, "%s",
                          status == KVF_ERR_INVALID ? "that is no invitation of NCCL"
                                                    : "no memory for a path to a peer");
}

static void end(kvf_path_t *path, const char *why) {
    path->over = true;
    path->paths->dirty = true;
    kvf_nccl_leave(((route_t *)path)->nccl, why);
}

/* ---- life ---- */

static unsigned progress(kvf_paths_t *paths) {
    routes_t *routes = (routes_t *)paths;
    unsigned n = kvf_nccl_progress(routes->nccl);
    while (routes->refused != NULL) {
        kvf_serve_t *serve = routes->refused;
        LL_DELETE(routes->refused, serve);
        kvf_core_left(core_of(routes), serve->peer, serve->path, false, "there is no such path");
        kvf_core_served(core_of(routes), serve);
        n++;
    }
    while (paths->dirty) {
        paths->dirty = false;
        n += begin_jobs(paths);
    }
    return n;
}

static void destroy(kvf_paths_t *paths) {
    routes_t *routes = (routes_t *)paths;
    kvf_nccl_destroy(routes->nccl);
    kvf_paths_drop(paths);
    kvf_free(paths->copier->agent->alloc, routes);
}

static const kvf_paths_ops_t nccl_ops = {.path_bytes = sizeof(route_t),
                                         .check_address = check_address,
                                         .invite = invite,
                                         .join = join,
                                         .end = end,
                                         .serve = do_serve,
                                         .progress = progress,
                                         .destroy = destroy};

kvf_status_t kvf_paths_nccl(kvf_copier_t *copier, void (*wake)(void *ctx), void *ctx,
                            kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    uint8_t address[KVF_NCCL_ADDRESS_BYTES];
    routes_t *routes = kvf_calloc(agent->alloc, 1, sizeof(*routes));
    if (routes == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    const kvf_nccl_events_t events = {on_invited, on_ready, on_done, on_failing, on_ended, routes};
    routes->paths = (kvf_paths_t){.ops = &nccl_ops, .copier = copier};
    kvf_status_t status = kvf_nccl_create(agent->alloc, kvf_cuda_context(agent->cuda), &events,
                                          wake, ctx, &routes->nccl, detail);
    if (status != KVF_OK) {
        kvf_free(agent->alloc, routes);
        return status;
    }
    kvf_nccl_address(routes->nccl, address);
    copier->paths = &routes->paths;
    return kvf_core_set_mapped_address(agent->core, address, sizeof(address));
}
