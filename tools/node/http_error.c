/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/http_error.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    kvf_status_t status;
    unsigned http;
    bool recompute;
} rows[] = {
    {KVF_OK, 200, false},
    {KVF_ERR_INVALID, 400, false},
    {KVF_ERR_RANGE, 400, false},
    {KVF_ERR_UNSUPPORTED, 501, false},
    {KVF_ERR_DUPLICATE, 409, false},
    {KVF_ERR_UNKNOWN, 404, true},
    {KVF_ERR_TOO_LARGE, 413, false},
    {KVF_ERR_CAPACITY_MISMATCH, 422, false},
    {KVF_ERR_COUNT_MISMATCH, 422, false},
    {KVF_ERR_AGAIN, 429, false},
    {KVF_ERR_BUSY, 429, false},
    {KVF_ERR_NO_MEMORY, 429, false},
    {KVF_ERR_CANCELLED, 499, false},
    {KVF_ERR_DEADLINE, 504, true},
    {KVF_ERR_UNCOVERED, 422, true},
    {KVF_ERR_DIGEST_MISMATCH, 502, true},
    {KVF_ERR_PREFILL_FAILED, 502, true},
    {KVF_ERR_FORGED, 403, false},
    {KVF_ERR_USED, 410, true},
    {KVF_ERR_EXPIRED, 410, true},
    {KVF_ERR_PEER_LOST, 502, true},
    {KVF_ERR_PEER_REFUSED, 502, false},
    {KVF_ERR_INCOMPATIBLE, 422, false},
    {KVF_ERR_PROTOCOL, 502, true},
    {KVF_ERR_NOT_ALLOWED, 403, false},
    {KVF_ERR_IO, 500, false},
    {KVF_ERR_INTERNAL, 500, false}, /* the row of unknown numbers: the last one */
};

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

static size_t row_of(kvf_status_t status) {
    size_t i = 0;
    while (i < N_ROWS - 1 && rows[i].status != status) {
        i++;
    }
    return i;
}

unsigned kvf_http_status_of(kvf_status_t status) {
    return rows[row_of(status)].http;
}

bool kvf_http_recompute(kvf_status_t status) {
    return rows[row_of(status)].recompute;
}

const char *kvf_http_advise(kvf_status_t status, const char *message, char text[KVF_DETAIL_BYTES]) {
    const char *advice;
    if (status == KVF_ERR_INCOMPATIBLE) {
        advice = " (compare model.* of both nodes)";
    } else if (status == KVF_ERR_FORGED) {
        bool told = strstr(message, "compare the key files of both nodes") != NULL;
        advice = told ? " (control.key_file)" : "; compare control.key_file of both nodes";
    } else {
        return message;
    }
    /* A long message gives way: the advice is whole. */
    (void)snprintf(text, KVF_DETAIL_BYTES, "%.*s%s", (int)(KVF_DETAIL_BYTES - 1 - strlen(advice)),
                   message, advice);
    return text;
}

/* A JSON string of any bytes. */
static json_t *string_of(const char *text) {
    json_t *string = json_string(text);
    char *ascii = string == NULL ? strdup(text) : NULL;
    if (ascii != NULL) {
        for (char *at = ascii; *at != '\0'; at++) {
            if ((unsigned char)*at >= 0x80) {
                *at = '?';
            }
        }
        string = json_string(ascii);
        free(ascii);
    }
    return string;
}

char *kvf_http_error_body(const char *error, const char *message, bool recompute) {
    json_t *root = json_pack("{s:s, s:o, s:b}", "error", error, "message", string_of(message),
                             "recompute", (int)recompute);
    char *body = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return body;
}
