/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/sim.h"

#include "kernels/digest.h"
#include "kvmgr/base/clock.h"
#include "kvmgr/base/cursor.h"

#include <string.h>
#include <utlist.h>

/* A connected peer of a mover. */
typedef struct path {
    uint64_t number;
    uint64_t agent;
    bool broken, untold;
    struct path *prev, *next;
} path_t;

/* A posted window. */
typedef struct job {
    kvf_window_t *window;
    uint64_t n_waiting;
    kvf_status_t status;
    struct job *prev, *next; /* of jobs */
} job_t;

typedef struct packet {
    kvf_sim_chunk_t what;
    job_t *job;                 /* NULL once under way */
    kvf_piece_t *piece;         /* of the job */
    struct packet *prev, *next; /* of pending, or of an inbox */
    uint8_t data[];
} packet_t;

typedef struct mover {
    kvf_mover_t base;
    kvf_sim_net_t *net;
    kvf_mover_sink_t sink;
    uint64_t agent;
    path_t *paths;
    job_t *jobs;     /* posted and not told */
    packet_t *inbox; /* arrived */
    struct mover *prev, *next;
} mover_t;

struct kvf_sim_net {
    kvf_sim_config_t config;
    const kvf_alloc_t *alloc;
    mover_t *movers;
    packet_t *pending;
};

static mover_t *mover_of(kvf_mover_t *base) {
    return (mover_t *)base;
}

static mover_t *find_mover(const kvf_sim_net_t *net, uint64_t agent) {
    mover_t *m;
    DL_SEARCH_SCALAR(net->movers, m, agent, agent);
    return m;
}

static path_t *find_path(const mover_t *m, uint64_t number) {
    path_t *path;
    DL_SEARCH_SCALAR(m->paths, path, number, number);
    return path;
}

static packet_t *find_packet(const kvf_sim_net_t *net, size_t idx) {
    packet_t *packet = net->pending;
    while (packet != NULL && idx-- > 0) {
        packet = packet->next;
    }
    return packet;
}

/* ---- the driver's side ----------------------------------------------------------------------- */

