/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context node moves: it writes to pages that the generation node granted. Push, by any mover;
 * with PACED also pull on software transports, where R asks for each window. The pages in danger
 * are R's. Sections are those of docs/protocol.md.
 */
#define MOVER_DIED (s_inc > 1 || !s_alive)
#define MOVER_INC(t) s_inc_of[t]
#include "quarantine_world.pml"

#ifndef PACED
#define PACED 0
#endif

/* R. The mask of pages that a request holds is granted to its transfer and to no other; that it is
 * the very grant, page generation and key included, is what comparing with it stands for. */
byte holds[NREQ];
byte good[NREQ];   /* the pages of a request that have its bytes */
bit committed[NREQ];
bit fenced[NREQ];  /* our end of the path on which it would write is destroyed */

/* S */
bit claimed[NREQ];
byte todo[NREQ];     /* granted, not posted yet */
byte wants[NREQ];    /* PACED: windows that R has still to ask for */
byte credit[NREQ];   /* PACED: windows that R asked for and that were not posted yet */
bit unproven[NREQ];  /* a copy was reported as failed: nobody knows whether it will land */
bit final_sent[NREQ];
bit source[NREQ];    /* the source page is still this request's */

#define FREE_PAGES (ALL_PAGES & ~(holds[0] | holds[1]))

/* kvf_core_grant_check: the transfer lives and the page is in its grant. */
#if BUG_NO_GENERATION
#define GRANTED(t, p) (((holds[0] | holds[1]) & BIT(p)) != 0)
#else
#define GRANTED(t, p) (r[t] == LIVE && (holds[t] & BIT(p)) != 0)
#endif

/* ---- R ---- */

/* kvf_pages_write_end, kvf_pages_settle: the only way to a free page. */
inline r_free(t) {
    r[t] = RELEASED;
    assert(CHECKED || flight[t] == 0); /* no page is freed while a write may land */
    holds[t] = 0;
    good[t] = 0;
    if
    :: !r_released[t] -> give(r_released[t])
    :: else -> assert(SEEK != SEEN_HEALED) /* released when it was poisoned, healed now */
    fi
}

/* kvf_recv_end and kvf_recv_settle; `proof` is what else proves than the kind of mover. */
inline r_end(t, ok, proof) {
    give(r_result[t]);
    wants[t] = 0;
    committed[t] = 0;
    if
    :: ok -> assert(good[t] == holds[t]); succeed() /* all of this request's bytes, and no others */
    :: else
    fi;
    if
    :: CHECKED || ok || proof || !asked[t] || BUG_FREE_AT_ABORT -> r_free(t)
    :: else -> r[t] = DOUBT
    fi;
    asked[t] = 0
}

/* The same, and the peer is told if it was asked. */
inline r_give_up(t, proof) {
    if
    :: asked[t] -> tell_s(ABORT, t, 0)
    :: else
    fi;
    r_end(t, 0, proof)
}

inline r_fence(u, t) {
    if
    :: r[u] == LIVE && asked[u] && s_inc_of[u] == s_inc_of[t] -> r_give_up(u, 0)
    :: else
    fi;
    if
    :: IN_DOUBT(r[u]) && s_inc_of[u] == s_inc_of[t] -> fenced[u] = 1; flight[u] = 0; r_free(u)
    :: else
    fi
}

