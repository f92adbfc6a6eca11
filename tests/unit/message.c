/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/message.h"

#include "kvmgr/base/size.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CAP (16U << 20)

static const kvf_transfer_id_t id = {
    .receiver = {{0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac,
                  0xad, 0xae, 0xaf}},
    .counter = 300,
};

/* A transfer of id as field 1: tag, length, incarnation (field 1), counter (field 2, 300 = 0xac
 * 0x02). */
#define ID_WIRE                                                                                    \
    0x0a, 21, 0x0a, 16, 0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab,    \
        0xac, 0xad, 0xae, 0xaf, 0x10, 0xac, 0x02

/* ---- one good message of every type; a test spoils one field of it ---- */

typedef struct fixture {
    Kvf__Wire__TransferId transfer;
    Kvf__Wire__Grant grants[KVF_MAX_GROUPS + 1];
    Kvf__Wire__Grant *grant_list[KVF_MAX_GROUPS + 1];
    Kvf__Wire__CommitRange range;
    Kvf__Wire__CommitRange *range_list[1];
    Kvf__Wire__Final final;
    Kvf__Wire__RecvRequest request;
    Kvf__Wire__Commit commit;
    Kvf__Wire__Abort abort;
    Kvf__Wire__Refuse refuse;
    Kvf__Wire__Done done;
    Kvf__Wire__Drained drained;
    Kvf__Wire__Ready ready;
    Kvf__Wire__Pull pull;
    uint64_t renewed[KVF_RENEWED_PER_BEAT + 1];
    Kvf__Wire__Heartbeat heartbeat;
    Kvf__Wire__Bye bye;
    uint64_t ordinals[3], generations[3], digests[3];
    uint32_t slots[3];
    int32_t first[2], draft[2];
    uint8_t ticket[600];
    char text[1000];
} fixture_t;

