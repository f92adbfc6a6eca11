/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/nccl_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define LIBRARY "libnccl.so.2"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvf_nccl_library_t library;
static kvf_status_t status;
static kvf_detail_t why;

static bool find(void *handle, const char *name, void *function_p, size_t bytes) {
    void *symbol = dlsym(handle, name);
    if (symbol == NULL) {
        status = kvf_fail(&why, KVF_ERR_UNSUPPORTED, LIBRARY " has no %s: it is too old", name);
        return false;
    }
    memcpy(function_p, &symbol, bytes); /* a function from an object: POSIX, not C */
    return true;
}

/* It stays loaded: it has threads, and destructors of its own. */
static void load(void) {
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        status = kvf_fail(&why, KVF_ERR_UNSUPPORTED,
                          "no NCCL: %s; install it (libnccl2), or put its folder into "
                          "LD_LIBRARY_PATH, or take mover auto",
                          dlerror());
        return;
    }
#define FIND(function) find(handle, "nccl" #function, &library.function, sizeof(library.function))
    if (FIND(GetVersion) && FIND(GetUniqueId) && FIND(CommInitRankConfig) &&
        FIND(CommGetAsyncError) && FIND(CommAbort) && FIND(Send) && FIND(Recv) &&
        FIND(GetErrorString) && FIND(GetLastError)) {
        status = KVF_OK;
    }
#undef FIND
}

kvf_status_t kvf_nccl_load(const kvf_nccl_library_t **library_p, kvf_detail_t *detail) {
    (void)pthread_once(&once, load);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "%s", why.text);
    }
    *library_p = &library;
    return KVF_OK;
}
