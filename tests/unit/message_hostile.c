/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that no honest peer sends, and allocations that fail. */
#include "../support/messages.h"

Test(message_hostile, hello_and_unknown_types_are_refused) {
    const int types[] = {-1, 0, KVF_FRAME_HELLO, KVF_FRAME_TYPES_END, 0x7fff};
    for (size_t i = 0; i < 5; i++) {
        cr_assert_eq(unpack_and_free((kvf_frame_type_t)types[i], (const uint8_t *)"", 0, NULL),
                     KVF_ERR_PROTOCOL);
    }
}

/* Protobuf has no end mark: what ends between two fields is a shorter message. All else is refused.
 */
Test(message_hostile, a_message_cut_anywhere_is_refused_or_lacks_fields) {
    /* Ends of fields before the last, repeated ones counted one by one, with all that there must
     * be. */
    static const size_t shorter[KVF_FRAME_TYPES_END] = {
        [KVF_FRAME_REFUSE] = 1,
        [KVF_FRAME_HEARTBEAT] = 3,
        [KVF_FRAME_RECV_REQUEST] = 12 + KVF_MAX_GROUPS,
        [KVF_FRAME_COMMIT] = 2,
        [KVF_FRAME_ABORT] = 1,
        [KVF_FRAME_BYE] = 1,
        [KVF_FRAME_READY] = 1,
        [KVF_FRAME_PULL] = 1,
        [KVF_FRAME_JOIN] = 2,
        [KVF_FRAME_LEAVE] = 3,
        [KVF_FRAME_JOINED] = 2,
    };
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
        cr_assert_eq(passed, shorter[type], "type %d: %zu", type, passed);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(message_hostile, every_flipped_bit_is_read_safely) {
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

Test(message_hostile, random_bytes_are_read_safely) {
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

/* @return Bytes that were taken to refuse n of them. */
static size_t swell(kvf_frame_type_t type, const uint8_t *unit, size_t unit_bytes, size_t n) {
    uint8_t *payload = malloc(unit_bytes * n);
    for (size_t i = 0; i < n; i++) {
        memcpy(payload + i * unit_bytes, unit, unit_bytes);
    }
    size_t taken = 0;
    const kvf_alloc_t alloc = {sum_resize, &taken};
    ProtobufCMessage *message;
    kvf_detail_t detail = {""};
    kvf_status_t status =
        kvf_message_unpack(&alloc, type, payload, unit_bytes * n, &message, &detail);
    cr_assert_eq(status, KVF_ERR_PROTOCOL);
    free(payload);
    cr_assert_not_null(strstr(detail.text, "swell"), "%s", detail.text);
    return taken;
}

Test(message_hostile, what_swells_is_stopped_at_a_small_multiple) {
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
        size_t taken = swell(cases[i].type, cases[i].unit, cases[i].bytes, n);
        cr_assert_leq(taken, 16 * cases[i].bytes * n + 16384, "case %zu", i);
    }
}

/* What an honest sender may send is far from the limit: the worst is one range for each block. */
Test(message_hostile, honest_messages_do_not_hit_the_limit) {
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

Test(message_hostile, every_failed_allocation_is_reported_and_leaks_nothing) {
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
