/* SPDX-License-Identifier: Apache-2.0 */
/* What the agent does with pages on a device. Whatever waits for the device is a job of the crew:
 * the agent's thread only hands it over and takes it back.
 *
 * - A peer on this machine reads our pools through a mapping of its own, and we its: one launch for
 *   each job (mover/cuda.h). Mappings are opened when the peer's handles have come, and closed
 *   before its pools are given back.
 * - Other peers get windows that were gathered into memory of the CPU's, by the mover; what comes
 *   from them lands in such memory, and is copied from there when it is verified. */
#include "transceiver/agent_copy.h"
#include "transceiver/mover/cuda.h"

#include <string.h>
#include <unistd.h>

/* Windows that are gathered, or carried, at once: enough that the next one is ready when one has
 * left, for each of the crew's threads. */
#define N_STAGES 8
#define STAGE_MIN_BYTES (UINT64_C(1) << 20)
/* Where pieces begin in a stage: what vector loads of the device are aligned to. */
#define PIECE_ALIGN UINT64_C(16)

/* The pools of a peer. */
typedef struct import {
    kvf_job_t job; /* opens them, or closes them */
    kvf_copier_t *copier;
    uint64_t peer;
    kvf_mapped_source_t *source; /* in use as long as something is open */
    kvf_cuda_import_t pools[KVF_MAX_GROUPS];
    uint32_t n_users; /* jobs that read them */
    bool ready;
    bool gone; /* unmap was called */
    bool busy; /* the crew has the job */
    kvf_status_t status;
    kvf_detail_t detail;
    struct import *next;
} import_t;

/* A window that leaves through the CPU's memory. */
typedef struct stage {
    kvf_job_t job;
    kvf_copier_t *copier;
    kvf_window_t *window; /* NULL: free */
    uint8_t *bytes;       /* pinned; room for n_bytes */
    uint64_t n_bytes;
    bool gathered; /* and the mover has no room for it yet */
    kvf_status_t status;
} stage_t;

struct kvf_device_copier {
    kvf_lanes_t *lanes;
    import_t *imports;
    int fds[KVF_MAX_GROUPS]; /* of our pools, for peers; -1: their handles are enough */
    stage_t stages[N_STAGES];
};

/* ---- jobs: copies and digests ---- */

static void run_verify(kvf_job_t *job) {
    kvf_verify_t *verify = (kvf_verify_t *)job;
    const kvf_copier_t *copier = job->ctx;
    const import_t *import = verify->source;
    kvf_lane_t *lane = kvf_lanes_take(copier->device->lanes); /* one for each thread */
    for (uint32_t i = 0; i < verify->n_items; i++) {
        kvf_verify_item_t *item = &verify->items[i];
        uint8_t *at = kvf_copier_page(copier, item->group_idx, item->slot, item->offset);
        uint64_t *digest_p = verify->digests ? &item->digest : NULL;
        item->digest = 0;
        if (import != NULL) {
            const uint8_t *from = (const uint8_t *)import->pools[item->group_idx].base;
            uint64_t page_bytes = copier->agent->pools[item->group_idx].page_bytes;
            kvf_lane_copy(lane, at, from + (uint64_t)item->source_slot * page_bytes + item->offset,
                          item->bytes, digest_p);
        } else if (item->landing != NULL) {
            kvf_lane_copy_from_host(lane, at, item->landing, item->bytes, digest_p);
        } else if (digest_p != NULL) { /* a card has written there */
            kvf_lane_copy(lane, NULL, at, item->bytes, digest_p);
        }
    }
    verify->status = kvf_lane_finish(lane, NULL);
    kvf_lanes_give(lane);
}

static void close_if_unused(import_t *import);

static void verify_done(kvf_job_t *job) {
    kvf_verify_t *verify = (kvf_verify_t *)job;
    const kvf_copier_t *copier = job->ctx;
    import_t *import = verify->source;
    if (import != NULL) {
        import->n_users--;
        close_if_unused(import);
    }
    kvf_core_verified(copier->agent->core, verify);
}

static import_t *find(const kvf_copier_t *copier, uint64_t peer) {
    import_t *import = copier->device->imports;
    while (import != NULL && (import->gone || import->peer != peer)) {
        import = import->next;
    }
    return import;
}

static void run_nothing(kvf_job_t *job) {
    (void)job;
}

void kvf_device_verify(kvf_copier_t *copier, kvf_verify_t *verify) {
    import_t *import = verify->peer == 0 ? NULL : find(copier, verify->peer);
    bool lost = verify->peer != 0 && (import == NULL || !import->ready);
    verify->source = lost ? NULL : import;
    verify->status = lost ? KVF_ERR_PEER_LOST : KVF_OK;
    if (!lost && import != NULL) {
        import->n_users++;
    }
    kvf_copier_have_done(copier, &verify->job, lost ? run_nothing : run_verify, verify_done,
                         lost ? 0 : COPIER_WAITS);
}

