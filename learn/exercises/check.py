"""Checks your solution of an exercise, and says what is wrong.

    python learn/exercises/check.py ddp-1

The first call writes your file, `outputs/exercises/ddp-1.py`, with blanks. Fill them, and call the
check again. README.md has the way through the exercises.
"""

import argparse
import difflib
import os
import re
import secrets
import textwrap
from functools import cache
from pathlib import Path

import torch
from ranks import Outcome, compute_reference, given_and_yours, run
from techniques import TECHNIQUES, Blank

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "outputs" / "exercises"
NAMES = [f"{name}-{level}" for name, technique in TECHNIQUES.items() for level in technique.levels]
UNTOUCHED = "raise NotImplementedError  # blank"
WRAP = {"break_long_words": False, "break_on_hyphens": False}
TOLERANCE = 1e-9  # of the largest number; all numbers are in fp64


# The file of an exercise -------------------------------------------------------------------------


def original(name: str) -> str:
    return (REPOSITORY / "learn" / "by-hand" / f"{name}.py").read_text()


def without(text: str, blank: Blank, number: int) -> str:
    """The text with a comment and a line that raises, in place of the lines of the blank."""
    lines = text.splitlines()
    yours = lines[: len(given_and_yours(text).splitlines())]
    begins = [i for i, line in enumerate(yours) if line.startswith(blank.first)]
    if len(begins) != 1:
        raise LookupError(f"{len(begins)} lines begin with {blank.first!r}")
    ends = [i for i, line in enumerate(lines) if line.startswith(blank.last) and i >= begins[0]]
    if not ends:
        raise LookupError(f"no line begins with {blank.last!r}")
    indent = re.match(" *", blank.first)[0]
    task = f"Blank {number}. {blank.task}"
    comment = [f"{indent}# {line}" for line in textwrap.wrap(task, 98 - len(indent), **WRAP)]
    placeholder = f"{indent}{UNTOUCHED} {number}: write your lines in place of this line"
    return "\n".join([*lines[: begins[0]], *comment, placeholder, *lines[ends[0] + 1 :], ""])


def complete(exercise: str) -> str:
    """The original, with the command of the exercise."""
    name, _ = exercise.rsplit("-", 1)
    command = f"torchrun --standalone --nproc-per-node 2 learn/by-hand/{name}.py"
    return original(name).replace(command, f"python learn/exercises/check.py {exercise}")


def with_blanks(exercise: str) -> str:
    name, level = exercise.rsplit("-", 1)
    text = complete(exercise)
    for number, blank in enumerate(TECHNIQUES[name].levels[int(level)], start=1):
        text = without(text, blank, number)
    return text


# The checks --------------------------------------------------------------------------------------


def draw_seed() -> int:
    """Other numbers in each check, so that no solution can know them."""
    return secrets.randbits(48)


@cache
def reference(name: str, n: int):
    """For each function: its name, the data of each rank, and the results of each rank."""
    return compute_reference(original(name), n, draw_seed())


def run_exercise(name: str, text: str, path: Path, n: int, seconds: float) -> Outcome:
    return run(text, path, reference(name, n), n, seconds, TECHNIQUES[name].memory)


@cache
def outcome_of_original(name: str, n: int) -> Outcome:
    """With the data of the solution: the bytes that are sent."""
    outcome = run_exercise(name, original(name), Path(name), n, seconds=20)
    if outcome.problem:
        raise SystemExit(f"error: the original does not run on this machine: {outcome.problem}")
    return outcome


def judge(name: str, n: int, outcome: Outcome):
    """Yields (function, check, what is wrong or nothing, what to say if all is right)."""
    technique = TECHNIQUES[name]
    for function, _, expected in reference(name, n):
        parts = outcome.parts[function]
        originals = outcome_of_original(name, n).parts[function]
        said = f"equal to one process: {', '.join(expected[0])}"
        yield function, "gradients", wrong_results(parts, expected, n), said
        said = f"rank 0 sent {parts[0].sent}: {technique.bytes_text}"
        yield function, "bytes", wrong_bytes(technique, parts, originals), said
        if technique.memory:
            said = f"rank 0 has {parts[0].most} bytes at most"
            yield function, "memory", too_much_memory(technique, parts), said


def wrong_results(parts, expected, n) -> str:
    for rank, (part, right) in enumerate(zip(parts, expected, strict=True)):
        if part.changed_later:
            return f"rank {rank}: numbers still arrived later: a request was not waited for"
        for name, tensor in right.items():
            wrong = wrong_result(part.results.get(name), tensor, n)
            for other_rank in range(n) if wrong else []:
                if not wrong_result(part.results.get(name), expected[other_rank][name], n):
                    wrong = f"these are the numbers of rank {other_rank}"
            if wrong:
                return f'rank {rank}, "{name}": {wrong}'
    return ""


