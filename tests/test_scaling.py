"""Bytes and speeds between nodes: what the formulae say, and what chapters really send."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from argparse import Namespace

import pytest
from conftest import TINY_LLAMA, assert_one_sentence
from runner import REPOSITORY

SLOW_LINKS = REPOSITORY / "benchmarks" / "slow-links.py"
TOOL = REPOSITORY / "tools" / "estimate-scaling.py"
sys.path.append(str(SLOW_LINKS.parent))  # it imports another benchmark
spec = importlib.util.spec_from_file_location("benchmarks_slow_links", SLOW_LINKS)
benchmark = importlib.util.module_from_spec(spec)
sys.modules["benchmarks_slow_links"] = benchmark  # for its dataclass
spec.loader.exec_module(benchmark)
tool = benchmark.FORMULAE

CLUSTER = tool.Cluster(devices=8, rate=4e14, link_in=450e9, link=50e9)
LLAMA_8B = tool.Model(layers=32, layer=218_112_000, root=1_050_677_248, hidden_size=4096)


def settings(**changes) -> Namespace:
    usual = {"batch_size": 2, "seq_length": 8192, "gradient_accumulation_steps": 1}
    return Namespace(**usual | {"activation_checkpointing": False, "dtype": "bf16"} | changes)


def estimate(method, nodes, cluster=CLUSTER, model=LLAMA_8B, **changes):
    return tool.estimate(method, model, nodes, cluster, settings(**changes))


# -- Bytes that chapters send ----------------------------------------------------------------------


FEW = ["DDP", "FSDP"]
MANY = [*FEW, "HSDP", "TP in a node", "PP over the link"]


@pytest.mark.parametrize(("processes", "methods"), [(1, FEW), (2, MANY)])
def test_bytes_between_two_nodes(tmp_path, processes, methods):
    """On 2 and 4 ranks, by the counters of the interface; the same rows give the same losses."""
    command = [sys.executable, SLOW_LINKS, "--rates", "--rounds", 1, "--steps", 3]
    command += ["--processes", processes, "--json", tmp_path / "measured.json"]
    command += ["--methods", *methods]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    if "cannot make two nodes" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "measured.json").read_text())
    assert [row["method"] for row in rows] == methods
    for row in rows:
        (run,) = row["runs"]
        # Besides: heads of packets, the norm, the loss, the signals to stop
        assert row["gloo"] < run["bytes"] < 1.03 * row["gloo"] + 10_000, row["method"]
        assert f"| {row['method']} | as it is |" in done.stdout
    assert done.stdout.count("\n|") == 2 + len(rows)


def test_without_namespaces():
    """Where there is no `ip`; an ordinary user gets the same sentence about permissions."""
    env = os.environ | {"PATH": "/nowhere"}
    command = [sys.executable, SLOW_LINKS]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert_one_sentence(done.stderr, "Network namespaces need Linux, root and iproute2")


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


def test_times():
    alone = tool.Cluster(devices=1, rate=4e14, link_in=450e9, link=50e9)
    for method in ("DDP", "FSDP", "HSDP"):
        first = estimate(method, 1, alone)
        assert first.step == first.compute  # no ranks, no collectives
        tokens = 2 * 8192
        flops = 6 * LLAMA_8B.parameters + 12 * 32 * 4096 * 8192
        assert first.compute == pytest.approx(tokens * flops / 4e14)
        steps = [estimate(method, n).step for n in (1, 2, 4, 16, 64, 256, 1024)]
        assert steps == sorted(steps)
        # The slower the link, the longer the step, up to the time that the link alone takes
        slow = tool.Cluster(devices=8, rate=4e14, link_in=450e9, link=1e6)
        assert estimate(method, 16, slow).step > steps[3]
        leaving = estimate(method, 16).over_link(8)
        assert estimate(method, 16, slow).step > leaving / (8 * 1e6)
        longer = estimate(method, 16, activation_checkpointing=True)
        assert longer.compute > estimate(method, 16).compute
    # One node: HSDP is FSDP
    assert estimate("HSDP", 1).step == estimate("FSDP", 1).step
    # Rings through 8,192 devices are slow, those through 1,024 nodes less so.
    assert estimate("FSDP", 1024).step > 1.5 * estimate("HSDP", 1024).step


# Layers, parameters of a layer and of the rest, hidden size
FOUNDRY_1B = tool.Model(24, 50_358_272, 107_352_064, 2048)
PUBLISHED = [
    # model, samples, length, tokens/s per device on one node, GB/s in a node, Gbit/s, nodes
    ("torchtitan, Llama 3.1 8B", LLAMA_8B, 2, 8192, 6667, 450, 400, 16),
    ("llm-foundry, 1B", FOUNDRY_1B, 10, 2048, 19271, 300, 200, 16),
    ("llm-foundry, 1B", FOUNDRY_1B, 10, 2048, 19271, 300, 200, 64),
    ("llm-foundry, 1B", FOUNDRY_1B, 2, 2048, 19271, 300, 200, 64),
]


def test_published_scaling():
    """The page's table: the step on one node over the step on many, as FSDP."""
    page = (REPOSITORY / "docs" / "scaling.md").read_text()
    for name, model, samples, length, speed, link_in, link, nodes in PUBLISHED:
        flops = 6 * model.parameters + 12 * model.layers * model.hidden_size * length
        cluster = tool.Cluster(8, speed * flops, link_in * 1e9, link * 1e9 / 8)
        one, many = (
            estimate("FSDP", n, cluster, model, batch_size=samples, seq_length=length).step
            for n in (1, nodes)
        )
        row = f"| {name} | {samples} × {length:,} | 8 to {8 * nodes} | {one / many:.1%} |"
        assert row.replace("%", " %") in page, row


def test_command_line(tmp_path):
    command = [sys.executable, TOOL, "-m", TINY_LLAMA / "config.json", "-b", 8, "-s", 256]
    options = {"capture_output": True, "text": True}
    more = ["--nodes", 2, 1, "--explain", "-o", tmp_path / "scaling"]
    done = subprocess.run([*map(str, [*command, *more])], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Computed, not measured. ")
    rows = re.findall(r"^\| (\d+) \| \d+ \| (\w+) \|", done.stdout, re.MULTILINE)
    assert rows == [(n, m) for n in "12" for m in ("DDP", "FSDP", "HSDP")]
    assert "| HSDP | all-reduce, layers |" in done.stdout
    assert tool.FORMULAE in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.png", "scaling.svg"}
    done = subprocess.run([*map(str, command), "--link", "0"], **options)
    assert done.returncode == 2
    assert_one_sentence(done.stderr, "0 is not above 0")
    command[3] = tmp_path / "nothing.json"
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 1
    assert_one_sentence(done.stderr, "nothing.json")
