/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/alloc.h"
#include "kvmgr/base/size.h"
#include "kvmgr/legacy.h"
#include "kvmgr/table.h"
#include "tools/command.h"
#include "tools/plan_json.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Blocks that an answer may have to list one by one: 16 million tokens in blocks of 16. */
#define MAX_LISTED_BLOCKS (INT64_C(1) << 20)

enum side { CONTEXT, GENERATION, SIDES };

static const char *const side_names[SIDES] = {"context", "generation"};

/* What a line says about the whole request. */
struct request {
    kvf_lengths_t lengths;
    int64_t tokens_per_block;
    int64_t cached_tokens;
    bool include_drafts[SIDES];
    kvf_cp_t cp[SIDES];
    int64_t allocated_tokens[SIDES]; /* -1 where it is not given */
    bool skip_holes;
    json_t *groups; /* borrowed */
    kvf_block_counts_t counts[SIDES];
};

/* One layer group of it. */
struct group {
    const char *name; /* borrowed */
    int64_t window;
    int64_t sinks;
    kvf_wanted_t wanted;
    bool two_sided;
    int32_t *slots[SIDES];
    kvf_table_t tables[SIDES];
};

static kvf_status_t fail_no_memory(kvf_detail_t *detail) {
    return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the plan; split the input");
}

