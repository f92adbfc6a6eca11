/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of a session over connections that break: docs/protocol.md "Reconnect",
 * transceiver/session.c, link.c, peer_accept.c. Each side has N messages to say; whatever breaks,
 * the other side takes each of them once and in order, and all of them in the end. The other models
 * build on that.
 *
 * A dials, B answers. A connection that is broken for one side may still have input for it.
 */
#ifndef N
#define N 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define CONNS (FAULTS + 2) /* 0 is none; b() knows 4 at the most */

#ifndef LATE_HELLO
#define LATE_HELLO 0 /* a hello may be overtaken by that of a later connection */
#endif
#ifndef BUG_OLD_INPUT
#define BUG_OLD_INPUT 0 /* B reads the old connection after it has stated its number */
#endif
#ifndef BUG_RESEND_NOTHING
#define BUG_RESEND_NOTHING 0 /* what was written counts as said */
#endif
#ifndef BUG_RESEND_ALL
#define BUG_RESEND_ALL 0 /* what was kept is said again, acknowledged or not */
#endif
#ifndef SEEK
#define SEEK 0 /* 1: a connection is replaced and all comes; 2: a late hello ends the session */
#endif

mtype = { HELLO, BEAT, WORD }; /* BEAT: a heartbeat, with the count of what came */

chan to_a[CONNS] = [2 * N + 3] of { mtype, byte };
chan to_b[CONNS] = [2 * N + 3] of { mtype, byte };
bit broken[CONNS];  /* what is written now is lost */
bit opened[CONNS];  /* B: its hello was read */
byte faults = FAULTS, dialled, replaced;
bit over;           /* the session was refused */

/* kvf_session_t of A and of B */
byte a_link, a_waits, a_said, a_acknowledged, a_received;
byte b_link, b_waits, b_old, b_said, b_acknowledged, b_received;

inline write(channel, c, type, n) {
    if
    :: !broken[c] -> assert(nfull(channel)); channel!type, n
    :: else
    fi
}

/* kvf_session_resend */
inline resend(channel, c, acknowledged, said) {
    i = (BUG_RESEND_ALL -> 0 : acknowledged);
    do
    :: i < said && !BUG_RESEND_NOTHING -> write(channel, c, WORD, i); i++
    :: i >= said || BUG_RESEND_NOTHING -> break
    od;
    i = 0
}

/* kvf_session_took */
inline take(n, received) {
    assert(n == received); /* each message once, and in order */
    received++
}

inline end_session() {
    over = 1;
    a_link = 0;
    a_waits = 0;
    b_link = 0;
    b_waits = 0;
    b_old = 0
}

active proctype a() {
    mtype m;
    byte n, i;
end:
    do
    :: atomic { !over && a_said < N -> /* kvf_peer_tell: kept, and written if it can be */
            if
            :: a_link != 0 -> write(to_b[a_link], a_link, WORD, a_said)
            :: else
            fi;
            a_said++ }
    /* kvf_core_closed; an attempt may be given up as well */
    :: atomic { a_link != 0 && broken[a_link] -> a_link = 0 }
    :: atomic { a_waits != 0 && broken[a_waits] -> a_waits = 0 }
    :: atomic { !over && a_link == 0 && a_waits == 0 && dialled + 1 < CONNS ->
            dialled++; a_waits = dialled; write(to_b[a_waits], a_waits, HELLO, a_received) }
    /* on_hello: the connection is up. It says the first frame, and what did not come. */
    :: atomic { a_waits != 0 && nempty(to_a[a_waits]) -> to_a[a_waits]?m, n;
            assert(m == HELLO);
            assert(n >= a_acknowledged && n <= a_said);
            a_acknowledged = n;
            a_link = a_waits;
            a_waits = 0;
            write(to_b[a_link], a_link, BEAT, a_received);
            resend(to_b[a_link], a_link, a_acknowledged, a_said);
            m = 0; n = 0 }
    :: atomic { a_link != 0 && nempty(to_a[a_link]) -> to_a[a_link]?m, n;
            if
            :: m == WORD -> take(n, a_received); write(to_b[a_link], a_link, BEAT, a_received)
            :: m == BEAT -> a_acknowledged = n
            fi;
            m = 0; n = 0 }
    od
}

