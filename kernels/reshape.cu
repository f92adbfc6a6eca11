/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/reshape.h"

#include "kernels/reshape_body.h"

#include <cuda_runtime.h>

#define THREADS 256
#define MOST_BLOCKS 4096

static_assert(sizeof(kvf_reshape_t) <= 32764, "a kernel's parameters");

__global__ void __launch_bounds__(THREADS)
    reshape_kernel(const __grid_constant__ kvf_reshape_t list, uint64_t n) {
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * THREADS) {
        kvf_reshape_unit(&list, i);
    }
}

int kvf_reshape_launch(const kvf_reshape_t *list, void *stream) {
    const uint64_t n = kvf_reshape_units(list), blocks = (n + THREADS - 1) / THREADS;
    if (n == 0) {
        return cudaSuccess;
    }
    reshape_kernel<<<(unsigned)(blocks > MOST_BLOCKS ? MOST_BLOCKS : blocks), THREADS, 0,
                     (cudaStream_t)stream>>>(*list, n);
    return cudaGetLastError();
}
