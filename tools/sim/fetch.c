/* SPDX-License-Identifier: Apache-2.0 */
/* Paths by which receivers fetch from senders: what agent_nccl.c does with two devices and what
 * lies between them. The sender's device reads its pages at some moment of a job, the receiver's
 * writes at a later one; both also do so for a while after their end of the path was given up. What
 * one end does outlives the other one. */
#include "tools/sim/world_impl.h"

#include "kernels/digest.h"

#include <string.h>

#define ANSWER_US 1000000 /* how long the other end is waited for */
#define STUCK_US 20000000 /* and a job */
#define DRAIN_US 300000   /* how long a device may take to come to an end */

/* What happens to a path, or to a job. */
typedef enum act {
    ACT_INVITE,
    ACT_READY,
    ACT_LATE, /* the other end did not come */
    ACT_END,
    ACT_ASK, /* for the next job */
    ACT_REFUSED
} act_t;

typedef enum job_act { JOB_SEND, JOB_STORE, JOB_VERIFIED, JOB_SERVED, JOB_STUCK } job_act_t;

static void push(kvf_world_t *world, const pipe_end_t *end, event_kind_t kind, void *ptr, int act,
                 uint64_t delay_us) {
    world_push(world, (event_t){.at_us = world->now_us + delay_us,
                                .kind = (uint8_t)kind,
                                .node = (uint8_t)end->node,
                                .from = (uint8_t)end->node,
                                .life = end->life,
                                .a = (uint64_t)act,
                                .ptr = ptr});
}

static void later(pipe_t *pipe, const pipe_end_t *end, act_t act, uint64_t delay_us) {
    push(pipe->world, end, EVENT_PIPE, pipe, (int)act, delay_us);
}

static void job_later(pipe_job_t *job, const pipe_end_t *end, job_act_t act, uint64_t delay_us) {
    push(job->pipe->world, end, EVENT_PIPE_JOB, job, (int)act, delay_us);
}

static uint64_t soon_us(kvf_world_t *world) {
    return kvf_dice_delay(&world->dice, 50, 5000);
}

static bool is(const pipe_end_t *end, const node_t *node) {
    return end->made && end->node == node->idx && end->life == node->life;
}

static pipe_t *find(const node_t *node, uint64_t peer, bool own, const uint64_t *number) {
    pipe_t *pipe = node->world->pipes;
    for (; pipe != NULL; pipe = pipe->next) {
        const pipe_end_t *end = own ? &pipe->to : &pipe->from;
        if (is(end, node) && end->peer == peer && !end->left &&
            (number == NULL || pipe->number == *number)) {
            break;
        }
    }
    return pipe;
}

/* No job is begun there any more; its device comes to an end. */
static void leave(pipe_t *pipe, pipe_end_t *end) {
    if (!end->left) {
        end->left = true;
        later(pipe, end, ACT_END, kvf_dice_delay(&pipe->world->dice, 50, DRAIN_US));
    }
}

/* ---- what the core asks for ---- */

kvf_status_t fetch_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                       const int64_t *n_pages, kvf_detail_t *detail) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    (void)address;
    (void)n_pages;
    if (bytes != 2 * sizeof(uint64_t) || find(node, peer, true, NULL) != NULL) {
        world_fail(world, "%s makes a path twice, or to no address", node->name);
        return kvf_fail(detail, KVF_ERR_INVALID, "not an address");
    }
    if (node_hit(node, KVF_FAULT_POST)) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "no path for once");
    }
    pipe_t *pipe = arena_take(&world->arena, sizeof(*pipe));
    *pipe = (pipe_t){.world = world,
                     .number = ++world->n_pipes,
                     .to = {.made = true, .node = node->idx, .life = node->life, .peer = peer},
                     .next = world->pipes};
    world->pipes = pipe;
    later(pipe, &pipe->to, ACT_INVITE, soon_us(world));
    later(pipe, &pipe->to, ACT_LATE, ANSWER_US);
    return KVF_OK;
}

