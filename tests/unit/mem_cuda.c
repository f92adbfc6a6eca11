/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device, with the stand-in for the CUDA runtime. */
#include "tests/support/cuda/standin.h"
#include "transceiver/mem/cuda.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES UINT64_C(100000)

static kvf_alloc_fail_t memory;
static kvf_cuda_t *cuda;
static kvf_mem_t mem;
static kvf_detail_t detail;

static void start(void) {
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, -1, &cuda, &detail), KVF_OK, "%s", detail.text);
}

static void start_with_memory(void) {
    start();
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    cr_assert_eq(kind->alloc(kind, BYTES, &mem, &detail), KVF_OK, "%s", detail.text);
}

static void stop(void) {
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
    standin_cuda_counts_t counts = standin_cuda_counts();
    cr_assert_eq(counts.allocations + counts.imports + counts.pinned + counts.reservations, 0);
}

static uint8_t byte_at(uint64_t i) {
    return (uint8_t)(i * 7 + (i >> 8) * 31);
}

Test(mem_cuda, written_and_read) {
    static uint8_t bytes[BYTES], back[BYTES];
    start_with_memory();
    cr_assert_eq(mem.kind->type, KVF_MEM_CUDA);
    cr_assert_not(mem.kind->host_access);
    cr_assert_eq(mem.kind->read(&mem, 0, back, BYTES, &detail), KVF_OK);
    for (uint64_t i = 0; i < BYTES; i++) {
        cr_assert_eq(back[i], 0);
        bytes[i] = byte_at(i);
    }
    cr_assert_eq(mem.kind->write(&mem, 1000, bytes, 50000, NULL, &detail), KVF_OK);
    cr_assert_eq(mem.kind->read(&mem, 0, back, BYTES, &detail), KVF_OK);
    for (uint64_t i = 0; i < BYTES; i++) {
        cr_assert_eq(back[i], i >= 1000 && i < 51000 ? byte_at(i - 1000) : 0, "byte %lu", i);
    }
    mem.kind->free(&mem);
    cr_assert_null(mem.base);
    mem = (kvf_mem_t){0};
    kvf_cuda_kind(cuda)->free(&mem);
    stop();
}

/* Queued on the caller's stream, the source is free at once, and what follows there sees it. */
Test(mem_cuda, written_on_a_stream) {
    cudaStream_t stream;
    uint8_t bytes[64], back[64];
    start_with_memory();
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    standin_cuda_hold(true);
    memset(bytes, 5, sizeof(bytes));
    cr_assert_eq(mem.kind->write(&mem, 10, bytes, sizeof(bytes), stream, &detail), KVF_OK);
    memset(bytes, 6, sizeof(bytes));
    standin_cuda_hold(false);
    cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
    cr_assert_eq(mem.kind->read(&mem, 10, back, sizeof(back), &detail), KVF_OK);
    memset(bytes, 5, sizeof(bytes));
    cr_assert_arr_eq(back, bytes, sizeof(back));
    cr_assert_eq(cudaStreamDestroy(stream), cudaSuccess);
    mem.kind->free(&mem);
    stop();
}

/* Pieces of both kinds of memory; on return it has happened, whatever is said in between. */
Test(mem_cuda, zeroed) {
    static uint8_t bytes[BYTES], back[BYTES];
    static const int32_t slots[] = {9, 3, 4, 2, 6}; /* three calls: 2 to 4 are one */
    start();
    const kvf_mem_kind_t *kinds[] = {kvf_cuda_kind(cuda), kvf_cuda_vmm_kind(cuda)};
    memset(bytes, 0x77, sizeof(bytes));
    for (int k = 0; k < 2; k++) {
        cr_assert_eq(kinds[k]->alloc(kinds[k], BYTES, &mem, &detail), KVF_OK);
        cr_assert_eq(mem.kind->write(&mem, 0, bytes, BYTES, NULL, &detail), KVF_OK);
        standin_cuda_fail("cudaStreamSynchronize", 1); /* which proves nothing */
        cr_assert_eq(mem.kind->zero(&mem, 1000, 5, slots, &detail), KVF_OK, "%s", detail.text);
        cr_assert_eq(mem.kind->read(&mem, 0, back, BYTES, &detail), KVF_OK);
        for (uint64_t i = 0; i < BYTES; i++) {
            uint64_t slot = i / 1000;
            bool gone = (slot >= 2 && slot <= 4) || slot == 6 || slot == 9;
            cr_assert_eq(back[i], gone ? 0 : 0x77, "byte %lu", i);
        }
        standin_cuda_fail("cudaMemsetAsync", 4); /* not this time */
        cr_assert_eq(mem.kind->zero(&mem, 1000, 5, slots, &detail), KVF_OK);
        standin_cuda_fail("cudaMemsetAsync", 3);
        cr_assert_eq(mem.kind->zero(&mem, 1000, 5, slots, &detail), KVF_ERR_IO);
        cr_assert_not_null(strstr(detail.text, "zeroing pages"), "%s", detail.text);
        mem.kind->free(&mem);
    }
    stop();
}