static kvf_status_t read_sides(const json_t *line, struct request *request, kvf_detail_t *detail) {
    json_t *drafts, *cp, *allocated;
    kvf_status_t status;
    if ((status = kvf_plan_object(line, "include_drafts", &drafts, detail)) != KVF_OK ||
        (status = kvf_plan_object(line, "cp", &cp, detail)) != KVF_OK ||
        (status = kvf_plan_object(line, "allocated_tokens", &allocated, detail)) != KVF_OK) {
        return status;
    }
    for (enum side side = CONTEXT; side < SIDES; side++) {
        const char *name = side_names[side];
        if ((status = kvf_plan_bool(drafts, name, side == GENERATION,
                                    &request->include_drafts[side], detail)) != KVF_OK ||
            (status = kvf_plan_cp(cp, name, &request->cp[side], detail)) != KVF_OK ||
            (status = kvf_plan_int(allocated, name, 0, KVF_MAX_TOKENS, -1,
                                   &request->allocated_tokens[side], detail)) != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

static kvf_status_t read_holes(const json_t *line, bool *skip_p, kvf_detail_t *detail) {
    const json_t *value = kvf_plan_get(line, "holes");
    const char *text = value != NULL ? json_string_value(value) : "strict";
    if (text == NULL || (strcmp(text, "strict") != 0 && strcmp(text, "skip") != 0)) {
        return kvf_fail(detail, KVF_ERR_INVALID, "holes must be \"strict\" or \"skip\"");
    }
    *skip_p = strcmp(text, "skip") == 0;
    return KVF_OK;
}

static kvf_status_t read_request(const json_t *line, struct request *request,
                                 kvf_detail_t *detail) {
    *request = (struct request){0};
    const struct {
        const char *key;
        int64_t least;
        int64_t absent;
        int64_t *value_p;
    } numbers[] = {
        {"tokens_per_block", 1, KVF_PLAN_REQUIRED, &request->tokens_per_block},
        {"prompt_len", 1, KVF_PLAN_REQUIRED, &request->lengths.prompt_len},
        {"draft_len", 0, 0, &request->lengths.draft_len},
        {"num_extra_kv_tokens", 0, 0, &request->lengths.num_extra_kv_tokens},
        {"total_input_len_cp", 1, 0, &request->lengths.total_input_len_cp},
        {"cached_tokens", 0, 0, &request->cached_tokens},
    };
    kvf_status_t status = KVF_OK;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]) && status == KVF_OK; i++) {
        status = kvf_plan_int(line, numbers[i].key, numbers[i].least, KVF_MAX_TOKENS,
                              numbers[i].absent, numbers[i].value_p, detail);
    }
    if (status != KVF_OK || (status = read_sides(line, request, detail)) != KVF_OK ||
        (status = read_holes(line, &request->skip_holes, detail)) != KVF_OK) {
        return status;
    }
    request->groups = kvf_plan_get(line, "groups");
    if (json_array_size(request->groups) == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "groups must be a list of at least one layer group");
    }
    for (enum side side = CONTEXT; side < SIDES; side++) {
        status = kvf_get_block_counts(&request->lengths, request->include_drafts[side],
                                      request->tokens_per_block, &request->counts[side], detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    /* A rule for a group without a window: the remaining checks on the request's numbers are its.
     */
    kvf_wanted_t unused;
    return kvf_wanted_init(&request->lengths, request->tokens_per_block, 0, 0,
                           request->cached_tokens, request->cp[CONTEXT], request->cp[GENERATION],
                           &unused, detail);
}

static kvf_status_t check_capacities(const struct request *request, kvf_detail_t *detail) {
    kvf_status_t status = KVF_OK;
    for (enum side side = CONTEXT; side < SIDES && status == KVF_OK; side++) {
        if (request->allocated_tokens[side] >= 0) {
            status = kvf_check_capacity(&request->lengths, request->include_drafts[side],
                                        side_names[side], request->allocated_tokens[side], detail);
        }
    }
    return status;
}

/* The list of ids of a side becomes its table. */
static kvf_status_t place_legacy(const struct request *request, const json_t *legacy,
                                 enum side side, struct group *group, kvf_detail_t *detail) {
    kvf_legacy_list_t list = {.has_front_removed = kvf_plan_get(legacy, "front_removed") != NULL};
    int32_t *ids = NULL;
    kvf_legacy_run_t run;
    kvf_status_t status =
        kvf_plan_int(legacy, "front_removed", 0, KVF_MAX_TOKENS, 0, &list.front_removed, detail);
    if (status == KVF_OK) {
        status = kvf_plan_slots(legacy, "ids", &ids, &list.n_ids, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    list.ids = ids;
    status = kvf_legacy_locate(&list, &request->counts[side], group->window, group->sinks,
                               group->wanted.stale, &run, detail);
    if (status != KVF_OK) {
        goto free_ids;
    }
    int64_t n = kvf_legacy_table_blocks(&run);
    if (n > MAX_LISTED_BLOCKS + list.n_ids) {
        status = kvf_fail(detail, KVF_ERR_INVALID,
                          "a list of resident blocks in a prompt of %lld blocks is more than plan "
                          "handles; give ordinals",
                          (long long)request->counts[side].prompt_blocks);
        goto free_ids;
    }
    group->slots[side] = malloc((size_t)(n + 1) * sizeof(int32_t));
    if (group->slots[side] == NULL) {
        status = fail_no_memory(detail);
        goto free_ids;
    }
    kvf_legacy_fill(&list, &run, group->slots[side]);
    group->tables[side] = (kvf_table_t){group->slots[side], n};
free_ids:
    free(ids);
    return status;
}

/* Put "group swa, context side: " in front of a reason that does not know where it happened. */
static kvf_status_t with_place(kvf_status_t status, const char *group, const char *side,
                               kvf_detail_t *detail) {
    kvf_detail_t bare = *detail;
    return kvf_fail(detail, status, "group %.100s, %s side: %s", group, side, bare.text);
}

static kvf_status_t read_side(const struct request *request, const json_t *value, enum side side,
                              struct group *group, kvf_detail_t *detail) {
    const json_t *ordinals = kvf_plan_get(value, "ordinals");
    const json_t *legacy = kvf_plan_get(value, "legacy");
    kvf_status_t status;
    if ((ordinals == NULL) == (legacy == NULL)) {
        status = kvf_fail(detail, KVF_ERR_INVALID, "give either ordinals or legacy");
    } else if (legacy != NULL) {
        status = place_legacy(request, legacy, side, group, detail);
    } else {
        int64_t n;
        status = kvf_plan_slots(value, "ordinals", &group->slots[side], &n, detail);
        if (status == KVF_OK) {
            group->tables[side] = (kvf_table_t){group->slots[side], n};
        }
    }
    if (status != KVF_OK) {
        return with_place(status, group->name, side_names[side], detail);
    }
    kvf_wanted_t live = kvf_wanted_live(&group->wanted, side == CONTEXT);
    return kvf_table_check(&group->tables[side], &live, side_names[side], group->name,
                           kvf_alloc_default(), detail);
}

static void cleanup_group(struct group *group) {
    free(group->slots[CONTEXT]);
    free(group->slots[GENERATION]);
}

/* On error the caller still cleans up. */
static kvf_status_t read_group(const struct request *request, const json_t *value,
                               const json_t *others, struct group *group, kvf_detail_t *detail) {
    *group = (struct group){.name = json_string_value(kvf_plan_get(value, "name"))};
    if (group->name == NULL || group->name[0] == '\0') {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "every entry of groups must be an object with a name");
    }
    if (json_object_get(others, group->name) != NULL) {
        return kvf_fail(detail, KVF_ERR_INVALID, "group %.100s: the name is used twice",
                        group->name);
    }
    kvf_status_t status;
    if ((status = kvf_plan_int(value, "window", 1, KVF_MAX_TOKENS, 0, &group->window, detail)) !=
            KVF_OK ||
        (status = kvf_plan_int(value, "sinks", 0, KVF_MAX_TOKENS, 0, &group->sinks, detail)) !=
            KVF_OK) {
        kvf_detail_t bare = *detail;
        return kvf_fail(detail, status, "group %.100s: %s", group->name, bare.text);
    }
    status = kvf_wanted_init(&request->lengths, request->tokens_per_block, group->window,
                             group->sinks, request->cached_tokens, request->cp[CONTEXT],
                             request->cp[GENERATION], &group->wanted, detail);
    if (status != KVF_OK) {
        return status;
    }
    const json_t *generation = kvf_plan_get(value, "generation");
    group->two_sided = generation != NULL;
    status = read_side(request, kvf_plan_get(value, "context"), CONTEXT, group, detail);
    if (status == KVF_OK && group->two_sided) {
        status = read_side(request, generation, GENERATION, group, detail);
    }
    return status;
}

/* What a group's answer lists, in memory of its own. */
struct lists {
    kvf_pair_t *pairs;
    int64_t *missing[SIDES];
    kvf_pairing_t found;
};

static void cleanup_lists(struct lists *lists) {
    free(lists->pairs);
    free(lists->missing[CONTEXT]);
    free(lists->missing[GENERATION]);
}

/* On error the caller still cleans up. */
static kvf_status_t make_lists(const struct group *group, struct lists *lists,
                               kvf_detail_t *detail) {
    *lists = (struct lists){0};
    if (!group->two_sided) {
        kvf_wanted_t live = kvf_wanted_live(&group->wanted, true);
        lists->pairs = calloc((size_t)group->tables[CONTEXT].n_blocks + 1, sizeof(*lists->pairs));
        if (lists->pairs == NULL) {
            return fail_no_memory(detail);
        }
        lists->found.n_pairs = kvf_select(&group->tables[CONTEXT], &live, true, lists->pairs);
        return KVF_OK;
    }
    kvf_wanted_t held = kvf_wanted_live(&group->wanted, false);
    int64_t wanted = kvf_wanted_count(&group->wanted), live = kvf_wanted_count(&held);
    if (live > MAX_LISTED_BLOCKS) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "group %.100s: plan lists at most %lld live blocks, and the request has "
                        "%lld; take larger blocks or a shorter prompt",
                        group->name, (long long)MAX_LISTED_BLOCKS, (long long)live);
    }
    lists->pairs = calloc((size_t)wanted + 1, sizeof(*lists->pairs));
    lists->missing[CONTEXT] = calloc((size_t)wanted + 1, sizeof(int64_t));
    lists->missing[GENERATION] = calloc((size_t)live + 1, sizeof(int64_t));
    if (lists->pairs == NULL || lists->missing[CONTEXT] == NULL ||
        lists->missing[GENERATION] == NULL) {
        return fail_no_memory(detail);
    }
    lists->found =
        kvf_pair_tables(&group->tables[CONTEXT], &group->tables[GENERATION], &group->wanted,
                        lists->pairs, lists->missing[CONTEXT], lists->missing[GENERATION]);
    return KVF_OK;
}

