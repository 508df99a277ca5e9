"""Chapters on two "nodes" with a slow link between them: their speed, and the bytes on the link.

    sudo .venv/bin/python benchmarks/slow-links.py                  # Linux, iproute2; no GPU
    sudo .venv/bin/python benchmarks/slow-links.py --rates 100 --methods DDP FSDP --rounds 1

The nodes are network namespaces of this machine, with two processes each. Linux's traffic control
(`tc`, a token bucket with a burst of 4 ms) slows the link between them down in both directions.
Each round runs all methods at all rates, in an order that alternates. All train the demo's model,
with four key-value heads, on the same global batches in fp32. The script ends with an error where
the losses differ, except the losses with compressed gradients.

link       asked for; and Mbit/s that a stream of bytes gets through it, measured
tokens/s   of the median step (with local steps the mean) and round, relative to the same method
           over the link as it is; least and most of the rounds. The processes share the cores of
           one machine, so a link must be quite slow before a step takes longer
MB         per step that leave the first node, by the counters of its interface; computed for gloo,
           which runs here; and for NCCL, whose reduce-scatter sends half as much
"""

import argparse
import ctypes
import datetime
import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it
os.environ["GOMP_SPINCOUNT"] = "10000"
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"

# What a server process imports once for all ranks
PRELOAD = ["comet_ml", "datasets", "torch", "transformers.models.auto.modeling_auto"]
PRELOAD += ["transformers.modeling_layers", "transformers.models.llama.modeling_llama"]
REPOSITORY = Path(__file__).resolve().parents[1]
WARMUP = 3  # steps; DDP rebuilds its buckets after the first one
SAMPLES, LENGTH = 8, 256  # global batch
NODES = 2
ADDRESS = "10.77.0.{}"  # of node 1 and 2, in namespaces that nobody else sees


sys.path.append(str(REPOSITORY / "tools"))
from models import script_of  # noqa: E402

FORMULAE = importlib.import_module("estimate-scaling")


# -- In the process of a rank ----------------------------------------------------------------------


def enter(node: str) -> None:
    """Moves this process into a network namespace, as `ip netns exec` would."""
    handle = os.open(f"/run/netns/{node}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {node}")


def sent_over_link() -> int:
    """Bytes that have left this namespace."""
    (line,) = (x for x in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in x)
    return int(line.partition(":")[2].split()[8])


