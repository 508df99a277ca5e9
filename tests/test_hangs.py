"""tools/where-it-hangs.py: what the ranks of learn/broken/ wait for, and dumps of other kinds."""

import os
import pickle
import re
import subprocess
import sys
import time

import pytest
import torch
from helpers.runner import REPOSITORY, Job, free_port, load, patches, python

TOOL = REPOSITORY / "tools" / "where-it-hangs.py"
PRELOAD = REPOSITORY / "tools" / "watch"
BROKEN = {path.name[0]: path for path in sorted((REPOSITORY / "learn" / "broken").glob("*.py"))}
PAGE = (REPOSITORY / "learn" / "broken" / "README.md").read_text()


def repaired(number: str, folder):
    """The script with the lines of its answer."""
    answer = PAGE.partition(f"<summary>{number}: ")[2].partition("</details>")[0]
    text = BROKEN[number].read_text()
    for diff in re.findall(r"```diff\n(.*?)```", answer, re.DOTALL):
        lines = diff.splitlines(keepends=True)
        wrong = "".join(line[1:] for line in lines if line.startswith("-"))
        right = "".join(line[1:] for line in lines if line.startswith("+"))
        assert text.count(wrong) == 1
        text = text.replace(wrong, right)
    script = folder / BROKEN[number].name
    script.write_text(text)
    return script


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


def hang(tool, script, folder, processes=2, seconds=1, timeout=60):
    """The dumps of a job that hangs, after the end of the job. They stay as they were."""
    dumps = folder / "dumps"
    env = {"HANG_DUMPS": str(dumps), "HANG_SECONDS": str(seconds)}
    job = Job(script, [], folder / "output", processes, before=patches("watch"), env=env)
    end = time.monotonic() + timeout
    try:
        while not (dumps.is_dir() and tool.all_wait(dumps, seconds)):
            assert time.monotonic() < end, job.output
            time.sleep(0.1)
    finally:
        for run in job.ranks:
            run.process.kill()
            run.process.join()
    return tool.read_dumps(dumps)


# What the tool says about each script. The numbers are lines of the script.
SENTENCES = {
    "1": r"rank \d went to \w+ at 1-collect-losses.py:\d+ \(losses_of_all_ranks\); rank \d waits "
    r"in \w+ at 1-collect-losses.py:\d+ \(losses_of_all_ranks\)\.",
    "2": r"rank 1 went to barrier at 2-bad-samples.py:\d+ after 18 calls at 2-bad-samples.py:(\d+)"
    r"; rank 0 waits in all_reduce at 2-bad-samples.py:\1\.",
    "3": r"rank (\d) waits in group \d \(\w+\) in all_reduce .*, which rank (\d) did not call; "
    r"rank \2 waits in all_reduce .* in group \d \(\w+\): .* call the groups in another order\.",
    "4": r"rank 0 went to barrier at 4-save-weights.py:\d+ \(save\) after 4 calls at "
    r"4-save-weights.py:(\d+); rank 1 waits in all_reduce at 4-save-weights.py:\1\.",
    "5": r"rank 1 went to barrier at 5-early-stopping.py:\d+ after \d+ calls at "
    r"5-early-stopping.py:(\d+); rank 0 waits in all_reduce at 5-early-stopping.py:\1\.",
}
FIRST = ["1"]  # in the quick tier
hanging = pytest.mark.parametrize(
    "number", [n if n in FIRST else pytest.param(n, marks=pytest.mark.rest) for n in SENTENCES]
)


