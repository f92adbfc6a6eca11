/* SPDX-License-Identifier: Apache-2.0 */
/* `kvferry replay`: drives prefill and decode nodes with a trace, as an orchestrator would. */
#include "kvmgr/base/size.h"
#include "tools/arguments.h"
#include "tools/command.h"
#include "tools/replay/report.h"
#include "tools/replay/run.h"
#include "transceiver/kvferry.h"

#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_CONCURRENCY 4096
/* With --speed the trace decides how many run at once; this many keep their times even when nodes
 * are slow. */
#define SPEED_CONCURRENCY 1024
#define MAX_URLS 64
#define MAX_URL_BYTES 1024
#define MAX_TIMEOUT_MS 86400000
/* Failures that are told one by one. */
#define MAX_TOLD 10

enum {
    OPT_TRACE = 256,
    OPT_PREFILL,
    OPT_DECODE,
    OPT_LIMIT,
    OPT_MAX_INPUT,
    OPT_CONCURRENCY,
    OPT_SPEED,
    OPT_DRAFT_LEN,
    OPT_EARLY_TICKET,
    OPT_TIMEOUT_MS,
    OPT_JSON
};

static const struct argp_option options[] = {
    {"trace", OPT_TRACE, "FILE", 0,
     "JSON Lines with timestamp (ms), input_length, output_length, hash_ids", 0},
    {"prefill", OPT_PREFILL, "URL[,URL]", 0, "prefill nodes, for example http://127.0.0.1:8100", 0},
    {"decode", OPT_DECODE, "URL[,URL]", 0,
     "decode nodes; requests go round robin, every pair of nodes meets", 0},
    {"limit", OPT_LIMIT, "N", 0, "stop after the first N requests of the trace", 0},
    {"max-input", OPT_MAX_INPUT, "TOKENS", 0, "skip requests with a longer prompt", 0},
    {"concurrency", OPT_CONCURRENCY, "N", 0, "requests under way at once (8)", 0},
    {"speed", OPT_SPEED, "X", 0,
     "keep the trace's own times, X times as fast, instead of --concurrency", 0},
    {"draft-len", OPT_DRAFT_LEN, "N", 0, "draft tokens that each request asks for (0)", 0},
    {"early-ticket", OPT_EARLY_TICKET, NULL, 0, "ask for tickets before prefills have ended", 0},
    {"timeout-ms", OPT_TIMEOUT_MS, "MS", 0, "for each of the two steps of a request (30000)", 0},
    {"json", OPT_JSON, NULL, 0, "print the summary as one line of JSON", 0},
    {0}};

typedef struct url_list {
    char *text; /* cut into urls */
    const char *urls[MAX_URLS];
    size_t n;
} url_list_t;

typedef struct arguments {
    const char *trace;
    url_list_t prefill;
    url_list_t decode;
    uint64_t limit;
    uint64_t max_input;
    uint64_t concurrency; /* 0: not given */
    double speed;         /* 0: not given */
    uint64_t draft_tokens;
    bool early_ticket;
    uint64_t timeout_ms;
    bool json;
} arguments_t;

static double parse_speed(const struct argp_state *state, const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (*end != '\0' || !isfinite(value) || value <= 0) {
        argp_error(state, "--speed: '%s' is not a number above 0", text);
    }
    return value;
}

static void parse_urls(const struct argp_state *state, const char *option, const char *text,
                       url_list_t *list) {
    if (list->text != NULL) {
        argp_error(state, "--%s is given twice; separate several URLs by commas", option);
    }
    list->text = strdup(text);
    char *rest = list->text;
    for (char *url; rest != NULL && (url = strsep(&rest, ",")) != NULL;) {
        size_t bytes = strlen(url);
        while (bytes > 0 && url[bytes - 1] == '/') {
            url[--bytes] = '\0';
        }
        if ((strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0) ||
            bytes > MAX_URL_BYTES) {
            argp_error(state, "--%s: '%s' is not a URL such as http://127.0.0.1:8100", option, url);
        }
        if (list->n == MAX_URLS) {
            argp_error(state, "--%s: more than %d URLs", option, MAX_URLS);
        }
        list->urls[list->n++] = url;
    }
}

