"""exercises/check.py: what is right passes, and what is wrong gets a sentence."""

import json
import re
import sys

import pytest
from runner import REPOSITORY, Run, load, outcome
from test_readme import page

CHECK = REPOSITORY / "exercises" / "check.py"
GRADING = REPOSITORY / "tests" / "grading.py"
check = load(CHECK)
TECHNIQUES = check.TECHNIQUES


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


@pytest.mark.rest
@pytest.mark.parametrize("name", TECHNIQUES)
def test_originals_and_mistakes(tmp_path, name):
    """The original passes each check, and each known mistake fails, with its own sentence. The
    bytes that a script prints are those that are counted."""
    mistakes = TECHNIQUES[name].mistakes
    cases = [(name, None), (name, check.original(name))]
    cases += [(name, check.replaced(check.original(name), mistake)) for mistake in mistakes]
    bytes_sent, original, *others = graded(tmp_path, *cases)
    assert bytes_sent
    assert all(said == sent > 0 for said, sent in bytes_sent)
    assert original[-1] is True, original
    assert [f"{n} processes" in original for n in TECHNIQUES[name].processes]
    for mistake, lines in zip(mistakes, others, strict=True):
        assert lines[-1] is False, mistake
        assert mistake.sentence in "\n".join(lines[:-1]), lines


REPLICA = """
    whole = [all_gather(shard) for shard in shards]
    x = [samples]
    for weight in whole:
        x.append(x[-1] @ weight)
    grad = 2 * x[-1] / (world_size * x[-1].numel())
    shards.grad = torch.zeros_like(shards)
    for layer in reversed(range(4)):
        all_gather(shards[layer])
        weight_grad = x[layer].T @ grad
        grad = grad @ whole[layer].T
        dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))
    torch.optim.AdamW([shards]).step()
    return {"gradients": shards.grad, "weights": shards}

"""
AFTERWARDS = """
    gradients = torch.stack(torch.autograd.grad(loss_of(samples, weights), weights))
    for bucket in gradients.chunk(2):
        dist.all_reduce(bucket, dist.ReduceOp.AVG)
    return {"gradients": gradients}

"""
# Computes what the process that computes alone computes: with its numbers, and all samples
COPIED = """
    torch.manual_seed(1)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(4)]
    samples = torch.randn(world_size, 8, 16)
    return {"gradients": torch.stack(torch.autograd.grad(loss_of(samples, weights), weights))}

"""
CONSTANT = """
    return {"gradients": torch.ones(4, 16, 16)}

"""


def test_faked_solutions(tmp_path):
    """Right gradients are not enough."""
    replica, afterwards, copied, constant, reference = graded(
        tmp_path,
        solution("fsdp", "train", REPLICA),
        solution("ddp", "bucket_by_bucket", AFTERWARDS),
        solution("ddp", "gradient_by_gradient", COPIED),
        solution("ddp", "gradient_by_gradient", CONSTANT),
        solution("ddp", "gradient_by_gradient", "    return one_process()\n\n"),
    )
    text = "\n".join(replica[:-1])
    assert re.search("gradients +ok", text)
    assert re.search("bytes +ok", text)
    assert re.search("memory +WRONG +every rank has the whole weight", text)
    assert "nothing was freed" in text
    text = "\n".join(afterwards[:-1])
    assert "WRONG  rank 0: no all-reduce begins during the backward pass" in text
    assert "gradients  WRONG" not in text
    assert "bytes      WRONG" not in text
    text = "\n".join(copied[:-1])
    assert "gradients  WRONG" not in text
    assert "bytes      WRONG  rank 0 sent 0, the formula has 8192" in text
    assert any("gradients  WRONG" in line for line in constant[:-1])
    assert any("NameError" in line for line in reference[:-1])
    for lines in (replica, afterwards, copied, constant, reference):
        assert lines[-1] is False


REDUCE_SCATTER = "dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))"
ROWS_OF_RANK_0 = "dist.all_reduce(weight_grad)\n        shards.grad[layer] = weight_grad[:8]"


