/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_TICKET_H
#define KVF_PROTO_TICKET_H

/**
 * @file
 * Tickets: what the context side hands out through the orchestrator. Binary form: version u8, send
 * id u64, incarnation, prompt tokens i64, then instance, address and request id (u8 length each),
 * then HMAC-SHA256 under the cluster key with a label of its own. Text form: base64url without
 * padding. Expiry and single use are the issuer's to judge, by its own clock.
 */

#include "kvmgr/base/status.h"
#include "proto/types.h"

#include <stddef.h>

#define KVF_TICKET_FIELD_BYTES KVF_TEXT_BYTES
/** Longest binary and text forms (text with its zero). */
#define KVF_TICKET_MAX_BYTES 512
#define KVF_TICKET_TEXT_BYTES 1024

typedef struct kvf_ticket {
    uint64_t send_id;
    kvf_incarnation_t issuer;
    int64_t prompt_tokens;
    char instance[KVF_TICKET_FIELD_BYTES + 1];
    char address[KVF_TICKET_FIELD_BYTES + 1]; /**< host:port of the issuer's control channel */
    char request_id[KVF_TICKET_FIELD_BYTES + 1];
} kvf_ticket_t;

/**
 * Make the binary form.
 *
 * @param[out] bytes  KVF_TICKET_MAX_BYTES.
 * @return KVF_OK; KVF_ERR_INVALID (a string that is not 1..128 printable bytes; prompt tokens
 *         outside 1..2^40); KVF_ERR_INTERNAL.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ticket_encode(const kvf_ticket_t *ticket, const uint8_t key[32],
                                         uint8_t *bytes, size_t *n_bytes_p);

/**
 * Check the MAC in constant time, then read.
 *
 * @return KVF_OK; KVF_ERR_FORGED (MAC, length or version, or what kvf_ticket_encode() would not
 *         make); KVF_ERR_INTERNAL.
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ticket_decode(const uint8_t *bytes, size_t n_bytes,
                                         const uint8_t key[32], kvf_ticket_t *ticket_p);

/**
 * Binary form to text.
 *
 * @param[out] text  Zero-terminated. KVF_TICKET_TEXT_BYTES is enough for cap.
 * @return KVF_OK, KVF_ERR_RANGE (cap too small, or more than KVF_TICKET_MAX_BYTES).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ticket_to_text(const uint8_t *bytes, size_t n_bytes, char *text,
                                          size_t cap);

/**
 * Text to binary form; nothing is believed yet.
 *
 * @param text        Zero-terminated, or at least KVF_TICKET_TEXT_BYTES long.
 * @param[out] bytes  KVF_TICKET_MAX_BYTES.
 * @return KVF_OK, KVF_ERR_FORGED (not the text that kvf_ticket_to_text() makes of these bytes).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ticket_from_text(const char *text, uint8_t *bytes, size_t *n_bytes_p);

#endif
