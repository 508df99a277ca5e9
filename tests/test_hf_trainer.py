"""Chapter 9: the Trainer trains as chapter 1 does, from a typed configuration, and on Slurm."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import helpers.slurm
import hydra
import pytest
from helpers.assertions import assert_one_sentence, assert_opens, assert_same_model
from helpers.data import write_documents
from helpers.hf_trainer import Runs
from helpers.runner import CHAPTER_1, CHAPTER_9, SCRIPTS, Run, load, patches
from helpers.trainer import Folder
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

CONF = CHAPTER_9.parent / "conf"


@pytest.fixture
def runs(tmp_path, model, dataset) -> Runs:
    return Runs(tmp_path, model, dataset)


@pytest.fixture(scope="module")
def chapter_9():
    return load(CHAPTER_9)


# -- The same training -----------------------------------------------------------------------------


def test_one_job(trainer, runs):
    """With DDP: losses of chapter 1, whole checkpoints, and an exact resume."""
    # The 10 held-out samples divide by 2 ranks × 1. The Trainer would fill up a larger last batch.
    flags = ["training.max_steps=8", "training.eval_steps=4", "parallel=ddp"]
    flags += ["training.per_device_train_batch_size=2", "training.per_device_eval_batch_size=1"]
    flags += ["training.gradient_accumulation_steps=2"]
    single = trainer("-b", 8, "--max-steps", 8, "--eval-freq", 4, name="single")
    options = {"processes": 2, "before": patches("slow_rank_1", "complete_checkpoint")}
    run = runs(*flags, name="run", **options)
    assert "the record names a checkpoint" in run.output
    assert "nothing is sharded" not in run.output
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("eval/loss", 1e-4)):
        assert run.column(name) == pytest.approx(single.column(name), rel=tolerance)
    assert_opens(run, reference=single)
    stopped = runs(
        *flags, name="stopped", processes=2, before=patches("signal_in_step_5"), status=143
    )
    resumed = runs(*flags, name="stopped", **options)
    assert f"checkpoint: {stopped.folder}/checkpoint-5" in resumed.output
    assert resumed.column("loss") == run.column("loss")
    assert_same_model(resumed, run)


@pytest.mark.rest
def test_losses_are_those_of_chapter_1(trainer, runs):
    """Across epochs, with accumulation: on one process, and on two with FSDP on CPUs."""
    flags = ["-b", 24, "--gradient-accumulation-steps", 4, "--max-steps", 12, "--eval-freq", 6]
    one = trainer(*flags, "--warmup-steps", 3, "--adam-beta2", 0.95, name="one")
    assert one.column("epoch")[-1] > 1, "the order of the second epoch is another one"
    more = ["training.max_steps=12", "training.eval_steps=6", "optimizer.warmup_steps=3"]
    more += ["training.gradient_accumulation_steps=4", "optimizer.adam_beta2=0.95"]
    single = runs(*more, "training.per_device_train_batch_size=24", name="single")
    # The 10 held-out samples divide by 2 ranks × 1. The Trainer would fill up a larger last batch.
    more += ["training.per_device_train_batch_size=12", "training.per_device_eval_batch_size=1"]
    fsdp = runs(*more, "parallel=fsdp", name="fsdp", processes=2)
    for result in (single, fsdp):
        assert result.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
        assert result.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-3)
        assert result.column("eval/loss") == pytest.approx(one.column("eval/loss"), rel=1e-4)
        assert result.column("learning_rate") == pytest.approx(one.column("learning_rate"))
        assert all(speed > 0 for speed in result.column("tokens_per_second"))
    assert len(single.column("loss")) == 12
    assert len(single.column("eval/loss")) == 2
    assert "memory/rank1_gb" not in single.records[0]
    assert 0.1 < fsdp.records[0]["memory/rank1_gb"] < 10
    sentence = "parallel=fsdp, but nothing is sharded: on CPUs, the Trainer runs DDP instead"
    assert fsdp.output.count(sentence) == 1


@pytest.mark.rest
def test_demo(tmp_path, trainer):
    """Within 0.1 % of chapter 1 at every logged step."""
    expected = trainer.folder / "demo-single-gpu"
    flags = ["--demo", "--max-steps", 2, "--log-freq", 1, "--eval-freq", 0]
    flags += ["--save-dir", trainer.folder]
    processes = [Run(CHAPTER_1, flags, tmp_path / "one.txt")]
    demo = ["--config-name", "demo", "training.max_steps=2", "training.logging_steps=1"]
    demo += [f"save_dir={tmp_path}/9", "report_to=[]"]
    processes.append(Run(CHAPTER_9, demo, tmp_path / "single.txt"))
    for process in processes:
        assert process.wait(300) == 0, process.output
    (file,) = tmp_path.glob("9/**/metrics.jsonl")
    one = Folder(expected, "").column("loss")
    assert len(one) == 2
    assert Folder(file.parent, "").column("loss") == pytest.approx(one, rel=1e-3)
    AutoModelForCausalLM.from_pretrained(file.parent / "final")


# -- Stopping and resuming -------------------------------------------------------------------------

STEPS = ["training.max_steps=8", "training.eval_steps=1000", "training.save_total_limit=1000"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, dataset) -> Folder:
    """Eight steps on two processes."""
    runs = Runs(tmp_path_factory.mktemp("undisturbed"), model, dataset)
    return runs(*STEPS, "parallel=ddp", processes=2)


@pytest.mark.rest
def test_fsdp(runs, undisturbed):
    """The Trainer's FSDP2 has the losses of DDP, and resumes exactly."""
    flags = [*STEPS, "parallel=fsdp"]
    options = {"processes": 2, "before": patches("fsdp_on_cpus")}
    whole = runs(*flags, name="whole", **options)
    assert "nothing is sharded" not in whole.output
    assert (whole.folder / "checkpoint-8" / "pytorch_model_fsdp.bin").exists()
    for name in ("loss", "grad_norm"):
        assert whole.column(name) == pytest.approx(undisturbed.column(name), rel=1e-4)
    options["before"] += patches("signal_in_step_5")
    runs(*flags, name="run", status=143, **options)
    options["before"] = patches("fsdp_on_cpus")
    resumed = runs(*flags, name="run", **options)
    assert "checkpoint-5" in resumed.output
    assert resumed.column("loss") == whole.column("loss")
    assert_same_model(resumed, whole)


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
    "optimizer.learning_rate=high": "'high' of type 'str' could not be converted to Float",
    "training.eval_steps=0": "training.eval_steps must be 1 or more, not 0",
    "data.data_files=/nowhere/*.json": "/nowhere/*.json",
    "parallel=ddp": "1 processes: parallel=single takes one, ddp and fsdp take several",
}


