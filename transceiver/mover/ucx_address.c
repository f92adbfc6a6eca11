/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_address.h"

#include "kernels/digest.h"
#include "kvmgr/base/cursor.h"

kvf_status_t kvf_ucx_envelope_wrap(kvf_ucx_release_t release, const void *inside,
                                   size_t inside_bytes, void *buf, size_t cap, size_t *bytes_p) {
    kvf_writer_t writer = kvf_writer(buf, cap);
    kvf_write_u16(&writer, (uint16_t)release.major);
    kvf_write_u16(&writer, (uint16_t)release.minor);
    kvf_write_u64(&writer, kvf_digest(inside, inside_bytes));
    kvf_write_bytes(&writer, inside, inside_bytes);
    if (writer.bad) {
        return KVF_ERR_RANGE;
    }
    *bytes_p = cap - writer.left;
    return KVF_OK;
}

kvf_status_t kvf_ucx_envelope_unwrap(kvf_ucx_release_t release, const void *buf, size_t bytes,
                                     const void **inside_p, size_t *bytes_p, kvf_detail_t *detail) {
    kvf_reader_t reader = kvf_reader(buf, bytes);
    const unsigned major = kvf_read_u16(&reader);
    const unsigned minor = kvf_read_u16(&reader);
    const uint64_t digest = kvf_read_u64(&reader);
    if (reader.bad || reader.left == 0 || kvf_digest(reader.at, reader.left) != digest) {
        return kvf_fail(detail, KVF_ERR_INVALID, "a ucx address of %zu bytes is cut or damaged",
                        bytes);
    }
    if (major != release.major || minor != release.minor) {
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                        "the peer has ucx %u.%u, this node %u.%u, and they do not understand each "
                        "other: install the same one",
                        major, minor, release.major, release.minor);
    }
    *inside_p = reader.at;
    *bytes_p = reader.left;
    return KVF_OK;
}

kvf_status_t kvf_ucx_address_wrap(kvf_ucx_release_t release, const void *address,
                                  size_t address_bytes, void *buf, size_t cap, size_t *bytes_p) {
    return address_bytes > KVF_UCX_ADDRESS_BYTES
               ? KVF_ERR_RANGE
               : kvf_ucx_envelope_wrap(release, address, address_bytes, buf, cap, bytes_p);
}

kvf_status_t kvf_ucx_address_unwrap(kvf_ucx_release_t release, const void *buf, size_t bytes,
                                    const void **address_p, size_t *bytes_p, kvf_detail_t *detail) {
    return bytes > KVF_UCX_ENVELOPE_BYTES + KVF_UCX_ADDRESS_BYTES
               ? kvf_fail(detail, KVF_ERR_INVALID, "a ucx address of %zu bytes is too long", bytes)
               : kvf_ucx_envelope_unwrap(release, buf, bytes, address_p, bytes_p, detail);
}
