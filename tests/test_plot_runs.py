"""tools/plot-runs.py: the pictures show what the records say, and can be read anywhere."""

import json
import statistics

import pytest
from runner import REPOSITORY, load, outcome

pytestmark = pytest.mark.rest

TOOL = REPOSITORY / "tools" / "plot-runs.py"
RECORDED = sorted((REPOSITORY / "benchmarks" / "demo-runs").iterdir())

tool = load(TOOL)


def runs() -> dict[str, list[dict]]:
    order = ["demo-single-gpu", "demo-ddp", "demo-fsdp"]
    folders = {folder.name: folder for folder in RECORDED}
    return {name: tool.read_run(folders[name]) for name in order}


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
    status, output = outcome(tmp_path, TOOL, "a/run", "b/run", "-o", "two.svg", cwd=tmp_path)
    assert status == 0, output
    svg = (tmp_path / "two.svg").read_text()
    assert "a/run" in svg
    assert "b/run" in svg
    # A single point is to be seen
    one = tool.draw({"a": [record]})
    assert one.axes[0].lines[0].get_marker() == "."
