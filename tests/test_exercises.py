"""learn/exercises/check.py: what is right passes, and what is wrong gets a sentence."""

import os
import re
import sys

import pytest
from helpers.chapters import replaced
from helpers.pages import page
from helpers.runner import CHAPTERS_BY_NUMBER, REPOSITORY, load, outcome

CHECK = REPOSITORY / "learn" / "exercises" / "check.py"
check = load(CHECK)


def graded(folder, exercise: str, text: str, *flags) -> tuple[int, str]:
    (folder / f"{exercise}.py").write_text(text)
    return outcome(folder, CHECK, exercise, "--folder", folder, *flags)


GATHER = "dist.all_gather(whole, shard)"
REDUCE_SCATTER = "dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))"
SCATTER = "dist.reduce_scatter_tensor(shards.grad[layer], weight_grad)"
AVERAGE = "dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)"
DENSE = "torch.zeros(512).index_add(0, all_gather(indices), all_gather(values))"
SPARSE = "torch.sparse_coo_tensor(all_gather(indices)[None], all_gather(values), [512]).to_dense()"
# Right solutions: a piece of the original, and what takes its place
RIGHT = [(name, "# Yours: ", "# Yours: ") for name in check.EXERCISES] + [
    ("fsdp", REDUCE_SCATTER, SCATTER),
    ("fsdp", "        del weight\n\n", "        print(weight)\n\n"),
    ("fsdp", GATHER, "dist.all_gather(whole, shard, async_op=True).get_future().wait()"),
    ("ddp", AVERAGE, f"{AVERAGE}.get_future().then(lambda future: future.value())"),
    ("gradient_compression", DENSE, SPARSE),
]
KEEP = "vars(train).setdefault('kept', []).append(weight); x.append(x[-1] @ weight)"
WAIT = "average(gradient).wait()"
TOO_EARLY = "average(buckets.pop(0)).wait()"  # without waiting, it may be sent late enough
SIZES = f"tensor = tensor.flatten()[: 8 * (rank + 1)]; return {AVERAGE}"
ADD_UP = "dist.reduce_scatter(part, list(summand.chunk(world_size)))"
ALL_REDUCE = "dist.all_reduce(summand); part = summand.chunk(world_size)[rank]"
EXCHANGE = "exchange(grad_y, split=HEADS, join=TOKENS)"
PASS_ON = "k, v = pass_on(torch.stack([k, v]))"
# Wrong solutions, and a part of what is said of each
WRONG = [
    ("ddp", WAIT, "pass", "something was not sent"),
    ("ddp", "requests.append(average(buckets.pop()))", TOO_EARLY, "gradients  WRONG"),
    ("ddp", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "2 times too large: the sum was not"),
    ("ddp", "    return dist.all_reduce", "    dist.all_reduce", "'NoneType' object has no"),
    ("ddp", f"return {AVERAGE}", SIZES, "sizes than the other ranks expect"),
    ("fsdp", "x.append(x[-1] @ weight)", KEEP, "bytes on line"),
    ("fsdp", "weight_grad.chunk(world_size)", "weight_grad.chunk(2)", "written down"),
    ("fsdp", "AdamW([shards])", "Adam([shards])", "gradients  WRONG"),
    ("fsdp", "chunk(world_size))", "chunk(world_size))[::-1]", "the numbers of rank 1"),
    ("tensor_parallel", '{"x": add_up(grad_tokens)', '{"x": grad_tokens', "the shape is (8, 16)"),
    ("tensor_parallel", ADD_UP, ALL_REDUCE, "less is enough"),
    ("pipeline", "recv(tensor,", "recv(tensr,", "tensr, 1 - rank)`\n    NameError: name 'tensr'"),
    ("pipeline", "sent.append(x.pop(n).nbytes)", "sent.append(x[n].nbytes)", "forget inputs"),
    ("pipeline", "y.pop(n).backward(receive())", "y[n].backward(receive())", "memory     WRONG"),
    ("gradient_compression", "        residual[indices] = 0", "", "gradients  WRONG"),
    ("local_steps", "        weights.data.copy_(shared)", "", "gradients  WRONG"),
    ("context_parallel", EXCHANGE, "output.detach()", "something was not sent"),
    ("ring_attention", PASS_ON, f"{PASS_ON}; dist.all_reduce(output)", "less is enough"),
    ("expert_parallel", "y[order] = exchange(", "y[:] = exchange(", "Mistakes that others"),
    ("nf4", "dist.all_gather(whole, part)", "whole = [part] * world_size", "something was not"),
    ("muon", '"update": exchange(received)}', '"update": received}', "something was not sent"),
]