@pytest.mark.rest
@pytest.mark.parametrize("override", WRONG)
def test_a_mistake_is_one_sentence(runs, override):
    run = runs.start(override)
    assert run.wait() == 1
    assert_one_sentence(run.output, WRONG[override])


def compose(*overrides, name="train"):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, overrides=[*overrides], return_hydra_config=True)


# Keys of other trainers, and a part of the message that refuses them
OTHER_KEYS = {
    "parallel.fsdp_config.use_orig_params": "always trains the original parameters",
    "parallel.fsdp_config.fsdp_limit_all_gathers": "FSDP2 needs no limit",
    "parallel.fsdp_config.forward_prefetch": "Accelerate has none",
    "parallel.fsdp_config.sync_module_states": "each process loads all weights",
    "parallel.fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "parallel.fsdp_config.fsdp_min_num_params": "whatever its size",
    "optimizer.lr": "'lr' not in 'Optimizer'",
}
DOUBTED = {"temperature": 0.9, "top_p": 0.6}, {"num_beams": 1, "length_penalty": 2.0}
DOUBTED += ({"pad_token_id": -1}, {"typical_p": 0.5})


@pytest.mark.rest
@pytest.mark.parametrize("processes", [0, 2])
def test_settings_of_generation_that_transformers_refuses_to_save(runs, pretrained, processes):
    """Of a base whose special tokens are not the tokenizer's. Chapter 1 saves them, too."""
    base = runs.folder / "base"
    shutil.copytree(pretrained, base)
    for number, settings in enumerate(DOUBTED[: 4 if processes == 0 else 1]):
        settings = {"bos_token_id": 1, "eos_token_id": 5} | settings
        (base / "generation_config.json").write_text(json.dumps(settings))
        overrides = [f"model.name={base}", "model.from_scratch=false"]
        overrides += ["training.max_steps=1", "training.save_steps=1"]
        overrides += ["parallel=ddp"] if processes else []
        run = runs(*overrides, name=f"generation-{number}", processes=processes)
        for folder in ("final", "checkpoint-1"):
            saved = json.loads((run.folder / folder / "generation_config.json").read_text())
            for name in settings.keys() - {"bos_token_id", "eos_token_id"}:
                assert saved[name] == settings[name], folder


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_key_without_effect_is_refused(chapter_9, key):
    """Also after a plus sign, with which Hydra accepts every key."""
    with pytest.raises(ConfigCompositionException) as refused:
        compose(f"{key}=1")
    with pytest.raises(SystemExit, match=OTHER_KEYS[key]):
        chapter_9.explain(refused.value)
    added = compose(f"+{key}=1")
    config = OmegaConf.masked_copy(added, [group for group in added if group != "hydra"])
    with pytest.raises(SystemExit, match=OTHER_KEYS[key]):
        chapter_9.main.__wrapped__(config)


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


def test_long_names_and_empty_texts(runs, texts, tmp_path):
    """Overrides with slashes, and of more characters than a name may have."""
    file = write_documents(tmp_path / "texts[v2].jsonl", ["", None] * 600 + texts)
    names = [f"training.{key}=1" for key in ("max_steps", "logging_steps", "save_total_limit")]
    names += ["optimizer.warmup_steps=1", "training.per_device_eval_batch_size=4"]
    names += ["training.gradient_accumulation_steps=1", "optimizer.max_grad_norm=0.5"]
    folder = runs(f"data.data_files='{file}'", *names).folder
    assert folder.parent == tmp_path / "run"
    assert len(folder.name) < 255


