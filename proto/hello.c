/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/hello.h"

#include "kvmgr/base/cursor.h"
#include "kvmgr/base/mem.h"
#include "kvmgr/base/size.h"

static const uint8_t preamble_magic[8] = "KVFERRY";

/* With their zeros. */
static const char initiator_label[] = "kvferry hello initiator";
static const char responder_label[] = "kvferry hello responder";

/* ---- preamble: magic, major u16, minor u16, initiator u8, 3 bytes reserved = 0, nonce ---- */

void kvf_preamble_encode(const kvf_preamble_t *preamble, uint8_t bytes[KVF_PREAMBLE_BYTES]) {
    kvf_writer_t w = kvf_writer(bytes, KVF_PREAMBLE_BYTES);
    kvf_write_bytes(&w, preamble_magic, sizeof(preamble_magic));
    kvf_write_u16(&w, preamble->major);
    kvf_write_u16(&w, preamble->minor);
    kvf_write_u8(&w, preamble->initiator);
    kvf_write_le(&w, 0, 3);
    kvf_write_bytes(&w, preamble->nonce, KVF_NONCE_BYTES);
}

kvf_status_t kvf_preamble_decode(const uint8_t bytes[KVF_PREAMBLE_BYTES],
                                 kvf_preamble_t *preamble_p, kvf_detail_t *detail) {
    kvf_reader_t r = kvf_reader(bytes, KVF_PREAMBLE_BYTES);
    if (memcmp(kvf_read_bytes(&r, sizeof(preamble_magic)), preamble_magic,
               sizeof(preamble_magic)) != 0) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "the other end does not speak kvferry");
    }
    kvf_preamble_t preamble = {0};
    preamble.major = kvf_read_u16(&r);
    preamble.minor = kvf_read_u16(&r);
    /* What follows may mean something else in another major version, so this comes first. */
    if (preamble.major != KVF_PROTOCOL_MAJOR) {
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                        "protocol %d.%d here, %u.%u there; run the same major version on both",
                        KVF_PROTOCOL_MAJOR, KVF_PROTOCOL_MINOR, preamble.major, preamble.minor);
    }
    uint8_t role = kvf_read_u8(&r);
    if (role > 1 || kvf_read_le(&r, 3) != 0) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL,
                        "the preamble's role or reserved bytes are wrong");
    }
    preamble.initiator = role == 1;
    memcpy(preamble.nonce, kvf_read_bytes(&r, KVF_NONCE_BYTES), KVF_NONCE_BYTES);
    *preamble_p = preamble;
    return KVF_OK;
}

/* ---- hello ---- */

static kvf_status_t hello_mac(const uint8_t key[32], const kvf_hello_binding_t *binding,
                              const uint8_t *hello, size_t bytes, uint8_t mac[KVF_MAC_BYTES]) {
    _Static_assert(sizeof(initiator_label) == sizeof(responder_label), "one length");
    const kvf_bytes_t parts[] = {
        {binding->from_initiator ? initiator_label : responder_label, sizeof(initiator_label)},
        {binding->initiator_preamble, KVF_PREAMBLE_BYTES},
        {binding->responder_preamble, KVF_PREAMBLE_BYTES},
        {hello, bytes},
    };
    return kvf_mac(key, parts, 4, mac);
}