static json_t *missing_lists(const struct lists *lists, const char *source_key,
                             const char *destination_key) {
    return kvf_plan_missing(&lists->found, source_key, lists->missing[CONTEXT], destination_key,
                            lists->missing[GENERATION]);
}

/* @return NULL without memory. */
static json_t *group_answer(const struct group *group, const struct lists *lists) {
    json_t *answer =
        json_pack("{s:s, s:[I,I], s:o}", "name", group->name, "stale",
                  (json_int_t)group->wanted.stale.first, (json_int_t)group->wanted.stale.end,
                  "pairs", kvf_plan_pairs(lists->pairs, lists->found.n_pairs, group->two_sided));
    if (group->two_sided) {
        json_t *missing = missing_lists(lists, "missing_source", "missing_destination");
        if (json_object_update(answer, missing) != 0) {
            json_decref(answer);
            answer = NULL;
        }
        json_decref(missing);
    }
    return answer;
}

static kvf_status_t plan_group(const struct request *request, const json_t *value, json_t *names,
                               json_t *answers, json_t *missing, kvf_detail_t *detail) {
    struct group group;
    struct lists lists = {0};
    kvf_status_t status = read_group(request, value, names, &group, detail);
    if (status == KVF_OK) {
        status = make_lists(&group, &lists, detail);
    }
    if (status == KVF_OK) {
        bool lacks = lists.found.n_missing_source + lists.found.n_missing_destination > 0;
        if (json_object_set_new(names, group.name, json_true()) != 0 ||
            json_array_append_new(answers, group_answer(&group, &lists)) != 0 ||
            (lacks && !request->skip_holes &&
             json_object_set_new(missing, group.name,
                                 missing_lists(&lists, "source", "destination")) != 0)) {
            status = fail_no_memory(detail);
        }
    }
    cleanup_lists(&lists);
    cleanup_group(&group);
    return status;
}

