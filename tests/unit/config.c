/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/config.h"
#include "tools/config_keys.h"

#include <criterion/criterion.h>
#include <string.h>

static kvf_config_t config;
static kvf_detail_t detail;

static void setup(void) {
    cr_assert_eq(kvf_config_init(kvf_alloc_default(), &config, &detail), KVF_OK);
}

static void teardown(void) {
    kvf_config_cleanup(&config);
}

TestSuite(config, .init = setup, .fini = teardown);

static kvf_status_t read_as(const char *yaml, size_t bytes, const char *name) {
    FILE *file = tmpfile();
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(yaml, 1, bytes, file), bytes);
    rewind(file);
    kvf_status_t status = kvf_config_read_stream(&config, file, name, &detail);
    (void)fclose(file);
    return status;
}

static kvf_status_t read(const char *yaml) {
    return read_as(yaml, strlen(yaml), "node.yaml");
}

/* The example of docs/contracts.md, every value changed where another one is allowed. */
static const char *const whole =
    "instance: decode-7\n"
    "http:    {listen: \"[::1]:8201\"}\n"
    "control: {listen: 127.0.0.1:0, key_file: /etc/k/other.key}\n"
    "peers:   [prefill-0, \"[::1]:9200\"]\n"
    "model:   {preset: gpt-oss-20b, tokens_per_block: 64, draft_layers: 3}\n"
    "pool:    {memory: host, bytes: 512MiB}\n"
    "mover:   {kind: ucx, direction: push}\n"
    "ucx:     {tls: tcp, devices: lo}\n"
    "engine:  {kind: synthetic, prefill_tokens_per_s: 5000, chunk_tokens: 77,\n"
    "          extra_tokens: 8}\n"
    "prefix_cache: false\n"
    "verify:  off   # no check\n"
    "aux:     plain\n"
    "limits:  {transfers: 7, request_timeout_ms: 1, lease_ms: 2,\n"
    "          quarantine_ms: 3, frame_bytes: 3145728}\n"
    "heartbeat:\n"
    "  period_ms: 4\n"
    "  suspect_ms: 5\n"
    "  lost_ms: 6\n"
    "log: {level: trace}\n";

Test(config, defaults_are_those_of_the_contract) {
    cr_assert_str_eq(config.instance, "");
    cr_assert_str_eq(config.http_listen, "127.0.0.1:8200");
    cr_assert_str_eq(config.control_listen, "127.0.0.1:9200");
    cr_assert_str_eq(config.key_file, "cluster.key");
    cr_assert_eq(config.peers.n, 0);
    cr_assert_str_eq(config.preset, "gemma-3-270m");
    cr_assert_eq(config.tokens_per_block, 32);
    cr_assert_str_eq(config.memory, "shm");
    cr_assert_str_eq(config.device_alloc, "malloc");
    cr_assert_eq(config.pool_bytes, UINT64_C(4294967296));
    cr_assert_str_eq(config.mover, "auto");
    cr_assert_str_eq(config.direction, "push");
    cr_assert_str_eq(config.ucx_tls, "auto");
    cr_assert_str_eq(config.ucx_devices, "auto");
    cr_assert_str_eq(config.engine, "synthetic");
    cr_assert_eq(config.prefill_tokens_per_s, 0);
    cr_assert_eq(config.chunk_tokens, 0);
    cr_assert_eq(config.extra_tokens, 1);
    cr_assert_eq(config.draft_layers, 0);
    cr_assert(config.prefix_cache);
    cr_assert_str_eq(config.verify, "bytes");
    cr_assert_str_eq(config.aux, "cached");
    cr_assert_eq(config.max_transfers, 256);
    cr_assert_eq(config.request_timeout_ms, 30000);
    cr_assert_eq(config.lease_ms, 30000);
    cr_assert_eq(config.quarantine_ms, 10000);
    cr_assert_eq(config.frame_bytes, 16777216);
    cr_assert_eq(config.heartbeat_ms, 250);
    cr_assert_eq(config.suspect_ms, 1000);
    cr_assert_eq(config.lost_ms, 2000);
    cr_assert_str_eq(config.log_level, "info");
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_OK);
}

