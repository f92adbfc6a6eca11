/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_GPU_WINDOWS_H
#define KVF_TESTS_GPU_WINDOWS_H

/**
 * @file
 * How long a window of pieces takes on a device: by our kernel, by a batch of the runtime's copies
 * (the alternative to it), and as one large copy.
 */

#include "transceiver/mem/cuda.h"

#include <jansson.h>
#include <stdbool.h>

/** @return Whether a batch of copies puts every byte in its place; else the text says why not. */
bool gpu_check_batch(kvf_cuda_t *cuda, kvf_detail_t *detail);

/**
 * Windows of 64 MiB (short: 4 MiB) in pieces of 4 KiB to 1 MiB, and what a window costs whatever is
 * in it. Medians, in microseconds; a line for each size on stderr.
 *
 * @return {window_bytes, rows: [{piece_bytes, us, digests_us, batch_us, one_copy_us}],
 * flat_1_piece_us, flat_256_pieces_us, flat_1_digest_us}; the caller's. Exits where the device
 * fails.
 */
json_t *gpu_measure_windows(kvf_cuda_t *cuda, bool is_short);

#endif
