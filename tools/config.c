/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/config_keys.h"

#include "transceiver/control/address.h"

#include <inttypes.h>
#include <string.h>

static void *field(kvf_config_t *config, const kvf_key_t *key) {
    return (char *)config + key->offset;
}

static const void *const_field(const kvf_config_t *config, const kvf_key_t *key) {
    return (const char *)config + key->offset;
}

/* Digits, then perhaps a unit. No sign, no spaces, no fraction. */
static bool parse_number(const char *text, bool with_unit, uint64_t *value_p) {
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    uint64_t value = 0;
    const char *at = text;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(value, 10U, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value)) {
            return false;
        }
    }
    if (at == text) {
        return false;
    }
    for (unsigned i = 0; i < (with_unit ? 5U : 1U); i++) {
        if (strcmp(at, units[i]) == 0) {
            return !__builtin_mul_overflow(value, UINT64_C(1) << (10 * i), value_p);
        }
    }
    return false;
}

static const char *find_choice(const char *const *choices, const char *text) {
    for (size_t i = 0; choices[i] != NULL; i++) {
        if (strcmp(choices[i], text) == 0) {
            return choices[i];
        }
    }
    return NULL;
}

static bool printable(const char *text) {
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f) {
            return false;
        }
    }
    return true;
}

static kvf_status_t store_text(kvf_config_t *config, const kvf_key_t *key, const char *text) {
    char **text_p = field(config, key);
    size_t length = strlen(text);
    if (length < key->minimum || length > key->maximum || !printable(text)) {
        return KVF_ERR_INVALID;
    }
    char *copy = kvf_strdup(config->alloc, text);
    if (copy == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_free(config->alloc, *text_p);
    *text_p = copy;
    return KVF_OK;
}

void kvf_config_clear(kvf_config_t *config, const kvf_key_t *key) {
    kvf_texts_t *list = field(config, key);
    for (size_t i = 0; i < list->n; i++) {
        kvf_free(config->alloc, list->items[i]);
    }
    kvf_free(config->alloc, list->items);
    *list = (kvf_texts_t){NULL, 0};
}

kvf_status_t kvf_config_append(kvf_config_t *config, const kvf_key_t *key, const char *text) {
    kvf_texts_t *list = field(config, key);
    size_t length = strlen(text);
    if (length < key->minimum || length > key->maximum || !printable(text)) {
        return KVF_ERR_INVALID;
    }
    char **items = kvf_realloc(config->alloc, list->items, list->n + 1, sizeof(*items));
    if (items == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    list->items = items;
    items[list->n] = kvf_strdup(config->alloc, text);
    if (items[list->n] == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    list->n++;
    return KVF_OK;
}

/* "a,b" or "[a,b]", spaces around items do not count. */
static kvf_status_t store_list(kvf_config_t *config, const kvf_key_t *key, const char *text) {
    size_t length = strlen(text);
    if (length >= 2 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    }
    kvf_config_clear(config, key);
    while (length > 0) {
        const char *comma = memchr(text, ',', length);
        size_t taken = comma == NULL ? length : (size_t)(comma - text);
        const char *end = text + taken;
        char item[256];
        while (text < end && *text == ' ') {
            text++;
        }
        while (end > text && end[-1] == ' ') {
            end--;
        }
        if ((size_t)(end - text) >= sizeof(item)) {
            return KVF_ERR_INVALID;
        }
        (void)snprintf(item, sizeof(item), "%.*s", (int)(end - text), text);
        kvf_status_t status = kvf_config_append(config, key, item);
        if (status != KVF_OK) {
            return status;
        }
        text = comma == NULL ? text : comma + 1;
        length -= taken + (comma != NULL);
    }
    return KVF_OK;
}

kvf_status_t kvf_config_store(kvf_config_t *config, const kvf_key_t *key, const char *text) {
    uint64_t number;
    switch (key->type) {
    case KVF_KEY_TEXT:
        return store_text(config, key, text);
    case KVF_KEY_LIST:
        return store_list(config, key, text);
    case KVF_KEY_CHOICE: {
        const char *choice = find_choice(key->choices, text);
        if (choice == NULL) {
            return KVF_ERR_INVALID;
        }
        *(const char **)field(config, key) = choice;
        return KVF_OK;
    }
    case KVF_KEY_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) {
            return KVF_ERR_INVALID;
        }
        *(bool *)field(config, key) = strcmp(text, "true") == 0;
        return KVF_OK;
    default:
        if (!parse_number(text, key->type == KVF_KEY_SIZE, &number) || number < key->minimum ||
            number > key->maximum ||
            (key->choices != NULL && find_choice(key->choices, text) == NULL)) {
            return KVF_ERR_INVALID;
        }
        *(uint64_t *)field(config, key) = number;
        return KVF_OK;
    }
}

kvf_status_t kvf_config_init(const kvf_alloc_t *alloc, kvf_config_t *config_p,
                             kvf_detail_t *detail) {
    size_t n;
    const kvf_key_t *keys = kvf_config_keys(&n);
    kvf_config_t config = {.alloc = alloc};
    for (size_t i = 0; i < n; i++) {
        if (kvf_config_store(&config, &keys[i], keys[i].fallback) != KVF_OK) {
            goto err_cleanup;
        }
    }
    config.folder = kvf_strdup(alloc, ".");
    if (config.folder == NULL) {
        goto err_cleanup;
    }
    *config_p = config;
    return KVF_OK;

err_cleanup:
    kvf_config_cleanup(&config);
    return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the configuration");
}

void kvf_config_cleanup(kvf_config_t *config) {
    size_t n;
    const kvf_key_t *keys = kvf_config_keys(&n);
    if (config == NULL || config->alloc == NULL) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (keys[i].type == KVF_KEY_TEXT) {
            kvf_free(config->alloc, *(char **)field(config, &keys[i]));
        } else if (keys[i].type == KVF_KEY_LIST) {
            kvf_config_clear(config, &keys[i]);
        }
    }
    kvf_free(config->alloc, config->folder);
    *config = (kvf_config_t){.alloc = NULL};
}

kvf_status_t kvf_config_set(kvf_config_t *config, const char *setting, kvf_detail_t *detail) {
    char path[128], text[256];
    const char *equals = strchr(setting, '=');
    if (equals == NULL || (size_t)(equals - setting) >= sizeof(path)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "--set %.100s: expected key=value", setting);
    }
    (void)snprintf(path, sizeof(path), "%.*s", (int)(equals - setting), setting);
    const kvf_key_t *key = kvf_config_find(path);
    if (key == NULL && kvf_config_is_section(path)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "--set %s: that is a section; its keys are %s",
                        path, kvf_config_section_keys(path, text, sizeof(text)));
    }
    if (key == NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "--set %s: unknown key; did you mean %s?", path,
                        kvf_config_nearest(path, text, sizeof(text)));
    }
    kvf_status_t status = kvf_config_store(config, key, equals + 1);
    if (status == KVF_ERR_INVALID) {
        kvf_config_expected(key, text, sizeof(text));
        return kvf_fail(detail, status, "--set %s: expected %s, not \"%.64s\"", path, text,
                        equals + 1);
    }
    return status == KVF_OK ? KVF_OK : kvf_fail(detail, status, "--set %s: no memory", path);
}

