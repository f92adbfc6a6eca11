/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/config_keys.h"

#include "tools/nearest.h"
#include "tools/presets.h"

#include <string.h>

#define DAY_MS UINT64_C(86400000)
#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define GIB (KIB * MIB)
#define PATH_BYTES 64

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})
#define AT(field) offsetof(kvf_config_t, field)

static const kvf_key_t keys[] = {
    {"instance", KVF_KEY_TEXT, "", NULL,
     "name of this node, unique in the cluster; empty: its role, as in prefill-0", 0, 128, NULL,
     AT(instance)},
    {"http.listen", KVF_KEY_TEXT, "127.0.0.1:8200", NULL,
     "address of the HTTP interface, which has no authentication; port 0 picks a free one; "
     "nodes "
     "on one machine need ports of their own",
     1, 255, NULL, AT(http_listen)},
    {"control.listen", KVF_KEY_TEXT, "127.0.0.1:9200", NULL,
     "address of the control channel, loopback in this version; port 0 picks a free one; nodes on "
     "one machine need ports of their own",
     1, 255, NULL, AT(control_listen)},
    {"control.key_file", KVF_KEY_TEXT, "cluster.key", NULL,
     "32 random bytes that all nodes share (kvferry keygen); relative to this file's folder", 1,
     4095, NULL, AT(key_file)},
    {"peers", KVF_KEY_LIST, "", NULL,
     "allow-list of instances or host:port; empty: whoever proves the cluster key", 1, 255, NULL,
     AT(peers)},
    {"model.preset", KVF_KEY_CHOICE, "gemma-3-270m", NULL,
     "whose KV cache this is; both sides need the same one", 0, 0, kvf_preset_names, AT(preset)},
    {"model.tokens_per_block", KVF_KEY_NUMBER, "32", "tokens", "tokens of one page", 16, 128,
     LIST("16", "32", "64", "128"), AT(tokens_per_block)},
    {"model.draft_layers", KVF_KEY_NUMBER, "0", "layers",
     "layers of a draft model: a layer group of its own behind the target's; both sides need the "
     "same number",
     0, KVF_PRESET_MAX_DRAFT_LAYERS, NULL, AT(draft_layers)},
    {"pool.memory", KVF_KEY_CHOICE, "shm", NULL, "kind of memory of the pages", 0, 0,
     LIST("host", "shm", "cuda"), AT(memory)},
    {"pool.device_alloc", KVF_KEY_CHOICE, "malloc", NULL,
     "of pools of cuda: malloc, cudaMalloc(); vmm, the driver's virtual memory, which peers on "
     "this machine map for reading alone",
     0, 0, LIST("malloc", "vmm"), AT(device_alloc)},
    {"pool.zero_freed", KVF_KEY_BOOL, "false", NULL,
     "pages of a request that has ended are overwritten with zeros before another one gets them, "
     "which takes its time when it does",
     0, 0, NULL, AT(zero_freed)},
    {"pool.bytes", KVF_KEY_SIZE, "4GiB", NULL,
     "all pages together; shared by the layer groups; nodes on one machine need memory for the sum",
     4 * KIB, KIB *KIB *GIB, NULL, AT(pool_bytes)},
    {"mover.kind", KVF_KEY_CHOICE, "auto", NULL,
     "what carries the bytes; mapped: a decode node copies from the pools of a prefill node on its "
     "own machine, both of shm; cuda: its device does, both of cuda; auto: one of these where that "
     "is possible, else tcp, or ucx if both nodes name UCX's transports; the decode node's setting "
     "counts, but a prefill node of kind tcp or ucx lends nothing; nccl: both nodes of cuda, each "
     "with a device of its own, fetch through NCCL, "
     "with mover.digests, and both must say so; rdma: their network cards read, and both must say "
     "so",
     0, 0, LIST("auto", "mapped", "tcp", "ucx", "cuda", "nccl", "rdma"), AT(mover)},
    {"mover.direction", KVF_KEY_CHOICE, "push", NULL,
     "push: the prefill node sends what is ready; pull: what the decode node asks for; the decode "
     "node's setting counts",
     0, 0, LIST("push", "pull"), AT(direction)},
    {"mover.threads", KVF_KEY_NUMBER, "0", "threads",
     "that copy and digest; 0: as many as the machine has cores, at most 4", 0, 64, NULL,
     AT(mover_threads)},
    {"mover.busy_poll_us", KVF_KEY_NUMBER, "0", "microseconds",
     "how long a node with transfers looks on for more before it sleeps, unless its mover threads "
     "have work; costs a core, makes short transfers shorter and tcp faster",
     0, 1000000, NULL, AT(busy_poll_us)},
    {"mover.digests", KVF_KEY_BOOL, "true", NULL,
     "compare what arrives at a decode node with digests that the prefill node makes; without them "
     "nobody notices a damaged byte",
     0, 0, NULL, AT(digests)},
    {"ucx.tls", KVF_KEY_TEXT, "auto", NULL, "UCX transports; auto: posix,sysv,tcp,self", 1, 255,
     NULL, AT(ucx_tls)},
    {"ucx.devices", KVF_KEY_TEXT, "auto", NULL,
     "UCX network devices; auto: what control.listen uses", 1, 255, NULL, AT(ucx_devices)},
    {"engine.kind", KVF_KEY_CHOICE, "synthetic", NULL, "who writes the pages", 0, 0,
     LIST("synthetic"), AT(engine)},
    {"engine.prefill_tokens_per_s", KVF_KEY_NUMBER, "0", "tokens per second",
     "speed of one request's prefill; 0: as fast as it can", 0, UINT64_C(1) << 40, NULL,
     AT(prefill_tokens_per_s)},
    {"engine.chunk_tokens", KVF_KEY_NUMBER, "0", "tokens",
     "length of a prefill chunk, between which windows let pages go; 0: whole prompt, layer by "
     "layer",
     0, UINT64_C(1) << 40, NULL, AT(chunk_tokens)},
    {"engine.extra_tokens", KVF_KEY_NUMBER, "1", "tokens",
     "a decode node's reserve behind prompt and drafts; with 1 the first generated token finds a "
     "page",
     0, 8, NULL, AT(extra_tokens)},
    {"prefix_cache", KVF_KEY_BOOL, "true", NULL,
     "keep pages of past requests for later ones whose prompt begins with the same hash_ids or "
     "tokens",
     0, 0, NULL, AT(prefix_cache)},
    {"verify", KVF_KEY_CHOICE, "bytes", NULL,
     "what a decode node checks after a transfer, besides the digests", 0, 0,
     LIST("bytes", "attention", "off"), AT(verify)},
    {"aux", KVF_KEY_CHOICE, "cached", NULL, "manager of the tables that verify: attention reads", 0,
     0, LIST("cached", "plain"), AT(aux)},
    {"limits.transfers", KVF_KEY_NUMBER, "256", "transfers", "live requests; more are answered 429",
     1, 65536, NULL, AT(max_transfers)},
    {"limits.request_timeout_ms", KVF_KEY_NUMBER, "30000", "milliseconds",
     "time of a request that names none", 1, DAY_MS, NULL, AT(request_timeout_ms)},
    {"limits.lease_ms", KVF_KEY_NUMBER, "30000", "milliseconds",
     "how long a finished prefill waits for its decode node", 1, DAY_MS, NULL, AT(lease_ms)},
    {"limits.quarantine_ms", KVF_KEY_NUMBER, "10000", "milliseconds",
     "wait for proof that nothing touches a page, before it counts as poisoned", 1, DAY_MS, NULL,
     AT(quarantine_ms)},
    {"limits.frame_bytes", KVF_KEY_SIZE, "16MiB", NULL, "longest control frame that is accepted",
     2 * MIB, GIB, NULL, AT(frame_bytes)},
    {"heartbeat.period_ms", KVF_KEY_NUMBER, "250", "milliseconds", "between two heartbeats", 1,
     DAY_MS, NULL, AT(heartbeat_ms)},
    {"heartbeat.suspect_ms", KVF_KEY_NUMBER, "1000", "milliseconds",
     "silence that makes a peer suspect", 1, DAY_MS, NULL, AT(suspect_ms)},
    {"heartbeat.lost_ms", KVF_KEY_NUMBER, "2000", "milliseconds", "silence that makes a peer lost",
     1, DAY_MS, NULL, AT(lost_ms)},
    {"log.level", KVF_KEY_CHOICE, "info", NULL, "lines on stderr", 0, 0,
     LIST("error", "warn", "info", "debug", "trace"), AT(log_level)},
};

