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

/* One end of a path. */
typedef struct route {
    kvf_routing_t *routing;
    kvf_rdma_path_t *path; /* NULL: there is none yet, or it was closed */
    uint64_t peer;
    uint64_t number; /* the receiver's */
    bool own;        /* we read */
    bool say_due;    /* own: invite the other end; else: answer it */
    bool ready;
    bool over;     /* it is closed; the core has still to hear of it */
    bool unmapped; /* the core has given it up, if it is ours */
    bool heard;    /* the other end knows of its end */
    char why[KVF_DETAIL_BYTES];
    kvf_job_t *verifies; /* that wait */
    reading_t readings[JOBS_AT_ONCE];
    uint64_t least[KVF_MAX_GROUPS]; /* lengths of the peer's pools */
    uint8_t *answer;                /* say_due, and not own */
    size_t answer_bytes;
    struct route *next;
} route_t;

struct kvf_routing {
    kvf_copier_t *copier;
    kvf_ucx_t *ucx;
    kvf_rdma_t *rdma;
    route_t *first;
    uint64_t n_made;
    bool dirty; /* something waits that was not looked at */
};

static kvf_core_t *core_of(const kvf_routing_t *routing) {
    return routing->copier->agent->core;
}

static route_t *find(const kvf_routing_t *routing, uint64_t peer, bool own,
                     const uint64_t *number) {
    route_t *route;
    LL_FOREACH(routing->first, route) {
        if (route->peer == peer && route->own == own && !route->over &&
            (number == NULL || route->number == *number)) {
            break;
        }
    }
    return route;
}

static route_t *add_route(kvf_routing_t *routing, uint64_t peer, uint64_t number, bool own) {
    route_t *route = kvf_calloc(routing->copier->agent->alloc, 1, sizeof(*route));
    if (route != NULL) {
        route->routing = routing;
        route->peer = peer;
        route->number = number;
        route->own = own;
        LL_APPEND(routing->first, route);
    }
    return route;
}

static void drop_route(route_t *route) {
    const kvf_alloc_t *alloc = route->routing->copier->agent->alloc;
    LL_DELETE(route->routing->first, route);
    kvf_free(alloc, route->answer);
    kvf_free(alloc, route);
}

/* End it at once: nothing of ours is read by it any more, and nothing comes by it. What the core
 * has to hear of that comes in the next progress. */
static void end_route(route_t *route, const char *why) {
    if (route->over) {
        return;
    }
    route->over = true;
    route->routing->dirty = true;
    (void)snprintf(route->why, sizeof(route->why), "%s", why);
    if (route->path != NULL) {
        kvf_rdma_close(route->path);
        route->path = NULL;
    }
    for (uint32_t i = 0; i < JOBS_AT_ONCE; i++) {
        if (route->readings[i].verify != NULL && !route->readings[i].batch.sealed) {
            route->readings[i].batch.status = KVF_ERR_PEER_LOST;
            kvf_rdma_seal(route->routing->rdma, &route->readings[i].batch);
        }
    }
}

/* ---- jobs ---- */

static void lost(const kvf_routing_t *routing, kvf_verify_t *verify) {
    verify->status = KVF_ERR_PEER_LOST;
    kvf_core_verified(core_of(routing), verify);
}

bool kvf_routing_verify(kvf_routing_t *routing, kvf_verify_t *verify) {
    route_t *route = find(routing, verify->peer, true, NULL);
    kvf_job_t *job = &verify->job;
    if (route != NULL) {
        LL_APPEND(route->verifies, job);
        routing->dirty = true;
    }
    return route != NULL;
}

/* Its bytes are there: what is left is what any job of such bytes needs. */
static void on_done(void *ctx, kvf_rdma_batch_t *batch) {
    kvf_routing_t *routing = ctx;
    reading_t *reading = (reading_t *)batch;
    kvf_verify_t *verify = reading->verify;
    reading->verify = NULL;
    routing->dirty = true; /* there is room for another one */
    if (batch->status != KVF_OK) {
        lost(routing, verify);
    } else {
        verify->peer = 0;
        kvf_copier_verify(routing->copier, verify);
    }
}

