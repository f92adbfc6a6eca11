# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison: what was reached of each target, the medians, and how they were measured.

A ratio is the median over the rounds of the ratios within a round, so that a machine that changes its pace in between
changes both sides of it.
"""
import json
import statistics

KIB = 1 << 10
PEERS = ("nixl-default", "nixl-shm", "nixl-tcp", "mooncake-tcp")
PEERS_TCP = ("nixl-tcp", "mooncake-tcp")
LAYERS = 16
PIECES = 65536
# What others may use of the machine before the page says so at its top.
DISTURBED_CORES = 0.2


def size_name(size):
    return "%d MiB" % (size >> 20) if size >= 1 << 20 else "%d KiB" % (size >> 10)


def number(value):
    return "%.0f" % value if value >= 1000 else "%.3g" % value


class Figures:
    """What was measured, by candidate and size. Failed runs and wrong bytes are no figures."""

    def __init__(self, data):
        self.data = data
        self.small = tuple(data["small"])
        self.sizes = data["sizes"]
        self.labels = {c["key"]: c["label"] for c in data["candidates"]}
        self.absent = {c["key"]: c["absent"] for c in data["candidates"] if c["absent"]}
        self.times = {}  # (what, candidate or None, block_bytes, blocks) -> {round: us}
        self.bytes = {}
        for run in data["runs"]:
            if run["line"] and run["line"]["verified"]:
                for candidate in (run["candidate"], None):
                    key = (run["what"], candidate, run["block_bytes"], run["blocks"])
                    self.times.setdefault(key, {})[run["round"]] = run["line"]["us"]["p50"]

    def blocks(self, size):
        return next(run["blocks"] for run in self.data["runs"]
                    if run["what"] == "table" and run["block_bytes"] == size and (size, run["blocks"]) != self.small)

    def rounds(self, candidate, case):
        return self.times.get(("table", candidate, *case), {})

    def case(self, size):
        return (size, self.blocks(size))

    def us(self, candidate, case):
        times = self.rounds(candidate, case)
        return statistics.median(times.values()) if times else None

    def extra_us(self, what):
        """Of a run outside the table."""
        for (name, candidate, _, _), times in self.times.items():
            if name == what and candidate is None:
                return statistics.median(times.values())
        return None

    def extra_median(self, what, field):
        """Of a field of the lines of a run outside the table."""
        values = [run["line"][field] for run in self.data["runs"]
                  if run["what"] == what and run["line"] and run["line"]["verified"] and field in run["line"]]
        return statistics.median(values) if values else None

    def gb_per_s(self, candidate, case):
        us = self.us(candidate, case)
        return case[0] * case[1] / us / 1e3 if us else None

    def speed_ratio(self, ours, others, case):
        """Our throughput over that of the fastest of some others; None when one is missing."""
        mine, ratios = self.rounds(ours, case), []
        for turn, us in mine.items():
            theirs = [self.rounds(other, case)[turn] for other in others if turn in self.rounds(other, case)]
            if theirs:
                ratios.append(min(theirs) / us)
        return statistics.median(ratios) if ratios else None

    def best_shm(self, digest):
        """Our way over shared memory: the mapped mover, or what is there in its place."""
        for key in ("mapped-" + digest, "ucx-shm-" + digest):
            if key not in self.absent:
                return key
        return "mapped-" + digest

    def with_poll(self, key):
        """What a target allows: as it is without being configured, and busy polling, as the others' callers do."""
        return [key, key + "-poll"] if key + "-poll" in self.labels and key + "-poll" not in self.absent else [key]

    def why_not(self, *keys):
        reasons = ["%s: %s" % (self.labels[key], self.absent[key]) for key in keys if key in self.absent]
        return "; ".join(reasons) or "no figure of this run"


def row(what, target, measured, met, note=""):
    """met: True, False, or None when nothing could be measured."""
    return {"what": what, "target": target, "measured": measured, "met": met, "note": note}


