/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The generation node moves: it reads pages that the context node granted (pull by a one-sided
 * mover). The pages in danger are S's: if one is freed and rewritten too early, the reader gets
 * another request's bytes as its own. (Pull on software transports: quarantine_push.pml, PACED.) With
 * LENT it is the mover `mapped`, whichever side paces: R reads what S commits, by a mapping of S's
 * pools that it gives back when a session is over and its last read by it has been made.
 * Sections are those of docs/protocol.md.
 */
#define MOVER_DIED (r_inc > 1)
#define MOVER_INC(t) r_inc_of[t]
#include "quarantine_world.pml"

/* S */
byte holds[NREQ];    /* the pages of a request, under lease and then granted to its receiver */
byte s_peer;         /* incarnation of R at the other end of s_session */
bit fenced[NREQ];    /* our end of the path on which it would read is destroyed */

/* Mappings of S's pools (LENT), one for each session in which R asks for something: masks. */
byte lent[3];    /* by R's incarnation: those that S does not know to be gone */
byte returned;   /* that are gone, which S has not noticed yet */
bit back[NREQ];  /* S: there is none any more by which its receiver could read */
byte mapped;     /* R: those that it has */
byte map_of[NREQ]; /* R: the one by which its reads are made; a mapping is named by its session */

/* R */
byte todo[NREQ];     /* granted, not posted yet */
byte good[NREQ];     /* pages read */
byte expected[NREQ]; /* what the grant named; 0: no grant came yet */
bit unproven[NREQ];  /* a read was reported as failed: nobody knows whether it will still happen */
bit target[NREQ];    /* its own pages, into which it reads, are still this request's */

#define FREE_PAGES (ALL_PAGES & ~(holds[0] | holds[1]))

/* ---- S ---- */

/* kvf_pages_read_end, kvf_pages_settle: the only way to a free page. */
inline s_free(t) {
    s[t] = RELEASED;
    assert(flight[t] == 0); /* no page is freed while a read may come */
    holds[t] = 0;
    if
    :: !s_released[t] -> give(s_released[t])
    :: else -> assert(SEEK != SEEN_HEALED) /* released when it was poisoned, healed now */
    fi
}

/* Result, and the pages: R was never told of them; or it has read everything; or it is drained. */
inline s_end(t, proof) {
    give(s_result[t]);
    if
    :: s[t] == OFFERED || proof || back[t] || BUG_FREE_AT_ABORT -> s_free(t)
    :: else -> s[t] = DOUBT
    fi
}

inline s_fence(u, t) {
    if
    :: s[u] == LIVE && r_inc_of[u] == r_inc_of[t] -> tell_r(ABORT, u, 0); s_end(u, 0)
    :: else
    fi;
    if
    :: IN_DOUBT(s[u]) && r_inc_of[u] == r_inc_of[t] -> fenced[u] = 1; flight[u] = 0; s_free(u)
    :: else
    fi
}

/* kvf_core_returned */
inline s_returned(u, inc) {
    if
    :: s[u] == LIVE && r_inc_of[u] == inc -> back[u] = 1
    :: IN_DOUBT(s[u]) && r_inc_of[u] == inc -> s_free(u)
    :: else
    fi
}

inline s_notice(k, inc) {
    returned = returned & ~BIT(k);
    lent[inc] = lent[inc] & ~BIT(k);
    if
    :: lent[inc] == 0 || BUG_ONE_OF_TWO -> s_returned(0, inc); s_returned(1, inc)
    :: else
    fi
}

proctype lender() {
    byte k;
end:
    do
    :: atomic { returned != 0 ->
            k = 1;
            do
            :: returned & BIT(k) -> break
            :: else -> k++
            od;
            if
            :: lent[1] & BIT(k) -> s_notice(k, 1)
            :: lent[2] & BIT(k) -> s_notice(k, 2)
            :: else -> returned = returned & ~BIT(k) /* another process had lent it */
            fi;
            k = 0
        }
    od
}

