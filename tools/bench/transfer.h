/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_BENCH_TRANSFER_H
#define KVF_TOOLS_BENCH_TRANSFER_H

/**
 * @file
 * The measurements: transfers between this process and one that it starts, and the references.
 */

#include "tools/bench/result.h"

/**
 * Measure kvferry: start the sending process, and receive from it.
 *
 * @param options      Checked.
 * @param argc, argv   Of this process: the other one gets the same options.
 * @param[out] result  Zeroed but for the allocator; the caller cleans its samples up in any case.
 * @return KVF_OK, also when bytes were wrong (the result counts them); or why it could not be
 * measured.
 */
KVF_CHECK kvf_status_t kvf_bench_transfer(const kvf_bench_options_t *options, int argc, char **argv,
                                          kvf_bench_result_t *result, kvf_detail_t *detail);

/**
 * Measure a reference, in this process alone.
 *
 * @param options      Checked; with a reference.
 * @param[out] result  As of kvf_bench_transfer().
 * @return KVF_OK, also when bytes were wrong; KVF_ERR_UNSUPPORTED (no such stores on this machine);
 * KVF_ERR_NO_MEMORY; KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_bench_refer(const kvf_bench_options_t *options,
                                       kvf_bench_result_t *result, kvf_detail_t *detail);

#endif