proctype receive(byte t) {
end:
    do
    /* kvf_core_recv_open: a ticket came, and there are pages; which ones is anybody's guess */
    :: atomic { r[t] == NEW && s_inc_of[t] != 0 && COUNT(FREE_PAGES) >= PAGES_OF(t) ->
            r[t] = LIVE;
            do
            :: COUNT(holds[t]) < PAGES_OF(t) ->
                if
                :: FREE_PAGES & 1 -> holds[t] = holds[t] | 1
                :: FREE_PAGES & 2 -> holds[t] = holds[t] | 2
                fi
            :: else -> break
            od;
            wants[t] = PACED * PAGES_OF(t)
        }
    /* kvf_recv_on_peer_up; or it is not the incarnation that the ticket names */
    :: atomic { r[t] == LIVE && !asked[t] && r_peer != 0 ->
            if
            :: r_peer == s_inc_of[t] -> asked[t] = 1; tell_s(REQ, t, holds[t])
            :: else -> r_end(t, 0, 0)
            fi
        }
#if PACED
    :: atomic { r[t] == LIVE && asked[t] && wants[t] > 0 -> wants[t]--; tell_s(WANT, t, 0) }
#endif
    /* kvf_core_recv_cancel */
    :: atomic { r[t] == LIVE -> r_give_up(t, 0) }
    /* on_timer: the deadline, the same but for its name */
    :: atomic { BUG_FREE_AT_DEADLINE && r[t] == LIVE -> r_give_up(t, 1) }
    /* complete_if_whole: committed, and all bytes are there. Who is written to from one side counts
     * no bytes; the commit stands for them. */
    :: atomic { r[t] == LIVE && committed[t] && (!CHECKED || good[t] == holds[t]) ->
            tell_s(DONE, t, 0); r_end(t, 1, 0) }
    /* on_timer: quarantine_ms is over. The released event comes, with the list. */
    :: atomic { r[t] == DOUBT ->
            if
            :: BUG_FREE_AT_QUARANTINE -> r_free(t)
            :: else -> r[t] = POISONED; give(r_released[t])
            fi
        }
    /* "Pages": the peer's process is dead. */
    :: atomic { IN_DOUBT(r[t]) && MAPPED && gone && s_inc_of[t] == 1 -> r_free(t) }
    /* "Pages": the worker on which this peer writes is destroyed, and with it what all its
     * transfers may still write. */
    :: atomic { IN_DOUBT(r[t]) && RDMA -> r_fence(0, t); r_fence(1, t) }
    od
}

/* kvf_recv_on_peer: the session is over. That says nothing about what was posted. */
inline r_peer_lost(u) {
    if
    :: r[u] == LIVE -> r_end(u, 0, BUG_CRASH_FENCES)
    :: else
    fi
}

inline r_killed(u) {
    if
    :: r[u] != NEW ->
        r[u] = LOST; holds[u] = 0; good[u] = 0; committed[u] = 0; asked[u] = 0; wants[u] = 0;
        r_result[u] = 0; r_released[u] = 0
    :: else
    fi;
    if
    :: !CHECKED -> flight[u] = 0; fenced[u] = (r[u] == LOST) /* its memory and its keys are gone */
    :: else                          /* chunks may come to the next incarnation's handler */
    fi
}

inline r_abort_again(u) {
    if
    :: IN_DOUBT(r[u]) && !BUG_NO_SECOND_ABORT -> tell_s(ABORT, u, 0)
    :: else
    fi
}

proctype generation() {
    mtype m;
    byte t;
end:
    do
    /* kvf_peer_reach: somebody waits for the peer, or has pages in doubt with it */
    :: atomic { !r_dialled && s_alive &&
            (r[0] == LIVE || r[1] == LIVE || IN_DOUBT(r[0]) || IN_DOUBT(r[1])) ->
            session++; intact = 1; r_dialled = 1; tell_s(HELLO, 0, 0) }
    /* kvf_peer_fail: what was not read is discarded */
    :: atomic { r_dialled && !intact ->
            r_peer_lost(0); r_peer_lost(1);
            r_dialled = 0; r_peer = 0; drop_all_to_r() }
    :: atomic { to_r?m, t, _ ->
            if
            /* A new session: Abort again for what is in doubt. It may be with another incarnation
             * than the transfers were; then its word does not count (below). */
            :: m == WELCOME -> r_peer = t; r_abort_again(0); r_abort_again(1)
            :: m == COMMIT ->
                if
                :: r[t] == LIVE -> committed[t] = 1
                :: else
                fi
            :: m == ABORT ->
                if
                :: r[t] == LIVE -> r_end(t, 0, 0)
                :: else
                fi
            :: m == DRAINED -> /* kvf_recv_on_drained: from the peer that was granted to? */
                if
                :: IN_DOUBT(r[t]) && (r_peer == s_inc_of[t] || BUG_OLD_DRAINED) -> r_free(t)
                :: else
                fi
            fi;
            m = 0; t = 0
        }
    /* killed, and started again at the same address */
    :: atomic { faults > 0 ->
            faults--; r_killed(0); r_killed(1);
            intact = 0; r_dialled = 0; r_peer = 0; drop_all_to_r() }
    od
}

/* ---- S ---- */

/* kvf_send_finish_off: when no own copy is posted any more. Drained is more than that: a copy that
 * was reported as failed may still land. */
inline s_finish_off(t, ok) {
    if
    :: posted[t] == 0 ->
        s[t] = RELEASED;
        source[t] = 0;
        give(s_released[t]);
        if
        :: claimed[t] && !ok && (!unproven[t] || BUG_FAILED_IS_DRAINED) -> tell_r(DRAINED, t, 0)
        :: else
        fi;
        claimed[t] = 0
    :: else -> s[t] = ENDED
    fi
}

