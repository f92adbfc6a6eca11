# SPDX-License-Identifier: Apache-2.0
"""Nodes whose decode nodes read the prefill node's pools through UCX: which requests go that way, what does not go together,
and when pages come back if a node dies, stands still or gives up. In place of a network card UCX's tcp reads
(tests/support/rdma/), or, where a process is killed, its shared memory: UCX's tcp then aborts the other one, which is why
no node goes that way. Everything else is real.

Everything else about such nodes is in the other tests, which run once more with KVF_TEST_MOVER=rdma.
"""

import os
import signal
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from device_nodes import TRIES, DeviceTest  # noqa: E402
from nodes import PATIENCE_S, SLOWNESS, Asking, wait_for  # noqa: E402

RDMA = {"mover__kind": "rdma", "verify": "attention"}
# Some 400 MB on the way: long enough to be caught in the middle.
BIG = {"mover__kind": "rdma", "model__preset": "llama-3.1-8b", "pool__bytes": "1GiB"}
BIG_TOKENS = 3000
BY_SHM = {"ucx__tls": "posix", **BIG}


class RdmaTest(DeviceTest):
    def test_each_way(self):
        for memory in ("host", "shm"):
            for direction in ("push", "pull"):
                prefill, decode = self.pair(mover__direction=direction, pool__memory=memory, **RDMA)
                self.check_way(prefill, decode, "rdma")
                self.assertEqual([self.fallbacks(node) for node in (prefill, decode)], [0, 0])
                self.end()

    def test_memory_of_another_kind(self):
        prefill = self.node("prefill", pool__memory="shm", **RDMA)
        decode = self.node("decode", pool__memory="host", **RDMA)
        self.check_way(prefill, decode, "rdma")
        self.finish()

    def test_without_digests(self):
        prefill, decode = self.pair(mover__digests="false", **RDMA)
        self.check_way(prefill, decode, "rdma")
        self.finish()

    def test_pieces_of_all_lengths(self):
        """Longer ones than in the other tests; one layer at a time; every byte is compared."""
        for settings in ({"model__preset": "llama-3.1-8b", "pool__bytes": "1GiB"},
                         {"pool__bytes": "512MiB", "engine__prefill_tokens_per_s": "200000"}):
            prefill, decode = self.pair(mover__kind="rdma", **settings)
            for k in range(2):
                answer = self.run_one(prefill, decode, "r%d" % k, 2000 + k)
                self.assertEqual((answer["mover"], answer["verified"]), ("rdma", True))
            self.end()

    def test_several_nodes_at_once(self):
        """Each pair has a path of its own in each direction."""
        prefills = [self.node("prefill", **RDMA) for _ in range(2)]
        decodes = [self.node("decode", **RDMA) for _ in range(3)]
        asked = []
        for k in range(18):
            prefill, decode = prefills[k % 2], decodes[k % 3]
            asked.append(Asking(lambda p=prefill, d=decode, k=k: self.run_one(p, d, "many-%d" % k, 1000 + 37 * k)))
        for asking in asked:
            self.assertEqual(asking.wait()["mover"], "rdma")
        self.finish()

    # What cannot be.

    def test_only_one_of_them_is_for_rdma(self):
        prefill = self.node("prefill", mover__kind="auto")
        decode = self.node("decode", **RDMA)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("both mover rdma", reply.json["message"])
        self.end()
        prefill = self.node("prefill", **RDMA)
        decode = self.node("decode", mover__kind="auto", verify="attention")
        self.check_way(prefill, decode, "tcp")
        self.finish()

    def test_no_such_transport(self):
        self.refused({"mover__kind": "rdma", "ucx__tls": "nosuch"}, "nosuch")
        self.refused({"mover__kind": "rdma"}, "nosuch", environment={"UCX_TLS": "nosuch"})

    # Nodes that end, or stand still, in the middle. A node that gives a path up has destroyed its worker, and needs
    # nobody's word for it that its pages are free.

    def test_decode_node_dies_in_the_middle(self):
        prefill = self.node("prefill", **BY_SHM)
        caught = 0
        for k in range(TRIES):
            decode = self.node("decode", **BY_SHM)
            asking = self.start_moving(prefill, decode, "kill-%d" % k, BIG_TOKENS)
            caught += not asking.ended
            decode.kill()
            self.assert_quiet(prefill, 1.0 * SLOWNESS)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        answer = self.run_one(prefill, self.node("decode", **BY_SHM), "after", 100)
        self.assertEqual((answer["mover"], answer["verified"]), ("rdma", True))
        self.finish()

    def test_prefill_node_dies_in_the_middle(self):
        decode = self.node("decode", **BIG)
        caught = 0
        for k in range(TRIES):
            prefill = self.node("prefill", **BIG)
            asking = self.start_moving(prefill, decode, "kill-%d" % k, BIG_TOKENS)
            prefill.kill()
            reply = asking.wait()
            caught += reply.status != 200
            self.assertIn(reply.error[1], (None, "peer_lost"), reply)
            self.assert_quiet(decode)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.run_one(self.node("prefill", **BIG), decode, "after", 100)
        self.finish()

    def test_a_decode_node_that_stands_still(self):
        """Its reads are its own card's, so the prefill node closes the path, and has its pages at once: not poisoned,
        not after quarantine_ms."""
        prefill, decode = self.pair(limits__quarantine_ms="60000", **BIG)
        self.run_one(prefill, decode, "before", 100)
        asking = self.start_moving(prefill, decode, "still", BIG_TOKENS)
        os.kill(decode.pid, signal.SIGSTOP)
        try:
            self.assert_quiet(prefill, 20 * SLOWNESS)
        finally:
            os.kill(decode.pid, signal.SIGCONT)
        reply = asking.wait()
        self.assertIn(reply.error[1], (None, "peer_lost", "peer_refused"), reply)
        self.assert_quiet(decode)
        self.run_one(prefill, decode, "after", 100)
        self.finish()

    def test_cancelled_in_the_middle(self):
        prefill, decode = self.pair(**BIG)
        for k in range(4):
            asking = self.start_moving(prefill, decode, "c%d" % k, BIG_TOKENS)
            (decode if k % 2 == 0 else prefill).cancel("c%d" % k)
            reply = asking.wait()
            self.assertIn(reply.status, (200, 499, 502), reply)
            self.assert_quiet(decode, 2 * PATIENCE_S)
            self.assert_quiet(prefill, 2 * PATIENCE_S)
        answer = self.run_one(prefill, decode, "after", 2000)
        self.assertEqual(answer["mover"], "rdma")
        self.finish()

    def test_a_new_path_after_one_that_was_lost(self):
        decode = self.node("decode", **RDMA)
        for k in range(3):
            prefill = self.node("prefill", **RDMA)
            self.assertEqual(self.run_one(prefill, decode, "r%d" % k, 700)["mover"], "rdma")
            prefill.kill()
            wait_for(lambda: all(peer["state"] != "up" for peer in decode.status()["peers"]), "the end of a prefill node")
        self.finish()


if __name__ == "__main__":
    unittest.main()
