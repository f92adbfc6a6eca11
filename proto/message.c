/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/message.h"

#include "kvmgr/base/size.h"
#include "proto/ticket.h"

#include <assert.h>

/* Memory that one message may take: the worst honest one, a heartbeat that renews many leases of
 * small numbers, needs 8 bytes per byte on the wire; and what few fixed parts need. */
#define UNPACK_FACTOR 16
#define UNPACK_EXTRA_BYTES (16U << 10)
/* What an allocation costs besides its bytes. */
#define ALLOC_COST_BYTES 16

/* ---- checks: each function names the first field that is wrong, or returns NULL ---- */

/* The checks may repair what they are given: that is what "cut" means for messages. */
typedef const char *(*check_fn)(ProtobufCMessage *message);

static bool transfer_ok(const Kvf__Wire__TransferId *id) {
    return id != NULL && id->incarnation.len == KVF_INCARNATION_BYTES;
}

static bool failure_ok(int32_t status) {
    switch (status) {
#define STATUS_CASE(code, name, scope, text, help)                                                 \
    case code:                                                                                     \
        return (code) != KVF_OK;
        KVF_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    default:
        return false;
    }
}

static bool tokens_ok(int64_t tokens) {
    return tokens >= 0 && tokens <= KVF_MAX_TOKENS;
}

static bool ordinals_ok(const uint64_t *ordinals, size_t n) {
    uint64_t all = 0;
    for (size_t i = 0; i < n; i++) {
        all |= ordinals[i];
    }
    /* The limit is a power of two, so the union of the bits tells. */
    return all < (uint64_t)KVF_MAX_TOKENS;
}

static bool slots_ok(const uint32_t *slots, size_t n) {
    uint32_t all = 0;
    for (size_t i = 0; i < n; i++) {
        all |= slots[i];
    }
    return all <= INT32_MAX;
}

/* Sentences end in logs and answers to clients, so they are made harmless instead of refused. */
static void cut_sentence(char *text) {
    for (size_t i = 0; text[i] != '\0'; i++) {
        if (i == KVF_SENTENCE_BYTES) {
            text[i] = '\0';
            return;
        }
        if (!kvf_byte_printable(text[i])) {
            text[i] = '?';
        }
    }
}

static const char *check_refuse(ProtobufCMessage *message) {
    Kvf__Wire__Refuse *refuse = (Kvf__Wire__Refuse *)message;
    cut_sentence(refuse->message);
    return failure_ok(refuse->status) ? NULL : "status";
}

static const char *check_heartbeat(ProtobufCMessage *message) {
    const Kvf__Wire__Heartbeat *beat = (Kvf__Wire__Heartbeat *)message;
    if (beat->n_renewed > KVF_RENEWED_PER_BEAT) {
        return "renewed";
    }
    for (size_t i = 1; i < beat->n_renewed; i++) {
        if (beat->renewed[i] >= beat->renewed[i - 1]) {
            return "renewed";
        }
    }
    return NULL;
}

static const char *check_recv_request(ProtobufCMessage *message) {
    const Kvf__Wire__RecvRequest *request = (Kvf__Wire__RecvRequest *)message;
    if (!transfer_ok(request->transfer)) {
        return "transfer";
    }
    if (request->ticket.len > KVF_TICKET_MAX_BYTES) {
        return "ticket";
    }
    if (!kvf_text_ok(request->request_id, 0, KVF_TEXT_BYTES)) {
        return "request_id";
    }
    if (!tokens_ok(request->prompt_len)) {
        return "prompt_len";
    }
    if (!tokens_ok(request->total_input_len_cp)) {
        return "total_input_len_cp";
    }
    if (!tokens_ok(request->draft_len)) {
        return "draft_len";
    }
    if (!tokens_ok(request->cached_tokens)) {
        return "cached_tokens";
    }
    if (!kvf_text_ok(request->mover, 0, KVF_TEXT_BYTES)) {
        return "mover";
    }
    if (request->n_grants > KVF_MAX_GROUPS) {
        return "grants";
    }
    for (size_t i = 0; i < request->n_grants; i++) {
        const Kvf__Wire__Grant *grant = request->grants[i];
        if (grant->group_idx >= KVF_MAX_GROUPS) {
            return "grants.group_idx";
        }
        if (grant->n_slots != grant->n_ordinals || grant->n_generations != grant->n_ordinals) {
            return "grants: arrays of different lengths";
        }
        if (!ordinals_ok(grant->ordinals, grant->n_ordinals)) {
            return "grants.ordinals";
        }
        if (!slots_ok(grant->slots, grant->n_slots)) {
            return "grants.slots";
        }
    }
    return NULL;
}

