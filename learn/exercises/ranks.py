"""Runs a solution on several processes, and watches what it sends, keeps and computes.

Each rank is a process. It gets its own data only. Another process computes the data of all ranks
and the results of one process. It begins when the ranks have started, so no rank has them in its
memory. Nothing here judges: `check.py` does.
"""

import inspect
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # the first step of an optimizer imports it: here, before the processes start
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# A fork has torch already. Only Linux can fork a process that has imported torch safely.
processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class Part:
    """What a function of a solution did on one rank."""

    results: dict  # tensors by name
    changed_later: bool  # numbers arrived after the function had returned
    early: str  # a sentence if the function did not wait for numbers. Empty if it did.
    sent: int  # bytes, counted at the collectives
    said: int  # bytes, as the list `sent` of the solution has them
    most: int  # bytes in memory at the fullest moment
    excess: tuple  # if these are too many: the bytes of each tensor, the limit, and the line
    products: int  # multiplications in matrix products
    events: list[str]  # collectives, waits, matrix products, backward passes, late gradients


@dataclass
class Outcome:
    """What all ranks did. `parts[function][rank]`, or `problem`, one or more sentences."""

    parts: dict[str, list[Part]] = field(default_factory=dict)
    problem: str = ""
    printed: list[str] = field(default_factory=list)  # by rank


def given_and_yours(text: str) -> str:
    """A script without its check, which holds the results of one process."""
    found = re.search(r"^# Check: ", text, re.MULTILINE)
    if not found:
        raise SystemExit('error: the line that begins with "# Check: " is missing: put it back')
    return text[: found.start()]


# Bytes -------------------------------------------------------------------------------------------


def tensors_in(value) -> list[torch.Tensor]:
    """Also those that a list has, or a sparse tensor."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            return [value]
        return [value._indices(), value._values()] if value.is_sparse else [value.values()]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def bytes_of(value) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def collective(name: str, args, rank: int, n: int) -> tuple[str, int]:
    """Its plain name, and the bytes that this rank sends in it, by the formulas of the pages."""
    first = bytes_of(args[0])
    if name in ("allreduce_", "allreduce_coalesced_"):  # a ring
        return "all_reduce", 2 * (n - 1) * first // n
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return "all_gather", (n - 1) * bytes_of(args[1])
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return "reduce_scatter", bytes_of(args[1]) - first
    if name == "alltoall_base_":
        rows, counts = args[1], args[4]
        own = rows.split(counts) if counts else rows.chunk(n)
        return "all_to_all", rows.nbytes - own[rank].nbytes
    if name == "alltoall_":
        return "all_to_all", bytes_of(args[1]) - args[1][rank].nbytes
    if name == "send":
        return "send", first
    if name in ("recv_", "recv_any_source_", "barrier"):
        return name.strip("_"), 0
    raise NotImplementedError(f"the check cannot count the bytes of {name}: use another collective")


def place(tensor: torch.Tensor) -> range:
    """The addresses of its bytes, for tensors without gaps."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def multiplications(name: str, args) -> int:
    """Of a matrix product. 0 for other operations."""
    if name in ("addmm", "addmv", "baddbmm"):
        args = args[1:]
    elif name not in ("mm", "mv", "bmm", "dot"):
        return 0
    first, second = args[:2]
    return first.numel() * (second.shape[-1] if second.dim() > 1 else 1)


# Where the check can look -------------------------------------------------------------------------

MESSAGES = "use collectives of torch.distributed, in this process and thread: no others are seen"
NUMBERS = "keep numbers in tensors: the check cannot see them in lists, arrays, files and pickles"
PROCESSES = r"subprocess\.|socket\.|mmap\.|os\.(system|fork|exec|posix_spawn)"


def calls(path: str) -> list[tuple[str, int]]:
    """File and line of each function that runs now, the last one first, back to the solution.
    Nothing if the solution has not called them."""
    found = []
    frame = inspect.currentframe()
    while frame:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        if frame.f_code.co_filename == path:
            return found
        frame = frame.f_back
    return []


def own_line(path: str) -> int:
    """The line of the solution that runs now."""
    return calls(path)[-1][1] if calls(path) else 0


def with_code(path: str, line: int) -> str:
    return f"line {line}: `{linecache.getline(path, line).strip()}`"


def refuse_what_is_outside(path: str) -> None:
    """Python reports each process that starts, each socket, and each file that opens."""

    def hear(event: str, args) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event == "ctypes.string_at") and calls(path):
            raise NotImplementedError(NUMBERS)
        if re.match(PROCESSES, event) and calls(path):
            raise NotImplementedError(MESSAGES)

    sys.dont_write_bytecode = True  # an import is no such file
    sys.addaudithook(hear)