static json_t *per_side(int64_t context, int64_t generation) {
    return json_pack("{s:I, s:I}", side_names[CONTEXT], (json_int_t)context, side_names[GENERATION],
                     (json_int_t)generation);
}

static json_t *request_answer(const struct request *request, json_t *groups) {
    const kvf_block_counts_t *c = &request->counts[CONTEXT], *g = &request->counts[GENERATION];
    return json_pack("{s:b, s:I, s:o, s:o, s:o, s:O}", "ok", 1, "prompt_blocks",
                     (json_int_t)c->prompt_blocks, "capacity_tokens",
                     per_side(c->capacity_tokens, g->capacity_tokens), "alloc_blocks",
                     per_side(c->alloc_blocks, g->alloc_blocks), "scratch_blocks",
                     per_side(c->scratch_blocks, g->scratch_blocks), "groups", groups);
}

/* Plan a parsed line. On KVF_ERR_UNCOVERED `missing` says what; else it is of no use. */
static kvf_status_t plan_line(const json_t *line, json_t *missing, json_t **answer_p,
                              kvf_detail_t *detail) {
    struct request request;
    kvf_status_t status = read_request(line, &request, detail);
    if (status != KVF_OK || (status = check_capacities(&request, detail)) != KVF_OK) {
        return status;
    }
    json_t *names = json_object(), *groups = json_array(), *answer = NULL;
    for (size_t i = 0; i < json_array_size(request.groups) && status == KVF_OK; i++) {
        status =
            plan_group(&request, json_array_get(request.groups, i), names, groups, missing, detail);
    }
    if (status == KVF_OK && json_object_size(missing) > 0) {
        status =
            kvf_fail(detail, KVF_ERR_UNCOVERED,
                     "%zu of %zu groups want blocks that have no page on one of the sides (see "
                     "missing); bind them, or ask for holes: skip",
                     json_object_size(missing), json_array_size(groups));
    }
    if (status == KVF_OK) {
        answer = request_answer(&request, groups);
        status = answer != NULL ? KVF_OK : fail_no_memory(detail);
    }
    json_decref(names);
    json_decref(groups);
    if (status == KVF_OK) {
        *answer_p = answer;
    }
    return status;
}

