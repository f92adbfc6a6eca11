/* SPDX-License-Identifier: Apache-2.0 */
#include "paths.h"

#include "kernels/digest.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PATHS 256
#define MAX_JOBS 256
#define STUCK_US 40000000 /* a job that does not come in for so long ends its path */

/* One of a path's two ends. */
typedef struct end {
    node_t *node; /* NULL: there is none yet */
    uint64_t life;
    uint64_t peer; /* the other end's number for this one's node */
    bool left;     /* no more jobs */
    bool told;     /* its node knows that it has ended */
    bool unmapped; /* its core has said so */
    bool heard;    /* it was the other end that said so */
} end_t;

typedef struct path {
    uint64_t number; /* from 1; also its invitation */
    end_t to, from;  /* the receiver's, the sender's */
    bool invited, said, answered, ready;
    kvf_verify_t *verifies[MAX_JOBS]; /* in the order in which they are asked for */
    size_t n_verifies, n_asked;
    kvf_serve_t *serves[MAX_JOBS]; /* the k-th is for the k-th of those */
    size_t n_serves;
    uint64_t since_us; /* of the last job that came, or came in */
} path_t;

struct paths {
    path_t all[MAX_PATHS];
    size_t n;
    struct {
        node_t *node;
        kvf_serve_t *serve;
    } refused[MAX_JOBS]; /* for which there is no path */
    size_t n_refused;
    bool answer, hold_serves;
};

/* What a sender answers: three bytes that belong to the path. */
static void make_answer(const path_t *path, uint8_t answer[3]) {
    answer[0] = 0;
    answer[1] = (uint8_t)(path->number * 7);
    answer[2] = 0xff;
}

paths_t *paths_create(bool answer) {
    paths_t *paths = calloc(1, sizeof(paths_t));
    cr_assert_not_null(paths);
    paths->answer = answer;
    return paths;
}

void paths_destroy(paths_t *paths) {
    free(paths);
}

static bool is(const end_t *end, const node_t *node) {
    return end->node == node && end->life == node->life;
}

static bool runs(const end_t *end) {
    return end->node != NULL && end->node->core != NULL && end->node->life == end->life &&
           !end->node->stopped;
}

/* ---- actions ---- */

kvf_status_t paths_map(paths_t *paths, node_t *node, uint64_t peer) {
    cr_assert(paths->n < MAX_PATHS);
    path_t *path = &paths->all[paths->n++];
    *path = (path_t){.number = paths->n, .to = {.node = node, .life = node->life, .peer = peer}};
    return KVF_OK;
}

void paths_unmap(paths_t *paths, const node_t *node, uint64_t peer) {
    for (size_t i = 0; i < paths->n; i++) {
        end_t *end = &paths->all[i].to;
        if (is(end, node) && end->peer == peer && !end->unmapped) {
            end->unmapped = end->left = true;
        }
    }
}

kvf_status_t paths_join(paths_t *paths, node_t *node, uint64_t peer, uint64_t number,
                        const void *invitation, size_t bytes) {
    uint64_t n;
    if (bytes != sizeof(n)) {
        return KVF_ERR_INVALID;
    }
    memcpy(&n, invitation, sizeof(n));
    if (n == 0 || n > paths->n || n != number) {
        return KVF_ERR_INVALID;
    }
    path_t *path = &paths->all[n - 1];
    cr_assert_null(path->from.node, "a path was joined twice");
    path->from = (end_t){.node = node, .life = node->life, .peer = peer};
    return KVF_OK;
}

static path_t *find(paths_t *paths, const node_t *node, uint64_t peer, const uint64_t *number,
                    bool own) {
    for (size_t i = 0; i < paths->n; i++) {
        const end_t *end = own ? &paths->all[i].to : &paths->all[i].from;
        if (is(end, node) && end->peer == peer && !end->left &&
            (number == NULL || paths->all[i].number == *number)) {
            return &paths->all[i];
        }
    }
    return NULL;
}

void paths_joined(paths_t *paths, const node_t *node, uint64_t peer, uint64_t number,
                  const void *answer, size_t bytes) {
    path_t *path = find(paths, node, peer, &number, true);
    uint8_t right[3];
    if (path != NULL) {
        make_answer(path, right);
        cr_assert_eq(bytes, sizeof(right));
        cr_assert_arr_eq((const uint8_t *)answer, right, sizeof(right));
        path->answered = true;
    }
}

