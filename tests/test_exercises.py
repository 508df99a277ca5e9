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
passes = sys.modules["techniques"].passes


def graded(folder, *cases) -> list[list]:
    """What the check prints for each (name, text), and whether all is right at the end."""
    file = folder / "cases.json"
    file.write_text(json.dumps([(name, 20, text) for name, text in cases]))
    status, output = outcome(folder, GRADING, file)
    assert status == 0, output
    return json.loads(file.with_suffix(".results").read_text())


def changed(name: str, code: str, instead: str) -> str:
    return check.replaced(check.original(name), code, instead)


def answer_of(name: str, sent: int, events: list[str]) -> int:
    """Of the question: bytes, exchanges, or the most micro-batches in memory."""
    if name == "expert_parallel":
        return events.count("all_to_all")
    if name == "pipeline":
        order = passes(events)
        parts = [order[:i] for i in range(len(order))]
        return max(part.count("F") - part.count("B") for part in parts)
    return sent


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
BACKWARD = """        weight = all_gather(shards[layer])
        weight_grad = x[layer].T @ grad
"""
NEXT_FIRST = """        weight = following if layer < 3 else all_gather(shards[layer])
        following = all_gather(shards[layer - 1]) if layer else None
        weight_grad = x[layer].T @ grad
"""
GATHER = "dist.all_gather(whole, shard)"
REDUCE_SCATTER = "dist.reduce_scatter(shards.grad[layer], list(weight_grad.chunk(world_size)))"
SCATTER = "dist.reduce_scatter_tensor(shards.grad[layer], weight_grad)"
EARLY = "shards.grad = torch.zeros_like(shards); x = [samples]"
AVERAGE = "dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)"
DENSE = "torch.zeros(512).index_add(0, all_gather(indices), all_gather(values))"
SPARSE = "torch.sparse_coo_tensor(all_gather(indices)[None], all_gather(values), [512]).to_dense()"
# Other right solutions: a piece of the original, and what takes its place
RIGHT = [
    ("fsdp", REDUCE_SCATTER, SCATTER),
    ("fsdp", FORWARD, PREFETCH),
    ("fsdp", BACKWARD, NEXT_FIRST),
    ("fsdp", "        del weight\n\n", "\n"),
    ("fsdp", "        del weight\n\n", "        print(weight)\n\n"),
    ("fsdp", "x = [samples]", EARLY),
    ("fsdp", GATHER, "dist.all_gather(whole, shard, async_op=True).get_future().wait()"),
    ("ddp", AVERAGE, f"{AVERAGE}.get_future().then(lambda future: future.value())"),
    ("pipeline", "requests.pop(n).wait()", "requests.pop(n)"),
    ("gradient_compression", DENSE, SPARSE),
    ("gradient_compression", "all_gather(values))", "torch.tensor(all_gather(values).tolist()))"),
    ("local_steps", "dist.ReduceOp.AVG)", "dist.ReduceOp.AVG, async_op=True).get_future().wait()"),
]
ADAMW = "    torch.optim.AdamW([shards]).step()"
REPLICA = """    whole = torch.zeros(4, 8 * world_size, 8 * world_size)
    mine = slice(8 * rank, 8 * rank + 8)
    whole[:, mine] = shards
    whole.grad = torch.zeros_like(whole)
    whole.grad[:, mine] = shards.grad
    torch.optim.AdamW([whole]).step()
    shards.copy_(whole[:, mine])"""
KEEP = "vars(train).setdefault('kept', torch.empty(4, *weight.shape))[len(x) - 1] = weight; "
LAYER = "x.append(x[-1] @ weight)"
WAIT = "average(gradient).wait()"
BACKEND = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce([gradient]).wait()"
STORE = "dist.FileStore('store', world_size).set(str(rank), str(gradient)); "
SEND = "dist.all_to_all_single(received, parts)"
GROUP = "dist.group.WORLD.alltoall_base(received, parts, [], []).wait()"
PASS_ON = "k, v = pass_on(torch.stack([k, v]))"
ADD = "residual += gradient_of"
TWICE = "look for a pass that runs twice"
MESSAGES = "use collectives of torch.distributed, in this process and thread"
NUMBERS = "keep numbers in tensors"
PRIVATE = "is private: use public functions of PyTorch"
MODES = "with torch.utils._python_dispatch._disable_current_modes(): torch.rand(1000)\n    "
UNSEEN = "with getattr(torch, '_C')._DisableTorchDispatch(): tokens @ A\n    "
# The exercise of chapter 18, from the first exchange to the end
MUON = check.original("muon")
MUON = MUON[MUON.index("    received = exchange(momentum)") : MUON.index("\n\n\n# Check: ")]
OWN_ROWS = """    new = [orthogonalize(rows) for rows in momentum.flatten(0, 1)]
    return {"momentum": momentum, "update": torch.stack(new).view_as(momentum)}"""
