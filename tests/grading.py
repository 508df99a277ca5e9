"""Grades solutions of exercises: `grading.py CASES`, a JSON list of [name, text].

Next to it, it writes what the check prints, and True or False at the end, for each case.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learn" / "exercises"))

import check

if __name__ == "__main__":
    file = Path(sys.argv[1])
    check.draw_seed = lambda: 2
    cases = json.loads(file.read_text())
    results = [[*check.grade(name, text, Path(f"{name}.py"), 20)] for name, text in cases]
    for name in {name for name, _ in cases}:
        for n in check.TECHNIQUES[name].processes:
            for parts in check.outcome_of_original(name, n).parts.values():
                assert all(part.said == part.sent > 0 for part in parts), name
    file.with_suffix(".results").write_text(json.dumps(results))
