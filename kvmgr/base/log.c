/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/log.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#define LINE_BYTES 1024

const char *kvf_log_level_name(kvf_log_level_t level) {
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    return (unsigned)level < sizeof(names) / sizeof(names[0]) ? names[level] : "trace";
}

static void stderr_write(void *ctx, kvf_log_level_t level, const char *text) {
    (void)ctx;
    (void)fprintf(stderr, "kvferry %s %s\n", kvf_log_level_name(level), text);
}

kvf_log_t kvf_log_stderr(kvf_log_level_t level) {
    return (kvf_log_t){stderr_write, NULL, level};
}

void kvf_log(const kvf_log_t *log, kvf_log_level_t level, const char *fmt, ...) {
    char line[LINE_BYTES];
    va_list args;
    if (log == NULL || log->write == NULL || level > log->level) {
        return;
    }
    va_start(args, fmt);
    (void)vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    log->write(log->ctx, level, line);
}
