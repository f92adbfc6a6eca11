#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the page and the picture of tools/bench/compare with made-up figures; it measures nothing.

    tests/e2e/bench_compare.py
"""
import copy
import json
import pathlib
import re
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))
import plot  # noqa: E402
import report  # noqa: E402

SIZES = [4096, 16384, 65536]
SMALL = (16384, 64)
TRANSFER = 64 << 20
# GB/s of each candidate at every size: all targets are met by these, none by much.
SPEEDS = {
    "mapped-on": 5.0, "mapped-off": 9.0, "ucx-shm-on": 1.0, "ucx-shm-off": 1.5, "tcp-on": 2.7, "tcp-off": 3.0, "nixl-default": 3.0,
    "nixl-shm": 3.5, "nixl-tcp": 2.0, "mooncake-tcp": 1.0, "memcpy": 8.0, "nt": 10.0, "socket": 3.2,
}
SMALL_US = {"mapped-on": 120.0, "nixl-default": 300.0, "nixl-shm": 115.0}
# The others' times, in us: what is exposed is 1.2 times a layer and a round trip. A piece is posted in 50 ns.
EXTRAS = {"wakeup": 5.0, "layers": 1.2 * (16000 / 16 + 100), "layers_all": 16000.0, "round_trip": 100.0,
          "pieces": 50.0, "pieces_memcpy": 2000.0}
failures = []


def expect(what, truth):
    if not truth:
        failures.append(what)


def run(turn, what, key, block_bytes, blocks, us, **more):
    return {"round": turn, "what": what, "candidate": key, "block_bytes": block_bytes, "blocks": blocks, "failed": None,
            "line": {"us": {"p50": us}, "verified": True, "foreign_cores": 0.0, **more}}


def made_up(speeds=SPEEDS, small=SMALL_US, extras=EXTRAS, absent=()):
    """Two rounds, the second of which was half as fast for everybody: no ratio changes."""
    runs = []
    for turn in (0, 1):
        for key in speeds.keys() - set(absent):
            runs += [run(turn, "table", key, size, TRANSFER // size, TRANSFER / speeds[key] / 1e3 * (1 + turn)) for size in SIZES]
            runs.append(run(turn, "table", key, *SMALL, small.get(key, 500.0)))
        runs += [run(turn, what, what, 64, 1, us) for what, us in extras.items() if what != "pieces"]
        runs.append(run(turn, "pieces", "pieces", 64, 1, 2000 + 65536 * 0.1, posting_ns=extras["pieces"]))
    return {"date": "2026-01-02", "command": "tools/bench/compare", "rounds": 2, "reps": 5, "threads": 1, "sizes": SIZES, "small": SMALL,
            "seconds": 1, "foreign_cores": 0.0, "ucx_perftest": None, "runs": runs, "versions": {"kvferry": "kvferry 0.1.0"},
            "machine": {"cpu": "Made-up <CPU> & Co", "cores": 2, "memory_bytes": 1 << 34, "kernel": "6", "huge_pages": "x", "load_before": 0.0},
            "candidates": [{"key": key, "label": key, "panel": "tcp" if "tcp" in key or key == "socket" else "shm",
                            "absent": "not here" if key in absent else None} for key in speeds]}


def verdicts(data):
    return [target["met"] for target in report.targets(report.Figures(data))]


def check_verdicts():
    good = verdicts(made_up())
    expect(f"thirteen targets, all met: {good}", good == [True] * 13)
    # (what changes, which targets are missed then)
    for speeds, small, extras, missed in (
            ({"mapped-off": 8.4}, {}, {}, {0}), ({"mapped-on": 4.1}, {}, {}, {1, 2}), ({"nixl-shm": 3.6}, {}, {}, {2}),
            ({"nixl-tcp": 4.9, "socket": 3.2}, {}, {}, {2, 3, 7}), ({"mooncake-tcp": 2.3}, {}, {}, {7}), ({"nixl-default": 6.1}, {}, {}, {2, 3, 4}),
            ({"socket": 3.35}, {}, {}, {5}), ({"socket": 3.4}, {}, {}, {5, 6}), ({"tcp-off": 3.2}, {}, {}, {11}),
            ({}, {"mapped-on": 126.0}, {}, {8}), ({}, {"nixl-default": 239.0}, {}, {9}),
            ({}, {}, {"wakeup": 2.0}, {8}), ({}, {}, {"layers": 1431.0}, {10}), ({}, {}, {"pieces": 61.0}, {12})):
        found = verdicts(made_up({**SPEEDS, **speeds}, {**SMALL_US, **small}, {**EXTRAS, **extras}))
        expect(f"with {speeds} {small} {extras} targets {sorted(missed)} are missed: {found}",
               {i for i, met in enumerate(found) if met is not True} == missed and all(found[i] is False for i in missed))


def check_figures():
    """What is short of a target does not look as if it were not."""
    for value, limit, text in ((0.8712, 0.85, "0.87"), (0.8499, 0.85, "0.8499"), (0.8462, 0.85, "0.846"), (0.15, 0.15, "0.15"),
                               (0.1504, 0.15, "0.1504"), (0.9978, 1, "0.998"), (1.2, 1.2, "1.20")):
        found = report.figure(value, limit)
        expect(f"{value} of {limit} is {text}: {found}", found == text)


def check_ways():
    """What is reached by one way for every size counts, and is named; not the best of two for each size."""
    speeds = {**SPEEDS, "tcp-on": 2.3, "tcp-on-poll": 2.7}
    found = report.targets(report.Figures(made_up(speeds)))[7]
    expect(f"busy polling counts, and is named: {found}", found["met"] is True and found["note"] == "tcp-on-poll")
    data = made_up(speeds)
    for entry in data["runs"]:
        if entry["candidate"].startswith("tcp-on") and entry["block_bytes"] == 4096:
            entry["line"]["us"]["p50"] *= 1.3 if entry["candidate"].endswith("poll") else 0.8
    found = report.targets(report.Figures(data))[7]
    expect(f"each is short at another size: {found}", found["met"] is False)
    for entry in data["runs"]:
        if entry["candidate"] == "tcp-on-poll" and entry["block_bytes"] == 4096:
            entry["line"] = None
    found = report.targets(report.Figures(data))[7]
    expect(f"what failed at a size is not better for it: {found}", found["met"] is False and found["note"] == "tcp-on")
    small = {**SMALL_US, "mapped-on": 400.0}
    found = [report.targets(report.Figures(made_up(small=small, extras={**EXTRAS, "caller": us})))[8]["met"] for us in (124.0, 126.0)]
    expect(f"so does a caller that drives: {found}", found == [True, False])


def check_left_out():
    absent = ("mapped-on", "mapped-off", "ucx-shm-off", "tcp-off", "nixl-default", "nixl-shm")
    data = made_up(absent=absent)
    found = verdicts(data)
    expect(f"what is not there is no verdict: {found}", [i for i, met in enumerate(found) if met is None] == [0, 4, 5, 8, 9, 11])
    expect(f"in the place of the mapped mover is ucx: {found}", found[1] is False)
    page = report.markdown(data)
    for key in absent:
        expect(f"{key} is left out visibly", f"- {key}: not here" in page)
    wrong = copy.deepcopy(made_up())
    for entry in wrong["runs"]:
        if entry["candidate"] == "nixl-shm":
            entry["line"]["verified"] = False
    page = report.markdown(wrong)
    expect("wrong bytes are told", "nixl-shm, 16384 blocks of 4 KiB: wrong bytes" in page)
    expect("and are no figures", "| nixl-shm | failed | failed | failed | failed |" in page)
    data["runs"] = [entry for entry in made_up()["runs"] if entry["round"] == 0 or entry["candidate"] != "nt"]
    ratio = report.Figures(data).speed_ratio("mapped-off", ["nt"], (4096, 16384))
    expect(f"a ratio is made of rounds that have both: {ratio}", abs(ratio - 0.9) < 1e-9)


def check_raw():
    data = made_up()
    text = report.raw(data)
    expect("the raw data come back", json.loads(text) == json.loads(json.dumps(data)))
    expect("a line for each run", sum(line.startswith('  {"round"') for line in text.splitlines()) == len(data["runs"]))


def check_page():
    page = report.markdown(made_up({**SPEEDS, "mapped-off": 8.0}))
    head = page[:page.index("## Targets")]
    expect(f"the top names what falls short: {head}", "**Falls short:**" in head and "digests off, of the non-temporal copy: 0.80 (16 KiB)" in head)
    # The medians of two rounds, of which one took twice as long.
    expect("medians and ratios", "| nixl-tcp | 1.33 (0.62) | 1.33 (0.62) | 1.33 (0.62) | 0.500 |" in page)
    for word in ("Made-up <CPU> & Co, 2 cores, 16.0 GiB; Linux 6", "2026-01-02", "    tools/bench/compare\n", "kvferry 0.1.0"):
        expect(f"the page says {word}", word in page)
    expect("a machine that does other things is told at the top", "Disturbed" not in page and
           report.markdown(dict(made_up(), foreign_cores=0.9)).index("used 0.9 of 2 cores") < len(head))


def check_picture():
    for data in (made_up(), made_up(absent=tuple(SPEEDS)[:-1]), dict(made_up(), runs=[])):
        picture = plot.svg(data)
        tree = xml.etree.ElementTree.fromstring(picture)
        lines = [e for e in tree.iter("{http://www.w3.org/2000/svg}path") if "stroke-dasharray" in e.attrib]
        present = [c for c in data["candidates"] if not c["absent"]] if data["runs"] else []
        expect(f"a line each: {len(lines)} of {len(present)}", len(lines) == len(present))
        expect("light and dark", "prefers-color-scheme: dark" in picture)
    picture = plot.svg(made_up())
    tree = xml.etree.ElementTree.fromstring(picture)
    heights = [float(e.attrib["cy"]) for e in tree.iter("{http://www.w3.org/2000/svg}circle")]
    expect(f"all points are inside: {heights}", heights and plot.TOP <= min(heights) and max(heights) <= plot.HEIGHT - plot.BOTTOM)
    labels = [(float(x), float(y)) for x, y in re.findall(r'<text x="(\d+)" y="([\d.]+)" style="fill: var\(--(?!soft)', picture)]
    for left in {x for x, _ in labels}:
        ys = sorted(y for x, y in labels if x == left)
        expect(f"no label on another: {ys}", all(b - a >= 14.9 for a, b in zip(ys, ys[1:])))


def main():
    check_verdicts()
    check_figures()
    check_ways()
    check_left_out()
    check_page()
    check_raw()
    check_picture()
    for what in failures:
        print("not so:", what)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
