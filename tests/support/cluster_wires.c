/* SPDX-License-Identifier: Apache-2.0 */
/* The connections of a cluster's nodes: bytes in order, until somebody cuts them. */
#include "cluster_impl.h"

#include <criterion/criterion.h>
#include <stdlib.h>

/* ---- actions ---- */

static uint64_t connect_to(cluster_t *cluster, node_t *from, node_t *to) {
    cr_assert(cluster->n_ends + 2 <= MAX_ENDS);
    uint64_t conn = cluster->n_ends + 1;
    cluster->n_ends += 2;
    cluster->ends[conn] = (end_t){.node = from, .open = true};
    cluster->ends[conn + 1] = (end_t){.node = to, .open = to != NULL && !to->dead};
    return conn;
}

kvf_status_t wires_dial(void *ctx, const char *address, uint64_t *conn_p, kvf_detail_t *detail) {
    node_t *node = ctx;
    (void)detail;
    for (size_t i = 0; i < node->cluster->n_nodes; i++) {
        if (strcmp(node->cluster->nodes[i].address, address) == 0) {
            *conn_p = connect_to(node->cluster, node, &node->cluster->nodes[i]);
            return KVF_OK;
        }
    }
    return KVF_ERR_INVALID;
}

static void push(end_t *end, const uint8_t *data, size_t bytes) {
    end->data = realloc(end->data, end->bytes + bytes);
    memcpy(end->data + end->bytes, data, bytes);
    end->bytes += bytes;
}

static void cut_all(cluster_t *cluster, cut_t how) {
    for (uint64_t conn = 1; conn <= cluster->n_ends; conn++) {
        end_t *end = &cluster->ends[conn];
        bool dialler = conn % 2 == 1;
        if (end->cut || how == CUT_NOT) {
            continue;
        }
        end->cut = true;
        if ((dialler && how == CUT_UNSEEN_BY_DIALLER) || (!dialler && how == CUT_UNSEEN)) {
            end->deaf_until_us = cluster->now_us + 60000;
        } else {
            end->closing = true;
            end->bytes = how == CUT_READ ? end->bytes : 0;
        }
    }
}

/* A message is under way, which the test may change: one frame is written at a time. */
static void push_message(const cluster_t *cluster, end_t *end, const uint8_t *data, size_t bytes) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    ProtobufCMessage *message;
    uint8_t *frame;
    size_t frame_bytes;
    kvf_frame_type_t type = bytes > KVF_FRAME_HEADER_BYTES ? (kvf_frame_type_t)data[4] : 0;
    if (cluster->on_message == NULL || type < KVF_FRAME_RECV_REQUEST ||
        memcmp(data, "KVFR", 4) != 0) {
        push(end, data, bytes);
        return;
    }
    cr_assert_eq(kvf_message_unpack(alloc, type, data + KVF_FRAME_HEADER_BYTES,
                                    bytes - KVF_FRAME_HEADER_BYTES, &message, NULL),
                 KVF_OK);
    cluster->on_message(type, message);
    cr_assert_eq(kvf_message_pack(alloc, type, message, 1 << 20, &frame, &frame_bytes), KVF_OK);
    kvf_message_free(alloc, message);
    push(end, frame, frame_bytes);
    kvf_free(alloc, frame);
}

void wires_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes) {
    node_t *node = ctx;
    cluster_t *cluster = node->cluster;
    if (cluster->on_write != NULL) {
        cluster->on_write(data, bytes);
    }
    if (cluster->ends[wires_other(conn)].open && !cluster->ends[wires_other(conn)].cut) {
        push_message(cluster, &cluster->ends[wires_other(conn)], data, bytes);
    }
    if (cluster->writes_to_cut > 0 && --cluster->writes_to_cut == 0) {
        cut_all(cluster, cluster->cut_how);
    }
    kvf_free(&node->alloc.table, data);
}

void wires_close(void *ctx, uint64_t conn) {
    cluster_t *cluster = ((node_t *)ctx)->cluster;
    cluster->ends[conn].open = false;
    cluster->ends[wires_other(conn)].closing = true;
}

bool wires_step(cluster_t *cluster, uint64_t conn) {
    end_t *end = &cluster->ends[conn];
    if (end->node == NULL || !node_runs(end->node) || !end->open ||
        cluster->now_us < end->deaf_until_us) {
        return false;
    }
    bool refused = conn % 2 == 1 && !end->told && !cluster->ends[conn + 1].open &&
                   !cluster->ends[conn + 1].told;
    if (refused) {
        end->open = false;
        kvf_core_closed(end->node->core, conn, "connection refused");
        return true;
    }
    if (!end->told) {
        end->told = true;
        kvf_core_opened(end->node->core, conn, conn % 2 == 0, end->node->address);
        return true;
    }
    if (end->bytes > 0) {
        /* In two reads, so that frames arrive in pieces. */
        size_t first = end->bytes > 1 ? end->bytes / 2 : 1, bytes = end->bytes;
        uint8_t *data = end->data;
        end->data = NULL;
        end->bytes = 0;
        kvf_core_bytes(end->node->core, conn, data, first);
        if (bytes > first && end->open) {
            kvf_core_bytes(end->node->core, conn, data + first, bytes - first);
        }
        free(data);
        return true;
    }
    if (end->closing) {
        end->open = false;
        kvf_core_closed(end->node->core, conn, "connection reset");
        return true;
    }
    return false;
}

/* ---- for tests ---- */

void cluster_on_write(cluster_t *cluster, void (*fn)(uint8_t *data, size_t bytes)) {
    cluster->on_write = fn;
}

void cluster_on_message(cluster_t *cluster,
                        void (*fn)(kvf_frame_type_t type, ProtobufCMessage *message)) {
    cluster->on_message = fn;
}

void cluster_cut(cluster_t *cluster) {
    cut_all(cluster, CUT_LOST);
    cluster_run(cluster);
}

void cluster_cut_at(cluster_t *cluster, uint64_t write, cut_t how) {
    cluster->writes_to_cut = write;
    cluster->cut_how = how;
}

bool cluster_was_cut(const cluster_t *cluster) {
    return cluster->writes_to_cut == 0;
}

uint64_t cluster_stranger(node_t *node, const void *data, size_t bytes) {
    uint64_t conn = connect_to(node->cluster, NULL, node);
    push(&node->cluster->ends[conn + 1], data, bytes);
    return conn;
}

bool cluster_stranger_closed(cluster_t *cluster, uint64_t conn) {
    return cluster->ends[conn].closing;
}
