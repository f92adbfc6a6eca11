# SPDX-License-Identifier: Apache-2.0
"""What pages hold is checked against the decode request: every way of naming a content, and wrong ones are found."""

import os
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import models  # noqa: E402
from nodes import PATIENCE_S, ClusterTest, wait_for  # noqa: E402

TOKEN_BYTES = {"full": 3 * 1024, "swa": 15 * 1024}  # gemma-3-270m: layers times bytes of one token in one layer


class ContentTest(ClusterTest):
    def setUp(self):
        super().setUp()
        self.prefill, self.decode = self.pair(pool__bytes="128MiB")

    def ask(self, request_id, first, second):
        """Prefill with `first`, decode with `second` besides the ticket; the decode node's answer."""
        reply = self.prefill.post("/v1/prefill", {"request_id": request_id, **first})
        self.assertEqual(reply.status, 200, reply)
        reply = self.decode.decode(request_id, reply.json["kv_transfer_params"], **second)
        self.assertEqual(reply.status, 200, reply)
        return reply.json

    def test_contents_that_agree(self):
        tokens = [(7 * i) % 32000 for i in range(700)]
        for k, (first, second, source) in enumerate((
                ({"prompt_len": 700}, {}, "request_id"),
                ({"prompt_len": 700, "hash_ids": [5, 6]}, {"hash_ids": [5, 6]}, "hash_ids"),
                ({"prompt_len": 700, "hash_ids": [5, -6]}, {"hash_ids": [5, -6]}, "hash_ids"),
                ({"tokens": tokens}, {"tokens": tokens}, "tokens"),
                ({"tokens": tokens, "prompt_len": 700}, {"tokens": tokens}, "tokens"))):
            with self.subTest(source):
                answer = self.ask("agree-%d" % k, first, second)
                self.assertEqual((answer["verified"], answer["mismatched_bytes"], answer["content"], answer["missing"]),
                                 (True, 0, source, []))
                self.assertNotIn("first_mismatch", answer)
        self.finish()

    def test_content_is_never_taken_from_the_sender(self):
        tokens = list(range(700))
        for source, first in (("hash_ids", {"prompt_len": 700, "hash_ids": [5, 6]}), ("tokens", {"tokens": tokens})):
            with self.subTest(source):
                reply = self.prefill.post("/v1/prefill", {"request_id": source, **first})
                params = reply.json["kv_transfer_params"]
                self.assertEqual(params["content"], source)
                self.assertNotIn("hash_ids", params)
                reply = self.decode.decode(source, dict(params, hash_ids=[5, 6]))
                self.assertEqual(reply.error, (400, "invalid"), reply)
                self.assertRegex(reply.json["message"], r"\A%s must be in the decode request.* sender\Z" % source)
                # Nothing was acquired, the ticket included.
                self.assertEqual(self.decode.transfer(source).status, 404)
                reply = self.decode.decode(source, params, **{source: first[source]})
                self.assertIs(reply.json["verified"], True, reply)
        blind = self.node("decode", verify="off")
        params = self.prefill.prefill("blind", 700, hash_ids=[5, 6]).json["kv_transfer_params"]
        self.assertEqual(blind.decode("blind", params).status, 200)
        self.finish()

    def test_another_first_piece(self):
        """Only pages of the first 512 tokens hold wrong bytes, and the first of them is named."""
        answer = self.ask("first", {"prompt_len": 700, "hash_ids": [5, 6]}, {"hash_ids": [4, 6]})
        self.assertIs(answer["verified"], False)
        self.assertEqual(answer["first_mismatch"],
                         {"group": "full", "ordinal": 0, "layer": 5, "kv": "k", "head": 0, "token": 0, "dim": 0})
        # The window of 512 leaves the query at 700 positions 189 and later, and with them the block from 160 on.
        wrong = 512 * TOKEN_BYTES["full"] + (512 - 160) * TOKEN_BYTES["swa"]
        self.assertLessEqual(answer["mismatched_bytes"], wrong)
        self.assertGreater(answer["mismatched_bytes"], wrong * 0.9)  # single bytes may agree by chance, words do not
        self.assertEqual(self.decode.transfer("first").json["mismatched_bytes"], answer["mismatched_bytes"])
        self.finish()

    def test_another_last_piece(self):
        answer = self.ask("last", {"prompt_len": 700, "hash_ids": [5, 6]}, {"hash_ids": [5, 7]})
        self.assertIs(answer["verified"], False)
        self.assertEqual((answer["first_mismatch"]["ordinal"], answer["first_mismatch"]["token"]), (16, 512))
        wrong = (700 - 512) * (TOKEN_BYTES["full"] + TOKEN_BYTES["swa"])
        self.assertLessEqual(answer["mismatched_bytes"], wrong)
        self.assertGreater(answer["mismatched_bytes"], wrong * 0.9)
        self.assertIs(answer["tokens_match"], False)
        self.finish()

    def test_one_token_of_many_differs(self):
        tokens = list(range(1, 701))
        other = tokens[:]
        other[699] += 1
        answer = self.ask("token", {"tokens": tokens}, {"tokens": other})
        self.assertIs(answer["verified"], False)
        self.assertEqual(answer["first_mismatch"]["token"], 512)
        self.finish()

    def test_drafts_travel_beside_the_pages(self):
        answer = self.ask("drafts", {"prompt_len": 100, "draft_len": 5, "hash_ids": [9]}, {"hash_ids": [9]})
        self.assertIs(answer["verified"], True)
        self.assertEqual((len(answer["first_tokens"]), len(answer["draft_tokens"])), (1, 5))
        again = self.ask("again", {"prompt_len": 100, "draft_len": 5, "hash_ids": [9]}, {"hash_ids": [9]})
        self.assertEqual((again["first_tokens"], again["draft_tokens"]), (answer["first_tokens"], answer["draft_tokens"]))
        self.finish()

    def test_another_number_of_drafts(self):
        """The pages are right, the number of tokens is not: both sides say which."""
        params = self.prefill.prefill("fewer", 100, draft_len=3).json["kv_transfer_params"]
        reply = self.decode.decode("fewer", dict(params, draft_len=5))
        self.assertEqual((reply.status, reply.json["error"], reply.json["recompute"]), (422, "count_mismatch", False), reply)
        self.assertRegex(reply.json["message"], r" 3 draft tokens, .* 5$")
        wait_for(lambda: self.prefill.transfer("fewer").json["state"] == "count_mismatch", self.prefill.text)
        self.finish()

    def test_a_node_that_does_not_check_says_so(self):
        blind = self.node("decode", verify="off")
        params = self.prefill.prefill("blind", 700, hash_ids=[5, 6]).json["kv_transfer_params"]
        answer = blind.decode("blind", params, hash_ids=[7, 8]).json
        self.assertEqual((answer["verified"], answer["verify"], answer["verify_us"]), (False, "off", 0))
        self.finish()


