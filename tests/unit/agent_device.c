/* SPDX-License-Identifier: Apache-2.0 */
/* Pools on a device, as a program makes them; and an agent that cannot have what it takes. The
 * device is the stand-in. */
#include "kernels/digest.h"
#include "tests/support/cuda/standin.h"
#include "transceiver/agent_impl.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_PAGES 8

static const kvf_layout_t layout = {.n_groups = 2,
                                    .groups = {{.name = "one",
                                                .n_layers = 1,
                                                .layers = {0},
                                                .tokens_per_block = 16,
                                                .kv_heads = 1,
                                                .head_dim = 8,
                                                .kv_factor = 2,
                                                .dtype = KVF_DTYPE_BF16},
                                               {.name = "two",
                                                .n_layers = 1,
                                                .layers = {1},
                                                .tokens_per_block = 16,
                                                .kv_heads = 2,
                                                .head_dim = 8,
                                                .kv_factor = 2,
                                                .dtype = KVF_DTYPE_BF16}}};

static kvf_agent_t *agent;
static kvf_pool_t *pools[2];
static kvf_detail_t detail;
static char warned[512];

static void on_log(void *ctx, int level, const char *text) {
    (void)ctx;
    if (level <= 1) {
        (void)strncpy(warned, text, sizeof(warned) - 1);
    }
}

static void open_agent(const char *mover) {
    kvf_agent_config_t config;
    kvf_agent_config_init(&config);
    config.instance = "one";
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    config.mover = mover;
    config.log = on_log;
    config.log_level = 2;
    memset(config.cluster_key, 0x5a, sizeof(config.cluster_key));
    cr_assert_eq(kvf_agent_create(&config, &agent, &detail), KVF_OK, "%s", detail.text);
}

static kvf_status_t make_by(uint32_t g, const char *memory, const char *device_alloc) {
    const kvf_pool_desc_t desc = {g, memory, N_PAGES, device_alloc, false};
    return kvf_pool_create(agent, &desc, &pools[g], &detail);
}

static kvf_status_t make(uint32_t g, const char *memory) {
    return make_by(g, memory, NULL);
}

static int count_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(folder) != NULL) {
        n++;
    }
    (void)closedir(folder);
    return n;
}

static void expect_nothing_left(void) {
    standin_cuda_counts_t counts = standin_cuda_counts();
    cr_expect_eq(counts.allocations + counts.imports + counts.pinned + counts.streams +
                     counts.events + counts.reservations,
                 0);
}

Test(agent_device, bytes) {
    uint8_t bytes[1024], back[1024];
    kvf_pool_info_t info;
    open_agent("auto");
    cr_assert_eq(make(0, "cuda"), KVF_OK, "%s", detail.text);
    cr_assert_eq(make(1, "cuda:0"), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    kvf_pool_get_info(pools[1], &info);
    cr_expect_str_eq(info.memory, "cuda");
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t)(i * 3 + 1);
    }
    cr_assert_eq(kvf_pool_write(pools[1], 7, 24, bytes, 1000, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pool_read(pools[1], 7, 0, back, 1024, &detail), KVF_OK);
    for (size_t i = 0; i < 1024; i++) {
        cr_assert_eq(back[i], i < 24 ? 0 : bytes[i - 24]);
    }
    cr_expect_eq(kvf_pool_read(pools[1], 7, 25, back, 1000, &detail), KVF_ERR_RANGE);
    standin_cuda_fail("cudaMemcpyAsync", 1);
    cr_expect_eq(kvf_pool_write(pools[0], 0, 0, bytes, 512, &detail), KVF_ERR_IO);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
}

Test(agent_device, devices) {
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    open_agent("auto");
    cr_expect_eq(make(0, "cuda:2"), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "sees 2"), "%s", detail.text);
    cr_expect_eq(make(0, "cuda:-1"), KVF_ERR_INVALID);
    cr_expect_eq(make(0, "cuda:1x"), KVF_ERR_INVALID);
    cr_expect_eq(make(0, "cuda1"), KVF_ERR_INVALID);
    cr_assert_eq(make(0, "cuda:1"), KVF_OK, "%s", detail.text);
    cr_expect_eq(make(1, "cuda:0"), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "device 1"), "%s", detail.text);
    cr_expect_eq(make(1, "shm"), KVF_ERR_INVALID);
    cr_assert_eq(make(1, "cuda"), KVF_OK, "the device that the other pool has");
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
}

