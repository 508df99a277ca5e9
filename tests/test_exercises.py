"""learn/exercises/check.py: what is right passes, and what is wrong gets a sentence."""

import json
import os
import re
import sys

import pytest
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, load, outcome
from test_readme import page

CHECK = REPOSITORY / "learn" / "exercises" / "check.py"
GRADING = REPOSITORY / "tests" / "grading.py"
check = load(CHECK)
TECHNIQUES = check.TECHNIQUES


def graded(folder, *cases) -> list[list]:
    """What the check prints for each (name, text), and whether all is right at the end."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    status, output = outcome(folder, GRADING, file)
    assert status == 0, output
    return json.loads(file.with_suffix(".results").read_text())


def changed(name: str, code: str, instead: str) -> str:
    return check.replaced(check.original(name), code, instead)


FORWARD = """    for shard in shards:
        weight = all_gather(shard)
        x.append(x[-1] @ weight)
        del weight
"""
PREFETCH = """    def begin(shard):
        weight = torch.empty(8 * world_size, 8 * world_size)
        return weight, dist.all_gather_into_tensor(weight, shard, async_op=True)
    following = begin(shards[0])
    for layer in range(4):
        weight, request = following
        request.wait()
        following = begin(shards[layer + 1]) if layer < 3 else None
        x.append(x[-1] @ weight)
        del weight
