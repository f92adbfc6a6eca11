/* SPDX-License-Identifier: Apache-2.0 */
/* What the agent does with bytes itself: digests, and copies from pools of peers that are mapped
 * here. Short jobs are done on the agent's thread, long ones by the crew. */
#include "transceiver/agent_copy.h"
#include "kernels/copy.h"
#include "kernels/digest.h"
#include "kvmgr/base/size.h"
#include "transceiver/mem/mem.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

/* A job of so many bytes takes about as long as to wake a thread for it; and so many are done in a
 * turn, so that messages and heartbeats are not kept waiting. */
#define SHORT_BYTES (UINT64_C(64) << 10)
#define SHORT_BYTES_PER_TURN (UINT64_C(256) << 10)
/* Who has nothing else to do does as much itself: of a transfer that is over before the crew is up
 * and about. */
#define HELP_BYTES SHORT_BYTES_PER_TURN

/* Of a transfer for which the crew has so many jobs, further ones let others' pass. */
#define FIRST_JOBS 4

#define AUTO_THREADS 4

/* ---- jobs ---- */

uint8_t *kvf_copier_page(const kvf_copier_t *copier, uint32_t group_idx, int32_t slot,
                         uint64_t off) {
    return (uint8_t *)kvf_pool_page(&copier->agent->pools[group_idx], slot) + off;
}

static void run_verify(kvf_job_t *job) {
    kvf_verify_t *verify = (kvf_verify_t *)job;
    const kvf_copier_t *copier = job->ctx;
    const kvf_agent_t *agent = copier->agent;
    for (uint32_t i = 0; i < verify->n_items && verify->status == KVF_OK; i++) {
        kvf_verify_item_t *item = &verify->items[i];
        uint8_t *at = kvf_copier_page(copier, item->group_idx, item->slot, item->offset);
        if (verify->source == NULL) {
            item->digest = !verify->digests       ? 0
                           : item->leaves != NULL ? kvf_digest_of_hashes(item->leaves, item->bytes)
                                                  : kvf_digest(at, item->bytes);
            continue;
        }
        const uint8_t *from =
            kvf_mapped_base(verify->source, item->group_idx) +
            (uint64_t)item->source_slot * agent->pools[item->group_idx].page_bytes + item->offset;
        if (verify->digests) {
            item->digest = kvf_copy_digest(at, from, item->bytes);
        } else {
            kvf_copy(at, from, item->bytes);
        }
    }
}

static void run_window(kvf_job_t *job) {
    kvf_window_t *window = (kvf_window_t *)job;
    for (uint32_t i = 0; window->digests && i < window->n_pieces; i++) {
        kvf_piece_t *piece = &window->pieces[i];
        if (piece->digest == 0) { /* the others were made ahead */
            piece->digest = kvf_digest(piece->source, piece->bytes);
        }
    }
}

static void verify_done(kvf_job_t *job) {
    kvf_verify_t *verify = (kvf_verify_t *)job;
    const kvf_copier_t *copier = job->ctx;
    if (verify->source != NULL) {
        kvf_mapped_unuse(verify->source);
    }
    kvf_core_verified(copier->agent->core, verify);
}

static void window_done(kvf_job_t *job) {
    const kvf_copier_t *copier = job->ctx;
    kvf_core_moved(copier->agent->core, (kvf_window_t *)job, KVF_OK);
}

void kvf_copier_have_done(kvf_copier_t *copier, kvf_job_t *job, void (*run)(kvf_job_t *job),
                          void (*done)(kvf_job_t *job), uint64_t bytes) {
    job->run = run;
    job->done = done;
    job->ctx = copier;
    job->bytes = bytes;
    if (bytes > SHORT_BYTES) {
        copier->n_posted++;
        kvf_crew_post(copier->crew, job);
        return;
    }
    job->next = NULL;
    *(copier->short_last != NULL ? &copier->short_last->next : &copier->short_first) = job;
    copier->short_last = job;
}