/* kvf_peer_accept, join_session: A's number is in its hello, B states its own, and reads no other
 * connection from now on. A number that goes back is a breach of protocol; only a hello that was
 * overtaken has one. */
inline accept(c) {
    to_b[c]?m, n;
    assert(m == HELLO);
    opened[c] = 1;
    if
    :: n < b_acknowledged -> assert(LATE_HELLO && SEEK != 2); end_session()
    :: else ->
        replaced = replaced + (SEEK == 1 && b_link != 0);
        b_acknowledged = n;
        b_old = (BUG_OLD_INPUT -> b_link : 0);
        if
        :: b_link != 0 -> broken[b_link] = 1 /* kvf_link_close */
        :: else
        fi;
        if
        :: b_waits != 0 -> broken[b_waits] = 1
        :: else
        fi;
        b_link = 0;
        b_waits = c;
        write(to_a[c], c, HELLO, b_received)
    fi;
    m = 0;
    n = 0
}

#define HAS_HELLO(c) (!over && !opened[c] && nempty(to_b[c]))
#define IN_TURN(c) (LATE_HELLO || opened[(c) - 1] || (broken[(c) - 1] && empty(to_b[(c) - 1])))

active proctype b() {
    mtype m;
    byte n, i;
    opened[0] = 1;
end:
    do
    :: atomic { !over && b_said < N ->
            if
            :: b_link != 0 -> write(to_a[b_link], b_link, WORD, b_said)
            :: else
            fi;
            b_said++ }
    :: atomic { b_link != 0 && broken[b_link] -> b_link = 0 }
    :: atomic { b_waits != 0 && broken[b_waits] -> b_waits = 0 }
    :: atomic { HAS_HELLO(1) && IN_TURN(1) -> accept(1) }
    :: atomic { HAS_HELLO(2) && IN_TURN(2) -> accept(2) }
#if CONNS > 3
    :: atomic { HAS_HELLO(3) && IN_TURN(3) -> accept(3) }
#endif
#if CONNS > 4
    :: atomic { HAS_HELLO(4) && IN_TURN(4) -> accept(4) }
#endif
    /* Up with the first frame after the hellos (KVF_LINK_CONFIRM) */
    :: atomic { b_waits != 0 && nempty(to_b[b_waits]) -> to_b[b_waits]?m, n;
            assert(m == BEAT);
            b_acknowledged = n;
            b_link = b_waits;
            b_waits = 0;
            write(to_a[b_link], b_link, BEAT, b_received);
            resend(to_a[b_link], b_link, b_acknowledged, b_said);
            m = 0; n = 0 }
    :: atomic { b_link != 0 && nempty(to_b[b_link]) -> to_b[b_link]?m, n;
            if
            :: m == WORD -> take(n, b_received); write(to_a[b_link], b_link, BEAT, b_received)
            :: m == BEAT -> b_acknowledged = n
            fi;
            m = 0; n = 0 }
#if BUG_OLD_INPUT
    :: atomic { b_old != 0 && nempty(to_b[b_old]) -> to_b[b_old]?m, n;
            if
            :: m == WORD -> take(n, b_received)
            :: else
            fi;
            m = 0; n = 0 }
#endif
    od
}

/* Breaks, at a moment of its own for each side's reading; and the end. */
active proctype network() {
    do
    :: atomic { faults > 0 && dialled > 0 && !broken[dialled] -> faults--; broken[dialled] = 1 }
    :: timeout -> break
    od;
    /* A hello that comes late costs connections, which are not in the budget of breaks. */
    assert((a_received == N && b_received == N) ||
           (LATE_HELLO && (over || dialled + 1 == CONNS && broken[dialled])));
    assert(SEEK != 1 || replaced == 0)
}
