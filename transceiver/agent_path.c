/* SPDX-License-Identifier: Apache-2.0 */
/* Paths to peers, of whichever mover: one for each peer that we fetch from, one for each that
 * fetches from us. What the core has to hear of them, and in which order. */
#include "transceiver/agent_copy.h"

#include <stdio.h>
#include <utlist.h>

static kvf_core_t *core_of(const kvf_paths_t *paths) {
    return paths->copier->agent->core;
}

kvf_path_t *kvf_paths_find(const kvf_paths_t *paths, uint64_t peer, bool own,
                           const uint64_t *number) {
    kvf_path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && path->own == own && !path->over &&
            (number == NULL || path->number == *number)) {
            break;
        }
    }
    return path;
}

static kvf_path_t *add_path(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own,
                            kvf_detail_t *detail) {
    kvf_path_t *path = kvf_calloc(paths->copier->agent->alloc, 1, paths->ops->path_bytes);
    if (path == NULL) {
        (void)kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
        return NULL;
    }
    path->paths = paths;
    path->peer = peer;
    path->number = number;
    path->own = own;
    LL_APPEND(paths->first, path);
    return path;
}

static void drop_path(kvf_path_t *path) {
    LL_DELETE(path->paths->first, path);
    kvf_free(path->paths->copier->agent->alloc, path);
}

/* ---- the core's actions ---- */

kvf_status_t kvf_paths_map(kvf_paths_t *paths, uint64_t peer, const void *address, size_t bytes,
                           const uint64_t *least, kvf_detail_t *detail) {
    kvf_status_t status = paths->ops->check_address(paths, address, bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_path_t *path = add_path(paths, peer, ++paths->n_made, true, detail);
    if (path == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    status = paths->ops->invite(path, least, detail);
    if (status != KVF_OK) {
        drop_path(path);
    }
    return status;
}

void kvf_paths_unmap(kvf_paths_t *paths, uint64_t peer) {
    kvf_path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && path->own && !path->unmapped) {
            path->unmapped = true;
            paths->ops->end(path, "the receiver has given the sender up");
        }
    }
}

kvf_status_t kvf_paths_join(kvf_paths_t *paths, uint64_t peer, uint64_t number,
                            const void *invitation, size_t bytes, kvf_detail_t *detail) {
    if (kvf_paths_find(paths, peer, false, &number) != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "there is a path of that number");
    }
    kvf_path_t *path = add_path(paths, peer, number, false, detail);
    if (path == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_status_t status = paths->ops->join(path, invitation, bytes, detail);
    if (status != KVF_OK) {
        drop_path(path);
    }
    return status;
}

void kvf_paths_joined(kvf_paths_t *paths, uint64_t peer, uint64_t number, const void *answer,
                      size_t bytes) {
    kvf_path_t *path = kvf_paths_find(paths, peer, true, &number);
    if (path != NULL && paths->ops->joined != NULL) { /* else it crossed the end of that path */
        paths->ops->joined(path, answer, bytes);
    }
}

void kvf_paths_leave(kvf_paths_t *paths, uint64_t peer, uint64_t number, bool own,
                     const char *why) {
    kvf_path_t *path = kvf_paths_find(paths, peer, own, &number);
    char text[KVF_DETAIL_BYTES];
    if (path != NULL) {
        path->heard = true;
        (void)snprintf(text, sizeof(text), "the other end has left: %.300s", why);
        paths->ops->end(path, text);
    }
}

void kvf_paths_evict(kvf_paths_t *paths, uint64_t peer) {
    kvf_path_t *path;
    LL_FOREACH(paths->first, path) {
        if (path->peer == peer && !path->own) {
            paths->ops->end(path, "the sender has given the receiver up");
        }
    }
}

/* ---- jobs ---- */

bool kvf_paths_verify(kvf_paths_t *paths, kvf_verify_t *verify) {
    kvf_path_t *path = kvf_paths_find(paths, verify->peer, true, NULL);
    kvf_job_t *job = &verify->job;
    if (path != NULL) {
        LL_APPEND(path->verifies, job);
        paths->dirty = true;
    }
    return path != NULL;
}

kvf_verify_t *kvf_path_take_job(kvf_path_t *path) {
    kvf_job_t *job = path->verifies;
    if (job != NULL) {
        LL_DELETE(path->verifies, job);
    }
    return (kvf_verify_t *)job;
}

void kvf_paths_verified(const kvf_paths_t *paths, kvf_verify_t *verify, kvf_status_t status) {
    verify->status = status;
    kvf_core_verified(core_of(paths), verify);
}

void kvf_path_lose_jobs(kvf_path_t *path) {
    for (kvf_verify_t *verify; (verify = kvf_path_take_job(path)) != NULL;) {
        kvf_paths_verified(path->paths, verify, KVF_ERR_PEER_LOST);
    }
}

/* ---- what becomes of a path ---- */

void kvf_path_ready(kvf_path_t *path) {
    path->ready = true;
    path->paths->dirty = true;
    if (path->own) {
        kvf_core_mapped(core_of(path->paths), path->peer, KVF_OK, "");
    }
}

void kvf_path_say_left(kvf_path_t *path, const char *why) {
    if (!path->heard) {
        path->heard = true;
        kvf_core_left(core_of(path->paths), path->peer, path->number, path->own, why);
    }
}

void kvf_path_ended(kvf_path_t *path, const char *why) {
    kvf_core_t *core = core_of(path->paths);
    kvf_path_lose_jobs(path);
    kvf_path_say_left(path, why);
    if (!path->own) {
        kvf_core_returned(core, path->peer);
    } else if (!path->unmapped && path->ready) {
        kvf_core_unmapped(core, path->peer, why);
    } else if (!path->unmapped) {
        kvf_core_mapped(core, path->peer, KVF_ERR_IO, why);
    }
    drop_path(path);
}

void kvf_paths_drop(kvf_paths_t *paths) {
    while (paths->first != NULL) {
        drop_path(paths->first);
    }
}
