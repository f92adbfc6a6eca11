/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Input: a preamble of 48 bytes, then a hello as who knows the key may send it (the target puts a
 * good MAC in front). Without the good MAC nothing passes; with it, what passes is within the
 * promises of hello.h.
 */
#include "proto/hello.h"

#include "tests/fuzz/fuzz.h"

static const uint8_t key[32] = {1, 2, 3};

static void check_promises(const Kvf__Wire__Hello *hello) {
    FUZZ_CHECK(kvf_text_ok(hello->instance, 1, 128) && kvf_text_ok(hello->version, 1, 128));
    FUZZ_CHECK(kvf_text_ok(hello->control_address, 1, 128));
    FUZZ_CHECK(hello->incarnation.len == KVF_INCARNATION_BYTES);
    FUZZ_CHECK(hello->wanted.len == KVF_INCARNATION_BYTES);
    FUZZ_CHECK(hello->n_groups >= 1 && hello->n_groups <= KVF_MAX_GROUPS);
    FUZZ_CHECK(hello->n_regions <= KVF_MAX_GROUPS);
    for (size_t i = 0; i < hello->n_regions; i++) {
        const Kvf__Wire__Region *region = hello->regions[i];
        FUZZ_CHECK(region->group_idx < hello->n_groups && region->n_pages <= INT32_MAX);
        FUZZ_CHECK(region->n_pages == 0 || region->page_bytes <= UINT64_MAX / region->n_pages);
    }
    for (size_t i = 0; i < hello->n_movers; i++) {
        FUZZ_CHECK(kvf_text_ok(hello->movers[i]->name, 1, 128));
    }
    kvf_layout_t *layout = calloc(1, sizeof(*layout));
    if (layout != NULL && kvf_hello_layout(hello, layout, NULL) == KVF_OK) {
        Kvf__Wire__LayerGroup groups[KVF_MAX_GROUPS];
        kvf_layout_to_wire(layout, groups);
        FUZZ_CHECK(layout->n_groups == hello->n_groups);
        for (uint32_t g = 0; g < layout->n_groups; g++) {
            FUZZ_CHECK(strcmp(groups[g].name, hello->groups[g]->name) == 0);
            FUZZ_CHECK(groups[g].n_layers == hello->groups[g]->n_layers);
            FUZZ_CHECK(groups[g].dtype == hello->groups[g]->dtype);
            FUZZ_CHECK(groups[g].window == hello->groups[g]->window);
        }
    }
    free(layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < KVF_PREAMBLE_BYTES) {
        return 0;
    }
    kvf_preamble_t preamble;
    if (kvf_preamble_decode(data, &preamble, NULL) == KVF_OK) {
        uint8_t again[KVF_PREAMBLE_BYTES];
        kvf_preamble_encode(&preamble, again);
        FUZZ_CHECK(memcmp(again, data, KVF_PREAMBLE_BYTES) == 0);
    }
    const kvf_hello_binding_t binding = {data, data, (bytes & 1) != 0};
    const uint8_t *message = data + KVF_PREAMBLE_BYTES;
    size_t n = bytes - KVF_PREAMBLE_BYTES;
    kvf_alloc_fail_t count;
    kvf_alloc_fail_init(&count, 0);
    Kvf__Wire__Hello *hello = NULL;

    kvf_status_t status = kvf_hello_unpack(&count.table, key, &binding, message, n, &hello, NULL);
    FUZZ_CHECK(status == (n < KVF_MAC_BYTES ? KVF_ERR_PROTOCOL : KVF_ERR_PEER_REFUSED));
    FUZZ_CHECK(hello == NULL && count.calls == 0);

    uint8_t *payload = malloc(KVF_MAC_BYTES + n);
    if (payload == NULL) {
        return 0;
    }
    const kvf_bytes_t parts[] = {
        {binding.from_initiator ? "kvferry hello initiator" : "kvferry hello responder", 24},
        {data, KVF_PREAMBLE_BYTES},
        {data, KVF_PREAMBLE_BYTES},
        {message, n}};
    FUZZ_CHECK(kvf_mac(key, parts, 4, payload) == KVF_OK);
    memcpy(payload + KVF_MAC_BYTES, message, n);
    status =
        kvf_hello_unpack(&count.table, key, &binding, payload, KVF_MAC_BYTES + n, &hello, NULL);
    free(payload);
    if (status == KVF_OK) {
        check_promises(hello);
        kvf_message_free(&count.table, &hello->base);
    } else {
        FUZZ_CHECK(status == KVF_ERR_PROTOCOL && hello == NULL);
    }
    FUZZ_CHECK(count.live == 0);
    return 0;
}
