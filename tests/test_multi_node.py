"""Chapter 5: copies of the model, checkpoints of each format, nodes that come and go.

The nodes are ranks of this machine. A disk of a node is a folder of a rank.
"""

import json
import re
import shutil
import signal
import time

import psutil
import pytest
import torch
from helpers.assertions import (
    OFF,
    assert_one_sentence,
    assert_same_checkpoint,
    assert_same_losses,
    assert_same_model,
    exact,
    told,
)
from helpers.data import write_documents
from helpers.models import CONVERTED_MODELS, weights_away, write_model
from helpers.runner import (
    CHAPTER_1,
    CHAPTER_2,
    CHAPTER_3,
    CHAPTER_5,
    CHAPTER_7,
    Run,
    free_port,
    patches,
    run_tool,
)
from helpers.torchrun import Forking, ending
from helpers.trainer import resume
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CONVERT = "convert-checkpoint.py"
pytestmark = pytest.mark.rest

SHARDS = patches("shards", "all_reduces")


@pytest.fixture
def train(trainer):
    """Runs the chapter on chapter 1's samples."""

    def run(*flags, processes=2, script=CHAPTER_5, start=False, **options):
        flags = ["--eval-freq", 0, "--lr", 1e-3, *flags]
        options |= {"processes": processes, "script": script}
        return (trainer.start if start else trainer)(*flags, **options)

    return run


# -- Hybrid shards ---------------------------------------------------------------------------------


