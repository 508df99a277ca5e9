"""Chapter 9: the Trainer trains as chapter 1 does, from a typed configuration, and on Slurm."""

import importlib.util
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import hydra
import pytest
import test_slurm
import torch
import yaml
from conftest import LLAMA, assert_one_sentence, assert_same_model, write_model
from omegaconf import OmegaConf
from runner import CHAPTER_1, CHAPTER_9, REPOSITORY, Job, Run
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_fsdp import save_weights
from transformers import AutoModelForCausalLM

CONF = CHAPTER_9.parent / "conf"
TOOLS = REPOSITORY / "tools"


class Result:
    def __init__(self, folder, output):
        self.folder, self.output = folder, output

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]


class Runs:
    """Runs of chapter 9 with a small model, by a configuration of their own, `small.yaml`."""

    def __init__(self, folder, model, dataset):
        self.folder, self.dataset, self.number = folder, dataset, 0
        (folder / "conf").mkdir()
        small = {
            "defaults": ["train", "_self_"],
            "model": {"name": str(model), "from_scratch": True},
            "data": {"path": "json", "data_files": str(dataset), "seq_length": 32},
            "optimizer": {"learning_rate": 1e-2},
            "training": {"per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 100},
            "experiment_name": "run",
            "save_dir": str(folder),
            "report_to": [],
        }
        (folder / "conf" / "small.yaml").write_text(yaml.safe_dump(small))
        self.arguments = ["--config-dir", folder / "conf", "--config-name", "small"]

    def start(self, *overrides, processes=0, **options):
        self.number += 1
        output = self.folder / f"output-{self.number}.txt"
        if processes:
            return Job(CHAPTER_9, [*self.arguments, *overrides], output, processes, **options)
        return Run(CHAPTER_9, [*self.arguments, *overrides], output, **options)

    def __call__(self, *overrides, name="run", status=0, **options) -> Result:
        run = self.start(*overrides, f"experiment_name={name}", **options)
        assert run.wait() == status, run.output
        return Result(self.find(name), run.output)

    def find(self, name: str):
        """The folder of a run is named after its overrides."""
        (file,) = self.folder.glob(f"{name}/**/metrics.jsonl")
        return file.parent


@pytest.fixture
def runs(tmp_path, model, dataset) -> Runs:
    return Runs(tmp_path, model, dataset)


@pytest.fixture(scope="module")
def chapter_9():
    spec = importlib.util.spec_from_file_location("chapter_9", CHAPTER_9)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chapter_9"] = module
    spec.loader.exec_module(module)
    return module


# -- The same training -----------------------------------------------------------------------------


@pytest.mark.rest
def test_losses_are_those_of_chapter_1(trainer, runs):
    """Across epochs, with accumulation: on one process, and on two with DDP; and FSDP on CPUs."""
    flags = ["-b", 24, "--gradient-accumulation-steps", 4, "--max-steps", 12, "--eval-freq", 6]
    one = trainer(*flags, "--warmup-steps", 3, "--adam-beta2", 0.95, name="one")
    assert one.column("epoch")[-1] > 1, "the order of the second epoch is another one"
    more = ["training.max_steps=12", "training.eval_steps=6", "optimizer.warmup_steps=3"]
    more += ["training.gradient_accumulation_steps=4", "optimizer.adam_beta2=0.95"]
    single = runs(*more, "training.per_device_train_batch_size=24", name="single")
    # The 10 held-out samples divide by 2 ranks × 1. The Trainer would fill up a larger last batch.
    more += ["training.per_device_train_batch_size=12", "training.per_device_eval_batch_size=1"]
    ddp = runs(*more, "parallel=ddp", name="ddp", processes=2)
    fsdp = runs(*more, "parallel=fsdp", name="fsdp", processes=2)
    for result in (single, ddp, fsdp):
        assert result.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
        assert result.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-3)
        assert result.column("eval/loss") == pytest.approx(one.column("eval/loss"), rel=1e-4)
        assert result.column("learning_rate") == pytest.approx(one.column("learning_rate"))
        assert all(speed > 0 for speed in result.column("tokens_per_second"))
    assert len(single.column("loss")) == 12
    assert len(single.column("eval/loss")) == 2
    assert "memory/rank1_gb" not in single.records[0]
    assert 0.1 < ddp.records[0]["memory/rank1_gb"] < 10
    # Two copies that add up the same numbers in the same order
    assert ddp.column("loss") == fsdp.column("loss")
    sentence = "parallel=fsdp, but nothing is sharded: on CPUs, the Trainer runs DDP instead"
    assert fsdp.output.count(sentence) == 1
    assert sentence not in ddp.output


