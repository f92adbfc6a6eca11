/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/fault.h"

#include "kernels/digest.h"

#include <string.h>
#include <utlist.h>

/* A posted window. The mover below carries a private one, so that the poster's pieces stay as they
 * are. */
typedef struct job {
    kvf_window_t carried; /* first: what moved is called with */
    kvf_window_t *window; /* the poster's */
    uint8_t *flipped;     /* the bytes of a damaged piece */
    kvf_status_t status;
    struct job *prev, *next; /* of ended */
} job_t;

struct kvf_mover_fault {
    kvf_mover_t base;
    kvf_mover_ops_t ops; /* a copy: name and checked are those of below */
    kvf_mover_t *below;
    kvf_mover_sink_t sink;
    const kvf_alloc_t *alloc;
    kvf_fault_plan_t plan;
    kvf_fault_counts_t counts;
    job_t *ended; /* done and not told */
};

static kvf_mover_fault_t *fault_of(kvf_mover_t *base) {
    return (kvf_mover_fault_t *)base;
}

/* ---- from below ------------------------------------------------------------------------------ */

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    const kvf_mover_fault_t *fault = ctx;
    return fault->sink.place(fault->sink.ctx, chunk, landing_p);
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    const kvf_mover_fault_t *fault = ctx;
    fault->sink.landed(fault->sink.ctx, chunk);
}

