"""Makes the folder of a new chapter, and says what is left to do.

    python maintain/new-chapter.py 23 name --continues 03

The script is that of the chapter that it continues. Everything else is a stub with TODO.
"""

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
from chapters import SCRIPTS, script_of  # noqa: E402

STUBS = {
    "more/{folder}/chapter.toml": """\
for = "TODO"
continues = "{before}"
changed = 0
""",
    "more/{folder}/README.md": """\
# Chapter {number}: TODO

[`train-llm.py`](train-llm.py) is chapter {continues} with TODO. The [diff](changes.diff) is the
lesson.

```
torchrun --standalone --nproc-per-node 2 more/{folder}/train-llm.py --demo
```

## The ideas

### 1. TODO

```python
TODO
```

Back to the [first page](../../README.md).
""",
    "tests/test_{module}.py": '''\
"""Chapter {number}: TODO."""


def test_todo():
    raise AssertionError("TODO")
''',
    "maintain/damages/{folder}.txt": """\
# more/{folder}

@ test_{module}.py::test_todo
TODO
- if __name__ == "__main__":
+ if __name__ != "__main__":
""",
    "benchmarks/records/{name}.md": "# TODO\n",
}
LEFT = """
Left to do, and the test that asks for it:

- the change in more/{folder}/train-llm.py, with comments `# MARKER: why` and `# MARKER 1: an idea`
    test_chapters.py::test_rules[{folder}]
- its README: the problem, the ideas with their code, the cost, the traps, exercises with answers
    test_readme.py::test_each_idea_is_explained_with_its_code[{folder}]
- its tests, of what equal losses do not show: memory, messages, precision, what it refuses
    test_{module}.py::test_todo
- no TODO: chapter.toml, wrong lines that its tests notice (python maintain/damages.py {number:02}),
  and a record with the machine, the command and all rows
    test_readme.py::test_no_stub_is_left
- a row in docs/which-chapter.md
    test_readme.py::test_which_chapter_has_a_row_for_each_chapter
- a row in benchmarks/results.md, for the record
    test_readme.py::test_figures_lead_to_each_record

Later, or only if it is so:

- the number of changed lines as `changed` in chapter.toml, with the reason in the commit
    test_chapters.py::test_chapters_do_not_grow[{folder}]
- other losses than chapter 1's: `losses` in chapter.toml, and a reference of its own for its rows
    test_matrix.py
- flags of its own: a table in its README, below "Chapter {number} adds flags"; rows with them in
  test_matrix.py, and a wrong one in test_bad_input.py
    test_readme.py::test_flags_are_those_of_help[{folder}]
- packages: `needs` in chapter.toml, an extra in pyproject.toml, a version in constraints.txt
    test_preflight.py
- another kind of checkpoint: a case in test_killed.py, a line in docs/after-training.md
    (no test asks for it)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=int)
    parser.add_argument("name", help="such as float8, in the names of its folder and its files")
    parser.add_argument("--continues", type=int, required=True, help="the number of a chapter")
    args = parser.parse_args()
    numbers = [int(name[:2]) for name in SCRIPTS]
    if args.number in numbers or args.continues not in numbers:
        parser.error(f"{args.number} must be new, and --continues a chapter: {numbers}")
    before = script_of(args.continues)
    names = vars(args) | {"folder": f"{args.number:02}-{args.name}", "before": before.parent.name}
    names["module"] = args.name.replace("-", "_")
    files = {REPOSITORY / file.format(**names): text for file, text in STUBS.items()}
    if existing := [str(file) for file in files if file.exists()]:
        parser.error(f"{existing[0]} exists")
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.format(**names))
    _, docstring, code = before.read_text().split('"""', 2)
    commands = docstring[docstring.index("\n\n    ") :]
    script = f'"""Chapter {args.number}: TODO.{commands}"""{code}'
    (REPOSITORY / "more" / names["folder"] / "train-llm.py").write_text(script)
    subprocess.run([sys.executable, REPOSITORY / "maintain" / "write-tables.py"], check=True)
    print(LEFT.format(**names))


if __name__ == "__main__":
    main()