def is_blank(storage: torch.UntypedStorage) -> bool:
    """Whether the memory has one number only, as `zeros` and `empty` give it."""
    numbers = torch.empty(0, dtype=torch.int64).set_(storage)
    return bool((numbers == numbers[:1]).all())


class Watch(TorchDispatchMode):
    """Sees every operation of PyTorch, also those of hooks and of the backward pass."""

    def __init__(self, rank: int, n: int, given, limit, path: str, connection):
        super().__init__()
        self.rank, self.n, self.path, self.connection = rank, n, path, connection
        self.limit = limit  # (events, whether it is between two collectives) -> the most bytes
        storages = [tensor.untyped_storage() for tensor in given]
        self.given = {storage._cdata: storage.nbytes() for storage in storages}
        self.storages = {}  # weak references to the memory of tensors
        self.most, self.excess = 0, ()
        self.events = []
        self.sent = self.products = self.numbers_read = 0
        self.on_the_way = {}  # requests: name with line, and the places where numbers arrive
        self.requests = weakref.WeakKeyDictionary()  # of futures
        self.early = ""
        self.sent_places = []  # of the tensors whose all-reduce began in this backward pass

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "_c10d_functional":
            raise NotImplementedError(MESSAGES)
        if function.namespace == "c10d":
            return self.start_collective(function, args, kwargs)
        name = function._opname
        if name == "add_" and any(overlap(place(args[0]), sent) for sent in self.sent_places):
            self.events.append("late gradient")  # autograd adds a gradient to `.grad`
        if name == "_local_scalar_dense":
            self.read_numbers(1)
        if not function.is_view and not name.endswith("_like"):  # these read no numbers
            self.find_early_use(tensors_in(args))
        result = function(*args, **kwargs)
        if "empty" in name and result.is_floating_point() and not result.is_sparse:
            result.fill_(torch.nan)  # so a number that is never written is seen
        if products := multiplications(name, args):
            self.products += products
            self.events.append("compute")
        for tensor in tensors_in(args) + tensors_in(result):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage)
        self.look_at_memory(between=True)
        return result

    def start_collective(self, function, args, kwargs):
        if dist.distributed_c10d.__file__ not in [file for file, _ in calls(self.path)]:
            raise NotImplementedError(MESSAGES)
        name, sent = collective(function._opname, args, self.rank, self.n)
        self.sent += sent
        self.events.append(name)
        self.look_at_memory(between=False, arriving=tensors_in(args))
        if name == "all_reduce":
            self.sent_places += map(place, tensors_in(args[0]))
        begun = f"{name} of line {own_line(self.path)}"
        self.note(f"computes, after the {begun}")
        if self.rank == self.n - 1:
            time.sleep(0.01)  # a slow rank: who does not wait for it, has wrong numbers
        result = function(*args, **kwargs)
        if name != "send":  # a message that leaves may be read
            request = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            self.on_the_way[request] = begun, [place(x) for x in tensors_in(args[0])]
        return result

    def note(self, doing: str) -> None:
        """What this rank does, for the case that it hangs or is ended."""
        self.connection.send(("note", doing))

    def look_at_memory(self, between: bool, arriving=()) -> None:
        """A thread of gloo holds the tensors of a collective for a moment after the wait. So if
        there are too many bytes, this looks again for two seconds."""
        if not self.limit or self.excess:
            return
        limit = self.limit(self.events, between)
        end = time.monotonic() + 2
        while sum(sizes := self.sizes_now(limit, arriving)) > limit and time.monotonic() < end:
            time.sleep(0.01)
        self.most = max(self.most, sum(sizes))
        if sum(sizes) > limit:
            self.excess = sizes, limit, own_line(self.path)

    def sizes_now(self, limit: int, arriving) -> list[int]:
        """Of tensors that are new or larger. Blank ones count if that is within the limit."""
        alive = {}
        for key, reference in self.storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() > self.given.get(key, 0):
                alive[key] = storage
        self.storages = {key: self.storages[key] for key in alive}
        more = {key: x.nbytes() - self.given.get(key, 0) for key, x in alive.items()}
        if sum(more.values()) <= limit:
            return list(more.values())
        used = {tensor.untyped_storage()._cdata for tensor in arriving}
        return [size for key, size in more.items() if key in used or not is_blank(alive[key])]

    def read_numbers(self, count: int) -> None:
        """In `fsdp`, a list of numbers could hide a weight. To print a tensor is allowed."""
        files = [file for file, _ in calls(self.path)]
        if self.limit and not any(file.endswith("_tensor_str.py") for file in files):
            self.numbers_read += count
            if self.numbers_read > 200:
                raise NotImplementedError(NUMBERS)

    def find_early_use(self, tensors) -> None:
        for begun, places in self.on_the_way.values():
            if any(overlap(place(x), arriving) for x in tensors for arriving in places):
                self.early = self.early or (
                    f"line {own_line(self.path)} uses a tensor while the {begun} still writes "
                    "into it: wait for its request before"
                )

    # Functions that take the place of others. `original` is the other function.

    def wait_for(self, original, waiting, *args):
        """For `wait` of a request, or of its future."""
        request = self.requests.get(waiting, waiting)
        begun, _ = self.on_the_way.pop(request, ("send", None))
        self.note(f"waits for the {begun}, on {with_code(self.path, own_line(self.path))}")
        self.events.append("wait")
        with torch._C._DisableTorchDispatch():  # gloo may move the numbers that have arrived
            result = original(waiting, *args)
        self.note(f"computes, after the {begun}")
        return result

    def follow(self, original, waiting, *args):
        """For `get_future` and `then`: who waits for their result, waits for the request."""
        result = original(waiting, *args)
        self.requests[result] = self.requests.get(waiting, waiting)
        return result

    def run_backward(self, original, *args, **options):
        """For the function that runs every backward pass."""
        self.events += ["backward begins"] + ["graph kept"] * bool(args[2])
        self.sent_places.clear()
        try:
            return original(*args, **options)
        finally:
            self.events.append("backward ends")
            self.sent_places.clear()

    def to_list(self, original, tensor):
        self.read_numbers(tensor.numel())
        return original(tensor)

    def refuse(self, original, *args, **options):
        """For what takes numbers out of tensors, or out of what the check sees."""
        if calls(self.path):
            is_tensor = isinstance(args[0], torch.Tensor)
            raise NotImplementedError(NUMBERS if is_tensor else MESSAGES)
        return original(*args, **options)

    def __enter__(self):
        places = [
            (self.run_backward, torch.autograd, "_engine_run_backward"),
            (self.wait_for, dist.Work, "wait"),
            (self.wait_for, torch.futures.Future.__base__, "wait"),
            (self.follow, dist.Work, "get_future"),
            (self.follow, torch.futures.Future.__base__, "then"),
            (self.to_list, torch.Tensor, "tolist"),
            (self.refuse, threading.Thread, "start"),
            (self.refuse, multiprocessing.process.BaseProcess, "start"),
        ]
        places += [(self.refuse, torch.Tensor, x) for x in ("numpy", "__dlpack__", "__reduce_ex__")]
        places += [(self.refuse, dist.Store, x) for x in ("set", "multi_set", "append", "add")]
        self.patches = []
        for instead, owner, name in places:
            call = partial(instead, getattr(owner, name))
            patch = mock.patch.object(owner, name, lambda *a, f=call, **o: f(*a, **o))
            self.patches.append(patch)
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()
        self.look_at_memory(between=True)
        for begun, _ in self.on_the_way.values():
            self.early = self.early or f"the request of the {begun} was not waited for"