def run_chapter(node: str, output: Path, env: dict, chapter: str, flags: list[str]) -> None:
    """Runs it in a namespace; rank 0 prints the time and the bytes sent after each step."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    enter(node)
    os.environ |= {name: str(value) for name, value in env.items()}
    import torch

    torch.set_num_threads(1)
    seen = []
    original = torch.optim.AdamW.step

    def step(self, *args, **options):
        result = original(self, *args, **options)
        seen.append((time.perf_counter(), sent_over_link()))
        return result

    torch.optim.AdamW.step = step
    sys.argv = [str(chapter), *map(str, flags)]
    runpy.run_path(str(chapter), run_name="__main__")
    if env["RANK"] == 0:
        # The chapters silence `sys.stdout` on ranks above 0.
        print("\nseen " + json.dumps(seen), file=sys.__stdout__, flush=True)


# -- The methods, and what they send ---------------------------------------------------------------


@dataclass
class Method:
    name: str
    chapter: str
    flags: list = field(default_factory=list)
    groups: int = 0  # that share the global batch; 0: as many as there are ranks

    @property
    def script(self) -> Path:
        return script_of(int(self.chapter[:2]))


METHODS = [
    Method("DDP", "02-ddp"),
    Method("FSDP", "03-fsdp"),
    Method("HSDP", "05-multi-node"),
    Method("TP in a node", "06-tensor-parallel", ["--tensor-parallel", 2], groups=2),
    Method("TP over the link", "06-tensor-parallel", ["--tensor-parallel", 4], groups=1),
    # 2 pipelines. Both have their first stage on the first node, and FSDP stays within a node.
    Method("PP over the link", "07-pipeline-parallel", ["--pipeline-parallel", 2], groups=2),
    Method("DDP, bf16", "08-gradient-compression", ["--compress", "bf16"]),
    Method("DDP, PowerSGD", "08-gradient-compression", ["--compress", "powersgd"]),
    # It logs once per round, since each log crosses the link, too.
    Method("local steps", "15-local-steps", ["--inner-steps", 10, "--log-freq", 10]),
]
# Compression rounds the gradients, and replicas with local steps differ, so these losses are
# compared with their own.
OTHERS = {"DDP, bf16", "DDP, PowerSGD", "local steps"}
ROUND = 10  # steps, with local steps: a run measures whole rounds
MICRO_BATCHES = 4  # of a pipeline


def computed(method: Method, model, processes: int, library: str) -> float:
    """Bytes per step that leave the first node, in fp32; NaN where there is no formula."""
    ranks = NODES * processes
    args = argparse.Namespace(batch_size=SAMPLES // ranks, seq_length=LENGTH, dtype="fp32")
    args.gradient_accumulation_steps, args.activation_checkpointing = 1, False
    args.schedule, args.gathers, args.reshard_after_forward = "1f1b", 2, True
    args.tensor_parallel = args.pipeline_parallel = ranks // (method.groups or ranks)
    cluster = FORMULAE.Cluster(processes, 1e12, 1e9, 1e9)  # the bytes do not depend on speeds
    if method.name == "DDP, bf16":
        everyone = FORMULAE.Group(ranks, NODES)
        gradients = 2 * model.parameters
        return FORMULAE.Collective("all-reduce", gradients, everyone).over_link(processes, library)
    kind = method.name.partition(" ")[0]
    if method.name == "local steps":  # the all-reduce of HSDP, once per round
        sent = FORMULAE.estimate("HSDP", model, NODES, cluster, args)
        return sent.over_link(processes, library) / ROUND
    if kind not in FORMULAE.METHODS:
        return math.nan
    return FORMULAE.estimate(kind, model, NODES, cluster, args).over_link(processes, library)


# -- Two nodes -------------------------------------------------------------------------------------


class Link:
    """Two namespaces with a link between them."""

    def __init__(self):
        self.names = [f"node{n}-{os.getpid()}" for n in range(NODES)]

    def ip(self, *arguments) -> None:
        done = subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1])

    def __enter__(self):
        try:
            for name in self.names:
                self.ip("netns", "add", name)
            peer = ["peer", "name", "eth0", "netns", self.names[1]]
            self.ip("link", "add", "eth0", "netns", self.names[0], "type", "veth", *peer)
            for n, name in enumerate(self.names):
                self.ip("-n", name, "addr", "add", ADDRESS.format(n + 1) + "/24", "dev", "eth0")
                for interface in ("eth0", "lo"):
                    self.ip("-n", name, "link", "set", interface, "up")
            self.throttle(0)
        except OSError as error:
            self.__exit__()
            sys.exit(
                f"error: cannot make two nodes of this machine: {error}. Network namespaces need "
                "Linux, root and iproute2 (ip, tc)"
            )
        return self

    def __exit__(self, *_):
        for name in self.names:
            with suppress(OSError):
                self.ip("netns", "del", name)

    def start(self, node: int, command: list, **options) -> subprocess.Popen:
        command = ["ip", "netns", "exec", self.names[node], *map(str, command)]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options)

    def throttle(self, rate: int) -> None:
        """To so many Mbit/s in each direction; 0 is as fast as the machine is."""
        for node in range(NODES):
            tc = ["tc", "qdisc", "replace", "dev", "eth0", "root"]
            # A smaller burst than 4 ms slows down more than asked for
            bucket = ["tbf", "rate", f"{rate}mbit", "burst", 500 * rate, "latency", "400ms"]
            done = self.start(node, tc + (bucket if rate else ["noqueue"]))
            if done.wait():
                raise OSError(f"tc cannot set {rate} Mbit/s")

    def measure(self) -> float:
        """Mbit/s that a stream gets from the first node to the second."""
        code = f"""
