/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/ticket.h"

#include "kvmgr/base/size.h"
#include "proto/mac.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static const uint8_t key[32] = "a secret of thirty-two bytes ...";

static const kvf_ticket_t example = {
    .send_id = 0x1122334455667788,
    .issuer = {{0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad,
                0xae, 0xaf}},
    .prompt_tokens = 0x0102030405,
    .instance = "p0",
    .address = "[::1]:9100",
    .request_id = "r",
};

static const uint8_t body[] = {
    1,    0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,           /* version, send id */
    0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7,                 /* issuer */
    0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,                 /* */
    5,    4,    3,    2,    1,    0,    0,    0,                    /* prompt tokens */
    2,    'p',  '0',                                                /* instance */
    10,   '[',  ':',  ':',  '1',  ']',  ':',  '9',  '1',  '0', '0', /* address */
    1,    'r',                                                      /* request id */
};

/* A body under a good MAC, whatever it says. @return Bytes. */
static size_t seal(const uint8_t *data, size_t n, uint8_t bytes[KVF_TICKET_MAX_BYTES + 1]) {
    const kvf_bytes_t parts[] = {{"kvferry ticket", 15}, {data, n}};
    memcpy(bytes, data, n);
    cr_assert_eq(kvf_mac(key, parts, 2, bytes + n), KVF_OK);
    return n + KVF_MAC_BYTES;
}

static bool same(const kvf_ticket_t *a, const kvf_ticket_t *b) {
    return a->send_id == b->send_id && kvf_incarnation_equal(&a->issuer, &b->issuer) &&
           a->prompt_tokens == b->prompt_tokens && strcmp(a->instance, b->instance) == 0 &&
           strcmp(a->address, b->address) == 0 && strcmp(a->request_id, b->request_id) == 0;
}

static kvf_ticket_t longest(void) {
    kvf_ticket_t ticket = {.send_id = UINT64_MAX, .prompt_tokens = KVF_MAX_TOKENS};
    memset(ticket.issuer.bytes, 0xff, sizeof(ticket.issuer.bytes));
    memset(ticket.instance, 'i', KVF_TICKET_FIELD_BYTES);
    memset(ticket.address, ' ', KVF_TICKET_FIELD_BYTES);
    memset(ticket.request_id, '~', KVF_TICKET_FIELD_BYTES);
    return ticket;
}

static void expect(const uint8_t *bytes, size_t n, kvf_status_t want) {
    /* Ends where it says, for the sanitizer. */
    uint8_t *exact = malloc(n + 1);
    memcpy(exact, bytes, n);
    kvf_ticket_t ticket = example;
    ticket.send_id = 42;
    cr_assert_eq(kvf_ticket_decode(exact, n, key, &ticket), want, "%zu bytes", n);
    cr_assert_eq(ticket.send_id == 42, want != KVF_OK, "output on error, or none on success");
    free(exact);
}

Test(ticket, has_these_bytes) {
    uint8_t want[KVF_TICKET_MAX_BYTES + 1];
    size_t n_want = seal(body, sizeof(body), want);
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    size_t n = 0;
    cr_assert_eq(kvf_ticket_encode(&example, key, bytes, &n), KVF_OK);
    cr_assert_eq(n, n_want);
    cr_assert_arr_eq(bytes, want, n);
    kvf_ticket_t read;
    cr_assert_eq(kvf_ticket_decode(bytes, n, key, &read), KVF_OK);
    cr_assert(same(&read, &example));
}

Test(ticket, longest_fits_and_comes_back) {
    kvf_ticket_t ticket = longest();
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    uint8_t again[KVF_TICKET_MAX_BYTES];
    char text[KVF_TICKET_TEXT_BYTES];
    size_t n;
    size_t n_again;
    cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_OK);
    cr_assert_eq(n, 1 + 8 + 16 + 8 + 3 * 129 + 32);
    cr_assert_eq(kvf_ticket_to_text(bytes, n, text, sizeof(text)), KVF_OK);
    cr_assert_eq(strlen(text), (n * 8 + 5) / 6);
    cr_assert_eq(strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"),
                 strlen(text));
    cr_assert_eq(kvf_ticket_from_text(text, again, &n_again), KVF_OK);
    cr_assert_eq(n_again, n);
    cr_assert_arr_eq(again, bytes, n);
    kvf_ticket_t read;
    cr_assert_eq(kvf_ticket_decode(again, n, key, &read), KVF_OK);
    cr_assert(same(&read, &ticket));
}