# Processes ---------------------------------------------------------------------------------------


def copy(value):
    """A copy that has its own numbers only. Pickle would send a view with all numbers behind it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return type(value)(map(copy, value)) if isinstance(value, list | tuple) else value


def reference(script: str, n: int, seed: int) -> bytes:
    """The process that computes alone, and returns what `compute_reference` returns."""
    torch.set_num_threads(1)
    alone = {"init_process_group": None, "get_rank": lambda: 0, "get_world_size": lambda: n}
    alone["init_process_group"] = lambda *_: None
    with mock.patch.multiple(dist, **alone), mock.patch.dict(os.environ, WORLD_SIZE=str(n)):
        names = {"__file__": "by-hand", "__name__": "reference"}
        exec(script[: script.index("\ntorch.manual_seed(0)")], names)  # no call
        torch.manual_seed(seed)  # other numbers than those of the script
        parts = names["one_process"]()
    each = []
    for function, data, expected in parts:
        sent_data = [pickle.dumps(copy(data[rank])) for rank in range(n)]
        tensors = [{k: v.detach() for k, v in expected[rank].items()} for rank in range(n)]
        each.append((function.__name__, sent_data, tensors))
    return pickle.dumps(each)


def a_rank(connection, files, rank: int, n: int, solution: str, path: str, memory):
    """One rank. It ends when the process that has started it ends it."""
    os.dup2(os.open(files / f"printed-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say when they end a process
    sys.stderr = sys.stdout
    linecache.cache[path] = len(solution), None, solution.splitlines(keepends=True), path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names of collectives, on each rank
    port, parts = connection.recv()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}  # a store is there
    os.environ.update({name: str(value) for name, value in variables.items()})
    refuse_what_is_outside(path)
    try:
        if private := re.search(r"[.\"']_[a-zA-Z]\w*", solution):
            name = private[0][1:]  # a private function could compute unseen
            raise NotImplementedError(f"`{name}` is private: use public functions of PyTorch")
        names = {"__file__": path, "__name__": "solution"}
        exec(compile(solution, path, "exec"), names)
        for function, data in parts:
            own = pickle.loads(data)
            limit = partial(memory, function, rank, n) if memory else None
            watch = Watch(rank, n, tensors_in(own), limit, path, connection)
            connection.send((function, run_part(names, function, own, watch)))
        connection.send(("", None))
    except BaseException as error:
        connection.send(("problem", describe(error, path, rank)))
    sys.stdout.flush()
    connection.recv()


def run_part(names, function: str, data, watch: Watch) -> bytes:
    if function not in names:
        raise LookupError(f"your file has no function `{function}` any more")
    with watch:
        results = names[function](*data)
    watch.note(f"has returned from `{function}`, and waits for the others")
    if not isinstance(results, dict):
        raise TypeError(f"`{function}` has to return a dictionary, such as the one at its end")
    returned = {name: x.detach() for name, x in results.items() if isinstance(x, torch.Tensor)}
    copies = {name: x.clone() for name, x in returned.items()}
    dist.barrier()  # every message has been sent now
    time.sleep(0.05)
    pairs = [(copies[name].nan_to_num(), x.nan_to_num()) for name, x in returned.items()]
    changed = not all(torch.equal(before, after) for before, after in pairs)
    said = sum(names["sent"])
    names["sent"].clear()
    counted = watch.sent, said, watch.most, watch.excess, watch.products
    return pickle.dumps(Part(copies, changed, watch.early, *counted, watch.events))


def describe(error: BaseException, path: str, rank: int) -> str:
    """An exception, with the learner's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = ", ".join([f"rank {rank}", *(with_code(path, line) for line in lines[-1:])])
    if "Pair is not connected" in str(error):  # gloo has no connection of a rank with itself
        return f"{where}\na rank cannot send to itself, or receive from itself: use another rank"
    return f"{where}\n{type(error).__name__}: {error}"


