/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_ARGUMENTS_H
#define KVF_TOOLS_ARGUMENTS_H

/**
 * @file
 * What the commands' options have in common.
 */

#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

/** Read a whole number of an option; one that is none, or not in [min, max], ends the program with
 * what is wrong. @thread main */
static inline uint64_t kvf_argument_count(const struct argp_state *state, const char *option,
                                          const char *text, uint64_t min, uint64_t max) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || text[0] < '0' || text[0] > '9' || value < min ||
        value > max) {
        argp_error(state, "--%s: '%s' is not a whole number from %" PRIu64 " to %" PRIu64, option,
                   text, min, max);
    }
    return value;
}

#endif
