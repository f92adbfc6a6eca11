/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/hello.h"

#include "kvmgr/base/mem.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t key[32] = "a secret of thirty-two bytes ...";

/* ---- preamble ---- */

static kvf_preamble_t make_preamble(bool initiator) {
    kvf_preamble_t preamble = {.major = 1, .minor = 0x0203, .initiator = initiator};
    for (size_t i = 0; i < KVF_NONCE_BYTES; i++) {
        preamble.nonce[i] = (uint8_t)(0x40 + i + (initiator ? 0x80 : 0));
    }
    return preamble;
}

Test(hello, preamble_has_these_bytes) {
    uint8_t wire[KVF_PREAMBLE_BYTES] = {'K', 'V', 'F', 'E', 'R', 'R', 'Y', 0, 1, 0, 3, 2, 1};
    for (size_t i = 0; i < 32; i++) {
        wire[16 + i] = (uint8_t)(0xc0 + i);
    }
    kvf_preamble_t preamble = make_preamble(true);
    uint8_t bytes[KVF_PREAMBLE_BYTES];
    memset(bytes, 0x55, sizeof(bytes));
    kvf_preamble_encode(&preamble, bytes);
    cr_assert_arr_eq(bytes, wire, sizeof(wire));

    kvf_preamble_t read;
    cr_assert_eq(kvf_preamble_decode(wire, &read, NULL), KVF_OK);
    cr_assert_eq(read.major, 1);
    cr_assert_eq(read.minor, 0x0203);
    cr_assert(read.initiator);
    cr_assert_arr_eq(read.nonce, wire + 16, KVF_NONCE_BYTES);
}

/* Bytes: magic 0..7, major 8..9, minor 10..11, role 12, reserved 13..15, nonce. */
Test(hello, every_flipped_bit_of_a_preamble_is_refused_or_seen) {
    for (size_t bit = 0; bit < 8 * KVF_PREAMBLE_BYTES; bit++) {
        kvf_preamble_t preamble = make_preamble(false);
        uint8_t bytes[KVF_PREAMBLE_BYTES];
        kvf_preamble_encode(&preamble, bytes);
        bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
        kvf_status_t want = KVF_OK;
        if (bit / 8 < 8 || (bit / 8 >= 12 && bit / 8 < 16 && bit != 8 * 12)) {
            want = KVF_ERR_PROTOCOL;
        } else if (bit / 8 < 10) {
            want = KVF_ERR_INCOMPATIBLE;
        }
        kvf_preamble_t read = {.major = 77};
        cr_assert_eq(kvf_preamble_decode(bytes, &read, NULL), want, "bit %zu", bit);
        if (want == KVF_OK) {
            uint8_t again[KVF_PREAMBLE_BYTES];
            kvf_preamble_encode(&read, again);
            cr_assert_arr_eq(again, bytes, sizeof(bytes));
        } else {
            cr_assert_eq(read.major, 77, "written on error");
        }
    }
}

Test(hello, another_major_version_is_named) {
    kvf_preamble_t preamble = make_preamble(true);
    preamble.major = 9;
    preamble.minor = 4;
    uint8_t bytes[KVF_PREAMBLE_BYTES];
    kvf_preamble_encode(&preamble, bytes);
    kvf_preamble_t read;
    kvf_detail_t detail;
    cr_assert_eq(kvf_preamble_decode(bytes, &read, &detail), KVF_ERR_INCOMPATIBLE);
    cr_assert_not_null(strstr(detail.text, "1.0 here, 9.4 there"), "%s", detail.text);
}

/* ---- hello ---- */

typedef struct fixture {
    uint8_t initiator[KVF_PREAMBLE_BYTES];
    uint8_t responder[KVF_PREAMBLE_BYTES];
    kvf_hello_binding_t binding;
    kvf_layout_t layout;
    Kvf__Wire__Hello hello;
    Kvf__Wire__LayerGroup groups[KVF_MAX_GROUPS + 1];
    Kvf__Wire__LayerGroup *group_list[KVF_MAX_GROUPS + 1];
    Kvf__Wire__Region regions[KVF_MAX_GROUPS + 1];
    Kvf__Wire__Region *region_list[KVF_MAX_GROUPS + 1];
    Kvf__Wire__Mover movers[KVF_HELLO_MAX_MOVERS + 1];
    Kvf__Wire__Mover *mover_list[KVF_HELLO_MAX_MOVERS + 1];
    uint8_t incarnation[17];
    uint8_t address[300];
    char text[200];
    uint32_t layers[KVF_MAX_GROUP_LAYERS + 1];
} fixture_t;

