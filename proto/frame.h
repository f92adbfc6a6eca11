/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_FRAME_H
#define KVF_PROTO_FRAME_H

/**
 * @file
 * Frames of the control channel: a 16-byte header (magic "KVFR", type u16, flags u16 = 0, payload
 * length u32, reserved u32 = 0; little-endian) and a payload. The length is checked against the cap
 * before anything is allocated.
 */

#include "kvmgr/base/alloc.h"

#define KVF_FRAME_HEADER_BYTES 16

typedef enum kvf_frame_type {
    KVF_FRAME_HELLO = 1,
    KVF_FRAME_REFUSE,
    KVF_FRAME_HEARTBEAT,
    KVF_FRAME_RECV_REQUEST,
    KVF_FRAME_COMMIT,
    KVF_FRAME_DONE,
    KVF_FRAME_ABORT,
    KVF_FRAME_DRAINED,
    KVF_FRAME_BYE,
    KVF_FRAME_READY,
    KVF_FRAME_PULL,
    KVF_FRAME_JOIN,
    KVF_FRAME_LEAVE,
    KVF_FRAME_FETCH,
    KVF_FRAME_JOINED,
    KVF_FRAME_TYPES_END /**< behind the last */
} kvf_frame_type_t;

/** @return "hello" .. "joined", or "unknown". Static storage; any thread. */
const char *kvf_frame_type_name(kvf_frame_type_t type);

/** Write a header. @param payload_bytes  Below 2^32. @thread any */
void kvf_frame_header(kvf_frame_type_t type, uint32_t payload_bytes,
                      uint8_t header[KVF_FRAME_HEADER_BYTES]);

/**
 * Cuts a byte stream into frames. Holds at most one partial frame; grows as bytes arrive, never by
 * what a header announces. One thread.
 */
typedef struct kvf_frame_parser {
    const kvf_alloc_t *alloc;
    uint64_t cap_bytes; /**< longest payload that is accepted; may be raised after the handshake */
    uint8_t *buf;       /**< what has arrived of the current frame, header first */
    size_t used;
    size_t room;
    bool complete; /**< the frame in buf was handed out; the next call starts over */
} kvf_frame_parser_t;

/**
 * Start with an empty stream; allocates nothing.
 *
 * @param parser     kvf_frame_parser_cleanup() it.
 * @param alloc      Borrowed until then.
 * @param cap_bytes  Longest payload.
 */
void kvf_frame_parser_init(kvf_frame_parser_t *parser, const kvf_alloc_t *alloc,
                           uint64_t cap_bytes);

/** Free what a parser holds. A zeroed one is allowed. */
void kvf_frame_parser_cleanup(kvf_frame_parser_t *parser);

/**
 * Take bytes until one frame is complete or they are used up.
 *
 * @param[in,out] data_p, bytes_p  Advanced past what was taken.
 * @param[out] have_p  Whether a frame is complete; false means that all bytes were taken.
 * @param[out] type_p, payload_p, payload_bytes_p  Of that frame, written only with *have_p true;
 *                     *payload_p lives until the next call.
 * @return KVF_OK; KVF_ERR_PROTOCOL (magic, unknown type, flags); KVF_ERR_TOO_LARGE (payload over
 *         the cap); KVF_ERR_NO_MEMORY. After an error the connection must be closed.
 */
KVF_CHECK kvf_status_t kvf_frame_parse(kvf_frame_parser_t *parser, const uint8_t **data_p,
                                       size_t *bytes_p, bool *have_p, kvf_frame_type_t *type_p,
                                       const uint8_t **payload_p, size_t *payload_bytes_p,
                                       kvf_detail_t *detail);

#endif
