/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Input: read as text of a ticket, as its binary form, and as the body of one that is sealed with
 * the key. A text that passes is the one text of its bytes; a body that passes is the one that the
 * ticket encodes to.
 */
#include "proto/ticket.h"

#include "proto/mac.h"
#include "tests/fuzz/fuzz.h"

static const uint8_t key[32] = {1, 2, 3};

static void check_text(const uint8_t *data, size_t bytes) {
    char text[KVF_TICKET_TEXT_BYTES];
    size_t n = bytes < sizeof(text) ? bytes : sizeof(text) - 1;
    memcpy(text, data, n);
    text[n] = '\0';
    uint8_t binary[KVF_TICKET_MAX_BYTES];
    size_t n_binary;
    kvf_status_t status = kvf_ticket_from_text(text, binary, &n_binary);
    if (status == KVF_OK) {
        char again[KVF_TICKET_TEXT_BYTES];
        FUZZ_CHECK(n_binary <= sizeof(binary));
        FUZZ_CHECK(kvf_ticket_to_text(binary, n_binary, again, sizeof(again)) == KVF_OK);
        FUZZ_CHECK(strcmp(again, text) == 0);
    } else {
        FUZZ_CHECK(status == KVF_ERR_FORGED);
    }
}

static void check_body(const uint8_t *data, size_t bytes) {
    uint8_t sealed[KVF_TICKET_MAX_BYTES];
    if (bytes > sizeof(sealed) - KVF_MAC_BYTES) {
        return;
    }
    const kvf_bytes_t parts[] = {{"kvferry ticket", 15}, {data, bytes}};
    memcpy(sealed, data, bytes);
    FUZZ_CHECK(kvf_mac(key, parts, 2, sealed + bytes) == KVF_OK);
    kvf_ticket_t ticket;
    kvf_status_t status = kvf_ticket_decode(sealed, bytes + KVF_MAC_BYTES, key, &ticket);
    if (status == KVF_OK) {
        uint8_t again[KVF_TICKET_MAX_BYTES];
        size_t n;
        FUZZ_CHECK(kvf_ticket_encode(&ticket, key, again, &n) == KVF_OK);
        FUZZ_CHECK(n == bytes + KVF_MAC_BYTES && memcmp(again, sealed, n) == 0);
    } else {
        FUZZ_CHECK(status == KVF_ERR_FORGED);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    kvf_ticket_t ticket;
    check_text(data, bytes);
    FUZZ_CHECK(kvf_ticket_decode(data, bytes, key, &ticket) == KVF_ERR_FORGED);
    check_body(data, bytes);
    return 0;
}
