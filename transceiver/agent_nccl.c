/* SPDX-License-Identifier: Apache-2.0 */
/* What the agent does with paths of NCCL: one for each peer that it fetches from, one for each that
 * fetches from it. A job to verify what a peer has committed waits here until there is a stage for
 * it; then it is asked for, and comes in. What a peer asks for waits likewise, and is sent. */
#include "transceiver/agent_copy.h"
#include "transceiver/mover/nccl.h"

#include <stdio.h>
#include <utlist.h>

typedef struct path {
    kvf_paths_t *paths;
    kvf_nccl_path_t *nccl;
    uint64_t peer;
    uint64_t number; /* the receiver's */
    bool own;        /* we receive */
    bool ready;
    bool left;           /* no job is begun any more */
    bool unmapped;       /* the core has given it up, if it is ours */
    bool heard;          /* the other end knows of its end */
    uint32_t n_busy;     /* jobs that have a stage */
    kvf_job_t *verifies; /* of ours, that wait */
    kvf_serve_t *serves; /* of others, likewise */
    struct path *next;
} path_t;

struct kvf_paths {
    kvf_copier_t *copier;
    kvf_nccl_t *nccl;
    path_t *first; /* in the order of their turns */
    uint64_t n_made;
    kvf_serve_t *refused; /* by paths that have ended */
    bool dirty;           /* something waits that was not looked at */
};

static kvf_core_t *core_of(const kvf_paths_t *paths) {
    return paths->copier->agent->core;
}

static path_t *find(const kvf_paths_t *paths, uint64_t peer, bool own, const uint64_t *number) {
    path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && path->own == own && !path->left &&
            (number == NULL || path->number == *number)) {
            break;
        }
    }
    return path;
}

static path_t *add_path(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own) {
    path_t *path = kvf_calloc(paths->copier->agent->alloc, 1, sizeof(*path));
    if (path != NULL) {
        path->paths = paths;
        path->peer = peer;
        path->number = number;
        path->own = own;
        LL_APPEND(paths->first, path);
    }
    return path;
}

static void drop_path(path_t *path) {
    if (path == NULL) {
        return;
    }
    LL_DELETE(path->paths->first, path);
    kvf_free(path->paths->copier->agent->alloc, path);
}

/* on_ended() follows. */
static void leave(path_t *path, const char *why) {
    path->left = true;
    path->paths->dirty = true;
    kvf_nccl_leave(path->nccl, why);
}

/* ---- jobs ---- */

static void verified(const kvf_paths_t *paths, kvf_job_t *job, kvf_status_t status) {
    kvf_verify_t *verify = (kvf_verify_t *)job;
    verify->status = status;
    kvf_core_verified(core_of(paths), verify);
}

/* Jobs that will not be begun. */
static void flush(path_t *path) {
    while (path->verifies != NULL) {
        kvf_job_t *job = path->verifies;
        LL_DELETE(path->verifies, job);
        verified(path->paths, job, KVF_ERR_PEER_LOST);
    }
    while (path->serves != NULL) {
        kvf_serve_t *serve = path->serves;
        LL_DELETE(path->serves, serve);
        kvf_core_served(core_of(path->paths), serve);
    }
}

