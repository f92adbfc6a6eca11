/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MEM_CUDA_SCOPE_H
#define KVF_MEM_CUDA_SCOPE_H

/**
 * @file
 * How the CUDA runtime is called, by the files that call it (mem/cuda.c, mover/cuda*.c): on the
 * device's context, whatever the thread's own is, and without getting into an engine's way; and
 * what its codes mean.
 */

#include "kvmgr/base/status.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>

/** The primary context of a device, and the driver's calls that make it a thread's current one: the
 * runtime's cudaSetDevice() could not be taken back without making a context on the device before.
 */
struct kvf_cuda_context {
    int device;
    void *primary;
    int (*push)(void *context);
    int (*pop)(void **context_p);
};

/** A stretch of calls. */
typedef struct kvf_cuda_scope {
    const struct kvf_cuda_context *context;
    enum cudaStreamCaptureMode mode; /**< the thread's own */
} kvf_cuda_scope_t;

/**
 * Begin to call the runtime. Relaxed: an engine's thread that captures a graph in the global mode
 * would otherwise make our calls fail, and we would break its capture.
 *
 * @return cudaSuccess: kvf_cuda_leave() is due. @thread any
 */
static inline cudaError_t kvf_cuda_enter(const struct kvf_cuda_context *context,
                                         kvf_cuda_scope_t *scope) {
    scope->context = context;
    scope->mode = cudaStreamCaptureModeRelaxed;
    int error = context->push(context->primary);
    if (error != 0) {
        return (cudaError_t)error; /* the driver's numbers are the runtime's */
    }
    (void)cudaThreadExchangeStreamCaptureMode(&scope->mode);
    return cudaSuccess;
}

static inline void kvf_cuda_leave(kvf_cuda_scope_t *scope) {
    void *popped;
    (void)cudaThreadExchangeStreamCaptureMode(&scope->mode);
    (void)scope->context->pop(&popped);
}

/** @return Whether an error has ended a context: nothing that was queued there will run, or runs.
 * Of any other error nothing follows. @thread any */
static inline bool kvf_cuda_is_fatal(cudaError_t error) {
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorInvalidResourceHandle: /* of ours: the application has reset the device */
    case cudaErrorCudartUnloading:
        return true;
    default:
        return false;
    }
}

/** @return The status of a call of ours that failed, with a text that begins with `what`; the
 * runtime forgets the error, which is none of the application's. @thread any */
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
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
        status = KVF_ERR_UNSUPPORTED;
        way_out = "; kvferry has kernels for compute capability 8.0 and later";
        break;
    case cudaErrorNotSupported:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorDeviceUninitialized:
        status = KVF_ERR_UNSUPPORTED;
        break;
    default:
        break;
    }
    (void)cudaGetLastError();
    return kvf_fail(detail, status, "%s: %s%s", what, cudaGetErrorString(error), way_out);
}

#endif