/* Both pools in one allocation of the caller's, as an engine has them. */
Test(agent_device, memory_of_the_caller) {
    uint8_t *theirs = NULL;
    uint8_t bytes[512], back[512];
    const kvf_pool_desc_t descs[] = {{0, "cuda", N_PAGES, NULL, false},
                                     {1, "cuda", N_PAGES, NULL, false}};
    cr_assert_eq(cudaMalloc((void **)&theirs, 3 * 4096), cudaSuccess);
    open_agent("auto");
    cr_expect_eq(kvf_pool_attach(agent, &descs[1], theirs + 2 * 4096, &pools[1], &detail),
                 KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "ends after"), "%s", detail.text);
    cr_expect_eq(kvf_pool_attach(agent, &descs[0], bytes, &pools[0], &detail), KVF_ERR_INVALID);
    cr_assert_eq(kvf_pool_attach(agent, &descs[0], theirs, &pools[0], &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_pool_attach(agent, &descs[1], theirs + 4096, &pools[1], &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_expect_str_eq(warned, "");
    memset(bytes, 9, sizeof(bytes));
    cr_assert_eq(kvf_pool_write(pools[0], 1, 0, bytes, 512, &detail), KVF_OK);
    cr_assert_eq(kvf_pool_read(pools[0], 1, 0, back, 512, &detail), KVF_OK);
    cr_assert_arr_eq(back, bytes, 512);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    cr_expect_eq(standin_cuda_counts().allocations, 1, "it is the caller's");
    cr_assert_eq(cudaFree(theirs), cudaSuccess);
    expect_nothing_left();
}

/* A device that cannot be had leaves the agent as it was: the CPU's memory does instead. */
Test(agent_device, the_cpu_instead) {
    int32_t slots[2];
    open_agent("auto");
    standin_cuda_fail("cudaMalloc", 1);
    cr_assert_eq(make(0, "cuda"), KVF_ERR_NO_MEMORY);
    cr_assert_eq(make(0, "shm"), KVF_OK, "%s", detail.text);
    cr_assert_eq(make(1, "shm"), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pool_acquire(pools[0], 2, slots), KVF_OK);
    memset(kvf_pool_page(pools[0], slots[0]), 1, 512);
    cr_assert_eq(kvf_pool_release(pools[0], 2, slots), KVF_OK);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    open_agent("auto");
    standin_cuda_fail("cudaMalloc", 1);
    cr_assert_eq(make(0, "cuda:1"), KVF_ERR_NO_MEMORY);
    cr_assert_eq(make(0, "cuda:0"), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
}

/* How memory of a device is allocated is a pool's own affair; its descriptor is one of the agent's
 * as long as it runs. */
Test(agent_device, virtual_memory) {
    uint8_t bytes[512], back[512];
    int fds[2];
    open_agent("cuda");
    cr_expect_eq(make_by(0, "cuda", "mmap"), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "write malloc or vmm"), "%s", detail.text);
    cr_expect_eq(make_by(0, "shm", "vmm"), KVF_ERR_INVALID);
    cr_expect_not_null(strstr(detail.text, "for memory of a device"), "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
    for (int round = 0; round < 2; round++) {
        open_agent("cuda");
        cr_assert_eq(make_by(0, "cuda", "malloc"), KVF_OK, "%s", detail.text);
        cr_assert_eq(make_by(1, "cuda", "vmm"), KVF_OK, "%s", detail.text);
        cr_expect_eq(standin_cuda_counts().reservations, 1);
        cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
        cr_expect_str_eq(warned, "");
        memset(bytes, 9, sizeof(bytes));
        cr_assert_eq(kvf_pool_write(pools[1], N_PAGES - 1, 0, bytes, 512, &detail), KVF_OK);
        cr_assert_eq(kvf_pool_read(pools[1], N_PAGES - 1, 0, back, 512, &detail), KVF_OK);
        cr_assert_arr_eq(back, bytes, 512);
        cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
        expect_nothing_left();
        fds[round] = count_fds(); /* UCX keeps some of the first round's */
    }
    cr_expect_eq(fds[1], fds[0]);
}

/* Pages that cannot be zeroed are not handed out; they are free, and are tried again. */
Test(agent_device, zeroed_when_handed_out_again) {
    const kvf_pool_desc_t desc = {0, "cuda", N_PAGES, "vmm", true};
    uint8_t bytes[512], back[512];
    int32_t slots[N_PAGES];
    kvf_pool_info_t info;
    memset(bytes, 9, sizeof(bytes));
    open_agent("cuda");
    cr_assert_eq(kvf_pool_create(agent, &desc, &pools[0], &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(make(1, "cuda"), KVF_OK);
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pool_acquire(pools[0], 3, slots), KVF_OK);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(kvf_pool_write(pools[0], slots[i], 0, bytes, 512, &detail), KVF_OK);
    }
    /* No neighbours, or one call would do both. */
    const int32_t kept = slots[1];
    cr_assert_eq(kvf_pool_release(pools[0], 1, &slots[0]), KVF_OK);
    cr_assert_eq(kvf_pool_release(pools[0], 1, &slots[2]), KVF_OK);
    standin_cuda_fail("cudaMemsetAsync", 2);
    cr_expect_eq(kvf_pool_acquire(pools[0], 5, slots), KVF_ERR_IO);
    kvf_pool_get_info(pools[0], &info);
    cr_expect_eq(info.free, N_PAGES - 1);
    cr_assert_eq(kvf_pool_release(pools[0], 1, &kept), KVF_OK);
    cr_assert_eq(kvf_pool_acquire(pools[0], N_PAGES, slots), KVF_OK);
    memset(bytes, 0, sizeof(bytes));
    for (int i = 0; i < N_PAGES; i++) {
        cr_assert_eq(kvf_pool_read(pools[0], slots[i], 0, back, 512, &detail), KVF_OK);
        cr_expect_arr_eq(back, bytes, 512, "%d", i);
    }
    cr_assert_eq(kvf_pool_release(pools[0], N_PAGES, slots), KVF_OK);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
}

/* Each call that a start makes fails once: an error, or a way that still works, and nothing stays.
 */
Test(agent_device, what_a_start_needs) {
    static const struct {
        const char *function;
        bool starts; /* by auto; the mover cuda never does */
    } cases[] = {{"cudaStreamCreateWithFlags", false},
                 {"cudaEventCreateWithFlags", false},
                 {"cudaHostAlloc", false},
                 {"kvf_moves_load", false},
                 {"cudaIpcGetMemHandle", true},
                 {"cuMemExportToShareableHandle", true}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int only = 0; only < 2; only++) {
            open_agent(only ? "cuda" : "auto");
            cr_assert_eq(make(0, "cuda"), KVF_OK, "%s", detail.text);
            cr_assert_eq(make_by(1, "cuda", "vmm"), KVF_OK, "%s", detail.text);
            warned[0] = '\0';
            standin_cuda_fail(cases[i].function, 1);
            kvf_status_t status = kvf_agent_start_thread(agent, &detail);
            cr_expect_eq(status == KVF_OK, cases[i].starts && !only, "%s: %s", cases[i].function,
                         detail.text);
            cr_expect_eq(strstr(warned, "goes through tcp") != NULL, status == KVF_OK, "%s",
                         warned);
            cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
            expect_nothing_left();
        }
    }
}

/* ---- bytes that are in their page already, as when a card has written them ---- */

static int n_verified;

static void on_verified(kvf_job_t *job) {
    (void)job;
    n_verified++;
}

static void wake(void *ctx) {
    (void)ctx;
}

/* They are digested where they are, and stay as they are. */
Test(agent_device, what_is_there_is_digested) {
    uint8_t bytes[512], back[512];
    kvf_copier_t *copier;
    open_agent("tcp");
    cr_assert_eq(make(0, "cuda"), KVF_OK, "%s", detail.text);
    cr_assert_eq(make(1, "cuda"), KVF_OK, "%s", detail.text);
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t)(i * 5 + 2);
    }
    cr_assert_eq(kvf_pool_write(pools[0], 3, 0, bytes, 512, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_copier_create(agent, NULL, wake, NULL, &copier, &detail), KVF_OK, "%s",
                 detail.text);
    for (int digests = 0; digests < 2; digests++) {
        kvf_verify_t *job = calloc(1, sizeof(*job));
        cr_assert_not_null(job);
        job->digests = digests == 1;
        job->bytes = 500;
        job->n_items = 1;
        job->items[0] = (kvf_verify_item_t){.slot = 3, .offset = 8, .bytes = 500, .digest = 1};
        kvf_copier_verify(copier, job);
        job->job.done = on_verified; /* and no core hears of it */
        for (int i = 0; i < 10000 && n_verified <= digests; i++) {
            (void)kvf_copier_progress(copier);
            (void)usleep(1000);
        }
        cr_assert_eq(n_verified, digests + 1);
        cr_expect_eq(job->status, KVF_OK);
        cr_expect_eq(job->items[0].digest, digests == 1 ? kvf_digest(bytes + 8, 500) : 0);
        free(job);
    }
    cr_assert_eq(kvf_pool_read(pools[0], 3, 0, back, 512, &detail), KVF_OK);
    cr_expect_arr_eq(back, bytes, 512);
    kvf_copier_destroy(copier);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    expect_nothing_left();
}
