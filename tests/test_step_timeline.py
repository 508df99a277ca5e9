"""tools/step-timeline.py: the lanes hold what the profiler has seen, and nothing else."""

import subprocess
from collections import Counter

import pytest
from conftest import TINY_LLAMA
from runner import REPOSITORY, load, outcome
from test_torchrun import FORKING
from transformers import AutoConfig, AutoModelForCausalLM

TOOL = REPOSITORY / "tools" / "step-timeline.py"

tool = load(TOOL)


@pytest.mark.rest
def test_a_step_of_chapter_2(tmp_path, capsys):
    """One run through torchrun. Its collectives are those of DDP, and no others."""

    def run(command, **_):
        assert command[1:3] == ["-m", "torch.distributed.run"]
        status, output = outcome(tmp_path, FORKING, *command[3:])
        return subprocess.CompletedProcess(command, status, stderr=output)

    seen, steps = [], []
    read_steps, draw = tool.read_steps, tool.draw
    file = tmp_path / "step.png"
    arguments = ["02-ddp", "-o", str(file), "--max-steps", "3", "-s", "32"]
    arguments += ["-d", str(REPOSITORY / "02-ddp" / "*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(TOOL), *arguments])
        patch.setattr("subprocess.run", run)
        patch.setattr(tool, "read_steps", lambda e: (seen.append(e), read_steps(e))[1])
        patch.setattr(tool, "draw", lambda *given: (steps.append(given), draw(*given))[1])
        tool.main()
    assert file.exists()
    ((title, ranks),) = steps
    assert title == "02-ddp on 2 CPU processes: optimizer step 3"
    share = tool.hidden_share(ranks)
    assert f"{share:.0%} of the time of communication" in capsys.readouterr().out

    config = AutoConfig.from_pretrained(TINY_LLAMA)
    parameters = AutoModelForCausalLM.from_config(config).parameters()
    size = sum(4 * parameter.numel() for parameter in parameters)
    assert 2**20 < size < 25 * 2**20  # so a first bucket, which is small, and a second one
    for rank, events in zip(ranks, seen, strict=True):
        kinds = Counter(kind for kind, *_ in rank["communicating"])
        assert kinds == {"all-reduce": 2}  # no broadcast: the buffers never change
        # Averaging begins in the backward pass.
        (_, begin, end, _) = [e for e in events if e[0] == tool.PHASE + "backward"][-1]
        assert all(begin < start < end for _, start, _ in rank["communicating"])
        assert {phase for phase, *_ in rank["computing"]} >= {"forward", "backward", "update"}


def test_waiting_is_no_computing_and_kinds_are_those_of_the_calls():
    events = [
        (tool.PHASE + "schedule", 10, 100, 1),
        ("aten::mm", 12, 40, 1),
        ("aten::nested", 15, 16, 1),
        ("_c10d_functional::wait_tensor", 20, 30, 1),
        (tool.ENGINE + ": MmBackward0", 50, 60, 1),
        ("aten::mm", 51, 59, 1),
        ("aten::copy_", 70, 75, 1),  # gradients, after the last pass
        ("aten::copy_", 70, 75, 2),  # another thread
        ("c10d::_reduce_scatter_base_", 45, 46, 1),
        ("c10d::allreduce_", 47, 48, 1),
        ("gloo:all_reduce", 49, 55, 2),
        ("gloo:all_reduce", 50, 52, 3),
        ("c10d::reduce_", 80, 81, 1),
        ("gloo:reduce", 82, 85, 2),
        (tool.PHASE + "update", 100, 110, 1),
        ("aten::add", 101, 102, 1),
        ("c10d::allreduce_", 120, 121, 1),  # after the step
        ("gloo:all_reduce", 122, 123, 2),
    ]
    (step,) = tool.read_steps(events)
    # The rank communicates from 45 to 55 and from 80 to 85, and computes from 51 to 55.
    assert tool.hidden_share([step]) == 4 / 15
    assert step == {
        "begin": 10,
        "end": 110,
        "computing": [
            *(("forward", 12, 20), ("forward", 30, 40), ("backward", 51, 59)),
            *(("backward", 70, 75), ("update", 101, 102)),
        ],
        "communicating": [
            *(("reduce-scatter", 45, 55), ("all-reduce", 47, 52), ("reduce", 80, 85)),
        ],
    }
    assert tool.rows(step["communicating"]) == [0, 1, 0]
