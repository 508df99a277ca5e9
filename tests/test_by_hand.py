"""The scripts of by-hand/: their gradients, their bytes, their form, and what a damage does."""

import re
import shlex
import sys

import pytest
import torch
from conftest import assert_one_sentence
from runner import REPOSITORY, Job, outcome
from test_chapters import code_lines
from test_readme import page
from test_torchrun import FORKING

FOLDER = REPOSITORY / "by-hand"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
every_script = pytest.mark.parametrize("name", SCRIPTS)
PROCESSES = [(name, n) for name in SCRIPTS for n in (2, 4) if (name, n) != ("pipeline", 4)]

# Put before a script: counts the bytes that a rank gives to collectives for other ranks, prints
# them at the end, and prints when an all-reduce and when a backward pass is called and returns.
WATCH = """
import torch
import torch.distributed as dist

passed = []

def watch(name, bytes_of):
    original = getattr(dist, name)

    def watched(*args, **options):
        passed.append(bytes_of(dist.get_world_size(), *args))
        print(name, flush=True)
        return original(*args, **options)

    setattr(dist, name, watched)

def exchanged(n, received, rows, received_counts=None, counts=None):
    own = rows.chunk(n) if counts is None else rows.split(counts)
    return rows.nbytes - own[dist.get_rank()].nbytes

watch("all_reduce", lambda n, tensor, *_: 2 * (n - 1) * tensor.nbytes // n)
watch("all_gather", lambda n, whole, part: (n - 1) * part.nbytes)
watch("reduce_scatter", lambda n, part, parts: sum(p.nbytes for p in parts) - part.nbytes)
watch("all_to_all_single", exchanged)
watch("isend", lambda n, tensor, destination: tensor.nbytes)

backward = torch.Tensor.backward
def watched_backward(*args):
    print("backward begins", flush=True)
    backward(*args)
    print("backward ends", flush=True)
torch.Tensor.backward = watched_backward

destroy = dist.destroy_process_group
def tell():
    print("passed", sum(passed))
    destroy()
dist.destroy_process_group = tell
"""


def launch(name: str, folder, processes: int, text: str | None = None) -> list[str]:
    """The output of each rank. `text` takes the place of the script."""
    script = SCRIPTS[name]
    if text:
        script = folder / script.name
        script.write_text(text)
    job = Job(script, [], folder / name, processes, before=WATCH)
    assert job.wait() == 0, job.output
    return [run.output for run in job.ranks]


def results(output: str) -> list[tuple[int, float]]:
    """Bytes and largest difference, for each part of the script."""
    found = re.findall(r"(\d+) bytes sent, largest difference ([-+.e\d]+|nan|inf)", output)
    return [(int(sent), float(difference)) for sent, difference in found]


NUMBER = 8  # bytes of a number in fp64, and of an index