kvf_status_t kvf_hello_pack(const kvf_alloc_t *alloc, const uint8_t key[32],
                            const kvf_hello_binding_t *binding, const Kvf__Wire__Hello *hello,
                            uint8_t **frame_p, size_t *bytes_p) {
    size_t hello_bytes = kvf__wire__hello__get_packed_size(hello);
    if (hello_bytes > KVF_HELLO_CAP_BYTES - KVF_MAC_BYTES) {
        return KVF_ERR_TOO_LARGE;
    }
    size_t payload_bytes = KVF_MAC_BYTES + hello_bytes;
    uint8_t *frame = kvf_alloc(alloc, KVF_FRAME_HEADER_BYTES + payload_bytes);
    if (frame == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    uint8_t *mac = frame + KVF_FRAME_HEADER_BYTES;
    kvf_frame_header(KVF_FRAME_HELLO, (uint32_t)payload_bytes, frame);
    (void)kvf__wire__hello__pack(hello, mac + KVF_MAC_BYTES);
    kvf_status_t status = hello_mac(key, binding, mac + KVF_MAC_BYTES, hello_bytes, mac);
    if (status != KVF_OK) {
        kvf_free(alloc, frame);
        return status;
    }
    *frame_p = frame;
    *bytes_p = KVF_FRAME_HEADER_BYTES + payload_bytes;
    return KVF_OK;
}

static const char *check_group(const Kvf__Wire__LayerGroup *group) {
    if (!kvf_text_ok(group->name, 1, KVF_GROUP_NAME_BYTES - 1)) {
        return "groups.name";
    }
    return group->n_layers < 1 || group->n_layers > KVF_MAX_GROUP_LAYERS ? "groups.layers" : NULL;
}

static const char *check_region(const Kvf__Wire__Region *region, size_t n_groups) {
    if (region->group_idx >= n_groups) {
        return "regions.group_idx";
    }
    if (region->memory > KVF_MEM_FAKE) {
        return "regions.memory";
    }
    uint64_t bytes;
    if (region->n_pages > INT32_MAX ||
        kvf_mul_u64(region->page_bytes, region->n_pages, &bytes) != KVF_OK) {
        return "regions.n_pages";
    }
    return NULL;
}

/* Names the first field that is wrong, or returns NULL. What a group's numbers mean is the layout's
 * to check. */
static const char *check_hello(const Kvf__Wire__Hello *hello) {
    if (!kvf_text_ok(hello->instance, 1, KVF_TEXT_BYTES)) {
        return "instance";
    }
    if (hello->incarnation.len != KVF_INCARNATION_BYTES) {
        return "incarnation";
    }
    if (hello->wanted.len != KVF_INCARNATION_BYTES) {
        return "wanted";
    }
    if (!kvf_text_ok(hello->control_address, 1, KVF_TEXT_BYTES)) {
        return "control_address";
    }
    if (!kvf_text_ok(hello->version, 1, KVF_TEXT_BYTES)) {
        return "version";
    }
    if (hello->n_groups < 1 || hello->n_groups > KVF_MAX_GROUPS) {
        return "groups";
    }
    if (hello->n_regions > KVF_MAX_GROUPS) {
        return "regions";
    }
    if (hello->n_movers > KVF_HELLO_MAX_MOVERS) {
        return "movers";
    }
    const char *wrong = NULL;
    for (size_t i = 0; i < hello->n_groups && wrong == NULL; i++) {
        wrong = check_group(hello->groups[i]);
    }
    for (size_t i = 0; i < hello->n_regions && wrong == NULL; i++) {
        wrong = check_region(hello->regions[i], hello->n_groups);
    }
    for (size_t i = 0; i < hello->n_movers && wrong == NULL; i++) {
        wrong = kvf_text_ok(hello->movers[i]->name, 1, KVF_TEXT_BYTES) ? NULL : "movers.name";
    }
    return wrong;
}

kvf_status_t kvf_hello_unpack(const kvf_alloc_t *alloc, const uint8_t key[32],
                              const kvf_hello_binding_t *binding, const uint8_t *payload,
                              size_t bytes, Kvf__Wire__Hello **hello_p, kvf_detail_t *detail) {
    if (bytes < KVF_MAC_BYTES) {
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "hello of %zu bytes: too short for its MAC",
                        bytes);
    }
    uint8_t mac[KVF_MAC_BYTES];
    kvf_status_t status =
        hello_mac(key, binding, payload + KVF_MAC_BYTES, bytes - KVF_MAC_BYTES, mac);
    if (status != KVF_OK) {
        return kvf_fail(detail, status, "the hello's MAC could not be computed");
    }
    if (!kvf_mac_equal(mac, payload)) {
        return kvf_fail(
            detail, KVF_ERR_PEER_REFUSED,
            "the other node does not know the cluster key; give both the same key file");
    }
    ProtobufCMessage *message;
    status = kvf_message_decode(alloc, KVF_FRAME_HELLO, payload + KVF_MAC_BYTES,
                                bytes - KVF_MAC_BYTES, &message, detail);
    if (status != KVF_OK) {
        return status;
    }
    Kvf__Wire__Hello *hello = (Kvf__Wire__Hello *)message;
    const char *wrong = check_hello(hello);
    if (wrong != NULL) {
        kvf_message_free(alloc, message);
        return kvf_fail(detail, KVF_ERR_PROTOCOL, "hello: wrong field %s", wrong);
    }
    *hello_p = hello;
    return KVF_OK;
}

