"""Chapter 8: what compressed gradients cost, and what they bring.

    python benchmarks/gradient-compression.py hooks  # bytes per step, and the time of the hook
    python benchmarks/gradient-compression.py losses  # the same tokens of the demo, three seeds
    python benchmarks/gradient-compression.py links  # tokens per second on slow links; needs root
    python benchmarks/gradient-compression.py plot -o docs/compression

The first three print a table each and add their records to a file (`--records`), which the plot
reads. All use the model of the demo, on CPUs. `losses` and `links` run chapter 8 as it is, with the
text of the demo. `hooks` runs the chapter's class `Compression` with random tokens.

hooks     Milliseconds per step that a rank spends on compressing and decompressing, in one process
          alone, so without a network; median of --rounds steps. Break-even: the rate of a link at
          which this time equals the time that the smaller messages save.
losses    Loss and held-out loss after --steps steps: mean over the seeds, and least to most.
links     Each process in a network namespace of its own. A token bucket limits what it sends
          (`tc ... tbf`, burst = 4 ms of the rate). The rate is measured, too, with an all-reduce.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it
os.environ["GOMP_SPINCOUNT"] = "10000"
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"

REPOSITORY = Path(__file__).resolve().parents[1]
CHAPTER = REPOSITORY / "08-gradient-compression" / "train-llm.py"
METHODS = {
    "none": [],
    "fp16": ["--compress", "fp16"],
    "bf16": ["--compress", "bf16"],
    "powersgd, rank 4": ["--compress", "powersgd"],
    "dct, half": ["--compress", "dct"],
    "dct, 1/16": ["--compress", "dct", "--keep", 1 / 16],
    "dct-topk, 1/16": ["--compress", "dct-topk", "--keep", 1 / 16],
}
METHODS["dct-topk, 1/16, no feedback"] = [*METHODS["dct-topk, 1/16"], "--no-error-feedback"]
RATES = {"10 Gbit/s": 10_000, "1 Gbit/s": 1_000, "100 Mbit/s": 100}  # megabits
PRELOAD = ["comet_ml", "datasets", "torch", "transformers.models.auto.modeling_auto"]
PRELOAD += ["transformers.modeling_layers", "transformers.models.llama.modeling_llama"]


# -- Processes and links ---------------------------------------------------------------------------


# Open sockets, so that no other program gets these ports. The servers of PyTorch may share them.
held_ports = []


def free_port() -> int:
    held_ports.append(socket.socket())
    held_ports[-1].bind(("", 0))
    held_ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held_ports[-1].getsockname()[1]


def rank_process(rank: int, size: int, endpoint: tuple, flags: list, output: Path, link: str):
    """Runs the chapter as one rank, in the network namespace `link` if there is one."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if link:
        enter(link)
    import torch

    torch.set_num_threads(1)
    together = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    together |= {"MASTER_ADDR": endpoint[0], "MASTER_PORT": endpoint[1], "GROUP_WORLD_SIZE": 1}
    together |= {"TORCHELASTIC_RESTART_COUNT": 0, "GLOO_SOCKET_IFNAME": "eth0" if link else "lo"}
    os.environ |= {name: str(value) for name, value in together.items()}
    if flags[0] == "--rate":
        measure_rate(output)
    else:
        sys.argv = [str(CHAPTER), *map(str, flags)]
        runpy.run_path(str(CHAPTER), run_name="__main__")


def enter(link: str) -> None:
    """Moves this process into a network namespace, as `ip netns exec` would."""
    import ctypes

    handle = os.open(f"/run/netns/{link}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {link}")


@contextmanager
def throttled(nodes: int, megabits: int):
    """Namespaces whose only way out is a link of this rate; yields their names.

    All are plugged into a bridge. What a node sends is limited, so each direction for itself.
    """
    names = [f"compression{number}" for number in range(nodes)]

    def ip(command: str, namespace: str = "") -> None:
        options = ["-n", namespace] if namespace else []
        subprocess.run(["ip", *options, *command.split()], check=True)

    try:
        for namespace in ("compressionhub", *names):
            ip(f"netns add {namespace}")
        ip("link add hub type bridge", "compressionhub")
        ip("link set hub up", "compressionhub")
        for number, name in enumerate(names):
            ip(f"link add eth0 netns {name} type veth peer name port{number} netns compressionhub")
            ip(f"link set port{number} master hub up", "compressionhub")
            ip(f"addr add 10.77.0.{number + 1}/24 dev eth0", name)
            ip("link set eth0 up", name)
            ip("link set lo up", name)
            limit = f"tbf rate {megabits}mbit burst {megabits * 500} latency 400ms"
            command = f"tc -n {name} qdisc add dev eth0 root {limit}"
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for namespace in (*names, "compressionhub"):
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL)


