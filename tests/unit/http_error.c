/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/http_error.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* As docs/contracts.md "Errors" lists them, and the rest; "+" where the engine should prefill
 * again. */
static const char *const contract[] = {
    "200 ok",
    "400 invalid range",
    "403 forged not_allowed",
    "404 +unknown",
    "409 duplicate",
    "410 +used +expired",
    "413 too_large",
    "422 incompatible +uncovered capacity_mismatch count_mismatch",
    "429 again busy no_memory",
    "499 cancelled",
    "500 internal io",
    "501 unsupported",
    "502 +peer_lost peer_refused +digest_mismatch +prefill_failed +protocol",
    "504 +deadline",
};

/* The line of a name in the contract: its HTTP status and whether to prefill again. */
static bool look_up(const char *name, unsigned *http_p, bool *recompute_p) {
    for (size_t i = 0; i < sizeof(contract) / sizeof(contract[0]); i++) {
        char line[256];
        strcpy(line, contract[i]);
        char *save, *word = strtok_r(line, " ", &save);
        *http_p = (unsigned)strtoul(word, NULL, 10);
        while ((word = strtok_r(NULL, " ", &save)) != NULL) {
            *recompute_p = word[0] == '+';
            if (strcmp(word + *recompute_p, name) == 0) {
                return true;
            }
        }
    }
    return false;
}

Test(http_error, every_status_has_its_line) {
#define STATUS(code, name, scope, text, help) KVF_##name,
    static const kvf_status_t all[] = {KVF_STATUS_MAP(STATUS)};
#undef STATUS
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        const char *name = kvf_status_name(all[i]);
        unsigned http = 0;
        bool recompute = false;
        cr_assert(look_up(name, &http, &recompute), "%s", name);
        cr_assert_eq(kvf_http_status_of(all[i]), http, "%s", name);
        cr_assert_eq(kvf_http_recompute(all[i]), recompute, "%s", name);
    }
    cr_assert_eq(kvf_http_status_of((kvf_status_t)-99), 500);
    cr_assert_not(kvf_http_recompute((kvf_status_t)-99));
}

static void check_advice(kvf_status_t status, const char *message, const char *expected) {
    char text[KVF_DETAIL_BYTES];
    cr_assert_str_eq(kvf_http_advise(status, message, text), expected);
}

Test(http_error, messages_name_the_keys_that_they_are_about) {
    char text[KVF_DETAIL_BYTES], x[2 * KVF_DETAIL_BYTES];
    static const char tail[] = "x (compare model.* of both nodes)";
    check_advice(KVF_ERR_INCOMPATIBLE, "n_layers: 3, not 4",
                 "n_layers: 3, not 4 (compare model.* of both nodes)");
    check_advice(KVF_ERR_FORGED, "wrong MAC", "wrong MAC; compare control.key_file of both nodes");
    check_advice(KVF_ERR_FORGED, "damaged; compare the key files of both nodes",
                 "damaged; compare the key files of both nodes (control.key_file)");
    check_advice(KVF_ERR_PEER_LOST, "it died", "it died");
    memset(x, 'x', sizeof(x));
    x[sizeof(x) - 1] = '\0';
    cr_assert_eq(kvf_http_advise(KVF_ERR_INCOMPATIBLE, x, text), text);
    cr_assert_eq(strlen(text), KVF_DETAIL_BYTES - 1);
    cr_assert_str_eq(text + strlen(text) - strlen(tail), tail, "the advice is whole");
}

static void check_body(const char *message, bool recompute, const char *expected) {
    char *body = kvf_http_error_body("peer_lost", message, recompute);
    cr_assert_not_null(body);
    cr_assert_str_eq(body, expected);
    json_t *root = json_loads(body, 0, NULL);
    cr_assert_not_null(root);
    json_decref(root);
    free(body);
}

Test(http_error, body_is_json_whatever_the_message) {
    check_body("it died", true,
               "{\"error\":\"peer_lost\",\"message\":\"it died\",\"recompute\":true}");
    check_body("a \"b\"\\\n\x01", false,
               "{\"error\":\"peer_lost\",\"message\":\"a \\\"b\\\"\\\\\\n\\u0001\","
               "\"recompute\":false}");
    check_body("gr\xc3\xbc\xc3\x9f", true,
               "{\"error\":\"peer_lost\",\"message\":\"gr\xc3\xbc\xc3\x9f\",\"recompute\":true}");
    check_body("x\xff\xfe y", true,
               "{\"error\":\"peer_lost\",\"message\":\"x?? y\",\"recompute\":true}");
}
