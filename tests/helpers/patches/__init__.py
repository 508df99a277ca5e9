"""What a process of a test executes before its script: `before=patches("shards")` of runner.py.

Each process imports it for itself, and arguments are variables of the environment.
"""

from functools import partial

import torch.distributed

# Chapters silence ranks above 0. What a patch prints goes to the file nevertheless.
print = partial(print, file=open(1, "w", closefd=False), flush=True)


def at_end(tell):
    """Each rank calls this before it leaves the process group."""

    def tell_and_leave(group=None):
        if group is None:  # all groups
            tell()
        leave(group)

    leave = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = tell_and_leave
    return tell


def in_place_of(owner, name: str):
    """The function below gets the original one as its first argument."""

    def replace(function):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: function(original, *args, **options))

    return replace
