/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_DEVICE_H
#define KVF_KERNELS_DEVICE_H

/**
 * @file
 * How a body is written that is compiled for the CPU and by nvcc for the GPU: `static inline
 * KVF_DEVICE`, plain C that is C++, too.
 */

#ifdef __CUDACC__
#define KVF_DEVICE __host__ __device__
#else
#define KVF_DEVICE
#endif

#endif