Test(config, every_key_is_read_from_a_file) {
    cr_assert_eq(read(whole), KVF_OK, "%s", detail.text);
    cr_assert_str_eq(config.instance, "decode-7");
    cr_assert_str_eq(config.http_listen, "[::1]:8201");
    cr_assert_str_eq(config.control_listen, "127.0.0.1:0");
    cr_assert_str_eq(config.key_file, "/etc/k/other.key");
    cr_assert_eq(config.peers.n, 2);
    cr_assert_str_eq(config.peers.items[0], "prefill-0");
    cr_assert_str_eq(config.peers.items[1], "[::1]:9200");
    cr_assert_str_eq(config.preset, "gpt-oss-20b");
    cr_assert_eq(config.tokens_per_block, 64);
    cr_assert_str_eq(config.memory, "host");
    cr_assert_eq(config.pool_bytes, 536870912);
    cr_assert_str_eq(config.mover, "ucx");
    cr_assert_str_eq(config.ucx_tls, "tcp");
    cr_assert_str_eq(config.ucx_devices, "lo");
    cr_assert_eq(config.prefill_tokens_per_s, 5000);
    cr_assert_eq(config.chunk_tokens, 77);
    cr_assert_eq(config.extra_tokens, 8);
    cr_assert_eq(config.draft_layers, 3);
    cr_assert_not(config.prefix_cache);
    cr_assert_str_eq(config.verify, "off");
    cr_assert_str_eq(config.aux, "plain");
    cr_assert_eq(config.max_transfers, 7);
    cr_assert_eq(config.request_timeout_ms, 1);
    cr_assert_eq(config.lease_ms, 2);
    cr_assert_eq(config.quarantine_ms, 3);
    cr_assert_eq(config.frame_bytes, 3145728);
    cr_assert_eq(config.heartbeat_ms, 4);
    cr_assert_eq(config.suspect_ms, 5);
    cr_assert_eq(config.lost_ms, 6);
    cr_assert_str_eq(config.log_level, "trace");
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_OK);
}

