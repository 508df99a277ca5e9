r"""All measurements for which one GPU is needed, in parts of at most 9 minutes.

    python benchmarks/gpu.py --list                # the parts and their rows
    python benchmarks/gpu.py --part 1              # one part; again: only rows that are not done
    python benchmarks/gpu.py                       # all parts, in order
    python benchmarks/gpu.py --rehearse            # on a CPU, with tiny models, nothing compiled
    python benchmarks/gpu.py --table               # the table of all rows so far, for the records

The first parts have the most value. Parts 1 to 5 take at most 45 minutes together, and all parts at
most 72. Each row is written to a file as soon as it exists. So a part that ends early loses one
row, and the next call of this part goes on there. Before the first row, the script lists the
packages that are missing or have another version than the tests. It skips the rows that need a
missing package.

Several ranks share one GPU. Each rank is a torchrun node of its own, so its LOCAL_RANK is 0. NCCL
refuses two ranks on one GPU of a host, so each rank also has its own NCCL_HOSTID, and sends through
sockets. So such a run shows whether the results are right, and nothing about speed.

A machine without a network needs wheels that were downloaded before, here for Python 3.12. Those of
the second command come without PyTorch, which the machine must have:

    options="-d wheels --only-binary=:all: --python-version 3.12 -c constraints.txt"
    for tag in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
        options="$options --platform ${tag}_x86_64"
    done
    pip download $options datasets comet_ml psutil
    pip download $options --no-deps accelerate lightning pytorch-lightning torchmetrics \
        lightning-utilities liger-kernel
    # there
    pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

The start of this script lists what is missing there, with the versions of constraints.txt.
"""

import argparse
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
TITLES = {
    1: "Losses in fp32, with NCCL",
    2: "Losses in bf16, compiled",
    3: "Speed of chapters 1 to 3 and of others, 8k tokens per step",
    4: "The same, 49k tokens per step (24k on GPUs below 100 GB)",
    5: "Resumes in fp32",
    6: "Where a step goes, and where Python waits for the GPU",
    7: "Attention",
    8: "Memory, estimated and measured",
}
# Without these, no row can run. The other packages are named by the rows that need them.
NEEDED = ("torch", "transformers", "datasets", "comet_ml", "psutil", "pyarrow", "tqdm")
NEEDED += ("jsonargparse", "filelock")
OPTIONAL = ("accelerate", "hydra-core", "submitit", "lightning", "liger-kernel", "flash-attn")
OPTIONAL += ("mosaicml-streaming", "torchvision", "peft")
SHAPE = "llama-3.2-1b"


@dataclass
class Row:
    part: int
    name: str
    measure: Callable[[], dict]  # the cells of the row
    needs: tuple[str, ...] = ()  # packages


class Failed(Exception):
    """A row that has no result, with the reason."""


# -- Processes -------------------------------------------------------------------------------------


