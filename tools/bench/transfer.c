/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/transfer.h"

#include "kvmgr/base/clock.h"
#include "tools/bench/scatter.h"
#include "tools/bench/side.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_US (UINT64_C(60) * 1000000)
/* A receiver that waits is one whose request has arrived: many round trips of loopback. */
#define SETTLE_NS 5000000
/* Prefill that is slower than the link, by so much. */
#define SLOWNESS 2

extern char **environ;

typedef struct bench {
    const kvf_bench_options_t *options;
    kvf_bench_result_t *result;
    kvf_detail_t *detail;
    kvf_bench_side_t side;
    pid_t child;
    int fd;
} bench_t;

static kvf_status_t start_child(bench_t *bench, int argc, char **argv) {
    posix_spawn_file_actions_t actions;
    int ends[2];
    char self[] = "/proc/self/exe", role[] = "sender";
    char **args = calloc((size_t)argc + 2, sizeof(*args));
    if (args == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    args[0] = self;
    args[1] = role;
    for (int i = 1; i < argc; i++) {
        args[i + 1] = argv[i];
    }
    kvf_status_t status = KVF_ERR_IO;
    int error = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        error = errno;
        goto out;
    }
    if (posix_spawn_file_actions_init(&actions) != 0) {
        (void)close(ends[0]);
        (void)close(ends[1]);
        status = KVF_ERR_NO_MEMORY;
        goto out;
    }
    error = posix_spawn_file_actions_adddup2(&actions, ends[1], KVF_BENCH_FD);
    if (error == 0) {
        error = posix_spawn(&bench->child, self, &actions, NULL, args, environ);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(ends[1]);
    if (error == 0) {
        bench->fd = ends[0];
        status = KVF_OK;
    } else {
        (void)close(ends[0]);
        bench->child = 0;
    }
out:
    free(args);
    return error == 0 ? status
                      : kvf_fail(bench->detail, KVF_ERR_IO, "cannot start the sending process: %s",
                                 strerror(error));
}

/* It ends when it hears no more; after an error nothing is to be waited for. */
static void stop_child(bench_t *bench, bool kill_it) {
    if (bench->child > 0) {
        (void)close(bench->fd);
        if (kill_it) {
            (void)kill(bench->child, SIGKILL);
        }
        while (waitpid(bench->child, NULL, 0) < 0 && errno == EINTR) {
        }
    }
}

/* Wait for an answer. An agent without a thread has to go on meanwhile. */
static bool hear(bench_t *bench, kvf_bench_message_t *message) {
    struct pollfd answer = {.fd = bench->fd, .events = POLLIN};
    while (bench->side.caller && bench->side.agent != NULL && poll(&answer, 1, 0) == 0) {
        kvf_bench_drive(&bench->side);
    }
    return kvf_bench_hear(bench->fd, message);
}

static void settle(bench_t *bench) {
    const uint64_t end_ns = kvf_bench_now_ns() + SETTLE_NS;
    while (bench->side.caller && kvf_bench_now_ns() < end_ns) {
        kvf_bench_drive(&bench->side);
    }
    if (!bench->side.caller) {
        (void)nanosleep(&(struct timespec){.tv_nsec = SETTLE_NS}, NULL);
    }
}

static kvf_status_t ask(bench_t *bench, kvf_bench_message_t *message) {
    const kvf_bench_kind_t kind = message->kind;
    if (!kvf_bench_say(bench->fd, message) || !hear(bench, message)) {
        return kvf_fail(bench->detail, KVF_ERR_PEER_LOST,
                        "the sending process ended; what it said is above");
    }
    if (message->kind != kind) {
        return kvf_fail(bench->detail, KVF_ERR_INTERNAL, "the sending process: %.400s",
                        message->text);
    }
    return KVF_OK;
}

static void verify(bench_t *bench, uint64_t rep) {
    for (int64_t i = 0; i < bench->side.n_blocks; i++) {
        bench->result->wrong_bytes +=
            kvf_scatter_wrong(kvf_bench_look(&bench->side, bench->side.slots[i]),
                              bench->options->block_bytes, rep, (uint64_t)i);
    }
}

/* The slots between the blocks belong to others. */
static void poison_neighbours(const bench_t *bench) {
    for (int64_t i = 0; i < bench->side.n_blocks; i++) {
        void *page = kvf_bench_look(&bench->side, bench->side.slots[i] + 1);
        if (page != NULL) {
            kvf_scatter_poison(page, bench->options->block_bytes);
            kvf_bench_put(&bench->side, bench->side.slots[i] + 1);
        }
    }
}

static void verify_neighbours(bench_t *bench) {
    for (int64_t i = 0; i < bench->side.n_blocks; i++) {
        const void *page = kvf_bench_look(&bench->side, bench->side.slots[i] + 1);
        if (page != NULL) {
            bench->result->wrong_bytes += kvf_scatter_touched(page, bench->options->block_bytes);
        }
    }
}

/*
 * One transfer, and what is in the pages afterwards.
 *
 * layer_ns  Of KVF_BENCH_EXPOSED: the time of a layer.
 */
static kvf_status_t repeat(bench_t *bench, uint64_t rep, kvf_bench_measure_t measure,
                           uint64_t layer_ns, uint64_t *took_ns_p) {
    kvf_bench_side_t *side = &bench->side;
    const kvf_table_t table = kvf_bench_table(side);
    kvf_bench_message_t message = {
        .kind = KVF_BENCH_OFFER, .rep = rep, .late = measure != KVF_BENCH_REQUEST};
    kvf_recv_t recv;
    char id[32];
    (void)snprintf(id, sizeof(id), "rep-%" PRIu64, rep);
    kvf_status_t status = ask(bench, &message);
    if (status != KVF_OK) {
        return status;
    }
    for (int64_t i = 0; i < side->n_blocks; i++) {
        kvf_scatter_poison(kvf_bench_look(side, side->slots[i]), bench->options->block_bytes);
        kvf_bench_put(side, side->slots[i]);
    }
    kvf_bench_expect(side);
    const kvf_recv_desc_t desc = {.request_id = id,
                                  .ticket = message.text,
                                  .lengths = {.prompt_len = side->n_blocks},
                                  .allocated_tokens = side->n_blocks,
                                  .tables = &table,
                                  .n_tables = 1,
                                  .timeout_us = TIMEOUT_US,
                                  .handoff = KVF_HANDOFF_NONE,
                                  .direction = bench->options->pull ? KVF_PULL : KVF_PUSH};
    uint64_t began_ns = kvf_bench_now_ns();
    status =
        kvf_recv_open(side->agent, &desc, kvf_bench_on_event, &side->outcome, &recv, bench->detail);
    if (status != KVF_OK) {
        return status;
    }
    if (measure != KVF_BENCH_REQUEST) {
        message = (kvf_bench_message_t){.kind = KVF_BENCH_GO, .ns = layer_ns};
        settle(bench);
        status = ask(bench, &message);
        if (status != KVF_OK) {
            return status;
        }
        began_ns = message.ns;
    }
    status = kvf_bench_wait(side, bench->detail);
    if (status == KVF_OK) {
        *took_ns_p = side->outcome.result_ns - began_ns;
        verify(bench, rep);
    }
    return status;
}

static kvf_status_t measure(bench_t *bench) {
    const kvf_bench_options_t *options = bench->options;
    kvf_bench_result_t *result = bench->result;
    const bool exposed = options->measure == KVF_BENCH_EXPOSED;
    uint64_t took_ns = 0, layer_ns = 0;
    kvf_bench_message_t before = {.kind = KVF_BENCH_COUNT}, after = {.kind = KVF_BENCH_COUNT};
    kvf_status_t status = KVF_OK;
    for (uint64_t rep = 0; rep < options->warmup + options->reps; rep++) {
        const bool warm = rep >= options->warmup;
        if (rep == options->warmup) {
            status = ask(bench, &before);
        }
        if (status == KVF_OK) {
            /* How long prefill takes is made up from how long the last transfer took. */
            status = repeat(bench, rep, exposed && !warm ? KVF_BENCH_REQUEST : options->measure,
                            layer_ns, &took_ns);
        }
        if (status == KVF_OK && warm) {
            status = kvf_samples_add(&result->ns, took_ns);
        }
        if (status != KVF_OK) {
            return status;
        }
        if (exposed && !warm) {
            layer_ns = SLOWNESS * took_ns / bench->side.layout.groups[0].n_layers;
        }
    }
    status = ask(bench, &after);
    if (status != KVF_OK) {
        return status;
    }
    const uint64_t posted = after.pieces - before.pieces;
    result->posting_ns = posted == 0 ? 0 : (double)(after.ns - before.ns) / (double)posted;
    (void)snprintf(result->mover, sizeof(result->mover), "%s", bench->side.outcome.mover);
    result->transport = strcmp(result->mover, "mapped") == 0 ? "shm"
                        : strcmp(result->mover, "cuda") == 0 || strcmp(result->mover, "nccl") == 0
                            ? "device"
                            : options->tls;
    result->bytes = bench->side.outcome.bytes;
    result->pieces = bench->side.outcome.pieces;
    result->layers = bench->side.layout.groups[0].n_layers;
    result->layer_ns = layer_ns;
    return KVF_OK;
}

kvf_status_t kvf_bench_transfer(const kvf_bench_options_t *options, int argc, char **argv,
                                kvf_bench_result_t *result, kvf_detail_t *detail) {
    bench_t bench = {.options = options, .result = result, .detail = detail};
    kvf_bench_message_t hello = {.kind = KVF_BENCH_HELLO};
    const kvf_rand_t *rand = kvf_rand_default();
    rand->fill(rand->ctx, hello.key, sizeof(hello.key));
    /* First, so that it inherits nothing of the agent. */
    kvf_status_t status = start_child(&bench, argc, argv);
    if (status == KVF_OK) {
        status = kvf_bench_side_open(options, 1, hello.key, &bench.side, detail);
    }
    if (status == KVF_OK) {
        status = ask(&bench, &hello);
    }
    if (status == KVF_OK) {
        poison_neighbours(&bench);
        status = measure(&bench);
    }
    if (status == KVF_OK) {
        verify_neighbours(&bench);
    }
    stop_child(&bench, status != KVF_OK);
    kvf_bench_side_close(&bench.side);
    return status;
}
