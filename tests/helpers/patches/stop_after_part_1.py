"""The tool stops itself when its second part has its name."""

import os
import pathlib
import signal


def rename(path, target):
    original(path, target)
    if str(target).endswith("part-00001"):
        os.kill(os.getpid(), signal.SIGSTOP)


original = pathlib.Path.rename
pathlib.Path.rename = rename