proctype send(byte t) {
end:
    do
    /* kvf_core_send_open, finish, ticket */
    :: atomic { s_alive && s[t] == NEW && COUNT(FREE_PAGES) >= PAGES_OF(t) ->
            s[t] = OFFERED; s_inc_of[t] = s_inc;
            do
            :: COUNT(holds[t]) < PAGES_OF(t) ->
                if
                :: FREE_PAGES & 1 -> holds[t] = holds[t] | 1
                :: FREE_PAGES & 2 -> holds[t] = holds[t] | 2
                fi
            :: else -> break
            od
        }
    /* cancelled, or the lease is over and nobody came */
    :: atomic { s[t] == OFFERED -> s_end(t, 0) }
    /* cancelled, or the receiver did not end it in its time, or does not renew its lease */
    :: atomic { s[t] == LIVE -> tell_r(ABORT, t, 0); s_end(t, 0) }
    :: atomic { BUG_FREE_AT_LEASE && s[t] == LIVE -> tell_r(ABORT, t, 0); s_end(t, 1) }
    /* quarantine_ms is over. The released event comes, with the list. */
    :: atomic { s[t] == DOUBT ->
            if
            :: BUG_FREE_AT_QUARANTINE -> s_free(t)
            :: else -> s[t] = POISONED; give(s_released[t])
            fi
        }
    /* "Pages": the peer's process is dead. */
    :: atomic { IN_DOUBT(s[t]) && MAPPED && gone && r_inc_of[t] == 1 -> s_free(t) }
    /* "Pages": the worker through which this peer reads is destroyed. */
    :: atomic { IN_DOUBT(s[t]) && RDMA -> s_fence(0, t); s_fence(1, t) }
    od
}

inline s_end_live(u) {
    if
    :: s[u] == LIVE -> s_end(u, BUG_CRASH_FENCES)
    :: else
    fi
}

/* kvf_peer_fail: its transfers end, and what was not read is discarded. */
inline s_lose_peer() {
    s_session = 0;
    s_peer = 0;
    s_end_live(0);
    s_end_live(1);
    do
    :: !BUG_OLD_INPUT && nempty(to_s) && !(to_s?[HELLO, _, _, _]) -> to_s?_, _, _, _
    :: BUG_OLD_INPUT || empty(to_s) || to_s?[HELLO, _, _, _] -> break
    od
}

/* A new session: Abort again for what is in doubt. It may be with another incarnation than the
 * transfers were; then its word does not count (below). */
inline s_abort_again(u) {
    if
    :: IN_DOUBT(s[u]) && !BUG_NO_SECOND_ABORT -> tell_r(ABORT, u, 0)
    :: else
    fi
}

/* on_message of link.c */
inline s_handle(m, t) {
    if
    :: m == REQ -> /* kvf_send_on_request */
        if
        :: s[t] == OFFERED && s_inc_of[t] == s_inc && (!LENT || lent[s_peer] != 0) ->
            s[t] = LIVE; r_inc_of[t] = s_peer; tell_r(GRANT, t, holds[t])
        :: else -> tell_r(ABORT, t, 0)
        fi
    :: m == DONE -> /* kvf_send_on_done */
        if
        :: s[t] == LIVE -> s_end(t, 1)
        :: else
        fi
    :: m == ABORT -> /* kvf_send_on_abort */
        if
        :: s[t] == LIVE -> s_end(t, 0)
        :: else
        fi
    :: m == DRAINED -> /* from the peer that was granted to? */
        if
        :: IN_DOUBT(s[t]) && (s_peer == r_inc_of[t] || BUG_OLD_DRAINED) -> s_free(t)
        :: else
        fi
    fi
}

inline s_killed(u) {
    if
    :: s[u] != NEW -> s[u] = LOST; holds[u] = 0; s_result[u] = 0; s_released[u] = 0
    :: else
    fi;
    back[u] = 0;
    flight[u] = 0; /* its memory and its keys are gone */
    fenced[u] = (s[u] == LOST)
}

proctype context() {
    mtype m;
    byte c, t;
end:
    do
    /* A new session may begin before S has noticed the end of the old one; it ends that one. */
    :: atomic { to_s??[HELLO, _, _, _] -> s_lose_peer(); to_s??HELLO, c, t, _;
            s_session = c; s_peer = t; tell_r(WELCOME, s_inc, 0); s_abort_again(0);
            s_abort_again(1); c = 0; t = 0 }
    /* silence, or nobody to connect to, or R has given S up */
    :: atomic { s_session != 0 && (!intact || s_session != session) -> s_lose_peer() }
    :: atomic { s_session != 0 && nempty(to_s) && !(to_s?[HELLO, _, _, _]) ->
            to_s?m, _, t, _; s_handle(m, t); m = 0; t = 0 }
#if BUG_OLD_INPUT /* beside it, what is left of the session before */
    :: atomic { to_s??m, eval(s_session), t, _ -> s_handle(m, t); m = 0; t = 0 }
#endif
    /* killed; it may come back at the same address */
    :: atomic { s_alive && faults > 0 ->
            faults--; s_alive = 0; s_killed(0); s_killed(1); lent[1] = 0; lent[2] = 0;
            intact = 0; s_session = 0; s_peer = 0; drop_all_to_s();
            if
            :: s_stays_down = 1
            :: skip
            fi
        }
    :: atomic { !s_alive && !s_stays_down -> s_alive = 1; s_inc++ }
    od
}

