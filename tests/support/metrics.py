# SPDX-License-Identifier: Apache-2.0
"""A strict reader of the Prometheus text format, version 0.0.4: anything doubtful is an error."""

import math
import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_SAMPLE = re.compile(r"(%s)(?:\{(%s(?:,%s)*)\})? (\S+)" % (_NAME, _LABEL, _LABEL))
_PART = re.compile(_LABEL)
_VALUE = re.compile(r"[+-]?(?:Inf|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)|NaN")
_TYPES = ("counter", "gauge", "histogram", "summary", "untyped")


class MetricsError(AssertionError):
    pass


def _check(condition, number, why):
    if not condition:
        raise MetricsError("line %d: %s" % (number, why))


def _labels(text):
    return {part.split("=", 1)[0]: part.split("=", 1)[1][1:-1] for part in _PART.findall(text or "")}


def _family_of(name, types):
    """The family a sample belongs to: a histogram's samples have suffixes."""
    if name in types:
        return name
    for suffix in ("_bucket", "_sum", "_count"):
        base = name[:-len(suffix)]
        if name.endswith(suffix) and types.get(base) == "histogram":
            return base
    return None


def parse(text):
    """{(name, ((label, value), ..)): number}. Checks names, escapes, order, types, duplicates and histograms."""
    samples = {}
    types = {}
    helped = set()
    closed = set()
    current = None
    if not text.endswith("\n"):
        raise MetricsError("no newline at the end")
    for number, line in enumerate(text.split("\n")[:-1], 1):
        comment = re.fullmatch(r"# (HELP|TYPE) (%s) (.+)" % _NAME, line)
        if comment:
            kind, family, rest = comment.groups()
            _check(family not in closed, number, family + " comes in two places")
            if family != current:
                if current:
                    closed.add(current)
                current = family
            if kind == "HELP":
                _check(family not in helped, number, "second HELP")
                helped.add(family)
            else:
                _check(rest in _TYPES and family not in types, number, "TYPE")
                types[family] = rest
            continue
        match = _SAMPLE.fullmatch(line)
        _check(match, number, "not a sample: %r" % line)
        name, label_text, value = match.groups()
        labels = _labels(label_text)
        family = _family_of(name, types)
        _check(family is not None, number, name + " has no TYPE")
        _check(family in helped, number, name + " has no HELP")
        _check(family == current, number, name + " stands apart from its TYPE")
        _check(len(labels) == len(_PART.findall(label_text or "")), number, "a label twice")
        _check(_VALUE.fullmatch(value), number, "value %r" % value)
        _check(types[family] != "counter" or family.endswith("_total"), number, "a counter without _total")
        _check(types[family] == "gauge" or float(value) >= 0, number, "negative")
        key = (name, tuple(sorted(labels.items())))
        _check(key not in samples, number, "duplicate %s" % (key,))
        samples[key] = float(value)
    for family, kind in types.items():
        if kind == "histogram":
            _check_histogram(family, samples)
    return samples


def _check_histogram(family, samples):
    series = {}
    for (name, labels), value in samples.items():
        if name == family + "_bucket":
            rest = tuple(item for item in labels if item[0] != "le")
            series.setdefault(rest, []).append((float(dict(labels)["le"].replace("+Inf", "inf")), value))
    for rest, buckets in series.items():
        bounds = [bound for bound, _ in buckets]
        counts = [count for _, count in buckets]
        count = samples.get((family + "_count", rest))
        if bounds != sorted(bounds) or bounds[-1] != math.inf or counts != sorted(counts) or counts[-1] != count or \
                (family + "_sum", rest) not in samples:
            raise MetricsError("histogram %s%s does not add up" % (family, rest))
