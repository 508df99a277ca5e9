"""Runs a solution on several processes, and watches what it sends, keeps and computes.

Each rank is a process. It gets its own data only. Another process computes the data of all ranks
and the results of one process. It begins when the ranks have started, so no rank has them in its
memory. Nothing here judges: `check.py` does.
"""

import faulthandler
import inspect
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
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
    alive: list[list[int]]  # when a collective begins: the bytes of each tensor in memory
    peak: list[int]  # the same at the fullest moment of the whole function
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
        raise SystemExit('error: the line that begins with "# Check: " is missing: use --reset')
    return text[: found.start()]


def definitions(text: str) -> str:
    """A script up to its last function: nothing runs."""
    return text[: text.index("\ntorch.manual_seed(0)")]


# Bytes -------------------------------------------------------------------------------------------


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
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
    if name in ("recv_", "recv_any_source_"):
        return "recv", 0
    if name == "barrier":
        return "barrier", 0
    if name in ("reduce_", "broadcast_", "gather_", "scatter_"):
        raise NotImplementedError(
            f"in {name.strip('_')}, one rank is special: all must do the same"
        )
    raise NotImplementedError(f"the check cannot count the bytes of {name}: use another collective")


def place(tensor: torch.Tensor) -> range:
    """The addresses of its bytes, for tensors without gaps."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def no_limit(*_) -> float:
    return float("inf")


def own_line(path: str) -> int:
    """The line of the solution that runs now."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


# What the check cannot see
HIDDEN = [
    (dist.ProcessGroup, "_get_backend", "use the collectives of torch.distributed: these count"),
    (torch.Tensor, "numpy", "keep numbers in tensors: the check cannot see arrays of NumPy"),
    (torch, "from_numpy", "keep numbers in tensors: the check cannot see arrays of NumPy"),
]


class Note:
    """A file that says what a rank does, for the case that the rank hangs or is ended."""

    def __init__(self, file: Path):
        self.file = file

    def write(self, state: str, name: str, line: int = 0) -> None:
        # A rank may be ended while it writes. Then the note before stays whole.
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps([state, name, line]))
        new.rename(self.file)

    def read(self) -> tuple[str, str, int]:
        return tuple(json.loads(self.file.read_text())) if self.file.exists() else ("", "", 0)