def start(command: list, ranks: int, limit_s: float) -> str:
    """The output of a script on so many ranks; 0: without torchrun. Raises `Failed`."""
    processes = []
    with tempfile.TemporaryFile("w+") as output, ExitStack() as stack:
        port = free_port()
        for rank in range(max(ranks, 1)):
            launch = [sys.executable]
            env = dict(os.environ)
            if ranks:
                launch += ["-m", "torch.distributed.run", "--nnodes", ranks, "--node-rank", rank]
                launch += ["--nproc-per-node", 1]
                launch += ["--master-addr", "127.0.0.1", "--master-port", port]
                env |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_P2P_DISABLE": "1"}
                env |= {"NCCL_SHM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            arguments = [str(part) for part in [*launch, *command]]
            process = subprocess.Popen(arguments, stdout=output, stderr=output, env=env)
            stack.callback(end, process)
            processes.append(process)
        deadline = time.monotonic() + limit_s
        while (states := [process.poll() for process in processes]) != [0] * len(processes):
            if any(states) or time.monotonic() > deadline:
                break  # the other ranks would wait for a failed one
            time.sleep(0.05)
        late = not any(states) and None in states
        stack.close()
        output.seek(0)
        text = output.read()
    if late:
        raise Failed(f"not done after {limit_s:.0f} s")
    if any(states):
        errors = re.findall(r"^.*(?:error|Error|exception)\b.*$", text, re.MULTILINE)
        print(text[-5000:], file=sys.stderr)
        raise Failed(errors[0].strip()[:200] if errors else "failed")
    return text


def end(process: subprocess.Popen) -> None:
    """Ends a process, and with it the worker that torchrun has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Open sockets, so that no other program gets these ports. The servers of PyTorch may share them.
held_ports = []


def free_port() -> int:
    held_ports.append(socket.socket())
    held_ports[-1].bind(("", 0))
    held_ports[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held_ports[-1].getsockname()[1]


def load(name: str):
    """Another benchmark, as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def chapter(number: int) -> Path:
    (script,) = REPOSITORY.glob(f"{number:02}-*/train-llm.py")
    return script


# -- What runs in a process of its own -------------------------------------------------------------


def watch(what: str, script: str, flags: list[str]) -> None:
    """Runs a script. `cudnn`: with no other attention. `waits`: prints its waits in each step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = [0]

    class Reads(TorchDispatchMode):
        """Counts tensors that become Python numbers. On a GPU, warnings count more: all waits."""

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            waits[-1] += op is torch.ops.aten._local_scalar_dense.default
            return op(*args, **kwargs or {})

    def count(message, *rest):
        waits[-1] += "synchronizing" in str(message)

    original_step = torch.optim.AdamW.step

    def step(self, *args, **options):
        result = original_step(self, *args, **options)
        waits.append(0)
        return result

    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    torch.optim.AdamW.step = step
    on_gpu = torch.cuda.is_available()
    if what == "cudnn" and on_gpu:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    if what == "waits" and on_gpu:
        torch.set_warn_always(True)
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
    with Reads() if what == "waits" and not on_gpu else nullcontext():
        runpy.run_path(script, run_name="__main__")
    # The first interval has the start of the run, and the last one has its end.
    # The chapters silence `sys.stdout` on ranks above 0.
    print(f"\nwaits {waits[1:-2]}", file=sys.__stdout__, flush=True)


def time_attention(rehearse: bool) -> None:
    """Prints a JSON line for each kernel and length: forward and backward pass of one layer."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device, dtype = ("cpu", torch.float32) if rehearse else ("cuda", torch.bfloat16)
    heads, kv_heads, head_size = 32, 8, 64  # of Llama-3.2-1B
    tokens = 256 if rehearse else 32_768
    backends = {"SDPA, flash": SDPBackend.FLASH_ATTENTION}
    backends |= {"SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}
    backends |= {"SDPA, PyTorch's choice": None}
    if installed("flash-attn"):
        from flash_attn import flash_attn_func

        backends["FlashAttention 2"] = flash_attn_func
    for length in (128, 256) if rehearse else (2_048, 8_192, 32_768):
        for name, backend in backends.items():
            shapes = [(tokens // length, n, length, head_size) for n in (heads, kv_heads, kv_heads)]
            options = {"device": device, "dtype": dtype, "requires_grad": True}
            q, k, v = (torch.randn(shape, **options) for shape in shapes)

            def attention(q=q, k=k, v=v, backend=backend):
                if callable(backend):  # it has tokens before heads
                    result = backend(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
                    return result.transpose(1, 2)
                with nullcontext() if backend is None else sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            # 2 products forward and 5 backward, of which half is masked
            operations = 7 * tokens * length * heads * head_size
            try:
                seconds = []
                for _ in range(2 if rehearse else 20):
                    begin = time.perf_counter()
                    attention().sum().backward()
                    if not rehearse:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begin)
            except RuntimeError as error:
                result = {"error": str(error).splitlines()[0]}
            else:
                ms = 1e3 * statistics.median(seconds)
                result = {"ms": ms, "TFLOP/s": operations / ms / 1e9}
            row = {"kernel": name, "sequence": length} | result
            print(json.dumps(row), flush=True)


# -- Rows ------------------------------------------------------------------------------------------

TEXT = f"{REPOSITORY}/*-*/train-llm.py"
GLOBAL_BATCH = 8  # samples of a step, whatever the ranks
PIPELINE = ["-b", 2, "--gradient-accumulation-steps", 4, "--pipeline-parallel", 2]
CHAT = ["-d", REPOSITORY / "models" / "tiny-chat" / "*.jsonl"]
CHAT += ["--chat-template", REPOSITORY / "models" / "tiny-chat" / "template.jinja", "-s", 256]
# Ranks and flags of each chapter; `same` is the row whose losses it must have
CHAPTERS = {
    1: {"ranks": 0, "flags": ["-b", 8]},
    2: {"ranks": 2, "flags": ["-b", 4], "same": 1},
    3: {"ranks": 2, "flags": ["-b", 4], "same": 1},
    5: {"ranks": 2, "flags": ["-b", 4, "--shard-size", 2], "same": 1},
    6: {"ranks": 2, "flags": ["-b", 8, "--tensor-parallel", 2], "same": 1},
    7: {"ranks": 2, "flags": PIPELINE, "same": 1},
    8: {"ranks": 2, "flags": ["-b", 4, "--compress", "dct", "--keep", 1], "same": 1},
    11: {"ranks": 2, "flags": ["-b", 8, "--context-parallel", 2], "same": 1},
    13: {"ranks": 4, "flags": [*PIPELINE, "--tensor-parallel", 2], "same": 1},
    "3, a mixture": {"ranks": 2, "flags": ["-b", 4], "model": "tiny-mixtral"},
    12: {
        "ranks": 2,
        "flags": ["-b", 4, "--expert-parallel", 2],
        "model": "tiny-mixtral",
        "same": "3, a mixture",
    },
    15: {"ranks": 2, "flags": ["-b", 4, "--shard-size", 2, "--replicas", 1], "same": 1},
    9: {"ranks": 2, "same": 1, "needs": ("accelerate", "hydra-core", "submitit")},
    # These read other rows or train another model, so no row has the same losses.
    4: {"ranks": 2, "flags": ["-b", 4]},
    10: {
        "ranks": 2,
        "flags": ["-b", 4, "--shard-size", 2],
        "needs": ("mosaicml-streaming", "torchvision"),
    },
    14: {"ranks": 0, "flags": ["-b", 8]},
    "15, two replicas": {"ranks": 2, "flags": ["-b", 4, "--replicas", 2, "--inner-steps", 2]},
    # On conversations
    16: {"ranks": 1, "flags": ["-b", 8, *CHAT]},
    "16, two ranks": {"ranks": 2, "flags": ["-b", 4, *CHAT], "same": 16},
    17: {"ranks": 1, "flags": ["-b", 8, *CHAT], "needs": ("peft",)},
    "17, two ranks": {"ranks": 2, "flags": ["-b", 4, *CHAT], "same": 17, "needs": ("peft",)},
}


def number_of(key: int | str) -> int:
    """The number of a chapter, from a key of `CHAPTERS`."""
    return int(str(key).partition(",")[0])


class Measurements:
    """The rows of all parts, their file, and the folder for what they write."""

    def __init__(self, args, folder: Path):
        self.args, self.folder = args, folder
        self.deadline = time.monotonic() + 60 * args.minutes
        self.steps = 4 if args.rehearse else 20

    # -- The file --

    def done(self) -> dict[tuple[int, str], dict]:
        """The newest result of each row, by part and name."""
        if not self.args.output.exists():
            return {}
        lines = self.args.output.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {(row["part"], row["name"]): row for row in rows}

    def write(self, row: Row, result: dict) -> None:
        self.args.output.parent.mkdir(parents=True, exist_ok=True)
        entry = {"part": row.part, "name": row.name} | result
        with self.args.output.open("a") as file:
            print(json.dumps(entry), file=file, flush=True)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    # -- Losses and resumes --

    def model(self, name: str) -> Path:
        """A folder with the small model of this name and random weights, the same in each part."""
        folder = self.folder / name
        if not folder.exists():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            shutil.copytree(REPOSITORY / name, folder)
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(folder)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    def train(self, key, dtype: str, folder: Path) -> list[dict]:
        """The records of a run of a chapter. A folder with checkpoints continues its run."""
        known = CHAPTERS[key]
        number = number_of(key)
        model = self.model(known.get("model", "tiny-llama"))
        length = 32 if self.args.rehearse else 256
        if number == 9:
            command = self.trainer(dtype, folder, model, length)
        else:
            data = self.shards(model, length) if number == 10 else TEXT
            command = [chapter(number), "--demo", "-e", folder.name, "--save-dir", folder.parent]
            command += ["-m", model, "-d", data, "-s", length, "--num-epochs", 99]
            command += ["--max-steps", self.steps, "--warmup-steps", 0, "--log-freq", 1]
            command += ["--eval-freq", self.steps, "--ckpt-freq", self.steps // 2]
            command += ["--dtype", dtype, *known["flags"]]
            command += [] if number == 14 else ["--no-from-scratch"]
            if dtype == "fp32" or self.args.rehearse:
                command += ["--no-compile"]
        start(command, known["ranks"], self.seconds_left())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def trainer(self, dtype: str, folder: Path, model: Path, length: int) -> list:
        """The command of chapter 9, with FSDP. On CPUs, this is DDP."""
        command = [chapter(9), "--config-name", "demo", "parallel=fsdp", "report_to=[]"]
        command += [f"hydra.run.dir={folder}", f"save_dir={folder.parent}"]
        command += [f"model.name={model}", "model.from_scratch=false"]
        command += [f"data.data_files={TEXT}", f"data.seq_length={length}"]
        command += ["training.num_train_epochs=99", f"training.max_steps={self.steps}"]
        command += ["training.per_device_train_batch_size=4", "training.logging_steps=1"]
        command += [f"training.eval_steps={self.steps}", f"training.save_steps={self.steps // 2}"]
        command += ["optimizer.warmup_steps=0"]
        return [*command, f"parallel.bf16={str(dtype == 'bf16').lower()}"]

    def shards(self, model: Path, length: int) -> Path:
        """The rows of chapter 10."""
        folder = self.folder / "shards"
        if not folder.exists():
            script = REPOSITORY / "tools" / "write-mds.py"
            command = [script, "-o", folder, "-m", model, "-d", TEXT, "-s", length]
            start(command, 0, self.seconds_left())
        return folder

    def losses(self, key, dtype: str, part: int) -> dict:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            records = self.train(key, dtype, Path(folder) / "run")
        losses = [record["loss"] for record in records if "loss" in record]
        if len(losses) != self.steps:
            raise Failed(f"{len(losses)} losses, not {self.steps}")
        held_out = [record["eval/loss"] for record in records if "eval/loss" in record]
        result = {"ranks": CHAPTERS[key]["ranks"] or 1, "last loss": losses[-1]}
        result |= {"held-out loss": held_out[-1] if held_out else None}
        base = self.done().get((part, f"chapter {CHAPTERS[key].get('same')}"), {}).get("losses")
        if base:
            pairs = zip(losses, base, strict=True)
            difference = max(abs(a - b) / b for a, b in pairs)
            result["largest difference"] = difference
            result["same"] = difference < (1e-5 if dtype == "fp32" else 1e-2)
        return result | {"losses": losses}

    def resume(self, key) -> dict:
        """Whether a run that continues from its middle repeats the second half."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            run = Path(folder) / "run"
            before = self.train(key, "fp32", run)
            newest = max(run.glob("step-*"))
            if int(newest.name[5:]) != self.steps:
                raise Failed(f"the newest checkpoint is {newest.name}")
            shutil.rmtree(newest)
            shutil.rmtree(run / "final")
            after = self.train(key, "fp32", run)
        pairs = [
            (a["loss"], b["loss"])
            for a, b in zip(before, after, strict=True)
            if "loss" in a and a["step"] > self.steps // 2
        ]
        difference = max(abs(a - b) / a for a, b in pairs)
        return {"steps": len(pairs), "largest difference": difference, "exact": difference == 0}

    # -- Speed --

    def speed_rows(self, part: int, batch: int) -> list[Row]:
        tool = load("run")
        methods = ["chapters", "trainer", "trainer-tuned", "accelerate", "lightning"]
        flags = ["--devices", 1, "-b", batch, "--methods", *methods]
        if self.args.rehearse:
            flags += ["-b", 1, "-s", 32, "--steps", 5, "--warmup", 5]
            flags += ["--flags", f"-d '{TEXT}' --num-epochs 99"]
        else:
            flags += ["--shape", SHAPE, "-s", 2048, "--steps", 10]
        with redirect_stderr(io.StringIO()):  # missing packages are listed at the start
            options = tool.parse_args([str(flag) for flag in flags])
        found = {one.method: one for one in tool.contenders(options)}
        compiled = "" if self.args.rehearse else ", compiled"
        peers = {
            "Trainer": ("accelerate",),
            "Trainer, compiled": ("accelerate",),
            "Trainer, tuned": ("accelerate", "liger-kernel"),
            f"Accelerate{compiled}": ("accelerate",),
            f"Lightning{compiled}": ("lightning",),
        }
        if self.args.rehearse:  # compiling takes long on a CPU
            del peers["Trainer, compiled"]
            del peers["Trainer, tuned"]
        # Where Liger does not compile, this is the tuned Trainer.
        without_liger = tool.Contender(
            "Trainer, compiled", 1, tool.PEERS / "trainer.py", ["--tuned"]
        )
        found[without_liger.method] = without_liger
        names = [f"chapter 1{compiled}", f"chapter 2{compiled}", f"chapter 3{compiled}", *peers]
        names += [] if self.args.rehearse else ["chapter 1"]
        rows = []
        for number in range(self.args.rounds):
            for name in names:
                base = f"{names[0]}, round {number + 1}"

                def measure(name=name, base=base):
                    return self.speed(tool, found[name], options, part, base)

                rows.append(Row(part, f"{name}, round {number + 1}", measure, peers.get(name, ())))
        return rows

    def speed(self, tool, contender, options, part: int, base: str) -> dict:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            tool.write_shape(Path(folder), options.shape)
            flags = tool.work(folder, options)
            try:
                result = tool.run(contender, flags, options, self.seconds_left())
            except subprocess.TimeoutExpired:
                raise Failed("not done in time") from None
            if not result:
                raise Failed("the run failed: its error is on the screen")
            config = tool.AutoConfig.from_pretrained(folder)
        speed = result["tokens_per_second"]
        flops = speed * tool.models.flops_per_token(config, options.seq_length)
        peak = tool.datasheet_peak(tool.torch.bfloat16)
        first = self.done().get((part, base), {})
        ratio = speed / first["tokens/s"] if "tokens/s" in first else None
        cells = {"tokens/s": speed, "MFU": flops / peak if peak else None, "of chapter 1": ratio}
        if "losses" in first:
            pairs = zip(result["losses"], first["losses"], strict=True)
            cells["largest difference"] = max(abs(a - b) / b for a, b in pairs)
        return cells | {"GB": result["peak_gb"], "losses": result["losses"]}

    # -- Parts 6 to 8 --

    def shape(self) -> Path:
        """A folder for `-m`, for the measurements that need no weights."""
        folder = self.folder / "shape"
        if not folder.exists():
            folder.mkdir()
            load("run").write_shape(folder, "demo" if self.args.rehearse else SHAPE)
        return folder

    def work(self, batch: int, length: int = 2048) -> list:
        """Flags of a run of the large shape with so many samples."""
        if self.args.rehearse:
            batch, length = 1, 32
        flags = ["-m", self.shape(), "-b", batch, "-s", length, "-d", TEXT]
        return [*flags, "--num-epochs", 9999]

    def profile(self, batch: int) -> dict:
        steps = 2 if self.args.rehearse else 10
        command = [BENCHMARKS / "profile-step.py", "--steps", steps, *self.work(batch)]
        output = start(command, 0, self.seconds_left())
        cells = re.findall(r"^\| ([\w ,]+) \| ([\d.]+) \|", output, re.MULTILINE)
        return {f"{name}, ms": float(ms) for name, ms in cells}

    def waits(self, number: int) -> dict:
        """Times that Python waits for the GPU in a step that is not logged."""
        model = "tiny-mixtral" if number == 12 else "tiny-llama"
        flags = ["--demo", "-m", REPOSITORY / model, "-s", 32, "-b", 2, "-d", TEXT]
        flags += ["--max-steps", 8, "--log-freq", 100, "--eval-freq", 0, "--ckpt-freq", 10**6]
        flags += ["--num-epochs", 99, "--no-compile", "-e", f"waits-{number}"]
        flags += ["--save-dir", self.folder, "--gradient-accumulation-steps", 2]
        script = chapter(number)
        ranks = 0 if number == 1 else 1
        command = [__file__, "--watch", "waits", script, *flags]
        output = start(command, ranks, self.seconds_left())
        counts = json.loads(re.findall(r"^waits (.*)$", output, re.MULTILINE)[-1])
        return {"steps": len(counts), "least": min(counts), "most": max(counts)}

    def attention(self) -> dict:
        switch = ["--rehearse"] if self.args.rehearse else []
        output = start([__file__, "--time-attention", *switch], 0, self.seconds_left())
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kernel"')]
        cells = {}
        for row in rows:
            value = row.get("error") or f"{row['ms']:.2f} ms, {row['TFLOP/s']:.0f} TFLOP/s"
            cells[f"{row['kernel']}, {row['sequence']:,} tokens"] = value
        return cells

    def attention_step(self, name: str, length: int) -> dict:
        """Chapter 1 with this attention, 32k tokens per step."""
        run = self.folder / f"{name}-{length}"
        flags = ["--demo", *self.work(32_768 // length, length), "-e", run.name]
        flags += ["--save-dir", run.parent, "--max-steps", 5 if self.args.rehearse else 30]
        flags += ["--log-freq", 5, "--eval-freq", 0, "--ckpt-freq", 10**6]
        flags += ["--attention", "sdpa" if name == "cudnn" else name]
        command = [__file__, "--watch", name, chapter(1), *flags]
        start(command, 0, self.seconds_left())
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(run)  # it has a checkpoint of some GB
        speeds = [record["tokens_per_second"] for record in records[-4:]]
        return {"tokens/s": statistics.median(speeds), "last loss": records[-1]["loss"]}

    def memory(self, method: str, ranks: int, batch: int, extra: list) -> dict:
        tool = load("memory")
        device = "cpu" if self.args.rehearse else "cuda"
        flags = [*self.work(batch), *extra]
        without_data = flags[: flags.index("-d")] + extra
        guess, guessed_states = tool.estimated(method, ranks, [*without_data, "--device", device])
        command = [BENCHMARKS / "memory.py", *tool.arguments(method, flags)]
        one_device = method in tool.ONE_DEVICE
        output = start(command, 0 if one_device else ranks, self.seconds_left())
        real, real_states = tool.measured(output, ranks)
        cells = {"ranks": ranks, "estimate, GB": guess / 1e9, "measured, GB": real / 1e9}
        return cells | {"ratio": guess / real, "states equal": guessed_states == real_states}

    # -- All of them --

    def rows(self) -> list[Row]:
        rows = []
        chosen = self.args.chapters
        wanted = [key for key in CHAPTERS if not chosen or number_of(key) in chosen]
        for key in wanted:
            needs = CHAPTERS[key].get("needs", ())
            for part, dtype in ((1, "fp32"), (2, "bf16")):
                measure = partial(self.losses, key, dtype, part)
                rows.append(Row(part, f"chapter {key}", measure, needs))
            if key != 9:  # it has other checkpoints, and a test of its own
                rows.append(Row(5, f"chapter {key}", partial(self.resume, key), needs))
        short = self.args.rehearse  # no rows that run the same code again
        large = self.large_batch()
        rows += self.speed_rows(3, 4)
        rows += self.speed_rows(4, large)[: 2 if short else None]
        for batch in (4,) if short else (4, large):
            rows.append(Row(6, f"profile, -b {batch}", partial(self.profile, batch)))
        for number in (1, 2, 3, 12):
            rows.append(Row(6, f"waits of chapter {number}", partial(self.waits, number)))
        rows.append(Row(7, "the kernels alone", self.attention))
        for length in (2048,) if short else (2048, 8192):
            for name in ("sdpa", "cudnn", "flash_attention_2"):
                needs = ("flash-attn",) if name == "flash_attention_2" else ()
                measure = partial(self.attention_step, name, length)
                rows.append(Row(7, f"chapter 1, {name}, {length:,} tokens", measure, needs))
        for method, ranks in (("chapter 1", 1), ("FSDP", 1), ("FSDP", 2)):
            variants = [[]] if short else [[], ["--activation-checkpointing"], ["--no-compile"]]
            for extra in variants:
                name = " ".join([f"{method} on {ranks}", *extra])
                measure = partial(self.memory, method, ranks, 4, extra)
                rows.append(Row(8, name, measure))
        return sorted(rows, key=lambda row: row.part)

    def large_batch(self) -> int:
        import torch

        if self.args.rehearse:
            return 2
        if not torch.cuda.is_available():  # for --list
            return 24
        memory = torch.cuda.get_device_properties(0).total_memory
        return 24 if memory > 100e9 else 12


def run_parts(measurements: Measurements, parts: list[int]) -> bool:
    """Runs the rows of these parts. Returns whether all of them have a result."""
    complete = True
    rows = measurements.rows()
    for part in parts:
        measurements.deadline = time.monotonic() + 60 * measurements.args.minutes
        print(f"Part {part}: {TITLES[part]}", flush=True)
        for row in rows:
            finished = measurements.done().get((row.part, row.name), {"error": "not yet"})
            if row.part != part or "error" not in finished:
                continue
            missing = [package for package in row.needs if not installed(package)]
            if missing:
                print(f"  {row.name}: skipped, needs {', '.join(missing)}", flush=True)
                continue
            if measurements.seconds_left() < 10:
                print(f"  {row.name}: no time left, call --part {part} again", flush=True)
                complete = False
                continue
            begin = time.monotonic()
            try:
                result = row.measure()
            except (Exception, SystemExit) as error:
                result = {"error": f"{error!r:.300}"}
                complete = False
            result["seconds"] = time.monotonic() - begin
            measurements.write(row, result)
            print(f"  {row.name}: {cells_of(result)}", flush=True)
    return complete


def cells_of(result: dict) -> str:
    shown = {key: value for key, value in result.items() if key not in HIDDEN}
    return ", ".join(f"{key} {form(value)}" for key, value in shown.items())


def form(value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.7g}" if value > 1 else f"{value:.3g}"
    return str(value)


HIDDEN = ("part", "name", "losses")


def table(done: dict[tuple[int, str], dict]) -> str:
    """All rows, in Markdown."""
    text = [f"{device_name()}; {', '.join(versions())}"]
    for part, title in TITLES.items():
        rows = [row for (number, _), row in done.items() if number == part]
        if not rows:
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN))
        text += [
            f"\n### {title}\n",
            "| | " + " | ".join(keys) + " |",
            "|---" * (len(keys) + 1) + "|",
        ]
        for row in rows:
            cells = [form(row.get(key)) for key in keys]
            text.append("| " + " | ".join([row["name"], *cells]) + " |")
    return "\n".join(text)


# -- Packages and flags ----------------------------------------------------------------------------


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> list[str]:
    found = {package: installed(package) for package in (*NEEDED, *OPTIONAL)}
    return [f"{package} {number}" for package, number in found.items() if number]


def check_packages() -> None:
    """Lists what is missing or has another version than the tests. Ends if no row can run."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    tested = {name.lower().replace("_", "-"): number for name, number in tested.items()}
    for package in (*NEEDED, *OPTIONAL):
        number = installed(package)
        expected = tested.get(package.lower().replace("_", "-"))
        if not number:
            what = "no row can run" if package in NEEDED else "skipped: the rows that need it"
            print(f"missing: {package} ({what})")
        elif expected and number.partition("+")[0] != expected:
            print(f"other version: {package} {number}, the tests run with {expected}")
    missing = [package for package in NEEDED if not installed(package)]
    if missing:
        sys.exit(f"error: no row can run without {', '.join(missing)}: pip install them")
    sys.stdout.flush()


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", type=int, nargs="+", choices=TITLES, default=[*TITLES], help="[all]")
    add("--chapters", type=int, nargs="+", help="of parts 1, 2 and 5: only these chapters")
    add("--minutes", type=float, default=9, help="a part starts no row after this time [9]")
    add("--rounds", type=int, default=1, help="of parts 3 and 4 [1]")
    add("--rehearse", action="store_true", help="on a CPU, with tiny models")
    add("--list", action="store_true", help="prints the rows, and runs none")
    add("--table", action="store_true", help="prints the table of the rows so far")
    add("-o", "--output", type=Path, help="the file of rows [outputs/gpu.jsonl]")
    args = parser.parse_args()
    name = "gpu-rehearsal.jsonl" if args.rehearse else "gpu.jsonl"
    args.output = args.output or REPOSITORY / "outputs" / name
    return args


def main() -> None:
    args = parse_args()
    check_packages()
    import torch

    if not args.rehearse and not args.table and not torch.cuda.is_available():
        sys.exit("error: no GPU is here: --rehearse runs every part on the CPU")
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    complete = True
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(args, Path(folder))
        if args.list:
            for row in measurements.rows():
                print(f"part {row.part}, {TITLES[row.part]}: {row.name}")
            return
        if not args.table:
            complete = run_parts(measurements, args.part)
        print("\n" + table(measurements.done()))
    if not complete:
        sys.exit("error: some rows have no result, as the lines above say")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(*sys.argv[2:4], sys.argv[4:])
    elif sys.argv[1:2] == ["--time-attention"]:
        time_attention("--rehearse" in sys.argv)
    else:
        main()
