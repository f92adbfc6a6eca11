# SPDX-License-Identifier: Apache-2.0
"""Nodes on one machine whose decode nodes map the prefill node's pools: who sees that, what it takes, what happens where
it is not possible, and when a prefill node's pages come back from a decode node that stands still or dies.

Everything else about such nodes is in the other tests, which run once more with KVF_TEST_MEMORY=shm.
"""

import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import metrics  # noqa: E402
from nodes import KVFERRY, PATIENCE_S, SLOWNESS, ClusterTest, Node, wait_for  # noqa: E402

SHM = {"pool__memory": "shm"}
# About 700 MB on the way: long enough to be caught in the middle.
BIG = {"model__preset": "llama-3.1-8b", "pool__bytes": "1GiB", "pool__memory": "shm"}
BIG_TOKENS = 5500
TRIES = 8
LOST_S = 1.0 * SLOWNESS
QUARANTINE_S = 1.0 * SLOWNESS
TIMES = {"heartbeat__period_ms": int(100 * SLOWNESS), "heartbeat__suspect_ms": int(500 * SLOWNESS),
         "heartbeat__lost_ms": int(1000 * LOST_S), "limits__quarantine_ms": int(1000 * QUARANTINE_S)}


def mappings(node):
    """How many pools of others a node has mapped, and how many of its own: others' are for reading alone."""
    with open("/proc/%d/maps" % node.pid, encoding="utf-8") as maps:
        lines = [line.split() for line in maps if "/memfd:kvferry" in line]
    return sum(line[1] == "r--s" for line in lines), sum(line[1] == "rw-s" for line in lines)