class Watch(TorchDispatchMode):
    """Sees every operation of PyTorch, also those of hooks and of the backward pass."""

    def __init__(self, rank: int, n: int, given, limit, path: str, note: Note):
        super().__init__()
        self.rank, self.n, self.path, self.note = rank, n, path, note
        self.limit = limit  # (collective, sizes of tensors) -> the most bytes
        self.given = given
        self.given_storages = {tensor.untyped_storage()._cdata for tensor in given}
        self.storages = {}  # weak references to the memory of tensors, and its bytes
        self.empty = set()  # those that nothing was written into
        self.alive, self.events, self.peak = [], [], []
        self.sent = 0
        self.on_the_way = {}  # requests: name, line, and the places where numbers arrive
        self.early = ""
        self.sent_places = []  # of the tensors whose all-reduce began in this backward pass

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional":
            raise NotImplementedError("use the collectives of torch.distributed")
        if function.namespace == "c10d":
            return self.start_collective(function, args, kwargs or {})
        name = function._opname
        if name in ("mm", "bmm", "addmm"):
            self.events.append("compute")
        elif name == "add_" and any(overlap(place(args[0]), sent) for sent in self.sent_places):
            self.events.append("late gradient")  # autograd adds a gradient to `.grad`
        if not function.is_view and not name.endswith("_like"):  # these read no numbers
            self.find_early_use(tensors_in(args))
        result = function(*args, **(kwargs or {}))
        if name.endswith("_"):
            self.empty -= {x.untyped_storage()._cdata for x in tensors_in(args[:1])}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if name in ("empty", "zeros", "empty_like", "zeros_like", "new_empty", "new_zeros"):
                self.empty.add(storage._cdata)
            if storage._cdata not in self.given_storages:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        sizes = self.sizes_now()
        if sum(sizes) > sum(self.peak):
            self.peak = sizes
        return result

    def sizes_now(self) -> list[int]:
        """Of tensors with numbers. The gradients of what was given belong to the rank."""
        self.storages = {key: x for key, x in self.storages.items() if not x[0].expired()}
        own = {x.grad.untyped_storage()._cdata for x in self.given if x.grad is not None}
        return [s for key, (_, s) in self.storages.items() if key not in own | self.empty]

    def refuse_if_own(self, original, advice: str, *args, **options):
        """Takes the place of a function that the solution itself must not call."""
        if inspect.currentframe().f_back.f_back.f_code.co_filename == self.path:
            raise NotImplementedError(advice)
        return original(*args, **options)

    def start_collective(self, function, args, kwargs):
        name, sent = collective(function._opname, args, self.rank, self.n)
        self.sent += sent
        self.events.append(name)
        self.empty -= {x.untyped_storage()._cdata for x in tensors_in(args)}
        self.alive.append(self.sizes_in_memory())
        if name == "all_reduce":
            self.sent_places += map(place, tensors_in(args[0]))
        line = own_line(self.path)
        self.note.write("began", name, line)
        if self.rank == self.n - 1:
            time.sleep(0.01)  # a slow rank: who does not wait for it, has wrong numbers
        result = function(*args, **kwargs)
        if name != "send":  # a message that leaves may be read
            request = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            self.on_the_way[request] = name, line, [place(x) for x in tensors_in(args[0])]
        return result

    def sizes_in_memory(self) -> list[int]:
        """A thread of gloo holds the tensors of a collective for a moment after the wait. So if
        there are too many bytes, this looks again for half a second."""
        end = time.monotonic() + 0.5
        while True:
            sizes = self.sizes_now()
            if sum(sizes) <= self.limit(len(self.alive), sizes):
                return sizes
            if time.monotonic() > end:
                self.limit = no_limit  # one look is enough
                return sizes
            time.sleep(0.01)

    def find_early_use(self, tensors) -> None:
        for name, line, places in self.on_the_way.values():
            if any(overlap(place(x), arriving) for x in tensors for arriving in places):
                self.early = self.early or (
                    f"line {own_line(self.path)} uses a tensor while the {name} of line {line} "
                    "still writes into it: wait for its request before"
                )

    def wait_for(self, request, original, *args):
        """Takes the place of `request.wait`."""
        line = own_line(self.path)
        name, begun, _ = self.on_the_way.get(request, ("send", line, None))
        self.note.write("waits", name, begun)
        self.events.append("wait")
        result = original(request, *args)
        self.on_the_way.pop(request, None)
        self.note.write("began", name, begun)
        return result

    def run_backward(self, original, *args, **options):
        """Takes the place of the function that runs every backward pass."""
        self.events += ["backward begins"] + ["graph kept"] * bool(args[2])
        self.sent_places.clear()
        try:
            return original(*args, **options)
        finally:
            self.events.append("backward ends")
            self.sent_places.clear()

    def __enter__(self):
        backward, wait = torch.autograd._engine_run_backward, dist.Work.wait
        self.patches = [
            mock.patch.object(
                torch.autograd,
                "_engine_run_backward",
                lambda *args, **options: self.run_backward(backward, *args, **options),
            ),
            mock.patch.object(
                dist.Work, "wait", lambda request, *args: self.wait_for(request, wait, *args)
            ),
        ]
        for owner, name, advice in HIDDEN:
            refuse = partial(self.refuse_if_own, getattr(owner, name), advice)
            hide = mock.patch.object(owner, name, lambda *a, f=refuse, **o: f(*a, **o))
            self.patches.append(hide)
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        for name, line, _ in self.on_the_way.values():
            self.early = (
                self.early or f"the request of the {name} of line {line} was not waited for"
            )
        return super().__exit__(*error)


# Processes ---------------------------------------------------------------------------------------


