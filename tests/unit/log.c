/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/log.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <stdio.h>
#include <string.h>

struct seen {
    int lines;
    kvf_log_level_t level;
    char text[2048];
};

static void take(void *ctx, kvf_log_level_t level, const char *text) {
    struct seen *seen = ctx;
    seen->lines++;
    seen->level = level;
    (void)snprintf(seen->text, sizeof(seen->text), "%s", text);
}

Test(log, lines_up_to_the_level_of_the_table) {
    struct seen seen = {0};
    kvf_log_t log = {take, &seen, KVF_LOG_INFO};
    kvf_log(&log, KVF_LOG_DEBUG, "transfer %d", 1);
    cr_assert_eq(seen.lines, 0);
    kvf_log(&log, KVF_LOG_INFO, "peer %s up", "decode-0");
    cr_assert_eq(seen.lines, 1);
    cr_assert_eq(seen.level, KVF_LOG_INFO);
    cr_assert_str_eq(seen.text, "peer decode-0 up");
    kvf_log(&log, KVF_LOG_ERROR, "no");
    cr_assert_eq(seen.lines, 2);
    cr_assert_eq(seen.level, KVF_LOG_ERROR);
}

Test(log, long_lines_are_cut) {
    struct seen seen = {0};
    kvf_log_t log = {take, &seen, KVF_LOG_ERROR};
    kvf_log(&log, KVF_LOG_ERROR, "%01500d", 7);
    cr_assert_eq(strlen(seen.text), 1023);
}

Test(log, nobody_listens) {
    kvf_log_t silent = {NULL, NULL, KVF_LOG_TRACE};
    kvf_log(NULL, KVF_LOG_ERROR, "lost");
    kvf_log(&silent, KVF_LOG_ERROR, "lost");
}

Test(log, stderr_line, .init = cr_redirect_stderr) {
    kvf_log_t log = kvf_log_stderr(KVF_LOG_WARN);
    kvf_log(&log, KVF_LOG_INFO, "not this");
    kvf_log(&log, KVF_LOG_WARN, "peer %d is silent", 3);
    (void)fflush(stderr);
    cr_assert_stderr_eq_str("kvferry warn peer 3 is silent\n");
}

Test(log, level_names) {
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    for (int level = KVF_LOG_ERROR; level <= KVF_LOG_TRACE; level++) {
        cr_assert_str_eq(kvf_log_level_name((kvf_log_level_t)level), names[level]);
    }
    cr_assert_str_eq(kvf_log_level_name((kvf_log_level_t)99), "trace");
}
