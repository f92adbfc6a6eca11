/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_TICKET_H
#define KVF_PROTO_TICKET_H

/**
 * @file
 * Tickets: what the context side hands out through the orchestrator. Binary form: version u8, send id u64, incarnation,
 * prompt tokens i64, then instance, address and request id (u8 length each), then HMAC-SHA256 under the cluster key with a label of
 * its own. Text form: base64url without padding. Expiry and single use are the issuer's to judge, by its own clock.
 */

#include "kvmgr/base/status.h"
#include "proto/types.h"

#include <stddef.h>

#define KVF_TICKET_FIELD_BYTES 128
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

/** @param[out] bytes  KVF_TICKET_MAX_BYTES. @return KVF_OK, KVF_ERR_INVALID (an empty or overlong string), KVF_ERR_INTERNAL. */
KVF_CHECK kvf_status_t kvf_ticket_encode(const kvf_ticket_t *ticket, const uint8_t key[32], uint8_t *bytes,
                                         size_t *n_bytes_p);

/** Check the MAC in constant time, then read. @return KVF_OK, KVF_ERR_FORGED (MAC, length or version). */
KVF_CHECK kvf_status_t kvf_ticket_decode(const uint8_t *bytes, size_t n_bytes, const uint8_t key[32],
                                         kvf_ticket_t *ticket_p);

/** @param[out] text  KVF_TICKET_TEXT_BYTES. @return KVF_OK, KVF_ERR_RANGE. */
KVF_CHECK kvf_status_t kvf_ticket_to_text(const uint8_t *bytes, size_t n_bytes, char *text, size_t cap);

/** @param[out] bytes  KVF_TICKET_MAX_BYTES. @return KVF_OK, KVF_ERR_FORGED (not such a text). */
KVF_CHECK kvf_status_t kvf_ticket_from_text(const char *text, uint8_t *bytes, size_t *n_bytes_p);

#endif
