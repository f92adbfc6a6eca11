/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_context.h"

#include "../support/rdma/reads.h"

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

/* Whether a context has a transport, whatever it was asked for. */
static bool has_transport(const kvf_ucx_t *ucx, const char *name) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    cr_assert_not_null(file);
    ucp_context_print_info(ucx->context, file);
    cr_assert_eq(fclose(file), 0);
    bool has = strstr(text, name) != NULL;
    free(text);
    return has;
}

/* Reads go over network cards alone, whatever the settings or the environment name: over other
 * transports UCX has them done by a peer that is not asked. */
static void expect_reads_for(kvf_ucx_use_t use, const char *tls, const char *environment,
                             const char *asked) {
    const kvf_ucx_config_t config = {
        .tls = tls, .devices = "auto", .listen_host = "127.0.0.1", .use = use};
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
    if (!ucx_reads()) {
        cr_expect_eq(status, KVF_ERR_UNSUPPORTED);
        cr_expect_not_null(strstr(detail.text, "needs 1.22"), "%s", detail.text);
    } else if (asked[0] == '\0') {
        cr_expect_eq(status, KVF_ERR_UNSUPPORTED, "%s: %s", tls, detail.text);
        cr_expect_not_null(strstr(detail.text, "as rc and dc do"), "%s: %s", tls, detail.text);
    } else if (status == KVF_OK) { /* there is a card */
        cr_expect_not_null(strstr(log_text, text), "%s", log_text);
        cr_expect_not(has_transport(ucx, "tcp/"), "%s", asked);
        cr_expect_not(has_transport(ucx, "self/"), "%s", asked);
    } else {
        cr_expect_eq(status, KVF_ERR_UNSUPPORTED, "%s", detail.text);
        cr_expect_not_null(strstr(detail.text, text), "%s: %s", text, detail.text);
    }
    kvf_ucx_destroy(ucx);
    cr_assert_eq(unsetenv("UCX_TLS"), 0);
}

static void expect_reads(const char *tls, const char *environment, const char *asked) {
    expect_reads_for(KVF_UCX_READS, tls, environment, asked);
}

Test(ucx_context, reads_go_over_cards_alone) {
    expect_reads("auto", NULL, "rc,dc");
    expect_reads("tcp,self", NULL, "");
    expect_reads("posix,sysv,cma,shm,sm,ud,ib,all,srd", NULL, "");
    expect_reads("tcp,rc", NULL, "rc");
    expect_reads("tcp,rc_x,self", NULL, "rc_x");
    expect_reads("dc", "tcp", "");
    expect_reads("tcp", "rc,tcp", "rc");
    expect_reads("tcp", "auto", "rc,dc");
    expect_reads("rc", "", "");
    expect_reads("^tcp", NULL, "");
    expect_reads("rc,rc_v,rc_x,dc,dc_x", NULL, "rc,rc_v,rc_x,dc,dc_x");
    expect_reads("rc_verbs,rc_mlx5,dc_mlx5", NULL, ""); /* these would not connect */
    expect_reads("r,d,rcx,rc_ver,rc_verbs2,dc_mlx,RC,rc:aux,^rc,\\rc", NULL, ""); /* like cards */
    expect_reads(",,rc,,dc_x,", NULL, "rc,dc_x");
    expect_reads("", NULL, "");
}

/* To a device's memory they go over cards, too; what else is asked for only knows that memory. */
Test(ucx_context, a_devices_reads_go_over_cards_alone) {
    expect_reads_for(KVF_UCX_DEVICE_READS, "auto", NULL, "rc,dc");
    expect_reads_for(KVF_UCX_DEVICE_READS, "tcp,rc,self", NULL, "rc");
    expect_reads_for(KVF_UCX_DEVICE_READS, "tcp", "dc,cuda_ipc,tcp", "dc");
    expect_reads_for(KVF_UCX_DEVICE_READS, "tcp,self", NULL, "");
    expect_reads_for(KVF_UCX_DEVICE_READS, "cuda_copy,cuda_ipc,gdr_copy,cuda", NULL, "");
    expect_reads_for(KVF_UCX_DEVICE_READS, "rc", "tcp", "");
}

Test(ucx_context, tests_may_read_over_software, .init = need_reads) {
    static const char *const tls[] = {"tcp,self", "auto"};
    const kvf_log_t log = {on_log, NULL, KVF_LOG_TRACE};
    for (size_t i = 0; i < 2; i++) {
        const kvf_ucx_config_t config = {.tls = tls[i],
                                         .devices = "auto",
                                         .listen_host = "127.0.0.1",
                                         .use = KVF_UCX_READS,
                                         .over_software = true};
        kvf_ucx_t *ucx = NULL;
        log_text[0] = '\0';
        cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), &log, &ucx, NULL), KVF_OK);
        cr_expect_not_null(strstr(log_text, "tls tcp,self, for reads"), "%s", log_text);
        cr_expect(has_transport(ucx, "tcp/lo"));
        cr_expect(has_transport(ucx, "self/"));
        kvf_ucx_destroy(ucx);
    }
}

/* What the environment says of transports is not cut, however long it is. */
Test(ucx_context, a_long_list_is_not_cut) {
    const kvf_ucx_config_t config = {.tls = "auto", .devices = "auto", .listen_host = "127.0.0.1"};
    kvf_ucx_t *ucx = NULL;
    char tls[160] = "";
    for (int i = 0; i < 25; i++) {
        (void)strcat(tls, "self,");
    }
    (void)strcat(tls, "tcp");
    cr_assert_eq(setenv("UCX_TLS", tls, 1), 0);
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), NULL, &ucx, NULL), KVF_OK);
    cr_expect(has_transport(ucx, "tcp/lo"));
    kvf_ucx_destroy(ucx);
}
