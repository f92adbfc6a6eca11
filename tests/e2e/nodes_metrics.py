# SPDX-License-Identifier: Apache-2.0
"""/metrics and /v1/status: well-formed, with the contract's names, and right."""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import metrics  # noqa: E402
import models  # noqa: E402
from nodes import ClusterTest, wait_for  # noqa: E402

HEAD = "# HELP a_total x\n# TYPE a_total counter\n"
HISTOGRAM = "# HELP h x\n# TYPE h histogram\n"


class ReaderTest(unittest.TestCase):
    """The reader itself: what is wrong must not pass."""

    def test_good(self):
        text = HEAD + 'a_total{x="a\\"\\\\\\n",y=""} 1e3\na_total 0.5\n' + HISTOGRAM + \
            'h_bucket{le="0.1"} 1\nh_bucket{le="+Inf"} 3\nh_sum 0.7\nh_count 3\n'
        samples = metrics.parse(text)
        self.assertEqual(samples[("a_total", ())], 0.5)
        self.assertEqual(samples[("a_total", (("x", 'a\\"\\\\\\n'), ("y", "")))], 1000)

    def test_bad(self):
        for text in (HEAD + "a_total 1", HEAD + "b_total 1\n", HEAD + "a_total 1\na_total 2\n", "a_total 1\n",
                     "# TYPE a_total counter\na_total 1\n", HEAD + "a_total -1\n", HEAD + "a_total 1,5\n",
                     HEAD + "a_total nan1\n", HEAD + "\n", HEAD + 'a_total{x="1",x="2"} 1\n', HEAD + "a_total{x=1} 1\n",
                     HEAD + 'a_total{x="a"b"} 1\n', HEAD + "a_total  1\n", HEAD + "# TYPE a_total counter\n",
                     "# HELP a x\n# TYPE a counter\na 1\n", "# HELP a_total x\n# TYPE a_total number\na_total 1\n",
                     HEAD + "# HELP b x\n# TYPE b gauge\na_total 1\n",
                     HEAD + "a_total 1\n# HELP b x\n# TYPE b gauge\nb 1\na_total{x=\"1\"} 1\n",
                     HISTOGRAM + 'h_bucket{le="+Inf"} 3\nh_sum 0.7\nh_count 4\n',
                     HISTOGRAM + 'h_bucket{le="1"} 3\nh_sum 0.7\nh_count 3\n',
                     HISTOGRAM + 'h_bucket{le="1"} 4\nh_bucket{le="+Inf"} 3\nh_sum 0.7\nh_count 3\n',
                     HISTOGRAM + 'h_bucket{le="+Inf"} 3\nh_count 3\n'):
            with self.subTest(text):
                with self.assertRaises(metrics.MetricsError):
                    metrics.parse(text)


