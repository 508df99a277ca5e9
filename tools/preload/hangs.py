"""Leaves a dump of each rank that waits, for tools/where-it-hangs.py.

A thread looks at PyTorch's flight recorder. If a rank has begun no collective for HANG_SECONDS,
the thread writes the recorded collectives and the stack of the main thread into the folder
HANG_DUMPS. It writes again while the rank waits, and once more when the script ends. A Python
signal handler could not do this: Python calls it in the main thread, which is blocked.
"""

import atexit
import json
import os
import pickle
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["HANG_DUMPS"]).absolute()
SECONDS = float(os.environ.get("HANG_SECONDS", 20))
RANK = int(os.environ["RANK"])
waited_in = None  # the newest collective of the last dump

# Private names of PyTorch. `torch._C._distributed_c10d` has the first two: the second one, of CUDA
# builds, has the collectives of NCCL. `torch.distributed.distributed_c10d._world` has the others.
PRIVATE_DUMPS = ["_dump_fr_trace", "_dump_nccl_trace"]
PRIVATE_GROUPS = ["pg_names", "pg_group_ranks"]


def entries():
    """The recorded collectives, oldest first, and a sentence if PyTorch has no recorder."""
    torch = sys.modules.get("torch")
    module = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    if module is None:
        return [], ""  # not yet imported, or a build without torch.distributed
    functions = [getattr(module, name, None) for name in PRIVATE_DUMPS]
    if not any(functions):
        return [], f"this PyTorch has no {' or '.join(PRIVATE_DUMPS)}: stacks only"
    found = []
    for function in filter(None, functions):
        found += pickle.loads(function()).get("entries", [])
    return sorted(found, key=lambda entry: entry["time_created_ns"]), ""


def groups():
    """The ranks of each process group, by its name, and a sentence if PyTorch does not tell."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return {}, ""  # the script has not imported torch.distributed
    tables = [getattr(getattr(c10d, "_world", None), name, None) for name in PRIVATE_GROUPS]
    if None in tables:
        missing = " or ".join(PRIVATE_GROUPS)
        return {}, f"this PyTorch has no {missing}: the ranks of process groups are unknown"
    names, ranks = tables
    return {names[group]: sorted(of_group) for group, of_group in list(ranks.items())}, ""


def write(state, recorded, note):
    frame = sys._current_frames().get(threading.main_thread().ident)
    stack = [list(line)[:3] for line in traceback.extract_stack(frame)]
    dump = {"rank": RANK, "world_size": int(os.environ.get("WORLD_SIZE", 1)), "state": state}
    dump |= {"pid": os.getpid(), "written": time.time(), "stack": stack}
    of_groups, group_note = groups()
    dump |= {"note": "; ".join(filter(None, [note, group_note]))}
    dump |= {"groups": of_groups, "entries": recorded}
    temporary = FOLDER / f"incomplete-{RANK}"
    temporary.write_text(json.dumps(dump))
    temporary.replace(FOLDER / f"rank-{RANK}.json")  # a reader never sees half a file


def newest(recorded):
    return [(entry["process_group"], entry["record_id"]) for entry in recorded[-1:]]


def watch():
    global waited_in
    seen, since = None, time.monotonic()
    while True:
        time.sleep(SECONDS / 4)
        recorded, note = entries()
        if newest(recorded) != seen:
            seen, since = newest(recorded), time.monotonic()
        # Before the first collective, a script imports packages, which may take long.
        elif time.monotonic() - since >= (SECONDS if recorded else 3 * SECONDS):
            write("waits", recorded, note)
            waited_in = seen


def at_end():
    """If somebody ends a job that hangs, the dumps of the ranks that waited stay as they are."""
    recorded, note = entries()
    if not recorded or newest(recorded) != waited_in:
        with suppress(OSError):
            write("has ended", recorded, note)


# Programs that a rank starts inherit its environment. Only the rank itself is watched.
if os.environ.setdefault("HANG_WATCHED", str(os.getpid())) == str(os.getpid()):
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that PyTorch keeps
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(FOLDER / "nccl-rank-"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"rank-{RANK}.json").unlink(missing_ok=True)  # of an earlier run
    threading.Thread(target=watch, daemon=True).start()
    atexit.register(at_end)
