"""Grades solutions of exercises: `grading.py CASES`, a JSON list of [name, seconds, text].

Next to it, it writes what the check prints, and True or False at the end, for each case. With
`null` as the text, it runs the original, and writes the bytes that it says, those that were
counted, and the events.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learn" / "exercises"))

import check


def counted(name: str) -> list:
    """[function, rank, said, sent, events] of each function and rank of the original."""
    found = []
    for n in check.TECHNIQUES[name].processes:
        outcome = check.run_exercise(name, check.original(name), Path(name), n, seconds=20)
        assert not outcome.problem, outcome.problem
        for function, of_ranks in outcome.parts.items():
            for rank, part in enumerate(of_ranks):
                found.append([function, rank, part.said, part.sent, part.events])
    return found


def graded(name: str, text: str | None, seconds: float) -> list:
    if not text:
        return counted(name)
    path = Path(f"{name}.py")
    lines = check.grade(name, text, path, seconds)
    return [line if isinstance(line, bool) else str(line) for line in lines]


if __name__ == "__main__":
    file = Path(sys.argv[1])
    check.draw_seed = lambda: 2
    results = []
    for name, seconds, text in json.loads(file.read_text()):
        results.append(graded(name, text, seconds))
    file.with_suffix(".results").write_text(json.dumps(results))