_Static_assert(sizeof(keys) / sizeof(keys[0]) <= KVF_CONFIG_MAX_KEYS, "raise KVF_CONFIG_MAX_KEYS");

const kvf_key_t *kvf_config_keys(size_t *n_p) {
    *n_p = sizeof(keys) / sizeof(keys[0]);
    return keys;
}

const kvf_key_t *kvf_config_find(const char *path) {
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (strcmp(keys[i].path, path) == 0) {
            return &keys[i];
        }
    }
    return NULL;
}

static bool lies_in(const kvf_key_t *key, const char *section) {
    size_t length = strlen(section);
    return strncmp(key->path, section, length) == 0 && key->path[length] == '.';
}

bool kvf_config_is_section(const char *name) {
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (lies_in(&keys[i], name)) {
            return true;
        }
    }
    return false;
}

const char *kvf_config_section_keys(const char *name, char *buf, size_t cap) {
    size_t used = 0;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]) && used < cap; i++) {
        if (lies_in(&keys[i], name)) {
            used += (size_t)snprintf(buf + used, cap - used, "%s%s", used == 0 ? "" : ", ",
                                     keys[i].path);
        }
    }
    return buf;
}

const char *kvf_config_nearest(const char *path, char *buf, size_t cap) {
    size_t best = SIZE_MAX, best_idx = 0, best_length = 0;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        /* The key, its section, and its name alone: the section may be what is missing. */
        const char *dot = strchr(keys[i].path, '.');
        size_t length = strlen(keys[i].path);
        size_t section = dot == NULL ? length : (size_t)(dot - keys[i].path);
        char prefix[PATH_BYTES];
        (void)snprintf(prefix, sizeof(prefix), "%.*s", (int)section, keys[i].path);
        const char *const names[] = {keys[i].path, prefix, dot == NULL ? prefix : dot + 1};
        for (size_t k = 0; k < 3; k++) {
            size_t distance = kvf_nearest_distance(path, names[k]);
            if (distance < best) {
                best = distance;
                best_idx = i;
                best_length = k == 1 ? section : length;
            }
        }
    }
    (void)snprintf(buf, cap, "%.*s", (int)best_length, keys[best_idx].path);
    return buf;
}