/* The sanitizer would take the signal for its own. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "handle_segv=0";
}

/* The stand-in is as strict as a device. */
Test(mem_cuda, the_cpu_does_not_reach_it, .signal = SIGSEGV) {
    start_with_memory();
    mem.base[5] = 1;
}

Test(mem_cuda, no_device) {
    kvf_alloc_fail_init(&memory, 0);
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "0", 1);
    cr_assert_eq(kvf_cuda_open(&memory.table, -1, &cuda, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "NVIDIA driver"), "%s", detail.text);
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    cr_assert_eq(kvf_cuda_open(&memory.table, 2, &cuda, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "sees 2"), "%s", detail.text);
    cr_assert_eq(memory.live, 0);
}

/* Every call works on its own device, and the thread's current one stays what it was. */
Test(mem_cuda, the_other_device) {
    int current = -1;
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 1, &cuda, &detail), KVF_OK);
    cr_assert_eq(kvf_cuda_number(cuda), 1);
    cr_assert_str_eq(kvf_cuda_name(cuda), "stand-in 1");
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    cr_assert_eq(kind->alloc(kind, BYTES, &mem, &detail), KVF_OK);
    struct cudaPointerAttributes attributes;
    cr_assert_eq(cudaPointerGetAttributes(&attributes, mem.base), cudaSuccess);
    cr_assert_eq(attributes.device, 1);
    cr_assert_eq(cudaGetDevice(&current), cudaSuccess);
    cr_assert_eq(current, 0);
    cr_assert_eq(standin_cuda_counts().contexts, 2, "the first device has got none");
    mem.kind->free(&mem);
    stop();
}

Test(mem_cuda, attached) {
    void *theirs = NULL, *cpu = malloc(BYTES);
    kvf_mem_t whole, part;
    start();
    cr_assert_eq(cudaMalloc(&theirs, 3 * 4096), cudaSuccess);
    cr_assert_eq(kvf_cuda_attach(cuda, theirs, 3 * 4096, &whole, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(whole.base, theirs);
    cr_assert_eq(kvf_cuda_attach(cuda, (uint8_t *)theirs + 4096, 2 * 4096, &part, &detail), KVF_OK);
    cr_assert_eq(kvf_cuda_attach(cuda, (uint8_t *)theirs + 4096, 2 * 4096 + 1, &part, &detail),
                 KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "ends after 8192 of 8193 bytes"), "%s", detail.text);
    cr_assert_eq(kvf_cuda_attach(cuda, cpu, BYTES, &part, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "not that of CUDA device 0"), "%s", detail.text);
    cr_assert_eq(cudaFree(theirs), cudaSuccess);
    free(cpu);
    stop();
}

Test(mem_cuda, failures_are_told_and_leave_nothing) {
    static const struct {
        const char *function;
        kvf_status_t status;
    } cases[] = {{"cudaMalloc", KVF_ERR_NO_MEMORY},
                 {"cudaMemset", KVF_ERR_IO},
                 {"cudaDeviceSynchronize", KVF_ERR_IO},
                 {"cuCtxPushCurrent", KVF_ERR_IO}};
    start();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
        standin_cuda_fail(cases[i].function, 1);
        cr_expect_eq(kind->alloc(kind, BYTES, &mem, &detail), cases[i].status, "%s",
                     cases[i].function);
        cr_expect_not_null(strstr(detail.text, "100000 bytes of device 0"), "%s", detail.text);
        cr_expect_eq(standin_cuda_counts().allocations, 0);
    }
    stop();
    for (size_t n = 1; n < 20; n++) { /* functions of the driver that are looked up */
        static const char *const calls[] = {"cudaGetDeviceCount", "cudaGetDevice",
                                            "cudaGetDeviceProperties", "cuDevicePrimaryCtxRetain",
                                            "cudaGetDriverEntryPointByVersion"};
        for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
            standin_cuda_fail(calls[i], n);
            kvf_status_t status = kvf_cuda_open(&memory.table, 0, &cuda, &detail);
            if (status == KVF_OK) {
                kvf_cuda_close(cuda);
            } else {
                cr_expect_eq(status, KVF_ERR_IO);
            }
            cr_expect_eq(memory.live, 0);
        }
    }
    kvf_alloc_fail_init(&memory, 1);
    standin_cuda_fail("", 0);
    cr_expect_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_ERR_NO_MEMORY);
}

