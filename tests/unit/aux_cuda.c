/* SPDX-License-Identifier: Apache-2.0 */
/* Attention aux data on a device: both managers copy on the caller's stream, and what kernels of
 * that stream read is right, however late they run. The device is the stand-in. */
#include "kvmgr/auxdata.h"
#include "tests/support/cuda/standin.h"
#include "transceiver/mem/cuda.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 6
#define SEQS 3
#define PAGES 40

static kvf_alloc_fail_t memory;
static kvf_cuda_t *cuda;
static kvf_detail_t detail;

/* The arrays of a step, and what a kernel of that step read. */
typedef struct step {
    int32_t indptr[SEQS + 1], indices[PAGES], info[3 * SEQS], rope[SEQS];
} step_t;

static step_t want[STEPS][2]; /* by depth */
static step_t *got[STEPS];    /* pinned */

static void make_steps(void) {
    for (int s = 0; s < STEPS; s++) {
        for (int d = 0; d < 2; d++) {
            step_t *step = &want[s][d];
            int32_t ends[SEQS + 1] = {0, 7 + s, 20 + d, PAGES};
            memcpy(step->indptr, ends, sizeof(ends));
            for (int32_t i = 0; i < PAGES; i++) {
                step->indices[i] = 1000 * s + 100 * d + i;
            }
            for (int32_t i = 0; i < SEQS; i++) {
                step->info[i] = 1 + (s + d + i) % 16;
                step->info[SEQS + i] = 0;
                step->info[2 * SEQS + i] = 0;
                step->rope[i] = 10 * s + d + i;
            }
        }
    }
}

static void copy_array(kvf_auxdata_t *aux, kvf_aux_array_t array, uint32_t depth,
                       const int32_t *data, int64_t n) {
    int32_t passing[PAGES]; /* is something else as soon as it was copied */
    memcpy(passing, data, (size_t)n * sizeof(*data));
    cr_assert_eq(kvf_aux_copy(aux, (kvf_aux_key_t){array, 0, depth}, passing, n, &detail), KVF_OK,
                 "%s", detail.text);
    memset(passing, 0xee, sizeof(passing));
}

/* What a kernel does that is launched behind the commit: it reads through the view. */
static void read_array(kvf_auxdata_t *aux, kvf_aux_array_t array, uint32_t depth, int32_t *to,
                       int64_t n, cudaStream_t stream) {
    kvf_aux_view_t view;
    cr_assert_eq(kvf_aux_view(aux, (kvf_aux_key_t){array, 0, depth}, &view, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(view.n, n);
    cr_assert_eq((uintptr_t)view.device % 16, 0);
    cr_assert_eq(
        cudaMemcpyAsync(to, view.device, (size_t)n * sizeof(*to), cudaMemcpyDefault, stream),
        cudaSuccess);
}

static const struct array {
    kvf_aux_array_t array;
    size_t offset;
    int64_t n;
} arrays[] = {
    {KVF_AUX_PAGE_INDPTR, offsetof(step_t, indptr), SEQS + 1},
    {KVF_AUX_PAGE_INDICES, offsetof(step_t, indices), PAGES},
    {KVF_AUX_LENGTH_INFO, offsetof(step_t, info), 3 * SEQS},
    {KVF_AUX_K_ROPE_POS_OFFSET, offsetof(step_t, rope), SEQS},
};

static int32_t *array_in(step_t *step, const struct array *array) {
    return (int32_t *)(void *)((uint8_t *)step + array->offset);
}

static void run(kvf_aux_manager_t manager) {
    cudaStream_t stream;
    kvf_auxdata_t *aux;
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_OK);
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    make_steps();
    for (int s = 0; s < STEPS; s++) {
        cr_assert_eq(cudaHostAlloc((void **)&got[s], 2 * sizeof(*got[s]), 0), cudaSuccess);
    }
    const kvf_aux_config_t config = {
        .manager = manager,
        .limits = {.max_seqs = SEQS, .max_pages = PAGES, .max_chunk = SEQS, .max_depth = 2},
        .memory = kvf_cuda_kind(cuda),
        .stream = stream};
    cr_assert_eq(kvf_aux_create(&config, &memory.table, &aux, &detail), KVF_OK, "%s", detail.text);
    standin_cuda_hold_stream(stream, true); /* the kernels of a step before are still running */
    for (int s = 0; s < STEPS; s++) {
        kvf_aux_reset(aux);
        for (uint32_t d = 0; d < 2; d++) {
            for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
                copy_array(aux, arrays[i].array, d, array_in(&want[s][d], &arrays[i]), arrays[i].n);
            }
        }
        cr_assert_eq(kvf_aux_commit(aux, &detail), KVF_OK, "%s", detail.text);
        for (uint32_t d = 0; d < 2; d++) {
            for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
                read_array(aux, arrays[i].array, d, array_in(&got[s][d], &arrays[i]), arrays[i].n,
                           stream);
            }
        }
    }
    standin_cuda_hold_stream(stream, false);
    cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
    for (int s = 0; s < STEPS; s++) {
        cr_assert_eq(memcmp(got[s], want[s], sizeof(want[s])), 0, "step %d", s);
        cr_assert_eq(cudaFreeHost(got[s]), cudaSuccess);
    }
    kvf_aux_destroy(aux);
    cr_assert_eq(cudaStreamDestroy(stream), cudaSuccess);
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
    cr_assert_eq(standin_cuda_counts().allocations, 0);
}

