"""Counts what a save does with files. KILL_AT: a rank, and the number of the action."""

import atexit
import os
import pathlib
import shutil
import signal

import torch

from helpers.patches import print

rank, last = map(int, os.environ.get("KILL_AT", "0 0").split())
actions = []


def counted(owner, name):
    original = getattr(owner, name)

    def call(*arguments, **options):
        actions.append(name)
        if len(actions) == last and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, name, call)


atexit.register(lambda: print("\nactions", len(actions), flush=True))
for owner, names in {
    os: "fsync sync replace unlink",
    shutil: "copy rmtree",
    pathlib.Path: "rename write_text",
    torch: "save",
}.items():
    for name in names.split():
        counted(owner, name)
