/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a receive: its result, and when its pages are out of everybody's reach. */
#include "kvmgr/base/mutant.h"
#include "transceiver/recv_impl.h"

#include <inttypes.h>
#include <stdio.h>

bool kvf_recv_quiet(const kvf_op_t *op) {
    const kvf_recv_op_t *recv = (const kvf_recv_op_t *)op;
    return recv->n_jobs == 0 && !recv->granted && !op->doubted && !recv->farewell;
}

void kvf_recv_destroy(kvf_op_t *op) {
    kvf_recv_op_t *recv = kvf_recv_of(op);
    const kvf_alloc_t *alloc = op->core->alloc;
    for (uint32_t g = 0; g < KVF_MAX_GROUPS; g++) {
        kvf_free(alloc, recv->groups[g].entries);
        kvf_free(alloc, recv->groups[g].landed);
        kvf_free(alloc, recv->groups[g].claimed);
        kvf_free(alloc, recv->groups[g].leaves);
        kvf_free(alloc, recv->groups[g].landing);
    }
    for (uint32_t i = 0; i < recv->n_jobs; i++) {
        kvf_free(alloc, recv->jobs[i]); /* the driver has ended with them */
    }
    kvf_free(alloc, recv->commits);
    kvf_free(alloc, recv->missing);
    kvf_message_free(alloc, recv->final == NULL ? NULL : &recv->final->base);
    kvf_free(alloc, recv);
}

void kvf_recv_prefetch(const kvf_recv_op_t *recv, uint32_t g, size_t i) {
    const recv_group_t *group = &recv->groups[g];
    if (i + KVF_PREFETCH_BLOCKS < group->n) {
        kvf_pages_prefetch(recv->op.core->config.regions[g].pages,
                           group->entries[i + KVF_PREFETCH_BLOCKS].slot);
    }
}

void kvf_recv_for_pages(kvf_recv_op_t *recv, void (*fn)(kvf_pages_t *pages, int32_t slot)) {
    kvf_core_t *core = recv->op.core;
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            kvf_recv_prefetch(recv, g, i);
            fn(core->config.regions[g].pages, recv->groups[g].entries[i].slot);
        }
    }
}

/* What proves that nothing can write to the pages any more, or NULL. The table of
 * docs/protocol.md "Pages", for the receiver; the sender's is in kvf_send_finish_off(). */
static const char *find_proof(const kvf_recv_op_t *recv) {
    const struct {
        bool holds;
        const char *text;
    } proofs[] = {
        {recv->wanted_pages == 0, "no page was granted"},
        {!recv->requested, "the peer was never told of the grants"},
        {recv->op.status == KVF_OK, "everything has arrived"},
        {recv->drained, "the peer's last access has completed"},
        {recv->op.mapped, "our own last copy has been made"},
        {recv->op.core->config.movers_checked, "our own handler refuses what comes now"},
        {KVF_MUTANT(free_at_cancel), "none"},
    };
    for (size_t i = 0; i < sizeof(proofs) / sizeof(proofs[0]); i++) {
        if (proofs[i].holds) {
            return proofs[i].text;
        }
    }
    return NULL;
}

void kvf_recv_settle(kvf_recv_op_t *recv) {
    bool careless = (recv->op.mapped && KVF_MUTANT(free_while_copying)) ||
                    (!recv->op.mapped && KVF_MUTANT(free_while_storing));
    bool copying = recv->n_jobs > 0 && !careless;
    if (copying || !recv->op.ended) {
        return;
    }
    const char *proof = find_proof(recv);
    if (proof != NULL && recv->op.doubted) {
        kvf_recv_for_pages(recv, kvf_pages_settle);
        kvf_op_settled(&recv->op, proof);
        kvf_op_release(&recv->op);
    } else if (proof != NULL && recv->granted) {
        recv->granted = false;
        kvf_recv_for_pages(recv, kvf_pages_write_end);
        kvf_op_release(&recv->op);
        if (recv->op.mapped && recv->requested && recv->op.status != KVF_OK) {
            kvf_transfer_id_t id = kvf_recv_transfer(recv);
            kvf_peer_tell_drained(recv->op.peer, &id);
        }
    } else if (proof == NULL && recv->granted) {
        recv->granted = false;
        kvf_recv_for_pages(recv, kvf_pages_doubt_write);
        kvf_op_doubt(&recv->op);
    }
}

