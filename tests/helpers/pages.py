"""The pages, and the flags on them."""

import re
import shlex

from helpers.assertions import assert_one_sentence
from helpers.runner import REPOSITORY, Run

WHICH = "docs/which-chapter.md"


def page(file: str) -> str:
    return (REPOSITORY / file).read_text()


def section(file: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page(file)
    begin = re.search(rf"^(##+) {re.escape(heading)}.*$", text, re.MULTILINE)
    assert begin, f"{file} has no section {heading!r}"
    rest = text[begin.end() :]
    end = re.search(rf"^##{{1,{len(begin[1]) - 1}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def assert_flags_are_understood(script, flags: str, output) -> None:
    """All that is wrong is a flag added here."""
    run = Run(script, [*shlex.split(flags), "--log-freq", "none"], output, cwd=REPOSITORY)
    assert run.wait() == 2
    assert_one_sentence(run.output, 'Parser key "log_freq"')
