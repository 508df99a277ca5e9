"""tools/step-timeline.py: the lanes hold what the profiler has seen, and nothing else."""

import re
import subprocess
from collections import Counter

import pytest
from helpers.models import TINY_LLAMA
from helpers.runner import REPOSITORY, load, outcome
from helpers.torchrun import FORKING
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
    output = capsys.readouterr().out
    assert f"{share:.0%} of the time of communication" in output
    times = dict(re.findall(r"^\| ([\w ]+) \| ([\d.]+) \| ", output, re.MULTILINE))
    assert times.keys() == {*tool.WORK, "the whole step"}
    *work, whole = (float(time) for time in times.values())
    kinds = ("attention", "loss", "optimizer and clipping", "matrix products")
    assert all(float(times[kind]) > 0 for kind in kinds)
    assert sum(work) < whole

    config = AutoConfig.from_pretrained(TINY_LLAMA)
    parameters = AutoModelForCausalLM.from_config(config).parameters()
    size = sum(4 * parameter.numel() for parameter in parameters)
    assert 2**20 < size < 25 * 2**20  # so a first bucket, which is small, and a second one
    for rank, events in zip(ranks, seen, strict=True):
        kinds = Counter(kind for kind, *_ in rank["communicating"])
        assert kinds == {"all-reduce": 2, "broadcast": 1}  # DDP sends the buffers of rank 0
        # Averaging begins in the backward pass.
        (_, begin, end, _) = [e for e in events if e[0] == tool.PHASE + "backward"][-1]
        starts = [start for kind, start, _ in rank["communicating"] if kind == "all-reduce"]
        assert all(begin < start < end for start in starts)
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
        # Of the first product, one ns is that of an operator that it calls.
        "work": {"matrix products": 27 + 8, "copies and casts": 5, "the rest": 1 + 1},
        "computing": [
            *(("forward", 12, 20), ("forward", 30, 40), ("backward", 51, 59)),
            *(("backward", 70, 75), ("update", 101, 102)),
        ],
        "communicating": [
            *(("reduce-scatter", 45, 55), ("all-reduce", 47, 52), ("reduce", 80, 85))
        ],
    }
    assert tool.rows(step["communicating"]) == [0, 1, 0]


def test_kernels_of_a_gpu_belong_to_the_phase_that_launches_them():
    """A trace in the format of `export_chrome_trace`, in microseconds. Kernels run after Python."""

    def event(kind, name, begin, end, correlation=None):
        args = {} if correlation is None else {"correlation": correlation}
        return {"cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": args}

    trace = [{"name": "process_name", "ph": "M"}]
    for first in (0, 1000):  # two steps, the second of them while the GPU is still in the first
        marks = {"data": (0, 5), "forward": (10, 20), "backward": (30, 40), "update": (50, 60)}
        trace.append(event("gpu_user_annotation", "Optimizer.step", first, first + 60, 5))
        trace += [event("user_annotation", tool.PHASE + k, first + b, first + e)
                  for k, (b, e) in marks.items()]  # fmt: skip
        for number, (launch, name, begin, end) in enumerate([
            (2, "Memcpy HtoD", 100, 110),
            (12, "gemm", 200, 300),
            (31, "gemm", 300, 400),
            (32, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 350, 450),
            (33, "ncclDevKernel_AllGather_RING_LL", 460, 470),
            (52, "adamw", 1150, 1200),
        ]):  # fmt: skip
            launched = event("cuda_runtime", "cudaLaunchKernel", first + launch, first + launch + 1)
            launched["args"]["correlation"] = first + number
            kind = "gpu_memcpy" if "Memcpy" in name else "kernel"
            trace += [launched, event(kind, name, first + begin, first + end, first + number)]
    first, second = tool.read_trace(trace)
    shifted = [(k, begin - 1_000_000, end - 1_000_000) for k, begin, end in second["computing"]]
    assert shifted == first["computing"] == [
        *(("data", 100_000, 110_000), ("forward", 200_000, 300_000)),
        *(("backward", 300_000, 400_000), ("update", 1_150_000, 1_200_000)),
    ]  # fmt: skip
    assert first["communicating"] == [
        ("reduce-scatter", 350_000, 450_000),
        ("all-gather", 460_000, 470_000),
    ]
    work = {"matrix products": 200_000, "copies and casts": 10_000}
    assert first["work"] == work | {"optimizer and clipping": 50_000}
    assert (first["begin"], first["end"]) == (100_000, 1_200_000)
    assert tool.hidden_share([first, second]) == 50 / 110