def wrong_result(tensor, right: torch.Tensor, n: int) -> str:
    if tensor is None:
        return "the function does not return this tensor"
    if tensor.shape != right.shape:
        return f"the shape is {tuple(tensor.shape)}, expected {tuple(right.shape)}"
    if close_to(tensor, right):
        return ""
    if not tensor.any():
        return "all numbers are 0: nothing was written into this tensor"
    if tensor.isnan().any():
        return "some numbers are nan: nothing was written there, or they were divided by 0"
    factor = ((tensor * right).sum() / (right * right).sum()).item()
    if close_to(tensor / factor, right):
        return too_large(factor, n)
    return (
        f"the largest difference to one process is {(tensor - right).abs().max():.1e}: on each "
        "rank, print what goes into a collective, and what comes out"
    )


def close_to(tensor, right) -> bool:
    same_shape = tensor.shape == right.shape
    return same_shape and (tensor - right).abs().max() <= TOLERANCE * right.abs().max()


def too_large(factor: float, n: int) -> str:
    if abs(factor - n) < 1e-6:
        return f"{n} times too large: the sum was not divided by the number of ranks"
    if abs(factor - 1 / n) < 1e-6:
        return f"{n} times too small: divided by the number of ranks once too often"
    return f"{factor:.4g} times one process"


def wrong_bytes(technique, parts, originals) -> str:
    for rank, (part, right) in enumerate(zip(parts, originals, strict=True)):
        if part.sent != right.sent:
            text = f"rank {rank} sent {part.sent}, expected {right.sent} ({technique.bytes_text})"
            cause = "something was not sent" if part.sent < right.sent else "less is enough"
            return f"{text}: {cause}"
    return ""


def too_much_memory(technique, parts) -> str:
    for rank, part in enumerate(parts):
        if part.excess:
            found, limit, line = part.excess
            where = f"on line {line}" if line else "when the function has returned"
            text = f"rank {rank} has {found} bytes {where}, the limit is {limit}"
            return f"{text}: {technique.memory_text}"
    return ""


# Known mistakes ----------------------------------------------------------------------------------


def replaced(text: str, code: str, instead: str) -> str:
    if text.count(code) != 1:
        raise LookupError(f"{text.count(code)} times {code!r}")
    return text.replace(code, instead)


@cache
def outcome_of_mistake(name: str, code: str, instead: str) -> Outcome:
    """A known mistake, made in the original and run on two processes."""
    text = replaced(original(name), code, instead)
    return run_exercise(name, text, Path(name), 2, seconds=20)


def known_mistake(name: str, outcome: Outcome) -> str:
    """The sentence of a mistake with the same wrong results and bytes."""
    for sentence, *codes in TECHNIQUES[name].known_mistakes():
        other = outcome_of_mistake(name, *codes)
        if not other.problem and alike(outcome, other):
            return sentence
    return ""


def alike(*outcomes: Outcome) -> bool:
    """Whether two solutions send the same number of bytes, and have the same results."""
    found = [
        [(part.sent, part.results) for of_ranks in x.parts.values() for part in of_ranks]
        for x in outcomes
    ]
    try:
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8, equal_nan=True)
    except AssertionError:
        return False
    return True


# The report --------------------------------------------------------------------------------------


def grade(name: str, text: str, path: Path, seconds: float):
    """Yields what to print. The last item is True if everything is right."""
    given_and_yours(text)
    for n in TECHNIQUES[name].processes:
        yield f"{n} processes"
        outcome = run_exercise(name, text, path, n, seconds)
        judged = [] if outcome.problem else [*judge(name, n, outcome)]
        is_right = not outcome.problem and not any(wrong for _, _, wrong, _ in judged)
        if not is_right:
            yield from printed(outcome)
        yield from (f"    {line}" for line in outcome.problem.splitlines())
        function = ""
        for of_function, check, wrong, said in judged:
            if of_function != function:
                function = of_function
                yield f"  {function}"
            yield f"    {check:<10} {'WRONG' if wrong else 'ok':<6} {wrong or said}"
        if not is_right:
            break
    if not is_right and n == 4:
        yield (
            "4 ranks are wrong and 2 are right: a rank number is written down somewhere, or the "
            "number of ranks"
        )
    elif not is_right and not outcome.problem:
        sentence = known_mistake(name, outcome)
        if sentence:
            yield f"It looks like this mistake: {sentence}."
    yield is_right


def printed(outcome: Outcome):
    for rank, text in enumerate(outcome.printed):
        for line in text.splitlines()[-20:]:
            yield f"    rank {rank} printed: {line}"


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
    text = path.read_text()
    if args.answer:
        before, after = text.splitlines(), complete(args.exercise).splitlines()
        print("\n".join(difflib.unified_diff(before, after, shown, "the original", lineterm="")))
        return 0
    blanks = [i for i, line in enumerate(text.splitlines(), start=1) if UNTOUCHED in line]
    for line in blanks:
        print(f"not yet: {shown}, line {line}")
    if blanks:
        return 1
    for item in grade(name, text, path, args.seconds):
        if isinstance(item, str):
            print(item, flush=True)
        else:
            print("solved" if item else f"not solved yet: {shown}")
    return 0 if item else 1


if __name__ == "__main__":
    raise SystemExit(main())