@hanging
def test_a_broken_script_hangs_and_the_tool_says_why(tool, tmp_path, capsys, number):
    assert tool.report(hang(tool, BROKEN[number], tmp_path)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(SENTENCES[number], last), last


def weights_of_one_process(number: str) -> float:
    """The sum of the final weights, if one process trains with the samples of both ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, bias=number in "12")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(torch.randn(100 if number == "5" else 10, 2, 4, 8)):
        is_damaged = number == "2" and step == 3  # rank 1 has no samples, and gives zeros
        samples = batch[0] if is_damaged else batch.flatten(0, 1)
        loss = (model(samples).squeeze() - samples.sum(1)).square().mean()
        (loss / 2 if is_damaged else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == "5" and loss < 0.5:
            break
    return model.weight.sum().item()


@pytest.mark.rest
@pytest.mark.parametrize("number", SENTENCES)
def test_a_repaired_script_ends_with_the_weights_of_one_process(tool, tmp_path, capsys, number):
    env = {"HANG_DUMPS": str(tmp_path / "dumps"), "HANG_SECONDS": "1"}
    job = Job(
        repaired(number, tmp_path), [], tmp_path / "output", 2, before=patches("watch"), env=env
    )
    assert job.wait(60) == 0, job.output
    weights = re.findall(r"is done, weights (\S+)", job.output)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert float(weights[0]) == pytest.approx(weights_of_one_process(number), abs=1e-5)
    # A rank leaves a dump if it has waited for a second.
    assert tool.report(tool.read_dumps(tmp_path / "dumps")) == 0
    assert re.search("All ranks have ended|No rank has waited", capsys.readouterr().out)


# What a script does after its first all-reduce, and what the tool says. `start` is the command.
AFTER_START = """
import ctypes, os, signal, sys, torch, torch.distributed as dist
def main(rank=None):
    if rank is not None:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[1]}
        dist.init_process_group("gloo", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    LINES
    dist.barrier()
if __name__ == "__main__":
    main() if "RANK" in os.environ else torch.multiprocessing.spawn(main, nprocs=2)
"""
MESH = "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')); "
MESH += "rank == 3 or dist.all_reduce(torch.ones(1), group=mesh.get_group('tp'))"
# Locks the same mutex twice, with the lock of Python in the hand: it waits, and does not compute.
HOLD = "lock = ctypes.PyDLL(None).pthread_mutex_lock; mutex = ctypes.create_string_buffer(64); "
OWN_HANDLER = "signal.signal(signal.SIGTERM, lambda *_: None); "
KINDS = {
    "an error": (
        2,
        OWN_HANDLER + "rank == 0 or [].index('one\\ntwo')",
        r"rank 1 died first .ValueError: 'one.ntwo' is not in list.: it stands at kind.py:11",
    ),
    "killed": (
        2,
        "rank == 0 or os.kill(os.getpid(), 9)",
        "rank 1 died first .without an error of Python.*rank 0 went to barrier at kind.py:12",
    ),
    "a rank that holds the lock of Python": (
        2,
        HOLD + "rank == 0 or [lock(mutex), lock(mutex)]",
        "rank 1 stands at kind.py:11 .main., and its calls are unknown; rank 0 waits in barrier",
    ),
    "all ranks hold it": (2, HOLD + "lock(mutex), lock(mutex)", "so compare the lines above"),
    "other sizes": (2, "dist.all_reduce(torch.ones(1 + 99 * rank))", r"all_reduce at kind.py:11"),
    "spawn": (0, "rank == 0 or signal.pause()", "rank 1 stands at kind.py:11.*rank 0 waits in bar"),
}


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_hangs_and_deaths(tmp_path, kind):
    """Under torchrun, with a preload that waits for torch; and no process is left. Under variables
    of a pod, too: they are those of torchrun, and not of its ranks."""
    processes, lines, sentence = KINDS[kind]
    script = tmp_path / "kind.py"
    script.write_text(AFTER_START.replace("LINES", lines))
    start = f"-m torch.distributed.run --standalone --nproc-per-node {processes}" * bool(processes)
    command = f"{sys.executable} {start} {script} {free_port()}"
    env = os.environ | ({"RANK": "0", "WORLD_SIZE": "1"} if processes else {})
    done = python(TOOL, "--seconds", 2, command, status=1, env=env)
    assert re.search(sentence, done.stdout.splitlines()[-1]), done.stdout
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(script) not in processes


@pytest.mark.rest
def test_a_mesh_without_one_call(tool, tmp_path, capsys):
    script = tmp_path / "kind.py"
    script.write_text(AFTER_START.replace("LINES", MESH))
    assert tool.report(hang(tool, script, tmp_path, processes=4)) == 1
    sentence = r"rank 2 waits in group \d \(mesh_tp\) in all_reduce .* which rank 3 did not call"
    assert re.search(sentence, capsys.readouterr().out.splitlines()[-1])


def test_a_process_that_is_no_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.pause()\n")
    done = python(TOOL, "--seconds", 0.3, f"{sys.executable} {script}", status=2)
    assert "No process has joined a process group in 1.8 seconds" in done.stdout


# In their second call, ranks write what PyTorch has recorded, under the names of NCCL's files.
RECORD = """call = dist.barrier if rank else lambda **options: dist.all_reduce(mine, **options)
    mine = torch.ones(4)
    work = call(async_op=True)
    record = torch._C._distributed_c10d._dump_fr_trace()
    open(f"nccl_trace_rank_{rank}", "wb").write(record)
    os._exit(0)"""


def test_dumps_of_the_flight_recorder(tool, tmp_path, capsys):
    """The recorder is that of all backends, but only Gloo's calls were recorded here."""
    script, dumps = tmp_path / "kind.py", tmp_path / "dumps"
    script.write_text(AFTER_START.replace("LINES", RECORD))
    dumps.mkdir()
    job = Job(script, [], tmp_path / "output", 2, cwd=dumps)
    assert job.wait(60) == 0, job.output
    assert tool.report(tool.read_dumps(dumps)) == 1
    sentence = (
        r"rank 0 went to all_reduce at kind.py:11 .*; rank 1 waits in barrier at kind.py:13 .*"
    )
    assert re.fullmatch(sentence, capsys.readouterr().out.splitlines()[-1])


FOREIGN = {
    "nothing": b"",
    "text": b"text",
    "other keys": pickle.dumps({}),
    "code": pickle.dumps(print),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_other_files_end_in_a_sentence(tool, tmp_path, capsys, content):
    """No code of a pickle runs."""
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(SystemExit):
        tool.read_dumps(tmp_path)
    assert "nccl_trace_rank_0 is no dump of collectives" in capsys.readouterr().err


def test_the_preload_imports_torch_only_when_the_script_does(tmp_path):
    """The script's own settings come first."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nassert 'torch' not in sys.modules\nassert 'hangs' in sys.modules\n"
    )
    env = {"HANG_DUMPS": str(tmp_path), "RANK": "0", "FIRST_DIFFERENCE": str(tmp_path)}
    env |= {"PYTHONPATH": str(PRELOAD)}
    python(script, env=env)
