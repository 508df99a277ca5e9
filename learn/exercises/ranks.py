"""Runs a solution on several processes, and measures its results, its bytes and its memory.

Each rank is a process. It runs the original and then the solution, with the same data, and sends a
report.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer imports it: here, before the processes start
import torch.distributed as dist
from judge import judge, most_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

# A fork has torch already. Only Linux can fork a process that has imported torch safely.
processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class Report:
    """What a rank sends at its end."""

    rank: int
    rows: list = field(default_factory=list)  # (function, check, what is wrong, what is right)
    problem: str = ""
    hangs: bool = False  # the other ranks will say where they wait, too


# Bytes and memory --------------------------------------------------------------------------------


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def bytes_of(value) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def bytes_sent(name: str, args, rank: int, n: int) -> int:
    """By this rank in a collective, by the formulas of the pages."""
    first = bytes_of(args[0])
    if name in ("allreduce_", "allreduce_coalesced_"):  # a ring
        return 2 * (n - 1) * first // n
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return (n - 1) * bytes_of(args[1])
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return bytes_of(args[1]) - first
    if name == "alltoall_base_":
        rows, counts = args[1], args[4]
        own = rows.split(counts) if counts else rows.chunk(n)
        return rows.nbytes - own[rank].nbytes
    if name == "alltoall_":
        return bytes_of(args[1]) - args[1][rank].nbytes
    if name == "send":
        return first
    if name in ("recv_", "recv_any_source_", "barrier"):
        return 0
    raise NotImplementedError(f"the check cannot count the bytes of {name}: use another collective")


class Watch(TorchDispatchMode):
    """Sees every operation of PyTorch, also those of hooks and of the backward pass."""

    def __init__(self, rank: int, n: int, given, limit: int, path: str):
        super().__init__()
        self.rank, self.n, self.path = rank, n, path
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.limit = limit
        self.storages = WeakIdKeyDictionary()  # the memory of tensors that the function has made
        self.most, self.line = 0, ""  # the bytes at the fullest moment, and where that was
        self.sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        if function.namespace == "c10d":
            self.sent += bytes_sent(name, args, self.rank, self.n)
            if self.rank == self.n - 1:
                time.sleep(0.01)  # a slow rank: who does not wait for it, has wrong numbers
        result = function(*args, **kwargs or {})
        if name.startswith(("empty", "new_empty")) and result.is_floating_point():
            result.fill_(torch.nan)  # so a number that is never written is seen
        if self.limit:
            for tensor in tensors_in([args, result]):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.given:
                    self.storages[storage] = None
            self.look_at_memory()
        return result

    def look_at_memory(self) -> None:
        """A thread of gloo holds the tensors of a collective for a moment after the wait. So if
        there are too many bytes, this looks again for two seconds."""
        if self.most > self.limit:
            return
        end = time.monotonic() + 2
        while (now := self.bytes_now()) > self.limit and time.monotonic() < end:
            time.sleep(0.01)
        if now > self.most:
            self.most, self.line = now, line_in(self.path, traceback.extract_stack())

    def bytes_now(self) -> int:
        return sum(storage.nbytes() for storage in list(self.storages))


def line_in(path: str, frames) -> str:
    """The line of the solution that runs."""
    own = [f"line {frame.lineno}: `{frame.line}`" for frame in frames if frame.filename == path]
    return own[-1] if own else ""


# Processes ---------------------------------------------------------------------------------------


def run_text(text: str, path: str, rank: int) -> dict:
    """What a script defines. Each line that it prints begins with the rank."""
    names = {"__file__": path, "__name__": "solution"}
    names["print"] = functools.partial(print, f"rank {rank} prints:", flush=True)
    exec(compile(text, path, "exec"), names)
    return names


def bytes_of_original(names: dict, rank: int) -> dict[str, int]:
    """For each function, as the list `sent` has them."""
    sent = {}
    for function, data, _ in names["one_process"]():
        function(*data[rank])
        sent[function.__name__] = sum(names["sent"])
        names["sent"].clear()
    return sent


def run_function(names: dict, name: str, data, watch: Watch) -> dict:
    """The tensors that it returns."""
    if name not in names:
        raise LookupError(f"your file has no function `{name}` any more")
    with watch:
        results = names[name](*data)
    if not isinstance(results, dict):
        raise TypeError(f"`{name}` has to return a dictionary, such as the one at its end")
    returned = {key: x.detach() for key, x in results.items() if isinstance(x, torch.Tensor)}
    copies = {key: x.clone() for key, x in returned.items()}
    dist.barrier()  # every message has been sent now
    time.sleep(0.05)
    for key, copy in copies.items():
        if not torch.equal(copy.nan_to_num(), returned[key].nan_to_num()):
            raise RuntimeError(f'"{key}" still changed later: a request was not waited for')
    return copies


def a_rank(technique, original, solution, path, rank, n, seconds, folder, pipe) -> None:
    """Sends one report. The process that has started this one ends it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say when they end a process
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names of collectives, on each rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    store = dist.FileStore(str(folder / "store"), n)  # here the ranks meet
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    dist.init_process_group = lambda *_: None  # the scripts call it, too
    names = run_text(original, technique, rank)
    torch.manual_seed(0)  # all ranks draw the same numbers
    sent = bytes_of_original(names, rank)
    main_thread = threading.get_ident()

    def say_where_it_waits() -> None:
        line = line_in(path, traceback.extract_stack(sys._current_frames()[main_thread]))
        text = f"not ready after {seconds:g} s: {line or 'it waits for the other ranks'}"
        pipe.send(Report(rank, problem=text, hangs=True))

    timer = threading.Timer(seconds, say_where_it_waits)
    timer.start()
    report = Report(rank)
    try:
        own_names = run_text(solution, path, rank)
        torch.manual_seed(0)
        for function, data, expected in names["one_process"]():
            name = function.__name__
            limit = most_bytes(technique, name, rank, n)
            watch = Watch(rank, n, tensors_in(data[rank]), limit, path)
            results = run_function(own_names, name, data[rank], watch)
            report.rows += judge(name, results, watch, sent[name], expected, rank)
    except BaseException as error:
        line = line_in(path, traceback.extract_tb(error.__traceback__))
        report.problem = f"{line}\n{type(error).__name__}: {error}"
    timer.cancel()
    if "by peer" not in report.problem:  # if so, another rank has ended, and is the cause
        pipe.send(report)
    time.sleep(1000)  # the other ranks may still receive something


def run(technique: str, original: str, solution: str, path: Path, n: int, seconds: float):
    """The reports of the ranks, or of some of them if one has a problem."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(n):
            pipe, end_of_rank = processes.Pipe(duplex=False)
            args = (technique, original, solution, str(path), rank, n, seconds, Path(folder))
            ranks.append(processes.Process(target=a_rank, args=(*args, end_of_rank), daemon=True))
            ranks[-1].start()
            end_of_rank.close()
            pipes.append(pipe)
        reports = collect(pipes)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
    return sorted(reports, key=lambda report: report.rank)


def collect(pipes) -> list[Report]:
    waiting, reports = list(pipes), []
    while waiting and not any(report.problem and not report.hangs for report in reports):
        for pipe in multiprocessing.connection.wait(waiting):
            waiting.remove(pipe)
            try:
                reports.append(pipe.recv())
            except EOFError:
                text = "it has ended without a result, as it does if tensors of a collective have "
                text += "other sizes than the other ranks expect"
                reports.append(Report(pipes.index(pipe), problem=text))
    return reports