Test(aux_cuda, plain) {
    run(KVF_AUX_PLAIN);
}

Test(aux_cuda, cached) {
    run(KVF_AUX_CACHED);
}

/* An engine's arrays may lie in memory that the device reads by itself, later. */
Test(aux_cuda, from_pinned_memory) {
    cudaStream_t stream;
    kvf_mem_t mem;
    int32_t *pinned, *back;
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_OK);
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    cr_assert_eq(kind->alloc(kind, 4096, &mem, &detail), KVF_OK);
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, 0), cudaSuccess);
    cr_assert_eq(cudaHostAlloc((void **)&pinned, 400, 0), cudaSuccess);
    cr_assert_eq(cudaHostAlloc((void **)&back, 400, 0), cudaSuccess);
    standin_cuda_hold_stream(stream, true);
    memset(pinned, 5, 400);
    cr_assert_eq(kind->write(&mem, 16, pinned, 400, stream, &detail), KVF_OK, "%s", detail.text);
    memset(pinned, 6, 400);
    standin_cuda_hold_stream(stream, false);
    cr_assert_eq(cudaStreamSynchronize(stream), cudaSuccess);
    cr_assert_eq(kind->read(&mem, 16, back, 400, &detail), KVF_OK);
    memset(pinned, 5, 400);
    cr_assert_eq(memcmp(back, pinned, 400), 0);
    cr_assert_eq(cudaFreeHost(pinned), cudaSuccess);
    cr_assert_eq(cudaFreeHost(back), cudaSuccess);
    cr_assert_eq(cudaStreamDestroy(stream), cudaSuccess);
    mem.kind->free(&mem);
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
}

/* A device that fails is told by the call that was to copy. */
Test(aux_cuda, failures) {
    const int32_t indptr[] = {0, 1};
    kvf_auxdata_t *aux;
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_OK);
    for (int manager = KVF_AUX_PLAIN; manager <= KVF_AUX_CACHED; manager++) {
        const kvf_aux_config_t config = {
            .manager = (kvf_aux_manager_t)manager,
            .limits = {.max_seqs = 1, .max_pages = 1, .max_chunk = 1, .max_depth = 1},
            .memory = kvf_cuda_kind(cuda)};
        standin_cuda_fail("cudaMalloc", 1);
        cr_expect_eq(kvf_aux_create(&config, &memory.table, &aux, &detail), KVF_ERR_NO_MEMORY);
        cr_assert_eq(kvf_aux_create(&config, &memory.table, &aux, &detail), KVF_OK);
        standin_cuda_fail("cudaMemcpyAsync", 1);
        kvf_status_t status =
            kvf_aux_copy(aux, (kvf_aux_key_t){KVF_AUX_PAGE_INDPTR, 0, 0}, indptr, 2, &detail);
        status = status == KVF_OK ? kvf_aux_commit(aux, &detail) : status;
        cr_expect_eq(status, KVF_ERR_IO);
        cr_expect_not_null(strstr(detail.text, "a copy to or from a device"), "%s", detail.text);
        kvf_aux_destroy(aux);
    }
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
}
