/* SPDX-License-Identifier: Apache-2.0 */
/* Which guard is removed in this process: the one that KVF_MUTANT names in the environment. */
#include "kvmgr/base/mutant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvf_mutant_t kvf_mutant;

static const char *const names[] = {"none",
#define MUTANT_NAME(name, text) #name,
                                    KVF_MUTANT_MAP(MUTANT_NAME)
#undef MUTANT_NAME
};

__attribute__((constructor)) static void choose(void) {
    const char *name = getenv("KVF_MUTANT");
    size_t n = sizeof(names) / sizeof(names[0]), i = 0;
    if (name == NULL) {
        return;
    }
    if (strcmp(name, "list") == 0) {
        for (i = 1; i < n; i++) {
            (void)puts(names[i]);
        }
        exit(0);
    }
    while (i < n && strcmp(names[i], name) != 0) {
        i++;
    }
    if (i == n) {
        (void)fprintf(stderr, "KVF_MUTANT=%s: there is no such mutant\n", name);
        exit(2);
    }
    kvf_mutant = (kvf_mutant_t)i;
}