static const char *check_commit(ProtobufCMessage *message) {
    const Kvf__Wire__Commit *commit = (Kvf__Wire__Commit *)message;
    if (!transfer_ok(commit->transfer)) {
        return "transfer";
    }
    for (size_t i = 0; i < commit->n_ranges; i++) {
        const Kvf__Wire__CommitRange *range = commit->ranges[i];
        if (range->group_idx >= KVF_MAX_GROUPS) {
            return "ranges.group_idx";
        }
        if (range->layer_first_idx >= range->layer_end_idx) {
            return "ranges.layer_first_idx";
        }
        if (range->layer_end_idx > KVF_MAX_GROUP_LAYERS) {
            return "ranges.layer_end_idx";
        }
        if (range->n_generations != range->n_ordinals ||
            (range->n_digests != 0 && range->n_digests != range->n_ordinals) ||
            (range->n_slots != 0 && range->n_slots != range->n_ordinals)) {
            return "ranges: arrays of different lengths";
        }
        if (!slots_ok(range->slots, range->n_slots)) {
            return "ranges.slots";
        }
        if (!ordinals_ok(range->ordinals, range->n_ordinals)) {
            return "ranges.ordinals";
        }
    }
    return NULL;
}

static const char *check_done(ProtobufCMessage *message) {
    return transfer_ok(((Kvf__Wire__Done *)message)->transfer) ? NULL : "transfer";
}

static const char *check_abort(ProtobufCMessage *message) {
    Kvf__Wire__Abort *abort = (Kvf__Wire__Abort *)message;
    cut_sentence(abort->message);
    if (!transfer_ok(abort->transfer)) {
        return "transfer";
    }
    return failure_ok(abort->status) ? NULL : "status";
}

static const char *check_drained(ProtobufCMessage *message) {
    return transfer_ok(((Kvf__Wire__Drained *)message)->transfer) ? NULL : "transfer";
}

static const char *check_ready(ProtobufCMessage *message) {
    return transfer_ok(((Kvf__Wire__Ready *)message)->transfer) ? NULL : "transfer";
}

static const char *check_pull(ProtobufCMessage *message) {
    return transfer_ok(((Kvf__Wire__Pull *)message)->transfer) ? NULL : "transfer";
}

static const char *check_join(ProtobufCMessage *message) {
    return ((Kvf__Wire__Join *)message)->invitation.len > KVF_INVITATION_BYTES ? "invitation"
                                                                               : NULL;
}

static const char *check_joined(ProtobufCMessage *message) {
    return ((Kvf__Wire__Joined *)message)->answer.len > KVF_ANSWER_BYTES ? "answer" : NULL;
}

static const char *check_leave(ProtobufCMessage *message) {
    cut_sentence(((Kvf__Wire__Leave *)message)->message);
    return NULL;
}

static const char *check_fetch(ProtobufCMessage *message) {
    const Kvf__Wire__Fetch *fetch = (Kvf__Wire__Fetch *)message;
    if (!transfer_ok(fetch->transfer)) {
        return "transfer";
    }
    return fetch->n == 0 || fetch->n > KVF_FETCHED_AT_ONCE ? "n" : NULL;
}

static const char *check_bye(ProtobufCMessage *message) {
    cut_sentence(((Kvf__Wire__Bye *)message)->message);
    return NULL;
}

/* By frame type. A hello has no check here: only kvf_hello_unpack() may let one in. */
static const struct {
    const ProtobufCMessageDescriptor *descriptor;
    check_fn check;
} messages[] = {
    [KVF_FRAME_HELLO] = {&kvf__wire__hello__descriptor, NULL},
    [KVF_FRAME_REFUSE] = {&kvf__wire__refuse__descriptor, check_refuse},
    [KVF_FRAME_HEARTBEAT] = {&kvf__wire__heartbeat__descriptor, check_heartbeat},
    [KVF_FRAME_RECV_REQUEST] = {&kvf__wire__recv_request__descriptor, check_recv_request},
    [KVF_FRAME_COMMIT] = {&kvf__wire__commit__descriptor, check_commit},
    [KVF_FRAME_DONE] = {&kvf__wire__done__descriptor, check_done},
    [KVF_FRAME_ABORT] = {&kvf__wire__abort__descriptor, check_abort},
    [KVF_FRAME_DRAINED] = {&kvf__wire__drained__descriptor, check_drained},
    [KVF_FRAME_BYE] = {&kvf__wire__bye__descriptor, check_bye},
    [KVF_FRAME_READY] = {&kvf__wire__ready__descriptor, check_ready},
    [KVF_FRAME_PULL] = {&kvf__wire__pull__descriptor, check_pull},
    [KVF_FRAME_JOIN] = {&kvf__wire__join__descriptor, check_join},
    [KVF_FRAME_LEAVE] = {&kvf__wire__leave__descriptor, check_leave},
    [KVF_FRAME_FETCH] = {&kvf__wire__fetch__descriptor, check_fetch},
    [KVF_FRAME_JOINED] = {&kvf__wire__joined__descriptor, check_joined},
};

/* ---- packing ---- */

