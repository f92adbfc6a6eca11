/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/chunk.h"

#include "kvmgr/base/cursor.h"

/* "KVFCHUNK" as a little-endian number. */
#define CHUNK_MAGIC UINT64_C(0x4b4e55484346564b)

/* magic u64, receiver 16 bytes, counter u64, group u32, slot u32, ordinal u64, generation u64,
 * offset u64, bytes u64, grant key u64: a multiple of 16, so that the data behind it stays
 * aligned. */

void kvf_chunk_encode(const kvf_chunk_t *chunk, uint8_t header[KVF_CHUNK_HEADER_BYTES]) {
    kvf_writer_t w = kvf_writer(header, KVF_CHUNK_HEADER_BYTES);
    kvf_write_u64(&w, CHUNK_MAGIC);
    kvf_write_bytes(&w, chunk->transfer.receiver.bytes, KVF_INCARNATION_BYTES);
    kvf_write_u64(&w, chunk->transfer.counter);
    kvf_write_u32(&w, chunk->group_idx);
    kvf_write_u32(&w, (uint32_t)chunk->slot);
    kvf_write_u64(&w, (uint64_t)chunk->ordinal);
    kvf_write_u64(&w, chunk->generation);
    kvf_write_u64(&w, chunk->offset);
    kvf_write_u64(&w, chunk->bytes);
    kvf_write_u64(&w, chunk->grant_key);
}

kvf_status_t kvf_chunk_decode(const void *header, size_t bytes, kvf_chunk_t *chunk_p) {
    if (bytes != KVF_CHUNK_HEADER_BYTES) {
        return KVF_ERR_PROTOCOL;
    }
    kvf_reader_t r = kvf_reader(header, bytes);
    uint64_t magic = kvf_read_u64(&r);
    kvf_chunk_t chunk;
    memcpy(chunk.transfer.receiver.bytes, kvf_read_bytes(&r, KVF_INCARNATION_BYTES),
           KVF_INCARNATION_BYTES);
    chunk.transfer.counter = kvf_read_u64(&r);
    chunk.group_idx = kvf_read_u32(&r);
    uint32_t slot = kvf_read_u32(&r);
    uint64_t ordinal = kvf_read_u64(&r);
    chunk.generation = kvf_read_u64(&r);
    chunk.offset = kvf_read_u64(&r);
    chunk.bytes = kvf_read_u64(&r);
    chunk.grant_key = kvf_read_u64(&r);
    if (magic != CHUNK_MAGIC || slot > INT32_MAX || ordinal > INT64_MAX) {
        return KVF_ERR_PROTOCOL;
    }
    chunk.slot = (int32_t)slot;
    chunk.ordinal = (int64_t)ordinal;
    *chunk_p = chunk;
    return KVF_OK;
}
