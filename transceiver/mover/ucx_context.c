/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mover/ucx_context.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <ucs/debug/log_def.h>

static _Thread_local kvf_ucx_scope_t *scope_of_thread;
static pthread_once_t log_once = PTHREAD_ONCE_INIT;

static kvf_log_level_t log_level(ucs_log_level_t level) {
    if (level <= UCS_LOG_LEVEL_ERROR) {
        return KVF_LOG_ERROR;
    }
    if (level == UCS_LOG_LEVEL_WARN) {
        return KVF_LOG_WARN;
    }
    return level <= UCS_LOG_LEVEL_DEBUG ? KVF_LOG_DEBUG : KVF_LOG_TRACE;
}

/* UCX's own handler prints on stdout, where a command's JSON goes. */
__attribute__((format(printf, 6, 0))) static ucs_log_func_rc_t
on_log(const char *file, unsigned line, const char *function, ucs_log_level_t level,
       const ucs_log_component_config_t *comp, const char *message, va_list args) {
    kvf_ucx_scope_t *scope = scope_of_thread;
    char text[sizeof(scope->said)];
    (void)file;
    (void)line;
    (void)function;
    (void)comp;
    (void)vsnprintf(text, sizeof(text), message, args);
    if (scope == NULL) {
        (void)fprintf(stderr, "kvferry %s ucx: %s\n", kvf_log_level_name(log_level(level)), text);
        return UCS_LOG_FUNC_RC_STOP;
    }
    if (scope->said[0] == '\0') {
        memcpy(scope->said, text, sizeof(text));
    }
    kvf_log(scope->log, log_level(level), "ucx: %s", text);
    return UCS_LOG_FUNC_RC_STOP;
}

/* Who asks UCX for a log file of its own keeps it. */
static void take_log(void) {
    if (getenv("UCX_LOG_FILE") == NULL) {
        ucs_log_push_handler(on_log);
    }
}

void kvf_ucx_scope_enter(kvf_ucx_scope_t *scope, const kvf_log_t *log) {
    scope->log = log;
    scope->outer = scope_of_thread;
    scope->said[0] = '\0';
    scope_of_thread = scope;
}

void kvf_ucx_scope_leave(kvf_ucx_scope_t *scope) {
    scope_of_thread = scope->outer;
}

kvf_status_t kvf_ucx_status(ucs_status_t status) {
    switch (status) {
    case UCS_OK:
        return KVF_OK;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
        return KVF_ERR_NO_MEMORY;
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
        return KVF_ERR_UNSUPPORTED;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_NO_DEVICE:
        return KVF_ERR_INVALID;
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_UNREACHABLE:
        return KVF_ERR_PEER_LOST;
    default:
        return KVF_ERR_IO;
    }
}

const char *kvf_ucx_version(void) {
    return ucp_get_version_string();
}

/* The interface that owns a numeric address, "" when none does (0.0.0.0: every one). */
static void device_of(const char *host, char name[IF_NAMESIZE]) {
    struct ifaddrs *all = NULL;
    struct in6_addr want6;
    struct in_addr want4;
    bool is4 = inet_pton(AF_INET, host, &want4) == 1;
    bool is6 = inet_pton(AF_INET6, host, &want6) == 1;
    name[0] = '\0';
    if (is4 && (ntohl(want4.s_addr) >> 24) == IN_LOOPBACKNET) {
        (void)snprintf(name, IF_NAMESIZE, "lo"); /* 127.0.0.2 is not listed, yet it is there */
        return;
    }
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (const struct ifaddrs *at = all; at != NULL; at = at->ifa_next) {
        struct sockaddr_in in4;
        struct sockaddr_in6 in6;
        if (at->ifa_addr == NULL) {
            continue;
        }
        if (is4 && at->ifa_addr->sa_family == AF_INET) {
            memcpy(&in4, at->ifa_addr, sizeof(in4));
            if (in4.sin_addr.s_addr != want4.s_addr) {
                continue;
            }
        } else if (is6 && at->ifa_addr->sa_family == AF_INET6) {
            memcpy(&in6, at->ifa_addr, sizeof(in6));
            if (memcmp(&in6.sin6_addr, &want6, sizeof(want6)) != 0) {
                continue;
            }
        } else {
            continue;
        }
        (void)snprintf(name, IF_NAMESIZE, "%s", at->ifa_name);
        break;
    }
    freeifaddrs(all);
}

/* Whether a word is one of a comma-separated list. */
static bool is_word(const char *word, size_t bytes, const char *words) {
    for (size_t n; *words != '\0'; words += n + (words[n] == ',')) {
        n = strcspn(words, ",");
        if (n == bytes && memcmp(words, word, n) == 0) {
            return true;
        }
    }
    return false;
}