import socket, time
server = socket.create_server(("{ADDRESS.format(2)}", 29400))
print("ready", flush=True)
stream, _ = server.accept()
total, begin, buffer = 0, None, bytearray(1 << 20)
while count := stream.recv_into(buffer):
    total += count
    if begin is None and total > 1 << 20:  # after the first burst
        begin, first = time.perf_counter(), total
print((total - first) * 8e-6 / (time.perf_counter() - begin))
"""
        receiver = self.start(1, [sys.executable, "-c", code])
        receiver.stdout.readline()
        code = f"""
import socket, time
stream = socket.create_connection(("{ADDRESS.format(2)}", 29400))
end = time.perf_counter() + 1
while time.perf_counter() < end:
    stream.sendall(bytes(1 << 18))
"""
        self.start(0, [sys.executable, "-c", code]).wait()
        return float(receiver.communicate()[0])


def run(link: Link, method: Method, processes: int, steps: int, folder: Path) -> dict:
    """One run: seconds and bytes per step, and the losses."""
    name = f"run-{len([*folder.glob('run-*')])}"
    ranks = NODES * processes
    batch = SAMPLES // (method.groups or ranks)
    flags = ["-m", folder / "model", "--from-scratch", "-d", REPOSITORY / "more" / "*" / "*.py"]
    flags += ["-b", batch, "-s", LENGTH, "--max-steps", WARMUP + steps, "--lr", 1e-3]
    flags += ["--eval-freq", 0, "--log-freq", 1, "--dtype", "fp32", "--no-compile"]
    flags += ["-e", name, "--save-dir", folder, *method.flags]
    if method.chapter == "07-pipeline-parallel":
        flags += ["-b", batch // MICRO_BATCHES, "--gradient-accumulation-steps", MICRO_BATCHES]
    together = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": processes, "GROUP_WORLD_SIZE": NODES}
    together |= {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": 29500}
    together |= {"GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_RESTART_COUNT": 0}
    # The server has imported the libraries, and each rank is a copy of it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    running, outputs = [], []
    for rank in range(ranks):
        env = together | {"RANK": rank, "LOCAL_RANK": rank % processes}
        env |= {"GROUP_RANK": rank // processes}
        outputs.append(folder / f"{name}-{rank}.log")
        what = (link.names[rank // processes], outputs[-1], env, method.script, flags)
        running.append(context.Process(target=run_chapter, args=what))
        running[-1].start()
    for process, output in zip(running, outputs, strict=True):
        process.join()
        if process.exitcode:
            for other in running:
                other.kill()
            sys.exit(f"{output.read_text()}\nerror: {method.name} failed")
    (seen,) = re.findall("^seen (.*)$", outputs[0].read_text(), re.MULTILINE)
    seen = json.loads(seen)[WARMUP - 1 :]
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    seconds = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(seen))
    if method.name == "local steps":  # one step of a round sends everything
        seconds = (seen[-1][0] - seen[0][0]) / steps
    return {
        "seconds": seconds,
        "bytes": (seen[-1][1] - seen[0][1]) / steps,
        "losses": [record["loss"] for record in records],
    }


def check_losses(results: dict) -> None:
    first = {}
    for (name, rate), runs in results.items():
        for run in runs:
            losses = run["losses"]
            expected = first.setdefault(name if name in OTHERS else "", losses)
            if any(abs(a - b) > 1e-4 * b for a, b in zip(losses, expected, strict=True)):
                sys.exit(f"error: the losses differ: {name} at {rate} has {losses}, not {expected}")


# -- The table -------------------------------------------------------------------------------------


def link_name(rate: int) -> str:
    return f"{rate:,} Mbit/s" if rate else "as it is"


def relative(free: list[dict], mine: list[dict]) -> tuple[float, float, float]:
    """Speed relative to the free link: of the median round, least and most of the rounds."""
    rounds = [a["seconds"] / b["seconds"] for a, b in zip(free, mine, strict=True)]
    middle = [statistics.median(run["seconds"] for run in runs) for runs in (free, mine)]
    return middle[0] / middle[1], min(rounds), max(rounds)


def table(methods: list[Method], rates: list[int], results: dict, measured: dict, model, processes):
    header = "method | link | Mbit/s, measured | tokens/s, relative | least to most | ms per step |"
    lines = [f"| {header} MB per step, measured | gloo, computed | NCCL, computed |"]
    lines.append("|---" * 9 + "|")
    for method in methods:
        gloo, nccl = (computed(method, model, processes, name) for name in ("gloo", "nccl"))
        for rate in rates:
            mine = results[method.name, rate]
            ratio, least, most = relative(results[method.name, rates[0]], mine)
            cells = [method.name, link_name(rate), f"{statistics.median(measured[rate]):,.0f}"]
            cells += [f"{ratio:.2f}", f"{least:.2f} to {most:.2f}"]
            cells += [f"{1e3 * statistics.median(r['seconds'] for r in mine):,.0f}"]
            cells += [f"{statistics.median(r['bytes'] for r in mine) / 1e6:.2f}"]
            cells += ["" if math.isnan(x) else f"{x / 1e6:.2f}" for x in (gloo, nccl)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [m.name for m in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="[all]")
    rates = [10_000, 1_000, 100]
    parser.add_argument(
        "--rates", type=int, nargs="*", default=rates, help="Mbit/s [10000 1000 100]"
    )
    parser.add_argument("--processes", type=int, default=2, choices=[1, 2, 4], help="per node [2]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run [10]")
    parser.add_argument("--json", type=Path, help="also writes what was measured there")
    args = parser.parse_args()
    if min([args.rounds, args.steps, *args.rates]) < 1:
        parser.error("--rates, --rounds and --steps must be at least 1")
    methods = [m for m in METHODS if m.name in args.methods]
    if "local steps" in args.methods and args.steps % ROUND:
        parser.error(f"--steps must be a multiple of {ROUND}, the steps of a round")
    if args.processes != 2 and any(m.groups for m in methods):
        parser.error("tensor and pipeline parallelism run on 2 processes per node: --methods")
    rates = [0, *sorted(set(args.rates), reverse=True)]  # as it is, then slower and slower
    results = {(m.name, rate): [] for m in methods for rate in rates}
    measured = {rate: [] for rate in rates}
    with Link() as link, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(REPOSITORY / "models" / "tiny-llama", folder / "model")
        config = json.loads((folder / "model" / "config.json").read_text())
        config["num_key_value_heads"] = 4  # or four ranks could not share the layers
        (folder / "model" / "config.json").write_text(json.dumps(config))
        model = FORMULAE.load_model(str(folder / "model" / "config.json"))
        for number in range(args.rounds):
            for rate in rates:
                link.throttle(rate)
                measured[rate].append(link.measure())
                for method in methods[:: 1 if number % 2 == 0 else -1]:
                    found = run(link, method, args.processes, args.steps, folder)
                    results[method.name, rate].append(found)
                    what = f"{method.name}, link {link_name(rate)}: {found['seconds']:.3f} s a step"
                    print(f"round {number + 1}: {what}", file=sys.stderr)
    check_losses(results)
    if args.json:
        rows = [
            {"method": m.name, "rate": rate, "runs": results[m.name, rate]}
            | {n: computed(m, model, args.processes, n) for n in ("gloo", "nccl")}
            for m in methods
            for rate in rates
        ]
        args.json.write_text(json.dumps(rows))
    print(f"{datetime.date.today()}, two nodes with {args.processes} processes each, ", end="")
    print(f"{model.parameters / 1e6:.1f}M parameters, {SAMPLES} × {LENGTH} tokens per step, fp32\n")
    print(table(methods, rates, results, measured, model, args.processes))


if __name__ == "__main__":
    main()
