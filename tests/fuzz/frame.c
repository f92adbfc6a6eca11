/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Input: one byte, the size of pieces, then a stream. Cut into pieces or not, a stream gives the
 * same frames and ends in the same way.
 */
#include "proto/frame.h"
#include "kvmgr/base/cursor.h"
#include "tests/fuzz/fuzz.h"

#define CAP 1000

/* What a stream gave, up to its end or its first error: a running sum over types, lengths and
 * payloads. */
typedef struct outcome {
    uint64_t frames;
    uint64_t sum;
    size_t consumed;
    kvf_status_t status;
} outcome_t;

static void add(outcome_t *outcome, uint64_t value) {
    outcome->sum = (outcome->sum ^ value) * UINT64_C(0x100000001b3);
}

static outcome_t parse(const uint8_t *data, size_t bytes, size_t piece) {
    kvf_alloc_fail_t count;
    kvf_alloc_fail_init(&count, 0);
    kvf_frame_parser_t parser;
    kvf_frame_parser_init(&parser, &count.table, CAP);
    outcome_t outcome = {0};
    for (size_t off = 0; off < bytes && outcome.status == KVF_OK; off += piece) {
        const uint8_t *at = data + off;
        size_t n = piece < bytes - off ? piece : bytes - off;
        size_t left = n;
        for (bool have = true; have && outcome.status == KVF_OK;) {
            kvf_frame_type_t type = 0;
            const uint8_t *payload = NULL;
            size_t payload_bytes = 0;
            outcome.status =
                kvf_frame_parse(&parser, &at, &left, &have, &type, &payload, &payload_bytes, NULL);
            FUZZ_CHECK(at == data + off + n - left);
            FUZZ_CHECK(outcome.status == KVF_OK || outcome.status == KVF_ERR_PROTOCOL ||
                       outcome.status == KVF_ERR_TOO_LARGE);
            if (outcome.status != KVF_OK || !have) {
                break;
            }
            FUZZ_CHECK(type >= KVF_FRAME_HELLO && type < KVF_FRAME_TYPES_END &&
                       payload_bytes <= CAP);
            outcome.frames++;
            add(&outcome, (uint64_t)type);
            add(&outcome, payload_bytes);
            for (size_t i = 0; i < payload_bytes; i++) {
                add(&outcome, payload[i]);
            }
        }
        FUZZ_CHECK(left == 0 || outcome.status != KVF_OK);
        outcome.consumed += n - left;
    }
    /* A parser holds at most its partial frame, and room for twice that. */
    FUZZ_CHECK(parser.room <= 2 * (KVF_FRAME_HEADER_BYTES + CAP) && count.live <= 1);
    kvf_frame_parser_cleanup(&parser);
    FUZZ_CHECK(count.live == 0);
    return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 1) {
        return 0;
    }
    outcome_t whole = parse(data + 1, bytes - 1, bytes);
    outcome_t cut = parse(data + 1, bytes - 1, data[0] == 0 ? 1 : data[0]);
    FUZZ_CHECK(whole.frames == cut.frames && whole.sum == cut.sum);
    FUZZ_CHECK(whole.status == cut.status && whole.consumed == cut.consumed);
    return 0;
}
