"""Writes what each chapter changes in the one that it continues to its `changes.diff`.

    python maintain/diff-chapters.py

It shows the diffs of the scripts of `learn/in-short/` in the README of this folder, and the first
of them on the first page.
The tests compare these files with the chapters, so that no change goes unseen.
"""

import difflib
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

# The tree of chapters: each one, and the one that it continues. Chapters 1 and 9 continue none.
CONTINUES = {
    "02-ddp": "01-single-gpu",
    "03-fsdp": "02-ddp",
    "04-streaming": "03-fsdp",
    "05-multi-node": "03-fsdp",
    "06-tensor-parallel": "03-fsdp",
    "07-pipeline-parallel": "03-fsdp",
    "08-gradient-compression": "02-ddp",
    "10-mds-shards": "05-multi-node",
    "11-context-parallel": "03-fsdp",
    "12-expert-parallel": "03-fsdp",
    "13-3d-parallel": "07-pipeline-parallel",
    "14-sparse-low-rank": "03-fsdp",
    "15-local-steps": "05-multi-node",
    "16-chat": "03-fsdp",
    "17-lora": "16-chat",
    "18-muon": "03-fsdp",
    "19-chunked-loss": "03-fsdp",
    "20-float8": "03-fsdp",
    "21-sharded-loading": "03-fsdp",
}
# The same for the scripts of learn/in-short/. Only single.py continues none.
SHORT = {
    "ddp": "single",
    "fsdp": "ddp",
    "tensor_parallel": "single",
    "pipeline": "single",
    "context_parallel": "fsdp",
    "expert_parallel": "fsdp",
    "muon": "fsdp",
    "float8": "fsdp",
    "local_steps": "ddp",
    "chat": "ddp",
}


def chapters() -> list[Path]:
    """The scripts in the order of their numbers."""
    pattern = "[0-9][0-9]-*/train-llm.py"
    return sorted(REPOSITORY.glob(pattern)) + sorted((REPOSITORY / "more").glob(pattern))


def pairs() -> list[tuple[Path, Path]]:
    """Each script that continues another, behind the one that it continues."""
    scripts = {path.parent.name: path for path in chapters()}
    return [
        (scripts[CONTINUES[name]], script)
        for name, script in scripts.items()
        if CONTINUES.get(name) in scripts
    ]


def short_scripts() -> list[Path]:
    """Each script of learn/in-short/ comes after the one that it continues."""
    scripts = [REPOSITORY / "learn" / "in-short" / f"{name}.py" for name in ("single", *SHORT)]
    return [script for script in scripts if script.exists()]


def unified_diff(before: Path, after: Path) -> str:
    """As `diff -u` has it: three unchanged lines around every change."""
    names = (str(path.relative_to(REPOSITORY)) for path in (before, after))
    texts = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(*texts, *names))


def with_diffs(page: str) -> str:
    """A page with new diffs of short scripts, without imports and without lines of comments."""

    def code(name: str) -> list[str]:
        text = (REPOSITORY / "learn" / "in-short" / f"{name}.py").read_text()
        lines = text[text.index("\nSTEPS = ") :].splitlines(keepends=True)
        return [line for line in lines if not line.lstrip().startswith("#")]

    def new_block(match: re.Match) -> str:
        before, after = match[1], match[2]
        lines = difflib.unified_diff(code(before), code(after), f"{before}.py", f"{after}.py", n=1)
        lines = [re.sub("@@ .*", "@@", line) for line in lines]
        return f"```diff\n{''.join(lines)}```"

    return re.sub(r"```diff\n--- (\w+)\.py\n\+\+\+ (\w+)\.py\n.*?```", new_block, page, flags=re.S)


def write_diffs() -> list[Path]:
    files = []
    for name in ("README.md", "learn/in-short/README.md"):
        page = REPOSITORY / name
        if page.exists():
            files.append(page)
            page.write_text(with_diffs(page.read_text()))
    for before, after in pairs():
        files.append(after.with_name("changes.diff"))
        files[-1].write_text(unified_diff(before, after))
    return files


if __name__ == "__main__":
    for file in write_diffs():
        print(f"wrote {file.relative_to(REPOSITORY)}")
