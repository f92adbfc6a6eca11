#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the models of quarantine with Spin: the design holds, and each guard is needed.

    quarantine.py [--cc CC] [push | pull | session ...]   default: all
    quarantine.py --trace NAME        the run that refutes a broken variant, step by step

Every variant is searched whole. A right one must have no violation and no infinite run; a broken one, and one that looks
for something that must be possible, must have a violation of the expected kind. KVF_LONG=1 allows one fault more.
Exit code 77 when Spin is not installed.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
LONG = os.environ.get("KVF_LONG", "") not in ("", "0")
MEMORY_MIB = 4096 if LONG else 1024

# Which asserts a refutation may end in: one about pages or bytes, or one about what must have happened in the end.
PAGES = r"holds\[t\]&|flight\[\w+\]==0|source\[t\]|target\[t\]|good\[t\]=="
END = r"\(\(\(s\[[01]\]==|\(\(\(r\[[01]\]==|_result\["
SEEN = r"n_ok<|!=2\)|!=4\)|!=3\)|replaced=="
STREAM = r"n==[ab]_received|a_received=="

OUTCOME = {None: "holds", SEEN: "possible"}

RIGHT = {
    "push": ["CHECKED", "CHECKED PACED", "MAPPED", "RDMA", "BARE"],
    "pull": ["MAPPED", "MAPPED LENT", "RDMA", "BARE"],
    "session": ["", "LATE_HELLO"],
}
BROKEN = {
    "push": [
        ("MAPPED BUG_FREE_AT_ABORT", PAGES),
        ("RDMA BUG_FREE_AT_DEADLINE", PAGES),
        ("MAPPED BUG_FREE_AT_LEASE", PAGES),
        ("CHECKED BUG_FREE_AT_LEASE", PAGES),
        ("BARE BUG_FREE_AT_QUARANTINE", PAGES),
        ("MAPPED BUG_CRASH_FENCES", PAGES),
        ("CHECKED BUG_NO_GENERATION", PAGES),
        ("CHECKED PACED BUG_NO_GENERATION", PAGES),
        ("BARE BUG_OLD_DRAINED", PAGES),
        ("RDMA BUG_OLD_INPUT", PAGES),
        ("MAPPED BUG_DRAINED_EARLY", PAGES),
        ("BARE BUG_FAILED_IS_DRAINED", PAGES),
        ("MAPPED BUG_NO_SECOND_ABORT", END),
        ("MAPPED BUG_ABORT_UNANSWERED", END),
        ("CHECKED SEEK=1", SEEN),
        ("CHECKED PACED SEEK=1", SEEN),
        ("MAPPED SEEK=2", SEEN),
        ("BARE SEEK=3", SEEN),
        ("CHECKED SEEK=4", SEEN),
    ],
    "pull": [
        ("MAPPED BUG_FREE_AT_ABORT", PAGES),
        ("RDMA BUG_FREE_AT_LEASE", PAGES),
        ("BARE BUG_FREE_AT_QUARANTINE", PAGES),
        ("MAPPED BUG_CRASH_FENCES", PAGES),
        ("BARE BUG_OLD_DRAINED", PAGES),
        ("MAPPED BUG_DRAINED_EARLY", PAGES),
        ("BARE BUG_FAILED_IS_DRAINED", PAGES),
        ("MAPPED BUG_NO_SECOND_ABORT", END),
        ("MAPPED BUG_ABORT_UNANSWERED", END),
        ("MAPPED LENT BUG_DRAINED_EARLY", PAGES),
        ("MAPPED LENT BUG_UNMAP_EARLY", PAGES),
        ("MAPPED LENT BUG_ONE_OF_TWO", PAGES),
        ("MAPPED SEEK=1", SEEN),
        ("MAPPED LENT SEEK=1", SEEN),
        ("MAPPED LENT SEEK=2", SEEN),
        ("RDMA SEEK=2", SEEN),
        ("BARE SEEK=3", SEEN),
    ],
    "session": [
        ("BUG_OLD_INPUT", STREAM),
        ("BUG_RESEND_NOTHING", STREAM),
        ("BUG_RESEND_ALL", STREAM),
        ("SEEK=1", SEEN),
        ("LATE_HELLO SEEK=2", SEEN),
    ],
}


def run(folder, *command):
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def defines(words):
    return [f"-D{word}" if "=" in word else f"-D{word}=1" for word in words]


def search(folder, cc, model, words, *, cycles=False):
    """Let Spin search one variant whole; returns what pan said."""
    for path in HERE.glob("quarantine_*.pml"):
        shutil.copy(path, folder)
    made = run(folder, "spin", "-a", *defines(words), f"quarantine_{model}.pml")
    if made.returncode != 0 or "rror" in made.stdout + made.stderr:
        sys.exit(f"spin: {made.stdout}{made.stderr}")
    # Without optimization: compiling costs more than searching.
    made = run(folder, *cc, "-O0", "-w", "-DNP" if cycles else "-DSAFETY", f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c")
    if made.returncode != 0:
        sys.exit(f"cc: {made.stderr}")
    return run(folder, "./pan", *(["-l"] if cycles else []), "-m100000", "-w20").stdout


def number(said, pattern):
    found = re.search(pattern, said)
    return int(found.group(1)) if found else -1


def verdict(said, expected):
    """What is wrong with the outcome; None if it is the expected one. Without a pattern, no violation is."""
    errors = number(said, r"errors: (\d+)")
    if expected is None:
        if errors != 0 or "Search not completed" in said or "max search depth too small" in said:
            return "violated, or not searched whole:\n" + said
        return None
    found = re.search(r"assertion violated(.*)\(at depth", said)
    if errors < 1 or found is None:
        return "no violation found"
    return None if re.search(expected, found.group(1)) else "another violation than the expected one:" + found.group(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="which models to check")
    parser.add_argument("--cc", nargs="+", default=["cc"], help="compiler of the searches")
    parser.add_argument("--trace", metavar="NAME", help="show one broken variant, named as in the output")
    args = parser.parse_args()
    if shutil.which("spin") is None:
        print("spin is not installed")
        return 77
    failed = 0
    for model in args.models or (list(RIGHT) if args.trace is None else [args.trace.split()[0]]):
        faults = [] if not LONG else ["FAULTS=3"]
        cases = [(f"{words} {way}".strip(), words.split() + more, None, way == "endless")
                 for words in RIGHT[model]
                 for way, more in (("", faults), ("endless", [] if LONG else ["FAULTS=1"]))]
        cases += [(words, words.split(), expected, False) for words, expected in BROKEN[model]]
        for name, words, expected, cycles in cases:
            name = f"{model} {name}".strip()
            if args.trace not in (None, name):
                continue
            with tempfile.TemporaryDirectory() as folder:
                start = time.monotonic()
                said = search(folder, args.cc, model, words, cycles=cycles)
                wrong = verdict(said, expected)
                if args.trace is not None:
                    print(run(folder, "spin", *defines(words), "-t", "-p", "-s", "-r", f"quarantine_{model}.pml").stdout)
            failed += wrong is not None
            states, depth = (number(said, rf"{before}(\d+){after}")
                             for before, after in (("", " states, stored"), ("depth reached ", "")))
            print(f"{'FAIL' if wrong else 'ok':5} {name:38} {OUTCOME.get(expected, 'refuted'):8}{states:9} states"
                  f"{depth:5} deep {time.monotonic() - start:6.1f} s{': ' + wrong if wrong else ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