/* ---- R ---- */

/* When no own read is posted any more. Drained is more than that: a read that was reported as
 * failed may still happen. */
inline r_finish_off(t, ok) {
    if
    :: posted[t] == 0 ->
        r[t] = RELEASED;
        target[t] = 0;
        give(r_released[t]);
        if
        :: asked[t] && !ok && (!unproven[t] || BUG_FAILED_IS_DRAINED) -> tell_s(DRAINED, t, 0)
        :: else
        fi;
        asked[t] = 0
    :: else -> r[t] = ENDED
    fi
}

inline r_end(t, ok) {
    give(r_result[t]);
    todo[t] = 0;
    if
    :: ok -> assert(good[t] == expected[t]); succeed()
    :: else
    fi;
    good[t] = 0;
    expected[t] = 0;
    if
    :: BUG_DRAINED_EARLY && !ok && asked[t] -> tell_s(DRAINED, t, 0)
    :: else
    fi;
    r_finish_off(t, ok)
}

inline r_post(t, p) {
    todo[t] = todo[t] & ~BIT(p);
    posted[t] = posted[t] | BIT(p);
    if
    :: !fenced[t] -> flight[t] = flight[t] | BIT(p)
    :: else
    fi
}

/* A read that did not happen, because the path or the other process was gone, fails. */
inline r_moved(t, p) {
    assert(target[t]); /* until now it may have been written to */
    posted[t] = posted[t] & ~BIT(p);
    if
    :: r[t] == ENDED -> r_finish_off(t, 0)
    :: r[t] == LIVE && !(good[t] & BIT(p)) -> tell_s(ABORT, t, 0); r_end(t, 0)
    :: else
    fi
}

proctype receive(byte t) {
end:
    do
    /* kvf_core_recv_open */
    :: atomic { r[t] == NEW && s_inc_of[t] != 0 -> r[t] = LIVE; target[t] = 1 }
    /* kvf_recv_on_peer_up; or it is not the incarnation that the ticket names */
    :: atomic { r[t] == LIVE && !asked[t] && r_peer != 0 ->
            if
            :: r_peer == s_inc_of[t] -> asked[t] = 1; map_of[t] = LENT * session; tell_s(REQ, t, 0)
            :: else -> r_end(t, 0)
            fi
        }
    /* cancelled, or out of time */
    :: atomic { r[t] == LIVE ->
            if
            :: asked[t] -> tell_s(ABORT, t, 0)
            :: else
            fi;
            r_end(t, 0)
        }
    :: atomic { r[t] == LIVE && (todo[t] & 1) -> r_post(t, 0) }
    :: atomic { r[t] == LIVE && (todo[t] & 2) -> r_post(t, 1) }
    :: atomic { (posted[t] & 1) && !(flight[t] & 1) -> r_moved(t, 0) }
    :: atomic { (posted[t] & 2) && !(flight[t] & 2) -> r_moved(t, 1) }
    /* reported as failed, but it may be on its way: the path broke, or was closed by force */
    :: atomic { !MAPPED && faults > 0 && posted[t] != 0 ->
            faults--; unproven[t] = 1; posted[t] = 0;
            if
            :: r[t] == LIVE -> tell_s(ABORT, t, 0); r_end(t, 0)
            :: r[t] == ENDED -> r_finish_off(t, 0)
            fi
        }
    /* everything that the grant named was read */
    :: atomic { r[t] == LIVE && expected[t] != 0 && todo[t] == 0 && posted[t] == 0 ->
            tell_s(DONE, t, 0); r_end(t, 1) }
    od
}

inline r_end_live(u) {
    if
    :: r[u] == LIVE -> r_end(u, 0)
    :: else
    fi
}

inline r_killed(u) {
    if
    :: r[u] != NEW ->
        r[u] = LOST; todo[u] = 0; posted[u] = 0; good[u] = 0; expected[u] = 0; asked[u] = 0;
        target[u] = 0; r_result[u] = 0; r_released[u] = 0
    :: else
    fi
}

/* What is over, by a Done that crossed this Abort or in a session before, is drained. */
inline r_on_abort(t) {
    if
    :: r[t] == LIVE -> r_end(t, 0) /* Drained comes when it is */
    :: r[t] == ENDED               /* the same */
    :: else ->
        if
        :: (!unproven[t] || r[t] == LOST || BUG_FAILED_IS_DRAINED) && !BUG_ABORT_UNANSWERED ->
            tell_s(DRAINED, t, 0)
        :: else
        fi
    fi
}

