/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/plan_json.h"

#include <inttypes.h>
#include <stdlib.h>

static const char *type_name(const json_t *value) {
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "a list", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a real",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",        [JSON_NULL] = "null",
    };
    return names[json_typeof(value)];
}

json_t *kvf_plan_get(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

kvf_status_t kvf_plan_object(const json_t *object, const char *key, json_t **value_p,
                             kvf_detail_t *detail) {
    json_t *value = kvf_plan_get(object, key);
    if (value != NULL && !json_is_object(value)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s is %s; give an object", key, type_name(value));
    }
    *value_p = value;
    return KVF_OK;
}

kvf_status_t kvf_plan_int(const json_t *object, const char *key, int64_t least, int64_t most,
                          int64_t absent, int64_t *value_p, kvf_detail_t *detail) {
    const json_t *value = kvf_plan_get(object, key);
    if (value == NULL && absent != KVF_PLAN_REQUIRED) {
        *value_p = absent;
        return KVF_OK;
    }
    if (!json_is_integer(value)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s is %s; give an integer", key,
                        value == NULL ? "missing" : type_name(value));
    }
    int64_t number = json_integer_value(value);
    if (number < least || number > most) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s is %" PRId64 "; give an integer from %" PRId64 " to %" PRId64, key,
                        number, least, most);
    }
    *value_p = number;
    return KVF_OK;
}

kvf_status_t kvf_plan_bool(const json_t *object, const char *key, bool absent, bool *value_p,
                           kvf_detail_t *detail) {
    const json_t *value = kvf_plan_get(object, key);
    if (value != NULL && !json_is_boolean(value)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "include_drafts: %s is %s; give true or false",
                        key, type_name(value));
    }
    *value_p = value != NULL ? json_is_true(value) : absent;
    return KVF_OK;
}

kvf_status_t kvf_plan_cp(const json_t *object, const char *key, kvf_cp_t *cp_p,
                         kvf_detail_t *detail) {
    const json_t *value = kvf_plan_get(object, key);
    if (value == NULL) {
        *cp_p = (kvf_cp_t){1, 0};
        return KVF_OK;
    }
    const json_t *size = json_array_get(value, 0), *rank = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(size) || !json_is_integer(rank) ||
        json_integer_value(size) < 1) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "cp: %s must be [size, rank], two integers with 0 <= rank < size", key);
    }
    *cp_p = (kvf_cp_t){json_integer_value(size), json_integer_value(rank)};
    return KVF_OK;
}

kvf_status_t kvf_plan_slots(const json_t *object, const char *key, int32_t **slots_p, int64_t *n_p,
                            kvf_detail_t *detail) {
    const json_t *list = kvf_plan_get(object, key);
    if (!json_is_array(list)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s is %s; give a list of integers", key,
                        list == NULL ? "missing" : type_name(list));
    }
    size_t n = json_array_size(list);
    int32_t *slots = calloc(n + 1, sizeof(*slots));
    if (slots == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a list of %zu slots", n);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *value = json_array_get(list, i);
        int64_t slot = json_integer_value(value);
        if (!json_is_integer(value) || slot < INT32_MIN || slot > INT32_MAX) {
            free(slots);
            return kvf_fail(detail, KVF_ERR_INVALID, "%s[%zu] is %s; give a slot number of 32 bits",
                            key, i, json_is_integer(value) ? "too large" : type_name(value));
        }
        slots[i] = (int32_t)slot;
    }
    *slots_p = slots;
    *n_p = (int64_t)n;
    return KVF_OK;
}

json_t *kvf_plan_pairs(const kvf_pair_t *pairs, int64_t n, bool two_sided) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) {
        json_t *pair = json_pack("[I, i]", (json_int_t)pairs[i].ordinal, (int)pairs[i].source);
        if ((two_sided && json_array_append_new(pair, json_integer(pairs[i].destination)) != 0) ||
            json_array_append(list, pair) != 0) {
            json_decref(pair);
            json_decref(list);
            return NULL;
        }
        json_decref(pair);
    }
    return list;
}