/* Whether a comma-separated list has a word of another such list, or (all) nothing else. */
static bool has_word(const char *list, const char *words, bool all) {
    size_t bytes;
    for (const char *at = list; *at != '\0'; at += bytes + (at[bytes] == ',')) {
        bytes = strcspn(at, ",");
        if (is_word(at, bytes, words) != all) {
            return !all;
        }
    }
    return all;
}

/* Transports that read a peer's memory without that peer's doing. All others emulate it by
 * messages, which their receiver does not check (docs/protocol.md, "Put and get"). No rc_mlx5 and
 * the like: of these names UCX takes no other transport to connect by. */
#define CARDS "rc,rc_v,rc_x,dc,dc_x"

/* What of the wanted transports reads may go over. */
static void choose_cards(const char *tls, const kvf_ucx_config_t *wanted, char *chosen,
                         size_t cap) {
    size_t used = 0, bytes;
    const char *list = strcmp(tls, "auto") != 0 ? tls
                       : wanted->over_software  ? "tcp,self"
                                                : "rc,dc";
    for (const char *at = list; *at != '\0'; at += bytes + (at[bytes] == ',')) {
        bytes = strcspn(at, ",");
        if ((wanted->over_software || is_word(at, bytes, CARDS)) && used + bytes + 2 < cap) {
            used += (size_t)snprintf(chosen + used, cap - used, "%s%.*s", used > 0 ? "," : "",
                                     (int)bytes, at);
        }
    }
}

/* What is asked for, by the environment first. */
static const char *asked_tls(const kvf_ucx_config_t *wanted) {
    const char *tls = getenv("UCX_TLS");
    if (tls == NULL) {
        tls = wanted->use == KVF_UCX_MESSAGES && strcmp(wanted->tls, "auto") == 0
                  ? "posix,sysv,tcp,self"
                  : wanted->tls;
    }
    return tls;
}

static ucs_status_t configure(ucp_config_t *config, const kvf_ucx_config_t *wanted,
                              kvf_ucx_t *ucx) {
    char device[IF_NAMESIZE] = "";
    const char *devices = wanted->devices;
    const bool reads = wanted->use != KVF_UCX_MESSAGES;
    const char *tls = reads ? ucx->tls : asked_tls(wanted);
    unsigned major, minor, release;
    if (strcmp(devices, "auto") == 0) {
        if (!reads || wanted->over_software) {
            device_of(wanted->listen_host, device); /* cards have other names */
        }
        devices = device;
    }
    const bool posix = has_word(tls, "posix,shm,sm,all", false);
    const bool sysv = has_word(tls, "sysv,shm,sm,all", false);
    const bool tcp = has_word(tls, "tcp", false);
    /* When nothing else reports broken paths, shared memory has to: a peer's death is then seen at
     * the next keepalive, and only while there is room for its message. */
    const bool silent = has_word(tls, "posix,sysv,cma,self", true);
    const struct {
        bool wanted;
        const char *name;
        const char
            *old_name; /* before 1.17 a transport's options are known by those of its tables */
        const char *value;
    } settings[] = {
        {true, "TLS", "TLS", tls},
        {devices[0] != '\0', "NET_DEVICES", "NET_DEVICES", devices},
        /* A chunk of the mover in one segment: it is handed over where it was received. */
        {tcp, "TCP_TX_SEG_SIZE", "TX_SEG_SIZE", "1m"},
        {tcp, "TCP_RX_SEG_SIZE", "RX_SEG_SIZE", "1m"},
        {silent && posix, "POSIX_ERROR_HANDLING", "MM_ERROR_HANDLING", "y"},
        {silent && sysv, "SYSV_ERROR_HANDLING", "MM_ERROR_HANDLING", "y"},
        {silent, "KEEPALIVE_INTERVAL", "KEEPALIVE_INTERVAL", "1s"},
        /* Where a card cannot read, such as a device's memory, it would be emulated unnoticed. */
        {reads && !wanted->over_software, "PROTO_EMULATION_ENABLE", "PROTO_EMULATION_ENABLE", "n"},
    };
    ucp_get_version(&major, &minor, &release);
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        char variable[64];
        (void)snprintf(variable, sizeof(variable), "UCX_%s", settings[i].name);
        /* The environment's come first, but for what reads must not do without. */
        const bool must = reads && (strcmp(settings[i].name, "TLS") == 0 ||
                                    strcmp(settings[i].name, "PROTO_EMULATION_ENABLE") == 0);
        if (!settings[i].wanted || (getenv(variable) != NULL && !must)) {
            continue;
        }
        ucs_status_t status = ucp_config_modify(
            config, minor < 17 ? settings[i].old_name : settings[i].name, settings[i].value);
        if (status != UCS_OK) {
            return status;
        }
    }
    return UCS_OK;
}

