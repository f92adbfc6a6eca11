/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/arguments.h"
#include "tools/command.h"
#include "tools/sim/runner.h"
#include "tools/sim/scale/scale.h"

#include "transceiver/kvferry.h"

#include <argp.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
    kvf_sim_request_t request;
    bool json;
} options_t;

enum { KEY_SEEDS = 1000, KEY_STEPS, KEY_KEEP, KEY_TRACE, KEY_NO_SHORTEN, KEY_JSON, KEY_SCALE };

static void list_scenarios(void) {
    const kvf_scenario_t *scenario;
    for (size_t i = 0; (scenario = kvf_scenario_at(i)) != NULL; i++) {
        (void)printf("%-10s %s\n", scenario->name, scenario->help);
    }
}

static error_t take(int key, char *arg, struct argp_state *state) {
    options_t *options = state->input;
    kvf_sim_request_t *request = &options->request;
    switch (key) {
    case 's':
        request->seed = kvf_argument_count(state, "seed", arg, 0, UINT64_MAX);
        return 0;
    case KEY_SEEDS:
        request->n_seeds = kvf_argument_count(state, "seeds", arg, 1, UINT64_MAX);
        return 0;
    case KEY_STEPS:
        request->n_items = (size_t)kvf_argument_count(state, "steps", arg, 1, KVF_SCRIPT_ITEMS);
        return 0;
    case 'c':
        if (strcmp(arg, "list") == 0) {
            list_scenarios();
            exit(KVF_EXIT_DONE);
        }
        request->scenario = kvf_scenario_find(arg);
        if (request->scenario == NULL) {
            argp_error(state, "there is no scenario %s; --scenario list names all", arg);
        }
        return 0;
    case KEY_KEEP:
        request->keep = arg;
        return 0;
    case KEY_TRACE:
        request->trace = true;
        return 0;
    case KEY_NO_SHORTEN:
        request->shorten = false;
        return 0;
    case KEY_JSON:
        options->json = true;
        return 0;
    case KEY_SCALE:
        argp_error(state, "--scale comes first: kvferry sim --scale ... TRACE");
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "options are all that it takes; %s is one argument too many", arg);
        return 0;
    case ARGP_KEY_END:
        if (request->n_seeds > 1 && (request->keep != NULL || request->trace)) {
            argp_error(state, "--keep and --trace are for one seed");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static json_t *results_json(const kvf_outcome_t *sum) {
    json_t *results = json_object();
    for (int i = 0; i < KVF_WORLD_STATUSES; i++) {
        if (sum->results[i] > 0) {
            (void)json_object_set_new(results, kvf_status_name((kvf_status_t)-i),
                                      json_integer((json_int_t)sum->results[i]));
        }
    }
    return results;
}

static json_t *faults_json(const kvf_outcome_t *sum) {
    json_t *faults = json_object();
    for (int fault = 0; fault < KVF_FAULTS; fault++) {
        (void)json_object_set_new(faults, kvf_fault_name((kvf_fault_t)fault),
                                  json_integer((json_int_t)sum->faults[fault]));
    }
    return faults;
}

/* One line; the words are those of docs/contracts.md. */
static bool print_json(const options_t *options, const kvf_sim_answer_t *answer) {
    const kvf_outcome_t *sum = &answer->sum;
    const kvf_scenario_t *scenario = options->request.scenario;
    char hash[17];
    (void)snprintf(hash, sizeof(hash), "%016" PRIx64, sum->hash);
    json_t *line = json_pack(
        "{s:I, s:I, s:s, s:I, s:s, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:f}",
        "seed", (json_int_t)options->request.seed, "seeds", (json_int_t)answer->n_runs, "scenario",
        scenario != NULL ? scenario->name : "all", "violations",
        (json_int_t)(sum->violation[0] != '\0'), "hash", hash, "events", (json_int_t)sum->events,
        "virtual_s", (double)sum->virtual_us / 1e6, "sends", (json_int_t)sum->sends, "receives",
        (json_int_t)sum->receives, "audits", (json_int_t)sum->audits, "bytes_checked",
        (json_int_t)sum->bytes_checked, "copied_bytes", (json_int_t)sum->copied_bytes,
        "fetched_bytes", (json_int_t)sum->fetched_bytes, "poisoned", (json_int_t)sum->poisoned,
        "results", results_json(sum), "faults", faults_json(sum), "cpu_s", answer->seconds);
    if (line != NULL && sum->violation[0] != '\0') {
        (void)json_object_set_new(line, "violation", json_string(sum->violation));
        (void)json_object_set_new(line, "violation_seed",
                                  json_integer((json_int_t)answer->failed_seed));
        (void)json_object_set_new(line, "violation_scenario", json_string(answer->scenario));
    }
    bool well = line != NULL && json_dumpf(line, stdout, JSON_COMPACT) == 0;
    json_decref(line);
    return putchar('\n') != EOF && fflush(stdout) == 0 && well;
}

static bool print_text(const options_t *options, const kvf_sim_answer_t *answer) {
    const kvf_outcome_t *sum = &answer->sum;
    const kvf_scenario_t *scenario = options->request.scenario;
    (void)printf("%" PRIu64 " runs from seed %" PRIu64 ", scenario %s: %s\n", answer->n_runs,
                 options->request.seed, scenario != NULL ? scenario->name : "all",
                 sum->violation[0] != '\0' ? "a violation" : "no violation");
    (void)printf("%" PRIu64 " events in %.0f virtual seconds; %" PRIu64 " sends, %" PRIu64
                 " receives; %" PRIu64 " audits, %" PRIu64 " bytes of pages compared\n",
                 sum->events, (double)sum->virtual_us / 1e6, sum->sends, sum->receives, sum->audits,
                 sum->bytes_checked);
    (void)printf("results:");
    for (int i = 0; i < KVF_WORLD_STATUSES; i++) {
        if (sum->results[i] > 0) {
            (void)printf(" %s %" PRIu64, kvf_status_name((kvf_status_t)-i), sum->results[i]);
        }
    }
    (void)printf("; %" PRIu64 " pages poisoned\nfaults:", sum->poisoned);
    for (int fault = 0; fault < KVF_FAULTS; fault++) {
        if (sum->faults[fault] > 0) {
            (void)printf(" %s %" PRIu64, kvf_fault_name((kvf_fault_t)fault), sum->faults[fault]);
        }
    }
    (void)printf("\nhash %016" PRIx64 "; %.1f s of one core, %.0f runs a second\n", sum->hash,
                 answer->seconds, (double)answer->n_runs / (answer->seconds + 1e-6));
    return fflush(stdout) == 0;
}

static void print_version(FILE *stream, struct argp_state *state) {
    (void)state;
    (void)fprintf(stream, "%s\n", kvf_version());
}

/* Run by `kvferry sim` (tools/node_exec.c), with "sim" as its first argument. */
int main(int argc, char **argv) {
    static const struct argp_option arguments[] = {
        {.name = "seed", .key = 's', .arg = "S", .doc = "The first seed (default 1)"},
        {.name = "seeds", .key = KEY_SEEDS, .arg = "N", .doc = "Run N seeds (default 1)"},
        {.name = "steps",
         .key = KEY_STEPS,
         .arg = "N",
         .doc = "Requests and faults in each run, at most 256 (default: the seed chooses)"},
        {.name = "scenario",
         .key = 'c',
         .arg = "NAME",
         .doc = "Kind of run; `list` names all (default: the seed chooses)"},
        {.name = "keep",
         .key = KEY_KEEP,
         .arg = "LIST",
         .doc = "Leave all steps out but these, as a report of a violation says"},
        {.name = "trace", .key = KEY_TRACE, .doc = "Print what happens"},
        {.name = "no-shorten",
         .key = KEY_NO_SHORTEN,
         .doc = "Do not look for a shorter run that fails"},
        {.name = "json", .key = KEY_JSON, .doc = "Print one line of JSON"},
        {.name = "scale",
         .key = KEY_SCALE,
         .doc = "Something else, and the first argument: take a trace through a large cluster; "
                "--scale --help tells more"},
        {.name = NULL}};
    const struct argp argp = {
        .options = arguments,
        .parser = take,
        .doc = "Run whole clusters under the simulator: the real state machines, made-up time, "
               "connections, copies and faults, all from a seed. A violation is told with its seed "
               "and a shortened trace; the exit code is 1 then."};
    options_t options = {.request = {.seed = 1, .n_seeds = 1, .shorten = true}};
    kvf_sim_answer_t answer;
    char name[] = "kvferry sim";
    argp_err_exit_status = KVF_EXIT_USAGE;
    argp_program_version_hook = print_version;
    if (argc > 1 && strcmp(argv[1], "sim") == 0) {
        argc--;
        argv++;
    }
    if (argc > 1 && strcmp(argv[1], "--scale") == 0) {
        return kvf_scale_main(argc - 1, argv + 1);
    }
    argv[0] = name;
    if (argp_parse(&argp, argc, argv, 0, NULL, &options) != 0) {
        return KVF_EXIT_USAGE;
    }
    bool well = kvf_sim_run(&options.request, &answer);
    if (answer.n_runs > 0) {
        well &= options.json ? print_json(&options, &answer) : print_text(&options, &answer);
    }
    return well ? KVF_EXIT_DONE : KVF_EXIT_FAILED;
}
