#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs `kvferry sim --scale` on a small trace: what it says must agree with what the options and the trace say.

    tests/sim/scale.py KVFERRY_SIM
"""
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
import models  # noqa: E402

TRACE = os.path.join(HERE, "..", "data", "trace-200.jsonl")
wrong = []


def expect(what, truth):
    if not truth:
        wrong.append(what)


def run(*args):
    return subprocess.run([sys.argv[1], "--scale", *map(str, args)], capture_output=True, text=True, timeout=300, check=False)


def measure(*args):
    done = run("--json", *args, TRACE)
    expect("%s goes well: %s" % (args, done.stderr), done.returncode == 0 and not done.stderr)
    line = json.loads(done.stdout)
    expect("%s: nothing fails" % (args,), line["failed"] == 0)
    for name in ("added_us", "transfer_us", "bytes_alone_us", "prefill_us"):
        expect("%s: %s rises" % (args, name), line[name]["p50"] <= line[name]["p90"] <= line[name]["p99"] <= line[name]["max"])
    expect("%s: a transfer is part of what it adds, or longer with early tickets" % (args,),
           "--early-ticket" in args or line["transfer_us"]["max"] <= line["added_us"]["max"])
    return line


def lengths(limit):
    with open(TRACE, encoding="utf-8") as file:
        return [json.loads(line)["input_length"] for line in file][:limit]


def check_bytes():
    for model, block in (("llama-3.1-8b", 16), ("llama-3.1-8b", 64), ("gpt-oss-20b", 32), ("gemma-3-270m", 128)):
        moved = [models.moved(model, block, n) for n in lengths(60)]
        line = measure("--limit", 60, "--tokens-per-block", block, "--model", model)
        expect("every request is served", line["ok"] == 60)
        expect("pages are the prompts' live blocks: %s" % line, line["pages"] == line["pieces"] == sum(n for n, _ in moved))
        expect("bytes are those of whole blocks", line["bytes"] == sum(n for _, n in moved))
        expect("the last copy and the records of pages are counted",
               line["page_record_bytes"] > 0 and 0 < line["idle_bytes"] <= line["peak_bytes"])


def check_times():
    _, one = models.moved("llama-3.1-8b", 64, lengths(1)[0])
    for gbit, latency in ((400, 10), (100, 10), (50, 500)):
        line = measure("--limit", 1, "--gbit", gbit, "--latency-us", latency)
        alone = one * 8 / gbit / 1000
        expect("the bytes alone take %d us: %s" % (alone, line), abs(line["bytes_alone_us"]["max"] - alone) <= 1)
        # The orchestrator's two steps, a connection and its hellos, the request, the copy's end and the commit.
        more = line["added_us"]["max"] - alone
        expect("%d us more, of %d each way: %s" % (more, latency, line), 5 * latency <= more <= 14 * latency + 5)
        expect("one transfer at once", line["most_in_flight"] == 1)
    prefill = lengths(1)[0] / 1000 * 1e6
    expect("prefill takes its time", abs(measure("--limit", 1, "--prefill-tokens-per-s", 1000)["prefill_us"]["max"] - prefill) < 2)
    late, early = (measure("--limit", 40, *more) for more in ((), ("--early-ticket",)))
    expect("what left before the end of prefill is not waited for",
           early["added_us"]["p50"] < late["added_us"]["p50"] / 2 and early["bytes"] == late["bytes"])
    slow = measure("--limit", 40, "--generation", 1, "--context", 4, "--gbit", 10, "--speed", 100)
    expect("one link for all makes them wait for each other", slow["added_us"]["max"] > 3 * slow["bytes_alone_us"]["max"])


def check_cluster():
    told = [measure("--limit", 100, "--context", 30, "--generation", 20, "--speed", 50) for _ in range(2)]
    for line in told:
        del line["core_cpu_s"]
    expect("the same options, the same run", told[0] == told[1])
    expect("many nodes talk", told[0]["peers"] > 100)
    # Pages for one prompt and a little: the others wait, and all are served.
    most = max(-(-n // 64) for n in lengths(10))
    line = measure("--limit", 10, "--pool-pages", most, "--context", 1, "--generation", 1)
    expect("who waits for pages gets them", line["ok"] == 10 and line["most_in_flight"] <= 3)


def check_input():
    for args, code, words in (
            ((), 2, "which trace"), ((TRACE, TRACE), 2, "one too many"), (("--gbit", 0, TRACE), 2, "--gbit"),
            (("--speed", "x", TRACE), 2, "--speed"), (("/nowhere", ), 1, "No such file"),
            (("--model", "no", TRACE), 1, "no"), (("--pool-pages", 10, TRACE), 1, "--pool-pages")):
        done = run(*args)
        expect("%s: %s" % (args, done.stderr), done.returncode == code and words in done.stderr and not done.stdout)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("nonsense\n")
        file.flush()
        done = run(file.name)
        expect("a trace without requests: %s" % done.stderr, done.returncode == 1 and "no request" in done.stderr)
    line = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [1]}\n'
    for lines, args, code, words in (
            ((line % (5000, 100, 1), line % (0, 200, 1), line % (6000, 50, 1)), (), 0, ""),
            ((line % (0, 100, 1), line % (10**12, 100, 1)), ("--speed", "0.001"), 1, "290 years"),
            ((line % (0, 100, 10**12), ), (), 1, "290 years"),
            ((line % (0, 100, 1), ), ("--pool-pages", 2**31 - 1, "--context", 1000), 1, "--pool-pages")):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(lines))
            file.flush()
            done = run(*args, "--json", file.name)
            expect("%s %s: %s" % (lines, args, done.stderr), done.returncode == code and words in done.stderr)
            if code == 0:
                told = json.loads(done.stdout)
                expect("a trace that jumps back: %s" % told, told["ok"] == len(lines) and told["virtual_s"] < 2)
    done = subprocess.run([sys.argv[1], "--json", "--scale", TRACE], capture_output=True, text=True, check=False)
    expect("--scale comes first", done.returncode == 2 and "comes first" in done.stderr)
    text = run("--limit", 5, TRACE).stdout
    expect("a text for people: %s" % text, "5 requests" in text and "added to the first token" in text and "for a page" in text)


check_bytes()
check_times()
check_cluster()
check_input()
for what in wrong:
    print("wrong: " + what)
sys.exit(1 if wrong else 0)