/* No copy by that mapping is under way. */
#define UNUSED(k) \
    ((map_of[0] != k || posted[0] == 0 || BUG_UNMAP_EARLY) && \
     (map_of[1] != k || posted[1] == 0 || BUG_UNMAP_EARLY))

/* kvf_peer_unmap, and the last job that uses it */
proctype unmapper() {
    byte k;
end:
    do
    :: atomic { (mapped & 2) && (!r_dialled || session != 1) && UNUSED(1) -> k = 1;
            mapped = mapped & ~BIT(k); returned = returned | BIT(k); k = 0 }
    :: atomic { (mapped & 4) && (!r_dialled || session != 2) && UNUSED(2) -> k = 2;
            mapped = mapped & ~BIT(k); returned = returned | BIT(k); k = 0 }
    :: atomic { (mapped & 8) && (!r_dialled || session != 3) && UNUSED(3) -> k = 3;
            mapped = mapped & ~BIT(k); returned = returned | BIT(k); k = 0 }
    :: atomic { (mapped & 16) && (!r_dialled || session != 4) && UNUSED(4) -> k = 4;
            mapped = mapped & ~BIT(k); returned = returned | BIT(k); k = 0 }
    od
}

proctype generation() {
    mtype m;
    byte t, pages;
end:
    do
    /* kvf_peer_reach: somebody waits for the peer, or S has pages in doubt with it. (S may dial as
     * well; which of them does makes no difference here.) */
    :: atomic { !r_dialled && s_alive &&
            (r[0] == LIVE || r[1] == LIVE || IN_DOUBT(s[0]) || IN_DOUBT(s[1])) ->
            session++; intact = 1; r_dialled = 1; tell_s(HELLO, r_inc, 0) }
    /* kvf_peer_fail: what was not read is discarded */
    :: atomic { r_dialled && !intact ->
            r_dialled = 0; r_peer = 0; r_end_live(0); r_end_live(1); drop_all_to_r() }
    :: atomic { to_r?m, t, pages ->
            if
            :: m == WELCOME && !LENT -> r_peer = t
            :: m == WELCOME && LENT && s_alive && t == s_inc -> /* and its pools are mapped */
                r_peer = t; mapped = mapped | BIT(session); lent[r_inc] = lent[r_inc] | BIT(session)
            :: m == WELCOME && LENT && !(s_alive && t == s_inc) -> skip /* it is gone */
            :: m == GRANT ->
                if
                :: r[t] == LIVE -> todo[t] = pages; expected[t] = pages
                :: else
                fi
            :: m == ABORT -> r_on_abort(t)
            fi;
            m = 0; t = 0; pages = 0
        }
    /* killed, and started again at the same address */
    :: atomic { r_inc == 1 && faults > 0 ->
            faults--; r_killed(0); r_killed(1); r_inc++; mapped = 0;
            intact = 0; r_dialled = 0; r_peer = 0; drop_all_to_r() }
    od
}

/* ---- the data path ---- */

/* A posted read happens. */
inline land(t, p) {
    flight[t] = flight[t] & ~BIT(p);
    assert(holds[t] & BIT(p)); /* no read of a page that is not its own */
    if
    :: r[t] == LIVE && (posted[t] & BIT(p)) -> good[t] = good[t] | BIT(p)
    :: else
    fi
}

proctype path(byte t) {
end:
    do
    :: atomic { flight[t] & 1 -> land(t, 0) }
    :: atomic { flight[t] & 2 -> land(t, 1) }
    od
}

/* ---- what must have happened when nothing can happen any more ---- */

/* No proof can come: the reader is dead, or a read is in doubt for good. */
#define NO_PROOF(t) (BARE && (unproven[t] || r_inc_of[t] != r_inc))

#define SHORT_OF_PAGES (IN_DOUBT(s[0]) || IN_DOUBT(s[1]))

inline judge(t) {
    assert(s[t] == LOST || s[t] == RELEASED || (s[t] == POISONED && NO_PROOF(t)) ||
           (s[t] == NEW && (!s_alive || SHORT_OF_PAGES)));
    assert(r[t] == LOST || r[t] == RELEASED || (r[t] == NEW && s_inc_of[t] == 0));
    assert(r_result[t] && r_released[t] || r[t] == LOST || r[t] == NEW);
    assert(s_result[t] && s_released[t] || s[t] == LOST || s[t] == NEW);
    assert((holds[t] == 0) == !IN_DOUBT(s[t]));
    assert(SEEK != SEEN_POISON || !IN_DOUBT(s[t]))
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
        run path(1);
        if
        :: LENT -> run lender(); run unmapper()
        :: else
        fi
    }
    timeout -> judge(0); judge(1)
}
