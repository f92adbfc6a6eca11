# SPDX-License-Identifier: Apache-2.0
"""Replays of the trace over the product of everything that a node can be told: every byte and the first decode step
are right, and what moved is what a model counts.

The axes: preset, tokens per block, length of a prefill chunk, prefix cache, drafts, aux manager, who paces, and the pools'
memory, from which the mover follows. Sixteen rows have every pair of values of any two axes; they run always, on a few
requests each. With KVF_LONG=1 they run on the whole cut of the trace, too, and so does every other row of the product on a
few requests. A row is a test of its own, named after it.
"""

import datetime
import itertools
import json
import os
import random
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
import models  # noqa: E402
from nodes import KVFERRY, MEMORY, ClusterTest  # noqa: E402

TRACE = os.path.join(HERE, "..", "data", "trace-200.jsonl")
LONG = int(os.environ.get("KVF_LONG") or 0)
TURNS = 8
TURN = int(os.environ.get("KVF_MATRIX_TURN") or datetime.date.today().toordinal() % TURNS)
TIMEOUT_MS = "300000"

PRESETS = list(models.PRESETS)
BLOCKS = [16, 32, 64, 128]
# None; less than any block; no multiple of a block; a multiple of every block.
CHUNKS = [0, 13, 300, 1024]
CACHE = [True, False]
DRAFTS = [0, 3]
AUX = ["plain", "cached"]
DIRECTIONS = ["push", "pull"]
MOVERS = {"host": "tcp", "cuda": "cuda"} if MEMORY == "cuda" else {"host": "tcp", "shm": "mapped"}
MEMORIES = list(MOVERS)
AXES = [PRESETS, BLOCKS, CHUNKS, CACHE, DRAFTS, AUX, DIRECTIONS, MEMORIES]

# How much of the trace a preset takes in seconds: longest prompt, number of requests.
SHARES = {"gemma-3-270m": (16384, 4), "gpt-oss-20b": (2400, 4), "llama-3.1-8b": (1150, 3), "mla-deepseek-v3": (1150, 3)}
LONG_SHARES = {"gemma-3-270m": (16384, 145), "gpt-oss-20b": (16384, 145), "llama-3.1-8b": (16384, 40),
               "mla-deepseek-v3": (16384, 40)}


def covering_rows():
    """Sixteen rows with every pair of values of any two axes.

    i, j, i + j, i + 2j and i + 3j over the field of four elements are an orthogonal array of strength 2 (R. C. Bose, K. A. Bush,
    "Orthogonal arrays of strength two and three", 1952). The two bits of the fourth, and their sum, are three axes of
    two values; the two bits of the fifth are two more.
    """
    double, triple = [0, 2, 3, 1], [0, 3, 1, 2]
    for i, j in itertools.product(range(4), repeat=2):
        last, fifth = i ^ double[j], i ^ triple[j]
        yield (PRESETS[i], BLOCKS[j], CHUNKS[i ^ j], CACHE[last & 1], DRAFTS[last >> 1], AUX[(last & 1) ^ (last >> 1)],
               DIRECTIONS[fifth & 1], MEMORIES[fifth >> 1])


