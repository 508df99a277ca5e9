"""Checks your solution of an exercise, and says what is wrong.

    python learn/exercises/check.py ddp-1

The first call writes your file, `outputs/exercises/ddp-1.py`, with blanks. Fill them, and call the
check again. README.md has the way through the exercises.
"""

import argparse
import difflib
import os
import re
import textwrap
from pathlib import Path

import yaml
from ranks import run

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "outputs" / "exercises"
EXERCISES = yaml.safe_load(Path(__file__).with_name("exercises.yaml").read_text())
NAMES = [f"{name}-{level}" for name, texts in EXERCISES.items() for level in texts["levels"]]
UNTOUCHED = "raise NotImplementedError  # blank"
WRAP = {"break_long_words": False, "break_on_hyphens": False}


# The file of an exercise -------------------------------------------------------------------------


def original(name: str) -> str:
    return (REPOSITORY / "learn" / "by-hand" / f"{name}.py").read_text()


def before(text: str, begin_of_line: str) -> str:
    """The lines before the one that begins so."""
    lines, found, _ = text.partition(f"\n{begin_of_line}")
    if not found:
        raise SystemExit(f'error: the line that begins with "{begin_of_line}" is missing')
    return lines


def without(text: str, blank: dict, number: int) -> str:
    """The text with a comment and a line that raises, in place of the lines of the blank."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(blank["first"]))
    last = blank.get("last", blank["first"])
    end = next(i for i, line in enumerate(lines) if line.startswith(last) and i >= begin)
    indent = re.match(" *", lines[begin])[0]
    task = f"Blank {number}. {blank['task']}"
    comment = [f"{indent}# {line}" for line in textwrap.wrap(task, 98 - len(indent), **WRAP)]
    placeholder = f"{indent}{UNTOUCHED} {number}: write your lines in place of this line"
    return "\n".join([*lines[:begin], *comment, placeholder, *lines[end + 1 :], ""])


def complete(exercise: str) -> str:
    """The original, with the command of the exercise."""
    name, _ = exercise.rsplit("-", 1)
    command = f"torchrun --standalone --nproc-per-node 2 learn/by-hand/{name}.py"
    return original(name).replace(command, f"python learn/exercises/check.py {exercise}")


def with_blanks(exercise: str) -> str:
    name, level = exercise.rsplit("-", 1)
    text = complete(exercise)
    for number, blank in enumerate(EXERCISES[name]["levels"][int(level)], start=1):
        text = without(text, blank, number)
    return text


# The report --------------------------------------------------------------------------------------


def grade(technique: str, path: Path, seconds: float) -> bool:
    """Prints what is right and what is wrong. True if everything is right."""
    texts = EXERCISES[technique]
    solution = before(path.read_text(), "# Check: ")
    right = before(original(technique), "torch.manual_seed(")
    for n in texts.get("processes", [2, 4]):
        print(f"{n} processes", flush=True)
        reports = run(technique, right, solution, path, n, seconds)
        if any(report.problem for report in reports):
            print_problems(reports)
            wrong = {"problems"}
        else:
            wrong = print_rows(reports, texts)
        if wrong:
            break
    if "gradients" in wrong:
        print("Mistakes that others have made:")
        for sentence in texts["mistakes"]:
            print(f"  - {sentence}")
    if wrong and n == 4:
        print("4 ranks are wrong and 2 are right: is a rank, or the number of ranks, written down?")
    return not wrong


def print_problems(reports) -> None:
    """Such as an exception."""
    for report in reports:
        if report.problem:
            print(f"    rank {report.rank}:", report.problem.replace("\n", "\n    "))


def print_rows(reports, texts) -> set[str]:
    """A line for each function and check: what is wrong on the first rank that is wrong.

    Returns the checks in which something is wrong.
    """
    last_function, all_wrong = "", set()
    for rows in zip(*(report.rows for report in reports), strict=True):
        function, check, _, text = rows[0]
        wrong = [f"rank {rank}: {row[2]}" for rank, row in enumerate(rows) if row[2]]
        text = wrong[0] if wrong else text
        if check == "bytes" or (check == "memory" and wrong):
            text = f"{text} ({texts[check]})"
        if function != last_function:
            print(f"  {function}")
        last_function = function
        print(f"    {check:<10} {'WRONG' if wrong else 'ok':<6} {text}")
        if wrong:
            all_wrong.add(check)
    return all_wrong


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exercise", choices=NAMES, metavar="exercise", help=", ".join(NAMES))
    parser.add_argument("--answer", action="store_true", help="the difference to the original")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="in place of outputs/exercises")
    text = "when a run counts as hanging (default: 20)"
    parser.add_argument("--seconds", type=float, default=20, help=text)
    return parser.parse_args()


def main() -> int:
    args = parse()
    name, _ = args.exercise.rsplit("-", 1)
    path = args.folder / f"{args.exercise}.py"
    shown = os.path.relpath(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_blanks(args.exercise))
        print(f"written: {shown}. Write your lines at its blanks, and call this again")
    lines = path.read_text().splitlines()
    if args.answer:
        answer = complete(args.exercise).splitlines()
        print(*difflib.unified_diff(lines, answer, shown, "the original", lineterm=""), sep="\n")
        return 0
    blanks = [i for i, line in enumerate(lines, start=1) if UNTOUCHED in line]
    for line in blanks:
        print(f"not yet: {shown}, line {line}")
    if blanks:
        return 1
    is_right = grade(name, path, args.seconds)
    print("solved" if is_right else f"not solved yet: {shown}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