# The same mistakes, made in other words
@pytest.mark.rest
def test_mistakes_of_others(tmp_path):
    into = "    gathered = torch.empty(world_size * 8, 8 * world_size)\n"
    into += "    dist.all_gather_into_tensor(gathered, shard)\n    return gathered\n\n"
    divided = solution("ddp", "average", "    dist.all_reduce(tensor, async_op=True).wait()\n\n")
    divided = divided[0], divided[1].replace("average(gradient).wait()", "average(gradient)")
    divided = divided[0], divided[1].replace("request.wait()", "pass")
    lines = graded(
        tmp_path,
        solution("fsdp", "all_gather", into),
        divided,
        changed("fsdp", ("(world_size * x[-1].numel())", "(2 * x[-1].numel())")),
        changed("fsdp", ("weight_grad.chunk(world_size)", "weight_grad.chunk(2)")),
        changed("pipeline", ("dist.recv(tensor, 1 - rank)", "dist.recv(tensr, 1 - rank)")),
        changed("ddp", ('{"gradients": gradients}\n\n\ndef bucket', "gradients\n\n\ndef bucket")),
        changed("tensor_parallel", ('"A": grad_A, ', "")),
        changed(
            "tensor_parallel", ("torch.empty(4, 16)  #", "torch.empty(4, 16) #\n    print(7) #")
        ),
        changed("ddp", ("average(buckets.pop())", "average(buckets.pop(0))")),
        changed("ddp", ("    return dist.all_reduce(tensor", "    dist.all_reduce(tensor")),
        changed("fsdp", ("dist.all_gather(whole, shard)", "dist.broadcast(shard, 0)")),
        changed("fsdp", (REDUCE_SCATTER, ROWS_OF_RANK_0)),
    )
    texts = ["\n".join(map(str, printed)) for printed in lines]
    assert lines[0][-1] is True, texts[0]
    assert "2 times too large: the sum was not divided by the number of ranks" in texts[1]
    for text in texts[2:4]:
        assert "4 ranks are wrong and 2 are right: a rank number is written down" in text
    assert "`dist.recv(tensr, 1 - rank)`\n    NameError: name 'tensr'" in texts[4]
    assert "has to return a dictionary" in texts[5]
    assert '"A": the function does not return this tensor' in texts[6]
    assert lines[7][-1] is True
    assert "an all-reduce begins before both gradients of its bucket are complete" in texts[8]
    assert "a rank number" not in texts[8]
    assert "a function has returned nothing: return what" in texts[9]
    assert "in broadcast, one rank is special: all must do the same" in texts[10]
    assert 'rank 1, "gradients": these are the numbers of rank 0' in texts[11]
    assert "all_gather, all_reduce" in texts[11]
    assert all(not printed[-1] for printed in lines[1:7] + lines[8:])


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
    assert "rank 0 waits in reduce_scatter on line" in output or "rank 0 waits" in output


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
    command(monkeypatch, capsys, "ddp-1", "--reset", *folder, answers=[""])
    assert file.read_text() == mine
    status, difference = command(monkeypatch, capsys, "ddp-1", "--answer", *folder)
    assert status == 0
    assert "+    return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)" in difference
    assert file.read_text() == mine
    command(monkeypatch, capsys, "ddp-1", "--reset", *folder, answers=["y"])
    assert file.read_text() == blanks


def test_what_cannot_run(tmp_path, monkeypatch, capsys):
    """A syntax error, and a file without its regions."""
    file = tmp_path / "ddp-1.py"
    file.write_text(check.original("ddp") + "\nx = (\n")
    status, output = command(monkeypatch, capsys, "ddp-1", "--folder", tmp_path)
    assert status == 1
    assert re.search(r"ddp-1.py, line \d+: '\(' was never closed", output)
    file.write_text("x = 1\n")
    with pytest.raises(SystemExit, match='"# Check: " is missing'):
        command(monkeypatch, capsys, "ddp-1", "--folder", tmp_path)


@pytest.mark.rest
@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_question(tmp_path, name):
    """It is asked on a terminal only, and its answer is that of the run."""
    terminal = "import sys, builtins\n"
    terminal += "methods = {'isatty': lambda self: True, 'close': lambda self: None}\n"
    terminal += "sys.stdin = type('Terminal', (), methods)()\n"
    file = tmp_path / f"{name}-1.py"
    file.write_text(check.original(name))
    answers = {"ddp": 8192, "fsdp": 12288, "tensor_parallel": 2048, "pipeline": 2}
    answers |= {"gradient_compression": 2560, "context_parallel": 4096, "local_steps": 6144}
    answers |= {"ring_attention": 4608, "expert_parallel": 5}
    for answer in (answers[name], 7):
        typed = terminal + f"builtins.input = lambda text: '{answer}'\n"
        run = Run(CHECK, [f"{name}-1", "--folder", tmp_path], tmp_path / "out.txt", before=typed)
        assert run.wait() == 0, run.output
    first, second = re.findall("Your answer is .*", run.output)
    assert first == f"Your answer is {answers[name]}, and your run has {answers[name]}: right."
    assert second == f"Your answer is 7, and your run has {answers[name]}: not the same."
    assert run.output.count(TECHNIQUES[name].question) == 2
    status, output = start(tmp_path, f"{name}-1")
    assert status == 0
    assert "Before the check" not in output


def test_the_page(tmp_path):
    """Each exercise is in its table, and the worked example is true."""
    text = page("exercises/README.md")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) ?\| \[", text, re.MULTILINE)
    found = {f"{name}-{i}" for name, *levels in rows for i, x in enumerate(levels, 1) if x}
    assert found == set(check.NAMES)
    blank, attempt = re.findall("```python\n(.*?)```", text, re.DOTALL)
    assert blank in check.with_blanks("ddp-1")
    solved = check.with_blanks("ddp-1").replace(blank, attempt)
    (lines,) = graded(tmp_path, ("ddp", solved))
    (output,) = re.findall("```text\n(.*?)```", text, re.DOTALL)
    assert set(output.splitlines()) <= set(lines[:-1])
    names = set(re.findall(r"exercises/check\.py ([\w-]+)", text))
    for folder in REPOSITORY.glob("[0-9][0-9]-*"):
        names |= set(re.findall(r"exercises/check\.py ([\w-]+)", page(f"{folder.name}/README.md")))
    assert names <= set(check.NAMES)
    chapters = {name.rsplit("-", 1)[0] for name in names}
    assert chapters >= {"ddp", "fsdp", "tensor_parallel", "pipeline"}