kvf_status_t kvf_message_pack(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                              const ProtobufCMessage *message, uint64_t cap_bytes,
                              uint8_t **frame_p, size_t *bytes_p) {
    assert(message->descriptor == messages[type].descriptor);
    size_t payload_bytes = protobuf_c_message_get_packed_size(message);
    if (payload_bytes > cap_bytes || payload_bytes > UINT32_MAX) {
        return KVF_ERR_TOO_LARGE;
    }
    uint8_t *frame = kvf_alloc(alloc, KVF_FRAME_HEADER_BYTES + payload_bytes);
    if (frame == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_frame_header(type, (uint32_t)payload_bytes, frame);
    (void)protobuf_c_message_pack(message, frame + KVF_FRAME_HEADER_BYTES);
    *frame_p = frame;
    *bytes_p = KVF_FRAME_HEADER_BYTES + payload_bytes;
    return KVF_OK;
}

/* ---- unpacking ---- */

typedef struct limiter {
    const kvf_alloc_t *alloc;
    uint64_t left_bytes;
    bool spent;     /* the message wanted more than it may have */
    bool no_memory; /* alloc had none */
} limiter_t;

static void *limiter_alloc(void *ctx, size_t size) {
    limiter_t *limiter = ctx;
    if (size > limiter->left_bytes || ALLOC_COST_BYTES > limiter->left_bytes - size) {
        limiter->spent = true;
        return NULL;
    }
    limiter->left_bytes -= size + ALLOC_COST_BYTES;
    /* protobuf-c takes NULL for a failure, also of no bytes. */
    void *ptr = kvf_alloc(limiter->alloc, size == 0 ? 1 : size);
    limiter->no_memory |= ptr == NULL;
    return ptr;
}

/* Not given back to the budget: what matters is the work that a message causes. */
static void limiter_free(void *ctx, void *ptr) {
    kvf_free(((limiter_t *)ctx)->alloc, ptr);
}

kvf_status_t kvf_message_decode(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                                const uint8_t *payload, size_t bytes, ProtobufCMessage **message_p,
                                kvf_detail_t *detail) {
    uint64_t budget;
    if (kvf_mul_u64(bytes, UNPACK_FACTOR, &budget) != KVF_OK ||
        kvf_add_u64(budget, UNPACK_EXTRA_BYTES, &budget) != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "%s: too long", kvf_frame_type_name(type));
    }
    limiter_t limiter = {.alloc = alloc, .left_bytes = budget};
    ProtobufCAllocator table = {limiter_alloc, limiter_free, &limiter};
    ProtobufCMessage *message =
        protobuf_c_message_unpack(messages[type].descriptor, &table, bytes, payload);
    if (message != NULL) {
        *message_p = message;
        return KVF_OK;
    }
    if (limiter.no_memory) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "%s: no memory to unpack %zu bytes",
                        kvf_frame_type_name(type), bytes);
    }
    if (limiter.spent) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "%s: %zu bytes swell to more than %llu",
                        kvf_frame_type_name(type), bytes, (unsigned long long)budget);
    }
    return kvf_fail(detail, KVF_ERR_PROTOCOL, "%s: %zu bytes that are no such message",
                    kvf_frame_type_name(type), bytes);
}

kvf_status_t kvf_message_unpack(const kvf_alloc_t *alloc, kvf_frame_type_t type,
                                const uint8_t *payload, size_t bytes, ProtobufCMessage **message_p,
                                kvf_detail_t *detail) {
    if ((size_t)type >= sizeof(messages) / sizeof(messages[0]) || messages[type].check == NULL) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "frame of type %s at the wrong time",
                        kvf_frame_type_name(type));
    }
    ProtobufCMessage *message;
    kvf_status_t status = kvf_message_decode(alloc, type, payload, bytes, &message, detail);
    if (status != KVF_OK) {
        return status;
    }
    const char *wrong = messages[type].check(message);
    if (wrong != NULL) {
        kvf_message_free(alloc, message);
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "%s: wrong field %s", kvf_frame_type_name(type),
                        wrong);
    }
    *message_p = message;
    return KVF_OK;
}

void kvf_message_free(const kvf_alloc_t *alloc, ProtobufCMessage *message) {
    limiter_t limiter = {.alloc = alloc};
    ProtobufCAllocator table = {limiter_alloc, limiter_free, &limiter};
    protobuf_c_message_free_unpacked(message, &table);
}

kvf_transfer_id_t kvf_transfer_id_read(const Kvf__Wire__TransferId *wire) {
    kvf_transfer_id_t id = {.counter = wire->counter};
    memcpy(id.receiver.bytes, wire->incarnation.data, KVF_INCARNATION_BYTES);
    return id;
}

void kvf_transfer_id_write(const kvf_transfer_id_t *id, Kvf__Wire__TransferId *wire) {
    kvf__wire__transfer_id__init(wire);
    /* Only read when packed; the generated struct knows no const. */
    wire->incarnation.data = (uint8_t *)(uintptr_t)id->receiver.bytes;
    wire->incarnation.len = KVF_INCARNATION_BYTES;
    wire->counter = id->counter;
}
