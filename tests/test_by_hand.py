"""The scripts of by-hand/: their results, their form, and what a damage does.

Their bytes, their memory and their order are checked with the exercises (test_exercises.py)."""

import re
import shlex
import sys

import pytest
from conftest import assert_one_sentence
from runner import REPOSITORY, Job, outcome
from test_readme import page
from test_torchrun import FORKING

FOLDER = REPOSITORY / "by-hand"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
every_script = pytest.mark.parametrize("name", SCRIPTS)
FUNCTIONS = {"ddp": 2, "tensor_parallel": 2, "pipeline": 2}  # the others have one
PROCESSES = [(name, n) for name in SCRIPTS for n in (2, 4) if (name, n) != ("pipeline", 4)]


def launch(name: str, folder, processes: int, text: str | None = None) -> list[str]:
    """The output of each rank. `text` takes the place of the script."""
    script = SCRIPTS[name]
    if text:
        script = folder / script.name
        script.write_text(text)
    job = Job(script, [], folder / name, processes)
    assert job.wait() == 0, job.output
    return [run.output for run in job.ranks]


def results(output: str) -> list[tuple[int, float]]:
    """Bytes and largest difference, for each part of the script."""
    found = re.findall(r"(\d+) bytes sent, largest difference ([-+.e\d]+|nan|inf)", output)
    return [(int(sent), float(difference)) for sent, difference in found]


@pytest.mark.parametrize(("name", "processes"), PROCESSES)
def test_results(tmp_path, name, processes):
    """The results are those of one process, on each rank, and each rank has sent bytes."""
    for output in launch(name, tmp_path, processes):
        parts = results(output)
        assert len(parts) == FUNCTIONS.get(name, 1)
        assert all(sent > 0 and difference < 1e-9 for sent, difference in parts), output


def test_the_printed_order(tmp_path):
    """What by-hand/README.md promises: the order is printed while the stages run."""
    for rank, output in enumerate(launch("pipeline", tmp_path, 2)):
        printed = re.findall(r": (\w\d), micro-batches in memory: ?(.*)$", output, re.M)
        orders = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
        steps = " ".join(step for step, _ in printed)
        assert steps == f"F0 F1 F2 F3 B0 B1 B2 B3 {orders[rank]}"
        kept = [len(kept.split()) for _, kept in printed]
        assert (max(kept[:8]), max(kept[8:])) == (4, 2 - rank)


# A damage of each script: the exercises have more of them
DAMAGES = [
    ("ddp", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
    ("fsdp", "torch.optim.AdamW([shards]).step()", ""),
    ("tensor_parallel", "add_up=all_reduce", "add_up=torch.nn.Identity()"),
    ("pipeline", "return tensor.requires_grad_()", "return torch.zeros(32, 16).requires_grad_()"),
    ("context_parallel", "dist.all_to_all_single(received, parts)", "received = parts"),
    ("ring_attention", "output * (log_sum - new_log_sum).exp()", "output"),
    ("expert_parallel", "grad[order] = exchange(", "grad[:] = exchange("),
    ("local_steps", "dist.all_reduce(gradient, dist.ReduceOp.AVG)", ""),
    ("gradient_compression", "residual += gradient_of", "residual = gradient_of"),
]


@pytest.mark.parametrize(("name", "code", "instead"), DAMAGES)
def test_a_damage_shows(tmp_path, name, code, instead):
    """A rank prints a large difference for a part of the script."""
    text = SCRIPTS[name].read_text()
    assert text.count(code) == 1
    outputs = launch(name, tmp_path, 2, text.replace(code, instead))
    found = [difference for output in outputs for _, difference in results(output)]
    assert len(found) == 2 * FUNCTIONS.get(name, 1)
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
    assert output.count("bytes sent, largest difference") == 2 * FUNCTIONS["ddp"]


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
    """Nothing but torch, a question at the top, and three regions."""
    text = SCRIPTS[name].read_text()
    # Python imports from the folder of a script first. Since Python 3.14, gzip needs `compression`.
    assert name not in {*sys.stdlib_module_names, "compression"}
    imports = re.findall(r"^\s*((?:import|from) .*)", text, re.MULTILINE)
    assert imports == ["import os", "import torch", "import torch.distributed as dist"]
    assert re.match(r'"""[A-Z][^\n]*\?\n', text)
    size = 'os.environ.get("WORLD_SIZE") != "2"'  # for two stages; the others take any number
    if name != "pipeline":
        size = 'os.environ.get("WORLD_SIZE", "1") == "1"'
    assert f"\nif {size}:" in text
    assert "start it as torchrun --standalone --nproc-per-node 2 {__file__}" in text
    assert re.findall("^# (Given|Yours|Check): [a-z].*[.]$", text, re.M) == [
        "Given",
        "Yours",
        "Check",
    ]
    last = text[text.index("\ntorch.manual_seed(0)") :]
    assert last == SCRIPTS["ddp"].read_text()[-len(last) :]  # the same lines in all scripts
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
