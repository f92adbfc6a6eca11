/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/frame.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CAP 4096

/* One frame of each kind of length, and the stream of all of them. */
static const struct {
    kvf_frame_type_t type;
    uint32_t bytes;
} frames[] = {{KVF_FRAME_HEARTBEAT, 0},
              {KVF_FRAME_HELLO, 1},
              {KVF_FRAME_COMMIT, 700},
              {KVF_FRAME_BYE, 3},
              {KVF_FRAME_RECV_REQUEST, CAP}};
#define N_FRAMES (sizeof(frames) / sizeof(frames[0]))

static uint8_t payload_byte(size_t frame, size_t i) {
    return (uint8_t)(i * 7 + i / 256 + frame * 31);
}

static uint8_t *make_stream(size_t *bytes_p) {
    size_t bytes = 0;
    for (size_t f = 0; f < N_FRAMES; f++) {
        bytes += KVF_FRAME_HEADER_BYTES + frames[f].bytes;
    }
    uint8_t *stream = malloc(bytes);
    uint8_t *at = stream;
    for (size_t f = 0; f < N_FRAMES; f++) {
        kvf_frame_header(frames[f].type, frames[f].bytes, at);
        at += KVF_FRAME_HEADER_BYTES;
        for (size_t i = 0; i < frames[f].bytes; i++) {
            *at++ = payload_byte(f, i);
        }
    }
    *bytes_p = bytes;
    return stream;
}

/* Feed a piece, which must be used up; what comes out must be the next frames. */
static void feed(kvf_frame_parser_t *parser, const uint8_t *piece, size_t bytes, size_t *next) {
    /* A copy that ends where it says and is gone afterwards: the parser may keep no pointer. */
    uint8_t *data = malloc(bytes + 1);
    memcpy(data, piece, bytes);
    const uint8_t *at = data;
    size_t left = bytes;
    for (bool have = true; have;) {
        kvf_frame_type_t type = 0;
        const uint8_t *payload = NULL;
        size_t n = 0;
        cr_assert_eq(kvf_frame_parse(parser, &at, &left, &have, &type, &payload, &n, NULL), KVF_OK);
        cr_assert_eq(at, data + bytes - left);
        if (!have) {
            cr_assert_eq(left, 0);
            cr_assert_null(payload);
            break;
        }
        cr_assert_lt(*next, N_FRAMES);
        cr_assert_eq(type, frames[*next].type);
        cr_assert_eq(n, frames[*next].bytes);
        for (size_t i = 0; i < n; i++) {
            if (payload[i] != payload_byte(*next, i)) {
                cr_assert_fail("frame %zu, byte %zu", *next, i);
            }
        }
        ++*next;
    }
    free(data);
}

Test(frame, header_has_these_bytes) {
    uint8_t header[KVF_FRAME_HEADER_BYTES];
    kvf_frame_header(KVF_FRAME_COMMIT, 0x01020304, header);
    const uint8_t wire[] = {'K', 'V', 'F', 'R', 5, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0};
    cr_assert_arr_eq(header, wire, sizeof(wire));
}

Test(frame, types_have_names) {
    const char *names[] = {"unknown", "hello", "refuse",  "heartbeat", "recv_request", "commit",
                           "done",    "abort", "drained", "bye",       "ready",        "pull",
                           "join",    "leave", "fetch",   "joined",    "unknown"};
    for (int type = 0; type <= 16; type++) {
        cr_assert_str_eq(kvf_frame_type_name((kvf_frame_type_t)type), names[type]);
    }
}

Test(frame, a_stream_may_be_cut_anywhere) {
    size_t bytes;
    uint8_t *stream = make_stream(&bytes);
    for (size_t cut = 0; cut <= bytes; cut++) {
        kvf_frame_parser_t parser;
        kvf_frame_parser_init(&parser, kvf_alloc_default(), CAP);
        size_t next = 0;
        feed(&parser, stream, cut, &next);
        feed(&parser, stream + cut, bytes - cut, &next);
        cr_assert_eq(next, N_FRAMES, "cut at %zu", cut);
        kvf_frame_parser_cleanup(&parser);
    }
    free(stream);
}