EVERYTHING = """    parts = [torch.empty_like(momentum) for _ in range(world_size)]
    dist.all_gather(parts, momentum)
    received = torch.stack([part[rank] for part in parts])
"""
GATHERED = MUON.replace("    received = exchange(momentum)\n", EVERYTHING)
MUON_REPLICA = f"""{EVERYTHING}    update = torch.empty_like(momentum)
    for matrix in range(2 * world_size):
        whole = torch.cat([part.flatten(0, 1)[matrix] for part in parts])
        update.view(-1, 4, 16)[matrix] = orthogonalize(whole)[4 * rank : 4 * rank + 4]
    return {{"momentum": momentum, "update": update}}"""
WHOLE = "whole = received[:, number].flatten(0, 1)"
# What each of these hides, and a part of what is said of it
CHEATS = [
    ("ddp", WAIT, BACKEND, PRIVATE),
    ("ddp", WAIT, STORE + WAIT, MESSAGES),
    ("ddp", "weights).backward()", "weights).backward(retain_graph=True)", "one backward pass"),
    ("ddp", WAIT, "loss_of(samples, weights); " + WAIT, TWICE),
    ("fsdp", ADAMW, REPLICA, "bytes on line"),
    ("fsdp", "x = [samples]", MODES + "x = [samples]", PRIVATE),
    ("fsdp", LAYER, KEEP + LAYER, "one whole weight and the next one"),
    ("fsdp", LAYER, "weight.tolist(); " + LAYER, NUMBERS),
    ("fsdp", LAYER, f"{LAYER}; x[-2] @ weight", "computes a layer more than once"),
    ("tensor_parallel", "y = add", UNSEEN + "y = add", PRIVATE),
    ("tensor_parallel", "y = add", "tokens @ A; y = add", TWICE),
    ("tensor_parallel", "y = add", "torch.save(A, 'A'); y = add", NUMBERS),
    ("pipeline", "sent.append(x.pop(n).nbytes)", "sent.append(x[n].nbytes)", "forget inputs"),
    ("pipeline", "x.pop(n).nbytes", "x.pop(n).detach().numpy().nbytes", NUMBERS),
    ("gradient_compression", "all_gather(parts,", "all_gather_object(parts,", NUMBERS),
    ("gradient_compression", ADD, f"gradient_of(weights, samples); {ADD}", TWICE),
    ("gradient_compression", ": residual,", ": torch.ones(512),", "print what goes into"),
    ("local_steps", "momentum = 0.9", "os.system('true'); momentum = 0.9", MESSAGES),
    ("local_steps", "gradient = shared", "batches[0] @ weights; gradient = shared", TWICE),
    ("context_parallel", SEND, GROUP, MESSAGES),
    ("context_parallel", "y = exchange(", "q @ k.mT, k @ v.mT; y = exchange(", TWICE),
    ("ring_attention", PASS_ON, f"{PASS_ON}; scores @ v, q @ k.T", TWICE),
    ("ring_attention", PASS_ON, f"{PASS_ON}; dist.all_reduce(output)", "gather nothing"),
    ("expert_parallel", "y[order] =", "received @ expert; y[order] =", TWICE),
    ("expert_parallel", "order = c", "open('tokens', 'w'); order = c", NUMBERS),
    ("muon", MUON, OWN_ROWS, "something was not sent"),
    ("muon", MUON, GATHERED, "bytes      WRONG"),
    ("muon", MUON, MUON_REPLICA, "products   WRONG"),
    ("muon", WHOLE, f"{WHOLE}; orthogonalize(whole)", TWICE),
]
# Mistakes of others, and a part of what is said of each
OTHERS = [
    ("fsdp", "weight_grad.chunk(world_size)", "weight_grad.chunk(2)", "a rank number is written"),
    ("fsdp", "x = [s", "junk = torch.rand(1000); x = [s", "has 8000 + "),
    ("fsdp", "AdamW([shards])", "Adam([shards])", "the gradients are right, and the update is"),
    ("fsdp", REDUCE_SCATTER, SCATTER.replace("_grad)", "_grad.flip(0))"), "print what goes into"),
    ("fsdp", "chunk(world_size))", "chunk(world_size))[::-1]", "the numbers of rank 1"),
    ("fsdp", "grad @ weight.T", "grad @ weight", "1 of 4 parts along dimension 0 are right"),
    ("pipeline", "recv(tensor,", "recv(tensr,", "tensr, 1 - rank)`\n    NameError: name 'tensr'"),
    ("ddp", "buckets.pop()", "buckets.pop(0)", "before both gradients of its bucket"),
    (
        "ddp",
        "    return dist.all_reduce",
        "    dist.all_reduce",
        "'NoneType' object has no attribute",
    ),
    ("ddp", WAIT, "pass", "something was not sent"),
    ("ddp", "weights))\n    for", "weights)[::-1])\n    for", "are in the order 3, 2, 1, 0"),
    ("ddp", "weights))\n    for", "weights)).mT.clone()\n    for", "the transpose is right"),
]


def with_changes(name: str, rows) -> list[tuple[str, str]]:
    return [(name, changed(name, *row[1:3])) for row in rows if row[0] == name]