@pytest.mark.rest
def test_demo(tmp_path, trainer):
    """Within 0.1 % of chapter 1 at every logged step; then the tools read what it has written."""
    expected = trainer.folder / "demo-single-gpu"
    flags = ["--demo", "--max-steps", 10, "--log-freq", 2, "--eval-freq", 0]
    flags += ["--save-dir", trainer.folder]
    processes = {"one": Run(CHAPTER_1, flags, tmp_path / "one.txt")}
    demo = ["--config-name", "demo", "training.max_steps=10", "training.logging_steps=2"]
    demo += [f"save_dir={tmp_path}/9", "report_to=[]"]
    processes["single"] = Run(CHAPTER_9, demo, tmp_path / "single.txt")
    for process in processes.values():
        assert process.wait(300) == 0, process.output
    half = [*demo, "parallel=ddp", "training.per_device_train_batch_size=4"]
    processes["ddp"] = Job(CHAPTER_9, half, tmp_path / "ddp.txt", 2)
    (final,) = tmp_path.glob("9/**/final")
    flags = [final, "--prompt", "def ", "--max-new-tokens", 5]
    processes["generate"] = Run(TOOLS / "generate.py", flags, tmp_path / "generate.txt")
    flags = [final, "-d", TOOLS / "generate.py", "-s", 64]
    processes["perplexity"] = Run(TOOLS / "perplexity.py", flags, tmp_path / "p.txt")
    for process in processes.values():
        assert process.wait(300) == 0, process.output
    folders = [file.parent for file in sorted(tmp_path.glob("9/**/metrics.jsonl"))]
    assert len(folders) == 2
    one = Result(expected, "").column("loss")
    assert len(one) == 5
    for folder in folders:
        assert Result(folder, "").column("loss") == pytest.approx(one, rel=1e-3)
    AutoModelForCausalLM.from_pretrained(final)
    assert "def " in processes["generate"].output
    loss = float(re.search(r"loss ([\d.]+)", processes["perplexity"].output)[1])
    assert 6 < loss < math.log(2048)


# -- Stopping and resuming -------------------------------------------------------------------------

# Rank 1 has a signal in step 5.
STOP = """import os, signal, transformers
training_step = transformers.Trainer.training_step

def stop(self, *args, **kwargs):
    if self.state.global_step == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return training_step(self, *args, **kwargs)

transformers.Trainer.training_step = stop
"""
STEPS = ["training.max_steps=8", "training.eval_steps=1000", "training.save_total_limit=1000"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, dataset) -> Result:
    """Eight steps on two processes."""
    runs = Runs(tmp_path_factory.mktemp("undisturbed"), model, dataset)
    return runs(*STEPS, "parallel=ddp", processes=2)


@pytest.mark.rest
def test_other_settings_do_not_resume(runs):
    runs("training.max_steps=2", name="run")
    text = (runs.folder / "conf" / "small.yaml").read_text()
    (runs.folder / "conf" / "small.yaml").write_text(text.replace("0.01", "0.02"))
    run = runs.start("training.max_steps=2")
    assert run.wait() == 1
    assert_one_sentence(run.output, "keep the settings or take another experiment_name")


# -- The configuration -----------------------------------------------------------------------------

