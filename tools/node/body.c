/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/body.h"

#include "kvmgr/base/size.h"
#include "proto/types.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#define PARAMS "kv_transfer_params"
#define MAX_TIMEOUT_MS INT64_C(86400000)

static const char *type_name(const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a text";
    case JSON_INTEGER:
        return "a whole number";
    case JSON_REAL:
        return "a number with a fraction";
    case JSON_NULL:
        return "null";
    default:
        return "a boolean";
    }
}

static kvf_status_t parse(const char *text, size_t bytes, json_t **root_p, kvf_detail_t *detail) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the body is not JSON: line %d, column %d: %s",
                        error.line, error.column, error.text);
    }
    if (!json_is_object(root)) {
        kvf_status_t status = kvf_fail(detail, KVF_ERR_INVALID,
                                       "the body must be an object, not %s", type_name(root));
        json_decref(root);
        return status;
    }
    *root_p = root;
    return KVF_OK;
}

/* A field's value. Names are paths, as in "kv_transfer_params.ticket", for the texts; the last part
 * is the name in `object`. */
static const json_t *get(const json_t *object, const char *path) {
    const char *dot = strrchr(path, '.');
    return json_object_get(object, dot == NULL ? path : dot + 1);
}

/* A whole number; `*value_p` stays as it is when the field is absent. */
static kvf_status_t get_number(const json_t *object, const char *name, int64_t minimum,
                               int64_t maximum, int64_t *value_p, kvf_detail_t *detail) {
    const json_t *value = get(object, name);
    if (value == NULL) {
        return KVF_OK;
    }
    if (!json_is_integer(value)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: expected a whole number, not %s", name,
                        type_name(value));
    }
    int64_t number = json_integer_value(value);
    if (number < minimum || number > maximum) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: %" PRId64 " is not in %" PRId64 "..%" PRId64,
                        name, number, minimum, maximum);
    }
    *value_p = number;
    return KVF_OK;
}

/* A text that must be there: 1 to max_bytes bytes of printable ASCII. */
static kvf_status_t get_text(const json_t *object, const char *name, size_t max_bytes, char *text_p,
                             kvf_detail_t *detail) {
    const json_t *value = get(object, name);
    if (value == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s is missing", name);
    }
    if (!json_is_string(value)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: expected a text, not %s", name,
                        type_name(value));
    }
    const char *text = json_string_value(value);
    size_t bytes = json_string_length(value);
    if (bytes < 1 || bytes > max_bytes) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: %zu bytes long, expected 1 to %zu", name,
                        bytes, max_bytes);
    }
    for (size_t i = 0; i < bytes; i++) {
        if (!kvf_byte_printable(text[i])) { /* as everywhere an id goes */
            return kvf_fail(detail, KVF_ERR_INVALID, "%s: no printable ASCII at byte %zu", name, i);
        }
    }
    memcpy(text_p, text, bytes + 1);
    return KVF_OK;
}

/* A list of whole numbers; NULL in *list_p when it is absent. */
static kvf_status_t get_list(const json_t *object, const char *name, int64_t minimum,
                             int64_t maximum, const json_t **list_p, kvf_detail_t *detail) {
    const json_t *list = json_object_get(object, name);
    if (list != NULL && !json_is_array(list)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: expected a list, not %s", name,
                        type_name(list));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (!json_is_integer(item) || json_integer_value(item) < minimum ||
            json_integer_value(item) > maximum) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "%s[%zu]: expected a whole number %" PRId64 "..%" PRId64, name, i,
                            minimum, maximum);
        }
    }
    *list_p = list;
    return KVF_OK;
}

static kvf_status_t take_hash_ids(const kvf_alloc_t *alloc, const json_t *list, kvf_body_t *body,
                                  kvf_detail_t *detail) {
    int64_t n = kvf_div_ceil(body->lengths.prompt_len, KVF_PIECE_TOKENS);
    if ((int64_t)json_array_size(list) != n) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "hash_ids: %zu of them, but a prompt of %" PRId64 " tokens has %" PRId64
                        " pieces of %d tokens",
                        json_array_size(list), body->lengths.prompt_len, n, KVF_PIECE_TOKENS);
    }
    body->ids = kvf_realloc(alloc, NULL, (size_t)n, sizeof(*body->ids));
    if (body->ids == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for hash_ids");
    }
    for (int64_t i = 0; i < n; i++) {
        body->ids[i] = json_integer_value(json_array_get(list, (size_t)i));
    }
    body->content = (kvf_content_t){body->ids, n, 0};
    body->content_from = "hash_ids";
    return KVF_OK;
}