void fetch_unmap(void *ctx, uint64_t peer) {
    const node_t *node = ctx;
    for (pipe_t *pipe = node->world->pipes; pipe != NULL; pipe = pipe->next) {
        if (is(&pipe->to, node) && pipe->to.peer == peer && !pipe->to.unmapped) {
            pipe->to.unmapped = true;
            leave(pipe, &pipe->to);
        }
    }
}

kvf_status_t fetch_join(void *ctx, uint64_t peer, uint64_t number, const void *invitation,
                        size_t bytes, kvf_detail_t *detail) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    pipe_t *pipe = world->pipes;
    uint64_t named = 0;
    memcpy(&named, invitation, bytes < sizeof(named) ? bytes : sizeof(named));
    while (pipe != NULL && pipe->number != named) {
        pipe = pipe->next;
    }
    if (pipe == NULL || pipe->from.made || pipe->number != number ||
        node_hit(node, KVF_FAULT_POST)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "that is no invitation");
    }
    pipe->from = (pipe_end_t){.made = true, .node = node->idx, .life = node->life, .peer = peer};
    world_note(world, "%s joins path %u of %s", node->name, (unsigned)number,
               world->nodes[pipe->to.node].name);
    later(pipe, &pipe->to, ACT_READY, kvf_dice_delay(&world->dice, 200, 20000));
    return KVF_OK;
}

void fetch_leave(void *ctx, uint64_t peer, uint64_t number, bool own, const char *why) {
    const node_t *node = ctx;
    pipe_t *pipe = find(node, peer, own, &number);
    (void)why;
    if (pipe != NULL) {
        pipe_end_t *end = own ? &pipe->to : &pipe->from;
        end->heard = true;
        leave(pipe, end);
    }
}

void fetch_evict(void *ctx, uint64_t peer) {
    const node_t *node = ctx;
    for (pipe_t *pipe = node->world->pipes; pipe != NULL; pipe = pipe->next) {
        if (is(&pipe->from, node) && pipe->from.peer == peer) {
            leave(pipe, &pipe->from);
        }
    }
}

static pipe_job_t *append(pipe_t *pipe) {
    pipe_job_t **at = &pipe->jobs;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = arena_take(&pipe->world->arena, sizeof(**at));
    **at = (pipe_job_t){.pipe = pipe};
    return *at;
}

bool fetch_use(node_t *node, kvf_verify_t *verify) {
    pipe_t *pipe = find(node, verify->peer, true, NULL);
    if (pipe == NULL) {
        return false; /* its end crosses the job */
    }
    if (!pipe->ready) {
        world_fail(node->world, "%s fetches by a path that is not ready", node->name);
    }
    pipe_job_t *job = append(pipe);
    job->verify = verify;
    verify->source = job;
    later(pipe, &pipe->to, ACT_ASK, soon_us(node->world));
    job_later(job, &pipe->to, JOB_STUCK, STUCK_US);
    return true;
}

/* The first job that was asked for, and that nothing is sent for. */
static pipe_job_t *next_unserved(const pipe_t *pipe) {
    pipe_job_t *job = pipe->jobs;
    while (job != NULL && !(job->asked && job->serve == NULL && !job->read)) {
        job = job->next;
    }
    return job;
}

static bool fits(const pipe_job_t *job, const kvf_serve_t *serve) {
    bool same = job->verify == NULL || job->verify->n_items == serve->n_items;
    for (uint32_t i = 0; same && job->verify != NULL && i < serve->n_items; i++) {
        same = job->verify->items[i].bytes == serve->items[i].bytes;
    }
    return same;
}