"""
GATHER = "dist.all_gather(whole, shard)"
REDUCE_SCATTER = "dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))"
SCATTER = "dist.reduce_scatter_tensor(shards.grad[layer], weight_grad)"
AVERAGE = "dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)"
DENSE = "torch.zeros(512).index_add(0, all_gather(indices), all_gather(values))"
SPARSE = "torch.sparse_coo_tensor(all_gather(indices)[None], all_gather(values), [512]).to_dense()"
# Other right solutions: a piece of the original, and what takes its place
RIGHT = [
    ("fsdp", REDUCE_SCATTER, SCATTER),
    ("fsdp", FORWARD, PREFETCH),
    ("fsdp", "        del weight\n\n", "        print(weight)\n\n"),
    ("fsdp", GATHER, "dist.all_gather(whole, shard, async_op=True).get_future().wait()"),
    ("ddp", AVERAGE, f"{AVERAGE}.get_future().then(lambda future: future.value())"),
    ("gradient_compression", DENSE, SPARSE),
]
ADAMW = "    torch.optim.AdamW([shards]).step()"
REPLICA = """    whole = torch.zeros(4, 8 * world_size, 8 * world_size)
    mine = slice(8 * rank, 8 * rank + 8)
    whole[:, mine] = shards
    whole.grad = torch.zeros_like(whole)
    whole.grad[:, mine] = shards.grad
    torch.optim.AdamW([whole]).step()
    shards.copy_(whole[:, mine])"""
KEEP = "vars(train).setdefault('kept', []).append(weight); x.append(x[-1] @ weight)"
WAIT = "average(gradient).wait()"
SIZES = f"tensor = tensor.flatten()[: 8 * (rank + 1)]; return {AVERAGE}"
# The exercise of chapter 18, from the first exchange to the end
MUON = check.original("muon")
MUON = MUON[MUON.index("    received = exchange(momentum)") : MUON.index("\n\n\n# Check: ")]
OWN_ROWS = """    new = [orthogonalize(rows) for rows in momentum.flatten(0, 1)]
    return {"momentum": momentum, "update": torch.stack(new).view_as(momentum)}"""
GATHERED = """    parts = [torch.empty_like(momentum) for _ in range(world_size)]
    dist.all_gather(parts, momentum)
    received = torch.stack([part[rank] for part in parts])"""
GATHERED = MUON.replace("    received = exchange(momentum)", GATHERED)
PASS_ON = "k, v = pass_on(torch.stack([k, v]))"
# Other mistakes, and a part of what is said of each
WRONG = [
    ("ddp", WAIT, "pass", "something was not sent"),
    ("ddp", "buckets.pop()", "buckets.pop(0)", "gradients  WRONG"),
    ("ddp", "    return dist.all_reduce", "    dist.all_reduce", "'NoneType' object has no"),
    ("ddp", f"return {AVERAGE}", SIZES, "sizes than the other ranks expect. It began all_reduce"),
    ("fsdp", ADAMW, REPLICA, "bytes on line"),
    ("fsdp", "x.append(x[-1] @ weight)", KEEP, "one whole weight and the next one"),
    ("fsdp", "weight_grad.chunk(world_size)", "weight_grad.chunk(2)", "a rank number is written"),
    ("fsdp", "AdamW([shards])", "Adam([shards])", "gradients  WRONG"),
    ("fsdp", "chunk(world_size))", "chunk(world_size))[::-1]", "the numbers of rank 1"),
    ("pipeline", "recv(tensor,", "recv(tensr,", "tensr, 1 - rank)`\n    NameError: name 'tensr'"),
    ("pipeline", "sent.append(x.pop(n).nbytes)", "sent.append(x[n].nbytes)", "forget inputs"),
    ("ring_attention", PASS_ON, f"{PASS_ON}; dist.all_reduce(output)", "less is enough"),
    ("muon", MUON, OWN_ROWS, "something was not sent"),
    ("muon", MUON, GATHERED, "less is enough"),
]


@pytest.mark.rest
@pytest.mark.parametrize("name", TECHNIQUES)
def test_right_and_wrong(tmp_path, name):
    """The original passes each check, and so do other right solutions. Each known mistake fails
    with its own sentence. The bytes that a script prints are those that are counted."""
    mistakes = [(name, *codes, text) for text, *codes in TECHNIQUES[name].known_mistakes()]
    assert 3 * len(mistakes) == len(TECHNIQUES[name].mistakes.strip().splitlines())
    right = [(name, changed(*row)) for row in RIGHT if row[0] == name]
    wrong = [row for row in mistakes + WRONG if row[0] == name]
    cases = [(name, check.original(name)), *right, *((name, changed(*row[:3])) for row in wrong)]
    results = graded(tmp_path, *cases)
    assert [f"{n} processes" in results[0] for n in TECHNIQUES[name].processes]
    for lines in results[: 1 + len(right)]:
        assert lines[-1] is True, "\n".join(map(str, lines))
    for row, lines in zip(wrong, results[1 + len(right) :], strict=True):
        assert lines[-1] is False, row
        assert row[3] in "\n".join(lines[:-1]), (row, lines)


def test_a_run_that_hangs(tmp_path):
    """It ends in time, and the check says where each rank waits."""
    text = changed("tensor_parallel", "    dist.all_gather(", "    if rank: dist.all_gather(")
    (tmp_path / "tensor_parallel-1.py").write_text(text)
    flags = ["tensor_parallel-1", "--folder", tmp_path, "--seconds", 3]
    status, output = outcome(tmp_path, CHECK, *flags)
    assert status == 1
    assert "not ready after 3 s" in output
    for rank, code in ((1, "    if rank: dist.all_gather("), (0, "    dist.reduce_scatter(")):
        name = code.split("dist.")[1].strip("(")
        line = f"line {text[: text.index(code)].count(chr(10)) + 1}: `{code.strip()}"
        assert f"rank {rank} began {name} on {line}" in output, output


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
    assert len(places) == len(TECHNIQUES[name].levels[int(level)]) > 0
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
    (lines,) = graded(tmp_path, ("local_steps", solved))
    (output,) = re.findall("```text\n(.*?)```", text, re.DOTALL)
    assert set(output.splitlines()) <= set(lines[:-1]), lines
    names = set(re.findall(r"learn/exercises/check\.py ([\w-]+)", text))
    for script in CHAPTERS_BY_NUMBER.values():
        readme = script.with_name("README.md").read_text()
        names |= set(re.findall(r"`(\w+-[123])`\S*\]\(\S*learn/exercises/", readme))
        names |= set(re.findall(r"learn/exercises/check\.py ([\w-]+)", readme))
    assert names <= set(check.NAMES)