@pytest.mark.rest
@pytest.mark.parametrize("name", TECHNIQUES)
def test_right_and_wrong(tmp_path, name):
    """The original passes each check, and so do other right solutions. Each known mistake and each
    cheat fails, with its own sentence. The bytes that a script prints are those that are counted.
    The question has the right answer."""
    mistakes = [(name, *codes, text) for text, *codes in TECHNIQUES[name].known_mistakes()]
    assert 3 * len(mistakes) == len(TECHNIQUES[name].mistakes.strip().splitlines())
    right = with_changes(name, RIGHT)
    wrong = [row for row in mistakes + CHEATS + OTHERS if row[0] == name]
    cases = [(name, None), (name, check.original(name)), *right, *with_changes(name, wrong)]
    counted, original, *others = graded(tmp_path, *cases)
    assert counted
    assert all(said == sent > 0 for _, _, said, sent, _ in counted)
    asked = {"tensor_parallel": "own_tokens", "pipeline": "one_f_one_b"}.get(name, counted[0][0])
    sent, events = next(x[3:] for x in counted if x[:2] == [asked, 0])
    assert TECHNIQUES[name].answer == answer_of(name, sent, events)
    assert original[-1] is True, original
    assert [f"{n} processes" in original for n in TECHNIQUES[name].processes]
    for lines in others[: len(right)]:
        assert lines[-1] is True, "\n".join(map(str, lines))
    for row, lines in zip(wrong, others[len(right) :], strict=True):
        assert lines[-1] is False, row
        assert row[3] in "\n".join(lines[:-1]), (row, lines)


DIVIDED_EARLY = f"request = {AVERAGE.replace('AVG', 'SUM')}; tensor /= world_size; return request"
SIZES = f"tensor = tensor.flatten()[: 8 * (rank + 1)]; return {AVERAGE}"


def test_requests(tmp_path):
    """The check names a request that was not waited for. Its numbers differ from run to run."""
    printed = graded(
        tmp_path,
        ("fsdp", changed("fsdp", GATHER, GATHER.replace(")", ", async_op=True)"))),
        ("ddp", changed("ddp", f"return {AVERAGE}", DIVIDED_EARLY)),
        ("ddp", changed("ddp", "        request.wait()\n", "        pass\n")),
        ("ddp", changed("ddp", f"return {AVERAGE}", SIZES)),
    )
    assert not any(lines[-1] for lines in printed)
    gathered, divided, forgotten, sizes = ("\n".join(lines[:-1]) for lines in printed)
    pattern = r"line \d+ uses a tensor while the {} of line \d+ still writes into it: wait for"
    assert re.search(pattern.format("all_gather"), gathered)
    assert "memory     -      not told: requests hold memory" in gathered
    assert re.search(pattern.format("all_reduce"), divided)
    pattern = r"still arrived .*: the request of the all_reduce of line \d+ was not waited for"
    assert re.search(pattern, forgotten), forgotten
    # The library ends one of the two processes
    assert re.search(r"rank \d has ended .* all_reduce of line \d+", sizes), sizes
    assert "the tensors of all ranks must have the size that the other ranks expect" in sizes
    assert "gloo" not in sizes
    assert "It looks like" not in gathered + divided + forgotten + sizes


def start(folder, exercise, *flags, text=None):
    """Runs the command: status and output. `text` is the file of the learner."""
    if text:
        (folder / f"{exercise}.py").write_text(text)
    return outcome(folder, CHECK, exercise, "--folder", folder, *flags)


def test_a_run_that_hangs(tmp_path):
    """It ends in time, and the check says where each rank waits."""
    text = changed("tensor_parallel", "    dist.all_gather(", "    if rank: dist.all_gather(")
    status, output = start(tmp_path, "tensor_parallel-1", "--seconds", 3, text=text)
    assert status == 1
    assert "not ready after 3 s" in output
    number = text[: text.index("    if rank: dist.all_gather(")].count("\n") + 1
    line = f"on line {number}: `if rank: dist.all_gather(parts, part)`"
    assert f"rank 1 waits for the all_gather of line {number}, {line}" in output, output
    number = text[: text.index("    dist.reduce_scatter(")].count("\n") + 1
    assert f"rank 0 waits for the reduce_scatter of line {number}, on line {number}: `" in output


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
    assert first.startswith("written: ")
    again = first[first.index("not yet") :]
    assert command(monkeypatch, capsys, "ddp-1", *folder) == (1, again)
    assert file.read_text() == mine
    status, difference = command(monkeypatch, capsys, "ddp-1", "--answer", *folder)
    assert status == 0
    assert "+    return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)" in difference
    assert file.read_text() == mine


def test_what_cannot_run(tmp_path):
    status, output = start(tmp_path, "ddp-1", text=changed("ddp", "# Given", "x = (\n# Given"))
    assert status == 1
    assert re.search(r"SyntaxError: '\(' was never closed \(ddp-1.py, line \d+\)", output), output


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
        names |= set(re.findall(r"learn/exercises/check\.py ([\w-]+)", readme))
    assert names <= set(check.NAMES)
