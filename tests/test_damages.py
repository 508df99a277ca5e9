"""maintain/damages.py: the list fits the chapters and the tests."""

import ast

from runner import CHAPTERS_BY_NUMBER, REPOSITORY, load

ALL = load(REPOSITORY / "maintain" / "damages.py").damages()


def test_the_list():
    scripts = {damage.script(REPOSITORY) for damage in ALL}
    assert {script for script in scripts if script.parent.name != "tools"} == {
        *CHAPTERS_BY_NUMBER.values()
    }
    for damage in ALL:
        ast.parse(damage.text())  # ends with a sentence if the script has lost the old line
        file, _, name = damage.test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text()
        assert f"\ndef {name.partition('[')[0]}(" in text, damage.test