static void join(const char *const *items, char *buf, size_t cap) {
    size_t used = 0;
    for (size_t i = 0; items[i] != NULL && used < cap; i++) {
        used += (size_t)snprintf(buf + used, cap - used, "%s%s", i == 0 ? "" : " | ", items[i]);
    }
}

void kvf_config_expected(const kvf_key_t *key, char *buf, size_t cap) {
    char choices[256];
    if (key->choices != NULL) {
        join(key->choices, choices, sizeof(choices));
        (void)snprintf(buf, cap, "one of %s", choices);
        return;
    }
    switch (key->type) {
    case KVF_KEY_BOOL:
        (void)snprintf(buf, cap, "true or false");
        break;
    case KVF_KEY_NUMBER:
        (void)snprintf(buf, cap, "a whole number of %s, %llu to %llu", key->unit,
                       (unsigned long long)key->minimum, (unsigned long long)key->maximum);
        break;
    case KVF_KEY_SIZE:
        (void)snprintf(buf, cap,
                       "bytes, or a whole number with KiB, MiB, GiB or TiB, %llu to %llu bytes",
                       (unsigned long long)key->minimum, (unsigned long long)key->maximum);
        break;
    case KVF_KEY_LIST:
        (void)snprintf(buf, cap, "a list of texts");
        break;
    default:
        (void)snprintf(buf, cap, "a text of %llu to %llu characters",
                       (unsigned long long)key->minimum, (unsigned long long)key->maximum);
        break;
    }
}
