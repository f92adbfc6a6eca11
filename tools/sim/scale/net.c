/* SPDX-License-Identifier: Apache-2.0 */
/* Connections, which keep the order and lose nothing, and links, which take one window at a time
 * each way. */
#include "tools/sim/scale/scale_impl.h"

#include <stdlib.h>
#include <string.h>

uint64_t net_bytes_ns(const scale_t *scale, uint64_t bytes) {
    return bytes * 8 / scale->options->gbit;
}

static uint64_t other(uint64_t conn) {
    return conn % 2 == 1 ? conn + 1 : conn - 1;
}

/* ---- control connections ---- */

static void send_to(scale_t *scale, uint64_t conn, scale_message_t message) {
    scale_end_t *end = &scale->ends[conn];
    scale_message_t *box = malloc(sizeof(*box));
    uint64_t at_ns =
        scale->now_ns + scale->options->latency_us * 1000 + net_bytes_ns(scale, message.bytes);
    if (box == NULL) {
        abort();
    }
    *box = message;
    end->last_ns = at_ns > end->last_ns ? at_ns : end->last_ns;
    scale_push(scale, (scale_event_t){.at_ns = end->last_ns,
                                      .kind = SCALE_MESSAGE,
                                      .node = end->node,
                                      .conn = conn,
                                      .ptr = box});
}

static kvf_status_t do_dial(void *ctx, const char *address, uint64_t *conn_p,
                            kvf_detail_t *detail) {
    scale_node_t *node = ctx;
    scale_t *scale = node->scale;
    uint32_t to = 0;
    while (to < scale->n_nodes && strcmp(scale->nodes[to].address, address) != 0) {
        to++;
    }
    if (to == scale->n_nodes) {
        return kvf_fail(detail, KVF_ERR_INVALID, "nobody has this address");
    }
    if (scale->n_ends + 2 >= scale->ends_room) {
        scale->ends_room = 2 * scale->ends_room + 64;
        scale->ends = realloc(scale->ends, scale->ends_room * sizeof(*scale->ends));
        if (scale->ends == NULL) {
            abort();
        }
    }
    const uint64_t conn = scale->n_ends + 1;
    scale->n_ends += 2;
    scale->ends[conn] = (scale_end_t){.node = node->idx, .open = true};
    scale->ends[conn + 1] = (scale_end_t){.node = to, .open = true};
    send_to(scale, conn + 1, (scale_message_t){.what = MESSAGE_OPEN});
    send_to(scale, conn, (scale_message_t){.what = MESSAGE_OPEN});
    *conn_p = conn;
    return KVF_OK;
}

static void do_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes) {
    scale_node_t *node = ctx;
    scale_t *scale = node->scale;
    if (!scale->ends[other(conn)].open) {
        kvf_free(&node->alloc, data);
        return;
    }
    scale->result->messages++;
    scale->result->message_bytes += bytes;
    send_to(
        scale, other(conn),
        (scale_message_t){.what = MESSAGE_BYTES, .from = node->idx, .data = data, .bytes = bytes});
}

static void do_close(void *ctx, uint64_t conn) {
    scale_t *scale = ((scale_node_t *)ctx)->scale;
    scale->ends[conn].open = false;
    if (scale->ends[other(conn)].open) {
        send_to(scale, other(conn), (scale_message_t){.what = MESSAGE_CLOSE});
    }
}

void net_message(scale_t *scale, const scale_event_t *event) {
    scale_node_t *node = &scale->nodes[event->node];
    scale_message_t *message = event->ptr;
    if (scale->ends[event->conn].open) {
        scale_enter(node);
        switch (message->what) {
        case MESSAGE_OPEN:
            kvf_core_opened(node->core, event->conn, event->conn % 2 == 0, node->address);
            break;
        case MESSAGE_BYTES:
            kvf_core_bytes(node->core, event->conn, message->data, message->bytes);
            break;
        case MESSAGE_CLOSE:
            scale->ends[event->conn].open = false;
            kvf_core_closed(node->core, event->conn, "closed");
            break;
        }
        scale_turn(node);
        scale_leave(node);
    }
    kvf_free(&scale->nodes[message->from].alloc, message->data);
    free(message);
}

/* ---- links ---- */

static kvf_status_t do_connect(void *ctx, uint64_t peer, uint32_t mover_idx, const void *address,
                               size_t bytes, kvf_detail_t *detail) {
    (void)mover_idx;
    scale_node_t *node = ctx;
    if (bytes != sizeof(uint32_t)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "no address");
    }
    if (peer >= node->peers_room) {
        size_t room = 2 * (size_t)peer + 16;
        uint32_t *peers = realloc(node->peers, room * sizeof(*peers));
        if (peers == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory");
        }
        node->peers = peers;
        node->peers_room = room;
    }
    memcpy(&node->peers[peer], address, sizeof(uint32_t));
    return KVF_OK;
}

static void do_disconnect(void *ctx, uint64_t peer, uint32_t mover_idx) {
    (void)mover_idx;
    (void)ctx;
    (void)peer;
}

/* The sender's way out and the receiver's way in are both taken until the window is over; what is
 * posted later waits for its turn on each of them. */
static kvf_status_t do_post(void *ctx, kvf_window_t *window) {
    scale_node_t *node = ctx;
    scale_t *scale = node->scale;
    scale_node_t *to = &scale->nodes[node->peers[window->peer]];
    uint64_t at_ns = scale->now_ns;
    at_ns = node->out_ns > at_ns ? node->out_ns : at_ns;
    at_ns = to->in_ns > at_ns ? to->in_ns : at_ns;
    at_ns += net_bytes_ns(scale, window->bytes);
    node->out_ns = to->in_ns = at_ns;
    scale_push(scale, (scale_event_t){.at_ns = at_ns + scale->options->latency_us * 1000,
                                      .kind = SCALE_MOVED,
                                      .node = node->idx,
                                      .ptr = window});
    return KVF_OK;
}

void net_moved(scale_t *scale, const scale_event_t *event) {
    scale_node_t *node = &scale->nodes[event->node];
    scale_enter(node);
    kvf_core_moved(node->core, event->ptr, KVF_OK);
    scale_turn(node);
    scale_leave(node);
}

/* ---- what has no part in this ---- */

static kvf_status_t do_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                           const int64_t *n_pages, kvf_detail_t *detail) {
    (void)ctx, (void)peer, (void)address, (void)bytes, (void)n_pages;
    return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "every node has a machine of its own");
}

static void do_unmap(void *ctx, uint64_t peer) {
    (void)ctx, (void)peer;
}

static void do_digest(void *ctx, kvf_window_t *window) {
    (void)ctx, (void)window;
}

static const uint8_t *do_page(void *ctx, uint32_t group_idx, int32_t slot) {
    (void)ctx, (void)group_idx, (void)slot;
    static const uint8_t nothing;
    return &nothing;
}

static void do_verify(void *ctx, kvf_verify_t *job) {
    scale_node_t *node = ctx;
    job->job.next = node->jobs;
    node->jobs = &job->job;
}

const kvf_core_out_t scale_out = {.dial = do_dial,
                                  .write = do_write,
                                  .close = do_close,
                                  .mover_connect = do_connect,
                                  .mover_disconnect = do_disconnect,
                                  .post = do_post,
                                  .map = do_map,
                                  .unmap = do_unmap,
                                  .digest = do_digest,
                                  .page = do_page,
                                  .verify = do_verify};
