/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/agent_driver.h"

#include <string.h>

#define MAX_MOVER_ADDRESS_BYTES 8192

void kvf_driver_set_time(kvf_driver_t *driver) {
    const kvf_clock_t *clock = kvf_clock_default();
    kvf_core_set_time(driver->agent->core, clock->now_us(clock->ctx));
}

/* ---- actions of the core ---- */

static kvf_status_t do_dial(void *ctx, const char *address, uint64_t *conn_p,
                            kvf_detail_t *detail) {
    return kvf_control_dial(((kvf_driver_t *)ctx)->control, address, conn_p, detail);
}

static void do_write(void *ctx, uint64_t conn, uint8_t *data, size_t bytes) {
    /* A connection that is gone, or has no memory left, is reported by its closed event. */
    (void)kvf_control_send(((kvf_driver_t *)ctx)->control, conn, data, bytes);
}

static void do_close(void *ctx, uint64_t conn) {
    kvf_control_close(((kvf_driver_t *)ctx)->control, conn);
}

static kvf_status_t do_mover_connect(void *ctx, uint64_t peer, uint32_t mover_idx,
                                     const void *address, size_t bytes, kvf_detail_t *detail) {
    kvf_mover_t *mover = ((kvf_driver_t *)ctx)->movers[mover_idx];
    return mover->ops->connect(mover, peer, address, bytes, detail);
}

static void do_mover_disconnect(void *ctx, uint64_t peer, uint32_t mover_idx) {
    kvf_mover_t *mover = ((kvf_driver_t *)ctx)->movers[mover_idx];
    mover->ops->disconnect(mover, peer);
}

static kvf_status_t do_post(void *ctx, kvf_window_t *window) {
    return kvf_copier_post(((kvf_driver_t *)ctx)->copier, window);
}

static kvf_status_t do_map(void *ctx, uint64_t peer, const void *address, size_t bytes,
                           const int64_t *n_pages, kvf_detail_t *detail) {
    return kvf_copier_map(((kvf_driver_t *)ctx)->copier, peer, address, bytes, n_pages, detail);
}

static void do_unmap(void *ctx, uint64_t peer) {
    kvf_copier_unmap(((kvf_driver_t *)ctx)->copier, peer);
}

static void do_digest(void *ctx, kvf_window_t *window) {
    kvf_copier_digest(((kvf_driver_t *)ctx)->copier, window);
}

static const uint8_t *do_page(void *ctx, uint32_t group_idx, int32_t slot) {
    return kvf_pool_page(&((kvf_driver_t *)ctx)->agent->pools[group_idx], slot);
}

static void do_verify(void *ctx, kvf_verify_t *job) {
    kvf_copier_verify(((kvf_driver_t *)ctx)->copier, job);
}

static kvf_status_t do_join(void *ctx, uint64_t peer, uint64_t path, const void *invitation,
                            size_t bytes, kvf_detail_t *detail) {
    return kvf_copier_join(((kvf_driver_t *)ctx)->copier, peer, path, invitation, bytes, detail);
}

static void do_joined(void *ctx, uint64_t peer, uint64_t path, const void *answer, size_t bytes) {
    kvf_copier_joined(((kvf_driver_t *)ctx)->copier, peer, path, answer, bytes);
}

static void do_leave(void *ctx, uint64_t peer, uint64_t path, bool own, const char *why) {
    kvf_copier_leave(((kvf_driver_t *)ctx)->copier, peer, path, own, why);
}

static void do_serve(void *ctx, kvf_serve_t *serve) {
    kvf_copier_serve(((kvf_driver_t *)ctx)->copier, serve);
}

static void do_evict(void *ctx, uint64_t peer) {
    kvf_copier_evict(((kvf_driver_t *)ctx)->copier, peer);
}

/* ---- events for the core ---- */

static void on_opened(void *ctx, uint64_t conn, bool inbound, const char *address) {
    kvf_driver_t *driver = ctx;
    driver->events++;
    kvf_driver_set_time(driver);
    kvf_core_opened(driver->agent->core, conn, inbound, address);
}

static void on_bytes(void *ctx, uint64_t conn, const uint8_t *data, size_t bytes) {
    kvf_driver_t *driver = ctx;
    driver->events++;
    kvf_driver_set_time(driver);
    kvf_core_bytes(driver->agent->core, conn, data, bytes);
}

