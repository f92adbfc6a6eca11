#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks `kvferry bench` as docs/contracts.md describes it, with transfers of a few blocks; not how fast it is.

    KVFERRY=build/tools/kvferry tests/e2e/bench.py
"""
import json
import os
import signal
import subprocess
import sys
import time

SMALL = ("--block-bytes", "4KiB", "--blocks", "5", "--pool-bytes", "64KiB", "--reps", "3", "--warmup", "1")
FIELDS = {"mover": str, "transport": str, "block_bytes": int, "blocks": int, "bytes": int, "digest": str, "reps": int,
          "us": dict, "bytes_per_s": float, "pieces": int, "verified": bool, "mismatched_bytes": int, "measure": str,
          "memory": str, "direction": str, "threads": int, "pool_bytes": int, "busy_poll_us": int, "driver": str,
          "seed": int}
failures = []


def expect(what, truth):
    if not truth:
        failures.append(what)


def bench(*args, stdout=subprocess.PIPE):
    return subprocess.run([os.environ["KVFERRY"], "bench", *args], stdout=stdout, stderr=subprocess.PIPE,
                          timeout=120, check=False, text=True)


def measure(*args):
    """The line of JSON of a run that must go well."""
    done = bench(*SMALL, *args, "--json")
    expect(f"{args} is measured: {done.stderr}", done.returncode == 0 and not done.stderr)
    lines = done.stdout.splitlines()
    expect(f"{args} prints one line", len(lines) == 1)
    line = json.loads(lines[0]) if lines else {}
    for name, kind in FIELDS.items():
        expect(f"{args}: {name} is {line.get(name)!r}", isinstance(line.get(name), kind) or
               (name == "bytes_per_s" and "exposed" in args and line[name] is None))
    expect(f"{args}: times rise", 0 < line["us"]["min"] <= line["us"]["p50"] <= line["us"]["p99"] < 60e6)
    expect(f"{args}: verified", line["verified"] is True and line["mismatched_bytes"] == 0)
    expect(f"{args}: references post nothing", ("posting_ns" in line) == ("--reference" not in args))
    expect(f"{args}: numbers come back", (line["block_bytes"], line["blocks"], line["reps"], line["pool_bytes"]) ==
           (4096, 5, 3, 65536))
    return line


def check_transfers():
    line = measure()
    expect(f"bytes are those of all blocks: {line}", line["bytes"] == 5 * 4096 and line["layers"] == 16)
    expect("a block is one piece", line["pieces"] == 5)
    expect("the throughput is that of the median",
           abs(line["bytes_per_s"] * line["us"]["p50"] / 1e6 / line["bytes"] - 1) < 0.01)
    expect("defaults", (line["memory"], line["direction"], line["digest"], line["threads"], line["measure"]) ==
           ("shm", "push", "on", 0, "request"))
    line = measure("--mover", "ucx", "--tls", "tcp,self", "--direction", "pull", "--seed", "77")
    expect(f"options come back: {line}", (line["mover"], line["transport"], line["memory"], line["direction"],
                                          line["seed"]) == ("ucx", "tcp,self", "host", "pull", 77))
    measure("--memory", "host")
    line = measure("--mover", "mapped", "--busy-poll", "500")
    expect(f"looking on: {line}", (line["mover"], line["busy_poll_us"]) == ("mapped", 500))
    for what in ("request", "put", "exposed"):
        line = measure("--driver", "caller", "--measure", what)
        expect(f"driven by the caller: {line}", (line["driver"], line["measure"]) == ("caller", what))
    line = measure("--digest", "off", "--threads", "2")
    expect(f"without digests, with threads: {line}", line["digest"] == "off" and line["threads"] == 2)
    line = measure("--mover", "mapped")
    expect(f"mapped: {line}", (line["mover"], line["transport"]) == ("mapped", "shm"))
    expect("put", measure("--measure", "put")["measure"] == "put")
    line = measure("--measure", "exposed", "--layers", "4")
    expect(f"layers leave one by one: {line}", line["layers"] == 4 and line["layer_us"] > 0 and line["pieces"] == 20)


def check_parts():
    """A request of more pages than one message names: every page gets its bytes, whichever part named it."""
    for blocks in (4096, 4097, 8193):
        done = bench("--block-bytes", "64", "--blocks", str(blocks), "--pool-bytes", "2MiB", "--reps", "2", "--warmup", "1", "--json")
        line = json.loads(done.stdout or "{}")
        expect(f"{blocks} blocks: {line} {done.stderr}", (line.get("verified"), line.get("pieces"), line.get("bytes")) ==
               (True, blocks, 64 * blocks))
        expect(f"{blocks} blocks are posted in {line.get('posting_ns')} ns each", 1 < line.get("posting_ns", 0) < 1e6)


def check_references():
    for name, mover in (("memcpy", "memcpy"), ("nt", "nt-copy"), ("socket", "socket")):
        for threads in ("1", "3"):
            line = measure("--reference", name, "--threads", threads)
            expect(f"{name}: {line}", (line["mover"], line["bytes"], line["pieces"], line["digest"]) ==
                   (mover, 5 * 4096, 5, "off"))
    expect("a wake-up has no bytes", measure("--reference", "wakeup")["bytes"] == 0)


def check_errors():
    for args, code, word in (
            (("--mover", "magic"), 2, "auto, mapped, tcp, ucx, cuda, nccl or rdma"), (("--block-bytes", "100"), 2, "multiple of 64"),
            (("--block-bytes", "0"), 2, "multiple of 64"), (("--block-bytes", "1kb"), 2, "KiB"),
            (("--blocks", "9"), 2, "need 69632"), (("--blocks", "0"), 2, "--blocks"), (("--reps", "x"), 2, "--reps"),
            (("--layers", "3"), 2, "--layers"), (("--digest", "maybe"), 2, "off or on"),
            (("--measure", "none"), 2, "request, put or exposed"), (("--driver", "me"), 2, "thread or caller"),
            (("--reference", "x"), 2, "wakeup"), (("--measure", "put", "--reference", "nt"), 2, "--reference"), (("stray",), 2, "stray"),
            (("--mover", "mapped", "--memory", "host"), 1, "unsupported"),
            (("--pool-bytes", "1048576GiB", "--block-bytes", "1GiB", "--memory", "shm"), 1, "memory")):
        done = bench(*SMALL, *args)
        lines = [line for line in done.stderr.splitlines() if "Try `" not in line]
        expect(f"{args}: {done.returncode}, {done.stderr!r}",
               done.returncode == code and not done.stdout and word in lines[0] and len(lines) == 1)
    with open("/dev/full", "w", encoding="utf-8") as full:
        for args in ((), ("--json",)):
            done = bench(*SMALL, "--reference", "memcpy", *args, stdout=full)
            expect(f"a full disk is a failure with a reason: {args}", done.returncode == 1 and "cannot write" in done.stderr)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def ended(pid):
    """Whether a process is gone, or waits for somebody to ask how it ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_ends():
    """When one of the two processes dies, the other one does not stay."""
    for victim in ("sender", "receiver"):
        with subprocess.Popen([os.environ["KVFERRY"], "bench", *SMALL, "--reps", "1000000"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as bench_process:
            end = time.monotonic() + 30
            while not (kids := children(bench_process.pid)) and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(kids[0] if victim == "sender" else bench_process.pid, signal.SIGKILL)
            _, said = bench_process.communicate(timeout=90)
            if victim == "sender":
                expect(f"a sender that died is told: {said}", bench_process.returncode == 1 and "kvferry bench: " in said)
            while not ended(kids[0]) and time.monotonic() < end + 30:
                time.sleep(0.01)
            expect(f"nothing is left when the {victim} died", ended(kids[0]))


def main():
    shown = bench(*SMALL)
    expect(f"people get a table: {shown.stdout}", shown.returncode == 0 and
           shown.stdout.splitlines()[1].split() == ["measure", "p50", "us", "p99", "us", "min", "us", "GB/s", "reps"] and
           "every byte verified" in shown.stdout)
    check_transfers()
    check_parts()
    check_references()
    check_errors()
    check_ends()
    for what in failures:
        print("not so:", what)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
