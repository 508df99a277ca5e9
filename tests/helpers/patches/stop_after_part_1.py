"""The tool stops itself when its second part has its name."""

import os
import pathlib
import signal

from helpers.patches import in_place_of


@in_place_of(pathlib.Path, "rename")
def rename(original, path, target):
    original(path, target)
    if str(target).endswith("part-00001"):
        os.kill(os.getpid(), signal.SIGSTOP)
