"""tools/plot-runs.py: the pictures show what the records say, and can be read anywhere."""

import json
import statistics
from pathlib import Path

import matplotlib as mpl
import pytest
from conftest import assert_one_sentence
from PIL import Image
from runner import REPOSITORY, load, outcome

pytestmark = pytest.mark.rest

TOOL = REPOSITORY / "tools" / "plot-runs.py"
RECORDED = sorted((REPOSITORY / "benchmarks" / "demo-runs").iterdir())
PICTURE = REPOSITORY / "docs" / "demo-runs.png"

tool = load(TOOL)


def plot(folder: Path, *arguments) -> tuple[int, str]:
    return outcome(folder, TOOL, *arguments, cwd=folder)


def runs() -> dict[str, list[dict]]:
    order = ["demo-single-gpu", "demo-ddp", "demo-fsdp"]
    folders = {folder.name: folder for folder in RECORDED}
    return {name: tool.read_run(folders[name]) for name in order}


def test_the_picture_of_the_readme_is_that_of_the_recorded_runs(tmp_path):
    tool.save(tool.draw(runs()), tmp_path / "runs.png")
    pinned = f"matplotlib=={mpl.__version__}\n" in (REPOSITORY / "constraints.txt").read_text()
    if not pinned:
        pytest.skip("the picture was drawn with the matplotlib of constraints.txt")
    drawn, shown = (Image.open(path).convert("RGB") for path in (tmp_path / "runs.png", PICTURE))
    assert drawn.size == shown.size
    assert drawn.tobytes() == shown.tobytes()


def test_it_shows_what_the_records_say():
    records = runs()
    loss, speed, memory, times = tool.draw(records).axes
    for axes, name in ((loss, "loss"), (speed, "tokens_per_second")):
        curves = [line for line in axes.lines if len(line.get_xdata()) > 5]
        for line, run in zip(curves, records.values(), strict=True):
            points = [(r["step"], r[name]) for r in run if name in r]
            assert [*zip(line.get_xdata(), line.get_ydata(), strict=True)] == points
    held_out = [line for line in loss.lines if line.get_marker() == "o" and len(line.get_xdata())]
    for line, run in zip(held_out, records.values(), strict=True):
        assert [*line.get_ydata()] == [r["eval/loss"] for r in run if "eval/loss" in r]
    names = ("memory/resident_gb", "memory/peak_allocated_gb")  # the latter in older records
    peaks = [max(r.get(name, 0) for r in run for name in names) for run in records.values()]
    assert [bar.get_width() for bar in memory.patches] == peaks
    widths = [[bar.get_width() for bar in bars] for bars in times.containers]
    for number, run in enumerate(records.values()):
        logged = [r for r in run if "loss" in r][1:]
        for phase, bars in zip(("data", "forward", "backward", "update"), widths, strict=False):
            assert bars[number] == statistics.median(r[f"time/{phase}_ms"] for r in logged)
        total = statistics.median(r["time/total_ms"] for r in logged)
        assert sum(bars[number] for bars in widths) == pytest.approx(total, rel=0.05)


def test_a_running_run(tmp_path):
    """Half a line, a step without a finite norm, no evaluation yet, one record only."""
    record = {"step": 10, "loss": 2.0, "grad_norm": None, "tokens_per_second": 5.0}
    record |= {f"time/{phase}_ms": 1.0 for phase in ("data", "forward", "backward", "update")}
    record |= {"time/total_ms": 5.0, "memory/peak_allocated_gb": 1.0}
    for name in ("a/run", "b/run"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(record) + '\n{"step": 20, "lo')
    arguments = [
        tmp_path / "a" / "run",
        tmp_path / "b" / "run" / "metrics.jsonl",
        "-o",
        "two.runs.svg",
    ]
    assert plot(tmp_path, *arguments)[0] == 0
    svg = (tmp_path / "two.runs.svg").read_text()
    assert "a/run" in svg
    assert "b/run" in svg

    # A single point is to be seen, whatever the run's name; memory as GPUs have it, or none
    one = tool.draw({"_a$b": [record], "c": [record | {"memory/peak_allocated_gb": None}]})
    assert one.axes[0].lines[0].get_marker() == "."
    names = [text.get_text() for text in one.axes[0].get_legend().get_texts()]
    assert [name.strip("\u200b") for name in names] == [r"_a\$b", "c"]
    assert [text.get_text() for text in one.axes[2].texts] == [" 1.00", " not logged"]
    assert one.axes[2].get_title() == "Memory of the fullest GPU, GB (peak)"
    tool.save(one, tmp_path / "one.svg")
    # Without a GPU it is the memory of the processes
    resident = {name: x for name, x in record.items() if not name.startswith("memory/")}
    cpu = tool.draw({"a": [resident | {"memory/resident_gb": 0.5}]})
    assert [text.get_text() for text in cpu.axes[2].texts] == [" 0.50"]
    assert cpu.axes[2].get_title() == "Memory of the fullest process, GB"

    file = tmp_path / "a" / "run" / "metrics.jsonl"
    for text in ("5\n", "[]\n", "\n", '{"loss": 1.0}\n', '{"step": 1, "loss": "x"}\n'):
        file.write_text(text)
        status, output = plot(tmp_path, file)
        assert status == 1
        assert_one_sentence(output, "line 1 of")
    for arguments in ([file] * 7, [file, "-o", tmp_path], [file, "-o", "."]):
        assert plot(tmp_path, *arguments)[0] == 2
    file.write_text('{"step": 20, "lo')
    for arguments, part in [
        ([tmp_path / "a" / "run"], "no logged step yet"),
        ([tmp_path / "nothing"], "nothing"),
        ([tmp_path / "b" / "run", "-o", "no/folder"], "no/folder.png"),
    ]:
        status, output = plot(tmp_path, *arguments)
        assert status == 1
        assert_one_sentence(output, part)
