"""Runs a solution on several processes, and counts what it sends and how much memory it takes.

Each rank is a process, and gets its own data only. Another process computes the data of all ranks
and the results of one process. Nothing here judges: `check.py` does.
"""

import inspect
import linecache
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from functools import partial
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
    sent: int  # bytes, counted at the collectives
    said: int  # bytes, as the list `sent` of the solution has them
    most: int  # bytes in memory at the fullest moment
    excess: tuple  # if these are too many: the bytes, the limit, and the line


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


# Bytes and memory --------------------------------------------------------------------------------


def tensors_in(value) -> list[torch.Tensor]:
    """Also those that a list has, or a sparse tensor."""
    if isinstance(value, torch.Tensor):
        return [value._indices(), value._values()] if value.is_sparse else [value]
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


def own_line(path: str) -> int:
    """The line of the solution that runs now, or 0."""
    frame = inspect.currentframe()
    while frame and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


def with_code(path: str, line: int) -> str:
    return f"line {line}: `{linecache.getline(path, line).strip()}`"


class Watch(TorchDispatchMode):
    """Sees every operation of PyTorch, also those of hooks and of the backward pass."""

    def __init__(self, rank: int, n: int, given, limit, path: str, note):
        super().__init__()
        self.rank, self.n, self.path = rank, n, path
        self.note = note  # a file: what this rank does, for the case that it hangs or is ended
        self.limit = limit  # (collectives so far, whether it is between two) -> the most bytes
        storages = [tensor.untyped_storage() for tensor in given]
        self.given = {storage._cdata: storage.nbytes() for storage in storages}
        self.storages = {}  # weak references to the memory of tensors
        self.most, self.excess = 0, ()
        self.begun = []  # names of collectives
        self.sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        if function.namespace == "c10d":
            name, sent = collective(name, args, self.rank, self.n)
            self.sent += sent
            self.begun.append(name)
            self.look_at_memory(between=False)
            self.note.write_text(f"began {name} on {with_code(self.path, own_line(self.path))}")
            if self.rank == self.n - 1:
                time.sleep(0.01)  # a slow rank: who does not wait for it, has wrong numbers
            return function(*args, **kwargs or {})
        result = function(*args, **kwargs or {})
        if "empty" in name and result.is_floating_point() and not result.is_sparse:
            result.fill_(torch.nan)  # so a number that is never written is seen
        for tensor in tensors_in(args) + tensors_in(result):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage)
        self.look_at_memory(between=True)
        return result

    def look_at_memory(self, between: bool) -> None:
        """A thread of gloo holds the tensors of a collective for a moment after the wait. So if
        there are too many bytes, this looks again for two seconds."""
        if not self.limit or self.excess:
            return
        limit = self.limit(self.begun, between)
        end = time.monotonic() + 2
        while (now := self.bytes_now()) > limit and time.monotonic() < end:
            time.sleep(0.01)
        self.most = max(self.most, now)
        if now > limit:
            self.excess = now, limit, own_line(self.path)

    def bytes_now(self) -> int:
        """Of tensors that are new, or larger than the given ones."""
        total = 0
        for key, reference in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.storages[key]
            else:
                total += max(0, storage.nbytes() - self.given.get(key, 0))
        return total


# Processes ---------------------------------------------------------------------------------------


def copy(value):
    """A copy that has its own numbers only. Pickle would send a view with all numbers behind it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return type(value)(map(copy, value)) if isinstance(value, list | tuple) else value


def write(file: Path, value) -> None:
    """The file appears when it is complete."""
    file.with_suffix(".incomplete").write_bytes(pickle.dumps(value))
    file.with_suffix(".incomplete").rename(file)


def compute_alone(script: str, n: int, seed: int, file: Path) -> None:
    """A process writes what `compute_reference` returns."""
    torch.set_num_threads(1)
    alone = {"get_rank": lambda: 0, "get_world_size": lambda: n}
    alone["init_process_group"] = lambda *_: None
    with mock.patch.multiple(dist, **alone), mock.patch.dict(os.environ, WORLD_SIZE=str(n)):
        names = {"__file__": "by-hand", "__name__": "reference"}
        exec(script[: script.index("\ntorch.manual_seed(0)")], names)  # no call
        torch.manual_seed(seed)  # other numbers than those of the script
        parts = names["one_process"]()
    each = []
    for function, data, expected in parts:
        data_of_ranks = [pickle.dumps(copy(data[rank])) for rank in range(n)]
        tensors = [{k: v.detach() for k, v in expected[rank].items()} for rank in range(n)]
        each.append((function.__name__, data_of_ranks, tensors))
    write(file, each)


def compute_reference(script: str, n: int, seed: int):
    """For each function: its name, the data of each rank, and the results of each rank. Autograd
    does not work in the forks of a process that has used it, so this one leaves it to another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference"
        process = processes.Process(target=compute_alone, args=(script, n, seed, file))
        process.start()
        process.join()
        return pickle.loads(file.read_bytes())