def formula(name: str, n: int) -> list[list[int]]:
    """For each rank the bytes of each part, with `n` ranks."""
    gradients = 4 * 16 * 16 * NUMBER
    shard = 4 * 4 * n * NUMBER
    tokens = 4 * 16 * NUMBER  # of a rank
    micro_batch = 8 * 16 * NUMBER
    own_heads = 2 * 4 * 8 * NUMBER  # two heads of the tokens of a rank
    block = 6 * 8 * NUMBER
    chosen = 32 * (NUMBER + NUMBER)
    parts = {
        # An all-reduce of all gradients, once in one way and once in the other
        "ddp": 2 * [2 * (n - 1) * gradients // n],
        # Two layers: an all-gather forward, an all-gather and a reduce-scatter backward
        "fsdp": [2 * 3 * (n - 1) * shard],
        # Two all-reduces. Or two all-gathers and two reduce-scatters
        "tensor_parallel": [2 * 2 * (n - 1) * tokens, (2 + 2) * (n - 1) * tokens],
        # Four micro-batches in one direction
        "pipeline": 2 * [4 * micro_batch],
        # Queries, keys and values, and the output; and the gradients of these four
        "context_parallel": [(4 + 4) * (n - 1) * own_heads],
        # Keys and values forward; the same and their gradients backward
        "ring_attention": [(2 + 4) * n * block],
        # Five steps
        "gradient_compression": [5 * (n - 1) * chosen],
    }
    if name == "expert_parallel":
        return [[sent] for sent in bytes_of_experts(n)]
    return n * [parts[name]]


def bytes_of_experts(n: int) -> list[int]:
    """The counts, and the rows that move: there and back in the forward and the backward pass."""
    torch.manual_seed(0)
    torch.randn(n, 8, 16, dtype=torch.float64)
    torch.randn(n, 16, 16, dtype=torch.float64)
    choices = torch.randint(n, (n, 8)).tolist()
    found = []
    for rank in range(n):
        away = sum(expert != rank for expert in choices[rank])
        guests = sum(row.count(rank) for row in choices) - choices[rank].count(rank)
        found.append((n - 1) * NUMBER + 2 * (away + guests) * 16 * NUMBER)
    return found


@pytest.mark.parametrize(("name", "processes"), PROCESSES)
def test_gradients_and_bytes(tmp_path, name, processes):
    """The gradients are those of one process. The bytes are those of the formula, and the bytes
    that the collectives have been given."""
    expected = formula(name, processes)
    for rank, output in enumerate(launch(name, tmp_path, processes)):
        parts = results(output)
        assert [sent for sent, _ in parts] == expected[rank], output
        assert all(difference < 1e-6 for _, difference in parts), output
        passed = int(re.search(r"passed (\d+)", output)[1])
        if name == "gradient_compression":  # the residuals, for the comparison
            passed -= 2 * (processes - 1) * 512 * NUMBER // processes
        assert passed == sum(expected[rank]), output
        if name == "ddp":
            check_overlap(output)
        if name == "pipeline":
            check_order(output, rank)


def check_overlap(output: str) -> None:
    """Part 1 sends four gradients, and part 2 sends two buckets during the backward pass."""
    events = re.findall("^(?:all_reduce|backward .*)$", output, re.MULTILINE)
    assert events == 4 * ["all_reduce"] + ["backward begins", *2 * ["all_reduce"], "backward ends"]


def check_order(output: str, rank: int) -> None:
    printed = re.findall(r"^(\w+), rank \d: (\S+), micro-batches in memory: ?(.*)$", output, re.M)
    gpipe, one_f_one_b = ([x for x in printed if x[0] == name] for name in ("GPipe", "1F1B"))
    assert " ".join(step for _, step, _ in gpipe) == "F0 F1 F2 F3 B0 B1 B2 B3"
    orders = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert " ".join(step for _, step, _ in one_f_one_b) == orders[rank]
    assert max(len(kept.split()) for *_, kept in gpipe) == 4
    assert max(len(kept.split()) for *_, kept in one_f_one_b) == 2 - rank


# Code of a script, and what takes its place: often the same without the collective
DAMAGES = [
    ("ddp", "average(gradient).wait()", "pass"),
    ("ddp", "average(buckets.pop())", "average(torch.zeros(2))"),
    ("ddp", "weights[0].register_post_accumulate_grad_hook(send_bucket)", ""),
    ("ddp", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
    ("fsdp", "dist.all_gather(whole, shard)", "whole = world_size * [shard]"),
    (
        "fsdp",
        "dist.reduce_scatter(",
        "shards.grad[layer] = weight_grad.chunk(world_size)[rank]  # ",
    ),
    ("fsdp", "torch.optim.AdamW([shards]).step()", ""),
    ("tensor_parallel", "add_up=all_reduce", "add_up=torch.nn.Identity()"),
    ("tensor_parallel", "grad_x = add_up(grad_tokens)", "grad_x = grad_tokens"),
    ("tensor_parallel", "dist.all_gather(parts, part)", "parts = world_size * [part]"),
    ("tensor_parallel", "dist.reduce_scatter(", "part = summand.chunk(world_size)[rank]  # "),
    ("pipeline", "dist.recv(tensor, 1 - rank)", "tensor.zero_()"),
    ("pipeline", "y.pop(n).backward(grad)", "y.pop(n).sum().backward()"),
    ("context_parallel", "dist.all_to_all_single(received, parts)", "received = parts"),
    ("context_parallel", "exchange(grad_y, split=HEADS, join=TOKENS)", "output.detach()"),
    ("ring_attention", "k, v = pass_on(torch.stack([k, v]))", "pass"),
    ("ring_attention", "grad_k, grad_v = pass_on(", "_, _ = pass_on("),
    ("ring_attention", "output * (log_sum - new_log_sum).exp()", "output"),
    ("expert_parallel", "dist.all_to_all_single(received, ", "received = rows.clone()  # "),
    ("expert_parallel", "grad[order] = exchange(", "grad[:] = exchange("),
    ("gradient_compression", "all_gather(values)", "torch.cat(world_size * [values])"),
    ("gradient_compression", "residual[indices] = 0", ""),
    ("gradient_compression", "residual += gradient_of", "residual = gradient_of"),
]


@pytest.mark.parametrize(("name", "code", "instead"), DAMAGES)
def test_a_damage_shows(tmp_path, name, code, instead):
    """A rank prints a large difference for a part of the script."""
    text = SCRIPTS[name].read_text()
    assert text.count(code) == 1
    outputs = launch(name, tmp_path, 2, text.replace(code, instead))
    found = [difference for output in outputs for _, difference in results(output)]
    assert len(found) == sum(map(len, formula(name, 2)))
    assert any(not difference < 1e-4 for difference in found), found  # nan is large, too


def test_every_script_is_damaged():
    assert {name for name, *_ in DAMAGES} == set(SCRIPTS)


@every_script
def test_the_command_in_the_docstring(name):
    (command,) = re.findall(r"^    (torchrun .*)$", SCRIPTS[name].read_text(), re.MULTILINE)
    assert command == f"torchrun --standalone --nproc-per-node 2 by-hand/{name}.py"


@pytest.mark.rest
def test_the_command_of_the_page(tmp_path):
    """With torchrun itself, in the top folder."""
    (command,) = re.findall(r"^torchrun .*$", page("by-hand/README.md"), re.MULTILINE)
    status, output = outcome(tmp_path, FORKING, *shlex.split(command)[1:], cwd=REPOSITORY)
    assert status == 0, output
    assert output.count("bytes sent, largest difference") == 2 * len(formula("ddp", 2)[0])


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "processes"), [("ddp", None), ("ddp", 1), ("pipeline", None), ("pipeline", 4)]
)
def test_the_wrong_number_of_processes(tmp_path, name, processes):
    """Without torchrun, with one process, and with too many for two stages: one sentence."""
    env = {"WORLD_SIZE": str(processes)} if processes else {}
    status, output = outcome(tmp_path, SCRIPTS[name], env=env)
    assert status == 1
    remedy = f"start it as torchrun --standalone --nproc-per-node 2 {SCRIPTS[name]}"
    assert_one_sentence(output, remedy)


