/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a short transfer takes on an idle path, and beside a long one between the same two
 * agents: two agents of one process, each with its thread. The long one is started again whenever
 * it ends. docs/benchmarks/fairness.md has figures.
 */
#include "transceiver/kvferry.h"

#include <argp.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOKENS 16 /* of a block */

typedef struct options {
    uint64_t page_kib, long_mib, rounds;
    const char *tls, *mover;
    bool pull;
} options_t;

static options_t options = {
    .page_kib = 16, .long_mib = 1024, .rounds = 300, .tls = "posix,sysv,self", .mover = "ucx"};
static kvf_layout_t layout;
static kvf_agent_t *agents[2]; /* context, generation */
static kvf_pool_t *pools[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;

/* A request whose pages stay, so that it can be made again. */
typedef struct job {
    const char *name;
    int64_t blocks;
    int32_t *slots[2];
    int n_released; /* of its send and its receive */
    uint64_t n_made;
    bool failed;
    double began_us, took_us; /* until the receive's result */
} job_t;

static double now_us(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void must(kvf_status_t status, const char *what, const kvf_detail_t *detail) {
    if (status != KVF_OK) {
        (void)fprintf(stderr, "%s: %s: %s\n", what, kvf_status_name(status),
                      detail == NULL ? "" : detail->text);
        exit(1);
    }
}

static void on_event(job_t *job, const kvf_event_t *event, bool received) {
    (void)pthread_mutex_lock(&lock);
    if (event->kind == KVF_EVENT_RESULT) {
        job->failed |= event->status != KVF_OK;
        job->took_us = received ? now_us() - job->began_us : job->took_us;
    }
    job->n_released += event->kind == KVF_EVENT_RELEASED;
    (void)pthread_cond_broadcast(&cond);
    (void)pthread_mutex_unlock(&lock);
}

static void on_sent(void *ctx, const kvf_event_t *event) {
    on_event(ctx, event, false);
}

static void on_received(void *ctx, const kvf_event_t *event) {
    on_event(ctx, event, true);
}

static void job_start(job_t *job) {
    char id[64], ticket[KVF_TICKET_BYTES];
    kvf_detail_t detail;
    kvf_send_t send;
    kvf_recv_t recv;
    const int64_t prompt = job->blocks * TOKENS;
    const kvf_table_t tables[2] = {{job->slots[0], job->blocks}, {job->slots[1], job->blocks}};
    const kvf_range_t all = {.layer_end = 1, .token_end = prompt};
    (void)snprintf(id, sizeof(id), "%s-%" PRIu64, job->name, job->n_made++);
    job->n_released = 0;
    const kvf_send_desc_t sent = {.request_id = id,
                                  .lengths = {.prompt_len = prompt},
                                  .allocated_tokens = prompt,
                                  .tables = &tables[0],
                                  .n_tables = 1};
    const kvf_recv_desc_t received = {.request_id = id,
                                      .ticket = ticket,
                                      .lengths = {.prompt_len = prompt},
                                      .allocated_tokens = prompt,
                                      .tables = &tables[1],
                                      .n_tables = 1,
                                      .timeout_us = UINT64_C(600000000),
                                      .handoff = KVF_HANDOFF_NONE,
                                      .direction = options.pull ? KVF_PULL : KVF_PUSH};
    must(kvf_send_open(agents[0], &sent, on_sent, job, &send, &detail), "send", &detail);
    must(kvf_send_ready(agents[0], send, &all, NULL, &detail), "ready", &detail);
    must(kvf_send_finish(agents[0], send, NULL, &detail), "finish", &detail);
    must(kvf_send_ticket(agents[0], send, ticket, sizeof(ticket)), "ticket", NULL);
    job->began_us = now_us();
    must(kvf_recv_open(agents[1], &received, on_received, job, &recv, &detail), "receive", &detail);
}

static bool job_done(job_t *job) {
    (void)pthread_mutex_lock(&lock);
    bool done = job->n_released == 2;
    if (job->failed) {
        (void)fprintf(stderr, "a transfer of %s failed\n", job->name);
        exit(1);
    }
    (void)pthread_mutex_unlock(&lock);
    return done;
}

static double job_wait(job_t *job) {
    (void)pthread_mutex_lock(&lock);
    while (job->n_released < 2 && !job->failed) {
        (void)pthread_cond_wait(&cond, &lock);
    }
    (void)pthread_mutex_unlock(&lock);
    (void)job_done(job);
    return job->took_us;
}

static void job_take(job_t *job) {
    for (int side = 0; side < 2; side++) {
        job->slots[side] = calloc((size_t)job->blocks, sizeof(*job->slots[side]));
        if (job->slots[side] == NULL) {
            exit(1);
        }
        must(kvf_pool_acquire(pools[side], job->blocks, job->slots[side]), "pages", NULL);
        for (int64_t i = 0; i < job->blocks;
             i++) { /* touched, so that no first fault is measured */
            memset(kvf_pool_page(pools[side], job->slots[side][i]), 1, options.page_kib << 10);
        }
    }
}

static void agents_start(int64_t n_pages) {
    static const char *const names[] = {"context", "generation"};
    kvf_detail_t detail;
    for (int side = 0; side < 2; side++) {
        kvf_agent_config_t config;
        const bool mapped = strcmp(options.mover, "mapped") == 0;
        const kvf_pool_desc_t pool = {.memory = mapped ? "shm" : "host", .n_pages = n_pages};
        kvf_agent_config_init(&config);
        config.instance = names[side];
        config.control_listen = "127.0.0.1:0";
        config.layout = &layout;
        config.cluster_key[0] = 1;
        config.mover = options.mover;
        config.ucx_tls = options.tls;
        config.log_level = 1;
        must(kvf_agent_create(&config, &agents[side], &detail), "agent", &detail);
        must(kvf_pool_create(agents[side], &pool, &pools[side], &detail), "pool", &detail);
        must(kvf_agent_start_thread(agents[side], &detail), "start", &detail);
    }
}

static int by_value(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* Short transfers, one after the other; beside the long one, if there is one. */
static double measure(const char *name, job_t *brief, job_t *lengthy) {
    double *took = calloc(options.rounds, sizeof(*took));
    if (took == NULL) {
        exit(1);
    }
    for (uint64_t i = 0; i < options.rounds; i++) {
        if (lengthy != NULL && job_done(lengthy)) {
            job_start(lengthy);
        }
        job_start(brief);
        took[i] = job_wait(brief);
    }
    qsort(took, options.rounds, sizeof(*took), by_value);
    double median = took[options.rounds / 2];
    (void)printf("%-22s %10.0f %10.0f %10.0f\n", name, median, took[options.rounds * 99 / 100],
                 took[options.rounds - 1]);
    free(took);
    return median;
}

static error_t take(int key, char *arg, struct argp_state *state) {
    uint64_t *number = key == 'p'   ? &options.page_kib
                       : key == 'l' ? &options.long_mib
                       : key == 'r' ? &options.rounds
                                    : NULL;
    if (number != NULL) {
        *number = strtoull(arg, NULL, 10);
        if (*number == 0 || *number > UINT64_C(1) << 20) {
            argp_error(state, "%s is no number of these", arg);
        }
    } else if (key == 't') {
        options.tls = arg;
    } else if (key == 'm') {
        options.mover = arg;
    } else if (key == 'u') {
        options.pull = true;
    } else {
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

int main(int argc, char **argv) {
    static const struct argp_option arguments[] = {
        {.name = "page-kib", .key = 'p', .arg = "N", .doc = "A page: the short transfer (16)"},
        {.name = "long-mib", .key = 'l', .arg = "N", .doc = "The long transfer (1024)"},
        {.name = "rounds", .key = 'r', .arg = "N", .doc = "Short transfers measured (300)"},
        {.name = "tls", .key = 't', .arg = "LIST", .doc = "UCX transports (posix,sysv,self)"},
        {.name = "mover", .key = 'm', .arg = "NAME", .doc = "ucx or mapped (ucx)"},
        {.name = "pull", .key = 'u', .doc = "The receiver paces"},
        {.name = NULL}};
    const struct argp argp = {.options = arguments, .parser = take};
    if (argp_parse(&argp, argc, argv, 0, NULL, NULL) != 0) {
        return 2;
    }
    /* One byte an element; k and v. */
    layout = (kvf_layout_t){.n_groups = 1,
                            .groups = {{.name = "g",
                                        .n_layers = 1,
                                        .tokens_per_block = TOKENS,
                                        .kv_heads = (uint32_t)options.page_kib / 2,
                                        .head_dim = 64,
                                        .kv_factor = 2,
                                        .dtype = KVF_DTYPE_F8_E4M3}}};
    if (kvf_group_block_bytes(&layout.groups[0]) != options.page_kib << 10) {
        (void)fprintf(stderr, "page-kib must be even\n");
        return 2;
    }
    job_t brief = {.name = "short", .blocks = 1};
    job_t lengthy = {.name = "long",
                     .blocks = (int64_t)((options.long_mib << 10) / options.page_kib)};
    agents_start(lengthy.blocks + 1);
    job_take(&brief);
    job_take(&lengthy);
    job_start(&brief);
    (void)job_wait(&brief); /* connects */
    job_start(&lengthy);
    double alone_us = job_wait(&lengthy);
    (void)printf("long transfer alone: %" PRIu64 " MiB in %.0f ms, %.2f GB/s\n", options.long_mib,
                 alone_us / 1e3, (double)(options.long_mib << 20) / alone_us / 1e3);
    (void)printf("%" PRIu64 " KiB, microseconds %13s %10s %10s\n", options.page_kib, "median",
                 "99 %", "longest");
    double idle = measure("idle", &brief, NULL);
    job_start(&lengthy);
    double beside = measure("beside the long one", &brief, &lengthy);
    (void)job_wait(&lengthy);
    (void)printf("%.1f times the idle median\n", beside / idle);
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < 2; i++) {
            job_t *job = i == 0 ? &brief : &lengthy;
            (void)kvf_pool_release(pools[side], job->blocks, job->slots[side]);
            free(job->slots[side]);
        }
        must(kvf_agent_destroy(agents[side]), "end", NULL);
    }
    return 0;
}