Test(ticket, encode_refuses_what_nobody_could_read) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    size_t n = 77;
#define REFUSED(statement)                                                                         \
    do {                                                                                           \
        kvf_ticket_t ticket = longest();                                                           \
        statement;                                                                                 \
        cr_assert_eq(kvf_ticket_encode(&ticket, key, bytes, &n), KVF_ERR_INVALID, #statement);     \
        cr_assert_eq(n, 77);                                                                       \
    } while (0)
    REFUSED(ticket.instance[0] = '\0');
    REFUSED(ticket.address[0] = '\0');
    REFUSED(ticket.request_id[0] = '\0');
    REFUSED(ticket.instance[KVF_TICKET_FIELD_BYTES] = 'i');
    REFUSED(ticket.address[KVF_TICKET_FIELD_BYTES] = 'a');
    REFUSED(ticket.request_id[KVF_TICKET_FIELD_BYTES] = 'r');
    REFUSED(ticket.instance[5] = '\n');
    REFUSED(ticket.address[5] = '\x7f');
    REFUSED(ticket.request_id[5] = '\xc3');
    REFUSED(ticket.prompt_tokens = 0);
    REFUSED(ticket.prompt_tokens = -1);
    REFUSED(ticket.prompt_tokens++);
#undef REFUSED
}

Test(ticket, every_flipped_bit_is_forged) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES + 1];
    size_t n = seal(body, sizeof(body), bytes);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
        expect(bytes, n, KVF_ERR_FORGED);
        bytes[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    for (size_t bit = 0; bit < 8 * sizeof(key); bit++) {
        uint8_t other[sizeof(key)];
        memcpy(other, key, sizeof(key));
        other[bit / 8] ^= (uint8_t)(1U << bit % 8);
        kvf_ticket_t ticket;
        cr_assert_eq(kvf_ticket_decode(bytes, n, other, &ticket), KVF_ERR_FORGED);
    }
    expect(bytes, n, KVF_OK);
}

Test(ticket, every_other_length_is_forged) {
    uint8_t bytes[2 * KVF_TICKET_MAX_BYTES] = {0};
    size_t n = seal(body, sizeof(body), bytes);
    for (size_t cut = 0; cut < sizeof(bytes); cut++) {
        expect(bytes, cut, cut == n ? KVF_OK : KVF_ERR_FORGED);
    }
}

/* Whoever holds the key may still be another version, or broken. */
Test(ticket, a_wrong_body_under_a_good_mac_is_forged) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES + 1];
    uint8_t bad[sizeof(body) + 1];
    for (size_t cut = 0; cut < sizeof(body); cut++) {
        expect(bytes, seal(body, cut, bytes), KVF_ERR_FORGED);
    }
    memcpy(bad, body, sizeof(body));
    bad[sizeof(body)] = 0;
    expect(bytes, seal(bad, sizeof(bad), bytes), KVF_ERR_FORGED);
    const struct {
        size_t at;
        uint8_t value;
    } cases[] = {
        {0, 0},     {0, 2},                             /* version */
        {30, 2},    {32, 0x80},                         /* prompt tokens over 2^40, negative */
        {33, 0},    {33, 1},    {33, 3},    {33, 255},  /* length of instance */
        {34, '\0'}, {35, '\0'}, {35, '\n'}, {39, 0x80}, /* texts that are none */
        {36, 0},    {47, 0},    {47, 2},                /* lengths of address and request id */
        {48, '\0'},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        memcpy(bad, body, sizeof(body));
        bad[cases[i].at] = cases[i].value;
        expect(bytes, seal(bad, sizeof(body), bytes), KVF_ERR_FORGED);
    }
    /* No prompt tokens at all. */
    memcpy(bad, body, sizeof(body));
    memset(bad + 25, 0, 8);
    expect(bytes, seal(bad, sizeof(body), bytes), KVF_ERR_FORGED);
    bad[30] = 1; /* 2^40 itself */
    expect(bytes, seal(bad, sizeof(body), bytes), KVF_OK);
    /* A text of 129 bytes. */
    uint8_t wide[400];
    memcpy(wide, body, 33);
    wide[33] = 129;
    memset(wide + 34, 'i', 129);
    memcpy(wide + 34 + 129, body + 36, sizeof(body) - 36);
    expect(bytes, seal(wide, 34 + 129 + sizeof(body) - 36, bytes), KVF_ERR_FORGED);
    /* The longest that can be said, in the last field: a sanitizer sees it copied. */
    memcpy(wide, body, sizeof(body));
    wide[47] = 255;
    memset(wide + 48, 'r', 255);
    expect(bytes, seal(wide, 48 + 255, bytes), KVF_ERR_FORGED);
}

