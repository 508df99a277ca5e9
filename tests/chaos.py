"""Ends processes of training runs at random moments, and checks that nothing is lost.

    python tests/chaos.py --rounds 3               # every chapter with several processes
    python tests/chaos.py --chapters 02-ddp 05-multi-node --rounds 20 --seed 1

A round is one run of 14 steps on two processes, with a checkpoint after every step. torchrun starts
it with --max-restarts. Twice, a worker or all workers get SIGKILL: during the start, in a step, or
while a checkpoint is written. Both times the run comes back. Then torchrun gets SIGTERM or Ctrl-C,
and the run stops with a checkpoint. The same command continues it to its end. In the end, all
records, checkpoints and weights are those of a run that nobody has disturbed. A run that does not
move for two minutes fails, and the report says where each rank stood.

Moments are random in time, so the same seed does the same things at nearly the same moments.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from conftest import (
    LLAMA,
    NO_TORCHVISION,
    STAND_IN,
    TINY_LLAMA,
    Trainer,
    exact,
    write_model,
)
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, Run
from safetensors.torch import load_file
from test_fsdp import assert_same_checkpoint
from test_hf_trainer import Runs
from test_torchrun import Forking

STEPS = 14
LIMIT = 120  # seconds without progress
TEXT = ["--max-steps", STEPS, "--ckpt-freq", 1, "--keep-checkpoints", 2 * STEPS, "--eval-freq", 7]
ROWS = [*TEXT, "--eval-freq", 0, "--shuffle-window", 10, "-b", 2, "--num-epochs", 99]
SMALL = ["--keep", 0.1, "--min-compress", 600]
ROUNDS = ["--replicas", 2, "--shard-size", 1, "--inner-steps", 5, "--outer-momentum", 0.5]
# The flags of the runs of a chapter. A round takes one of the lists.
FLAGS = {
    "04-streaming": [["--packing", "overflow"], []],
    "05-multi-node": [
        ["--shard-size", 1, "--async-checkpoint"],
        ["--checkpoint-format", "local"],
        ["--checkpoint-format", "local", "--async-checkpoint"],
        ["--checkpoint-format", "full"],
    ],
    "07-pipeline-parallel": [["-b", 2], ["-b", 1, "--schedule", "interleaved"]],
    "08-gradient-compression": [
        ["--compress", "dct-topk", *SMALL],
        ["--compress", "powersgd", *SMALL],
        [],
    ],
    "10-mds-shards": [["--async-checkpoint"], []],
    "11-context-parallel": [[], ["--exchange", "tokens"]],
    "13-3d-parallel": [
        ["-b", 4, "--pipeline-parallel", 1, "--tensor-parallel", 2],
        ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 1],
    ],
    "15-local-steps": [
        [*ROUNDS, "--async-checkpoint"],
        [*ROUNDS, "--checkpoint-format", "local"],
    ],
}
SINGLE = {"01", "14"}  # on one device
CHAPTERS = {
    script.parent.name: FLAGS.get(script.parent.name, [[]])
    for number, script in CHAPTERS_BY_NUMBER.items()
    if number not in SINGLE
}
# A worker that gets SIGUSR1 prints where each of its threads stands.
SAY_WHERE = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1, all_threads=True)\n"
if NO_TORCHVISION:
    SAY_WHERE += f"import sys; sys.path.append({str(STAND_IN)!r})\n"


class Configured(Runs):
    """Runs of chapter 9, in the form of a `Trainer`."""

    def defaults(self, name: str) -> list:
        steps = [f"training.max_steps={STEPS}", "training.save_steps=1", "training.eval_steps=7"]
        keep = f"training.save_total_limit={2 * STEPS}"
        return [*self.arguments, f"experiment_name={name}", *steps, keep, "parallel=ddp"]


def prepare(folder: Path) -> Trainer:
    """Text in two files, the same in MDS shards, a model, and a mixture of experts."""
    chance = random.Random(0)
    words = ["def", "return", "self", "lambda", "the", "loss", "gradient", "Größe", "学习", "x"]
    for number in range(2):
        texts = [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(200)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines)
    data = f"{folder}/?.jsonl"
    flags = ["-o", folder / "shards", "-m", TINY_LLAMA, "-d", data, "-s", 32, "--processes", 1]
    tool = Run(REPOSITORY / "tools" / "write-mds.py", flags, folder / "tool.txt", before=SAY_WHERE)
    assert tool.wait() == 0, tool.output
    model = write_model(folder / "model", **LLAMA | {"num_hidden_layers": 4})
    trainer = Trainer(folder, model, data)
    trainer.shards = folder / "shards"
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    experts |= {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    trainer.mixture = write_model(folder / "mixture", **LLAMA | experts)
    return trainer


def flags_of(chapter: str, trainer: Trainer) -> list:
    flags = {"04-streaming": ROWS, "09-hf-trainer": []}
    flags["10-mds-shards"] = [*ROWS, "-d", trainer.shards]
    flags["12-expert-parallel"] = [*TEXT, "-m", trainer.mixture]
    return flags.get(chapter, TEXT)


class Chaos:
    """One round of one chapter."""

    def __init__(self, trainer: Trainer, chapter: str, name: str, chance: random.Random):
        self.chapter, self.name, self.chance = chapter, name, chance
        self.options = chance.choice(CHAPTERS[chapter])
        self.script = REPOSITORY / chapter / "train-llm.py"
        self.trainer, self.number, self.events = trainer, 0, []
        if chapter == "09-hf-trainer":
            folder = trainer.folder / f"{chapter}-{name}"
            folder.mkdir()
            self.trainer = Configured(folder, trainer.model, trainer.dataset)
        self.flags = [*flags_of(chapter, trainer), *self.options]

    def start(self, name: str) -> Forking:
        command = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 3]
        self.number += 1
        output = f"{self.name}-{self.number}.txt"
        options = {"name": name, "before": SAY_WHERE}
        return Forking(self.trainer, output, [*command, self.script], *self.flags, **options)

    def checkpoints(self, name: str) -> dict[str, Path]:
        """Folders of checkpoints by their paths in the folder of the run."""
        run = self.trainer.folder / name
        # os.walk ignores a folder that the run renames or removes meanwhile
        folders = [Path(parent, name) for parent, names, _ in os.walk(run) for name in names]
        folders = [f for f in folders if re.match(r"(step|checkpoint)-.*\d$", f.name)]
        return {str(folder.relative_to(run)): folder for folder in sorted(folders)}

    def newest(self, name: str) -> int:
        return max((int(path.rpartition("-")[2]) for path in self.checkpoints(name)), default=0)

    def wait_until(self, launch: Forking, condition, what: str) -> bool:
        """Also returns where the job ends before: False. Fails where nothing moves any more."""
        end = time.monotonic() + LIMIT
        while not condition():
            if launch.status is not None:
                return False
            if time.monotonic() > end:
                self.say_where(launch)
                raise AssertionError(f"no {what} within {LIMIT} s: {self.story}\n{launch.output}")
            time.sleep(0.005)
        return True

    def say_where(self, launch: Forking) -> None:
        """Each rank prints its stacks. Then the job is killed."""
        agent = psutil.Process(launch.process.pid)
        for process in agent.children(recursive=True):
            process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()

    def workers(self, launch: Forking) -> list[psutil.Process]:
        """None, if the job has just ended."""
        with suppress(psutil.NoSuchProcess):
            return launch.workers()
        return []

    def moment(self, launch: Forking, when: str) -> bool:
        """Waits for such a moment, or False if the job ends first."""
        now = self.newest("disturbed")
        if when == "start":
            time.sleep(self.chance.uniform(0, 1))
            return launch.status is None
        if not self.wait_until(launch, lambda: self.newest("disturbed") > now, "checkpoint"):
            return False
        if when == "save":
            run = self.trainer.folder / "disturbed"

            def writes() -> bool:
                names = ("**/incomplete/*", "**/tmp-checkpoint-*", "memory-*", "**/checkpoint-*/*")
                now = time.time()
                files = [file for name in names for file in run.glob(name)]
                return any(now - modified(file) < 0.05 for file in files)

            if not self.wait_until(launch, writes, "save"):
                return False
        time.sleep(self.chance.uniform(0, 0.02 if when == "save" else 0.3))
        return launch.status is None

    def kill(self, launch: Forking) -> None:
        """SIGKILL for a worker or for all. torchrun starts them again."""
        when = self.chance.choice(["start", "step", "save", "save"])
        self.wait_until(launch, lambda: len(self.workers(launch)) == 2, "two workers")
        if not self.moment(launch, when):
            return
        workers = self.workers(launch)
        count = self.chance.choice([1, 1, 2])
        victims = self.chance.sample(workers, min(count, len(workers)))
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self.tell(f"SIGKILL for {len(victims)} of 2 ({when})")

        def again() -> bool:
            now = self.workers(launch)
            return len(now) == 2 and not {*now} & {*workers}

        self.wait_until(launch, again, "restart")

    def stop(self, launch: Forking) -> None:
        """A signal to torchrun. The run stops with a checkpoint, or is just over."""
        signum = self.chance.choice([signal.SIGTERM, signal.SIGINT])
        if not self.moment(launch, "step"):
            return
        launch.signal(signum)
        self.tell(f"{signum.name} to torchrun")
        self.wait_until(launch, lambda: False, "end")
        newest = self.newest("disturbed")
        saves = self.chapter != "09-hf-trainer" or signum == signal.SIGTERM  # as its README says
        if launch.status and saves:
            assert f"Stopped after step {newest}: the same command" in launch.output, launch.output

    def tell(self, event: str) -> None:
        self.events.append(f"{event} after step {self.newest('disturbed')}")

    @property
    def story(self) -> str:
        options = " ".join(map(str, self.options))
        return f"{self.chapter} {options}: {', '.join(self.events)}"

    def run(self, kills: int = 2) -> str:
        undisturbed = self.start("undisturbed")
        self.wait_until(undisturbed, lambda: False, "end")
        assert undisturbed.status == 0, undisturbed.output
        launch = self.start("disturbed")
        for _ in range(kills):
            if launch.status is None:
                self.kill(launch)
        if launch.status is None:
            self.stop(launch)
        if launch.status:
            launch = self.start("disturbed")
            self.wait_until(launch, lambda: False, "end")
        assert launch.status == 0, f"{self.story}\n{launch.output}"
        self.compare()
        return self.story

    def compare(self) -> None:
        """Records, checkpoints and weights are equal to the last bit."""
        a, b = (self.trainer.folder / name for name in ("undisturbed", "disturbed"))
        assert records_of(a) == records_of(b), self.story
        checkpoints, others = self.checkpoints(a.name), self.checkpoints(b.name)
        assert checkpoints.keys() == others.keys(), self.story
        for name, folder in checkpoints.items():
            if (folder / ".metadata").exists() and "rank-" not in name:
                assert_same_checkpoint(folder, others[name])
            assert_same_files(folder, others[name], self.story)
        (final,), (other,) = a.glob("**/final"), b.glob("**/final")
        assert_same_files(final, other, self.story)
        assert not [*b.glob("**/incomplete")], self.story


# Of the Trainer in chapter 9; `exact` drops the others
OF_THE_CLOCK = ("runtime", "per_second", "memory/")


def records_of(run: Path) -> list[dict]:
    """The records of a run, without the time and the machine. Checkpoints have copies of them."""
    copies = ("step-", "checkpoint-")
    files = [f for f in run.glob("**/metrics.jsonl") if not f.parent.name.startswith(copies)]
    assert len(files) == 1, files
    records = exact([json.loads(line) for line in files[0].open()])
    records = [record for record in records if "train_runtime" not in record]
    return [
        {name: x for name, x in record.items() if not any(part in name for part in OF_THE_CLOCK)}
        for record in records
    ]


def modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0


def assert_same_files(a: Path, b: Path, story: str) -> None:
    """The same names. Files of weights have the same tensors."""
    names = sorted(str(file.relative_to(a)) for file in a.rglob("*"))
    assert names == sorted(str(file.relative_to(b)) for file in b.rglob("*")), story
    for file in a.glob("*.safetensors"):
        one, other = load_file(file), load_file(b / file.name)
        assert one.keys() == other.keys(), story
        assert all(one[name].equal(other[name]) for name in one), (story, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chapters", nargs="+", choices=CHAPTERS, default=[*CHAPTERS])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = 0
    for chapter in args.chapters:
        for number in range(args.rounds):
            begin = time.monotonic()
            chance = random.Random(f"{chapter} {args.seed} {number}")
            with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
                chaos = Chaos(prepare(Path(folder)), chapter, f"round-{number}", chance)
                try:
                    chaos.run()
                    result = "equal to an undisturbed run"
                except AssertionError as error:
                    failed += 1
                    result = f"FAILED: {error}"
            print(f"{chaos.story}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