WRONG = {
    "modle=tiny-llama": "Could not override 'modle'",
    "optimizer.lr=1": "Key 'lr' not in 'Optimizer'",
    "parallel.fsdp_config.cpu_ofload=true": "Key 'cpu_ofload' not in 'Fsdp'",
    "optimizer.learning_rate=high": "'high' of type 'str' could not be converted to Float",
    "training.max_steps=1.5": "could not be converted to Integer",
    "parallel=fsdpp": "Available options in 'parallel': ddp fsdp single",
    "optimizer.lr_scheduler_type=cosin": "cosin is not a valid SchedulerType",
    "report_to=[comt]": "comt is not supported",
    "model.name=/nowhere": "cannot set up the run",
    "data.data_files=/nowhere/*.json": "/nowhere/*.json",
    "parallel=ddp": "1 processes: parallel=single takes one, ddp and fsdp take several",
    "training.per_device_train_batch_size=100000": "the dataset is too small",
    "training.per_device_train_batch_size=0": "train_batch_size must be 1 or more, not 0",
    "training.eval_steps=0": "training.eval_steps must be 1 or more, not 0",
    "data.seq_length=1": "data.seq_length must be 2 or more, not 1",
    "data.seq_length=129": "data.seq_length must be at most 128, the positions of the model",
}


@pytest.mark.rest
@pytest.mark.parametrize("override", WRONG)
def test_a_mistake_is_one_sentence(runs, override):
    run = runs.start(override)
    assert run.wait() == 1
    assert_one_sentence(run.output, WRONG[override])


