"""exercises/check.py: what is right passes, and what is wrong gets a sentence."""

import json
import re
import sys

import pytest
from runner import REPOSITORY, load, outcome
from test_readme import page

CHECK = REPOSITORY / "exercises" / "check.py"
GRADING = REPOSITORY / "tests" / "grading.py"
check = load(CHECK)
TECHNIQUES = check.TECHNIQUES
passes = sys.modules["techniques"].passes


def graded(folder, *cases) -> list[list]:
    """What the check prints for each (name, text), and whether all is right at the end."""
    file = folder / "cases.json"
    file.write_text(json.dumps([(name, 20, text) for name, text in cases]))
    status, output = outcome(folder, GRADING, file)
    assert status == 0, output
    return json.loads(file.with_suffix(".results").read_text())


def changed(name: str, *changes: tuple[str, str]) -> tuple[str, str]:
    text = check.original(name)
    for code, instead in changes:
        assert text.count(code) == 1, code
        text = text.replace(code, instead)
    return name, text


def solution(name: str, function: str, lines: str) -> tuple[str, str]:
    """The original with another body of a function."""
    text = check.original(name)
    pattern = rf"(?<=^def {function}\()(.*?\):\n).*?(?=^(?:def |# Check))"
    text, count = re.subn(pattern, lambda found: found[1] + lines, text, flags=re.M | re.S)
    assert count == 1
    return name, text


def answer_of(name: str, sent: int, events: list[str]) -> int:
    """Of the question: bytes, exchanges, or the most micro-batches in memory."""
    if name == "expert_parallel":
        return events.count("all_to_all")
    if name == "pipeline":
        order = passes(events)
        parts = [order[:i] for i in range(len(order))]
        return max(part.count("F") - part.count("B") for part in parts)
    return sent


@pytest.mark.rest
@pytest.mark.parametrize("name", TECHNIQUES)
def test_originals_and_mistakes(tmp_path, name):
    """The original passes each check, and each known mistake fails, with its own sentence. The
    bytes that a script prints are those that are counted. The question has the right answer."""
    mistakes = TECHNIQUES[name].mistakes
    cases = [(name, None), (name, check.original(name))]
    cases += [(name, check.replaced(check.original(name), mistake)) for mistake in mistakes]
    counted, original, *others = graded(tmp_path, *cases)
    assert counted
    assert all(said == sent > 0 for _, _, said, sent, _ in counted)
    asked = {"tensor_parallel": "own_tokens", "pipeline": "one_f_one_b"}.get(name, counted[0][0])
    sent, events = next(x[3:] for x in counted if x[:2] == [asked, 0])
    assert TECHNIQUES[name].answer == answer_of(name, sent, events)
    assert original[-1] is True, original
    assert [f"{n} processes" in original for n in TECHNIQUES[name].processes]
    for mistake, lines in zip(mistakes, others, strict=True):
        assert lines[-1] is False, mistake
        assert mistake.sentence in "\n".join(lines[:-1]), lines


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
ZEROS = "    shards.grad = torch.zeros_like(shards)\n"


@pytest.mark.rest
def test_other_right_solutions(tmp_path):
    """Other collectives, the next weight early, a weight freed late, gradients made early."""
    scatter = "dist.reduce_scatter_tensor(shards.grad[layer], weight_grad)"
    early = (ZEROS, ""), ("    x = [samples]\n", f"    x = [samples]\n{ZEROS}")
    late = "        del weight\n\n", "\n"
    name, fsdp = changed("fsdp", (ZEROS, ""))
    fsdp = fsdp.replace("shards.grad[", "gradients[")
    fsdp = fsdp.replace("    x = [", "    gradients = torch.zeros_like(shards)\n    x = [")
    fsdp = fsdp.replace("    torch.optim", "    shards.grad = gradients\n    torch.optim")
    cases = [
        (name, fsdp),
        changed("fsdp", (REDUCE_SCATTER, scatter)),
        changed("fsdp", (FORWARD, PREFETCH)),
        changed("fsdp", late),
        changed("fsdp", *early, late),
        changed("pipeline", ("requests.pop(n).wait()", "requests.pop(n)")),
        changed("fsdp", (BACKWARD, NEXT_FIRST)),
    ]
    for lines in graded(tmp_path, *cases):
        assert lines[-1] is True, "\n".join(map(str, lines))


REDUCE_SCATTER = "dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))"


BACKWARD = """        weight = all_gather(shards[layer])
        weight_grad = x[layer].T @ grad
        grad = grad @ weight.T
        del weight
"""
NEXT_FIRST = """        weight = following if layer < 3 else all_gather(shards[layer])
        following = all_gather(shards[layer - 1]) if layer else None
        weight_grad = x[layer].T @ grad
        grad = grad @ weight.T
        del weight
"""
ADAMW = "    torch.optim.AdamW([shards]).step()"
REPLICA = """    whole = torch.zeros(4, 8 * world_size, 8 * world_size)
    mine = slice(8 * rank, 8 * rank + 8)
    whole[:, mine] = shards
    whole.grad = torch.zeros_like(whole)
    whole.grad[:, mine] = shards.grad
    torch.optim.AdamW([whole]).step()
    shards.copy_(whole[:, mine])"""