def figure(value, limit):
    """Two digits; more where they would hide on which side of the limit it is."""
    texts = ["%.*f" % (digits, value) for digits in (2, 3, 4, 5)]
    return next((text for text in texts if (float(text) > limit, float(text) < limit) == (value > limit, value < limit)),
                texts[-1])


def by_size(figures, what, least, ours, others, sizes, reported=()):
    """A target of the kind: at least so many times as fast, at every one of these sizes."""
    target, best = ">= %g" % least, None
    for key in figures.with_poll(ours):
        ratios = {size: figures.speed_ratio(key, others, figures.case(size)) for size in sizes}
        counted = [ratio for size, ratio in ratios.items() if ratio is not None and size not in reported]
        if counted and (best is None or (len(counted), min(counted)) > best[0]):
            measured = ", ".join("%s (%s)" % (figure(ratio, least), size_name(size)) for size, ratio in ratios.items()
                                 if ratio is not None)
            best = ((len(counted), min(counted)), measured, figures.labels.get(key, ""))
    if best is None:
        return row(what, target, "", None, figures.why_not(ours, *others))
    return row(what, target, best[1], best[0][1] >= least, best[2])


def at_most(what, target, value, limit, unit, note, reason):
    """A target of the kind: at most so much."""
    if value is None or limit is None:
        return row(what, target, "", None, reason)
    measured = "%s (%s of at most %s %s)" % (figure(value / limit, 1), number(value), number(limit), unit)
    return row(what, target, measured, value <= limit, note)


def throughput_targets(figures, on, off):
    sizes = figures.sizes
    at_16, from_16, from_64 = ([s for s in sizes if keep(s)] for keep in
                               (lambda s: s == 16 * KIB, lambda s: s >= 16 * KIB, lambda s: s >= 64 * KIB))
    below_16 = [s for s in sizes if s < 16 * KIB]
    return [
        by_size(figures, "shared memory, digests off, of the non-temporal copy", 0.85, off, ["nt"], from_16),
        by_size(figures, "shared memory, digests on, of the non-temporal copy", 0.42, on, ["nt"], sizes, below_16),
        by_size(figures, "shared memory, digests on, of the fastest peer, from 64 KiB", 1.4, on, PEERS, from_64),
        by_size(figures, "shared memory, digests on, of the fastest peer, at 16 KiB", 1.05, on, PEERS, at_16),
        by_size(figures, "shared memory, digests off, of the fastest peer", 1.5, off, PEERS, sizes),
        by_size(figures, "tcp, digests off, of a bare socket, from 64 KiB", 0.9, "tcp-off", ["socket"], from_64),
        by_size(figures, "tcp, digests on, of a bare socket, from 64 KiB", 0.8, "tcp-on", ["socket"], from_64),
        by_size(figures, "tcp, digests on, of the fastest peer over tcp", 1.2, "tcp-on", PEERS_TCP, sizes),
    ]


def latency_targets(figures, on):
    ours = [(figures.us(key, figures.small), figures.labels.get(key, "")) for key in figures.with_poll(on)]
    ours.append((figures.extra_us("caller"), figures.labels.get(on, "") + ", busy polling, driven by its caller"))
    small, who = min((us, who) for us, who in ours if us) if any(us for us, _ in ours) else (None, "")
    default = figures.us("nixl-default", figures.small)
    nixl = [us for us in (default, figures.us("nixl-shm", figures.small)) if us]
    wakeup = figures.extra_us("wakeup")
    exposed, whole, trip = (figures.extra_us(what) for what in ("layers", "layers_all", "round_trip"))
    return [
        at_most("64 x 16 KiB, of NIXL's fastest and two wake-ups", "<= 1", small,
                min(nixl) + 2 * wakeup if nixl and wakeup else None, "us", who,
                figures.why_not(on, "nixl-default", "nixl-shm")),
        at_most("64 x 16 KiB, of half of NIXL's default", "<= 1", small, default / 2 if default else None, "us",
                who, figures.why_not(on, "nixl-default")),
        at_most("layer by layer, prefill slower than the link: exposed time", "<= 1.3 x (last layer + round trip)", exposed,
                1.3 * (whole / LAYERS + trip) if whole and trip else None, "us",
                figures.labels[on] + "; a round trip: a request of one block of 64 bytes", figures.why_not(on)),
    ]


