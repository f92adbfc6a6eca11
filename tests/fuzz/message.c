/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Input: one byte, the frame type, then a payload. A message that passes is within the promises of
 * message.h, takes bounded memory, and, if it has no unknown field, packs to a payload that reads
 * back as the same message.
 */
#include "proto/message.h"

#include "kvmgr/base/size.h"
#include "tests/fuzz/fuzz.h"

/* An allocator that adds up what it was asked for. */
typedef struct account {
    kvf_alloc_t table;
    size_t asked;
    size_t live;
} account_t;

static void *account_resize(void *ctx, void *ptr, size_t size) {
    account_t *account = ctx;
    account->asked += size;
    account->live += ptr == NULL && size > 0;
    account->live -= ptr != NULL && size == 0;
    return kvf_alloc_default()->resize(NULL, ptr, size);
}

static void check_transfer(const Kvf__Wire__TransferId *id) {
    FUZZ_CHECK(id != NULL && id->incarnation.len == KVF_INCARNATION_BYTES);
    kvf_transfer_id_t read = kvf_transfer_id_read(id);
    FUZZ_CHECK(read.counter == id->counter);
}

static void check_failure(int32_t status, const char *sentence) {
    FUZZ_CHECK(status != KVF_OK && kvf_status_scope((kvf_status_t)status) != KVF_SCOPE_NONE);
    FUZZ_CHECK(kvf_text_ok(sentence, 0, KVF_SENTENCE_BYTES));
}

static void check_request(const Kvf__Wire__RecvRequest *request) {
    check_transfer(request->transfer);
    FUZZ_CHECK(kvf_text_ok(request->request_id, 0, 128) && kvf_text_ok(request->mover, 0, 128));
    FUZZ_CHECK((uint64_t)request->prompt_len <= (uint64_t)KVF_MAX_TOKENS);
    FUZZ_CHECK(request->n_grants <= KVF_MAX_GROUPS);
    for (size_t i = 0; i < request->n_grants; i++) {
        const Kvf__Wire__Grant *grant = request->grants[i];
        FUZZ_CHECK(grant->group_idx < KVF_MAX_GROUPS);
        FUZZ_CHECK(grant->n_slots == grant->n_ordinals);
        FUZZ_CHECK(grant->n_generations == grant->n_ordinals);
        for (size_t k = 0; k < grant->n_ordinals; k++) {
            FUZZ_CHECK(grant->ordinals[k] >> 40 == 0 && grant->slots[k] >> 31 == 0);
        }
    }
}

static void check_commit(const Kvf__Wire__Commit *commit) {
    check_transfer(commit->transfer);
    for (size_t i = 0; i < commit->n_ranges; i++) {
        const Kvf__Wire__CommitRange *range = commit->ranges[i];
        FUZZ_CHECK(range->group_idx < KVF_MAX_GROUPS);
        FUZZ_CHECK(range->layer_first_idx < range->layer_end_idx);
        FUZZ_CHECK(range->layer_end_idx <= KVF_MAX_GROUP_LAYERS);
        FUZZ_CHECK(range->n_generations == range->n_ordinals);
        FUZZ_CHECK(range->n_digests == range->n_ordinals);
        for (size_t k = 0; k < range->n_ordinals; k++) {
            FUZZ_CHECK(range->ordinals[k] >> 40 == 0);
        }
    }
}

static void check_heartbeat(const Kvf__Wire__Heartbeat *beat) {
    FUZZ_CHECK(beat->n_renewed <= KVF_RENEWED_PER_BEAT);
    for (size_t i = 1; i < beat->n_renewed; i++) {
        FUZZ_CHECK(beat->renewed[i] < beat->renewed[i - 1]);
    }
}

