#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documentation against the program and the sources.

    tests/docs.py --kvferry PROGRAM
    tests/docs.py --self-test         every check finds a planted defect

Links lead somewhere; commands, options, configuration keys, metrics and errors that are shown exist, and those that
exist are shown; sections that are referred to are there.
"""
import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {".c", ".h", ".py", ".proto"}
ROOMS = ["kvmgr", "proto", "kernels", "transceiver", "tools", "tests"]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
STANDARD = {"--help", "--usage", "--version"}


class Facts:
    """What is true: the program's help and defaults, the sources' tables, the documents' headings."""

    def __init__(self, kvferry):
        self.kvferry = kvferry
        self.helps = {}
        top = self.run(kvferry, "--help")
        self.commands = re.findall(r"^  ([a-z]+) ", top, re.MULTILINE)
        self.keys = read_keys(self.run(kvferry, "config", "--defaults"))
        self.metrics = set(re.findall(r'"(kvferry_\w+)"', read("tools/node/metrics.h")))
        texts = dict(re.findall(r'X\(-?\d+, (\w+), \w+, "(\w+)"', re.sub(r"\\\n *", "", read("kvmgr/base/status.h"))))
        self.errors = {texts[name]: (http, recompute == "true") for name, http, recompute in
                       re.findall(r"\{KVF_(ERR_\w+), (\d+), (\w+)\}", read("tools/node/http_error.c"))}
        self.headings = {path: headings(text) for path, text in documents().items()}

    @staticmethod
    def run(*command):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        return result.stdout + result.stderr

    def options(self, *command):
        """Long options that the help of a command or script names; None when there is no such thing."""
        if command[0] == "kvferry" and len(command) > 1 and command[1] not in self.commands:
            return None
        if command[0] != "kvferry" and not (ROOT / command[0]).is_file():
            return None
        if command not in self.helps:
            program = (self.kvferry,) + command[1:] if command[0] == "kvferry" else (ROOT / command[0],)
            helps = self.run(*program, "--help")
            helps += self.run(*program, "--scale", "--help") if command == ("kvferry", "sim") else ""
            self.helps[command] = set(OPTION.findall(helps)) | {"--help"}
        return self.helps[command]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def documents():
    """Every Markdown file of the project, by path relative to its root."""
    paths = [*ROOT.glob("*.md"), *(p for top in ["docs"] + ROOMS for p in (ROOT / top).rglob("*.md"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted(paths)}


def headings(text):
    return [h.replace("`", "") for h in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
                                                   re.MULTILINE)]


def read_keys(yaml):
    """Dotted names in the file that `kvferry config --defaults` prints."""
    keys, section = set(), ""
    for line in yaml.splitlines():
        match = re.match(r"( *)([a-z_]+):(.*)", line)
        if match:
            indent, name, value = match.groups()
            section = section if indent else ""
            if value:
                keys.add(section + name)
            else:
                section = name + "."
    return keys


# ---- checks: each takes facts, a document's path and its text, and gives one text per defect ----

def check_links(_, path, text):
    """Relative links, and what stands behind them as `[name](file.md), "Section"`."""
    found = []
    for target, section in re.findall(r'\]\(([^)\s]+)\)(?:,\s+"([^"]+)")?', text):
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / path).parent / target.partition("#")[0]
        if not file.exists():
            found.append(f"link to {target}: no such file")
        elif section and section not in headings(file.read_text(encoding="utf-8")):
            found.append(f'{target} has no section "{section}"')
    return found