static fixture_t *make_fixture(void) {
    fixture_t *f = calloc(1, sizeof(*f));
    for (size_t i = 0; i < 3; i++) {
        f->ordinals[i] = (uint64_t)KVF_MAX_TOKENS - 1 - i;
        f->generations[i] = UINT64_MAX - i;
        f->digests[i] = 0x0102030405060708 + i;
        f->slots[i] = INT32_MAX - (uint32_t)i;
    }
    memset(f->ticket, 0x5a, sizeof(f->ticket));
    memset(f->text, 'x', sizeof(f->text) - 1);
    kvf_transfer_id_write(&id, &f->transfer);

    kvf__wire__recv_request__init(&f->request);
    f->request.transfer = &f->transfer;
    f->request.ticket = (ProtobufCBinaryData){512, f->ticket};
    f->request.request_id = f->text + sizeof(f->text) - 1 - 128;
    f->request.prompt_len = KVF_MAX_TOKENS;
    f->request.total_input_len_cp = KVF_MAX_TOKENS;
    f->request.draft_len = KVF_MAX_TOKENS;
    f->request.cached_tokens = KVF_MAX_TOKENS;
    f->request.timeout_us = UINT64_MAX;
    f->request.skip_holes = true;
    f->request.mover = f->request.request_id;
    f->request.more = true;
    f->request.pull = true;
    f->request.grant_key = UINT64_MAX;
    f->request.n_grants = KVF_MAX_GROUPS;
    f->request.grants = f->grant_list;
    for (uint32_t i = 0; i <= KVF_MAX_GROUPS; i++) {
        kvf__wire__grant__init(&f->grants[i]);
        f->grant_list[i] = &f->grants[i];
    }
    f->grants[1].group_idx = KVF_MAX_GROUPS - 1;
    f->grants[1].n_ordinals = f->grants[1].n_slots = f->grants[1].n_generations = 3;
    f->grants[1].ordinals = f->ordinals;
    f->grants[1].slots = f->slots;
    f->grants[1].generations = f->generations;

    kvf__wire__commit_range__init(&f->range);
    f->range_list[0] = &f->range;
    f->range.group_idx = KVF_MAX_GROUPS - 1;
    f->range.layer_first_idx = KVF_MAX_GROUP_LAYERS - 1;
    f->range.layer_end_idx = KVF_MAX_GROUP_LAYERS;
    f->range.n_ordinals = f->range.n_generations = f->range.n_digests = 3;
    f->range.ordinals = f->ordinals;
    f->range.generations = f->generations;
    f->range.digests = f->digests;
    kvf__wire__final__init(&f->final);
    f->first[0] = INT32_MIN;
    f->first[1] = INT32_MAX;
    f->final.n_first_tokens = f->final.n_draft_tokens = 2;
    f->final.first_tokens = f->first;
    f->final.draft_tokens = f->draft;
    f->final.data = (ProtobufCBinaryData){600, f->ticket};
    f->final.since_prefill_us = UINT64_MAX;
    kvf__wire__commit__init(&f->commit);
    f->commit.transfer = &f->transfer;
    f->commit.n_ranges = 1;
    f->commit.ranges = f->range_list;
    f->commit.final = &f->final;

    kvf__wire__abort__init(&f->abort);
    f->abort.transfer = &f->transfer;
    f->abort.status = KVF_ERR_CANCELLED;
    f->abort.message = f->text + sizeof(f->text) - 1 - KVF_SENTENCE_BYTES;
    kvf__wire__refuse__init(&f->refuse);
    f->refuse.status = KVF_ERR_INTERNAL;
    f->refuse.message = f->abort.message;
    kvf__wire__done__init(&f->done);
    f->done.transfer = &f->transfer;
    kvf__wire__drained__init(&f->drained);
    f->drained.transfer = &f->transfer;
    kvf__wire__ready__init(&f->ready);
    f->ready.transfer = &f->transfer;
    f->ready.bytes = UINT64_MAX;
    kvf__wire__pull__init(&f->pull);
    f->pull.transfer = &f->transfer;
    f->pull.bytes = UINT64_MAX;
    kvf__wire__heartbeat__init(&f->heartbeat);
    f->heartbeat.sequence = f->heartbeat.received = UINT64_MAX;
    for (uint64_t i = 0; i < KVF_RENEWED_PER_BEAT; i++) {
        f->renewed[i] = UINT64_MAX - i;
    }
    f->heartbeat.n_renewed = KVF_RENEWED_PER_BEAT;
    f->heartbeat.renewed = f->renewed;
    kvf__wire__bye__init(&f->bye);
    f->bye.message = f->abort.message;
    return f;
}

static const ProtobufCMessage *message_of(const fixture_t *f, kvf_frame_type_t type) {
    switch (type) {
    case KVF_FRAME_REFUSE:
        return &f->refuse.base;
    case KVF_FRAME_HEARTBEAT:
        return &f->heartbeat.base;
    case KVF_FRAME_RECV_REQUEST:
        return &f->request.base;
    case KVF_FRAME_COMMIT:
        return &f->commit.base;
    case KVF_FRAME_DONE:
        return &f->done.base;
    case KVF_FRAME_ABORT:
        return &f->abort.base;
    case KVF_FRAME_DRAINED:
        return &f->drained.base;
    case KVF_FRAME_BYE:
        return &f->bye.base;
    case KVF_FRAME_READY:
        return &f->ready.base;
    case KVF_FRAME_PULL:
        return &f->pull.base;
    default:
        abort();
    }
}

static void pack(const fixture_t *f, kvf_frame_type_t type, uint8_t **frame_p, size_t *bytes_p) {
    cr_assert_eq(
        kvf_message_pack(kvf_alloc_default(), type, message_of(f, type), CAP, frame_p, bytes_p),
        KVF_OK);
}