def copy(value):
    """A copy that has its own numbers only. Pickle would send a view with all numbers behind it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return type(value)(map(copy, value)) if isinstance(value, list | tuple) else value


def reference(connection, script: str, n: int, seed: int) -> None:
    """The process that computes alone. It sends the data and the expected results of each rank."""
    torch.set_num_threads(1)
    alone = {"init_process_group": None, "get_rank": lambda: 0, "get_world_size": lambda: n}
    alone["init_process_group"] = lambda *_: None
    with mock.patch.multiple(dist, **alone), mock.patch.dict(os.environ, WORLD_SIZE=str(n)):
        names = {"__file__": "by-hand", "__name__": "reference"}
        exec(definitions(script), names)
        torch.manual_seed(seed)  # other numbers than those of the script
        parts = names["one_process"]()
    each = []
    for function, data, expected in parts:
        sent_data = [pickle.dumps(copy(data[rank])) for rank in range(n)]
        tensors = [{k: v.detach() for k, v in expected[rank].items()} for rank in range(n)]
        each.append((function.__name__, sent_data, pickle.dumps(tensors)))
    connection.send(each)
    connection.recv()


def a_rank(connection, files, rank: int, n: int, port: int, solution: str, path: str, memory):
    """One rank. It ends when the process that has started it ends it."""
    os.dup2(os.open(files / f"printed-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say when they end a process
    sys.stderr = sys.stdout
    note = Note(files / f"note-{rank}")
    stack = (files / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names of collectives, on each rank
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, **addresses}
    os.environ.update({name: str(value) for name, value in variables.items()})
    parts = connection.recv()
    try:
        names = {"__file__": path, "__name__": "solution"}
        exec(compile(solution, path, "exec"), names)
        for function, data in parts:
            own = pickle.loads(data)
            limit = partial(memory, function, rank, n) if memory else no_limit
            watch = Watch(rank, n, tensors_in(own), limit, path, note)
            connection.send((function, run_part(names, function, own, watch)))
        connection.send(("", None))
    except BaseException as error:
        connection.send(("problem", describe(error, solution, path, rank)))
    sys.stdout.flush()
    connection.recv()


def run_part(names, function: str, data, watch: Watch) -> bytes:
    if function not in names:
        raise LookupError(f"your file has no function `{function}` any more")
    with watch:
        results = names[function](*data)
    watch.note.write("returned", function)
    if not isinstance(results, dict):
        raise TypeError(f"`{function}` has to return a dictionary, such as the one at its end")
    returned = {name: x.detach() for name, x in results.items() if isinstance(x, torch.Tensor)}
    copies = {name: x.clone() for name, x in returned.items()}
    dist.barrier()  # every message has been sent now
    time.sleep(0.05)
    changed = any(not same(copies[name], x) for name, x in returned.items())
    said = sum(names["sent"])
    names["sent"].clear()
    seen = watch.early, watch.sent, said, watch.alive, watch.peak, watch.events
    return pickle.dumps(Part(copies, changed, *seen))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def own_lines(frames, path: str) -> list[int]:
    return [line for file, line in frames if file == path]


def describe(error: BaseException, solution: str, path: str, rank: int) -> str:
    """An exception, with the learner's own line."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    lines = own_lines(frames, path)
    where = f"rank {rank}"
    if lines:
        where += f", line {lines[-1]}: {code_in(solution, lines[-1])}"
    text = f"{where}\n{type(error).__name__}: {error}"
    if "Pair is not connected" in str(error):  # gloo has no connection of a rank with itself
        text = f"{where}\na rank cannot send to itself, or receive from itself: use another rank"
    if isinstance(error, AttributeError) and "'NoneType' object" in str(error):
        text += "\na function has returned nothing: return what the comment of its blank asks for"
        for number, line in enumerate(solution.splitlines(), start=1):
            found = re.match(r"def (\w+)\(", line)
            if lines and found and f"{found[1]}(" in code_in(solution, lines[-1]):
                text += f"\nthis may be the function of line {number}: `{line}`"
    return text