def shown_commands(text):
    """Command lines in code blocks and inline code that begin with kvferry or a script of tools/."""
    start = r"(?:build/tools/)?kvferry(?= [a-z-])|tools/[a-z]+(?![\w./])"
    lines = []
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```|((?:^(?: {4}.*)?\n)+)", text, re.M | re.S):
        for line in re.sub(r"\\?\n {4,}(?=[-\[ ])|\\\n", " ", "".join(block)).splitlines():
            match = re.match(r"\s*(?:\$ )?(?:.*\| )?((?:%s).*)" % start, line)
            lines += [match.group(1)] if match else []
    lines += re.findall(r"`((?:%s)[^`]*)`" % start, text)
    return lines


def check_commands(facts, path, text):
    found = []
    for line in shown_commands(text):
        words = line.split("#")[0].replace("build/tools/", "").split()
        command = tuple(words[:2] if words[0] == "kvferry" and not words[1].startswith("-") else words[:1])
        known = facts.options(*command)
        if known is None:
            found.append(f"shows {' '.join(command)}, which does not exist")
            continue
        found += [f"shows {' '.join(command)} {o}, which is no option of it" for o in OPTION.findall(line)
                  if o not in known]
        found += [f"shows --set {k}, which is no key" for k in re.findall(r'--set "?([a-z_.]+)=', line)
                  if k not in facts.keys]
        found += [f"shows {w}, which does not exist" for w in re.findall(r"\btests/[\w./-]+", line)
                  if not (ROOT / w).exists()]
    return found


def check_keys(facts, path, text):
    sections = {key.partition(".")[0] for key in facts.keys if "." in key}
    shown = re.findall(r"`([a-z_]+\.[a-z_]+)(?:[:=][^`]*)?`", text)
    found = [f"shows the key {k}, which does not exist" for k in shown
             if k.partition(".")[0] in sections and k not in facts.keys
             and not re.search(r"\.(c|h|py|md|json|yaml)$", k)]
    for section, body in re.findall(r"^(?: {4})?([a-z_]+): +\{(.*)\}", text, re.MULTILINE):
        found += [f"shows the key {section}.{name}, which does not exist"
                  for name in re.findall(r"([a-z_]+):(?: |$)", body) if f"{section}.{name}" not in facts.keys]
    if path == "docs/contracts.md":
        table = set(re.findall(r"`([a-z_.]+)`", "\n".join(re.findall(r"^\| (`[a-z_.`, ]+) \|", text, re.MULTILINE))))
        found += [f"does not list the key {k}" for k in sorted(facts.keys - table)]
    return found


def check_metrics(facts, path, text):
    shown = {re.sub(r"_(bucket|sum|count)$", "", m) for m in re.findall(r"\bkvferry_\w+", text)}
    found = [f"shows the metric {m}, which does not exist" for m in sorted(shown - facts.metrics)]
    if path == "docs/contracts.md":
        found += [f"does not list the metric {m}" for m in sorted(facts.metrics - shown)]
    return found


def check_errors(facts, path, text):
    """The table of errors by HTTP status."""
    if path != "docs/contracts.md":
        return []
    shown = {}
    for http, names, recompute in re.findall(r"^\| (\d{3}) \| (`.*?) \| ?(.*?)\|$", text, re.MULTILINE):
        for name in re.findall(r"`([a-z_]+)`", names.partition(";")[0]):
            if (http, name) != ("405", "invalid"):
                shown[name] = (http, recompute.startswith("yes"))
    return [f"error {n}: {shown.get(n)} is shown, {facts.errors.get(n)} is true"
            for n in sorted(shown.keys() | facts.errors.keys()) if shown.get(n) != facts.errors.get(n)]


def check_sections(facts, path, text):
    """What comments call docs/x.md "Section", line breaks and comment marks between them included."""
    plain = re.sub(r"\s*\n[ \t]*(?:\*|//|#)?[ \t]*", " ", text)
    found = []
    for document, sections in re.findall(r'\b(docs/\w+\.md)((?:,? "[^"]+")*)', plain):
        known = facts.headings.get(document)
        if known is None:
            found.append(f"refers to {document}, which does not exist")
            continue
        found += [f'refers to {document} "{s}", which has no such section' for s in re.findall(r'"([^"]+)"', sections)
                  if not any(h == s or h.startswith(s + ":") for h in known)]
    return found


def check_man(facts, path, text):
    """A man page names the options of its command, and no others; its examples are command lines."""
    names = pathlib.PurePath(path).name.split(".")[0].split("-")
    known = facts.options(*names)
    if known is None:
        return [f"there is no command {' '.join(names)}"]
    prose = re.sub(r"^```$.*?^```$", "", text, flags=re.M | re.S)
    shown = set(OPTION.findall(re.sub(r"[*_]", "", prose)))
    found = check_commands(facts, path, text)
    found += [f"names {o}, which is no option of {' '.join(names)}" for o in sorted(shown - known - STANDARD)]
    found += [f"does not name {o}" for o in sorted(known - shown - STANDARD)]
    pages = {p.stem.split(".")[0] for p in (ROOT / "docs/man").glob("*.scd")} | {"kvferry-decode"}
    found += [f"refers to {p}(1), which does not exist" for p in re.findall(r"\*(kvferry[a-z-]*)\*\(1\)", text)
              if p not in pages]
    return found


DOCUMENT_CHECKS = [check_links, check_commands, check_keys, check_metrics, check_errors]


def defects(facts):
    found = []
    for path, text in documents().items():
        found += [f"{path}: {t}" for check in DOCUMENT_CHECKS for t in check(facts, path, text)]
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in SOURCES):
        if path != pathlib.Path(__file__).resolve():
            name = path.relative_to(ROOT).as_posix()
            found += [f"{name}: {t}" for t in check_sections(facts, name, path.read_text(encoding="utf-8"))]
    for path in sorted((ROOT / "docs/man").glob("*.scd")):
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}: {t}" for t in check_man(facts, name, path.read_text(encoding="utf-8"))]
    for command in facts.commands:
        page = "prefill" if command == "decode" else command
        if not (ROOT / f"docs/man/kvferry-{page}.1.scd").exists() and command != "sim":
            found.append(f"docs/man: no page for kvferry {command}")
    return found


