/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_TCP_WIRE_H
#define KVF_MOVER_TCP_WIRE_H

/**
 * @file
 * What the tcp mover writes: its address in a hello, and what goes over its connections. First the
 * preamble, which the other end answers with the other token, then frames: the number of chunks,
 * their headers (proto/chunk.h), their bytes. Numbers are little-endian. No socket is touched here;
 * any thread.
 */

#include "proto/chunk.h"
#include "transceiver/mover/tcp.h"

/** version u8, 4 or 6 u8, port u16, address 16 bytes (of IPv4 the first 4), token, answer. */
#define KVF_TCP_ADDRESS_BYTES 52
/** "KVFDATA" and a zero byte, version u8, seven zero bytes, token. */
#define KVF_TCP_PREAMBLE_BYTES 32
#define KVF_TCP_TOKEN_BYTES 16
/** magic u32, chunks u32. */
#define KVF_TCP_HEAD_BYTES 8
/** Of one frame. */
#define KVF_TCP_MAX_CHUNKS 64U

typedef struct kvf_tcp_address {
    struct sockaddr_storage at;
    uint8_t token[KVF_TCP_TOKEN_BYTES];  /**< whoever knows it may send */
    uint8_t answer[KVF_TCP_TOKEN_BYTES]; /**< whoever knows it may be sent to */
} kvf_tcp_address_t;

/** @param address  Of IPv4 or IPv6. */
void kvf_tcp_address_write(const kvf_tcp_address_t *address, uint8_t out[KVF_TCP_ADDRESS_BYTES]);

/** @return KVF_OK; KVF_ERR_INVALID: not an address, or not one of this host's loopback device. */
KVF_CHECK kvf_status_t kvf_tcp_address_read(const void *in, size_t bytes,
                                            kvf_tcp_address_t *address_p, kvf_detail_t *detail);

/** @return Bytes of the socket address. */
socklen_t kvf_tcp_address_length(const struct sockaddr_storage *at);

void kvf_tcp_preamble_write(const uint8_t token[KVF_TCP_TOKEN_BYTES],
                            uint8_t out[KVF_TCP_PREAMBLE_BYTES]);
/** @return Whether it is the preamble of somebody who knows the token. Takes as long for each. */
bool kvf_tcp_preamble_ok(const uint8_t token[KVF_TCP_TOKEN_BYTES],
                         const uint8_t in[KVF_TCP_PREAMBLE_BYTES]);
/** @return Whether it is the answer of the address that was dialled. Takes as long for each. */
bool kvf_tcp_answer_ok(const uint8_t answer[KVF_TCP_TOKEN_BYTES],
                       const uint8_t in[KVF_TCP_TOKEN_BYTES]);

/** @param n  1 to KVF_TCP_MAX_CHUNKS. */
void kvf_tcp_head_write(uint32_t n, uint8_t out[KVF_TCP_HEAD_BYTES]);
/** @return How many chunks follow, 0: this is no frame. */
uint32_t kvf_tcp_head_read(const uint8_t in[KVF_TCP_HEAD_BYTES]);

/** @return Whether all n headers are of chunks of 1 to KVF_TCP_CHUNK_BYTES bytes. */
bool kvf_tcp_headers_read(const uint8_t *in, uint32_t n, kvf_chunk_t *chunks);

#endif