static json_t *ordinal_list(const int64_t *ordinals, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) {
        if (json_array_append_new(list, json_integer(ordinals[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

json_t *kvf_plan_missing(const kvf_pairing_t *found, const char *source_key, const int64_t *source,
                         const char *destination_key, const int64_t *destination) {
    return json_pack("{s:o, s:o}", source_key, ordinal_list(source, found->n_missing_source),
                     destination_key, ordinal_list(destination, found->n_missing_destination));
}

json_t *kvf_plan_refusal(kvf_status_t status, const kvf_detail_t *detail) {
    json_t *message = json_string(detail->text);
    if (message == NULL) {
        kvf_detail_t ascii = *detail;
        for (char *at = ascii.text; *at != '\0'; at++) {
            if ((*at & 0x80) != 0) {
                *at = '?';
            }
        }
        message = json_string(ascii.text);
    }
    return json_pack("{s:b, s:s, s:o}", "ok", 0, "error", kvf_status_name(status), "message",
                     message);
}

/* Text of the input on a terminal: control characters must not reach it. */
static void print_text(FILE *out, const json_t *text) {
    for (const char *at = json_string_value(text); at != NULL && *at != '\0'; at++) {
        (void)fputc((unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at, out);
    }
}

static void print_missing(FILE *out, const char *title, const json_t *list) {
    if (json_array_size(list) > 0) {
        (void)fprintf(out, "  missing at the %s: ordinals ", title);
        (void)json_dumpf(list, out, 0);
        (void)fputc('\n', out);
    }
}

static void print_group(FILE *out, const json_t *group) {
    const json_t *stale = json_object_get(group, "stale");
    const json_t *pairs = json_object_get(group, "pairs");
    bool two_sided = json_object_get(group, "missing_source") != NULL;
    (void)fputs("\n  group ", out);
    print_text(out, json_object_get(group, "name"));
    (void)fprintf(out, ": %s %zu, stale ordinals [%lld, %lld)\n",
                  two_sided ? "blocks to move" : "blocks selected", json_array_size(pairs),
                  (long long)json_integer_value(json_array_get(stale, 0)),
                  (long long)json_integer_value(json_array_get(stale, 1)));
    if (json_array_size(pairs) > 0) {
        (void)fprintf(out, "  %16s %12s%s\n", "ordinal", "source",
                      two_sided ? "  destination" : "");
    }
    for (size_t i = 0; i < json_array_size(pairs); i++) {
        const json_t *pair = json_array_get(pairs, i);
        (void)fprintf(out, "  %16lld %12lld",
                      (long long)json_integer_value(json_array_get(pair, 0)),
                      (long long)json_integer_value(json_array_get(pair, 1)));
        if (two_sided) {
            (void)fprintf(out, " %12lld", (long long)json_integer_value(json_array_get(pair, 2)));
        }
        (void)fputc('\n', out);
    }
    print_missing(out, "source", json_object_get(group, "missing_source"));
    print_missing(out, "destination", json_object_get(group, "missing_destination"));
}

static void print_refusal(FILE *out, const json_t *answer) {
    (void)fprintf(out, "refused, %s: ", json_string_value(json_object_get(answer, "error")));
    print_text(out, json_object_get(answer, "message"));
    (void)fputc('\n', out);
    void *at = json_object_iter(json_object_get(answer, "missing"));
    for (; at != NULL; at = json_object_iter_next(json_object_get(answer, "missing"), at)) {
        json_t *name = json_string(json_object_iter_key(at));
        (void)fputs("\n  group ", out);
        print_text(out, name);
        (void)fputc('\n', out);
        json_decref(name);
        print_missing(out, "source", json_object_get(json_object_iter_value(at), "source"));
        print_missing(out, "destination",
                      json_object_get(json_object_iter_value(at), "destination"));
    }
}

static void print_counts(FILE *out, const json_t *answer) {
    static const char *const rows[] = {"capacity_tokens", "alloc_blocks", "scratch_blocks"};
    (void)fprintf(out, "prompt blocks %lld\n\n  %-16s %12s %12s\n",
                  (long long)json_integer_value(json_object_get(answer, "prompt_blocks")), "",
                  "context", "generation");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const json_t *sides = json_object_get(answer, rows[i]);
        (void)fprintf(out, "  %-16s %12lld %12lld\n", rows[i],
                      (long long)json_integer_value(json_object_get(sides, "context")),
                      (long long)json_integer_value(json_object_get(sides, "generation")));
    }
}

bool kvf_plan_print(FILE *out, const json_t *answer) {
    json_t *id = json_object_get(answer, "id");
    if (id != NULL) {
        (void)json_dumpf(id, out, JSON_ENCODE_ANY | JSON_COMPACT);
        (void)fputs(": ", out);
    }
    if (json_is_true(json_object_get(answer, "ok"))) {
        const json_t *groups = json_object_get(answer, "groups");
        print_counts(out, answer);
        for (size_t i = 0; i < json_array_size(groups); i++) {
            print_group(out, json_array_get(groups, i));
        }
    } else {
        print_refusal(out, answer);
    }
    (void)fputc('\n', out);
    return fflush(out) == 0 && !ferror(out);
}