class EngineTest(ClusterTest):
    def test_a_throttled_prefill_takes_its_time(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=2000)
        start = time.monotonic()
        first = prefill.prefill("slow", 1000)
        took = time.monotonic() - start
        self.assertEqual(first.status, 200, first)
        self.assertGreater(took, 0.49)  # 1000 tokens at 2000 a second
        self.assertGreater(first.json["prefill_us"], 490000)
        self.assertLess(first.json["fill_us"], first.json["prefill_us"])
        self.assertIs(decode.decode("slow", first.json["kv_transfer_params"]).json["verified"], True)
        self.finish()

    def test_many_at_once_through_a_small_pool(self):
        """Forty requests for room of about four: each waits for its turn, and all are right."""
        prefill, decode = self.pair(pool__bytes="40MiB")
        lengths = [600 + 37 * k for k in range(40)]
        answers = {}

        def run(k):
            first = prefill.prefill("many-%d" % k, lengths[k], timeout_ms=60000)
            if first.status == 200:
                answers[k] = decode.decode("many-%d" % k, first.json["kv_transfer_params"], timeout_ms=60000)
            else:
                answers[k] = first

        threads = [threading.Thread(target=run, args=(k,)) for k in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S * 2)
        for k in range(40):
            self.assertEqual(answers[k].status, 200, answers[k])
            self.assertIs(answers[k].json["verified"], True)
            self.assertEqual((answers[k].json["pages"], answers[k].json["bytes"]),
                             models.moved("gemma-3-270m", 32, lengths[k]))
        status = prefill.status()
        self.assertGreater(status["time_us"]["wait"], 0)
        self.assertGreater(status["time_us"]["fill"], 0)
        self.assertGreater(decode.status()["time_us"]["verify"], 0)
        self.finish()

    def test_a_client_that_leaves_does_no_harm(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=2000, limits__lease_ms=500)
        with self.assertRaises(OSError):
            prefill.http("POST", "/v1/prefill", {"request_id": "left", "prompt_len": 1000}, timeout=0.1)
        wait_for(lambda: prefill.transfer("left").json["state"] == "expired", lambda: prefill.transfer("left"))
        self.run_one(prefill, decode, "left", 600)
        self.finish()

    def test_more_requests_than_the_limit(self):
        prefill = self.node("prefill", limits__transfers=2, limits__lease_ms=60000)
        for k in range(2):
            self.assertEqual(prefill.prefill("held-%d" % k, 40).status, 200)
        reply = prefill.prefill("more", 40)
        self.assertEqual(reply.error, (429, "again"), reply)
        self.assertIn("limits.transfers", reply.json["message"])
        self.assertEqual(prefill.cancel("held-0").json["state"], "cancelled")
        wait_for(lambda: prefill.prefill("more", 40).status == 200, "room for one more")
        for request_id in ("held-1", "more"):
            self.assertEqual(prefill.cancel(request_id).status, 200)
        self.finish()


if __name__ == "__main__":
    unittest.main()
