"""The pages, and the flags on them."""

import re
import shlex
import sys
from contextlib import chdir, redirect_stderr
from functools import lru_cache
from io import StringIO
from unittest import mock

import pytest
from helpers.assertions import assert_one_sentence
from helpers.runner import REPOSITORY, load

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


loaded = lru_cache(load)


def assert_flags_are_understood(script, flags: str) -> None:
    """All that is wrong is a flag added here. Ranks and files are not looked at."""
    argv = [script.name, *shlex.split(flags), "--log-freq", "none"]
    given, errors = mock.patch.object(sys, "argv", argv), StringIO()
    with chdir(REPOSITORY), given, redirect_stderr(errors), pytest.raises(SystemExit, match="2"):
        loaded(script).parse_args()
    assert_one_sentence(errors.getvalue(), 'Parser key "log_freq"')