void kvf_copier_verify(kvf_copier_t *copier, kvf_verify_t *verify) {
    verify->job.later = verify->n_before >= FIRST_JOBS;
    if (verify->peer != 0 && copier->paths != NULL && kvf_paths_verify(copier->paths, verify)) {
        return;
    }
    if (copier->device != NULL) {
        kvf_device_verify(copier, verify);
        return;
    }
    verify->source = verify->peer == 0 || copier->mapped == NULL
                         ? NULL
                         : kvf_mapped_use(copier->mapped, verify->peer);
    verify->status = verify->peer != 0 && verify->source == NULL ? KVF_ERR_PEER_LOST : KVF_OK;
    kvf_copier_have_done(copier, &verify->job, run_verify, verify_done,
                         verify->digests || verify->source != NULL ? verify->bytes : 0);
}

void kvf_copier_digest(kvf_copier_t *copier, kvf_window_t *window) {
    window->job.later = window->peer == 0; /* nobody has asked for it yet */
    if (copier->device != NULL) {
        kvf_device_digest(copier, window);
        return;
    }
    /* What nobody has asked for is the crew's alone: this thread has to be there for who does. */
    kvf_copier_have_done(copier, &window->job, run_window, window_done,
                         window->peer == 0 ? COPIER_WAITS
                         : window->digests ? window->bytes
                                           : 0);
}

kvf_status_t kvf_copier_carry(const kvf_copier_t *copier, kvf_window_t *window) {
    kvf_mover_t *mover = copier->movers[window->mover_idx];
    return mover->ops->post(mover, window);
}

kvf_status_t kvf_copier_post(kvf_copier_t *copier, kvf_window_t *window) {
    return copier->device != NULL ? kvf_device_post(copier, window)
                                  : kvf_copier_carry(copier, window);
}

void kvf_copier_moved(kvf_copier_t *copier, kvf_window_t *window, kvf_status_t status) {
    if (copier->device != NULL) {
        kvf_device_moved(copier, window);
    }
    kvf_core_moved(copier->agent->core, window, status);
}

/* Take back what the crew has done. @return How many jobs. */
static unsigned take_back(kvf_copier_t *copier) {
    unsigned n = 0;
    for (kvf_job_t *job = kvf_crew_take(copier->crew), *next; job != NULL; job = next, n++) {
        next = job->next;
        copier->n_posted--;
        job->done(job);
    }
    return n;
}

unsigned kvf_copier_progress(kvf_copier_t *copier) {
    const bool look = copier->mapped_ready && copier->mapped != NULL;
    unsigned n = look ? kvf_mapped_progress(copier->mapped) : 0;
    uint64_t bytes = 0;
    copier->mapped_ready = false; /* what is left makes it readable again */
    n += take_back(copier);
    n += copier->device == NULL ? 0 : kvf_device_progress(copier);
    n += copier->waits == NULL ? 0 : kvf_fences_progress(copier);
    n += copier->paths == NULL ? 0 : copier->paths->ops->progress(copier->paths);
    while (copier->short_first != NULL && bytes < SHORT_BYTES_PER_TURN) {
        kvf_job_t *job = copier->short_first;
        copier->short_first = job->next;
        copier->short_last = copier->short_first == NULL ? NULL : copier->short_last;
        job->run(job);
        bytes += SHORT_BYTES;
        job->done(job);
        n++;
    }
    kvf_job_t *help = n > 0 ? NULL : kvf_crew_help(copier->crew, HELP_BYTES);
    if (help != NULL) {
        help->run(help);
        copier->n_posted--;
        help->done(help);
        n++;
    }
    return n;
}

void kvf_copier_readable(kvf_copier_t *copier) {
    copier->mapped_ready = true;
}

bool kvf_copier_waits(const kvf_copier_t *copier) {
    return copier->n_posted > 0;
}

bool kvf_copier_is_busy(const kvf_copier_t *copier) {
    return copier->short_first != NULL || (copier->paths != NULL && copier->paths->dirty);
}

/* ---- pools that are mapped ---- */

