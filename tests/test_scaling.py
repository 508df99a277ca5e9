"""Bytes and speeds between nodes: what the formulae say, and what chapters really send."""

import importlib
import itertools
import json
import math
import re
import sys
from argparse import Namespace
from functools import lru_cache

import pytest
from helpers.models import LLAMA, TINY_LLAMA, write_model
from helpers.pages import page
from helpers.runner import (
    CHAPTER_6,
    CHAPTER_7,
    CHAPTER_11,
    CHAPTER_12,
    CHAPTER_13,
    REPOSITORY,
    load,
    outcome,
    patches,
    run_tool,
)

SLOW_LINKS = REPOSITORY / "benchmarks" / "slow-links.py"
TOOL = REPOSITORY / "tools" / "estimate-scaling.py"
SCHEDULES = REPOSITORY / "tools" / "draw-schedule.py"
tool = load(SLOW_LINKS).FORMULAE

NVLINK_4 = tool.NVLINK_4 * 1e9
CLUSTER = tool.Cluster(devices=8, rate=4e14, link_in=NVLINK_4, link=50e9)


@lru_cache
def llama(size: str):
    return tool.load_model(name_of(size))


def name_of(size: str) -> str:
    """In tools/models.json."""
    return f"meta-llama/Llama-{'3.2' if size == '1B' else '3.1'}-{size}"


LLAMA_8B = llama("8B")


def settings(**changes) -> Namespace:
    return Namespace(**vars(tool.parse_args([])) | changes)


def estimate(method, nodes, cluster=CLUSTER, model=LLAMA_8B, **changes):
    return tool.estimate(method, model, nodes, cluster, settings(**changes))


# -- Bytes that chapters send ----------------------------------------------------------------------


@pytest.mark.rest
def test_bytes_between_two_nodes(tmp_path):
    """On 4 ranks, by the counters of the interface; the same rows give the same losses."""
    methods = ["FSDP", "HSDP", "PP over the link"]
    flags = ["--rates", "--rounds", 1, "--steps", 2, "--processes", 2, "--methods", *methods]
    flags += ["--json", tmp_path / "measured.json"]
    status, output = outcome(tmp_path, SLOW_LINKS, *flags, before=patches("forks"))
    if "cannot make two nodes" in output:
        pytest.skip(output.strip())
    assert status == 0, output
    rows = json.loads((tmp_path / "measured.json").read_text())
    assert [row["method"] for row in rows] == methods
    for row in rows:
        (run,) = row["runs"]
        # Besides: heads of packets, the norm, the loss, the signals to stop
        assert row["gloo"] < run["bytes"] < 1.03 * row["gloo"] + 10_000, row["method"]
        assert f"| {row['method']} | as it is |" in output
    assert output.count("\n|") == 2 + len(rows)


def test_rounds_of_local_steps():
    """HSDP without its all-reduce, and an even part of one message in bf16 per round."""
    cluster = tool.Cluster(8, 4e14, 371e9, 1e9 / 64)  # 1 Gbit/s for the eight devices of a node
    alone = estimate("LOCAL", 1, cluster, gradient_accumulation_steps=16, inner_steps=100)
    assert alone.step == estimate("HSDP", 1, cluster, gradient_accumulation_steps=16).step
    both = estimate("LOCAL", 2, cluster, gradient_accumulation_steps=16, inner_steps=100)
    message = 2 * LLAMA_8B.parameters / (1e9 / 8)  # seconds
    assert both.step - alone.step == pytest.approx(message / 100, rel=1e-3)
    assert both.over_link(8) == pytest.approx(2 * LLAMA_8B.parameters / 100)