static void run_digest(kvf_job_t *job) {
    kvf_window_t *window = (kvf_window_t *)job;
    const kvf_copier_t *copier = job->ctx;
    kvf_lane_t *lane = kvf_lanes_take(copier->device->lanes);
    for (uint32_t i = 0; window->digests && i < window->n_pieces; i++) {
        kvf_piece_t *piece = &window->pieces[i];
        if (piece->digest == 0) { /* the others were made ahead */
            kvf_lane_copy(lane, NULL, piece->source, piece->bytes, &piece->digest);
        }
    }
    window->priv = kvf_lane_finish(lane, NULL) == KVF_OK ? NULL : window; /* whether it failed */
    kvf_lanes_give(lane);
}

static void digest_done(kvf_job_t *job) {
    kvf_window_t *window = (kvf_window_t *)job;
    const kvf_copier_t *copier = job->ctx;
    kvf_core_moved(copier->agent->core, window, window->priv == NULL ? KVF_OK : KVF_ERR_IO);
}

void kvf_device_digest(kvf_copier_t *copier, kvf_window_t *window) {
    kvf_copier_have_done(copier, &window->job, run_digest, digest_done, COPIER_WAITS);
}

/* ---- windows that are carried ---- */

static uint64_t aligned(uint64_t bytes) {
    return (bytes + PIECE_ALIGN - 1) & ~(PIECE_ALIGN - 1);
}

static kvf_status_t gather(stage_t *stage) {
    const kvf_lanes_t *lanes = stage->copier->device->lanes;
    kvf_window_t *window = stage->window;
    uint64_t need = window->bytes + PIECE_ALIGN * window->n_pieces, at = 0;
    if (need > stage->n_bytes) {
        kvf_lanes_unpin(lanes, stage->bytes);
        stage->n_bytes = need < STAGE_MIN_BYTES ? STAGE_MIN_BYTES : need;
        stage->bytes = kvf_lanes_pinned(lanes, stage->n_bytes);
        if (stage->bytes == NULL) {
            stage->n_bytes = 0;
            return KVF_ERR_NO_MEMORY;
        }
    }
    kvf_lane_t *lane = kvf_lanes_take(stage->copier->device->lanes);
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        kvf_piece_t *piece = &window->pieces[i];
        bool wanted = window->digests && piece->digest == 0;
        kvf_lane_copy(lane, stage->bytes + at, piece->source, piece->bytes,
                      wanted ? &piece->digest : NULL);
        piece->source = stage->bytes + at;
        at += aligned(piece->bytes);
    }
    kvf_status_t status = kvf_lane_finish(lane, NULL);
    kvf_lanes_give(lane);
    return status;
}

static void run_gather(kvf_job_t *job) {
    stage_t *stage = (stage_t *)job;
    stage->status = gather(stage);
}

/* Hand what was gathered to the mover; or tell the core that there is no way. */
static void carry(stage_t *stage) {
    kvf_copier_t *copier = stage->copier;
    kvf_window_t *window = stage->window;
    if (stage->status == KVF_OK) {
        stage->status = kvf_copier_carry(copier, window);
    }
    stage->gathered = stage->status == KVF_ERR_AGAIN;
    if (stage->gathered) {
        stage->status = KVF_OK; /* when something has left */
    } else if (stage->status != KVF_OK) {
        stage->window = NULL;
        kvf_core_moved(copier->agent->core, window, stage->status);
    }
}

static void gather_done(kvf_job_t *job) {
    carry((stage_t *)job);
}

/* Whether a peer has its share of the stages: one whose path stands still must not have them all.
 */
static bool has_its_share(const kvf_copier_t *copier, uint64_t peer) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < N_STAGES; i++) {
        const kvf_window_t *window = copier->device->stages[i].window;
        n += window != NULL && window->peer == peer;
    }
    return n >= N_STAGES / 2;
}

kvf_status_t kvf_device_post(kvf_copier_t *copier, kvf_window_t *window) {
    if (has_its_share(copier, window->peer)) {
        return KVF_ERR_AGAIN;
    }
    for (uint32_t i = 0; i < N_STAGES; i++) {
        stage_t *stage = &copier->device->stages[i];
        if (stage->window == NULL) {
            stage->copier = copier;
            stage->window = window;
            stage->gathered = false;
            stage->job.later = false;
            kvf_copier_have_done(copier, &stage->job, run_gather, gather_done, COPIER_WAITS);
            return KVF_OK;
        }
    }
    return KVF_ERR_AGAIN;
}

void kvf_device_moved(kvf_copier_t *copier, const kvf_window_t *window) {
    for (uint32_t i = 0; i < N_STAGES; i++) {
        stage_t *stage = &copier->device->stages[i];
        stage->window = stage->window == window ? NULL : stage->window;
    }
}

unsigned kvf_device_progress(kvf_copier_t *copier) {
    unsigned n = 0;
    for (uint32_t i = 0; i < N_STAGES; i++) {
        stage_t *stage = &copier->device->stages[i];
        if (stage->window != NULL && stage->gathered) {
            carry(stage);
            n += !stage->gathered;
        }
    }
    return n;
}

/* ---- peers' pools ---- */

static void close_fd(int fd) {
    if (fd >= 0) {
        (void)close(fd);
    }
}