static error_t parse_option(int key, char *arg, struct argp_state *state) {
    arguments_t *arguments = state->input;
    switch (key) {
    case OPT_TRACE:
        arguments->trace = arg;
        return 0;
    case OPT_PREFILL:
        parse_urls(state, "prefill", arg, &arguments->prefill);
        return 0;
    case OPT_DECODE:
        parse_urls(state, "decode", arg, &arguments->decode);
        return 0;
    case OPT_LIMIT:
        arguments->limit = kvf_argument_count(state, "limit", arg, 1, INT64_MAX);
        return 0;
    case OPT_MAX_INPUT:
        arguments->max_input = kvf_argument_count(state, "max-input", arg, 1, KVF_MAX_TOKENS);
        return 0;
    case OPT_CONCURRENCY:
        arguments->concurrency = kvf_argument_count(state, "concurrency", arg, 1, MAX_CONCURRENCY);
        return 0;
    case OPT_SPEED:
        arguments->speed = parse_speed(state, arg);
        return 0;
    case OPT_DRAFT_LEN:
        arguments->draft_tokens =
            kvf_argument_count(state, "draft-len", arg, 0, KVF_MAX_AUX_TOKENS);
        return 0;
    case OPT_EARLY_TICKET:
        arguments->early_ticket = true;
        return 0;
    case OPT_TIMEOUT_MS:
        arguments->timeout_ms = kvf_argument_count(state, "timeout-ms", arg, 1, MAX_TIMEOUT_MS);
        return 0;
    case OPT_JSON:
        arguments->json = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "unexpected argument '%s'", arg);
        return EINVAL;
    case ARGP_KEY_END:
        if (arguments->trace == NULL || arguments->prefill.n == 0 || arguments->decode.n == 0) {
            argp_error(state, "--trace, --prefill and --decode are required");
        }
        if (arguments->concurrency != 0 && arguments->speed != 0) {
            argp_error(state, "--concurrency and --speed exclude each other");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp parser = {
    options,
    parse_option,
    NULL,
    "Replays a trace of requests against prefill and decode nodes, and sums up what they did.\v"
    "A node that answers 429 is asked again after a pause. Exit status: 0 all requests went well, "
    "1 something failed or bytes were wrong, 2 wrong usage. SIGINT and SIGTERM start no more "
    "requests and let the rest end.",
    NULL,
    NULL,
    NULL};

static volatile sig_atomic_t stop;

static void on_signal(int signal_number) {
    (void)signal_number;
    stop = 1;
}

/** Who hears about what goes wrong while it runs. */
typedef struct listener {
    kvf_bar_t bar;
    uint64_t told;
} listener_t;

static void on_invalid(void *ctx, uint64_t line, const char *why) {
    const char *trace = ctx;
    fprintf(stderr, "kvferry replay: %s: line %" PRIu64 ": %s\n", trace, line, why);
}

static void on_failed(void *ctx, const kvf_trace_request_t *request, const char *request_id,
                      const char *code, const char *message) {
    listener_t *listener = ctx;
    if (++listener->told <= MAX_TOLD) {
        kvf_bar_clear(&listener->bar);
        fprintf(stderr, "kvferry replay: line %" PRIu64 " (%s): %s: %s\n", request->line,
                request_id, code, message);
    }
}

static void on_progress(void *ctx, uint64_t ended) {
    listener_t *listener = ctx;
    kvf_bar_draw(&listener->bar, ended);
}

static bool wants_colour(int fd) {
    const char *no_color = getenv("NO_COLOR");
    return isatty(fd) && (no_color == NULL || no_color[0] == '\0');
}

static kvf_status_t read_trace(const arguments_t *arguments, kvf_trace_t *trace_p,
                               kvf_detail_t *detail) {
    FILE *file = fopen(arguments->trace, "re");
    if (file == NULL) {
        return kvf_fail(detail, KVF_ERR_IO, "%s", strerror(errno));
    }
    kvf_trace_want_t want = {.limit = arguments->limit,
                             .max_input_tokens = (int64_t)arguments->max_input,
                             .invalid = on_invalid,
                             .ctx = (void *)(uintptr_t)arguments->trace};
    kvf_trace_t trace;
    kvf_status_t status = kvf_trace_read(file, &want, kvf_alloc_default(), &trace, detail);
    (void)fclose(file);
    if (status != KVF_OK) {
        return status;
    }
    if (trace.n_requests + trace.n_invalid == 0) {
        status =
            kvf_fail(detail, KVF_ERR_INVALID, "%s",
                     trace.n_skipped == 0 ? "no request in it; give another file"
                                          : "all prompts are longer than --max-input; raise it");
        kvf_trace_cleanup(&trace);
        return status;
    }
    *trace_p = trace;
    return KVF_OK;
}

/* Run it, and fill the score in. */
static kvf_status_t replay(const arguments_t *arguments, const kvf_trace_t *trace,
                           kvf_score_t *score, kvf_detail_t *detail) {
    listener_t listener = {.bar = {.out = isatty(STDERR_FILENO) ? stderr : NULL,
                                   .colour = wants_colour(STDERR_FILENO),
                                   .total = trace->n_requests}};
    uint32_t concurrency = arguments->speed > 0 ? SPEED_CONCURRENCY : 8;
    if (arguments->concurrency != 0) {
        concurrency = (uint32_t)arguments->concurrency;
    }
    kvf_replay_config_t config = {.prefill = {arguments->prefill.urls, arguments->prefill.n},
                                  .decode = {arguments->decode.urls, arguments->decode.n},
                                  .concurrency = concurrency,
                                  .speed = arguments->speed,
                                  .draft_tokens = (uint32_t)arguments->draft_tokens,
                                  .early_ticket = arguments->early_ticket,
                                  .timeout_us = arguments->timeout_ms * 1000,
                                  .stop = &stop,
                                  .failed = on_failed,
                                  .progress = on_progress,
                                  .ctx = &listener};
    for (uint64_t i = 0; i < trace->n_invalid; i++) {
        kvf_score_fail(score, kvf_status_name(KVF_ERR_INVALID));
    }
    if (trace->n_requests == 0) {
        return KVF_OK;
    }
    kvf_status_t status = kvf_replay_check_nodes(&config, kvf_alloc_default(), detail);
    if (status != KVF_OK) {
        return status;
    }
    /* Only the first signal is for us: the second one ends the process as usual. */
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    status = kvf_replay_run(&config, trace, kvf_alloc_default(), score);
    kvf_bar_clear(&listener.bar);
    if (listener.told > MAX_TOLD) {
        fprintf(stderr, "kvferry replay: %" PRIu64 " more requests failed\n",
                listener.told - MAX_TOLD);
    }
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "no memory left after %" PRIu64 " requests",
                        score->ok + kvf_score_failed(score));
    }
    return KVF_OK;
}

