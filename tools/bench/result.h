/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_RESULT_H
#define KVF_TOOLS_BENCH_RESULT_H

/**
 * @file
 * What a measurement found, and how it is told.
 */

#include "tools/bench/options.h"
#include "tools/replay/samples.h"

#include <stdio.h>

typedef struct kvf_bench_result {
    kvf_samples_t ns;      /**< nanoseconds, one sample a repetition; sorted when it is told */
    char mover[16];        /**< what carried the bytes */
    const char *transport; /**< borrowed: static storage, or the options' */
    uint64_t bytes;        /**< of one repetition */
    uint64_t pieces;       /**< copies of one repetition */
    uint64_t wrong_bytes;  /**< of all repetitions, the warm-up too: 0 is verified */
    uint64_t layers;       /**< of a block; 0: a reference */
    double posting_ns; /**< of a piece, at the sender: kvf_counters_t.posting_us; 0: a reference */
    uint64_t layer_ns; /**< made-up time between two layers; 0 but for KVF_BENCH_EXPOSED */
} kvf_bench_result_t;

/**
 * Print one line of JSON; its fields are in docs/contracts.md.
 *
 * @return KVF_OK, KVF_ERR_IO or KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_bench_print_json(const kvf_bench_options_t *options,
                                            kvf_bench_result_t *result, FILE *out);

/** Print the same for people. @return KVF_OK, or KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_bench_print_table(const kvf_bench_options_t *options,
                                             kvf_bench_result_t *result, FILE *out);

#endif
