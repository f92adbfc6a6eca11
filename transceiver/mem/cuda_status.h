/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MEM_CUDA_STATUS_H
#define KVF_MEM_CUDA_STATUS_H

/**
 * @file
 * What the CUDA runtime says, translated: for the files that call it (mem/cuda.c, mover/cuda.c).
 */

#include "kvmgr/base/status.h"

#include <cuda_runtime_api.h>

/** @return The status of a failed call, with a text that begins with `what`. @thread any */
static inline kvf_status_t kvf_cuda_fail(kvf_detail_t *detail, cudaError_t error,
                                         const char *what) {
    kvf_status_t status = KVF_ERR_IO;
    const char *way_out = "";
    switch (error) {
    case cudaErrorMemoryAllocation:
        status = KVF_ERR_NO_MEMORY;
        way_out = "; ask for less, or look with nvidia-smi who has it";
        break;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
        status = KVF_ERR_UNSUPPORTED;
        way_out = "; GPU pools need an NVIDIA driver of CUDA 13 and a device that this process "
                  "may see (CUDA_VISIBLE_DEVICES)";
        break;
    case cudaErrorNotSupported:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorDeviceUninitialized:
        status = KVF_ERR_UNSUPPORTED;
        break;
    default:
        break;
    }
    return kvf_fail(detail, status, "%s: %s%s", what, cudaGetErrorString(error), way_out);
}

#endif
