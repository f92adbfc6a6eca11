/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention.h"

#include "kernels/attention_body.h"

#include <cuda_runtime.h>

#define THREADS 32

/* As kernels/attention.c is compiled: a multiplication and an addition are two roundings, so that
 * results can be compared closely. */
__global__ void __launch_bounds__(THREADS)
    attention_kernel(const __grid_constant__ kvf_attention_t attention, const float *q, float *out,
                     kvf_attention_head_t *work) {
    uint32_t heads = attention.shape.kv_heads;
    uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < (uint64_t)attention.n_seqs * heads) {
        kvf_attention_sequence_head(&attention, (uint32_t)(i / heads), (uint32_t)(i % heads), q, out,
                                    &work[i]);
    }
}

int kvf_attention_launch(const kvf_attention_t *attention, const float *q, float *out,
                         kvf_attention_head_t *work, void *stream) {
    uint64_t n = (uint64_t)attention->n_seqs * attention->shape.kv_heads;
    if (n == 0) {
        return cudaSuccess;
    }
    attention_kernel<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0,
                       (cudaStream_t)stream>>>(*attention, q, out, work);
    return cudaGetLastError();
}