void kvf_recv_end(kvf_recv_op_t *recv, kvf_status_t status, const char *message, bool tell) {
    kvf_core_t *core = recv->op.core;
    if (recv->op.ended && !KVF_MUTANT(result_twice)) {
        return;
    }
    recv->op.transfer_us = core->now_us - recv->op.opened_us;
    if (recv->final != NULL) {
        uint64_t since =
            kvf_time_after(recv->final->since_prefill_us, core->now_us - recv->final_us);
        recv->op.exposed_us = since < recv->op.transfer_us ? since : recv->op.transfer_us;
    }
    kvf_op_end(&recv->op, status, message);
    kvf_recv_pace(recv);
    if (recv->requested) {
        core->n_landing--;
    }
    if (tell && recv->requested && recv->op.peer != NULL) {
        kvf_transfer_id_t id = kvf_recv_transfer(recv);
        kvf_peer_tell_abort(recv->op.peer, &id, status, message);
    } else if (!KVF_MUTANT(no_farewell) && tell && !recv->requested &&
               core->n_farewells < core->agent.max_transfers) {
        /* Its peer is being reached: it is told when it is up. (If not, the lease is what is left.)
         */
        recv->farewell = true;
        core->n_farewells++;
    }
    if (KVF_MUTANT(drain_while_copying) && recv->op.mapped && recv->requested) {
        kvf_transfer_id_t id = kvf_recv_transfer(recv);
        kvf_peer_tell_drained(recv->op.peer, &id);
    }
    kvf_recv_settle(recv);
    if (KVF_MUTANT(release_at_end)) {
        kvf_op_release(&recv->op);
    }
}

void kvf_recv_on_timer(kvf_timer_t *timer, void *owner) {
    kvf_recv_op_t *recv = owner;
    kvf_core_t *core = recv->op.core;
    char text[KVF_DETAIL_BYTES];
    (void)timer;
    if (!recv->op.ended) {
        (void)snprintf(text, sizeof(text), "not finished within %" PRIu64 " ms; it waited for %s",
                       (core->now_us - recv->op.opened_us) / 1000,
                       !recv->requested      ? "the connection to the context node"
                       : recv->final == NULL ? "the context node to send"
                                             : "bytes that were announced but did not arrive");
        kvf_recv_end(recv, KVF_ERR_DEADLINE, text, true);
        return;
    }
    if (KVF_MUTANT(free_at_timeout)) {
        recv->drained = true;
        kvf_recv_settle(recv);
        return;
    }
    size_t n = 0;
    if (!kvf_op_poison(&recv->op, (size_t)recv->wanted_pages)) {
        return;
    }
    for (uint32_t g = 0; g < core->layout.n_groups; g++) {
        for (size_t i = 0; i < recv->groups[g].n; i++) {
            const recv_entry_t *entry = &recv->groups[g].entries[i];
            recv->op.poisoned[n++] = (kvf_page_ref_t){g, entry->ordinal, entry->slot};
        }
    }
    kvf_recv_for_pages(recv, kvf_pages_poison);
    kvf_op_release(&recv->op);
}

/* ---- given up on our side ---- */

void kvf_recv_cancel_op(kvf_op_t *op, kvf_status_t reason, const char *message) {
    kvf_recv_end(kvf_recv_of(op), reason, message, true);
}

kvf_status_t kvf_core_recv_cancel(kvf_core_t *core, uint64_t id) {
    kvf_op_t *op = kvf_op_find(core, id, KVF_OP_RECV);
    if (op == NULL || op->ended) {
        return KVF_ERR_UNKNOWN;
    }
    kvf_recv_cancel_op(op, KVF_ERR_CANCELLED, "cancelled on the generation side");
    return KVF_OK;
}

static void hear_nothing(void *ctx, const kvf_event_t *event) {
    (void)event;
    (void)ctx;
}

/* A receive without pages, which ends before it was requested: its farewell is what it is for. */
kvf_status_t kvf_core_recv_decline(kvf_core_t *core, const char *request_id, const char *ticket,
                                   kvf_detail_t *detail) {
    kvf_ticket_t read;
    if (core->n_farewells >= core->agent.max_transfers) {
        return kvf_fail(detail, KVF_ERR_AGAIN,
                        "as many tickets as there may be are being declined");
    }
    kvf_recv_op_t *recv = kvf_calloc(core->alloc, 1, sizeof(*recv));
    if (recv == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a ticket's end");
    }
    kvf_status_t status = kvf_op_init(core, &recv->op, KVF_OP_RECV, request_id, hear_nothing, NULL,
                                      kvf_recv_on_timer, detail);
    if (status != KVF_OK) {
        kvf_free(core->alloc, recv);
        return status;
    }
    status = kvf_recv_read_ticket(recv, ticket, &read, detail);
    if (status == KVF_OK) {
        status = kvf_recv_reach(recv, &read, detail);
    }
    if (status != KVF_OK) {
        kvf_op_cleanup(&recv->op);
        kvf_recv_destroy(&recv->op);
        return status;
    }
    recv->lengths.prompt_len = read.prompt_tokens;
    recv->granted = true; /* no page at all: they are released at once */
    kvf_recv_end(recv, KVF_ERR_CANCELLED, "declined on the generation side", true);
    if (kvf_peer_is_up(recv->op.peer)) {
        kvf_recv_on_peer_up(&recv->op);
    }
    return KVF_OK;
}