static kvf_status_t take_tokens(const kvf_alloc_t *alloc, const json_t *list, kvf_body_t *body,
                                kvf_detail_t *detail) {
    size_t n_tokens = json_array_size(list);
    int64_t n = kvf_div_ceil((int64_t)n_tokens, KVF_PIECE_TOKENS);
    int32_t *tokens = kvf_realloc(alloc, NULL, n_tokens, sizeof(*tokens));
    body->ids = kvf_realloc(alloc, NULL, (size_t)n, sizeof(*body->ids));
    if (tokens == NULL || body->ids == NULL) {
        kvf_free(alloc, tokens);
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for tokens");
    }
    for (size_t i = 0; i < n_tokens; i++) {
        tokens[i] = (int32_t)json_integer_value(json_array_get(list, i));
    }
    kvf_content_from_tokens(tokens, (int64_t)n_tokens, body->ids);
    kvf_free(alloc, tokens);
    body->content = (kvf_content_t){body->ids, n, 0};
    body->content_from = "tokens";
    return KVF_OK;
}

/* The content of the prompt, whose length is known: hash_ids, else tokens, else the request's id.
 */
static kvf_status_t take_content(const kvf_alloc_t *alloc, const json_t *root, kvf_body_t *body,
                                 kvf_detail_t *detail) {
    const json_t *ids, *tokens;
    kvf_status_t status = get_list(root, "hash_ids", INT64_MIN, INT64_MAX, &ids, detail);
    if (status == KVF_OK) {
        status = get_list(root, "tokens", 0, INT32_MAX, &tokens, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (tokens != NULL && (int64_t)json_array_size(tokens) != body->lengths.prompt_len) {
        return kvf_fail(detail, KVF_ERR_INVALID, "tokens: %zu of them, but prompt_len is %" PRId64,
                        json_array_size(tokens), body->lengths.prompt_len);
    }
    if (ids != NULL) {
        return take_hash_ids(alloc, ids, body, detail);
    }
    if (tokens != NULL) {
        return take_tokens(alloc, tokens, body, detail);
    }
    body->content = (kvf_content_t){NULL, 0, kvf_content_seed(body->request_id)};
    body->content_from = "request_id";
    return KVF_OK;
}

/* What prefill and decode requests have in common. */
static kvf_status_t read_common(const json_t *root, kvf_body_t *body, kvf_detail_t *detail) {
    int64_t timeout_ms = 0;
    kvf_status_t status = get_text(root, "request_id", KVF_MAX_ID_BYTES, body->request_id, detail);
    if (status == KVF_OK) {
        status = get_number(root, "timeout_ms", 1, MAX_TIMEOUT_MS, &timeout_ms, detail);
    }
    body->timeout_us = (uint64_t)timeout_ms * 1000;
    return status;
}

static kvf_status_t read_lengths(const json_t *object, const char *prompt, const char *draft,
                                 kvf_lengths_t *lengths, kvf_detail_t *detail) {
    kvf_status_t status =
        get_number(object, prompt, 1, KVF_MAX_TOKENS, &lengths->prompt_len, detail);
    return status == KVF_OK
               ? get_number(object, draft, 0, KVF_MAX_AUX_TOKENS, &lengths->draft_len, detail)
               : status;
}

static kvf_status_t prompt_from_tokens(const json_t *root, kvf_body_t *body, kvf_detail_t *detail) {
    const json_t *tokens = json_object_get(root, "tokens");
    if (body->lengths.prompt_len == 0 && json_is_array(tokens)) {
        body->lengths.prompt_len = (int64_t)json_array_size(tokens);
        if (body->lengths.prompt_len == 0) {
            return kvf_fail(detail, KVF_ERR_INVALID, "tokens: an empty list; a prompt has a token");
        }
    }
    if (body->lengths.prompt_len == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "prompt_len or tokens is missing");
    }
    return KVF_OK;
}

static kvf_status_t read_early_ticket(const json_t *root, bool *early_p, kvf_detail_t *detail) {
    const json_t *early = json_object_get(root, "early_ticket");
    if (early != NULL && !json_is_boolean(early)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "early_ticket: expected true or false, not %s",
                        type_name(early));
    }
    *early_p = json_is_true(early);
    return KVF_OK;
}

