"""Test files import from helpers/, and from no other test file."""

import ast

from helpers.runner import REPOSITORY

TESTS = REPOSITORY / "tests"


def test_no_test_file_imports_another():
    others = {file.stem for file in TESTS.glob("*.py")}
    for file in TESTS.rglob("*.py"):
        imports = [n for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "names")]
        names = {alias.name for node in imports for alias in node.names if hasattr(alias, "name")}
        names |= {getattr(node, "module", None) for node in imports}
        assert others.isdisjoint(names), file
    assert {name for name in others if not name.startswith("test_")} == {"conftest"}


def test_each_patch_is_used():
    text = "".join(file.read_text() for file in TESTS.rglob("*.py"))
    for file in TESTS.glob("helpers/patches/[!_]*.py"):
        assert f'"{file.stem}"' in text or f"patches.{file.stem}" in text, file