def cpu_s(node):
    """Processor time that a node has used."""
    with open("/proc/%d/stat" % node.pid, encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class MappedTest(ClusterTest):
    def movers(self, *nodes):
        """What each node says that carries bytes to and from its only peer."""
        peers = [node.status()["peers"] for node in nodes]
        self.assertEqual([len(of) for of in peers], [1] * len(nodes), peers)
        return [of[0]["mover"] for of in peers]

    def count(self, node, name, **labels):
        return sum(value for (found, have), value in metrics.parse(node.metrics()).items()
                   if found == name and set(labels.items()) <= set(have))

    def check_mover(self, prefill, decode, request_id, mover):
        """A request by that mover, and what everybody says about it."""
        before = {node: self.count(node, "kvferry_transfer_bytes_total", mover=mover) for node in (prefill, decode)}
        answer = self.run_one(prefill, decode, request_id)
        self.assertEqual(answer["mover"], mover)
        wait_for(lambda: prefill.transfer(request_id).json["state"] == "done", "the end of the send")
        self.assertEqual(prefill.transfer(request_id).json["mover"], mover)
        self.assertEqual(decode.transfer(request_id).json["mover"], mover)
        self.assertEqual(self.movers(prefill, decode), [mover, mover])
        for node in (prefill, decode):
            moved = self.count(node, "kvferry_transfer_bytes_total", mover=mover) - before[node]
            self.assertEqual(moved, answer["bytes"], node.role)
            self.assertEqual(self.count(node, "kvferry_mover_fallback_total"), 0)
        return answer

    def test_everybody_says_so(self):
        for direction in ("push", "pull"):
            prefill, decode = self.pair(mover__direction=direction, **SHM)
            self.assertEqual((mappings(prefill), mappings(decode)), ((0, 2), (0, 2)))
            self.check_mover(prefill, decode, "one", "mapped")
            self.check_mover(prefill, decode, "two", "mapped")
            self.assertEqual((mappings(prefill), mappings(decode)), ((0, 2), (2, 2)))
            self.finish()
            self.nodes.clear()

    def test_mapped_and_nothing_else(self):
        prefill, decode = self.pair(mover__kind="mapped", **SHM)
        self.check_mover(prefill, decode, "one", "mapped")
        self.finish()

    def test_looking_on_ends_with_the_transfers(self):
        prefill, decode = self.pair(mover__busy_poll_us=1000000, **SHM)
        self.check_mover(prefill, decode, "one", "mapped")
        # Nothing is open any more; heartbeats alone are no reason to stay awake.
        before = [cpu_s(node) for node in (prefill, decode)]
        time.sleep(2)
        used = [cpu_s(node) - began for node, began in zip((prefill, decode), before)]
        self.assertLess(max(used), 1.0, used)
        # A ticket that nobody has fetched yet: the prefill node does.
        prefill.prefill("two", 700)
        wait_for(lambda: cpu_s(prefill) - before[0] - used[0] > 0.5, "a node that looks on", 10 * SLOWNESS)
        self.finish()

    def test_a_prefix_that_is_there_moves_nothing(self):
        prefill, decode = self.pair(**SHM)
        for request_id, bytes_moved in (("first", True), ("second", False)):
            first = prefill.prefill(request_id, 700, hash_ids=[1, 2])
            second = decode.decode(request_id, first.json["kv_transfer_params"], hash_ids=[1, 2])
            self.assertTrue(second.json["verified"], second)
            self.assertEqual(second.json["bytes"] > 0, bytes_moved)
        self.assertEqual(self.movers(prefill, decode), ["mapped", "mapped"])
        self.finish()

    def test_given_back_when_the_owner_leaves(self):
        prefill, decode = self.pair(**SHM)
        self.check_mover(prefill, decode, "one", "mapped")
        self.assertEqual(prefill.stop(), 0, prefill.text())
        wait_for(lambda: mappings(decode) == (0, 2), "the pools to be unmapped", 10 * SLOWNESS)
        self.nodes.remove(prefill)
        prefill = self.node("prefill", **SHM)
        self.run_one(prefill, decode, "two")
        self.assertEqual(mappings(decode), (2, 2))
        self.finish()

    def test_several_of_each(self):
        prefills = [self.node("prefill", **SHM) for _ in range(2)]
        decodes = [self.node("decode", **SHM) for _ in range(2)]
        for p, prefill in enumerate(prefills):
            for d, decode in enumerate(decodes):
                self.assertEqual(self.run_one(prefill, decode, "r-%d-%d" % (p, d))["mover"], "mapped")
        for decode in decodes:
            self.assertEqual(mappings(decode), (4, 2))
        decodes[0].kill()
        self.run_one(prefills[0], decodes[1], "after")
        self.finish()

    # Where it is not possible

    def test_one_side_is_told_to_use_ucx(self):
        for role in ("prefill", "decode"):
            nodes = [self.node(each, mover__kind="ucx" if each == role else "auto", **SHM) for each in ("prefill", "decode")]
            self.check_mover(*nodes, "one", "ucx")
            self.assertEqual(mappings(nodes[1]), (0, 2))
            self.finish()
            self.nodes.clear()

    def test_nothing_in_common(self):
        prefill = self.node("prefill", mover__kind="ucx", limits__lease_ms="1000", **SHM)
        decode = self.node("decode", mover__kind="tcp", **SHM)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("mover.kind", reply.json["message"])
        self.finish()

    def test_one_side_has_pools_of_its_own(self):
        for role in ("prefill", "decode"):
            nodes = [self.node(each, pool__memory="host" if each == role else "shm") for each in ("prefill", "decode")]
            # Nothing was chosen that is not possible, so this is no fallback.
            self.check_mover(*nodes, "one", "tcp")
            self.finish()
            self.nodes.clear()

    def test_mapped_was_asked_for_and_is_not_possible(self):
        prefill = self.node("prefill", pool__memory="host")
        decode = self.node("decode", mover__kind="mapped", **SHM)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("cannot be mapped", reply.json["message"])
        # The prefill node is told at once, and not by the end of a lease.
        wait_for(lambda: prefill.transfer("no").json["state"] == "incompatible", prefill.text, 5 * SLOWNESS)
        self.finish()

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"), "needs root, unshare and ip")
    def test_in_another_network_namespace(self):
        prefill = self.node("prefill", ucx__tls="posix,sysv,self", **SHM)
        decode = self.exile("decode", ucx__tls="posix,sysv,self", **SHM)
        relay = Relay(decode, prefill.address("control")[1])
        self.addCleanup(relay.close)
        first = prefill.prefill("one", 600)
        # What UCX makes of it is its own affair: to wake the other end it needs what namespaces keep apart, too.
        reply = decode.decode("one", first.json["kv_transfer_params"], timeout_ms=int(1500 * SLOWNESS))
        self.assertIn(reply.status, (200, 504), reply)
        self.assertEqual(self.movers(prefill, decode), ["ucx", "ucx"])
        self.assertEqual(self.count(decode, "kvferry_mover_fallback_total"), 1)
        warning = [line for line in decode.log if "not mapped" in line]
        self.assertEqual(len(warning), 1, decode.text())
        self.assertIn("ucx carries: no connection to its socket", warning[0])
        self.assertIn("does it run in another network namespace?", warning[0])

    def exile(self, role, **settings):
        """A node in a network namespace of its own."""
        program = os.path.join(self.folder, "exile")
        with open(program, "w", encoding="utf-8") as out:
            out.write("#!/bin/sh\nexec unshare -n sh -c 'ip link set lo up && exec \"$0\" \"$@\"' %s \"$@\"\n" % KVFERRY)
        os.chmod(program, 0o700)
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        node = Exile(role, self.folder, dict(settings, instance="exile"), program=program)
        self.nodes.append(node)
        return node.wait_ready()

    # Pages that somebody may be reading

    def copying(self, prefill, decode, request_id):
        """A request whose bytes are being copied; None if it was too quick for us."""
        asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
        decode.signal(signal.SIGSTOP)
        if not asking.ended and prefill.transfer(request_id).json["state"] == "running":
            return asking
        decode.signal(signal.SIGCONT)
        asking.wait()
        return None

    def test_decode_node_that_stands_still(self):
        """Its pages may be read when it goes on, so they are kept; until it goes on, or is no more."""
        prefill = self.node("prefill", **BIG, **TIMES)
        for end in ("continue", "kill"):
            decode = self.node("decode", **BIG, **TIMES)
            for k in range(TRIES):
                request_id = "%s-%d" % (end, k)
                asking = self.copying(prefill, decode, request_id)
                if asking is None:
                    continue
                stopped = time.monotonic()
                state = wait_for(lambda: prefill.transfer(request_id).json["state"] != "running" and
                                 prefill.transfer(request_id).json["state"], prefill.text)
                if state != "done":
                    break
                decode.signal(signal.SIGCONT)
                asking.wait()
            self.assertEqual(state, "peer_lost")
            self.assertGreater(time.monotonic() - stopped, 0.5 * LOST_S)
            pages = prefill.pages()
            doubted = pages["quarantined"]
            self.assertGreater(doubted, 0, pages)
            self.assertEqual((pages["reading"], pages["poisoned"]), (0, 0))
            wait_for(lambda: prefill.pages()["poisoned"] > 0, prefill.text, QUARANTINE_S + 5 * SLOWNESS)
            self.assertGreater(time.monotonic() - stopped, 0.9 * (LOST_S + QUARANTINE_S))
            pages = prefill.pages()
            self.assertEqual((pages["poisoned"], pages["quarantined"]), (doubted, 0))
            other = self.node("decode", **BIG)  # meanwhile it works with others, and the other pages
            self.run_one(prefill, other, "meanwhile-" + end, 100)
            self.assertEqual(prefill.pages()["poisoned"], doubted)
            self.assertEqual(other.stop(), 0, other.text())
            self.nodes.remove(other)
            proven = time.monotonic()
            if end == "kill":
                decode.kill()
            else:
                decode.signal(signal.SIGCONT)
            self.assert_quiet(prefill, 1.0 * SLOWNESS)
            self.assertLess(time.monotonic() - proven, 1.0 * SLOWNESS)
            asking.wait()
            if end == "continue":
                self.assert_quiet(decode)
                self.assertEqual(self.run_one(prefill, decode, "again", 100)["mover"], "mapped")
                self.assertEqual(decode.stop(), 0, decode.text())
            self.nodes.remove(decode)
        self.finish()

    def test_decode_node_that_dies(self):
        """What it had mapped is proven to be unmapped at once."""
        prefill = self.node("prefill", **BIG)
        caught = 0
        for k in range(TRIES):
            decode = self.node("decode", **BIG)
            asking = self.copying(prefill, decode, "kill-%d" % k)
            decode.kill()
            killed = time.monotonic()
            self.assert_quiet(prefill, 1.0 * SLOWNESS)
            self.assertLess(time.monotonic() - killed, 1.0 * SLOWNESS)
            if asking is not None:
                caught += 1
                asking.wait()
                self.assertEqual(prefill.transfer("kill-%d" % k).json["state"], "peer_lost")
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.finish()

    def test_decode_node_that_goes_on_in_time(self):
        """A short stop in the middle of a copy harms nothing."""
        prefill, decode = self.pair(**BIG)
        asking = self.copying(prefill, decode, "short")
        time.sleep(0.3)
        decode.signal(signal.SIGCONT)
        if asking is not None:
            reply = asking.wait()
            self.assertEqual(reply.status, 200, reply)
            self.assertTrue(reply.json["verified"])
        self.finish()


# A network namespace of its own has a loopback of its own, too.

CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def in_namespace(pid, call):
    """What call() returns on a thread that is in the network namespace of a process."""
    result = []

    def run():
        fd = os.open("/proc/%d/ns/net" % pid, os.O_RDONLY)
        try:
            if libc.setns(fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)
        result.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(2 * PATIENCE_S)
    if not result:
        raise AssertionError("nothing from the namespace of %d" % pid)
    return result[0]


class Exile(Node):
    """A node in another network namespace: it is talked to from there."""

    def http(self, *args, **more):
        return in_namespace(self.pid, lambda: super(Exile, self).http(*args, **more))


class Relay:
    """Takes connections to a port of a namespace to the same port here."""

    def __init__(self, exile, port):
        self.listener = in_namespace(exile.pid, lambda: socket.create_server(("127.0.0.1", port)))
        self.port = port
        self.sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                inside, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(inside)
            try:
                outside = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                inside.close()
                continue
            self.sockets.append(outside)
            for one, other in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                each.close()

    def close(self):
        for each in [self.listener] + self.sockets:
            each.close()


if __name__ == "__main__":
    unittest.main()
