/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/config_keys.h"

#include <errno.h>
#include <string.h>
#include <yaml.h>

#define PATH_BYTES 128

/* One reading of one file. */
typedef struct reader {
    kvf_config_t *config;
    const char *name;
    kvf_detail_t *detail;
    yaml_parser_t parser;
    bool seen[KVF_CONFIG_MAX_KEYS];     /* by index of the key */
    bool sections[KVF_CONFIG_MAX_KEYS]; /* by index of a section's first key */
} reader_t;

#define FAIL(reader, mark, fmt, ...)                                                               \
    kvf_fail((reader)->detail, KVF_ERR_INVALID, "%.100s:%zu: " fmt, (reader)->name,                \
             (mark).line + 1, ##__VA_ARGS__)

static kvf_status_t next_event(reader_t *reader, yaml_event_t *event_p) {
    const yaml_parser_t *parser = &reader->parser;
    if (yaml_parser_parse(&reader->parser, event_p) == 1) {
        return KVF_OK;
    }
    if (parser->error == YAML_MEMORY_ERROR) {
        return KVF_ERR_NO_MEMORY; /* kvf_config_read_stream() has the text */
    }
    return FAIL(reader, parser->problem_mark, "not YAML: %s%s%s",
                parser->problem == NULL ? "unknown problem" : parser->problem,
                parser->context == NULL ? "" : ", ",
                parser->context == NULL ? "" : parser->context);
}

static const char *scalar_text(const yaml_event_t *event) {
    return (const char *)event->data.scalar.value;
}

/* A text without zero bytes inside, and without a tag or anchor that would change its meaning. */
static bool is_plain_scalar(const yaml_event_t *event) {
    return event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor == NULL &&
           event->data.scalar.tag == NULL &&
           strlen(scalar_text(event)) == event->data.scalar.length;
}

static bool is_null(const yaml_event_t *event) {
    const char *text = scalar_text(event);
    return event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

/* Numbers and booleans are plain in YAML: in quotes they are texts. */
static bool has_right_style(const kvf_key_t *key, const yaml_event_t *event) {
    bool plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    return !is_null(event) && (plain || (key->type != KVF_KEY_NUMBER && key->type != KVF_KEY_BOOL));
}

static kvf_status_t wrong_value(reader_t *reader, const kvf_key_t *key, const yaml_event_t *event) {
    char expected[256];
    kvf_config_expected(key, expected, sizeof(expected));
    switch (event->type) {
    case YAML_SCALAR_EVENT: {
        const char *quote = is_null(event) ? "" : "\"";
        return FAIL(reader, event->start_mark, "%s: expected %s, not %s%.64s%s", key->path,
                    expected, quote, is_null(event) ? "nothing" : scalar_text(event), quote);
    }
    case YAML_SEQUENCE_START_EVENT:
        return FAIL(reader, event->start_mark,
                    "%s: expected %s, not a list (an IPv6 address needs quotes)", key->path,
                    expected);
    case YAML_MAPPING_START_EVENT:
        return FAIL(reader, event->start_mark, "%s: expected %s, not a section", key->path,
                    expected);
    default:
        return FAIL(reader, event->start_mark, "%s: expected %s, not an alias", key->path,
                    expected);
    }
}

static kvf_status_t read_list(reader_t *reader, const kvf_key_t *key) {
    yaml_event_t event;
    kvf_config_clear(reader->config, key);
    for (;;) {
        kvf_status_t status = next_event(reader, &event);
        if (status != KVF_OK) {
            return status;
        }
        bool end = event.type == YAML_SEQUENCE_END_EVENT;
        if (!end) {
            status = is_plain_scalar(&event) && !is_null(&event)
                         ? kvf_config_append(reader->config, key, scalar_text(&event))
                         : KVF_ERR_INVALID;
        }
        if (status == KVF_ERR_INVALID) {
            status =
                FAIL(reader, event.start_mark, "%s: expected a text of %llu to %llu characters",
                     key->path, (unsigned long long)key->minimum, (unsigned long long)key->maximum);
        }
        yaml_event_delete(&event);
        if (end || status != KVF_OK) {
            return status;
        }
    }
}

static kvf_status_t read_value(reader_t *reader, const kvf_key_t *key) {
    yaml_event_t event;
    kvf_status_t status = next_event(reader, &event);
    if (status != KVF_OK) {
        return status;
    }
    if (event.type == YAML_SEQUENCE_START_EVENT && key->type == KVF_KEY_LIST &&
        event.data.sequence_start.anchor == NULL && event.data.sequence_start.tag == NULL) {
        status = read_list(reader, key);
    } else if (is_plain_scalar(&event) && key->type != KVF_KEY_LIST &&
               has_right_style(key, &event)) {
        status = kvf_config_store(reader->config, key, scalar_text(&event));
        if (status == KVF_ERR_INVALID) {
            status = wrong_value(reader, key, &event);
        }
    } else {
        status = wrong_value(reader, key, &event);
    }
    yaml_event_delete(&event);
    return status;
}

static kvf_status_t read_section(reader_t *reader, const char *section);

/* The first key of a section stands for it. */
static size_t section_idx(const char *path) {
    size_t n, length = strlen(path);
    const kvf_key_t *keys = kvf_config_keys(&n);
    for (size_t i = 0; i < n; i++) {
        if (strncmp(keys[i].path, path, length) == 0 && keys[i].path[length] == '.') {
            return i;
        }
    }
    return 0;
}

static kvf_status_t read_key(reader_t *reader, const yaml_event_t *name, const char *section) {
    char path[PATH_BYTES], nearest[PATH_BYTES];
    size_t n;
    if (!is_plain_scalar(name) || strlen(scalar_text(name)) >= PATH_BYTES / 2) {
        return FAIL(reader, name->start_mark, "expected the name of a key");
    }
    (void)snprintf(path, sizeof(path), "%s%s%s", section, section[0] == '\0' ? "" : ".",
                   scalar_text(name));
    const kvf_key_t *key = kvf_config_find(path);
    bool is_section = key == NULL && kvf_config_is_section(path);
    if (key == NULL && !is_section) {
        return FAIL(reader, name->start_mark, "unknown key %s; did you mean %s?", path,
                    kvf_config_nearest(path, nearest, sizeof(nearest)));
    }
    bool *seen = is_section ? &reader->sections[section_idx(path)]
                            : &reader->seen[key - kvf_config_keys(&n)];
    if (*seen) {
        return FAIL(reader, name->start_mark, "%s is there twice; remove one", path);
    }
    *seen = true;
    if (!is_section) {
        return read_value(reader, key);
    }
    yaml_event_t event;
    kvf_status_t status = next_event(reader, &event);
    if (status != KVF_OK) {
        return status;
    }
    status = event.type == YAML_MAPPING_START_EVENT
                 ? read_section(reader, path)
                 : FAIL(reader, event.start_mark, "%s: expected a section of keys, as in %s", path,
                        kvf_config_keys(&n)[section_idx(path)].path);
    yaml_event_delete(&event);
    return status;
}

/* The events of a mapping, after its start. Known sections only, so this is at most two deep. */
static kvf_status_t read_section(reader_t *reader, const char *section) {
    for (;;) {
        yaml_event_t event;
        kvf_status_t status = next_event(reader, &event);
        if (status != KVF_OK) {
            return status;
        }
        bool end = event.type == YAML_MAPPING_END_EVENT;
        if (!end) {
            status = read_key(reader, &event, section);
        }
        yaml_event_delete(&event);
        if (end || status != KVF_OK) {
            return status;
        }
    }
}

static kvf_status_t read_stream(reader_t *reader) {
    unsigned documents = 0;
    for (;;) {
        yaml_event_t event;
        kvf_status_t status = next_event(reader, &event);
        if (status != KVF_OK) {
            return status;
        }
        bool end = event.type == YAML_STREAM_END_EVENT;
        switch (event.type) {
        case YAML_DOCUMENT_START_EVENT:
            if (++documents > 1) {
                status = FAIL(reader, event.start_mark, "a second document; keep one");
            }
            break;
        case YAML_MAPPING_START_EVENT:
            status = read_section(reader, "");
            break;
        case YAML_SCALAR_EVENT:
        case YAML_SEQUENCE_START_EVENT:
        case YAML_ALIAS_EVENT:
            if (event.type != YAML_SCALAR_EVENT || !is_null(&event)) {
                status =
                    FAIL(reader, event.start_mark, "expected keys, as in \"instance: prefill-0\"");
            }
            break;
        default:
            break;
        }
        yaml_event_delete(&event);
        if (end || status != KVF_OK) {
            return status;
        }
    }
}

static kvf_status_t set_folder(kvf_config_t *config, const char *name) {
    const char *slash = strrchr(name, '/');
    char *folder = kvf_strdup(config->alloc, slash == NULL ? "." : name);
    if (folder == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    if (slash != NULL) {
        folder[slash == name ? 1 : slash - name] = '\0';
    }
    kvf_free(config->alloc, config->folder);
    config->folder = folder;
    return KVF_OK;
}

kvf_status_t kvf_config_read_stream(kvf_config_t *config, FILE *file, const char *name,
                                    kvf_detail_t *detail) {
    reader_t reader = {.config = config, .name = name, .detail = detail};
    if (yaml_parser_initialize(&reader.parser) == 0) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "%.100s: no memory", name);
    }
    yaml_parser_set_input_file(&reader.parser, file);
    kvf_status_t status = read_stream(&reader);
    yaml_parser_delete(&reader.parser);
    if (status == KVF_OK) {
        status = set_folder(config, name);
    }
    return status != KVF_ERR_NO_MEMORY ? status
                                       : kvf_fail(detail, status, "%.100s: no memory", name);
}

kvf_status_t kvf_config_read(kvf_config_t *config, const char *path, kvf_detail_t *detail) {
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return kvf_fail(detail, KVF_ERR_IO, "cannot read %.200s: %s", path, strerror(errno));
    }
    kvf_status_t status = kvf_config_read_stream(config, file, path, detail);
    (void)fclose(file);
    return status;
}