/* Unpack a payload that ends where it says, from an allocator that must be left empty. */
static kvf_status_t unpack_and_free(kvf_frame_type_t type, const uint8_t *payload, size_t bytes,
                                    kvf_detail_t *detail) {
    kvf_alloc_fail_t count;
    kvf_alloc_fail_init(&count, 0);
    uint8_t *exact = malloc(bytes == 0 ? 1 : bytes);
    memcpy(exact, payload, bytes);
    ProtobufCMessage *message = NULL;
    kvf_status_t status = kvf_message_unpack(&count.table, type, exact, bytes, &message, detail);
    free(exact);
    cr_assert_eq(message != NULL, status == KVF_OK);
    kvf_message_free(&count.table, message);
    cr_assert_eq(count.live, 0, "leak");
    return status;
}

static void expect(const fixture_t *f, kvf_frame_type_t type, const char *wrong) {
    uint8_t *frame;
    size_t bytes;
    pack(f, type, &frame, &bytes);
    kvf_detail_t detail = {""};
    kvf_status_t status = unpack_and_free(type, frame + KVF_FRAME_HEADER_BYTES,
                                          bytes - KVF_FRAME_HEADER_BYTES, &detail);
    if (wrong == NULL) {
        cr_assert_eq(status, KVF_OK, "%s", detail.text);
    } else {
        char text[128];
        (void)snprintf(text, sizeof(text), "%s: wrong field %s", kvf_frame_type_name(type), wrong);
        cr_assert_eq(status, KVF_ERR_PROTOCOL, "%s passed", text);
        cr_assert_str_eq(detail.text, text);
    }
    kvf_free(kvf_alloc_default(), frame);
}

/* ---- bytes ---- */

Test(message, frames_have_these_bytes) {
    static const uint8_t done[] = {'K', 'V', 'F', 'R', 6, 0, 0, 0,      23,
                                   0,   0,   0,   0,   0, 0, 0, ID_WIRE};
    /* sint32 is zigzag: -40 is 79. */
    static const uint8_t abort_[] = {'K', 'V', 'F', 'R',     7,    0,  0,    0, 30,  0,   0,  0, 0,
                                     0,   0,   0,   ID_WIRE, 0x10, 79, 0x1a, 3, 'w', 'h', 'y'};
    /* group 2, layers [1, 5), ordinals 7 and 300, generations 1 and 2, two digests of 8 bytes. */
    static const uint8_t commit[] = {
        'K',  'V',  'F',  'R',     5,    0,    0,    0,    23 + 2 + 33, 0,    0,    0,    0,
        0,    0,    0,    ID_WIRE, 0x12, 33,   0x08, 2,    0x10,        1,    0x18, 5,    0x22,
        3,    7,    0xac, 2,       0x2a, 2,    1,    2,    0x32,        16,   0x88, 0x77, 0x66,
        0x55, 0x44, 0x33, 0x22,    0x11, 0x18, 0x17, 0x16, 0x15,        0x14, 0x13, 0x12, 0x11};
    /* 300 = 0xac 0x02; 16384 = 0x80 0x80 0x01. */
    static const uint8_t ready[] = {'K', 'V', 'F', 'R', 10, 0, 0,       0,    26,   0,
                                    0,   0,   0,   0,   0,  0, ID_WIRE, 0x10, 0xac, 2};
    static const uint8_t pull[] = {'K', 'V', 'F', 'R', 11, 0,       0,    0,    27,   0, 0,
                                   0,   0,   0,   0,   0,  ID_WIRE, 0x10, 0x80, 0x80, 1};
    fixture_t *f = make_fixture();
    char why[] = "why";
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
    } cases[] = {{KVF_FRAME_DONE, done, sizeof(done)},
                 {KVF_FRAME_ABORT, abort_, sizeof(abort_)},
                 {KVF_FRAME_COMMIT, commit, sizeof(commit)},
                 {KVF_FRAME_READY, ready, sizeof(ready)},
                 {KVF_FRAME_PULL, pull, sizeof(pull)}};
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

/* ---- hostile bytes ---- */

Test(message, hello_and_unknown_types_are_refused) {
    const int types[] = {-1, 0, KVF_FRAME_HELLO, KVF_FRAME_TYPES_END, 0x7fff};
    for (size_t i = 0; i < 5; i++) {
        cr_assert_eq(unpack_and_free((kvf_frame_type_t)types[i], (const uint8_t *)"", 0, NULL),
                     KVF_ERR_PROTOCOL);
    }
}

