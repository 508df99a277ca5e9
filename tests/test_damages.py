"""maintain/damages.py: the list fits the chapters and the tests."""

import ast
from pathlib import Path

from helpers.chapters import SCRIPTS
from helpers.runner import REPOSITORY, load

TOOL = load(REPOSITORY / "maintain" / "damages.py")
ALL = TOOL.damages()


def test_each_chapter_has_its_file():
    for file in TOOL.FILES:
        places = {Path(damage.chapter) for damage in TOOL.damages([file])}
        assert {path.parent.name if path.suffix else path.name for path in places} == {file.stem}
    assert {file.stem for file in TOOL.FILES} == {*SCRIPTS, "tools"}


def test_the_list():
    for damage in ALL:
        ast.parse(damage.text())  # ends with a sentence if the script has lost the old line
        file, _, name = damage.test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text()
        assert f"\ndef {name.partition('[')[0]}(" in text, damage.test