kvf_status_t kvf_sim_net_create(const kvf_sim_config_t *config, const kvf_alloc_t *alloc,
                                kvf_sim_net_t **net_p) {
    kvf_sim_net_t *net = kvf_calloc(alloc, 1, sizeof(*net));
    if (net == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    net->config = *config;
    net->alloc = alloc;
    *net_p = net;
    return KVF_OK;
}

static void free_packets(const kvf_alloc_t *alloc, packet_t *packets) {
    packet_t *packet, *next;
    DL_FOREACH_SAFE(packets, packet, next) {
        kvf_free(alloc, packet);
    }
}

void kvf_sim_net_destroy(kvf_sim_net_t *net) {
    if (net != NULL) {
        free_packets(net->alloc, net->pending);
        kvf_free(net->alloc, net);
    }
}

size_t kvf_sim_net_pending(const kvf_sim_net_t *net) {
    size_t n;
    packet_t *packet;
    DL_COUNT(net->pending, packet, n);
    return n;
}

bool kvf_sim_net_peek(const kvf_sim_net_t *net, size_t idx, kvf_sim_chunk_t *chunk_p) {
    const packet_t *packet = find_packet(net, idx);
    if (packet == NULL) {
        return false;
    }
    *chunk_p = packet->what;
    return true;
}

/* Read the source. A piece is hashed when its first byte leaves, as a real mover does. */
static void leave(packet_t *packet) {
    uint64_t off = packet->what.chunk.offset - packet->piece->offset;
    if (off == 0 && packet->piece->digest == 0) {
        packet->piece->digest = kvf_digest(packet->piece->source, packet->piece->bytes);
    }
    memcpy(packet->data, packet->piece->source + off, packet->what.chunk.bytes);
    packet->what.under_way = true;
    packet->job->n_waiting--;
    packet->job = NULL;
    packet->piece = NULL;
}

static void arrive(kvf_sim_net_t *net, packet_t *packet) {
    const kvf_chunk_t *chunk = &packet->what.chunk;
    mover_t *to = find_mover(net, packet->what.to);
    DL_DELETE(net->pending, packet);
    if (net->config.checked && to != NULL) {
        DL_APPEND(to->inbox, packet);
        return;
    }
    if (!net->config.checked) {
        uint8_t *slot =
            net->config.find(net->config.ctx, packet->what.to, chunk->group_idx, chunk->slot);
        if (slot != NULL) {
            memcpy(slot + chunk->offset, packet->data, chunk->bytes);
        }
    }
    kvf_free(net->alloc, packet);
}

bool kvf_sim_net_step(kvf_sim_net_t *net, size_t idx) {
    packet_t *packet = find_packet(net, idx);
    if (packet == NULL) {
        return false;
    }
    if (packet->what.under_way) {
        arrive(net, packet);
    } else {
        leave(packet);
    }
    return true;
}

bool kvf_sim_net_drop(kvf_sim_net_t *net, size_t idx) {
    packet_t *packet = find_packet(net, idx);
    if (packet == NULL) {
        return false;
    }
    if (!packet->what.under_way) {
        leave(packet);
    }
    DL_DELETE(net->pending, packet);
    kvf_free(net->alloc, packet);
    return true;
}

void kvf_sim_net_run(kvf_sim_net_t *net) {
    while (kvf_sim_net_step(net, 0)) {
    }
}

/* Fail what waits at m for a peer; what is under way stays. */
static void fail_waiting(mover_t *m, uint64_t peer) {
    packet_t *packet, *next;
    DL_FOREACH_SAFE(m->net->pending, packet, next) {
        if (packet->job != NULL && packet->what.from == m->agent &&
            packet->job->window->peer == peer) {
            packet->job->status = KVF_ERR_PEER_LOST;
            packet->job->n_waiting--;
            DL_DELETE(m->net->pending, packet);
            kvf_free(m->net->alloc, packet);
        }
    }
}

static void break_paths(kvf_sim_net_t *net, uint64_t from, uint64_t to) {
    mover_t *m = find_mover(net, from);
    path_t *path;
    DL_FOREACH(m != NULL ? m->paths : NULL, path) {
        if (path->agent == to && !path->broken) {
            path->broken = true;
            path->untold = true;
            fail_waiting(m, path->number);
        }
    }
}

void kvf_sim_net_break(kvf_sim_net_t *net, uint64_t agent_a, uint64_t agent_b) {
    break_paths(net, agent_a, agent_b);
    break_paths(net, agent_b, agent_a);
}

/* ---- the mover's side ------------------------------------------------------------------------ */

static kvf_status_t sim_address(kvf_mover_t *base, void *buf, size_t cap, size_t *bytes_p) {
    kvf_writer_t writer = kvf_writer(buf, cap);
    kvf_write_u64(&writer, mover_of(base)->agent);
    if (writer.bad) {
        return KVF_ERR_RANGE;
    }
    *bytes_p = sizeof(uint64_t);
    return KVF_OK;
}

static kvf_status_t sim_connect(kvf_mover_t *base, uint64_t number, const void *address,
                                size_t bytes, kvf_detail_t *detail) {
    mover_t *m = mover_of(base);
    kvf_reader_t reader = kvf_reader(address, bytes);
    uint64_t agent = kvf_read_u64(&reader);
    if (number == 0 || find_path(m, number) != NULL || !kvf_reader_done(&reader)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "peer number or address is not usable");
    }
    path_t *path = kvf_calloc(m->net->alloc, 1, sizeof(*path));
    if (path == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a path to a peer");
    }
    path->number = number;
    path->agent = agent;
    DL_APPEND(m->paths, path);
    return KVF_OK;
}

static void sim_disconnect(kvf_mover_t *base, uint64_t number) {
    mover_t *m = mover_of(base);
    path_t *path = find_path(m, number);
    if (path != NULL) {
        fail_waiting(m, number);
        DL_DELETE(m->paths, path);
        kvf_free(m->net->alloc, path);
    }
}

/* The chunks of one piece. */
static kvf_status_t cut(const mover_t *m, uint64_t to, job_t *job, kvf_piece_t *piece,
                        packet_t **packets) {
    for (uint64_t off = 0; off < piece->bytes;) {
        uint64_t left = piece->bytes - off;
        uint64_t bytes = left < m->net->config.chunk_bytes ? left : m->net->config.chunk_bytes;
        packet_t *packet = kvf_alloc(m->net->alloc, sizeof(*packet) + (size_t)bytes);
        if (packet == NULL) {
            return KVF_ERR_AGAIN;
        }
        *packet = (packet_t){
            .what = {m->agent,
                     to,
                     false,
                     {job->window->transfer, piece->group_idx, piece->slot, piece->ordinal,
                      piece->generation, piece->offset + off, bytes, job->window->grant_key}},
            .job = job,
            .piece = piece,
        };
        DL_APPEND(*packets, packet);
        job->n_waiting++;
        off += bytes;
    }
    return KVF_OK;
}

