#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the frame of the program: help, version, exit codes, and who writes where.

    KVFERRY=build/tools/kvferry tests/e2e/check_program.py
"""
import os
import pty
import re
import subprocess
import sys


def run(program, *args, text=b"", stdout=subprocess.PIPE):
    return subprocess.run([program, *args], input=text, stdout=stdout, stderr=subprocess.PIPE,
                          timeout=60, check=False)


def on_terminal(program, *args, text):
    """What the program writes when stdout is a terminal."""
    ours, theirs = pty.openpty()
    done = run(program, *args, text=text, stdout=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return done, seen.decode().replace("\r\n", "\n")


def main():
    program = os.environ["KVFERRY"]
    failures = []

    def expect(what, truth):
        if not truth:
            failures.append(what)

    top = run(program, "--help")
    expect("--help answers on stdout", top.returncode == 0 and not top.stderr)
    commands = [line.split()[0] for line in top.stdout.decode().splitlines()
                if line.startswith("  ")]
    expect("--help lists plan, bench and sim", {"plan", "bench", "sim"} <= set(commands))
    for args in (["--version"], *([command, "--version"] for command in commands)):
        done = run(program, *args)
        expect(f"{args} names the version",
               done.returncode == 0 and re.match(rb"kvferry \d+\.\d+\.\d+ ", done.stdout))
    for command in commands:
        done = run(program, command, "--help")
        expect(f"{command} --help answers on stdout", done.returncode == 0 and not done.stderr and
               done.stdout.decode().startswith(f"Usage: kvferry {command} "))
        if command in ("prefill", "decode"):
            expect(f"{command} --help says where all keys are", b"`kvferry config --defaults`" in done.stdout)
        done = run(program, command, "--no-such-option")
        expect(f"{command} refuses an unknown option",
               done.returncode == 2 and not done.stdout and b"no-such-option" in done.stderr)

    for command in ("prefill", "decode", "config", "plan", "replay", "bench", "sim"):
        done = run(program, command, "stray")
        expect(f"{command} names an argument too many", done.returncode == 2 and not done.stdout and
               b"stray" in done.stderr.splitlines()[0])

    done = run(program)
    expect("no command is wrong usage", done.returncode == 2 and not done.stdout and done.stderr)
    for typed, meant in (("paln", "plan"), ("benhc", "bench"), ("smi", "sim"), ("p" * 999, "")):
        done = run(program, typed)
        lines = done.stderr.decode().splitlines()
        expect(f"{typed[:20]}: suggests {meant} in one line", done.returncode == 2 and
               not done.stdout and len(lines) == 1 and f"did you mean {meant}" in lines[0])
    done = run(program, "sim", "--seed", "1", "--json")
    expect("sim runs a seed", done.returncode == 0 and b'"violations":0' in done.stdout)

    request = (b'{"id": "r", "tokens_per_block": 8, "prompt_len": 16, "groups": [{"name": "g\\u001b",'
               b' "context": {"ordinals": [11, 12]}, "generation": {"ordinals": [21, 22]}}]}\n')
    done, seen = on_terminal(program, "plan", text=request + b"nope")
    rows = [line.split() for line in seen.splitlines()]
    expect("a terminal gets a table", done.returncode == 0 and ["0", "11", "21"] in rows and
           ["1", "12", "22"] in rows and "refused, invalid" in seen and '{"' not in seen)
    expect("no control character of the input reaches a terminal", "\x1b" not in seen)
    done, seen = on_terminal(program, "plan", "--json", text=request)
    expect("--json on a terminal is JSON", done.returncode == 0 and seen.startswith('{"'))
    expect("a pipe gets JSON", run(program, "plan", text=request).stdout.startswith(b'{"'))
    expect("no input, no answer", run(program, "plan").stdout == b"")
    with open("/dev/full", "wb") as full:
        done = run(program, "plan", text=request, stdout=full)
    expect("a full disk is a failure with a reason",
           done.returncode == 1 and b"cannot write" in done.stderr)

    for what in failures:
        print("not so:", what)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
