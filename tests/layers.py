#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes respect the layers and that every header compiles alone.

    tests/layers.py                                  who includes whom
    tests/layers.py --cc CC [--cxx CXX] [--cuda] [-- FLAGS]  and whether every header compiles
    tests/layers.py --self-test                      every rule finds a planted violation
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# What each room may include, by prefix; the longest matching room counts. Siblings do not include
# one another but for the plain structs of layout.h, the chunk header that movers send, and what
# translates the codes of the CUDA runtime.
FLOOR = ["kvmgr/base/"]
CORE = ["kvmgr/", "proto/", "kernels/"]
ROOMS = {
    "kvmgr/base/": FLOOR,
    "kvmgr/": ["kvmgr/"],
    "proto/": FLOOR + ["proto/", "kvmgr/layout.h", "kvferry.pb-c.h"],
    "kernels/": FLOOR + ["kernels/", "kvmgr/layout.h"],
    "transceiver/mem/": ["kvmgr/", "kernels/", "transceiver/mem/"],
    "transceiver/mover/": ["kvmgr/", "kernels/", "proto/chunk.h", "proto/types.h",
                           "transceiver/mem/cuda_scope.h", "transceiver/mover/"],
    "transceiver/control/": CORE + ["transceiver/control/"],
    "transceiver/": CORE + ["transceiver/"],
    "tools/": CORE + ["transceiver/", "tools/"],
    "tests/": CORE + ["transceiver/", "tools/", "tests/", "../support/"],
}

# Headers of other projects, and the only files that may know them. A test may know what the object
# of its stem knows, tests/unit/mover_ucx.c what transceiver/mover/ucx.c does.
FOREIGN = [
    (r"uc[mpst]/", ["transceiver/mover/ucx"]),
    (r"cuda|cooperative_groups|nvml", ["transceiver/mover/cuda", "transceiver/mem/cuda", "tests/gpu/",
                                       "tests/unit/agent_device.", "tests/unit/agent_fence."]),
    (r"nccl", ["transceiver/mover/nccl"]),
    (r"uv\.h|uv/", ["transceiver/control/", "transceiver/agent_loop."]),
    (r"openssl/", ["proto/mac.", "transceiver/control/"]),
    (r"protobuf-c/", ["proto/"]),
    (r"(jansson|yaml|microhttpd|argp)\.h|curl/", ["tools/", "tests/"]),
    (r"criterion/", ["tests/"]),
]

