"""The tiny Llama comes out the same. A run's folders write text, and open as the pages say."""

import filecmp
import platform
import re

import pytest
import torch
from helpers.assertions import assert_one_sentence
from helpers.models import TINY_LLAMA
from helpers.runner import CHAPTER_3, REPOSITORY, python, run_tool
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@pytest.mark.skipif(
    platform.python_version() != "3.11.7",
    reason="they were made from the standard library of Python 3.11.7",
)
def test_tiny_llama_and_chat_are_reproduced_byte_for_byte(tmp_path):
    python(REPOSITORY / "models" / "make-tiny-llama.py", "--output-dir", tmp_path)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in TINY_LLAMA.iterdir()) == names
    assert filecmp.cmpfiles(tmp_path, TINY_LLAMA, names, shallow=False)[0] == names
    python(REPOSITORY / "models" / "make-tiny-chat.py", "--output-dir", tmp_path)
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
    (whole / "step-00000002" / "parameters.json").unlink()  # of an older version
    output = run_tool(tmp_path, "generate.py", whole / "step-00000002", status=1)
    assert_one_sentence(output, "has no parameters.json")
    one = [generate(tmp_path, whole / "final", *short, "--top-k", 1, "--seed", i) for i in (1, 2)]
    assert one == [generate(tmp_path, whole / "final", *greedy)] * 2


@pytest.fixture
def final(tmp_path):
    folder = tmp_path / "outputs" / "mine" / "final"
    config = AutoConfig.from_pretrained(TINY_LLAMA)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(folder)
    return folder


def test_open_and_store_in_bf16(final, tmp_path, monkeypatch):
    """docs/after-training.md: the lines of Python on the page."""
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "after-training.md").read_text()
    opens, stores = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    whole, half = {}, {}
    exec(opens, whole)
    exec(stores, half)
    assert whole["model"].dtype == torch.float32
    copy = tmp_path / "outputs" / "mine-bf16"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (final, copy)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)
    ids = AutoTokenizer.from_pretrained(copy)("def main():", return_tensors="pt")["input_ids"]
    assert torch.equal(ids, whole["tokenizer"]("def main():", return_tensors="pt")["input_ids"])
    again = AutoModelForCausalLM.from_pretrained(copy)
    assert again.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(again(ids).logits, half["model"](ids).logits)
