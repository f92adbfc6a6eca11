/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_MAC_H
#define KVF_PROTO_MAC_H

/**
 * @file
 * HMAC-SHA256 under the cluster key. The one place that knows OpenSSL in this room.
 */

#include "kvmgr/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_MAC_BYTES 32
#define KVF_MAC_KEY_BYTES 32

/** A run of bytes, borrowed. */
typedef struct kvf_bytes {
    const void *data; /**< NULL is allowed with no bytes */
    size_t bytes;
} kvf_bytes_t;

/**
 * Authenticate parts as if they were one run of bytes: where they meet does not count, so the
 * caller's format must say it.
 *
 * @param parts     n_parts runs, in order.
 * @param[out] mac  Untouched on error.
 * @return KVF_OK, KVF_ERR_INTERNAL (OpenSSL has no HMAC-SHA256, or no memory).
 * @thread any
 * @source RFC 2104, FIPS 180-4
 */
KVF_CHECK kvf_status_t kvf_mac(const uint8_t key[KVF_MAC_KEY_BYTES], const kvf_bytes_t *parts,
                               size_t n_parts, uint8_t mac[KVF_MAC_BYTES]);

/** @return Whether two codes are equal, in a time that does not depend on where they differ.
 * @thread any */
bool kvf_mac_equal(const uint8_t a[KVF_MAC_BYTES], const uint8_t b[KVF_MAC_BYTES]);

#endif