def all_rows():
    """The product, in which directions and memories take turns."""
    for row in itertools.product(*AXES[:-2]):
        turn = sum(axis.index(value) for axis, value in zip(AXES, row))
        yield row + (DIRECTIONS[turn % 2], MEMORIES[turn // 2 % 2])


def rows_in_turn(turn):
    """A share of the product; neighbours have most values in common, so the rows are dealt in another order."""
    rows = list(all_rows())
    random.Random(1).shuffle(rows)
    return rows[turn::TURNS]


def name_of(row):
    preset, block, chunk, cache, drafts, aux, direction, memory = row
    return "%s_blocks_of_%d_%s_cache_%s_%d_drafts_%s_aux_%s_%s" % (
        preset.split("-")[0], block, "chunks_of_%d" % chunk if chunk else "one_step", "on" if cache else "off", drafts, aux,
        direction, MOVERS[memory])


def trace(max_input, limit):
    """[(prompt tokens, hash ids)], as `kvferry replay` takes them."""
    with open(TRACE, encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    return [(request["input_length"], request["hash_ids"]) for request in requests
            if request["input_length"] <= max_input][:limit]


class Pair:
    """A prefill and a decode node, and what both must know."""

    def __init__(self, test, row, prompts, pool_bytes):
        self.test = test
        self.preset, self.block, chunk, self.cache, self.drafts, aux, direction, memory = row
        self.mover = MOVERS[memory]
        self.prefill, self.decode = test.pair(
            model__preset=self.preset, model__tokens_per_block=self.block, pool__bytes=pool_bytes, pool__memory=memory,
            verify="attention", aux=aux, mover__direction=direction, prefix_cache="true" if self.cache else "false", engine__chunk_tokens=chunk)
        self.here = models.Cache(self.preset, self.block, False, chunks=chunk > 0)
        self.there = models.Cache(self.preset, self.block, True)
        # The pool of a prefill in chunks is cut for few windows, so that it forgets those of earlier prompts.
        self.forgets = chunk > 0 and any(window for _, _, window, _ in models.PRESETS[self.preset])

    def expect(self, prompt, ids):
        """(cached there, cached here, pages, bytes) of the next request, which then is known."""
        if not self.cache:
            return (0, 0) + models.moved(self.preset, self.block, prompt)
        here, there = self.here.find(ids, prompt), self.there.find(ids, prompt)
        self.here.learn(ids, prompt, here)
        self.there.learn(ids, prompt, there)
        return (there, here) + models.moved(self.preset, self.block, prompt, there)

    def check(self, found, expected):
        """Compare (cached there, cached here, pages, bytes), or sums of them."""
        if self.forgets:
            self.test.assertLessEqual(found[1], expected[1])
            found, expected = found[:1] + found[2:], expected[:1] + expected[2:]
        self.test.assertEqual(found, expected)

    def ask(self, request_id, prompt, ids):
        """One request by hand, and everything that its answers must say."""
        expected = self.expect(prompt, ids)
        first = self.prefill.prefill(request_id, prompt, hash_ids=ids, draft_len=self.drafts, timeout_ms=int(TIMEOUT_MS))
        self.test.assertEqual(first.status, 200, first)
        second = self.decode.decode(request_id, first.json["kv_transfer_params"], hash_ids=ids, timeout_ms=int(TIMEOUT_MS))
        self.test.assertEqual(second.status, 200, second)
        answer = second.json
        self.check((answer["cached_tokens"], first.json["cached_tokens"], answer["pages"], answer["bytes"]), expected)
        self.test.assertEqual((answer["verified"], answer["verify"], answer["mismatched_bytes"], answer["missing"]),
                              (True, "attention", 0, []))
        self.test.assertEqual((len(answer["first_tokens"]), len(answer["draft_tokens"])), (1, self.drafts))
        self.test.assertEqual(answer["mover"], self.mover if answer["bytes"] > 0 else "")
        attention = answer["attention"]
        # The query at the prompt's end sees itself and what its window leaves it, in every layer.
        seen = sum(len(layers) * min(prompt + 1, window or prompt + 1)
                   for _, layers, window, _ in models.PRESETS[self.preset])
        self.test.assertEqual((attention["same"], attention["tokens"]), (True, seen))

    def replay(self, max_input, limit, concurrency):
        done = subprocess.run([KVFERRY, "replay", "--json", "--trace", TRACE, "--prefill", self.prefill.url, "--decode",
                               self.decode.url, "--max-input", str(max_input), "--limit", str(limit), "--concurrency",
                               str(concurrency), "--draft-len", str(self.drafts), "--timeout-ms", TIMEOUT_MS],
                              capture_output=True, text=True, timeout=3600, check=False)
        self.test.assertEqual(done.returncode, 0,
                              "%s\n%s\n%s" % (done.stderr, self.prefill.text(), self.decode.text()))
        summary = json.loads(done.stdout)
        self.test.assertEqual({key: summary[key] for key in ("ok", "failed", "verified", "mismatched_bytes",
                                                             "draft_tokens")},
                              {"ok": summary["requests"], "failed": {}, "verified": summary["requests"],
                               "mismatched_bytes": 0, "draft_tokens": summary["requests"] * self.drafts})
        cached = summary["cached_tokens"]
        return summary["requests"], (cached["decode"], cached["prefill"], summary["pages"], summary["bytes"])

    def finish(self):
        for node in (self.prefill, self.decode):
            counters = node.status()["counters"]
            for name in ("digest_mismatches", "unknown_transfers", "refused_chunks", "refused_frames",
                         "capacity_mismatches"):
                self.test.assertEqual(counters[name], 0, (node.role, name))
        self.test.finish()
        self.test.nodes.clear()


class MatrixTest(ClusterTest):
    def test_rows_have_every_pair(self):
        rows = list(covering_rows())
        self.assertEqual(len(rows), 16)
        for (a, first), (b, second) in itertools.combinations(enumerate(AXES), 2):
            self.assertEqual({(row[a], row[b]) for row in rows}, set(itertools.product(first, second)))

    def test_turns_have_every_row_once(self):
        rows = [row for turn in range(TURNS) for row in rows_in_turn(turn)]
        self.assertEqual(sorted(map(name_of, rows)), sorted(map(name_of, all_rows())))
        for turn in range(TURNS):
            values = {(axis, row[axis]) for row in rows_in_turn(turn) for axis in range(len(AXES))}
            self.assertEqual(len(values), sum(map(len, AXES)), "turn %d has every value" % turn)

    def few(self, row):
        """A share of the trace one by one, so that the model can say what each node had; then all of it again."""
        requests = trace(*SHARES[row[0]])
        prompts = [prompt for prompt, _ in requests]
        pair = Pair(self, row, prompts, models.room_for(row[0], row[1], prompts))
        for _ in range(2 if pair.cache else 1):
            expected = [pair.expect(*request) for request in requests]
            n, found = pair.replay(*SHARES[row[0]], concurrency=1 if pair.cache else 3)
            self.assertEqual(n, len(requests))
            pair.check(found, tuple(map(sum, zip(*expected))))
        pair.ask("by-hand", prompts[-1] - 1, requests[-1][1])
        pair.finish()

    def many(self, row):
        """All prompts that are short enough, some at once, through a pool that has room for few of them."""
        requests = trace(*LONG_SHARES[row[0]])
        pair = Pair(self, row, [], models.room_for(row[0], row[1], [16384, 16384]))
        n, found = pair.replay(*LONG_SHARES[row[0]], concurrency=4)
        self.assertEqual(n, len(requests))
        moved = [models.moved(row[0], row[1], prompt) for prompt, _ in requests]
        most = sum(pages for pages, _ in moved), sum(size for _, size in moved)
        if pair.cache:
            self.assertGreater(found[0], 0)
            self.assertLess(found[2:], most)
        else:
            self.assertEqual(found, (0, 0) + most)
        pair.finish()


def add_row(row, kind):
    setattr(MatrixTest, "test_%s_%s" % (kind, name_of(row)), lambda self: getattr(self, kind)(row))


for _row in {0: (), 1: rows_in_turn(TURN)}.get(LONG, all_rows()):
    add_row(_row, "few")
for _row in covering_rows():
    add_row(_row, "few")
    if LONG:
        add_row(_row, "many")


class EachAnswerTest(ClusterTest):
    """Requests of the trace one after the other: what each of them finds and moves."""

    def each(self, preset, block, chunk=0):
        # Every prompt of the trace begins with the same piece; some go on with another's answer.
        requests = trace(4000, 200)
        seen, conversations = set(), []
        for prompt, ids in requests:
            if tuple(ids[:2]) in seen:
                conversations.append(tuple(ids[:2]))
            seen.add(tuple(ids[:2]))
        requests = requests[:4] + [(prompt, ids) for prompt, ids in requests[4:] if tuple(ids[:2]) in conversations][:8]
        self.assertGreater(len(requests), 6)
        prompts = [prompt for prompt, _ in requests]
        pair = Pair(self, (preset, block, chunk, True, 0, "cached", "pull", MEMORIES[1]), prompts, models.room_for(preset, block, prompts))
        for k, (prompt, ids) in enumerate(requests):
            with self.subTest("request %d" % k):
                pair.ask("r-%d" % k, prompt, ids)
        self.assertGreater(pair.decode.status()["prefix_cache"]["cached_tokens"], sum(prompts) / 5)
        pair.finish()

    def test_gemma(self):
        self.each("gemma-3-270m", 32)

    def test_gpt_oss(self):
        self.each("gpt-oss-20b", 16)

    def test_gpt_oss_in_chunks(self):
        self.each("gpt-oss-20b", 64, 300)


class EdgesTest(ClusterTest):
    """Prompts that end at the edges of blocks and windows, and longer ones that begin like them."""

    def edges(self, preset, block, chunk=0):
        window = next(window for _, _, window, _ in models.PRESETS[preset] if window)
        # With window + block - 1 tokens the first block is stale, with one less its last token is seen.
        middles = {block, 2 * block, window, window + block - 1, window + block}
        lengths = sorted({1} | {middle + d for middle in middles for d in (-1, 0, 1)})
        for cache in (False, True):
            # With the cache, each of them is followed by itself and by longer prompts of the same content.
            further = (0, 0, 1, block - 1, window) if cache else (0,)
            prompts = [length + d for length in lengths for d in further]
            pair = Pair(self, (preset, block, chunk, cache, 3, "cached", "push", "host"), prompts,
                        models.room_for(preset, block, prompts))
            for prompt, (length, k) in zip(prompts, itertools.product(lengths, range(len(further)))):
                with self.subTest("%d tokens, number %d of %d, cache %r" % (prompt, k, length, cache)):
                    ids = [1000 * length + i for i in range(-(-prompt // models.PIECE))]
                    pair.ask("e-%d-%d" % (length, k), prompt, ids)
            pair.finish()

    def test_gemma_16(self):
        self.edges("gemma-3-270m", 16)

    def test_gemma_128_in_chunks(self):
        self.edges("gemma-3-270m", 128, 127)

    def test_gpt_oss_32_in_chunks(self):
        self.edges("gpt-oss-20b", 32, 13)

    def test_gpt_oss_128(self):
        self.edges("gpt-oss-20b", 128)


if __name__ == "__main__":
    unittest.main()
