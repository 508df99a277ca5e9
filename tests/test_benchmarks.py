"""The benchmarks run, and the peers do the work of the chapters: they reach the same losses."""

import json
import re
import subprocess

import pytest
from helpers.runner import REPOSITORY, load, outcome

BENCHMARKS = REPOSITORY / "benchmarks"
tool = load(BENCHMARKS / "run.py")


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark; what it starts with `subprocess.run` are forks of it."""

    def call(script, *arguments, status=0, jobs=True) -> str:
        before = f"from helpers.scripts import forking\nforking.patch(jobs={jobs})\n"
        options = {"before": before, "timeout": 500}
        found, output = outcome(tmp_path, BENCHMARKS / script, *arguments, **options)
        assert found == status, output
        return output

    return call


@pytest.mark.rest
def test_peers(run, tmp_path):
    """The benchmark itself ends with an error where the losses differ by more than 0.1 %."""
    rows = ["chapter 1", "Trainer", "Accelerate", "Lightning"]
    methods = ["--methods", "chapters", "trainer", "accelerate", "lightning", "--devices", 1]
    steps = ["--rounds", 1, "--warmup", 5, "--steps", 5, "-b", 2, "-s", 64]
    flags = f"-d {REPOSITORY}/README.md --num-epochs 99 --gradient-accumulation-steps 2"
    file = tmp_path / "new" / "table.md"
    output = run("run.py", *methods, "--only", *rows, *steps, "--flags", flags, "-o", file)
    found = re.findall(r"^\| 1 \| (.*?) \| [\d,.]+ \|", output, re.MULTILINE)
    assert found == rows, output
    assert file.read_text().strip() in output


@pytest.mark.rest
def test_the_peer_of_tensor_parallelism(run, tmp_path):
    """It does not clip. As a fork, Transformers waits without end when it loads the model."""
    flags = ["--only", "chapter 1", "Transformers TP", "--devices", 1, 2, "--rounds", 1]
    flags += ["--warmup", 5, "--steps", 5, "-b", 2, "-s", 64, "-o", tmp_path / "table.md"]
    flags += ["--flags", f"-d {REPOSITORY}/README.md --num-epochs 99 --max-grad-norm 0"]
    output = run("run.py", "--methods", "chapters", "transformers-tp", *flags, jobs=False)
    assert re.search(r"^\| 2 \| Transformers TP \| [\d,.]+ \|", output, re.MULTILINE)


def contender(method, devices, speeds, losses, script=tool.CHAPTERS[0]):
    results = [{"tokens_per_second": s, "losses": losses, "peak_gb": 1.0} for s in speeds]
    return tool.Contender(method, devices, script, results=results)


def test_whoever_does_less_is_found_out():
    first = contender("chapter 1", 1, [1.0], [2.0, 1.0])
    tool.check_losses([first, contender("Trainer", 1, [1.0], [2.001, 1.0])], 1e-3)
    for losses in ([2.0, 1.01], [2.0, float("nan")]):
        with pytest.raises(SystemExit, match="the losses differ, Trainer has"):
            tool.check_losses([first, contender("Trainer", 1, [1.0], losses)], 1e-3)


def test_arithmetic_of_the_table():
    """Medians within rounds: a machine that is slow in one round is so for all."""
    found = [
        contender("chapter 1", 1, [1000, 500, 800], [1.0]),
        contender("Trainer", 1, [800, 500, 600], [1.0]),
        contender("Trainer DDP", 2, [1200, 800, 600], [1.0]),
    ]
    numbers = {"flops_per_token": 10.0, "rates": [20_000, 10_000, 20_000]}
    lines = tool.table(found, **numbers, peak=40_000).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[3:-1]] for line in lines[2:]]
    machines = 2 if tool.ON_GPU else 1
    expected = ["600", "500 to 800", "0.15", "0.40", "1.00", "", "0.800", "0.750 to 1.000"]
    assert cells[1] == expected
    mfu, of_products, efficiency = (f"{x / machines:.2f}" for x in (0.2, 0.6, 1.5))
    ddp = [mfu, of_products, "1.00", efficiency, "1.200", "0.750 to 1.600"]
    assert cells[2] == ["800", "600 to 1,200", *ddp]
    without_peak = tool.table(found, **numbers, peak=None).splitlines()
    assert without_peak[3].split("|")[5].strip() == ""


@pytest.mark.rest
def test_gpu_rehearsal(run, tmp_path):
    """Losses and resumes of two chapters: the rows are in the file and in the table."""
    file = tmp_path / "rows.jsonl"
    output = run("gpu.py", "--rehearse", "-o", file, "--chapters", 1, 3, "--part", 1, 3)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    titles = load(BENCHMARKS / "gpu.py").TITLES
    assert {row["part"] for row in rows} == {1, 3}
    assert not [row for row in rows if "error" in row]
    assert all(row["exact"] for row in rows if row["part"] == 3)
    assert all(row["same"] for row in rows if "same" in row)
    assert "same" in rows[1]
    assert all(titles[part] in output for part in (1, 3))


RECORDS = {path: " ".join(path.read_text().split()) for path in BENCHMARKS.glob("records/*.md")}
SHOWN = re.compile(r"git show ([0-9a-f]{7}):([^` ]+)")


def test_scripts_of_records_are_here_or_name_their_commit():
    for record, text in RECORDS.items():
        scripts = {*re.findall(r"(?:benchmarks|tools|tests|maintain)/[\w/-]+\.(?:py|c|txt)", text)}
        for script in scripts - {file for _, file in SHOWN.findall(text)}:
            assert (REPOSITORY / script).exists(), (record, script)


def test_scripts_of_finished_experiments_are_in_the_history():
    """Each script that a record names can be shown. A copy without the history has none of them."""

    def git(*arguments) -> subprocess.CompletedProcess:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here: git fetch --unshallow")
    names = {name for text in RECORDS.values() for name in SHOWN.findall(text)}
    assert len(names) > 10
    for commit, file in names:
        assert git("cat-file", "-e", f"{commit}:{file}").returncode == 0, (commit, file)
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit
