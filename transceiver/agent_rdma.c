/* SPDX-License-Identifier: Apache-2.0 */
/* What the agent does with paths of the mover rdma: one for each peer that it reads from, one for
 * each that reads from it. What a peer has committed is read into its page, then digested as
 * anything that is there. */
#include "proto/message.h"
#include "transceiver/agent_copy.h"
#include "transceiver/control/address.h"
#include "transceiver/mover/ucx_rdma.h"

#include <stdio.h>
#include <string.h>
#include <utlist.h>

/* Jobs of a path that are being read; and how often more are begun in a turn. */
#define JOBS_AT_ONCE 4
#define TURN_ROUNDS 4

_Static_assert(KVF_UCX_ANSWER_BYTES <= KVF_ANSWER_BYTES &&
                   KVF_RDMA_ADDRESS_BYTES <= KVF_INVITATION_BYTES,
               "what the messages take");
_Static_assert(KVF_VERIFY_ITEMS <= KVF_RDMA_READS, "a job alone is begun as a whole");

struct route;

/* A job that is being read. */
typedef struct reading {
    kvf_rdma_batch_t batch;
    struct route *route;
    kvf_verify_t *verify; /* NULL: this one is free */
    uint32_t n_begun;     /* items */
} reading_t;

typedef struct route {
    kvf_path_t path;
    kvf_rdma_path_t *rdma; /* NULL: there is none yet, or it was closed */
    bool say_due;          /* own: invite the other end; else: answer it */
    char why[KVF_DETAIL_BYTES];
    reading_t readings[JOBS_AT_ONCE];
    uint64_t least[KVF_MAX_GROUPS]; /* lengths of the peer's pools */
    uint8_t *answer;                /* say_due, and not own */
    size_t answer_bytes;
} route_t;

typedef struct routes {
    kvf_paths_t paths;
    kvf_ucx_t *ucx;
    kvf_rdma_t *rdma;
} routes_t;

static routes_t *routes_of(const route_t *route) {
    return (routes_t *)route->path.paths;
}

static const kvf_agent_t *agent_of(const route_t *route) {
    return route->path.paths->copier->agent;
}

/* End it at once: nothing of ours is read by it any more, and nothing comes by it. What the core
 * has to hear of that comes in the next progress. */
static void end(kvf_path_t *path, const char *why) {
    route_t *route = (route_t *)path;
    if (path->over) {
        return;
    }
    path->over = true;
    path->paths->dirty = true;
    (void)snprintf(route->why, sizeof(route->why), "%s", why);
    if (route->rdma != NULL) {
        kvf_rdma_close(route->rdma);
        route->rdma = NULL;
    }
    for (uint32_t i = 0; i < JOBS_AT_ONCE; i++) {
        if (route->readings[i].verify != NULL && !route->readings[i].batch.sealed) {
            route->readings[i].batch.status = KVF_ERR_PEER_LOST;
            kvf_rdma_seal(routes_of(route)->rdma, &route->readings[i].batch);
        }
    }
}

/* ---- jobs ---- */

/* Its bytes are there: what is left is what any job of such bytes needs. */
static void on_done(void *ctx, kvf_rdma_batch_t *batch) {
    routes_t *routes = ctx;
    reading_t *reading = (reading_t *)batch;
    kvf_verify_t *verify = reading->verify;
    reading->verify = NULL;
    routes->paths.dirty = true; /* there is room for another one */
    if (batch->status != KVF_OK) {
        kvf_paths_verified(&routes->paths, verify, KVF_ERR_PEER_LOST);
    } else {
        verify->peer = 0;
        kvf_copier_verify(routes->paths.copier, verify);
    }
}