static uint64_t on_lend(void *ctx, const uint8_t incarnation[KVF_MAPPED_NAME_BYTES]) {
    kvf_incarnation_t who;
    memcpy(who.bytes, incarnation, sizeof(who.bytes));
    return kvf_core_lend(((kvf_copier_t *)ctx)->agent->core, &who);
}

static void on_returned(void *ctx, uint64_t peer) {
    kvf_core_returned(((kvf_copier_t *)ctx)->agent->core, peer);
}

static void on_mapped(void *ctx, uint64_t peer, kvf_status_t status, const char *why) {
    kvf_copier_t *copier = ctx;
    if (copier->device != NULL && status == KVF_OK) {
        kvf_device_mapped(copier, peer);
    } else {
        kvf_core_mapped(copier->agent->core, peer, status, why);
    }
}

kvf_status_t kvf_copier_map(kvf_copier_t *copier, uint64_t peer, const void *address, size_t bytes,
                            const int64_t *n_pages, kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    uint64_t expect[KVF_MAX_GROUPS];
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        if (kvf_mul_u64((uint64_t)n_pages[g], agent->pools[g].page_bytes, &expect[g]) != KVF_OK) {
            return kvf_fail(detail, KVF_ERR_RANGE, "its pools are larger than any memory");
        }
    }
    return copier->paths != NULL
               ? kvf_paths_map(copier->paths, peer, address, bytes, expect, detail)
               : kvf_mapped_map(copier->mapped, peer, address, bytes, expect, detail);
}

void kvf_copier_unmap(kvf_copier_t *copier, uint64_t peer) {
    if (copier->paths != NULL) {
        kvf_paths_unmap(copier->paths, peer);
    } else if (copier->device != NULL) {
        kvf_device_unmap(copier, peer);
    } else {
        kvf_mapped_unmap(copier->mapped, peer);
    }
}

int kvf_copier_fd(const kvf_copier_t *copier) {
    const kvf_paths_t *paths = copier->paths;
    return paths != NULL && paths->ops->fd != NULL ? paths->ops->fd(paths)
           : copier->mapped != NULL                ? kvf_mapped_fd(copier->mapped)
                                                   : -1;
}

bool kvf_copier_arm(const kvf_copier_t *copier) {
    const kvf_paths_t *paths = copier->paths;
    return paths == NULL || paths->ops->arm == NULL || paths->ops->arm(paths);
}

/* ---- paths by which peers fetch ---- */

kvf_status_t kvf_copier_join(kvf_copier_t *copier, uint64_t peer, uint64_t number,
                             const void *invitation, size_t bytes, kvf_detail_t *detail) {
    return kvf_paths_join(copier->paths, peer, number, invitation, bytes, detail);
}

void kvf_copier_joined(kvf_copier_t *copier, uint64_t peer, uint64_t number, const void *answer,
                       size_t bytes) {
    kvf_paths_joined(copier->paths, peer, number, answer, bytes);
}

void kvf_copier_leave(kvf_copier_t *copier, uint64_t peer, uint64_t number, bool own,
                      const char *why) {
    kvf_paths_leave(copier->paths, peer, number, own, why);
}

void kvf_copier_serve(kvf_copier_t *copier, kvf_serve_t *serve) {
    copier->paths->ops->serve(copier->paths, serve);
}

void kvf_copier_evict(kvf_copier_t *copier, uint64_t peer) {
    kvf_paths_evict(copier->paths, peer);
}

/* The descriptors of our pools, for peers. */
static kvf_status_t export_pools(const kvf_agent_t *agent, kvf_mapped_pool_t *pools,
                                 kvf_detail_t *detail) {
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        pools[g] = (kvf_mapped_pool_t){.fd = kvf_mem_shm_fd(&agent->pools[g].mem),
                                       .bytes = agent->pools[g].mem.bytes};
        if (pools[g].fd < 0) {
            return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                            "the pool of group %s is not shared memory: mover mapped needs pools "
                            "of kind shm",
                            agent->layout.groups[g].name);
        }
    }
    return KVF_OK;
}