static fixture_t *make_fixture(void) {
    fixture_t *f = calloc(1, sizeof(*f));
    kvf_preamble_t preamble = make_preamble(true);
    kvf_preamble_encode(&preamble, f->initiator);
    preamble = make_preamble(false);
    kvf_preamble_encode(&preamble, f->responder);
    f->binding = (kvf_hello_binding_t){f->initiator, f->responder, true};

    f->layout.n_groups = 2;
    for (uint32_t g = 0; g < 2; g++) {
        kvf_layer_group_t *group = &f->layout.groups[g];
        (void)snprintf(group->name, sizeof(group->name), "%s", g == 0 ? "full" : "sliding");
        group->n_layers = 3 - g;
        for (uint32_t i = 0; i < group->n_layers; i++) {
            group->layers[i] = 2 * i + g + 1;
        }
        group->window = g == 0 ? 0 : 512;
        group->sinks = g == 0 ? 0 : 4;
        group->tokens_per_block = 32 + g;
        group->kv_heads = 2 + g;
        group->head_dim = 256;
        group->kv_factor = 2 - g;
        group->dtype = g == 0 ? KVF_DTYPE_BF16 : KVF_DTYPE_F8_E4M3;
        group->order = g == 0 ? KVF_ORDER_HND : KVF_ORDER_NHD;
        group->kind = KVF_GROUP_PAGED;
        group->role = g == 0 ? KVF_GROUP_TARGET : KVF_GROUP_DRAFT;
    }
    kvf_layout_to_wire(&f->layout, f->groups);

    memset(f->incarnation, 0xa5, sizeof(f->incarnation));
    memset(f->address, 0x5a, sizeof(f->address));
    memset(f->text, 'x', sizeof(f->text) - 1);
    for (uint32_t i = 0; i <= KVF_MAX_GROUP_LAYERS; i++) {
        f->layers[i] = i;
    }
    for (uint32_t i = 0; i <= KVF_MAX_GROUPS; i++) {
        f->group_list[i] = &f->groups[i < 2 ? i : 1];
        kvf__wire__region__init(&f->regions[i]);
        f->regions[i].group_idx = i % 2;
        f->regions[i].memory = KVF_MEM_SHM;
        f->regions[i].page_bytes = 65536;
        f->regions[i].n_pages = 1000 + i;
        f->region_list[i] = &f->regions[i];
    }
    for (size_t i = 0; i <= KVF_HELLO_MAX_MOVERS; i++) {
        kvf__wire__mover__init(&f->movers[i]);
        f->movers[i].name = f->text + sizeof(f->text) - 1 - 128;
        f->movers[i].address = (ProtobufCBinaryData){sizeof(f->address), f->address};
        f->mover_list[i] = &f->movers[i];
    }
    kvf__wire__hello__init(&f->hello);
    f->hello.instance = f->hello.control_address = f->hello.version = f->movers[0].name;
    f->hello.incarnation = (ProtobufCBinaryData){16, f->incarnation};
    f->hello.wanted = (ProtobufCBinaryData){16, f->incarnation};
    f->hello.n_groups = 2;
    f->hello.groups = f->group_list;
    f->hello.n_regions = 2;
    f->hello.regions = f->region_list;
    f->hello.n_movers = 2;
    f->hello.movers = f->mover_list;
    f->hello.heartbeat_us = 250000;
    f->hello.lost_us = 2000000;
    f->hello.frame_bytes = 16 << 20;
    f->hello.tp_size = f->hello.pp_size = f->hello.cp_size = 1;
    return f;
}

