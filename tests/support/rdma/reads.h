/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_READS_H
#define KVF_TESTS_READS_H

/**
 * @file
 * Whether the UCX in use is one that reads go by.
 */

#include "transceiver/mover/ucx.h"

#include <criterion/criterion.h>
#include <stdlib.h>

/** @return false: it is older than 1.22, and refused (unit-ucx_context looks). */
static inline bool ucx_reads(void) {
    return strtol(kvf_ucx_version() + 2, NULL, 10) >= 22;
}

/** For a test's .init. */
static inline void need_reads(void) {
    if (!ucx_reads()) {
        cr_skip_test("this ucx is too old to be read by");
    }
}

#endif
