/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the seeds of the corpora: `fuzz-seeds tests/fuzz/corpus`. Run it again when the wire
 * changes, and commit what it wrote; inputs that a fuzzer found keep their own names and stay.
 */
#include "proto/hello.h"
#include "proto/ticket.h"
#include "tests/fuzz/fuzz.h"

#include <limits.h>

static const char *corpus;

static void put(const char *target, const char *name, const uint8_t *first, size_t n_first,
                const uint8_t *second, size_t n_second) {
    char path[PATH_MAX];
    FUZZ_CHECK(snprintf(path, sizeof(path), "%s/%s/%s", corpus, target, name) < (int)sizeof(path));
    FILE *file = fopen(path, "wb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    FUZZ_CHECK(fwrite(first, 1, n_first, file) == n_first);
    FUZZ_CHECK(n_second == 0 || fwrite(second, 1, n_second, file) == n_second);
    FUZZ_CHECK(fclose(file) == 0);
}

/* The payload as input of the message target; the frame, twice, as input of the frame target. */
static void put_message(kvf_frame_type_t type, const char *name, const ProtobufCMessage *message) {
    const uint8_t byte = (uint8_t)type;
    uint8_t *frame;
    size_t bytes;
    FUZZ_CHECK(kvf_message_pack(kvf_alloc_default(), type, message, UINT32_MAX, &frame, &bytes) ==
               KVF_OK);
    put("message", name, &byte, 1, frame + KVF_FRAME_HEADER_BYTES, bytes - KVF_FRAME_HEADER_BYTES);
    const uint8_t piece = 7;
    uint8_t twice[2048];
    FUZZ_CHECK(2 * bytes <= sizeof(twice));
    memcpy(twice, frame, bytes);
    memcpy(twice + bytes, frame, bytes);
    put("frame", name, &piece, 1, twice, 2 * bytes);
    kvf_free(kvf_alloc_default(), frame);
}

static void put_messages(void) {
    const kvf_transfer_id_t id = {{{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}, 300};
    Kvf__Wire__TransferId transfer;
    kvf_transfer_id_write(&id, &transfer);
    uint64_t ordinals[] = {16, 17, 18};
    uint64_t generations[] = {1, 1, 70000};
    uint64_t digests[] = {1, 2, UINT64_MAX};
    uint32_t slots[] = {5, 900, 3};
    uint8_t blob[] = "blob";
    char request_id[] = "req-1";
    char mover[] = "ucx";
    char why[] = "cancelled by the client";

    Kvf__Wire__Grant grant;
    kvf__wire__grant__init(&grant);
    grant.group_idx = 1;
    grant.n_ordinals = grant.n_slots = grant.n_generations = 3;
    grant.ordinals = ordinals;
    grant.slots = slots;
    grant.generations = generations;
    Kvf__Wire__Grant *grants[] = {&grant, &grant};
    Kvf__Wire__RecvRequest request;
    kvf__wire__recv_request__init(&request);
    request.transfer = &transfer;
    request.ticket = (ProtobufCBinaryData){sizeof(blob), blob};
    request.request_id = request_id;
    request.prompt_len = 600;
    request.draft_len = 3;
    request.cached_tokens = 512;
    request.timeout_us = 30000000;
    request.skip_holes = true;
    request.mover = mover;
    request.grant_key = UINT64_C(0x1122334455667788);
    request.n_grants = 2;
    request.grants = grants;
    put_message(KVF_FRAME_RECV_REQUEST, "recv_request", &request.base);

    Kvf__Wire__CommitRange range;
    kvf__wire__commit_range__init(&range);
    range.group_idx = 1;
    range.layer_end_idx = 18;
    range.n_ordinals = range.n_generations = range.n_digests = 3;
    range.ordinals = ordinals;
    range.generations = generations;
    range.digests = digests;
    Kvf__Wire__CommitRange *ranges[] = {&range, &range};
    int32_t tokens[] = {-1, 262143};
    Kvf__Wire__Final final;
    kvf__wire__final__init(&final);
    final.n_first_tokens = final.n_draft_tokens = 2;
    final.first_tokens = final.draft_tokens = tokens;
    final.data = request.ticket;
    Kvf__Wire__Commit commit;
    kvf__wire__commit__init(&commit);
    commit.transfer = &transfer;
    commit.n_ranges = 2;
    commit.ranges = ranges;
    commit.final = &final;
    put_message(KVF_FRAME_COMMIT, "commit", &commit.base);

    Kvf__Wire__Done done;
    kvf__wire__done__init(&done);
    done.transfer = &transfer;
    put_message(KVF_FRAME_DONE, "done", &done.base);
    Kvf__Wire__Drained drained;
    kvf__wire__drained__init(&drained);
    drained.transfer = &transfer;
    put_message(KVF_FRAME_DRAINED, "drained", &drained.base);
    Kvf__Wire__Ready ready;
    kvf__wire__ready__init(&ready);
    ready.transfer = &transfer;
    ready.bytes = 1 << 20;
    put_message(KVF_FRAME_READY, "ready", &ready.base);
    Kvf__Wire__Pull pull;
    kvf__wire__pull__init(&pull);
    pull.transfer = &transfer;
    pull.bytes = 1 << 19;
    put_message(KVF_FRAME_PULL, "pull", &pull.base);
    Kvf__Wire__Join join;
    kvf__wire__join__init(&join);
    join.path = 3;
    join.invitation = request.ticket;
    put_message(KVF_FRAME_JOIN, "join", &join.base);
    Kvf__Wire__Joined joined;
    kvf__wire__joined__init(&joined);
    joined.path = 3;
    joined.answer = request.ticket;
    put_message(KVF_FRAME_JOINED, "joined", &joined.base);
    Kvf__Wire__Leave leave;
    kvf__wire__leave__init(&leave);
    leave.path = 3;
    leave.own = true;
    leave.message = why;
    put_message(KVF_FRAME_LEAVE, "leave", &leave.base);
    Kvf__Wire__Fetch fetch;
    kvf__wire__fetch__init(&fetch);
    fetch.transfer = &transfer;
    fetch.path = 3;
    fetch.first = 300;
    fetch.n = KVF_FETCHED_AT_ONCE;
    put_message(KVF_FRAME_FETCH, "fetch", &fetch.base);
    Kvf__Wire__Abort abort_message;
    kvf__wire__abort__init(&abort_message);
    abort_message.transfer = &transfer;
    abort_message.status = KVF_ERR_CANCELLED;
    abort_message.message = why;
    put_message(KVF_FRAME_ABORT, "abort", &abort_message.base);
    Kvf__Wire__Refuse refuse;
    kvf__wire__refuse__init(&refuse);
    refuse.status = KVF_ERR_INCOMPATIBLE;
    refuse.message = why;
    put_message(KVF_FRAME_REFUSE, "refuse", &refuse.base);
    Kvf__Wire__Heartbeat heartbeat;
    kvf__wire__heartbeat__init(&heartbeat);
    uint64_t renewed[] = {300, 299, 7};
    heartbeat.sequence = 12345;
    heartbeat.received = 678;
    heartbeat.n_renewed = 3;
    heartbeat.renewed = renewed;
    put_message(KVF_FRAME_HEARTBEAT, "heartbeat", &heartbeat.base);
    Kvf__Wire__Bye bye;
    kvf__wire__bye__init(&bye);
    bye.message = why;
    put_message(KVF_FRAME_BYE, "bye", &bye.base);
}

static void put_hello(void) {
    const kvf_preamble_t preamble = {KVF_PROTOCOL_MAJOR, KVF_PROTOCOL_MINOR, true, {9, 8, 7}};
    uint8_t bytes[KVF_PREAMBLE_BYTES];
    kvf_preamble_encode(&preamble, bytes);

    uint32_t layers[2][3] = {{1, 3, 5}, {0, 2, 4}};
    char names[2][8] = {"full", "sliding"};
    char text[] = "127.0.0.1:9100";
    char mover_name[] = "ucx";
    uint8_t blob[] = "sixteen bytes ..";
    Kvf__Wire__LayerGroup groups[2];
    Kvf__Wire__LayerGroup *group_list[] = {&groups[0], &groups[1]};
    Kvf__Wire__Region regions[2];
    Kvf__Wire__Region *region_list[] = {&regions[0], &regions[1]};
    for (uint32_t g = 0; g < 2; g++) {
        kvf__wire__layer_group__init(&groups[g]);
        groups[g].name = names[g];
        groups[g].n_layers = 3;
        groups[g].layers = layers[g];
        groups[g].window = g == 0 ? 0 : 512;
        groups[g].tokens_per_block = 32;
        groups[g].kv_heads = 1;
        groups[g].head_dim = 256;
        groups[g].kv_factor = 2;
        groups[g].dtype = KVF_DTYPE_BF16;
        kvf__wire__region__init(&regions[g]);
        regions[g].group_idx = g;
        regions[g].page_bytes = 98304;
        regions[g].n_pages = 4096;
    }
    Kvf__Wire__Mover mover;
    kvf__wire__mover__init(&mover);
    mover.name = mover_name;
    mover.address = (ProtobufCBinaryData){16, blob};
    Kvf__Wire__Mover *movers[] = {&mover};
    Kvf__Wire__Hello hello;
    kvf__wire__hello__init(&hello);
    hello.instance = hello.control_address = hello.version = text;
    hello.incarnation = mover.address;
    hello.wanted = mover.address;
    hello.layout_digest = 77;
    hello.n_groups = hello.n_regions = 2;
    hello.groups = group_list;
    hello.regions = region_list;
    hello.n_movers = 1;
    hello.movers = movers;
    hello.heartbeat_us = 250000;
    hello.lost_us = 2000000;
    hello.frame_bytes = 16 << 20;
    hello.tp_size = hello.pp_size = hello.cp_size = 1;
    uint8_t packed[512];
    FUZZ_CHECK(kvf__wire__hello__get_packed_size(&hello) <= sizeof(packed));
    put("hello", "hello", bytes, sizeof(bytes), packed, kvf__wire__hello__pack(&hello, packed));
}

static void put_ticket(void) {
    const kvf_ticket_t ticket = {.send_id = 7,
                                 .issuer = {{1, 2, 3}},
                                 .prompt_tokens = 600,
                                 .instance = "prefill-0",
                                 .address = "127.0.0.1:9100",
                                 .request_id = "req-1"};
    const uint8_t key[32] = {1, 2, 4};
    uint8_t bytes[KVF_TICKET_MAX_BYTES];
    char text[KVF_TICKET_TEXT_BYTES];
    size_t n;
    FUZZ_CHECK(kvf_ticket_encode(&ticket, key, bytes, &n) == KVF_OK);
    FUZZ_CHECK(kvf_ticket_to_text(bytes, n, text, sizeof(text)) == KVF_OK);
    put("ticket", "body", bytes, n - 32, NULL, 0);
    put("ticket", "binary", bytes, n, NULL, 0);
    put("ticket", "text", (const uint8_t *)text, strlen(text), NULL, 0);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: fuzz-seeds FOLDER (with a folder of each target's name)\n");
        return 2;
    }
    corpus = argv[1];
    put_messages();
    put_hello();
    put_ticket();
    return 0;
}
