"""Runs a solution on several processes, and watches what it sends, keeps and computes.

Each rank is a process. It gets its own data, and never the results of one process: a process of its
own computes these. Nothing here judges: `check.py` does.
"""

import faulthandler
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
    sent: int  # bytes, counted at the collectives
    said: int  # bytes, as the list `sent` of the solution has them
    peak: int  # the most bytes of tensors that are alive when a collective begins
    events: list[str]  # collectives, matrix products, backward passes, late gradients, in order


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


class Watch(TorchDispatchMode):
    """Sees every operation of PyTorch, also those of hooks and of the backward pass."""

    def __init__(self, rank: int, n: int, given):
        super().__init__()
        self.rank, self.n = rank, n
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.alive = {}  # weak references to the memory of tensors, and its bytes
        self.sent = self.peak = 0
        self.events = []
        self.sent_places = []  # of the tensors whose all-reduce began in this backward pass

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        if function.namespace == "_c10d_functional":
            raise NotImplementedError("use the collectives of torch.distributed")
        if function.namespace == "c10d":
            plain, sent = collective(name, args, self.rank, self.n)
            self.sent += sent
            self.events.append(plain)
            self.peak = max(self.peak, self.bytes_alive())
            if plain == "all_reduce":
                self.sent_places += map(place, tensors_in(args[0]))
            if self.rank == self.n - 1:
                time.sleep(0.01)  # a slow rank: who does not wait for it, has wrong numbers
        elif name in ("mm", "bmm", "addmm"):
            self.events.append("compute")
        elif name == "add_" and any(overlap(place(args[0]), sent) for sent in self.sent_places):
            self.events.append("late gradient")  # autograd adds a gradient to `.grad`
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        self.alive = {key: x for key, x in self.alive.items() if not x[0].expired()}
        return sum(size for _, size in self.alive.values())

    def __enter__(self):
        original = torch.autograd._engine_run_backward

        def backward(*args, **options):
            self.events.append("backward begins")
            self.sent_places.clear()
            try:
                return original(*args, **options)
            finally:
                self.events.append("backward ends")
                self.sent_places.clear()

        self.patch = mock.patch.object(torch.autograd, "_engine_run_backward", backward)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)


# Processes ---------------------------------------------------------------------------------------


def reference(connection, script: str, n: int) -> None:
    """The process that computes alone. It sends the data and the expected results of each rank."""
    torch.set_num_threads(1)
    alone = {"init_process_group": None, "get_rank": lambda: 0, "get_world_size": lambda: n}
    alone["init_process_group"] = lambda *_: None
    with mock.patch.multiple(dist, **alone), mock.patch.dict(os.environ, WORLD_SIZE=str(n)):
        names = {"__file__": "by-hand", "__name__": "reference"}
        exec(definitions(script), names)
        torch.manual_seed(1)  # other numbers than those of the script
        parts = names["one_process"]()
    each = []
    for function, data, expected in parts:
        # Without the gradients that tensors carry: pickle leaves them out
        sent_data = [pickle.dumps(data[rank]) for rank in range(n)]
        tensors = [{k: v.detach() for k, v in expected[rank].items()} for rank in range(n)]
        each.append((function.__name__, sent_data, pickle.dumps(tensors)))
    connection.send(each)
    connection.recv()


def a_rank(connection, files, rank: int, n: int, port: int, solution: str, path: str, parts):
    """One rank. It ends when the process that has started it ends it."""
    printed = os.open(files / f"printed-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    stack = (files / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of old names of collectives, on each rank
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, **addresses}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        names = {"__file__": path, "__name__": "solution"}
        exec(compile(solution, path, "exec"), names)
        for function, data in parts:
            connection.send((function, run_part(names, function, pickle.loads(data), rank, n)))
        connection.send(("", None))
    except BaseException as error:
        connection.send(("problem", describe(error, solution, path, rank)))
    sys.stdout.flush()
    connection.recv()


def run_part(names, function: str, data, rank: int, n: int) -> bytes:
    if function not in names:
        raise LookupError(f"your file has no function `{function}` any more")
    with Watch(rank, n, tensors_in(data)) as watch:
        results = names[function](*data)
    if not isinstance(results, dict):
        raise TypeError(f"`{function}` has to return a dictionary, such as the one at its end")
    returned = {name: x.detach() for name, x in results.items() if isinstance(x, torch.Tensor)}
    copies = {name: x.clone() for name, x in returned.items()}
    dist.barrier()  # every message has been sent now
    time.sleep(0.05)
    changed = any(not same(copies[name], x) for name, x in returned.items())
    said = sum(names["sent"])
    names["sent"].clear()
    return pickle.dumps(Part(copies, changed, watch.sent, said, watch.peak, watch.events))


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
        where += f", line {lines[-1]}: `{solution.splitlines()[lines[-1] - 1].strip()}`"
    text = f"{where}\n{type(error).__name__}: {error}"
    if isinstance(error, AttributeError) and "'NoneType' object" in str(error):
        text += "\na function has returned nothing: return what the comment of its blank asks for"
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compute_reference(script: str, n: int):
    """For each function: its name, the data of each rank, and the results of each rank."""
    here, there = processes.Pipe()
    process = processes.Process(target=reference, args=(there, script, n), daemon=True)
    process.start()
    there.close()
    parts = here.recv()
    process.kill()
    process.join()
    return [(name, data, pickle.loads(expected)) for name, data, expected in parts]


def run(text: str, path: Path, parts, n: int, seconds: float) -> Outcome:
    """Runs the solution on `n` ranks, with the data of `parts`."""
    solution = given_and_yours(text)
    port = free_port()
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        for rank in range(n):
            here, there = processes.Pipe()
            own = [(function, data[rank]) for function, data, _ in parts]
            args = (there, files, rank, n, port, solution, str(path), own)
            process = processes.Process(target=a_rank, args=args, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
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
            except EOFError:
                outcome.problem = f"rank {rank} has ended without a result"
                return outcome
            if function == "problem":
                outcome.problem = report
                return outcome
            if not function:
                del open_ends[connection]
                continue
            in_order = outcome.parts.setdefault(function, [None] * len(ranks))
            in_order[rank] = pickle.loads(report)
    return outcome


def who_waits(ranks, files, waiting, solution: str, path: Path, seconds: float) -> str:
    """Which rank is where, from the stack of each rank."""
    sentences = [f"not ready after {seconds:g} s, so the processes were ended:"]
    for rank in sorted(waiting):
        os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    time.sleep(0.5)
    for rank in range(len(ranks)):
        if rank not in waiting:
            sentences.append(f"rank {rank} is ready")
            continue
        stack = (files / f"stack-{rank}").read_text()
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', stack)
        lines = own_lines([(file, int(line)) for file, line, _ in frames], str(path))
        if not lines:  # ready with the function, and waits for the others
            sentences.append(f"rank {rank} has returned from its function")
            continue
        call = solution.splitlines()[lines[0] - 1].strip()
        inner = [name for file, _, name in frames if file.endswith("distributed_c10d.py")]
        name = f" in {inner[-1]}" if inner else ""
        sentences.append(f"rank {rank} waits{name} on line {lines[0]}: `{call}`")
    return "\n".join(sentences)