Test(frame, a_stream_may_come_in_pieces_of_any_size) {
    size_t bytes;
    uint8_t *stream = make_stream(&bytes);
    for (size_t size = 1; size < 64; size++) {
        kvf_frame_parser_t parser;
        kvf_frame_parser_init(&parser, kvf_alloc_default(), CAP);
        size_t next = 0;
        for (size_t off = 0; off < bytes; off += size) {
            feed(&parser, stream + off, size < bytes - off ? size : bytes - off, &next);
        }
        cr_assert_eq(next, N_FRAMES, "pieces of %zu", size);
        kvf_frame_parser_cleanup(&parser);
    }
    free(stream);
}

static kvf_status_t parse_header(const uint8_t header[KVF_FRAME_HEADER_BYTES], uint64_t cap,
                                 bool *have_p, kvf_detail_t *detail) {
    kvf_frame_parser_t parser;
    kvf_frame_parser_init(&parser, kvf_alloc_default(), cap);
    const uint8_t *at = header;
    size_t left = KVF_FRAME_HEADER_BYTES;
    kvf_frame_type_t type;
    const uint8_t *payload;
    size_t n;
    kvf_status_t status = kvf_frame_parse(&parser, &at, &left, have_p, &type, &payload, &n, detail);
    kvf_frame_parser_cleanup(&parser);
    return status;
}

Test(frame, every_flipped_bit_of_a_header_is_refused_or_another_type_or_length) {
    uint8_t good[KVF_FRAME_HEADER_BYTES];
    kvf_frame_header(KVF_FRAME_DONE, 3, good);
    for (size_t bit = 0; bit < 128; bit++) {
        uint8_t header[KVF_FRAME_HEADER_BYTES];
        memcpy(header, good, sizeof(header));
        header[bit / 8] ^= (uint8_t)(1U << bit % 8);
        /* Type 6 = 110b: 7, 4, 2 and 14 are types too, 22 and above are not. Length 3 grows past
         * the cap of 10 from bit 3 on (3 + 8 = 11). */
        kvf_status_t want = KVF_ERR_PROTOCOL;
        if ((bit >= 32 && bit < 36) || (bit >= 64 && bit < 67)) {
            want = KVF_OK;
        } else if (bit >= 67 && bit < 96) {
            want = KVF_ERR_TOO_LARGE;
        }
        bool have = true;
        kvf_detail_t detail = {""};
        cr_assert_eq(parse_header(header, 10, &have, &detail), want, "bit %zu", bit);
        cr_assert_eq(detail.text[0] == '\0', want == KVF_OK);
        cr_assert_eq(have, want != KVF_OK, "no frame without its payload, no output on error");
    }
}

Test(frame, types_end_where_they_end) {
    for (unsigned type = 0; type <= UINT16_MAX; type++) {
        uint8_t header[KVF_FRAME_HEADER_BYTES];
        kvf_frame_header((kvf_frame_type_t)type, 0, header);
        bool have;
        cr_assert_eq(parse_header(header, CAP, &have, NULL),
                     type >= 1 && type <= 15 ? KVF_OK : KVF_ERR_PROTOCOL, "type %u", type);
    }
}

Test(frame, the_cap_is_the_last_length_that_passes_and_may_be_raised) {
    const uint64_t caps[] = {0, 1, 1000, UINT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        uint8_t header[KVF_FRAME_HEADER_BYTES];
        bool have = false;
        kvf_detail_t detail = {""};
        kvf_frame_header(KVF_FRAME_PULL, (uint32_t)caps[i], header);
        cr_assert_eq(parse_header(header, caps[i], &have, NULL), KVF_OK);
        cr_assert_eq(have, caps[i] == 0);
        if (caps[i] < UINT32_MAX) {
            kvf_frame_header(KVF_FRAME_PULL, (uint32_t)caps[i] + 1, header);
            cr_assert_eq(parse_header(header, caps[i], &have, &detail), KVF_ERR_TOO_LARGE);
            char both[64];
            (void)snprintf(both, sizeof(both), "%u bytes, the limit is %u", (unsigned)caps[i] + 1,
                           (unsigned)caps[i]);
            cr_assert_not_null(strstr(detail.text, both), "%s", detail.text);
        }
    }
    kvf_frame_parser_t parser;
    kvf_frame_parser_init(&parser, kvf_alloc_default(), 0);
    parser.cap_bytes = CAP;
    size_t bytes;
    uint8_t *stream = make_stream(&bytes);
    size_t next = 0;
    feed(&parser, stream, bytes, &next);
    cr_assert_eq(next, N_FRAMES);
    kvf_frame_parser_cleanup(&parser);
    free(stream);
}

