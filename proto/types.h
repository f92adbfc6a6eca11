/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_TYPES_H
#define KVF_PROTO_TYPES_H

/**
 * @file
 * Identities that travel. Source: docs/protocol.md "Identity".
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVF_INCARNATION_BYTES 16
/** Longest name, address or request id that travels, without its zero. */
#define KVF_TEXT_BYTES 128

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

/** @return Whether a byte is printable ASCII (space included), in every locale. @thread any */
static inline bool kvf_byte_printable(char byte) {
    return byte >= 0x20 && byte <= 0x7e;
}

/** @return Whether a text is min_bytes..max_bytes printable bytes, safe in a log. @thread any */
static inline bool kvf_text_ok(const char *text, size_t min_bytes, size_t max_bytes) {
    size_t bytes = strnlen(text, max_bytes + 1);
    for (size_t i = 0; i < bytes; i++) {
        if (!kvf_byte_printable(text[i])) {
            return false;
        }
    }
    return bytes >= min_bytes && bytes <= max_bytes;
}

#endif
