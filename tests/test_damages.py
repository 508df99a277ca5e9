"""tests/damages.py: the list fits the chapters, and the command notices what a test misses.

The whole list takes too long for CI: run it after a change of the tests of a chapter.
"""

import ast
import subprocess
import sys

import damages
import pytest
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


def test_the_command_refuses_and_lists():
    assert "no chapter has one of these numbers" in run("99").stderr
    result = run("01", "--list")
    assert result.returncode == 0
    assert "01-single-gpu: documents have no end (test_data.py::" in result.stdout


@pytest.mark.rest
def test_a_damage_is_noticed_and_another_is_not(capsys):
    """A line that only looks damaged passes the same test."""
    (damage,) = [damage for damage in ALL if damage.what == "documents have no end"][:1]
    harmless = damages.Damage(
        damage.chapter, "nothing is wrong", damage.old, damage.old.replace("ids", "x"), damage.test
    )
    assert not damages.verify([damage, harmless])
    output = capsys.readouterr().out
    assert "documents have no end: noticed: " in output
    assert "nothing is wrong: MISSED" in output
    assert "1 of 2 damages are noticed" in output