def measure_rate(output: Path) -> None:
    """Prints the megabits per second at which a rank sends in an all-reduce."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    numbers = torch.ones(2_500_000)
    rates = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(numbers)
        sent = 2 * (size - 1) / size * numbers.nbytes
        rates.append(8 * sent / (time.perf_counter() - begin) / 1e6)
    if dist.get_rank() == 0:
        print(f"\nrate {statistics.median(rates)}")
    dist.barrier()
    dist.destroy_process_group()


class Lab:
    """Runs the chapter on so many processes, without importing the libraries each time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.count = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def start(self, size: int, flags: list, links=()) -> str:
        self.count += 1
        endpoint = "10.77.0.1" if links else "127.0.0.1", free_port()
        processes = []
        for rank in range(size):
            output = self.folder / f"output-{self.count}-{rank}.txt"
            link = links[rank] if links else ""
            options = (rank, size, endpoint, flags, output, link)
            processes.append(self.context.Process(target=rank_process, args=options))
            processes[-1].start()
        for process in processes:
            process.join(120)
        if any(process.exitcode != 0 for process in processes):
            for process in processes:
                process.kill()
            text = "".join(path.read_text() for path in self.folder.glob(f"output-{self.count}-*"))
            sys.exit(f"error: a run with {flags} failed:\n{text}")
        return (self.folder / f"output-{self.count}-0.txt").read_text()

    def train(self, size: int, *flags, links=()) -> list[dict]:
        """The records of a run."""
        name = f"run-{self.count}"
        batch = max(1, 8 // size)
        demo = ["--demo", "-e", name, "--save-dir", self.folder, "-s", 128, "-b", batch]
        self.start(size, [*demo, "--ckpt-freq", 10**6, *flags], links)
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        shutil.rmtree(self.folder / name)
        return [json.loads(line) for line in lines]


# -- The tables ------------------------------------------------------------------------------------


def chapter_module():
    spec = importlib.util.spec_from_file_location("chapter_8", CHAPTER)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chapter_8"] = module
    spec.loader.exec_module(module)
    return module


def hooks(args, folder: Path) -> None:
    """In a process of its own group. One rank's message is there at once, N - 1 others are not."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chapter = chapter_module()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(REPOSITORY / "models" / "tiny-llama")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(0, config.vocab_size, (4, 128))
    print("| method | sent per step, 2 ranks, MB | 4 ranks | ratio, 2 | 4 | hook, ms |", end="")
    print(" break-even, 2 ranks, Mbit/s | 4 ranks |\n|---|---|---|---|---|---|---|---|")
    records = {}
    for method, flags in METHODS.items():
        sys.argv = ["train-llm.py", *map(str, flags)]
        options = chapter.parse_args()
        sent, ratios, times = [], [], [0.0]
        for size in (2, 4):
            chapter.WORLD_SIZE = size
            compression = chapter.Compression(model, options, None)
            if options.compress == "dct-topk":  # of one rank's message, only the size matters
                chapter.WORLD_SIZE = 1
            kept = options.compress == "powersgd"
            ddp = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, find_unused_parameters=kept
            )
            times, spent = [], [0.0]

            def timed(state, bucket, spent=spent):
                begin = time.perf_counter()
                future = chapter.Compression.hook(state, bucket)
                future.wait()
                spent[0] += time.perf_counter() - begin
                return future

            if options.compress != "none":
                ddp.register_comm_hook(compression, timed)
            for _ in range(args.rounds + 3):
                spent[0] = 0.0
                compression.volume = 0
                ddp(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                times.append(1e3 * spent[0])
                model.zero_grad(set_to_none=False)
            if options.compress == "dct-topk":
                large = compression.volume  # counted for one rank: small ones twice, others once
                small = sum(2 * p.nbytes for p in model.parameters() if p.numel() < 4097)
                compression.volume = small + size * (large - small)
            chapter.WORLD_SIZE = size
            found = compression.metrics(1)
            sent.append(found["communication/bytes_per_step"])
            ratios.append(found["communication/ratio"])
            model.zero_grad(set_to_none=True)
            del ddp  # a wrapper that outlives the process group may block in its destructor
        spent = statistics.median(times[3:])
        cells = [f"{sent[0] / 1e6:.3f}", f"{sent[1] / 1e6:.3f}", *(f"{r:.3f}" for r in ratios)]
        records[method] = {"sent": sent, "ratios": ratios, "hook_ms": spent}
        even = []
        for mine, plain in zip(sent, records["none"]["sent"], strict=True):
            even.append(8 * (plain - mine) / (spent / 1e3) / 1e6 if spent else 0)
        even = [f"{rate:,.0f}" for rate in even] if spent else ["", ""]
        cells += [f"{spent:.1f}", *even]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)
    remember(args.records, "hooks", records)
    dist.destroy_process_group()


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def losses(args, folder: Path) -> None:
    lab = Lab(folder)
    print(
        f"After {args.steps} steps, so {args.steps * 8 * 128:,} tokens; seeds 0 to {args.seeds - 1}"
    )
    print(
        "\n| method | processes | loss | held-out loss | MB sent per rank |\n|---|---|---|---|---|"
    )
    records = {}
    for size in args.processes:
        for method in args.methods or METHODS:
            flags = METHODS[method]
            curves = []
            for seed in range(args.seeds):
                more = ["--max-steps", args.steps, "--eval-freq", args.steps, "--seed", seed]
                more += ["--warmup-steps", 10, "--log-freq", 10]
                curves.append(lab.train(size, *flags, *more))
            last = [[r["loss"] for r in curve if "loss" in r][-1] for curve in curves]
            held_out = [curve[-1]["eval/loss"] for curve in curves]
            steps = [r for r in curves[0] if "loss" in r]
            sent = sum(10 * r["communication/bytes_per_step"] for r in steps) / 1e6
            cells = [method, size, spread(last), spread(held_out), f"{sent:,.1f}"]
            print("|", *(f"{cell} |" for cell in cells), flush=True)
            records[f"{method} on {size}"] = [
                [r["loss"] for r in curve if "loss" in r] for curve in curves
            ]
    remember(args.records, "losses", records)


def links(args, folder: Path) -> None:
    lab = Lab(folder)
    records = {}
    for size in args.processes:
        header = " | ".join(RATES)
        print(f"\n| tokens/s, {size} processes | one machine | {header} |\n|---|---|---|---|---|")
        speeds = {method: [] for method in args.methods or METHODS}
        rates = [""]
        for name, megabits in {"": 0, **RATES}.items():
            if megabits:
                with throttled(size, megabits) as namespaces:
                    output = lab.start(size, ["--rate"], namespaces)
                    rate = output.partition("\nrate ")[2]
                    rates.append(f"{float(rate):,.0f} Mbit/s")
                    for method in speeds:
                        speeds[method].append(speed(lab, size, method, namespaces))
                        records[f"{method} on {size} at {name}"] = speeds[method][-1]
            else:
                for method in speeds:
                    speeds[method].append(speed(lab, size, method, ()))
                    records[f"{method} on {size}"] = speeds[method][-1]
        print(f"| measured rate | {' | '.join(rates)} |")
        for method, found in speeds.items():
            print(f"| {method} | {' | '.join(f'{value:,.0f}' for value in found)} |", flush=True)
        remember(args.records, "links", records)


def speed(lab: Lab, size: int, method: str, namespaces) -> float:
    """Median of the logged steps, without the first."""
    more = ["--max-steps", 12, "--eval-freq", 0, "--log-freq", 3]
    records = lab.train(size, *METHODS[method], *more, links=namespaces)
    return statistics.median([record["tokens_per_second"] for record in records][1:])


def remember(file: Path, part: str, records: dict) -> None:
    everything = json.loads(file.read_text()) if file.exists() else {}
    everything[part] = everything.get(part, {}) | records
    file.write_text(json.dumps(everything, indent=1) + "\n")


def plot(args, folder: Path) -> None:
    """The loss of the first steps and of all, against bytes and against time on a slow link."""
    from matplotlib.figure import Figure

    records = json.loads(args.records.read_text())
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    by_bytes, by_time = figure.subplots(1, 2, sharey=True)
    styles = ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (5, 3))]
    colors = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b07800"]
    colors.append("#777777")
    rate = args.link
    measured = [method for method in METHODS if f"{method} on 2 at {rate}" in records["links"]]
    for number, method in enumerate(measured):
        curves = records["losses"][f"{method} on 2"]
        means = [statistics.mean(values) for values in zip(*curves, strict=True)]
        steps = [10 * (n + 1) for n in range(len(means))]
        sent = records["hooks"][method]["sent"][0]
        seconds = 8 * 128 / records["links"][f"{method} on 2 at {rate}"]
        look = {"color": colors[number], "linestyle": styles[number], "linewidth": 2}
        by_bytes.plot([step * sent / 1e6 for step in steps], means, label=method, **look)
        by_time.plot([step * seconds for step in steps], means, **look)
    by_bytes.set(xlabel="MB that a rank has sent", ylabel="loss, nats per token", xscale="log")
    by_bytes.set(title="Loss against bytes")
    by_time.set(xlabel="seconds", title=f"Loss against time, link of {rate}")
    for axes in (by_bytes, by_time):
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    by_time.legend(*by_bytes.get_legend_handles_labels(), frameon=False, loc="upper right")
    figure.savefig(args.output.with_suffix(".png"), dpi=110)
    print(f"wrote {args.output.with_suffix('.png')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["hooks", "losses", "links", "plot"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="of losses and links")
    parser.add_argument("--steps", type=int, default=100, help="of each run of losses")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each method of hooks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--link", choices=RATES, default="100 Mbit/s", help="of the plot")
    records = REPOSITORY / "benchmarks" / "compression.json"
    parser.add_argument("--records", type=Path, default=records)
    parser.add_argument("-o", "--output", type=Path, default=Path("compression"))
    args = parser.parse_args()
    if args.what == "links" and (os.geteuid() or not shutil.which("tc")):
        sys.exit("error: links needs root and iproute2, for network namespaces")
    with tempfile.TemporaryDirectory() as folder:
        {"hooks": hooks, "losses": losses, "links": links, "plot": plot}[args.what](
            args, Path(folder)
        )


if __name__ == "__main__":
    main()
