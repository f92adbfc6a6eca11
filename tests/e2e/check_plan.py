#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks `kvferry plan` as docs/contracts.md describes it.

    KVFERRY=build/tools/kvferry tests/e2e/check_plan.py [SEED]

Three kinds of input: the worked cases of tests/data/placement.jsonl; requests made from a known
truth, described as ordinals or as either kind of legacy list; and lines that are wrong in every way.
"""
import json
import os
import pathlib
import random
import subprocess
import sys

CASES = pathlib.Path(__file__).resolve().parent.parent / "data" / "placement.jsonl"


def plan(program, lines):
    """One answer for each line of text."""
    data = b"".join(line + b"\n" for line in lines)
    done = subprocess.run([program, "plan", "--json"], input=data, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=300, check=False)
    answers = done.stdout.splitlines()
    if done.returncode != 0 or done.stderr or len(answers) != len(lines):
        raise SystemExit(f"exit code {done.returncode}, {len(answers)} answers for {len(lines)} "
                         f"lines: {done.stderr[:500]!r}")
    return [json.loads(answer) for answer in answers]


def normal(answer):
    """An answer without what may be worded freely: its message, and where an empty range lies."""
    answer = {key: value for key, value in answer.items() if key not in ("id", "message")}
    groups = []
    for group in answer.get("groups", []):
        first, end = group["stale"]
        groups.append(dict(group, stale=[first, end] if first < end else []))
    return dict(answer, groups=groups) if "groups" in answer else answer


def compare(got, want):
    """What is wrong with an answer, or None. `missing` may be left out of what is expected."""
    if not got["ok"] and not got.get("message"):
        return "an error without a message"
    if not want["ok"] and "missing" not in want:
        got = {key: value for key, value in got.items() if key != "missing"}
    if normal(got) != normal(want):
        return f"\n  got      {normal(got)} {got.get('message', '')}\n  expected {normal(want)}"
    return None


def worked_cases():
    with open(CASES, encoding="utf-8") as stream:
        for line in stream:
            case = json.loads(line)
            want = case.pop("expect")
            name = f"{case['id']} ({case.pop('why')})"
            yield name, case, want


def is_live(ordinal, prompt, block, window, sinks):
    """Whether some position of the block's full extent is a sink or inside the next query's window."""
    positions = range(ordinal * block, (ordinal + 1) * block)
    return window is None or any(p < sinks or p >= prompt - window + 1 for p in positions)


def describe(rng, truth, live, scratch, window, sinks):
    """A side's blocks (prompt and scratch) as the input of plan; `truth` loses what it does not tell."""
    n = len(truth)
    slots = [truth[i] for i in range(n)]
    way = rng.choice(["ordinals", "chain", "resident"])
    if way == "ordinals" or (way == "resident" and window is not None and sinks > 0):
        for i in rng.sample(range(n), rng.randint(0, n)):
            if rng.random() < 0.1 or not live[i]:
                slots[i] = truth[i] = -1
        return {"ordinals": slots + scratch[:rng.randint(0, len(scratch))]}
    if way == "chain":
        dead = next((i for i in range(n) if live[i]), n)
        removed = rng.randint(0, dead)
        for i in range(removed):
            slots[i], truth[i] = rng.choice(slots), -1
        # The first token's block may be listed where nothing else is reserved.
        ids = slots + (scratch if scratch else [10 ** 6][:rng.randint(0, 1)])
        legacy = {"ids": ids}
        if removed or window is not None or rng.random() < 0.5:
            legacy["front_removed"] = removed
        return {"legacy": legacy}
    if window is None:
        return {"legacy": {"ids": slots + scratch}}
    first = next((i for i in range(n) if live[i]), n)
    kept = rng.randint(0, first)
    return {"legacy": {"ids": slots[first - kept:] + scratch}}


