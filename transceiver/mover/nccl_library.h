/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_NCCL_LIBRARY_H
#define KVF_MOVER_NCCL_LIBRARY_H

/**
 * @file
 * The functions of NCCL that are called, found in libnccl.so.2 when the first path is wanted: a
 * program that has the mover runs where there is no NCCL, too. Only the mover's files include it.
 */

#include "kvmgr/base/status.h"

#include <nccl.h>

typedef struct kvf_nccl_library {
    ncclResult_t (*GetVersion)(int *version);
    ncclResult_t (*GetUniqueId)(ncclUniqueId *id);
    ncclResult_t (*CommInitRankConfig)(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                       ncclConfig_t *config);
    ncclResult_t (*CommGetAsyncError)(ncclComm_t comm, ncclResult_t *error);
    ncclResult_t (*CommAbort)(ncclComm_t comm);
    ncclResult_t (*Send)(const void *buf, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                         cudaStream_t stream);
    ncclResult_t (*Recv)(void *buf, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                         cudaStream_t stream);
    const char *(*GetErrorString)(ncclResult_t result);
    const char *(*GetLastError)(ncclComm_t comm);
} kvf_nccl_library_t;

/** @return KVF_OK: *library_p is of static storage; KVF_ERR_UNSUPPORTED: it is not there, or lacks
 * a function; the text says it. @thread any, one at a time  @cost the first time that of a large
 * library */
KVF_CHECK kvf_status_t kvf_nccl_load(const kvf_nccl_library_t **library_p, kvf_detail_t *detail);

#endif
