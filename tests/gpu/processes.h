/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_GPU_PROCESSES_H
#define KVF_TESTS_GPU_PROCESSES_H

/**
 * @file
 * A pool on a device, and another process that reads it; the other one is the suite again, with
 * --child.
 */

#include "transceiver/mem/cuda.h"

/**
 * Other processes, one after the other, read a pool on that device from the first one, and each is
 * killed while it does: the memory stays the owner's, and can be freed.
 *
 * @param program  The suite.
 * @param vmm      The pool is virtual memory.
 * @return Whether all is well; else the text says why not.
 */
bool gpu_check_reader(const char *program, int device, bool vmm, int rounds, kvf_detail_t *detail);

/** Another process has mapped a pool of virtual memory, and tries to write to it. @return Whether
 * it could not, and the bytes are as before; else the text says why not. */
bool gpu_check_read_only(const char *program, int device, kvf_detail_t *detail);

/**
 * Be the other process: open what comes from `in`, read it for ever, and say so to `out` each time
 * that the bytes were right. When more comes from `in`: try to write to it, say how that went, and
 * end.
 *
 * @param fd  Of the pool; -1: it has none, and nothing more comes.
 * @return The exit code.
 */
int gpu_run_child(kvf_cuda_t *cuda, int in, int out, int fd);

#endif