def compute_reference(script: str, n: int, seed: int):
    """For each function: its name, the data of each rank, and the results of each rank."""
    with ProcessPoolExecutor(1, mp_context=processes) as pool:
        return pickle.loads(pool.submit(reference, script, n, seed).result())


def run(text: str, path: Path, compute_parts, n: int, seconds: float, memory=None) -> Outcome:
    """Runs the solution on `n` ranks. `compute_parts` gives data, when the ranks have started.
    `memory` is the limit of a technique: (function, rank, ranks, events, between) -> bytes."""
    solution = given_and_yours(text)
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        for rank in range(n):
            here, there = processes.Pipe()
            args = (there, files, rank, n, solution, str(path), memory)
            process = processes.Process(target=a_rank, args=args, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        parts = compute_parts()
        # The ranks meet at this store. It has threads, so it begins when no process forks any more.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, (_, connection) in enumerate(ranks):
            own_parts = [(function, data[rank]) for function, data, _ in parts]
            connection.send((store.port, own_parts))
        outcome = collect(ranks, seconds)
        for process, _ in ranks:
            process.kill()
        for process, _ in ranks:
            process.join()
        for rank in range(n):
            file = files / f"printed-{rank}"
            outcome.printed.append(file.read_text(errors="replace") if file.exists() else "")
    return outcome


def collect(ranks, seconds: float) -> Outcome:
    outcome = Outcome()
    notes = ["has begun no collective"] * len(ranks)
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    end = time.monotonic() + seconds
    while waiting:
        ready = wait(list(waiting), timeout=max(0, end - time.monotonic()))
        if not ready or time.monotonic() > end:
            sentences = [f"not ready after {seconds:g} s, so the processes were ended:"]
            for rank, note in enumerate(notes):
                doing = note if rank in waiting.values() else "is ready"
                sentences.append(f"rank {rank} {doing}")
            outcome.problem = "\n".join(sentences)
            return outcome
        for connection in ready:
            rank = waiting[connection]
            try:
                function, report = connection.recv()
            except (EOFError, ConnectionResetError):
                outcome.problem = how_it_ended(ranks[rank][0], rank, notes[rank])
                return outcome
            if function == "note":
                notes[rank] = report
                continue
            if function == "problem":
                outcome.problem = report
                if "by peer" not in report:
                    return outcome
                function = ""  # another rank has ended, so look at that rank first
            if not function:
                del waiting[connection]
                continue
            in_order = outcome.parts.setdefault(function, [None] * len(ranks))
            in_order[rank] = pickle.loads(report)
    return outcome


def how_it_ended(process, rank: int, note: str) -> str:
    process.join()
    text = f"rank {rank} has ended without a result. The last that was seen of it: it {note}"
    if process.exitcode == -signal.SIGABRT:  # the library that sends tensors ends the process
        text += "\nPyTorch has ended it. In a collective, the tensors of all ranks must have the "
        text += "size that the other ranks expect"
    return text
