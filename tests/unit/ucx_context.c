/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char log_text[4096];

static void on_log(void *ctx, kvf_log_level_t level, const char *text) {
    (void)ctx;
    (void)level;
    size_t used = strlen(log_text);
    (void)snprintf(log_text + used, sizeof(log_text) - used, "%s\n", text);
}

/* UCX prints its messages on stdout by default; a command's output lies there. */
Test(ucx_context, a_wrong_transport_is_explained_and_stdout_stays_clean) {
    const kvf_ucx_config_t config = {
        .tls = "nosuch", .devices = "auto", .listen_host = "127.0.0.1"};
    const kvf_ucx_config_t no_device = {
        .tls = "tcp", .devices = "nosuch9", .listen_host = "127.0.0.1"};
    const kvf_log_t log = {on_log, NULL, KVF_LOG_TRACE};
    kvf_ucx_t *ucx = NULL;
    kvf_detail_t detail = {""};
    char path[] = "/tmp/kvferry-stdout-XXXXXX", byte;
    int fd = mkstemp(path), saved = dup(STDOUT_FILENO);
    cr_assert_geq(fd, 0);
    (void)unlink(path);
    (void)fflush(stdout);
    (void)dup2(fd, STDOUT_FILENO);
    kvf_status_t tls = kvf_ucx_create(&config, kvf_alloc_default(), &log, &ucx, &detail);
    kvf_detail_t device_detail = {""};
    kvf_status_t device =
        kvf_ucx_create(&no_device, kvf_alloc_default(), &log, &ucx, &device_detail);
    (void)fflush(stdout);
    (void)dup2(saved, STDOUT_FILENO);
    cr_assert_eq(lseek(fd, 0, SEEK_SET), 0);
    cr_assert_eq(read(fd, &byte, 1), 0, "UCX wrote on stdout");
    cr_assert_eq(tls, KVF_ERR_INVALID);
    cr_assert_eq(device, KVF_ERR_INVALID);
    cr_assert_null(ucx);
    cr_assert_not_null(strstr(detail.text, "nosuch"), "%s", detail.text);
    cr_assert_not_null(strstr(detail.text, "tcp"), "names what there is: %s", detail.text);
    cr_assert_not_null(strstr(device_detail.text, "nosuch9"), "%s", device_detail.text);
    cr_assert_not_null(strstr(device_detail.text, "lo"), "names what there is: %s",
                       device_detail.text);
    cr_assert_not_null(strstr(log_text, "ucx: "), "%s", log_text);
    (void)close(fd);
    (void)close(saved);
}

Test(ucx_context, the_environment_wins) {
    const kvf_ucx_config_t config = {
        .tls = "nosuch", .devices = "nosuch9", .listen_host = "127.0.0.1"};
    kvf_ucx_t *ucx = NULL;
    cr_assert_eq(setenv("UCX_TLS", "tcp", 1), 0);
    cr_assert_eq(setenv("UCX_NET_DEVICES", "lo", 1), 0);
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), NULL, &ucx, NULL), KVF_OK);
    kvf_ucx_destroy(ucx);
    kvf_ucx_destroy(NULL);
    cr_assert_eq(strncmp(kvf_ucx_version(), "1.", 2), 0);
}

/* Reads go over network cards alone, whatever the settings or the environment name: over other
 * transports UCX has them done by a peer that is not asked. */
static void expect_reads(const char *tls, const char *environment, const char *asked) {
    const kvf_ucx_config_t config = {
        .tls = tls, .devices = "auto", .listen_host = "127.0.0.1", .use = KVF_UCX_READS};
    const kvf_log_t log = {on_log, NULL, KVF_LOG_TRACE};
    kvf_ucx_t *ucx = NULL;
    kvf_detail_t detail = {""};
    char text[80];
    if (environment != NULL) {
        cr_assert_eq(setenv("UCX_TLS", environment, 1), 0);
    }
    log_text[0] = '\0';
    kvf_status_t status = kvf_ucx_create(&config, kvf_alloc_default(), &log, &ucx, &detail);
    (void)snprintf(text, sizeof(text), "tls %s%s%s", status == KVF_OK ? "" : "\"", asked,
                   status == KVF_OK ? ", for reads" : "\"");
    if (asked[0] == '\0') {
        cr_expect_eq(status, KVF_ERR_UNSUPPORTED);
        cr_expect_not_null(strstr(detail.text, "as rc and dc do"), "%s", detail.text);
    } else if (status == KVF_OK) { /* there is a card */
        cr_expect_not_null(strstr(log_text, text), "%s", log_text);
    } else {
        cr_expect_eq(status, KVF_ERR_UNSUPPORTED, "%s", detail.text);
        cr_expect_not_null(strstr(detail.text, text), "%s: %s", text, detail.text);
    }
    kvf_ucx_destroy(ucx);
    cr_assert_eq(unsetenv("UCX_TLS"), 0);
}

Test(ucx_context, reads_go_over_cards_alone) {
    expect_reads("auto", NULL, "rc,dc");
    expect_reads("tcp,self", NULL, "");
    expect_reads("posix,sysv,cma,shm,sm,ud,ib,all,srd", NULL, "");
    expect_reads("tcp,rc_x,self", NULL, "rc_x");
    expect_reads("dc", "tcp", "");
    expect_reads("tcp", "rc,tcp", "rc");
    expect_reads("^tcp", NULL, "");
}

Test(ucx_context, tests_may_read_over_software) {
    const kvf_ucx_config_t config = {.tls = "tcp,self",
                                     .devices = "auto",
                                     .listen_host = "127.0.0.1",
                                     .use = KVF_UCX_READS,
                                     .over_software = true};
    kvf_ucx_t *ucx = NULL;
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), NULL, &ucx, NULL), KVF_OK);
    kvf_ucx_destroy(ucx);
}