/* Remembers the largest size that was asked for. */
static void *largest_resize(void *ctx, void *ptr, size_t size) {
    size_t *largest = ctx;
    *largest = size > *largest ? size : *largest;
    return kvf_alloc_default()->resize(NULL, ptr, size);
}

Test(frame, a_header_that_announces_much_gets_nothing_for_it) {
    size_t largest = 0;
    const kvf_alloc_t alloc = {largest_resize, &largest};
    kvf_frame_parser_t parser;
    kvf_frame_parser_init(&parser, &alloc, UINT32_MAX);
    uint8_t start[KVF_FRAME_HEADER_BYTES + 10000] = {0};
    kvf_frame_header(KVF_FRAME_COMMIT, UINT32_MAX, start);
    for (size_t i = 0; i < sizeof(start); i++) {
        const uint8_t *at = start + i;
        size_t left = 1;
        bool have = true;
        kvf_frame_type_t type;
        const uint8_t *payload;
        size_t n;
        cr_assert_eq(kvf_frame_parse(&parser, &at, &left, &have, &type, &payload, &n, NULL),
                     KVF_OK);
        cr_assert_not(have);
        cr_assert_leq(largest, 1024 + 2 * (i + 1), "after %zu bytes", i + 1);
    }
    kvf_frame_parser_cleanup(&parser);
}

Test(frame, every_failed_allocation_is_reported_and_loses_no_byte) {
    size_t bytes;
    uint8_t *stream = make_stream(&bytes);
    uint64_t fail_at = 1;
    for (bool failed = true; failed; fail_at++) {
        failed = false;
        kvf_alloc_fail_t fail;
        kvf_alloc_fail_init(&fail, fail_at);
        kvf_frame_parser_t parser;
        kvf_frame_parser_init(&parser, &fail.table, CAP);
        const uint8_t *at = stream;
        size_t left = bytes;
        size_t next = 0;
        for (bool have = true; have;) {
            kvf_frame_type_t type;
            const uint8_t *payload;
            size_t n;
            kvf_status_t status =
                kvf_frame_parse(&parser, &at, &left, &have, &type, &payload, &n, NULL);
            if (status != KVF_OK) {
                cr_assert_eq(status, KVF_ERR_NO_MEMORY);
                cr_assert_not(failed);
                failed = true;
                have = true; /* once more: memory came back */
                continue;
            }
            if (have) {
                cr_assert_eq(n, frames[next].bytes);
                cr_assert(n == 0 || payload[n - 1] == payload_byte(next, n - 1));
                next++;
            }
        }
        cr_assert_eq(next, N_FRAMES, "allocation %lu", (unsigned long)fail_at);
        kvf_frame_parser_cleanup(&parser);
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_gt(fail_at, 3, "nothing failed");
    free(stream);
}

Test(frame, random_bytes_are_refused_at_the_first_header) {
    srand(1);
    for (int round = 0; round < 20000; round++) {
        uint8_t header[KVF_FRAME_HEADER_BYTES];
        for (size_t i = 0; i < sizeof(header); i++) {
            header[i] = (uint8_t)rand();
        }
        /* Keep more and more of a good start, so that every check is reached. */
        memcpy(header, "KVFR\x05\0\0\0", (size_t)(round % 9));
        bool have;
        kvf_status_t status = parse_header(header, CAP, &have, NULL);
        cr_assert(status == KVF_ERR_PROTOCOL || status == KVF_ERR_TOO_LARGE);
    }
}