static void check_promises(kvf_frame_type_t type, const ProtobufCMessage *message) {
    switch (type) {
    case KVF_FRAME_REFUSE:
        check_failure(((const Kvf__Wire__Refuse *)message)->status,
                      ((const Kvf__Wire__Refuse *)message)->message);
        break;
    case KVF_FRAME_RECV_REQUEST:
        check_request((const Kvf__Wire__RecvRequest *)message);
        break;
    case KVF_FRAME_COMMIT:
        check_commit((const Kvf__Wire__Commit *)message);
        break;
    case KVF_FRAME_DONE:
        check_transfer(((const Kvf__Wire__Done *)message)->transfer);
        break;
    case KVF_FRAME_ABORT:
        check_transfer(((const Kvf__Wire__Abort *)message)->transfer);
        check_failure(((const Kvf__Wire__Abort *)message)->status,
                      ((const Kvf__Wire__Abort *)message)->message);
        break;
    case KVF_FRAME_DRAINED:
        check_transfer(((const Kvf__Wire__Drained *)message)->transfer);
        break;
    case KVF_FRAME_READY:
        check_transfer(((const Kvf__Wire__Ready *)message)->transfer);
        break;
    case KVF_FRAME_PULL:
        check_transfer(((const Kvf__Wire__Pull *)message)->transfer);
        break;
    case KVF_FRAME_JOIN:
        FUZZ_CHECK(((const Kvf__Wire__Join *)message)->invitation.len <= KVF_INVITATION_BYTES);
        break;
    case KVF_FRAME_JOINED:
        FUZZ_CHECK(((const Kvf__Wire__Joined *)message)->answer.len <= KVF_ANSWER_BYTES);
        break;
    case KVF_FRAME_LEAVE:
        FUZZ_CHECK(
            kvf_text_ok(((const Kvf__Wire__Leave *)message)->message, 0, KVF_SENTENCE_BYTES));
        break;
    case KVF_FRAME_FETCH:
        check_transfer(((const Kvf__Wire__Fetch *)message)->transfer);
        FUZZ_CHECK(((const Kvf__Wire__Fetch *)message)->n - 1 < KVF_FETCHED_AT_ONCE);
        break;
    case KVF_FRAME_BYE:
        FUZZ_CHECK(kvf_text_ok(((const Kvf__Wire__Bye *)message)->message, 0, KVF_SENTENCE_BYTES));
        break;
    default:
        FUZZ_CHECK(type == KVF_FRAME_HEARTBEAT);
        check_heartbeat((const Kvf__Wire__Heartbeat *)message);
    }
}

/*
 * Whether there are fields that this version does not know. protobuf-c keeps them, also one of
 * number 0 (as 80 00), which it then writes as 00 and does not read again.
 */
static bool has_unknown(const ProtobufCMessage *message) {
    bool unknown = message->n_unknown_fields > 0;
    for (unsigned i = 0; i < message->descriptor->n_fields && !unknown; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const uint8_t *at = (const uint8_t *)message;
        if (field->type != PROTOBUF_C_TYPE_MESSAGE) {
            continue;
        }
        const void *member = *(void *const *)(const void *)(at + field->offset);
        if (field->label != PROTOBUF_C_LABEL_REPEATED) {
            unknown = member != NULL && has_unknown(member);
            continue;
        }
        size_t n = *(const size_t *)(const void *)(at + field->quantifier_offset);
        for (size_t k = 0; k < n && !unknown; k++) {
            unknown = has_unknown(((ProtobufCMessage *const *)member)[k]);
        }
    }
    return unknown;
}

/* What was read, packed, is read and packed to the same bytes. */
static void check_round_trip(kvf_frame_type_t type, const ProtobufCMessage *message) {
    const kvf_alloc_t *alloc = kvf_alloc_default();
    uint8_t *first;
    uint8_t *second;
    size_t n_first;
    size_t n_second;
    ProtobufCMessage *again;
    FUZZ_CHECK(kvf_message_pack(alloc, type, message, UINT32_MAX, &first, &n_first) == KVF_OK);
    FUZZ_CHECK(kvf_message_unpack(alloc, type, first + KVF_FRAME_HEADER_BYTES,
                                  n_first - KVF_FRAME_HEADER_BYTES, &again, NULL) == KVF_OK);
    FUZZ_CHECK(kvf_message_pack(alloc, type, again, UINT32_MAX, &second, &n_second) == KVF_OK);
    FUZZ_CHECK(n_first == n_second && memcmp(first, second, n_first) == 0);
    kvf_message_free(alloc, again);
    kvf_free(alloc, second);
    kvf_free(alloc, first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 1) {
        return 0;
    }
    kvf_frame_type_t type = (kvf_frame_type_t)data[0];
    account_t account = {.table = {account_resize, &account}};
    ProtobufCMessage *message = NULL;
    kvf_status_t status =
        kvf_message_unpack(&account.table, type, data + 1, bytes - 1, &message, NULL);
    FUZZ_CHECK(account.asked <= 16 * bytes + 16384);
    if (status == KVF_OK) {
        check_promises(type, message);
        if (!has_unknown(message)) {
            check_round_trip(type, message);
        }
        kvf_message_free(&account.table, message);
    } else {
        FUZZ_CHECK(status == KVF_ERR_PROTOCOL && message == NULL);
    }
    FUZZ_CHECK(account.live == 0);
    return 0;
}
