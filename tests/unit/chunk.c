/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/chunk.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static const kvf_chunk_t chunk = {
    .transfer = {.receiver = {{0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa,
                               0xab, 0xac, 0xad, 0xae, 0xaf}},
                 .counter = 0x1122334455667788},
    .group_idx = 0x01020304,
    .slot = 0x05060708,
    .ordinal = 0x1a1b1c1d1e1f2021,
    .generation = 0x8182838485868788,
    .offset = 0x9192939495969798,
    .bytes = 0xf1f2f3f4f5f6f7f8,
    .grant_key = 0x6162636465666768,
};

static const uint8_t wire[KVF_CHUNK_HEADER_BYTES] = {
    'K',  'V',  'F',  'C',  'H',  'U',  'N',  'K',  /* magic */
    0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, /* receiver */
    0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf, /* */
    0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, /* counter */
    0x04, 0x03, 0x02, 0x01, 0x08, 0x07, 0x06, 0x05, /* group, slot */
    0x21, 0x20, 0x1f, 0x1e, 0x1d, 0x1c, 0x1b, 0x1a, /* ordinal */
    0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81, /* generation */
    0x98, 0x97, 0x96, 0x95, 0x94, 0x93, 0x92, 0x91, /* offset */
    0xf8, 0xf7, 0xf6, 0xf5, 0xf4, 0xf3, 0xf2, 0xf1, /* bytes */
    0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61, /* grant key */
};

/* Every field counts; the struct has no padding that would. */
static bool same(const kvf_chunk_t *a, const kvf_chunk_t *b) {
    return kvf_incarnation_equal(&a->transfer.receiver, &b->transfer.receiver) &&
           a->transfer.counter == b->transfer.counter && a->group_idx == b->group_idx &&
           a->slot == b->slot && a->ordinal == b->ordinal && a->generation == b->generation &&
           a->offset == b->offset && a->bytes == b->bytes && a->grant_key == b->grant_key;
}

Test(chunk, header_has_these_bytes) {
    uint8_t header[KVF_CHUNK_HEADER_BYTES];
    memset(header, 0x55, sizeof(header));
    kvf_chunk_encode(&chunk, header);
    cr_assert_arr_eq(header, wire, sizeof(wire));

    kvf_chunk_t read;
    cr_assert_eq(kvf_chunk_decode(wire, sizeof(wire), &read), KVF_OK);
    cr_assert(same(&read, &chunk));
}

Test(chunk, limits_of_slot_and_ordinal_pass) {
    const kvf_chunk_t edges[] = {
        {.slot = 0, .ordinal = 0},
        {.slot = INT32_MAX, .ordinal = INT64_MAX, .bytes = UINT64_MAX, .offset = UINT64_MAX},
    };
    for (size_t i = 0; i < 2; i++) {
        uint8_t header[KVF_CHUNK_HEADER_BYTES];
        kvf_chunk_encode(&edges[i], header);
        kvf_chunk_t read;
        cr_assert_eq(kvf_chunk_decode(header, sizeof(header), &read), KVF_OK);
        cr_assert(same(&read, &edges[i]));
    }
}

Test(chunk, any_other_length_is_refused_unread) {
    for (size_t bytes = 0; bytes <= 2 * sizeof(wire); bytes++) {
        if (bytes == sizeof(wire)) {
            continue;
        }
        /* Exactly as long as said, so that a sanitizer sees a read past it. */
        uint8_t *header = malloc(bytes + 1);
        memset(header, 0, bytes + 1);
        memcpy(header, wire, bytes < sizeof(wire) ? bytes : sizeof(wire));
        kvf_chunk_t read = chunk;
        cr_assert_eq(kvf_chunk_decode(header, bytes, &read), KVF_ERR_PROTOCOL, "%zu", bytes);
        cr_assert(same(&read, &chunk), "written on error");
        free(header);
    }
}

/* Magic and the two signs may not change; any other bit changes the chunk. */
Test(chunk, every_flipped_bit_is_refused_or_seen) {
    for (size_t bit = 0; bit < 8 * sizeof(wire); bit++) {
        uint8_t header[sizeof(wire)];
        memcpy(header, wire, sizeof(wire));
        header[bit / 8] ^= (uint8_t)(1U << bit % 8);
        bool refused = bit < 8 * 8 || bit == 8 * 40 - 1 || bit == 8 * 48 - 1;
        kvf_chunk_t read = chunk;
        cr_assert_eq(kvf_chunk_decode(header, sizeof(header), &read),
                     refused ? KVF_ERR_PROTOCOL : KVF_OK, "bit %zu", bit);
        cr_assert_eq(same(&read, &chunk), refused, "bit %zu", bit);
        if (!refused) {
            uint8_t again[sizeof(wire)];
            kvf_chunk_encode(&read, again);
            cr_assert_arr_eq(again, header, sizeof(header));
        }
    }
}