void paths_leave(paths_t *paths, const node_t *node, uint64_t peer, uint64_t number, bool own) {
    path_t *path = find(paths, node, peer, &number, own);
    if (path != NULL) {
        end_t *end = own ? &path->to : &path->from;
        end->left = end->heard = true;
    }
}

void paths_evict(paths_t *paths, const node_t *node, uint64_t peer) {
    for (size_t i = 0; i < paths->n; i++) {
        end_t *end = &paths->all[i].from;
        end->left |= is(end, node) && end->peer == peer;
    }
}

void paths_serve(paths_t *paths, node_t *node, kvf_serve_t *serve) {
    path_t *path = find(paths, node, serve->peer, &serve->path, false);
    if (path == NULL) {
        cr_assert(paths->n_refused < MAX_JOBS);
        paths->refused[paths->n_refused].node = node;
        paths->refused[paths->n_refused++].serve = serve;
        return;
    }
    cr_assert(path->n_serves < MAX_JOBS);
    path->serves[path->n_serves++] = serve;
}

/* ---- jobs ---- */

void paths_use(paths_t *paths, const node_t *node, kvf_verify_t *job) {
    path_t *path = find(paths, node, job->peer, NULL, true);
    job->source = path;
    if (path != NULL) {
        cr_assert(path->ready, "a job for a path that is not ready");
        cr_assert(path->n_verifies < MAX_JOBS);
        path->verifies[path->n_verifies++] = job;
        path->since_us = cluster_now(node->cluster);
    }
}

static size_t place_of(const kvf_verify_t *job) {
    const path_t *path = job->source;
    size_t i = 0;
    while (path->verifies[i] != job) {
        i++;
        cr_assert(i < path->n_verifies);
    }
    return i;
}

bool paths_can_run(const kvf_verify_t *job) {
    const path_t *path = job->source;
    return path != NULL && place_of(job) < path->n_serves && !path->to.left && !path->from.left;
}

static void take_out(path_t *path, size_t i) {
    path->n_verifies--;
    path->n_asked -= i < path->n_asked;
    memmove(&path->verifies[i], &path->verifies[i + 1],
            (path->n_verifies - i) * sizeof(path->verifies[0]));
}

static void served(path_t *path, size_t i) {
    kvf_serve_t *serve = path->serves[i];
    path->n_serves--;
    memmove(&path->serves[i], &path->serves[i + 1], (path->n_serves - i) * sizeof(path->serves[0]));
    if (path->from.node->core != NULL && path->from.node->life == path->from.life) {
        kvf_core_served(path->from.node->core, serve);
    }
}

void paths_run(node_t *node, kvf_verify_t *job) {
    path_t *path = job->source;
    if (path == NULL) { /* it had ended before the job came */
        job->status = KVF_ERR_PEER_LOST;
        kvf_core_verified(node->core, job);
        return;
    }
    size_t place = place_of(job);
    const kvf_serve_t *serve = path->serves[place];
    cr_assert_eq(serve->n_items, job->n_items, "the ends of a path have different jobs");
    for (uint32_t i = 0; i < job->n_items; i++) {
        kvf_verify_item_t *item = &job->items[i];
        uint8_t *to = node_page(node, item->group_idx, item->slot) + item->offset;
        cr_assert_eq(serve->items[i].bytes, item->bytes, "of different lengths");
        memcpy(to, serve->items[i].source, item->bytes);
        item->digest = job->digests ? kvf_digest(to, item->bytes) : 0;
    }
    take_out(path, place);
    served(path, place);
    path->since_us = cluster_now(node->cluster);
    kvf_core_verified(node->core, job);
}

/* Out of the node's list. */
static void unlist(node_t *node, const kvf_verify_t *job) {
    kvf_job_t **at = &node->jobs;
    while (*at != NULL && *at != &job->job) {
        at = &(*at)->next;
    }
    cr_assert_not_null(*at);
    *at = (*at)->next;
}

static void give_up(path_t *path, size_t i) {
    kvf_verify_t *job = path->verifies[i];
    take_out(path, i);
    unlist(path->to.node, job);
    job->status = KVF_ERR_PEER_LOST;
    kvf_core_verified(path->to.node->core, job);
}

/* ---- turns ---- */