static kvf_status_t sim_post(kvf_mover_t *base, kvf_window_t *window) {
    mover_t *m = mover_of(base);
    const path_t *path = find_path(m, window->peer);
    packet_t *packets = NULL;
    if (path == NULL || path->broken) {
        return KVF_ERR_PEER_LOST;
    }
    job_t *job = kvf_calloc(m->net->alloc, 1, sizeof(*job));
    if (job == NULL) {
        return KVF_ERR_AGAIN;
    }
    job->window = window;
    for (uint32_t i = 0; i < window->n_pieces; i++) {
        if (cut(m, path->agent, job, &window->pieces[i], &packets) != KVF_OK) {
            free_packets(m->net->alloc, packets);
            kvf_free(m->net->alloc, job);
            return KVF_ERR_AGAIN;
        }
    }
    DL_CONCAT(m->net->pending, packets);
    DL_APPEND(m->jobs, job);
    window->priv = job;
    return KVF_OK;
}

static job_t *next_done(const mover_t *m) {
    job_t *job;
    DL_SEARCH_SCALAR(m->jobs, job, n_waiting, 0);
    return job;
}

static path_t *next_untold(const mover_t *m) {
    path_t *path;
    DL_SEARCH_SCALAR(m->paths, path, untold, true);
    return path;
}

/* One at a time: a callback may post, connect and disconnect. */
static unsigned sim_progress(kvf_mover_t *base) {
    mover_t *m = mover_of(base);
    unsigned n = 0;
    packet_t *packet;
    job_t *job;
    path_t *path;
    for (; (packet = m->inbox) != NULL; n++) {
        DL_DELETE(m->inbox, packet);
        kvf_mover_land(&m->sink, &packet->what.chunk, packet->data);
        kvf_free(m->net->alloc, packet);
    }
    for (; (job = next_done(m)) != NULL; n++) {
        kvf_window_t *window = job->window;
        kvf_status_t status = job->status;
        DL_DELETE(m->jobs, job);
        kvf_free(m->net->alloc, job);
        window->priv = NULL;
        m->sink.moved(m->sink.ctx, window, status);
    }
    for (; (path = next_untold(m)) != NULL; n++) {
        path->untold = false;
        m->sink.broken(m->sink.ctx, path->number, "the simulated path broke");
    }
    return n;
}

static bool sim_arm(kvf_mover_t *base) {
    const mover_t *m = mover_of(base);
    return m->inbox == NULL && next_done(m) == NULL && next_untold(m) == NULL;
}

static int sim_fd(kvf_mover_t *base) {
    (void)base;
    return -1;
}

static uint64_t sim_max_sleep_us(kvf_mover_t *base) {
    (void)base;
    return 1000;
}

static void sim_destroy(kvf_mover_t *base) {
    mover_t *m = mover_of(base);
    if (m == NULL) {
        return;
    }
    while (m->paths != NULL) {
        sim_disconnect(base, m->paths->number);
    }
    free_packets(m->net->alloc, m->inbox);
    m->inbox = NULL;
    (void)sim_progress(base);
    DL_DELETE(m->net->movers, m);
    kvf_free(m->net->alloc, m);
}

static const kvf_mover_ops_t checked_ops = {
    .name = "sim",
    .checked = true,
    .destroy = sim_destroy,
    .address = sim_address,
    .connect = sim_connect,
    .disconnect = sim_disconnect,
    .post = sim_post,
    .progress = sim_progress,
    .fd = sim_fd,
    .arm = sim_arm,
    .max_sleep_us = sim_max_sleep_us,
};

static const kvf_mover_ops_t one_sided_ops = {
    .name = "sim",
    .checked = false,
    .destroy = sim_destroy,
    .address = sim_address,
    .connect = sim_connect,
    .disconnect = sim_disconnect,
    .post = sim_post,
    .progress = sim_progress,
    .fd = sim_fd,
    .arm = sim_arm,
    .max_sleep_us = sim_max_sleep_us,
};

kvf_status_t kvf_mover_sim_create(kvf_sim_net_t *net, uint64_t agent, const kvf_mover_sink_t *sink,
                                  kvf_mover_t **mover_p) {
    mover_t *m = kvf_calloc(net->alloc, 1, sizeof(*m));
    if (m == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    m->base.ops = net->config.checked ? &checked_ops : &one_sided_ops;
    m->net = net;
    m->sink = *sink;
    m->agent = agent;
    DL_APPEND(net->movers, m);
    *mover_p = &m->base;
    return KVF_OK;
}
