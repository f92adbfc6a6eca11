/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PROTO_CHUNK_H
#define KVF_PROTO_CHUNK_H

/**
 * @file
 * The header of a data chunk: where its bytes want to go. Fixed size, little-endian; the receiver
 * trusts none of it.
 */

#include "kvmgr/base/status.h"
#include "proto/types.h"

#include <stddef.h>

#define KVF_CHUNK_HEADER_BYTES 80

/** A chunk lies inside one page. */
typedef struct kvf_chunk {
    kvf_transfer_id_t transfer;
    uint32_t group_idx;
    int32_t slot;
    int64_t ordinal;
    uint64_t generation;
    uint64_t offset;    /**< inside the slot */
    uint64_t bytes;     /**< of the data that follows */
    uint64_t grant_key; /**< what the receiver gave to this transfer's sender, and to nobody else */
} kvf_chunk_t;

/** Write a header of KVF_CHUNK_HEADER_BYTES. @thread any */
void kvf_chunk_encode(const kvf_chunk_t *chunk, uint8_t header[KVF_CHUNK_HEADER_BYTES]);

/**
 * Read a header.
 *
 * @param bytes        Length of header as it came.
 * @param[out] chunk_p Numbers as they came: ordinal and slot are >= 0, nothing else is promised.
 * @return KVF_OK, or KVF_ERR_PROTOCOL (length, magic or a negative number).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_chunk_decode(const void *header, size_t bytes, kvf_chunk_t *chunk_p);

#endif