/* Answer one line of input. @return NULL without memory. */
static json_t *answer_text(const char *text, size_t bytes) {
    kvf_detail_t detail = {""};
    json_error_t error;
    json_t *answer = NULL, *missing = json_object();
    json_t *line = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    kvf_status_t status;
    if (strspn(text, " \t\r\n") == bytes) {
        status = kvf_fail(&detail, KVF_ERR_INVALID, "empty line; a request is a JSON object");
    } else if (line == NULL) {
        status = kvf_fail(&detail, KVF_ERR_INVALID, "not a line of JSON: %s (column %d)",
                          error.text, error.column);
    } else if (!json_is_object(line)) {
        status = kvf_fail(&detail, KVF_ERR_INVALID, "a request is a JSON object");
    } else {
        status = plan_line(line, missing, &answer, &detail);
    }
    if (status != KVF_OK && status != KVF_ERR_NO_MEMORY) {
        answer = kvf_plan_refusal(status, &detail);
    }
    json_t *id = json_object_get(line, "id");
    if (answer != NULL &&
        ((id != NULL && json_object_set(answer, "id", id) != 0) ||
         (status == KVF_ERR_UNCOVERED && json_object_set(answer, "missing", missing) != 0))) {
        json_decref(answer);
        answer = NULL;
    }
    json_decref(line);
    json_decref(missing);
    return answer;
}

struct options {
    bool json;
};

static error_t parse_option(int key, char *arg, struct argp_state *state) {
    struct options *options = state->input;
    (void)arg;
    if (key == 'j') {
        options->json = true;
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        argp_error(state, "requests come on stdin; %s is one argument too many", arg);
    }
    return ARGP_ERR_UNKNOWN;
}

static bool write_answer(FILE *out, const json_t *answer, bool people) {
    if (people) {
        return kvf_plan_print(out, answer);
    }
    return json_dumpf(answer, out, JSON_COMPACT) == 0 && fputc('\n', out) != EOF &&
           fflush(out) == 0;
}

/* @return What went wrong, or NULL at the end of the input. */
static const char *plan_stream(FILE *in, FILE *out, bool people) {
    const char *wrong = NULL;
    char *text = NULL;
    size_t room = 0;
    ssize_t bytes;
    while (wrong == NULL && (bytes = getline(&text, &room, in)) >= 0) {
        json_t *answer = answer_text(text, (size_t)bytes);
        if (answer == NULL) {
            wrong = "no memory for an answer; split the request";
        } else if (!write_answer(out, answer, people)) {
            wrong = "cannot write the answer; see that stdout is open and has room";
        }
        json_decref(answer);
    }
    if (wrong == NULL && !feof(in)) {
        wrong = "cannot read requests; see that stdin is open";
    }
    free(text);
    return wrong;
}

int kvf_plan_main(int argc, char **argv) {
    static const struct argp_option table[] = {
        {"json", 'j', NULL, 0, "Answer in JSON Lines on a terminal, too", 0}, {0}};
    const struct argp argp = {
        .options = table,
        .parser = parse_option,
        .doc = "Say what a transfer would move, and why, without moving it.\v"
               "Requests are JSON Lines on stdin, one answer each; the format is in "
               "docs/contracts.md, \"kvferry plan\". Exit code 0 when every line was answered."};
    struct options options = {false};
    if (argp_parse(&argp, argc, argv, 0, NULL, &options) != 0) {
        return KVF_EXIT_USAGE;
    }
    const char *wrong = plan_stream(stdin, stdout, !options.json && isatty(STDOUT_FILENO));
    if (wrong != NULL) {
        (void)fprintf(stderr, "kvferry plan: %s\n", wrong);
        return KVF_EXIT_FAILED;
    }
    return KVF_EXIT_DONE;
}
