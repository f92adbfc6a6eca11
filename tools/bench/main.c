/* SPDX-License-Identifier: Apache-2.0 */
/* `kvferry bench`: measures a mover between two processes, or what the machine can do at best. */
#include "tools/arguments.h"
#include "tools/bench/side.h"
#include "tools/bench/transfer.h"
#include "tools/command.h"

#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_REPS 1000000
#define MAX_THREADS 64

enum {
    KEY_MOVER = 1000,
    KEY_TLS,
    KEY_BLOCK_BYTES,
    KEY_BLOCKS,
    KEY_POOL_BYTES,
    KEY_LAYERS,
    KEY_MEMORY,
    KEY_DEVICE_ALLOC,
    KEY_DIRECTION,
    KEY_DIGEST,
    KEY_THREADS,
    KEY_BUSY_POLL,
    KEY_DRIVER,
    KEY_MEASURE,
    KEY_REFERENCE,
    KEY_REPS,
    KEY_WARMUP,
    KEY_SEED,
    KEY_JSON
};

static const struct argp_option arguments[] = {
    {.name = "mover",
     .key = KEY_MOVER,
     .arg = "NAME",
     .doc = "auto, mapped, tcp, ucx, cuda, nccl or rdma (auto)"},
    {.name = "tls", .key = KEY_TLS, .arg = "LIST", .doc = "UCX transports, as tcp,self (auto)"},
    {.name = "block-bytes", .key = KEY_BLOCK_BYTES, .arg = "SIZE", .doc = "Of a block (64KiB)"},
    {.name = "blocks", .key = KEY_BLOCKS, .arg = "N", .doc = "Blocks of a transfer (1024)"},
    {.name = "pool-bytes", .key = KEY_POOL_BYTES, .arg = "SIZE", .doc = "Of each pool (1GiB)"},
    {.name = "layers",
     .key = KEY_LAYERS,
     .arg = "N",
     .doc = "Layers of a block (16, or fewer for a small one)"},
    {.name = "memory",
     .key = KEY_MEMORY,
     .arg = "KIND",
     .doc = "Of the pools: host, shm or cuda (shm where --tls can make it; cuda with --mover cuda, "
            "and nccl, which needs two devices)"},
    {.name = "device-alloc",
     .key = KEY_DEVICE_ALLOC,
     .arg = "HOW",
     .doc = "Memory of cuda is allocated: malloc or vmm (malloc)"},
    {.name = "direction", .key = KEY_DIRECTION, .arg = "WAY", .doc = "push or pull (push)"},
    {.name = "digest", .key = KEY_DIGEST, .arg = "on|off", .doc = "Verify what arrives (on)"},
    {.name = "threads",
     .key = KEY_THREADS,
     .arg = "N",
     .doc = "Threads that copy (the library's choice; of a reference 1)"},
    {.name = "busy-poll",
     .key = KEY_BUSY_POLL,
     .arg = "US",
     .doc = "How long both ends look on before they sleep, in microseconds (0)"},
    {.name = "driver",
     .key = KEY_DRIVER,
     .arg = "WHO",
     .doc = "Of the receiver's agent: thread, its own; or caller, which looks on and never sleeps "
            "(thread)"},
    {.name = "measure",
     .key = KEY_MEASURE,
     .arg = "WHAT",
     .doc = "request: from the receiver's request to its verified result; put: from when a "
            "receiver that waits can be served; exposed: from when the last layer is ready, the "
            "others having left before, one by one (request)"},
    {.name = "reference",
     .key = KEY_REFERENCE,
     .arg = "WHAT",
     .doc = "Measure the machine instead: memcpy, nt, socket or wakeup"},
    {.name = "reps", .key = KEY_REPS, .arg = "N", .doc = "Transfers that are measured (20)"},
    {.name = "warmup", .key = KEY_WARMUP, .arg = "N", .doc = "Transfers before them (3)"},
    {.name = "seed", .key = KEY_SEED, .arg = "S", .doc = "Of the places of the blocks (1)"},
    {.name = "json", .key = KEY_JSON, .doc = "Print one line of JSON"},
    {.name = NULL}};

static uint64_t size(struct argp_state *state, const char *option, const char *arg) {
    uint64_t bytes = 0;
    if (kvf_bench_parse_size(arg, &bytes) != KVF_OK) {
        argp_error(state, "--%s: %s is not a number of bytes, or one with KiB, MiB or GiB", option,
                   arg);
    }
    return bytes;
}

/* @return The index of arg among n names. */
static int choice(struct argp_state *state, const char *option, const char *arg,
                  const char *const *names, int n) {
    for (int i = 0; i < n; i++) {
        if (strcmp(arg, names[i]) == 0) {
            return i;
        }
    }
    char all[64] = "";
    for (int i = 0; i < n; i++) {
        (void)snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%s",
                       i == 0 ? "" : (i == n - 1 ? " or " : ", "), names[i]);
    }
    argp_error(state, "--%s: %s is not one of %s", option, arg, all);
    return 0;
}