Test(config, wrong_files_are_named_with_line_and_cause) {
    static const struct {
        const char *yaml;
        const char *text; /* part of the detail */
    } cases[] = {
        {"\nlimits:\n  transfer: 4\n",
         "node.yaml:3: unknown key limits.transfer; did you mean limits.transfers?"},
        {"pol: {bytes: 1MiB}\n", "node.yaml:1: unknown key pol; did you mean pool?"},
        {"lease_ms: 3\n", "unknown key lease_ms; did you mean limits.lease_ms?"},
        {"prefix_cach: true\n", "did you mean prefix_cache?"},
        {"limits: {transfers: many}\n", "node.yaml:1: limits.transfers: expected a whole number of "
                                        "transfers, 1 to 65536, not \"many\""},
        {"limits: {transfers: 0}\n", "1 to 65536, not \"0\""},
        {"limits: {transfers: 65537}\n", "not \"65537\""},
        {"limits: {transfers: -1}\n", "not \"-1\""},
        {"limits: {transfers: 1.5}\n", "not \"1.5\""},
        {"limits: {transfers: \"4\"}\n", "not \"4\""},
        {"limits: {transfers: }\n", "not nothing"},
        {"limits: {lease_ms: 99999999999999999999999}\n", "limits.lease_ms: expected"},
        {"limits: 4\n", "limits: expected a section of keys"},
        {"limits: {transfers: {a: 1}}\n", "not a section"},
        {"limits: {transfers: [1]}\n", "not a list"},
        {"http: {listen: [::1]}\n", "IPv6 address needs quotes"},
        {"pool: {bytes: 4GB}\n", "KiB, MiB, GiB or TiB"},
        {"pool: {bytes: 16777216TiB}\n", "pool.bytes: expected"},
        {"pool: {bytes: 16777217TiB}\n", "pool.bytes: expected"},
        {"pool: {bytes: 4KiB }\npool: {memory: shm}\n", "node.yaml:2: pool is there twice"},
        {"verify: off\nverify: off\n", "node.yaml:2: verify is there twice"},
        {"http.listen: a:1\nhttp: {listen: b:2}\n", "http.listen is there twice"},
        {"prefix_cache: yes\n", "true or false, not \"yes\""},
        {"prefix_cache: \"true\"\n", "true or false"},
        {"model: {preset: gemma-9}\n",
         "one of gemma-3-270m | gpt-oss-20b | llama-3.1-8b | mla-deepseek-v3, not \"gemma-9\""},
        {"model: {tokens_per_block: 48}\n", "one of 16 | 32 | 64 | 128, not \"48\""},
        {"peers: prefill-0\n", "peers: expected a list of texts, not \"prefill-0\""},
        {"peers: [[a]]\n", "peers: expected a text"},
        {"peers: [~]\n", "peers: expected a text"},
        {"instance:\n", "instance: expected a text of 0 to 128 characters, not nothing"},
        {"instance: \"a\\0b\"\n", "instance: expected"},
        {"instance: \"a\\nb\"\n", "instance: expected"},
        {"instance: !!str a\n", "instance: expected"},
        {"instance: &a b\n", "instance: expected"},
        {"instance: *a\n", "not an alias"},
        {"? [a, b]\n: c\n", "expected the name of a key"},
        {"- a\n", "expected keys"},
        {"hello\n", "expected keys"},
        {"instance: b: c\n", "node.yaml:1: not YAML"},
        {"verify: off\n\tx", "not YAML"},
        {"verify: off\n---\nverify: off\n", "node.yaml:2: a second document"},
        {"\xff\xfe\xff\xff", "not YAML"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kvf_status_t status = read(cases[i].yaml);
        cr_assert_eq(status, KVF_ERR_INVALID, "%s: %s", cases[i].yaml, kvf_status_name(status));
        cr_assert_not_null(strstr(detail.text, cases[i].text), "%s gave: %s", cases[i].yaml,
                           detail.text);
    }
}

Test(config, long_names_and_deep_files_are_refused) {
    char yaml[20000];
    memset(yaml, 'a', sizeof(yaml));
    memcpy(yaml + 900, ": 1\n", 5);
    cr_assert_eq(read(yaml), KVF_ERR_INVALID);
    memset(yaml, '[', sizeof(yaml));
    yaml[sizeof(yaml) - 1] = '\0';
    cr_assert_eq(read(yaml), KVF_ERR_INVALID);
}

Test(config, empty_files_change_nothing) {
    cr_assert_eq(read(""), KVF_OK);
    cr_assert_eq(read("# only a comment\n"), KVF_OK);
    cr_assert_eq(read("---\n"), KVF_OK);
    cr_assert_eq(read("{}\n"), KVF_OK);
    cr_assert_eq(config.max_transfers, 256);
}

Test(config, a_missing_file_says_why) {
    cr_assert_eq(kvf_config_read(&config, "/nonexistent/x.yaml", &detail), KVF_ERR_IO);
    cr_assert_str_eq(detail.text, "cannot read /nonexistent/x.yaml: No such file or directory");
}

Test(config, set_overrides_the_file_and_itself) {
    cr_assert_eq(read(whole), KVF_OK);
    static const char *const settings[] = {
        "limits.transfers=9", "limits.transfers=10",   "http.listen=[::1]:0",
        "pool.bytes=3GiB",    "peers=[a, [::1]:2 ,c]", "prefix_cache=true",
        "instance="};
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        cr_assert_eq(kvf_config_set(&config, settings[i], &detail), KVF_OK, "%s", detail.text);
    }
    cr_assert_eq(config.max_transfers, 10);
    cr_assert_str_eq(config.http_listen, "[::1]:0");
    cr_assert_eq(config.pool_bytes, UINT64_C(3221225472));
    cr_assert_eq(config.peers.n, 3);
    cr_assert_str_eq(config.peers.items[0], "a");
    cr_assert_str_eq(config.peers.items[1], "[::1]:2");
    cr_assert_str_eq(config.peers.items[2], "c");
    cr_assert(config.prefix_cache);
    cr_assert_eq(kvf_config_set(&config, "limits.frame_bytes=2MiB", &detail), KVF_OK);
    cr_assert_eq(kvf_config_set(&config, "limits.frame_bytes=1GiB", &detail), KVF_OK);
    cr_assert_str_eq(config.instance, "");
    cr_assert_eq(kvf_config_set(&config, "peers=[::1]:5", &detail), KVF_OK);
    cr_assert_eq(config.peers.n, 1);
    cr_assert_str_eq(config.peers.items[0], "[::1]:5");
    cr_assert_eq(kvf_config_set(&config, "peers=[]", &detail), KVF_OK);
    cr_assert_eq(config.peers.n, 0);
}

