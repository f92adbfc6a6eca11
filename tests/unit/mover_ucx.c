/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/mover_side.h"

#include "kernels/digest.h"
#include "transceiver/mover/ucx_address.h"

#include <ucp/api/ucp.h>

static size_t transport_idx[] = {0, 1, 2};

static void encode(uint8_t header[KVF_CHUNK_HEADER_BYTES], uint64_t bytes) {
    kvf_chunk_t chunk = {
        .group_idx = 3, .slot = 2, .ordinal = 102, .generation = 7, .bytes = bytes};
    chunk.transfer.counter = 42;
    kvf_chunk_encode(&chunk, header);
}

ParameterizedTestParameters(mover_ucx, hostile_messages) {
    return cr_make_param_array(size_t, transport_idx, N_UCX_TRANSPORTS);
}

/* A stranger that speaks UCX, and no protocol. */
ParameterizedTest(size_t *idx, mover_ucx, hostile_messages, .timeout = 60) {
    static uint8_t data[1 << 20], header[1024];
    const struct {
        unsigned id;
        size_t header_bytes, bytes, claimed;
        unsigned flags;
        bool bad_magic;
    } messages[] = {
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4095, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4097, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 300000, UINT64_MAX, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 0, 0, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 0, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES - 1, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES + 1, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, 0, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
        {0, 0, 0, 0, UCP_AM_SEND_FLAG_EAGER, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, true},
        {0, KVF_CHUNK_HEADER_BYTES, 65536, 65536, UCP_AM_SEND_FLAG_RNDV, false},
        {0, KVF_CHUNK_HEADER_BYTES, sizeof(data), sizeof(data), UCP_AM_SEND_FLAG_RNDV, false},
        {0, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY,
         true},
        {7, KVF_CHUNK_HEADER_BYTES, 4096, 4096, UCP_AM_SEND_FLAG_EAGER, false},
    };
    const size_t n = sizeof(messages) / sizeof(messages[0]);
    side_t a, b;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
    ucp_config_t *config;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM};
    const ucp_worker_params_t worker_params = {0};
    side_open(&a, transports[*idx]);
    side_open(&b, transports[*idx]);
    _Alignas(8) uint8_t aligned[sizeof(b.address)];
    memcpy(aligned, b.address + KVF_UCX_ENVELOPE_BYTES, sizeof(aligned) - KVF_UCX_ENVELOPE_BYTES);
    cr_assert_eq(setenv("UCX_TLS", "posix,tcp,self", 1), 0);
    cr_assert_eq(setenv("UCX_NET_DEVICES", "lo", 1), 0);
    cr_assert_eq(ucp_config_read(NULL, NULL, &config), UCS_OK);
    cr_assert_eq(ucp_init(&params, config, &context), UCS_OK);
    ucp_config_release(config);
    cr_assert_eq(ucp_worker_create(context, &worker_params, &worker), UCS_OK);
    const ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                                       .address = (const ucp_address_t *)aligned};
    cr_assert_eq(ucp_ep_create(worker, &ep_params, &ep), UCS_OK);
    for (size_t i = 0; i < n; i++) {
        const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                           .flags = messages[i].flags};
        memset(header, 0, sizeof(header));
        encode(header, messages[i].claimed);
        header[0] ^= messages[i].bad_magic ? 0x40 : 0;
        void *request = ucp_am_send_nbx(ep, messages[i].id, header, messages[i].header_bytes, data,
                                        messages[i].bytes, &param);
        cr_assert_not(UCS_PTR_IS_ERR(request), "message %zu: %s", i,
                      ucs_status_string(UCS_PTR_STATUS(request)));
        uint64_t end = now_us() + 5000000;
        while (UCS_PTR_IS_PTR(request) && now_us() < end &&
               ucp_request_check_status(request) == UCS_INPROGRESS) {
            (void)ucp_worker_progress(worker);
            (void)turn(&b);
        }
        if (UCS_PTR_IS_PTR(request)) {
            cr_assert_neq(ucp_request_check_status(request), UCS_INPROGRESS, "message %zu", i);
            ucp_request_free(request);
        }
    }
    uint64_t end = now_us() + 5000000;
    while (kvf_mover_ucx_refused(b.mover) < n - 1 && now_us() < end) {
        (void)ucp_worker_progress(worker);
        (void)turn(&b);
    }
    cr_assert_eq(kvf_mover_ucx_refused(b.mover), n - 1); /* UCX itself drops the unknown id */
    cr_assert_eq(b.n_landed + b.n_stray, 0);

    /* A well-formed chunk is the sink's to judge, and everybody else is unharmed. */
    uint8_t *source = make_source(4096);
    kvf_piece_t piece = piece_at(source, 0, 4096, 2, 0);
    kvf_window_t window = window_of(&piece, 1);
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_assert_eq(a.mover->ops->post(a.mover, &window), KVF_OK);
    run_until_landed(&a, &b, 1, 4096);
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    side_close(&a);
    side_close(&b);
    free(source);
}

