/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MESSAGES_H
#define KVF_TESTS_MESSAGES_H

/**
 * @file
 * A good message of every type, at its limits, and what becomes of it on its way.
 */

#include "kvmgr/base/size.h"
#include "proto/message.h"

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

/** One good message of every type; a test spoils one field of it. */
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
    Kvf__Wire__Join join;
    Kvf__Wire__Leave leave;
    Kvf__Wire__Fetch fetch;
    Kvf__Wire__Joined joined;
    uint64_t renewed[KVF_RENEWED_PER_BEAT + 1];
    Kvf__Wire__Heartbeat heartbeat;
    Kvf__Wire__Bye bye;
    uint64_t ordinals[3], generations[3], digests[3];
    uint32_t slots[3];
    int32_t first[2], draft[2];
    uint8_t ticket[600], answer[KVF_ANSWER_BYTES + 1];
    char text[1000];
} fixture_t;

/** @return Messages at their limits; the caller frees it. */
static inline fixture_t *make_fixture(void) {
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
    kvf__wire__join__init(&f->join);
    f->join.path = UINT64_MAX;
    f->join.invitation = (ProtobufCBinaryData){KVF_INVITATION_BYTES, f->ticket};
    kvf__wire__leave__init(&f->leave);
    f->leave.path = UINT64_MAX;
    f->leave.own = true;
    f->leave.message = f->abort.message;
    kvf__wire__fetch__init(&f->fetch);
    f->fetch.transfer = &f->transfer;
    f->fetch.path = f->fetch.first = UINT64_MAX;
    f->fetch.n = KVF_FETCHED_AT_ONCE;
    kvf__wire__joined__init(&f->joined);
    f->joined.path = UINT64_MAX;
    f->joined.answer = (ProtobufCBinaryData){KVF_ANSWER_BYTES, f->answer};
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

/** @return The message of a type. */
static inline const ProtobufCMessage *message_of(const fixture_t *f, kvf_frame_type_t type) {
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
    case KVF_FRAME_JOIN:
        return &f->join.base;
    case KVF_FRAME_LEAVE:
        return &f->leave.base;
    case KVF_FRAME_FETCH:
        return &f->fetch.base;
    case KVF_FRAME_JOINED:
        return &f->joined.base;
    default:
        abort();
    }
}

/** Pack it, which must go well; the caller frees the frame. */
static inline void pack(const fixture_t *f, kvf_frame_type_t type, uint8_t **frame_p,
                        size_t *bytes_p) {
    cr_assert_eq(
        kvf_message_pack(kvf_alloc_default(), type, message_of(f, type), CAP, frame_p, bytes_p),
        KVF_OK);
}

/** Unpack a payload that ends where it says, from an allocator that must be left empty. */
static inline kvf_status_t unpack_and_free(kvf_frame_type_t type, const uint8_t *payload,
                                           size_t bytes, kvf_detail_t *detail) {
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

/** Pack and unpack: well, or with an error that names this field. */
static inline void expect(const fixture_t *f, kvf_frame_type_t type, const char *wrong) {
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

#endif