/* The example is the key's default: the ports of the two interfaces are easily mixed up. */
static kvf_status_t check_address(const kvf_config_t *config, const char *path, bool loopback,
                                  kvf_detail_t *detail) {
    const kvf_key_t *key = kvf_config_find(path);
    const char *text = *(const char *const *)const_field(config, key);
    struct sockaddr_storage addr;
    if (kvf_address_parse(text, &addr, NULL) != KVF_OK) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s: \"%.64s\" is not an address; write it in numbers, as %s or [::1]%s",
                        path, text, key->fallback, strrchr(key->fallback, ':'));
    }
    if (loopback && !kvf_address_is_loopback(&addr)) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "%s: %s is no loopback address, which is unsupported in this version (it "
                        "has no TLS); use 127.0.0.1 or [::1]",
                        path, text);
    }
    return KVF_OK;
}

kvf_status_t kvf_config_check(const kvf_config_t *config, kvf_detail_t *detail) {
    if (config->heartbeat_ms >= config->suspect_ms || config->suspect_ms >= config->lost_ms) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "heartbeat: period_ms %" PRIu64 ", suspect_ms %" PRIu64
                        " and lost_ms %" PRIu64 " must rise in this order",
                        config->heartbeat_ms, config->suspect_ms, config->lost_ms);
    }
    if (strcmp(config->verify, "attention") == 0 && config->extra_tokens == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "engine.extra_tokens: verify: attention needs at least 1, a place for the "
                        "token that attends");
    }
    kvf_status_t status = check_address(config, "http.listen", false, detail);
    return status == KVF_OK ? check_address(config, "control.listen", true, detail) : status;
}

static bool write_default(FILE *file, const kvf_key_t *key, const char *name, int indent) {
    char expected[256];
    const char *text = key->fallback;
    const char *quote = key->type == KVF_KEY_TEXT && text[0] == '\0' ? "\"\"" : text;
    kvf_config_expected(key, expected, sizeof(expected));
    return fprintf(file, "%*s# %s\n%*s# %s\n%*s%s: %s\n", indent, "", key->help, indent, "",
                   expected, indent, "", name, key->type == KVF_KEY_LIST ? "[]" : quote) >= 0;
}

kvf_status_t kvf_config_write_defaults(FILE *file) {
    size_t n;
    const kvf_key_t *keys = kvf_config_keys(&n);
    const char *section = "";
    size_t section_length = 0;
    for (size_t i = 0; i < n; i++) {
        const char *dot = strchr(keys[i].path, '.');
        size_t length = dot == NULL ? 0 : (size_t)(dot - keys[i].path);
        bool same = length == section_length && strncmp(section, keys[i].path, length) == 0;
        if ((i > 0 && !(same && length > 0) && fputc('\n', file) == EOF) ||
            (!same && length > 0 && fprintf(file, "%.*s:\n", (int)length, keys[i].path) < 0) ||
            !write_default(file, &keys[i], dot == NULL ? keys[i].path : dot + 1,
                           dot == NULL ? 0 : 2)) {
            return KVF_ERR_IO;
        }
        section = keys[i].path;
        section_length = length;
    }
    return fflush(file) == 0 ? KVF_OK : KVF_ERR_IO;
}

kvf_status_t kvf_config_key_path(const kvf_config_t *config, char **path_p) {
    size_t bytes = strlen(config->folder) + strlen(config->key_file) + 2;
    char *path = kvf_alloc(config->alloc, bytes);
    if (path == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    (void)snprintf(path, bytes, "%s%s%s", config->key_file[0] == '/' ? "" : config->folder,
                   config->key_file[0] == '/' ? "" : "/", config->key_file);
    *path_p = path;
    return KVF_OK;
}
