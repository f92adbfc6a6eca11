/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_HELLO_H
#define KVF_PROTO_HELLO_H

/**
 * @file
 * The handshake's two phases as bytes: a fixed preamble, then hello frames that prove the cluster
 * key.
 *
 * MAC of a hello = HMAC-SHA256(key, label || initiator's preamble || responder's preamble || hello
 * bytes), where label is "kvferry hello initiator" or "kvferry hello responder" with its zero, so
 * that neither a replay nor a reflection passes. The initiator proves first.
 */

#include "kvmgr/layout.h"
#include "proto/mac.h"
#include "proto/message.h"

#define KVF_PREAMBLE_BYTES 48
#define KVF_NONCE_BYTES 32
#define KVF_PROTOCOL_MAJOR 1
#define KVF_PROTOCOL_MINOR 0
/** Frames before the key is proven are no longer than this. */
#define KVF_HELLO_CAP_BYTES (256U << 10)
/** Data paths that one agent may offer. */
#define KVF_HELLO_MAX_MOVERS 16

typedef struct kvf_preamble {
    uint16_t major;
    uint16_t minor;
    bool initiator;
    uint8_t nonce[KVF_NONCE_BYTES];
} kvf_preamble_t;

/** Write a preamble. @thread any */
void kvf_preamble_encode(const kvf_preamble_t *preamble, uint8_t bytes[KVF_PREAMBLE_BYTES]);

/**
 * Read a preamble. The caller checks that the role is the one that the other end must have.
 *
 * @return KVF_OK; KVF_ERR_PROTOCOL (not a kvferry peer); KVF_ERR_INCOMPATIBLE (major version
 *         differs; the text names both).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_preamble_decode(const uint8_t bytes[KVF_PREAMBLE_BYTES],
                                           kvf_preamble_t *preamble_p, kvf_detail_t *detail);

/** The bytes of both preambles as they went over the wire, and whose hello it is. */
typedef struct kvf_hello_binding {
    const uint8_t *initiator_preamble;
    const uint8_t *responder_preamble;
    bool from_initiator;
} kvf_hello_binding_t;

/**
 * Make the hello frame: header, MAC, message.
 *
 * @param[out] frame_p  Allocated from alloc; the caller frees it.
 * @return KVF_OK; KVF_ERR_TOO_LARGE (payload over KVF_HELLO_CAP_BYTES); KVF_ERR_NO_MEMORY;
 *         KVF_ERR_INTERNAL.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_hello_pack(const kvf_alloc_t *alloc, const uint8_t key[32],
                                      const kvf_hello_binding_t *binding,
                                      const Kvf__Wire__Hello *hello, uint8_t **frame_p,
                                      size_t *bytes_p);

/**
 * Check the MAC (before anything is decoded), then unpack and check a hello.
 *
 * @param[out] hello_p  kvf_message_free(&(*hello_p)->base). Its strings are 1..128 printable bytes,
 *                      incarnation has 16 bytes; 1..KVF_MAX_GROUPS groups, whose names and numbers
 *                      of layers fit a layout; at most KVF_MAX_GROUPS regions, each of a group of
 *                      this hello, of a known kind, n_pages <= INT32_MAX, of a size that does not
 *                      wrap. Times, topology and frame_bytes are as they came.
 * @return KVF_OK; KVF_ERR_PEER_REFUSED (MAC: the keys differ); KVF_ERR_PROTOCOL; KVF_ERR_NO_MEMORY;
 *         KVF_ERR_INTERNAL.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_hello_unpack(const kvf_alloc_t *alloc, const uint8_t key[32],
                                        const kvf_hello_binding_t *binding, const uint8_t *payload,
                                        size_t bytes, Kvf__Wire__Hello **hello_p,
                                        kvf_detail_t *detail);

/**
 * Copy the layout out of a checked hello and check it with kvf_layout_check().
 *
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_UNSUPPORTED (also a dtype, order, kind or role that is
 *         not known here).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_hello_layout(const Kvf__Wire__Hello *hello, kvf_layout_t *layout_p,
                                        kvf_detail_t *detail);

/**
 * Make wire groups that point into a layout, which must outlive them.
 *
 * @param[out] groups  Room for layout->n_groups.
 * @thread any
 */
void kvf_layout_to_wire(const kvf_layout_t *layout, Kvf__Wire__LayerGroup *groups);

#endif
