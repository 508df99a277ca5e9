"""Counts what a save does with files. KILL_AT: a rank, and the number of the action."""

import atexit
import os
import pathlib
import shutil
import signal

import torch
from helpers.patches import in_place_of, print

rank, last = map(int, os.environ.get("KILL_AT", "0 0").split())
actions = []


atexit.register(lambda: print("\nactions", len(actions), flush=True))
for owner, names in {
    os: "fsync sync replace unlink",
    shutil: "copy rmtree",
    pathlib.Path: "rename write_text",
    torch: "save",
}.items():
    for name in names.split():

        @in_place_of(owner, name)
        def call(original, *arguments, **options):
            actions.append(original)
            if len(actions) == last and int(os.environ.get("RANK", 0)) == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)