def random_case(rng):
    block = rng.choice([1, 2, 3, 8, 16])
    prompt, drafts, extra = rng.randint(1, 12 * block), rng.randint(0, 9), rng.randint(0, 9)
    cached = rng.choice([0, 0, rng.randint(0, prompt), prompt])
    drafted = {"context": rng.random() < 0.2, "generation": rng.random() < 0.8}
    capacity = {side: prompt + extra + (drafts if drafted[side] else 0) for side in drafted}
    blocks = -(-prompt // block)
    alloc = {side: -(-capacity[side] // block) for side in capacity}
    skip = rng.random() < 0.5
    groups, answers, missing = [], [], {}
    for name in rng.sample(["full", "swa", "local", "global"], rng.randint(1, 3)):
        window = rng.choice([None, rng.randint(1, prompt + 2)])
        sinks = rng.choice([0, 0, rng.randint(0, prompt)])
        live = [is_live(i, prompt, block, window, sinks) for i in range(blocks)]
        group, truth = {"name": name, "window": window, "sinks": sinks}, {}
        for side in capacity:
            pool = rng.sample(range(1000), max(alloc.values()))
            truth[side] = dict(enumerate(pool[:blocks]))
            group[side] = describe(rng, truth[side], live, pool[blocks:alloc[side]], window, sinks)
        dead = [i for i in range(blocks) if not live[i]]
        held = [i for i in range(blocks) if cached == prompt or (i + 1) * block <= cached]
        source, target = truth["context"], truth["generation"]
        wanted = [i for i in range(blocks) if live[i] and i not in held]
        lacks = {"source": [i for i in wanted if source[i] < 0],
                 "destination": [i for i in range(blocks) if live[i] and target[i] < 0]}
        if any(lacks.values()):
            missing[name] = lacks
        groups.append(group)
        answers.append({"name": name, "stale": [dead[0], dead[-1] + 1] if dead else [0, 0],
                        "pairs": [[i, source[i], target[i]] for i in wanted
                                  if source[i] >= 0 and target[i] >= 0],
                        "missing_source": lacks["source"],
                        "missing_destination": lacks["destination"]})
    case = {"id": rng.random(), "tokens_per_block": block, "prompt_len": prompt, "groups": groups,
            "draft_len": drafts, "num_extra_kv_tokens": extra, "cached_tokens": cached,
            "include_drafts": drafted, "allocated_tokens": capacity,
            "holes": "skip" if skip else "strict"}
    if missing and not skip:
        return case, {"ok": False, "error": "uncovered", "missing": missing}
    return case, {"ok": True, "prompt_blocks": blocks, "capacity_tokens": capacity,
                  "alloc_blocks": alloc, "groups": answers,
                  "scratch_blocks": {side: alloc[side] - blocks for side in alloc}}


def broken_lines():
    """(text, the error that it must get, a word that its message must hold)"""
    good = {"id": 7, "tokens_per_block": 8, "prompt_len": 16,
            "groups": [{"name": "g", "context": {"ordinals": [1, 2]}}]}

    def line(group=None, **changes):
        request = dict(good, **changes)
        if group is not None:
            request["groups"] = [dict(good["groups"][0], **group)]
        return json.dumps({k: v for k, v in request.items() if v != "absent"}).encode()

    def legacy(ids, **more):
        return {"context": {"legacy": dict(more, ids=ids)}, "window": 8}

    wrong = [
        b"nope", b"{", b"[1, 2]", b"7", b"null", b'"text"', b"{} {}", b"\xff\xfe{}",
        b'{"id": "\xc3"}', b'{"id": "\\u0000"}', b'{"id": 1e999}', b"[" * 100000, b'{"a":' * 100000,
        line().replace(b"16", b"99999999999999999999"), line().replace(b"16", b"1" * 5000),
        line().replace(b'"id": 7', b'"prompt_len": 16'), line()[:-1], line() + b"\x00",
        b"{}", b'{"id": 7}']
    for line_text in (b"", b" ", b"\t \r"):
        yield line_text, "invalid", "empty line"
    for line_text in wrong:
        yield line_text, "invalid", ""
    for key in ("tokens_per_block", "prompt_len", "draft_len", "num_extra_kv_tokens",
                "total_input_len_cp", "cached_tokens"):
        for value in (-1, 1.0, 16.5, "16", True, [], {}, 2 ** 40 + 1, 2 ** 62):
            yield line(**{key: value}), "invalid", key
    for key, value in (("tokens_per_block", 0), ("prompt_len", 0), ("total_input_len_cp", 0),
                       ("prompt_len", "absent"), ("prompt_len", None), ("cached_tokens", 17),
                       ("holes", "maybe"), ("holes", 1), ("groups", []), ("groups", {}),
                       ("groups", [1]), ("groups", [[]]), ("groups", "absent"), ("cp", [2, 0]),
                       ("cp", {"context": [2, 2]}), ("cp", {"context": [0, 0]}),
                       ("cp", {"generation": [2, -1]}), ("cp", {"context": [2]}),
                       ("cp", {"context": [2 ** 62, 0]}), ("cp", {"context": [2.0, 0]}),
                       ("include_drafts", True), ("include_drafts", {"context": 1}),
                       ("allocated_tokens", 16), ("allocated_tokens", {"context": "16"}),
                       ("allocated_tokens", {"context": -1})):
        word = "cached" if key == "cached_tokens" else ""
        yield line(**{key: value}), "invalid", word
    yield line(prompt_len=2 ** 40, draft_len=1), "invalid", "2^40"
    yield line(allocated_tokens={"context": 17}), "capacity_mismatch", "17"
    yield line(allocated_tokens={"generation": 15}), "capacity_mismatch", "16"
    for group in ({"name": None}, {"name": ""}, {"name": 1}, {"window": 0}, {"window": 1.5},
                  {"window": 2 ** 40 + 1}, {"sinks": -1}, {"sinks": True}, {"context": None},
                  {"context": []}, {"context": {}}, {"context": {"ordinals": 1}},
                  {"context": {"ordinals": [1], "legacy": {"ids": [1]}}},
                  {"context": {"ordinals": [1.0]}}, {"context": {"ordinals": [None]}},
                  {"context": {"ordinals": [-2]}}, {"context": {"ordinals": [2 ** 31]}},
                  {"context": {"ordinals": [2 ** 32 + 5]}}, legacy([2 ** 32 + 5]),
                  # A message quotes a name up to the middle of a character.
                  {"name": "x" + "\u00fc" * 200, "window": 0},
                  {"context": {"ordinals": [3, 3]}}, {"context": {"ordinals": [0, 1, -9]}},
                  {"generation": {"ordinals": [4, 4]}}, {"generation": 5},
                  {"context": {"legacy": [1]}}, legacy("x"), legacy([-1]), legacy([2 ** 31]),
                  legacy([1], front_removed=-1), legacy([1], front_removed=0.5),
                  {"context": {"legacy": {"ids": [1, 1]}}}, dict(legacy([1]), sinks=1)):
        yield line(group), "invalid", ""
    yield line(legacy([1, 2, 3, 4], front_removed=0)), "count_mismatch", "4"
    yield line(legacy([1, 2, 3, 4])), "count_mismatch", "4"
    # The first error counts: the request's numbers, capacity, then group by group, coverage last.
    yield line({"window": 0}, allocated_tokens={"context": 1}), "capacity_mismatch", ""
    yield line({"window": 0}, cached_tokens=-1), "invalid", "cached_tokens"
    first = {"name": "a", "context": {"ordinals": [1]}, "generation": {"legacy": {"ids": [1] * 9}}}
    second = {"name": "b", "context": {"ordinals": [-5]}, "generation": {"ordinals": []}}
    yield line(groups=[first, second]), "count_mismatch", "a"
    yield line(groups=[second, first]), "invalid", "-5"
    hole = {"name": "a", "context": {"ordinals": [1]}, "generation": {"ordinals": []}}
    yield line(groups=[hole, second]), "invalid", "-5"
    yield line(groups=[hole]), "uncovered", ""
    # Far more blocks than could be listed are refused at once, not counted one by one.
    huge = {"context": {"ordinals": [1]}, "generation": {"ordinals": [1]}}
    yield line(huge, prompt_len=2 ** 40, tokens_per_block=1), "invalid", "lists"
    yield line(legacy([1]), prompt_len=2 ** 40, tokens_per_block=1), "invalid", "ordinals"


def large_cases():
    """Legal requests at the ends of the number ranges."""
    blocks = 2 ** 40 // 64
    one = {"name": "\u00fc\U0001f41f" * 200, "window": 128, "context": {"ordinals": [5, 5, 5]}}
    counts = {"prompt_blocks": blocks}
    for key, value in (("capacity_tokens", 2 ** 40), ("alloc_blocks", blocks),
                       ("scratch_blocks", 0)):
        counts[key] = {"context": value, "generation": value}
    request = {"id": {"any": ["json", None]}, "tokens_per_block": 64, "prompt_len": 2 ** 40}
    stale = [0, blocks - 2]
    yield dict(request, groups=[one]), dict(
        counts, ok=True, groups=[{"name": one["name"], "stale": stale, "pairs": []}])
    both = dict(one, generation={"ordinals": []})
    lost = [blocks - 2, blocks - 1]
    yield dict(request, groups=[both]), {
        "ok": False, "error": "uncovered",
        "missing": {one["name"]: {"source": lost, "destination": lost}}}


def main():
    program = os.environ["KVFERRY"]
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.getrandbits(32)
    rng = random.Random(seed)
    cases = list(worked_cases())
    cases += [(f"large {i}", *case) for i, case in enumerate(large_cases())]
    cases += [(f"random {i} of seed {seed}", *random_case(rng)) for i in range(3000)]
    failures = []
    answers = plan(program, [json.dumps(case).encode() for _, case, _ in cases])
    for (name, case, want), got in zip(cases, answers):
        problem = compare(got, want)
        if problem is None and got.get("id") != case["id"]:
            problem = f"id {case['id']} came back as {got.get('id')}"
        if problem is not None:
            failures.append(f"{name}: {problem}\n  {json.dumps(case)}")
    broken = list(broken_lines())
    for (line, error, word), got in zip(broken, plan(program, [line for line, _, _ in broken])):
        if got["ok"] or got["error"] != error or not got["message"] or word not in got["message"]:
            failures.append(f"{line[:300]!r}: expected {error} about '{word}', got {got}")
    for failure in failures[:20]:
        print(failure)
    print(f"seed {seed}: {len(cases)} cases and {len(broken)} broken lines, "
          f"{len(failures)} answered wrongly")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