/* ---- layout ---- */

/* A number that no enum of this version has is a newer peer's. */
static kvf_status_t check_kind(const Kvf__Wire__LayerGroup *group, const char *field,
                               uint32_t value, uint32_t last, kvf_detail_t *detail) {
    if (value > last) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "group %s: %s %u is not known here",
                        group->name, field, value);
    }
    return KVF_OK;
}

static kvf_status_t read_group(const Kvf__Wire__LayerGroup *wire, kvf_layer_group_t *group,
                               kvf_detail_t *detail) {
    kvf_status_t status = check_kind(wire, "dtype", wire->dtype, KVF_DTYPE_F8_E4M3, detail);
    if (status == KVF_OK) {
        status = check_kind(wire, "order", wire->order, KVF_ORDER_NHD, detail);
    }
    if (status == KVF_OK) {
        status = check_kind(wire, "kind", wire->kind, KVF_GROUP_STATE, detail);
    }
    if (status == KVF_OK) {
        status = check_kind(wire, "role", wire->role, KVF_GROUP_DRAFT, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    memcpy(group->name, wire->name, strlen(wire->name) + 1);
    group->n_layers = (uint32_t)wire->n_layers;
    memcpy(group->layers, wire->layers, wire->n_layers * sizeof(group->layers[0]));
    group->window = wire->window;
    group->sinks = wire->sinks;
    group->tokens_per_block = wire->tokens_per_block;
    group->kv_heads = wire->kv_heads;
    group->head_dim = wire->head_dim;
    group->kv_factor = wire->kv_factor;
    group->dtype = (kvf_dtype_t)wire->dtype;
    group->order = (kvf_order_t)wire->order;
    group->kind = (kvf_group_kind_t)wire->kind;
    group->role = (kvf_group_role_t)wire->role;
    return KVF_OK;
}

kvf_status_t kvf_hello_layout(const Kvf__Wire__Hello *hello, kvf_layout_t *layout_p,
                              kvf_detail_t *detail) {
    kvf_layout_t layout = {.n_groups = (uint32_t)hello->n_groups};
    for (uint32_t i = 0; i < layout.n_groups; i++) {
        kvf_status_t status = read_group(hello->groups[i], &layout.groups[i], detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    kvf_status_t status = kvf_layout_check(&layout, detail);
    if (status == KVF_OK) {
        *layout_p = layout;
    }
    return status;
}

void kvf_layout_to_wire(const kvf_layout_t *layout, Kvf__Wire__LayerGroup *groups) {
    for (uint32_t i = 0; i < layout->n_groups; i++) {
        const kvf_layer_group_t *group = &layout->groups[i];
        Kvf__Wire__LayerGroup *wire = &groups[i];
        kvf__wire__layer_group__init(wire);
        /* Only read when packed; the generated struct knows no const. */
        wire->name = (char *)(uintptr_t)group->name;
        wire->n_layers = group->n_layers;
        wire->layers = (uint32_t *)(uintptr_t)group->layers;
        wire->window = group->window;
        wire->sinks = group->sinks;
        wire->tokens_per_block = group->tokens_per_block;
        wire->kv_heads = group->kv_heads;
        wire->head_dim = group->head_dim;
        wire->kv_factor = group->kv_factor;
        wire->dtype = group->dtype;
        wire->order = group->order;
        wire->kind = group->kind;
        wire->role = group->role;
    }
}
