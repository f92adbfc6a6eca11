# SPDX-License-Identifier: Apache-2.0
"""Nodes that die, freeze and come back: the other side knows soon and why, and nothing stays behind."""

import os
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from nodes import PATIENCE_S, SLOWNESS, ClusterTest, place, wait_for  # noqa: E402

# About 700 MB on the way: long enough to be caught in the middle.
BIG = {"model__preset": "llama-3.1-8b", "pool__bytes": "1GiB"}
BIG_TOKENS = 5500
TRIES = 6


class CrashTest(ClusterTest):
    def pair(self, **settings):
        return self.node("prefill", **settings, **place()), self.node("decode", **settings, **place())

    def same_place(self, node):
        """Settings of a node that takes the place of another one."""
        return {"instance": node.ready["instance"], "control__listen": node.ready["control"],
                "http__listen": node.ready["http"]}

    def test_killed_decode_node(self):
        prefill, decode = self.pair(**BIG)
        caught = 0
        for k in range(TRIES):
            request_id = "kill-%d" % k
            asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
            moving = prefill.pages()["reading"] > 0
            decode.kill()
            killed = time.monotonic()
            state = wait_for(lambda: prefill.transfer(request_id).json["state"] not in ("running", None) and
                             prefill.transfer(request_id).json["state"], "the end of the send")
            known = time.monotonic() - killed
            asking.wait()
            self.assertIn(state, ("peer_lost", "done"))
            if state == "peer_lost" and moving:
                caught += 1
                self.assertLess(known, 1.0 * SLOWNESS)
            self.assert_quiet(prefill)
            decode = self.node("decode", **BIG, **self.same_place(decode))
            self.run_one(prefill, decode, "after-%d" % k, 100)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.finish()

    def test_killed_prefill_node(self):
        prefill, decode = self.pair(**BIG)
        caught = 0
        for k in range(TRIES):
            request_id = "kill-%d" % k
            asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
            prefill.kill()
            killed = time.monotonic()
            reply = asking.wait()
            known = time.monotonic() - killed
            if reply.status != 200:
                caught += 1
                self.assertEqual(reply.error, (502, "peer_lost"), reply)
                self.assertIs(reply.json["recompute"], True)
                self.assertLess(known, 1.0 * SLOWNESS)
                self.assertEqual(decode.transfer(request_id).json["state"], "peer_lost")
            self.assert_quiet(decode)
            prefill = self.node("prefill", **BIG, **self.same_place(prefill))
            self.run_one(prefill, decode, "after-%d" % k, 100)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.finish()

    def test_dead_before_the_ticket_is_used(self):
        prefill, decode = self.pair()
        params = prefill.prefill("early-end", 700).json["kv_transfer_params"]
        prefill.kill()
        reply = decode.decode("early-end", params, timeout_ms=5000)
        self.assertIn(reply.error, ((502, "peer_lost"), (504, "deadline")), reply)
        self.assert_quiet(decode)
        # Another process at the same address is another peer: the old ticket is worth nothing there.
        prefill = self.node("prefill", **self.same_place(prefill))
        reply = decode.decode("early-end", params, timeout_ms=5000)
        self.assertGreaterEqual(reply.status, 400, reply)
        self.assertIs(reply.json["recompute"], True)
        self.run_one(prefill, decode, "next")
        self.finish()

    def test_restart_of_either_node_while_idle(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "a")
        for k in range(2):
            decode.kill()
            decode = self.node("decode", **self.same_place(decode))
            self.run_one(prefill, decode, "d%d" % k)
            prefill.kill()
            prefill = self.node("prefill", **self.same_place(prefill))
            self.run_one(prefill, decode, "p%d" % k)
        self.finish()

    def frozen(self, node, other, condition, seconds):
        """Freeze a node until the other one has noticed; how long that took."""
        node.signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            wait_for(condition, other.text, seconds)
            return time.monotonic() - start
        finally:
            node.signal(signal.SIGCONT)

    def test_frozen_decode_node(self):
        prefill, decode = self.pair(**BIG)
        for k in range(TRIES):
            request_id = "freeze-%d" % k
            asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
            took = self.frozen(decode, prefill,
                               lambda: prefill.transfer(request_id).json["state"] != "running", PATIENCE_S)
            state = prefill.transfer(request_id).json["state"]
            reply = asking.wait()
            self.assert_quiet(prefill)
            self.assert_quiet(decode)
            if state != "done":
                break
        self.assertEqual(state, "peer_lost")
        self.assertGreater(took, 1.0)  # not at the first hiccup
        self.assertLess(took, 3.0 * SLOWNESS)
        self.assertEqual(reply.error, (502, "peer_lost"), reply)
        self.run_one(prefill, decode, "after", 100)
        self.finish()

    def test_frozen_prefill_node(self):
        prefill, decode = self.pair(**BIG)
        for k in range(TRIES):
            request_id = "freeze-%d" % k
            asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
            took = self.frozen(prefill, decode, lambda: asking.ended, PATIENCE_S)
            reply = asking.wait()
            self.assert_quiet(decode)
            self.assert_quiet(prefill)
            if reply.status != 200:
                break
        self.assertEqual(reply.error, (502, "peer_lost"), reply)
        self.assertGreater(took, 1.0)
        self.assertLess(took, 3.0 * SLOWNESS)
        self.run_one(prefill, decode, "after", 100)
        self.finish()

    def test_short_freeze_harms_nobody(self):
        prefill, decode = self.pair(heartbeat__suspect_ms=5000, heartbeat__lost_ms=20000)
        self.run_one(prefill, decode, "before")
        for node in (prefill, decode):
            node.signal(signal.SIGSTOP)
            time.sleep(1.0)
            node.signal(signal.SIGCONT)
            self.run_one(prefill, decode, "after-%s" % node.role)
        self.finish()

    def test_thawed_node_does_not_declare_the_others_lost(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "before")
        decode.signal(signal.SIGSTOP)
        time.sleep(4.0)
        decode.signal(signal.SIGCONT)
        self.run_one(prefill, decode, "after")
        self.finish()


if __name__ == "__main__":
    unittest.main()
