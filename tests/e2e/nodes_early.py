# SPDX-License-Identifier: Apache-2.0
"""Tickets that are handed out before the prefill has ended: bytes move meanwhile, and whatever ends the prefill ends its decode."""

import json
import os
import subprocess
import time
import unittest

import sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
import models  # noqa: E402
from nodes import KVFERRY, PATIENCE_S, Asking, ClusterTest, wait_for  # noqa: E402

PRESET, BLOCK, PROMPT = "gemma-3-270m", 32, 3000


class EarlyTest(ClusterTest):
    def start(self, seconds, **settings):
        """A pair whose prefill takes so long."""
        self.prefill, self.decode = self.pair(engine__prefill_tokens_per_s=int(PROMPT / seconds), **settings)

    def ask_early(self, request_id, **more):
        """The early answer, which must come before any page has been computed; the waiting decode call."""
        first = self.prefill.prefill(request_id, PROMPT, early_ticket=True, **more)
        self.assertEqual(first.status, 200, first)
        self.assertEqual(self.prefill.transfer(request_id).json["state"], "running")
        # What is to move is known, although nothing of it is there.
        self.assertEqual((first.json["pages"], first.json["bytes"]), models.moved(PRESET, BLOCK, PROMPT))
        params = first.json["kv_transfer_params"]
        return Asking(lambda: self.decode.decode(request_id, params))

    def check_overlap(self, seconds):
        begin = time.monotonic()
        asking = self.ask_early("early")
        early = time.monotonic() - begin
        wait_for(lambda: self.decode.status()["counters"]["bytes_received"] > 0, "the first layers or chunks to arrive")
        self.assertFalse(asking.ended)
        answer = asking.wait()
        whole = time.monotonic() - begin
        self.assertEqual(answer.status, 200, answer)
        self.assertEqual((answer.json["verified"], answer.json["mismatched_bytes"]), (True, 0))
        self.assertEqual((answer.json["pages"], answer.json["bytes"]), models.moved(PRESET, BLOCK, PROMPT))
        self.assertGreaterEqual(whole, seconds)
        self.assertLess(early, seconds)
        # It lasted as long as the prefill; what came after its end is what counts for the user.
        self.assertGreater(answer.json["transfer_us"], 1e6 * seconds / 2)
        self.assertLess(answer.json["exposed_us"], answer.json["transfer_us"] / 2)
        self.finish()

    def test_layers(self):
        self.start(4.0)
        self.check_overlap(4.0)

    def test_chunks(self):
        self.start(4.0, engine__chunk_tokens=300)
        self.check_overlap(4.0)

    def test_pull(self):
        self.start(4.0, mover__direction="pull")
        self.check_overlap(4.0)

    def test_cancelled_prefill(self):
        self.start(60.0)
        asking = self.ask_early("cancelled")
        self.assertEqual(self.prefill.cancel("cancelled").status, 200)
        self.assertEqual(asking.wait().error, (499, "cancelled"))
        self.assertEqual(self.prefill.transfer("cancelled").json["state"], "cancelled")
        self.finish()

    def test_prefill_out_of_time(self):
        self.start(60.0)
        asking = self.ask_early("late", timeout_ms=700)
        reply = asking.wait()
        self.assertEqual(reply.error, (504, "deadline"), reply)
        self.assertTrue(reply.json["recompute"], reply)
        self.assertIn("prefill", reply.json["message"])
        self.finish()

    def test_killed_prefill(self):
        self.start(60.0)
        asking = self.ask_early("killed")
        self.prefill.kill()
        self.assertEqual(asking.wait().error, (502, "peer_lost"))
        self.finish()

    def test_cancelled_decode(self):
        """Nobody wants it any more: the engine stops."""
        self.start(60.0)
        asking = self.ask_early("unwanted")
        wait_for(lambda: self.decode.transfer("unwanted").status == 200, "the decode node to know of it")
        self.assertEqual(self.decode.cancel("unwanted").status, 200)
        self.assertEqual(asking.wait().error, (499, "cancelled"))
        wait_for(lambda: self.prefill.transfer("unwanted").json["state"] == "cancelled", "the prefill to end")
        self.finish()

    def test_nobody_comes(self):
        """An early ticket has a lease from the end of its prefill on, like any other."""
        self.start(0.3, limits__lease_ms=300)
        self.assertEqual(self.prefill.prefill("alone", PROMPT, early_ticket=True).status, 200)
        wait_for(lambda: self.prefill.transfer("alone").json["state"] == "expired", "the lease to end")
        self.finish()

    def test_replay(self):
        self.start(0.2, pool__bytes="256MiB")
        trace = os.path.join(HERE, "..", "data", "trace-200.jsonl")
        done = subprocess.run([KVFERRY, "replay", "--json", "--early-ticket", "--trace", trace, "--prefill", self.prefill.url,
                               "--decode", self.decode.url, "--max-input", "1500", "--limit", "6", "--concurrency", "2"],
                              capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        summary = json.loads(done.stdout)
        self.assertEqual((summary["ok"], summary["verified"], summary["mismatched_bytes"]), (6, 6, 0))
        # The transfers began with the prefills.
        self.assertLess(summary["exposed_us"]["p50"], summary["transfer_us"]["p50"])
        self.finish()


if __name__ == "__main__":
    unittest.main()