/* Print the summary. @return The exit code. */
static int report(const arguments_t *arguments, const kvf_trace_t *trace, kvf_score_t *score) {
    kvf_report_t report = {.score = score,
                           .trace = arguments->trace,
                           .skipped = trace->n_skipped,
                           .colour = wants_colour(STDOUT_FILENO)};
    uint64_t failed = kvf_score_failed(score);
    uint64_t all = trace->n_requests + trace->n_invalid;
    kvf_status_t status =
        arguments->json ? kvf_report_json(&report, stdout) : kvf_report_table(&report, stdout);
    if (status != KVF_OK) {
        fprintf(stderr, "kvferry replay: writing the summary: %s\n", kvf_status_text(status));
        return KVF_EXIT_FAILED;
    }
    if (score->ok + failed < all) {
        fprintf(stderr,
                "kvferry replay: stopped by a signal, %" PRIu64 " of %" PRIu64
                " requests were not started\n",
                all - score->ok - failed, all);
    }
    if (failed > 0) {
        fprintf(stderr,
                "kvferry replay: %" PRIu64 " of %" PRIu64
                " requests failed; the lines above and the nodes' logs say why\n",
                failed, score->ok + failed);
        return KVF_EXIT_FAILED;
    }
    return KVF_EXIT_DONE;
}

int kvf_replay_main(int argc, char **argv) {
    arguments_t arguments = {.limit = UINT64_MAX, .max_input = INT64_MAX, .timeout_ms = 30000};
    kvf_detail_t detail;
    kvf_trace_t trace;
    kvf_score_t score;
    int code = KVF_EXIT_FAILED;
    if (argp_parse(&parser, argc, argv, 0, NULL, &arguments) != 0) {
        return KVF_EXIT_USAGE;
    }
    kvf_status_t status = read_trace(&arguments, &trace, &detail);
    if (status != KVF_OK) {
        fprintf(stderr, "kvferry replay: %s: %s\n", arguments.trace, detail.text);
        goto out;
    }
    kvf_score_init(&score, kvf_alloc_default());
    status = replay(&arguments, &trace, &score, &detail);
    if (status != KVF_OK) {
        fprintf(stderr, "kvferry replay: %s\n", detail.text);
    } else {
        code = report(&arguments, &trace, &score);
    }
    kvf_score_cleanup(&score);
    kvf_trace_cleanup(&trace);
out:
    free(arguments.prefill.text);
    free(arguments.decode.text);
    return code;
}