void fetch_serve(void *ctx, kvf_serve_t *serve) {
    node_t *node = ctx;
    kvf_world_t *world = node->world;
    pipe_t *pipe = find(node, serve->peer, false, &serve->path);
    pipe_job_t *job = pipe == NULL ? NULL : next_unserved(pipe);
    if (job == NULL) {
        if (pipe != NULL && !world->words_flipped) {
            world_fail(world, "%s is to send what nobody waits for", node->name);
        }
        push(world, &(pipe_end_t){.node = node->idx, .life = node->life}, EVENT_PIPE, serve,
             ACT_REFUSED, soon_us(world));
        return;
    }
    if (!fits(job, serve) && !world->words_flipped) {
        world_fail(world, "%s sends other ranges than are waited for", node->name);
    }
    job->serve = serve;
    job_later(job, &pipe->from, JOB_SEND, node_work_us(node));
}

/* ---- jobs ---- */

static void verified(node_t *node, pipe_job_t *job, kvf_status_t status) {
    kvf_verify_t *verify = job->verify;
    job->verify = NULL;
    verify->status = status;
    kvf_core_verified(node->core, verify);
}

/* Until now its device may have read the pages, once more or for the first time. */
static void served(node_t *node, pipe_job_t *job) {
    kvf_serve_t *serve = job->serve;
    for (uint32_t i = 0; i < serve->n_items; i++) {
        hold_check_source(node, serve->items[i].source, serve->items[i].bytes);
    }
    job->serve = NULL;
    job->read = true;
    kvf_core_served(node->core, serve);
}

/* The first that was not asked for. */
static void ask(node_t *node, pipe_t *pipe) {
    pipe_job_t *job = pipe->jobs;
    while (job != NULL && (job->asked || job->verify == NULL)) {
        job = job->next;
    }
    if (job == NULL || pipe->to.left) {
        return;
    }
    if (kvf_core_fetch(node->core, job->verify, pipe->number)) {
        job->asked = true;
    } else {
        verified(node, job, KVF_ERR_PEER_LOST);
    }
}

/* The sender's device reads, also when its end was left a moment ago. */
static void send(node_t *node, pipe_job_t *job) {
    kvf_world_t *world = node->world;
    uint64_t bytes = 0;
    if (job->serve == NULL) {
        return;
    }
    for (uint32_t i = 0; i < job->serve->n_items; i++) {
        bytes += job->serve->items[i].bytes;
    }
    job->data = arena_take(&world->arena, bytes);
    job->bytes = bytes;
    for (uint32_t i = 0, at = 0; i < job->serve->n_items; i++) {
        const kvf_serve_item_t *item = &job->serve->items[i];
        hold_check_source(node, item->source, item->bytes);
        memcpy(job->data + at, item->source, item->bytes);
        at += (uint32_t)item->bytes;
    }
    world_note(world, "%s sends %u ranges through path %u", node->name, job->serve->n_items,
               (unsigned)job->pipe->number);
    if (node_hit(node, KVF_FAULT_POST)) {
        leave(job->pipe, &job->pipe->from);
        return;
    }
    job_later(job, &job->pipe->to, JOB_STORE, soon_us(world));
}

/* The receiver's writes, likewise. */
static void store(node_t *node, pipe_job_t *job) {
    kvf_world_t *world = node->world;
    uint64_t at = 0;
    if (job->verify == NULL) {
        return;
    }
    for (uint32_t i = 0; i < job->verify->n_items; i++) {
        kvf_verify_item_t *item = &job->verify->items[i];
        uint8_t *to = node_page(node, item->group_idx, item->slot) + item->offset;
        if (at + item->bytes > job->bytes ||
            !hold_check_fetched(node, job->verify, item, job->data + at)) {
            break;
        }
        memcpy(to, job->data + at, item->bytes);
        if (node_hit(node, KVF_FAULT_FLIP_DATA)) {
            to[0] ^= 1;
        }
        item->digest = job->verify->digests ? kvf_digest(to, item->bytes) : 0;
        at += item->bytes;
        world->outcome->fetched_bytes += item->bytes;
    }
    if (at != job->bytes || node_hit(node, KVF_FAULT_POST)) {
        leave(job->pipe, &job->pipe->to);
        return;
    }
    job_later(job, &job->pipe->to, JOB_VERIFIED, soon_us(world));
    job_later(job, &job->pipe->from, JOB_SERVED, soon_us(world));
}