static uint8_t *pack(const fixture_t *f, size_t *payload_bytes_p) {
    uint8_t *frame;
    size_t bytes;
    cr_assert_eq(kvf_hello_pack(kvf_alloc_default(), key, &f->binding, &f->hello, &frame, &bytes),
                 KVF_OK);
    const uint8_t header[] = {'K', 'V', 'F', 'R', 1, 0, 0, 0};
    cr_assert_arr_eq(frame, header, sizeof(header));
    *payload_bytes_p = bytes - KVF_FRAME_HEADER_BYTES;
    cr_assert_eq(frame[8] + 256U * frame[9] + 65536U * frame[10], *payload_bytes_p);
    cr_assert_eq(frame[11], 0);
    return frame;
}

static kvf_status_t unpack_and_free(const uint8_t payload_key[32],
                                    const kvf_hello_binding_t *binding, const uint8_t *payload,
                                    size_t bytes, kvf_detail_t *detail) {
    kvf_alloc_fail_t count;
    kvf_alloc_fail_init(&count, 0);
    Kvf__Wire__Hello *hello = NULL;
    kvf_status_t status =
        kvf_hello_unpack(&count.table, payload_key, binding, payload, bytes, &hello, detail);
    cr_assert_eq(hello != NULL, status == KVF_OK);
    if (hello != NULL) {
        kvf_message_free(&count.table, &hello->base);
    }
    cr_assert_eq(count.live, 0, "leak");
    /* Nothing is decoded, so nothing is allocated, for who does not know the key. */
    cr_assert(status != KVF_ERR_PEER_REFUSED || count.calls == 0);
    return status;
}

Test(hello, comes_back_as_it_went) {
    fixture_t *f = make_fixture();
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    Kvf__Wire__Hello *hello;
    cr_assert_eq(kvf_hello_unpack(kvf_alloc_default(), key, &f->binding,
                                  frame + KVF_FRAME_HEADER_BYTES, bytes, &hello, NULL),
                 KVF_OK);
    uint8_t *want = malloc(bytes);
    uint8_t *got = malloc(bytes);
    size_t n = kvf__wire__hello__pack(&f->hello, want);
    cr_assert_eq(n, bytes - KVF_MAC_BYTES);
    cr_assert_eq(kvf__wire__hello__pack(hello, got), n);
    cr_assert_arr_eq(got, want, n);
    cr_assert_arr_eq(frame + KVF_FRAME_HEADER_BYTES + KVF_MAC_BYTES, want, n);
    kvf_message_free(kvf_alloc_default(), &hello->base);
    free(got);
    free(want);
    kvf_free(kvf_alloc_default(), frame);
    free(f);
}

/* The code by hand: label with its zero, both preambles, the message. */
Test(hello, mac_covers_label_preambles_and_message) {
    fixture_t *f = make_fixture();
    for (int side = 0; side < 2; side++) {
        f->binding.from_initiator = side == 0;
        size_t bytes;
        uint8_t *frame = pack(f, &bytes);
        size_t n_hello = bytes - KVF_MAC_BYTES;
        size_t n = 24 + 48 + 48 + n_hello;
        uint8_t *all = malloc(n);
        memcpy(all, side == 0 ? "kvferry hello initiator" : "kvferry hello responder", 24);
        memcpy(all + 24, f->initiator, 48);
        memcpy(all + 72, f->responder, 48);
        (void)kvf__wire__hello__pack(&f->hello, all + 120);
        uint8_t mac[KVF_MAC_BYTES];
        cr_assert_eq(kvf_mac(key, &(kvf_bytes_t){all, n}, 1, mac), KVF_OK);
        cr_assert_arr_eq(frame + KVF_FRAME_HEADER_BYTES, mac, KVF_MAC_BYTES);
        free(all);
        kvf_free(kvf_alloc_default(), frame);
    }
    free(f);
}

Test(hello, every_flipped_bit_of_hello_preambles_and_key_is_refused) {
    fixture_t *f = make_fixture();
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    uint8_t *payload = frame + KVF_FRAME_HEADER_BYTES;
    uint8_t other_key[32];
    memcpy(other_key, key, sizeof(key));
    const struct {
        uint8_t *at;
        size_t bytes;
    } parts[] = {{payload, bytes},
                 {f->initiator, KVF_PREAMBLE_BYTES},
                 {f->responder, KVF_PREAMBLE_BYTES},
                 {other_key, sizeof(other_key)}};
    for (size_t p = 0; p < 4; p++) {
        for (size_t bit = 0; bit < 8 * parts[p].bytes; bit++) {
            parts[p].at[bit / 8] ^= (uint8_t)(1U << bit % 8);
            cr_assert_eq(unpack_and_free(other_key, &f->binding, payload, bytes, NULL),
                         KVF_ERR_PEER_REFUSED, "part %zu, bit %zu", p, bit);
            parts[p].at[bit / 8] ^= (uint8_t)(1U << bit % 8);
        }
    }
    cr_assert_eq(unpack_and_free(other_key, &f->binding, payload, bytes, NULL), KVF_OK);
    kvf_free(kvf_alloc_default(), frame);
    free(f);
}

