/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/trace.h"

#include "kvmgr/base/size.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Milliseconds up to which a double is exact to the microsecond: 2^53 us. */
#define MAX_TIMESTAMP_MS 9.0e12

static kvf_status_t read_tokens(const json_t *object, const char *key, int64_t min,
                                int64_t *tokens_p, kvf_detail_t *detail) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < min ||
        json_integer_value(value) > KVF_MAX_TOKENS) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s must be a whole number from %lld to 2^40", key,
                        (long long)min);
    }
    *tokens_p = json_integer_value(value);
    return KVF_OK;
}

static kvf_status_t read_hash_ids(const json_t *object, const kvf_alloc_t *alloc,
                                  kvf_trace_request_t *request, kvf_detail_t *detail) {
    const json_t *ids = json_object_get(object, "hash_ids");
    int64_t pieces = kvf_div_ceil(request->input_tokens, KVF_TRACE_PIECE_TOKENS);
    if (!json_is_array(ids) || json_array_size(ids) != (uint64_t)pieces) {
        return kvf_fail(
            detail, KVF_ERR_INVALID,
            "hash_ids must be a list of %lld numbers, one for each %d of the %lld prompt "
            "tokens",
            (long long)pieces, KVF_TRACE_PIECE_TOKENS, (long long)request->input_tokens);
    }
    size_t n = json_array_size(ids);
    int64_t *copy = kvf_calloc(alloc, n, sizeof(*copy));
    if (copy == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id)) {
            kvf_free(alloc, copy);
            return kvf_fail(detail, KVF_ERR_INVALID, "hash_ids[%zu] is not a whole number", i);
        }
        copy[i] = json_integer_value(id);
    }
    request->hash_ids = copy;
    request->n_hash_ids = n;
    return KVF_OK;
}

/* One line to one request; its hash_ids are allocated on success only. */
static kvf_status_t parse_line(const char *line, size_t bytes, const kvf_alloc_t *alloc,
                               kvf_trace_request_t *request_p, kvf_detail_t *detail) {
    kvf_trace_request_t request = {0};
    json_error_t error;
    json_t *object = json_loadb(line, bytes, JSON_REJECT_DUPLICATES, &error);
    if (object == NULL) {
        if (json_error_code(&error) == json_error_out_of_memory) {
            return KVF_ERR_NO_MEMORY;
        }
        return kvf_fail(detail, KVF_ERR_INVALID, "not JSON: %s (column %d)", error.text,
                        error.column);
    }
    kvf_status_t status;
    const json_t *timestamp = json_object_get(object, "timestamp");
    double timestamp_ms = json_number_value(timestamp);
    if (!json_is_object(object)) {
        status = kvf_fail(detail, KVF_ERR_INVALID, "not a JSON object");
        goto out;
    }
    if (!json_is_number(timestamp) || timestamp_ms < 0 || timestamp_ms > MAX_TIMESTAMP_MS) {
        status = kvf_fail(detail, KVF_ERR_INVALID,
                          "timestamp must be a number of milliseconds, not negative");
        goto out;
    }
    request.timestamp_us = (uint64_t)(timestamp_ms * 1000.0 + 0.5);
    status = read_tokens(object, "input_length", 1, &request.input_tokens, detail);
    if (status == KVF_OK) {
        status = read_tokens(object, "output_length", 0, &request.output_tokens, detail);
    }
    if (status == KVF_OK) {
        status = read_hash_ids(object, alloc, &request, detail);
    }
    if (status == KVF_OK) {
        *request_p = request;
    }
out:
    json_decref(object);
    return status;
}

static kvf_status_t append(kvf_trace_t *trace, const kvf_trace_request_t *request) {
    if (trace->n_requests == trace->room) {
        size_t room = trace->room == 0 ? 64 : 2 * trace->room;
        kvf_trace_request_t *grown =
            kvf_realloc(trace->alloc, trace->requests, room, sizeof(*grown));
        if (grown == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        trace->requests = grown;
        trace->room = room;
    }
    trace->requests[trace->n_requests++] = *request;
    return KVF_OK;
}

/* Take one line that is not empty. */
static kvf_status_t take_line(const kvf_trace_want_t *want, const char *line, size_t bytes,
                              uint64_t number, kvf_trace_t *trace) {
    kvf_detail_t why;
    kvf_trace_request_t request;
    kvf_status_t status = parse_line(line, bytes, trace->alloc, &request, &why);
    if (status == KVF_ERR_INVALID) {
        trace->n_invalid++;
        want->invalid(want->ctx, number, why.text);
        return KVF_OK;
    }
    if (status != KVF_OK) {
        return status;
    }
    if (request.input_tokens > want->max_input_tokens) {
        trace->n_skipped++;
    } else {
        request.line = number;
        status = append(trace, &request);
        if (status == KVF_OK) {
            return KVF_OK; /* the trace owns hash_ids now */
        }
    }
    kvf_free(trace->alloc, request.hash_ids);
    return status;
}

kvf_status_t kvf_trace_read(FILE *file, const kvf_trace_want_t *want, const kvf_alloc_t *alloc,
                            kvf_trace_t *trace_p, kvf_detail_t *detail) {
    kvf_status_t status = KVF_OK;
    kvf_trace_t trace = {.alloc = alloc};
    char *line = NULL;
    size_t line_room = 0;
    struct stat about;
    if (fstat(fileno(file), &about) == 0 && S_ISCHR(about.st_mode)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "a device, not a file with a trace");
    }
    for (uint64_t number = 1; trace.n_requests + trace.n_invalid < want->limit; number++) {
        errno = 0;
        ssize_t bytes = getline(&line, &line_room, file);
        if (bytes < 0) {
            if (ferror(file) || errno != 0) {
                status = kvf_fail(detail, KVF_ERR_IO, "reading line %llu: %s",
                                  (unsigned long long)number, strerror(errno));
            }
            break;
        }
        if (strspn(line, " \t\r\n") == (size_t)bytes) {
            continue;
        }
        status = take_line(want, line, (size_t)bytes, number, &trace);
        if (status != KVF_OK) {
            (void)kvf_fail(detail, status, "no memory for line %llu", (unsigned long long)number);
            break;
        }
    }
    free(line);
    if (status != KVF_OK) {
        kvf_trace_cleanup(&trace);
        return status;
    }
    *trace_p = trace;
    return KVF_OK;
}

void kvf_trace_cleanup(kvf_trace_t *trace) {
    for (size_t i = 0; i < trace->n_requests; i++) {
        kvf_free(trace->alloc, trace->requests[i].hash_ids);
    }
    if (trace->alloc != NULL) {
        kvf_free(trace->alloc, trace->requests);
    }
    *trace = (kvf_trace_t){0};
}