def test_order_of_samples(chapter_1, chapter_9):
    """The sampler of the Trainer, over more than two epochs."""
    trainer = SimpleNamespace(
        train_dataset=range(7),
        args=SimpleNamespace(max_steps=5, seed=3),
        get_total_train_batch_size=lambda args: 4,
    )
    order = chapter_9.InOrder._get_train_sampler(trainer)
    expected = [*chapter_1.sample_order(3, 0, 7), *chapter_1.sample_order(3, 2, 7)]
    assert order.tolist() == expected[:20]


# -- Logs ------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_reports(runs):
    """Files for the tools, an archive of Comet, events of TensorBoard, an offline run of W&B."""
    flags = ["training.max_steps=2", "report_to=[comet_ml,tensorboard,wandb]"]
    env = {"COMET_AUTO_LOG_DISABLE": "false", "WANDB_MODE": "offline"}
    env |= {f"WANDB_{name}_DIR": str(runs.folder) for name in ("CACHE", "CONFIG", "DATA")}
    run = runs(*flags, env=env)
    names = ["train/loss", "train/memory/rank0_gb"]

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
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


@pytest.fixture(autouse=True)
def preemption(monkeypatch):
    """Before `slurm`, which writes the configuration."""
    monkeypatch.setattr(helpers.slurm, "CONFIG", helpers.slurm.CONFIG + PREEMPTION)


@pytest.fixture
def sweep(slurm, runs):
    """Starts sweeps; those that still wait for their jobs end with the test."""
    stub = slurm.work / "bin" / "sacct"
    stub.parent.mkdir()
    stub.write_text(SACCT)
    stub.chmod(0o755)
    shutil.copy(SCRIPTS / "wait_for_signals.py", slurm.work / "sitecustomize.py")
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
        self.file = slurm.work / f"{name}.log"
        resources = ["devices=2", "gpus_per_node=null", "cpus_per_task=1", "signal_delay_s=1"]
        resources[1:] = [f"hydra.launcher.{resource}" for resource in resources[1:]]
        command = [sys.executable, CHAPTER_9, *runs.arguments, "-m", "hydra/launcher=slurm"]
        command += [*resources, "parallel=ddp", *overrides]
        env |= {"PATH": f"{slurm.work}/bin:{slurm.env['PATH']}", "PYTHONPATH": str(slurm.work)}
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

    def show(self, name: str, number: int = 0) -> str:
        text = self.slurm.ask("scontrol", "--oneliner", "show", "job", self.jobs[number])
        return re.search(rf"\b{name}=(\S+)", text)[1]


def assert_is_one_array(both, runs, undisturbed) -> None:
    """Two runs of two tasks are one job array, and equal a run without Slurm."""
    both.wait(0)
    numbers = [job.partition("_") for job in both.jobs if "_" in job]
    assert len({number for number, *_ in numbers}) == 1, "one job array"
    assert [index for *_, index in numbers] == ["0", "1"]
    files = sorted(runs.folder.glob("sweep/**/metrics.jsonl"))
    assert ["learning_rate=0.01" in str(file) for file in files] == [True, False]
    losses = [Folder(file.parent, "").column("loss") for file in files]
    assert losses[0] == undisturbed.column("loss")
    assert losses[0][0] == losses[1][0]
    assert losses[0][1:] != losses[1][1:]
    assert all((file.parent / "final" / "config.json").exists() for file in files)


@pytest.mark.rest
def test_time_limit_and_preemption_on_slurm(slurm, sweep, runs, undisturbed, tmp_path):
    """All ranks save the same step; the job goes on exactly, on a new port.

    First a more urgent job takes the nodes, and Slurm queues the job again. Then the signal before
    the time limit comes during the imports, and the job queues itself again. While this job waits
    for the signal, which takes a minute, a sweep runs beside it.
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
    both = sweep("sweep", "optimizer.learning_rate=1e-2,2e-2", *STEPS)

    def signals() -> int:
        return len([*notes.glob("signal-*")])

    slurm.wait_for(lambda: signals() == 2 or job.process.poll(), "signals")
    assert signals() == 2, job.output
    slurm.wait_for(lambda: limit(50), "time limit")
    assert_is_one_array(both, runs, undisturbed)
    job.wait(0)
    assert job.show("Restarts") == "2"
    output = job.output
    assert re.findall(r"Stopped after step (\d+)", output) == ["4", "5"]
    assert output.count(f"Job {job.jobs[0]} is queued again") == 1
    checkpoints = ["None", *(f"{runs.find('stopped')}/checkpoint-{step}" for step in (4, 5))]
    assert re.findall(r"checkpoint: (.*)", output) == checkpoints
    result = Folder(runs.find("stopped"), output)
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert result.column(name) == undisturbed.column(name), name
    assert [record["step"] for record in result.records[:8]] == [*range(1, 9)]
    assert_same_model(undisturbed, result)
    for rank in "01":
        ports = [int((notes / f"port-{start}-{rank}").read_text()) for start in range(3)]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
        assert 20_000 <= ports[0] < 30_000
