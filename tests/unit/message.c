/* SPDX-License-Identifier: Apache-2.0 */
#include "../support/messages.h"

/* A transfer of id as field 1: tag, length, incarnation (field 1), counter (field 2, 300 = 0xac
 * 0x02). */
#define ID_WIRE                                                                                    \
    0x0a, 21, 0x0a, 16, 0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab,    \
        0xac, 0xad, 0xae, 0xaf, 0x10, 0xac, 0x02

/* ---- bytes ---- */

Test(message, frames_have_these_bytes) {
    static const uint8_t done[] = {'K', 'V', 'F', 'R', 6, 0, 0, 0,      23,
                                   0,   0,   0,   0,   0, 0, 0, ID_WIRE};
    /* sint32 is zigzag: -40 is 79. */
    static const uint8_t abort_[] = {'K', 'V', 'F', 'R',     7,    0,  0,    0, 30,  0,   0,  0, 0,
                                     0,   0,   0,   ID_WIRE, 0x10, 79, 0x1a, 3, 'w', 'h', 'y'};
    /* group 2, layers [1, 5), ordinals 7 and 300, generations 1 and 2, two digests of 8 bytes. */
    static const uint8_t commit[] = {
        'K',  'V',  'F',  'R',  5,       0,    0,    0,    23 + 2 + 60, 0,    0,    0,
        0,    0,    0,    0,    ID_WIRE, 0x12, 60,   0x08, 2,           0x10, 1,    0x18,
        5,    0x22, 16,   0x07, 0,       0,    0,    0,    0,           0,    0,    0x2c,
        0x01, 0,    0,    0,    0,       0,    0,    0x2a, 16,          0x01, 0,    0,
        0,    0,    0,    0,    0,       0x02, 0,    0,    0,           0,    0,    0,
        0,    0x32, 16,   0x88, 0x77,    0x66, 0x55, 0x44, 0x33,        0x22, 0x11, 0x18,
        0x17, 0x16, 0x15, 0x14, 0x13,    0x12, 0x11};
    /* 300 = 0xac 0x02; 16384 = 0x80 0x80 0x01. */
    static const uint8_t ready[] = {'K', 'V', 'F', 'R', 10, 0, 0,       0,    26,   0,
                                    0,   0,   0,   0,   0,  0, ID_WIRE, 0x10, 0xac, 2};
    static const uint8_t pull[] = {'K', 'V', 'F', 'R', 11, 0,       0,    0,    27,   0, 0,
                                   0,   0,   0,   0,   0,  ID_WIRE, 0x10, 0x80, 0x80, 1};
    static const uint8_t join[] = {'K', 'V', 'F', 'R', 12,   0, 0,    0, 7, 0,    0,   0,
                                   0,   0,   0,   0,   0x08, 3, 0x12, 3, 9, 0x5b, 0x5c};
    static const uint8_t leave[] = {'K', 'V', 'F', 'R',  13, 0,    0, 0,    9, 0,   0,   0,  0,
                                    0,   0,   0,   0x08, 3,  0x10, 1, 0x1a, 3, 'w', 'h', 'y'};
    static const uint8_t fetch[] = {'K', 'V', 'F', 'R', 14,      0,    0, 0,    30,   0, 0,    0,
                                    0,   0,   0,   0,   ID_WIRE, 0x10, 3, 0x18, 0xac, 2, 0x20, 7};
    static const uint8_t joined[] = {'K', 'V', 'F', 'R', 15, 0,    0, 0,    6, 0,   0,
                                     0,   0,   0,   0,   0,  0x08, 3, 0x12, 2, 'o', 'k'};
    fixture_t *f = make_fixture();
    char why[] = "why";
    uint8_t invitation[] = {9, 0x5b, 0x5c}, answer[] = {'o', 'k'};
    f->joined.path = 3;
    f->joined.answer = (ProtobufCBinaryData){sizeof(answer), answer};
    f->join.path = f->leave.path = f->fetch.path = 3;
    f->join.invitation = (ProtobufCBinaryData){sizeof(invitation), invitation};
    f->leave.message = why;
    f->fetch.first = 300;
    f->fetch.n = 7;
    f->ready.bytes = 300;
    f->pull.bytes = 16384;
    f->abort.message = why;
    f->range.group_idx = 2;
    f->range.layer_first_idx = 1;
    f->range.layer_end_idx = 5;
    f->range.n_ordinals = f->range.n_generations = f->range.n_digests = 2;
    f->ordinals[0] = 7;
    f->ordinals[1] = 300;
    f->generations[0] = 1;
    f->generations[1] = 2;
    f->digests[0] = 0x1122334455667788;
    f->digests[1] = 0x1112131415161718;
    f->commit.final = NULL;
    const struct {
        kvf_frame_type_t type;
        const uint8_t *wire;
        size_t bytes;
    } cases[] = {
        {KVF_FRAME_DONE, done, sizeof(done)},       {KVF_FRAME_ABORT, abort_, sizeof(abort_)},
        {KVF_FRAME_COMMIT, commit, sizeof(commit)}, {KVF_FRAME_READY, ready, sizeof(ready)},
        {KVF_FRAME_PULL, pull, sizeof(pull)},       {KVF_FRAME_JOIN, join, sizeof(join)},
        {KVF_FRAME_LEAVE, leave, sizeof(leave)},    {KVF_FRAME_FETCH, fetch, sizeof(fetch)},
        {KVF_FRAME_JOINED, joined, sizeof(joined)}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, cases[i].type, &frame, &bytes);
        cr_assert_eq(bytes, cases[i].bytes, "case %zu: %zu bytes", i, bytes);
        cr_assert_arr_eq(frame, cases[i].wire, bytes);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(message, every_type_at_its_limits_comes_back_as_it_went) {
    fixture_t *f = make_fixture();
    for (int type = KVF_FRAME_REFUSE; type < KVF_FRAME_TYPES_END; type++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, (kvf_frame_type_t)type, &frame, &bytes);
        ProtobufCMessage *message;
        cr_assert_eq(kvf_message_unpack(kvf_alloc_default(), (kvf_frame_type_t)type,
                                        frame + KVF_FRAME_HEADER_BYTES,
                                        bytes - KVF_FRAME_HEADER_BYTES, &message, NULL),
                     KVF_OK);
        uint8_t *again;
        size_t again_bytes;
        cr_assert_eq(kvf_message_pack(kvf_alloc_default(), (kvf_frame_type_t)type, message, CAP,
                                      &again, &again_bytes),
                     KVF_OK);
        cr_assert_eq(again_bytes, bytes);
        cr_assert_arr_eq(again, frame, bytes);
        if (type == KVF_FRAME_RECV_REQUEST) {
            const Kvf__Wire__RecvRequest *request = (Kvf__Wire__RecvRequest *)message;
            kvf_transfer_id_t read = kvf_transfer_id_read(request->transfer);
            cr_assert_arr_eq(read.receiver.bytes, id.receiver.bytes, KVF_INCARNATION_BYTES);
            cr_assert_eq(read.counter, 300);
            cr_assert_eq(request->grants[1]->slots[2], INT32_MAX - 2);
            cr_assert_eq(request->grants[1]->generations[0], UINT64_MAX);
        }
        kvf_message_free(kvf_alloc_default(), message);
        kvf_free(kvf_alloc_default(), again);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(message, pack_stops_at_the_cap) {
    fixture_t *f = make_fixture();
    uint8_t *frame = NULL;
    size_t bytes = 0;
    cr_assert_eq(
        kvf_message_pack(kvf_alloc_default(), KVF_FRAME_DONE, &f->done.base, 22, &frame, &bytes),
        KVF_ERR_TOO_LARGE);
    cr_assert_null(frame);
    cr_assert_eq(bytes, 0);
    cr_assert_eq(
        kvf_message_pack(kvf_alloc_default(), KVF_FRAME_DONE, &f->done.base, 23, &frame, &bytes),
        KVF_OK);
    cr_assert_eq(bytes, KVF_FRAME_HEADER_BYTES + 23);
    kvf_free(kvf_alloc_default(), frame);
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 1);
    frame = NULL;
    cr_assert_eq(kvf_message_pack(&fail.table, KVF_FRAME_DONE, &f->done.base, 23, &frame, &bytes),
                 KVF_ERR_NO_MEMORY);
    cr_assert_null(frame);
    free(f);
}

/* ---- checks ---- */

#define SPOIL(type, field, statement)                                                              \
    do {                                                                                           \
        fixture_t *f = make_fixture();                                                             \
        expect(f, type, NULL);                                                                     \
        statement;                                                                                 \
        expect(f, type, field);                                                                    \
        free(f);                                                                                   \
    } while (0)

Test(message, recv_request_is_checked_field_by_field) {
    const kvf_frame_type_t t = KVF_FRAME_RECV_REQUEST;
    char odd[] = "tab\there";
    SPOIL(t, "transfer", f->request.transfer = NULL);
    SPOIL(t, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(t, "transfer", f->transfer.incarnation = ((ProtobufCBinaryData){17, f->ticket}));
    SPOIL(t, "ticket", f->request.ticket.len = 513);
    SPOIL(t, "request_id", f->request.request_id--);
    SPOIL(t, "request_id", f->request.request_id = odd);
    SPOIL(t, "prompt_len", f->request.prompt_len++);
    SPOIL(t, "prompt_len", f->request.prompt_len = -1);
    SPOIL(t, "total_input_len_cp", f->request.total_input_len_cp++);
    SPOIL(t, "total_input_len_cp", f->request.total_input_len_cp = INT64_MIN);
    SPOIL(t, "draft_len", f->request.draft_len++);
    SPOIL(t, "draft_len", f->request.draft_len = -1);
    SPOIL(t, "cached_tokens", f->request.cached_tokens++);
    SPOIL(t, "cached_tokens", f->request.cached_tokens = -1);
    SPOIL(t, "mover", f->request.mover--);
    SPOIL(t, "mover", f->request.mover = odd);
    SPOIL(t, "grants", f->request.n_grants++);
    SPOIL(t, "grants.group_idx", f->grants[1].group_idx++);
    SPOIL(t, "grants: arrays of different lengths", f->grants[1].n_ordinals--);
    SPOIL(t, "grants: arrays of different lengths", f->grants[1].n_slots--);
    SPOIL(t, "grants: arrays of different lengths", f->grants[1].n_generations = 0);
    SPOIL(t, "grants.ordinals", f->ordinals[0]++);
    SPOIL(t, "grants.ordinals", f->ordinals[2] = UINT64_MAX);
    for (size_t i = 0; i < 3; i++) {
        SPOIL(t, "grants.ordinals", memset(f->ordinals, 0, sizeof(f->ordinals));
              f->ordinals[i] = KVF_MAX_TOKENS);
    }
    SPOIL(t, "grants.slots", f->slots[0]++);
    SPOIL(t, "grants.slots", f->slots[1] = UINT32_MAX);
}

Test(message, commit_is_checked_field_by_field) {
    const kvf_frame_type_t t = KVF_FRAME_COMMIT;
    SPOIL(t, "transfer", f->commit.transfer = NULL);
    SPOIL(t, "transfer", f->transfer.incarnation.len = 0);
    SPOIL(t, "ranges.group_idx", f->range.group_idx++);
    SPOIL(t, "ranges.layer_first_idx", f->range.layer_first_idx++);
    SPOIL(t, "ranges.layer_first_idx", f->range.layer_first_idx = UINT32_MAX);
    SPOIL(t, "ranges.layer_end_idx", f->range.layer_end_idx++);
    SPOIL(t, "ranges: arrays of different lengths", f->range.n_ordinals--);
    SPOIL(t, "ranges: arrays of different lengths", f->range.n_generations--);
    SPOIL(t, "ranges: arrays of different lengths", f->range.n_digests--);
    SPOIL(t, "ranges.ordinals", f->ordinals[0]++);
    SPOIL(t, NULL, f->commit.final = NULL; f->commit.n_ranges = 0);
}

Test(message, short_messages_are_checked) {
    SPOIL(KVF_FRAME_DONE, "transfer", f->done.transfer = NULL);
    SPOIL(KVF_FRAME_DONE, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_DRAINED, "transfer", f->drained.transfer = NULL);
    SPOIL(KVF_FRAME_DRAINED, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_READY, "transfer", f->ready.transfer = NULL);
    SPOIL(KVF_FRAME_READY, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_PULL, "transfer", f->pull.transfer = NULL);
    SPOIL(KVF_FRAME_PULL, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_JOIN, "invitation", f->join.invitation.len++);
    SPOIL(KVF_FRAME_JOINED, "answer", f->joined.answer.len++);
    SPOIL(KVF_FRAME_FETCH, "transfer", f->fetch.transfer = NULL);
    SPOIL(KVF_FRAME_FETCH, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_FETCH, "n", f->fetch.n = 0);
    SPOIL(KVF_FRAME_FETCH, "n", f->fetch.n++);
    SPOIL(KVF_FRAME_ABORT, "transfer", f->abort.transfer = NULL);
    SPOIL(KVF_FRAME_ABORT, "transfer", f->transfer.incarnation.len = 15);
    SPOIL(KVF_FRAME_ABORT, "status", f->abort.status = KVF_OK);
    SPOIL(KVF_FRAME_REFUSE, "status", f->refuse.status = KVF_OK);
    SPOIL(KVF_FRAME_HEARTBEAT, "renewed", f->renewed[9] = f->renewed[8]);
    SPOIL(KVF_FRAME_HEARTBEAT, "renewed", f->renewed[KVF_RENEWED_PER_BEAT - 1] = UINT64_MAX);
    SPOIL(KVF_FRAME_HEARTBEAT, "renewed", f->renewed[KVF_RENEWED_PER_BEAT] = 0;
          f->heartbeat.n_renewed++);
}

/* The known codes by another way than the code: whatever has a name of its own. */
Test(message, only_known_failures_pass_as_statuses) {
    fixture_t *f = make_fixture();
    size_t known = 0;
    for (int status = -200; status <= 200; status++) {
        bool internal = strcmp(kvf_status_name((kvf_status_t)status), "internal") == 0;
        bool good = status != KVF_OK && (!internal || status == KVF_ERR_INTERNAL);
        f->abort.status = f->refuse.status = status;
        expect(f, KVF_FRAME_ABORT, good ? NULL : "status");
        expect(f, KVF_FRAME_REFUSE, good ? NULL : "status");
        known += good;
    }
    cr_assert_gt(known, 20);
    free(f);
}

Test(message, sentences_are_cut_and_made_printable) {
    fixture_t *f = make_fixture();
    char text[900];
    for (size_t i = 0; i < sizeof(text) - 1; i++) {
        text[i] = (char)(1 + i % 255);
    }
    text[sizeof(text) - 1] = '\0';
    f->abort.message = f->refuse.message = f->bye.message = text;
    const kvf_frame_type_t types[] = {KVF_FRAME_ABORT, KVF_FRAME_REFUSE, KVF_FRAME_BYE};
    for (size_t t = 0; t < 3; t++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, types[t], &frame, &bytes);
        ProtobufCMessage *message;
        cr_assert_eq(kvf_message_unpack(kvf_alloc_default(), types[t],
                                        frame + KVF_FRAME_HEADER_BYTES,
                                        bytes - KVF_FRAME_HEADER_BYTES, &message, NULL),
                     KVF_OK);
        const char *got = types[t] == KVF_FRAME_ABORT    ? ((Kvf__Wire__Abort *)message)->message
                          : types[t] == KVF_FRAME_REFUSE ? ((Kvf__Wire__Refuse *)message)->message
                                                         : ((Kvf__Wire__Bye *)message)->message;
        cr_assert_eq(strlen(got), KVF_SENTENCE_BYTES);
        for (size_t i = 0; i < KVF_SENTENCE_BYTES; i++) {
            size_t byte = 1 + i % 255;
            cr_assert_eq(got[i], byte >= ' ' && byte <= '~' ? (char)byte : '?', "byte %zu", i);
        }
        kvf_message_free(kvf_alloc_default(), message);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}