def test_losses_for_every_shard_size(train, trainer):
    """Equal copies, to the last bit, also on fewer ranks with another -b. More: test_matrix.py"""
    flags = ["--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 2, "--keep-checkpoints", 9]
    single = train(*flags, "-b", 16, processes=0, script=CHAPTER_1, name="single")
    for size, more in ((1, ["--cpu-offload"]), (2, []), (4, [])):
        options = {"processes": 4, "before": SHARDS, "name": f"by-{size}"}
        batch = ["-b", 2, "--global-batch-size", 16, "--shard-size", size]
        run = train(*flags, *batch, *more, **options)
        assert_same_losses(single, run, 6, **OFF)
        held = told(run, "shards ")
        for rank in range(4):
            assert held[rank] == held[rank % size]
        assert len({shards[0] for shards in held}) == size
        # Once per step for each of the two layers and the root
        assert told(run, "all-reduces ") == [[str(6 * 3)]] * 4
    flags += ["-b", 4, "--global-batch-size", 16, "--shard-size", 1]
    resume(run, trainer, 2, *flags, again=train, near=6)


# -- Checkpoints -----------------------------------------------------------------------------------


# Format, ranks per copy, flags
FORMATS = {
    "shard": ("shard", 1, []),
    "full": ("full", 1, []),
    "local": ("local", 2, []),
    "shard, while training goes on": ("shard", 2, ["--async-checkpoint"]),
    "local, while training goes on": ("local", 1, ["--async-checkpoint"]),
}


@pytest.mark.parametrize("case", FORMATS)
def test_formats_resume_exactly(train, trainer, case):
    """Bit for bit; and the files are those of the README."""
    how, size, more = FORMATS[case]
    flags = ["--max-steps", 9, "--ckpt-freq", 3, "--keep-checkpoints", 99, "--shard-size", size]
    flags += ["--checkpoint-format", how, *more]
    origin = train(*flags, name="origin", before=SHARDS)
    glob = "rank-*/*6/*.distcp" if how == "local" else "*6/*.distcp"
    files = sorted(str(path.relative_to(origin.folder)) for path in origin.folder.glob(glob))
    if how == "local":
        assert files == [f"rank-{rank}/step-00000006/__0_0.distcp" for rank in range(2)]
    else:
        writers = range(1 if how == "full" else 2)
        assert files == [f"step-00000006/__{rank}_0.distcp" for rank in writers]
    resumed = resume(origin, trainer, 6, *flags, again=train, before=SHARDS)
    assert told(resumed, "shards ") == told(origin, "shards ")


def test_each_node_has_a_disk_of_its_own(train, trainer, tmp_path):
    """Format local: on from the newest step that all have; an empty disk ends the run."""
    flags = ["--save-dir", "runs", "--max-steps", 9, "--ckpt-freq", 3]
    flags += ["--checkpoint-format", "local"]
    options = {"before": patches("own_disk"), "env": {"DISKS": f"{tmp_path}/disk-"}}
    disks = [tmp_path / f"disk-{rank}" / "runs" / "run" for rank in range(3)]

    def on_disk_0(result):
        result.folder = disks[0]
        return result

    origin = on_disk_0(train(*flags, **options))
    records = exact(origin.records)
    shared = train(*flags[2:], name="shared", before=patches("late_rank_1"))
    assert_same_model(origin, shared)
    # Rank 0 keeps its third checkpoint but one until rank 1 has the third one, too.
    found = re.findall(r"^rank 0 has (.*)", shared.output, re.MULTILINE)
    steps = [f"step-{step:08d}" for step in (3, 6, 9)]
    assert found == [" ".join(steps[:count]) for count in (1, 2, 3)]
    for rank in range(2):
        steps = sorted(str(p.relative_to(disks[rank])) for p in disks[rank].glob("rank-*/step-*"))
        assert steps == [f"rank-{rank}/step-{step:08d}" for step in (6, 9)]
    assert not (disks[1] / "metrics.jsonl").exists()
    # One node dies before it has saved the last step; its folder stays incomplete
    (disks[1] / "rank-1" / "step-00000009").rename(disks[1] / "rank-1" / "incomplete-0")
    resumed = on_disk_0(train(*flags, **options))
    assert "Continuing from runs/run/rank-0/step-00000006" in resumed.output
    assert exact(resumed.records) == records
    assert "Already complete" in train(*flags, **options).output

    # Killed in the first save, which only rank 0 has completed: the run begins anew
    for rank, left in enumerate(("step-00000003", "incomplete-0")):
        for folder in (disks[rank] / f"rank-{rank}").iterdir():
            shutil.rmtree(folder)
        (disks[rank] / f"rank-{rank}" / left).mkdir()
    again = on_disk_0(train(*flags, **options))
    assert "Continuing from" not in again.output
    assert exact(again.records) == records

    # The shards of two ranks do not fit on one
    result = train(*flags, "-b", 8, "--max-steps", 12, processes=1, status=1, **options)
    assert "Size mismatch" in result.output
    # A new disk in place of the one of rank 1
    shutil.rmtree(disks[1] / "rank-1")
    result = train(*flags, status=1, **options)
    assert_one_sentence(result.run.ranks[0].output, "share no checkpoint in runs/run")


def test_a_folder_that_nodes_do_not_share(train, tmp_path):
    """Noticed before the first step. Chapter 3 notices it when it saves."""
    options = {"before": patches("own_disk"), "env": {"DISKS": f"{tmp_path}/disk-"}, "status": 1}
    flags = ["--max-steps", 1, "--save-dir", "runs"]
    result = train(*flags, **options)
    assert_one_sentence(result.output, "not all nodes see runs/run: share it")
    assert not [*tmp_path.glob("disk-*/runs/run/step-*")]
    result = train(*flags, script=CHAPTER_3, **options)
    sentences = set(re.findall("^error: .*", result.output, re.MULTILINE))
    assert len(sentences) == 1
    assert re.search(r"not all ranks see runs/run/incomplete-\w+: put", sentences.pop())


def test_resume_dir(train, trainer, pretrained):
    """From any format; the own checkpoint comes first. Then weights only."""
    base = ["-m", pretrained, "--no-from-scratch"]
    flags = [*base, "--max-steps", 6, "--ckpt-freq", 3, "--keep-checkpoints", 9]
    origin = train(*flags, name="origin")
    local = train(*flags, "--checkpoint-format", "local", name="local")
    for run, folder in ((origin, ""), (local, "rank-0/")):
        start = ["--resume-dir", f"{run.folder}/{folder}step-00000003"]
        name = f"from-{run.folder.name}"
        with weights_away(pretrained):
            resumed = train(*flags, *start, name=name)
        assert exact(resumed.records) == exact(origin.records)
        assert_same_model(resumed, origin)
        again = train(*flags, *start, "--max-steps", 7, name=name)
        assert f"Continuing from {resumed.folder}/step-00000006" in again.output
    keys = [
        json.loads((run.folder / "step-00000006" / "state.json").read_text())["comet_key"]
        for run in (origin, resumed)
    ]
    assert keys[0] != keys[1]

    # The weights of the last step, another learning rate, the first samples
    flags = ["--max-steps", 2, "--lr", 5e-4]
    final = ["-m", origin.folder / "final", "--no-from-scratch", "--shard-size", 1]
    plain = train(*flags, *final, name="plain")
    for run, folder, size in ((origin, "", 1), (local, "rank-0/", 2)):
        start = ["--resume-dir", f"{run.folder}/{folder}step-00000006", "--skip-optimizer"]
        fresh = train(*flags, *start, "--shard-size", size, name=f"fresh-{run.folder.name}")
        if size == 1:
            assert exact(fresh.records) == exact(plain.records)
            assert_same_model(fresh, plain)
        assert_same_losses(plain, fresh, 2, **OFF)


# -- Another format --------------------------------------------------------------------------------


@pytest.fixture
def convert(trainer):
    """Converts checkpoints of runs, both named as "run/step"."""

    def run(source: str, destination: str, *flags, status=0):
        names = [name.replace("/", "/step-0000000") for name in (source, destination)]
        paths = [trainer.folder / name for name in names]
        output = run_tool(trainer.folder, CONVERT, *paths, *flags, status=status)
        return output if status else paths[1]

    return run


def test_formats_become_each_other(train, trainer, convert, tmp_path):
    """Through all of them and back, bit for bit; runs go on exactly from each.

    Of three experts, two ranks have shards of different sizes.
    """
    config = CONVERTED_MODELS["mixtral"] | {"num_local_experts": 3}
    flags = ["-m", write_model(tmp_path / "mixture", model_type="mixtral", **config)]
    flags += ["--max-steps", 6, "--ckpt-freq", 3, "--keep-checkpoints", 9]
    origin = train(*flags, name="origin")
    local = train(*flags, "--checkpoint-format", "local", name="local")

    assert_same_checkpoint(
        convert("local/3", "full/3", "--to", "full"), origin.folder / "step-00000003"
    )
    convert("full/3", "own/3", "--to", "local", "--ranks", 2)
    for rank in range(2):
        path = f"rank-{rank}/step-00000003"
        assert_same_checkpoint(trainer.folder / "own" / path, local.folder / path)
    convert("own/3", "single/3", "--to", "single")
    shards = convert("single/3", "shard/3", "--to", "shard", "--ranks", 3)
    assert len([*shards.glob("*.distcp")]) == 3
    assert_same_checkpoint(shards, origin.folder / "step-00000003")

    convert("origin/3", "shards/3", "--to", "shard", "--ranks", 2)
    for name in ("full", "own", "shards"):
        resumed = train(*flags, name=name)
        assert "step-00000003" in resumed.output
        assert exact(resumed.records) == exact(origin.records)
        assert_same_model(resumed, origin)

    # By layers: the tensors of final/ under the same names, in other files
    folder = convert("origin/6", "hub/6", "--to", "transformers")
    names = [{x.name for x in f.iterdir()} for f in (folder, origin.folder / "final")]
    one, other = ({n for n in found if not n.startswith(("model", "step"))} for found in names)
    assert one == other
    pieces = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert len(pieces) > 2
    one = {name: tensor for piece in pieces for name, tensor in piece.items()}
    other = load_file(origin.folder / "final" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    AutoModelForCausalLM.from_pretrained(folder)  # reads the index

    for checkpoint in ("rank-1/step-00000003", "step-00000003"):
        output = run_tool(trainer.folder, "generate.py", local.folder / checkpoint, status=1)
        assert_one_sentence(output, "cannot load the model")

    shutil.rmtree(local.folder / "rank-1")
    output = convert("local/3", "no/3", "--to", "full", status=1)
    assert_one_sentence(output, "collect step-00000003 of all ranks: only [0]")
    output = convert("hub/6", "no/4", "--to", "full", status=1)
    assert_one_sentence(output, "is no checkpoint of these chapters")
    for taken in ("origin/3", "own/3"):  # the second one in another format
        output = convert("origin/6", taken, "--to", "full", status=1)
        assert_one_sentence(output, "step-00000003 exists")


def test_checkpoints_of_chapters_1_3_and_7(trainer, convert):
    """Chapter 3 goes on where chapter 1 was saved, and the other way round, also after chapter 7,
    of which each rank has other parameters."""
    flags = ["--max-steps", 6, "--ckpt-freq", 3, "--keep-checkpoints", 9, "--eval-freq", 0]
    one = trainer(*flags, name="one")
    three = trainer(*flags, name="three", processes=1, script=CHAPTER_3)
    convert("one/3", "to-three/3", "--to", "shard")
    convert("three/3", "to-one/3", "--to", "single")
    resumed = trainer(*flags, name="to-three", processes=1, script=CHAPTER_3)
    assert "step-00000003" in resumed.output
    assert_same_losses(one, resumed, 6, **OFF)
    seven = ["-b", 2, "--gradient-accumulation-steps", 2]
    seven = trainer(*flags, *seven, name="seven", processes=2, script=CHAPTER_7)
    found = convert("seven/3", "from-seven/3", "--to", "single")
    expected = one.folder / "step-00000003"
    states = [torch.load(folder / "training_state.pt") for folder in (found, expected)]
    a, b = ([{*group["params"]} for group in x["optimizer"]["param_groups"]] for x in states)
    assert a == b  # the numbers of all parameters
    for origin, name in ((three, "to-one"), (seven, "from-seven")):
        resumed = trainer(*flags, name=name)
        assert "step-00000003" in resumed.output
        assert_same_losses(origin, resumed, 6, **OFF)


# -- While training goes on ------------------------------------------------------------------------


def test_training_goes_on_while_files_are_written(train, trainer):
    """The step gets its name later, with the weights of that step; the next one waits for it."""
    flags = ["--max-steps", 12, "--ckpt-freq", 5, "--keep-checkpoints", 9]
    plain = train(*flags, name="plain")
    go = trainer.folder / "go"
    options = {
        "env": {"GO": str(go)},
        "before": patches("slow_files"),
        "name": "slow",
        "start": True,
    }
    job = train(*flags, "--async-checkpoint", **options)
    job.wait_for("step 10/12")  # the second checkpoint waits for the first one
    time.sleep(1)
    folder = trainer.folder / "slow"
    assert "step 11/12" not in job.output
    assert [*folder.glob("step-*")] == []
    go.touch()
    assert job.wait() == 0, job.output
    assert sorted(p.name for p in folder.glob("step-*")) == plain.checkpoints
    for name in plain.checkpoints:
        assert_same_checkpoint(folder / name, plain.folder / name)
    assert not [*folder.glob("incomplete-*")]


@pytest.mark.parametrize("form", ["shard", "full", "local"])
def test_a_checkpoint_gets_its_name_at_once(train, trainer, form):
    """Not with the next checkpoint: a run that is killed in between loses nothing."""
    name = "rank-0/step-00000005" if form == "local" else "step-00000005"
    env = {"NAMED": str(trainer.folder / form / name)}
    flags = ["--max-steps", 8, "--ckpt-freq", 5, "--checkpoint-format", form]
    train(*flags, "--async-checkpoint", before=patches("long_step"), env=env, name=form)


def test_a_thread_that_cannot_write(train):
    """The run ends at the next checkpoint, and the ones before it stay."""
    before = train("--max-steps", 2, "--async-checkpoint")
    flags = ["--max-steps", 4, "--async-checkpoint"]
    after = train(*flags, before=patches("full_disk_of_rank_1"), status=1)
    assert "Done" not in after.output
    assert after.checkpoints == before.checkpoints == ["step-00000002"]


# -- Flags -----------------------------------------------------------------------------------------


def test_global_batch_size(train):
    """The accumulation follows from it."""
    flags = ["--max-steps", 4, "-b", 2]
    one = train(*flags, "--gradient-accumulation-steps", 8, processes=1, name="one")
    two = train(*flags, "--global-batch-size", 16, name="two")
    assert_same_losses(one, two, 4, **OFF)
    result = train(*flags, "--global-batch-size", 6, status=1)
    assert_one_sentence(result.run.ranks[0].output, "a multiple of -b × 2 shares")


# -- Nodes that differ -----------------------------------------------------------------------------

DIFFERENCES = {
    "script": "read = pathlib.Path.read_text; "
    "pathlib.Path.read_text = lambda p, *a, **k: read(p, *a, **k) + '#' * (p.suffix == '.py')",
    "transformers": "import transformers; transformers.__version__ = '5.0.0'",
    "config": "import transformers.models.llama as llama; llama.LlamaConfig.to_json_string = "
    "lambda *_: 'another'",
    "experiment_name": "at = sys.argv.index('-e'); del sys.argv[at : at + 2]",
    "tokens_hash": "sys.argv[sys.argv.index('-d') + 1] = os.environ['ANOTHER_ORDER']",
}


def test_nodes_that_differ_are_refused(train, trainer, texts):
    """Say rank 1 is a node with another script, version, config or text of the same size."""
    env = {"ANOTHER_ORDER": str(write_documents(trainer.folder / "other.jsonl", texts[::-1]))}
    for name, difference in DIFFERENCES.items():
        before = f"import os, pathlib, sys\nif os.environ['RANK'] == '1':\n    {difference}"
        result = train("--max-steps", 2, status=1, name="run", before=before, env=env)
        sentence = result.output[result.output.index("error: ranks differ in [") :]
        assert f"'{name}'" in sentence.splitlines()[0]
    assert not (trainer.folder / "run" / "metrics.jsonl").exists()


# -- The start of a job ----------------------------------------------------------------------------


def test_variables_of_an_earlier_job(tmp_path):
    """Nobody else comes: after a minute, here a second, a line names the variables."""
    before = "import threading\ntimer = threading.Timer\n"
    before += "threading.Timer = lambda seconds, *rest: timer(seconds / 60, *rest)\n"
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    run = Run(CHAPTER_5, ["--demo"], tmp_path / "output", before=before, env=env)
    run.wait_for("RANK is 0 of WORLD_SIZE 2, and others are missing")
    run.process.kill()


# -- Nodes that come and go ------------------------------------------------------------------------

# As launch/run.sh sets it: each restart has a store of its own. Chapter 5 refuses to train without
# it, because new workers would find the keys of dead ones (torch 2.13).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Rank 1 ends in its first life before it has met rank 0, which waits, and does not fail. So the
# two torchruns count different numbers of restarts.
DYING_FIRST = """
import os, signal

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def nodes(trainer):
    """Makes functions that start torchruns, which meet on this machine."""
    started = []

    def meet(count: str, *flags, name: str, scripts=(CHAPTER_5,)):
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
        meeting += ["--rdzv-id", "test", "--nnodes", count, "--local-addr", "localhost"]
        meeting += ["--rdzv-conf", "last_call_timeout=1"]  # not 30 s for nodes that may still come
        command = [*meeting, "--nproc-per-node", 1, "--max-restarts", 3, *scripts]

        def start(**options):
            """Starts one torchrun, with `Run`'s options."""
            output = f"{name}-{len(started)}.txt"
            started.append(Forking(trainer, output, command, *flags, name=name, **options))
            return started[-1]

        return start

    yield meet
    for node in started:
        if node.status is None:  # the test has failed
            for process in [*node.workers(), node.process]:
                process.kill()


def test_restarts_that_would_share_a_store_are_refused(nodes):
    start = nodes("2", "--max-steps", 2, name="shared")
    both = [start(), start()]
    assert all(node.wait() == 1 for node in both)
    sentence = "restarts on several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert all(sentence in node.output for node in both), both[0].output


@pytest.mark.parametrize(("chapter", "flags"), [(CHAPTER_2, []), (CHAPTER_5, ["--shard-size", 1])])
def test_killed_workers_come_back(train, nodes, tmp_path, chapter, flags):
    """Twice, on two nodes. The job goes on exactly."""
    flags = ["--max-steps", 14, "--ckpt-freq", 4, "--eval-freq", 7, *flags]
    undisturbed = train(*flags, name="undisturbed", script=chapter)
    script = ending(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    script.write_text(DYING_FIRST + script.read_text())
    start = nodes("2", *flags, "--lr", 1e-3, name="nodes", scripts=[script, chapter])
    both = [start(env=OWN_STORE), start(env=OWN_STORE)]
    assert [node.wait() for node in both] == [0, 0], "".join(node.output for node in both)
    assert sum(node.output.count("Continuing from") for node in both) == 1
    assert exact(both[0].records) == exact(undisturbed.records)
    assert_same_model(both[0], undisturbed)


def test_an_elastic_job_keeps_its_batch_and_its_losses(train, nodes, trainer, dataset):
    """One node, then two, then the second one is killed with its worker: as if alone all along."""
    flags = ["-d", dataset, "--eval-freq", 0, "--lr", 1e-3, "-b", 2, "--global-batch-size", 8]
    flags += ["--max-steps", 5000, "--num-epochs", 99, "--ckpt-freq", 5]
    start_node = nodes("1:2", *flags, name="run")

    def start(number: int):
        folder = trainer.folder / f"node-{number}"
        folder.mkdir()
        return start_node(env=OWN_STORE, cwd=folder)

    first = start(0)
    first.wait_for("step 5/")
    second = start(1)

    def wait_until(condition) -> None:
        end = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < end, first.output + second.output
            assert first.status is None, first.output + second.output
            time.sleep(0.1)

    def resumes() -> int:
        return first.output.count("Continuing from") + second.output.count("Continuing from")

    def step() -> int:
        lines = (first.folder / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-2])["step"] if len(lines) > 1 else 0  # the last may be incomplete

    # Not the first restart: the second node may come too late for it
    wait_until(lambda: "memory/rank1/" in (first.folder / "metrics.jsonl").read_text())
    joined = step()
    wait_until(lambda: step() > joined + 20)
    before = resumes()
    victims = [*second.workers(), psutil.Process(second.process.pid)]
    for process in victims:
        process.kill()
    second.wait()
    wait_until(lambda: resumes() > before)
    alone = step()
    wait_until(lambda: step() > alone + 5)
    first.signal(signal.SIGTERM)
    assert first.wait() != 0
    records = first.records
    assert [record["step"] for record in records] == [*range(1, len(records) + 1)]
    ranks = ["memory/rank1/resident_gb" in record for record in records]
    assert not ranks[0]
    assert sum(ranks) > 10
    assert not ranks[-1]

    single = train(*flags, processes=1, name="single", start=True)
    single.wait_for(f"step {len(records)}/", timeout=200)
    single.signal(signal.SIGTERM)
    single.wait()
    expected = [json.loads(line) for line in (trainer.folder / "single" / "metrics.jsonl").open()]
    for name, tolerance in (("loss", 1e-3), ("learning_rate", 0), ("epoch", 0)):
        found = [record[name] for record in records]
        reference = [record[name] for record in expected][: len(found)]
        assert found == pytest.approx(reference, rel=tolerance, abs=0), name
