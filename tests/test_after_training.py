"""docs/after-training.md: the lines of Python on the page."""

import re

import pytest
import torch
from conftest import TINY_LLAMA
from runner import REPOSITORY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PAGE = (REPOSITORY / "docs" / "after-training.md").read_text()


@pytest.fixture
def final(tmp_path):
    folder = tmp_path / "outputs" / "mine" / "final"
    config = AutoConfig.from_pretrained(TINY_LLAMA)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(folder)
    return folder


def test_open_and_store_in_bf16(final, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opens, stores = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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
