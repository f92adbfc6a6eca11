/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_answer.h"

#include "kvmgr/base/cursor.h"

#include <inttypes.h>

kvf_status_t kvf_ucx_answer_write(kvf_ucx_release_t release, const kvf_ucx_answer_t *answer,
                                  uint8_t *buf, size_t *bytes_p) {
    uint8_t inside[KVF_UCX_ANSWER_BYTES - KVF_UCX_ENVELOPE_BYTES];
    kvf_writer_t writer = kvf_writer(inside, sizeof(inside));
    kvf_write_u32(&writer, answer->n_pools);
    for (uint32_t i = 0; i < answer->n_pools; i++) {
        const kvf_ucx_lent_t *pool = &answer->pools[i];
        kvf_write_u64(&writer, pool->base);
        kvf_write_u64(&writer, pool->bytes);
        kvf_write_u32(&writer, (uint32_t)pool->key_bytes);
        kvf_write_bytes(&writer, pool->key, pool->key_bytes);
        writer.bad |= pool->key_bytes > KVF_UCX_KEY_BYTES;
    }
    kvf_write_bytes(&writer, answer->address, answer->address_bytes);
    return writer.bad || answer->address_bytes > KVF_UCX_ADDRESS_BYTES
               ? KVF_ERR_RANGE
               : kvf_ucx_envelope_wrap(release, inside, sizeof(inside) - writer.left, buf,
                                       KVF_UCX_ANSWER_BYTES, bytes_p);
}

kvf_status_t kvf_ucx_answer_read(kvf_ucx_release_t release, const void *buf, size_t bytes,
                                 uint32_t n_pools, const uint64_t *least,
                                 kvf_ucx_answer_t *answer_p, kvf_detail_t *detail) {
    kvf_ucx_answer_t answer = {.n_pools = n_pools};
    const void *inside;
    size_t inside_bytes;
    kvf_status_t status =
        kvf_ucx_envelope_unwrap(release, buf, bytes, &inside, &inside_bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_reader_t reader = kvf_reader(inside, inside_bytes);
    bool well = kvf_read_u32(&reader) == n_pools;
    for (uint32_t i = 0; well && i < n_pools; i++) {
        kvf_ucx_lent_t *pool = &answer.pools[i];
        pool->base = kvf_read_u64(&reader);
        pool->bytes = kvf_read_u64(&reader);
        pool->key_bytes = kvf_read_u32(&reader);
        well = pool->key_bytes > 0 && pool->key_bytes <= KVF_UCX_KEY_BYTES;
        pool->key = well ? kvf_read_bytes(&reader, pool->key_bytes) : NULL;
        if (well && !reader.bad &&
            (pool->bytes < least[i] || pool->base > UINT64_MAX - pool->bytes)) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "pool %" PRIu32 " of the peer has %" PRIu64
                            " bytes, when it spoke of %" PRIu64,
                            i, pool->bytes, least[i]);
        }
    }
    if (!well || reader.bad || reader.left == 0 || reader.left > KVF_UCX_ADDRESS_BYTES) {
        return kvf_fail(detail, KVF_ERR_INVALID, "how to read the peer's pools is not said well");
    }
    answer.address = reader.at;
    answer.address_bytes = reader.left;
    *answer_p = answer;
    return KVF_OK;
}
