"""Chapter 2 trains what chapter 1 trains, on any number of ranks."""

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from conftest import (
    LLAMA,
    assert_one_sentence,
    assert_same_losses,
    assert_same_model,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_2, CHAPTER_5, CHAPTER_6, CHAPTER_8, Run

pytestmark = pytest.mark.rest

# Put before the script: each rank then tells, at its end, a digest of its weights, how many buckets
# its backward passes have averaged, how many pieces of memory hold its gradients, and which samples
# it has trained on.
WATCH = """
import hashlib
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

counts = {"buckets": 0}
samples = []

def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]

def count(state, bucket):
    counts["buckets"] += 1
    return allreduce_hook(state, bucket)

class Watched(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, count)
        counts["ddp"] = self

    def forward(self, input_ids, **options):
        samples.extend(digest(row) for row in input_ids)
        return super().forward(input_ids=input_ids, **options)

clip = torch.nn.utils.clip_grad_norm_

def watched_clip(parameters, *args, **options):
    parameters = list(parameters)
    counts["pieces"] = len({p.grad.untyped_storage().data_ptr() for p in parameters})
    return clip(parameters, *args, **options)

torch.nn.utils.clip_grad_norm_ = watched_clip

def tell():
    weights = "".join(digest(p) for p in counts["ddp"].parameters())
    print("\\nweights", hashlib.sha256(weights.encode()).hexdigest())
    print("buckets", counts["buckets"])
    print("gradients in", counts["pieces"])
    print("gradients kept", any(p.grad is not None for p in counts["ddp"].parameters()))
    print("samples", *samples)
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
torch.nn.parallel.DistributedDataParallel = Watched
"""


def told(result, what: str) -> list[str]:
    """What each rank has told."""
    told = [re.findall(f"^{what} (.*)$", rank.output, re.MULTILINE) for rank in result.run.ranks]
    assert all(len(lines) == 1 for lines in told), result.output
    return [lines[0] for lines in told]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_chapter_1(trainer, accumulation):
    """On 1 to 4 ranks, at the same global batch; and the ranks end with the same weights."""
    flags = [
        "--max-steps",
        30,
        "--eval-freq",
        15,
        "--lr",
        1e-3,
        "--gradient-accumulation-steps",
        accumulation,
    ]
    single = trainer(*flags, "-b", 12, name="single")
    for processes in (1, 2, 3, 4):
        name, size = f"ddp-{processes}", 12 // processes
        ddp = trainer(*flags, "-b", size, name=name, processes=processes, before=WATCH)
        assert_same_losses(single, ddp, 30)
        assert len(set(told(ddp, "weights"))) == 1
        # One bucket holds this model: averaged once per step, whatever the accumulation
        assert told(ddp, "buckets") == ["30"] * processes
        # Gradients lie in the bucket. While they accumulate, they also stay there.
        assert told(ddp, "gradients in") == ["1"] * processes
        assert told(ddp, "gradients kept") == [str(accumulation == 2)] * processes


def test_accumulation_and_ranks_are_the_same_to_the_bit_of_dropout(trainer, dropout_model):
    """A micro-batch has the same dropout masks wherever it is computed."""
    flags = ["-m", dropout_model, "-b", 4, "--max-steps", 30]
    single = trainer(*flags, "--gradient-accumulation-steps", 4, name="single")
    flags += ["--gradient-accumulation-steps", 2]
    ddp = trainer(*flags, name="ddp", processes=2)
    assert_same_losses(single, ddp, 30)


COUNT_GRAPHS = """
import atexit
import torch
import torch._dynamo

sizes = []
compile = torch.compile

def count(graph, example_inputs):
    sizes.append(sum(x.nbytes for x in example_inputs if isinstance(x, torch.nn.Parameter)))
    return graph.forward

torch.compile = lambda function: compile(function, backend=count)
atexit.register(lambda: print("\\ngraphs", len(sizes), "largest", max(sizes)))
"""


@pytest.mark.parametrize("chapter", [CHAPTER_2, CHAPTER_8], ids=lambda path: path.parent.name)
def test_a_compiled_layer_is_one_graph(trainer, tmp_path, chapter):
    """Also a layer that is larger than a bucket, which is 25 MB."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "wide", **wide)
    flags = ["-m", folder, "--compile", "--max-steps", 2, "--eval-freq", 0, "-b", 1]
    found = []
    for name, options in (("one", {}), ("ddp", {"processes": 1, "script": chapter})):
        result = trainer(*flags, name=name, before=COUNT_GRAPHS, **options)
        (graphs,) = re.findall(r"^graphs (\d+) largest (\d+)", result.output, re.MULTILINE)
        found.append(graphs)
    assert found[0] == found[1]
    assert int(found[0][1]) > 25 * 2**20


def test_each_sample_is_used_once(trainer):
    """Over all ranks of an epoch, also when it goes on with another number of them."""
    flags = ["--num-epochs", 1, "--ckpt-freq", 5, "--eval-freq", 0]
    first = trainer(*flags, "-b", 4, "--max-steps", 7, processes=3, before=WATCH)
    second = trainer(*flags, "-b", 6, "--gradient-accumulation-steps", 2, processes=2, before=WATCH)
    parts = [*told(first, "samples"), *told(second, "samples")]
    used = Counter(sample for part in parts for sample in part.split())
    newest = second.folder / second.checkpoints[-1] / "state.json"
    state = json.loads(newest.read_text())
    assert set(used.values()) == {1}
    assert len(used) == state["samples"]
    assert state["train_samples"] - 24 < state["samples"] <= state["train_samples"]
    assert [len(part.split()) for part in told(first, "samples")] == [28] * 3


def test_resume_on_any_number_of_ranks_and_under_the_other_chapter(trainer, dropout_model):
    """The losses are those of an undisturbed run, and bit for bit where the ranks are as many."""
    flags = ["-m", dropout_model, "--max-steps", 24, "--eval-freq", 12, "--ckpt-freq", 8]
    flags += ["--keep-checkpoints", 9, "-b", 4, "--log-freq", 3]
    two, four = ["--gradient-accumulation-steps", 2], ["--gradient-accumulation-steps", 4]
    single = trainer(*flags, *four, name="single")
    ddp = trainer(*flags, *two, name="ddp", processes=2)
    assert_same_losses(single, ddp, 10)  # the saved steps 8 and 16 are logged, too
    for name, origin, options, processes in (
        ("ddp-ddp", ddp, two, 2),
        ("single-ddp", single, two, 2),
        ("ddp-single", ddp, four, 0),
        ("ddp-on-4", ddp, ["--gradient-accumulation-steps", 1], 4),
    ):
        take_over(origin, trainer, name, 8)
        resumed = trainer(*flags, *options, name=name, processes=processes)
        assert "Continuing from" in resumed.output
        assert_same_losses(single, resumed, 10)
        if name == "ddp-ddp":
            assert exact(resumed.records) == exact(ddp.records)
            assert_same_model(resumed, ddp)


# Rank 1 alone gets a signal, in its third step.
STOP = """
import os, signal, torch

def step(*arguments, **options):
    steps.append(None)
    if os.environ["RANK"] == "1" and len(steps) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(*arguments, **options)

steps = []
original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


def test_a_signal_to_one_rank_stops_all(trainer):
    result = trainer("--max-steps", 6, processes=2, before=STOP, status=128 + signal.SIGTERM)
    assert "Stopped after step 3:" in result.output
    assert result.checkpoints == ["step-00000003"]
    assert [rank.process.exitcode for rank in result.run.ranks] == [128 + signal.SIGTERM] * 2


def test_memory_of_every_rank_and_of_the_worst(trainer):
    record = trainer("--max-steps", 1, processes=3).records[0]
    ranks = [record[f"memory/rank{rank}/resident_gb"] for rank in range(3)]
    assert len(set(ranks)) > 1
    assert record["memory/resident_gb"] == max(ranks)


def test_rank_0_alone_speaks(trainer):
    result = trainer("--max-steps", 2, processes=2, comet=True)
    assert len([*(result.folder / "comet").glob("*.zip")]) == 1
    assert "step 2/2" in result.run.ranks[0].output
    assert result.run.ranks[1].output == ""


def test_one_rank_per_node_prepares(trainer, tmp_path):
    """The others wait for it. Here ranks 0 and 2 are a node with a cache, and rank 1 another."""
    caches = """
import os, time, datasets
rank = int(os.environ["RANK"])
os.environ["LOCAL_RANK"] = str(rank // 2)
datasets.config.HF_DATASETS_CACHE = os.path.join(os.environ["CACHES"], str(rank % 2))
original = datasets.Dataset.map

def map(self, function, **options):
    def slow(rows, **arguments):
        print("\\ntokenizes", rank)
        time.sleep(2)
        return function(rows, **arguments)

    return original(self, slow, new_fingerprint="same", **options)

datasets.Dataset.map = map
"""
    environment = {"CACHES": str(tmp_path / "caches")}
    result = trainer("--max-steps", 2, processes=3, before=caches, env=environment)
    counts = [run.output.count("tokenizes") for run in result.run.ranks]
    assert counts[2] == 0 < min(counts[:2])


DIFFERENCES = {
    "flags": "sys.argv += ['--lr', '0.5']",
    "data": "sys.argv[sys.argv.index('-d') + 1] = os.environ['OTHER']",
    "checkpoints": "pathlib.Path.glob = lambda *_: iter(())",
}


def test_ranks_that_differ_are_refused(trainer, texts):
    """Say rank 1 has another flag, other data, or does not see the checkpoint."""
    before = trainer("--max-steps", 2, processes=2, name="checkpoints")
    other = trainer.folder / "other.txt"
    other.write_text(" ".join(texts))
    for name, difference in DIFFERENCES.items():
        patch = f"import os, pathlib, sys\nif os.environ['RANK'] == '1':\n    {difference}"
        options = {"processes": 2, "before": patch, "env": {"OTHER": str(other)}}
        after = trainer("--max-steps", 4, status=1, name=name, **options)
        assert_one_sentence(after.output, "the ranks differ in flags, data or checkpoints")
        assert not (trainer.folder / name / "metrics.jsonl").exists() or name == "checkpoints"
    assert before.checkpoints == ["step-00000002"]
    assert len(before.column("loss")) == 2


def test_without_torchrun(tmp_path):
    run = Run(CHAPTER_2, ["--demo"], tmp_path / "output")
    assert run.wait() == 1
    command = f"torchrun --standalone --nproc-per-node 2 {CHAPTER_2} --demo"
    assert_one_sentence(run.output, command)


# Minutes are 0.4 s here, and rank 0 needs 4 s to write a checkpoint.
SHORT_MINUTES = """
import time
import torch
from torch.distributed import distributed_c10d

set_timeout = distributed_c10d._set_pg_timeout

def scaled(limit, group=None):
    set_timeout(limit / 150, group)
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    print("\\nminutes", backend.options._timeout.total_seconds() / 60 * 150)

distributed_c10d._set_pg_timeout = scaled

save = torch.save

def slow(*args, **options):
    time.sleep(4)  # seconds; a step may wait 2 s for another rank, and a save 12 s
    return save(*args, **options)

torch.save = slow
"""


def test_steps_have_a_short_time_limit_and_saves_a_long_one(trainer):
    flags = ["--max-steps", 5, "--eval-freq", 0, "--ckpt-freq", 2]
    run = trainer(*flags, processes=2, before=SHORT_MINUTES)
    limits = re.findall(r"^minutes (\S+)", run.run.ranks[0].output, re.MULTILINE)
    assert [round(float(limit)) for limit in limits] == [5, 30, 5, 30, 30]
    assert run.checkpoints == ["step-00000004", "step-00000005"]


# The limits of all process groups in minutes, at the end of each step
ALL_LIMITS = """
import torch
from torch.distributed import distributed_c10d

def end_of_step(*unused):
    for group in distributed_c10d._world.pg_map:
        options = group._get_backend(torch.device("cpu")).options
        print("\\nlimit", group.group_desc, options._timeout.total_seconds() / 60)

zero_grad = torch.optim.AdamW.zero_grad

def watched(optimizer, **options):
    end_of_step()
    return zero_grad(optimizer, **options)

torch.optim.AdamW.zero_grad = watched
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("chapter", "flags"),
    [
        (CHAPTER_5, ["--shard-size", 2, "--async-checkpoint"]),
        (CHAPTER_6, ["--tensor-parallel", 2]),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else "",
)
def test_all_groups_have_the_short_limit(trainer, chapter, flags):
    """Also those of a mesh, but not the groups that wait for tokens or a disk."""
    flags += ["--max-steps", 3, "--eval-freq", 0, "--ckpt-freq", 9]
    job = trainer(*flags, script=chapter, processes=4, before=ALL_LIMITS)
    found = re.findall(r"^limit (\S+) (\S+)", job.run.ranks[0].output, re.MULTILINE)
    limits = {name: float(minutes) for name, minutes in found}  # of the last step
    meshes = {name for name in limits if name.startswith("mesh_")}
    assert len(meshes) >= 2, limits
    for name, minutes in limits.items():
        assert minutes >= 30 if name == "patient" else minutes == 5, limits
