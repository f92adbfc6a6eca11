# SPDX-License-Identifier: Apache-2.0
"""Prefill in chunks, draft layers, and the first decode step: what arrives is the same, in less room."""

import os
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import models  # noqa: E402
from nodes import Asking, ClusterTest, wait_for  # noqa: E402

PRESET = "gemma-3-270m"
BLOCK = 32


class ChunkedTest(ClusterTest):
    def check(self, prefill, decode, request_id, prompt, **more):
        answer = self.run_one(prefill, decode, request_id, prompt, **more)
        self.assertEqual((answer["pages"], answer["bytes"]), models.moved(PRESET, BLOCK, prompt), prompt)
        return answer

    def test_every_kind_of_boundary(self):
        for chunk in (1, 31, 32, 33, 100, 512, 100000):
            # One token at a time is many chunks; what is special about it is there in small prompts.
            prompts = (1, 2, 31, 32, 33, 65) if chunk == 1 else (1, 31, 32, 33, 99, 100, 101, 511, 512, 513, 700, 1537)
            prefill, decode = self.pair(engine__chunk_tokens=chunk, pool__bytes="192MiB")
            for prompt in prompts:
                with self.subTest("%d in chunks of %d" % (prompt, chunk)):
                    self.check(prefill, decode, "p-%d" % prompt, prompt)
            self.finish()
            self.nodes.clear()

    def test_a_prompt_whose_windows_do_not_fit_at_once(self):
        """4000 tokens are 125 blocks of each group; the pool of the windowed one never has room for half of them."""
        prefill = self.node("prefill", engine__chunk_tokens=64, pool__bytes="32MiB")
        decode = self.node("decode", pool__bytes="64MiB")
        pools = {pool["group"]: pool["total"] for pool in prefill.status()["pools"]}
        self.assertLess(pools["swa"], 125 // 2)
        self.assertGreaterEqual(pools["full"], 125)
        answer = self.check(prefill, decode, "long", 4000)
        # The pool's bytes cannot hold the prompt in any way: what is held is less than what it has.
        self.assertGreater(125 * (98304 + 491520), 32 << 20)
        self.assertEqual(answer["missing"], [])
        self.finish()

    def test_too_long_for_any_chunks(self):
        prefill = self.node("prefill", engine__chunk_tokens=64, pool__bytes="32MiB")
        reply = prefill.prefill("too-long", 100000)
        self.assertEqual(reply.error, (413, "too_large"), reply)
        self.assertIn("group full", reply.json["message"])
        self.finish()

    def test_many_at_once_wait_for_one_another(self):
        """Room for few: a prefill that has started never waits for another one in the middle."""
        prefill = self.node("prefill", engine__chunk_tokens=48, pool__bytes="32MiB")
        decode = self.node("decode", pool__bytes="64MiB")
        prompts = [300 + 97 * k for k in range(24)]

        def one(k):
            first = prefill.prefill("m-%d" % k, prompts[k], timeout_ms=60000)
            if first.status != 200:
                return first
            return decode.decode("m-%d" % k, first.json["kv_transfer_params"], timeout_ms=60000)

        asking = [Asking(lambda k=k: one(k)) for k in range(len(prompts))]
        for k, call in enumerate(asking):
            reply = call.wait()
            self.assertEqual(reply.status, 200, reply)
            self.assertIs(reply.json["verified"], True)
            self.assertEqual((reply.json["pages"], reply.json["bytes"]), models.moved(PRESET, BLOCK, prompts[k]))
        self.assertGreater(prefill.status()["time_us"]["wait"], 0)
        self.finish()

    def test_a_throttled_prefill_takes_its_time_and_less_for_what_it_has(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=2000, engine__chunk_tokens=128)
        for request_id, least, most in (("slow", 0.49, 60), ("quick", 0, 0.49)):
            start = time.monotonic()
            first = prefill.prefill(request_id, 1000, hash_ids=[3, 4])
            took = time.monotonic() - start
            self.assertEqual(first.status, 200, first)
            self.assertGreaterEqual(took, least)  # 1000 tokens at 2000 a second, then one
            self.assertLess(took, most)
            answer = decode.decode(request_id, first.json["kv_transfer_params"], hash_ids=[3, 4]).json
            self.assertIs(answer["verified"], True)
        self.finish()

    def test_a_prompt_again_in_the_least_pool(self):
        """Its last page is found, is offered to the decode node, and there is no other one to compute the token in."""
        least = 98304 + 491520 * (1 + -(-(512 + 48 - 2) // BLOCK))  # a window and a chunk, and one page without a window
        prefill = self.node("prefill", engine__chunk_tokens=48, pool__bytes=least)
        decode = self.node("decode")
        self.assertEqual({pool["group"]: pool["total"] for pool in prefill.status()["pools"]}, {"full": 1, "swa": 19})
        for prompt in (1, 31, 32):
            for again in range(3):
                first = prefill.prefill("l-%d-%d" % (prompt, again), prompt, hash_ids=[prompt], timeout_ms=10000)
                self.assertEqual((first.status, first.json.get("cached_tokens")), (200, 0), first)
                answer = decode.decode("l-%d-%d" % (prompt, again), first.json["kv_transfer_params"], hash_ids=[prompt])
                self.assertIs(answer.json["verified"], True, answer)
        self.finish()

    def test_cancel_between_chunks(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=1000, engine__chunk_tokens=32)
        asking = Asking(lambda: prefill.prefill("slow", 2000))
        wait_for(lambda: prefill.pages()["reading"] > 0, "a chunk")
        self.assertEqual(prefill.cancel("slow").status, 200)
        self.assertEqual(asking.wait().error, (499, "cancelled"))
        self.assert_quiet(prefill)
        self.check(prefill, decode, "slow", 300)
        self.finish()

    def test_deadline_between_chunks(self):
        prefill, decode = self.pair(engine__prefill_tokens_per_s=100, engine__chunk_tokens=32)
        self.assertEqual(prefill.prefill("late", 2000, timeout_ms=700).error, (504, "deadline"))
        self.assert_quiet(prefill)
        self.check(prefill, decode, "late", 20)
        self.finish()


class DraftTest(ClusterTest):
    def test_draft_layers_travel_like_the_others(self):
        prefill, decode = self.pair(model__draft_layers=4)
        for chunks in ({}, {"engine__chunk_tokens": 100}):
            sender = self.node("prefill", model__draft_layers=4, **chunks) if chunks else prefill
            for prompt in (1, 100, 700, 1024):
                answer = self.run_one(sender, decode, "d-%d" % prompt, prompt, draft_len=3)
                self.assertEqual((answer["pages"], answer["bytes"]),
                                 models.moved(PRESET, BLOCK, prompt, draft_layers=4))
                self.assertEqual(len(answer["draft_tokens"]), 3)
        groups = [pool["group"] for pool in decode.status()["pools"]]
        self.assertEqual(groups, ["full", "swa", "draft"])
        self.finish()

    def test_draft_layers_on_one_side_only(self):
        for settings in (({"model__draft_layers": 4}, {}), ({}, {"model__draft_layers": 4}),
                         ({"model__draft_layers": 4}, {"model__draft_layers": 5})):
            with self.subTest(settings):
                prefill, decode = self.node("prefill", **settings[0]), self.node("decode", **settings[1])
                params = prefill.prefill("one", 100).json["kv_transfer_params"]
                reply = decode.decode("one", params)
                self.assertEqual(reply.error, (422, "incompatible"), reply)
                self.assertIn("group draft", reply.json["message"])
                prefill.cancel("one")
        self.finish()

    def test_places_behind_the_prompt(self):
        """Drafts and extra tokens take pages of the decode node, and none of them travels."""
        for extra in (0, 1, 2, 8):
            prefill, decode = self.pair(engine__extra_tokens=extra, model__tokens_per_block=16)
            for prompt, drafts in ((15, 0), (16, 0), (16, 3), (30, 3), (31, 1), (500, 17)):
                answer = self.run_one(prefill, decode, "e-%d-%d" % (prompt, drafts), prompt, draft_len=drafts)
                self.assertEqual((answer["pages"], answer["bytes"]), models.moved(PRESET, 16, prompt))
            self.finish()
            self.nodes.clear()


class AttentionTest(ClusterTest):
    """`verify: attention`: the first decode step over the pages that came."""

    def steps_agree(self, **settings):
        prefill, decode = self.pair(verify="attention", **settings)
        block = settings.get("model__tokens_per_block", BLOCK)
        groups = models.PRESETS[settings.get("model__preset", PRESET)]
        for prompt in (1, block - 1, block, block + 1, 511, 512, 513, 700):
            for again in range(2):  # the second time out of the cache
                ids = [prompt, 7][:-(-prompt // 512)]
                first = prefill.prefill("a-%d" % again, prompt, hash_ids=ids, draft_len=3)
                answer = decode.decode("a-%d" % again, first.json["kv_transfer_params"], hash_ids=ids).json
                self.assertIs(answer["verified"], True, answer)
                self.assertEqual((answer["verify"], answer["attention"]["same"]), ("attention", True))
                # The query at P sees itself and what its window leaves it.
                self.assertEqual(answer["attention"]["tokens"],
                                 sum(len(layers) * min(prompt + 1, window or prompt + 1)
                                     for _, layers, window, _ in groups))
                self.assertEqual(answer["cached_tokens"], prompt if again else 0)
        self.finish()

    def test_cached_aux(self):
        self.steps_agree(aux="cached")

    def test_plain_aux_in_chunks(self):
        self.steps_agree(aux="plain", engine__chunk_tokens=77)

    def test_windows_of_128(self):
        self.steps_agree(model__preset="gpt-oss-20b", pool__bytes="256MiB", engine__chunk_tokens=200)

    def test_latent(self):
        self.steps_agree(model__preset="mla-deepseek-v3", model__tokens_per_block=64, pool__bytes="384MiB")

    def test_another_content(self):
        prefill, decode = self.pair(verify="attention")
        params = prefill.prefill("other", 700, hash_ids=[5, 6]).json["kv_transfer_params"]
        answer = decode.decode("other", params, hash_ids=[4, 6]).json
        self.assertIs(answer["verified"], False)
        self.assertIs(answer["attention"]["same"], False)
        self.assertEqual((answer["attention"]["first"]["group"], answer["attention"]["first"]["layer"]), ("full", 5))
        self.assertGreater(answer["mismatched_bytes"], 0)
        self.finish()

    def test_the_token_that_attends_leaves_no_trace(self):
        """The page of the judge's token is the prompt's last one: what is found in it later is zero again."""
        prefill, decode = self.pair(verify="attention")
        for k in range(3):  # the last page is shared, copied, written, and taken back
            first = prefill.prefill("t-%d" % k, 700, hash_ids=[5, 6])
            answer = decode.decode("t-%d" % k, first.json["kv_transfer_params"], hash_ids=[5, 6]).json
            self.assertEqual((answer["verified"], answer["mismatched_bytes"]), (True, 0))  # tails are compared, too
        self.assertEqual(decode.status()["prefix_cache"]["hits"], 2)
        self.finish()


if __name__ == "__main__":
    unittest.main()