SOURCES = {".c", ".h", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def sources(root):
    """Every source of the rooms, relative to root, in order."""
    tops = sorted({room.split("/")[0] for room in ROOMS})
    return [p.relative_to(root).as_posix() for top in tops for p in sorted((root / top).rglob("*"))
            if p.suffix in SOURCES]


def may_know(path, header, owners):
    """Whether path may include a foreign header that belongs to owners."""
    if path.endswith((".cu", ".cuh")) and header.startswith(("cuda", "cooperative_groups")):
        return True
    if any(path.startswith(owner) for owner in owners):
        return True
    return path.startswith("tests/") and any(
        re.search(r"[/_]" + re.escape(pathlib.PurePath(owner).name), path) for owner in owners)


def include_violations(root):
    """One text per include that breaks a rule."""
    found = []
    for path in sources(root):
        room = max((r for r in ROOMS if path.startswith(r)), key=len)
        text = (root / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            quote, header = match.groups()
            where = f"{path}:{number}: includes {header}, "
            beside = room == "tests/" and "/" not in header
            if quote == '"' and not beside and not any(header.startswith(p) for p in ROOMS[room]):
                found.append(where + f"but {room} may include only {', '.join(ROOMS[room])}")
            elif quote == "<":
                for pattern, owners in FOREIGN:
                    if re.match(pattern, header) and not may_know(path, header, owners):
                        found.append(where + f"which belongs to {', '.join(owners)}")
    return found


def header_violations(root, cc, cxx, flags, cuda):
    """One text per header that does not compile alone; those that need CUDA only where it is."""
    def compile_one(job):
        header, command = job
        command = command + flags + ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{root}"]
        result = subprocess.run(command + [root / header], capture_output=True, text=True,
                                check=False)
        if result.returncode != 0:
            return f"{header}: does not compile alone:\n{result.stderr}"
        return None

    public = "transceiver/kvferry.h"
    jobs = [(h, [cc, "-std=gnu17", "-x", "c"]) for h in sources(root) if h.endswith(".h")]
    if not cuda:
        jobs = [job for job in jobs if "#include <cuda" not in (root / job[0]).read_text("utf-8")]
    if (root / public).exists():
        jobs += [(public, [cc, "-std=c11", "-pedantic", "-x", "c"]),
                 (public, [cxx, "-std=c++17", "-pedantic", "-x", "c++"])]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text in pool.map(compile_one, jobs) if text]


# Path, line, and whether the line breaks a rule.
PLANTED = [
    ("kvmgr/base/a.c", '#include "kvmgr/window.h"', True),
    ("kvmgr/a.c", '#include "kvmgr/base/size.h"', False),
    ("kvmgr/b.c", '#include "proto/frame.h"', True),
    ("kvmgr/c.h", '#  include "kernels/digest.h"', True),
    ("proto/a.c", '#include "kvmgr/layout.h"', False),
    ("proto/b.c", '#include "kvmgr/window.h"', True),
    ("proto/c.c", '#include "transceiver/kvferry.h"', True),
    ("proto/mac.c", "#include <openssl/hmac.h>", False),
    ("proto/ticket.c", "#include <openssl/hmac.h>", True),
    ("proto/d.c", '#include "frame.h"', True),
    ("kernels/a.c", '#include "proto/types.h"', True),
    ("transceiver/mem/a.c", '#include "transceiver/mover/ucx_context.h"', True),
    ("transceiver/mem/b.c", '#include "transceiver/mover/mover.h"', True),
    ("transceiver/mem/shm.c", "#include <ucp/api/ucp.h>", True),
    ("transceiver/mem/host.c", "#include <ucp/api/ucp.h>", True),
    ("transceiver/mover/a.c", '#include "proto/chunk.h"', False),
    ("transceiver/mover/b.c", '#include "proto/frame.h"', True),
    ("transceiver/mover/c.c", '#include "transceiver/control/control.h"', True),
    ("transceiver/mover/d.c", "#include <cuda_runtime.h>", True),
    ("transceiver/mover/cuda.c", "#include <cuda_runtime.h>", False),
    ("transceiver/mover/cuda.c", '#include "transceiver/mem/cuda_scope.h"', False),
    ("transceiver/mover/cuda.c", '#include "transceiver/mem/cuda.h"', True),
    ("transceiver/mover/e.c", "#include <nccl.h>", True),
    ("transceiver/control/a.c", '#include "transceiver/agent.h"', True),
    ("transceiver/control/b.c", "#include <uv.h>", False),
    ("transceiver/a.c", "#include <uv.h>", True),
    ("transceiver/agent_loop.c", "#include <uv.h>", False),
    ("transceiver/b.c", '#include "tools/config.h"', True),
    ("transceiver/c.c", "#include <jansson.h>", True),
    ("transceiver/d.c", "#include <curl/curl.h>", True),
    ("kernels/copy.cu", "#include <cuda_runtime.h>", False),
    ("tools/a.c", "#include <yaml.h>", False),
    ("tools/b.c", "#include <ucs/type/status.h>", True),
    ("tools/c.c", '#include "tests/support/clock.h"', True),
    ("tests/unit/control.c", "#include <uv.h>", False),
    ("tests/unit/pages.c", "#include <uv.h>", True),
    ("tests/unit/mover_ucx.c", "#include <ucp/api/ucp.h>", False),
    ("tests/unit/mover_sim.c", "#include <ucp/api/ucp.h>", True),
    ("tests/fuzz/frame.c", '#include "fuzz.h"', False),
]


def self_test(cc, cxx):
    """Whether exactly the planted violations are found."""
    failures = []
    for path, line, bad in PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, path)
            file.parent.mkdir(parents=True)
            file.write_text(line + "\n", encoding="utf-8")
            found = include_violations(pathlib.Path(folder))
            if bool(found) != bad or (bad and not found[0].startswith(f"{path}:1:")):
                failures.append(f"{path} with {line}: violation expected: {bad}, found: {found}")
    for text, bad in (("#include <stdint.h>\nuint8_t x(void);", False), ("uint8_t x(void);", True),
                      ("typedef int class;", True)):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "transceiver/kvferry.h")
            file.parent.mkdir()
            file.write_text(text + "\n", encoding="utf-8")
            if bool(header_violations(pathlib.Path(folder), cc, cxx, [], False)) != bad:
                failures.append(f"header with {text!r}: violation expected: {bad}")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cc")
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--cuda", action="store_true", help="headers of CUDA are there")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("flags", nargs="*", help="compiler flags, after --")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent

    if options.self_test:
        found = self_test(options.cc or "cc", options.cxx)
    else:
        found = include_violations(root)
        if options.cc:
            found += header_violations(root, options.cc, options.cxx, options.flags, options.cuda)
    for text in found:
        print(text)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
