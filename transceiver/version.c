/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/kvferry.h"
#include "transceiver/mover/ucx.h"

#include <pthread.h>
#include <stdio.h>

static char text[64];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_text(void) {
    (void)snprintf(text, sizeof(text), "kvferry %s (ucx %s)", KVF_VERSION, kvf_ucx_version());
}

const char *kvf_version(void) {
    (void)pthread_once(&once, make_text);
    return text;
}