/* Have the first job come in, and ask for it. @return false: it has to wait. */
static bool fetch(path_t *path) {
    const kvf_paths_t *paths = path->paths;
    kvf_nccl_job_t *job = kvf_nccl_take(path->nccl);
    kvf_job_t *waiting = path->verifies;
    kvf_verify_t *verify = (kvf_verify_t *)waiting;
    if (job == NULL) {
        return false;
    }
    LL_DELETE(path->verifies, waiting);
    if (!kvf_core_fetch(core_of(paths), verify, path->number)) {
        kvf_nccl_give(path->nccl, job);
        verified(paths, waiting, KVF_ERR_PEER_LOST);
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
    path->n_busy++;
    kvf_nccl_post(path->nccl, job);
    return true;
}

/* Send what was asked for first. @return false: it has to wait. */
static bool serve(path_t *path) {
    kvf_serve_t *serve = path->serves;
    kvf_nccl_job_t *job = kvf_nccl_take(path->nccl);
    if (job == NULL) {
        return false;
    }
    LL_DELETE(path->serves, serve);
    job->n_ranges = serve->n_items;
    job->owner = serve;
    for (uint32_t i = 0; i < serve->n_items; i++) {
        job->ranges[i] = (kvf_nccl_range_t){(uint8_t *)(uintptr_t)serve->items[i].source,
                                            serve->items[i].bytes, NULL};
    }
    path->n_busy++;
    kvf_nccl_post(path->nccl, job);
    return true;
}

/* Whether a peer has its share of the stages, over however many paths. */
static bool has_its_share(const path_t *path) {
    const path_t *other;
    uint32_t n = 0;
    LL_FOREACH(path->paths->first, other) {
        n += other->peer == path->peer && other->own == path->own ? other->n_busy : 0;
    }
    return n >= KVF_NCCL_STAGES_OF_PATH;
}

/* What a path can do in its turn: one job. @return false: none. */
static bool take_turn(path_t *path) {
    if (path->left) {
        flush(path);
        return false;
    }
    if (has_its_share(path)) {
        return false;
    }
    if (path->ready && path->verifies != NULL) {
        return fetch(path);
    }
    return path->ready && path->serves != NULL && serve(path);
}

/* Begin what may be begun. Who has had its turn is the last one of the next round. */
static unsigned begin_jobs(kvf_paths_t *paths) {
    unsigned n = 0;
    for (bool any = true; any; n += any) {
        path_t *last = paths->first, *path = NULL;
        any = false;
        while (last != NULL && last->next != NULL) {
            last = last->next;
        }
        while (path != last) {
            path = paths->first;
            LL_DELETE(paths->first, path);
            LL_APPEND(paths->first, path);
            any |= take_turn(path);
        }
    }
    return n;
}

bool kvf_paths_verify(kvf_paths_t *paths, kvf_verify_t *verify) {
    path_t *path = find(paths, verify->peer, true, NULL);
    kvf_job_t *job = &verify->job;
    if (path != NULL) {
        LL_APPEND(path->verifies, job);
        paths->dirty = true;
    }
    return path != NULL;
}

void kvf_paths_serve(kvf_paths_t *paths, kvf_serve_t *serve) {
    path_t *path = find(paths, serve->peer, false, &serve->path);
    paths->dirty = true;
    if (path != NULL) {
        LL_APPEND(path->serves, serve);
    } else { /* its end crosses the request */
        LL_APPEND(paths->refused, serve);
    }
}

static void on_done(void *ctx, void *owner, kvf_nccl_job_t *job, kvf_status_t status) {
    kvf_paths_t *paths = ctx;
    path_t *path = owner;
    path->n_busy--;
    paths->dirty = true; /* there is a stage */
    if (path->own) {
        verified(paths, job->owner, status);
    } else {
        kvf_core_served(core_of(paths), job->owner);
    }
}

/* ---- paths ---- */

static void on_invited(void *ctx, void *owner,
                       const uint8_t invitation[KVF_NCCL_INVITATION_BYTES]) {
    const path_t *path = owner;
    if (!path->left) {
        kvf_core_invite(core_of(ctx), path->peer, path->number, invitation,
                        KVF_NCCL_INVITATION_BYTES);
    }
}

static void on_ready(void *ctx, void *owner) {
    path_t *path = owner;
    if (path->left) {
        return; /* to the core it never was */
    }
    path->ready = true;
    path->paths->dirty = true;
    if (path->own) {
        kvf_core_mapped(core_of(ctx), path->peer, KVF_OK, "");
    }
}

static void on_failing(void *ctx, void *owner, const char *why) {
    path_t *path = owner;
    path->left = true;
    path->paths->dirty = true;
    if (!path->heard) {
        path->heard = true;
        kvf_core_left(core_of(ctx), path->peer, path->number, path->own, why);
    }
}

static void on_ended(void *ctx, void *owner, const char *why) {
    path_t *path = owner;
    kvf_core_t *core = core_of(ctx);
    path->left = true;
    flush(path);
    if (!path->heard) {
        kvf_core_left(core, path->peer, path->number, path->own, why);
    }
    if (!path->own) {
        kvf_core_returned(core, path->peer);
    } else if (!path->unmapped && path->ready) {
        kvf_core_unmapped(core, path->peer, why);
    } else if (!path->unmapped) {
        kvf_core_mapped(core, path->peer, KVF_ERR_IO, why);
    }
    drop_path(path);
}

kvf_status_t kvf_paths_map(kvf_paths_t *paths, uint64_t peer, const void *address, size_t bytes,
                           kvf_detail_t *detail) {
    kvf_status_t status = kvf_nccl_check_address(paths->nccl, address, bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    path_t *path = add_path(paths, peer, ++paths->n_made, true);
    status = path == NULL ? KVF_ERR_NO_MEMORY : kvf_nccl_invite(paths->nccl, path, &path->nccl);
    if (status != KVF_OK) {
        drop_path(path);
        return kvf_fail(detail, status, "no memory for a path to a peer");
    }
    return KVF_OK;
}

void kvf_paths_unmap(kvf_paths_t *paths, uint64_t peer) {
    path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && path->own && !path->unmapped) {
            path->unmapped = true;
            leave(path, "the receiver has given the sender up");
        }
    }
}