# Check, document, text, and how many defects it has.
PLANTED = [
    (check_links, "README.md", "[a](docs/contracts.md) [b](https://x.org/y)", 0),
    (check_links, "README.md", "[a](docs/contract.md)", 1),
    (check_links, "docs/operating.md", '[a](contracts.md), "Errors" [a](contracts.md), "Mistakes"', 1),
    (check_commands, "README.md", "```sh\ntools/check --offline # all\n```\n", 0),
    (check_commands, "README.md", "```sh\ntools/check --online\n```\n", 1),
    (check_commands, "README.md", "```sh\ntools/chekc\n```\n", 1),
    (check_commands, "README.md", "x `kvferry plan --json` `kvferry plna` `kvferry plan --yaml`", 2),
    (check_commands, "README.md", "```sh\necho | build/tools/kvferry plan --jsn\n```\n", 1),
    (check_commands, "README.md", "\n    $ build/tools/kvferry decode --config x \\\n        --set pool.byte=3\n\n", 1),
    (check_commands, "README.md", "\n    build/tools/kvferry replay --trace tests/data/none\n\n", 1),
    (check_keys, "README.md", "`pool.bytes` `pool.memory: shm` `pool.h` `foo.bar`", 0),
    (check_keys, "README.md", "`pool.byte` `limits.lease=3`", 2),
    (check_keys, "README.md", "    pool:    {memory: shm, byte: 1GiB}\n", 1),
    (check_metrics, "README.md", "kvferry_pages{pool} kvferry_transfer_seconds_sum", 0),
    (check_metrics, "README.md", "kvferry_page", 1),
    (check_sections, "a.c", '/* Source: docs/placement.md\n * "Windows", "Pairing". */', 0),
    (check_sections, "a.c", '/* Source: docs/placement.md "Doors". docs/place.md */', 2),
    (check_man, "docs/man/kvferry-config.1.scd", "*-d*, *--defaults*", 0),
    (check_man, "docs/man/kvferry-config.1.scd", "*--default* *kvferry-x*(1)", 3),
    (check_man, "docs/man/kvferry-config.1.scd", "*--defaults*\n```\nkvferry config --default >x\n```\n", 1),
    (check_man, "docs/man/kvferry-confg.1.scd", "", 1),
]


def self_test(facts):
    found = []
    for check, path, text, n in PLANTED:
        got = check(facts, path, text)
        if len(got) != n:
            found.append(f"{check.__name__} with {text!r}: {n} defects expected, found: {got}")
    contracts = read("docs/contracts.md")
    for check, old in ((check_keys, "`pool.bytes` | "), (check_metrics, "kvferry_pages"),
                       (check_errors, "| 404 | `unknown`"), (check_errors, "`peer_refused`")):
        if check(facts, "docs/contracts.md", contracts) or \
                not check(facts, "docs/contracts.md", contracts.replace(old, "| 400 | `x` ")):
            found.append(f"{check.__name__} without {old} in contracts.md")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kvferry", required=True, help="the program")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    facts = Facts(pathlib.Path(options.kvferry).resolve())
    found = self_test(facts) if options.self_test else defects(facts)
    for text in found:
        print(text)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