/* Begin what may be begun of a job. @return false: it has to wait. */
static bool read_on(reading_t *reading) {
    const route_t *route = reading->route;
    const kvf_agent_t *agent = agent_of(route);
    const kvf_verify_t *verify = reading->verify;
    while (reading->n_begun < verify->n_items) {
        const kvf_verify_item_t *item = &verify->items[reading->n_begun];
        kvf_status_t status = kvf_rdma_read(
            route->rdma, &reading->batch, item->group_idx,
            kvf_copier_page(route->path.paths->copier, item->group_idx, item->slot, item->offset),
            (uint64_t)item->source_slot * agent->pools[item->group_idx].page_bytes + item->offset,
            item->bytes);
        if (status == KVF_ERR_AGAIN) {
            return false;
        }
        if (status != KVF_OK) {
            reading->batch.status = status;
            break;
        }
        reading->n_begun++;
    }
    kvf_rdma_seal(routes_of(route)->rdma, &reading->batch);
    return true;
}

/* In the order in which the jobs came. */
static void begin_jobs(route_t *route) {
    for (uint32_t i = 0; i < JOBS_AT_ONCE; i++) { /* at most one of them is not begun as a whole */
        reading_t *reading = &route->readings[i];
        if (reading->verify != NULL && !reading->batch.sealed && !read_on(reading)) {
            return;
        }
    }
    for (uint32_t i = 0; i < JOBS_AT_ONCE && route->path.verifies != NULL; i++) {
        reading_t *reading = &route->readings[i];
        if (reading->verify == NULL) {
            *reading = (reading_t){.route = route, .verify = kvf_path_take_job(&route->path)};
            if (!read_on(reading)) {
                return;
            }
        }
    }
}

static bool is_reading(const route_t *route) {
    for (uint32_t i = 0; i < JOBS_AT_ONCE; i++) {
        if (route->readings[i].verify != NULL) {
            return true;
        }
    }
    return false;
}

/* ---- paths ---- */

static void on_ready(void *ctx, void *owner) {
    (void)ctx;
    kvf_path_ready(owner);
}

static void on_failed(void *ctx, void *owner, const char *why) {
    (void)ctx;
    end(owner, why);
}

static kvf_status_t check_address(kvf_paths_t *paths, const void *address, size_t bytes,
                                  kvf_detail_t *detail) {
    return kvf_rdma_check_address(((routes_t *)paths)->rdma, address, bytes, detail);
}

static kvf_status_t invite(kvf_path_t *path, const uint64_t *least, kvf_detail_t *detail) {
    route_t *route = (route_t *)path;
    (void)detail;
    memcpy(route->least, least, agent_of(route)->layout.n_groups * sizeof(*least));
    route->say_due = true;
    path->paths->dirty = true;
    return KVF_OK;
}

