/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/trace.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOLD 32

/* Lines that were told to be invalid. */
typedef struct told {
    size_t n;
    uint64_t lines[MAX_TOLD];
    char why[MAX_TOLD][KVF_DETAIL_BYTES];
} told_t;

static void on_invalid(void *ctx, uint64_t line, const char *why) {
    told_t *told = ctx;
    cr_assert_lt(told->n, (size_t)MAX_TOLD);
    told->lines[told->n] = line;
    (void)snprintf(told->why[told->n++], KVF_DETAIL_BYTES, "%s", why);
}

static kvf_trace_want_t want_all(told_t *told) {
    return (kvf_trace_want_t){
        .limit = UINT64_MAX, .max_input_tokens = INT64_MAX, .invalid = on_invalid, .ctx = told};
}

static kvf_status_t read_bytes(const char *text, size_t bytes, const kvf_trace_want_t *want,
                               const kvf_alloc_t *alloc, kvf_trace_t *trace_p) {
    FILE *file = fmemopen((void *)(uintptr_t)text, bytes, "r");
    cr_assert_not_null(file);
    kvf_detail_t detail;
    kvf_status_t status = kvf_trace_read(file, want, alloc, trace_p, &detail);
    (void)fclose(file);
    return status;
}

static kvf_trace_t read_all(const char *text, told_t *told) {
    kvf_trace_want_t want = want_all(told);
    kvf_trace_t trace;
    cr_assert_eq(read_bytes(text, strlen(text), &want, kvf_alloc_default(), &trace), KVF_OK);
    return trace;
}

static const char three[] =
    "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 7, \"hash_ids\": [4, 9]}\n"
    "\n"
    "{\"hash_ids\":[-5],\"output_length\":0,\"input_length\":512,\"timestamp\":1500.25,\"more\":{}}"
    "\r\n"
    " \t\r\n"
    "{\"timestamp\": 3, \"input_length\": 1, \"output_length\": 1099511627776, \"hash_ids\": "
    "[9223372036854775807]}";

Test(trace, fields_and_positions) {
    told_t told = {0};
    kvf_trace_t trace = read_all(three, &told);
    static const kvf_trace_request_t expected[] = {
        {.line = 1, .timestamp_us = 0, .input_tokens = 513, .output_tokens = 7, .n_hash_ids = 2},
        {.line = 3, .timestamp_us = 1500250, .input_tokens = 512, .n_hash_ids = 1},
        {.line = 5,
         .timestamp_us = 3000,
         .input_tokens = 1,
         .output_tokens = INT64_C(1) << 40,
         .n_hash_ids = 1},
    };
    static const int64_t ids[][2] = {{4, 9}, {-5}, {INT64_MAX}};
    cr_assert_eq(trace.n_requests, 3);
    cr_assert_eq(told.n + trace.n_invalid + trace.n_skipped, 0);
    for (size_t i = 0; i < 3; i++) {
        const kvf_trace_request_t *request = &trace.requests[i];
        cr_assert_eq(request->line, expected[i].line);
        cr_assert_eq(request->timestamp_us, expected[i].timestamp_us);
        cr_assert_eq(request->input_tokens, expected[i].input_tokens);
        cr_assert_eq(request->output_tokens, expected[i].output_tokens);
        cr_assert_eq(request->n_hash_ids, expected[i].n_hash_ids);
        for (size_t k = 0; k < request->n_hash_ids; k++) {
            cr_assert_eq(request->hash_ids[k], ids[i][k]);
        }
    }
    kvf_trace_cleanup(&trace);
}