Test(hello, neither_reflection_nor_swapped_preambles_pass) {
    fixture_t *f = make_fixture();
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    const uint8_t *payload = frame + KVF_FRAME_HEADER_BYTES;
    const kvf_hello_binding_t reflected = {f->initiator, f->responder, false};
    const kvf_hello_binding_t swapped = {f->responder, f->initiator, true};
    const kvf_hello_binding_t both = {f->responder, f->initiator, false};
    kvf_detail_t detail = {""};
    cr_assert_eq(unpack_and_free(key, &reflected, payload, bytes, &detail), KVF_ERR_PEER_REFUSED);
    cr_assert_not_null(strstr(detail.text, "cluster key"), "%s", detail.text);
    cr_assert_eq(unpack_and_free(key, &swapped, payload, bytes, NULL), KVF_ERR_PEER_REFUSED);
    cr_assert_eq(unpack_and_free(key, &both, payload, bytes, NULL), KVF_ERR_PEER_REFUSED);
    kvf_free(kvf_alloc_default(), frame);
    free(f);
}

Test(hello, a_hello_cut_anywhere_is_refused) {
    fixture_t *f = make_fixture();
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    for (size_t n = 0; n < bytes; n++) {
        uint8_t *exact = malloc(n + 1);
        memcpy(exact, frame + KVF_FRAME_HEADER_BYTES, n);
        cr_assert_eq(unpack_and_free(key, &f->binding, exact, n, NULL),
                     n < KVF_MAC_BYTES ? KVF_ERR_PROTOCOL : KVF_ERR_PEER_REFUSED, "%zu bytes", n);
        free(exact);
    }
    kvf_free(kvf_alloc_default(), frame);
    free(f);
}

Test(hello, what_is_no_message_is_refused_even_with_the_key) {
    fixture_t *f = make_fixture();
    srand(3);
    for (int round = 0; round < 20000; round++) {
        uint8_t payload[KVF_MAC_BYTES + 48];
        size_t n = (size_t)rand() % 49;
        for (size_t i = 0; i < n; i++) {
            payload[KVF_MAC_BYTES + i] = (uint8_t)rand();
        }
        const kvf_bytes_t parts[] = {{"kvferry hello initiator", 24},
                                     {f->initiator, 48},
                                     {f->responder, 48},
                                     {payload + KVF_MAC_BYTES, n}};
        cr_assert_eq(kvf_mac(key, parts, 4, payload), KVF_OK);
        cr_assert_eq(unpack_and_free(key, &f->binding, payload, KVF_MAC_BYTES + n, NULL),
                     KVF_ERR_PROTOCOL);
    }
    free(f);
}

static void expect(const fixture_t *f, const char *wrong) {
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    kvf_detail_t detail = {""};
    kvf_status_t status =
        unpack_and_free(key, &f->binding, frame + KVF_FRAME_HEADER_BYTES, bytes, &detail);
    if (wrong == NULL) {
        cr_assert_eq(status, KVF_OK, "%s", detail.text);
    } else {
        char text[64];
        (void)snprintf(text, sizeof(text), "hello: wrong field %s", wrong);
        cr_assert_eq(status, KVF_ERR_PROTOCOL, "%s passed", text);
        cr_assert_str_eq(detail.text, text);
    }
    kvf_free(kvf_alloc_default(), frame);
}

#define SPOIL(field, statement)                                                                    \
    do {                                                                                           \
        fixture_t *f = make_fixture();                                                             \
        expect(f, NULL);                                                                           \
        statement;                                                                                 \
        expect(f, field);                                                                          \
        free(f);                                                                                   \
    } while (0)