/* Begin what may be begun of a job. @return false: it has to wait. */
static bool read_on(reading_t *reading) {
    const route_t *route = reading->route;
    const kvf_agent_t *agent = route->routing->copier->agent;
    const kvf_verify_t *verify = reading->verify;
    while (reading->n_begun < verify->n_items) {
        const kvf_verify_item_t *item = &verify->items[reading->n_begun];
        kvf_status_t status = kvf_rdma_read(
            route->path, &reading->batch, item->group_idx,
            kvf_copier_page(route->routing->copier, item->group_idx, item->slot, item->offset),
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
    kvf_rdma_seal(route->routing->rdma, &reading->batch);
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
    for (uint32_t i = 0; i < JOBS_AT_ONCE && route->verifies != NULL; i++) {
        reading_t *reading = &route->readings[i];
        if (reading->verify == NULL) {
            kvf_job_t *job = route->verifies;
            LL_DELETE(route->verifies, job);
            *reading = (reading_t){.route = route, .verify = (kvf_verify_t *)job};
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
    route_t *route = owner;
    (void)ctx;
    route->ready = true;
    kvf_core_mapped(core_of(route->routing), route->peer, KVF_OK, "");
}

static void on_failed(void *ctx, void *owner, const char *why) {
    (void)ctx;
    end_route(owner, why);
}

kvf_status_t kvf_routing_map(kvf_routing_t *routing, uint64_t peer, const void *address,
                             size_t bytes, const uint64_t *least, kvf_detail_t *detail) {
    kvf_status_t status = kvf_rdma_check_address(routing->rdma, address, bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    route_t *route = add_route(routing, peer, routing->n_made + 1, true);
    if (route == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    routing->n_made++;
    memcpy(route->least, least, routing->copier->agent->layout.n_groups * sizeof(*least));
    route->say_due = true;
    routing->dirty = true;
    return KVF_OK;
}

void kvf_routing_unmap(kvf_routing_t *routing, uint64_t peer) {
    route_t *route;
    LL_FOREACH(routing->first, route) {
        if (route->peer == peer && route->own && !route->unmapped) {
            route->unmapped = true;
            end_route(route, "the receiver has given the sender up");
        }
    }
}

kvf_status_t kvf_routing_join(kvf_routing_t *routing, uint64_t peer, uint64_t number,
                              const void *invitation, size_t bytes, kvf_detail_t *detail) {
    const kvf_alloc_t *alloc = routing->copier->agent->alloc;
    kvf_status_t status = kvf_rdma_check_address(routing->rdma, invitation, bytes, detail);
    if (status == KVF_OK && find(routing, peer, false, &number) != NULL) {
        status = kvf_fail(detail, KVF_ERR_INVALID, "there is a path of that number");
    }
    if (status != KVF_OK) {
        return status;
    }
    route_t *route = add_route(routing, peer, number, false);
    if (route != NULL) {
        route->answer = kvf_alloc(alloc, KVF_UCX_ANSWER_BYTES);
    }
    status = route == NULL || route->answer == NULL
                 ? kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer")
                 : kvf_rdma_lend(routing->rdma, route, &route->path, route->answer,
                                 &route->answer_bytes, detail);
    if (status != KVF_OK && route != NULL) {
        drop_route(route);
    }
    if (status == KVF_OK) {
        route->say_due = true;
        routing->dirty = true;
    }
    return status;
}

void kvf_routing_joined(kvf_routing_t *routing, uint64_t peer, uint64_t number, const void *answer,
                        size_t bytes) {
    route_t *route = find(routing, peer, true, &number);
    kvf_detail_t detail = {""};
    if (route == NULL || route->path != NULL) {
        return; /* it crossed the end of that path; or it is said twice */
    }
    if (kvf_rdma_open(routing->rdma, route, answer, bytes, route->least, &route->path, &detail) !=
        KVF_OK) {
        end_route(route, detail.text);
    }
    routing->dirty = true;
}

void kvf_routing_leave(kvf_routing_t *routing, uint64_t peer, uint64_t number, bool own,
                       const char *why) {
    route_t *route = find(routing, peer, own, &number);
    char text[KVF_DETAIL_BYTES];
    if (route != NULL) {
        route->heard = true;
        (void)snprintf(text, sizeof(text), "the other end has left: %.300s", why);
        end_route(route, text);
    }
}

void kvf_routing_evict(kvf_routing_t *routing, uint64_t peer) {
    route_t *route;
    LL_FOREACH(routing->first, route) {
        if (route->peer == peer && !route->own) {
            end_route(route, "the sender has given the receiver up");
        }
    }
}

/* ---- turns ---- */

static void say(route_t *route) {
    kvf_core_t *core = core_of(route->routing);
    route->say_due = false;
    if (route->own) {
        uint8_t invitation[KVF_RDMA_ADDRESS_BYTES];
        kvf_rdma_address(route->routing->rdma, invitation);
        kvf_core_invite(core, route->peer, route->number, invitation, sizeof(invitation));
    } else {
        kvf_core_answer(core, route->peer, route->number, route->answer, route->answer_bytes);
        kvf_free(route->routing->copier->agent->alloc, route->answer);
        route->answer = NULL;
    }
}

/* It has ended, and so have the jobs that were being read. */
static void tell_end(route_t *route) {
    kvf_routing_t *routing = route->routing;
    kvf_core_t *core = core_of(routing);
    while (route->verifies != NULL) {
        kvf_job_t *job = route->verifies;
        LL_DELETE(route->verifies, job);
        lost(routing, (kvf_verify_t *)job);
    }
    if (!route->heard) {
        kvf_core_left(core, route->peer, route->number, route->own, route->why);
    }
    if (!route->own) {
        kvf_core_returned(core, route->peer);
    } else if (!route->unmapped && route->ready) {
        kvf_core_unmapped(core, route->peer, route->why);
    } else if (!route->unmapped) {
        kvf_core_mapped(core, route->peer, KVF_ERR_IO, route->why);
    }
    drop_route(route);
}

/* One thing that waits; what the core is told of may change the list. @return false: none. */
static bool step(kvf_routing_t *routing) {
    route_t *route;
    LL_FOREACH(routing->first, route) {
        if (route->over && !is_reading(route)) {
            tell_end(route);
            return true;
        }
        if (route->say_due && !route->over) {
            say(route);
            return true;
        }
    }
    return false;
}

unsigned kvf_routing_progress(kvf_routing_t *routing) {
    unsigned n = kvf_rdma_progress(routing->rdma);
    for (uint32_t i = 0; i < TURN_ROUNDS && routing->dirty; i++) { /* what is left: the next turn */
        route_t *route;
        routing->dirty = false;
        while (step(routing)) {
            n++;
        }
        LL_FOREACH(routing->first, route) {
            if (route->ready && !route->over) {
                begin_jobs(route);
            }
        }
        n += kvf_rdma_progress(routing->rdma); /* begins what was posted; much may be done */
    }
    return n;
}

int kvf_routing_fd(const kvf_routing_t *routing) {
    return kvf_rdma_fd(routing->rdma);
}

bool kvf_routing_arm(const kvf_routing_t *routing) {
    return !routing->dirty && kvf_rdma_arm(routing->rdma);
}

/* ---- life ---- */

kvf_status_t kvf_routing_create(kvf_copier_t *copier, kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    const bool on_device = agent->cuda != NULL;
    char host[KVF_ADDRESS_TEXT_BYTES];
    uint8_t address[KVF_RDMA_ADDRESS_BYTES];
    kvf_rdma_pool_t pools[KVF_MAX_GROUPS];
    kvf_routing_t *routing = kvf_calloc(agent->alloc, 1, sizeof(*routing));
    if (routing == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    kvf_address_host(&agent->host, host);
    const kvf_ucx_config_t ucx = {.tls = agent->config.ucx_tls,
                                  .devices = agent->config.ucx_devices,
                                  .listen_host = host,
                                  .use = on_device ? KVF_UCX_DEVICE_READS : KVF_UCX_READS,
                                  .over_software = kvf_agent_rdma_over_software};
    const kvf_rdma_events_t events = {on_ready, on_failed, on_done, routing};
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        pools[g] =
            (kvf_rdma_pool_t){agent->pools[g].mem.base, agent->pools[g].mem.bytes, on_device};
    }
    routing->copier = copier;
    kvf_status_t status = kvf_ucx_create(&ucx, agent->alloc, &agent->log, &routing->ucx, detail);
    if (status == KVF_OK) {
        status = kvf_rdma_create(routing->ucx, pools, agent->layout.n_groups, &events,
                                 &routing->rdma, detail);
    }
    if (status != KVF_OK) {
        kvf_ucx_destroy(routing->ucx);
        kvf_free(agent->alloc, routing);
        return status;
    }
    copier->routing = routing;
    kvf_rdma_address(routing->rdma, address);
    return kvf_core_set_mapped_address(agent->core, address, sizeof(address));
}

void kvf_routing_destroy(kvf_copier_t *copier) {
    kvf_routing_t *routing = copier->routing;
    kvf_rdma_destroy(routing->rdma);
    while (routing->first != NULL) {
        routing->first->path = NULL;
        drop_route(routing->first);
    }
    kvf_ucx_destroy(routing->ucx);
    kvf_free(copier->agent->alloc, routing);
    copier->routing = NULL;
}