/* RFC 4648, section 10, without padding, and the two letters that differ from plain base64. */
Test(ticket, text_is_base64url) {
    const struct {
        const char *bytes;
        const char *text;
    } cases[] = {
        {"", ""},           {"f", "Zg"},          {"fo", "Zm8"},          {"foo", "Zm9v"},
        {"foob", "Zm9vYg"}, {"fooba", "Zm9vYmE"}, {"foobar", "Zm9vYmFy"}, {"\xfb\xff\xbf", "-_-_"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = strlen(cases[i].bytes);
        size_t n_text = strlen(cases[i].text);
        char text[16];
        uint8_t bytes[KVF_TICKET_MAX_BYTES];
        size_t n_read = 99;
        for (size_t cap = 0; cap <= n_text; cap++) {
            cr_assert_eq(kvf_ticket_to_text((const uint8_t *)cases[i].bytes, n, text, cap),
                         KVF_ERR_RANGE);
        }
        cr_assert_eq(kvf_ticket_to_text((const uint8_t *)cases[i].bytes, n, text, n_text + 1),
                     KVF_OK);
        cr_assert_str_eq(text, cases[i].text);
        cr_assert_eq(kvf_ticket_from_text(cases[i].text, bytes, &n_read), KVF_OK);
        cr_assert_eq(n_read, n);
        cr_assert(n == 0 || memcmp(bytes, cases[i].bytes, n) == 0);
    }
}

/* Of all texts of up to three letters, exactly those pass that some bytes give. */
Test(ticket, one_ticket_has_one_text) {
    size_t passed = 0;
    for (unsigned a = 1; a < 256; a++) {
        for (unsigned b = 1; b < 256; b++) {
            const char text[] = {(char)a, (char)b, '\0'};
            uint8_t bytes[KVF_TICKET_MAX_BYTES];
            size_t n = 0;
            if (kvf_ticket_from_text(text, bytes, &n) == KVF_OK) {
                char again[8];
                cr_assert_eq(n, 1);
                cr_assert_eq(kvf_ticket_to_text(bytes, n, again, sizeof(again)), KVF_OK);
                cr_assert_str_eq(again, text);
                passed++;
            }
        }
    }
    cr_assert_eq(passed, 256);
    const char *wrong[] = {"A", "AAAAA", "AA==", "A+/A", "AA A", "AAAA\n", "AAB", "AAA\x80"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        uint8_t bytes[KVF_TICKET_MAX_BYTES];
        size_t n = 77;
        cr_assert_eq(kvf_ticket_from_text(wrong[i], bytes, &n), KVF_ERR_FORGED, "%s", wrong[i]);
        cr_assert_eq(n, 77);
    }
}

Test(ticket, text_has_a_longest_length) {
    char text[2 * KVF_TICKET_TEXT_BYTES];
    memset(text, 'A', sizeof(text));
    /* 683 letters are 512 bytes; no zero is read past KVF_TICKET_TEXT_BYTES. */
    for (size_t n = 0; n <= sizeof(text) - 1; n++) {
        uint8_t bytes[KVF_TICKET_MAX_BYTES];
        size_t n_bytes;
        text[n] = '\0';
        cr_assert_eq(kvf_ticket_from_text(text, bytes, &n_bytes),
                     n <= 683 && n % 4 != 1 ? KVF_OK : KVF_ERR_FORGED, "%zu letters", n);
        text[n] = 'A';
    }
    char *endless = malloc(KVF_TICKET_TEXT_BYTES);
    memset(endless, 'A', KVF_TICKET_TEXT_BYTES);
    uint8_t bytes[KVF_TICKET_MAX_BYTES + 1] = {0};
    size_t n_bytes;
    cr_assert_eq(kvf_ticket_from_text(endless, bytes, &n_bytes), KVF_ERR_FORGED);
    free(endless);
    cr_assert_eq(kvf_ticket_to_text(bytes, KVF_TICKET_MAX_BYTES, text, 684), KVF_OK);
    cr_assert_eq(kvf_ticket_to_text(bytes, KVF_TICKET_MAX_BYTES + 1, text, sizeof(text)),
                 KVF_ERR_RANGE);
}

Test(ticket, every_flipped_bit_of_its_text_is_forged) {
    uint8_t bytes[KVF_TICKET_MAX_BYTES + 1];
    size_t n = seal(body, sizeof(body), bytes);
    char text[KVF_TICKET_TEXT_BYTES];
    cr_assert_eq(kvf_ticket_to_text(bytes, n, text, sizeof(text)), KVF_OK);
    size_t n_text = strlen(text);
    for (size_t bit = 0; bit < 8 * n_text; bit++) {
        text[bit / 8] = (char)(text[bit / 8] ^ (char)(1U << bit % 8));
        kvf_ticket_t ticket;
        kvf_status_t status = kvf_ticket_from_text(text, bytes, &n);
        if (status == KVF_OK) {
            status = kvf_ticket_decode(bytes, n, key, &ticket);
        }
        cr_assert_eq(status, KVF_ERR_FORGED, "bit %zu", bit);
        text[bit / 8] = (char)(text[bit / 8] ^ (char)(1U << bit % 8));
    }
}

Test(ticket, random_bytes_are_forged) {
    srand(11);
    for (int round = 0; round < 20000; round++) {
        uint8_t bytes[KVF_TICKET_MAX_BYTES + 1];
        size_t n = (size_t)rand() % 128;
        for (size_t i = 0; i < n; i++) {
            bytes[i] = (uint8_t)rand();
        }
        expect(bytes, n, KVF_ERR_FORGED);
    }
}