TP, PP = "tensor_parallel", "pipeline_parallel"
CP, EP, AGAIN = "context_parallel", "expert_parallel", {"activation_checkpointing": True}
RUNS = [  # method, chapter, processes, samples of a micro-batch and group, micro-batches, settings
    ("TP", CHAPTER_6, 2, 4, 2, {TP: 2} | AGAIN),
    ("PP", CHAPTER_7, 2, 2, 4, {PP: 2, "schedule": "interleaved"}),
    ("PP", CHAPTER_7, 2, 2, 4, {PP: 2, "schedule": "zbv"}),
    ("PP", CHAPTER_7, 4, 2, 4, {PP: 2, "schedule": "1f1b"}),
    ("CP", CHAPTER_11, 2, 2, 2, {CP: 2, "exchange": "heads"} | AGAIN),
    ("CP", CHAPTER_11, 4, 2, 2, {CP: 2, "exchange": "tokens"} | AGAIN),
    ("EP", CHAPTER_12, 4, 2, 1, {EP: 2} | AGAIN),
    ("3D", CHAPTER_13, 4, 4, 4, {PP: 2, TP: 2}),
]


@pytest.mark.rest
@pytest.mark.parametrize(("method", "chapter", "processes", "samples", "count", "parts"), RUNS)
def test_collectives(trainer, tmp_path, method, chapter, processes, samples, count, parts):
    """What rank 0 of chapters 6 and 7 sends: the number, the sizes, and all bytes together."""
    # More queries than keys, so that their messages differ in size
    config = LLAMA | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    if method == "EP":  # each token uses all experts, so all messages are equally long
        config |= {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4}
    folder = write_model(tmp_path / "model", **config)
    flags = ["-m", folder, "-b", samples, "--gradient-accumulation-steps", count]
    flags += ["--max-steps", 2, "--eval-freq", 0, "--dtype", "fp32"]
    for name, value in parts.items():
        flags += [f"--{name.replace('_', '-')}"] + [value] * (value is not True)
    done = trainer(*flags, script=chapter, processes=processes, before=patches("collectives"))
    (found,) = re.findall("^seen (.*)", done.run.ranks[0].output, re.MULTILINE)
    found = {tuple(name.split(" ")): number for name, number in json.loads(found).items()}

    # The estimator's settings are per device: a group has more samples, micro-batches, or both.
    repeats = parts.get(PP, 1) * parts.get(CP, 1)
    per_device = {"batch_size": samples // parts.get(TP, 1)}
    per_device["gradient_accumulation_steps"] = count // repeats
    cluster = tool.Cluster(processes, 1e12, 1e9, 1e9)
    model = tool.load_model(str(folder))
    e = estimate(method, 1, cluster, model, dtype="fp32", seq_length=32, **per_device, **parts)
    for name, (number, c) in e.counts.items():
        if number and c.group.ranks > 1:
            kind = name.partition(",")[0]
            close = [x for x in found if x[0] == kind and abs(int(x[1]) / c.size - 1) < 0.01]
            assert sum(found.pop(x) for x in close) == number, (name, c.size, found)
    # Besides: loss, norms and their gradients, signals to stop
    assert sum(int(size) * number for (_, size), number in found.items()) < 0.02 * e.sent()


def test_pipelines_are_those_of_the_schedules():
    """The bubble, and how much later a delay of each send ends the step."""
    schedules = load(SCHEDULES)
    model = tool.Model(32, 1_000_000, 0, 1)
    for schedule, (_, stages, formula) in schedules.SCHEDULES.items():
        several = (2, 3) if schedule == "interleaved" else (stages,)
        for p, k, stages in itertools.product((2, 4, 8), (2, 4), several):
            # A stage per node; the update takes no time.
            cluster = tool.Cluster(1, 1e9, 1e9, 1e9, memory=math.inf)
            changes = {"schedule": schedule, "pipeline_parallel": p, "stages_per_rank": stages}
            changes |= {"gradient_accumulation_steps": k, "seq_length": 1}
            e = estimate("PP", p, cluster, model, **changes)
            assert e.bubble / (e.compute + e.bubble) == pytest.approx(formula(p, p * k, stages))
            (send,) = (c for name, (_, c) in e.counts.items() if name.startswith("send"))
            orders = schedules.simulate(schedule, p, p * k, stages)
            unit = (e.compute + e.bubble) / max(rank[-1][4] for rank in orders)
            late = delayed(orders, stages * p, send.time(cluster) / unit) * unit
            assert late == pytest.approx(e.step), (schedule, p, k)


def delayed(orders: list, stages: int, seconds: float) -> float:
    """When the last pass of the schedule ends if a send to another rank takes so long."""
    rank_of = {stage: rank for rank, passes in enumerate(orders) for _, stage, *_ in passes}
    orders = [list(passes) for passes in orders]
    done, free = {}, [0.0] * len(orders)
    while any(orders):
        for rank, passes in enumerate(orders):
            while passes:
                kind, stage, batch, begin, end = passes[0]
                before = stage - 1 if kind == "F" else stage + 1
                begins = free[rank]
                if kind != "W" and 0 <= before < stages:
                    if (kind, before, batch) not in done:
                        break
                    delay = seconds * (rank_of[before] != rank)
                    begins = max(begins, done[kind, before, batch] + delay)
                free[rank] = done[kind, stage, batch] = begins + end - begin
                passes.pop(0)
    return max(free)


# -- Formulae --------------------------------------------------------------------------------------


def test_bytes_of_collectives():
    group = tool.Group(ranks=4, nodes=2)
    sent = {
        (kind, library): tool.Collective(kind, 1000, group).sent(library)
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
        for library in ("nccl", "gloo")
    }
    assert sent["all-gather", "nccl"] == sent["all-gather", "gloo"] == 750
    assert sent["all-reduce", "nccl"] == sent["all-reduce", "gloo"] == 1500
    assert (sent["reduce-scatter", "nccl"], sent["reduce-scatter", "gloo"]) == (750, 1500)
    # One ring leaves a node once. Two rings, of the first and of the second ranks, leave it twice.
    assert tool.Collective("all-reduce", 1000, group).over_link(2) == 1500
    pairs = tool.Collective("all-reduce", 500, tool.Group(ranks=2, nodes=2))
    assert pairs.over_link(2) == 2 * 500
    within = tool.Collective("all-gather", 1000, tool.Group(ranks=2, nodes=1))
    assert within.over_link(2) == 0


def test_bytes_of_methods():
    """In fp32 on many ranks: DDP sends the model twice, FSDP three times, for each micro-batch."""
    size = 4 * LLAMA_8B.parameters
    share = 1 - 1 / 128
    assert estimate("DDP", 16).sent() == pytest.approx(2 * share * size)
    root = 4 * LLAMA_8B.root  # is gathered once
    for k in (1, 4):
        e = estimate("FSDP", 16, dtype="fp32", gradient_accumulation_steps=k)
        assert e.sent() == pytest.approx(k * share * (3 * size - root))
        # Between the nodes, HSDP sends as much as DDP does, however many micro-batches there are.
        e = estimate("HSDP", 16, dtype="fp32", gradient_accumulation_steps=k)
        assert e.over_link(8) == pytest.approx(2 * (1 - 1 / 16) * size)


def shape(layers, hidden, heads, key_heads, mlp, vocabulary, gated=True):
    """The sizes of a Llama, or (gated=False) of a GPT with tied embeddings."""
    keys = hidden // heads * key_heads
    matrices = [(hidden, hidden, False), (hidden, keys, False), (hidden, keys, False)]
    matrices += [(hidden, mlp, False)] * (1 + gated)
    matrices += [(hidden, hidden, True), (mlp, hidden, True)]
    return tool.Model(
        layers,
        sum(inputs * outputs for inputs, outputs, _ in matrices) + 2 * hidden,
        (1 + gated) * vocabulary * hidden + hidden,
        hidden,
        tied=0 if gated else vocabulary * hidden,
        matrices=tuple(matrices),
        query_size=hidden,
        key_size=keys,
        key_heads=key_heads,
    )


def mpt(layers, hidden):
    return shape(layers, hidden, 32, 32, 4 * hidden, 50368, gated=False)


def gpt(layers, hidden):
    return shape(layers, hidden, 32, 32, 4 * hidden, 51200, gated=False)


B8, B70 = shape(32, 4096, 32, 8, 14336, 128256), shape(80, 8192, 64, 8, 28672, 128256)
B405 = shape(126, 16384, 128, 8, 53248, 128256)
# Rates within a node (GB/s), between nodes (Gbit/s), of the memory (GB/s), and of attention, where
# the source says that it has FlashAttention or its kernels
TITAN = {"memory": 2400, "attention": 335}  # of H100s with HBM2e
H100 = {"attention": 335}
A100 = {"link_in": 12 * 20, "link": 200, "memory": 2039}
A100_40 = A100 | {"memory": 1555}
SHORT = {"seq_length": 2048}
CP_8B = TITAN | AGAIN
TP8 = {"tensor_parallel": 8}
IN_405B = TITAN | AGAIN | TP8 | {"pipeline_parallel": 8, "gradient_accumulation_steps": 4}
IN_405B["batch_size"] = 1 / 8
IN_TURNS = IN_405B | {"schedule": "interleaved"}
IN_LLAMA_3 = H100 | TP8 | {"pipeline_parallel": 16, "schedule": "interleaved", "stages_per_rank": 4}
KEPT = {"reshard_after_forward": False}


def megatron(layers, hidden, tensor, pipeline, devices, samples):
    """A run with micro-batches of 2 samples, and two stages per rank."""
    count = samples * tensor * pipeline // devices // 2  # micro-batches of a group
    settings = A100 | AGAIN | SHORT | KEPT | {"batch_size": 2 / tensor}
    settings |= {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    settings |= {"gradient_accumulation_steps": count / pipeline, "schedule": "interleaved"}
    method = "3D" if pipeline > 1 else "TP"
    # Their count of FLOPs for each token, with a second forward pass
    terms = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
    flops = 96 * layers * hidden**2 * terms
    return gpt(layers, hidden), method, devices // 8, settings, flops / 1e12


def foundry(model, nodes, samples, count=1, kind=A100_40, again=True):
    settings = kind | SHORT | {"batch_size": samples, "gradient_accumulation_steps": count}
    return model, "FSDP", nodes, settings | {"activation_checkpointing": again}, 1


def titan(model, method, nodes, settings):
    return model, method, nodes, settings, 1


def long(ranks):
    """A sample of 32k tokens per rank of a context group."""
    settings = CP_8B | {"seq_length": ranks * 2**15, "context_parallel": ranks}
    return titan(B8, "CP" if ranks > 1 else "FSDP", 1, settings)


def llama_3(nodes, count, **more):
    flops = 6 * B405.parameters + 6 * B405.layers * B405.hidden_size * 8192
    settings = IN_LLAMA_3 | {"batch_size": 1 / 8, "gradient_accumulation_steps": count} | more
    return B405, "3D", nodes, settings, flops / 1e12


M13, M30, M70 = mpt(40, 5120), mpt(48, 7168), mpt(80, 8192)
TWO = TITAN | {"batch_size": 2}
# In the order of the record's table
RUNS = [
    *[titan(B8, "FSDP", 1, TWO), titan(B8, "FSDP", 16, TWO)],
    *[long(1), long(2), long(4), long(8)],
    *[titan(B8, "FSDP", 1, TWO), titan(B70, "TP", 32, TWO | AGAIN | TP8)],
    *[titan(B405, "3D", 64, IN_405B), titan(B405, "3D", 64, IN_TURNS)],
    *[llama_3(1024, 2), llama_3(2048, 1)],
    megatron(48, 8192, 8, 2, 512, 1536),
    megatron(24, 2304, 1, 1, 32, 512),
    megatron(30, 3072, 2, 1, 64, 512),
    megatron(36, 4096, 4, 1, 128, 512),
    megatron(40, 6144, 8, 1, 256, 1024),
    megatron(60, 10240, 8, 4, 1024, 1792),
    megatron(80, 12288, 8, 8, 1536, 2304),
    megatron(96, 16384, 8, 16, 1920, 2160),
    *[foundry(M30, 1, 3, 21, A100), foundry(M70, 4, 2, 16, A100), foundry(M70, 8, 8, 4, A100)],
    *[foundry(M13, 2, 10), foundry(M13, 16, 16)],
    *[foundry(M30, 16, 6), foundry(M70, 8, 2), foundry(M70, 16, 4)],
]


def speed(run, rate: float) -> float:
    """Tokens per second and device, or TFLOP/s, of an estimate."""
    model, method, nodes, changes, per_token = run
    changes = {"seq_length": 8192, "batch_size": 1} | changes
    names = ("link_in", "link", "memory", "attention")
    rates = {name: changes.pop(name) for name in names if name in changes}
    rates = {"link_in": tool.NVLINK_4, "link": 400, "memory": 3350, "attention": None} | rates
    link_in, memory = rates["link_in"] * 1e9, rates["memory"] * 1e9
    attention = rates["attention"] and rates["attention"] * 1e12
    link = rates["link"] * 1e9 / 8
    cluster = tool.Cluster(8, rate, link_in, link, memory, attention=attention)
    e = estimate(method, nodes, cluster, model, **changes)
    samples = changes["batch_size"] * changes.get("gradient_accumulation_steps", 1)
    return samples * changes["seq_length"] * per_token / e.step


def rate_of(run, published: float) -> float:
    """The rate of matrix products with which this run is as fast as published."""
    low, high = 1e12, 1e17
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if speed(run, middle) < published else (low, middle)
    return low


# Name, GPUs, layout, published and estimated speed, difference. "base" begins a group of rows: the
# rate of the products of matrices is set so that this row agrees.
ROW = r"^\| (.+) \| ([\d,]+) \| (.+) \| ([\d,]+) \| ([\d,]+) \| (base|\S+%) \|"


def test_published_speeds():
    """The record's table: most rows are within 15 %, and the record names the others."""
    record = page("benchmarks/records/links.md")
    far, near = [], []
    rows = re.findall(ROW, record, re.MULTILINE)
    for (name, devices, _, published, estimated, off), run in zip(rows, RUNS, strict=True):
        assert devices == f"{8 * run[2]:,}"
        published = int(published.replace(",", ""))
        if off == "base":
            rate = rate_of(run, published)
        found = speed(run, rate)
        assert f"{found:,.0f}" == estimated, name
        if off != "base":
            assert off == f"{found / published - 1:+.0%}", name
            (far if abs(found / published - 1) > 0.15 else near).append(name)
    assert len(far) < len(near) / 3
    text = " ".join(record.split())
    assert f"{len(near)} of the {len(near + far)} estimates are within 15%" in text
    for name in far:
        assert f"**{name}**" in record, name
    base, other = (llama_3(*sizes, stages_per_rank=2) for sizes in ((1024, 2), (2048, 1)))
    assert f"16,384 GPUs is {speed(other, rate_of(base, 430)):.0f} TFLOP/s" in text


@pytest.mark.rest
def test_command_line(tmp_path):
    flags = ["-m", TINY_LLAMA / "config.json", "-b", 8, "-s", 256, "--nodes", 2, 1, "--explain"]
    output = run_tool(tmp_path, TOOL.name, *flags)
    assert output.startswith("Computed, not measured. ")
    rows = re.findall(r"^\| (\d+) \| \d+ \| (\w+) \|", output, re.MULTILINE)
    assert rows == [(n, m) for n in "12" for m in ("DDP", "FSDP", "HSDP", "TP", "PP")]
    assert "| HSDP | all-reduce, layers |" in output
    assert "| TP | all-gather, activations | 18 |" in output
    assert "| PP | receive, tied weights | 1 |" in output
    assert "| PP | reduce, tied gradients | 1 |" in output
    assert tool.FORMULAE in output


# -- The chooser -----------------------------------------------------------------------------------

CHOOSER = REPOSITORY / "tools" / "choose-layout.py"
sys.path.append(str(CHOOSER.parent))
chooser = importlib.import_module("choose-layout")


def choose(size: str, devices: int, *flags):
    command = ["--choose", "--no-trace", "-m", name_of(size), "--devices", devices, *flags]
    args = chooser.scaling.parse_args([*map(str, command)])
    return args, *chooser.choose(llama(size), devices, args)


def test_layouts_that_fit_and_those_that_do_not():
    args, fit, out = choose("8B", 8)
    fastest = min(choice.step for choice in fit)
    assert fit[0].layout.chapter == 3
    assert fit[0].step <= chooser.CLOSE * fastest
    slower = [choice.step for choice in fit if choice.step > chooser.CLOSE * fastest]
    assert [choice.step for choice in fit[-len(slower) :]] == sorted(slower)
    assert all(choice.memory <= 72e9 for choice in fit)
    for choice in fit:
        layout = choice.layout
        assert layout.tp * layout.pp * layout.cp * layout.dp == 8
        assert layout.dp * layout.samples * layout.micro_batches == args.global_batch_size
    # Pipelines have buffers for each of 512 micro-batches.
    assert {choice.layout.chapter for choice in out} == {2, 7}
    assert all("needs" in choice.problem for choice in out)
    # A slower link between nodes changes the order, and a model of 1B needs no sharding.
    _, slow, _ = choose("8B", 64, "--link", 10)
    assert slow[0].layout.chapter in (5, 7, 13)
    args, fit, _ = choose("1B", 8)
    assert fit[0].layout.chapter == 2
    assert chooser.report(llama("1B"), args).endswith("not among the layouts: docs/combining.md")
    # Too few samples for all devices
    _, _, out = choose("1B", 64, "--global-batch-size", 8)
    assert "8 samples are too few for 64 groups" in " ".join(choice.problem for choice in out)


def first_choice(size: str, devices: int, *flags) -> str:
    """A cell of the page's tables: the layout, its chapter, and its efficiency."""
    _, fit, _ = choose(size, devices, *flags)
    if not fit:
        return "does not fit"
    layout, again = fit[0].layout, ", checkpointing" if fit[0].layout.checkpointing else ""
    return f"{layout.name()} ({layout.chapter}){again}, {fit[0].efficiency:.0%}"


PUBLISHED_LAYOUTS = [  # the page's name, size, devices, samples of a step, the published layout
    ("torchtitan", "70B", 256, 512, "tp8, FSDP over 32"),
    ("torchtitan", "405B", 512, 256, "tp8 pp8, FSDP over 8"),
    ("Megatron", "70B", 64, 512, "tp4 pp4 cp2"),
    ("Megatron", "405B", 1024, 512, "tp8 pp8 cp2"),
    ("Llama 3", "405B", 8192, 2048, "tp8 pp16 dp64"),
]


def test_choices_on_the_page():
    """The first choices for four models, and those beside published layouts."""
    text = page("docs/scaling.md")
    for size in ("1B", "8B", "70B", "405B"):
        cells = [first_choice(size, devices) for devices in (8, 64, 256, 1024)]
        row = f"| {size} | {' | '.join(cells)} |"
        assert row in text, row
    text = page("benchmarks/records/links.md")
    for name, size, devices, samples, published in PUBLISHED_LAYOUTS:
        choice = first_choice(size, devices, "--global-batch-size", samples)
        row = f"| {name}, {size} | {devices:,} | {published} | {choice} |"
        assert row in text, row
    slower = first_choice("405B", 8192, "--global-batch-size", 2048, "--link", 100)
    assert slower.startswith("tp8 pp32 dp32"), slower
    assert slower in " ".join(text.split()), slower


SMALL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
SMALL |= {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.rest
def test_traced_layouts(tmp_path):
    """The chapters accept the command lines that it prints."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    flags = ["--devices", 16, "-s", 512, "--gpu-memory", 0.3, "--global-batch-size", 64]
    output = run_tool(tmp_path, TOOL.name, "--choose", "-m", path, *flags)
    rows = re.findall(r"^\| (\w.*) \|$", output, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    traced = cells[0].index("GB, traced")
    assert all(row[traced] for row in cells[1:4])
    (line,) = re.findall(r"^torchrun .*", output, re.MULTILINE)
    assert f"-m {path}" in line


# The largest difference of a rule of thumb and a trace, relative to the trace
ROUGH = 0.25


@pytest.mark.rest
def test_rules_of_thumb_for_memory():
    args, fit, _ = choose("70B", 64)
    for choice in fit[:2]:
        chooser.trace(choice, 64, args)
        assert not choice.problem
        assert choice.memory == pytest.approx(choice.traced, rel=ROUGH), choice.layout