@every_script
def test_form(name):
    """At most 40 lines of code, nothing but torch, and a question at the top."""
    text = SCRIPTS[name].read_text()
    # Python imports from the folder of a script first. Since Python 3.14, gzip needs `compression`.
    assert name not in {*sys.stdlib_module_names, "compression"}
    assert len(code_lines(text)) <= 40
    imports = re.findall(r"^\s*((?:import|from) .*)", text, re.MULTILINE)
    assert imports == ["import os", "import torch", "import torch.distributed as dist"]
    assert re.match(r'"""[A-Z][^\n]*\?\n', text)
    size = 'os.environ.get("WORLD_SIZE") != "2"'  # for two stages; the others take any number
    if name != "pipeline":
        size = 'os.environ.get("WORLD_SIZE", "1") == "1"'
    assert f"\nif {size}:" in text
    assert "start it as torchrun --standalone --nproc-per-node 2 {__file__}" in text
    assert text.endswith("\ndist.destroy_process_group()\n")


def test_the_page_has_every_script():
    """In its table, with functions that the chapters call; a chapter links to its script."""
    pattern = r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|.*\| (.*) \|$"
    rows = re.findall(pattern, page("by-hand/README.md"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(SCRIPTS)
    for name, calls in rows:
        chapter = re.match(r"\[(\d+)\]\(\.\./(\d\d-[\w-]+)/README\.md\)", calls)
        if not chapter:
            assert calls.startswith("no chapter")
            continue
        script = (REPOSITORY / chapter[2] / "train-llm.py").read_text()
        for call in re.findall("`([A-Za-z_0-9]+)`", calls):
            assert re.search(rf"\b{call}\b", script), call
        link = f"[`by-hand/{name}.py`](../by-hand/{name}.py)"
        assert link in page(f"{chapter[2]}/README.md")