static kvf_status_t join(kvf_path_t *path, const void *invitation, size_t bytes,
                         kvf_detail_t *detail) {
    route_t *route = (route_t *)path;
    const kvf_alloc_t *alloc = agent_of(route)->alloc;
    kvf_rdma_t *rdma = routes_of(route)->rdma;
    kvf_status_t status = kvf_rdma_check_address(rdma, invitation, bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    route->answer = kvf_alloc(alloc, KVF_UCX_ANSWER_BYTES);
    if (route->answer == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    status = kvf_rdma_lend(rdma, route, &route->rdma, route->answer, &route->answer_bytes, detail);
    if (status != KVF_OK) {
        kvf_free(alloc, route->answer);
        return status;
    }
    route->say_due = true;
    path->paths->dirty = true;
    return KVF_OK;
}

static void joined(kvf_path_t *path, const void *answer, size_t bytes) {
    route_t *route = (route_t *)path;
    kvf_detail_t detail = {""};
    if (route->rdma == NULL && /* else it is said twice */
        kvf_rdma_open(routes_of(route)->rdma, route, answer, bytes, route->least, &route->rdma,
                      &detail) != KVF_OK) {
        end(path, detail.text);
    }
    path->paths->dirty = true;
}

/* ---- turns ---- */

static void forget_answer(route_t *route) {
    kvf_free(agent_of(route)->alloc, route->answer);
    route->answer = NULL;
}

static void say(route_t *route) {
    const kvf_path_t *path = &route->path;
    kvf_core_t *core = agent_of(route)->core;
    route->say_due = false;
    if (path->own) {
        uint8_t invitation[KVF_RDMA_ADDRESS_BYTES];
        kvf_rdma_address(routes_of(route)->rdma, invitation);
        kvf_core_invite(core, path->peer, path->number, invitation, sizeof(invitation));
    } else {
        kvf_core_answer(core, path->peer, path->number, route->answer, route->answer_bytes);
        forget_answer(route);
    }
}

/* One thing that waits; what the core is told of may change the list. @return false: none. */
static bool step(kvf_paths_t *paths) {
    kvf_path_t *path;
    LL_FOREACH(paths->first, path) {
        route_t *route = (route_t *)path;
        if (path->over && !is_reading(route)) {
            forget_answer(route);
            kvf_path_ended(path, route->why);
            return true;
        }
        if (route->say_due && !path->over) {
            say(route);
            return true;
        }
    }
    return false;
}

static unsigned progress(kvf_paths_t *paths) {
    kvf_rdma_t *rdma = ((routes_t *)paths)->rdma;
    unsigned n = kvf_rdma_progress(rdma);
    for (uint32_t i = 0; i < TURN_ROUNDS && paths->dirty; i++) { /* what is left: the next turn */
        kvf_path_t *path;
        paths->dirty = false;
        while (step(paths)) {
            n++;
        }
        LL_FOREACH(paths->first, path) {
            if (path->ready && !path->over) {
                begin_jobs((route_t *)path);
            }
        }
        n += kvf_rdma_progress(rdma); /* begins what was posted; much may be done */
    }
    return n;
}

static int fd_of(const kvf_paths_t *paths) {
    return kvf_rdma_fd(((const routes_t *)paths)->rdma);
}

static bool arm(const kvf_paths_t *paths) {
    return !paths->dirty && kvf_rdma_arm(((const routes_t *)paths)->rdma);
}

/* ---- life ---- */

static void destroy(kvf_paths_t *paths) {
    routes_t *routes = (routes_t *)paths;
    kvf_path_t *path;
    kvf_rdma_destroy(routes->rdma);
    LL_FOREACH(paths->first, path) {
        forget_answer((route_t *)path);
    }
    kvf_paths_drop(paths);
    kvf_ucx_destroy(routes->ucx);
    kvf_free(paths->copier->agent->alloc, routes);
}

static const kvf_paths_ops_t rdma_ops = {.path_bytes = sizeof(route_t),
                                         .check_address = check_address,
                                         .invite = invite,
                                         .join = join,
                                         .joined = joined,
                                         .end = end,
                                         .progress = progress,
                                         .fd = fd_of,
                                         .arm = arm,
                                         .destroy = destroy};

kvf_status_t kvf_paths_rdma(kvf_copier_t *copier, kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    const bool on_device = agent->cuda != NULL;
    char host[KVF_ADDRESS_TEXT_BYTES];
    uint8_t address[KVF_RDMA_ADDRESS_BYTES];
    kvf_rdma_pool_t pools[KVF_MAX_GROUPS];
    routes_t *routes = kvf_calloc(agent->alloc, 1, sizeof(*routes));
    if (routes == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    kvf_address_host(&agent->host, host);
    const kvf_ucx_config_t ucx = {.tls = agent->config.ucx_tls,
                                  .devices = agent->config.ucx_devices,
                                  .listen_host = host,
                                  .use = on_device ? KVF_UCX_DEVICE_READS : KVF_UCX_READS,
                                  .over_software = kvf_agent_rdma_over_software};
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, routes};
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        pools[g] =
            (kvf_rdma_pool_t){agent->pools[g].mem.base, agent->pools[g].mem.bytes, on_device};
    }
    routes->paths = (kvf_paths_t){.ops = &rdma_ops, .copier = copier};
    kvf_status_t status = kvf_ucx_create(&ucx, agent->alloc, &agent->log, &routes->ucx, detail);
    if (status == KVF_OK) {
        status = kvf_rdma_create(routes->ucx, pools, agent->layout.n_groups, &events, &routes->rdma,
                                 detail);
    }
    if (status != KVF_OK) {
        kvf_ucx_destroy(routes->ucx);
        kvf_free(agent->alloc, routes);
        return status;
    }
    copier->paths = &routes->paths;
    kvf_rdma_address(routes->rdma, address);
    return kvf_core_set_mapped_address(agent->core, address, sizeof(address));
}