static error_t take_number(int key, char *arg, struct argp_state *state,
                           kvf_bench_options_t *options) {
    switch (key) {
    case KEY_BLOCK_BYTES:
        options->block_bytes = size(state, "block-bytes", arg);
        return 0;
    case KEY_BLOCKS:
        options->blocks = kvf_argument_count(state, "blocks", arg, 1, INT32_MAX);
        return 0;
    case KEY_POOL_BYTES:
        options->pool_bytes = size(state, "pool-bytes", arg);
        return 0;
    case KEY_LAYERS:
        options->layers = kvf_argument_count(state, "layers", arg, 1, KVF_MAX_GROUP_LAYERS);
        return 0;
    case KEY_THREADS:
        options->threads = kvf_argument_count(state, "threads", arg, 1, MAX_THREADS);
        return 0;
    case KEY_BUSY_POLL:
        options->busy_poll_us = kvf_argument_count(state, "busy-poll", arg, 0, 1000000);
        return 0;
    case KEY_REPS:
        options->reps = kvf_argument_count(state, "reps", arg, 1, MAX_REPS);
        return 0;
    case KEY_WARMUP:
        options->warmup = kvf_argument_count(state, "warmup", arg, 1, MAX_REPS);
        return 0;
    case KEY_SEED:
        options->seed = kvf_argument_count(state, "seed", arg, 0, INT64_MAX);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t take(int key, char *arg, struct argp_state *state) {
    static const char *const digests[] = {"off", "on"}, *const directions[] = {"push", "pull"};
    static const char *const allocs[] = {"malloc", "vmm"};
    static const char *const drivers[] = {"thread", "caller"};
    static const char *const measures[] = {"request", "put", "exposed"};
    static const char *const references[] = {"none", "memcpy", "nt", "socket", "wakeup"};
    kvf_bench_options_t *options = state->input;
    switch (key) {
    case KEY_MOVER:
        options->mover = arg;
        return 0;
    case KEY_TLS:
        options->tls = arg;
        return 0;
    case KEY_MEMORY:
        options->memory = arg;
        return 0;
    case KEY_DEVICE_ALLOC:
        options->device_alloc = allocs[choice(state, "device-alloc", arg, allocs, 2)];
        return 0;
    case KEY_DIRECTION:
        options->pull = choice(state, "direction", arg, directions, 2) == 1;
        return 0;
    case KEY_DIGEST:
        options->digest = choice(state, "digest", arg, digests, 2) == 1;
        return 0;
    case KEY_DRIVER:
        options->caller = choice(state, "driver", arg, drivers, 2) == 1;
        return 0;
    case KEY_MEASURE:
        options->measure = (kvf_bench_measure_t)choice(state, "measure", arg, measures, 3);
        return 0;
    case KEY_REFERENCE:
        options->reference = (kvf_bench_reference_t)choice(state, "reference", arg, references, 5);
        return 0;
    case KEY_JSON:
        options->json = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "options are all that it takes; %s is one argument too many", arg);
        return 0;
    case ARGP_KEY_END: {
        kvf_detail_t detail;
        if (options->memory == NULL) {
            options->memory = kvf_bench_memory(options->mover, options->tls);
        }
        if (options->threads == 0 && options->reference != KVF_BENCH_NONE) {
            options->threads = 1;
        }
        if (kvf_bench_check(options, &detail) != KVF_OK) {
            argp_error(state, "%s", detail.text);
        }
        return 0;
    }
    default:
        return take_number(key, arg, state, options);
    }
}

static void print_version(FILE *stream, struct argp_state *state) {
    (void)state;
    (void)fprintf(stream, "%s\n", kvf_version());
}

static int bench(const kvf_bench_options_t *options, int argc, char **argv) {
    kvf_bench_result_t result = {.ns = {.alloc = kvf_alloc_default()}};
    kvf_detail_t detail = {""};
    kvf_status_t status = options->reference == KVF_BENCH_NONE
                              ? kvf_bench_transfer(options, argc, argv, &result, &detail)
                              : kvf_bench_refer(options, &result, &detail);
    int code = KVF_EXIT_FAILED;
    if (status != KVF_OK) {
        (void)fprintf(stderr, "kvferry bench: %s: %s\n", kvf_status_name(status),
                      detail.text[0] != '\0' ? detail.text : kvf_status_text(status));
    } else {
        status = options->json ? kvf_bench_print_json(options, &result, stdout)
                               : kvf_bench_print_table(options, &result, stdout);
        if (status != KVF_OK) {
            (void)fprintf(stderr, "kvferry bench: cannot write the result: %s\n",
                          kvf_status_text(status));
        } else if (result.wrong_bytes > 0) {
            (void)fprintf(stderr,
                          "kvferry bench: %" PRIu64 " bytes arrived wrong: a defect of the mover; "
                          "please report it\n",
                          result.wrong_bytes);
        } else {
            code = KVF_EXIT_DONE;
        }
    }
    kvf_samples_cleanup(&result.ns);
    return code;
}

/* Run by `kvferry bench`, with "bench" as its first argument; "sender" is the process beside it. */
int main(int argc, char **argv) {
    const struct argp argp = {
        .options = arguments,
        .parser = take,
        .doc = "Measure transfers of scattered blocks between two processes, which it starts. The "
               "blocks lie in random order, no two of them adjacent; every byte is checked after "
               "every transfer, apart from the time that is measured."};
    kvf_bench_options_t options = {.mover = "auto",
                                   .tls = "auto",
                                   .digest = true,
                                   .block_bytes = UINT64_C(64) << 10,
                                   .blocks = 1024,
                                   .pool_bytes = UINT64_C(1) << 30,
                                   .reps = 20,
                                   .warmup = 3,
                                   .seed = 1};
    char name[] = "kvferry bench";
    const bool sender = argc > 1 && strcmp(argv[1], "sender") == 0;
    argp_err_exit_status = KVF_EXIT_USAGE;
    argp_program_version_hook = print_version;
    if (sender || (argc > 1 && strcmp(argv[1], "bench") == 0)) {
        argc--;
        argv++;
    }
    argv[0] = name;
    if (argp_parse(&argp, argc, argv, 0, NULL, &options) != 0) {
        return KVF_EXIT_USAGE;
    }
    return sender ? kvf_bench_sender(&options, KVF_BENCH_FD) : bench(&options, argc, argv);
}
