# SPDX-License-Identifier: Apache-2.0
"""The picture of a comparison: throughput by size of a block, shared memory beside tcp, on a logarithmic axis."""
import math
from xml.sax.saxutils import escape

from report import Figures, size_name

WIDTH, HEIGHT = 1200, 520
TOP, BOTTOM = 70, 60
PANELS = (("shm", "shared memory", 60, 300), ("tcp", "tcp, loopback", 670, 260))  # left edge, width
LABEL_STEP = 15
# Ours are blue, those of others warm, references grey; without digests dashed.
STYLES = {
    "mapped-on": ("ours", ""), "mapped-off": ("ours", "6 4"), "ucx-shm-on": ("ours2", ""), "ucx-shm-off": ("ours2", "6 4"),
    "tcp-on": ("ours", ""), "tcp-off": ("ours", "6 4"), "ucx-tcp-on": ("ours2", ""), "ucx-tcp-off": ("ours2", "6 4"), "nixl-default": ("nixl2", ""), "nixl-shm": ("nixl", ""),
    "nixl-tcp": ("nixl", ""), "mooncake-tcp": ("moon", ""), "memcpy": ("bare2", "2 4"), "nt": ("bare", "2 4"),
    "socket": ("bare", "2 4"),
    "mapped-on-poll": ("ours3", ""), "mapped-off-poll": ("ours3", "6 4"), "tcp-on-poll": ("ours3", ""),
    "tcp-off-poll": ("ours3", "6 4"),
}
CSS = """
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; } .soft { fill: var(--soft); }
.grid { stroke: var(--grid); stroke-width: 1; } path { fill: none; stroke-width: 2; }
svg { --ink: #1f2328; --soft: #59636e; --grid: #d9dde2; --back: #ffffff; --ours: #0a58ca; --ours2: #2f9bd6; --ours3: #1a7f5a; --nixl: #c2410c;
      --nixl2: #b7791f; --moon: #9333a8; --bare: #59636e; --bare2: #8b949e; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --back: #0d1117; --ours: #6cb0ff;
      --ours2: #56d4dd; --ours3: #5fd39b; --nixl: #ff9b5e; --nixl2: #e3c04f; --moon: #d9a0f0; --bare: #a5adb6; --bare2: #77818c; } }
"""


class Axis:
    """Throughput on a logarithmic scale that holds all values."""

    def __init__(self, values):
        self.low = math.floor(math.log10(min(values)) * 4) / 4
        self.high = math.ceil(math.log10(max(values)) * 4 + 0.1) / 4

    def y(self, value):
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def marks(self):
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for digit in (1, 2, 5):
                value = digit * 10.0 ** power
                if self.low <= math.log10(value) <= self.high:
                    yield value


def spread(wanted):
    """Places near the wanted ones, in their order, that keep labels apart and inside."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    last = float(TOP) - LABEL_STEP
    for i in order:
        last = places[i] = max(wanted[i], last + LABEL_STEP)
    limit = float(HEIGHT - BOTTOM) + LABEL_STEP
    for i in reversed(order):
        limit = places[i] = min(places[i], limit - LABEL_STEP)
    return places


def panel(figures, axis, name, title, left, width):
    """One half of the picture: grid, lines, and a label at the end of each."""
    sizes = figures.sizes
    xs = [left + (width * i / (len(sizes) - 1) if len(sizes) > 1 else width / 2) for i in range(len(sizes))]
    parts = ['<text class="title" x="%d" y="%d">%s</text>' % (left, TOP - 22, title)]
    for value in axis.marks():
        y = axis.y(value)
        parts.append('<line class="grid" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/>' % (left, y, left + width, y))
        parts.append('<text class="soft" x="%d" y="%.1f" text-anchor="end">%g</text>' % (left - 8, y + 4, value))
    for x, size in zip(xs, sizes):
        parts.append('<text class="soft" x="%.1f" y="%d" text-anchor="middle">%s</text>' %
                     (x, HEIGHT - BOTTOM + 20, size_name(size)))
    lines = []
    for candidate in figures.data["candidates"]:
        speeds = [figures.gb_per_s(candidate["key"], figures.case(size)) for size in sizes]
        points = [(x, axis.y(speed)) for x, speed in zip(xs, speeds) if speed]
        if candidate["panel"] == name and points:
            lines.append((candidate, points, next(s for s in reversed(speeds) if s)))
    labels = spread([points[-1][1] for _, points, _ in lines])
    for (candidate, points, last), label_y in zip(lines, labels):
        colour, dash = STYLES[candidate["key"]]
        parts.append('<path d="M%s" style="stroke: var(--%s)" stroke-dasharray="%s"/>' %
                     (" L".join("%.1f,%.1f" % point for point in points), colour, dash or "none"))
        parts += ['<circle cx="%.1f" cy="%.1f" r="3.5" style="fill: var(--%s)"/>' % (x, y, colour) for x, y in points]
        x, y = points[-1]
        parts.append('<path d="M%.1f,%.1f L%.1f,%.1f" style="stroke: var(--%s); stroke-width: 1; opacity: 0.5"/>' %
                     (x + 5, y, left + width + 14, label_y, colour))
        text = candidate["label"].replace("shared memory, ", "").replace(", tcp", "").replace(", busy polling", ", polling")
        parts.append('<text x="%d" y="%.1f" style="fill: var(--%s)">%s %.2g</text>' %
                     (left + width + 17, label_y + 4, colour, escape(text), last))
    return parts


def svg(data):
    figures = Figures(data)
    speeds = [speed for c in data["candidates"] for size in figures.sizes
              if (speed := figures.gb_per_s(c["key"], figures.case(size)))] if data["runs"] else []
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-label="%s">' %
             (WIDTH, HEIGHT, "Throughput in GB/s by size of a block, kvferry, NIXL, Mooncake and the machine"),
             "<!-- SPDX-License-Identifier: Apache-2.0 -->", "<style>%s</style>" % CSS,
             '<rect width="%d" height="%d" style="fill: var(--back)"/>' % (WIDTH, HEIGHT),
             '<text class="soft" x="%d" y="24">GB/s seen by the receiver, median; 64 MiB of scattered blocks, every byte '
             'verified</text>' % PANELS[0][2],
             '<text class="soft" x="%d" y="%d">size of a block; %s, %s</text>' %
             (PANELS[0][2], HEIGHT - 12, escape(data["machine"]["cpu"]), data["date"])]
    if speeds:
        axis = Axis(speeds)
        for name, title, left, width in PANELS:
            parts += panel(figures, axis, name, title, left, width)
    return "\n".join(parts + ["</svg>", ""])
