"""tests/damages.py: the list fits the chapters, and the command notices what a test misses.

The whole list takes too long for CI: run it after a change of the tests of a chapter.
"""

import ast
import subprocess
import sys

import damages
from runner import CHAPTERS_BY_NUMBER, REPOSITORY

ALL = damages.damages()


def test_the_list():
    assert len(CHAPTERS_BY_NUMBER) >= 15
    assert {damage.chapter[:2] for damage in ALL} == CHAPTERS_BY_NUMBER.keys()
    for damage in ALL:
        ast.parse(damage.text())  # ends with a sentence if the script has lost the old line
        file, _, name = damage.test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text()
        assert f"\ndef {name.partition('[')[0]}(" in text, damage.test


def run(*arguments):
    command = [sys.executable, REPOSITORY / "tests" / "damages.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)
