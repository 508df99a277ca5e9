"""Grades solutions of exercises: `grading.py CASES`, a JSON list of [name, seconds, text].

Next to it, it writes what the check prints, and True or False at the end, for each case. And with
`null` as the text, the original: the bytes that it says, and those that were counted.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))

import check
import ranks


def counted(name: str) -> list:
    """[said, sent] of each function and rank of the original."""
    found = []
    for n in check.TECHNIQUES[name].processes:
        text, parts = check.original(name), check.reference(name, n)
        outcome = ranks.run(text, Path(name), parts, n, seconds=20)
        assert not outcome.problem, outcome.problem
        for function in outcome.parts.values():
            found += [[part.said, part.sent] for part in function]
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1])
    results = []
    for name, seconds, text in json.loads(file.read_text()):
        path = Path(f"{name}.py")
        results.append(list(check.grade(name, text, path, seconds)) if text else counted(name))
        results[-1] = [item if isinstance(item, bool | list) else str(item) for item in results[-1]]
    file.with_suffix(".results").write_text(json.dumps(results))