/* Offer our pools to peers on this machine, if all of them can be mapped. */
static kvf_status_t offer_pools(kvf_copier_t *copier, kvf_detail_t *detail) {
    kvf_agent_t *agent = copier->agent;
    const kvf_mapped_events_t events = {on_lend, on_returned, on_mapped, copier};
    kvf_mapped_pool_t pools[KVF_MAX_GROUPS];
    uint8_t address[KVF_MAPPED_ADDRESS_BYTES];
    kvf_status_t status = copier->device != NULL ? kvf_device_export(copier, pools, detail)
                                                 : export_pools(agent, pools, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_mapped_create(agent->alloc, pools, agent->layout.n_groups,
                               kvf_core_incarnation(agent->core)->bytes, &events, &copier->mapped,
                               detail);
    return status != KVF_OK
               ? status
               : kvf_core_set_mapped_address(agent->core, address,
                                             kvf_mapped_address(copier->mapped, address));
}

kvf_status_t kvf_copier_create(kvf_agent_t *agent, kvf_mover_t *const *movers,
                               void (*wake)(void *ctx), void *ctx, kvf_copier_t **copier_p,
                               kvf_detail_t *detail) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n = agent->config.mover_threads;
    kvf_detail_t why = {""};
    if (n == 0) {
        n = cores < 1 ? 1 : cores > AUTO_THREADS ? AUTO_THREADS : (uint32_t)cores;
    }
    kvf_copier_t *copier = kvf_calloc(agent->alloc, 1, sizeof(*copier));
    if (copier == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    copier->agent = agent;
    copier->movers = movers;
    kvf_status_t status = kvf_crew_create(agent->alloc, n, wake, ctx, &copier->crew);
    if (status != KVF_OK) {
        kvf_free(agent->alloc, copier);
        return kvf_fail(detail, status, "no memory for %u mover threads", n);
    }
    status = agent->cuda == NULL ? KVF_OK : kvf_device_create(copier, n, detail);
    if (status != KVF_OK) {
        kvf_copier_destroy(copier);
        return status;
    }
    const char *name = kvf_agent_mapped_name(agent);
    status = kvf_agent_only_carries(agent) ? KVF_OK
             : strcmp(name, KVF_NCCL) == 0 ? kvf_paths_nccl(copier, wake, ctx, &why)
             : strcmp(name, KVF_RDMA) == 0 ? kvf_paths_rdma(copier, &why)
                                           : offer_pools(copier, &why);
    if (status != KVF_OK && strcmp(agent->config.mover, name) == 0) {
        kvf_copier_destroy(copier);
        return kvf_fail(detail, status, "%s", why.text);
    }
    if (status != KVF_OK && (status != KVF_ERR_UNSUPPORTED || agent->cuda != NULL)) {
        kvf_log(&agent->log, KVF_LOG_WARN, "mover %s is not available, so all goes through %s: %s",
                name, movers[0]->ops->name, why.text);
    }
    kvf_log(&agent->log, KVF_LOG_INFO, "%u threads copy and digest, by %s", n,
            agent->cuda != NULL ? kvf_cuda_name(agent->cuda) : kvf_copy_name());
    *copier_p = copier;
    return KVF_OK;
}

void kvf_copier_destroy(kvf_copier_t *copier) {
    if (copier != NULL) {
        /* Pools of peers that are opened, or closed; and fences of sends without pages. */
        while (copier->n_posted > 0 || copier->waits != NULL) {
            if (take_back(copier) + kvf_fences_progress(copier) == 0) {
                (void)sched_yield();
            }
        }
        kvf_crew_destroy(copier->crew);
        if (copier->paths != NULL) {
            copier->paths->ops->destroy(copier->paths);
        }
        if (copier->device != NULL) {
            kvf_device_destroy(copier);
        }
        kvf_mapped_destroy(copier->mapped);
        kvf_free(copier->agent->alloc, copier);
    }
}
