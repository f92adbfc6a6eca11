/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_FUZZ_H
#define KVF_FUZZ_H

/**
 * @file
 * What the fuzz targets share. Each is one file with one entry, run by libFuzzer or by replay.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/** The target. @return 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/** A property that must hold for every input. */
#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);          \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif
