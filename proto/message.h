/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_MESSAGE_H
#define KVF_PROTO_MESSAGE_H

/**
 * @file
 * Messages (proto/kvferry.proto, compiled by protobuf-c to kvferry.pb-c.h) to frames and back.
 * Unpacking goes through an allocator that stops at a small multiple of the payload's length, so
 * that a hostile message cannot swell.
 */

#include "kvferry.pb-c.h"
#include "kvmgr/layout.h"
#include "proto/frame.h"
#include "proto/types.h"

/** Transfers that one heartbeat names, at the most. */
#define KVF_RENEWED_PER_BEAT 1024

/** Block ranges that one Fetch asks for, bytes of a Join's invitation, and of a Joined's answer, at
 * the most. */
#define KVF_FETCHED_AT_ONCE 256
#define KVF_INVITATION_BYTES 256
#define KVF_ANSWER_BYTES 8192

/** Sentences (of Refuse, Abort, Leave, Bye) are cut here when they come in; odd bytes become '?'.
 */
#define KVF_SENTENCE_BYTES 400

/**
 * Make a whole frame of a message.
 *
 * @param type          The message's own.
 * @param message       The generated struct's base.
 * @param[out] frame_p  Header and payload, allocated from alloc; the caller frees it.
 * @return KVF_OK; KVF_ERR_TOO_LARGE (payload over cap_bytes); KVF_ERR_NO_MEMORY.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_message_pack(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                                        const ProtobufCMessage *message, uint64_t cap_bytes,
                                        uint8_t **frame_p, size_t *bytes_p);

/**
 * Unpack a payload of a known type (not hello: see proto/hello.h).
 *
 * @param[out] message_p  kvf_message_free() it with the same alloc. Lengths of arrays that must
 *                        agree do, transfer ids have their 16 bytes, required sub-messages are
 *                        there, statuses are known failures, texts are printable; groups, ordinals,
 *                        slots, layers and token counts are within the limits of this version.
 * @return KVF_OK; KVF_ERR_PROTOCOL (the text names the field); KVF_ERR_NO_MEMORY.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_message_unpack(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                                          const uint8_t *payload, size_t bytes,
                                          ProtobufCMessage **message_p, kvf_detail_t *detail);

/**
 * The first half of kvf_message_unpack(): bounded in memory, but only the encoding is checked. For
 * proto/hello.c.
 *
 * @param type            A known one.
 * @param[out] message_p  kvf_message_free() it with the same alloc.
 * @return KVF_OK, KVF_ERR_PROTOCOL, KVF_ERR_NO_MEMORY.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_message_decode(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                                          const uint8_t *payload, size_t bytes,
                                          ProtobufCMessage **message_p, kvf_detail_t *detail);

/** NULL is allowed. @thread any */
void kvf_message_free(const kvf_alloc_t *alloc, ProtobufCMessage *message);

/** Read the id of a checked message. @thread any */
kvf_transfer_id_t kvf_transfer_id_read(const Kvf__Wire__TransferId *wire);

/** Point a wire id at an id, which must outlive it. @thread any */
void kvf_transfer_id_write(const kvf_transfer_id_t *id, Kvf__Wire__TransferId *wire);

#endif