@pytest.mark.rest
@pytest.mark.parametrize(("name", "code", "instead"), RIGHT)
def test_right(tmp_path, name, code, instead):
    text = replaced(check.original(name), {code: instead})
    status, output = graded(tmp_path, f"{name}-1", text)
    assert (status, "solved" in output, "WRONG" in output) == (0, True, False), output


@pytest.mark.rest
@pytest.mark.parametrize(("name", "code", "instead", "said"), WRONG)
def test_wrong(tmp_path, name, code, instead, said):
    text = replaced(check.original(name), {code: instead})
    status, output = graded(tmp_path, f"{name}-1", text)
    assert (status, said in output, "not solved yet" in output) == (1, True, True), output


def test_a_run_that_hangs(tmp_path):
    """It ends in time, and the check says where each rank waits."""
    begin = "    dist.all_gather("
    text = replaced(check.original("tensor_parallel"), {begin: "    if rank: dist.all_gather("})
    status, output = graded(tmp_path, "tensor_parallel-1", text, "--seconds", 3)
    assert status == 1
    for rank, code in ((1, "    if rank: dist.all_gather("), (0, "    dist.reduce_scatter(")):
        number = text[: text.index(code)].count("\n") + 1
        assert f"rank {rank}: not ready after 3 s: line {number}: `{code.strip()}" in output, output


def command(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
    return check.main(), capsys.readouterr().out


@pytest.mark.parametrize("exercise", check.NAMES)
def test_an_untouched_blank_says_not_yet(tmp_path, monkeypatch, capsys, exercise):
    """Each of them, and nothing else. Every other line is a line of the original."""
    name, level = exercise.rsplit("-", 1)
    status, output = command(monkeypatch, capsys, exercise, "--folder", tmp_path)
    file = tmp_path / f"{exercise}.py"
    lines = file.read_text().splitlines()
    compile(file.read_text(), str(file), "exec")
    places = [i for i, line in enumerate(lines, 1) if "raise NotImplementedError" in line]
    assert len(places) == len(check.EXERCISES[name]["levels"][int(level)]) > 0
    written, *told = output.splitlines()
    assert written.startswith(f"written: {os.path.relpath(file)}. ")
    assert told == [f"not yet: {os.path.relpath(file)}, line {place}" for place in places]
    assert status == 1
    assert all(len(line) <= 100 for line in lines)
    added = set(lines) - set(check.complete(exercise).splitlines())
    assert all(line.lstrip().startswith(("# ", "raise NotImpl")) for line in added)


def test_a_file_is_kept(tmp_path, monkeypatch, capsys):
    folder = ["--folder", tmp_path]
    file = tmp_path / "ddp-1.py"
    _, first = command(monkeypatch, capsys, "ddp-1", *folder)
    file.write_text(mine := file.read_text().replace("# Given", "# Mine: Given"))
    again = first[first.index("not yet") :]
    assert command(monkeypatch, capsys, "ddp-1", *folder) == (1, again)
    status, difference = command(monkeypatch, capsys, "ddp-1", "--answer", *folder)
    assert status == 0
    assert f"+    return {AVERAGE}" in difference
    assert file.read_text() == mine


def test_the_page(tmp_path):
    """Each exercise is in its table, and the worked example is true."""
    text = page("learn/exercises/README.md")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) ?\| \[", text, re.MULTILINE)
    found = {f"{name}-{i}" for name, *levels in rows for i, x in enumerate(levels, 1) if x}
    assert found == set(check.NAMES)
    blank, attempt = re.findall("```python\n(.*?)```", text, re.DOTALL)
    assert blank in check.with_blanks("local_steps-1")
    solved = check.with_blanks("local_steps-1").replace(blank, attempt)
    _, output = graded(tmp_path, "local_steps-1", solved)
    (said,) = re.findall("```text\n(.*?)```", text, re.DOTALL)
    assert set(said.splitlines()) <= set(output.splitlines()), output
    names = set(re.findall(r"learn/exercises/check\.py ([\w-]+)", text))
    for script in CHAPTERS_BY_NUMBER.values():
        readme = script.with_name("README.md").read_text()
        names |= set(re.findall(r"`(\w+-[123])`\S*\]\(\S*learn/exercises/", readme))
        names |= set(re.findall(r"learn/exercises/check\.py ([\w-]+)", readme))
    assert names <= set(check.NAMES)