static void run_open(kvf_job_t *job) {
    import_t *import = (import_t *)job;
    const kvf_agent_t *agent = import->copier->agent;
    import->status = KVF_OK;
    for (uint32_t g = 0; g < agent->layout.n_groups && import->status == KVF_OK; g++) {
        int fd = kvf_mapped_take_fd(import->source, g);
        import->status = kvf_cuda_open_import(agent->cuda, kvf_mapped_handle(import->source, g), fd,
                                              kvf_mapped_bytes(import->source, g),
                                              &import->pools[g], &import->detail);
        close_fd(fd);
    }
}

static void run_close(kvf_job_t *job) {
    import_t *import = (import_t *)job;
    const kvf_agent_t *agent = import->copier->agent;
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        kvf_cuda_close_import(agent->cuda, &import->pools[g]);
    }
}

static void close_done(kvf_job_t *job) {
    import_t *import = (import_t *)job;
    kvf_copier_t *copier = import->copier;
    import_t **link = &copier->device->imports;
    while (*link != import) {
        link = &(*link)->next;
    }
    *link = import->next;
    kvf_mapped_unuse(import->source); /* only now does its owner hear of it */
    kvf_free(copier->agent->alloc, import);
}

static void close_if_unused(import_t *import) {
    if (import->gone && import->n_users == 0 && !import->busy) {
        import->busy = true;
        kvf_copier_have_done(import->copier, &import->job, run_close, close_done, COPIER_WAITS);
    }
}

static void open_done(kvf_job_t *job) {
    import_t *import = (import_t *)job;
    kvf_copier_t *copier = import->copier;
    import->busy = false;
    if (!import->gone && import->status == KVF_OK) {
        import->ready = true;
        kvf_core_mapped(copier->agent->core, import->peer, KVF_OK, "");
    } else if (!import->gone) {
        import->gone = true;
        kvf_mapped_unmap(copier->mapped, import->peer);
        kvf_core_mapped(copier->agent->core, import->peer, import->status, import->detail.text);
    }
    close_if_unused(import);
}

void kvf_device_mapped(kvf_copier_t *copier, uint64_t peer) {
    import_t *import = kvf_calloc(copier->agent->alloc, 1, sizeof(*import));
    if (import == NULL) {
        kvf_mapped_unmap(copier->mapped, peer);
        kvf_core_mapped(copier->agent->core, peer, KVF_ERR_NO_MEMORY, "no memory to map pools");
        return;
    }
    import->copier = copier;
    import->peer = peer;
    import->source = kvf_mapped_use(copier->mapped, peer);
    import->busy = true;
    import->next = copier->device->imports;
    copier->device->imports = import;
    kvf_copier_have_done(copier, &import->job, run_open, open_done, COPIER_WAITS);
}

void kvf_device_unmap(kvf_copier_t *copier, uint64_t peer) {
    import_t *import = find(copier, peer);
    kvf_mapped_unmap(copier->mapped, peer);
    if (import != NULL) {
        import->gone = true;
        import->ready = false;
        close_if_unused(import);
    }
}

kvf_status_t kvf_device_export(const kvf_copier_t *copier, kvf_mapped_pool_t *pools,
                               kvf_detail_t *detail) {
    kvf_agent_t *agent = copier->agent;
    kvf_status_t status = KVF_OK;
    _Static_assert(KVF_MAPPED_HANDLE_BYTES == KVF_CUDA_HANDLE_BYTES, "handles");
    for (uint32_t g = 0; g < agent->layout.n_groups && status == KVF_OK; g++) {
        const kvf_mem_t *mem = &agent->pools[g].mem;
        status = kvf_cuda_export(mem, pools[g].handle, &copier->device->fds[g], detail);
        pools[g].on_device = true;
        pools[g].fd = copier->device->fds[g];
        pools[g].bytes = mem->bytes;
    }
    return status;
}

/* ---- life ---- */

kvf_status_t kvf_device_create(kvf_copier_t *copier, uint32_t n, kvf_detail_t *detail) {
    const kvf_agent_t *agent = copier->agent;
    kvf_device_copier_t *device = kvf_calloc(agent->alloc, 1, sizeof(*device));
    if (device == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the agent");
    }
    kvf_status_t status =
        kvf_lanes_create(agent->alloc, kvf_cuda_context(agent->cuda), n, &device->lanes, detail);
    if (status != KVF_OK) {
        kvf_free(agent->alloc, device);
        return status;
    }
    memset(device->fds, -1, sizeof(device->fds));
    copier->device = device;
    return KVF_OK;
}

void kvf_device_destroy(kvf_copier_t *copier) {
    kvf_device_copier_t *device = copier->device;
    while (device->imports != NULL) {
        import_t *import = device->imports;
        run_close(&import->job);
        close_done(&import->job);
    }
    for (uint32_t i = 0; i < N_STAGES; i++) {
        kvf_lanes_unpin(device->lanes, device->stages[i].bytes);
    }
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        close_fd(device->fds[g]); /* what peers were given are others */
    }
    kvf_lanes_destroy(device->lanes);
    kvf_free(copier->agent->alloc, device);
    copier->device = NULL;
}
