/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_LEAKS_H
#define KVF_TEST_LEAKS_H

/**
 * @file
 * Leaks as test failures: a test's process ends with its code, whatever the leak sanitizer finds
 * after that.
 */

#include <stdlib.h>

/* There with -fsanitize=address only. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

/* End the process when something leaked so far. For the end of a test or its .fini. */
static inline void check_leaks(void) {
    if (__lsan_do_recoverable_leak_check != NULL && __lsan_do_recoverable_leak_check() != 0) {
        abort();
    }
}

#endif