def code_in(solution: str, line: int) -> str:
    lines = solution.splitlines()
    return f"`{lines[line - 1].strip()}`" if 0 < line <= len(lines) else "``"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compute_reference(script: str, n: int, seed: int):
    """For each function: its name, the data of each rank, and the results of each rank."""
    here, there = processes.Pipe()
    process = processes.Process(target=reference, args=(there, script, n, seed), daemon=True)
    process.start()
    there.close()
    parts = here.recv()
    process.kill()
    process.join()
    return [(name, data, pickle.loads(expected)) for name, data, expected in parts]


def run(text: str, path: Path, compute_parts, n: int, seconds: float, memory=None) -> Outcome:
    """Runs the solution on `n` ranks. `compute_parts` gives data, when the ranks have started.
    `memory` is the limit of a technique: (function, rank, ranks, collective, sizes) -> bytes."""
    solution = given_and_yours(text)
    port = free_port()
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        for rank in range(n):
            here, there = processes.Pipe()
            args = (there, files, rank, n, port, solution, str(path), memory)
            process = processes.Process(target=a_rank, args=args, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        parts = compute_parts()
        for rank, (_, connection) in enumerate(ranks):
            connection.send([(function, data[rank]) for function, data, _ in parts])
        outcome = collect(ranks, files, solution, path, seconds)
        for process, _ in ranks:
            process.kill()
        for process, _ in ranks:
            process.join()
        for rank in range(n):
            file = files / f"printed-{rank}"
            outcome.printed.append(file.read_text(errors="replace") if file.exists() else "")
    return outcome


def collect(ranks, files, solution: str, path: Path, seconds: float) -> Outcome:
    outcome = Outcome()
    open_ends = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    end = time.monotonic() + seconds
    while open_ends:
        ready = wait(list(open_ends), timeout=max(0, end - time.monotonic()))
        if not ready:
            outcome.problem = who_waits(ranks, files, open_ends.values(), solution, path, seconds)
            return outcome
        for connection in ready:
            rank = open_ends[connection]
            try:
                function, report = connection.recv()
            except (EOFError, ConnectionResetError):
                outcome.problem = how_it_ended(ranks[rank][0], files, rank, solution)
                return outcome
            if function == "problem":
                outcome.problem = report
                if "by peer" not in report:
                    return outcome
                function = ""  # another rank has ended, so look at that rank first
            if not function:
                del open_ends[connection]
                continue
            in_order = outcome.parts.setdefault(function, [None] * len(ranks))
            in_order[rank] = pickle.loads(report)
    return outcome


def how_it_ended(process, files, rank: int, solution: str) -> str:
    process.join()
    text = f"rank {rank} has ended without a result"
    state, name, line = Note(files / f"note-{rank}").read()
    if state in ("began", "waits"):
        text += f". Its last collective is the {name} of line {line}: {code_in(solution, line)}"
    if process.exitcode == -signal.SIGABRT:  # the library that sends tensors ends the process
        text += "\nPyTorch has ended it. In a collective, the tensors of all ranks must have the "
        text += "size that the other ranks expect"
    return text


def who_waits(ranks, files, waiting, solution: str, path: Path, seconds: float) -> str:
    """Which rank is where, from the stack and the note of each rank."""
    sentences = [f"not ready after {seconds:g} s, so the processes were ended:"]
    for rank in sorted(waiting):
        os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    time.sleep(0.5)
    for rank in range(len(ranks)):
        if rank not in waiting:
            sentences.append(f"rank {rank} is ready")
            continue
        state, name, begun = Note(files / f"note-{rank}").read()
        stack = (files / f"stack-{rank}").read_text()
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', stack)
        lines = own_lines([(file, int(line)) for file, line, _ in frames], str(path))
        if state == "returned" and not lines:
            sentences.append(f"rank {rank} has returned from `{name}`, and waits for the others")
        elif not lines:
            sentences.append(f"rank {rank} has not called a function of yours")
        elif state != "waits":
            sentences.append(f"rank {rank} is on line {lines[0]}: {code_in(solution, lines[0])}")
        else:
            where = f"line {lines[0]}: {code_in(solution, lines[0])}"
            if begun != lines[0]:
                where += f", which began on line {begun}: {code_in(solution, begun)}"
            sentences.append(f"rank {rank} waits in {name} on {where}")
    return "\n".join(sentences)