/* kvf_send_end */
inline s_end(t, ok) {
    give(s_result[t]);
    todo[t] = 0;
    credit[t] = 0;
    final_sent[t] = 0;
    if
    :: BUG_DRAINED_EARLY && !ok && claimed[t] -> tell_r(DRAINED, t, 0)
    :: else
    fi;
    s_finish_off(t, ok)
}

inline s_post(t, p) {
    todo[t] = todo[t] & ~BIT(p);
    posted[t] = posted[t] | BIT(p);
    if
    :: PACED -> credit[t]--
    :: else
    fi;
    if
    :: !fenced[t] -> flight[t] = flight[t] | BIT(p)
    :: else
    fi
}

inline s_moved(t, p) {
    assert(source[t]); /* until now the source may have been read */
    posted[t] = posted[t] & ~BIT(p);
    if
    :: s[t] == ENDED -> s_finish_off(t, 0)
    :: else
    fi
}

proctype send(byte t) {
end:
    do
    /* kvf_core_send_open, finish, ticket */
    :: atomic { s_alive && s[t] == NEW -> s[t] = OFFERED; s_inc_of[t] = s_inc; source[t] = 1 }
    /* cancelled, or the lease is over and nobody came */
    :: atomic { s[t] == OFFERED -> s_end(t, 0) }
    /* cancelled, or the receiver did not end it in its time */
    :: atomic { s[t] == LIVE -> tell_r(ABORT, t, 0); s_end(t, 0) }
    :: atomic { BUG_FREE_AT_LEASE && s[t] == LIVE -> give(s_result[t]); give(s_released[t]);
            todo[t] = 0; s[t] = RELEASED; source[t] = 0 }
    /* kvf_send_pump */
    :: atomic { s[t] == LIVE && (todo[t] & 1) && (!PACED || credit[t] > 0) -> s_post(t, 0) }
    :: atomic { s[t] == LIVE && (todo[t] & 2) && (!PACED || credit[t] > 0) -> s_post(t, 1) }
    /* kvf_send_on_moved: a put is complete when it has landed, an active message when it was handed
     * over */
    :: atomic { (posted[t] & 1) && (CHECKED || !(flight[t] & 1)) -> s_moved(t, 0) }
    :: atomic { (posted[t] & 2) && (CHECKED || !(flight[t] & 2)) -> s_moved(t, 1) }
    /* the same with an error: the path broke, or was closed by force */
    :: atomic { (RDMA || BARE) && faults > 0 && posted[t] != 0 ->
            faults--; unproven[t] = 1; posted[t] = 0;
            if
            :: s[t] == LIVE -> tell_r(ABORT, t, 0); s_end(t, 0)
            :: s[t] == ENDED -> s_finish_off(t, 0)
            :: else
            fi
        }
    /* send_final_if_complete */
    :: atomic { s[t] == LIVE && todo[t] == 0 && posted[t] == 0 && !final_sent[t] ->
            final_sent[t] = 1; tell_r(COMMIT, t, 0) }
    od
}

/* Another incarnation's copies are nothing that S knows of. */
#define KNOWN_DRAINED(t) (!unproven[t] || s_inc != s_inc_of[t] || BUG_FAILED_IS_DRAINED)

/* A request that cannot be served: no such send, or it has ended. (kvf_send_on_request) */
inline s_refuse(t) {
    tell_r(ABORT, t, 0);
    if
    :: KNOWN_DRAINED(t) -> tell_r(DRAINED, t, 0)
    :: else
    fi
}

/* kvf_send_on_abort. What is unknown was not asked for before it was given up, and never will be:
 * messages come in order, and those of another session never. */
inline s_on_abort(t) {
    if
    :: s[t] == LIVE -> s_end(t, 0) /* Drained comes when it is */
    :: s[t] == ENDED               /* the same */
    :: else ->
        if
        :: KNOWN_DRAINED(t) && !BUG_ABORT_UNANSWERED -> tell_r(DRAINED, t, 0)
        :: else
        fi
    fi
}

inline s_end_live(u) {
    if
    :: s[u] == LIVE -> s_end(u, 0)
    :: else
    fi
}

/* kvf_peer_fail: its transfers end, and what was not read is discarded. */
inline s_lose_peer() {
    s_session = 0;
    s_end_live(0);
    s_end_live(1);
    do
    :: !BUG_OLD_INPUT && nempty(to_s) && !(to_s?[HELLO, _, _, _]) -> to_s?_, _, _, _
    :: BUG_OLD_INPUT || empty(to_s) || to_s?[HELLO, _, _, _] -> break
    od
}