class MetricsTest(ClusterTest):
    NAMES = ("kvferry_transfers_total", "kvferry_transfer_bytes_total", "kvferry_transfer_pieces_total",
             "kvferry_transfer_seconds_count", "kvferry_exposed_seconds_count", "kvferry_pages", "kvferry_peers",
             "kvferry_prompt_tokens_total", "kvferry_prefix_cached_tokens_total", "kvferry_prefix_hits_total",
             "kvferry_digest_mismatch_total", "kvferry_content_mismatch_total", "kvferry_unknown_transfer_total",
             "kvferry_refused_total", "kvferry_mover_fallback_total", "kvferry_quarantine_seconds_count",
             "kvferry_reconnects_total", "kvferry_audit_failures_total")

    def total(self, samples, name, **labels):
        """Sum of all samples of a name whose labels include these."""
        wanted = set(labels.items())
        return sum(value for (found, have), value in samples.items() if found == name and wanted <= set(have))

    def test_names_and_numbers(self):
        prefill, decode = self.pair()
        self.assertEqual(self.total(metrics.parse(decode.metrics()), "kvferry_transfers_total"), 0)
        prompts = (100, 700, 1500)
        for tokens in prompts:
            self.run_one(prefill, decode, "m-%d" % tokens, tokens)
        wait_for(lambda: prefill.transfer("m-1500").json["state"] == "done", "the end of the send")
        prefill.decode("x", {})
        prefill.prefill("x", 0)
        expected = sum(models.moved("gemma-3-270m", 32, tokens)[1] for tokens in prompts)
        for node, role in ((prefill, "prefill"), (decode, "decode")):
            samples = metrics.parse(node.metrics())
            names = {name for name, _ in samples}
            for name in self.NAMES:
                self.assertIn(name, names, role)
            self.assertEqual(self.total(samples, "kvferry_transfers_total", role=role, result="ok"), 3)
            self.assertEqual(self.total(samples, "kvferry_transfers_total", role=role), 3)
            self.assertEqual(self.total(samples, "kvferry_transfer_bytes_total", role=role), expected)
            self.assertGreaterEqual(self.total(samples, "kvferry_transfer_pieces_total"), 3)
            self.assertEqual(self.total(samples, "kvferry_transfer_seconds_count"), 3)
            self.assertGreater(self.total(samples, "kvferry_transfer_seconds_sum"), 0)
            self.assertEqual(self.total(samples, "kvferry_peers", state="up"), 1)
            self.assertEqual(self.total(samples, "kvferry_digest_mismatch_total"), 0)
            self.assertEqual(self.total(samples, "kvferry_content_mismatch_total"), 0)
            self.assertEqual(self.total(samples, "kvferry_mover_fallback_total"), 0)
            labels = {dict(have)["state"] for name, have in samples if name == "kvferry_pages"}
            self.assertEqual(labels, {"poisoned", "quarantined", "writing", "reading", "held", "cached", "free"})
            self.assertEqual(self.total(samples, "kvferry_pages"), sum(node.pages().values()))
            self.assertEqual(self.total(samples, "kvferry_pages", state="free"), node.pages()["free"])
        self.assertEqual(self.total(metrics.parse(decode.metrics()), "kvferry_exposed_seconds_count"), 3)
        self.finish()

    def test_failures_are_counted_by_result(self):
        prefill, decode = self.pair(limits__lease_ms=200)
        params = prefill.prefill("late", 700).json["kv_transfer_params"]
        self.assert_quiet(prefill, 10)
        self.assertEqual(decode.decode("late", params).error, (410, "expired"))
        self.assertEqual(self.total(metrics.parse(prefill.metrics()), "kvferry_transfers_total", result="expired"), 1)
        self.assertEqual(self.total(metrics.parse(decode.metrics()), "kvferry_transfers_total", result="expired"), 1)
        self.finish()

    def test_content_mismatches_are_counted(self):
        """Transfers that end well with other bytes than the request asks for: done, not verified, and counted."""
        prefill, decode = self.pair()
        blind = self.node("decode", verify="off")
        for k, (node, ids, state) in enumerate(((decode, [7], False), (decode, [9], True), (decode, [8], False),
                                                (blind, [7], False))):
            params = prefill.prefill("c-%d" % k, 100, hash_ids=[9]).json["kv_transfer_params"]
            reply = node.decode("c-%d" % k, params, hash_ids=ids)
            self.assertEqual(reply.status, 200, reply)
            shown = node.transfer("c-%d" % k).json
            self.assertEqual((shown["state"], shown["verified"]), ("done", state))
        for node, expected in ((decode, 2), (blind, 0), (prefill, 0)):
            samples = metrics.parse(node.metrics())
            self.assertEqual(self.total(samples, "kvferry_content_mismatch_total"), expected)
            self.assertEqual(self.total(samples, "kvferry_digest_mismatch_total"), 0)
        self.assertEqual(self.total(metrics.parse(decode.metrics()), "kvferry_transfers_total", result="ok"), 3)
        self.finish()

    def test_only_peers_that_died_are_lost(self):
        orderly, decode = self.pair()
        dying = self.node("prefill")

        def peers():
            samples = metrics.parse(decode.metrics())
            return {state: self.total(samples, "kvferry_peers", state=state) for state in ("up", "lost")}

        self.run_one(orderly, decode, "orderly")
        self.run_one(dying, decode, "dying")
        self.assertEqual(peers(), {"up": 2, "lost": 0})
        self.assertEqual(orderly.stop(), 0, orderly.text())
        self.nodes.remove(orderly)
        wait_for(lambda: peers() == {"up": 1, "lost": 0}, peers)
        self.assertEqual([peer["instance"] for peer in decode.status()["peers"]], [dying.ready["instance"]])
        dying.kill()
        wait_for(lambda: peers() == {"up": 0, "lost": 1}, peers)
        self.finish()

    def test_status(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "s")
        for node, other in ((prefill, decode), (decode, prefill)):
            status = node.status()
            self.assertEqual(status["role"], node.role)
            self.assertRegex(status["incarnation"], r"\A[0-9a-f]{32}\Z")
            peers = [peer for peer in status["peers"] if peer["state"] == "up"]
            self.assertEqual([peer["instance"] for peer in peers], [other.ready["instance"]])
            self.assertEqual(peers[0]["incarnation"], other.status()["incarnation"])
            self.assertTrue(peers[0]["mover"])
        self.finish()


if __name__ == "__main__":
    unittest.main()
