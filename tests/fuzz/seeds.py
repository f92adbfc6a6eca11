#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the seeds in the corpora are those of today's wire: `seeds.py FUZZ-SEEDS CORPUS`."""
import filecmp
import os
import subprocess
import sys
import tempfile

program, corpus = sys.argv[1:]
with tempfile.TemporaryDirectory() as made:
    for target in os.listdir(corpus):
        os.mkdir(os.path.join(made, target))
    subprocess.run([program, made], check=True)
    names = [os.path.join(target, name) for target in os.listdir(made) for name in os.listdir(os.path.join(made, target))]
    old = [name for name in names if not os.path.exists(os.path.join(corpus, name)) or
           not filecmp.cmp(os.path.join(made, name), os.path.join(corpus, name), shallow=False)]
for name in old:
    print("%s is not what seeds.c writes; run %s %s and commit" % (name, program, corpus))
sys.exit(1 if old or not names else 0)
