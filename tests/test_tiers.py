"""Which tests are in which tier: `rest` marks those of the second, all others are quick."""

import ast
from pathlib import Path

from runner import CHAPTERS_BY_NUMBER, REPOSITORY


def is_rest(node) -> bool:
    return any(ast.unparse(mark).startswith("pytest.mark.rest") for mark in node.decorator_list)


def tiers_of(text: str) -> dict[str, tuple[bool, set]]:
    """By name: is the test in the second tier, and the names that it uses, also by its helpers."""
    tree = ast.parse(text)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    whole_file = "\npytestmark = pytest.mark.rest\n" in text
    used = {}
    for name, node in functions.items():
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        words = {n.id for n in names} - own
        words |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        flags = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
        words |= {flag for flag in flags if flag == "--compile"}
        used[name] = words

    def all_used(name, seen):
        for word in used[name] & used.keys() - seen:
            seen.add(word)
            all_used(word, seen)
        return set().union(used[name], *(used[word] for word in seen))

    tests = {name: node for name, node in functions.items() if name.startswith("test_")}
    return {
        name: (whole_file or is_rest(node), all_used(name, set())) for name, node in tests.items()
    }


def test_each_chapter_has_a_quick_job():
    """In test_quick.py, or in the file of the chapter. Chapter 1's are in test_training.py."""
    from test_quick import CHAPTERS

    text = (REPOSITORY / "tests" / "test_quick.py").read_text()
    chapters = {path.parent.name for path in CHAPTERS_BY_NUMBER.values()}
    assert {*CHAPTERS} < chapters
    for chapter in chapters - {"01-single-gpu", *CHAPTERS}:
        if f'"chapter", ["{chapter}"]' in text:
            continue
        file = Path(__file__).with_name(f"test_{chapter[3:].replace('-', '_')}.py")
        tests = tiers_of(file.read_text())
        assert any(
            used & {"trainer", "shared", "sparse"} for rest, used in tests.values() if not rest
        ), chapter