kvf_status_t kvf_paths_join(kvf_paths_t *paths, uint64_t peer, uint64_t number,
                            const void *invitation, size_t bytes, kvf_detail_t *detail) {
    if (find(paths, peer, false, &number) != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "there is a path of that number");
    }
    path_t *path = add_path(paths, peer, number, false);
    kvf_status_t status = path == NULL
                              ? KVF_ERR_NO_MEMORY
                              : kvf_nccl_join(paths->nccl, path, invitation, bytes, &path->nccl);
    if (status != KVF_OK) {
        drop_path(path);
        return kvf_fail(detail, status, "%s",
                        status == KVF_ERR_INVALID ? "that is no invitation of NCCL"
                                                  : "no memory for a path to a peer");
    }
    return KVF_OK;
}

void kvf_paths_leave(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own,
                     const char *why) {
    path_t *path = find(paths, peer, own, &number);
    char text[KVF_DETAIL_BYTES];
    if (path != NULL) {
        path->heard = true;
        (void)snprintf(text, sizeof(text), "the other end has left: %.300s", why);
        leave(path, text);
    }
}

void kvf_paths_evict(kvf_paths_t *paths, uint64_t peer) {
    path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && !path->own && !path->left) {
            leave(path, "the sender has given the receiver up");
        }
    }
}

/* ---- life ---- */

unsigned kvf_paths_progress(kvf_paths_t *paths) {
    unsigned n = kvf_nccl_progress(paths->nccl);
    while (paths->refused != NULL) {
        kvf_serve_t *serve = paths->refused;
        LL_DELETE(paths->refused, serve);
        kvf_core_left(core_of(paths), serve->peer, serve->path, false, "there is no such path");
        kvf_core_served(core_of(paths), serve);
        n++;
    }
    while (paths->dirty) {
        paths->dirty = false;
        n += begin_jobs(paths);
    }
    return n;
}

bool kvf_paths_is_busy(const kvf_paths_t *paths) {
    return paths->dirty;
}

kvf_status_t kvf_paths_create(kvf_copier_t *copier, void (*wake)(void *ctx), void *ctx,
                              kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    uint8_t address[KVF_NCCL_ADDRESS_BYTES];
    kvf_paths_t *paths = kvf_calloc(agent->alloc, 1, sizeof(*paths));
    if (paths == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    const kvf_nccl_events_t events = {on_invited, on_ready, on_done, on_failing, on_ended, paths};
    paths->copier = copier;
    kvf_status_t status = kvf_nccl_create(agent->alloc, kvf_cuda_context(agent->cuda), &events,
                                          wake, ctx, &paths->nccl, detail);
    if (status != KVF_OK) {
        kvf_free(agent->alloc, paths);
        return status;
    }
    kvf_nccl_address(paths->nccl, address);
    copier->paths = paths;
    return kvf_core_set_mapped_address(agent->core, address, sizeof(address));
}

void kvf_paths_destroy(kvf_copier_t *copier) {
    kvf_paths_t *paths = copier->paths;
    kvf_nccl_destroy(paths->nccl);
    while (paths->first != NULL) {
        drop_path(paths->first);
    }
    kvf_free(copier->agent->alloc, paths);
    copier->paths = NULL;
}
