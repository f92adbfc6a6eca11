# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: a node fails at a named place of a transfer, and everybody else is right about it.

A cell is role x phase x action x direction x way of the bytes: the node of that role does that to itself at that place (see
kvmgr/base/failpoint.h and failpoint.c). In each cell the answer must be right, or an error with the HTTP status of
docs/operating.md; nothing waits past its deadline; afterwards the pages of every node that lives are free or cached;
and the next request between the two addresses works.

A fifth of the cells runs, another one every day, such that any two values of two axes meet in a cell; all of them with
KVF_LONG=1. KVF_FAULT_TURN=0..4 picks the fifth; names of cells as arguments run just those.
"""

import collections
import datetime
import itertools
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from nodes import CONFIG, KVFERRY, PATIENCE_S, SLOWNESS, Asking, Node, place, wait_for  # noqa: E402

FAULTY = os.environ["KVFERRY_FAULTY"]
WORKERS = 6  # most of a cell is waiting

ROLES = ("prefill", "decode")
# Which pass of which fail point. The prompt is a few windows at the sender, 59 chunks at the receiver, or 46 copies.
PHASES = {
    "handshake": ("handshake", 1, 1),
    "granted": ("granted", 1, 1),
    "first-chunk": ("chunk", 1, 1),
    "mid": ("chunk", 2, 25),
    "before-commit": ("commit_before", 1, 1),
    "after-commit": ("commit_after", 1, 1),
    "before-ack": ("ack_before", 1, 1),
    "release": ("release", 1, 1),
}
ACTIONS = {"kill": "kill", "stop": "stop", "term": "term", "cut": "cut", "restart": "kill"}
DIRECTIONS = ("push", "pull")
WAYS = {"tcp": {"pool.memory": "host", "mover.kind": "tcp"},
        "ucx-tcp": {"ucx.tls": "tcp,self", "pool.memory": "host", "mover.kind": "ucx"},
        "ucx-shm": {"ucx.tls": "posix,sysv,self", "pool.memory": "shm", "mover.kind": "ucx"},
        "mapped": {"pool.memory": "shm"}}
TURNS = 5

PROMPT_TOKENS = 900
LOST_S = 1.5 * SLOWNESS
STOP_S = LOST_S + 1.0
LEASE_S = 3.0 * SLOWNESS
QUARANTINE_S = 1.0 * SLOWNESS
DEADLINE_S = 6.0 * SLOWNESS
# What the machine may add to a time that the configuration promises.
GRACE_S = 1.0 * SLOWNESS
SETTINGS = {
    "heartbeat.period_ms": int(100 * SLOWNESS),
    "heartbeat.suspect_ms": int(500 * SLOWNESS),
    "heartbeat.lost_ms": int(1000 * LOST_S),
    "limits.lease_ms": int(1000 * LEASE_S),
    "limits.quarantine_ms": int(1000 * QUARANTINE_S),
}
# docs/operating.md, "Errors": what a fault of the other node, or of this one, may be answered with.
ERRORS = {
    "kill": {(502, "peer_lost")},
    "restart": {(502, "peer_lost")},
    "stop": {(502, "peer_lost"), (410, "expired"), (504, "deadline")},
    "term": set(),
    "cut": set(),
}

Cell = collections.namedtuple("Cell", "role phase action direction way")


def all_cells():
    return [Cell(*values) for values in itertools.product(ROLES, PHASES, ACTIONS, DIRECTIONS, WAYS)]


def fifth(cells, turn):
    """Every fifth cell along each axis. Phases and actions reach every remainder, whatever the others are, and so do the
    other three axes together."""
    axes = (list(ROLES), list(PHASES), list(ACTIONS), list(DIRECTIONS), list(WAYS))
    return [cell for cell in cells
            if sum(axis.index(value) for axis, value in zip(axes, cell)) % TURNS == turn]


def check_pairs(cells):
    """Any two values of two axes meet in one of the cells."""
    for a, b in itertools.combinations(range(len(Cell._fields)), 2):
        met = {(cell[a], cell[b]) for cell in cells}
        assert met == {(cell[a], cell[b]) for cell in all_cells()}, "pairs that never meet"


class Worker:
    """Runs cells of one way and direction, one after the other. The node that must not fail lives on from cell to cell."""

    def __init__(self, way, direction, number):
        self.folder = tempfile.TemporaryDirectory()
        self.settings = dict(SETTINGS, **WAYS[way], **{"mover.direction": direction})
        self.number = number
        self.count = 0
        self.survivors = {}
        self.nodes = []
        subprocess.run([KVFERRY, "keygen", os.path.join(self.folder.name, "cluster.key")], check=True,
                       timeout=PATIENCE_S)
        with open(os.path.join(self.folder.name, "node.yaml"), "w", encoding="utf-8") as out:
            out.write(CONFIG)

    def start(self, role, name, more=None, **how):
        settings = dict(self.settings, instance=name, **(more or {}))
        node = Node(role, self.folder.name, settings, **how)
        self.nodes.append(node)
        return node.wait_ready()

    def survivor(self, role):
        if role not in self.survivors:
            self.survivors[role] = self.start(role, "%s-%d" % (role, self.number))
        return self.survivors[role]

    def faulty(self, cell):
        point, sender_pass, receiver_pass = PHASES[cell.phase]
        environment = {"KVF_FAIL_POINT": point, "KVF_FAIL_ACTION": ACTIONS[cell.action],
                       "KVF_FAIL_COUNT": str(sender_pass if cell.role == "prefill" else receiver_pass),
                       "UCX_MEM_MMAP_HOOK_MODE": "none"}
        return self.start(cell.role, "faulty-%d" % self.number, place(), program=FAULTY, environment=environment)

    def successor(self, node):
        """Another process at the same addresses."""
        return self.start(node.role, node.ready["instance"],
                          {"control.listen": node.ready["control"], "http.listen": node.ready["http"]})

    def end(self, node):
        if node.alive():
            node.signal(signal.SIGCONT)
            node.kill()
        node.wait_end()
        self.nodes.remove(node)

    def end_all(self):
        for node in list(self.nodes):
            self.end(node)
        self.survivors = {}

    def close(self):
        self.end_all()
        self.folder.cleanup()

    def run(self, cell):
        """Run a cell; (what the answer was, how long the survivor took to know or None)."""
        self.count += 1
        other = self.survivor("decode" if cell.role == "prefill" else "prefill")
        faulty = self.faulty(cell)
        prefill, decode = (faulty, other) if cell.role == "prefill" else (other, faulty)
        request_id = "%s-%d" % (cell.phase, self.count)
        first = prefill.prefill(request_id, PROMPT_TOKENS)
        assert first.status == 200, first
        asked = time.monotonic()
        asking = Asking(lambda: decode.decode(request_id, first.json["kv_transfer_params"],
                                              timeout_ms=int(1000 * DEADLINE_S)))
        wait_for(lambda: any(line.startswith("fail point") for line in faulty.log) or asking.ended and
                 time.monotonic() > asked + PATIENCE_S,
                 lambda: "the fail point to be reached: %r\n%s" % (asking.ended and asking.wait(), faulty.text()))
        failed = time.monotonic()
        took = None
        if cell.action == "restart":
            faulty.process.wait(PATIENCE_S)
            faulty = self.replace(faulty)
        elif cell.action == "kill":
            faulty.process.wait(PATIENCE_S)
            took = self.until_known(cell, other, asking, request_id, failed, 1.0 * SLOWNESS)
        elif cell.action == "stop":
            # A receiver that stands still before it has said what it wants is missed by nobody.
            if (cell.role, cell.phase) != ("decode", "handshake"):
                took = self.until_known(cell, other, asking, request_id, failed, LOST_S + GRACE_S)
            time.sleep(max(0.0, failed + STOP_S - time.monotonic()))
            faulty.signal(signal.SIGCONT)
        answer = self.answer(cell, asking.wait())
        ended = time.monotonic()
        assert ended - asked < DEADLINE_S + GRACE_S + (STOP_S if cell.action == "stop" else 0), \
            "answered after %.1f s" % (ended - asked)
        if cell.action == "term":
            code = faulty.wait_end(LEASE_S + DEADLINE_S + PATIENCE_S)
            assert code == 0, "the drained node ended with %d" % code
        self.quiet(other)
        if cell.action in ("kill", "term"):
            faulty = self.replace(faulty)
        self.quiet(faulty)
        self.next_request(cell, other, faulty)
        self.quiet(other)
        self.quiet(faulty)
        self.end(faulty)
        return answer, took

    def replace(self, node):
        successor = self.successor(node)
        self.end(node)
        return successor

    def until_known(self, cell, other, asking, request_id, failed, most_s):
        """Wait until the other node has ended the request; how long after the failure, None if it went well."""
        if cell.role == "prefill":
            wait_for(lambda: asking.ended, other.text, DEADLINE_S + PATIENCE_S)
            state = other.transfer(request_id).json["state"]
        else:
            state = wait_for(lambda: other.transfer(request_id).json["state"] != "running" and
                             other.transfer(request_id).json["state"], other.text, LEASE_S + PATIENCE_S)
        took = time.monotonic() - failed
        if state == "done":
            return None
        if (cell.role, cell.phase) == ("decode", "handshake"):  # the ticket was not used
            assert state == "expired" and took < LEASE_S + GRACE_S, "%s after %.2f s" % (state, took)
            return None
        assert took < most_s, "%s knows after %.2f s" % (other.role, took)
        return took

    @staticmethod
    def answer(cell, reply):
        """Judge what the client got."""
        if isinstance(reply, Exception):
            assert cell.role == "decode" and ACTIONS[cell.action] == "kill", repr(reply)
            return "connection broke"
        if reply.status == 200:
            assert reply.json["verified"] and reply.json["mismatched_bytes"] == 0, reply
            assert reply.json["mover"] == cell.way.split("-")[0], reply
            return "200 verified"
        assert reply.error in ERRORS[cell.action], reply
        return "%d %s" % reply.error

    @staticmethod
    def quiet(node):
        """All pages are free or cached as soon as leases and quarantine are over; labels always add up."""
        wait_for(node.quiet, lambda: "all pages free: %r\n%s" % (node.get("/v1/status").json, node.text()),
                 LEASE_S + QUARANTINE_S + LOST_S + 5 * GRACE_S)

    def next_request(self, cell, other, faulty):
        prefill, decode = (faulty, other) if cell.role == "prefill" else (other, faulty)
        request_id = "next-%d" % self.count
        first = prefill.prefill(request_id, 100)
        assert first.status == 200, first
        second = decode.decode(request_id, first.json["kv_transfer_params"])
        assert second.status == 200 and self.answer(cell, second) == "200 verified", second


class Matrix:
    """All cells that are to run, and what came out."""

    def __init__(self, cells):
        self.cells = collections.defaultdict(queue.SimpleQueue)
        for cell in cells:
            self.cells[cell.way, cell.direction].put(cell)
        self.lock = threading.Lock()
        self.answers = collections.defaultdict(collections.Counter)
        self.known = collections.defaultdict(list)
        self.failures = []
        self.n = 0

    def work(self, kind, number):
        worker = Worker(*kind, number)
        try:
            while True:
                try:
                    cell = self.cells[kind].get_nowait()
                except queue.Empty:
                    break
                self.run(worker, cell)
            for node in worker.survivors.values():  # they have seen it all, and drain
                code = node.stop()
                if code != 0:
                    self.failures.append("the %s node that lived on ended with %d\n%s" % (node.role, code, node.text()))
        finally:
            worker.close()

    def run(self, worker, cell):
        name = ".".join(cell)
        start = time.monotonic()
        try:
            answer, took = worker.run(cell)
        except Exception:  # noqa: B902 - whatever it is, it is this cell's
            with self.lock:
                self.n += 1
                self.failures.append("%s\n%s\n%s" % (name, traceback.format_exc(),
                                                     "\n".join(node.text() for node in worker.nodes)))
            print("FAIL %-42s" % name, flush=True)
            worker.end_all()
            return
        with self.lock:
            self.n += 1
            self.answers[cell.action][answer] += 1
            if took is not None:
                self.known[cell.action, cell.role].append(took)
        print("ok   %-42s %-18s %s%.1f s" % (name, answer, "" if took is None else "known after %.2f s, " % took,
                                             time.monotonic() - start), flush=True)

    def report(self):
        for failure in self.failures:
            print("\n--- " + failure)
        print("\nanswers")
        for action, answers in sorted(self.answers.items()):
            print("  %-8s %s" % (action, ", ".join("%d x %s" % (n, text) for text, n in answers.most_common())))
        print("the other node knows after")
        for (action, role), times in sorted(self.known.items()):
            print("  %s of the %s node: %.2f to %.2f s, median %.2f s (%d cells)" %
                  (action, role, min(times), max(times), statistics.median(times), len(times)))
        print("%d cells run, %d failed" % (self.n, len(self.failures)))


def main():
    cells = all_cells()
    turn = int(os.environ.get("KVF_FAULT_TURN", datetime.date.today().toordinal() % TURNS))
    for k in range(TURNS):
        check_pairs(fifth(cells, k))
    if sys.argv[1:]:
        cells = [Cell(*name.split(".")) for name in sys.argv[1:]]
    elif os.environ.get("KVF_LONG", "") in ("", "0"):
        cells = fifth(cells, turn)
        print("%d of %d cells, KVF_FAULT_TURN=%d" % (len(cells), len(all_cells()), turn), flush=True)
    matrix = Matrix(cells)
    kinds = sorted(matrix.cells)
    threads = [threading.Thread(target=matrix.work, args=(kinds[k % len(kinds)], k))
               for k in range(max(len(kinds), min(WORKERS, len(cells))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    matrix.report()
    return 0 if not matrix.failures and matrix.n == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
