"""Damages chapters and tools on purpose, one line at a time, and checks that a test notices.

    python maintain/damages.py              # all damages
    python maintain/damages.py 02 13        # the damages of these chapters

Each chapter has a file in `damages/`, and the tools have one together. A damage is a sentence that
says what is wrong, the lines of the script (-), and the wrong lines in their place (+). The first
and the last of these may be parts of a line. Above stand the script (#), and the one test that has
to fail (@). All these tests look at behaviour: losses, gradients, resumes, messages.

The command works in a copy of the repository. First it runs the tests without damage, since a test
that always fails notices nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = sorted((REPOSITORY / "maintain" / "damages").glob("*.txt"))


@dataclass
class Damage:
    chapter: str
    test: str
    what: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def script(self, folder: Path) -> Path:
        path = folder / self.chapter
        return path if path.suffix else path / "train-llm.py"

    def text(self) -> str:
        """The damaged script. The old lines must be there once."""
        text = self.script(REPOSITORY).read_text()
        old, new = "\n".join(self.old), "\n".join(self.new)
        if text.count(old) != 1:
            sys.exit(f"error: {self.chapter} has not one place with {old!r}, as for: {self.what}")
        return text.replace(old, new)


def damages(files: list[Path] = FILES) -> list[Damage]:
    found = []
    chapter = test = ""
    for line in "\n".join(file.read_text() for file in files).splitlines():
        sign, rest = line[:2], line[2:]
        if sign == "# ":
            chapter = rest
        elif sign == "@ ":
            test = rest
        elif sign == "- ":
            found[-1].old.append(rest)
        elif sign == "+ ":
            found[-1].new.append(rest)
        elif line:
            found.append(Damage(chapter, test, what=line))
    return found


def copy_repository(folder: Path) -> None:
    """All files but those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Status of pytest (0: all pass, 1: some fail), and its output."""
    command = [sys.executable, "-m", "pytest", "--all", "-n", "0", "-q", "-p", "no:cacheprovider"]
    # A damaged script may hang. Its test then ends after 15 minutes, and the damage is missed.
    command += ["-o", "faulthandler_timeout=900", "-o", "faulthandler_exit_on_timeout=true"]
    command += [f"tests/{test}" for test in tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def verify(chosen: list[Damage]) -> bool:
    """Whether each damage is noticed."""
    problems = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        tests = sorted({damage.test for damage in chosen})
        status, output = run_tests(folder, tests)
        if status:
            print(output)
            sys.exit("error: without damage, these tests fail")
        print(f"{len(tests)} tests pass without damage", flush=True)
        for damage in chosen:
            script = damage.script(folder)
            undamaged = script.read_text()
            script.write_text(damage.text())
            status, output = run_tests(folder, [damage.test])
            script.write_text(undamaged)
            is_noticed = status == 1 and re.search(r"^\d+ failed", output, re.MULTILINE)
            reason = re.findall(r"^E +(.*)", output, re.MULTILINE) or output.splitlines()[-1:]
            verdict = f"noticed: {reason[0][:100]}" if is_noticed else f"MISSED (status {status})"
            print(f"{damage.chapter}: {damage.what}: {verdict}", flush=True)
            problems += not is_noticed
    print(f"{len(chosen) - problems} of {len(chosen)} damages are noticed")
    return problems == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", help="numbers, such as 02; without: all chapters")
    args = parser.parse_args()
    chosen = [
        damage
        for damage in damages()
        if not args.chapters or Path(damage.chapter).name[:2] in args.chapters
    ]
    if not chosen:
        parser.error("no chapter has one of these numbers")
    sys.exit(0 if verify(chosen) else 1)


if __name__ == "__main__":
    main()