Test(trace, many_requests_keep_their_order) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    for (int i = 0; i < 1000; i++) {
        fprintf(out,
                "{\"timestamp\":%d,\"input_length\":%d,\"output_length\":1,\"hash_ids\":[%d]}\n", i,
                i % 512 + 1, 3 * i);
    }
    (void)fclose(out);
    told_t told = {0};
    kvf_trace_t trace = read_all(text, &told);
    cr_assert_eq(trace.n_requests, 1000);
    for (int64_t i = 0; i < 1000; i++) {
        cr_assert_eq(trace.requests[i].input_tokens, i % 512 + 1);
        cr_assert_eq(trace.requests[i].hash_ids[0], 3 * i);
        cr_assert_eq(trace.requests[i].line, (uint64_t)i + 1);
    }
    kvf_trace_cleanup(&trace);
    free(text);
}

#define GOOD "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}"

/* Each is one line; the second text must be in the reason. */
static const struct {
    const char *line;
    const char *why;
} bad[] = {
    {"{\"timestamp\":0,", "not JSON"},
    {"junk", "not JSON"},
    {GOOD " " GOOD, "not JSON"},
    {"[" GOOD "]", "not a JSON object"},
    {"{\"timestamp\":0,\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}",
     "not JSON"},
    {"{\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "timestamp"},
    {"{\"timestamp\":\"0\",\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "timestamp"},
    {"{\"timestamp\":-1,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "timestamp"},
    {"{\"timestamp\":1e300,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "timestamp"},
    {"{\"timestamp\":0,\"output_length\":1,\"hash_ids\":[1]}", "input_length"},
    {"{\"timestamp\":0,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}", "input_length"},
    {"{\"timestamp\":0,\"input_length\":1.0,\"output_length\":1,\"hash_ids\":[1]}", "input_length"},
    {"{\"timestamp\":0,\"input_length\":1099511627777,\"output_length\":1,\"hash_ids\":[1]}",
     "input_length"},
    {"{\"timestamp\":0,\"input_length\":99999999999999999999,\"output_length\":1,\"hash_ids\":[1]}",
     "not JSON"},
    {"{\"timestamp\":0,\"input_length\":1,\"output_length\":-1,\"hash_ids\":[1]}", "output_length"},
    {"{\"timestamp\":0,\"input_length\":1,\"output_length\":true,\"hash_ids\":[1]}",
     "output_length"},
    {"{\"timestamp\":0,\"input_length\":1,\"output_length\":1}", "hash_ids"},
    {"{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":{}}", "hash_ids"},
    {"{\"timestamp\":0,\"input_length\":512,\"output_length\":1,\"hash_ids\":[1,2]}",
     "list of 1 numbers"},
    {"{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}",
     "list of 2 numbers"},
    {"{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1,2.5]}",
     "hash_ids[1]"},
};
#define N_BAD (sizeof(bad) / sizeof(bad[0]))

/* Bad lines between good ones: each is told with its number and reason, and none takes a neighbour
 * with it. */
Test(trace, invalid_lines) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    for (size_t i = 0; i < N_BAD; i++) {
        fprintf(out, GOOD "\n%s\n", bad[i].line);
    }
    (void)fclose(out);
    told_t told = {0};
    kvf_trace_t trace = read_all(text, &told);
    cr_assert_eq(told.n, N_BAD);
    cr_assert_eq(trace.n_invalid, N_BAD);
    cr_assert_eq(trace.n_requests, N_BAD);
    for (size_t i = 0; i < N_BAD; i++) {
        cr_assert_eq(told.lines[i], 2 * i + 2);
        cr_assert_eq(trace.requests[i].line, 2 * i + 1);
        cr_assert(strstr(told.why[i], bad[i].why) != NULL, "line '%s' gave '%s'", bad[i].line,
                  told.why[i]);
    }
    kvf_trace_cleanup(&trace);
    free(text);
}

Test(trace, binary_and_deep_lines_are_invalid) {
    char line[20001];
    memset(line, '[', sizeof(line) - 1);
    line[sizeof(line) - 1] = '\0';
    told_t told = {0};
    kvf_trace_t trace = read_all(line, &told);
    cr_assert_eq(trace.n_invalid, 1);
    kvf_trace_cleanup(&trace);

    static const char zeros[] = "\0\0\0\n" GOOD "\0\n" GOOD "\n";
    kvf_trace_want_t want = want_all(&told);
    cr_assert_eq(read_bytes(zeros, sizeof(zeros) - 1, &want, kvf_alloc_default(), &trace), KVF_OK);
    cr_assert_eq(trace.n_invalid, 2);
    cr_assert_eq(trace.n_requests, 1);
    cr_assert_eq(trace.requests[0].line, 3);
    kvf_trace_cleanup(&trace);
}

Test(trace, limit_counts_requests_and_invalid_lines) {
    static const char text[] = "junk\n" GOOD "\n" GOOD "\njunk\n";
    told_t told = {0};
    kvf_trace_want_t want = want_all(&told);
    want.limit = 2;
    kvf_trace_t trace;
    cr_assert_eq(read_bytes(text, strlen(text), &want, kvf_alloc_default(), &trace), KVF_OK);
    cr_assert_eq(trace.n_requests, 1);
    cr_assert_eq(trace.requests[0].line, 2);
    cr_assert_eq(told.n, 1);
    kvf_trace_cleanup(&trace);
}

Test(trace, longer_prompts_are_skipped_and_do_not_count) {
    told_t told = {0};
    kvf_trace_want_t want = want_all(&told);
    want.max_input_tokens = 512;
    want.limit = 2;
    kvf_trace_t trace;
    cr_assert_eq(read_bytes(three, strlen(three), &want, kvf_alloc_default(), &trace), KVF_OK);
    cr_assert_eq(trace.n_skipped, 1);
    cr_assert_eq(trace.n_requests, 2);
    cr_assert_eq(trace.requests[0].line, 3);
    cr_assert_eq(trace.requests[1].line, 5);
    kvf_trace_cleanup(&trace);
}

Test(trace, empty_file_and_unreadable_one) {
    told_t told = {0};
    kvf_trace_t trace = read_all("\n", &told);
    cr_assert_eq(trace.n_requests, 0);
    kvf_trace_cleanup(&trace);

    kvf_trace_want_t want = want_all(&told);
    kvf_trace_t untouched;
    memset(&untouched, 0xa5, sizeof(untouched));
    kvf_trace_t before = untouched;
    kvf_detail_t detail;
    FILE *folder = fopen(".", "r");
    cr_assert_not_null(folder);
    cr_assert_eq(kvf_trace_read(folder, &want, kvf_alloc_default(), &untouched, &detail),
                 KVF_ERR_IO);
    (void)fclose(folder);
    cr_assert(strstr(detail.text, "directory") != NULL, "%s", detail.text);
    cr_assert_eq(memcmp(&untouched, &before, sizeof(before)), 0);
}

Test(trace, every_allocation_may_fail) {
    uint64_t n_calls = UINT64_MAX;
    for (uint64_t fail_at = 0; fail_at == 0 || fail_at <= n_calls; fail_at++) {
        kvf_alloc_fail_t fail;
        kvf_alloc_fail_init(&fail, fail_at);
        told_t told = {0};
        kvf_trace_want_t want = want_all(&told);
        want.max_input_tokens = 512; /* one of the three is read and dropped */
        kvf_trace_t trace = {0};
        kvf_status_t status = read_bytes(three, strlen(three), &want, &fail.table, &trace);
        cr_assert_eq(status, fail_at == 0 ? KVF_OK : KVF_ERR_NO_MEMORY);
        cr_assert_eq(trace.n_requests, fail_at == 0 ? 2 : 0);
        cr_assert_eq(told.n, 0);
        kvf_trace_cleanup(&trace);
        cr_assert_eq(fail.live, 0);
        if (fail_at == 0) {
            n_calls = fail.calls;
        }
    }
    cr_assert_eq(n_calls, 4); /* three lists of ids, one of requests */
}
