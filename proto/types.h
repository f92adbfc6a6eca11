/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_TYPES_H
#define KVF_PROTO_TYPES_H

/**
 * @file
 * Identities that travel. Source: docs/protocol.md "Identity".
 */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KVF_INCARNATION_BYTES 16

/** 128 random bits per agent start. */
typedef struct kvf_incarnation {
    uint8_t bytes[KVF_INCARNATION_BYTES];
} kvf_incarnation_t;

/** A transfer: minted by its receiver, never used again. */
typedef struct kvf_transfer_id {
    kvf_incarnation_t receiver;
    uint64_t counter;
} kvf_transfer_id_t;

static inline bool kvf_incarnation_equal(const kvf_incarnation_t *a, const kvf_incarnation_t *b) {
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

#endif
