/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/arguments.h"
#include "tools/command.h"
#include "tools/presets.h"
#include "tools/sim/scale/scale.h"

#include "transceiver/kvferry.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

typedef struct options {
    kvf_scale_options_t scale;
    const char *trace;
    uint64_t limit;
    bool json;
} options_t;

enum {
    KEY_CONTEXT = 1000,
    KEY_GENERATION,
    KEY_MODEL,
    KEY_BLOCK,
    KEY_POOL_PAGES,
    KEY_GBIT,
    KEY_LATENCY,
    KEY_PREFILL,
    KEY_CHUNK,
    KEY_TOKEN,
    KEY_HEARTBEAT,
    KEY_SPEED,
    KEY_EARLY,
    KEY_LIMIT,
    KEY_JSON
};

static const struct argp_option arguments[] = {
    {.name = "context", .key = KEY_CONTEXT, .arg = "N", .doc = "Context nodes (8)"},
    {.name = "generation", .key = KEY_GENERATION, .arg = "N", .doc = "Generation nodes (8)"},
    {.name = "model", .key = KEY_MODEL, .arg = "PRESET", .doc = "Of all nodes (llama-3.1-8b)"},
    {.name = "tokens-per-block", .key = KEY_BLOCK, .arg = "N", .doc = "16, 32, 64 or 128 (64)"},
    {.name = "pool-pages",
     .key = KEY_POOL_PAGES,
     .arg = "N",
     .doc = "Of each layer group of each node (65536)"},
    {.name = "gbit",
     .key = KEY_GBIT,
     .arg = "N",
     .doc = "Of a node's link, each way, in 10^9 bits a second (400)"},
    {.name = "latency-us",
     .key = KEY_LATENCY,
     .arg = "US",
     .doc = "Of a message, and of the word that a copy is done (10)"},
    {.name = "prefill-tokens-per-s",
     .key = KEY_PREFILL,
     .arg = "N",
     .doc = "Of a context node, which computes one prompt at a time (20000)"},
    {.name = "chunk-tokens",
     .key = KEY_CHUNK,
     .arg = "N",
     .doc = "Prompt tokens after which a part is ready (2048)"},
    {.name = "token-us",
     .key = KEY_TOKEN,
     .arg = "US",
     .doc = "A generated token; as long a request keeps its pages (20000)"},
    {.name = "heartbeat-ms", .key = KEY_HEARTBEAT, .arg = "MS", .doc = "Of all nodes (1000)"},
    {.name = "speed", .key = KEY_SPEED, .arg = "FACTOR", .doc = "Of the trace's clock (1)"},
    {.name = "early-ticket",
     .key = KEY_EARLY,
     .doc = "Generation nodes ask when prefill begins, and not at its end"},
    {.name = "limit", .key = KEY_LIMIT, .arg = "N", .doc = "Requests of the trace (all)"},
    {.name = "json", .key = KEY_JSON, .doc = "Print one line of JSON"},
    {.name = NULL}};

