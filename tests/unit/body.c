/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/body.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvf_body_t body;
static kvf_detail_t detail;

static void teardown(void) {
    kvf_body_cleanup(kvf_alloc_default(), &body);
}

TestSuite(body, .fini = teardown);

static kvf_status_t prefill(const char *text) {
    kvf_body_cleanup(kvf_alloc_default(), &body);
    return kvf_body_read_prefill(kvf_alloc_default(), text, strlen(text), &body, &detail);
}

static kvf_status_t decode_as(const char *text, bool verify) {
    kvf_body_cleanup(kvf_alloc_default(), &body);
    return kvf_body_read_decode(kvf_alloc_default(), text, strlen(text), verify, &body, &detail);
}

static kvf_status_t decode(const char *text) {
    return decode_as(text, true);
}

Test(body, prefill_fields) {
    cr_assert_eq(prefill("{\"request_id\":\"r/1 ~\",\"prompt_len\":1025,\"draft_len\":3,"
                         "\"timeout_ms\":250,\"hash_ids\":[7,-8,9],\"early_ticket\":false,"
                         "\"something_new\":[{}]}"),
                 KVF_OK, "%s", detail.text);
    cr_assert_str_eq(body.request_id, "r/1 ~");
    cr_assert_eq(body.lengths.prompt_len, 1025);
    cr_assert_eq(body.lengths.draft_len, 3);
    cr_assert_eq(body.lengths.num_extra_kv_tokens, 0);
    cr_assert_eq(body.lengths.total_input_len_cp, 0);
    cr_assert_eq(body.timeout_us, 250000);
    cr_assert_eq(body.content.n_ids, 3);
    cr_assert_eq(body.content.ids[0], 7);
    cr_assert_eq(body.content.ids[1], -8);
    cr_assert_eq(body.content.ids[2], 9);
    cr_assert_str_eq(body.content_from, "hash_ids");
    cr_assert_eq(prefill("{\"request_id\":\"r\",\"prompt_len\":1099511627776}"), KVF_OK);
    cr_assert_eq(body.lengths.prompt_len, INT64_C(1) << 40);
    cr_assert_eq(body.timeout_us, 0);
    cr_assert_null(body.content.ids);
    cr_assert_eq(body.content.seed, kvf_content_seed("r"));
    cr_assert_str_eq(body.content_from, "request_id");
}

/* {"tokens": [...]} of n ascending tokens, and more fields. */
static char *with_tokens(int n, const char *more) {
    char *text = malloc((size_t)n * 8 + 200);
    cr_assert_not_null(text);
    int used = sprintf(text, "{\"request_id\":\"r\"%s,\"tokens\":[", more);
    for (int i = 0; i < n; i++) {
        used += sprintf(text + used, "%s%d", i == 0 ? "" : ",", i);
    }
    (void)sprintf(text + used, "]}");
    return text;
}

Test(body, tokens_give_length_and_content) {
    int32_t tokens[1000];
    int64_t ids[2];
    for (int i = 0; i < 1000; i++) {
        tokens[i] = i;
    }
    kvf_content_from_tokens(tokens, 1000, ids);
    char *text = with_tokens(1000, "");
    cr_assert_eq(prefill(text), KVF_OK, "%s", detail.text);
    cr_assert_eq(body.lengths.prompt_len, 1000);
    cr_assert_eq(body.content.n_ids, 2);
    cr_assert_eq(memcmp(body.content.ids, ids, sizeof(ids)), 0);
    cr_assert_str_eq(body.content_from, "tokens");
    free(text);
    text = with_tokens(1000, ",\"prompt_len\":1000,\"hash_ids\":[5,6]");
    cr_assert_eq(prefill(text), KVF_OK);
    cr_assert_eq(body.content.ids[1], 6, "hash_ids come first");
    free(text);
    text = with_tokens(1000, ",\"prompt_len\":999");
    cr_assert_eq(prefill(text), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "tokens: 1000 of them"));
    free(text);
}