kvf_status_t kvf_body_read_prefill(const kvf_alloc_t *alloc, const char *text, size_t bytes,
                                   kvf_body_t *body_p, kvf_detail_t *detail) {
    kvf_body_t body = {.ids = NULL};
    json_t *root;
    kvf_status_t status = parse(text, bytes, &root, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = read_common(root, &body, detail);
    if (status == KVF_OK) {
        status = read_lengths(root, "prompt_len", "draft_len", &body.lengths, detail);
    }
    if (status == KVF_OK) {
        status = prompt_from_tokens(root, &body, detail);
    }
    if (status == KVF_OK) {
        status = read_early_ticket(root, &body.early_ticket, detail);
    }
    if (status == KVF_OK) {
        status = take_content(alloc, root, &body, detail);
    }
    json_decref(root);
    if (status != KVF_OK) {
        kvf_body_cleanup(alloc, &body);
        return status;
    }
    *body_p = body;
    return KVF_OK;
}

/* A sender's pages that were made from hash_ids or tokens can be checked against the request's own
 * only: whoever sent other bytes could send other hash_ids, too. */
static kvf_status_t check_content_source(const json_t *params, const kvf_body_t *body,
                                         kvf_detail_t *detail) {
    char source[16] = "request_id";
    kvf_status_t status = KVF_OK;
    if (json_object_get(params, "content") != NULL) {
        status = get_text(params, PARAMS ".content", sizeof(source) - 1, source, detail);
    }
    if (status != KVF_OK || strcmp(body->content_from, "request_id") != 0 ||
        strcmp(source, "request_id") == 0) {
        return status;
    }
    if (strcmp(source, "hash_ids") != 0 && strcmp(source, "tokens") != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        PARAMS ".content: expected hash_ids, tokens or request_id, not %s", source);
    }
    return kvf_fail(detail, KVF_ERR_INVALID,
                    "%s must be in the decode request, as in the prefill request: what the pages "
                    "must hold is never taken from the sender",
                    source);
}

static kvf_status_t read_decode(const kvf_alloc_t *alloc, const json_t *root, bool verify,
                                kvf_body_t *body, kvf_detail_t *detail) {
    const json_t *params = json_object_get(root, PARAMS);
    int64_t max_tokens = 0;
    if (params == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        PARAMS " is missing; pass on what the prefill node answered");
    }
    if (!json_is_object(params)) {
        return kvf_fail(detail, KVF_ERR_INVALID, PARAMS ": expected an object, not %s",
                        type_name(params));
    }
    kvf_status_t status = read_common(root, body, detail);
    if (status == KVF_OK) {
        status =
            read_lengths(params, PARAMS ".prompt_len", PARAMS ".draft_len", &body->lengths, detail);
    }
    if (status == KVF_OK) {
        status = get_text(params, PARAMS ".ticket", KVF_TICKET_BYTES - 1, body->ticket, detail);
    }
    if (status == KVF_OK) {
        status = get_number(root, "max_tokens", 0, KVF_MAX_TOKENS, &max_tokens, detail);
    }
    if (status == KVF_OK && body->lengths.prompt_len == 0) {
        status = kvf_fail(detail, KVF_ERR_INVALID, PARAMS ".prompt_len is missing");
    }
    if (status == KVF_OK) {
        status = take_content(alloc, root, body, detail);
    }
    return status == KVF_OK && verify ? check_content_source(params, body, detail) : status;
}

kvf_status_t kvf_body_read_decode(const kvf_alloc_t *alloc, const char *text, size_t bytes,
                                  bool verify, kvf_body_t *body_p, kvf_detail_t *detail) {
    kvf_body_t body = {.ids = NULL};
    json_t *root;
    kvf_status_t status = parse(text, bytes, &root, detail);
    if (status != KVF_OK) {
        return status;
    }
    status = read_decode(alloc, root, verify, &body, detail);
    json_decref(root);
    if (status != KVF_OK) {
        kvf_body_cleanup(alloc, &body);
        return status;
    }
    *body_p = body;
    return KVF_OK;
}

kvf_status_t kvf_body_read_cancel(const char *text, size_t bytes, char *request_id,
                                  kvf_detail_t *detail) {
    json_t *root;
    kvf_status_t status = parse(text, bytes, &root, detail);
    if (status == KVF_OK) {
        status = get_text(root, "request_id", KVF_MAX_ID_BYTES, request_id, detail);
        json_decref(root);
    }
    return status;
}

void kvf_body_cleanup(const kvf_alloc_t *alloc, kvf_body_t *body) {
    kvf_free(alloc, body->ids);
    *body = (kvf_body_t){.ids = NULL};
}
