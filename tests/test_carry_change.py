"""maintain/carry-change.py: changes come down the tree, and conflicts are marked."""

import shutil
import subprocess
import sys

import pytest
from runner import REPOSITORY, load

TOOL = load(REPOSITORY / "maintain" / "carry-change.py")
FIRST = (
    "def main():\n    one()\n    # The loop.\n    two()\n    three()\n\n\ndef end():\n    pass\n"
)
SECOND = FIRST.replace("    two()", "    two(RANK)  # DDP: all ranks")
THIRD = SECOND.replace("    # The loop.\n", "    # The loop.\n    # FSDP: a comment\n")
OTHER = FIRST.replace("pass", "stop()  # SL: another end")
CHAPTERS = {"01-single-gpu": FIRST, "02-ddp": SECOND, "03-fsdp": THIRD}
CHAPTERS["14-sparse-low-rank"] = OTHER


class Repository:
    """A copy of the tools with four small chapters and one commit."""

    def __init__(self, folder):
        self.folder = folder
        names = ["carry-change.py", "diff-chapters.py"]
        (folder / "maintain").mkdir()
        for name in names:
            shutil.copy(REPOSITORY / "maintain" / name, folder / "maintain")
        for name, text in CHAPTERS.items():
            (folder / name).mkdir()
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
    repository.edit("01-single-gpu", "two()", "two(2)")
    repository.edit("01-single-gpu", "one()", "one(1)")
    said = ["02-ddp: conflict at line 4", "03-fsdp: waits for 02-ddp"]
    assert repository.carry() == (1, [*said, "14-sparse-low-rank: changed"])
    text = repository.read("02-ddp")
    assert text.index("one(1)") < text.index("<<<<<<< 02-ddp") < text.index(">>>>>>> 01-single-gpu")
    assert repository.read("03-fsdp") == THIRD
    # Nothing is merged into a conflict
    said[0] = "02-ddp: conflict at line 4"
    assert repository.carry() == (1, said)
    assert repository.read("02-ddp") == text
    # It is edited: the change goes on there, and what is edited stays
    edited = SECOND.replace("two(RANK)", "two(2, RANK)").replace("one()", "one(1)")
    repository.write("02-ddp", edited)
    assert repository.carry() == (0, ["03-fsdp: changed"])
    assert repository.read("02-ddp") == edited
    assert repository.read("03-fsdp") == edited.replace(
        "    # The loop.\n", "    # The loop.\n    # FSDP: a comment\n"
    )
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