inline s_killed(u) {
    if
    :: s[u] != NEW ->
        s[u] = LOST; todo[u] = 0; posted[u] = 0; credit[u] = 0; source[u] = 0; claimed[u] = 0;
        final_sent[u] = 0; s_result[u] = 0; s_released[u] = 0
    :: else
    fi
}

/* on_message of link.c */
inline s_handle(m, t, pages) {
    if
    :: m == REQ -> /* kvf_send_on_request */
        if
        :: s[t] == OFFERED && s_inc_of[t] == s_inc ->
            s[t] = LIVE; claimed[t] = 1; todo[t] = pages
        :: else -> s_refuse(t)
        fi
    :: m == WANT ->
        if
        :: s[t] == LIVE -> credit[t]++
        :: else
        fi
    :: m == DONE -> /* kvf_send_on_done */
        if
        :: s[t] == LIVE -> assert(final_sent[t]); s_end(t, 1)
        :: else
        fi
    :: m == ABORT -> s_on_abort(t)
    fi
}

proctype context() {
    mtype m;
    byte c, t, pages;
end:
    do
    /* A new session may begin before S has noticed the end of the old one; it ends that one. */
    :: atomic { to_s??[HELLO, _, _, _] -> s_lose_peer(); to_s??HELLO, c, _, _;
            s_session = c; tell_r(WELCOME, s_inc, 0); c = 0 }
    /* silence, or nobody to connect to, or R has given S up */
    :: atomic { s_session != 0 && (!intact || s_session != session) -> s_lose_peer() }
    :: atomic { s_session != 0 && nempty(to_s) && !(to_s?[HELLO, _, _, _]) ->
            to_s?m, _, t, pages; s_handle(m, t, pages);
            m = 0; t = 0; pages = 0 }
#if BUG_OLD_INPUT /* beside it, what is left of the session before */
    :: atomic { to_s??m, eval(s_session), t, pages -> s_handle(m, t, pages);
            m = 0; t = 0; pages = 0 }
#endif
    /* killed; it may come back at the same address */
    :: atomic { s_alive && s_inc == 1 && faults > 0 ->
            faults--; s_alive = 0; s_killed(0); s_killed(1);
            intact = 0; s_session = 0; drop_all_to_s();
            if
            :: s_stays_down = 1
            :: skip
            fi
        }
    :: atomic { !s_alive && !s_stays_down -> s_alive = 1; s_inc++ }
    od
}

/* ---- the data path ---- */

/* The bytes of a posted copy arrive. An active message is copied by R's handler, if it may
 * (kvf_core_grant_check); anything else is not asked. */
inline land(t, p) {
    flight[t] = flight[t] & ~BIT(p);
    if
    :: CHECKED && !GRANTED(t, p) -> assert(SEEK != SEEN_REFUSED)
    :: else ->
        assert(holds[t] & BIT(p)); /* no write lands in a page that is not its own */
        good[t] = good[t] | BIT(p)
    fi
}

proctype path(byte t) {
end:
    do
    :: atomic { flight[t] & 1 -> land(t, 0) }
    :: atomic { flight[t] & 2 -> land(t, 1) }
    /* an active message is lost with its connection */
    :: atomic { CHECKED && flight[t] != 0 -> flight[t] = 0 }
    od
}

/* ---- what must have happened when nothing can happen any more ---- */

/* No proof can come: the poster is dead, or a copy is in doubt for good. */
#define NO_PROOF(t) (BARE && (unproven[t] || s[t] == LOST))

#define SHORT_OF_PAGES (IN_DOUBT(r[0]) || IN_DOUBT(r[1]))

inline judge(t) {
    assert(r[t] == LOST || r[t] == RELEASED || (r[t] == POISONED && NO_PROOF(t)) ||
           (r[t] == NEW && (s_inc_of[t] == 0 || SHORT_OF_PAGES)));
    assert(s[t] == LOST || s[t] == RELEASED || (s[t] == NEW && !s_alive));
    assert(r_result[t] && r_released[t] || r[t] == LOST || r[t] == NEW);
    assert(s_result[t] && s_released[t] || s[t] == LOST || s[t] == NEW);
    assert((holds[t] == 0) == !IN_DOUBT(r[t]));
    assert(SEEK != SEEN_POISON || !IN_DOUBT(r[t]))
}

init {
    atomic {
        run network();
        run generation();
        run context();
        run receive(0);
        run receive(1);
        run send(0);
        run send(1);
        run path(0);
        run path(1)
    }
    timeout -> judge(0); judge(1)
}
