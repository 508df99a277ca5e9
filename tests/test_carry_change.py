"""maintain/carry-change.py: changes come down the tree, and conflicts are marked."""

import shutil
import subprocess
import sys

import pytest
from helpers.runner import REPOSITORY, load

TOOL = load(REPOSITORY / "maintain" / "carry-change.py")
FIRST = (
    "def main():\n    one()\n    # The loop.\n    two()\n    three()\n\n\ndef end():\n    pass\n"
)
SECOND = FIRST.replace("    two()", "    two(RANK)  # DDP: all ranks")
THIRD = SECOND.replace("    # The loop.\n", "    # The loop.\n    # FSDP: a comment\n")
THIRD = THIRD.replace("    three()", "    three(RANK)  # FSDP: all ranks")
FOURTH = THIRD.replace("pass", "stop()  # STREAM: another end")
CHAPTERS = {"01-single-gpu": FIRST, "02-ddp": SECOND, "03-fsdp": THIRD}
CHAPTERS |= {"04-streaming": FOURTH, "08-gradient-compression": SECOND}


class Repository:
    """A copy of the tools with five small chapters and one commit."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("maintain/carry-change.py", "maintain/write-tables.py", "tools/chapters.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
        for name, text in CHAPTERS.items():
            (folder / name).mkdir()
            facts = next(REPOSITORY.glob(f"**/{name}/chapter.toml"))
            shutil.copy(facts, folder / name)
            self.write(name, text)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments):
        author = ["-c", "user.name=test", "-c", "user.email=test"]
        subprocess.run(["git", "-C", self.folder, *author, *arguments], check=True)

    def commit(self):
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", "A commit")

    def write(self, name, text):
        (self.folder / name / "train-llm.py").write_text(text)

    def read(self, name):
        return (self.folder / name / "train-llm.py").read_text()

    def edit(self, name, old, new):
        assert old in self.read(name)
        self.write(name, self.read(name).replace(old, new))

    def carry(self, *arguments):
        """Exit status, and what the tool says about each chapter."""
        command = [sys.executable, self.folder / "maintain" / "carry-change.py", *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.stderr == ""
        return result.returncode, result.stdout.splitlines()


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_change_comes_down(repository):
    repository.edit("01-single-gpu", "one()", "one(1)")
    # Beside a comment of chapter 3, where git alone would find a conflict
    repository.edit("01-single-gpu", "# The loop.", "# The training loop.")
    names = [*CHAPTERS][1:]
    assert repository.carry() == (0, [f"{name}: changed" for name in names])
    for name in names:
        expected = (
            CHAPTERS[name].replace("one()", "one(1)").replace("The loop", "The training loop")
        )
        assert repository.read(name) == expected
    # And the diffs are those of the chapters
    diff = (repository.folder / "02-ddp" / "changes.diff").read_text()
    assert "-    two()\n+    two(RANK)  # DDP: all ranks\n" in diff
    assert "     one(1)\n" in diff


def test_conflicts(repository):
    repository.edit("02-ddp", "three()", "three(3)")
    repository.edit("02-ddp", "one()", "one(1)")
    said = ["03-fsdp: conflict at line 6", "04-streaming: waits for 03-fsdp"]
    assert repository.carry() == (1, [*said, "08-gradient-compression: changed"])
    text = repository.read("03-fsdp")
    assert text.index("one(1)") < text.index("<<<<<<< 03-fsdp") < text.index(">>>>>>> 02-ddp")
    assert repository.read("04-streaming") == FOURTH
    # Nothing is merged into a conflict
    assert repository.carry() == (1, said)
    assert repository.read("03-fsdp") == text
    # It is edited: the change goes on there, and what is edited stays
    edited = THIRD.replace("three(RANK)", "three(3, RANK)").replace("one()", "one(1)")
    repository.write("03-fsdp", edited)
    assert repository.carry() == (0, ["04-streaming: changed"])
    assert repository.read("03-fsdp") == edited
    assert repository.read("04-streaming") == edited.replace(
        "pass", "stop()  # STREAM: another end"
    )
    assert repository.carry() == (0, [])
    # A chapter may also keep all the lines that it has in the commit
    repository.edit("03-fsdp", "three(3, RANK)", "three(RANK)")
    repository.commit()
    repository.edit("02-ddp", "three(3)", "three(4)")
    assert repository.carry()[1][0] == "03-fsdp: conflict at line 6"
    repository.write("03-fsdp", edited.replace("three(3, RANK)", "three(RANK)"))
    assert repository.carry() == (0, [])


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        ("own, a, b", "A, b", "own, A, b"),  # a new line above a changed one
        ("a, B", "A, b", "A, B"),
        ("A, b", "A, b", "A, b"),  # the same change on both sides
        ("own, a, b", "new, a, b", None),  # two new lines at one place
        ("X, b", "A, b", None),
        ("b", "A, b", None),
    ],
)
def test_lines_of_a_conflict(ours, theirs, merged):
    texts = ["".join(f"{x}\n" for x in text.split(", ")) for text in (ours, "a, b", theirs)]
    conflict = "<<<<<<< x\n{}||||||| y\n{}=======\n{}>>>>>>> z\n".format(*texts)
    expected = conflict if merged is None else "".join(f"{x}\n" for x in merged.split(", "))
    assert TOOL.CONFLICT.sub(TOOL.merge_lines, conflict) == expected