def cost_targets(figures, off):
    ratios = {s: figures.speed_ratio("tcp-on", ["tcp-off"], figures.case(s)) for s in figures.sizes}
    costs = {size: 1 - ratio for size, ratio in ratios.items() if ratio is not None}
    digest = row("digest: cost over tcp", "<= 0.15", ", ".join("%s (%s)" % (figure(c, 0.15), size_name(s)) for s, c in costs.items()),
                 max(costs.values()) <= 0.15 if costs else None,
                 figures.labels["tcp-on"] if costs else figures.why_not("tcp-off", "tcp-on"))
    pieces, bare = figures.extra_us("pieces"), figures.extra_us("pieces_memcpy")
    whole = "; all of the request but the time of its memcpy: %s ns a piece" % number((pieces - bare) * 1e3 / PIECES) \
        if pieces and bare else ""
    piece = at_most("planning and posting a piece", "<= 60 ns", figures.extra_median("pieces", "posting_ns"), 60.0, "ns",
                    "%s; at the sender, commits included, in a request of %d blocks of 64 bytes%s" %
                    (figures.labels[off], PIECES, whole), figures.why_not(off))
    return [digest, piece]


def targets(figures):
    on, off = figures.best_shm("on"), figures.best_shm("off")
    return throughput_targets(figures, on, off) + latency_targets(figures, on) + cost_targets(figures, off)


def target_table(rows):
    words = {True: "met", False: "**short**", None: "not measured"}
    lines = ["| target | at least or at most | reached | | with |", "|---|---|---|---|---|"]
    lines += ["| %s | %s | %s | %s | %s |" % (r["what"], r["target"], r["measured"], words[r["met"]], r["note"]) for r in rows]
    return lines


def speed_table(figures, panel, reference):
    candidates = [c for c in figures.data["candidates"] if c["panel"] == panel and not c["absent"]]
    lines = ["| | " + " | ".join(size_name(size) for size in figures.sizes) + " | %d x %s, ms |" %
             (figures.small[1], size_name(figures.small[0])), "|---" * (len(figures.sizes) + 2) + "|"]
    for candidate in candidates:
        cells = []
        for size in figures.sizes:
            speed = figures.gb_per_s(candidate["key"], figures.case(size))
            ratio = figures.speed_ratio(candidate["key"], [reference], figures.case(size))
            cells.append("failed" if speed is None else "%.2f" % speed + (" (%.2f)" % ratio if ratio is not None else ""))
        us = figures.us(candidate["key"], figures.small)
        lines.append("| %s | %s | %s |" % (candidate["label"], " | ".join(cells),
                                           "failed" if us is None else "%.3f" % (us / 1e3)))
    return lines


def summary(rows):
    short = [r for r in rows if r["met"] is False]
    unknown = [r for r in rows if r["met"] is None]
    lines = []
    if short:
        lines += ["**Falls short:**", ""]
        lines += ["- %s: %s; the target is %s" % (r["what"], r["measured"], r["target"]) for r in short] + [""]
    else:
        lines += ["Nothing that was measured falls short.", ""]
    if unknown:
        lines += ["Not measured:", ""] + ["- %s (%s)" % (r["what"], r["note"]) for r in unknown] + [""]
    return lines


