"""Reads the metrics of a run, for export-metrics.py and plot-runs.py."""

import json
import sys
from pathlib import Path


def read_records(run: Path) -> list[dict]:
    """The records in `metrics.jsonl` of a folder, or in this file; a value may be None.

    A last line without its end is left out, because the run is writing it.
    """
    file = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = file.read_text("utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot read the run {run}: {error}")
    records = []
    for number, line in enumerate(lines, 1):
        if line.endswith("\n"):
            try:
                record = json.loads(line)
                values = [record["step"], *record.values()]
                assert all(x is None or isinstance(x, (int, float)) for x in values)
            except (ValueError, TypeError, KeyError, AssertionError, AttributeError):
                sys.exit(f"error: line {number} of {file} is no record of a run")
            records.append(record)
    return records