Test(hello, is_checked_field_by_field) {
    char odd[] = "esc\x1b[2J";
    char none[] = "";
    char name[] = "a name of exactly thirty-two ...";
    SPOIL("instance", f->hello.instance--);
    SPOIL("instance", f->hello.instance = none);
    SPOIL("instance", f->hello.instance = odd);
    SPOIL("control_address", f->hello.control_address--);
    SPOIL("control_address", f->hello.control_address = none);
    SPOIL("control_address", f->hello.control_address = odd);
    SPOIL("version", f->hello.version--);
    SPOIL("version", f->hello.version = none);
    SPOIL("version", f->hello.version = odd);
    SPOIL("incarnation", f->hello.incarnation.len = 15);
    SPOIL("incarnation", f->hello.incarnation.len = 17);
    SPOIL("wanted", f->hello.wanted.len = 0);
    SPOIL("wanted", f->hello.wanted.len = 17);
    SPOIL("groups", f->hello.n_groups = 0);
    SPOIL("groups", f->hello.n_groups = KVF_MAX_GROUPS + 1);
    SPOIL(NULL, f->hello.n_groups = KVF_MAX_GROUPS);
    SPOIL("groups.name", f->groups[1].name = none);
    SPOIL("groups.name", f->groups[1].name = odd);
    SPOIL("groups.name", f->groups[1].name = name);
    SPOIL(NULL, f->groups[1].name = name + 1);
    SPOIL("groups.layers", f->groups[1].n_layers = 0);
    SPOIL("groups.layers", f->groups[1].n_layers = KVF_MAX_GROUP_LAYERS + 1;
          f->groups[1].layers = f->layers);
    SPOIL(NULL, f->groups[1].n_layers = KVF_MAX_GROUP_LAYERS; f->groups[1].layers = f->layers);
    SPOIL("regions", f->hello.n_regions = KVF_MAX_GROUPS + 1);
    SPOIL(NULL, f->hello.n_regions = KVF_MAX_GROUPS);
    SPOIL(NULL, f->hello.n_regions = 0);
    SPOIL("regions.group_idx", f->regions[1].group_idx = 2);
    SPOIL("regions.memory", f->regions[1].memory = KVF_MEM_FAKE + 1);
    SPOIL("regions.n_pages", f->regions[1].n_pages = (uint64_t)INT32_MAX + 1);
    SPOIL(NULL, f->regions[1].n_pages = INT32_MAX);
    SPOIL("regions.n_pages", f->regions[1].page_bytes = UINT64_C(1) << 63);
    SPOIL("movers", f->hello.n_movers = KVF_HELLO_MAX_MOVERS + 1);
    SPOIL(NULL, f->hello.n_movers = KVF_HELLO_MAX_MOVERS);
    SPOIL("movers.name", f->movers[1].name--);
    SPOIL("movers.name", f->movers[1].name = none);
    SPOIL("movers.name", f->movers[1].name = odd);
}

Test(hello, pack_stops_at_the_cap) {
    fixture_t *f = make_fixture();
    size_t bytes;
    uint8_t *frame = pack(f, &bytes);
    kvf_free(kvf_alloc_default(), frame);
    /* Grow one address until the payload is exactly the cap: its length takes two bytes more then.
     */
    size_t more = KVF_HELLO_CAP_BYTES - bytes - 2;
    uint8_t *big = calloc(1, sizeof(f->address) + more + 1);
    f->movers[0].address = (ProtobufCBinaryData){sizeof(f->address) + more, big};
    frame = pack(f, &bytes);
    cr_assert_eq(bytes, KVF_HELLO_CAP_BYTES);
    cr_assert_eq(unpack_and_free(key, &f->binding, frame + KVF_FRAME_HEADER_BYTES, bytes, NULL),
                 KVF_OK);
    kvf_free(kvf_alloc_default(), frame);
    f->movers[0].address.len++;
    frame = NULL;
    cr_assert_eq(kvf_hello_pack(kvf_alloc_default(), key, &f->binding, &f->hello, &frame, &bytes),
                 KVF_ERR_TOO_LARGE);
    cr_assert_null(frame);
    free(big);
    free(f);
}