def medians(figures):
    threads, tests = figures.data["threads"], figures.data["ucx_perftest"]
    lines = ["## Medians", "", "GB/s seen by the receiver, and how much that is of the non-temporal copy with %d thread%s:" %
             (threads, "s" if threads > 1 else ""), ""]
    lines += speed_table(figures, "shm", "nt") + ["", "The same over tcp, and how much it is of the bare socket:", ""]
    lines += speed_table(figures, "tcp", "socket") + [""]
    if not tests:
        return lines + ["`ucx_perftest` is absent.", ""]
    lines += ["UCX alone (`ucx_perftest`, active messages from one buffer into one buffer, which stay in the cache; nothing is",
              "checked):", ""]
    for tls, speeds in tests.items():
        lines.append("- %s: %s" % (tls, ", ".join("%.2f GB/s (%s)" % (v, size_name(int(s))) for s, v in speeds.items())))
    return lines + [""]


def left_out(figures):
    lines = []
    if figures.absent:
        lines += ["Left out:", ""] + ["- %s: %s" % (figures.labels[key], why) for key, why in figures.absent.items()] + [""]
    bad = [run for run in figures.data["runs"] if run["line"] is None or not run["line"]["verified"]]
    if bad:
        lines += ["Runs without a figure:", ""]
        lines += ["- round %d, %s, %d blocks of %s: %s" %
                  (run["round"] + 1, figures.labels.get(run["candidate"], run["candidate"]), run["blocks"],
                   size_name(run["block_bytes"]) if run["block_bytes"] >= KIB else "%d bytes" % run["block_bytes"],
                   run["failed"] or "wrong bytes") for run in bad] + [""]
    return lines


HOW = """Blocks in seeded random order, no two adjacent, from a 1 GiB pool in one process to a 1 GiB pool in another, 64 MiB a
transfer; every byte of every transfer is compared, apart from the time that is measured. Time runs from the request
(of NIXL and Mooncake: from the post, without the making of it) to the moment when the receiver knows. The sender hashes
what it has before the request comes, as it does where prefill has ended; the receiver hashes in the time. Rounds: %d, in
which the candidates take turns, each with %d transfers after warm-up, and five times as many small ones. NIXL runs
without its progress thread, which costs a core, and both its ends poll all the time, and over shared memory without
error handling, which it needs there; Mooncake with connections that stay and room for all blocks in its queue. Their
pools are private memory, with huge pages where the machine gives them; the copies that kvferry is compared with run in
shared memory, as its own pools. Busy polling of kvferry is `mover.busy_poll_us: 300`; each target names which way it
was reached. The raw data are in [compare.json](compare.json)."""


def how(data):
    machine = data["machine"]
    return ["## How", "", "    " + data["command"], "", HOW % (data["rounds"], data["reps"]), "", "| | |", "|---|---|",
            "| machine | %s, %d cores, %.1f GiB; Linux %s |" %
            (machine["cpu"], machine["cores"], machine["memory_bytes"] / (1 << 30), machine["kernel"]),
            "| huge pages | %s |" % machine["huge_pages"],
            "| other work | load %.2f before; %.2f cores used by others, median of the runs |" %
            (machine["load_before"], data["foreign_cores"]),
            "| versions | %s |" % "; ".join("%s %s" % (name, text.replace("kvferry ", ""))
                                            for name, text in data["versions"].items()),
            "| date | %s, %d s |" % (data["date"], data["seconds"]), ""]


def raw(data):
    """The file of the raw data: a line for each run."""
    head = json.dumps({key: value for key, value in data.items() if key != "runs"}, indent=1)
    return head[:-2] + ',\n "runs": [\n' + ",\n".join("  " + json.dumps(run) for run in data["runs"]) + "\n ]\n}\n"


def markdown(data):
    figures = Figures(data)
    rows = targets(figures)
    lines = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Compared with NIXL, Mooncake and the machine", ""]
    if data["foreign_cores"] > DISTURBED_CORES:
        lines += ["**Disturbed:** other programs used %.1f of %d cores meanwhile; the figures say little." %
                  (data["foreign_cores"], data["machine"]["cores"]), ""]
    lines += summary(rows) + ["![Throughput by size of a block](compare.svg)", "", "## Targets", ""] + target_table(rows) + [""]
    return "\n".join(lines + medians(figures) + left_out(figures) + how(data))