/* Protobuf has no end mark: what ends between two fields is a shorter message. All else is refused.
 */
Test(message, a_message_cut_anywhere_is_refused_or_lacks_fields) {
    fixture_t *f = make_fixture();
    for (int type = KVF_FRAME_REFUSE; type < KVF_FRAME_TYPES_END; type++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, (kvf_frame_type_t)type, &frame, &bytes);
        size_t passed = 0;
        for (size_t n = 0; n < bytes - KVF_FRAME_HEADER_BYTES; n++) {
            kvf_status_t status =
                unpack_and_free((kvf_frame_type_t)type, frame + KVF_FRAME_HEADER_BYTES, n, NULL);
            cr_assert(status == KVF_OK || status == KVF_ERR_PROTOCOL);
            passed += status == KVF_OK;
        }
        /* As many as there are fields, repeated sub-messages counted one by one. */
        size_t most = type == KVF_FRAME_RECV_REQUEST ? 29
                      : type == KVF_FRAME_COMMIT     ? 2
                      : type == KVF_FRAME_HEARTBEAT  ? 3
                                                     : 1;
        cr_assert_leq(passed, most, "type %d: %zu", type, passed);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(message, every_flipped_bit_is_read_safely) {
    fixture_t *f = make_fixture();
    for (int type = KVF_FRAME_REFUSE; type < KVF_FRAME_TYPES_END; type++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, (kvf_frame_type_t)type, &frame, &bytes);
        for (size_t bit = 8 * KVF_FRAME_HEADER_BYTES; bit < 8 * bytes; bit++) {
            frame[bit / 8] ^= (uint8_t)(1U << bit % 8);
            kvf_status_t status =
                unpack_and_free((kvf_frame_type_t)type, frame + KVF_FRAME_HEADER_BYTES,
                                bytes - KVF_FRAME_HEADER_BYTES, NULL);
            cr_assert(status == KVF_OK || status == KVF_ERR_PROTOCOL);
            frame[bit / 8] ^= (uint8_t)(1U << bit % 8);
        }
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(message, random_bytes_are_read_safely) {
    srand(7);
    for (int round = 0; round < 50000; round++) {
        uint8_t payload[64];
        size_t bytes = (size_t)rand() % (sizeof(payload) + 1);
        for (size_t i = 0; i < bytes; i++) {
            payload[i] = (uint8_t)rand();
        }
        int type = KVF_FRAME_REFUSE + rand() % (KVF_FRAME_TYPES_END - KVF_FRAME_REFUSE);
        kvf_status_t status = unpack_and_free((kvf_frame_type_t)type, payload, bytes, NULL);
        cr_assert(status == KVF_OK || status == KVF_ERR_PROTOCOL);
    }
}

/* Adds up what was asked for. */
static void *sum_resize(void *ctx, void *ptr, size_t size) {
    *(size_t *)ctx += size;
    return kvf_alloc_default()->resize(NULL, ptr, size);
}

static kvf_status_t swell(kvf_frame_type_t type, const uint8_t *unit, size_t unit_bytes, size_t n,
                          size_t *taken_p) {
    uint8_t *payload = malloc(unit_bytes * n);
    for (size_t i = 0; i < n; i++) {
        memcpy(payload + i * unit_bytes, unit, unit_bytes);
    }
    *taken_p = 0;
    const kvf_alloc_t alloc = {sum_resize, taken_p};
    ProtobufCMessage *message;
    kvf_detail_t detail = {""};
    kvf_status_t status =
        kvf_message_unpack(&alloc, type, payload, unit_bytes * n, &message, &detail);
    cr_assert_eq(status, KVF_ERR_PROTOCOL);
    free(payload);
    cr_assert_not_null(strstr(detail.text, "swell"), "%s", detail.text);
    return status;
}

Test(message, what_swells_is_stopped_at_a_small_multiple) {
    const uint8_t grant[] = {0x5a, 0};          /* an empty grant: 2 bytes, over 100 in memory */
    const uint8_t range[] = {0x12, 0};          /* an empty commit range */
    const uint8_t field[] = {0x1a, 2, 0x2a, 0}; /* a final with a field 5, again and again */
    const uint8_t unknown[] = {0xc0, 0x3e, 1};  /* field 1000, which no version has */
    const struct {
        kvf_frame_type_t type;
        const uint8_t *unit;
        size_t bytes;
    } cases[] = {{KVF_FRAME_RECV_REQUEST, grant, sizeof(grant)},
                 {KVF_FRAME_COMMIT, range, sizeof(range)},
                 {KVF_FRAME_COMMIT, field, sizeof(field)},
                 {KVF_FRAME_HEARTBEAT, unknown, sizeof(unknown)}};
    for (size_t i = 0; i < 4; i++) {
        const size_t n = 100000;
        size_t taken;
        cr_assert_eq(swell(cases[i].type, cases[i].unit, cases[i].bytes, n, &taken),
                     KVF_ERR_PROTOCOL);
        cr_assert_leq(taken, 16 * cases[i].bytes * n + 16384, "case %zu", i);
    }
}

/* What an honest sender may send is far from the limit: the worst is one range for each block. */
Test(message, honest_messages_do_not_hit_the_limit) {
    fixture_t *f = make_fixture();
    const size_t n = 20000;
    Kvf__Wire__CommitRange *ranges = calloc(n, sizeof(*ranges));
    Kvf__Wire__CommitRange **list = calloc(n, sizeof(*list));
    uint64_t zero = 0;
    for (size_t i = 0; i < n; i++) {
        kvf__wire__commit_range__init(&ranges[i]);
        ranges[i].layer_end_idx = 1;
        ranges[i].n_ordinals = ranges[i].n_generations = ranges[i].n_digests = 1;
        ranges[i].ordinals = ranges[i].generations = ranges[i].digests = &zero;
        list[i] = &ranges[i];
    }
    f->commit.n_ranges = n;
    f->commit.ranges = list;
    f->commit.final = NULL;
    expect(f, KVF_FRAME_COMMIT, NULL);

    uint64_t *zeros = calloc(n, sizeof(*zeros));
    uint32_t *slots = calloc(n, sizeof(*slots));
    f->grants[0].n_ordinals = f->grants[0].n_slots = f->grants[0].n_generations = n;
    f->grants[0].ordinals = f->grants[0].generations = zeros;
    f->grants[0].slots = slots;
    expect(f, KVF_FRAME_RECV_REQUEST, NULL);
    free(slots);
    free(zeros);
    free(list);
    free(ranges);
    free(f);
}

Test(message, every_failed_allocation_is_reported_and_leaks_nothing) {
    fixture_t *f = make_fixture();
    for (int type = KVF_FRAME_REFUSE; type < KVF_FRAME_TYPES_END; type++) {
        uint8_t *frame;
        size_t bytes;
        pack(f, (kvf_frame_type_t)type, &frame, &bytes);
        uint64_t at = 0;
        kvf_status_t status;
        do {
            kvf_alloc_fail_t fail;
            kvf_alloc_fail_init(&fail, ++at);
            ProtobufCMessage *message = NULL;
            status = kvf_message_unpack(&fail.table, (kvf_frame_type_t)type,
                                        frame + KVF_FRAME_HEADER_BYTES,
                                        bytes - KVF_FRAME_HEADER_BYTES, &message, NULL);
            cr_assert_eq(status, fail.calls < at ? KVF_OK : KVF_ERR_NO_MEMORY,
                         "type %d, allocation %lu", type, (unsigned long)at);
            cr_assert_eq(message != NULL, status == KVF_OK);
            kvf_message_free(&fail.table, message);
            cr_assert_eq(fail.live, 0, "type %d, allocation %lu", type, (unsigned long)at);
        } while (status != KVF_OK);
        cr_assert_geq(at, type == KVF_FRAME_RECV_REQUEST ? 24 : 2);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}
