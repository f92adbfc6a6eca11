/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/frame.h"

#include "kvmgr/base/cursor.h"

/* "KVFR" */
#define FRAME_MAGIC UINT32_C(0x5246564b)
/* First buffer of a parser: most messages are shorter. */
#define FIRST_ROOM_BYTES 512

const char *kvf_frame_type_name(kvf_frame_type_t type) {
    static const char *const names[] = {
        [KVF_FRAME_HELLO] = "hello",
        [KVF_FRAME_REFUSE] = "refuse",
        [KVF_FRAME_HEARTBEAT] = "heartbeat",
        [KVF_FRAME_RECV_REQUEST] = "recv_request",
        [KVF_FRAME_COMMIT] = "commit",
        [KVF_FRAME_DONE] = "done",
        [KVF_FRAME_ABORT] = "abort",
        [KVF_FRAME_DRAINED] = "drained",
        [KVF_FRAME_BYE] = "bye",
        [KVF_FRAME_READY] = "ready",
        [KVF_FRAME_PULL] = "pull",
        [KVF_FRAME_JOIN] = "join",
        [KVF_FRAME_LEAVE] = "leave",
        [KVF_FRAME_FETCH] = "fetch",
        [KVF_FRAME_JOINED] = "joined",
    };
    return type >= KVF_FRAME_HELLO && type < KVF_FRAME_TYPES_END ? names[type] : "unknown";
}

void kvf_frame_header(kvf_frame_type_t type, uint32_t payload_bytes,
                      uint8_t header[KVF_FRAME_HEADER_BYTES]) {
    kvf_writer_t w = kvf_writer(header, KVF_FRAME_HEADER_BYTES);
    kvf_write_u32(&w, FRAME_MAGIC);
    kvf_write_u16(&w, (uint16_t)type);
    kvf_write_u16(&w, 0);
    kvf_write_u32(&w, payload_bytes);
    kvf_write_u32(&w, 0);
}

void kvf_frame_parser_init(kvf_frame_parser_t *parser, const kvf_alloc_t *alloc,
                           uint64_t cap_bytes) {
    *parser = (kvf_frame_parser_t){.alloc = alloc, .cap_bytes = cap_bytes};
}

void kvf_frame_parser_cleanup(kvf_frame_parser_t *parser) {
    kvf_free(parser->alloc, parser->buf);
    *parser = (kvf_frame_parser_t){0};
}

static kvf_status_t read_header(const kvf_frame_parser_t *parser, kvf_frame_type_t *type_p,
                                size_t *payload_bytes_p, kvf_detail_t *detail) {
    kvf_reader_t r = kvf_reader(parser->buf, KVF_FRAME_HEADER_BYTES);
    uint32_t magic = kvf_read_u32(&r);
    uint16_t type = kvf_read_u16(&r);
    uint16_t flags = kvf_read_u16(&r);
    uint32_t payload_bytes = kvf_read_u32(&r);
    uint32_t reserved = kvf_read_u32(&r);
    if (magic != FRAME_MAGIC) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "a frame starts with 0x%08x, not with its magic",
                        magic);
    }
    if (type < KVF_FRAME_HELLO || type >= KVF_FRAME_TYPES_END) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "frame of unknown type %u", type);
    }
    if (flags != 0 || reserved != 0) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "%s frame with unknown flags 0x%04x, 0x%08x",
                        kvf_frame_type_name((kvf_frame_type_t)type), flags, reserved);
    }
    if (payload_bytes > parser->cap_bytes) {
        return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                        "%s frame of %u bytes, the limit is %llu (limits.frame_bytes)",
                        kvf_frame_type_name((kvf_frame_type_t)type), payload_bytes,
                        (unsigned long long)parser->cap_bytes);
    }
    *type_p = (kvf_frame_type_t)type;
    *payload_bytes_p = payload_bytes;
    return KVF_OK;
}

/* Move bytes into the buffer until it holds want bytes or the data ends. want is at most a header
 * and the cap. */
static kvf_status_t take(kvf_frame_parser_t *parser, size_t want, const uint8_t **data_p,
                         size_t *bytes_p, kvf_detail_t *detail) {
    if (parser->used >= want) {
        return KVF_OK;
    }
    size_t n = want - parser->used < *bytes_p ? want - parser->used : *bytes_p;
    if (parser->room - parser->used < n) {
        /* Twice what has really arrived: a header that announces much gets nothing for it. */
        size_t room = FIRST_ROOM_BYTES;
        if (parser->used + n > room / 2) {
            room = 2 * (parser->used + n);
        }
        uint8_t *buf = kvf_realloc(parser->alloc, parser->buf, room, 1);
        if (buf == NULL) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a frame of %zu bytes", want);
        }
        parser->buf = buf;
        parser->room = room;
    }
    if (n > 0) {
        memcpy(parser->buf + parser->used, *data_p, n);
        parser->used += n;
        *data_p += n;
        *bytes_p -= n;
    }
    return KVF_OK;
}

kvf_status_t kvf_frame_parse(kvf_frame_parser_t *parser, const uint8_t **data_p, size_t *bytes_p,
                             bool *have_p, kvf_frame_type_t *type_p, const uint8_t **payload_p,
                             size_t *payload_bytes_p, kvf_detail_t *detail) {
    if (parser->complete) {
        parser->used = 0;
        parser->complete = false;
    }
    kvf_status_t status = take(parser, KVF_FRAME_HEADER_BYTES, data_p, bytes_p, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (parser->used < KVF_FRAME_HEADER_BYTES) {
        *have_p = false;
        return KVF_OK;
    }
    kvf_frame_type_t type = 0;
    size_t payload_bytes = 0;
    status = read_header(parser, &type, &payload_bytes, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = take(parser, KVF_FRAME_HEADER_BYTES + payload_bytes, data_p, bytes_p, detail);
    if (status != KVF_OK) {
        return status;
    }
    parser->complete = parser->used == KVF_FRAME_HEADER_BYTES + payload_bytes;
    *have_p = parser->complete;
    if (parser->complete) {
        *type_p = type;
        *payload_p = parser->buf + KVF_FRAME_HEADER_BYTES;
        *payload_bytes_p = payload_bytes;
    }
    return KVF_OK;
}
