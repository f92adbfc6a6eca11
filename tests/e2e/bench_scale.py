#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the page, the picture and the trace of tools/bench/scale with made-up figures; it simulates nothing.

    tests/e2e/bench_scale.py
"""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools" / "bench"))
loader = importlib.machinery.SourceFileLoader("scale", str(ROOT / "tools" / "bench" / "scale"))
scale = importlib.util.module_from_spec(importlib.util.spec_from_loader("scale", loader))
loader.exec_module(scale)
failures = []


def expect(what, truth):
    if not truth:
        failures.append(what)


def line(series, step, turn):
    """Of the step-th run of a series in a round: 10 us a message, 20 us a page, 30 KB a transfer; in the second round twice that."""
    grown = 4 ** step
    messages = 1000 * grown
    ok = 1 if scale.SERIES[series][0] == "pages of a request" else grown
    return {"ok": ok, "generation": grown, "pool_pages": 1024 * grown, "pages": messages // 2, "messages": messages,
            "most_in_flight": grown, "core_cpu_s": messages * 10e-6 * (1 + turn % 2), "idle_bytes": 7000,
            "peak_bytes": 7000 + 30000 * grown * (1 + turn % 2)}


def made_up():
    points = []
    for series, (_, _, runs, _) in enumerate(scale.SERIES):
        points += [{"series": series, "arguments": arguments, "lines": [line(series, step, turn) for turn in (0, 1, 2)]}
                   for step, arguments in enumerate(runs)]
    return points


def check_figures():
    points = made_up()
    want = [10, 10, 20, 20, 10, 30]  # of three rounds, of which the second one was twice as slow
    expect("every series is checked", len(want) == len(scale.SERIES))
    for series, cost in enumerate(want):
        found = scale.values(points, series)
        expect(f"medians of {scale.SERIES[series][0]}: {found}", all(abs(v - cost) < 1e-6 for _, v in found))
        expect(f"it grows: {found}", len(found) == len(scale.SERIES[series][2]) and found == sorted(found))
    page = scale.markdown(points, 3, "a <CPU>", "2026-01-02")
    expect("the page has each series", all(f"| {title} | " in page for title, _, _, _ in scale.SERIES))
    expect(f"and its figures: {page}", "| requests | 1 | 4 | 16 | 64 | 256 |\n" in page and
           "| us of processor time a message | 10 | 10 | 10 | 10 | 10 |" in page and "| pages of a pool | 1 Ki | 4 Ki | 16 Ki | 64 Ki |" in page)


def check_picture():
    picture = scale.svg(made_up(), "a <CPU> & Co")
    tree = xml.etree.ElementTree.fromstring(picture)
    circles = [e for e in tree.iter("{http://www.w3.org/2000/svg}circle")]
    expect(f"a point for each run: {len(circles)}", len(circles) == sum(len(runs) for _, _, runs, _ in scale.SERIES))
    _, _, width, height = (int(word) for word in tree.attrib["viewBox"].split())
    expect("all of them are inside", all(0 < float(e.attrib["cx"]) < width and 0 < float(e.attrib["cy"]) < height for e in circles))
    expect("what is flat is drawn flat", len({e.attrib["cy"] for e in circles[:5]}) == 1)


def check_trace():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace")
        scale.long_trace(path, 450)
        with open(path, encoding="utf-8") as file:
            entries = [json.loads(text) for text in file]
    times = [entry["timestamp"] for entry in entries]
    expect("as many requests as asked for", len(entries) == 450)
    expect("in the order of their times", times == sorted(times))
    expect("a repetition begins after the last one", times[200] > times[199] and times[400] - times[200] == times[200] - times[0])
    expect("and is the same", all(entries[i]["hash_ids"] == entries[i + 200]["hash_ids"] for i in range(250)))


def main():
    check_figures()
    check_picture()
    check_trace()
    for what in failures:
        print("not so:", what)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