static error_t take(int key, char *arg, struct argp_state *state) {
    options_t *options = state->input;
    kvf_scale_options_t *scale = &options->scale;
    char *end;
    switch (key) {
    case KEY_CONTEXT:
        scale->n_context = (uint32_t)kvf_argument_count(state, "context", arg, 1, 10000);
        return 0;
    case KEY_GENERATION:
        scale->n_generation = (uint32_t)kvf_argument_count(state, "generation", arg, 1, 10000);
        return 0;
    case KEY_MODEL:
        scale->model = arg;
        return 0;
    case KEY_BLOCK:
        scale->tokens_per_block =
            (uint32_t)kvf_argument_count(state, "tokens-per-block", arg, 1, 65536);
        return 0;
    case KEY_POOL_PAGES:
        scale->pool_pages = (int64_t)kvf_argument_count(state, "pool-pages", arg, 1, INT32_MAX);
        return 0;
    case KEY_GBIT:
        scale->gbit = kvf_argument_count(state, "gbit", arg, 1, 1000000);
        return 0;
    case KEY_LATENCY:
        scale->latency_us = kvf_argument_count(state, "latency-us", arg, 0, 1000000);
        return 0;
    case KEY_PREFILL:
        scale->prefill_tokens_s =
            kvf_argument_count(state, "prefill-tokens-per-s", arg, 1, UINT64_C(1) << 40);
        return 0;
    case KEY_CHUNK:
        scale->chunk_tokens = (int64_t)kvf_argument_count(state, "chunk-tokens", arg, 1, 1 << 30);
        return 0;
    case KEY_TOKEN:
        scale->token_us = kvf_argument_count(state, "token-us", arg, 0, 1000000);
        return 0;
    case KEY_HEARTBEAT:
        scale->heartbeat_ms = kvf_argument_count(state, "heartbeat-ms", arg, 10, 3600000);
        return 0;
    case KEY_SPEED:
        scale->speed = strtod(arg, &end);
        if (*arg == '\0' || *end != '\0' || !isfinite(scale->speed) || scale->speed < 1e-3 ||
            scale->speed > 1e6) {
            argp_error(state, "--speed: '%s' is not a number from 0.001 to 1000000", arg);
        }
        return 0;
    case KEY_EARLY:
        scale->early = true;
        return 0;
    case KEY_LIMIT:
        options->limit = kvf_argument_count(state, "limit", arg, 1, UINT64_MAX);
        return 0;
    case KEY_JSON:
        options->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (options->trace != NULL) {
            argp_error(state, "one trace is all that it takes; %s is one too many", arg);
        }
        options->trace = arg;
        return 0;
    case ARGP_KEY_END:
        if (options->trace == NULL) {
            argp_error(state, "which trace? tests/data/trace-200.jsonl is one");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- what came out ---- */

static json_t *times(kvf_samples_t *samples) {
    return json_pack("{s:I, s:I, s:I, s:I}", "p50", (json_int_t)kvf_samples_percentile(samples, 50),
                     "p90", (json_int_t)kvf_samples_percentile(samples, 90), "p99",
                     (json_int_t)kvf_samples_percentile(samples, 99), "max",
                     (json_int_t)kvf_samples_percentile(samples, 100));
}

static bool print_json(const options_t *options, kvf_scale_result_t *result) {
    const kvf_scale_options_t *o = &options->scale;
    json_t *line = json_pack(
        "{s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:I, "
        "s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:I}",
        "context", (json_int_t)o->n_context, "generation", (json_int_t)o->n_generation, "model",
        o->model, "tokens_per_block", (json_int_t)o->tokens_per_block, "pool_pages",
        (json_int_t)o->pool_pages, "gbit", (json_int_t)o->gbit, "latency_us",
        (json_int_t)o->latency_us, "early_ticket", o->early, "ok", (json_int_t)result->n_ok,
        "failed", (json_int_t)result->n_failed, "most_in_flight",
        (json_int_t)result->most_in_flight, "virtual_s", (double)result->virtual_us / 1e6,
        "added_us", times(&result->added_us), "transfer_us", times(&result->transfer_us),
        "bytes_alone_us", times(&result->ideal_us), "prefill_us", times(&result->prefill_us),
        "bytes", (json_int_t)result->bytes, "pages", (json_int_t)result->pages, "pieces",
        (json_int_t)result->pieces, "messages", (json_int_t)result->messages, "message_bytes",
        (json_int_t)result->message_bytes, "events", (json_int_t)result->events, "core_cpu_s",
        (double)result->core_ns / 1e9, "peers", (json_int_t)result->n_peers, "peak_bytes",
        (json_int_t)result->peak_bytes, "idle_bytes", (json_int_t)result->idle_bytes,
        "page_record_bytes", (json_int_t)result->page_bytes);
    bool well =
        line != NULL && json_dumpf(line, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) == 0;
    json_decref(line);
    return putchar('\n') != EOF && fflush(stdout) == 0 && well;
}

static void print_times(const char *name, kvf_samples_t *samples) {
    (void)printf("  %-30s", name);
    for (size_t i = 0; i < 4; i++) {
        static const unsigned percents[] = {50, 90, 99, 100};
        (void)printf(" %11.3f", (double)kvf_samples_percentile(samples, percents[i]) / 1e3);
    }
    (void)printf("\n");
}

static bool print_text(const options_t *options, kvf_scale_result_t *result) {
    const kvf_scale_options_t *o = &options->scale;
    const uint64_t n = result->n_ok + result->n_failed;
    (void)printf("%u context and %u generation nodes, %s; %" PRIu64 " requests in %.1f virtual "
                 "seconds: %" PRIu64 " ok, %" PRIu64 " failed%s%s\n",
                 o->n_context, o->n_generation, o->model, n, (double)result->virtual_us / 1e6,
                 result->n_ok, result->n_failed, result->n_failed > 0 ? "; the first: " : "",
                 result->why);
    (void)printf("  %-30s %11s %11s %11s %11s\n", "milliseconds", "p50", "p90", "p99", "max");
    print_times("added to the first token", &result->added_us);
    print_times("from the request to the end", &result->transfer_us);
    print_times("the bytes on an empty link", &result->ideal_us);
    print_times("prefill, with its queue", &result->prefill_us);
    (void)printf("%.2f GB in %" PRIu64 " pages and %" PRIu64 " pieces; %" PRIu64
                 " control messages, %.1f MB; at most %" PRIu64 " transfers at once\n",
                 (double)result->bytes / 1e9, result->pages, result->pieces, result->messages,
                 (double)result->message_bytes / 1e6, result->most_in_flight);
    (void)printf("cores: %.2f s of processor time, %.1f us for a request, %.0f ns for a page; "
                 "memory %.1f MB at most, %.1f MB at the end with %" PRIu64
                 " peers; pages' records %.1f MB\n",
                 (double)result->core_ns / 1e9, (double)result->core_ns / 1e3 / (double)n,
                 (double)result->core_ns / (double)(result->pages + (result->pages == 0)),
                 (double)result->peak_bytes / 1e6, (double)result->idle_bytes / 1e6,
                 result->n_peers, (double)result->page_bytes / 1e6);
    return fflush(stdout) == 0;
}

static void on_invalid(void *ctx, uint64_t line, const char *why) {
    (void)fprintf(stderr, "kvferry sim: %s:%" PRIu64 ": %s\n", ((options_t *)ctx)->trace, line,
                  why);
}

static kvf_status_t read_trace(options_t *options, kvf_trace_t *trace_p, kvf_detail_t *detail) {
    const kvf_trace_want_t want = {options->limit, INT64_MAX, on_invalid, options};
    FILE *file = fopen(options->trace, "re");
    if (file == NULL) {
        return kvf_fail(detail, KVF_ERR_IO, "%s: %s", options->trace, strerror(errno));
    }
    kvf_status_t status = kvf_trace_read(file, &want, kvf_alloc_default(), trace_p, detail);
    (void)fclose(file);
    if (status == KVF_OK && trace_p->n_requests == 0) {
        kvf_trace_cleanup(trace_p);
        status = kvf_fail(detail, KVF_ERR_INVALID, "%s: there is no request in it", options->trace);
    }
    return status;
}

static void print_version(FILE *stream, struct argp_state *state) {
    (void)state;
    (void)fprintf(stream, "%s\n", kvf_version());
}

int kvf_scale_main(int argc, char **argv) {
    const struct argp argp = {
        .options = arguments,
        .parser = take,
        .args_doc = "TRACE",
        .doc = "Take a trace through a cluster of any size: the real state machines, with made-up "
               "time, links and engines, and pages without bytes. Nothing goes wrong; what comes "
               "out is how much later a first token is because of the transfer, and what the state "
               "machines cost."};
    options_t options = {.limit = UINT64_MAX,
                         .scale = {.n_context = 8,
                                   .n_generation = 8,
                                   .model = "llama-3.1-8b",
                                   .tokens_per_block = 64,
                                   .pool_pages = 65536,
                                   .gbit = 400,
                                   .latency_us = 10,
                                   .prefill_tokens_s = 20000,
                                   .chunk_tokens = 2048,
                                   .token_us = 20000,
                                   .heartbeat_ms = 1000,
                                   .speed = 1}};
    kvf_scale_result_t result;
    kvf_trace_t trace;
    kvf_detail_t detail;
    char name[] = "kvferry sim --scale";
    argp_err_exit_status = KVF_EXIT_USAGE;
    argp_program_version_hook = print_version;
    argv[0] = name;
    if (argp_parse(&argp, argc, argv, 0, NULL, &options) != 0) {
        return KVF_EXIT_USAGE;
    }
    kvf_status_t status = read_trace(&options, &trace, &detail);
    if (status != KVF_OK) {
        (void)fprintf(stderr, "kvferry sim: %s\n", detail.text);
        return KVF_EXIT_FAILED;
    }
    status = kvf_scale_run(&options.scale, &trace, &result, &detail);
    bool well = status == KVF_OK && result.n_failed == 0;
    if (status != KVF_OK) {
        (void)fprintf(stderr, "kvferry sim: %s\n", detail.text);
    } else {
        well &= options.json ? print_json(&options, &result) : print_text(&options, &result);
    }
    kvf_scale_cleanup(&result);
    kvf_trace_cleanup(&trace);
    return well ? KVF_EXIT_DONE : KVF_EXIT_FAILED;
}
