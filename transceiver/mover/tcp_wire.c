/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/tcp_wire.h"

#include "kvmgr/base/cursor.h"

#include <netinet/in.h>

#define VERSION 1
#define HEAD_MAGIC UINT32_C(0x5246564b) /* "KVFR" as a little-endian number */

static const uint8_t preamble_start[16] = {'K', 'V', 'F', 'D', 'A', 'T', 'A', 0, VERSION};

void kvf_tcp_address_write(const kvf_tcp_address_t *address, uint8_t out[KVF_TCP_ADDRESS_BYTES]) {
    kvf_writer_t w = kvf_writer(out, KVF_TCP_ADDRESS_BYTES);
    uint8_t host[16] = {0};
    uint16_t port;
    bool is6 = address->at.ss_family == AF_INET6;
    if (is6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, &address->at, sizeof(in6));
        memcpy(host, &in6.sin6_addr, sizeof(host));
        port = ntohs(in6.sin6_port);
    } else {
        struct sockaddr_in in4;
        memcpy(&in4, &address->at, sizeof(in4));
        memcpy(host, &in4.sin_addr, sizeof(in4.sin_addr));
        port = ntohs(in4.sin_port);
    }
    kvf_write_u8(&w, VERSION);
    kvf_write_u8(&w, is6 ? 6 : 4);
    kvf_write_u16(&w, port);
    kvf_write_bytes(&w, host, sizeof(host));
    kvf_write_bytes(&w, address->token, sizeof(address->token));
    kvf_write_bytes(&w, address->answer, sizeof(address->answer));
}

kvf_status_t kvf_tcp_address_read(const void *in, size_t bytes, kvf_tcp_address_t *address_p,
                                  kvf_detail_t *detail) {
    kvf_tcp_address_t address = {.at = {.ss_family = AF_INET}};
    kvf_reader_t r = kvf_reader(in, bytes);
    uint8_t host[16];
    bool loopback;
    if (bytes != KVF_TCP_ADDRESS_BYTES) {
        return kvf_fail(detail, KVF_ERR_INVALID, "a tcp address of %zu bytes instead of %d", bytes,
                        KVF_TCP_ADDRESS_BYTES);
    }
    uint8_t version = kvf_read_u8(&r), family = kvf_read_u8(&r);
    uint16_t port = kvf_read_u16(&r);
    memcpy(host, kvf_read_bytes(&r, sizeof(host)), sizeof(host));
    memcpy(address.token, kvf_read_bytes(&r, sizeof(address.token)), sizeof(address.token));
    memcpy(address.answer, kvf_read_bytes(&r, sizeof(address.answer)), sizeof(address.answer));
    if (version != VERSION || port == 0 || (family != 4 && family != 6)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "a tcp address of version %u, family %u, port %u: run the same version on "
                        "both nodes",
                        version, family, port);
    }
    if (family == 6) {
        struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
        memcpy(&in6.sin6_addr, host, sizeof(host));
        memcpy(&address.at, &in6, sizeof(in6));
        loopback = IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
    } else {
        struct sockaddr_in in4 = {.sin_family = AF_INET, .sin_port = htons(port)};
        memcpy(&in4.sin_addr, host, sizeof(in4.sin_addr));
        memcpy(&address.at, &in4, sizeof(in4));
        loopback = host[0] == IN_LOOPBACKNET;
    }
    if (!loopback) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "a tcp address that is not of the loopback device: other networks are "
                        "unsupported in this version");
    }
    *address_p = address;
    return KVF_OK;
}

socklen_t kvf_tcp_address_length(const struct sockaddr_storage *at) {
    return at->ss_family == AF_INET6 ? (socklen_t)sizeof(struct sockaddr_in6)
                                     : (socklen_t)sizeof(struct sockaddr_in);
}

void kvf_tcp_preamble_write(const uint8_t token[KVF_TCP_TOKEN_BYTES],
                            uint8_t out[KVF_TCP_PREAMBLE_BYTES]) {
    memcpy(out, preamble_start, sizeof(preamble_start));
    memcpy(out + sizeof(preamble_start), token, KVF_TCP_TOKEN_BYTES);
}

static bool equal(const uint8_t *a, const uint8_t *b, size_t bytes) {
    uint8_t differ = 0;
    for (size_t i = 0; i < bytes; i++) {
        differ |= a[i] ^ b[i];
    }
    return differ == 0;
}

bool kvf_tcp_preamble_ok(const uint8_t token[KVF_TCP_TOKEN_BYTES],
                         const uint8_t in[KVF_TCP_PREAMBLE_BYTES]) {
    uint8_t want[KVF_TCP_PREAMBLE_BYTES];
    kvf_tcp_preamble_write(token, want);
    return equal(in, want, sizeof(want));
}

bool kvf_tcp_answer_ok(const uint8_t answer[KVF_TCP_TOKEN_BYTES],
                       const uint8_t in[KVF_TCP_TOKEN_BYTES]) {
    return equal(in, answer, KVF_TCP_TOKEN_BYTES);
}

void kvf_tcp_head_write(uint32_t n, uint8_t out[KVF_TCP_HEAD_BYTES]) {
    kvf_writer_t w = kvf_writer(out, KVF_TCP_HEAD_BYTES);
    kvf_write_u32(&w, HEAD_MAGIC);
    kvf_write_u32(&w, n);
}

uint32_t kvf_tcp_head_read(const uint8_t in[KVF_TCP_HEAD_BYTES]) {
    kvf_reader_t r = kvf_reader(in, KVF_TCP_HEAD_BYTES);
    uint32_t magic = kvf_read_u32(&r), n = kvf_read_u32(&r);
    return magic == HEAD_MAGIC && n <= KVF_TCP_MAX_CHUNKS ? n : 0;
}

bool kvf_tcp_headers_read(const uint8_t *in, uint32_t n, kvf_chunk_t *chunks) {
    for (uint32_t i = 0; i < n; i++) {
        if (kvf_chunk_decode(in + (size_t)i * KVF_CHUNK_HEADER_BYTES, KVF_CHUNK_HEADER_BYTES,
                             &chunks[i]) != KVF_OK ||
            chunks[i].bytes == 0 || chunks[i].bytes > KVF_TCP_CHUNK_BYTES) {
            return false;
        }
    }
    return true;
}