static void on_closed(void *ctx, uint64_t conn, const char *why) {
    kvf_driver_t *driver = ctx;
    driver->events++;
    kvf_driver_set_time(driver);
    kvf_core_closed(driver->agent->core, conn, why);
}

static kvf_status_t on_place(void *ctx, const kvf_chunk_t *chunk, kvf_landing_t *landing_p) {
    const kvf_agent_t *agent = ((kvf_driver_t *)ctx)->agent;
    kvf_status_t status = kvf_core_grant_check(agent->core, chunk, landing_p);
    if (status == KVF_OK && landing_p->at == NULL) {
        landing_p->at =
            (uint8_t *)kvf_pool_page(&agent->pools[chunk->group_idx], chunk->slot) + chunk->offset;
    }
    return status;
}

static void on_landed(void *ctx, const kvf_chunk_t *chunk) {
    kvf_core_landed(((kvf_driver_t *)ctx)->agent->core, chunk);
}

static void on_moved(void *ctx, kvf_window_t *window, kvf_status_t status) {
    kvf_copier_moved(((kvf_driver_t *)ctx)->copier, window, status);
}

static void on_broken(void *ctx, uint64_t peer, const char *why) {
    kvf_core_broken(((kvf_driver_t *)ctx)->agent->core, peer, why);
}

kvf_control_events_t kvf_driver_control_events(kvf_driver_t *driver) {
    return (kvf_control_events_t){on_opened, on_bytes, on_closed, driver};
}

kvf_mover_sink_t kvf_driver_sink(kvf_driver_t *driver) {
    return (kvf_mover_sink_t){on_place, on_landed, on_moved, on_broken, driver};
}

kvf_status_t kvf_driver_make_core(kvf_driver_t *driver, kvf_detail_t *detail) {
    kvf_agent_t *agent = driver->agent;
    kvf_core_config_t config = {
        .agent = &agent->config,
        .alloc = agent->alloc,
        .rand = *kvf_rand_default(),
        .log = &agent->log,
        .out = {.dial = do_dial,
                .write = do_write,
                .close = do_close,
                .mover_connect = do_mover_connect,
                .mover_disconnect = do_mover_disconnect,
                .post = do_post,
                .map = do_map,
                .unmap = do_unmap,
                .digest = do_digest,
                .page = do_page,
                .verify = do_verify,
                .ctx = driver},
        .movers_checked = true,
        .mapped_name = kvf_agent_mapped_name(agent),
        .hashes_leaves = agent->cuda == NULL, /* else the device hashes what it stores */
    };
    const bool fetches = strcmp(config.mapped_name, KVF_NCCL) == 0;
    const bool reads = strcmp(config.mapped_name, KVF_RDMA) == 0;
    config.out.serve = fetches ? do_serve : NULL;
    config.out.joined = reads ? do_joined : NULL;
    if (fetches || reads) {
        config.out.join = do_join;
        config.out.leave = do_leave;
        config.out.evict = do_evict;
    }
    for (uint32_t i = 0; i < agent->n_movers; i++) {
        config.mover_names[config.n_movers++] = driver->movers[i]->ops->name;
        config.movers_checked &= driver->movers[i]->ops->checked;
    }
    for (uint32_t g = 0; g < agent->layout.n_groups; g++) {
        config.regions[g] =
            (kvf_core_region_t){agent->pools[g].pages, agent->pools[g].mem.kind->type};
    }
    kvf_status_t status = kvf_core_create(&config, &agent->core);
    if (status == KVF_OK) {
        kvf_driver_set_time(driver);
        status = kvf_core_set_control_address(agent->core, kvf_control_address(driver->control));
    }
    for (uint32_t i = 0; i < agent->n_movers && status == KVF_OK; i++) {
        kvf_mover_t *mover = driver->movers[i];
        uint8_t address[MAX_MOVER_ADDRESS_BYTES];
        size_t bytes;
        if (mover->ops->address(mover, address, sizeof(address), &bytes) != KVF_OK) {
            return kvf_fail(detail, KVF_ERR_INTERNAL, "the address of mover %s is too long",
                            mover->ops->name);
        }
        status = kvf_core_set_mover_address(agent->core, i, address, bytes);
    }
    return status == KVF_OK ? status : kvf_fail(detail, status, "no memory for the agent");
}
