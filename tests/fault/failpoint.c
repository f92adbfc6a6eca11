/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens at a fail point of this process. The environment says it:
 *
 *   KVF_FAIL_POINT   a name of KVF_FAIL_POINT_MAP, or nothing
 *   KVF_FAIL_COUNT   at which pass; 1 is the first
 *   KVF_FAIL_ACTION  kill, stop, term: that signal to the process itself; cut: the control
 *                    connections break
 *
 * It happens once, and a line on stderr says so before.
 */
#include "kvmgr/base/failpoint.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void (*kvf_fail_flush)(void *control);
void (*kvf_fail_cut)(void *control);
void *kvf_fail_control;

static const char *const points[] = {
#define POINT_NAME(name, text) #name,
    KVF_FAIL_POINT_MAP(POINT_NAME)
#undef POINT_NAME
};
static const char *const actions[] = {"kill", "stop", "term", "cut"};
static const int signals[] = {SIGKILL, SIGSTOP, SIGTERM};

static size_t chosen_point = sizeof(points) / sizeof(points[0]), chosen_action;
static unsigned long passes, chosen_pass = 1;

static size_t choice(const char *variable, const char *const *names, size_t n) {
    const char *value = getenv(variable);
    for (size_t i = 0; i < n; i++) {
        if (value != NULL && strcmp(value, names[i]) == 0) {
            return i;
        }
    }
    (void)fprintf(stderr, "%s=%s: there is no such thing\n", variable, value == NULL ? "" : value);
    exit(2);
}

__attribute__((constructor)) static void choose(void) {
    const char *count = getenv("KVF_FAIL_COUNT");
    if (getenv("KVF_FAIL_POINT") != NULL) {
        chosen_point = choice("KVF_FAIL_POINT", points, sizeof(points) / sizeof(points[0]));
        chosen_action = choice("KVF_FAIL_ACTION", actions, sizeof(actions) / sizeof(actions[0]));
        chosen_pass = count == NULL ? 1 : strtoul(count, NULL, 10);
    }
}

void kvf_fail_point(kvf_fail_point_t point) {
    if ((size_t)point != chosen_point || ++passes != chosen_pass) {
        return;
    }
    (void)dprintf(STDERR_FILENO, "fail point %s, pass %lu: %s\n", points[point], passes,
                  actions[chosen_action]);
    kvf_fail_flush(kvf_fail_control); /* "after" something was said, it has left */
    if (chosen_action < sizeof(signals) / sizeof(signals[0])) {
        (void)kill(getpid(), signals[chosen_action]);
    } else {
        kvf_fail_cut(kvf_fail_control);
    }
}