KEPT = "    kept = torch.empty(2, 8 * world_size, 8 * world_size)\n    x = [samples]\n"
BACKEND = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce([gradient]).wait()"
# What each of these hides, and a part of what is said of it
CHEATS = [
    (changed("fsdp", (ADAMW, REPLICA)), "bytes at one moment, the limit is"),
    (
        changed(
            "fsdp",
            ("    x = [samples]\n", KEPT),
            (
                "        x.append(x[-1] @",
                "        kept[len(x) % 2] = weight\n        x.append(x[-1] @",
            ),
        ),
        "when collective 4 begins",
    ),
    (changed("ddp", ("average(gradient).wait()", BACKEND)), "use the collectives of torch.dist"),
    (
        changed(
            "local_steps", ('    return {"weights"', '    shared.numpy()\n    return {"weights"')
        ),
        "of NumPy",
    ),
    (
        changed("ddp", ("weights).backward()", "weights).backward(retain_graph=True)")),
        "one backward",
    ),
    (
        changed("fsdp", (BACKWARD, BACKWARD.replace("grad @ weight.T", "grad @ weight"))),
        "largest difference",
    ),
]


# The same mistakes, made in other words
@pytest.mark.rest
def test_cheats_are_refused(tmp_path):
    """The results and the bytes are right, except of the last one."""
    printed = graded(tmp_path, *(cheat for cheat, _ in CHEATS))
    for lines, (_, part) in zip(printed, CHEATS, strict=True):
        assert lines[-1] is False
        assert part in "\n".join(map(str, lines)), (part, lines)


@pytest.mark.rest
def test_mistakes_of_others(tmp_path):
    lines = graded(
        tmp_path,
        changed("fsdp", ("weight_grad.chunk(world_size)", "weight_grad.chunk(2)")),
        changed("pipeline", ("dist.recv(tensor, 1 - rank)", "dist.recv(tensr, 1 - rank)")),
        changed("ddp", ("average(buckets.pop())", "average(buckets.pop(0))")),
        changed("ddp", ("    return dist.all_reduce(tensor", "    dist.all_reduce(tensor")),
        changed("fsdp", ("    x = [samples]", "    junk = torch.ones(1000)\n    x = [samples]")),
    )
    assert not any(printed[-1] for printed in lines)
    texts = ["\n".join(map(str, printed)) for printed in lines]
    assert "4 ranks are wrong and 2 are right: a rank number is written down" in texts[0]
    assert "`dist.recv(tensr, 1 - rank)`\n    NameError: name 'tensr'" in texts[1]
    assert "an all-reduce begins before both gradients of its bucket are complete" in texts[2]
    assert "a function has returned nothing: return what" in texts[3]
    assert re.search(r"memory +WRONG  rank 0 has 8000 \+ .* when collective 1 begins", texts[4])


DIVIDED_EARLY = """
    request = dist.all_reduce(tensor, async_op=True)
    tensor /= world_size
    return request

"""
SIZES = """
    part = tensor.flatten()[: 8 * (rank + 1)]
    return dist.all_reduce(part, dist.ReduceOp.AVG, async_op=True)

"""


def test_requests(tmp_path):
    """The check names a request that was not waited for. Its numbers differ from run to run."""
    gather = "dist.all_gather(whole, shard)"
    gathered, divided, forgotten, sizes = graded(
        tmp_path,
        changed("fsdp", (gather, gather.replace(")", ", async_op=True)"))),
        solution("ddp", "average", DIVIDED_EARLY),
        changed("ddp", ("    for request in requests:\n        request.wait()\n", "")),
        solution("ddp", "average", SIZES),
    )
    pattern = r"line \d+ uses a tensor while the {} of line \d+ still writes into it: wait for"
    assert re.search(pattern.format("all_gather"), "\n".join(gathered[:-1]))
    assert "memory     -      not told: requests hold memory" in "\n".join(gathered[:-1])
    assert re.search(pattern.format("all_reduce"), "\n".join(divided[:-1]))
    pattern = r"still arrived .*: the request of the all_reduce of line \d+ was not waited for"
    assert re.search(pattern, "\n".join(forgotten[:-1])), forgotten
    text = "\n".join(sizes[:-1])  # the library ends one of the two processes
    assert re.search(r"rank \d has ended .* all_reduce of line \d+: `return dist.all_red", text), (
        text
    )
    assert "the tensors of all ranks must have the size that the other ranks expect" in text
    assert "gloo" not in text
    for lines in (gathered, divided, forgotten, sizes):
        assert lines[-1] is False
        assert "It looks like" not in "\n".join(lines[:-1])


def start(folder, exercise, *flags, text=None):
    """Runs the command: status and output. `text` is the file of the learner."""
    if text:
        (folder / f"{exercise}.py").write_text(text)
    return outcome(folder, CHECK, exercise, "--folder", folder, *flags)