void fetch_job_event(node_t *node, const event_t *event) {
    pipe_job_t *job = event->ptr;
    kvf_core_set_time(node->core, node->world->now_us);
    switch ((job_act_t)event->a) {
    case JOB_SEND:
        send(node, job);
        break;
    case JOB_STORE:
        store(node, job);
        break;
    case JOB_VERIFIED:
        if (job->verify != NULL) {
            verified(node, job, KVF_OK);
        }
        break;
    case JOB_SERVED:
        if (job->serve != NULL) {
            served(node, job);
        }
        break;
    default:
        if (job->verify != NULL) {
            leave(job->pipe, &job->pipe->to);
        }
        break;
    }
}

/* ---- paths ---- */

static void end_receiver(node_t *node, pipe_t *pipe) {
    for (pipe_job_t *job = pipe->jobs; job != NULL; job = job->next) {
        if (job->verify != NULL) {
            verified(node, job, KVF_ERR_PEER_LOST);
        }
    }
    if (!pipe->to.heard) {
        kvf_core_left(node->core, pipe->to.peer, pipe->number, true, "it has ended");
    }
    if (!pipe->to.unmapped && pipe->ready) {
        kvf_core_unmapped(node->core, pipe->to.peer, "its path has ended");
    } else if (!pipe->to.unmapped) {
        kvf_core_mapped(node->core, pipe->to.peer, KVF_ERR_IO, "no path");
    }
}

static void end_sender(node_t *node, pipe_t *pipe) {
    for (pipe_job_t *job = pipe->jobs; job != NULL; job = job->next) {
        if (job->serve != NULL) {
            served(node, job);
        }
    }
    if (!pipe->from.heard) {
        kvf_core_left(node->core, pipe->from.peer, pipe->number, false, "it has ended");
    }
    kvf_core_returned(node->core, pipe->from.peer);
}

void fetch_event(node_t *node, const event_t *event) {
    pipe_t *pipe = event->ptr;
    kvf_core_set_time(node->core, node->world->now_us);
    switch ((act_t)event->a) {
    case ACT_INVITE:
        if (!pipe->to.left) {
            kvf_core_invite(node->core, pipe->to.peer, pipe->number, &pipe->number,
                            sizeof(pipe->number));
        }
        break;
    case ACT_READY:
        if (!pipe->to.left) {
            pipe->ready = true;
            kvf_core_mapped(node->core, pipe->to.peer, KVF_OK, "");
        }
        break;
    case ACT_LATE:
        if (!pipe->ready) {
            leave(pipe, &pipe->to);
        }
        break;
    case ACT_ASK:
        ask(node, pipe);
        break;
    case ACT_REFUSED: {
        kvf_serve_t *serve = event->ptr;
        kvf_core_left(node->core, serve->peer, serve->path, false, "there is no such path");
        kvf_core_served(node->core, serve);
        break;
    }
    default:
        if (is(&pipe->to, node)) {
            end_receiver(node, pipe);
        } else {
            end_sender(node, pipe);
        }
        break;
    }
}

void fetch_drop(node_t *node) {
    for (pipe_t *pipe = node->world->pipes; pipe != NULL; pipe = pipe->next) {
        bool receives = is(&pipe->to, node), sends = is(&pipe->from, node);
        pipe->to.left |= receives;
        pipe->from.left |= sends;
        for (pipe_job_t *job = pipe->jobs; job != NULL; job = job->next) {
            job->verify = receives ? NULL : job->verify;
            if (sends) {
                job->serve = NULL;
                job->read = true;
            }
        }
    }
}
