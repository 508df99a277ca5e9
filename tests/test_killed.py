"""A rank is killed in the middle of a save, for each kind of checkpoint.

The rank counts what it does with files, and sends itself SIGKILL just before a certain one of these
actions. So the moments are the same in each run, and no test waits for them. Restarts by torchrun
itself are in test_torchrun.py.
"""

import signal

import pytest
from helpers.assertions import assert_same_model, exact
from helpers.runner import CHAPTERS_BY_NUMBER, REPOSITORY, patches

pytestmark = pytest.mark.rest

STEPS = ["--max-steps", 6, "--ckpt-freq", 1, "--keep-checkpoints", 2, "--eval-freq", 3]
ROUNDS = ["--replicas", 2, "--shard-size", 1, "--inner-steps", 3]
CHAT = ["-d", REPOSITORY / "models" / "tiny-chat" / "rows", "-s", 256]
POWERSGD = ["--compress", "powersgd", "--min-compress", 600]
LOCAL, ASYNC = ["--checkpoint-format", "local"], ["--async-checkpoint"]
# Chapter, processes, flags: one for each way to write a checkpoint
KINDS = {
    "one file": ("01-single-gpu", 0, []),
    "and memory of each rank": ("08-gradient-compression", 2, POWERSGD),
    "shards": ("03-fsdp", 2, []),
    "places in a stream": ("04-streaming", 2, ["--eval-freq", 0, "--shuffle-window", 10, "-b", 2]),
    "own disks": ("05-multi-node", 2, LOCAL),
    "in a thread": ("05-multi-node", 2, ["--shard-size", 1, *ASYNC]),
    "replicas, own disks, in a thread": ("15-local-steps", 2, [*ROUNDS, *LOCAL, *ASYNC]),
    "momentum": ("18-muon", 2, []),
    "adapters": ("17-lora", 2, ["-b", 1, *CHAT]),
}
KILLS = 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_while_saving_loses_nothing(trainer, pretrained, kind):
    """Records, checkpoints and weights are those of a run that nobody has disturbed."""
    chapter, processes, flags = KINDS[kind]
    if kind == "adapters":  # of random weights, they are refused
        flags = [*flags, "-m", pretrained, "--no-from-scratch"]
    options = {"script": CHAPTERS_BY_NUMBER[chapter[:2]], "processes": processes}
    flags = [*STEPS, *flags]
    whole = trainer(*flags, name="whole", before=patches("kill_in_a_save"), **options)
    outputs = [run.output for run in getattr(whole.run, "ranks", [whole.run])]
    per_save = [int(text.rpartition("actions ")[2].split()[0]) // 7 for text in outputs]
    assert per_save[0] > KILLS  # of six steps and final/
    killed = 0
    for number in range(KILLS):
        rank = number % len(outputs) if per_save[-1] > 1 else 0
        at = 1 + number * per_save[rank] // KILLS + number % 2 * per_save[rank]
        options["env"] = {"KILL_AT": f"{rank} {at}"}
        run = trainer(
            *flags, name="killed", before=patches("kill_in_a_save"), status=None, **options
        )
        killed += run.status == -signal.SIGKILL
    del options["env"]
    assert killed >= 2
    again = trainer(*flags, name="killed", **options)
    assert "Continuing from" in again.output
    assert exact(again.records) == exact(whole.records)
    assert_same_model(again, whole)
    names = [
        sorted(str(p.relative_to(r.folder)) for p in r.folder.glob("**/*step-*/*"))
        for r in (again, whole)
    ]
    assert names[0] == names[1]
    assert not [*again.folder.glob("**/incomplete-*")]