Test(mover_ucx, useless_addresses, .timeout = 60) {
    side_t a, b;
    kvf_detail_t detail = {""};
    side_open(&a, "auto");
    side_open(&b, "auto");
    const kvf_mover_ops_t *ops = a.mover->ops;
    uint8_t small[3];
    size_t bytes = 0;
    cr_assert_eq(ops->address(a.mover, small, sizeof(small), &bytes), KVF_ERR_RANGE);
    cr_assert_eq(bytes, 0);
    cr_assert_eq(ops->connect(a.mover, 0, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    for (size_t cut = 0; cut < b.address_bytes; cut++) {
        cr_assert_eq(ops->connect(a.mover, 1, b.address, cut, &detail), KVF_ERR_INVALID);
    }
    for (size_t i = 4; i < b.address_bytes; i++) { /* each of them could end the process */
        b.address[i] ^= 0x80;
        cr_assert_eq(ops->connect(a.mover, 1, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
        b.address[i] ^= 0x80;
    }
    b.address[2]++;
    cr_assert_eq(ops->connect(a.mover, 1, b.address, b.address_bytes, NULL), KVF_ERR_INCOMPATIBLE);
    b.address[2]--;
    side_connect(&a, 1, b.address, b.address_bytes);
    cr_assert_eq(ops->connect(a.mover, 1, b.address, b.address_bytes, NULL), KVF_ERR_INVALID);
    ops->disconnect(a.mover, 2); /* unknown: ignored */
    side_close(&a);
    side_close(&b);
}

Test(mover_ucx, without_memory, .timeout = 60) {
    const kvf_ucx_config_t config = {
        .tls = "tcp,self", .devices = "auto", .listen_host = "127.0.0.1"};
    const kvf_mover_sink_t sink = {on_place, on_landed, on_moved, on_broken, NULL};
    side_t b;
    uint64_t n = 0;
    bool done = false;
    side_open(&b, "tcp,self");
    while (!done) {
        kvf_alloc_fail_t fail;
        kvf_ucx_t *ucx = NULL;
        kvf_mover_t *mover = NULL;
        kvf_detail_t detail = {""};
        kvf_alloc_fail_init(&fail, ++n);
        kvf_status_t status = kvf_ucx_create(&config, &fail.table, NULL, &ucx, &detail);
        if (status == KVF_OK) {
            status = kvf_mover_ucx_create(ucx, &sink, &mover, &detail);
        }
        if (status == KVF_OK) {
            status = mover->ops->connect(mover, 1, b.address, b.address_bytes, &detail);
        }
        done = fail.calls < n;
        cr_assert_eq(status, done ? KVF_OK : KVF_ERR_NO_MEMORY, "allocation %lu", (unsigned long)n);
        cr_assert_eq(detail.text[0] != '\0', !done);
        if (mover != NULL) {
            mover->ops->destroy(mover);
        }
        kvf_ucx_destroy(ucx);
        cr_assert_eq(fail.live, 0);
    }
    cr_assert_gt(n, 4); /* context, mover, peer, hash table ... */
    side_close(&b);
}