/* Make the context. */
static ucs_status_t init(kvf_ucx_t *ucx, const ucp_params_t *params, ucp_config_t *settings,
                         bool on_device) {
    char with_device[sizeof(ucx->tls) + 16];
    ucs_status_t status = ucp_init(params, settings, &ucx->context);
    if (status != UCS_OK || !on_device) {
        return status;
    }
    /* There is a card. What knows a device's memory is asked for only now: UCX would do with that
     * alone. */
    ucp_cleanup(ucx->context);
    (void)snprintf(with_device, sizeof(with_device), "%s,cuda_copy", ucx->tls);
    status = ucp_config_modify(settings, "TLS", with_device);
    return status == UCS_OK ? ucp_init(params, settings, &ucx->context) : status;
}

kvf_status_t kvf_ucx_create(const kvf_ucx_config_t *config, const kvf_alloc_t *alloc,
                            const kvf_log_t *log, kvf_ucx_t **ucx_p, kvf_detail_t *detail) {
    /* No remote memory access together with messages: with that feature anybody who can connect
     * could write anywhere, where software does it. */
    const bool reads = config->use != KVF_UCX_MESSAGES;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_WAKEUP |
                                             (reads ? UCP_FEATURE_RMA : UCP_FEATURE_AM)};
    kvf_ucx_scope_t scope;
    ucp_config_t *settings = NULL;
    unsigned major, minor, release;
    ucs_status_t status;

    (void)pthread_once(&log_once, take_log);
    ucp_get_version(&major, &minor, &release);
    if (major != UCP_API_MAJOR || minor < 13) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "ucx %s is too old: 1.13 is needed",
                        ucp_get_version_string());
    }
    if (reads && minor < 22) { /* nobody looked at those between 1.13 and 1.22 */
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "ucx %s is too old for the mover rdma, which needs 1.22: 1.13 ends the "
                        "process when a path is closed",
                        ucp_get_version_string());
    }
    kvf_ucx_t *ucx = kvf_calloc(alloc, 1, sizeof(*ucx));
    if (ucx == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the ucx context");
    }
    ucx->alloc = alloc;
    ucx->log = log != NULL ? *log : (kvf_log_t){NULL, NULL, KVF_LOG_ERROR};
    if (reads) {
        choose_cards(asked_tls(config), config, ucx->tls, sizeof(ucx->tls));
    } else {
        (void)snprintf(ucx->tls, sizeof(ucx->tls), "%s", asked_tls(config)); /* for texts */
    }
    if (reads && ucx->tls[0] == '\0') {
        kvf_free(alloc, ucx);
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "none of UCX's transports that are asked for (ucx.tls, UCX_TLS) reads a "
                        "peer's memory by itself, as rc and dc do");
    }

    kvf_ucx_scope_enter(&scope, &ucx->log);
    status = ucp_config_read(NULL, NULL, &settings);
    if (status == UCS_OK) {
        status = configure(settings, config, ucx);
        if (status == UCS_OK) {
            status = init(ucx, &params, settings, config->use == KVF_UCX_DEVICE_READS);
        }
        ucp_config_release(settings);
    }
    kvf_ucx_scope_leave(&scope);
    if (reads && status == UCS_ERR_NO_DEVICE) { /* what ucx would have us take is not for reads */
        (void)kvf_fail(detail, KVF_OK,
                       "ucx finds no network card that reads a peer's memory (InfiniBand, RoCE) by "
                       "tls \"%s\" among devices \"%s\"; take another mover where there is none",
                       ucx->tls, config->devices);
        kvf_free(alloc, ucx);
        return KVF_ERR_UNSUPPORTED;
    }
    if (status != UCS_OK) {
        (void)kvf_fail(detail, KVF_OK, "ucx refuses tls \"%s\", devices \"%s\": %s%s%s", ucx->tls,
                       config->devices, ucs_status_string(status), scope.said[0] ? "; " : "",
                       scope.said);
        kvf_free(alloc, ucx);
        return kvf_ucx_status(status);
    }
    kvf_log(&ucx->log, KVF_LOG_INFO, "ucx %s, tls %s%s", ucp_get_version_string(), ucx->tls,
            reads ? ", for reads" : "");
    *ucx_p = ucx;
    return KVF_OK;
}

void kvf_ucx_destroy(kvf_ucx_t *ucx) {
    kvf_ucx_scope_t scope;
    if (ucx == NULL) {
        return;
    }
    kvf_ucx_scope_enter(&scope, &ucx->log);
    ucp_cleanup(ucx->context);
    kvf_ucx_scope_leave(&scope);
    kvf_free(ucx->alloc, ucx);
}