Test(hello, every_failed_allocation_is_reported_and_leaks_nothing) {
    fixture_t *f = make_fixture();
    kvf_alloc_fail_t fail;
    kvf_alloc_fail_init(&fail, 1);
    uint8_t *frame = NULL;
    size_t bytes;
    cr_assert_eq(kvf_hello_pack(&fail.table, key, &f->binding, &f->hello, &frame, &bytes),
                 KVF_ERR_NO_MEMORY);
    cr_assert_null(frame);
    frame = pack(f, &bytes);
    uint64_t at = 0;
    kvf_status_t status;
    do {
        kvf_alloc_fail_init(&fail, ++at);
        Kvf__Wire__Hello *hello = NULL;
        status = kvf_hello_unpack(&fail.table, key, &f->binding, frame + KVF_FRAME_HEADER_BYTES,
                                  bytes, &hello, NULL);
        cr_assert_eq(status, fail.calls < at ? KVF_OK : KVF_ERR_NO_MEMORY);
        cr_assert_eq(hello != NULL, status == KVF_OK);
        if (hello != NULL) {
            kvf_message_free(&fail.table, &hello->base);
        }
        cr_assert_eq(fail.live, 0, "allocation %lu", (unsigned long)at);
    } while (status != KVF_OK);
    cr_assert_gt(at, 20);
    kvf_free(kvf_alloc_default(), frame);
    free(f);
}

/* ---- layout ---- */

Test(hello, layout_comes_back_field_by_field) {
    fixture_t *f = make_fixture();
    kvf_layout_t read;
    memset(&read, 0x55, sizeof(read));
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_hello_layout(&f->hello, &read, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(read.n_groups, 2);
    for (uint32_t g = 0; g < 2; g++) {
        const kvf_layer_group_t *a = &f->layout.groups[g];
        const kvf_layer_group_t *b = &read.groups[g];
        cr_assert_str_eq(b->name, a->name);
        cr_assert_eq(b->n_layers, 3 - g);
        for (uint32_t i = 0; i < b->n_layers; i++) {
            cr_assert_eq(b->layers[i], 2 * i + g + 1);
        }
        cr_assert_eq(b->window, a->window);
        cr_assert_eq(b->sinks, a->sinks);
        cr_assert_eq(b->tokens_per_block, 32 + g);
        cr_assert_eq(b->kv_heads, 2 + g);
        cr_assert_eq(b->head_dim, 256);
        cr_assert_eq(b->kv_factor, 2 - g);
        cr_assert_eq(b->dtype, a->dtype);
        cr_assert_eq(b->order, a->order);
        cr_assert_eq(b->kind, a->kind);
        cr_assert_eq(b->role, a->role);
    }
    free(f);
}

static void expect_layout(const fixture_t *f, kvf_status_t want, const char *text) {
    kvf_layout_t read = {.n_groups = 99};
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_hello_layout(&f->hello, &read, &detail), want, "%s: %s", text, detail.text);
    cr_assert_eq(read.n_groups, 99, "written on error");
    cr_assert_not_null(strstr(detail.text, text), "%s", detail.text);
}

Test(hello, layout_is_checked) {
    fixture_t *f = make_fixture();
    f->groups[1].dtype = KVF_DTYPE_F8_E4M3 + 1;
    expect_layout(f, KVF_ERR_UNSUPPORTED, "group sliding: dtype 4 is not known here");
    f->groups[0].order = UINT32_MAX;
    expect_layout(f, KVF_ERR_UNSUPPORTED, "group full: order 4294967295 is not known here");
    kvf_layout_to_wire(&f->layout, f->groups);
    f->groups[0].kind = 2;
    expect_layout(f, KVF_ERR_UNSUPPORTED, "group full: kind 2 is not known here");
    f->groups[0].kind = KVF_GROUP_STATE;
    expect_layout(f, KVF_ERR_UNSUPPORTED, "full");
    kvf_layout_to_wire(&f->layout, f->groups);
    f->groups[0].role = 2;
    expect_layout(f, KVF_ERR_UNSUPPORTED, "group full: role 2 is not known here");
    kvf_layout_to_wire(&f->layout, f->groups);
    f->groups[1].head_dim = 0;
    expect_layout(f, KVF_ERR_INVALID, "sliding");
    kvf_layout_to_wire(&f->layout, f->groups);
    f->groups[1].window = -1;
    expect_layout(f, KVF_ERR_INVALID, "sliding");
    free(f);
}
