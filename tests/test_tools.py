"""tools/: the tiny Llama comes out the same, and a run's folders write text."""

import filecmp
import platform
import subprocess
import sys

import pytest
from conftest import TINY_LLAMA
from runner import CHAPTER_3, REPOSITORY, run_tool


@pytest.mark.skipif(
    platform.python_version() != "3.11.7",
    reason="they were made from the standard library of Python 3.11.7",
)
def test_tiny_llama_and_chat_are_reproduced_byte_for_byte(tmp_path):
    command = [sys.executable, REPOSITORY / "models" / "make-tiny-llama.py"]
    subprocess.run([*command, "--output-dir", tmp_path], check=True)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in TINY_LLAMA.iterdir()) == names
    assert filecmp.cmpfiles(tmp_path, TINY_LLAMA, names, shallow=False)[0] == names
    command = [sys.executable, REPOSITORY / "models" / "make-tiny-chat.py"]
    subprocess.run([*command, "--output-dir", tmp_path], check=True)
    file = "stdlib.jsonl"
    assert filecmp.cmp(tmp_path / file, REPOSITORY / "models" / "tiny-chat" / file, shallow=False)


def generate(folder, *arguments):
    return run_tool(folder, "generate.py", *arguments)


@pytest.mark.rest
def test_generate(trainer, tmp_path):
    """Text of whole and of sharded checkpoints; the seed decides, and greedy text needs none."""
    short = ["--prompt", "def ", "--max-new-tokens", 8]
    whole = trainer("--max-steps", 2).folder
    first, again, other = (generate(tmp_path, whole / "final", *short, "--seed", i) for i in "112")
    assert first.startswith("def ")
    assert again == first
    assert other != first
    sharded = trainer("--max-steps", 2, name="fsdp", processes=3, script=CHAPTER_3).folder
    greedy = [*short, "--temperature", 0]
    for folder in (whole, sharded):
        final, step = (generate(tmp_path, folder / n, *greedy) for n in ("final", "step-00000002"))
        assert final == step
    one = [generate(tmp_path, whole / "final", *short, "--top-k", 1, "--seed", i) for i in (1, 2)]
    assert one == [generate(tmp_path, whole / "final", *greedy)] * 2
