/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/runner.h"

#include <inttypes.h>
#include <malloc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A run that takes longer than this never ends. */
#define RUN_SECONDS 20
/* Effort to shorten a script. */
#define SHORTEN_RUNS 400
#define SHORTEN_SECONDS 30
/* So much of the trace is told. */
#define TOLD_LINES 80

/* An assertion of the core is a violation like any other; so is a run that never ends. */
static sigjmp_buf out_of_run;
static volatile sig_atomic_t running;

static void on_signal(int number) {
    if (running) {
        running = 0;
        siglongjmp(out_of_run, number);
    }
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

/* A run may take so many seconds of processor time, however long it has to wait for it; 0: any. */
static void watch(time_t seconds) {
    const struct itimerval time = {.it_value = {.tv_sec = seconds}};
    (void)setitimer(ITIMER_PROF, &time, NULL);
}

/* Run one script in this process. A world that was left in the middle is not used again. */
static void run_one(kvf_world_t **world, const kvf_script_t *script, FILE *trace,
                    kvf_outcome_t *outcome) {
    int number = sigsetjmp(out_of_run, 1);
    if (number != 0) {
        watch(0);
        (void)snprintf(outcome->violation, sizeof(outcome->violation), "%s",
                       number == SIGABRT ? "an assertion failed" : "the run never ends");
        *world = kvf_world_create();
        return;
    }
    watch(RUN_SECONDS);
    running = 1;
    kvf_world_run(*world, script, trace, outcome);
    running = 0;
    watch(0);
}

/* ---- making a failed script short ---- */

/* Does it fail? In a process of its own, whatever happens to that. */
static bool fails(const kvf_script_t *script, FILE *trace) {
    int status = 0;
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        kvf_world_t *world = kvf_world_create();
        static kvf_outcome_t outcome;
        (void)signal(SIGABRT, SIG_DFL);
        (void)signal(SIGPROF, SIG_DFL);
        watch(RUN_SECONDS);
        if (trace == NULL && freopen("/dev/null", "w", stderr) == NULL) {
            _exit(0);
        }
        kvf_world_run(world, script, trace, &outcome);
        if (trace != NULL) {
            (void)fflush(trace);
        }
        _exit(outcome.violation[0] != '\0');
    }
    return child > 0 && waitpid(child, &status, 0) == child && status != 0;
}

static size_t n_kept(const kvf_script_t *script) {
    size_t n = 0;
    for (size_t i = 0; i < script->n_items; i++) {
        n += !script->items[i].left_out;
    }
    return n;
}

/* Leave out what is not needed for it to fail: large parts first, then smaller ones. Source: delta
 * debugging (Zeller, Hildebrandt, "Simplifying and isolating failure-inducing input", 2002). */
static void make_short(kvf_script_t *script) {
    time_t start = time(NULL);
    uint32_t runs = 0;
    for (size_t part = script->n_items / 2; part > 0;) {
        bool shorter = false;
        for (size_t at = 0; at < script->n_items; at += part) {
            kvf_script_t less = *script;
            for (size_t i = at; i < at + part && i < less.n_items; i++) {
                less.items[i].left_out = true;
            }
            if (n_kept(&less) == n_kept(script)) {
                continue;
            }
            if (++runs > SHORTEN_RUNS || time(NULL) - start > SHORTEN_SECONDS) {
                return;
            }
            if (fails(&less, NULL)) {
                *script = less;
                shorter = true;
            }
        }
        part = shorter && part == 1 ? 1 : part / 2;
    }
}

/* The end of a trace. */
static void tell_trace(FILE *trace) {
    char line[1024];
    uint64_t n = 0, at = 0;
    rewind(trace);
    while (fgets(line, sizeof(line), trace) != NULL) {
        n++;
    }
    rewind(trace);
    while (fgets(line, sizeof(line), trace) != NULL) {
        if (at++ + TOLD_LINES >= n) {
            (void)fputs(line, stderr);
        }
    }
}

static void tell(const kvf_sim_request_t *request, kvf_script_t *script, const char *violation) {
    FILE *trace = tmpfile();
    (void)fprintf(stderr, "kvferry sim: seed %" PRIu64 ", scenario %s: %s\n", script->seed,
                  script->scenario->name, violation);
    if (request->shorten) {
        make_short(script);
    }
    (void)fprintf(stderr, "again: kvferry sim --seed %" PRIu64 " --scenario %s --steps %zu --keep ",
                  script->seed, script->scenario->name, script->n_items);
    const char *comma = "";
    for (size_t i = 0; i < script->n_items; i++) {
        if (!script->items[i].left_out) {
            (void)fprintf(stderr, "%s%zu", comma, i);
            comma = ",";
        }
    }
    (void)fputc('\n', stderr);
    if (trace != NULL) {
        (void)setvbuf(trace, NULL, _IOLBF, 4096);
        (void)fails(script, trace);
        tell_trace(trace);
        (void)fclose(trace);
    }
}

/* ---- all runs ---- */

static bool keep_only(kvf_script_t *script, const char *list) {
    for (size_t i = 0; i < script->n_items; i++) {
        script->items[i].left_out = true;
    }
    for (const char *at = list; *at != '\0';) {
        char *end;
        unsigned long idx = strtoul(at, &end, 10);
        if (end == at || idx >= script->n_items || (*end != ',' && *end != '\0')) {
            (void)fprintf(stderr,
                          "kvferry sim: --keep takes numbers of items, 0 to %zu in this run\n",
                          script->n_items - 1);
            return false;
        }
        script->items[idx].left_out = false;
        at = *end == ',' ? end + 1 : end;
    }
    return true;
}

bool kvf_sim_run(const kvf_sim_request_t *request, kvf_sim_answer_t *answer_p) {
    kvf_world_t *world = kvf_world_create();
    clock_t start = clock();
    static kvf_script_t script;
    static kvf_outcome_t outcome;
    bool well = world != NULL;
    *answer_p = (kvf_sim_answer_t){0};
    /* Requests need large buffers for a moment: they stay in the process. */
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    (void)signal(SIGABRT, on_signal);
    (void)signal(SIGPROF, on_signal);
    for (uint64_t i = 0; i < request->n_seeds && well; i++) {
        kvf_script_draw(request->seed + i, request->scenario, request->n_items, &script);
        if (request->keep != NULL && !keep_only(&script, request->keep)) {
            well = false;
            break;
        }
        run_one(&world, &script, request->trace ? stdout : NULL, &outcome);
        kvf_outcome_add(&answer_p->sum, &outcome);
        answer_p->n_runs++;
        if (outcome.violation[0] != '\0') {
            well = false;
            memcpy(answer_p->sum.violation, outcome.violation, sizeof(outcome.violation));
            answer_p->failed_seed = script.seed;
            answer_p->scenario = script.scenario->name;
            tell(request, &script, outcome.violation);
        }
    }
    answer_p->seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    kvf_world_destroy(world);
    return well;
}
