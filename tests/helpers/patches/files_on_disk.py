"""Tells whether all files of a folder were on the disk when it got its name."""

import os
import pathlib

from helpers.patches import print

sync, rename = os.fsync, pathlib.Path.rename
synced = {}


def watched_sync(opened):
    path = pathlib.Path(f"/proc/self/fd/{opened}").resolve()
    if path.exists():
        synced[path] = path.stat().st_size
    sync(opened)


def watched_rename(path, target):
    if path.name.startswith("incomplete-"):
        sizes = {file.resolve(): file.stat().st_size for file in [path, *path.rglob("*")]}
        on_disk = sizes.items() <= synced.items()
        print("\nnamed", pathlib.Path(target).name, on_disk, flush=True)
        synced.clear()
    return rename(path, target)


os.fsync, pathlib.Path.rename = watched_sync, watched_rename