Test(body, wrong_prefills_are_named) {
    static const char *const cases[][2] = {
        {"", "not JSON"},
        {"{", "not JSON"},
        {"[]", "must be an object, not a list"},
        {"5", "not JSON"},
        {"{\"request_id\":\"a\",\"request_id\":\"a\",\"prompt_len\":5}", "duplicate"},
        {"{\"prompt_len\":5}", "request_id is missing"},
        {"{\"request_id\":\"\",\"prompt_len\":5}", "request_id: 0 bytes"},
        {"{\"request_id\":7,\"prompt_len\":5}", "request_id: expected a text, not a whole number"},
        {"{\"request_id\":\"a\\u0007\",\"prompt_len\":5}", "no printable ASCII at byte 1"},
        {"{\"request_id\":\"ab\\u00e9\",\"prompt_len\":5}", "no printable ASCII at byte 2"},
        {"{\"request_id\":\"a\\u0000\",\"prompt_len\":5}", "not JSON"},
        {"{\"request_id\":\"a\"}", "prompt_len or tokens is missing"},
        {"{\"request_id\":\"a\",\"tokens\":[]}", "empty list"},
        {"{\"request_id\":\"a\",\"tokens\":[1,-1]}", "tokens[1]"},
        {"{\"request_id\":\"a\",\"tokens\":[2147483648]}", "tokens[0]"},
        {"{\"request_id\":\"a\",\"tokens\":[1.5]}", "tokens[0]"},
        {"{\"request_id\":\"a\",\"tokens\":\"abc\"}", "prompt_len or tokens is missing"},
        {"{\"request_id\":\"a\",\"prompt_len\":3,\"tokens\":\"abc\"}", "tokens: expected a list"},
        {"{\"request_id\":\"a\",\"prompt_len\":0}", "prompt_len: 0 is not in 1..1099511627776"},
        {"{\"request_id\":\"a\",\"prompt_len\":1099511627777}", "prompt_len"},
        {"{\"request_id\":\"a\",\"prompt_len\":5.0}", "not a number with a fraction"},
        {"{\"request_id\":\"a\",\"prompt_len\":true}", "not a boolean"},
        {"{\"request_id\":\"a\",\"prompt_len\":null}", "not null"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"draft_len\":-1}", "draft_len: -1"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"draft_len\":4097}", "draft_len: 4097"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"timeout_ms\":0}", "timeout_ms: 0"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"hash_ids\":[1,2]}",
         "hash_ids: 2 of them, but a prompt of 5 tokens has 1 pieces"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"hash_ids\":[]}", "hash_ids: 0 of them"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"hash_ids\":[\"1\"]}", "hash_ids[0]"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"hash_ids\":{}}", "not an object"},
        {"{\"request_id\":\"a\",\"prompt_len\":5,\"early_ticket\":1}", "early_ticket: expected"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(prefill(cases[i][0]), KVF_ERR_INVALID, "%s", cases[i][0]);
        cr_assert_not_null(strstr(detail.text, cases[i][1]), "%s gave: %s", cases[i][0],
                           detail.text);
    }
    char text[256];
    (void)snprintf(text, sizeof(text), "{\"request_id\":\"%0128d\",\"prompt_len\":5}", 0);
    cr_assert_eq(prefill(text), KVF_OK);
    (void)snprintf(text, sizeof(text), "{\"request_id\":\"%0129d\",\"prompt_len\":5}", 0);
    cr_assert_eq(prefill(text), KVF_ERR_INVALID);
    cr_assert_eq(prefill("{\"request_id\":\"a\",\"prompt_len\":5,\"early_ticket\":true}"), KVF_OK);
    cr_assert(body.early_ticket);
    cr_assert_eq(prefill("{\"request_id\":\"a\",\"prompt_len\":5}"), KVF_OK);
    cr_assert_not(body.early_ticket);
}

Test(body, decode_fields) {
    cr_assert_eq(decode("{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"abc\","
                        "\"prompt_len\":600,\"draft_len\":2,\"hash_ids\":[1,2],\"more\":1},"
                        "\"max_tokens\":5,\"timeout_ms\":1}"),
                 KVF_OK, "%s", detail.text);
    cr_assert_str_eq(body.request_id, "r");
    cr_assert_str_eq(body.ticket, "abc");
    cr_assert_eq(body.lengths.prompt_len, 600);
    cr_assert_eq(body.lengths.draft_len, 2);
    cr_assert_eq(body.timeout_us, 1000);
    cr_assert_null(body.content.ids, "the sender's hash_ids");
    cr_assert_str_eq(body.content_from, "request_id");
    cr_assert_eq(decode("{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"abc\","
                        "\"prompt_len\":600,\"hash_ids\":[1,2]},\"hash_ids\":[3,4]}"),
                 KVF_OK);
    cr_assert_eq(body.content.ids[1], 4);
    cr_assert_str_eq(body.content_from, "hash_ids");
    cr_assert_eq(decode("{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"abc\","
                        "\"prompt_len\":2,\"hash_ids\":[1]},\"tokens\":[3,4]}"),
                 KVF_OK);
    cr_assert_str_eq(body.content_from, "tokens");
    cr_assert_eq(decode("{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"abc\","
                        "\"prompt_len\":2}}"),
                 KVF_OK);
    cr_assert_str_eq(body.content_from, "request_id");
}

/* What the pages must hold is in the request itself, or nobody can check them. */
Test(body, content_never_comes_from_the_sender) {
    static const struct {
        const char *content, *own; /* of kv_transfer_params, and the request's own fields */
        const char *taken;         /* what the content is taken from; NULL: refused */
        const char *text;          /* part of the refusal */
    } cases[] = {
        {"", "", "request_id", NULL},
        {",\"content\":\"request_id\"", "", "request_id", NULL},
        {",\"content\":\"hash_ids\"", ",\"hash_ids\":[8]", "hash_ids", NULL},
        {",\"content\":\"hash_ids\"", ",\"tokens\":[8,9]", "tokens", NULL},
        {",\"content\":\"tokens\"", ",\"tokens\":[8,9]", "tokens", NULL},
        {",\"content\":\"hash_ids\"", "", NULL, "hash_ids must be in the decode request"},
        {",\"content\":\"hash_ids\",\"hash_ids\":[8]", "", NULL, "never taken from the sender"},
        {",\"content\":\"tokens\"", "", NULL, "tokens must be in the decode request"},
        {",\"content\":\"faith\"", "", NULL, "hash_ids, tokens or request_id, not faith"},
        {",\"content\":7", "", NULL, "kv_transfer_params.content: expected a text"},
        {",\"content\":7", ",\"hash_ids\":[8]", NULL,
         "kv_transfer_params.content: expected a text"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[256];
        (void)snprintf(text, sizeof(text),
                       "{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\","
                       "\"prompt_len\":2%s}%s}",
                       cases[i].content, cases[i].own);
        kvf_status_t status = decode(text);
        if (cases[i].taken != NULL) {
            cr_assert_eq(status, KVF_OK, "%s: %s", text, detail.text);
            cr_assert_str_eq(body.content_from, cases[i].taken);
            continue;
        }
        cr_assert_eq(status, KVF_ERR_INVALID, "%s", text);
        cr_assert_not_null(strstr(detail.text, cases[i].text), "%s", detail.text);
        cr_assert_eq(decode_as(text, false), KVF_OK, "nothing is compared, nothing is needed");
    }
}

Test(body, wrong_decodes_are_named) {
    static const char *const cases[][2] = {
        {"{\"request_id\":\"r\"}", "kv_transfer_params is missing"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":7}",
         "kv_transfer_params: expected an object"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"prompt_len\":5}}",
         "kv_transfer_params.ticket is missing"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":5,\"prompt_len\":5}}",
         "kv_transfer_params.ticket: expected a text"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\"}}",
         "kv_transfer_params.prompt_len is missing"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\",\"prompt_len\":0}}",
         "kv_transfer_params.prompt_len: 0 is not in"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\",\"prompt_len\":1,"
         "\"draft_len\":\"x\"}}",
         "kv_transfer_params.draft_len: expected a whole number"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\",\"prompt_len\":5},"
         "\"max_tokens\":\"x\"}",
         "max_tokens: expected a whole number"},
        {"{\"request_id\":\"r\",\"kv_transfer_params\":{\"ticket\":\"t\",\"prompt_len\":5},"
         "\"hash_ids\":7}",
         "hash_ids: expected a list"},
        {"{\"kv_transfer_params\":{\"ticket\":\"t\",\"prompt_len\":5}}", "request_id is missing"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(decode(cases[i][0]), KVF_ERR_INVALID, "%s", cases[i][0]);
        cr_assert_eq(strncmp(detail.text, cases[i][1], strlen(cases[i][1])), 0, "%s gave: %s",
                     cases[i][0], detail.text);
    }
}

Test(body, deep_nesting_is_refused) {
    char text[100000];
    memset(text, '[', sizeof(text));
    cr_assert_eq(kvf_body_read_prefill(kvf_alloc_default(), text, sizeof(text), &body, &detail),
                 KVF_ERR_INVALID);
}

Test(body, cancel) {
    char id[KVF_MAX_ID_BYTES + 1] = "old";
    cr_assert_eq(kvf_body_read_cancel("{\"request_id\":\"r\"}", 18, id, &detail), KVF_OK);
    cr_assert_str_eq(id, "r");
    cr_assert_eq(kvf_body_read_cancel("{}", 2, id, &detail), KVF_ERR_INVALID);
    cr_assert_str_eq(id, "r");
}

Test(body, every_allocation_may_fail) {
    char *text = with_tokens(1000, "");
    for (uint64_t n = 1; n <= 2; n++) {
        kvf_alloc_fail_t fail;
        kvf_alloc_fail_init(&fail, n);
        cr_assert_eq(kvf_body_read_prefill(&fail.table, text, strlen(text), &body, &detail),
                     KVF_ERR_NO_MEMORY);
        cr_assert_eq(fail.live, 0);
    }
    free(text);
}