def test_a_run_that_hangs(tmp_path):
    """It ends in time, and the check says where each rank waits."""
    _, text = changed("tensor_parallel", ("    dist.all_gather(", "    if rank: dist.all_gather("))
    status, output = start(tmp_path, "tensor_parallel-1", "--seconds", 3, text=text)
    assert status == 1
    assert "not ready after 3 s" in output
    number = text[: text.index("    if rank: dist.all_gather(")].count("\n") + 1
    line = f"rank 1 waits in all_gather on line {number}: `if rank: dist.all_gather(parts, part)`"
    assert line in output, output
    number = text[: text.index("    dist.reduce_scatter(")].count("\n") + 1
    assert f"rank 0 waits in reduce_scatter on line {number}: `dist.reduce_scatter(" in output


def command(monkeypatch, capsys, *arguments, answers=None) -> tuple[int, str]:
    """Calls the program. `answers` are what a person types; without them, there is no terminal."""
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answers is not None, raising=False)
    typed = iter(answers or [])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    status = check.main()
    return status, capsys.readouterr().out


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
    assert written.startswith(f"written: {file}. ")
    assert told == [f"not yet: {file}, line {place}" for place in places]
    assert status == 1
    assert all(len(line) <= 100 for line in lines)
    added = set(lines) - set(check.complete(exercise).splitlines())
    assert all(line.lstrip().startswith(("# ", "raise NotImpl")) for line in added)


def test_a_file_is_kept(tmp_path, monkeypatch, capsys):
    folder = ["--folder", tmp_path]
    file = tmp_path / "ddp-1.py"
    _, first = command(monkeypatch, capsys, "ddp-1", *folder)
    blanks = file.read_text()
    file.write_text(mine := blanks.replace("# Given", "# Mine: Given"))
    assert first.startswith("written: ")
    again = first[first.index("not yet") :]
    assert command(monkeypatch, capsys, "ddp-1", *folder) == (1, again)
    assert file.read_text() == mine
    with pytest.raises(SystemExit, match="not a terminal"):
        command(monkeypatch, capsys, "ddp-1", "--reset", *folder)
    declined = command(monkeypatch, capsys, "ddp-1", "--reset", *folder, answers=[""])
    assert declined == (0, f"kept: {file}\n")
    assert file.read_text() == mine
    status, difference = command(monkeypatch, capsys, "ddp-1", "--answer", *folder)
    assert status == 0
    assert "+    return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)" in difference
    assert file.read_text() == mine
    command(monkeypatch, capsys, "ddp-1", "--reset", *folder, answers=["y"])
    assert file.read_text() == blanks


def test_what_cannot_run(tmp_path, monkeypatch, capsys):
    file = tmp_path / "ddp-1.py"
    file.write_text(check.original("ddp") + "\nx = (\n")
    status, output = command(monkeypatch, capsys, "ddp-1", "--folder", tmp_path)
    assert status == 1
    assert re.search(r"ddp-1.py, line \d+: '\(' was never closed", output)


def test_the_question(tmp_path, monkeypatch, capsys):
    """It is asked on a terminal only, and a wrong solution does not change its answer. Here the
    file cannot run, so no process starts after the question."""
    name = "fsdp"
    file = tmp_path / f"{name}-1.py"
    file.write_text(check.original(name))
    monkeypatch.setattr(check, "run_exercise", lambda *_, **__: check.Outcome(problem="wrong"))
    right = TECHNIQUES[name].answer
    said = {
        f"{right}": f"Your answer is {right}: right.",
        f"{right:,} bytes": f"Your answer is {right:,} bytes: right.",
        "7": f"Your answer is 7, and the formula has {right}.",
        "many": f"Your answer is many, and the formula has {right}.",
    }
    for answer, line in said.items():
        arguments = f"{name}-1", "--folder", tmp_path
        _, output = command(monkeypatch, capsys, *arguments, answers=[answer])
        assert output.splitlines()[:2] == [f"Before the check: {TECHNIQUES[name].question}", line]
    _, output = command(monkeypatch, capsys, f"{name}-1", "--folder", tmp_path, answers=[""])
    assert "Your answer" not in output
    _, output = command(monkeypatch, capsys, f"{name}-1", "--folder", tmp_path)
    assert "Before the check" not in output


def test_the_page(tmp_path):
    """Each exercise is in its table, and the worked example is true."""
    text = page("exercises/README.md")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) ?\| \[", text, re.MULTILINE)
    found = {f"{name}-{i}" for name, *levels in rows for i, x in enumerate(levels, 1) if x}
    assert found == set(check.NAMES)
    blank, attempt = re.findall("```python\n(.*?)```", text, re.DOTALL)
    assert blank in check.with_blanks("local_steps-1")
    solved = check.with_blanks("local_steps-1").replace(blank, attempt)
    (lines,) = graded(tmp_path, ("local_steps", solved))
    (output,) = re.findall("```text\n(.*?)```", text, re.DOTALL)
    assert set(output.splitlines()) <= set(lines[:-1]), lines
    names = set(re.findall(r"exercises/check\.py ([\w-]+)", text))
    for folder in REPOSITORY.glob("[0-9][0-9]-*"):
        names |= set(re.findall(r"exercises/check\.py ([\w-]+)", page(f"{folder.name}/README.md")))
    assert names <= set(check.NAMES)