static void on_moved(void *ctx, kvf_window_t *carried, kvf_status_t status) {
    kvf_mover_fault_t *fault = ctx;
    job_t *job = (job_t *)carried;
    job->status = status;
    DL_APPEND(fault->ended, job);
    fault->counts.held++;
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    const kvf_mover_fault_t *fault = ctx;
    fault->sink.broken(fault->sink.ctx, peer, why);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void job_free(const kvf_mover_fault_t *fault, job_t *job) {
    kvf_free(fault->alloc, job->flipped);
    kvf_free(fault->alloc, job->carried.pieces);
    kvf_free(fault->alloc, job);
}

static job_t *job_make(const kvf_mover_fault_t *fault, kvf_window_t *window) {
    job_t *job = kvf_calloc(fault->alloc, 1, sizeof(*job));
    if (job == NULL) {
        return NULL;
    }
    job->carried = *window;
    job->window = window;
    job->carried.pieces = NULL;
    if (window->n_pieces > 0) {
        job->carried.pieces = kvf_calloc(fault->alloc, window->n_pieces, sizeof(kvf_piece_t));
        if (job->carried.pieces == NULL) {
            job_free(fault, job);
            return NULL;
        }
        memcpy(job->carried.pieces, window->pieces, window->n_pieces * sizeof(kvf_piece_t));
    }
    return job;
}

/* Whether the k-th piece of all is in this window, and its index. */
static bool in_window(const kvf_mover_fault_t *fault, const job_t *job, uint64_t k,
                      uint64_t *idx_p) {
    if (k <= fault->counts.pieces || k - fault->counts.pieces > job->carried.n_pieces) {
        return false;
    }
    *idx_p = k - fault->counts.pieces - 1;
    return true;
}

static kvf_status_t damage(const kvf_mover_fault_t *fault, job_t *job) {
    const kvf_fault_plan_t *plan = &fault->plan;
    uint64_t idx;
    if (in_window(fault, job, plan->shift_slot, &idx)) {
        job->carried.pieces[idx].slot++;
    }
    if (in_window(fault, job, plan->shift_ordinal, &idx)) {
        job->carried.pieces[idx].ordinal++;
    }
    if (in_window(fault, job, plan->flip_piece, &idx)) {
        kvf_piece_t *piece = &job->carried.pieces[idx];
        uint64_t at = plan->flip_offset < piece->bytes ? plan->flip_offset : piece->bytes - 1;
        job->flipped = kvf_alloc(fault->alloc, (size_t)piece->bytes);
        if (job->flipped == NULL) {
            return KVF_ERR_AGAIN;
        }
        memcpy(job->flipped, piece->source, (size_t)piece->bytes);
        job->flipped[at] ^= 0x10;
        piece->source = job->flipped;
    }
    return KVF_OK;
}

static kvf_status_t fault_post(kvf_mover_t *base, kvf_window_t *window) {
    kvf_mover_fault_t *fault = fault_of(base);
    if (++fault->counts.posts == fault->plan.fail_post) {
        return fault->plan.fail_status;
    }
    job_t *job = job_make(fault, window);
    kvf_status_t status = KVF_ERR_AGAIN;
    if (job == NULL) {
        return status;
    }
    if (fault->counts.windows + 1 == fault->plan.drop_window) {
        on_moved(fault, &job->carried, KVF_OK);
        status = KVF_OK;
    } else if (damage(fault, job) == KVF_OK) {
        status = fault->below->ops->post(fault->below, &job->carried);
    }
    if (status != KVF_OK) {
        job_free(fault, job);
        return status;
    }
    fault->counts.windows++;
    fault->counts.pieces += window->n_pieces;
    window->priv = job;
    return KVF_OK;
}

/* The digests are those of the poster's bytes, whatever was carried. */
static unsigned tell(kvf_mover_fault_t *fault) {
    unsigned n = 0;
    for (job_t *job; (job = fault->ended) != NULL; n++) {
        kvf_window_t *window = job->window;
        kvf_status_t status = job->status;
        DL_DELETE(fault->ended, job);
        fault->counts.held--;
        for (uint32_t i = 0; status == KVF_OK && i < window->n_pieces; i++) {
            kvf_piece_t *piece = &window->pieces[i];
            if (piece->digest == 0) {
                piece->digest = kvf_digest(piece->source, piece->bytes);
            }
        }
        job_free(fault, job);
        window->priv = NULL;
        fault->sink.moved(fault->sink.ctx, window, status);
    }
    return n;
}

/* ---- the rest of the row --------------------------------------------------------------------- */

static void fault_destroy(kvf_mover_t *base) {
    kvf_mover_fault_t *fault = fault_of(base);
    if (fault != NULL) {
        fault->below->ops->destroy(fault->below);
        (void)tell(fault);
        kvf_free(fault->alloc, fault);
    }
}

static kvf_status_t fault_address(kvf_mover_t *base, void *buf, size_t cap, size_t *bytes_p) {
    kvf_mover_t *below = fault_of(base)->below;
    return below->ops->address(below, buf, cap, bytes_p);
}

static kvf_status_t fault_connect(kvf_mover_t *base, uint64_t peer, const void *address,
                                  size_t bytes, kvf_detail_t *detail) {
    kvf_mover_t *below = fault_of(base)->below;
    return below->ops->connect(below, peer, address, bytes, detail);
}

static void fault_disconnect(kvf_mover_t *base, uint64_t peer) {
    kvf_mover_t *below = fault_of(base)->below;
    below->ops->disconnect(below, peer);
}

static unsigned fault_progress(kvf_mover_t *base) {
    kvf_mover_fault_t *fault = fault_of(base);
    unsigned n = fault->below->ops->progress(fault->below);
    return fault->plan.hold ? n : n + tell(fault);
}

static int fault_fd(kvf_mover_t *base) {
    kvf_mover_t *below = fault_of(base)->below;
    return below->ops->fd(below);
}

static bool fault_arm(kvf_mover_t *base) {
    kvf_mover_fault_t *fault = fault_of(base);
    bool quiet = fault->plan.hold || fault->ended == NULL;
    return quiet && fault->below->ops->arm(fault->below);
}

static uint64_t fault_max_sleep_us(kvf_mover_t *base) {
    kvf_mover_t *below = fault_of(base)->below;
    return below->ops->max_sleep_us(below);
}

kvf_status_t kvf_mover_fault_create(const kvf_mover_sink_t *sink, const kvf_alloc_t *alloc,
                                    kvf_mover_fault_t **fault_p) {
    kvf_mover_fault_t *fault = kvf_calloc(alloc, 1, sizeof(*fault));
    if (fault == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    fault->sink = *sink;
    fault->alloc = alloc;
    *fault_p = fault;
    return KVF_OK;
}

kvf_mover_sink_t kvf_mover_fault_sink(kvf_mover_fault_t *fault) {
    return (kvf_mover_sink_t){on_place, on_landed, on_moved, on_broken, fault};
}

kvf_mover_t *kvf_mover_fault_stack(kvf_mover_fault_t *fault, kvf_mover_t *below) {
    if (below == NULL) {
        kvf_free(fault->alloc, fault);
        return NULL;
    }
    fault->ops = (kvf_mover_ops_t){
        .name = below->ops->name,
        .checked = below->ops->checked,
        .destroy = fault_destroy,
        .address = fault_address,
        .connect = fault_connect,
        .disconnect = fault_disconnect,
        .post = fault_post,
        .progress = fault_progress,
        .fd = fault_fd,
        .arm = fault_arm,
        .max_sleep_us = fault_max_sleep_us,
    };
    fault->below = below;
    fault->base.ops = &fault->ops;
    return &fault->base;
}

void kvf_mover_fault_set(kvf_mover_fault_t *fault, const kvf_fault_plan_t *plan) {
    fault->plan = plan != NULL ? *plan : (kvf_fault_plan_t){0};
}

kvf_fault_counts_t kvf_mover_fault_counts(const kvf_mover_fault_t *fault) {
    return fault->counts;
}