@pytest.mark.rest
@pytest.mark.parametrize(
    ("file", "before", "after", "sentence"),
    [
        ("config.json", '"vocab_size": 2048', '"vocab_size": 1000', "and the model 1000 tokens"),
        ("tokenizer_config.json", '"eos_token"', '"other"', "has no end-of-text token"),
        (
            "config.json",
            '"vocab_size"',
            '"quantization_config": {"bits": 4}, "vocab_size"',
            "is quantized",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit(runs, model, tmp_path, file, before, after, sentence):
    folder = shutil.copytree(model, tmp_path / "other")
    text = (folder / file).read_text()
    assert text.count(before) == 1
    (folder / file).write_text(text.replace(before, after))
    run = runs.start(f"model.name={folder}")
    assert run.wait() == 1
    assert_one_sentence(run.output, sentence)


@pytest.mark.rest
def test_files_with_a_head_that_the_config_ties(runs, tmp_path):
    """Another head is refused, and a copy of the embeddings is read."""
    tied = save_weights(write_model(tmp_path / "tied", **LLAMA))
    file = tied / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    for head, status in ((embeddings.clone(), 0), (embeddings.flip(0), 1)):
        save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        flags = [f"model.name={tied}", "model.from_scratch=false", "training.max_steps=1"]
        run = runs.start(*flags, f"experiment_name=head-{status}")
        assert run.wait() == status, run.output
    assert_one_sentence(run.output, "set tie_word_embeddings to false in config.json")


@pytest.mark.rest
def test_a_sweep_without_save_dir(tmp_path):
    """Hydra needs the folder of a sweep before it knows the folder of its configuration."""
    flags = ["-m", "--config-name", "demo", "experiment_name=test-of-a-sweep"]
    flags += ["data.data_files=/nowhere/*.py"]
    run = Run(CHAPTER_9, flags, tmp_path / "output.txt")
    try:
        assert run.wait() == 1
        assert "error: cannot set up the run" in run.output
    finally:
        shutil.rmtree(REPOSITORY / "outputs" / "test-of-a-sweep")


def compose(*overrides, name="train"):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, overrides=[*overrides], return_hydra_config=True)


def test_every_file_fits_the_types(chapter_9):
    for group in ("model", "data", "parallel"):
        for file in (CONF / group).glob("*.yaml"):
            config = compose(f"{group}={file.stem}")
            assert OmegaConf.get_type(config, group).__name__ == group.capitalize()
    assert compose("parallel=fsdp").parallel.fsdp
    demo = compose(name="demo")
    assert (demo.training.max_steps, demo.optimizer.learning_rate) == (400, 2e-3)


def test_commands_of_the_readme(chapter_9):
    """Their overrides fit; of a sweep, the first value."""
    text = (CHAPTER_9.parent / "README.md").read_text()
    commands = re.findall(r"^(?:python|torchrun .*) ?train-llm.py (.*)$", text, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = command.split()
        name = words[words.index("--config-name") + 1] if "--config-name" in words else "train"
        overrides = [word.partition(",")[0] for word in words if "=" in word]
        assert compose(*overrides, name=name).experiment_name


def test_the_launcher_asks_for_a_task_per_device(chapter_9):
    launcher = compose("hydra/launcher=slurm", "nodes=2", "devices=4").hydra.launcher
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 4, 4)
    assert launcher.gpus_per_task is None
    assert "export SLURM_CPU_BIND=cores" in launcher.setup
    launcher = compose("hydra/launcher=slurm").hydra.launcher
    assert (launcher.tasks_per_node, launcher.gpus_per_node) == (8, 8)


def test_a_local_launcher_starts_a_task_per_gpu(chapter_9, monkeypatch):
    for gpus, expected in ((0, 1), (2, 2)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        launcher = compose("hydra/launcher=local").hydra.launcher
        assert (launcher.tasks_per_node, launcher.gpus_per_node) == (expected, expected)
        assert compose("hydra/launcher=local", "devices=3").hydra.launcher.tasks_per_node == 3


@pytest.mark.parametrize("port", [20_000, 37_030, 60_000])  # Submitit draws one of these
def test_the_port_of_a_job_is_no_port_of_an_outgoing_connection(chapter_9, monkeypatch, port):
    ports = []

    class Environment:
        master_port = port

        def export(self, **_):
            ports.append(self.master_port)
            raise InterruptedError

    monkeypatch.setattr(chapter_9, "TorchDistributedEnvironment", Environment)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    for restarts in ("0", "1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(InterruptedError):
            chapter_9.training_arguments(None)
    assert all(20_000 <= port < 30_000 for port in ports)
    assert ports[1] == ports[0] + 1


def test_order_of_samples(chapter_1, chapter_9):
    """The sampler of the Trainer, over more than two epochs."""
    trainer = SimpleNamespace(
        train_dataset=range(7),
        args=SimpleNamespace(max_steps=5, seed=3),
        get_total_train_batch_size=lambda args: 4,
    )
    order = chapter_9.InOrder._get_train_sampler(trainer)
    assert order.tolist() == chapter_1.sample_order(0, 20, 7, 3)


@pytest.mark.rest
def test_a_gpu_that_does_not_shard_ends_the_run(chapter_9, runs):
    """Without a GPU here, the callback is called as on one."""
    config = SimpleNamespace(run_folder=runs.folder)
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
    run = chapter_9.Run(config)
    for number, handler in zip((signal.SIGUSR2, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)
    args = SimpleNamespace(fsdp=True, device=torch.device("cuda"))
    with pytest.raises(SystemExit, match="parallel=fsdp, but nothing is sharded"):
        run.on_train_begin(args, SimpleNamespace(global_step=0), None, torch.nn.Linear(1, 1))


# -- Logs ------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_reports(runs):
    """Files for the tools, an archive of Comet, events of TensorBoard, an offline run of W&B."""
    flags = ["training.max_steps=2", "report_to=[comet_ml,tensorboard,wandb]"]
    env = {"COMET_AUTO_LOG_DISABLE": "false", "WANDB_MODE": "offline"}
    env |= {f"WANDB_{name}_DIR": str(runs.folder) for name in ("CACHE", "CONFIG", "DATA")}
    run = runs(*flags, env=env)
    names = ["train/loss", "train/tokens_per_second", "train/memory/rank0_gb"]

    assert (run.folder / "metrics.jsonl").read_text().endswith("}\n"), "the last line is complete"
    found = json.loads((run.folder / "parameters.json").read_text())
    assert (found["optimizer"]["learning_rate"], found["global_batch"]) == (1e-2, 4)

    key = json.loads((run.folder / "run.json").read_text())["comet_key"]
    (archive,) = (run.folder / "comet").glob("*.zip")
    assert archive.name.startswith(key)
    with zipfile.ZipFile(archive) as file:
        comet = file.read("messages.json").decode()
    assert [name for name in names if name not in comet] == []

    (events,) = run.folder.glob("runs/*")
    tensorboard = EventAccumulator(str(events)).Reload()
    losses = [event.value for event in tensorboard.Scalars("train/loss")]
    assert losses == pytest.approx(run.column("loss"))
    assert len(losses) == 2
    assert {*names} <= {*tensorboard.Tags()["scalars"]}

    (file,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    wandb = file.read_bytes()
    assert [name for name in names if name.encode() not in wandb] == []


# -- Slurm -----------------------------------------------------------------------------------------

# Without accounting, this Slurm has no sacct, with which Submitit asks for the state of its jobs.
SACCT = """#!/bin/sh
echo "JobID|State|NodeList"
exec squeue --noheader --states=all --array --format="%i|%T|%N"
"""

# A job of the second partition takes the nodes from jobs of the first one, which are queued again.
# The scheduler looks every second for a job to start.
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""

# `sitecustomize.py` of all processes. The command that submits looks at its jobs every second, and
# not ever more seldom. A rank of the job that is stopped waits for a signal: at the first start in
# step 4, at the second start before the imports. Each time the rank writes down its port.
WAIT = """import os, signal, time
from pathlib import Path

start, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("SLURM_PROCID")
notes = os.environ.get("NOTES")
if rank is None:
    from submitit.core import core
    from submitit.slurm import slurm

    core.Job._results_timeout_s = 1
    slurm.SlurmJob.watcher._delay_s = 1
elif notes:
    if start == "1":
        while not signal.sigpending():
            time.sleep(0.1)
        Path(notes, f"signal-{rank}").touch()
    import transformers

    training_step = transformers.Trainer.training_step

    def wait(self, *args, **kwargs):
        Path(notes, f"port-{start}-{rank}").write_text(os.environ["MASTER_PORT"])
        if start == "0" and self.state.global_step == 3:
            (run,) = [x for x in self.callback_handler.callbacks if hasattr(x, "signals")]
            while not run.signals:
                time.sleep(0.1)
        return training_step(self, *args, **kwargs)

    transformers.Trainer.training_step = wait
"""


@pytest.fixture(autouse=True)
def preemption(monkeypatch):
    """Before `slurm`, which writes the configuration."""
    monkeypatch.setattr(test_slurm, "CONFIG", test_slurm.CONFIG + PREEMPTION)


slurm = test_slurm.slurm  # the fixture: a Slurm of its own for each test


@pytest.fixture
def sweep(slurm, runs):
    """Starts sweeps; those that still wait for their jobs end with the test."""
    started = []

    def start(*arguments, **env):
        started.append(Sweep(slurm, runs, *arguments, **env))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()


class Sweep:
    """`train-llm.py -m hydra/launcher=slurm`, one task on each of two CPUs."""

    def __init__(self, slurm, runs, name, *overrides, **env):
        self.slurm, self.runs, self.name = slurm, runs, name
        stub = slurm.work / "bin" / "sacct"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(SACCT)
        stub.chmod(0o755)
        (slurm.work / "sitecustomize.py").write_text(WAIT)
        self.file = slurm.work / f"{name}.log"
        resources = ["devices=2", "gpus_per_node=null", "cpus_per_task=1", "signal_delay_s=1"]
        resources[1:] = [f"hydra.launcher.{resource}" for resource in resources[1:]]
        command = [sys.executable, CHAPTER_9, *runs.arguments, "-m", "hydra/launcher=slurm"]
        command += [*resources, "parallel=ddp", *overrides]
        env |= {"PATH": f"{stub.parent}:{slurm.env['PATH']}", "PYTHONPATH": str(slurm.work)}
        streams = {"stdout": self.file.open("w"), "stderr": subprocess.STDOUT}
        command = [*map(str, command), f"experiment_name={name}"]
        self.process = subprocess.Popen(command, env=slurm.env | env, cwd=slurm.work, **streams)

    @property
    def output(self) -> str:
        logs = self.runs.folder.glob(f"{self.name}/.submitit/**/*.out")
        return "".join(file.read_text() for file in [self.file, *logs])

    def wait(self, status: int) -> None:
        assert self.process.wait(240) == status, self.output

    def wait_for(self, text: str) -> None:
        self.slurm.wait_for(lambda: text in self.output or self.process.poll(), text)
        assert text in self.output, self.output

    @property
    def jobs(self) -> list[str]:
        """As Submitit names them: the number of the job, and of the run within a sweep."""
        folders = self.runs.folder.glob(f"{self.name}/.submitit/[0-9]*")
        return sorted({file.name for file in folders if "%" not in file.name})

    def end(self, state: str, number: int) -> None:
        """Waits until Slurm has ended this job, in this state."""
        self.slurm.wait_for(lambda: self.show("JobState", number) in test_slurm.OVER, "end")
        assert self.show("JobState", number) == state

    def show(self, name: str, number: int = 0) -> str:
        text = self.slurm.ask("scontrol", "--oneliner", "show", "job", self.jobs[number])
        return re.search(rf"\b{name}=(\S+)", text)[1]


@pytest.mark.rest
def test_sweep_scancel_and_failure_on_slurm(slurm, sweep, runs, undisturbed):
    """Two runs of two tasks are one job array, and equal a run without Slurm."""
    both = sweep("sweep", "optimizer.learning_rate=1e-2,2e-2", *STEPS)
    both.wait(0)
    numbers = [job.partition("_") for job in both.jobs if "_" in job]
    assert len({number for number, *_ in numbers}) == 1, "one job array"
    assert [index for *_, index in numbers] == ["0", "1"]
    files = sorted(runs.folder.glob("sweep/**/metrics.jsonl"))
    assert ["learning_rate=0.01" in str(file) for file in files] == [True, False]
    losses = [Result(file.parent, "").column("loss") for file in files]
    assert losses[0] == undisturbed.column("loss")
    assert losses[0][0] == losses[1][0]
    assert losses[0][1:] != losses[1][1:]
    assert all((file.parent / "final" / "config.json").exists() for file in files)

    # A sweep again: its first run fails, and somebody cancels the second one.
    files = f"data.data_files=/nowhere/*.json,{runs.dataset}"
    ending = sweep("ending", files, "training.max_steps=100000")
    ending.wait_for("'loss'")
    slurm.ask("scancel", ending.jobs[-1])
    ending.wait(1)
    ending.end("CANCELLED", -1)
    assert ending.show("Restarts", -1) == "0"
    folder = runs.find("ending")
    step = Result(folder, "").column("loss")
    checkpoint = json.loads((folder / "run.json").read_text())["checkpoint"]
    assert checkpoint == f"{folder}/checkpoint-{len(step)}"
    ending.end("FAILED", -2)
    # One rank ends with 1. Slurm then stops the other one, and may name its status instead.
    assert ending.show("ExitCode", -2) in ("1:0", "143:0")
    assert "error: cannot set up the run" in ending.output
    assert "Traceback" not in ending.output


@pytest.mark.rest
def test_time_limit_and_preemption_on_slurm(slurm, sweep, runs, undisturbed, tmp_path):
    """All ranks save the same step; the job goes on exactly, on a new port.

    First a more urgent job takes the nodes, and Slurm queues the job again. Then the signal before
    the time limit comes during the imports, and the job queues itself again.
    """
    notes = tmp_path / "notes"
    notes.mkdir()
    job = sweep("stopped", *STEPS, "hydra.launcher.signal_delay_s=60", NOTES=str(notes))
    job.wait_for("'loss'")
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    slurm.ask("sbatch", *urgent, "--wrap=sleep 1")
    slurm.wait_for(lambda: job.show("Restarts") == "1", "preemption")

    def limit(minutes: int) -> bool:
        slurm.ask("scontrol", "update", f"job={job.jobs[0]}", f"TimeLimit={minutes}")
        return job.show("TimeLimit") == f"00:{minutes:02}:00"

    slurm.wait_for(lambda: limit(1), "time limit")

    def signals() -> int:
        return len([*notes.glob("signal-*")])

    slurm.wait_for(lambda: signals() == 2 or job.process.poll(), "signals")
    assert signals() == 2, job.output
    slurm.wait_for(lambda: limit(50), "time limit")
    job.wait(0)
    assert job.show("Restarts") == "2"
    output = job.output
    assert re.findall(r"Stopped after step (\d+)", output) == ["4", "5"]
    assert output.count(f"Job {job.jobs[0]} is queued again") == 1
    checkpoints = ["None", *(f"{runs.find('stopped')}/checkpoint-{step}" for step in (4, 5))]
    assert re.findall(r"checkpoint: (.*)", output) == checkpoints
    result = Result(runs.find("stopped"), output)
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert result.column(name) == undisturbed.column(name), name
    assert [record["step"] for record in result.records[:8]] == [*range(1, 9)]
    assert_same_model(undisturbed, result)
    for rank in "01":
        ports = [int((notes / f"port-{start}-{rank}").read_text()) for start in range(3)]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
        assert 20_000 <= ports[0] < 30_000