Test(config, wrong_settings_are_named) {
    static const char *const cases[][2] = {
        {"limits.transfers", "expected key=value"},
        {"=4", "unknown key"},
        {"pool=3", "--set pool: that is a section; its keys are pool.memory, pool.device_alloc, "
                   "pool.zero_freed, pool.bytes"},
        {"limits=4", "limits.quarantine_ms, limits.frame_bytes"},
        {"limits.transfer=4", "unknown key; did you mean limits.transfers?"},
        {"limits.transfers=x", "expected a whole number of transfers, 1 to 65536, not \"x\""},
        {"limits.frame_bytes=2097151", "limits.frame_bytes: expected bytes"},
        {"limits.frame_bytes=1073741825", "2097152 to 1073741824 bytes, not \"1073741825\""},
        {"engine.extra_tokens=9", "a whole number of tokens, 0 to 8, not \"9\""},
        {"model.draft_layers=65", "a whole number of layers, 0 to 64, not \"65\""},
        {"verify=maybe", "one of bytes | attention | off, not \"maybe\""},
        {"peers=a,,b", "peers: expected a list of texts"},
        {"instance=a\tb", "instance: expected a text"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(kvf_config_set(&config, cases[i][0], &detail), KVF_ERR_INVALID, "%s",
                     cases[i][0]);
        cr_assert_not_null(strstr(detail.text, cases[i][1]), "%s", detail.text);
    }
}

Test(config, the_token_that_attends_needs_a_place) {
    cr_assert_eq(kvf_config_set(&config, "verify=attention", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_OK);
    cr_assert_eq(kvf_config_set(&config, "engine.extra_tokens=0", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_ERR_INVALID);
    cr_assert_eq(strncmp(detail.text, "engine.extra_tokens: ", 21), 0, "%s", detail.text);
}

Test(config, heartbeat_times_must_rise) {
    cr_assert_eq(kvf_config_set(&config, "heartbeat.suspect_ms=2000", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "2000"));
    cr_assert_eq(kvf_config_set(&config, "heartbeat.suspect_ms=250", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_ERR_INVALID);
    cr_assert_eq(kvf_config_set(&config, "heartbeat.suspect_ms=251", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_OK);
}

Test(config, addresses_are_checked_by_key) {
    static const char *const cases[][2] = {
        {"http.listen=nowhere", "http.listen: \"nowhere\" is not an address; write it in numbers, "
                                "as 127.0.0.1:8200 or [::1]:8200"},
        {"http.listen=127.0.0.1:65536", "http.listen: \"127.0.0.1:65536\" is not"},
        {"control.listen=[::1]", "control.listen: \"[::1]\" is not an address; write it in "
                                 "numbers, as 127.0.0.1:9200 or [::1]:9200"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kvf_config_t fresh;
        cr_assert_eq(kvf_config_init(kvf_alloc_default(), &fresh, NULL), KVF_OK);
        cr_assert_eq(kvf_config_set(&fresh, cases[i][0], &detail), KVF_OK);
        cr_assert_eq(kvf_config_check(&fresh, &detail), KVF_ERR_INVALID);
        cr_assert_eq(strncmp(detail.text, cases[i][1], strlen(cases[i][1])), 0, "%s", detail.text);
        kvf_config_cleanup(&fresh);
    }
}

Test(config, only_http_may_listen_beyond_loopback) {
    cr_assert_eq(kvf_config_set(&config, "http.listen=0.0.0.0:8200", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_OK);
    cr_assert_eq(kvf_config_set(&config, "control.listen=[::]:9200", &detail), KVF_OK);
    cr_assert_eq(kvf_config_check(&config, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_eq(strncmp(detail.text, "control.listen: [::]:9200 is no loopback address", 48), 0);
}

/* What --defaults prints is a file with every key in it, and reading it over other values restores
 * the defaults. */
Test(config, written_defaults_restore_the_defaults) {
    char text[16384];
    FILE *file = tmpfile();
    cr_assert_not_null(file);
    cr_assert_eq(kvf_config_write_defaults(file), KVF_OK);
    rewind(file);
    size_t bytes = fread(text, 1, sizeof(text) - 1, file);
    (void)fclose(file);
    text[bytes] = '\0';
    cr_assert_eq(read(whole), KVF_OK);
    cr_assert_eq(read(text), KVF_OK, "%s\n%s", detail.text, text);

    kvf_config_t fresh;
    cr_assert_eq(kvf_config_init(kvf_alloc_default(), &fresh, NULL), KVF_OK);
    size_t n;
    const kvf_key_t *keys = kvf_config_keys(&n);
    for (size_t i = 0; i < n; i++) {
        const char *ours = (const char *)&config + keys[i].offset;
        const char *theirs = (const char *)&fresh + keys[i].offset;
        cr_assert_not_null(strstr(text, keys[i].help), "%s", keys[i].path);
        switch (keys[i].type) {
        case KVF_KEY_TEXT:
        case KVF_KEY_CHOICE:
            cr_assert_str_eq(*(char *const *)ours, *(char *const *)theirs, "%s", keys[i].path);
            break;
        case KVF_KEY_BOOL:
            cr_assert_eq(*ours, *theirs);
            break;
        case KVF_KEY_LIST:
            cr_assert_eq(((const kvf_texts_t *)ours)->n, 0);
            break;
        default:
            cr_assert_eq(memcmp(ours, theirs, sizeof(uint64_t)), 0, "%s", keys[i].path);
            break;
        }
    }
    kvf_config_cleanup(&fresh);
}

Test(config, the_key_file_starts_at_the_folder_of_the_file) {
    static const char *const cases[][2] = {
        {"node.yaml", "./cluster.key"},
        {"/etc/kvf/node.yaml", "/etc/kvf/cluster.key"},
        {"/node.yaml", "//cluster.key"},
        {"a/node.yaml", "a/cluster.key"},
    };
    char *path;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(read_as("", 0, cases[i][0]), KVF_OK);
        cr_assert_eq(kvf_config_key_path(&config, &path), KVF_OK);
        cr_assert_str_eq(path, cases[i][1]);
        kvf_free(kvf_alloc_default(), path);
    }
    cr_assert_eq(kvf_config_set(&config, "control.key_file=/k", NULL), KVF_OK);
    cr_assert_eq(kvf_config_key_path(&config, &path), KVF_OK);
    cr_assert_str_eq(path, "/k");
    kvf_free(kvf_alloc_default(), path);
}

Test(config, every_allocation_may_fail) {
    uint64_t total = 0;
    for (uint64_t n = 0; n <= total; n++) {
        kvf_alloc_fail_t fail;
        kvf_config_t mine = {.alloc = NULL};
        kvf_alloc_fail_init(&fail, n);
        FILE *file = tmpfile();
        cr_assert_not_null(file);
        cr_assert_eq(fwrite(whole, 1, strlen(whole), file), strlen(whole));
        rewind(file);
        kvf_status_t status = kvf_config_init(&fail.table, &mine, &detail);
        if (status == KVF_OK) {
            status = kvf_config_read_stream(&mine, file, "dir/x", &detail);
        }
        if (status == KVF_OK) {
            status = kvf_config_set(&mine, "peers=a,b", &detail);
        }
        char *path = NULL;
        if (status == KVF_OK) {
            status = kvf_config_key_path(&mine, &path);
        }
        cr_assert_eq(status, n == 0 ? KVF_OK : KVF_ERR_NO_MEMORY, "allocation %d: %s", (int)n,
                     detail.text);
        total = n == 0 ? fail.calls : total;
        kvf_free(&fail.table, path);
        kvf_config_cleanup(&mine);
        (void)fclose(file);
        cr_assert_eq(fail.live, 0, "allocation %d", (int)n);
    }
    cr_assert_gt(total, 20);
}
