#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the simulator: no seed may find a violation, and a seed means one run only.

    tests/sim/seeds.py KVFERRY_SIM FIRST COUNT       one share of the seeds
    tests/sim/seeds.py KVFERRY_SIM --frame           options, replay, reports

With KVF_LONG=1 a share is fifty times as large. KVF_SEED moves all shares.
"""
import json
import os
import subprocess
import sys

# Scenarios without faults.
# Of these seeds, those in which a digest takes longer than quarantine, of a send that ended.
LATE_DIGESTS = ("liar", "network", "pause")
CALM = ("calm", "ends", "proofs", "lent")


def run(program, *args):
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=False)


def share(program, first, count):
    """One share, all scenarios mixed."""
    count *= 1 if os.environ.get("KVF_LONG", "") in ("", "0") else 50
    first += int(os.environ.get("KVF_SEED", "0"))
    done = run(program, "--seed", first, "--seeds", count, "--json")
    print(done.stdout, done.stderr)
    told = json.loads(done.stdout)
    return ([] if done.returncode == 0 and told["violations"] == 0 and told["seeds"] == count
            else ["a violation, above"])


def frame(program):
    """What the options say is what happens."""
    wrong = []

    def expect(what, truth):
        if not truth:
            wrong.append(what)

    listed = run(program, "--scenario", "list").stdout.splitlines()
    names = [line.split()[0] for line in listed]
    expect("scenarios are listed", {"calm", "crash", "onesided", "storm"} <= set(names))
    seen = set()
    for name in names:
        told = [json.loads(run(program, "--seed", 7, "--seeds", 40, "--scenario", name,
                               "--json").stdout) for _ in range(2)]
        for one in told:
            del one["cpu_s"]
        expect(f"{name}: the same seeds, the same run", told[0] == told[1])
        expect(f"{name}: requests succeed", told[0]["results"]["ok"] > 40)
        expect(f"{name}: it has faults, but for those that say not",
               (sum(told[0]["faults"].values()) > 0) == (name not in CALM))
        expect(f"{name}: pages are poisoned only where nobody checks, or copies or digests are late",
               name == "mapped" or (told[0]["poisoned"] > 0) == (name in ("onesided", *LATE_DIGESTS)))
        expect(f"{name}: receivers copy where they may",
               (told[0]["copied_bytes"] > 0) == (name not in ("calm", "liar", "proofs")))
        expect(f"{name}: or fetch", name not in ("lent", "mapped") or told[0]["fetched_bytes"] > 0)
        seen.add(told[0]["hash"])
    expect("every scenario is another run", len(seen) == len(names))
    one, other = (run(program, "--seed", seed, "--trace").stdout for seed in (11, 12))
    expect("a trace tells of both sides", "prefill-0: send" in one and "decode-0: receive" in one)
    expect("another seed, another trace", one != other)
    expect("a trace can be had again", one.rsplit("hash", 1)[0] ==
           run(program, "--seed", 11, "--trace").stdout.rsplit("hash", 1)[0])
    less = json.loads(run(program, "--seed", 11, "--scenario", "calm", "--steps", 9, "--keep", "0",
                          "--json").stdout)
    more = json.loads(run(program, "--seed", 11, "--scenario", "calm", "--steps", 9,
                          "--json").stdout)
    expect("steps can be left out", less["sends"] < more["sends"])
    for args in (("--seeds", "0"), ("--scenario", "nope"), ("--keep", "1", "--seeds", "2"),
                 ("--steps", "999"), ("stray",)):
        expect(f"{args} is wrong usage", run(program, *args).returncode == 2)
    expect("--keep of a step that there is not", run(program, "--keep", "99").returncode == 1)
    return wrong


def main():
    program, *rest = sys.argv[1:]
    wrong = frame(program) if rest == ["--frame"] else share(program, int(rest[0]), int(rest[1]))
    for what in wrong:
        print("not so:", what)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