/* ---- another process ---- */

static int to_child[2], to_parent[2];

/* Run a function in a process of its own, which never used the runtime. */
static pid_t in_child(int (*run)(void)) {
    cr_assert_eq(pipe(to_child) + pipe(to_parent), 0);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(run());
    }
    return pid;
}

static int wait_for(pid_t pid) {
    int status;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    return status;
}

/* Makes memory, offers a part of it, and goes when it is told to. */
static int offer(void) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES], go;
    void *theirs = NULL;
    kvf_mem_t part;
    uint8_t bytes[256];
    int fd = 0;
    const kvf_alloc_t *alloc = kvf_alloc_default();
    kvf_cuda_t *own;
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = byte_at(i);
    }
    if (kvf_cuda_open(alloc, 0, &own, NULL) != KVF_OK ||
        cudaMalloc(&theirs, 65536) != cudaSuccess ||
        kvf_cuda_attach(own, (uint8_t *)theirs + 12288, 8192, &part, NULL) != KVF_OK ||
        part.kind->write(&part, 100, bytes, sizeof(bytes), NULL, NULL) != KVF_OK ||
        kvf_cuda_export(&part, handle, &fd, NULL) != KVF_OK || fd != -1 ||
        write(to_parent[1], handle, sizeof(handle)) != sizeof(handle)) {
        return 1;
    }
    return read(to_child[0], &go, 1) == 1 ? 0 : 2;
}

Test(mem_cuda, opened_by_another_process) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES], bytes[256];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    pid_t pid = in_child(offer);
    cr_assert_eq(read(to_parent[0], handle, sizeof(handle)), sizeof(handle));
    start();
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 8192, &import, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq((uint8_t *)import.base - (uint8_t *)import.mapping, 12288);
    /* A peer that says more than there is, or that it begins elsewhere: the offset is the eight
     * bytes behind the device's 16. */
    kvf_cuda_import_t none = {NULL, NULL, 0};
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 65536 - 12288, &none, &detail), KVF_OK);
    kvf_cuda_close_import(cuda, &none);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 65536 - 12288 + 1, &none, &detail),
                 KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "bytes that it spoke of"), "%s", detail.text);
    static const uint64_t offsets[] = {65536 - 8191, 65537, UINT64_MAX, UINT64_MAX - 8191};
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        uint8_t wrong[KVF_CUDA_HANDLE_BYTES];
        memcpy(wrong, handle, sizeof(wrong));
        memcpy(wrong + 16, &offsets[i], sizeof(offsets[i]));
        cr_assert_eq(kvf_cuda_open_import(cuda, wrong, -1, 8192, &none, &detail), KVF_ERR_INVALID);
    }
    cr_assert_eq(standin_cuda_counts().imports, 1);
    kvf_mem_t there = {import.base, 8192, kvf_cuda_kind(cuda), NULL};
    cr_assert_eq(there.kind->read(&there, 100, bytes, sizeof(bytes), &detail), KVF_OK);
    for (size_t i = 0; i < sizeof(bytes); i++) {
        cr_assert_eq(bytes[i], byte_at(i));
    }
    cr_assert_eq(write(to_child[1], "x", 1), 1);
    cr_assert_eq(wait_for(pid), 0);
    kvf_cuda_close_import(cuda, &import);
    cr_assert_null(import.mapping);
    kvf_cuda_close_import(cuda, &import); /* harmless */
    /* Its owner has ended: the handle is none any more. */
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 8192, &import, &detail), KVF_ERR_IO);
    cr_assert_null(import.mapping);
    stop();
}

Test(mem_cuda, handles_that_do_not_open) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd = 0;
    start_with_memory();
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 4096, &import, &detail),
                 KVF_ERR_UNSUPPORTED, "its own process's");
    handle[0] ^= 1; /* a device that is not here */
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, 4096, &import, &detail),
                 KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "CUDA_VISIBLE_DEVICES"), "%s", detail.text);
    standin_cuda_fail("cudaIpcGetMemHandle", 1);
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "cannot be shared"), "%s", detail.text);
    cr_assert_null(import.mapping);
    mem.kind->free(&mem);
    stop();
}