def a_rank(folder: Path, rank: int, n: int, solution: str, path: str, parts, memory) -> None:
    """One rank. It ends when the process that has started it ends it."""
    os.dup2(os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say when they end a process
    sys.stderr = sys.stdout
    linecache.cache[path] = len(solution), None, solution.splitlines(keepends=True), path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names of collectives, on each rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    store = dist.FileStore(str(folder / "store"), n)  # here the ranks meet
    join = partial(dist.init_process_group, store=store, rank=rank, world_size=n)
    found, problem = {}, ""
    try:
        names = {"__file__": path, "__name__": "solution"}
        with mock.patch.object(dist, "init_process_group", join):
            exec(compile(solution, path, "exec"), names)
        for function, data in parts:
            own = pickle.loads(data)
            limit = partial(memory, function, rank, n) if memory else None
            watch = Watch(rank, n, tensors_in(own), limit, path, folder / f"note-{rank}")
            found[function] = run_part(names, function, own, watch)
    except BaseException as error:
        problem = describe(error, path, rank)
    sys.stdout.flush()
    write(folder / f"result-{rank}", (found, problem))
    time.sleep(1000)  # the other ranks may still receive something


def run_part(names, function: str, data, watch: Watch) -> Part:
    if function not in names:
        raise LookupError(f"your file has no function `{function}` any more")
    with watch:
        results = names[function](*data)
    watch.look_at_memory(between=True)
    watch.note.write_text(f"returned from `{function}`")
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
    return Part(copies, changed, watch.sent, said, watch.most, watch.excess)


def describe(error: BaseException, path: str, rank: int) -> str:
    """An exception, with the learner's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = ", ".join([f"rank {rank}", *(with_code(path, line) for line in lines[-1:])])
    return f"{where}\n{type(error).__name__}: {error}"


def run(text: str, path: Path, reference, n: int, seconds: float, memory=None) -> Outcome:
    """Runs the solution on `n` ranks, with the data of `reference`. `memory` is the limit of a
    technique: (function, rank, ranks, collectives, whether between two) -> bytes."""
    solution = given_and_yours(text)
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        for rank in range(n):
            parts = [(function, data[rank]) for function, data, _ in reference]
            args = (folder, rank, n, solution, str(path), parts, memory)
            ranks.append(processes.Process(target=a_rank, args=args, daemon=True))
            ranks[-1].start()
        outcome = collect(folder, ranks, seconds)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        for rank in range(n):
            outcome.printed.append(text_of(folder / f"printed-{rank}"))
    return outcome


def text_of(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def collect(folder: Path, ranks, seconds: float) -> Outcome:
    """Waits until all ranks are ready, or one of them has a problem, or the time is over."""
    end = time.monotonic() + seconds
    found, lost = {}, ""
    while len(found) < len(ranks):
        for rank, process in enumerate(ranks):
            alive, file = process.is_alive(), folder / f"result-{rank}"
            if rank not in found and file.exists():
                found[rank], problem = pickle.loads(file.read_bytes())
                lost = lost or problem  # if another rank has ended, look at that rank first
                if problem and "by peer" not in problem:
                    return Outcome(problem=problem)
            elif rank not in found and not alive:
                text = f"rank {rank} has ended without a result, as it does if tensors of a "
                text += "collective have other sizes than the other ranks expect. It"
                return Outcome(problem=f"{text} {text_of(folder / f'note-{rank}')}")
        if time.monotonic() > end:
            lines = [f"not ready after {seconds:g} s, so the processes were ended:"]
            lines += [f"rank {r} {text_of(folder / f'note-{r}')}" for r in range(len(ranks))]
            return Outcome(problem="\n".join(lines))
        time.sleep(0.005)
    functions = [] if lost else found[0]
    return Outcome({f: [found[r][f] for r in range(len(ranks))] for f in functions}, lost)
