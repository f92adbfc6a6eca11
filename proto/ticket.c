/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/ticket.h"

#include "kvmgr/base/cursor.h"
#include "kvmgr/base/size.h"
#include "proto/mac.h"

#define TICKET_VERSION 1

/* With its zero. Keeps a code of a hello or of another use of the key from passing for a ticket's.
 */
static const char ticket_label[] = "kvferry ticket";

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

static kvf_status_t ticket_mac(const uint8_t *bytes, size_t n_bytes, const uint8_t key[32],
                               uint8_t mac[KVF_MAC_BYTES]) {
    const kvf_bytes_t parts[] = {{ticket_label, sizeof(ticket_label)}, {bytes, n_bytes}};
    return kvf_mac(key, parts, 2, mac);
}

static void write_text(kvf_writer_t *w, const char *text) {
    size_t n = strlen(text);
    kvf_write_u8(w, (uint8_t)n);
    kvf_write_bytes(w, text, n);
}

static bool read_text(kvf_reader_t *r, char text[KVF_TICKET_FIELD_BYTES + 1]) {
    size_t n = kvf_read_u8(r);
    const uint8_t *bytes = kvf_read_bytes(r, n);
    if (bytes == NULL || n > KVF_TICKET_FIELD_BYTES) {
        return false;
    }
    memcpy(text, bytes, n);
    text[n] = '\0';
    /* As long as it said: no zero inside. */
    return strlen(text) == n && kvf_text_ok(text, 1, KVF_TICKET_FIELD_BYTES);
}

kvf_status_t kvf_ticket_encode(const kvf_ticket_t *ticket, const uint8_t key[32], uint8_t *bytes,
                               size_t *n_bytes_p) {
    if (!kvf_text_ok(ticket->instance, 1, KVF_TICKET_FIELD_BYTES) ||
        !kvf_text_ok(ticket->address, 1, KVF_TICKET_FIELD_BYTES) ||
        !kvf_text_ok(ticket->request_id, 1, KVF_TICKET_FIELD_BYTES) || ticket->prompt_tokens < 1 ||
        ticket->prompt_tokens > KVF_MAX_TOKENS) {
        return KVF_ERR_INVALID;
    }
    uint8_t draft[KVF_TICKET_MAX_BYTES];
    kvf_writer_t w = kvf_writer(draft, sizeof(draft));
    kvf_write_u8(&w, TICKET_VERSION);
    kvf_write_u64(&w, ticket->send_id);
    kvf_write_bytes(&w, ticket->issuer.bytes, KVF_INCARNATION_BYTES);
    kvf_write_u64(&w, (uint64_t)ticket->prompt_tokens);
    write_text(&w, ticket->instance);
    write_text(&w, ticket->address);
    write_text(&w, ticket->request_id);
    size_t n_body = sizeof(draft) - w.left;
    uint8_t mac[KVF_MAC_BYTES];
    kvf_status_t status = ticket_mac(draft, n_body, key, mac);
    if (status != KVF_OK) {
        return status;
    }
    kvf_write_bytes(&w, mac, sizeof(mac));
    memcpy(bytes, draft, n_body + KVF_MAC_BYTES);
    *n_bytes_p = n_body + KVF_MAC_BYTES;
    return KVF_OK;
}

kvf_status_t kvf_ticket_decode(const uint8_t *bytes, size_t n_bytes, const uint8_t key[32],
                               kvf_ticket_t *ticket_p) {
    if (n_bytes < KVF_MAC_BYTES || n_bytes > KVF_TICKET_MAX_BYTES) {
        return KVF_ERR_FORGED;
    }
    size_t n_body = n_bytes - KVF_MAC_BYTES;
    uint8_t mac[KVF_MAC_BYTES];
    kvf_status_t status = ticket_mac(bytes, n_body, key, mac);
    if (status != KVF_OK) {
        return status;
    }
    if (!kvf_mac_equal(mac, bytes + n_body)) {
        return KVF_ERR_FORGED;
    }
    kvf_reader_t r = kvf_reader(bytes, n_body);
    kvf_ticket_t ticket;
    if (kvf_read_u8(&r) != TICKET_VERSION) {
        return KVF_ERR_FORGED;
    }
    ticket.send_id = kvf_read_u64(&r);
    const uint8_t *issuer = kvf_read_bytes(&r, KVF_INCARNATION_BYTES);
    if (issuer == NULL) {
        return KVF_ERR_FORGED;
    }
    memcpy(ticket.issuer.bytes, issuer, KVF_INCARNATION_BYTES);
    uint64_t prompt_tokens = kvf_read_u64(&r);
    ticket.prompt_tokens = (int64_t)prompt_tokens;
    if (prompt_tokens < 1 || prompt_tokens > KVF_MAX_TOKENS || !read_text(&r, ticket.instance) ||
        !read_text(&r, ticket.address) || !read_text(&r, ticket.request_id) ||
        !kvf_reader_done(&r)) {
        return KVF_ERR_FORGED;
    }
    *ticket_p = ticket;
    return KVF_OK;
}

/* RFC 4648, section 5, without padding: each group of 1, 2 or 3 bytes gives 2, 3 or 4 letters. */
kvf_status_t kvf_ticket_to_text(const uint8_t *bytes, size_t n_bytes, char *text, size_t cap) {
    if (n_bytes > KVF_TICKET_MAX_BYTES || cap < (n_bytes * 4 + 2) / 3 + 1) {
        return KVF_ERR_RANGE;
    }
    uint32_t bits = 0;
    unsigned n_bits = 0;
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        bits = bits << 8 | bytes[i];
        for (n_bits += 8; n_bits >= 6; n_bits -= 6) {
            text[n++] = alphabet[bits >> (n_bits - 6) & 63];
        }
    }
    if (n_bits > 0) {
        text[n++] = alphabet[bits << (6 - n_bits) & 63];
    }
    text[n] = '\0';
    return KVF_OK;
}

kvf_status_t kvf_ticket_from_text(const char *text, uint8_t *bytes, size_t *n_bytes_p) {
    size_t n_text = strnlen(text, KVF_TICKET_TEXT_BYTES);
    size_t n_bytes = n_text * 3 / 4;
    if (n_text % 4 == 1 || n_bytes > KVF_TICKET_MAX_BYTES) {
        return KVF_ERR_FORGED;
    }
    uint8_t draft[KVF_TICKET_MAX_BYTES];
    uint32_t bits = 0;
    unsigned n_bits = 0;
    size_t n = 0;
    for (size_t i = 0; i < n_text; i++) {
        const char *letter = strchr(alphabet, text[i]);
        if (letter == NULL) {
            return KVF_ERR_FORGED;
        }
        bits = bits << 6 | (uint32_t)(letter - alphabet);
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            draft[n++] = (uint8_t)(bits >> n_bits);
        }
    }
    /* Bits that are left over must be zero: one ticket has one text. */
    if ((bits & ((1U << n_bits) - 1)) != 0) {
        return KVF_ERR_FORGED;
    }
    memcpy(bytes, draft, n);
    *n_bytes_p = n;
    return KVF_OK;
}
