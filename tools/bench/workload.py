# SPDX-License-Identifier: Apache-2.0
"""The workload of `kvferry bench` for a library that has Python bindings: scattered blocks from a pool in one process
into a pool in another, every byte checked after every transfer. A peer_*.py gives an engine:

    Engine(base, length, options)      registers the pool
    engine.hello()                     what the other process needs to know, to be pickled
    engine.connect(hello, base)        the other process's
    engine.prepare(local, remote, n)   offsets of the blocks of n bytes each; once
    engine.make(tag)                   all that is done for a transfer before it is posted
    engine.post()                      start; may return when it is done
    engine.progress()                  called until the receiver has seen the tag, by the sender
    engine.seen(tag)                   whether it has, by the receiver

Time runs from just before post() until seen() is true in the receiver: CLOCK_MONOTONIC is that of the machine.
"""
import argparse
import json
import mmap
import multiprocessing
import os
import sys
import time
import traceback

GOLDEN = 0x9E3779B97F4A7C15
POISON = 0xE1E1E1E1E1E1E1E1
PATIENCE_S = 60.0


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--pool-bytes", type=int, default=1 << 30)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--poll-us", type=float, default=0.0,
                        help="the receiver sleeps so long between two looks; 0: it spins (0)")
    return parser


class Pool:
    """Memory of this process, the blocks in it, and what is in them."""

    def __init__(self, numpy, options, side):
        self.numpy = numpy
        self.memory = mmap.mmap(-1, options.pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        words = numpy.frombuffer(self.memory, dtype=numpy.uint64)
        self.base = words.ctypes.data
        n_slots = options.pool_bytes // options.block_bytes
        per_slot = options.block_bytes // 8
        self.slots = words[: n_slots * per_slot].reshape(n_slots, per_slot)
        # Even slots only: no two are adjacent.
        self.chosen = [2 * random.permutation((n_slots + 1) // 2)[: options.blocks] for random in
                       (numpy.random.default_rng([options.seed, k]) for k in (0, 1))]
        self.mine = self.chosen[side]
        self.ramp = numpy.arange(per_slot, dtype=numpy.uint64) * numpy.uint64(GOLDEN)
        self.neighbours = self.mine[self.mine + 1 < n_slots] + 1

    def pattern(self, rep, first, end):
        numpy = self.numpy
        words = numpy.arange(first, end, dtype=numpy.uint64) + numpy.uint64(rep << 32)
        # Different ones stay different, in nearly every byte: splitmix64 (Steele, Lea, Flood 2014).
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            words = (words ^ (words >> numpy.uint64(shift))) * numpy.uint64(factor)
        return words[:, None] + self.ramp[None, :]

    def parts(self):
        """Some blocks at a time, so that the temporary arrays stay in the cache."""
        step = max(1, (1 << 20) // (8 * len(self.ramp)))
        return [(first, min(first + step, len(self.mine))) for first in range(0, len(self.mine), step)]

    def fill(self, rep):
        for first, end in self.parts():
            self.slots[self.mine[first:end]] = self.pattern(rep, first, end)

    def wrong(self, rep):
        """Bytes of the blocks that are not those of this transfer."""
        return sum(self.differing(self.slots[self.mine[first:end]], self.pattern(rep, first, end))
                   for first, end in self.parts())

    def poison(self, neighbours=False):
        self.slots[self.neighbours if neighbours else self.mine] = self.numpy.uint64(POISON)

    def touched(self):
        """Bytes of the slots between the blocks that somebody has written."""
        return self.differing(self.slots[self.neighbours], self.numpy.uint64(POISON))

    def differing(self, found, expected):
        return 0 if (found == expected).all() else int(self.numpy.count_nonzero((found ^ expected).view(self.numpy.uint8)))


def cpu_only_stderr():
    """What libraries print belongs to stderr: stdout is one line of JSON."""
    sys.stdout.flush()
    os.dup2(2, 1)


def receive(engine_class, options, pipe):
    import numpy
    cpu_only_stderr()
    pool = Pool(numpy, options, 1)
    pool.poison(neighbours=True)
    engine = engine_class(pool.base, options.pool_bytes, options)
    pipe.send((engine.hello(), pool.base))
    engine.connect(*pipe.recv())
    while (rep := pipe.recv()) is not None:
        tag = "rep%d" % rep
        pool.poison()
        pipe.send("waiting")
        give_up = time.monotonic() + PATIENCE_S
        while not (seen := engine.seen(tag)) and time.monotonic() < give_up:
            if options.poll_us:
                time.sleep(options.poll_us * 1e-6)
        at = time.monotonic_ns()
        pipe.send((at if seen else None, pool.wrong(rep) if seen else 0))
    pipe.send(pool.touched())
    pipe.recv()
    os._exit(0)  # without what the libraries do at exit: it is no part of this


def send(engine_class, options, pipe, result):
    import numpy
    cpu_only_stderr()
    try:
        result.send(measure(numpy, engine_class, options, pipe))
    except Exception as error:  # noqa: B902 - whatever a library throws is a result
        traceback.print_exc()
        result.send({"error": "%s: %s" % (type(error).__name__, error)})
    os._exit(0)


def measure(numpy, engine_class, options, pipe):
    pool = Pool(numpy, options, 0)
    engine = engine_class(pool.base, options.pool_bytes, options)
    pipe.send((engine.hello(), pool.base))
    engine.connect(*pipe.recv())
    local, remote = (slots * options.block_bytes for slots in pool.chosen)
    engine.prepare(local, remote, options.block_bytes)
    took, made, wrong = [], [], 0
    for rep in range(options.warmup + options.reps):
        pool.fill(rep)
        pipe.send(rep)
        pipe.recv()
        time.sleep(0.002)  # the receiver is at its first look
        begin = time.monotonic_ns()
        engine.make("rep%d" % rep)
        posted = time.monotonic_ns()
        engine.post()
        while not pipe.poll(0):
            engine.progress()
            if time.monotonic_ns() - posted > (PATIENCE_S + 5) * 1e9:
                raise TimeoutError("the receiver does not answer")
        seen, bad = pipe.recv()
        if seen is None:
            raise TimeoutError("the receiver was told nothing")
        wrong += bad
        if rep >= options.warmup:
            took.append((seen - posted) / 1e3)
            made.append((posted - begin) / 1e3)
    pipe.send(None)
    wrong += pipe.recv()
    pipe.send("end")
    took.sort()
    p50 = percentile(took, 50)
    return {"block_bytes": options.block_bytes, "blocks": options.blocks, "bytes": options.blocks * options.block_bytes,
            "reps": options.reps, "us": {"p50": p50, "p99": percentile(took, 99), "min": took[0]},
            "make_us": percentile(sorted(made), 50), "bytes_per_s": options.blocks * options.block_bytes / p50 * 1e6,
            "verified": wrong == 0, "mismatched_bytes": wrong, "pool_bytes": options.pool_bytes, "seed": options.seed}


def percentile(values, percent):
    """The nearest rank, of sorted values."""
    return values[-(-len(values) * percent // 100) - 1]


def run(engine_class, options, about):
    """Start both processes and print what the sender found. Returns an exit code."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    outcome, result = context.Pipe(False)
    processes = [context.Process(target=receive, args=(engine_class, options, theirs)),
                 context.Process(target=send, args=(engine_class, options, ours, result))]
    for process in processes:
        process.start()
    ours.close()
    theirs.close()
    result.close()
    try:
        line = outcome.recv()
    except EOFError:
        line = {"error": "the sending process died"}
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    if "error" in line:
        print("%s: %s" % (about["mover"], line["error"]), file=sys.stderr)
        return 1
    print(json.dumps(dict(about, **line)))
    return 0 if line["verified"] else 1
