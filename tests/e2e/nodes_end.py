# SPDX-License-Identifier: Apache-2.0
"""Every way a request or a node ends: cancel, deadline, drain; and nodes that have nothing to do."""

import os
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from nodes import PATIENCE_S, SLOWNESS, Asking, ClusterTest, wait_for  # noqa: E402

BIG = {"model__preset": "llama-3.1-8b", "pool__bytes": "1GiB"}
BIG_TOKENS = 5500
TRIES = 6


class EndTest(ClusterTest):
    def test_cancel_before_the_transfer(self):
        prefill, decode = self.pair()
        params = prefill.prefill("c", 700).json["kv_transfer_params"]
        self.assertEqual(prefill.cancel("c").status, 200)
        self.assert_quiet(prefill, 10)
        self.assertEqual(prefill.transfer("c").json["state"], "cancelled")
        self.assertEqual(prefill.cancel("c").error, (404, "unknown"))
        reply = decode.decode("c", params)
        self.assertEqual(reply.error, (499, "cancelled"), reply)
        self.run_one(prefill, decode, "c")
        self.finish()

    def test_cancel_while_prefill_runs(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=100)
        asking = Asking(lambda: prefill.prefill("slow", 2000))  # 20 seconds
        wait_for(lambda: prefill.transfer("slow").status == 200, "the prefill to start")
        start = time.monotonic()
        self.assertEqual(prefill.cancel("slow").status, 200)
        self.assertEqual(asking.wait().error, (499, "cancelled"))
        self.assertLess(time.monotonic() - start, 10)
        self.assert_quiet(prefill, 10)
        self.run_one(prefill, decode, "slow", 10)
        self.finish()

    def cancel_in_the_middle(self, who):
        prefill, decode = self.pair(**BIG)
        for k in range(TRIES):
            request_id = "middle-%d" % k
            asking = self.start_moving(prefill, decode, request_id, BIG_TOKENS)
            cancelled = (prefill if who == "prefill" else decode).cancel(request_id)
            reply = asking.wait()
            self.assert_quiet(prefill)
            self.assert_quiet(decode)
            if reply.status != 200:
                break
        self.assertEqual(cancelled.status, 200)
        self.assertEqual(reply.error, (499, "cancelled"), reply)
        for node in (prefill, decode):
            self.assertEqual(node.transfer(request_id).json["state"], "cancelled")
            self.assertEqual(node.cancel(request_id).error, (404, "unknown"))
        self.run_one(prefill, decode, request_id, 100)
        self.finish()

    def test_cancel_in_the_middle_at_the_decode_node(self):
        self.cancel_in_the_middle("decode")

    def test_cancel_in_the_middle_at_the_prefill_node(self):
        self.cancel_in_the_middle("prefill")

    def test_cancel_while_decode_waits_for_pages(self):
        """The prefill node hears of it, although nothing of this request was ever asked for."""
        prefill = self.node("prefill", pool__bytes="128MiB", engine__prefill_tokens_per_s=10)
        decode = self.node("decode", pool__bytes="64MiB")  # enough for one of them
        asking = {}
        for request_id in ("first", "second"):
            params = prefill.prefill(request_id, 700, early_ticket=True).json["kv_transfer_params"]
            asking[request_id] = Asking(lambda i=request_id, p=params: decode.decode(i, p))
            wait_for(lambda i=request_id: decode.transfer(i).status == 200, "the decode node to know of it")
        self.assertEqual(decode.cancel("second").status, 200)
        reply = asking["second"].wait()
        self.assertEqual(reply.error, (499, "cancelled"), reply)
        self.assertIn("waited for pages", reply.json["message"])
        wait_for(lambda: prefill.transfer("second").json["state"] == "cancelled", "the prefill to end", PATIENCE_S / 2)
        self.assertEqual(prefill.transfer("first").json["state"], "running")
        self.assertEqual(decode.cancel("first").status, 200)
        self.assertEqual(asking["first"].wait().error, (499, "cancelled"))
        self.finish()

    def test_cancel_after_the_end(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "over")
        wait_for(lambda: prefill.transfer("over").json["state"] == "done", "the end of the send")
        for node in (prefill, decode, prefill, decode):
            self.assertEqual(node.cancel("over").error, (404, "unknown"))
            self.assertEqual(node.transfer("over").json["state"], "done")
        self.run_one(prefill, decode, "next")
        self.finish()

    def test_deadline_of_a_prefill(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=100)
        for timeout_ms in (1, 10, 300):
            start = time.monotonic()
            reply = prefill.prefill("late", 2000, timeout_ms=timeout_ms)
            self.assertEqual(reply.error, (504, "deadline"), reply)
            took = time.monotonic() - start
            self.assertGreaterEqual(took, timeout_ms / 1000)
            self.assertLess(took, 10)
            self.assert_quiet(prefill, 10)
        self.run_one(prefill, decode, "late", 10)
        self.finish()

    def test_deadline_of_a_transfer(self):
        prefill, decode = self.pair(**BIG)
        met = 0
        for k, timeout_ms in enumerate((1, 2, 5, 10, 20, 50)):
            request_id = "late-%d" % k
            params = prefill.prefill(request_id, BIG_TOKENS).json["kv_transfer_params"]
            reply = decode.decode(request_id, params, timeout_ms=timeout_ms)
            if reply.status != 200:
                met += 1
                self.assertEqual(reply.error, (504, "deadline"), reply)
                self.assertIs(reply.json["recompute"], True)
                self.assertEqual(decode.transfer(request_id).json["state"], "deadline")
                # Too early a deadline may end before the ticket was claimed: then the send is still there.
                prefill.cancel(request_id)
            self.assert_quiet(decode)
            self.assert_quiet(prefill)
        self.assertGreaterEqual(met, 3)
        self.run_one(prefill, decode, "fine", 100)
        self.finish()

    def test_drain(self):
        prefill, decode = self.pair()
        params = prefill.prefill("kept", 700).json["kv_transfer_params"]
        self.assertEqual(prefill.post("/v1/drain", {}).status, 200)
        self.assertEqual(prefill.get("/readyz").status, 503)
        self.assertEqual(prefill.get("/healthz").status, 200)
        refused = prefill.prefill("new", 100)
        self.assertGreaterEqual(refused.status, 400, refused)
        self.assertTrue(refused.json["error"])
        reply = decode.decode("kept", params)  # what was promised is kept
        self.assertEqual(reply.status, 200, reply)
        self.finish()

    def test_sigterm_finishes_what_runs(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=250)
        asking = Asking(lambda: prefill.prefill("last", 1000))  # 4 seconds
        wait_for(lambda: prefill.transfer("last").status == 200, "the prefill to start")
        prefill.signal(signal.SIGTERM)
        wait_for(lambda: prefill.get("/readyz").status == 503, "the drain to start", 10)
        refused = prefill.prefill("too-late", 10)  # SIGTERM drains: it takes nothing new in
        self.assertEqual(refused.error, (429, "again"), refused)
        first = asking.wait()
        self.assertEqual(first.status, 200, first)
        reply = decode.decode("last", first.json["kv_transfer_params"])
        self.assertEqual(reply.status, 200, reply)
        self.assertEqual(prefill.wait_end(), 0, prefill.text())
        self.assertEqual(decode.stop(), 0, decode.text())

    def test_second_sigterm_stops_at_once(self):
        prefill = self.node("prefill", engine__prefill_tokens_per_s=10)
        asking = Asking(lambda: prefill.prefill("endless", 2000))
        wait_for(lambda: prefill.transfer("endless").status == 200, "the prefill to start")
        prefill.signal(signal.SIGTERM)
        time.sleep(0.5)
        self.assertTrue(prefill.alive())
        prefill.signal(signal.SIGTERM)
        start = time.monotonic()
        prefill.process.wait(PATIENCE_S)
        self.assertLess(time.monotonic() - start, 5 * SLOWNESS)
        asking.wait()

    def test_idle_nodes_use_no_cpu(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "warm")
        self.assert_quiet(prefill)
        self.assert_quiet(decode)
        time.sleep(0.5)
        before = prefill.cpu_ticks(), decode.cpu_ticks()
        time.sleep(2.0)
        after = prefill.cpu_ticks(), decode.cpu_ticks()
        per_second = os.sysconf("SC_CLK_TCK")
        for start, end in zip(before, after):
            self.assertLessEqual((end - start) / per_second, 0.06 * SLOWNESS)
        self.run_one(prefill, decode, "still-there")
        self.finish()

    def test_idle_for_longer_than_every_timer(self):
        """Five idle seconds; then it works at once."""
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "before")
        time.sleep(5.0)
        start = time.monotonic()
        self.run_one(prefill, decode, "after")
        self.assertLess(time.monotonic() - start, 5 * SLOWNESS)
        self.finish()


if __name__ == "__main__":
    unittest.main()
