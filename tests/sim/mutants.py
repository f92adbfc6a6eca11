#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each guard is removed in turn, and something must notice.

    tests/sim/mutants.py KVFERRY_SIM_MUTANTS UNIT_TEST...
"""
import concurrent.futures
import os
import pathlib
import subprocess
import sys

# Who notices first: a scenario of the simulator, with the seeds that it takes (twice as many are
# run), or a unit test.
NOTICED_BY = {
    "free_at_cancel": ("onesided", 10),
    "free_at_timeout": ("onesided", 20),
    "settle_without_proof": ("onesided", 40),
    "ignore_drained": ("proofs", 5),
    "drain_too_early": ("onesided", 20),
    "failure_is_proof": ("onesided", 200),
    "free_under_read": ("ends", 30),
    "free_under_copy": ("mapped", 20),
    "free_while_copying": ("lent", 20),
    "free_while_storing": ("ends", 100),
    "free_while_sending": ("lent", 10),
    "free_while_hashing": ("lent", 20),
    "keep_path": ("fetch", 0),
    "fetch_again": ("fetch", 0),
    "drain_while_copying": ("mapped", 100),
    "returned_of_one": ("peer_map_ends", 0),
    "keep_mapped": ("peer_map_ends", 0),
    "no_second_abort": ("peer_map_ends", 0),
    "skip_slot_check": ("peer_map", 0),
    "skip_grant_key": ("liar", 20),
    "skip_generation_check": ("liar", 20),
    "chunk_twice": ("liar", 20),
    "accept_handover": ("calm", 5),
    "skip_digest": ("liar", 20),
    "skip_coverage": ("flips", 500),
    "done_without_verify": ("calm", 5),
    "post_twice": ("calm", 5),
    "ignore_failed_window": ("memory", 100),
    "ignore_broken_path": ("network", 40),
    "ignore_closed": ("core_cancel", 0),
    "ignore_silence": ("core_cancel", 0),
    "accept_old_incarnation": ("crash", 100),
    "reuse_ticket": ("ends", 50),
    "accept_duplicate_id": ("ends", 20),
    "lose_released": ("ends", 10),
    "release_at_end": ("onesided", 20),
    "result_twice": ("network", 100),
    "lazy_heap": ("ends", 100),
    "no_renewal": ("core_cancel", 0),
    "keep_old_input": ("session", 0),
    "resend_nothing": ("reconnect", 50),
    "no_lease": ("ends", 20),
    "no_deadline": ("liar", 40),
    "no_peer_deadline": ("core_cancel", 0),
    "no_farewell": ("core_cancel", 0),
    "final_too_early": ("calm", 5),
    "free_in_doubt": ("onesided", 20),
    "free_while_written": ("ends", 200),
    "keep_generation": ("pages", 0),
    "ready_too_much": ("calm", 5),
    "wrong_source": ("calm", 5),
    "push_unasked": ("recv_pull", 0),
    "forget_pull": ("recv_pull", 0),
    "ask_for_all": ("recv_pull", 0),
    "keep_the_turn": ("turns", 0),
    "judge_after_stall": ("core_cancel", 0),
}


def run(mutant, *command):
    env = dict(os.environ, KVF_MUTANT=mutant) if mutant else os.environ
    return subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True,
                          check=False)


def notices(mutant, sim, units):
    """Whether something notices this mutant; without one, nothing may."""
    by, n = NOTICED_BY[mutant]
    if by in units:
        return run(mutant, units[by], "-j1").returncode != 0
    done = run(mutant, sim, "--scenario", by, "--seeds", 2 * n, "--no-shorten")
    crashed = done.returncode < 0  # as a missing guard may well do
    return crashed or done.returncode == 1 and "kvferry sim: seed" in done.stderr


def main():
    sim, *rest = sys.argv[1:]
    units = {pathlib.Path(path).name.removeprefix("mutants-"): path for path in rest}
    names = run("list", sim).stdout.split()
    wrong = []
    if set(names) != set(NOTICED_BY) or len(names) < 15:
        wrong.append(f"the list here and the program's differ: {set(names) ^ set(NOTICED_BY)}")
    for stem, path in units.items():
        if run(None, path, "-j1").returncode != 0:
            wrong.append(f"{stem} fails without a mutant")
    for by, n in set(NOTICED_BY.values()):
        if by not in units and run(None, sim, "--scenario", by, "--seeds", 2 * n).returncode != 0:
            wrong.append(f"scenario {by} finds something without a mutant")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        known = [name for name in names if name in NOTICED_BY]
        for name, seen in zip(known, pool.map(lambda m: notices(m, sim, units), known)):
            print(f"{name:24} {'noticed by' if seen else 'NOT noticed by'} {NOTICED_BY[name][0]}")
            if not seen:
                wrong.append(f"nobody notices {name}")
    for what in wrong:
        print("not so:", what)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