static bool step_receiver(const paths_t *paths, path_t *path) {
    end_t *end = &path->to;
    kvf_core_t *core = end->node->core;
    bool any = false;
    if (end->left && !end->told) {
        end->told = true;
        while (path->n_verifies > 0) {
            give_up(path, 0);
        }
        if (!end->heard) {
            kvf_core_left(core, end->peer, path->number, true, "it has failed");
        }
        if (!end->unmapped && path->ready) {
            kvf_core_unmapped(core, end->peer, "the path has failed");
        } else if (!end->unmapped) {
            kvf_core_mapped(core, end->peer, KVF_ERR_IO, "no path");
        }
        return true;
    }
    if (end->left) {
        return false;
    }
    if (path->n_verifies > 0 && cluster_now(end->node->cluster) - path->since_us > STUCK_US) {
        end->left = true;
        return true;
    }
    if (!path->invited) {
        path->invited = true;
        kvf_core_invite(core, end->peer, path->number, &path->number, sizeof(path->number));
        any = true;
    }
    if (path->from.node != NULL && !path->ready && (path->answered || !paths->answer)) {
        path->ready = true;
        kvf_core_mapped(core, end->peer, KVF_OK, "");
        any = true;
    }
    while (path->n_asked < path->n_verifies) {
        any = true;
        if (kvf_core_fetch(core, path->verifies[path->n_asked], path->number)) {
            path->n_asked++;
        } else {
            give_up(path, path->n_asked);
        }
    }
    return any;
}

static bool step_sender(const paths_t *paths, path_t *path) {
    end_t *end = &path->from;
    uint8_t answer[3];
    if (paths->answer && !path->said && !end->left) {
        path->said = true;
        make_answer(path, answer);
        kvf_core_answer(end->node->core, end->peer, path->number, answer, sizeof(answer));
        return true;
    }
    if (!end->left || end->told || (paths->hold_serves && path->n_serves > 0)) {
        return false;
    }
    end->told = true;
    while (path->n_serves > 0) {
        served(path, 0);
    }
    if (!end->heard) {
        kvf_core_left(end->node->core, end->peer, path->number, false, "it has failed");
    }
    kvf_core_returned(end->node->core, end->peer);
    return true;
}

bool paths_step(paths_t *paths, node_t *node) {
    bool any = false;
    for (size_t i = 0; i < paths->n_refused; i++) {
        if (paths->refused[i].node == node && paths->refused[i].serve != NULL) {
            kvf_serve_t *serve = paths->refused[i].serve;
            paths->refused[i].serve = NULL;
            kvf_core_left(node->core, serve->peer, serve->path, false, "there is no such path");
            kvf_core_served(node->core, serve);
            any = true;
        }
    }
    for (size_t i = 0; i < paths->n; i++) {
        path_t *path = &paths->all[i];
        if (is(&path->to, node) && runs(&path->to)) {
            any |= step_receiver(paths, path);
        }
        if (path->from.node != NULL && is(&path->from, node) && runs(&path->from)) {
            any |= step_sender(paths, path);
        }
    }
    return any;
}

void paths_drop(paths_t *paths, const node_t *node) {
    for (size_t i = 0; i < paths->n; i++) {
        path_t *path = &paths->all[i];
        if (is(&path->to, node)) {
            path->to.left = path->to.told = true;
            path->n_verifies = path->n_asked = 0;
        }
        if (path->from.node != NULL && is(&path->from, node)) {
            while (path->n_serves > 0) {
                served(path, 0);
            }
            path->from.left = path->from.told = true;
        }
    }
    for (size_t i = 0; i < paths->n_refused; i++) {
        if (paths->refused[i].node == node && paths->refused[i].serve != NULL) {
            kvf_core_served(node->core, paths->refused[i].serve);
            paths->refused[i].serve = NULL;
        }
    }
}

/* ---- for tests ---- */

size_t paths_ends(const paths_t *paths, const node_t *node) {
    size_t n = 0;
    for (size_t i = 0; i < paths->n; i++) {
        const path_t *path = &paths->all[i];
        n += is(&path->to, node) && !path->to.told;
        n += path->from.node != NULL && is(&path->from, node) && !path->from.told;
    }
    return n;
}

void paths_hold_serves(paths_t *paths, bool hold) {
    paths->hold_serves = hold;
}

void paths_fail(paths_t *paths, size_t n) {
    cr_assert(n < paths->n);
    paths->all[n].to.left = true;
}
