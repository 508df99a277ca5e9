"""Leaves a dump of each rank that waits, for tools/where-it-hangs.py.

A thread looks at PyTorch's flight recorder. If a rank has begun no collective for HANG_SECONDS,
the thread writes the recorded collectives and the stack of the main thread into the folder
HANG_DUMPS. It writes again while the rank waits, and once more when the script ends. A Python
signal handler could not do this: Python calls it in the main thread, which is blocked.
"""

import atexit
import faulthandler
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["HANG_DUMPS"]).absolute()
SECONDS = float(os.environ.get("HANG_SECONDS", 20))
# Programs that a rank starts inherit its environment, and are not this rank.
OWNER = f"{os.environ.get('RANK')} {os.environ.get('TORCHELASTIC_RUN_ID')}"
IS_CHILD = os.environ.get("HANG_WATCHED") == OWNER
AGENT = "torch.distributed.elastic.agent.server.api"  # torchrun itself has imported this
STARTED = time.time()
known = None  # rank and world size, as soon as this process is a rank
waited_in = None  # the newest collective of the last dump
has_died = False
all_groups = {}


def entries(with_lines):
    """The recorded collectives, oldest first."""
    # Until this module is there, the script still imports torch (see sitecustomize.py).
    if not hasattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache"):
        return []
    # Private functions of PyTorch. The second one, of CUDA builds, has the collectives of NCCL.
    module = sys.modules["torch"]._C._distributed_c10d
    names = [name for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(module, name)]
    dumps = [pickle.loads(getattr(module, name)(True, with_lines, False)) for name in names]
    found = [entry for dump in dumps for entry in dump.get("entries", [])]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def groups():
    """Notes the ranks of each process group, by its name. The script may destroy groups later."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    names = c10d._world.pg_names
    for group, ranks in list(c10d._world.pg_group_ranks.items()):
        # A rank that is no member of a group has an entry, too, but no name for it.
        if group in names:
            all_groups[names[group]] = sorted(ranks)


def frame_of_init():
    """The variables of the call that makes the first group: it waits for the other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return frame.f_locals if frame else {}


def identity():
    """Rank and world size, or None: torchrun, data loaders and other programs are no ranks."""
    global known
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if getattr(c10d, "is_initialized", bool)():
        known = c10d.get_rank(), c10d.get_world_size()
    elif not known and AGENT not in sys.modules:
        of_init = frame_of_init()
        if of_init.get("rank", -1) >= 0:
            return of_init["rank"], of_init["world_size"]
        if "RANK" in os.environ and (of_init or not IS_CHILD):
            return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    return known


def write(state, who, stack=None, **more):
    """If PyTorch does not tell its calls, a note says so, and the stack is there."""
    dump = {"rank": who[0], "world_size": who[1], "state": state, "note": ""}
    dump |= {"entries": [], "groups": all_groups}
    try:
        dump["entries"] = entries(with_lines=True)
        groups()
    except Exception as error:
        dump["note"] = f"the calls of rank {who[0]} cannot be read: {error!r}"
    if stack is None:
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    dump |= {"pid": os.getpid(), "started": STARTED, "written": time.time()}
    dump |= {"stack": [list(line)[:3] for line in stack]}
    temporary = FOLDER / f"incomplete-{who[0]}"
    temporary.write_text(json.dumps(dump | more))
    temporary.replace(FOLDER / f"rank-{who[0]}.json")  # a reader never sees half a file


def newest():
    """Gloo: the oldest call that is not done, as other threads may call more. Else: the newest."""
    with suppress(Exception):
        found = entries(False)
        of_gloo = [entry for entry in found if entry["profiling_name"].startswith("gloo:")]
        waits = [entry for entry in of_gloo if entry["state"] != "completed"]
        return [(e["process_group"], e["record_id"]) for e in (waits or found[-1:])[:1]]
    return []


def watch(stacks):
    global waited_in
    seen, since = None, time.time()
    while True:
        end = time.time() + SECONDS / 4
        while time.time() < end:
            time.sleep(min(0.2, SECONDS / 4))
            with suppress(Exception):
                groups()
            if not known and identity() and known:
                stacks.write(f"rank {known[0]} of {known[1]}\n")
        who = identity()
        if who:
            (FOLDER / "beat").touch()
        # Before its first collective, a script works as long as it imports packages.
        calls = newest()
        if (now := calls or len(sys.modules)) != seen:
            seen, since = now, time.time()
            if not calls:
                os.utime(stacks.name)  # so that the tool sees it
        elif who and time.time() - since >= (SECONDS if calls else 3 * SECONDS):
            write("waits", who, since=since)
            waited_in = seen


def start():
    """The watcher, and a file that gets the stacks if a signal ends this process."""
    stacks = (FOLDER / f"stacks-{os.getpid()}").open("w", buffering=1)
    if "TORCHELASTIC_RUN_ID" in os.environ and not IS_CHILD:
        stacks.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, chain=True)
    faulthandler.register(signal.SIGUSR2, stacks)  # the tool asks for stacks
    threading.Thread(target=watch, args=[stacks], daemon=True).start()


def at_error(kind, error, trace):
    global has_died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # that of a data loader raises a second error
    # The parent of torch.multiprocessing.spawn has the error of the rank.
    who = identity() or (getattr(error, "error_index", None), 0)
    if who[0] is not None:
        has_died = True
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        stack = traceback.extract_tb(trace)
        if hasattr(error, "error_index"):  # its text has the traceback of the rank
            inner = re.findall(r'  File "(.*)", line (\d+), in (.*)', str(error))
            stack = [(file, int(number), function) for file, number, function in inner]
            lines = lines[-1:]
        message = ": ".join([kind.__name__, *lines[:1]])
        write("has died", who, stack, error=message)
    original_hook(kind, error, trace)


def at_end():
    """If somebody ends a job that hangs, the dumps of the ranks that waited stay as they are."""
    who, now = identity(), newest()
    if who and not has_died and (not now or now != waited_in):
        with suppress(OSError):
            write("has ended", who)


os.environ["HANG_WATCHED"] = OWNER
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that PyTorch keeps
os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(FOLDER / "nccl-rank-"))
FOLDER.mkdir(parents=True, exist_ok=True)
original_hook, sys.excepthook = sys.excepthook, at_error
start()
# A process that is forked before it is a rank may become one. Data loaders are forked later.
os.register_at_fork(after_in_child=lambda: identity() or start())
atexit.register(at_end)
